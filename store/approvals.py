"""Approvals: a durable question to a person about exactly one action (contract 4.7). Transactions are the caller's.

The question is recorded together with the effect that waits for it, so it is answered whoever has died meanwhile. It is
bound to a digest of the action and decided once: of two shells that answer at one instant the second is told who was
first.
"""

from __future__ import annotations

from typing import Any

from . import audit, holds, runs
from .canonical import canonical, loads, text_digest
from .database import Connection, all_rows
from .errors import ConflictError, IncompatibleVersion, NotFoundError
from .records import APPROVAL_FORMAT_VERSION, AttemptHeld, EffectRequest, Event, Fence

SECRET_KEYS = frozenset({"authorization", "api_key", "apikey", "token", "secret", "password"})
REDACTED = "[REDACTED]"


def redacted(value: Any) -> Any:
    """A JSON value with everything under a key that names a secret replaced (contract 11.2)."""
    if isinstance(value, dict):
        return {key: REDACTED if key.lower() in SECRET_KEYS else redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item) for item in value]
    return value


def approval_id_of(effect_id: str) -> str:
    """`approval-` and the first 16 hex digits of the effect's id (contract 4.7)."""
    return f"approval-{effect_id[:16]}"


def action_digest(request: EffectRequest) -> str:
    """What an approval is bound to: the effect's identity, and all that decides what is done."""
    return text_digest(
        canonical(
            [
                request.effect_id,
                request.operation,
                request.effect_class,
                request.risk,
                request.idempotency,
                request.input_digest,
                request.expected_json,
            ]
        )
    )


def ask(
    tx: Connection,
    fence: Fence,
    request: EffectRequest,
    run_id: str,
    task_id: str,
    trace_id: str,
    events: list[Event],
    *,
    now: int,
) -> AttemptHeld:
    """Record the question, hold the attempt, and free the worker. The effect's row was written in this transaction."""
    asked = request.approval
    assert asked is not None
    approval_id = approval_id_of(request.effect_id)
    tx.execute(
        "INSERT INTO approvals (approval_id, format_version, run_id, effect_id, attempt_id, task_id, agent, tool, "
        "capability, risk, action_digest, redacted_input_json, expected_json, reason, trace_id, requested_at, status) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,'pending')",
        (
            approval_id,
            APPROVAL_FORMAT_VERSION,
            run_id,
            request.effect_id,
            fence.attempt_id,
            task_id,
            asked.agent,
            asked.tool,
            asked.capability,
            request.risk,
            action_digest(request),
            asked.redacted_json,
            canonical(redacted(loads(request.expected_json))),
            asked.reason,
            trace_id,
            now,
        ),
    )
    payload = {"approvalId": approval_id, "effectId": request.effect_id, "reason": asked.reason}
    events.append(Event("approval.requested", task_id, canonical(payload)))
    events.append(holds.hold(tx, fence, "approval", task_state="waiting_for_approval", units=None, now=now))
    position, number = _place(tx, fence.attempt_id)
    state = {
        "approvals": {approval_id: "pending"},
        "tasks": [[position, "waiting_for_approval", number, None, "approval_required"]],
    }
    audit.append_checkpoint(tx, run_id, canonical(state), now=now)
    return AttemptHeld("approval", approval_id)


def require(tx: Connection, request: EffectRequest, run_id: str) -> None:
    """Raise `ConflictError` unless a person has approved exactly this action."""
    row = tx.execute("SELECT status, action_digest FROM approvals WHERE effect_id = ?", (request.effect_id,)).fetchone()
    if row is None or row[0] != "approved":
        raise ConflictError(f"effect {request.effect_id[:12]} was never approved; it is not sent", run_id=run_id)
    if row[1] != action_digest(request):
        raise ConflictError(
            f"effect {request.effect_id[:12]} is not the action that was approved; it is not sent", run_id=run_id
        )


def resolve(
    tx: Connection, approval_id: str, *, approve: bool, actor: str, reason: str, now: int
) -> tuple[str, str | None]:
    """Decide a question; (run id, its driver). Raises `NotFoundError`, and `ConflictError` for one that is decided.

    Approved: the same attempt goes on as soon as it gets a place. Rejected: its task fails. A run that was paused for
    want of this answer is `running` again and waits for a driver.
    """
    row = tx.execute(
        "SELECT run_id, effect_id, attempt_id, task_id, status, resolved_by, resolved_at, resolution_reason, "
        "format_version FROM approvals WHERE approval_id = ?",
        (approval_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(
            f"there is no approval {approval_id} in this database", remedy="`agentctl approvals list` shows them"
        )
    run_id, effect_id, attempt_id, task_id, status, resolved_by, _, why, version = row
    if version > APPROVAL_FORMAT_VERSION:
        raise IncompatibleVersion(f"approval {approval_id} has format {version}; upgrade agentctl", run_id=run_id)
    run = runs.get(tx, run_id)
    runs.refuse_future_records(tx, run_id)
    if status != "pending":
        because = f": {why}" if why else ""
        raise ConflictError(
            f"{approval_id} was {status} by {resolved_by} before{because}; that stands",
            remedy=f"`agentctl approvals list {run_id} --all` shows the decision",
            run_id=run_id,
        )
    if run.ended_at is not None or run.cancel_requested_at is not None:
        raise ConflictError(f"{run_id} has ended or is being cancelled; nothing of it starts any more", run_id=run_id)
    word = "approved" if approve else "rejected"
    tx.execute(
        "UPDATE approvals SET status = ?, resolved_at = ?, resolved_by = ?, resolution_reason = ? "
        "WHERE approval_id = ? AND status = 'pending'",
        (word, now, actor, reason, approval_id),
    )
    payload = {"approvalId": approval_id, "effectId": effect_id, "reason": reason}
    events = [Event(f"approval.{word}", task_id, canonical(payload))]
    state: dict[str, Any] = {"approvals": {approval_id: word}}
    position, number = _place(tx, attempt_id)
    if approve:
        tx.execute("UPDATE effects SET status = 'requested' WHERE effect_id = ?", (effect_id,))
        if not holds.let_go(tx, attempt_id, "approval"):
            raise ConflictError(f"the attempt of {approval_id} does not wait any more", run_id=run_id)
        tx.execute(
            "UPDATE tasks SET state = 'ready', updated_at = ? WHERE task_no = ?", (now, run.first_task + position)
        )
        events.append(Event("task.transition", task_id, '{"from":"waiting_for_approval","to":"ready"}'))
        state["tasks"] = [[position, "ready", number, None, None]]
    else:
        tx.execute("UPDATE effects SET status = 'cancelled', completed_at = ? WHERE effect_id = ?", (now, effect_id))
        events.append(Event("effect.cancelled", task_id, canonical({"effectId": effect_id, "reason": "rejected"})))
        message = f"{actor} rejected it" + (f": {reason}" if reason else "")
        error = canonical({"code": "approval_rejected", "message": message, "retryable": False})
        tx.execute(
            "UPDATE attempts SET state = 'finished', queue = 'finished', hold = NULL, outcome = 'failed', "
            "error_json = ?, finished_at = ? WHERE attempt_id = ? AND hold = 'approval'",
            (error, now, attempt_id),
        )
        if tx.changes() != 1:
            raise ConflictError(f"the attempt of {approval_id} does not wait any more", run_id=run_id)
    if runs.go_on(tx, run, events, now=now):
        state["state"] = "running"
    driver = audit.append(tx, run_id, events, actor=actor, now=now)
    audit.append_checkpoint(tx, run_id, canonical(state), now=now)
    return run_id, driver


def cancel_pending(tx: Connection, run_id: str, *, now: int) -> list[Event]:
    """Nobody needs an answer any more: the run ends. Returns the events."""
    rows = all_rows(
        tx.execute(
            "UPDATE approvals SET status = 'cancelled', resolved_at = ?, resolved_by = 'runtime' "
            "WHERE run_id = ? AND status = 'pending' RETURNING approval_id, task_id",
            (now, run_id),
        )
    )
    return [
        Event("approval.cancelled", task_id, canonical({"approvalId": approval_id})) for approval_id, task_id in rows
    ]


def _place(tx: Connection, attempt_id: int) -> tuple[int, int]:
    """(position, number) of an attempt."""
    row = tx.execute(
        "SELECT a.task_no - r.first_task, a.number FROM attempts a JOIN runs r USING (run_id) WHERE a.attempt_id = ?",
        (attempt_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no attempt {attempt_id}")
    return int(row[0]), int(row[1])
