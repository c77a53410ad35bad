"""Audit events and checkpoints: the append-only history of a run. Every function takes the open transaction."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from .database import Connection
from .errors import CorruptStore, IncompatibleVersion, NotFoundError
from .records import AUDIT_EVENT_VERSION, CHECKPOINT_FORMAT_VERSION, Event
from .versions import check_versions

MAX_SEQUENCE = (1 << 36) - 1
"""What a number of the audit trail leaves to the sequence within its run (migration 13)."""

OF_RUN = (
    "event_no BETWEEN (SELECT audit_base FROM runs WHERE run_id = ?1) + ?2 + 1 "  # noqa: S608
    f"AND (SELECT audit_base FROM runs WHERE run_id = ?1) + {MAX_SEQUENCE}"
)
"""The events of run ?1 after number ?2, for a WHERE clause; `event_no` is then their order."""


def append(tx: Connection, run_id: str, events: Sequence[Event], *, actor: str, now: int) -> str | None:
    """Append audit events. The run's row gives the numbers: without gaps, and in one order (architecture 9).

    Returns the driver of the run, whom most callers wake afterwards (None without events, or without a driver).
    """
    if not events:
        return None
    count = len(events)
    row = tx.execute(
        "UPDATE runs SET audit_sequence = audit_sequence + ? WHERE run_id = ? "
        "RETURNING audit_base + audit_sequence, trace_id, driver, runtime_state_version, plan_format_version",
        (count, run_id),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id}")
    check_versions(run_id, row[3], row[4])
    first = row[0] - count + 1
    trace: str = row[1]
    driver: str | None = row[2]
    tx.executemany(
        "INSERT INTO audit_events (event_no, run_id, event_version, event_type, task_id, actor, trace_id, "
        "payload_json, created_at) VALUES (?,?,?,?,?,?,?,?,?)",
        [
            (first + i, run_id, AUDIT_EVENT_VERSION, e.event_type, e.task_id, actor, trace, e.payload_json, now)
            for i, e in enumerate(events)
        ],
    )
    return driver


def checksum(previous: str, state_json: str) -> str:
    """The link of the chain: bare hex SHA-256 over the previous checksum and the stored text."""
    return sha256(f"{previous}\n{state_json}".encode()).hexdigest()


def append_checkpoint(tx: Connection, run_id: str, state_json: str, *, now: int) -> None:
    """Append what changed to the run's chain. Head sequence and checksum live in the run's row and move with it."""
    row = tx.execute("SELECT checkpoint_sequence, checkpoint_checksum FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id}")
    sequence, previous = row[0] + 1, row[1]
    link = checksum(previous, state_json)
    tx.execute(
        "INSERT INTO checkpoints VALUES (?,?,?,?,?,?,?)",
        (run_id, sequence, CHECKPOINT_FORMAT_VERSION, previous, link, state_json, now),
    )
    tx.execute(
        "UPDATE runs SET checkpoint_sequence = ?, checkpoint_checksum = ? WHERE run_id = ?", (sequence, link, run_id)
    )


def read_chain(tx: Connection, run_id: str) -> list[tuple[int, str, str, int]]:
    """The verified chain of a run: (sequence, state_json, checksum, created_at), oldest first.

    Raises `CorruptStore` when a link does not fit and `IncompatibleVersion` for a format from the future.
    """
    chain = []
    previous = ""
    rows = tx.execute(
        "SELECT sequence, format_version, previous_checksum, checksum, state_json, created_at FROM checkpoints "
        "WHERE run_id = ? ORDER BY sequence",
        (run_id,),
    )
    for expected, (sequence, version, linked, link, state_json, created_at) in enumerate(rows, 1):
        if version > CHECKPOINT_FORMAT_VERSION:
            raise IncompatibleVersion(
                f"checkpoint {sequence} of {run_id} was written by a newer agentctl (format {version})",
                remedy="upgrade agentctl",
                run_id=run_id,
            )
        if sequence != expected or linked != previous or checksum(previous, state_json) != link:
            raise CorruptStore(f"checkpoint {sequence} of {run_id} does not continue the chain")
        previous = link
        chain.append((sequence, state_json, link, created_at))
    head = tx.execute(
        "SELECT checkpoint_sequence, checkpoint_checksum FROM runs WHERE run_id = ?", (run_id,)
    ).fetchone()
    if head is not None and head[0] != len(chain):
        raise CorruptStore(f"the chain of {run_id} ends at checkpoint {len(chain)}, not at {head[0]} as its run says")
    if head is not None and head[1] != previous:
        raise CorruptStore(f"the chain of {run_id} ends with another checksum than its run says")
    return chain
