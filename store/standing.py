"""What a task has done that stands, and that a fresh attempt would do once more (seed: never without permission).

An attempt of an agent has many effects. The one whose end is in doubt says nothing about the others: those that are
known to have happened, and whose contract does not allow them twice, forbid that the conversation begins anew. Every
function takes the open transaction.
"""

from __future__ import annotations

import json
from typing import Any

from . import conclusions, runs
from .conversations import PREFIX
from .database import Connection, all_rows
from .errors import TaskFault
from .records import record
from .states import LOOKS_ONLY, REPEATABLE_IDEMPOTENCY, sql_words

CODE = "not_repeatable"
"""The code of a task that would have to do again what must not be done again."""

SHOWN = 5


@record
class Standing:
    """An effect that is known to have happened and must not happen twice."""

    effect_id: str
    attempt: int
    operation: str


def unrepeatable(tx: Connection, run_id: str, task_no: int, *, besides: str | None = None) -> list[Standing]:
    """The effects of all attempts of a task that stand and must not be repeated, oldest first; without `besides`.

    One that was undone, or found not to have happened, forbids nothing. Neither does the call of a tool whose author
    says `retrySafe`: that is the permission, as it is for the retry policy.
    """
    said = conclusions.latest_sql("status", "e.effect_id")
    found = [
        Standing(*row)
        for row in all_rows(
            tx.execute(
                "SELECT e.effect_id, e.attempt, e.operation FROM attempts a "  # noqa: S608
                "JOIN effects e ON e.attempt_id = a.attempt_id WHERE a.task_no = ? AND a.run_id = ? "
                f"AND e.effect_class NOT IN ({sql_words(LOOKS_ONLY)}) "
                f"AND e.idempotency NOT IN ({sql_words(REPEATABLE_IDEMPOTENCY)}) "
                f"AND COALESCE({said}, CASE WHEN e.confirmed = 1 THEN 'applied' END) = 'applied' "
                "AND e.effect_id IS NOT ? ORDER BY a.number, e.ordinal",
                (task_no, run_id, besides),
            )
        )
    ]
    if not any(effect.operation.startswith(PREFIX) for effect in found):
        return found
    tools = (json.loads(runs.settings(tx, run_id)[0]).get("models") or {}).get("tools", {})
    return [effect for effect in found if not _may_come_again(tools, effect.operation)]


def _may_come_again(tools: dict[str, Any], operation: str) -> bool:
    tool = tools.get(operation.removeprefix(PREFIX)) if operation.startswith(PREFIX) else None
    return tool is not None and bool(tool.get("retrySafe"))


def undone(tx: Connection, attempt_id: int) -> str | None:
    """An effect of an attempt that was undone since it succeeded: what came after it cannot go on (contract 5.3)."""
    said = conclusions.latest_sql("status", "e.effect_id")
    row = tx.execute(
        f"SELECT e.effect_id FROM effects e WHERE e.attempt_id = ? AND {said} = 'compensated' "  # noqa: S608
        "ORDER BY e.ordinal LIMIT 1",
        (attempt_id,),
    ).fetchone()
    return None if row is None else str(row[0])


def undone_fault(effect_id: str, operation: str) -> TaskFault:
    """Why an attempt cannot go on with what an earlier delivery of it has recorded."""
    return TaskFault(
        "effect_undone",
        f"effect {effect_id[:12]} ({operation}) was undone, so nothing can go on as if it stood; "
        "`retry` or `repair` begins the task anew",
        details={"effectId": effect_id},
    )


def fault(standing: list[Standing], effect_id: str | None) -> TaskFault:
    """Why a task may not begin anew; `effect_id` did not happen, if it is for its sake."""
    shown = ", ".join(f"{effect.effect_id[:12]} ({effect.operation})" for effect in standing[:SHOWN])
    more = f" and {len(standing) - SHOWN} more" if len(standing) > SHOWN else ""
    return TaskFault(
        "not_repeatable",  # CODE; written out, since the reference of errors is made from such calls
        f"a fresh attempt would repeat what has happened and must not be done twice: {shown}{more}",
        details={"effectIds": [effect.effect_id for effect in standing]}
        | ({} if effect_id is None else {"notApplied": effect_id}),
    )


def barred(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    """Tasks of a run that can have no fresh attempt, in compiled order: `{taskId, effectId, standingEffects, fails}`.

    `effectId` is the effect that is in doubt, or was. `fails`: it did not happen, so the task fails with the next
    commit of its driver; else it would if somebody said so.
    """
    found: list[dict[str, Any]] = []
    for task_no, task_id, effect_id, outcome, error_json in all_rows(
        tx.execute(
            "SELECT a.task_no, a.task_id, a.result_effect, a.outcome, a.error_json FROM attempts a "
            "JOIN runs r ON r.run_id = ? AND a.live_task BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
            "WHERE a.outcome IN ('uncertain', 'failed') AND a.result_effect IS NOT NULL ORDER BY a.task_no",
            (run_id,),
        )
    ):
        if outcome == "failed":
            ids = standing_of(error_json)
        else:
            ids = [effect.effect_id for effect in unrepeatable(tx, run_id, task_no, besides=effect_id)]
        if ids:
            item = {"taskId": task_id, "effectId": effect_id, "standingEffects": ids, "fails": outcome == "failed"}
            found.append(item)
    return found


def standing_of(error_json: str | None) -> list[str]:
    """The effects that the error of an attempt names, if it is that of this rule."""
    error = json.loads(error_json) if error_json else {}
    if error.get("code") != CODE:
        return []
    return [str(effect_id) for effect_id in error["details"]["effectIds"]]
