"""The write gate: one queue in the kernel in front of SQLite's write lock (architecture 6).

SQLite's own waiting is a lottery that starves processes for seconds. So every writer first takes an exclusive `flock`
on a file of its own, where the kernel keeps a queue, and only then begins its transaction. In front of the gate is a
line, another file with another `flock`: whoever has it is next. Only that one watches the gate, for a moment without
sleeping, since a sleeper needs nearly as long to wake up as most transactions take; all others sleep until they are
next. While the gate is held the thread takes no stop or termination signal, since a stopped holder would stop
everybody. While it waits, in the line or behind a program that knows no gate, nothing is written yet, so signals that
end a program are let in (`let_in`); those that stop it never are, since the wait may be over at any instant. SIGSTOP
cannot be masked: a waiter that has waited for `STUCK_SECONDS` looks up the holder and, if it is one of this database's
own processes, kills it; SQLite then rolls its transaction back.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .errors import EnvironmentFault

log = logging.getLogger(__name__)

STUCK_SECONDS = 5.0
WATCH_TRIES = 300
"""How often the next in line tries the gate before it sleeps: half a millisecond, and most transactions take less."""
URGENT_TIMES = 3
"""How many times as long somebody urgent watches the gate, before he stands in line like everybody."""
WAL_WRITE_LOCK = 120
"""The byte of SQLite's shared memory that a writer locks in WAL mode."""
RESERVED_BYTE = 0x40000001
"""The byte of the database file that a program locks that wants it for itself."""
MASKED = frozenset(
    {
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
    }
)

LINE_ENDING = "-line"
"""What the name of the line's file adds to that of the gate."""
_TRY = fcntl.LOCK_EX | fcntl.LOCK_NB

_MASKED_NUMBERS = frozenset(int(number) for number in MASKED)

_ENDING = frozenset(int(n) for n in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP))
"""What a wait lets in, where the thread did not block it before."""

_held_for_an_answer: frozenset[int] = frozenset()


def hold_for_an_answer(numbers: Iterable[int]) -> None:
    """State which signals this process blocks only so that it can tell what it has written.

    A wait lets them in, too: what waits has not written yet. An empty statement takes it back.
    """
    global _held_for_an_answer
    _held_for_an_answer = frozenset(int(number) for number in numbers)


def start_quiet_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that never takes a signal, so that signals meet only the main thread, which masks them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    return thread


class _Watch:
    """One thread per process that looks after waiters of any gate in it.

    It starts with the first wait, ticks while somebody waits or has just waited, and sleeps until the next one does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waits: dict[int, tuple[Gate, int]] = {}
        self._begun = 0
        self._sleeps = False
        self._called = threading.Event()

    def begin(self, gate: Gate) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = start_quiet_thread(self._run, "gate-watch")
        self._waits[id(gate)] = (gate, 0)
        self._begun += 1
        # After the entry: the thread says that it sleeps, and then looks for entries.
        if self._sleeps:
            self._called.set()

    def end(self, gate: Gate) -> None:
        self._waits.pop(id(gate), None)

    def _run(self) -> None:
        pause = threading.Event()
        seen = -1
        while True:
            if seen == self._begun:
                self._sleep()
            seen = self._begun
            pause.wait(1.0)
            for key, (gate, ticks) in list(self._waits.items()):
                # Ticks instead of a clock: a suspended machine does not tick, so it blames nobody.
                if key not in self._waits:
                    continue
                self._waits[key] = (gate, ticks + 1)
                if ticks + 1 >= STUCK_SECONDS:
                    try:
                        gate.examine_holder()
                    except Exception:
                        log.exception("cannot examine the holder of %s", gate.path)
                if key in self._waits and gate.waiting is False:
                    self._waits.pop(key, None)

    def _sleep(self) -> None:
        """Until the next wait begins; not at all while one lasts."""
        self._sleeps = True
        if not self._waits:
            self._called.wait()
        self._sleeps = False
        self._called.clear()


_watch = _Watch()


class Gate:
    """The gate of one connection. Not shared between threads; each connection has its own descriptor."""

    def __init__(self, path: Path, end_stuck: Callable[[int], str | None]) -> None:
        """`end_stuck(pid)` is asked when `pid` holds the gate for too long: it kills the process if it is one of
        this database's and returns None, or returns why it did not."""
        self.path = path
        self.waiting = False
        # With one processor the holder cannot go on while somebody watches it.
        self._tries = WATCH_TRIES if len(os.sched_getaffinity(0)) > 1 else 1
        self._end_stuck = end_stuck
        self._told: int | None = None
        self.descriptor = _open(path)
        # Its content is free for hints between processes (see `board`).
        try:
            self.line = _open(path.with_name(path.name + LINE_ENDING))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._old_mask: set[int] | None = None

    def acquire(self, *, urgent: bool = False) -> None:
        """Wait in the line and take the gate. Signals of the calling thread are held back until `release`.

        Who is `urgent` tries past the line for a while: a driver, for whom in the end all that stand in it wait.
        """
        # The plain function: the wrapper in `signal` turns every number into an enum, twice per transaction.
        old = _signal.pthread_sigmask(signal.SIG_BLOCK, _MASKED_NUMBERS)
        try:
            if not urgent or not self._seize(self._tries * URGENT_TIMES):
                try:
                    fcntl.flock(self.line, _TRY)
                except BlockingIOError:
                    self._wait(self.line, old)
                if not self._seize(self._tries):
                    self._wait(self.descriptor, old)
                fcntl.flock(self.line, fcntl.LOCK_UN)
        except BaseException:
            # A handler may have raised when the locks were ours already.
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            fcntl.flock(self.line, fcntl.LOCK_UN)
            _signal.pthread_sigmask(signal.SIG_SETMASK, old)
            raise
        self._old_mask = old

    def _seize(self, tries: int) -> bool:
        """Take the gate if it is free, or becomes free while we watch."""
        for _ in range(tries):
            try:
                fcntl.flock(self.descriptor, _TRY)
            except BlockingIOError:
                continue
            return True
        return False

    def _wait(self, descriptor: int, old: set[int]) -> None:
        """Sleep until a lock is ours, looked after by the watch."""
        self.waiting = True
        _watch.begin(self)
        try:
            with _let_in(old):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        finally:
            self.waiting = False
            _watch.end(self)

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """Within a held gate: a moment of waiting, in which signals that end a program are delivered.

        Their handlers may raise out of it; the gate is still held then.
        """
        with _let_in(self._old_mask or set()):
            yield

    def release(self) -> None:
        """Leave the gate; held-back signals are delivered now."""
        old, self._old_mask = self._old_mask, None
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        if old is not None:
            _signal.pthread_sigmask(signal.SIG_SETMASK, old)

    def close(self) -> None:
        os.close(self.descriptor)
        os.close(self.line)

    def holder(self) -> int | None:
        """The pid that holds the gate, or else is next in line, as far as this pid namespace can see it.

        Who is next takes a free gate at once, unless it is stopped.
        """
        return flock_holder(os.fstat(self.descriptor)) or flock_holder(os.fstat(self.line))

    def examine_holder(self) -> None:
        """Called by the watch when a wait has become too long."""
        try:
            pid = self.holder()
        except OSError:
            return
        if pid is None or pid == os.getpid():
            return
        refusal = self._end_stuck(pid)
        if refusal is None:
            log.warning("process %d held the write gate without end and was killed", pid)
        elif self._told != pid:
            self._told = pid
            log.warning("waiting for process %d, which holds the write gate %s: %s", pid, self.path, refusal)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot open {path}: {error.strerror}", remedy="check the permissions of the database's folder"
        ) from error


@contextlib.contextmanager
def _let_in(old: set[int]) -> Iterator[None]:
    waiting = (set(old) - _held_for_an_answer) | (_MASKED_NUMBERS - _ENDING)
    try:
        _signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        yield
    finally:
        # This call runs the handlers of whatever has come until now, so none is left to run after it.
        _signal.pthread_sigmask(signal.SIG_BLOCK, _MASKED_NUMBERS)


def flock_holder(status: os.stat_result) -> int | None:
    """The pid that holds an exclusive `flock` on this file, as far as this pid namespace can see it.

    Raises OSError where the kernel does not tell.
    """
    return next((pid for kind, pid, _, _, _ in _locks(status) if kind == "FLOCK" and pid > 0), None)


def write_lock_holder(path: Path) -> int | None:
    """The pid that holds SQLite's write lock on the database at `path`, as far as this pid namespace can see it.

    Only the kernel's table is read: whoever opens and closes the file itself gives up the locks of its own process.
    """
    for place, byte in ((f"{path}-shm", WAL_WRITE_LOCK), (str(path), RESERVED_BYTE)):
        for pid, how, first, last in record_locks(place):
            if how == "WRITE" and first <= byte <= last and pid > 0:
                return pid
    return None


def record_locks(path: str) -> list[tuple[int, str, int, int]]:
    """(pid, READ or WRITE, first byte, last byte) of every record lock on a file; none where nobody can tell."""
    try:
        return [lock[1:] for lock in _locks(os.stat(path)) if lock[0] in ("POSIX", "OFDLCK")]
    except OSError:
        return []


def _locks(status: os.stat_result) -> Iterator[tuple[str, int, str, int, int]]:
    """Kind, pid, READ or WRITE, first and last byte of each lock on a file that the kernel tells of. Raises OSError."""
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with open("/proc/locks", encoding="ascii", errors="replace") as table:
        for line in table:
            fields = line.split()
            # "1: POSIX  ADVISORY  WRITE 4711 08:01:1234 120 120"; a waiter has an arrow in front and holds nothing.
            if len(fields) == 8 and fields[5] == wanted:
                last = 1 << 62 if fields[7] == "EOF" else int(fields[7])
                yield fields[1], int(fields[4]), fields[3], int(fields[6]), last


def yield_gently() -> None:
    """Ask the kernel not to let this process preempt others when it wakes up (`SCHED_BATCH`; its effects may).

    Who leaves the gate wakes the next in the queue. If that one preempts at once, which is the default, it takes the
    processor from somebody who may be about to enter or inside; measured with 8 workers on 2 processors, that made
    the gate be held a third longer on average. Where the kernel does not know this, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
