"""Answers of models: their form, their units and their price (contract 5.5, 6)."""

from __future__ import annotations

from typing import Any

import pytest
from agentctl.store.answers import answer_problem, cost_of, most, used

ANSWER: dict[str, Any] = {
    "responseId": "r",
    "text": "",
    "toolCalls": [{"id": "c", "name": "n", "input": {}}],
    "assistantContent": [{"type": "text"}],
    "continuation": None,
    "usage": {},
    "finishReason": "complete",
}
PRICE = {"inputMicrousdPerMillionTokens": 3_000_000, "outputMicrousdPerMillionTokens": 15_000_000}
FULL = {
    **PRICE,
    "reasoningMicrousdPerMillionTokens": 20_000_000,
    "cacheReadMicrousdPerMillionTokens": 300_000,
    "cacheWriteMicrousdPerMillionTokens": 4_000_000,
}


def test_a_whole_answer_has_no_problem() -> None:
    assert answer_problem(ANSWER) is None
    assert answer_problem({**ANSWER, "continuation": {"kind": "conversation", "value": None}}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"text": None},
        {"extra": 1},
        {"finishReason": "length"},
        {"toolCalls": [{"id": "c", "name": "n", "input": "{}"}]},
        {"toolCalls": [{"id": "", "name": "n", "input": {}}]},
        {"toolCalls": [{"id": "c", "name": "n", "input": {}}] * 2},
        {"assistantContent": ["text"]},
        {"continuation": {"kind": "other", "value": 1}},
        {"usage": {"inputTokens": -1}},
        {"usage": {"inputTokens": 1.0}},
        {"usage": {"inputTokens": 2**63}},
        {"usage": {"costMicrousd": 2**63}},
        {"usage": {"costMicrousd": "1"}},
        {"usage": None},
    ],
)
def test_anything_else_is_no_answer(change: dict[str, Any]) -> None:
    assert answer_problem({**ANSWER, **change}) is not None


def test_what_is_missing_is_named() -> None:
    assert answer_problem([]) == "an answer is an object"
    assert answer_problem({"text": ""}) == (
        "it has no assistantContent, continuation, finishReason, responseId, toolCalls, usage"
    )


@pytest.mark.parametrize(
    ("usage", "price", "cost"),
    [
        ({"inputTokens": 1, "outputTokens": 1}, PRICE, 3 + 15),
        ({"inputTokens": 1, "outputTokens": 0}, {**PRICE, "inputMicrousdPerMillionTokens": 1}, 1),  # rounded up
        ({"inputTokens": 10, "cacheReadTokens": 4, "cacheWriteTokens": 1}, PRICE, 30),
        ({"inputTokens": 10, "cacheReadTokens": 4, "cacheWriteTokens": 1}, FULL, 15 + 2 + 4),
        ({"outputTokens": 10, "reasoningTokens": 4}, FULL, 6 * 15 + 4 * 20),
        ({"outputTokens": 2, "reasoningTokens": 9}, FULL, 2 * 20),  # more than all of it cannot be
        ({"inputTokens": 1, "cacheReadTokens": 5}, FULL, 2),
        ({"inputTokens": 5, "costMicrousd": 7}, FULL, 7),
        ({"inputTokens": 5, "costMicrousd": 0}, None, 0),
        ({"inputTokens": 5}, None, None),
    ],
)
def test_cost(usage: dict[str, int], price: Any, cost: int | None) -> None:
    assert cost_of(usage, price) == cost
    units = used(usage, price)
    assert units.get("costMicrousd") == cost
    assert units.get("unpricedProviderRequests") == (1 if cost is None else None)


def test_the_most_that_a_request_can_take() -> None:
    assert most(744, 100, None) == {
        "providerRequests": 1, "turns": 1, "inputTokens": 1000, "outputTokens": 100, "costMicrousd": 0,
    }  # fmt: skip
    assert most(744, 100, PRICE)["costMicrousd"] == 3000 + 1500
    assert most(744, 100, FULL)["costMicrousd"] == 4000 + 2000
