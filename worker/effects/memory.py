"""`builtin.memory.write`: what a write to working memory comes to (contract 3 and 7). A promotion is one, too.

A pure computation. The change itself becomes visible when the coordinator commits the task: it derives the
delta from `key` and `after` of the recorded output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault

from . import EffectContext, EffectOutcome, EffectPlan, Work, refuse_cancelled


def prepare_memory_write(work: Work) -> EffectPlan:
    """`builtin.memory.write` itself."""
    return working_memory_write(work, operation="builtin.memory.write", policy_name="memory.write")


def working_memory_write(work: Work, *, operation: str, policy_name: str) -> EffectPlan:
    """`key`, and `value` (default null); output `{status, changed, before, after, key}`.

    An unchanged value makes an effect, too (contract 7). Values are compared by their canonical form, so
    `1`, `1.0` and `true` differ, and an absent key differs from one that holds null.
    """
    key = work.input.get("key")
    if not isinstance(key, str) or not key:
        raise TaskFault("invalid_input", "'key' must be a non-empty text")
    value = work.input.get("value")
    canonical(key)
    text = canonical(value)
    changed = key not in work.memory or canonical(work.memory[key]) != text
    output: dict[str, Any] = {
        "status": "changed" if changed else "unchanged",
        "changed": changed,
        "before": work.memory.get(key),
        "after": value,
        "key": key,
    }
    return EffectPlan(
        operation=operation,
        effect_class="internal_state",
        risk="low",
        idempotency="keyed",
        policy_name=policy_name,
        input={"key": key, "value": value},
        expected_effect={"key": key, "changed": changed},
        estimate={},
        execute=partial(_finish, output),
        foreseen=output,
    )


def _finish(output: dict[str, Any], context: EffectContext) -> EffectOutcome:
    return refuse_cancelled(context) or EffectOutcome("succeeded", output)
