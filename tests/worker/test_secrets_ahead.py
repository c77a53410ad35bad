"""Secrets are read for an attempt that a worker holds, never ahead of time for one that another may take, nor in a
check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical, loads
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import Batch, NewAttempt
from agentctl.store.timing import Timing
from agentctl.worker.attempt import AttemptRunner
from agentctl.worker.watch import Token
from support.builders import Driver, Hand, new_run, open_store
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


PLACES = ["env", "mcp", "a2a", "ca of mcp", "ca of a2a"]
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def ready(
    store: Store, folder: Path, action: dict[str, Any], given: dict[str, Any], *, check: bool = False, **policy: Any
) -> AttemptRunner:
    """A run with one task in the queue."""
    rules = {
        "approval": "never",
        "processAllowlist": ["true"],
        "environmentAllowlist": ["TOKEN"],
        "secretProcessAllowlist": ["secret"],
        "networkAllowlist": ["127.0.0.1"],
        "network": {"allowPrivate": True},
        **policy,
    }
    settings = canonical({"actions": {"it": action}, "policy": rules, "showDiff": False, "check": check})
    store.create_run(new_run(tasks=1, settings_json=settings, base_path=str(folder)))
    batch = Batch()
    batch.readies.append((None, None, 0))
    batch.enqueues.append(NewAttempt(0, "t0", 1, 60_000, canonical({"action": "it", "input": given})))
    batch.changes.append([0, "ready", 0, None, None])
    Driver(store, "run-1").write(batch)
    return AttemptRunner(store, store.clock, Timing(), Faults(None), Token())


def secretive(folder: Path, place: str) -> Case:
    """(action, input, policy) with a secret that a command yields, which writes down that it was started."""
    program = folder / "secret"
    program.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\necho hunter2-hunter2\n")
    program.chmod(0o700)
    reference = {"process": {"command": str(program)}}
    headers = {"headers": {"authorization": reference}}
    network = {"network": {"allowPrivate": True, "customCa": reference}}
    cases: dict[str, Case] = {
        "env": ({"kind": "builtin.shell.exec", "command": "true", "env": {"TOKEN": reference}}, {}, {}),
        "mcp": ({"kind": "mcp.call", "peers": {"there": MCP | headers}}, CALL, {}),
        "a2a": ({"kind": "a2a.delegate", "peers": {"there": A2A | headers}}, MESSAGE, {}),
        "ca of mcp": ({"kind": "mcp.call", "peers": {"there": MCP}}, CALL, network),
        "ca of a2a": ({"kind": "a2a.delegate", "peers": {"there": A2A}}, MESSAGE, network),
    }
    return cases[place]


@pytest.mark.parametrize("place", PLACES)
def test_no_command_is_started_for_an_attempt_that_nobody_holds(store: Store, tmp_path: Path, place: str) -> None:
    action, given, policy = secretive(tmp_path, place)
    runner = ready(store, tmp_path, action, given, **policy)
    candidate = store.peek(None)
    assert candidate is not None
    assert runner.prepare(candidate) is None
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_check_judges_a_secret_and_reads_none(store: Store, tmp_path: Path, place: str) -> None:
    action, given, policy = secretive(tmp_path, place)
    ending = ready(store, tmp_path, action, given, check=True, **policy).run(Hand(store).take())
    assert ending.attempt is not None
    assert ending.attempt.outcome == "succeeded", ending.attempt.error_json
    assert loads(ending.attempt.result_json or "")["status"] == "requires_execution"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("place", PLACES)
def test_a_check_says_no_where_a_run_would(store: Store, tmp_path: Path, place: str) -> None:
    action, given, policy = secretive(tmp_path, place)
    runner = ready(store, tmp_path, action, given, check=True, **policy, secretProcessAllowlist=[])
    ending = runner.run(Hand(store).take())
    assert ending.attempt is not None
    assert loads(ending.attempt.error_json or "")["code"] == "policy_denied"


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
    candidate = store.peek(None)
    assert candidate is not None
    assert runner.prepare(candidate) is not None
