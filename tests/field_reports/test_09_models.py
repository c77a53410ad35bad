"""Report 9 for agents: a cancel reaches the calls of a fan-out in a sub-workflow, and others get the places.

https://github.com/PrefectHQ/prefect/issues/7732 · https://github.com/dagster-io/dagster/issues/21476
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field, bound
from support.field_models import action_tool, ask, ask_fan, models
from support.model_server import Play, model_server
from support.peers import PeerServer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("inside", [False, True], ids=["top", "sub-workflow"])
def test_cancel_ends_calls_and_gives_the_places_to_others(field: Field, inside: bool) -> None:
    """Run A: fifty questions on eight workers with a budget for all; run B waits behind it."""
    gate = threading.Event()
    with model_server() as server, model_server() as other:
        server.plays(Play(gate=gate))
        spec = models(server.url)
        fan = ask_fan("q", 50)
        runtime = {"maxConcurrency": 8, "budgets": {"maxProviderRequests": 50}}
        if inside:
            sub = {"version": "1.0.0", "inputSchema": True, "outputSchema": True, "tasks": [fan]}
            a = field.workflow(
                "a", [{"id": "call", "uses": "workflow:sub"}], subworkflows={"sub": sub}, runtime=runtime, **spec
            )
        else:
            a = field.workflow("a", [fan], runtime=runtime, **spec)
        pool = field.pool(8)
        waiting = field.start("run", a, "--output", "json")
        server.wait_for(8)
        run_id = field.scalar("SELECT run_id FROM runs")
        b = field.submit(field.workflow("b", [ask("b")], **models(other.url)))
        began = time.monotonic()
        cancelled = field.json("cancel", run_id)
        assert (cancelled.code, cancelled.seconds < bound(2)) == (0, True)
        assert waiting.wait().code == 130
        assert time.monotonic() - began < bound(5)
        assert field.json("wait", b).code == 0
        assert (server.count, other.count) == (8, 1)
        assert server.gone.is_set(), "nobody has closed a connection"
        assert other.seen[0].at - began < bound(4), "the places are free for others"
    tasks = "SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1"
    counts = dict(field.rows(tasks, run_id))
    assert counts == ({"cancelled": 52, "succeeded": 1} if inside else {"cancelled": 51})
    statuses = dict(field.rows("SELECT status, COUNT(*) FROM effects WHERE run_id = ? GROUP BY 1", run_id))
    assert set(statuses) <= {"uncertain", "cancelled", "succeeded"}
    assert statuses["uncertain"] == 8
    line = "SELECT used, reserved FROM budget_lines WHERE run_id = ? AND dimension = 'providerRequests'"
    assert field.rows(line, run_id) == [(0, 8)], "held for what is in doubt only"
    assert len(field.json("status", run_id).data["uncertainEffects"]) == 8
    field.check_clean_end(drained=[pool], uncertain=True)


@pytest.mark.timeout(300)
def test_cancel_ends_an_agent_wherever_it_is(field: Field, tmp_path: Path) -> None:
    """One is in its tool, one waits for an approval of its tool, and one is a call to a server that never answers."""
    actions = {
        "long": {
            "kind": "builtin.shell.exec", "command": str(field.tick), "idempotency": "at_most_once",
            "timeoutSeconds": 600, "with": {"args": [str(field.ledger), "tool", "600"]},
        },
        "add": {"kind": "mcp.call", "idempotency": "at_most_once", "with": {"server": "numbers", "tool": "add"}},
    }  # fmt: skip
    with model_server() as server, PeerServer("mcp_server.py", tmp_path / "mcp") as peer:
        peer.plan({"tools/call": ["hang"]})
        server.plays(Play(text="", calls=[("c", "works", "{}")]), Play(text="", calls=[("c", "asks", "{}")]))
        works = action_tool("long", "at_most_once", timeoutSeconds=600)
        spec = models(server.url, tools={"works": works, "asks": {**works, "approval": "always"}})
        file = field.workflow(
            "three",
            [
                ask("first"),
                ask("second", needs=[]),
                {"id": "third", "uses": "action:add", "with": {"arguments": {"a": 1, "b": 2}}},
            ],
            actions=actions,
            mcpServers={"numbers": {"url": f"{peer.origin}/mcp", "timeoutSeconds": 600}},
            **spec,
        )
        pool = field.pool(3)
        run_id = field.submit(file)
        wait_until(lambda: len(field.lines()) == 1, "the tool of the first has begun")
        wait_until(lambda: bool(field.rows("SELECT 1 FROM approvals WHERE status = 'pending'")), "the question")
        wait_until(lambda: peer.counts().get("tools/call") == 1, "the server is asked")
        assert field.json("cancel", run_id).code == 0
        outcome = field.json("wait", run_id)
        assert (outcome.code, outcome.data["state"]) == (130, "cancelled")
        assert server.count == 2
    assert {state for state, _, _ in field.tasks(run_id).values()} == {"cancelled"}
    assert field.rows("SELECT 1 FROM approvals WHERE status = 'pending'") == []
    assert field.json("approvals", "list").data["approvals"] == []
    assert field.effect_processes() == {}
    assert field.scalar("SELECT COUNT(*) FROM effects WHERE status = 'uncertain'") == 2
    field.check_clean_end(drained=[pool], uncertain=True)
