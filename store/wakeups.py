"""Wake-ups between processes: datagrams whose loss costs a little time and nothing else (architecture 1, 6).

Every working process owns a socket `wake/<process id>` in the database's folder. A call says nothing: whoever is woken
looks into the database, which alone knows what is to be done. An announcement names a run of which there will be work
in a moment: whoever gets one may prepare for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from .filesystem import give_to_owner

_MAX_PATH = 100
_CALL = b"w"
_ANNOUNCED = b"a"
_LONGEST = 256


class WakeFolder:
    """The folder of sockets. Its path may be longer than a socket address; then it is reached through a descriptor."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".wake")
        self._database = database
        self._prefix = f"{self.path}/"
        self._room = _MAX_PATH - len(os.fsencode(self._prefix))
        self._fd: int | None = None
        self._sender: socket.socket | None = None

    def _address(self, process_id: str) -> str:
        if len(process_id) <= self._room:
            return self._prefix + process_id
        if self._fd is None:
            self._fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{process_id}"

    def listen(self, process_id: str) -> socket.socket:
        """The socket of this process: non-blocking, close-on-exec, readable when somebody calls."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            give_to_owner(self.path, self._database)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        listener.bind(self._address(process_id))
        return listener

    def wake(self, process_id: str) -> None:
        """Call a process. Nobody there, or too many calls already: both are fine."""
        self._send(process_id, _CALL)

    def announce(self, process_id: str, run_id: str) -> None:
        """Tell a process that rests of which run there will be work in a moment."""
        self._send(process_id, _ANNOUNCED + run_id.encode())

    def _send(self, process_id: str, message: bytes) -> None:
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        with contextlib.suppress(OSError):
            self._sender.sendto(message, self._address(process_id))

    def forget(self, process_id: str) -> None:
        """Remove the socket of a process that has ended."""
        with contextlib.suppress(OSError):
            os.unlink(self._address(process_id))

    def close(self) -> None:
        """Close what this object has opened."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def drain(listener: socket.socket) -> str | None:
    """Swallow all calls that have come in. Returns the run that was announced, if nothing came after it."""
    announced = None
    with contextlib.suppress(BlockingIOError):
        while True:
            message = listener.recv(_LONGEST)
            announced = message[1:].decode(errors="replace") if message.startswith(_ANNOUNCED) else None
    return announced
