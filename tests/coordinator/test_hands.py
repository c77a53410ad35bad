"""Who is woken for what is enqueued: for brief work as many as there are processors, unless it does not go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.driver import ANSWER_SECONDS, PACE_FORGOTTEN_SECONDS, PACE_SECONDS, _Pace
from agentctl.store.engine import CROWDED_RATE, Store
from agentctl.store.records import Batch
from agentctl.store.states import BRIEF_KINDS
from agentctl.store.task_queue import BRISK_MS
from support import store_children
from support.builders import Driver, Hand, new_run, open_store
from support.children import SPAWN, Children
from support.clock import FixedIds, ManualClock
from support.coordinators import COMMAND, READ, WORKERS, Sleepers, begun, registered

PROCESSORS = 2


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(PROCESSORS)))
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def sleepers(store: Store) -> Iterator[Sleepers]:
    made = Sleepers(store)
    yield made
    made.close()


def enqueue(store: Store, driver: Driver, positions: range, *, brief: int, rate: float | None) -> None:
    batch = Batch()
    driver.add(batch, positions)
    batch.brief = brief
    revision = store.run_head(driver.run.run_id)[1]
    store.commit_batch(driver.run, batch, driver=driver.name, epoch=driver.epoch, revision=revision, rate=rate)


@pytest.mark.parametrize(
    ("brief", "rate", "hands", "called"),
    [
        pytest.param(0, None, 0, WORKERS, id="long work gets everybody"),
        pytest.param(0, 1e6, 2, WORKERS, id="long work gets everybody, whatever else goes on"),
        pytest.param(8, None, 0, PROCESSORS, id="brief work gets as many as there are processors"),
        pytest.param(8, None, 1, PROCESSORS - 1, id="who is up counts"),
        pytest.param(8, None, 2, 0, id="enough are up"),
        pytest.param(8, 2 * CROWDED_RATE, 2, 0, id="enough are up, and quick"),
        pytest.param(8, 2 * CROWDED_RATE - 1, 2, WORKERS, id="those who are up are slow"),
        pytest.param(8, 2 * CROWDED_RATE, 4, 0, id="more than enough are up"),
        pytest.param(5, None, 2, 3, id="of a mixture, only the long work calls"),
    ],
)
def test_who_is_woken(
    store: Store, sleepers: Sleepers, brief: int, rate: float | None, hands: int, called: int
) -> None:
    store.create_run(new_run(tasks=12))
    driver = Driver(store, "run-1")
    enqueue(store, driver, range(hands), brief=0, rate=None)
    for number in range(hands):
        Hand(store, f"worker-{number}").take()
    sleepers.called()
    enqueue(store, driver, range(hands, hands + 8), brief=brief, rate=rate)
    assert sleepers.called() == called


def test_whoever_is_busy_for_long_is_no_hand(store: Store, sleepers: Sleepers, clock: ManualClock) -> None:
    store.create_run(new_run(tasks=10))
    driver = Driver(store, "run-1")
    driver.enqueue(range(2))
    for number in range(2):
        Hand(store, f"worker-{number}").take()
    assert store.enough_hands()
    clock.advance((BRISK_MS + 1) / 1000)
    assert not store.enough_hands()
    sleepers.called()
    enqueue(store, driver, range(2, 10), brief=8, rate=None)
    assert sleepers.called() == PROCESSORS


@pytest.mark.parametrize(
    ("action", "items", "called"),
    [
        pytest.param(READ, 8, PROCESSORS, id="brief"),
        pytest.param(COMMAND, 8, WORKERS, id="long"),
        pytest.param(COMMAND, 1, 1, id="one"),
    ],
)
def test_work_at_which_nobody_moves_gets_everybody(
    store: Store,
    sleepers: Sleepers,
    clock: ManualClock,
    ids: FixedIds,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    items: int,
    called: int,
) -> None:
    """Whoever was called may be dead, stopped, or at a disk that is slow."""
    slept: list[float] = []
    monkeypatch.setattr(
        "agentctl.coordinator.driver.select.select", lambda *given: (slept.append(given[3]), ([], [], []))[1]
    )
    coordinator = begun(store, ids, tmp_path, action, items)
    assert sleepers.called() == called
    for _ in range(2):  # the first look sees the commit itself
        assert sleepers.called() == 0
        coordinator.wait()
        assert slept[-1] <= ANSWER_SECONDS
        coordinator.tick()
    assert sleepers.called() == WORKERS
    coordinator.wait()
    assert slept[-1] > ANSWER_SECONDS, "once is enough"
    coordinator.tick()
    assert sleepers.called() == 0
    coordinator.close()


def test_as_long_as_it_goes_on_nobody_else_is_called(
    store: Store, sleepers: Sleepers, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    coordinator = begun(store, ids, tmp_path, READ)
    assert sleepers.called() == PROCESSORS
    hands = [Hand(store, f"worker-{number}") for number in range(PROCESSORS)]
    claims = [hand.take() for hand in hands]
    for _ in range(3):
        for hand, claim in zip(hands, list(claims), strict=True):
            following = hand.finish(claim, next_claim=True)
            assert following is not None
            claims[hands.index(hand)] = following
        coordinator.tick()
    assert sleepers.called() == 0
    coordinator.close()


def test_commands_get_everybody_at_once(
    store: Store, sleepers: Sleepers, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    coordinator = begun(store, ids, tmp_path, COMMAND)
    assert sleepers.called() == WORKERS
    coordinator.close()


def test_brief_is_only_what_a_worker_does_by_itself() -> None:
    assert {"builtin.read", "builtin.memory.write"} == BRIEF_KINDS


def test_a_rate_is_made_of_what_came_in_lately() -> None:
    pace = _Pace()
    pace.note(50, 0.0)
    assert pace.rate is None, "nobody knows since when these have come in"
    pace.note(10, PACE_SECONDS / 2)
    assert pace.rate is None
    pace.note(30, PACE_SECONDS)
    assert pace.rate == pytest.approx(40 / PACE_SECONDS)
    pace.note(1, 3 * PACE_SECONDS)
    assert pace.rate == pytest.approx(1 / (2 * PACE_SECONDS))
    pace.note(5, 0.1 + 3 * PACE_SECONDS + PACE_FORGOTTEN_SECONDS)
    assert pace.rate is None


def test_who_looks_by_himself_does_not_join_where_hands_are_enough(store: Store, children: Children) -> None:
    """One processor, and one worker that comes and goes: whoever is called gets up all the same."""
    store.create_run(new_run(tasks=4))
    Driver(store, "run-1").enqueue(range(4))
    ours, theirs = SPAWN.Pipe()
    children.spawn(store_children.look_as_an_idle_worker, store.path, theirs)
    assert ours.poll(60)
    assert ours.recv() == [None, "t1", "t2"]


def test_whoever_takes_a_run_calls_workers_for_what_is_ready(
    store: Store, sleepers: Sleepers, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """Those whom the driver before has called may have found nothing to claim: the run was paused, say."""
    coordinator = begun(store, ids, tmp_path, COMMAND)
    coordinator.close()
    sleepers.called()
    next_one = registered(store, ids, adopts=False)
    assert next_one.take(store.open_runs()[0], resume=False)
    assert sleepers.called() == WORKERS
    next_one.close()
