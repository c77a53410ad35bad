"""When a worker has done enough and makes room for a fresh one: by count, by age, by memory. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

SPREAD = 0.1
"""By how much the workers of a pool differ, so that they are not all renewed at one moment."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may do before it is renewed; None: without end. Looked at between attempts, never inside of one."""

    tasks: int | None = None
    age_seconds: float | None = None
    rss_bytes: int | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit at all."""
        return self.tasks is not None or self.age_seconds is not None or self.rss_bytes is not None

    def drawn(self, chance: float) -> Limits:
        """The limits of one worker: count and age up to a tenth smaller, by `chance` in [0, 1)."""
        factor = 1.0 - SPREAD * chance
        return replace(
            self,
            tasks=None if self.tasks is None else max(1, self.tasks - int(self.tasks * SPREAD * chance)),
            age_seconds=None if self.age_seconds is None else self.age_seconds * factor,
        )

    def reached(self, tasks: int, age_seconds: float, rss: Callable[[], int]) -> str | None:
        """What was reached, for people, or None. Memory is asked for only when it is limited."""
        if self.tasks is not None and tasks >= self.tasks:
            return f"has ended {tasks} attempts (limit {self.tasks})"
        if self.age_seconds is not None and age_seconds >= self.age_seconds:
            return f"is {age_seconds:.0f} s old (limit {self.age_seconds:.0f} s)"
        # One that has done nothing yet would come back as large as it went.
        if self.rss_bytes is not None and tasks and (used := rss()) > self.rss_bytes:
            return f"uses {used >> 20} MiB of memory (limit {self.rss_bytes >> 20} MiB)"
        return None


NO_LIMITS = Limits()
