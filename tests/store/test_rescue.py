"""What becomes of the attempt of a dead holder: every class of effect in every status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.store.engine import Store
from agentctl.store.records import Claim, EffectEnd, RecordedEffect, StartedEffect
from agentctl.store.states import REPEATABLE_CLASSES, REPEATABLE_IDEMPOTENCY, may_repeat
from support.builders import Driver, Hand, effect_request, new_run, open_store, process_row
from support.clock import ManualClock
from support.rows import attempt, check_chains, effect, everything, ledger_line, rows, task_state

IDEMPOTENCY = ("pure", "idempotent", "keyed", "at_most_once", "unknown")
CLASSES = (
    "pure",
    "internal_state",
    "observe",
    "workspace_mutate",
    "external_mutate",
    "process_execution",
    "network",
    "model",
    "remote_agent",
)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    check_chains(opened)
    opened.close()


def claimed(store: Store, *, max_deliveries: int = 3, **changes: object) -> tuple[Driver, Claim]:
    store.create_run(new_run(tasks=1, max_deliveries=max_deliveries, **changes))
    driver = Driver(store, "run-1")
    driver.enqueue([0])
    return driver, Hand(store).take()


def lose(store: Store, claim: Claim, *, holder_may_live: bool = False) -> list[str]:
    fence = claim.fence
    return store.rescue(
        [(fence.attempt_id, fence.delivery)],
        dead=[fence.holder],
        why="worker died",
        actor="coordinator",
        holder_may_live=holder_may_live,
    )


def test_nothing_was_started(store: Store) -> None:
    _, claim = claimed(store)
    assert lose(store, claim) == ["ready"]
    row = attempt(store, claim.fence.attempt_id)
    assert (row["state"], row["holder"], row["lost"], row["delivery"]) == ("ready", None, 1, 1)
    assert task_state(store, 0) == "ready"
    again = Hand(store, "worker-2").take()
    assert (again.number, again.fence.delivery) == (1, 2)


@pytest.mark.parametrize("idempotency", IDEMPOTENCY)
def test_requested_but_not_started(store: Store, idempotency: str) -> None:
    """The holder said that it did not dispatch; the next delivery may, whatever the contract."""
    _, claim = claimed(store)
    hand = Hand(store)
    request = effect_request(claim, idempotency=idempotency)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    again = hand.take()
    assert lose(store, again) == ["ready"]
    assert effect(store, request.effect_id)["status"] == "requested"
    assert hand.start(hand.take(), request) == StartedEffect(1)


@pytest.mark.parametrize("effect_class", CLASSES)
@pytest.mark.parametrize("idempotency", IDEMPOTENCY)
def test_started_and_never_confirmed(store: Store, idempotency: str, effect_class: str) -> None:
    _, claim = claimed(store)
    hand = Hand(store)
    request = effect_request(claim, idempotency=idempotency, effect_class=effect_class)
    hand.start(claim, request)
    repeatable = idempotency in ("pure", "idempotent", "keyed") or effect_class in ("pure", "observe")
    assert may_repeat(effect_class, idempotency) == repeatable
    outcome = lose(store, claim)
    row = effect(store, request.effect_id)
    if repeatable:
        assert outcome == ["ready"]
        assert row["status"] == "requested"
        assert hand.start(hand.take(), request) == StartedEffect(2)
    else:
        assert outcome == ["uncertain"]
        assert (row["status"], row["dispatches"]) == ("uncertain", 1)
        assert attempt(store, claim.fence.attempt_id)["outcome"] == "uncertain"
        assert hand.claim() is None, "it must not be delivered again"


def test_the_sets_of_the_contract() -> None:
    assert frozenset({"pure", "idempotent", "keyed"}) == REPEATABLE_IDEMPOTENCY
    assert frozenset({"pure", "observe"}) == REPEATABLE_CLASSES


@pytest.mark.parametrize("idempotency", IDEMPOTENCY)
def test_confirmed_but_not_finished(store: Store, idempotency: str) -> None:
    _, claim = claimed(store)
    hand = Hand(store)
    first = effect_request(claim, idempotency=idempotency)
    second = effect_request(claim, ordinal=2, idempotency="pure")
    hand.start(claim, first)
    hand.start(claim, second, previous=EffectEnd(first.effect_id, "succeeded", result_json='"kept"'))
    assert lose(store, claim) == ["ready"]
    again = hand.take()
    assert hand.start(again, first) == RecordedEffect("succeeded", '"kept"', None)
    assert effect(store, first.effect_id)["dispatches"] == 1
    assert hand.start(again, second) == StartedEffect(2)


@pytest.mark.parametrize("idempotency", IDEMPOTENCY)
def test_a_holder_that_may_live_makes_every_effect_uncertain(store: Store, idempotency: str) -> None:
    _, claim = claimed(store)
    request = effect_request(claim, idempotency=idempotency)
    Hand(store).start(claim, request)
    assert lose(store, claim, holder_may_live=True) == ["uncertain"]
    assert effect(store, request.effect_id)["status"] == "uncertain"


def test_the_uncertain_task_waits_for_a_person(store: Store) -> None:
    driver, claim = claimed(store)
    request = effect_request(claim)
    Hand(store).start(claim, request)
    lose(store, claim)
    [done] = driver.commit()
    assert (done.outcome, done.effect_id, done.idempotency) == ("uncertain", request.effect_id, "at_most_once")
    assert task_state(store, 0) == "waiting_for_effect"
    assert attempt(store, claim.fence.attempt_id)["state"] == "waiting"
    driver.end("paused", "uncertain_effect")


def test_a_delivery_that_is_over_is_left_alone(store: Store) -> None:
    _, claim = claimed(store)
    assert lose(store, claim) == ["ready"]
    assert lose(store, claim) == []
    again = Hand(store, "worker-2").take()
    before = everything(store)
    assert lose(store, claim) == [], "this claim is not that of the living holder"
    assert everything(store) == before
    Hand(store, "worker-2").finish(again)
    before = everything(store)
    assert lose(store, again) == []
    assert everything(store) == before


@pytest.mark.parametrize("bound", [1, 3])
def test_a_task_that_kills_its_worker_comes_to_an_end(store: Store, bound: int) -> None:
    driver, claim = claimed(store, max_deliveries=bound)
    outcomes = lose(store, claim)
    for number in range(1, bound):
        outcomes += lose(store, Hand(store, f"worker-{number + 1}").take())
    assert outcomes == ["ready"] * (bound - 1) + ["worker_lost"]
    [done] = driver.commit()
    assert done.outcome == "failed"
    assert done.error_json is not None
    assert '"worker_lost"' in done.error_json
    assert task_state(store, 0) == "failed"


def test_what_a_lost_task_had_sent_is_uncertain_and_blocks_nobody(store: Store) -> None:
    """It may be repeated, but nobody does any more: the last dispatch is charged like the earlier ones."""
    driver, claim = claimed(store, max_deliveries=2, budget_limits={"toolCalls": 9})
    request = effect_request(claim, idempotency="idempotent", estimate={"toolCalls": 1})
    Hand(store).start(claim, request)
    assert lose(store, claim) == ["ready"]
    assert effect(store, request.effect_id)["status"] == "requested"
    claim = Hand(store, "worker-2").take()
    Hand(store, "worker-2").start(claim, request)
    assert lose(store, claim) == ["worker_lost"]
    row = effect(store, request.effect_id)
    assert (row["status"], row["dispatches"], row["superseded"], row["confirmed"]) == ("uncertain", 2, 1, 0)
    assert row["completed_at"] is not None
    assert ledger_line(store, "toolCalls") == (9, 2, 0)
    driver.commit()
    assert task_state(store, 0) == "failed"
    driver.end("failed", "task_failed")


def test_what_a_lost_task_had_only_requested_is_cancelled(store: Store) -> None:
    driver, claim = claimed(store, max_deliveries=1)
    request = effect_request(claim)
    hand = Hand(store)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    assert lose(store, hand.take()) == ["worker_lost"]
    driver.commit()
    row = effect(store, request.effect_id)
    assert (row["status"], row["dispatches"]) == ("cancelled", 0)
    told = rows(store, "SELECT payload_json FROM audit_events WHERE event_type = 'effect.cancelled'")
    assert [request.effect_id in payload for (payload,) in told] == [True]


@pytest.mark.parametrize(("code", "status"), [("not_found", "cancelled"), ("budget_exceeded", "requested")])
def test_what_a_failed_attempt_had_only_requested_is_cancelled(store: Store, code: str, status: str) -> None:
    """But for a denial, which leaves its effect `requested` (contract 6)."""
    driver, claim = claimed(store)
    request = effect_request(claim)
    hand = Hand(store)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    hand.finish(hand.take(), "failed", code=code)
    driver.commit()
    assert effect(store, request.effect_id)["status"] == status


def test_deliveries_that_confirmed_a_new_effect_do_not_count(store: Store) -> None:
    """With a bound of one, a long task of many effects survives as many deaths as it makes steps."""
    _, claim = claimed(store, max_deliveries=1)
    for ordinal in range(1, 6):
        hand = Hand(store, claim.fence.holder)
        for earlier in range(1, ordinal):
            assert isinstance(hand.start(claim, effect_request(claim, ordinal=earlier)), RecordedEffect)
        request = effect_request(claim, ordinal=ordinal)
        hand.start(claim, request)
        following = effect_request(claim, ordinal=ordinal + 1, idempotency="pure")
        hand.start(claim, following, previous=EffectEnd(request.effect_id, "succeeded"))
        with store.database.write() as tx:  # the second effect is put back, so that each round confirms exactly one
            tx.execute("DELETE FROM effects WHERE effect_id = ?", (following.effect_id,))
        assert lose(store, claim) == ["ready"], f"delivery {ordinal} made progress"
        assert attempt(store, claim.fence.attempt_id)["lost"] == 0
        claim = Hand(store, f"worker-{ordinal + 1}").take()
    assert lose(store, claim) == ["worker_lost"]


def test_losses_without_progress_add_up_over_those_with_progress(store: Store) -> None:
    _, claim = claimed(store, max_deliveries=2)
    assert lose(store, claim) == ["ready"]
    second = Hand(store, "worker-2").take()
    hand = Hand(store, "worker-2")
    request = effect_request(second)
    hand.start(second, request)
    hand.start(
        second,
        effect_request(second, ordinal=2, idempotency="pure"),
        previous=EffectEnd(request.effect_id, "succeeded"),
    )
    assert lose(store, second) == ["ready"]
    assert lose(store, Hand(store, "worker-3").take()) == ["worker_lost"]


def test_progress_before_a_release_is_not_progress_of_the_next_delivery(store: Store) -> None:
    _, claim = claimed(store, max_deliveries=1)
    hand = Hand(store)
    request = effect_request(claim)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "succeeded"), reason="drain")
    assert lose(store, hand.take()) == ["worker_lost"]


def test_the_dead_are_marked_and_told_of_once(store: Store) -> None:
    _, claim = claimed(store)
    store.register(process_row("worker-1", state="busy"))
    lose(store, claim)
    row = store.get_process("worker-1")
    assert row is not None
    assert row.state == "dead"
    assert row.stopped_at is not None
    lost = rows(store, "SELECT payload_json FROM audit_events WHERE payload_json LIKE '%worker died%'")
    assert len(lost) == 1


def test_all_claims_of_a_holder_in_one_transaction(store: Store) -> None:
    store.create_run(new_run(tasks=3))
    Driver(store, "run-1").enqueue([0, 1, 2])
    hand = Hand(store)
    first, second = hand.take(), hand.take()
    hand.start(first, effect_request(first))
    claims = [(claim[0], claim[1]) for claim in store.claims(["worker-1"])]
    assert claims == [(first.fence.attempt_id, 1), (second.fence.attempt_id, 1)]
    assert store.effects_in_flight(claim[0] for claim in claims) == [effect_request(first).effect_id]
    outcomes = store.rescue(claims, dead=["worker-1"], why="died", actor="x")
    assert outcomes == ["uncertain", "ready"]
    assert store.claims() == []
