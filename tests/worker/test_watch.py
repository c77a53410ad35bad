"""The second thread of a worker looks into the same database wherever the first thread is at the moment."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.timing import Timing
from agentctl.worker.watch import HANG_EXIT_CODE, Watch
from support.builders import Driver, Hand, new_run, process_row
from support.children import wait_until
from support.clock import ManualClock


def test_a_relative_path_means_the_folder_in_which_the_worker_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    store = Store(tmp_path / "agentctl.db", clock, create=True)
    store.register(process_row("worker-1", now=clock.now()))
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    claim = Hand(store).take()
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    watch = Watch(Path("agentctl.db"), clock, Timing(), "worker-1", ours, None)
    # As while a command is started in another folder.
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    watch.begin(claim)
    store.request_cancel("run-1", reason="x", actor="test")
    wait_until(lambda: watch.token.reason == "cancel_requested", "the watch sees the request", seconds=10)
    watch.park()
    store.close()
    theirs.close()


class _Ended(BaseException):
    """The watch would have ended the process."""


def test_an_attempt_beyond_its_limit_hangs_unless_it_moves(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing a large artifact takes as long as it takes; standing still for longer than the grace is a hang."""

    def end(code: int) -> None:
        assert code == HANG_EXIT_CODE
        raise _Ended

    monkeypatch.setattr(os, "_exit", end)
    store = Store(tmp_path / "agentctl.db", clock, create=True)
    store.register(process_row("worker-1", now=clock.now()))
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    claim = Hand(store).take()
    ours, theirs = socket.socketpair()
    timing = Timing(lease=2.0, heartbeat=0.5)
    watch = Watch(tmp_path / "agentctl.db", clock, timing, "worker-1", ours, None)
    current = (claim, clock.monotonic())
    limit = claim.timeout_ms / 1000
    clock.advance(limit + timing.grace)
    beat = watch._look(store, current, 0.0)
    for _ in range(5):
        watch.token.moves()
        clock.advance(timing.grace)
        beat = watch._look(store, current, beat)
    clock.advance(timing.grace)
    beat = watch._look(store, current, beat)
    clock.advance(0.1)
    with pytest.raises(_Ended):
        watch._look(store, current, beat)
    store.close()
    theirs.close()


def test_the_end_of_one_attempt_is_not_that_of_the_next(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation meets an attempt that ends at this very moment, and whose worker has the next one already."""
    store = Store(tmp_path / "agentctl.db", clock, create=True)
    store.create_run(new_run(tasks=2))
    Driver(store, "run-1").enqueue([0, 1])
    first, second = Hand(store, "worker-1").take(), Hand(store, "worker-2").take()
    ours, theirs = socket.socketpair()
    watch = Watch(tmp_path / "agentctl.db", clock, Timing(), "worker-1", ours, None)
    watch._current = current = (first, clock.monotonic())
    failed: list[Exception] = []

    def go_on() -> None:
        watch.end()
        try:
            watch.begin(second)
        except Exception as error:
            failed.append(error)

    worker = threading.Thread(target=go_on)
    write = os.eventfd_write

    def write_late(descriptor: int, value: int) -> None:
        if worker.ident is None:
            worker.start()
            worker.join(0.5)  # nothing holds it up where it is not made to wait
        write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    watch._cancel(current, "cancel_requested")
    worker.join()
    assert failed == []
    assert watch._current is not None and watch._current[0] is second
    assert not watch.token.cancelled
    watch.park()
    store.close()
    theirs.close()
