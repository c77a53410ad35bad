"""Which attempts workers prepare for, so that no two prepare for the same one. Hints: only a claim decides.

A slot holds an attempt and the moment at which it was announced (monotonic, so one machine's processes agree on it).
What cannot be read or written, or is nonsense, costs somebody a preparation in vain and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import struct

from .clock import Clock

SLOTS = 64
"""Places on the board. Two workers whose pids share one overwrite each other, which is harmless."""
FRESH_MS = 1000
"""Who announced something longer ago is held up, or gone: others may prepare for it."""
_ENTRY = struct.Struct("<qq")


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
            text = os.pread(self._descriptor, SLOTS * _ENTRY.size, 0)
        except OSError:
            return set()
        now = self._now()
        numbers = struct.unpack_from(f"<{len(text) // _ENTRY.size * 2}q", text)
        own = self._slot * 2 + 1
        # The clock begins anew with each boot, and the file outlives it: what was told later than now is old as well.
        return {numbers[i - 1] for i in range(1, len(numbers), 2) if now - FRESH_MS < numbers[i] <= now and i != own}

    def _now(self) -> int:
        return int(self._clock.monotonic() * 1000)
