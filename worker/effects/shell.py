"""`builtin.shell.exec`: one program, direct argv, no shell (contract 3, 11.2, and row 11).

Choices that the contract leaves open:

- **Environment**: cleared; then `PATH` with the fixed value `CHILD_PATH` (a constant, so nothing of the
  worker's environment gets in), the action's `env` (secrets), the task's `with.env` (plain text, wins), and
  the effect's marker `AGENTCTL_EFFECT_ID`, which nobody else may set. `PATH` itself may be declared like
  any other name.
- **Command**: one with a slash is taken as it stands, relative to the process's working folder; any other
  is looked up in the `PATH` of the worker. The allowlist compares its basename.
- **Arguments and variables** from `with` may be texts, numbers or booleans; the latter two are given as
  their JSON text.
- **Output that is not UTF-8**: `stdout` (or `stderr`) holds the text with U+FFFD in place of bad bytes, and
  `stdoutBase64` (`stderrBase64`) every byte as it was printed. The second key exists in that case only.
- **`parse: json`**: strict (`store.canonical.parse_json`). Bad JSON: the effect failed with
  `output_not_json`, not retried.
- **Failures**: a non-zero exit is `process_exit` and retryable; so is an overflow (contract row 9: a
  definitive failure). A process that a signal ended has exit code null and the signal's name.
- **Artifacts** (`artifacts` of the action, or of the task's `with`, which replaces it: a fan-out needs its item in
  them): stored after success, see `effects.artifacts`.
- **Timeout**: the smaller of the action's `timeoutSeconds` and that of the attempt. Timeout and cancel after
  the start: uncertain.
"""

from __future__ import annotations

import json
import os
import signal
import stat
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Final

from agentctl.store.canonical import JsonError, parse_json
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy, environment_allowed, process_allowed, refuse_dotdot
from agentctl.store.process_identity import EFFECT_MARKER, HOLDER_MARKER

from . import Declared, EffectContext, EffectOutcome, EffectPlan, Work, process, refuse_cancelled
from .artifacts import refuse_out_of_reach
from .paths import checked_text, io_fault, resolve_readable, workspace_of, writable_roots_of
from .process import Command, Ending, ProcessResult

CHILD_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
DEFAULT_STREAM_LIMIT: Final = 1 << 20
DEFAULT_COMBINED_LIMIT: Final = 2 << 20
PREFIX_BYTES: Final = 4096
TAIL_BYTES: Final = 8192
WITHHELD: Final = "[withheld: the process was given secrets]"

_MARKER: Final = EFFECT_MARKER.encode()
_HOLDER: Final = HOLDER_MARKER.encode()


@dataclass(frozen=True, slots=True, repr=False)
class _Launch:
    """All that a dispatch needs. Kept out of every repr and record: the environment may hold secrets."""

    command: str
    argv: list[bytes]
    environment: dict[bytes, bytes]
    secrets: list[bytes]
    cwd: str
    stdin: bytes | None
    limits: dict[str, int]
    timeout_seconds: float
    success_exit_codes: frozenset[int]
    parse_json: bool


def prepare_shell(work: Work) -> EffectPlan:
    """Check command, arguments, environment and working folder. Raises `policy_denied`, `invalid_input`,
    `not_found`."""
    action, given = work.action, work.input
    _refuse_unsupported(action)
    command = checked_text(_text(action.get("command"), "command"), "command")
    require_program(work.policy, command)
    arguments = arguments_of(given["args"] if given.get("args") is not None else action.get("args") or [])
    workspace = workspace_of(work)
    folder, cwd = working_folder(given.get("cwd") or action.get("cwd"), workspace)
    stdin = _stdin(given.get("stdin"))
    environment, recorded, secrets = environment_of(work, workspace)
    limits = limits_of(action)
    timeout = min(action.get("timeoutSeconds") or work.timeout_seconds, work.timeout_seconds)
    effect_input: dict[str, Any] = {
        "command": command,
        "args": arguments,
        "cwd": folder,
        "environment": recorded,
        "limits": {**limits, "timeoutSeconds": timeout},
        "isolation": "process",
        "container": None,
        "containerBackend": None,
    }
    if stdin is not None:
        effect_input["stdinDigest"] = sha256(stdin).hexdigest()
    keeps = kept_by_command(work)
    expected: dict[str, Any] = {"command": command, "args": arguments, "cwd": folder}
    if keeps is not None:
        effect_input["artifacts"] = expected["artifacts"] = list(keeps.patterns)
    launch = _Launch(
        command=command,
        argv=[command.encode(), *(argument.encode() for argument in arguments)],
        environment=environment,
        secrets=secrets,
        cwd=cwd,
        stdin=stdin,
        limits=limits,
        timeout_seconds=float(timeout),
        success_exit_codes=frozenset(action.get("successExitCodes") or (0,)),
        parse_json=action.get("parse") == "json",
    )
    return EffectPlan(
        operation="builtin.shell.exec",
        effect_class="process_execution",
        risk="high",
        idempotency=action.get("idempotency") or "unknown",
        policy_name="process.exec",
        input=effect_input,
        expected_effect=expected,
        estimate={"processOutputBytes": limits["combinedOutputLimitBytes"]},
        execute=partial(_execute, launch),
        keeps=keeps,
    )


# -- checks ----------------------------------------------------------------------------------------


def require_program(policy: Policy, command: str) -> None:
    """Raise `policy_denied` when the policy does not let a command be started."""
    if not process_allowed(policy, command):
        name = os.path.basename(command)
        message = f"the program {name!r} is not in policy.processAllowlist"
        raise TaskFault("policy_denied", message, details={"command": command})


def limits_of(action: Mapping[str, Any]) -> dict[str, int]:
    """The limits of what a process may print, in bytes, as they are recorded."""
    return {
        "stdoutLimitBytes": action.get("stdoutLimitBytes") or DEFAULT_STREAM_LIMIT,
        "stderrLimitBytes": action.get("stderrLimitBytes") or DEFAULT_STREAM_LIMIT,
        "combinedOutputLimitBytes": action.get("combinedOutputLimitBytes") or DEFAULT_COMBINED_LIMIT,
    }


def _refuse_unsupported(action: Mapping[str, Any]) -> None:
    if action.get("isolation") not in (None, "process"):
        raise TaskFault("unsupported_capability", f"isolation {action['isolation']!r} is not supported")
    if action.get("parse") not in (None, "json"):
        raise TaskFault("invalid_input", f"'parse' must be 'json', not {action['parse']!r}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise TaskFault("invalid_input", f"{name!r} must be a non-empty text")
    return value


def _scalar(value: Any, name: str) -> str:
    if isinstance(value, str):
        return checked_text(value, name)
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise TaskFault("invalid_input", f"{name!r} must be a text, a number or a boolean")


def arguments_of(value: Any) -> list[str]:
    """The arguments of a command as texts. Raises `invalid_input`."""
    if not isinstance(value, list):
        raise TaskFault("invalid_input", "'args' must be a list")
    return [_scalar(item, f"args[{index}]") for index, item in enumerate(value)]


def kept_by_command(work: Work) -> Declared | None:
    """The paths and globs of `artifacts`: of the task's `with` if it gives any, else of the action."""
    value, workspace = work.input.get("artifacts", work.action.get("artifacts")), workspace_of(work)
    if not value:
        return None
    if not isinstance(value, list):
        raise TaskFault("invalid_input", "'artifacts' must be a list")
    patterns = []
    for index, item in enumerate(value):
        pattern = checked_text(_text(item, f"artifacts[{index}]"), f"artifacts[{index}]")
        refuse_dotdot(pattern)
        patterns.append(pattern)
    roots = writable_roots_of(work, workspace)
    if not roots:
        raise TaskFault("policy_denied", "artifacts come from under policy.writableRoots, and there are none")
    declared = Declared(tuple(patterns), workspace, roots)
    refuse_out_of_reach(declared)
    return declared


def _stdin(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TaskFault("invalid_input", "'stdin' must be a text")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TaskFault("invalid_input", "'stdin' contains a lone surrogate, which UTF-8 cannot carry") from error


def working_folder(value: Any, workspace: str) -> tuple[str, str]:
    """(as declared, resolved): a folder inside the workspace, by default the workspace itself."""
    if value is None:
        return ".", workspace
    folder = checked_text(_text(value, "cwd"), "cwd")
    resolved = resolve_readable(folder, workspace)
    try:
        mode = os.stat(resolved).st_mode
    except OSError as error:
        raise io_fault(folder, error) from error
    if not stat.S_ISDIR(mode):
        raise TaskFault("invalid_input", f"'cwd' {folder!r} is no folder", details={"path": folder})
    return folder, resolved


def environment_of(work: Work, workspace: str) -> tuple[dict[bytes, bytes], dict[str, Any], list[bytes]]:
    """(variables of the process, what is recorded of them, secret values). Only allowlisted names (contract
    11.2)."""
    variables = {b"PATH": CHILD_PATH.encode()}
    recorded: dict[str, Any] = {}
    secrets: list[bytes] = []
    plain = work.input.get("env") or {}
    if not isinstance(plain, dict):
        raise TaskFault("invalid_input", "'env' must map names to texts")
    references = work.action.get("env") or {}
    for name in (*references, *plain):
        _check_name(work, name)
    for name, reference in references.items():
        if name in plain:
            continue
        from .secret_values import resolve_secret

        secret = resolve_secret(reference, work.policy, workspace)
        variables[name.encode()] = secret.value
        recorded[name] = secret.describe()
        secrets.append(secret.value)
    for name, item in plain.items():
        value = _scalar(item, f"env.{name}").encode()
        variables[name.encode()] = value
        recorded[name] = {"source": "with", "valueDigest": sha256(value).hexdigest()}
    return variables, recorded, secrets


def _check_name(work: Work, name: str) -> None:
    if not name or "=" in name:
        raise TaskFault("invalid_input", f"{name!r} cannot name a variable")
    checked_text(name, "env")
    if name in (EFFECT_MARKER, HOLDER_MARKER):
        raise TaskFault("invalid_input", f"{name} is set by agentctl alone")
    if not environment_allowed(work.policy, name):
        raise TaskFault(
            "policy_denied",
            f"the variable {name} is not in policy.environmentAllowlist",
            details={"name": name},
        )


# -- dispatch --------------------------------------------------------------------------------------


def _execute(launch: _Launch, context: EffectContext) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    executable = process.resolve(launch.command)
    if executable is None:
        return EffectOutcome.not_dispatched(
            TaskFault(
                "command_not_found",
                f"there is no program {launch.command!r} in the PATH of the worker",
                retryable=True,
                details={"command": launch.command},
            )
        )
    try:
        result = process.run(
            Command(
                executable=executable,
                argv=launch.argv,
                environment={
                    **launch.environment,
                    _MARKER: context.key.encode(),
                    _HOLDER: context.holder.encode(),
                },
                cwd=launch.cwd,
                timeout_seconds=launch.timeout_seconds,
                stdin=launch.stdin,
                stdout_limit=launch.limits["stdoutLimitBytes"],
                stderr_limit=launch.limits["stderrLimitBytes"],
                combined_limit=launch.limits["combinedOutputLimitBytes"],
            ),
            context.token,
            context.monotonic,
        )
    except TaskFault as fault:
        return EffectOutcome.not_dispatched(fault)
    usage = {"processOutputBytes": len(result.stdout) + len(result.stderr)}
    return _outcome(launch, result, usage, notes_of(result))


def notes_of(result: ProcessResult) -> dict[str, Any]:
    """Findings for people: what the process had left behind."""
    notes: dict[str, Any] = {}
    if result.strays:
        notes["strays"] = [stray.as_json() for stray in result.strays]
    if result.survivors:
        notes["survivors"] = list(result.survivors)
    return notes


def _outcome(launch: _Launch, result: ProcessResult, usage: dict[str, int], notes: dict[str, Any]) -> EffectOutcome:
    if result.ending is Ending.OVERFLOW:
        return EffectOutcome("failed", None, _overflow(launch, result).as_json(), usage, notes)
    if launch.secrets:
        from .secret_values import redact

        result.stdout = redact(result.stdout, launch.secrets)
        result.stderr = redact(result.stderr, launch.secrets)
    output = _output(result)
    fault = _interruption(launch, result)
    if fault is not None:
        return EffectOutcome("uncertain", output, fault.as_json(), usage, notes)
    if result.exit_code not in launch.success_exit_codes:
        return EffectOutcome("failed", output, bad_exit(repr(launch.command), result).as_json(), usage, notes)
    if launch.parse_json:
        try:
            output["json"] = parse_json(result.stdout)
        except JsonError as error:
            fault = TaskFault(
                "output_not_json",
                f"stdout of {launch.command!r} is not JSON: {error.message.removeprefix('not JSON: ')}",
                details={"stdoutTail": tail_of(output["stdout"])},
            )
            return EffectOutcome("failed", output, fault.as_json(), usage, notes)
    return EffectOutcome("succeeded", output, None, usage, notes)


def _output(result: ProcessResult) -> dict[str, Any]:
    output: dict[str, Any] = {"status": "changed", "changed": True, "exitCode": result.exit_code}
    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
        try:
            output[name] = data.decode("utf-8")
        except UnicodeDecodeError:
            output[name] = data.decode("utf-8", "replace")
            output[f"{name}Base64"] = b64encode(data).decode("ascii")
    return output


def _interruption(launch: _Launch, result: ProcessResult) -> TaskFault | None:
    """Why nobody knows how far the process came (contract 5.4), or None."""
    if result.ending is Ending.TIMED_OUT:
        return TaskFault(
            "process_timeout",
            f"{launch.command!r} was ended after {launch.timeout_seconds:g} s",
            retryable=True,  # asked only when the action may be repeated (contract row 9)
            details={"timeoutSeconds": launch.timeout_seconds, **ended_by(result)},
        )
    if result.ending is Ending.CANCELLED:
        return TaskFault(
            "process_cancelled",
            f"{launch.command!r} was ended: {result.reason}",
            details={"reason": result.reason, **ended_by(result)},
        )
    if result.exit_code is None and result.signal is None:
        return TaskFault("process_status_lost", f"the exit status of {launch.command!r} was lost", retryable=True)
    return None


def ended_by(result: ProcessResult) -> dict[str, Any]:
    """Exit code and name of the signal, for the details of an error; one of them is None."""
    return {"exitCode": result.exit_code, "signal": _signal_name(result.signal)}


def _signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def bad_exit(what: str, result: ProcessResult, **more: Any) -> TaskFault:
    """The fault of a process that has ended by itself, and not well: how, and its last words on stderr.

    `what` is the process for people, `more` goes into the details.
    """
    ended = ended_by(result)
    how = f"was ended by {ended['signal']}" if ended["signal"] else f"exited with {result.exit_code}"
    tail = tail_of(result.stderr.decode("utf-8", "replace"))
    last = tail.strip().rsplit("\n", 1)[-1][:200]
    return TaskFault(
        "process_exit",
        f"{what} {how}" + (f": {last}" if last else ""),
        retryable=True,
        details={**more, **ended, "stderrTail": tail},
    )


def tail_of(text: str) -> str:
    """The end of an output, at most `TAIL_BYTES` characters, for the details of an error."""
    return text[-TAIL_BYTES:]


def _overflow(launch: _Launch, result: ProcessResult) -> TaskFault:
    stream = result.overflow or "combined"
    key = {"stdout": "stdoutLimitBytes", "stderr": "stderrLimitBytes"}.get(stream, "combinedOutputLimitBytes")
    limit = launch.limits[key]
    code = "subprocess_output_limit_exceeded"
    return TaskFault(
        code,
        f"{launch.command!r} wrote more than {limit} bytes ({stream}) and was ended; {key} sets the limit",
        retryable=True,
        details={
            "code": code,
            "stream": stream,
            "limitBytes": limit,
            "stdoutPrefix": _prefix(launch, result.stdout),
            "stderrPrefix": _prefix(launch, result.stderr),
            "remediation": f"print less, write to a file, or raise {key} of the action",
        },
    )


def _prefix(launch: _Launch, data: bytes) -> str:
    # A limit may have cut a secret in two, and half a secret is not recognised any more.
    return WITHHELD if launch.secrets else data[:PREFIX_BYTES].decode("utf-8", "replace")
