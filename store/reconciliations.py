"""Reconciliations: what a person found out about an effect afterwards (contract 5.5). Transactions are the caller's.

They are appended and never changed, and neither is the row of the effect. The latest one counts. What it means for the
task that waits is done in the same transaction: a recorded result, or a fresh attempt.
"""

from __future__ import annotations

import json
from typing import Any

from . import audit, conversations, holds, ledger, process_identity, processes, protocols, runs, standing
from .canonical import canonical, text_digest
from .database import Connection
from .errors import ConflictError, IncompatibleVersion, NotFoundError
from .process_identity import Liveness
from .records import EFFECT_FORMAT_VERSION, RECONCILIATION_FORMAT_VERSION, Event, NewReconciliation, Run
from .states import LOOKS_ONLY

FOLLOWS = {"applied": ("applied", "compensated"), "not_applied": ("not_applied",), "compensated": ("compensated",)}
"""Which conclusion may supersede which; everything else contradicts the one before."""


def latest(tx: Connection, effect_id: str) -> tuple[str, str, str | None] | None:
    """(id, status, result_json) of the conclusion that counts, or None. Raises `IncompatibleVersion`."""
    row = tx.execute(
        "SELECT reconciliation_id, status, result_json, format_version FROM effect_reconciliations "
        "WHERE effect_id = ? ORDER BY created_at DESC, reconciliation_no DESC LIMIT 1",
        (effect_id,),
    ).fetchone()
    if row is None:
        return None
    if row[3] > RECONCILIATION_FORMAT_VERSION:
        raise IncompatibleVersion(f"reconciliation {row[0]} has format {row[3]}; upgrade agentctl")
    return row[0], row[1], row[2]


def reconcile(tx: Connection, new: NewReconciliation, *, now: int) -> tuple[str, str | None]:
    """Append a conclusion and let the waiting task go on with it; (run id, its driver).

    Raises `NotFoundError`; `ConflictError` for an effect that is in flight, whose holder may still be carrying it out,
    or about which something else was concluded before.
    """
    row = tx.execute(
        "SELECT run_id, task_id, attempt_id, status, confirmed, dispatches, notes_json, format_version, superseded "
        "FROM effects WHERE effect_id = ?",
        (new.effect_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(
            f"there is no effect {new.effect_id} in this database", remedy="`agentctl effects list --uncertain`"
        )
    run_id, task_id, attempt_id, status, confirmed, dispatches, notes, version, superseded = row
    if version > EFFECT_FORMAT_VERSION:
        raise IncompatibleVersion(f"effect {new.effect_id} has format {version}; upgrade agentctl", run_id=run_id)
    run = runs.get(tx, run_id)
    runs.refuse_future_records(tx, run_id)
    before = latest(tx, new.effect_id)
    # Sent, and never to be sent again, since its run has ended: as little is known of it as of an uncertain one.
    lost = status in ("requested", "cancelled") and dispatches > 0 and run.ended_at is not None
    if status == "started":
        _refuse_in_flight(tx, new.effect_id, attempt_id, run_id)
    _check_move(new, before, "uncertain" if lost else status, bool(confirmed), run_id)
    if new.status == "not_applied":
        _check_holder(tx, notes, run_id)
    if new.compensation_effect_id is not None:
        _check_compensation(tx, new, run_id)
    superseding = None if before is None else before[0]
    _insert(tx, new, run, superseding, now=now)
    payload = {
        "effectId": new.effect_id,
        "reconciliationId": new.reconciliation_id,
        "status": new.status,
        "supersedes": superseding,
    }
    events = [Event("effect.reconciled", task_id, canonical(payload))]
    if new.protocol is not None:
        protocols.write(tx, run_id, task_id, new.effect_id, new.protocol, events, now=now)
    state: dict[str, Any] = {"reconciliations": {new.effect_id: new.status}}
    if new.result_json is not None:
        # Others may go on with it, so it has to be proven like an output.
        state["results"] = {new.effect_id: text_digest(new.result_json)}
    counts_already = before is not None or lost  # since the first such conclusion, or since it was lost
    if new.status == "applied" and not counts_already:
        if new.usage is not None:
            ledger.settle(tx, run_id, task_id, new.effect_id, dispatches, new.usage, events, now=now)
        else:
            ledger.charge_lost(tx, run_id, task_id, new.effect_id, dispatches, events, now=now)
    elif new.status == "not_applied":
        ledger.release(tx, run_id, task_id, new.effect_id, dispatches, events)
    if run.ended_at is None and not superseded:
        _let_task_go_on(tx, run, new, attempt_id, events, state, now)
        if runs.go_on(tx, run, events, now=now):
            state["state"] = "running"
    driver = audit.append(tx, run_id, events, actor=new.actor, now=now)
    audit.append_checkpoint(tx, run_id, canonical(state), now=now)
    return run_id, driver


def _insert(tx: Connection, new: NewReconciliation, run: Run, superseding: str | None, *, now: int) -> None:
    tx.execute(
        "INSERT INTO effect_reconciliations (reconciliation_id, format_version, effect_id, run_id, status, actor, "
        "reason, evidence_json, result_json, result_schema_json, authorization_json, compensation_effect_id, "
        "supersedes_id, trace_id, created_at) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,"
        # Never before the one that it supersedes, though the clock was set back: the latest is the one that counts.
        "MAX(?, COALESCE((SELECT MAX(created_at) FROM effect_reconciliations WHERE effect_id = ?), 0)))",
        (
            new.reconciliation_id,
            RECONCILIATION_FORMAT_VERSION,
            new.effect_id,
            run.run_id,
            new.status,
            new.actor,
            new.reason,
            new.evidence_json,
            new.result_json,
            new.result_schema_json,
            new.authorization_json,
            new.compensation_effect_id,
            superseding,
            run.trace_id,
            now,
            new.effect_id,
        ),
    )


def _refuse_in_flight(tx: Connection, effect_id: str, attempt_id: int, run_id: str) -> None:
    """Nobody but its worker, or who has settled that worker's death, can say how an effect has ended."""
    holder = tx.execute("SELECT holder FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone()
    row = processes.get(tx, holder[0]) if holder is not None and holder[0] is not None else None
    if row is None or process_identity.liveness_of(row.identity) is Liveness.DEAD:
        raise ConflictError(
            f"effect {effect_id[:12]} is not settled: its worker is dead, and its command may live on",
            remedy="`agentctl coordinator start` or `agentctl workers start` ends what is left of it and settles it; "
            "reconcile it then",
            run_id=run_id,
        )
    raise ConflictError(
        f"effect {effect_id[:12]} is in flight: {row.kind} {row.name} (pid {row.pid}) holds it still",
        remedy="wait for its end, or cancel the run; one that hangs may be ended: "
        f"`kill -9 {row.pid}`, and what it held is settled then",
        run_id=run_id,
    )


def _check_move(
    new: NewReconciliation, before: tuple[str, str, str | None] | None, status: str, confirmed: bool, run_id: str
) -> None:
    if before is not None:
        if new.status not in FOLLOWS[before[1]]:
            raise ConflictError(
                f"effect {new.effect_id[:12]} was reconciled as {before[1]} before; {new.status} contradicts that",
                remedy=f"`agentctl effects inspect {new.effect_id[:12]}` shows who concluded what",
                run_id=run_id,
            )
        return
    if new.status == "compensated":
        allowed, wanted = confirmed, "a confirmed effect, or one that was reconciled as applied"
    else:
        allowed, wanted = status == "uncertain", "an uncertain effect"
    if not allowed:
        raise ConflictError(
            f"effect {new.effect_id[:12]} is {status}; {new.status} can be said of {wanted} only", run_id=run_id
        )


def _check_holder(tx: Connection, notes: str | None, run_id: str) -> None:
    """Nothing is repeated beside a process that may still be doing it (architecture 4)."""
    holder = (json.loads(notes) if notes else {}).get("holderMayLive")
    if holder is None:
        return
    row = processes.get(tx, holder)
    if row is None or process_identity.liveness_of(row.identity) is Liveness.DEAD:
        return
    raise ConflictError(
        f"{row.kind} {row.name} (pid {row.pid}) could not be ended and may still be carrying it out",
        remedy=f"end it first, as its user or as root (`kill -9 {row.pid}`); `agentctl doctor` shows what it leaves",
        run_id=run_id,
    )


def _check_compensation(tx: Connection, new: NewReconciliation, run_id: str) -> None:
    """What stands as the inverse of an effect has to have been able to undo it (contract 5.5)."""
    inverse = new.compensation_effect_id or ""
    row = tx.execute(
        "SELECT e.run_id, e.confirmed, r.mode, r.source_run_id, e.effect_class, "
        # By the order of the requests as well: the clock may have been set back in between.
        "e.started_at < s.started_at AND e.effect_no < s.effect_no, "
        "e.run_id = s.run_id AND e.task_id = s.task_id AND e.operation = s.operation "
        "AND e.input_digest = s.input_digest "
        "FROM effects e JOIN runs r USING (run_id), effects s WHERE e.effect_id = ? AND s.effect_id = ?",
        (inverse, new.effect_id),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no effect {inverse} in this database", run_id=run_id)
    short, said = inverse[:12], latest(tx, inverse)
    wrong = None
    if inverse == new.effect_id:
        wrong = "an effect does not compensate itself"
    elif row[0] != run_id and not (row[2] == "compensation" and row[3] == run_id):
        wrong = f"effect {short} belongs neither to {run_id} nor to a compensation run of it"
    elif said is not None and said[1] == "compensated":
        wrong = f"effect {short} was undone itself"
    elif not row[1] and (said is None or said[1] != "applied"):
        wrong = f"effect {short} is not known to have happened"
    elif row[4] in LOOKS_ONLY:
        wrong = f"effect {short} ({row[4]}) changes nothing, so it has undone nothing"
    elif row[6]:
        wrong = f"effect {short} is the same once more, by another attempt of its task"
    elif row[5] and row[0] == run_id:  # what a compensation run does is later than the end of its source
        wrong = f"effect {short} began before {new.effect_id[:12]} did, so it cannot have undone it"
    if wrong is not None:
        raise ConflictError(
            wrong, remedy=f"`agentctl effects list {run_id}` shows the effects of the run", run_id=run_id
        )


_WAITS_FOR = (
    "(state IN ('waiting', 'finished') AND result_effect = ?2 "
    # It could go on, but not with the result of what has been undone.
    "OR ?3 = 'compensated' AND state = 'ready' AND hold IS NOT 'approval')"
)
"""An attempt for which a conclusion (?3) about its effect ?2 means a fresh one."""


def _let_task_go_on(
    tx: Connection,
    run: Run,
    new: NewReconciliation,
    attempt_id: int,
    events: list[Event],
    state: dict[str, Any],
    now: int,
) -> None:
    """What the conclusion means for the attempt that ended uncertain through this effect, if it still waits."""
    if new.status == "applied" and (new.protocol is not None or _is_one_of_many(tx, new.effect_id)):
        # What a remote side has answered may bring artifacts: a worker stores them before the task may complete.
        if not standing.undone(tx, attempt_id):
            _take_up_again(tx, run, new, attempt_id, events, state, now)
            return
    elif new.status == "applied":
        # As if its worker had just finished it: the driver commits it with the others.
        row = tx.execute(
            "UPDATE attempts SET state = 'finished', queue = 'finished', outcome = 'succeeded', result_json = ?, "
            # A second one corrects the first as long as the driver has not taken it over.
            "error_json = NULL WHERE attempt_id = ? AND state IN ('waiting', 'finished') "
            "AND outcome IN ('uncertain', 'succeeded') AND result_effect = ? RETURNING task_no, task_id, number",
            (new.result_json, attempt_id, new.effect_id),
        ).fetchone()
        if row is None:
            return
        _wait_no_more(tx, run, row, events, state, now)
        return
    if _is_barred(tx, run, new, attempt_id, events, state, now):
        return
    # Not applied, or undone, or the answer of a conversation of which another step was undone, so that it cannot go on:
    # a fresh attempt, whatever the retry policy says (contract 4.9).
    row = tx.execute(
        "UPDATE attempts SET state = 'closed', queue = NULL, live_task = NULL, hold = NULL, hold_json = NULL, "  # noqa: S608
        f"outcome = COALESCE(outcome, 'uncertain') WHERE attempt_id = ?1 AND {_WAITS_FOR} "
        "RETURNING task_no, task_id, number",
        (attempt_id, new.effect_id, new.status),
    ).fetchone()
    if row is None:
        return
    task_no, task_id, number = row
    tx.execute(
        "UPDATE tasks SET state = 'retry_scheduled', retry_at = ?, updated_at = ? WHERE task_no = ? "
        "AND ended_at IS NULL",
        (now, now, task_no),
    )
    payload = {"attempt": number, "reason": "reconciled", "to": "retry_scheduled"}
    events.append(Event("task.transition", task_id, canonical(payload)))
    state["tasks"] = [[task_no - run.first_task, "retry_scheduled", number, None, "reconciled"]]


def _is_barred(
    tx: Connection,
    run: Run,
    new: NewReconciliation,
    attempt_id: int,
    events: list[Event],
    state: dict[str, Any],
    now: int,
) -> bool:
    """End the attempt as failed if a fresh one would repeat what must not be repeated (see `standing`).

    An agent has done more than the step that is in doubt. As if its worker had just said so: the driver commits the
    failure, and what a person has to decide then is a repair, a fork or a compensation.
    """
    waits = tx.execute(
        f"SELECT task_no, task_id, number FROM attempts WHERE attempt_id = ?1 AND {_WAITS_FOR}",  # noqa: S608
        (attempt_id, new.effect_id, new.status),
    ).fetchone()
    if waits is None:
        return False
    in_doubt = None if new.status == "applied" else new.effect_id
    stands = standing.unrepeatable(tx, run.run_id, waits[0], besides=in_doubt)
    if not stands:
        return False
    error = canonical(standing.fault(stands, in_doubt).as_json())
    tx.execute(
        "UPDATE attempts SET state = 'finished', queue = 'finished', outcome = 'failed', result_json = NULL, "
        "result_effect = ?, error_json = ?, hold = NULL, hold_json = NULL, finished_at = COALESCE(finished_at, ?) "
        "WHERE attempt_id = ?",
        (new.effect_id, error, now, attempt_id),
    )
    _wait_no_more(tx, run, waits, events, state, now)
    return True


def _wait_no_more(
    tx: Connection, run: Run, row: tuple[int, str, int], events: list[Event], state: dict[str, Any], now: int
) -> None:
    """The attempt has a result now: the driver commits it with the others."""
    task_no, task_id, number = row
    tx.execute(
        "UPDATE tasks SET state = 'running', updated_at = ? WHERE task_no = ? AND state = 'waiting_for_effect'",
        (now, task_no),
    )
    if tx.changes():
        events.append(Event("task.transition", task_id, '{"from":"waiting_for_effect","to":"running"}'))
        state["tasks"] = [[task_no - run.first_task, "ready", number, None, None]]


def _is_one_of_many(tx: Connection, effect_id: str) -> bool:
    """Whether an effect is a step of an agent: its result is not that of the task."""
    row = tx.execute("SELECT effect_class, operation FROM effects WHERE effect_id = ?", (effect_id,)).fetchone()
    return row is not None and (row[0] == "model" or row[1].startswith(conversations.PREFIX))


def _take_up_again(
    tx: Connection,
    run: Run,
    new: NewReconciliation,
    attempt_id: int,
    events: list[Event],
    state: dict[str, Any],
    now: int,
) -> None:
    """The same attempt goes on with the recorded answer, as soon as its driver gives it a place."""
    row = tx.execute(
        "UPDATE attempts SET state = 'ready', queue = NULL, hold = 'place', outcome = NULL, result_json = NULL, "  # noqa: S608
        "result_effect = NULL, error_json = NULL, holder = NULL, finished_at = NULL, "
        f"lost_effects = {holds.CONFIRMED} "
        "WHERE attempt_id = ? AND state IN ('waiting', 'finished') AND outcome = 'uncertain' AND result_effect = ? "
        "RETURNING task_no, task_id, number",
        (attempt_id, new.effect_id),
    ).fetchone()
    if row is None:
        return
    task_no, task_id, number = row
    before = tx.execute("SELECT state FROM tasks WHERE task_no = ?", (task_no,)).fetchone()
    tx.execute("UPDATE tasks SET state = 'ready', updated_at = ? WHERE task_no = ?", (now, task_no))
    payload = {"from": before[0] if before else None, "to": "ready", "reason": "reconciled"}
    events.append(Event("task.transition", task_id, canonical(payload)))
    state["tasks"] = [[task_no - run.first_task, "ready", number, None, None]]
