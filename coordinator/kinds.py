"""What the coordinator knows of the effects of action kinds (contract section 3). Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from agentctl.store.policy import Decision, Policy, decide_effect, policy_name_of


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
    "builtin.long_term_memory.read": EffectFacts("long_term_memory.read", "observe", "low"),
    "builtin.long_term_memory.search": EffectFacts("long_term_memory.search", "observe", "low"),
    "builtin.long_term_memory.write": EffectFacts("long_term_memory.write", "external_mutate", "medium"),
    "builtin.long_term_memory.promote": EffectFacts("builtin.long_term_memory.promote", "internal_state", "low"),
    "mcp.call": EffectFacts("mcp.call", "network", "medium"),
    "a2a.delegate": EffectFacts("a2a.delegate", "remote_agent", "high"),
}
"""Action kinds that have an effect; the others (assign, assert, memory.read) have none."""


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
