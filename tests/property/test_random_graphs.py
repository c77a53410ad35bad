"""Random graphs come to the same outputs, memory and task states, however many workers there are and whoever dies.

What they have to come to is computed by a plain interpreter (`support.graphs`). Without processes: the real scheduler
and the real store, with a worker that finishes in random order, batches of random size, and a run that moves under the
scheduler. With processes: one after the other, by a pool of random size, and while processes are killed at random.

`AGENTCTL_TEST_SEED` repeats a run; the seed is printed with each failure. `AGENTCTL_TEST_SHRINK=1` makes the example
of a failure smaller, which may take minutes.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from agentctl.store.canonical import canonical, loads
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from support.clock import ManualClock
from support.constructs import Program, coarse, interpret_program, programs
from support.graphs import (
    FILES,
    SEED_TEXT,
    Expected,
    Graph,
    graphs,
    interpret,
    plain,
)
from support.play import Play
from support.rows import check_chains, scalar
from support.scale import repeats
from support.site import Picture, Site, kill, picture_of

SEED = int(os.environ.get("AGENTCTL_TEST_SEED") or random.randrange(2**32))
CLOCK = SystemClock()
PHASES = (Phase.generate, Phase.shrink) if os.environ.get("AGENTCTL_TEST_SHRINK") else (Phase.generate,)


@pytest.fixture(autouse=True)
def tell_the_seed() -> Iterator[None]:
    print(f"AGENTCTL_TEST_SEED={SEED}")  # noqa: T201
    yield


def often(count: int) -> settings:
    return settings(
        max_examples=count,
        phases=PHASES,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


CIRCUMSTANCES: dict[str, Any] = {
    "concurrency": st.integers(1, 8),
    "workers": st.integers(1, 8),
    "chance": st.integers(0, 2**32),
}


def assert_equal(picture: Picture, expected: Expected, plain: Callable[[Any], Any] = plain) -> None:
    """A run has come to what the interpreter says. `plain` takes out of outputs what it cannot foresee."""
    assert picture.state == expected.state, picture
    states = {task: state for task, (state, _, _) in picture.tasks.items()}
    assert states == {task: state for task, (state, _) in expected.tasks.items()}
    for task, (_, output, _) in picture.tasks.items():
        told = None if output is None else canonical(plain(loads(output)))
        wanted = expected.tasks[task][1]
        assert told == (None if wanted is None else canonical(plain(wanted))), task
    assert canonical(picture.memory) == canonical(expected.memory)
    assert picture.output is not None
    wanted_output = {task: output for task, (_, output) in expected.tasks.items() if output is not None}
    assert canonical(plain(loads(picture.output))) == canonical(plain(wanted_output))


# -- without processes -------------------------------------------------------------------------------------------------


@hypothesis.seed(SEED)
@often(repeats(2_000, 60))
@given(graph=graphs(), **CIRCUMSTANCES)
def test_a_scheduler_equals_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, concurrency: int, workers: int, chance: int
) -> None:
    play_out(tmp_path_factory, graph, interpret(graph), plain, concurrency, workers, chance)


@hypothesis.seed(SEED)
@often(repeats(300, 30))
@given(program=programs(), **CIRCUMSTANCES)
def test_nested_constructs_equal_the_interpreter(
    tmp_path_factory: pytest.TempPathFactory, program: Program, concurrency: int, workers: int, chance: int
) -> None:
    """Up to five hundred tasks out of routers, loops, fan-outs and calls in one another."""
    expected = interpret_program(program)
    play_out(tmp_path_factory, program, expected, coarse, concurrency, workers, chance)


def play_out(
    tmp_path_factory: pytest.TempPathFactory,
    graph: Graph | Program,
    expected: Expected,
    plain: Callable[[Any], Any],
    concurrency: int,
    workers: int,
    chance: int,
) -> None:
    """Drive a workflow with all that can happen to a driver and to workers, and compare."""
    folder = tmp_path_factory.mktemp("play")
    clock = ManualClock()
    store = Store(folder / "runtime.db", clock, create=True, sync=lambda: None)
    try:
        play = Play(store, clock, graph, concurrency, workers, random.Random(chance))
        assert list(play.plan.order) == expected.order
        play.perform()
        note(f"{play.reloads} reloads, {play.takes} drivers, {play.redeliveries} redeliveries")
        assert_equal(picture_of(store, play.run_id), expected, plain)
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
    def of(
        cls, site: Site, graph: Graph | Program, chance: random.Random, kinds: tuple[str, ...], most: int
    ) -> Disturber:
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


def lay_out(site: Site, name: str, graph: Graph | Program, concurrency: int) -> Path:
    """The workflow in a folder of its own, with the files that it reads."""
    (site.folder / name / "files").mkdir(parents=True)
    for file in FILES:
        (site.folder / name / "files" / file).write_text(SEED_TEXT, encoding="utf-8")
    return site.write(f"{name}/flow.yaml", graph.document(concurrency))


def files_of(site: Site, name: str) -> dict[str, str]:
    return {f"files/{path.name}": path.read_text(encoding="utf-8") for path in (site.folder / name / "files").iterdir()}


def one_by_one(site: Site, graph: Graph | Program) -> Picture:
    """In the foreground, with one worker, one place, and nobody who disturbs."""
    answer = site.ask("run", lay_out(site, "alone", graph, 1), "--workers", "1")
    assert answer.code in (0, 4), answer.err
    run_id = site.only_run()
    assert run_id is not None
    return site.picture(run_id)


def in_a_pool(
    site: Site, name: str, graph: Graph | Program, concurrency: int, workers: int, disturber: Disturber
) -> Picture:
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


def in_the_foreground(
    site: Site, graph: Graph | Program, concurrency: int, workers: int, disturber: Disturber
) -> Picture:
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
@often(repeats(20))
@given(graph=graphs(), **CIRCUMSTANCES)
def test_real_processes_equal_the_interpreter_whoever_dies(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph, concurrency: int, workers: int, chance: int
) -> None:
    through_processes(tmp_path_factory, graph, interpret(graph), plain, concurrency, workers, chance)


@hypothesis.seed(SEED)
@often(repeats(6))
@given(program=programs(60), **CIRCUMSTANCES)
def test_nested_constructs_equal_the_interpreter_whoever_dies(
    tmp_path_factory: pytest.TempPathFactory, program: Program, concurrency: int, workers: int, chance: int
) -> None:
    expected = interpret_program(program)
    through_processes(tmp_path_factory, program, expected, coarse, concurrency, workers, chance)


def through_processes(
    tmp_path_factory: pytest.TempPathFactory,
    graph: Graph | Program,
    expected: Expected,
    plain: Callable[[Any], Any],
    concurrency: int,
    workers: int,
    chance: int,
) -> None:
    """Run a workflow alone, in a calm pool, in one whose processes are killed, and in the foreground; and compare."""
    draw = random.Random(chance)
    with Site(tmp_path_factory.mktemp("alone")) as site:
        alone = one_by_one(site, graph)
        assert_equal(alone, expected, plain)
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
