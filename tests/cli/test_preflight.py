"""What a run needs from outside is looked at before it exists, and before its database does (contract 4.10, 4.12)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentctl.cli.preflight import peers_of, services_of
from agentctl.coordinator.plan import CompiledTask
from support.model_server import ModelServer

from .conftest import Cli


def document(provider: dict[str, Any], policy: dict[str, Any] | None = None, **more: Any) -> str:
    spec: dict[str, Any] = {
        "policy": {"approval": "never", **(policy or {})},
        "providers": {"p": provider, "unused": {"kind": "openai"}},
        "agents": {"a": {"provider": "p", "model": "m", "instructions": "Be brief."}},
        "actions": {"say": {"kind": "builtin.assign"}},
        "tasks": [{"id": "ask", "uses": "agent:a", "with": {"prompt": "hello"}}],
        **more,
    }
    return json.dumps({"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "w"}, "spec": spec})


LOCAL = {"networkAllowlist": ["127.0.0.1"], "network": {"allowPrivate": True}, "environmentAllowlist": ["KEY"]}


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize(
    ("provider", "policy", "code", "named"),
    [
        ({"kind": "openai"}, {"networkAllowlist": ["api.openai.com"]}, 6, "OPENAI_API_KEY"),
        ({"kind": "anthropic"}, {"networkAllowlist": ["api.anthropic.com"]}, 6, "ANTHROPIC_API_KEY"),
        ({"kind": "google"}, {"networkAllowlist": ["*.googleapis.com"]}, 6, "GEMINI_API_KEY"),
        ({"kind": "openai"}, {}, 3, "api.openai.com"),
        ({"kind": "openai", "credential": {"env": "KEY"}}, {"networkAllowlist": ["api.openai.com"]}, 3, "KEY"),
        ({"kind": "openai", "credential": {"file": "key"}}, {"networkAllowlist": ["api.openai.com"]}, 3, "secretFile"),
        (
            {"kind": "openai", "credential": {"file": "keys/none"}},
            {"networkAllowlist": ["api.openai.com"], "secretFileRoots": ["keys"]},
            6,
            "keys/none",
        ),
        (
            {"kind": "openai", "credential": {"process": {"command": "true"}}},
            {"networkAllowlist": ["api.openai.com"]},
            3,
            "secretProcessAllowlist",
        ),
        (
            {"kind": "openai_compatible", "endpoint": "http://nowhere.invalid"},
            {"networkAllowlist": ["nowhere.invalid"]},
            6,
            "nowhere.invalid",
        ),
        (
            {"kind": "openai_compatible", "endpoint": "http://127.0.0.1:1"},
            {"networkAllowlist": ["127.0.0.1"]},
            3,
            "allowPrivate",
        ),
        (
            {"kind": "openai_compatible", "endpoint": "http://127.0.0.1:1"},
            {**LOCAL, "network": {"allowPrivate": True, "customCa": {"env": "CA"}}},
            3,
            "customCa",
        ),
    ],
)
def test_what_is_missing_is_told_before_anything_exists(
    cli: Cli, verb: str, provider: dict[str, Any], policy: dict[str, Any], code: int, named: str
) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"):
        cli.environment.pop(name, None)
    result = cli.json(verb, cli.write("w.yaml", document(provider, policy)), env={"KEY": "sk-1"})
    assert result.code == code, result.err
    assert named in result.error["message"] + str(result.error.get("remedy"))
    assert "sk-1" not in result.err
    assert not cli.database.exists()


@pytest.mark.parametrize(("kind", "extra"), [("azure_openai", "openai"), ("anthropic", "anthropic")])
def test_a_missing_extra_is_named_before_anything_exists(cli: Cli, kind: str, extra: str) -> None:
    without = cli.folder / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text("import sys\nsys.modules['httpx'] = None\n")
    provider = {"kind": kind, "endpoint": "http://127.0.0.1:1", "credential": {"env": "KEY"}}
    file = cli.write("w.yaml", document(provider, LOCAL))
    result = cli.json("run", file, env={"KEY": "sk-1", "PYTHONPATH": str(without)})
    assert (result.code, result.error["code"]) == (6, "environment")
    assert f"pip install 'agentctl[{extra}]'" in result.error["remedy"]
    assert not cli.database.exists()


def test_a_proxy_that_cannot_be_used_is_told_before_anything_exists(cli: Cli) -> None:
    policy = {"networkAllowlist": ["far.test"], "network": {"allowProxy": True}}
    more = {
        "mcpServers": {"s": {"url": "http://far.test"}},
        "actions": {"call": {"kind": "mcp.call", "with": {"server": "s", "tool": "t"}}},
        "tasks": [{"id": "t", "uses": "action:call"}],
    }
    file = cli.write("w.yaml", document({"kind": "fake"}, policy, **more))
    result = cli.json("run", file, env={"ALL_PROXY": "socks5://u:pw-1@h:9", "NO_PROXY": ""})
    assert (result.code, result.error["code"]) == (6, "environment")
    assert "socks5" in result.error["message"]
    assert "pw-1" not in result.err
    assert not cli.database.exists()


def test_a_provider_that_no_task_reaches_needs_nothing(cli: Cli) -> None:
    tasks = [{"id": "t", "uses": "action:say", "with": {"x": 1}}]
    assert cli("run", cli.write("w.yaml", document({"kind": "openai"}, tasks=tasks))).code == 0


def test_check_and_check_mode_need_nothing(cli: Cli) -> None:
    cli.environment.pop("OPENAI_API_KEY", None)
    file = cli.write("w.yaml", document({"kind": "openai"}, {"networkAllowlist": ["api.openai.com"]}))
    assert cli("check", file).code == 0
    assert cli("plan", file).code == 0
    assert cli("run", file, "--check").code == 0


def test_a_denied_secret_of_a_command_is_told_before_anything_exists(cli: Cli) -> None:
    spec = {
        "actions": {"sh": {"kind": "builtin.shell.exec", "command": "true", "env": {"A": {"file": "/etc/passwd"}}}},
        "tasks": [{"id": "t", "uses": "action:sh"}],
    }
    policy = {"processAllowlist": ["true"], "environmentAllowlist": ["A"]}
    result = cli.json("run", cli.write("w.yaml", document({"kind": "fake"}, policy, **spec)))
    assert (result.code, result.error["code"]) == (3, "blocked")
    assert "secretFileRoots" in result.error["message"]
    assert not cli.database.exists()


SECRET = {"kind": "builtin.shell.exec", "command": "sh", "env": {"TOK": {"file": "keys/tok"}}}
TOOL = {
    "kind": "action", "action": "sh", "description": "d", "capability": "process.exec", "risk": "high",
    "inputSchema": {"type": "object", "additionalProperties": False, "properties": {}}, "outputSchema": {},
    "effectClass": "process_execution", "idempotency": "unknown", "retrySafe": False, "timeoutSeconds": 5,
}  # fmt: skip
CALLS = {"s": {"url": "http://127.0.0.1:1/mcp", "headers": {"X-Key": {"env": "KEY"}}}}


@pytest.mark.parametrize(
    ("policy", "provider", "spec", "places"),
    [
        (
            {"processAllowlist": ["sh"], "secretFileRoots": ["keys"]},
            {"kind": "fake"},
            {"actions": {"sh": SECRET}, "tasks": [{"id": "t", "uses": "action:sh", "with": {"args": ["-c", "true"]}}]},
            ["spec.actions.sh.env.TOK"],
        ),
        (
            {"processAllowlist": ["sh"], "environmentAllowlist": ["TOK"]},
            {"kind": "fake"},
            {
                "actions": {"sh": SECRET},
                "tools": {"t": TOOL},
                "agents": {"a": {"provider": "p", "model": "m", "instructions": "x", "tools": ["t"]}},
            },
            ["spec.actions.sh.env.TOK"],
        ),
        (
            {"network": {"customCa": {"file": "/elsewhere"}}},
            {"kind": "openai", "headers": {"X": {"env": "NO"}}},
            {},
            ["spec.providers.p", "spec.providers.p.headers.X", "spec.policy.network.customCa"],
        ),
        (
            {},
            {"kind": "fake"},
            {
                "actions": {"call": {"kind": "mcp.call"}},
                "mcpServers": CALLS,
                "tasks": [{"id": "t", "uses": "action:call", "with": {"server": "s", "tool": "t"}}],
            },
            ["spec.mcpServers.s", "spec.mcpServers.s.headers.X-Key"],
        ),
    ],
)
def test_check_and_check_mode_tell_what_the_policy_is_certain_to_deny(
    cli: Cli, policy: dict[str, Any], provider: dict[str, Any], spec: dict[str, Any], places: list[str]
) -> None:
    file = cli.write("w.yaml", document(provider, policy, **spec))
    checked = cli.json("check", file)
    assert checked.code == 0
    found = json.loads(checked.out)["diagnostics"]
    assert [item["path"] for item in found if item["code"] == "policy_denied"] == places
    foreseen, refused = cli.json("run", file, "--check"), cli.json("run", file)
    assert (foreseen.code, foreseen.error["code"], refused.code) == (3, "blocked", 3)
    assert found[-len(places)]["message"] == foreseen.error["message"]
    assert refused.error["message"] == foreseen.error["message"]
    assert not cli.database.exists()


def test_check_tells_that_the_program_of_a_tool_is_denied(cli: Cli) -> None:
    spec = {
        "actions": {"sh": {"kind": "builtin.shell.exec", "command": "sh", "with": {"env": {"A": "x"}}}},
        "tools": {"t": TOOL},
        "agents": {"a": {"provider": "p", "model": "m", "instructions": "x", "tools": ["t"]}},
    }
    checked = cli.json("check", cli.write("w.yaml", document({"kind": "fake"}, **spec)))
    assert [item["path"] for item in json.loads(checked.out)["diagnostics"]] == [
        "spec.actions.sh.command",
        "spec.agents.a.tools[0]",
    ]


@pytest.mark.parametrize(
    ("kind", "action", "place"),
    [
        ("mcp", {"kind": "mcp.call", "with": {"server": "s", "tool": "t"}}, {"mcpServers": {"s": {"url": "URL"}}}),
        (
            "a2a",
            {"kind": "a2a.delegate", "with": {"peer": "s", "messageId": "m", "message": "x"}},
            {"a2aPeers": {"s": {"cardUrl": "URL"}}},
        ),
    ],
)
def test_the_services_of_protocols_are_found(kind: str, action: dict[str, Any], place: dict[str, Any]) -> None:
    """Whether or not this version can call them: what a plan would reach is what is looked at."""
    task = CompiledTask("t", 0, "action", "x", action["kind"], input=action["with"])
    declared = {name: dict(fields) for name, fields in next(iter(place.values())).items()}
    spec = {"actions": {"x": action}, "mcpServers": {}, "a2aPeers": {}, next(iter(place)): declared}
    for tasks, actions in (([task], []), ([], ["x"])):
        names = peers_of(spec, tasks, actions)
        assert [(s.kind, s.name, s.url) for s in services_of(spec, names)] == [(kind, "s", "URL")]
    assert peers_of(spec, [], []) == set()


UNDOING = {
    "make": {"kind": "builtin.shell.exec", "command": "true"},
    "tell": {"kind": "mcp.call", "with": {"tool": "undo"}},
    "drop": {"kind": "builtin.shell.exec", "command": "true", "env": {"A": {"file": "/etc/passwd"}}},
}
SERVER = {"url": "http://127.0.0.1:1/mcp", "headers": {"X-Key": {"env": "KEY"}}}


def undone_by(compensate: dict[str, Any], how: str, **policy: Any) -> str:
    """A document with one task and its inverse, and what starts the compensation of a failed run."""
    spec = {
        "actions": UNDOING,
        "mcpServers": {"s": SERVER},
        "compensation": {"onFailure": how},
        "tasks": [{"id": "t", "uses": "action:make", "compensate": compensate}],
    }
    return document({"kind": "fake"}, {**LOCAL, "processAllowlist": ["true"], **policy}, **spec)


@pytest.mark.parametrize(
    ("compensate", "policy", "code", "named"),
    [
        ({"uses": "action:tell", "with": {"server": "s"}}, {}, 6, "KEY"),
        ({"uses": "action:tell", "with": {"server": "s"}}, {"networkAllowlist": []}, 3, "networkAllowlist"),
        ({"uses": "action:drop"}, {"environmentAllowlist": ["A", "KEY"]}, 3, "secretFileRoots"),
    ],
)
def test_what_undoes_by_itself_is_looked_at_before_the_run(
    cli: Cli, compensate: dict[str, Any], policy: dict[str, Any], code: int, named: str
) -> None:
    cli.environment.pop("KEY", None)
    result = cli.json("run", cli.write("w.yaml", undone_by(compensate, "automatic", **policy)))
    assert result.code == code, result.err
    assert named in result.error["message"] + str(result.error["remedy"])
    assert not cli.database.exists()
    # Started by hand it is looked at when somebody does.
    assert cli("run", cli.write("w.yaml", undone_by(compensate, "manual", **policy))).code == 0


# -- verbs -------------------------------------------------------------------------------------------------------------


def test_providers_inspect(cli: Cli) -> None:
    result = cli.json("providers", "inspect")
    found = {item["kind"]: item for item in result.data["providers"]}
    assert set(found) == {"fake", "openai", "azure_openai", "openai_compatible", "anthropic", "google"}
    assert json.loads(result.out)["kind"] == "ProviderCapabilities"
    assert {"text", "usage", "cancellation"} <= set(found["anthropic"]["capabilities"])
    assert "streaming" not in found["anthropic"]["capabilities"]
    assert found["google"]["defaultCredential"] == "GEMINI_API_KEY"
    assert found["fake"]["extra"] is None
    assert cli("providers", "inspect", "openai").out.startswith("openai ")
    assert cli("providers", "inspect", "nobody").code == 2


def test_auth_check(cli: Cli) -> None:
    cli.environment.pop("OPENAI_API_KEY", None)
    provider = {"kind": "anthropic", "credential": {"env": "KEY"}, "headers": {"X-Org": {"env": "ORG"}}}
    file = cli.write("w.yaml", document(provider, LOCAL))
    result = cli.json("auth", "check", file, env={"KEY": "sk-very-secret-1"})
    assert result.code == 3
    assert "sk-very-secret-1" not in result.out + result.err
    assert json.loads(result.out)["kind"] == "AuthCheck"
    shown = {item["provider"]: {s["name"]: s["status"] for s in item["secrets"]} for item in result.data["providers"]}
    assert shown == {"p": {"headers.X-Org": "denied", "credential": "ok"}, "unused": {}}
    assert [item["used"] for item in result.data["providers"]] == [True, False]
    denied = next(s for s in result.data["providers"][0]["secrets"] if s["status"] == "denied")
    assert denied["remedy"] == "allow it under policy: environmentAllowlist: [ORG]"
    told = cli("auth", "check", file, env={"KEY": "sk-very-secret-1"})
    assert (told.code, "not used" in told.out, "environmentAllowlist: [ORG]" in told.out) == (3, True, True)
    result = cli.json("auth", "check", file)
    assert (result.code, result.data["valid"]) == (6, False)
    assert "this worker" not in result.out
    assert not cli.database.exists()


def test_auth_check_is_content_when_everything_is_there(cli: Cli) -> None:
    file = cli.write("w.yaml", document({"kind": "openai"}))
    result = cli("auth", "check", file, env={"OPENAI_API_KEY": "sk-very-secret-2"})
    assert result.code == 0
    assert "sk-very-secret-2" not in result.out
    assert "env:OPENAI_API_KEY" in result.out


# -- the whole way -----------------------------------------------------------------------------------------------------


def test_a_run_asks_a_real_server(cli: Cli, server: ModelServer) -> None:
    provider = {"kind": "openai_compatible", "endpoint": server.url, "credential": {"env": "KEY"}}
    result = cli.json("run", cli.write("w.yaml", document(provider, LOCAL)), env={"KEY": "sk-1234567890"})
    assert result.code == 0, result.err
    assert result.data["output"]["ask"]["text"] == "fine"
    assert server.count == 1
    assert server.seen[0].headers["authorization"] == "Bearer sk-1234567890"


def test_a_key_that_changes_during_a_run_is_read_anew(cli: Cli, server: ModelServer) -> None:
    """A file that is rewritten, a command that prints a token for an hour: a worker keeps neither."""
    (cli.folder / "keys").mkdir()
    cli.write("keys/key", "sk-first-1234\n")
    provider = {
        "kind": "openai_compatible",
        "endpoint": server.url,
        "credential": {"file": "keys/key"},
        "headers": {"X-Token": {"process": {"command": "cat", "args": ["keys/key"]}}},
    }
    policy = {**LOCAL, "secretFileRoots": ["keys"], "secretProcessAllowlist": ["cat"], "processAllowlist": ["sh"]}
    turn = {"command": "sh", "args": ["-c", "echo sk-second-5678 > keys/key"]}
    more = {
        "actions": {"turn": {"kind": "builtin.shell.exec", **turn}},
        "tasks": [
            {"id": "one", "uses": "agent:a", "with": {"prompt": "hello"}},
            {"id": "turn", "uses": "action:turn", "needs": ["one"]},
            {"id": "two", "uses": "agent:a", "needs": ["turn"], "with": {"prompt": "hello"}},
        ],
    }
    result = cli.json("run", cli.write("w.yaml", document(provider, policy, **more)), "--workers", "1")
    assert result.code == 0, result.err
    seen = [(one.headers["authorization"], one.headers["x-token"]) for one in server.seen]
    assert seen == [("Bearer sk-first-1234", "sk-first-1234"), ("Bearer sk-second-5678", "sk-second-5678")]


LEAK = "s3cret-token-value"


@pytest.mark.parametrize("verb", ["run", "submit"])
@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("instructionsFile", "'in.md' (spec.agents.a)"),
        ("variables file", "'v.yaml' (spec): deep.key"),
        ("document", "spec.tasks[0].with.prompt"),
        ("key", "spec.vars"),
        ("input", "inputs: x"),
        ("var", "--var: x"),
        ("given file", "'v.yaml': deep.key"),
    ],
)
def test_a_secret_that_would_be_stored_is_refused_with_its_place(cli: Cli, verb: str, place: str, named: str) -> None:
    (cli.folder / "keys").mkdir()
    cli.write("keys/tok", LEAK + "\n")
    cli.write("in.md", f"Use {LEAK if place == 'instructionsFile' else 'it'} well.")
    cli.write("v.yaml", f"deep: {{key: ['{LEAK if 'file' in place else 'x'}']}}\n")
    agent = {"provider": "p", "model": "m", "instructionsFile": "in.md"}
    spec: dict[str, Any] = {
        "agents": {"a": agent},
        "actions": {"sh": SECRET},
        "inputs": {"x": 1},
        "tasks": [{"id": "t", "uses": "agent:a", "with": {"prompt": LEAK if place == "document" else "go"}}],
    }
    if place == "key":
        spec["vars"] = {LEAK.replace("-", "_"): 1}
        cli.write("keys/tok", LEAK.replace("-", "_"))
    elif place == "variables file":
        spec["varsFiles"] = ["v.yaml"]
    policy = {"secretFileRoots": ["keys"], "environmentAllowlist": ["TOK"]}
    file = cli.write("w.yaml", document({"kind": "fake"}, policy, **spec))
    options = {
        "input": ["--input", f"x=Bearer {LEAK}"], "var": ["--var", f'x="{LEAK}"'],
        "given file": ["--vars-file", "v.yaml"],
    }.get(place, [])  # fmt: skip
    refused = cli.json(verb, file, *options)
    assert (refused.code, refused.error["code"]) == (3, "blocked"), refused.err
    assert named in refused.error["message"]
    assert "file:keys/tok" in refused.error["message"]
    assert LEAK not in refused.err
    assert LEAK.replace("-", "_") not in refused.err
    assert not cli.database.exists()


@pytest.mark.parametrize(("name", "code"), [("HOME", 0), ("LC_PAPER", 0), ("TOKEN", 3)])
def test_a_variable_of_every_session_may_stand_in_a_document(cli: Cli, name: str, code: int) -> None:
    """A command that needs HOME is no reason to refuse a path below it."""
    value = "/home/somebody"
    policy = {"environmentAllowlist": [name], "processAllowlist": ["true"]}
    action = {"kind": "builtin.shell.exec", "command": "true", "idempotency": "pure", "env": {name: {"env": name}}}
    tasks = [{"id": "t", "uses": "action:sh", "with": {"args": [f"{value}/file"]}}]
    file = cli.write("w.yaml", document({"kind": "fake"}, policy, actions={"sh": action}, tasks=tasks))
    assert cli.json("submit", file, env={name: value}).code == code
