"""From a succeeded effect to stored artifacts: what happens between the execution of a task and its end (seed).

The effect is confirmed first, in the transaction that reserves the bytes and writes down how the files are. So a worker
that dies while it copies leaves nothing in doubt: the next delivery finds the result recorded and only ingests again,
those files and no others; one that has changed meanwhile fails the task instead of being kept as its result. A store
that cannot take the bytes now (a full disk, a lock that nobody lets go) is no fault of the task: its run pauses. Files
are copied, hashed and synced without any lock; the lock is held for names and rows alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from agentctl.store.blobs import Interrupted, Staged
from agentctl.store.engine import Store
from agentctl.store.errors import EnvironmentFault, LockHeld, TaskFault
from agentctl.store.faults import Faults
from agentctl.store.records import AttemptHeld, Claim, EffectEnd, SourceFile, StartRefused

from .effects import CancelToken, Declared, Keeps, Several, Written
from .effects.artifacts import Found, as_recorded, find, open_found, require_unchanged
from .redaction import holds_secret


@dataclass(frozen=True, slots=True)
class Ingested:
    """How it went. `answer` ends the delivery instead (budget); `fault` fails the attempt; `stopped` is the reason of
    the cancel token; `obstacle` is why the store cannot take the bytes now. With `confirmed` the end of the effect is
    recorded already."""

    confirmed: bool
    answer: AttemptHeld | StartRefused | None = None
    fault: TaskFault | None = None
    stopped: str | None = None
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """One artifact to be: its size is known before it is opened. `file` is how it is, if it is a file."""

    path: str
    size: int
    stage: Callable[[], Staged]
    file: SourceFile | None = None


class Ingestion:
    """Ingests for one worker."""

    def __init__(self, store: Store, faults: Faults, token: CancelToken, moves: Callable[[], None]) -> None:
        """`moves` is called again and again while bytes are read: however long that takes, it is no hang."""
        self._store = store
        self._artifacts = store.artifacts
        self._faults = faults
        self._token = token
        self._moves = moves

    def run(self, claim: Claim, keeps: Keeps, effect: EffectEnd | None, limit: int) -> Ingested:
        """Store what is to be kept. `effect` is the end of the effect, unless it is recorded; `limit` the largest size.

        Raises `LeaseLost`, and what the database raises.
        """
        known: list[SourceFile] = []
        if effect is None:
            known, stored = self._artifacts.recorded(claim.fence.attempt_id)
            if stored:
                return Ingested(True)
        try:
            sources = self._sources(keeps, limit, known)
        except TaskFault as fault:
            return Ingested(False, fault=fault)
        if not sources:
            return Ingested(False)
        answer = self._artifacts.begin(
            claim,
            effect,
            {source.path: source.size for source in sources},
            [source.file for source in sources if source.file is not None],
        )
        if answer is not None:
            return Ingested(True, answer=answer)
        staged: list[tuple[str, Staged]] = []
        try:
            for source in sources:
                staged.append((source.path, source.stage()))
            self._faults.reach("after_staging")
            overdrawn = self._artifacts.keep(claim, staged, self._faults)
        except Interrupted:
            self._give_up(claim, sources, staged)
            return Ingested(True, stopped=self._token.reason)
        except TaskFault as fault:
            self._give_up(claim, sources, staged)
            return Ingested(True, fault=fault)
        except (OSError, LockHeld, EnvironmentFault) as error:
            self._give_up(claim, sources, staged)
            return Ingested(True, obstacle=_obstacle(claim, error))
        finally:
            self._discard(staged)
        self._faults.reach("after_ingestion")
        return Ingested(True, answer=overdrawn)

    def _stopped(self) -> bool:
        self._moves()
        return self._token.cancelled

    def _discard(self, staged: list[tuple[str, Staged]]) -> None:
        for _, item in staged:
            self._artifacts.blobs.discard(item.path)

    def _give_up(self, claim: Claim, sources: list[_Source], staged: list[tuple[str, Staged]]) -> None:
        # The copies go first: on a full disk they are what leaves no room for the database.
        self._discard(staged)
        self._artifacts.give_up(claim, [source.path for source in sources])

    def _sources(self, keeps: Keeps, limit: int, known: list[SourceFile]) -> list[_Source]:
        """What is to be kept. `known` are the files that an earlier delivery has found: those, and no others."""
        if isinstance(keeps, Several):
            # What was written last is what is there; and what was found before stands for all that was declared.
            declared = [part for part in keeps.parts if isinstance(part, Declared)]
            latest: dict[str, _Source] = {}
            for part in keeps.parts:
                if not known or isinstance(part, Written) or part is declared[0]:
                    latest.update((source.path, source) for source in self._sources(part, limit, known))
            return list(latest.values())
        if isinstance(keeps, Written):
            data = keeps.data
            found = [_Source(keeps.path, len(data), lambda: self._artifacts.blobs.stage_bytes(data))]
        else:
            files = [as_recorded(item, keeps) for item in known] if known else find(keeps)
            found = [
                _Source(
                    item.path,
                    item.size,
                    self._copying(item, keeps),
                    SourceFile(item.path, item.size, item.modified, item.inode),
                )
                for item in files
            ]
        for source in found:
            if source.size > limit:
                raise TaskFault(
                    "artifact_too_large",
                    f"{source.path!r} has {source.size} bytes; policy.maxArtifactBytes allows {limit}",
                    details={"path": source.path, "bytes": source.size, "limit": limit},
                )
        return found

    def _copying(self, item: Found, declared: Declared) -> Callable[[], Staged]:
        def stage() -> Staged:
            descriptor = open_found(item, declared)
            try:
                if holds_secret(descriptor, item.size, self._stopped):
                    raise TaskFault("artifact_secret", "it holds a secret of this run, and nothing keeps a copy of one")
                staged = self._artifacts.blobs.stage_file(descriptor, item.size, self._stopped)
            except TaskFault as fault:
                raise TaskFault(fault.code, f"{item.path!r}: {fault.args[0]}", details={"path": item.path}) from fault
            else:
                return self._unless_changed(item, descriptor, staged)
            finally:
                os.close(descriptor)

        return stage

    def _unless_changed(self, item: Found, descriptor: int, staged: Staged) -> Staged:
        """A copy that somebody has written into while it was made is a mixture: it is thrown away."""
        try:
            require_unchanged(item, os.fstat(descriptor))
        except TaskFault:
            self._artifacts.blobs.discard(staged.path)
            raise
        return staged


def _obstacle(claim: Claim, error: OSError | LockHeld | EnvironmentFault) -> str:
    """Why the store cannot take the bytes now, and what a person can do; kept as the reason of the pause."""
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = error.filename2 or error.filename
        why = f"{error.strerror} ({where})" if where else str(error.strerror)
        remedy = "free some space" if full else "see to the folder of artifacts"
    else:
        why, remedy = error.message, error.remedy or "see to the folder of artifacts"
    return (
        f"the artifacts of {claim.task_id} could not be stored: {why}; its effect has succeeded and is recorded, its "
        f"files stay where they are: {remedy}, then `agentctl resume {claim.run_id}` stores them"
    )
