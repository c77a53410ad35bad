"""Rows changed as somebody with a tool of his own might, past the triggers that keep history as it is."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from apsw import Connection


def change(database: Path, statement: str, *values: Any) -> None:
    """Change rows; at least one has to be there. The triggers are in place again afterwards."""
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        assert connection.execute(statement, values).rowcount > 0, statement
        for _, sql in triggers:
            connection.execute(sql)


def future(connection: Connection, run_id: str, table: str, column: str) -> None:
    """Make all records of a run in a table those of a newer agentctl; where it has none, put one there.

    The connection is that of an open store: a second library on the file in one process would break its locks.
    """
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(f"UPDATE {table} SET {column} = 99 WHERE run_id = ?", (run_id,))  # noqa: S608
    if connection.changes() == 0:
        # What nobody of this version reads needs no sense, only the types of its columns.
        given: dict[str, Any] = {
            name: 1 if kind == "INTEGER" else "x"
            for _, name, kind, required, default, _ in connection.execute(f"PRAGMA table_info({table})")
            if required and default is None
        }
        given |= {"run_id": run_id, column: 99}
        names, places = ", ".join(given), ", ".join("?" * len(given))
        connection.execute("PRAGMA ignore_check_constraints = ON")
        connection.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", list(given.values()))  # noqa: S608
        connection.execute("PRAGMA ignore_check_constraints = OFF")
    for _, sql in triggers:
        connection.execute(str(sql))
