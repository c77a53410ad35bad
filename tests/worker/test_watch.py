"""The second thread of a worker looks into the same database wherever the first thread is at the moment."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.timing import Timing
from agentctl.worker.watch import Watch
from support.builders import Driver, Hand, new_run, process_row
from support.children import wait_until


def test_a_relative_path_means_the_folder_in_which_the_worker_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    store = Store(tmp_path / "agentctl.db", clock, create=True)
    store.register(process_row("worker-1", now=clock.now()))
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    claim = Hand(store).take()
    monkeypatch.chdir(tmp_path)
    ours, theirs = socket.socketpair()
    watch = Watch(Path("agentctl.db"), clock, Timing(), "worker-1", ours, None)
    # As while a command is started in another folder.
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    watch.begin(claim)
    store.request_cancel("run-1", reason="x", actor="test")
    wait_until(lambda: watch.token.reason == "cancel_requested", "the watch sees the request", seconds=10)
    watch.park()
    store.close()
    theirs.close()
