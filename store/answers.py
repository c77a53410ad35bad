"""What an answer of a model has to look like, and what it costs (contract 5.5, 6 and 12.1). Pure: no I/O.

An answer is recorded as the result of its effect, by a worker or by a person who reconciles; both are held to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MICRO = 1_000_000
"""Prices are for so many tokens."""

MAX_UNITS = 2**63 - 1
"""The most of anything that the ledger of a run can count. What claims to have used more counts as this much: it is
over every limit, and an answer is not lost because its bill is absurd."""

FINISH_REASONS = ("complete", "tool_calls", "max_tokens", "refusal", "cancelled")

_TOKENS = ("inputTokens", "outputTokens", "reasoningTokens", "cacheReadTokens", "cacheWriteTokens")
_FIELDS = frozenset({"responseId", "text", "toolCalls", "assistantContent", "continuation", "usage", "finishReason"})
_CONTINUATIONS = ("openai_previous_response", "conversation")


def answer_problem(value: Any) -> str | None:
    """Why a JSON value is no answer of a model, or None."""
    if not isinstance(value, dict):
        return "an answer is an object"
    if missing := sorted(_FIELDS - value.keys()):
        return f"it has no {', '.join(missing)}"
    if unknown := sorted(value.keys() - _FIELDS):
        return f"it has unknown fields: {', '.join(unknown)}"
    if not isinstance(value["responseId"], str) or not isinstance(value["text"], str):
        return "responseId and text must be text"
    if value["finishReason"] not in FINISH_REASONS:
        return f"finishReason must be one of {', '.join(FINISH_REASONS)}"
    blocks = value["assistantContent"]
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return "assistantContent must be a list of objects"
    return _calls_problem(value["toolCalls"]) or _continuation_problem(value["continuation"]) or _usage(value["usage"])


def _calls_problem(calls: Any) -> str | None:
    if not isinstance(calls, list):
        return "toolCalls must be a list"
    seen: set[str] = set()
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {"id", "name", "input"}:
            return "a tool call has id, name and input"
        if not isinstance(call["id"], str) or not call["id"] or not isinstance(call["name"], str):
            return "id and name of a tool call must be text"
        if not isinstance(call["input"], dict):
            return "the input of a tool call must be an object"
        if call["id"] in seen:
            return f"the tool call {call['id']!r} stands twice"
        seen.add(call["id"])
    return None


def _continuation_problem(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("kind") not in _CONTINUATIONS or "value" not in value:
        return f"continuation must be null, or have a value and a kind ({', '.join(_CONTINUATIONS)})"
    return None


def _usage(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "usage must be an object"
    for name in _TOKENS:
        if type(value.get(name, 0)) is not int or value.get(name, 0) < 0:
            return f"usage.{name} must be a whole number, 0 or more"
        if value.get(name, 0) > MAX_UNITS:
            return f"usage.{name} is more than {MAX_UNITS}"
    cost = value.get("costMicrousd")
    if cost is not None and (type(cost) is not int or cost < 0):
        return "usage.costMicrousd must be null or a whole number, 0 or more"
    if cost is not None and cost > MAX_UNITS:
        return f"usage.costMicrousd is more than {MAX_UNITS}"
    return None


# -- what it costs -----------------------------------------------------------------------------------------------------


def most(request_bytes: int, max_output_tokens: int, price: Mapping[str, Any] | None) -> dict[str, int]:
    """The units to reserve for a request: the most that it can take (contract 6), at the highest rates that apply."""
    units = {
        "providerRequests": 1,
        "turns": 1,
        "inputTokens": request_bytes + 256,
        "outputTokens": max_output_tokens,
        "costMicrousd": 0,
    }
    if price is not None:
        rates = _rates(price)
        units["costMicrousd"] = _cost(units["inputTokens"], max(rates["input"], rates["read"], rates["write"]))
        units["costMicrousd"] += _cost(max_output_tokens, max(rates["output"], rates["reasoning"]))
    return units


def used(usage: Mapping[str, Any], price: Mapping[str, Any] | None) -> dict[str, int]:
    """The units that an answer has taken. A price that the provider itself has named wins over the price list.

    Tokens times price may be more than `MAX_UNITS`; the ledger counts that much at most.
    """
    units = {"providerRequests": 1, "turns": 1}
    units |= {name: int(usage.get(name) or 0) for name in _TOKENS}
    cost = cost_of(usage, price)
    if cost is None:
        units["unpricedProviderRequests"] = 1
    else:
        units["costMicrousd"] = cost
    return units


def cost_of(usage: Mapping[str, Any], price: Mapping[str, Any] | None) -> int | None:
    """What an answer costs in millionths of a dollar, or None where nobody knows."""
    named = usage.get("costMicrousd")
    if named is not None:
        return int(named)
    if price is None:
        return None
    rates = _rates(price)
    given = {name: int(usage.get(name) or 0) for name in _TOKENS}
    reasoning = min(given["reasoningTokens"], given["outputTokens"])
    fresh = max(0, given["inputTokens"] - given["cacheReadTokens"] - given["cacheWriteTokens"])
    return (
        _cost(fresh, rates["input"])
        + _cost(given["cacheReadTokens"], rates["read"])
        + _cost(given["cacheWriteTokens"], rates["write"])
        + _cost(given["outputTokens"] - reasoning, rates["output"])
        + _cost(reasoning, rates["reasoning"])
    )


def _rates(price: Mapping[str, Any]) -> dict[str, int]:
    """Prices for a million tokens; what is not named costs as input or output does."""

    def rate(name: str, otherwise: int) -> int:
        given = price.get(f"{name}MicrousdPerMillionTokens")
        return otherwise if given is None else int(given)

    usual, output = rate("input", 0), rate("output", 0)
    return {
        "input": usual,
        "output": output,
        "reasoning": rate("reasoning", output),
        "read": rate("cacheRead", usual),
        "write": rate("cacheWrite", usual),
    }


def _cost(tokens: int, rate: int) -> int:
    return -(-tokens * rate // MICRO)
