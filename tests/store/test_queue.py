"""The queue of attempts: order, fairness, leases and fences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from agentctl.store import holds, task_queue
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, IncompatibleVersion, LeaseLost, NotFoundError, UsageError
from agentctl.store.records import EffectEnd, StartedEffect
from support.builders import LEASE_MS, Driver, Hand, effect_request, new_run, open_store, process_row
from support.clock import ManualClock
from support.rows import attempt, check_chains, dead_identity, effect, everything, scalar, task_state


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    check_chains(opened)
    opened.close()


def started_run(store: Store, run_id: str = "run-1", tasks: int = 3, **changes: object) -> Driver:
    """A run all of whose tasks are enqueued."""
    store.create_run(new_run(run_id, tasks, **changes))
    driver = Driver(store, run_id, f"driver-of-{run_id}")
    driver.enqueue(range(tasks))
    return driver


# -- order -------------------------------------------------------------------------------------------------------------


def test_attempts_of_a_run_are_claimed_in_compiled_order(store: Store) -> None:
    store.create_run(new_run(tasks=4))
    driver = Driver(store, "run-1")
    driver.enqueue([3, 1])
    driver.enqueue([2, 0])
    hand = Hand(store)
    assert [hand.take().task_id for _ in range(4)] == ["t0", "t1", "t2", "t3"]
    assert hand.claim() is None
    assert not store.has_ready(None)


def test_runs_take_turns_whatever_their_size(store: Store) -> None:
    started_run(store, "run-big", 10)
    started_run(store, "run-small", 3)
    hand = Hand(store)
    order = [hand.take().run_id for _ in range(7)]
    assert sorted(order[:2]) == ["run-big", "run-small"]
    assert order.count("run-small") == 3, "the small run waited for the big one"
    for first, second in zip(order[:6:2], order[1:6:2], strict=True):
        assert first != second


def test_a_run_that_comes_later_is_served_soon(store: Store) -> None:
    started_run(store, "run-big", 10)
    hand = Hand(store)
    for _ in range(5):
        hand.take()
    started_run(store, "run-new", 1)
    assert "run-new" in [hand.take().run_id for _ in range(2)]


def test_priority_goes_before_turns(store: Store) -> None:
    started_run(store, "run-low", 2, priority=0)
    started_run(store, "run-high", 3, priority=5)
    hand = Hand(store)
    order = [hand.take().run_id for _ in range(5)]
    assert order == ["run-high"] * 3 + ["run-low"] * 2


def test_a_private_worker_takes_from_its_run_only(store: Store) -> None:
    started_run(store, "run-1", 2)
    started_run(store, "run-2", 2)
    hand = Hand(store)
    assert [hand.take("run-2").run_id for _ in range(2)] == ["run-2", "run-2"]
    assert hand.claim("run-2") is None
    assert store.has_ready(None)
    assert not store.has_ready("run-2")


@pytest.mark.parametrize("how", ["cancelled", "asked to pause", "paused", "ended"])
def test_nothing_is_claimed_from_a_run_that_is_not_to_go_on(store: Store, how: str) -> None:
    driver = started_run(store)
    if how == "cancelled":
        store.request_cancel("run-1", reason="enough", actor="cli-user")
    elif how == "asked to pause":
        assert store.request_pause("run-1", reason="lunch", actor="cli-user") == ("running", None)
    elif how == "paused":
        driver.end("paused", "operator_requested")
    else:
        driver.end("failed", "task_failed", stop="task_failed")
    assert Hand(store).claim() is None
    assert not store.has_ready("run-1")


def test_a_claim_makes_the_task_run(store: Store, clock: ManualClock) -> None:
    started_run(store)
    assert (task_state(store, 0), scalar(store, "SELECT attempt FROM tasks WHERE position = 0")) == ("ready", 0)
    claim = Hand(store).take()
    assert (claim.number, claim.fence.delivery, claim.lease_expires_at) == (1, 1, clock.now() + LEASE_MS)
    assert (task_state(store, 0), scalar(store, "SELECT attempt FROM tasks WHERE position = 0")) == ("running", 1)


# -- leases and fences -------------------------------------------------------------------------------------------------


def test_renewal_pushes_the_lease_of_the_holder_only(store: Store, clock: ManualClock) -> None:
    started_run(store)
    claim = Hand(store).take()
    store.register(process_row("worker-1"))
    clock.advance(5)
    held, drain = store.renew("worker-1", claim.fence, lease_ms=LEASE_MS, rss=1, done=0, failed=0)
    assert (held, drain) == (True, False)
    assert attempt(store, claim.fence.attempt_id)["lease_expires_at"] == clock.now() + LEASE_MS
    for wrong in (
        replace(claim.fence, holder="worker-2"),
        replace(claim.fence, delivery=2),
        replace(claim.fence, attempt_id=claim.fence.attempt_id + 1),
    ):
        clock.advance(1)
        assert not store.renew("worker-1", wrong, lease_ms=LEASE_MS, rss=1, done=0, failed=0)[0]
    assert attempt(store, claim.fence.attempt_id)["lease_expires_at"] == clock.now() - 3000 + LEASE_MS


def test_a_stale_lease_alone_takes_nothing_away(store: Store, clock: ManualClock) -> None:
    """The clock only says when somebody may rescue; the row says who wins."""
    started_run(store, tasks=1)
    hand = Hand(store)
    claim = hand.take()
    clock.advance(3600)
    assert Hand(store, "worker-2").claim() is None
    assert hand.finish(claim) is None
    assert attempt(store, claim.fence.attempt_id)["state"] == "finished"


@pytest.mark.parametrize("again", [False, True], ids=["nobody yet", "another holder"])
def test_a_late_holder_is_refused_and_changes_nothing(store: Store, again: bool) -> None:
    started_run(store, tasks=2)
    late = Hand(store, "worker-1")
    claim = late.take()
    request = effect_request(claim, idempotency="keyed")
    late.start(claim, request)
    store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="it was silent", actor="coordinator")
    if again:
        other = Hand(store, "worker-2")
        second = other.take()
        assert (second.fence.attempt_id, second.fence.delivery) == (claim.fence.attempt_id, 2)
        assert other.start(second, request) == StartedEffect(2)
    before = everything(store)
    end = EffectEnd(request.effect_id, "succeeded", result_json='"late"')
    with pytest.raises(LeaseLost):
        late.finish(claim, effect=end)
    with pytest.raises(LeaseLost):
        late.finish(claim, effect=end, next_claim=True)
    with pytest.raises(LeaseLost):
        late.start(claim, effect_request(claim, ordinal=2), previous=end)
    with pytest.raises(LeaseLost):
        store.release(claim, effect=None, reason="drain")
    with pytest.raises(LeaseLost):
        store.release(claim, effect=replace(end, status="requested"), reason="drain")
    assert everything(store) == before


ACTS = ["renew", "release", "finish", "start", "hold"]


@pytest.mark.parametrize("part", ["delivery", "holder", "state"])
@pytest.mark.parametrize("act", ACTS)
def test_every_part_of_the_fence_counts(store: Store, act: str, part: str) -> None:
    """A holder that got its own attempt back, somebody who never had it, and one that has finished already."""
    started_run(store, tasks=1)
    hand = Hand(store)
    claim = hand.take()
    store.register(process_row(hand.name))
    if part == "delivery":
        store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="it was silent", actor="coordinator")
        assert hand.take().fence == replace(claim.fence, delivery=2)
    elif part == "holder":
        claim = replace(claim, fence=replace(claim.fence, holder="worker-2"))
    else:
        hand.finish(claim)
    before = everything(store)
    if act == "renew":
        with store.database.write() as tx:
            assert not task_queue.renew(tx, claim.fence, lease_ms=LEASE_MS, now=1)
    else:
        with pytest.raises(LeaseLost):
            if act == "release":
                store.release(claim, effect=None, reason="drain")
            elif act == "finish":
                hand.finish(claim)
            elif act == "start":
                hand.start(claim, effect_request(claim))
            else:
                with store.database.write() as tx:
                    holds.hold(tx, claim.fence, "budget", task_state="ready", units={"turns": 1}, now=1)
    assert everything(store) == before


def test_what_is_not_in_flight_cannot_have_been_without_dispatch(store: Store) -> None:
    """A worker that gives back an attempt with an effect which it has confirmed before changes nothing."""
    started_run(store, tasks=1)
    hand = Hand(store)
    claim = hand.take()
    first = effect_request(claim)
    hand.start(claim, first)
    hand.start(claim, effect_request(claim, ordinal=2), EffectEnd(first.effect_id, "succeeded", "1", dispatch=1))
    before = everything(store)
    for status in ("requested", "cancelled", "failed", "succeeded", "uncertain"):
        with pytest.raises(LeaseLost, match="no longer started"):
            store.release(claim, effect=EffectEnd(first.effect_id, status, dispatch=1), reason="drain")
    assert everything(store) == before


def test_an_attempt_is_finished_once(store: Store) -> None:
    started_run(store, tasks=1)
    hand = Hand(store)
    claim = hand.take()
    hand.finish(claim)
    before = everything(store)
    with pytest.raises(LeaseLost):
        hand.finish(claim, "failed")
    assert everything(store) == before


def test_finish_takes_the_next_attempt_in_the_same_transaction(store: Store) -> None:
    started_run(store, tasks=2)
    hand = Hand(store)
    following = hand.finish(hand.take(), next_claim=True)
    assert following is not None
    assert following.task_id == "t1"
    assert hand.finish(following, next_claim=True) is None


# -- release -----------------------------------------------------------------------------------------------------------


def test_a_release_costs_no_delivery(store: Store) -> None:
    started_run(store, tasks=1, max_deliveries=1)
    hand = Hand(store)
    for _ in range(5):
        claim = hand.take()
        store.release(claim, effect=None, reason="drain")
        assert task_state(store, 0) == "ready"
        row = attempt(store, claim.fence.attempt_id)
        assert (row["state"], row["holder"], row["lost"], row["lease_expires_at"]) == ("ready", None, 0, None)
    assert hand.take().fence.delivery == 6


def test_a_release_of_an_effect_that_was_not_dispatched(store: Store) -> None:
    started_run(store, tasks=1)
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim)
    hand.start(claim, request)
    store.release(claim, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    assert (effect(store, request.effect_id)["status"], effect(store, request.effect_id)["dispatches"]) == (
        "requested",
        0,
    )
    again = hand.take()
    assert hand.start(again, request) == StartedEffect(1)


# -- enqueue and unknown things ----------------------------------------------------------------------------------------


def test_a_task_has_one_live_attempt(store: Store) -> None:
    driver = started_run(store, tasks=1)
    before = everything(store)
    with pytest.raises(ConflictError):
        driver.enqueue([0], number=2)
    assert everything(store) == before


def test_a_retry_is_a_new_attempt_with_new_effect_ids(store: Store) -> None:
    driver = started_run(store, tasks=1)
    hand = Hand(store)
    first = hand.take()
    hand.start(first, effect_request(first))
    hand.finish(first, "failed", effect=EffectEnd(effect_request(first).effect_id, "failed"))
    driver.commit(retry=True)
    assert task_state(store, 0) == "retry_scheduled"
    driver.enqueue([0], number=2)
    second = hand.take()
    assert (second.number, second.fence.delivery) == (2, 1)
    assert effect_request(second).effect_id != effect_request(first).effect_id
    assert hand.start(second, effect_request(second)) == StartedEffect(1)


def test_unknown_runs_are_named(store: Store) -> None:
    for verb in (store.get_run, store.run_head, store.run_documents, store.run_settings):
        with pytest.raises(NotFoundError, match="run-9"):
            verb("run-9")
    with pytest.raises(NotFoundError):
        store.request_cancel("run-9", reason="x", actor="x")
    with pytest.raises(NotFoundError):
        store.take_run("run-9", driver="d", epoch=0, lease_ms=1)


# -- creation ----------------------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_run_back(store: Store) -> None:
    assert store.create_run(new_run("run-1", idempotency_key="k")) == ("run-1", True)
    before = everything(store)
    assert store.create_run(new_run("run-2", idempotency_key="k")) == ("run-1", False)
    with pytest.raises(ConflictError, match="other content"):
        store.create_run(new_run("run-3", idempotency_key="k", submission_digest="d" * 64))
    assert everything(store) == before
    assert store.create_run(new_run("run-4", idempotency_key="k2")) == ("run-4", True)


def test_a_run_is_created_whole(store: Store) -> None:
    store.create_run(new_run(tasks=2, memory={"k": "1"}, budget_limits={"turns": 5}))
    state = everything(store)
    assert [len(state[table]) for table in ("runs", "tasks", "run_budgets", "budget_lines", "memory_values")] == [
        1,
        2,
        1,
        1,
        1,
    ]
    assert [len(state[table]) for table in ("audit_events", "checkpoints", "turns", "run_documents")] == [1, 1, 1, 1]
    with pytest.raises(ConflictError):
        store.create_run(new_run("run-2", tasks=0))
    with pytest.raises(ConflictError):
        store.create_run(new_run("run-1"))
    assert everything(store) == state


# -- versions of the future --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["runtime_state_version", "plan_format_version"])
def test_a_run_of_the_future_is_refused_and_left_alone(store: Store, column: str) -> None:
    driver = started_run(store, tasks=3)
    hand = Hand(store)
    claim = hand.take()
    head = store.run_head("run-1")
    with store.database.write() as tx:
        tx.execute(f"UPDATE runs SET {column} = 2")  # noqa: S608
    before = everything(store)
    for verb in (
        lambda: store.get_run("run-1"),
        lambda: store.run_settings("run-1"),
        lambda: store.snapshot("run-1"),
        lambda: store.request_cancel("run-1", reason="x", actor="x"),
        lambda: store.take_run("run-1", driver="d", epoch=head[0], lease_ms=1),
        lambda: driver.end("failed", "x"),
        lambda: hand.start(claim, effect_request(claim)),
        lambda: hand.finish(claim),
        lambda: store.release(claim, effect=None, reason="drain"),
    ):
        with pytest.raises(IncompatibleVersion):
            verb()
    assert hand.claim() is None, "work of a newer agentctl is not for this one"
    assert not store.has_ready(None)
    assert store.open_runs() == []
    assert store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="x", actor="x") == []
    assert everything(store) == before
    with store.database.write() as tx:
        tx.execute(f"UPDATE runs SET {column} = 1")  # noqa: S608


def test_a_run_of_the_future_does_not_keep_others_from_being_served(store: Store) -> None:
    started_run(store, "run-1", tasks=1)
    started_run(store, "run-2", tasks=1)
    with store.database.write() as tx:
        tx.execute("UPDATE runs SET runtime_state_version = 9 WHERE run_id = 'run-2'")
    assert Hand(store).take().run_id == "run-1"


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_row_ends_once_and_is_pruned_when_it_holds_nothing(store: Store, clock: ManualClock) -> None:
    started_run(store, tasks=1)
    store.register(process_row("w3", identity=dead_identity()))
    claim = Hand(store, "w3").take()
    store.set_process_state("w3", "dead")
    clock.advance(3600)
    assert store.prune_processes(older_than_ms=1000) == 0, "its attempt is not resolved"
    store.rescue([(claim.fence.attempt_id, 1)], dead=["w3"], why="died", actor="x")
    assert store.prune_processes(older_than_ms=1000) == 1
    store.register(process_row("w4"))
    store.set_process_state("w4", "stopped")
    store.set_process_state("w4", "idle")
    row = store.get_process("w4")
    assert row is not None
    assert row.state == "stopped"
    assert not store.request_drain("w4")
    with pytest.raises(NotFoundError):
        store.find_process("w4", "worker")


def test_a_name_of_several_processes_names_nobody(store: Store) -> None:
    """Two pools, or workers alone, may give the same name."""
    for process_id in ("worker-a", "worker-b"):
        store.register(process_row(process_id, name="w1"))
    with pytest.raises(UsageError) as caught:
        store.find_process("w1", "worker")
    assert "worker-a" in caught.value.message
    assert "worker-b" in caught.value.message
    assert store.find_process("worker-b", "worker").process_id == "worker-b"


# -- cost --------------------------------------------------------------------------------------------------------------


def test_a_statement_is_compiled_once_whatever_its_values(store: Store) -> None:
    """SQLite may plan by the values that are bound, and then compiles a statement anew for each: a fifth of a task."""
    started_run(store, tasks=30)
    hand = Hand(store)
    compiled: list[tuple[int, str | None]] = []

    def note(operation: int, first: str | None, *rest: str | None) -> int:
        compiled.append((operation, first))
        return apsw.SQLITE_OK

    store.database.connection.set_authorizer(note)  # SQLite asks it whenever it compiles
    for number in range(30):
        if number == 5:  # by then every statement has been used
            assert compiled
            compiled.clear()
        store.peek(None)
        claim = hand.take()
        request = effect_request(claim)
        assert isinstance(hand.start(claim, request), StartedEffect)
        hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", '"x"', None, None, 1))
    assert compiled == []
