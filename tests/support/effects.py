"""Effects carried out without a worker: what has to hold for every plan and every outcome."""

from __future__ import annotations

import json
from typing import Any

from agentctl.store.canonical import canonical
from agentctl.store.policy import policy_name_of
from agentctl.worker.effects import EffectContext, EffectOutcome, EffectPlan, Work, prepare


def planned(work: Work) -> EffectPlan:
    """The plan of an effect: named as the policy names it, and of values that can be recorded."""
    made = prepare(work)
    assert isinstance(made, EffectPlan)
    assert made.policy_name == policy_name_of(made.operation)
    canonical([made.input, made.expected_effect])
    return made


def execute(plan: EffectPlan, context: EffectContext) -> EffectOutcome:
    """Carry it out; what it comes to can be recorded."""
    outcome = plan.execute(context)
    canonical([outcome.result, outcome.error, outcome.notes, outcome.usage])
    return outcome


def error_of(outcome: EffectOutcome) -> dict[str, Any]:
    """Why it has not succeeded."""
    assert outcome.error is not None
    return outcome.error


def state_of(outcome: EffectOutcome) -> tuple[str, dict[str, Any]]:
    """(status, state) of the protocol call that it has told of last."""
    assert outcome.protocol is not None
    return outcome.protocol.status, json.loads(outcome.protocol.state_json)
