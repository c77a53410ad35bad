"""The coordinator's loop, in this process: real store, real plans, no workers (tasks without effects need none)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.cli.pool import finish_request
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, CorruptStore, IncompatibleVersion
from agentctl.store.faults import Faults
from agentctl.store.records import EffectEnd, RunDocuments
from agentctl.store.timing import Timing
from support.builders import Hand, effect_request, open_store
from support.clock import FixedIds, ManualClock
from support.rows import check_chains, scalar

DOCUMENT = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: two}
spec:
  inputs: {word: hello}
  actions: {say: {kind: builtin.assign}, check: {kind: builtin.assert}}
  tasks:
    - {id: first, uses: "action:say", with: {word: "${{ inputs.word }}"}}
    - {id: second, uses: "action:check", needs: [first], with: {that: true}}
"""

FUTURE_PLAN = """UPDATE run_documents SET plan_json = replace(plan_json, '"formatVersion":1', '"formatVersion":9')"""


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def submitted(store: Store, ids: FixedIds, folder: Path, **inputs: str) -> str:
    file = folder / "two.yaml"
    file.write_text(DOCUMENT)
    document = load_workflow(file)
    plan = compile_workflow(document)
    given = {"word": "hello", **inputs}
    return submit(store, document, plan, given, ids=ids, base_path=folder, actor="tester").run_id


def coordinator_of(store: Store, clock: ManualClock, ids: FixedIds, *, adopts: bool) -> Coordinator:
    process_id = ids.new_id("coordinator")
    store.register(process_row("coordinator", process_id, "coordinator", "0", clock.now()))
    return Coordinator(store, clock, ids, Timing(), Faults(None), process_id=process_id, adopts=adopts)


def drive(coordinator: Coordinator, clock: ManualClock, rounds: int = 20) -> None:
    for _ in range(rounds):
        coordinator.tick()
        clock.advance(0.6)


def test_one_compensation_is_planned_in_a_round(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """Planning holds up every run of the coordinator, so many failures at once must not add up to one long wait."""
    file = tmp_path / "fails.yaml"
    file.write_text(
        DOCUMENT.replace("spec:", "spec:\n  compensation: {onFailure: automatic}").replace("that: true", "that: false")
    )
    document = load_workflow(file)
    plan = compile_workflow(document)
    inputs = {"word": "hello"}
    for _ in range(3):
        submit(store, document, plan, inputs, ids=ids, base_path=tmp_path, actor="tester")
    coordinator = coordinator_of(store, clock, ids, adopts=True)

    def planned() -> int:
        return int(scalar(store, "SELECT COUNT(*) FROM audit_events WHERE event_type = 'compensation.skipped'"))

    counts = [0]
    while counts[-1] < 3:
        assert len(counts) < 50
        coordinator.tick()
        counts.append(planned())
        if counts[-1] in (1, 2):
            assert coordinator.sleep_seconds() == 0.0, "the next one is due at once"
    assert max(after - before for before, after in itertools.pairwise(counts)) == 1
    coordinator.close()


def test_a_run_without_effects_is_driven_to_its_end(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    run_id = submitted(store, ids, tmp_path)
    coordinator = coordinator_of(store, clock, ids, adopts=True)
    drive(coordinator, clock)
    assert store.get_run(run_id).state == "succeeded"
    assert store.get_run(run_id).driver is None
    coordinator.close()


@pytest.mark.parametrize(
    "damage",
    [
        FUTURE_PLAN,
        "UPDATE runs SET plan_format_version = 9",
    ],
    ids=["plan", "version"],
)
def test_one_damaged_run_does_not_stop_the_others(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path, damage: str
) -> None:
    damaged = submitted(store, ids, tmp_path)
    with store.database.write() as tx:
        tx.execute(damage)
    healthy = submitted(store, ids, tmp_path, word="again")
    coordinator = coordinator_of(store, clock, ids, adopts=True)
    drive(coordinator, clock)
    assert store.get_run(healthy).state == "succeeded"
    with store.database.read() as tx:
        state, driver = tx.execute("SELECT state, driver FROM runs WHERE run_id = ?", (damaged,)).fetchone() or ("", "")
    assert (state, driver) == ("running", None)
    coordinator.close()


def test_the_only_run_of_a_foreground_driver_tells_its_damage(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    run_id = submitted(store, ids, tmp_path)
    with store.database.write() as tx:
        tx.execute(FUTURE_PLAN)
    coordinator = coordinator_of(store, clock, ids, adopts=False)
    with pytest.raises((CorruptStore, IncompatibleVersion, ConflictError)):
        coordinator.take(store.get_run(run_id), resume=False)
    coordinator.close()


def test_a_driver_that_lost_its_run_writes_nothing_more(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    run_id = submitted(store, ids, tmp_path)
    first = coordinator_of(store, clock, ids, adopts=False)
    assert first.take(store.get_run(run_id), resume=False)
    second = coordinator_of(store, clock, ids, adopts=False)
    assert second.take(store.get_run(run_id), resume=False)
    first.tick()
    assert run_id not in first.drivers, "the epoch has moved on"
    assert store.get_run(run_id).state == "running"
    drive(second, clock, rounds=3)
    assert store.get_run(run_id).state == "succeeded"
    first.close()
    second.close()


def test_a_run_that_is_taken_away_at_once_is_that_of_the_other(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = submitted(store, ids, tmp_path)
    first, second = (coordinator_of(store, clock, ids, adopts=False) for _ in range(2))
    documents = store.run_documents

    def documents_late(name: str) -> RunDocuments:
        monkeypatch.undo()
        assert second.take(store.get_run(run_id), resume=False)
        return documents(name)

    monkeypatch.setattr(store, "run_documents", documents_late)
    assert not first.take(store.get_run(run_id), resume=False)
    assert run_id not in first.drivers
    drive(second, clock, rounds=3)
    assert store.get_run(run_id).state == "succeeded"
    first.close()
    second.close()


@pytest.mark.parametrize("paused", [True, False])
def test_who_finishes_a_request_takes_no_run_from_a_driver(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path, paused: bool
) -> None:
    """Two cancel a run that nobody drives; the second has looked before the first took it, and is slower."""
    run_id = submitted(store, ids, tmp_path)
    if paused:
        asked = coordinator_of(store, clock, ids, adopts=False)
        store.request_pause(run_id, reason="x", actor="tester")
        assert asked.take(store.get_run(run_id), resume=False)
        drive(asked, clock, rounds=2)
        asked.close()
        assert store.get_run(run_id).state == "paused"
    store.request_cancel(run_id, reason="x", actor="tester")
    seen = store.get_run(run_id)
    faster = coordinator_of(store, clock, ids, adopts=False)
    assert faster.take(store.get_run(run_id), resume=True)
    finish_request(store, seen, resume=True, patience=60.0)
    assert store.get_run(run_id).driver == faster.process_id
    drive(faster, clock, rounds=3)
    assert store.get_run(run_id).state == "cancelled"
    faster.close()


def test_a_silent_driver_is_followed_only_after_lease_and_grace(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    run_id = submitted(store, ids, tmp_path)
    silent = coordinator_of(store, clock, ids, adopts=False)
    assert silent.take(store.get_run(run_id), resume=False)
    other = coordinator_of(store, clock, ids, adopts=True)
    patience = Timing().lease + Timing().grace
    waited = 0.0
    while waited < patience - 2:
        other.tick()
        assert run_id not in other.drivers, f"adopted after only {waited:.0f} s"
        clock.advance(1.0)
        waited += 1.0
    for _ in range(6):
        other.tick()
        clock.advance(1.0)
    assert store.get_run(run_id).state == "succeeded"
    silent.close()
    other.close()


# -- attempts that nobody takes again ------------------------------------------------------------------------------

ONE = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: one}
spec:
  policy: {approval: never}
  runtime: {maxConcurrency: 2}
  actions: {look: {kind: builtin.read, with: {path: x}}}
  tasks:
    - {id: fails, uses: "action:look"}
    - {id: slow, uses: "action:look"}
"""


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("why", ["cancel", "pause after a failure"])
def test_what_comes_back_after_a_stop_is_ended(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path, lost: bool, why: str
) -> None:
    """The stop left an attempt to finish; its worker dies, or gives it back, and no other takes it."""
    file = tmp_path / "one.yaml"
    file.write_text(ONE)
    document = load_workflow(file)
    run_id = submit(store, document, compile_workflow(document), {}, ids=ids, base_path=tmp_path, actor="tester").run_id
    coordinator = coordinator_of(store, clock, ids, adopts=True)
    drive(coordinator, clock, 3)
    first, second = Hand(store, "worker-1"), Hand(store, "worker-2")
    fails, slow = first.take(), second.take()
    request = effect_request(slow, idempotency="idempotent")
    second.start(slow, request)
    if why == "cancel":
        first.finish(fails)
        store.request_cancel(run_id, reason="x", actor="tester")
    else:
        first.finish(fails, "failed")
        coordinator.tick()
        store.request_pause(run_id, reason="x", actor="tester")
    coordinator.tick()
    coordinator.tick()
    assert scalar(store, "SELECT state FROM tasks WHERE task_id = 'slow'") == "running"
    if lost:
        assert store.rescue([(slow.fence.attempt_id, 1)], dead=[], why="died", actor="x") == ["ready"]
    else:
        store.release(slow, effect=EffectEnd(request.effect_id, "lost", dispatch=1), reason="drain")
    coordinator.tick()
    coordinator.tick()
    run = store.get_run(run_id)
    assert (run.state, run.driver) == ("cancelled" if why == "cancel" else "failed", None)
    assert scalar(store, "SELECT state FROM tasks WHERE task_id = 'slow'") == "cancelled"
    assert scalar(store, "SELECT status FROM effects") == "cancelled"
    check_chains(store)
    coordinator.close()


# -- a driver that many attempts keep up ---------------------------------------------------------------------------

MANY = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: many}
spec:
  inputs: {items: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]}
  policy: {approval: never}
  runtime: {maxConcurrency: 20}
  actions: {look: {kind: builtin.read, with: {path: x}}}
  tasks:
    - {id: each, uses: "action:look", foreach: {items: "${{ inputs.items }}", maxItems: 20}}
"""


def many_submitted(store: Store, ids: FixedIds, folder: Path) -> str:
    file = folder / "many.yaml"
    file.write_text(MANY)
    document = load_workflow(file)
    return submit(store, document, compile_workflow(document), {}, ids=ids, base_path=folder, actor="tester").run_id


def test_what_is_finished_before_a_driver_lies_down_is_seen_before_it_sleeps(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody calls a driver that is up: so it looks once more, at a moment when everybody would call it."""
    many_submitted(store, ids, tmp_path)
    coordinator = coordinator_of(store, clock, ids, adopts=True)
    drive(coordinator, clock, 3)
    hand = Hand(store)
    claim = hand.take()
    coordinator.tick()
    assert store._board.is_up(coordinator.process_id)
    hand.finish(claim)
    store.wake_unless_up(coordinator.process_id)
    slept: list[float] = []

    def asleep(
        watched: list[object], _w: object, _x: object, seconds: float
    ) -> tuple[list[object], list[int], list[int]]:
        assert not store._board.is_up(coordinator.process_id), "asleep, and nobody would call"
        slept.append(seconds)
        return [], [], []

    monkeypatch.setattr("agentctl.coordinator.driver.select.select", asleep)
    coordinator.wait()
    assert slept == [0.0]
    coordinator.tick()
    assert scalar(store, "SELECT COUNT(*) FROM attempts WHERE state = 'closed'") == 1
    coordinator.wait()
    coordinator.tick()
    coordinator.wait()
    assert slept[-1] > 0, "with nothing new it sleeps"
    coordinator.close()


def test_no_look_reads_a_whole_table(store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path) -> None:
    """What a coordinator and a worker ask again and again must not cost more with every task there ever was."""
    many_submitted(store, ids, tmp_path)
    coordinator = coordinator_of(store, clock, ids, adopts=True)
    asked: dict[str, object] = {}

    def note(_cursor: object, statement: str, bindings: object) -> bool:
        asked.setdefault(statement, bindings)
        return True

    connection = store.database.connection
    connection.exec_trace = note
    drive(coordinator, clock, 3)
    hand = Hand(store)
    claim = hand.take()
    store.peek(None)
    store.renew(hand.name, claim.fence, lease_ms=1000, rss=0, done=0, failed=0)
    effect = effect_request(claim)
    hand.start(claim, effect)
    hand.finish(claim, effect=EffectEnd(effect.effect_id, "succeeded", "{}"), next_claim=True)
    drive(coordinator, clock, 10)
    connection.exec_trace = None
    # What has not ended is few, and has indexes of its own.
    growing = re.compile(
        r"SCAN (attempts|tasks|effects|audit_events|checkpoints|runs|[aert])\b"
        r"(?! USING (COVERING )?INDEX (runs_open|turns))"
    )
    scans = {
        statement: step[3]
        for statement, bindings in asked.items()
        if statement.startswith(("SELECT", "UPDATE", "DELETE"))
        for step in connection.execute(f"EXPLAIN QUERY PLAN {statement}", bindings)  # type: ignore[arg-type]
        if growing.match(step[3])
    }
    assert len(asked) > 30
    assert sorted(set(scans.values())) == []
    coordinator.close()
