"""Report 17: a client's timeout is retried while the work still goes on. Without its model server.

https://github.com/llm-exe/llm-exe/pull/797 · https://github.com/GCWing/OpenBitFun/issues/2677 ·
https://github.com/matthiasn/lotti/pull/4338
"""

from __future__ import annotations

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import time_limit

RETRY = {"maxAttempts": 3, "backoffMs": 10}


@pytest.mark.parametrize("status", ["applied", "not-applied"])
def test_what_ran_out_of_time_is_not_sent_again(field: Field, status: str) -> None:
    task = field.tick_task("a", 60, idempotent=False, timeoutSeconds=time_limit(), retry=RETRY)
    result = field.json("run", field.workflow("slow", [task]))
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect")
    assert len(field.lines()) == 1
    effect = field.scalar("SELECT effect_id FROM effects")
    field.text("result.json", "{}")
    options = ("--result-file", "result.json") if status == "applied" else ()
    field.tool("tick", '#!/bin/sh\necho "$AGENTCTL_EFFECT_ID $2 0" >> "$1"\n')
    said = field.json("effects", "reconcile", effect, "--status", status, "--reason", "looked", *options)
    assert said.code == 0, said.err
    assert field.json("resume", result.data["runId"]).code == 0
    assert len(field.lines()) == (1 if status == "applied" else 2)
    field.check_clean_end(uncertain=True)


def test_a_timeout_of_what_may_be_repeated_follows_the_retry_policy(field: Field) -> None:
    task = field.tick_task("a", 60, idempotent=True, timeoutSeconds=time_limit(), retry=RETRY)
    result = field.json("run", field.workflow("slow", [task]))
    assert (result.code, result.data["error"]["code"]) == (4, "process_timeout")
    assert len(field.lines()) == 3
    field.check_clean_end()


@pytest.mark.parametrize(("script", "expected"), [("exit 7", 3), ("printf no", 1)])
def test_only_what_may_be_tried_again_is(field: Field, script: str, expected: int) -> None:
    """A non-zero exit is tried again as the task declares; output that is no JSON is the same the next time."""
    action = {"kind": "builtin.shell.exec", "command": "sh", "parse": "json", "idempotency": "at_most_once"}
    script = f'echo "$AGENTCTL_EFFECT_ID a 0" >> "$0"; {script}'
    task = {"id": "a", "uses": "action:x", "retry": RETRY, "with": {"args": ["-c", script, str(field.ledger)]}}
    result = field.json("run", field.workflow("x", [task], actions={"x": action}))
    assert result.code == 4
    assert len(field.lines()) == expected
    field.check_clean_end()


def test_a_program_that_is_not_there_was_not_sent(field: Field) -> None:
    budgets = {"runtime": {"budgets": {"maxProcessOutputBytes": 4 << 20}}}
    action = {"kind": "builtin.shell.exec", "command": "nothing-here"}
    file = field.workflow(
        "x", [{"id": "a", "uses": "action:x"}], actions={"x": action}, programs=["nothing-here"], **budgets
    )
    result = field.json("run", file)
    assert (result.code, result.data["error"]["code"]) == (4, "command_not_found")
    assert field.rows("SELECT status FROM effects") == [("failed",)]
    assert field.rows("SELECT used, reserved FROM budget_lines") == [(0, 0)]
    field.check_clean_end()


@pytest.mark.parametrize("what", ["file", "program"])
def test_what_is_not_there_yet_is_tried_again(field: Field, what: str) -> None:
    """An I/O error is retried when the task declares it (contract 4.2): what is missing may come."""
    place = field.folder / "tool"
    action: dict[str, object] = {"kind": "builtin.read"}
    given: dict[str, object] = {"path": "tool"}
    if what == "program":
        action, given = {"kind": "builtin.shell.exec", "command": str(place)}, {"args": []}
    task = {"id": "a", "uses": "action:x", "retry": {"maxAttempts": 20, "backoffMs": 2000}, "with": given}
    file = field.workflow("x", [task], actions={"x": action}, programs=["tool"])
    pool = field.pool(1)
    run_id = field.submit(file)
    scheduled = "SELECT COUNT(*) FROM audit_events WHERE payload_json LIKE '%retry_scheduled%'"
    wait_until(lambda: field.scalar(scheduled) > 0, "it is not there the first time")
    # All at once: what somebody still writes cannot be executed.
    field.tool("part", "#!/bin/sh\n").rename(place)
    wait_until(lambda: field.json("status", run_id).data["state"] == "succeeded", "it is there the next time")
    field.check_clean_end(drained=[pool])


def test_what_could_not_be_sent_is_tried_again_and_charged_once(field: Field) -> None:
    """A program that cannot be started for lack of memory or processes: refused twice, then it runs (case d)."""
    budgets = {"budgets": {"maxProcessOutputBytes": 4 << 20}}
    retry = {"maxAttempts": 3, "backoffMs": 300}
    busy = field.tool("busy", '#!/bin/sh\necho "$AGENTCTL_EFFECT_ID a 0" >> "$1"\n')
    action = {"kind": "builtin.shell.exec", "command": str(busy), "idempotency": "at_most_once"}
    task = {"id": "a", "uses": "action:x", "retry": retry, "with": {"args": [str(field.ledger)]}}
    file = field.workflow("x", [task], actions={"x": action}, programs=["busy"], runtime=budgets)
    with open(busy, "ab"):  # a program that somebody writes cannot be executed: ETXTBSY
        started = field.start("run", file, "--output", "json")
        wait_until(lambda: len(field.rows("SELECT 1 FROM effects WHERE status = 'failed'")) == 2, "refused twice")
    result = started.wait()
    assert result.code == 0, result.err
    assert field.labels() == ["a"]
    sent = field.rows("SELECT attempt, status FROM effects ORDER BY attempt")
    assert sent == [(1, "failed"), (2, "failed"), (3, "succeeded")]
    assert field.rows("SELECT used, reserved FROM budget_lines WHERE limit_units IS NOT NULL") == [(0, 0)]
    field.check_clean_end()
