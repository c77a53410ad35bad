"""The care of a store: verification, statistics, backup and restore, retention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from agentctl.store import migrate, process_identity, reconciliations, runs
from agentctl.store.backup import backup, restore
from agentctl.store.engine import Store
from agentctl.store.errors import (
    ConflictError,
    CorruptStore,
    EnvironmentFault,
    IncompatibleVersion,
    NotFoundError,
    UsageError,
)
from agentctl.store.faults import Faults
from agentctl.store.records import EffectEnd, NewReconciliation
from agentctl.store.retention import collect_runs
from agentctl.store.verification import statistics, verify
from support import tampering
from support.artifacts import HOUR, assert_sound, collect, digest_of, files_of, ingest, litter, names_in
from support.builders import Driver, Hand, effect_request, new_run, open_store, process_row
from support.clock import ManualClock
from support.rows import check_chains, everything, rows, scalar

DAY = 24 * 3600 * 1000
STATES = ("succeeded", "failed", "cancelled")


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def finished_run(store: Store, run_id: str, files: dict[str, bytes], state: str = "succeeded") -> None:
    """A run with one task that has kept these files."""
    store.create_run(new_run(run_id, 1, memory={"k": "1"}))
    driver = Driver(store, run_id)
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take(run_id)
    request = effect_request(claim)
    hand.start(claim, request)
    ingest(store, claim, files, EffectEnd(request.effect_id, "succeeded", "1"))
    hand.finish(claim)
    driver.commit()
    driver.end(state)


@pytest.fixture
def half_done(store: Store) -> Store:
    """A finished run, and one in the middle of everything: committed, finished, ingested, started, held, waiting."""
    finished_run(store, "run-0", {"a": b"one", "b": b"two"})
    store.register(process_row("worker-1"))
    store.register(process_row("worker-2"))
    store.register(process_row("driver-1", kind="coordinator"))
    store.create_run(new_run(tasks=7, memory={"k": "1"}, budget_limits={"artifactBytes": 1000}))
    driver = Driver(store, "run-1")
    driver.enqueue([0, 1, 2, 3, 4])
    hand = Hand(store)
    for content in (b"committed", b"finished"):
        claim = hand.take()
        ingest(store, claim, {"x": content})
        hand.finish(claim)
        if content == b"committed":
            driver.commit()
    ingest(store, hand.take(), {"x": b"ingested"})
    claim = Hand(store, "worker-2").take()
    Hand(store, "worker-2").start(claim, effect_request(claim, idempotency="unknown"))
    claim = Hand(store, "worker-2").take()
    Hand(store, "worker-2").start(claim, effect_request(claim, idempotency="idempotent"))
    litter(store, b"garbage")
    return store


# -- verification ------------------------------------------------------------------------------------------------------


def test_a_sound_store(half_done: Store) -> None:
    report = verify(half_done.database, half_done.artifacts)
    assert (report["ok"], report["problems"], report["runsChecked"]) == (True, [], 2)
    assert report["artifacts"]["checked"] == 6
    found = statistics(half_done.database, half_done.artifacts)
    assert found["runs"] == {"running": 1, "succeeded": 1}
    assert (found["rows"]["runs"], found["rows"]["tasks"]) == (2, 8)
    assert found["artifacts"]["blobs"] == 6
    assert found["artifacts"]["references"] == 3
    assert found["artifacts"]["leases"] == 2
    assert found["artifacts"]["bytes"] == sum(
        map(len, (b"one", b"two", b"committed", b"finished", b"ingested", b"garbage"))
    )
    assert found["fileBytes"] > 0


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("UPDATE runs SET reason = 'other' WHERE run_id = 'run-0'", "its chain says"),
        ("UPDATE runs SET cancel_requested_at = 1 WHERE run_id = 'run-0'", "cancellation"),
        ("DROP TRIGGER tasks_final; UPDATE tasks SET state = 'failed' WHERE run_id = 'run-0'", "is failed"),
        ("UPDATE tasks SET output_json = '2' WHERE run_id = 'run-0'", "does not fit its digest"),
        ("UPDATE tasks SET delta_json = '{}' WHERE run_id = 'run-0'", "state delta"),
        ("UPDATE tasks SET attempt = 7 WHERE run_id = 'run-0'", "another attempt"),
        ("UPDATE tasks SET artifact_manifest_json = '[]' WHERE run_id = 'run-0'", "manifest"),
        ("UPDATE tasks SET artifact_manifest_json = NULL WHERE run_id = 'run-0'", "manifest"),
        ("DELETE FROM artifact_refs WHERE run_id = 'run-0' AND logical_path = 'a'", "references"),
        ("INSERT INTO memory_values VALUES ('run-0', 'k', 5, '2')", "working memory"),
        ("UPDATE runs SET audit_sequence = 99 WHERE run_id = 'run-0'", "gap"),
        ("UPDATE runs SET workflow_digest = 'x' WHERE run_id = 'run-0'", "creation of another run"),
        ("UPDATE runs SET plan_digest = 'x' WHERE run_id = 'run-0'", "creation of another run"),
        ("UPDATE runs SET trace_id = 'x' WHERE run_id = 'run-0'", "belongs to another run"),
        ("UPDATE run_documents SET workflow_json = '[]' WHERE run_id = 'run-0'", "the workflow of the run"),
        ("UPDATE run_documents SET plan_json = '[]' WHERE run_id = 'run-0'", "the plan of the run"),
        ("UPDATE run_documents SET inputs_json = '[]' WHERE run_id = 'run-0'", "the inputs of the run"),
        ("UPDATE run_documents SET settings_json = '[]' WHERE run_id = 'run-0'", "the settings of the run"),
        ("INSERT INTO run_outputs VALUES ('run-0', '1')", "output of the run"),
        ("UPDATE effects SET input_json = '{}' WHERE run_id = 'run-0'", "input of effect"),
        ("UPDATE effects SET input_digest = 'x' WHERE run_id = 'run-0'", "its identity"),
        ("UPDATE effects SET effect_id = 'x' WHERE run_id = 'run-0'", "its identity"),
        ("UPDATE effects SET operation = 'x' WHERE run_id = 'run-0'", "another request"),
        ("UPDATE effects SET idempotency_key = 'x' WHERE run_id = 'run-0'", "its identity"),
        ("UPDATE attempts SET result_json = '7' WHERE run_id = 'run-0'", "not the result of its attempt"),
        (
            "UPDATE tasks SET output_json = '7', output_digest = "
            "'sha256:v1:7902699be42c8a8e46fbbb4501726517e86b22c56a189f7625a6da49081b2451' WHERE run_id = 'run-0'",
            "another attempt or output",
        ),
        ("INSERT OR REPLACE INTO budget_lines VALUES ('run-0', 'artifactBytes', 10, 3, 0)", "has used 3"),
        ("INSERT OR REPLACE INTO budget_lines VALUES ('run-0', 'artifactBytes', 10, 0, 3)", "holds 3"),
        (
            "INSERT INTO budget_reservations VALUES ('run-0', 'r', 1, 'artifactBytes', 3, NULL, 'released')",
            "the reservation r",
        ),
        (
            "DROP TRIGGER audit_events_no_update; UPDATE audit_events SET payload_json = '{}' "
            "WHERE run_id = 'run-0' AND event_type = 'task.transition' AND payload_json LIKE '%succeeded%'",
            "is succeeded, the audit trail",
        ),
        (
            "DROP TRIGGER audit_events_no_update; UPDATE audit_events SET payload_json = '{' "
            "WHERE run_id = 'run-0' AND sequence = 2",
            "event 2 of the audit trail is damaged",
        ),
        (
            "DROP TRIGGER audit_events_no_update; UPDATE audit_events SET event_type = 'effect.failed' "
            "WHERE run_id = 'run-0' AND event_type = 'effect.succeeded'",
            "is succeeded, the audit trail",
        ),
        (
            "DROP TRIGGER audit_events_no_update; UPDATE audit_events SET event_no = event_no + 1 "
            "WHERE run_id = 'run-0' AND sequence = (SELECT MAX(sequence) FROM audit_events WHERE run_id = 'run-0')",
            "gap before event",
        ),
        (
            "DROP TRIGGER checkpoints_no_update; UPDATE checkpoints SET state_json = '{}' "
            "WHERE run_id = 'run-0' AND sequence = 2",
            "does not continue the chain",
        ),
        (
            "DROP TRIGGER checkpoints_no_delete; DELETE FROM checkpoints WHERE run_id = 'run-0' AND sequence > 1",
            "ends at checkpoint",
        ),
    ],
)
def test_what_somebody_has_changed_by_hand_is_found(half_done: Store, sql: str, told: str) -> None:
    half_done.database.connection.execute(sql)
    report = verify(half_done.database, half_done.artifacts)
    assert not report["ok"]
    assert {problem["where"] for problem in report["problems"]} == {"run-0"}
    assert told in " ".join(problem["message"] for problem in report["problems"])


def test_damaged_bytes_and_dangling_rows_are_found(half_done: Store) -> None:
    half_done.artifacts.blobs.path_of(digest_of(b"one")).unlink()
    half_done.database.connection.execute(
        "PRAGMA foreign_keys = OFF; DELETE FROM tasks WHERE run_id = 'run-0'; PRAGMA foreign_keys = ON"
    )
    report = verify(half_done.database, half_done.artifacts)
    assert {problem["where"] for problem in report["problems"]} >= {"artifacts", "attempts", "run-0"}
    assert verify(half_done.database, None)["artifacts"] is None


# -- backup ------------------------------------------------------------------------------------------------------------


def test_a_backup_of_a_store_at_work_is_one_moment_in_which_everybody_died(
    half_done: Store, tmp_path: Path, clock: ManualClock
) -> None:
    before = rows(half_done, "SELECT * FROM attempts ORDER BY 1")
    report = backup(half_done, tmp_path / "copy")
    assert (report["runs"], report["artifacts"], report["settledAttempts"]) == (2, 5, 3)
    assert names_in(tmp_path / "copy") == ["artifacts", "runtime.db"]
    assert rows(half_done, "SELECT * FROM attempts ORDER BY 1") == before, "the original was touched"
    assert len(half_done.live_processes()) == 3
    for path in (tmp_path / "copy").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
    restored_at = tmp_path / "new" / "place" / "agentctl.db"
    assert restore(tmp_path / "copy", restored_at, clock)["artifacts"] == 5
    copy = Store(restored_at, clock)
    assert verify(copy.database, copy.artifacts)["ok"]
    assert_sound(copy.artifacts)
    # Garbage did not come along; what was in the making did.
    assert digest_of(b"garbage") not in files_of(copy)
    assert digest_of(b"ingested") in files_of(copy)
    assert copy.live_processes() == []
    assert copy.run_head("run-1")[2] is None
    states = dict(rows(copy, "SELECT task_id, state FROM attempts WHERE run_id = 'run-1'"))
    assert states == {"t0": "closed", "t1": "finished", "t2": "ready", "t3": "finished", "t4": "ready"}
    assert dict(rows(copy, "SELECT task_id, status FROM effects WHERE run_id = 'run-1'")) == {
        "t3": "uncertain",
        "t4": "requested",
    }
    # The run goes on in the copy.
    driver = Driver(copy, "run-1", "driver-2")
    driver.commit()
    hand = Hand(copy, "worker-3")
    claim = hand.take()
    assert claim.fence.delivery == 2
    ingest(copy, claim, {"x": b"ingested"})
    hand.finish(claim)
    driver.commit()
    check_chains(copy)
    assert verify(copy.database, copy.artifacts)["ok"]
    copy.close()


def test_a_backup_needs_a_new_name_and_sound_bytes(half_done: Store, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConflictError, match="exists"):
        backup(half_done, tmp_path / "there")
    with pytest.raises(UsageError):
        backup(half_done, tmp_path / "no" / "folder")
    # Damaged garbage is nobody's loss; damaged bytes of a run are no backup.
    half_done.artifacts.blobs.path_of(digest_of(b"garbage")).unlink()
    backup(half_done, tmp_path / "good")
    half_done.artifacts.blobs.path_of(digest_of(b"one")).unlink()
    with pytest.raises(CorruptStore, match=digest_of(b"one")):
        backup(half_done, tmp_path / "bad")
    assert {name for name in names_in(tmp_path) if "bad" in name} == set()


def test_a_backup_without_artifacts(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    store.create_run(new_run())
    assert backup(store, tmp_path / "copy")["artifacts"] == 0
    assert names_in(tmp_path / "copy") == ["runtime.db"]
    assert restore(tmp_path / "copy", tmp_path / "r.db", clock)["runs"] == 1


def test_restore_refuses_what_it_cannot_use(half_done: Store, tmp_path: Path, clock: ManualClock) -> None:
    good = tmp_path / "good"
    backup(half_done, good)
    with pytest.raises(ConflictError, match="there is a database"):
        restore(good, half_done.path, clock)
    with pytest.raises(NotFoundError, match="no backup"):
        restore(tmp_path, tmp_path / "r.db", clock)
    for companion in ("-wal", "-shm", "-journal"):
        (tmp_path / f"r.db{companion}").write_bytes(b"x")
        with pytest.raises(ConflictError, match="earlier database"):
            restore(good, tmp_path / "r.db", clock)
        (tmp_path / f"r.db{companion}").unlink()
    (good / "runtime.db-wal").write_bytes(b"x")
    with pytest.raises(UsageError, match="in use"):
        restore(good, tmp_path / "r.db", clock)
    (good / "runtime.db-wal").unlink()
    other = apsw.Connection(str(good / "runtime.db"))
    other.execute("PRAGMA journal_mode = DELETE").fetchall()
    other.execute(f"PRAGMA user_version = {migrate.LATEST + 1}")
    other.close()
    with pytest.raises(IncompatibleVersion, match="schema"):
        restore(good, tmp_path / "r.db", clock)
    other = apsw.Connection(str(good / "runtime.db"))
    other.execute(f"PRAGMA user_version = {migrate.LATEST}; PRAGMA application_id = 5")
    other.close()
    with pytest.raises(IncompatibleVersion, match="another program"):
        restore(good, tmp_path / "r.db", clock)
    (good / "runtime.db").write_bytes(os.urandom(8192))
    with pytest.raises(CorruptStore):
        restore(good, tmp_path / "r.db", clock)
    assert [name for name in names_in(tmp_path) if name.startswith("r.db")] == []


def test_a_backup_with_damaged_bytes_restores_nothing(half_done: Store, tmp_path: Path, clock: ManualClock) -> None:
    backup(half_done, tmp_path / "copy")
    digest = digest_of(b"one")[7:]
    blob = tmp_path / "copy" / "artifacts" / "sha256" / digest[:2] / digest
    blob.chmod(0o600)
    blob.write_bytes(b"ONE")
    with pytest.raises(CorruptStore, match=digest):
        restore(tmp_path / "copy", tmp_path / "r" / "r.db", clock)
    assert not (tmp_path / "r" / "r.db").exists()
    assert not [path for path in (tmp_path / "r").rglob("*") if path.is_file() and path.name.startswith(".")]


def hold_open(folder: Path) -> subprocess.Popen[bytes]:
    """A process that lives until it is killed."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=folder)


def unfinished(folder: Path, writer: str, ending: str) -> Path:
    """What a process leaves that dies in the middle of a backup or of restoring one."""
    path = folder / f".agentctl-{writer}{ending}"
    if ending == ".partial":
        (path / "artifacts").mkdir(parents=True)
        (path / "runtime.db").write_bytes(b"x")
    else:
        path.write_bytes(b"x")
    return path


def test_what_the_dead_have_left_half_written_goes_with_the_next_copy(
    half_done: Store, tmp_path: Path, clock: ManualClock
) -> None:
    child = hold_open(tmp_path)
    identity = process_identity.of(child.pid)
    assert identity is not None
    writer = identity.as_text().replace(" ", "_")
    left = [unfinished(tmp_path, writer, ending) for ending in (".partial", ".restoring", ".restoring-wal")]
    strange = unfinished(tmp_path, "1234", ".partial")
    backup(half_done, tmp_path / "first")
    restore(tmp_path / "first", tmp_path / "first.db", clock)
    assert all(path.exists() for path in left), "they belong to a living process"
    child.kill()
    child.wait()
    backup(half_done, tmp_path / "second")
    assert [path.exists() for path in left] == [False, True, True]
    restore(tmp_path / "first", tmp_path / "second.db", clock)
    assert [path.exists() for path in left] == [False, False, False]
    assert strange.exists(), "nobody knows whose it is"
    assert child.stdin is not None
    child.stdin.close()


def test_restoring_leaves_the_database_and_its_bytes_and_nothing_else(
    half_done: Store, tmp_path: Path, clock: ManualClock
) -> None:
    backup(half_done, tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "new" / "r.db", clock)
    assert names_in(tmp_path / "new") == ["artifacts", "r.db"]
    assert names_in(tmp_path / "new" / "artifacts" / "tmp") == []


def test_a_backup_that_cannot_be_restored_leaves_nothing_at_all(
    half_done: Store, tmp_path: Path, clock: ManualClock
) -> None:
    backup(half_done, tmp_path / "copy")
    digest = max(path.name for path in (tmp_path / "copy" / "artifacts" / "sha256").rglob("*") if path.is_file())
    blob = tmp_path / "copy" / "artifacts" / "sha256" / digest[:2] / digest
    blob.unlink()
    (tmp_path / "there").mkdir()
    for place in ("new/deep/r.db", "there/r.db"):
        with pytest.raises(CorruptStore, match=digest) as caught:
            restore(tmp_path / "copy", tmp_path / place, clock)
        assert caught.value.remedy == "use another backup"
    assert not (tmp_path / "new").exists()
    assert names_in(tmp_path / "there") == []


def test_a_backup_does_not_go_into_the_store_nor_a_database_into_a_backup(
    half_done: Store, tmp_path: Path, clock: ManualClock
) -> None:
    home = half_done.path.parent
    before = names_in(home)
    (home / "agentctl.db.wake").mkdir(exist_ok=True)
    for place in (home / "artifacts" / "copy", home / "artifacts" / "sha256" / "x", home / "agentctl.db.wake" / "x"):
        with pytest.raises(UsageError, match="inside of the store"):
            backup(half_done, place)
    assert not (home / "artifacts" / "copy").exists()
    backup(half_done, home / "beside")
    with pytest.raises(UsageError, match="inside of the backup"):
        restore(home / "beside", home / "beside" / "r.db", clock)
    assert set(names_in(home)) == {*before, "beside", "agentctl.db.wake"}


# -- retention ---------------------------------------------------------------------------------------------------------


def gc(store: Store, days: int = 30, states: tuple[str, ...] = STATES, dry_run: bool = False) -> dict[str, object]:
    return collect_runs(
        store.database,
        store.artifacts,
        store.clock,
        Faults(None),
        older_than_ms=days * DAY,
        states=states,
        dry_run=dry_run,
    )


def test_old_runs_go_with_everything_and_others_stay(store: Store, clock: ManualClock) -> None:
    finished_run(store, "run-old", {"x": b"shared", "y": b"old"})
    finished_run(store, "run-failed", {"x": b"failed"}, "failed")
    clock.advance(31 * DAY / 1000)
    finished_run(store, "run-new", {"x": b"shared"})
    store.create_run(new_run("run-live"))
    dry = gc(store, states=("succeeded",), dry_run=True)
    assert dry["runs"] == {"considered": 1, "removed": ["run-old"], "kept": []}
    assert dry["artifacts"]["considered"] == 1  # type: ignore[index]
    assert scalar(store, "SELECT COUNT(*) FROM runs") == 4
    done = gc(store, states=("succeeded",))
    assert done["runs"] == dry["runs"]
    assert done["artifacts"]["removed"] == [digest_of(b"old")]  # type: ignore[index]
    assert {row[0] for row in rows(store, "SELECT run_id FROM runs")} == {"run-failed", "run-new", "run-live"}
    for table in ("tasks", "attempts", "effects", "audit_events", "checkpoints", "artifact_refs", "memory_values"):
        found = {row[0] for row in rows(store, f"SELECT DISTINCT run_id FROM {table}")}  # noqa: S608
        assert "run-old" not in found
    assert gc(store)["runs"]["removed"] == ["run-failed"]  # type: ignore[index]
    clock.advance(365 * DAY / 1000)
    assert gc(store, days=0)["runs"]["removed"] == ["run-new"]  # type: ignore[index]
    assert files_of(store) == set()
    assert verify(store.database, store.artifacts)["ok"]


def test_what_somebody_still_needs_stays(store: Store, clock: ManualClock) -> None:
    finished_run(store, "run-source", {})
    store.create_run(new_run("run-doubt", 1))
    driver = Driver(store, "run-doubt")
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take("run-doubt")
    request = effect_request(claim, idempotency="unknown")
    hand.start(claim, request)
    hand.finish(claim, "uncertain", effect=EffectEnd(request.effect_id, "uncertain", None, "{}"))
    driver.commit()
    driver.end("failed", stop="task_failed")
    store.create_run(new_run("run-live", 1))
    with store.database.write() as tx:
        tx.execute("UPDATE runs SET source_run_id = 'run-source' WHERE run_id = 'run-live'")
    clock.advance(1)
    found = gc(store, days=0)["runs"]
    kept = [
        {"runId": "run-doubt", "why": "uncertain_effect"},
        {"runId": "run-source", "why": "source_of_a_live_run"},
    ]
    assert found == {"considered": 2, "removed": [], "kept": kept}
    store.reconcile(NewReconciliation("reconciliation-1", request.effect_id, "not_applied", "me", "looked", "{}", "{}"))
    clock.advance(1)
    assert gc(store, days=0)["runs"]["removed"] == ["run-doubt"]  # type: ignore[index]


def write_lineage(store: Store, version: int) -> None:
    store.database.connection.execute("UPDATE runs SET lineage_json = json_object('formatVersion', ?)", (version,))


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *[pytest.param(table, column, id=table) for _, table, column, _ in runs.VERSIONED],
        *[pytest.param("runs", column, id=column) for column in ("runtime_state_version", "plan_format_version")],
    ],
)
def test_what_a_newer_agentctl_has_written_stays(store: Store, clock: ManualClock, table: str, column: str) -> None:
    finished_run(store, "run-0", {"a": b"one"})
    write_lineage(store, 1)
    tampering.future(store.database.connection, "run-0", table, column)
    clock.advance(365 * DAY / 1000)
    keeps_run_0(store)


def test_a_run_whose_lineage_a_newer_agentctl_has_written_stays(store: Store, clock: ManualClock) -> None:
    finished_run(store, "run-0", {"a": b"one"})
    write_lineage(store, 2)
    clock.advance(365 * DAY / 1000)
    keeps_run_0(store)
    write_lineage(store, 1)
    assert gc(store)["runs"]["removed"] == ["run-0"]  # type: ignore[index]


def keeps_run_0(store: Store) -> None:
    before = everything(store)
    kept = [{"runId": "run-0", "why": "written_by_a_newer_agentctl"}]
    for dry_run in (True, False):
        report = gc(store, days=0, dry_run=dry_run)
        assert report["runs"] == {"considered": 1, "removed": [], "kept": kept}
        assert report["artifacts"]["considered"] == 0  # type: ignore[index]
    assert everything(store) == before
    assert files_of(store) == {digest_of(b"one")}


@pytest.mark.parametrize("state", STATES)
def test_a_run_that_somebody_may_ingest_for_stays_until_the_lease_is_over(
    store: Store, clock: ManualClock, state: str
) -> None:
    """What it has ingested and did not come to commit is protected for an hour, so the run is as well."""
    store.create_run(new_run("run-0", 1))
    driver = Driver(store, "run-0")
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim)
    hand.start(claim, request)
    ingest(store, claim, {"a": b"one"}, EffectEnd(request.effect_id, "succeeded", "1"))
    hand.finish(claim, "failed")
    driver.commit()
    driver.end(state)
    for seconds in (0.001, HOUR - 0.002):
        clock.advance(seconds)
        for dry_run in (True, False):
            report = gc(store, days=0, dry_run=dry_run)
            kept = [{"runId": "run-0", "why": "ingestion_lease"}]
            assert report["runs"] == {"considered": 1, "removed": [], "kept": kept}
            assert report["artifacts"]["removed"] == []  # type: ignore[index]
    assert files_of(store) == {digest_of(b"one")}
    assert verify(store.database, store.artifacts)["ok"]
    clock.advance(0.001)
    report = gc(store, days=0)
    assert report["runs"] == {"considered": 1, "removed": ["run-0"], "kept": []}
    assert report["artifacts"]["removed"] == [digest_of(b"one")]  # type: ignore[index]
    assert files_of(store) == set()


def test_a_conclusion_counts_although_the_clock_was_set_back(store: Store, clock: ManualClock) -> None:
    store.create_run(new_run("run-1", 1))
    driver = Driver(store, "run-1")
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take("run-1")
    request = effect_request(claim, idempotency="unknown")
    hand.start(claim, request)
    hand.finish(claim, "uncertain", effect=EffectEnd(request.effect_id, "uncertain", None, "{}"))
    driver.commit()
    driver.end("failed", stop="task_failed")
    for number in (1, 2):
        result = f'{{"n":{number}}}'
        store.reconcile(NewReconciliation(f"r-{number}", request.effect_id, "applied", "me", "x", "{}", "{}", result))
        clock.set_wall(clock.now() - DAY)
    with store.database.read() as tx:
        assert reconciliations.latest(tx, request.effect_id) == ("r-2", "applied", '{"n":2}')
    assert verify(store.database, None)["ok"]


def test_the_space_comes_back(store: Store, clock: ManualClock) -> None:
    text = json.dumps("x" * 500_000)
    for number in range(10):
        store.create_run(new_run(f"run-{number}", 1, inputs_json=text))
        Driver(store, f"run-{number}").end("succeeded")
    clock.advance(1)
    report = gc(store, days=0)
    assert len(report["runs"]["removed"]) == 10  # type: ignore[index]
    assert report["fileBytesAfter"] < report["fileBytesBefore"] - 4_000_000  # type: ignore[operator]
    assert scalar(store, "PRAGMA freelist_count") == 0
    store.create_run(new_run("run-after"))
    assert verify(store.database, store.artifacts)["ok"]


@pytest.mark.parametrize("obstacle", ["trash", ".collect.lock"])
def test_runs_stay_when_their_artifacts_cannot_be_collected(store: Store, clock: ManualClock, obstacle: str) -> None:
    """What cannot be finished is not begun: the report of a collection would be lost with it."""
    finished_run(store, "run-0", {"a": b"one"})
    clock.advance(31 * DAY / 1000)
    place = store.artifacts.blobs.root / obstacle
    if obstacle == "trash":
        place.rmdir()
        place.touch()
    else:
        place.mkdir()
    with pytest.raises(EnvironmentFault) as caught:
        collect_runs(
            store.database, store.artifacts, clock, Faults(None), older_than_ms=0, states=STATES, dry_run=False
        )
    assert str(place) in caught.value.message
    assert caught.value.remedy
    assert rows(store, "SELECT run_id FROM runs") == [("run-0",)]
    foreseen = collect_runs(
        store.database, store.artifacts, clock, Faults(None), older_than_ms=0, states=STATES, dry_run=True
    )
    assert foreseen["runs"]["removed"] == ["run-0"]


def test_a_collection_stops_between_two_steps_and_tells_of_those_behind_it(store: Store, clock: ManualClock) -> None:
    for number in range(3):
        finished_run(store, f"run-{number}", {"x": b"%d" % number})
    clock.advance(1)
    looks = iter([False, False, *[True] * 100])
    report = collect_runs(
        store.database,
        store.artifacts,
        clock,
        Faults(None),
        older_than_ms=0,
        states=STATES,
        dry_run=False,
        stopped=lambda: next(looks),
    )
    assert report["runs"]["removed"] == ["run-0", "run-1"]
    assert (report["artifacts"]["considered"], report["artifacts"]["removed"]) == (2, [])
    assert rows(store, "SELECT run_id FROM runs") == [("run-2",)]
    assert_sound(store.artifacts)
    assert gc(store, days=0)["runs"]["removed"] == ["run-2"]  # type: ignore[index]
    assert scalar(store, "SELECT COUNT(*) FROM artifact_blobs") == 0


def test_what_cannot_be_moved_is_told_with_its_place(store: Store, clock: ManualClock) -> None:
    """A folder in the trash under the name of a blob; the collection says so and leaves everything sound."""
    [digest] = litter(store, b"old")
    in_the_way = store.artifacts.blobs.root / "trash" / digest[7:]
    in_the_way.mkdir()
    with pytest.raises(EnvironmentFault) as caught:
        collect(store)
    assert str(in_the_way) in caught.value.message
    assert caught.value.remedy
    in_the_way.rmdir()
    assert_sound(store.artifacts)
    assert collect(store)["removed"] == [digest]
