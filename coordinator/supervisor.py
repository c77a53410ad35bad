"""Keeps worker processes alive: spawns, reaps, replaces with back-off, drains (architecture 3).

A dead child is seen at once, by its sentinel; what it held is rescued in the same moment, and another takes its place.
A supervisor decides nothing about runs. The entry of a worker is handed in, since this room does not know the other.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from agentctl.store.clock import Clock, IdSource
from agentctl.store.engine import Store
from agentctl.store.errors import EnvironmentFault
from agentctl.store.service_manager import DRAIN_SIGNAL

from .rescue import Rescuer

log = logging.getLogger(__name__)

START_LIMIT_SECONDS = 30.0
"""How long a child may take to register before it is killed and replaced."""

MAX_START_FAILURES = 5
"""Starts in a row that may fail before the supervisor gives up."""

HARD_END_SECONDS = 5.0
"""How long workers have to end their effects hard before they are killed."""

TRACKER_END_SECONDS = 2
"""How long the end of the library's own helper is waited for."""

LISTEN_SECONDS = 0.5
"""How often the heartbeats of children are looked at; as often as it wakes up while the pool rests."""

BACKOFF_SECONDS = (0.0, 0.2, 0.5, 1.0, 2.0)

Entry = Callable[[str, str], tuple[Callable[..., None], tuple[object, ...]]]
"""(process id, name) -> (target, arguments) of a child."""


@dataclass(slots=True)
class _Child:
    process: BaseProcess
    process_id: str
    slot: int
    started: float
    ready: bool = False
    heartbeat: int = 0
    silent: float = 0.0


@dataclass(slots=True)
class _Slot:
    name: str
    entry: Entry
    prefix: str
    last: bool
    child: _Child | None = None
    failures: int = 0
    not_before: float = 0.0
    retired: bool = False


class Supervisor:
    """A fixed number of slots, each with at most one live child."""

    def __init__(self, store: Store, clock: Clock, ids: IdSource, rescuer: Rescuer) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._rescuer = rescuer
        self._context = multiprocessing.get_context("spawn")
        self._slots: list[_Slot] = []
        self._draining = False
        self._hard_at: float | None = None
        self._killed = False
        self._last_asked = False
        self._last_listen: float | None = None
        self.forced = False

    def add(self, name: str, entry: Entry, *, prefix: str = "worker", last: bool = False) -> None:
        """A slot that is filled at the next tick. `last`: in a drain its child is asked to end after all the others."""
        self._slots.append(_Slot(name, entry, prefix, last))

    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a child ends."""
        return [slot.child.process.sentinel for slot in self._slots if slot.child is not None]

    def ready(self) -> bool:
        """Whether every slot has a child that has registered."""
        return all(slot.retired or (slot.child is not None and slot.child.ready) for slot in self._slots)

    def children(self) -> int:
        """Children that have not been reaped."""
        return sum(1 for slot in self._slots if slot.child is not None)

    def tick(self) -> None:
        """Reap, rescue, replace. Raises `EnvironmentFault` when children cannot be started, after having tried."""
        for slot in self._slots:
            child = slot.child
            if child is None:
                continue
            if child.process.exitcode is not None:
                self._reap(slot, child)
            elif not child.ready:
                self._see_ready(slot, child)
        self._reap_orphans()
        if self._draining:
            self._press_on()
            return
        self._end_silent()
        now = self._clock.monotonic()
        for index, slot in enumerate(self._slots):
            if slot.child is None and not slot.retired and now >= slot.not_before:
                self._spawn(index, slot)

    def next_due(self) -> float | None:
        """Seconds until a tick has something to do by itself, or None."""
        now = self._clock.monotonic()
        due = [s.not_before - now for s in self._slots if s.child is None and not s.retired and not self._draining]
        if any(s.child is not None and not s.child.ready for s in self._slots):
            due.append(0.05)
        if self._draining:
            due.append(0.05)
        return max(0.0, min(due)) if due else None

    # -- the end ---------------------------------------------------------------------------------------------------

    def drain(self, limit_seconds: float) -> None:
        """Ask all children to finish what runs and take nothing new; after `limit_seconds` they are ended hard."""
        if self._draining:
            self.hurry()
            return
        self._draining = True
        self._hard_at = self._clock.monotonic() + limit_seconds
        self._signal_workers(DRAIN_SIGNAL)
        self._end_the_last()

    def hurry(self) -> None:
        """A second signal: running effects are ended now."""
        self._draining = True
        if self._killed or self.forced:
            return
        self.forced = True
        self._hard_at = self._clock.monotonic() + HARD_END_SECONDS
        # Not SIGTERM again: two of them that are pending together count as one.
        self._signal_workers(signal.SIGQUIT)

    def _end_the_last(self) -> None:
        """Who commits what the workers finish (the coordinator) goes after them, so that nothing is left lying."""
        if self._last_asked or any(slot.child is not None for slot in self._slots if not slot.last):
            return
        self._last_asked = True
        now = self._clock.monotonic()
        self._hard_at = max(self._hard_at or now, now + HARD_END_SECONDS)
        self._signal([slot for slot in self._slots if slot.last], DRAIN_SIGNAL)

    def _press_on(self) -> None:
        self._end_the_last()
        if self._hard_at is None or self._clock.monotonic() < self._hard_at or self.children() == 0:
            return
        if not self.forced:
            self.hurry()
        elif not self._killed:
            self._killed = True
            self._signal(self._slots, signal.SIGKILL)

    def _signal_workers(self, number: int) -> None:
        self._signal([slot for slot in self._slots if not slot.last], number)

    @staticmethod
    def _signal(slots: Iterable[_Slot], number: int) -> None:
        for slot in slots:
            if slot.child is not None and slot.child.process.pid is not None and slot.child.process.exitcode is None:
                os.kill(slot.child.process.pid, number)

    # -- children --------------------------------------------------------------------------------------------------

    def _spawn(self, index: int, slot: _Slot) -> None:
        process_id = self._ids.new_id(slot.prefix)
        target, arguments = slot.entry(process_id, slot.name)
        process = self._context.Process(target=target, args=arguments, name=slot.name, daemon=False)
        try:
            with _without_main_module(), _interrupts_held():
                process.start()
        except OSError as error:
            self._start_failed(slot, f"cannot start a process: {error.strerror}")
            return
        slot.child = _Child(process, process_id, index, self._clock.monotonic())

    def _see_ready(self, slot: _Slot, child: _Child) -> None:
        if self._store.get_process(child.process_id) is not None:
            child.ready = True
            slot.failures = 0
        elif self._clock.monotonic() - child.started > START_LIMIT_SECONDS:
            log.warning("%s does not become ready and is replaced", slot.name)
            child.process.kill()
            child.started = self._clock.monotonic()

    def _end_silent(self) -> None:
        """Kill children without a heartbeat for lease and grace: stopped, or stuck. Others take their place."""
        now = self._clock.monotonic()
        elapsed = 0.0 if self._last_listen is None else now - self._last_listen
        if self._last_listen is not None and elapsed < LISTEN_SECONDS:
            return
        self._last_listen = now
        rows = {row.process_id: row for row in self._store.live_processes()}
        for slot in self._slots:
            child = slot.child
            row = None if child is None else rows.get(child.process_id)
            if child is None or row is None:
                continue
            if row.heartbeat_at != child.heartbeat:
                child.heartbeat, child.silent = row.heartbeat_at, 0.0
                continue
            child.silent += self._rescuer.counted(elapsed)
            if child.silent >= self._rescuer.patience:
                log.warning("%s (pid %d) has been silent for %.0f s and is replaced", slot.name, row.pid, child.silent)
                child.silent = 0.0
                child.process.kill()

    def _reap(self, slot: _Slot, child: _Child) -> None:
        code = child.process.exitcode
        child.process.join()
        child.process.close()
        slot.child = None
        row = self._store.get_process(child.process_id)
        if row is None:
            if not self._draining:
                self._start_failed(slot, f"{slot.name} ended with {_how(code)} before it was ready")
            return
        slot.failures = 0
        if row.stopped_at is None:
            self._rescuer.settle([row], f"ended with {_how(code)}")
        if row.drain_requested_at is not None:
            slot.retired = True
            return
        if not self._draining:
            lived = self._clock.monotonic() - child.started
            # A child that lived for a while is replaced at once; one that dies again and again waits a little.
            slot.not_before = self._clock.monotonic() + (0.0 if lived > 5.0 else 0.05)

    def _start_failed(self, slot: _Slot, why: str) -> None:
        slot.failures += 1
        if slot.failures < MAX_START_FAILURES:
            log.error("%s (start %d of %d)", why, slot.failures, MAX_START_FAILURES)
        else:
            raise EnvironmentFault(
                f"{slot.name} cannot be started: {why}",
                remedy="see the messages above; check memory, permissions and the database's folder",
            )
        slot.not_before = self._clock.monotonic() + BACKOFF_SECONDS[min(slot.failures, len(BACKOFF_SECONDS) - 1)]

    def _reap_orphans(self) -> None:
        """As a subreaper this process inherits what dead workers leave behind; zombies of it are reaped here."""
        own = {slot.child.process.pid for slot in self._slots if slot.child is not None}
        for _ in range(64):
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in own:
                return
            try:
                os.waitpid(found.si_pid, os.WNOHANG)
            except ChildProcessError:
                return

    def all_retired(self) -> bool:
        """Whether every slot was drained by request."""
        return bool(self._slots) and all(slot.retired for slot in self._slots)


def end_resource_tracker() -> None:
    """End the helper that the library starts beside spawned children, and wait for it.

    By itself it ends a moment after us, and a service manager would find, kill and log it as something left behind.
    To be called when no child is left: a child holds its pipe open.
    """
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    pipe, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if pipe is None or pid is None:
        return
    setattr(tracker, "_fd", None)  # noqa: B010 - names of the library's own, which no type knows
    setattr(tracker, "_pid", None)  # noqa: B010
    with contextlib.suppress(OSError):
        os.close(pipe)
        process = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(process, select.POLLIN)
            poller.poll(TRACKER_END_SECONDS * 1000)
        finally:
            os.close(process)
        os.waitpid(pid, os.WNOHANG)


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Let a spawned child not import the script that started us: a worker needs its entry and nothing else."""
    main = sys.modules["__main__"]
    names_of_main: dict[str, object] = vars(main)
    hidden: dict[str, object] = {
        name: names_of_main.pop(name) for name in ("__file__", "__spec__") if name in names_of_main
    }
    names_of_main["__spec__"] = None
    try:
        yield
    finally:
        del names_of_main["__spec__"]
        names_of_main.update(hidden)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let a spawned child begin with SIGINT blocked; it lets it in when it has its handlers.

    Until it has a session of its own, Ctrl-C on the terminal reaches it as well: it would die in the middle of an
    import and print a traceback of it.
    """
    resource_tracker.ensure_running()  # its start unblocks SIGINT, so it must not come in between
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def names(count: int, base: str | None) -> Iterable[str]:
    """Names of a pool's workers: `w1`, `w2`, …, or `BASE-1`, …; a pool of one with a name bears just that name."""
    if count == 1 and base:
        return [base]
    return [f"{base}-{i}" if base else f"w{i}" for i in range(1, count + 1)]
