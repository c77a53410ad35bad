"""What the service manager is told, over a real datagram socket: ready, alive, stopping; and when it is not told."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.store.service_manager import ServiceManager, Watchdog
from support.children import wait_until
from support.clock import ManualClock
from support.field import Field
from support.manager import Manager

ONE_WORKER = ("worker", "start", "--name", "w1")
POOL = ("workers", "start", "-n", "2", "--name", "p")
COORDINATOR = ("coordinator", "start")


def is_locked(database: Path) -> bool:
    """Whether somebody has the write lock of a database."""
    with closing(sqlite3.connect(database, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        connection.execute("ROLLBACK")
        return False


@pytest.mark.parametrize("command", [ONE_WORKER, POOL, COORDINATOR], ids=["worker", "pool", "coordinator"])
def test_ready_alive_stopping(field: Field, any_manager: Manager, command: tuple[str, ...]) -> None:
    """Only the main process speaks: a child in its place would hide its death."""
    manager = any_manager
    process = field.start(*command, env=manager.environment(watchdog=2))
    assert manager.listen(lambda: bool(manager.heard("READY=1"))), process.err
    kinds = field.rows("SELECT kind, COUNT(*) FROM processes GROUP BY kind ORDER BY kind")
    if command == POOL:
        assert kinds == [("coordinator", 1), ("supervisor", 1), ("worker", 2)]  # ready means: all of it
    assert manager.listen(lambda: len(manager.heard("WATCHDOG=1")) >= 4), "signs of life go on"
    assert not manager.heard("STOPPING=1")
    process.signal(signal.SIGTERM)
    assert manager.listen(lambda: bool(manager.heard("STOPPING=1")))
    assert process.wait(30).code == 0
    manager.drain()
    assert {pid for pid, _ in manager.told} == {process.pid}
    order = [line for _, line in manager.told if line in ("READY=1", "STOPPING=1")]
    assert order == ["READY=1", "STOPPING=1"]


def test_a_worker_is_busy_for_long_and_alive(field: Field, manager: Manager) -> None:
    """An attempt that takes many times the watchdog's limit is no hang: the worker watches it itself."""
    coordinator = field.coordinator()
    process = field.start(*ONE_WORKER, env=manager.environment(watchdog=1))
    run_id = field.submit(field.workflow("long", [field.tick_task("t", field.may_end, idempotent=False)]))
    wait_until(lambda: len(field.lines()) == 1, "it has begun")
    manager.drain()
    heard = len(manager.heard("WATCHDOG=1"))
    assert manager.listen(lambda: len(manager.heard("WATCHDOG=1")) >= heard + 8), "signs of life go on"
    assert field.tasks(run_id)["t"][0] == "running"
    field.may_end.touch()
    assert field.json("wait", run_id).code == 0
    field.check_clean_end(drained=[process, coordinator])


@pytest.mark.parametrize("command", [ONE_WORKER, POOL, COORDINATOR], ids=["worker", "pool", "coordinator"])
def test_a_foreign_lock_is_no_hang(field: Field, manager: Manager, command: tuple[str, ...]) -> None:
    """Who waits for a stranger's lock is alive, however long that takes."""
    process = field.start(*command, env=manager.environment(watchdog=1))
    assert manager.listen(lambda: bool(manager.heard("READY=1"))), process.err
    locker = field.locker(600, 600, 1, 1)
    wait_until(lambda: is_locked(field.database), "the stranger has it")
    manager.drain()
    heard = len(manager.heard("WATCHDOG=1"))
    assert manager.listen(lambda: len(manager.heard("WATCHDOG=1")) >= heard + 12), "for many times the limit"
    assert locker.running()
    locker.signal(signal.SIGKILL)
    locker.wait()
    field.stop(process)


def test_a_stopped_process_says_nothing(field: Field, manager: Manager) -> None:
    """SIGSTOP stops the thread as well: silence, for which the manager ends and replaces it."""
    process = field.start(*ONE_WORKER, env=manager.environment(watchdog=1))
    assert manager.listen(lambda: bool(manager.heard("READY=1"))), process.err
    process.signal(signal.SIGSTOP)
    manager.drain()
    heard = len(manager.heard("WATCHDOG=1"))
    assert not manager.listen(lambda: len(manager.heard("WATCHDOG=1")) > heard, seconds=0.5)
    process.signal(signal.SIGABRT)  # as the manager does
    process.signal(signal.SIGCONT)
    assert process.wait(30).code == -signal.SIGABRT


def test_a_pool_whose_children_cannot_become_ready_never_says_so(field: Field, manager: Manager) -> None:
    """A stalled start: what is killed and replaced for ever is not ready, and the pool gives up with exit 5."""
    site = field.tool("sitecustomize.py", "import sys\nif '--multiprocessing-fork' in sys.argv:\n    sys.exit(9)\n")
    process = field.start(*POOL, env={**manager.environment(), "PYTHONPATH": str(site.parent)})
    result = process.wait(60)
    assert result.code == 5, result.err
    assert "cannot be started" in result.err
    manager.drain()
    assert not manager.heard("READY=1")


# -- without processes -------------------------------------------------------------------------------------------------


def test_the_variables_leave_the_environment_and_come_back_for_an_exec(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "s"), "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    manager = ServiceManager.from_environment(environment)
    assert environment == {}
    assert manager.watchdog_seconds == 3.0
    assert manager.present


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": "vsock:2:1"},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "many"},
        {"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"},
    ],
)
def test_nobody_listens(environment: dict[str, str]) -> None:
    manager = ServiceManager.from_environment(dict(environment))
    assert manager.watchdog_seconds is None
    assert not manager.present
    manager.ready("x")


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "full"))
    manager = ServiceManager(str(tmp_path / "full"))
    for _ in range(5000):
        manager.alive()
    listener.close()
    manager.alive()


def test_signs_of_life_have_to_be_deserved(clock: ManualClock) -> None:
    excused = False
    dog = Watchdog(ServiceManager(None), clock, lambda: excused)
    dog._limit = 10.0  # without a thread: the clock is ours
    clock.advance(9.9)
    assert dog.deserves()
    clock.advance(0.2)
    assert not dog.deserves()
    excused = True
    assert dog.deserves()
    excused = False
    clock.advance(9.9)
    assert dog.deserves()  # the time of the excuse does not count
    dog.beat()
    clock.set_wall(0)
    assert dog.deserves()  # a clock that is set accuses nobody
