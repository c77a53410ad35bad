"""`agentctl events`: the audit trail of one run or of all, once or followed, with a cursor to go on from."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.errors import EnvironmentFault, UsageError

from .documents import write_file
from .main import Settings, Verb, pass_settings
from .render import Printer, clean, envelope, reader_is_gone, warn, when
from .run import open_store, views_of

if TYPE_CHECKING:
    from agentctl.store.engine import Store
    from agentctl.store.trail import Trail

PAGE = 1000
POLL_SECONDS = 0.2
IDLE_SECONDS = 5.0
START = "start"


@click.command(cls=Verb)
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--after", metavar="CURSOR", help="Go on after it: a sequence of RUN; without RUN a cursor or `start`.")
@click.option("--limit", type=click.IntRange(1, PAGE), metavar="N", help="At most so many (1000); not with --follow.")
@click.option("--follow", is_flag=True, help="Go on as events come: for RUN until its end, else until a signal.")
@click.option(
    "--cursor-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Go on after the cursor in this file, and keep it there. Only without RUN.",
)
@pass_settings
def events(
    settings: Settings,
    run_name: str | None,
    after: str | None,
    limit: int | None,
    follow: bool,
    cursor_file: Path | None,
) -> None:
    """The audit trail of a run, oldest first; without RUN the trails of all runs.

    At most 1000 are shown at once; `next` of the answer is what --after goes on with, null at the end.

    With --follow and JSON output each line is an Event. For all runs a line of EventCursor follows each group: with
    `--after` it, or with `--cursor-file`, one goes on there later, and nothing is left out, whatever was restarted or
    removed meanwhile. After a crash of the reader some events may come twice; (runId, sequence) tells them.
    """
    if run_name is not None and cursor_file is not None:
        raise click.UsageError("--cursor-file is for the trails of all runs; with RUN the sequence is the cursor.")
    if after is not None and cursor_file is not None:
        raise click.UsageError("--after and --cursor-file exclude one another.")
    if limit is not None and follow:
        raise click.UsageError("--limit and --follow exclude one another: who follows gets everything.")
    if cursor_file is not None:
        _require_place(cursor_file)
    at_most = PAGE if limit is None else limit
    with closing(open_store(settings)) as store:
        printer = Printer(settings)
        if run_name is None:
            _all_runs(printer, store, after, follow, at_most, cursor_file)
            return
        sequence = _sequence(after)
        run_id = views_of(store).find_run(run_name)
        if follow:
            _follow_run(printer, store, run_id, sequence)
            return
        found = views_of(store).events(run_id, after=sequence, limit=at_most)
        more = len(found) == at_most and bool(views_of(store).events(run_id, after=found[-1]["sequence"], limit=1))
        following = str(found[-1]["sequence"]) if more else None
        data = {"runId": run_id, "events": found, "next": following}
        printer.result("EventList", data, lambda out: _table(out, found))
        _tell_rest(settings, run_id, following)


def _tell_rest(settings: Settings, run_id: str | None, following: str | None) -> None:
    """People see where it was cut; programs have `next`."""
    if following is not None and not settings.json:
        of = "" if run_id is None else f" {run_id}"
        warn(settings, f"there is more: `agentctl events{of} --after {following}`")


def _sequence(after: str | None) -> int:
    if after is None or after == START:
        return 0
    if not after.isascii() or not after.isdecimal() or len(after) > 18:
        raise click.BadParameter(f"{after!r} is no sequence of an event.", param_hint="--after")
    return int(after)


def _table(out: Printer, found: list[dict[str, Any]], *, runs: bool = False) -> None:
    heads = ("#", "TIME", "EVENT", "TASK", "WHAT")
    rows: list[tuple[object, ...]] = [
        (e["sequence"], when(e["createdAt"]), e["eventType"], e["taskId"], json.dumps(e["payload"], ensure_ascii=False))
        for e in found
    ]
    if runs:
        rows = [(e["runId"], *row) for e, row in zip(found, rows, strict=True)]
    out.table(("RUN", *heads) if runs else heads, rows)


def _lines(out: Printer, found: list[dict[str, Any]]) -> None:
    if not found:
        return
    if out.settings.json:
        out.line("\n".join(envelope("Event", event) for event in found))
        return
    for event in found:
        what = clean(json.dumps(event["payload"], ensure_ascii=False))
        task = f" {clean(event['taskId'])}" if event["taskId"] is not None else ""
        out.line(f"{when(event['createdAt'])} {event['runId']} {event['sequence']} {event['eventType']}{task} {what}")


def _wait_for_change(store: Store, seen: tuple[int, int], at_most: float) -> tuple[int, int]:
    """Sleep until somebody has committed, or for `at_most` seconds.

    Raises `BrokenPipeError` when nobody reads, and `StoreGone`: a file that was moved away says nothing new for ever.
    """
    store.database.require_place()
    until = store.clock.monotonic() + at_most
    version = seen
    while version == seen and store.clock.monotonic() < until:
        store.clock.sleep(POLL_SECONDS)
        if reader_is_gone():
            raise BrokenPipeError
        version = store.database.data_version()
    return version


def _follow_run(out: Printer, store: Store, run_id: str, after: int) -> None:
    """Until the run has ended and everything was told. Raises `NotFoundError` when it is removed meanwhile."""
    views = views_of(store)
    while True:
        # In this order: what commits between the two looks is seen as a change.
        seen = store.database.data_version()
        ended = store.get_run(run_id).ended_at is not None
        while found := views.events(run_id, after=after, limit=PAGE):
            _lines(out, found)
            after = found[-1]["sequence"]
        if ended:
            return
        _wait_for_change(store, seen, IDLE_SECONDS)


def _all_runs(
    out: Printer, store: Store, after: str | None, follow: bool, limit: int, cursor_file: Path | None
) -> None:
    from agentctl.store.trail import Cursor, Trail

    kept = _kept(cursor_file)
    word = after if kept is None else kept
    try:
        begin = None if word is None and follow else Cursor() if word in (None, START) else Cursor.parse(str(word))
    except UsageError as error:
        if kept is None:
            raise
        raise UsageError(
            f"{cursor_file}: {error.message}", remedy="remove that file to begin anew, or write a cursor into it"
        ) from error
    trail = Trail(store.database, begin)
    if not follow:
        found = trail.look(limit, store.clock.monotonic())
        said = trail.cursor().as_text()
        # The second look tells whether there is more, and takes nothing: the cursor was asked for before it.
        more = len(found) == limit and bool(trail.look(1, store.clock.monotonic()))
        following = said if more else None
        data = {"runId": None, "events": found, "cursor": said, "next": following}
        out.result("EventList", data, lambda printer: _table(printer, found, runs=True))
        _keep(cursor_file, said)
        _tell_rest(out.settings, None, following)
        return
    _follow_all(out, store, trail, cursor_file)


def _follow_all(out: Printer, store: Store, trail: Trail, cursor_file: Path | None) -> None:
    said = trail.cursor().as_text()
    if out.settings.json:
        out.line(envelope("EventCursor", {"cursor": said}))
    _keep(cursor_file, said)
    while True:
        seen = store.database.data_version()
        found = trail.look(PAGE, store.clock.monotonic())
        _lines(out, found)
        # A run that ended without a new event changes the cursor as well; that alone is not worth a line.
        if found:
            said = trail.cursor().as_text()
            if out.settings.json:
                out.line(envelope("EventCursor", {"cursor": said}))
            _keep(cursor_file, said)
        if len(found) < PAGE:
            _wait_for_change(store, seen, IDLE_SECONDS)


def _require_place(cursor_file: Path) -> None:
    """Raise before anything is read or printed when the cursor could not be kept."""
    folder = cursor_file.absolute().parent
    if not folder.is_dir():
        raise EnvironmentFault(
            f"--cursor-file {cursor_file}: there is no folder {folder}", remedy="make it, or name another file"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentFault(
            f"--cursor-file {cursor_file}: nothing may be written to {folder}", remedy="name a file elsewhere"
        )


def _kept(cursor_file: Path | None) -> str | None:
    """The cursor of a file; None when there is no file yet. One that was made empty means the beginning."""
    if cursor_file is None:
        return None
    try:
        return cursor_file.read_text(encoding="ascii", errors="replace").strip() or START
    except FileNotFoundError:
        return None


def _keep(cursor_file: Path | None, cursor: str) -> None:
    """Replace the file, whole or not at all, after what it covers was handed over. Raises `EnvironmentFault`."""
    if cursor_file is None:
        return
    write_file(cursor_file, cursor + "\n")
