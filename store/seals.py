"""Seals: digests over what a row says besides what history tells of it in words, so that no column can be changed
behind the back of agentctl without being found.

The seal of a run stands in its first checkpoint, that of a task in the checkpoint of its end, those of an effect in the
events of its request and of its end. History of earlier versions has none: then nothing is compared. Every function
takes the open transaction and returns bare hex digests, those of tasks cut to half their length.

When a task was first claimed, and when and how often an effect was started, are in no seal: the audit trail tells that
in words and times (see `proofs`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from .canonical import ascii_json
from .database import Connection, all_rows

_RUN = (
    "mode, workflow_name, base_path, submission_digest, idempotency_key, priority, max_concurrency, max_deliveries, "
    "deadline_at, parent_run_id, source_run_id, lineage_json, created_at"
)
"""What never changes in the row of a run, apart from digests that its creation tells."""

_TASK = (
    "metadata_version, disposition, input_digest, error_json, decision_json, delta_digest, definition_fingerprint, "
    "output_contract_fingerprint, source_run_id, source_task_id, source_attempt, reuse_decision_json, ended_at"
)
"""What does not change in the row of a task that has ended. Output and manifest have digests of their own."""

REQUEST = ("effect_class", "risk", "idempotency", "expected_json", "trace_id", "requested_at")
"""What is said of an effect when it is requested, apart from its identity and input."""

ESTIMATE = "estimate_json"
"""The last of them, where there is one: effects of earlier versions have none, and were sealed without it."""

END = ("result_json", "error_json", "notes_json", "completed_at")
"""What is said of an effect when it ends, apart from its status."""


def seal(values: Sequence[Any]) -> str:
    """The digest over texts, numbers and nulls of a row."""
    return sha256(ascii_json(values).encode()).hexdigest()


def with_estimate(words: Sequence[Any], estimate: str | None) -> Sequence[Any]:
    """What is sealed of a request, with what it reserves if it reserves anything."""
    return words if estimate is None else (*words, estimate)


def of_run(tx: Connection, run_id: str) -> str:
    """The seal of a run's row."""
    row = tx.execute(f"SELECT {_RUN} FROM runs WHERE run_id = ?", (run_id,)).fetchone()  # noqa: S608
    return seal(row or ())


def of_tasks(tx: Connection, first: int, positions: Sequence[int]) -> list[list[Any]]:
    """[position, seal] of some tasks of the run whose first task has the number `first`, in compiled order.

    It is asked for every task that ends, so SQLite itself makes the texts that are digested.
    """
    wanted = set(positions)
    low, high = min(wanted), max(wanted)
    if high - low < 2 * len(wanted):
        rows = tx.execute(
            f"SELECT position, json_array({_TASK}) FROM tasks WHERE task_no BETWEEN ? AND ?",  # noqa: S608
            (first + low, first + high),
        )
        return [[position, _short(text)] for position, text in rows if position in wanted]
    rows = tx.execute(
        f"SELECT position, json_array({_TASK}) FROM tasks "  # noqa: S608
        "WHERE task_no IN (SELECT value FROM json_each(?)) ORDER BY task_no",
        (json.dumps([first + position for position in positions]),),
    )
    return [[position, _short(text)] for position, text in rows]


def broken_tasks(tx: Connection, first: int, told: dict[int, str]) -> list[str]:
    """The ids of tasks that say something else than when they ended; `told` are their seals by position."""
    if not told:
        return []
    rows = all_rows(
        tx.execute(
            f"SELECT task_id, position, json_array({_TASK}) FROM tasks "  # noqa: S608
            "WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
            (first + min(told), first + max(told)),
        )
    )
    return [task_id for task_id, position, text in rows if position in told and _short(text) != told[position]]


def _short(text: str) -> str:
    """Half a digest: there is one in a checkpoint for every task, and 128 bits are enough for each."""
    return sha256(text.encode()).hexdigest()[:32]
