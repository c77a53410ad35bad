"""The verbs that look after a store, through the program: reports and exit codes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import migrate

KEEPS = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: keeps}
spec:
  policy: {approval: never, writableRoots: [out]}
  actions: {write: {kind: builtin.write}}
  tasks: [{id: text, uses: action:write, with: {path: out/text.json, content: "{}"}}]
"""


@pytest.fixture
def done(cli: Any) -> str:
    """A run that has kept a file; its id."""
    cli.write("keeps.yaml", KEEPS)
    return str(cli.json("run", "keeps.yaml").data["runId"])


def change(database: Path, sql: str) -> None:
    """Change something by hand, as a person with a shell might."""
    with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        connection.executescript(sql)


def test_stats(cli: Any, done: str) -> None:
    data = cli.json("db", "stats").data
    assert data["path"] == str(cli.database)
    assert (data["schema"], data["runs"]) == (migrate.LATEST, {"succeeded": 1})
    assert (data["rows"]["tasks"], data["artifacts"]["blobs"], data["artifacts"]["bytes"]) == (1, 1, 2)
    human = cli("db", "stats")
    assert (human.code, "1 succeeded" in human.out) == (0, True)


def test_verify(cli: Any, done: str) -> None:
    data = cli.json("db", "verify").data
    assert (data["ok"], data["runsChecked"], data["artifacts"]["checked"]) == (True, 1, 1)
    assert cli("db", "verify").code == 0
    assert cli.json("db", "verify", "--no-artifacts").data["artifacts"] is None
    change(cli.database, "UPDATE tasks SET output_json = '{\"a\":1}'")
    broken = cli.json("db", "verify")
    assert (broken.code, broken.data["ok"], broken.data["problemCount"]) == (5, False, 1)
    assert "does not fit its digest" in broken.data["problems"][0]["message"]
    assert cli("db", "verify").code == 5


def test_backup_and_restore(cli: Any, done: str) -> None:
    data = cli.json("db", "backup", "copy").data
    assert (data["runs"], data["artifacts"], data["settledAttempts"]) == (1, 1, 0)
    again = cli.json("db", "backup", "copy")
    assert (again.code, again.error["code"]) == (5, "conflict")
    refused = cli.json("db", "restore", "copy")
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert "--db" in refused.error["remedy"]
    assert cli.json("db", "restore", "nowhere", "--db", "new/x.db").error["code"] == "not_found"
    assert not (cli.folder / "new").exists()
    restored = cli.json("db", "restore", "copy", "--db", "new/x.db")
    assert (restored.code, restored.data["runs"]) == (0, 1)
    assert cli.json("db", "verify", "--db", "new/x.db").data["ok"] is True
    assert cli.json("wait", done, "--db", "new/x.db").data["state"] == "succeeded"
    assert cli.json("run", "keeps.yaml", "--db", "new/x.db").code == 0


def test_migrate(cli: Any, done: str) -> None:
    data = cli.json("db", "migrate").data
    assert (data["from"], data["to"], data["migrated"]) == (migrate.LATEST, migrate.LATEST, False)
    missing = cli.json("db", "migrate", "--db", "none.db")
    assert (missing.code, missing.error["code"]) == (5, "not_found")
    old = cli.folder / "old.db"
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.executescript(migrate.script(1))
        connection.execute(f"PRAGMA application_id = {migrate.APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
    data = cli.json("db", "migrate", "--db", old).data
    assert (data["from"], data["to"], data["migrated"]) == (1, migrate.LATEST, True)
    change(cli.database, f"PRAGMA user_version = {migrate.LATEST + 1}")
    newer = cli.json("db", "migrate")
    assert (newer.code, newer.error["code"]) == (5, "incompatible_version")


def test_gc(cli: Any, done: str) -> None:
    assert cli.json("gc").data["runs"]["considered"] == 0  # it ended a moment ago
    dry = cli.json("gc", "--older-than-days", "0", "--dry-run").data
    assert (dry["runs"]["removed"], dry["artifacts"]["considered"], dry["dryRun"]) == ([done], 1, True)
    assert cli.json("gc", "--older-than-days", "0", "--state", "failed", "--state", "cancelled").data["runs"] == {
        "considered": 0,
        "removed": [],
        "kept": [],
    }
    assert len(cli.json("runs", "list").data["runs"]) == 1
    human = cli("gc", "--older-than-days", "0")
    assert (human.code, f"  {done}\n" in human.out) == (0, True)
    assert cli.json("runs", "list").data["runs"] == []
    assert cli.json("artifacts", "list").data["blobs"] == []
    assert cli.json("status", done).error["code"] == "not_found"
    assert cli.json("db", "verify").code == 0
    for bad in (("--older-than-days", "-1"), ("--state", "running")):
        assert cli.json("gc", *bad).code == 2


def test_gc_forgets_memory_that_expired_long_ago(cli: Any, done: str) -> None:
    cli.json("memory", "put", "old", '"x"', "--retention-days", "1")
    cli.json("memory", "put", "kept", '"y"')
    assert cli.json("gc").data["memory"] == {"expired": 0}
    day = 24 * 3600 * 1000
    change(cli.database, f"UPDATE long_term_memory SET expires_at = expires_at - {40 * day} WHERE memory_key = 'old'")  # noqa: S608
    assert cli.json("gc", "--older-than-days", "60").data["memory"] == {"expired": 0}
    assert cli.json("gc", "--dry-run").data["memory"] == {"expired": 1}
    assert "1 expired memory entry removed" in cli("gc").out
    assert cli.json("gc").data["memory"] == {"expired": 0}
    assert cli.json("memory", "get", "kept").code == 0


@pytest.mark.parametrize("verb", ["db stats", "db verify", "db backup x", "artifacts list", "artifacts gc", "gc"])
def test_without_a_database(cli: Any, verb: str) -> None:
    result = cli.json(*verb.split())
    assert (result.code, result.error["code"]) == (5, "not_found")
    assert not cli.database.parent.exists()
