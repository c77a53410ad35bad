"""Field report 2: «database is locked» although a long busy timeout is set."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import agentctl.store
import pytest
from support.field import Field, Result, bound, seconds
from support.field_models import ask_fan, models
from support.model_server import model_server

TASKS = 400


@pytest.mark.timeout(900)
def test_a_stranger_that_locks_back_to_back_costs_time_only(field: Field) -> None:
    """400 TICK-I(0.05) on 8 workers while a stranger holds the write lock, and somebody asks for the status."""
    pool = field.pool(8)
    file = field.workflow("locked", [field.tick_fan("t", TASKS, seconds(0.05), idempotent=True)])
    locker = field.locker(seconds(0.2), seconds(4), seconds(60), seed=2)
    run_id = field.submit(file)
    waiting = field.start("wait", run_id, "--output", "json")
    answers: list[Result] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.5):
            answers.append(field.json("status", run_id))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        outcome = waiting.wait(300)
        held = int(locker.wait(120).out)
    finally:
        over.set()
        thread.join()
    assert held >= 3
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded"), outcome.err
    assert sorted(field.labels()) == sorted(f"t-{number}" for number in range(TASKS))
    assert set(field.tasks(run_id).values()) == {("succeeded", 1, 1)}
    assert answers, "nobody could ask while the stranger held the lock"
    assert {answer.code for answer in answers} == {0}
    # Starting the program is part of it: on a machine that also runs eight workers that is most of the time.
    assert sorted(answer.seconds for answer in answers)[len(answers) // 2] < bound(1)
    assert max(answer.seconds for answer in answers) < bound(3)
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
def test_a_lock_that_is_there_before_the_program(field: Field) -> None:
    """Whoever meets the lock first (submit, run, a new pool, cancel) waits for it, too."""
    file = field.workflow("locked", [field.tick_task("t", idempotent=True)])
    field.submit(file)
    locker = field.locker(seconds(4, 0.6), seconds(4, 0.6), seconds(20, 4), seed=3)
    run = field.start("run", file, "--output", "json")
    submitted = field.start("submit", file, "--output", "json")
    pool = field.start("workers", "start", "-n", "2")
    assert run.wait(120).code == 0
    run_id = submitted.wait().data["runId"]
    assert field.json("wait", run_id, limit=120).code == 0
    assert field.json("cancel", run_id).code == 0
    locker.wait()
    field.stop(pool)
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_answers_and_derived_runs_wait_for_the_lock_too(field: Field) -> None:
    """A model is asked once for each turn whoever holds the lock meanwhile; approve, retry and replay wait for it."""
    failing = {"id": "last", "uses": "action:fail", "needs": ["q"], "with": {"args": ["-c", "exit 7"]}}
    fail = {"kind": "builtin.shell.exec", "command": "sh"}
    with model_server() as server:
        questions = ask_fan("q", 20, outputSchema={"type": "object"})
        file = field.workflow("asked", [questions, failing], actions={"fail": fail}, **models(server.url))
        gate = field.workflow("gate", [field.tick_task("g", idempotent=False)], policy={"processAllowlist": ["tick"]})
        held = field.json("run", gate)
        assert held.data["reason"] == "approval_required"
        [approval] = field.json("approvals", "list").data["approvals"]
        locker = field.locker(seconds(2, 0.3), seconds(4, 0.6), seconds(40, 6), seed=4)
        approving = field.start("approvals", "approve", approval["approvalId"], "--output", "json")
        failed = field.json("run", file, "--workers", "4", limit=120)
        assert (failed.code, failed.data["error"]["taskId"]) == (4, "last"), failed.err
        assert server.count == 20
        assert approving.wait().code == 0
        source = failed.data["runId"]
        retried = field.json("retry", file, source, "--failed", limit=120)
        assert (retried.code, server.count) == (4, 20), retried.err
        replayed = field.json("replay", source, limit=120)
        assert replayed.code in (0, 4), replayed.err
        assert field.json("resume", held.data["runId"], limit=120).code == 0
        assert server.count == 20
        assert int(locker.wait(120).out) >= 3
    assert field.scalar("SELECT MAX(attempt) FROM effects WHERE task_id LIKE 'q--%'") == 1
    assert field.scalar("SELECT MAX(delivery) FROM attempts WHERE task_id LIKE 'q--%'") == 1
    field.check_clean_end()


def test_no_transaction_is_upgraded_from_reading_to_writing() -> None:
    """Every writing transaction begins as immediate: the only other BEGIN is that of the reading ones."""
    found = []
    for path in sorted(Path(agentctl.store.__path__[0]).rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for begin in re.findall(r"""["']\s*(BEGIN\b[^"']*)["']""", line):
                found.append((path.name, number, begin))
    assert {name for name, _, begin in found if begin != "BEGIN IMMEDIATE"} <= {"database.py"}, found
    deferred = [begin for _, _, begin in found if begin != "BEGIN IMMEDIATE"]
    assert len(deferred) <= 1, found
    assert len(found) > len(deferred)
