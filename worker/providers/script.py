"""A scripted model: answers, tool calls, delays and failures from a JSON file, for tests and demonstrations.

The file is an object:

- `conversations`: a list. The first one whose `when` fits is played; `when` may have `model` (equal to that of the
  agent) and `contains` (in the first message of the user), and without it a conversation fits always. `turns` are the
  answers, one for each turn of the conversation.
- `usage`: what a turn costs that says nothing itself, `{inputTokens, outputTokens, reasoningTokens, cacheReadTokens,
  cacheWriteTokens, costMicrousd}`; 1 and 1 otherwise.
- `log`: a file below a writable root. Each request that arrives is one line of JSON in it, written before the answer:
  what a server would have counted.

A turn is an object with `text`, or `json` (a value whose JSON is the text), `toolCalls` (a list of `{name, input}`, and
`id` if it matters), `finish` (`complete`, `max_tokens`, `refusal`, `cancelled`), `usage`, `delayMs` before the answer
and `chunkDelayMs` before each piece of a streamed one; or with `fail`: `unreachable` (never sent), `lost`, `timeout`,
`malformed` (nobody knows), `cut` (a stream that ends in the middle), or `{status, retryAfterMs, message}`. With `times`
only the first so many requests that come to the turn fail. The log counts them over all workers; without one each
worker counts its own.

Which turn is asked for is read from the messages of the request, so a worker that takes over in the middle gets the
answer that the dead one would have got.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentctl.store.answers import MAX_UNITS
from agentctl.store.canonical import canonical, parse_json
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy, readable, refuse_dotdot, writable

from ..effects.paths import refuse_database
from . import Call, ModelRequest, ModelResponse, ProviderFault, ToolCall, Usage
from .fake import answer, pause, stream

MAX_BYTES = 1_048_576
MAX_WAIT_MS = 86_400_000

_USAGE = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "reasoningTokens": "reasoning_tokens",
    "cacheReadTokens": "cache_read_tokens",
    "cacheWriteTokens": "cache_write_tokens",
    "costMicrousd": "cost_microusd",
}
_TURN = frozenset({"text", "json", "toolCalls", "finish", "usage", "delayMs", "chunkDelayMs", "fail", "times"})
_FINISH = ("complete", "max_tokens", "refusal", "cancelled")
_WORDS = ("unreachable", "lost", "timeout", "malformed", "cut")


@dataclass(frozen=True, slots=True)
class Script:
    """A checked script. `log` is an absolute path."""

    conversations: tuple[Mapping[str, Any], ...]
    usage: Mapping[str, int]
    log: str | None


def read_script(path: str, policy: Policy, workspace: str) -> Script:
    """Read and check a script of the workspace. Raises `TaskFault` (`policy_denied`, `not_found`, `invalid_input`)."""
    refuse_dotdot(path)
    resolved = os.path.realpath(os.path.join(workspace, path))
    if not readable(resolved, workspace):
        raise TaskFault("policy_denied", "it is outside the workspace")
    refuse_database(path, resolved)
    try:
        with open(resolved, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TaskFault("not_found", f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise TaskFault("invalid_input", f"it has more than {MAX_BYTES} bytes")
    value = _object(parse_json(data), "the script", {"conversations", "usage", "log"})
    conversations = _list(value.get("conversations"), "conversations")
    for number, item in enumerate(conversations):
        _check_conversation(item, f"conversations[{number}]")
    usage = _usage(value.get("usage", {"inputTokens": 1, "outputTokens": 1}), "usage")
    log = value.get("log")
    return Script(tuple(conversations), usage, None if log is None else _log_path(log, policy, workspace))


def _log_path(log: Any, policy: Policy, workspace: str) -> str:
    if not isinstance(log, str) or not log or "\0" in log:
        raise _wrong("log", "a path")
    refuse_dotdot(log)
    resolved = os.path.realpath(os.path.join(workspace, log))
    roots = [os.path.realpath(os.path.join(workspace, root)) for root in policy.writable_roots]
    if not writable(resolved, roots):
        raise TaskFault("policy_denied", f"its log {log!r} is not under a writable root")
    refuse_database(log, resolved)
    return resolved


def _wrong(where: str, what: str) -> TaskFault:
    return TaskFault("invalid_input", f"{where} must be {what}")


def _object(value: Any, where: str, known: frozenset[str] | set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, "an object")
    for name in value:
        if name not in known:
            raise TaskFault(
                "invalid_input", f"{where} has an unknown field {name!r}; known: {', '.join(sorted(known))}"
            )
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(where, "a list with at least one entry")
    return value


def _count(value: Any, where: str, most: int = MAX_UNITS) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong(where, f"a whole number from 0 to {most}")
    return value


def _usage(value: Any, where: str) -> dict[str, int]:
    units = _object(value, where, set(_USAGE))
    return {_USAGE[name]: _count(number, f"{where}.{name}") for name, number in units.items()}


def _check_conversation(value: Any, where: str) -> None:
    item = _object(value, where, {"when", "turns"})
    for name, text in _object(item.get("when", {}), f"{where}.when", {"model", "contains"}).items():
        if not isinstance(text, str):
            raise _wrong(f"{where}.when.{name}", "text")
    for number, turn in enumerate(_list(item.get("turns"), f"{where}.turns")):
        _check_turn(turn, f"{where}.turns[{number}]")


def _check_turn(value: Any, where: str) -> None:
    turn = _object(value, where, _TURN)
    if not turn.keys() & {"text", "json", "toolCalls", "fail"}:
        raise TaskFault("invalid_input", f"{where} needs text, json, toolCalls or fail")
    if not isinstance(turn.get("text", ""), str):
        raise _wrong(f"{where}.text", "text")
    if turn.get("finish", "complete") not in _FINISH:
        raise _wrong(f"{where}.finish", f"one of {', '.join(_FINISH)}")
    for name in ("delayMs", "chunkDelayMs", "times"):
        _count(turn.get(name, 0), f"{where}.{name}", MAX_UNITS if name == "times" else MAX_WAIT_MS)
    _usage(turn.get("usage", {}), f"{where}.usage")
    for number, call in enumerate(_list(turn["toolCalls"], f"{where}.toolCalls") if "toolCalls" in turn else ()):
        place = f"{where}.toolCalls[{number}]"
        wanted = _object(call, place, {"id", "name", "input"})
        if not isinstance(wanted.get("name"), str) or not isinstance(wanted.get("input", {}), dict):
            raise _wrong(place, "an object with a name and an input, which is an object")
        if not isinstance(wanted.get("id", ""), str):
            raise _wrong(f"{place}.id", "text")
    if "fail" in turn:
        _check_failure(turn["fail"], f"{where}.fail")


def _check_failure(value: Any, where: str) -> None:
    if isinstance(value, str):
        if value not in _WORDS:
            raise _wrong(where, f"one of {', '.join(_WORDS)}, or an object with a status")
        return
    fail = _object(value, where, {"status", "retryAfterMs", "message"})
    if not 400 <= _count(fail.get("status"), f"{where}.status") <= 599:
        raise _wrong(f"{where}.status", "from 400 to 599")
    _count(fail.get("retryAfterMs", 0), f"{where}.retryAfterMs", MAX_WAIT_MS)


class ScriptedProvider:
    """Plays a script. One instance serves one worker."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._counts: Counter[tuple[int, int]] = Counter()

    def complete(self, request: ModelRequest, call: Call) -> ModelResponse:
        """The answer of the turn that the request asks for. Raises `ProviderFault`."""
        place, number, turn = self._turn(request)
        pause(call, 0)
        fails = turn.get("fail")
        earlier = self._arrived(place, number, request, call, "no" if fails == "unreachable" else "yes")
        if fails is not None and earlier < turn.get("times", earlier + 1):
            self._fail(fails, turn, call)
        pause(call, turn.get("delayMs", 0) / 1000)
        calls = tuple(
            ToolCall(item.get("id", f"call-{number + 1}-{index + 1}"), item["name"], item.get("input", {}))
            for index, item in enumerate(turn.get("toolCalls", ()))
        )
        text = canonical(turn["json"]) if "json" in turn else turn.get("text", "")
        wait = turn.get("chunkDelayMs", 0) / 1000
        stream(call, text, (lambda: pause(call, wait)) if wait else None)
        usage = Usage(**{**self._script.usage, **_usage(turn.get("usage", {}), "usage")})
        return answer(f"script-{place + 1}-{number + 1}", text, calls, usage, turn.get("finish"))

    def _turn(self, request: ModelRequest) -> tuple[int, int, Mapping[str, Any]]:
        """(conversation, turn, what is to be played). The turn is the number of answers that there were before."""
        first = _first_text(request)
        number = sum(message["role"] == "assistant" for message in request.messages)
        for place, item in enumerate(self._script.conversations):
            when = item.get("when", {})
            if when.get("model", request.model) == request.model and when.get("contains", "") in first:
                turns = item["turns"]
                if number >= len(turns):
                    raise _refused(400, f"the script has no turn {number + 1} in conversations[{place}]")
                return place, number, turns[number]
        raise _refused(400, "no conversation of the script fits this request")

    def _arrived(self, place: int, number: int, request: ModelRequest, call: Call, sent: str) -> int:
        """Write down that a request has come to a turn; how many had come to it before."""
        if self._script.log is None:
            self._counts[place, number] += 1
            return self._counts[place, number] - 1
        line = {
            "conversation": place,
            "turn": number,
            "model": request.model,
            "effectId": call.idempotency_key,
            "arrived": sent == "yes",
        }
        try:
            return _append(self._script.log, line)
        except OSError as error:
            message = f"the log of the script cannot be written: {error.strerror}"
            raise ProviderFault("provider_script", message, sent="no") from error

    def _fail(self, fails: Any, turn: Mapping[str, Any], call: Call) -> None:
        if fails == "unreachable":
            raise ProviderFault("provider_unreachable", "the script says: unreachable", sent="no", retryable=True)
        pause(call, turn.get("delayMs", 0) / 1000)
        if fails == "cut":
            text = turn.get("text", "")
            stream(call, text[: len(text) // 2])
        if isinstance(fails, str):
            codes = {"timeout": "provider_timeout", "malformed": "provider_malformed"}
            raise ProviderFault(codes.get(fails, "provider_transport"), f"the script says: {fails}", sent="unknown")
        raise _refused(fails["status"], fails.get("message", "the script says so"), fails.get("retryAfterMs"))


def _first_text(request: ModelRequest) -> str:
    for block in request.messages[0]["content"] if request.messages else ():
        if block.get("type") == "text":
            return str(block["text"])
    return ""


def _refused(status: int, message: str, retry_after_ms: int | None = None) -> ProviderFault:
    return ProviderFault(
        "provider_http_error",
        f"status {status}: {message}",
        sent="refused",
        retryable=status == 429 or status >= 500,
        status=status,
        retry_after_ms=retry_after_ms,
    )


def _append(path: str, line: Mapping[str, Any]) -> int:
    """Append a line under a lock of the file; how many lines tell of the same turn already."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        known = [json.loads(text) for text in file.read().splitlines()]
        os.write(descriptor, (canonical(dict(line)) + "\n").encode())
    same = (line["conversation"], line["turn"])
    return sum((item["conversation"], item["turn"]) == same for item in known)
