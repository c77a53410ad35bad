"""A worker process: claim, execute, finish with the next claim, sleep when there is nothing (architecture 3, 4).

It holds one attempt at a time. The first SIGTERM, a drain request in the database, or the end of its supervisor lets it
finish what runs and take nothing new; a second SIGTERM, or SIGQUIT, ends the running effect hard.

A worker of a pool lives in a session of its own, so a terminal's Ctrl-C and Ctrl-Z do not reach it. Its supervisor asks
it to drain with a signal of its own (`DRAIN_SIGNAL`), which counts once however often it comes. A worker alone
(`worker_alone`, one unit of a service manager) behaves the same; it keeps its drain limit itself, tells the manager how
it does, and renews its own process where a supervisor would replace it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from agentctl.store import log_lines, process_identity, wakeups
from agentctl.store.clock import Clock, IdSource, SystemClock, SystemIds
from agentctl.store.database import SyncFailed
from agentctl.store.engine import Store, own_rss
from agentctl.store.errors import AgentctlError, LeaseLost
from agentctl.store.faults import Faults
from agentctl.store.gate import yield_gently
from agentctl.store.long_lived import rarely_collect
from agentctl.store.records import (
    Candidate,
    Claim,
    EffectEnd,
    EffectRequest,
    Following,
    ProcessRow,
    StartedEffect,
)
from agentctl.store.recycling import NO_LIMITS, Limits
from agentctl.store.service_manager import DRAIN_SIGNAL, ServiceManager, Watchdog
from agentctl.store.timing import Timing

from .attempt import AttemptRunner, Ending, Prepared
from .effects.process import STOP_SIGNALS, become_subreaper
from .redaction import LogFilter
from .watch import Watch

log = logging.getLogger(__name__)

LINGER_SECONDS = 0.003
"""How long a worker that has found nothing waits before it says that it is idle: a driver's next batch comes sooner."""

EXIT_DRAINED = 0
EXIT_FORCED = 3
EXIT_FAILED = 5


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker has to know: paths and numbers, nothing that cannot cross a spawn."""

    path: Path
    process_id: str
    name: str
    parent_process_id: str | None
    only_run: str | None
    unit: str | None
    version: str
    lease: float
    heartbeat: float
    log_level: int = logging.WARNING
    limits: Limits = NO_LIMITS
    drain_seconds: float | None = None
    """How long running commands may go on after the first SIGTERM; None: a supervisor keeps the time."""


def worker_main(config: WorkerConfig) -> None:
    """Entry of a worker process; never returns normally. Exit 0 after a drain, 5 when it cannot work."""
    import multiprocessing

    log_lines.configure(config.log_level, config.name)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogFilter())
    parent = multiprocessing.parent_process()
    clock = SystemClock()
    try:
        worker = Worker(config, clock, Faults.from_environment(), None if parent is None else parent.sentinel)
        rarely_collect()
        worker.run()
    except AgentctlError as error:
        log.error("%s", error.message)
        os._exit(EXIT_FAILED)
    except OSError as error:
        log.error("%s: %s", error.filename or config.path, error.strerror)
        os._exit(EXIT_FAILED)
    os._exit(EXIT_DRAINED)


def worker_alone(config: WorkerConfig, manager: ServiceManager) -> tuple[int, bool]:
    """Work in this very process until a stop. Returns (0 drained or 3 ended hard, whether it wants to be renewed).

    Raises what opening the database raises, and `SyncFailed`.
    """
    clock = SystemClock()
    worker = Worker(config, clock, Faults.from_environment(), None, manager)
    rarely_collect()
    worker.run()
    # From here on a stop waits: whoever is renewed takes it along through the `exec` (see `Worker.__init__`).
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if not worker.wants_renewal:
        manager.stopping("drained")  # a stop that came after it had begun to make room for a fresh one is told as well
    return (EXIT_FORCED if worker.forced else EXIT_DRAINED), worker.wants_renewal


class Worker:
    """One worker and its loop."""

    def __init__(
        self,
        config: WorkerConfig,
        clock: Clock,
        faults: Faults,
        parent_sentinel: int | None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._faults = faults
        self._timing = Timing(config.lease, config.heartbeat)
        self._parent = parent_sentinel
        self._signals = 0
        self._fresh = True
        self._called = True
        """Whether somebody has asked for one more; who only looks by himself does not join where hands are enough."""
        self._lingered = False
        self._announced: str | None = None
        """The run of which somebody has said that there will be work in a moment."""
        self._self_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        if config.parent_process_id is not None and os.getsid(0) != os.getpid():
            os.setsid()
        become_subreaper()
        yield_gently()
        self._store = Store(config.path, clock)
        now = clock.now()
        self._store.register(
            ProcessRow(
                config.process_id,
                "worker",
                config.name,
                process_identity.current().as_text(),
                os.getpid(),
                config.parent_process_id,
                config.only_run,
                config.unit,
                "starting",
                config.version,
                now,
                now,
                None,
                None,
                0,
                0,
                own_rss(),
            )
        )
        self._listener = self._store.wakes.listen(config.process_id)
        self._watch = Watch(config.path, clock, self._timing, config.process_id, self._listener, parent_sentinel)
        self._runner = AttemptRunner(
            self._store, clock, self._timing, faults, self._watch.token, lambda: self._watch.drain
        )
        self._ids: IdSource = SystemIds(clock)
        self._ahead: Prepared | None = None
        # Finish, claim and start in one transaction leave no moment between them; who wants to stop there gets two.
        self._looks_ahead = not faults.waits_at("after_finish", "after_claim", "before_effect_start")
        self._next_beat = clock.monotonic() + self._timing.heartbeat
        self._began = clock.monotonic()
        self._limits = config.limits.drawn(self._ids.uniform())
        self._manager = manager if manager is not None else ServiceManager(None)
        self._watchdog = Watchdog(self._manager, clock, self._excused)
        self._renewal: str | None = None
        signal.signal(DRAIN_SIGNAL, self._on_drain)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # The end of a login session sends it right behind SIGTERM; it is the same stop, not a second one.
            signal.signal(signal.SIGHUP, self._on_hangup)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGQUIT, self._on_signal)
        # A stop that came while this process was renewed has waited for these handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 2 if number == signal.SIGQUIT else 1
        self._watch.token.announce_stop()
        self._on_drain(number, frame)
        if self._signals > 1:
            self._watch.forced |= self._watch.within_limits()
            self._watch.token.cancel("drain")

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._watch.token.announce_stop()
        self._on_drain(number, frame)

    def _on_drain(self, number: int, frame: FrameType | None) -> None:
        self._watch.drain = True
        if self._config.drain_seconds is not None and self._watch.hard_at is None:
            self._watch.hard_at = self._clock.monotonic() + self._config.drain_seconds
        with contextlib.suppress(BlockingIOError):
            os.write(self._self_pipe[1], b"s")

    def _excused(self) -> bool:
        return self._watch.within_limits() or self._store.database.waits

    @property
    def forced(self) -> bool:
        """Whether an effect was ended by the stop of this worker, instead of being awaited."""
        return self._watch.forced

    @property
    def wants_renewal(self) -> bool:
        """Whether it ended because it had done enough, and nobody has asked it to end."""
        return self._renewal is not None and not self._watch.drain

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until asked to drain."""
        following: Following | None = None
        idle = False
        self._manager.ready("idle")
        while not self._draining(holds=following is not None):
            self._watchdog.beat()
            if following is None:
                following = self._claim(idle)
                idle = idle and following is None
            if following is None:
                idle = self._sleep(idle)
                continue
            if following.answer is None:
                self._faults.reach("after_claim")
            following = self._execute(following)
        if self.wants_renewal:
            # The process goes on with a new program. A manager that heard of a stop would wait for its death.
            self._manager.status(f"{self._renewal}; it starts anew")
        else:
            self._manager.stopping("draining")
        if self._renewal is not None:
            log.info("%s: %s; it ends and makes room for a fresh one", self._config.name, self._renewal)
        if following is not None:
            self._give_back(following)
        self._watch.park()
        self._beat()  # the counts of what was done since the last heartbeat
        self._store.set_process_state(self._config.process_id, "stopped", durable=True)
        self._listener.close()
        self._store.wakes.forget(self._config.process_id)
        self._store.close()

    def _draining(self, *, holds: bool = False) -> bool:
        """Whether to take nothing new. Limits end nobody who holds a claim, so what was claimed is also executed."""
        if self._watch.drain:
            return True
        if self._renewal is None and self._limits.any and not holds:
            age = self._clock.monotonic() - self._began
            self._renewal = self._limits.reached(self._watch.done + self._watch.failed, age, own_rss)
        return self._renewal is not None

    def _claim(self, idle: bool) -> Following | None:
        """Claim something, after a look without the gate: there has to be something, and it is prepared for."""
        self._ahead = None
        if idle and not self._called and self._store.enough_hands():
            return None
        candidate = self._store.peek(self._config.only_run) if self._looks_ahead else None
        if candidate is not None:
            self._ahead = self._runner.prepare(candidate)
        elif not self._store.has_ready(self._config.only_run):
            return None
        following = self._store.claim(
            self._config.process_id,
            only_run=self._config.only_run,
            lease_ms=self._timing.lease_ms,
            awake=idle or self._fresh,
            ahead=self._prepared(),
        )
        if following is not None:
            self._fresh = False
            self._lingered = False
        return following

    def _prepared(self) -> tuple[Candidate, EffectRequest] | None:
        return None if self._ahead is None else (self._ahead.candidate, self._ahead.request)

    def _execute(self, current: Following) -> Following | None:
        """Run one delivery and finish it; returns what follows if there is something."""
        claim = current.claim
        log_lines.bind(
            run=claim.run_id,
            task=claim.task_id,
            attempt=claim.number,
            delivery=claim.fence.delivery,
            trace=claim.trace_id,
        )
        self._watch.begin(claim)
        if self._signals > 1:
            self._watch.token.cancel("drain")
        try:
            ending = self._runner.run(claim, self._ahead, current.answer)
            self._watch.end()
            self._faults.reach("before_finish")
            following = self._finish(claim, ending)
        except LeaseLost as error:
            self._watch.end()
            log.warning("%s of %s: %s; its result is dropped", claim.task_id, claim.run_id, error.message)
            return None
        except SyncFailed as error:
            # What has been promised cannot be kept; a rescuer settles what we hold.
            log.critical("%s", error.message)
            os._exit(EXIT_FAILED)
        if following is None or following.answer is None:
            # With the next effect started in the same transaction, the next point is `after_effect_start`.
            self._faults.reach("after_finish")
        return following

    def _finish(self, claim: Claim, ending: Ending) -> Following | None:
        self._ahead = None
        if ending.held:
            return None
        if ending.attempt is None:
            if ending.pause is not None:
                log.warning("%s pauses: %s", claim.run_id, ending.pause)
            self._store.release(claim, effect=ending.effect, reason=ending.release or "released", pause=ending.pause)
            if ending.pause is None:
                self._store.wake_workers(claim.run_id)  # all of them: who rests looks seldom, and one may be stopped
            return None
        if ending.attempt.outcome == "succeeded":
            self._watch.done += 1
        else:
            self._watch.failed += 1
            log.info("%s %s: %s", claim.task_id, ending.attempt.outcome, ending.attempt.error_json)
        next_claim = not self._draining()
        if next_claim and self._looks_ahead:
            self._look_ahead()
        following, driver = self._store.finish(
            claim,
            ending.attempt,
            effect=ending.effect,
            next_claim=next_claim,
            only_run=self._config.only_run,
            lease_ms=self._timing.lease_ms,
            ahead=self._prepared(),
        )
        if driver is not None:
            self._store.wake_unless_up(driver)
        return following

    def _look_ahead(self) -> None:
        """Prepare for what will probably be the next attempt, so that finish, claim and start are one transaction."""
        candidate = self._store.peek(self._config.only_run)
        self._ahead = None if candidate is None else self._runner.prepare(candidate)

    def _give_back(self, following: Following) -> None:
        effect = None
        if self._ahead is not None and isinstance(following.answer, StartedEffect):
            effect = EffectEnd(self._ahead.request.effect_id, "requested", dispatch=following.answer.dispatch)
        try:
            self._store.release(following.claim, effect=effect, reason="drain")
        except LeaseLost:
            return
        self._store.wake_workers(following.claim.run_id)

    # -- being idle ------------------------------------------------------------------------------------------------

    def _sleep(self, idle: bool) -> bool:
        """Sleep until called: for an instant first, then, idle from now on, for longer. Returns whether we are idle.

        Between the last task of one batch and the first of the next lies only an instant, and to be idle takes two
        transactions: one that says so, so that somebody calls, and one that takes it back.
        """
        if not idle and not self._lingered:
            self._lingered = True
            self._rest(LINGER_SECONDS)
            return False
        if not idle:
            log_lines.unbind()
            self._watch.park()
            # What was finished last becomes durable before we rest.
            self._store.set_process_state(self._config.process_id, "idle", durable=True)
            self._called = True
            if self._store.has_ready(self._config.only_run):
                return True
        now = self._clock.monotonic()
        if now >= self._next_beat:
            self._beat()
            self._next_beat = now + self._timing.until_rest_ends(now, chance=self._ids.uniform())
        elif self._called:
            # Whoever called had no work to give, or called while we worked: perhaps a person wants it to end.
            row = self._store.get_process(self._config.process_id)
            self._watch.drain |= row is not None and row.drains
        if self._watch.drain:
            return True
        # A look of its own with each heartbeat: the net under lost calls.
        self._called = self._rest(min(max(0.0, self._next_beat - now), self._manager.longest_sleep))
        if self._announced is not None:
            self._get_to_know(self._announced)
        return True

    def _get_to_know(self, run_id: str) -> None:
        """Read the settings of a run before there is work of it: to get up takes as long as to do the work."""
        self._announced = None
        with contextlib.suppress(AgentctlError):  # whatever is wrong is told where something depends on it
            self._runner.settings(run_id)

    def _rest(self, timeout: float) -> bool:
        """Sleep until a call, a signal or the end of the supervisor, or for `timeout` seconds: whether a call came."""
        watched: list[int | socket.socket] = [self._listener, self._self_pipe[0]]
        if self._parent is not None:
            watched.append(self._parent)
        readable, _, _ = select.select(watched, [], [], timeout)
        if self._listener in readable:
            self._announced = wakeups.drain(self._listener)
        if self._parent is not None and self._parent in readable:
            log.warning("the supervisor is gone; draining")
            self._watch.drain = True
        return self._listener in readable

    def _beat(self) -> None:
        _, drain = self._store.renew(
            self._config.process_id,
            None,
            lease_ms=self._timing.lease_ms,
            rss=own_rss(),
            done=self._watch.done,
            failed=self._watch.failed,
        )
        if drain:
            self._watch.drain = True
        self._next_beat = self._clock.monotonic() + self._timing.heartbeat
        self._manager.status(f"{self._watch.done} done, {self._watch.failed} failed")
