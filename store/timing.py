"""Lengths of leases and heartbeats. Pure but for `from_environment`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .errors import UsageError


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
