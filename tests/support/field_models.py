"""What the field reports say in a document when a model, or a server of tools, has a part in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NETWORK: dict[str, Any] = {"networkAllowlist": ["127.0.0.1"], "network": {"allowPrivate": True}}


def models(
    url: str,
    *,
    agent: Mapping[str, Any] | None = None,
    tools: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fields of `spec` for `Field.workflow`: the agent `a`, which has all these tools and asks the service there."""
    helper = {"provider": "p", "model": "m", "instructions": "Be brief.", "tools": list(tools or {}), **(agent or {})}
    return {
        "policy": {"approval": "never", "processAllowlist": ["tick", "sh"], **NETWORK, **(policy or {})},
        "providers": {"p": {"kind": "openai_compatible", "endpoint": url}},
        "agents": {"a": helper},
        "tools": dict(tools or {}),
    }


def ask(id: str, **fields: Any) -> dict[str, Any]:
    """A task that asks the agent."""
    return {"id": id, "uses": "agent:a", "with": {"prompt": "hello"}, **fields}


def ask_fan(id: str, count: int, **fields: Any) -> dict[str, Any]:
    """`count` tasks that ask the agent, as one `foreach`."""
    prompt = {"prompt": f"{id} ${{{{ vars.item }}}}"}
    return ask(id, foreach={"items": list(range(count)), "maxItems": count}, **fields) | {"with": prompt}


def action_tool(action: str, idempotency: str, **more: Any) -> dict[str, Any]:
    """A tool without arguments that stands for an action of the document."""
    return {
        "kind": "action",
        "action": action,
        "description": "Do it.",
        "inputSchema": {"type": "object", "additionalProperties": False},
        "outputSchema": {"type": "object"},
        "capability": "process.exec",
        "risk": "high",
        "effectClass": "process_execution",
        "idempotency": idempotency,
        "retrySafe": idempotency == "idempotent",
        "timeoutSeconds": 60,
        **more,
    }
