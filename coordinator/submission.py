"""From a compiled plan to a run in the database (architecture 4, steps 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentctl.store.canonical import canonical, hex_digest, loads
from agentctl.store.clock import IdSource
from agentctl.store.engine import Store
from agentctl.store.errors import UsageError
from agentctl.store.faults import Faults
from agentctl.store.records import NewRun, Run, RunDocuments
from agentctl.store.runs import origin_mode

from .plan import Plan, keeps_artifacts
from .variables import recorded_workflow

if TYPE_CHECKING:
    from .definition import LoadedDocument
    from .recovery_plan import RecoveryPlan


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


@dataclass(frozen=True, slots=True)
class Circumstances:
    """How a run is to be made, whatever it is made from.

    `interactive` says that a person is there, so that `policy.nonInteractive` does not apply. `diff` is the
    `--diff` of the command: outputs of writes have one. `spec.output.showDiff` decides what people are shown only.
    """

    base_path: Path
    actor: str
    priority: int = 0
    interactive: bool = False
    diff: bool = False


def new_run(
    document: LoadedDocument,
    plan: Plan,
    inputs: dict[str, Any],
    how: Circumstances,
    *,
    ids: IdSource,
    prefix: str = "run",
    mode: str = "execute",
    check: bool = False,
) -> NewRun:
    """The run of a plan, not yet created. `inputs` are the merged inputs."""
    inputs_json = canonical(inputs)
    settings = {
        "actions": plan.actions,
        "policy": plan.policy,
        "showDiff": how.diff if check else plan.show_diff,
        "diff": how.diff,
        "interactive": how.interactive,
        "keepsArtifacts": keeps_artifacts(plan),
    }
    content = f"{plan.plan_digest}\n{inputs_json}\n{how.base_path}"
    if check:
        settings["check"] = True
        content += "\ncheck"
    if plan.agents:
        settings["models"] = model_settings(plan)
    elif plan.providers and plan.budget.get("pricing"):
        settings["pricing"] = prices_of(plan)
    long_term = document.workflow["spec"]["memory"]["longTerm"]
    if long_term is not None:
        settings["longTerm"] = long_term
    return NewRun(
        run_id=ids.new_id(prefix),
        trace_id=ids.new_id("trace"),
        mode="check" if check else mode,
        submission_digest=hex_digest(content),
        workflow_json=canonical(recorded_workflow(document.workflow, document)),
        plan_json="".join(plan.canonical_chunks()),
        inputs_json=inputs_json,
        settings_json=canonical(settings),
        base_path=str(how.base_path),
        priority=how.priority,
        actor=how.actor,
        **fields_of(plan),
    )


def fields_of(plan: Plan) -> dict[str, Any]:
    """The fields of a new run that its plan gives."""
    return {
        "workflow_name": plan.workflow_name,
        "workflow_digest": plan.workflow_digest,
        "plan_digest": plan.plan_digest,
        "task_ids": plan.order,
        "max_concurrency": plan.max_concurrency,
        "max_deliveries": plan.max_deliveries,
        "memory": {key: canonical(value) for key, value in plan.memory.items()},
        "budget_limits": budget_limits(plan.budget),
        "pricing_version": (plan.budget.get("pricing") or {}).get("version"),
        "planned_expansion_items": int(plan.budget.get("plannedExpansionItems", 0)),
        "planned_loop_iterations": int(plan.budget.get("plannedLoopIterations", 0)),
    }


def model_settings(plan: Plan) -> dict[str, Any]:
    """What a worker has to know of a plan with agents (`models` of the settings of a run): names, never secrets."""
    return {
        "workflow": plan.workflow_name,
        "agents": plan.agents,
        "providers": plan.providers,
        "tools": plan.tools,
        "pricing": prices_of(plan),
    }


def prices_of(plan: Plan) -> dict[str, Any]:
    """The prices of models by PROVIDER/MODEL, as the plan holds them."""
    prices: dict[str, Any] = (plan.budget.get("pricing") or {}).get("models", {})
    return prices


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
    diff: bool = False,
    faults: Faults | None = None,
) -> Submission:
    """Create the run of a plan, in one durable transaction.

    `inputs` are the merged inputs; the rest is as in `Circumstances`. With `check` nothing outside is changed
    (contract 3, check mode). Raises `ConflictError` when the idempotency key belongs to other content.
    """
    how = Circumstances(base_path, actor, priority, interactive, diff)
    new = replace(new_run(document, plan, inputs, how, ids=ids, check=check), idempotency_key=idempotency_key)
    run_id, created = store.create_run(new)
    (faults or Faults.from_environment()).reach("after_create_run")
    run = store.get_run(run_id)
    return Submission(run_id, run.trace_id, run.state, created)


def derive(
    store: Store,
    document: LoadedDocument,
    plan: RecoveryPlan,
    inputs: dict[str, Any],
    how: Circumstances,
    *,
    reason: str | None,
    ids: IdSource,
    faults: Faults | None = None,
) -> NewRun:
    """Create the run of a compatible retry or repair plan, with all that it reuses, in one durable transaction.

    Raises `ConflictError`, with nothing created, when anything has happened to the source since it was planned: an
    effect was reconciled, or the run was removed (`NotFoundError`).
    """
    assert plan.compatible
    faults = faults or Faults.from_environment()
    lineage: dict[str, Any] = {
        "formatVersion": 1,
        "sourceWorkflowDigest": plan.source.run.workflow_digest,
        "roots": plan.roots,
        "reason": reason,
        "restartSuccessful": plan.restart_successful,
    }
    if plan.mode == "retry":
        lineage["failedOnly"] = plan.failed_only
    new = replace(
        new_run(document, plan.target, inputs, how, ids=ids, prefix=plan.mode, mode=plan.mode),
        source_run_id=plan.source.run.run_id,
        lineage_json=canonical(lineage),
    )
    faults.reach("before_derived_run")
    store.create_derived_run(new, plan.source.head, plan.reused, faults)
    faults.reach("after_create_run")
    return new


def fork(
    store: Store,
    source_run_id: str,
    *,
    ids: IdSource,
    priority: int = 0,
    base_path: Path | None = None,
    actor: str,
    reason: str | None = None,
    interactive: bool = False,
    faults: Faults | None = None,
) -> Submission:
    """Run the stored plan and documents of another run once more, from its start and with fresh effects (seed).

    One durable transaction. The source may be in any state; nothing of its results is taken over. `base_path` replaces
    its workspace. Raises as `verified_source`.
    """
    faults = faults or Faults.from_environment()
    run, texts = verified_source(store, source_run_id)
    plan = Plan.from_json(loads(texts.plan_json))
    lineage = {"formatVersion": 1, "sourceWorkflowDigest": run.workflow_digest, "reason": reason}
    place = run.base_path if base_path is None else str(base_path)
    new = NewRun(
        run_id=ids.new_id("fork"),
        trace_id=ids.new_id("trace"),
        mode="fork",
        submission_digest=hex_digest(f"{plan.plan_digest}\n{texts.inputs_json}\n{place}"),
        workflow_json=texts.workflow_json,
        plan_json=texts.plan_json,
        inputs_json=texts.inputs_json,
        settings_json=canonical({**loads(texts.settings_json), "interactive": interactive}),
        base_path=place,
        priority=priority,
        actor=actor,
        parent_run_id=run.run_id,
        lineage_json=canonical(lineage),
        **fields_of(plan),
    )
    faults.reach("before_derived_run")
    run_id, _ = store.create_run(new)
    faults.reach("after_create_run")
    return Submission(run_id, new.trace_id, "running", True)


def verified_source(store: Store, run_id: str) -> tuple[Run, RunDocuments]:
    """A run from which a fork may be made, with its texts; everything of it was held to its history first.

    Raises `NotFoundError`, `IncompatibleVersion`, `CorruptStore` when it is not what it says, and `UsageError` for a
    run that has nothing to repeat: a check, the inverse actions of a compensation, or a replay of one of these.
    """
    from agentctl.store.verification import require_sound

    run, texts = store.read_verified_documents(run_id)
    require_sound(store.database, run_id)
    refuse_source(run, loads(texts.settings_json))
    return run, texts


NOTHING_TO_REPEAT = {
    "check": "is a check: it has executed nothing",
    "compensation": "is a compensation: its actions undo those of another run",
}
"""Modes of runs from which none is derived by retry, repair or fork, and why."""

_RECORDED = {
    "check": "is the replay of a check: that has executed nothing",
    "compensation": "is the replay of a compensation: its actions undo those of another run",
}

_INSTEAD = {
    "check": "`agentctl run FILE` executes the workflow",
    "compensation": "`agentctl compensate` plans again, and leaves out what is done",
}


def refuse_source(run: Run, settings: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a run from which none is derived by retry, repair or fork, or a replay of such a run."""
    mode = origin_mode(run.mode, settings)
    if mode in NOTHING_TO_REPEAT:
        what = NOTHING_TO_REPEAT[mode] if mode == run.mode else _RECORDED[mode]
        raise UsageError(f"{run.run_id} {what}", remedy=_INSTEAD[mode], run_id=run.run_id)
