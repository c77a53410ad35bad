"""`effects continue-remote`: what has become of a task that a remote agent has named, and the run goes on with it."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import click
from agentctl.store.errors import ConflictError, PolicyError, PrerequisiteError, TaskFault, UncertainError

from .main import Settings, Verb, pass_settings
from .preflight import refuse_offline
from .render import Printer, clean
from .run import open_store, until_told, views_of, warn_undriven

REASON = "the remote agent has completed the task that it had named"


@click.command("continue-remote", cls=Verb)
@click.argument("name", metavar="EFFECT")
@click.option("--actor", default="cli-user", metavar="NAME", help="Who asks; kept for ever.")
@click.option("--reason", default=REASON, metavar="TEXT", help="Why you conclude this; kept for ever.")
@click.option("--approved", is_flag=True, help="You may approve such an action, and do.")
@pass_settings
def continue_remote(settings: Settings, name: str, actor: str, reason: str, approved: bool) -> None:
    """Observe the remote task of an uncertain A2A effect; when it is completed, the run goes on with its result.

    Nothing is sent but the question how the task stands. Exit 3 when it has not ended, or has ended badly, or when the
    policy wants --approved; 5 when there is no remote task to be asked about; 6 when the agent does not answer.
    """
    from agentctl.coordinator.reconciliation import Conclusion, reconcile, require_permission
    from agentctl.store.canonical import loads
    from agentctl.store.clock import SystemIds
    from agentctl.store.policy import Policy
    from agentctl.worker.effects.a2a import observe
    from agentctl.worker.watch import Token

    from .pool import rescue_the_dead

    if settings.offline:
        raise refuse_offline("asking a remote agent how its task stands uses the network")
    with closing(open_store(settings)) as store:
        views = views_of(store)
        effect_id = views.find_effect(name)
        rescue_the_dead(settings.database)
        inspection = views.effect(effect_id)
        call = _observable(effect_id, inspection)
        effect = inspection["effect"]
        run_id = effect["request"]["runId"]
        require_permission(store, effect, Conclusion("applied", actor, reason, has_result=True, approved=approved))
        text, base_path = store.run_settings(run_id)
        data = loads(text)
        policy = Policy.from_json(data["policy"])
        workspace = os.path.realpath(os.path.join(base_path, policy.workspace_root))
        definition = data["actions"][call["state"]["action"]]["peers"][call["peer"]]
        try:
            result, fault, note = observe(call, definition, policy, workspace, Token(), store.clock.monotonic)
        except TaskFault as error:
            raise _refusal(error, run_id) from error
        if result is None:
            assert fault is not None
            raise _unfinished(fault, effect_id, run_id)
        evidence = {
            "kind": "protocol_observation",
            "protocol": "a2a",
            "peer": call["peer"],
            "rpcUrl": call["state"]["rpcUrl"],
            "remoteTaskId": call["state"]["remoteTaskId"],
            "state": result["status"]["state"],
            "observedAt": store.clock.now(),
        }
        conclusion = Conclusion("applied", actor, reason, evidence, True, result, approved=approved, protocol=note)

        def human(out: Printer) -> None:
            out.line(f"effect {effect_id[:12]} of {run_id} is reconciled: {clean(call['peer'])} has completed its task")

        with until_told():
            made, _ = reconcile(store, effect, conclusion, SystemIds(store.clock))
            shown: dict[str, Any] = views.reconciliation(made)
            diagnostics = warn_undriven(settings, store, run_id)
            Printer(settings).result("EffectReconciliation", shown, human, diagnostics)


def _observable(effect_id: str, inspection: dict[str, Any]) -> dict[str, Any]:
    """The call of an effect whose remote task can be asked about. Raises `ConflictError` with the reason otherwise."""
    effect, call = inspection["effect"], inspection["protocolCall"]
    run_id = effect["request"]["runId"]
    by_hand = f"find out what has happened, then `agentctl effects reconcile {effect_id[:12]} …`"
    operation = effect["request"]["operation"]
    if operation != "a2a.delegate" and (call is None or call["protocol"] != "a2a"):
        message = f"effect {effect_id[:12]} ({operation}) has no remote task to be asked about"
        raise ConflictError(message, remedy=by_hand, run_id=run_id)
    if effect["status"] != "uncertain" or inspection["effectiveReconciliation"] is not None:
        how = "reconciled" if effect["status"] == "uncertain" else effect["status"]
        raise ConflictError(f"effect {effect_id[:12]} is {how}, not uncertain", run_id=run_id)
    if call is None or call["state"]["remoteTaskId"] is None:
        message = f"effect {effect_id[:12]}: the agent had not named a task; whether it has the message is not known"
        if call is None:
            message = f"effect {effect_id[:12]}: its message was not sent yet"
        raise ConflictError(message, remedy=by_hand, run_id=run_id)
    found: dict[str, Any] = call
    return found


def _refusal(fault: TaskFault, run_id: str) -> Exception:
    if fault.code == "policy_denied":
        return PolicyError(fault.message, run_id=run_id)
    return PrerequisiteError(fault.message, run_id=run_id)


def _unfinished(fault: TaskFault, effect_id: str, run_id: str) -> Exception:
    if fault.code in ("a2a_unavailable", "a2a_connection_lost", "a2a_timeout", "a2a_http_error"):
        return PrerequisiteError(fault.message, remedy="try again later; nothing was changed", run_id=run_id)
    remedy = f"`agentctl effects reconcile {effect_id[:12]} --status not-applied …` lets the run send a new message"
    if fault.code in ("a2a_poll_limit", "a2a_input_required"):
        remedy = "try again later; nothing was changed"
    return UncertainError(fault.message, remedy=remedy, run_id=run_id)
