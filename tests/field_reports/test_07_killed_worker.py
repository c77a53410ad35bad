"""Field report 7: one killed worker ends the whole pool, with exit 0."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from support.children import wait_until
from support.field import Field, eventually, kill
from support.scale import repeats

TASKS = 200


@pytest.mark.timeout(600)
def test_killed_workers_are_replaced_and_the_others_go_on(field: Field) -> None:
    """200 TICK-I on four workers; every now and then a busy one is killed."""
    pool = field.pool(4)
    run_id = field.submit(field.workflow("ticks", [field.tick_fan("t", TASKS, 0.2, idempotent=True)]))
    killed = []
    for _ in range(repeats(5, at_least=3)):
        wait_until(lambda: len(field.workers("idle", "busy")) == 4, "four live workers")
        victim = field.busy(run_id)
        before = {worker.process_id for worker in field.workers()}
        done = len(field.lines())
        kill(victim.pid)
        killed.append(victim.process_id)
        eventually(lambda done=done: len(field.lines()) > done + 3, "the others go on", 5)  # type: ignore[misc]

        def replaced(before: set[str] = before) -> bool:
            living = {worker.process_id for worker in field.workers("idle", "busy")}
            return len(living) == 4 and len(living & before) == 3

        eventually(replaced, "four live workers again, three of them the same", 5)
    outcome = field.json("wait", run_id, limit=120)
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
    tasks = field.tasks(run_id)
    assert len(tasks) == TASKS
    assert {(state, attempt) for state, attempt, _ in tasks.values()} == {("succeeded", 1)}
    assert 1 <= sum(delivery - 1 for _, _, delivery in tasks.values()) <= len(killed)
    labels = field.labels()
    assert set(labels) == {f"t-{number}" for number in range(TASKS)}
    assert TASKS <= len(labels) <= TASKS + len(killed)
    assert pool.running()
    field.check_clean_end(drained=[pool])


def _move_away(field: Field) -> None:
    field.database.parent.rename(field.folder / "elsewhere")


def _lock_away(field: Field) -> None:
    field.database.parent.chmod(0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("damage", [_move_away, _lock_away])
def test_a_pool_that_cannot_start_workers_gives_up_and_says_so(field: Field, damage: Callable[[Field], None]) -> None:
    """The home becomes unusable and all four are killed: a bounded number of starts, then a non-zero end."""
    prefix: list[str] = []
    if damage is _lock_away and os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may do everything")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    pool = field.pool(4, prefix=prefix)
    victims = [worker.pid for worker in field.workers()]
    damage(field)
    kill(*victims)
    result = pool.wait(60)
    assert result.code == 5, result.err
    assert "cannot be started" in result.err
    assert result.err.count("(start ") <= (4 + 1) * 5, "the four and their coordinator"
    assert "Traceback" not in result.err
    if damage is _lock_away:
        field.database.parent.chmod(0o700)
    else:
        (field.folder / "elsewhere").rename(field.database.parent)
    wait_until(lambda: field.processes() == [], "no process of the pool is left")
    field.check_clean_end()
