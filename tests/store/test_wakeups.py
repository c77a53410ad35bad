"""What a process is told by another one: to look, or that there will be work in a moment."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock, SystemIds
from agentctl.store.wakeups import WakeFolder, drain

Telling = Callable[[WakeFolder], None]


def call(folder: WakeFolder) -> None:
    folder.wake("worker-1")


def announce(run_id: str) -> Telling:
    return lambda folder: folder.announce("worker-1", run_id)


def a_file(folder: Path) -> Path:
    """What stands for a database: only its place and its owner matter here."""
    path = folder / "agentctl.db"
    path.touch()
    return path


RUN = SystemIds(SystemClock()).new_id("compensation")


@pytest.mark.parametrize(
    ("told", "announced"),
    [
        pytest.param([call], None, id="a call says nothing"),
        pytest.param([announce(RUN)], RUN, id="an announcement names the run"),
        pytest.param([announce("run-1"), announce("run-2")], "run-2", id="the latest counts"),
        pytest.param([announce("run-1"), call], None, id="its work is there already"),
        pytest.param([call, announce("run-1")], "run-1", id="another run follows"),
    ],
)
def test_what_has_come_in(tmp_path: Path, told: list[Telling], announced: str | None) -> None:
    with closing(WakeFolder(a_file(tmp_path))) as folder, folder.listen("worker-1") as listener:
        assert drain(listener) is None
        for tell in told:
            tell(folder)
        assert select.select([listener], [], [], 0)[0] == [listener], "either wakes up who sleeps"
        assert drain(listener) == announced
        assert drain(listener) is None


def test_nobody_there_is_no_error(tmp_path: Path) -> None:
    with closing(WakeFolder(a_file(tmp_path))) as folder:
        folder.wake("worker-1")
        folder.announce("worker-1", RUN)
