"""Finish, claim and start in one transaction: an attempt that a worker has prepared for (`ahead` of `Store.finish`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from agentctl.store.board import FRESH_MS, SLOTS, UP_MS, Board, _number_and_place
from agentctl.store.engine import LONE_SECONDS, NOTHING_NEWER_SECONDS, Store
from agentctl.store.errors import LeaseLost
from agentctl.store.records import (
    AttemptEnd,
    Batch,
    Candidate,
    Claim,
    EffectEnd,
    EffectRequest,
    Fence,
    Following,
    RecordedEffect,
    StartedEffect,
    StartRefused,
)
from support.builders import LEASE_MS, Driver, Hand, effect_request, new_run, open_store
from support.clock import ManualClock
from support.rows import everything, rows, scalar

DONE = AttemptEnd("succeeded", result_json='"done"')


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def started_run(store: Store, run_id: str = "run-1", tasks: int = 3, **changes: object) -> Driver:
    store.create_run(new_run(run_id, tasks, **changes))
    driver = Driver(store, run_id)
    driver.enqueue(range(tasks))
    return driver


def prepared(store: Store, *, effect_class: str = "external_mutate") -> tuple[Candidate, EffectRequest]:
    """What a worker does before it finishes: look for a candidate and make its request."""
    candidate = store.peek(None)
    assert candidate is not None
    fence = Fence(candidate.attempt_id, 1, "somebody")
    claim = Claim(fence, candidate.run_id, candidate.task_id, candidate.number, 1, "{}", "trace", 0, 0)
    return candidate, effect_request(claim, effect_class=effect_class)


def finish(store: Store, claim: Claim, ahead: tuple[Candidate, EffectRequest] | None) -> Following | None:
    following, _ = store.finish(
        claim, DONE, effect=None, next_claim=True, only_run=None, lease_ms=LEASE_MS, ahead=ahead
    )
    return following


def test_the_candidate_is_claimed_and_started(store: Store) -> None:
    started_run(store, tasks=4)
    first = Hand(store).take()
    ahead = prepared(store)
    following = finish(store, first, ahead)
    assert following is not None
    assert following.answer == StartedEffect(1)
    assert following.claim.fence == Fence(ahead[0].attempt_id, 1, first.fence.holder)
    assert rows(store, "SELECT status, dispatches FROM effects") == [("started", 1)]
    assert scalar(store, "SELECT state FROM tasks WHERE task_id = ?", ahead[0].task_id) == "running"
    types = [row[0] for row in rows(store, "SELECT event_type FROM audit_events ORDER BY sequence")]
    assert types[-3:] == ["task.transition", "effect.requested", "effect.started"]
    Hand(store).finish(following.claim, effect=EffectEnd(ahead[1].effect_id, "succeeded"))


def test_a_candidate_that_somebody_else_has_taken_costs_nothing(store: Store) -> None:
    started_run(store, tasks=4)
    first = Hand(store).take()
    ahead = prepared(store)
    other = Hand(store, "worker-2").take()
    assert other.fence.attempt_id == ahead[0].attempt_id
    following = finish(store, first, ahead)
    assert following is not None
    assert following.answer is None
    assert following.claim.fence.attempt_id not in (other.fence.attempt_id, first.fence.attempt_id)
    assert rows(store, "SELECT * FROM effects") == []


def test_a_candidate_that_was_delivered_before_is_left_to_the_ordinary_way(store: Store) -> None:
    """Its first delivery may have recorded what was there before; only a worker that reads that may go on with it."""
    started_run(store, tasks=2)
    first = Hand(store).take()
    ahead = prepared(store)
    other = Hand(store, "worker-2").take()
    store.release(other, effect=None, reason="drain")
    assert store.peek(None) is None
    following = finish(store, first, ahead)
    assert following is not None
    assert following.claim.fence == Fence(other.fence.attempt_id, 2, first.fence.holder)
    assert following.answer is None


def test_after_a_cancel_nothing_is_started(store: Store) -> None:
    started_run(store, tasks=4)
    first = Hand(store).take()
    ahead = prepared(store)
    store.request_cancel("run-1", reason="test", actor="tester")
    following = finish(store, first, ahead)
    assert following is not None
    assert following.answer == StartRefused("cancel_requested")
    assert rows(store, "SELECT * FROM effects") == []


def test_what_was_paused_meanwhile_is_given_back_and_not_cancelled(store: Store) -> None:
    """The run has paused between the look and the claim of a worker that comes from another one."""
    driver = started_run(store, tasks=1)
    ahead = prepared(store)
    store.request_pause("run-1", reason="test", actor="tester")
    driver.end("paused", "paused_by_operator")
    following = store.claim("worker-1", only_run=None, lease_ms=LEASE_MS, awake=False, ahead=ahead)
    assert following is not None
    assert following.answer == StartRefused("paused")
    assert rows(store, "SELECT * FROM effects") == []


def test_a_candidate_that_a_stop_has_closed_is_not_taken(store: Store) -> None:
    """Nobody has held it, so it is as fresh as before; it is over all the same."""
    driver = started_run(store, tasks=2)
    first = Hand(store).take()
    ahead = prepared(store)
    driver.write(Batch(stop="task_failed"))
    assert finish(store, first, ahead) is None
    assert rows(store, "SELECT * FROM effects") == []
    assert scalar(store, "SELECT state FROM tasks WHERE task_id = ?", ahead[0].task_id) == "cancelled"


def test_a_lost_delivery_claims_and_starts_nothing(store: Store) -> None:
    started_run(store, tasks=4)
    first = Hand(store).take()
    ahead = prepared(store)
    store.rescue([(first.fence.attempt_id, 1)], dead=[], why="test", actor="tester")
    before = everything(store)
    with pytest.raises(LeaseLost):
        finish(store, first, ahead)
    assert everything(store) == before


def test_a_worker_that_drains_gives_the_start_back(store: Store) -> None:
    started_run(store, tasks=4)
    first = Hand(store).take()
    ahead = prepared(store)
    following = finish(store, first, ahead)
    assert following is not None
    assert isinstance(following.answer, StartedEffect)
    unsent = EffectEnd(ahead[1].effect_id, "requested", dispatch=following.answer.dispatch)
    store.release(following.claim, effect=unsent, reason="drain")
    assert rows(store, "SELECT status, dispatches FROM effects") == [("requested", 0)]
    again = Hand(store, "worker-2").take()
    assert again.fence == Fence(ahead[0].attempt_id, 2, "worker-2")
    assert Hand(store, "worker-2").start(again, ahead[1]) == StartedEffect(1)


def test_a_budget_that_is_used_up_refuses_the_start_but_not_the_finish(store: Store) -> None:
    started_run(store, tasks=4, budget_limits={"turns": 1})
    first = Hand(store).take()
    candidate, request = prepared(store)
    greedy = replace(request, estimate={"turns": 2})
    following = finish(store, first, (candidate, greedy))
    assert following is not None
    assert isinstance(following.answer, StartRefused)
    assert following.answer.reason == "budget"
    assert not isinstance(following.answer, RecordedEffect)
    assert scalar(store, "SELECT state FROM attempts WHERE attempt_id = ?", first.fence.attempt_id) == "finished"


def board_of(store: Store, slot: int) -> Board:
    """The board as another process sees it; `slot` is no other's in this test, since they count from this one's pid."""
    return Board(store.database.gate.line, store.clock, os.getpid() + slot)


def test_candidates_lie_in_compiled_order_and_are_those_of_one_worker_each(store: Store) -> None:
    driver: Driver = started_run(store, tasks=3)
    seen: list[str] = []
    for slot in (1, 2, 3):
        candidate = store.peek(None)
        assert candidate is not None
        seen.append(candidate.task_id)
        board_of(store, slot).announce(candidate.attempt_id)
    assert seen == ["t0", "t1", "t2"]
    assert store.peek(None) is None
    assert store.has_ready(None), "others prepare for them, but nobody has claimed them"
    assert store.peek("run-unknown") is None
    assert driver.run.run_id == "run-1"


def test_what_was_announced_long_ago_is_anybodys(store: Store, clock: ManualClock) -> None:
    started_run(store, tasks=1)
    candidate = store.peek(None)
    assert candidate is not None
    board_of(store, 1).announce(candidate.attempt_id)
    assert store.peek(None) is None
    clock.advance(FRESH_MS / 1000 + 0.001)
    assert store.peek(None) == candidate


def test_what_was_announced_before_the_machine_was_started_again_is_anybodys(store: Store, clock: ManualClock) -> None:
    """The clock of the board counts from the start of the machine, and its file is still there after the next one."""
    started_run(store, tasks=1)
    candidate = store.peek(None)
    assert candidate is not None
    earlier = ManualClock()
    earlier.advance(clock.monotonic() + 1_000_000)
    Board(store.database.gate.line, earlier, os.getpid() + 1).announce(candidate.attempt_id)
    assert store.peek(None) == candidate


def test_a_claim_leaves_what_others_prepare_for_to_them(store: Store) -> None:
    started_run(store, tasks=3)
    candidate = store.peek(None)
    assert candidate is not None
    board_of(store, 1).announce(candidate.attempt_id)
    assert [Hand(store).take().task_id for _ in range(3)] == ["t1", "t2", "t0"], "the last one all the same"


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64 * 16, b"\x7f" * 5000])
def test_a_board_that_somebody_has_scribbled_on_stops_nobody(store: Store, content: bytes) -> None:
    started_run(store, tasks=2)
    line = store.database.gate.line
    os.ftruncate(line, 0)
    os.pwrite(line, content, 0)
    candidate = store.peek(None)
    assert candidate is not None
    assert candidate.task_id == "t0"
    assert Hand(store).take().task_id == "t0"


def test_a_run_that_was_alone_is_looked_up_again_soon(store: Store, clock: ManualClock) -> None:
    """Who looks ahead believes for an instant that the run is still alone; a run of higher priority waits no longer."""
    started_run(store, tasks=2)
    assert seen_run(store) == "run-1"
    started_run(store, "run-2", priority=5)
    assert seen_run(store) == "run-1"
    clock.advance(2 * LONE_SECONDS)
    assert seen_run(store) == "run-2"


def test_a_lone_run_without_work_hides_no_other(store: Store) -> None:
    started_run(store, tasks=1)
    assert seen_run(store) == "run-1"
    Hand(store).take()
    started_run(store, "run-2")
    assert seen_run(store) == "run-2"


def test_what_a_newer_agentctl_has_written_into_is_left_alone_soon(store: Store, clock: ManualClock) -> None:
    """By those who look ahead after a moment, and by a claim without such a look at once."""
    started_run(store, tasks=3)
    assert seen_run(store) == "run-1"
    started_run(store, "run-2", tasks=3)
    clock.advance(2 * LONE_SECONDS)
    assert seen_run(store) == "run-1"
    with store.database.write() as tx:
        tx.execute("UPDATE tasks SET metadata_version = 99 WHERE run_id = 'run-1'")
    assert Hand(store).take().run_id == "run-2"
    clock.advance(NOTHING_NEWER_SECONDS)
    assert seen_run(store) == "run-2"


def seen_run(store: Store) -> str | None:
    candidate = store.peek(None)
    return None if candidate is None else candidate.run_id


def test_a_look_ahead_leaves_no_statement_open(store: Store) -> None:
    """One that was not read to its end would keep its snapshot, and the log, for as long as a task runs."""
    started_run(store, tasks=3)
    first = store.peek(None)
    assert first is not None
    board_of(store, 1).announce(first.attempt_id)
    assert store.peek(None) is not None
    with contextlib.closing(apsw.Connection(str(store.path))) as other:
        busy, left, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0]
    assert (busy, left) == (0, 0)


# -- drivers that need no call --------------------------------------------------------------------------------------


def test_who_is_up_need_not_be_called(store: Store, clock: ManualClock) -> None:
    mine, theirs = board_of(store, 0), board_of(store, 1)
    assert not theirs.is_up("driver-1")
    mine.stay_up("driver-1")
    assert theirs.is_up("driver-1")
    assert not theirs.is_up("driver-2")
    mine.lie_down("driver-1")
    assert not theirs.is_up("driver-1")
    mine.stay_up("driver-1")
    clock.advance((UP_MS + 1) / 1000)
    assert not theirs.is_up("driver-1"), "it may be stopped"


def test_what_a_driver_said_before_the_last_boot_counts_no_more(store: Store, clock: ManualClock) -> None:
    earlier = ManualClock()
    earlier.advance(clock.monotonic() + 1_000_000)
    Board(store.database.gate.line, earlier).stay_up("driver-1")
    assert not board_of(store, 1).is_up("driver-1")


def test_two_drivers_on_one_place_are_both_called(store: Store) -> None:
    names = [f"driver-{number}" for number in range(SLOTS + 1)]
    by_place: dict[int, list[str]] = {}
    for name in names:
        by_place.setdefault(_number_and_place(name)[1], []).append(name)
    first, second = next(pair for pair in by_place.values() if len(pair) > 1)[:2]
    board = board_of(store, 1)
    board.stay_up(first)
    board.stay_up(second)
    assert not board.is_up(first)
    assert board.is_up(second)


def test_drivers_and_candidates_share_no_place(store: Store) -> None:
    announced = set(range(SLOTS))
    for slot in announced:
        board_of(store, slot).announce(slot)
    for number in range(SLOTS * 3):
        board_of(store, 0).stay_up(f"driver-{number}")
    assert board_of(store, 0).others() == announced - {0}


def test_whoever_lies_down_is_called(store: Store) -> None:
    """A call goes to the driver of a finished attempt unless it has said that it will look."""
    with contextlib.closing(store.wakes.listen("driver-1")) as listener:
        store.stay_up("driver-1", True)
        store.wake_unless_up("driver-1")
        with pytest.raises(BlockingIOError):
            listener.recv(16)
        store.stay_up("driver-1", False)
        store.wake_unless_up("driver-1")
        assert listener.recv(16)
