"""Warnings about what is allowed to be written and is certain to fail. Pure: no I/O.

A run that meets a denial of its policy fails in that task (contract 4.10), so such a document is valid and is not
refused: it may be meant, and the task may be skipped. Its author is told all the same, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from agentctl.store.policy import Policy, decide_effect, environment_allowed, process_allowed

from .definition import LoadedDocument
from .diagnostics import Diagnostic, Path
from .kinds import EFFECTS
from .plan import CompiledTask, Plan


def certain_denials(document: LoadedDocument, plan: Plan) -> list[Diagnostic]:
    """What the policy of a plan will deny whenever it is reached, as warnings, each place once."""
    policy = Policy.from_json(plan.policy)
    found: dict[tuple[Path, str], Diagnostic] = {}
    places = {task.id: ("spec", "tasks", index) for index, task in enumerate(document.model.spec.tasks)}
    seen: set[tuple[str, str]] = set()
    for task in plan.tasks.values():
        declared = task.expansion.parent if task.expansion is not None else task.id
        if task.uses_kind != "action" or (declared, task.uses_name) in seen:
            continue
        seen.add((declared, task.uses_name))
        for place, message, hint in _denials(policy, plan, task, places.get(declared, ("spec", "tasks"))):
            warning = document.source.diagnostic("policy_denied", message, place, help=hint, severity="warning")
            found.setdefault((place, message), warning)
    return list(found.values())


def _denials(policy: Policy, plan: Plan, task: CompiledTask, path: Path) -> Iterator[tuple[Path, str, str]]:
    """Place, message and remedy of each denial of one task."""
    kind, action = str(task.action_kind), plan.actions.get(task.uses_name, {})
    facts = EFFECTS.get(kind)
    if facts is None:
        return
    decision = decide_effect(
        policy, policy_name=facts.policy_name, effect_class=facts.effect_class, risk=facts.risk, interactive=True
    )
    if decision.denied:
        hint = f"allow {facts.policy_name} under policy, or leave the task out"
        yield (*path, "uses"), f"{task.uses_name!r} will be denied: {decision.reason}", hint
    if kind == "builtin.shell.exec":
        command = action.get("command") or ""
        if not process_allowed(policy, command):
            program = PurePosixPath(command).name
            message = f"the program {program!r} will be denied: it is not in policy.processAllowlist"
            yield ("spec", "actions", task.uses_name, "command"), message, f"processAllowlist: [{program}]"
        environment = task.input.get("env")
        for name in environment if isinstance(environment, dict) else ():
            if not environment_allowed(policy, name):
                message = f"the variable {name!r} will be denied: it is not in policy.environmentAllowlist"
                yield (*path, "with", "env", name), message, f"environmentAllowlist: [{name}]"
    elif kind == "builtin.write" and not policy.writable_roots:
        message = "the write will be denied: policy.writableRoots is empty"
        yield (*path, "uses"), message, "name the folders that may be written: writableRoots: [build]"
