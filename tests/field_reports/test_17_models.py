"""Report 17 for models: a client's timeout is not a refusal. What was refused, or never sent, is tried again by the
policy of the task; what may have been received never is. Counted at a real server."""

from __future__ import annotations

import json
import threading

import pytest
from support.children import wait_until
from support.field import Field
from support.field_models import ask, models
from support.model_server import ModelServer, Play, closed_port, model_server
from support.scale import time_limit


def document(field: Field, url: str, backoff_ms: int = 0) -> str:
    task = ask("ask", retry={"maxAttempts": 3, "backoffMs": backoff_ms})
    runtime = {"budgets": {"maxProviderRequests": 10}}
    return field.workflow("report-17", [task], runtime=runtime, **models(url, agent={"timeoutSeconds": time_limit()}))


ANSWER = {
    "responseId": "by hand",
    "text": "seen in their console",
    "toolCalls": [],
    "assistantContent": [{"type": "text", "text": "seen in their console"}],
    "continuation": None,
    "usage": {"inputTokens": 1, "outputTokens": 1},
    "finishReason": "complete",
}


def requests_charged(field: Field) -> tuple[int, int]:
    """(used, reserved) requests of the only run."""
    (found,) = field.rows("SELECT used, reserved FROM budget_lines WHERE dimension = 'providerRequests'")
    return int(found[0]), int(found[1])


@pytest.mark.parametrize("status", ["applied", "not-applied"])
def test_a_timeout_of_a_client_is_no_refusal(field: Field, server: ModelServer, status: str) -> None:
    server.plays(Play(gate=threading.Event()), Play(text="second"))
    result = field.json("run", document(field, server.url))
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect"), result.err
    assert server.count == 1
    (effect,) = field.rows("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    field.text("result.json", json.dumps(ANSWER))
    given = ("--result-file", "result.json") if status == "applied" else ()
    said = field.json("effects", "reconcile", effect[0], "--status", status, "--reason", "looked", *given)
    assert said.code == 0, said.err
    result = field.json("resume", result.data["runId"])
    assert result.code == 0, result.err
    assert server.count == (1 if status == "applied" else 2)
    assert result.data["output"]["ask"]["text"] == ("seen in their console" if status == "applied" else "second")
    field.check_clean_end(uncertain=True)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_that_stays_one_is_not_repeated(field: Field, server: ModelServer, status: int) -> None:
    server.plays(Play(status=status))
    result = field.json("run", document(field, server.url))
    assert (result.code, result.data["error"]["code"]) == (4, "provider_http_error")
    assert server.count == 1
    assert field.rows("SELECT status FROM effects") == [("failed",)]
    assert requests_charged(field)[1] == 0
    field.check_clean_end()


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_busy_is_asked_again_when_it_says(field: Field, server: ModelServer, status: int) -> None:
    busy = Play(status=status, headers={"Retry-After": "1"})
    server.plays(busy, busy, Play())
    result = field.json("run", document(field, server.url))
    assert result.code == 0, result.err
    assert server.count == 3
    times = [seen.at for seen in server.seen]
    assert times[1] - times[0] >= 1.0
    assert times[2] - times[1] >= 1.0
    assert requests_charged(field) == (1, 0), "a refusal for lack of room costs nothing"
    field.check_clean_end()


def test_what_never_reached_a_server_is_tried_again(field: Field) -> None:
    port = closed_port()
    file = document(field, f"http://127.0.0.1:{port}", backoff_ms=1500)
    started = field.start("run", file, "--output", "json")
    wait_until(lambda: len(field.rows("SELECT 1 FROM effects WHERE status = 'failed'")) == 2, "refused twice")
    with model_server(port=port) as server:
        result = started.wait()
        assert result.code == 0, result.err
        assert server.count == 1
    sent = field.rows("SELECT attempt, status FROM effects ORDER BY attempt")
    assert sent == [(1, "failed"), (2, "failed"), (3, "succeeded")]
    assert requests_charged(field) == (1, 0)
    field.check_clean_end()
