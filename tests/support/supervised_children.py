"""Children of a supervisor in tests. Functions of an importable module, since children are spawned."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.service_manager import DRAIN_SIGNAL

from support.builders import process_row

LONG = 600


def never_ready(path: Path, process_id: str, now: int) -> None:
    """Starts and never says that it has."""
    time.sleep(LONG)


def ready_and_silent(path: Path, process_id: str, now: int) -> None:
    """Registers, and is never heard again."""
    store = Store(path, SystemClock())
    store.register(process_row(process_id, now=now))
    store.close()
    time.sleep(LONG)


def counts_stops(path: Path, process_id: str, now: int) -> None:
    """Ends when it is asked to drain, and records in `failed` how many SIGTERM it got until then."""
    stops: list[int] = []
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
    signal.signal(DRAIN_SIGNAL, lambda number, frame: asked.append(number))
    store = Store(path, SystemClock())
    store.register(process_row(process_id, now=now))
    while not (asked and stops):
        time.sleep(0.005)
    store.renew(process_id, None, lease_ms=1000, rss=0, done=0, failed=len(stops))
    store.set_process_state(process_id, "stopped")
    store.close()
