"""Time and chance in the hands of a test."""

from __future__ import annotations

import time
from collections.abc import Callable


class ManualClock:
    """A clock that stands still until somebody moves it. `sleep` moves it, so no test waits for real."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._now = now
        self._monotonic = 1_000.0
        self.slept: list[float] = []

    def now(self) -> int:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass, on both clocks."""
        self._now += round(seconds * 1000)
        self._monotonic += seconds

    def set_wall(self, now: int) -> None:
        """Somebody sets the clock: wall time jumps, the other clock does not."""
        self._now = now


def over_when(condition: Callable[[], bool]) -> Callable[[], float]:
    """A clock that stands still until something is so, and jumps then: what is limited in time has come so far for
    sure, however slow the machine. Afterwards it goes on, for those whose time begins only then."""
    return lambda: 1e9 + time.monotonic() if condition() else 0.0


class FixedIds:
    """Ids that count up, and a jitter that is always the same."""

    def __init__(self, jitter: float = 0.5) -> None:
        self._count = 0
        self._jitter = jitter

    def new_id(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}-{self._count:04d}"

    def uniform(self) -> float:
        return self._jitter
