"""Collecting: removing stored bytes that nothing refers to (seed; architecture 7; contract 8).

A blob is a candidate when no reference, no live lease and no unfinished attempt needs it, and its row is old enough; a
file without a row when it is. Candidates are chosen without a lock and taken away in slices. Each slice, under the
artifact lock, looks again (a lease that came meanwhile saves its blob, and none can come now), moves the files to the
trash, deletes their rows in a transaction that looks once more, and only when that is on the disk deletes the files.
Wherever it dies, the next opening of the store finishes it: a file in the trash goes back if its row is there.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .artifacts import PROTECTED, Artifacts, forget_leases
from .blobs import never, store_fault
from .clock import DAY_MS, Clock
from .database import Database, all_rows
from .faults import Faults
from .process_identity import Liveness

SLICE = 128
"""Blobs that are taken away in one hold of the lock."""

UNKNOWN_WRITER_MS = DAY_MS
"""A temporary file whose writer cannot be looked up from here is left alone for a day at least."""


class Collector:
    """Collects on one database."""

    def __init__(self, database: Database, artifacts: Artifacts, clock: Clock, faults: Faults) -> None:
        self._database = database
        self._artifacts = artifacts
        self._blobs = artifacts.blobs
        self._clock = clock
        self._faults = faults

    def collect(
        self,
        *,
        older_than_ms: int,
        dry_run: bool,
        without_runs: Sequence[str] = (),
        stopped: Callable[[], bool] = never,
    ) -> dict[str, Any]:
        """Remove what nothing needs and what is older than that.

        The report of contract 8: `{considered, removed, reclaimedBytes, temporaryFilesConsidered,
        temporaryFilesRemoved}`; a dry run removes nothing, and its `reclaimedBytes` is what would come back. Removal is
        durable when it returns. `without_runs`: what a dry run is to believe gone. When `stopped()` is true no further
        slice is taken away, and the report tells of those that were. One collection at a time; raises
        as `alone`, and `EnvironmentFault` when something cannot be moved or deleted: it stays, and a later collection
        goes on. A dry run takes no lock and writes nothing.
        """
        if not self._blobs.is_ours():
            return _report(0, [], 0, 0, 0)
        if dry_run:
            cutoff = self._clock.now() - older_than_ms
            found = [*self._candidates(cutoff, without_runs), *self._untracked(cutoff)]
            temporary = self._old_temporary(cutoff)
            return _report(len(found), [], sum(size for _, size in found), len(temporary), 0)
        with self.alone():
            return self.collect_alone(older_than_ms=older_than_ms, stopped=stopped)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other collections and backups out, for whoever removes more than artifacts and must not fail half-way.

        Raises `EnvironmentFault`, before anything is touched, when the folder cannot be written, and `LockHeld` when
        another collection or a backup goes on for a minute. Without a folder of artifacts nothing is held.
        """
        if not self._blobs.is_ours():
            yield
            return
        self._blobs.require_writable()
        with self._blobs.locked(".collect.lock"):
            yield

    def collect_alone(self, *, older_than_ms: int, stopped: Callable[[], bool] = never) -> dict[str, Any]:
        """A collection inside `alone`."""
        if not self._blobs.is_ours():
            return _report(0, [], 0, 0, 0)
        cutoff = self._clock.now() - older_than_ms
        rows = self._candidates(cutoff, ())
        strays = self._untracked(cutoff)
        temporary = self._old_temporary(cutoff)
        removed: list[tuple[str, int]] = []
        cleaned = 0
        try:
            for remove, found in ((self._remove, rows), (self._remove_untracked, strays)):
                for some in _slices(found):
                    if stopped():
                        break
                    removed += remove(some)
            if not stopped():
                self._forget_leases()
                for path in temporary:
                    self._blobs.discard(path)
                cleaned = len(temporary)
        except OSError as error:
            raise store_fault(self._blobs.root, error) from error
        size = sum(size for _, size in removed)
        considered = len(rows) + len(strays)
        return _report(considered, sorted(digest for digest, _ in removed), size, len(temporary), cleaned)

    # -- choosing --------------------------------------------------------------------------------------------------

    def _candidates(self, cutoff: int, without_runs: Sequence[str]) -> list[tuple[str, int]]:
        needed = PROTECTED
        values: list[Any] = [cutoff]
        if without_runs:
            needed = PROTECTED.replace(
                "r.digest = b.digest", "r.digest = b.digest AND r.run_id NOT IN (SELECT value FROM json_each(?))"
            )
            values.append(json.dumps(list(without_runs)))
        with self._database.read() as tx:
            return all_rows(
                tx.execute(
                    "SELECT b.digest, b.size_bytes FROM artifact_blobs b "  # noqa: S608
                    f"WHERE b.created_at <= ? AND NOT ({needed}) ORDER BY b.digest",
                    (*values, self._clock.now()),
                )
            )

    def _untracked(self, cutoff: int) -> list[tuple[str, int]]:
        """Files without a row that are old: what was placed when somebody died, or a power cut undid the row."""
        found = [
            (digest, status.st_size)
            for digest, status in self._blobs.stored()
            if status.st_mtime_ns // 1_000_000 <= cutoff
        ]
        known = self._known([digest for digest, _ in found])
        return [item for item in found if item[0] not in known]

    def _known(self, digests: Sequence[str]) -> set[str]:
        known = set()
        with self._database.read() as tx:
            for digest in digests:
                if tx.execute("SELECT 1 FROM artifact_blobs WHERE digest = ?", (digest,)).fetchone() is not None:
                    known.add(digest)
        return known

    def _old_temporary(self, cutoff: int) -> list[Any]:
        old = []
        for path, liveness, status in self._blobs.temporary():
            since = status.st_mtime_ns // 1_000_000
            if stat.S_ISDIR(status.st_mode):
                continue  # nothing of ours, and no file
            if liveness is Liveness.DEAD or (
                liveness is Liveness.UNKNOWN and since <= min(cutoff, self._clock.now() - UNKNOWN_WRITER_MS)
            ):
                old.append(path)
        return old

    # -- removing --------------------------------------------------------------------------------------------------

    def _remove(self, some: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        sizes = dict(some)
        with self._blobs.locked():
            free = self._still_free(list(sizes))
            for digest in free:
                self._blobs.quarantine(digest)
            self._faults.reach("after_quarantine")
            gone: set[str] = set()
            try:
                gone = self._delete_rows(free)
            finally:
                for digest in free:
                    if digest not in gone:
                        self._blobs.restore(digest)
            self._faults.reach("after_collection")
            for digest in gone:
                self._blobs.purge(digest)
        return [(digest, sizes[digest]) for digest in free if digest in gone]

    def _still_free(self, digests: Sequence[str]) -> list[str]:
        """Those that nothing has begun to need since they were chosen. Nothing can begin to while the lock is held."""
        now = self._clock.now()
        with self._database.read() as tx:
            return [
                digest
                for digest in digests
                if tx.execute(
                    f"SELECT 1 FROM artifact_blobs b WHERE b.digest = ? AND NOT ({PROTECTED})",  # noqa: S608
                    (digest, now),
                ).fetchone()
                is not None
            ]

    def _delete_rows(self, digests: Sequence[str]) -> set[str]:
        """Delete the rows of those that are still free, durably; returns them."""
        now = self._clock.now()
        gone = set()
        with self._database.write(durable=True) as tx:
            for digest in digests:
                # An expired lease of an attempt that is closed protects nothing, and stands in the way.
                forget_leases(tx, now=now, digest=digest)
                tx.execute(
                    f"DELETE FROM artifact_blobs AS b WHERE b.digest = ? AND NOT ({PROTECTED})",  # noqa: S608
                    (digest, now),
                )
                if tx.changes() == 1:
                    gone.add(digest)
        return gone

    def _remove_untracked(self, some: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
        with self._blobs.locked():
            known = self._known([digest for digest, _ in some])
            removed = [item for item in some if item[0] not in known and self._blobs.quarantine(item[0])]
            for digest, _ in removed:
                self._blobs.purge(digest)
        return removed

    def _forget_leases(self) -> None:
        with self._database.write(durable=True) as tx:
            forget_leases(tx, now=self._clock.now())


def _slices(items: Sequence[tuple[str, int]]) -> Iterator[Sequence[tuple[str, int]]]:
    for start in range(0, len(items), SLICE):
        yield items[start : start + SLICE]


def _report(considered: int, removed: list[str], size: int, temporary: int, cleaned: int) -> dict[str, Any]:
    return {
        "considered": considered,
        "removed": removed,
        "reclaimedBytes": size,
        "temporaryFilesConsidered": temporary,
        "temporaryFilesRemoved": cleaned,
    }
