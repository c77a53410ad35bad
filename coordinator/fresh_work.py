"""What the tasks of a plan would do if they were executed, as the plans of runs show it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentctl.store.policy import Policy

from .kinds import EFFECTS, approved_steps, decision_on
from .plan import CompiledTask, Plan


def fresh_work(plan: Plan, tasks: Sequence[CompiledTask], *, interactive: bool) -> dict[str, Any]:
    """`freshEffectSummary` and `approvalSummary` (`task:operation`, in compiled order) of these tasks of a plan.

    `interactive`: a person is there, so that `policy.nonInteractive` does not apply.
    """
    agents = sum(task.uses_kind == "agent" for task in tasks)
    policy = Policy.from_json(plan.policy)
    asked: dict[tuple[str | None, str], list[str]] = {}
    approvals = []
    for task in tasks:
        what = (task.action_kind, task.uses_name if task.uses_kind == "agent" else "")
        if what not in asked:
            asked[what] = list(_approved(plan, policy, task, interactive))
        approvals += [f"{task.id}:{operation}" for operation in asked[what]]
    return {
        "freshEffectSummary": {
            "providerTasks": agents,
            "actionTasks": len(tasks) - agents,
            "declaredEffects": sum(task.action_kind in EFFECTS for task in tasks),
        },
        "approvalSummary": approvals,
    }


def _approved(plan: Plan, policy: Policy, task: CompiledTask, interactive: bool) -> Iterator[str]:
    if task.uses_kind == "agent":
        yield from approved_steps(policy, plan.agents[task.uses_name], plan.tools)
        return
    decision = decision_on(policy, task.action_kind, interactive=interactive)
    if decision is not None and decision.needs_approval:
        yield EFFECTS[str(task.action_kind)].operation
