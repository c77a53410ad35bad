"""Report 3 for what goes over the network: a call that takes longer than a lease, and a worker that freezes in one.

https://github.com/riverqueue/river/issues/1302 · https://github.com/celery/celery/issues/5935
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field, eventually, gone, seconds
from support.field_models import ask, models
from support.model_server import Play, model_server
from support.peers import PeerServer
from support.scale import short_lease

LEASE = short_lease(1.2)
SLOW = """\
import json, sys, time
told = {"protocolVersion": "agentctl.dev/process-extension/v1", "name": "slow", "inputSchema": True,
        "outputSchema": True, "capabilities": []}
if sys.argv[-1] == "--agentctl-invoke":
    call = json.load(sys.stdin)
    time.sleep(call["input"]["seconds"])
    told = {key: call[key] for key in ("protocolVersion", "effectId")} | {"output": {"word": "slow"}}
print(json.dumps(told))
"""


@pytest.mark.timeout(300)
def test_calls_that_take_longer_than_a_lease_are_left_alone(field: Field, tmp_path: Path) -> None:
    """A model, a server of tools and an extension, each for four leases: one request, one delivery."""
    lease = seconds(5, LEASE)
    field.lease(lease)
    field.text("slow.py", SLOW)
    python = Path(sys.executable).name
    gate = threading.Event()
    extension = {
        "kind": "extension.process", "command": sys.executable, "args": ["slow.py"], "idempotency": "at_most_once",
        "protocolVersion": "agentctl.dev/process-extension/v1", "inputSchema": True, "outputSchema": True,
    }  # fmt: skip
    tool = {"kind": "mcp.call", "idempotency": "at_most_once", "with": {"server": "numbers", "tool": "slow"}}
    with model_server() as server, PeerServer("mcp_server.py", tmp_path / "mcp") as peer:
        server.plays(Play(gate=gate))
        file = field.workflow(
            "slow",
            [
                ask("model"),
                {"id": "tool", "uses": "action:tool", "with": {"arguments": {"seconds": 4 * lease}}},
                {"id": "extension", "uses": "action:extension", "with": {"seconds": 4 * lease}},
            ],
            actions={"tool": tool, "extension": extension},
            mcpServers={"numbers": {"url": f"{peer.origin}/mcp", "timeoutSeconds": 60}},
            **models(server.url, policy={"processAllowlist": [python]}),
        )
        pool = field.pool(4)
        run_id = field.submit(file)
        server.wait_for(1)
        timer = threading.Timer(4 * lease, gate.set)
        timer.start()
        outcome = field.json("wait", run_id, limit=8 * lease + 60)
        timer.join()
        assert (outcome.code, outcome.data["state"]) == (0, "succeeded"), outcome.out
        assert (server.count, peer.counts()["tools/call"]) == (1, 1)
    assert set(field.tasks(run_id).values()) == {("succeeded", 1, 1)}
    assert set(field.rows("SELECT status, dispatches FROM effects")) == {("succeeded", 1)}
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
def test_a_worker_that_freezes_while_a_model_answers(field: Field) -> None:
    """It is ended after its lease, the answer that it never read is in doubt, and no second request is sent."""
    lease = seconds(5, LEASE)
    field.lease(lease)
    gate = threading.Event()
    with model_server() as server:
        server.plays(Play(gate=gate), Play(text="second"))
        pool = field.pool(2)
        runtime = {"budgets": {"maxProviderRequests": 3}}
        retry = {"retry": {"maxAttempts": 3}}
        run_id = field.submit(field.workflow("frozen", [ask("a", **retry)], runtime=runtime, **models(server.url)))
        server.wait_for(1)
        frozen = field.holder(run_id)
        assert frozen is not None
        os.kill(frozen.pid, signal.SIGSTOP)
        gate.set()
        outcome = field.json("wait", run_id, limit=lease * 4 + 30)
        assert gone(frozen.pid), "the frozen holder lives while its task went on"
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen.pid, signal.SIGCONT)
        assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
        assert server.count == 1
        assert field.tasks(run_id) == {"a": ("waiting_for_effect", 1, 1)}
        assert field.rows("SELECT status, dispatches FROM effects") == [("uncertain", 1)]
        held = "SELECT used, reserved FROM budget_lines WHERE dimension = 'providerRequests'"
        assert field.rows(held) == [(0, 1)], "held until a person says what happened"
        eventually(lambda: len(field.workers("idle")) == 2, "the pool replaces the frozen worker", 10)
        [(effect,)] = field.rows("SELECT effect_id FROM effects")
        said = field.json("effects", "reconcile", effect, "--status", "not-applied", "--reason", "no bill")
        assert said.code == 0, said.err
        wait_until(lambda: field.json("status", run_id).data["state"] == "succeeded", "it goes on")
        assert server.count == 2
    assert field.rows(held) == [(1, 0)]
    field.check_clean_end(drained=[pool], uncertain=True)
