"""The audit trails of all runs, followed from a cursor: nothing is left out, whoever restarts, whatever is removed.

The events of one run come in their order; between runs there is no order but the one in which a follower meets them.
A cursor says of each run how far it was read, and stays short: runs are numbered as they are created, every run up to
`watermark` that is not listed has been read to its end. Only an event that is appended to a run after its end (a
reconciliation, say) while nobody follows is found again by its time.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import dataclass, field
from typing import Any

from . import audit
from .database import Connection, Database
from .errors import UsageError
from .views import event_rows

FULL_LOOK_SECONDS = 5.0
"""How often ended runs are asked for late events, too."""

_PREFIX = "c1-"


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far all trails were read. `at`: the time of the latest event (epoch ms). `partly`: run number -> sequence."""

    watermark: int = 0
    at: int = 0
    partly: dict[int, int] = field(default_factory=dict)

    def as_text(self) -> str:
        """An opaque word for `parse`."""
        body = json.dumps([self.watermark, self.at, sorted(self.partly.items())], separators=(",", ":"))
        return _PREFIX + base64.urlsafe_b64encode(zlib.compress(body.encode(), 9)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read what `as_text` has made. Raises `UsageError`."""
        try:
            if not text.startswith(_PREFIX):
                raise ValueError("no cursor")
            packed = text[len(_PREFIX) :].encode("ascii")
            reader = zlib.decompressobj()
            body = reader.decompress(base64.urlsafe_b64decode(packed + b"=" * (-len(packed) % 4)), 16 << 20)
            if not reader.eof:
                raise ValueError("cut off")
            watermark, at, partly = json.loads(body)
            return cls(int(watermark), int(at), {int(number): int(sequence) for number, sequence in partly})
        except (ValueError, TypeError, RecursionError, binascii.Error, zlib.error) as error:
            raise UsageError(
                f"{text[:40]!r} is no cursor",
                remedy="give one that an earlier `agentctl events` has printed, or `start`",
            ) from error


@dataclass(slots=True)
class _Known:
    run_id: str
    read: int
    ended: bool


class Trail:
    """One follower. It holds a row of memory for each run; every look is one short snapshot."""

    def __init__(self, database: Database, cursor: Cursor | None) -> None:
        """From `cursor` on; from this moment on without one."""
        self._database = database
        self._known: dict[int, _Known] = {}
        self._at = 0 if cursor is None else cursor.at
        self._last_full: float | None = None
        with database.read() as tx:
            for number, run_id, head, ended in _heads(tx):
                read = head if cursor is None else _read_before(tx, cursor, number, run_id, head)
                self._known[number] = _Known(run_id, read, ended and read >= head)
                if cursor is None:
                    # What is passed over counts as read: without its time the next follower would take it for late.
                    self._at = max(self._at, _time_of(tx, run_id, head) or 0)
        self._newest = max(self._known, default=0 if cursor is None else cursor.watermark)

    def cursor(self) -> Cursor:
        """Where the next follower goes on."""
        partly = {number: known.read for number, known in self._known.items() if not known.ended}
        return Cursor(self._newest, self._at, partly)

    def look(self, limit: int, monotonic: float) -> list[dict[str, Any]]:
        """The next events, at most `limit`; an empty list means that everything was read up to now."""
        full = self._last_full is None or monotonic - self._last_full >= FULL_LOOK_SECONDS
        found: list[dict[str, Any]] = []
        with self._database.read() as tx:
            heads = _heads(tx) if full else self._quick(tx)
            for number, run_id, head, ended in heads:
                known = self._known.setdefault(number, _Known(run_id, 0, False))
                self._newest = max(self._newest, number)
                if known.read < head and len(found) < limit:
                    events = event_rows(tx, run_id, after=known.read, limit=limit - len(found))
                    found += events
                    known.read = events[-1]["sequence"] if events else head
                # One that was not read to its end counts as going on, in a cursor as well.
                known.ended = ended and known.read >= head
        if full and len(found) < limit:
            self._last_full = monotonic
            there = {number for number, *_ in heads}
            self._known = {number: known for number, known in self._known.items() if number in there}
        if found:
            self._at = max(self._at, *(event["createdAt"] for event in found))
        return found

    def _quick(self, tx: Connection) -> list[tuple[int, str, int, bool]]:
        """Runs that go on, that went on at the last look, and new ones."""
        going = [known.run_id for known in self._known.values() if not known.ended]
        which = "n.run_no > ? OR n.run_id IN (SELECT value FROM json_each(?))"
        return _heads(tx, which, (self._newest, json.dumps(going)))


def _heads(tx: Connection, which: str = "1", values: tuple[Any, ...] = ()) -> list[tuple[int, str, int, bool]]:
    """(number, run, last event, whether it has ended) of some runs, in the order of their creation."""
    rows = tx.execute(
        "SELECT n.run_no, r.run_id, r.audit_sequence, r.ended_at IS NOT NULL FROM run_numbers n "  # noqa: S608
        f"JOIN runs r ON r.run_id = n.run_id WHERE {which} ORDER BY n.run_no",
        values,
    )
    return [(number, run_id, head, bool(ended)) for number, run_id, head, ended in rows]


def _time_of(tx: Connection, run_id: str, sequence: int) -> int | None:
    """When an event of a run was appended; None when there is none of that sequence."""
    row = tx.execute(
        f"SELECT created_at FROM audit_events WHERE {audit.OF_RUN} AND sequence = ?3",  # noqa: S608
        (run_id, sequence - 1, sequence),
    ).fetchone()
    return None if row is None else int(row[0])


def _read_before(tx: Connection, cursor: Cursor, number: int, run_id: str, head: int) -> int:
    """Up to where a run was read by whoever had this cursor.

    What is later than all that was read was not read, whatever its number: the database may have been restored since,
    and then runs go on from an earlier event, and new ones have numbers that others had.
    """
    if number > cursor.watermark:
        return 0
    read = cursor.partly.get(number, head)
    last = _time_of(tx, run_id, min(read, head))
    if last is None or last <= cursor.at:
        return min(read, head)
    row = tx.execute(
        f"SELECT COALESCE(MAX(sequence), 0) FROM audit_events WHERE {audit.OF_RUN} AND created_at <= ?3",  # noqa: S608
        (run_id, 0, cursor.at),
    ).fetchone()
    return int(row[0]) if row else 0
