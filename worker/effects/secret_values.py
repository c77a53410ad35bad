"""Secret references, resolved at the last moment (contract 1.9 and 11.2).

A value goes into the environment of one process, or into the header of a request, and nowhere else. What is recorded is
its digest and a description of its source. Every value that was read is known to `worker.redaction` from then on: what
this process records and logs is cleaned of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from agentctl.store.errors import TaskFault
from agentctl.store.policy import (
    Policy,
    environment_allowed,
    is_inside,
    refuse_dotdot,
    secret_process_allowed,
)

from ..redaction import Redactor, known
from . import process
from .paths import refuse_database

MAX_SECRET_BYTES: Final = 65536
ALLOW: Final = "allow it under policy:"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A value and where it came from (`env:NAME`, `file:PATH`, `process:COMMAND`). It never shows in a
    repr."""

    source: str
    value: bytes

    def describe(self) -> dict[str, str]:
        """What an effect's input records (contract 3): a bare hex digest, never the value."""
        return {"source": self.source, "valueDigest": sha256(self.value).hexdigest()}

    def as_header(self) -> str:
        """The value for the header of a request. Raises `secret_unavailable` for one that HTTP cannot carry."""
        if not self.value:
            raise TaskFault("secret_unavailable", f"the secret {self.source} is empty")
        text = self.value.decode("latin-1")
        if not text.isascii() or not text.isprintable():
            message = f"the secret {self.source} has characters that an HTTP header cannot carry"
            raise TaskFault("secret_unavailable", message)
        return text


def resolve_secret(reference: Mapping[str, Any], policy: Policy, workspace: str) -> Secret:
    """Read what a secret reference points to. Raises `policy_denied` or `secret_unavailable`."""
    kind, value = _source(reference)
    require_permitted(reference, policy, workspace)
    if kind == "env":
        return from_variable(str(value))
    if kind == "file":
        return _from_file(str(value), _resolved(str(value), workspace))
    return _from_process(value, workspace)


def as_texts(policy: Policy, workspace: str) -> Callable[[Mapping[str, Any]], str]:
    """What resolves secrets for a provider of models, as text. The function raises what `resolve_secret` raises."""
    return lambda reference: resolve_secret(reference, policy, workspace).value.decode("utf-8", "replace")


def require_permitted(reference: Mapping[str, Any], policy: Policy, workspace: str) -> None:
    """Raise `policy_denied` when the policy does not let a reference be read (contract 11.2). Reads nothing."""
    kind, value = _source(reference)
    if kind == "env":
        require_variable(policy, str(value))
    elif kind == "file":
        path = str(value)
        refuse_dotdot(path)
        resolved = _resolved(path, workspace)
        roots = [os.path.realpath(os.path.join(workspace, root)) for root in policy.secret_file_roots]
        if not any(is_inside(resolved, root) for root in roots):
            message = f"the secret file {path!r} is not under policy.secretFileRoots"
            raise _denied(message, f"secretFileRoots: [{os.path.dirname(path) or '.'}]")
    elif not secret_process_allowed(policy, command := str(value.get("command", ""))):
        message = f"{command!r} is not in policy.secretProcessAllowlist"
        raise _denied(message, f"secretProcessAllowlist: [{os.path.basename(command)}]")


def require_variable(policy: Policy, name: str) -> None:
    """Raise `policy_denied` when the policy does not let a command be given a variable of this name."""
    if not environment_allowed(policy, name):
        raise _denied(f"the variable {name} is not in policy.environmentAllowlist", f"environmentAllowlist: [{name}]")


def _denied(message: str, entry: str) -> TaskFault:
    """`entry` is the line that would have to stand under `policy`."""
    return TaskFault("policy_denied", message, details={"remediation": f"{ALLOW} {entry}"})


def _source(reference: Mapping[str, Any]) -> tuple[str, Any]:
    """The one field of a reference that is set; the other two may be there and be null."""
    for kind in ("env", "file", "process"):
        value = reference.get(kind)
        if isinstance(value, Mapping if kind == "process" else str):
            return kind, value
    raise TaskFault("invalid_input", "a secret reference has one of env, file and process")


def _resolved(path: str, workspace: str) -> str:
    return os.path.realpath(os.path.join(workspace, path))


def from_variable(name: str) -> Secret:
    """The value of an environment variable, whose use the caller has seen to. Raises `secret_unavailable`."""
    value = os.environb.get(os.fsencode(name))
    if value is None:
        raise _unavailable(f"env:{name}", "the variable is not set in the environment of this process")
    return _checked(f"env:{name}", value)


def _from_file(path: str, resolved: str) -> Secret:
    source = f"file:{path}"
    refuse_database(path, resolved)
    try:
        descriptor = os.open(resolved, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unavailable(source, "it is no regular file")
            value = os.read(descriptor, MAX_SECRET_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unavailable(source, error.strerror or str(error)) from error
    return _checked(source, _without_newline(value))


def _from_process(spec: Mapping[str, Any], workspace: str) -> Secret:
    command = str(spec.get("command", ""))
    source = f"process:{command}"
    executable = process.resolve(command)
    if executable is None:
        raise _unavailable(source, "there is no such program")
    limit = int(spec.get("outputLimitBytes", 16384))
    # A helper that fetches a secret needs to know whose it is; it gets nothing else of this worker's
    # environment.
    environment = {name: value for name in (b"HOME", b"USER", b"PATH") if (value := os.environb.get(name)) is not None}
    result = process.run(
        process.Command(
            executable=executable,
            argv=[os.fsencode(command), *(str(arg).encode() for arg in spec.get("args", ()))],
            environment=environment,
            cwd=workspace,
            timeout_seconds=float(spec.get("timeoutSeconds", 5)),
            stdout_limit=limit,
            stderr_limit=limit,
            combined_limit=2 * limit,
            grace_seconds=0.5,
        )
    )
    if result.ending is not process.Ending.EXITED or result.exit_code != 0:
        raise _unavailable(source, f"the program ended with {result.ending} {result.exit_code}")
    return _checked(source, _without_newline(result.stdout))


def _without_newline(value: bytes) -> bytes:
    return value.removesuffix(b"\n").removesuffix(b"\r")


def _checked(source: str, value: bytes) -> Secret:
    if len(value) > MAX_SECRET_BYTES:
        raise _unavailable(source, f"it has more than {MAX_SECRET_BYTES} bytes")
    if b"\0" in value:
        raise _unavailable(source, "it contains a zero byte")
    known.learn(value)
    return Secret(source, value)


def _unavailable(source: str, why: str) -> TaskFault:
    return TaskFault("secret_unavailable", f"the secret {source} cannot be read: {why}", details={"source": source})


def redact(data: bytes, secrets: list[bytes]) -> bytes:
    """`data` with each secret value, in all its forms, replaced by `[REDACTED]`."""
    return Redactor(secrets).bytes(data)
