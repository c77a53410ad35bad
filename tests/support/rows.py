"""A look into the database past all verbs, for assertions, and the state of a run as its chain tells it."""

from __future__ import annotations

import json
from typing import Any

from agentctl.store import audit, process_identity
from agentctl.store.database import Connection
from agentctl.store.engine import Store

TABLES = [
    "processes",
    "runs",
    "run_documents",
    "run_outputs",
    "tasks",
    "attempts",
    "turns",
    "effects",
    "memory_values",
    "run_budgets",
    "budget_lines",
    "budget_reservations",
    "checkpoints",
    "audit_events",
    "approvals",
    "effect_reconciliations",
    "tool_calls",
    "protocol_sessions",
    "protocol_calls",
    "provider_sessions",
    "stream_events",
    "artifact_blobs",
    "artifact_ingests",
    "artifact_refs",
    "long_term_memory",
    "compensations_due",
    "run_numbers",
]


def rows(store: Store, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows of a question."""
    with store.database.read() as tx:
        return list(tx.execute(sql, values))


def one(store: Store, sql: str, *values: Any) -> tuple[Any, ...]:
    """The only row of a question."""
    found = rows(store, sql, *values)
    assert len(found) == 1, found
    return found[0]


def scalar(store: Store, sql: str, *values: Any) -> Any:
    """The only value of a question."""
    return one(store, sql, *values)[0]


def dump(tx: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that is recorded, table by table."""
    return {table: list(tx.execute(f"SELECT * FROM {table} ORDER BY 1, 2")) for table in TABLES}  # noqa: S608


def everything(store: Store) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that is recorded, in one snapshot."""
    with store.database.read() as tx:
        return dump(tx)


def task_state(store: Store, position: int, run_id: str = "run-1") -> str:
    """The state of a task."""
    return str(scalar(store, "SELECT state FROM tasks WHERE run_id = ? AND position = ?", run_id, position))


def attempt(store: Store, attempt_id: int) -> dict[str, Any]:
    """The row of an attempt."""
    names = "state holder delivery lost lost_effects lease_expires_at outcome hold number error_json"
    columns = names.replace(" ", ", ")
    row = one(store, f"SELECT {columns} FROM attempts WHERE attempt_id = ?", attempt_id)  # noqa: S608
    return dict(zip(names.split(), row, strict=True))


def effect(store: Store, effect_id: str) -> dict[str, Any]:
    """The row of an effect."""
    names = "status dispatches confirmed superseded result_json error_json completed_at"
    columns = names.replace(" ", ", ")
    row = one(store, f"SELECT {columns} FROM effects WHERE effect_id = ?", effect_id)  # noqa: S608
    return dict(zip(names.split(), row, strict=True))


def ledger_line(store: Store, dimension: str, run_id: str = "run-1") -> tuple[int | None, int, int]:
    """(limit, used, reserved) of a dimension."""
    limit, used, reserved = one(
        store,
        "SELECT limit_units, used, reserved FROM budget_lines WHERE run_id = ? AND dimension = ?",
        run_id,
        dimension,
    )
    return limit, used, reserved


def rebuild(chain: list[str]) -> dict[str, Any]:
    """The state of a run from nothing but its checkpoints: what a reader without the tables would believe.

    A task that a worker has claimed is `ready` here, since claims append nothing.
    """
    first = json.loads(chain[0])
    state: dict[str, Any] = {
        "state": first["state"],
        "reason": None,
        "cancel": False,
        "tasks": [["pending", 0, None, None] for _ in range(first["created"])],
        "memory": [[key, -1, value] for key, value in first["workingMemory"].items()],
    }
    for number, text in enumerate(chain):
        change = json.loads(text)
        for position, *values in change.get("tasks", []):
            state["tasks"][position] = values
        state["memory"].extend(change.get("memory", []))
        if "state" in change and number:
            state["state"] = change["state"]
            state["reason"] = change.get("reason")
        state["cancel"] = state["cancel"] or change.get("cancellationRequested", False)
    state["memory"].sort(key=lambda item: (item[0], item[1]))
    return state


def assert_chain_equals_tables(tx: Connection, run_id: str) -> None:
    """The chain is whole, and tells of the run what the tables tell."""
    links = audit.read_chain(tx, run_id)
    told = rebuild([link[1] for link in links])
    head = tx.execute(
        "SELECT checkpoint_sequence, checkpoint_checksum, state, reason, cancel_requested_at, audit_sequence FROM runs "
        "WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    assert head is not None
    assert (head[0], head[1]) == (links[-1][0], links[-1][2]), "the run's row names another head"
    assert told["state"] == head[2]
    assert told["reason"] == head[3]
    assert told["cancel"] == (head[4] is not None)
    rows_ = tx.execute(
        "SELECT state, attempt, output_digest FROM tasks WHERE run_id = ? ORDER BY position", (run_id,)
    ).fetchall()
    for position, (row, known) in enumerate(zip(rows_, told["tasks"], strict=True)):
        state = "ready" if row[0] == "running" else row[0]
        assert state == known[0], f"task {position}: {row} in the table, {known} in the chain"
        if state != "ready":  # the number of the attempt rises with the claim
            assert (row[1], row[2]) == (known[1], known[2]), f"task {position}"
    memory = [
        list(row)
        for row in tx.execute(
            "SELECT key, position, value_json FROM memory_values WHERE run_id = ? ORDER BY key, position", (run_id,)
        )
    ]
    assert memory == told["memory"]
    events = [
        row[0] for row in tx.execute("SELECT sequence FROM audit_events WHERE run_id = ? ORDER BY sequence", (run_id,))
    ]
    assert events == list(range(1, head[5] + 1)), "the audit trail has a gap"


def check_chains(store: Store) -> None:
    """All runs: chain and tables tell the same."""
    with store.database.read() as tx:
        for (run_id,) in tx.execute("SELECT run_id FROM runs").fetchall():
            assert_chain_equals_tables(tx, run_id)


def dead_identity() -> str:
    """The identity of a process of an earlier boot: provably dead."""
    now = process_identity.current()
    return process_identity.ProcessIdentity("an-earlier-boot", now.pid_namespace, now.pid, now.start_ticks).as_text()
