"""Report 9: cancel marks the parent, children go on and keep their slots.

https://github.com/PrefectHQ/prefect/issues/7732 · https://github.com/dagster-io/dagster/issues/21476
"""

from __future__ import annotations

import time

import pytest
from support.children import wait_until
from support.field import Field, bound, kill
from support.scale import repeats


@pytest.mark.parametrize("inside", [False, True], ids=["top", "sub-workflow"])
def test_cancel_ends_the_children_and_gives_the_places_to_others(field: Field, inside: bool) -> None:
    """Run A: fifty tasks of 30 s on eight workers with a budget, also in a sub-workflow; run B waits behind it."""
    budget = {"maxProcessOutputBytes": 2 << 27}
    runtime = {"maxConcurrency": 8, "budgets": budget}
    pool = field.pool(8)
    fan = field.tick_fan("a", 50, 30, idempotent=False)
    if inside:
        sub = {"version": "1.0.0", "inputSchema": True, "outputSchema": True, "tasks": [fan]}
        calls = [{"id": "call", "uses": "workflow:sub"}]
        a = field.workflow("a", calls, subworkflows={"sub": sub}, runtime=runtime)
    else:
        a = field.workflow("a", [fan], runtime=runtime)
    waiting = field.start("run", a, "--output", "json")
    wait_until(lambda: len(field.lines()) == 8, "eight run")
    run_id = field.scalar("SELECT run_id FROM runs")
    b = field.submit(field.workflow("b", [field.tick_task("b", idempotent=False)]))
    began = time.monotonic()
    assert field.json("cancel", run_id).code == 0
    assert time.monotonic() - began < bound(2)
    assert waiting.wait().code == 130
    assert time.monotonic() - began < bound(5)
    assert field.json("wait", b).code == 0
    counts = dict(field.rows("SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id))
    assert counts == ({"cancelled": 52, "succeeded": 1} if inside else {"cancelled": 51})
    statuses = dict(field.rows("SELECT status, COUNT(*) FROM effects WHERE run_id = ? GROUP BY 1", run_id))
    assert set(statuses) <= {"uncertain", "cancelled", "succeeded"}
    assert statuses["uncertain"] == 8
    held = "SELECT COUNT(*) FROM budget_reservations WHERE run_id = ? AND state = 'open'"
    assert field.scalar(held, run_id) == 8, "of the uncertain ones only"
    assert field.labels().count("b") == 1
    field.check_clean_end(drained=[pool], uncertain=True)


@pytest.mark.slow
def test_cancel_of_a_wide_fan_out(field: Field) -> None:
    """Five hundred tasks; nothing starts later than 500 ms after `cancel` has answered, and nothing stays behind."""
    pool = field.pool(8)
    file = field.workflow("wide", [field.tick_fan("w", 500, 0.05, idempotent=False)], concurrency=64)
    for _ in range(repeats(20, at_least=1)):
        field.ledger.unlink(missing_ok=True)
        waiting = field.start("run", file, "--output", "json")
        wait_until(lambda: len(field.lines()) > 20, "it is under way")
        run_id = field.scalar("SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1")
        assert field.json("cancel", run_id).code == 0
        answered = time.time()
        result = waiting.wait()
        assert (result.code, result.data["state"]) == (130, "cancelled")
        ended = field.scalar("SELECT ended_at FROM runs WHERE run_id = ?", run_id)
        assert ended / 1000 - answered < bound(2)
        assert max(line.time for line in field.lines()) < answered + bound(0.5)
        assert field.effect_processes() == {}
    field.check_clean_end(drained=[pool], uncertain=True)


def test_cancel_when_everybody_was_killed(field: Field) -> None:
    pool = field.pool(4)
    file = field.workflow("wide", [field.tick_fan("w", 500, 5, idempotent=False)], concurrency=64)
    waiting = field.start("run", file, "--output", "json")
    wait_until(lambda: len(field.lines()) >= 4, "it is under way")
    run_id = field.scalar("SELECT run_id FROM runs")
    mine = field.effect_processes()
    kill(*(pid for pid in field.processes() if pid not in mine))
    pool.popen.wait()
    waiting.popen.wait()
    answer = field.json("cancel", run_id)
    assert answer.data["state"] == "cancelled", answer.out
    assert field.effect_processes() == {}
    assert len(field.lines()) == 4
    assert field.json("cancel", run_id).data == {"runId": run_id, "requested": False, "state": "cancelled"}
    field.check_clean_end(uncertain=True)
