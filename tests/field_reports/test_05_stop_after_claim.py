"""Field report 5: a stop signal between taking a task and starting it."""

from __future__ import annotations

import random
import signal
import time

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import repeats, scale


@pytest.mark.timeout(3600)
def test_a_claim_that_was_not_started_goes_back_when_its_worker_exits(field: Field) -> None:
    """Rounds of one TICK-N(0) and a worker that gets SIGTERM 0 to 80 ms after its claim shows."""
    coordinator = field.coordinator()
    file = field.workflow("one", [field.tick_task("t", idempotent=False)])
    chance = random.Random(5)
    rounds = max(6, round(500 * scale() ** 2))  # each starts processes anew, so fewer of them than elsewhere
    runs = []
    for number in range(rounds):
        run_id = field.submit(file)
        runs.append(run_id)
        wait_until(lambda: bool(field.rows("SELECT 1 FROM attempts WHERE state = 'ready'")), "ready work")
        unit = field.start("workers", "start", "-n", "1", "--name", f"w{number}", "--no-coordinator")
        wait_until(
            lambda run_id=run_id: bool(  # type: ignore[misc]
                field.rows("SELECT 1 FROM attempts WHERE run_id = ? AND delivery > 0", run_id)
            ),
            "the claim",
        )
        time.sleep(chance.uniform(0, 0.08))  # the moment is what is varied
        victims = [worker.pid for worker in field.workers()]
        field.stop(unit)
        assert victims == [] or not field.workers()
        assert field.rows("SELECT 1 FROM attempts WHERE state = 'claimed'") == []
    pool = field.pool(1, "--no-coordinator", name="last")
    for run_id in runs:
        assert field.json("wait", run_id).code in (0, 3)
    uncertain = field.scalar("SELECT COUNT(*) FROM effects WHERE status = 'uncertain'")
    effects = [line.effect for line in field.lines()]
    assert len(effects) == len(set(effects))
    assert rounds - uncertain <= len(effects) <= rounds
    # Draining lets a started command end, so nothing has to be uncertain here.
    assert uncertain == 0
    assert {attempt for run_id in runs for _, attempt, _ in field.tasks(run_id).values()} == {1}
    field.check_clean_end(drained=[pool, coordinator])


@pytest.mark.timeout(300)
def test_a_stop_right_after_the_start_of_the_pool(field: Field) -> None:
    """SIGTERM at any moment of the start: the pool ends, and nothing of it is left."""
    field.submit(field.workflow("one", [field.tick_fan("t", 50, 0.05, idempotent=False)]))
    for number in range(repeats(60, at_least=6)):
        pool = field.start("workers", "start", "-n", "2")
        time.sleep(0.4 + 0.05 * number % 1.2)  # the moment is what is varied
        pool.signal(signal.SIGTERM)
        assert pool.wait(40).code in (0, -signal.SIGTERM)
        wait_until(lambda: field.processes() == [], "no process of the pool is left", seconds=10)
    assert len({line.effect for line in field.lines()}) == len(field.lines())
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_a_drained_pool_leaves_no_result_uncommitted(field: Field) -> None:
    """The coordinator of a pool goes after its workers: what they finished is in the tables when the pool has ended."""
    run_id = field.submit(field.workflow("many", [field.tick_fan("t", 400, 0.02, idempotent=False)]))
    ended = "SELECT COUNT(*) FROM tasks WHERE run_id = ? AND state = 'succeeded'"
    for _ in range(repeats(20, at_least=4)):
        before = field.scalar(ended, run_id)
        pool = field.pool(4)
        wait_until(lambda before=before: field.scalar(ended, run_id) > before, "progress")  # type: ignore[misc]
        pool.signal(signal.SIGTERM)
        assert pool.wait(40).code == 0
        assert field.rows("SELECT state FROM attempts WHERE state IN ('claimed', 'finished')") == []
        assert field.rows("SELECT task_id FROM tasks WHERE state = 'running'") == []
        assert field.scalar(ended, run_id) >= len(field.lines())  # the fan-out itself may be one more
    field.check_clean_end()
