"""A workflow with an agent that reads, appends and answers; its model is a script that counts what arrives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.field_models import action_tool

STEPS = ("turn 1", "tool.read", "turn 2", "tool.append", "turn 3")
"""The effects of the agent, in the order of their ordinals."""

READ: dict[str, Any] = {
    "kind": "builtin.workspace.read",
    "description": "Read a file.",
    "inputSchema": {
        "type": "object",
        "additionalProperties": False,
        "required": ["path"],
        "properties": {"path": {"type": "string"}},
    },
    "outputSchema": {"type": "object", "required": ["content"]},
    "capability": "filesystem.read",
    "risk": "low",
    "effectClass": "observe",
    "idempotency": "idempotent",
    "retrySafe": True,
    "timeoutSeconds": 10,
}
WRITE: dict[str, Any] = {
    **READ,
    "kind": "builtin.workspace.write",
    "description": "Write a file.",
    "inputSchema": {
        "type": "object",
        "additionalProperties": False,
        "required": ["path", "content"],
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    },
    "outputSchema": {"type": "object", "required": ["sha256"]},
    "capability": "filesystem.write",
    "risk": "medium",
    "effectClass": "workspace_mutate",
}
ECHO: dict[str, Any] = {
    **READ,
    "kind": "builtin.echo",
    "description": "Say it again.",
    "inputSchema": {
        "type": "object",
        "additionalProperties": False,
        "required": ["word"],
        "properties": {"word": {"type": "string"}},
    },
    "outputSchema": {"type": "object"},
    "capability": "internal",
    "effectClass": "pure",
    "idempotency": "pure",
}


def shell_tool(action: str, idempotency: str) -> dict[str, Any]:
    """A tool that stands for a command, whose arguments the model gives."""
    given = {
        "type": "object",
        "additionalProperties": False,
        "required": ["args"],
        "properties": {"args": {"type": "array", "items": {"type": "string"}}},
    }
    told = {"type": "object", "required": ["exitCode"]}
    return action_tool(action, idempotency, inputSchema=given, outputSchema=told, timeoutSeconds=20)


def document(
    tasks: list[dict[str, Any]],
    *,
    tools: Mapping[str, Any] | None = None,
    script: str | None = "model.json",
    agent: Mapping[str, Any] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A workflow whose agent `helper` has all these tools. `spec` adds to it, or replaces."""
    provider = {"kind": "fake"} if script is None else {"kind": "fake", "script": script}
    helper = {"provider": "model", "model": "m", "instructions": "Help.", "tools": list(tools or {}), **(agent or {})}
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "agents"},
        "spec": {
            "policy": {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
            "providers": {"model": provider},
            "agents": {"helper": helper},
            "tools": dict(tools or {}),
            "tasks": tasks,
            **spec,
        },
    }


def write_script(folder: Path, turns: list[dict[str, Any]], **more: Any) -> Path:
    """The script `model.json` with one conversation; the requests that arrive are counted in `out/asked`."""
    path = folder / "model.json"
    conversations = more.pop("conversations", [{"turns": turns}])
    path.write_text(json.dumps({"log": "out/asked", "conversations": conversations, **more}), encoding="utf-8")
    return path


def asked(folder: Path) -> Counter[int]:
    """How many requests have arrived at the model for each turn, from 1."""
    log = folder / "out" / "asked"
    if not log.exists():
        return Counter()
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return Counter(line["turn"] + 1 for line in lines if line["arrived"])
