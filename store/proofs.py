"""What of a run can be computed again from its rows, and what its rows have to agree on (`db verify`).

Every function takes the open transaction, reads each row once, and returns what does not fit, in words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from . import audit, protocols, runs, seals
from .answers import MAX_UNITS
from .canonical import canonical, effect_id, hex_digest, text_digest
from .database import Connection, all_rows
from .records import Run

_NOT_SENT = frozenset({"requested", "not_dispatched"})
"""Last events of an effect that is not in flight and has no result. Stops of earlier versions cancelled without one."""


_CREATED = frozenset({"run.created", "retry.created", "repair.created"})
_TAKEN_OVER = frozenset({"retry.task_reused", "repair.task_reused"})


def document_problems(tx: Connection, run_id: str) -> Iterator[str]:
    """The texts of a run against the first checkpoint, and the digest of its plan, computed again (contract 2.11)."""
    run = runs.get(tx, run_id)
    texts = runs.documents(tx, run_id)
    first = tx.execute("SELECT state_json FROM checkpoints WHERE run_id = ? AND sequence = 1", (run_id,)).fetchone()
    told = json.loads(first[0]).get("documents") if first else None
    if told is not None:
        found = runs.document_digests(texts.workflow_json, texts.plan_json, texts.inputs_json, texts.settings_json)
        yield from (f"the {name} of the run does not fit its digest" for name in found if found[name] != told[name])
    try:
        plan = json.loads(texts.plan_json)
    except ValueError:
        yield "the plan of the run is no JSON"
        return
    if told is not None and not plan:
        return
    names = ("workflowName", "workflowDigest", "order", "maxConcurrency", "tasks", "requirements")
    if hex_digest(canonical([plan.get(name) for name in names])) != run.plan_digest:
        yield "the plan of the run does not fit its digest"
    if plan.get("workflowDigest") != run.workflow_digest:
        yield "the digest of the workflow is not the one in the plan"


def effect_problems(tx: Connection, run_id: str) -> Iterator[str]:
    """Identity and input of every effect, computed again (contract 5.1)."""
    run = runs.get(tx, run_id)
    for known, task_id, attempt, ordinal, operation, key, digest, text, keyed in tx.execute(
        "SELECT e.effect_id, a.task_id, a.number, e.ordinal, e.operation, e.idempotency_key, e.input_digest, "
        # A repetition has the key of what it repeats (see `effects.start`).
        "e.input_json, e.idempotency_key IN (SELECT o.effect_id FROM effects o JOIN attempts b USING (attempt_id) "
        "WHERE b.task_no = a.task_no AND b.number < a.number AND e.idempotency = 'keyed' "
        "AND o.idempotency = 'keyed' AND o.input_digest = e.input_digest) "
        "FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
        "WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ?",
        (run.first_task, run.first_task + run.task_count - 1, run_id),
    ):
        if hex_digest(text) != digest:
            yield f"the input of effect {known[:12]} of task {task_id} does not fit its digest"
        if effect_id(run_id, task_id, attempt, ordinal, operation, digest) != known or not (key == known or keyed):
            yield f"effect {known[:12]} of task {task_id} is not the one that its identity names"


def result_problems(tx: Connection, run: Run) -> Iterator[str]:
    """The output of a task is the result of its last attempt, which is that of the effect that it names."""
    for (task_id,) in tx.execute(
        "SELECT t.task_id FROM tasks t JOIN attempts a ON a.task_no = t.task_no AND a.number = t.attempt "
        "LEFT JOIN effects e ON e.effect_id = a.result_effect "
        "WHERE t.task_no BETWEEN ? AND ? AND t.state = 'succeeded' AND a.outcome = 'succeeded' "
        "AND (a.result_effect IS NULL OR e.status = 'succeeded') "
        "AND t.output_json IS NOT COALESCE(a.result_json, e.result_json, '{}')",
        (run.first_task, run.first_task + run.task_count - 1),
    ):
        yield f"the output of task {task_id} is not the result of its attempt"


def call_problems(tx: Connection, run: Run) -> Iterator[str]:
    """Each tool call and its effect end together (seed), and what a call says of input and output is so."""
    sent = ("started", "succeeded", "failed", "uncertain")
    calls = {
        row[0]: row[1:]
        for row in tx.execute(
            "SELECT effect_id, task_id, status, input_digest, output_digest FROM tool_calls WHERE run_id = ?",
            (run.run_id,),
        )
    }
    for effect, task_id, status, result, text in tx.execute(
        "SELECT e.effect_id, a.task_id, e.status, e.result_json, e.input_json FROM attempts a "
        "JOIN effects e ON e.attempt_id = a.attempt_id "
        # A provider may be named like this as well.
        "WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ? AND e.operation GLOB 'tool.*' AND e.effect_class <> 'model'",
        (run.first_task, run.first_task + run.task_count - 1, run.run_id),
    ):
        call = calls.pop(effect, None)
        if (call is not None) != (status in sent) or (call is not None and call[:2] != (task_id, status)):
            yield f"the tool call of effect {effect[:12]} of task {task_id} is not {status} as its effect is"
        elif call is not None:
            digest = text_digest(result) if status == "succeeded" and result is not None else None
            asked = json.loads(text)
            given = text_digest(canonical(asked.get("input"))) if isinstance(asked, dict) else None
            if call[2:] != (given, digest):
                yield f"the tool call of effect {effect[:12]} of task {task_id} does not fit its digests"
    for effect in calls:
        yield f"there is a tool call of an effect {effect[:12]}, which is not there"


def ledger_problems(tx: Connection, run_id: str) -> Iterator[str]:
    """The lines of the ledger against its reservations; only dimensions with a limit have them."""
    sums: dict[str, dict[str, int]] = {"settled": {}, "open": {}}
    # Added up here: the database gives up where a sum needs more than 64 bits; the ledger stays at its largest number.
    for dimension, state, units in tx.execute(
        "SELECT dimension, state, CASE state WHEN 'settled' THEN actual ELSE units END FROM budget_reservations "
        "WHERE run_id = ? AND state IN ('settled', 'open')",
        (run_id,),
    ):
        sums[state][dimension] = min(sums[state].get(dimension, 0) + (units or 0), MAX_UNITS)
    for dimension, used, reserved in tx.execute(
        "SELECT dimension, used, reserved FROM budget_lines WHERE run_id = ? AND limit_units IS NOT NULL "
        "ORDER BY dimension",
        (run_id,),
    ):
        settled, opened = sums["settled"].get(dimension, 0), sums["open"].get(dimension, 0)
        if reserved != opened:
            yield f"the ledger holds {reserved} of {dimension}, its open reservations {opened}"
        if used != settled:
            yield f"the ledger has used {used} of {dimension}, its reservations {settled}"


def trail_problems(tx: Connection, run: Run) -> list[str]:
    """The audit trail has no gap, and what it tells of tasks, effects, reservations and the run is in the tables."""
    problems: list[str] = []
    told = _Told()
    expected = 0
    trace: str | None = None
    rows = tx.execute(
        "SELECT sequence, event_type, task_id, trace_id, payload_json, created_at FROM audit_events "  # noqa: S608
        f"WHERE {audit.OF_RUN} ORDER BY event_no",
        (run.run_id, 0),
    )
    for expected, (sequence, kind, task_id, trace_id, text, at) in enumerate(rows, 1):
        if sequence != expected:
            problems.append(f"the audit trail has a gap before event {sequence}")
            return problems
        try:
            payload = json.loads(text)
        except ValueError:
            payload = None
        if not isinstance(payload, dict):
            problems.append(f"event {sequence} of the audit trail is damaged")
            continue
        # Each resume has a trace of its own, and says which.
        if trace is None or (kind == "run.driver" and "traceId" in payload):
            trace = payload.get("traceId", trace_id)
        if trace_id != trace:
            problems.append(f"event {sequence} of the audit trail belongs to another run")
        told.take(kind, task_id, payload, at)
    last = tx.execute("SELECT audit_sequence FROM runs WHERE run_id = ?", (run.run_id,)).fetchone()
    if last is None or last[0] != expected:
        problems.append(f"the audit trail has a gap: it ends at event {expected}")
    if trace != run.trace_id:
        problems.append("the audit trail belongs to another run: its last trace is not that of the run")
    problems += told.against(tx, run)
    return problems


class _Told:
    """What the events of a trail, taken in order, say of the present."""

    def __init__(self) -> None:
        self.run = "running"
        self.created: dict[str, Any] = {}
        self.tasks: dict[str, str] = {}
        self.decisions: dict[str, str] = {}
        self.requests: dict[str, tuple[Any, Any]] = {}
        self.effects: dict[str, str] = {}
        self.seals: dict[str, list[str | None]] = {}
        self.superseded: set[str] = set()
        self.begun: dict[str, int] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        self.reservations: dict[tuple[str, int], tuple[str, dict[str, int]]] = {}
        self.remote: dict[tuple[str, str], list[Any]] = {}

    def take(self, kind: str, task_id: str | None, payload: dict[str, Any], at: int) -> None:
        """The next event; `at` is when it was written (epoch ms), with what it tells of and by the same clock."""
        if kind in ("task.transition", "replay.task_recorded") and task_id is not None:
            self.tasks[task_id] = str(payload.get("to"))
            if payload.get("to") == "running":
                self.begun.setdefault(task_id, at)
        elif kind in _CREATED:
            self.created = payload
        elif kind in _TAKEN_OVER and task_id is not None:
            self.tasks[task_id] = str(payload.get("to"))
            self.decisions[task_id] = str(payload.get("decisionDigest"))
        elif kind == "run.state":
            self.run = str(payload.get("to"))
        elif kind == "effect.superseded":
            self.superseded.add(str(payload.get("effectId")))
        elif kind.startswith("effect.") and kind != "effect.reconciled":
            effect = str(payload.get("effectId"))
            self.effects[effect] = kind.removeprefix("effect.")
            known = self.seals.setdefault(effect, [None, None])
            if "inputDigest" in payload:
                self.requests[effect] = (payload["inputDigest"], payload.get("operation"))
                known[0] = payload.get("seal")
            elif "seal" in payload:
                known[1] = payload["seal"]
            if kind == "effect.started":
                self.sent[effect] = (payload.get("dispatch", 0), at)
            elif kind == "effect.not_dispatched" or (kind == "effect.cancelled" and "reason" not in payload):
                # Nothing had left: that dispatch does not count.
                count, last = self.sent.get(effect, (0, at))
                self.sent[effect] = (count - 1, last)
        elif kind == "protocol.call":
            self.remote["call", str(payload.get("effectId"))] = [payload.get("status"), payload.get("stateDigest")]
        elif kind == "protocol.session":
            said = [payload.get(name) for name in ("status", "stateDigest", "generation")]
            self.remote["session", f"{payload.get('protocol')} {task_id}"] = said
        elif kind in ("budget.reserved", "budget.reconciled") and "reservationId" in payload:
            state = "open" if kind == "budget.reserved" else "released" if "released" in payload else "settled"
            units: dict[str, int] = payload.get("released") or payload.get("units") or {}
            self.reservations[str(payload["reservationId"]), payload.get("dispatch", 0)] = (state, units)

    def against(self, tx: Connection, run: Run) -> Iterator[str]:
        """Where the tables say something else."""
        if self.run != run.state:
            yield f"the run is {run.state}, its audit trail says {self.run}"
        if self.created.get("mode", run.mode) != run.mode:
            yield f"the audit trail tells of the creation of a run of mode {self.created['mode']}"
        head = (self.created.get("workflowDigest"), self.created.get("planDigest"), self.created.get("tasks"))
        if head != (run.workflow_digest, run.plan_digest, run.task_count):
            yield "the audit trail tells of the creation of another run"
        span = (run.first_task, run.first_task + run.task_count - 1)
        for task_id, state, begun in tx.execute(
            "SELECT task_id, state, started_at FROM tasks WHERE task_no BETWEEN ? AND ?", span
        ):
            if self.tasks.pop(task_id, "pending") != state:
                yield f"task {task_id} is {state}, the audit trail says something else"
            if self.begun.get(task_id) != begun:
                yield f"the audit trail tells of another start of task {task_id}"
        if self.tasks:
            yield f"the audit trail tells of a task {min(self.tasks)}, which is not there"
        yield from self._lineage_against(tx, run, span)
        yield from self._effects_against(tx, run, span)
        kept_remote = protocols.told_by_rows(tx, run.run_id)
        for what, name in sorted(kept_remote.keys() | self.remote.keys()):
            if kept_remote.get((what, name)) != self.remote.get((what, name)):
                yield f"the audit trail tells something else of the protocol {what} {name[:40]}"
        rows = all_rows(
            tx.execute(
                "SELECT reservation_id, dispatch, dimension, state, CASE state WHEN 'settled' THEN actual ELSE units "
                "END FROM budget_reservations WHERE run_id = ?",
                (run.run_id,),
            )
        )
        kept: dict[tuple[str, int], tuple[str, dict[str, int]]] = {}
        for name, dispatch, dimension, state, units in rows:
            kept.setdefault((name, dispatch), (state, {}))[1][dimension] = units
        for key in sorted(kept.keys() | self.reservations.keys()):
            if kept.get(key) != self.reservations.get(key):
                yield f"the audit trail tells something else of the reservation {key[0]}, dispatch {key[1]}"

    def _lineage_against(self, tx: Connection, run: Run, span: tuple[int, int]) -> Iterator[str]:
        """Where the run and its reused tasks come from, and why they could be reused (contract 9.4)."""
        row = tx.execute("SELECT lineage_json FROM runs WHERE run_id = ?", (run.run_id,)).fetchone()
        lineage = None if row is None or row[0] is None else json.loads(row[0])
        if self.created.get("lineage") != lineage:
            yield "the audit trail tells of another origin of the run"
        if (self.created.get("sourceRunId"), self.created.get("parentRunId")) != (run.source_run_id, run.parent_run_id):
            yield "the audit trail tells of another source of the run"
        for task_id, text in tx.execute(
            "SELECT task_id, reuse_decision_json FROM tasks WHERE task_no BETWEEN ? AND ? AND disposition = 'reused'",
            span,
        ):
            if text is None or self.decisions.pop(task_id, None) != text_digest(text):
                yield f"the audit trail tells of another reason to reuse task {task_id}"
        if self.decisions:
            yield f"the audit trail tells that task {min(self.decisions)} was reused, which was not"

    def _effects_against(self, tx: Connection, run: Run, span: tuple[int, int]) -> Iterator[str]:
        columns = ", ".join(f"e.{name}" for name in (seals.ESTIMATE, *seals.REQUEST, *seals.END))
        split = len(seals.REQUEST)
        for effect, status, digest, operation, superseded, dispatches, begun, estimate, *rest in tx.execute(
            "SELECT e.effect_id, e.status, e.input_digest, e.operation, e.superseded, e.dispatches, e.started_at, "  # noqa: S608
            f"{columns} FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
            "WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ?",
            (*span, run.run_id),
        ):
            last = self.effects.pop(effect, "")
            waits = status in ("requested", "waiting_for_approval", "cancelled")
            if last != status and not (waits and last in _NOT_SENT):
                yield f"effect {effect[:12]} is {status}, the audit trail says something else"
            if self.sent.get(effect, (0, None)) != (dispatches, begun):
                yield f"the audit trail tells of other dispatches of effect {effect[:12]}"
            if self.requests.get(effect) != (digest, operation):
                yield f"the audit trail tells of another request of effect {effect[:12]}"
            asked, ended_with = self.seals.get(effect, (None, None))
            if asked is None:
                continue  # of an earlier version, which sealed nothing
            if seals.seal(seals.with_estimate(rest[:split], estimate)) != asked:
                yield f"effect {effect[:12]} is not what it was when it was requested"
            if ended_with is not None and seals.seal(rest[split:]) != ended_with:
                yield f"effect {effect[:12]} is not what it was when it ended"
            if bool(superseded) != (effect in self.superseded):
                yield f"the audit trail does not tell whether effect {effect[:12]} was superseded"
        if self.effects:
            yield f"the audit trail tells of an effect {min(self.effects)[:12]}, which is not there"
