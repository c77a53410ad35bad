"""Which of the conclusions about an effect counts (contract 5.5): the latest one."""

from __future__ import annotations


def latest_sql(column: str, effect: str) -> str:
    """A subquery for one column of the conclusion that counts about the effect that `effect` names."""
    return (
        f"(SELECT c.{column} FROM effect_reconciliations c WHERE c.effect_id = {effect} "  # noqa: S608
        "ORDER BY c.created_at DESC, c.reconciliation_no DESC LIMIT 1)"
    )
