"""The crash matrix: every named point, every kind of death, every class of idempotency (architecture 4 and 8).

A small run with real processes. One of them dies, or is stopped, exactly at a point. Then only what a service manager
would start again is started again; nobody unlocks anything by hand. The run has to come to the same end as one that
nobody has disturbed, with one exception: an effect that must not be repeated and of which nobody knows whether it
happened is `uncertain`, its task waits, and the run pauses. The ledger outside tells what was really executed.
"""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.faults import POINTS
from agentctl.store.records import ProcessRow
from support.rows import rows
from support.scale import scale, short_lease, time_factor
from support.site import Picture, Site, is_stopped, kill

WORKER_POINTS = (
    "after_claim",
    "before_effect_start",
    "after_effect_start",
    "after_effect_result",
    "after_staging",
    "after_placing",
    "after_ingestion",
    "before_finish",
    "after_finish",
)
IN_DOUBT = ("after_effect_start", "after_effect_result", "before_finish")
DRIVER_POINTS = ("before_commit", "after_commit", "before_run_end")
RESCUE_POINTS = ("before_rescue", "after_rescue")
DECISION_POINTS = ("before_decision", "after_decision")
"""Those of approvals have a matrix of their own."""
COLLECTOR_POINTS = ("after_quarantine", "after_collection")
REMOTE_POINTS = ("after_call_prepared", "after_call_answered", "after_call_stored")
"""Those of calls of other machines are in `test_remote`."""
ACTIONS = ("kill", "parent", "stop")
REPEATABLE = ("pure", "idempotent", "keyed")
CLASSES = (*REPEATABLE, "at_most_once", "unknown")

LEASE, HEARTBEAT = short_lease(), 0.2
SHORT = {"AGENTCTL_LEASE_SECONDS": str(LEASE), "AGENTCTL_HEARTBEAT_SECONDS": str(HEARTBEAT)}
GRACE = 2 * LEASE + 5 + 5
"""A lease, the grace after it, the wait for the end of what was killed, and the gate: nobody hangs for longer."""
AT_ONCE = 14.0
"""Less than a lease of the usual length: the provably dead are not waited for."""

CLOCK = SystemClock()
ITEMS = ["red", "green", "blue", "black"]
APPEND = 'while [ -e "$3" ]; do /bin/sleep 0.02; done; echo "$1" >> "$2"; echo "wrote $1"'


def workflow(ledger: Path, hold: Path, idempotency: str) -> dict[str, Any]:
    """Appends to a ledger, a file, working memory, and what depends on them."""
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "matrix"},
        "spec": {
            "policy": {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
            "runtime": {"maxConcurrency": 8},
            "memory": {"working": {"colour": "none", "count": 0}},
            "actions": {
                "note": {"kind": "builtin.assign"},
                "append": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency},
                "keep": {"kind": "builtin.write"},
                "remember": {"kind": "builtin.memory.write"},
                "recall": {"kind": "builtin.memory.read"},
            },
            "tasks": [
                {"id": "begin", "uses": "action:note", "with": {"n": 1}},
                {
                    "id": "append",
                    "uses": "action:append",
                    "needs": ["begin"],
                    "foreach": {"items": ITEMS, "as": "item"},
                    "with": {"args": ["-c", APPEND, "sh", "${{ vars.item }}", str(ledger), str(hold)]},
                },
                {"id": "keep", "uses": "action:keep", "with": {"path": "out/kept.txt", "content": "kept\n"}},
                {"id": "remember", "uses": "action:remember", "with": {"key": "colour", "value": "red"}},
                {"id": "recall", "uses": "action:recall", "with": {"key": "colour"}},
                {
                    "id": "last",
                    "uses": "action:append",
                    "needs": ["append", "recall"],
                    "with": {"args": ["-c", APPEND, "sh", "last", str(ledger), str(hold)]},
                },
                {
                    "id": "count",
                    "uses": "action:remember",
                    "needs": ["last"],
                    "with": {"key": "count", "value": 5},
                },
            ],
        },
    }


class Scene:
    """A site with that workflow, a pool that a service manager would look after, and the ledger."""

    def __init__(self, folder: Path, idempotency: str, **environment: str) -> None:
        self.site = Site(folder, **environment)
        self.idempotency = idempotency
        self.ledger = folder / "ledger"
        self.hold = folder / "hold"
        self.struck = folder / "struck"
        self.file = self.site.write("matrix.yaml", workflow(self.ledger, self.hold, idempotency))
        self._pool: subprocess.Popen[bytes] | None = None

    def fault(self, point: str, action: str) -> str:
        """The value of `AGENTCTL_FAULT` for one process only."""
        return f"{point}:{action}@{self.struck}"

    def start_pool(self, fault: str | None = None) -> None:
        """Two workers and a coordinator."""
        self._pool = self.site.start("workers", "start", "-n", "2", "--drain-seconds", "3", fault=fault)

    def look_after_the_pool(self) -> None:
        """What a service manager does: a pool that has ended is started again."""
        if self._pool is not None and self._pool.poll() is not None:
            self.start_pool()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        def looked_after() -> bool:
            self.look_after_the_pool()
            return condition()

        self.site.wait_for(looked_after, what, seconds=seconds)

    def wait_for_strike(self) -> None:
        self.wait(self.struck.exists, "somebody reaches the point")

    def wait_for_end(self, run_id: str, seconds: float) -> None:
        self.wait(lambda: self.site.run(run_id).state != "running", "the run ends", seconds)

    def lines(self) -> Counter[str]:
        """What was executed, and how often."""
        return Counter(self.ledger.read_text(encoding="utf-8").split()) if self.ledger.exists() else Counter()

    def judge(self, run_id: str, undisturbed: Picture, *, in_doubt: bool, done: int | None = None) -> None:
        """The end is that of an undisturbed run, but for one effect in doubt whose command ran `done` times."""
        site = self.site
        picture = site.picture(run_id)
        lines = self.lines()
        deliveries = site.deliveries(run_id)
        by_line = {name: deliveries.get(task, 0) for task, name in self.tasks().items()}
        assert all(count <= by_line[name] for name, count in lines.items()), (lines, deliveries)
        doubtful = site.uncertain(run_id)
        if self.idempotency not in REPEATABLE:
            assert set(lines.values()) <= {1}, lines
        if not in_doubt:
            assert doubtful == []
            assert picture == undisturbed
            assert set(lines) == {*ITEMS, "last"}
        else:
            (task,) = doubtful
            assert (picture.state, picture.reason) == ("paused", "uncertain_effect")
            assert picture.tasks[task][0] == "waiting_for_effect"
            assert lines[self.tasks()[task]] == done
            blocked = {task, "append", "last", "count"}
            assert {name: t for name, t in picture.tasks.items() if name not in blocked} == {
                name: t for name, t in undisturbed.tasks.items() if name not in blocked
            }
            assert {picture.tasks[name][0] for name in ("append", "last", "count")} == {"pending"}
            assert picture.memory == {"colour": "red", "count": 0}
            assert set(lines) - {self.tasks()[task]} == set(ITEMS) - {self.tasks()[task]}
        assert site.artifacts(run_id) == {("keep", "out/kept.txt"): b"kept\n"}
        assert (site.folder / "out" / "kept.txt").read_text(encoding="utf-8") == "kept\n"
        assert [path.name for path in (site.folder / "out").iterdir()] == ["kept.txt"]

    def tasks(self) -> dict[str, str]:
        """The task of each line of the ledger."""
        children = rows(self.site.store, "SELECT task_id FROM tasks WHERE task_id LIKE 'append--%' ORDER BY position")
        return {**{task: item for (task,), item in zip(children, ITEMS, strict=True)}, "last": "last"}

    def leave(self) -> None:
        """Let everybody go on and end in order; then nothing may be left over."""
        for row in self.site.store.live_processes():
            if is_stopped(row):
                kill(row, signal.SIGCONT)
        codes = self.site.stop()
        assert set(codes) <= {0, 3}, self.site.report()
        self.site.assert_clean()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(idempotency: str, **environment: str) -> Scene:
        scenes.append(Scene(tmp_path / "site", idempotency, **environment))
        return scenes[-1]

    try:
        yield make
    finally:
        for each in scenes:
            each.site.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    """The end of the run when nobody dies; it does not depend on the class of idempotency."""
    scene = Scene(tmp_path_factory.mktemp("undisturbed"), "unknown")
    with scene.site as site:
        answer = site.ask("run", scene.file, "--workers", "2")
        assert answer.code == 0, answer.err
        assert scene.lines() == Counter(dict.fromkeys((*ITEMS, "last"), 1))
        site.assert_clean()
        return site.picture(answer.data["runId"])


@dataclass(frozen=True)
class Case:
    """A place of the matrix."""

    point: str
    action: str
    idempotency: str = "unknown"

    @property
    def name(self) -> str:
        return f"{self.point}-{self.action}-{self.idempotency}"


def selection(cases: list[Case], each: int, first: int = 0) -> list[Any]:
    """All cases at full scale, else every so many of them: each point, action and class is in it."""
    chosen = cases if scale() >= 1 else cases[first::each]
    return [pytest.param(case, id=case.name) for case in chosen]


def test_the_matrix_has_every_point() -> None:
    named = {*WORKER_POINTS, *DRIVER_POINTS, *RESCUE_POINTS, *DECISION_POINTS, *COLLECTOR_POINTS, *REMOTE_POINTS}
    derived = {"before_derived_run", "during_derived_run"}  # tests/recovery/test_creation.py
    made = {f"{when}_{what}" for when in ("before", "after") for what in ("replay", "compensation")}
    # `made`: test_replay_and_compensation.py
    assert named | {"after_create_run"} | derived | made == set(POINTS)


# -- workers -----------------------------------------------------------------------------------------------------------

WORKER_CASES = [Case(p, a, c) for a in ACTIONS for c in CLASSES for p in WORKER_POINTS]


@pytest.mark.parametrize("case", selection(WORKER_CASES, 7))
def test_a_worker_of_a_pool(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    this = scene(case.idempotency, **(SHORT if case.action == "stop" else {}))
    this.start_pool(this.fault(case.point, case.action))
    this.site.wait_for_workers(2)
    run_id = this.site.submit(this.file)
    this.wait_for_strike()
    this.wait_for_end(run_id, GRACE if case.action == "stop" else AT_ONCE)
    repeatable = case.idempotency in REPEATABLE
    in_doubt = not repeatable and case.point in IN_DOUBT
    this.judge(run_id, undisturbed, in_doubt=in_doubt, done=0 if case.point == "after_effect_start" else 1)
    if case.point in IN_DOUBT:
        # The effect of the dead worker, as the seed demands: the same one is sent again, or it is never sent again.
        sent = rows(this.site.store, "SELECT status, dispatches FROM effects WHERE operation = 'builtin.shell.exec'")
        assert Counter(sent)["succeeded", 2] + Counter(sent)["uncertain", 1] == 1, sent
        assert Counter(sent)["uncertain", 1] == in_doubt
    this.leave()


FOREGROUND_WORKER_CASES = [Case(p, a) for p in WORKER_POINTS for a in ("parent", "kill")]


@pytest.mark.parametrize("case", selection(FOREGROUND_WORKER_CASES, 5))
def test_a_worker_of_a_foreground_run(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    """`parent`: the worker dies together with the process that supervises it and drives the run."""
    this = scene(case.idempotency)
    process = this.site.start("run", this.file, "--workers", "2", fault=this.fault(case.point, case.action))
    this.wait_for_strike()
    in_doubt = case.point in IN_DOUBT
    run_id = this.site.only_run()
    assert run_id is not None
    if case.action == "parent":
        this.wait(lambda: process.poll() is not None, "the foreground run is dead")
        assert this.site.ask("resume", run_id).code == (3 if in_doubt else 0)
    else:
        this.wait(lambda: process.poll() is not None, "the foreground run ends", AT_ONCE)
        assert process.returncode == (3 if in_doubt else 0), this.site.report()
    this.judge(run_id, undisturbed, in_doubt=in_doubt, done=0 if case.point == "after_effect_start" else 1)
    this.leave()


# -- drivers -----------------------------------------------------------------------------------------------------------

DRIVER_CASES = [Case(p, a) for a in ACTIONS for p in DRIVER_POINTS]


@pytest.mark.parametrize("case", selection(DRIVER_CASES, 4))
def test_the_coordinator_of_a_pool(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    this = scene(case.idempotency, **(SHORT if case.action == "stop" else {}))
    this.start_pool(this.fault(case.point, case.action))
    this.site.wait_for_workers(2)
    run_id = this.site.submit(this.file)
    this.wait_for_strike()
    this.wait_for_end(run_id, GRACE if case.action == "stop" else AT_ONCE)
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


def test_a_coordinator_that_was_started_alone_is_stopped(scene: Callable[..., Scene], undisturbed: Picture) -> None:
    """Nobody supervises it; the pool, which had no need of a coordinator of its own, starts one."""
    this = scene("unknown", **SHORT)
    this.site.start("coordinator", "start", fault=this.fault("before_commit", "stop"))
    this.site.wait_for(lambda: len(this.site.living("coordinator")) == 1, "the coordinator")
    this.start_pool()
    this.site.wait_for_workers(2)
    assert len(this.site.living("coordinator")) == 1
    run_id = this.site.submit(this.file)
    this.wait_for_strike()
    this.wait_for_end(run_id, GRACE)
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


@pytest.mark.parametrize("case", selection(DRIVER_CASES, 4, 2))
def test_the_driver_of_a_foreground_run(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    """Killed: `resume` goes on. Stopped: the coordinator of a pool takes the run, and the driver, woken up, follows."""
    this = scene(case.idempotency, **(SHORT if case.action == "stop" else {}))
    process = this.site.start("run", this.file, "--workers", "2", fault=this.fault(case.point, case.action))
    this.wait_for_strike()
    run_id = this.site.only_run()
    assert run_id is not None
    if case.action == "stop":
        # Only now: before, a driver that a busy machine holds up might lose its run to the pool, and never be struck.
        this.start_pool()
        this.wait_for_end(run_id, GRACE)
        (driver,) = this.site.living("run")
        assert is_stopped(driver)
        kill(driver, signal.SIGCONT)
        this.wait(lambda: process.poll() is not None, "the woken driver ends")
        assert process.returncode == 0, this.site.report()
    else:
        this.wait(lambda: process.poll() is not None, "the driver is dead")
        assert process.returncode != 0
        assert this.site.run(run_id).state == "running"
        assert this.site.ask("resume", run_id).code == 0
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


def test_a_run_is_resumed_whose_driver_is_stopped(scene: Callable[..., Scene], undisturbed: Picture) -> None:
    """There is no coordinator: who resumes follows the driver until it has been silent for too long, and takes over."""
    this = scene("unknown", **SHORT)
    process = this.site.start("run", this.file, "--workers", "2", fault=this.fault("after_commit", "stop"))
    this.wait_for_strike()
    run_id = this.site.only_run()
    assert run_id is not None
    assert this.site.ask("resume", run_id, seconds=GRACE).code == 0
    (driver,) = this.site.living("run")
    assert is_stopped(driver)
    kill(driver, signal.SIGCONT)
    this.wait(lambda: process.poll() is not None, "the woken driver ends")
    assert process.returncode == 0, this.site.report()
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


def test_a_run_is_cancelled_whose_driver_is_stopped(scene: Callable[..., Scene]) -> None:
    """Nobody else is there to finish the cancellation, so the command does it itself."""
    this = scene("unknown", **SHORT)
    this.hold.touch()
    process = this.site.start("run", this.file, "--workers", "2", fault=this.fault("after_commit", "stop"))
    this.wait_for_strike()
    run_id = this.site.only_run()
    assert run_id is not None
    (driver,) = this.site.living("run")
    this.wait(lambda: is_stopped(driver), "the driver is stopped")
    this.wait(lambda: CLOCK.now() - _heartbeat(this, driver) > 2 * LEASE * 1000, "the driver has been silent for long")
    answer = this.site.ask("cancel", run_id, seconds=GRACE)
    assert answer.code == 0, answer.err
    assert this.site.run(run_id).state == "cancelled"
    kill(driver, signal.SIGCONT)
    this.wait(lambda: process.poll() is not None, "the woken driver ends")
    assert process.returncode == 130, this.site.report()
    assert this.lines() == Counter()
    this.leave()


def _heartbeat(this: Scene, row: ProcessRow) -> int:
    now = this.site.store.get_process(row.process_id)
    assert now is not None
    return now.heartbeat_at


CREATE_CASES = [Case("after_create_run", action) for action in ACTIONS]


@pytest.mark.parametrize("case", selection(CREATE_CASES, 2))
def test_whoever_submits(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    """The run exists, so the pool executes it, whatever became of the command that has created it."""
    this = scene(case.idempotency)
    this.start_pool()
    this.site.wait_for_workers(2)
    process = this.site.start("submit", this.file, fault=this.fault(case.point, case.action))
    this.wait_for_strike()
    run_id = this.site.only_run()
    assert run_id is not None
    this.wait_for_end(run_id, AT_ONCE)
    if case.action == "stop":
        this.site.wake_everything()
        this.wait(lambda: process.poll() is not None, "the woken command ends")
        assert process.returncode == 0
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


@pytest.mark.parametrize("case", selection(CREATE_CASES[:2], 2))
def test_a_foreground_run_that_has_just_begun(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    this = scene(case.idempotency)
    process = this.site.start("run", this.file, fault=this.fault(case.point, case.action))
    this.wait(lambda: process.poll() is not None, "the command is dead")
    run_id = this.site.only_run()
    assert run_id is not None
    assert this.lines() == Counter()
    assert this.site.ask("resume", run_id).code == 0
    this.judge(run_id, undisturbed, in_doubt=False)
    this.leave()


# -- rescuers ----------------------------------------------------------------------------------------------------------

RESCUE_CASES = [Case(p, a, c) for a in ACTIONS for c in CLASSES for p in RESCUE_POINTS]


@pytest.mark.parametrize("case", selection(RESCUE_CASES, 7))
def test_whoever_rescues(scene: Callable[..., Scene], undisturbed: Picture, case: Case) -> None:
    """A worker is killed while its command runs, and then the process that settles what it has left behind."""
    this = scene(case.idempotency, **(SHORT if case.action == "stop" else {}))
    this.hold.touch()
    this.start_pool(this.fault(case.point, case.action))
    this.site.wait_for_workers(2)
    run_id = this.site.submit(this.file)
    held = "SELECT holder FROM attempts JOIN effects USING (attempt_id) WHERE status = 'started' AND state = 'claimed'"
    this.wait(lambda: len(rows(this.site.store, held)) == 2, "two commands run")
    victims = [row for row in this.site.living("worker") if (row.process_id,) in rows(this.site.store, held)]
    assert kill(victims[0])
    this.wait_for_strike()
    this.hold.unlink()
    struck_at = CLOCK.monotonic()
    this.wait_for_end(run_id, GRACE if case.action == "stop" else AT_ONCE)
    assert CLOCK.monotonic() - struck_at < GRACE * time_factor() + AT_ONCE
    this.judge(run_id, undisturbed, in_doubt=case.idempotency not in REPEATABLE, done=0)
    this.leave()
