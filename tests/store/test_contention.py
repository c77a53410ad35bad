"""Many processes on one database: nothing twice, nobody starved, nobody blamed for the lock of another."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.database import Database
from agentctl.store.engine import Store
from support import store_children
from support.artifacts import litter, names_in
from support.builders import Driver, Hand, new_run, open_store
from support.children import PATIENCE, SPAWN, Children, wait_until
from support.rows import check_chains, ledger_line, rows, scalar
from support.scale import repeats, scale, time_factor

PROCESSES = 8
STUCK = 5.0 if scale() >= 1 else 1.0
"""How long a stopped holder is left alone: the real bound at full scale, a shorter one every day."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, SystemClock())
    yield opened
    check_chains(opened)
    assert scalar(opened, "PRAGMA integrity_check") == "ok"
    opened.close()


def enqueued(store: Store, tasks: int, **changes: Any) -> Driver:
    store.create_run(new_run(tasks=tasks, max_concurrency=tasks, **changes))
    driver = Driver(store, "run-1")
    driver.enqueue(range(tasks))
    return driver


def hear(line: Connection, *, seconds: float = PATIENCE) -> Any:
    assert line.poll(seconds * time_factor()), "the other process says nothing"
    return line.recv()


def crowd(children: Children, target: Any, path: Path, *args: Any) -> list[Any]:
    """Eight processes that begin at one instant; what each of them tells at its end."""
    barrier = SPAWN.Barrier(PROCESSES)
    lines = []
    for number in range(PROCESSES):
        here, there = SPAWN.Pipe(duplex=False)
        children.spawn(target, path, f"worker-{number}", barrier, *args, there)
        there.close()
        lines.append(here)
    told = [hear(line) for line in lines]
    assert children.join() == [0] * PROCESSES
    return told


def test_every_attempt_is_taken_exactly_once(store: Store, children: Children) -> None:
    driver = enqueued(store, 400)
    taken = crowd(children, store_children.take_everything, store.path)
    counts = Counter(attempt for own in taken for attempt, _ in own)
    assert len(counts) == 400
    assert set(counts.values()) == {1}
    assert {delivery for own in taken for _, delivery in own} == {1}
    while driver.commit():
        pass
    assert scalar(store, "SELECT COUNT(*) FROM tasks WHERE state = 'succeeded'") == 400
    assert scalar(store, "SELECT COUNT(*) FROM effects WHERE dispatches = 1 AND status = 'succeeded'") == 400


def test_no_writer_starves(tmp_path: Path) -> None:
    """SQLite's own waiting gives the least busy of eight processes nothing for seconds; the gate gives it its share."""
    ratios = []
    for round_ in range(3):
        store = open_store(tmp_path / str(round_), SystemClock())
        with Children() as children:
            counts = crowd(children, store_children.write_without_pause, store.path, max(1.5, 5 * scale()))
        store.close()
        ratios.append(min(counts) / max(counts))
        if ratios[-1] > 0.2:
            return
    raise AssertionError(f"least busy / most busy: {ratios}")


@pytest.mark.parametrize("round_", range(repeats(10)))
def test_a_limit_holds_to_the_last_unit_for_eight_pullers(store: Store, children: Children, round_: int) -> None:
    driver = enqueued(store, 100, budget_limits={"toolCalls": 30})
    sums = []
    barrier = SPAWN.Barrier(PROCESSES + 1)
    lines = []
    for number in range(PROCESSES):
        here, there = SPAWN.Pipe(duplex=False)
        children.spawn(store_children.pull_at_a_budget, store.path, f"worker-{number}", barrier, there)
        there.close()
        lines.append(here)
    barrier.wait(PATIENCE * time_factor())
    while rows(store, "SELECT 1 FROM tasks WHERE ended_at IS NULL LIMIT 1"):
        _, used, reserved = ledger_line(store, "toolCalls")
        sums.append(used + reserved)
        driver.commit()
        driver.let_in()
    store.request_cancel("run-1", reason="done", actor="test")
    executed = [line.recv() for line in lines]
    assert children.join() == [0] * PROCESSES
    assert sum(executed) == 30
    assert sums
    assert max(sums) <= 30
    assert ledger_line(store, "toolCalls") == (30, 30, 0)
    assert Counter(row[0] for row in rows(store, "SELECT state FROM tasks")) == {"succeeded": 30, "failed": 70}


def test_a_stranger_that_locks_the_file_costs_time_only(store: Store, children: Children) -> None:
    lines = []
    for name in ("a", "b", "c"):
        line, there = SPAWN.Pipe()
        children.spawn(store_children.write_once, store.path, name, STUCK, there)
        lines.append(line)
        assert hear(line)[0] == "ready"
    stranger, there = SPAWN.Pipe()
    children.spawn(store_children.hold_like_a_stranger, store.path, there)
    assert hear(stranger) == "locked"
    for line in lines:
        line.send("write")
    # Longer than the bound after which a stopped holder of the gate would be ended: one of the three holds the gate all
    # the while, since it waits for the stranger, and must not be taken for a stopped one.
    for line in lines:
        while line.poll((STUCK + 2.5) / len(lines)):
            kind, message = line.recv()
            assert kind == "log", (kind, message)
            assert "was killed" not in message
    assert scalar(store, "SELECT COUNT(*) FROM runs") == 0, "readers see the state before, at once"
    stranger.send("let go")
    assert hear(stranger) == "released"
    for line in lines:
        while (word := hear(line))[0] == "log":
            assert "was killed" not in word[1]
        assert word[0] == "done"
    assert children.join() == [0] * 4
    assert scalar(store, "SELECT COUNT(*) FROM runs") == 3


AT_THE_GATE = [store_children.stop_inside, store_children.stop_in_line]


@pytest.mark.parametrize("stop", AT_THE_GATE)
def test_a_stopped_holder_of_ours_is_ended_and_the_others_go_on(store: Store, children: Children, stop: Any) -> None:
    waiter, there = SPAWN.Pipe()
    children.spawn(store_children.write_once, store.path, "waiter", STUCK, there)
    assert hear(waiter)[0] == "ready"
    stopped, there = SPAWN.Pipe()
    victim = children.spawn(stop, store.path, "stopped", True, there)
    assert hear(stopped)[0] == "inside"
    waiter.send("write")
    word = hear(waiter, seconds=STUCK + 10)
    if word[0] != "log":  # the notice may come after the waiter has gone on
        assert word[0] == "done"
        word = hear(waiter)
    else:
        assert hear(waiter)[0] == "done"
    assert word == ("log", f"process {victim.pid} held the write gate without end and was killed")
    victim.join(PATIENCE)
    assert victim.exitcode == -signal.SIGKILL
    assert rows(store, "SELECT value FROM meta WHERE key = 'written by'") == [], "its transaction was rolled back"
    assert scalar(store, "SELECT COUNT(*) FROM runs") == 1


@pytest.mark.parametrize("stop", AT_THE_GATE)
def test_a_stopped_stranger_at_the_gate_is_named_and_left_alone(store: Store, children: Children, stop: Any) -> None:
    waiter, there = SPAWN.Pipe()
    waiting = children.spawn(store_children.write_once, store.path, "waiter", STUCK, there)
    assert hear(waiter)[0] == "ready"
    stopped, there = SPAWN.Pipe()
    stranger = children.spawn(stop, store.path, "stranger", False, there)
    assert hear(stopped)[0] == "inside"
    waiter.send("write")
    kind, message = hear(waiter, seconds=STUCK + 10)
    assert kind == "log"
    assert f"process {stranger.pid}" in message
    assert "no agentctl process" in message
    assert stranger.is_alive()
    assert waiting.is_alive()
    assert stranger.pid is not None
    os.kill(stranger.pid, signal.SIGCONT)
    assert hear(stopped)[0] == "on again"
    assert hear(waiter)[0] == "done"
    assert children.join() == [0, 0]


def test_a_driver_passes_the_line(store: Store) -> None:
    """Without its commits all that stand in the line would soon have nothing to do."""
    driver = enqueued(store, 1)
    hand = Hand(store)
    hand.finish(hand.take())
    line = os.open(f"{store.path}.gate-line", os.O_RDWR)
    fcntl.flock(line, fcntl.LOCK_EX | fcntl.LOCK_NB)
    relief = threading.Timer(PATIENCE, fcntl.flock, (line, fcntl.LOCK_UN))  # so that a failure is no hang
    relief.start()
    assert driver.commit()
    passed = relief.is_alive()
    relief.cancel()
    relief.join()
    os.close(line)
    assert passed, "it stood in the line until the line was given up"
    assert scalar(store, "SELECT state FROM tasks") == "succeeded"


def test_the_line_and_the_gate_are_free_after_a_write(store: Store) -> None:
    for urgent in (False, True):
        with store.database.write(urgent=urgent):
            pass
        for name in ("gate", "gate-line"):
            with open(f"{store.path}.{name}", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_readers_are_not_blocked_by_a_writer(store: Store, children: Children) -> None:
    store.create_run(new_run())
    line, there = SPAWN.Pipe()
    children.spawn(store_children.hold_a_write, store.path, there)
    assert hear(line) == "inside"
    for _ in range(200):
        assert store.get_run("run-1").state == "running"
    assert not line.poll(), "the writer was there all the while"
    line.send("go on")
    assert hear(line) == "out"


def test_looking_at_the_file_drops_no_lock(store: Store, children: Children, tmp_path: Path) -> None:
    """Field report 12: a POSIX lock ends when any descriptor of the file is closed in the process."""
    link = tmp_path / "by-another-name"
    link.symlink_to(store.path.parent)
    line, there = SPAWN.Pipe()
    children.spawn(store_children.try_to_lock, store.path, there)
    line.send(True)
    assert hear(line) == "free"
    with store.database.write() as tx:
        tx.execute("INSERT INTO meta VALUES ('k', 'v')")
        for _ in range(repeats(200)):
            for path in (store.path, link / store.path.name):
                other = Database(path, SystemClock())
                with other.read() as reading:
                    reading.execute("SELECT COUNT(*) FROM runs")
                other.close()
        line.send(True)
        assert hear(line) == "busy", "the write lock was dropped"
    line.send(True)
    assert hear(line) == "free"
    line.send(False)
    assert children.join() == [0]


def test_a_killed_writer_leaves_nothing_to_unlock(store: Store, children: Children) -> None:
    line, there = SPAWN.Pipe()
    holder = children.spawn(store_children.hold_a_write, store.path, there)
    assert hear(line) == "inside"
    holder.kill()
    wait_until(lambda: not holder.is_alive(), "the end of a killed process")
    store.create_run(new_run())
    assert rows(store, "SELECT 1 FROM meta") == []


@pytest.mark.parametrize("kind", ["file", "folder", "chain"])
def test_two_names_of_one_database_share_everything(
    store: Store, children: Children, tmp_path: Path, kind: str
) -> None:
    """A link to the file is no second database: both processes stand at one gate and keep one artifact store."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if kind == "folder":
        (elsewhere / "state").symlink_to(store.path.parent)
        link = elsewhere / "state" / store.path.name
    else:
        link = elsewhere / "link.db"
        link.symlink_to(store.path)
        if kind == "chain":
            (elsewhere / "again.db").symlink_to(link.name)
            link = elsewhere / "again.db"
    before = names_in(elsewhere)
    line, there = SPAWN.Pipe()
    children.spawn(store_children.hold_a_write, link, there)
    assert hear(line) == "inside"
    with pytest.raises(BlockingIOError), open(f"{store.path}.gate", "rb") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    line.send("go on")
    assert hear(line) == "out"
    [digest] = litter(store, b"kept")
    with closing(Store(link, SystemClock())) as other:
        assert other.path == store.path
        assert other.wakes.path == store.wakes.path
        assert other.artifacts.blobs.root == store.artifacts.blobs.root
        assert other.artifacts.verify(None)["missing"] == []
        assert other.artifacts.inspect(digest)["status"] == "ok"
        other.wakes.listen("somebody").close()
    assert names_in(elsewhere) == before, "nothing lies beside the link"


def test_a_database_is_made_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.db").symlink_to("there/real.db")
    Store(tmp_path / "link.db", SystemClock(), create=True).close()
    assert names_in(tmp_path) == ["link.db", "there"]
    assert "real.db" in names_in(tmp_path / "there")
