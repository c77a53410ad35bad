"""Lengths of leases and heartbeats. Pure but for `from_environment`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import UsageError

LONGEST_REST_SECONDS = 10.0
"""How long nobody looks at most, however long a lease is: what ends by the clock, or was started by somebody who died
before he could call, waits for a look."""

TOGETHER_SECONDS = 0.05
"""The instant within which those wake up who rest."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a lease lasts, how often it is renewed, and the grace after its end, in seconds (architecture 3)."""

    lease: float = 15.0
    heartbeat: float = 3.0

    @property
    def grace(self) -> float:
        """How long a rescuer must have seen a lease stale before it acts: one lease."""
        return self.lease

    @property
    def rest(self) -> float:
        """How often a process without work gives its heartbeat and looks by itself, in seconds.

        It holds no lease that could end, and is believed to be well for a lease and the grace.
        """
        return min(LONGEST_REST_SECONDS, max(self.heartbeat, self.lease * 2 / 3))

    def until_rest_ends(self, now: float, *, parts: int = 1, chance: float = 0.0) -> float:
        """Seconds from `now` (monotonic) until all wake up who rest, or the end of one of so many `parts` of the rest.

        All at once, since a processor that has slept, and memory that nobody has used, make a process slow, and what
        they share is then fetched once; but by `chance` (0 to 1) an instant later, or they would meet at the gate.
        """
        length = self.rest / parts
        return length - now % length + chance * TOGETHER_SECONDS

    @property
    def lease_ms(self) -> int:
        """The lease in milliseconds."""
        return int(self.lease * 1000)

    @classmethod
    def from_environment(cls) -> Timing:
        """`AGENTCTL_LEASE_SECONDS` and `AGENTCTL_HEARTBEAT_SECONDS`; `UsageError` for what makes no sense."""
        default = cls()
        lease = _seconds("AGENTCTL_LEASE_SECONDS", default.lease)
        heartbeat = _seconds("AGENTCTL_HEARTBEAT_SECONDS", min(default.heartbeat, lease / 3))
        if heartbeat > lease / 2:
            raise UsageError(
                f"a heartbeat of {heartbeat:g} s is too slow for a lease of {lease:g} s",
                remedy="let AGENTCTL_HEARTBEAT_SECONDS be at most half of AGENTCTL_LEASE_SECONDS",
            )
        return cls(lease, heartbeat)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.05 <= value <= 86_400:
        raise UsageError(f"{name}={text!r} is not a number of seconds between 0.05 and 86400")
    return value
