"""Verbs for the care of a store: how large it is, whether it is sound, backup, restoring, what is too old."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from shlex import quote
from typing import Any

import click
from agentctl.store.errors import NotFoundError

from .main import EXIT_INTERRUPTED, Settings, Verb, VerbGroup, pass_settings
from .render import Printer, clean, counted, size
from .run import open_store
from .stopping import between_steps, tidy

EXIT_DAMAGED = 5
SHOWN_RUNS = 20
_FINAL = ("succeeded", "failed", "cancelled")


@click.group(cls=VerbGroup)
def db() -> None:
    """Look after the database: stats, verify, backup, restore, migrate."""


@db.command("stats")
@pass_settings
def db_stats(settings: Settings) -> None:
    """How large the database is, and what is in it."""
    from agentctl.store.verification import statistics

    with closing(open_store(settings)) as store:
        data = statistics(store.database, store.artifacts)

    def human(out: Printer) -> None:
        out.line(f"{out.bold(clean(data['path']))} schema {data['schema']}")
        out.line(f"  file {size(data['fileBytes'])}, log {size(data['walBytes'])}, free {size(data['freeBytes'])}")
        runs = ", ".join(f"{number} {state}" for state, number in data["runs"].items()) or "none"
        out.line(f"  runs: {runs}")
        kept = data["artifacts"]
        references = counted(kept["references"], "reference")
        out.line(f"  artifacts: {kept['blobs']}, {size(kept['bytes'])}, {references}")
        out.table(("TABLE", "ROWS"), [(name, number) for name, number in data["rows"].items() if number])

    Printer(settings).result("DbStats", data, human)


@db.command("verify")
@click.option("--no-artifacts", is_flag=True, help="Leave out the bytes of artifacts.")
@pass_settings
def db_verify(settings: Settings, no_artifacts: bool) -> None:
    """Check the file, the history of every run against the tables, digests, ledger and artifacts. Exit 5 on damage."""
    from agentctl.store.verification import verify

    with closing(open_store(settings)) as store:
        data = verify(store.database, None if no_artifacts else store.artifacts)

    def human(out: Printer) -> None:
        sound = "everything is sound" if data["ok"] else out.paint(counted(data["problemCount"], "problem"), "red")
        out.line(f"{counted(data['runsChecked'], 'run')} checked: {sound}")
        if data["artifacts"] is not None:
            out.line(f"{counted(data['artifacts']['checked'], 'artifact')}, {size(data['artifacts']['bytes'])}")
        for problem in data["problems"]:
            out.line(f"  {clean(problem['where'])}: {clean(problem['message'])}")
        if data["problemCount"] > len(data["problems"]):
            out.line(f"  and {data['problemCount'] - len(data['problems'])} more")

    Printer(settings).result("DbVerification", data, human)
    if not data["ok"]:
        click.get_current_context().exit(EXIT_DAMAGED)


@db.command("backup")
@click.argument("destination", metavar="DEST", type=click.Path(path_type=Path))
@pass_settings
def db_backup(settings: Settings, destination: Path) -> None:
    """Copy the database and its artifacts to a new folder, while others work.

    The copy is one moment of the database. What was running then is, in the copy, as if its worker had died.
    """
    from agentctl.store.backup import backup

    with closing(open_store(settings)) as store, tidy():
        data = backup(store, destination)

    def human(out: Printer) -> None:
        out.line(
            f"{clean(data['path'])}: {counted(data['runs'], 'run')}, {size(data['databaseBytes'])}; "
            f"{counted(data['artifacts'], 'artifact')}, {size(data['artifactBytes'])}"
        )

    Printer(settings).result("DbBackup", data, human)


@db.command("restore")
@click.argument("source", metavar="BACKUP", type=click.Path(path_type=Path))
@pass_settings
def db_restore(settings: Settings, source: Path) -> None:
    """Make the database (--db) from a backup. There must be none yet; nothing is ever overwritten."""
    from agentctl.store.backup import restore
    from agentctl.store.clock import SystemClock

    with tidy():
        data = restore(source, settings.database, SystemClock())

    def human(out: Printer) -> None:
        runs, kept = counted(data["runs"], "run"), counted(data["artifacts"], "artifact")
        out.line(f"{clean(data['path'])}: {runs}, {kept}")
        place = f"--db {clean(quote(data['path']))}"
        out.line(f"next: `agentctl db verify {place}`")
        if data["openRuns"]:
            out.line(f"then: `agentctl resume RUN {place}` for {counted(data['openRuns'], 'run')} that had not ended")

    Printer(settings).result("DbRestore", data, human)


@db.command("migrate")
@pass_settings
def db_migrate(settings: Settings) -> None:
    """Bring the database to the schema of this agentctl. Every other verb does so, too, when it opens it."""
    from agentctl.store.filesystem import require_reachable
    from agentctl.store.migrate import LATEST, version_of

    require_reachable(settings.database)
    if not settings.database.exists():
        raise NotFoundError(f"there is no database at {settings.database}", remedy="give its place with --db PATH")
    before = version_of(settings.database)
    open_store(settings).close()
    data = {"path": str(settings.database), "from": before, "to": LATEST, "migrated": before != LATEST}

    def human(out: Printer) -> None:
        out.line(f"schema {LATEST}" + (f", was {before}" if data["migrated"] else ": nothing to do"))

    Printer(settings).result("DbMigration", data, human)


@click.command(cls=Verb)
@click.option(
    "--older-than-days",
    "days",
    type=click.IntRange(0, 36_500),
    default=30,
    help="Only what ended or expired longer ago (30).",
)
@click.option("--state", "states", type=click.Choice(_FINAL), multiple=True, help="Only such runs; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@pass_settings
def gc(settings: Settings, days: int, states: tuple[str, ...], dry_run: bool) -> None:
    """Remove old runs that have ended, the artifacts that only they have kept, and memory entries that expired as long
    ago; give the space back.

    A run with an effect that nobody has reconciled stays, and so does the source of a run that goes on. An interrupt
    ends it after the run in hand: it tells what it has removed, and the next time goes on (exit 130).
    """
    from agentctl.store.blobs import never
    from agentctl.store.clock import DAY_MS
    from agentctl.store.faults import Faults
    from agentctl.store.retention import collect_runs

    gently = nullcontext(never) if dry_run else between_steps()
    with closing(open_store(settings)) as store, gently as stopped:
        age = days * DAY_MS
        data: dict[str, Any] = collect_runs(
            store.database,
            store.artifacts,
            store.clock,
            Faults.from_environment(),
            older_than_ms=age,
            states=states or _FINAL,
            dry_run=dry_run,
            stopped=stopped,
        )
        # The same age for both (contract 7): what has expired is invisible at once, but can be looked into for a while.
        if dry_run:
            expired = store.memory_expired(older_than_ms=age)
        else:
            expired = store.memory_collect(older_than_ms=age, stopped=stopped)
        data |= {"memory": {"expired": expired}, "interrupted": stopped()}
        Printer(settings).result("Collection", data, lambda out: _collection_for_people(out, data))
    if data["interrupted"]:
        click.get_current_context().exit(EXIT_INTERRUPTED)


def _collection_for_people(out: Printer, data: dict[str, Any]) -> None:
    dry_run = data["dryRun"]
    verb = "would be removed" if dry_run else "removed"
    removed = data["runs"]["removed"]
    out.line(f"{counted(len(removed), 'run')} {verb}")
    for run_id in removed[:SHOWN_RUNS]:
        out.line(f"  {run_id}")
    if len(removed) > SHOWN_RUNS:
        out.line(f"  and {len(removed) - SHOWN_RUNS} more")
    for item in data["runs"]["kept"][:SHOWN_RUNS]:
        out.line(f"  kept {item['runId']}: {item['why'].replace('_', ' ')}")
    kept = data["artifacts"]
    count = kept["considered"] if dry_run else len(kept["removed"])
    out.line(f"{counted(count, 'artifact')} {verb}, {size(kept['reclaimedBytes'])}")
    out.line(f"{counted(data['memory']['expired'], 'expired memory entry', 'expired memory entries')} {verb}")
    if not dry_run:
        out.line(f"database: {size(data['fileBytesBefore'])} before, {size(data['fileBytesAfter'])} now")
    if data["interrupted"]:
        out.advise("interrupted: `agentctl gc` again goes on with the rest")
