"""The second thread of a worker: while an attempt runs it renews the lease and watches for reasons to stop it.

It wakes every 100 ms, or at once when somebody calls: reads the cancel flag of the run, renews the lease in time, sees
the end of the supervisor. It never decides more than "cancel this token". An attempt that is still there long after its
own limit means that the worker hangs: then the thread ends the process, and a rescuer takes over.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from pathlib import Path

from agentctl.store import wakeups
from agentctl.store.clock import Clock
from agentctl.store.database import StoreGone
from agentctl.store.engine import Store, own_rss
from agentctl.store.errors import AgentctlError, NotFoundError
from agentctl.store.gate import start_quiet_thread
from agentctl.store.records import Claim
from agentctl.store.timing import Timing

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
HANG_EXIT_CODE = 75


class Token:
    """The cancel token of the attempt that runs: a descriptor that becomes readable, and the reason."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reason: str | None = None
        self.steps = 0
        """How often what runs has told that it moves (see `moves`)."""

    def fileno(self) -> int:
        return self._fd

    @property
    def cancelled(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        return self._reason

    def cancel(self, reason: str) -> None:
        """End what runs. The first reason stays; it is safe to call from a signal handler."""
        if self._reason is None:
            self._reason = reason
            os.eventfd_write(self._fd, 1)

    def moves(self) -> None:
        """What runs beyond the limit of its attempt tells that it does not hang: it stores large artifacts, say."""
        self.steps += 1

    def announce_stop(self) -> None:
        """This worker was told to stop by a signal. What runs may finish; safe to call from a signal handler."""
        os.eventfd_write(self._stop_fd, 1)

    def stop_follows(self, seconds: float) -> bool:
        """Whether such a signal has come, or comes within `seconds`.

        A stop that goes to every process at one instant reaches a command and its worker in any order.
        """
        poller = select.poll()
        poller.register(self._stop_fd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def reset(self) -> None:
        """Make ready for the next attempt."""
        if self._reason is not None:
            # In this order: a signal handler that cancels in between is repeated by the worker (see `_execute`).
            os.eventfd_read(self._fd)
            self._reason = None


class Watch:
    """The thread and what it shares with the worker: the claim that runs, its token, the counters."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        timing: Timing,
        process_id: str,
        listener: socket.socket,
        parent_sentinel: int | None,
    ) -> None:
        self.token = Token()
        self.drain = False
        self.hard_at: float | None = None
        """When a drain ends what runs (monotonic seconds); a worker of a pool is told by its supervisor instead."""
        self.forced = False
        """Whether that limit, or a second stop signal, has ended something."""
        self.done = 0
        self.failed = 0
        self._path = path.absolute()  # the main thread changes its folder for a moment to start a command in another
        self._clock = clock
        self._timing = timing
        self._process_id = process_id
        self._listener = listener
        self._parent = parent_sentinel
        self._current: tuple[Claim, float] | None = None
        self._changing = threading.Lock()
        """Held by whoever puts another attempt into `_current`, or cancels the one that is there."""
        self._active = threading.Event()
        self._parked = threading.Event()
        self._parked.set()
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._told_drain = False
        self._moved = (0, 0.0)
        """The last step that was seen, and when (monotonic seconds)."""
        self._thread = start_quiet_thread(self._run, "watch")

    def begin(self, claim: Claim) -> None:
        """An attempt starts to run."""
        with self._changing:
            self.token.reset()
            self._current = (claim, self._clock.monotonic())
        if not self._active.is_set():
            self._parked.clear()
            self._active.set()

    def end(self) -> None:
        """The attempt does not run any more; the thread stays awake for the next one."""
        self._current = None

    def within_limits(self) -> bool:
        """Whether an attempt runs: then this thread ends the process if it hangs."""
        return self._current is not None

    def park(self) -> None:
        """The worker becomes idle: from now on the wake-up socket belongs to the main thread."""
        self._current = None
        if self._active.is_set():
            self._active.clear()
            os.eventfd_write(self._nudge, 1)
            self._parked.wait()

    def _run(self) -> None:
        store: Store | None = None
        next_beat = 0.0
        while True:
            if not self._active.is_set():
                self._parked.set()
                self._active.wait()
                next_beat = self._clock.monotonic() + self._timing.heartbeat
            watched: list[int | socket.socket] = [self._listener, self._nudge]
            if self._parent is not None and not self.drain:
                watched.append(self._parent)
            readable, _, _ = select.select(watched, [], [], POLL_SECONDS)
            if self._nudge in readable:
                os.eventfd_read(self._nudge)
                continue
            if self._listener in readable:
                wakeups.drain(self._listener)
            if self._parent is not None and self._parent in readable:
                self.drain = True
            current = self._current
            if current is None:
                continue
            try:
                if store is None:
                    store = self._open()
                next_beat = self._look(store, current, next_beat)
            except StoreGone as error:
                # What runs may finish, though its result goes nowhere; then the heartbeat of the worker ends it.
                if not self.drain:
                    log.error("%s; this worker ends", error.message)
                self.drain = True
            except AgentctlError as error:
                log.warning("the watch could not look: %s", error.message)

    def _open(self) -> Store:
        try:
            return Store(self._path, self._clock, cache_kib=256)
        except NotFoundError as error:
            raise StoreGone(error.message, remedy=error.remedy) from error

    def _look(self, store: Store, current: tuple[Claim, float], next_beat: float) -> float:
        claim, started = current
        now = self._clock.monotonic()
        if self.drain and not self._told_drain:
            self._told_drain = True
            store.set_process_state(self._process_id, "draining")
        if self.hard_at is not None and now >= self.hard_at:
            self.forced = True
            self._cancel(current, "drain")
        if self.token.steps != self._moved[0]:
            self._moved = (self.token.steps, now)
        if now > max(started + claim.timeout_ms / 1000, self._moved[1]) + self._timing.grace:
            log.error("attempt %d of %s hangs beyond its limit; this worker ends", claim.number, claim.task_id)
            os._exit(HANG_EXIT_CODE)
        cancelled, _, deadline = store.stop_signals(claim.run_id)
        if cancelled:
            self._cancel(current, "cancel_requested")
        elif deadline is not None and self._clock.now() > deadline:
            self._cancel(current, "deadline")
        if now >= next_beat:
            held, drain = store.renew(
                self._process_id,
                claim.fence,
                lease_ms=self._timing.lease_ms,
                rss=own_rss(),
                done=self.done,
                failed=self.failed,
            )
            self.drain |= drain
            if not held:
                self._cancel(current, "lease_lost")
            return self._clock.monotonic() + self._timing.heartbeat
        return next_beat

    def _cancel(self, current: tuple[Claim, float], reason: str) -> None:
        # The attempt may have ended while we looked; the next one, maybe of another run, must not be hit.
        with self._changing:
            if self._current is current:
                self.token.cancel(reason)
