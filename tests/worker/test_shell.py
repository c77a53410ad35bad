"""`builtin.shell.exec`: checks before the effect, and what real programs come to."""

from __future__ import annotations

import os
import sys
import threading
import time
import venv
from base64 import b64decode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical, input_digest
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.store.process_identity import find_marked
from agentctl.worker.effects import EffectContext, EffectOutcome, EffectPlan, Work, prepare
from agentctl.worker.effects.shell import CHILD_PATH, WITHHELD
from support import effects
from support.children import wait_until
from support.clock import over_when
from support.effects import planned

pytestmark = pytest.mark.usefixtures("subreaper")


class Token:
    """A cancel token over a pipe."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.reason: str | None = None

    def fileno(self) -> int:
        return self._reader

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str) -> None:
        self.reason = reason
        os.write(self._writer, b"x")

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def token() -> Iterator[Token]:
    made = Token()
    yield made
    made.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "w" / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    return tmp_path


POLICY = {
    "workspaceRoot": "w",
    "processAllowlist": ["sh", "env", "cat", "true", "tool", "no-such-program", "python", Path(sys.executable).name],
    "environmentAllowlist": ["A", "B", "PATH", "AGENTCTL_EFFECT_ID", "SOURCE"],
    "secretFileRoots": ["keys"],
    "secretProcessAllowlist": ["sh"],
}


def work(base: Path, action: dict[str, Any], given: dict[str, Any] | None = None, **policy: Any) -> Work:
    return Work(
        task_id="t",
        action_name="a",
        kind="builtin.shell.exec",
        action=action,
        input=given or {},
        memory={},
        timeout_seconds=60.0,
        base_path=str(base),
        policy=Policy.from_json(POLICY | policy),
    )


def refused(wanted: Work) -> TaskFault:
    with pytest.raises(TaskFault) as caught:
        prepare(wanted)
    return caught.value


def execute(
    plan: EffectPlan, token: Token, effect: str, monotonic: Callable[[], float] = time.monotonic
) -> EffectOutcome:
    return effects.execute(plan, EffectContext(effect, token, monotonic))


Shell = Callable[..., EffectOutcome]


@pytest.fixture
def shell(base: Path, token: Token, effect: str) -> Shell:
    """Run a script: `shell(script, given, **action fields)`. Its time is over when the file `over` is there, if so."""

    def run(script: str, given: dict[str, Any] | None = None, *, over: str = "", **action: Any) -> EffectOutcome:
        definition = {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", script]} | action
        monotonic = over_when((base / "w" / over).exists) if over else time.monotonic
        return execute(planned(work(base, definition, given)), token, effect, monotonic)

    return run


def code_of(outcome: EffectOutcome) -> str:
    assert outcome.error is not None
    return str(outcome.error["code"])


def details_of(outcome: EffectOutcome) -> dict[str, Any]:
    assert outcome.error is not None
    found: dict[str, Any] = outcome.error["details"]
    return found


def output_of(outcome: EffectOutcome) -> dict[str, Any]:
    assert outcome.result is not None
    return outcome.result


# -- the plan -----------------------------------------------------------------------------------------------


def test_plan(base: Path) -> None:
    plan = planned(work(base, {"command": "/bin/sh", "args": ["-c", "x"], "cwd": "sub"}))
    assert (plan.operation, plan.effect_class, plan.risk) == ("builtin.shell.exec", "process_execution", "high")
    assert (plan.idempotency, plan.policy_name) == ("unknown", "process.exec")
    assert plan.estimate == {"processOutputBytes": 2 << 20}
    assert plan.input == {
        "command": "/bin/sh",
        "args": ["-c", "x"],
        "cwd": "sub",
        "environment": {},
        "limits": {
            "stdoutLimitBytes": 1 << 20,
            "stderrLimitBytes": 1 << 20,
            "combinedOutputLimitBytes": 2 << 20,
            "timeoutSeconds": 60.0,
        },
        "isolation": "process",
        "container": None,
        "containerBackend": None,
    }


def test_plan_with_declared_values(base: Path) -> None:
    action = {
        "command": "sh",
        "idempotency": "idempotent",
        "stdoutLimitBytes": 5,
        "stderrLimitBytes": 6,
        "combinedOutputLimitBytes": 7,
        "timeoutSeconds": 3,
    }
    plan = planned(work(base, action))
    assert plan.idempotency == "idempotent"
    assert plan.estimate == {"processOutputBytes": 7}
    assert plan.input["limits"]["timeoutSeconds"] == 3


def test_task_input_replaces_and_is_part_of_the_identity(base: Path) -> None:
    action = {"command": "sh", "args": ["-c", "x"], "cwd": "."}
    given = {"args": ["-c", "echo", 7, True, 1.5], "stdin": "in", "env": {"A": "plainly"}, "cwd": "sub", "else": 1}
    plan = planned(work(base, action, given))
    assert plan.input["args"] == ["-c", "echo", "7", "true", "1.5"]
    assert plan.input["cwd"] == "sub"
    assert plan.input["stdinDigest"] == sha256(b"in").hexdigest()
    assert plan.input["environment"] == {"A": {"source": "with", "valueDigest": sha256(b"plainly").hexdigest()}}
    assert "plainly" not in canonical(plan.input)
    others = [given | {"stdin": "other"}, given | {"env": {"A": "w"}}, given | {"args": []}, given | {"cwd": "."}]
    digests = {input_digest(planned(work(base, action, g)).input) for g in [given, *others]}
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("action", "given", "code"),
    [
        ({"command": "bash"}, {}, "policy_denied"),
        ({"command": "sh/"}, {}, "policy_denied"),
        ({"command": ""}, {}, "invalid_input"),
        ({}, {}, "invalid_input"),
        ({"command": "s\0h"}, {}, "invalid_input"),
        ({"command": "sh"}, {"args": "x"}, "invalid_input"),
        ({"command": "sh"}, {"args": [None]}, "invalid_input"),
        ({"command": "sh"}, {"args": [["a"]]}, "invalid_input"),
        ({"command": "sh"}, {"args": ["a\0b"]}, "invalid_input"),
        ({"command": "sh"}, {"args": ["\ud800"]}, "invalid_input"),
        ({"command": "sh"}, {"stdin": 5}, "invalid_input"),
        ({"command": "sh"}, {"stdin": "\udfff"}, "invalid_input"),
        ({"command": "sh"}, {"env": ["A"]}, "invalid_input"),
        ({"command": "sh"}, {"env": {"C": "x"}}, "policy_denied"),
        ({"command": "sh"}, {"env": {"A": {"env": "B"}}}, "invalid_input"),
        ({"command": "sh"}, {"env": {"A=B": "x"}}, "invalid_input"),
        ({"command": "sh"}, {"env": {"AGENTCTL_EFFECT_ID": "x"}}, "invalid_input"),
        ({"command": "sh", "env": {"C": {"env": "A"}}}, {}, "policy_denied"),
        ({"command": "sh", "cwd": "../outside"}, {}, "policy_denied"),
        ({"command": "sh"}, {"cwd": "/"}, "policy_denied"),
        ({"command": "sh"}, {"cwd": "link"}, "policy_denied"),
        ({"command": "sh"}, {"cwd": "missing"}, "not_found"),
        ({"command": "sh"}, {"cwd": "file"}, "invalid_input"),
        ({"command": "sh", "artifacts": ["a"]}, {}, "policy_denied"),  # there is no writable root
        ({"command": "sh", "artifacts": ["../a"]}, {}, "policy_denied"),
        ({"command": "sh"}, {"artifacts": "a"}, "invalid_input"),
        ({"command": "sh"}, {"artifacts": [""]}, "invalid_input"),
        ({"command": "sh"}, {"artifacts": ["a\0"]}, "invalid_input"),
        ({"command": "sh", "isolation": "container"}, {}, "unsupported_capability"),
        ({"command": "sh", "parse": "yaml"}, {}, "invalid_input"),
    ],
)
def test_refusals_before_the_effect(base: Path, action: dict[str, Any], given: dict[str, Any], code: str) -> None:
    (base / "w" / "link").symlink_to(base / "outside")
    (base / "w" / "file").write_text("")
    fault = refused(work(base, action, given))
    assert (fault.code, fault.retryable) == (code, code == "not_found")


# -- success ------------------------------------------------------------------------------------------------


def test_output(shell: Shell) -> None:
    outcome = shell("echo out; echo err >&2")
    assert outcome.status == "succeeded" and outcome.error is None and outcome.notes == {}
    expected = {"status": "changed", "changed": True, "exitCode": 0, "stdout": "out\n", "stderr": "err\n"}
    assert outcome.result == expected
    assert outcome.usage == {"processOutputBytes": 8}


def test_input_and_folder(shell: Shell, base: Path) -> None:
    outcome = shell("cat; pwd", {"stdin": "text é\n", "cwd": "sub"})
    assert output_of(outcome)["stdout"] == f"text é\n{base.resolve()}/w/sub\n"


def test_the_environment_is_cleared(base: Path, token: Token, effect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK", "1")
    plan = planned(work(base, {"command": "env"}, {"env": {"A": "a é", "B": 3}}))
    lines = output_of(execute(plan, token, effect))["stdout"].splitlines()
    assert f"AGENTCTL_EFFECT_ID={effect}" in lines
    assert sorted(line for line in lines if not line.startswith("AGENTCTL_")) == ["A=a é", "B=3", f"PATH={CHILD_PATH}"]


def test_the_path_may_be_declared(shell: Shell) -> None:
    assert output_of(shell('echo "$PATH"', {"env": {"PATH": "/x"}}))["stdout"] == "/x\n"


def test_success_exit_codes(shell: Shell) -> None:
    assert shell("exit 3", successExitCodes=[0, 3]).status == "succeeded"
    assert output_of(shell("exit 3", successExitCodes=[0, 3]))["exitCode"] == 3
    assert code_of(shell("exit 0", successExitCodes=[3])) == "process_exit"


def test_relative_command(base: Path, token: Token, effect: str) -> None:
    tool = base / "w" / "sub" / "tool"
    tool.write_text("#!/bin/sh\necho here\n")
    tool.chmod(0o755)
    plan = planned(work(base, {"command": "./tool", "cwd": "sub"}))
    assert output_of(execute(plan, token, effect))["stdout"] == "here\n"


# -- output that breaks JSON: field report 21 ----------------------------------------------------------------


def test_output_that_is_not_utf8_is_kept_byte_for_byte(shell: Shell) -> None:
    outcome = shell(r"printf 'a\377b'; printf '\300' >&2")
    assert outcome.status == "succeeded"
    output = output_of(outcome)
    assert output["stdout"] == "a\ufffdb" and b64decode(output["stdoutBase64"]) == b"a\xffb"
    assert output["stderr"] == "\ufffd" and b64decode(output["stderrBase64"]) == b"\xc0"


def test_control_characters_and_zero_bytes_are_text(shell: Shell) -> None:
    assert output_of(shell(r"printf 'a\000b\033[0m\r\n'"))["stdout"] == "a\0b\x1b[0m\r\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 1.0, -0.0, true, null]}', {"a": [1, 1.0, -0.0, True, None]}),
        ("1180591620717411303424", 2**70),
        (r'"\ud83d\ude00"', "😀"),
        ("[" * 60 + "]" * 60, None),
        ('"é e\u0301"', "é e\u0301"),
    ],
)
def test_parse_json(shell: Shell, text: str, value: Any) -> None:
    outcome = shell("cat", {"stdin": text}, parse="json")
    assert outcome.status == "succeeded"
    output = output_of(outcome)
    assert output["stdout"] == text
    if value is not None:
        assert canonical(output["json"]) == canonical(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        r'"\ud800"',
        r'{"\udc00": 1}',
        "NaN",
        "[Infinity]",
        "-Infinity",
        "1e400",
        "[" * 70 + "]" * 70,
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "9" * 5000,
        "{} {}",
    ],
)
def test_bad_json_fails_the_task(shell: Shell, text: str) -> None:
    outcome = shell("cat", {"stdin": text}, parse="json")
    assert (outcome.status, code_of(outcome)) == ("failed", "output_not_json")
    assert outcome.error is not None and outcome.error["retryable"] is False
    assert shell("echo next").status == "succeeded"


def test_json_that_is_not_utf8(shell: Shell) -> None:
    outcome = shell(r"""printf '"\377"'""", parse="json")
    assert (outcome.status, code_of(outcome)) == ("failed", "output_not_json")


# -- failure ------------------------------------------------------------------------------------------------


def test_nonzero_exit(shell: Shell) -> None:
    outcome = shell("echo out; echo first >&2; echo why >&2; exit 9", parse="json")
    assert (outcome.status, code_of(outcome)) == ("failed", "process_exit")
    assert outcome.error is not None and outcome.error["retryable"] is True
    assert details_of(outcome) == {"exitCode": 9, "signal": None, "stderrTail": "first\nwhy\n"}
    assert outcome.error["message"] == "'sh' exited with 9: why"
    assert output_of(outcome)["stdout"] == "out\n"
    assert outcome.usage == {"processOutputBytes": 14}


def test_death_by_signal(shell: Shell) -> None:
    outcome = shell("kill -KILL $$")
    assert (outcome.status, code_of(outcome)) == ("failed", "process_exit")
    assert (details_of(outcome)["exitCode"], details_of(outcome)["signal"]) == (None, "SIGKILL")


def test_the_error_keeps_a_bounded_tail(shell: Shell) -> None:
    outcome = shell("head -c 100000 /dev/zero | tr '\\0' x >&2; printf end >&2; exit 1")
    tail = details_of(outcome)["stderrTail"]
    assert len(tail) == 8192 and tail.endswith("xend")


def test_overflow(shell: Shell, effect: str) -> None:
    outcome = shell("echo err >&2; head -c 200000000 /dev/zero | tr '\\0' x", stdoutLimitBytes=10_000)
    assert (outcome.status, code_of(outcome)) == ("failed", "subprocess_output_limit_exceeded")
    details = details_of(outcome)
    assert details["code"] == "subprocess_output_limit_exceeded"
    assert (details["stream"], details["limitBytes"]) == ("stdout", 10_000)
    assert details["stdoutPrefix"] == "x" * 4096 and details["stderrPrefix"] == "err\n"
    assert "stdoutLimitBytes" in details["remediation"]
    assert outcome.result is None
    assert outcome.usage == {"processOutputBytes": 10_004}
    assert find_marked([effect]) == []


def test_timeout_is_uncertain(shell: Shell, effect: str) -> None:
    outcome = shell("echo begun; : > begun; sleep 300", timeoutSeconds=1, over="begun")
    assert (outcome.status, code_of(outcome)) == ("uncertain", "process_timeout")
    assert details_of(outcome) == {"timeoutSeconds": 1.0, "exitCode": None, "signal": "SIGTERM"}
    assert output_of(outcome)["stdout"] == "begun\n"
    assert find_marked([effect]) == []


def test_an_exit_0_after_the_timeout_is_uncertain_too(shell: Shell) -> None:
    outcome = shell("trap 'exit 0' TERM; : > begun; while :; do sleep 0.01; done", timeoutSeconds=1, over="begun")
    assert (outcome.status, code_of(outcome)) == ("uncertain", "process_timeout")


def test_cancel_is_uncertain(shell: Shell, token: Token, effect: str) -> None:
    def body() -> None:
        wait_until(lambda: bool(find_marked([effect])), "its process")
        token.cancel("cancel_requested")

    thread = threading.Thread(target=body)
    thread.start()
    outcome = shell("sleep 300")
    thread.join()
    assert (outcome.status, code_of(outcome)) == ("uncertain", "process_cancelled")
    assert details_of(outcome)["reason"] == "cancel_requested"
    assert outcome.error is not None and outcome.error["retryable"] is False


def test_nothing_starts_after_a_cancel(shell: Shell, token: Token, base: Path) -> None:
    token.cancel("drain")
    outcome = shell("touch started")
    assert (outcome.status, code_of(outcome)) == ("not_dispatched", "cancelled")
    assert not (base / "w" / "started").exists()


def test_what_could_not_be_started_was_not_dispatched(base: Path, token: Token, effect: str) -> None:
    outcome = execute(planned(work(base, {"command": "no-such-program"})), token, effect)
    assert (outcome.status, code_of(outcome)) == ("not_dispatched", "command_not_found")
    outcome = execute(planned(work(base, {"command": "./tool"})), token, effect)
    assert (outcome.status, code_of(outcome)) == ("not_dispatched", "command_not_found")
    (base / "w" / "tool").write_text("#!/bin/sh\n")
    outcome = execute(planned(work(base, {"command": "./tool"})), token, effect)
    assert (outcome.status, code_of(outcome)) == ("not_dispatched", "spawn_failed")
    assert outcome.error is not None and outcome.error["retryable"] is True
    plan = planned(work(base, {"command": "true", "cwd": "sub"}))
    (base / "w" / "sub").rmdir()
    outcome = execute(plan, token, effect)
    assert (outcome.status, code_of(outcome)) == ("not_dispatched", "spawn_failed")


def test_strays_are_reported(shell: Shell, effect: str) -> None:
    outcome = shell("setsid sh -c ': > up; exec sleep 300' & until [ -e up ]; do sleep 0.01; done; echo hi")
    assert outcome.status == "succeeded" and output_of(outcome)["stdout"] == "hi\n"
    (stray,) = outcome.notes["strays"]
    assert stray["name"] in ("sh", "sleep") and stray["escaped"] is True
    assert find_marked([effect]) == []


# -- secrets ------------------------------------------------------------------------------------------------


def secret_work(base: Path, reference: dict[str, Any], script: str = 'echo "<$A>"', **action: Any) -> Work:
    return work(base, {"command": "sh", "args": ["-c", script], "env": {"A": reference}} | action)


@pytest.mark.parametrize("kind", ["env", "file", "process"])
def test_secrets_reach_the_process_and_nothing_else(
    base: Path, token: Token, effect: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE", "s3cret")
    (base / "w" / "keys").mkdir()
    (base / "w" / "keys" / "k").write_text("s3cret\n")
    references: dict[str, dict[str, Any]] = {
        "env": {"env": "SOURCE"},
        "file": {"file": "keys/k"},
        "process": {"process": {"command": "sh", "args": ["-c", "echo s3cret"]}},
    }
    plan = planned(secret_work(base, references[kind], script='echo "<$A>"; echo "$A" >&2; printf %s "$A" | wc -c'))
    recorded = plan.input["environment"]["A"]
    assert recorded["source"].startswith(f"{kind}:")
    assert recorded["valueDigest"] == sha256(b"s3cret").hexdigest()
    assert "s3cret" not in canonical(plan.input) and "s3cret" not in repr(plan)
    outcome = execute(plan, token, effect)
    assert output_of(outcome)["stdout"] == "<[REDACTED]>\n6\n"
    assert output_of(outcome)["stderr"] == "[REDACTED]\n"


def test_secrets_stay_out_of_errors(base: Path, token: Token, effect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE", "s3cret")
    failing = planned(secret_work(base, {"env": "SOURCE"}, script='echo "$A" >&2; exit 1'))
    assert "s3cret" not in canonical(execute(failing, token, effect).error)
    flooding = planned(secret_work(base, {"env": "SOURCE"}, script='while :; do echo "$A"; done', stdoutLimitBytes=9))
    outcome = execute(flooding, token, effect)
    assert code_of(outcome) == "subprocess_output_limit_exceeded"
    assert details_of(outcome)["stdoutPrefix"] == WITHHELD and "s3cr" not in canonical(outcome.error)


@pytest.mark.parametrize(
    ("reference", "code"),
    [
        ({"env": "HOME"}, "policy_denied"),
        ({"env": "SOURCE"}, "secret_unavailable"),
        ({"file": "../outside/k"}, "policy_denied"),
        ({"file": "other"}, "policy_denied"),
        ({"file": "keys/link"}, "policy_denied"),
        ({"file": "keys/missing"}, "secret_unavailable"),
        ({"file": "keys/folder"}, "secret_unavailable"),
        ({"process": {"command": "cat"}}, "policy_denied"),
        ({"process": {"command": "sh", "args": ["-c", "exit 1"]}}, "secret_unavailable"),
        ({"process": {"command": "sh", "args": ["-c", "yes"]}}, "secret_unavailable"),
        ({"process": {"command": "sh", "args": ["-c", "sleep 9"], "timeoutSeconds": 1}}, "secret_unavailable"),
        ({}, "invalid_input"),
    ],
)
def test_secrets_that_cannot_be_read(
    base: Path, reference: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE", raising=False)
    (base / "w" / "keys" / "folder").mkdir(parents=True)
    (base / "w" / "keys" / "link").symlink_to(base / "outside" / "k")
    (base / "outside" / "k").write_text("x")
    assert refused(secret_work(base, reference)).code == code


def test_a_program_finds_its_own_files(base: Path, token: Token, effect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python of a virtual environment is found by the worker; by its name alone it would look along another PATH."""
    venv.create(base / "venv", symlinks=True)
    monkeypatch.setenv("PATH", f"{base / 'venv' / 'bin'}:{os.environ['PATH']}")
    script = "import math, sys; print(sys.prefix)"
    action = {"kind": "builtin.shell.exec", "command": "python3", "args": ["-c", script]}
    plan = planned(work(base, action, processAllowlist=["python3"]))
    outcome = execute(plan, token, effect)
    assert outcome.result is not None
    assert outcome.result["stdout"] == f"{base / 'venv'}\n", outcome.result["stderr"]
    # What is recorded is what was asked for: where it was found is no part of the effect's identity.
    assert plan.input["command"] == "python3"
