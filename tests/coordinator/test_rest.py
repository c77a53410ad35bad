"""A coordinator at rest: what is to be done waits for no look, and a look is never far, however long a lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.driver import LOOK_SECONDS, QUIET_LOOKS, Coordinator
from agentctl.store.engine import Store
from agentctl.store.records import EffectEnd
from agentctl.store.timing import Timing
from support.builders import Driver, Hand, effect_request, new_run, open_store, process_row
from support.clock import FixedIds, ManualClock
from support.coordinators import COMMAND, READ, Sleepers, fan_out, registered, submitted
from support.rows import scalar

TIMING = Timing()

UNDOES = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: undoes}
spec:
  compensation: {onFailure: automatic}
  policy: {approval: never, writableRoots: [out]}
  actions: {write: {kind: builtin.write}, check: {kind: builtin.assert}}
  tasks:
    - id: make
      uses: action:write
      with: {path: out/x, content: made}
      compensate: {uses: "action:write", with: {path: out/x, content: undone}}
    - {id: verify, uses: "action:check", needs: [make], with: {that: false}}
"""


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def sleepers(store: Store) -> Iterator[Sleepers]:
    made = Sleepers(store)
    yield made
    made.close()


def rounds(coordinator: Coordinator) -> None:
    """Go on as long as there is something to do without any sleep."""
    for _ in range(50):
        if not coordinator.tick() and coordinator.sleep_seconds() > 0.0:
            return
    raise AssertionError("it never sleeps")


def test_a_compensation_that_was_started_is_driven_at_once(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """It is a run without a driver, and nobody calls: with the last run ended, the next look may be a while off."""
    run_id = submitted(store, ids, tmp_path, UNDOES)
    coordinator = registered(store, ids, adopts=True)
    rounds(coordinator)
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim, effect_class="workspace_mutate")
    hand.start(claim, request)
    hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", "{}"), result='{"path": "out/x"}')
    rounds(coordinator)
    assert store.get_run(run_id).state == "failed"
    driver = scalar(store, "SELECT driver FROM runs WHERE source_run_id = ?", run_id)
    assert driver == coordinator.process_id
    coordinator.close()


ASKS = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: asks}
spec:
  policy: {writableRoots: [out]}
  runtime: {budgets: {maxWallTimeSeconds: 300}}
  actions: {write: {kind: builtin.write}}
  tasks:
    - {id: make, uses: "action:write", with: {path: out/x, content: made}}
"""


def test_long_leases_make_no_look_seldom(store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path) -> None:
    """A paused run whose time is over ends by itself: nobody calls for that, so a coordinator at rest has to look."""
    run_id = submitted(store, ids, tmp_path, ASKS)
    coordinator = registered(store, ids, Timing(lease=3600.0, heartbeat=720.0), adopts=True)
    rounds(coordinator)
    store.request_pause(run_id, reason="later", actor="tester")
    rounds(coordinator)
    assert store.get_run(run_id).state == "paused"
    over = clock.monotonic() + 300.0
    while store.get_run(run_id).ended_at is None:
        assert clock.monotonic() < over + 10.0, "it still is not ended"
        clock.advance(coordinator.sleep_seconds())
        rounds(coordinator)
    assert over <= clock.monotonic() <= over + 10.5
    coordinator.close()


def test_who_has_nothing_to_do_rests(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    """One waking in a rest for a pool and a few for a coordinator: the heartbeat comes with a look."""
    for adopts, looks in ((False, 1), (True, QUIET_LOOKS)):
        resting = registered(store, ids, adopts=adopts)
        wakings = 0
        ends = clock.monotonic() + 10 * TIMING.rest
        while clock.monotonic() < ends:
            resting.tick()
            assert resting.sleep_seconds() > 0
            clock.advance(resting.sleep_seconds())
            wakings += 1
        # The first heartbeat comes early, before anybody has rested.
        assert 10 * looks <= wakings <= 10 * looks + 3
        [row] = [row for row in store.live_processes() if row.process_id == resting.process_id]
        assert clock.now() - row.heartbeat_at <= TIMING.rest * 1000
        resting.close()


def test_nobody_rests_while_somebody_holds_something(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    def sleeps() -> list[float]:
        """Of a pool and of a coordinator that have just looked."""
        found = []
        for adopts in (False, True):
            base = registered(store, ids, adopts=adopts)
            base.tick()
            found.append(base.sleep_seconds())
            base.close()
        return found

    assert min(sleeps()) > LOOK_SECONDS
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    Hand(store).take()
    assert sleeps() == [LOOK_SECONDS, LOOK_SECONDS]


def test_a_coordinator_looks_after_runs_that_others_drive(store: Store, clock: ManualClock, ids: FixedIds) -> None:
    store.create_run(new_run(tasks=1))
    store.register(process_row("driver-1"))
    Driver(store, "run-1")
    watching = registered(store, ids, adopts=True)
    watching.tick()
    assert (watching.drivers, watching.sleep_seconds()) == ({}, LOOK_SECONDS)
    watching.close()


def test_whoever_submits_calls_and_the_run_is_taken_at_once(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    resting = registered(store, ids, adopts=True)
    resting.tick()
    run_id = submitted(store, ids, tmp_path, fan_out(COMMAND))
    resting.tick()
    assert not resting.drivers, "nobody has called"
    store.call_coordinators()
    resting.wait()
    resting.tick()
    assert list(resting.drivers) == [run_id]
    assert resting.sleep_seconds() <= LOOK_SECONDS
    # With a run that it drives, too, a call leads to a look if there is a run to adopt, and only then.
    clock.advance(0.9 * LOOK_SECONDS)
    store.wakes.wake(resting.process_id)
    resting.wait(at_most=0)
    resting.tick()
    assert resting.sleep_seconds() == pytest.approx(0.1 * LOOK_SECONDS), "the look comes when it was to come"
    other = submitted(store, ids, tmp_path, fan_out(READ))
    store.call_coordinators()
    resting.wait(at_most=0)
    resting.tick()
    assert set(resting.drivers) == {run_id, other}
    resting.close()


def test_who_takes_a_run_by_itself_calls_those_who_adopt(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """Should it die, they have to see it soon: from now on they look after its run."""
    resting = registered(store, ids, adopts=True)
    resting.tick()
    alone = registered(store, ids, adopts=False)
    submitted(store, ids, tmp_path, fan_out(COMMAND))
    assert alone.take(store.open_runs()[0], resume=False)
    resting.wait()
    resting.tick()
    assert (resting.drivers, resting.sleep_seconds()) == ({}, LOOK_SECONDS)
    alone.close()
    resting.close()


def test_a_rest_is_cut_short_by_a_run(store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path) -> None:
    """The lease of its run has to be renewed in time, however long the coordinator has rested."""
    resting = registered(store, ids, adopts=True)
    clock.advance(TIMING.rest)
    resting.tick()
    submitted(store, ids, tmp_path, fan_out(COMMAND))
    assert resting.take(store.open_runs()[0], resume=False)
    clock.advance(LOOK_SECONDS)
    resting.tick()
    assert resting.rescuer._last_look == clock.monotonic(), "from now on somebody has to be looked after"
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
    run_id = submitted(store, ids, tmp_path, fan_out(COMMAND))
    coordinator = registered(store, ids, adopts=True)
    assert coordinator.take(store.open_runs()[0], resume=False)
    assert sleepers.announced() == [run_id]
    coordinator.close()
    next_one = registered(store, ids, adopts=True)
    assert next_one.take(store.open_runs()[0], resume=False)
    assert sleepers.announced() == []
    next_one.close()
