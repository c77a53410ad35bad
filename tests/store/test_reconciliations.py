"""What may stand as the inverse of an effect, also when somebody has set the clock back in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.compensations import MAPPING
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError
from agentctl.store.records import Batch, EffectEnd, NewReconciliation
from agentctl.store.verification import verify
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import check_chains, everything, rows

DAY = 24 * 3600 * 1000


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    check_chains(opened)
    assert verify(opened.database, None)["ok"]
    opened.close()


def started_run(store: Store, tasks: int) -> Driver:
    store.create_run(new_run("run-1", tasks))
    driver = Driver(store, "run-1")
    driver.enqueue(range(tasks))
    return driver


def perform(store: Store, run_id: str) -> str:
    """The next task of a run does what it has to do; the id of its effect."""
    hand = Hand(store)
    claim = hand.take(run_id)
    request = effect_request(claim, value=claim.task_id)
    hand.start(claim, request)
    hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", "1"))
    return request.effect_id


def undone(effect_id: str, by: str) -> NewReconciliation:
    return NewReconciliation("r-1", effect_id, "compensated", "me", "looked", "{}", "{}", compensation_effect_id=by)


def concluded(store: Store) -> list[tuple[str, str, str]]:
    columns = "effect_id, status, compensation_effect_id"
    return rows(store, f"SELECT {columns} FROM effect_reconciliations")  # noqa: S608


def test_a_declared_inverse_counts_although_the_clock_was_set_back(store: Store, clock: ManualClock) -> None:
    """It began after the end of the run that it undoes, whatever the clock says."""
    driver = started_run(store, 1)
    source = perform(store, "run-1")
    driver.commit()
    driver.end("failed", stop="task_failed")
    clock.set_wall(clock.now() - DAY)
    inputs = canonical({MAPPING: {"t0": {"sourceTaskId": "t0", "sourceEffectIds": [source]}}})
    store.create_run(new_run("run-2", 1, mode="compensation", source_run_id="run-1", inputs_json=inputs))
    undoing = Driver(store, "run-2", "driver-2")
    undoing.enqueue([0])
    inverse = perform(store, "run-2")
    [done], _ = store.finished_attempts(undoing.run)
    batch = Batch(undone=[(0, [source])])
    undoing.settle(batch, done)
    undoing.write(batch)
    undoing.end("succeeded")
    assert concluded(store) == [(source, "compensated", inverse)]


def test_a_later_effect_of_the_same_run_counts_although_the_clock_was_set_back(
    store: Store, clock: ManualClock
) -> None:
    driver = started_run(store, 2)
    first = perform(store, "run-1")
    clock.set_wall(clock.now() - DAY)
    second = perform(store, "run-1")
    driver.commit()
    store.reconcile(undone(first, by=second))
    assert concluded(store) == [(first, "compensated", second)]


def test_an_effect_of_the_same_run_that_began_before_has_undone_nothing(store: Store, clock: ManualClock) -> None:
    driver = started_run(store, 2)
    first = perform(store, "run-1")
    clock.advance(0.001)
    second = perform(store, "run-1")
    driver.commit()
    before = everything(store)
    with pytest.raises(ConflictError, match="cannot have undone it"):
        store.reconcile(undone(second, by=first))
    assert everything(store) == before
