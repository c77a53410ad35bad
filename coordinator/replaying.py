"""Replay: what a run has recorded, once more as a run of its own (contract 9.5). It decides and calls nothing."""

from __future__ import annotations

from agentctl.store.clock import IdSource
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.replays import Replays


def verify_source(store: Store, source_id: str) -> None:
    """Raise what a replay of this run would be refused with; nothing is written. Errors as for `replay`."""
    Replays(store.database, store.artifacts, store.clock).verified(source_id)


def replay(store: Store, source_id: str, ids: IdSource, *, actor: str, faults: Faults) -> str:
    """Make the replay of a run that has ended; its id. One durable transaction.

    Raises `NotFoundError`, `NotTerminal`, `IncompatibleVersion`, `RunMoved`, and `CorruptStore` for a source that is
    not what it says: then nothing was made. Long-term memory, the workspace and everything else outside stay as they
    are.
    """
    run_id = ids.new_id("replay")
    faults.reach("before_replay")
    Replays(store.database, store.artifacts, store.clock).create(source_id, run_id, ids.new_id("trace"), actor=actor)
    faults.reach("after_replay")
    return run_id
