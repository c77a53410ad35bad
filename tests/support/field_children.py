"""Targets of child processes of the field reports: programs that have the database open and look at it all the time."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from agentctl.store.backup import backup, restore
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.filesystem import require_local
from agentctl.store.migrate import LATEST, version_of
from agentctl.store.verification import statistics, verify
from agentctl.store.views import Views

from support.builders import process_row
from support.scale import time_factor


def look_while_writing(path: str, name: str, run_id: str, rounds: int) -> None:
    """Write, and between two writes ask everything that there is to ask, with this store and with a second one."""
    clock = SystemClock()
    store = Store(Path(path), clock)
    store.register(process_row(name, kind="supervisor", state="busy", now=clock.now()))
    views = Views(store.database, clock)
    for number in range(rounds):
        store.set_process_state(name, "idle" if number % 2 else "busy")
        _ask(views, run_id)
        os.stat(path)
        require_local(Path(path))
        second = Store(Path(path), clock)
        _ask(Views(second.database, clock), run_id)
        statistics(second.database, second.artifacts)
        second.close()
        if number % 100 == 0:
            place = Path(path).with_name(f"copy-{name}-{number}")
            assert backup(store, place)["runs"] > 0
            shutil.rmtree(place)
    store.set_process_state(name, "stopped", durable=True)
    store.close()


def look_and_hold(path: str, ready: str, done: str) -> None:
    """Open a transaction, look around beside it, tell `ready`, and keep the transaction until `done` is there."""
    clock = SystemClock()
    store = Store(Path(path), clock)
    run_id = Views(store.database, clock).find_run("@latest")
    with store.database.write():
        for _ in range(20):
            second = Store(Path(path), clock)
            _ask(Views(second.database, clock), run_id)
            statistics(second.database, second.artifacts)
            assert verify(second.database, second.artifacts)["ok"]
            second.close()
        place = Path(path).with_name("copy")
        third = Store(Path(path), clock)
        backup(third, place)
        third.close()
        again = Path(path).with_name("again")
        restore(place, again / "restored.db", clock)
        shutil.rmtree(again)
        assert version_of(Path(path)) == LATEST
        shutil.rmtree(place)
        Path(ready).touch()
        deadline = time.monotonic() + 60 * time_factor()
        while not os.path.exists(done):
            assert time.monotonic() < deadline, "nobody says that it is done"
            time.sleep(0.005)
    store.close()


def _ask(views: Views, run_id: str) -> None:
    views.list_runs(limit=10)
    views.progress(run_id)
    views.status(run_id)
    views.workers()
    views.processes("worker")
    views.data_version()
