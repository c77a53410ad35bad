"""The coordinator's loop, in this process: real store, real plans, no workers (tasks without effects need none)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, CorruptStore, IncompatibleVersion
from agentctl.store.faults import Faults
from agentctl.store.timing import Timing
from support.builders import open_store
from support.clock import FixedIds, ManualClock
from support.rows import scalar

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
