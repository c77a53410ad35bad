"""The effect ledger: request, start, confirm, uncertain (seed; contract 5). Every function takes the open transaction.

A request is committed as `started` before its executor runs, so whatever happens afterwards the ledger knows that it
may have happened. A final status never changes; the database refuses it.
"""

from __future__ import annotations

from . import approvals, conversations, holds, ledger, long_term, protocols, reconciliations, seals, standing
from .canonical import canonical
from .database import Connection, all_rows
from .errors import ConflictError, IncompatibleVersion, LeaseLost
from .records import (
    EFFECT_FORMAT_VERSION,
    AttemptHeld,
    EffectEnd,
    EffectRequest,
    Event,
    Fence,
    RecordedEffect,
    RecordedStep,
    StartedEffect,
    StartRefused,
)
from .states import EFFECT_FINAL, RUN_FINAL
from .versions import check_versions


def start(
    tx: Connection, fence: Fence, request: EffectRequest, *, previous: EffectEnd | None, now: int
) -> tuple[StartedEffect | RecordedEffect | StartRefused | AttemptHeld, str, list[Event]]:
    """Request, reserve and start an effect, or tell why it must not be dispatched (architecture 4, step 5).

    First the end of the `previous` effect is recorded: what it held and did not use is free for this one. Everything
    that may forbid the start is looked at in this transaction: the fence, cancellation, pause, deadline, the approval
    of a person, and budget. What waits for a person or for units is held, and its worker is free with the commit.
    Returns the answer, the run and the audit events. Raises `LeaseLost` when the fence does not hold, and
    `ConflictError` when the row of this ordinal belongs to another input.
    """
    row = tx.execute(
        "SELECT a.state, a.delivery, a.holder, a.run_id, a.task_id, a.number, r.state, r.cancel_requested_at, "
        "r.pause_requested_at, r.deadline_at, r.trace_id, r.runtime_state_version, r.plan_format_version, "
        "e.effect_id, e.format_version, e.status, e.result_json, e.error_json, e.dispatches, e.idempotency_key "
        "FROM attempts a JOIN runs r USING (run_id) "
        "LEFT JOIN effects e ON e.attempt_id = a.attempt_id AND e.ordinal = ? WHERE a.attempt_id = ?",
        (request.ordinal, fence.attempt_id),
    ).fetchone()
    if row is None or row[0] != "claimed" or row[1] != fence.delivery or row[2] != fence.holder:
        raise fence.lost()
    run_id, task_id, number, run_state, cancelled, paused, deadline, trace_id = row[3:11]
    check_versions(run_id, row[11], row[12])
    events: list[Event] = []
    overdrawn = None if previous is None else end(tx, run_id, task_id, previous, events, now=now)
    dispatches, key = row[18:]
    existing = row[13] is not None
    if existing:
        recorded = _as_it_ended(tx, request, run_id, task_id, *row[13:18])
        if recorded is not None:
            return recorded, run_id, events
    else:
        dispatches, key = 0, _key_of(tx, fence, request, number)
    if cancelled is not None or run_state in RUN_FINAL:
        return StartRefused("cancel_requested"), run_id, events
    # A worker that comes from another run may have looked at this one before it paused (see `Store.finish`, `ahead`).
    if paused is not None or run_state == "paused":
        return StartRefused("paused"), run_id, events
    if deadline is not None and now > deadline:
        return StartRefused("deadline"), run_id, events
    if overdrawn is None and fence.delivery > 1:
        # Whoever held the attempt before was told so, and has died or drained before it could end the attempt.
        overdrawn = ledger.overdrawn(tx, run_id)
    if overdrawn is not None:
        return StartRefused("budget", overdrawn), run_id, events
    if request.approval is not None:
        if not existing:
            events.append(
                _insert(tx, fence, request, key, run_id, task_id, number, trace_id, "waiting_for_approval", now)
            )
            answer = approvals.ask(tx, fence, request, run_id, task_id, trace_id, events, now=now)
            return answer, run_id, events
        approvals.require(tx, request, run_id)
    dispatch = dispatches + 1
    denied = ledger.reserve(tx, run_id, task_id, request.effect_id, dispatch, request.estimate, events)
    if denied is not None:
        if denied.pop("wait"):
            units = request.estimate
            events.append(holds.hold(tx, fence, "budget", task_state="ready", units=units, now=now))
            return AttemptHeld("budget"), run_id, events
        if not existing:
            events.append(_insert(tx, fence, request, key, run_id, task_id, number, trace_id, "requested", now))
        events.append(ledger.record_exceeded(tx, run_id, task_id, denied, "budget.exceeded", now=now))
        return StartRefused("budget", denied), run_id, events
    if not existing:
        events.append(_insert(tx, fence, request, key, run_id, task_id, number, trace_id, "started", now))
    else:
        tx.execute(
            "UPDATE effects SET status = 'started', dispatches = ?, started_at = ? WHERE effect_id = ?",
            (dispatch, now, request.effect_id),
        )
    conversations.begin_call(tx, request, run_id, task_id, now=now)
    events.append(Event("effect.started", task_id, f'{{"dispatch":{dispatch},"effectId":"{request.effect_id}"}}'))
    return StartedEffect(dispatch, None if key == request.effect_id else key), run_id, events


def _as_it_ended(
    tx: Connection,
    request: EffectRequest,
    run_id: str,
    task_id: str,
    effect_id: str,
    version: int,
    status: str,
    result_json: str | None,
    error_json: str | None,
) -> RecordedEffect | None:
    """What is known of the effect that stands in the place of a request: how it has ended, what a person has concluded
    since included. None when it has only been requested, and may be dispatched."""
    if version > EFFECT_FORMAT_VERSION:
        raise IncompatibleVersion(f"effect {effect_id} has format {version}; upgrade agentctl", run_id=run_id)
    if effect_id != request.effect_id:
        raise ConflictError(
            f"effect {request.ordinal} of {task_id} was requested with another input before; it is not sent again",
            run_id=run_id,
        )
    if status in EFFECT_FINAL:
        said = reconciliations.latest(tx, effect_id)
        if said is not None and said[1] == "compensated":
            undone = standing.undone_fault(effect_id, request.operation)
            return RecordedEffect("failed", None, canonical(undone.as_json()))
        if said is not None and said[1] == "applied" and status == "uncertain":
            return RecordedEffect("succeeded", said[2], None, reconciled=True)
        return RecordedEffect(status, result_json, error_json)
    if status == "started":
        raise LeaseLost(f"effect {effect_id} is in flight already")
    if status == "waiting_for_approval":
        raise LeaseLost(f"effect {effect_id} waits for an approval")
    return None


def _key_of(tx: Connection, fence: Fence, request: EffectRequest, number: int) -> str:
    """The idempotency key of a new effect: its id (contract 5.1), but for one that repeats a `keyed` effect of an
    earlier attempt whose end nobody knows. Only under the same key can the other side tell that it is the same."""
    if number == 1 or request.idempotency != "keyed":
        return request.effect_id
    row = tx.execute(
        "SELECT e.idempotency_key FROM attempts a JOIN attempts o ON o.task_no = a.task_no AND o.number < a.number "
        "JOIN effects e ON e.attempt_id = o.attempt_id WHERE a.attempt_id = ? AND e.ordinal = ? AND e.operation = ? "
        "AND e.input_digest = ? AND e.idempotency = 'keyed' AND e.status = 'uncertain' AND NOT EXISTS "
        "(SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = e.effect_id) ORDER BY o.number DESC LIMIT 1",
        (fence.attempt_id, request.ordinal, request.operation, request.input_digest),
    ).fetchone()
    return request.effect_id if row is None else str(row[0])


def _insert(
    tx: Connection,
    fence: Fence,
    request: EffectRequest,
    key: str,
    run_id: str,
    task_id: str,
    number: int,
    trace_id: str,
    status: str,
    now: int,
) -> Event:
    """Write the row of a request; the event that tells of it."""
    started = status == "started"
    estimate = canonical(request.estimate) if request.estimate else None
    tx.execute(
        "INSERT INTO effects (effect_id, format_version, run_id, task_id, attempt_id, attempt, ordinal, operation, "
        "effect_class, risk, idempotency, idempotency_key, input_digest, input_json, expected_json, trace_id, "
        "status, dispatches, requested_at, started_at, estimate_json) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            request.effect_id,
            EFFECT_FORMAT_VERSION,
            run_id,
            task_id,
            fence.attempt_id,
            number,
            request.ordinal,
            request.operation,
            request.effect_class,
            request.risk,
            request.idempotency,
            key,
            request.input_digest,
            request.input_json,
            request.expected_json,
            trace_id,
            status,
            1 if started else 0,
            now,
            now if started else None,
            estimate,
        ),
    )
    words = (request.effect_class, request.risk, request.idempotency, request.expected_json, trace_id, now)
    said = seals.seal(seals.with_estimate(words, estimate))
    return Event(
        "effect.requested",
        task_id,
        f'{{"effectId":"{request.effect_id}","inputDigest":"{request.input_digest}",'
        f'"operation":{canonical(request.operation)},"seal":"{said}"}}',
    )


def end(
    tx: Connection, run_id: str, task_id: str, finish: EffectEnd, events: list[Event], *, now: int
) -> dict[str, object] | None:
    """Record how a dispatch ended (see `EffectEnd`) and settle its budget; guarded: the row must be `started`.

    An effect that succeeded and consists of a write to long-term memory is carried out here, behind that guard.
    Returns what the settlement has exceeded (see `ledger.settle`): then the task fails although its effect succeeded.
    """
    if finish.protocol is not None:
        protocols.write(tx, run_id, task_id, finish.effect_id, finish.protocol, events, now=now)
    if finish.status == "lost":
        events.append(
            back_to_requested(tx, finish.effect_id, task_id, events, reason="ended before it was done", now=now)
        )
        return None
    if finish.status in ("requested", "cancelled"):
        row = tx.execute(
            "UPDATE effects SET status = 'requested', dispatches = dispatches - 1 "
            "WHERE effect_id = ? AND status = 'started' RETURNING operation",
            (finish.effect_id,),
        ).fetchone()
        conversations.forget_call(tx, run_id, finish.effect_id, _moved(row, finish.effect_id))
        ledger.release(tx, run_id, task_id, finish.effect_id, finish.dispatch, events)
        if finish.status == "cancelled":
            tx.execute(
                "UPDATE effects SET status = 'cancelled', completed_at = ? WHERE effect_id = ?", (now, finish.effect_id)
            )
            events.append(Event("effect.cancelled", task_id, f'{{"effectId":"{finish.effect_id}"}}'))
        else:
            events.append(Event("effect.not_dispatched", task_id, f'{{"effectId":"{finish.effect_id}"}}'))
        return None
    row = tx.execute(
        "UPDATE effects SET status = ?, confirmed = ?, result_json = ?, error_json = ?, notes_json = ?, "
        "completed_at = ? WHERE effect_id = ? AND status = 'started' RETURNING operation",
        (
            finish.status,
            1 if finish.status == "succeeded" else 0,
            finish.result_json,
            finish.error_json,
            finish.notes_json,
            now,
            finish.effect_id,
        ),
    ).fetchone()
    operation = _moved(row, finish.effect_id)
    conversations.end_call(tx, run_id, finish.effect_id, operation, finish.status, finish.result_json, now=now)
    if finish.memory is not None and finish.status == "succeeded":
        long_term.put(tx, finish.memory, now=now)
    if finish.session is not None and finish.status == "succeeded":
        conversations.put_session(tx, run_id, task_id, finish.effect_id, finish.session, now=now)
    said = seals.seal((finish.result_json, finish.error_json, finish.notes_json, now))
    events.append(Event("effect." + finish.status, task_id, f'{{"effectId":"{finish.effect_id}","seal":"{said}"}}'))
    if finish.status != "uncertain" and (finish.reserved or finish.usage):
        return ledger.settle(tx, run_id, task_id, finish.effect_id, finish.dispatch, finish.usage, events, now=now)
    return None


def _moved(row: tuple[str] | None, effect_id: str) -> str:
    """The operation of the effect that an update has met. Raises `LeaseLost` when it met none."""
    if row is None:
        raise LeaseLost(f"effect {effect_id} is no longer started; its end is not recorded")
    return row[0]


def back_to_requested(
    tx: Connection, effect_id: str, task_id: str, events: list[Event], *, reason: str, now: int
) -> Event:
    """A lost dispatch that may be repeated: `started -> requested`. What it reserved stays charged (architecture 4)."""
    row = tx.execute(
        "UPDATE effects SET status = 'requested' WHERE effect_id = ? AND status = 'started' "
        "RETURNING run_id, dispatches, operation",
        (effect_id,),
    ).fetchone()
    if row is None:
        raise ConflictError(f"effect {effect_id} is not started")
    conversations.forget_call(tx, row[0], effect_id, row[2])
    ledger.charge_lost(tx, row[0], task_id, effect_id, row[1], events, now=now)
    return Event("effect.requested", task_id, canonical({"effectId": effect_id, "reason": reason, "again": True}))


def mark_uncertain(tx: Connection, effect_id: str, task_id: str, *, reason: str, holder: str | None, now: int) -> Event:
    """`started -> uncertain`: nobody knows whether it happened. Its reservation stays until it is reconciled.

    `holder` names a process that may still be carrying it out, since it could not be ended (architecture 4).
    """
    error = canonical({"code": "uncertain_effect", "message": reason, "retryable": False})
    notes = None if holder is None else canonical({"holderMayLive": holder})
    row = tx.execute(
        "UPDATE effects SET status = 'uncertain', completed_at = ?, error_json = ?, notes_json = ? "
        "WHERE effect_id = ? AND status = 'started' RETURNING run_id, operation",
        (now, error, notes, effect_id),
    ).fetchone()
    if row is None:
        raise ConflictError(f"effect {effect_id} is not started")
    conversations.end_call(tx, row[0], effect_id, row[1], "uncertain", None, now=now)
    said = seals.seal((None, error, notes, now))
    return Event("effect.uncertain", task_id, canonical({"effectId": effect_id, "reason": reason, "seal": said}))


def supersede(tx: Connection, run_id: str, effect_ids: list[str], events: list[Event], *, now: int) -> None:
    """Uncertain effects that may be repeated and will be, or whose task has failed: they block nothing any more.

    What they hold of the budget is charged, since nobody is asked to reconcile them.
    """
    for effect_id in effect_ids:
        row = tx.execute(
            "UPDATE effects SET superseded = 1 WHERE effect_id = ? RETURNING task_id, dispatches", (effect_id,)
        ).fetchone()
        if row is not None:
            events.append(Event("effect.superseded", row[0], f'{{"effectId":"{effect_id}"}}'))
            ledger.charge_lost(tx, run_id, row[0], effect_id, row[1], events, now=now)


def abandon(tx: Connection, attempt_ids: list[int], events: list[Event], *, now: int) -> None:
    """Attempts that are closed without a result: what they had requested and not started is never sent (`cancelled`).

    Not for an attempt that the budget has denied: its effect stays `requested` (contract 6).
    """
    for attempt_id in attempt_ids:
        rows = all_rows(
            tx.execute(
                "UPDATE effects SET status = 'cancelled', completed_at = ? "
                "WHERE attempt_id = ? AND status = 'requested' RETURNING effect_id, task_id",
                (now, attempt_id),
            )
        )
        events.extend(_cancelled(rows, "attempt_closed"))


def stop(tx: Connection, first_task: int, last_task: int, events: list[Event], *, reason: str, now: int) -> None:
    """A stop ends what these tasks have requested and nobody has begun, whether it waits for a worker or a person.

    The effect of an attempt that the budget has denied stays `requested`: that attempt has failed before (contract 6).
    """
    rows = all_rows(
        tx.execute(
            "UPDATE effects SET status = 'cancelled', completed_at = ? WHERE attempt_id IN "
            "(SELECT attempt_id FROM attempts WHERE live_task BETWEEN ? AND ? AND state IN ('ready', 'waiting')) "
            "AND status IN ('requested', 'waiting_for_approval') RETURNING effect_id, task_id",
            (now, first_task, last_task),
        )
    )
    events.extend(_cancelled(rows, reason))


def _cancelled(rows: list[tuple[str, str]], reason: str) -> list[Event]:
    """The events of effects (id, task) that were never sent and never will be."""
    return [
        Event("effect.cancelled", task_id, canonical({"effectId": effect_id, "reason": reason}))
        for effect_id, task_id in rows
    ]


def recorded(tx: Connection, attempt_id: int) -> dict[int, RecordedStep]:
    """Steps of an attempt whose result is known, by ordinal: confirmed, or reconciled as applied, or undone since
    (contract 5.3).

    Raises `IncompatibleVersion`.
    """
    found: dict[int, RecordedStep] = {}
    for ordinal, effect_id, version, status, result_json in all_rows(
        tx.execute(
            "SELECT ordinal, effect_id, format_version, status, result_json FROM effects "
            "WHERE attempt_id = ? AND status IN ('succeeded', 'uncertain') ORDER BY ordinal",
            (attempt_id,),
        )
    ):
        if version > EFFECT_FORMAT_VERSION:
            raise IncompatibleVersion(f"effect {effect_id} has format {version}; upgrade agentctl")
        said = reconciliations.latest(tx, effect_id)
        conclusion = None if said is None else said[1]
        if status == "uncertain" and conclusion not in ("applied", "compensated"):
            continue
        if said is not None and conclusion == "applied":
            result_json = said[2]
        found[ordinal] = RecordedStep(effect_id, result_json, status == "succeeded", conclusion == "compensated")
    return found


def expected_of(tx: Connection, attempt_id: int, ordinal: int) -> str | None:
    """What an earlier delivery of this attempt recorded as expected for this ordinal, or None."""
    row = tx.execute(
        "SELECT expected_json FROM effects WHERE attempt_id = ? AND ordinal = ?", (attempt_id, ordinal)
    ).fetchone()
    return row[0] if row else None
