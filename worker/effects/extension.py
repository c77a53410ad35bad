"""`extension.process`: a program of the user's that speaks the process extension protocol (contract 1.5 and 3).

Two processes for each call, both with the action's arguments and the same environment:

1. `--agentctl-handshake`: says on stdout what it is, `{protocolVersion, name, inputSchema, outputSchema,
   capabilities}`, which has to be the contract that the action declares. Nothing has happened before it fits, so
   whatever goes wrong here is a definite failure, and a cancellation is no dispatch.
2. `--agentctl-invoke`: gets `{protocolVersion, effectId, input}` on stdin and answers
   `{protocolVersion, effectId, output}`. Whatever goes wrong from here on leaves the effect uncertain.

Choices that the contract leaves open: one time limit holds for both processes together; each of them has the output
limits of the action for itself, hence the reservation of twice the combined limit; capabilities are compared as they
stand and authorize nothing; stderr is kept (its end, in the notes of a success).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from agentctl.store.canonical import JsonError, canonical, parse_json
from agentctl.store.errors import TaskFault
from agentctl.store.process_identity import EFFECT_MARKER, HOLDER_MARKER

from . import EffectContext, EffectOutcome, EffectPlan, Work, process, refuse_cancelled
from .contracts import mismatch
from .paths import checked_text, workspace_of
from .process import Command, Ending, ProcessResult
from .shell import (
    arguments_of,
    bad_exit,
    ended_by,
    environment_of,
    limits_of,
    notes_of,
    require_program,
    tail_of,
    working_folder,
)

HANDSHAKE: Final = b"--agentctl-handshake"
INVOKE: Final = b"--agentctl-invoke"


@dataclass(frozen=True, slots=True, repr=False)
class _Extension:
    """All that a dispatch needs. Kept out of every repr and record: the environment may hold secrets."""

    command: str
    argv: list[bytes]
    environment: dict[bytes, bytes]
    secrets: list[bytes]
    cwd: str
    limits: dict[str, int]
    timeout_seconds: float
    contract: dict[str, Any]
    """What the handshake has to say, but for the name."""
    input: dict[str, Any]


def prepare_extension(work: Work) -> EffectPlan:
    """Check input, command, environment and working folder. Raises `invalid_input`, `policy_denied`, `not_found`,
    `unsupported_capability`."""
    action = work.action
    if action.get("isolation") not in (None, "process"):
        raise TaskFault("unsupported_capability", f"isolation {action['isolation']!r} is not supported")
    problem = mismatch(action["inputSchema"], work.input)
    if problem is not None:
        raise TaskFault("invalid_input", f"the input does not fit inputSchema of {work.action_name!r}: {problem}")
    command = checked_text(str(action.get("command") or ""), "command")
    require_program(work.policy, command)
    arguments = arguments_of(action.get("args") or [])
    workspace = workspace_of(work)
    folder, cwd = working_folder(action.get("cwd"), workspace)
    # The whole `with` is the extension's input; none of it may set variables here.
    environment, recorded, secrets = environment_of(replace(work, input={}), workspace)
    limits = limits_of(action)
    timeout = min(action.get("timeoutSeconds") or work.timeout_seconds, work.timeout_seconds)
    contract = {
        "protocolVersion": action["protocolVersion"],
        "inputSchema": action["inputSchema"],
        "outputSchema": action["outputSchema"],
        "capabilities": list(action.get("capabilities") or ()),
    }
    extension = _Extension(
        command=command,
        argv=[command.encode(), *(argument.encode() for argument in arguments)],
        environment=environment,
        secrets=secrets,
        cwd=cwd,
        limits=limits,
        timeout_seconds=float(timeout),
        contract=contract,
        input=work.input,
    )
    return EffectPlan(
        operation="extension.process",
        effect_class="process_execution",
        risk="high",
        idempotency=action["idempotency"],
        policy_name="extension.process",
        input={
            "command": command,
            "args": arguments,
            "cwd": folder,
            "environment": recorded,
            "limits": {**limits, "timeoutSeconds": timeout},
            "isolation": "process",
            "container": None,
            "containerBackend": None,
            "protocolVersion": contract["protocolVersion"],
            "capabilities": contract["capabilities"],
            "input": work.input,
        },
        expected_effect={"command": command, "args": arguments, "cwd": folder, "input": work.input},
        estimate={"processOutputBytes": 2 * limits["combinedOutputLimitBytes"]},
        execute=partial(_execute, extension),
    )


# -- dispatch --------------------------------------------------------------------------------------


def _execute(extension: _Extension, context: EffectContext) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    executable = process.resolve(extension.command)
    if executable is None:
        message = f"there is no program {extension.command!r} in the PATH of the worker"
        return EffectOutcome.not_dispatched(
            TaskFault("command_not_found", message, retryable=True, details={"command": extension.command})
        )
    deadline = context.monotonic() + extension.timeout_seconds
    try:
        first = _run(extension, context, executable, HANDSHAKE, None, deadline)
    except TaskFault as fault:
        return EffectOutcome.not_dispatched(fault)
    usage = _bytes(first)
    if first.ending is Ending.CANCELLED:
        details = {"reason": first.reason}
        message = f"ended during the handshake: {first.reason}"
        return EffectOutcome.not_dispatched(TaskFault("cancelled", message, details=details))
    fault_or_name = _handshake(extension, first)
    if isinstance(fault_or_name, TaskFault):
        return EffectOutcome("failed", _printed(first), fault_or_name.as_json(), {"processOutputBytes": usage})
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    message = canonical(
        {
            "protocolVersion": extension.contract["protocolVersion"],
            "effectId": context.key,
            "input": extension.input,
        }
    )
    try:
        second = _run(extension, context, executable, INVOKE, message.encode(), deadline)
    except TaskFault as fault:
        return EffectOutcome("failed", None, fault.as_json(), {"processOutputBytes": usage})
    units = {"processOutputBytes": usage + _bytes(second)}
    notes = notes_of(second)
    answer = _invocation(extension, context, second)
    if isinstance(answer, TaskFault):
        return EffectOutcome("uncertain", _printed(second), answer.as_json(), units, notes)
    notes |= {"extension": fault_or_name, "exitCode": 0, **_end_of_stderr(second)}
    return EffectOutcome("succeeded", answer["output"], None, units, notes)


def _run(
    extension: _Extension,
    context: EffectContext,
    executable: bytes,
    flag: bytes,
    stdin: bytes | None,
    deadline: float,
) -> ProcessResult:
    """One of the two processes, its output cleaned of secrets. Raises `TaskFault` when it could not be started."""
    result = process.run(
        Command(
            executable=executable,
            argv=[*extension.argv, flag],
            environment={
                **extension.environment,
                EFFECT_MARKER.encode(): context.key.encode(),
                HOLDER_MARKER.encode(): context.holder.encode(),
            },
            cwd=extension.cwd,
            timeout_seconds=max(0.0, deadline - context.monotonic()),
            stdin=stdin,
            stdout_limit=extension.limits["stdoutLimitBytes"],
            stderr_limit=extension.limits["stderrLimitBytes"],
            combined_limit=extension.limits["combinedOutputLimitBytes"],
        ),
        context.token,
        context.monotonic,
    )
    if extension.secrets:
        from .secret_values import redact

        result.stdout = redact(result.stdout, extension.secrets)
        result.stderr = redact(result.stderr, extension.secrets)
    return result


def _handshake(extension: _Extension, result: ProcessResult) -> TaskFault | str:
    """The name that the extension gives itself, or why it is not the one that the action declares."""
    fault = _incomplete(extension, result, "handshake")
    if fault is not None:
        return fault
    said = _object(result.stdout, {"name", *extension.contract}, "the handshake")
    if isinstance(said, TaskFault):
        return said
    name = said.pop("name")
    if not isinstance(name, str) or not name:
        return TaskFault("extension_handshake", "the handshake names no extension: 'name' must be a non-empty text")
    for field, wanted in extension.contract.items():
        if canonical(said[field]) != canonical(wanted):
            return TaskFault(
                "extension_contract",
                f"the extension {name!r} says another {field} than the action declares",
                details={"field": field, "declared": wanted, "said": said[field]},
            )
    return name


def _invocation(extension: _Extension, context: EffectContext, result: ProcessResult) -> dict[str, Any] | TaskFault:
    """The answer, checked; or why nobody knows what has been done (contract 3 and 5.4)."""
    fault = _incomplete(extension, result, "invocation")
    if fault is not None:
        return fault
    said = _object(result.stdout, {"protocolVersion", "effectId", "output"}, "the answer")
    if isinstance(said, TaskFault):
        return said
    wanted = {"protocolVersion": extension.contract["protocolVersion"], "effectId": context.key}
    for field, value in wanted.items():
        if said[field] != value:
            return TaskFault(
                "extension_answer", f"the answer has another {field} than the call", details={"field": field}
            )
    problem = mismatch(extension.contract["outputSchema"], said["output"])
    if problem is not None:
        return TaskFault("output_contract", f"the output does not fit outputSchema: {problem}")
    return said


def _incomplete(extension: _Extension, result: ProcessResult, part: str) -> TaskFault | None:
    """Why a process did not come to a proper end, or None."""
    what = f"the {part} of {extension.command!r}"
    details: dict[str, Any] = {"part": part, **ended_by(result)}
    if result.ending is Ending.TIMED_OUT:
        message = f"{what} was ended: both processes together have {extension.timeout_seconds:g} s"
        return TaskFault("process_timeout", message, retryable=True, details=details)
    if result.ending is Ending.CANCELLED:
        return TaskFault("process_cancelled", f"{what} was ended: {result.reason}", details=details)
    if result.ending is Ending.OVERFLOW:
        stream = result.overflow or "combined"
        message = f"{what} wrote more than its limit ({stream}) and was ended"
        return TaskFault(
            "subprocess_output_limit_exceeded", message, retryable=True, details={**details, "stream": stream}
        )
    if result.exit_code is None and result.signal is None:
        return TaskFault("process_status_lost", f"the exit status of {what} was lost", retryable=True)
    if result.exit_code != 0:
        return bad_exit(what, result, part=part)
    return None


def _object(data: bytes, fields: set[str], what: str) -> dict[str, Any] | TaskFault:
    """A JSON object with exactly these fields."""
    try:
        value = parse_json(data)
    except JsonError as error:
        return TaskFault("output_not_json", f"{what} on stdout is not JSON: {error.message.removeprefix('not JSON: ')}")
    if not isinstance(value, dict):
        return TaskFault("output_not_json", f"{what} on stdout is no JSON object")
    if value.keys() != fields:
        wrong = {"missing": sorted(fields - value.keys()), "unknown": sorted(value.keys() - fields)}
        told = "; ".join(f"{word} {', '.join(names)}" for word, names in wrong.items() if names)
        return TaskFault("extension_answer", f"{what} has the wrong fields: {told}", details=wrong)
    return value


def _bytes(result: ProcessResult) -> int:
    return len(result.stdout) + len(result.stderr)


def _printed(result: ProcessResult) -> dict[str, Any]:
    """What a process that did not succeed has printed, for `logs`."""
    return {
        "exitCode": result.exit_code,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
    }


def _end_of_stderr(result: ProcessResult) -> Mapping[str, Any]:
    return {"stderrTail": tail_of(result.stderr.decode("utf-8", "replace"))} if result.stderr else {}
