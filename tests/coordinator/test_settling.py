"""A commit that is made durable a little later: what happens when the driver ends before that, or the disk fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.database import SyncFailed
from agentctl.store.faults import Faults
from agentctl.store.timing import Timing
from support import builders
from support.builders import open_store
from support.clock import FixedIds, ManualClock

ONE = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: one}
spec:
  policy: {approval: never, processAllowlist: ["true"]}
  actions: {act: {kind: builtin.shell.exec, command: /bin/true}}
  tasks: [{id: t, uses: "action:act"}]
"""


class Disk:
    """Counts the syncs of one connection, and may refuse them."""

    def __init__(self) -> None:
        self.syncs = 0
        self.broken = False

    def sync(self) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        self.syncs += 1


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def coordinator(tmp_path: Path, clock: ManualClock, ids: FixedIds, disk: Disk) -> Iterator[Coordinator]:
    """One that has just committed, and called a worker for it, who has not come yet."""
    store = open_store(tmp_path, clock, sync=disk.sync)
    store.register(builders.process_row("sleeper", state="idle"))
    file = tmp_path / "one.yaml"
    file.write_text(ONE)
    document = load_workflow(file)
    submit(store, document, compile_workflow(document), {}, ids=ids, base_path=tmp_path, actor="tester")
    store.register(process_row("coordinator", "c", "coordinator", "0", clock.now()))
    made = Coordinator(store, clock, ids, Timing(), Faults(None), process_id="c", adopts=True)
    while made.tick():
        pass
    assert store.has_ready(None)
    assert store.unsettled
    yield made
    store.close()


def test_who_ends_has_settled(coordinator: Coordinator, disk: Disk) -> None:
    before = disk.syncs
    coordinator.close()
    assert disk.syncs > before


def test_a_failed_sync_is_told_and_the_workers_are_waited_for(coordinator: Coordinator, disk: Disk) -> None:
    """A foreground run that is told so ends its workers, and waits for their ends in the very same way."""
    disk.broken = True
    with pytest.raises(SyncFailed):
        coordinator.wait()
    assert coordinator.wait(at_most=0.0) == []
    coordinator.close()
