"""Anthropic's Messages API (contract 12.4). The conversation goes whole each time, thinking blocks unread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentctl.store.policy import Policy

from . import Call, FinishReason, ModelRequest, ModelResponse, ToolCall, Usage
from .exchange import Exchange, Malformed, a_list, a_text, a_word, an_object, charged, distinct, estimated, units
from .openai import result_text
from .registry import ResolveSecret

VERSION: Final = "2023-06-01"
_FINISH: Final[dict[str, FinishReason]] = {
    "end_turn": "complete",
    "stop_sequence": "complete",
    "tool_use": "tool_calls",
    "max_tokens": "max_tokens",
    "model_context_window_exceeded": "max_tokens",
    "refusal": "refusal",
}


def make(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> Anthropic:
    """A provider of kind `anthropic`. Raises `ProviderFault` with `sent="no"`."""
    exchange = Exchange("anthropic", definition, policy, resolve_secret, lambda key: ("x-api-key", key))
    return Anthropic(exchange, definition.get("apiVersion") or VERSION)


class Anthropic:
    """The configured service."""

    def __init__(self, exchange: Exchange, version: str) -> None:
        self._exchange = exchange
        self._headers = {"anthropic-version": version}

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Send the request once. Raises `ProviderFault`."""
        with self._exchange.understood():
            return read(self._exchange.post(self._exchange.url, self._headers, body_of(request), call), request)


def body_of(request: ModelRequest) -> dict[str, Any]:
    """The body of a request."""
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_output_tokens,
        "system": request.instructions,
        "messages": [
            {"role": message["role"], "content": [_block(block) for block in message["content"]]}
            for message in request.messages
        ],
    }
    if request.tools:
        body["tools"] = [
            {"name": tool.name, "description": tool.description, "input_schema": dict(tool.input_schema)}
            for tool in request.tools
        ]
    output: dict[str, Any] = {}
    effort = (request.reasoning or {}).get("effort")
    if effort == "none":
        body["thinking"] = {"type": "disabled"}
    elif effort is not None:
        body["thinking"] = {"type": "adaptive"}
        output["effort"] = effort
    if request.structured_output is not None:
        output["format"] = {"type": "json_schema", "schema": dict(request.structured_output)}
    if output:
        body["output_config"] = output
    return body


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    match block["type"]:
        case "tool_call":
            return {"type": "tool_use", "id": block["id"], "name": block["name"], "input": dict(block["input"])}
        case "tool_result":
            result = {"type": "tool_result", "tool_use_id": block["toolCallId"], "content": result_text(block)}
            return {**result, "is_error": True} if block.get("isError") else result
        case "opaque_reasoning":
            return dict(block["value"])
        case _:
            return {"type": "text", "text": block["text"]}


def read(value: Any, request: ModelRequest) -> ModelResponse:
    """The answer of the service. Raises `Malformed`."""
    answer = an_object(value, "the answer")
    usage = _usage(answer.get("usage"))
    with charged(usage):
        return _read(answer, usage, request)


def _read(answer: dict[str, Any], usage: Usage | None, request: ModelRequest) -> ModelResponse:
    finish = _FINISH[a_word(answer.get("stop_reason"), _FINISH, "its stop reason")]
    blocks: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    texts: list[str] = []
    for item in a_list(answer.get("content"), "the content"):
        kind = an_object(item, "a block of the content").get("type")
        if kind == "text":
            texts.append(a_text(item.get("text"), "a text"))
            blocks.append({"type": "text", "text": texts[-1]})
        elif kind == "tool_use" and finish == "tool_calls":
            name = a_text(item.get("name"), "the name of a call")
            given = an_object(item.get("input"), f"the input of the call of {name}")
            calls.append(ToolCall(a_text(item.get("id"), "the id of a call"), name, given))
            blocks.append({"type": "tool_call", "id": calls[-1].id, "name": name, "input": given})
        elif kind in ("thinking", "redacted_thinking"):
            blocks.append({"type": "opaque_reasoning", "value": item})
    if finish == "tool_calls" and not calls:
        raise Malformed("it says that it calls tools, and calls none")
    text = "".join(texts)
    return ModelResponse(
        response_id=a_text(answer.get("id"), "the id of the answer"),
        text=text,
        tool_calls=distinct(calls),
        assistant_content=tuple(blocks),
        continuation={"kind": "conversation", "value": None},
        usage=usage or estimated(request, text, calls),
        finish_reason=finish,
    )


def _usage(value: Any) -> Usage | None:
    """Their input leaves out what the cache held; ours counts all input (contract 6). Thinking is output to them."""
    if value is None:
        return None
    usage = an_object(value, "usage")
    read_tokens = units(usage, "cache_read_input_tokens")
    written = units(usage, "cache_creation_input_tokens")
    return Usage(
        input_tokens=units(usage, "input_tokens") + read_tokens + written,
        output_tokens=units(usage, "output_tokens"),
        cache_read_tokens=read_tokens,
        cache_write_tokens=written,
    )
