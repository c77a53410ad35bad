"""Reading /proc: who is alive, who carries the marker of an effect, what processor time a tree used."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MARKER = b"AGENTCTL_EFFECT_ID="
TICKS = os.sysconf("SC_CLK_TCK")


def pids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            yield int(entry.name)


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on (field 3), or None when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def alive(pid: int) -> bool:
    """A zombie has ended; only its parent has not asked yet."""
    fields = stat(pid)
    return fields is not None and fields[0] not in "ZX"


def effect_processes(folder: Path) -> set[int]:
    """Living processes with an effect's marker that work in `folder`: other people's do not count."""
    found = set()
    for pid in pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            marked = any(word.startswith(MARKER) for word in environment)
            inside = marked and Path(f"/proc/{pid}/cwd").resolve().is_relative_to(folder.resolve())
        except OSError:
            continue
        if inside and alive(pid):
            found.add(pid)
    return found


def descendants(root: int) -> set[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        fields = stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    found, waiting = set(), [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children.get(pid, [])
    return found


def processor_seconds(members: set[int]) -> dict[int, float]:
    """User and system time of each process that is still there."""
    used = {}
    for pid in members:
        fields = stat(pid)
        if fields is not None:
            used[pid] = (int(fields[11]) + int(fields[12])) / TICKS
    return used


def resident_bytes(pid: int) -> int:
    fields = stat(pid)
    return 0 if fields is None else int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(pid: int) -> int:
    """The most that a process has had resident so far."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def end_tree(root: int) -> None:
    """Hard end of a process and of everything below it."""
    for pid in descendants(root):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def until(what: str, seconds: float, ready: Callable[[], bool], pause: float = 0.001) -> None:
    """Wait until `ready()` is true; a benchmark that waits for ever says so instead."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause)
