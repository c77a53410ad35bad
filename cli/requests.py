"""What one process asks of those that drive a run: to cancel it, to pause it. Little is imported before it is asked."""

from __future__ import annotations

import contextlib

from agentctl.store import process_identity
from agentctl.store.engine import Store
from agentctl.store.process_identity import Liveness
from agentctl.store.records import ProcessRow, Run
from agentctl.store.timing import Timing

CANCEL_PATIENCE_SECONDS = 15.0
PAUSE_PATIENCE_SECONDS = 1.0


def is_alive(row: ProcessRow) -> bool:
    """Whether a process row stands for a process that is not provably dead."""
    return process_identity.liveness_of(row.identity) is not Liveness.DEAD


def coordinator_is_live(store: Store, heard_since: int = 0) -> bool:
    """Whether a coordinator is there that adopts runs, and was heard since then (epoch ms)."""
    return any(row.heartbeat_at >= heard_since and is_alive(row) for row in store.live_processes("coordinator"))


def cancel_run(store: Store, run_id: str, *, reason: str, actor: str) -> tuple[bool, str]:
    """Cancel a run: set the durable flag, call everybody, and finish the job when nobody else is alive to do it.

    Returns (requested, state). Raises `NotFoundError`.
    """
    requested, state = store.request_cancel(run_id, reason=reason, actor=actor)
    if not requested:
        return False, state
    store.wake_everybody()
    run = store.get_run(run_id)
    if run.ended_at is None and not _somebody_drives(store, run):
        _finish(store, run, resume=True, patience=CANCEL_PATIENCE_SECONDS)
    return True, store.get_run(run_id).state


def pause_run(store: Store, run_id: str, *, reason: str, actor: str) -> tuple[str, str | None]:
    """Ask a run to pause, and see to it when nobody else is alive to do it. Returns (state, reason of the state).

    Raises `NotFoundError`, `AlreadyTerminal`, and `ConflictError` for a run that is being cancelled.
    """
    state, why = store.request_pause(run_id, reason=reason, actor=actor)
    if state == "running":
        store.wake_driver(run_id)
        run = store.get_run(run_id)
        if not _somebody_drives(store, run):
            _finish(store, run, resume=False, patience=PAUSE_PATIENCE_SECONDS)
        run = store.get_run(run_id)
        state, why = run.state, run.reason
    return state, why


def _finish(store: Store, run: Run, *, resume: bool, patience: float) -> None:
    from .pool import finish_request  # only here: its import takes longer than the request itself

    with contextlib.suppress(KeyboardInterrupt):  # it is asked for; whoever comes next sees to it
        finish_request(store, run, resume=resume, patience=patience)


def _somebody_drives(store: Store, run: Run) -> bool:
    """Whether somebody is there to finish a cancellation. Who has been silent for lease and grace does not count."""
    if run.state == "paused":
        return False
    timing = Timing.from_environment()
    heard_since = store.clock.now() - int((timing.lease + timing.grace) * 1000)
    if run.driver is not None:
        row = store.get_process(run.driver)
        if row is not None and row.stopped_at is None and row.heartbeat_at >= heard_since and is_alive(row):
            return True
    return coordinator_is_live(store, heard_since)
