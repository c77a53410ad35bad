"""The coordinator process: drives every run that has no live driver, rescues, prunes (architecture 3)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentctl.store import log_lines, process_identity
from agentctl.store.clock import DAY_MS, SystemClock, SystemIds
from agentctl.store.engine import Store, own_rss
from agentctl.store.errors import AgentctlError
from agentctl.store.faults import Faults
from agentctl.store.gate import yield_gently
from agentctl.store.long_lived import keep_what_is_loaded
from agentctl.store.records import ProcessRow
from agentctl.store.service_manager import DRAIN_SIGNAL, ServiceManager, Watchdog
from agentctl.store.timing import Timing

from .driver import Coordinator

log = logging.getLogger(__name__)

PRUNE_AFTER_MS = 7 * DAY_MS
"""Rows of ended processes are kept for a week."""

PRUNE_EVERY_SECONDS = 3600.0

POOL_STOP_SECONDS = 2.0
"""How long a coordinator that got SIGTERM waits to see whether its whole pool was stopped."""


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

    log_lines.configure(config.log_level, config.name)
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


def serve(config: CoordinatorConfig, parent_sentinel: int | None, manager: ServiceManager | None = None) -> None:
    """Coordinate until SIGTERM or SIGINT, a drain request, or the end of the parent.

    The coordinator of a pool ends last, when its supervisor says so: a stop of the whole group at one instant reaches
    it as well, and what the workers finish after that is still to be committed. A second SIGTERM ends it at once.
    """
    stop = StopSignal(hangup=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a supervisor starts its children with it blocked
    manager = manager if manager is not None else ServiceManager(None)
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
    watchdog = Watchdog(manager, clock, lambda: store.database.waits)
    coordinator.on_progress = watchdog.beat
    end = _End(config, store, clock, stop)
    next_prune = clock.monotonic()
    watched = [stop.descriptor] + ([parent_sentinel] if parent_sentinel is not None else [])
    keep_what_is_loaded()
    manager.ready("drives runs")
    try:
        while not end.has_come() and not coordinator.drain_requested:
            watchdog.beat()
            if clock.monotonic() >= next_prune:
                next_prune = clock.monotonic() + PRUNE_EVERY_SECONDS
                store.prune_processes(older_than_ms=PRUNE_AFTER_MS)
                manager.status(f"drives {len(coordinator.drivers)} runs")
            if coordinator.tick():
                continue
            if parent_sentinel in coordinator.wait(watched, manager.longest_sleep):
                log.warning("the supervisor is gone; this coordinator ends")
                break
        manager.stopping("gives its runs back")
        # What workers have finished before they went is committed, so that the tables do not call it running. One
        # round, since a run without effects could go on in it for long.
        coordinator.tick()
    finally:
        coordinator.close()
        store.close()


class _End:
    """When a coordinator has to end."""

    def __init__(self, config: CoordinatorConfig, store: Store, clock: SystemClock, stop: StopSignal) -> None:
        self._parent = config.parent_process_id
        self._store = store
        self._clock = clock
        self._stop = stop
        self._alone_at: float | None = None

    def has_come(self) -> bool:
        """Asked before every sleep: a signal that comes after this look finds the descriptor empty, and wakes."""
        self._stop.drain()
        if self._parent is None or self._stop.asked or self._stop.received > 1:
            return self._stop.received > 0 or self._stop.asked
        if not self._stop.received:
            return False
        supervisor = self._store.get_process(self._parent)
        if supervisor is not None and supervisor.state == "draining":
            return False  # the pool ends, and this one last
        if self._alone_at is None:
            self._alone_at = self._clock.monotonic() + POOL_STOP_SECONDS
        return self._clock.monotonic() >= self._alone_at


class StopSignal:
    """SIGTERM and SIGINT as a count and a readable descriptor; and what a supervisor asks of its child.

    With `hangup`, a SIGHUP is the same stop once more, not a second one: the end of a login session sends both.
    """

    def __init__(self, *, hangup: bool = False) -> None:
        self.asked = False
        self._stops = 0
        self._hung_up = False
        self.descriptor, self._end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(DRAIN_SIGNAL, self._on_asked)
        if hangup and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_hangup)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        self._call()

    def _on_asked(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self._call()

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True
        self._call()

    @property
    def received(self) -> int:
        """How many stops have come."""
        return max(self._stops, int(self._hung_up))

    def _call(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._end, b"s")

    def drain(self) -> None:
        """Swallow what the descriptor holds, so that it becomes readable only for the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 64)
