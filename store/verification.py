"""Is the store what it says? Integrity of the file, the chains of all runs against the tables, digests, artifacts.

It only reads, a short transaction for each run, so it can be asked of a database at work. What it finds is told, never
repaired: a damaged store is for a person with a backup.
"""

from __future__ import annotations

import json
from typing import Any

from . import audit, proofs, runs, seals
from .artifacts import Artifacts
from .canonical import text_digest
from .database import Connection, Database, all_rows
from .errors import AgentctlError, CorruptStore, NotFoundError
from .memory_entries import ENTRY_FORMAT
from .migrate import LATEST
from .records import Run
from .states import RUN_FINAL

MAX_PROBLEMS = 100
"""How many problems are listed; `problemCount` is complete."""


def verify(database: Database, artifacts: Artifacts | None) -> dict[str, Any]:
    """Everything that can be checked; without `artifacts` their bytes are left out.

    `{ok, schema, runsChecked, problems: [{where, message}], problemCount, artifacts}`.
    """
    found: list[tuple[str, str]] = []
    with database.read() as tx:
        found += [("file", str(row[0])) for row in tx.execute("PRAGMA integrity_check") if row[0] != "ok"]
        found += [
            (str(table), f"row {number} refers to one of {parent} that is not there")
            for table, number, parent, _ in tx.execute("PRAGMA foreign_key_check")
        ]
        found += [
            ("memory", f"entry {key!r} of {namespace!r} was written by a newer agentctl (version {version})")
            for namespace, key, version in tx.execute(
                "SELECT namespace, memory_key, format_version FROM long_term_memory WHERE format_version > ?",
                (ENTRY_FORMAT,),
            )
        ]
        run_ids = [row[0] for row in tx.execute("SELECT run_id FROM runs ORDER BY created_at, run_id")]
    checked = 0
    for run_id in run_ids:
        try:
            found += [(run_id, message) for message in problems_of(database, run_id)]
            checked += 1
        except NotFoundError:
            continue  # it was removed meanwhile
        except AgentctlError as error:
            found.append((run_id, error.message))
    report = None
    if artifacts is not None:
        report = artifacts.verify(None)
        for word in ("missing", "corrupt", "unreadable"):
            found += [("artifacts", f"{digest} is {word}") for digest in report[word]]
    return {
        "ok": not found,
        "schema": LATEST,
        "runsChecked": checked,
        "problems": [{"where": where, "message": message} for where, message in found[:MAX_PROBLEMS]],
        "problemCount": len(found),
        "artifacts": report,
    }


def problems_of(database: Database, run_id: str) -> list[str]:
    """What does not fit in one run, in words; its artifacts are left out. Raises `CorruptStore` for a broken chain."""
    with database.read() as tx:
        found = _run_problems(tx, run_id)
    # What never changes once it is written needs no common snapshot with the rest.
    with database.read() as tx:
        found += proofs.effect_problems(tx, run_id)
    with database.read() as tx:
        found += proofs.document_problems(tx, run_id)
    return found


def require_sound(database: Database, run_id: str) -> None:
    """Raise `CorruptStore` unless a run that others are to be made from is what it says."""
    found = problems_of(database, run_id)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise CorruptStore(
            f"{run_id} is damaged: {found[0]}{more}; nothing was made from it",
            remedy="`agentctl db verify` tells all of it; take the database from a backup",
            run_id=run_id,
        )


def _run_problems(tx: Connection, run_id: str) -> list[str]:
    """What the tables say of a run and its chain, its trail or its digests do not. Raises `CorruptStore` for a chain
    that is broken in itself."""
    run = runs.get(tx, run_id)
    future = runs.future_records(tx, run_id)
    if future:
        return future  # whatever else does not fit may be what the newer one means by it
    links = audit.read_chain(tx, run_id)
    told = rebuild([state for _, state, _, _ in links])
    problems: list[str] = []
    if told["state"] != run.state or told["reason"] != run.reason:
        problems.append(f"the run is {run.state} ({run.reason}), its chain says {told['state']} ({told['reason']})")
    if told["cancel"] != (run.cancel_requested_at is not None):
        problems.append("the chain tells something else of its cancellation")
    if told["memory"] != [list(row) for row in runs.memory_rows(tx, run_id)]:
        problems.append("the chain tells of another working memory")
    problems += _row_problems(tx, run, told)
    problems += _task_problems(tx, run, told)
    problems += _artifact_problems(tx, run, told["artifacts"])
    problems += _conclusion_problems(tx, run_id, told)
    output = runs.output(tx, run_id)
    if told["ended"] and told["output"] != (None if output is None else text_digest(output)):
        problems.append("the output of the run is not the one that its chain tells of")
    problems += proofs.result_problems(tx, run)
    problems += proofs.trail_problems(tx, run)
    problems += proofs.ledger_problems(tx, run_id)
    problems += proofs.call_problems(tx, run)
    return problems


def rebuild(chain: list[str]) -> dict[str, Any]:
    """The state of a run from nothing but its checkpoints. What a worker has claimed is `ready` in it."""
    first = json.loads(chain[0]) if chain else {"state": None, "created": 0, "workingMemory": {}}
    tasks: list[list[Any]] = [["pending", 0, None, None] for _ in range(first["created"])]
    memory = [[key, -1, value] for key, value in first["workingMemory"].items()]
    told: dict[str, Any] = {"state": first["state"], "reason": None, "cancel": False, "artifacts": {}}
    # Chains of earlier versions tell nothing of documents and of the output.
    told |= {"output": None, "ended": False, "conclusions": {}, "results": {}}
    told |= {"row": first.get("row"), "error": None, "seals": {}}
    for number, change in enumerate(map(json.loads, chain)):
        # A run that was made from another one begins with what it has taken over.
        for position, *values in change.get("tasks", ()):
            tasks[position] = values
        memory.extend(change.get("memory", ()))
        told["artifacts"].update(dict(change.get("artifacts", ())))
        told["conclusions"].update(change.get("reconciliations", {}))
        told["results"].update(change.get("results", {}))
        told["seals"].update(dict(change.get("seals", ())))
        if "state" in change and number:
            told["state"], told["reason"] = change["state"], change.get("reason")
            told["output"] = change.get("output")
            told["error"] = change.get("error")
            told["ended"] = "documents" in first and change["state"] in RUN_FINAL
        told["cancel"] = told["cancel"] or change.get("cancellationRequested", False)
    memory.sort(key=lambda item: (item[0], item[1]))
    return {**told, "tasks": tasks, "memory": memory}


def _row_problems(tx: Connection, run: Run, told: dict[str, Any]) -> list[str]:
    """What the row of the run and those of its ended tasks say besides states and outputs (see `seals`)."""
    problems = []
    if told["row"] is not None:
        if seals.of_run(tx, run.run_id) != told["row"]:
            problems.append("the row of the run is not the one that it was created with")
        if told["ended"] and told["error"] != (None if run.error_json is None else text_digest(run.error_json)):
            problems.append("the error of the run is not the one that its chain tells of")
    return problems + [
        f"the record of task {name} is not the one with which it has ended"
        for name in seals.broken_tasks(tx, run.first_task, told["seals"])
    ]


def _task_problems(tx: Connection, run: Run, told: dict[str, Any]) -> list[str]:
    problems = []
    rows = all_rows(
        tx.execute(
            "SELECT task_id, state, attempt, output_json, output_digest, delta_json, delta_digest FROM tasks "
            "WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
            (run.first_task, run.first_task + run.task_count - 1),
        )
    )
    if len(rows) != len(told["tasks"]):
        return [f"there are {len(rows)} tasks, its chain tells of {len(told['tasks'])}"]
    for (task_id, state, attempt, output, output_digest, delta, delta_digest), known in zip(
        rows, told["tasks"], strict=True
    ):
        shown = "ready" if state == "running" else state
        # The number of an attempt rises with its claim, which appends nothing.
        if shown != known[0] or (shown != "ready" and [attempt, output_digest] != known[1:3]):
            problems.append(f"task {task_id} is {state}, its chain says {known[0]}, or another attempt or output")
        for name, text, digest in (("output", output, output_digest), ("state delta", delta, delta_digest)):
            if (None if text is None else text_digest(text)) != digest:
                problems.append(f"the {name} of task {task_id} does not fit its digest")
    return problems


def _artifact_problems(tx: Connection, run: Run, told: dict[int, str]) -> list[str]:
    """The manifest of each task against the chain, and its references against the manifest."""
    problems = []
    for task_id, position, text in all_rows(
        tx.execute(
            "SELECT task_id, position, artifact_manifest_json FROM tasks WHERE task_no BETWEEN ? AND ? "
            "AND (artifact_manifest_json IS NOT NULL OR position IN (SELECT value FROM json_each(?)))",
            (run.first_task, run.first_task + run.task_count - 1, json.dumps(list(told))),
        )
    ):
        if text is None or text_digest(text) != told.get(position):
            problems.append(f"the manifest of task {task_id} is not the one that its chain tells of")
            continue
        kept = all_rows(
            tx.execute(
                "SELECT logical_path, digest, size_bytes FROM artifact_refs WHERE run_id = ? AND task_id = ? "
                "ORDER BY logical_path",
                (run.run_id, task_id),
            )
        )
        wanted = [(item["path"], item["digest"], item["sizeBytes"]) for item in json.loads(text)]
        if sorted(kept) != sorted(wanted):
            problems.append(f"the references of task {task_id} are not those of its manifest")
    return problems


def _conclusion_problems(tx: Connection, run_id: str, told: dict[str, Any]) -> list[str]:
    """The last conclusion about each effect, and the result that was given with it, against the chain."""
    kept: dict[str, str] = {}
    results: dict[str, str] = {}
    for effect_id, status, result in tx.execute(
        "SELECT effect_id, status, result_json FROM effect_reconciliations WHERE run_id = ? ORDER BY reconciliation_no",
        (run_id,),
    ):
        kept[effect_id] = status
        if result is not None:
            results[effect_id] = text_digest(result)
    problems = [
        f"the chain tells of another conclusion about effect {effect_id[:12]}"
        for effect_id in sorted(kept.keys() | told["conclusions"].keys())
        if kept.get(effect_id) != told["conclusions"].get(effect_id)
    ]
    # Chains of earlier versions tell of no results.
    return problems + [
        f"the chain tells of another result of effect {effect_id[:12]}"
        for effect_id, digest in sorted(told["results"].items())
        if results.get(effect_id) != digest
    ]


def statistics(database: Database, artifacts: Artifacts) -> dict[str, Any]:
    """How large everything is: the file and its log, rows of each table, runs by state, artifacts."""
    with database.read() as tx:

        def number(sql: str) -> int:
            row = tx.execute(sql).fetchone()
            return int(row[0] or 0) if row else 0

        tables = [
            row[0]
            for row in tx.execute("SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table'")
            if not row[0].startswith("sqlite_")
        ]
        page = number("PRAGMA page_size")
        wal = database.path.with_name(database.path.name + "-wal")
        return {
            "path": str(database.path),
            "schema": number("PRAGMA user_version"),
            "fileBytes": database.path.stat().st_size,
            "walBytes": wal.stat().st_size if wal.exists() else 0,
            "freeBytes": number("PRAGMA freelist_count") * page,
            "runs": dict(all_rows(tx.execute("SELECT state, COUNT(*) FROM runs GROUP BY state ORDER BY state"))),
            "rows": {name: number(f'SELECT COUNT(*) FROM "{name}"') for name in sorted(tables)},  # noqa: S608
            "artifacts": {
                "blobs": number("SELECT COUNT(*) FROM artifact_blobs"),
                "bytes": number("SELECT SUM(size_bytes) FROM artifact_blobs"),
                "references": number("SELECT COUNT(*) FROM artifact_refs"),
                "referencedBytes": number(
                    "SELECT SUM(size_bytes) FROM artifact_blobs WHERE digest IN (SELECT digest FROM artifact_refs)"
                ),
                "leases": number("SELECT COUNT(*) FROM artifact_ingests"),
                "temporaryFiles": len(artifacts.blobs.temporary()),
            },
        }
