"""Two kinds of hints between the processes of a database, in a file that all have open anyway.

Which attempts workers prepare for, so that no two prepare for the same one: only a claim decides. A slot holds an
attempt and the moment at which it was announced (monotonic, so one machine's processes agree on it).

Which drivers are up and will look into the database once more before they sleep, so that nobody needs to call them. A
slot holds a number made of the driver's id and the moment until which this can be believed.

What cannot be read or written, or is nonsense, costs somebody a preparation or a call in vain and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from hashlib import blake2b

from .clock import Clock

SLOTS = 64
"""Places on the board. Two workers whose pids share one overwrite each other, which is harmless."""
FRESH_MS = 1000
"""Who announced something longer ago is held up, or gone: others may prepare for it."""
UP_MS = 1000
"""Who was up longer ago, and has not said so again, may be stopped: then a call does no harm."""
_ENTRY = struct.Struct("<qq")
_MOMENTS = struct.Struct("<" + "8xq" * SLOTS)
"""The second halves of the entries of workers: to look at these first, and then at few others, takes half the time."""


class Board:
    """The board of one database, in the file of the line in front of its gate."""

    def __init__(self, descriptor: int, clock: Clock, slot: int | None = None) -> None:
        """`descriptor` is open for reading and writing, and stays the caller's."""
        self._descriptor = descriptor
        self._clock = clock
        self._slot = (os.getpid() if slot is None else slot) % SLOTS

    def announce(self, attempt_id: int) -> None:
        """Tell the others what this process prepares for; it replaces what it has told before."""
        entry = _ENTRY.pack(attempt_id, self._now())
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, entry, self._slot * _ENTRY.size)

    def others(self) -> set[int]:
        """What others prepare for at this moment."""
        try:
            text = os.pread(self._descriptor, _MOMENTS.size, 0).ljust(_MOMENTS.size, b"\0")
        except OSError:
            return set()
        now = self._now()
        stale = now - FRESH_MS
        # The clock begins anew with each boot, and the file outlives it: what was told later than now is old as well.
        return {
            _ENTRY.unpack_from(text, slot * _ENTRY.size)[0]
            for slot, told in enumerate(_MOMENTS.unpack(text))
            if stale < told <= now and slot != self._slot
        }

    def stay_up(self, process_id: str) -> None:
        """Tell that this driver will look into the database before it sleeps. What was committed before `lie_down` was
        called is seen by a look after it; so that look is owed."""
        self._tell(process_id, self._now() + UP_MS)

    def lie_down(self, process_id: str) -> None:
        """Take that back: from here on whoever has something for this driver calls it."""
        self._tell(process_id, 0)

    def is_up(self, process_id: str) -> bool:
        """Whether a driver need not be called of what is committed already."""
        number, place = _number_and_place(process_id)
        try:
            text = os.pread(self._descriptor, _ENTRY.size, place)
        except OSError:
            return False
        if len(text) < _ENTRY.size:
            return False
        named, until = _ENTRY.unpack(text)
        now = self._now()
        # Later than anybody can have meant: the file has outlived the boot of its writer.
        return bool(named == number and now <= until <= now + UP_MS)

    def _tell(self, process_id: str, until: int) -> None:
        number, place = _number_and_place(process_id)
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _ENTRY.pack(number, until), place)

    def _now(self) -> int:
        return int(self._clock.monotonic() * 1000)


@functools.lru_cache(maxsize=32)
def _number_and_place(process_id: str) -> tuple[int, int]:
    """What stands for a driver on the board, and where. Two on one place overwrite each other: they are called."""
    number = int.from_bytes(blake2b(process_id.encode(), digest_size=7).digest(), "big")
    return number, (SLOTS + number % SLOTS) * _ENTRY.size
