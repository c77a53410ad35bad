"""Which files become artifacts, and opening them safely (contract 8 and row 11).

Choices that the contract leaves open:

- **Patterns** are relative to the workspace, or absolute. One without `*`, `?` or `[` names a file that must be there;
  a glob may match nothing, and what is there under its very name is what it means. `**` matches folders of any depth;
  names that begin with a dot are matched only by patterns that say so.
- **What counts**: regular files whose resolved place is under a writable root. Folders that a glob matches are passed
  over; anything else, a symbolic link say, fails the task instead of being left out in silence. So does a folder under
  a writable root that cannot be looked into.
- **Logical path**: below the workspace relative to it, else absolute. It has to be UTF-8 without control characters.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from glob import has_magic
from typing import Final
from unicodedata import category

from agentctl.store.errors import TaskFault
from agentctl.store.policy import is_inside, writable
from agentctl.store.records import SourceFile

from . import Declared
from .paths import io_fault, refuse_database

MAX_ARTIFACTS: Final = 10_000
"""Most artifacts of one task."""

_DEEP: Final = "**"
CONTROLS: Final = ("Cc", "Zl", "Zp")
"""Control characters and separators of lines. Blanks of other scripts and joined signs stand in names of files."""

_NOTHING_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is to be kept. `place` is where it is, its last component not resolved; time in nanoseconds."""

    path: str
    place: str
    size: int
    modified: int
    inode: int


def find(declared: Declared) -> list[Found]:
    """The files of a declaration, each once, by logical path. Raises `TaskFault`.

    `artifact_missing`, `artifact_refused` (a link, no regular file, a name that cannot be recorded), `policy_denied`
    (outside of the writable roots), `artifact_limit` (too many), `io_error`.
    """
    found: dict[str, Found] = {}
    for pattern in declared.patterns:
        for place in _matches(pattern, declared):
            item = _examine(place, declared, required=not has_magic(pattern))
            if item is not None:
                found[item.path] = item
            if len(found) > MAX_ARTIFACTS:
                raise TaskFault(
                    "artifact_limit",
                    f"more than {MAX_ARTIFACTS} files match the artifacts of this task",
                    details={"pattern": pattern, "limit": MAX_ARTIFACTS},
                )
    return [found[path] for path in sorted(found)]


def refuse_out_of_reach(declared: Declared) -> None:
    """Raise `policy_denied` for a pattern that can name nothing under a writable root, before its command runs.

    Of a name its folder is resolved, of a glob the folders before its first wildcard: it may begin above a root. Links
    that the command makes are not foreseen; what is found at last is looked at again (`find`).
    """
    for pattern in declared.patterns:
        whole = os.path.join(declared.workspace, pattern)
        if has_magic(pattern):
            wildcard = next(index for index, letter in enumerate(pattern) if letter in "*?[")
            place = os.path.realpath(os.path.join(declared.workspace, os.path.dirname(pattern[:wildcard])))
            reachable = writable(place, declared.roots) or any(is_inside(root, place) for root in declared.roots)
        else:
            folder = os.path.realpath(os.path.dirname(whole))
            reachable = writable(os.path.join(folder, os.path.basename(whole)), declared.roots)
        if not reachable:
            raise TaskFault(
                "policy_denied",
                f"the artifact {pattern!r} is not under a writable root; name its folder in policy.writableRoots",
                details={"path": pattern},
            )


def _matches(pattern: str, declared: Declared) -> Iterator[str]:
    whole = os.path.join(declared.workspace, pattern)
    if not has_magic(pattern) or os.path.lexists(whole):
        yield whole  # `report [1].pdf` is a name as well, and where there is such a file it is the one that is meant
        return
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if pattern.endswith("/"):
        parts.append("")  # folders alone
    yield from _below("/" if pattern.startswith("/") else declared.workspace, parts, declared)


def _below(folder: str, parts: list[str], declared: Declared) -> Iterator[str]:
    """What the parts of a pattern match below a folder, whose own name means itself."""
    part, rest = parts[0], parts[1:]
    if part == _DEEP:
        for place in _folders(folder, declared):
            yield from _below(place, rest or ["*"], declared)
    elif not has_magic(part):
        place = os.path.join(folder, part)
        if rest:
            yield from _below(place, rest, declared)
        elif _status(place, declared) is not None:
            yield place
    else:
        names = [entry.name for entry in _entries(folder, declared) or ()]
        for name in fnmatch.filter((name for name in names if part[0] == "." or name[0] != "."), part):
            place = os.path.join(folder, name)
            if rest:
                yield from _below(place, rest, declared)
            else:
                yield place


def _folders(top: str, declared: Declared) -> Iterator[str]:
    """A folder and those below it, without hidden ones. Links are followed, and each folder comes once: two links that
    lead upwards would make more paths than anybody can walk."""
    seen: set[tuple[int, int]] = set()
    pending = [top]
    while pending:
        place = pending.pop()
        status = _status(place, declared, follow=True)
        if status is None or (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        entries = _entries(place, declared)
        if entries is None:
            continue
        pending += [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        yield place


def _entries(folder: str, declared: Declared) -> list[os.DirEntry[str]] | None:
    """What is in a folder; None for what is none, or is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        _pass_over(folder, declared, error)
        return None


def _status(place: str, declared: Declared, *, follow: bool = False) -> os.stat_result | None:
    try:
        return os.stat(place, follow_symlinks=follow)
    except OSError as error:
        _pass_over(place, declared, error)
        return None


def _pass_over(place: str, declared: Declared, error: OSError) -> None:
    """Return if nothing that is wanted can be at a place. Raise `io_error` if it is under a writable root and cannot be
    looked at (it is closed to us, the disk has a fault): nobody would notice what is left out."""
    if error.errno in _NOTHING_THERE:
        return
    resolved = os.path.realpath(place)
    if writable(resolved, declared.roots):
        raise io_fault(logical_path(resolved, declared.workspace), error) from error


def _examine(place: str, declared: Declared, *, required: bool) -> Found | None:
    folder = os.path.realpath(os.path.dirname(place))
    resolved = os.path.join(folder, os.path.basename(place))
    path = logical_path(resolved, declared.workspace)
    if not writable(resolved, declared.roots):
        raise TaskFault("policy_denied", f"{path!r} is not under a writable root", details={"path": path})
    try:
        status = os.lstat(resolved)
    except FileNotFoundError as error:
        if not required:
            return None  # it went between the look into its folder and this one
        raise TaskFault(
            "artifact_missing", f"the command did not leave {path!r}, which it declares", details={"path": path}
        ) from error
    except OSError as error:
        raise io_fault(path, error) from error
    if stat.S_ISDIR(status.st_mode) and not required:
        return None
    _require_regular(path, status)
    return Found(path, resolved, status.st_size, status.st_mtime_ns, status.st_ino)


def _require_regular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}.get(stat.S_IFMT(status.st_mode))
        raise TaskFault(
            "artifact_refused",
            f"{path!r} is {kind or 'no regular file'}; only regular files become artifacts",
            details={"path": path},
        )


def logical_path(resolved: str, workspace: str) -> str:
    """The name under which a file is recorded. Raises `artifact_refused` for one that no record can carry."""
    path = os.path.relpath(resolved, workspace) if is_inside(resolved, workspace) else resolved
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskFault("artifact_refused", f"the file name {path!a} is not UTF-8, which cannot be recorded") from error
    if not path.isprintable() and any(category(letter) in CONTROLS for letter in path):
        raise TaskFault("artifact_refused", f"the file name {path!a} has control characters")
    return path


def as_recorded(source: SourceFile, declared: Declared) -> Found:
    """A file that an earlier delivery has found: it is that one, as it was, or `open_found` refuses it."""
    place = os.path.join(declared.workspace, source.path)
    return Found(source.path, place, source.size_bytes, source.modified_ns, source.inode)


def open_found(item: Found, declared: Declared) -> int:
    """Open a file that was found, and make sure that it is that file, unmoved and unchanged. Raises `TaskFault`."""
    refuse_database(item.path, item.place)
    try:
        descriptor = os.open(item.place, _FLAGS)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _changed(item, "it is gone") from error
        if error.errno == errno.ELOOP:
            raise TaskFault("artifact_refused", f"{item.path!r} has become a symbolic link") from error
        raise io_fault(item.path, error) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(item.path, status)
        require_unchanged(item, status)
        if not writable(os.readlink(f"/proc/self/fd/{descriptor}"), declared.roots):
            raise TaskFault("policy_denied", f"{item.path!r} is not under a writable root any more")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_unchanged(item: Found, status: os.stat_result) -> None:
    """Raise `artifact_changed` unless an open file is the one that was found, with its size and its last change."""
    if status.st_size != item.size:
        raise _changed(item, f"{status.st_size} bytes instead of {item.size}")
    if status.st_ino != item.inode:
        raise _changed(item, "it is another file")
    if status.st_mtime_ns != item.modified:
        raise _changed(item, "it was written to")


def _changed(item: Found, how: str) -> TaskFault:
    return TaskFault(
        "artifact_changed",
        f"{item.path!r} has changed since the command ended ({how}), so what it left cannot be kept any more; "
        "run the task again in a new run, and let nothing else write there meanwhile",
        details={"path": item.path},
    )
