"""Report 18 for agents: the approved call of a tool, and a crash before its result is stored.

https://github.com/andrewyng/openworker/issues/443 · https://github.com/GEMISIS/leviath/issues/96
"""

from __future__ import annotations

import pytest
from support.children import wait_until
from support.field import Field, kill
from support.field_models import action_tool, ask, models
from support.model_server import ModelServer, Play

DEADLY = '#!/bin/sh\necho "$AGENTCTL_EFFECT_ID $2 0" >> "$1"\nkill -9 $PPID\nsleep 1\n'


@pytest.fixture
def server(server: ModelServer) -> ModelServer:
    server.plays(Play(text="", calls=[("c1", "refund", "{}")]), Play(text="done"))
    return server


def document(field: Field, url: str) -> str:
    action = {
        "kind": "builtin.shell.exec", "command": str(field.tick), "idempotency": "at_most_once",
        "with": {"args": [str(field.ledger), "refund", "0"]},
    }  # fmt: skip
    before = field.tick_task("before", idempotent=False)
    task = ask("talk", needs=["before"], retry={"maxAttempts": 3})
    spec = models(url, tools={"refund": action_tool("refund", "at_most_once", approval="always")})
    return field.workflow("refund", [before, task], actions={"refund": action}, **spec)


def test_an_approved_call_is_not_carried_out_again(field: Field, server: ModelServer) -> None:
    file = document(field, server.url)
    paused = field.json("run", file)
    assert (paused.code, paused.data["reason"]) == (3, "approval_required")
    run_id = paused.data["runId"]
    [approval] = field.json("approvals", "list", run_id).data["approvals"]
    assert field.json("approvals", "approve", approval["approvalId"]).code == 0
    field.tool("tick", DEADLY)
    outcome = field.json("resume", run_id)
    assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
    assert field.json("resume", run_id).code == 3, "resume refuses to guess"
    assert field.labels() == ["before", "refund"]
    assert server.count == 1, "the recorded turn was asked for again"
    assert field.rows("SELECT status FROM approvals") == [("approved",)]
    effect = field.scalar("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    field.text("result.json", '{"exitCode": 0}')
    told = ("--status", "applied", "--reason", "it is in the ledger", "--result-file", "result.json", "--approved")
    said = field.json("effects", "reconcile", effect, *told)
    assert said.code == 0, said.err
    done = field.json("resume", run_id)
    assert (done.code, done.data["output"]["talk"]["text"]) == (0, "done"), done.out
    assert field.labels() == ["before", "refund"]
    assert server.count == 2
    assert field.rows("SELECT status FROM approvals") == [("approved",)]
    field.check_clean_end(uncertain=True)


def test_a_question_of_an_agent_outlives_everybody_who_asked_it(field: Field, server: ModelServer) -> None:
    """Everything is killed while the call waits; then everything starts anew, and somebody answers."""
    file = document(field, server.url)
    pool = field.pool(2)
    run_id = field.submit(file)
    wait_until(lambda: bool(field.rows("SELECT 1 FROM approvals WHERE status = 'pending'")), "the question")
    upstream = field.lines()
    kill(*field.processes())
    pool.popen.wait()
    pool = field.pool(2)
    [approval] = field.json("approvals", "list").data["approvals"]
    assert (approval["taskId"], approval["tool"]) == ("talk", "refund")
    assert field.json("approvals", "approve", approval["approvalId"]).code == 0
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["output"]["talk"]["text"]) == (0, "done"), outcome.out
    assert field.lines()[:1] == upstream
    assert field.labels() == ["before", "refund"]
    assert server.count == 2, "the turn before the question is not asked for again"
    assert set(field.rows("SELECT dispatches FROM effects")) == {(1,)}
    field.check_clean_end(drained=[pool])
