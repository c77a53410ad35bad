"""How the store does, in numbers, from one short snapshot: what `doctor` judges and `metrics` shows.

Nothing here walks the tasks or the history of a run: the questions cost as much as there are runs, live attempts and
processes, so they can be asked every few seconds of a database of any age.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from . import asides, process_identity, processes, task_queue
from .database import Connection, Database, all_rows
from .gate import WAL_WRITE_LOCK, record_locks
from .process_identity import Liveness
from .records import HeldClaim, ProcessRow, record

WAL_READERS = range(WAL_WRITE_LOCK + 3, WAL_WRITE_LOCK + 8)
"""Where SQLite locks its shared memory: the write lock, then checkpoint and recovery, then five marks of readers."""


@record
class Facts:
    """Times are epoch milliseconds. `queue` counts attempts that are ready, claimed or finished; `held` by reason."""

    processes: list[ProcessRow]
    runs: dict[str, int]
    queue: dict[str, int]
    held: dict[str, int]
    oldest_ready_at: int | None
    oldest_finished_at: int | None
    claims: list[HeldClaim]
    drivers: dict[str, str | None]
    """The driver of each open run."""
    problems: dict[str, dict[str, Any]]
    """Open runs that nobody of this version drives, and why; see `asides`."""
    uncertain_effects: int
    pending_approvals: int
    newest_at: int
    """The latest moment that anybody has recorded."""


def gather(database: Database) -> Facts:
    """One snapshot."""
    with database.read() as tx:
        rows = processes.everyone(tx)
        newest = max((row.heartbeat_at for row in rows), default=0)
        return Facts(
            processes=rows,
            runs=_counts(tx, "SELECT state, COUNT(*) FROM runs GROUP BY state"),
            queue=_counts(tx, "SELECT queue, COUNT(*) FROM attempts WHERE queue IS NOT NULL GROUP BY queue"),
            held=_counts(tx, "SELECT hold, COUNT(*) FROM attempts WHERE live_task IS NOT NULL AND hold IS NOT NULL "
                             "GROUP BY hold"),
            oldest_ready_at=_number(tx, "SELECT MIN(enqueued_at) FROM attempts WHERE queue = 'ready'"),
            oldest_finished_at=_number(tx, "SELECT MIN(finished_at) FROM attempts WHERE queue = 'finished'"),
            claims=task_queue.all_claims(tx),
            drivers=dict(all_rows(tx.execute("SELECT run_id, driver FROM runs WHERE ended_at IS NULL"))),
            problems=asides.problems(tx),
            uncertain_effects=_number(
                tx,
                "SELECT COUNT(*) FROM effects e WHERE e.status = 'uncertain' AND NOT e.superseded AND NOT EXISTS "
                "(SELECT 1 FROM effect_reconciliations r WHERE r.effect_id = e.effect_id)",
            )
            or 0,
            pending_approvals=_number(tx, "SELECT COUNT(*) FROM approvals WHERE status = 'pending'") or 0,
            newest_at=max(newest, _number(tx, "SELECT MAX(created_at) FROM runs") or 0),
        )  # fmt: skip


def _counts(tx: Connection, sql: str) -> dict[str, int]:
    return dict(all_rows(tx.execute(sql)))


def _number(tx: Connection, sql: str) -> int | None:
    row = tx.execute(sql).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def liveness(row: ProcessRow) -> Liveness:
    """Whether the process of a row lives; a row with an end is dead."""
    if row.stopped_at is not None:
        return Liveness.DEAD
    return process_identity.liveness_of(row.identity)


@dataclass(frozen=True, slots=True)
class FileUse:
    """Who uses the write-ahead log, as far as this user can see. Pids, sorted."""

    open_by: list[int]
    read_by: list[int]
    written_by: list[int]
    """Holds SQLite's write lock at this moment."""


def wal_use(database: Database) -> FileUse:
    """Look into `/proc` for who has the WAL open, who reads a snapshot of it, and who writes."""
    wal = str(database.path) + "-wal"
    shared = str(database.path) + "-shm"
    openers = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            links = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(f"/proc/{name}/fd/{link}") == wal:
                    openers.add(int(name))
                    break
            except OSError:
                continue
    readers, writers = set(), set()
    for pid, kind, first, last in record_locks(shared):
        if kind == "WRITE" and first <= WAL_WRITE_LOCK <= last:
            writers.add(pid)
        elif kind == "READ" and any(first <= mark <= last for mark in WAL_READERS):
            readers.add(pid)
    return FileUse(sorted(openers), sorted(readers), sorted(writers))
