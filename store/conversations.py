"""Conversations with models: tool calls, provider sessions and the events of streamed answers (seed; contract 10).

A tool call and its effect are two rows of one fact, so whoever moves the one moves the other in the same transaction.
Every function takes the open transaction.
"""

from __future__ import annotations

from typing import Any

from .approvals import redacted
from .canonical import canonical, hex_digest, text_digest
from .database import Connection
from .records import PROVIDER_SESSION_FORMAT_VERSION, STREAM_EVENT_FORMAT_VERSION, EffectRequest, Fence, SessionUpdate

MAX_EVENTS = 256
"""Most events of one attempt; the last one says that there were more (contract 11.3)."""

MAX_EVENT_BYTES = 4096
"""Largest payload of one event (contract 11.3)."""

PREFIX = "tool."
"""Operations of tool calls are this and the name of the tool (contract 5.1)."""


def begin_call(tx: Connection, request: EffectRequest, run_id: str, task_id: str, *, now: int) -> None:
    """The effect of a tool call starts, for the first time or again."""
    call = request.tool_call
    if call is None:
        return
    tx.execute(
        "INSERT INTO tool_calls (run_id, effect_id, call_id, task_id, tool_id, input_digest, status, created_at) "
        "VALUES (?,?,?,?,?,?,'started',?)",
        (run_id, request.effect_id, call.call_id, task_id, call.tool_id, call.input_digest, now),
    )


def end_call(
    tx: Connection, run_id: str, effect_id: str, operation: str, status: str, result_json: str | None, *, now: int
) -> None:
    """The effect of a tool call has ended as `status`; other operations are left alone."""
    if not operation.startswith(PREFIX):
        return
    digest = text_digest(result_json) if status == "succeeded" and result_json is not None else None
    tx.execute(
        "UPDATE tool_calls SET status = ?, output_digest = ?, completed_at = ? WHERE run_id = ? AND effect_id = ?",
        (status, digest, now, run_id, effect_id),
    )


def forget_call(tx: Connection, run_id: str, effect_id: str, operation: str) -> None:
    """The effect of a tool call is `requested` again, or was never sent: then there is no call."""
    if operation.startswith(PREFIX):
        tx.execute("DELETE FROM tool_calls WHERE run_id = ? AND effect_id = ?", (run_id, effect_id))


def put_session(tx: Connection, run_id: str, task_id: str, effect_id: str, session: SessionUpdate, *, now: int) -> None:
    """Remember where the conversation of a task stands. The confirmation of the answer belongs to the transaction."""
    tx.execute(
        "INSERT INTO provider_sessions (run_id, task_id, format_version, provider, attempt, effect_id, "
        "continuation_json, updated_at) VALUES (?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET "
        "provider = excluded.provider, attempt = excluded.attempt, effect_id = excluded.effect_id, "
        "continuation_json = excluded.continuation_json, updated_at = excluded.updated_at",
        (
            run_id,
            task_id,
            PROVIDER_SESSION_FORMAT_VERSION,
            session.provider,
            session.attempt,
            effect_id,
            session.continuation_json,
            now,
        ),
    )


def append_event(tx: Connection, fence: Fence, effect_id: str, event: dict[str, Any], *, now: int) -> bool:
    """Store the next event of a streamed answer; False when the attempt has all the events that it may have.

    `event` has a `type`; the rest is its payload, stored without secrets and bounded. Raises `LeaseLost`.
    """
    row = tx.execute(
        "SELECT run_id, task_id, number FROM attempts "
        "WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed'",
        (fence.attempt_id, fence.delivery, fence.holder),
    ).fetchone()
    if row is None:
        raise fence.lost()
    last = tx.execute(
        "SELECT COALESCE(MAX(sequence), 0) FROM stream_events WHERE run_id = ? AND task_id = ? AND attempt = ?", row
    ).fetchone()
    sequence = (last[0] if last else 0) + 1
    if sequence > MAX_EVENTS:
        return False
    kind = str(event.get("type", "event"))
    payload = _bounded({name: value for name, value in event.items() if name != "type"})
    if sequence == MAX_EVENTS:
        kind, payload = "stream.truncated", canonical({"reason": "event_limit", "maxEvents": MAX_EVENTS})
    tx.execute(
        "INSERT INTO stream_events (run_id, task_id, attempt, sequence, format_version, effect_id, event_type, "
        "payload_json, created_at) VALUES (?,?,?,?,?,?,?,?,?)",
        (*row, sequence, STREAM_EVENT_FORMAT_VERSION, effect_id, kind, payload, now),
    )
    return True


def _bounded(payload: dict[str, Any]) -> str:
    text = canonical(redacted(payload))
    size = len(text.encode("utf-8"))
    if size <= MAX_EVENT_BYTES:
        return text
    return canonical({"truncated": True, "originalBytes": size, "sha256": hex_digest(text)})


def request_number(tx: Connection, effect_id: str) -> int:
    """Which request of its run to its provider a model effect is, counted from 1 in the order of their rows."""
    row = tx.execute(
        "SELECT COUNT(*) FROM effects m JOIN runs r ON r.run_id = m.run_id "
        "JOIN attempts a ON a.task_no BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
        "JOIN effects e ON e.attempt_id = a.attempt_id AND e.operation = m.operation AND e.effect_class = 'model' "
        "AND e.effect_no <= m.effect_no WHERE m.effect_id = ?",
        (effect_id,),
    ).fetchone()
    return int(row[0]) if row else 0
