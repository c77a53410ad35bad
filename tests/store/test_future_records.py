"""A run of which a newer agentctl has written anything: nothing of it starts, and nobody decides about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentctl.store import runs
from agentctl.store.engine import Store
from agentctl.store.errors import IncompatibleVersion
from agentctl.store.records import AttemptHeld, EffectEnd, NewReconciliation
from support import tampering
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import everything, scalar

KINDS = [pytest.param(table, column, id=table) for _, table, column, _ in runs.VERSIONED]


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def started_run(store: Store, run_id: str, tasks: int) -> Driver:
    store.create_run(new_run(run_id, tasks))
    driver = Driver(store, run_id, f"driver-of-{run_id}")
    driver.enqueue(range(tasks))
    return driver


@pytest.mark.parametrize(("table", "column"), KINDS)
def test_nothing_of_it_is_claimed_or_rescued(store: Store, table: str, column: str) -> None:
    started_run(store, "run-1", 3)
    hand = Hand(store)
    claim = hand.take()
    hand.start(claim, effect_request(claim, idempotency="idempotent"))
    tampering.future(store.database.connection, "run-1", table, column)
    before = everything(store)
    assert store.peek("run-1") is None
    assert store.peek(None) is None
    assert not store.has_ready("run-1")
    assert not store.has_ready(None)
    assert hand.claim("run-1") is None
    assert hand.claim() is None
    assert store.rescue([(claim.fence.attempt_id, 1)], dead=[claim.fence.holder], why="died", actor="x") == []
    assert everything(store) == before


@pytest.mark.parametrize(("table", "column"), KINDS)
def test_others_are_served_beside_it(store: Store, table: str, column: str) -> None:
    started_run(store, "run-1", 3)
    started_run(store, "run-2", 2)
    tampering.future(store.database.connection, "run-1", table, column)
    candidate = store.peek(None)
    assert candidate is not None
    assert candidate.run_id == "run-2"
    assert [Hand(store).take().run_id for _ in range(2)] == ["run-2", "run-2"]
    assert Hand(store).claim() is None


@pytest.mark.parametrize(("table", "column"), KINDS)
def test_nobody_decides_about_it(store: Store, table: str, column: str) -> None:
    """Neither an answer to a question, nor a conclusion about an effect, nor a pause."""
    driver = started_run(store, "run-1", 3)
    hand = Hand(store)
    claim = hand.take()
    unclear = effect_request(claim, idempotency="unknown")
    hand.start(claim, unclear)
    hand.finish(claim, "uncertain", effect=EffectEnd(unclear.effect_id, "uncertain", None, "{}"))
    driver.commit()
    claim = hand.take()
    held = hand.start(claim, effect_request(claim, ask=True))
    assert isinstance(held, AttemptHeld)
    approval_id = str(held.approval_id)
    tampering.future(store.database.connection, "run-1", table, column)
    before = everything(store)
    applied = NewReconciliation("r-1", unclear.effect_id, "applied", "me", "looked", "{}", "{}", "1")
    undone = NewReconciliation("r-1", unclear.effect_id, "not_applied", "me", "looked", "{}", "{}")
    verbs: list[Callable[[], object]] = [
        lambda: store.resolve_approval(approval_id, approve=True, actor="me", reason="fine"),
        lambda: store.resolve_approval(approval_id, approve=False, actor="me", reason="no"),
        lambda: store.request_pause("run-1", reason="night", actor="me"),
        lambda: store.reconcile(applied),
        lambda: store.reconcile(undone),
    ]
    for verb in verbs:
        with pytest.raises(IncompatibleVersion):
            verb()
    assert everything(store) == before
    assert scalar(store, "SELECT state FROM runs") == "running"
