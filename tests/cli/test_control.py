"""Approvals, reconciliation, budgets, pause, deadlines: what a person and the real program do together."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, bound, sh
from support.scale import repeats, time_limit

GATED = {"policy": {"processAllowlist": ["tick", "sh"], "writableRoots": ["out"]}}


def pending(field: Field, run_id: str) -> list[str]:
    found = field.json("approvals", "list", run_id).data["approvals"]
    return [item["approvalId"] for item in found]


# -- approvals ---------------------------------------------------------------------------------------------------


def test_a_run_pauses_for_an_approval_and_goes_on_after_it(field: Field) -> None:
    file = field.workflow("gate", [field.tick_task("a", idempotent=False)], **GATED)
    result = field.json("run", file)
    assert (result.code, result.data["state"], result.data["reason"]) == (3, "paused", "approval_required")
    run_id = result.data["runId"]
    [approval] = field.json("approvals", "list").data["approvals"]
    assert approval["taskId"] == "a"
    assert approval["capability"] == "process.exec"
    status = field.json("status", run_id).data
    assert [item["why"] for item in status["waiting"]] == ["approval"]
    assert status["pendingApprovals"] == [approval]
    assert field.labels() == []
    assert field.workers() == [], "nobody waits for a person"
    resolution = field.json("approvals", "approve", approval["approvalId"][:14], "--actor", "ann", "--reason", "ok")
    assert resolution.data["status"] == "approved"
    again = field.json("approvals", "reject", approval["approvalId"])
    assert (again.code, again.error["code"]) == (5, "conflict")
    assert "ann" in again.error["message"]
    assert field.json("resume", run_id).code == 0
    assert field.labels() == ["a"]
    [decided] = field.json("approvals", "list", run_id, "--all").data["approvals"]
    assert (decided["status"], decided["resolvedBy"], decided["resolutionReason"]) == ("approved", "ann", "ok")
    field.check_clean_end()


def test_who_is_asked_about_a_write_can_read_its_diff(cli: Any) -> None:
    """Line by line, whole up to a bound that is told, and so that no line of the file passes for an approval."""
    content = "one\\napproval-0000000000000000 approved\\n\\x1b[2Jtwo\\n" + "more\\n" * 200
    cli.write(
        "flow.yaml",
        "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: gate}\nspec:\n"
        "  policy: {approval: mutations, writableRoots: [out]}\n  actions: {save: {kind: builtin.write}}\n"
        f'  tasks: [{{id: t, uses: action:save, with: {{path: out/a, content: "{content}"}}}}]\n',
    )
    assert cli("run", "flow.yaml").code == 3
    lines = cli("approvals", "list").out.splitlines()
    start = lines.index("    +++ b/out/a")
    shown = ["    +one", "    +approval-0000000000000000 approved", "    +\\x1b[2Jtwo", "    +more"]
    assert lines[start + 2 : start + 6] == shown
    assert lines[-1] == "    … and 106 more lines; --output json has all"
    assert sum(line.startswith("approval-") for line in lines) == 1


def test_one_answer_lets_one_task_go_on_while_others_wait(field: Field) -> None:
    tasks = [field.tick_task(name, idempotent=False) for name in ("a", "b")]
    file = field.workflow("gate", tasks, **GATED)
    pool = field.pool(2)
    run_id = field.submit(file)
    wait_until(lambda: len(pending(field, run_id)) == 2, "two questions")
    wait_until(lambda: field.json("status", run_id).data["state"] == "paused", "the run pauses")
    by_task = {item["taskId"]: item["approvalId"] for item in field.json("approvals", "list").data["approvals"]}
    assert field.json("approvals", "approve", by_task["b"]).code == 0
    wait_until(lambda: field.labels() == ["b"], "a live coordinator goes on by itself")
    assert field.json("approvals", "reject", by_task["a"], "--reason", "no").code == 0
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["state"]) == (4, "failed")
    assert outcome.data["error"]["code"] == "approval_rejected"
    assert field.labels() == ["b"]
    field.check_clean_end(drained=[pool])


@pytest.mark.parametrize("mode", ["deny_approval", "fail"])
def test_where_nobody_can_be_asked_it_is_denied(field: Field, mode: str) -> None:
    policy = {**GATED["policy"], "nonInteractive": mode}
    file = field.workflow("gate", [field.tick_task("a", idempotent=False)], policy=policy)
    result = field.json("run", file)
    assert (result.code, result.data["error"]["code"]) == (4, "policy_denied")
    assert field.labels() == []
    assert field.json("run", file, "--interactive").code == 3, "there is no terminal"
    run_id = result.data["runId"]
    for verb in (("fork", run_id), ("retry", file, run_id, "--failed"), ("repair", file, run_id, "--from", "a")):
        assert (refused := field.json(*verb, "--interactive")).code == 3
        assert "terminal" in refused.error["message"]
        assert field.json(*verb, "--interactive", "--plan").code == 0
    assert len(field.json("runs", "list").data["runs"]) == 1


def test_a_run_that_waits_for_an_approval_can_be_cancelled(field: Field) -> None:
    file = field.workflow("gate", [field.tick_task("a", idempotent=False)], **GATED)
    run_id = field.json("run", file).data["runId"]
    assert field.json("cancel", run_id).data == {"runId": run_id, "requested": True, "state": "cancelled"}
    assert field.scalar("SELECT status FROM approvals") == "cancelled"
    assert field.json("cancel", run_id).data["requested"] is False
    field.check_clean_end()


def test_answers_do_not_pass_the_limit_of_places(field: Field) -> None:
    """`maxConcurrency` 1 holds for tasks that were approved together, too."""
    count = 4
    tasks = [field.tick_fan("a", count, 0.2, idempotent=False)]
    file = field.workflow("gate", tasks, concurrency=1, **GATED)
    pool = field.pool(4)
    run_id = field.submit(file)
    wait_until(lambda: len(pending(field, run_id)) == count, "all questions: nobody holds a place while it waits")
    for approval in pending(field, run_id):
        assert field.json("approvals", "approve", approval).code == 0
    assert field.json("wait", run_id).code == 0
    times = [line.time for line in field.lines()]
    assert len(times) == count
    assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(times)), times
    field.check_clean_end(drained=[pool])


def test_several_items_of_a_fan_out_are_answered_together(field: Field) -> None:
    """Each item asks for itself; one command answers for those that it names, all of them or none."""
    file = field.workflow("gate", [field.tick_fan("a", 4, idempotent=False, failure="continue")], **GATED)
    run_id = field.json("run", file).data["runId"]
    one, two, three, four = pending(field, run_id)
    result = field.json("approvals", "approve", two, one, two, "--actor", "ann", "--reason", "looked at both")
    assert (result.code, json.loads(result.out)["kind"]) == (0, "ApprovalResolutions")
    assert result.data["resolutions"] == [
        {"approvalId": name, "status": "approved", "runId": run_id} for name in (two, one)
    ]
    assert len(json.loads(result.out)["diagnostics"]) == 1, "that nobody drives the run is told once"
    assert pending(field, run_id) == [three, four]
    assert field.json("resume", run_id).code == 3
    assert len(field.lines()) == 2
    decided = field.rows("SELECT resolved_by, resolution_reason FROM approvals WHERE status = 'approved'")
    assert decided == [("ann", "looked at both")] * 2
    refused = field.json("approvals", "reject", three, one)
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert "ann" in refused.error["message"] and "none of the 2" in refused.error["message"]
    assert field.json("approvals", "reject", three, "approval-of-nobody").code == 5
    assert pending(field, run_id) == [three, four], "the answer to an earlier one is not kept when a later one fails"
    assert field.json("approvals", "reject", three, four).code == 0
    assert field.json("resume", run_id).code == 4
    assert len(field.lines()) == 2
    field.check_clean_end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_shells_that_answer_at_one_instant_make_one_decision(field: Field) -> None:
    """One approves and one rejects; whoever comes second is told who was first, and exit 5."""
    rounds = repeats(50, at_least=5)
    file = field.workflow("gate", [field.tick_fan("a", rounds, idempotent=False, failure="continue")], **GATED)
    run_id = field.json("run", file).data["runId"]
    questions = pending(field, run_id)
    assert len(questions) == rounds
    first: Counter[str] = Counter()
    for number, approval in enumerate(questions):
        order = ("approve", "reject") if number % 2 else ("reject", "approve")
        shells = {
            verb: field.start("approvals", verb, approval, "--actor", f"{verb}r", "--output", "json") for verb in order
        }
        results = {verb: shell.wait() for verb, shell in shells.items()}
        [winner] = [verb for verb, result in results.items() if result.code == 0]
        [loser] = [verb for verb in order if verb != winner]
        word = {"approve": "approved", "reject": "rejected"}[winner]
        assert results[winner].data == {"approvalId": approval, "status": word, "runId": run_id}
        assert results[loser].code == 5
        assert (results[loser].error["code"], results[loser].error["runId"]) == ("conflict", run_id)
        assert f"{word} by {winner}r" in results[loser].error["message"]
        decided = field.rows("SELECT status, resolved_by FROM approvals WHERE approval_id = ?", approval)
        assert decided == [(word, f"{winner}r")]
        events = field.rows(
            "SELECT event_type FROM audit_events WHERE event_type LIKE 'approval.%' "
            "AND json_extract(payload_json, '$.approvalId') = ? ORDER BY sequence",
            approval,
        )
        assert events == [("approval.requested",), (f"approval.{word}",)]
        first[winner] += 1
    print(f"decided first: {dict(first)}")  # noqa: T201
    assert field.json("resume", run_id).code == (4 if first["reject"] else 0)
    assert len(field.lines()) == first["approve"]
    field.check_clean_end()


# -- reconciliation ----------------------------------------------------------------------------------------------


def uncertain(field: Field, **more: Any) -> tuple[str, str]:
    """A run with an effect that ran out of time: (run, effect)."""
    task = field.tick_task("a", 60, idempotent=False, timeoutSeconds=time_limit())
    after = {"id": "b", "uses": "action:say", "needs": ["a"], "with": {"got": "${{ tasks.a.output }}"}}
    say = {"say": {"kind": "builtin.assign"}}
    file = field.workflow("unclear", [task, after], actions=say, outputs={"b": "${{ tasks.b.output.output }}"}, **more)
    result = field.json("run", file)
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect")
    [effect] = field.json("effects", "list", "--uncertain").data["effects"]
    return result.data["runId"], effect["request"]["id"]


def said(field: Field, effect: str, *options: str) -> Any:
    return field.json("effects", "reconcile", effect, "--actor", "ann", "--reason", "looked", *options)


def test_an_applied_effect_gives_its_result_to_the_same_attempt(field: Field) -> None:
    run_id, effect = uncertain(field)
    field.text("result.json", '{"exitCode": 0, "stdout": "by hand"}')
    field.text("schema.json", '{"type": "object", "required": ["exitCode"]}')
    field.text("bad.json", '{"stdout": 1}')
    refused = said(
        field, effect, "--status", "applied", "--result-file", "bad.json", "--result-schema-file", "schema.json"
    )
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert said(field, effect, "--status", "applied").code == 2
    result = said(
        field, effect[:10], "--status", "applied", "--result-file", "result.json", "--result-schema-file", "schema.json"
    )
    assert result.code == 0, result.err
    assert result.data["evidence"] == {"kind": "operator_statement", "statement": "looked"}
    assert result.data["authorization"]["kind"] == "policy_allow"
    assert field.json("effects", "list", "--uncertain").data["effects"] == []
    assert "==> a, attempt 1: uncertain, reconciled as applied <==" in field("logs", run_id).out
    [entry] = field.json("logs", run_id).data["attempts"]
    assert (entry["status"], entry["reconciliation"]) == ("uncertain", "applied")
    outcome = field.json("resume", run_id)
    assert (outcome.code, outcome.data["output"]) == (0, {"b": {"got": {"exitCode": 0, "stdout": "by hand"}}})
    assert field.labels() == ["a"], "it was not sent again"
    assert field.tasks(run_id)["a"] == ("succeeded", 1, 1)
    inspection = field.json("effects", "inspect", effect).data
    assert inspection["effect"]["status"] == "uncertain", "its own row never changes"
    assert inspection["effectiveReconciliation"]["status"] == "applied"
    again = said(field, effect, "--status", "not-applied")
    assert (again.code, again.error["code"]) == (5, "conflict")
    assert field.scalar("SELECT actor FROM audit_events WHERE event_type = 'effect.reconciled'") == "ann"


def test_a_second_result_corrects_the_first_one(field: Field) -> None:
    """As long as nobody has gone on with it."""
    run_id, effect = uncertain(field)
    for name, code in (("wrong", 99), ("right", 0)):
        field.text(f"{name}.json", f'{{"exitCode": {code}}}')
        assert said(field, effect, "--status", "applied", "--result-file", f"{name}.json").code == 0
    outcome = field.json("resume", run_id)
    assert (outcome.code, outcome.data["output"]) == (0, {"b": {"got": {"exitCode": 0}}})
    found = {task["taskId"]: task for task in field.json("inspect", run_id).data["tasks"]}
    assert found["a"]["output"] == {"exitCode": 0}
    assert field.json("effects", "inspect", effect).data["effectiveReconciliation"]["result"] == {"exitCode": 0}
    assert field.labels() == ["a"]
    # Now the task has its output for good.
    assert said(field, effect, "--status", "applied", "--result-file", "wrong.json").code == 0
    assert field.json("inspect", run_id).data["run"]["output"] == {"b": {"got": {"exitCode": 0}}}
    field.assert_sound()


COUNT = {"type": "object", "required": ["count"], "properties": {"count": {"type": "integer"}}}
EXTENSION = f"""\
#!{sys.executable}
import json, sys, time
said = {{"protocolVersion": "agentctl.dev/process-extension/v1", "name": "e", "inputSchema": {{"type": "object"}},
        "outputSchema": json.loads({json.dumps(json.dumps(COUNT))}), "capabilities": ["x"]}}
if "--agentctl-handshake" in sys.argv:
    print(json.dumps(said))
else:
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["command", "extension"])
def test_a_result_that_the_task_could_not_have_is_refused(field: Field, kind: str) -> None:
    """Others go on with it, and it cannot be taken back: it has to fit what the task or its action declares."""
    task: dict[str, Any] = {"id": "a", "uses": "action:do", "timeoutSeconds": 3}
    if kind == "command":
        task["outputSchema"] = COUNT
        action = sh("sleep 60")
    else:
        action = {
            "kind": "extension.process",
            "command": str(field.tool("counts", EXTENSION)),
            "protocolVersion": "agentctl.dev/process-extension/v1",
            "inputSchema": {"type": "object"},
            "outputSchema": COUNT,
            "capabilities": ["x"],
            "idempotency": "at_most_once",
        }
    result = field.json("run", field.workflow("unclear", [task], actions={"do": action}, programs=["counts"]))
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect"), result.out
    [effect] = [item["request"]["id"] for item in field.json("effects", "list", "--uncertain").data["effects"]]
    before = field.rows("SELECT * FROM audit_events")
    for text in ('{"nonsense": true}', '{"count": "7"}'):
        field.text("result.json", text)
        refused = said(field, effect, "--status", "applied", "--result-file", "result.json")
        assert (refused.code, refused.error["code"]) == (2, "usage"), text
        assert "outputSchema" in refused.error["message"]
    assert field.rows("SELECT * FROM audit_events") == before
    assert field.rows("SELECT * FROM effect_reconciliations") == []
    field.text("result.json", '{"count": 7, "exitCode": 0}')
    assert said(field, effect, "--status", "applied", "--result-file", "result.json").code == 0
    outcome = field.json("resume", result.data["runId"])
    assert (outcome.code, outcome.data["output"]) == (0, {"a": {"count": 7, "exitCode": 0}})
    field.assert_sound()


def test_an_effect_that_was_not_applied_gets_a_fresh_attempt(field: Field) -> None:
    run_id, effect = uncertain(field)
    field.tool("tick", "#!/bin/sh\necho x x 1 >> $1\n")
    assert said(field, effect, "--status", "not-applied").code == 0
    outcome = field.json("resume", run_id)
    assert outcome.code == 0, outcome.out
    assert len(field.lines()) == 2
    assert field.tasks(run_id)["a"] == ("succeeded", 2, 1), "beyond retry.maxAttempts"
    ids = [row[0] for row in field.rows("SELECT effect_id FROM effects WHERE task_id = 'a'")]
    assert len(set(ids)) == 2


def test_the_policy_of_the_run_decides_who_may_reconcile(field: Field) -> None:
    policy = {**GATED["policy"]}
    task = field.tick_task("a", 60, idempotent=False, timeoutSeconds=time_limit())
    file = field.workflow("unclear", [task], policy=policy)
    run_id = field.json("run", file).data["runId"]
    field.json("approvals", "approve", pending(field, run_id)[0])
    assert field.json("resume", run_id).data["reason"] == "uncertain_effect"
    effect = field.scalar("SELECT effect_id FROM effects")
    refused = said(field, effect, "--status", "not-applied")
    assert (refused.code, refused.error["code"]) == (3, "blocked")
    field.text("proof.json", '{"ticket": 7}')
    allowed = said(field, effect, "--status", "not-applied", "--approved", "--evidence-file", "proof.json")
    assert allowed.data["authorization"] == {"kind": "explicit_operator_approval", "actor": "ann", "reason": "looked"}
    assert allowed.data["evidence"] == {"ticket": 7}
    # A fresh attempt is a fresh action: it asks again.
    assert field.json("resume", run_id).data["reason"] == "approval_required"
    assert len(field.lines()) == 1


@pytest.mark.parametrize(
    ("lists", "allowed"),
    [
        ({"toolsAllow": ["process.exec"]}, True),
        ({"toolsDeny": ["filesystem.write"]}, True),
        ({"toolsDeny": ["builtin.shell.exec"]}, False),
    ],
    ids=["allowed", "another denied", "denied"],
)
def test_what_was_allowed_by_its_policy_name_can_be_reconciled(
    field: Field, lists: dict[str, list[str]], allowed: bool
) -> None:
    """`toolsAllow` names `process.exec`, not the operation; a denial of the operation cannot be overridden."""
    _, effect = uncertain(field, policy={"approval": "never", "processAllowlist": ["tick"], **lists})
    answer = said(field, effect, "--status", "not-applied", "--approved")
    if allowed:
        assert answer.code == 0, answer.err
    else:
        assert (answer.code, answer.error["code"]) == (3, "blocked")


def test_an_entry_of_memory_is_reconciled_under_the_name_that_has_allowed_it(field: Field) -> None:
    put = {"put": {"kind": "builtin.long_term_memory.write"}}
    tasks = [
        {"id": "do", "uses": "action:put", "with": {"key": "k", "value": 1}},
        {"id": "undo", "uses": "action:put", "needs": ["do"], "with": {"key": "k", "value": 0}},
    ]
    policy = {"approval": "never", "toolsAllow": ["memory.write"]}
    assert field.json("run", field.workflow("entry", tasks, actions=put, policy=policy)).code == 0
    effects = dict(field.rows("SELECT task_id, effect_id FROM effects"))
    answer = said(field, effects["do"], "--status", "compensated", "--compensation-effect", effects["undo"])
    assert answer.code == 0, answer.err


def test_what_is_in_flight_or_confirmed_cannot_be_called_unclear(field: Field) -> None:
    file = field.workflow("slow", [field.tick_task("a", field.may_end, idempotent=False)])
    pool = field.pool(1)
    run_id = field.submit(file)
    field.busy(run_id)
    effect = field.scalar("SELECT effect_id FROM effects")
    refused = said(field, effect, "--status", "not-applied")
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert "in flight" in refused.error["message"]
    field.may_end.touch()
    assert field.json("wait", run_id).code == 0
    assert "succeeded" in said(field, effect, "--status", "not-applied").error["message"]
    assert said(field, effect, "--status", "compensated", "--compensation-effect", effect).code == 5
    field.check_clean_end(drained=[pool])


def test_an_effect_that_hangs_in_a_worker_without_a_supervisor(field: Field) -> None:
    """Nobody would end that worker any more: the remedy names it, and works."""
    pool = field.pool(1)
    run_id = field.submit(field.workflow("slow", [field.tick_task("a", 60, idempotent=False)]))
    field.busy(run_id)
    pids = dict(field.rows("SELECT kind, pid FROM processes"))
    os.kill(pids["coordinator"], signal.SIGSTOP)
    pool.signal(signal.SIGKILL)
    pool.wait(20)
    os.kill(pids["coordinator"], signal.SIGKILL)
    effect = field.scalar("SELECT effect_id FROM effects")
    refused = said(field, effect, "--status", "not-applied")
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert f"worker p (pid {pids['worker']}) holds it" in refused.error["message"]
    assert f"kill -9 {pids['worker']}" in refused.error["remedy"]
    os.kill(pids["worker"], signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pids['worker']}"), "it is gone", seconds=20)
    assert said(field, effect, "--status", "not-applied").code == 0
    assert field("cancel", run_id).code == 0


def test_a_driver_that_was_stopped_is_not_just_alive(field: Field) -> None:
    """Ctrl-Z in the shell of a foreground run: whoever looks why nothing goes on has to be told."""
    started = field.start("run", field.workflow("slow", [field.tick_task("a", field.may_end, idempotent=True)]))
    wait_until(lambda: field.labels() == ["a"], "it works")
    alive = field.json("status", "@latest").data
    assert (alive["driver"]["liveness"], alive["driver"]["stopped"]) == ("alive", False)
    assert "Ctrl-Z" not in field("status", "@latest").out + field("runs", "list").out + field("doctor").out
    started.signal(signal.SIGSTOP)
    wait_until(lambda: field.json("status", "@latest").data["driver"]["stopped"], "the driver is stopped")
    again = f"kill -CONT {started.pid}"
    assert again in field("status", "@latest").out
    assert "driver is stopped" in field("runs", "list").out
    [check] = [item for item in field.json("doctor").data["checks"] if item["id"] == "processes"]
    assert (check["status"], again in check["remedy"]) == ("warn", True)
    waited = field("wait", "@latest", "--timeout-seconds", "0")
    assert (waited.code, again in waited.err) == (4, True)
    field.may_end.touch()
    started.signal(signal.SIGCONT)
    assert started.wait().code == 0
    assert "Ctrl-Z" not in field("status", "@latest").out + field("doctor").out
    field.check_clean_end()


# -- budgets -----------------------------------------------------------------------------------------------------


def printing(field: Field, count: int, limit: int, budget: int, text: str = "x", **spec: Any) -> str:
    """`count` tasks that may print `limit` bytes each and print one; the run may print `budget`."""
    each = {
        "id": "p",
        "uses": "action:print",
        "foreach": {"items": list(range(count)), "maxItems": max(count, 1)},
        "with": {"args": ["-c", f'printf {text}; echo "$AGENTCTL_EFFECT_ID p 0" >> "$0"', str(field.ledger)]},
        "failure": "continue",
    }
    action = {"kind": "builtin.shell.exec", "command": "sh", "combinedOutputLimitBytes": limit}
    runtime = {"maxConcurrency": 8, "budgets": {"maxProcessOutputBytes": budget}}
    return field.workflow("print", [each], actions={"print": action}, runtime=runtime, **spec)


def test_units_that_others_hold_are_waited_for(field: Field) -> None:
    """Twenty tasks that reserve 10 and use 1: all of them fit one after the other into 30."""
    result = field.json("run", printing(field, 20, 10, 30), "--workers", "4")
    assert result.code == 0, result.out
    budget = field.json("inspect", result.data["runId"]).data["budget"]
    assert budget["limits"] == {"processOutputBytes": 30}
    assert (budget["usage"]["processOutputBytes"], budget["reserved"]["processOutputBytes"]) == (20, 0)
    assert budget["exceeded"] is None
    assert len(field.lines()) == 20
    field.check_clean_end()


def test_what_can_never_fit_is_denied_and_stops_the_run(field: Field) -> None:
    result = field.json("run", printing(field, 100, 1, 10), "--workers", "4")
    assert (result.code, result.data["state"], result.data["reason"]) == (4, "failed", "budget_exceeded")
    assert len(field.lines()) == 10
    data = field.json("inspect", result.data["runId"]).data
    assert data["budget"]["exceeded"] == {"dimension": "processOutputBytes", "limit": 10, "attempted": 11}
    assert data["budget"]["usage"]["processOutputBytes"] == 10
    states = [task["state"] for task in data["tasks"]]
    assert states.count("succeeded") == 10
    assert "running" not in states
    assert "ready" not in states
    denied = [effect for effect in data["effects"] if effect["status"] == "requested"]
    assert denied
    assert all(effect["attemptNumber"] == 0 for effect in denied)
    assert any(event["eventType"] == "budget.exceeded" for event in data["audit"])
    field.check_clean_end()


def test_an_unclear_effect_keeps_its_units_until_it_is_reconciled(field: Field) -> None:
    slow = {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", "sleep 60"], "combinedOutputLimitBytes": 6,
            "timeoutSeconds": 1}  # fmt: skip
    quick = {**slow, "args": ["-c", "printf x"]}
    tasks = [{"id": "a", "uses": "action:slow"}, {"id": "b", "uses": "action:quick"}]
    runtime = {"maxConcurrency": 1, "budgets": {"maxProcessOutputBytes": 10}}
    file = field.workflow("held", tasks, actions={"slow": slow, "quick": quick}, runtime=runtime)
    result = field.json("run", file)
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect")
    run_id = result.data["runId"]
    status = field.json("status", run_id).data
    assert status["budget"]["reserved"]["processOutputBytes"] == 6
    assert {item["taskId"]: item["why"] for item in status["waiting"]}["b"] in ("budget", "paused")
    effect = field.scalar("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    field.text("result.json", "{}")
    assert said(field, effect, "--status", "applied", "--result-file", "result.json").code == 0
    outcome = field.json("resume", run_id)
    # The estimate counts as used: 6, and beside it the 6 of `b` can never fit into 10.
    assert (outcome.code, outcome.data["reason"]) == (4, "budget_exceeded")


def test_units_of_what_did_not_happen_come_back(field: Field) -> None:
    run_id, effect = uncertain(field, runtime={"budgets": {"maxProcessOutputBytes": 3 << 20}})
    field.tool("tick", "#!/bin/sh\nexit 0\n")
    assert said(field, effect, "--status", "not-applied").code == 0
    assert field.json("inspect", run_id).data["budget"]["reserved"]["processOutputBytes"] == 0
    assert field.json("resume", run_id).code == 0
    field.check_clean_end(uncertain=True)


def test_wall_time_counts_from_creation_and_ends_what_runs(field: Field) -> None:
    tasks = [field.tick_task("a", 60, idempotent=False), {"id": "b", "uses": "action:tick-n", "needs": ["a"]}]
    limit = time_limit(3)
    file = field.workflow("late", tasks, runtime={"maxConcurrency": 2, "budgets": {"maxWallTimeSeconds": limit}})
    pool = field.pool(1)  # the start of workers counts, too
    result = field.json("run", file)
    assert (result.code, result.data["reason"]) == (4, "deadline_exceeded")
    assert result.seconds < limit + bound(8)
    data = field.json("inspect", result.data["runId"]).data
    assert {task["taskId"]: task["state"] for task in data["tasks"]} == {"a": "failed", "b": "cancelled"}
    assert [effect["status"] for effect in data["effects"]] == ["uncertain"]
    assert data["budget"]["exceeded"]["dimension"] == "wallTimeSeconds"
    assert field.effect_processes() == {}
    field.check_clean_end(drained=[pool], uncertain=True)


def test_a_paused_run_runs_out_of_time_all_the_same(field: Field) -> None:
    runtime = {"budgets": {"maxWallTimeSeconds": time_limit(2)}}
    file = field.workflow("gate", [field.tick_task("a", idempotent=False)], runtime=runtime, **GATED)
    pool = field.pool(1)
    run_id = field.submit(file)
    wait_until(lambda: field.json("status", run_id).data["state"] == "failed", "it ends without an answer")
    states = "json_extract(payload_json, '$.to')"
    told = field.rows(f"SELECT {states} FROM audit_events WHERE event_type = 'run.state' ORDER BY sequence")  # noqa: S608
    assert told == [("paused",), ("running",), ("failed",)], "it goes on only to end"
    assert field.json("status", run_id).data["reason"] == "deadline_exceeded"
    assert field.labels() == []
    field.check_clean_end(drained=[pool])


# -- pause, timeout, signals -------------------------------------------------------------------------------------


def test_a_paused_run_finishes_what_runs_and_starts_nothing(field: Field) -> None:
    file = field.workflow("many", [field.tick_fan("a", 12, field.may_end, idempotent=False)], concurrency=8)
    pool = field.pool(2)
    run_id = field.submit(file)
    wait_until(lambda: len(field.lines()) == 2, "both workers are at it")
    assert field.json("pause", run_id, "--reason", "lunch").code == 0
    field.may_end.touch()
    wait_until(lambda: field.json("status", run_id).data["state"] == "paused", "the run pauses")
    status = field.json("status", run_id).data
    assert status["reason"] == "paused_by_operator"
    assert status["running"] == []
    assert len(field.lines()) == 2
    assert field.rows("SELECT 1 FROM tasks WHERE state = 'running'") == []
    assert status["taskCounts"]["succeeded"] == 2
    assert field.json("pause", run_id).data["state"] == "paused", "twice"
    other = field.json("run", field.workflow("other", [field.tick_task("x", idempotent=False)]))
    assert other.code == 0, "it holds no worker"
    assert field.json("resume", run_id).code == 0
    assert len(field.lines()) == 13
    assert field.json("pause", run_id).code == 4
    field.check_clean_end(drained=[pool])


def test_resume_takes_back_a_request_to_pause(field: Field) -> None:
    file = field.workflow("many", [field.tick_fan("a", 4, field.may_end, idempotent=False)], concurrency=1)
    pool = field.pool(1)
    run_id = field.submit(file)
    field.busy(run_id)
    assert field.json("pause", run_id).data["state"] == "running", "what runs has to finish first"
    resuming = field.start("resume", run_id)
    withdrawn = "SELECT 1 FROM audit_events WHERE event_type = 'run.pause_withdrawn'"
    wait_until(lambda: field.rows(withdrawn) != [], "the request is taken back")
    field.may_end.touch()
    assert resuming.wait().code == 0
    assert len(field.lines()) == 4
    moves = "SELECT json_extract(payload_json, '$.to') FROM audit_events WHERE event_type = 'run.state'"
    assert field.rows(moves) == [("succeeded",)], "it has never been paused"
    field.check_clean_end(drained=[pool])


def test_pause_works_with_nobody_alive(field: Field) -> None:
    run_id = field.submit(field.workflow("one", [field.tick_task("a", idempotent=False)]))
    assert field.json("pause", run_id).data == {"runId": run_id, "state": "paused", "reason": "paused_by_operator"}
    assert field.json("resume", run_id).code == 0
    assert field.labels() == ["a"]


def test_an_overall_timeout_cancels_the_run(field: Field) -> None:
    file = field.workflow("slow", [field.tick_task("a", 60, idempotent=False)])
    result = field.json("run", file, "--timeout-seconds", "1.5")
    assert (result.code, result.data["state"], result.data["reason"]) == (130, "cancelled", "cancel_requested")
    assert result.seconds < bound(12)
    assert field.effect_processes() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_signals_once_and_again(field: Field, number: int, times: int) -> None:
    file = field.workflow("slow", [field.tick_task("a", 60, idempotent=False)])
    process = field.start("run", file, "--output", "json")
    wait_until(lambda: bool(field.lines()), "it runs")
    for _ in range(times):
        process.signal(number)
        time.sleep(0.02)  # the distance of two signals
    result = process.wait(20)
    assert (result.code, result.data["state"]) == (130, "cancelled")
    assert field.effect_processes() == {}
    assert field.rows("SELECT status FROM effects") == [("uncertain",)]
    field.check_clean_end(uncertain=True)
