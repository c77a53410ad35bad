"""The queue of attempts: enqueue, claim, renew, release, finish, rescue. Every function takes the open transaction.

The fence of every write of a worker is (attempt, delivery, holder): the clock only says when somebody may rescue, the
row says who wins. A write through a fence that no longer holds raises `LeaseLost` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from . import audit, effects, holds, protocols, runs, standing
from .canonical import canonical
from .database import Connection, all_rows
from .records import (
    PLAN_FORMAT_VERSION,
    RUNTIME_STATE_VERSION,
    AttemptEnd,
    Candidate,
    Claim,
    Event,
    Fence,
    FinishedAttempt,
    HeldClaim,
    LiveAttempt,
    NewAttempt,
    NextRun,
)
from .states import may_repeat

BRISK_MS = 25
"""Whoever claimed something longer ago may be busy for long; a driver's commit, for which all wait, takes less."""

_LIKELY_RUN = (
    # CROSS JOIN fixes the order: the runs that have a turn, by their turn, and never all runs there ever were.
    "SELECT t.run_id, r.trace_id, EXISTS (SELECT 1 FROM turns o WHERE o.run_id <> t.run_id) "  # noqa: S608
    "FROM turns t CROSS JOIN runs r ON r.run_id = t.run_id "
    "WHERE r.state = 'running' AND r.cancel_requested_at IS NULL AND r.pause_requested_at IS NULL "
    f"AND r.runtime_state_version <= {RUNTIME_STATE_VERSION} AND r.plan_format_version <= {PLAN_FORMAT_VERSION} "
    "AND EXISTS (SELECT 1 FROM attempts a WHERE a.queue = 'ready' AND a.run_id = t.run_id) "
)
# What a newer agentctl has written into, its coordinator sets aside: nothing of it starts either (contract, section 0).
_CLAIMABLE_RUN = f"{_LIKELY_RUN} AND {runs.NOTHING_NEWER.format('t.run_id')} "
_CLAIM = (
    "UPDATE attempts SET state = 'claimed', queue = 'claimed', holder = ?, delivery = delivery + 1, "
    "lease_expires_at = ?, claimed_at = ? WHERE attempt_id = {} "
    "RETURNING attempt_id, task_no, task_id, number, timeout_ms, input_json, delivery, enqueued_at"
)
_CLAIM_FIRST = _CLAIM.format("? AND queue = 'ready'")
_CLAIM_FRESH = _CLAIM.format("? AND queue = 'ready' AND delivery = 0")
_BY_TURN = "ORDER BY t.priority DESC, t.turn LIMIT 1"
_NEXT_RUN = _CLAIMABLE_RUN + _BY_TURN
_NEXT_LIKELY_RUN = _LIKELY_RUN + _BY_TURN
_ONE_RUN = _CLAIMABLE_RUN + "AND t.run_id = ?"


def enqueue(tx: Connection, run_id: str, first_task: int, attempts: Sequence[NewAttempt], *, now: int) -> None:
    """Make tasks claimable: one `ready` attempt each. The index of live attempts refuses a second one."""
    tx.executemany(
        "INSERT INTO attempts (run_id, task_no, live_task, task_id, number, state, queue, timeout_ms, input_json, "
        "enqueued_at) VALUES (?1,?2,?2,?3,?4,'ready','ready',?5,?6,?7)",
        [(run_id, first_task + a.position, a.task_id, a.number, a.timeout_ms, a.input_json, now) for a in attempts],
    )


def has_ready(tx: Connection, only_run: str | None) -> bool:
    """Whether a claim would find something; a read-only look before the gate is taken."""
    return next_run(tx, only_run) is not None


def next_run(tx: Connection, only_run: str | None) -> NextRun | None:
    """The run that a claim would serve, by priority and turn; takes no lock."""
    row = (tx.execute(_NEXT_RUN) if only_run is None else tx.execute(_ONE_RUN, (only_run,))).fetchone()
    return None if row is None else NextRun(row[0], row[1], bool(row[2]))


def likely_run(tx: Connection) -> NextRun | None:
    """The same at a third of the cost, for whoever has just seen that no newer agentctl has written into that run."""
    row = tx.execute(_NEXT_LIKELY_RUN).fetchone()
    return None if row is None else NextRun(row[0], row[1], bool(row[2]))


def peek(tx: Connection, run: NextRun, *, besides: Collection[int]) -> Candidate | None:
    """What a claim would take of this run, but for the attempts `besides`; takes no lock. None for a second delivery.

    The looks may see different moments: what they find is a guess that the claim examines.
    """
    ready = tx.execute(
        "SELECT attempt_id, task_id, number, timeout_ms, input_json, delivery FROM attempts "
        "WHERE queue = 'ready' AND run_id = ? ORDER BY task_no LIMIT ?",
        (run.run_id, len(besides) + 1),
    )
    try:
        for attempt_id, task_id, number, timeout_ms, input_json, delivery in ready:
            if attempt_id in besides:
                continue
            if delivery > 0:
                return None
            return Candidate(attempt_id, run.run_id, task_id, number, timeout_ms, input_json, run.trace_id, run.others)
        return None
    finally:
        # A statement that was not read to its end would hold its snapshot, and the WAL.
        ready.close()


def _first_ready(tx: Connection, run_id: str, besides: Collection[int]) -> int | None:
    """The first ready attempt of a run in compiled order that is none of `besides`, or else the very first."""
    ready: list[tuple[int]] = all_rows(
        tx.execute(
            "SELECT attempt_id FROM attempts WHERE queue = 'ready' AND run_id = ? ORDER BY task_no LIMIT ?",
            (run_id, len(besides) + 1),
        )
    )
    if not ready:
        return None
    return next((found for (found,) in ready if found not in besides), ready[0][0])


def claim(
    tx: Connection,
    holder: str,
    *,
    only_run: str | None,
    lease_ms: int,
    now: int,
    events: list[tuple[str, Event]],
    exactly: Candidate | None = None,
    besides: Collection[int] = (),
) -> Claim | None:
    """Take the next ready attempt: the run whose turn it is, then its first attempt in compiled order.

    What others prepare for (`besides`) is left to them while there is anything else. With `exactly`, take that attempt
    or, if somebody else was faster, none. The new lease and the fence are in the row; the audit event is added to
    `events` for the caller's transaction.
    """
    expires = now + lease_ms
    if exactly is None:
        run = next_run(tx, only_run)
        first = None if run is None else _first_ready(tx, run.run_id, besides)
        if run is None or first is None:
            return None
        run_id, trace_id, others = run.run_id, run.trace_id, run.others
        found = tx.execute(_CLAIM_FIRST, (holder, expires, now, first)).fetchone()
    else:
        # That the run may be served was seen a moment ago; the start of the effect looks again.
        run_id, trace_id, others = exactly.run_id, exactly.trace_id, exactly.others
        found = tx.execute(_CLAIM_FRESH, (holder, expires, now, exactly.attempt_id)).fetchone()
    if found is None:
        return None
    attempt_id, task_no, task_id, number, timeout_ms, input_json, delivery, enqueued_at = found
    tx.execute(
        "UPDATE tasks SET state = 'running', attempt = ?, started_at = COALESCE(started_at, ?), updated_at = ? "
        "WHERE task_no = ?",
        (number, now, now, task_no),
    )
    if others:
        # Alone, a run keeps its turn: nothing to write.
        tx.execute("UPDATE turns SET turn = (SELECT MAX(turn) + 1 FROM turns) WHERE run_id = ?", (run_id,))
    payload = f'{{"attempt":{number},"delivery":{delivery},"from":"ready","to":"running","worker":{canonical(holder)}}}'
    events.append((run_id, Event("task.transition", task_id, payload)))
    return Claim(
        Fence(attempt_id, delivery, holder),
        run_id,
        task_id,
        number,
        timeout_ms,
        input_json,
        trace_id,
        enqueued_at,
        expires,
    )


def renew(tx: Connection, fence: Fence, *, lease_ms: int, now: int) -> bool:
    """Push the lease of a claimed attempt. False when the delivery is over."""
    tx.execute(
        "UPDATE attempts SET lease_expires_at = ? "
        "WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed'",
        (now + lease_ms, fence.attempt_id, fence.delivery, fence.holder),
    )
    return tx.changes() == 1


def release(tx: Connection, fence: Fence, *, reason: str, now: int) -> Event:
    """Give back a claim of which no effect is in flight (drain, pause, budget): it costs no delivery.

    The task is `ready` again. What this delivery has confirmed is no progress of a later one. Returns the audit event
    for the caller's transaction.
    """
    tx.execute(
        "UPDATE attempts SET state = 'ready', queue = 'ready', holder = NULL, lease_expires_at = NULL, "  # noqa: S608
        f"lost_effects = {holds.CONFIRMED} "
        "WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed'",
        (fence.attempt_id, fence.delivery, fence.holder),
    )
    if tx.changes() != 1:
        raise fence.lost()
    row = tx.execute(
        "UPDATE tasks SET state = 'ready', updated_at = ? "
        "WHERE task_no = (SELECT task_no FROM attempts WHERE attempt_id = ?) AND state = 'running' RETURNING task_id",
        (now, fence.attempt_id),
    ).fetchone()
    payload = canonical({"from": "running", "to": "ready", "reason": reason, "delivery": fence.delivery})
    return Event("task.transition", row[0] if row else None, payload)


def finish(tx: Connection, fence: Fence, end: AttemptEnd, *, now: int) -> None:
    """Record the outcome of an attempt; the driver commits it. Raises `LeaseLost` when the fence does not hold."""
    tx.execute(
        "UPDATE attempts SET state = 'finished', queue = 'finished', outcome = ?, result_json = ?, result_effect = ?, "
        "error_json = ?, lease_expires_at = NULL, finished_at = ? "
        "WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed'",
        (
            end.outcome,
            end.result_json,
            end.result_effect,
            end.error_json,
            now,
            fence.attempt_id,
            fence.delivery,
            fence.holder,
        ),
    )
    if tx.changes() != 1:
        raise fence.lost()


def finished(
    tx: Connection, run_id: str, first_task: int, *, limit: int, max_bytes: int
) -> tuple[list[FinishedAttempt], bool]:
    """Finished attempts of a run in compiled order, bounded in number and in bytes; a larger single one comes alone.

    The second value tells whether more are waiting.
    """
    found: list[FinishedAttempt] = []
    size = 0
    for row in tx.execute(
        "SELECT a.attempt_id, a.task_no, a.number, a.outcome, COALESCE(a.result_json, e.result_json), a.error_json, "
        "a.result_effect, e.effect_class, e.idempotency, a.artifacts_json FROM attempts a "
        "LEFT JOIN effects e ON e.effect_id = a.result_effect "
        "WHERE a.queue = 'finished' AND a.run_id = ? ORDER BY a.task_no LIMIT ?",
        (run_id, limit + 1),
    ):
        size += len(row[4] or "") + len(row[5] or "") + len(row[9] or "")
        if len(found) == limit or (found and size > max_bytes):
            return found, True
        attempt_id, task_no, number, outcome, result, error, effect_id, effect_class, idempotency, artifacts = row
        bound = outcome in ("uncertain", "failed") and bool(
            standing.unrepeatable(tx, run_id, task_no, besides=effect_id if outcome == "uncertain" else None)
        )
        found.append(
            FinishedAttempt(
                attempt_id,
                task_no - first_task,
                number,
                outcome,
                result,
                error,
                effect_id,
                effect_class,
                idempotency,
                artifacts,
                bound,
            )
        )
    return found, False


def live_attempts(tx: Connection, run_id: str, first_task: int, task_count: int) -> list[LiveAttempt]:
    """All attempts of a run that are not closed."""
    return [
        LiveAttempt(attempt_id, task_no - first_task, number, state, hold)
        for attempt_id, task_no, number, state, hold in tx.execute(
            "SELECT attempt_id, task_no, number, state, hold FROM attempts WHERE live_task BETWEEN ? AND ?",
            (first_task, first_task + task_count - 1),
        )
    ]


def brisk(tx: Connection, *, now: int) -> int:
    """How many workers have claimed something within the last moment. If their work is brief, they are back at once."""
    found = tx.execute(
        "SELECT COUNT(*) FROM attempts WHERE queue = 'claimed' AND claimed_at > ?", (now - BRISK_MS,)
    ).fetchone()
    return int(found[0]) if found else 0


def claimed_positions(tx: Connection, run_id: str, first_task: int) -> set[int]:
    """Tasks of a run that workers hold now."""
    return {
        row[0] - first_task
        for row in tx.execute("SELECT task_no FROM attempts WHERE queue = 'claimed' AND run_id = ?", (run_id,))
    }


_CLAIMS = "SELECT attempt_id, delivery, holder, run_id, lease_expires_at FROM attempts WHERE queue = 'claimed'"


def claims_of(tx: Connection, holders: Iterable[str]) -> list[HeldClaim]:
    """Everything that these processes hold."""
    return [HeldClaim(*row) for holder in holders for row in tx.execute(f"{_CLAIMS} AND holder = ?", (holder,))]


def all_claims(tx: Connection) -> list[HeldClaim]:
    """Every claimed attempt."""
    return [HeldClaim(*row) for row in tx.execute(_CLAIMS)]


def started_effects(tx: Connection, attempt_ids: Iterable[int]) -> list[str]:
    """Keys of the effects in flight of these attempts: their processes carry them as a marker."""
    found: list[str] = []
    for attempt_id in attempt_ids:
        found.extend(
            row[0]
            for row in tx.execute(
                "SELECT idempotency_key FROM effects WHERE attempt_id = ? AND status = 'started'", (attempt_id,)
            )
        )
    return found


def rescue(
    tx: Connection, attempt_id: int, delivery: int, *, why: str, holder_may_live: bool, actor: str, now: int
) -> str | None:
    """Settle one delivery whose holder is dead (architecture 4). The caller has made sure of that death.

    Returns what became of the attempt, or None when the delivery was over already, or when anything of the run was
    written by a newer agentctl, which has to settle it itself:

    - `ready`: nothing was started, or what was started may be repeated; another delivery follows with the same ids.
    - `uncertain`: something that must not be repeated was started and never confirmed.
    - `worker_lost`: the bound of deliveries is reached. Deliveries that confirmed a new effect do not count.
    """
    row = tx.execute(
        "SELECT run_id, task_no, task_id, holder, lost, lost_effects, max_deliveries, "  # noqa: S608
        f"{holds.CONFIRMED} FROM attempts JOIN runs r USING (run_id) "
        "WHERE attempt_id = ? AND delivery = ? AND attempts.state = 'claimed' "
        "AND r.runtime_state_version <= ? AND r.plan_format_version <= ? "
        f"AND {runs.NOTHING_NEWER.format('r.run_id')}",
        (attempt_id, delivery, RUNTIME_STATE_VERSION, PLAN_FORMAT_VERSION),
    ).fetchone()
    if row is None:
        return None
    run_id, task_no, task_id, holder, lost, lost_effects, max_deliveries, confirmed = row
    if confirmed <= lost_effects:
        lost += 1
    exhausted = lost >= max_deliveries
    events: list[Event] = []
    holder = holder if holder_may_live else None
    blocked = _settle_started(
        tx, run_id, attempt_id, task_id, events, again=not exhausted, why=why, holder_may_live=holder, now=now
    )
    if blocked is None and not exhausted:
        tx.execute(
            "UPDATE attempts SET state = 'ready', queue = 'ready', holder = NULL, lease_expires_at = NULL, lost = ?, "
            "lost_effects = ? WHERE attempt_id = ?",
            (lost, confirmed, attempt_id),
        )
        tx.execute(
            "UPDATE tasks SET state = 'ready', updated_at = ? WHERE task_no = ? AND state = 'running'", (now, task_no)
        )
        payload = {"from": "running", "to": "ready", "reason": why, "delivery": delivery}
        events.append(Event("task.transition", task_id, canonical(payload)))
        outcome = "ready"
    else:
        if blocked is not None:
            outcome = "uncertain"
            error = {
                "code": "uncertain_effect",
                "message": f"{why} while effect {blocked[:12]} was in flight; whether it happened is not known",
                "retryable": False,
            }
        else:
            outcome = "worker_lost"
            error = {
                "code": "worker_lost",
                "message": f"{lost} workers were lost with this task; the last time: {why}",
                "retryable": False,
            }
        tx.execute(
            "UPDATE attempts SET state = 'finished', queue = 'finished', outcome = ?, error_json = ?, "
            "result_effect = ?, lost = ?, lease_expires_at = NULL, finished_at = ? WHERE attempt_id = ?",
            (
                "failed" if blocked is None else "uncertain",
                canonical(error),
                blocked,
                lost,
                now,
                attempt_id,
            ),
        )
        payload = {"reason": why, "delivery": delivery, "outcome": outcome}
        events.append(Event("attempt.lost", task_id, canonical(payload)))
    audit.append(tx, run_id, events, actor=actor, now=now)
    return outcome


def _settle_started(
    tx: Connection,
    run_id: str,
    attempt_id: int,
    task_id: str,
    events: list[Event],
    *,
    again: bool,
    why: str,
    holder_may_live: str | None,
    now: int,
) -> str | None:
    """Settle the effects in flight of an attempt whose holder is dead; one that must not be repeated, or None.

    `again`: another delivery follows, if none of them forbids it. `holder_may_live`: the holder, if it could not be
    ended; it may be carrying them out still, so none of them is repeated.
    """
    blocked: str | None = None
    for effect_id, effect_class, idempotency in all_rows(
        tx.execute(
            "SELECT effect_id, effect_class, idempotency FROM effects WHERE attempt_id = ? AND status = 'started'",
            (attempt_id,),
        )
    ):
        repeatable = may_repeat(effect_class, idempotency) and holder_may_live is None
        if repeatable and again:
            events.append(effects.back_to_requested(tx, effect_id, task_id, events, reason=why, now=now))
            continue
        events.append(effects.mark_uncertain(tx, effect_id, task_id, reason=why, holder=holder_may_live, now=now))
        events += protocols.lost(tx, effect_id, task_id, now=now)
        if repeatable:
            # Nobody sends it again: that it was sent and never confirmed is the last that is known of it.
            effects.supersede(tx, run_id, [effect_id], events, now=now)
        else:
            blocked = effect_id
    return blocked
