"""The resource ledger of a run: reserve before dispatch, settle with what was used (seed; contract 6).

Every function takes the open transaction, so a limit holds to the last unit however many processes pull at it. A
reservation is named by effect and dispatch: asking twice for the same one changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from . import audit, holds
from .answers import MAX_UNITS
from .canonical import canonical
from .database import Connection, all_rows
from .records import Event

ORDER = (
    "providerRequests",
    "turns",
    "toolCalls",
    "inputTokens",
    "outputTokens",
    "totalTokens",
    "wallTimeSeconds",
    "processOutputBytes",
    "artifactBytes",
    "costMicrousd",
)
"""The order in which an exceeded dimension is looked for (contract 6)."""


def reserve(
    tx: Connection,
    run_id: str,
    task_id: str,
    reservation_id: str,
    dispatch: int,
    estimate: dict[str, int],
    events: list[Event],
) -> dict[str, object] | None:
    """Hold units for one dispatch, all dimensions or none. Only dimensions with a limit are held here; what is
    estimated in others stands in the row of the effect, and counts when nobody knows what was used (`charge_lost`).

    Returns None when they fit, else what was exceeded: dimension, limit, attempted, and `wait` when the units would
    fit beside what is used, so that waiting for others can help (row 20 of the contract's table). The event of a
    reservation is added to `events` for the caller's transaction.
    """
    if not estimate:
        return None
    lines = _limits(tx, run_id)
    if not lines:
        return None
    if _is_reserved(tx, run_id, reservation_id, dispatch):
        return None
    wanted = with_total(estimate)
    denied = _first_exceeded(wanted, lines)
    if denied is not None:
        return denied
    units_held = {dimension: units for dimension, units in wanted.items() if dimension in lines}
    if not units_held:
        return None
    payload = {"reservationId": reservation_id, "dispatch": dispatch, "units": units_held}
    events.append(Event("budget.reserved", task_id, canonical(payload)))
    for dimension, units in units_held.items():
        tx.execute(
            "UPDATE budget_lines SET reserved = reserved + ? WHERE run_id = ? AND dimension = ?",
            (units, run_id, dimension),
        )
        tx.execute(
            # A dispatch that never was gives its number to the next one.
            "INSERT INTO budget_reservations VALUES (?,?,?,?,?,NULL,'open') "
            "ON CONFLICT DO UPDATE SET units = excluded.units, state = 'open'",
            (run_id, reservation_id, dispatch, dimension, units),
        )
    return None


def reserve_together(
    tx: Connection,
    run_id: str,
    task_id: str,
    dispatch: int,
    estimates: dict[str, dict[str, int]],
    events: list[Event],
) -> dict[str, object] | None:
    """Hold units under several names (reservation id to estimate), all of them or none; else as `reserve`."""
    lines = _limits(tx, run_id)
    if not lines:
        return None
    wanted: dict[str, int] = {}
    for name, estimate in estimates.items():
        if not _is_reserved(tx, run_id, name, dispatch):
            for dimension, units in with_total(estimate).items():
                wanted[dimension] = wanted.get(dimension, 0) + units
    denied = _first_exceeded(wanted, lines)
    if denied is not None:
        return denied
    for name, estimate in estimates.items():
        reserve(tx, run_id, task_id, name, dispatch, estimate, events)
    return None


def _is_reserved(tx: Connection, run_id: str, reservation_id: str, dispatch: int) -> bool:
    known = tx.execute(
        "SELECT 1 FROM budget_reservations "
        "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state <> 'released' LIMIT 1",
        (run_id, reservation_id, dispatch),
    ).fetchone()
    return known is not None


def _first_exceeded(wanted: dict[str, int], lines: dict[str, tuple[int, int, int]]) -> dict[str, object] | None:
    """The first dimension, in the order of the contract, that waits or is denied; a denial comes before a wait."""
    waits: dict[str, object] | None = None
    for dimension in ORDER:
        if dimension in wanted and dimension in lines:
            limit, used, reserved = lines[dimension]
            if used + reserved + wanted[dimension] > limit:
                found: dict[str, object] = {
                    "dimension": dimension,
                    "limit": limit,
                    "attempted": used + reserved + wanted[dimension],
                    "wait": used + wanted[dimension] <= limit,
                }
                if not found["wait"]:
                    return found
                waits = waits or found
    return waits


def record_exceeded(
    tx: Connection, run_id: str, task_id: str | None, detail: dict[str, object], event_type: str, *, now: int
) -> Event:
    """Write down what was exceeded. The first one stays; every one is an event."""
    found = canonical({name: detail[name] for name in ("dimension", "limit", "attempted")})
    tx.execute(
        "UPDATE run_budgets SET exceeded_json = COALESCE(exceeded_json, ?), updated_at = ? WHERE run_id = ?",
        (found, now, run_id),
    )
    audit.append_checkpoint(tx, run_id, f'{{"budget":{{"exceeded":{found}}}}}', now=now)
    return Event(event_type, task_id, found)


def exceeded(tx: Connection, run_id: str) -> bool:
    """Whether something of this budget was exceeded."""
    row = tx.execute("SELECT exceeded_json IS NOT NULL FROM run_budgets WHERE run_id = ?", (run_id,)).fetchone()
    return row is not None and bool(row[0])


def overdrawn(tx: Connection, run_id: str) -> dict[str, object] | None:
    """What of a run is over its limit, since something has used more than it had reserved (see `settle`), or None."""
    for dimension, (limit, used, _) in _limits(tx, run_id).items():
        if used > limit:
            return {"dimension": dimension, "limit": limit, "attempted": used}
    return None


def _limits(tx: Connection, run_id: str) -> dict[str, tuple[int, int, int]]:
    """Dimension -> (limit, used, reserved), of those with a limit."""
    return {
        dimension: (limit, used, reserved)
        for dimension, limit, used, reserved in tx.execute(
            "SELECT dimension, limit_units, used, reserved FROM budget_lines "
            "WHERE run_id = ? AND limit_units IS NOT NULL",
            (run_id,),
        )
    }


def _clear_holds(tx: Connection, run_id: str) -> None:
    """Units have become free: let go, in compiled order, those who wait for them, as far as they fit.

    Who comes first is served first, however much it needs: nobody starves behind small ones. One that can never fit is
    let go as well, to be denied.
    """
    waiting = holds.waiting_for_budget(tx, run_id)
    if not waiting:
        return
    lines = _limits(tx, run_id)
    for attempt_id, text in waiting:
        wanted = with_total(json.loads(text))
        found = _first_exceeded(wanted, lines)
        if found is not None and found["wait"]:
            return
        holds.let_go(tx, attempt_id, "budget")
        if found is not None:
            continue
        for dimension, units in wanted.items():
            if dimension in lines:
                limit, used, reserved = lines[dimension]
                lines[dimension] = (limit, used, reserved + units)


def with_total(units: dict[str, int]) -> dict[str, int]:
    """Units with `totalTokens`, which is input and output together (contract 6)."""
    if "totalTokens" not in units and ("inputTokens" in units or "outputTokens" in units):
        return {**units, "totalTokens": units.get("inputTokens", 0) + units.get("outputTokens", 0)}
    return dict(units)


def settle(
    tx: Connection,
    run_id: str,
    task_id: str,
    reservation_id: str,
    dispatch: int,
    usage: dict[str, int],
    events: list[Event],
    *,
    now: int,
) -> dict[str, object] | None:
    """Replace what was held by what was used. Settling twice changes nothing: only open reservations move.

    A line counts up to `MAX_UNITS` and stays there: a sum that no column holds would otherwise end the worker that has
    the answer, and the answer with it.

    Returns what is exceeded now, if more was used than reserved and the limit with it (contract 6), else None.
    """
    actual = {dimension: min(units, MAX_UNITS) for dimension, units in with_total(usage).items()}
    opened = dict(_close(tx, run_id, reservation_id, dispatch, "settled"))
    for dimension, units in opened.items():
        tx.execute(
            "UPDATE budget_reservations SET actual = ? "
            "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND dimension = ?",
            (actual.get(dimension, 0), run_id, reservation_id, dispatch, dimension),
        )
        tx.execute(
            "UPDATE budget_lines SET reserved = reserved - ? WHERE run_id = ? AND dimension = ?",
            (units, run_id, dimension),
        )
    for dimension, units in actual.items():
        if units:
            tx.execute(
                "INSERT INTO budget_lines (run_id, dimension, used) VALUES (?,?,?) "
                "ON CONFLICT (run_id, dimension) DO UPDATE SET used = excluded.used + MIN(used, ? - excluded.used)",
                (run_id, dimension, units, MAX_UNITS),
            )
    if not opened:
        return None
    used = {dimension: actual.get(dimension, 0) for dimension in opened}
    payload = {"reservationId": reservation_id, "dispatch": dispatch, "units": used}
    events.append(Event("budget.reconciled", task_id, canonical(payload)))
    _clear_holds(tx, run_id)
    if all(used[dimension] <= units for dimension, units in opened.items()):
        return None
    for dimension, (limit, total, _) in _limits(tx, run_id).items():
        if total > limit and used.get(dimension, 0) > opened.get(dimension, 0):
            detail: dict[str, object] = {"dimension": dimension, "limit": limit, "attempted": total}
            events.append(record_exceeded(tx, run_id, task_id, detail, "budget.reconciled_exceeded", now=now))
            return detail
    return None


def release(tx: Connection, run_id: str, task_id: str, reservation_id: str, dispatch: int, events: list[Event]) -> None:
    """Give back what a dispatch held that provably never happened."""
    opened = _close(tx, run_id, reservation_id, dispatch, "released")
    for dimension, units in opened:
        tx.execute(
            "UPDATE budget_lines SET reserved = reserved - ? WHERE run_id = ? AND dimension = ?",
            (units, run_id, dimension),
        )
    if opened:
        payload = {"reservationId": reservation_id, "dispatch": dispatch, "released": dict(opened)}
        events.append(Event("budget.reconciled", task_id, canonical(payload)))
        _clear_holds(tx, run_id)


def charge_lost(
    tx: Connection, run_id: str, task_id: str, reservation_id: str, dispatch: int, events: list[Event], *, now: int
) -> None:
    """What a dispatch reserved counts as used: it is lost and sent again, or nobody will ever know (architecture 4).

    Dimensions with a limit have a reservation. What the effect was estimated at in others stands in its row.
    """
    row = tx.execute("SELECT estimate_json FROM effects WHERE effect_id = ?", (reservation_id,)).fetchone()
    estimate = {} if row is None or row[0] is None else with_total(json.loads(row[0]))
    limits = _limits(tx, run_id) if estimate else {}
    lost = {dimension: units for dimension, units in estimate.items() if dimension not in limits}
    lost |= dict(
        all_rows(
            tx.execute(
                "SELECT dimension, units FROM budget_reservations "
                "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state = 'open'",
                (run_id, reservation_id, dispatch),
            )
        )
    )
    if lost:
        settle(tx, run_id, task_id, reservation_id, dispatch, lost, events, now=now)


def _close(tx: Connection, run_id: str, reservation_id: str, dispatch: int, state: str) -> list[tuple[str, int]]:
    return all_rows(
        tx.execute(
            "UPDATE budget_reservations SET state = ? "
            "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state = 'open' RETURNING dimension, units",
            (state, run_id, reservation_id, dispatch),
        )
    )


def _unlimited(tx: Connection, run_id: str, limits: dict[str, int]) -> Iterator[tuple[str, int]]:
    """What effects in flight, and those that nobody knows the end of, have reserved in dimensions without a limit."""
    for (text,) in tx.execute(
        "SELECT e.estimate_json FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
        "WHERE a.queue = 'claimed' AND a.run_id = ?1 AND e.status = 'started' AND e.estimate_json IS NOT NULL "
        "UNION ALL SELECT e.estimate_json FROM effects e WHERE e.run_id = ?1 AND e.status = 'uncertain' "
        "AND e.superseded = 0 AND e.estimate_json IS NOT NULL "
        "AND NOT EXISTS (SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = e.effect_id)",
        (run_id,),
    ):
        for dimension, units in json.loads(text).items():
            if dimension not in limits and dimension != "wallTimeSeconds":
                yield dimension, units


def seconds_since(created_at: int, now: int) -> int:
    """The wall time of a run: whole seconds since its creation, begun ones count; no less than none by a clock that was
    set back."""
    return max(0, -((created_at - now) // 1000))


def wall_time_observed(created_at: int, *, now: int) -> Event:
    """What a run has used of its wall time, told whenever it is resumed, and whenever it stops (contract 6)."""
    return Event("budget.wall_time_observed", None, canonical({"elapsedSeconds": seconds_since(created_at, now)}))


def as_json(tx: Connection, run_id: str, *, now: int) -> dict[str, object]:
    """The ledger of a run as `inspect` shows it (contract 6).

    Wall time is counted from the creation of the run, pauses included, and only as long as it has not ended.
    """
    head = tx.execute(
        "SELECT format_version, pricing_version, exceeded_json, planned_tasks, planned_expansion_items, "
        "planned_loop_iterations, updated_at FROM run_budgets WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    limits: dict[str, int] = {}
    usage: dict[str, int] = {}
    reserved: dict[str, int] = {}
    for dimension, limit, used, held in tx.execute(
        "SELECT dimension, limit_units, used, reserved FROM budget_lines WHERE run_id = ? ORDER BY dimension", (run_id,)
    ):
        if limit is not None:
            limits[dimension] = limit
        if dimension != "totalTokens":
            usage[dimension] = used
            reserved[dimension] = held
    for dimension, units in _unlimited(tx, run_id, limits):
        reserved[dimension] = reserved.get(dimension, 0) + units
    span = tx.execute("SELECT created_at, ended_at FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    if span is not None:
        usage["wallTimeSeconds"] = seconds_since(span[0], span[1] or now)
    reserved.pop("wallTimeSeconds", None)
    if head is None:
        return {"limits": limits, "usage": usage, "reserved": reserved}
    return {
        "formatVersion": head[0],
        "limits": limits,
        "pricingVersion": head[1],
        "usage": usage,
        "reserved": reserved,
        "exceeded": None if head[2] is None else json.loads(head[2]),
        "plannedTasks": head[3],
        "plannedExpansionItems": head[4],
        "plannedLoopIterations": head[5],
        "updatedAt": head[6],
    }
