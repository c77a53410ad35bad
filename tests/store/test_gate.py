"""The thread that looks after those who wait at a gate: it sleeps while nobody does, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.store import gate
from agentctl.store.gate import Gate
from support.children import wait_until


class Examined(Gate):
    """A gate that counts how often its holder was examined."""

    times = 0

    def examine_holder(self) -> None:
        self.times += 1


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> gate._Watch:
    """The watch of a process in which nobody has ever waited, and to which every wait is long at its first tick."""
    fresh = gate._Watch()
    monkeypatch.setattr(gate, "_watch", fresh)
    monkeypatch.setattr(gate, "STUCK_SECONDS", 1)
    return fresh


@pytest.fixture
def waiter(tmp_path: Path) -> Iterator[Examined]:
    with closing(Examined(tmp_path / "gate", lambda pid: "not ours")) as made:
        yield made


def wait_behind(holder: Gate, waiter: Examined, examined: int) -> None:
    """Let the waiter stand before a closed gate until its holder was examined so many times, and then through it."""

    def through() -> None:
        waiter.acquire()
        waiter.release()

    holder.acquire()
    try:
        waiting = threading.Thread(target=through, daemon=True)
        waiting.start()
        wait_until(lambda: waiter.times >= examined, "the holder is examined")
    finally:
        holder.release()
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_watch_sleeps_while_nobody_waits_and_comes_back(
    tmp_path: Path, watch: gate._Watch, waiter: Examined
) -> None:
    with closing(Gate(waiter.path, lambda pid: "not ours")) as holder:
        for lap in range(1, 3):
            wait_behind(holder, waiter, examined=lap)
            # With a tick a second in every process that has ever waited, a pool at rest would never sleep.
            wait_until(lambda: watch._sleeps, "the watch sleeps")
            waiter.times = lap


def test_nobody_waits_so_there_is_no_watch(watch: gate._Watch, waiter: Examined) -> None:
    waiter.acquire()
    waiter.release()
    assert watch._thread is None
