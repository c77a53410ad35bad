"""Effects: what may be started, what is remembered, what is final."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, IncompatibleVersion, LeaseLost
from agentctl.store.records import Claim, EffectEnd, RecordedEffect, StartedEffect, StartRefused
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import check_chains, effect, everything, rows, scalar


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    opened.create_run(new_run(tasks=3))
    Driver(opened, "run-1").enqueue([0, 1, 2])
    yield opened
    check_chains(opened)
    opened.close()


@pytest.fixture
def hand(store: Store) -> Hand:
    return Hand(store)


@pytest.fixture
def claim(hand: Hand) -> Claim:
    return hand.take()


def test_start_writes_everything_before_the_dispatch(store: Store, hand: Hand, claim: Claim) -> None:
    request = effect_request(claim)
    assert hand.start(claim, request) == StartedEffect(1)
    row = effect(store, request.effect_id)
    assert (row["status"], row["dispatches"], row["confirmed"], row["completed_at"]) == ("started", 1, 0, None)
    types = [row[0] for row in rows(store, "SELECT event_type FROM audit_events ORDER BY sequence")][-2:]
    assert types == ["effect.requested", "effect.started"]


def test_an_effect_in_flight_is_not_started_again(store: Store, hand: Hand, claim: Claim) -> None:
    request = effect_request(claim, idempotency="pure")
    hand.start(claim, request)
    before = everything(store)
    with pytest.raises(LeaseLost):
        hand.start(claim, request)
    assert everything(store) == before


@pytest.mark.parametrize(
    ("end", "recorded"),
    [
        (EffectEnd("", "succeeded", result_json='"r"'), RecordedEffect("succeeded", '"r"', None)),
        (EffectEnd("", "failed", error_json='"e"'), RecordedEffect("failed", None, '"e"')),
        (EffectEnd("", "uncertain", error_json='"u"'), RecordedEffect("uncertain", None, '"u"')),
        (EffectEnd("", "cancelled"), RecordedEffect("cancelled", None, None)),
    ],
    ids=lambda value: getattr(value, "status", ""),
)
def test_what_has_ended_is_remembered_and_never_sent_again(
    store: Store, hand: Hand, claim: Claim, end: EffectEnd, recorded: RecordedEffect
) -> None:
    request = effect_request(claim)
    hand.start(claim, request)
    end = replace(end, effect_id=request.effect_id)
    store.release(claim, effect=end, reason="drain")
    again = hand.take()
    before = everything(store)
    assert hand.start(again, request) == recorded
    assert everything(store) == before
    with pytest.raises(LeaseLost):
        hand.finish(again, effect=replace(end, status="succeeded"))
    assert everything(store) == before


def test_a_new_input_for_a_known_ordinal_is_refused(store: Store, hand: Hand, claim: Claim) -> None:
    hand.start(claim, effect_request(claim, value="one", idempotency="keyed"))
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    again = hand.take()
    before = everything(store)
    with pytest.raises(ConflictError, match="another input"):
        hand.start(again, effect_request(again, value="two", idempotency="keyed"))
    assert everything(store) == before


def test_several_effects_of_one_attempt(store: Store, hand: Hand, claim: Claim) -> None:
    first, second = (effect_request(claim, ordinal=n) for n in (1, 2))
    hand.start(claim, first)
    assert hand.start(claim, second, previous=EffectEnd(first.effect_id, "succeeded")) == StartedEffect(1)
    assert effect(store, first.effect_id)["confirmed"] == 1
    hand.finish(claim, effect=EffectEnd(second.effect_id, "succeeded", result_json='"two"'))
    types = [row[0] for row in rows(store, "SELECT event_type FROM audit_events ORDER BY sequence")]
    assert types[-5:] == [
        "effect.started",
        "effect.succeeded",
        "effect.requested",
        "effect.started",
        "effect.succeeded",
    ]


def test_the_end_of_the_previous_effect_is_kept_when_the_next_is_refused(
    store: Store, hand: Hand, claim: Claim
) -> None:
    first, second = (effect_request(claim, ordinal=n) for n in (1, 2))
    hand.start(claim, first)
    store.request_cancel("run-1", reason="enough", actor="x")
    answer = hand.start(claim, second, previous=EffectEnd(first.effect_id, "succeeded"))
    assert answer == StartRefused("cancel_requested")
    assert effect(store, first.effect_id)["status"] == "succeeded"
    assert rows(store, "SELECT 1 FROM effects WHERE effect_id = ?", second.effect_id) == []


def test_nothing_starts_after_a_cancel(store: Store, hand: Hand, claim: Claim) -> None:
    assert store.request_cancel("run-1", reason="enough", actor="cli-user") == (True, "running")
    before = everything(store)
    assert hand.start(claim, effect_request(claim)) == StartRefused("cancel_requested")
    assert everything(store) == before
    assert store.request_cancel("run-1", reason="again", actor="cli-user") == (True, "running")
    assert everything(store) == before


def test_nothing_starts_in_a_run_that_has_ended(store: Store, hand: Hand, claim: Claim) -> None:
    """Its driver may end it while somebody holds an attempt: nobody asks for a cancellation then."""
    Driver(store, "run-1", "driver-2").end("failed", "task_failed")
    assert hand.start(claim, effect_request(claim)) == StartRefused("cancel_requested")
    assert rows(store, "SELECT 1 FROM effects") == []


def test_nothing_starts_in_a_paused_run(store: Store, hand: Hand, claim: Claim) -> None:
    with store.database.write() as tx:
        tx.execute("UPDATE runs SET pause_requested_at = 1")
    assert hand.start(claim, effect_request(claim)) == StartRefused("paused")
    assert rows(store, "SELECT 1 FROM effects") == []


def test_nothing_starts_after_the_deadline(store: Store, hand: Hand, claim: Claim, clock: ManualClock) -> None:
    with store.database.write() as tx:
        tx.execute("UPDATE runs SET deadline_at = ?", (clock.now() + 1000,))
    clock.advance(1)
    assert isinstance(hand.start(claim, effect_request(claim)), StartedEffect)
    other = hand.take()
    clock.advance(0.001)
    assert hand.start(other, effect_request(other)) == StartRefused("deadline")


def test_a_repeated_dispatch_is_counted(store: Store, hand: Hand, claim: Claim) -> None:
    request = effect_request(claim, idempotency="keyed")
    assert hand.start(claim, request) == StartedEffect(1)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    again = hand.take()
    assert hand.start(again, request) == StartedEffect(2)
    assert effect(store, request.effect_id)["dispatches"] == 2
    # `lost`: ended half-way by its holder, and its contract allows another dispatch.
    store.release(again, effect=EffectEnd(request.effect_id, "lost", dispatch=2), reason="drain")
    assert hand.start(hand.take(), request) == StartedEffect(3)


def test_an_effect_of_the_future_is_refused(store: Store, hand: Hand, claim: Claim) -> None:
    request = effect_request(claim, idempotency="keyed")
    hand.start(claim, request)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    again = hand.take()
    with store.database.write() as tx:
        tx.execute("UPDATE effects SET format_version = 2")
    before = everything(store)
    with pytest.raises(IncompatibleVersion):
        hand.start(again, request)
    assert everything(store) == before


def test_an_effect_of_the_future_in_flight_is_not_rescued_by_guesses(store: Store, hand: Hand, claim: Claim) -> None:
    hand.start(claim, effect_request(claim, idempotency="keyed"))
    with store.database.write() as tx:
        tx.execute("UPDATE effects SET format_version = 2")
    before = everything(store)
    assert store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x") == []
    assert everything(store) == before


def test_what_was_expected_is_told_to_the_next_delivery(store: Store, hand: Hand, claim: Claim) -> None:
    request = replace(effect_request(claim, idempotency="idempotent"), expected_json='{"before":"abc"}')
    assert store.recorded_expectation(claim.fence.attempt_id, 1) is None
    hand.start(claim, request)
    assert store.recorded_expectation(claim.fence.attempt_id, 1) == '{"before":"abc"}'
    assert scalar(store, "SELECT COUNT(*) FROM effects") == 1
