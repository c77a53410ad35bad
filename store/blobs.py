"""The files of the artifact store: bytes under the name of their digest, in a folder beside the database.

    artifacts/sha256/<2 hex>/<64 hex>   blobs, read-only, never changed
    artifacts/tmp/                      files that a process is writing; each name tells which process
    artifacts/trash/                    blobs that a collection has taken away and not yet deleted
    artifacts/.lock                     whoever links, moves or removes a blob holds it (architecture 6 and 7)
    artifacts/.collect.lock             collections, and backups that need every blob to stay
    artifacts/.database                 the name of the database beside it that the blobs belong to

No SQL in here; `artifacts` joins files and rows. Bytes are copied and hashed in pieces, so memory does not grow with
them, and always before the lock is taken. Everything stays inside the folder: no other filesystem, no TMPDIR.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from . import process_identity
from .clock import Clock
from .errors import EnvironmentFault, LockHeld, TaskFault
from .filesystem import ARTIFACTS, give_to_owner, nearest_existing, sync_folder
from .gate import flock_holder
from .process_identity import Liveness, ProcessIdentity

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Bytes that are read, hashed and written at once."""

PREFIX = "sha256:"
LOCK_PATIENCE_SECONDS = 60.0
LOCK_NOTICE_SECONDS = 5.0
LOCK_POLL_SECONDS = 0.005

_STOPS = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_numbers = itertools.count(1)


SYNC_BYTES = 128 << 20
"""After so many bytes a copy is synced: one sync of all of it at the end might take minutes without a sign of life."""


class Interrupted(Exception):
    """Somebody wants the writer to stop; nothing was kept."""


def never() -> bool:
    """Nobody asks to stop."""
    return False


@dataclass(frozen=True, slots=True)
class Staged:
    """Bytes that are complete and durable in `tmp/`, and not yet in their place.

    `damaged` is the inode of a blob of this digest that does not hold these bytes any more, or None.
    """

    path: Path
    digest: str
    size: int
    damaged: int | None = None


class Blobs:
    """The folder of one database. Holds nothing open; any thread and any process may have its own."""

    def __init__(self, database: Path, clock: Clock) -> None:
        self.root = database.absolute().with_name(ARTIFACTS)
        self._database = database.name
        self._file = database
        self._owner = self.root / ".database"
        self._clock = clock
        self._shelves = self.root / "sha256"
        self._tmp = self.root / "tmp"
        self._trash = self.root / "trash"
        self._made = False

    # -- the folder ------------------------------------------------------------------------------------------------

    def require_writable(self) -> None:
        """Raise `EnvironmentFault` unless blobs can be stored here; looks only, and creates nothing."""
        for folder in (self.root, self._tmp, self._shelves, self._trash):
            place = nearest_existing(folder)
            if not place.is_dir():
                raise EnvironmentFault(
                    f"{place} is not a folder", remedy="artifacts are kept in it: move the file away"
                )
            if not os.access(place, os.W_OK | os.X_OK):
                raise EnvironmentFault(
                    f"artifacts cannot be stored: no permission to write in {place} {_mode(place)}",
                    remedy="give this user write permission there, or mount it writable",
                )
        self._require_owner()

    def is_ours(self) -> bool:
        """Whether there is a folder, and no other database that still exists has it."""
        return self.root.is_dir() and self._other_owner() is None

    def _noted_owner(self) -> str | None:
        """The name of the database whose folder this is, if it was written down."""
        try:
            return self._owner.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_fault(self._owner, error) from error

    def _other_owner(self) -> str | None:
        owner = self._noted_owner()
        if owner is None or owner == self._database or "/" in owner:
            return None
        return owner if self.root.with_name(owner).is_file() else None

    def _require_owner(self) -> None:
        """Raise `EnvironmentFault` when the folder belongs to another database that is still there.

        To each of two databases the blobs of the other would be strays without a row, and a collection removes those.
        """
        owner = self._other_owner()
        if owner is not None:
            raise EnvironmentFault(
                f"{self.root} belongs to the database {owner}: {self._database} cannot keep its artifacts there",
                remedy="keep each database in a folder of its own",
            )

    def _take(self) -> None:
        """Write down whose folder this is; the caller holds a lock. One whose database is gone is taken over."""
        if self._noted_owner() == self._database:
            return
        self._require_owner()
        note = self._tmp / f"{writer_name()}.{next(_numbers)}"
        # On a full disk a collection has to go on all the same; whoever stores something there writes it later.
        with suppress(OSError):
            try:
                note.write_text(self._database, encoding="utf-8")
                self._give(note)
                os.replace(note, self._owner)
                sync_folder(self.root)
            finally:
                self.discard(note)

    def folders(self) -> tuple[Path, ...]:
        """The folders that a store of blobs has, innermost first."""
        return (self._trash, self._tmp, self._shelves, self.root)

    def _give(self, made: Path | int) -> None:
        """See `give_to_owner`; what is gone again belongs to nobody."""
        with suppress(FileNotFoundError):
            give_to_owner(made, self._file)

    def _make(self) -> None:
        if self._made:
            return
        for folder in (self.root, self._shelves, self._tmp, self._trash):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                self._give(folder)
                sync_folder(folder.parent)
        self._require_owner()
        self._made = True

    @contextmanager
    def locked(self, name: str = ".lock", *, patient: bool = True) -> Iterator[None]:
        """Hold one of the two locks. Raises `LockHeld`, which names the holder when it stays taken for a minute, or
        at once without patience, and `EnvironmentFault` where the folder cannot be written.

        Terminal stops wait meanwhile: who is stopped with the lock would stop everybody.
        """
        from filelock import FileLock, Timeout

        path = self.root / name
        try:
            self._make()
        except OSError as error:
            raise store_fault(path, error) from error
        lock = FileLock(path, mode=0o600, poll_interval=LOCK_POLL_SECONDS)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            try:
                lock.acquire(timeout=LOCK_NOTICE_SECONDS if patient else 0)
            except Timeout:
                if not patient:
                    raise LockHeld(f"{self._holder(path)} {path}") from None
                log.warning("waiting for %s, which %s", path, self._holder(path))
                try:
                    lock.acquire(timeout=LOCK_PATIENCE_SECONDS - LOCK_NOTICE_SECONDS)
                except Timeout:
                    raise LockHeld(
                        f"{path} stayed locked for {LOCK_PATIENCE_SECONDS:.0f} s; {self._holder(path)}",
                        remedy="wait for that process, or end it if it hangs",
                    ) from None
            except OSError as error:
                raise store_fault(path, error) from error
            try:
                self._give(path)
                self._take()
                yield
            finally:
                lock.release()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _holder(self, path: Path) -> str:
        """Who holds a lock, for people."""
        try:
            pid = flock_holder(os.stat(path))
            found = None if pid is None else process_identity.read_stat(pid)
        except OSError:
            found = None
        if found is None:
            return "somebody holds whom this process cannot see"
        started = datetime.fromtimestamp(self._clock.now() / 1000 - found.age_seconds()).isoformat(" ", "seconds")
        return f"process {found.pid} ({found.name}, started {started}) holds"

    def path_of(self, digest: str) -> Path:
        """Where the blob of a digest is, or would be."""
        return self.root / store_path(digest)

    # -- ingestion -------------------------------------------------------------------------------------------------

    def stage_bytes(self, data: bytes) -> Staged:
        """Write `data` to a file of this process. Raises OSError."""
        return self._stage(lambda: iter((memoryview(data),)))

    def stage_blob(self, source: Blobs, digest: str) -> Staged:
        """Copy a blob of another folder; the digest of what came says whether it was sound.

        Raises FileNotFoundError, `EnvironmentFault` when it cannot be read, and OSError when it cannot be written.
        """
        return self._stage(lambda: source.pieces(digest))

    def stage_file(self, descriptor: int, size: int, stopped: Callable[[], bool]) -> Staged:
        """Copy `size` bytes of an open file, hashing them on the way.

        Raises OSError, `Interrupted` as soon as `stopped()`, and `TaskFault` (`artifact_changed`) when the file has
        more or fewer bytes: somebody is still writing it.
        """
        return self._stage(lambda: _pieces_of(descriptor, size, stopped), stopped)

    def _stage(self, pieces: Callable[[], Iterator[memoryview]], stopped: Callable[[], bool] = never) -> Staged:
        self._make()
        path = self._tmp / f"{writer_name()}.{next(_numbers)}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                hasher, size, synced = sha256(), 0, 0
                for piece in pieces():
                    hasher.update(piece)
                    size += len(piece)
                    while piece:
                        piece = piece[os.write(descriptor, piece) :]
                    if size - synced >= SYNC_BYTES:
                        os.fdatasync(descriptor)
                        synced = size
                self._give(descriptor)
                os.fchmod(descriptor, 0o400)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            digest = PREFIX + hasher.hexdigest()
            return Staged(path, digest, size, self._damaged(digest, size, stopped))
        except BaseException:
            self.discard(path)
            raise

    def _damaged(self, digest: str, size: int, stopped: Callable[[], bool]) -> int | None:
        """The inode of a blob that is there already and does not hold what its name says."""
        try:
            found = os.lstat(self.path_of(digest)).st_ino
        except FileNotFoundError:
            return None
        return None if self._check(self.path_of(digest), digest, size, stopped) == "ok" else found

    @staticmethod
    def discard(path: Path) -> None:
        """Remove a staged file, if it is still there."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def discard_own(self) -> None:
        """Remove every file of this process in `tmp/`, also one whose writer was interrupted before it knew its name.

        For a process that stages in one thread only and is done with it.
        """
        for entry in _scan(self._tmp):
            if entry.name.partition(".")[0] == writer_name():
                self.discard(Path(entry.path))

    def place(self, staged: Staged) -> None:
        """Give staged bytes their name, durably. The caller holds the lock and writes the row before it lets go.

        A blob that is there already is kept, since it was verified, and replaced if it is damaged.
        """
        target = self.path_of(staged.digest)
        with suppress(FileExistsError):
            target.parent.mkdir(mode=0o700)
            self._give(target.parent)
            sync_folder(self._shelves)
        try:
            os.link(staged.path, target)
        except FileExistsError:
            found = os.lstat(target)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "a folder is in the place of a blob", str(target)) from None
            if found.st_ino == staged.damaged or not stat.S_ISREG(found.st_mode) or found.st_size != staged.size:
                os.replace(staged.path, target)
        sync_folder(target.parent)
        self.discard(staged.path)

    # -- reading ---------------------------------------------------------------------------------------------------

    def present(self, digest: str, size: int) -> bool:
        """Whether a blob is there with its size; a look that does not read it."""
        try:
            found = os.lstat(self.path_of(digest))
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == size

    def check(self, digest: str, size: int | None) -> str:
        """`ok`, `missing`, `corrupt` or `unreadable` (permission, disk): the blob's bytes are read and hashed."""
        return self._check(self.path_of(digest), digest, size)

    def check_anywhere(self, digest: str, size: int | None) -> str:
        """As `check`, also where a collection may have put it."""
        state = self.check(digest, size)
        return self._check(self._trash / digest.removeprefix(PREFIX), digest, size) if state == "missing" else state

    def lies_about(self, digest: str) -> bool:
        """Whether anything of that name is in its place or in the trash, or cannot be looked at."""
        for place in (self.path_of(digest), self._trash / digest.removeprefix(PREFIX)):
            try:
                os.lstat(place)
            except FileNotFoundError:
                continue
            except OSError:
                return True
            return True
        return False

    @staticmethod
    def _check(path: Path, digest: str, size: int | None, stopped: Callable[[], bool] = never) -> str:
        try:
            descriptor = os.open(path, _READ)
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return "corrupt" if error.errno == errno.ELOOP else "unreadable"
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or (size is not None and found.st_size != size):
                return "corrupt"
            hasher = sha256()
            for piece in _pieces_of(descriptor, None, stopped):
                hasher.update(piece)
        except OSError:
            return "unreadable"
        finally:
            os.close(descriptor)
        return "ok" if PREFIX + hasher.hexdigest() == digest else "corrupt"

    def copy_out(self, digest: str, target: int) -> bool:
        """Copy a blob into an open file and say whether the bytes are those of its name.

        Raises FileNotFoundError, `EnvironmentFault` when the blob cannot be read, and OSError when the file cannot be
        written.
        """
        hasher = sha256()
        for piece in self.pieces(digest):
            hasher.update(piece)
            while piece:
                piece = piece[os.write(target, piece) :]
        return PREFIX + hasher.hexdigest() == digest

    def pieces(self, digest: str) -> Iterator[memoryview]:
        """The bytes of a blob, always in the same buffer.

        Raises FileNotFoundError, also for a name that leads elsewhere, and `EnvironmentFault`: what fails here is the
        reading, whatever the caller does with the bytes.
        """
        path = self.path_of(digest)
        try:
            descriptor = os.open(path, _READ)
        except OSError as error:
            raise _unreadable(path, error) from error
        try:
            found = _pieces_of(descriptor, None, lambda: False)
            while True:
                try:
                    piece = next(found, None)
                except OSError as error:
                    raise _unreadable(path, error) from error
                if piece is None:
                    return
                yield piece
        finally:
            os.close(descriptor)

    def stored(self) -> Iterator[tuple[str, os.stat_result]]:
        """(digest, status) of every blob file."""
        for shelf in _scan(self._shelves):
            if len(shelf.name) == 2 and shelf.is_dir(follow_symlinks=False):
                for entry in _scan(shelf):
                    if _is_hex(entry.name) and entry.name[:2] == shelf.name:
                        with suppress(FileNotFoundError):
                            yield PREFIX + entry.name, entry.stat(follow_symlinks=False)

    # -- removal and recovery --------------------------------------------------------------------------------------

    def quarantine(self, digest: str) -> bool:
        """Move a blob to the trash; False when there is none. The caller holds the lock."""
        try:
            os.rename(self.path_of(digest), self._trash / digest.removeprefix(PREFIX))
        except FileNotFoundError:
            return False
        return True

    def restore(self, digest: str) -> None:
        """Bring a blob back from the trash, unless its place was taken meanwhile. The caller holds the lock."""
        trashed = self._trash / digest.removeprefix(PREFIX)
        target = self.path_of(digest)
        with suppress(FileExistsError):
            target.parent.mkdir(mode=0o700)
        try:
            os.link(trashed, target)
            sync_folder(target.parent)
        except FileExistsError:
            pass
        except FileNotFoundError:
            return
        os.unlink(trashed)

    def purge(self, digest: str) -> None:
        """Delete a blob that is in the trash."""
        self.discard(self._trash / digest.removeprefix(PREFIX))

    def trashed(self) -> list[str]:
        """Digests of what is in the trash."""
        return [PREFIX + entry.name for entry in _scan(self._trash) if _is_hex(entry.name)]

    def temporary(self) -> list[tuple[Path, Liveness, os.stat_result]]:
        """Every file in `tmp/`, and in `trash/` what is no blob, with what is known of its writer; a name that tells
        of none is `unknown`."""
        found = []
        strange = (entry for entry in _scan(self._trash) if not _is_hex(entry.name))
        for entry in itertools.chain(_scan(self._tmp), strange):
            with suppress(FileNotFoundError):
                found.append((Path(entry.path), writer_liveness(entry.name), entry.stat(follow_symlinks=False)))
        return found

    def needs_care(self) -> bool:
        """Whether `tmp/` or `trash/` hold anything; two looks, no lock."""
        return any(True for _ in _scan(self._tmp)) or any(True for _ in _scan(self._trash))

    def remove_leftovers(self) -> int:
        """Remove files of writers that are provably dead, never those of a living one (contract table, row 31)."""
        removed = 0
        for path, liveness, _ in self.temporary():
            if liveness is Liveness.DEAD:
                self.discard(path)
                removed += 1
        return removed


def store_fault(place: Path, error: OSError) -> EnvironmentFault:
    """What a failed write in the artifact folder means to a person; `place` unless the error names one."""
    where = error.filename2 or error.filename or place
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space"
    elif error.errno == errno.EROFS:
        remedy = "it is mounted read-only: mount it writable"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "give this user write permission in the folder of artifacts and everything in it"
    else:
        remedy = "check the folder of artifacts and its disk"
    return EnvironmentFault(f"cannot write the artifact store at {where}: {error.strerror}", remedy=remedy)


def store_path(digest: str) -> str:
    """The place of a blob below the folder, as manifests name it."""
    name = digest.removeprefix(PREFIX)
    return f"sha256/{name[:2]}/{name}"


def write_atomically(target: Path, fill: Callable[[int], None], *, overwrite: bool) -> None:
    """Make a file whose name appears only when `fill(descriptor)` has returned and its bytes are durable.

    The file has no name before that where the filesystem can do so, so that a death leaves nothing behind. Raises
    FileExistsError without `overwrite`; whatever `fill` raises leaves everything as it was.
    """
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temporary = f".{target.name}.agentctl-{os.getpid()}.tmp"
        # Whoever left one under our number is dead; in a container every process may have the same one.
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        try:
            descriptor, named = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor, named = os.open(temporary, flags, 0o666, dir_fd=folder), True
        try:
            fill(descriptor)
            os.fsync(descriptor)
            source = temporary if named else f"/proc/self/fd/{descriptor}"
            try:
                os.link(source, target.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=not named)
            except FileExistsError:
                if not overwrite:
                    raise
                if not named:
                    # Only a name can take the place of another; this one is there for a moment, with all its bytes.
                    os.link(source, temporary, src_dir_fd=folder, dst_dir_fd=folder)
                    named = True
                os.rename(temporary, target.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        finally:
            os.close(descriptor)
            if named:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
    finally:
        os.close(folder)


def _pieces_of(descriptor: int, size: int | None, stopped: Callable[[], bool]) -> Iterator[memoryview]:
    """The bytes of an open file, always in the same buffer; with `size`, exactly so many."""
    buffer = memoryview(bytearray(PIECE if size is None else max(1, min(PIECE, size))))
    done = 0
    while count := os.readv(descriptor, [buffer]):
        done += count
        if stopped():
            raise Interrupted
        if size is not None and done > size:
            break
        yield buffer[:count]
    if size is not None and done != size:
        raise TaskFault("artifact_changed", f"a file of {size} bytes changed its size while it was being stored")


def _unreadable(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return FileNotFoundError(errno.ENOENT, "there is no such blob", str(path))
    return EnvironmentFault(
        f"cannot read {path}: {error.strerror}", remedy="let this user read it, and check the disk that it is on"
    )


def writer_name() -> str:
    """This process, as the beginning of the name of a file that only it writes."""
    return process_identity.current().as_text().replace(" ", "_")


def writer_liveness(name: str) -> Liveness:
    """What is known of the process whose `writer_name` a name begins with, up to a dot."""
    writer = name.partition(".")[0].split("_")
    if len(writer) != 4 or not all(part.isascii() and part.isdigit() for part in writer[1:]):
        return Liveness.UNKNOWN
    return process_identity.liveness(ProcessIdentity(writer[0], int(writer[1]), int(writer[2]), int(writer[3])))


def _is_hex(name: str) -> bool:
    return len(name) == 64 and all(letter in "0123456789abcdef" for letter in name)


def _scan(folder: Path | os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return


def _mode(path: Path) -> str:
    """Why a folder cannot be written, as far as it shows: its mode, or that it is mounted read-only."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "(mounted read-only)"
    return f"(mode {stat.S_IMODE(path.stat().st_mode):04o})"
