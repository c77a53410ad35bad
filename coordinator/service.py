"""The coordinator process: drives every run that has no live driver, rescues, prunes (architecture 3)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentctl.store import process_identity
from agentctl.store.clock import DAY_MS, SystemClock, SystemIds
from agentctl.store.engine import Store, own_rss
from agentctl.store.errors import AgentctlError
from agentctl.store.faults import Faults
from agentctl.store.gate import yield_gently
from agentctl.store.records import ProcessRow
from agentctl.store.timing import Timing

from .driver import Coordinator

log = logging.getLogger(__name__)

PRUNE_AFTER_MS = 7 * DAY_MS
"""Rows of ended processes are kept for a week."""


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """What a coordinator process has to know."""

    path: Path
    process_id: str
    name: str
    parent_process_id: str | None
    unit: str | None
    version: str
    lease: float
    heartbeat: float
    log_level: int = logging.WARNING


def process_row(
    kind: str, process_id: str, name: str, version: str, now: int, *, parent: str | None = None, unit: str | None = None
) -> ProcessRow:
    """The row of this very process."""
    return ProcessRow(
        process_id,
        kind,
        name,
        process_identity.current().as_text(),
        os.getpid(),
        parent,
        None,
        unit,
        "busy",
        version,
        now,
        now,
        None,
        None,
        0,
        0,
        own_rss(),
    )


def coordinator_main(config: CoordinatorConfig) -> None:
    """Entry of a coordinator that is a child of a supervisor. Ends the process: 0 after a drain, 5 on a fault."""
    import multiprocessing

    logging.basicConfig(level=config.log_level, format=f"%(asctime)s {config.name} %(levelname)s %(message)s")
    if os.getsid(0) != os.getpid():
        os.setsid()
    parent = multiprocessing.parent_process()
    try:
        serve(config, None if parent is None else parent.sentinel)
    except AgentctlError as error:
        log.error("%s", error.message)
        os._exit(5)
    except OSError as error:
        log.error("%s: %s", error.filename or config.path, error.strerror)
        os._exit(5)
    os._exit(0)


def serve(config: CoordinatorConfig, parent_sentinel: int | None) -> None:
    """Coordinate until SIGTERM or SIGINT, a drain request, or the end of the parent."""
    stop = StopSignal()
    yield_gently()
    clock = SystemClock()
    # The child of a supervisor never makes a database: it would be another one than the supervisor's.
    store = Store(config.path, clock, create=config.parent_process_id is None, cache_kib=16384)
    row = process_row(
        "coordinator",
        config.process_id,
        config.name,
        config.version,
        clock.now(),
        parent=config.parent_process_id,
        unit=config.unit,
    )
    store.register(row)
    coordinator = Coordinator(
        store,
        clock,
        SystemIds(clock),
        Timing(config.lease, config.heartbeat),
        Faults.from_environment(),
        process_id=config.process_id,
        adopts=True,
    )
    store.prune_processes(older_than_ms=PRUNE_AFTER_MS)
    watched = [stop.descriptor] + ([parent_sentinel] if parent_sentinel is not None else [])
    try:
        while not stop.received and not coordinator.drain_requested:
            if coordinator.tick():
                continue
            if parent_sentinel in coordinator.wait(watched):
                log.warning("the supervisor is gone; this coordinator ends")
                break
        # What workers have finished before they went is committed, so that the tables do not call it running. One
        # round, since a run without effects could go on in it for long.
        coordinator.tick()
    finally:
        coordinator.close()
        store.close()


class StopSignal:
    """SIGTERM and SIGINT as a flag and a readable descriptor."""

    def __init__(self) -> None:
        self.received = 0
        self.descriptor, self._end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._end, b"s")

    def drain(self) -> None:
        """Swallow what the descriptor holds, so that it becomes readable only for the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 64)
