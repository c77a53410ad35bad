"""Who a process is, whether it still lives, and how to end it without hitting another one.

A pid alone proves nothing: it is reused. An identity is boot id + inode of the pid namespace + pid + start
ticks since boot (field 22 of `/proc/PID/stat`, which no clock correction changes). Where there is no
`/proc`, psutil answers.

This module also finds and ends the processes of an effect by the marker `AGENTCTL_EFFECT_ID=<id>` in their
environment: after a worker's death its supervisor, or whoever rescues its attempts, calls `kill_marked`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from select import POLLIN, poll
from typing import Final

from .errors import CorruptStore

EFFECT_MARKER: Final = "AGENTCTL_EFFECT_ID"
"""Name of the environment variable that every effect process carries."""

HOLDER_MARKER: Final = "AGENTCTL_WORKER_ID"
"""Name of the variable that says which worker started an effect process. An effect id outlives its worker (the next
delivery dispatches under the same id), so who clears up after a dead worker goes by this one: a second rescuer that
comes late must not hit what a new holder has started."""

_HAS_PROC: Final = os.access("/proc/self/stat", os.R_OK)
_TEXT_SEPARATOR: Final = " "
_PF_KTHREAD: Final = 0x00200000
_EXEC_SECONDS: Final = 0.5
_SETTLE_SECONDS: Final = 0.02


class Liveness(StrEnum):
    """What can be proven about a process. `unknown` never counts as dead."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot. `pid` is the number within `pid_namespace` (inode; 0 where there is no such
    thing)."""

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int

    def as_text(self) -> str:
        """The stored form; `from_text` reads it."""
        return _TEXT_SEPARATOR.join((self.boot_id, str(self.pid_namespace), str(self.pid), str(self.start_ticks)))

    @classmethod
    def from_text(cls, text: str) -> ProcessIdentity:
        """Read the stored form. Raises `CorruptStore` for anything else."""
        parts = text.split(_TEXT_SEPARATOR)
        numbers = parts[1:]
        if len(parts) != 4 or not parts[0] or not all(n.isascii() and n.isdigit() for n in numbers):
            raise CorruptStore(f"not a process identity: {text!r}")
        return cls(parts[0], int(parts[1]), int(parts[2]), int(parts[3]))


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What `/proc/PID/stat` says: `threads` counts living threads, `start_ticks` are clock ticks since
    boot."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int
    start_ticks: int
    in_exec: bool = False
    """Its environment has not been set up yet: it is in the middle of an `exec`."""

    @property
    def dead(self) -> bool:
        """A zombie is dead, unless only its first thread has ended and others still run."""
        return self.state in "ZXx" and self.threads <= 1

    @property
    def stopped(self) -> bool:
        """It does nothing until somebody lets it go on: Ctrl-Z, SIGSTOP, or a debugger."""
        return self.state in "Tt"

    def age_seconds(self) -> float:
        """How long ago it was started, suspended time included."""
        ticks = os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_ticks / ticks)


def parse_stat(text: str) -> ProcessStat:
    """Parse `/proc/PID/stat`. The name may hold spaces, newlines and parentheses: the last `)` ends it."""
    open_at = text.index("(")
    close_at = text.rindex(")")
    rest = text[close_at + 2 :].split()
    kernel_thread = bool(int(rest[6]) & _PF_KTHREAD)
    return ProcessStat(
        pid=int(text[:open_at]),
        name=text[open_at + 1 : close_at],
        state=rest[0],
        parent=int(rest[1]),
        group=int(rest[2]),
        session=int(rest[3]),
        threads=int(rest[17]),
        start_ticks=int(rest[19]),
        in_exec=not kernel_thread and len(rest) > 48 and rest[48] == "0",  # end of the environment
    )


def read_stat(pid: int) -> ProcessStat | None:
    """The stat line of a process, or None when there is none. Raises PermissionError when the kernel hides
    it."""
    data = _read_proc(f"/proc/{pid}/stat")
    return parse_stat(data.decode("utf-8", "replace")) if data else None


def _read_proc(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return None
    try:
        parts: list[bytes] = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)


@cache
def boot_id() -> str:
    """Identity of the current boot of this machine."""
    data = _read_proc("/proc/sys/kernel/random/boot_id")
    if data is not None:
        return data.decode("ascii").strip()
    import psutil

    return f"boot-{int(psutil.boot_time())}"


@cache
def _namespace_of(caller: int) -> int:
    """Pid namespace of the process `caller`, which is always this one; the argument keeps forks apart."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def current() -> ProcessIdentity:
    """The identity of this process."""
    identity = of(os.getpid())
    assert identity is not None  # a process that asks is alive
    return identity


def of(pid: int) -> ProcessIdentity | None:
    """The identity of a process by its pid in this pid namespace, or None when nothing lives there."""
    ticks = _start_ticks(pid)
    if ticks is None:
        return None
    return ProcessIdentity(boot_id(), _namespace_of(os.getpid()), pid, ticks)


def _start_ticks(pid: int) -> int | None:
    if _HAS_PROC:
        stat = read_stat(pid)
        return None if stat is None or stat.dead else stat.start_ticks
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return int(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None


def liveness(identity: ProcessIdentity) -> Liveness:
    """Whether that very process lives.

    Another boot: dead. Another pid namespace: unknown. No such pid, other start ticks, or a zombie: dead. A
    process that the kernel hides from us (`hidepid`, another user): unknown.
    """
    if identity.boot_id != boot_id():
        return Liveness.DEAD
    if identity.pid_namespace != _namespace_of(os.getpid()):
        return Liveness.UNKNOWN
    try:
        ticks = _start_ticks(identity.pid)
    except PermissionError:
        return Liveness.UNKNOWN
    if ticks is None:
        return Liveness.UNKNOWN if _hidden(identity.pid) else Liveness.DEAD
    return Liveness.ALIVE if ticks == identity.start_ticks else Liveness.DEAD


def liveness_of(text: str) -> Liveness:
    """The same for the stored form. A text that is none, in a damaged row, proves nothing: unknown."""
    try:
        return liveness(ProcessIdentity.from_text(text))
    except CorruptStore:
        return Liveness.UNKNOWN


def is_stopped(text: str) -> bool:
    """Whether the process of a stored identity lives and does nothing until somebody lets it go on: Ctrl-Z, SIGSTOP, or
    a debugger. False where that cannot be seen."""
    if liveness_of(text) is not Liveness.ALIVE or not _HAS_PROC:
        return False
    try:
        stat = read_stat(ProcessIdentity.from_text(text).pid)
    except PermissionError:
        return False
    return stat is not None and stat.stopped


def _hidden(pid: int) -> bool:
    """Whether a process exists at `pid` that `/proc` does not show to this user."""
    if not _HAS_PROC or not _exists(pid):
        return False
    try:
        return read_stat(pid) is None and _exists(pid)
    except PermissionError:
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill(identity: ProcessIdentity, sig: int = signal.SIGKILL) -> bool:
    """Send `sig` to that very process; True when it was sent.

    Race-free: the process is held by a descriptor first and identified afterwards, so a pid that was
    recycled in between is never hit. False when it is not provably alive, or may not be signalled by this
    user.
    """
    if not hasattr(os, "pidfd_open"):
        return liveness(identity) is Liveness.ALIVE and _send(identity.pid, sig)
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        if liveness(identity) is not Liveness.ALIVE:
            return False
        signal.pidfd_send_signal(descriptor, sig)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)


def _send(pid: int, sig: int) -> bool:
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


# --- processes of an effect -----------------------------------------------------------------------


def drop_markers() -> None:
    """Forget the effect that started this process: its children are none of that effect's."""
    os.environ.pop(EFFECT_MARKER, None)
    os.environ.pop(HOLDER_MARKER, None)


def marker_ids(environ: bytes, marker: str = EFFECT_MARKER) -> list[str]:
    """All values of the marker that an environment block (entries ended by zero bytes) carries."""
    prefix = marker.encode() + b"="
    return [
        entry[len(prefix) :].decode("utf-8", "replace") for entry in environ.split(b"\0") if entry.startswith(prefix)
    ]


def _visible_ids(pid: int, marker: str) -> list[str] | None:
    """The same for a process; empty when it has none, None when this user may not read its environment."""
    try:
        environ = _read_proc(f"/proc/{pid}/environ")
    except OSError:
        return None
    return marker_ids(environ, marker) if environ and marker.encode() in environ else []


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if _HAS_PROC else []


def find_marked(ids: Iterable[str], marker: str = EFFECT_MARKER) -> list[int]:
    """The living processes that belong to one of the effects (with `HOLDER_MARKER`: workers), this one never included.

    A process belongs to an effect when it carries the marker, when its session has a member that does
    (effects run in sessions of their own), or when it descends from such a process: so one that cleared its
    environment is found, too.
    """
    return sorted(_find(frozenset(ids), marker))


def _find(wanted: frozenset[str], marker: str) -> dict[int, int]:
    """Pid and start ticks of what `find_marked` finds."""
    if not wanted:
        return {}
    stats: dict[int, ProcessStat] = {}
    marked: set[int] = set()
    for pid in _all_pids():
        try:
            stat = read_stat(pid)
        except PermissionError:
            continue
        if stat is None or stat.dead:
            continue
        stats[pid] = stat
        if not wanted.isdisjoint(_settled_ids(pid, stat, marker)):
            marked.add(pid)
    found = _with_relatives(stats, marked) if marked else marked
    return {pid: stats[pid].start_ticks for pid in found if pid != os.getpid()}


def _settled_ids(pid: int, stat: ProcessStat, marker: str) -> list[str]:
    """The markers of a process; one that is just executing its program is given a moment to show them."""
    deadline = time.monotonic() + _EXEC_SECONDS
    while (found := _visible_ids(pid, marker)) == [] and stat.in_exec and time.monotonic() < deadline:
        time.sleep(0.001)
        later = read_stat(pid)
        if later is None or later.dead or later.start_ticks != stat.start_ticks:
            return []
        stat = later
    return found or []


def _with_relatives(stats: Mapping[int, ProcessStat], marked: set[int]) -> set[int]:
    sessions = {stats[pid].session for pid in marked} - {os.getsid(0), 0}
    found = marked | {pid for pid, stat in stats.items() if stat.session in sessions}
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    # This process may itself run inside an effect; what it started on its own account is not the effect's
    # to end here.
    pending = list(found - {os.getpid()})
    while pending:
        for child in children.get(pending.pop(), ()):
            if child not in found and child != os.getpid():
                found.add(child)
                pending.append(child)
    return found


def kill_marked(ids: Iterable[str], *, wait_seconds: float, marker: str = EFFECT_MARKER) -> list[int]:
    """End (SIGKILL) every process of this machine that belongs to one of the effects (workers), and wait for their end.

    Returns the pids that were signalled, in order. Looks again until a look finds nothing, so processes
    that were started meanwhile end as well. Returns after `wait_seconds` at the latest (plus one look at
    `/proc`); what `find_marked` still shows then cannot be ended (stuck in the kernel, or of another user).
    """
    wanted = frozenset(ids)
    deadline = time.monotonic() + wait_seconds
    killed: set[int] = set()
    empty_looks = 0
    while wanted and empty_looks < 2:
        found = _find(wanted, marker)
        signalled = kill_all(found, deadline)
        killed.update(signalled)
        if time.monotonic() >= deadline:
            break
        # A process that its worker was starting at the moment of death shows no marker before its `exec`,
        # so an empty look counts only when a second one, a moment later, is empty as well.
        empty_looks = 0 if found else empty_looks + 1
        if not signalled and empty_looks < 2:
            time.sleep(_SETTLE_SECONDS)
    return sorted(killed)


def kill_all(processes: Mapping[int, int], deadline: float) -> list[int]:
    """SIGKILL processes given as pid -> start ticks and wait for their end until `deadline` (monotonic
    seconds).

    Returns the pids that were signalled. A pid that was recycled since the ticks were read is left alone.
    """
    signalled: list[int] = []
    handles: list[int] = []
    try:
        for pid, start_ticks in processes.items():
            handle = _hold(pid, start_ticks)
            if handle is None:
                continue
            handles.append(handle)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                os.close(handles.pop())
                continue
            signalled.append(pid)
        await_exit(handles, deadline)
    finally:
        for handle in handles:
            os.close(handle)
    return signalled


def _hold(pid: int, start_ticks: int) -> int | None:
    """A pidfd of exactly that process, or None: it is taken first and identified afterwards."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        stat = read_stat(pid)
    except PermissionError:
        stat = None
    if stat is None or stat.dead or stat.start_ticks != start_ticks:
        os.close(handle)
        return None
    return handle


def await_exit(handles: Iterable[int], deadline: float) -> bool:
    """Wait until each pidfd of `handles` reports its process's end; False when `deadline` (monotonic) comes
    first."""
    poller = poll()
    waiting = set(handles)
    for handle in waiting:
        poller.register(handle, POLLIN)
    while waiting:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        for handle, _ in poller.poll(remaining * 1000):
            poller.unregister(handle)
            waiting.discard(handle)
    return True
