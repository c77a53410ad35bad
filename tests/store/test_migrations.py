"""From one schema to the next, with data in the database: nothing is lost, and every promise of the schema holds."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from agentctl.store import migrate
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.errors import CorruptStore
from agentctl.store.views import Views
from support.builders import Driver, Hand, effect_request, new_run
from support.rows import attempt, rows, scalar, task_state

SCHEMA_1 = """
INSERT INTO runs (run_id, runtime_state_version, plan_format_version, workflow_name, workflow_digest, plan_digest, mode,
    state, trace_id, priority, submission_digest, base_path, first_task, task_count, max_concurrency, max_deliveries,
    created_at, updated_at) VALUES ('run-1', 1, 1, 'old', 'a', 'b', 'execute', 'running', 't', 0, 'c', '/', 1, 3, 8, 3,
    1, 1);
INSERT INTO run_documents VALUES ('run-1', '{}', '{}', '{}', '{}');
INSERT INTO run_budgets VALUES ('run-1', 1, NULL, NULL, 3, 0, 0, 1);
INSERT INTO turns VALUES ('run-1', 0, 0);
INSERT INTO tasks (task_no, run_id, task_id, position, state, updated_at) VALUES
    (1, 'run-1', 't0', 0, 'ready', 1), (2, 'run-1', 't1', 1, 'running', 1), (3, 'run-1', 't2', 2, 'pending', 1);
INSERT INTO attempts (attempt_id, run_id, task_no, live_task, task_id, number, state, queue, timeout_ms, input_json,
    enqueued_at) VALUES (7, 'run-1', 1, 1, 't0', 1, 'ready', 'ready', 1000, '{}', 1);
INSERT INTO attempts (attempt_id, run_id, task_no, live_task, task_id, number, state, queue, holder, delivery,
    lease_expires_at, timeout_ms, input_json, enqueued_at)
    VALUES (8, 'run-1', 2, 2, 't1', 1, 'claimed', 'claimed', 'w-old', 1, 99, 1000, '{}', 1);
INSERT INTO attempts (attempt_id, run_id, task_no, task_id, number, state, timeout_ms, input_json, enqueued_at, outcome)
    VALUES (12, 'run-1', 3, 't2', 1, 'closed', 1000, '{}', 1, 'failed');
DELETE FROM attempts WHERE attempt_id = 12;
INSERT INTO effects (effect_id, format_version, run_id, task_id, attempt_id, attempt, ordinal, operation, effect_class,
    risk, idempotency, idempotency_key, input_digest, input_json, expected_json, trace_id, status, dispatches,
    requested_at, started_at)
    VALUES ('e1', 1, 'run-1', 't1', 8, 1, 1, 'demo', 'external_mutate', 'low', 'unknown', 'e1',
    'd', '{}', '{}', 't', 'started', 1, 1, 1);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of schema 1 with a run in it."""
    path = tmp_path / "agentctl.db"
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL; PRAGMA foreign_keys = ON;")
    connection.execute(migrate.script(1) + SCHEMA_1)
    connection.execute(f"PRAGMA application_id = {migrate.APPLICATION_ID}; PRAGMA user_version = 1;")
    connection.close()
    return path


def test_everything_is_still_there(old: Path) -> None:
    store = Store(old, SystemClock())
    assert scalar(store, "PRAGMA user_version") == migrate.LATEST
    assert scalar(store, "PRAGMA integrity_check") == "ok"
    assert rows(store, "PRAGMA foreign_key_check") == []
    assert scalar(store, "PRAGMA foreign_keys") == 1
    assert rows(store, "SELECT attempt_id, state, hold FROM attempts ORDER BY 1") == [
        (7, "ready", None),
        (8, "claimed", None),
    ]
    assert rows(store, "SELECT effect_id, status FROM effects") == [("e1", "started")]
    store.close()


def test_the_run_goes_on(old: Path) -> None:
    store = Store(old, SystemClock())
    assert store.rescue([(8, 1)], dead=[], why="x", actor="test") == ["uncertain"]
    hand = Hand(store)
    claim = hand.take()
    assert claim.fence.attempt_id == 7
    hand.finish(claim)
    driver = Driver(store, "run-1")
    driver.enqueue([2])
    # The number of an attempt is part of the fence; one that was deleted does not come back.
    assert scalar(store, "SELECT MAX(attempt_id) FROM attempts") == 13
    store.close()


def test_indexes_and_foreign_keys_are_those_of_a_new_database(old: Path, tmp_path: Path) -> None:
    migrated = Store(old, SystemClock())
    fresh = Store(tmp_path / "new" / "agentctl.db", SystemClock(), create=True)
    sql = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_stat%' ORDER BY type, name"
    assert rows(migrated, sql) == rows(fresh, sql)
    assert "REFERENCES attempts" in str(rows(fresh, "SELECT sql FROM sqlite_master WHERE name = 'effects'"))
    migrated.close()
    fresh.close()


def test_a_row_that_refers_to_nothing_stops_the_migration(old: Path) -> None:
    connection = apsw.Connection(str(old))
    connection.execute("PRAGMA foreign_keys = OFF; DELETE FROM tasks WHERE task_no = 2;")
    connection.close()
    with pytest.raises(CorruptStore, match="refers to"):
        Store(old, SystemClock())
    connection = apsw.Connection(str(old))
    assert connection.execute("PRAGMA user_version").fetchall() == [(1,)]
    connection.close()


def test_the_audit_trail_keeps_its_numbers(old: Path) -> None:
    """Migration 13: each run has its own range of a common table, and every event is where it was."""
    connection = apsw.Connection(str(old))
    second = SCHEMA_1.split(";")[0].replace("'run-1'", "'run-2'").replace("'/', 1, 3", "'/', 4, 1")
    connection.execute(second)
    event = "INSERT INTO audit_events VALUES (?, ?, 1, ?, NULL, 'me', 't', '{}', ?)"
    told = [("run-1", 1, "a"), ("run-1", 2, "b"), ("run-2", 1, "c"), ("run-1", 3, "d")]
    connection.executemany(event, [(run_id, number, kind, number * 10) for run_id, number, kind in told])
    connection.execute("UPDATE runs SET audit_sequence = CASE run_id WHEN 'run-1' THEN 3 ELSE 1 END")
    connection.close()
    store = Store(old, SystemClock())
    read = "SELECT run_id, sequence, event_type, created_at FROM audit_events ORDER BY run_id, sequence"
    before = [(run_id, number, kind, number * 10) for run_id, number, kind in sorted(told)]
    assert rows(store, read) == before
    store.request_cancel("run-2", reason="x", actor="me")
    assert rows(store, read)[:4] == before
    shown = Views(store.database, store.clock).events("run-2", limit=9)
    assert [event["sequence"] for event in shown][:2] == [1, 2]
    with store.database.write() as tx:
        tx.execute("DELETE FROM runs WHERE run_id = 'run-1'")
    assert {run_id for run_id, *_ in rows(store, read)} == {"run-2"}, "a run takes its own trail along, and no other"
    store.close()


def test_what_is_new_works_at_once(old: Path) -> None:
    store = Store(old, SystemClock())
    store.create_run(new_run("run-2", 1))
    driver = Driver(store, "run-2")
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take("run-2")
    hand.start(claim, effect_request(claim, ask=True))
    assert attempt(store, claim.fence.attempt_id)["hold"] == "approval"
    assert task_state(store, 0, "run-2") == "waiting_for_approval"
    with store.database.read() as tx:
        assert tx.execute("SELECT COUNT(*) FROM approvals").fetchone() == (1,)
    store.close()
