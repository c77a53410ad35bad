"""What a run needs from outside, looked at by the verbs that make one before anything is written (contract 4.10).

Only what the tasks to be executed can reach is looked at: a provider that no such task uses needs no credential. Where
the document has a failed run undone by itself, nobody is there to see that an inverse cannot be carried out, so what
undoes these tasks is looked at with them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentctl.coordinator.diagnostics import Path as Place
    from agentctl.coordinator.plan import CompiledTask, Plan
    from agentctl.store.errors import AgentctlError, PrerequisiteError
    from agentctl.store.policy import Policy
    from agentctl.worker.preflight import Service


def preflight(
    workflow: Mapping[str, Any],
    plan: Plan,
    base: Path,
    tasks: Collection[str] | None = None,
    *,
    offline: bool = False,
) -> None:
    """Raise what would keep the tasks of a plan from talking to their services or from having their secrets.

    `workflow` is the one of the plan, as read or as stored. `tasks` are the ids of those that will be executed; None:
    all. `base` is what `policy.workspaceRoot` is relative to. With `offline` (the global option) any service at all is
    too many; then no name is looked up and no secret is read.

    Raises `PolicyError` (exit 3), `PrerequisiteError` (exit 6) and `UsageError`. Costs nothing without remote services.
    """
    needs = _needs(workflow["spec"], plan, tasks)
    if needs is None:
        return
    if offline:
        _require_no_network(workflow["spec"], needs.agents, needs.actions, needs.names)
    from agentctl.store.clock import SystemClock
    from agentctl.store.policy import Policy
    from agentctl.worker.network import Guard
    from agentctl.worker.preflight import require, require_script

    policy = Policy.from_json(plan.policy)
    workspace = os.path.realpath(os.path.join(base, policy.workspace_root))
    for _, problem in _denied_variables(workflow["spec"], needs, policy, workspace):
        raise problem
    for name in needs.providers:
        require_script(name, workflow["spec"]["providers"][name], policy, workspace)
    guard = Guard(SystemClock().monotonic)
    for _, service in _services(workflow["spec"], needs):
        require(service, policy, workspace, guard, proxy=proxy_for(service.url, plan.policy))


def denials(workflow: Mapping[str, Any], plan: Plan, base: Path) -> Iterator[tuple[Place, AgentctlError]]:
    """What the policy of a plan denies so that its run is refused before it exists: each place of the document, and the
    error of `preflight`. No name is looked up, no file opened and no command started.

    Whether what is allowed can be had is not asked: a check needs none of it.
    """
    needs = _needs(workflow["spec"], plan, None)
    if needs is None:
        return
    from agentctl.store.policy import Policy
    from agentctl.worker.preflight import denials_of

    policy = Policy.from_json(plan.policy)
    workspace = os.path.realpath(os.path.join(base, policy.workspace_root))
    yield from _denied_variables(workflow["spec"], needs, policy, workspace)
    for place, service in _services(workflow["spec"], needs):
        for below, problem in denials_of(service, policy, workspace):
            yield (("spec", *below) if below[:1] == ("policy",) else (*place, *below)), problem


@dataclass(frozen=True, slots=True)
class _Needs:
    """What tasks reach: agents, actions, (kind of action, name) of servers and peers, and model providers."""

    agents: list[str]
    actions: list[str]
    names: set[tuple[str, str]]
    providers: list[str]


def _needs(spec: Mapping[str, Any], plan: Plan, tasks: Collection[str] | None) -> _Needs | None:
    """What tasks and their inverses reach; None if they need nothing that has to be looked at."""
    if not any(spec[place] for place in ("providers", "mcpServers", "a2aPeers")) and not _with_secrets(spec["actions"]):
        return None  # nothing of the kind is declared, and a plan may have many tasks to look through
    executed = [task for task in plan.tasks.values() if tasks is None or task.id in tasks]
    undoing = inverses(plan, executed)
    agents, actions = reached(spec, executed, undoing)
    names = peers_of(spec, executed, actions, undoing)
    providers = providers_of(spec, agents, actions)
    if not providers and not names and not any(spec["actions"][name].get("env") for name in actions):
        return None
    return _Needs(agents, actions, names, providers)


def _denied_variables(
    spec: Mapping[str, Any], needs: _Needs, policy: Policy, workspace: str
) -> Iterator[tuple[Place, AgentctlError]]:
    """The variables of commands that the policy denies, by their name or by where their value comes from."""
    from agentctl.worker.preflight import denied_variable, error_of

    for name in needs.actions:
        for variable, reference in (spec["actions"][name].get("env") or {}).items():
            fault = denied_variable(variable, reference, policy, workspace)
            if fault is not None:
                place = ("spec", "actions", name, "env", variable)
                yield place, error_of(fault, f"the action {name!r}: its env.{variable}")


def _services(spec: Mapping[str, Any], needs: _Needs) -> Iterator[tuple[Place, Service]]:
    """The services that are needed, each with its place in the document."""
    from agentctl.worker.preflight import provider_service

    for name in needs.providers:
        service = provider_service(name, spec["providers"][name])
        if service is not None:
            yield ("spec", "providers", name), service
    for service in services_of(spec, needs.names):
        yield ("spec", "mcpServers" if service.kind == "mcp" else "a2aPeers", service.name), service


def require_offline(workflow: Mapping[str, Any], plan: Plan, open_tasks: Collection[str]) -> None:
    """Raise `PrerequisiteError` when a run that goes on would use the network, which `--offline` forbids.

    Whatever the run has done already is undone with the rest when its compensation is automatic. What it has taken over
    is not; that it counts here refuses too much rather than too little.
    """
    spec = workflow["spec"]
    every = list(plan.tasks.values())
    undoing = inverses(plan, every)
    going_on = [task for task in every if task.id in open_tasks]
    agents, actions = reached(spec, going_on, undoing)
    _require_no_network(spec, agents, actions, peers_of(spec, going_on, actions, undoing))


def refuse_offline(what: str, remedy: str = "leave --offline out") -> PrerequisiteError:
    """The error for something that needs the network."""
    from agentctl.store.errors import PrerequisiteError

    return PrerequisiteError(f"--offline: {what}", remedy=remedy)


def _require_no_network(
    spec: Mapping[str, Any], agents: Collection[str], actions: Collection[str], names: Collection[tuple[str, str]]
) -> None:
    """Raise `PrerequisiteError` (exit 6) that names what would be connected to.

    Decided by kinds, which are known of every task, and not by names, which templates and models may give.
    """
    used = providers_of(spec, agents, actions)
    found = [f"the provider {name!r}" for name in used if spec["providers"][name]["kind"] != "fake"]
    found += [service.what for service in services_of(spec, names)]
    named = {kind for kind, name in names if name in spec[_PLACES[kind][1]]}
    kinds = {kind for kind, _ in names} | {spec["actions"][name]["kind"] for name in actions}
    found += [f"{kind}, for a name that is given later" for kind in sorted(kinds & _PLACES.keys() - named)]
    if found:
        raise refuse_offline(
            f"the network would be used by {', '.join(found)}",
            "leave --offline out, or use a provider of kind fake; nothing was started",
        )


def proxy_for(url: str, policy: Mapping[str, Any]) -> str | None:
    """The proxy of the environment that connections to a URL go through, which then looks the name up, or None."""
    from agentctl.worker.network import proxy_of, target_of

    if not (policy.get("network") or {}).get("allowProxy"):
        return None
    return proxy_of(target_of(url), os.environ)


def _with_secrets(actions: Mapping[str, Any]) -> bool:
    return any(action.get("env") for action in actions.values())


def inverses(plan: Plan, tasks: Iterable[CompiledTask]) -> list[Mapping[str, Any]]:
    """What undoes these tasks without being asked: their `compensate`, if the compensation of the plan is automatic."""
    if plan.compensation["onFailure"] != "automatic":
        return []  # `compensate` looks for itself, before it makes a run
    return [task.compensate for task in tasks if task.compensate is not None]


def reached(
    spec: Mapping[str, Any], tasks: Iterable[CompiledTask], undoing: Iterable[Mapping[str, Any]] = ()
) -> tuple[list[str], list[str]]:
    """The agents and the actions that tasks and their inverses use, those of the agents' tools included; each once, in
    a stable order."""
    agents: set[str] = set()
    actions: set[str] = {inverse["uses"] for inverse in undoing}
    for task in tasks:
        if task.uses_kind == "agent":
            agents.add(task.uses_name)
        elif task.uses_kind == "action":
            actions.add(task.uses_name)
    for name in agents:
        for tool in spec["agents"][name].get("tools") or ():
            action = spec["tools"][tool].get("action")
            if action is not None:
                actions.add(action)
    return sorted(agents), sorted(name for name in actions if name in spec["actions"])


def providers_of(spec: Mapping[str, Any], agents: Iterable[str], actions: Iterable[str]) -> list[str]:
    """The model providers that agents talk to, and that embed for actions; each once, in a stable order."""
    from agentctl.coordinator.peers import embedding_provider

    found = {spec["agents"][name]["provider"] for name in agents}
    for name in actions:
        provider = embedding_provider(spec, spec["actions"][name]["kind"])
        if provider is not None:
            found.add(provider)
    return sorted(found)


_PLACES = {"mcp.call": ("server", "mcpServers", "url"), "a2a.delegate": ("peer", "a2aPeers", "cardUrl")}
"""Action kind to the field that names the service, where services are declared, and the field with their URL."""


def peers_of(
    spec: Mapping[str, Any],
    tasks: Iterable[CompiledTask],
    actions: Collection[str],
    undoing: Iterable[Mapping[str, Any]] = (),
) -> set[tuple[str, str]]:
    """(kind of action, name) of the MCP servers and A2A peers that tasks, their inverses and actions call."""
    found: set[tuple[str, str]] = set()
    called = [(task.action_kind, task.input) for task in tasks]
    called += [(inverse["actionKind"], inverse["input"]) for inverse in undoing]
    for kind, arguments in called:
        if kind is not None and kind in _PLACES:
            found.add((kind, str(arguments.get(_PLACES[kind][0]))))
    for name in actions:
        action = spec["actions"][name]
        if action["kind"] in _PLACES and (given := (action.get("with") or {}).get(_PLACES[action["kind"]][0])):
            found.add((action["kind"], str(given)))
    return found


def services_of(spec: Mapping[str, Any], names: Collection[tuple[str, str]]) -> Iterator[Service]:
    """The declared servers and peers of these names."""
    from agentctl.worker.preflight import Service

    for kind, name in sorted(names):
        _, place, field = _PLACES[kind]
        declared = spec[place].get(name)
        if declared is not None:  # a name that only a template gives is checked where it is used
            secrets = {f"headers.{header}": item for header, item in (declared.get("headers") or {}).items()}
            yield Service(name, "mcp" if kind == "mcp.call" else "a2a", declared[field], secrets)
