"""Rows changed as somebody with a tool of his own might, past the triggers that keep history as it is."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any


def change(database: Path, statement: str, *values: Any) -> None:
    """Change rows; at least one has to be there. The triggers are in place again afterwards."""
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        assert connection.execute(statement, values).rowcount > 0, statement
        for _, sql in triggers:
            connection.execute(sql)
