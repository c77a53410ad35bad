"""A driver by itself: what is held, what is stopped, and when a run is at rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.driver import Coordinator
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import AttemptHeld, Claim, EffectEnd, StartedEffect, StartRefused
from agentctl.store.timing import Timing
from support.builders import Hand, effect_request, new_run, open_store, process_row
from support.clock import FixedIds, ManualClock
from support.rows import check_chains, rows, task_state

PLAN_LIMIT = {"limits": {"maxToolCalls": 2}}


def plan(tasks: int, concurrency: int, budget: dict[str, Any], failure: str) -> str:
    names = [f"t{n}" for n in range(tasks)]
    task = {
        "uses": {"kind": "action", "name": "x"},
        "actionKind": "builtin.shell.exec",
        "needs": [],
        "memoryReads": [],
        "memoryAfter": [],
        "when": None,
        "vars": {},
        "input": {},
        "retry": {"maxAttempts": 1, "backoffMs": 0, "backoffMultiplier": 1.0, "maxBackoffMs": 1},
        "timeoutSeconds": 60,
        "failure": failure,
        "outputSchema": None,
        "predictability": "requires_execution",
    }
    return json.dumps(
        {
            "formatVersion": 1,
            "workflowName": "demo",
            "workflowDigest": "a",
            "planDigest": "b",
            "maxConcurrency": concurrency,
            "maxDeliveries": 3,
            "predictability": "requires_execution",
            "requirements": {},
            "budget": budget,
            "actions": {},
            "policy": {"approval": "mutations"},
            "memory": {},
            "inputs": {},
            "vars": {},
            "outputs": {},
            "showDiff": False,
            "order": names,
            "tasks": {name: {"id": name, "position": n, **task} for n, name in enumerate(names)},
        }
    )


class Scene:
    """A store, a coordinator, and hands that do what the test says."""

    def __init__(self, folder: Path, clock: ManualClock, ids: FixedIds) -> None:
        self.clock = clock
        self.store: Store = open_store(folder, clock)
        self.store.register(process_row("coordinator-1", kind="coordinator", state="busy"))
        self.coordinator = Coordinator(
            self.store, clock, ids, Timing(), Faults(None), process_id="coordinator-1", adopts=True
        )

    def run(self, tasks: int, *, concurrency: int = 8, failure: str = "continue", **changes: Any) -> None:
        text = plan(tasks, concurrency, PLAN_LIMIT, failure)
        self.store.create_run(new_run("run-1", tasks, plan_json=text, max_concurrency=concurrency, **changes))
        self.go()

    def go(self) -> None:
        """Let the coordinator look, adopt and decide until it has nothing to do."""
        self.clock.advance(0.6)
        while self.coordinator.tick():
            pass
        self.clock.advance(0.6)
        while self.coordinator.tick():
            pass

    def state(self) -> tuple[str, str | None]:
        run = self.store.get_run("run-1")
        return run.state, run.reason

    def start(self, name: str, *, units: int = 0, ask: bool = False) -> tuple[Claim, Any]:
        hand = Hand(self.store, name)
        claim = hand.take()
        estimate = {"toolCalls": units} if units else {}
        return claim, hand.start(claim, effect_request(claim, estimate=estimate, ask=ask))

    def finish(self, claim: Claim, units: int = 0) -> None:
        request = effect_request(claim)
        usage = {"toolCalls": units} if units else {}
        end = EffectEnd(request.effect_id, "succeeded", result_json="{}", usage=usage)
        Hand(self.store, claim.fence.holder).finish(claim, effect=end)


@pytest.fixture
def scene(tmp_path: Path, clock: ManualClock, ids: FixedIds) -> Iterator[Scene]:
    made = Scene(tmp_path, clock, ids)
    yield made
    check_chains(made.store)
    made.coordinator.close()
    made.store.close()


def test_answers_wait_for_places_in_compiled_order(scene: Scene) -> None:
    scene.run(3, concurrency=1)
    for n in range(3):
        _, answer = scene.start(f"w{n}", ask=True)
        assert isinstance(answer, AttemptHeld)
        scene.go()
    assert scene.state() == ("paused", "approval_required")
    for (approval,) in rows(scene.store, "SELECT approval_id FROM approvals ORDER BY approval_id"):
        scene.store.resolve_approval(approval, approve=True, actor="ann", reason="")
    scene.go()
    assert scene.state()[0] == "running"
    claim, answer = scene.start("w0", ask=True)
    assert (claim.task_id, answer) == ("t0", StartedEffect(1))
    assert Hand(scene.store, "w1").claim() is None, "one place"
    scene.finish(claim)
    scene.go()
    claim, _ = scene.start("w1", ask=True)
    assert claim.task_id == "t1"


def test_units_that_come_back_let_the_first_in_order_go_on(scene: Scene) -> None:
    scene.run(3, budget_limits={"toolCalls": 2})
    first, _ = scene.start("w0", units=2)
    assert scene.start("w1", units=1)[1] == AttemptHeld("budget")
    assert scene.start("w2", units=1)[1] == AttemptHeld("budget")
    scene.go()
    assert scene.state()[0] == "running"
    scene.finish(first, units=0)
    scene.go()
    claim, answer = scene.start("w1", units=1)
    assert (claim.task_id, answer) == ("t1", StartedEffect(1))


def test_a_denial_stops_the_run_whatever_its_tasks_declare(scene: Scene) -> None:
    scene.run(3, budget_limits={"toolCalls": 2})
    running, _ = scene.start("w0", units=2)
    denied, answer = scene.start("w1", units=3)
    assert isinstance(answer, StartRefused)
    Hand(scene.store, "w1").finish(denied, "failed", code="budget_exceeded")
    scene.go()
    assert scene.state()[0] == "running", "what runs finishes"
    assert task_state(scene.store, 2) == "cancelled"
    scene.finish(running, units=2)
    scene.go()
    assert scene.state() == ("failed", "budget_exceeded")
    assert task_state(scene.store, 0) == "succeeded"


def test_what_comes_to_a_halt_after_a_stop_is_ended_too(scene: Scene) -> None:
    """It was claimed before the stop and asks a person after it: nobody would ever answer."""
    scene.run(2, failure="stop")
    hand = Hand(scene.store, "w1")
    failing, asking = Hand(scene.store, "w0").take(), hand.take()
    Hand(scene.store, "w0").finish(failing, "failed")
    scene.go()
    assert isinstance(hand.start(asking, effect_request(asking, ask=True)), AttemptHeld)
    scene.go()
    assert scene.state() == ("failed", "task_failed")
    assert rows(scene.store, "SELECT status FROM approvals") == [("cancelled",)]


def test_a_run_is_failed_when_its_time_is_over(scene: Scene) -> None:
    scene.run(3, concurrency=2, budget_limits={"wallTimeSeconds": 10})
    running, _ = scene.start("w0")
    _, answer = scene.start("w1", ask=True)
    assert isinstance(answer, AttemptHeld)
    scene.go()
    scene.clock.advance(20)
    scene.go()
    Hand(scene.store, "w0").finish(
        running, "uncertain", effect=EffectEnd(effect_request(running).effect_id, "uncertain")
    )
    scene.go()
    assert scene.state() == ("failed", "deadline_exceeded")
    assert [task_state(scene.store, n) for n in range(3)] == ["failed", "failed", "cancelled"]


def test_a_paused_run_whose_time_is_over_ends_without_an_answer(scene: Scene) -> None:
    scene.run(1, budget_limits={"wallTimeSeconds": 10})
    scene.start("w0", ask=True)
    scene.go()
    assert scene.state() == ("paused", "approval_required")
    scene.clock.advance(20)
    scene.go()
    assert scene.state() == ("failed", "deadline_exceeded")


def test_a_run_pauses_when_nobody_holds_anything_of_it(scene: Scene) -> None:
    scene.run(3)
    claim, _ = scene.start("w0")
    scene.store.request_pause("run-1", reason="lunch", actor="op")
    assert Hand(scene.store, "w1").claim() is None
    scene.go()
    assert scene.state()[0] == "running"
    scene.finish(claim)
    scene.go()
    assert scene.state() == ("paused", "paused_by_operator")
