"""Report 21 for models: what a model answers is read as strictly as what a command prints.

A service that answers what is no JSON leaves an effect of which nobody knows (the answer was paid for); the worker
lives, and the next task runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.field import Field
from support.model_server import ModelServer, Play, model_server


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


def document(url: str) -> dict[str, Any]:
    schema = {"type": "object"}
    task = {"uses": "agent:a", "with": {"prompt": "hello"}, "failure": "continue"}
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "report-21"},
        "spec": {
            "policy": {"approval": "never", "networkAllowlist": ["127.0.0.1"], "network": {"allowPrivate": True}},
            "providers": {"p": {"kind": "openai_compatible", "endpoint": url}},
            "agents": {"a": {"provider": "p", "model": "m", "instructions": "x", "structuredOutput": schema}},
            "tasks": [{"id": "first", **task}, {"id": "second", "needs": [], **task}],
        },
    }


BAD = {
    "surrogate": '{"v":"\\ud800"}',
    "nan": '{"v":NaN}',
    "too large": '{"v":1e400}',
    "too deep": "[" * 65 + "]" * 65,
    "duplicate key": '{"a":1,"a":2}',
    "cut": '{"v":[1,2',
}


@pytest.mark.parametrize("case", BAD)
def test_an_answer_inside_of_the_answer(field: Field, server: ModelServer, case: str) -> None:
    """The service's own JSON is whole; the JSON that the model wrote into it is not."""
    server.plays(Play(text=BAD[case]), Play(text='{"v": 1180591620717411303424, "é": "e\u0301"}'))
    result = field.json("run", field.text("w.json", json.dumps(document(server.url))))
    assert result.code == 4, result.err
    tasks = dict(field.rows("SELECT task_id, state FROM tasks"))
    assert tasks == {"first": "failed", "second": "succeeded"}
    output = field.json("inspect", result.data["runId"]).data
    errors = {task["taskId"]: task["error"] for task in output["tasks"]}
    assert errors["first"]["code"] == "structured_output"
    values = {task["taskId"]: task["output"] for task in output["tasks"]}
    assert values["second"] == {"v": 2**70, "é": "e\u0301"}, "an integer or a spelling was changed on the way"
    field.check_clean_end()


@pytest.mark.parametrize("case", BAD)
def test_the_answer_of_the_service_itself(field: Field, server: ModelServer, case: str) -> None:
    server.plays(Play(body=b'{"id":"x","choices":' + BAD[case].encode() + b"}"), Play(text='{"v": 1}'))
    result = field.json("run", field.text("w.json", json.dumps(document(server.url))))
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect"), result.err
    tasks = dict(field.rows("SELECT task_id, state FROM tasks"))
    assert tasks == {"first": "waiting_for_effect", "second": "succeeded"}
    (error,) = field.rows("SELECT error_json FROM effects WHERE status = 'uncertain'")
    assert "provider_malformed" in error[0]
    field.check_clean_end(uncertain=True)
