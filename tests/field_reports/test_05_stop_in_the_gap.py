"""Report 5: a stop signal between taking a task and starting it.

https://github.com/rq/rq/issues/2236 · https://github.com/celery/celery/pull/7339 ·
https://github.com/procrastinate-org/procrastinate/issues/307
"""

from __future__ import annotations

import random
import signal
import time

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import repeats

WORKERS = 5


@pytest.mark.slow
def test_no_task_is_lost_between_claim_and_start(field: Field) -> None:
    """Rounds of five tasks and five workers, 500 tasks at full scale; the signal comes 0 to 80 ms after a claim."""
    chance = random.Random(5)
    driver = field.coordinator()
    for round_ in range(repeats(100, at_least=3)):
        field.ledger.unlink(missing_ok=True)
        file = field.workflow("gap", [field.tick_fan("t", WORKERS, idempotent=False)])
        run_id = field.submit(file)
        pool = field.start("workers", "start", "-n", str(WORKERS), "--no-coordinator", "--name", f"r{round_}")
        claimed = "SELECT 1 FROM attempts WHERE run_id = ? AND delivery > 0 LIMIT 1"
        wait_until(lambda: bool(field.rows(claimed, run_id)), "a claim")  # noqa: B023
        time.sleep(chance.uniform(0, 0.08))
        pool.signal(signal.SIGTERM)
        assert pool.wait().code == 0
        # Given back when the worker exits, not after the lease.
        assert field.rows("SELECT task_id FROM attempts WHERE state = 'claimed'") == []
        fresh = field.start("workers", "start", "-n", "1", "--no-coordinator", "--name", f"f{round_}")
        assert field.json("wait", run_id).code in (0, 3)
        unclear = field.json("status", run_id).data["uncertainEffectCount"]
        assert len(set(field.labels())) == len(field.labels()), "executed twice"
        assert len(field.labels()) + unclear >= WORKERS
        field.stop(fresh)
    field.check_clean_end(drained=[driver])
