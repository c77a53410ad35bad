"""`builtin.read` and `builtin.write`: text files of at most 1 MiB (contract 3, 11.2, 11.3).

What is checked before the effect exists may have been changed by the time it is dispatched, so both check
again then, on descriptors: a read verifies where its open file really is, a write walks down from its
writable root without following any symbolic link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, Final

from agentctl.store.errors import TaskFault
from agentctl.store.policy import is_inside, readable, refuse_dotdot, writable

from . import Done, EffectContext, EffectOutcome, EffectPlan, Work, Written, refuse_cancelled
from .artifacts import logical_path
from .paths import (
    io_fault,
    path_field,
    refuse_database,
    refuse_file_of_database,
    refuse_place_of_database,
    resolve_readable,
    workspace_of,
    writable_roots_of,
)

MAX_TEXT_BYTES: Final = 1_048_576
PREDICTABILITY: Final = "fully_predictable"
DIFF_WORK_LIMIT: Final = 4_000_000
"""Product of the differing line counts above which a diff becomes one replaced block: the exact one could
take minutes."""

_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


# -- read ------------------------------------------------------------------------------------------


def prepare_read(work: Work) -> EffectPlan | Done:
    """`builtin.read`: `path` under the workspace; output `{status, changed, content}`."""
    path = path_field(work.input, "path")
    workspace = workspace_of(work)
    resolved = resolve_readable(path, workspace)
    if work.foreseen is not None:
        return Done({"status": "unchanged", "changed": False, "content": work.foreseen, "foreseen": True})
    refuse_file_of_database(path, _require_regular(path, resolved))
    return EffectPlan(
        operation="builtin.read",
        effect_class="observe",
        risk="low",
        idempotency="idempotent",
        policy_name="filesystem.read",
        input={"path": path},
        expected_effect={"path": path, "changed": False},
        estimate={},
        execute=partial(_read, path, resolved, workspace),
    )


def _read(path: str, resolved: str, workspace: str, context: EffectContext) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    try:
        content = read_text(path, resolved, workspace)
    except TaskFault as fault:
        return EffectOutcome.failed(fault)
    return EffectOutcome("succeeded", {"status": "unchanged", "changed": False, "content": content})


def read_text(path: str, resolved: str, workspace: str | None = None) -> str:
    """The text of a regular file; `path` is its name in messages.

    With `workspace`, the file that was really opened must lie under it. Raises `TaskFault`: `policy_denied`,
    `not_found`, `invalid_input` (no regular file), `too_large`, `not_utf8`, `io_error`.
    """
    refuse_database(path, resolved)
    try:
        descriptor = os.open(resolved, _READ_FLAGS)
        try:
            _require_kind(path, os.fstat(descriptor))
            if workspace is not None and not readable(os.readlink(f"/proc/self/fd/{descriptor}"), workspace):
                raise TaskFault("policy_denied", f"{path!r} is outside the workspace", details={"path": path})
            parts: list[bytes] = []
            size = 0
            while part := os.read(descriptor, MAX_TEXT_BYTES + 1 - size):
                parts.append(part)
                size += len(part)
                if size > MAX_TEXT_BYTES:
                    raise _too_large(path)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP and workspace is not None:
            # What was a file when it was resolved is a link now: it may lead anywhere.
            raise TaskFault("policy_denied", f"{path!r} has become a link", details={"path": path}) from error
        raise io_fault(path, error) from error
    try:
        return b"".join(parts).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskFault(
            "not_utf8",
            f"{path!r} is not UTF-8 (byte {error.start})",
            details={"path": path, "offset": error.start},
        ) from error


def _require_regular(path: str, resolved: str) -> os.stat_result:
    try:
        found = os.stat(resolved)
    except OSError as error:
        raise io_fault(path, error) from error
    _require_kind(path, found)
    return found


def _require_kind(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "no regular file"
        raise TaskFault("invalid_input", f"{path!r} is {kind}", details={"path": path})


def _too_large(path: str) -> TaskFault:
    return TaskFault(
        "too_large",
        f"{path!r} has more than {MAX_TEXT_BYTES} bytes",
        details={"path": path, "limitBytes": MAX_TEXT_BYTES},
    )


# -- write -----------------------------------------------------------------------------------------


def prepare_write(work: Work) -> EffectPlan | Done:
    """`builtin.write`: the whole text of `path`, which lies under a writable root.

    `before` and `after` of the output are the texts (null: there was no file), `diff` is a unified diff if
    the run was started with `--diff`, else null: a diff that only a person is to see stands in `expectedEffect`
    alone. When an earlier delivery requested the effect, `before`, `changed` and `diff` are what it saw.
    """
    path, content, data = _asked(work)
    workspace = workspace_of(work)
    roots = writable_roots_of(work, workspace)
    _, resolved = _resolve_writable(path, workspace, roots)
    expected = dict(work.recorded) if work.recorded is not None else _foresee(path, resolved, content, work)
    output = _write_output(path, content, expected, with_diff=work.record_diff)
    if work.recorded is None and not output["changed"] and not work.force_effect:
        return Done(output)
    return EffectPlan(
        operation="builtin.write",
        effect_class="workspace_mutate",
        risk="medium",
        idempotency="idempotent",
        policy_name="filesystem.write",
        input={"path": path, "contentDigest": sha256(data).hexdigest()},
        expected_effect=expected,
        estimate={},
        # The roots as they are now: one that is swapped for a link later leads nowhere else.
        execute=partial(_write, path, data, workspace, roots, output),
        foreseen=output,
        keeps=Written(logical_path(resolved, workspace), data),
    )


def kept_by_write(work: Work) -> Written:
    """What is kept of a write that has succeeded, whatever lies in its place by now. Raises as `prepare_write`."""
    path, _, data = _asked(work)
    workspace = workspace_of(work)
    _, resolved = _resolve_writable(path, workspace, writable_roots_of(work, workspace))
    return Written(logical_path(resolved, workspace), data)


def _asked(work: Work) -> tuple[str, str, bytes]:
    """(path, content, its bytes) of a write, checked."""
    path = path_field(work.input, "path")
    content = work.input.get("content")
    if not isinstance(content, str):
        raise TaskFault("invalid_input", "'content' must be a text")
    try:
        data = content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskFault("invalid_input", "'content' contains a lone surrogate, which UTF-8 cannot carry") from error
    if len(data) > MAX_TEXT_BYTES:
        raise TaskFault(
            "too_large",
            f"'content' has more than {MAX_TEXT_BYTES} bytes",
            details={"limitBytes": MAX_TEXT_BYTES},
        )
    return path, content, data


def _resolve_writable(path: str, workspace: str, roots: tuple[str, ...]) -> tuple[str, str]:
    """(writable root, target), both resolved: the root that the target is under. Raises `policy_denied`, and
    `invalid_input` for a root."""
    refuse_dotdot(path)
    resolved = os.path.realpath(os.path.join(workspace, path))
    if not writable(resolved, roots):
        raise TaskFault("policy_denied", f"{path!r} is not under a writable root", details={"path": path})
    root = max((root for root in roots if is_inside(resolved, root)), key=len)
    if root == resolved:
        raise TaskFault("invalid_input", f"{path!r} is a writable root, not a file in it", details={"path": path})
    refuse_place_of_database(path, resolved)
    return root, resolved


def _foresee(path: str, resolved: str, content: str, work: Work) -> dict[str, Any]:
    before = work.foreseen
    if before is None and os.path.lexists(resolved):
        _require_regular(path, resolved)
        before = read_text(path, resolved)
    changed = before != content
    wanted = changed and (work.show_diff or work.record_diff)
    diff = unified_diff(path, before, content) if wanted else None
    return {"path": path, "before": before, "changed": changed, "diff": diff}


def _write_output(path: str, content: str, expected: Mapping[str, Any], *, with_diff: bool) -> dict[str, Any]:
    changed = bool(expected.get("changed", True))
    return {
        "status": "changed" if changed else "unchanged",
        "changed": changed,
        "before": expected.get("before"),
        "after": content,
        "diff": expected.get("diff") if with_diff else None,
        "path": path,
        "predictability": PREDICTABILITY,
    }


def _write(
    path: str, data: bytes, workspace: str, roots: tuple[str, ...], output: dict[str, Any], context: EffectContext
) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    try:
        root, resolved = _resolve_writable(path, workspace, roots)
        _replace(path, root, resolved, data, f".agentctl-{context.effect_id}.tmp")
    except TaskFault as fault:
        return EffectOutcome.failed(fault)
    except OSError as error:
        return EffectOutcome.failed(io_fault(path, error))
    return EffectOutcome("succeeded", output)


def _replace(path: str, root: str, resolved: str, data: bytes, temporary: str) -> None:
    """Put `data` in place of the file `resolved` under `root`: all of it or nothing, and durable on
    return."""
    os.makedirs(root, exist_ok=True)
    *parents, name = os.path.relpath(resolved, root).split("/")
    folder = _open_root(path, root)
    try:
        for parent in parents:
            inner = _enter(path, folder, parent)
            os.close(folder)
            folder = inner
        _replace_in(path, folder, name, data, temporary)
    finally:
        os.close(folder)


def _open_root(path: str, root: str) -> int:
    descriptor = os.open(root, _FOLDER_FLAGS)
    # Opening follows links in the upper folders; the root is where it was when it was resolved, or nothing
    # is written.
    if os.readlink(f"/proc/self/fd/{descriptor}") != root:
        os.close(descriptor)
        raise _moved(path)
    return descriptor


def _enter(path: str, folder: int, name: str) -> int:
    """Open a folder below `folder`, creating it durably, never through a symbolic link."""
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        pass
    else:
        os.fsync(folder)
    try:
        return os.open(name, _FOLDER_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _moved(path) from error
        raise


def _moved(path: str) -> TaskFault:
    return TaskFault(
        "policy_denied",
        f"a folder on the way to {path!r} is no folder under a writable root",
        details={"path": path},
    )


def _replace_in(path: str, folder: int, name: str, data: bytes, temporary: str) -> None:
    existing = _existing(path, folder, name)
    # Only a dead dispatch of the same effect can have left it: the name carries the effect's id.
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            if existing is not None:
                _keep_owner_and_mode(descriptor, existing)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        # Renaming replaces a link that came into being meanwhile; it does not follow it.
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def _existing(path: str, folder: int, name: str) -> os.stat_result | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        raise _moved(path)
    _require_kind(path, found)
    return found


def _keep_owner_and_mode(descriptor: int, existing: os.stat_result) -> None:
    ours = os.fstat(descriptor)
    if (ours.st_uid, ours.st_gid) != (existing.st_uid, existing.st_gid):
        with suppress(PermissionError):
            os.fchown(descriptor, existing.st_uid, existing.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(existing.st_mode))


# -- diff ------------------------------------------------------------------------------------------


def unified_diff(path: str, before: str | None, after: str) -> str:
    """A unified diff of two texts with three lines of context, as `diff -u` prints it (contract row 15).

    `before` None means that there was no file. Texts that differ in very many lines give one replaced block.
    """
    old, new = _lines(before or ""), _lines(after)
    head = _common(old, new)
    tail = _common(old[head:][::-1], new[head:][::-1])
    if (len(old) - head - tail) * (len(new) - head - tail) > DIFF_WORK_LIMIT:
        hunks = _one_block(old, new, head, tail)
    else:
        from difflib import unified_diff as difflib_diff

        hunks = list(difflib_diff(old, new))[2:]
    heads = ["--- /dev/null\n" if before is None else f"--- a/{path}\n", f"+++ b/{path}\n"]
    return "".join(heads + [_ended(line) for line in hunks])


def _lines(text: str) -> list[str]:
    """Lines with their line feed. Only a line feed ends a line; `str.splitlines` knows many more ends."""
    lines = [line + "\n" for line in text.split("\n")]
    last = lines.pop()[:-1]
    return lines if not last else [*lines, last]


def _ended(line: str) -> str:
    return line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"


def _common(old: list[str], new: list[str]) -> int:
    count = 0
    for left, right in zip(old, new, strict=False):
        if left != right:
            break
        count += 1
    return count


def _one_block(old: list[str], new: list[str], head: int, tail: int) -> list[str]:
    start = max(0, head - 3)
    old_end, new_end = len(old) - tail, len(new) - tail
    after = old[old_end : old_end + 3]
    old_range = f"{start + 1},{old_end - start + len(after)}"
    new_range = f"{start + 1},{new_end - start + len(after)}"
    return [
        f"@@ -{old_range} +{new_range} @@\n",
        *(" " + line for line in old[start:head]),
        *("-" + line for line in old[head:old_end]),
        *("+" + line for line in new[head:new_end]),
        *(" " + line for line in after),
    ]
