"""A coordinator at rest: what is to be done waits for no look, and a look is never far, however long a lease."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import EffectEnd
from agentctl.store.timing import Timing
from support.builders import Hand, effect_request, open_store
from support.clock import FixedIds, ManualClock
from support.rows import scalar

UNDOES = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: undoes}
spec:
  compensation: {onFailure: automatic}
  policy: {approval: never, writableRoots: [out]}
  actions: {write: {kind: builtin.write}, check: {kind: builtin.assert}}
  tasks:
    - id: make
      uses: action:write
      with: {path: out/x, content: made}
      compensate: {uses: "action:write", with: {path: out/x, content: undone}}
    - {id: verify, uses: "action:check", needs: [make], with: {that: false}}
"""


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def coordinator_of(store: Store, ids: FixedIds, timing: Timing) -> Coordinator:
    process_id = ids.new_id("coordinator")
    store.register(process_row("coordinator", process_id, "coordinator", "0", store.clock.now()))
    return Coordinator(store, store.clock, ids, timing, Faults(None), process_id=process_id, adopts=True)


def submitted(store: Store, ids: FixedIds, folder: Path, text: str) -> str:
    file = folder / "flow.yaml"
    file.write_text(text)
    document = load_workflow(file)
    return submit(store, document, compile_workflow(document), {}, ids=ids, base_path=folder, actor="tester").run_id


def rounds(coordinator: Coordinator) -> None:
    """Go on as long as there is something to do without any sleep."""
    for _ in range(50):
        if not coordinator.tick() and coordinator.sleep_seconds() > 0.0:
            return
    raise AssertionError("it never sleeps")


def test_a_compensation_that_was_started_is_driven_at_once(
    store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path
) -> None:
    """It is a run without a driver, and nobody calls: with the last run ended, the next look may be a while off."""
    run_id = submitted(store, ids, tmp_path, UNDOES)
    coordinator = coordinator_of(store, ids, Timing())
    rounds(coordinator)
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim, effect_class="workspace_mutate")
    hand.start(claim, request)
    hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", "{}"), result='{"path": "out/x"}')
    rounds(coordinator)
    assert store.get_run(run_id).state == "failed"
    driver = scalar(store, "SELECT driver FROM runs WHERE source_run_id = ?", run_id)
    assert driver == coordinator.process_id
    coordinator.close()


ASKS = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: asks}
spec:
  policy: {writableRoots: [out]}
  runtime: {budgets: {maxWallTimeSeconds: 300}}
  actions: {write: {kind: builtin.write}}
  tasks:
    - {id: make, uses: "action:write", with: {path: out/x, content: made}}
"""


def test_long_leases_make_no_look_seldom(store: Store, clock: ManualClock, ids: FixedIds, tmp_path: Path) -> None:
    """A paused run whose time is over ends by itself: nobody calls for that, so a coordinator at rest has to look."""
    run_id = submitted(store, ids, tmp_path, ASKS)
    coordinator = coordinator_of(store, ids, Timing(lease=3600.0, heartbeat=720.0))
    rounds(coordinator)
    store.request_pause(run_id, reason="later", actor="tester")
    rounds(coordinator)
    assert store.get_run(run_id).state == "paused"
    over = clock.monotonic() + 300.0
    while store.get_run(run_id).ended_at is None:
        assert clock.monotonic() < over + 10.0, "it still is not ended"
        clock.advance(coordinator.sleep_seconds())
        rounds(coordinator)
    assert over <= clock.monotonic() <= over + 10.5
    coordinator.close()
