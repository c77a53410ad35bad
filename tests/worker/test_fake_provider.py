"""The fake provider, step by step as the contract has it (12.3), and the scripted model."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.worker.providers import Call, ModelRequest, ModelResponse, Provider, ProviderFault, ToolSpec
from agentctl.worker.providers.registry import provider_for
from agentctl.worker.watch import Token

CLOCK = SystemClock()
SCHEMA = {"type": "object"}
TOOLS = (ToolSpec("first", "", SCHEMA), ToolSpec("second", "", SCHEMA))


def no_secret(reference: Mapping[str, Any]) -> str:
    raise AssertionError("no secret is needed")


def make(folder: Path = Path("/"), **definition: Any) -> Provider:
    policy = Policy(writable_roots=("out",))
    return provider_for("fake", {"kind": "fake", **definition}, policy, str(folder), no_secret)


def say(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def request(*messages: Mapping[str, Any], tools: tuple[ToolSpec, ...] = (), **options: Any) -> ModelRequest:
    return ModelRequest("m", "Help.", messages or (say("hello"),), tools, provider_options=options)


def call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "token": Token(), "timeout_seconds": 30.0, "idempotency_key": "e1", "monotonic": CLOCK.monotonic,
    }  # fmt: skip
    return Call(**{**fields, **changes})


def refused(provider: Provider, asked: ModelRequest, how: Call | None = None) -> ProviderFault:
    with pytest.raises(ProviderFault) as caught:
        provider.complete(asked, how or call())
    return caught.value


# -- the fake of the contract ------------------------------------------------------------------------------------------


def test_without_options_it_repeats_the_prompt() -> None:
    found = make().complete(request(), call())
    assert found.as_json() == {
        "responseId": "fake-response",
        "text": "fake: hello",
        "toolCalls": [],
        "assistantContent": [{"type": "text", "text": "fake: hello"}],
        "continuation": None,
        "usage": {
            "inputTokens": 1,
            "outputTokens": 1,
            "reasoningTokens": 0,
            "cacheReadTokens": 0,
            "cacheWriteTokens": 0,
            "costMicrousd": None,
        },
        "finishReason": "complete",
    }


def test_it_takes_the_latest_message_of_the_user_that_has_text() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "toolCallId": "a", "output": 1, "isError": False}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "no"}]}
    assert make().complete(request(say("one"), answer, say("two"), answer, result), call()).text == "fake: two"
    assert make().complete(request(finalText=""), call()).text == ""


def test_it_calls_the_first_tool_once() -> None:
    fake = make()
    first = fake.complete(request(tools=TOOLS, toolInput={"x": 1}), call())
    assert (first.finish_reason, first.response_id) == ("tool_calls", "fake-response-1")
    assert [(item.id, item.name, item.input) for item in first.tool_calls] == [("fake-call-1", "first", {"x": 1})]
    result = {"type": "tool_result", "toolCallId": "fake-call-1", "output": {}, "isError": False}
    done = fake.complete(
        request(say("hello"), {"role": "user", "content": [result]}, tools=TOOLS, toolInput={}), call()
    )
    assert (done.text, done.finish_reason) == ("fake: hello", "complete")
    assert make().complete(request(toolInput={}), call()).finish_reason == "complete"  # no tool to call


def test_it_fails_first() -> None:
    fake = make()
    for number in (1, 2):
        fault = refused(fake, request(failFirst=2))
        assert (fault.sent, fault.status, fault.retryable, fault.request_id) == ("refused", 503, True, f"fake-{number}")
    assert fake.complete(request(failFirst=2), call()).text == "fake: hello"
    assert refused(make(), request(failFirst=2), call(number=lambda: 2)).request_id == "fake-2"
    assert make().complete(request(failFirst=2), call(number=lambda: 3)).text == "fake: hello"


def test_a_cancelled_call_is_not_sent_and_a_delay_can_be_cancelled() -> None:
    token = Token()
    token.cancel("cancel_requested")
    fault = refused(make(), request(failFirst=9), call(token=token))
    assert (fault.code, fault.sent) == ("provider_cancelled", "no")
    waiting = Token()

    def looked() -> float:
        waiting.cancel("drain")  # the clock is looked at when the wait begins
        return CLOCK.monotonic()

    fault = refused(make(), request(delayMs=60_000), call(token=waiting, monotonic=looked))
    assert (fault.code, fault.sent) == ("provider_cancelled", "unknown")


def test_a_delay_longer_than_the_limit_is_a_timeout() -> None:
    fault = refused(make(), request(delayMs=1000), call(timeout_seconds=0.05))
    assert (fault.code, fault.sent, fault.retryable) == ("provider_timeout", "unknown", False)


def test_a_streamed_answer_comes_in_pieces() -> None:
    events: list[Any] = []
    found = make().complete(request(finalText="x" * 40), call(on_event=events.append))
    assert [event["type"] for event in events] == ["text_delta"] * 3
    assert "".join(event["text"] for event in events) == found.text


def test_kinds_that_are_not_there_are_named() -> None:
    with pytest.raises(TaskFault) as caught:
        provider_for("oracle", {}, Policy(), "/", no_secret)
    assert caught.value.code == "unsupported_capability"


# -- the script --------------------------------------------------------------------------------------------------------


def script(folder: Path, value: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "m.json").write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return folder


def turns(*items: Any, **more: Any) -> dict[str, Any]:
    return {"conversations": [{"turns": list(items)}], **more}


def play(folder: Path, value: Any) -> Provider:
    return make(script(folder, value), script="m.json")


def after(number: int) -> tuple[Mapping[str, Any], ...]:
    """Messages of a conversation with so many answers."""
    return (say("hello"), *({"role": "assistant", "content": []} for _ in range(number)))


def test_the_turn_is_read_from_the_conversation(tmp_path: Path) -> None:
    """So a worker that takes over gets what the dead one would have got."""
    value = turns(
        {"text": "look", "toolCalls": [{"name": "read", "input": {"path": "a"}}, {"id": "z", "name": "echo"}]},
        {"json": {"b": 1, "a": [True]}, "usage": {"inputTokens": 7, "costMicrousd": 5}},
        {"text": "cut", "finish": "max_tokens"},
        usage={"outputTokens": 3},
    )
    for number in (1, 0, 2):
        found = play(tmp_path, value).complete(request(*after(number)), call())
        assert found.response_id == f"script-1-{number + 1}"
        if number == 0:
            assert [(c.id, c.name, c.input) for c in found.tool_calls] == [
                ("call-1-1", "read", {"path": "a"}), ("z", "echo", {}),
            ]  # fmt: skip
            assert [block["type"] for block in found.assistant_content] == ["text", "tool_call", "tool_call"]
        elif number == 1:
            assert (found.text, found.usage.input_tokens, found.usage.output_tokens) == ('{"a":[true],"b":1}', 7, 3)
            assert found.usage.cost_microusd == 5
        else:
            assert found.finish_reason == "max_tokens"
    fault = refused(play(tmp_path, value), request(*after(3)))
    assert (fault.sent, fault.status, fault.retryable) == ("refused", 400, False)


def test_the_first_conversation_that_fits_is_played(tmp_path: Path) -> None:
    value = {
        "conversations": [
            {"when": {"model": "big"}, "turns": [{"text": "big"}]},
            {"when": {"contains": "ell"}, "turns": [{"text": "greeting"}]},
            {"when": {"contains": "x", "model": "m"}, "turns": [{"text": "both"}]},
        ]
    }
    provider = play(tmp_path, value)
    assert provider.complete(request(), call()).text == "greeting"
    assert provider.complete(request(say("x")), call()).text == "both"
    assert refused(provider, request(say("y"))).status == 400


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ("unreachable", ("provider_unreachable", "no", True)),
        ("lost", ("provider_transport", "unknown", False)),
        ("cut", ("provider_transport", "unknown", False)),
        ("timeout", ("provider_timeout", "unknown", False)),
        ("malformed", ("provider_malformed", "unknown", False)),
        ({"status": 429, "retryAfterMs": 700}, ("provider_http_error", "refused", True)),
        ({"status": 400}, ("provider_http_error", "refused", False)),
    ],
)
def test_failures_are_told_apart(tmp_path: Path, fail: Any, expected: tuple[str, str, bool]) -> None:
    provider = play(tmp_path, turns({"text": "half of it", "fail": fail, "times": 1}))
    events: list[Any] = []
    fault = refused(provider, request(), call(on_event=events.append))
    assert (fault.code, fault.sent, fault.retryable) == expected
    assert fault.retry_after_ms == (700 if isinstance(fail, dict) and "retryAfterMs" in fail else None)
    assert bool(events) == (fail == "cut")
    assert provider.complete(request(), call()).text == "half of it"  # it fails once


def test_the_log_counts_over_all_workers(tmp_path: Path) -> None:
    value = turns({"text": "yes", "fail": {"status": 503}, "times": 2}, log="out/asked")
    for number in (1, 2, 3):
        provider = play(tmp_path, value)  # as if each request came from another worker
        if number < 3:
            assert refused(provider, request(), call(idempotency_key=f"e{number}")).status == 503
        else:
            assert provider.complete(request(), call(idempotency_key="e3")).text == "yes"
    lines = [json.loads(line) for line in (tmp_path / "out" / "asked").read_text().splitlines()]
    assert [line["effectId"] for line in lines] == ["e1", "e2", "e3"]
    assert all(line["arrived"] and line["turn"] == 0 for line in lines)


def test_many_at_once_write_whole_lines(tmp_path: Path) -> None:
    value = turns({"text": "yes"}, log="out/asked")
    provider = play(tmp_path, value)
    found: list[ModelResponse] = []

    def ask() -> None:
        for _ in range(20):
            found.append(provider.complete(request(), call()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len([json.loads(line) for line in (tmp_path / "out" / "asked").read_text().splitlines()]) == 80


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not JSON"),
        ([], "the script must be an object"),
        ({}, "conversations must be a list"),
        ({"conversations": []}, "conversations must be a list with at least one entry"),
        ({"conversations": [{"turns": [{"text": "a"}], "if": {}}]}, "unknown field 'if'"),
        (turns({}), "turns[0] needs text, json, toolCalls or fail"),
        (turns({"text": 1}), "turns[0].text must be text"),
        (turns({"text": "a", "delayMs": -1}), "delayMs must be a whole number"),
        (turns({"text": "a", "finish": "tool_calls"}), "finish must be one of"),
        (turns({"toolCalls": [{"input": {}}]}), "toolCalls[0] must be an object with a name"),
        (turns({"fail": "maybe"}), "fail must be one of"),
        (turns({"fail": {"status": 200}}), "fail.status must be from 400 to 599"),
        (turns({"text": "a"}, log="elsewhere/asked"), "not under a writable root"),
        (turns({"text": "a"}, log="out/../asked"), "'..'"),
        (turns({"text": "a"}, log="out/a\0b"), "a path"),
    ],
)
def test_a_bad_script_is_refused_with_its_place(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ProviderFault) as caught:
        play(tmp_path, value)
    assert (caught.value.code, caught.value.sent) == ("provider_script", "no")
    assert message in caught.value.message
    assert "'m.json'" in caught.value.message


def test_a_script_lies_in_the_workspace(tmp_path: Path) -> None:
    script(tmp_path, turns({"text": "a"}))
    inner = tmp_path / "inner"
    inner.mkdir()
    for name in ("../m.json", str(tmp_path / "m.json"), "gone.json"):
        with pytest.raises(ProviderFault) as caught:
            make(inner, script=name)
        assert caught.value.sent == "no"
