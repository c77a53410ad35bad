"""Who works on the database: one row per process, with its identity and its heartbeat."""

from __future__ import annotations

from .database import Connection
from .records import ProcessRow

COLUMNS = (
    "process_id, kind, name, identity, pid, parent_process_id, only_run, unit, state, version, started_at, "
    "heartbeat_at, drain_requested_at, stopped_at, done, failed, rss_bytes"
)


def register(tx: Connection, row: ProcessRow) -> None:
    """A new incarnation. Its id is never used again, so a restart under the same name hides nobody (field report 4)."""
    tx.execute(
        f"INSERT INTO processes ({COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",  # noqa: S608
        (
            row.process_id,
            row.kind,
            row.name,
            row.identity,
            row.pid,
            row.parent_process_id,
            row.only_run,
            row.unit,
            row.state,
            row.version,
            row.started_at,
            row.heartbeat_at,
            row.drain_requested_at,
            row.stopped_at,
            row.done,
            row.failed,
            row.rss_bytes,
        ),
    )


def heartbeat(tx: Connection, process_id: str, *, rss_bytes: int, done: int, failed: int, now: int) -> bool:
    """The process says that it lives. Returns whether it has been asked to drain."""
    row = tx.execute(
        "UPDATE processes SET heartbeat_at = ?, rss_bytes = ?, done = ?, failed = ? WHERE process_id = ? "
        "RETURNING drain_requested_at",
        (now, rss_bytes, done, failed, process_id),
    ).fetchone()
    return row is not None and row[0] is not None


def set_state(tx: Connection, process_id: str, state: str, *, now: int) -> None:
    """`idle`, `busy`, `draining` or `stopped`; a row that is stopped or dead stays so."""
    tx.execute(
        "UPDATE processes SET state = ?, stopped_at = ? WHERE process_id = ? AND stopped_at IS NULL",
        (state, now if state in ("stopped", "dead") else None, process_id),
    )


def request_drain(tx: Connection, process_id: str, *, now: int) -> bool:
    """Ask a process to take nothing new and to end. False when it has ended already."""
    tx.execute(
        "UPDATE processes SET drain_requested_at = COALESCE(drain_requested_at, ?) "
        "WHERE process_id = ? AND stopped_at IS NULL",
        (now, process_id),
    )
    return tx.changes() == 1


def live(tx: Connection, kind: str | None = None) -> list[ProcessRow]:
    """Rows of processes that have not said goodbye; whether they really live is asked of the system."""
    sql = f"SELECT {COLUMNS} FROM processes WHERE stopped_at IS NULL"  # noqa: S608
    rows = tx.execute(sql + " AND kind = ?", (kind,)) if kind else tx.execute(sql)
    return [ProcessRow(*row) for row in rows]


def everyone(tx: Connection) -> list[ProcessRow]:
    """All rows, oldest first."""
    sql = f"SELECT {COLUMNS} FROM processes ORDER BY started_at, process_id"  # noqa: S608
    return [ProcessRow(*row) for row in tx.execute(sql)]


def get(tx: Connection, process_id: str) -> ProcessRow | None:
    """One row, or None."""
    sql = f"SELECT {COLUMNS} FROM processes WHERE process_id = ?"  # noqa: S608
    row = tx.execute(sql, (process_id,)).fetchone()
    return ProcessRow(*row) if row else None


def idle_workers(tx: Connection, limit: int, *, for_run: str | None) -> list[str]:
    """Workers that sleep and may be woken for the work of a run; None: for that of whatever run.

    One that serves another run only would look, sleep again, and nobody else would have been called.
    """
    return [
        row[0]
        for row in tx.execute(
            "SELECT process_id FROM processes WHERE kind = 'worker' AND state = 'idle' AND stopped_at IS NULL "
            "AND (?1 IS NULL OR only_run IS NULL OR only_run = ?1) LIMIT ?2",
            (for_run, limit),
        )
    ]


def prune(tx: Connection, *, before: int) -> int:
    """Delete rows of processes that ended before `before` and hold nothing. Returns how many."""
    tx.execute(
        "DELETE FROM processes WHERE stopped_at IS NOT NULL AND stopped_at < ? AND NOT EXISTS "
        "(SELECT 1 FROM attempts WHERE queue = 'claimed' AND holder = process_id)",
        (before,),
    )
    return tx.changes()
