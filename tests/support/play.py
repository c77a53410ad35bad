"""A driver and its workers in one thread, around the real scheduler and the real store."""

from __future__ import annotations

import json
import random
from pathlib import Path

from agentctl.coordinator.compiler import compile_workflow, merge_inputs
from agentctl.coordinator.definition import LoadedDocument, document_from_source
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.plan_index import PlanIndex
from agentctl.coordinator.scheduler import Scheduler
from agentctl.coordinator.submission import submit
from agentctl.coordinator.yaml_document import parse_document
from agentctl.store.canonical import canonical, loads
from agentctl.store.engine import Store
from agentctl.store.errors import RunMoved
from agentctl.store.records import AttemptEnd, Claim, EffectEnd, FinishedAttempt, StartedEffect

from support.builders import LEASE_MS, Hand, effect_request
from support.clock import FixedIds, ManualClock
from support.constructs import Program
from support.graphs import FILES, SEED_TEXT, Graph, perform_claim


def compiled(graph: Graph | Program, concurrency: int) -> tuple[LoadedDocument, Plan]:
    source = parse_document(json.dumps(graph.document(concurrency)).encode(), "flow.yaml")
    document = document_from_source(source, base_dir=Path("/base"))
    return document, compile_workflow(document, inputs={})


class Play:
    """A driver and its workers in one thread. Chance decides who does what next."""

    def __init__(
        self,
        store: Store,
        clock: ManualClock,
        graph: Graph | Program,
        concurrency: int,
        workers: int,
        chance: random.Random,
    ) -> None:
        document, plan = compiled(graph, concurrency)
        self.plan = plan
        self.store = store
        self.clock = clock
        self.chance = chance
        self.index = PlanIndex(plan)
        inputs = merge_inputs(document.model.spec.inputs, {})
        ids = FixedIds()
        self.run_id = submit(store, document, plan, inputs, ids=ids, base_path=Path("/base"), actor="test").run_id
        self.inputs = loads(store.run_documents(self.run_id).inputs_json)
        self.epoch = 0
        self.takes = 0
        self.scheduler: Scheduler
        self.hands = [Hand(store, f"worker-{i}") for i in range(workers)]
        self.claims: dict[str, tuple[Claim, str, int]] = {}
        self.files = dict.fromkeys((f"files/{name}" for name in FILES), SEED_TEXT)
        self.reloads = self.redeliveries = 0
        self.take()

    def take(self) -> None:
        """Another process becomes the driver."""
        self.takes += 1
        self.driver = f"driver-{self.takes}"
        epoch = self.store.take_run(self.run_id, driver=self.driver, epoch=self.epoch, lease_ms=LEASE_MS)
        assert epoch is not None
        self.epoch = epoch
        self.reload()

    def reload(self) -> None:
        snapshot = self.store.snapshot(self.run_id)
        run = self.run = snapshot.run
        self.scheduler = Scheduler(
            self.index, snapshot, self.inputs, lambda positions: self.store.task_outputs(run, positions), lambda: 0.5
        )

    def step(self) -> None:
        """The driver decides on some of what is finished."""
        self.clock.advance(1)
        finished, _ = self.store.finished_attempts(self.run)
        some = self.some(finished)
        batch = self.scheduler.decide(some, self.store.clock.now())
        if batch.is_empty():
            return
        moved = self.chance.random() < 0.1
        if moved:
            with self.store.database.write() as tx:
                tx.execute("UPDATE runs SET revision = revision + 1 WHERE run_id = ?", (self.run_id,))
        try:
            self.store.commit_batch(self.run, batch, driver=self.driver, epoch=self.epoch, revision=self.run.revision)
        except RunMoved:
            assert moved
            self.reloads += 1
            self.reload()
        else:
            assert not moved

    def some(self, finished: list[FinishedAttempt]) -> list[FinishedAttempt]:
        kind = self.chance.randrange(3)
        if kind == 0:
            return finished
        if kind == 1:
            return finished[:1]
        return [attempt for attempt in finished if self.chance.random() < 0.5]

    def work(self) -> None:
        """A worker takes a task, or ends one, or dies with it."""
        hand = self.chance.choice(self.hands)
        held = self.claims.pop(hand.name, None)
        if held is None:
            claim = hand.claim()
            if claim is not None:
                request = effect_request(claim, idempotency="idempotent")
                answer = hand.start(claim, request)
                assert isinstance(answer, StartedEffect)
                self.claims[hand.name] = (claim, request.effect_id, answer.dispatch)
            return
        claim, effect, dispatch = held
        if self.chance.random() < 0.1 and claim.fence.delivery < 3:
            self.redeliveries += 1
            claims = [(claim.fence.attempt_id, claim.fence.delivery)]
            assert self.store.rescue(claims, dead=[hand.name], why="died", actor="test") == ["ready"]
            return
        result = canonical(perform_claim(loads(claim.input_json), self.files))
        end = AttemptEnd("succeeded", result_effect=effect)
        self.store.finish(
            claim,
            end,
            effect=EffectEnd(effect, "succeeded", result, dispatch=dispatch),
            next_claim=False,
            only_run=None,
            lease_ms=LEASE_MS,
        )

    def perform(self) -> None:
        """Until the run has ended."""
        for _ in range(max(20_000, 200 * len(self.plan.order))):
            if self.store.get_run(self.run_id).state != "running":
                return
            what = self.chance.random()
            if what < 0.03:
                self.take()
            elif what < 0.06:
                self.reload()
            elif what < 0.5:
                self.step()
            else:
                self.work()
        raise AssertionError("the run does not end")
