"""The database file is taken away under those who work on it: they notice, say so, and end, to be started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field

VERBS = {
    "pool": ("workers", "start", "-n", "1"),
    "coordinator": ("coordinator", "start"),
    "worker": ("worker", "start"),
}


def _remove(database: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{database}{end}").unlink()


def _replace(database: Path) -> None:
    other = database.with_name("other.db")
    other.write_bytes(b"")
    other.rename(database)


@pytest.mark.parametrize("kind", VERBS)
@pytest.mark.parametrize(("take_away", "word"), [(_remove, "was removed"), (_replace, "was replaced")])
def test_who_works_on_a_file_that_is_gone_ends(field: Field, kind: str, take_away: object, word: str) -> None:
    field.lease(5, 0.5)
    field.submit(field.workflow("any", [field.tick_task("t", idempotent=True)]))
    process = field.start(*VERBS[kind])
    wanted = {"pool": "worker", "coordinator": "coordinator", "worker": "worker"}[kind]
    sql = "SELECT COUNT(*) FROM processes WHERE stopped_at IS NULL AND state <> 'starting' AND kind = ?"
    wait_until(lambda: field.scalar(sql, wanted) == 1, "it works")
    assert callable(take_away)
    take_away(field.database)
    result = process.wait()
    assert result.code == 5, result.err
    assert str(field.database) in result.err
    assert word in result.err
    assert "Traceback" not in result.err


def test_a_worker_that_executes_finishes_and_ends(field: Field) -> None:
    field.lease(5, 0.5)
    run_id = field.submit(field.workflow("any", [field.tick_task("t", field.may_end, idempotent=True)]))
    pool = field.pool(1)
    field.busy(run_id)
    _remove(field.database)
    field.may_end.touch()
    result = pool.wait()
    assert result.code == 5, result.err
    assert "was removed" in result.err or "there is no database" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("wait", "@latest"),
        ("watch", "@latest"),
        ("events", "@latest", "--follow", "--output", "json"),
        ("events", "--follow", "--output", "json", "--after", "start"),
        ("metrics", "write", "numbers", "--every", "1s"),
    ],
    ids=" ".join,
)
def test_who_follows_a_file_that_was_moved_away_ends(field: Field, words: tuple[str, ...]) -> None:
    """A backup is restored in its place: whoever followed the old file would say nothing, or old numbers, for ever."""
    field.submit(field.workflow("any", [field.tick_task("t", idempotent=True)]))
    reader = field.start(*words)
    numbers = field.folder / "numbers"
    wait_until(lambda: bool(reader._out.read_text() or reader.err or numbers.exists()), "it has told what is there")
    field.database.rename(field.database.with_name("moved.db"))
    result = reader.wait()
    assert result.code == 5, result.err
    assert f"{field.database} was removed" in result.err
