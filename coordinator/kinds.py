"""What the coordinator knows of the effects of action kinds (contract section 3). Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentctl.store.policy import Decision, Policy, decide_effect, policy_name_of
from agentctl.store.states import LOOKS_ONLY

if TYPE_CHECKING:
    from .definition import Spec


@dataclass(frozen=True, slots=True)
class EffectFacts:
    """How the effect of an action kind is recorded and judged: operation, class and risk."""

    operation: str
    effect_class: str
    risk: str

    @property
    def policy_name(self) -> str:
        """The name that `toolsAllow` and `toolsDeny` use."""
        return policy_name_of(self.operation)


EFFECTS: dict[str, EffectFacts] = {
    "builtin.read": EffectFacts("builtin.read", "observe", "low"),
    "builtin.write": EffectFacts("builtin.write", "workspace_mutate", "medium"),
    "builtin.memory.write": EffectFacts("builtin.memory.write", "internal_state", "low"),
    "builtin.shell.exec": EffectFacts("builtin.shell.exec", "process_execution", "high"),
    "extension.process": EffectFacts("extension.process", "process_execution", "high"),
    "builtin.long_term_memory.read": EffectFacts("builtin.long_term_memory.read", "observe", "low"),
    "builtin.long_term_memory.search": EffectFacts("builtin.long_term_memory.search", "observe", "low"),
    "builtin.long_term_memory.write": EffectFacts("builtin.long_term_memory.write", "external_mutate", "medium"),
    "builtin.long_term_memory.promote": EffectFacts("builtin.long_term_memory.promote", "internal_state", "low"),
    "mcp.call": EffectFacts("mcp.call", "network", "medium"),
    "a2a.delegate": EffectFacts("a2a.delegate", "remote_agent", "high"),
}
"""Action kinds that have an effect; the others (assign, assert, memory.read) have none."""

MUTATING = frozenset(kind for kind, facts in EFFECTS.items() if facts.effect_class not in LOOKS_ONLY)
"""Action kinds whose effect changes something: what can be compensated, and can compensate (contract 2.9)."""


def may_mutate(spec: Spec, uses: str) -> bool:
    """Whether a task that uses this may change something: such an action, or an agent with a tool that does.

    What it names and is not there, is reported elsewhere.
    """
    kind, _, name = uses.partition(":")
    if kind == "action":
        action = spec.actions.get(name)
        return action is None or action.kind in MUTATING
    agent = spec.agents.get(name)
    if kind != "agent" or agent is None:
        return kind == "agent"
    tools = [spec.tools[tool] for tool in agent.tools if tool in spec.tools]
    return any(tool.effect_class not in LOOKS_ONLY for tool in tools)


def decision_on(policy: Policy, kind: str | None, *, interactive: bool = False) -> Decision | None:
    """What the policy says of the effect of an action kind, whatever its input; None for a kind without effect."""
    facts = EFFECTS.get(kind or "")
    if facts is None:
        return None
    return decide_effect(
        policy,
        policy_name=facts.policy_name,
        effect_class=facts.effect_class,
        risk=facts.risk,
        interactive=interactive,
    )


def approved_steps(policy: Policy, agent: Mapping[str, Any], tools: Mapping[str, Any]) -> Iterator[str]:
    """The operations of an agent that a person has to approve first, as far as its run comes to them (contract 11.1).

    `agent` and `tools` are as in a plan. A tool is taken by what it says of itself, which is never less than it does.
    """
    steps = [] if agent.get("instructionsFile") is None else [("agent.instructions.read", "observe", "low", "policy")]
    steps.append((agent["provider"], "model", "medium", "policy"))
    for name in sorted(agent["tools"]):
        tool = tools[name]
        steps.append((f"tool.{name}", tool["effectClass"], tool["risk"], tool["approval"]))
    # Whether names are allowed is another question: a tool has several.
    bare = replace(policy, providers=frozenset(), tools_allow=frozenset(), tools_deny=frozenset())
    for operation, effect_class, risk, approval in steps:
        decision = decide_effect(
            bare,
            policy_name=operation,
            effect_class=effect_class,
            risk=risk,
            tool_approval=approval,
        )
        if decision.needs_approval:
            yield operation
