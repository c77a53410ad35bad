"""Report 6 for calls over the network: a pool ends within its limit though a model or a server never answers.

https://github.com/celery/celery/pull/7339
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field, bound, seconds
from support.field_models import ask, models
from support.model_server import Play, model_server
from support.peers import PeerServer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["limit", "second signal"])
def test_a_pool_ends_though_nobody_answers(field: Field, tmp_path: Path, how: str) -> None:
    """What was sent is in doubt, its connections are closed, and the next pool asks nobody again."""
    limit = seconds(10, 1)
    drain = limit if how == "limit" else 600
    tool = {"kind": "mcp.call", "idempotency": "at_most_once", "with": {"server": "numbers", "tool": "add"}}
    coordinator = field.coordinator()
    with model_server() as server, PeerServer("mcp_server.py", tmp_path / "mcp") as peer:
        peer.plan({"tools/call": ["hang"]})
        server.plays(Play(gate=threading.Event()))
        file = field.workflow(
            "silent",
            [ask("model"), {"id": "tool", "uses": "action:tool", "with": {"arguments": {"a": 1, "b": 2}}}],
            actions={"tool": tool},
            mcpServers={"numbers": {"url": f"{peer.origin}/mcp", "timeoutSeconds": 600}},
            **models(server.url),
        )
        pool = field.pool(3, "--no-coordinator", "--drain-seconds", f"{drain:g}")
        run_id = field.submit(file)
        server.wait_for(1)
        wait_until(lambda: peer.counts().get("tools/call") == 1, "the tool is called")
        pool.signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(lambda: len(field.workers()) == 2, "the idle worker has ended")
            pool.signal(signal.SIGTERM)
        ended = pool.wait(bound(limit + 5) if how == "limit" else bound(6))
        assert ended.code == 3, ended.err
        assert server.gone.wait(bound(5)), "the connection to the model is still open"
        assert field.workers() == []
        outcome = field.json("wait", run_id)
        assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
        assert set(field.tasks(run_id).values()) == {("waiting_for_effect", 1, 1)}
        again = field.json("resume", run_id, "--workers", "1")
        assert (again.code, again.data["reason"]) == (3, "uncertain_effect")
        assert (server.count, peer.counts()["tools/call"]) == (1, 1)
    field.check_clean_end(drained=[coordinator], uncertain=True)
