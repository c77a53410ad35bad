"""Field report 3: the lease ran out, and a finished task is overwritten or a long one is started again."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from support.field import Field, eventually, gone, seconds
from support.scale import short_lease

LEASE = short_lease(1.2)
OUTPUT = 2 << 20
"""What a command may print by default, and so what it reserves."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_frozen_worker_is_ended_before_anything_is_handed_on(field: Field, idempotent: bool) -> None:
    """SIGSTOP to the worker, not to its child, which ends; another worker is well. SIGCONT finds nobody."""
    lease = seconds(5, LEASE)
    field.lease(lease)
    pool = field.pool(2)
    runtime = {"budgets": {"maxProcessOutputBytes": 4 * OUTPUT}}
    tick = field.tick_task("t", field.may_end, idempotent=idempotent)
    run_id = field.submit(field.workflow("frozen", [tick], runtime=runtime))
    frozen = field.busy(run_id)
    os.kill(frozen.pid, signal.SIGSTOP)
    field.may_end.touch()
    outcome = field.json("wait", run_id, limit=lease * 4 + 30)
    assert gone(frozen.pid), "the frozen holder lives while its task went on"
    with contextlib.suppress(ProcessLookupError):
        os.kill(frozen.pid, signal.SIGCONT)
    charged = field.rows("SELECT used, reserved FROM budget_lines WHERE limit_units IS NOT NULL")
    assert not any(effect == field.lines()[0].effect for effect in field.effect_processes().values())
    if idempotent:
        assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
        assert field.labels() == ["t", "t"]
        assert field.tasks(run_id) == {"t": ("succeeded", 1, 2)}
        assert field.rows("SELECT status, dispatches FROM effects") == [("succeeded", 2)]
        assert charged == [(OUTPUT, 0)], "the lost dispatch with all that it held, the other with what it printed"
        assert field.scalar("SELECT COUNT(*) FROM tasks WHERE output_json IS NOT NULL") == 1
    else:
        assert (outcome.code, outcome.data["state"], outcome.data["reason"]) == (3, "paused", "uncertain_effect")
        assert field.labels() == ["t"]
        assert field.tasks(run_id) == {"t": ("waiting_for_effect", 1, 1)}
        assert field.rows("SELECT status, dispatches FROM effects") == [("uncertain", 1)]
        assert charged == [(0, OUTPUT)], "held until a person says what happened"
    eventually(lambda: len(field.workers("idle")) == 2, "the pool replaces the frozen worker", 10)
    field.check_clean_end(drained=[pool], uncertain=not idempotent)


@pytest.mark.timeout(600)
def test_a_result_that_comes_too_late_is_refused_and_told_of_once(field: Field) -> None:
    """The claim is taken away from a worker that is well, as by a rescuer that was wrong about its death."""
    field.lease(60)
    pool = field.pool(1)
    run_id = field.submit(field.workflow("late", [field.tick_task("t", field.may_end, idempotent=True)]))
    worker = field.busy(run_id)
    store = Store(field.database, SystemClock())
    [(attempt_id, delivery, *_)] = store.claims([worker.process_id])
    assert store.rescue([(attempt_id, delivery)], dead=[], why="somebody is wrong", actor="test") == ["ready"]
    store.close()
    field.may_end.touch()
    outcome = field.json("wait", run_id, limit=60)
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
    assert [entry.pid for entry in field.workers()] == [worker.pid], "it lives, and has done it again"
    assert field.labels() == ["t", "t"]
    assert field.tasks(run_id) == {"t": ("succeeded", 1, 2)}
    assert pool.err.count("its result is dropped") == 1, pool.err
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(600)
def test_a_task_that_takes_longer_than_its_lease_is_left_alone(field: Field) -> None:
    """Case (c): 16 TICK-N of four leases each on 8 workers, nothing disturbed."""
    lease = seconds(5, LEASE)
    field.lease(lease)
    pool = field.pool(8)
    run_id = field.submit(field.workflow("long", [field.tick_fan("t", 16, 4 * lease, idempotent=False)]))
    outcome = field.json("wait", run_id, limit=8 * lease + 60)
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
    assert sorted(field.labels()) == sorted(f"t-{number}" for number in range(16))
    assert set(field.tasks(run_id).values()) == {("succeeded", 1, 1)}
    field.check_clean_end(drained=[pool])
