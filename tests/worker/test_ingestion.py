"""From a succeeded effect to stored artifacts, attempt by attempt: what a stop, a fault or a budget does to it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import blobs
from agentctl.store.canonical import canonical, loads
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.gate import record_locks
from agentctl.store.records import Batch, NewAttempt
from agentctl.store.timing import Timing
from agentctl.worker.attempt import AttemptRunner, Ending
from agentctl.worker.watch import Token
from support.artifacts import assert_sound, digest_of
from support.builders import Driver, Hand, new_run
from support.rows import ledger_line, rows, scalar

SCRIPT = "echo ran >> ran; echo one > out/1; echo two > out/2"


class At(Faults):
    """Does something when a point is reached, as somebody outside might."""

    def __init__(self, point: str, action: Callable[[], None]) -> None:
        super().__init__(None)
        self._where, self._do = point, action

    def reach(self, point: str) -> None:
        if point == self._where:
            self._do()


class Scene:
    """One task that keeps two files, and a worker that is told what happens when."""

    def __init__(self, folder: Path, idempotency: str = "idempotent", limit: int = 100, keep: str = "out/*") -> None:
        self.folder = folder
        (folder / "out").mkdir()
        self.store = Store(folder / "state" / "agentctl.db", SystemClock(), create=True)
        action = {
            "kind": "builtin.shell.exec",
            "command": "sh",
            "idempotency": idempotency,
            "artifacts": [keep],
        }
        policy = {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]}
        settings = {"actions": {"keep": action}, "policy": policy, "showDiff": False}
        new = new_run(
            tasks=1,
            settings_json=canonical(settings),
            base_path=str(folder),
            budget_limits={"artifactBytes": limit},
        )
        self.store.create_run(new)
        self.driver = Driver(self.store, "run-1")
        self.token = Token()
        content = canonical({"action": "keep", "input": {"args": ["-c", SCRIPT]}})
        batch = Batch()
        batch.readies.append((None, None, 0))
        batch.enqueues.append(NewAttempt(0, "t0", 1, 60_000, content))
        batch.changes.append([0, "ready", 0, None, None])
        self.driver.write(batch)

    def run(self, point: str = "", action: Callable[[], None] = lambda: None, name: str = "worker-1") -> Ending:
        """One delivery of the task."""
        self.token.reset()
        self.hand = Hand(self.store, name)
        self.claim = self.hand.take()
        faults = At(point, action)
        return AttemptRunner(self.store, self.store.clock, Timing(), faults, self.token).run(self.claim)

    def finish(self, ending: Ending) -> None:
        """What the worker's loop does with an ending."""
        if ending.attempt is None:
            if not ending.held:
                self.store.release(self.claim, effect=ending.effect, reason=ending.release or "", pause=ending.pause)
            return
        self.store.finish(
            self.claim, ending.attempt, effect=ending.effect, next_claim=False, only_run=None, lease_ms=1000
        )

    def executed(self) -> int:
        return len((self.folder / "ran").read_text().splitlines())

    def error(self, ending: Ending) -> Any:
        assert ending.attempt is not None and ending.attempt.error_json is not None
        return loads(ending.attempt.error_json)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def build(**options: Any) -> Scene:
        scenes.append(Scene(tmp_path, **options))
        return scenes[-1]

    yield build
    for scene in scenes:
        assert_sound(scene.store.artifacts)
        scene.store.close()


def test_a_file_of_the_database_is_no_artifact(make: Callable[..., Scene]) -> None:
    """Nothing but SQLite may open it: see `belongs_to_open_database`."""
    scene = make(limit=1 << 20)
    place = scene.store.database.path
    os.link(f"{place}-shm", scene.folder / "out" / "index")
    held = record_locks(f"{place}-shm")
    ending = scene.run()
    assert scene.error(ending)["code"] == "policy_denied"
    assert "'out/index'" in scene.error(ending)["message"]
    assert record_locks(f"{place}-shm") == held != []
    scene.finish(ending)
    os.unlink(scene.folder / "out" / "index")


def test_it_succeeds_with_its_artifacts(make: Callable[..., Scene]) -> None:
    scene = make()
    ending = scene.run()
    assert ending.attempt is not None and ending.attempt.outcome == "succeeded"
    assert ending.effect is None, "its end is recorded already"
    assert rows(scene.store, "SELECT status, confirmed FROM effects") == [("succeeded", 1)]
    scene.finish(ending)
    scene.driver.commit()
    kept = {item["path"]: item["digest"] for item in scene.store.artifacts.references("run-1", None)}
    assert kept == {"out/1": digest_of(b"one\n"), "out/2": digest_of(b"two\n")}
    assert ledger_line(scene.store, "artifactBytes") == (100, 8, 0)


@pytest.mark.parametrize("reason", ["drain", "cancel_requested", "deadline"])
@pytest.mark.parametrize("idempotency", ["idempotent", "at_most_once"])
def test_a_stop_while_it_copies_leaves_no_doubt(make: Callable[..., Scene], reason: str, idempotency: str) -> None:
    """The effect has succeeded and is recorded so. After a drain the next delivery stores, and executes nothing."""
    scene = make(idempotency=idempotency)
    ending = scene.run("after_effect_result", lambda: scene.token.cancel(reason))
    assert rows(scene.store, "SELECT status FROM effects") == [("succeeded",)]
    assert rows(scene.store, "SELECT * FROM artifact_blobs") == []
    assert ledger_line(scene.store, "artifactBytes") == (100, 0, 0)
    scene.finish(ending)
    if reason != "drain":
        assert ending.attempt is not None and ending.attempt.outcome == "cancelled"
        return
    assert ending.release == "drain"
    again = scene.run(name="worker-2")
    assert again.attempt is not None and again.attempt.outcome == "succeeded"
    scene.finish(again)
    scene.driver.commit()
    assert scene.executed() == 1
    assert len(scene.store.artifacts.references("run-1", None)) == 2


@pytest.mark.parametrize("idempotency", ["idempotent", "at_most_once"])
def test_a_store_that_cannot_take_the_bytes_pauses_the_run(make: Callable[..., Scene], idempotency: str) -> None:
    """The effect is confirmed and must not be lost for a fault that is not the task's (field report 15)."""
    scene = make(idempotency=idempotency)
    scene.store.artifacts.blobs.stage_bytes(b"x").path.unlink()
    tmp = scene.folder / "state" / "artifacts" / "tmp"

    def move_away() -> None:
        tmp.rename(tmp.with_name("away"))

    ending = scene.run("after_effect_result", move_away)
    tmp.with_name("away").rename(tmp)
    assert (ending.attempt, ending.release) == (None, "artifact_store")
    scene.finish(ending)
    assert ledger_line(scene.store, "artifactBytes") == (100, 0, 0)
    assert rows(scene.store, "SELECT status FROM effects") == [("succeeded",)]
    [(reason,)] = rows(scene.store, "SELECT pause_reason FROM runs WHERE pause_requested_at IS NOT NULL")
    assert str(tmp) in reason
    assert "agentctl resume run-1" in reason
    assert scene.store.claim("worker-2", only_run=None, lease_ms=1000, awake=False) is None
    assert scene.store.withdraw_pause("run-1", actor="test")
    again = scene.run(name="worker-2")
    assert again.attempt is not None and again.attempt.outcome == "succeeded"
    scene.finish(again)
    scene.driver.commit()
    assert scene.executed() == 1
    assert len(scene.store.artifacts.references("run-1", None)) == 2


def test_a_lock_that_nobody_lets_go_pauses_the_run(make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    scene = make()
    monkeypatch.setattr(blobs, "LOCK_NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(blobs, "LOCK_PATIENCE_SECONDS", 0.1)
    scene.store.artifacts.blobs.stage_bytes(b"x").path.unlink()
    lock = os.open(scene.folder / "state" / "artifacts" / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    ending = scene.run()
    os.close(lock)
    assert ending.pause is not None and f"process {os.getpid()}" in ending.pause
    scene.finish(ending)
    assert scene.store.withdraw_pause("run-1", actor="test")
    scene.finish(scene.run(name="worker-2"))
    scene.driver.commit()
    assert scene.executed() == 1
    assert len(scene.store.artifacts.references("run-1", None)) == 2


def test_a_run_that_is_being_cancelled_does_not_pause(make: Callable[..., Scene]) -> None:
    scene = make()
    scene.store.artifacts.blobs.stage_bytes(b"x").path.unlink()
    tmp = scene.folder / "state" / "artifacts" / "tmp"

    def cancel() -> None:
        scene.store.request_cancel("run-1", reason="x", actor="test")
        tmp.rename(tmp.with_name("away"))

    ending = scene.run("after_effect_result", cancel)
    tmp.with_name("away").rename(tmp)
    scene.finish(ending)
    assert rows(scene.store, "SELECT state FROM attempts") == [("ready",)]
    assert rows(scene.store, "SELECT pause_requested_at FROM runs") == [(None,)]


def test_files_that_change_meanwhile_are_refused(make: Callable[..., Scene]) -> None:
    scene = make()
    target = scene.folder / "out" / "2"
    grow = scene.store.artifacts.begin

    def begin(*given: Any) -> Any:
        answer = grow(*given)
        with open(target, "a") as file:
            file.write("more")
        return answer

    scene.store.artifacts.begin = begin  # type: ignore[method-assign]
    error = scene.error(scene.run())
    assert (error["code"], error["details"]) == ("artifact_changed", {"path": "out/2"})
    assert ledger_line(scene.store, "artifactBytes") == (100, 0, 0)


def test_bytes_that_never_fit_fail_the_task_after_its_effect(make: Callable[..., Scene]) -> None:
    scene = make(limit=7)
    ending = scene.run()
    error = scene.error(ending)
    assert (error["code"], error["details"]["dimension"]) == ("budget_exceeded", "artifactBytes")
    scene.finish(ending)
    scene.driver.commit()
    assert rows(scene.store, "SELECT status FROM effects") == [("succeeded",)]
    assert scalar(scene.store, "SELECT exceeded_json IS NOT NULL FROM run_budgets")


def test_bytes_that_wait_for_others_give_the_worker_back(make: Callable[..., Scene]) -> None:
    scene = make(limit=10)
    with scene.store.database.write() as tx:  # somebody else is about to store
        tx.execute("UPDATE budget_lines SET reserved = 5 WHERE dimension = 'artifactBytes'")
    ending = scene.run()
    assert (ending.held, ending.attempt) == (True, None)
    assert rows(scene.store, "SELECT state, hold, holder FROM attempts") == [("ready", "budget", None)]
    with scene.store.database.write() as tx:
        tx.execute("UPDATE budget_lines SET reserved = 0 WHERE dimension = 'artifactBytes'")
        tx.execute("UPDATE attempts SET hold = 'place', hold_json = NULL")
    assert scene.driver.let_in() == [0]
    again = scene.run(name="worker-2")
    assert again.attempt is not None and again.attempt.outcome == "succeeded"
    scene.finish(again)
    scene.driver.commit()
    assert scene.executed() == 1
    assert ledger_line(scene.store, "artifactBytes") == (10, 8, 0)


def test_a_store_that_cannot_be_written_prevents_the_dispatch(make: Callable[..., Scene]) -> None:
    scene = make()
    root = scene.folder / "state" / "artifacts"
    root.write_text("in the way")
    ending = scene.run()
    error = scene.error(ending)
    assert (error["code"], str(root) in error["message"]) == ("artifact_store", True)
    assert rows(scene.store, "SELECT * FROM effects") == []
    assert not os.path.exists(scene.folder / "ran")
    root.unlink()
    assert json.loads(canonical(error)) == error


def dies_while_it_stores(scene: Scene, point: str = "after_staging") -> None:
    """A worker that is gone at that point, and whose delivery the rescuer has settled."""

    def die() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        scene.run(point, die)
    fence = scene.claim.fence
    assert scene.store.rescue([(fence.attempt_id, fence.delivery)], dead=[], why="x", actor="test") == ["ready"]


@pytest.mark.parametrize(
    ("what", "words"),
    [("changed", "written to"), ("grown", "5000 bytes instead of 4"), ("gone", "it is gone")],
)
def test_what_changed_after_a_death_is_not_kept(make: Callable[..., Scene], what: str, words: str) -> None:
    """The command's result is confirmed, and the files are those of that moment or none (seed)."""
    scene = make()
    dies_while_it_stores(scene)
    target = scene.folder / "out" / "1"
    if what == "gone":
        target.unlink()
    else:
        target.write_text("two\n" if what == "changed" else "x" * 5000)
        os.utime(target, ns=(1, 1))
    ending = scene.run(name="worker-2")
    error = scene.error(ending)
    assert (error["code"], error["retryable"], error["details"]) == ("artifact_changed", False, {"path": "out/1"})
    assert words in error["message"]
    scene.finish(ending)
    scene.driver.commit()
    assert scene.executed() == 1
    assert scene.store.artifacts.references("run-1", None) == []
    assert ledger_line(scene.store, "artifactBytes") == (100, 0, 0)


def test_what_came_after_a_death_is_not_kept(make: Callable[..., Scene]) -> None:
    scene = make()
    dies_while_it_stores(scene)
    (scene.folder / "out" / "3").write_text("of somebody else")
    ending = scene.run(name="worker-2")
    scene.finish(ending)
    scene.driver.commit()
    assert [item["path"] for item in scene.store.artifacts.references("run-1", None)] == ["out/1", "out/2"]
    assert rows(scene.store, "SELECT artifact_sources_json FROM attempts") == [(None,)]


def test_what_was_stored_before_a_death_stays(make: Callable[..., Scene]) -> None:
    """Everything is stored and only the end of the attempt is missing: the files are not looked at again."""
    scene = make()
    dies_while_it_stores(scene, "after_ingestion")
    (scene.folder / "out" / "1").write_text("other")
    (scene.folder / "out" / "2").unlink()
    ending = scene.run(name="worker-2")
    scene.finish(ending)
    scene.driver.commit()
    kept = {item["path"]: item["digest"] for item in scene.store.artifacts.references("run-1", None)}
    assert kept == {"out/1": digest_of(b"one\n"), "out/2": digest_of(b"two\n")}
    assert ledger_line(scene.store, "artifactBytes") == (100, 8, 0)


def test_a_reservation_of_another_size_is_not_taken_for_the_bytes(make: Callable[..., Scene]) -> None:
    """As an older agentctl has left it: reserved, and the files not written down."""
    scene = make()
    dies_while_it_stores(scene)
    with scene.store.database.write() as tx:
        tx.execute("UPDATE attempts SET artifact_sources_json = NULL")
    (scene.folder / "out" / "1").write_text("x" * 5000)
    ending = scene.run(name="worker-2")
    error = scene.error(ending)
    assert (error["code"], error["details"]["attempted"]) == ("budget_exceeded", 5004)
    assert ledger_line(scene.store, "artifactBytes")[1] == 0


@pytest.mark.parametrize("keep", ["elsewhere/1", "/etc/*"])
def test_a_promise_outside_of_the_writable_roots_prevents_the_dispatch(make: Callable[..., Scene], keep: str) -> None:
    scene = make(keep=keep)
    error = scene.error(scene.run())
    assert (error["code"], error["details"]) == ("policy_denied", {"path": keep})
    assert rows(scene.store, "SELECT * FROM effects") == []
    assert not (scene.folder / "ran").exists()
