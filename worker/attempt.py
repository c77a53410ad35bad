"""One attempt from top to bottom: prepare, request and start the effect, execute, and say how it ended.

The worker decides nothing about the run. It turns what happened into an `AttemptEnd` and, if something was dispatched,
an `EffectEnd`; the store writes both in one transaction with the next claim.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from agentctl.store import policy as policies
from agentctl.store.approvals import redacted
from agentctl.store.canonical import canonical, effect_id, hex_digest, loads
from agentctl.store.clock import Clock
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, EnvironmentFault, LeaseLost, NotFoundError, TaskFault
from agentctl.store.faults import Faults
from agentctl.store.records import (
    ApprovalAsk,
    AttemptEnd,
    AttemptHeld,
    Candidate,
    Claim,
    EffectEnd,
    EffectRequest,
    RecordedEffect,
    StartedEffect,
    StartRefused,
    record,
)
from agentctl.store.states import LEAVES_NO_TRACE, may_repeat
from agentctl.store.timing import Timing

from . import run_secrets
from .effects import (
    Done,
    EffectContext,
    EffectOutcome,
    EffectPlan,
    InAnswer,
    Keeps,
    Work,
    kept,
    kept_of,
    prepare,
    vouched,
)
from .redaction import known as known_secrets
from .watch import Token

if TYPE_CHECKING:
    from .agent import Agents

log = logging.getLogger(__name__)

KNOWN_RUNS = 16

Answer: TypeAlias = StartedEffect | RecordedEffect | StartRefused | AttemptHeld


@record
class Ending:
    """How a delivery ends: `attempt` is to be finished, or with `release` to be given back for that reason.

    `pause`: with `release`, why the run has to wait for a person. `held`: it is over already; the attempt waits for a
    person or for budget.
    """

    attempt: AttemptEnd | None
    effect: EffectEnd | None = None
    release: str | None = None
    held: bool = False
    pause: str | None = None


@record
class Prepared:
    """A candidate with the effect that it will ask for. `since` is when it was prepared (monotonic seconds)."""

    candidate: Candidate
    request: EffectRequest
    plan: EffectPlan
    since: float


@record
class RunSettings:
    """`settings_json` of a run, read once. `models` is there if the run has agents (`coordinator.submission`).

    `secretive` are the actions that read secrets; derived, and kept since it is asked before every attempt.
    """

    actions: dict[str, Any]
    policy: policies.Policy
    show_diff: bool
    record_diff: bool
    base_path: str
    workspace: str
    interactive: bool
    check: bool
    long_term: dict[str, Any] | None
    models: dict[str, Any] | None
    prices: dict[str, Any]
    force_effect: bool
    secretive: frozenset[str]


def work_of(
    settings: RunSettings,
    task_id: str,
    name: str,
    action: Mapping[str, Any],
    given: dict[str, Any],
    timeout_seconds: float,
    *,
    memory: Mapping[str, Any] | None = None,
    recorded: dict[str, Any] | None = None,
    foreseen: str | None = None,
) -> Work:
    """What every action of a run gets, whether a task uses it or a model calls it: all that the run has recorded.

    Only a task has read from working `memory`, was `recorded` by an earlier delivery, or has an output `foreseen`.
    """
    return Work(
        task_id=task_id,
        action_name=name,
        kind=action["kind"],
        action=action,
        input=given,
        memory={} if memory is None else memory,
        timeout_seconds=timeout_seconds,
        base_path=settings.base_path,
        policy=settings.policy,
        show_diff=settings.show_diff,
        record_diff=settings.record_diff,
        workspace=settings.workspace,
        long_term=settings.long_term,
        prices=settings.prices,
        force_effect=settings.force_effect,
        recorded=recorded,
        foreseen=foreseen,
    )


class AttemptRunner:
    """Executes attempts one after the other; keeps the settings of recent runs."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        timing: Timing,
        faults: Faults,
        token: Token,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        """`draining` tells whether the worker takes nothing new: then an agent stops between two of its steps."""
        self._store = store
        self._clock = clock
        self._timing = timing
        self._faults = faults
        self._token = token
        self._known: OrderedDict[str, RunSettings] = OrderedDict()
        self._draining = draining
        self._agents: Agents | None = None

    def run(self, claim: Claim, ahead: Prepared | None = None, answer: Answer | None = None) -> Ending:
        """Execute one delivery. Raises `LeaseLost` when it is over, and `SyncFailed` before any dispatch.

        With `answer`, the start of the prepared effect was tried when the attempt was claimed.
        """
        try:
            if ahead is not None and answer is not None:
                return self._dispatch(claim, ahead.request, ahead.plan, answer, ahead.since)
            if claim.input_json.startswith('{"agent":'):
                return self._converse(claim)
            if claim.fence.delivery > 1 and (ending := self._known_before(claim)) is not None:
                return ending
            planned = self._plan(claim, self._recorded_before(claim))
            if isinstance(planned, Done):
                return Ending(AttemptEnd("succeeded", result_json=canonical(planned.output)))
            plan, why = planned
            return self._perform(claim, plan, why)
        except LeaseLost:
            raise
        except TaskFault as fault:
            return Ending(AttemptEnd("failed", error_json=canonical(known_secrets.redactor.json(fault.as_json()))))
        except ConflictError as error:
            changed = TaskFault("effect_identity_changed", error.message)
            return Ending(AttemptEnd("failed", error_json=canonical(changed.as_json())))

    def _known_before(self, claim: Claim) -> Ending | None:
        """How an attempt ends whose effect an earlier delivery has confirmed, or a person has reconciled, or None.

        Nothing is planned again: what planning looks at may be gone by now, and nothing is going to be dispatched.
        """
        step = self._store.recorded_steps(claim.fence.attempt_id).get(1)
        if step is None or step.undone:
            return None
        result = None if step.confirmed else step.result_json
        ending = Ending(AttemptEnd("succeeded", result_json=result, result_effect=step.effect_id))
        keeps = vouched(kept(self._work(claim, None)), confirmed=step.confirmed)
        return self._keep(claim, keeps, ending, step.result_json)

    def _converse(self, claim: Claim) -> Ending:
        if self._agents is None:
            from .agent import Agents

            self._agents = Agents(self, self._store, self._clock, self._timing, self._faults, self._token)
        return self._agents.run(claim, self._draining)

    def prepare(self, candidate: Candidate) -> Prepared | None:
        """Get ready for an attempt that nobody holds yet, so that its claim and the start of its effect can be one
        transaction. None for everything that has to be told in the attempt itself (no effect, a fault)."""
        if candidate.input_json.startswith('{"agent":') or self._takes_secrets(candidate):
            return None
        try:
            planned = self._plan(candidate, None)
            if isinstance(planned, Done):
                return None
            plan, why = planned
            return Prepared(candidate, self._request(candidate, plan, why), plan, self._clock.monotonic())
        except (TaskFault, NotFoundError):
            return None

    def _plan(
        self, attempt: Claim | Candidate, recorded: dict[str, Any] | None
    ) -> tuple[EffectPlan, str | None] | Done:
        """The effect of an attempt, checked by the policy, and why a person has to approve it, if one has to.

        Whether one has approved it is known to the store. Raises `TaskFault`.
        """
        plan = prepare(self._work(attempt, recorded))
        if isinstance(plan, Done):
            return plan
        settings = self.settings(attempt.run_id)
        decision = policies.decide_effect(
            settings.policy,
            policy_name=plan.policy_name,
            effect_class=plan.effect_class,
            risk=plan.risk,
            interactive=settings.interactive,
        )
        if decision.denied:
            raise TaskFault("policy_denied", decision.reason)
        if settings.check and (decision.needs_approval or plan.asks or plan.effect_class not in LEAVES_NO_TRACE):
            return Done(plan.foreseen or _not_executed(plan, decision.reason if decision.needs_approval else None))
        if plan.keeps is not None:
            self.require_store()
        return plan, decision.reason if decision.needs_approval else None

    def require_store(self) -> None:
        """What a task leaves has to be stored: when that cannot be done, nothing is dispatched (field report 15)."""
        try:
            self._store.artifacts.blobs.require_writable()
        except EnvironmentFault as error:
            message = error.message if error.remedy is None else f"{error.message}; {error.remedy}"
            raise TaskFault("artifact_store", message, retryable=True) from error

    def _recorded_before(self, claim: Claim) -> dict[str, Any] | None:
        if claim.fence.delivery <= 1:
            return None
        text = self._store.recorded_expectation(claim.fence.attempt_id, 1)
        expected: dict[str, Any] | None = None if text is None else loads(text)
        return expected

    def _takes_secrets(self, candidate: Candidate) -> bool:
        """Whether the action reads secrets: not ahead of time, for an attempt that nobody holds."""
        secretive = self.settings(candidate.run_id).secretive
        return bool(secretive) and loads(candidate.input_json)["action"] in secretive

    def _work(self, attempt: Claim | Candidate, recorded: dict[str, Any] | None) -> Work:
        settings = self.settings(attempt.run_id)
        content = loads(attempt.input_json)
        action = settings.actions[content["action"]]
        if settings.check and content["action"] in settings.secretive:
            action, policy = run_secrets.without_secrets(action, settings.policy, settings.workspace)
            settings = replace(settings, policy=policy)
        return work_of(
            settings,
            attempt.task_id,
            content["action"],
            action,
            content["input"],
            attempt.timeout_ms / 1000,
            memory=content.get("memory", {}),
            recorded=recorded,
            foreseen=content.get("foreseen"),
        )

    def settings(self, run_id: str) -> RunSettings:
        """What the run has recorded for its workers."""
        settings = self._known.get(run_id)
        if settings is None:
            text, base_path = self._store.run_settings(run_id)
            data = loads(text)
            policy = policies.Policy.from_json(data["policy"])
            workspace = os.path.realpath(os.path.join(base_path, policy.workspace_root))
            settings = RunSettings(
                data["actions"],
                policy,
                bool(data["showDiff"]),
                # Runs from before there was `diff` go on as they began.
                bool(data.get("diff", data["showDiff"])),
                base_path,
                workspace,
                bool(data.get("interactive", False)),
                bool(data.get("check", False)),
                data.get("longTerm"),
                data.get("models"),
                (data.get("models") or data).get("pricing", {}),
                bool(data.get("forceEffect", False)),
                frozenset(
                    name for name, action in data["actions"].items() if run_secrets.takes_secrets(action, policy)
                ),
            )
            run_secrets.learn(data, policy, workspace)
            self._known[run_id] = settings
            if len(self._known) > KNOWN_RUNS:
                self._known.popitem(last=False)
        return settings

    @staticmethod
    def _request(attempt: Claim | Candidate, plan: EffectPlan, why_approval: str | None) -> EffectRequest:
        input_json = canonical(plan.input)
        digest = hex_digest(input_json)
        return EffectRequest(
            effect_id(attempt.run_id, attempt.task_id, attempt.number, 1, plan.operation, digest),
            1,
            plan.operation,
            plan.effect_class,
            plan.risk,
            plan.idempotency,
            digest,
            input_json,
            canonical(plan.expected_effect),
            plan.estimate,
            None if why_approval is None else _ask(plan, why_approval),
        )

    def _perform(self, claim: Claim, plan: EffectPlan, why_approval: str | None) -> Ending:
        """Start the effect, durably, and dispatch it unless it has ended before or must not start."""
        request = self._request(claim, plan, why_approval)
        self._faults.reach("before_effect_start")
        before = self._clock.monotonic()
        answer = self._store.start_effect(claim.fence, request, previous=None, task_id=claim.task_id)
        return self._dispatch(claim, request, plan, answer, before)

    def _dispatch(self, claim: Claim, request: EffectRequest, plan: EffectPlan, answer: Answer, since: float) -> Ending:
        """Do what the answer to the start allows. `since` is when the start was asked for (monotonic seconds)."""
        self._faults.reach("after_effect_start")
        if isinstance(answer, RecordedEffect):
            keeps = vouched(plan.keeps, confirmed=not answer.reconciled)
            return self._keep(claim, keeps, as_recorded(request, answer), answer.result_json)
        if isinstance(answer, AttemptHeld):
            return Ending(None, held=True)
        if isinstance(answer, StartRefused):
            return refused(answer, claim)
        if self._clock.monotonic() - since > self._timing.lease:
            # Held up for longer than the lease: somebody may think that we are dead, so nothing is sent.
            return Ending(None, EffectEnd(request.effect_id, "requested", dispatch=answer.dispatch), "held_up")
        outcome = plan.execute(
            EffectContext(
                request.effect_id,
                self._token,
                self._clock.monotonic,
                claim.fence.holder,
                self._store,
                claim.fence,
                self._faults.reach,
                answer.key,
            )
        )
        self._faults.reach("after_effect_result")
        ending = self.ended(request, answer, outcome)
        return self._keep(claim, plan.keeps, ending, None if ending.effect is None else ending.effect.result_json)

    def _keep(self, claim: Claim, keeps: Keeps | InAnswer | None, ending: Ending, result_json: str | None) -> Ending:
        """Store what a succeeded effect has left, before its task may complete (seed)."""
        if keeps is None or ending.attempt is None or ending.attempt.outcome != "succeeded":
            return ending
        try:
            found = kept_of(keeps, loads(result_json or "null") if isinstance(keeps, InAnswer) else None)
        except TaskFault as fault:
            return Ending(AttemptEnd("failed", error_json=canonical(fault.as_json())), ending.effect)
        return ending if found is None else self.keep(claim, found, ending)

    def keep(self, claim: Claim, keeps: Keeps, ending: Ending) -> Ending:
        """Store what an attempt leaves if it has succeeded; how it ends then."""
        if ending.attempt is None or ending.attempt.outcome != "succeeded":
            return ending
        from .ingestion import Ingestion

        limit = self.settings(claim.run_id).policy.max_artifact_bytes
        ingestion = Ingestion(self._store, self._faults, self._token, self._token.moves)
        kept = ingestion.run(claim, keeps, ending.effect, limit)
        effect = None if kept.confirmed else ending.effect
        if isinstance(kept.answer, AttemptHeld):
            return Ending(None, held=True)
        if kept.answer is not None:
            return refused(kept.answer, claim)
        if kept.stopped == "drain":
            return Ending(None, release="drain")
        if kept.stopped == "timeout":
            fault = TaskFault("timeout", "the time of the task was over before its artifacts were stored")
            return Ending(AttemptEnd("failed", error_json=canonical(fault.as_json())), effect)
        if kept.stopped is not None:
            fault = TaskFault("cancelled", f"ended before its artifacts were stored: {kept.stopped}")
            return Ending(AttemptEnd("cancelled", error_json=canonical(fault.as_json())))
        if kept.obstacle is not None:
            return Ending(None, release="artifact_store", pause=kept.obstacle)
        if kept.fault is not None:
            return Ending(AttemptEnd("failed", error_json=canonical(kept.fault.as_json())), effect)
        return Ending(ending.attempt, effect)

    def ended(self, request: EffectRequest, started: StartedEffect, outcome: EffectOutcome) -> Ending:
        """What the outcome of a dispatch means for its effect and, if that is the only one, for its attempt.

        Here every outcome passes before it is recorded, and is cleaned of the secrets that this worker knows.
        """
        outcome = cleaned(outcome)
        ending = self._end_of(request, started, outcome)
        if ending.effect is None or outcome.protocol is None:
            return ending
        return replace(ending, effect=replace(ending.effect, protocol=outcome.protocol))

    def _end_of(self, request: EffectRequest, started: StartedEffect, outcome: EffectOutcome) -> Ending:
        name, dispatch = request.effect_id, started.dispatch
        notes = canonical(outcome.notes) if outcome.notes else None
        result_json: str | None = None
        status, error = outcome.status, outcome.error
        try:
            # An extension may answer null.
            if outcome.result is not None or outcome.status == "succeeded":
                result_json = canonical(outcome.result)
        except TaskFault as fault:
            status, error = "failed", fault.as_json()
        if status == "succeeded":
            end = EffectEnd(
                name,
                "succeeded",
                result_json,
                None,
                notes,
                dispatch,
                outcome.usage,
                reserved=bool(request.estimate),
                memory=outcome.memory,
            )
            return Ending(AttemptEnd("succeeded", result_effect=name), end)
        error_json = canonical(error or {"code": "failed", "message": "the effect failed", "retryable": False})
        reason = self._token.reason
        if status == "not_dispatched":
            if reason == "drain":
                return Ending(None, EffectEnd(name, "requested", dispatch=dispatch), "drain")
            if reason is not None and reason != "timeout":
                return Ending(
                    AttemptEnd("cancelled", error_json=error_json), EffectEnd(name, "cancelled", dispatch=dispatch)
                )
            return Ending(
                AttemptEnd("failed", error_json=error_json),
                EffectEnd(name, "failed", None, error_json, notes, dispatch),
            )
        if status == "uncertain":
            if reason == "drain" and may_repeat(request.effect_class, request.idempotency):
                return Ending(None, EffectEnd(name, "lost", dispatch=dispatch), "drain")
            end = EffectEnd(name, "uncertain", result_json, error_json, notes, dispatch, outcome.usage)
            return Ending(AttemptEnd("uncertain", result_effect=name, error_json=error_json), end)
        end = EffectEnd(name, "failed", result_json, error_json, notes, dispatch, outcome.usage)
        return Ending(AttemptEnd("failed", error_json=error_json), end)


def cleaned(outcome: EffectOutcome) -> EffectOutcome:
    """An outcome without any secret that this worker knows (contract 11.2)."""
    redactor = known_secrets.redactor
    if not redactor:
        return outcome
    return replace(
        outcome,
        result=redactor.json(outcome.result),
        error=redactor.json(outcome.error),
        notes=redactor.json(outcome.notes),
    )


def as_recorded(request: EffectRequest, answer: RecordedEffect) -> Ending:
    """An earlier delivery has ended this effect: that end counts, nothing is dispatched."""
    if answer.reconciled:
        return Ending(AttemptEnd("succeeded", result_json=answer.result_json, result_effect=request.effect_id))
    if answer.status == "succeeded":
        return Ending(AttemptEnd("succeeded", result_effect=request.effect_id))
    outcome = "uncertain" if answer.status == "uncertain" else "failed"
    return Ending(AttemptEnd(outcome, result_effect=request.effect_id, error_json=answer.error_json or _CANCELLED))


_CANCELLED = '{"code":"effect_cancelled","message":"the effect was cancelled","retryable":false}'


def _not_executed(plan: EffectPlan, approval: str | None) -> dict[str, Any]:
    """The output, in check mode, of an effect whose result only its execution can tell."""
    return {
        "status": "requires_execution",
        "changed": False,
        "predictability": "requires_execution",
        "operation": plan.operation,
        "expectedEffect": plan.expected_effect,
        "approval": approval,
    }


def _ask(plan: EffectPlan, why: str) -> ApprovalAsk:
    return ApprovalAsk(why, plan.operation, plan.policy_name, canonical(redacted(plan.input)))


def refused(answer: StartRefused, claim: Claim) -> Ending:
    """How a delivery ends whose effect must not start."""
    if answer.reason == "paused":
        return Ending(None, release="paused")
    if answer.reason == "budget":
        found = answer.detail
        message = (
            f"the budget of {claim.run_id} does not allow {claim.task_id}: "
            f"{found['dimension']} would be {found['attempted']}, the limit is {found['limit']}"
        )
        fault = TaskFault("budget_exceeded", message, details=found)
        return Ending(AttemptEnd("failed", error_json=canonical(fault.as_json())))
    fault = TaskFault(answer.reason, f"not started: {answer.reason.replace('_', ' ')}")
    return Ending(AttemptEnd("cancelled", error_json=canonical(fault.as_json())))
