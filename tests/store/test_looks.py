"""A look at a database that others write: a log that is being written back into the file is no damage."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from agentctl.store import backup, migrate
from agentctl.store.clock import SystemClock
from agentctl.store.database import Database
from agentctl.store.doctor import LIVE, examine, worst
from agentctl.store.errors import CorruptStore, UsageError

PAGE = 4096
FRAME = 24 + PAGE


def frames(log: bytes) -> Iterator[tuple[int, bytes]]:
    for place in range(32, len(log), FRAME):
        yield struct.unpack(">I", log[place : place + 4])[0], log[place + 24 : place + FRAME]


@pytest.fixture
def torn(tmp_path: Path) -> Iterator[Path]:
    """A healthy database in the middle of a checkpoint: its first page is back, and counts pages that are not yet."""
    path = tmp_path / "runtime.db"
    Database(path, SystemClock(), create=True).close()
    writer = apsw.Connection(str(path))
    writer.execute("CREATE TABLE large (x); INSERT INTO large VALUES (zeroblob(400000))")
    first = [page for number, page in frames(Path(f"{path}-wal").read_bytes()) if number == 1][-1]
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), first, 0)
    yield path
    writer.close()


def test_a_checkpoint_under_way_is_no_damage(torn: Path) -> None:
    assert migrate.version_of(torn) == migrate.LATEST
    assert worst(examine(torn, SystemClock(), LIVE)) == "ok"
    assert Path(f"{torn}-wal").stat().st_size > 0  # the look has not written back what is not its own


def test_the_version_in_the_log_counts(torn: Path) -> None:
    """Who has just migrated has written to the log; the file has the old number until a checkpoint."""
    writer = apsw.Connection(str(torn))
    writer.execute(f"PRAGMA user_version = {migrate.LATEST + 1}")
    assert migrate.version_of(torn) == migrate.LATEST + 1
    writer.close()


def test_what_is_damaged_is_still_called_so(tmp_path: Path) -> None:
    path = tmp_path / "runtime.db"
    path.write_bytes(b"no database at all, but long enough to be one " * 100)
    with pytest.raises(CorruptStore):
        migrate.version_of(path)


def test_a_look_makes_nothing_beside_a_database_at_rest(tmp_path: Path) -> None:
    path = tmp_path / "runtime.db"
    Database(path, SystemClock(), create=True).close()
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert migrate.version_of(path) == migrate.LATEST
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


def test_a_backup_that_somebody_begins_to_use_is_in_use_and_not_damaged(torn: Path, tmp_path: Path) -> None:
    """The copy itself: whoever came after the first look at the folder is found by the second one."""
    with pytest.raises(UsageError, match="is in use"):
        backup._copy_checked(torn, tmp_path / "copy.db", tmp_path / "new.db")
