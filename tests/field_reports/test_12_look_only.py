"""Field report 12: opening and closing the database file «just to look» drops SQLite's locks."""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.children import Children, wait_until
from support.field import PROGRAM, Field
from support.field_children import look_and_hold, look_while_writing
from support.scale import repeats

SWEEPER = """\
# sweeper DATABASE: a second program that rewrites the file and truncates its log, as a person with a shell would.
import itertools, sys, apsw
connection = apsw.Connection(sys.argv[1])
connection.set_busy_timeout(20000)
for number in itertools.count():
    try:
        connection.execute("VACUUM" if number % 5 == 0 else "PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except apsw.BusyError:
        pass
"""


@pytest.mark.timeout(1800)
def test_nothing_is_damaged_while_everybody_looks(field: Field, children: Children) -> None:
    """Eight workers write; processes that write, too, look again and again; a second program sweeps the file."""
    pool = field.pool(8)
    file = field.workflow("ticks", [field.tick_fan("t", 100, idempotent=False)])
    run_id = field.submit(file)
    sweeper = field.spawn(sys.executable, field.tool("sweeper.py", SWEEPER), field.database)
    for number in range(2):
        children.spawn(look_while_writing, str(field.database), f"looker-{number}", run_id, repeats(10_000) // 10)
    runs = [run_id]
    for _ in range(repeats(20)):
        assert field.json("wait", runs[-1], limit=120).code == 0
        assert field.rows("PRAGMA integrity_check") == [("ok",)]
        runs.append(field.submit(file))
    assert field.json("wait", runs[-1], limit=120).code == 0
    assert children.join(seconds=300) == [0, 0]
    assert sweeper.running(), sweeper.err
    sweeper.popen.kill()
    labels = field.labels()
    assert len(labels) == 100 * len(runs)
    assert {labels.count(label) for label in set(labels)} == {len(runs)}
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
def test_a_second_opening_in_a_process_leaves_the_locks_of_the_first(field: Field, children: Children) -> None:
    """While a transaction is open, its process opens and closes the database again and asks everything it can ask."""
    field.submit(field.workflow("small", [field.tick_task("small", idempotent=True)]))
    ready, done = field.root / "ready", field.root / "done"
    children.spawn(look_and_hold, str(field.database), str(ready), str(done))
    wait_until(ready.exists, "the transaction is open and has been looked at")
    with closing(sqlite3.connect(field.database, timeout=0, isolation_level=None)) as stranger:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            stranger.execute("BEGIN IMMEDIATE")
        done.touch()
        assert children.join() == [0]
        stranger.execute("BEGIN IMMEDIATE")
        stranger.execute("ROLLBACK")
    field.check_clean_end()


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_only_sqlite_opens_the_files_of_the_database(field: Field) -> None:
    """Every opening of the file, its log and its index has the flags that SQLite uses and Python does not."""
    trace = field.root / "trace"
    file = field.workflow("ticks", [field.tick_fan("t", 20, idempotent=True)])
    field.submit(file)  # so that the file exists, and openings of an existing one are seen
    prefix = ["strace", "-f", "-qq", "-e", "trace=openat,open,creat,chmod,fchmod", "-o", str(trace)]
    traced = field.start("run", file, "--workers", "2", "--output", "json", prefix=prefix)
    outcome = traced.wait(180)
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded"), outcome.err
    opened = _opened(field, trace)
    assert set(opened) >= {"runtime.db", "runtime.db-wal", "runtime.db-shm"}, opened
    for name in opened:
        if (path := field.database.with_name(name)).exists():
            assert path.stat().st_mode & 0o777 == 0o600
    assert field.database.parent.stat().st_mode & 0o777 == 0o700
    field.json("cancel", "@latest")


LOOKERS = (
    "status @latest", "doctor", "workers list", "metrics show", "db stats", "db verify", "db backup copy",
    "gc --dry-run", "artifacts verify", "artifacts gc", "approvals list", "effects list --uncertain",
    "retry ticks.yaml @latest --from t --restart-successful --plan", "replay @latest", "compensate @latest --plan",
    "graph @latest", "memory search x", "doctor --output json", "events @latest", "db migrate",
)  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_verb_that_looks_opens_the_files_itself(field: Field) -> None:
    """Health, statistics, backups, plans and permissions: none of them opens a file of the database past SQLite."""
    field.json("run", field.workflow("ticks", [field.tick_task("t", idempotent=True)]))
    trace = field.root / "trace"
    program = " ".join(PROGRAM) if len(PROGRAM) == 1 else f"{PROGRAM[0]} -c '{PROGRAM[2]}'"
    script = "\n".join(f"{program} {words} >/dev/null || echo $? {words}" for words in LOOKERS)
    command = ["strace", "-f", "-qq", "-e", "trace=openat,open,creat,fchmod", "-o", str(trace), "sh", "-c", script]
    traced = field.spawn(*command).wait(200)
    refused = {line.split(" ", 1)[1] for line in traced.out.splitlines() if not line.startswith("3 ")}
    assert refused <= {"doctor", "doctor --output json", "gc --dry-run"}, (traced.out, traced.err)
    assert _opened(field, trace).get("runtime.db", 0) >= len(LOOKERS) / 2
    field.check_clean_end()


def _opened(field: Field, trace: Path) -> dict[str, int]:
    """How often each file of the database was opened, and always as SQLite does it."""
    opened: dict[str, int] = {}
    for line in trace.read_text(errors="replace").splitlines():
        match = re.search(r'(\w+)\((?:AT_FDCWD, )?"([^"]*/runtime\.db(?:-wal|-shm|-journal)?)", ([^)]*)\)', line)
        if match is None:
            continue
        call, path, flags = match.groups()
        if path.startswith("/") and Path(path).parent != field.database.parent:
            continue  # a copy, which nobody else has open
        assert call in ("openat", "open"), line
        assert "O_NOFOLLOW" in flags, line
        name = Path(path).name
        opened[name] = opened.get(name, 0) + 1
    return opened
