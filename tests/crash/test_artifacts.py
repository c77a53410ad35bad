"""Kills at any moment during ingestion, collection and export leave every blob whole and nothing half-done behind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.faults import POINTS, Faults
from support.artifact_children import (
    collect_at,
    collect_until_killed,
    content,
    export_until_killed,
    ingest_until_killed,
)
from support.artifacts import assert_sound, digest_of, litter, names_in
from support.builders import Driver, Hand, new_run, process_row
from support.children import Children, wait_until
from support.rows import check_chains, rows
from support.scale import repeats

SEED = int(os.environ.get("AGENTCTL_TEST_SEED") or random.randrange(2**32))
BIG = random.Random(1).randbytes(2_000_000)
TASKS = 3000


@pytest.fixture(autouse=True)
def tell_the_seed() -> Iterator[None]:
    print(f"AGENTCTL_TEST_SEED={SEED}")  # noqa: T201
    yield


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


@pytest.mark.timeout(1800)
def test_kills_at_random_moments(tmp_path: Path) -> None:
    """One of each kind at a time on one store, each killed at a moment of its own; then the store is opened again."""
    chance = random.Random(SEED)
    database, exports = tmp_path / "state" / "agentctl.db", tmp_path / "exports"
    exports.mkdir()
    store = Store(database, SystemClock(), create=True)
    driver, left = None, 0
    for round_ in range(repeats(200)):
        if left == 0:
            store.create_run(new_run(f"run-{round_}", tasks=TASKS, max_deliveries=1000))
            driver, left = Driver(store, f"run-{round_}"), 5
            driver.enqueue(range(TASKS))
        left -= 1
        assert driver is not None
        litter(store, BIG, *(content(chance.randrange(60)) for _ in range(40)))
        keep = driver.run.run_id
        if not rows(store, "SELECT 1 FROM artifact_refs WHERE digest = ?", digest_of(BIG)):
            # What is exported must not be collected meanwhile.
            claim = Hand(store, "keeper").take(keep)
            store.artifacts.begin(claim, None, {"big": len(BIG)})
            store.artifacts.keep(claim, [("big", store.artifacts.blobs.stage_bytes(BIG))], Faults(None))
            Hand(store, "keeper").finish(claim)
            commit(driver)
        names = [tmp_path / f"{kind}-{round_}" for kind in ("ingest", "collect", "export")]
        with Children() as children:
            worker = f"worker-{round_}"
            store.register(process_row(worker))
            started = [
                children.spawn(ingest_until_killed, str(database), worker, SEED, str(names[0])),
                children.spawn(collect_until_killed, str(database), str(names[1])),
                children.spawn(export_until_killed, str(database), digest_of(BIG), str(exports), str(names[2])),
            ]
            for name in names:
                wait_until(name.exists, "all three are at it")
            for process in chance.sample(started, 3):
                time.sleep(chance.random() * 0.03)  # the moment is what is varied
                assert process.is_alive()
                kill(process)
        again = Store(database, SystemClock())
        assert_sound(again.artifacts)
        for path in exports.iterdir():
            # Who dies between the two names of an export that replaces a file leaves the first one, which is whole.
            assert path.name.startswith((".file.", "file")), path.name
            assert sha256(path.read_bytes()).hexdigest() == digest_of(BIG)[7:]
        claims = [(row[0], row[1]) for row in again.claims([worker])]
        assert set(again.rescue(claims, dead=[worker], why="killed", actor="test")) <= {"ready"}
        again.close()
        commit(driver)
        # What was committed is there, whatever was collected around it.
        for digest, size in rows(store, "SELECT DISTINCT digest, size_bytes FROM artifact_refs"):
            assert store.artifacts.blobs.present(digest, size)
    check_chains(store)
    store.close()


def commit(driver: Driver) -> None:
    while driver.commit():
        pass


@pytest.mark.parametrize("point", [point for point in POINTS if point in ("after_quarantine", "after_collection")])
def test_a_collection_that_dies_at_a_point_is_finished_by_the_next_opening(tmp_path: Path, point: str) -> None:
    database = tmp_path / "state" / "agentctl.db"
    store = Store(database, SystemClock(), create=True)
    digests = litter(store, b"a", b"b", b"c")
    with Children() as children:
        process = children.spawn(collect_at, str(database), point)
        process.join(60)
        assert process.exitcode == -9
    trashed = names_in(tmp_path / "state" / "artifacts" / "trash")
    assert len(trashed) == 3
    again = Store(database, SystemClock())
    assert_sound(again.artifacts)
    left = {digest for digest, _ in again.artifacts.blobs.stored()}
    assert left == (set(digests) if point == "after_quarantine" else set())
    again.close()
    store.close()
