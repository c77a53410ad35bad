"""Report 19 for agents: the coordinator is killed, the workers go on, and what was paid for is not asked for again.

https://github.com/nextflow-io/nextflow/issues/1448 · https://github.com/snakemake/snakemake/issues/2919
"""

from __future__ import annotations

import pytest
from support.children import wait_until
from support.field import Field, kill, seconds
from support.field_models import ask_fan, models
from support.model_server import Play, model_server

QUESTIONS, WORKERS = 40, 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("everything", [False, True], ids=["coordinator", "everything"])
def test_what_was_answered_is_kept(field: Field, everything: bool) -> None:
    """Killed at about half. Without its workers at most one answer each is in doubt; without it none is."""
    with model_server() as server:
        server.plays(Play(delay=seconds(0.2, 0.03)))
        pool = field.pool(WORKERS, "--no-coordinator")
        runtime = {"maxConcurrency": WORKERS}
        run = field.start("run", field.workflow("q", [ask_fan("q", QUESTIONS)], runtime=runtime, **models(server.url)))
        server.wait_for(QUESTIONS // 2)
        if everything:
            kill(run.pid, pool.pid, *(worker.pid for worker in field.workers()))
            pool.wait()
        else:
            kill(run.pid)
            wait_until(lambda: len(field.workers("idle")) == WORKERS, "the workers are idle")
        run.wait()
        [(run_id, state)] = field.rows("SELECT run_id, state FROM runs")
        assert state == "running"
        resumed = field.json("resume", run_id, "--workers", str(WORKERS), limit=120)
        uncertain = field.scalar("SELECT COUNT(*) FROM effects WHERE status = 'uncertain'")
        assert QUESTIONS - uncertain <= server.count <= QUESTIONS, "who dies before sending has not asked"
    succeeded = field.scalar("SELECT COUNT(*) FROM tasks WHERE state = 'succeeded' AND task_id LIKE 'q--%'")
    assert succeeded == QUESTIONS - uncertain
    assert {(attempt, delivery) for _, attempt, delivery in field.tasks(run_id).values()} == {(1, 1)}
    if everything and uncertain:
        assert uncertain <= WORKERS
        assert (resumed.code, resumed.data["reason"]) == (3, "uncertain_effect")
    else:
        assert (uncertain, resumed.code, resumed.data["state"]) == (0, 0, "succeeded")
    field.check_clean_end(drained=[] if everything else [pool], uncertain=True)


def test_there_is_no_verb_that_unlocks(field: Field) -> None:
    """None is needed, so none is there to be tried."""
    shown = field("--help").out
    assert "unlock" not in shown
    assert field("unlock").code == 2
