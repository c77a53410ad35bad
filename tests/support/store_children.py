"""What child processes do in tests of the store. Functions of an importable module, since children are spawned."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import apsw
from agentctl.store import gate, migrate, task_queue
from agentctl.store.clock import SystemClock
from agentctl.store.embedding import LocalHash
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError
from agentctl.store.faults import Faults
from agentctl.store.long_term import new_write
from agentctl.store.memory_entries import entry_of
from agentctl.store.records import AttemptHeld, EffectEnd, StartedEffect
from agentctl.worker.process import Worker, WorkerConfig

from support.builders import Hand, effect_request, new_run, process_row
from support.clock import ManualClock


def take_everything(path: Path, name: str, barrier: Barrier, out: Connection) -> None:
    """Claim, execute and finish until nothing is left; tell which attempts."""
    store = Store(path, SystemClock())
    hand = Hand(store, name)
    barrier.wait()
    taken = []
    claim = hand.claim()
    while claim is not None:
        taken.append((claim.fence.attempt_id, claim.fence.delivery))
        request = effect_request(claim)
        assert hand.start(claim, request) == StartedEffect(1)
        claim = hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded"), next_claim=True)
    out.send(taken)
    store.close()


def pull_at_a_budget(path: Path, name: str, barrier: Barrier, out: Connection) -> None:
    """Execute what the budget allows, fail the rest, until the run is cancelled; tell how much was executed."""
    store = Store(path, SystemClock())
    hand = Hand(store, name)
    barrier.wait()
    executed = 0
    claim = hand.claim()
    while claim is not None or store.get_run("run-1").cancel_requested_at is None:
        if claim is None:
            store.clock.sleep(0.001)
            claim = hand.claim()
            continue
        request = effect_request(claim, estimate={"toolCalls": 1})
        answer = hand.start(claim, request)
        if answer == StartedEffect(1):
            executed += 1
            end = EffectEnd(request.effect_id, "succeeded", usage={"toolCalls": 1})
            claim = hand.finish(claim, effect=end, next_claim=True)
        elif answer == AttemptHeld("budget"):
            claim = hand.claim()
        else:
            claim = hand.finish(claim, "failed", next_claim=True)
    out.send(executed)
    store.close()


def write_without_pause(path: Path, name: str, barrier: Barrier, seconds: float, out: Connection) -> None:
    """One durable transaction after the other; tell how many came through."""
    store = Store(path, SystemClock())
    store.register(process_row(name))
    barrier.wait()
    done = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.set_process_state(name, "busy", durable=True)
        done += 1
    out.send(done)
    store.close()


def hold_like_a_stranger(path: Path, line: Connection) -> None:
    """A program that knows no gate takes the write lock, and gives it back when it is told to."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    connection.execute("BEGIN IMMEDIATE")
    line.send("locked")
    line.recv()
    connection.execute("COMMIT")
    connection.close()
    line.send("released")


class _Tell(logging.Handler):
    def __init__(self, line: Connection) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send(("log", record.getMessage()))


def write_once(path: Path, name: str, stuck_seconds: float, line: Connection) -> None:
    """Open, say so, wait for a word, write one durable transaction, say so. What is logged is told as well."""
    gate.STUCK_SECONDS = stuck_seconds
    logging.getLogger("agentctl").addHandler(_Tell(line))
    store = Store(path, SystemClock())
    store.register(process_row(name))
    line.send(("ready", os.getpid()))
    line.recv()
    store.create_run(new_run(f"run-of-{name}"))
    line.send(("done", os.getpid()))
    store.close()


def stop_inside(path: Path, name: str, registered: bool, line: Connection) -> None:
    """Take the gate, write something, and be stopped there."""
    store = Store(path, SystemClock())
    if registered:
        store.register(process_row(name))
    with store.database.write() as tx:
        tx.execute("INSERT INTO meta VALUES ('written by', ?)", (name,))
        line.send(("inside", os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    line.send(("on again", os.getpid()))
    store.close()


def stop_in_line(path: Path, name: str, registered: bool, line: Connection) -> None:
    """Be next in line at the gate, and be stopped there."""
    store = Store(path, SystemClock())
    if registered:
        store.register(process_row(name))
    fcntl.flock(store.database.gate.line, fcntl.LOCK_EX)
    line.send(("inside", os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    fcntl.flock(store.database.gate.line, fcntl.LOCK_UN)
    line.send(("on again", os.getpid()))
    store.close()


def hold_a_write(path: Path, line: Connection) -> None:
    """Take gate and lock in the proper way, and keep them until a word comes."""
    store = Store(path, SystemClock())
    with store.database.write() as tx:
        tx.execute("INSERT INTO meta VALUES ('k', 'v')")
        line.send("inside")
        line.recv()
    store.close()
    line.send("out")


def try_to_lock(path: Path, line: Connection) -> None:
    """Tell, for each word, whether a stranger could take the write lock right now."""
    connection = apsw.Connection(str(path))
    while line.recv():
        try:
            connection.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            line.send("busy")
        else:
            connection.execute("ROLLBACK")
            line.send("free")
    connection.close()


def open_new(path: Path, run_id: str, barrier: Barrier, out: Connection) -> None:
    """Make the database, at the same instant as others, and use it."""
    barrier.wait()
    store = Store(path, SystemClock(), create=True)
    store.create_run(new_run(run_id))
    store.close()
    out.send("created")


def be_newer(path: Path, line: Connection) -> None:
    """A newer agentctl migrates the database, and stays: nothing is written back from the WAL."""
    Store(path, SystemClock(), create=True).close()
    store = Store(path, SystemClock())
    with store.database.write(durable=True) as tx:
        tx.execute(f"PRAGMA user_version = {migrate.LATEST + 1}")
    line.send("migrated")
    line.recv()


def decide(path: Path, approval_id: str, approve: bool, barrier: Barrier, out: Connection) -> None:
    """A shell of its own that decides at the same instant as another one."""
    store = Store(path, SystemClock())
    barrier.wait()
    try:
        store.resolve_approval(approval_id, approve=approve, actor="yes" if approve else "no", reason="")
        out.send("decided")
    except ConflictError as error:
        out.send(error.message)
    store.close()


def put_often(path: Path, name: str, times: int, barrier: Barrier) -> None:
    """Write one key of long-term memory again and again, at the same instant as others."""
    store = Store(path, SystemClock())
    barrier.wait()
    for number in range(times):
        entry = entry_of({"content": {"type": "text", "text": f"{name} {number}"}})
        store.memory_put(new_write("n", "k", entry, LocalHash(), None))
    store.close()


def look_as_an_idle_worker(path: Path, out: Connection) -> None:
    """A worker that sleeps, and what it takes: called, by itself while enough others come and go, by itself without."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clock = ManualClock()
    store = Store(path, clock)
    config = WorkerConfig(path, "worker-idle", "idle", None, None, None, "0", lease=15.0, heartbeat=3.0)
    # Whoever wants to die there has nothing prepared: the tasks of this run are no real ones.
    worker = Worker(config, clock, Faults("after_claim:99"), None)
    assert Hand(store, "worker-busy").claim() is not None
    worker._called = False
    without_a_call = worker._claim(True)
    worker._called = True
    called = worker._claim(True)
    clock.advance((task_queue.BRISK_MS + 1) / 1000)
    worker._called = False
    alone = worker._claim(True)
    out.send([None if taken is None else taken.claim.task_id for taken in (without_a_call, called, alone)])
    os._exit(0)
