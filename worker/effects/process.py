"""Run one process to its end, within bounds that the process cannot stretch.

The process gets a session of its own, default signal dispositions, an empty signal mask and no descriptors
but 0, 1 and 2. The worker waits with one `poll` over a pidfd, both outputs, the input and the cancel token,
so neither a full pipe nor a pipe that a grandchild keeps open can hold it up. Every wait has a limit: the
timeout, then the grace after SIGTERM, then `KILL_WAIT_SECONDS` after SIGKILL, then `STRAY_WAIT_SECONDS` for
what the process left behind.

The exit of the direct child decides the outcome, unless it died of a stop signal that this worker got as
well. Whatever else is in its group is killed then; what escaped into other sessions is re-parented to this
worker (a child subreaper), found, killed, reaped and reported (contract row 27).

One run at a time per process: the working folder is set around the spawn, and while a run lasts every new
child of this process is taken to belong to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from select import POLLIN, POLLOUT, poll
from typing import Any, Final

from agentctl.store.errors import TaskFault
from agentctl.store.process_identity import (
    EFFECT_MARKER,
    ProcessStat,
    await_exit,
    find_marked,
    kill_all,
    read_stat,
)

from . import CancelToken

DEFAULT_GRACE_SECONDS: Final = 2.0
KILL_WAIT_SECONDS: Final = 1.0
STRAY_WAIT_SECONDS: Final = 1.5
QUIET_SECONDS: Final = 0.004
STOP_WAIT_SECONDS: Final = 0.25
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What a service manager, a shutting down machine or a terminal sends to whole groups."""
CHUNK: Final = 65536

_PR_SET_CHILD_SUBREAPER: Final = 36
_CLOSE_RANGE_CLOEXEC: Final = 4
_LAST_DESCRIPTOR: Final = 0xFFFFFFFF
_DEFAULTED_SIGNALS: Final = tuple(s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP))
_FOR_GOOD: Final = frozenset({errno.E2BIG, errno.ENAMETOOLONG})
"""What another attempt with the same words cannot change."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")

_close_range: Callable[[int, int, int], int] | None = None
"""The C library's function, once `become_subreaper` has loaded that library anyway."""
_subreaper_pid = 0
"""Pid for which `become_subreaper` holds. A fork does not inherit the property, and has another pid."""
_abandoned: set[int] = set()
"""Children that outlived their SIGKILL (stuck in the kernel); a later run reaps them."""


class Ending(StrEnum):
    """Why a run ended."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    OVERFLOW = "overflow"


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. Texts are bytes already, so the locale of a worker changes nothing. Limits in bytes and
    seconds.

    `executable` is the file to run (see `resolve`), and also the first argument that the process sees: a program
    which looks for its own files by that name (the Python of a virtual environment) would look along the PATH of
    the process, which is not the one that it was found in. `argv[0]` is the name that was asked for, for messages.
    `cwd` is an absolute folder.
    """

    executable: bytes
    argv: list[bytes]
    environment: Mapping[bytes, bytes]
    cwd: str
    timeout_seconds: float
    stdin: bytes | None = None
    stdout_limit: int = 1 << 20
    stderr_limit: int = 1 << 20
    combined_limit: int = 2 << 20
    grace_seconds: float = DEFAULT_GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Stray:
    """A process that the direct child left behind and that was ended. `escaped`: it had left the session."""

    pid: int
    name: str
    escaped: bool

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "name": self.name, "escaped": self.escaped}


@dataclass(slots=True)
class ProcessResult:
    """What a run came to.

    `exit_code` or `signal` (the number that ended it) is known once the direct child was reaped; both are
    None when it could not be ended, or when somebody else took its status. `overflow` names the stream
    (`stdout`, `stderr`, `combined`) whose limit was passed. The captured bytes never exceed their limits.
    `survivors` could not be ended.
    """

    ending: Ending
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    overflow: str | None = None
    reason: str | None = None
    strays: list[Stray] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)


def become_subreaper(enabled: bool = True) -> None:
    """Make orphaned descendants of this process its children, so that `run` finds what escapes from an
    effect.

    To be called once by a worker (and by a supervisor) after its start. Raises OSError where the kernel
    refuses.
    """
    global _subreaper_pid, _close_range
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # An ignored SIGCHLD, inherited from whoever started us, would make the kernel discard exit statuses.
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _close_range = _load_close_range(libc)
    _subreaper_pid = os.getpid() if enabled else 0


def _load_close_range(libc: Any) -> Callable[[int, int, int], int] | None:
    """`close_range` of the C library, if it and the kernel (5.11) know the flag that we need."""
    import ctypes

    try:
        function = libc.close_range
    except AttributeError:
        return None
    function.argtypes = (ctypes.c_uint, ctypes.c_uint, ctypes.c_int)
    function.restype = ctypes.c_int
    return function if function(3, _LAST_DESCRIPTOR, _CLOSE_RANGE_CLOEXEC) == 0 else None


def resolve(command: str, search_path: str | None = None) -> bytes | None:
    """The file that a command names, or None.

    A command with a slash is taken as it stands (relative to the process's own working folder). Any other
    is looked up in `search_path` (default: PATH of this worker); relative entries of it are skipped.
    """
    if "/" in command:
        return os.fsencode(command)
    if search_path is None:
        search_path = os.environ.get("PATH", os.defpath)
    for folder in search_path.split(os.pathsep):
        if folder.startswith("/"):
            candidate = os.path.join(folder, command)
            if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
                return os.fsencode(candidate)
    return None


def run(
    command: Command, token: CancelToken | None = None, monotonic: Callable[[], float] = time.monotonic
) -> ProcessResult:
    """Run `command` to its end and clean up after it.

    Raises `TaskFault` (`command_not_found` or `spawn_failed`) when it could not be started: nothing
    happened then. `monotonic` measures the timeout; what follows a timeout is measured by the real clock.
    """
    return _Run(command, token, monotonic).go()


class _Run:
    """One run: descriptors, captured output, and the steps spawn, pump, end, settle."""

    __slots__ = (
        "_chunks",
        "_command",
        "_fed",
        "_kept",
        "_monotonic",
        "_pid",
        "_pidfd",
        "_poller",
        "_since_ticks",
        "_stdin",
        "_streams",
        "_token",
        "_token_fd",
        "overflow",
    )

    def __init__(self, command: Command, token: CancelToken | None, monotonic: Callable[[], float]) -> None:
        self._command = command
        self._token = token
        self._token_fd = -1 if token is None else token.fileno()
        self._monotonic = monotonic
        self._pid = 0
        self._pidfd = -1
        self._stdin = -1
        self._fed = 0
        self._streams: dict[int, int] = {}  # open reading end -> 1 (stdout) or 2 (stderr)
        self._chunks: dict[int, list[bytes]] = {1: [], 2: []}
        self._kept = {1: 0, 2: 0}
        self._poller = poll()
        self._since_ticks = 0
        self.overflow: str | None = None

    def go(self) -> ProcessResult:
        try:
            self._spawn()
            if self._pidfd < 0:
                return ProcessResult(Ending.EXITED)
            ending = self._pump()
            reason = None
            if ending is Ending.CANCELLED and self._token is not None:
                reason = self._token.reason
            if ending is not Ending.EXITED:
                self._end()
            return self._if_stopped(self._settle(ending, reason))
        finally:
            self._close()

    # -- start ----------------------------------------------------------------------

    def _spawn(self) -> None:
        command = self._command
        theirs: list[int] = []
        try:
            for number in (1, 2):
                ours, child_end = _pipe()
                self._streams[ours] = number
                theirs.append(child_end)
            actions: list[Any] = [
                (os.POSIX_SPAWN_DUP2, theirs[0], 1),
                (os.POSIX_SPAWN_DUP2, theirs[1], 2),
            ]
            if command.stdin:
                child_end, self._stdin = _pipe()
                theirs.append(child_end)
                os.set_blocking(self._stdin, False)
                actions.append((os.POSIX_SPAWN_DUP2, child_end, 0))
            else:
                actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
            self._start(actions)
        except OSError as error:
            raise _spawn_fault(command, error) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        # From here on the process runs, so every way out passes `_close`, which ends and reaps it.
        with suppress(OSError):  # no descriptor left: it is ended at once, and how far it came is unknown
            self._pidfd = os.pidfd_open(self._pid)

    def _start(self, actions: list[Any]) -> None:
        command = self._command
        _seal_descriptors()
        here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.chdir(command.cwd)
            try:
                # Read before the start: nothing that belongs to this run can be older.
                self._since_ticks = _now_ticks()
                self._pid = os.posix_spawn(
                    command.executable,
                    [command.executable, *command.argv[1:]],
                    command.environment,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=(),
                    setsigdef=_DEFAULTED_SIGNALS,
                )
            finally:
                # A failure here must not look like a failed start; the next run sets its own folder anyway.
                with suppress(OSError):
                    os.fchdir(here)
        finally:
            os.close(here)

    # -- run ----------------------------------------------------------------------

    def _pump(self) -> Ending:
        poller = self._poller
        poller.register(self._pidfd, POLLIN)
        if self._token_fd >= 0:
            poller.register(self._token_fd, POLLIN)
        deadline = self._monotonic() + self._command.timeout_seconds
        exited = cancelled = False
        if self._stdin >= 0:
            poller.register(self._stdin, POLLOUT)
            self._feed()
        else:
            # A short process fits its output into the pipes: waiting for its end alone saves a wake-up per stream.
            exited, cancelled = self._turn(min(QUIET_SECONDS, self._command.timeout_seconds))
        for descriptor in self._streams:
            poller.register(descriptor, POLLIN)
        if exited:
            return Ending.EXITED
        if cancelled:
            return Ending.CANCELLED
        while True:
            remaining = deadline - self._monotonic()
            # Past the deadline, too, one look: if the worker itself was held up, the process may have ended
            # in time.
            exited, cancelled = self._turn(max(0.0, remaining))
            # Output beyond a limit fails the effect whether or not the exit was seen in the same turn.
            if self.overflow is not None:
                return Ending.OVERFLOW
            if exited:
                return Ending.EXITED
            if cancelled:
                return Ending.CANCELLED
            if remaining <= 0:
                return Ending.TIMED_OUT

    def _turn(self, seconds: float) -> tuple[bool, bool]:
        """Wait for something and handle it. Returns (direct child has exited, token was cancelled)."""
        exited = cancelled = False
        for descriptor, _ in self._poller.poll(seconds * 1000):
            if descriptor in self._streams:
                self._read(descriptor)
            elif descriptor == self._pidfd:
                exited = True
            elif descriptor == self._token_fd:
                cancelled = True
            elif descriptor == self._stdin:
                self._feed()
        return exited, cancelled

    def _read(self, descriptor: int) -> int:
        data = os.read(descriptor, CHUNK)
        if not data:
            self._drop(descriptor)
            return 0
        self._keep(self._streams[descriptor], data)
        return len(data)

    def _keep(self, number: int, data: bytes) -> None:
        """Capture what fits, note the first limit that was passed, and drop the rest."""
        command = self._command
        own = (command.stdout_limit if number == 1 else command.stderr_limit) - self._kept[number]
        combined = command.combined_limit - self._kept[1] - self._kept[2]
        room = min(own, combined)
        if len(data) > room:
            if self.overflow is None:
                self.overflow = "combined" if combined < own else ("stdout" if number == 1 else "stderr")
            data = data[:room]
        if data:
            self._chunks[number].append(data)
            self._kept[number] += len(data)

    def _feed(self) -> None:
        data = self._command.stdin
        assert data is not None
        try:
            while self._fed < len(data):
                self._fed += os.write(self._stdin, memoryview(data)[self._fed : self._fed + CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # it does not want (more) input; its exit code says what that means
        self._poller.unregister(self._stdin)
        os.close(self._stdin)
        self._stdin = -1

    def _drop(self, descriptor: int) -> None:
        del self._streams[descriptor]
        self._poller.unregister(descriptor)
        os.close(descriptor)

    # -- end ----------------------------------------------------------------------

    def _end(self) -> None:
        """SIGTERM to the group, grace, SIGKILL, a bounded wait. Output goes on being read, else a handler
        could block."""
        if self._token_fd >= 0:
            self._poller.unregister(self._token_fd)  # it stays readable and would turn the waits into hot loops
            self._token_fd = -1
        self._signal_group(signal.SIGTERM)
        self._signal_group(signal.SIGCONT)  # a stopped process would not see SIGTERM before it is continued
        if not self._await_child(self._command.grace_seconds):
            self._signal_group(signal.SIGKILL)
            self._await_child(KILL_WAIT_SECONDS)

    def _await_child(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            exited, _ = self._turn(remaining)
            if exited:
                return True
        return False

    def _signal_group(self, number: int) -> None:
        """Signal the process group. Only before the direct child is reaped: until then its number cannot be
        reused."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def _settle(self, ending: Ending, reason: str | None) -> ProcessResult:
        self._signal_group(signal.SIGKILL)
        for descriptor in list(self._streams):
            self._drain(descriptor)
        if ending is Ending.EXITED and self.overflow is not None:
            ending = Ending.OVERFLOW
        result = ProcessResult(ending, overflow=self.overflow, reason=reason)
        pid = self._pid
        if not self._reap(result):
            result.survivors.append(pid)
        self._sweep(pid, result)
        result.stdout = b"".join(self._chunks[1])
        result.stderr = b"".join(self._chunks[2])
        return result

    def _if_stopped(self, result: ProcessResult) -> ProcessResult:
        """Tell a process that died of the stop signal that its worker got as well from one that failed.

        A stop of the whole group at one instant is a drain that the process did not wait for: its death says nothing
        about the task. A shell hands such a death on as 128 and the number.
        """
        ended = (*STOP_SIGNALS, *(128 + number for number in STOP_SIGNALS))
        if result.ending is not Ending.EXITED or not {result.signal, result.exit_code}.intersection(ended):
            return result
        # Not every token hears of stops: those of a caller without a worker never do.
        stop_follows = getattr(self._token, "stop_follows", None)
        if stop_follows is not None and stop_follows(STOP_WAIT_SECONDS):
            self._token.cancel("drain")  # type: ignore[union-attr]  # what hears of stops can be cancelled
            result.ending, result.reason = Ending.CANCELLED, self._token.reason  # type: ignore[union-attr]
        return result

    def _drain(self, descriptor: int) -> None:
        """Read what the direct child had written: at most what a pipe holds, whatever others go on
        writing."""
        os.set_blocking(descriptor, False)
        try:
            count = self._read(descriptor)
            left = fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ) if count else 0
            while count and (left := left - count) > 0:
                count = self._read(descriptor)
        except BlockingIOError:
            pass

    def _reap(self, result: ProcessResult | None) -> bool:
        """Take the exit status; False when the process has not ended."""
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            self._pid = 0  # somebody else took it: gone, status unknown
            return True
        if status is None:
            _abandoned.add(self._pid)
            self._pid = 0
            return False
        self._pid = 0
        if result is not None:
            if status.si_code == os.CLD_EXITED:
                result.exit_code = status.si_status
            else:
                result.signal = status.si_status
        return True

    def _sweep(self, session: int, result: ProcessResult) -> None:
        """Find and end what the direct child left behind."""
        if _subreaper_pid == os.getpid():
            _end_orphans(session, self._since_ticks, result)
            return
        marker = self._command.environment.get(EFFECT_MARKER.encode())
        if marker is not None:
            _end_marked(marker.decode("ascii", "replace"), session, result)

    def _close(self) -> None:
        """Release everything; end the process first if an exception brought us here."""
        if pid := self._pid:
            self._signal_group(signal.SIGKILL)
            if self._pidfd < 0:
                os.waitpid(pid, 0)
                self._pid = 0
            else:
                await_exit((self._pidfd,), time.monotonic() + KILL_WAIT_SECONDS)
                self._reap(None)
            self._sweep(pid, ProcessResult(Ending.CANCELLED))
        for descriptor in (*self._streams, self._stdin, self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._streams.clear()
        self._stdin = self._pidfd = -1


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are above 2, so that the child's own 0, 1 and 2 never collide with them."""
    ends = os.pipe()
    if min(ends) > 2:
        return ends
    raised = []
    try:
        for end in ends:
            raised.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
    except OSError:
        for end in raised:
            os.close(end)
        raise
    finally:
        for end in ends:
            os.close(end)
    return raised[0], raised[1]


def _seal_descriptors() -> None:
    """Mark every descriptor above 2 close-on-exec; those inherited from whoever started this worker are not
    by nature."""
    if _close_range is not None and _close_range(3, _LAST_DESCRIPTOR, _CLOSE_RANGE_CLOEXEC) == 0:
        return
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            try:
                if os.get_inheritable(descriptor):
                    os.set_inheritable(descriptor, False)
            except OSError:
                continue  # the listing's own descriptor, closed by now


def _now_ticks() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) * _TICKS_PER_SECOND // 1_000_000_000


def _spawn_fault(command: Command, error: OSError) -> TaskFault:
    """Why a process could not be started (contract row 22): nothing was dispatched, and a retry policy may try it again
    (contract 4.2)."""
    name = os.fsdecode(command.argv[0])
    number = error.errno or 0
    details = {"command": name, "errno": errno.errorcode.get(number, str(number))}
    path = os.path.join(command.cwd, os.fsdecode(command.executable))
    if number == errno.ENOENT and os.path.isdir(command.cwd) and not os.path.lexists(path):
        return TaskFault("command_not_found", f"there is no program {name!r}", retryable=True, details=details)
    hint = ""
    if number in (errno.ENOENT, errno.EACCES) and not os.access(command.cwd, os.X_OK):
        # Said of the folder: nothing of the program was looked at.
        hint = f" ({_why_no_folder(command.cwd, number)})"
    elif number == errno.ENOENT:
        hint = " (its interpreter is missing)"
    return TaskFault(
        "spawn_failed",
        f"{name!r} could not be started: {os.strerror(number)}{hint}",
        retryable=number not in _FOR_GOOD,
        details=details,
    )


def _why_no_folder(folder: str, number: int) -> str:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            hidden = hidden_by_unit(folder, table)
    except OSError:
        hidden = None
    if hidden is not None:
        return hidden
    return "its working folder is gone" if number == errno.ENOENT else "it may not enter its working folder"


def hidden_by_unit(folder: str, mounts: Iterable[str]) -> str | None:
    """What a unit of systemd has mounted in the place of a folder; `mounts` are the lines of `mountinfo`."""
    place, source = "", ""
    for line in mounts:
        root, point = line.split(" ", 5)[3:5]
        # Of two that are mounted in the same place the later one counts.
        if len(point) >= len(place) and (folder == point or folder.startswith(point.rstrip("/") + "/")):
            place, source = point, root
    if "/systemd-private-" in source:
        return f"its unit has a {place} of its own: `PrivateTmp=`, see systemd.md"
    if source.endswith("/systemd/inaccessible/dir"):
        return f"its unit hides {place}: `ProtectHome=` or `InaccessiblePaths=`, see systemd.md"
    return None


# -- what a process leaves behind ------------------------------------------------------------------


def _has_children() -> bool:
    """One system call that answers for the usual case: this process has no child at all, so there are no
    strays."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end_orphans(session: int, since_ticks: int, result: ProcessResult) -> None:
    """Kill and reap the children that were re-parented to this process, until none is left or the time is
    over.

    Killing one re-parents its own children to us, so each round goes one generation deeper. Children that
    are older than the run are this worker's own and stay.
    """
    deadline = time.monotonic() + STRAY_WAIT_SECONDS
    reported: set[int] = set()
    while _has_children():
        living: list[ProcessStat] = []
        reaped = False
        for stat in _children_since(since_ticks):
            if stat.dead and _reap_orphan(stat, session, result, reported):
                reaped = True
            elif not stat.dead:
                living.append(stat)
        for stat in living:
            _report(stat, session, result, reported)
        if not living and not reaped:
            return
        if time.monotonic() >= deadline:
            result.survivors.extend(stat.pid for stat in living)
            _abandoned.update(stat.pid for stat in living)
            return
        kill_all({stat.pid: stat.start_ticks for stat in living}, deadline)


def _reap_orphan(stat: ProcessStat, session: int, result: ProcessResult, reported: set[int]) -> bool:
    try:
        status = os.waitid(os.P_PID, stat.pid, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return False
    if status is None:
        return False
    if stat.pid in _abandoned:
        _abandoned.discard(stat.pid)
    elif status.si_code != os.CLD_EXITED and status.si_status == signal.SIGKILL:
        _report(stat, session, result, reported)  # it was alive until our signal to the group
    return True


def _report(stat: ProcessStat, session: int, result: ProcessResult, reported: set[int]) -> None:
    if stat.pid not in reported and stat.pid not in _abandoned:
        reported.add(stat.pid)
        result.strays.append(Stray(stat.pid, stat.name, stat.session != session))


def _children_since(since_ticks: int) -> list[ProcessStat]:
    """Children of this process that belong to the run: not older than it, or left from an earlier one."""
    found = _select(_listed_children(), since_ticks)
    # The kernel's list may miss entries while children end; the slower look decides that there is none.
    return found or _select([int(n) for n in os.listdir("/proc") if n.isdigit()], since_ticks)


def _listed_children() -> list[int]:
    pids: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", "rb") as listing:
                pids.extend(map(int, listing.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


def _select(pids: Sequence[int], since_ticks: int) -> list[ProcessStat]:
    me, own_session = os.getpid(), os.getsid(0)
    found = []
    for pid in pids:
        try:
            stat = read_stat(pid)
        except PermissionError:
            continue
        # What a run starts lives in sessions of its own, so our own children are known even within one
        # clock tick.
        if stat is None or stat.parent != me or stat.session == own_session:
            continue
        if stat.start_ticks >= since_ticks or (pid in _abandoned and stat.dead):
            found.append(stat)
    return found


def _end_marked(effect_id: str, session: int, result: ProcessResult) -> None:
    """The same without a subreaper: by the marker in the environment. Their new parent reaps them."""
    deadline = time.monotonic() + STRAY_WAIT_SECONDS
    reported: set[int] = set()
    while pids := find_marked((effect_id,)):
        stats = [stat for pid in pids if (stat := read_stat(pid)) is not None and not stat.dead]
        for stat in stats:
            _report(stat, session, result, reported)
        kill_all({stat.pid: stat.start_ticks for stat in stats}, deadline)
        if time.monotonic() >= deadline:
            result.survivors.extend(stat.pid for stat in stats)
            return
