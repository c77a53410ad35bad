"""Backup of a store at work, and restoring one: the database and every blob that it needs, together or not at all.

The database is copied from one snapshot while others write. Collections wait until its blobs are copied, too, so none
can go in between. In the copy nobody is alive: what the processes of the original held at that moment is settled as
after the death of all of them, and never by looking for those processes, which go on with the original.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from . import filesystem, migrate
from .artifacts import PROTECTED, forget_leases
from .blobs import Blobs, Staged, writer_liveness, writer_name
from .clock import Clock
from .database import Database, all_rows, open_immutable, translate
from .engine import Store
from .errors import ConflictError, CorruptStore, EnvironmentFault, IncompatibleVersion, NotFoundError, UsageError
from .filesystem import COMPANIONS, sync_folder
from .process_identity import Liveness

NAME = "runtime.db"
STEP_PAGES = 1024
ACTOR = "backup"

_UNFINISHED, _PARTIAL, _RESTORING = ".agentctl-", ".partial", ".restoring"
"""How names of unfinished copies begin and end; between them stands who writes."""

_ELSEWHERE = "free some space, or choose another place"
_OTHER_BACKUP = "use another backup"


def backup(store: Store, destination: Path) -> dict[str, Any]:
    """Make the folder `destination` with `runtime.db` and `artifacts/`; it appears when it is complete and durable.

    What an earlier backup into the same folder has left half-written goes, when its process is provably dead. Raises
    `ConflictError` when the destination exists already, `UsageError` when it is inside of the store, `CorruptStore`
    when a blob that is needed is missing or damaged, and `EnvironmentFault` of the disk; then nothing is left.
    """
    destination = destination.absolute()
    if destination.exists() or destination.is_symlink():
        raise ConflictError(f"{destination} exists already", remedy="a backup makes a new folder: give another name")
    if not destination.parent.is_dir():
        raise UsageError(f"the folder of {destination} does not exist", remedy="make it first")
    _refuse_inside(store, destination)
    _remove_leftovers(destination.parent, _PARTIAL)
    partial = destination.with_name(f"{_UNFINISHED}{writer_name()}{_PARTIAL}")
    try:
        with _new_folder(partial, destination):
            copied = Blobs(partial / NAME, store.clock)
            with _no_collection(store.artifacts.blobs):
                _copy_database(store.database, partial, destination)
                with _named(partial, destination):
                    settled, runs, rows = _settle(partial / NAME, store.clock)
                count, size = _copy_blobs(rows, store.artifacts.blobs, copied, destination)
            with _writing(destination):
                _sync_tree(partial)
    except BaseException:
        # Not left to the context manager: a signal may come when it has made the folder and the block has not begun.
        shutil.rmtree(partial, ignore_errors=True)
        raise
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
    `UsageError` for what is no backup, `IncompatibleVersion` and `CorruptStore` for one that cannot be used, and
    `EnvironmentFault` of either disk; then nothing is left.
    """
    file = source / NAME
    database = database.absolute()
    _check_source(source, file)
    _check_place(source, database)
    filesystem.require_local(database)
    blobs = Blobs(database, clock)
    new = [each for each in (*blobs.folders(), *_ancestors(database)) if not os.path.lexists(each)]
    try:
        filesystem.prepare_folder(database.parent)
        _remove_leftovers(database.parent, _RESTORING)
        return _restore(file, database, blobs, Blobs(file, clock))
    except BaseException:
        for folder in new:
            with suppress(OSError):  # it has something in it, which is somebody's
                folder.rmdir()
        raise


def _restore(file: Path, database: Path, blobs: Blobs, source: Blobs) -> dict[str, Any]:
    temporary = database.with_name(f"{_UNFINISHED}{writer_name()}{_RESTORING}")
    try:
        _copy_checked(file, temporary, database)
        runs, open_runs, rows = _look_into(temporary, database)
        count, size = _restore_blobs(rows, source, blobs)
        with _writing(database), open(temporary, "rb") as copied:
            filesystem.give_to_owner(copied.fileno(), database)
            os.fsync(copied.fileno())
            try:
                # A link, not a renaming: whoever has made a database here meanwhile keeps it.
                os.link(temporary, database)
            except FileExistsError as error:
                raise ConflictError(f"somebody has made a database at {database} meanwhile") from error
            sync_folder(database.parent)
    finally:
        _unlink(temporary)
    return {
        "path": str(database),
        "runs": runs,
        "openRuns": open_runs,
        "artifacts": count,
        "artifactBytes": size,
    }


# -- what is refused at once -------------------------------------------------------------------------------------------


def _refuse_inside(store: Store, destination: Path) -> None:
    """A folder within the store is none of its blobs, and the first collection or look would stumble over it."""
    place = destination.parent.resolve() / destination.name
    home = store.path.parent.resolve()
    root = store.artifacts.blobs.root.resolve()
    within = place.relative_to(home).parts if place.is_relative_to(home) else ()
    if place.is_relative_to(root) or (within and within[0].startswith(store.path.name)):
        raise UsageError(f"{destination} is inside of the store itself", remedy="give a folder outside of it")


def _check_source(source: Path, file: Path) -> None:
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


def _check_place(source: Path, database: Path) -> None:
    for companion in ("", *COMPANIONS):
        # A log that an earlier database has left would be played into this one.
        beside = database.with_name(database.name + companion)
        if os.path.lexists(beside):
            raise ConflictError(
                f"there is a database at {database}" if not companion else f"{beside} belongs to an earlier database",
                remedy="move it away, or give another place with --db PATH",
            )
    if (database.parent.resolve() / database.name).is_relative_to(source.resolve()):
        raise UsageError(f"{database} is inside of the backup itself", remedy="give a place outside of it with --db")


# -- the database ------------------------------------------------------------------------------------------------------


def _copy_database(source: Database, partial: Path, destination: Path) -> None:
    """Copy one snapshot of the database, whoever writes meanwhile."""
    target = partial / NAME
    with closing(_new_file(target, destination / NAME)) as copy, source.read() as snapshot:
        try:
            _copy_pages(snapshot, copy)
        except apsw.Error as error:
            # Told here, before the reading transaction takes it for a fault of the database that it reads.
            raise _copy_fault(error, source.path, target, destination / NAME) from error


def _new_file(target: Path, shown: Path) -> apsw.Connection:
    old_umask = os.umask(0o077)
    try:
        return apsw.Connection(str(target))
    except apsw.Error as error:
        raise _told(translate(error, target), target, shown) from error
    finally:
        os.umask(old_umask)


def _copy_pages(source: apsw.Connection, copy: apsw.Connection) -> None:
    # With its transaction open the source stays the snapshot that it is, so no step begins anew.
    with copy.backup("main", source, "main") as pages:
        while not pages.done:
            pages.step(STEP_PAGES)


def _copy_fault(
    error: apsw.Error, source: Path, target: Path, shown: Path
) -> CorruptStore | EnvironmentFault | ConflictError:
    """Copying reads one file and writes another: which of the two has failed? `shown` is how the latter is called."""
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return CorruptStore(f"{source} is damaged or is no SQLite database: {error}", remedy=_OTHER_BACKUP)
    if getattr(error, "extendedresult", 0) in (apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ):
        return EnvironmentFault(f"cannot read {source}: {error}", remedy="check the disk that it is on")
    return _told(translate(error, target), target, shown)


def _told(fault: Exception, hidden: Path, shown: Path) -> EnvironmentFault:
    """The fault of a file whose name only this module knows, by the name that the caller has given."""
    return EnvironmentFault(str(fault).replace(str(hidden), str(shown)), remedy=_ELSEWHERE)


def _copy_checked(file: Path, target: Path, shown: Path) -> None:
    """Copy the database of a backup and check it: whose it is, of which version, and that it is whole."""
    try:
        _copy_whole(file, target, shown)
    except CorruptStore:
        _check_source(file.parent, file)  # somebody who has begun to use it meanwhile looks like damage
        raise


def _copy_whole(file: Path, target: Path, shown: Path) -> None:
    with closing(_read_only(file)) as source:
        try:
            application = source.execute("PRAGMA application_id").fetchone()
            version = source.execute("PRAGMA user_version").fetchone()
        except apsw.Error as error:
            raise _copy_fault(error, file, target, shown) from error
        if application is None or application[0] != migrate.APPLICATION_ID:
            raise IncompatibleVersion(f"{file} is the database of another program", remedy=_OTHER_BACKUP)
        migrate.refuse_newer(int(version[0]) if version else 0, file)
        with closing(_new_file(target, shown)) as copy:
            try:
                _copy_pages(source, copy)
                found = copy.execute("PRAGMA integrity_check").fetchone()
            except apsw.Error as error:
                raise _copy_fault(error, file, target, shown) from error
    if found is None or found[0] != "ok":
        raise CorruptStore(f"{file} is damaged: {found and found[0]}", remedy=_OTHER_BACKUP)


def _read_only(file: Path) -> apsw.Connection:
    """Open a file that nobody else writes, without making anything beside it."""
    try:
        return open_immutable(file)
    except apsw.Error as error:
        raise EnvironmentFault(f"cannot read {file}: {error}", remedy="let this user read it") from error


def _look_into(temporary: Path, shown: Path) -> tuple[int, int, list[tuple[str, int]]]:
    """(runs, those of them that have not ended, blobs) of a copied database, of whatever version it is."""
    try:
        with closing(_read_only(temporary)) as connection:
            ended, runs = all_rows(connection.execute("SELECT COUNT(ended_at), COUNT(*) FROM runs"))[0]
            known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'artifact_blobs'").fetchone()
            rows = all_rows(connection.execute("SELECT digest, size_bytes FROM artifact_blobs")) if known else []
    except apsw.Error as error:
        raise _told(translate(error, temporary), temporary, shown) from error
    return runs, runs - ended, rows


def _settle(database: Path, clock: Clock) -> tuple[int, int, list[tuple[str, int]]]:
    """Make the copied database one that can stand alone: (settled attempts, runs, its blobs)."""
    with closing(Store(database, clock)) as copy:
        settled = _bury_everybody(copy)
        _forget_unneeded(copy)
        with copy.database.read() as tx:
            runs = tx.execute("SELECT COUNT(*) FROM runs").fetchone()
            rows = all_rows(tx.execute("SELECT digest, size_bytes FROM artifact_blobs ORDER BY digest"))
    for beside in database.parent.glob(NAME + ".*"):
        # Gate and locks of the copy; they are made again where it is opened.
        shutil.rmtree(beside) if beside.is_dir() else beside.unlink()
    log = database.with_name(NAME + "-wal")
    if log.exists() and log.stat().st_size:
        # SQLite says nothing when it cannot bring its log home at the end.
        raise EnvironmentFault(f"{database} could not be written whole")
    return settled, int(runs[0]) if runs else 0, rows


def _bury_everybody(copy: Store) -> int:
    """Settle what was held when the snapshot was taken; the number of attempts.

    Identities are recorded as those of this boot, and their processes may live: nobody looks for them, from here or
    later, since their rows say that they are dead.
    """
    claims = [(claim.attempt_id, claim.delivery) for claim in copy.claims()]
    dead = [row.process_id for row in copy.live_processes()]
    outcomes = copy.rescue(claims, dead=dead, why="the backup was taken", actor=ACTOR)
    with copy.database.write(durable=True) as tx:
        tx.execute(
            "UPDATE runs SET driver = NULL, driver_lease_expires_at = NULL "
            "WHERE driver IS NOT NULL AND ended_at IS NULL"
        )
    return len(outcomes)


# -- blobs -------------------------------------------------------------------------------------------------------------


@contextmanager
def _no_collection(blobs: Blobs) -> Iterator[None]:
    if not blobs.is_ours():
        # What is made from now on is not in the snapshot, or is too young for any collection that begins meanwhile.
        yield
        return
    with blobs.locked(".collect.lock"):
        yield


def _forget_unneeded(copy: Store) -> None:
    """A backup does not carry what the next collection would remove."""
    now = copy.clock.now()
    with copy.database.write(durable=True) as tx:
        forget_leases(tx, now=now)
        tx.execute(f"DELETE FROM artifact_blobs AS b WHERE NOT ({PROTECTED})", (now,))  # noqa: S608


def _copy_blobs(rows: list[tuple[str, int]], source: Blobs, target: Blobs, shown: Path) -> tuple[int, int]:
    """Bring blobs into a folder that is not there yet for anybody else; verified and durable."""
    for digest, _ in rows:
        place = target.path_of(digest)
        with _writing(shown):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(place, flags, 0o400), "wb") as file:
                try:
                    sound = source.copy_out(digest, file.fileno())
                except FileNotFoundError:
                    sound = False
                os.fsync(file.fileno())
        if not sound:
            raise CorruptStore(
                f"the stored bytes of {digest} in {source.root} are missing or damaged",
                remedy="`agentctl artifacts verify` shows all such; run again the tasks that made them",
            )
    if rows:
        for folder in (target.root, target.root / "sha256"):
            folder.chmod(0o700)
    return len(rows), sum(size for _, size in rows)


def _restore_blobs(rows: list[tuple[str, int]], source: Blobs, target: Blobs) -> tuple[int, int]:
    """Bring the blobs of a backup to their places, once all of them are there and sound."""
    staged: list[Staged] = []
    try:
        with _writing(target.root):
            for digest, size in rows:
                if _is_there(target, digest, size):
                    continue
                try:
                    staged.append(target.stage_blob(source, digest))
                    sound = staged[-1].digest == digest
                except FileNotFoundError:
                    sound = False
                if not sound:
                    raise CorruptStore(
                        f"the bytes of {digest} in the backup {source.root.parent} are missing or damaged",
                        remedy=_OTHER_BACKUP,
                    )
            if staged:
                with target.locked():
                    for item in staged:
                        target.place(item)
    finally:
        target.discard_own()
    return len(rows), sum(size for _, size in rows)


def _is_there(target: Blobs, digest: str, size: int) -> bool:
    try:
        return target.check(digest, size) == "ok"
    except OSError as error:
        path = target.path_of(digest)
        raise EnvironmentFault(f"cannot read {path}: {error.strerror}", remedy="let this user read it") from error


# -- folders -----------------------------------------------------------------------------------------------------------


@contextmanager
def _new_folder(partial: Path, destination: Path) -> Iterator[None]:
    """The folder `partial`, which gets its name when the block has ended well. Who calls it removes it otherwise."""
    with _writing(destination):
        partial.mkdir(mode=0o700)
    yield
    with _writing(destination):
        os.rename(partial, destination)
        sync_folder(destination.parent)


def _remove_leftovers(folder: Path, ending: str) -> None:
    """Remove unfinished copies of processes that are provably dead, never those of a living one."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        name, found, rest = path.name.removeprefix(_UNFINISHED).partition(ending)
        if not found or rest not in ("", *COMPANIONS) or writer_liveness(name) is not Liveness.DEAD:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _unlink(temporary: Path) -> None:
    for companion in ("", *COMPANIONS):
        temporary.with_name(temporary.name + companion).unlink(missing_ok=True)


def _ancestors(database: Path) -> list[Path]:
    """The folders above a database, innermost first."""
    return [database.parent, *database.parent.parents]


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """What fails in this block is the writing of `place`. Reading has its own errors (see `Blobs.pieces`)."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = _ELSEWHERE if full else "give this user write permission there, or choose another place"
        raise EnvironmentFault(f"cannot write {place}: {error.strerror}", remedy=remedy) from error


@contextmanager
def _named(partial: Path, destination: Path) -> Iterator[None]:
    """Faults of what is below `partial` are told as those of `destination`."""
    try:
        with _writing(destination):
            yield
    except EnvironmentFault as fault:
        raise _told(fault, partial, destination) from fault


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            with open(Path(place, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(place))
