"""What a process tells the service manager that has started it: ready, alive, stopping (the `sd_notify` protocol).

Without `NOTIFY_SOCKET` nothing is told to anybody. The variables are taken out of the environment when they are read:
they belong to this very process, and a child that spoke in its name would hide its death.

A watchdog that speaks whatever happens watches nothing. So `Watchdog` speaks only while the main loop comes round, or
while it waits for something that is nobody's fault here (`excused`: the write gate, a stranger's lock, an attempt that
is within its limits).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, MutableMapping

from .clock import Clock
from .gate import start_quiet_thread

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
DRAIN_SIGNAL = signal.SIGUSR1
"""How a supervisor asks its child to drain. Not SIGTERM: a stop that was sent to the whole group at one instant has
reached the children as well, and passing it on must not count as the second one, which ends effects hard."""

PINGS_PER_LIMIT = 4
"""How many signs of life fall into the time after which the manager takes the process for dead."""


class ServiceManager:
    """The way to the manager, or to nobody. Telling never fails: the manager is a listener, not a part."""

    def __init__(self, address: str | None, watchdog_seconds: float | None = None) -> None:
        """`address`: a path, or `@` and an abstract name. `watchdog_seconds`: how long it may hear nothing."""
        self.watchdog_seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._address = b""
        self._kept: dict[str, str] = {}
        self._stopping = False
        if address is not None and address[:1] in ("/", "@"):
            self._address = os.fsencode("\0" + address[1:] if address[0] == "@" else address)
            with contextlib.suppress(OSError):
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] | None = None) -> ServiceManager:
        """The manager that has started this process; its variables leave the environment."""
        found = os.environ if environment is None else environment
        kept = {name: value for name in VARIABLES if (value := found.pop(name, None)) is not None}
        for_us = kept.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        limit = kept.get("WATCHDOG_USEC", "")
        seconds = int(limit) / 1_000_000 if for_us and limit.isdecimal() and int(limit) > 0 else None
        manager = cls(kept.get("NOTIFY_SOCKET"), seconds)
        manager._kept = kept
        return manager

    @property
    def longest_sleep(self) -> float:
        """How many seconds a main loop may sleep at a time, so that its watchdog does not take it for hung."""
        return math.inf if self.watchdog_seconds is None else self.watchdog_seconds / PINGS_PER_LIMIT

    @property
    def present(self) -> bool:
        """Whether anybody listens."""
        return self._socket is not None

    def restore_environment(self) -> None:
        """Put the variables back, for the same process with a new program (`exec`)."""
        os.environ.update(self._kept)

    def tell(self, *assignments: str) -> None:
        """Send `NAME=value` lines in one datagram. Whoever does not listen is not waited for."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(assignments).encode(), socket.MSG_DONTWAIT, self._address)

    def ready(self, status: str) -> None:
        """The start is complete."""
        self.tell("READY=1", f"STATUS={status}")

    def stopping(self, status: str) -> None:
        """It begins to end by its own will, told once. The manager waits for the death of the process from then on."""
        self.tell(*([] if self._stopping else ["STOPPING=1"]), f"STATUS={status}")
        self._stopping = True

    def status(self, text: str) -> None:
        """What a person is shown by `systemctl status`."""
        self.tell(f"STATUS={text}")

    def alive(self) -> None:
        """A sign of life."""
        self.tell("WATCHDOG=1")


class Watchdog:
    """Gives signs of life in a thread of its own, as long as the main loop deserves them."""

    def __init__(self, manager: ServiceManager, clock: Clock, excused: Callable[[], bool]) -> None:
        """Starts nothing where no watchdog was asked for. `excused` is asked by the thread, so it only looks."""
        self._manager = manager
        self._clock = clock
        self._excused = excused
        self._last = clock.monotonic()
        self._limit = manager.watchdog_seconds
        if self._limit is not None:
            start_quiet_thread(self._run, "watchdog")

    def beat(self) -> None:
        """The main loop has come round."""
        self._last = self._clock.monotonic()

    def deserves(self) -> bool:
        """Whether the main loop has come round in time, or may be late."""
        if self._limit is None or self._excused():
            self.beat()
            return True
        return self._clock.monotonic() - self._last < self._limit

    def _run(self) -> None:
        assert self._limit is not None  # else there is no thread
        pause = threading.Event()
        while True:
            if self.deserves():
                self._manager.alive()
            pause.wait(self._limit / PINGS_PER_LIMIT)
