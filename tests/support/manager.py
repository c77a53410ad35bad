"""A service manager that listens: the other end of the `sd_notify` protocol, for tests."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from support.scale import time_factor


class Manager:
    """The socket of a service manager: everything that was told to it, with the pid of who told it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: list[tuple[int, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def listen(self, until: Callable[[], bool], *, seconds: float = 30.0) -> bool:
        """Hear until something is so; whether it came."""
        deadline = time.monotonic() + seconds * time_factor()
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if select.select([self._socket], [], [], min(left, 0.05))[0]:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
                pid = int.from_bytes(ancillary[0][2][:4], "little")
                self.told.extend((pid, line) for line in data.decode().splitlines())
        return True

    def drain(self) -> None:
        """Hear what has come by now."""
        self.listen(lambda: not select.select([self._socket], [], [], 0)[0])

    def heard(self, line: str) -> list[int]:
        """Who has said this line, in order."""
        return [pid for pid, told in self.told if told == line]

    def environment(self, watchdog: float | None = None) -> dict[str, str]:
        """What the manager gives to what it starts."""
        found = {"NOTIFY_SOCKET": self.address}
        if watchdog is not None:
            found["WATCHDOG_USEC"] = str(int(watchdog * 1_000_000))
        return found

    def close(self) -> None:
        self._socket.close()
