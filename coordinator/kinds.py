"""What the coordinator knows of the effects of action kinds (contract section 3). Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EffectFacts:
    """How the effect of an action kind is judged: its class and risk, and the name that policy rules use."""

    effect_class: str
    risk: str
    policy_name: str


EFFECTS: dict[str, EffectFacts] = {
    "builtin.read": EffectFacts("observe", "low", "filesystem.read"),
    "builtin.write": EffectFacts("workspace_mutate", "medium", "filesystem.write"),
    "builtin.memory.write": EffectFacts("internal_state", "low", "memory.write"),
    "builtin.shell.exec": EffectFacts("process_execution", "high", "process.exec"),
    "extension.process": EffectFacts("process_execution", "high", "extension.process"),
    "builtin.long_term_memory.read": EffectFacts("observe", "low", "memory.read"),
    "builtin.long_term_memory.search": EffectFacts("observe", "low", "memory.search"),
    "builtin.long_term_memory.write": EffectFacts("external_mutate", "medium", "memory.write"),
    "builtin.long_term_memory.promote": EffectFacts("internal_state", "low", "memory.promote"),
    "mcp.call": EffectFacts("network", "medium", "mcp.call"),
    "a2a.delegate": EffectFacts("remote_agent", "high", "a2a.delegate"),
}
"""Action kinds that have an effect; the others (assign, assert, memory.read) have none."""
