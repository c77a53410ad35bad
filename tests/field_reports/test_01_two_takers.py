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
