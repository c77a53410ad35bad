"""Report 21 for models: what a model answers is read as strictly as what a command prints.

A service that answers what is no JSON leaves an effect of which nobody knows (the answer was paid for); the worker
lives, and the next task runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.agents import ECHO
from support.field import Field
from support.field_models import NETWORK, ask, models
from support.model_server import ModelServer, Play
from support.peers import PeerServer
from support.scale import some

TWO = [ask("first", failure="continue"), ask("second", failure="continue")]
STRUCTURED = {"structuredOutput": {"type": "object"}}


def document(field: Field, url: str, tasks: Sequence[Mapping[str, Any]] = TWO) -> str:
    return field.workflow("report-21", tasks, concurrency=1, **models(url, agent=STRUCTURED))


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
    result = field.json("run", document(field, server.url))
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
    result = field.json("run", document(field, server.url))
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect"), result.err
    tasks = dict(field.rows("SELECT task_id, state FROM tasks"))
    assert tasks == {"first": "waiting_for_effect", "second": "succeeded"}
    (error,) = field.rows("SELECT error_json FROM effects WHERE status = 'uncertain'")
    assert "provider_malformed" in error[0]
    field.check_clean_end(uncertain=True)


GOOD = {
    "pair": '{"v":"\\ud83d\\ude00"}',
    "minus zero": '{"v":-0.0}',
    "float": '{"v":1.0}',
    "integer": '{"v":1}',
    "large": '{"v":1180591620717411303424}',
    "keys abc": '{"a":1,"b":{"x":1,"y":2},"c":3}',
    "keys cab": '{"c":3,"a":1,"b":{"y":2,"x":1}}',
    "keys bca": ' { "b" : {"x":1, "y":2}, "c":3, "a":1 } ',
    "composed": '{"v":"\\u00e9"}',
    "decomposed": '{"v":"e\\u0301"}',
    "sixty levels": '{"v":' + "[" * 59 + "]" * 59 + "}",
}


def test_values_of_models_come_back_exactly_and_digests_follow_the_rule(field: Field, server: ModelServer) -> None:
    """As for commands: order of keys gives one digest, composed and decomposed give two, 1, 1.0 and -0.0 are three."""
    tasks = [ask(f"t{number}", needs=[f"t{number - 1}"] if number else []) for number in range(len(GOOD))]
    file = document(field, server.url, tasks)
    digests: list[dict[str, str]] = []
    for _ in range(2):
        server.plays(*(Play(text=text) for text in GOOD.values()))
        result = field.json("run", file)
        assert result.code == 0, result.err
        tasks = {task["taskId"]: task for task in field.json("inspect", result.data["runId"]).data["tasks"]}
        for number, (what, text) in enumerate(GOOD.items()):
            wanted = json.loads(json.dumps(json.loads(text), sort_keys=True))
            assert repr(tasks[f"t{number}"]["output"]) == repr(wanted), what
        digests.append({what: tasks[f"t{number}"]["outputDigest"] for number, what in enumerate(GOOD)})
    assert digests[0] == digests[1]
    one = digests[0]
    assert one["keys abc"] == one["keys cab"] == one["keys bca"]
    assert one["composed"] != one["decomposed"]
    assert len({one["integer"], one["float"], one["minus zero"]}) == 3
    field.check_clean_end()


@pytest.mark.parametrize("case", BAD)
def test_arguments_of_a_tool_that_break_json(field: Field, server: ModelServer, case: str) -> None:
    """What cannot be read is no call: the tool is not carried out, the worker lives, and the next task runs."""
    fields = {"type": "object", "additionalProperties": False, "required": ["v"], "properties": {"v": True}}
    tools = {"echo": {**ECHO, "inputSchema": fields}}
    file = field.workflow("tools", TWO, concurrency=1, **models(server.url, tools=tools))
    server.plays(Play(text="", calls=[("c", "echo", BAD[case])]), Play(text="well"))
    result = field.json("run", file, "--workers", "1")
    assert result.out, result.err
    tasks = dict(field.rows("SELECT task_id, state FROM tasks"))
    assert tasks["second"] == "succeeded"
    assert (result.code, tasks["first"]) in ((4, "failed"), (3, "waiting_for_effect"))
    assert field.rows("SELECT 1 FROM effects WHERE operation = 'tool.echo'") == []
    [told] = field.rows("SELECT error_json FROM effects WHERE task_id = 'first'")
    [failed] = field.rows("SELECT error_json FROM tasks WHERE task_id = 'first'")
    assert json.loads(told[0] or failed[0])["code"]
    field.check_clean_end(uncertain=result.code == 3)


@pytest.mark.timeout(300)
def test_values_of_a_server_of_tools(field: Field, tmp_path: Path) -> None:
    """What JSON cannot carry leaves the call in doubt, as it was carried out; good values come back exactly."""
    with PeerServer("mcp_server.py", tmp_path / "mcp") as peer:
        action = {"kind": "mcp.call", "idempotency": "at_most_once", "with": {"server": "numbers", "tool": "add"}}
        task = {"uses": "action:add", "with": {"arguments": {"a": 1, "b": 2}}, "failure": "continue"}
        file = field.workflow(
            "values",
            [{"id": "first", **task}, {"id": "second", **task, "needs": []}],
            actions={"add": action},
            policy={"approval": "never", **NETWORK},
            mcpServers={"numbers": {"url": f"{peer.origin}/mcp", "timeoutSeconds": 10}},
            concurrency=1,
        )
        for what in some(("surrogate", "nan", "too large", "too deep")):
            text = BAD[what]
            body = f'{{"content":[{{"type":"text","text":"x"}}],"structuredContent":{{"sum":3,"more":{text}}}}}'
            peer.plan({"tools/call": [f"raw:{body}"]})
            result = field.json("run", file, "--workers", "1")
            run_id = result.data["runId"]
            tasks = {row[0]: row[1] for row in field.rows("SELECT task_id, state FROM tasks WHERE run_id = ?", run_id)}
            assert (result.code, tasks) == (3, {"first": "waiting_for_effect", "second": "succeeded"}), what
            assert peer.counts()["tools/call"] == 2, what
        large = '{"content":[],"structuredContent":{"sum":1180591620717411303424,"z":"e\\u0301","a":-0.0}}'
        peer.plan({"tools/call": [f"raw:{large}", f"raw:{large}"]})
        result = field.json("run", file, "--workers", "1")
        assert result.code == 0, result.out
        for name in ("first", "second"):
            kept = result.data["output"][name]["structuredContent"]
            assert repr(kept) == repr({"a": -0.0, "sum": 2**70, "z": "e\u0301"})
    field.check_clean_end(uncertain=True)
