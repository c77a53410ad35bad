"""Verbs about the pool: supervisors, workers and coordinators."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click
from agentctl.store.errors import UsageError
from agentctl.store.recycling import Limits

from .amounts import Duration, Size
from .main import Seconds, Settings, Text, VerbGroup, pass_settings
from .render import Printer, clean, duration, size, warn
from .run import open_store, views_of

DEFAULT_DRAIN_SECONDS = 30.0
MAX_NAME = 100
SMALLEST_RSS = 64 << 20
"""A worker that has just begun uses about half of it."""

F = TypeVar("F", bound=Callable[..., Any])


class Name(Text):
    """The name of a process in lists, logs and units: one line that can be read and typed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        if not (1 <= len(text) <= MAX_NAME and text.isprintable() and text.strip() == text):
            self.fail(f"a name has 1 to {MAX_NAME} printable characters, and no blank at its ends.", param, ctx)
        return text


def _into_environment(name: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[name] = value  # the children of a pool inherit it

    return keep


def _log_options(function: F) -> F:
    """How a process that works for long writes its log."""
    for option in (
        click.option(
            "--log-level",
            type=click.Choice(("debug", "info", "warning", "error")),
            expose_value=False,
            callback=_into_environment("AGENTCTL_LOG_LEVEL"),
            help="How much is logged (warning); else AGENTCTL_LOG_LEVEL.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(("text", "json")),
            expose_value=False,
            callback=_into_environment("AGENTCTL_LOG_FORMAT"),
            help="Lines for people, or JSON lines; else AGENTCTL_LOG_FORMAT.",
        ),
    ):
        function = option(function)
    return function


def _begin_log(settings: Settings, name: str) -> None:
    import logging

    from agentctl.store import log_lines

    log_lines.check_format()
    log_lines.configure(log_lines.level_of(logging.INFO if settings.verbose else logging.WARNING), name)


def _care_options(function: F) -> F:
    """What every process that works for long can be told: when to be renewed, how long a drain may take."""
    for option in (
        click.option(
            "--max-rss", type=Size(SMALLEST_RSS), metavar="SIZE", help="Renew a worker that uses more memory: 512M."
        ),
        click.option("--max-age", type=Duration(), metavar="TIME", help="Renew a worker that is older: 12h."),
        click.option(
            "--max-tasks", type=click.IntRange(min=1), metavar="N", help="Renew a worker after so many attempts."
        ),
        click.option(
            "--drain-seconds",
            type=Seconds(min=0),
            default=DEFAULT_DRAIN_SECONDS,
            metavar="S",
            help="How long running commands may go on after SIGTERM (30).",
        ),
    ):
        function = option(function)
    return function


def _require_network(settings: Settings) -> None:
    """Workers of a pool serve every run, and failing those that need the network would be no help to anybody."""
    if settings.offline:
        raise UsageError(
            "--offline is no option of a pool: its workers serve runs that need the network as well",
            remedy="give it to the verbs that make a run: `agentctl --offline submit FILE`",
        )


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@click.group(cls=VerbGroup)
def workers() -> None:
    """Start, list, drain and stop workers."""


@workers.command("start")
@click.option("-n", "--count", type=click.IntRange(1, 1024), metavar="N", help="How many workers; else one per core.")
@click.option(
    "--name",
    type=Name(),
    metavar="NAME",
    help="Name of the pool; its workers are NAME-1, NAME-2, ..., a single one NAME.",
)
@click.option("--no-coordinator", is_flag=True, help="Only workers: another process drives the runs.")
@_care_options
@_log_options
@pass_settings
@click.pass_context
def workers_start(
    context: click.Context,
    settings: Settings,
    count: int | None,
    name: str | None,
    no_coordinator: bool,
    drain_seconds: float,
    max_tasks: int | None,
    max_age: float | None,
    max_rss: int | None,
) -> None:
    """Start a pool of workers here and keep it alive until SIGTERM or SIGINT.

    The first signal drains it, a second one ends it hard. Exit: 0 drained, 3 forced, 5 could not start.

    A worker that reaches --max-tasks, --max-age or --max-rss ends after the attempt that it has, and another takes its
    place. Their limits differ by up to a tenth, so that they do not all go at once.
    """
    _require_network(settings)
    from .pool import start_workers

    _begin_log(settings, name or "pool")
    # Opened here once, so that a database that cannot be used is told before any process starts.
    open_store(settings, create=True).close()
    code = start_workers(
        settings.database,
        count=count if count is not None else _cores(),
        name=name,
        coordinator=not no_coordinator,
        drain_seconds=drain_seconds,
        limits=Limits(max_tasks, max_age, max_rss),
    )
    _tell_end(settings, code, "the pool")
    context.exit(code)


def _tell_end(settings: Settings, code: int, who: str) -> None:
    if code:
        warn(
            settings,
            f"{who} was ended hard: commands that still ran were ended with it. What may be repeated is ready again; "
            "`agentctl effects list --uncertain` shows the rest",
        )


@workers.command("install")
@click.option("--user", is_flag=True, help="For your own service manager instead of the system's.")
@click.option("-n", "--count", type=click.IntRange(1, 1024), metavar="N", help="How many workers (8).")
@click.option("--each", is_flag=True, help="One unit for each worker and one for the coordinator, instead of a pool.")
@click.option("--print", "only_print", is_flag=True, help="Show the units; write nothing.")
@click.option("--no-enable", is_flag=True, help="Write the units; do not enable or start them.")
@click.option("--fresh", is_flag=True, help="Begin with the defaults, instead of keeping what the installed units say.")
@click.option("--run-as", metavar="NAME", help="User of the system's units (agentctl).")
@click.option(
    "--writable",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DIR",
    help="A folder in which workflows write; may be repeated. Only the system's units have to know.",
)
@click.option("--max-rss", metavar="SIZE", help="As for `workers start`.")
@click.option("--max-age", metavar="TIME", help="As for `workers start`.")
@click.option("--max-tasks", type=click.IntRange(min=1), metavar="N", help="As for `workers start`.")
@click.option(
    "--drain-seconds",
    type=click.IntRange(0, 86_400),
    metavar="S",
    help="How long running commands may go on after a stop (30).",
)
@pass_settings
def workers_install(
    settings: Settings,
    user: bool,
    count: int | None,
    each: bool,
    only_print: bool,
    no_enable: bool,
    fresh: bool,
    run_as: str | None,
    writable: tuple[Path, ...],
    drain_seconds: int | None,
    max_tasks: int | None,
    max_age: str | None,
    max_rss: str | None,
) -> None:
    """Write systemd units for a pool, enable and start them.

    Their database is --db or AGENTCTL_DB, else one in the state folder of the service. Units that agentctl has written
    before are replaced, those of others never: what has changed is restarted, and what is no longer wanted (the other
    layout, higher numbers) is stopped and disabled.

    What the installed units say and this command does not (the database, -n, --writable, limits) is kept, but for the
    layout; --fresh begins with the defaults.
    """
    _require_network(settings)
    from .install import checked_path, given_database, install
    from .installed_units import Options

    for option, kind, value in (("--max-rss", Size(SMALLEST_RSS), max_rss), ("--max-age", Duration(), max_age)):
        if value is not None:
            kind.convert(value, next(p for p in workers_install.params if option in p.opts), None)
    if user and writable:
        raise click.UsageError("--writable is for units of the system; those of a user may write where the user may.")
    if run_as is not None and not run_as.replace("-", "").replace("_", "").isalnum():
        raise click.BadParameter(f"{run_as!r} is no name of a user.", param_hint="--run-as")
    given = Options(
        run_as,
        given_database(settings),
        count,
        drain_seconds,
        max_tasks,
        max_age,
        max_rss,
        tuple(checked_path(os.path.realpath(folder), "--writable") for folder in writable) or None,
    )
    install(settings, given, user=user, each=each, fresh=fresh, enable=not no_enable, only_print=only_print)


@workers.command("list")
@pass_settings
def workers_list(settings: Settings) -> None:
    """List workers: the living first, then those that have ended. Each start is an entry of its own."""
    with closing(open_store(settings)) as store:
        data = views_of(store).workers()

        now = store.clock.now()

        def human(out: Printer) -> None:
            rows = [_row(entry, now) for entry in data["workers"]]
            heads = ("NAME", "STATE", "PID", "DONE", "FAILED", "MEMORY", "VERSION", "UNIT", "LEASE", "TASK", "WORKER")
            out.table(heads, rows, states=1)

        Printer(settings).result("WorkerList", data, human)


def _row(entry: dict[str, Any], now: int) -> tuple[object, ...]:
    task = lease = None
    if entry["taskId"] is not None:
        task = f"{entry['taskId']} ({entry['attempt']}.{entry['delivery']}) of {entry['runId']}"
        left = entry["leaseExpiresAt"] - now
        lease = f"{duration(left)} left" if left >= 0 else f"over for {duration(-left)}"
    return (
        entry["name"],
        entry["state"],
        entry["pid"],
        entry["done"],
        entry["failed"],
        size(entry["rssBytes"]),
        entry["version"],
        entry["unit"],
        lease,
        task,
        entry["workerId"],
    )


@workers.command("drain")
@click.argument("worker")
@pass_settings
def workers_drain(settings: Settings, worker: str) -> None:
    """Let one worker finish what it does, take nothing new, and end. WORKER is an id, a name or a pid."""
    with closing(open_store(settings)) as store:
        row = store.find_process(worker, "worker")
        requested = store.request_drain(row.process_id)

        def human(out: Printer) -> None:
            said = "drains" if requested else "has ended before"
            out.line(f"worker {clean(row.name)} ({row.process_id}, pid {row.pid}) {said}")

        data = {"workerId": row.process_id, "name": row.name, "pid": row.pid, "requested": requested}
        Printer(settings).result("WorkerDrain", data, human)


@workers.command("stop")
@click.option("--hard", is_flag=True, help="End running commands instead of letting them finish.")
@pass_settings
def workers_stop(settings: Settings, hard: bool) -> None:
    """Ask every pool that works on the database to stop: to drain, or with --hard to end running commands now.

    This does not wait for the end; `agentctl workers list` shows who is left.
    """
    from .pool import stop_pool

    with closing(open_store(settings)) as store:
        views = views_of(store)
        known = {row["pid"]: row for kind in ("supervisor", "coordinator") for row in views.processes(kind)}
    pids = stop_pool(settings.database, hard=hard)
    told = [
        {
            "pid": pid,
            "processId": known[pid]["processId"] if pid in known else None,
            "name": known[pid]["name"] if pid in known else None,
        }
        for pid in pids
    ]
    if not told:
        warn(settings, "no pool is live on this database")

    def human(out: Printer) -> None:
        for process in told:
            who = f"{clean(process['name'])} ({process['processId']}), " if process["name"] else ""
            out.line(f"{'asked to end now' if hard else 'asked to stop'}: {who}pid {process['pid']}")

    Printer(settings).result("PoolStop", {"hard": hard, "signalled": told}, human)


@click.group(cls=VerbGroup)
def worker() -> None:
    """Start one worker alone."""


@worker.command("start")
@click.option("--name", type=Name(), metavar="NAME", default="worker", help="Its name in `workers list` (worker).")
@_care_options
@_log_options
@pass_settings
@click.pass_context
def worker_start(
    context: click.Context,
    settings: Settings,
    name: str,
    drain_seconds: float,
    max_tasks: int | None,
    max_age: float | None,
    max_rss: int | None,
) -> None:
    """Be one worker, in this process, until SIGTERM or SIGINT: for a service manager with one unit for each worker.

    It works like one of a pool; a coordinator drives the runs elsewhere, and rescues what it held when it dies.
    The first signal drains it, a second one ends it hard. Exit: 0 drained, 3 forced, 5 could not start.
    """
    _require_network(settings)
    from .pool import start_worker

    _begin_log(settings, name)
    open_store(settings, create=True).close()
    code = start_worker(
        settings.database, name=name, drain_seconds=drain_seconds, limits=Limits(max_tasks, max_age, max_rss)
    )
    _tell_end(settings, code, "the worker")
    context.exit(code)


@click.group(cls=VerbGroup)
def coordinator() -> None:
    """Start a coordinator alone."""


@coordinator.command("start")
@_log_options
@pass_settings
@click.pass_context
def coordinator_start(context: click.Context, settings: Settings) -> None:
    """Drive submitted runs here until SIGTERM or SIGINT; workers are started elsewhere."""
    from .pool import start_coordinator

    _begin_log(settings, "coordinator")
    open_store(settings, create=True).close()
    context.exit(start_coordinator(settings.database))
