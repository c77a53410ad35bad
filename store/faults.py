"""Named crash points, for tests that kill a real process exactly there (architecture 8).

`AGENTCTL_FAULT=POINT[:N][:ACTION][@MARKER]` makes a process act when it reaches POINT for the N-th time. ACTION is
`kill` (the default: SIGKILL to itself), `stop` (SIGSTOP to itself), `parent` (SIGKILL to its parent, then to itself).
With `@MARKER` only one process ever acts: the one that creates the file MARKER. Without the variable every point is a
single dictionary look-up.
"""

from __future__ import annotations

import os
import signal

from .errors import UsageError

POINTS = (
    # worker
    "after_claim",
    "before_effect_start",
    "after_effect_start",
    "after_call_prepared",
    "after_call_answered",
    "after_call_stored",
    "after_effect_result",
    "after_staging",
    "after_placing",
    "after_ingestion",
    "before_finish",
    "after_finish",
    # driver
    "after_create_run",
    "before_derived_run",
    "during_derived_run",
    "before_commit",
    "after_commit",
    "before_run_end",
    "before_replay",
    "after_replay",
    "before_compensation",
    "after_compensation",
    # rescuer
    "before_rescue",
    "after_rescue",
    # a person's shell
    "before_decision",
    "after_decision",
    # collector of artifacts
    "after_quarantine",
    "after_collection",
)


class Faults:
    """The points of one process. `reach` returns at once unless this process was told to act here."""

    __slots__ = ("_action", "_left", "_marker", "_point")

    def __init__(self, specification: str | None) -> None:
        self._point: str | None = None
        self._left = 1
        self._action = "kill"
        self._marker: str | None = None
        if not specification:
            return
        specification, _, marker = specification.partition("@")
        self._marker = marker or None
        point, *rest = specification.split(":")
        if point not in POINTS:
            raise ValueError(f"unknown crash point {point!r}; known: {', '.join(POINTS)}")
        self._point = point
        for part in rest:
            if part.isdigit():
                self._left = int(part)
            else:
                self._action = part

    @classmethod
    def from_environment(cls) -> Faults:
        """The points that `AGENTCTL_FAULT` names, or none. Raises `UsageError` for one that there is not."""
        try:
            return cls(os.environ.get("AGENTCTL_FAULT"))
        except ValueError as error:
            raise UsageError(f"AGENTCTL_FAULT: {error}", remedy="it is for tests; unset it") from error

    def waits_at(self, *points: str) -> bool:
        """Whether this process was told to act at one of these points."""
        return self._point in points

    def reach(self, point: str) -> None:
        """Tell that this process is at `point`; it may not return."""
        if point != self._point:
            return
        self._left -= 1
        if self._left != 0:
            return
        if self._marker is not None:
            try:
                os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                return
        if self._action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        if self._action == "parent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
