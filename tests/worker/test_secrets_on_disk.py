"""A secret that a command prints, a server repeats, a model says or a tool returns is found nowhere on disk afterwards:
not in the database or its journal, not in artifacts, logs or answers (contract 11.2)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from hashlib import sha256
from typing import Any
from urllib.parse import quote

import pytest
from support.field import Field
from support.field_models import action_tool
from support.model_server import ModelServer, Play, answer_of

SECRET = 'k3y/with "quotes" & more+'
KEY = "sk-live-0123456789abcdef"


@pytest.fixture
def field(tmp_path: Any) -> Iterator[Field]:
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()
        assert place.processes() == []


def forms(value: str) -> set[bytes]:
    return {
        value.encode(),
        json.dumps(value)[1:-1].encode(),
        quote(value, safe="").encode(),
        base64.b64encode(value.encode()).rstrip(b"="),
    }


def assert_nowhere(field: Field, value: str, *said: str, spared: tuple[str, ...] = ()) -> None:
    """Look through every file below the folder, but for those where the test has put the secret itself."""
    looked = set()
    for path in field.folder.rglob("*"):
        if path.is_file() and path.name not in spared:
            looked.add(path.name)
            data = path.read_bytes()
            for form in forms(value):
                assert form not in data, f"{form!r} is in {path.relative_to(field.folder)}"
    assert "runtime.db" in looked
    for text in said:
        for form in forms(value):
            assert form.decode() not in text


def document(tasks: list[dict[str, Any]], **spec: Any) -> str:
    policy = {
        "approval": "never",
        "processAllowlist": ["sh", "cat"],
        "environmentAllowlist": ["TOKEN", "SOURCE", "KEY"],
        "secretFileRoots": ["keys"],
        "secretProcessAllowlist": ["printer"],
        "writableRoots": ["out"],
        "networkAllowlist": ["127.0.0.1"],
        "network": {"allowPrivate": True},
    }
    return json.dumps(
        {
            "apiVersion": "agentctl.dev/v1",
            "kind": "Workflow",
            "metadata": {"name": "secrets"},
            "spec": {"policy": policy, "tasks": tasks, **spec},
        }
    )


SHOUT = """\
printf '%s\\n' "$TOKEN"; printf '%s' "$TOKEN" | base64 -w0; printf '%s' "$TOKEN" >&2; exit "$1"
"""


@pytest.mark.parametrize("source", ["env", "file", "process"])
@pytest.mark.parametrize("code", [0, 7])
def test_what_a_command_prints(field: Field, source: str, code: int) -> None:
    (field.folder / "keys").mkdir()
    (field.folder / "keys" / "token").write_text(SECRET + "\n")
    printer = field.tool("printer", '#!/bin/sh\ncat "$1"\n')
    reference: dict[str, Any] = {
        "env": {"env": "SOURCE"},
        "file": {"file": "keys/token"},
        "process": {"process": {"command": str(printer), "args": [str(field.folder / "keys" / "token")]}},
    }[source]
    actions = {"sh": {"kind": "builtin.shell.exec", "command": "sh", "env": {"TOKEN": reference}}}
    task = {"id": "t", "uses": "action:sh", "with": {"args": ["-c", SHOUT, "sh", str(code)]}}
    result = field.json("run", field.text("w.json", document([task], actions=actions)), env={"SOURCE": SECRET})
    assert result.code == (4 if code else 0), result.err
    shown = field("logs", result.data["runId"])
    assert "[REDACTED]" in shown.out
    inspected = field.json("inspect", result.data["runId"])
    assert_nowhere(field, SECRET, result.out, result.err, shown.out, inspected.out, spared=("token",))
    (recorded,) = field.rows("SELECT input_json FROM effects")
    described = json.loads(recorded[0])["environment"]["TOKEN"]
    assert described["valueDigest"] == sha256(SECRET.encode()).hexdigest(), "the digest is what is kept"
    assert described["source"].startswith(source)


def test_what_another_command_finds(field: Field) -> None:
    """The file that one task takes its key from is printed by another one, in a worker that never used the key."""
    (field.folder / "keys").mkdir()
    (field.folder / "keys" / "token").write_text(SECRET)
    actions = {
        "use": {"kind": "builtin.shell.exec", "command": "sh", "env": {"TOKEN": {"file": "keys/token"}}},
        "cat": {"kind": "builtin.shell.exec", "command": "cat"},
        "read": {"kind": "builtin.read"},
    }
    tasks = [
        {"id": "leak", "uses": "action:cat", "with": {"args": ["keys/token"]}},
        {"id": "read", "uses": "action:read", "with": {"path": "keys/token"}},
        {"id": "use", "uses": "action:use", "needs": ["leak", "read"], "with": {"args": ["-c", "true"]}},
    ]
    result = field.json("run", field.text("w.json", document(tasks, actions=actions)))
    assert result.code == 0, result.err
    assert result.data["output"]["leak"]["stdout"] == "[REDACTED]"
    assert_nowhere(field, SECRET, result.out, spared=("token",))


def test_a_file_with_a_secret_is_no_artifact(field: Field) -> None:
    (field.folder / "out").mkdir()
    script = 'printf "%s" "$TOKEN" > out/leak'
    actions = {
        "sh": {
            "kind": "builtin.shell.exec",
            "command": "sh",
            "env": {"TOKEN": {"env": "SOURCE"}},
            "artifacts": ["out/*"],
        }
    }
    task = {"id": "t", "uses": "action:sh", "with": {"args": ["-c", script]}}
    result = field.json("run", field.text("w.json", document([task], actions=actions)), env={"SOURCE": SECRET})
    assert (result.code, result.data["error"]["code"]) == (4, "artifact_secret")
    assert_nowhere(field, SECRET, result.out, spared=("leak",))


def agent_document(server: ModelServer, **agent: Any) -> str:
    action = {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", 'printf "%s" "$TOKEN"']}
    return document(
        [{"id": "ask", "uses": "agent:a", "with": {"prompt": "hello"}}],
        providers={"p": {"kind": "openai", "endpoint": server.url, "credential": {"env": "KEY"}}},
        agents={"a": {"provider": "p", "model": "m", "instructions": "x", "tools": ["tell"], **agent}},
        actions={"tell": {**action, "env": {"TOKEN": {"env": "SOURCE"}}}},
        tools={"tell": action_tool("tell", "unknown")},
    )


def test_what_a_server_repeats_in_an_error(field: Field, server: ModelServer) -> None:
    server.plays(Play(status=401, echo="authorization"))
    file = field.text("w.json", agent_document(server))
    result = field.json("run", file, env={"KEY": KEY, "SOURCE": SECRET})
    assert (result.code, result.data["error"]["code"]) == (4, "provider_http_error")
    assert "[REDACTED]" in result.data["error"]["message"]
    assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"
    assert_nowhere(field, KEY, result.out, result.err)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_tool_returns_and_a_model_says(field: Field, server: ModelServer, stream: bool) -> None:
    server.plays(Play(text="", calls=[("c1", "tell", "{}")]), Play(text=f"your key is {KEY}, and {SECRET}"))
    file = field.text("w.json", agent_document(server, stream=stream))
    result = field.json("run", file, env={"KEY": KEY, "SOURCE": SECRET})
    assert result.code == 0, result.err
    assert result.data["output"]["ask"]["text"] == "your key is [REDACTED], and [REDACTED]"
    assert server.count == 2
    (returned,) = [item for item in server.seen[1].body["input"] if item["type"] == "function_call_output"]
    assert "[REDACTED]" in returned["output"], "the model was told a secret"
    for value in (KEY, SECRET):
        assert_nowhere(field, value, result.out, field.json("inspect", result.data["runId"]).out)
    field.check_clean_end()
    assert field.json("db", "verify").code == 0


def told_pieces(field: Field) -> list[str]:
    """The pieces of text that are kept of streamed answers, in order."""
    rows = field.rows("SELECT payload_json FROM stream_events WHERE event_type = 'text_delta' ORDER BY sequence")
    return [json.loads(payload)["text"] for (payload,) in rows]


@pytest.mark.parametrize("kind", ["openai", "openai_compatible"])
@pytest.mark.parametrize("size", [1, 2, 12], ids=["letters", "pairs", "halves"])
def test_what_a_model_says_in_pieces(field: Field, server: ModelServer, kind: str, size: int) -> None:
    """No piece is a secret, and put together they must not be one either; what only looks like one is told."""
    said = f"it is {KEY}; {KEY[:9]} is none, nor is {KEY[:5]}"
    pieces = [said[start : start + size] for start in range(0, len(said), size)]
    if kind == "openai":
        events: list[Any] = [{"type": "response.output_text.delta", "delta": piece} for piece in pieces]
        events.append({"type": "response.completed", "response": answer_of("/v1/responses", Play(text=said), {})})
    else:
        events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        events[0]["id"] = "chat_1"
        events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, "[DONE]"]
    server.plays(Play(events=events))
    file = field.text("w.json", streaming_document(server, kind))
    result = field.json("run", file, env={"KEY": KEY})
    assert result.code == 0, result.err
    told = told_pieces(field)
    assert "".join(told) == said.replace(KEY, "[REDACTED]") == result.data["output"]["ask"]["text"]
    assert len(told) > 1, "what can be no secret is told while the answer comes"
    assert_nowhere(field, KEY, result.out, field.json("inspect", result.data["runId"]).out)
    field.check_clean_end()
    assert field.json("db", "verify").code == 0


def test_what_a_model_says_before_it_is_cut_off(field: Field, server: ModelServer) -> None:
    pieces = [*"it is ", *KEY[:-1]]
    events = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    server.plays(Play(events=events))
    result = field.json("run", field.text("w.json", streaming_document(server, "openai_compatible")), env={"KEY": KEY})
    assert result.code == 3, "nobody knows the whole answer"
    assert "".join(told_pieces(field)) == "it is "
    assert_nowhere(field, KEY[:-1], result.out)
    field.check_clean_end(uncertain=True)


def streaming_document(server: ModelServer, kind: str) -> str:
    return document(
        [{"id": "ask", "uses": "agent:a", "with": {"prompt": "hello"}}],
        providers={"p": {"kind": kind, "endpoint": server.url, "credential": {"env": "KEY"}}},
        agents={"a": {"provider": "p", "model": "m", "instructions": "x", "stream": True}},
    )


def test_check_mode_starts_no_command_for_a_secret(field: Field) -> None:
    printer = field.tool("printer", f"#!/bin/sh\ntouch {field.folder}/started\necho x\n")
    actions = {
        "sh": {
            "kind": "builtin.shell.exec",
            "command": "sh",
            "env": {"TOKEN": {"process": {"command": str(printer)}}},
        }
    }
    task = {"id": "t", "uses": "action:sh", "with": {"args": ["-c", "true"]}}
    file = field.text("w.json", document([task], actions=actions))
    assert field.json("run", file, "--check").code == 0
    assert not (field.folder / "started").exists()
    assert field.json("run", file).code == 0
    assert (field.folder / "started").exists()
