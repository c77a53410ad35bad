"""Answers of model services with something else in each of their places: refused, and never a bug in a worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from agentctl.store import answers
from agentctl.store.canonical import canonical, loads
from agentctl.worker.providers import ModelRequest, ModelResponse, anthropic, chat, google, openai
from agentctl.worker.providers.exchange import Declined, Malformed

ASKED = ModelRequest("model-1", "Be brief.", ({"role": "user", "content": [{"type": "text", "text": "hello"}]},))
STRANGE: list[Any] = [None, True, 0, -1, 1.5, 2**70, "", "x", [], ["stop"], [None], {}, {"a": 1}]
GONE = object()

CHAT = {
    "id": "1",
    "choices": [
        {
            "message": {
                "content": "hi",
                "refusal": None,
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}
RESPONSE = {
    "id": "1",
    "status": "completed",
    "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "n"}]},
        {"type": "reasoning", "id": "r"},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1, "output_tokens_details": {"reasoning_tokens": 1}},
}
FAILED = {"id": "1", "status": "failed", "error": {"code": "server_error", "message": "sorry"}}
CUT = {"id": "1", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}
MESSAGE = {
    "id": "1",
    "stop_reason": "tool_use",
    "content": [
        {"type": "text", "text": "x"},
        {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "thinking", "thinking": "t", "signature": "s"},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1, "cache_read_input_tokens": 0},
}
CANDIDATES = {
    "responseId": "1",
    "candidates": [
        {
            "finishReason": "STOP",
            "content": {
                "parts": [
                    {"text": "x", "thoughtSignature": "s"},
                    {"functionCall": {"id": "c", "name": "f", "args": {}}},
                    {"thought": True, "text": "t", "thoughtSignature": "z"},
                ]
            },
        }
    ],
    "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 1, "thoughtsTokenCount": 1},
}
BLOCKED = {"candidates": [], "promptFeedback": {"blockReason": "SAFETY"}}
PIECES = [
    {
        "id": "1",
        "choices": [
            {
                "delta": {
                    "content": "a",
                    "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}],
                }
            }
        ],
    },
    {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}},
]
EVENTS = [
    {"type": "response.output_text.delta", "delta": "x"},
    {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}},
    {"type": "response.completed", "response": RESPONSE},
]
CALL: Any = SimpleNamespace(on_event=lambda event: canonical(dict(event)))


def of_chat(events: Any) -> ModelResponse:
    return chat.read(chat._gathered(iter(events), CALL), ASKED)


def of_openai(events: Any) -> ModelResponse:
    return openai.read(openai._last(iter(events), CALL), ASKED)


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a value, itself first."""
    yield before
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*before, name))


def changed(value: Any, place: tuple[Any, ...], other: Any) -> Any:
    """A copy with something else in one place, or with nothing."""
    whole = copy.deepcopy({"": value})
    holder: Any = whole
    for name in ("", *place)[:-1]:
        holder = holder[name]
    if other is GONE:
        del holder[("", *place)[-1]]
    else:
        holder[("", *place)[-1]] = other
    return whole[""]


@pytest.mark.parametrize(
    ("read", "whole"),
    [
        (lambda value: chat.read(value, ASKED), CHAT),
        (lambda value: openai.read(value, ASKED), RESPONSE),
        (lambda value: openai.read(value, ASKED), FAILED),
        (lambda value: openai.read(value, ASKED), CUT),
        (lambda value: anthropic.read(value, ASKED), MESSAGE),
        (lambda value: google.read(value, ASKED), CANDIDATES),
        (lambda value: google.read(value, ASKED), BLOCKED),
        (of_chat, PIECES),
        (of_chat, [{"error": {"message": "no"}}]),
        (of_openai, EVENTS),
        (of_openai, [{"type": "error", "code": "server_error", "message": "no"}]),
    ],
    ids=[
        *("chat", "responses", "failed", "incomplete", "messages", "google", "blocked"),
        *("pieces", "piece-of-error", "events", "event-of-error"),
    ],
)
def test_every_place_of_an_answer_may_hold_anything(read: Callable[[Any], ModelResponse], whole: Any) -> None:
    for place in places(whole):
        if isinstance(whole, list) and len(place) < 2:
            continue  # a stream is a list of objects: what reads it from the wire sees to that
        for other in (*STRANGE, GONE) if place else STRANGE:
            try:
                answer = read(changed(whole, place, other))
            except (Malformed, Declined):
                continue
            assert answers.answer_problem(loads(canonical(answer.as_json()))) is None, (place, other)
