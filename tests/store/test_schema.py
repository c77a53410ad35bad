"""The file: what it enforces by itself, where it may live, whose it may be, and how it comes to its schema."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from agentctl.store import filesystem, migrate, runs, states
from agentctl.store.clock import SystemClock
from agentctl.store.database import Database
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, CorruptStore, EnvironmentFault, IncompatibleVersion, NotFoundError
from agentctl.store.records import EffectEnd
from support import store_children
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.children import SPAWN, Children
from support.clock import ManualClock
from support.rows import TABLES, everything, rows, scalar

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "store"
SCHEMA = migrate.script(1)


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


@pytest.fixture
def busy(store: Store) -> Store:
    """A store in which every table that matters has rows."""
    store.create_run(new_run(tasks=3, memory={"k": "1"}, budget_limits={"turns": 10}))
    driver = Driver(store, "run-1")
    driver.enqueue([0, 1, 2])
    hand = Hand(store)
    claim = hand.take()
    request = effect_request(claim, estimate={"turns": 1})
    hand.start(claim, request)
    hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded"))
    driver.commit()
    hand.take()
    return store


# -- invariants in the database ----------------------------------------------------------------------------------------


def refuses(store: Store, sql: str, match: str) -> None:
    before = everything(store)
    with pytest.raises(ConflictError, match=match), store.database.write() as tx:
        tx.execute(sql)
    assert everything(store) == before


@pytest.mark.parametrize(
    ("sql", "match"),
    [
        (
            "INSERT INTO attempts (run_id, task_no, live_task, task_id, number, state, queue, timeout_ms, input_json, "
            "enqueued_at) SELECT run_id, task_no, task_no, task_id, 2, 'ready', 'ready', 1, '{}', 1 "
            "FROM attempts WHERE state = 'ready'",
            "UNIQUE",
        ),
        ("UPDATE attempts SET queue = NULL WHERE state = 'ready'", "CHECK"),
        ("UPDATE attempts SET live_task = NULL WHERE state = 'claimed'", "CHECK"),
        ("UPDATE attempts SET lease_expires_at = NULL WHERE state = 'claimed'", "CHECK"),
        ("UPDATE attempts SET holder = NULL WHERE state = 'claimed'", "CHECK"),
        ("UPDATE attempts SET state = 'finished' WHERE state = 'ready'", "CHECK"),
        ("UPDATE attempts SET outcome = 'nice' WHERE state = 'closed'", "CHECK"),
        ("UPDATE tasks SET state = 'succeeded' WHERE state = 'ready'", "CHECK"),
        ("UPDATE tasks SET ended_at = NULL WHERE state = 'succeeded'", "CHECK"),
        ("UPDATE tasks SET state = 'retry_scheduled' WHERE state = 'ready'", "CHECK"),
        ("UPDATE tasks SET state = 'nice' WHERE state = 'ready'", "CHECK"),
        ("UPDATE tasks SET state = 'failed' WHERE state = 'succeeded'", "has ended"),
        ("UPDATE runs SET state = 'succeeded'", "CHECK"),
        ("UPDATE runs SET priority = 11", "CHECK"),
        ("UPDATE effects SET status = 'uncertain'", "has ended"),
        ("UPDATE effects SET status = 'started', completed_at = NULL, confirmed = 0", "has ended"),
        ("UPDATE effects SET completed_at = NULL", "CHECK"),
        ("UPDATE effects SET confirmed = 0", "CHECK"),
        ("UPDATE audit_events SET actor = 'me'", "append-only"),
        ("DELETE FROM audit_events", "append-only"),
        ("UPDATE checkpoints SET state_json = '{}'", "append-only"),
        ("DELETE FROM checkpoints", "append-only"),
        ("UPDATE memory_values SET value_json = '2'", "immutable"),
        ("UPDATE budget_lines SET reserved = -1", "CHECK"),
        ("UPDATE budget_lines SET used = -1", "CHECK"),
        ("UPDATE tasks SET attempt = 'one'", "store TEXT value in INTEGER"),
        ("INSERT INTO effects SELECT * FROM effects", "UNIQUE"),
        ("INSERT INTO run_outputs VALUES ('run-9', '{}')", "FOREIGN KEY"),
    ],
)
def test_the_database_itself_refuses(busy: Store, sql: str, match: str) -> None:
    refuses(busy, sql, match)


@pytest.mark.parametrize("state", sorted(states.RUN_FINAL))
def test_a_run_that_has_ended_stays_so(busy: Store, state: str) -> None:
    with busy.database.write() as tx:
        tx.execute("UPDATE runs SET state = ?, ended_at = 1", (state,))
    for other in states.RUN_MOVES:
        if other != state:
            ended = "1" if other in states.RUN_FINAL else "NULL"
            refuses(busy, f"UPDATE runs SET state = '{other}', ended_at = {ended}", "has ended")  # noqa: S608


def test_only_the_removal_of_a_whole_run_takes_its_history_along(busy: Store) -> None:
    with busy.database.write() as tx:
        tx.execute("DELETE FROM runs")
    left = {table: len(found) for table, found in everything(busy).items() if found}
    assert left == {}


def test_all_tables_are_strict(store: Store) -> None:
    tables = rows(
        store, "SELECT name, strict FROM pragma_table_list WHERE schema = 'main' AND name NOT LIKE 'sqlite_%'"
    )
    assert {name for name, strict in tables if not strict} == set()
    assert {name for name, _ in tables} == {*TABLES, "meta"}


# -- the tables of moves -----------------------------------------------------------------------------------------------


def check_list(table: str, column: str) -> set[str]:
    """The values that the CHECK of a column allows."""
    body = re.search(rf"CREATE TABLE {table} \((.*?)\n\) STRICT", SCHEMA, re.S)
    assert body is not None
    found = re.search(rf"CHECK \({column} IN\s+\((.*?)\)\)", body[1], re.S)
    assert found is not None
    return set(re.findall(r"'(\w+)'", found[1]))


@pytest.mark.parametrize(
    ("table", "column", "moves", "final"),
    [
        ("runs", "state", states.RUN_MOVES, states.RUN_FINAL),
        ("tasks", "state", states.TASK_MOVES, states.TASK_FINAL),
        ("effects", "status", states.EFFECT_MOVES, states.EFFECT_FINAL),
    ],
)
def test_the_schema_knows_the_states_of_the_tables_of_moves(
    table: str, column: str, moves: dict[str, frozenset[str]], final: frozenset[str]
) -> None:
    assert check_list(table, column) == set(moves)
    assert {state for state, following in moves.items() if not following} == set(final)
    assert set().union(*moves.values()) <= set(moves)
    end = "completed_at" if table == "effects" else "ended_at"
    found = re.search(
        rf"CREATE TABLE {table} .*?CHECK \(\({column} IN \(([^)]*)\)\) = \({end} IS NOT NULL\)\)", SCHEMA, re.S
    )
    assert found is not None
    assert set(re.findall(r"'(\w+)'", found[1])) == set(final)


# -- opening -----------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the shared memory, which is not data."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith("-shm")}


def foreign(path: Path, *statements: str) -> None:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_database_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no database"):
        Store(tmp_path / "new" / "agentctl.db", SystemClock())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("empty_file", [False, True])
def test_the_schema_is_made_from_nothing(tmp_path: Path, empty_file: bool) -> None:
    path = tmp_path / "agentctl.db"
    if empty_file:
        path.touch(0o600)
    store = Store(path, SystemClock(), create=True)
    assert scalar(store, "PRAGMA user_version") == migrate.LATEST
    assert scalar(store, "PRAGMA application_id") == migrate.APPLICATION_ID
    assert scalar(store, "PRAGMA journal_mode") == "wal"
    assert scalar(store, "PRAGMA foreign_keys") == 1
    assert scalar(store, "PRAGMA synchronous") == 1
    store.close()
    again = Store(path, SystemClock())
    assert scalar(again, "PRAGMA integrity_check") == "ok"
    again.close()


def test_migrations_are_numbered_without_gaps() -> None:
    names = sorted(path.name for path in (STORE / "migrations").glob("*.sql"))
    assert [int(name[:4]) for name in names] == list(range(1, migrate.LATEST + 1))
    assert all(re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", name) for name in names)


def test_processes_that_open_a_new_database_at_one_instant(tmp_path: Path, children: Children) -> None:
    barrier = SPAWN.Barrier(4)
    lines = []
    for number in range(4):
        here, there = SPAWN.Pipe(duplex=False)
        children.spawn(store_children.open_new, tmp_path / "agentctl.db", f"run-{number}", barrier, there)
        lines.append(here)
    assert children.join() == [0] * 4
    assert [line.recv() for line in lines] == ["created"] * 4
    store = Store(tmp_path / "agentctl.db", SystemClock())
    assert scalar(store, "SELECT COUNT(*) FROM runs") == 4
    store.close()


def test_a_newer_database_is_refused_byte_for_byte(busy: Store) -> None:
    path = busy.path
    with busy.database.write() as tx:
        tx.execute(f"PRAGMA user_version = {migrate.LATEST + 1}")
    busy.close()
    before = contents(path.parent)
    for create in (False, True):
        with pytest.raises(IncompatibleVersion, match=f"schema {migrate.LATEST + 1}"):
            Store(path, SystemClock(), create=create)
    assert contents(path.parent) == before


def test_a_newer_database_whose_wal_was_left_behind_is_refused_byte_for_byte(
    tmp_path: Path, children: Children
) -> None:
    """A newer agentctl was killed: its version is in the WAL only. To look must not write it back."""
    path = tmp_path / "agentctl.db"
    line, there = SPAWN.Pipe()
    newer = children.spawn(store_children.be_newer, path, there)
    assert line.poll(60)
    assert line.recv() == "migrated"
    newer.kill()
    newer.join()
    before = contents(tmp_path)
    assert path.name + "-wal" in before
    with pytest.raises(IncompatibleVersion, match=f"schema {migrate.LATEST + 1}"):
        Store(path, SystemClock())
    assert contents(tmp_path) == before


def test_a_version_that_rises_while_we_run_ends_reading_and_writing(busy: Store) -> None:
    other = Database(busy.path, SystemClock())
    with other.write() as tx:
        tx.execute(f"PRAGMA user_version = {migrate.LATEST + 1}")
    with pytest.raises(IncompatibleVersion), busy.database.read():
        pass
    with pytest.raises(IncompatibleVersion), busy.database.write():
        pass
    other.close()
    with pytest.raises(IncompatibleVersion):
        busy.create_run(new_run("run-2"))


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE theirs (x)", "INSERT INTO theirs VALUES (1)"),
        ("PRAGMA application_id = 77",),
        ("PRAGMA user_version = 1",),
        ("PRAGMA journal_mode = WAL", "CREATE TABLE theirs (x)"),
    ],
    ids=["tables", "application", "version", "wal"],
)
def test_the_database_of_another_program_is_refused_byte_for_byte(tmp_path: Path, statements: tuple[str, ...]) -> None:
    path = tmp_path / "theirs.db"
    foreign(path, *statements)
    before = contents(tmp_path)
    with pytest.raises(IncompatibleVersion, match="another program"):
        Store(path, SystemClock(), create=True)
    assert contents(tmp_path) == before


def test_the_tables_that_have_to_be_there_are_those_that_are_made(store: Store) -> None:
    sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    assert {row[0] for row in rows(store, sql)} == migrate.TABLES


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("DROP TABLE attempts", "lacks attempts"),
        ("DROP TABLE meta", "lacks meta"),
        ("PRAGMA user_version = 0", "number of its schema is 0"),
    ],
)
def test_a_schema_that_is_damaged_in_part_is_refused_at_opening(tmp_path: Path, statement: str, word: str) -> None:
    path = tmp_path / "agentctl.db"
    Store(path, SystemClock(), create=True).close()
    foreign(path, statement)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(CorruptStore, match=word) as refusal:
            Store(path, SystemClock(), create=True)
        assert str(path) in refusal.value.message
        assert refusal.value.remedy
    assert path.read_bytes() == before


def test_a_table_that_vanishes_under_a_process_is_told_with_the_place(busy: Store) -> None:
    foreign(busy.path, "DROP TABLE processes")
    with pytest.raises(CorruptStore, match="no such table") as refusal:
        busy.live_processes()
    assert str(busy.path) in refusal.value.message
    assert refusal.value.remedy


def test_another_program_that_has_its_tables_in_the_wal_only(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE theirs (x)")
    with pytest.raises(IncompatibleVersion, match="another program"):
        Store(path, SystemClock(), create=True)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    assert connection.execute("PRAGMA user_version").fetchall() == [(0,)]
    connection.close()


@pytest.mark.parametrize(
    "content", [b"no database at all\n" * 100, os.urandom(8192), b"SQLite format 3\0" + b"\xff" * 4080]
)
def test_what_is_no_database_is_told_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agentctl.db"
    path.write_bytes(content)
    with pytest.raises((CorruptStore, IncompatibleVersion)) as caught:
        Store(path, SystemClock(), create=True)
    assert str(path) in caught.value.message
    assert caught.value.exit_code == 5
    assert path.read_bytes() == content


def test_a_damaged_database_is_told(busy: Store) -> None:
    path = busy.path
    busy.close()
    content = bytearray(path.read_bytes())
    page = 4096
    for number in range(1, len(content) // page):
        content[number * page : number * page + 200] = os.urandom(200)
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptStore) as caught:
        everything(Store(path, SystemClock()))
    assert str(path) in caught.value.message
    assert caught.value.remedy is not None


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "agentctl.db").mkdir()
    with pytest.raises(EnvironmentFault, match="not a file"):
        Store(tmp_path / "agentctl.db", SystemClock(), create=True)


# -- permissions and places --------------------------------------------------------------------------------------------


def test_files_and_folders_are_private(tmp_path: Path, clock: ManualClock) -> None:
    old = os.umask(0)
    try:
        store = open_store(tmp_path, clock)
        store.create_run(new_run())
        listener = store.wakes.listen("p-1")
    finally:
        os.umask(old)
    folder = store.path.parent
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    listener.close()
    store.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes.pop("agentctl.db.wake") == 0o700
    beside = ("", "-wal", "-shm", ".gate", ".gate-line")
    assert {f"agentctl.db{ending}" for ending in beside} <= set(modes)
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_no_permission_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "agentctl.db", SystemClock(), create=True)
    store.close()
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(EnvironmentFault, match="permission"):
            Store(tmp_path / "agentctl.db", SystemClock())
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "something-new"])
@pytest.mark.parametrize("exists", [False, True])
def test_a_network_filesystem_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, exists: bool
) -> None:
    folder = tmp_path / "home"
    path = folder / "agentctl.db"
    if exists:
        folder.mkdir()
        Store(path, SystemClock(), create=True).close()
        (folder / "agentctl.db-wal").write_bytes(b"left behind")
    before = contents(folder) if exists else None
    monkeypatch.setenv(filesystem.OVERRIDE, kind)
    with pytest.raises(EnvironmentFault) as caught:
        Store(path, SystemClock(), create=True)
    assert str(path) in caught.value.message
    assert kind in caught.value.message
    assert ("unknown" in caught.value.message) == (kind == "something-new")
    assert filesystem.OVERRIDE in (caught.value.remedy or "")
    assert caught.value.exit_code == 5
    assert (contents(folder) if exists else None) == before
    assert folder.exists() == exists


def test_a_stated_filesystem_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "agentctl.db", SystemClock(), create=True)
    assert rows(store, "SELECT * FROM meta") == []
    store.close()
    for _ in range(2):
        monkeypatch.setenv(filesystem.OVERRIDE, "ext4")
        store = Store(tmp_path / "agentctl.db", SystemClock())
        assert rows(store, "SELECT * FROM meta") == [("filesystem_type", "ext4")]
        store.close()
    monkeypatch.delenv(filesystem.OVERRIDE)
    store = Store(tmp_path / "agentctl.db", SystemClock())
    assert rows(store, "SELECT * FROM meta") == [("filesystem_type", "ext4")], "it was stated once"
    store.close()


def test_the_type_of_a_filesystem_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    assert filesystem.filesystem_type(Path("/proc/self/no/such/thing")) == "proc"
    assert filesystem.filesystem_type(tmp_path / "no" / "such" / "folder") == filesystem.filesystem_type(tmp_path)


# -- how SQL is spoken -------------------------------------------------------------------------------------------------


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """All texts in a module that are not docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def test_transactions_begin_in_one_module_and_writers_at_once() -> None:
    begins: dict[str, list[str]] = {}
    for path in STORE.glob("*.py"):
        for _, text in strings(path):
            if re.match(r"\s*(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)\b", text, re.I):
                begins.setdefault(path.name, []).append(text)
    assert set(begins) == {"database.py"}
    assert set(begins["database.py"]) == {"BEGIN IMMEDIATE", "BEGIN", "COMMIT", "ROLLBACK"}
    # The plain one belongs to the reading transaction.
    tree = ast.parse((STORE / "database.py").read_text(encoding="utf-8"))
    plain = [
        owner.name
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for node in ast.walk(owner)
        if isinstance(node, ast.Constant) and node.value == "BEGIN"
    ]
    assert plain == ["_Read"]


def test_every_write_of_every_verb_is_inside_an_immediate_transaction(store: Store) -> None:
    spoken: list[str] = []

    def listen(cursor: Any, sql: str, _values: Any) -> bool:
        spoken.append(sql)
        return True

    store.database.connection.set_exec_trace(listen)
    store.create_run(new_run(tasks=3, budget_limits={"turns": 9}))
    driver = Driver(store, "run-1")
    driver.enqueue([0, 1, 2])
    hand = Hand(store)
    claim = hand.take()
    hand.start(claim, effect_request(claim, estimate={"turns": 1}))
    store.rescue([(claim.fence.attempt_id, 1)], dead=["worker-1"], why="died", actor="x")
    following = hand.take()
    store.release(following, effect=None, reason="drain")
    hand.finish(hand.take())
    driver.commit()
    store.request_cancel("run-1", reason="x", actor="x")
    driver.end("cancelled", "x", stop="cancel_requested")
    store.prune_processes(older_than_ms=0)
    begun: str | None = None
    writes = 0
    for sql in spoken:
        word = sql.split()[0].upper()
        if word == "BEGIN":
            assert begun is None
            begun = sql
        elif word in ("COMMIT", "ROLLBACK"):
            begun = None
        elif word in ("INSERT", "UPDATE", "DELETE", "REPLACE", "CREATE", "DROP", "ALTER"):
            writes += 1
            assert begun == "BEGIN IMMEDIATE", sql
    assert writes > 30


def test_sql_is_spoken_in_the_store_only() -> None:
    sql = re.compile(
        r"\b(SELECT\s.+\sFROM|INSERT\s+(OR\s+\w+\s+)?INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM|CREATE\s+TABLE|PRAGMA\s+\w+)\b",
        re.S,
    )
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for room in ("cli", "coordinator", "worker")
        for path in (ROOT / room).rglob("*.py")
        for line, text in strings(path)
        if sql.search(text)
    ]
    assert found == []
    users = {
        str(path.relative_to(ROOT))
        for room in ("cli", "coordinator", "worker")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^\s*(import|from)\s+(apsw|sqlite3)\b", path.read_text(encoding="utf-8"), re.M)
    }
    assert users <= {"cli/misc.py"}, "only `version` asks the binding, for its number"


def test_the_question_for_future_records_reads_no_other_records(store: Store) -> None:
    """However long a run is: each of its large tables has an index that holds only records of a newer agentctl."""
    for _, table, column, known in runs.VERSIONED:
        plan = rows(
            store,
            f"EXPLAIN QUERY PLAN SELECT {column} FROM {table} "  # noqa: S608
            f"WHERE run_id = 'r' AND {column} > {known} LIMIT 1",
        )
        wanted = {"run_budgets": "PRIMARY KEY", "approvals": "", "effect_reconciliations": ""}.get(
            table, f"{table}_future"
        )
        assert wanted in plan[0][3] and plan[0][3].startswith("SEARCH"), plan
