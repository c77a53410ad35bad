"""Commands that start and end at one instant: none of them is told that the database is locked."""

from __future__ import annotations

from pathlib import Path

from support import crash_children
from support.children import PATIENCE, SPAWN, Children
from support.scale import repeats, time_factor

PROCESSES = 4


def test_processes_that_open_and_close_at_one_instant_do_not_meet_a_lock(tmp_path: Path, children: Children) -> None:
    """The first to open and the last to close lock the file even against readers, for a moment."""
    barrier = SPAWN.Barrier(PROCESSES + 1)
    for _ in range(PROCESSES):
        children.spawn(crash_children.open_and_close, tmp_path / "state" / "runtime.db", barrier, repeats(200))
    barrier.wait(PATIENCE * time_factor())
    assert children.join() == [0] * PROCESSES
