"""Google's generateContent (contract 12.4). The conversation is sent whole each time, thought signatures in place.

A signature belongs to the part that it came with. It is kept as an `opaque_reasoning` block right before the block of
that part, and is put back onto it in the next request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from agentctl.store.policy import Policy

from . import Call, FinishReason, ModelRequest, ModelResponse, ToolCall, Usage
from .exchange import Exchange, Malformed, a_list, a_text, a_word, an_object, charged, distinct, estimated, units
from .registry import ResolveSecret

SIGNATURE: Final = "thoughtSignature"
_FINISH: Final[dict[str, FinishReason]] = {
    "STOP": "complete",
    "MAX_TOKENS": "max_tokens",
    "SAFETY": "refusal",
    "RECITATION": "refusal",
    "LANGUAGE": "refusal",
    "BLOCKLIST": "refusal",
    "PROHIBITED_CONTENT": "refusal",
    "SPII": "refusal",
    "IMAGE_SAFETY": "refusal",
}
_LEVELS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def make(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> Google:
    """A provider of kind `google`. Raises `ProviderFault` with `sent="no"`."""
    return Google(Exchange("google", definition, policy, resolve_secret, goog_api_key))


def goog_api_key(key: str) -> tuple[str, str]:
    """The header of a key."""
    return "x-goog-api-key", key


class Google:
    """The configured service."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Send the request once. Raises `ProviderFault`."""
        parts = urlsplit(self._exchange.url)
        model = quote(request.model.removeprefix("models/"), safe="")
        url = urlunsplit(parts._replace(path=f"{parts.path}/{model}:generateContent"))
        with self._exchange.understood():
            return read(self._exchange.post(url, {}, body_of(request), call), request)


def body_of(request: ModelRequest) -> dict[str, Any]:
    """The body of a request."""
    generation: dict[str, Any] = {"maxOutputTokens": request.max_output_tokens}
    effort = (request.reasoning or {}).get("effort")
    if effort == "none":
        generation["thinkingConfig"] = {"thinkingBudget": 0}
    elif effort is not None:
        generation["thinkingConfig"] = {"thinkingLevel": _LEVELS[effort]}
    if request.structured_output is not None:
        generation["responseMimeType"] = "application/json"
        generation["responseJsonSchema"] = dict(request.structured_output)
    names = {
        block["id"]: block["name"]
        for message in request.messages
        for block in message["content"]
        if block["type"] == "tool_call"
    }
    body: dict[str, Any] = {
        "systemInstruction": {"parts": [{"text": request.instructions}]},
        "contents": [
            {
                "role": "model" if message["role"] == "assistant" else "user",
                "parts": list(_parts(message["content"], names)),
            }
            for message in request.messages
        ],
        "generationConfig": generation,
    }
    if request.tools:
        body["tools"] = [
            {
                "functionDeclarations": [
                    {
                        "name": tool.name,
                        "description": tool.description,
                        "parametersJsonSchema": dict(tool.input_schema),
                    }
                    for tool in request.tools
                ]
            }
        ]
    return body


def _parts(blocks: Any, names: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    signature: dict[str, Any] = {}
    for block in blocks:
        match block["type"]:
            case "opaque_reasoning":
                if signature:
                    yield {"text": "", **signature}
                    signature = {}
                if block["value"].get("thought"):
                    yield dict(block["value"])
                else:
                    signature = dict(block["value"])
                continue
            case "tool_call":
                part: dict[str, Any] = {
                    "functionCall": {"id": block["id"], "name": block["name"], "args": dict(block["input"])}
                }
            case "tool_result":
                word = "error" if block.get("isError") else "output"
                part = {
                    "functionResponse": {
                        "id": block["toolCallId"],
                        "name": names.get(block["toolCallId"], ""),
                        "response": {word: block["output"]},
                    }
                }
            case _:
                part = {"text": block["text"]}
        yield {**part, **signature}
        signature = {}
    if signature:
        yield {"text": "", **signature}


def read(value: Any, request: ModelRequest) -> ModelResponse:
    """The answer of the service. Raises `Malformed`."""
    answer = an_object(value, "the answer")
    usage = _usage(answer.get("usageMetadata"))
    with charged(usage):
        return _read(answer, usage, request)


def _read(answer: dict[str, Any], usage: Usage | None, request: ModelRequest) -> ModelResponse:
    identity = str(answer.get("responseId") or "")
    candidates = a_list(answer.get("candidates"), "candidates")
    if not candidates:
        reason = an_object(answer.get("promptFeedback") or {}, "promptFeedback").get("blockReason")
        if reason is None:
            raise Malformed("it has no candidate")
        text = f"the prompt was blocked: {reason}"
        return _response(identity, text, [], [], usage or estimated(request, text, []), "refusal")
    candidate = an_object(candidates[0], "the candidate")
    finish = _FINISH[a_word(candidate.get("finishReason"), _FINISH, "its finish reason")]
    blocks: list[dict[str, Any]] = []
    calls: list[ToolCall] = []
    texts: list[str] = []
    content = an_object(candidate.get("content") or {}, "the content")
    for index, item in enumerate(a_list(content.get("parts"), "the parts")):
        part = an_object(item, "a part")
        signed = part.get(SIGNATURE) is not None
        if signed and part.get("thought"):
            blocks.append({"type": "opaque_reasoning", "value": part})
        elif signed:
            value = {SIGNATURE: a_text(part[SIGNATURE], "a signature")}
            blocks.append({"type": "opaque_reasoning", "value": value})
        if part.get("thought"):
            continue
        if "functionCall" in part and finish == "complete":
            function = an_object(part["functionCall"], "a call")
            name = a_text(function.get("name"), "the name of a call")
            given = an_object({} if function.get("args") is None else function["args"], f"the input of {name}")
            # Old models name no id; the place in this answer is one that no other answer of the conversation has.
            number = function.get("id") or f"{identity or len(request.messages)}-{index}"
            calls.append(ToolCall(a_text(number, "the id of a call"), name, given))
            blocks.append({"type": "tool_call", "id": calls[-1].id, "name": name, "input": given})
        elif "text" in part:
            texts.append(a_text(part["text"], "a text"))
            if texts[-1] or signed:
                blocks.append({"type": "text", "text": texts[-1]})
    if calls:
        finish = "tool_calls"
    text = "".join(texts)
    usage = usage or estimated(request, text, calls)
    return _response(identity, text, calls, blocks, usage, finish)


def _response(
    identity: str,
    text: str,
    calls: list[ToolCall],
    blocks: list[dict[str, Any]],
    usage: Usage,
    finish: FinishReason,
) -> ModelResponse:
    continuation = {"kind": "conversation", "value": None}
    return ModelResponse(identity, text, distinct(calls), tuple(blocks), continuation, usage, finish)


def _usage(value: Any) -> Usage | None:
    """Their output leaves out the thoughts; ours counts all output (contract 6)."""
    if value is None:
        return None
    usage = an_object(value, "usageMetadata")
    thoughts = units(usage, "thoughtsTokenCount")
    return Usage(
        input_tokens=units(usage, "promptTokenCount") + units(usage, "toolUsePromptTokenCount"),
        output_tokens=units(usage, "candidatesTokenCount") + thoughts,
        reasoning_tokens=thoughts,
        cache_read_tokens=units(usage, "cachedContentTokenCount"),
    )
