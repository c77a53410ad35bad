"""Why a run is not driven though coordinators live: what they have set aside, and what a newer agentctl has written.

A note belongs to the process that has set the run aside, and counts as long as that one lives: the next one tries
again. It is kept beside the run (`meta`), whose own records are left alone since they cannot be read or trusted.
"""

from __future__ import annotations

import json
from typing import Any

from . import process_identity, processes, runs
from .canonical import canonical
from .database import Connection, all_rows
from .errors import AgentctlError, IncompatibleVersion
from .process_identity import Liveness
from .records import PLAN_FORMAT_VERSION, RUNTIME_STATE_VERSION
from .versions import check_versions

_KEY = "aside:"


def put(tx: Connection, run_id: str, error: AgentctlError, *, by: str, now: int) -> None:
    """Note that the process `by` does not drive a run because of `error`."""
    note = {"by": by, "code": error.code, "message": error.message, "at": now}
    tx.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_KEY + run_id, canonical(note)))


def forget(tx: Connection, by: str) -> None:
    """Take away the notes of a process that leaves."""
    tx.execute("DELETE FROM meta WHERE key >= ? AND key < ? AND value ->> 'by' = ?", (_KEY, _KEY + "\U0010ffff", by))


def prune(tx: Connection) -> None:
    """Take away the notes about runs that have ended or are gone, and those of processes that have."""
    tx.execute(
        "DELETE FROM meta WHERE key >= ? AND key < ? AND ("
        "substr(key, ?) NOT IN (SELECT run_id FROM runs WHERE ended_at IS NULL) "
        "OR value ->> 'by' NOT IN (SELECT process_id FROM processes WHERE stopped_at IS NULL))",
        (_KEY, _KEY + "\U0010ffff", len(_KEY) + 1),
    )


def problems(tx: Connection) -> dict[str, dict[str, Any]]:
    """`{code, message}` of each open run that a living coordinator does not drive, or that this version cannot read."""
    found: dict[str, dict[str, Any]] = {}
    for key, text in all_rows(
        tx.execute(
            "SELECT key, value FROM meta JOIN runs ON run_id = substr(key, ?) "
            "WHERE key >= ? AND key < ? AND state = 'running' AND driver IS NULL ORDER BY created_at",
            (len(_KEY) + 1, _KEY, _KEY + "\U0010ffff"),
        )
    ):
        note = json.loads(text)
        if _lives(tx, note["by"]):
            found[key.removeprefix(_KEY)] = {"code": note["code"], "message": note["message"]}
    return found | {run_id: _as_json(error) for run_id, error in of_a_newer(tx).items()}


def of_a_newer(tx: Connection) -> dict[str, IncompatibleVersion]:
    """Runs that have not ended and that a newer agentctl has written, oldest first, and what to say of them."""
    found = {}
    for run_id, runtime, plan in tx.execute(
        "SELECT run_id, runtime_state_version, plan_format_version FROM runs WHERE ended_at IS NULL "
        "AND (runtime_state_version > ? OR plan_format_version > ?) ORDER BY created_at",
        (RUNTIME_STATE_VERSION, PLAN_FORMAT_VERSION),
    ):
        try:
            check_versions(run_id, runtime, plan)
        except IncompatibleVersion as error:
            found[run_id] = error
    return found


def problem_of(tx: Connection, run_id: str) -> dict[str, Any] | None:
    """The same of one run, with whatever belongs to it; None when nothing is in its way, or it has ended."""
    row = tx.execute("SELECT 1 FROM runs WHERE run_id = ? AND ended_at IS NULL", (run_id,)).fetchone()
    if row is None:
        return None
    try:
        runs.refuse_future_records(tx, run_id)
    except IncompatibleVersion as error:
        return _as_json(error)
    return problems(tx).get(run_id)


def _as_json(error: AgentctlError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message}


def _lives(tx: Connection, process_id: str) -> bool:
    row = processes.get(tx, process_id)
    if row is None or row.stopped_at is not None:
        return False
    return process_identity.liveness_of(row.identity) is not Liveness.DEAD
