"""An attempt that a model carries out: turns and tool calls as numbered effects (contract 12.1; seed).

Each step (reading the instructions, a request to the model, a tool call) is one effect with the next ordinal. It is
started durably before anything is sent, and its end is recorded together with the start of the next one or with the
end of the attempt. So whoever dies in between leaves an exact account: the next delivery walks the same way, takes
every answer that is recorded, dispatches nothing for it, and goes on with the first step that has none. The requests
are rebuilt from the answers, so they have the same identity; one that does not is refused, never sent twice.

A model is asked at most once for a turn. What it asks for goes through the policy of the run like any other effect.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from agentctl.store import answers, standing
from agentctl.store import policy as policies
from agentctl.store.approvals import redacted
from agentctl.store.canonical import JsonError, canonical, effect_id, hex_digest, loads, parse_json, text_digest
from agentctl.store.clock import Clock
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, LeaseLost, TaskFault
from agentctl.store.faults import Faults
from agentctl.store.gate import start_quiet_thread
from agentctl.store.records import (
    ApprovalAsk,
    AttemptEnd,
    AttemptHeld,
    Claim,
    EffectEnd,
    EffectRequest,
    RecordedEffect,
    RecordedStep,
    SessionUpdate,
    StartedEffect,
    StartRefused,
    ToolCallStart,
)
from agentctl.store.timing import Timing

from .attempt import AttemptRunner, Ending, RunSettings, as_recorded, refused
from .effects import (
    Declared,
    EffectContext,
    EffectOutcome,
    EffectPlan,
    InAnswer,
    Keeps,
    Several,
    Written,
    kept_of,
    vouched,
)
from .effects.contracts import mismatch
from .providers import Call, ModelRequest, ModelResponse, Provider, ProviderFault, ToolCall, Usage
from .redaction import known as known_secrets
from .tools import ToolStep, tool_keeps, tool_plan, tool_specs

if TYPE_CHECKING:
    from .watch import Token

log = logging.getLogger(__name__)

KNOWN_PROVIDERS = 32


class Agents:
    """Carries out attempts of agents for one worker; keeps the providers of recent runs."""

    def __init__(
        self, host: AttemptRunner, store: Store, clock: Clock, timing: Timing, faults: Faults, token: Token
    ) -> None:
        self.host = host
        self.store = store
        self.clock = clock
        self.timing = timing
        self.faults = faults
        self.token = token
        self._providers: OrderedDict[tuple[str, str], Provider] = OrderedDict()

    def run(self, claim: Claim, draining: Callable[[], bool]) -> Ending:
        """One delivery. Raises `LeaseLost` when it is over, and `SyncFailed` before any dispatch."""
        return _Delivery(self, claim, draining).run()

    def provider(self, run_id: str, name: str, settings: RunSettings) -> Provider:
        """The provider of a run, with its secrets as they are now. Raises `ProviderFault` with `sent="no"`, and
        `TaskFault`."""
        known = self._providers.get((run_id, name))
        if known is None:
            from .effects.secret_values import as_texts
            from .providers.registry import provider_for

            definition = _models(settings)["providers"][name]
            resolve = as_texts(settings.policy, settings.workspace)
            known = provider_for(definition["kind"], definition, settings.policy, settings.workspace, resolve)
            if definition["kind"] != "fake":
                from .providers.exchange import secrets_may_change

                if secrets_may_change(definition, settings.policy):
                    return known
            self._providers[run_id, name] = known
            if len(self._providers) > KNOWN_PROVIDERS:
                self._providers.popitem(last=False)
        return known


class _Over(Exception):  # not an error: the delivery has come to its end
    """The delivery ends here."""

    def __init__(self, ending: Ending) -> None:
        super().__init__("the delivery is over")
        self.ending = ending


def _models(settings: RunSettings) -> dict[str, Any]:
    if settings.models is None:
        raise TaskFault("unsupported_capability", "this run was recorded without its agents")
    return settings.models


class _Delivery:
    """One walk through the conversation of an attempt."""

    def __init__(self, agents: Agents, claim: Claim, draining: Callable[[], bool]) -> None:
        self._agents = agents
        self._claim = claim
        self._draining = draining
        self._store = agents.store
        self._settings = agents.host.settings(claim.run_id)
        self._models = _models(self._settings)
        content = loads(claim.input_json)
        self._name: str = content["agent"]
        self._agent: dict[str, Any] = self._models["agents"][self._name]
        self._input: dict[str, Any] = content["input"]
        self._instructions: str = content.get("instructions", self._agent["instructions"])
        self._provider: str = self._agent["provider"]
        self._price: dict[str, Any] | None = self._models["pricing"].get(f"{self._provider}/{self._agent['model']}")
        self._until = agents.clock.monotonic() + claim.timeout_ms / 1000
        self._ordinal = 0
        self._recorded: dict[int, RecordedStep] = {}
        self._pending: EffectEnd | None = None
        self._usage = Usage()
        self._cost: int | None = 0
        self._keeps: list[Written | Declared] = []
        self._calls = 0
        self._bound = False
        """A call was carried out that must not be repeated: the retry policy starts no other attempt."""

    def run(self) -> Ending:
        """From the first step to the end of the delivery."""
        try:
            ending = self._walk()
        except _Over as over:
            ending = over.ending
        except LeaseLost:
            raise
        except TaskFault as fault:
            ending = self._failed(fault)
        except ConflictError as error:
            ending = self._failed(TaskFault("effect_identity_changed", error.message))
        return self._without_retry(ending) if self._bound else ending

    def _failed(self, fault: TaskFault) -> Ending:
        error = known_secrets.redactor.json(fault.as_json())
        return Ending(AttemptEnd("failed", error_json=canonical(error)), self._pending)

    @staticmethod
    def _without_retry(ending: Ending) -> Ending:
        if ending.attempt is None or ending.attempt.outcome != "failed" or ending.attempt.error_json is None:
            return ending
        error = {**loads(ending.attempt.error_json), "retryable": False}
        return replace(ending, attempt=replace(ending.attempt, error_json=canonical(error)))

    # -- the conversation ------------------------------------------------------------------------------------------

    def _walk(self) -> Ending:
        if self._settings.check:
            return self._foreseen()
        if self._claim.fence.delivery > 1:
            self._recorded = self._store.recorded_steps(self._claim.fence.attempt_id)
        if self._agent.get("instructionsFile") is not None:
            self._read_instructions()
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": first_message(self._input)}]}
        ]
        continuation: Mapping[str, Any] | None = None
        for turn in range(1, self._agent["maxTurns"] + 1):
            response = self._ask(turn, tuple(messages), continuation)
            self._count(response)
            if not self._wants_tools(response):
                return self._finish(response)
            if turn == self._agent["maxTurns"]:
                break
            continuation = response.continuation
            messages.append({"role": "assistant", "content": [dict(block) for block in response.assistant_content]})
            results = [
                {"type": "tool_result", "toolCallId": call.id, "output": self._call(call), "isError": False}
                for call in response.tool_calls
            ]
            messages.append({"role": "user", "content": results})
        limit = self._agent["maxTurns"]
        message = f"the model still asks for tools after {limit} turns, and maxTurns is {limit}"
        raise TaskFault("turn_limit", message, details={"maxTurns": limit})

    def _foreseen(self) -> Ending:
        """The output in check mode: nothing is asked (contract 3). The policy says no here as it would in a run."""
        self._decide_model()
        output = {
            "status": "requires_execution",
            "changed": False,
            "predictability": "requires_execution",
            "provider": self._provider,
        }
        return Ending(AttemptEnd("succeeded", result_json=canonical(output)))

    def _finish(self, response: ModelResponse) -> Ending:
        """The output of the task: what the last answer says (contract 12.1)."""
        schema = self._agent.get("structuredOutput")
        if schema is None:
            usage = {**self._usage.as_json(), "costMicrousd": self._cost}
            output: Any = {"text": response.text, "usage": usage}
        else:
            try:
                output = parse_json(response.text)
            except JsonError as error:
                raise TaskFault(
                    "structured_output", f"the answer is not the JSON that was asked for: {error}"
                ) from error
            problem = mismatch(schema, output)
            if problem is not None:
                raise TaskFault("structured_output", f"the answer does not fit structuredOutput: {problem}")
        ending = Ending(AttemptEnd("succeeded", result_json=canonical(output)), self._pending)
        if not self._keeps:
            return ending
        return self._agents.host.keep(self._claim, Several(tuple(self._keeps)), ending)

    def _wants_tools(self, response: ModelResponse) -> bool:
        """Whether the conversation goes on. Raises `TaskFault` for an answer that is no end and no question."""
        how = response.finish_reason
        if how == "max_tokens":
            raise TaskFault(
                "answer_cut_off",
                f"the answer was cut off at {self._agent['maxOutputTokens']} tokens; a part never stands for the whole",
                details={"maxOutputTokens": self._agent["maxOutputTokens"]},
            )
        if how == "refusal":
            raise TaskFault("model_refused", "the model has refused to answer")
        if how == "cancelled":
            raise TaskFault("model_cancelled", "the provider has cancelled the answer")
        if how == "tool_calls" and not response.tool_calls:
            raise TaskFault("malformed_answer", "the model asks for tools and names none")
        return bool(response.tool_calls)

    def _count(self, response: ModelResponse) -> None:
        """Add up what the attempt has used, and hold it against `usageLimit` (contract 6)."""
        one, all_of = response.usage, self._usage
        self._usage = Usage(
            all_of.input_tokens + one.input_tokens,
            all_of.output_tokens + one.output_tokens,
            all_of.reasoning_tokens + one.reasoning_tokens,
            all_of.cache_read_tokens + one.cache_read_tokens,
            all_of.cache_write_tokens + one.cache_write_tokens,
        )
        cost = answers.cost_of(one.as_json(), self._price)
        self._cost = None if cost is None or self._cost is None else min(self._cost + cost, answers.MAX_UNITS)
        limit = self._agent.get("usageLimit") or {}
        dollars = limit.get("maxCostUsd")
        for name, most, used in (
            ("maxInputTokens", limit.get("maxInputTokens"), self._usage.input_tokens),
            ("maxOutputTokens", limit.get("maxOutputTokens"), self._usage.output_tokens),
            ("maxCostUsd", None if dollars is None else dollars * answers.MICRO, self._cost),
        ):
            if most is not None and used is not None and used > most:
                unit = " millionths of a dollar" if name == "maxCostUsd" else ""
                raise TaskFault(
                    "usage_limit",
                    f"{used}{unit} were used in this attempt, usageLimit.{name} allows {most:g}",
                    details={"limit": name, "allowed": most, "used": used},
                )

    # -- steps -----------------------------------------------------------------------------------------------------

    def _effect(
        self,
        operation: str,
        effect_class: str,
        risk: str,
        idempotency: str,
        effect_input: Any,
        expected: Any,
        estimate: dict[str, int],
        ask: ApprovalAsk | None,
        call: ToolCallStart | None = None,
    ) -> EffectRequest:
        """The effect of the current ordinal."""
        text = canonical(effect_input)
        digest = hex_digest(text)
        claim = self._claim
        return EffectRequest(
            effect_id(claim.run_id, claim.task_id, claim.number, self._ordinal, operation, digest),
            self._ordinal,
            operation,
            effect_class,
            risk,
            idempotency,
            digest,
            text,
            canonical(expected),
            estimate,
            ask,
            call,
        )

    def _known(self, operation: str, effect_input: Any) -> RecordedStep | None:
        """What an earlier delivery has recorded for the current ordinal. Raises `ConflictError` if it was another."""
        step = self._recorded.get(self._ordinal)
        if step is None:
            return None
        claim, digest = self._claim, hex_digest(canonical(effect_input))
        expected = effect_id(claim.run_id, claim.task_id, claim.number, self._ordinal, operation, digest)
        if step.effect_id != expected:
            raise ConflictError(
                f"effect {self._ordinal} of {claim.task_id} was requested with another input before; "
                "it is not sent again"
            )
        if step.undone:
            raise standing.undone_fault(step.effect_id, operation)
        return step

    def _start(self, request: EffectRequest) -> StartedEffect | RecordedEffect:
        """Record the end of the step before, and start this one. Raises `_Over` when it must not start now."""
        if self._draining() or self._agents.token.reason == "drain":
            raise _Over(Ending(None, self._pending, "drain"))
        if self._left() <= 0:
            raise self._too_late()
        self._agents.faults.reach("before_effect_start")
        before = self._agents.clock.monotonic()
        answer = self._store.start_effect(
            self._claim.fence, request, previous=self._pending, task_id=self._claim.task_id
        )
        self._pending = None
        self._agents.faults.reach("after_effect_start")
        if isinstance(answer, AttemptHeld):
            raise _Over(Ending(None, held=True))
        if isinstance(answer, StartRefused):
            raise _Over(refused(answer, self._claim))
        if isinstance(answer, RecordedEffect):
            if answer.status != "succeeded":
                raise _Over(as_recorded(request, answer))
            return answer
        if self._agents.clock.monotonic() - before > self._agents.timing.lease:
            # Held up for longer than the lease: somebody may think that we are dead, so nothing is sent.
            end = EffectEnd(request.effect_id, "requested", dispatch=answer.dispatch)
            raise _Over(Ending(None, end, "held_up"))
        return answer

    def _left(self) -> float:
        return self._until - self._agents.clock.monotonic()

    def _too_late(self) -> TaskFault:
        seconds = self._claim.timeout_ms / 1000
        return TaskFault(
            "timeout", f"the task has taken longer than {seconds:g} s", details={"timeoutSeconds": seconds}
        )

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """While a call runs whose own limit is longer than what is left to the task: end it in time."""
        left = self._left()
        if left >= seconds:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            if not done.wait(max(0.0, left)):
                self._agents.token.cancel("timeout")

        thread = start_quiet_thread(watch, "limit")
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _decide(self, name: str, effect_class: str, risk: str, approval: str = "policy") -> str | None:
        """Why a person has to approve a step, or None. Raises `policy_denied`."""
        decision = policies.decide_effect(
            self._settings.policy,
            policy_name=name,
            effect_class=effect_class,
            risk=risk,
            provider=self._provider,
            tool_approval=approval,
            interactive=self._settings.interactive,
        )
        if decision.denied:
            raise TaskFault("policy_denied", decision.reason)
        return decision.reason if decision.needs_approval else None

    def _decide_model(self) -> str | None:
        return self._decide("model", "model", "medium")

    # -- instructions ----------------------------------------------------------------------------------------------

    def _read_instructions(self) -> None:
        """The text was captured with the document; that this task uses it is an observation like any reading."""
        self._ordinal += 1
        path, text = self._agent["instructionsFile"], self._agent["instructions"]
        operation, given = "agent.instructions.read", {"path": path, "contentDigest": self._agent["instructionsDigest"]}
        if self._known(operation, given) is not None:
            return
        why = self._decide("filesystem.read", "observe", "low")
        ask = None if why is None else ApprovalAsk(why, operation, "filesystem.read", canonical(given), self._name)
        request = self._effect(
            operation, "observe", "low", "idempotent", given, {"path": path, "changed": False}, {}, ask
        )
        answer = self._start(request)
        if isinstance(answer, RecordedEffect):
            return
        data = text.encode("utf-8")
        result = {"path": path, "bytes": len(data), "sha256": sha256(data).hexdigest()}
        self._pending = EffectEnd(
            request.effect_id, "succeeded", canonical(result), dispatch=answer.dispatch, reserved=False
        )
        self._agents.faults.reach("after_effect_result")

    # -- the model -------------------------------------------------------------------------------------------------

    def _ask(
        self, turn: int, messages: tuple[dict[str, Any], ...], continuation: Mapping[str, Any] | None
    ) -> ModelResponse:
        """One turn: its recorded answer, or that of the provider."""
        self._ordinal += 1
        asked = self._request(messages, continuation)
        given = asked.as_json()
        step = self._known(self._provider, given)
        if step is not None:
            return response_of(step.result_json)
        why = self._decide_model()
        ask = None
        if why is not None:
            ask = ApprovalAsk(why, self._provider, "model", canonical(redacted(given)), self._name)
        estimate = answers.most(len(canonical(given).encode("utf-8")), self._agent["maxOutputTokens"], self._price)
        expected = {"provider": self._provider, "model": self._agent["model"], "turn": turn}
        request = self._effect(self._provider, "model", "medium", "at_most_once", given, expected, estimate, ask)
        from .providers.registry import load

        load(self._models["providers"][self._provider]["kind"])
        answer = self._start(request)
        if isinstance(answer, RecordedEffect):
            return response_of(answer.result_json)
        return self._send(request, answer, asked)

    def _request(self, messages: tuple[dict[str, Any], ...], continuation: Mapping[str, Any] | None) -> ModelRequest:
        agent = self._agent
        options = agent["providerOptions"]
        reasoning = agent.get("reasoning")
        return ModelRequest(
            model=agent["model"],
            instructions=self._instructions,
            messages=messages,
            tools=tool_specs(agent["tools"], self._models["tools"]),
            max_output_tokens=agent["maxOutputTokens"],
            reasoning=None if reasoning is None else {k: v for k, v in reasoning.items() if v is not None},
            structured_output=agent.get("structuredOutput"),
            continuation=continuation,
            prompt_cache_key=f"{self._models['workflow']}:{self._name}",
            safety_identifier=options.get("safetyIdentifier"),
            provider_options=options,
        )

    def _send(self, request: EffectRequest, started: StartedEffect, asked: ModelRequest) -> ModelResponse:
        """Send a started request, once. Raises `_Over` for every end but an answer."""
        seconds = min(float(self._agent["timeoutSeconds"]), max(0.0, self._left()))
        events = _Events(self._store, self._claim, request.effect_id)
        call = Call(
            token=self._agents.token,
            timeout_seconds=seconds,
            idempotency_key=request.effect_id,
            monotonic=self._agents.clock.monotonic,
            on_event=events if self._agent["stream"] else None,
            number=lambda: self._store.request_number(request.effect_id),
        )
        try:
            provider = self._agents.provider(self._claim.run_id, self._provider, self._settings)
            with self._limited(self._agent["timeoutSeconds"]):
                response = provider.complete(asked, call)
            events.finish()
            recorded = _without_secrets(response)
            result_json = canonical(recorded)
            if (problem := answers.answer_problem(loads(result_json))) is not None:
                raise ProviderFault("provider_malformed", f"the answer cannot be used: {problem}", sent="unknown")
            if recorded != response.as_json():  # it goes on with what is recorded, as a later delivery would
                response = response_of(result_json)
            outcome = None
        except ProviderFault as fault:
            outcome = outcome_of(fault)
        except JsonError as error:
            outcome = EffectOutcome("uncertain", error=TaskFault("provider_malformed", str(error)).as_json())
        except TaskFault as fault:
            outcome = EffectOutcome.not_dispatched(fault)
        events.require_lease()
        self._agents.faults.reach("after_effect_result")
        if outcome is not None:
            raise _Over(self._agents.host.ended(request, started, outcome))
        continuation = None if response.continuation is None else canonical(dict(response.continuation))
        self._pending = EffectEnd(
            request.effect_id,
            "succeeded",
            result_json,
            dispatch=started.dispatch,
            usage=answers.used(response.usage.as_json(), self._price),
            session=SessionUpdate(self._provider, self._claim.number, continuation),
        )
        return response

    # -- tools -----------------------------------------------------------------------------------------------------

    def _call(self, call: ToolCall) -> Any:
        """Carry out one tool call; its output. An error is not given back to the model: the task fails."""
        self._calls += 1
        limit = self._agent["maxToolCalls"]
        if self._calls > limit:
            message = f"the model asks for tool call {self._calls}, and maxToolCalls is {limit}"
            raise TaskFault("tool_call_limit", message, details={"maxToolCalls": limit})
        if call.name not in self._agent["tools"]:
            raise TaskFault("unknown_tool", f"the model asks for the tool {call.name!r}, which its agent does not have")
        tool: dict[str, Any] = self._models["tools"][call.name]
        given = dict(call.input)
        problem = mismatch(tool["inputSchema"], given)
        if problem is not None:
            raise TaskFault("tool_input", f"the input of {call.name} does not fit its inputSchema: {problem}")
        self._ordinal += 1
        operation, recorded_input = f"tool.{call.name}", {"callId": call.id, "input": given, "tool": call.name}
        known = self._known(operation, recorded_input)
        if not tool["retrySafe"]:
            self._bound = True
        if known is not None:
            output = loads(known.result_json or "null")
            self._keep(vouched(tool_keeps(self._step(call, tool, given)), confirmed=known.confirmed), output)
            return output
        plan = tool_plan(self._step(call, tool, given))
        if plan.keeps is not None:
            self._agents.host.require_store()
        output = self._execute(call, tool, plan, operation, recorded_input)
        self._keep(plan.keeps, output)
        return output

    def _keep(self, keeps: Keeps | InAnswer | None, output: Any) -> None:
        found = kept_of(keeps, output, [part.path for part in self._keeps if isinstance(part, Written)])
        if found is not None:
            self._keeps += found.parts if isinstance(found, Several) else (found,)

    def _step(self, call: ToolCall, tool: dict[str, Any], given: dict[str, Any]) -> ToolStep:
        expected = None
        if self._claim.fence.delivery > 1:
            text = self._store.recorded_expectation(self._claim.fence.attempt_id, self._ordinal)
            expected = None if text is None else loads(text)
        return ToolStep(self._claim.task_id, call.name, tool, given, self._settings, expected)

    def _execute(
        self, call: ToolCall, tool: dict[str, Any], plan: EffectPlan, operation: str, recorded_input: dict[str, Any]
    ) -> Any:
        name = policies.tool_policy_name(self._settings.policy, plan.policy_name, call.name)
        why = self._decide(name, plan.effect_class, plan.risk, tool["approval"])
        ask = None
        if why is not None:
            ask = ApprovalAsk(why, call.name, plan.policy_name, canonical(redacted(recorded_input)), self._name)
        request = self._effect(
            operation,
            plan.effect_class,
            plan.risk,
            plan.idempotency,
            recorded_input,
            plan.expected_effect,
            {"toolCalls": 1, **plan.estimate},
            ask,
            ToolCallStart(call.id, call.name, text_digest(canonical(recorded_input["input"]))),
        )
        answer = self._start(request)
        if isinstance(answer, RecordedEffect):
            return loads(answer.result_json or "null")
        agents = self._agents
        context = EffectContext(
            request.effect_id,
            agents.token,
            agents.clock.monotonic,
            self._claim.fence.holder,
            self._store,
            self._claim.fence,
            agents.faults.reach,
            answer.key,
        )
        with self._limited(tool["timeoutSeconds"]):
            outcome = plan.execute(context)
        outcome = self._held_to_contract(call.name, tool, outcome)
        agents.faults.reach("after_effect_result")
        ending = agents.host.ended(request, answer, outcome)
        if ending.attempt is None or ending.attempt.outcome != "succeeded" or ending.effect is None:
            raise _Over(ending)
        self._pending = ending.effect
        return loads(ending.effect.result_json or "null")

    def _held_to_contract(self, name: str, tool: dict[str, Any], outcome: EffectOutcome) -> EffectOutcome:
        """What a tool gives back fits its outputSchema, or its effect has failed. Each call is one of the budget."""
        usage = outcome.usage if outcome.status == "not_dispatched" else {"toolCalls": 1, **outcome.usage}
        if outcome.status == "succeeded":
            problem = mismatch(tool["outputSchema"], outcome.result)
            if problem is None:
                return replace(outcome, usage=usage)
            fault = TaskFault("tool_output", f"the output of {name} does not fit its outputSchema: {problem}")
            return EffectOutcome(
                "failed", outcome.result, fault.as_json(), usage, outcome.notes, protocol=outcome.protocol
            )
        error = dict(outcome.error or {})
        if not tool["retrySafe"]:
            error["retryable"] = False
        return replace(outcome, usage=usage, error=error or None)


class _Events:
    """Takes the events of a streamed answer and stores each; remembers that the lease was lost.

    A secret may come in several pieces, of which none is one: the end of a text that could be the beginning of a secret
    is held back until it is known to be none. What is held when the answer breaks off is not told.
    """

    def __init__(self, store: Store, claim: Claim, effect: str) -> None:
        self._store = store
        self._claim = claim
        self._effect = effect
        self._more = True
        self._held = ""
        self._lost: LeaseLost | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["type"] != "text_delta":
            self._store_one(event)
            return
        told, self._held = known_secrets.redactor.split(self._held + event["text"])
        if told or not event["text"]:
            self._store_one({**event, "text": told})

    def finish(self) -> None:
        """The answer has come to its end: what was held back belongs to it."""
        if self._held:
            held, self._held = self._held, ""
            self._store_one({"type": "text_delta", "text": held})

    def _store_one(self, event: Mapping[str, Any]) -> None:
        if not self._more:
            return
        try:
            cleaned = known_secrets.redactor.json(dict(event))
            self._more = self._store.stream_event(self._claim.fence, self._effect, cleaned)
        except LeaseLost as error:
            self._lost = error
            raise

    def require_lease(self) -> None:
        """A provider takes what we raise for a lost connection; that we were deposed is another matter."""
        if self._lost is not None:
            raise self._lost


def first_message(given: Mapping[str, Any]) -> str:
    """What the model is told first: `prompt` if it is text, else the JSON of the whole input (contract 12.1)."""
    prompt = given.get("prompt")
    return prompt if isinstance(prompt, str) else canonical(dict(given))


def _without_secrets(response: ModelResponse) -> dict[str, Any]:
    """The answer as it is recorded. What the service has said is cleaned; the words and numbers of the form itself are
    not, or a secret of a few characters would make it an answer that nobody can use."""
    clean, given = known_secrets.redactor.json, response.as_json()
    if given["continuation"] is not None:
        given["continuation"] = {**given["continuation"], "value": clean(given["continuation"]["value"])}
    calls = [{name: clean(value) for name, value in call.items()} for call in given["toolCalls"]]
    blocks = [
        {name: value if name == "type" else clean(value) for name, value in block.items()}
        for block in given["assistantContent"]
    ]
    said = {"responseId": clean(given["responseId"]), "text": clean(given["text"])}
    return {**given, **said, "toolCalls": calls, "assistantContent": blocks}


def response_of(text: str | None) -> ModelResponse:
    """A recorded answer. Raises `TaskFault` for one that cannot be used, whoever has recorded it."""
    value = loads(text or "null")
    problem = answers.answer_problem(value)
    if problem is not None:
        raise TaskFault("malformed_answer", f"the recorded answer cannot be used: {problem}")
    usage = value["usage"]
    return ModelResponse(
        value["responseId"],
        value["text"],
        tuple(ToolCall(call["id"], call["name"], call["input"]) for call in value["toolCalls"]),
        tuple(value["assistantContent"]),
        value["continuation"],
        Usage(
            usage.get("inputTokens", 0),
            usage.get("outputTokens", 0),
            usage.get("reasoningTokens", 0),
            usage.get("cacheReadTokens", 0),
            usage.get("cacheWriteTokens", 0),
            usage.get("costMicrousd"),
        ),
        value["finishReason"],
    )


def outcome_of(fault: ProviderFault) -> EffectOutcome:
    """What a request without an answer means for its effect, its budget and the retry policy (contract 5.4, row 21)."""
    error = fault.as_task_fault(retryable=fault.retryable and fault.sent != "unknown").as_json()
    if fault.sent == "no":
        return EffectOutcome("not_dispatched", error=error)
    if fault.sent == "unknown":
        return EffectOutcome("uncertain", error=error)
    usage: dict[str, int] = {}
    if not fault.passed:
        usage = {"providerRequests": 1, "turns": 1}
        if fault.usage is not None:
            units = answers.used(fault.usage.as_json(), None)
            usage |= {name: units[name] for name in ("inputTokens", "outputTokens") if units[name]}
    return EffectOutcome("failed", error=error, usage=usage)
