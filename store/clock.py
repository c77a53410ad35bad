"""The only source of time and chance in agentctl. Pure protocols, and the versions for production.

Store functions take `now` (epoch milliseconds) as an argument; processes get a `Clock` and an `IdSource` handed in.
A test walks the source and refuses any other call of a clock or a random generator (architecture 8).
"""

from __future__ import annotations

import random
import time
from typing import Protocol

DAY_MS = 24 * 3600 * 1000
LAST_INSTANT = 253_402_300_799_999
"""The end of the year 9999: later than that is as good as never, and no calendar can show it."""


class Clock(Protocol):
    """Time. `now` may jump when somebody sets the clock; `monotonic` never does."""

    def now(self) -> int:
        """Wall time in milliseconds since the epoch; it is what is stored."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps and stands still while the machine is suspended."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait. Only for polling of what cannot be waited for."""
        ...


class IdSource(Protocol):
    """Names of new things, and chance."""

    def new_id(self, prefix: str) -> str:
        """`prefix` + `-` + a UUIDv7: unique, and sorted by time of creation."""
        ...

    def uniform(self) -> float:
        """A number in [0, 1), for jitter."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class SystemIds:
    """UUIDv7 and jitter from the system's random source."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._random = random.SystemRandom()

    def new_id(self, prefix: str) -> str:
        # RFC 9562, version 7: 48 bits of milliseconds, then 74 random bits around version and variant.
        value = (self._clock.now() & ((1 << 48) - 1)) << 80 | self._random.getrandbits(80)
        value = value & ~(0xF << 76) | 0x7 << 76
        value = value & ~(0x3 << 62) | 0x2 << 62
        text = f"{value:032x}"
        return f"{prefix}-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def uniform(self) -> float:
        return self._random.random()
