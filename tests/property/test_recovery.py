"""A repair comes to what the whole run comes to: whatever is executed again, and whatever is reused.

Random workflows with all constructs in one another are played out; then random tasks, with all that did not succeed,
are executed again in a run of their own. Outputs, states, errors and working memory are those of the source to the
letter, and only the closure was executed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from agentctl.coordinator.plan_index import PlanIndex
from agentctl.coordinator.recovery import Wish, plan_recovery
from agentctl.coordinator.recovery_plan import RecoveryPlan
from agentctl.coordinator.submission import Circumstances, derive
from agentctl.store.canonical import loads
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.verification import verify
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.builders import Hand
from support.clock import FixedIds, ManualClock
from support.constructs import Program, programs
from support.graphs import FILES, SEED_TEXT
from support.play import Play, compiled
from support.rows import check_chains, rows
from support.scale import repeats
from support.site import picture_of


class Derived(Play):
    """The run of a recovery plan, played out in a world in which the reused tasks have been."""

    def __init__(
        self, store: Store, clock: ManualClock, run_id: str, plan: RecoveryPlan, chance: random.Random
    ) -> None:
        self.plan = plan.target
        self.store, self.clock, self.chance = store, clock, chance
        self.index = PlanIndex(plan.target)
        self.run_id = run_id
        self.inputs = loads(store.run_documents(run_id).inputs_json)
        self.epoch = self.takes = self.reloads = self.redeliveries = 0
        self.hands = [Hand(store, f"again-{i}") for i in range(2)]
        self.claims = {}
        self.files = dict.fromkeys((f"files/{name}" for name in FILES), SEED_TEXT)
        for task in plan.reused:
            if self.index.tasks[task.position].action_kind == "builtin.write" and task.source.state == "succeeded":
                output = loads(task.source.output_json or "{}")
                self.files[output["path"]] = output["after"]
        self.take()


@settings(max_examples=repeats(600, 60), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    program=programs(120),
    chance=st.integers(0, 2**32),
    concurrency=st.sampled_from([1, 3, 8]),
    width=st.sampled_from([0, 1, 3]),
)
def test_a_repair_comes_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, program: Program, chance: int, concurrency: int, width: int
) -> None:
    draw = random.Random(chance)
    clock = ManualClock()
    store = Store(tmp_path_factory.mktemp("repair") / "state" / "agentctl.db", clock, create=True, sync=lambda: None)
    try:
        play = Play(store, clock, program, concurrency, 2, draw)
        play.perform()
        source = store.read_source(play.run_id)
        document, plan = compiled(program, concurrency)
        open_ends = [name for name, task in source.tasks.items() if task.state not in ("succeeded", "skipped")]
        roots = [*open_ends, *draw.sample(list(plan.order), min(width, len(plan.order)))]
        if not roots:
            roots = [plan.order[-1]]
        wish = Wish("repair", tuple(roots), restart_successful=True)
        made = plan_recovery(source, plan, play.inputs, wish, lambda *_: "ok")
        for block in made.blocks:
            # What cannot even begin has failed before; nothing else stands in the way of an unchanged workflow.
            assert block.rule == "target_input_resolution", block
            assert source.tasks[block.task_id].state == "failed"
        event("blocked" if made.blocks else f"reused: {min(3, len(made.reused))} or more")
        # Such a run is not made for a person. Here it is, and what was foreseen to fail does.
        made.blocks.clear()
        how = Circumstances(Path("/base"), "test")
        ids = FixedIds()
        new = derive(store, document, made, play.inputs, how, reason=None, ids=ids, faults=Faults(None))
        again = Derived(store, clock, new.run_id, made, draw)
        again.perform()
        assert picture_of(store, new.run_id) == picture_of(store, play.run_id)
        assert again.files == play.files
        closure = set(made.rerun)
        assert closure.isdisjoint(task.source.task_id for task in made.reused)
        attempts = rows(store, "SELECT task_id FROM attempts WHERE run_id = ?", new.run_id)
        assert {task for (task,) in attempts} <= closure
        check_chains(store)
        assert verify(store.database, None)["problems"] == []
    finally:
        store.close()
