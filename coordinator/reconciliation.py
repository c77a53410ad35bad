"""Before a conclusion about an effect is recorded: policy, result and schema (contract 5.5).

The policy is that of the run which made the effect, as it was stored; the document may have changed since.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentctl.store import answers
from agentctl.store.canonical import canonical, loads
from agentctl.store.clock import IdSource
from agentctl.store.conversations import PREFIX
from agentctl.store.engine import Store
from agentctl.store.errors import PolicyError, UsageError
from agentctl.store.policy import Policy, decide_effect, policy_name_of, tool_policy_name
from agentctl.store.records import NewReconciliation, ProtocolNote

from .plan import Plan

CAPABILITY = "effect_reconciliation"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a person says about an effect. `None` for `evidence` means: nothing but the reason.

    `status` is `applied`, `not_applied` or `compensated`; `result` counts only if `has_result` (it may be null).
    """

    status: str
    actor: str
    reason: str
    evidence: Any = None
    has_result: bool = False
    result: Any = None
    result_schema: dict[str, Any] | bool | None = None
    compensation_effect_id: str | None = None
    approved: bool = False
    protocol: ProtocolNote | None = None
    """What was observed of the remote side, when that is where the conclusion comes from."""


def reconcile(store: Store, effect: dict[str, Any], conclusion: Conclusion, ids: IdSource) -> tuple[str, str]:
    """Check and append a conclusion about an effect (its record, contract 5.2); (reconciliation id, run id).

    Raises `UsageError` for what is missing or does not fit its schema, `PolicyError` for what the policy forbids or
    wants approved, and what `reconciliations.reconcile` raises. One durable transaction, after all checks.
    """
    request = effect["request"]
    _check_words(conclusion)
    _check_result(conclusion, request["operation"])
    usage = _check_step(store, request, conclusion)
    _check_contract(store, request, conclusion)
    authorization = _authorize(store, request, conclusion)
    evidence = conclusion.evidence
    if evidence is None:
        evidence = {"kind": "operator_statement", "statement": conclusion.reason}
    new = NewReconciliation(
        reconciliation_id=ids.new_id("reconciliation"),
        effect_id=request["id"],
        status=conclusion.status,
        actor=conclusion.actor,
        reason=conclusion.reason,
        evidence_json=canonical(evidence),
        authorization_json=canonical(authorization),
        result_json=canonical(conclusion.result) if conclusion.has_result else None,
        result_schema_json=None if conclusion.result_schema is None else canonical(conclusion.result_schema),
        compensation_effect_id=conclusion.compensation_effect_id,
        protocol=conclusion.protocol,
        usage=usage,
    )
    return new.reconciliation_id, store.reconcile(new)


def require_permission(store: Store, effect: dict[str, Any], conclusion: Conclusion) -> None:
    """Raise what `reconcile` would raise for want of words or permission, before anything is asked for its result."""
    _check_words(conclusion)
    _authorize(store, effect["request"], conclusion)


def _check_words(conclusion: Conclusion) -> None:
    if not conclusion.actor.strip() or not conclusion.reason.strip():
        raise UsageError("a reconciliation needs an actor and a reason", remedy="give --actor and --reason")
    if conclusion.status == "applied" and not conclusion.has_result:
        raise UsageError(
            "an effect that was applied needs its result: the task goes on with it", remedy="give --result-file FILE"
        )
    if conclusion.status != "applied" and (conclusion.has_result or conclusion.result_schema is not None):
        raise UsageError(f"an effect that was {conclusion.status} has no result", remedy="leave out --result-file")
    if (conclusion.status == "compensated") != (conclusion.compensation_effect_id is not None):
        raise UsageError(
            "the effect that has undone it belongs to --status compensated, and only to it",
            remedy="give --compensation-effect ID together with --status compensated",
        )


def _check_result(conclusion: Conclusion, operation: str) -> None:
    if conclusion.has_result and operation.startswith("builtin.") and not isinstance(conclusion.result, dict):
        raise UsageError(
            f"the result of {operation} is a JSON object, this one is not",
            remedy="`agentctl effects inspect EFFECT` of an effect that succeeded shows the form",
        )
    if conclusion.result_schema is not None:
        _check_schema(conclusion.result, conclusion.result_schema, "its schema")


def _check_schema(result: Any, schema: dict[str, Any] | bool, what: str) -> None:
    import jsonschema_rs

    def refuse(uri: str) -> Any:
        raise ValueError(f"{uri} is outside this schema")

    try:
        validator = jsonschema_rs.Draft202012Validator(schema, retriever=refuse)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        first = str(error).split("\n", 1)[0]
        raise UsageError(f"the result's schema is no JSON Schema (Draft 2020-12): {first}") from None
    for found in validator.iter_errors(result):
        where = "/".join(str(part) for part in found.instance_path)
        raise UsageError(f"the result does not fit {what}: {found.message} (at /{where})")


def _check_step(store: Store, request: dict[str, Any], conclusion: Conclusion) -> dict[str, int] | None:
    """The result of a step of an agent is what its model or its tool would have given; what it has used, if it tells.

    The agent goes on with it, so it is held to the contract of the step (contract 5.5).
    """
    operation, model = request["operation"], request["effectClass"] == "model"
    if conclusion.status != "applied" or not (model or operation.startswith(PREFIX)):
        return None
    models = loads(store.run_settings(request["runId"])[0]).get("models") or {}
    if model:
        problem = answers.answer_problem(conclusion.result)
        if problem is not None:
            raise UsageError(
                f"the result of {operation} is no answer of a model: {problem}",
                remedy="`agentctl effects inspect EFFECT` of an effect of this provider that succeeded shows the form",
            )
        price = models.get("pricing", {}).get(f"{operation}/{request['input'].get('model')}")
        return answers.used(conclusion.result["usage"], price)
    name = operation.removeprefix(PREFIX)
    tool = models.get("tools", {}).get(name)
    if tool is None:
        raise UsageError(f"the run has no tool {name!r}, so nobody can tell whether this is a result of it")
    _check_schema(conclusion.result, tool["outputSchema"], f"the outputSchema of the tool {name!r}")
    return None  # what it has printed nobody knows: all that was reserved counts


def _check_contract(store: Store, request: dict[str, Any], conclusion: Conclusion) -> None:
    """The result of a task's own effect fits what the task declares: others go on with it, and it cannot be taken back.

    What a remote peer has answered (`protocol`) is recorded as it is, and the task fails if it does not fit.
    """
    if not conclusion.has_result or conclusion.protocol is not None:
        return
    plan = Plan.from_json(loads(store.run_documents(request["runId"]).plan_json))
    task = plan.tasks[request["taskId"]]
    if task.uses_kind != "action":
        return
    if task.action_kind == "extension.process":
        declared = plan.actions[task.uses_name].get("outputSchema")
        if declared is not None:
            _check_schema(conclusion.result, declared, f"the outputSchema of the action {task.uses_name!r}")
    if task.output_schema is not None:
        _check_schema(conclusion.result, task.output_schema, f"the outputSchema of the task {task.id!r}")


def _authorize(store: Store, request: dict[str, Any], conclusion: Conclusion) -> dict[str, Any]:
    """The decision of the source run's policy, as it is recorded.

    What allowed the effect under its policy name allows to reconcile it; `toolsDeny` may name the operation as well
    (contract 5.5 and 11.1).
    """
    settings = loads(store.run_settings(request["runId"])[0])
    policy = Policy.from_json(settings["policy"])
    operation = request["operation"]
    decision = decide_effect(
        policy,
        policy_name=_policy_name(settings, policy, operation),
        effect_class=request["effectClass"],
        risk=request["risk"],
        provider=operation if request["effectClass"] == "model" else None,
        interactive=True,
    )
    if decision.denied:
        raise PolicyError(
            f"the policy of {request['runId']} denies {CAPABILITY} of {request['operation']}: {decision.reason}",
            run_id=request["runId"],
        )
    if decision.needs_approval:
        if not conclusion.approved:
            raise PolicyError(
                f"{CAPABILITY} of {request['operation']} needs an approval: {decision.reason}",
                remedy="repeat the command with --approved if you are the one who may approve it",
                run_id=request["runId"],
            )
        return {
            "kind": "explicit_operator_approval",
            "actor": conclusion.actor,
            "reason": conclusion.reason,
        }
    return {"kind": "policy_allow", "reason": decision.reason, "explicitApproval": conclusion.approved}


def _policy_name(settings: dict[str, Any], policy: Policy, operation: str) -> str:
    """The name by which the policy speaks of an operation, as when its effect was asked for."""
    if operation in policy.tools_deny:
        return operation
    name = operation.removeprefix(PREFIX)
    tool = (settings.get("models") or {}).get("tools", {}).get(name) if operation.startswith(PREFIX) else None
    return policy_name_of(operation) if tool is None else tool_policy_name(policy, tool["capability"], name)
