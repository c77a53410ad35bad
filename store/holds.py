"""Attempts that wait without a worker and without a place: for an approval, for budget, for a place (architecture 4).

A held attempt is `ready` and not in the queue. Whoever holds it frees its worker in the same transaction; whoever ends
the reason only says `place`, and the driver of the run, who counts places, puts the attempt back into the queue. Every
function takes the open transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from .canonical import canonical
from .database import Connection, all_rows
from .errors import RunMoved
from .records import Event, Fence, HeldAttempt

CONFIRMED = "(SELECT COUNT(*) FROM effects e WHERE e.attempt_id = attempts.attempt_id AND e.status = 'succeeded')"
"""How many effects of an attempt are confirmed. Kept as `lost_effects` when a delivery ends without a result: the next
one has made progress only if there are more by then (see `task_queue.rescue`)."""


def hold(tx: Connection, fence: Fence, why: str, *, task_state: str, units: dict[str, int] | None, now: int) -> Event:
    """Take a claimed attempt out of the hands of its worker. It costs no delivery (contract table, row 5).

    `why` is `approval` or `budget`; for the latter `units` are what it needs. Raises `LeaseLost`.
    """
    row = tx.execute(
        "UPDATE attempts SET state = 'ready', queue = NULL, hold = ?, hold_json = ?, holder = NULL, "  # noqa: S608
        f"lease_expires_at = NULL, lost_effects = {CONFIRMED} "
        "WHERE attempt_id = ? AND delivery = ? AND holder = ? AND state = 'claimed' RETURNING task_no, task_id",
        (why, None if units is None else canonical(units), fence.attempt_id, fence.delivery, fence.holder),
    ).fetchone()
    if row is None:
        raise fence.lost()
    tx.execute("UPDATE tasks SET state = ?, updated_at = ? WHERE task_no = ?", (task_state, now, row[0]))
    payload = {"from": "running", "to": task_state, "reason": why, "delivery": fence.delivery}
    return Event("task.transition", row[1], canonical(payload))


def held(tx: Connection, run_id: str, first_task: int) -> list[HeldAttempt]:
    """All held attempts of a run in compiled order."""
    return [
        HeldAttempt(attempt_id, task_no - first_task, number, why)
        for attempt_id, task_no, number, why in tx.execute(
            "SELECT attempt_id, task_no, number, hold FROM attempts WHERE run_id = ? AND hold IS NOT NULL "
            "ORDER BY task_no",
            (run_id,),
        )
    ]


def waiting_for_budget(tx: Connection, run_id: str) -> list[tuple[int, str]]:
    """(attempt, needed units as JSON) of those that wait for budget, in compiled order."""
    return all_rows(
        tx.execute(
            "SELECT attempt_id, hold_json FROM attempts WHERE run_id = ? AND hold = 'budget' ORDER BY task_no",
            (run_id,),
        )
    )


def let_go(tx: Connection, attempt_id: int, why: str) -> bool:
    """The reason is gone: the attempt waits for a place only. False when it was not held for that reason."""
    tx.execute(
        "UPDATE attempts SET hold = 'place', hold_json = NULL WHERE attempt_id = ? AND hold = ?", (attempt_id, why)
    )
    return tx.changes() == 1


def queue(tx: Connection, attempt_ids: Sequence[int], run_id: str) -> None:
    """The driver has places for these: they are claimable again. Raises `RunMoved` when one is not held any more."""
    before = tx.total_changes()
    tx.executemany(
        "UPDATE attempts SET hold = NULL, hold_json = NULL, queue = 'ready' WHERE attempt_id = ? AND hold IS NOT NULL",
        [(attempt_id,) for attempt_id in attempt_ids],
    )
    if tx.total_changes() - before != len(attempt_ids):
        raise RunMoved("an attempt of this batch is no longer held", run_id=run_id)
