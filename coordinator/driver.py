"""Drives runs: takes what workers have finished, decides, commits, and does so again until nothing can move.

A `RunDriver` holds the lease of one run. A `Coordinator` holds several drivers, renews their leases, adopts runs whose
driver is gone, rescues what dead workers held, and sleeps until somebody calls. The foreground `run` uses the same
coordinator for its one run; `agentctl coordinator start` uses it for all.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentctl.store import process_identity, wakeups
from agentctl.store.canonical import loads
from agentctl.store.clock import Clock, IdSource
from agentctl.store.compensations import Compensations
from agentctl.store.engine import Store, own_rss
from agentctl.store.errors import AgentctlError, ConflictError, CorruptStore, IncompatibleVersion, RunMoved
from agentctl.store.faults import Faults
from agentctl.store.process_identity import Liveness
from agentctl.store.records import ProcessRow, Run
from agentctl.store.timing import Timing

from .plan import Plan
from .plan_index import PlanIndex
from .rescue import Rescuer
from .scheduler import Scheduler

log = logging.getLogger(__name__)

COMPENSATION_PAUSE_SECONDS = 30.0
"""After a compensation could not be started, until it is tried again."""

LOOK_SECONDS = 0.5
"""How often the dead and the runs without a driver are looked for."""

QUIET_LOOKS = 2
"""How many looks fall into a rest (`Timing.rest`) of a coordinator while no run is open: whoever submits one calls.
A pool looks once: it adopts nothing, and sees the end of its own workers at once."""

POLL_SECONDS = 0.2
"""How long a driver with work in flight sleeps at most without a call: the net under lost wake-ups."""

LATE_SYNC_SECONDS = 0.003
"""How long a commit for which workers were called may wait to be made durable by the first of them: by then it has made
its own start so, and the driver is called before long or has nothing else to do."""

BREATHER_SECONDS = 0.005
"""How long a driver lets results gather after a commit, at most: one commit for many costs a fraction of many."""

BREATHER_FROM = 16
"""Attempts in flight from which a driver does so: then work is waiting, and no worker waits for the driver."""

PACE_SECONDS = 0.1
"""How long results are counted before a rate is made of them."""

PACE_FORGOTTEN_SECONDS = 0.5
"""How long no result may come until a rate says nothing any more."""

ANSWER_SECONDS = 0.05
"""How long workers may take to come for what was enqueued until all are woken: who was called may be stopped or dead,
and for brief work fewer were called than there is work for."""

STEPS_IN_A_ROW = 4
"""Batches that one run may commit before the others get their turn."""


class LostRun(Exception):
    """Another process drives this run now."""


def may_hold(plan: Plan) -> bool:
    """Whether an attempt of this plan may ever wait for a person or for budget; without, nobody has to look."""
    asks = plan.policy.get("approval") != "never" or any(t["approval"] == "always" for t in plan.tools.values())
    return asks or any(plan.budget.get("limits", {}).values())


@dataclass(slots=True)
class _SilentDriver:
    """How long the driver of a run has been seen without a sign of it."""

    epoch: int
    lease_expires_at: int | None
    last_look: float
    seconds: float = 0.0


class _Pace:
    """How many results a second come in, measured over moments of at least `PACE_SECONDS`; None as long as nobody can
    tell."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._since: float | None = None
        self._last = 0.0
        self._count = 0

    def note(self, results: int, now: float) -> None:
        """So many have come in since the last time (`now` in monotonic seconds)."""
        if self._since is None or now - self._last > PACE_FORGOTTEN_SECONDS:
            self.rate, self._since, self._count = None, now, 0
        else:
            self._count += results
            if now - self._since >= PACE_SECONDS:
                self.rate = self._count / (now - self._since)
                self._since, self._count = now, 0
        self._last = now


class RunDriver:
    """The driver of one run, from taking its lease to its end."""

    def __init__(
        self, store: Store, run_id: str, epoch: int, driver: str, ids: IdSource, faults: Faults, plan: Plan | None
    ) -> None:
        """Begin with what the store knows of the run. Raises `LostRun`."""
        self.run_id = run_id
        self.epoch = epoch
        self.done = False
        self.compensation_due = False
        self.unanswered = False
        """Whether something was enqueued and nobody has yet been seen to come for it."""
        self._pace = _Pace()
        self._store = store
        self._driver = driver
        self._ids = ids
        self._faults = faults
        documents = store.run_documents(run_id)
        self._inputs: dict[str, Any] = loads(documents.inputs_json)
        self._index = PlanIndex(plan if plan is not None else Plan.from_json(loads(documents.plan_json)))
        self._may_hold = may_hold(self._index.plan)
        self._scheduler: Scheduler
        self._run: Run
        self._reload()

    def _reload(self) -> None:
        snapshot = self._store.snapshot(self.run_id)
        if snapshot.run.epoch != self.epoch or snapshot.run.driver != self._driver:
            raise LostRun(self.run_id)
        run = snapshot.run
        self._run = run
        self._scheduler = Scheduler(
            self._index,
            snapshot,
            self._inputs,
            lambda positions: self._store.task_outputs(run, positions),
            self._ids.uniform,
        )

    def step(self) -> bool:
        """Commit one batch. Returns whether another step is worth taking at once. Raises `LostRun`."""
        epoch, revision, driver, state = self._store.run_head(self.run_id)
        if epoch != self.epoch or driver != self._driver or state != "running":
            raise LostRun(self.run_id)
        if revision != self._run.revision:
            self._reload()
        # In this order: what moves on between two looks is then believed to be in flight, never to be at rest.
        if self._scheduler.claims_nothing:
            self._scheduler.only_these_run(self._store.claimed_positions(self._run))
        finished, more = self._store.finished_attempts(self._run)
        if self._may_hold:
            self._scheduler.notice(self._store.held_attempts(self._run))
        batch = self._scheduler.decide(finished, self._store.clock.now(), backlog=more)
        if batch.is_empty():
            return False
        self._faults.reach("before_run_end" if batch.run_state else "before_commit")
        if finished:
            self._pace.note(len(finished), self._store.clock.monotonic())
        self.unanswered = self.unanswered or bool(batch.enqueues or batch.unheld)
        try:
            stopped = self._store.commit_batch(
                self._run,
                batch,
                driver=self._driver,
                epoch=self.epoch,
                revision=self._run.revision,
                rate=self._pace.rate,
                syncs_later=True,
            )
        except RunMoved:
            self._reload()
            return True
        self._faults.reach("after_commit")
        if stopped:
            self._scheduler.stopped(stopped)
        if batch.run_state is not None:
            self.done = True
            self.compensation_due = batch.compensation_due
            return False
        return more or self._scheduler.more

    def next_timer(self) -> int | None:
        """When the next backoff ends (epoch ms), or None."""
        return self._scheduler.next_timer()

    def in_flight(self) -> int:
        """Attempts that hold a place."""
        return self._scheduler.in_flight()


class Coordinator:
    """Several runs, one process. Not thread-safe; it owns its store and its wake-up socket."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        ids: IdSource,
        timing: Timing,
        faults: Faults,
        *,
        process_id: str,
        adopts: bool,
    ) -> None:
        """`adopts`: take every run that has no live driver; otherwise only what is given to `take`."""
        self.store = store
        self.process_id = process_id
        self.drivers: dict[str, RunDriver] = {}
        self.listener: socket.socket = store.wakes.listen(process_id)
        self.drain_requested = False
        self.on_change: Callable[[], None] | None = None
        self.on_progress: Callable[[], None] | None = None
        """Called between the steps of a round, which with many runs may take long: it is no hang."""
        self._clock = clock
        self._ids = ids
        self._timing = timing
        self._faults = faults
        self._adopts = adopts
        self._rescuer = Rescuer(store, clock, timing, process_id, faults)
        self._next_look = 0.0
        self._next_heartbeat = clock.monotonic() + timing.heartbeat
        self._seen: tuple[int, int] | None = None
        self._called = False
        self._others_drive = True
        """Whether a run was open at the last look that somebody else drives: then there is somebody to look after."""
        self._up = False
        self._aside: set[str] = set()
        self._silent_drivers: dict[str, _SilentDriver] = {}
        self._not_before: dict[str, float] = {}

    @property
    def rescuer(self) -> Rescuer:
        """The rescuer of this process; supervisors use it for children that they have reaped."""
        return self._rescuer

    def take(
        self,
        run: Run,
        *,
        resume: bool,
        plan: Plan | None = None,
        actor: str = "coordinator",
        trace_id: str | None = None,
    ) -> bool:
        """Become the driver of `run` as it was seen. False when somebody else was faster or it has ended."""
        if run.epoch == 0:
            # A processor and a process that have slept are slow: one of each wakes up while the run is taken and read.
            self.store.announce_work(run.run_id)
        epoch = self.store.take_run(
            run.run_id,
            driver=self.process_id,
            epoch=run.epoch,
            lease_ms=self._timing.lease_ms,
            resume=resume,
            actor=actor,
            trace_id=trace_id,
        )
        if epoch is None:
            return False
        try:
            driver = RunDriver(self.store, run.run_id, epoch, self.process_id, self._ids, self._faults, plan)
        except LostRun:
            return False  # taken away again before we had looked at it
        except AgentctlError:
            # A plan that this version cannot read: whoever can may have the run.
            self.store.leave_run(run.run_id, driver=self.process_id, epoch=epoch)
            raise
        self.drivers[run.run_id] = driver
        self._seen = None
        # Whoever has rested until now has workers to look after from here on. A rest is shorter than the lease.
        self._next_look = min(self._next_look, self._clock.monotonic() + LOOK_SECONDS)
        if not self._adopts:
            self.store.call_coordinators()
        if epoch > 1 and self.store.has_ready(run.run_id):
            # It was enqueued by an earlier driver, and whoever was called then has gone to sleep again.
            self.store.wake_workers(run.run_id)
        return True

    def tick(self) -> bool:
        """One round: heartbeat, looks, and steps of all runs. Returns whether another round is due at once."""
        now = self._clock.monotonic()
        if now >= self._next_heartbeat:
            self._beat(now)
        if self._is_called_to_a_run() or now >= self._next_look:
            self._look(now)
        self._up = self._up or self._in_flight() >= BREATHER_FROM
        if self._up:
            # Before the look: whoever finds it said has committed what the look before the next sleep will find.
            self.store.stay_up(self.process_id, True)
        version = self.store.database.data_version()
        due = self._timers_due()
        if version == self._seen and not due:
            self._call_again()
            return False
        self._seen = version
        again = False
        for run_id, driver in list(self.drivers.items()):
            try:
                for _ in range(STEPS_IN_A_ROW):
                    if self.on_progress is not None:
                        self.on_progress()
                    more = driver.step()
                    if not more:
                        break
                else:
                    again = True
            except LostRun:
                log.info("%s is driven elsewhere now", run_id, extra={"run": run_id})
                del self.drivers[run_id]
                continue
            except (ConflictError, CorruptStore, IncompatibleVersion) as error:
                # One damaged run must not take the others with it. Where it is the only one, its user is told.
                if not self._adopts:
                    raise
                self._set_aside(run_id, error)
                continue
            if driver.done:
                del self.drivers[run_id]
                if driver.compensation_due and self._adopts and not self.drain_requested:
                    self._next_look = now  # the next round takes it up
                elif driver.compensation_due:
                    self._compensate(run_id)
        if again:
            self._seen = None
        if self.on_change is not None:
            self.on_change()
        return again

    def _beat(self, now: float) -> None:
        self._next_heartbeat = now + self._timing.heartbeat
        if self._rests():
            # One waking for both: to wake up is what costs most of a rest.
            self._next_heartbeat, self._next_look = now + self._timing.until_rest_ends(now), now
        self.drain_requested |= self.store.driver_heartbeat(
            self.process_id, lease_ms=self._timing.lease_ms, rss=own_rss()
        )

    def _look(self, now: float) -> None:
        """Look for the dead, for runs that nobody drives, and for compensations that are due."""
        self._next_look = now + LOOK_SECONDS
        self._rescuer.look()
        if self._adopts and not self.drain_requested:
            self._adopt()
        if self._rests():
            self._next_look = now + self._timing.until_rest_ends(now, parts=QUIET_LOOKS if self._adopts else 1)
        if self._adopts and not self.drain_requested:
            self._compensate_next(now)  # which may set the next look to this very moment

    def _is_called_to_a_run(self) -> bool:
        """Whether somebody has called since the last round, and there is a run to adopt."""
        called, self._called = self._called, False
        if not called or not self._adopts or self.drain_requested:
            return False
        # Who drives nothing may have been called to watch over somebody else's run.
        return not self.drivers or any(run_id not in self._aside for run_id in self.store.undriven_runs())

    def _rests(self) -> bool:
        """Whether there is nothing to drive, and nobody to look after."""
        return self._rescuer.quiet and not self.drivers and not (self._adopts and self._others_drive)

    def _compensate_next(self, now: float) -> None:
        """Start one compensation that is due. A large one takes seconds to plan, and all runs wait: one in a round."""
        due = Compensations(self.store.database, self._clock).due()
        ready = [run_id for run_id in due if self._not_before.get(run_id, now) <= now]
        started = bool(ready) and self._compensate(ready[0])
        if started or len(ready) > 1:
            self._next_look = now  # what was started is a run that nobody drives

    def _compensate(self, run_id: str) -> bool:
        """Start the automatic compensation of a failed run, which is driven like any other: whether there is one now.

        What goes wrong, stays due.
        """
        from .compensation import start_what_is_due

        try:
            started = start_what_is_due(self.store, self._ids, self._faults, run_id, actor=self.process_id)
        except AgentctlError as error:
            log.error("the compensation of %s could not be started: %s", run_id, error.message)
            self._not_before[run_id] = self._clock.monotonic() + COMPENSATION_PAUSE_SECONDS
            return False
        self._not_before.pop(run_id, None)
        if started is not None:
            log.info("%s compensates %s", started, run_id)
        return started is not None

    def _set_aside(self, run_id: str, error: AgentctlError, *, note: bool = True) -> None:
        log.error("%s cannot be driven and is set aside: %s", run_id, error.message, extra={"run": run_id})
        self._aside.add(run_id)
        driver = self.drivers.pop(run_id, None)
        if driver is not None:
            self.store.leave_run(run_id, driver=self.process_id, epoch=driver.epoch)
        if note:
            # The log is not where people look first: whoever asks for the run is told as well.
            self.store.note_aside(run_id, error, by=self.process_id)

    def _timers_due(self) -> bool:
        now = self._clock.now()
        return any(timer is not None and timer <= now for timer in (d.next_timer() for d in self.drivers.values()))

    def sleep_seconds(self) -> float:
        """How long this coordinator may sleep without a call."""
        now = self._clock.monotonic()
        until = min(self._next_look, self._next_heartbeat) - now
        if self.drivers:
            until = min(until, POLL_SECONDS)
        timers = [timer for timer in (d.next_timer() for d in self.drivers.values()) if timer is not None]
        if timers:
            until = min(until, (min(timers) - self._clock.now()) / 1000)
        return max(0.0, until)

    def wait(self, extra: Sequence[int] = (), at_most: float | None = None) -> list[int]:
        """Sleep until somebody calls, a descriptor of `extra` becomes readable, or something is due.

        Returns what of `extra` is readable.
        """
        in_flight = self._in_flight()
        if in_flight >= BREATHER_FROM:
            self._clock.sleep(min(BREATHER_SECONDS, in_flight / 10_000))
        seconds = self.sleep_seconds()
        if self._up:
            self._up = False
            self.store.stay_up(self.process_id, False)
            if self.store.database.data_version() != self._seen:
                seconds = 0.0
        if any(driver.unanswered for driver in self.drivers.values()):
            seconds = min(seconds, ANSWER_SECONDS)
        if at_most is not None:
            seconds = min(seconds, at_most)
        self._rescuer.sleep = seconds
        watched: list[int | socket.socket] = [self.listener, *extra]
        readable: list[int | socket.socket] = []
        if self.store.unsynced:
            readable, _, _ = select.select(watched, [], [], min(seconds, LATE_SYNC_SECONDS))
            if not readable:
                self.store.sync_batch()
        if not readable:
            readable, _, _ = select.select(watched, [], [], seconds)
        if self.listener in readable:
            self._called = True
            wakeups.drain(self.listener)
        return [item for item in readable if isinstance(item, int)]

    def _call_again(self) -> None:
        """Nothing has happened for a moment: who was called does not come, or has more to do than was thought."""
        for run_id, driver in self.drivers.items():
            if driver.unanswered:
                driver.unanswered = False
                if self.store.has_ready(run_id):
                    self.store.wake_workers(run_id)

    def _in_flight(self) -> int:
        return sum(driver.in_flight() for driver in self.drivers.values())

    def _adopt(self) -> None:
        """Take runs that nobody drives (see `is_abandoned`)."""
        for run in self.store.overdue_runs():
            # Its wall time is over while it waits for a person: it ends without one.
            if run.run_id in self._aside:
                continue
            try:
                if self.take(run, resume=True):
                    log.info("%s has run out of time", run.run_id, extra={"run": run.run_id})
            except (ConflictError, CorruptStore, IncompatibleVersion) as error:
                self._set_aside(run.run_id, error)
        for run_id, newer in self.store.runs_of_a_newer().items():
            if run_id not in self._aside:
                self._set_aside(run_id, newer, note=False)  # its own row tells everybody
        runs = self.store.open_runs()
        for run in runs:
            if run.run_id in self.drivers or run.run_id in self._aside or not self.is_abandoned(run):
                continue
            try:
                if self.take(run, resume=False):
                    log.info("adopted %s", run.run_id, extra={"run": run.run_id})
            except (ConflictError, CorruptStore, IncompatibleVersion) as error:
                self._set_aside(run.run_id, error)
        self._others_drive = any(run.run_id not in self.drivers and run.run_id not in self._aside for run in runs)
        known = {run.run_id for run in runs}
        self._silent_drivers = {name: seen for name, seen in self._silent_drivers.items() if name in known}

    def is_abandoned(self, run: Run) -> bool:
        """Whether nobody drives a run: no driver, a dead one, or one that was silent for lease and grace.

        Silence is what this process itself has seen, from one call to the next; taking the run is safe in any case.
        """
        if run.driver is None or self._is_dead(self.store.get_process(run.driver)):
            return True
        now = self._clock.monotonic()
        seen = self._silent_drivers.get(run.run_id)
        if seen is None or (seen.epoch, seen.lease_expires_at) != (run.epoch, run.driver_lease_expires_at):
            self._silent_drivers[run.run_id] = _SilentDriver(run.epoch, run.driver_lease_expires_at, now)
            return False
        seen.seconds += self._rescuer.counted(now - seen.last_look)
        seen.last_look = now
        if seen.seconds < self._rescuer.patience:
            return False
        log.warning("the driver of %s (%s) is silent", run.run_id, run.driver, extra={"run": run.run_id})
        return True

    @staticmethod
    def _is_dead(row: ProcessRow | None) -> bool:
        if row is None or row.stopped_at is not None:
            return True
        return process_identity.liveness_of(row.identity) is Liveness.DEAD

    def close(self) -> None:
        """Give all runs back and leave."""
        for run_id, driver in self.drivers.items():
            self.store.leave_run(run_id, driver=self.process_id, epoch=driver.epoch)
        self.drivers.clear()
        if self._aside:
            self.store.forget_asides(self.process_id)
        self.listener.close()
        self.store.wakes.forget(self.process_id)
        # What was committed last becomes durable before we go.
        self.store.set_process_state(self.process_id, "stopped", durable=self.store.unsynced)
