"""Agents and tools in the compiler: what a plan knows of them, and what is refused (contract 1.4, 1.6, 2.11, 12.2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.advice import certain_denials, repeated_calls
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import document_from_source
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.plan import Plan, keeps_artifacts, plan_as_json
from agentctl.coordinator.plan_index import PlanIndex
from agentctl.coordinator.submission import model_settings
from agentctl.coordinator.variables import capture
from agentctl.coordinator.yaml_document import parse_document
from agentctl.store.canonical import canonical, hex_digest, loads
from support.agents import ECHO, READ, WRITE, document, shell_tool

ASK = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "hi"}}
SHELL = {"kind": "builtin.shell.exec", "command": "sh"}


def compiled(value: dict[str, Any], folder: Path = Path("/base"), **inputs: Any) -> Plan:
    source = parse_document(json.dumps(value).encode(), "flow.yaml")
    return compile_workflow(capture(document_from_source(source, base_dir=folder)), inputs=inputs)


def findings(value: dict[str, Any], folder: Path = Path("/base")) -> list[tuple[str, str | None]]:
    with pytest.raises(DocumentError) as caught:
        compiled(value, folder)
    return [(item.code, item.path) for item in caught.value.diagnostics]


def test_a_plan_has_what_its_agents_need_and_no_more() -> None:
    tools = {"read": READ, "run": shell_tool("sh", "unknown"), "other": ECHO}
    value = document([ASK], tools=tools, actions={"sh": SHELL, "idle": SHELL}, agent={"tools": ["read", "run"]})
    value["spec"]["agents"]["idle"] = {"provider": "model", "model": "x", "instructions": "x"}
    value["spec"]["providers"]["idle"] = {"kind": "openai"}
    plan = compiled(value)
    task = plan.tasks["ask"]
    assert (task.uses_kind, task.uses_name, task.action_kind) == ("agent", "helper", None)
    assert (task.input, task.predictability) == ({"prompt": "hi"}, "requires_execution")
    assert plan.requirements == {
        "providers": ["model"],
        "tools": ["read", "run"],
        "effects": ["builtin.read", "builtin.shell.exec"],
        "processes": ["sh"],
    }
    assert (list(plan.agents), list(plan.providers), list(plan.tools)) == (["helper"], ["model"], ["read", "run"])
    assert list(plan.actions) == ["sh"]
    assert plan.agents["helper"]["instructionsDigest"] == hex_digest("Help.")
    assert Plan.from_json(loads(canonical(plan.to_json()))) == plan
    shown = plan_as_json(plan)["tasks"]["ask"]
    assert shown["instructionsDigest"] == hex_digest("Help.")
    assert "Help." not in canonical(plan_as_json(plan))
    assert set(model_settings(plan)) == {"workflow", "agents", "providers", "tools", "pricing"}


def test_a_plan_without_agents_is_stored_as_before() -> None:
    value = document([{"id": "a", "uses": "action:say"}], actions={"say": {"kind": "builtin.assign"}})
    assert not {"agents", "providers", "tools"} & compiled(value).to_json().keys()


@pytest.mark.parametrize(
    ("agent", "task", "seconds"),
    [
        ({}, {}, 8 * 120 + 16 * 10),
        ({"maxTurns": 2, "timeoutSeconds": 5, "maxToolCalls": 1}, {}, 2 * 5 + 10),
        ({"maxTurns": 64, "timeoutSeconds": 86400}, {}, 86_400),
        ({}, {"timeoutSeconds": 7}, 7),
    ],
)
def test_without_a_limit_a_task_may_take_what_its_calls_may_take(agent: Any, task: Any, seconds: int) -> None:
    assert (
        compiled(document([{**ASK, **task}], tools={"read": READ}, agent=agent)).tasks["ask"].timeout_seconds == seconds
    )


def test_writing_tools_need_the_store_of_artifacts() -> None:
    assert keeps_artifacts(compiled(document([ASK], tools={"write": WRITE})))
    assert not keeps_artifacts(compiled(document([ASK], tools={"read": READ})))


def fingerprint(value: dict[str, Any], folder: Path = Path("/base")) -> tuple[str, str]:
    plan = compiled(value, folder)
    return PlanIndex(plan).fingerprints(plan.tasks["ask"].position)


@pytest.mark.parametrize(
    ("path", "changed", "which"),
    [
        (("agents", "helper", "instructions"), "Help more.", "definition"),
        (("agents", "helper", "model"), "other", "definition"),
        (("agents", "helper", "structuredOutput"), {"type": "object"}, "both"),
        (("providers", "model", "script"), "other.json", "definition"),
        (("tools", "run", "description"), "Other.", "definition"),
        (("actions", "sh", "command"), "bash", "definition"),
        (("tasks", 0, "with", "prompt"), "ho", "definition"),
        (("policy", "processAllowlist"), ["sh", "bash"], "nothing"),
        (("actions", "idle", "command"), "bash", "nothing"),
        (("runtime",), {"maxConcurrency": 2}, "nothing"),
    ],
)
def test_what_a_fingerprint_covers(path: tuple[Any, ...], changed: Any, which: str) -> None:
    def value() -> dict[str, Any]:
        actions = {"sh": dict(SHELL), "idle": dict(SHELL)}
        return document(
            [{**ASK, "with": {"prompt": "hi"}}], tools={"run": dict(shell_tool("sh", "unknown"))}, actions=actions
        )

    before, edited = fingerprint(value()), value()
    place: Any = edited["spec"]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = changed
    after = fingerprint(edited)
    assert (before[0] != after[0], before[1] != after[1]) == {
        "definition": (True, False), "both": (True, True), "nothing": (False, False),
    }[which]  # fmt: skip


# -- instructions ------------------------------------------------------------------------------------------------------


def with_file(name: str, **more: Any) -> dict[str, Any]:
    value = document([{**ASK, **more}], script=None)
    value["spec"]["agents"]["helper"] = {"provider": "model", "model": "m", "instructionsFile": name}
    return value


def test_a_file_of_instructions_is_captured_with_its_text(tmp_path: Path) -> None:
    (tmp_path / "i.md").write_text("Be ${{ inputs.mood }}.", encoding="utf-8")
    first = compiled(with_file("i.md"), tmp_path)
    assert first.agents["helper"]["instructions"] == "Be ${{ inputs.mood }}."
    assert PlanIndex(first).instructions(0) is not None
    before = fingerprint(with_file("i.md"), tmp_path)
    (tmp_path / "i.md").write_text("Be brief.", encoding="utf-8")
    second = compiled(with_file("i.md"), tmp_path)
    assert fingerprint(with_file("i.md"), tmp_path)[0] != before[0]
    assert second.workflow_digest != first.workflow_digest
    assert PlanIndex(second).instructions(0) is None


def test_bad_files_of_instructions_are_found_before_a_run(tmp_path: Path) -> None:
    place = "spec.agents.helper.instructionsFile"
    (tmp_path / "bin").write_bytes(b"\xff")
    (tmp_path / "empty").write_text("")
    (tmp_path / "big").write_text("x" * 1_048_577)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("/etc/hostname")
    for name, code in (
        ("gone.md", "missing_reference"),
        ("../x", "policy_denied"),
        ("/etc/hostname", "policy_denied"),
        ("in/link", "policy_denied"),
        ("bin", "schema_violation"),
        ("empty", "schema_violation"),
        ("big", "schema_violation"),
        ("${{ inputs.f }}", "invalid_template"),
        ("a\0b", "missing_reference"),
    ):
        assert findings(with_file(name), tmp_path) == [(code, place)], name


def test_instructions_read_only_what_the_task_needs() -> None:
    value = document(
        [{"id": "first", "uses": "action:say"}, ASK],
        actions={"say": {"kind": "builtin.assign"}},
        agent={"instructions": "After ${{ tasks.first.output.output }}"},
    )
    assert findings(value) == [("invalid_template", "spec.agents.helper.instructions")]
    value["spec"]["tasks"][1] = {**ASK, "needs": ["first"]}
    assert compiled(value).tasks["ask"].instructions is None


def test_in_a_sub_workflow_the_paths_of_instructions_are_its_own() -> None:
    value = document(
        [{"id": "call", "uses": "workflow:w", "with": {"who": "Ada"}}], agent={"instructions": "For ${{ inputs.who }}."}
    )
    value["spec"]["subworkflows"] = {
        "w": {"version": "1.0.0", "inputs": {"who": "x"}, "inputSchema": True, "outputSchema": True, "tasks": [ASK]}
    }
    plan = compiled(value)
    task = plan.tasks["call--ask"]
    assert task.instructions is not None
    assert task.instructions.startswith("For ${{ tasks.call--inputs-")
    assert Plan.from_json(loads(canonical(plan.to_json()))) == plan


# -- what is refused ---------------------------------------------------------------------------------------------------


def tool_findings(tool: dict[str, Any], action: dict[str, Any]) -> list[tuple[str, str | None]]:
    return findings(document([ASK], tools={"t": tool}, actions={"sh": action}))


@pytest.mark.parametrize(
    ("change", "action", "place"),
    [
        ({"capability": "anything"}, SHELL, "capability"),
        ({"effectClass": "pure"}, SHELL, "effectClass"),
        ({"risk": "low"}, SHELL, "risk"),
        ({"idempotency": "pure"}, SHELL, "idempotency"),
        ({}, {**SHELL, "idempotency": "idempotent"}, "idempotency"),
        ({}, {"kind": "builtin.assign"}, "action"),
        ({}, {"kind": "builtin.memory.write"}, "action"),
        ({}, {**SHELL, "with": {"args": ["${{ inputs.x }}"]}}, "action"),
    ],
)
def test_a_tool_is_what_its_action_is(change: dict[str, Any], action: dict[str, Any], place: str) -> None:
    found = tool_findings({**shell_tool("sh", "unknown"), **change}, action)
    assert ("schema_violation", f"spec.tools.t.{place}") in found


def test_a_model_is_asked_for_what_the_action_takes() -> None:
    tool = shell_tool("sh", "unknown")
    schema = {**tool["inputSchema"], "required": ["argv"], "properties": {"argv": {}}}
    assert tool_findings({**tool, "inputSchema": schema}, SHELL) == [
        ("schema_violation", "spec.tools.t.inputSchema.properties.argv")
    ]
    reader = {
        **READ,
        "kind": "action",
        "action": "sh",
        "inputSchema": {"type": "object", "additionalProperties": False},
    }
    assert tool_findings(reader, {"kind": "builtin.read"}) == [("schema_violation", "spec.tools.t.inputSchema")]
    plan = compiled(
        document([ASK], tools={"t": reader}, actions={"sh": {"kind": "builtin.read", "with": {"path": "a"}}})
    )
    assert list(plan.actions) == ["sh"]


def test_only_what_is_used_is_part_of_the_plan() -> None:
    network = {
        **READ, "kind": "action", "action": "remote", "capability": "mcp.call", "effectClass": "network",
        "risk": "medium", "idempotency": "unknown",
    }  # fmt: skip
    value = document([ASK], tools={"t": network}, actions={"remote": {"kind": "mcp.call"}})
    assert ("schema_violation", "spec.tools.t.inputSchema") in findings(value)
    network["inputSchema"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"server": {"type": "string"}, "tool": {"type": "string"}},
        "required": ["server", "tool"],
    }
    value = document([ASK], tools={"t": network}, actions={"remote": {"kind": "mcp.call"}})
    assert list(compiled(value).tools) == ["t"]
    value["spec"]["agents"]["helper"]["tools"] = []
    assert list(compiled(value).tools) == []


def test_a_tool_embeds_with_what_can_only() -> None:
    search = {
        **READ, "kind": "action", "action": "find", "capability": "memory.search", "idempotency": "keyed",
        "inputSchema": {
            "type": "object", "additionalProperties": False, "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    }  # fmt: skip
    find = {"find": {"kind": "builtin.long_term_memory.search"}}
    embedding = {"provider": "other", "model": "m", "dimensions": 64}
    value = document([ASK], tools={"t": search}, actions=find, memory={"longTerm": {"embedding": embedding}})
    value["spec"]["providers"]["other"] = {"kind": "anthropic"}
    assert findings(value) == [("unsupported_capability", "spec.memory.longTerm.embedding.provider")]
    embedding["provider"] = "local_hash"
    assert list(compiled(value).tools) == ["t"]


def test_a_limit_in_dollars_needs_a_price() -> None:
    value = document([ASK], agent={"usageLimit": {"maxCostUsd": 0.5}})
    assert findings(value) == [("unsupported_capability", "spec.agents.helper.usageLimit")]
    price = {"inputMicrousdPerMillionTokens": 1, "outputMicrousdPerMillionTokens": 1}
    value["spec"]["runtime"] = {"pricing": {"version": "1", "models": {"model/m": price}}}
    assert compiled(value).budget["pricing"]["version"] == "1"


def test_a_limit_in_dollars_says_how_to_get_a_price() -> None:
    with pytest.raises(DocumentError) as caught:
        compiled(document([ASK], agent={"usageLimit": {"maxCostUsd": 1.5}}))
    [item] = caught.value.diagnostics
    assert item.help is not None
    assert "runtime.pricing" in item.help


def test_other_things_that_are_refused() -> None:
    assert findings(document([{**ASK, "uses": "agent:gone"}])) == [("missing_reference", "spec.tasks[0].uses")]
    assert findings(document([{**ASK, "memoryWrites": ["k"]}])) == [("schema_violation", "spec.tasks[0].memoryWrites")]
    value = document([ASK], script=None)
    value["spec"]["providers"]["model"] = {"kind": "openai", "script": "x"}
    assert findings(value) == [("schema_violation", "spec.providers.model.script")]


def test_what_the_policy_is_certain_to_deny_is_told_before_a_run() -> None:
    tools = {"read": READ, "write": WRITE, "echo": ECHO}
    policy = {"providers": ["other"], "toolsDeny": ["filesystem.read"], "toolsAllow": ["echo", "filesystem.write"]}
    value = document([ASK], tools=tools, policy=policy)
    source = parse_document(json.dumps(value).encode(), "flow.yaml")
    loaded = capture(document_from_source(source, base_dir=Path("/base")))
    found = [(item.code, item.path) for item in certain_denials(loaded, compile_workflow(loaded, inputs={}))]
    assert found == [
        ("policy_denied", "spec.agents.helper.provider"),
        ("policy_denied", "spec.agents.helper.tools[0]"),
        ("policy_denied", "spec.agents.helper.tools[1]"),
    ]


@pytest.mark.parametrize(
    ("idempotency", "safe", "warned"),
    [("at_most_once", True, True), ("unknown", True, True), ("idempotent", True, False), ("unknown", False, False)],
)
def test_a_permission_to_repeat_what_may_not_be_done_twice_is_pointed_out(
    idempotency: str, safe: bool, warned: bool
) -> None:
    tool = {
        **READ, "kind": "action", "action": "sh", "capability": "process.exec", "risk": "high",
        "effectClass": "process_execution", "idempotency": idempotency, "retrySafe": safe,
        "inputSchema": {"type": "object", "additionalProperties": False, "properties": {}},
    }  # fmt: skip
    value = document([ASK], tools={"t": tool}, actions={"sh": {**SHELL, "idempotency": idempotency}})
    source = parse_document(json.dumps(value).encode(), "flow.yaml")
    loaded = capture(document_from_source(source, base_dir=Path("/base")))
    found = repeated_calls(loaded, compile_workflow(loaded, inputs={}))
    assert [(item.severity, item.path) for item in found] == [("warning", "spec.tools.t.retrySafe")] * warned
    for item in found:
        assert "retrySafe: true" in item.message
        assert f"idempotency is {idempotency}" in item.message
