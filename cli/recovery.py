"""Verbs that make a run from another one: retry, repair and fork (contract 4.12, 9).

Everything is planned before anything is written. A retry or repair that its plan does not allow makes no run, and says
for each task why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.errors import RecoveryBlocked, UsageError

from .documents import Sources, compile_file
from .main import Settings, Verb, pass_settings
from .render import SHOWN_ENTRIES, Printer, clean, counted, show_list, warn, warn_findings
from .run import (
    ACTOR,
    EXIT_BY_STATE,
    Deadline,
    foreground,
    open_store,
    outcome_for_people,
    require_recordable,
    require_terminal,
    signals_held,
    timeout_option,
    views_of,
    workers_option,
)
from .variables import variable_options

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.recovery_plan import RecoveryPlan
    from agentctl.store.engine import Store
    from agentctl.store.records import NewRun

EXIT_BLOCKED = 3
OUTCOMES = {"retry": "RetryOutcome", "repair": "RepairOutcome"}
PLANS = {"retry": "RetryPlan", "repair": "RepairPlan"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a command line asks of a retry or a repair."""

    file: str
    source: str
    roots: tuple[str, ...]
    restart_successful: bool
    only_plan: bool
    reason: str | None
    workspace: str | None
    priority: int
    interactive: bool
    vars_files: tuple[str, ...]
    var_pairs: tuple[str, ...]
    workers: int | None
    timeout: Deadline | None


def _recovery_options(function: Callable[..., None]) -> Callable[..., None]:
    """The arguments and options of retry and repair, given as one `asked`."""

    @wraps(function)
    def gathering(*arguments: Any, **given: Any) -> None:
        asked = Asked(**{field.name: given.pop(field.name) for field in fields(Asked)})
        function(*arguments, asked=asked, **given)

    wrapped: Callable[..., None] = gathering
    for option in (
        workers_option,
        timeout_option,
        variable_options,
        click.option("--interactive", is_flag=True, help="A person is here: `nonInteractive` does not apply."),
        click.option("--priority", type=click.IntRange(-10, 10), default=0, help="-10 to 10; higher is served first."),
        click.option("--workspace", type=click.Path(), metavar="DIR", help="Base of paths; else that of the source."),
        click.option("--reason", metavar="TEXT", help="Why; kept with the new run."),
        click.option("--restart-successful", is_flag=True, help="Also execute --from tasks that have succeeded."),
        click.option("--plan", "only_plan", is_flag=True, help="Show what would be done and why; change nothing."),
        click.option(
            "--from",
            "roots",
            multiple=True,
            metavar="TASK",
            help="Execute this task and all that depends on it; with * all tasks whose ids fit: 'each--*'.",
        ),
        click.argument("source", metavar="SOURCE"),
        click.argument("file", type=click.Path()),
    ):
        wrapped = option(wrapped)
    return wrapped


@click.command(cls=Verb)
@_recovery_options
@click.option("--failed", is_flag=True, help="From all that has neither succeeded nor was skipped by a decision.")
@pass_settings
@click.pass_context
def retry(context: click.Context, settings: Settings, failed: bool, asked: Asked) -> None:
    """Execute the failed part of a finished run again, in a new run with the results of the rest.

    FILE has to be the workflow of SOURCE, unchanged, with the same variables; inputs are those of SOURCE. What has
    succeeded is reused if that is proven to be safe. Give --failed, or --from for each task to begin with.

    Exit like `run`; 3 when the plan is blocked. With --plan: 0 when it could be done, 3 when it is blocked.
    """
    if failed == bool(asked.roots):
        raise UsageError(
            "give either --failed or --from TASK",
            remedy="--failed takes all that has neither succeeded nor was skipped",
        )
    context.exit(_Recovery("retry", settings, asked, failed=failed).run())


@click.command(cls=Verb)
@_recovery_options
@pass_settings
@click.pass_context
def repair(context: click.Context, settings: Settings, asked: Asked) -> None:
    """Execute a finished run again from some tasks on, with a corrected file, in a new run.

    FILE is the corrected workflow; inputs are those of SOURCE. Results that the correction does not touch are reused if
    that is proven to be safe. Give --from for each task to begin with; what depends on it follows.

    Exit like `run`; 3 when the plan is blocked. With --plan: 0 when it could be done, 3 when it is blocked.
    """
    if not asked.roots:
        raise UsageError("give --from TASK", remedy="--plan shows what would be executed and what reused")
    context.exit(_Recovery("repair", settings, asked).run())


class _Recovery:
    """One retry or repair, from the command line to its exit code."""

    def __init__(self, mode: str, settings: Settings, asked: Asked, *, failed: bool = False) -> None:
        self.mode, self.settings, self.asked, self.failed = mode, settings, asked, failed

    def run(self) -> int:
        if self.asked.interactive and not self.asked.only_plan:
            require_terminal()
        from . import pool  # noqa: F401  # its import takes a while, and nothing may interrupt what follows for long

        with closing(open_store(self.settings)) as store:
            document, plan = self._planned(store)
            if self.asked.only_plan:
                self._print_plan(plan, document)
                return 0 if plan.compatible else EXIT_BLOCKED
            if not plan.compatible:
                raise self._blocked(plan)
            for text in plan.warnings:
                warn(self.settings, text)
            with signals_held():
                new = self._create(store, document, plan)
            return foreground(
                self.settings,
                store,
                new.run_id,
                f"started ({_made_of(plan)})",
                workers=self.asked.workers,
                plan=plan.target,
                timeout=self.asked.timeout,
                outcome=print_outcome,
            )

    def _planned(self, store: Store) -> tuple[LoadedDocument, RecoveryPlan]:
        from agentctl.coordinator.compiler import merge_inputs
        from agentctl.coordinator.recovery import Wish, plan_recovery, require_source
        from agentctl.store.canonical import loads
        from agentctl.store.verification import require_sound

        source = store.read_source(views_of(store).find_run(self.asked.source))
        # Before the file is looked at: what it says of inputs that were never its own would only confuse.
        require_source(source)
        self.base = workspace_of(self.asked.workspace, source.run.base_path, source.run.run_id)
        given = loads(source.documents.inputs_json)
        sources = Sources(vars_files=self.asked.vars_files, var_pairs=self.asked.var_pairs)
        document, target = compile_file(self.asked.file, given, sources, workspace=self.base)
        warn_findings(self.settings, document.warnings)
        self.inputs = merge_inputs(document.model.spec.inputs, given)
        wish = Wish(self.mode, self.asked.roots, self.failed, self.asked.restart_successful)
        plan = plan_recovery(source, target, self.inputs, wish, store.artifacts.blobs.check)
        if plan.compatible:
            # What is blocked makes no run, and says why in its own words; the rest is held to the whole history.
            require_sound(store.database, source.run.run_id)
        if str(self.base) != source.run.base_path:
            plan.warnings.append(f"the workspace is {self.base}, that of the source was {source.run.base_path}")
        return document, plan

    def _blocked(self, plan: RecoveryPlan) -> RecoveryBlocked:
        number = counted(len(plan.blocks), "block")
        return RecoveryBlocked(
            f"the {self.mode} of {plan.source.run.run_id} is blocked: {number}",
            diagnostics=tuple(plan.findings()),
            remedy="--plan shows every task, and why",
            run_id=plan.source.run.run_id,
        )

    def _create(self, store: Store, document: LoadedDocument, plan: RecoveryPlan) -> NewRun:
        from agentctl.coordinator.plan import keeps_artifacts
        from agentctl.coordinator.submission import Circumstances, derive
        from agentctl.store.clock import SystemIds

        from .preflight import preflight
        from .stored_secrets import refuse_stored_secrets

        offline = self.settings.offline
        preflight(document.workflow, plan.target, self.base, frozenset(plan.rerun), offline=offline)
        refuse_stored_secrets(document, plan.target, {}, self.base)  # the inputs are those of the source
        if keeps_artifacts(plan.target):
            store.artifacts.blobs.require_writable()
        how = Circumstances(self.base, ACTOR, self.asked.priority, self.asked.interactive)
        return derive(store, document, plan, self.inputs, how, reason=self.asked.reason, ids=SystemIds(store.clock))

    def _print_plan(self, plan: RecoveryPlan, document: LoadedDocument) -> None:
        Printer(self.settings).result(
            PLANS[self.mode], plan.as_json(), lambda out: plan_for_people(out, plan), document.warnings
        )


def workspace_of(given: str | None, recorded: str, source: str) -> Path:
    """The base of paths of the new run: what is given, else that of the source, on which its results rest."""
    place = Path(recorded) if given is None else Path(given).absolute()
    if not place.is_dir():
        if given is None:
            raise UsageError(
                f"the workspace of {source} is gone: {recorded}", remedy="give another one with --workspace DIR"
            )
        raise UsageError(f"--workspace {given}: no such folder", remedy="give a folder that exists")
    require_recordable(place)
    return place


def _made_of(plan: RecoveryPlan) -> str:
    return f"{len(plan.reused)} reused, {len(plan.rerun)} to execute"


# -- for people ----------------------------------------------------------------------------------------------------


def plan_for_people(out: Printer, plan: RecoveryPlan) -> None:
    """A plan to read: what becomes of each task, and why."""
    from agentctl.coordinator.recovery_plan import some

    run = plan.source.run
    from_where = "whatever did not succeed" if plan.failed_only else clean(some(plan.roots))
    out.line(f"{plan.mode} of {run.run_id} ({clean(run.workflow_name)}, {run.state}) from {from_where}")
    verdict = "can be done" if plan.compatible else out.paint("is blocked", "red")
    blocked = f", {len(plan.blocks)} blocked" if plan.blocks else ""
    out.line(f"{verdict}: {_made_of(plan)}{blocked}")
    _blocks_for_people(out, plan)
    for word, title in (
        ("execute", "executed afresh:"),
        ("reuse", "reused:"),
        ("removed", "not in the file any more:"),
    ):
        show_list(out, title, [f"{item.task_id}: {item.reason}" for item in plan.verdicts if item.disposition == word])
    if plan.approvals:
        out.line(f"approvals that will be asked for: {', '.join(clean(item) for item in plan.approvals[:10])}")
        if len(plan.approvals) > 10:
            out.line(f"  and {len(plan.approvals) - 10} more")
    for text in plan.warnings:
        out.line(f"{out.paint('warning', 'yellow')}: {clean(text)}")


def _blocks_for_people(out: Printer, plan: RecoveryPlan) -> None:
    if plan.compatible:
        return
    from agentctl.coordinator.recovery_plan import advice, root_options

    out.line("why it is blocked:")
    said: set[str] = set()
    for block in plan.blocks[:SHOWN_ENTRIES]:
        out.line(f"  {clean(block.task_id)}: {block.rule}: {clean(block.message)}")
        hint = advice(block, plan)
        if hint is not None and hint not in said:
            said.add(hint)
            out.advise(f"    {clean(hint)}")
    if len(plan.blocks) > SHOWN_ENTRIES:
        out.line(f"  and {len(plan.blocks) - SHOWN_ENTRIES} more; --output json has all")
    roots = plan.suggested_roots()
    if roots and roots != plan.roots and not any(block.full_fork for block in plan.blocks):
        out.line("what takes all of this in: " + clean(root_options(roots, plan, SHOWN_ENTRIES)))


def print_outcome(printer: Printer, store: Store, run_id: str) -> int:
    """RetryOutcome or RepairOutcome: a RunOutcome with where the run comes from (contract 9.3). The exit code."""
    views = views_of(store)
    outcome = views.outcome(run_id)
    data = {**outcome, **views.recovery(run_id)}

    def human(out: Printer) -> None:
        outcome_for_people(out, views, outcome)
        out.line(f"reused {len(data['reusedTasks'])}, executed {len(data['executedTasks'])} of {data['sourceRunId']}")

    printer.result(OUTCOMES[store.get_run(run_id).mode], data, human)
    return EXIT_BY_STATE[str(outcome["state"])]


# -- fork ----------------------------------------------------------------------------------------------------------


@click.command(cls=Verb)
@click.argument("source", metavar="SOURCE")
@click.option("--reason", metavar="TEXT", help="Why; kept with the new run.")
@click.option("--workspace", type=click.Path(), metavar="DIR", help="Base of paths; else that of the source.")
@click.option("--priority", type=click.IntRange(-10, 10), default=0, help="-10 to 10; higher is served first.")
@click.option("--interactive", is_flag=True, help="A person is here: `nonInteractive` does not apply.")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would be executed; change nothing.")
@workers_option
@timeout_option
@pass_settings
@click.pass_context
def fork(
    context: click.Context,
    settings: Settings,
    source: str,
    reason: str | None,
    workspace: str | None,
    priority: int,
    interactive: bool,
    only_plan: bool,
    workers: int | None,
    timeout: Deadline | None,
) -> None:
    """Run the stored workflow of another run once more, from its start, in a new run linked to it.

    Everything is executed again, whatever SOURCE has done. No file is read: plan, inputs and variables are those that
    were stored. SOURCE may be in any state. Exit like `run`; with --plan: 0 when it could be made.
    """
    if interactive and not only_plan:
        require_terminal()
    from agentctl.coordinator.plan import Plan
    from agentctl.coordinator.submission import fork as fork_run
    from agentctl.coordinator.submission import verified_source
    from agentctl.store.canonical import loads
    from agentctl.store.clock import SystemIds

    from . import pool  # noqa: F401
    from .preflight import preflight

    with closing(open_store(settings)) as store:
        run_id = views_of(store).find_run(source)
        parent, documents = verified_source(store, run_id)
        base = workspace_of(workspace, parent.base_path, run_id)
        plan = Plan.from_json(loads(documents.plan_json))
        preflight(loads(documents.workflow_json), plan, base, offline=settings.offline)
        from .foretold import fork_plan, fork_warnings, show_fork

        if only_plan:
            data = fork_plan(store, views_of(store), parent, plan, base, interactive=interactive)
            Printer(settings).result("ForkPlan", data, lambda out: show_fork(out, data))
            return
        if json.loads(store.run_settings(run_id)[0]).get("keepsArtifacts"):
            store.artifacts.blobs.require_writable()
        for text in fork_warnings(store, parent, plan):
            warn(settings, text)
        with signals_held():
            made = fork_run(
                store,
                run_id,
                ids=SystemIds(store.clock),
                priority=priority,
                base_path=base,
                actor=ACTOR,
                reason=reason,
                interactive=interactive,
            )
        word = f"started (a fork of {run_id})"
        context.exit(foreground(settings, store, made.run_id, word, workers=workers, timeout=timeout))
