"""The rescuer: when a holder that lives is taken for silent, and what it may count against others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agentctl.coordinator.rescue import Rescuer
from agentctl.store import process_identity
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.process_identity import HOLDER_MARKER, Liveness, ProcessIdentity
from agentctl.store.records import Claim
from agentctl.store.timing import Timing
from support.builders import LEASE_MS, Driver, Hand, effect_request, new_run, open_store, process_row
from support.children import Children, wait_until
from support.clock import ManualClock
from support.rows import attempt, effect, rows

TIMING = Timing(LEASE_MS / 1000, 3.0)
STEP = 0.5


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def rescuer(store: Store, clock: ManualClock) -> Rescuer:
    return Rescuer(store, clock, TIMING, "rescuer-1", Faults(None))


class Holder:
    """A real process that holds an attempt, with a command in flight, and never says anything."""

    def __init__(self, store: Store, children: Children, *, idempotency: str, elsewhere: bool = False) -> None:
        self._store = store
        self.process = children.command("sleep", "600")
        identity = process_identity.of(self.process.pid)
        assert identity is not None
        if elsewhere:
            identity = replace(identity, pid_namespace=identity.pid_namespace + 1)
        self.identity: ProcessIdentity = identity
        row = process_row("w1", state="busy", now=store.clock.now(), identity=identity.as_text(), pid=identity.pid)
        store.register(row)
        store.create_run(new_run(tasks=1))
        Driver(store, "run-1").enqueue([0])
        hand = Hand(store, "w1")
        self.claim: Claim = hand.take()
        self.request = effect_request(self.claim, idempotency=idempotency)
        hand.start(self.claim, self.request)
        self.effect = children.command("sleep", "600", env={HOLDER_MARKER: "w1"})

    def renew(self) -> None:
        """A sign of life."""
        assert self._store.renew("w1", self.claim.fence, lease_ms=LEASE_MS, rss=0, done=0, failed=0) == (True, False)

    def alive(self) -> bool:
        return process_identity.liveness(self.identity) is Liveness.ALIVE


@pytest.fixture
def holder(store: Store, children: Children) -> Callable[..., Holder]:
    def make(idempotency: str = "idempotent", **where: bool) -> Holder:
        return Holder(store, children, idempotency=idempotency, **where)

    return make


def seconds_until_rescued(rescuer: Rescuer, clock: ManualClock, limit: float) -> float | None:
    """Look twice a second; the time after which something was settled, or None."""
    waited = 0.0
    while waited < limit:
        if rescuer.look():
            return waited
        clock.advance(STEP)
        waited += STEP
    return None


@pytest.mark.parametrize("idempotency", ["idempotent", "at_most_once"])
def test_a_silent_holder_is_ended_after_lease_and_grace(
    store: Store, clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder], idempotency: str
) -> None:
    """Not before; then it and its commands are gone before anything is handed on."""
    silent = holder(idempotency)
    waited = seconds_until_rescued(rescuer, clock, 3 * rescuer.patience)
    assert waited is not None, "nobody is silent for ever"
    assert rescuer.patience - 2 * STEP <= waited <= rescuer.patience + 4 * STEP
    assert not silent.alive()
    wait_until(lambda: silent.effect.poll() is not None, "its command has ended")
    row = store.get_process("w1")
    assert row is not None
    assert row.state == "dead"
    expected = ("ready", "requested") if idempotency == "idempotent" else ("finished", "uncertain")
    found = attempt(store, silent.claim.fence.attempt_id)["state"], effect(store, silent.request.effect_id)["status"]
    assert found == expected


def test_nobody_is_dead_who_cannot_be_looked_up_from_here(
    store: Store, clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder]
) -> None:
    """Not before lease and grace; and then it may live on, so even what may be repeated is in doubt."""
    silent = holder("idempotent", elsewhere=True)
    waited = seconds_until_rescued(rescuer, clock, 3 * rescuer.patience)
    assert waited is not None
    assert rescuer.patience - 2 * STEP <= waited
    assert silent.process.poll() is None, "it is not the process of that number here"
    assert attempt(store, silent.claim.fence.attempt_id)["state"] == "finished"
    assert rows(store, "SELECT status, notes_json FROM effects") == [("uncertain", '{"holderMayLive":"w1"}')]
    row = store.get_process("w1")
    assert row is not None
    assert row.state != "dead"


def test_whoever_renews_is_left_alone(
    store: Store, clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder]
) -> None:
    """However long its task takes."""
    well = holder()
    for _ in range(10):
        assert seconds_until_rescued(rescuer, clock, TIMING.heartbeat) is None
        well.renew()
    assert seconds_until_rescued(rescuer, clock, rescuer.patience - 4 * STEP) is None
    assert well.alive()


def test_a_renewal_in_the_last_moment_begins_the_count_anew(
    clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder]
) -> None:
    late = holder()
    assert seconds_until_rescued(rescuer, clock, rescuer.patience - 2 * STEP) is None
    late.renew()
    assert seconds_until_rescued(rescuer, clock, rescuer.patience - 4 * STEP) is None
    assert late.alive()
    assert seconds_until_rescued(rescuer, clock, rescuer.patience) is not None


def test_a_time_in_which_the_rescuer_did_not_run_counts_against_nobody(
    clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder]
) -> None:
    """The machine was suspended, or the rescuer itself was stopped: the others may have been as well."""
    asleep = holder()
    rescuer.look()
    for _ in range(5):
        clock.advance(100 * rescuer.patience)
        assert rescuer.look() == 0
    assert asleep.alive()
    waited = seconds_until_rescued(rescuer, clock, 2 * rescuer.patience)
    assert waited is not None
    assert waited >= TIMING.grace - STEP, "a full grace period of its own is needed"


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_clock_that_is_set_hides_and_accuses_nobody(
    clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder], hours: int
) -> None:
    silent = holder()
    rescuer.look()
    clock.set_wall(clock.now() + hours * 3_600_000)
    waited = seconds_until_rescued(rescuer, clock, 3 * rescuer.patience)
    assert waited is not None, "a clock set back does not hide a silent holder"
    assert waited >= TIMING.grace - STEP, "a clock set forward takes away no grace"
    assert not silent.alive()


def test_a_damaged_row_of_a_process_keeps_nobody_from_being_looked_after(
    store: Store, clock: ManualClock, rescuer: Rescuer, holder: Callable[..., Holder], children: Children
) -> None:
    """Nobody knows whom it means: he is not dead before lease and grace, and then what he held is in doubt."""
    silent = holder("idempotent")
    gone = children.command("sleep", "600")
    identity = process_identity.of(gone.pid)
    assert identity is not None
    gone.kill()
    gone.wait()
    store.register(process_row("w2", state="idle", now=clock.now(), identity=identity.as_text(), pid=identity.pid))
    with store.database.write() as tx:
        tx.execute("UPDATE processes SET identity = 'nonsense' WHERE process_id = 'w1'")
    assert rescuer.look() == 0
    dead = store.get_process("w2")
    assert dead is not None
    assert dead.state == "dead", "whoever comes after the damaged row is looked at as well"
    waited = seconds_until_rescued(rescuer, clock, 3 * rescuer.patience)
    assert waited is not None
    assert rescuer.patience - 2 * STEP <= waited
    assert silent.alive()
    assert rows(store, "SELECT status, notes_json FROM effects") == [("uncertain", '{"holderMayLive":"w1"}')]
