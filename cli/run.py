"""Verbs that begin, follow and end runs (contract 4.10 to 4.12, new verbs).

Faults of a document or of inputs are found before a database is opened, so they leave no run row and no file. A
foreground `run` goes on when its stdout is lost; its exit code always tells how the run has ended.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import click
from agentctl.store.errors import AgentctlError, AlreadyTerminal, PolicyError, UsageError
from agentctl.store.states import RUN_FINAL

from .documents import Sources, compile_file, presented, source_options
from .main import EXIT_INTERRUPTED, Seconds, Settings, Verb, pass_settings
from .render import (
    Printer,
    Progress,
    clean,
    counts_text,
    duration,
    envelope,
    give_up_stdout,
    let_go_on,
    of_item,
    progress_for,
    reader_is_gone,
    settle_step,
    warn,
    warn_findings,
    when,
    why_uncertain,
)
from .stopping import heed_lost_interrupts
from .streams import StreamDisplay

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.plan import Plan
    from agentctl.coordinator.submission import Submission
    from agentctl.store.engine import Store
    from agentctl.store.views import Views

log = logging.getLogger(__name__)

EXIT_BY_STATE = {"succeeded": 0, "paused": 3, "failed": 4, "running": 4, "cancelled": EXIT_INTERRUPTED}
"""Contract 4.10."""

POLL_SECONDS = 0.05
"""How often a waiting command looks at SQLite's change counter, which costs some microseconds."""

LOOK_SECONDS = 1.0
"""How often it looks at the run all the same: for the death of a driver, which changes no row."""

LINE_SECONDS = 0.25
"""How often a changed RunStatus is printed as a JSON line, at most."""

ACTOR = "cli-user"
MAX_KEY = 256
SHOWN_FAILURES = 10
SHOWN_OUTPUT = 4000


_Prepared: TypeAlias = "tuple[LoadedDocument, Plan, dict[str, Any], Path]"


def open_store(settings: Settings, *, create: bool = False) -> Store:
    """The database of this invocation. Raises what `Store` raises, and first `UsageError` for an environment that makes
    no sense: found later, it would leave a run that was just made, or a request that was just written, to nobody."""
    from agentctl.store.clock import SystemClock
    from agentctl.store.engine import Store
    from agentctl.store.faults import Faults
    from agentctl.store.timing import Timing

    Timing.from_environment()
    Faults.from_environment()
    return Store(settings.database, SystemClock(), create=create)


def views_of(store: Store) -> Views:
    """The read-only questions to a store."""
    from agentctl.store.views import Views

    return Views(store.database, store.clock)


# -- begin -------------------------------------------------------------------------------------------------------


def _submission_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--idempotency-key", metavar="KEY", help="The same key gives the same run back."),
        click.option("--priority", type=click.IntRange(-10, 10), default=0, help="-10 to 10; higher is served first."),
        click.option("--workspace", type=click.Path(), metavar="DIR", help="Base of paths; else FILE's folder."),
        source_options,
        click.argument("file", type=click.Path()),
    ):
        function = option(function)
    return function


workers_option = click.option(
    "--workers", type=click.IntRange(1, 1024), metavar="N", help="Size of the run's own pool, if none is live."
)


class Deadline(NamedTuple):
    """A limit for the whole command: what it was given (seconds), and when that is over (monotonic seconds)."""

    seconds: float
    at: float


def _begin_deadline(context: click.Context, parameter: click.Parameter, value: float | None) -> Deadline | None:
    # From the reading of the line on: what comes before the run (a wait for others that write) counts as well.
    from agentctl.store.clock import SystemClock

    return None if value is None else Deadline(value, SystemClock().monotonic() + value)


timeout_option = click.option(
    "--timeout-seconds",
    "timeout",
    type=Seconds(min=0, min_open=True),
    callback=_begin_deadline,
    metavar="S",
    help="Cancel the run when it is not over after S seconds (exit 130).",
)


def _prepare(
    settings: Settings,
    file: str,
    sources: Sources,
    workspace: str | None,
    key: str | None,
) -> _Prepared:
    """Everything of a submission that needs no database. Raises `UsageError` (and `DocumentError`)."""
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isprintable()):
        raise UsageError(f"--idempotency-key must be 1 to {MAX_KEY} printable characters")
    from agentctl.coordinator.compiler import merge_inputs

    given = sources.inputs()
    root = None
    if workspace is not None:
        root = Path(workspace).absolute()
        if not root.is_dir():
            raise UsageError(f"--workspace {workspace}: no such folder", remedy="give a folder that exists")
    document, plan = compile_file(file, given, sources, workspace=root)
    base = document.base_dir if root is None else root
    require_recordable(base)
    warn_findings(settings, document.warnings)
    return document, plan, merge_inputs(document.model.spec.inputs, given), base


def require_terminal() -> None:
    """Raise `PolicyError` where `--interactive` says that a person is there and nobody can be (contract 4.7)."""
    if not sys.stdin.isatty():
        raise PolicyError("--interactive needs a terminal", remedy="leave it out where nobody can be asked")


def require_recordable(base: Path) -> None:
    """Raise `UsageError` for a base of paths whose name cannot be kept."""
    try:
        str(base).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the folder {base} has a name that is not UTF-8, which cannot be recorded",
            remedy="rename it, or give another one with --workspace",
        ) from error


def _look_ahead(settings: Settings, prepared: _Prepared, *, check: bool = False) -> None:
    """What can be known to fail is found before a run exists; see `preflight`. It may take long, and be interrupted."""
    from .preflight import denials, preflight
    from .stored_secrets import refuse_stored_secrets

    document, plan, inputs, base = prepared
    if not check:
        preflight(document.workflow, plan, base, offline=settings.offline)
        refuse_stored_secrets(document, plan, inputs, base)
        return
    for _, problem in denials(document.workflow, plan, base):
        raise problem  # check mode talks to nobody, but what is certain to be denied needs no talking


def _submit(
    settings: Settings,
    prepared: _Prepared,
    *,
    priority: int,
    key: str | None,
    interactive: bool = False,
    check: bool = False,
    diff: bool = False,
) -> tuple[Submission, Store]:
    from agentctl.coordinator.plan import keeps_artifacts
    from agentctl.coordinator.submission import submit as submit_run
    from agentctl.store.clock import SystemIds

    document, plan, inputs, base = prepared
    store = open_store(settings, create=True)
    try:
        if keeps_artifacts(plan):
            # Told here, where it costs nothing: the worker of a task would find it just before the dispatch.
            store.artifacts.blobs.require_writable()
        submission = submit_run(
            store,
            document,
            plan,
            inputs,
            ids=SystemIds(store.clock),
            priority=priority,
            idempotency_key=key,
            base_path=base,
            actor=ACTOR,
            interactive=interactive,
            check=check,
            diff=diff,
        )
    except BaseException:
        store.close()
        raise
    return submission, store


@click.command(cls=Verb)
@_submission_options
@workers_option
@timeout_option
@click.option("--check", is_flag=True, help="Change nothing: read, compute, and foresee what would be done.")
@click.option("--diff", is_flag=True, help="Record a diff of each write; with --check also show it.")
@click.option("--interactive", is_flag=True, help="A person is here: `nonInteractive` of the policy does not apply.")
@pass_settings
@click.pass_context
def run(
    context: click.Context,
    settings: Settings,
    file: str,
    sources: Sources,
    workspace: str | None,
    priority: int,
    idempotency_key: str | None,
    workers: int | None,
    timeout: Deadline | None,
    check: bool,
    diff: bool,
    interactive: bool,
) -> None:
    """Run a workflow file and wait for its end.

    The first SIGINT or SIGTERM cancels the run. Exit: 0 succeeded, 3 paused, 4 failed, 130 cancelled.

    With --check the run is recorded and nothing else is changed: no file, no program, no approval. Exit 0 when nothing
    is certain to fail, 4 otherwise.
    """
    if interactive:
        require_terminal()
    from . import pool  # noqa: F401  # its import takes a while, and nothing may interrupt what follows for long

    prepared = _prepare(settings, file, sources, workspace, idempotency_key)
    _look_ahead(settings, prepared, check=check)
    with signals_held():
        submission, store = _submit(
            settings,
            prepared,
            priority=priority,
            key=idempotency_key,
            interactive=interactive,
            check=check,
            diff=diff,
        )
    with closing(store):
        plan = prepared[1] if submission.created else None
        word = "started" if submission.created else "is the run of this key"
        shown = presented(settings, prepared[0])
        context.exit(foreground(shown, store, submission.run_id, word, workers=workers, plan=plan, timeout=timeout))


@contextmanager
def signals_held() -> Iterator[None]:
    """From here on SIGINT and SIGTERM wait: a run that exists must not be left to nobody.

    Only a wait for others that write lets them in, as long as it waits: the command ends then (exit 130), and what it
    waited to write is not written. They go on waiting after the block, until `foreground` can obey them; they are let
    in again when it raises.
    """
    import signal

    from agentctl.store.gate import hold_for_an_answer

    heed_lost_interrupts()
    held = {signal.SIGINT, signal.SIGTERM}
    before = signal.signal(signal.SIGTERM, _interrupt)
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    hold_for_an_answer(held)
    try:
        yield
    except BaseException:
        hold_for_an_answer(())
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)
        raise
    hold_for_an_answer(())


@contextmanager
def until_told() -> Iterator[None]:
    """The same for a block that writes and then tells of it, as its last action: a signal that comes when it is written
    changes nothing any more, and who has sent it reads what was done."""
    import signal

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with signals_held():
        yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN)  # takes away what has come
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(before))


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@click.command(cls=Verb)
@_submission_options
@pass_settings
def submit(
    settings: Settings,
    file: str,
    sources: Sources,
    workspace: str | None,
    priority: int,
    idempotency_key: str | None,
) -> None:
    """Hand a workflow file to the pool and return at once.

    Without a live coordinator the run waits for one; a warning says so.
    """
    prepared = _prepare(settings, file, sources, workspace, idempotency_key)
    _look_ahead(settings, prepared)
    with until_told():
        submission, store = _submit(settings, prepared, priority=priority, key=idempotency_key)
        with closing(store):
            if submission.state == "running":
                store.call_coordinators()
            data = {
                "runId": submission.run_id,
                "traceId": submission.trace_id,
                "state": submission.state,
                "created": submission.created,
            }
            diagnostics: list[Any] = list(prepared[0].warnings)
            if submission.state == "running":
                diagnostics += _warn_undriven(settings, store)

            def human(out: Printer) -> None:
                known = "" if submission.created else f" (this key's run, {submission.state})"
                out.line(submission.run_id + known)

            Printer(settings).result("Submission", data, human, diagnostics)


def warn_undriven(settings: Settings, store: Store, run_id: str) -> list[dict[str, Any]]:
    """The same for a run that a decision has set going again, or would have."""
    run = store.get_run(run_id)
    if run.state != "running" or run.driver is not None:
        return []
    return _warn_undriven(settings, store, remedy=f"`agentctl resume {run_id}`")


def _warn_undriven(settings: Settings, store: Store, remedy: str = "`agentctl workers start`") -> list[dict[str, Any]]:
    """Tell when no coordinator lives: nobody will drive the run (contract table, row 35)."""
    from .requests import coordinator_is_live

    if coordinator_is_live(store):
        return []
    message = f"no coordinator is live: nobody drives this run yet; {remedy} does"
    warn(settings, message)
    return [
        {
            "code": "no_driver",
            "severity": "warning",
            "message": message,
            "file": None,
            "line": None,
            "column": None,
            "path": None,
            "help": None,
        }
    ]


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.option("--plan", "only_plan", is_flag=True, help="Show what would go on and what stays; change nothing.")
@workers_option
@timeout_option
@pass_settings
@click.pass_context
def resume(
    context: click.Context,
    settings: Settings,
    run_name: str,
    only_plan: bool,
    workers: int | None,
    timeout: Deadline | None,
) -> None:
    """Go on with a run that is paused or that nobody drives, and wait for its end.

    A run that is driven elsewhere is followed, and Ctrl-C then leaves it alone, as with `wait`; a request to pause it
    is taken back. The stored plan is used, never the file. Exit like `run`.
    """
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = views.find_run(run_name)
        state = views.state(run_id)
        if only_plan and state not in RUN_FINAL:
            from .foretold import resume_plan, show_resume

            data = resume_plan(store, views, run_id)
            Printer(settings).result("ResumePlan", data, lambda out: show_resume(out, data))
            return
        if state in RUN_FINAL:
            if not only_plan:
                _compensate_failed(settings, store, run_id, workers)
            raise AlreadyTerminal(
                f"{run_id} has ended already: {state}",
                remedy=f"`agentctl inspect {run_id}` shows what happened",
                run_id=run_id,
            )
        store.refuse_future_records(run_id)  # before anything is said to go on
        if settings.offline:
            _require_offline(store, run_id)
        if json.loads(store.run_settings(run_id)[0]).get("keepsArtifacts"):
            store.artifacts.blobs.require_writable()
        with signals_held():
            store.withdraw_pause(run_id, actor=ACTOR)
        context.exit(foreground(settings, store, run_id, "resumed", resume=True, workers=workers, timeout=timeout))


def _require_offline(store: Store, run_id: str) -> None:
    """Raise `PrerequisiteError` when going on with a run, or undoing it, would use the network."""
    from agentctl.coordinator.plan import Plan
    from agentctl.store.canonical import loads
    from agentctl.store.states import TASK_FINAL

    from .preflight import require_offline

    documents = store.run_documents(run_id)
    plan = Plan.from_json(loads(documents.plan_json))
    states = store.snapshot(run_id).tasks
    open_tasks = {task.id for task in plan.tasks.values() if states[task.position].state not in TASK_FINAL}
    require_offline(loads(documents.workflow_json), plan, open_tasks)


def _require_undone_offline(workflow: dict[str, Any], plan: Plan, base: str) -> None:
    """The same of a compensation run that is about to be made."""
    from .preflight import require_offline

    require_offline(workflow, plan, plan.tasks)


# -- follow ------------------------------------------------------------------------------------------------------


class _Follower:
    """Shows how one run goes on, as often as the display wants it and no oftener than it can afford.

    A look counts the tasks of the run, so the pause between two looks is at least twenty times what a look has cost.
    """

    def __init__(self, printer: Printer, store: Store, run_id: str, progress: Progress, *, at_once: bool) -> None:
        """With `at_once` the first look is shown; otherwise a run that ends at once needs no display."""
        self._printer = printer
        self._store = store
        self._views = views_of(store)
        self._run_id = run_id
        self._progress = progress
        self._next = store.clock.monotonic() + (0.0 if at_once else progress.interval)
        self._lost = False
        self._seen: str | None = None
        self._streams = StreamDisplay(printer.settings, store, self._views, run_id)

    def tick(self) -> None:
        """Look and show, if it is time. Never raises for a lost reader: the run does not end for it."""
        clock = self._store.clock
        started = clock.monotonic()
        if self._lost or started < self._next:
            return
        drawn = 0.0
        try:
            self._streams.show()
            if self._printer.settings.output == "jsonl":
                self.status_line()
                interval = LINE_SECONDS
            else:
                interval = self._progress.interval
                if not self._printer.settings.json:
                    seen = self._views.progress(self._run_id)
                    looked = clock.monotonic()
                    self._progress.update(seen)
                    drawn = clock.monotonic() - looked  # no part of the look: the first time it imports a library
        except OSError as error:
            self.lose(error)
            return
        ended = clock.monotonic()
        self._next = ended + max(interval, 20 * (ended - started - drawn))

    @property
    def lost(self) -> bool:
        """Whether the reader of stdout is gone."""
        return self._lost

    def tick_or_rest(self) -> None:
        """`tick` for a run that is driven here: whatever goes wrong with the display, the run does not end for it."""
        try:
            self.tick()
        except Exception as error:
            self._lost = True
            log.warning("progress is not shown any more: %s", error)

    def status_line(self) -> None:
        """One RunStatus as a line, if it differs from the last one."""
        text = envelope("RunStatus", self._views.status(self._run_id))
        if text != self._seen:
            self._seen = text
            click.echo(text)

    def lose(self, error: OSError) -> None:
        """Nobody takes what is shown any more: go on without it."""
        self._lost = True
        give_up_stdout(self._printer.settings, error)

    def close(self) -> None:
        """Take the display away, after the rest of what models have said."""
        try:
            if not self._lost:
                self._streams.finish()
            self._progress.close()
        except OSError as error:
            self.lose(error)


def foreground(
    settings: Settings,
    store: Store,
    run_id: str,
    word: str,
    *,
    resume: bool = False,
    workers: int | None,
    plan: Plan | None = None,
    timeout: Deadline | None = None,
    outcome: Callable[[Printer, Store, str], int] | None = None,
) -> int:
    """Drive a run here until it is over or paused, with progress; the exit code.

    `word` says what has just become of it; `outcome` prints how it has ended, instead of a RunOutcome.
    """
    import signal

    from .pool import run_in_foreground
    from .requests import cancel_run

    printer = Printer(settings)
    follower = None
    stopped = False
    try:
        try:
            if not settings.json:
                begun = views_of(store).progress(run_id)
                noun = "task" if begun["taskCount"] == 1 else "tasks"
                printer.line(f"{run_id} {word}: {clean(begun['workflow'])}, {begun['taskCount']} {noun}")
        except OSError as error:
            give_up_stdout(settings, error)
        follower = _Follower(printer, store, run_id, progress_for(printer), at_once=settings.output == "jsonl")
        heed_lost_interrupts()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        run_in_foreground(
            settings.database,
            run_id,
            resume=resume,
            workers=workers,
            on_change=follower.tick_or_rest,
            plan=plan,
            timeout=timeout,
        )
        stopped = _compensate_failed(settings, store, run_id, workers)
    except KeyboardInterrupt:
        # The signal came before the foreground obeyed signals. A run that was only to be resumed stays as it was.
        if resume:
            raise
        with closing(open_store(settings)) as fresh:  # the other one may have been interrupted at any place
            cancel_run(fresh, run_id, reason="a signal ended the command", actor=ACTOR)
    finally:
        if follower is not None:
            follower.close()
    try:
        code = (outcome or print_outcome)(printer, store, run_id)
    except OSError as error:
        give_up_stdout(settings, error)
        code = EXIT_BY_STATE[views_of(store).state(run_id)]
    return EXIT_INTERRUPTED if stopped else code


def _compensate_failed(settings: Settings, store: Store, run_id: str, workers: int | None) -> bool:
    """Carry out the automatic compensation of a run that has failed, if it declares one (contract 5.7).

    The command tells of the failed run; a compensation that cannot be started is still due, and said to be. Returns
    whether a signal has ended the compensation.
    """
    if store.get_run(run_id).state != "failed":
        return False
    from agentctl.store.compensations import Compensations

    compensations = Compensations(store.database, store.clock)
    if compensations.is_due(run_id):
        from agentctl.coordinator.compensation import start_what_is_due
        from agentctl.store.clock import SystemIds
        from agentctl.store.faults import Faults

        try:
            ids, faults = SystemIds(store.clock), Faults.from_environment()
            before = _require_undone_offline if settings.offline else None
            start_what_is_due(store, ids, faults, run_id, actor=ACTOR, before=before)
        except AgentctlError as error:
            warn(settings, f"the compensation of {run_id} could not be started: {error.message}")
    started = compensations.started_by(run_id)
    if started is not None and store.get_run(started).ended_at is None:
        from .pool import run_in_foreground

        if settings.offline:
            try:
                _require_offline(store, started)
            except AgentctlError as error:
                warn(settings, f"the compensation {started} does not go on: {error.message}")
                return False
        return run_in_foreground(settings.database, started, resume=False, workers=workers, on_change=None)
    return False


def _follow(settings: Settings, run_name: str, *, show: bool, timeout: float | None) -> int:
    """Wait for the end of a run without holding anything; exit code by state."""
    import signal

    # The display has to be taken away before the program leaves.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = views.find_run(run_name)
        printer = Printer(settings)
        clock = store.clock
        deadline = None if timeout is None else clock.monotonic() + timeout
        state = views.state(run_id)
        told = ""
        if state == "running":
            told = _warn_if_waiting_is_vain(settings, store, views, run_id)
        follower = None
        if show:
            follower = _Follower(printer, store, run_id, progress_for(printer), at_once=True)
        try:
            seen, look_at = views.data_version(), clock.monotonic() + LOOK_SECONDS
            while True:
                if follower is not None:
                    _show(follower)
                if state != "running" or (deadline is not None and clock.monotonic() >= deadline):
                    break
                pause = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - clock.monotonic())
                clock.sleep(max(0.0, pause))
                version = views.data_version()
                if version != seen or clock.monotonic() >= look_at:
                    seen, look_at = version, clock.monotonic() + LOOK_SECONDS
                    store.database.require_place()
                    state = views.state(run_id)
                    told = _tell_problem(settings, views, run_id, told)
        finally:
            if follower is not None:
                follower.close()
        return print_outcome(printer, store, run_id)


def _show(follower: _Follower) -> None:
    follower.tick()
    if follower.lost or reader_is_gone():
        # Nothing but the display was asked for: without a reader there is nothing left to do.
        raise BrokenPipeError


def _warn_if_waiting_is_vain(settings: Settings, store: Store, views: Views, run_id: str) -> str:
    """Returns the problem that was told of, as `_tell_problem` does."""
    told = _tell_problem(settings, views, run_id, "")
    driver = views.status(run_id)["driver"]
    if not told and (driver is None or driver["liveness"] == "dead"):
        _warn_undriven(settings, store)
    elif not told and driver is not None and driver["stopped"]:
        warn(
            settings,
            f"{driver['kind']} {clean(driver['processId'])}, which drives this run, is stopped, as by Ctrl-Z; "
            + let_go_on(driver["pid"]),
        )
    return told


def _tell_problem(settings: Settings, views: Views, run_id: str, told: str) -> str:
    """Tell once why nobody will drive the run that is waited for; what was told of so far."""
    problem = views.problem(run_id)
    if problem is not None and problem["message"] != told:
        warn(settings, f"nobody drives this run: {clean(problem['message'])}")
        return str(problem["message"])
    return told


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.option("--timeout-seconds", type=Seconds(min=0), metavar="S", help="Give up waiting after S seconds.")
@pass_settings
@click.pass_context
def wait(context: click.Context, settings: Settings, run_name: str, timeout_seconds: float | None) -> None:
    """Wait for the end of a run and print its outcome.

    Exit: 0 succeeded, 3 paused, 4 failed or still running after --timeout-seconds, 130 cancelled.
    """
    context.exit(_follow(settings, run_name, show=settings.output == "jsonl", timeout=timeout_seconds))


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@pass_settings
@click.pass_context
def watch(context: click.Context, settings: Settings, run_name: str) -> None:
    """Follow a run until its end. With JSON output: a line of RunStatus for each change, then RunOutcome.

    Leaving it (Ctrl-C) does not touch the run. Exit like `wait`.
    """
    if settings.json:
        settings.output = "jsonl"
    context.exit(_follow(settings, run_name, show=True, timeout=None))


# -- end ---------------------------------------------------------------------------------------------------------


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.option("--reason", default="cancelled by a person", metavar="TEXT", help="Kept in the audit trail.")
@click.option("--actor", default=ACTOR, metavar="NAME", help="Who asks; kept in the audit trail.")
@pass_settings
def cancel(settings: Settings, run_name: str, reason: str, actor: str) -> None:
    """Cancel a run: no effect starts any more, and running commands are ended. A run that has ended is left alone."""
    from .requests import cancel_run

    with closing(open_store(settings)) as store:
        run_id = views_of(store).find_run(run_name)
        with until_told():
            requested, state = cancel_run(store, run_id, reason=reason, actor=actor)

            def human(out: Printer) -> None:
                if not requested:
                    out.line(f"{run_id} has ended before: {out.state(state)}")
                elif state == "cancelled":
                    out.line(f"{run_id} is cancelled")
                else:
                    out.advise(f"{run_id} is being cancelled; `agentctl wait {run_id}` waits for the end")

            Printer(settings).result("Cancellation", {"runId": run_id, "requested": requested, "state": state}, human)


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.option("--reason", default="paused by a person", metavar="TEXT", help="Kept in the audit trail.")
@click.option("--actor", default=ACTOR, metavar="NAME", help="Who asks; kept in the audit trail.")
@pass_settings
def pause(settings: Settings, run_name: str, reason: str, actor: str) -> None:
    """Pause a run: what runs finishes, nothing new starts. `resume` goes on.

    Exit 0; 4 for a run that has ended, 5 for one that is being cancelled.
    """
    from .requests import pause_run

    with closing(open_store(settings)) as store:
        run_id = views_of(store).find_run(run_name)
        with until_told():
            state, why = pause_run(store, run_id, reason=reason, actor=actor)

            def human(out: Printer) -> None:
                if state == "paused":
                    out.advise(f"{run_id} is paused; `agentctl resume {run_id}` goes on")
                else:
                    out.line(f"{run_id} pauses as soon as what runs has ended")

            Printer(settings).result("Pause", {"runId": run_id, "state": state, "reason": why}, human)


def print_outcome(printer: Printer, store: Store, run_id: str) -> int:
    """RunOutcome on stdout, for every state (contract, after the new verbs). Returns the exit code."""
    views = views_of(store)
    outcome = views.outcome(run_id)
    if outcome["state"] == "failed" and (undone := _automatic_compensation(store, run_id)) is not None:
        outcome["compensation"] = undone
    if store.get_run(run_id).mode == "check":
        from .foreseen import print_foreseen

        print_foreseen(printer, store, run_id, outcome)
        return EXIT_BY_STATE[str(outcome["state"])]
    printer.result("RunOutcome", outcome, lambda out: outcome_for_people(out, views, outcome))
    return EXIT_BY_STATE[str(outcome["state"])]


def _automatic_compensation(store: Store, run_id: str) -> dict[str, Any] | None:
    from agentctl.store.compensations import Compensations

    started = Compensations(store.database, store.clock).started_by(run_id)
    if started is None:
        return None
    run = store.get_run(started)
    return {"runId": run.run_id, "state": run.state, "reason": run.reason}


def outcome_for_people(out: Printer, views: Views, outcome: dict[str, Any]) -> None:
    """How a run has ended or stands: state, failures, what a person has to do, its output, and the next step."""
    run_id, state = outcome["runId"], outcome["state"]
    status = views.status(run_id)
    until = views.now() if state == "running" else status["updatedAt"]
    spent = duration(until - status["createdAt"])
    reason = f" ({_why(outcome)})" if outcome["reason"] else ""
    out.line(f"{run_id} {out.state(state)}{reason} after {spent}: {counts_text(status['taskCounts'])}")
    if status["mode"] == "replay":
        from .show import recorded_note

        for note in recorded_note(status["lineage"] or {}):
            out.line(f"  {note}")
    for line in why_failed(views, run_id, outcome["error"], SHOWN_FAILURES):
        out.line(f"  {line}")
    if status["uncertainEffects"]:
        out.line("  effects that began and were never confirmed; nobody knows whether they happened:")
        for effect in status["uncertainEffects"][:SHOWN_FAILURES]:
            out.line(
                f"    {effect['effectId'][:12]}  task {clean(effect['taskId'])}, attempt {effect['attempt']}, "
                f"{effect['operation']}, started {when(effect['startedAt'])}"
            )
            if (cause := why_uncertain(effect)) is not None:
                out.line(f"      {cause}")
        if status["uncertainEffectCount"] > SHOWN_FAILURES:
            out.line(f"    and {status['uncertainEffectCount'] - SHOWN_FAILURES} more")
    if "compensation" in outcome:
        undone = outcome["compensation"]
        why = f" ({undone['reason']})" if undone["reason"] else ""
        out.line(f"  compensated by {undone['runId']}: {out.state(undone['state'])}{why}")
    if outcome["output"] is not None:
        text = json.dumps(outcome["output"], ensure_ascii=False, indent=2)
        if len(text) > SHOWN_OUTPUT:
            text = text[:SHOWN_OUTPUT] + f"\n… (`agentctl wait {run_id} --output json` prints all of it)"
        out.line("output:")
        out.line("\n".join(clean(line) for line in text.split("\n")))
    if status["pendingApprovals"]:
        out.line("  approvals that a person has to answer:")
        for asked in status["pendingApprovals"][:SHOWN_FAILURES]:
            out.line(f"    {asked['approvalId']}  task {clean(asked['taskId'])}, {asked['tool']}: {asked['reason']}")
        if status["pendingApprovalCount"] > SHOWN_FAILURES:
            out.line(f"    and {status['pendingApprovalCount'] - SHOWN_FAILURES} more")
    if status["budget"].get("exceeded"):
        over = status["budget"]["exceeded"]
        out.line(f"  budget: {over['dimension']} would be {over['attempted']}, the limit is {over['limit']}")
    hint = _next_step(run_id, status)
    if outcome.get("compensation", {}).get("state") == "succeeded" and not status["uncertainEffects"]:
        # A retry would reuse what is undone by now, so none is proposed.
        made = outcome["compensation"]["runId"]
        hint = (
            f"`agentctl inspect {run_id}` shows what failed, `agentctl inspect {made}` what was undone; "
            f"`agentctl fork {run_id}` does everything afresh"
        )
    if hint:
        out.advise(f"next: {hint}")


def _why(outcome: dict[str, Any]) -> str:
    """The reason of a state, and what whoever cancelled or paused the run has said."""
    said = {"cancelled": outcome["cancelReason"], "paused": outcome["pauseReason"]}.get(outcome["state"])
    return f"{outcome['reason']}: {clean(said)}" if said else str(outcome["reason"])


def why_failed(views: Views, run_id: str, error: Any, limit: int) -> list[str]:
    """Why a run has failed, a line each: its own `error`, if no task has it, and the failed tasks up to `limit`."""
    failures, count = views.failures(run_id, limit=limit)
    lines = []
    of_a_task = any(_same_fault(error, failure["error"]) for failure in failures)
    if isinstance(error, dict) and error.get("message") and not of_a_task:
        lines.append(f"{error.get('code', 'error')}: {clean(error['message'])}")
    bound = views.bindings(run_id, [failure["taskId"] for failure in failures]) if failures else {}
    lines += [f"task {failure_text(failure, bound)}" for failure in failures]
    if count > len(failures):
        lines.append(f"and {count - len(failures)} more failed tasks")
    return lines


def failure_text(failure: dict[str, Any], bound: dict[str, dict[str, Any]]) -> str:
    """One failed task, the item that it is for, and why it has failed."""
    fault = failure["error"] or {}
    why = f"{fault.get('code', 'failed')}: {clean(fault.get('message', 'no reason was recorded'))}"
    return f"{of_item(failure['taskId'], bound)}: {why}"


def _same_fault(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    return all(one.get(name) == other.get(name) for name in ("code", "message"))


def _next_step(run_id: str, status: dict[str, Any]) -> str | None:
    state = status["state"]
    if state == "running":
        return f"`agentctl status {run_id}` shows what it waits for"
    if status["uncertainEffects"]:
        return settle_step(status["uncertainEffects"][0])
    if state == "paused" and status["pendingApprovals"]:
        return f"`agentctl approvals list {run_id}`, then `agentctl approvals approve|reject ID`"
    if state == "failed":
        shown = f"`agentctl inspect {run_id}` shows the tasks, `agentctl logs {run_id}` what commands have printed"
        if status["mode"] in ("check", "compensation", "replay"):
            return shown
        return f"{shown}, `agentctl retry FILE {run_id} --failed --plan` what a retry would do"
    if state == "paused":
        return f"`agentctl resume {run_id}` goes on, `agentctl status {run_id}` shows what it waits for"
    return None
