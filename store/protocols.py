"""Sessions and calls of remote protocols (MCP, A2A; contract 12.5, 12.6). Every function takes the open transaction.

An effect tells what it knows of the remote side while it runs: before something is sent, as soon as a remote task has
a name, and with its end. The fence decides who may tell, as with every word of a worker. Each change is an audit event
that names a digest of what was written, so that a damaged row is found.
"""

from __future__ import annotations

import json
from typing import Any

from .canonical import canonical, text_digest
from .database import Connection, all_rows
from .errors import ConflictError, IncompatibleVersion
from .records import PROTOCOL_CALL_VERSION, PROTOCOL_SESSION_VERSION, Event, Fence, ProtocolNote

OPEN = ("prepared", "submitting", "polling", "cancellation_requested")
"""Statuses of a call that has not ended."""


def tell(tx: Connection, fence: Fence, effect_id: str, note: ProtocolNote, *, now: int) -> tuple[str, list[Event]]:
    """Write down what a started effect knows by now; (run id, audit events). Raises `LeaseLost` when the fence does
    not hold, or when the effect is no longer in flight."""
    row = tx.execute(
        "SELECT a.run_id, a.task_id FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id AND e.effect_id = ? "
        "WHERE a.attempt_id = ? AND a.state = 'claimed' AND a.delivery = ? AND a.holder = ? AND e.status = 'started'",
        (effect_id, fence.attempt_id, fence.delivery, fence.holder),
    ).fetchone()
    if row is None:
        raise fence.lost()
    events: list[Event] = []
    write(tx, row[0], row[1], effect_id, note, events, now=now)
    return row[0], events


def write(
    tx: Connection, run_id: str, task_id: str, effect_id: str, note: ProtocolNote, events: list[Event], *, now: int
) -> None:
    """Write a call, and the session that was made for it, if one was. The guard is the caller's.

    Raises `ConflictError` when the effect has called something else before, and `IncompatibleVersion`.
    """
    if note.session_json is not None:
        _session(tx, run_id, task_id, note, events, now)
    row = tx.execute(
        "INSERT INTO protocol_calls VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (effect_id) DO UPDATE SET "
        "status = excluded.status, state_json = excluded.state_json, updated_at = excluded.updated_at "
        "WHERE call_identity = excluded.call_identity AND format_version <= ? RETURNING effect_id",
        (
            effect_id,
            PROTOCOL_CALL_VERSION,
            run_id,
            task_id,
            note.protocol,
            note.peer,
            note.call_identity,
            note.status,
            note.state_json,
            now,
            now,
            PROTOCOL_CALL_VERSION,
        ),
    ).fetchone()
    if row is None:
        raise ConflictError(f"the call of effect {effect_id[:12]} is about something else", run_id=run_id)
    events.append(_told(task_id, effect_id, note.protocol, note.status, note.state_json))


def _session(tx: Connection, run_id: str, task_id: str, note: ProtocolNote, events: list[Event], now: int) -> None:
    row = tx.execute(
        "INSERT INTO protocol_sessions VALUES (?,?,?,?,?,'initialized',1,?,?,?) "
        "ON CONFLICT (run_id, task_id, protocol) DO UPDATE SET status = 'reinitialized', peer = excluded.peer, "
        "generation = generation + 1, state_json = excluded.state_json, updated_at = excluded.updated_at "
        "WHERE format_version <= ? RETURNING status, generation",
        (
            run_id,
            task_id,
            note.protocol,
            PROTOCOL_SESSION_VERSION,
            note.peer,
            note.session_json,
            now,
            now,
            PROTOCOL_SESSION_VERSION,
        ),
    ).fetchone()
    if row is None:
        raise IncompatibleVersion(f"the session of {task_id} was written by a newer agentctl", run_id=run_id)
    assert note.session_json is not None
    events.append(_session_told(task_id, note.protocol, row[0], row[1], note.session_json))


def lost(tx: Connection, effect_id: str, task_id: str, *, now: int) -> list[Event]:
    """Whoever carried out this effect is gone: its call, if it has one that is open, is uncertain from now on.

    One that was being submitted may have arrived or not: nobody knows a remote task that could be asked.
    """
    row = tx.execute(
        "SELECT protocol, status, state_json FROM protocol_calls WHERE effect_id = ? AND format_version <= ?",
        (effect_id, PROTOCOL_CALL_VERSION),
    ).fetchone()
    if row is None or row[1] not in OPEN:
        return []
    state = json.loads(row[2])
    if row[0] == "a2a":
        state["submissionAmbiguous"] = state.get("remoteTaskId") is None
    text = canonical(state)
    tx.execute(
        "UPDATE protocol_calls SET status = 'uncertain', state_json = ?, updated_at = ? WHERE effect_id = ?",
        (text, now, effect_id),
    )
    return [_told(task_id, effect_id, row[0], "uncertain", text)]


def call(tx: Connection, effect_id: str) -> dict[str, Any] | None:
    """The record of a call (camelCase), or None. Raises `IncompatibleVersion`."""
    found = _calls(tx, "effect_id", effect_id)
    return found[0] if found else None


def calls(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    """The calls of a run, oldest first."""
    return _calls(tx, "run_id", run_id)


def _calls(tx: Connection, column: str, value: str) -> list[dict[str, Any]]:
    found = []
    for row in tx.execute(
        "SELECT effect_id, format_version, run_id, task_id, protocol, peer, call_identity, status, "  # noqa: S608
        f"state_json, created_at, updated_at FROM protocol_calls WHERE {column} = ? ORDER BY created_at, effect_id",
        (value,),
    ):
        if row[1] > PROTOCOL_CALL_VERSION:
            raise IncompatibleVersion(f"the call of effect {row[0]} has format {row[1]}; upgrade agentctl")
        found.append(
            {
                "effectId": row[0],
                "formatVersion": row[1],
                "runId": row[2],
                "taskId": row[3],
                "protocol": row[4],
                "peer": row[5],
                "callIdentity": row[6],
                "status": row[7],
                "state": json.loads(row[8]),
                "createdAt": row[9],
                "updatedAt": row[10],
            }
        )
    return found


def sessions(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    """The sessions of a run, by task. Raises `IncompatibleVersion`."""
    found = []
    for row in tx.execute(
        "SELECT task_id, protocol, format_version, peer, status, generation, state_json, created_at, updated_at "
        "FROM protocol_sessions WHERE run_id = ? ORDER BY task_id, protocol",
        (run_id,),
    ):
        if row[2] > PROTOCOL_SESSION_VERSION:
            raise IncompatibleVersion(f"a session of {run_id} has format {row[2]}; upgrade agentctl", run_id=run_id)
        found.append(
            {
                "runId": run_id,
                "taskId": row[0],
                "protocol": row[1],
                "formatVersion": row[2],
                "peer": row[3],
                "status": row[4],
                "generation": row[5],
                "state": json.loads(row[6]),
                "createdAt": row[7],
                "updatedAt": row[8],
            }
        )
    return found


def record_again(tx: Connection, source_run: str, run_id: str, *, now: int) -> list[Event]:
    """Copy what a run knows of its remote calls into a replay of it (contract 9.5), as `recorded`, under own ids.

    The events belong into the transaction that creates the replay.
    """
    events: list[Event] = []
    for item in sessions(tx, source_run):
        text = canonical(item["state"])
        tx.execute(
            "INSERT INTO protocol_sessions VALUES (?,?,?,?,?,'recorded',?,?,?,?)",
            (
                run_id,
                item["taskId"],
                item["protocol"],
                PROTOCOL_SESSION_VERSION,
                item["peer"],
                item["generation"],
                text,
                now,
                now,
            ),
        )
        events.append(_session_told(item["taskId"], item["protocol"], "recorded", item["generation"], text))
    for item in calls(tx, source_run):
        # A replay of a replay names the effect itself, too.
        effect_id = f"recorded:{run_id}:{item['effectId'].rsplit(':', 1)[-1]}"
        text = canonical(item["state"])
        tx.execute(
            "INSERT INTO protocol_calls VALUES (?,?,?,?,?,?,?,'recorded',?,?,?)",
            (
                effect_id,
                PROTOCOL_CALL_VERSION,
                run_id,
                item["taskId"],
                item["protocol"],
                item["peer"],
                item["callIdentity"],
                text,
                now,
                now,
            ),
        )
        events.append(_told(item["taskId"], effect_id, item["protocol"], "recorded", text))
    return events


def _told(task_id: str, effect_id: str, protocol: str, status: str, state_json: str) -> Event:
    payload = {"effectId": effect_id, "protocol": protocol, "status": status, "stateDigest": text_digest(state_json)}
    return Event("protocol.call", task_id, canonical(payload))


def _session_told(task_id: str, protocol: str, status: str, generation: int, state_json: str) -> Event:
    digest = text_digest(state_json)
    payload = {"protocol": protocol, "status": status, "generation": generation, "stateDigest": digest}
    return Event("protocol.session", task_id, canonical(payload))


def told_by_rows(tx: Connection, run_id: str) -> dict[tuple[str, str], list[Any]]:
    """What the last event about each call and session has to say, as the rows have it (`db verify`)."""
    found: dict[tuple[str, str], list[Any]] = {}
    for effect_id, status, text in all_rows(
        tx.execute("SELECT effect_id, status, state_json FROM protocol_calls WHERE run_id = ?", (run_id,))
    ):
        found["call", effect_id] = [status, text_digest(text)]
    for task_id, protocol, status, generation, text in all_rows(
        tx.execute(
            "SELECT task_id, protocol, status, generation, state_json FROM protocol_sessions WHERE run_id = ?",
            (run_id,),
        )
    ):
        found["session", f"{protocol} {task_id}"] = [status, text_digest(text), generation]
    return found
