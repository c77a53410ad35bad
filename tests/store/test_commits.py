"""The batch commit, the driver's lease, and the chain of checkpoints."""

from __future__ import annotations

import contextlib
import json
import select
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentctl.store import audit, wakeups
from agentctl.store.canonical import canonical, text_digest
from agentctl.store.engine import BATCH_RESULTS, Store
from agentctl.store.errors import ConflictError, CorruptStore, IncompatibleVersion, RunMoved
from agentctl.store.records import AttemptHeld, Batch, EffectEnd, Event
from support.builders import LEASE_MS, Driver, Hand, effect_request, new_run, open_store, process_row, refresh
from support.clock import ManualClock
from support.rows import attempt, check_chains, effect, everything, one, rebuild, rows, scalar, task_state


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def driver(store: Store) -> Driver:
    store.create_run(new_run(tasks=5, memory={"k": '"initial"'}))
    return Driver(store, "run-1")


def final(position: int, state: str = "succeeded", text: str | None = '"out"') -> tuple[object, ...]:
    digest = None if text is None else text_digest(text)
    return (state, 1, None, text, digest, None, None, None, None, position)


def ending(*positions: int) -> Batch:
    batch = Batch()
    for position in positions:
        batch.finals.append(final(position))
        batch.changes.append([position, "succeeded", 1, text_digest('"out"'), None])
        batch.events.append(Event("task.transition", f"t{position}", '{"to":"succeeded"}'))
    return batch


# -- who is called ----------------------------------------------------------------------------------------------------


def test_new_work_calls_a_worker_that_may_take_it(store: Store, driver: Driver) -> None:
    """The workers of another foreground run sleep, too, and came first; they take nothing of this one."""
    with contextlib.ExitStack() as stack:
        listeners = {}
        for name, only_run in (("worker-1", "run-9"), ("worker-2", "run-1"), ("worker-3", None)):
            store.register(process_row(name, state="idle", only_run=only_run))
            listeners[name] = stack.enter_context(contextlib.closing(store.wakes.listen(name)))

        def called() -> list[str]:
            found = select.select(list(listeners.values()), [], [], 0)[0]
            for listener in found:
                wakeups.drain(listener)
            return [name for name, listener in listeners.items() if listener in found]

        driver.enqueue([0])
        assert called() == ["worker-2"]
        driver.enqueue([1, 2, 3])
        assert called() == ["worker-2", "worker-3"]
        store.wake_workers("run-1", 1)
        assert called() == ["worker-2"]
        claim = Hand(store, "worker-4").take()
        store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="x")
        assert called() == ["worker-1", "worker-2", "worker-3"], "it may be work of whatever run"


# -- the driver's lease ------------------------------------------------------------------------------------------------


def test_a_batch_of_a_former_driver_writes_nothing(store: Store, driver: Driver) -> None:
    new = store.take_run("run-1", driver="driver-2", epoch=driver.epoch, lease_ms=LEASE_MS)
    assert new == driver.epoch + 1
    before = everything(store)
    with pytest.raises(RunMoved):
        driver.write(ending(0))
    assert everything(store) == before


def test_a_batch_of_an_earlier_epoch_of_the_same_driver_writes_nothing(store: Store, driver: Driver) -> None:
    """It has lost the run and taken it again: what it had decided before was decided on another state."""
    again = Driver(store, "run-1", driver.name)
    assert again.epoch == driver.epoch + 1
    before = everything(store)
    with pytest.raises(RunMoved, match="another process"):
        driver.enqueue([0])
    assert everything(store) == before


def test_a_batch_of_the_same_epoch_by_another_name_writes_nothing(store: Store, driver: Driver) -> None:
    driver.name = "driver-2"
    with pytest.raises(RunMoved):
        driver.write(ending(0))


@pytest.mark.parametrize("what", ["cancel", "pause", "withdrawn pause"])
def test_a_batch_decided_before_a_person_has_spoken_is_decided_again(store: Store, driver: Driver, what: str) -> None:
    if what == "withdrawn pause":
        store.request_pause("run-1", reason="lunch", actor="cli-user")
    revision = store.run_head("run-1")[1]
    if what == "cancel":
        store.request_cancel("run-1", reason="enough", actor="cli-user")
    elif what == "pause":
        store.request_pause("run-1", reason="lunch", actor="cli-user")
    else:
        assert store.withdraw_pause("run-1", actor="cli-user")
    assert store.run_head("run-1")[1] == revision + 1
    before = everything(store)
    with pytest.raises(RunMoved):
        store.commit_batch(driver.run, ending(0), driver=driver.name, epoch=driver.epoch, revision=revision)
    assert everything(store) == before
    driver.write(ending(0))


def test_a_run_is_taken_once_per_epoch(store: Store, driver: Driver) -> None:
    assert store.take_run("run-1", driver="late", epoch=driver.epoch - 1, lease_ms=1) is None
    assert store.take_run("run-1", driver="next", epoch=driver.epoch, lease_ms=1) == driver.epoch + 1
    assert store.take_run("run-1", driver="late", epoch=driver.epoch, lease_ms=1) is None
    assert refresh(store, "run-1").driver == "next"


def test_a_run_that_has_ended_is_not_driven(store: Store, driver: Driver) -> None:
    driver.end("failed", "task_failed", stop="task_failed")
    run = refresh(store, "run-1")
    assert (run.state, run.driver, run.ended_at) == ("failed", None, store.clock.now())
    assert store.take_run("run-1", driver="d", epoch=run.epoch, lease_ms=1) is None
    assert store.take_run("run-1", driver="d", epoch=run.epoch, lease_ms=1, resume=True) is None
    assert store.request_cancel("run-1", reason="late", actor="x") == (False, "failed")
    with pytest.raises(RunMoved):
        driver.write(ending(0))
    check_chains(store)


def test_a_paused_run_goes_on_only_when_it_is_resumed(store: Store, driver: Driver) -> None:
    driver.end("paused", "uncertain_effect")
    run = refresh(store, "run-1")
    with pytest.raises(RunMoved):
        driver.write(ending(0))
    assert store.take_run("run-1", driver="d", epoch=run.epoch, lease_ms=1) is None
    assert store.take_run("run-1", driver="d", epoch=run.epoch, lease_ms=1, resume=True) == run.epoch + 1
    again = refresh(store, "run-1")
    assert (again.state, again.reason, again.revision) == ("running", None, run.revision + 1)
    assert scalar(store, "SELECT COUNT(*) FROM turns") == 1, "workers serve it again"
    check_chains(store)


def test_only_its_driver_gives_a_run_back(store: Store, driver: Driver) -> None:
    store.leave_run("run-1", driver="somebody", epoch=driver.epoch)
    store.leave_run("run-1", driver=driver.name, epoch=driver.epoch - 1)
    assert refresh(store, "run-1").driver == driver.name
    store.leave_run("run-1", driver=driver.name, epoch=driver.epoch)
    assert refresh(store, "run-1").driver is None


# -- what a batch writes -----------------------------------------------------------------------------------------------


def test_results_become_history_in_compiled_order(store: Store, driver: Driver) -> None:
    driver.enqueue(range(5))
    hands = [Hand(store, f"worker-{number}") for number in range(5)]
    claims = [hand.take() for hand in hands]
    for hand, claim in reversed(list(zip(hands, claims, strict=True))):
        hand.finish(claim, result=canonical(claim.task_id))
    found, more = store.finished_attempts(driver.run)
    assert [done.position for done in found] == [0, 1, 2, 3, 4]
    assert not more
    driver.commit()
    outputs = store.task_outputs(driver.run, [0, 1, 2, 3, 4])
    assert {position: text for position, (text, _) in outputs.items()} == {n: f'"t{n}"' for n in range(5)}
    assert store.finished_attempts(driver.run) == ([], False)
    check_chains(store)


def test_a_result_that_is_the_effects_is_stored_once(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim)
    hand.start(claim, request)
    hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", result_json='"of the effect"'), result=None)
    [done] = driver.commit()
    assert done.result_json == '"of the effect"'
    assert scalar(store, "SELECT output_json FROM tasks WHERE position = 0") == '"of the effect"'


def test_batches_are_bounded_in_number(store: Store) -> None:
    store.create_run(new_run(tasks=BATCH_RESULTS + 1))
    driver = Driver(store, "run-1")
    driver.enqueue(range(BATCH_RESULTS + 1))
    hand = Hand(store)
    claim = hand.claim()
    while claim is not None:
        claim = hand.finish(claim, next_claim=True)
    found, more = store.finished_attempts(driver.run)
    assert (len(found), more) == (BATCH_RESULTS, True)
    driver.commit()
    found, more = store.finished_attempts(driver.run)
    assert (len(found), more) == (1, False)


def test_batches_are_bounded_in_bytes_and_a_larger_result_comes_alone(store: Store, driver: Driver) -> None:
    driver.enqueue(range(3))
    hand = Hand(store)
    for size in (1, 9, 1):
        hand.finish(hand.take(), result=canonical("x" * (size * 1024 * 1024)))
    sizes = []
    more = True
    while more:
        found, more = store.finished_attempts(driver.run)
        sizes.append(len(found))
        driver.commit()
    assert sizes == [1, 1, 1]


def test_an_attempt_gets_its_place_once(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    question = hand.start(claim, effect_request(claim, ask=True))
    assert isinstance(question, AttemptHeld) and question.approval_id is not None
    store.resolve_approval(question.approval_id, approve=True, actor="ann", reason="")
    assert driver.let_in() == [0]
    before = everything(store)
    with pytest.raises(RunMoved, match="no longer held"):
        driver.write(Batch(unheld=[claim.fence.attempt_id]))
    assert everything(store) == before


@pytest.mark.parametrize("reason", ["task_failed", "deadline_exceeded", "cancel_requested"])
def test_a_stop_leaves_the_answer_of_a_person_to_be_committed(store: Store, driver: Driver, reason: str) -> None:
    """The task waits for an approval, and somebody has said no; its driver has not come to that yet."""
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    question = hand.start(claim, effect_request(claim, ask=True))
    assert isinstance(question, AttemptHeld) and question.approval_id is not None
    store.resolve_approval(question.approval_id, approve=False, actor="ann", reason="")
    driver.write(Batch(stop=reason))
    assert task_state(store, 0) == "waiting_for_approval"
    driver.commit()
    [(state, error)] = rows(store, "SELECT state, error_json FROM tasks WHERE position = 0")
    assert (state, json.loads(error)["code"]) == ("failed", "approval_rejected")


def test_a_batch_is_all_or_nothing(store: Store, driver: Driver) -> None:
    driver.write(ending(0))
    before = everything(store)
    with pytest.raises(ConflictError):
        driver.write(ending(1, 0))
    doubled = ending(2)
    doubled.memory = [("m", 2, "1"), ("m", 2, "2")]
    with pytest.raises(ConflictError):
        driver.write(doubled)
    for gone in (Batch(closed=[999]), Batch(parked=[999])):
        gone.finals = [final(3)]
        with pytest.raises(RunMoved):
            driver.write(gone)
    assert everything(store) == before


def test_memory_rows_are_those_of_the_batch(store: Store, driver: Driver) -> None:
    batch = ending(0)
    batch.memory = [("k", 0, '"new"'), ("gone", 0, None)]
    driver.write(batch)
    assert store.snapshot("run-1").memory == [("gone", 0, None), ("k", -1, '"initial"'), ("k", 0, '"new"')]
    check_chains(store)


def test_the_output_of_a_run(store: Store, driver: Driver) -> None:
    batch = ending(0, 1, 2, 3, 4)
    batch.run_state, batch.run_output_json = "succeeded", '{"a":1}'
    driver.write(batch)
    assert store.run_output("run-1") == '{"a":1}'
    assert refresh(store, "run-1").state == "succeeded"
    assert Hand(store).claim() is None
    check_chains(store)


# -- stop --------------------------------------------------------------------------------------------------------------


def stopped_run(store: Store, driver: Driver) -> dict[str, int]:
    """t0 runs, t1 is ready, t2 waits for a person, t3 waits for its next try, t4 is pending."""
    driver.enqueue([0, 1, 2, 3])
    hands = {name: Hand(store, f"worker-{name}") for name in "abcd"}
    claims = {name: hand.take() for name, hand in hands.items()}
    hands["c"].start(claims["c"], effect_request(claims["c"]))
    store.rescue([(claims["c"].fence.attempt_id, 1)], dead=[], why="died", actor="x")
    hands["d"].finish(claims["d"], "failed")
    driver.commit(retry=True)
    request = effect_request(claims["b"])
    hands["b"].start(claims["b"], request)
    store.release(claims["b"], effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    states = [task_state(store, position) for position in range(5)]
    assert states == ["running", "ready", "waiting_for_effect", "retry_scheduled", "pending"]
    return {name: claim.fence.attempt_id for name, claim in claims.items()}


@pytest.mark.parametrize("reason", ["task_failed", "cancel_requested"])
def test_a_stop_ends_what_has_not_begun(store: Store, driver: Driver, reason: str) -> None:
    attempts = stopped_run(store, driver)
    ended = driver.write(Batch(stop=reason))
    waiting = (2, "cancelled", reason) if reason == "cancel_requested" else (2, "failed", "uncertain_effect")
    assert ended == [(1, "cancelled", reason), waiting, (3, "cancelled", reason), (4, "cancelled", reason)]
    assert [task_state(store, position) for position in range(5)] == ["running", *(state for _, state, _ in ended)]
    assert attempt(store, attempts["a"])["state"] == "claimed", "what is under way is left to finish"
    assert [attempt(store, attempts[name])["state"] for name in "bc"] == ["closed", "closed"]
    statuses = rows(store, "SELECT status FROM effects ORDER BY attempt_id")
    assert statuses == [("cancelled",), ("uncertain",)], "an uncertain effect stays what it is"
    assert Hand(store).claim() is None
    check_chains(store)


@pytest.mark.parametrize("reason", ["task_failed", "cancel_requested"])
def test_a_stop_tells_of_every_effect_that_it_cancels(store: Store, driver: Driver, reason: str) -> None:
    """Every transition of an effect has an event: one waits for a person, one for a worker."""
    driver.enqueue([0, 1])
    hand = Hand(store)
    asking = hand.take()
    assert isinstance(hand.start(asking, effect_request(asking, ask=True)), AttemptHeld)
    given_back = hand.take()
    request = effect_request(given_back)
    hand.start(given_back, request)
    store.release(given_back, effect=EffectEnd(request.effect_id, "requested"), reason="drain")
    driver.write(Batch(stop=reason))
    cancelled = rows(store, "SELECT effect_id, task_id FROM effects WHERE status = 'cancelled' ORDER BY attempt_id")
    told = rows(
        store,
        "SELECT json_extract(payload_json, '$.effectId'), task_id, json_extract(payload_json, '$.reason') "
        "FROM audit_events WHERE event_type = 'effect.cancelled' ORDER BY event_no",
    )
    assert told == [(effect_id, task_id, reason) for effect_id, task_id in cancelled]
    assert len(told) == 2
    check_chains(store)


def test_an_attempt_that_was_claimed_before_the_stop_may_finish(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    driver.write(Batch(stop="cancel_requested"))
    hand.finish(claim, "cancelled")
    driver.commit()
    assert task_state(store, 0) == "cancelled"
    driver.end("cancelled", "cancel_requested")
    check_chains(store)


def test_a_superseded_effect_keeps_its_status(store: Store, driver: Driver) -> None:
    driver.enqueue([0])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim, idempotency="idempotent")
    hand.start(claim, request)
    hand.finish(claim, "uncertain", effect=EffectEnd(request.effect_id, "uncertain"))
    [done], _ = store.finished_attempts(driver.run)
    batch = Batch(superseded=[request.effect_id])
    driver.settle(batch, done)
    driver.write(batch)
    row = effect(store, request.effect_id)
    assert (row["status"], row["superseded"]) == ("uncertain", 1)


# -- the chain ---------------------------------------------------------------------------------------------------------


def a_story(store: Store, driver: Driver) -> None:
    stopped_run(store, driver)
    batch = ending(4)
    batch.memory = [("k", 4, '"later"')]
    driver.write(batch)
    store.request_cancel("run-1", reason="enough", actor="cli-user")
    driver.write(Batch(stop="cancel_requested"))


def test_the_chain_tells_what_the_tables_tell(store: Store, driver: Driver) -> None:
    steps: list[Callable[[], object]] = [
        lambda: a_story(store, driver),
        lambda: driver.end("paused", "uncertain_effect"),
    ]
    for step in steps:
        check_chains(store)
        step()
    check_chains(store)
    with store.database.read() as tx:
        chain = [link[1] for link in audit.read_chain(tx, "run-1")]
    first = json.loads(chain[0])
    empty = "sha256:v1:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert first.pop("documents") == dict.fromkeys(("workflow", "plan", "inputs", "settings"), empty)
    assert len(first.pop("row")) == 64
    assert first == {"created": 5, "runId": "run-1", "state": "running", "workingMemory": {"k": '"initial"'}}
    told = rebuild(chain)
    assert [task[0] for task in told["tasks"]] == ["ready", "cancelled", "cancelled", "cancelled", "succeeded"]
    assert (told["state"], told["cancel"]) == ("paused", True)


def test_the_length_of_a_link_does_not_grow_with_the_run(store: Store) -> None:
    store.create_run(new_run(tasks=2000))
    driver = Driver(store, "run-1")
    for position in range(20):
        driver.enqueue([position])
    sizes = [row[0] for row in rows(store, "SELECT LENGTH(state_json) FROM checkpoints ORDER BY sequence")]
    # The first one tells of the documents, by four digests.
    assert sizes[0] < 600
    assert max(sizes[1:]) < 200


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE checkpoints SET state_json = replace(state_json, 'ready', 'faded') WHERE sequence = 2",
        "UPDATE checkpoints SET previous_checksum = 'x' WHERE sequence = 3",
        "UPDATE checkpoints SET checksum = 'x' WHERE sequence = 2",
        "DELETE FROM checkpoints WHERE sequence = 2",
        "DELETE FROM checkpoints WHERE sequence = 1",
        "UPDATE checkpoints SET sequence = sequence + 100 WHERE sequence >= 2",
    ],
)
def test_tampering_is_detected(store: Store, driver: Driver, tampering: str) -> None:
    a_story(store, driver)
    with store.database.write() as tx:
        tx.execute("DROP TRIGGER checkpoints_no_update")
        tx.execute("DROP TRIGGER checkpoints_no_delete")
        tx.execute(tampering)
    with store.database.read() as tx, pytest.raises(CorruptStore, match="chain"):
        audit.read_chain(tx, "run-1")


def test_a_chain_that_was_cut_at_its_end_is_detected(store: Store, driver: Driver) -> None:
    a_story(store, driver)
    with store.database.write() as tx:
        tx.execute("DROP TRIGGER checkpoints_no_delete")
        tx.execute("DELETE FROM checkpoints WHERE sequence = (SELECT MAX(sequence) FROM checkpoints)")
    with store.database.read() as tx, pytest.raises(CorruptStore, match="chain"):
        audit.read_chain(tx, "run-1")


def test_a_checkpoint_of_the_future_is_refused(store: Store, driver: Driver) -> None:
    a_story(store, driver)
    with store.database.write() as tx:
        tx.execute("DROP TRIGGER checkpoints_no_update")
        tx.execute("UPDATE checkpoints SET format_version = 2 WHERE sequence = 2")
    with store.database.read() as tx, pytest.raises(IncompatibleVersion):
        audit.read_chain(tx, "run-1")


def test_the_audit_trail_has_one_order_without_gaps(store: Store, driver: Driver, clock: ManualClock) -> None:
    a_story(store, driver)
    numbers = [row[0] for row in rows(store, "SELECT sequence FROM audit_events ORDER BY sequence")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert one(store, "SELECT audit_sequence FROM runs") == (len(numbers),)
    traces = rows(store, "SELECT DISTINCT trace_id FROM audit_events")
    assert traces == [("trace-run-1",)]
