"""Who is woken, and when: workers for what is enqueued, coordinators for what is submitted. And who rests how long."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import (
    ANSWER_SECONDS,
    LOOK_SECONDS,
    PACE_FORGOTTEN_SECONDS,
    PACE_SECONDS,
    QUIET_LOOKS,
    SETTLE_SECONDS,
    Coordinator,
    _Pace,
)
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.engine import CROWDED_RATE, Store
from agentctl.store.faults import Faults
from agentctl.store.records import Batch
from agentctl.store.states import BRIEF_KINDS
from agentctl.store.task_queue import BRISK_MS
from agentctl.store.timing import Timing
from support import builders, store_children
from support.builders import Driver, Hand, new_run, open_store
from support.children import SPAWN, Children
from support.clock import FixedIds, ManualClock

WORKERS = 6
PROCESSORS = 2
TIMING = Timing()

DOCUMENT = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {{name: many}}
spec:
  inputs: {{items: {items}}}
  policy: {{approval: never, processAllowlist: ["true"]}}
  runtime: {{maxConcurrency: 8}}
  actions: {{act: {action}}}
  tasks:
    - {{id: each, uses: "action:act", foreach: {{items: "${{{{ inputs.items }}}}", maxItems: 8}}}}
"""
READ = "{kind: builtin.read, with: {path: x}}"
COMMAND = "{kind: builtin.shell.exec, command: /bin/true}"


class Sleepers:
    """Idle workers that only note that they were called."""

    def __init__(self, store: Store) -> None:
        self._listeners: dict[str, socket.socket] = {}
        for number in range(WORKERS):
            name = f"sleeper-{number}"
            store.register(builders.process_row(name, state="idle"))
            self._listeners[name] = store.wakes.listen(name)

    def called(self) -> int:
        """How many calls have come since the last question, announcements left out."""
        return self._messages().count(b"w")

    def announced(self) -> list[str]:
        """The runs that were announced to somebody since the last question."""
        return [message[1:].decode() for message in self._messages() if message.startswith(b"a")]

    def _messages(self) -> list[bytes]:
        found = []
        for listener in self._listeners.values():
            try:
                while message := listener.recv(256):
                    found.append(message)
            except BlockingIOError:
                continue
        return found

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()


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


def submitted(store: Store, ids: FixedIds, folder: Path, action: str, items: int = 8) -> str:
    """A run of so many such actions, which nobody drives yet."""
    file = folder / "many.yaml"
    file.write_text(DOCUMENT.format(action=action, items=list(range(items))))
    document = load_workflow(file)
    return submit(store, document, compile_workflow(document), {}, ids=ids, base_path=folder, actor="tester").run_id


def begun(store: Store, clock: ManualClock, ids: FixedIds, folder: Path, action: str, items: int = 8) -> Coordinator:
    """The coordinator of a run of so many such actions, which it has just enqueued."""
    submitted(store, ids, folder, action, items)
    coordinator = registered(store, clock, ids, adopts=True)
    while not store.has_ready(None):
        coordinator.tick()
    return coordinator


def registered(store: Store, clock: ManualClock, ids: FixedIds, *, adopts: bool) -> Coordinator:
    process_id = ids.new_id("coordinator")
    store.register(process_row("coordinator", process_id, "coordinator", "0", clock.now()))
    return Coordinator(store, clock, ids, Timing(), Faults(None), process_id=process_id, adopts=adopts)


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
    coordinator = begun(store, clock, ids, tmp_path, action, items)
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
    coordinator = begun(store, clock, ids, tmp_path, READ)
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
    coordinator = begun(store, clock, ids, tmp_path, COMMAND)
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
    coordinator = begun(store, clock, ids, tmp_path, COMMAND)
    coordinator.close()
    sleepers.called()
    next_one = registered(store, clock, ids, adopts=False)
    assert next_one.take(store.open_runs()[0], resume=False)
    assert sleepers.called() == WORKERS
    next_one.close()


# -- rest --------------------------------------------------------------------------------------------------------------


def test_who_has_nothing_to_do_rests(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    """One waking in a rest for a pool and a few for a coordinator: the sign of life comes with a look."""
    for adopts, looks in ((False, 1), (True, QUIET_LOOKS)):
        resting = registered(store, clock, ids, adopts=adopts)
        wakings = 0
        ends = clock.monotonic() + 10 * TIMING.rest
        while clock.monotonic() < ends:
            resting.tick()
            assert resting.sleep_seconds() > 0
            clock.advance(resting.sleep_seconds())
            wakings += 1
        # The first sign of life comes early, before anybody has rested.
        assert 10 * looks <= wakings <= 10 * looks + 3
        [row] = [row for row in store.live_processes() if row.process_id == resting.process_id]
        assert clock.now() - row.heartbeat_at <= TIMING.rest * 1000
        resting.close()


def test_nobody_rests_while_somebody_holds_something(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    for adopts in (False, True):
        base = registered(store, clock, ids, adopts=adopts)
        base.tick()
        assert base.sleep_seconds() > LOOK_SECONDS
        base.close()
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    Hand(store).take()
    for adopts in (False, True):
        base = registered(store, clock, ids, adopts=adopts)
        base.tick()
        assert base.sleep_seconds() == LOOK_SECONDS
        base.close()


def test_a_coordinator_looks_after_runs_that_others_drive(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    store.create_run(new_run(tasks=1))
    store.register(builders.process_row("driver-1"))
    Driver(store, "run-1")
    watching = registered(store, clock, ids, adopts=True)
    watching.tick()
    assert (watching.drivers, watching.sleep_seconds()) == ({}, LOOK_SECONDS)
    watching.close()


def test_whoever_submits_calls_and_the_run_is_taken_at_once(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    resting = registered(store, clock, ids, adopts=True)
    resting.tick()
    run_id = submitted(store, ids, tmp_path, COMMAND)
    resting.tick()
    assert not resting.drivers, "nobody has called"
    store.call_coordinators()
    resting.wait()
    resting.tick()
    assert list(resting.drivers) == [run_id]
    assert resting.sleep_seconds() <= LOOK_SECONDS
    # With a run that it drives, too, a call leads to a look if there is a run to adopt, and only then.
    looks = clock.monotonic()
    store.wakes.wake(resting.process_id)
    resting.wait(at_most=0)
    resting.tick()
    assert resting.sleep_seconds() <= LOOK_SECONDS - (clock.monotonic() - looks)
    other = submitted(store, ids, tmp_path, READ)
    store.call_coordinators()
    resting.wait(at_most=0)
    resting.tick()
    assert set(resting.drivers) == {run_id, other}
    resting.close()


def test_who_takes_a_run_by_itself_calls_those_who_adopt(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """Should it die, they have to see it soon: from now on they look after its run."""
    resting = registered(store, clock, ids, adopts=True)
    resting.tick()
    alone = registered(store, clock, ids, adopts=False)
    submitted(store, ids, tmp_path, COMMAND)
    assert alone.take(store.open_runs()[0], resume=False)
    resting.wait()
    resting.tick()
    assert (resting.drivers, resting.sleep_seconds()) == ({}, LOOK_SECONDS)
    alone.close()
    resting.close()


def test_a_rest_is_cut_short_by_a_run(store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path) -> None:
    """The lease of its run has to be renewed in time, however long the coordinator has rested."""
    resting = registered(store, clock, ids, adopts=True)
    clock.advance(TIMING.rest)
    resting.tick()
    submitted(store, ids, tmp_path, COMMAND)
    assert resting.take(store.open_runs()[0], resume=False)
    ends = clock.monotonic() + 3 * TIMING.lease
    while clock.monotonic() < ends:
        resting.tick()
        clock.advance(max(0.01, resting.sleep_seconds()))
        [run] = store.open_runs()
        assert run.driver_lease_expires_at is not None
        assert run.driver_lease_expires_at > clock.now()
    resting.close()


def test_the_first_work_of_a_run_is_announced(
    store: Store, sleepers: Sleepers, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """To one worker, before the run is read; and not again when another driver takes the run."""
    run_id = submitted(store, ids, tmp_path, COMMAND)
    coordinator = registered(store, clock, ids, adopts=True)
    assert coordinator.take(store.open_runs()[0], resume=False)
    assert sleepers.announced() == [run_id]
    coordinator.close()
    next_one = registered(store, clock, ids, adopts=True)
    assert next_one.take(store.open_runs()[0], resume=False)
    assert sleepers.announced() == []
    next_one.close()


# -- commits that are made durable a moment later ----------------------------------------------------------------------


def test_a_commit_for_which_workers_are_called_is_durable_before_its_driver_rests(
    tmp_path: Path, clock: ManualClock, ids: FixedIds
) -> None:
    """And so is every other one before the next step: only a call delays it, since whoever comes syncs as well."""
    synced: list[str] = []
    opened = open_store(tmp_path, clock, sync=lambda: synced.append("sync"))
    with closing(opened) as store, closing(Sleepers(store)) as sleepers:
        coordinator = begun(store, clock, ids, tmp_path, COMMAND)
        assert sleepers.called() > 0
        synced.clear()
        assert store.unsettled
        coordinator.wait(at_most=0.0)
        assert (synced, store.unsettled) == (["sync"], False)
        coordinator.wait(at_most=0.0)
        assert synced == ["sync"]
        coordinator.close()


def test_whoever_is_called_meanwhile_goes_on_first(tmp_path: Path, clock: ManualClock, ids: FixedIds) -> None:
    synced: list[str] = []
    opened = open_store(tmp_path, clock, sync=lambda: synced.append("sync"))
    with closing(opened) as store, closing(Sleepers(store)):
        coordinator = begun(store, clock, ids, tmp_path, COMMAND)
        synced.clear()
        store.wakes.wake(coordinator.process_id)
        coordinator.wait()
        assert (synced, store.unsettled) == ([], True)
        coordinator.wait(at_most=SETTLE_SECONDS)
        assert (synced, store.unsettled) == (["sync"], False)
        coordinator.close()


def test_where_nobody_is_called_a_commit_is_durable_at_once(tmp_path: Path, clock: ManualClock, ids: FixedIds) -> None:
    synced: list[str] = []
    with closing(open_store(tmp_path, clock, sync=lambda: synced.append("sync"))) as store:
        submitted(store, ids, tmp_path, COMMAND)
        coordinator = registered(store, clock, ids, adopts=True)
        assert coordinator.take(store.open_runs()[0], resume=False)
        synced.clear()
        coordinator.tick()
        assert store.has_ready(None)
        assert (len(synced) > 0, store.unsettled) == (True, False)
        coordinator.close()
