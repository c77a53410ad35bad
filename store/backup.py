"""Backup of a store at work, and restoring one: the database and every blob that it needs, together or not at all.

The database is copied from one snapshot while others write. Collections wait until its blobs are copied, too, so none
can go in between. In the copy nobody is alive: what the processes of the original held at that moment is settled as
after the death of all of them, and never by looking for those processes, which go on with the original.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw

from . import filesystem, migrate
from .artifacts import PROTECTED
from .blobs import Blobs
from .clock import Clock
from .database import Database, all_rows, translate
from .engine import Store
from .errors import ConflictError, CorruptStore, EnvironmentFault, IncompatibleVersion, NotFoundError, UsageError
from .filesystem import sync_folder

NAME = "runtime.db"
STEP_PAGES = 1024
ACTOR = "backup"


def backup(store: Store, destination: Path) -> dict[str, Any]:
    """Make the folder `destination` with `runtime.db` and `artifacts/`; it appears when it is complete and durable.

    Raises `ConflictError` when it exists already, `CorruptStore` when a blob that is needed is missing or damaged, and
    `EnvironmentFault` of the disk; then nothing is left.
    """
    destination = destination.absolute()
    if destination.exists() or destination.is_symlink():
        raise ConflictError(f"{destination} exists already", remedy="a backup makes a new folder: give another name")
    if not destination.parent.is_dir():
        raise UsageError(f"the folder of {destination} does not exist", remedy="make it first")
    with _new_folder(destination) as partial:
        with _no_collection(store.artifacts.blobs):
            _copy_database(store.database, partial / NAME)
            with closing(Store(partial / NAME, store.clock)) as copy:
                settled = _bury_everybody(copy)
                _forget_unneeded(copy)
                count, size = _copy_blobs(copy, store.artifacts.blobs, copy.artifacts.blobs)
                runs = _count_runs(copy)
        for beside in partial.glob(NAME + ".*"):
            # Gate and locks of the copy; they are made again where it is opened.
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink()
        _sync_tree(partial)
    return {
        "path": str(destination),
        "databaseBytes": (destination / NAME).stat().st_size,
        "runs": runs,
        "artifacts": count,
        "artifactBytes": size,
        "settledAttempts": settled,
    }


def restore(source: Path, database: Path, clock: Clock) -> dict[str, Any]:
    """Make the database at `database` from a backup; blobs that are there already are kept.

    Everything is checked before the database appears. Raises `ConflictError` when there is one, `NotFoundError` and
    `UsageError` for what is no backup, `IncompatibleVersion` and `CorruptStore` for one that cannot be used.
    """
    file = source / NAME
    if not file.is_file():
        raise NotFoundError(
            f"there is no backup at {source}: it has no {NAME}", remedy="give the folder of `db backup`"
        )
    for companion in ("-wal", "-journal"):
        if (beside := source / (NAME + companion)).exists() and beside.stat().st_size:
            raise UsageError(
                f"{file} is in use, or was used as a database of its own",
                remedy=f"take a backup of it: `agentctl db backup DEST --db {file}`",
            )
    database = database.absolute()
    for companion in ("", "-wal", "-shm", "-journal"):
        # A log that an earlier database has left would be played into this one.
        beside = database.with_name(database.name + companion)
        if os.path.lexists(beside):
            raise ConflictError(
                f"there is a database at {database}" if not companion else f"{beside} belongs to an earlier database",
                remedy="move it away, or give another place with --db PATH",
            )
    filesystem.require_local(database)
    filesystem.prepare_folder(database.parent)
    temporary = database.with_name(f"{database.name}.restoring-{os.getpid()}")
    try:
        _copy_checked(file, temporary)
        blobs = Blobs(database, clock)
        count, size = _restore_blobs(temporary, Blobs(file, clock), blobs)
        with _disk_faults(database), open(temporary, "rb") as copied:
            os.fsync(copied.fileno())
            # A link, not a renaming: whoever has made a database here meanwhile keeps it.
            os.link(temporary, database)
            sync_folder(database.parent)
    except FileExistsError as error:
        raise ConflictError(f"somebody has made a database at {database} meanwhile") from error
    finally:
        temporary.unlink(missing_ok=True)
    with closing(Store(database, clock)) as restored:
        return {"path": str(database), "runs": _count_runs(restored), "artifacts": count, "artifactBytes": size}


# -- the database ------------------------------------------------------------------------------------------------------


def _copy_database(source: Database, target: Path) -> None:
    """Copy one snapshot of the database, whoever writes meanwhile."""
    old_umask = os.umask(0o077)
    try:
        copy = apsw.Connection(str(target))
    finally:
        os.umask(old_umask)
    try:
        with closing(copy), source.read() as snapshot:
            _copy_pages(snapshot, copy)
    except apsw.Error as error:
        raise translate(error, target) from error


def _copy_pages(source: apsw.Connection, copy: apsw.Connection) -> None:
    # With its transaction open the source stays the snapshot that it is, so no step begins anew.
    with copy.backup("main", source, "main") as pages:
        while not pages.done:
            pages.step(STEP_PAGES)


def _copy_checked(file: Path, target: Path) -> None:
    """Copy the database of a backup and check it: whose it is, of which version, and that it is whole."""
    try:
        source = apsw.Connection(
            f"file:{quote(str(file.absolute()))}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        )
        old_umask = os.umask(0o077)
        try:
            copy = apsw.Connection(str(target))
        finally:
            os.umask(old_umask)
        with closing(source), closing(copy):
            application = source.execute("PRAGMA application_id").fetchone()
            version = source.execute("PRAGMA user_version").fetchone()
            if application is None or application[0] != migrate.APPLICATION_ID:
                raise IncompatibleVersion(f"{file} is the database of another program")
            migrate.refuse_newer(int(version[0]) if version else 0, file)
            _copy_pages(source, copy)
            found = copy.execute("PRAGMA integrity_check").fetchone()
            if found is None or found[0] != "ok":
                raise CorruptStore(f"{file} is damaged: {found and found[0]}", remedy="use another backup")
    except apsw.Error as error:
        raise translate(error, file) from error


def _bury_everybody(copy: Store) -> int:
    """Settle what was held when the snapshot was taken; the number of attempts.

    Identities are recorded as those of this boot, and their processes may live: nobody looks for them, from here or
    later, since their rows say that they are dead.
    """
    claims = [(row[0], row[1]) for row in copy.claims()]
    dead = [row.process_id for row in copy.live_processes()]
    outcomes = copy.rescue(claims, dead=dead, why="the backup was taken while it was held", actor=ACTOR)
    with copy.database.write(durable=True) as tx:
        tx.execute(
            "UPDATE runs SET driver = NULL, driver_lease_expires_at = NULL "
            "WHERE driver IS NOT NULL AND ended_at IS NULL"
        )
    return len(outcomes)


def _count_runs(store: Store) -> int:
    with store.database.read() as tx:
        row = tx.execute("SELECT COUNT(*) FROM runs").fetchone()
        return int(row[0]) if row else 0


# -- blobs -------------------------------------------------------------------------------------------------------------


@contextmanager
def _no_collection(blobs: Blobs) -> Iterator[None]:
    if not blobs.root.is_dir():
        # What is made from now on is not in the snapshot, or is too young for any collection that begins meanwhile.
        yield
        return
    with blobs.locked(".collect.lock"):
        yield


def _forget_unneeded(copy: Store) -> None:
    """A backup does not carry what the next collection would remove."""
    now = copy.clock.now()
    with copy.database.write(durable=True) as tx:
        tx.execute(
            "DELETE FROM artifact_ingests WHERE expires_at <= ? AND attempt_id IN "
            "(SELECT attempt_id FROM attempts WHERE state = 'closed')",
            (now,),
        )
        tx.execute(f"DELETE FROM artifact_blobs AS b WHERE NOT ({PROTECTED})", (now,))  # noqa: S608


def _copy_blobs(copy: Store, source: Blobs, target: Blobs) -> tuple[int, int]:
    with copy.database.read() as tx:
        rows = all_rows(tx.execute("SELECT digest, size_bytes FROM artifact_blobs ORDER BY digest"))
    return _carry(rows, source, target)


def _restore_blobs(database: Path, source: Blobs, target: Blobs) -> tuple[int, int]:
    try:
        with closing(apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)) as connection:
            known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'artifact_blobs'").fetchone()
            rows = all_rows(connection.execute("SELECT digest, size_bytes FROM artifact_blobs")) if known else []
    except apsw.Error as error:
        raise translate(error, database) from error
    return _carry(rows, source, target)


def _carry(rows: list[tuple[str, int]], source: Blobs, target: Blobs) -> tuple[int, int]:
    for digest, size in rows:
        place = target.path_of(digest)
        if place.exists() and target.check(digest, size) == "ok":
            continue
        with _disk_faults(place):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = place.with_name(f".{place.name}.{os.getpid()}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o400), "wb") as file:
                try:
                    sound = source.copy_out(digest, file.fileno())
                except FileNotFoundError:
                    sound = False
                os.fsync(file.fileno())
            if not sound:
                temporary.unlink()
                raise CorruptStore(
                    f"the stored bytes of {digest} in {source.root} are missing or damaged",
                    remedy="`agentctl artifacts verify` shows all such; run again the tasks that made them",
                )
            os.replace(temporary, place)
            sync_folder(place.parent)
    if rows:
        for folder in (target.root, target.root / "sha256"):
            folder.chmod(0o700)
            sync_folder(folder)
    return len(rows), sum(size for _, size in rows)


# -- folders -----------------------------------------------------------------------------------------------------------


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    """A folder that gets its name when the block has ended well, and is gone when it has not."""
    partial = destination.with_name(f".{destination.name}.agentctl-{os.getpid()}.partial")
    with _disk_faults(partial):
        partial.mkdir(mode=0o700)
    try:
        yield partial
        with _disk_faults(destination):
            os.rename(partial, destination)
            sync_folder(destination.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _disk_faults(place: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {place}: {error.strerror}", remedy="free some space, or choose another place"
        ) from error


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError), open(Path(place, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))
