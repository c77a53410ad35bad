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
