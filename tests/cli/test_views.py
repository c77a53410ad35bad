"""What is shown about runs: a real database, filled through the verbs of the store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import apsw
import pytest
from agentctl.cli.main import Settings
from agentctl.cli.render import Printer
from agentctl.cli.run import _Follower
from agentctl.store import process_identity
from agentctl.store.canonical import canonical, effect_id, input_digest
from agentctl.store.engine import Store
from agentctl.store.errors import CorruptStore, IncompatibleVersion, NotFoundError, UsageError
from agentctl.store.process_identity import ProcessIdentity
from agentctl.store.records import (
    AttemptEnd,
    Batch,
    Claim,
    EffectEnd,
    EffectRequest,
    NewAttempt,
    NewRun,
    ProcessRow,
    StartedEffect,
)
from agentctl.store.views import MAX_WAITING, Views
from support.children import PATIENCE

LEASE = 30_000
KEYS = [
    "run",
    "tasks",
    "effects",
    "effectReconciliations",
    "approvals",
    "checkpoints",
    "providerSessions",
    "streamEvents",
    "protocolSessions",
    "protocolCalls",
    "toolCalls",
    "artifacts",
    "budget",
    "audit",
    "traces",
]


class Fixed:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 1_700_000_000_000

    def now(self) -> int:
        return self.time

    def monotonic(self) -> float:
        return self.time / 1000

    def sleep(self, seconds: float) -> None:
        self.time += int(seconds * 1000)


class World:
    """A store with runs in it. The plan of a run has only what the views read."""

    def __init__(self, path: Path) -> None:
        self.clock = Fixed()
        self.path = path
        self.store = Store(path, self.clock, create=True)
        self.views = Views(self.store.database, self.clock)
        self.epochs: dict[str, int] = {}

    def run(self, name: str, tasks: dict[str, dict[str, Any]], **more: Any) -> str:
        self.clock.time += 10
        plan = {"tasks": {task: {"needs": [], "memoryAfter": [], **data} for task, data in tasks.items()}}
        new = NewRun(
            run_id=name,
            trace_id=f"trace-{name}",
            mode="execute",
            workflow_name="flow",
            workflow_digest="w",
            plan_digest="p",
            submission_digest="s",
            workflow_json="{}",
            plan_json=canonical(plan),
            inputs_json="{}",
            settings_json="{}",
            base_path="/",
            task_ids=tuple(tasks),
            max_concurrency=4,
            max_deliveries=3,
            memory={"k": "1"},
            **more,
        )
        self.store.create_run(new)
        return name

    def process(self, process_id: str, kind: str, *, alive: bool = True, **more: Any) -> None:
        identity = process_identity.current()
        if not alive:
            identity = ProcessIdentity(identity.boot_id, identity.pid_namespace, identity.pid, 1)
        values: dict[str, Any] = {
            "process_id": process_id, "kind": kind, "name": process_id, "identity": identity.as_text(),
            "pid": identity.pid, "parent_process_id": None, "only_run": None, "unit": None, "state": "idle",
            "version": "0", "started_at": self.clock.time, "heartbeat_at": self.clock.time,
            "drain_requested_at": None, "stopped_at": None, "done": 0, "failed": 0, "rss_bytes": 1 << 20,
        }  # fmt: skip
        self.store.register(ProcessRow(**{**values, **more}))

    def drive(self, run_id: str, driver: str = "driver", *, alive: bool = True) -> None:
        self.process(driver, "coordinator", alive=alive)
        epoch = self.store.take_run(run_id, driver=driver, epoch=0, lease_ms=LEASE)
        assert epoch is not None
        self.epochs[run_id] = epoch

    def commit(self, run_id: str, batch: Batch) -> None:
        run = self.store.get_run(run_id)
        assert run.driver is not None
        self.store.commit_batch(run, batch, driver=run.driver, epoch=self.epochs[run_id], revision=run.revision)

    def enqueue(self, run_id: str, *positions: int, number: int = 1) -> None:
        names = list(self.names(run_id))
        batch = Batch()
        for position in positions:
            batch.readies.append((None, None, position))
            batch.enqueues.append(NewAttempt(position, names[position], number, 1000, "{}"))
        self.commit(run_id, batch)

    def names(self, run_id: str) -> list[str]:
        return [task["taskId"] for task in self.views.tasks(run_id, limit=1000)[0]]

    def claim(self, worker: str = "w1") -> Claim:
        following = self.store.claim(worker, only_run=None, lease_ms=LEASE, awake=True)
        claim = None if following is None else following.claim
        assert claim is not None
        return claim

    def start(self, claim: Claim, effect_class: str = "process_execution") -> str:
        digest = input_digest({"n": claim.task_id})
        effect = effect_id(claim.run_id, claim.task_id, claim.number, 1, "builtin.shell.exec", digest)
        request = EffectRequest(
            effect, 1, "builtin.shell.exec", effect_class, "high", "unknown", digest, '{"n":1}', "{}", {}
        )
        answer = self.store.start_effect(claim.fence, request, previous=None, task_id=claim.task_id)
        assert isinstance(answer, StartedEffect)
        return effect

    def finish(self, claim: Claim, effect: str, status: str, result: Any, error: Any = None) -> None:
        def text(value: Any) -> str | None:
            return None if value is None else canonical(value)

        self.store.finish(
            claim,
            AttemptEnd(status, None, effect, text(error)),
            effect=EffectEnd(effect, status, text(result), text(error)),
            next_claim=False,
            only_run=None,
            lease_ms=LEASE,
        )

    def sql(self, statement: str, *arguments: Any) -> None:
        """A change that no verb makes: what a newer version, or damage, would have left.

        By the same SQLite library: a second one in this process would drop the locks of the first when it closes.
        """
        connection = apsw.Connection(str(self.path))
        with connection:
            for trigger in ("audit_events_no_update", "checkpoints_no_update"):
                connection.execute(f"DROP TRIGGER IF EXISTS {trigger}")
            connection.execute(statement, arguments)
        connection.close()

    def why(self, run_id: str) -> dict[str, str]:
        return {item["taskId"]: item["why"] for item in self.views.status(run_id)["waiting"]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "runtime.db")
    yield made
    made.store.close()


def test_why_tasks_wait(world: World) -> None:
    tasks = {"a": {}, "b": {"needs": ["a"]}, "c": {"memoryAfter": [0]}, "d": {}}
    run = world.run("run-1", tasks)
    assert world.why(run) == {"a": "no_driver", "b": "needs", "c": "memory", "d": "no_driver"}
    world.drive(run)
    assert world.why(run)["d"] == "place"
    world.enqueue(run, 0)
    assert world.why(run)["a"] == "no_worker"
    world.process("w1", "worker")
    assert world.why(run)["a"] == "place"
    world.process("w2", "worker", only_run="run-other")
    world.process("w3", "worker", alive=False)
    claim = world.claim()
    status = world.views.status(run)
    assert "a" not in world.why(run)
    assert [(task["taskId"], task["workerId"]) for task in status["running"]] == [("a", "w1")]
    assert status["waitingCount"] == 3
    effect = world.start(claim)
    world.store.rescue(
        [(claim.fence.attempt_id, claim.fence.delivery)], dead=["w1"], why="worker w1 is dead", actor="t"
    )
    world.commit(
        run,
        Batch(
            waits=[("waiting_for_effect", None, canonical({"message": "nobody knows"}), 0)],
            parked=[claim.fence.attempt_id],
        ),
    )
    status = world.views.status(run)
    assert status["waiting"][0] == {"taskId": "a", "why": "reconciliation", "detail": "nobody knows"}
    assert [item["effectId"] for item in status["uncertainEffects"]] == [effect]
    assert status["uncertainEffectCount"] == 1


def test_backoff_budget_pause_and_dead_drivers(world: World) -> None:
    run = world.run("run-1", {"a": {}, "b": {}, "c": {}})
    world.drive(run)
    world.process("w1", "worker")
    world.enqueue(run, 0, 1)
    claim = world.claim()
    world.finish(claim, world.start(claim), "failed", None, {"code": "process_exit", "message": "exit 1"})
    world.commit(
        run,
        Batch(
            waits=[("retry_scheduled", world.clock.now() + 2500, canonical({"message": "exit 1"}), 0)],
            closed=[claim.fence.attempt_id],
        ),
    )
    waiting = {item["taskId"]: item for item in world.views.status(run)["waiting"]}
    assert waiting["a"] == {"taskId": "a", "why": "backoff", "detail": "attempt 2 follows in 2.5 s after: exit 1"}
    assert waiting["b"]["why"] == "place"
    world.sql("UPDATE attempts SET hold = 'budget', hold_json = '{}', queue = NULL WHERE state = 'ready'")
    assert world.why(run)["b"] == "budget"
    world.sql("UPDATE runs SET pause_requested_at = 1")
    assert world.why(run) == {"a": "backoff", "b": "paused", "c": "paused"}
    world.sql("UPDATE runs SET pause_requested_at = NULL")
    world.sql("UPDATE processes SET state = 'dead', stopped_at = 1 WHERE kind = 'coordinator'")
    assert world.why(run)["c"] == "no_driver"
    assert world.views.status(run)["driver"]["liveness"] == "dead"


def test_a_list_of_runs_says_who_drives_each(world: World) -> None:
    for name, driver, alive in (("run-1", "d1", True), ("run-2", "d2", False), ("run-3", None, True)):
        world.run(name, {"a": {}})
        if driver is not None:
            world.drive(name, driver, alive=alive)
    listed = {run["runId"]: run["driver"] for run in world.views.list_runs(limit=10)["runs"]}
    assert {name: driver and driver["liveness"] for name, driver in listed.items()} == {
        "run-1": "alive",
        "run-2": "dead",
        "run-3": None,
    }
    assert listed == {name: world.views.status(name)["driver"] for name in listed}


def test_waiting_tasks_are_bounded_and_counted(world: World) -> None:
    tasks: dict[str, dict[str, Any]] = {f"t{i}": {} for i in range(500)}
    tasks["all"] = {"needs": list(tasks)}
    run = world.run("run-1", tasks)
    status = world.views.status(run)
    assert (len(status["waiting"]), status["waitingCount"]) == (MAX_WAITING, 501)


def test_inspection_has_every_key_and_the_records_of_the_contract(world: World) -> None:
    run = world.run("run-1", {"a": {}})
    world.drive(run)
    world.enqueue(run, 0)
    claim = world.claim()
    effect = world.start(claim)
    world.finish(claim, effect, "succeeded", {"exitCode": 0, "stdout": "out", "stderr": ""})
    output = canonical({"x": 1})
    world.commit(
        run,
        Batch(
            finals=[("succeeded", 1, None, output, "d", None, None, None, None, 0)],
            closed=[claim.fence.attempt_id],
            memory=[("k", 0, "2")],
            changes=[[0, "succeeded", 1, "d", None]],
            run_state="succeeded",
            run_output_json='{"y":2}',
        ),
    )
    found = world.views.inspect(run)
    assert list(found) == KEYS
    assert found["run"]["workingMemory"] == {"k": 2}
    assert found["run"]["output"] == {"y": 2}
    assert found["tasks"][0]["deliveries"] == 1
    assert found["tasks"][0]["output"] == {"x": 1}
    assert found["effects"][0]["request"]["id"] == effect
    assert found["effects"][0]["attemptNumber"] == 1
    assert found["effects"][0]["confirmed"] is True
    sequences = [event["sequence"] for event in found["audit"]]
    assert sequences == list(range(1, len(sequences) + 1))
    assert [event["sequence"] for event in world.views.events(run, after=2, limit=2)] == [3, 4]
    outcome = world.views.outcome(run)
    assert outcome == {
        "runId": run, "traceId": "trace-run-1", "state": "succeeded", "reason": None, "output": {"y": 2}, "error": None,
        "cancelReason": None, "pauseReason": None,
    }  # fmt: skip
    status = world.views.status(run)
    assert (status["waiting"], status["waitingCount"], status["driver"]) == ([], 0, None)
    world.sql("UPDATE checkpoints SET state_json = '{}' WHERE sequence = 2")
    with pytest.raises(CorruptStore):
        world.views.inspect(run)


def test_logs_take_streams_from_results_and_from_errors(world: World) -> None:
    run = world.run("run-1", {"a": {}, "b": {}, "c": {}})
    world.drive(run)
    world.enqueue(run, 0, 1, 2)
    first, second, third = world.claim(), world.claim(), world.claim()
    result = {"exitCode": 3, "stdout": "out", "stderr": "err"}
    world.finish(first, world.start(first), "failed", result, {"code": "process_exit", "message": "m"})
    overflow = {
        "code": "subprocess_output_limit_exceeded",
        "message": "m",
        "details": {"stdoutPrefix": "beginning", "stderrPrefix": ""},
    }
    world.finish(second, world.start(second), "failed", None, overflow)
    world.finish(third, world.start(third, "observe"), "succeeded", {"content": "no process"})
    one, two = world.views.logs(run, None)
    assert (one["taskId"], one["exitCode"], one["stdout"], one["stderr"]) == ("a", 3, "out", "err")
    assert (one["truncated"], two["truncated"], two["stdout"]) == (False, True, "beginning")
    assert world.views.logs(run, "b") == [two]
    assert world.views.logs(run, "c") == []
    with pytest.raises(NotFoundError):
        world.views.logs(run, "d")


def test_workers(world: World) -> None:
    run = world.run("run-1", {"a": {}})
    world.drive(run)
    world.enqueue(run, 0)
    world.process("old", "worker", alive=False, name="w3")
    world.process("new", "worker", name="w3", state="busy")
    world.process("super", "supervisor")
    world.claim("new")
    workers = world.views.workers()["workers"]
    assert [(w["workerId"], w["name"], w["state"]) for w in workers] == [("new", "w3", "busy"), ("old", "w3", "dead")]
    assert (workers[0]["taskId"], workers[0]["attempt"], workers[0]["delivery"]) == ("a", 1, 1)
    assert workers[0]["leaseExpiresAt"] == world.clock.now() + LEASE


def test_items_of_expansions_hide_secrets_and_need_no_readable_plan(world: World) -> None:
    bound = {"token": "abc", "foreachIndex": 0}
    expansion = {"parent": "a", "index": 0, "bindings": bound}
    run_id = world.run("r", {"a--0": {"expansion": expansion}, "b": {}})
    assert world.views.bindings(run_id, ["a--0", "b"]) == {"a--0": {**bound, "token": "[REDACTED]"}}
    with apsw.Connection(str(world.path)) as damaged:
        damaged.execute("UPDATE run_documents SET plan_json = '{'")
    assert world.views.bindings(run_id, ["a--0", "b"]) == {}


def test_runs_are_found_by_prefix_and_latest(world: World) -> None:
    with pytest.raises(NotFoundError):
        world.views.find_run("@latest")
    world.run("run-aaaa-1", {"a": {}})
    world.run("run-aabb-2", {"a": {}})
    assert world.views.find_run("run-aaaa-1") == "run-aaaa-1"
    assert world.views.find_run("run-aaa") == "run-aaaa-1"
    assert world.views.find_run("@latest") == "run-aabb-2"
    with pytest.raises(UsageError):
        world.views.find_run("run-aa")
    for absent in ("run-c", "", "r", "%", "run-aaaa-1x"):
        with pytest.raises(NotFoundError):
            world.views.find_run(absent)


def test_runs_are_found_without_the_word_that_their_ids_begin_with(world: World) -> None:
    made = [f"{word}-01a2-{index}" for index, word in enumerate(("run", "fork", "replay", "repair", "retry"))]
    for run_id in [*made, "compensation-01b3-9"]:
        world.run(run_id, {"a": {}})
    for run_id in made:
        assert world.views.find_run(run_id.partition("-")[2]) == run_id
    assert world.views.find_run("01b3") == "compensation-01b3-9"
    with pytest.raises(UsageError, match="run-01a2-0 and fork-01a2-1 among them"):
        world.views.find_run("01a2")
    for absent in ("1a2-0", "01a", "01c4", "-01a2-0"):
        with pytest.raises(NotFoundError):
            world.views.find_run(absent)


FUTURE = {
    "runs.runtime_state_version": ("UPDATE runs SET runtime_state_version = 99", ("status", "inspect", "logs")),
    "runs.plan_format_version": ("UPDATE runs SET plan_format_version = 99", ("status", "inspect", "outcome")),
    "tasks.metadata_version": ("UPDATE tasks SET metadata_version = 99", ("status", "inspect", "progress")),
    "effects.format_version": ("UPDATE effects SET format_version = 99", ("inspect", "logs")),
    "checkpoints.format_version": ("UPDATE checkpoints SET format_version = 99", ("inspect",)),
    "audit_events.event_version": ("UPDATE audit_events SET event_version = 99", ("inspect", "events")),
    "run_budgets.format_version": ("UPDATE run_budgets SET format_version = 99", ("status", "inspect")),
}


@pytest.mark.parametrize("what", FUTURE)
def test_rows_from_the_future_are_refused(world: World, what: str) -> None:
    run = world.run("run-1", {"a": {}})
    world.drive(run)
    world.enqueue(run, 0)
    world.start(world.claim())
    statement, verbs = FUTURE[what]
    world.sql(statement)
    asked = {
        "status": lambda: world.views.status(run),
        "inspect": lambda: world.views.inspect(run),
        "logs": lambda: world.views.logs(run, None),
        "events": lambda: world.views.events(run),
        "progress": lambda: world.views.progress(run),
        "outcome": lambda: world.views.outcome(run),
    }
    for verb in verbs:
        with pytest.raises(IncompatibleVersion):
            asked[verb]()


def test_a_picture_that_takes_long_to_draw_is_drawn_again_soon(world: World) -> None:
    """Whoever looks seldom spares the database; what drawing costs, the library of the first picture above all, is
    no reason to look seldom."""
    run = world.run("run-1", {"a": {}})
    drawn: list[float] = []

    class Slow:
        interval = 0.2

        def update(self, progress: Mapping[str, Any]) -> None:
            drawn.append(world.clock.monotonic())
            world.clock.sleep(1)

        def close(self) -> None:
            return

    follower = _Follower(Printer(Settings(world.path)), world.store, run, Slow(), at_once=True)
    for _ in range(10):
        follower.tick()
        world.clock.sleep(0.1)
    assert len(drawn) == 5


def test_nothing_stays_open_and_writers_do_not_block(world: World) -> None:
    run = world.run("run-1", {f"t{i}": {} for i in range(2000)})
    other = apsw.Connection(str(world.path))
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    world.views.status(run)
    world.views.inspect(run)
    world.views.list_runs(limit=10)
    assert time.monotonic() - began < PATIENCE
    other.execute("ROLLBACK")
    assert not world.store.database.connection.in_transaction
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()


def test_five_thousand_runs_are_listed_quickly(world: World) -> None:
    world.run("run-0", {"a": {}, "b": {}})
    connection = apsw.Connection(str(world.path))
    row = list(connection.execute("SELECT * FROM runs").fetchone())
    names = [item[1] for item in connection.execute("PRAGMA table_info(runs)")]
    rows, tasks = [], []
    for number in range(1, 5000):
        copy = list(row)
        copy[names.index("run_id")] = f"run-{number:05d}"
        copy[names.index("first_task")] = first = number * 2 + 1
        copy[names.index("created_at")] += number
        rows.append(copy)
        tasks += [(first + i, copy[0], f"t{i}", i) for i in range(2)]
    with connection:
        connection.executemany(f"INSERT INTO runs VALUES ({','.join('?' * len(names))})", rows)  # noqa: S608
        connection.executemany(
            "INSERT INTO tasks (task_no, run_id, task_id, position, state, updated_at) VALUES (?,?,?,?,'pending',0)",
            tasks,
        )
    connection.close()
    began = time.thread_time()
    page = world.views.list_runs(limit=50)
    spent = time.thread_time() - began
    assert [run["taskCounts"] for run in page["runs"]] == [{"pending": 2}] * 50
    assert page["runs"][0]["runId"] == "run-04999"
    assert spent < 0.25
    began = time.thread_time()
    assert len(world.views.list_runs(limit=1000)["runs"]) == 1000
    assert time.thread_time() - began < 1
