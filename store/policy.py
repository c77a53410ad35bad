"""What a run may do: the one place where policy is decided. Pure: no I/O.

Two kinds of questions are answered here. *Static* ones (paths, programs, environment names) are asked
before an effect exists; their refusal leaves no effect row. *Decisions* (`decide_effect`) are asked once
for each effect that is about to be requested, in the order of contract 11.1.

The path rules take paths whose symbolic links the caller has resolved already; resolving is I/O and lives
with the effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from posixpath import basename
from typing import Any, Final

from .errors import TaskFault

MUTATION_EXEMPT: Final = frozenset({"pure", "observe", "internal_state", "network", "model"})
"""Effect classes that approval mode `mutations` lets pass. Every other class, an unknown one included, is
gated."""

HIGH_RISKS: Final = frozenset({"high", "critical"})

POLICY_NAMES: Final = {
    "builtin.memory.write": "memory.write",
    "builtin.long_term_memory.promote": "memory.promote",
    "builtin.read": "filesystem.read",
    "builtin.write": "filesystem.write",
    "builtin.shell.exec": "process.exec",
    "extension.process": "extension.process",
    "builtin.long_term_memory.read": "memory.read",
    "builtin.long_term_memory.search": "memory.search",
    "builtin.long_term_memory.write": "memory.write",
    "mcp.call": "mcp.call",
    "a2a.delegate": "a2a.delegate",
    "agent.instructions.read": "filesystem.read",
}
"""Operation -> the name by which `toolsAllow` and `toolsDeny` know it (contract 3 and 5.1)."""


def policy_name_of(operation: str) -> str:
    """The policy name of an operation. One that is not in the table goes by its own name (see `tool_policy_name`)."""
    return POLICY_NAMES.get(operation, operation)


def tool_policy_name(policy: Policy, capability: str, tool: str) -> str:
    """The name of a tool that the policy speaks of: a denial counts by any of its names, an allowance as well.

    Names are its capability (`filesystem.write`), its own, and that of its operation (`tool.NAME`).
    """
    names = (capability, tool, f"tool.{tool}")
    for rules in (policy.tools_deny, policy.tools_allow):
        for name in names:
            if name in rules:
                return name
    return capability


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """`policy.network` of contract 1.8. Times in seconds, sizes in bytes."""

    allowed_schemes: tuple[str, ...] = ("https", "http")
    allowed_ports: tuple[int, ...] = ()
    allow_private: bool = False
    allow_proxy: bool = False
    custom_ca: Mapping[str, Any] | None = None
    connect_timeout_seconds: int = 10
    max_response_bytes: int = 8_388_608

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NetworkPolicy:
        """Read the camelCase form of a compiled plan; what is missing has the default of contract 1.8."""
        default = cls()
        return cls(
            allowed_schemes=tuple(data.get("allowedSchemes", default.allowed_schemes)),
            allowed_ports=tuple(data.get("allowedPorts", ())),
            allow_private=bool(data.get("allowPrivate", False)),
            allow_proxy=bool(data.get("allowProxy", False)),
            custom_ca=data.get("customCa"),
            connect_timeout_seconds=data.get("connectTimeoutSeconds", default.connect_timeout_seconds),
            max_response_bytes=data.get("maxResponseBytes", default.max_response_bytes),
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """`spec.policy` of a compiled plan (contract 1.8, and `maxArtifactBytes` of contract row 4)."""

    workspace_root: str = "."
    writable_roots: tuple[str, ...] = ()
    environment_allowlist: frozenset[str] = frozenset()
    network_allowlist: tuple[str, ...] = ()
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    process_allowlist: frozenset[str] = frozenset()
    secret_file_roots: tuple[str, ...] = ()
    secret_process_allowlist: frozenset[str] = frozenset()
    providers: frozenset[str] = frozenset()
    tools_allow: frozenset[str] = frozenset()
    tools_deny: frozenset[str] = frozenset()
    approval: str = "mutations"
    non_interactive: str = "pause"
    max_artifact_bytes: int = 1_073_741_824

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Policy:
        """Read the camelCase form of a compiled plan; what is missing has the default of contract 1.8."""
        return cls(
            workspace_root=data.get("workspaceRoot", "."),
            writable_roots=tuple(data.get("writableRoots", ())),
            environment_allowlist=frozenset(data.get("environmentAllowlist", ())),
            network_allowlist=tuple(data.get("networkAllowlist", ())),
            network=NetworkPolicy.from_json(data.get("network") or {}),
            process_allowlist=frozenset(data.get("processAllowlist", ())),
            secret_file_roots=tuple(data.get("secretFileRoots", ())),
            secret_process_allowlist=frozenset(data.get("secretProcessAllowlist", ())),
            providers=frozenset(data.get("providers", ())),
            tools_allow=frozenset(data.get("toolsAllow", ())),
            tools_deny=frozenset(data.get("toolsDeny", ())),
            approval=data.get("approval", "mutations"),
            non_interactive=data.get("nonInteractive", "pause"),
            max_artifact_bytes=data.get("maxArtifactBytes", 1_073_741_824),
        )


class Verdict(StrEnum):
    """What policy says about one effect."""

    ALLOW = "allow"
    DENY = "deny"
    APPROVE = "approve"


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, and why: `reason` is a sentence for people (kept in approvals, errors and the audit)."""

    verdict: Verdict
    reason: str

    @property
    def allowed(self) -> bool:
        return self.verdict is Verdict.ALLOW

    @property
    def denied(self) -> bool:
        return self.verdict is Verdict.DENY

    @property
    def needs_approval(self) -> bool:
        return self.verdict is Verdict.APPROVE


def decide_effect(
    policy: Policy,
    *,
    policy_name: str,
    effect_class: str,
    risk: str,
    provider: str | None = None,
    tool_approval: str = "policy",
    interactive: bool = False,
) -> Decision:
    """Decide one effect in the order of contract 11.1.

    `policy_name` is what `toolsAllow` and `toolsDeny` name (`filesystem.write`, `process.exec`, …). A model
    effect (`effect_class` `model`) is checked against `providers` by its provider key instead.
    `tool_approval` is the `approval` of a model's tool: `always` adds an approval, nothing takes one away.
    `interactive` says that a person can be asked now, so `nonInteractive` does not apply.
    """
    if effect_class == "model":
        if policy.providers and provider not in policy.providers:
            return Decision(Verdict.DENY, f"provider {provider!r} is not in policy.providers")
    elif policy_name in policy.tools_deny:
        return Decision(Verdict.DENY, f"{policy_name} is in policy.toolsDeny")
    elif policy.tools_allow and policy_name not in policy.tools_allow:
        return Decision(Verdict.DENY, f"{policy_name} is not in policy.toolsAllow")

    why = _why_approval(policy.approval, effect_class, risk, tool_approval)
    if why is None:
        return Decision(Verdict.ALLOW, f"approval mode {policy.approval} does not gate {effect_class}")
    if interactive or policy.non_interactive == "pause":
        return Decision(Verdict.APPROVE, why)
    return Decision(Verdict.DENY, f"{why}, and policy.nonInteractive is {policy.non_interactive}")


def _why_approval(mode: str, effect_class: str, risk: str, tool_approval: str) -> str | None:
    if mode == "always":
        return "approval mode always gates every effect"
    if mode == "high_risk" and risk in HIGH_RISKS:
        return f"approval mode high_risk gates risk {risk}"
    if mode == "mutations" and effect_class not in MUTATION_EXEMPT:
        return f"approval mode mutations gates {effect_class}"
    if tool_approval == "always":
        return "the tool asks for approval always"
    return None


def refuse_dotdot(path: str) -> None:
    """Raise `policy_denied` when a component of `path` is `..`, wherever it would lead (contract 11.2)."""
    if ".." in path.split("/"):
        raise TaskFault("policy_denied", f"the path {path!r} has a '..' component", details={"path": path})


def is_inside(resolved: str, root: str) -> bool:
    """Whether `resolved` is `root` or below it. Both are absolute and free of symbolic links and `..`."""
    prefix = root.rstrip("/") + "/"
    return (resolved + "/").startswith(prefix)


def readable(resolved: str, workspace: str) -> bool:
    """Whether a resolved path may be read: it is under the resolved workspace (contract 11.2)."""
    return is_inside(resolved, workspace)


def writable(resolved: str, writable_roots: Iterable[str]) -> bool:
    """Whether a resolved path may be written: it is under a resolved writable root. No roots: never
    (contract 1.8)."""
    return any(is_inside(resolved, root) for root in writable_roots)


def process_allowed(policy: Policy, command: str) -> bool:
    """Whether the basename of `command` equals an entry of `processAllowlist` (contract 11.2). Not a
    sandbox."""
    name = basename(command)
    return bool(name) and name in policy.process_allowlist


def secret_process_allowed(policy: Policy, command: str) -> bool:
    """The same for a command that yields a secret: `secretProcessAllowlist`."""
    name = basename(command)
    return bool(name) and name in policy.secret_process_allowlist


def environment_allowed(policy: Policy, name: str) -> bool:
    """Whether a process action may set (or take a secret from) the variable `name` (contract 11.2)."""
    return name in policy.environment_allowlist


# -- network -----------------------------------------------------------------------------------------------------------

_SPECIAL: Final[tuple[tuple[IPv4Network | IPv6Network, str], ...]] = tuple(
    (ip_network(text), kind)
    for text, kind in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmark"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("2001:2::/48", "benchmark"),
        ("2001:db8::/32", "documentation"),
        ("2001::/23", "reserved"),
        ("3fff::/20", "documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("ff00::/8", "multicast"),
    )
)
"""Blocks that are no public address, the narrower one first (IANA's special-purpose registries). Written out, since
`is_global` of Python answers differently from release to release."""

_PUBLIC_V6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")
_6TO4: Final = IPv6Network("2002::/16")


def special_address(text: str) -> str | None:
    """Why an address is no public one (`private`, `loopback`, …), None for a public one. Raises ValueError.

    An IPv4 address that is wrapped in an IPv6 one is judged by itself, so wrapping hides nothing.
    """
    address: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        inner = _wrapped(address)
        if inner is not None:
            return special_address(str(inner))
    for block, kind in _SPECIAL:
        if address.version == block.version and address in block:
            return kind
    if isinstance(address, IPv6Address) and address not in _PUBLIC_V6:
        return "reserved"
    return None


def _wrapped(address: IPv6Address) -> IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    if address in _6TO4:
        return IPv4Address((int(address) >> 80) & 0xFFFF_FFFF)
    return None


def host_name(text: str) -> str:
    """A host as rules compare it: lower case, ASCII, without brackets and the dot at the end; "" if it is no name."""
    host = text.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        return ""


def host_allowed(policy: Policy, host: str) -> bool:
    """Whether `networkAllowlist` has this host, or a `*.suffix` that it is below; never the apex (contract 1.8)."""
    name = host_name(host)
    if not name:
        return False
    literal = _is_address(name)
    for entry in policy.network_allowlist:
        if entry.startswith("*."):
            suffix = host_name(entry[2:])
            if suffix and not literal and name.endswith("." + suffix):
                return True
        elif host_name(entry) == name:
            return True
    return False


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def decide_connection(
    policy: Policy, *, scheme: str, host: str, port: int, addresses: Iterable[str] | None = None
) -> Decision:
    """Decide whether a connection may be made (contract 11.2). The one place for providers, MCP and A2A.

    Without `addresses` it judges the name, the scheme and the port: asked before the name is resolved, since a lookup
    tells the name to others. With them it judges every one: one that is not allowed refuses all.
    """
    network = policy.network
    if scheme not in ("http", "https") or scheme not in network.allowed_schemes:
        return Decision(Verdict.DENY, f"the scheme {scheme!r} is not in policy.network.allowedSchemes")
    if network.allowed_ports and port not in network.allowed_ports:
        return Decision(Verdict.DENY, f"the port {port} is not in policy.network.allowedPorts")
    if not host_allowed(policy, host):
        return Decision(Verdict.DENY, f"the host {host!r} is not in policy.networkAllowlist")
    for address in () if network.allow_private or addresses is None else addresses:
        kind = special_address(address)
        if kind is not None:
            reason = f"the host {host!r} has the address {address} ({kind}), and policy.network.allowPrivate is false"
            return Decision(Verdict.DENY, reason)
    return Decision(Verdict.ALLOW, f"the host {host!r} is in policy.networkAllowlist")
