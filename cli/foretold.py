"""`--plan` of the verbs that decide little: what a fork, a replay or a resume would do. Nothing is changed.

Each plan is a dictionary for programs, and has a function that shows it to people.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentctl.store.states import LEAVES_NO_TRACE, REPEATABLE_IDEMPOTENCY, TASK_FINAL

from .render import Printer, clean, counted, counts_text, effect_status, show_list

if TYPE_CHECKING:
    from agentctl.coordinator.plan import Plan
    from agentctl.store.engine import Store
    from agentctl.store.records import Run
    from agentctl.store.views import Views

HARMLESS = LEAVES_NO_TRACE | {"model"}
"""Classes of effects that change nothing outside of the run."""


# -- fork --------------------------------------------------------------------------------------------------------------


def fork_warnings(store: Store, source: Run, plan: Plan) -> list[str]:
    """What else was made from the source, and has done what must not be repeated."""
    from agentctl.coordinator.recovery_plan import done_before

    return list(done_before(store.done_elsewhere(source.run_id), plan.tasks))


def fork_plan(store: Store, views: Views, source: Run, plan: Plan, base: Path, *, interactive: bool) -> dict[str, Any]:
    """ForkPlan: everything is executed; `repeatedEffects` are those of the source that are not safe to do twice.

    Each with its `status`, and, where a person has concluded something about it, the `reconciliation`. What never
    happened by such a conclusion is not done a second time.
    """
    from agentctl.coordinator.fresh_work import fresh_work
    from agentctl.store.views import concluded_of

    repeated = []
    recorded = views.effects(source.run_id, None)
    concluded = concluded_of(recorded["reconciliations"])
    for effect in recorded["effects"]:
        asked = effect["request"]
        sent = effect["status"] in ("started", "succeeded", "uncertain")
        if sent and asked["effectClass"] not in HARMLESS and asked["idempotency"] not in REPEATABLE_IDEMPOTENCY:
            said = concluded.get(asked["id"])
            if said != "not_applied":
                about = {"effectId": asked["id"], "taskId": asked["taskId"], "status": effect["status"]}
                repeated.append(about if said is None else {**about, "reconciliation": said})
    return {
        "apiVersion": "agentctl.dev/fork-plan/v1",
        "sourceRunId": source.run_id,
        "workflow": source.workflow_name,
        "workflowDigest": source.workflow_digest,
        "planDigest": source.plan_digest,
        "workspace": str(base),
        "tasks": list(plan.order),
        **fresh_work(plan, list(plan.tasks.values()), interactive=interactive),
        "repeatedEffects": repeated,
        "warnings": fork_warnings(store, source, plan),
    }


def show_fork(out: Printer, data: dict[str, Any]) -> None:
    """ForkPlan for people."""
    out.line(f"fork of {data['sourceRunId']} ({clean(data['workflow'])}): {counted(len(data['tasks']), 'task')}")
    out.line(f"workspace {clean(data['workspace'])}")
    show_list(out, "executed afresh:", data["tasks"])
    show_list(out, "approvals that will be asked for:", data["approvalSummary"])
    if data["repeatedEffects"]:
        number = counted(len(data["repeatedEffects"]), "effect")
        out.line(f"{out.paint('warning', 'yellow')}: {number} of {data['sourceRunId']} will be done once more:")
        show_list(out, "", [f"{item['taskId']} ({effect_status(item)})" for item in data["repeatedEffects"]])
    for text in data["warnings"]:
        out.line(f"{out.paint('warning', 'yellow')}: {clean(text)}")


# -- replay ------------------------------------------------------------------------------------------------------------


def replay_plan(views: Views, source_id: str, exit_code: int) -> dict[str, Any]:
    """ReplayPlan of a source that was verified: nothing is executed, and the end is the source's."""
    outcome = views.outcome(source_id)
    status = views.status(source_id)
    return {
        "apiVersion": "agentctl.dev/replay-plan/v1",
        "sourceRunId": source_id,
        "workflow": status["workflow"],
        "sourceMode": status["mode"],
        "state": outcome["state"],
        "reason": outcome["reason"],
        "exitCode": exit_code,
        "taskCounts": status["taskCounts"],
        "artifacts": len(views.recovery(source_id)["artifacts"]),
        "executedTasks": [],
    }


def show_replay(out: Printer, data: dict[str, Any]) -> None:
    """ReplayPlan for people."""
    out.line(f"replay of {data['sourceRunId']} ({clean(data['workflow'])}): nothing is executed")
    out.line(f"recorded: {out.state(data['state'])}, {counts_text(data['taskCounts'])}; exit code {data['exitCode']}")
    if data["artifacts"]:
        out.line(f"{counted(data['artifacts'], 'artifact')} that it refers to, verified")


# -- resume ------------------------------------------------------------------------------------------------------------


def resume_plan(store: Store, views: Views, run_id: str) -> dict[str, Any]:
    """ResumePlan of a run that has not ended: what is settled, what would go on, and what waits for a person."""
    run = store.get_run(run_id)
    status = views.status(run_id)
    tasks, _ = views.tasks(run_id, limit=run.task_count)
    settled = [task["taskId"] for task in tasks if task["state"] in TASK_FINAL]
    open_tasks = [
        {"taskId": task["taskId"], "state": task["state"]} for task in tasks if task["state"] not in TASK_FINAL
    ]
    return {
        "apiVersion": "agentctl.dev/resume-plan/v1",
        "runId": run_id,
        "workflow": status["workflow"],
        "state": status["state"],
        "reason": status["reason"],
        "planDigest": run.plan_digest,
        "settledTasks": settled,
        "openTasks": open_tasks,
        "pendingApprovals": [item["approvalId"] for item in views.approvals(run_id, pending=True)],
        "uncertainEffects": [item["effectId"] for item in views.uncertain(run_id, limit=-1)[0]],
        "noFreshAttempt": views.barred(run_id),
        "drivenBy": run.driver,
    }


def show_resume(out: Printer, data: dict[str, Any]) -> None:
    """ResumePlan for people."""
    why = f" ({clean(data['reason'])})" if data["reason"] else ""
    out.line(f"resume of {data['runId']} ({clean(data['workflow'])}), {out.state(data['state'])}{why}")
    out.line(f"stays as it is: {counted(len(data['settledTasks']), 'task')}")
    show_list(out, "goes on:", [f"{item['taskId']} ({item['state']})" for item in data["openTasks"]])
    show_list(out, "waits for the answer of a person:", data["pendingApprovals"])
    show_list(out, "nobody knows whether these effects happened; they are not sent again:", data["uncertainEffects"])
    for fails, title in (
        (True, "fails, since a fresh attempt would repeat what must not be done twice:"),
        (False, "fails if its uncertain effect did not happen, as a fresh attempt would repeat others:"),
    ):
        show_list(out, title, [_barred(item) for item in data["noFreshAttempt"] if item["fails"] is fails])
    if data["drivenBy"] is not None:
        out.line(f"{clean(data['drivenBy'])} drives it; it would be followed")


def _barred(item: dict[str, Any]) -> str:
    names = ", ".join(name[:12] for name in item["standingEffects"][:5])
    more = len(item["standingEffects"]) - 5
    return f"{item['taskId']} (has done {names}{f' and {more} more' if more > 0 else ''})"
