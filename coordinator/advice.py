"""Warnings about what is allowed to be written and is certain to fail. Pure: no I/O.

A run that meets a denial of its policy fails in that task (contract 4.10), so such a document is valid and is not
refused: it may be meant, and the task may be skipped. Its author is told all the same, before anything runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import PurePosixPath
from typing import Any

from agentctl.store.policy import POLICY_NAMES, Policy, environment_allowed, process_allowed
from agentctl.store.states import may_repeat

from .definition import LoadedDocument
from .diagnostics import MAX_DIAGNOSTICS, Diagnostic, Path, did_you_mean
from .kinds import EFFECTS, decision_on
from .plan import CompiledTask, Plan
from .readings import strings_in
from .subworkflows import flatten


def certain_denials(document: LoadedDocument, plan: Plan) -> list[Diagnostic]:
    """What the policy of a plan will deny whenever it is reached, as warnings, each place once."""
    policy = Policy.from_json(plan.policy)
    found: dict[tuple[Path, str], Diagnostic] = {}
    places: dict[str, Path] = {}
    seen: set[tuple[str, str]] = set()
    for task in plan.tasks.values():
        declared = task.expansion.parent if task.expansion is not None else task.id
        if task.uses_kind not in ("action", "agent") or (declared, task.uses_name) in seen:
            continue
        seen.add((declared, task.uses_name))
        found_here = _agent_denials if task.uses_kind == "agent" else _denials
        denials: list[tuple[Path, Path, Path, str, str]] = [((), *denial) for denial in found_here(policy, plan, task)]
        if task.compensate is not None:
            inverse = _inverse(task, task.compensate)
            denials += [(("compensate",), *denial) for denial in _denials(policy, plan, inverse)]
        for inside, base, below, message, hint in denials:
            if not base and not places:
                places = places_of_tasks(document)
            place = (*(base or (*places[declared], *inside)), *below)
            warning = document.source.diagnostic("policy_denied", message, place, help=hint, severity="warning")
            found.setdefault((place, message), warning)
    return list(found.values())


def places_of_tasks(document: LoadedDocument) -> dict[str, Path]:
    """Where each task of a plan is declared, those of sub-workflows too; not the children of expansions."""
    spec = document.model.spec
    return {item.task.id: item.path for item in flatten(spec, lambda *_, **__: None, document.source.locate)}


def never_called(document: LoadedDocument) -> list[Diagnostic]:
    """A warning for each sub-workflow that no task calls, not even from another one that is called."""
    spec = document.model.spec
    if not spec.subworkflows:
        return []
    reached: set[str] = set()
    pending = list(spec.tasks)
    while pending:
        name = pending.pop().uses.removeprefix("workflow:")
        if name in spec.subworkflows and name not in reached:
            reached.add(name)
            pending += spec.subworkflows[name].tasks
    return [
        document.source.diagnostic(
            "schema_violation",
            f"the sub-workflow {name!r} is never called",
            ("spec", "subworkflows", name),
            help=f"call it with uses: workflow:{name}, or leave it out",
            key=True,
            severity="warning",
        )
        for name in spec.subworkflows
        if name not in reached
    ]


def idle_denials(document: LoadedDocument) -> list[Diagnostic]:
    """A warning for each entry of `policy.toolsDeny` that denies no effect: a slip there lets pass what was meant."""
    spec = document.model.spec
    known = {*POLICY_NAMES.values(), "internal"}
    for name, tool in spec.tools.items():
        known |= {name, f"tool.{name}", tool.capability}
    meant = {**POLICY_NAMES, **{kind: facts.policy_name for kind, facts in EFFECTS.items()}}
    return [
        document.source.diagnostic(
            "missing_reference",
            f"{item!r} in policy.toolsDeny denies no effect: the policy knows none by that name",
            ("spec", "policy", "toolsDeny", index),
            help=f"write {meant[item]}" if item in meant else did_you_mean(item, known, else_list="names"),
            severity="warning",
        )
        for index, item in enumerate(spec.policy.tools_deny)
        if item not in known
    ]


_READ = r"(?:inputs|vars|memory|tasks)\.[\w.-]+"
_SLIP = re.compile(rf"(?<!\$)\{{\{{\s*(?P<double>{_READ})\s*\}}\}}|\$\{{\s*(?P<dollar>{_READ})\s*\}}")
"""A template as other programs spell it."""


def foreign_templates(document: LoadedDocument) -> list[Diagnostic]:
    """A warning for each text with something that looks like a template and is none: it stays as it is written."""
    found: list[Diagnostic] = []
    spec: Mapping[str, Any] = document.workflow["spec"]
    for field in ("agents", "actions", "tasks", "subworkflows", "outputs"):
        for place, text in strings_in(spec.get(field), ("spec", field)):
            slip = _SLIP.search(text) if "{" in text and len(found) < MAX_DIAGNOSTICS else None
            if slip is not None:
                path = slip["double"] or slip["dollar"]
                message = f"{slip[0]!r} is no template and stays as it is"
                hint = f"write ${{{{ {path} }}}} if the value is meant"
                found.append(
                    document.source.diagnostic("invalid_template", message, place, help=hint, severity="warning")
                )
    return found


def repeated_calls(document: LoadedDocument, plan: Plan) -> list[Diagnostic]:
    """A warning for each tool of the plan that may be called again although calling it twice is not known to be safe.

    `retrySafe` is a permission of its own (contract 1.6): the author may know better. Both fields are named, so that
    nobody gives it by the way.
    """
    return [
        document.source.diagnostic(
            "schema_violation",
            f"retrySafe: true lets a retry of the task call the tool {name!r} again, though its idempotency is "
            f"{tool['idempotency']}: what it does may be done twice",
            ("spec", "tools", name, "retrySafe"),
            help="retrySafe: false, or idempotency: idempotent (of its action, too) if a second call changes nothing",
            severity="warning",
        )
        for name, tool in sorted(plan.tools.items())
        if tool["retrySafe"] and not may_repeat(tool["effectClass"], tool["idempotency"])
    ]


def _agent_denials(policy: Policy, plan: Plan, task: CompiledTask) -> Iterator[tuple[Path, Path, str, str]]:
    """The same for a task of an agent: its provider, and tools that can never be called."""
    agent, place = plan.agents[task.uses_name], ("spec", "agents", task.uses_name)
    provider = agent["provider"]
    if policy.providers and provider not in policy.providers:
        message = f"the provider {provider!r} will be denied: it is not in policy.providers"
        yield place, ("provider",), message, f"providers: [{provider}]"
    for index, name in enumerate(agent["tools"]):
        tool = plan.tools[name]
        names = {tool["capability"], name, f"tool.{name}"}
        if names & policy.tools_deny or (policy.tools_allow and not names & policy.tools_allow):
            hint = f"allow {tool['capability']} under policy, or leave the tool out"
            yield place, ("tools", index), f"calls of the tool {name!r} will be denied by the policy", hint
        elif tool["kind"] == "builtin.workspace.write" and not policy.writable_roots:
            message = f"calls of the tool {name!r} will be denied: policy.writableRoots is empty"
            hint = "name the folders that may be written: writableRoots: [build]"
            yield place, ("tools", index), message, hint
        elif tool.get("action") is not None:
            action = plan.actions[tool["action"]]
            asked = dict.fromkeys(tool["inputSchema"].get("properties") or ())  # only the model knows them
            given = {**(action.get("with") or {}), **asked}
            for base, below, message, hint in _fixed_denials(policy, action, tool["action"], action["kind"], given):
                of_tool = (place, ("tools", index), f"calls of the tool {name!r}: {message}", hint)
                yield (base, below, message, hint) if base else of_tool


def _inverse(task: CompiledTask, declared: dict[str, Any]) -> CompiledTask:
    """What undoes a task, as the task that it will be."""
    names = {"uses_name": declared["uses"], "action_kind": declared["actionKind"], "input": declared["input"]}
    return replace(task, **names)


def _denials(policy: Policy, plan: Plan, task: CompiledTask) -> Iterator[tuple[Path, Path, str, str]]:
    """Place, message and remedy of each denial of one task. The place has two parts; the first is empty for the task's.

    So the places of tasks are looked up only where one is needed.
    """
    kind, action = str(task.action_kind), plan.actions.get(task.uses_name, {})
    decision = decision_on(policy, kind, interactive=True)
    if decision is None:
        return
    if decision.denied:
        hint = f"allow {EFFECTS[kind].policy_name} under policy, or leave the task out"
        yield (), ("uses",), f"{task.uses_name!r} will be denied: {decision.reason}", hint
    yield from _fixed_denials(policy, action, task.uses_name, kind, task.input)


def _fixed_denials(
    policy: Policy, action: Mapping[str, Any], name: str, kind: str, given: Mapping[str, Any]
) -> Iterator[tuple[Path, Path, str, str]]:
    """The denials that follow from what an action is and from the input `given` to it, whoever uses it.

    The secrets and variables that the action itself declares are left to those who refuse to begin such a run.
    """
    declared: Path = ("spec", "actions", name)
    if kind in ("builtin.shell.exec", "extension.process"):
        command = action.get("command") or ""
        if not process_allowed(policy, command):
            program = PurePosixPath(command).name
            message = f"the program {program!r} will be denied: it is not in policy.processAllowlist"
            hint = _longer("processAllowlist", policy.process_allowlist, program)
            words = command.split()
            if len(words) > 1 and process_allowed(policy, words[0]):
                message = f"the program {program!r} will be denied: no shell takes apart what stands in command"
                hint = f"command: {words[0]}, and the rest as args, one text for each"
            yield declared, ("command",), message, hint
    if kind == "builtin.shell.exec":
        environment = given.get("env")
        for variable in environment if isinstance(environment, dict) else ():
            if not environment_allowed(policy, variable):
                message = f"the variable {variable!r} will be denied: it is not in policy.environmentAllowlist"
                hint = _longer("environmentAllowlist", policy.environment_allowlist, variable)
                yield (), ("with", "env", variable), message, hint
        base: Path = () if "artifacts" in given else declared
        patterns = given.get("artifacts", action.get("artifacts"))
        for place, pattern in enumerate(patterns if isinstance(patterns, list) else ()):
            if isinstance(pattern, str) and _out_of_reach(pattern, policy.writable_roots):
                below: Path = ("artifacts", place) if base else ("with", "artifacts", place)
                message = f"the artifact {pattern!r} will be denied: it lies under none of policy.writableRoots"
                hint = _longer("writableRoots", policy.writable_roots, str(PurePosixPath(pattern).parent))
                yield base, below, message, hint
    elif kind == "builtin.write" and not policy.writable_roots:
        message = "the write will be denied: policy.writableRoots is empty"
        yield (), ("uses",), message, "name the folders that may be written: writableRoots: [build]"
    elif kind == "builtin.write":
        written = given.get("path")
        if isinstance(written, str) and _out_of_reach(written, policy.writable_roots):
            message = f"the write of {written!r} will be denied: it lies under none of policy.writableRoots"
            hint = f"write under {', '.join(policy.writable_roots)}, or name its folder in writableRoots"
            in_task = written != (action.get("with") or {}).get("path")
            yield () if in_task else declared, ("with", "path"), message, hint


def _longer(field: str, allowed: Collection[str], name: str) -> str:
    """A list of the policy as it should be: what it has, and this name."""
    return f"{field}: [{', '.join([*sorted(allowed), name])}]"


def _out_of_reach(name: str, roots: tuple[str, ...]) -> bool:
    """Whether a path or glob lies, by its text, under no writable root. Templates are known to the run only."""
    if "${{" in name or any("${{" in root for root in roots):
        return False
    fixed = list(takewhile(lambda part: not set(part) & set("*?["), PurePosixPath(name).parts))
    whole = len(fixed) == len(PurePosixPath(name).parts)
    absolute = name.startswith("/")
    for root in roots:
        if root.startswith("/") is not absolute:
            return False
        parts = PurePosixPath(root).parts
        if ".." in parts or fixed[: len(parts)] == list(parts) or (not whole and list(parts[: len(fixed)]) == fixed):
            return False
    return True
