"""From a compiled plan to a run in the database (architecture 4, steps 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentctl.store.canonical import canonical, hex_digest
from agentctl.store.clock import IdSource
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.records import NewRun

from .plan import Plan, keeps_artifacts
from .variables import recorded_workflow

if TYPE_CHECKING:
    from .definition import LoadedDocument


@dataclass(frozen=True, slots=True)
class Submission:
    """A run that exists now. `created` is false when the idempotency key gave an earlier one back."""

    run_id: str
    trace_id: str
    state: str
    created: bool


_LIMITS = {
    "maxProviderRequests": "providerRequests",
    "maxTurns": "turns",
    "maxToolCalls": "toolCalls",
    "maxInputTokens": "inputTokens",
    "maxOutputTokens": "outputTokens",
    "maxTotalTokens": "totalTokens",
    "maxWallTimeSeconds": "wallTimeSeconds",
    "maxProcessOutputBytes": "processOutputBytes",
    "maxArtifactBytes": "artifactBytes",
    "maxCostMicrousd": "costMicrousd",
}


def budget_limits(budget: Mapping[str, Any]) -> dict[str, int]:
    """The limits of a plan by the dimensions of the ledger (contract 6). What compilation has checked is not in it."""
    limits = budget.get("limits") or {}
    return {dimension: limits[name] for name, dimension in _LIMITS.items() if limits.get(name) is not None}


def model_settings(plan: Plan) -> dict[str, Any]:
    """What a worker has to know of a plan with agents (`models` of the settings of a run): names, never secrets."""
    return {
        "workflow": plan.workflow_name,
        "agents": plan.agents,
        "providers": plan.providers,
        "tools": plan.tools,
        "pricing": (plan.budget.get("pricing") or {}).get("models", {}),
    }


def submit(
    store: Store,
    document: LoadedDocument,
    plan: Plan,
    inputs: dict[str, Any],
    *,
    ids: IdSource,
    priority: int = 0,
    idempotency_key: str | None = None,
    base_path: Path,
    actor: str,
    interactive: bool = False,
    check: bool = False,
    show_diff: bool | None = None,
    faults: Faults | None = None,
) -> Submission:
    """Create the run of a plan, in one durable transaction.

    `inputs` are the merged inputs; `interactive` says that a person is there, so that `policy.nonInteractive` does
    not apply. With `check` nothing outside is changed (contract 3, check mode). `show_diff` says whether writes record
    a diff, instead of `spec.output.showDiff`. Raises `ConflictError` when the idempotency key belongs to other content.
    """
    inputs_json = canonical(inputs)
    settings = {
        "actions": plan.actions,
        "policy": plan.policy,
        "showDiff": plan.show_diff if show_diff is None else show_diff,
        "interactive": interactive,
        "keepsArtifacts": keeps_artifacts(plan),
    }
    content = f"{plan.plan_digest}\n{inputs_json}\n{base_path}"
    if check:
        settings["check"] = True
        content += "\ncheck"
    if plan.agents:
        settings["models"] = model_settings(plan)
    long_term = document.workflow["spec"]["memory"]["longTerm"]
    if long_term is not None:
        settings["longTerm"] = long_term
    new = NewRun(
        run_id=ids.new_id("run"),
        trace_id=ids.new_id("trace"),
        mode="check" if check else "execute",
        workflow_name=plan.workflow_name,
        workflow_digest=plan.workflow_digest,
        plan_digest=plan.plan_digest,
        submission_digest=hex_digest(content),
        workflow_json=canonical(recorded_workflow(document.workflow, document)),
        plan_json="".join(plan.canonical_chunks()),
        inputs_json=inputs_json,
        settings_json=canonical(settings),
        base_path=str(base_path),
        task_ids=plan.order,
        max_concurrency=plan.max_concurrency,
        max_deliveries=plan.max_deliveries,
        memory={key: canonical(value) for key, value in plan.memory.items()},
        budget_limits=budget_limits(plan.budget),
        pricing_version=(plan.budget.get("pricing") or {}).get("version"),
        planned_expansion_items=int(plan.budget.get("plannedExpansionItems", 0)),
        planned_loop_iterations=int(plan.budget.get("plannedLoopIterations", 0)),
        priority=priority,
        idempotency_key=idempotency_key,
        actor=actor,
    )
    run_id, created = store.create_run(new)
    (faults or Faults.from_environment()).reach("after_create_run")
    run = store.get_run(run_id)
    return Submission(run_id, run.trace_id, run.state, created)
