"""Where a task's paths lead: symbolic links resolved here, rules asked of `store.policy`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agentctl.store.errors import TaskFault
from agentctl.store.filesystem import belongs_to_open_database, is_place_of_open_database
from agentctl.store.policy import readable, refuse_dotdot

from . import Work


def workspace_of(work: Work) -> str:
    """The resolved workspace root of a piece of work."""
    if work.workspace is not None:
        return work.workspace
    return os.path.realpath(os.path.join(work.base_path, work.policy.workspace_root))


def writable_roots_of(work: Work, workspace: str) -> tuple[str, ...]:
    """The resolved writable roots of a piece of work."""
    return tuple(os.path.realpath(os.path.join(workspace, root)) for root in work.policy.writable_roots)


def path_field(data: Mapping[str, Any], name: str) -> str:
    """A path out of rendered input. Raises `invalid_input` for anything but a non-empty text without zero
    bytes."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise TaskFault("invalid_input", f"{name!r} must be a non-empty text")
    checked_text(value, name)
    return value


def checked_text(value: str, name: str) -> str:
    """`value` itself if the system can carry it in a path, an argument or a variable, else
    `invalid_input`."""
    if "\0" in value:
        raise TaskFault("invalid_input", f"{name!r} contains a zero byte")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskFault("invalid_input", f"{name!r} contains a lone surrogate, which UTF-8 cannot carry") from error
    return value


def resolve_readable(path: str, workspace: str) -> str:
    """The resolved form of a path that may be read (contract 11.2). Raises `policy_denied`."""
    refuse_dotdot(path)
    resolved = real_path(os.path.join(workspace, path))
    if not readable(resolved, workspace):
        raise TaskFault("policy_denied", f"{path!r} is outside the workspace", details={"path": path})
    return resolved


def real_path(path: str) -> str:
    """`os.path.realpath`, answered by the kernel if `path` exists: to ask about one folder after the other took a
    twentieth of a worker's time.

    A descriptor that was opened as a path only reads nothing, waits for nothing, and drops no lock when it is closed.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return os.path.realpath(path)
    try:
        found = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)
    finally:
        os.close(descriptor)
    if not found.startswith("/") or found.endswith(" (deleted)"):
        return os.path.realpath(path)
    return found


def refuse_database(path: str, place: str) -> None:
    """Raise `policy_denied` when `place`, `path` in messages, is a file of the database of this worker. To be asked
    before it is opened: to close it again would drop the locks of SQLite."""
    try:
        refuse_file_of_database(path, os.stat(place))
    except OSError:
        return  # whoever opens it says why it cannot be


def refuse_file_of_database(path: str, status: os.stat_result) -> None:
    """The same for a file that was looked at already."""
    if belongs_to_open_database(status):
        raise TaskFault(
            "policy_denied",
            f"{path!r} is a file of the database of this run, which nothing but SQLite may open",
            details={"path": path},
        )


def refuse_place_of_database(path: str, resolved: str) -> None:
    """Raise `policy_denied` when `resolved`, `path` in messages, is where something of the database of this worker
    stands or may come to stand: its gate and other locks, its sockets, its artifacts."""
    if is_place_of_open_database(resolved):
        raise TaskFault(
            "policy_denied",
            f"{path!r} belongs to the database of this run, which nothing else may write",
            details={"path": path},
        )


def io_fault(path: str, error: OSError) -> TaskFault:
    """A failed file operation as a fault, `not_found` or `io_error`. A retry policy may try both again: what is missing
    may come (contract 4.2)."""
    if isinstance(error, FileNotFoundError):
        return TaskFault("not_found", f"{path!r} does not exist", retryable=True, details={"path": path})
    return TaskFault(
        "io_error",
        f"{path!r}: {error.strerror or error}",
        retryable=True,
        details={"path": path, "errno": error.errno},
    )
