"""Report 18: a crash after an approved action, before its result is stored.

https://github.com/andrewyng/openworker/issues/443 · https://github.com/GEMISIS/leviath/issues/96 ·
https://github.com/microsoft/agent-framework/issues/3938 · https://github.com/quailyquaily/mistermorph/pull/62
"""

from __future__ import annotations

from support.children import wait_until
from support.field import Field, kill

POLICY = {"policy": {"processAllowlist": ["tick", "sh"]}}
DEADLY = '#!/bin/sh\necho "$AGENTCTL_EFFECT_ID $2 0" >> "$1"\nkill -9 $PPID\nsleep 1\n'


def test_an_approved_action_is_not_carried_out_again(field: Field) -> None:
    field.tool("tick", DEADLY)
    file = field.workflow("gate", [field.tick_task("a", idempotent=False)], **POLICY)
    run_id = field.json("run", file).data["runId"]
    [approval] = field.json("approvals", "list", run_id).data["approvals"]
    assert field.json("approvals", "approve", approval["approvalId"]).code == 0
    outcome = field.json("resume", run_id)
    assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
    for _ in range(2):
        assert field.json("resume", run_id).code == 3, "resume refuses to guess"
    assert field.labels() == ["a"]
    assert field.rows("SELECT status FROM approvals") == [("approved",)]
    effect = field.scalar("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    field.text("result.json", '{"exitCode": 0}')
    options = ("--status", "applied", "--reason", "it is in the ledger", "--result-file", "result.json", "--approved")
    assert field.json("effects", "reconcile", effect, *options).code == 0
    assert field.json("resume", run_id).code == 0
    assert field.labels() == ["a"]
    field.check_clean_end(uncertain=True)


def test_a_question_outlives_everybody_who_asked_it(field: Field) -> None:
    """Everything is killed while the approval is pending; then everything starts anew, and somebody answers."""
    before = field.tick_task("before", idempotent=False)
    gate = field.tick_task("gate", idempotent=False, needs=["before"])
    runtime = {"budgets": {"maxWallTimeSeconds": 3600}}
    file = field.workflow("gate", [before, gate], runtime=runtime, **POLICY)
    pool = field.pool(2)
    run_id = field.submit(file)

    def question() -> str | None:
        found = field.rows("SELECT approval_id FROM approvals WHERE run_id = ? AND status = 'pending'", run_id)
        return found[0][0] if found else None

    wait_until(lambda: question() is not None, "the first question")
    first = question()
    assert first is not None
    assert field.json("approvals", "approve", first).code == 0
    wait_until(lambda: question() is not None, "the second question")
    upstream = field.lines()
    assert [line.label for line in upstream] == ["before"]
    deadline = field.json("status", run_id).data["deadlineAt"]
    created = field.scalar("SELECT created_at FROM runs WHERE run_id = ?", run_id)
    assert deadline == created + 3_600_000
    kill(*field.processes())
    pool.popen.wait()
    pool = field.pool(2)
    [approval] = field.json("approvals", "list").data["approvals"]
    assert approval["taskId"] == "gate"
    assert field.json("approvals", "approve", approval["approvalId"]).code == 0
    wait_until(lambda: field.json("status", run_id).data["state"] == "succeeded", "it goes on from the gate")
    assert field.lines()[:1] == upstream
    assert field.labels() == ["before", "gate"]
    assert field.rows("SELECT dispatches FROM effects") == [(1,), (1,)]
    assert field.json("status", run_id).data["deadlineAt"] == deadline
    field.check_clean_end(drained=[pool])
