"""Decisions and static rules of policy, by the table of contract 11."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from agentctl.store.errors import TaskFault
from agentctl.store.policy import (
    Decision,
    Policy,
    Verdict,
    decide_effect,
    environment_allowed,
    is_inside,
    process_allowed,
    readable,
    refuse_dotdot,
    secret_process_allowed,
    writable,
)

CLASSES = (
    "pure",
    "observe",
    "internal_state",
    "workspace_mutate",
    "external_mutate",
    "process_execution",
    "network",
    "model",
    "remote_agent",
)
GATED = {"workspace_mutate", "external_mutate", "process_execution", "remote_agent"}


def decide(policy: dict[str, Any], **overrides: Any) -> Decision:
    question: dict[str, Any] = {"policy_name": "process.exec", "effect_class": "process_execution", "risk": "high"}
    return decide_effect(Policy.from_json(policy), **(question | overrides))


def test_defaults_are_those_of_the_contract() -> None:
    policy = Policy.from_json({})
    assert policy == Policy()
    assert policy.workspace_root == "."
    assert policy.writable_roots == ()
    assert policy.approval == "mutations"
    assert policy.non_interactive == "pause"
    assert policy.max_artifact_bytes == 1 << 30
    assert policy.network.allowed_schemes == ("https", "http")
    assert policy.network.connect_timeout_seconds == 10
    assert policy.network.max_response_bytes == 8 << 20


def test_every_field_is_read() -> None:
    policy = Policy.from_json(
        {
            "workspaceRoot": "w",
            "writableRoots": ["out"],
            "environmentAllowlist": ["A"],
            "networkAllowlist": ["example.org"],
            "network": {
                "allowedSchemes": ["https"],
                "allowedPorts": [443],
                "allowPrivate": True,
                "allowProxy": True,
                "customCa": {"env": "CA"},
                "connectTimeoutSeconds": 3,
                "maxResponseBytes": 9,
            },
            "processAllowlist": ["sh"],
            "secretFileRoots": ["s"],
            "secretProcessAllowlist": ["pass"],
            "providers": ["p"],
            "toolsAllow": ["a"],
            "toolsDeny": ["d"],
            "approval": "always",
            "nonInteractive": "fail",
            "maxArtifactBytes": 7,
        }
    )
    assert policy.workspace_root == "w"
    assert policy.writable_roots == ("out",)
    assert policy.network.allowed_ports == (443,)
    assert policy.network.custom_ca == {"env": "CA"}
    assert policy.network.max_response_bytes == 9
    assert policy.secret_process_allowlist == {"pass"}
    assert policy.tools_deny == {"d"}
    assert policy.max_artifact_bytes == 7


@pytest.mark.parametrize("effect_class", CLASSES)
@pytest.mark.parametrize("risk", ["low", "medium", "high", "critical"])
def test_approval_modes(effect_class: str, risk: str) -> None:
    expected = {
        "never": False,
        "always": True,
        "high_risk": risk in ("high", "critical"),
        "mutations": effect_class in GATED,
    }
    for mode, gated in expected.items():
        decision = decide({"approval": mode}, effect_class=effect_class, risk=risk)
        assert decision.needs_approval is gated, mode
        assert decision.allowed is not gated
        assert decision.reason


def test_an_unknown_class_is_gated() -> None:
    assert decide({}, effect_class="something_new").needs_approval


def test_deny_wins_over_allow_and_over_approval() -> None:
    lists = {"toolsAllow": ["process.exec"], "toolsDeny": ["process.exec"], "approval": "never"}
    assert decide(lists).denied
    assert decide({"toolsAllow": ["filesystem.read"], "approval": "never"}).denied
    assert decide({"toolsAllow": ["process.exec"], "approval": "never"}).allowed


def test_model_effects_meet_the_provider_list_only() -> None:
    policy = {"toolsDeny": ["model.x"], "toolsAllow": ["other"], "providers": ["main"]}
    assert decide(policy, policy_name="model.x", effect_class="model", risk="medium", provider="main").allowed
    assert decide(policy, policy_name="model.x", effect_class="model", risk="medium", provider="else").denied
    assert decide(policy, policy_name="model.x", effect_class="model", risk="medium", provider=None).denied
    assert decide({}, effect_class="model", risk="medium", provider="any").allowed


def test_a_tool_adds_an_approval_and_never_takes_one_away() -> None:
    for tool, mode in itertools.product(("never", "policy", "always"), ("never", "always")):
        gated = decide({"approval": mode}, tool_approval=tool).needs_approval
        assert gated is (mode == "always" or tool == "always")


@pytest.mark.parametrize(
    ("non_interactive", "interactive", "verdict"),
    [
        ("pause", False, Verdict.APPROVE),
        ("pause", True, Verdict.APPROVE),
        ("deny_approval", False, Verdict.DENY),
        ("deny_approval", True, Verdict.APPROVE),
        ("fail", False, Verdict.DENY),
        ("fail", True, Verdict.APPROVE),
    ],
)
def test_without_a_person(non_interactive: str, interactive: bool, verdict: Verdict) -> None:
    assert decide({"nonInteractive": non_interactive}, interactive=interactive).verdict is verdict


@pytest.mark.parametrize("path", ["..", "../a", "a/../b", "a/..", "/w/../x"])
def test_dotdot_is_refused_wherever_it_leads(path: str) -> None:
    with pytest.raises(TaskFault) as caught:
        refuse_dotdot(path)
    assert caught.value.code == "policy_denied"
    assert not caught.value.retryable


@pytest.mark.parametrize("path", ["a", "...", "a..b", "..a", "a/b..", "/w/x", "."])
def test_other_dots_are_names(path: str) -> None:
    refuse_dotdot(path)


def test_inside_compares_components() -> None:
    assert is_inside("/w", "/w")
    assert is_inside("/w/a", "/w")
    assert is_inside("/w/a", "/")
    assert not is_inside("/work", "/w")
    assert not is_inside("/", "/w")
    assert readable("/w/a", "/w") and not readable("/x", "/w")


def test_no_writable_root_means_no_write() -> None:
    assert not writable("/w/a", [])
    assert writable("/o/a", ["/w/out", "/o"])
    assert not writable("/w/outside", ["/w/out"])


def test_programs_go_by_basename() -> None:
    policy = Policy.from_json({"processAllowlist": ["sh"], "secretProcessAllowlist": ["pass"]})
    assert process_allowed(policy, "sh")
    assert process_allowed(policy, "/opt/any/sh")
    assert not process_allowed(policy, "bash")
    assert not process_allowed(policy, "/bin/")
    assert not process_allowed(policy, "")
    assert secret_process_allowed(policy, "pass") and not secret_process_allowed(policy, "sh")


def test_variables_go_by_name() -> None:
    policy = Policy.from_json({"environmentAllowlist": ["A"]})
    assert environment_allowed(policy, "A")
    assert not environment_allowed(policy, "a")
