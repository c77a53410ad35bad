"""Tools that models may call, held against what they do (contract 1.6 and 11.1). Pure: no I/O.

A tool of `kind: action` stands for a declared action. What it says of itself (capability, effect class, risk) has to be
what the action does: policy and approvals go by it, so a tool must not make itself smaller than it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .definition import Action, Tool
from .diagnostics import Path
from .expressions import has_template
from .kinds import EFFECTS
from .plan import MEMORY_WRITERS

RISKS = ("low", "medium", "high", "critical")

EFFECT_OF_TOOL = {
    "builtin.workspace.read": "builtin.read",
    "builtin.workspace.write": "builtin.write",
}
"""Built-in tools and the actions that are their like."""

IDEMPOTENCY = {
    "builtin.read": "idempotent",
    "builtin.write": "idempotent",
    "builtin.long_term_memory.read": "keyed",
    "builtin.long_term_memory.search": "keyed",
    "builtin.long_term_memory.write": "keyed",
    "a2a.delegate": "at_most_once",
}
"""What kinds promise whose actions say nothing of it (contract 3)."""

Finding = tuple[Path, str, str | None]
"""Place below the tool, message, help."""


def tool_problems(tool: Tool, action: Action) -> Iterator[Finding]:
    """What does not fit between a tool of `kind: action` and its action."""
    facts = EFFECTS.get(action.kind)
    if facts is None:
        yield ("action",), f"an action of kind {action.kind} has no effect and cannot be a tool", None
        return
    if action.kind in MEMORY_WRITERS:
        hint = "let a task write what the agent has answered"
        yield ("action",), "a tool cannot write working memory, which belongs to tasks", hint
        return
    if tool.capability != facts.policy_name:
        yield ("capability",), f"an action of kind {action.kind} has the capability {facts.policy_name}", None
    if tool.effect_class != facts.effect_class:
        yield ("effectClass",), f"an action of kind {action.kind} has the effectClass {facts.effect_class}", None
    if RISKS.index(tool.risk) < RISKS.index(facts.risk):
        yield ("risk",), f"an action of kind {action.kind} has at least the risk {facts.risk}", None
    promised = IDEMPOTENCY.get(action.kind) or action.idempotency or "unknown"
    if tool.idempotency != promised:
        how = None if action.kind in IDEMPOTENCY else "declare the idempotency of the action"
        yield ("idempotency",), f"the action has the idempotency {promised}", how
    if has_template(action.with_):
        hint = "give the tool an action of its own, with literal values"
        yield ("action",), "the with of an action that is a tool has no templates: nothing renders them", hint


def input_problems(
    tool: Tool, action: Action, fields: Mapping[str, Any] | None, required: Collection[str]
) -> Iterator[Finding]:
    """What a model would be asked for that the action does not take, and what nobody gives. `fields` None: anything."""
    properties = tool.input_schema.get("properties", {})
    if fields is None or not isinstance(properties, dict):
        return
    for name in properties:
        if name not in fields:
            hint = f"fields of {action.kind}: {', '.join(sorted(fields))}"
            yield ("inputSchema", "properties", name), f"{action.kind} has no field {name!r}", hint
    for name in required:
        if name not in properties and name not in action.with_:
            hint = f"ask the model for {name}, or set it in the with of the action"
            yield ("inputSchema",), f"{action.kind} needs {name}, which neither the model nor the action gives", hint
