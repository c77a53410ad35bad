"""Model providers: one call of a model, behind one small interface.

An agent's turn builds a `ModelRequest`; what is recorded of the effect is exactly `as_json()` of it, so the
request that was paid for can be read later. A provider sends it once, without retries of its own, and
says how that ended:

- `ModelResponse`: a complete answer. Whether it is useful (a refusal, a cut-off one) is for the agent loop to judge.
- `ProviderFault` with `sent="no"`: provably nothing left this machine (name not resolved, connection refused, a
  missing credential). The effect was not dispatched.
- `ProviderFault` with `sent="refused"`: the server has answered with an error. Definitive; `retryable` for 429 and 5xx.
- `ProviderFault` with `sent="unknown"`: a timeout, a cancellation or a lost connection after sending, or an answer
  that is not to be understood. The effect is uncertain.

Source of the rules: contract 5.4, 12.1 to 12.4 and 12.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from agentctl.store.answers import MAX_UNITS
from agentctl.store.errors import TaskFault
from agentctl.worker.effects import CancelToken

Json: TypeAlias = Any
FinishReason: TypeAlias = Literal["complete", "tool_calls", "max_tokens", "refusal", "cancelled"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as a model sees it."""

    name: str
    description: str
    input_schema: Mapping[str, Json]

    def as_json(self) -> dict[str, Json]:
        """As it stands in a recorded request."""
        return {"name": self.name, "description": self.description, "inputSchema": dict(self.input_schema)}


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request. `messages` are `{role: user|assistant, content: [block]}` with the blocks

    `{type: text, text}`, `{type: tool_call, id, name, input}`, `{type: tool_result, toolCallId, output, isError}` and
    `{type: opaque_reasoning, value}`. `continuation` is what the response before gave, None for a first turn.
    """

    model: str
    instructions: str
    messages: tuple[Mapping[str, Json], ...]
    tools: tuple[ToolSpec, ...] = ()
    max_output_tokens: int = 2048
    reasoning: Mapping[str, Json] | None = None
    structured_output: Mapping[str, Json] | None = None
    continuation: Mapping[str, Json] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    provider_options: Mapping[str, Json] = field(default_factory=dict)

    def as_json(self) -> dict[str, Json]:
        """The input of the effect (contract 12.1): its digest is part of the effect's identity."""
        return {
            "model": self.model,
            "instructions": self.instructions,
            "messages": [dict(message) for message in self.messages],
            "tools": [tool.as_json() for tool in self.tools],
            "maxOutputTokens": self.max_output_tokens,
            "reasoning": self.reasoning,
            "structuredOutput": self.structured_output,
            "continuation": self.continuation,
            "promptCacheKey": self.prompt_cache_key,
            "safetyIdentifier": self.safety_identifier,
            "providerOptions": dict(self.provider_options),
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Units of one request; `cost_microusd` only when the provider itself has named a price.

    A number that no ledger can count is kept as the largest that it can (`MAX_UNITS`): an absurd bill is no reason to
    lose the answer that it came with.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost_microusd: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value > MAX_UNITS:
                object.__setattr__(self, name, MAX_UNITS)

    def as_json(self) -> dict[str, Json]:
        """As it stands in a recorded response."""
        return {
            "inputTokens": self.input_tokens,
            "outputTokens": self.output_tokens,
            "reasoningTokens": self.reasoning_tokens,
            "cacheReadTokens": self.cache_read_tokens,
            "cacheWriteTokens": self.cache_write_tokens,
            "costMicrousd": self.cost_microusd,
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asks for. `input` has been parsed and is an object; half an argument is no answer at all."""

    id: str
    name: str
    input: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A whole answer (contract 12.1). `assistant_content` are the blocks that the next request repeats;

    `continuation` is `{kind: openai_previous_response|conversation, value}` or None.
    """

    response_id: str
    text: str
    tool_calls: tuple[ToolCall, ...]
    assistant_content: tuple[Mapping[str, Json], ...]
    continuation: Mapping[str, Json] | None
    usage: Usage
    finish_reason: FinishReason

    def as_json(self) -> dict[str, Json]:
        """The result of the effect."""
        return {
            "responseId": self.response_id,
            "text": self.text,
            "toolCalls": [{"id": call.id, "name": call.name, "input": dict(call.input)} for call in self.tool_calls],
            "assistantContent": [dict(block) for block in self.assistant_content],
            "continuation": self.continuation,
            "usage": self.usage.as_json(),
            "finishReason": self.finish_reason,
        }


class ProviderFault(Exception):
    """A request that has not ended with an answer.

    `code` is a stable word (`provider_unreachable`, `provider_http_error`, `provider_timeout`, `provider_cancelled`,
    `provider_transport`, `provider_malformed`, `provider_credential`, `provider_extra_missing`), `message` is for
    people and never holds a secret. `usage` is what a refusal has cost all the same, if the server says so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        sent: Literal["no", "refused", "unknown"],
        retryable: bool = False,
        status: int | None = None,
        retry_after_ms: int | None = None,
        request_id: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.sent = sent
        self.retryable = retryable
        self.status = status
        self.retry_after_ms = retry_after_ms
        self.request_id = request_id
        self.usage = usage

    def as_task_fault(self, *, retryable: bool) -> TaskFault:
        """The same as an error of a task. Whether a retry may repeat it depends on what the request was for."""
        details: dict[str, Any] = {"sent": self.sent}
        if self.status is not None:
            details["status"] = self.status
        if self.request_id is not None:
            details["requestId"] = self.request_id
        if self.retry_after_ms is not None:
            details["retryAfterMs"] = self.retry_after_ms
        return TaskFault(self.code, self.message, retryable=retryable, details=details)

    @property
    def passed(self) -> bool:
        """Whether the service has said that it has not looked at the request: nothing is charged (contract row 21)."""
        return self.status in (429, 503)


@dataclass(frozen=True, slots=True)
class Call:
    """What belongs to one sending of a request, and not to the request.

    `idempotency_key` is the id of the effect. `timeout_seconds` is counted from the call by `monotonic`. `on_event`
    takes the events of a streamed answer, each stored before more is read; None: the answer is not streamed. It may
    raise, and then the call ends as if the connection had been lost. `number` tells which request of its run to this
    provider it is, counted from 1 over all workers; None: nobody counts.
    """

    token: CancelToken
    timeout_seconds: float
    idempotency_key: str
    monotonic: Callable[[], float]
    on_event: Callable[[Mapping[str, Json]], None] | None = None
    number: Callable[[], int] | None = None


class Provider(Protocol):
    """A configured provider of a run. One instance serves one worker process, one call at a time."""

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """Send one request, once. Raises `ProviderFault`, and nothing else for what the outside world does."""
        ...
