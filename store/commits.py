"""The batch commit: what a driver has decided becomes history in one transaction (architecture 5)."""

from __future__ import annotations

from . import approvals, artifacts, audit, compensations, effects, holds, ledger, runs, seals, task_queue
from .canonical import canonical, text_digest
from .database import Connection, all_rows
from .errors import ConflictError, RunMoved
from .records import Batch, Event, Run
from .states import RUN_FINAL


def commit_batch(
    tx: Connection, run: Run, batch: Batch, *, driver: str, epoch: int, revision: int, now: int
) -> list[tuple[int, str, str]]:
    """Write one batch in compiled order: outputs, memory, failures, enqueued attempts, audit and one checkpoint.

    Raises `RunMoved`, with nothing written, unless epoch and revision are those on which the batch was decided.
    Returns (position, state, error code) of tasks that a stop ended inside this transaction: what was never begun
    becomes `cancelled`, what waits for an unresolved effect becomes `failed`; attempts in flight are left to finish.
    """
    runs.check_driver(tx, run.run_id, driver=driver, epoch=epoch, revision=revision)
    first = run.first_task
    _write_tasks(tx, run, batch, now=now)
    _leave_queue(tx, run, batch.closed, "closed")
    _leave_queue(tx, run, batch.parked, "waiting")
    if batch.superseded:
        effects.supersede(tx, run.run_id, batch.superseded, batch.events, now=now)
    if batch.abandoned:
        effects.abandon(tx, batch.abandoned, batch.events, now=now)
    if batch.memory:
        tx.executemany(
            "INSERT INTO memory_values VALUES (?,?,?,?)",
            [(run.run_id, key, position, value) for key, position, value in batch.memory],
        )
    if batch.enqueues:
        task_queue.enqueue(tx, run.run_id, first, batch.enqueues, now=now)
    if batch.unheld:
        holds.queue(tx, batch.unheld, run.run_id)
    stopped: list[tuple[int, str, int, str]] = []
    if batch.stop is not None:
        stopped = _stop(tx, run, batch, reason=batch.stop, now=now)
    state: dict[str, object] = {}
    if batch.artifacts:
        state["artifacts"] = artifacts.commit(tx, run.run_id, first, batch.artifacts, now=now)
    artifacts.release_abandoned(tx, run.run_id, batch.events)
    changes = batch.changes + [[position, to, attempt, None, code] for position, to, attempt, code in stopped]
    if changes:
        state["tasks"] = changes
    ended = [final[9] for final in batch.finals] + [position for position, *_ in stopped]
    if ended:
        state["seals"] = seals.of_tasks(tx, first, ended)
    if batch.memory:
        state["memory"] = [list(item) for item in batch.memory]
    events = batch.events
    if batch.run_state is not None:
        if batch.run_reason != "deadline_exceeded":  # then that was told, with more words
            events = [*events, ledger.wall_time_observed(run.created_at, now=now)]
        events = [*events, _end_run(tx, run, batch, now)]
        state["state"] = batch.run_state
        state["reason"] = batch.run_reason
        if batch.run_output_json is not None:
            state["output"] = text_digest(batch.run_output_json)
        if batch.run_error_json is not None:
            state["error"] = text_digest(batch.run_error_json)
        if batch.compensation_due:
            events.append(compensations.mark_due(tx, run.run_id, now=now))
    if batch.undone:
        compensations.conclude_batch(tx, run, batch.undone, now=now)
    audit.append(tx, run.run_id, events, actor="coordinator", now=now)
    if state:
        audit.append_checkpoint(tx, run.run_id, canonical(state), now=now)
    return [(position, to, code) for position, to, _, code in stopped]


def _write_tasks(tx: Connection, run: Run, batch: Batch, *, now: int) -> None:
    """The new states of tasks: those that wait for a retry or for a person, are ready, or have ended."""
    first = run.first_task
    # A retry without backoff is due at once: the task waits, and is ready again, within one batch.
    if batch.waits:
        tx.executemany(
            "UPDATE tasks SET state = ?, retry_at = ?, error_json = ?, updated_at = ? WHERE task_no = ?",
            [(state, retry_at, error, now, first + position) for state, retry_at, error, position in batch.waits],
        )
    if batch.readies:
        tx.executemany(
            "UPDATE tasks SET state = 'ready', decision_json = COALESCE(?, decision_json), input_digest = ?, "
            "retry_at = NULL, updated_at = ? "
            "WHERE task_no = ?",
            [(decision, digest, now, first + position) for decision, digest, position in batch.readies],
        )
    if batch.finals:
        before = tx.total_changes()
        tx.executemany(
            "UPDATE tasks SET state = ?, attempt = ?, input_digest = COALESCE(?, input_digest), output_json = ?, "
            "output_digest = ?, error_json = ?, decision_json = COALESCE(?, decision_json), delta_json = ?, "
            "delta_digest = ?, definition_fingerprint = ?, output_contract_fingerprint = ?, retry_at = NULL, "
            "ended_at = ?, updated_at = ? WHERE task_no = ? AND ended_at IS NULL",
            [
                (*final[:9], *batch.proofs.get(final[9], (None, None)), now, now, first + final[9])
                for final in batch.finals
            ],
        )
        if tx.total_changes() - before != len(batch.finals):
            raise ConflictError("a task of this batch has ended already", run_id=run.run_id)


def _leave_queue(tx: Connection, run: Run, attempt_ids: list[int], state: str) -> None:
    """Finished attempts whose outcome this batch takes over are `closed`, or `waiting` for what a person concludes.

    Raises `RunMoved` when one is not finished any more.
    """
    if not attempt_ids:
        return
    before = tx.total_changes()
    tx.executemany(
        "UPDATE attempts SET state = ?1, queue = NULL, live_task = CASE WHEN ?1 <> 'closed' THEN live_task END "
        "WHERE attempt_id = ?2 AND state = 'finished'",
        [(state, attempt_id) for attempt_id in attempt_ids],
    )
    if tx.total_changes() - before != len(attempt_ids):
        raise RunMoved("an attempt of this batch is no longer finished", run_id=run.run_id)


_NOTHING_FINISHED = (
    "AND NOT EXISTS (SELECT 1 FROM attempts f WHERE f.live_task = tasks.task_no AND f.state = 'finished')"
)
"""A person may have answered for a task that waits: that result is committed, not thrown away."""


def _stop(tx: Connection, run: Run, batch: Batch, *, reason: str, now: int) -> list[tuple[int, str, int, str]]:
    """End everything that has not begun. Runs inside the transaction, since a worker may claim until it begins."""
    first, last = run.first_task, run.first_task + run.task_count - 1
    # Before the attempts are closed, since these are what it looks for.
    effects.stop(tx, first, last, batch.events, reason=reason, now=now)
    tx.execute(
        "UPDATE attempts SET state = 'closed', queue = NULL, live_task = NULL, hold = NULL, hold_json = NULL, "
        "outcome = COALESCE(outcome, 'cancelled') "
        "WHERE live_task BETWEEN ? AND ? AND state IN ('ready', 'waiting')",
        (first, last),
    )
    batch.events.extend(approvals.cancel_pending(tx, run.run_id, now=now))
    if reason == "deadline_exceeded":
        batch.events.append(_wall_time_exceeded(tx, run, now))
    error = canonical({"code": reason, "message": f"not executed: {reason}", "retryable": False})
    ended: list[tuple[int, str, int, str]] = []
    # What waits for something that began is failed; at a deadline also what waits for a person (contract 4.8).
    waiting = {"cancel_requested": (), "deadline_exceeded": ("waiting_for_effect", "waiting_for_approval")}.get(
        reason, ("waiting_for_effect",)
    )
    for origin in waiting:
        code = "uncertain_effect" if origin == "waiting_for_effect" else reason
        unresolved = tx.execute(
            "UPDATE tasks SET state = 'failed', ended_at = ?, updated_at = ?, "  # noqa: S608
            "error_json = COALESCE(error_json, ?) "
            f"WHERE task_no BETWEEN ? AND ? AND state = ? {_NOTHING_FINISHED} RETURNING task_no, task_id, attempt",
            (now, now, error, first, last, origin),
        )
        for task_no, task_id, attempt in all_rows(unresolved):
            ended.append((task_no - first, "failed", attempt, code))
            payload = canonical({"from": origin, "to": "failed"})
            batch.events.append(Event("task.transition", task_id, payload))
    untouched = tx.execute(
        "UPDATE tasks SET state = 'cancelled', ended_at = ?, updated_at = ?, retry_at = NULL, "  # noqa: S608
        "error_json = COALESCE(error_json, ?) "
        f"WHERE task_no BETWEEN ? AND ? AND ended_at IS NULL AND state <> 'running' {_NOTHING_FINISHED} "
        "RETURNING task_no, task_id, attempt",
        (now, now, error, first, last),
    )
    for task_no, task_id, attempt in all_rows(untouched):
        ended.append((task_no - first, "cancelled", attempt, reason))
        batch.events.append(Event("task.transition", task_id, f'{{"reason":{canonical(reason)},"to":"cancelled"}}'))
    ended.sort()
    return ended


def _wall_time_exceeded(tx: Connection, run: Run, now: int) -> Event:
    line = tx.execute(
        "SELECT limit_units FROM budget_lines WHERE run_id = ? AND dimension = 'wallTimeSeconds'", (run.run_id,)
    ).fetchone()
    spent = ledger.seconds_since(run.created_at, now)
    detail: dict[str, object] = {"dimension": "wallTimeSeconds", "limit": line and line[0], "attempted": spent}
    return ledger.record_exceeded(tx, run.run_id, None, detail, "budget.wall_time_exceeded", now=now)


def _end_run(tx: Connection, run: Run, batch: Batch, now: int) -> Event:
    final = batch.run_state in RUN_FINAL
    tx.execute(
        "UPDATE runs SET state = ?, reason = ?, error_json = ?, driver = NULL, driver_lease_expires_at = NULL, "
        "updated_at = ?, ended_at = ? WHERE run_id = ?",
        (batch.run_state, batch.run_reason, batch.run_error_json, now, now if final else None, run.run_id),
    )
    tx.execute("DELETE FROM turns WHERE run_id = ?", (run.run_id,))
    if batch.run_output_json is not None:
        tx.execute("INSERT OR REPLACE INTO run_outputs VALUES (?,?)", (run.run_id, batch.run_output_json))
    payload = {"from": "running", "to": batch.run_state, "reason": batch.run_reason}
    return Event("run.state", None, canonical(payload))
