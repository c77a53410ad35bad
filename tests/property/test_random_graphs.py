"""Random graphs come to the same outputs, memory and task states, however many workers there are and whoever dies.

What they have to come to is computed by a plain interpreter (`support.graphs`). Without processes: the real scheduler
and the real store, with a worker that finishes in random order, batches of random size, and a run that moves under the
scheduler. With processes: one after the other, by a pool of random size, and while processes are killed at random.

`AGENTCTL_TEST_SEED` repeats a run; the seed is printed with each failure.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from agentctl.coordinator.compiler import compile_workflow, merge_inputs
from agentctl.coordinator.definition import document_from_source
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.plan_index import PlanIndex
from agentctl.coordinator.scheduler import Scheduler
from agentctl.coordinator.submission import submit
from agentctl.coordinator.yaml_document import parse_document
from agentctl.store.canonical import canonical, loads
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.errors import RunMoved
from agentctl.store.records import AttemptEnd, Claim, EffectEnd, FinishedAttempt, StartedEffect
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from support.builders import LEASE_MS, Hand, effect_request
from support.clock import FixedIds, ManualClock
from support.graphs import (
    FILES,
    SEED_TEXT,
    Expected,
    Graph,
    graphs,
    interpret,
    perform_claim,
    plain,
)
from support.rows import check_chains, scalar
from support.scale import repeats
from support.site import Picture, Site, kill, picture_of

SEED = int(os.environ.get("AGENTCTL_TEST_SEED") or random.randrange(2**32))
CLOCK = SystemClock()
NO_SHRINKING = (Phase.explicit, Phase.generate)


@pytest.fixture(autouse=True)
def tell_the_seed() -> Iterator[None]:
    print(f"AGENTCTL_TEST_SEED={SEED}")  # noqa: T201
    yield


def often(count: int, phases: tuple[Phase, ...] = (Phase.explicit, Phase.generate, Phase.shrink)) -> settings:
    return settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def assert_equal(picture: Picture, expected: Expected) -> None:
    """A run has come to what the interpreter says."""
    assert picture.state == expected.state, picture
    states = {task: state for task, (state, _, _) in picture.tasks.items()}
    assert states == {task: state for task, (state, _) in expected.tasks.items()}
    for task, (_, output, _) in picture.tasks.items():
        told = None if output is None else canonical(plain(loads(output)))
        wanted = expected.tasks[task][1]
        assert told == (None if wanted is None else canonical(wanted)), task
    assert canonical(picture.memory) == canonical(expected.memory)
    assert picture.output is not None
    wanted_output = {task: output for task, (_, output) in expected.tasks.items() if output is not None}
    assert canonical(plain(loads(picture.output))) == canonical(wanted_output)


# -- without processes -------------------------------------------------------------------------------------------------


def compiled(graph: Graph, concurrency: int) -> tuple[Any, Plan]:
    source = parse_document(json.dumps(graph.document(concurrency)).encode(), "flow.yaml")
    document = document_from_source(source, base_dir=Path("/base"))
    return document, compile_workflow(document, inputs={})


class Play:
    """A driver and its workers in one thread. Chance decides who does what next."""

    def __init__(self, store: Store, graph: Graph, concurrency: int, workers: int, chance: random.Random) -> None:
        document, plan = compiled(graph, concurrency)
        self.plan = plan
        self.store = store
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
        self.store.clock.advance(1)  # type: ignore[attr-defined]
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
        for _ in range(20_000):
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


@hypothesis.seed(SEED)
@often(repeats(2_000, 60))
@given(
    graph=graphs(),
    concurrency=st.integers(1, 8),
    workers=st.integers(1, 8),
    chance=st.integers(0, 2**32),
)
def test_a_scheduler_equals_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, concurrency: int, workers: int, chance: int
) -> None:
    expected = interpret(graph)
    folder = tmp_path_factory.mktemp("play")
    store = Store(folder / "runtime.db", ManualClock(), create=True, sync=lambda: None)
    try:
        play = Play(store, graph, concurrency, workers, random.Random(chance))
        assert list(play.plan.order) == expected.order
        play.perform()
        note(f"{play.reloads} reloads, {play.takes} drivers, {play.redeliveries} redeliveries")
        assert_equal(picture_of(store, play.run_id), expected)
        assert play.files == expected.files
        check_chains(store)
        assert scalar(store, "SELECT COUNT(*) FROM attempts WHERE state <> 'closed'") == 0
        most = scalar(store, "SELECT MAX(delivery) FROM attempts") or 1
        assert most <= 3
    finally:
        store.close()
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()


# -- with processes ----------------------------------------------------------------------------------------------------


@dataclass
class Disturber:
    """Kills processes of a site, each time when the run has made so much progress (in audit events)."""

    site: Site
    chance: random.Random
    kinds: tuple[str, ...]
    moments: list[int]

    @classmethod
    def of(cls, site: Site, graph: Graph, chance: random.Random, kinds: tuple[str, ...], most: int) -> Disturber:
        span = 3 * len(graph.nodes) + 4
        return cls(site, chance, kinds, sorted(chance.randrange(1, span) for _ in range(chance.randint(1, most))))

    def look(self, run_id: str) -> None:
        """Kill somebody if it is time."""
        if not self.moments:
            return
        progress = scalar(self.site.store, "SELECT audit_sequence FROM runs WHERE run_id = ?", run_id)
        if progress < self.moments[0]:
            return
        self.moments.pop(0)
        found = self.site.living(self.chance.choice(self.kinds))
        if found:
            kill(self.chance.choice(found))


def lay_out(site: Site, name: str, graph: Graph, concurrency: int) -> Path:
    """The workflow in a folder of its own, with the files that it reads."""
    (site.folder / name / "files").mkdir(parents=True)
    for file in FILES:
        (site.folder / name / "files" / file).write_text(SEED_TEXT, encoding="utf-8")
    return site.write(f"{name}/flow.yaml", graph.document(concurrency))


def files_of(site: Site, name: str) -> dict[str, str]:
    return {f"files/{path.name}": path.read_text(encoding="utf-8") for path in (site.folder / name / "files").iterdir()}


def one_by_one(site: Site, graph: Graph) -> Picture:
    """In the foreground, with one worker, one place, and nobody who disturbs."""
    answer = site.ask("run", lay_out(site, "alone", graph, 1), "--workers", "1")
    assert answer.code in (0, 4), answer.err
    run_id = site.only_run()
    assert run_id is not None
    return site.picture(run_id)


def in_a_pool(site: Site, name: str, graph: Graph, concurrency: int, workers: int, disturber: Disturber) -> Picture:
    """Submitted to a pool, which a service manager starts again when it has ended."""
    command = ("workers", "start", "-n", str(workers), "--drain-seconds", "3")
    pool = site.start(*command)
    run_id = site.submit(lay_out(site, name, graph, concurrency))

    def ended() -> bool:
        nonlocal pool
        disturber.look(run_id)
        if pool.poll() is not None:
            pool = site.start(*command)
        return site.run(run_id).state != "running"

    site.wait_for(ended, f"{run_id} ends")
    return site.picture(run_id)


def in_the_foreground(site: Site, graph: Graph, concurrency: int, workers: int, disturber: Disturber) -> Picture:
    """Run in the foreground; whenever its driver is killed, it is resumed."""
    process = site.start("run", lay_out(site, "front", graph, concurrency), "--workers", str(workers))

    def ended() -> bool:
        nonlocal process
        run_id = site.only_run()
        if run_id is None:
            assert process.poll() is None, site.report()
            return False
        disturber.look(run_id)
        if process.poll() is None:
            return False
        if site.run(run_id).state != "running":
            return True
        process = site.start("resume", run_id, "--workers", str(workers))
        return False

    site.wait_for(ended, "the run ends")
    run_id = site.only_run()
    assert run_id is not None
    return site.picture(run_id)


@hypothesis.seed(SEED)
@often(repeats(20), NO_SHRINKING)
@given(
    graph=graphs(),
    concurrency=st.integers(1, 8),
    workers=st.integers(1, 8),
    chance=st.integers(0, 2**32),
)
def test_real_processes_equal_the_interpreter_whoever_dies(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, concurrency: int, workers: int, chance: int
) -> None:
    expected = interpret(graph)
    draw = random.Random(chance)
    with Site(tmp_path_factory.mktemp("alone")) as site:
        alone = one_by_one(site, graph)
        assert_equal(alone, expected)
        assert files_of(site, "alone") == expected.files
        site.assert_clean()
    with Site(tmp_path_factory.mktemp("pool")) as site:
        assert in_a_pool(site, "calm", graph, concurrency, workers, Disturber(site, draw, (), [])) == alone
        site.stop()
        disturber = Disturber.of(site, graph, draw, ("worker", "worker", "supervisor", "coordinator"), 4)
        assert in_a_pool(site, "wild", graph, concurrency, workers, disturber) == alone
        assert files_of(site, "calm") == files_of(site, "wild") == expected.files
        site.stop()
        site.assert_clean()
    with Site(tmp_path_factory.mktemp("front")) as site:
        disturber = Disturber.of(site, graph, draw, ("run", "run", "worker"), 3)
        assert in_the_foreground(site, graph, concurrency, workers, disturber) == alone
        assert files_of(site, "front") == expected.files
        site.stop()
        site.assert_clean()
