"""The verb that undoes what a run has done (contract 5.7)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.faults import Faults

from .main import Settings, Verb, pass_settings
from .render import Printer, clean
from .run import ACTOR, EXIT_BY_STATE, foreground, open_store, signals_held, timeout_option, views_of, workers_option

if TYPE_CHECKING:
    from agentctl.coordinator.compensation import CompensationPlan
    from agentctl.coordinator.plan import Plan
    from agentctl.store.engine import Store

EXIT_BLOCKED = 3
SHOWN = 100


@click.command(cls=Verb)
@click.argument("run_name", metavar="SOURCE")
@click.option("--task", "tasks", metavar="TASK", multiple=True, help="Only what this task has done; may be repeated.")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be done, and do nothing.")
@workers_option
@timeout_option
@pass_settings
@click.pass_context
def compensate(
    context: click.Context,
    settings: Settings,
    run_name: str,
    tasks: tuple[str, ...],
    only_plan: bool,
    workers: int | None,
    timeout: float | None,
) -> None:
    """Undo what a run that has ended has done, by what its tasks declare under `compensate`.

    A run of its own carries it out, in reverse order, one task after the other. What is undone already is left alone,
    so after a partial failure the same command does the rest. Exit: 0 all undone, 3 something is blocked or waits for a
    person, 4 an inverse action failed, 130 cancelled.
    """
    from agentctl.coordinator.compensation import plan_compensation, start_compensation
    from agentctl.coordinator.plan import keeps_artifacts
    from agentctl.store.clock import SystemIds

    from . import pool  # noqa: F401  # its import takes a while, and nothing may interrupt what follows for long
    from .preflight import preflight

    with closing(open_store(settings)) as store:
        source_id = views_of(store).find_run(run_name)
        if only_plan:
            found, _, _ = plan_compensation(store, source_id, tasks)
            Printer(settings).result("CompensationPlan", found.as_json(), lambda out: _plan_for_people(out, found))
            context.exit(EXIT_BLOCKED if found.blocked else 0)

        def look(workflow: dict[str, Any], plan: Plan, base: str) -> None:
            preflight(workflow, plan, Path(base))
            if keeps_artifacts(plan):
                store.artifacts.blobs.require_writable()

        with signals_held():
            found, run_id = start_compensation(
                store,
                source_id,
                SystemIds(store.clock),
                tasks=tasks,
                actor=ACTOR,
                faults=Faults.from_environment(),
                before=look,
            )

            def tell(printer: Printer, store: Store, run_id: str | None) -> int:
                data = _outcome(store, found, run_id)
                printer.result("CompensationOutcome", data, lambda out: _outcome_for_people(out, data))
                code = 0 if run_id is None else EXIT_BY_STATE[str(data["state"])]
                return code or (EXIT_BLOCKED if found.blocked else 0)

            if run_id is None:
                context.exit(tell(Printer(settings), store, None))
        context.exit(foreground(settings, store, run_id, "started", workers=workers, timeout=timeout, outcome=tell))


def _outcome(store: Store, found: CompensationPlan, run_id: str | None) -> dict[str, Any]:
    """CompensationOutcome; without a run its own fields are null."""
    from agentctl.store.compensations import Compensations

    data: dict[str, Any] = {
        "runId": run_id,
        "sourceRunId": found.source_run_id,
        "traceId": None,
        "state": None,
        "reason": None,
        "compensatedTasks": [],
        "failedTasks": [],
        "blocked": [block.as_json() for block in found.blocked],
        "elsewhere": found.elsewhere_as_json(),
    }
    if run_id is not None:
        run = store.get_run(run_id)
        data |= {"traceId": run.trace_id, "state": run.state, "reason": run.reason}
        for task, state in Compensations(store.database, store.clock).tasks_by_state(run_id):
            if state == "succeeded":
                data["compensatedTasks"].append(task)
            elif state in ("failed", "cancelled"):
                data["failedTasks"].append(task)
    return data


def _blocked_for_people(out: Printer, blocked: list[dict[str, Any]]) -> None:
    for block in blocked[:SHOWN]:
        where = "" if block["taskId"] == "*" else f"{clean(block['taskId'])}: "
        out.line(f"  {where}{out.paint(block['rule'], 'yellow')}: {clean(block['message'])}")
    if len(blocked) > SHOWN:
        out.line(f"  and {len(blocked) - SHOWN} more")


def _elsewhere_for_people(out: Printer, elsewhere: list[dict[str, Any]]) -> None:
    """What the run has taken over from others, and how that is undone."""
    by_run: dict[str | None, list[str]] = {}
    for item in elsewhere:
        by_run.setdefault(item["runId"], []).append(clean(item["taskId"]))
    for run_id, tasks in by_run.items():
        shown = ", ".join(tasks[:SHOWN]) + (f" and {len(tasks) - SHOWN} more" if len(tasks) > SHOWN else "")
        if run_id is None:
            out.line(f"not undone, done by a run that was removed: {shown}")
            continue
        options = " ".join(f"--task {task}" for task in tasks) if len(tasks) <= 5 else ""
        out.line(f"not undone, done by {run_id}: {shown}")
        out.line(f"next: `{' '.join(filter(None, ('agentctl compensate', run_id, options)))}` undoes that")


def _plan_for_people(out: Printer, found: CompensationPlan) -> None:
    data = found.as_json()
    out.line(f"{out.bold(found.source_run_id)}: {len(found.inverses)} to undo, {len(found.already)} undone already")
    for item in data["tasks"][:SHOWN]:
        effects = ", ".join(effect[:12] for effect in item["sourceEffectIds"])
        out.line(f"  {clean(item['sourceTaskId'])}: action {clean(item['action'])} undoes {effects}")
    if len(data["tasks"]) > SHOWN:
        out.line(f"  and {len(data['tasks']) - SHOWN} more")
    if data["blocked"]:
        out.line("blocked:")
        _blocked_for_people(out, data["blocked"])
    _elsewhere_for_people(out, data["elsewhere"])


def _outcome_for_people(out: Printer, data: dict[str, Any]) -> None:
    source = data["sourceRunId"]
    if data["runId"] is None:
        out.line(
            f"{source}: nothing was undone"
            if data["blocked"] or data["elsewhere"]
            else f"{source}: there is nothing to undo"
        )
    else:
        why = f" ({data['reason']})" if data["reason"] else ""
        done = len(data["compensatedTasks"])
        noun = "task" if done == 1 else "tasks"
        out.line(f"{data['runId']} {out.state(data['state'])}{why}: {done} {noun} of {source} undone")
        for task in data["failedTasks"][:SHOWN]:
            out.line(f"  not undone: {clean(task)}")
    if data["blocked"]:
        out.line("blocked:")
        _blocked_for_people(out, data["blocked"])
    _elsewhere_for_people(out, data["elsewhere"])
    if data["runId"] is not None and data["state"] == "paused":
        out.line(f"next: `agentctl status {data['runId']}` shows what it waits for, `agentctl resume` goes on")
    elif data["failedTasks"]:
        out.line(f"next: `agentctl inspect {data['runId']}`, then `agentctl compensate {source}` tries the rest again")
