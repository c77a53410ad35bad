"""What a run needs from outside, looked at before it exists: nothing is sent, and nothing is written (contract 4.10).

Of each remote service: the library of its extra is installed, the policy allows its address, its secrets can be had,
its name has addresses and the policy allows every one of them. In this order, so that no name is looked up and no
secret is read for what the policy denies anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from agentctl.store.errors import AgentctlError, PolicyError, PrerequisiteError, TaskFault, UsageError
from agentctl.store.policy import Policy

from .network import (
    ConnectionDenied,
    Guard,
    NetworkFault,
    ProxyUnusable,
    Resolver,
    Target,
    checked_addresses,
    require_allowed,
    require_proxy,
    system_resolver,
    target_of,
)
from .providers import ProviderFault
from .providers.exchange import credential_of, endpoint_of, is_default, missing_extra

Secrets: TypeAlias = Mapping[str, Mapping[str, Any]]
ServiceKind: TypeAlias = Literal["provider", "mcp", "a2a"]

_ACTIONS: Final = {"mcp": "mcp.call", "a2a": "a2a.delegate"}
"""Kind of service to the kind of action that calls it."""


@dataclass(frozen=True, slots=True)
class Service:
    """A remote service that a run will talk to: what it is called in the document, where it is, which secrets it
    takes. `provider_kind` is set for model providers."""

    name: str
    kind: ServiceKind
    url: str
    secrets: Secrets = field(default_factory=dict)
    provider_kind: str | None = None

    @property
    def what(self) -> str:
        """For messages."""
        return {"provider": "the provider", "mcp": "the MCP server", "a2a": "the A2A peer"}[
            self.kind
        ] + f" {self.name!r}"


def provider_service(name: str, definition: Mapping[str, Any]) -> Service | None:
    """The service behind an entry of `spec.providers`; None for one that needs nothing from outside.

    Raises `UsageError` when its endpoint is no address.
    """
    kind = definition["kind"]
    if kind == "fake":
        return None
    try:
        url = endpoint_of(kind, definition)
    except ProviderFault as fault:
        raise UsageError(
            f"the provider {name!r}: {fault.message}", remedy=f"see spec.providers.{name}.endpoint"
        ) from fault
    secrets = {f"headers.{header}": item for header, item in (definition.get("headers") or {}).items()}
    credential = credential_of(kind, definition)
    if credential is not None:
        secrets["credential"] = credential
    return Service(name, "provider", url, secrets, kind)


def require_script(name: str, definition: Mapping[str, Any], policy: Policy, workspace: str) -> None:
    """Raise what would keep the script of a provider of kind fake from being played: `PolicyError` (exit 3) when it
    lies where it must not, else `PrerequisiteError` (exit 6)."""
    if definition["kind"] != "fake" or definition.get("script") is None:
        return
    from .providers.script import read_script

    try:
        read_script(str(definition["script"]), policy, workspace)
    except TaskFault as fault:
        message = f"the provider {name!r}: its script {definition['script']!r}: {fault.message}"
        if fault.code == "policy_denied":
            remedy = "a script lies in the workspace, and its log under policy.writableRoots"
            raise PolicyError(message, remedy=remedy) from fault
        remedy = f"see spec.providers.{name}.script; nothing was started"
        raise PrerequisiteError(message, remedy=remedy) from fault


def require(
    service: Service,
    policy: Policy,
    workspace: str,
    guard: Guard,
    *,
    resolver: Resolver = system_resolver,
    proxy: str | None = None,
) -> None:
    """Raise what would keep a run from talking to a service.

    `PolicyError` (exit 3): its address or a secret is denied. `PrerequisiteError` (exit 6): no library, no secret, no
    address for its name. `UsageError`: its URL is none. With `proxy`, the one of the environment, that looks names up.
    """
    _require_library(service)
    try:
        target = target_of(service.url)
    except ValueError as error:
        raise UsageError(f"{service.what}: its URL: {error}", remedy="write an absolute http or https URL") from error
    try:
        require_allowed(policy, target)
        for problem in secret_problems(service, policy, workspace):
            raise problem
        if proxy is None:
            checked_addresses(policy, target, guard=guard, resolver=resolver)
        else:
            require_proxy(proxy)
    except ConnectionDenied as error:
        raise PolicyError(f"{service.what} will be denied: {error.message}", remedy=_allow(target)) from error
    except ProxyUnusable as error:
        raise PrerequisiteError(
            f"{service.what} cannot be reached: {error.message}",
            remedy="name another one (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY), or none (NO_PROXY); nothing was started",
        ) from error
    except NetworkFault as error:
        raise PrerequisiteError(
            f"{service.what} cannot be reached: {error.message}",
            remedy="check the name and the network; nothing has been started",
        ) from error


def secret_problems(service: Service, policy: Policy, workspace: str) -> Iterator[AgentctlError]:
    """What keeps the secrets of a service from being read, one error for each; their values are forgotten at once."""
    for place, reference in service.secrets.items():
        problem = secret_problem(reference, policy, workspace, service.provider_kind)
        if problem is not None:
            where = f"{service.what}: its {place}"
            yield error_of(problem, where)
    if policy.network.custom_ca is not None:
        problem = _ca_problem(policy, workspace)
        if problem is not None:
            yield error_of(problem, "policy.network.customCa")


def secret_problem(
    reference: Mapping[str, Any], policy: Policy, workspace: str, provider_kind: str | None = None
) -> TaskFault | None:
    """Why a secret cannot be read, or None. `policy_denied`, `secret_unavailable` or `invalid_input`."""
    from .effects.secret_values import from_variable, resolve_secret

    try:
        if provider_kind is not None and is_default(provider_kind, reference):
            secret = from_variable(reference["env"])
        else:
            secret = resolve_secret(reference, policy, workspace)
        secret.as_header()
    except TaskFault as fault:
        return fault
    return None


def denied_variable(name: str, reference: Mapping[str, Any], policy: Policy, workspace: str) -> TaskFault | None:
    """Why the policy denies a variable of a command, its name or its secret, or None. Whether the secret can be had is
    found where the command runs."""
    from .effects.secret_values import require_variable

    try:
        require_variable(policy, name)
    except TaskFault as fault:
        return fault
    return _denied_secret(reference, policy, workspace)


def denials_of(service: Service, policy: Policy, workspace: str) -> Iterator[tuple[tuple[str, ...], PolicyError]]:
    """What the policy denies of a service, judged without a look at anything outside: each place below the service's,
    or the one of `policy`, and the error of `require`. An address that is none is found by `require`."""
    try:
        target = target_of(service.url)
        require_allowed(policy, target)
    except ConnectionDenied as error:
        yield (), PolicyError(f"{service.what} will be denied: {error.message}", remedy=_allow(target))
    except ValueError:
        pass
    for place, reference in service.secrets.items():
        if service.provider_kind is not None and is_default(service.provider_kind, reference):
            continue
        fault = _denied_secret(reference, policy, workspace)
        if fault is not None:
            yield tuple(place.split(".", 1)), _policy_error(fault, f"{service.what}: its {place}")
    if policy.network.custom_ca is not None:
        fault = _denied_secret(policy.network.custom_ca, policy, workspace)
        if fault is not None:
            place = "policy.network.customCa"
            yield tuple(place.split(".")), _policy_error(fault, f"{service.what}: {place}")


def _denied_secret(reference: Mapping[str, Any], policy: Policy, workspace: str) -> TaskFault | None:
    from .effects.secret_values import require_permitted

    try:
        require_permitted(reference, policy, workspace)
    except TaskFault as fault:
        return fault
    return None


def _ca_problem(policy: Policy, workspace: str) -> TaskFault | None:
    from .effects.secret_values import resolve_secret
    from .network import tls_context

    assert policy.network.custom_ca is not None
    try:
        tls_context(resolve_secret(policy.network.custom_ca, policy, workspace).value)
    except TaskFault as fault:
        return fault
    except ValueError as error:
        return TaskFault("secret_unavailable", str(error))
    return None


def error_of(fault: TaskFault, where: str) -> AgentctlError:
    """The error for a secret that cannot be had: `PolicyError` (exit 3) or `PrerequisiteError` (exit 6)."""
    if fault.code == "policy_denied":
        return _policy_error(fault, where)
    remedy = "provide the secret where the reference points; nothing was started"
    return PrerequisiteError(f"{where}: {fault.message}", remedy=remedy)


def _policy_error(fault: TaskFault, where: str) -> PolicyError:
    general = "allow it under policy (environmentAllowlist, secretFileRoots, …)"
    return PolicyError(f"{where}: {fault.message}", remedy=(fault.details or {}).get("remediation", general))


def _require_library(service: Service) -> None:
    from importlib.util import find_spec

    if service.kind == "provider":
        if find_spec("httpx") is None:
            message = missing_extra(str(service.provider_kind))
            raise PrerequisiteError(f"{service.what}: {message}", remedy=message.partition(": ")[2])
        return
    from .effects import remote

    extra = remote.missing_extra(_ACTIONS[service.kind])
    if extra is not None:
        remedy = f"pip install 'agentctl[{extra}]'"
        raise PrerequisiteError(f"{service.what} needs the extra {extra}, which is not installed", remedy=remedy)


def _allow(target: Target) -> str:
    return (
        f"allow it under policy: networkAllowlist: [{target.host}], and in policy.network its scheme, port or "
        "allowPrivate, if it is meant"
    )
