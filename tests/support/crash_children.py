"""What child processes do in crash tests. Functions of an importable module, since children are spawned."""

from __future__ import annotations

from multiprocessing.synchronize import Barrier
from pathlib import Path

from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store


def open_and_close(path: Path, barrier: Barrier, times: int) -> None:
    """Open the database, which may not exist yet, look, and close it, again and again."""
    barrier.wait()
    for _ in range(times):
        store = Store(path, SystemClock(), create=True)
        store.open_runs()
        store.close()
