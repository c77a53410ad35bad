"""Secrets are read for an attempt that a worker holds, never ahead of time for one that another may take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import Batch, NewAttempt
from agentctl.store.timing import Timing
from agentctl.worker.attempt import AttemptRunner
from agentctl.worker.watch import Token
from support.builders import Driver, new_run, open_store
from support.clock import ManualClock

MCP = {"url": "https://127.0.0.1:1/mcp", "timeoutSeconds": 10, "protocolVersion": "2025-11-25"}
A2A = {
    "cardUrl": "https://127.0.0.1:1/card",
    "timeoutSeconds": 10,
    "protocolVersion": "1.0",
    "pollIntervalMs": 20,
    "maxPolls": 2,
}
CALL = {"server": "there", "tool": "add"}
MESSAGE = {"peer": "there", "messageId": "m", "message": "hello"}


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def ready(store: Store, folder: Path, action: dict[str, Any], given: dict[str, Any], **network: Any) -> AttemptRunner:
    """A run with one task in the queue."""
    policy = {
        "approval": "never",
        "processAllowlist": ["true"],
        "environmentAllowlist": ["TOKEN"],
        "secretProcessAllowlist": ["secret"],
        "networkAllowlist": ["127.0.0.1"],
        "network": {"allowPrivate": True, **network},
    }
    settings = canonical({"actions": {"it": action}, "policy": policy, "showDiff": False})
    store.create_run(new_run(tasks=1, settings_json=settings, base_path=str(folder)))
    batch = Batch()
    batch.readies.append((None, None, 0))
    batch.enqueues.append(NewAttempt(0, "t0", 1, 60_000, canonical({"action": "it", "input": given})))
    batch.changes.append([0, "ready", 0, None, None])
    Driver(store, "run-1").write(batch)
    return AttemptRunner(store, store.clock, Timing(), Faults(None), Token())


@pytest.mark.parametrize("place", ["env", "mcp", "a2a", "ca of mcp", "ca of a2a"])
def test_no_command_is_started_for_a_secret_of_an_attempt_that_nobody_holds(
    store: Store, tmp_path: Path, place: str
) -> None:
    program = tmp_path / "secret"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho hunter2-hunter2\n")
    program.chmod(0o700)
    reference = {"process": {"command": str(program)}}
    headers = {"headers": {"authorization": reference}}
    action, given = {
        "env": ({"kind": "builtin.shell.exec", "command": "true", "env": {"TOKEN": reference}}, {}),
        "mcp": ({"kind": "mcp.call", "peers": {"there": MCP | headers}}, CALL),
        "a2a": ({"kind": "a2a.delegate", "peers": {"there": A2A | headers}}, MESSAGE),
        "ca of mcp": ({"kind": "mcp.call", "peers": {"there": MCP}}, CALL),
        "ca of a2a": ({"kind": "a2a.delegate", "peers": {"there": A2A}}, MESSAGE),
    }[place]
    network = {"customCa": reference} if place.startswith("ca") else {}
    runner = ready(store, tmp_path, action, given, **network)
    candidate = store.peek(None, skip=0)
    assert candidate is not None
    assert runner.prepare(candidate) is None
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("action", "given"),
    [
        ({"kind": "builtin.shell.exec", "command": "true"}, {}),
        ({"kind": "mcp.call", "peers": {"there": MCP}}, CALL),
        ({"kind": "a2a.delegate", "peers": {"there": A2A}}, MESSAGE),
    ],
    ids=["command", "mcp", "a2a"],
)
def test_what_takes_none_is_prepared_ahead(
    store: Store, tmp_path: Path, action: dict[str, Any], given: dict[str, Any]
) -> None:
    runner = ready(store, tmp_path, action, given)
    candidate = store.peek(None, skip=0)
    assert candidate is not None
    assert runner.prepare(candidate) is not None
