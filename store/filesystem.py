"""Where a database may live: a local filesystem, in a folder that is ours and private; and which ones are open here.

A WAL database needs shared memory and locks between processes, which network filesystems do not give reliably
(architecture 6, field report 13). The check reads the mount table only: nothing is created or opened before it passes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from .errors import EnvironmentFault

LOCAL = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "ubifs", "nilfs2"),
        *("tmpfs", "ramfs", "overlay", "overlayfs", "aufs"),
        *("vfat", "exfat", "ntfs", "ntfs3", "fuseblk", "apfs", "hfs", "ufs"),
    }
)
NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb", "smb3", "smbfs", "9p", "v9fs", "afs", "ncpfs", "coda", "ocfs2", "davfs"),
        *("ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs", "virtiofs", "vboxsf", "sshfs"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.davfs2"),
    }
)
OVERRIDE = "AGENTCTL_FILESYSTEM_TYPE"
COMPANIONS = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a database: what these names add to that of the database."""
BESIDE = (*COMPANIONS, ".gate", ".gate-line", ".migrate.lock", ".wake")
"""The same for everything that stands beside a database and belongs to it, but its artifacts."""
ARTIFACTS = "artifacts"
IN_ARTIFACTS = ("sha256", "tmp", "trash", ".lock", ".collect.lock", ".database")
"""The folder of artifacts beside a database, and what in it belongs to it (see `blobs`)."""
WHOLE = 3
"""How many files a database has in use: itself, its log, and its shared memory."""
FEW_PAGES = 1 << 16
_GIVEN = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_ONLY = "mount it writable, or choose another place with --db PATH or AGENTCTL_DB"


def filesystem_type(path: Path) -> str:
    """The type of the filesystem that holds `path` or, if it does not exist yet, its nearest existing parent.

    `AGENTCTL_FILESYSTEM_TYPE` states the type by hand, for a filesystem that this program does not know; the statement
    is recorded in the database.
    """
    stated = os.environ.get(OVERRIDE)
    if stated:
        return stated
    existing = nearest_existing(path)
    try:
        device = os.stat(existing).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        best: tuple[int, str] | None = None
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
            for line in table:
                fields = line.split(" ")
                mount_point = _unescape(fields[4])
                kind = fields[fields.index("-") + 1]
                inside = str(existing) == mount_point or str(existing).startswith(mount_point.rstrip("/") + "/")
                if inside or fields[2] == wanted:
                    # The longest mount point above the path wins; a bind mount may show it only by its device.
                    rank = len(mount_point) if inside else 0
                    if best is None or rank >= best[0]:
                        best = (rank, kind)
    except (OSError, ValueError):
        return "unknown"
    return best[1] if best else "unknown"


def _unescape(text: str) -> str:
    """Mount points spell blanks and backslashes as three octal digits."""
    if "\\" not in text:
        return text
    parts = text.split("\\")
    return parts[0] + "".join(chr(int(part[:3], 8)) + part[3:] for part in parts[1:])


def nearest_existing(path: Path) -> Path:
    """`path` itself, or the nearest of its parents that exists; symbolic links are followed."""
    current = path.absolute()
    while not current.exists() and current != current.parent:
        current = current.parent
    return current.resolve()


def require_local(path: Path) -> None:
    """Raise `EnvironmentFault` unless the database's folder can be reached and is on a filesystem known to be local."""
    require_reachable(path)
    kind = filesystem_type(path)
    if kind in LOCAL:
        return
    if kind in NETWORK:
        what = f"{path} is on a network filesystem ({kind}), where SQLite cannot keep a database safe"
    else:
        what = f"{path} is on a filesystem of unknown type ({kind}), so its locks cannot be trusted"
    raise EnvironmentFault(
        what,
        remedy="put the database on a local disk with --db PATH or AGENTCTL_DB; if the disk is local all the same, "
        f"state its type with {OVERRIDE}=ext4",
    )


def require_reachable(path: Path) -> None:
    """Raise `EnvironmentFault` that names the folder on the way to `path` which this user may not enter."""
    try:
        os.stat(path)
    except PermissionError as error:
        # From the top: what lies in a folder that is closed cannot be asked about.
        way = reversed(path.absolute().parents)
        closed = next((folder for folder in way if not os.access(folder, os.X_OK)), path.parent)
        raise EnvironmentFault(
            f"no permission to enter the folder {closed}", remedy="run as the user who owns it, or use --db PATH"
        ) from error
    except OSError:
        return


def prepare_folder(folder: Path) -> None:
    """Create `folder` with mode 0700 if it is missing, and make sure that we can write in it.

    A new folder is durable when this returns: a database in a folder that a power cut takes away would be lost.
    """
    existing = nearest_existing(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for made in (folder, *folder.parents):
            if made.resolve() == existing:
                break
            sync_folder(made.parent)
    except FileExistsError as error:
        raise EnvironmentFault(f"{folder} is not a folder", remedy="choose another place with --db PATH") from error
    except OSError as error:
        raise EnvironmentFault(
            f"cannot create the folder {folder}: {error.strerror}",
            remedy=_READ_ONLY if error.errno == errno.EROFS else "choose another place with --db PATH",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        if is_read_only(folder):
            raise EnvironmentFault(f"{folder} is on a filesystem that is mounted read-only", remedy=_READ_ONLY)
        raise EnvironmentFault(
            f"no permission to write in {folder}", remedy="give this user write permission, or use --db PATH"
        )


def require_writable(path: Path) -> None:
    """Raise `EnvironmentFault` unless the database at `path`, or its folder while it is missing, can be written."""
    folder = path.parent
    exists = path.exists()
    open_folder = os.access(folder, os.W_OK | os.X_OK)
    if open_folder and (not exists or os.access(path, os.R_OK | os.W_OK)):
        return
    if is_read_only(folder):
        raise EnvironmentFault(f"{path} is on a filesystem that is mounted read-only", remedy=_READ_ONLY)
    # SQLite makes files beside the database, so the folder matters as much as the file.
    what = f"read and write {path}" if open_folder else f"write in the folder {folder}"
    raise EnvironmentFault(
        f"no permission to {what}", remedy="run as the user who owns it, or choose another place with --db PATH"
    )


def is_read_only(path: Path) -> bool:
    """Whether the filesystem of an existing path takes no writes from anybody."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def is_full(path: Path) -> bool:
    """Whether the filesystem of an existing path has no room for even a few pages of a database."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < FEW_PAGES


def give_to_owner(made: Path | int, database: Path) -> None:
    """What root makes beside the database of another user belongs to that user, as with SQLite and its log: one
    `sudo agentctl` would lock its owner out for good. While there is no database, the owner of its folder counts: root
    restores, and a service of that user is to go on with it.

    `made` is an open file or a path. What has another name already, or another owner than root, is left alone.
    """
    if os.geteuid() != 0:
        return
    try:
        owner = os.stat(database)
    except FileNotFoundError:
        owner = os.stat(database.parent)
    if owner.st_uid == 0:
        return
    descriptor = os.open(made, _GIVEN) if isinstance(made, Path) else made
    try:
        found = os.fstat(descriptor)
        if found.st_uid == 0 and (found.st_nlink == 1 or stat.S_ISDIR(found.st_mode)):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        if descriptor is not made:
            os.close(descriptor)


def make_for_owner(database: Path) -> None:
    """Make the empty file of a new database, where it would belong to root in the folder of another user.

    SQLite makes it otherwise; once that has it open, nobody may open it beside (its locks would be gone).
    """
    if os.geteuid() != 0 or (owner := os.stat(database.parent)).st_uid == 0:
        return
    with contextlib.suppress(OSError):  # somebody was faster, or SQLite will find and say what is wrong
        descriptor = os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- databases that are open in this process ---------------------------------------------------------------------------

_open_here: dict[str, int] = {}
_files_of: dict[str, frozenset[tuple[int, int]]] = {}
"""Path of a database to device and inode of its files: they stay the same as long as a connection is open."""


def note_opened(path: str) -> None:
    """A connection to the database at this real path was opened in this process."""
    _open_here[path] = _open_here.get(path, 0) + 1
    _files_of.pop(path, None)


def note_closed(path: str) -> None:
    """The same connection is about to be closed."""
    _open_here[path] -= 1
    _files_of.pop(path, None)


def is_open_here(path: str) -> bool:
    """Whether this process has a connection to the database at this real path."""
    return _open_here.get(path, 0) > 0


def belongs_to_open_database(status: os.stat_result) -> bool:
    """Whether a file, under whatever name it was found, is one that SQLite has open in this process.

    Nobody else may open it here: whoever closes it again drops all locks that this process has on it, and others then
    take the database for one that nobody uses.
    """
    identity = (status.st_dev, status.st_ino)
    return any(count > 0 and identity in _identities(path) for path, count in list(_open_here.items()))


def is_place_of_open_database(place: str) -> bool:
    """Whether a resolved path is, or lies in, what belongs to a database that is open here; nothing need be there yet.

    A file of another content under one of these names would take its lock, its log or its artifacts from everybody who
    works on the database. Folders are compared by what they are: a mount shows them under other names.
    """
    mine: dict[tuple[int, int], set[str]] = {}
    for path in [path for path, count in list(_open_here.items()) if count > 0]:
        folder, name = os.path.split(path)
        names = {name, *(name + ending for ending in BESIDE)}
        for held, inner in ((folder, names), (os.path.join(folder, ARTIFACTS), set(IN_ARTIFACTS))):
            if (identity := _identity(held)) is not None:
                mine.setdefault(identity, set()).update(inner)
    while mine:
        folder, name = os.path.split(place)
        if folder == place:
            break
        if (identity := _identity(folder)) is not None and name in mine.get(identity, ()):
            return True
        place = folder
    return False


def _identity(place: str) -> tuple[int, int] | None:
    try:
        status = os.stat(place)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identities(path: str) -> frozenset[tuple[int, int]]:
    """Device and inode of each file of a database that is open here."""
    known = _files_of.get(path)
    if known is not None:
        return known
    found = set()
    for companion in ("", *COMPANIONS):
        if (identity := _identity(path + companion)) is not None:
            found.add(identity)
    if len(found) >= WHOLE:
        _files_of[path] = frozenset(found)
    return frozenset(found)
