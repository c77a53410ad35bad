"""Artifacts without a worker: ingestion step by step, litter for collections, and what must never be found."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from agentctl.store.artifacts import Artifacts
from agentctl.store.blobs import Blobs, Staged
from agentctl.store.collection import Collector
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import AttemptHeld, Claim, EffectEnd, StartRefused

HOUR = 3600.0


def digest_of(data: bytes) -> str:
    """The name of these bytes."""
    return "sha256:" + sha256(data).hexdigest()


def stage(store: Store, files: Mapping[str, bytes]) -> list[tuple[str, Staged]]:
    """Files as a worker has copied them, before anybody else can see them."""
    return [(path, store.artifacts.blobs.stage_bytes(data)) for path, data in files.items()]


def ingest(
    store: Store, claim: Claim, files: Mapping[str, bytes], effect: EffectEnd | None = None
) -> AttemptHeld | StartRefused | None:
    """What a worker does after the effect of an attempt has succeeded."""
    answer = store.artifacts.begin(claim, effect, {path: len(data) for path, data in files.items()})
    if answer is None:
        store.artifacts.keep(claim, stage(store, files), Faults(None))
    return answer


def collect(store: Store, *, older_than_ms: int = 0, dry_run: bool = False, fault: str | None = None) -> dict[str, Any]:
    """A collection."""
    collector = Collector(store.database, store.artifacts, store.clock, Faults(fault))
    return collector.collect(older_than_ms=older_than_ms, dry_run=dry_run)


def litter(store: Store, *contents: bytes) -> list[str]:
    """Blobs that nothing refers to, as those of a run that was removed."""
    made = []
    with store.artifacts.blobs.locked():
        for data in contents:
            staged = store.artifacts.blobs.stage_bytes(data)
            store.artifacts.blobs.place(staged)
            with store.database.write() as tx:
                tx.execute(
                    "INSERT INTO artifact_blobs VALUES (?,?,?) ON CONFLICT DO NOTHING",
                    (staged.digest, staged.size, store.clock.now()),
                )
            made.append(staged.digest)
    return made


def files_of(store: Store) -> set[str]:
    """The digests that have a file, by its name."""
    return {digest for digest, _ in store.artifacts.blobs.stored()}


def assert_sound(artifacts: Artifacts) -> None:
    """Every row has its bytes, every file holds what its name says, and nothing half-done lies about."""
    report = artifacts.verify(None)
    assert (report["missing"], report["corrupt"]) == ([], [])
    assert_files_sound(artifacts.blobs)
    assert artifacts.blobs.trashed() == []
    assert artifacts.blobs.temporary() == []


def assert_files_sound(blobs: Blobs) -> None:
    """Every file under `sha256/` holds what its name says, and cannot be written by accident."""
    for digest, status in blobs.stored():
        assert blobs.check(digest, None) == "ok", digest
        assert status.st_mode & 0o777 == 0o400


def names_in(folder: Path) -> list[str]:
    """Names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())
