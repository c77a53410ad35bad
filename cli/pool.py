"""Where the rooms meet: foreground runs, pools of workers, the coordinator process, the end of what was asked to stop.

The coordinator's room does not know the worker's; this module hands the worker's entry to the supervisor.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.rescue import Rescuer
from agentctl.coordinator.service import CoordinatorConfig, StopSignal, coordinator_main, process_row, serve
from agentctl.store import process_identity
from agentctl.store.clock import SystemClock, SystemIds
from agentctl.store.engine import Store
from agentctl.store.errors import CorruptStore, EnvironmentFault
from agentctl.store.faults import Faults
from agentctl.store.gate import yield_gently
from agentctl.store.long_lived import keep_what_is_loaded
from agentctl.store.process_identity import ProcessIdentity
from agentctl.store.records import Run
from agentctl.store.recycling import NO_LIMITS, Limits
from agentctl.store.service_manager import ServiceManager, Watchdog
from agentctl.store.timing import Timing
from agentctl.store.version import VERSION

from .requests import coordinator_is_live, is_alive

if TYPE_CHECKING:
    from agentctl.coordinator.supervisor import Supervisor

    from .run import Deadline

log = logging.getLogger(__name__)

NO_WORKER_SECONDS = 2.0
"""Ready work without any live worker for this long: a foreground run starts a pool of its own (architecture 3)."""

COORDINATOR_LOOK_SECONDS = 2.0
"""How often a pool that leaves the coordination to another one looks whether that is still there."""

PRIVATE_DRAIN_SECONDS = 5.0
FOLLOW_POLL_SECONDS = 0.1
CHANGE_SECONDS = 0.1

EXIT_DRAINED = 0
EXIT_FORCED = 3


def worker_is_live(store: Store, run_id: str | None = None) -> bool:
    """Whether a worker is there that would take work of `run_id` (of any run without it)."""
    return any(
        row.only_run in (None, run_id) and not row.drains and is_alive(row) for row in store.live_processes("worker")
    )


def _worker_entry(
    path: Path,
    timing: Timing,
    parent: str,
    only_run: str | None,
    unit: str | None,
    log_level: int,
    limits: Limits = NO_LIMITS,
) -> Callable[[str, str], tuple[Callable[..., None], tuple[object, ...]]]:
    from agentctl.worker.process import WorkerConfig, worker_main

    def entry(process_id: str, name: str) -> tuple[Callable[..., None], tuple[object, ...]]:
        config = WorkerConfig(
            path, process_id, name, parent, only_run, unit, VERSION, timing.lease, timing.heartbeat, log_level, limits
        )
        return worker_main, (config,)

    return entry


# -- a foreground run --------------------------------------------------------------------------------------------------


def run_in_foreground(
    path: Path,
    run_id: str,
    *,
    resume: bool,
    workers: int | None,
    on_change: Callable[[], None] | None,
    plan: Plan | None = None,
    timeout: Deadline | None = None,
) -> bool:
    """Drive a run until it is no longer `running`, or follow it while another process drives it.

    Uses live workers if there are any, else a private pool of `workers` (default: what `maxConcurrency` and the
    machine's processors allow). SIGINT, SIGTERM and the end of `timeout` cancel the run; this returns when that is
    done: whether a signal has come. With `resume`, a signal that comes while another process drives it from the
    beginning on leaves it alone, as with `wait` (contract row 26): raises `KeyboardInterrupt`.
    """
    try:
        return _Foreground(path, run_id, workers, on_change, plan, timeout).run(resume)
    except EnvironmentFault as fault:
        # The run exists: to run the file again would do what is done a second time.
        fault.run_id = run_id
        fault.remedy = f"put that right, then `agentctl resume {run_id}`: what is done stays done"
        raise


def _sooner(one: float | None, other: float | None) -> float | None:
    found = [value for value in (one, other) if value is not None]
    return min(found) if found else None


class _Foreground:
    def __init__(
        self,
        path: Path,
        run_id: str,
        workers: int | None,
        on_change: Callable[[], None] | None,
        plan: Plan | None,
        timeout: Deadline | None,
    ) -> None:
        process_identity.drop_markers()
        yield_gently()
        self._stop = StopSignal()
        self._clock = SystemClock()
        self._deadline = timeout
        self._ids = SystemIds(self._clock)
        self._timing = Timing.from_environment()
        self._path = path
        self._run_id = run_id
        self._workers = workers
        self._plan = plan
        self._report = on_change
        self._reported = 0.0
        self._cancelled = False
        self._looks_on = False
        self._supervisor: Supervisor | None = None
        self._without_workers: float | None = None
        self._next_worker_check = 0.0
        self._store = Store(path, self._clock, cache_kib=16384)
        self._process_id = self._ids.new_id("driver")
        self._store.register(process_row("run", self._process_id, "run", VERSION, self._clock.now()))
        self._coordinator = Coordinator(
            self._store,
            self._clock,
            self._ids,
            self._timing,
            Faults.from_environment(),
            process_id=self._process_id,
            adopts=False,
        )

    def run(self, resume: bool) -> bool:
        self._looks_on = resume
        try:
            while True:
                run = self._store.get_run(self._run_id)
                if run.ended_at is not None or (run.state == "paused" and not resume):
                    return self._stop.received > 0
                trace_id = self._ids.new_id("trace") if resume else None
                if self._may_take(run) and self._coordinator.take(
                    run, resume=resume, plan=self._plan, actor="cli-user", trace_id=trace_id
                ):
                    self._looks_on = False
                    self._drive(run)
                else:
                    self._follow()
                resume = False
        finally:
            self._end_pool()
            self._coordinator.close()
            self._store.close()

    def _may_take(self, run: Run) -> bool:
        return run.state == "paused" or self._coordinator.is_abandoned(run)

    def _drive(self, run: Run) -> None:
        while self._run_id in self._coordinator.drivers:
            self._obey_signals()
            again = self._coordinator.tick()
            if self._run_id not in self._coordinator.drivers:
                break
            self._tell()
            self._look_after_workers(run)
            if not again:
                self._wait()

    def _wait(self) -> None:
        extra = [self._stop.descriptor]
        at_most = None
        if self._deadline is not None and not self._cancelled:
            at_most = max(0.0, self._deadline.at - self._clock.monotonic())
        if self._supervisor is not None:
            extra += self._supervisor.sentinels()
            at_most = _sooner(at_most, self._supervisor.next_due())
        elif self._coordinator.drivers[self._run_id].in_flight():
            at_most = _sooner(at_most, 0.2)
        self._coordinator.wait(extra, at_most)

    def _follow(self) -> None:
        """Somebody else drives the run: wait until it has ended or its driver is gone.

        A coordinator may have been faster with a run that was made here, and need not have any workers.
        """
        self._without_workers = self._clock.monotonic()
        while True:
            if self._looks_on and self._stop.received:
                raise KeyboardInterrupt
            self._obey_signals()
            self._tell()
            run = self._store.get_run(self._run_id)
            if run.state != "running" or self._may_take(run):
                return
            if not self._looks_on:
                self._look_after_workers(run)
            extra = [] if self._supervisor is None else self._supervisor.sentinels()
            self._coordinator.wait([self._stop.descriptor, *extra], FOLLOW_POLL_SECONDS)
            self._coordinator.tick()

    def _obey_signals(self) -> None:
        deadline = self._deadline
        late = deadline is not None and self._clock.monotonic() >= deadline.at
        if (self._stop.received or late) and not self._cancelled:
            self._cancelled = True
            reason = "a signal ended the command"
            if deadline is not None and not self._stop.received:
                reason = f"--timeout-seconds {deadline.seconds:g} is over"
            self._store.request_cancel(self._run_id, reason=reason, actor="cli-user")
            self._store.wake_everybody()
        self._stop.drain()

    def _tell(self) -> None:
        now = self._clock.monotonic()
        if self._report is not None and now - self._reported >= CHANGE_SECONDS:
            self._reported = now
            self._report()

    def _look_after_workers(self, run: Run) -> None:
        if self._supervisor is not None:
            self._supervisor.tick()
            return
        now = self._clock.monotonic()
        if now < self._next_worker_check or not self._waits_for_workers():
            return
        self._next_worker_check = now + 0.2
        if worker_is_live(self._store, self._run_id):
            self._without_workers = now
            return
        # Without any worker from the start there is nothing to wait for; a pool that vanished gets time to come back.
        if self._without_workers is None or now - self._without_workers >= NO_WORKER_SECONDS:
            self._start_pool(run)

    def _waits_for_workers(self) -> bool:
        driver = self._coordinator.drivers.get(self._run_id)
        return self._store.has_ready(self._run_id) if driver is None else driver.in_flight() > 0

    def _start_pool(self, run: Run) -> None:
        count = self._workers or min(run.max_concurrency, os.cpu_count() or 1)
        if count > run.max_concurrency:
            log.warning("%d workers, but maxConcurrency lets only %d work at once", count, run.max_concurrency)
        # Only here: a run whose tasks have no effects needs neither workers nor the modules that start them.
        from agentctl.coordinator.supervisor import Supervisor, names
        from agentctl.worker.effects.process import become_subreaper

        become_subreaper()
        self._supervisor = Supervisor(self._store, self._clock, self._ids, self._coordinator.rescuer)
        entry = _worker_entry(self._path, self._timing, self._process_id, self._run_id, None, log.getEffectiveLevel())
        for name in names(count, None):
            self._supervisor.add(name, entry)
        self._supervisor.tick()

    def _end_pool(self) -> None:
        if self._supervisor is None:
            return
        self._supervisor.drain(PRIVATE_DRAIN_SECONDS)
        while self._supervisor.children():
            self._coordinator.wait(self._supervisor.sentinels(), 0.05)
            self._supervisor.tick()


# -- a pool ------------------------------------------------------------------------------------------------------------


def start_workers(
    path: Path,
    *,
    count: int,
    name: str | None,
    coordinator: bool,
    drain_seconds: float,
    limits: Limits = NO_LIMITS,
) -> int:
    """Supervise `count` workers, and a coordinator unless one is live, until SIGTERM or a drain request.

    Exit code: 0 drained, 3 ended hard. Raises `EnvironmentFault` (exit 5) when children cannot start.
    """
    return _Pool(path, count, name, coordinator, drain_seconds, limits).run()


class _Pool:
    def __init__(
        self, path: Path, count: int, name: str | None, coordinator: bool, drain_seconds: float, limits: Limits
    ) -> None:
        from agentctl.coordinator.supervisor import Supervisor, names
        from agentctl.worker.effects.process import become_subreaper

        process_identity.drop_markers()
        yield_gently()
        self._stop = StopSignal(hangup=True)
        self._manager = ServiceManager.from_environment()
        self._clock = SystemClock()
        self._ids = SystemIds(self._clock)
        self._timing = Timing.from_environment()
        self._path = path
        self._drain_seconds = drain_seconds
        self._wants_coordinator = coordinator
        self._has_coordinator = False
        self._unit = os.environ.get("AGENTCTL_UNIT")
        self._store = Store(path, self._clock, create=True)
        self._process_id = self._ids.new_id("supervisor")
        self._store.register(
            process_row("supervisor", self._process_id, name or "pool", VERSION, self._clock.now(), unit=self._unit)
        )
        become_subreaper()
        # It adopts nothing and drives nothing: heartbeat, wake-ups and rescue are all that a supervisor needs of it.
        self._base = Coordinator(
            self._store,
            self._clock,
            self._ids,
            self._timing,
            Faults.from_environment(),
            process_id=self._process_id,
            adopts=False,
        )
        self._supervisor = Supervisor(self._store, self._clock, self._ids, self._base.rescuer)
        entry = _worker_entry(path, self._timing, self._process_id, None, self._unit, log.getEffectiveLevel(), limits)
        for worker in names(count, name):
            self._supervisor.add(worker, entry)
        self._watchdog = Watchdog(self._manager, self._clock, lambda: self._store.database.waits)
        self._told = ""

    def run(self) -> int:
        from agentctl.coordinator.supervisor import end_resource_tracker

        signalled = 0
        next_look = 0.0
        keep_what_is_loaded()
        try:
            while True:
                self._watchdog.beat()
                now = self._clock.monotonic()
                if self._wants_coordinator and not self._has_coordinator and now >= next_look and not signalled:
                    next_look = now + COORDINATOR_LOOK_SECONDS
                    self._ensure_coordinator()
                self._base.tick()
                self._supervisor.tick()
                self._tell_manager()
                for _ in range(self._stop.received - signalled):
                    # Each counts: two that came together are a drain and a hard end.
                    self._drain(first=not signalled)
                    signalled += 1
                if self._base.drain_requested and not signalled:
                    signalled = 1
                    self._drain(first=True)
                if signalled and self._supervisor.children() == 0:
                    break
                if self._supervisor.all_retired():
                    break
                self._stop.drain()
                at_most = _sooner(self._supervisor.next_due(), self._manager.longest_sleep)
                if self._wants_coordinator and not self._has_coordinator:
                    at_most = _sooner(at_most, COORDINATOR_LOOK_SECONDS)
                self._base.wait([self._stop.descriptor, *self._supervisor.sentinels()], at_most)
            return EXIT_FORCED if self._supervisor.forced else EXIT_DRAINED
        except EnvironmentFault:
            self._supervisor.drain(self._drain_seconds)
            while self._supervisor.children():
                self._base.wait(self._supervisor.sentinels(), 0.05)
                self._supervisor.tick()
            raise
        finally:
            self._base.close()
            self._store.close()
            end_resource_tracker()

    def _drain(self, *, first: bool) -> None:
        self._supervisor.drain(self._drain_seconds)
        if first:
            self._manager.stopping("finishes what runs")
            # A coordinator of ours that was stopped as well sees by this that the whole pool ends, and stays the last.
            self._store.set_process_state(self._process_id, "draining")

    def _tell_manager(self) -> None:
        """Ready when every child is, once; from then on only what has changed."""
        if self._manager.present and (self._told or self._supervisor.ready()):
            status = f"{self._supervisor.children()} children"
            if not self._told:
                self._manager.ready(status)
            elif status != self._told:
                self._manager.status(status)
            self._told = status

    def _ensure_coordinator(self) -> None:
        # One that has been silent for lease and grace does not count; a second one does no harm.
        heard_since = self._clock.now() - int(self._base.rescuer.patience * 1000)
        if coordinator_is_live(self._store, heard_since):
            return
        self._has_coordinator = True

        def entry(process_id: str, name: str) -> tuple[Callable[..., None], tuple[object, ...]]:
            config = CoordinatorConfig(
                self._path,
                process_id,
                name,
                self._process_id,
                self._unit,
                VERSION,
                self._timing.lease,
                self._timing.heartbeat,
                log.getEffectiveLevel(),
            )
            return coordinator_main, (config,)

        self._supervisor.add("coordinator", entry, prefix="coordinator", last=True)


def start_coordinator(path: Path) -> int:
    """Coordinate in this process until SIGTERM, SIGINT or a drain request."""
    process_identity.drop_markers()
    clock = SystemClock()
    timing = Timing.from_environment()
    config = CoordinatorConfig(
        path,
        SystemIds(clock).new_id("coordinator"),
        "coordinator",
        None,
        os.environ.get("AGENTCTL_UNIT"),
        VERSION,
        timing.lease,
        timing.heartbeat,
        log.getEffectiveLevel(),
    )
    serve(config, None, ServiceManager.from_environment())
    return EXIT_DRAINED


def start_worker(path: Path, *, name: str, drain_seconds: float, limits: Limits = NO_LIMITS) -> int:
    """Be one worker, in this process, until SIGTERM, SIGINT or a drain request. Exit code: 0 drained, 3 ended hard.

    A worker that has reached a limit starts anew in place: the same pid for the service manager, a new one for the
    database. Raises what opening the database raises.
    """
    from agentctl.worker.process import WorkerConfig, worker_alone

    process_identity.drop_markers()
    manager = ServiceManager.from_environment()
    clock = SystemClock()
    timing = Timing.from_environment()
    config = WorkerConfig(
        path,
        SystemIds(clock).new_id("worker"),
        name,
        None,
        None,
        os.environ.get("AGENTCTL_UNIT"),
        VERSION,
        timing.lease,
        timing.heartbeat,
        log.getEffectiveLevel(),
        limits,
        drain_seconds,
    )
    code, renew = worker_alone(config, manager)
    if renew:
        manager.restore_environment()
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, sys.orig_argv)
    return code


def stop_pool(path: Path, *, hard: bool) -> list[int]:
    """Ask every live supervisor and every worker without one to drain; with `hard`, to end effects now.

    Returns the pids that were signalled.
    """
    store = Store(path, SystemClock())
    try:
        signalled = []
        for row in store.live_processes():
            if row.kind == "supervisor" or (row.kind in ("coordinator", "worker") and row.parent_process_id is None):
                try:
                    identity = ProcessIdentity.from_text(row.identity)
                except CorruptStore:
                    continue  # nobody knows whom this damaged row means
                if process_identity.kill(identity, signal.SIGTERM):
                    signalled.append(row.pid)
                    if hard:
                        process_identity.kill(identity, signal.SIGINT)
        return signalled
    finally:
        store.close()


# -- cancellation ------------------------------------------------------------------------------------------------------


def rescue_the_dead(path: Path) -> None:
    """Settle what provably dead workers held, so that their effects can be reconciled though nobody else is alive."""
    clock = SystemClock()
    store = Store(path, clock)
    try:
        process_id = SystemIds(clock).new_id("rescuer")
        Rescuer(store, clock, Timing.from_environment(), process_id, Faults.from_environment()).look()
    finally:
        store.close()


def _asked_to_end() -> bool:
    """Whether a signal waits that this process holds back until it has told what it did."""
    return bool(signal.sigpending() & {signal.SIGINT, signal.SIGTERM})


def finish_request(store: Store, run: Run, *, resume: bool, patience: float) -> None:
    """Drive a run that was asked to stop until it has, or for `patience` seconds. `resume`: a paused one, too.

    `run` is as it was when nobody drove it: whoever has taken it since sees to it.
    """
    clock = store.clock
    ids = SystemIds(clock)
    process_id = ids.new_id("driver")
    store.register(process_row("run", process_id, "stop", VERSION, clock.now()))
    coordinator = Coordinator(
        store, clock, ids, Timing.from_environment(), Faults.from_environment(), process_id=process_id, adopts=False
    )
    try:
        if not coordinator.take(run, resume=resume, actor="cli-user"):
            return
        deadline = clock.monotonic() + patience
        while run.run_id in coordinator.drivers and clock.monotonic() < deadline and not _asked_to_end():
            if not coordinator.tick():
                coordinator.wait()
    finally:
        coordinator.close()
