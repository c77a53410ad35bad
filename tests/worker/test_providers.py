"""Real providers against a real server on the loopback interface: every way in which a request can end (contract 5.4),
counted at the server, for each of the five kinds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from agentctl.store.answers import MAX_UNITS, answer_problem
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.worker.effects.secret_values import resolve_secret
from agentctl.worker.providers import Call, ModelRequest, ModelResponse, ProviderFault, ToolSpec, Usage
from agentctl.worker.providers.registry import provider_for
from agentctl.worker.watch import Token
from support.children import PATIENCE
from support.clock import over_when
from support.model_server import ModelServer, Play, closed_port, model_server

KINDS = ("openai", "azure_openai", "openai_compatible", "anthropic", "google")
STREAMING = ("openai", "azure_openai", "openai_compatible")
KEY = "sk-test-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
LOOK = ToolSpec("look", "Look at a file.", SCHEMA)
USAGE = {
    "openai": Usage(11, 7, 2, 3, 0),
    "azure_openai": Usage(11, 7, 2, 3, 0),
    "openai_compatible": Usage(11, 7, 2, 3, 0),
    "anthropic": Usage(11, 7, 0, 3, 2),
    "google": Usage(11, 7, 2, 3, 0),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", KEY)


@pytest.fixture
def token() -> Token:
    return Token()


def policy_of(**network: Any) -> Policy:
    return Policy.from_json(
        {
            "networkAllowlist": ["127.0.0.1"],
            "environmentAllowlist": ["MODEL_KEY", "MODEL_ORG"],
            "network": {"allowPrivate": True, **network},
        }
    )


def definition_of(kind: str, url: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "endpoint": url, "credential": {"env": "MODEL_KEY"}, **more}


def provider(kind: str, url: str, policy: Policy | None = None, **more: Any) -> Any:
    policy = policy or policy_of()

    def resolve(reference: Mapping[str, Any]) -> str:
        return resolve_secret(reference, policy, "/").value.decode()

    return provider_for(kind, definition_of(kind, url, **more), policy, "/", resolve)


def request_of(**changes: Any) -> ModelRequest:
    asked = ({"role": "user", "content": [{"type": "text", "text": "hello"}]},)
    return replace(ModelRequest("model-1", "Be brief.", asked), **changes)


def call_of(
    token: Token,
    *,
    seconds: float = 30.0,
    on_event: Callable[[Any], None] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Call:
    return Call(token, seconds, "e" * 64, monotonic, on_event)


def complete(kind: str, server: ModelServer, token: Token, request: ModelRequest | None = None) -> ModelResponse:
    response: ModelResponse = provider(kind, server.url).complete(request or request_of(), call_of(token))
    return response


def fault_of(kind: str, url: str, token: Token, **more: Any) -> ProviderFault:
    with pytest.raises(ProviderFault) as caught:
        provider(kind, url, **more).complete(request_of(tools=(LOOK,)), call_of(token))
    assert KEY not in caught.value.message
    return caught.value


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_answer(kind: str, server: ModelServer, token: Token) -> None:
    response = complete(kind, server, token)
    assert (response.text, response.finish_reason, response.tool_calls) == ("fine", "complete", ())
    assert response.usage == USAGE[kind]
    assert response.assistant_content == ({"type": "text", "text": "fine"},)
    assert server.count == 1


@pytest.mark.parametrize(
    ("kind", "path", "header", "value"),
    [
        ("openai", "/v1/responses", "authorization", f"Bearer {KEY}"),
        ("azure_openai", "/openai/v1/responses?api-version=v1", "api-key", KEY),
        ("openai_compatible", "/v1/chat/completions", "authorization", f"Bearer {KEY}"),
        ("anthropic", "/v1/messages", "x-api-key", KEY),
        ("google", "/v1beta/models/model-1:generateContent", "x-goog-api-key", KEY),
    ],
)
def test_where_a_request_goes_and_who_asks(
    kind: str, path: str, header: str, value: str, server: ModelServer, token: Token
) -> None:
    complete(kind, server, token)
    assert server.seen[0].path == path
    assert server.seen[0].headers[header] == value
    assert KEY not in str(server.seen[0].body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_of_the_document_is_sent(
    kind: str, server: ModelServer, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_ORG", "org-77")
    provider(kind, server.url, headers={"X-Org": {"env": "MODEL_ORG"}}).complete(request_of(), call_of(token))
    assert server.seen[0].headers["x-org"] == "org-77"


@pytest.mark.parametrize("kind", KINDS)
def test_tools_are_called_and_their_results_are_sent(kind: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(text="", calls=[("c1", "look", '{"path":"a.txt"}')]), Play())
    request = request_of(tools=(LOOK,))
    response = complete(kind, server, token, request)
    assert response.finish_reason == "tool_calls"
    assert [(c.id, c.name, dict(c.input)) for c in response.tool_calls] == [("c1", "look", {"path": "a.txt"})]
    result = {"type": "tool_result", "toolCallId": "c1", "output": {"text": "inside"}, "isError": False}
    later = replace(
        request,
        messages=(
            *request.messages,
            {"role": "assistant", "content": list(response.assistant_content)},
            {"role": "user", "content": [result]},
        ),
        continuation=response.continuation,
    )
    assert complete(kind, server, token, later).finish_reason == "complete"
    assert server.count == 2
    body = server.seen[1].body
    if kind in ("openai", "azure_openai"):
        assert body["previous_response_id"] == "resp_1"
        assert body["input"] == [{"type": "function_call_output", "call_id": "c1", "output": '{"text":"inside"}'}]
        assert body["tools"][0]["strict"] is True
    elif kind == "openai_compatible":
        assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "tool"]
        assert body["messages"][2]["tool_calls"][0]["id"] == body["messages"][3]["tool_call_id"] == "c1"
    elif kind == "anthropic":
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
        assert body["messages"][1]["content"] == [
            {"type": "tool_use", "id": "c1", "name": "look", "input": {"path": "a.txt"}}
        ]
        assert body["messages"][2]["content"][0]["tool_use_id"] == "c1"
    else:
        assert [c["role"] for c in body["contents"]] == ["user", "model", "user"]
        part = body["contents"][1]["parts"][0]
        assert part["thoughtSignature"] == "sig-c1", "the signature is not where it was"
        answer = body["contents"][2]["parts"][0]["functionResponse"]
        assert answer == {"id": "c1", "name": "look", "response": {"output": {"text": "inside"}}}


def test_thinking_goes_back_as_it_came(server: ModelServer, token: Token) -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s1"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    content = [thought, hidden, {"type": "text", "text": "so"}]
    server.plays(Play(extra={"content": content}), Play())
    response = complete("anthropic", server, token)
    assert [b["type"] for b in response.assistant_content] == ["opaque_reasoning", "opaque_reasoning", "text"]
    request = request_of(messages=({"role": "assistant", "content": list(response.assistant_content)},))
    complete("anthropic", server, token, request)
    assert server.seen[1].body["messages"][0]["content"] == content


def test_a_response_that_is_not_stored_is_continued_with_all_of_it(server: ModelServer, token: Token) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "encrypted_content": "abc"}
    message = {"type": "message", "content": [{"type": "output_text", "text": "so"}]}
    server.plays(Play(extra={"output": [reasoning, message]}), Play())
    request = request_of(provider_options={"store": False}, reasoning={"effort": "low", "mode": None})
    response = complete("openai", server, token, request)
    assert response.continuation == {"kind": "conversation", "value": None}
    said = {"role": "assistant", "content": list(response.assistant_content)}
    asked = {"role": "user", "content": [{"type": "text", "text": "and?"}]}
    later = replace(request, messages=(*request.messages, said, asked), continuation=response.continuation)
    complete("openai", server, token, later)
    body = server.seen[1].body
    assert "previous_response_id" not in body
    assert body["store"] is False
    assert body["include"] == ["reasoning.encrypted_content"]
    assert body["input"][1] == reasoning
    assert [item.get("role") for item in body["input"]] == ["user", None, "assistant", "user"]


@pytest.mark.parametrize(
    ("kind", "finish", "expected"),
    [
        ("openai", "cancelled", "cancelled"),
        ("openai_compatible", "length", "max_tokens"),
        ("openai_compatible", "content_filter", "refusal"),
        ("anthropic", "max_tokens", "max_tokens"),
        ("anthropic", "model_context_window_exceeded", "max_tokens"),
        ("anthropic", "refusal", "refusal"),
        ("anthropic", "stop_sequence", "complete"),
        ("google", "MAX_TOKENS", "max_tokens"),
        ("google", "SAFETY", "refusal"),
        ("google", "RECITATION", "refusal"),
    ],
)
def test_finish_reasons(kind: str, finish: str, expected: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(finish=finish))
    assert complete(kind, server, token).finish_reason == expected


@pytest.mark.parametrize(("reason", "expected"), [("max_output_tokens", "max_tokens"), ("content_filter", "refusal")])
def test_an_incomplete_response_is_never_complete(
    reason: str, expected: str, server: ModelServer, token: Token
) -> None:
    server.plays(
        Play(finish="incomplete", calls=[("c1", "look", '{"pa')], extra={"incomplete_details": {"reason": reason}})
    )
    response = complete("openai", server, token, request_of(tools=(LOOK,)))
    assert (response.finish_reason, response.tool_calls) == (expected, ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_service_without_usage_is_charged_by_size(kind: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(no_usage=True, text="four"))
    usage = complete(kind, server, token).usage
    assert usage.input_tokens >= len("hello")
    assert usage.output_tokens >= len("four")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_is_sent(kind: str, server: ModelServer, token: Token) -> None:
    request = request_of(structured_output=SCHEMA, max_output_tokens=99)
    if kind != "openai_compatible":
        request = replace(request, reasoning={"effort": "high", "mode": None})
    complete(kind, server, token, request)
    body = server.seen[0].body
    if kind in ("openai", "azure_openai"):
        assert body["max_output_tokens"] == 99
        assert body["reasoning"] == {"effort": "high"}
        expected = {"type": "json_schema", "name": "agentctl_output", "schema": SCHEMA, "strict": True}
        assert body["text"] == {"format": expected}
    elif kind == "openai_compatible":
        assert body["max_tokens"] == 99
        assert body["response_format"]["json_schema"] == {"name": "agentctl_output", "schema": SCHEMA}
    elif kind == "anthropic":
        assert body["max_tokens"] == 99
        assert body["output_config"] == {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    else:
        assert body["generationConfig"] == {
            "maxOutputTokens": 99,
            "responseMimeType": "application/json",
            "responseJsonSchema": SCHEMA,
            "thinkingConfig": {"thinkingLevel": "high"},
        }


def test_options_of_openai(server: ModelServer, token: Token) -> None:
    options = {
        "reasoningContext": "all_turns",
        "promptCacheMode": "explicit",
        "promptCacheTtl": "30m",
        "parallelToolCalls": False,
        "safetyIdentifier": "who",
    }
    complete("openai", server, token, request_of(provider_options=options, tools=(LOOK,), prompt_cache_key="w:a"))
    body = server.seen[0].body
    assert body["store"] is True
    assert body["reasoning"] == {"context": "all_turns"}
    assert body["prompt_cache_options"] == {"mode": "explicit", "ttl": "30m"}
    assert body["prompt_cache_key"] == "w:a"
    assert body["parallel_tool_calls"] is False
    assert body["safety_identifier"] == "who"


# -- never sent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_connection_was_never_dispatched(kind: str, token: Token) -> None:
    fault = fault_of(kind, f"http://127.0.0.1:{closed_port()}", token)
    assert (fault.code, fault.sent, fault.retryable) == ("provider_unreachable", "no", True)


def test_a_name_without_an_address_was_never_dispatched(token: Token) -> None:
    policy = Policy.from_json({"networkAllowlist": ["nowhere.invalid"], "environmentAllowlist": ["MODEL_KEY"]})
    fault = fault_of("openai_compatible", "http://nowhere.invalid", token, policy=policy)
    assert (fault.code, fault.sent, fault.retryable) == ("provider_unreachable", "no", True)
    assert "nowhere.invalid" in fault.message


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_policy_denies_is_not_sent(kind: str, server: ModelServer, token: Token) -> None:
    fault = fault_of(kind, server.url, token, policy=policy_of(allowPrivate=False))
    assert (fault.code, fault.sent, fault.retryable) == ("policy_denied", "no", False)
    assert server.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_cancelled_before_is_not_sent(kind: str, server: ModelServer, token: Token) -> None:
    token.cancel("cancel_requested")
    fault = fault_of(kind, server.url, token)
    assert (fault.code, fault.sent) == ("provider_cancelled", "no")
    assert server.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_credential_is_told_before_anything_is_sent(kind: str, server: ModelServer) -> None:
    with pytest.raises(ProviderFault) as caught:
        provider(kind, server.url, credential={"env": "MODEL_ORG"})
    assert (caught.value.code, caught.value.sent) == ("provider_credential", "no")
    assert "MODEL_ORG" in caught.value.message


def test_a_key_that_no_header_can_carry_is_refused(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "two\nlines")
    with pytest.raises(ProviderFault) as caught:
        provider("openai", server.url)
    assert caught.value.code == "provider_credential"
    assert "two" not in caught.value.message


@pytest.mark.parametrize("name", ["X Y", "Bad\nName", "Ümlaut", ""])
@pytest.mark.parametrize("kind", ["openai", "google"])
def test_a_request_that_http_cannot_carry_was_never_dispatched(
    kind: str, name: str, server: ModelServer, token: Token
) -> None:
    """A run may have been recorded before its header names were looked at."""
    fault = fault_of(kind, server.url, token, headers={name: {"env": "MODEL_KEY"}})
    assert (fault.code, fault.sent, fault.retryable) == ("provider_request", "no", False)
    assert server.count == 0


@pytest.mark.parametrize("value", ["1\n2", "ü"])
def test_a_version_that_no_header_can_carry_was_never_dispatched(value: str, server: ModelServer, token: Token) -> None:
    fault = fault_of("anthropic", server.url, token, apiVersion=value)
    assert (fault.code, fault.sent) == ("provider_request", "no")
    assert server.count == 0


def test_the_variable_of_a_kind_needs_no_permission(
    server: ModelServer, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-default-1")
    policy = replace(policy_of(), environment_allowlist=frozenset())

    def refuse(reference: Mapping[str, Any]) -> str:
        raise TaskFault("policy_denied", "no")

    made: Any = provider_for("openai", {"kind": "openai", "endpoint": server.url}, policy, "/", refuse)
    made.complete(request_of(), call_of(token))
    assert server.seen[0].headers["authorization"] == "Bearer sk-default-1"


@pytest.mark.parametrize("kind", KINDS)
def test_no_header_comes_twice(kind: str, server: ModelServer, token: Token) -> None:
    """Whatever the case of its name in the document: what agentctl sets itself wins."""
    names = ("authorization", "X-Api-Key", "X-GOOG-API-KEY", "Api-Key", "idempotency-key", "Anthropic-Version")
    headers = {name: {"env": "MODEL_ORG"} for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL_ORG", "org-1")
        provider(kind, server.url, headers=headers).complete(request_of(), call_of(token))
    (seen,) = server.seen
    assert all("," not in seen.headers.get(name.lower(), "") for name in names), seen.headers
    assert KEY in "".join(seen.headers.values())


def test_a_local_server_needs_no_credential(server: ModelServer, token: Token) -> None:
    provider("openai_compatible", server.url, credential=None).complete(request_of(), call_of(token))
    assert "authorization" not in server.seen[0].headers


# -- answered with an error --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("status", "retryable"), [(400, False), (401, False), (404, False), (429, True), (500, True), (503, True)]
)
def test_a_status_is_definitive(kind: str, status: int, retryable: bool, server: ModelServer, token: Token) -> None:
    server.plays(Play(status=status, headers={"Retry-After": "2", "x-request-id": "r-1"}))
    fault = fault_of(kind, server.url, token)
    assert (fault.code, fault.sent, fault.retryable) == ("provider_http_error", "refused", retryable)
    assert (fault.status, fault.retry_after_ms, fault.request_id) == (status, 2000, "r-1")
    assert "refused by the test" in fault.message
    assert server.count == 1, "a provider retries nothing by itself"


def test_retry_after_as_a_date_counts_by_the_clock_of_the_service(server: ModelServer, token: Token) -> None:
    # The server sends a Date of its own; a date long past means now.
    server.plays(Play(status=503, headers={"Retry-After": "Thu, 01 Jan 1970 00:00:10 GMT"}))
    assert fault_of("openai", server.url, token).retry_after_ms == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_redirect_is_not_followed(kind: str, server: ModelServer, token: Token) -> None:
    with model_server() as elsewhere:
        server.plays(Play(status=307, headers={"Location": elsewhere.url + "/v1/responses"}))
        fault = fault_of(kind, server.url, token)
        assert (fault.code, fault.sent, fault.retryable, fault.status) == (
            "provider_http_error",
            "refused",
            False,
            307,
        )
        assert (server.count, elsewhere.count) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "header"),
    [("openai", "authorization"), ("anthropic", "x-api-key"), ("google", "x-goog-api-key")],
)
def test_a_key_that_the_service_repeats_is_not_told_on(
    kind: str, header: str, server: ModelServer, token: Token
) -> None:
    server.plays(Play(status=401, echo=header))
    fault = fault_of(kind, server.url, token)  # which looks for the key in the message
    assert "[REDACTED]" in fault.message


def test_a_long_explanation_is_cut(server: ModelServer, token: Token) -> None:
    server.plays(Play(status=400, error="x" * 100_000))
    assert len(fault_of("openai", server.url, token).message) < 700


def test_a_key_at_the_cut_is_not_told_in_part(server: ModelServer, token: Token) -> None:
    for lead in (500, 505, 511):
        server.plays(Play(status=401, error="x" * lead + KEY))
        assert "sk-" not in fault_of("openai", server.url, token).message


def test_a_failed_response_is_a_refusal(server: ModelServer, token: Token) -> None:
    server.plays(Play(finish="failed", extra={"error": {"code": "server_error", "message": "sorry"}}))
    fault = fault_of("openai", server.url, token)
    assert (fault.sent, fault.retryable, fault.usage) == ("refused", True, USAGE["openai"])


# -- nobody knows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeout_after_sending_is_uncertain(kind: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(gate=threading.Event()))
    over = over_when(lambda: server.count == 1)  # a limit that is over before the sending is no such case
    with pytest.raises(ProviderFault) as caught:
        provider(kind, server.url).complete(request_of(tools=(LOOK,)), call_of(token, seconds=0.3, monotonic=over))
    fault = caught.value
    assert (fault.code, fault.sent, fault.retryable) == ("provider_timeout", "unknown", False)
    assert server.gone.wait(PATIENCE), "the connection was not closed"
    assert server.count == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["gate", "gate_in_body"])
def test_a_cancel_closes_the_connection(kind: str, where: str, server: ModelServer, token: Token) -> None:
    play: dict[str, Any] = {where: threading.Event()}
    server.plays(Play(**play))
    canceller = threading.Thread(target=lambda: (server.wait_for(1), token.cancel("cancel_requested")))
    canceller.start()
    fault = fault_of(kind, server.url, token)
    canceller.join()
    assert (fault.code, fault.sent) == ("provider_cancelled", "unknown")
    assert "cancel_requested" in fault.message
    assert server.gone.wait(PATIENCE), "the connection was not closed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("play", "code"),
    [
        (Play(drop=True), "provider_transport"),
        (Play(cut=True), "provider_transport"),
        (Play(body=b'{"id": "half'), "provider_malformed"),
        (Play(body=b""), "provider_malformed"),
        (Play(body=b"<html>gateway</html>"), "provider_malformed"),
        (Play(body=b"[]"), "provider_malformed"),
        (Play(body=b"{}"), "provider_malformed"),
        (Play(body=b'{"id": "\\ud800"}'), "provider_malformed"),
        (Play(body=b'{"id": NaN}'), "provider_malformed"),
        (Play(body=b'{"id": 1e400}'), "provider_malformed"),
        (Play(body=b'{"id": ' + b"[" * 100 + b"]" * 100 + b"}"), "provider_malformed"),
        (Play(text="", calls=[("c1", "look", '{"path":"a')]), "provider_malformed"),
        (Play(text="", calls=[("c1", "look", '["a"]')]), "provider_malformed"),
        (Play(text="", calls=[("c1", "look", "{}"), ("c1", "look", "{}")]), "provider_malformed"),
        (Play(finish="something new"), "provider_malformed"),
        (Play(headers={"Content-Encoding": "gzip"}), "provider_malformed"),
        (Play(status=204, body=b""), "provider_malformed"),
    ],
    ids=[
        *("dropped", "cut", "half-json", "empty", "html", "list", "object", "surrogate", "nan", "1e400", "deep"),
        *("half-arguments", "list-as-arguments", "same-id-twice", "unknown-finish", "gzip", "no-content"),
    ],
)
def test_an_answer_that_is_lost_or_not_whole_is_uncertain(
    kind: str, play: Play, code: str, server: ModelServer, token: Token
) -> None:
    server.plays(play)
    fault = fault_of(kind, server.url, token)
    assert (fault.code, fault.sent, fault.retryable) == (code, "unknown", False)
    assert server.count == 1


def test_an_answer_larger_than_the_policy_allows_is_uncertain(server: ModelServer, token: Token) -> None:
    server.plays(Play(text="x" * 5000))
    fault = fault_of("openai", server.url, token, policy=policy_of(maxResponseBytes=2000))
    assert (fault.code, fault.sent) == ("provider_malformed", "unknown")
    assert "maxResponseBytes" in fault.message


def test_what_an_unreadable_answer_has_cost_is_told(server: ModelServer, token: Token) -> None:
    server.plays(Play(text="", calls=[("c1", "look", '{"path":"a')]))
    assert fault_of("openai", server.url, token).usage == USAGE["openai"]


def test_large_numbers_stay_exact(server: ModelServer, token: Token) -> None:
    arguments = '{"path": ' + str(2**70) + ', "other": 1.0, "é": "e\\u0301"}'
    server.plays(Play(text="", calls=[("c1", "look", arguments)]))
    response = complete("openai", server, token, request_of(tools=(LOOK,)))
    assert dict(response.tool_calls[0].input) == {"path": 2**70, "other": 1.0, "é": "e\u0301"}


def test_a_bill_that_nobody_can_count_does_not_lose_the_answer(server: ModelServer, token: Token) -> None:
    usage = {"prompt_tokens": 10**30, "completion_tokens": MAX_UNITS, "total_tokens": 0}
    server.plays(Play(usage=usage))
    response = complete("openai_compatible", server, token)
    assert response.text == "fine"
    assert response.usage == Usage(MAX_UNITS, MAX_UNITS)
    assert answer_problem(response.as_json()) is None


@pytest.mark.parametrize(
    ("name", "value", "milliseconds"),
    [
        ("Retry-After", "9" * 400, 86_400_000),
        ("Retry-After", "1.5", 1500),
        ("Retry-After-Ms", "9" * 5000, 86_400_000),
        ("Retry-After-Ms", "²", None),
        ("Retry-After", "Fri, 31 Dec 9999 23:59:59 -2359", 86_400_000),
    ],
)
def test_when_to_come_again_is_bounded(
    name: str, value: str, milliseconds: int | None, server: ModelServer, token: Token
) -> None:
    server.plays(Play(status=429, headers={name: value}))
    assert fault_of("openai", server.url, token).retry_after_ms == milliseconds


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STREAMING)
def test_a_stream_is_passed_on_and_ends_in_the_whole_answer(kind: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(text="abc", calls=[("c1", "look", '{"path":"a.txt"}')]))
    events: list[Any] = []
    response = provider(kind, server.url).complete(request_of(tools=(LOOK,)), call_of(token, on_event=events.append))
    assert [e for e in events if e["type"] == "text_delta"] == [{"type": "text_delta", "text": t} for t in "abc"]
    assert {"type": "tool_call_started", "name": "look"} in events
    assert response.text == "abc"
    assert dict(response.tool_calls[0].input) == {"path": "a.txt"}
    assert response.usage == USAGE[kind]
    assert server.seen[0].body["stream"] is True


@pytest.mark.parametrize("kind", STREAMING)
def test_each_event_is_given_before_more_is_read(kind: str, server: ModelServer, token: Token) -> None:
    """The server holds the second half back until the first event has been taken."""
    gate = threading.Event()
    server.plays(Play(text="abcdefgh", gate_in_body=gate))
    events: list[Any] = []

    def take(event: Any) -> None:
        events.append(event)
        gate.set()

    response = provider(kind, server.url).complete(request_of(), call_of(token, on_event=take))
    assert response.text == "abcdefgh"
    assert len(events) == 8


@pytest.mark.parametrize("kind", STREAMING)
@pytest.mark.parametrize(
    "play",
    [
        Play(cut=True),
        Play(events=[]),
        Play(events=["not json"]),
        Play(events=["[1]"]),
        Play(events=[{"type": "response.output_text.delta", "delta": 7}, {"choices": [{"delta": {"content": 7}}]}]),
        Play(events=[{"type": "response.completed"}, {"choices": 5}]),
        Play(calls=[("c1", "look", '{"path":"a')]),
    ],
    ids=["cut", "nothing", "no-json", "list", "no-text", "wrong-shape", "half-arguments"],
)
def test_a_stream_that_is_not_whole_is_uncertain(kind: str, play: Play, server: ModelServer, token: Token) -> None:
    server.plays(play)
    with pytest.raises(ProviderFault) as caught:
        provider(kind, server.url).complete(request_of(tools=(LOOK,)), call_of(token, on_event=lambda event: None))
    assert caught.value.sent == "unknown"
    assert caught.value.code in ("provider_malformed", "provider_transport")
    assert server.count == 1


@pytest.mark.parametrize("kind", STREAMING)
def test_a_stream_that_is_cancelled_midway_is_closed(kind: str, server: ModelServer, token: Token) -> None:
    server.plays(Play(text="abcdefgh", gate_in_body=threading.Event()))
    with pytest.raises(ProviderFault) as caught:
        provider(kind, server.url).complete(
            request_of(), call_of(token, on_event=lambda event: token.cancel("cancel_requested"))
        )
    assert (caught.value.code, caught.value.sent) == ("provider_cancelled", "unknown")
    assert server.gone.wait(PATIENCE)


def test_a_reader_that_fails_ends_the_call(server: ModelServer, token: Token) -> None:
    server.plays(Play(text="abcdefgh", gate_in_body=threading.Event()))

    def fail(event: Any) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        provider("openai", server.url).complete(request_of(), call_of(token, on_event=fail))
    assert server.gone.wait(PATIENCE), "the connection was not closed"


def test_nothing_of_a_call_stays_open(server: ModelServer, token: Token) -> None:
    made = provider("openai", server.url)
    made.complete(request_of(), call_of(token))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        made.complete(request_of(), call_of(token))
    server.plays(Play(cut=True))
    for _ in range(5):
        with pytest.raises(ProviderFault):
            made.complete(request_of(), call_of(token))
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the server's side of the last one may still be closing
