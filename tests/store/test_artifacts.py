"""The artifact store: ingestion, references, leases, collection, recovery, export (architecture 7; contract 8)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import blobs, process_identity, verification
from agentctl.store.artifacts import LEASE_MS, media_type, reservation_id
from agentctl.store.blobs import write_atomically
from agentctl.store.canonical import text_digest
from agentctl.store.clock import SystemClock
from agentctl.store.collection import Collector
from agentctl.store.engine import Store
from agentctl.store.errors import (
    ConflictError,
    CorruptStore,
    EnvironmentFault,
    LeaseLost,
    LockHeld,
    NotFoundError,
    TaskFault,
    UsageError,
)
from agentctl.store.faults import Faults
from agentctl.store.filesystem import is_place_of_open_database
from agentctl.store.records import AttemptHeld, EffectEnd, StartRefused
from support.artifact_children import collect_until_killed, measure_staging
from support.artifacts import HOUR, assert_sound, collect, digest_of, files_of, ingest, litter, names_in, stage
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.children import SPAWN, Children, wait_until
from support.clock import ManualClock
from support.rows import check_chains, dead_identity, ledger_line, one, rows, scalar
from support.scale import repeats

HELLO = digest_of(b"hello")


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def driver(store: Store) -> Driver:
    store.create_run(new_run(tasks=4, budget_limits={"artifactBytes": 100}))
    return Driver(store, "run-1")


# -- from a worker to a reference --------------------------------------------------------------------------------------


def test_the_batch_turns_the_lease_into_references(store: Store, driver: Driver, clock: ManualClock) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim)
    hand.start(claim, request)
    end = EffectEnd(request.effect_id, "succeeded", '{"n":1}')
    assert ingest(store, claim, {"out/b.json": b"hello", "out/a": b""}, end) is None
    # The effect is confirmed, the bytes are leased, and nothing refers to them yet.
    assert one(store, "SELECT status, confirmed FROM effects") == ("succeeded", 1)
    leases = "SELECT logical_path, digest, expires_at FROM artifact_ingests ORDER BY 1"
    hour = clock.now() + LEASE_MS
    assert rows(store, leases) == [("out/a", digest_of(b""), hour), ("out/b.json", HELLO, hour)]
    assert rows(store, "SELECT * FROM artifact_refs") == []
    hand.finish(claim)
    [done] = driver.commit()
    assert rows(store, "SELECT * FROM artifact_ingests") == []
    found = store.artifacts.references("run-1", "t0")
    assert [(item["path"], item["digest"], item["sizeBytes"]) for item in found] == [
        ("out/a", digest_of(b""), 0),
        ("out/b.json", HELLO, 5),
    ]
    manifest = scalar(store, "SELECT artifact_manifest_json FROM tasks WHERE task_id = 't0'")
    assert manifest == done.artifacts_json
    assert json.loads(manifest)[1] == {
        "path": "out/b.json",
        "digest": HELLO,
        "sizeBytes": 5,
        "mediaType": "application/json",
        "logicalName": "b.json",
        "storePath": f"sha256/{HELLO[7:9]}/{HELLO[7:]}",
    }
    # The chain tells of it, too.
    last = json.loads(rows(store, "SELECT state_json FROM checkpoints ORDER BY sequence")[-1][0])
    assert last["artifacts"] == [[0, text_digest(manifest)]]
    check_chains(store)
    assert_sound(store.artifacts)


def test_the_layout_is_private_and_blobs_are_read_only(store: Store, tmp_path: Path) -> None:
    litter(store, b"hello")
    root = tmp_path / "state" / "artifacts"
    assert set(names_in(root)) >= {"sha256", "tmp", "trash"}
    for folder in (root, root / "tmp", root / "trash", root / "sha256", root / "sha256" / HELLO[7:9]):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    blob = root / "sha256" / HELLO[7:9] / HELLO[7:]
    assert stat.S_IMODE(blob.stat().st_mode) == 0o400
    assert blob.read_bytes() == b"hello"


def test_an_opening_alone_makes_no_folder(store: Store, tmp_path: Path) -> None:
    collect(store)
    assert not (tmp_path / "state" / "artifacts").exists()


def test_equal_bytes_are_stored_once(store: Store, driver: Driver) -> None:
    driver.enqueue([0, 1])
    hand = Hand(store)
    for _ in range(2):
        claim = hand.take()
        ingest(store, claim, {"x": b"hello", "y": b"hello"})
        hand.finish(claim)
    driver.commit()
    assert rows(store, "SELECT digest, size_bytes FROM artifact_blobs") == [(HELLO, 5)]
    assert len(store.artifacts.references(None, None)) == 4
    assert files_of(store) == {HELLO}


@pytest.mark.parametrize("damage", ["shorter", "other bytes", "a link", "gone"])
def test_a_damaged_blob_is_replaced_by_the_next_ingestion(store: Store, damage: str) -> None:
    litter(store, b"hello")
    blob = store.artifacts.blobs.path_of(HELLO)
    blob.chmod(0o600)
    if damage == "shorter":
        blob.write_bytes(b"hel")
    elif damage == "other bytes":
        blob.write_bytes(b"HELLO")
    else:
        blob.unlink()
        if damage == "a link":
            blob.symlink_to("/etc/hostname")
    report = store.artifacts.verify(None)
    assert report["missing"] + report["corrupt"] == [HELLO]
    assert report["missing"] == ([HELLO] if damage == "gone" else [])
    litter(store, b"hello")
    assert_sound(store.artifacts)
    assert blob.read_bytes() == b"hello"


def test_a_fence_that_does_not_hold_keeps_nothing(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    claim = Hand(store).take()
    assert store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="x", actor="test") == ["ready"]
    with pytest.raises(LeaseLost):
        store.artifacts.begin(claim, None, {"x": 5})
    with pytest.raises(LeaseLost):
        store.artifacts.keep(claim, stage(store, {"x": b"hello"}), Faults(None))
    assert rows(store, "SELECT * FROM artifact_blobs") == []
    assert store.artifacts.verify(None)["untracked"] == [HELLO]


def test_a_second_delivery_ingests_again_and_pays_once(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    ingest(store, claim, {"x": b"hello", "y": b"old"})
    assert ledger_line(store, "artifactBytes") == (100, 8, 0)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="x", actor="test")
    claim = hand.take()
    ingest(store, claim, {"x": b"hello", "y": b"old"})
    assert ledger_line(store, "artifactBytes") == (100, 8, 0)
    hand.finish(claim)
    driver.commit()
    assert [item["path"] for item in store.artifacts.references(None, None)] == ["x", "y"]


@pytest.mark.parametrize("other", [{"x": b"other"}, {"x": b"hello", "y": b"new"}, {"y": b"hello"}])
def test_a_second_delivery_never_replaces_what_the_first_has_stored(
    store: Store, driver: Driver, other: dict[str, bytes]
) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    ingest(store, claim, {"x": b"hello"})
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="x", actor="test")
    claim = hand.take()
    with pytest.raises(TaskFault) as caught:
        ingest(store, claim, other)
    assert caught.value.code == "artifact_changed"
    assert rows(store, "SELECT logical_path, digest FROM artifact_ingests") == [("x", HELLO)]
    for staged in list(store.artifacts.blobs.temporary()):
        store.artifacts.blobs.discard(staged[0])


def test_more_bytes_than_were_reserved_and_allowed_fail_the_task(store: Store, driver: Driver) -> None:
    """Contract 6: what was used over the limit is shown, recorded as exceeded, and has a consequence."""
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    assert store.artifacts.begin(claim, None, {"x": 5}) is None
    answer = store.artifacts.keep(claim, stage(store, {"x": b"y" * 200}), Faults(None))
    assert isinstance(answer, StartRefused)
    assert answer.detail == {"dimension": "artifactBytes", "limit": 100, "attempted": 200}
    assert scalar(store, "SELECT exceeded_json IS NOT NULL FROM run_budgets")


def test_missing_bytes_fail_their_own_task_only(store: Store, driver: Driver) -> None:
    driver.enqueue([0, 1])
    hand = Hand(store)
    for data in (b"hello", b"other"):
        claim = hand.take()
        ingest(store, claim, {"x": data})
        hand.finish(claim)
    store.artifacts.blobs.path_of(HELLO).unlink()
    driver.commit()
    states = dict(rows(store, "SELECT task_id, state FROM tasks WHERE task_id IN ('t0', 't1')"))
    assert states == {"t0": "failed", "t1": "succeeded"}
    error = json.loads(scalar(store, "SELECT error_json FROM tasks WHERE task_id = 't0'"))
    assert (error["code"], error["details"]["path"]) == ("artifact_missing", "x")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.json", "application/json"),
        ("a.YML", "application/yaml"),
        ("a/b.yaml", "application/yaml"),
        ("README.md", "text/markdown"),
        ("x.log", "text/plain"),
        ("x.txt", "text/plain"),
        ("x.csv", "text/csv"),
        ("x.tar.gz", "application/octet-stream"),
        ("json", "application/octet-stream"),
        (".json", "application/octet-stream"),
    ],
)
def test_media_types(path: str, expected: str) -> None:
    assert media_type(path) == expected


# -- budget ------------------------------------------------------------------------------------------------------------


def test_the_name_of_a_reservation_is_that_of_the_contract() -> None:
    digest = "a8916b4ac616c84997ea3ce4d6c20f77f8397d5cc4ef09b8dcafd25799b8bf05"
    assert reservation_id("write", "artifacts/a.txt") == f"artifact:write:{digest}"


def test_bytes_are_reserved_before_they_are_stored(store: Store, driver: Driver) -> None:
    driver.enqueue([0, 1])
    hand = Hand(store)
    claim = hand.take()
    assert store.artifacts.begin(claim, None, {"x": 60}) is None
    assert ledger_line(store, "artifactBytes") == (100, 0, 60)
    # What others have reserved may come back, so this one waits, without a worker.
    other = Hand(store, "worker-2").take()
    assert store.artifacts.begin(other, None, {"x": 30, "y": 30}) == AttemptHeld("budget")
    assert ledger_line(store, "artifactBytes") == (100, 0, 60)
    store.artifacts.give_up(claim, ["x"])
    assert ledger_line(store, "artifactBytes") == (100, 0, 0)
    assert driver.let_in() == [1]
    again = hand.take()
    assert again.fence.attempt_id == other.fence.attempt_id
    assert ingest(store, again, {"x": b"x" * 30, "y": b"y" * 30}) is None
    assert ledger_line(store, "artifactBytes") == (100, 60, 0)


def test_what_can_never_fit_is_denied_as_a_whole(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    claim = Hand(store).take()
    answer = store.artifacts.begin(claim, None, {"x": 60, "y": 41})
    assert answer == StartRefused("budget", {"dimension": "artifactBytes", "limit": 100, "attempted": 101})
    assert ledger_line(store, "artifactBytes") == (100, 0, 0)
    assert store.artifacts.begin(claim, None, {"x": 60, "y": 40}) is None


def test_an_attempt_that_ends_without_ingesting_gives_its_bytes_back(store: Store, driver: Driver) -> None:
    driver.enqueue([0, 1])
    hand = Hand(store)
    claim = hand.take()
    store.artifacts.begin(claim, None, {"x": 60})
    hand.finish(claim, "failed")
    hand.take()
    assert ledger_line(store, "artifactBytes") == (100, 0, 60)
    driver.commit()
    assert ledger_line(store, "artifactBytes") == (100, 0, 0)
    assert rows(store, "SELECT * FROM budget_reservations WHERE state = 'open'") == []


# -- collection --------------------------------------------------------------------------------------------------------


def test_only_what_nothing_needs_is_collected(store: Store, driver: Driver, clock: ManualClock) -> None:
    driver.enqueue([0, 1])
    hand = Hand(store)
    kept, made = hand.take(), Hand(store, "worker-2").take()
    ingest(store, kept, {"x": b"kept"})
    hand.finish(kept)
    ingest(store, made, {"x": b"made"})
    free = litter(store, b"free", b"also free")
    clock.advance(100 * 24 * HOUR)  # every lease has expired
    assert collect(store, dry_run=True) == {
        "considered": 2,
        "removed": [],
        "reclaimedBytes": 13,
        "temporaryFilesConsidered": 0,
        "temporaryFilesRemoved": 0,
    }
    assert len(files_of(store)) == 4
    # Neither what is finished but not committed, nor what a live attempt has made, whatever the clock says.
    assert collect(store)["removed"] == sorted(free)
    assert files_of(store) == {digest_of(b"kept"), digest_of(b"made")}
    driver.commit()
    assert collect(store)["removed"] == []
    store.database.connection.execute("DELETE FROM runs")
    assert collect(store)["removed"] == sorted([digest_of(b"kept"), digest_of(b"made")])
    assert_sound(store.artifacts)


def test_a_lease_protects_for_an_hour_after_its_attempt_is_over(
    store: Store, driver: Driver, clock: ManualClock
) -> None:
    """Field report 14, second part: after ingestion the worker dies, and the task never commits."""
    driver.enqueue([0])
    hand = Hand(store)
    ingest(store, hand.take(), {"x": b"hello"})
    clock.advance(61 * 60)
    assert collect(store)["removed"] == []  # somebody may still deliver it again
    store.request_cancel("run-1", reason="x", actor="test")
    claims = [(row[0], row[1]) for row in store.claims()]
    store.rescue(claims, dead=[], why="died", actor="test")
    with store.database.write() as tx:
        tx.execute("UPDATE artifact_ingests SET expires_at = ?", (clock.now() + LEASE_MS,))
    driver.end("cancelled", stop="cancel_requested")
    assert scalar(store, "SELECT state FROM attempts") == "closed"
    assert collect(store)["removed"] == []
    clock.advance(61 * 60)
    assert collect(store)["removed"] == [HELLO]
    assert rows(store, "SELECT * FROM artifact_ingests") == []
    assert_sound(store.artifacts)


def test_age_counts(store: Store, clock: ManualClock) -> None:
    [old] = litter(store, b"old")
    clock.advance(24 * HOUR)
    litter(store, b"new")
    day = 24 * 3600 * 1000
    assert collect(store, older_than_ms=2 * day)["considered"] == 0
    assert collect(store, older_than_ms=day)["removed"] == [old]


def test_old_content_that_is_made_again_survives_a_collection_that_has_chosen_it(
    store: Store, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ingestion comes between the choice and the first slice, which is when nobody holds the lock."""
    from agentctl.store import collection

    litter(store, b"hello", b"free")
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    choose = collection.Collector._candidates

    def choose_and_wait(collector: collection.Collector, *rest: Any) -> list[tuple[str, int]]:
        chosen = choose(collector, *rest)
        ingest(store, claim, {"x": b"hello"})
        return chosen

    monkeypatch.setattr(collection.Collector, "_candidates", choose_and_wait)
    report = collect(store)
    assert (report["considered"], report["removed"]) == (2, [digest_of(b"free")])
    hand.finish(claim)
    driver.commit()
    assert files_of(store) == {HELLO}
    assert_sound(store.artifacts)


def test_a_file_that_gets_its_row_survives_a_collection_that_has_chosen_it(
    store: Store, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untracked when it was chosen; then somebody ingests the same bytes, and finds the file there."""
    from agentctl.store import collection

    with store.artifacts.blobs.locked():
        store.artifacts.blobs.place(store.artifacts.blobs.stage_bytes(b"hello"))
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    choose = collection.Collector._untracked

    def choose_and_wait(collector: collection.Collector, *rest: Any) -> list[tuple[str, int]]:
        chosen = choose(collector, *rest)
        ingest(store, claim, {"x": b"hello"})
        return chosen

    monkeypatch.setattr(collection.Collector, "_untracked", choose_and_wait)
    store.clock.set_wall(9_999_999_999_999)  # type: ignore[attr-defined]  # every file is old
    report = collect(store)
    assert (report["considered"], report["removed"]) == (1, [])
    hand.finish(claim)
    driver.commit()
    assert files_of(store) == {HELLO}
    assert_sound(store.artifacts)


def test_an_untracked_file_is_removed_when_it_is_old(store: Store, clock: ManualClock) -> None:
    with store.artifacts.blobs.locked():
        store.artifacts.blobs.place(store.artifacts.blobs.stage_bytes(b"hello"))
    blob = store.artifacts.blobs.path_of(HELLO)
    written = blob.stat().st_mtime_ns // 1_000_000
    clock.set_wall(written + 10_000)
    assert collect(store, older_than_ms=20_000)["considered"] == 0
    assert collect(store, older_than_ms=5_000)["removed"] == [HELLO]
    assert not blob.exists()


def test_a_blob_with_a_reference_cannot_be_deleted_by_anybody(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    ingest(store, claim, {"x": b"hello"})
    hand.finish(claim)
    driver.commit()
    with pytest.raises(ConflictError), store.database.write() as tx:
        tx.execute("DELETE FROM artifact_blobs")


# -- recovery ----------------------------------------------------------------------------------------------------------


def test_what_a_dead_collection_has_taken_away_comes_back(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    """Row there: back in its place. Row gone: deleted. Made again meanwhile: the new one stays."""
    litter(store, b"back", b"gone", b"again")
    blobs = store.artifacts.blobs
    for data in (b"back", b"gone", b"again"):
        assert blobs.quarantine(digest_of(data))
    with store.database.write() as tx:
        tx.execute("DELETE FROM artifact_blobs WHERE digest = ?", (digest_of(b"gone"),))
    litter(store, b"again")
    store.close()
    again = open_store(tmp_path, clock)
    assert files_of(again) == {digest_of(b"back"), digest_of(b"again")}
    assert_sound(again.artifacts)
    again.close()


def test_files_of_dead_writers_are_removed_and_those_of_living_ones_never(
    store: Store, tmp_path: Path, clock: ManualClock
) -> None:
    litter(store, b"x")
    folder = tmp_path / "state" / "artifacts" / "tmp"
    (folder / f"{dead_identity().replace(' ', '_')}.1").write_bytes(b"half")
    own = f"{process_identity.current().as_text().replace(' ', '_')}.99"
    (folder / own).write_bytes(b"half")
    (folder / "no writer").write_bytes(b"half")
    open_store(tmp_path, clock).close()
    assert names_in(folder) == sorted([own, "no writer"])
    # Nobody knows whose it is: a collection takes it when it has been there for long.
    now = (folder / "no writer").stat().st_mtime_ns // 1_000_000
    clock.set_wall(now + 1000)
    assert collect(store)["temporaryFilesRemoved"] == 0
    clock.set_wall(now + 25 * 3600 * 1000)
    assert collect(store, older_than_ms=0)["temporaryFilesRemoved"] == 1
    assert names_in(folder) == [own]


def test_recovery_leaves_the_lock_to_who_has_it(store: Store, tmp_path: Path, clock: ManualClock) -> None:
    """Whoever only wants to look waits for nobody; the next opening does it."""
    litter(store, b"x")
    store.artifacts.blobs.quarantine(digest_of(b"x"))
    with store.artifacts.blobs.locked():
        open_store(tmp_path, clock).close()
        assert store.artifacts.blobs.trashed() == [digest_of(b"x")]
    with store.artifacts.blobs.locked(".collect.lock"):
        open_store(tmp_path, clock).close()
    assert_sound(store.artifacts)


def test_a_lock_that_stays_taken_is_an_error_that_names_the_holder(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    litter(store, b"x")
    monkeypatch.setattr(blobs, "LOCK_NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(blobs, "LOCK_PATIENCE_SECONDS", 0.05)
    root = store.artifacts.blobs.root
    with open(root / ".lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LockHeld, match=f"process {os.getpid()} ") as caught, store.artifacts.blobs.locked():
            pass
    assert "started" in caught.value.message
    assert str(root / ".lock") in caught.value.message
    assert f"process {os.getpid()} " in caplog.text
    collect(store)
    assert_sound(store.artifacts)


# -- bounds of files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 1 << 20, (1 << 20) + 1])
def test_a_file_is_copied_whole(store: Store, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    with open(source, "rb") as file:
        staged = store.artifacts.blobs.stage_file(file.fileno(), size, lambda: False)
    assert (staged.digest, staged.size) == (digest_of(data), size)
    assert staged.path.read_bytes() == data


@pytest.mark.parametrize("believed", [4, 6])
def test_a_file_that_changes_its_size_is_refused(store: Store, tmp_path: Path, believed: int) -> None:
    (tmp_path / "source").write_bytes(b"hello")
    with open(tmp_path / "source", "rb") as file, pytest.raises(TaskFault, match="changed its size"):
        store.artifacts.blobs.stage_file(file.fileno(), believed, lambda: False)
    assert store.artifacts.blobs.temporary() == []


def test_memory_does_not_grow_with_the_file(tmp_path: Path, children: Children) -> None:
    size = repeats(1 << 30)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(size)
    ours, theirs = SPAWN.Pipe(duplex=False)
    children.spawn(measure_staging, str(tmp_path), size, theirs)
    assert children.join() == [0]
    assert ours.recv() < 64_000_000


def test_a_full_disk_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    litter(store, b"x")

    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        store.artifacts.blobs.stage_bytes(b"hello")
    monkeypatch.undo()
    assert_sound(store.artifacts)


# -- for people --------------------------------------------------------------------------------------------------------


def test_find(store: Store) -> None:
    a, b = litter(store, b"hello", b"x")
    assert store.artifacts.find(a) == store.artifacts.find(a[7:]) == store.artifacts.find(a[7:10].upper()) == a
    for bad in ("", "xyz", "sha256:", "sha256:" + "0" * 65):
        with pytest.raises(UsageError):
            store.artifacts.find(bad)
    with pytest.raises(NotFoundError):
        store.artifacts.find("0" * 64)
    assert b[7] == a[7]
    with pytest.raises(UsageError, match="several"):
        store.artifacts.find(a[7:8])


@pytest.fixture(params=[True, False], ids=["unnamed", "named"])
def unnamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Filesystems with and without files that have no name."""
    if not request.param:
        really = os.open

        def without(path: str, flags: int, *args: int, **names: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return really(path, flags, *args, **names)

        monkeypatch.setattr(os, "open", without)
    return bool(request.param)


def test_export(store: Store, tmp_path: Path, unnamed: bool) -> None:
    litter(store, b"hello")
    folder = tmp_path / "out"
    folder.mkdir()
    target = folder / "file"
    assert store.artifacts.export(HELLO, target, overwrite=False) == 5
    assert target.read_bytes() == b"hello"
    assert os.access(target, os.W_OK)
    target.write_bytes(b"mine")
    with pytest.raises(ConflictError, match="exists"):
        store.artifacts.export(HELLO, target, overwrite=False)
    assert target.read_bytes() == b"mine"
    store.artifacts.export(HELLO, target, overwrite=True)
    assert target.read_bytes() == b"hello"
    (folder / "link").symlink_to(target)
    for bad in (folder, folder / "link", folder / "no" / "file"):
        with pytest.raises(UsageError):
            store.artifacts.export(HELLO, bad, overwrite=True)
    assert names_in(folder) == ["file", "link"]


def test_all_that_stands_beside_a_database_is_known_to_belong_to_it(store: Store) -> None:
    """Every name that something of the store makes, here for real: a new one has to be told to `filesystem`."""
    litter(store, b"hello")
    with store.artifacts.blobs.locked(), store.artifacts.blobs.locked(".collect.lock"):
        store.wakes.listen("somebody").close()
        found = {str(path.relative_to(store.path.parent)) for path in store.path.parent.rglob("*")}
    assert {"agentctl.db.gate-line", "agentctl.db.migrate.lock", "agentctl.db.wake/somebody"} < found
    assert {"artifacts/.lock", "artifacts/.collect.lock", "artifacts/.database", "artifacts/trash"} < found
    strangers = {name for name in found if not is_place_of_open_database(str(store.path.parent.resolve() / name))}
    assert strangers == {"artifacts"}, "the folder itself may have neighbours' files in it"


def test_nothing_is_exported_over_what_belongs_to_the_database(store: Store, tmp_path: Path) -> None:
    litter(store, b"hello")
    (tmp_path / "link").symlink_to(store.path.parent)
    own = [
        *(store.path.name + ending for ending in (".gate", ".gate-line", ".migrate.lock", "-journal")),
        "artifacts/.lock",
    ]
    for name in own:
        with pytest.raises(UsageError, match="belongs to the database"):
            store.artifacts.export(HELLO, tmp_path / "link" / name, overwrite=True)
        place = store.path.parent / name
        assert not place.exists() or not place.read_bytes()


@pytest.mark.parametrize("overwrite", [True, False])
def test_damaged_bytes_are_never_exported(store: Store, tmp_path: Path, unnamed: bool, overwrite: bool) -> None:
    litter(store, b"hello")
    folder = tmp_path / "out"
    folder.mkdir()
    if overwrite:
        (folder / "file").write_bytes(b"mine")
    blob = store.artifacts.blobs.path_of(HELLO)
    blob.chmod(0o600)
    blob.write_bytes(b"HELLO")
    for _ in range(2):
        with pytest.raises(CorruptStore):
            store.artifacts.export(HELLO, folder / "file", overwrite=overwrite)
        blob.unlink(missing_ok=True)
    assert names_in(folder) == (["file"] if overwrite else [])
    assert not overwrite or (folder / "file").read_bytes() == b"mine"


def test_a_failed_fill_leaves_nothing(tmp_path: Path, unnamed: bool) -> None:
    def fail(descriptor: int) -> None:
        os.write(descriptor, b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(tmp_path / "file", fail, overwrite=True)
    assert names_in(tmp_path) == []


def test_what_a_dead_process_of_our_number_has_left_stops_nobody(tmp_path: Path, unnamed: bool) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / f".file.agentctl-{os.getpid()}.tmp").write_bytes(b"half")
    write_atomically(tmp_path / "file", lambda descriptor: os.truncate(descriptor, 3), overwrite=True)
    assert (tmp_path / "file").read_bytes() == bytes(3)
    assert names_in(tmp_path) == ["file"]


def test_a_store_that_cannot_be_written_is_named(store: Store, tmp_path: Path) -> None:
    store.artifacts.blobs.require_writable()
    root = tmp_path / "state" / "artifacts"
    root.write_bytes(b"a file")
    with pytest.raises(EnvironmentFault, match="not a folder"):
        store.artifacts.blobs.require_writable()


def test_inspect(store: Store, driver: Driver, clock: ManualClock) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    ingest(store, claim, {"x": b"hello"})
    found = store.artifacts.inspect(HELLO)
    assert (found["status"], found["references"]) == ("ok", [])
    assert found["leases"] == [
        {
            "runId": "run-1",
            "taskId": "t0",
            "path": "x",
            "expiresAt": clock.now() + LEASE_MS,
            "attemptState": "claimed",
        }
    ]
    [blob] = store.artifacts.stored()
    assert (blob["references"], blob["leasedUntil"]) == (0, clock.now() + LEASE_MS)
    hand.finish(claim)
    driver.commit()
    found = store.artifacts.inspect(HELLO)
    assert ([item["taskId"] for item in found["references"]], found["leases"]) == (["t0"], [])


class Beside(Faults):
    """Lets somebody else do something, in a thread of its own, while a collection has files in the trash."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__(None)
        self.thread = threading.Thread(target=action)

    def reach(self, point: str) -> None:
        if point == "after_quarantine":
            self.thread.start()
            self.thread.join(1)  # as long as it waits for the lock, it cannot end before we do


def test_a_look_beside_a_collection_misses_nothing(store: Store, tmp_path: Path) -> None:
    """The files are in the trash and their rows still there: that is no damage (contract 8)."""
    digests = litter(store, b"a", b"b", b"c")
    found: list[Any] = []

    def look() -> None:
        with closing(Store(store.path, store.clock)) as other:
            found.append(other.artifacts.verify(None))
            found.append(verification.verify(other.database, other.artifacts))

    beside = Beside(look)
    report = Collector(store.database, store.artifacts, store.clock, beside).collect(older_than_ms=0, dry_run=False)
    beside.thread.join()
    assert report["removed"] == sorted(digests)
    assert (found[0]["missing"], found[0]["corrupt"], found[0]["untracked"]) == ([], [], [])
    assert found[1]["ok"] is True


def test_looks_beside_a_process_that_collects(tmp_path: Path) -> None:
    store = Store(tmp_path / "state" / "agentctl.db", SystemClock(), create=True)
    with Children() as children:
        collecting = children.spawn(collect_until_killed, str(store.path), str(tmp_path / "ready"))
        wait_until((tmp_path / "ready").exists, "it collects")
        for number in range(repeats(300)):
            litter(store, *(b"%d %d" % (number, index) for index in range(20)))
            report = store.artifacts.verify(None)
            assert (report["missing"], report["corrupt"]) == ([], []), number
        assert collecting.is_alive()
        collecting.kill()
        collecting.join()
    store.close()


def test_what_an_interrupted_collection_has_in_the_trash_is_no_damage(store: Store) -> None:
    [digest] = litter(store, b"a")
    store.artifacts.blobs.quarantine(digest)
    assert store.artifacts.verify(None)["missing"] == []
    assert store.artifacts.inspect(digest)["status"] == "ok"
    trashed = store.artifacts.blobs.root / "trash" / digest[7:]
    trashed.chmod(0o600)
    trashed.write_bytes(b"z")
    assert store.artifacts.verify(None)["corrupt"] == [digest]


def test_what_cannot_be_read_is_listed_and_the_rest_is_looked_at(store: Store, tmp_path: Path) -> None:
    digests = litter(store, *(str(number).encode() for number in range(5)))
    target = store.artifacts.blobs.path_of(digests[0])
    target.unlink()
    with socket.socket(socket.AF_UNIX) as listener:  # opening it fails, for root as well
        at_home = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        listener.bind(f"/proc/self/fd/{at_home}/{target.name}")
        os.close(at_home)
    lost = store.artifacts.blobs.path_of(digests[4])
    lost.unlink()
    report = store.artifacts.verify(None)
    assert (report["checked"], report["unreadable"], report["missing"]) == (5, [digests[0]], [digests[4]])
    whole = verification.verify(store.database, store.artifacts)
    assert whole["ok"] is False
    assert [item["message"] for item in whole["problems"]] == [
        f"{digests[4]} is missing",
        f"{digests[0]} is unreadable",
    ]
    assert store.artifacts.inspect(digests[0])["status"] == "unreadable"
    with pytest.raises(EnvironmentFault, match=f"cannot read {target}"):
        store.artifacts.export(digests[0], tmp_path / "out", overwrite=False)
    assert not (tmp_path / "out").exists()


def test_strange_files_in_the_trash_go_when_they_are_old(store: Store, clock: ManualClock) -> None:
    """Names that no collection gives are nobody's: a day at least, then as old as is asked for; folders stay."""
    root = store.artifacts.blobs.root
    litter(store, b"x")
    for folder in ("tmp", "trash"):
        (root / folder / "folder").mkdir()
    strange = root / "trash" / "notes.txt"
    strange.write_text("x")
    moment = clock.now() * 1_000_000
    os.utime(strange, ns=(moment, moment))
    assert collect(store)["temporaryFilesRemoved"] == 0
    clock.advance(25 * HOUR)
    assert collect(store)["temporaryFilesRemoved"] == 1
    assert names_in(root / "trash") == ["folder"]
