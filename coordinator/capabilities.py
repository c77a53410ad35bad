"""What each provider kind can do, and which options its agents may set (contract 12.2). Pure: no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .definition import Agent
from .diagnostics import Path

_BASE = frozenset({"function_tools", "structured_output", "continuation"})
_EMBEDS = frozenset({"embeddings"})
_LARGE = _BASE | {
    "reasoning_effort",
    "reasoning_mode",
    "persisted_reasoning",
    "prompt_caching",
    "multiple_function_calls",
    "response_storage",
    "streaming",
}
CAPABILITIES: dict[str, frozenset[str]] = {
    "fake": _BASE | {"streaming"} | _EMBEDS,
    "openai": _LARGE | _EMBEDS,
    "azure_openai": _LARGE | _EMBEDS,
    "openai_compatible": _BASE | {"streaming"} | _EMBEDS,
    "anthropic": _BASE | {"reasoning_effort"},
    "google": _BASE | {"reasoning_effort"} | _EMBEDS,
}
"""Provider kind to its capabilities. Nobody offers cost metadata."""


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _text(value: Any) -> bool:
    return type(value) is str and bool(value)


def _flag(value: Any) -> bool:
    return type(value) is bool


def _one_of(*words: str) -> Callable[[Any], bool]:
    return lambda value: type(value) is str and value in words


_OPENAI_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "store": _flag,
    "reasoningContext": _one_of("auto", "current_turn", "all_turns"),
    "promptCacheMode": _one_of("implicit", "explicit"),
    "promptCacheTtl": _one_of("30m"),
    "parallelToolCalls": _flag,
    "safetyIdentifier": _text,
}
OPTIONS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "fake": {
        "toolInput": lambda value: type(value) is dict,
        "finalText": lambda value: type(value) is str,
        "delayMs": _count,
        "failFirst": _count,
    },
    "openai": _OPENAI_OPTIONS,
    "azure_openai": _OPENAI_OPTIONS,
}
"""Provider kind to the options that agents may set, with a check of the value. Other kinds take none."""


_REMEDIES = {"cost_metadata": "give runtime.pricing.models an entry for its PROVIDER/MODEL, or leave maxCostUsd out"}
"""Capability to what a document can do about it, where it can do something."""


def embedding_problem(kind: str, model: str | None) -> tuple[str, str, str] | None:
    """(field, message, help) when a provider of such a kind cannot embed what long-term memory holds."""
    if "embeddings" not in CAPABILITIES[kind]:
        others = ", ".join(name for name, offered in CAPABILITIES.items() if "embeddings" in offered)
        return (
            "provider",
            f"a provider of kind {kind} does not offer embeddings",
            f"one of kind {others}, or local_hash",
        )
    if kind != "fake" and model is None:
        return "model", f"an embedding by a provider of kind {kind} needs the name of a model", "write embedding.model"
    return None


def agent_problems(agent: Agent, kind: str, *, priced: bool) -> Iterator[tuple[Path, str, str | None]]:
    """What an agent asks for that its provider kind does not offer: place below the agent, message, and remedy.

    `priced`: the document has a price of its model, so that a limit in dollars can be held.
    """
    offered = CAPABILITIES[kind]
    wanted: list[tuple[str, str]] = []
    if agent.tools:
        wanted += [("tools", "function_tools"), ("tools", "continuation")]
    if agent.structured_output is not None:
        wanted.append(("structuredOutput", "structured_output"))
    if agent.reasoning is not None:
        wanted.append(("reasoning", "reasoning_effort"))
        if agent.reasoning.mode is not None:
            wanted.append(("reasoning", "reasoning_mode"))
    if agent.stream:
        wanted.append(("stream", "streaming"))
    if agent.usage_limit is not None and agent.usage_limit.max_cost_usd is not None and not priced:
        wanted.append(("usageLimit", "cost_metadata"))
    for name, capability in wanted:
        if capability not in offered:
            yield (name,), f"a provider of kind {kind} does not offer {capability}", _REMEDIES.get(capability)
    known = OPTIONS.get(kind, {})
    for name, value in agent.provider_options.items():
        check = known.get(name)
        if check is None:
            yield ("providerOptions", name), f"a provider of kind {kind} has no option {name}", None
        elif not check(value):
            yield ("providerOptions", name), f"{value!r} is not a value of the option {name}", None
    if agent.tools and agent.provider_options.get("store") is False:
        yield ("providerOptions", "store"), "store: false cannot be used together with tools", None
