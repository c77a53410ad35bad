"""One connection to the database: opening, transactions, durability.

    with database.write() as tx:      gate, BEGIN IMMEDIATE, COMMIT        (others see it; a power cut may undo it)
    with database.write(durable=True) as tx:  the same, then fdatasync     (promised)
    with database.read() as tx:       one consistent snapshot, never blocked by writers
    database.guess(look)              one or two looks whose answer is a guess

No statement runs outside these. A foreign process that locks the file costs time, never an error: the holder of the
gate asks again every 2 ms for as long as it takes. The schema's version is compared in every transaction.

Durability: commits run with `synchronous=NORMAL` inside the gate; `write(durable=True)` leaves the gate and then syncs
SQLite's own WAL descriptor, so that others commit meanwhile and one sync serves many (architecture 6). Where that
descriptor cannot be found, `synchronous=FULL` is used instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import apsw

from . import filesystem, migrate
from .clock import Clock
from .errors import (
    AgentctlError,
    ConflictError,
    CorruptStore,
    EnvironmentFault,
    IncompatibleVersion,
    NotFoundError,
)
from .gate import Gate, write_lock_holder

log = logging.getLogger(__name__)

Connection = apsw.Connection
Guess = TypeVar("Guess")

BUSY_POLL_SECONDS = 0.002
READ_PATIENCE_SECONDS = 60.0
TELL_SECONDS = 2.0
"""After so long a wait behind a program that knows no gate, a log line tells of it."""

_opening = threading.Lock()


class SyncFailed(EnvironmentFault):
    """The disk refused to make a commit durable. What was promised cannot be kept: the process has to end.

    The kernel tells of a lost write once, so a later sync that succeeds means nothing: after this error the same
    connection promises nothing any more.
    """


def _count_no_memory(*, own_library: bool) -> None:
    """SQLite counts the memory it uses, behind one lock for the whole process, at every allocation. Nobody asks for the
    sum, and counting took a twentieth of a worker's time. It can be told only before its first use."""
    if not own_library:
        return  # that of the system: Python's own `sqlite3` may be using it at this moment
    if apsw.connections():
        return  # whoever imports this has open databases of his own
    apsw.shutdown()
    with contextlib.suppress(apsw.Error):
        apsw.config(apsw.SQLITE_CONFIG_MEMSTATUS, False)
    apsw.initialize()


_count_no_memory(own_library=apsw.using_amalgamation)


class StoreGone(EnvironmentFault):
    """The file was removed or replaced under those who work on it. What they write from now on is lost."""


class Database:
    """A connection and its gate. One thread uses it; other threads and processes open their own."""

    checkpoint_pages = 4000
    """A commit that leaves more pages in the WAL writes them back, inside the gate."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        create: bool = False,
        cache_kib: int = 4096,
        end_stuck: Callable[[int], str | None] | None = None,
        vfs: str | None = None,
        sync: Callable[[], None] | None = None,
    ) -> None:
        """Open the database at `path`; `self.path` is where the file really is.

        Raises `EnvironmentFault` (network filesystem, permissions, disk), `IncompatibleVersion` (newer schema, or the
        file of another program: it is left untouched), `CorruptStore`, and `NotFoundError` if it is missing and
        `create` is false. `vfs` and `sync` are for tests that cut the power.
        """
        # A link to the file is another name of it: whatever lies beside it (gate, wake folder, artifacts, locks) lies
        # beside the file itself, or two processes that use different names would not know of each other.
        self.path = Path(os.path.realpath(path))
        self.clock = clock
        self._sync_by_test = sync
        self._commits = 0
        self._wal_fd: int | None = None  # until it is found, commits are synchronous
        self._failed_sync: SyncFailed | None = None
        self._behind_foreigner = False
        try:
            str(self.path).encode("utf-8")
        except UnicodeEncodeError as error:
            raise EnvironmentFault(
                f"{self.path} is not UTF-8, which SQLite needs", remedy="choose another place with --db PATH"
            ) from error
        filesystem.require_local(self.path)
        if not self.path.exists():
            if not create:
                raise NotFoundError(
                    f"there is no database at {path.absolute()}",
                    remedy="give its place with --db PATH or AGENTCTL_DB; `agentctl run FILE` makes one",
                )
            filesystem.prepare_folder(self.path.parent)
            filesystem.make_for_owner(self.path)
        elif not self.path.is_file():
            raise EnvironmentFault(f"{path.absolute()} is not a file", remedy="choose another place with --db PATH")
        filesystem.require_writable(self.path)
        with _opening:
            self._connect(cache_kib, vfs, end_stuck)
        status = os.stat(self.path)
        self._file = (status.st_dev, status.st_ino)
        try:
            self._record_statement()
        except BaseException:
            self.close()
            raise

    # -- opening ---------------------------------------------------------------------------------------------------

    def _connect(self, cache_kib: int, vfs: str | None, end_stuck: Callable[[int], str | None] | None) -> None:
        key = os.path.realpath(self.path)
        try:
            if not filesystem.is_open_here(key):
                self._look_before_touching()
            fds_before = self._wal_descriptors()
            # The file and its companions are born private; opening them ourselves would drop SQLite's locks.
            old_umask = os.umask(0o077)
            try:
                # One thread uses a connection, so SQLite need not lock it at every call.
                self.connection = apsw.Connection(
                    str(self.path),
                    flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_NOMUTEX,
                    vfs=vfs,
                    statementcachesize=512,
                )
            finally:
                os.umask(old_umask)
        except apsw.Error as error:
            raise self._translate(error) from error
        self.gate = Gate(self.path.with_name(self.path.name + ".gate"), end_stuck or (lambda pid: "not ours"))
        for lock in (self.gate.descriptor, self.gate.line):
            filesystem.give_to_owner(lock, self.path)
        filesystem.note_opened(key)
        self._key = key
        try:
            # Whoever is first to open or last to close locks the file for a moment, even against readers.
            self.connection.set_busy_timeout(int(READ_PATIENCE_SECONDS * 1000))
            # Until we know that the file is ours, closing it must not write anything back from its WAL.
            self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            self.connection.execute(f"PRAGMA cache_size = -{int(cache_kib)}")
            self.connection.execute("PRAGMA foreign_keys = ON")
            # A plan must not depend on bound values: SQLite with STAT4 compiles a statement anew for each new value.
            self.connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
            self._prepare_schema()
            self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
            self.connection.set_wal_hook(self._checkpoint)
            self.connection.execute("PRAGMA journal_size_limit = 16777216")
            self._user_version()
            self._wal_fd = self._find_wal(fds_before)
            level = "NORMAL" if self._wal_fd is not None or self._sync_by_test is not None else "FULL"
            self.connection.execute(f"PRAGMA synchronous = {level}")
            self.connection.set_busy_timeout(0)
        except apsw.Error as error:
            self.close()
            raise self._translate(error) from error
        except BaseException:
            self.close()
            raise

    def _look_before_touching(self) -> None:
        """Refuse the file of another program, or of a newer version, before anything of it could change.

        Only the header is read, without any lock: others may be writing. What cannot be read this way, or is behind
        their log, is left to the real opening.
        """
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        try:
            connection = open_immutable(self.path)
            try:
                application = _pragma(connection, "application_id")
                version = _pragma(connection, "user_version")
                tables = 0 if application else _scalar(connection, "SELECT COUNT(*) FROM sqlite_master")
            finally:
                connection.close()
        except apsw.NotADBError:
            raise
        except apsw.Error:
            return
        self._refuse_foreign(application, version, bool(tables))

    def _refuse_foreign(self, application: int, version: int, tables: bool) -> None:
        if application != migrate.APPLICATION_ID and (application or version or tables):
            raise IncompatibleVersion(
                f"{self.path} is the database of another program; it was left untouched",
                remedy="choose another place with --db PATH",
            )
        migrate.refuse_newer(version, self.path)

    def refuse_tables(self) -> None:
        """Raise when a file without a schema has tables, of another program or of ours; inside a transaction."""
        tables = _scalar(self.connection, "SELECT COUNT(*) FROM sqlite_master")
        self._refuse_foreign(_pragma(self.connection, "application_id"), 0, bool(tables))
        if tables:
            raise CorruptStore(
                f"{self.path} is damaged: it has tables, but the number of its schema is 0; nothing was changed",
                remedy="restore a backup; `sqlite3 FILE .dump` shows what is in it",
            )

    def _record_statement(self) -> None:
        """Keep what somebody has stated about the filesystem, since everything here relies on it."""
        stated = os.environ.get(filesystem.OVERRIDE)
        if stated:
            with self.read() as tx:
                known = tx.execute("SELECT value FROM meta WHERE key = 'filesystem_type'").fetchone()
            if known is None or known[0] != stated:
                with self.write() as tx:
                    tx.execute("INSERT OR REPLACE INTO meta VALUES ('filesystem_type', ?)", (stated,))

    def _prepare_schema(self) -> None:
        version = self._user_version()
        application = _pragma(self.connection, "application_id")
        self._refuse_foreign(application, version, False)
        if version < migrate.LATEST:
            migrate.migrate(self)
        names = self.connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        migrate.require_tables((str(row[0]) for row in names), self.path)
        mode = str(_scalar(self.connection, "PRAGMA journal_mode"))
        if mode != "wal":
            raise CorruptStore(
                f"{self.path} is in journal mode {mode!r}, not in WAL mode",
                remedy="end every program that uses it; agentctl sets the mode when it makes a database",
            )

    def _user_version(self) -> int:
        return _pragma(self.connection, "user_version")

    def _wal_descriptors(self) -> set[int]:
        wal = os.path.realpath(self.path) + "-wal"
        found = set()
        try:
            for name in os.listdir("/proc/self/fd"):
                try:
                    if os.readlink(f"/proc/self/fd/{name}") == wal:
                        found.add(int(name))
                except OSError:
                    continue
        except OSError:
            return set()
        return found

    def _find_wal(self, before: set[int]) -> int | None:
        """The WAL descriptor of this very connection; another's could be closed behind our back."""
        new = self._wal_descriptors() - before
        return new.pop() if len(new) == 1 else None

    def close(self) -> None:
        """Close the connection; open transactions are rolled back."""
        if self._key is not None:
            filesystem.note_closed(self._key)
            self._key = None
            self.connection.close()
            self.gate.close()

    _key: str | None = None
    migrating = False
    """Only `migrate` writes into an older schema."""

    # -- transactions ----------------------------------------------------------------------------------------------

    def write(self, *, durable: bool = False, urgent: bool = False) -> _Write:
        """A writing transaction: commits at the end of the block, rolls back when it raises.

        `urgent` ones may overtake others at the gate.
        """
        return _Write(self, durable, urgent)

    def read(self) -> _Read:
        """A reading transaction: one snapshot for the whole block. Keep it short: it holds back the WAL."""
        return _Read(self)

    def guess(self, look: Callable[[Connection], Guess | None]) -> Guess | None:
        """One or two statements without a common snapshot and without a look at the schema's version: at half the
        cost of `read`, and None when the answer is not to be had now.

        Only for what a writing transaction examines before anything comes of it.
        """
        try:
            return look(self.connection)
        except apsw.BusyError:
            return None
        except apsw.Error as error:
            raise self._translate(error) from error

    def data_version(self) -> tuple[int, int]:
        """A value that changes with every commit, of this connection or of another; cheap enough to ask often."""
        try:
            return _pragma(self.connection, "data_version"), self._commits
        except apsw.BusyError:  # another process recovers the WAL: whoever asks will look, and wait there
            return -1, self._commits

    def may_begin(self) -> bool:
        """Whether SQLite's write lock can be had at this instant; it is given back at once. The caller has the gate."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            self.connection.execute("ROLLBACK")
        except apsw.BusyError:
            return False
        except apsw.Error as error:
            raise self._translate(error) from error
        return True

    def require_place(self) -> None:
        """Raise `StoreGone` when the file that is open here is not the one at its path any more."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            happened = "was removed"
        except OSError:
            return  # nobody can tell; whatever is wrong with the disk shows itself
        else:
            if (status.st_dev, status.st_ino) == self._file:
                return
            happened = "was replaced by another file"
        raise StoreGone(
            f"the database {self.path} {happened} while this process worked on it",
            remedy="end everybody who uses it before it is moved or restored; what starts now uses what is there",
        )

    def sync(self) -> None:
        """Make every commit of this connection durable. Raises `SyncFailed`, and then for ever."""
        if self._failed_sync is None:
            try:
                if self._sync_by_test is not None:
                    self._sync_by_test()
                elif self._wal_fd is not None:
                    os.fdatasync(self._wal_fd)
            except OSError as error:
                self._failed_sync = _sync_failed(self.path, error.strerror)
        if self._failed_sync is not None:
            raise self._failed_sync

    def _checkpoint(self, connection: Connection, name: str, pages: int) -> int:
        """Called by SQLite after each commit, as its automatic checkpoint is, which would hide a failed sync.

        Every other error leaves the pages in the WAL, and the next commit tries again.
        """
        if pages >= self.checkpoint_pages:
            try:
                connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
            except apsw.IOError as error:
                if _is_failed_sync(error):
                    self._failed_sync = _sync_failed(self.path, str(error))
            except apsw.Error:
                pass
        return apsw.SQLITE_OK

    def begin(self, *, urgent: bool = False) -> None:
        """Take the gate and the write lock."""
        self.gate.acquire(urgent=urgent)
        try:
            try:
                self.connection.execute("BEGIN IMMEDIATE")
            except apsw.BusyError:
                self._begin_behind_foreigner()
            version = _pragma(self.connection, "user_version")
            if version != migrate.LATEST and not (self.migrating and version < migrate.LATEST):
                self.connection.execute("ROLLBACK")
                migrate.refuse_newer(version, self.path)
                raise IncompatibleVersion(f"the schema of {self.path} changed while this process ran")
        except apsw.Error as error:
            self.gate.release()
            raise self._translate(error) from error
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            self.gate.release()
            raise

    def _begin_behind_foreigner(self) -> None:
        """A process outside the gate (a shell, a backup) has the lock. Ask until it is gone: that costs only time.

        Nothing is written yet, so signals are let in between two questions (see `Gate.let_in`).
        """
        from tenacity import Retrying, retry_if_exception_type, wait_fixed

        self._behind_foreigner = True
        told = False
        since = self.clock.monotonic()

        def sleep(seconds: float) -> None:
            nonlocal told
            if not told and self.clock.monotonic() - since >= TELL_SECONDS:
                told = True
                self._tell_of_foreigner()
            with self.gate.let_in():
                self.clock.sleep(seconds)

        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(apsw.BusyError),
                wait=wait_fixed(BUSY_POLL_SECONDS),
                sleep=sleep,
            ):
                with attempt:
                    self.connection.execute("BEGIN IMMEDIATE")
        finally:
            self._behind_foreigner = False

    def _tell_of_foreigner(self) -> None:
        from .process_identity import read_stat

        pid = write_lock_holder(self.path)
        stat = None
        with contextlib.suppress(PermissionError):
            stat = None if pid is None else read_stat(pid)
        who = "another program" if pid is None else f"process {pid}" + (f" ({stat.name})" if stat else "")
        log.warning("waiting for %s, which holds SQLite's write lock on %s; nothing is written yet", who, self.path)

    @property
    def waits(self) -> bool:
        """Whether its thread waits for others that write. Any thread may ask."""
        return self._behind_foreigner or self.gate.waiting

    def _translate(self, error: apsw.Error) -> AgentctlError:
        translated = translate(error, self.path)
        if isinstance(translated, SyncFailed):
            self._failed_sync = translated
        return translated


def open_immutable(path: Path) -> Connection:
    """A connection that only reads, takes no lock and makes nothing beside the file: for a file that nobody writes.

    Of one that others write it shows what was written back so far, or a mixture: neither its answers nor its errors
    prove anything then. Raises `apsw.Error`; the caller closes it.
    """
    return _read_only(path, "immutable=1")


def open_to_look(path: Path) -> Connection:
    """A connection that only reads, with the locks and the log of everybody else, and leaves the log as it is.

    Raises `apsw.Error`, also where nothing may be written beside the file; the caller closes it.
    """
    connection = _read_only(path, "mode=ro")
    connection.set_busy_timeout(int(READ_PATIENCE_SECONDS * 1000))
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    return connection


def _read_only(path: Path, how: str) -> Connection:
    from urllib.parse import quote

    return apsw.Connection(
        f"file:{quote(str(path.absolute()))}?{how}", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    )


def log_is_empty(path: Path) -> bool:
    """Whether everything that was ever committed is in the file itself."""
    try:
        return os.stat(os.path.realpath(path) + "-wal").st_size == 0
    except OSError:
        return True


def translate(error: apsw.Error, path: Path) -> AgentctlError:
    """What an error of SQLite means to a person."""
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return CorruptStore(
            f"{path} is damaged or is no SQLite database: {error}",
            remedy="restore a backup; keep the damaged file for a rescue with `sqlite3 FILE .recover`",
        )
    # Without room for its shared memory or for a whole write SQLite tells of a failed disk, as on tmpfs.
    no_room = isinstance(error, apsw.IOError) and not _is_failed_sync(error) and filesystem.is_full(path.parent)
    if isinstance(error, apsw.FullError) or no_room:
        return EnvironmentFault(
            f"the disk under {path} is full",
            remedy="free some space; a run that exists goes on with `agentctl resume RUN`",
        )
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError) and filesystem.is_read_only(path.parent):
        return EnvironmentFault(
            f"{path} is on a filesystem that is mounted read-only",
            remedy="mount it writable, or choose another place with --db PATH",
        )
    if isinstance(error, apsw.ReadOnlyError | apsw.CantOpenError | apsw.PermissionsError | apsw.AuthError):
        return EnvironmentFault(
            f"{path} cannot be opened for writing: {error}", remedy="check permissions of the file and its folder"
        )
    if isinstance(error, apsw.IOError):
        if _is_failed_sync(error):
            return _sync_failed(path, str(error))
        return EnvironmentFault(
            f"the disk under {path} failed: {error}",
            remedy="check the disk; a run that exists goes on with `agentctl resume RUN`",
        )
    if isinstance(error, apsw.ConstraintError):
        return ConflictError(f"the database refused an inconsistent change: {error}")
    if isinstance(error, apsw.BusyError):
        return EnvironmentFault(f"{path} stayed locked by another program", remedy="end that program")
    return CorruptStore(
        f"{path}: SQLite reports: {error}",
        remedy="`agentctl doctor` and `agentctl db verify` look at the whole file; restore a backup if it is damaged",
    )


def _is_failed_sync(error: apsw.IOError) -> bool:
    return getattr(error, "extendedresult", 0) in (apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC)


def _sync_failed(path: Path, reason: str | None) -> SyncFailed:
    return SyncFailed(
        f"the disk under {path} failed to sync: {reason}",
        remedy="check the disk; nothing that was not yet promised has been started",
    )


class _Write:
    __slots__ = ("_database", "_durable", "_urgent")

    def __init__(self, database: Database, durable: bool, urgent: bool) -> None:
        self._database = database
        self._durable = durable
        self._urgent = urgent

    def __enter__(self) -> Connection:
        self._database.begin(urgent=self._urgent)
        return self._database.connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        database = self._database
        connection = database.connection
        try:
            if kind is None:
                connection.execute("COMMIT")
            elif connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error as failure:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise database._translate(failure) from failure
        finally:
            database.gate.release()
        if kind is None:
            database._commits += 1
            if self._durable:
                database.sync()
        elif isinstance(error, apsw.Error):
            raise database._translate(error) from error


class _Read:
    __slots__ = ("_database",)

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> Connection:
        database = self._database
        connection = database.connection
        deadline = None
        while True:
            try:
                connection.execute("BEGIN")
                version = _pragma(connection, "user_version")
                break
            except apsw.BusyError as error:
                # Only while another process recovers or resets the WAL; never because of a writer.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                now = database.clock.monotonic()
                deadline = deadline or now + READ_PATIENCE_SECONDS
                if now > deadline:
                    raise database._translate(error) from error
                database.clock.sleep(BUSY_POLL_SECONDS)
            except apsw.Error as error:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise database._translate(error) from error
        if version != migrate.LATEST:
            connection.execute("ROLLBACK")
            migrate.refuse_newer(version, database.path)
            raise IncompatibleVersion(f"the schema of {database.path} changed while this process ran")
        return connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._database.connection
        if connection.in_transaction:
            connection.execute("COMMIT" if kind is None else "ROLLBACK")
        if isinstance(error, apsw.Error):
            raise self._database._translate(error) from error


def _scalar(connection: Connection, sql: str) -> object:
    row = connection.execute(sql).fetchone()
    return row[0] if row else None


def _pragma(connection: Connection, name: str) -> int:
    value = _scalar(connection, f"PRAGMA {name}")
    return value if isinstance(value, int) else 0


def all_rows(cursor: apsw.Cursor) -> list[Any]:
    """Every row of a statement, as tuples whose types the statement knows."""
    return cursor.fetchall()


def sqlite_version() -> str:
    """The version of the SQLite that comes with the binding; there is no other in use."""
    return apsw.sqlite_lib_version()
