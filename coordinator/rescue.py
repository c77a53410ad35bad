"""Who is dead, and what becomes of what they held (architecture 4, "When is an owner dead?").

Provably dead: rescued at once. Alive but silent: only after this process itself, awake and able to write all the while,
has seen the lease stale for a full grace period; then the holder is killed first. A fence guards rows, not the world:
before an effect may be delivered again or called uncertain, its holder and every process that this holder has started
(they carry its marker) must be gone.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from agentctl.store import process_identity
from agentctl.store.clock import Clock
from agentctl.store.engine import Store
from agentctl.store.errors import CorruptStore
from agentctl.store.faults import Faults
from agentctl.store.process_identity import Liveness, ProcessIdentity
from agentctl.store.records import ProcessRow
from agentctl.store.timing import Timing

log = logging.getLogger(__name__)

END_WAIT_SECONDS = 5.0


@dataclass(slots=True)
class _Silence:
    """How long a claim has been seen without a sign of its holder."""

    lease_expires_at: int
    unchanged: float = 0.0
    stale: float = 0.0


class Rescuer:
    """Looks after all holders of one database. `look` is cheap when everybody is well."""

    def __init__(self, store: Store, clock: Clock, timing: Timing, actor: str, faults: Faults) -> None:
        self._store = store
        self._clock = clock
        self._timing = timing
        self._actor = actor
        self._faults = faults
        self._silence: dict[tuple[int, int], _Silence] = {}
        self._last_look: float | None = None
        self.quiet = False
        """Whether nobody held anything at the last look."""
        self.sleep = 0.0
        """How long whoever looks meant to sleep, in seconds, before it looks now."""

    @property
    def patience(self) -> float:
        """How long a living process may be silent, in seconds: a lease, and the grace after it."""
        return self._timing.lease + self._timing.grace

    def counted(self, elapsed: float) -> float:
        """How much of the time between two looks counts against others.

        None of a gap: it means that we ourselves were stopped or suspended, as they may have been.
        """
        return elapsed if elapsed < self.sleep + max(2.0, self._timing.grace / 4) else 0.0

    def look(self) -> int:
        """Rescue what the dead and the silent hold. Returns the number of attempts that were settled."""
        now = self._clock.monotonic()
        elapsed = 0.0 if self._last_look is None else now - self._last_look
        self._last_look = now
        counted = self.counted(elapsed)
        rows = self._store.live_processes()
        dead = [row for row in rows if self._liveness(row) is Liveness.DEAD]
        settled = self.settle(dead, "died") if dead else 0
        known = {row.process_id: row for row in rows}
        for row in self._silent_holders(known, {row.process_id for row in dead}, counted):
            settled += self._end_silent(row)
        return settled

    def settle(self, rows: Iterable[ProcessRow], how: str) -> int:
        """Rescue everything that these dead processes held, after the end of all their effect processes."""
        rows = list(rows)
        settled = 0
        for row in rows:
            claims = self._store.claims([row.process_id])
            if self._store.effects_in_flight(claim.attempt_id for claim in claims):
                process_identity.kill_marked(
                    [row.process_id], wait_seconds=END_WAIT_SECONDS, marker=process_identity.HOLDER_MARKER
                )
            self._faults.reach("before_rescue")
            outcomes = self._store.rescue(
                [(claim.attempt_id, claim.delivery) for claim in claims],
                dead=[row.process_id],
                why=f"{row.kind} {row.name} (pid {row.pid}) {how}",
                actor=self._actor,
            )
            self._faults.reach("after_rescue")
            if outcomes:
                settled_as = ", ".join(f"{number} {word}" for word, number in sorted(Counter(outcomes).items()))
                log.warning("%s %s (pid %d) %s; attempts settled: %s", row.kind, row.name, row.pid, how, settled_as)
            settled += len(outcomes)
        return settled

    def _liveness(self, row: ProcessRow) -> Liveness:
        return process_identity.liveness_of(row.identity)

    def _silent_holders(self, known: dict[str, ProcessRow], dead: set[str], counted: float) -> list[ProcessRow]:
        now_ms = self._clock.now()
        seen: dict[tuple[int, int], _Silence] = {}
        silent: dict[str, ProcessRow] = {}
        for claim in self._store.claims():
            if claim.holder in dead:
                continue
            key = (claim.attempt_id, claim.delivery)
            silence = self._silence.get(key)
            if silence is None or silence.lease_expires_at != claim.lease_expires_at:
                silence = _Silence(claim.lease_expires_at)
            else:
                silence.unchanged += counted
                # Stale by the clock, or unrenewed for a whole lease of our own time: a clock set back hides nobody.
                if now_ms > claim.lease_expires_at or silence.unchanged > self._timing.lease:
                    silence.stale += counted
            seen[key] = silence
            if silence.stale >= self._timing.grace:
                row = known.get(claim.holder)
                silent[claim.holder] = row if row is not None else _ghost(claim.holder)
        self._silence = seen
        self.quiet = not seen
        return list(silent.values())

    def _end_silent(self, row: ProcessRow) -> int:
        identity = _identity_of(row)
        if identity is not None and process_identity.kill(identity, signal.SIGKILL):
            deadline = self._clock.monotonic() + END_WAIT_SECONDS
            while self._clock.monotonic() < deadline:
                if process_identity.liveness(identity) is Liveness.DEAD:
                    return self.settle([row], "was silent for longer than its lease and was killed")
                self._clock.sleep(0.01)
        if not row.identity or (identity is not None and process_identity.liveness(identity) is Liveness.DEAD):
            return self.settle([row], "is gone")
        claims = self._store.claims([row.process_id])
        outcomes = self._store.rescue(
            [(claim.attempt_id, claim.delivery) for claim in claims],
            dead=[],
            why=f"{row.kind} {row.name} (pid {row.pid}) is silent and cannot be ended from here",
            actor=self._actor,
            holder_may_live=True,
        )
        log.warning("%s %s (pid %d) is silent and cannot be ended from here", row.kind, row.name, row.pid)
        return len(outcomes)


def _identity_of(row: ProcessRow) -> ProcessIdentity | None:
    """Whom to end; None when the row does not say, or nonsense."""
    try:
        return ProcessIdentity.from_text(row.identity) if row.identity else None
    except CorruptStore:
        return None


def _ghost(process_id: str) -> ProcessRow:
    """A holder whose row somebody has deleted by hand."""
    return ProcessRow(process_id, "worker", process_id, "", 0, None, None, None, "idle", "", 0, 0, None, None, 0, 0, 0)
