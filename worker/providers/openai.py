"""OpenAI's Responses API, at OpenAI and at Azure (contract 12.4).

A stored response is continued by its id (`previous_response_id`), and then only what came after it is sent. A response
that is not stored is continued with the whole conversation, its reasoning items included.
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
    an_object,
    arguments_of,
    charged,
    distinct,
    estimated,
    keeps_strictness,
    units,
)
from .registry import ResolveSecret

OUTPUT_NAME: Final = "agentctl_output"
RETRYABLE_CODES: Final = frozenset({"server_error", "rate_limit_exceeded"})


def make(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> OpenAi:
    """A provider of kind `openai`. Raises `ProviderFault` with `sent="no"`."""
    return OpenAi(Exchange("openai", definition, policy, resolve_secret, bearer), {})


def make_azure(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> OpenAi:
    """A provider of kind `azure_openai`. Raises `ProviderFault` with `sent="no"`."""
    exchange = Exchange("azure_openai", definition, policy, resolve_secret, api_key)
    return OpenAi(exchange, {"api-version": definition.get("apiVersion") or "v1"})


def bearer(key: str) -> tuple[str, str]:
    """The header of a key for services that take it as a bearer token."""
    return "Authorization", f"Bearer {key}"


def api_key(key: str) -> tuple[str, str]:
    """The header of a key at Azure."""
    return "api-key", key


class OpenAi:
    """One configured service. `parameters` go into the query of its URL."""

    def __init__(self, exchange: Exchange, parameters: Mapping[str, str]) -> None:
        import httpx

        self._exchange = exchange
        self._url = str(httpx.URL(exchange.url).copy_merge_params(dict(parameters)))

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Send the request once. Raises `ProviderFault`."""
        headers = {"Idempotency-Key": call.idempotency_key, "X-Client-Request-Id": call.idempotency_key}
        body = body_of(request)
        with self._exchange.understood():
            if call.on_event is None:
                return read(self._exchange.post(self._url, headers, body, call), request)
            with self._exchange.stream(self._url, headers, {**body, "stream": True}, call) as events:
                return read(_last(iter(events), call), request)


# -- request -----------------------------------------------------------------------------------------------------------


def body_of(request: ModelRequest) -> dict[str, Any]:
    """The body of a request."""
    options = request.provider_options
    stored = bool(options.get("store", True))
    messages = list(request.messages)
    body: dict[str, Any] = {
        "model": request.model,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "store": stored,
    }
    continuation = request.continuation or {}
    if continuation.get("kind") == "openai_previous_response":
        body["previous_response_id"] = continuation["value"]
        messages = _after_the_answer(messages)
    body["input"] = [item for message in messages for item in _items(message)]
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.input_schema),
                "strict": keeps_strictness(tool.input_schema),
            }
            for tool in request.tools
        ]
        body["parallel_tool_calls"] = bool(options.get("parallelToolCalls", True))
    reasoning = dict(request.reasoning or {})
    if options.get("reasoningContext") is not None:
        reasoning["context"] = options["reasoningContext"]
    if reasoning := {name: value for name, value in reasoning.items() if value is not None}:
        body["reasoning"] = reasoning
        if not stored:
            body["include"] = ["reasoning.encrypted_content"]
    if request.structured_output is not None:
        schema = dict(request.structured_output)
        body["text"] = {
            "format": {
                "type": "json_schema",
                "name": OUTPUT_NAME,
                "schema": schema,
                "strict": keeps_strictness(schema),
            }
        }
    if request.prompt_cache_key is not None:
        body["prompt_cache_key"] = request.prompt_cache_key
    cache = {"mode": options.get("promptCacheMode"), "ttl": options.get("promptCacheTtl")}
    if cache := {name: value for name, value in cache.items() if value is not None}:
        body["prompt_cache_options"] = cache
    identifier = request.safety_identifier or options.get("safetyIdentifier")
    if identifier is not None:
        body["safety_identifier"] = identifier
    return body


def _after_the_answer(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What came after the response that is continued: the messages behind the last one of the assistant."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return messages[index + 1 :]
    return messages[-1:]


def _items(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    role = message["role"]
    kind = "output_text" if role == "assistant" else "input_text"
    for block in message["content"]:
        match block["type"]:
            case "text":
                yield {"role": role, "content": [{"type": kind, "text": block["text"]}]}
            case "tool_call":
                yield {
                    "type": "function_call",
                    "call_id": block["id"],
                    "name": block["name"],
                    "arguments": canonical(block["input"]),
                }
            case "tool_result":
                yield {"type": "function_call_output", "call_id": block["toolCallId"], "output": result_text(block)}
            case "opaque_reasoning":
                yield dict(block["value"])


def result_text(block: Mapping[str, Any]) -> str:
    """The output of a tool as a text for a model: itself if it is one, else its JSON."""
    output = block["output"]
    return output if isinstance(output, str) else canonical(output)


# -- answer ------------------------------------------------------------------------------------------------------------


def read(value: Any, request: ModelRequest) -> ModelResponse:
    """The answer of the service. Raises `Malformed` and `Declined`."""
    answer = an_object(value, "the response")
    usage = _usage(answer.get("usage"))
    with charged(usage):
        return _read(answer, usage, request)


def _read(answer: dict[str, Any], usage: Usage | None, request: ModelRequest) -> ModelResponse:
    finish = _finish(answer, usage)
    blocks: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    texts: list[str] = []
    for item in a_list(answer.get("output"), "output"):
        kind = an_object(item, "an item of the output").get("type")
        if kind == "message":
            for part in a_list(item.get("content"), "the content of a message"):
                shape = an_object(part, "a part of a message").get("type")
                if shape == "output_text":
                    texts.append(a_text(part.get("text"), "a text"))
                    blocks.append({"type": "text", "text": texts[-1]})
                elif shape == "refusal":
                    texts.append(a_text(part.get("refusal"), "a refusal"))
                    finish = "refusal"
        elif kind == "function_call" and finish == "complete":
            name = a_text(item.get("name"), "the name of a call")
            given = arguments_of(item.get("arguments"), name)
            calls.append(ToolCall(a_text(item.get("call_id"), "the id of a call"), name, given))
            blocks.append({"type": "tool_call", "id": calls[-1].id, "name": name, "input": given})
        elif kind == "reasoning":
            blocks.append({"type": "opaque_reasoning", "value": item})
    if finish == "complete" and calls:
        finish = "tool_calls"
    identity = a_text(answer.get("id"), "the id of the response")
    stored = bool(request.provider_options.get("store", True))
    text = "".join(texts)
    return ModelResponse(
        response_id=identity,
        text=text,
        tool_calls=distinct(calls) if finish == "tool_calls" else (),
        assistant_content=tuple(blocks),
        continuation=(
            {"kind": "openai_previous_response", "value": identity}
            if stored
            else {"kind": "conversation", "value": None}
        ),
        usage=usage or estimated(request, text, calls),
        finish_reason=finish,
    )


def _finish(answer: dict[str, Any], usage: Usage | None) -> FinishReason:
    """What the status of a response means. A response that is still being made is no answer."""
    status = answer.get("status")
    if status == "failed":
        error = answer.get("error") or {}
        code = error.get("code") if isinstance(error, dict) else None
        message = error.get("message") if isinstance(error, dict) else None
        raise Declined(f"{message or code or 'no explanation'}", retryable=_may_pass(code), usage=usage)
    if status == "incomplete":
        details = answer.get("incomplete_details") or {}
        reason = details.get("reason") if isinstance(details, dict) else None
        if reason == "content_filter":
            return "refusal"
        if reason == "max_output_tokens":
            return "max_tokens"
        raise Malformed(f"it is incomplete for the unknown reason {reason!r}")
    if status == "cancelled":
        return "cancelled"
    if status != "completed":
        raise Malformed(f"its status is {status!r}")
    return "complete"


def _may_pass(code: Any) -> bool:
    return isinstance(code, str) and code in RETRYABLE_CODES


def _usage(value: Any) -> Usage | None:
    if value is None:
        return None
    usage = an_object(value, "usage")
    return Usage(
        input_tokens=units(usage, "input_tokens"),
        output_tokens=units(usage, "output_tokens"),
        reasoning_tokens=units(usage, "output_tokens_details", "reasoning_tokens"),
        cache_read_tokens=units(usage, "input_tokens_details", "cached_tokens"),
        cache_write_tokens=units(usage, "input_tokens_details", "cache_write_tokens"),
    )


_TERMINAL: Final = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})


def _last(events: Iterator[Mapping[str, Any]], call: Call) -> Any:
    """Pass the events of a stream on as they come; the response that its last one holds is the whole answer."""
    for event in events:
        kind = event.get("type")
        if kind == "response.output_text.delta" and call.on_event is not None:
            call.on_event({"type": "text_delta", "text": a_text(event.get("delta"), "a piece of text")})
        elif kind == "response.output_item.added" and call.on_event is not None:
            item = event.get("item")
            if isinstance(item, dict) and item.get("type") == "function_call":
                call.on_event({"type": "tool_call_started", "name": a_text(item.get("name"), "the name of a call")})
        elif isinstance(kind, str) and kind in _TERMINAL:
            return event.get("response")
        elif kind == "error":
            code = event.get("code")
            raise Declined(f"{event.get('message') or code}", retryable=_may_pass(code))
    raise Malformed("the stream ended before the response was complete")
