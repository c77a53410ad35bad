"""`--offline`: what would connect to anybody is refused before anything exists, all else goes on (contract 4.12)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.model_server import ModelServer

from .conftest import Cli

POLICY = {
    "approval": "never",
    "networkAllowlist": ["127.0.0.1"],
    "network": {"allowPrivate": True},
    "processAllowlist": ["true", "false"],
    "environmentAllowlist": ["KEY"],
}
UNKNOWN = "http://127.0.0.1:1"
TASK = [{"id": "t", "uses": "action:say", "with": {"x": 1}}]
ASK = [{"id": "t", "uses": "agent:a", "with": {"prompt": "x"}}]
CALL = {"kind": "mcp.call", "with": {"tool": "t"}}
SEND = {"kind": "a2a.delegate", "with": {"messageId": "m", "message": "x"}}
TOOL = {
    "kind": "action",
    "action": "call",
    "description": "Ask.",
    "capability": "mcp.call",
    "effectClass": "network",
    "risk": "medium",
    "idempotency": "unknown",
    "inputSchema": {
        "type": "object",
        "properties": {"server": {"type": "string"}},
        "required": ["server"],
        "additionalProperties": False,
    },
    "outputSchema": {"type": "object"},
}


def document(tasks: list[dict[str, Any]], provider: dict[str, Any] | None = None, **more: Any) -> str:
    spec: dict[str, Any] = {
        "policy": POLICY,
        "providers": {"p": provider or {"kind": "fake"}},
        "agents": {"a": {"provider": "p", "model": "m", "instructions": "Be brief."}},
        "actions": {
            "say": {"kind": "builtin.assign"},
            "make": {"kind": "builtin.shell.exec", "command": "true"},
            "fail": {"kind": "builtin.shell.exec", "command": "false"},
            "call": CALL,
            "send": SEND,
        },
        "mcpServers": {"s": {"url": UNKNOWN}},
        "a2aPeers": {"friend": {"cardUrl": UNKNOWN}},
        "tasks": tasks,
        **more,
    }
    return json.dumps({"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "w"}, "spec": spec})


REMOTE = {"kind": "openai_compatible", "endpoint": UNKNOWN}
MCP_TASK = {"id": "t", "uses": "action:call", "with": {"server": "s"}}
INNER = {
    "inner": {
        "version": "1.0.0",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
        "outputs": {},
        "tasks": [MCP_TASK],
    }
}
NESTED = [{"id": "outer", "uses": "workflow:inner"}]
TOLD_LATER = [{"id": "t", "uses": "action:call", "with": {"server": "${{ vars.which }}"}}]


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        (document(ASK, REMOTE), "the provider 'p'"),
        (document([MCP_TASK]), "the MCP server 's'"),
        (document([{"id": "t", "uses": "action:send", "with": {"peer": "friend"}}]), "the A2A peer 'friend'"),
        (document(TOLD_LATER, vars={"which": "s"}), "mcp.call, for a name that is given later"),
        (document(NESTED, subworkflows=INNER), "the MCP server 's'"),
        (
            document(
                ASK,
                agents={"a": {"provider": "p", "model": "m", "instructions": "x", "tools": ["ask"]}},
                tools={"ask": TOOL},
            ),
            "mcp.call, for a name that is given later",
        ),
        (
            document(
                [
                    {
                        "id": "t",
                        "uses": "action:make",
                        "compensate": {"uses": "action:call", "with": {"server": "s"}},
                    }
                ],
                compensation={"onFailure": "automatic"},
            ),
            "the MCP server 's'",
        ),
    ],
    ids=["provider", "mcp", "a2a", "named later", "sub-workflow", "tool", "compensation"],
)
def test_what_needs_the_network_is_refused_before_anything_exists(cli: Cli, verb: str, text: str, named: str) -> None:
    file = cli.write("w.yaml", text)
    assert cli("check", file).code == 0, "it is the option that refuses it"
    result = cli.json("--offline", verb, file)
    assert (result.code, result.error["code"]) == (6, "environment"), result.err
    assert result.error["message"].startswith("--offline: ")
    assert named in result.error["message"]
    assert not cli.database.exists()


def test_nobody_is_asked(cli: Cli, server: ModelServer) -> None:
    file = cli.write("w.yaml", document(ASK, {"kind": "openai_compatible", "endpoint": server.url}))
    assert cli("run", "--offline", file).code == 6
    assert cli("providers", "inspect", "--offline").code == 0
    assert cli("auth", "check", "--offline", file).code == 0
    assert cli("run", "--check", "--offline", file).code == 0, "a check talks to nobody anyway"
    assert server.count == 0
    assert cli("run", file).code == 0
    assert server.count == 1


def test_what_needs_no_network_goes_on(cli: Cli) -> None:
    cli.write("script.json", json.dumps({"conversations": [{"turns": [{"text": "from a file"}]}]}))
    scripted = document(ASK, {"kind": "fake", "script": "script.json"})
    result = cli.json("--offline", "run", cli.write("scripted.yaml", scripted))
    assert (result.code, result.data["output"]["t"]["text"]) == (0, "from a file")
    assert cli("--offline", "run", cli.write("w.yaml", document(TASK, REMOTE))).code == 0, "no task reaches it"
    undone_by_hand = document(
        [{"id": "t", "uses": "action:make", "compensate": {"uses": "action:call", "with": {"server": "s"}}}]
    )
    made = cli.json("--offline", "run", cli.write("undo.yaml", undone_by_hand))
    assert made.code == 0
    undone = cli.json("--offline", "compensate", made.data["runId"])
    assert (undone.code, "the MCP server 's'" in undone.error["message"]) == (6, True)
    assert cli.json("runs", "list").data["runs"][0]["runId"] == made.data["runId"], "it has made no run"


def test_verbs_that_make_a_run_of_another(cli: Cli, server: ModelServer) -> None:
    """Only what would be executed counts: the retry reuses the answer of the model, the fork asks again."""
    ask = {**ASK[0], "outputSchema": {"type": "object"}}
    tasks = [ask, {"id": "fails", "uses": "action:fail", "needs": ["t"]}]
    file = cli.write("w.yaml", document(tasks, {"kind": "openai_compatible", "endpoint": server.url}))
    source = cli.json("run", file).data["runId"]
    assert server.count == 1
    retried = cli.json("--offline", "retry", file, source, "--failed")
    assert (retried.code, retried.data["reusedTasks"]) == (4, ["t"])
    again = [file, source, "--from", "t", "--restart-successful"]
    for line in (["fork", source], ["repair", *again], ["retry", *again]):
        result = cli.json("--offline", *line)
        assert result.code == 6, result.err
        assert "the provider 'p'" in result.error["message"]
    assert cli.json("--offline", "replay", source).code == 4, "nothing is executed, and it fails as its source has"
    assert server.count == 1


def test_a_run_that_goes_on(cli: Cli) -> None:
    local = cli.json("submit", cli.write("local.yaml", document(TASK))).data["runId"]
    remote = cli.json("submit", cli.write("remote.yaml", document([MCP_TASK]))).data["runId"]
    result = cli.json("resume", remote, "--offline")
    assert (result.code, "the MCP server 's'" in result.error["message"]) == (6, True)
    assert cli.json("status", remote).data["driver"] is None
    assert cli("resume", remote, "--offline", "--plan").code == 0
    assert cli("resume", local, "--offline").code == 0


def test_a_compensation_that_is_due_waits_for_the_network(cli: Cli) -> None:
    tasks = [
        {"id": "t", "uses": "action:make", "compensate": {"uses": "action:call", "with": {"server": "s"}}},
        {"id": "fails", "uses": "action:fail", "needs": ["t"]},
    ]
    file = cli.write("w.yaml", document(tasks, compensation={"onFailure": "automatic"}))
    killed = cli("run", file, env={"AGENTCTL_FAULT": "before_compensation"})
    assert killed.code < 0, "it was to die between the end of the run and what undoes it"
    (source,) = cli.json("runs", "list").data["runs"]
    result = cli("resume", source["runId"], "--offline")
    assert result.code == 4
    assert "could not be started: --offline: " in result.err
    assert len(cli.json("runs", "list").data["runs"]) == 1, "it is still due"
    result = cli("resume", source["runId"])
    assert "could not be started" not in result.err
    assert len(cli.json("runs", "list").data["runs"]) == 2


@pytest.mark.parametrize("line", [["workers", "start"], ["worker", "start"], ["workers", "install", "--print"]])
def test_a_pool_is_never_offline(cli: Cli, line: list[str]) -> None:
    result = cli.json(*line, "--offline")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "--offline" in result.error["message"]
    assert not cli.database.exists()


def test_a_remote_task_is_not_asked_about(cli: Cli) -> None:
    result = cli.json("--offline", "effects", "continue-remote", "abc")
    assert (result.code, result.error["code"]) == (6, "environment")


@pytest.mark.parametrize("line", [["--locked", "version"], ["run", "w.yaml", "--locked"]])
def test_locked_is_refused_since_there_are_no_packs(cli: Cli, line: list[str]) -> None:
    result = cli("--output", "json", *line)
    envelope = json.loads(result.err)
    assert (result.code, result.out) == (2, "")
    assert [item["code"] for item in envelope["diagnostics"]] == ["unsupported_capability"]
    assert "packs" in envelope["diagnostics"][0]["message"]
