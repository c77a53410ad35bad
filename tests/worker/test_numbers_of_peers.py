"""Numbers that JSON cannot carry, in answers of MCP servers and A2A agents: a typed fault, and rows that are sound.

Python, pydantic and protobuf each take some of them, so none may get further than the answer that it stands in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import parse_json
from support.field import Field
from support.peers import PeerServer

NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000]
NETWORK = {"approval": "never", "networkAllowlist": ["127.0.0.1"], "network": {"allowPrivate": True}}


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()
        assert place.processes() == []


def run(field: Field, action: dict[str, Any], given: dict[str, Any], **peers: Any) -> tuple[int, str | None, Any]:
    """(exit code, state of the effect, its error) of a run with one task; whatever came, the database is sound."""
    spec = {
        "policy": NETWORK,
        **peers,
        "actions": {"ask": action},
        "tasks": [{"id": "ask", "uses": "action:ask", "with": given}],
    }
    document = {"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "numbers"}, "spec": spec}
    result = field.json("run", field.text("w.json", json.dumps(document)), "--workers", "1")
    assert "Traceback" not in result.err
    run_id = result.data["runId"]
    seen = field.json("inspect", run_id)
    (effect,) = seen.data["effects"]
    verified = field.json("db", "verify")
    assert verified.code == 0, verified.err
    for (text,) in field.rows(
        "SELECT result_json FROM effects UNION ALL SELECT error_json FROM effects UNION ALL "
        "SELECT notes_json FROM effects UNION ALL SELECT error_json FROM tasks UNION ALL "
        "SELECT state_json FROM protocol_calls"
    ):
        assert text is None or parse_json(text) is not None
    return result.code, effect["status"], effect["error"]


MCP = {"kind": "mcp.call", "with": {"server": "s", "tool": "add"}}
SUM = {"arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:9])
def test_a_result_of_an_mcp_server(field: Field, tmp_path: Path, number: str) -> None:
    body = f'{{"content":[],"structuredContent":{{"sum":3,"more":{number}}}}}'
    with PeerServer("mcp_server.py", tmp_path / "mcp", plan={"tools/call": [f"raw:{body}"]}) as peer:
        code, status, error = run(field, MCP, SUM, mcpServers={"s": {"url": f"{peer.origin}/mcp"}})
        assert (code, status, error["code"]) == (3, "uncertain", "mcp_malformed")
        assert peer.counts()["tools/call"] == 1


@pytest.mark.parametrize("number", ["NaN", "1e400"])
def test_a_tool_of_an_mcp_server(field: Field, tmp_path: Path, number: str) -> None:
    """Its schema is digested before anything is called."""
    tool = f'{{"name":"add","inputSchema":{{"type":"object","properties":{{"a":{{"maximum":{number}}}}}}}}}'
    with PeerServer("mcp_server.py", tmp_path / "mcp", plan={"tools/list": [f'raw:{{"tools":[{tool}]}}']}) as peer:
        code, status, error = run(field, MCP, SUM, mcpServers={"s": {"url": f"{peer.origin}/mcp"}})
        assert (code, status, error["code"]) == (4, "failed", "mcp_malformed")
        assert "tools/call" not in peer.counts()


A2A = {"kind": "a2a.delegate", "with": {"peer": "friend"}}
HELLO = {"messageId": "m", "message": "work x"}


def friend(peer: PeerServer) -> dict[str, Any]:
    card = f"{peer.origin}/.well-known/agent-card.json"
    return {"a2aPeers": {"friend": {"cardUrl": card, "pollIntervalMs": 20, "timeoutSeconds": 10}}}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:9])
def test_a_message_of_an_a2a_agent(field: Field, tmp_path: Path, number: str) -> None:
    message = f'{{"messageId":"r","role":"ROLE_AGENT","parts":[{{"data":{{"n":{number}}}}}]}}'
    plan = {"SendMessage": [f'raw:{{"message":{message}}}']}
    with PeerServer("a2a_server.py", tmp_path / "a2a", plan=plan) as peer:
        code, status, error = run(field, A2A, HELLO, **friend(peer))
        assert (code, status, error["code"]) == (3, "uncertain", "a2a_malformed")
        assert peer.counts()["SendMessage"] == 1


@pytest.mark.parametrize("number", ["NaN", "-1e400"])
def test_a_task_of_an_a2a_agent(field: Field, tmp_path: Path, number: str) -> None:
    """Its name is kept although its end cannot be read, now and when it is asked about afterwards."""
    part = f'{{"artifactId":"a","parts":[{{"data":{number}}}]}}'
    task = f'{{"id":"T","contextId":"c","status":{{"state":"TASK_STATE_COMPLETED"}},"artifacts":[{part}]}}'
    plan = {"SendMessage": [f'raw:{{"task":{task}}}'], "GetTask": [f"raw:{task}"] * 9}
    with PeerServer("a2a_server.py", tmp_path / "a2a", plan=plan) as peer:
        code, status, error = run(field, A2A, HELLO, **friend(peer))
        assert (code, status, error["code"]) == (3, "uncertain", "a2a_malformed")
        ((effect_id, state),) = field.rows("SELECT effect_id, state_json FROM protocol_calls")
        assert json.loads(state)["remoteTaskId"] == "T"
        asked = field.json("effects", "continue-remote", effect_id)
        assert (asked.code, asked.error["code"]) == (3, "uncertain_effect"), asked.err
        assert "Traceback" not in asked.err
        assert field.json("db", "verify").code == 0


def test_the_card_of_an_a2a_agent(field: Field, tmp_path: Path) -> None:
    with PeerServer("a2a_server.py", tmp_path / "a2a") as peer:
        extension = {"uri": "urn:x", "params": {"n": float("nan")}}
        (peer.folder / "card.json").write_text(json.dumps({"capabilities": {"extensions": [extension]}}))
        code, status, error = run(field, A2A, HELLO, **friend(peer))
        assert (code, status) == (4, "failed")
        assert error["code"].startswith("a2a_")
        assert "SendMessage" not in peer.counts()
