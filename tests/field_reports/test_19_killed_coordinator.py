"""Field report 19: the coordinator is killed and the workers go on; resume keeps their work and needs no unlock."""

from __future__ import annotations

import pytest
from support.children import wait_until
from support.field import Field, kill, seconds

CHAINS = 100
STAGES = ("a", "b", "c")


def _chains(field: Field) -> str:
    """100 chains of three TICK-N."""
    rest = seconds(0.2, 0.03)
    tasks = []
    for stage, before in zip(STAGES, (None, *STAGES), strict=False):
        for number in range(CHAINS):
            needs = {"needs": [f"{before}{number}"]} if before else {}
            tasks.append(field.tick_task(f"{stage}{number}", rest, idempotent=False, **needs))
    return field.workflow("chains", tasks)


@pytest.mark.timeout(900)
def test_what_the_workers_did_after_its_death_is_kept(field: Field) -> None:
    """The foreground run is killed at about half; the workers finish what they have; resume does the rest."""
    pool = field.pool(8, "--no-coordinator")
    run = field.start("run", _chains(field), "--output", "json")
    wait_until(lambda: len(field.lines()) >= 150, "half of it", seconds=120)
    run.popen.kill()
    run.wait()
    wait_until(lambda: len(field.workers("idle")) == 8, "the workers are idle")
    known = set(field.labels())
    assert 150 <= len(known) < 300
    [(run_id, state)] = field.rows("SELECT run_id, state FROM runs")
    assert state == "running"
    resumed = field.json("resume", run_id, limit=300)
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded")
    labels = field.labels()
    assert len(labels) == len(set(labels)) == 300
    assert set(field.tasks(run_id).values()) == {("succeeded", 1, 1)}
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(900)
def test_everything_is_killed(field: Field) -> None:
    """Run, supervisor and workers at one instant: at most eight effects are uncertain, and nothing happens twice."""
    pool = field.pool(8, "--no-coordinator")
    run = field.start("run", _chains(field), "--output", "json")
    wait_until(lambda: len(field.lines()) >= 150, "half of it", seconds=120)
    kill(run.pid, pool.pid, *(worker.pid for worker in field.workers()))
    run.wait()
    pool.wait()
    [(run_id,)] = field.rows("SELECT run_id FROM runs")
    resumed = field.json("resume", run_id, "--workers", "8", limit=300)
    tasks = field.tasks(run_id)
    uncertain = {name for name, (state, _, _) in tasks.items() if state == "waiting_for_effect"}
    assert len(uncertain) <= 8
    labels = field.labels()
    assert len(labels) == len(set(labels))
    # What was never executed comes after something uncertain in its own chain.
    blocked = {stage + name[1:] for name in uncertain for stage in STAGES if stage > name[0]}
    everything = {f"{stage}{number}" for stage in STAGES for number in range(CHAINS)}
    assert everything - set(labels) - uncertain == blocked
    assert {name for name, (state, _, _) in tasks.items() if state == "succeeded"} == everything - blocked - uncertain
    if uncertain:
        assert (resumed.code, resumed.data["reason"]) == (3, "uncertain_effect")
    else:
        assert (resumed.code, resumed.data["state"]) == (0, "succeeded")
    field.check_clean_end(uncertain=True)
