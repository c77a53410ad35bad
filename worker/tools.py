"""What models may call: the built-in tools, and declared actions (contract 1.6 and 3).

A tool call becomes the plan of an effect like that of any task, so paths, programs and hosts are checked by the same
rules. A tool never makes less of itself than the action that it stands for: class and idempotency are those of the
action, and its risk is the greater one of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Final

from agentctl.store.errors import TaskFault
from agentctl.store.records import record

from .attempt import RunSettings, work_of
from .effects import Done, EffectContext, EffectOutcome, EffectPlan, InAnswer, Keeps, Work, kept, prepare
from .providers import ToolSpec

_RISKS: Final = ("low", "medium", "high", "critical")
_FILES: Final = {"builtin.workspace.read": "builtin.read", "builtin.workspace.write": "builtin.write"}


@record
class ToolStep:
    """One tool call. `expected` is what an earlier delivery has recorded as its expected effect, else None."""

    task_id: str
    name: str
    tool: Mapping[str, Any]
    given: dict[str, Any]
    settings: RunSettings
    expected: dict[str, Any] | None


def tool_specs(names: Sequence[str], tools: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """What a model is told of its tools, in the order in which its agent names them."""
    return tuple(ToolSpec(name, tools[name]["description"], tools[name]["inputSchema"]) for name in names)


def tool_keeps(step: ToolStep) -> Keeps | InAnswer | None:
    """What a call leaves that has succeeded before; nothing else of it is looked at again (see `effects.kept`)."""
    return None if step.tool["kind"] == "builtin.echo" else kept(_work(step, _action(step)))


def tool_plan(step: ToolStep) -> EffectPlan:
    """Check a call and describe its effect; nothing is done. Raises `TaskFault` as `effects.prepare` does."""
    tool = step.tool
    if tool["kind"] == "builtin.echo":
        return EffectPlan(
            operation="builtin.echo",
            effect_class="pure",
            risk=tool["risk"],
            idempotency="pure",
            policy_name=tool["capability"],
            input=step.given,
            expected_effect={"changed": False},
            estimate={},
            execute=partial(_echo, step.given),
        )
    action = _action(step)
    plan = prepare(_work(step, action))
    if isinstance(plan, Done):
        kind = action["kind"]
        raise TaskFault("unsupported_capability", f"an action of kind {kind} cannot be a tool: it has no effect")
    risk = max(plan.risk, tool["risk"], key=_RISKS.index)
    execute = plan.execute
    if tool["kind"] == "builtin.workspace.read":
        execute = partial(_reading, step.given["path"], plan.execute)
    elif tool["kind"] == "builtin.workspace.write":
        execute = partial(_writing, step.given["path"], step.given["content"], plan.execute)
    return replace(plan, risk=risk, execute=execute)


def _action(step: ToolStep) -> Mapping[str, Any]:
    """The action behind a tool that is no `builtin.echo`."""
    if step.tool["kind"] in _FILES:
        return {"kind": _FILES[step.tool["kind"]], "with": {}}
    action: Mapping[str, Any] = step.settings.actions[step.tool["action"]]
    return action


def _work(step: ToolStep, action: Mapping[str, Any]) -> Work:
    # Not what is left of the task: the limit may stand in what is recorded, and has to be the same another time.
    seconds = float(min(step.tool["timeoutSeconds"], action.get("timeoutSeconds") or step.tool["timeoutSeconds"]))
    name, given = str(step.tool.get("action") or step.name), {**action["with"], **step.given}
    work = work_of(step.settings, step.task_id, name, action, given, seconds)
    # Always an effect, so that the steps have the same ordinals whatever the files are like when somebody takes over.
    return replace(work, recorded=step.expected, force_effect=True)


def _echo(given: dict[str, Any], context: EffectContext) -> EffectOutcome:
    return EffectOutcome("succeeded", given)


def _reading(path: str, execute: Callable[[EffectContext], EffectOutcome], context: EffectContext) -> EffectOutcome:
    outcome = execute(context)
    if outcome.status != "succeeded" or outcome.result is None:
        return outcome
    content = outcome.result["content"]
    return replace(outcome, result={"path": path, "content": content, **_measured(content)})


def _writing(
    path: str, content: str, execute: Callable[[EffectContext], EffectOutcome], context: EffectContext
) -> EffectOutcome:
    outcome = execute(context)
    if outcome.status != "succeeded":
        return outcome
    return replace(outcome, result={"path": path, **_measured(content)})


def _measured(content: str) -> dict[str, Any]:
    data = content.encode("utf-8")
    return {"bytes": len(data), "sha256": sha256(data).hexdigest()}
