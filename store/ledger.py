"""The resource ledger of a run: reserve before dispatch, settle with what was used (seed; contract 6).

Every function takes the open transaction, so a limit holds to the last unit however many processes pull at it. A
reservation is named by effect and dispatch: asking twice for the same one changes nothing.
"""

from __future__ import annotations

import json

from .database import Connection, all_rows

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
    tx: Connection, run_id: str, reservation_id: str, dispatch: int, estimate: dict[str, int]
) -> dict[str, object] | None:
    """Hold units for one dispatch, all dimensions or none. Only dimensions with a limit are held.

    Returns None when they fit, else what was exceeded: dimension, limit, attempted, and `wait` when the units would
    fit beside what is used, so that waiting for others can help (row 20 of the contract's table).
    """
    if not estimate:
        return None
    lines = {
        dimension: (limit, used, reserved)
        for dimension, limit, used, reserved in tx.execute(
            "SELECT dimension, limit_units, used, reserved FROM budget_lines "
            "WHERE run_id = ? AND limit_units IS NOT NULL",
            (run_id,),
        )
    }
    if not lines:
        return None
    known = tx.execute(
        "SELECT 1 FROM budget_reservations "
        "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state <> 'released' LIMIT 1",
        (run_id, reservation_id, dispatch),
    ).fetchone()
    if known is not None:
        return None
    wanted = dict(estimate)
    if "inputTokens" in wanted or "outputTokens" in wanted:
        wanted["totalTokens"] = wanted.get("inputTokens", 0) + wanted.get("outputTokens", 0)
    for dimension in ORDER:
        if dimension in wanted and dimension in lines:
            limit, used, reserved = lines[dimension]
            if used + reserved + wanted[dimension] > limit:
                return {
                    "dimension": dimension,
                    "limit": limit,
                    "attempted": used + reserved + wanted[dimension],
                    "wait": used + wanted[dimension] <= limit,
                }
    for dimension, units in wanted.items():
        if dimension in lines:
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


def settle(tx: Connection, run_id: str, reservation_id: str, dispatch: int, usage: dict[str, int]) -> None:
    """Replace what was held by what was used. Settling twice changes nothing: only open reservations move."""
    actual = dict(usage)
    if "inputTokens" in actual or "outputTokens" in actual:
        actual["totalTokens"] = actual.get("inputTokens", 0) + actual.get("outputTokens", 0)
    _settle(tx, run_id, reservation_id, dispatch, actual)


def _settle(tx: Connection, run_id: str, reservation_id: str, dispatch: int, actual: dict[str, int]) -> None:
    opened = _close(tx, run_id, reservation_id, dispatch, "settled")
    for dimension, units in opened:
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
                "ON CONFLICT (run_id, dimension) DO UPDATE SET used = used + excluded.used",
                (run_id, dimension, units),
            )


def release(tx: Connection, run_id: str, reservation_id: str, dispatch: int) -> None:
    """Give back what a dispatch held that provably never happened."""
    for dimension, units in _close(tx, run_id, reservation_id, dispatch, "released"):
        tx.execute(
            "UPDATE budget_lines SET reserved = reserved - ? WHERE run_id = ? AND dimension = ?",
            (units, run_id, dimension),
        )


def charge_lost(tx: Connection, run_id: str, reservation_id: str, dispatch: int) -> None:
    """A lost dispatch of an effect that is sent again: its whole estimate counts as used (architecture 4)."""
    held: dict[str, int] = dict(
        all_rows(
            tx.execute(
                "SELECT dimension, units FROM budget_reservations "
                "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state = 'open'",
                (run_id, reservation_id, dispatch),
            )
        )
    )
    _settle(tx, run_id, reservation_id, dispatch, held)


def _close(tx: Connection, run_id: str, reservation_id: str, dispatch: int, state: str) -> list[tuple[str, int]]:
    return all_rows(
        tx.execute(
            "UPDATE budget_reservations SET state = ? "
            "WHERE run_id = ? AND reservation_id = ? AND dispatch = ? AND state = 'open' RETURNING dimension, units",
            (state, run_id, reservation_id, dispatch),
        )
    )


def as_json(tx: Connection, run_id: str) -> dict[str, object]:
    """The ledger of a run as `inspect` shows it (contract 6)."""
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
