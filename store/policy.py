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
    "long_term_memory.read": "memory.read",
    "long_term_memory.search": "memory.search",
    "long_term_memory.write": "memory.write",
    "mcp.call": "mcp.call",
    "a2a.delegate": "a2a.delegate",
    "agent.instructions.read": "filesystem.read",
}
"""Operation -> the name by which `toolsAllow` and `toolsDeny` know it (contract 3 and 5.1)."""


def policy_name_of(operation: str) -> str:
    """The policy name of an operation. One that is not in the table (a tool of a model) goes by its own name."""
    return POLICY_NAMES.get(operation, operation)


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
