"""Artifacts: the bytes that a run keeps (seed; architecture 7; contract 8). Joins the files of `blobs` and their rows.

The way of one artifact: staged by the worker (copied, hashed, durable), then placed and given a row and a lease in one
hold of the artifact lock, then, with the batch that commits its task, given a reference instead of the lease. So a
collection sees every blob either in the making (no row can be missing while it holds the lock), leased, or referenced.

Lock order: artifact lock, gate, SQLite. Functions that take `tx` belong to the caller's transaction; the methods of
`Artifacts` are verbs: one transaction each, which may be run again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from . import audit, effects, holds, ledger
from .blobs import PREFIX, Blobs, Staged, store_path, write_atomically
from .canonical import canonical, text_digest
from .clock import Clock
from .database import Connection, Database, all_rows
from .errors import (
    ConflictError,
    CorruptStore,
    EnvironmentFault,
    LockHeld,
    NotFoundError,
    TaskFault,
    UsageError,
)
from .faults import Faults
from .filesystem import belongs_to_open_database, is_place_of_open_database
from .records import (
    AttemptHeld,
    Claim,
    EffectEnd,
    Event,
    Fence,
    FinishedAttempt,
    NewArtifact,
    SourceFile,
    StartRefused,
)

log = logging.getLogger(__name__)

LOOKS = 512
"""Blobs that are looked for in one hold of the lock; a look is two names and a row."""

LEASE_MS = 60 * 60 * 1000
"""How long an ingestion is protected by its lease alone (seed)."""

DIMENSION = "artifactBytes"

_MEDIA_TYPES = {
    ".json": "application/json",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".md": "text/markdown",
    ".txt": "text/plain",
    ".log": "text/plain",
    ".csv": "text/csv",
}

PROTECTED = (
    "EXISTS (SELECT 1 FROM artifact_refs r WHERE r.digest = b.digest) OR EXISTS "
    "(SELECT 1 FROM artifact_ingests i JOIN attempts a USING (attempt_id) "
    "WHERE i.digest = b.digest AND (i.expires_at > ? OR a.state <> 'closed'))"
)
"""Why a blob `b` must stay: a reference, a live lease, or an attempt that is live or finished but not committed,
whatever the clock says about its lease (architecture 7). One parameter: now."""


def reservation_id(task_id: str, path: str) -> str:
    """The name of the budget reservation of one artifact (contract 6)."""
    return f"artifact:{task_id}:{sha256(path.encode()).hexdigest()}"


def media_type(path: str) -> str:
    """The media type by the extension of a path (contract 8)."""
    return _MEDIA_TYPES.get(PurePosixPath(path).suffix.lower(), "application/octet-stream")


def manifest(found: Sequence[NewArtifact]) -> str:
    """The manifest of a task as canonical JSON, by path (contract 8)."""
    return canonical(
        [
            {
                "path": item.path,
                "digest": item.digest,
                "sizeBytes": item.size_bytes,
                "mediaType": media_type(item.path),
                "logicalName": PurePosixPath(item.path).name,
                "storePath": store_path(item.digest),
            }
            for item in sorted(found, key=lambda item: item.path)
        ]
    )


class Artifacts:
    """The verbs of artifacts on one database connection. Belongs to the thread of its `Database`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.blobs = Blobs(database.path, clock)
        self._database = database
        self._clock = clock

    # -- ingestion -------------------------------------------------------------------------------------------------

    def begin(
        self, claim: Claim, effect: EffectEnd | None, sizes: dict[str, int], sources: Sequence[SourceFile] = ()
    ) -> AttemptHeld | StartRefused | None:
        """Confirm the effect that made the files, write down how they are, and reserve the bytes of each.

        From here on a death costs nothing: the next delivery finds the result and its `sources` recorded and ingests
        those again. Returns None when ingestion may go on, `AttemptHeld` when the bytes have to wait for others (the
        delivery is over), and `StartRefused` when they never fit. Not durable. Raises `LeaseLost`.
        """
        now = self._clock.now()
        with self._database.write() as tx:
            _require_held(tx, claim.fence)
            if sources:
                _record_sources(tx, claim.fence.attempt_id, sources)
            events: list[Event] = []
            answer = _begin(tx, claim, effect, sizes, events, now)
            audit.append(tx, claim.run_id, events, actor=claim.fence.holder, now=now)
        return answer

    def recorded(self, attempt_id: int) -> tuple[list[SourceFile], bool]:
        """What an earlier delivery has left: the declared files as they were then, and whether all bytes are stored."""
        with self._database.read() as tx:
            row = tx.execute(
                "SELECT artifact_sources_json, artifacts_json FROM attempts WHERE attempt_id = ?", (attempt_id,)
            ).fetchone()
        sources, text = row if row is not None else (None, None)
        kept = text is not None and all(
            self.blobs.present(item["digest"], item["sizeBytes"]) for item in json.loads(text)
        )
        return [SourceFile(path, *map(int, facts)) for path, *facts in json.loads(sources or "[]")], kept

    def keep(self, claim: Claim, staged: Sequence[tuple[str, Staged]], faults: Faults) -> StartRefused | None:
        """Place staged files and write their rows, their lease and the manifest of the attempt, under the lock.

        What they have used of the budget is settled once per attempt and path; `StartRefused` tells that it was more
        than the limit, so that the task fails (contract 6). Not durable: a power cut before the batch leaves an
        untracked blob, and the attempt is delivered again. Raises `LeaseLost`, OSError, and `TaskFault` when an earlier
        delivery has stored other bytes.
        """
        found = [NewArtifact(path, item.digest, item.size) for path, item in staged]
        with self.blobs.locked():
            for _, item in staged:
                self.blobs.place(item)
            faults.reach("after_placing")
            now = self._clock.now()
            with self._database.write() as tx:
                _require_held(tx, claim.fence)
                events: list[Event] = []
                overdrawn = _record(tx, claim, found, events, now)
                audit.append(tx, claim.run_id, events, actor=claim.fence.holder, now=now)
        return None if overdrawn is None else StartRefused("budget", overdrawn)

    def give_up(self, claim: Claim, paths: Sequence[str]) -> None:
        """Release what was reserved for files that could not be stored."""
        now = self._clock.now()
        with self._database.write() as tx:
            events: list[Event] = []
            for path in paths:
                name = reservation_id(claim.task_id, path)
                ledger.release(tx, claim.run_id, claim.task_id, name, claim.number, events)
            audit.append(tx, claim.run_id, events, actor=claim.fence.holder, now=now)

    def checked(self, done: FinishedAttempt) -> FinishedAttempt:
        """A success whose blobs are gone or have another size is a failure; only its own task fails."""
        for item in json.loads(done.artifacts_json or "[]") if done.outcome == "succeeded" else ():
            if not self.blobs.present(item["digest"], item["sizeBytes"]):
                fault = TaskFault(
                    "artifact_missing",
                    f"the stored bytes of {item['path']!r} are not there any more",
                    details={"path": item["path"], "digest": item["digest"]},
                )
                return replace(done, outcome="failed", error_json=canonical(fault.as_json()), artifacts_json=None)
        return done

    def require_sound(self, manifests: Iterable[str | None], *, of: str | None) -> None:
        """Raise `ConflictError` unless the bytes of all artifacts of these manifests are there and what they were.

        Reads all of them, outside of any transaction.
        """
        wanted = {
            (item["digest"], item["sizeBytes"]): item["path"] for text in manifests for item in json.loads(text or "[]")
        }
        for (digest, size), path in wanted.items():
            state = self.blobs.check(digest, size)
            if state != "ok":
                raise ConflictError(
                    f"the stored bytes of {path!r} are {state} now, which they were not when this was planned; "
                    "nothing was created",
                    remedy="plan it again: the same command does",
                    run_id=of,
                )

    # -- recovery --------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Finish what the dead have left: their temporary files, and collections that were interrupted.

        A blob in the trash whose row is there goes back to its place; one whose row is gone is deleted. If somebody
        holds the lock, or the folder cannot be written, it is left to whoever opens next.
        """
        with suppress(OSError):
            self.blobs.remove_leftovers()
        try:
            trashed = self.blobs.trashed()
            if not trashed:
                return
            with self.blobs.locked(patient=False):
                for digest in self.blobs.trashed():
                    if self._known(digest):
                        self.blobs.restore(digest)
                    else:
                        self.blobs.purge(digest)
        except LockHeld:
            log.info("a collection is under way, or an interrupted one waits for its end until the next opening")
        except (OSError, EnvironmentFault) as error:
            log.warning("an interrupted collection of artifacts could not be finished: %s", error)

    def _known(self, digest: str) -> bool:
        with self._database.read() as tx:
            return tx.execute("SELECT 1 FROM artifact_blobs WHERE digest = ?", (digest,)).fetchone() is not None

    # -- for people ------------------------------------------------------------------------------------------------

    def find(self, name: str) -> str:
        """The digest that `name` means: a digest with or without `sha256:`, or the beginning of exactly one."""
        given = name.removeprefix(PREFIX).lower()
        if not given or any(letter not in "0123456789abcdef" for letter in given) or len(given) > 64:
            raise UsageError(f"{name!r} is not a digest", remedy="`agentctl artifacts list` shows the digests")
        with self._database.read() as tx:
            rows = all_rows(
                tx.execute(
                    "SELECT digest FROM artifact_blobs WHERE digest >= ? AND digest < ? LIMIT 2",
                    (PREFIX + given, PREFIX + given + "g"),
                )
            )
        if len(rows) > 1:
            raise UsageError(f"{name!r} is the beginning of several digests", remedy="give more of it")
        if not rows:
            raise NotFoundError(f"there is no artifact {name}", remedy="`agentctl artifacts list` shows the digests")
        return str(rows[0][0])

    def references(self, run_id: str | None, task_id: str | None) -> list[dict[str, Any]]:
        """References of all runs, of one run or of one task, in order of run, task and path."""
        with self._database.read() as tx:
            return list(references(tx, run_id, task_id))

    def stored(self) -> list[dict[str, Any]]:
        """Every blob: `digest, sizeBytes, createdAt, references, leasedUntil, storePath`."""
        with self._database.read() as tx:
            return [
                {
                    "digest": digest,
                    "sizeBytes": size,
                    "createdAt": created_at,
                    "references": count,
                    "leasedUntil": leased,
                    "storePath": store_path(digest),
                }
                for digest, size, created_at, count, leased in tx.execute(
                    "SELECT b.digest, b.size_bytes, b.created_at, "
                    "(SELECT COUNT(*) FROM artifact_refs r WHERE r.digest = b.digest), "
                    "(SELECT MAX(i.expires_at) FROM artifact_ingests i WHERE i.digest = b.digest) "
                    "FROM artifact_blobs b ORDER BY b.created_at, b.digest"
                )
            ]

    def inspect(self, digest: str) -> dict[str, Any]:
        """One blob with its references and leases, and whether its bytes are sound."""
        with self._database.read() as tx:
            row = tx.execute("SELECT size_bytes, created_at FROM artifact_blobs WHERE digest = ?", (digest,)).fetchone()
            if row is None:
                raise NotFoundError(f"there is no artifact {digest}")
            found: dict[str, Any] = {
                "digest": digest,
                "sizeBytes": row[0],
                "createdAt": row[1],
                "storePath": store_path(digest),
                "references": list(references(tx, None, None, digest)),
                "leases": [
                    {"runId": run_id, "taskId": task_id, "path": path, "expiresAt": expires, "attemptState": state}
                    for run_id, task_id, path, expires, state in tx.execute(
                        "SELECT i.run_id, i.task_id, i.logical_path, i.expires_at, a.state FROM artifact_ingests i "
                        "JOIN attempts a USING (attempt_id) WHERE i.digest = ? ORDER BY i.attempt_id, i.logical_path",
                        (digest,),
                    )
                ],
            }
        found["status"] = self.blobs.check(digest, found["sizeBytes"])
        if found["status"] == "missing":
            lost = self._lost({digest: found["sizeBytes"]})
            if lost.get(digest) == "gone":
                raise NotFoundError(f"there is no artifact {digest} any more: a collection has just removed it")
            found["status"] = lost.get(digest, "ok")
        return found

    def verify(self, digest: str | None) -> dict[str, Any]:
        """Read and hash one blob or all: `{checked, bytes, missing, corrupt, unreadable, untracked}`; the lists hold
        digests.

        Holds nothing while it reads. What a collection takes away meanwhile is not missing. `unreadable` is what the
        disk or a permission does not give; it says nothing about the bytes. `untracked` are files without a row, which
        a collection removes when they are old enough.
        """
        with self._database.read() as tx:
            sql = "SELECT digest, size_bytes FROM artifact_blobs "
            if digest is None:
                rows = all_rows(tx.execute(sql + "ORDER BY digest"))
            else:
                rows = all_rows(tx.execute(sql + "WHERE digest = ?", (digest,)))
        found: dict[str, list[str]] = {"missing": [], "corrupt": [], "unreadable": []}
        suspects: dict[str, int] = {}
        for each, size in rows:
            state = self.blobs.check(each, size)
            if state == "missing":
                suspects[each] = size
            elif state != "ok":
                found[state].append(each)
        for each, state in self._lost(suspects).items():
            if state in found:
                found[state].append(each)
        untracked = []
        if digest is None and self.blobs.is_ours():
            known = {row[0] for row in rows}
            untracked = sorted(each for each, _ in self.blobs.stored() if each not in known and not self._known(each))
        return {
            "checked": len(rows),
            "bytes": sum(size for _, size in rows),
            **{state: sorted(digests) for state, digests in found.items()},
            "untracked": untracked,
        }

    def _lost(self, suspects: dict[str, int]) -> dict[str, str]:
        """What is the matter with blobs (digest to size) that were not in their place: `missing`, `corrupt`,
        `unreadable`, or `gone` together with their row. One that is there after all is left out.

        A collection moves files and deletes their rows in one hold of the artifact lock, so only with the lock is it
        certain that a row without its file has lost it. Where the lock is not to be had, both places are looked into.
        """
        answer: dict[str, str] = {}
        digests = list(suspects)
        for start in range(0, len(digests), LOOKS):
            some = digests[start : start + LOOKS]
            try:
                with self.blobs.locked():
                    rest = self._without_file(some)
            except (LockHeld, EnvironmentFault):
                rest = self._without_file(some)
            answer.update(rest)
            for each in some:
                if each not in rest and (state := self.blobs.check_anywhere(each, suspects[each])) != "ok":
                    answer[each] = "gone" if state == "missing" and not self._known(each) else state
        return answer

    def _without_file(self, digests: Sequence[str]) -> dict[str, str]:
        """Those that lie neither in their place nor in the trash: `missing`, or `gone` if their row is, too."""
        absent = [each for each in digests if not self.blobs.lies_about(each)]
        return {each: "missing" if self._known(each) else "gone" for each in absent}

    def export(self, digest: str, destination: Path, *, overwrite: bool) -> int:
        """Copy a blob to a file that appears only when it is complete and verified; its size.

        Raises `ConflictError` for a file that is there, `UsageError` for what cannot be a target (a folder, a symbolic
        link, a folder that is missing), `CorruptStore` for a blob that is missing or damaged: nothing is written then.
        """
        _check_target(destination, overwrite)
        size = 0

        def fill(descriptor: int) -> None:
            nonlocal size
            import os

            try:
                sound = self.blobs.copy_out(digest, descriptor)
            except FileNotFoundError as error:
                if not self._known(digest):
                    raise NotFoundError(f"there is no artifact {digest} any more: it was just removed") from error
                raise _damaged(digest, "missing") from error
            if not sound:
                raise _damaged(digest, "damaged")
            size = os.fstat(descriptor).st_size

        try:
            write_atomically(destination, fill, overwrite=overwrite)
        except FileExistsError as error:
            raise _exists(destination) from error
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write {destination}: {error.strerror}", remedy="free some space or choose another place"
            ) from error
        return size


def _check_target(destination: Path, overwrite: bool) -> None:
    if destination.is_symlink():
        raise UsageError(f"{destination} is a symbolic link", remedy="name the file that it leads to")
    if is_place_of_open_database(str(destination.resolve())):
        raise UsageError(f"{destination} belongs to the database", remedy="give the name of another file")
    if destination.is_dir():
        raise UsageError(f"{destination} is a folder", remedy="give the name of a file")
    if not destination.absolute().parent.is_dir():
        raise UsageError(f"the folder of {destination} does not exist", remedy="make it first")
    if destination.exists():
        if not destination.is_file():
            raise UsageError(f"{destination} is no regular file", remedy="give the name of a file")
        if belongs_to_open_database(destination.stat()):
            raise UsageError(f"{destination} belongs to the database", remedy="give the name of another file")
        if not overwrite:
            raise _exists(destination)


def _exists(destination: Path) -> ConflictError:
    return ConflictError(f"{destination} exists already", remedy="--overwrite replaces it")


def _damaged(digest: str, how: str) -> CorruptStore:
    return CorruptStore(
        f"the stored bytes of {digest} are {how}",
        remedy="take them from a backup, or run the task again that made them; nothing was written",
    )


# -- inside a transaction ----------------------------------------------------------------------------------------------


def _require_held(tx: Connection, fence: Fence) -> None:
    row = tx.execute(
        "SELECT 1 FROM attempts WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed'",
        (fence.attempt_id, fence.delivery, fence.holder),
    ).fetchone()
    if row is None:
        raise fence.lost()


def _record_sources(tx: Connection, attempt_id: int, sources: Sequence[SourceFile]) -> None:
    # As text: a time in nanoseconds is more than the whole numbers of every JSON reader.
    text = canonical([[item.path, str(item.size_bytes), str(item.modified_ns), str(item.inode)] for item in sources])
    tx.execute("UPDATE attempts SET artifact_sources_json = ? WHERE attempt_id = ?", (text, attempt_id))


def _begin(
    tx: Connection, claim: Claim, effect: EffectEnd | None, sizes: dict[str, int], events: list[Event], now: int
) -> AttemptHeld | StartRefused | None:
    run_id, task_id = claim.run_id, claim.task_id
    if effect is not None:
        overdrawn = effects.end(tx, run_id, task_id, effect, events, now=now)
        if overdrawn is not None:
            return StartRefused("budget", overdrawn)
    estimates = {reservation_id(task_id, path): {DIMENSION: size} for path, size in sizes.items()}
    _release_other_sizes(tx, claim, estimates, events)
    denied = ledger.reserve_together(tx, run_id, task_id, claim.number, estimates, events)
    if denied is None:
        return None
    if denied.pop("wait"):
        units = {DIMENSION: sum(sizes.values())}
        events.append(holds.hold(tx, claim.fence, "budget", task_state="ready", units=units, now=now))
        return AttemptHeld("budget")
    events.append(ledger.record_exceeded(tx, run_id, task_id, denied, "budget.exceeded", now=now))
    return StartRefused("budget", denied)


def _release_other_sizes(
    tx: Connection, claim: Claim, estimates: dict[str, dict[str, int]], events: list[Event]
) -> None:
    """Give back what is reserved for a file that has another size now: a reservation stands for its bytes alone."""
    held = dict(
        all_rows(
            tx.execute(
                "SELECT reservation_id, units FROM budget_reservations WHERE run_id = ? AND dispatch = ? "
                "AND dimension = ? AND state = 'open' AND reservation_id IN (SELECT value FROM json_each(?))",
                (claim.run_id, claim.number, DIMENSION, json.dumps(list(estimates))),
            )
        )
    )
    for name, units in held.items():
        if units != estimates[name][DIMENSION]:
            ledger.release(tx, claim.run_id, claim.task_id, name, claim.number, events)


def _record(
    tx: Connection, claim: Claim, found: Sequence[NewArtifact], events: list[Event], now: int
) -> dict[str, object] | None:
    """Write down what is stored; what that has exceeded, or None."""
    attempt_id = claim.fence.attempt_id
    for item in found:
        tx.execute(
            "INSERT INTO artifact_blobs VALUES (?,?,?) ON CONFLICT DO NOTHING", (item.digest, item.size_bytes, now)
        )
        known = tx.execute("SELECT size_bytes FROM artifact_blobs WHERE digest = ?", (item.digest,)).fetchone()
        if known is None or known[0] != item.size_bytes:
            raise CorruptStore(f"{item.digest} is recorded with another size than {item.size_bytes}")
    # Another delivery of this attempt may have ingested before, and has paid for it.
    paid: dict[str, str] = dict(
        all_rows(tx.execute("SELECT logical_path, digest FROM artifact_ingests WHERE attempt_id = ?", (attempt_id,)))
    )
    if paid and paid != {item.path: item.digest for item in found}:
        raise TaskFault(
            "artifact_changed", "the files of this task are not those that an earlier delivery of it has stored"
        )
    tx.execute("DELETE FROM artifact_ingests WHERE attempt_id = ?", (attempt_id,))
    tx.executemany(
        "INSERT INTO artifact_ingests VALUES (?,?,?,?,?,?,?,?,?)",
        [
            (
                attempt_id,
                item.path,
                claim.run_id,
                claim.task_id,
                item.digest,
                item.size_bytes,
                media_type(item.path),
                PurePosixPath(item.path).name,
                now + LEASE_MS,
            )
            for item in found
        ],
    )
    text = manifest(found)
    overdrawn: dict[str, object] | None = None
    tx.execute("UPDATE attempts SET artifacts_json = ? WHERE attempt_id = ?", (text, attempt_id))
    for item in found:
        if item.path not in paid:
            name = reservation_id(claim.task_id, item.path)
            usage = {DIMENSION: item.size_bytes}
            over = ledger.settle(tx, claim.run_id, claim.task_id, name, claim.number, usage, events, now=now)
            overdrawn = overdrawn or over
    payload = {
        "artifacts": len(found),
        "bytes": sum(item.size_bytes for item in found),
        "manifestDigest": text_digest(text),
    }
    events.append(Event("artifacts.ingested", claim.task_id, canonical(payload)))
    return overdrawn


def commit(
    tx: Connection, run_id: str, first_task: int, committed: Sequence[tuple[int, int, str]], *, now: int
) -> list[list[object]]:
    """Turn the leases of successes into references, and give each task its manifest (architecture 7).

    Returns what the checkpoint tells of it: position and digest of the manifest. Raises `ConflictError` when a lease
    is not what the manifest says.
    """
    told: list[list[object]] = []
    for attempt_id, position, text in committed:
        tx.execute(
            "INSERT INTO artifact_refs (run_id, task_id, logical_path, digest, size_bytes, media_type, logical_name, "
            "created_at) SELECT run_id, task_id, logical_path, digest, size_bytes, media_type, logical_name, ? "
            "FROM artifact_ingests WHERE attempt_id = ?",
            (now, attempt_id),
        )
        if tx.changes() != len(json.loads(text)):
            raise ConflictError(f"attempt {attempt_id} has not ingested what it says", run_id=run_id)
        tx.execute("DELETE FROM artifact_ingests WHERE attempt_id = ?", (attempt_id,))
        tx.execute("UPDATE attempts SET artifact_sources_json = NULL WHERE attempt_id = ?", (attempt_id,))
        tx.execute("UPDATE tasks SET artifact_manifest_json = ? WHERE task_no = ?", (text, first_task + position))
        told.append([position, text_digest(text)])
    return told


def forget_leases(tx: Connection, *, now: int, digest: str | None = None) -> None:
    """Remove leases that protect nothing any more, of one blob or of all: expired, and their attempts are closed."""
    which, values = ("", (now,)) if digest is None else ("digest = ? AND ", (digest, now))
    tx.execute(
        f"DELETE FROM artifact_ingests WHERE {which}expires_at <= ? AND attempt_id IN "  # noqa: S608
        "(SELECT attempt_id FROM attempts WHERE state = 'closed')",
        values,
    )


def release_abandoned(tx: Connection, run_id: str, events: list[Event]) -> None:
    """Give back the bytes that were reserved for attempts which have ended without ingesting.

    Asked with every batch, and answered by one look-up unless bytes of artifacts are reserved.
    """
    held = tx.execute(
        "SELECT reserved FROM budget_lines WHERE run_id = ? AND dimension = ?", (run_id, DIMENSION)
    ).fetchone()
    if held is None or not held[0]:
        return
    for name, dispatch in all_rows(
        tx.execute(
            "SELECT reservation_id, dispatch FROM budget_reservations "
            "WHERE run_id = ? AND state = 'open' AND dimension = ?",
            (run_id, DIMENSION),
        )
    ):
        task_id = str(name).removeprefix("artifact:").rpartition(":")[0]
        live = tx.execute(
            "SELECT 1 FROM tasks t JOIN attempts a ON a.live_task = t.task_no "
            "WHERE t.run_id = ? AND t.task_id = ? AND a.number = ?",
            (run_id, task_id, dispatch),
        ).fetchone()
        if live is None:
            ledger.release(tx, run_id, task_id, name, dispatch, events)


def references(
    tx: Connection, run_id: str | None, task_id: str | None = None, digest: str | None = None
) -> Iterator[dict[str, Any]]:
    """References as records, those of a run, of a task or of a blob, or all."""
    conditions = {"run_id": run_id, "task_id": task_id, "digest": digest}
    given = {name: value for name, value in conditions.items() if value is not None}
    where = "WHERE " + " AND ".join(f"{name} = ?" for name in given) if given else ""
    for row in tx.execute(
        "SELECT run_id, task_id, logical_path, digest, size_bytes, media_type, logical_name, source_run_id, "  # noqa: S608
        f"source_task_id, created_at FROM artifact_refs {where} ORDER BY run_id, task_id, logical_path",
        tuple(given.values()),
    ):
        yield {
            "runId": row[0],
            "taskId": row[1],
            "path": row[2],
            "digest": row[3],
            "sizeBytes": row[4],
            "mediaType": row[5],
            "logicalName": row[6],
            "storePath": store_path(row[3]),
            "sourceRunId": row[7],
            "sourceTaskId": row[8],
            "createdAt": row[9],
        }
