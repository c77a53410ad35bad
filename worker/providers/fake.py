"""A provider without a model: answers at once and offline, for tests, demonstrations and dry runs.

Without a script it is the fake of contract 12.3, driven by the options of the agent (`toolInput`, `finalText`,
`delayMs`, `failFirst`). `failFirst` counts the requests of a run to this provider in the order in which they were
requested, whatever worker sends them: so the outcome does not depend on the number of workers.

With `script: PATH` in its definition it plays the answers of a file (see `script`). Neither needs a credential, and
neither opens a connection.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from typing import Any

from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy

from . import Call, FinishReason, ModelRequest, ModelResponse, Provider, ProviderFault, ToolCall, Usage
from .registry import ResolveSecret

PIECE_CHARACTERS = 16
"""How much of a text one streamed event carries."""


def make(definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret) -> Provider:
    """The provider of a definition; a script is read here. Raises `ProviderFault` with `sent="no"` for a bad one."""
    path = definition.get("script")
    if path is None:
        return FakeProvider()
    from .script import ScriptedProvider, read_script

    try:
        return ScriptedProvider(read_script(str(path), policy, workspace))
    except TaskFault as fault:
        raise ProviderFault("provider_script", f"the script {path!r}: {fault.message}", sent="no") from fault


class FakeProvider:
    """Contract 12.3. The order of the steps is part of it."""

    def __init__(self) -> None:
        self._calls = 0

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Answer by the options of the request. Raises `ProviderFault`."""
        options = request.provider_options
        pause(call, options.get("delayMs", 0) / 1000)
        self._calls += 1
        number = self._calls
        if call.number is not None and options.keys() & {"failFirst", "toolInput"}:
            number = call.number()
        if number <= options.get("failFirst", 0):
            raise ProviderFault(
                "provider_http_error",
                f"the fake provider fails its first requests (failFirst); this was number {number}",
                sent="refused",
                retryable=True,
                status=503,
                request_id=f"fake-{number}",
            )
        if "toolInput" in options and request.tools and not _has_tool_result(request):
            wanted = ToolCall("fake-call-1", request.tools[0].name, options["toolInput"])
            return answer(f"fake-response-{number}", "", (wanted,), Usage(1, 1))
        text = options.get("finalText")
        if text is None:
            text = f"fake: {latest_user_text(request)}"
        stream(call, text)
        return answer("fake-response", text, (), Usage(1, 1))


def answer(
    response_id: str,
    text: str,
    calls: tuple[ToolCall, ...],
    usage: Usage,
    finish: FinishReason | None = None,
) -> ModelResponse:
    """A response whose blocks repeat its text and its calls."""
    blocks: list[dict[str, Any]] = []
    if text or not calls:
        blocks.append({"type": "text", "text": text})
    blocks += [{"type": "tool_call", "id": item.id, "name": item.name, "input": dict(item.input)} for item in calls]
    how: FinishReason = finish if finish is not None else "tool_calls" if calls else "complete"
    return ModelResponse(response_id, text, calls, tuple(blocks), None, usage, how)


def pause(call: Call, seconds: float) -> None:
    """Wait like a slow model: within the limit of the call, and no longer than until it is cancelled.

    Raises `ProviderFault`: cancelled before anything was done is `sent="no"`; afterwards nobody knows (contract 5.4).
    """
    if call.token.cancelled:
        raise ProviderFault("provider_cancelled", f"cancelled before it was sent: {call.token.reason}", sent="no")
    if seconds <= 0:
        return
    started = call.monotonic()
    until = started + min(seconds, call.timeout_seconds)
    while (left := until - call.monotonic()) > 0:
        if select.select([call.token], [], [], left)[0]:
            message = f"cancelled while the answer was awaited: {call.token.reason}"
            raise ProviderFault("provider_cancelled", message, sent="unknown")
    if seconds >= call.timeout_seconds:
        raise ProviderFault("provider_timeout", f"no answer within {call.timeout_seconds:g} s", sent="unknown")


def stream(call: Call, text: str, wait: Callable[[], None] | None = None) -> None:
    """Give a text in pieces, each after `wait`, to whoever wants to see it come. What `on_event` raises ends it all."""
    if call.on_event is None:
        return
    for start in range(0, len(text), PIECE_CHARACTERS):
        if wait is not None:
            wait()
        call.on_event({"type": "text_delta", "text": text[start : start + PIECE_CHARACTERS]})


def latest_user_text(request: ModelRequest) -> str:
    """The text of the latest message of the user that has one."""
    for message in reversed(request.messages):
        if message["role"] == "user":
            for block in message["content"]:
                if block.get("type") == "text":
                    return str(block["text"])
    return ""


def _has_tool_result(request: ModelRequest) -> bool:
    return any(block.get("type") == "tool_result" for message in request.messages for block in message["content"])
