"""Schema versions: numbered files, each applied in one transaction together with its number (contract 10).

A database that a newer agentctl has written is refused and left untouched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CorruptStore, EnvironmentFault, IncompatibleVersion
from .filesystem import give_to_owner

if TYPE_CHECKING:
    from .database import Connection, Database

APPLICATION_ID = 0x41474354
"""`AGCT`: tells our files from those of every other program."""

LATEST = 14
"""The schema that this code knows; the number of the last file in `migrations/`."""


TABLES = frozenset(
    {
        "approvals",
        "artifact_blobs",
        "artifact_ingests",
        "artifact_refs",
        "attempts",
        "audit_events",
        "budget_lines",
        "budget_reservations",
        "checkpoints",
        "compensations_due",
        "effect_reconciliations",
        "effects",
        "long_term_memory",
        "memory_values",
        "meta",
        "processes",
        "protocol_calls",
        "protocol_sessions",
        "provider_sessions",
        "run_budgets",
        "run_documents",
        "run_numbers",
        "run_outputs",
        "runs",
        "stream_events",
        "tasks",
        "tool_calls",
        "turns",
    }
)
"""What the latest schema consists of."""


def refuse_newer(version: int, path: Path) -> None:
    """Raise `IncompatibleVersion` when a newer agentctl has written the database."""
    if version > LATEST:
        raise IncompatibleVersion(
            f"{path} has schema {version}; this agentctl knows schemas up to {LATEST}. The file was left untouched",
            remedy="upgrade agentctl",
        )


def require_tables(names: Iterable[str], path: Path) -> None:
    """Raise `CorruptStore` when tables of the latest schema are not among those that the file has."""
    missing = sorted(TABLES.difference(names))
    if missing:
        raise CorruptStore(
            f"{path} is damaged: its schema {LATEST} lacks {', '.join(missing)}; nothing was changed",
            remedy="restore a backup; `sqlite3 FILE .dump` shows what is left",
        )


def version_of(path: Path) -> int:
    """The schema that a database has. Raises what opening it would raise, and takes nobody's log away from him.

    While others write, only a reader with locks and their log knows it: the file alone may be behind the log, or in the
    middle of being written back from it, which looks like damage.
    """
    import apsw

    from .database import log_is_empty, open_immutable, open_to_look, translate
    from .filesystem import require_local

    require_local(path)  # first, since a look with locks leaves its mark in the index of the log
    try:
        if log_is_empty(path):
            with contextlib.suppress(apsw.Error):  # somebody has just begun: a look with locks decides what it is
                return _version_in(open_immutable(path))
        try:
            return _version_in(open_to_look(path))
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            # Nobody may write beside it, so there are no locks to be had; whoever opens it is told why.
            return _version_in(open_immutable(path))
    except apsw.Error as error:
        raise translate(error, path) from error


def _version_in(connection: Connection) -> int:
    with contextlib.closing(connection):
        row = connection.execute("PRAGMA user_version").fetchone()
    return int(row[0]) if row else 0


def script(number: int) -> str:
    """The SQL of migration `number`."""
    prefix = f"{number:04d}_"
    for entry in resources.files("agentctl.store.migrations").iterdir():
        if entry.name.startswith(prefix) and entry.name.endswith(".sql"):
            return entry.read_text(encoding="utf-8")
    raise LookupError(f"no migration {number}")


def migrate(database: Database) -> None:
    """Bring the schema to `LATEST`. Processes that start at one instant do it one after the other.

    Transaction boundaries: one per migration; `user_version` is part of it, so a crash leaves a known version.
    Foreign keys are off while a table is made anew, and checked before the commit.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(database.path.with_name(database.path.name + ".migrate.lock"), mode=0o600, poll_interval=0.005)
    try:
        with lock.acquire(timeout=60):
            give_to_owner(Path(lock.lock_file), database.path)
            connection = database.connection
            database.gate.acquire()
            try:
                # WAL is a property of the file, set before the first table exists and outside of any transaction.
                connection.execute("PRAGMA journal_mode = WAL")
            finally:
                database.gate.release()
            # No-op inside of a transaction, so it has to stand around them.
            connection.execute("PRAGMA foreign_keys = OFF")
            database.migrating = True
            try:
                for number in range(1, LATEST + 1):
                    _apply(database, number)
            finally:
                database.migrating = False
                connection.execute("PRAGMA foreign_keys = ON")
    except Timeout as error:
        raise EnvironmentFault(
            f"another process has been migrating {database.path} for a minute", remedy="wait for it, then try again"
        ) from error


def _apply(database: Database, number: int) -> None:
    with database.write(durable=number == LATEST) as tx:
        row = tx.execute("PRAGMA user_version").fetchone()
        if row is not None and int(row[0]) >= number:
            return
        if number == 1:
            database.refuse_tables()
        tx.execute(script(number))
        broken = tx.execute("PRAGMA foreign_key_check").fetchone()
        if broken is not None:
            raise CorruptStore(f"{database.path}: a row of {broken[0]} refers to one of {broken[2]} that is not there")
        tx.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        tx.execute(f"PRAGMA user_version = {number}")
