"""After the torture: is anything lost, doubled, or wrong? It reads what was ordered, the ledgers outside, the store.

It needs the folder only and starts nothing but `agentctl db verify`, so a folder that was kept can be judged again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orders
from ground import Ground

SHOWN = 20
SPAWN_NOISE = re.compile(
    r"Traceback \(most recent call last\):\n(?:  .*\n)+?.*reduction\.pickle\.load\(from_parent\)\n(?:  .*\n)*"
    r"(?:EOFError|_pickle\.UnpicklingError): .*\n"
)
"""What Python's own `multiprocessing` says in a child whose parent is killed while it starts that child."""


@dataclass
class Verdict:
    """What was found. `problems` is empty when everything is as it must be."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def blame(self, what: str) -> None:
        """One thing that is wrong."""
        self.problems.append(what)


def judge(ground: Ground) -> Verdict:
    """Everything that can be judged once all pools have ended."""
    verdict = Verdict()
    for order in ground.orders():
        if order.get("runId") is None:
            verdict.blame(f"{order['key']} was never handed in")
            continue
        _judge_run(ground, order, verdict)
    known = {order.get("runId") for order in ground.orders()}
    for run_id, name in ground.rows("SELECT run_id, workflow_name FROM runs"):
        if run_id not in known:
            verdict.blame(f"{run_id} ({name}) was never ordered: a submission was doubled")
    _judge_store(ground, verdict)
    _judge_logs(ground, verdict)
    return verdict


def _judge_run(ground: Ground, order: dict[str, Any], verdict: Verdict) -> None:
    run_id, key, kind = order["runId"], order["key"], order["kind"]
    state, reason = ground.rows("SELECT state, reason FROM runs WHERE run_id = ?", run_id)[0]
    items = orders.item_names(order["count"])
    lines = ledger_lines(ground, key)
    verdict.counts[f"runs: {state}"] += 1
    verdict.counts["items"] += len(items)
    verdict.counts["executions"] += lines.total()
    wanted = ("cancelled",) if order.get("cancelled") else ("succeeded",)
    if state not in wanted:
        verdict.blame(f"{key} ({run_id}) is {state} ({reason}), not {wanted[0]}")
    by_item = Counter[str]()
    for (item, _), often in lines.items():
        by_item[item] += often
    for item in set(by_item) - set(items):
        verdict.blame(f"{key}: a line for {item}, which nobody ordered")
    doubled = [item for item, often in by_item.items() if often > 1]
    verdict.counts["executed again by permission"] += 0 if kind in orders.NEVER_TWICE else len(doubled)
    if kind in orders.NEVER_TWICE:
        for item in doubled:
            verdict.blame(f"{key}: {item} was executed {by_item[item]} times")
    if state == "succeeded":
        for item in items:
            if not by_item[item]:
                verdict.blame(f"{key}: {item} was never executed, but the run has succeeded")
        _judge_output(ground, run_id, key, items, verdict)
    _judge_effects(ground, run_id, key, lines, verdict)
    if kind == "budget":
        _judge_budget(ground, run_id, key, len(items), state, verdict)
    if kind == "kept" and state == "succeeded":
        kept = ground.rows("SELECT COUNT(*) FROM artifact_refs WHERE run_id = ?", run_id)[0][0]
        if kept != len(items):
            verdict.blame(f"{key}: {kept} artifacts of {len(items)}")


def ledger_lines(ground: Ground, key: str) -> Counter[tuple[str, str]]:
    """(item, effect) -> how often the ledger outside has it."""
    path = orders.ledger(ground.folder, key)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return Counter((item, effect) for item, _, effect in (line.partition(" ") for line in text.splitlines()))


def _judge_output(ground: Ground, run_id: str, key: str, items: list[str], verdict: Verdict) -> None:
    """The result is that of running the tasks one by one, whoever was killed."""
    found = ground.rows("SELECT output_json FROM run_outputs WHERE run_id = ?", run_id)
    output = json.loads(found[0][0]) if found else None
    try:
        said = [item["output"]["stdout"].strip() for item in output["seen"]["items"]] if output else None
    except (KeyError, TypeError):
        said = None
    if said != items:
        verdict.blame(f"{key}: its output is not that of its {len(items)} items: {str(output)[:200]}")


def _judge_effects(ground: Ground, run_id: str, key: str, lines: Counter[tuple[str, str]], verdict: Verdict) -> None:
    """Every line belongs to an effect that was sent at least that often; every unreported one is listed."""
    sent = {
        effect: (status, dispatches)
        for effect, status, dispatches in ground.rows(
            "SELECT effect_id, status, dispatches FROM effects WHERE run_id = ?", run_id
        )
    }
    verdict.counts["dispatches"] += sum(dispatches for _, dispatches in sent.values())
    for (item, effect), often in lines.items():
        status, dispatches = sent.get(effect, ("unknown to the database", 0))
        if often > dispatches:
            verdict.blame(
                f"{key}: {item} was executed {often} times under {effect[:12]}, dispatched {dispatches} times"
            )
        if status in ("requested", "waiting_for_approval", "started"):
            verdict.blame(f"{key}: {effect[:12]} has a line and is {status}")
    reconciled: dict[str, str] = dict(
        ground.rows(  # type: ignore[arg-type]
            "SELECT effect_id, status FROM effect_reconciliations WHERE run_id = ? ORDER BY reconciliation_no", run_id
        )
    )
    executed = {effect for _, effect in lines}
    for effect, (status, _) in sent.items():
        verdict.counts["effects: uncertain"] += status == "uncertain"
        if status == "succeeded" and effect not in executed:
            verdict.blame(f"{key}: {effect[:12]} is confirmed and left no line")
        if reconciled.get(effect) == "not_applied" and effect in executed:
            verdict.blame(
                f"{key}: {effect[:12]} left a line after the ledger had shown none: its command had outlived it"
            )


def _judge_budget(ground: Ground, run_id: str, key: str, items: int, state: str, verdict: Verdict) -> None:
    limit, used, reserved = ground.rows(
        "SELECT limit_units, used, reserved FROM budget_lines WHERE run_id = ? AND dimension = 'processOutputBytes'",
        run_id,
    )[0]
    settled, opened = ground.rows(
        "SELECT COALESCE(SUM(actual) FILTER (WHERE state = 'settled'), 0), "
        "COALESCE(SUM(units) FILTER (WHERE state = 'open'), 0) FROM budget_reservations "
        "WHERE run_id = ? AND dimension = 'processOutputBytes'",
        run_id,
    )[0]
    verdict.counts["budget units used"] += used
    if (used, reserved) != (settled, opened):
        verdict.blame(f"{key}: {used} units used and {reserved} held, its reservations say {settled} and {opened}")
    if used + reserved > limit:
        verdict.blame(f"{key}: {used} used and {reserved} held of {limit} units")
    if state == "succeeded" and (used, reserved) != (items * orders.UNITS, 0):
        verdict.blame(f"{key}: {used} units used and {reserved} held instead of exactly {items * orders.UNITS} and 0")


def _judge_store(ground: Ground, verdict: Verdict) -> None:
    answer = ground.ask("db", "verify")
    if answer.code != 0:
        verdict.blame(f"`agentctl db verify` ended with {answer.code}: {(answer.out + answer.err)[:1500]}")
    for run_id, task_id, often in ground.rows(
        "SELECT run_id, task_id, COUNT(*) FROM audit_events WHERE event_type = 'task.transition' "
        "AND task_id IS NOT NULL AND json_extract(payload_json, '$.to') IN "
        "('succeeded', 'failed', 'skipped', 'cancelled') GROUP BY run_id, task_id HAVING COUNT(*) > 1"
    ):
        verdict.blame(f"{task_id} of {run_id} came to an end {often} times")
    for task_id, attempt, often in ground.rows(
        "SELECT task_id, attempt, COUNT(*) FROM effects WHERE confirmed = 1 "
        "GROUP BY run_id, task_id, attempt, ordinal HAVING COUNT(*) > 1"
    ):
        verdict.blame(f"{task_id}, attempt {attempt}: {often} confirmed effects")
    for holder, task_id in ground.rows("SELECT holder, task_id FROM attempts WHERE state = 'claimed'"):
        verdict.blame(f"{task_id} is still held by {holder}")
    left = ground.effect_processes()
    if left:
        verdict.blame(f"processes of effects are left: {left}")
    verdict.counts["largest delivery number"] = ground.rows("SELECT COALESCE(MAX(delivery), 0) FROM attempts")[0][0]


def _judge_logs(ground: Ground, verdict: Verdict) -> None:
    for path in sorted(ground.folder.glob("*.log")):
        text = SPAWN_NOISE.sub("", path.read_text(encoding="utf-8", errors="replace"))
        for word in ("Traceback (most recent call last)", "database is locked", "internal error"):
            if word in text:
                at = text.index(word)
                verdict.blame(f"{path.name} says: {text[max(0, at - 200) : at + 1500]}")
