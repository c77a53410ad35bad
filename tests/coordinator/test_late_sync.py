"""A commit for which workers were called is made durable a little later: when, and what if the driver ends or the disk
fails before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.coordinator.driver import LATE_SYNC_SECONDS, Coordinator
from agentctl.store.database import SyncFailed
from agentctl.store.engine import Store
from support.builders import open_store
from support.clock import FixedIds, ManualClock
from support.coordinators import COMMAND, Sleepers, begun, fan_out, registered, submitted


class Disk:
    """Counts the syncs of one connection, and may refuse them."""

    def __init__(self) -> None:
        self.syncs = 0
        self.broken = False

    def sync(self) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        self.syncs += 1


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, disk: Disk) -> Iterator[Store]:
    with closing(open_store(tmp_path, clock, sync=disk.sync)) as opened:
        yield opened


@pytest.fixture
def coordinator(store: Store, tmp_path: Path, ids: FixedIds, disk: Disk) -> Iterator[Coordinator]:
    """One that has just committed, and called workers for it, who have not come yet."""
    with closing(Sleepers(store)) as sleepers:
        made = begun(store, ids, tmp_path, COMMAND)
        assert sleepers.called() > 0
        assert store.unsynced
        disk.syncs = 0
        yield made


def test_it_is_durable_before_the_driver_sleeps(store: Store, coordinator: Coordinator, disk: Disk) -> None:
    coordinator.wait(at_most=0.0)
    assert (disk.syncs, store.unsynced) == (1, False)
    coordinator.wait(at_most=0.0)
    assert disk.syncs == 1
    coordinator.close()


def test_whoever_calls_meanwhile_comes_first(store: Store, coordinator: Coordinator, disk: Disk) -> None:
    store.wakes.wake(coordinator.process_id)
    coordinator.wait()
    assert (disk.syncs, store.unsynced) == (0, True)
    coordinator.wait(at_most=LATE_SYNC_SECONDS)
    assert (disk.syncs, store.unsynced) == (1, False)
    coordinator.close()


def test_where_nobody_is_called_it_is_durable_at_once(store: Store, tmp_path: Path, ids: FixedIds, disk: Disk) -> None:
    submitted(store, ids, tmp_path, fan_out(COMMAND))
    coordinator = registered(store, ids, adopts=True)
    assert coordinator.take(store.open_runs()[0], resume=False)
    disk.syncs = 0
    coordinator.tick()
    assert store.has_ready(None)
    assert (disk.syncs, store.unsynced) == (1, False)
    coordinator.close()


def test_who_ends_has_synced(coordinator: Coordinator, disk: Disk) -> None:
    coordinator.close()
    assert disk.syncs == 1


def test_a_failed_sync_is_told_and_the_workers_are_waited_for(coordinator: Coordinator, disk: Disk) -> None:
    """A foreground run that is told so ends its workers, and waits for their ends in the very same way."""
    disk.broken = True
    with pytest.raises(SyncFailed):
        coordinator.wait()
    assert coordinator.wait(at_most=0.0) == []
    coordinator.close()
