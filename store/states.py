"""States and their one table of moves (contract 4.1 and row 23 of the table). Pure.

The documents and the tests are derived from `TASK_MOVES`, `RUN_MOVES` and `EFFECT_MOVES`.
"""

from __future__ import annotations

from collections.abc import Iterable

RUN_FINAL = frozenset({"succeeded", "failed", "cancelled"})
TASK_FINAL = frozenset({"succeeded", "failed", "skipped", "cancelled"})
EFFECT_FINAL = frozenset({"succeeded", "failed", "cancelled", "uncertain"})

RUN_MOVES: dict[str, frozenset[str]] = {
    "running": frozenset({"paused", "succeeded", "failed", "cancelled"}),
    "paused": frozenset({"running", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}

# `pending -> succeeded` is one transaction of the driver in which a task without effect becomes ready, runs and ends.
TASK_MOVES: dict[str, frozenset[str]] = {
    "pending": frozenset({"ready", "skipped", "cancelled", "failed", "succeeded"}),
    "ready": frozenset({"running", "cancelled"}),
    "running": frozenset(
        {
            "ready",
            "waiting_for_approval",
            "waiting_for_effect",
            "retry_scheduled",
            "succeeded",
            "failed",
            "cancelled",
        }
    ),
    "waiting_for_approval": frozenset({"ready", "running", "failed", "cancelled"}),
    "waiting_for_effect": frozenset({"ready", "running", "retry_scheduled", "failed", "cancelled"}),
    "retry_scheduled": frozenset({"ready", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "skipped": frozenset(),
    "cancelled": frozenset(),
}

EFFECT_MOVES: dict[str, frozenset[str]] = {
    "requested": frozenset({"started", "cancelled"}),
    "waiting_for_approval": frozenset({"requested", "cancelled"}),
    "started": frozenset({"requested", "succeeded", "failed", "uncertain"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "uncertain": frozenset(),
}

REPEATABLE_IDEMPOTENCY = frozenset({"pure", "idempotent", "keyed"})
REPEATABLE_CLASSES = frozenset({"pure", "observe"})
LEAVES_NO_TRACE = frozenset({"pure", "observe", "internal_state"})
LOOKS_ONLY = frozenset({"pure", "observe", "model"})
"""Effect classes that change nothing which could be undone (contract 5.7)."""
MUTATING = frozenset({"workspace_mutate", "external_mutate", "process_execution", "network", "remote_agent"})
"""Classes of effects that may be unsafe to repeat; all others never are (contract 5.6)."""


BRIEF_KINDS = frozenset({"builtin.read", "builtin.memory.write"})
"""Action kinds that a worker carries out by itself and, as a rule, within a fraction of a millisecond."""


def may_repeat(effect_class: str, idempotency: str) -> bool:
    """Whether an effect whose outcome is unknown may be dispatched again (architecture 4).

    Yes only where its contract says so: idempotency pure, idempotent or keyed, or a class that changes nothing.
    """
    return idempotency in REPEATABLE_IDEMPOTENCY or effect_class in REPEATABLE_CLASSES


def sql_words(names: Iterable[str]) -> str:
    """Names as SQL writes them, in an order that is always the same: for `IN (…)`."""
    return ", ".join(repr(name) for name in sorted(names))
