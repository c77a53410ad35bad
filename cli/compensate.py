"""The verb that undoes what a run has done (contract 5.7)."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.faults import Faults

from .main import Settings, Verb, pass_settings
from .recovery import EXIT_BLOCKED, workspace_of
from .render import Printer, clean, counted, give_up_stdout, warn
from .run import (
    ACTOR,
    EXIT_BY_STATE,
    Deadline,
    foreground,
    open_store,
    signals_held,
    timeout_option,
    views_of,
    workers_option,
)

if TYPE_CHECKING:
    from agentctl.coordinator.compensation import CompensationPlan
    from agentctl.coordinator.plan import Plan
    from agentctl.store.engine import Store

SHOWN = 100
INVERSE = "compensate--"
"""What the name of a task begins with that undoes another one."""


@click.command(cls=Verb)
@click.argument("run_name", metavar="SOURCE")
@click.option("--task", "tasks", metavar="TASK", multiple=True, help="Only what this task has done; may be repeated.")
@click.option("--workspace", type=click.Path(), metavar="DIR", help="Base of paths; else that of the source.")
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
    workspace: str | None,
    only_plan: bool,
    workers: int | None,
    timeout: Deadline | None,
) -> None:
    """Undo what a run that has ended has done, by what its tasks declare under `compensate`.

    A run of its own carries it out, in reverse order, one task after the other. What is undone already is left alone,
    so after a partial failure the same command does the rest. --workspace is for a source whose folder is gone.

    Exit: 0 all undone, 3 something is blocked or waits for a person, 4 an inverse action failed, 130 cancelled.
    """
    from agentctl.coordinator.compensation import plan_compensation, start_compensation
    from agentctl.coordinator.plan import keeps_artifacts
    from agentctl.store.clock import SystemIds

    from . import pool  # noqa: F401  # its import takes a while, and nothing may interrupt what follows for long
    from .preflight import preflight

    with closing(open_store(settings)) as store:
        source_id = views_of(store).find_run(run_name)
        source = store.get_run(source_id)
        place = None if workspace is None else str(workspace_of(workspace, "", source_id))
        note = ""
        if source.mode == "compensation":
            note = f": it is itself a compensation; `agentctl compensate {source.source_run_id}` undoes what is left"
        if only_plan:
            found, _, _ = plan_compensation(store, source_id, tasks)
            Printer(settings).result(
                "CompensationPlan", found.as_json(), lambda out: _plan_for_people(out, found, note)
            )
            if found.executable and place is None and not os.path.isdir(source.base_path):
                warn(settings, f"the workspace is gone: {source.base_path}; --workspace DIR names another one")
            context.exit(EXIT_BLOCKED if found.blocked else 0)

        def look(workflow: dict[str, Any], plan: Plan, base: str) -> None:
            home = workspace_of(workspace, base, source_id)
            preflight(workflow, plan, home, offline=settings.offline)
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
                base_path=place,
            )

            def tell(printer: Printer, store: Store, run_id: str | None) -> int:
                data = _outcome(store, found, run_id)
                code = 0 if run_id is None else EXIT_BY_STATE[str(data["state"])]
                code = code or (EXIT_BLOCKED if found.blocked else 0)
                try:
                    printer.result("CompensationOutcome", data, lambda out: _outcome_for_people(out, data, tasks, note))
                except OSError as error:
                    if run_id is None:
                        raise
                    # The run has ended as it has, whoever reads of it.
                    give_up_stdout(settings, error)
                return code

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
        "failures": [],
        "uncertainEffects": [],
        "pendingApprovals": [],
        "blocked": [block.as_json() for block in found.blocked],
        "elsewhere": found.elsewhere_as_json(),
        "warnings": found.warnings,
    }
    if run_id is not None:
        run = store.get_run(run_id)
        data |= {"traceId": run.trace_id, "state": run.state, "reason": run.reason}
        compensations = Compensations(store.database, store.clock)
        for task, state in compensations.tasks_by_state(run_id):
            if state == "succeeded":
                data["compensatedTasks"].append(task)
            elif state in ("failed", "cancelled"):
                data["failedTasks"].append(task)
        views = views_of(store)
        status = views.status(run_id)
        undone = compensations.undone_by(run_id)
        for item in views.failures(run_id, limit=SHOWN)[0]:
            task = item["taskId"].removeprefix(INVERSE)
            data["failures"].append({"taskId": task, "error": item["error"], "undone": task in undone})
        data |= {name: status[name] for name in ("uncertainEffects", "pendingApprovals")}
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
        out.advise(f"next: `{' '.join(filter(None, ('agentctl compensate', run_id, options)))}` undoes that")


def _plan_for_people(out: Printer, found: CompensationPlan, note: str = "") -> None:
    data = found.as_json()
    counts = f"{len(found.inverses)} to undo, {len(found.already)} undone already"
    out.advise(f"{out.bold(found.source_run_id)}: {counts}{note}")
    for item in data["tasks"][:SHOWN]:
        effects = ", ".join(effect[:12] for effect in item["sourceEffectIds"])
        out.line(f"  {clean(item['sourceTaskId'])}: action {clean(item['action'])} undoes {effects}")
    if len(data["tasks"]) > SHOWN:
        out.line(f"  and {len(data['tasks']) - SHOWN} more")
    if data["blocked"]:
        out.line("blocked:")
        _blocked_for_people(out, data["blocked"])
    _elsewhere_for_people(out, data["elsewhere"])
    _warnings_for_people(out, data["warnings"])


def _warnings_for_people(out: Printer, warnings: list[str]) -> None:
    for text in warnings[:SHOWN]:
        out.line(f"{out.paint('warning', 'yellow')}: {clean(text)}")
    if len(warnings) > SHOWN:
        out.line(f"  and {len(warnings) - SHOWN} more")


def _outcome_for_people(out: Printer, data: dict[str, Any], tasks: tuple[str, ...], note: str = "") -> None:
    source = data["sourceRunId"]
    if data["runId"] is None:
        out.advise(
            f"{source}: nothing was undone"
            if data["blocked"] or data["elsewhere"]
            else f"{source}: there is nothing to undo{note}"
        )
    else:
        why = f" ({data['reason']})" if data["reason"] else ""
        done = counted(len(data["compensatedTasks"]), "task")
        out.line(f"{data['runId']} {out.state(data['state'])}{why}: {done} of {source} undone")
        reasons = {item["taskId"]: item for item in data["failures"]}
        for task in data["failedTasks"][:SHOWN]:
            found = reasons.get(task, {})
            fault = found.get("error")
            said = "" if not fault else f": {fault.get('code', 'failed')}: {clean(fault.get('message', ''))}"
            what = "undone, though its inverse task has failed" if found.get("undone") else "not undone"
            out.line(f"  {what}: {clean(task)}{said}")
        for effect in data["uncertainEffects"][:SHOWN]:
            name = clean(effect["taskId"].removeprefix(INVERSE))
            out.line(f"  nobody knows whether {name} was undone: effect {effect['effectId']}, {effect['operation']}")
        for asked in data["pendingApprovals"][:SHOWN]:
            name = clean(asked["taskId"].removeprefix(INVERSE))
            out.line(
                f"  a person has to answer {asked['approvalId']}: {name}, {asked['tool']}: {clean(asked['reason'])}"
            )
    if data["blocked"]:
        out.line("blocked:")
        _blocked_for_people(out, data["blocked"])
    _elsewhere_for_people(out, data["elsewhere"])
    _warnings_for_people(out, data["warnings"])
    step = _next_step(data, tasks)
    if step is not None:
        out.advise(f"next: {step}")


def _next_step(data: dict[str, Any], tasks: tuple[str, ...]) -> str | None:
    """The command that helps, whole, so that it can be copied."""
    run_id = data["runId"]
    if run_id is None:
        return None
    again = " ".join(["agentctl compensate", data["sourceRunId"], *(f"--task {clean(name)}" for name in tasks)])
    if data["uncertainEffects"]:
        effect = data["uncertainEffects"][0]["effectId"]
        then = f"agentctl resume {run_id}" if data["state"] == "paused" else again
        return (
            f"find out what was done, then `agentctl effects reconcile {effect} --status applied|not-applied "
            f"--reason …`, then `{then}`"
        )
    if data["state"] == "paused" and data["pendingApprovals"]:
        asked = data["pendingApprovals"][0]["approvalId"]
        return f"`agentctl approvals approve|reject {asked}`, then `agentctl resume {run_id}` unless a pool does"
    if data["state"] in ("paused", "running"):
        return f"`agentctl status {run_id}` shows what it waits for, `agentctl resume {run_id}` goes on"
    if data["failedTasks"]:
        return f"`agentctl inspect {run_id}` shows why, then `{again}` tries the rest again"
    return None
