"""The second thread of a worker looks at the database of its worker, wherever the worker happens to stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.timing import Timing
from agentctl.worker.watch import Watch
from support.builders import Driver, Hand, new_run, open_store, process_row
from support.children import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path, SystemClock())
    opened.register(process_row("worker-1"))
    opened.create_run(new_run(tasks=1))
    Driver(opened, "run-1").enqueue([0])
    yield opened
    opened.close()


def test_the_watch_finds_the_database_while_a_command_is_started(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start a command the first thread goes into its folder for a moment, and a relative path leads elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    listener = store.wakes.listen("worker-1")
    watch = Watch(store.path.relative_to(tmp_path), SystemClock(), Timing(), "worker-1", listener, None)
    claim = Hand(store).take()
    store.request_cancel("run-1", reason="test", actor="test")
    monkeypatch.chdir(tmp_path / "elsewhere")
    watch.begin(claim)
    try:
        wait_until(lambda: watch.token.cancelled, "the watch sees the cancel flag", seconds=10)
    finally:
        watch.park()
        listener.close()
    assert watch.token.reason == "cancel_requested"
