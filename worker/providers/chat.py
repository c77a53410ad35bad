"""The Chat Completions API, as most model servers of one's own speak it: kind `openai_compatible` (contract, row 29).

Only what all of them understand is sent. Servers differ in what they tell: an answer without usage is charged by its
size, and a call of a tool counts as such whatever the finish reason says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agentctl.store.canonical import canonical
from agentctl.store.policy import Policy

from . import Call, FinishReason, ModelRequest, ModelResponse, ToolCall, Usage
from .exchange import (
    Declined,
    Exchange,
    Malformed,
    a_list,
    a_text,
    a_word,
    an_object,
    arguments_of,
    charged,
    distinct,
    estimated,
    units,
)
from .openai import OUTPUT_NAME, bearer, result_text
from .registry import ResolveSecret

_FINISH: Final[dict[str, FinishReason]] = {
    "stop": "complete",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "max_tokens",
    "content_filter": "refusal",
}


def make(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> Chat:
    """A provider of kind `openai_compatible`. Raises `ProviderFault` with `sent="no"`."""
    return Chat(Exchange("openai_compatible", definition, policy, resolve_secret, bearer))


class Chat:
    """One configured server."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Send the request once. Raises `ProviderFault`."""
        body = body_of(request)
        with self._exchange.understood():
            if call.on_event is None:
                return read(self._exchange.post(self._exchange.url, {}, body, call), request)
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with self._exchange.stream(self._exchange.url, {}, body, call) as events:
                return read(_gathered(iter(events), call), request)


def body_of(request: ModelRequest) -> dict[str, Any]:
    """The body of a request."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.instructions}]
    for message in request.messages:
        messages.extend(_messages(message))
    body: dict[str, Any] = {"model": request.model, "messages": messages, "max_tokens": request.max_output_tokens}
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.input_schema),
                },
            }
            for tool in request.tools
        ]
    if request.structured_output is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": OUTPUT_NAME, "schema": dict(request.structured_output)},
        }
    return body


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One message of ours as theirs: results of tools are messages of their own, and come first."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in message["content"]:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "tool_call":
            function = {"name": block["name"], "arguments": canonical(block["input"])}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["toolCallId"], "content": result_text(block)}
    if texts or calls:
        said: dict[str, Any] = {"role": message["role"], "content": "".join(texts) if texts else None}
        if calls:
            said["tool_calls"] = calls
        yield said


def read(value: Any, request: ModelRequest) -> ModelResponse:
    """The answer of the server. Raises `Malformed` and `Declined`."""
    answer = an_object(value, "the answer")
    usage = _usage(answer.get("usage"))
    with charged(usage):
        return _read(answer, usage, request)


def _read(answer: dict[str, Any], usage: Usage | None, request: ModelRequest) -> ModelResponse:
    choices = a_list(answer.get("choices"), "choices")
    if not choices:
        raise Malformed("it has no choice")
    choice = an_object(choices[0], "the choice")
    message = an_object(choice.get("message"), "the message")
    finish = _FINISH[a_word(choice.get("finish_reason"), _FINISH, "its finish reason")]
    text = "" if message.get("content") is None else a_text(message["content"], "the content")
    refusal = message.get("refusal")
    if refusal:
        text, finish = a_text(refusal, "the refusal"), "refusal"
    calls: list[ToolCall] = []
    if finish in ("complete", "tool_calls"):
        for index, item in enumerate(a_list(message.get("tool_calls"), "tool_calls")):
            function = an_object(an_object(item, "a call").get("function"), "the function of a call")
            name = a_text(function.get("name"), "the name of a call")
            identity = item.get("id") or f"call-{index + 1}"
            calls.append(
                ToolCall(a_text(identity, "the id of a call"), name, arguments_of(function.get("arguments"), name))
            )
        finish = "tool_calls" if calls else finish
        if finish == "tool_calls" and not calls:
            raise Malformed("it says that it calls tools, and calls none")
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    blocks += [{"type": "tool_call", "id": c.id, "name": c.name, "input": dict(c.input)} for c in calls]
    return ModelResponse(
        response_id=str(answer.get("id") or ""),
        text=text,
        tool_calls=distinct(calls),
        assistant_content=tuple(blocks),
        continuation={"kind": "conversation", "value": None},
        usage=usage or estimated(request, text, calls),
        finish_reason=finish,
    )


def _usage(value: Any) -> Usage | None:
    if value is None:
        return None
    usage = an_object(value, "usage")
    return Usage(
        input_tokens=units(usage, "prompt_tokens"),
        output_tokens=units(usage, "completion_tokens"),
        reasoning_tokens=units(usage, "completion_tokens_details", "reasoning_tokens"),
        cache_read_tokens=units(usage, "prompt_tokens_details", "cached_tokens"),
    )


def _gathered(events: Iterator[Mapping[str, Any]], call: Call) -> dict[str, Any]:
    """Pass the pieces on as they come, and put them together to what the same answer would be in one."""
    texts: list[str] = []
    refusals: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {}
    finish: Any = None
    for event in events:
        if event.get("error"):
            error = event["error"]
            raise Declined(str(error.get("message") if isinstance(error, dict) else error), retryable=False)
        answer.update({name: event[name] for name in ("id", "usage") if event.get(name) is not None})
        choices = a_list(event.get("choices"), "choices")
        if not choices:
            continue
        choice = an_object(choices[0], "the choice")
        delta = an_object(choice.get("delta") or {}, "the piece")
        finish = choice.get("finish_reason") or finish
        if delta.get("content"):
            texts.append(a_text(delta["content"], "a piece of text"))
            if call.on_event is not None:
                call.on_event({"type": "text_delta", "text": texts[-1]})
        if delta.get("refusal"):
            refusals.append(a_text(delta["refusal"], "a piece of a refusal"))
        for piece in a_list(delta.get("tool_calls"), "tool_calls"):
            _add(calls, an_object(piece, "a piece of a call"), call)
    if finish is None:
        raise Malformed("the stream ended before the answer was complete")
    message = {
        "content": "".join(texts),
        "refusal": "".join(refusals),
        "tool_calls": [calls[index] for index in sorted(calls)],
    }
    return {**answer, "choices": [{"message": message, "finish_reason": finish}]}


def _add(calls: dict[int, dict[str, Any]], piece: dict[str, Any], call: Call) -> None:
    index = piece.get("index", len(calls))
    if type(index) is not int:
        raise Malformed("the index of a call is no number")
    function = an_object(piece.get("function") or {}, "the function of a call")
    known = calls.setdefault(index, {"id": None, "function": {"name": "", "arguments": ""}})
    known["id"] = known["id"] or piece.get("id")
    if function.get("name"):
        if not known["function"]["name"] and call.on_event is not None:
            call.on_event({"type": "tool_call_started", "name": a_text(function["name"], "the name of a call")})
        known["function"]["name"] = a_text(function["name"], "the name of a call")
    if function.get("arguments"):
        known["function"]["arguments"] += a_text(function["arguments"], "a piece of arguments")
