"""Field report 1: two processes take the same queued row."""

from __future__ import annotations

import random

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import repeats

TASKS = 1000
WORKERS = 8


@pytest.mark.timeout(3600)
def test_eight_workers_started_apart_execute_each_task_once(field: Field) -> None:
    """1,000 TICK-N(0) for eight single workers in eight shells, in random order, all before the run exists."""
    coordinator = field.coordinator()
    file = field.workflow("fan", [field.tick_fan("t", TASKS, idempotent=False)], concurrency=64)
    order = random.Random(1)
    for _ in range(repeats(20)):
        field.ledger.unlink(missing_ok=True)
        names = [f"w{number}" for number in range(WORKERS)]
        order.shuffle(names)
        pools = [field.start("workers", "start", "-n", "1", "--name", name, "--no-coordinator") for name in names]
        wait_until(lambda: len(field.workers("idle")) == WORKERS, "eight idle workers")
        ours = {worker.process_id for worker in field.workers()}
        run_id = field.submit(file)
        outcome = field.json("wait", run_id, limit=300)
        assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
        labels = field.labels()
        assert len(labels) == TASKS
        assert set(labels) == {f"t-{number}" for number in range(TASKS)}
        assert set(field.tasks(run_id).values()) == {("succeeded", 1, 1)}
        for pool in pools:
            field.stop(pool)
        listed = [w for w in field.json("workers", "list").data["workers"] if w["workerId"] in ours]
        assert len(listed) == WORKERS
        assert {w["state"] for w in listed} == {"stopped"}
        assert sum(w["done"] for w in listed) == TASKS
        assert sum(w["failed"] for w in listed) == 0
        field.check_clean_end()
    field.check_clean_end(drained=[coordinator])


@pytest.mark.timeout(300)
def test_shells_that_submit_one_key_at_one_instant_make_one_run(field: Field) -> None:
    """The key is taken once, whoever comes first; all get the same run, and it is executed once."""
    file = field.workflow("one", [field.tick_task("t", idempotent=False)])
    shells = [field.start("submit", file, "--idempotency-key", "k", "--output", "json") for _ in range(WORKERS)]
    answers = [shell.wait() for shell in shells]
    assert {answer.code for answer in answers} == {0}, [answer.err for answer in answers]
    [run_id] = {answer.data["runId"] for answer in answers}
    assert field.scalar("SELECT COUNT(*) FROM runs") == 1
    resumed = [field.start("resume", run_id, "--workers", "1", "--output", "json") for _ in range(3)]
    ends = [resume.wait() for resume in resumed]
    assert 0 in {end.code for end in ends}
    assert {end.code for end in ends} <= {0, 5}, [end.err for end in ends]
    assert field.labels() == ["t"]
    field.check_clean_end()
