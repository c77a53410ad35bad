"""Tool calls, provider sessions and stream events in the store: one fact, one transaction (seed; contract 10, 11.3)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical, effect_id, hex_digest, text_digest
from agentctl.store.engine import Store
from agentctl.store.errors import IncompatibleVersion, LeaseLost
from agentctl.store.records import (
    AttemptEnd,
    Claim,
    EffectEnd,
    EffectRequest,
    Fence,
    NewReconciliation,
    SessionUpdate,
    StartedEffect,
    ToolCallStart,
)
from agentctl.store.verification import verify
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import rows, scalar


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    made = open_store(tmp_path, clock)
    yield made
    made.close()


def begun(store: Store, **run: Any) -> tuple[Driver, Hand, Claim]:
    store.create_run(new_run(tasks=1, **run))
    driver = Driver(store, "run-1")
    driver.enqueue([0])
    hand = Hand(store)
    return driver, hand, hand.take()


def tool_request(claim: Claim, *, ordinal: int = 1, idempotency: str = "at_most_once") -> EffectRequest:
    """The effect of a tool call, with the identity that it would have."""
    given = {"callId": "c", "input": {"x": 1}, "tool": "t"}
    text = canonical(given)
    digest = hex_digest(text)
    request = effect_request(claim, ordinal=ordinal, idempotency=idempotency)
    return replace(
        request,
        effect_id=effect_id(claim.run_id, claim.task_id, claim.number, ordinal, "tool.t", digest),
        operation="tool.t",
        input_json=text,
        input_digest=digest,
        tool_call=ToolCallStart("c", "t", text_digest(canonical(given["input"]))),
    )


def calls(store: Store) -> list[tuple[Any, ...]]:
    return rows(store, "SELECT call_id, tool_id, status, output_digest, completed_at IS NULL FROM tool_calls")


def both(store: Store) -> list[tuple[Any, ...]]:
    return rows(
        store, "SELECT e.status, c.status FROM effects e LEFT JOIN tool_calls c USING (effect_id) ORDER BY ordinal"
    )


@pytest.mark.parametrize("status", ["succeeded", "failed", "uncertain"])
def test_a_call_ends_with_its_effect(store: Store, status: str) -> None:
    _, hand, claim = begun(store)
    request = tool_request(claim)
    assert hand.start(claim, request) == StartedEffect(1)
    assert calls(store) == [("c", "t", "started", None, 1)]
    result = canonical({"ok": True}) if status == "succeeded" else None
    outcome = {"succeeded": "succeeded", "failed": "failed", "uncertain": "uncertain"}[status]
    error = None if status == "succeeded" else '{"code":"x","message":"x","retryable":false}'
    end = AttemptEnd(outcome, result_effect=request.effect_id, error_json=error)
    store.finish(
        claim, end, effect=EffectEnd(request.effect_id, status, result, error),
        next_claim=False, only_run=None, lease_ms=1000,
    )  # fmt: skip
    assert both(store) == [(status, status)]
    assert calls(store)[0][3] == (None if result is None else text_digest(result))
    assert [p for p in verify(store.database, None)["problems"] if "tool call" in p["message"]] == []


def test_a_call_that_was_never_sent_is_none(store: Store) -> None:
    _, hand, claim = begun(store)
    request = tool_request(claim)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    assert both(store) == [("requested", None)]
    again = hand.claim()
    assert again is not None
    assert hand.start(again, request) == StartedEffect(1)
    assert both(store) == [("started", "started")]


@pytest.mark.parametrize(
    ("idempotency", "status"), [("idempotent", ("requested", None)), ("at_most_once", ("uncertain", "uncertain"))]
)
def test_the_rescue_of_a_call_moves_both(store: Store, idempotency: str, status: tuple[Any, ...]) -> None:
    _, hand, claim = begun(store)
    hand.start(claim, tool_request(claim, idempotency=idempotency))
    store.rescue([(claim.fence.attempt_id, claim.fence.delivery)], dead=["worker-1"], why="died", actor="test")
    assert both(store) == [status]


def test_verification_finds_a_call_that_says_something_else(store: Store) -> None:
    _, hand, claim = begun(store)
    hand.start(claim, tool_request(claim))
    with store.database.write() as tx:
        tx.execute("UPDATE tool_calls SET status = 'failed', completed_at = 1")
    assert any("the tool call of effect" in problem["message"] for problem in verify(store.database, None)["problems"])
    with store.database.write() as tx:
        tx.execute("DELETE FROM tool_calls")
    assert any("the tool call of effect" in problem["message"] for problem in verify(store.database, None)["problems"])


def test_a_session_is_written_with_the_answer_that_it_belongs_to(store: Store) -> None:
    _, hand, claim = begun(store)
    first = effect_request(claim, effect_class="model", value="a")
    hand.start(claim, first)
    session = SessionUpdate("p", 1, canonical({"kind": "conversation", "value": [1]}))
    end = EffectEnd(first.effect_id, "succeeded", "{}", session=session)
    second = effect_request(claim, ordinal=2, effect_class="model", value="b")
    assert rows(store, "SELECT * FROM provider_sessions") == []
    assert store.start_effect(claim.fence, second, previous=end, task_id=claim.task_id) == StartedEffect(1)
    found = rows(store, "SELECT provider, attempt, effect_id, continuation_json FROM provider_sessions")
    assert found == [("p", 1, first.effect_id, session.continuation_json)]
    assert store.recorded_steps(claim.fence.attempt_id)[1].effect_id == first.effect_id
    # A late end of a deposed worker writes nothing.
    store.rescue([(claim.fence.attempt_id, claim.fence.delivery)], dead=["worker-1"], why="died", actor="test")
    late = EffectEnd(second.effect_id, "succeeded", "{}", session=SessionUpdate("q", 1, None))
    with pytest.raises(LeaseLost):
        store.finish(
            claim, AttemptEnd("succeeded", result_json="{}"), effect=late, next_claim=False, only_run=None, lease_ms=1
        )
    assert rows(store, "SELECT provider FROM provider_sessions") == [("p",)]


def test_events_are_numbered_bounded_and_without_secrets(store: Store) -> None:
    _, _, claim = begun(store)
    assert store.stream_event(claim.fence, "e", {"type": "text_delta", "text": "a", "token": "s3cret"})
    assert store.stream_event(claim.fence, "e", {"type": "text_delta", "text": "x" * 5000})
    first, second = rows(store, "SELECT sequence, event_type, payload_json FROM stream_events ORDER BY sequence")
    assert first == (1, "text_delta", '{"text":"a","token":"[REDACTED]"}')
    text = canonical({"text": "x" * 5000})
    assert json.loads(second[2]) == {"truncated": True, "originalBytes": len(text), "sha256": hex_digest(text)}
    for _ in range(253):
        assert store.stream_event(claim.fence, "e", {"type": "t"})
    assert store.stream_event(claim.fence, "e", {"type": "t"})
    assert not store.stream_event(claim.fence, "e", {"type": "t"})
    assert scalar(store, "SELECT COUNT(*) FROM stream_events") == 256
    assert rows(store, "SELECT event_type, payload_json FROM stream_events WHERE sequence = 256") == [
        ("stream.truncated", '{"maxEvents":256,"reason":"event_limit"}')
    ]


@pytest.mark.parametrize("table", ["provider_sessions", "stream_events"])
def test_a_run_with_a_conversation_of_the_future_is_left_alone(store: Store, table: str) -> None:
    _, hand, claim = begun(store)
    model = effect_request(claim, effect_class="model")
    hand.start(claim, model)
    store.stream_event(claim.fence, model.effect_id, {"type": "t"})
    end = EffectEnd(model.effect_id, "succeeded", "{}", session=SessionUpdate("p", 1, None))
    hand.finish(claim, effect=end)
    with store.database.write() as tx:
        tx.execute(f"UPDATE {table} SET format_version = 2")  # noqa: S608
    epoch = store.run_head("run-1")[0]
    for verb in (
        lambda: store.take_run("run-1", driver="d", epoch=epoch, lease_ms=1),
        lambda: store.request_cancel("run-1", reason="x", actor="x"),
        lambda: store.read_source("run-1"),
    ):
        with pytest.raises(IncompatibleVersion, match="newer agentctl"):
            verb()


def test_events_of_a_deposed_worker_are_refused(store: Store) -> None:
    _, _, claim = begun(store)
    fence = Fence(claim.fence.attempt_id, claim.fence.delivery, "somebody else")
    with pytest.raises(LeaseLost):
        store.stream_event(fence, "e", {"type": "t"})
    assert rows(store, "SELECT * FROM stream_events") == []


def test_an_answer_of_a_person_charges_what_it_says(store: Store) -> None:
    """Instead of the worst that was reserved; and the attempt is taken up again, not finished with it."""
    _, hand, claim = begun(store, budget_limits={"outputTokens": 100})
    request = effect_request(claim, effect_class="model", estimate={"outputTokens": 50})
    hand.start(claim, request)
    store.rescue([(claim.fence.attempt_id, claim.fence.delivery)], dead=["worker-1"], why="died", actor="test")
    assert rows(store, "SELECT state FROM attempts") == [("finished",)]
    said = NewReconciliation(
        "rec-1", request.effect_id, "applied", "ann", "seen", "{}", "{}", result_json="{}", usage={"outputTokens": 7}
    )
    store.reconcile(said)
    assert set(rows(store, "SELECT used, reserved FROM budget_lines")) == {(7, 0)}
    assert rows(store, "SELECT state, hold, outcome, result_effect FROM attempts") == [("ready", "place", None, None)]
    assert rows(store, "SELECT state FROM tasks") == [("ready",)]
    assert store.recorded_steps(claim.fence.attempt_id)[1].result_json == "{}"
