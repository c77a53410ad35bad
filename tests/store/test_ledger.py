"""The ledger: what is held, used and given back adds up, and no limit is passed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import audit, ledger
from agentctl.store.answers import MAX_UNITS
from agentctl.store.clock import LAST_INSTANT
from agentctl.store.engine import Store
from agentctl.store.proofs import ledger_problems
from agentctl.store.records import (
    AttemptHeld,
    Batch,
    Claim,
    EffectEnd,
    EffectRequest,
    Event,
    NewReconciliation,
    StartedEffect,
    StartRefused,
)
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import attempt, check_chains, effect, ledger_line, rows, scalar, task_state


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    assert_identities(opened)
    check_chains(opened)
    opened.close()


def assert_identities(store: Store) -> None:
    """What a line holds is the sum of its open reservations."""
    for run_id, dimension, reserved in rows(store, "SELECT run_id, dimension, reserved FROM budget_lines"):
        held = rows(
            store,
            "SELECT COALESCE(SUM(units), 0) FROM budget_reservations "
            "WHERE run_id = ? AND dimension = ? AND state = 'open'",
            run_id,
            dimension,
        )
        assert held == [(reserved,)], dimension


def begin(store: Store, limits: dict[str, int], tasks: int = 3) -> list[Claim]:
    store.create_run(new_run(tasks=tasks, budget_limits=limits))
    Driver(store, "run-1").enqueue(range(tasks))
    return [Hand(store, f"worker-{number}").take() for number in range(tasks)]


def start(store: Store, claim: Claim, estimate: dict[str, int], **options: object) -> tuple[EffectRequest, object]:
    request = effect_request(claim, estimate=estimate, **options)  # type: ignore[arg-type]
    return request, Hand(store, claim.fence.holder).start(claim, request)


def test_reserve_then_settle_with_what_was_used(store: Store) -> None:
    claim, *_ = begin(store, {"toolCalls": 10})
    request, answer = start(store, claim, {"toolCalls": 4})
    assert answer == StartedEffect(1)
    assert ledger_line(store, "toolCalls") == (10, 0, 4)
    Hand(store, claim.fence.holder).finish(
        claim, effect=EffectEnd(request.effect_id, "succeeded", usage={"toolCalls": 3})
    )
    assert ledger_line(store, "toolCalls") == (10, 3, 0)
    assert rows(store, "SELECT units, actual, state FROM budget_reservations") == [(4, 3, "settled")]


def test_a_failed_effect_is_charged_what_it_used(store: Store) -> None:
    claim, *_ = begin(store, {"toolCalls": 10})
    request, _ = start(store, claim, {"toolCalls": 4})
    Hand(store, claim.fence.holder).finish(
        claim, "failed", effect=EffectEnd(request.effect_id, "failed", usage={"toolCalls": 1})
    )
    assert ledger_line(store, "toolCalls") == (10, 1, 0)


def test_a_refusal_holds_nothing_and_names_the_dimension(store: Store) -> None:
    first, second, third = begin(store, {"turns": 5, "toolCalls": 10})
    assert start(store, first, {"turns": 1, "toolCalls": 6})[1] == StartedEffect(1)
    request, answer = start(store, second, {"turns": 1, "toolCalls": 6})
    # It fits beside what is used, so it waits for others, and costs no worker.
    assert answer == AttemptHeld("budget")
    held = attempt(store, second.fence.attempt_id)
    assert (held["state"], held["hold"], held["holder"], held["lost"]) == ("ready", "budget", None, 0)
    assert task_state(store, 1) == "ready"
    assert ledger_line(store, "turns") == (5, 0, 1)
    assert rows(store, "SELECT 1 FROM effects WHERE effect_id = ?", request.effect_id) == []
    # What can never fit does not wait for others: it is denied, written down, and stays `requested`.
    request, answer = start(store, third, {"toolCalls": 11})
    assert answer == StartRefused("budget", {"dimension": "toolCalls", "limit": 10, "attempted": 17})
    assert effect(store, request.effect_id)["status"] == "requested"
    exceeded = scalar(store, "SELECT exceeded_json FROM run_budgets")
    assert json.loads(exceeded) == {"dimension": "toolCalls", "limit": 10, "attempted": 17}
    assert rows(store, "SELECT COUNT(*) FROM audit_events WHERE event_type = 'budget.exceeded'") == [(1,)]
    check_chains(store)


def test_the_last_unit_can_be_had(store: Store) -> None:
    first, second, _ = begin(store, {"turns": 2})
    assert start(store, first, {"turns": 1})[1] == StartedEffect(1)
    assert start(store, second, {"turns": 1})[1] == StartedEffect(1)
    assert ledger_line(store, "turns") == (2, 0, 2)


def test_total_tokens_are_the_sum_of_both_kinds(store: Store) -> None:
    claim, *_ = begin(store, {"totalTokens": 100})
    request, _ = start(store, claim, {"inputTokens": 30, "outputTokens": 40})
    assert ledger_line(store, "totalTokens") == (100, 0, 70)
    Hand(store, claim.fence.holder).finish(
        claim, effect=EffectEnd(request.effect_id, "succeeded", usage={"inputTokens": 20, "outputTokens": 5})
    )
    assert ledger_line(store, "totalTokens") == (100, 25, 0)


@pytest.mark.parametrize(
    "limits",
    [
        {"totalTokens": 100},
        {"inputTokens": 50, "totalTokens": 100},
        {"outputTokens": 50, "totalTokens": 100},
        {"inputTokens": 50, "outputTokens": 50, "totalTokens": 100},
        {"inputTokens": 50},
    ],
    ids=lambda limits: "+".join(limits),
)
def test_a_lost_dispatch_stays_charged_with_all_that_it_held(store: Store, limits: dict[str, int]) -> None:
    claim, *_ = begin(store, limits, tasks=1)
    estimate = {"inputTokens": 10, "outputTokens": 20}
    held = {**estimate, "totalTokens": 30}
    request, _ = start(store, claim, estimate, idempotency="keyed")
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    for dimension, limit in limits.items():
        assert ledger_line(store, dimension) == (limit, held[dimension], 0), "the lost dispatch was paid for"
    again = Hand(store).take()
    assert Hand(store).start(again, request) == StartedEffect(2)
    for dimension, limit in limits.items():
        assert ledger_line(store, dimension) == (limit, held[dimension], held[dimension])


def as_shown(store: Store, run_id: str = "run-1") -> tuple[dict[str, int], dict[str, int]]:
    """(used, reserved) as `inspect` shows them, without what is nothing and without the wall time."""
    with store.database.read() as tx:
        shown: dict[str, Any] = ledger.as_json(tx, run_id, now=store.clock.now())
    return tuple(  # type: ignore[return-value]
        {name: units for name, units in shown[part].items() if units and name != "wallTimeSeconds"}
        for part in ("usage", "reserved")
    )


ESTIMATE = {"toolCalls": 1, "processOutputBytes": 100}


def test_without_a_limit_as_much_is_reserved_and_lost(store: Store) -> None:
    """Each run has a ledger, also for what it does not limit (seed)."""
    claim, *_ = begin(store, {"toolCalls": 5}, tasks=1)
    request, _ = start(store, claim, ESTIMATE, idempotency="keyed")
    assert as_shown(store) == ({}, ESTIMATE)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    assert as_shown(store) == (ESTIMATE, {})
    again = Hand(store).take()
    assert Hand(store).start(again, request) == StartedEffect(2)
    assert as_shown(store) == (ESTIMATE, ESTIMATE)
    used = {"toolCalls": 1, "processOutputBytes": 7}
    Hand(store).finish(again, effect=EffectEnd(request.effect_id, "succeeded", usage=used, dispatch=2))
    assert as_shown(store) == ({"toolCalls": 2, "processOutputBytes": 107}, {})


@pytest.mark.parametrize("status", ["applied", "not_applied"])
def test_without_a_limit_a_conclusion_settles_as_much(store: Store, status: str) -> None:
    claim, *_ = begin(store, {}, tasks=1)
    request, _ = start(store, claim, ESTIMATE)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    assert as_shown(store) == ({}, ESTIMATE)
    words = ("me", "looked", "{}", "{}", "{}" if status == "applied" else None)
    store.reconcile(NewReconciliation("r-1", request.effect_id, status, *words))
    assert as_shown(store) == (ESTIMATE if status == "applied" else {}, {})
    if status == "applied":
        store.reconcile(NewReconciliation("r-2", request.effect_id, status, *words))
        assert as_shown(store) == (ESTIMATE, {}), "said twice, used once"


def test_without_a_limit_what_was_not_dispatched_is_given_back(store: Store) -> None:
    claim, *_ = begin(store, {}, tasks=1)
    request, _ = start(store, claim, ESTIMATE)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    assert as_shown(store) == ({}, {})


def test_an_uncertain_effect_keeps_its_reservation(store: Store) -> None:
    claim, *_ = begin(store, {"turns": 1}, tasks=2)
    start(store, claim, {"turns": 1})
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
    assert ledger_line(store, "turns") == (1, 0, 1)


@pytest.mark.parametrize("status", ["requested", "cancelled"])
def test_what_was_provably_not_dispatched_is_given_back(store: Store, status: str) -> None:
    claim, *_ = begin(store, {"turns": 1}, tasks=1)
    request, _ = start(store, claim, {"turns": 1})
    store.release(claim, effect=EffectEnd(request.effect_id, status), reason="drain")
    assert ledger_line(store, "turns") == (1, 0, 0)
    assert rows(store, "SELECT state FROM budget_reservations") == [("released",)]


def test_a_dispatch_after_a_released_one_is_held_again(store: Store) -> None:
    """The number of the dispatch is the same, since the first one never was."""
    first, second = begin(store, {"turns": 1}, tasks=2)
    request, _ = start(store, first, {"turns": 1})
    store.release(first, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    again = Hand(store).take()
    assert Hand(store).start(again, request) == StartedEffect(1)
    assert ledger_line(store, "turns") == (1, 0, 1)
    assert start(store, second, {"turns": 1})[1] == AttemptHeld("budget")
    Hand(store).finish(again, effect=EffectEnd(request.effect_id, "succeeded", usage={"turns": 1}))
    assert ledger_line(store, "turns") == (1, 1, 0)


def test_the_previous_effect_is_settled_before_the_next_one_is_reserved(store: Store) -> None:
    claim, *_ = begin(store, {"turns": 10}, tasks=1)
    request, _ = start(store, claim, {"turns": 8})
    answer = Hand(store, claim.fence.holder).start(
        claim,
        effect_request(claim, ordinal=2, estimate={"turns": 8}),
        previous=EffectEnd(request.effect_id, "succeeded", usage={"turns": 2}),
    )
    assert answer == StartedEffect(1)
    assert ledger_line(store, "turns") == (10, 2, 8)


def test_a_dispatch_is_settled_once(store: Store) -> None:
    """Whatever is said of it afterwards: only an open reservation moves."""
    [claim] = begin(store, {"turns": 10}, tasks=1)
    request, _ = start(store, claim, {"turns": 4})
    with store.database.write() as tx:
        events: list[Event] = []
        ledger.settle(tx, "run-1", "t0", request.effect_id, 1, {"turns": 3}, events, now=1)
        audit.append(tx, "run-1", events, actor="test", now=1)
    assert ledger_line(store, "turns") == (10, 3, 0)
    with store.database.write() as tx:
        told: list[Event] = []
        ledger.charge_lost(tx, "run-1", "t0", request.effect_id, 1, told, now=1)
        ledger.release(tx, "run-1", "t0", request.effect_id, 1, told)
        assert told == []
    assert ledger_line(store, "turns") == (10, 3, 0)


def test_who_waits_first_for_units_is_served_first_however_much_it_needs(store: Store) -> None:
    first, second, large, small = begin(store, {"turns": 10}, tasks=4)
    held = [start(store, claim, {"turns": 5})[0] for claim in (first, second)]
    for claim, units in ((large, 6), (small, 4)):
        assert start(store, claim, {"turns": units})[1] == AttemptHeld("budget")

    def holds() -> list[str]:
        return [attempt(store, claim.fence.attempt_id)["hold"] for claim in (large, small)]

    def give_back(claim: Claim, request: EffectRequest) -> None:
        store.release(claim, effect=EffectEnd(request.effect_id, "requested", dispatch=1), reason="drain")

    give_back(first, held[0])
    assert holds() == ["budget", "budget"], "the small one would fit, and would let the large one starve"
    give_back(second, held[1])
    assert holds() == ["place", "place"]


def test_usage_without_a_limit_is_counted_all_the_same(store: Store) -> None:
    claim, *_ = begin(store, {"turns": 1}, tasks=1)
    request, _ = start(store, claim, {"turns": 1})
    Hand(store, claim.fence.holder).finish(
        claim, effect=EffectEnd(request.effect_id, "succeeded", usage={"turns": 1, "costMicrousd": 77})
    )
    assert ledger_line(store, "costMicrousd") == (None, 77, 0)


def test_more_used_than_held_is_shown_and_stops_what_follows(store: Store) -> None:
    first, second, _ = begin(store, {"turns": 4})
    request, _ = start(store, first, {"turns": 1})
    Hand(store, first.fence.holder).finish(first, effect=EffectEnd(request.effect_id, "succeeded", usage={"turns": 6}))
    assert ledger_line(store, "turns") == (4, 6, 0)
    assert isinstance(start(store, second, {"turns": 1})[1], StartRefused)


def test_a_line_counts_no_further_than_it_can(store: Store) -> None:
    """Absurd numbers, and sums of large ones: the worker that has the answer must be able to record it."""
    first, second, third = begin(store, {"outputTokens": MAX_UNITS, "totalTokens": 100})
    for claim, tokens in ((first, 10**30), (second, MAX_UNITS), (third, 7)):
        request = effect_request(claim)
        Hand(store, claim.fence.holder).start(claim, request)
        usage = {"outputTokens": tokens, "costMicrousd": tokens}
        Hand(store, claim.fence.holder).finish(claim, effect=EffectEnd(request.effect_id, "succeeded", usage=usage))
    assert ledger_line(store, "outputTokens") == (MAX_UNITS, MAX_UNITS, 0)
    assert ledger_line(store, "totalTokens") == (100, MAX_UNITS, 0)
    assert ledger_line(store, "costMicrousd") == (None, MAX_UNITS, 0)


def test_sums_of_reservations_are_verified_beyond_64_bits(store: Store) -> None:
    first, second, _ = begin(store, {"outputTokens": 5})
    requests = [start(store, claim, {"outputTokens": 1})[0] for claim in (first, second)]
    for claim, request in zip((first, second), requests, strict=True):
        end = EffectEnd(request.effect_id, "succeeded", usage={"outputTokens": MAX_UNITS})
        Hand(store, claim.fence.holder).finish(claim, effect=end)
    assert ledger_line(store, "outputTokens") == (5, MAX_UNITS, 0)
    with store.database.read() as tx:
        assert list(ledger_problems(tx, "run-1")) == []


def test_a_wall_time_beyond_all_calendars_is_a_deadline(store: Store) -> None:
    begin(store, {"wallTimeSeconds": MAX_UNITS}, tasks=1)
    assert scalar(store, "SELECT deadline_at FROM runs") == LAST_INSTANT


def test_the_trail_tells_of_wall_time_at_each_resume_and_each_stop(store: Store, clock: ManualClock) -> None:
    """From the creation on, pauses included, begun seconds counted (contract 6)."""
    store.create_run(new_run(tasks=1))
    first = Driver(store, "run-1", "driver-1")
    clock.advance(1.2)
    first.write(Batch(run_state="paused", run_reason="paused_by_operator"))
    clock.advance(60)
    epoch = store.get_run("run-1").epoch
    assert store.take_run("run-1", driver="driver-2", epoch=epoch, lease_ms=1000, resume=True) == epoch + 1
    clock.advance(0.8)
    batch = Batch(run_state="failed", run_reason="task_failed")
    store.commit_batch(
        store.get_run("run-1"), batch, driver="driver-2", epoch=epoch + 1, revision=store.run_head("run-1")[1]
    )
    told = rows(
        store,
        "SELECT json_extract(payload_json, '$.elapsedSeconds'), json_extract(payload_json, '$.to') FROM audit_events "
        "WHERE event_type IN ('budget.wall_time_observed', 'run.state') ORDER BY sequence",
    )
    assert told == [(2, None), (None, "paused"), (62, None), (None, "running"), (62, None), (None, "failed")]


def test_what_is_in_flight_may_pass_the_limit_and_nothing_after_it_is_known(store: Store) -> None:
    """Three of four are under way when the first turns out to have used thrice what it held (field report 16)."""
    *busy, late = begin(store, {"turns": 4}, tasks=4)
    requests = [start(store, claim, {"turns": 1})[0] for claim in busy]
    limit = 4
    for number, (claim, request) in enumerate(zip(busy, requests, strict=True), 1):
        end = EffectEnd(request.effect_id, "succeeded", result_json='"done"', usage={"turns": 3})
        Hand(store, claim.fence.holder).finish(claim, effect=end)
        assert ledger_line(store, "turns") == (limit, 3 * number, len(busy) - number)
        # It has happened, and is recorded so; its task fails as soon as it has passed the limit.
        assert effect(store, request.effect_id)["status"] == "succeeded"
        row = attempt(store, claim.fence.attempt_id)
        over = 3 * number > limit
        assert row["outcome"] == ("failed" if over else "succeeded")
        assert ("budget_exceeded" in (row["error_json"] or "")) is over
    answer = start(store, late, {"turns": 1})[1]
    assert isinstance(answer, StartRefused)
    assert answer.reason == "budget"
    found = [json.loads(text) for (text,) in rows(
        store, "SELECT payload_json FROM audit_events WHERE event_type = 'budget.reconciled_exceeded' ORDER BY sequence"
    )]  # fmt: skip
    assert [item["attempted"] for item in found] == [6, 9]
    kept = json.loads(scalar(store, "SELECT exceeded_json FROM run_budgets"))
    assert kept == {"dimension": "turns", "limit": 4, "attempted": 6}, "the first one stays"
