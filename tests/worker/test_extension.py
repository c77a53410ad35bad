"""`extension.process`: the handshake, the call, and what each failure of a real program comes to (contract 3)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.worker.effects import EffectContext, EffectOutcome, Work, prepare
from agentctl.worker.watch import Token
from support.clock import over_when
from support.effects import error_of, execute, planned

pytestmark = pytest.mark.usefixtures("subreaper")

PROTOCOL = "agentctl.dev/process-extension/v1"
IN = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
OUT = {"type": "object", "properties": {"double": {"type": "integer"}}, "required": ["double"]}
CONTRACT = {"protocolVersion": PROTOCOL, "inputSchema": IN, "outputSchema": OUT, "capabilities": ["arithmetic"]}

PROGRAM = """
import json, os, sys, time
told = {told!r}
with open({ledger!r}, "a") as ledger:
    ledger.write(sys.argv[-1] + "\\n")
if sys.argv[-1] == "--agentctl-handshake":
{handshake}
else:
    call = json.load(sys.stdin)
    answer = {{"protocolVersion": call["protocolVersion"], "effectId": call["effectId"],
               "output": {{"double": 2 * call["input"]["n"]}}}}
{invoke}
"""


def block(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def work(base: Path, given: Any, timeout: float = 20.0, **action: Any) -> Work:
    definition = {
        "kind": "extension.process",
        "command": sys.executable,
        "args": [str(base / "double.py"), "--verbose"],
        "idempotency": "at_most_once",
    }
    return Work(
        task_id="t",
        action_name="double",
        kind="extension.process",
        action={**definition, **CONTRACT, **action},
        input=given,
        memory={},
        timeout_seconds=timeout,
        base_path=str(base),
        policy=Policy.from_json(
            {
                "processAllowlist": [Path(sys.executable).name],
                "environmentAllowlist": ["KEY", "SOURCE"],
            }
        ),
    )


Extension = Callable[..., EffectOutcome]


@pytest.fixture
def extension(tmp_path: Path, effect: str) -> Extension:
    """Run an extension: `extension(handshake code, invoke code, given, **action fields)`. With `over`, its time is over
    when it has been called like that."""

    def run(
        handshake: str = "print(json.dumps(told))",
        invoke: str = "print(json.dumps(answer))",
        given: Any = None,
        token: Token | None = None,
        said: dict[str, Any] | None = None,
        over: str = "",
        **action: Any,
    ) -> EffectOutcome:
        text = PROGRAM.format(
            told={"name": "double", **CONTRACT, **(said or {})},
            ledger=str(tmp_path / "ledger"),
            handshake=block(handshake),
            invoke=block(invoke),
        )
        (tmp_path / "double.py").write_text(text)
        plan = planned(work(tmp_path, {"n": 21} if given is None else given, **action))
        monotonic = over_when(lambda: over in calls(tmp_path)) if over else time.monotonic
        return execute(plan, EffectContext(effect, token or Token(), monotonic))

    return run


def calls(base: Path) -> list[str]:
    ledger = base / "ledger"
    return [line.removeprefix("--agentctl-") for line in ledger.read_text().splitlines()] if ledger.exists() else []


def test_the_output_of_the_extension_as_it_is(extension: Extension, tmp_path: Path) -> None:
    outcome = extension(invoke="print('note', file=sys.stderr)\nprint(json.dumps(answer))")
    assert (outcome.status, outcome.result) == ("succeeded", {"double": 42})
    assert outcome.notes == {"extension": "double", "exitCode": 0, "stderrTail": "note\n"}
    assert calls(tmp_path) == ["handshake", "invoke"]
    printed = len(json.dumps({"name": "double", **CONTRACT})) + 1
    assert outcome.usage["processOutputBytes"] > printed


def test_what_is_recorded_and_reserved(tmp_path: Path) -> None:
    plan = planned(work(tmp_path, {"n": 1}, combinedOutputLimitBytes=500, timeoutSeconds=7))
    assert (plan.operation, plan.effect_class, plan.risk) == ("extension.process", "process_execution", "high")
    assert plan.idempotency == "at_most_once"
    assert plan.estimate == {"processOutputBytes": 1000}
    assert plan.input["input"] == {"n": 1}
    assert plan.input["limits"]["timeoutSeconds"] == 7


@pytest.mark.parametrize("given", [{"n": "x"}, {}, {"n": 1, "m": 2}])
def test_input_is_checked_before_there_is_an_effect(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(TaskFault) as caught:
        prepare(work(tmp_path, given))
    assert caught.value.code == "invalid_input"


def test_a_program_outside_the_allowlist(tmp_path: Path) -> None:
    with pytest.raises(TaskFault) as caught:
        prepare(work(tmp_path, {"n": 1}, command="perl"))
    assert caught.value.code == "policy_denied"


def test_a_program_that_is_not_there(extension: Extension) -> None:
    missing = "/nowhere/" + Path(sys.executable).name
    outcome = extension(command=missing)
    assert outcome.status == "not_dispatched"


HANDSHAKES = [
    ("exit code", "sys.exit(3)", {}, "process_exit"),
    ("no JSON", "print('hello')", {}, "output_not_json"),
    ("a list", "print([])", {}, "output_not_json"),
    ("two documents", "print(json.dumps(told)); print(json.dumps(told))", {}, "output_not_json"),
    ("unknown field", "print(json.dumps(told | {'more': 1}))", {}, "extension_answer"),
    ("missing field", "del told['capabilities']; print(json.dumps(told))", {}, "extension_answer"),
    ("no name", "print(json.dumps(told | {'name': ''}))", {}, "extension_handshake"),
    ("other version", "print(json.dumps(told))", {"protocolVersion": "v2"}, "extension_contract"),
    ("other input", "print(json.dumps(told))", {"inputSchema": {}}, "extension_contract"),
    ("other output", "print(json.dumps(told))", {"outputSchema": {}}, "extension_contract"),
    ("other capabilities", "print(json.dumps(told))", {"capabilities": ["network"]}, "extension_contract"),
    ("too much", "print('x' * 5000)", {}, "subprocess_output_limit_exceeded"),
]


@pytest.mark.parametrize(("code", "said", "error"), [row[1:] for row in HANDSHAKES], ids=[row[0] for row in HANDSHAKES])
def test_any_problem_of_the_handshake_is_a_definite_failure(
    extension: Extension, tmp_path: Path, code: str, said: dict[str, Any], error: str
) -> None:
    outcome = extension(code, said=said, stdoutLimitBytes=4000)
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", error)
    assert calls(tmp_path) == ["handshake"]


def test_a_handshake_that_takes_too_long(extension: Extension, tmp_path: Path) -> None:
    outcome = extension("time.sleep(60)", timeoutSeconds=1, over="handshake")
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", "process_timeout")
    assert calls(tmp_path) == ["handshake"]


INVOCATIONS = [
    ("exit code", "print(json.dumps(answer)); sys.exit(1)", "process_exit", True),
    ("signal", "os.kill(os.getpid(), 9)", "process_exit", True),
    ("no JSON", "print('{')", "output_not_json", False),
    ("another effect", "print(json.dumps(answer | {'effectId': 'x'}))", "extension_answer", False),
    ("another version", "print(json.dumps(answer | {'protocolVersion': 'x'}))", "extension_answer", False),
    ("unknown field", "print(json.dumps(answer | {'more': 1}))", "extension_answer", False),
    ("missing field", "del answer['output']; print(json.dumps(answer))", "extension_answer", False),
    ("output contract", "print(json.dumps(answer | {'output': {'double': 'x'}}))", "output_contract", False),
    ("too much", "print('x' * 5000)", "subprocess_output_limit_exceeded", True),
]


@pytest.mark.parametrize(
    ("code", "error", "again"), [row[1:] for row in INVOCATIONS], ids=[row[0] for row in INVOCATIONS]
)
def test_any_problem_after_the_call_leaves_it_uncertain(
    extension: Extension, tmp_path: Path, code: str, error: str, again: bool
) -> None:
    outcome = extension(invoke=code, stdoutLimitBytes=4000)
    found = error_of(outcome)
    assert (outcome.status, found["code"], found["retryable"]) == ("uncertain", error, again)
    assert calls(tmp_path) == ["handshake", "invoke"]


def test_a_call_that_takes_too_long(extension: Extension) -> None:
    outcome = extension(invoke="time.sleep(60)", timeoutSeconds=1, over="invoke")
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "process_timeout")


def test_a_cancellation_before_anything_was_started(extension: Extension, tmp_path: Path) -> None:
    token = Token()
    token.cancel("cancel_requested")
    assert extension(token=token).status == "not_dispatched"
    assert not (tmp_path / "ledger").exists()


def test_the_effect_id_is_told_to_both_processes(extension: Extension, effect: str) -> None:
    code = f"assert os.environ['AGENTCTL_EFFECT_ID'] == {effect!r}\n"
    outcome = extension(code + "print(json.dumps(told))", code + "print(json.dumps(answer))")
    assert outcome.status == "succeeded", outcome.error


def test_a_secret_that_it_prints_is_cleaned(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE", "hunter-2-secret")
    shout = "print(os.environ['KEY'], file=sys.stderr)\n"
    leak = "answer['output']['key'] = os.environ['KEY']\n" + shout + "print(json.dumps(answer))"
    outcome = extension(invoke=leak, env={"KEY": {"env": "SOURCE"}})
    assert outcome.status == "succeeded"
    assert "hunter" not in canonical([outcome.result, outcome.notes, outcome.error])
    assert outcome.result["key"] == "[REDACTED]"
