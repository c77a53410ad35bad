"""Approvals: one question, one transaction, one answer, for exactly one action."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from agentctl.store.approvals import approval_id_of, redacted
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, NotFoundError, RunMoved
from agentctl.store.records import AttemptHeld, Batch, Claim, EffectRequest, StartedEffect
from support import store_children
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.children import SPAWN, Children
from support.clock import ManualClock
from support.rows import attempt, check_chains, effect, everything, rows, scalar, task_state
from support.scale import repeats


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    check_chains(opened)
    opened.close()


def asked(store: Store, *, run_id: str = "run-1", tasks: int = 1) -> tuple[Driver, Claim, EffectRequest, str]:
    """A run whose first task waits for an approval."""
    store.create_run(new_run(run_id, tasks))
    driver = Driver(store, run_id)
    driver.enqueue(list(range(tasks)))
    hand = Hand(store)
    claim = hand.take(run_id)
    request = effect_request(claim, ask=True)
    answer = hand.start(claim, request)
    assert isinstance(answer, AttemptHeld)
    assert answer.approval_id == approval_id_of(request.effect_id)
    return driver, claim, request, answer.approval_id


def pause(driver: Driver) -> None:
    driver.end("paused", "approval_required")


def test_the_question_the_effect_and_the_task_are_one(store: Store) -> None:
    _, claim, request, _approval_id = asked(store)
    assert effect(store, request.effect_id)["status"] == "waiting_for_approval"
    assert effect(store, request.effect_id)["dispatches"] == 0
    held = attempt(store, claim.fence.attempt_id)
    assert (held["state"], held["hold"], held["holder"], held["lost"]) == ("ready", "approval", None, 0)
    assert task_state(store, 0) == "waiting_for_approval"
    assert rows(store, "SELECT status, tool, capability FROM approvals") == [("pending", "demo.operation", "demo")]
    assert Hand(store, "other").claim() is None, "nobody can claim what waits"
    assert scalar(store, "SELECT COUNT(*) FROM audit_events WHERE event_type = 'approval.requested'") == 1


def test_an_approved_action_is_sent_by_the_same_attempt(store: Store) -> None:
    driver, claim, request, approval_id = asked(store)
    assert store.resolve_approval(approval_id, approve=True, actor="ann", reason="fine") == "run-1"
    assert effect(store, request.effect_id)["status"] == "requested"
    assert Hand(store).claim() is None, "it has no place yet"
    assert driver.let_in() == [0]
    again = Hand(store).take()
    assert (again.fence.attempt_id, again.fence.delivery) == (claim.fence.attempt_id, 2)
    assert Hand(store).start(again, request) == StartedEffect(1)
    decided = rows(store, "SELECT status, resolved_by, resolution_reason FROM approvals")
    assert decided == [("approved", "ann", "fine")]
    assert rows(store, "SELECT actor FROM audit_events WHERE event_type = 'approval.approved'") == [("ann",)]


CHANGES = {
    "risk": "critical",
    "operation": "other.operation",
    "effect_class": "process_execution",
    "idempotency": "idempotent",
    "input_digest": "0" * 64,
    "expected_json": '{"path":"elsewhere"}',
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_action_than_the_approved_one_is_not_sent(store: Store, field: str) -> None:
    driver, _, request, approval_id = asked(store)
    store.resolve_approval(approval_id, approve=True, actor="ann", reason="")
    driver.let_in()
    again = Hand(store).take()
    other = dataclasses.replace(request, **{field: CHANGES[field]})
    before = everything(store)
    with pytest.raises(ConflictError, match="not the action that was approved"):
        Hand(store).start(again, other)
    assert everything(store) == before
    with store.database.write() as tx, pytest.raises(apsw.ConstraintError, match="decided once"):
        tx.execute("UPDATE approvals SET status = 'rejected'")


def test_what_nobody_was_asked_about_is_not_sent_once_a_person_has_to_be_asked(store: Store) -> None:
    """An earlier delivery has requested it without a question: that is no approval."""
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim, idempotency="idempotent")
    hand.start(claim, request)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="test")
    again = hand.take()
    before = everything(store)
    with pytest.raises(ConflictError, match="was never approved"):
        hand.start(again, effect_request(again, idempotency="idempotent", ask=True))
    assert everything(store) == before


def test_a_rejected_action_fails_its_task(store: Store) -> None:
    driver, claim, request, approval_id = asked(store)
    store.resolve_approval(approval_id, approve=False, actor="bob", reason="too much")
    assert effect(store, request.effect_id)["status"] == "cancelled"
    [done] = driver.commit()
    assert (done.attempt_id, done.outcome) == (claim.fence.attempt_id, "failed")
    assert task_state(store, 0) == "failed"
    assert json.loads(done.error_json or "")["message"] == "bob rejected it: too much"


@pytest.mark.parametrize("second", [True, False])
def test_the_second_answer_is_told_of_the_first(store: Store, second: bool) -> None:
    _, _, _, approval_id = asked(store)
    store.resolve_approval(approval_id, approve=True, actor="ann", reason="fine")
    with pytest.raises(ConflictError, match="was approved by ann before: fine"):
        store.resolve_approval(approval_id, approve=second, actor="bob", reason="")
    with pytest.raises(NotFoundError):
        store.resolve_approval("approval-0000000000000000", approve=True, actor="ann", reason="")


def test_a_paused_run_runs_again_and_waits_for_a_driver(store: Store) -> None:
    driver, _, _, approval_id = asked(store)
    pause(driver)
    store.resolve_approval(approval_id, approve=True, actor="ann", reason="")
    run = store.get_run("run-1")
    assert (run.state, run.reason, run.driver) == ("running", None, None)
    assert [found.run_id for found in store.open_runs()] == ["run-1"]


def test_a_run_that_an_operator_has_paused_stays_paused(store: Store) -> None:
    driver, _, _, approval_id = asked(store)
    pause(driver)
    assert store.request_pause("run-1", reason="night", actor="op") == ("paused", "paused_by_operator")
    store.resolve_approval(approval_id, approve=True, actor="ann", reason="")
    run = store.get_run("run-1")
    assert (run.state, run.reason) == ("paused", "paused_by_operator")


def test_a_stop_ends_the_question(store: Store) -> None:
    driver, _, request, approval_id = asked(store, tasks=2)
    driver.write(Batch(stop="task_failed"))
    assert rows(store, "SELECT status, resolved_by FROM approvals") == [("cancelled", "runtime")]
    assert effect(store, request.effect_id)["status"] == "cancelled"
    assert task_state(store, 0) == "cancelled"
    with pytest.raises(ConflictError, match="was cancelled by runtime"):
        store.resolve_approval(approval_id, approve=True, actor="ann", reason="")


def test_a_run_that_is_being_cancelled_takes_no_answer(store: Store) -> None:
    _, _, _, approval_id = asked(store)
    store.request_cancel("run-1", reason="x", actor="op")
    with pytest.raises(ConflictError, match="being cancelled"):
        store.resolve_approval(approval_id, approve=True, actor="ann", reason="")


def test_a_batch_that_was_decided_before_the_answer_is_refused(store: Store) -> None:
    """Else the driver would pause a run that can move, and it would stay so for ever."""
    driver, _, _, approval_id = asked(store)
    revision = store.run_head("run-1")[1]
    store.resolve_approval(approval_id, approve=True, actor="ann", reason="")
    before = everything(store)
    batch = Batch(run_state="paused", run_reason="approval_required")
    with pytest.raises(RunMoved, match="has changed"):
        store.commit_batch(driver.run, batch, driver=driver.name, epoch=driver.epoch, revision=revision)
    assert everything(store) == before


@pytest.mark.slow
def test_two_processes_that_decide_at_one_instant(tmp_path: Path, children: Children) -> None:
    store = open_store(tmp_path, SystemClock())
    for number in range(repeats(50, at_least=2)):
        _, _, request, approval_id = asked(store, run_id=f"run-{number}")
        barrier = SPAWN.Barrier(2)
        lines = []
        for approve in (True, False):
            here, there = SPAWN.Pipe(duplex=False)
            children.spawn(store_children.decide, store.path, approval_id, approve, barrier, there)
            lines.append(here)
        said = [line.recv() for line in lines]
        assert sorted(text == "decided" for text in said) == [False, True]
        [(status, actor)] = rows(store, "SELECT status, resolved_by FROM approvals WHERE approval_id = ?", approval_id)
        assert (status, actor) == (("approved", "yes") if said[0] == "decided" else ("rejected", "no"))
        [loser] = [text for text in said if text != "decided"]
        assert f"{status} by {actor}" in loser
        wanted = "requested" if status == "approved" else "cancelled"
        assert effect(store, request.effect_id)["status"] == wanted
    assert children.join() and set(children.join()) <= {0}
    store.close()


def test_what_looks_like_a_secret_is_not_shown() -> None:
    value = {"Token": "x", "list": [{"PASSWORD": 1, "ok": 2}], "apikey": {"deep": 1}, "tokens": 3}
    hidden = "[REDACTED]"
    assert redacted(value) == {"Token": hidden, "list": [{"PASSWORD": hidden, "ok": 2}], "apikey": hidden, "tokens": 3}


def test_neither_in_what_would_be_done(store: Store) -> None:
    """The expected effect of a remote call or of an extension repeats its input."""
    store.create_run(new_run("run-1", 1))
    driver = Driver(store, "run-1")
    driver.enqueue([0])
    claim = Hand(store).take()
    expected = '{"arguments":{"n":1,"token":"t-1"},"tool":"add"}'
    request = dataclasses.replace(effect_request(claim, ask=True), expected_json=expected)
    assert isinstance(Hand(store).start(claim, request), AttemptHeld)
    assert json.loads(scalar(store, "SELECT expected_json FROM approvals")) == {
        "arguments": {"n": 1, "token": "[REDACTED]"},
        "tool": "add",
    }
    store.resolve_approval(approval_id_of(request.effect_id), approve=True, actor="ann", reason="")
    driver.let_in()
    assert Hand(store).start(Hand(store).take(), request) == StartedEffect(1)
