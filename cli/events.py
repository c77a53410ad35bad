"""`agentctl events`: the audit trail of one run or of all, once or followed, with a cursor to go on from."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .main import Settings, Verb, pass_settings
from .render import Printer, clean, envelope, reader_is_gone, when
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
@click.option("--limit", type=click.IntRange(1, 1000), default=1000, help="At most so many; not with --follow.")
@click.option("--follow", is_flag=True, help="Go on as events come: for RUN until its end, else until a signal.")
@click.option(
    "--cursor-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Go on after the cursor in this file, and keep it there. Only without RUN.",
)
@pass_settings
def events(
    settings: Settings, run_name: str | None, after: str | None, limit: int, follow: bool, cursor_file: Path | None
) -> None:
    """The audit trail of a run, oldest first; without RUN the trails of all runs.

    With --follow and JSON output each line is an Event. For all runs a line of EventCursor follows each group: with
    `--after` it, or with `--cursor-file`, one goes on there later, and nothing is left out, whatever was restarted or
    removed meanwhile. After a crash of the reader some events may come twice; (runId, sequence) tells them.
    """
    if run_name is not None and cursor_file is not None:
        raise click.UsageError("--cursor-file is for the trails of all runs; with RUN the sequence is the cursor.")
    if after is not None and cursor_file is not None:
        raise click.UsageError("--after and --cursor-file exclude one another.")
    with closing(open_store(settings)) as store:
        printer = Printer(settings)
        if run_name is None:
            _all_runs(printer, store, after, follow, limit, cursor_file)
            return
        sequence = _sequence(after)
        run_id = views_of(store).find_run(run_name)
        if follow:
            _follow_run(printer, store, run_id, sequence)
            return
        found = views_of(store).events(run_id, after=sequence, limit=limit)
        printer.result("EventList", {"runId": run_id, "events": found}, lambda out: _table(out, found))


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
    """Sleep until somebody has committed, or for `at_most` seconds. Raises `BrokenPipeError` when nobody reads."""
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
    begin = None if word is None and follow else Cursor() if word in (None, START) else Cursor.parse(str(word))
    trail = Trail(store.database, begin)
    if not follow:
        found = trail.look(limit, store.clock.monotonic())
        said = trail.cursor().as_text()
        data = {"runId": None, "events": found, "cursor": said}
        out.result("EventList", data, lambda printer: _table(printer, found, runs=True))
        _keep(cursor_file, said)
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


def _kept(cursor_file: Path | None) -> str | None:
    """The cursor of a file; None when there is no file yet."""
    if cursor_file is None:
        return None
    try:
        return cursor_file.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def _keep(cursor_file: Path | None, cursor: str) -> None:
    """Replace the file, whole or not at all, after what it covers was handed over."""
    if cursor_file is None:
        return
    partial = cursor_file.with_name(f".{cursor_file.name}.{os.getpid()}")
    partial.write_text(cursor + "\n", encoding="ascii")
    partial.replace(cursor_file)
