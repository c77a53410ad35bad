"""The supervisor with real children and time in our hands: stalled starts, silence, suspension, drain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.rescue import Rescuer
from agentctl.coordinator.supervisor import MAX_START_FAILURES, START_LIMIT_SECONDS, Supervisor
from agentctl.store.engine import Store
from agentctl.store.errors import EnvironmentFault
from agentctl.store.faults import Faults
from agentctl.store.timing import Timing
from support import interrupted_child, supervised_children
from support.builders import open_store
from support.children import wait_until
from support.clock import FixedIds, ManualClock

TIMING = Timing(15.0, 3.0)
PATIENCE = 30.0
"""Lease and grace."""


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def supervisor(store: Store, clock: ManualClock, ids: FixedIds) -> Iterator[Supervisor]:
    made = Supervisor(store, clock, ids, Rescuer(store, clock, TIMING, "supervisor", Faults(None)))
    yield made
    for slot in made._slots:
        if slot.child is not None:
            slot.child.process.kill()
            slot.child.process.join()


Entry = Callable[[str, str], tuple[Callable[..., None], tuple[object, ...]]]


def child(target: Callable[..., None], store: Store) -> Entry:
    """The entry of a slot."""

    def entry(process_id: str, name: str) -> tuple[Callable[..., None], tuple[object, ...]]:
        return target, (store.path, process_id, store.clock.now())

    return entry


def pid_of(supervisor: Supervisor) -> int | None:
    current = supervisor._slots[0].child
    return None if current is None else current.process.pid


def reaped(supervisor: Supervisor, pid: int | None, clock: ManualClock) -> None:
    """Tick until that child is gone and another one stands in its place."""

    def replaced() -> bool:
        supervisor.tick()
        if pid_of(supervisor) is None:
            clock.advance(3)  # past every back-off
        return pid_of(supervisor) not in (None, pid)

    wait_until(replaced, "another child")


def test_a_start_that_stalls_is_ended_and_tried_again_and_then_given_up(
    supervisor: Supervisor, store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor.add("w1", child(supervised_children.never_ready, store))
    supervisor.tick()
    assert not supervisor.ready()
    first = pid_of(supervisor)
    clock.advance(START_LIMIT_SECONDS - 1)
    supervisor.tick()
    assert pid_of(supervisor) == first
    with caplog.at_level(logging.WARNING), pytest.raises(EnvironmentFault, match="cannot be started"):
        for _ in range(MAX_START_FAILURES):
            pid = pid_of(supervisor)
            clock.advance(START_LIMIT_SECONDS + 1)
            supervisor.tick()  # it is killed
            clock.advance(3)  # past every back-off
            reaped(supervisor, pid, clock)
    assert caplog.text.count("does not become ready and is replaced") == MAX_START_FAILURES


def become_ready(supervisor: Supervisor) -> None:
    def ready() -> bool:
        supervisor.tick()
        return supervisor.ready()

    wait_until(ready, "the child has registered")


def test_silence_counts_for_whoever_rests_as_well(supervisor: Supervisor, store: Store, clock: ManualClock) -> None:
    """A pool without work looks once in a rest: no gap to it, but time in which its child has said nothing."""
    supervisor.add("w1", child(supervised_children.ready_and_silent, store))
    supervisor.tick()
    become_ready(supervisor)
    pid = pid_of(supervisor)
    supervisor._rescuer.sleep = TIMING.rest
    clock.advance(3 * TIMING.rest)
    supervisor.tick()  # much longer than it meant to sleep: it was stopped itself, and blames nobody
    for _ in range(int(PATIENCE / TIMING.rest) - 1):
        clock.advance(TIMING.rest)
        supervisor.tick()
    assert pid_of(supervisor) == pid
    clock.advance(TIMING.rest + 1)
    reaped(supervisor, pid, clock)


def test_silence_is_ended_after_lease_and_grace(supervisor: Supervisor, store: Store, clock: ManualClock) -> None:
    supervisor.add("w1", child(supervised_children.ready_and_silent, store))
    supervisor.tick()
    become_ready(supervisor)
    pid = pid_of(supervisor)
    for _ in range(int(PATIENCE) - 2):
        clock.advance(1)
        supervisor.tick()
    assert pid_of(supervisor) == pid
    for _ in range(4):
        clock.advance(1)
        supervisor.tick()
    reaped(supervisor, pid, clock)
    [row] = [row for row in store.all_processes() if row.pid == pid]
    assert row.state == "dead"


@pytest.mark.parametrize("jump", ["suspended", "set forward", "set back"])
def test_a_gap_and_a_clock_that_is_set_accuse_nobody(
    supervisor: Supervisor, store: Store, clock: ManualClock, jump: str
) -> None:
    supervisor.add("w1", child(supervised_children.ready_and_silent, store))
    supervisor.tick()
    become_ready(supervisor)
    pid = pid_of(supervisor)
    supervisor.tick()
    if jump == "suspended":
        clock.advance(8 * 3600)  # this process did not run either
    else:
        clock.set_wall(clock.now() + (8 * 3_600_000 if jump == "set forward" else -8 * 3_600_000))
    for _ in range(int(PATIENCE) - 3):
        supervisor.tick()
        clock.advance(1)
    assert pid_of(supervisor) == pid


def test_a_drain_asks_once_whatever_else_has_reached_the_child(
    supervisor: Supervisor, store: Store, clock: ManualClock
) -> None:
    """A child that got SIGTERM already is not asked with a second one."""
    import os
    import signal

    supervisor.add("w1", child(supervised_children.counts_stops, store))
    supervisor.tick()
    become_ready(supervisor)
    pid = pid_of(supervisor)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    supervisor.drain(60)

    def gone() -> bool:
        supervisor.tick()
        return supervisor.children() == 0

    wait_until(gone, "it has ended")
    assert not supervisor.forced
    [row] = store.all_processes()
    assert (row.state, row.failed) == ("stopped", 1)  # what it has counted


def test_ctrl_c_while_a_child_imports_waits_until_it_has_handlers(
    supervisor: Supervisor, store: Store, clock: ManualClock, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else each worker of a `run` that was interrupted at once printed a traceback of its imports."""
    supervisor.add("w1", child(interrupted_child.ready_and_silent, store))
    supervisor.tick()
    first = pid_of(supervisor)

    def ready_or_gone() -> bool:
        supervisor.tick()
        return supervisor.ready() or pid_of(supervisor) != first

    wait_until(ready_or_gone, "the child")
    assert supervisor.ready()
    assert pid_of(supervisor) == first
    assert "Traceback" not in capfd.readouterr().err
