"""Verbs of the artifact store: what it keeps, whether it is sound, and getting it out (contract 8)."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import click
from agentctl.store.errors import UsageError

from .main import EXIT_INTERRUPTED, Settings, VerbGroup, pass_settings
from .render import Printer, clean, counted, size, when
from .run import open_store, views_of
from .stopping import between_steps, tidy

EXIT_DAMAGED = 5
SHOWN_DAMAGED = 20
_DAMAGE = ("missing", "corrupt", "unreadable")


@click.group(cls=VerbGroup)
def artifacts() -> None:
    """List, check, export and collect what runs keep."""


@artifacts.command("list")
@click.option("--run", "run_name", metavar="RUN", help="Only those of one run.")
@click.option(
    "--task", "task_name", metavar="TASK", help="Only those of one task of that run: id, or beginning of one."
)
@pass_settings
def artifacts_list(settings: Settings, run_name: str | None, task_name: str | None) -> None:
    """References of runs to stored bytes. Without --run all of them, and blobs to which nothing refers."""
    if task_name is not None and run_name is None:
        raise UsageError("--task belongs to a --run", remedy="`agentctl artifacts list --run RUN --task TASK`")
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = None if run_name is None else views.find_run(run_name)
        task_id = None if run_id is None or task_name is None else views.find_task(run_id, task_name)
        found = store.artifacts.references(run_id, task_id)
        data: dict[str, Any] = {"runId": run_id, "taskId": task_id, "references": found}
        if run_id is None:
            data["blobs"] = store.artifacts.stored()
        now = store.clock.now()

    def human(out: Printer) -> None:
        free = [item for item in data.get("blobs", ()) if not item["references"]]
        if not found and not free:
            out.line("no artifacts")
            return
        rows = [
            (item["digest"][7:19], size(item["sizeBytes"]), item["taskId"], item["path"], item["runId"])
            for item in found
        ]
        for item in free:
            until = item["leasedUntil"]
            why = f"leased until {when(until)}" if until is not None and until > now else "nothing refers to it"
            rows.append((item["digest"][7:19], size(item["sizeBytes"]), "", "", f"({why})"))
        out.table(("DIGEST", "SIZE", "TASK", "PATH", "RUN"), rows)

    Printer(settings).result("ArtifactList", data, human)


@artifacts.command("inspect")
@click.argument("name", metavar="DIGEST")
@pass_settings
def artifacts_inspect(settings: Settings, name: str) -> None:
    """One blob: who refers to it, who leases it, and whether its bytes are sound. Exit 5 when they are not.

    DIGEST is a digest or the beginning of one.
    """
    with closing(open_store(settings)) as store:
        data = store.artifacts.inspect(store.artifacts.find(name))

    def human(out: Printer) -> None:
        out.line(f"{out.bold(data['digest'])} {size(data['sizeBytes'])}, {data['status']}")
        out.line(f"  stored  {when(data['createdAt'])} at {data['storePath']}")
        for item in data["references"]:
            out.line(f"  kept by {item['runId']}, task {clean(item['taskId'])}: {clean(item['path'])}")
        for item in data["leases"]:
            out.line(f"  leased  until {when(item['expiresAt'])} by {item['runId']}, task {clean(item['taskId'])}")

    Printer(settings).result("ArtifactInspection", data, human)
    if data["status"] != "ok":
        click.get_current_context().exit(EXIT_DAMAGED)


@artifacts.command("verify")
@click.argument("name", metavar="[DIGEST]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every blob; the same as no DIGEST.")
@pass_settings
def artifacts_verify(settings: Settings, name: str | None, everything: bool) -> None:
    """Read and hash stored bytes, one blob or all. Exit 5 when something is missing, damaged or cannot be read."""
    if name is not None and everything:
        raise UsageError("give either a DIGEST or --all")
    with closing(open_store(settings)) as store:
        data = store.artifacts.verify(None if name is None else store.artifacts.find(name))
    data["ok"] = not any(data[word] for word in _DAMAGE)

    def human(out: Printer) -> None:
        out.line(
            f"{counted(data['checked'], 'artifact')}, {size(data['bytes'])}: {'all sound' if data['ok'] else 'damaged'}"
        )
        for word in _DAMAGE:
            for digest in data[word][:SHOWN_DAMAGED]:
                out.line(f"  {out.paint(word, 'red')} {digest}")
            if len(data[word]) > SHOWN_DAMAGED:
                out.line(f"  and {len(data[word]) - SHOWN_DAMAGED} more {word}")
        if data["untracked"]:
            count = counted(len(data["untracked"]), "file")
            out.advise(f"  {count} without a record; `agentctl artifacts gc` removes old ones")

    Printer(settings).result("ArtifactVerification", data, human)
    if not data["ok"]:
        click.get_current_context().exit(EXIT_DAMAGED)


@artifacts.command("export")
@click.argument("name", metavar="DIGEST")
@click.argument("destination", metavar="DEST", type=click.Path())
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
@pass_settings
def artifacts_export(settings: Settings, name: str, destination: str, overwrite: bool) -> None:
    """Copy a blob to a file. DEST appears when the bytes are complete and verified, or not at all."""
    if destination == "-":
        raise UsageError(
            "bytes are exported to a file, since they are verified before they appear; '-' is none",
            remedy="give the name of a file, or ./- for one of that name",
        )
    with closing(open_store(settings)) as store:
        digest = store.artifacts.find(name)
        with tidy():
            written = store.artifacts.export(digest, Path(destination), overwrite=overwrite)
    data = {"digest": digest, "path": destination, "sizeBytes": written}
    Printer(settings).result(
        "ArtifactExport", data, lambda out: out.line(f"{digest} -> {clean(destination)}, {size(written)}")
    )


@artifacts.command("gc")
@click.option(
    "--older-than-days",
    "days",
    type=click.IntRange(0, 36_500),
    default=30,
    help="Only what was stored longer ago (30).",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@pass_settings
def artifacts_gc(settings: Settings, days: int, dry_run: bool) -> None:
    """Remove stored bytes that no run refers to, and what the dead have left half-written.

    What a running or uncommitted task has stored stays, and for an hour what a task that has failed has stored. An
    interrupt ends it between two steps: it tells what it has removed, and the next time goes on (exit 130).
    """
    from agentctl.store.blobs import never
    from agentctl.store.clock import DAY_MS
    from agentctl.store.collection import Collector
    from agentctl.store.faults import Faults

    gently = nullcontext(never) if dry_run else between_steps()
    with closing(open_store(settings)) as store, gently as stopped:
        collector = Collector(store.database, store.artifacts, store.clock, Faults.from_environment())
        data = collector.collect(older_than_ms=days * DAY_MS, dry_run=dry_run, stopped=stopped)
        data |= {"dryRun": dry_run, "interrupted": stopped()}

        def human(out: Printer) -> None:
            verb = "would be removed" if dry_run else "removed"
            count = data["considered"] if dry_run else len(data["removed"])
            out.line(f"{counted(count, 'artifact')} {verb}, {size(data['reclaimedBytes'])}")
            if files := data["temporaryFilesConsidered"] if dry_run else data["temporaryFilesRemoved"]:
                out.line(f"{counted(files, 'unfinished file')} {verb}")
            if data["interrupted"]:
                out.advise("interrupted: `agentctl artifacts gc` again goes on with the rest")

        Printer(settings).result("ArtifactCollection", data, human)
    if data["interrupted"]:
        click.get_current_context().exit(EXIT_INTERRUPTED)
