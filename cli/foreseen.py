"""The result of a run in check mode: for each task what was executed, what is only foreseen, and what nobody can know.

Programs get a RunOutcome that has `mode` and `tasks` besides. People get a table, and the diffs if they were asked for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from agentctl.store.canonical import loads

from .render import Printer, beginning, clean

if TYPE_CHECKING:
    from agentctl.coordinator.plan import CompiledTask
    from agentctl.store.engine import Store
    from agentctl.store.policy import Policy

BATCH = 500
SHOWN_ROWS = 200
"""Most tasks that people are shown; programs get all."""

SHOWN_WORDS = 120

_WORDS = {
    "executed": "executed",
    "predicted": "predicted",
    "requires_execution": "needs execution",
    "skipped": "skipped",
    "failed": "would fail",
    "not_reached": "not reached",
}


def print_foreseen(printer: Printer, store: Store, run_id: str, outcome: dict[str, Any]) -> None:
    """The outcome of a run in check mode on stdout."""
    rows = foreseen_tasks(store, run_id)
    data = {**outcome, "mode": "check", "tasks": rows}
    printer.result("RunOutcome", data, lambda out: _for_people(out, run_id, outcome, rows))


def foreseen_tasks(store: Store, run_id: str) -> list[dict[str, Any]]:
    """One object for each compiled task, in compiled order."""
    from agentctl.coordinator.plan import Plan
    from agentctl.store.policy import Policy

    plan = Plan.from_json(loads(store.run_documents(run_id).plan_json))
    snapshot = store.snapshot(run_id)
    policy = Policy.from_json(plan.policy)
    tasks = list(plan.tasks.values())
    rows: list[dict[str, Any]] = []
    results: dict[str, str] = {}
    for start in range(0, len(tasks), BATCH):
        some = tasks[start : start + BATCH]
        found = store.task_outputs(snapshot.run, [task.position for task in some])
        for task in some:
            output, error = found.get(task.position, (None, None))
            row = _row(policy, task, snapshot.tasks[task.position].state, output, error)
            if task.uses_kind != "action" and row["result"] == "executed":
                # What gathers the outputs of others is known only as far as they are.
                unknown = [need for need in task.needs if results.get(need) == "requires_execution"]
                if unknown:
                    row.update(result="requires_execution", changed=None, dependsOn=unknown)
            results[task.id] = row["result"]
            rows.append(row)
    return rows


def _row(
    policy: Policy, task: CompiledTask, state: str, output_json: str | None, error_json: str | None
) -> dict[str, Any]:
    output = loads(output_json) if output_json is not None else {}
    error = loads(error_json) if error_json is not None else None
    if not isinstance(output, dict):
        output = {}
    kind = task.action_kind or task.uses_kind
    how = _how(kind, state, output)
    known = how in ("executed", "predicted")
    return {
        "taskId": task.id,
        "kind": kind,
        "state": state,
        "result": how,
        "predictability": task.predictability,
        "changed": output.get("changed") if known else (None if how == "requires_execution" else False),
        "path": output.get("path") if kind == "builtin.write" else None,
        "diff": output.get("diff") if kind == "builtin.write" else None,
        "approval": _asks(policy, task, how, output),
        "expectedEffect": output.get("expectedEffect"),
        "dependsOn": output.get("dependsOn", []),
        "reason": _reason(how, output, error),
    }


def _how(kind: str, state: str, output: dict[str, Any]) -> str:
    if state != "succeeded":
        return state if state in ("skipped", "failed") else "not_reached"
    if output.get("status") == "requires_execution" and output.get("predictability") == "requires_execution":
        return "requires_execution"
    if kind == "builtin.write" or (kind == "builtin.read" and output.get("foreseen") is True):
        return "predicted"
    return "executed"


def _asks(policy: Policy, task: CompiledTask, how: str, output: dict[str, Any]) -> str | None:
    """Why a real run would ask a person before this task, or None."""
    from agentctl.coordinator.kinds import decision_on

    if how not in ("predicted", "requires_execution", "executed"):
        return None
    if task.action_kind == "builtin.write" and output.get("changed") is False and how == "predicted":
        return None
    decision = decision_on(policy, task.action_kind, interactive=True)
    return decision.reason if decision is not None and decision.needs_approval else None


def _reason(how: str, output: dict[str, Any], error: dict[str, Any] | None) -> str | None:
    if how == "not_reached":
        return "the run ends before"
    if error is not None:
        return f"{error.get('code', 'failed')}: {error.get('message', '')}"
    if how == "skipped":
        return str(output.get("reason", "skipped"))
    if how == "requires_execution" and output.get("dependsOn"):
        names = output["dependsOn"]
        return f"depends on {', '.join(names[:5])}" + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    reason = output.get("reason") if how == "requires_execution" else None
    return None if reason is None else str(reason)


def _for_people(out: Printer, run_id: str, outcome: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    counts = Counter(row["result"] for row in rows)
    told = ", ".join(f"{counts[how]} {word}" for how, word in _WORDS.items() if counts[how])
    out.line(f"{run_id} check {out.state(outcome['state'])}: {told}; nothing was changed")
    error = outcome["error"]
    if isinstance(error, dict) and error.get("message"):
        of = f"task {clean(error['taskId'])}: " if error.get("taskId") else ""
        out.line(f"  {of}{error.get('code', 'error')}: {clean(error['message'])}")
    out.line()
    table = [(row["taskId"], row["kind"], _WORDS[row["result"]], _said(row)) for row in rows[:SHOWN_ROWS]]
    out.table(("TASK", "ACTION", "RESULT", "WHAT"), table)
    if len(rows) > SHOWN_ROWS:
        out.line(f"and {len(rows) - SHOWN_ROWS} more (`--output json` has all)")
    for row in rows:
        if row["diff"]:
            out.line()
            out.line("\n".join(_painted(out, line) for line in row["diff"].split("\n")).rstrip("\n"))


def _said(row: dict[str, Any]) -> str:
    words = []
    if row["path"] is not None:
        words.append(f"{'would write' if row['changed'] else 'leaves as it is'} {row['path']}")
    effect = row["expectedEffect"]
    if isinstance(effect, dict) and effect.get("command"):
        said = " ".join(["would start", str(effect["command"]), *map(str, effect.get("args", []))])
        words.append(beginning(said, SHOWN_WORDS))
    elif isinstance(effect, dict) and row["kind"] == "builtin.long_term_memory.write":
        words.append(beginning(f"would write the entry {effect.get('key')} in {effect.get('namespace')}", SHOWN_WORDS))
    if row["kind"] == "agent" and row["result"] == "requires_execution" and not row["dependsOn"]:
        words.append("would ask a model")
    if row["reason"]:
        words.append(str(row["reason"]))
    elif row["dependsOn"]:
        count = len(row["dependsOn"])
        words.append(f"depends on {count} {'task' if count == 1 else 'tasks'}")
    if row["approval"]:
        words.append("asks a person first")
    return "; ".join(words) or "-"


def _painted(out: Printer, line: str) -> str:
    color = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    return out.paint(clean(line), color)
