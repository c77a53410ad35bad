"""`a2a.delegate`: one message to an A2A agent, and the task that it makes of it (contract 3, 5.4 and 12.6).

The agent's card is asked first; its JSON-RPC interface has to have the origin of the card. Then the message is sent,
once and never again: `SendMessage`, or `SendStreamingMessage` where the card offers streams. As soon as the agent names
its task, that name is durable, before anything else is asked; from then on the task can be observed by anybody
(`effects continue-remote`). Between the sending and that moment nobody can know what has become of the message:
`submissionAmbiguous`.

- Before the message is sent: no dispatch.
- A JSON-RPC error in answer to it, a refusal by HTTP (4xx, 503), a task that failed or was rejected: definite.
- Everything that leaves the end of the task open (time, connection, answers that are not to be understood, too many
  polls, a task that waits for more input, cancellation): uncertain.

The result is the agent's message, or its completed task. Artifacts by URL have to have the origin of the card.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from agentctl.store.canonical import JsonError, canonical, parse_json, value_digest
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.store.records import ProtocolNote

from ..network import Guard, Target, target_of
from ..redaction import REDACTED, known
from . import CancelToken, EffectContext, EffectOutcome, EffectPlan, InAnswer, Work, refuse_cancelled
from .a2a_artifacts import decoded
from .remote import COURTESY_SECONDS, Ended, Peer, carry_out, limit_of, load, peer, peer_of, require_extra, text_field

if TYPE_CHECKING:
    import httpx
    from a2a.client.transports.jsonrpc import JsonRpcTransport

VERSION_HEADER: Final = "A2A-Version"
BINDING: Final = "JSONRPC"
EXACT: Final = 2.0**53
"""From here on a float does not say which whole number it was."""

_DONE: Final = "TASK_STATE_COMPLETED"
_FAILED: Final = {
    "TASK_STATE_FAILED": "a2a_task_failed",
    "TASK_STATE_REJECTED": "a2a_task_rejected",
    "TASK_STATE_CANCELED": "a2a_task_canceled",
}
_WAITS: Final = {
    "TASK_STATE_INPUT_REQUIRED": "waits for more input",
    "TASK_STATE_AUTH_REQUIRED": "waits for an authorization",
}
_RUNS: Final = frozenset({"TASK_STATE_SUBMITTED", "TASK_STATE_WORKING"})


@dataclass(frozen=True, slots=True, repr=False)
class _Call:
    peer: Peer
    message_id: str
    message: str
    whole_seconds: float
    request_seconds: float


@dataclass(slots=True)
class _State:
    """What is known of a call by now; `note` is its stored form."""

    call: _Call
    rpc_url: str | None = None
    card_digest: str | None = None
    sent: bool = False
    ambiguous: bool = False
    task_id: str | None = None
    task: dict[str, Any] | None = None
    polls: int = 0
    cancelling: bool = False
    said: Any = None
    """The result of the agent's last JSON answer in its own words, None where they cannot be had."""

    def note(self, status: str) -> ProtocolNote:
        asked = self.call.peer
        state = {
            "action": asked.action,
            "peer": asked.name,
            "cardUrl": asked.url,
            "cardDigest": self.card_digest,
            "rpcUrl": self.rpc_url,
            "protocolVersion": asked.definition["protocolVersion"],
            "headers": asked.described,
            "messageId": self.call.message_id,
            "remoteTaskId": self.task_id,
            # The artifacts of a task are in the result, and nowhere else.
            "task": None
            if self.task is None
            else {k: self.task[k] for k in ("id", "contextId", "status") if k in self.task},
            "polls": self.polls,
            "submissionAmbiguous": self.ambiguous,
        }
        return ProtocolNote("a2a", asked.name, self.call.message_id, status, canonical(state))


class _Problem(Exception):
    """Why there is no result. `definite`: the agent has said so itself."""

    def __init__(self, fault: TaskFault, *, definite: bool = False) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.definite = definite


def prepare_a2a(work: Work) -> EffectPlan:
    """Check peer and message. Raises `invalid_input`, `policy_denied`, `secret_unavailable`, `unsupported_capability`
    when the client library is not installed."""
    require_extra("a2a.delegate")
    load("a2a.delegate")
    asked = peer_of(work, "peer", "cardUrl")
    message_id, message = text_field(work.input, "messageId"), text_field(work.input, "message")
    call = _Call(asked, message_id, message, *limit_of(work, asked.definition))
    return EffectPlan(
        operation="a2a.delegate",
        effect_class="remote_agent",
        risk="high",
        idempotency="at_most_once",
        policy_name="a2a.delegate",
        input={
            "peer": asked.name,
            "messageId": message_id,
            "message": message,
            "cardUrl": asked.url,
            "protocolVersion": asked.definition["protocolVersion"],
        },
        expected_effect={"peer": asked.name, "cardUrl": asked.url, "messageId": message_id, "message": message},
        estimate={},
        execute=partial(_execute, call),
        keeps=InAnswer(),
    )


def _execute(call: _Call, context: EffectContext) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    logging.getLogger("a2a").setLevel(logging.CRITICAL)
    state = _State(call)
    result, error, ended = carry_out(partial(_delegate, state, context), context.token, call.whole_seconds)
    if result is not None:
        return EffectOutcome("succeeded", result, protocol=state.note("succeeded"))
    problem = error if isinstance(error, _Problem) else _broken_off(state, ended, error)
    fault = problem.fault
    if not state.sent:
        return EffectOutcome("not_dispatched", error=fault.as_json())
    if problem.definite:
        return EffectOutcome("failed", error=fault.as_json(), protocol=state.note("failed"))
    state.ambiguous = state.task_id is None
    status = "cancellation_requested" if state.cancelling else "uncertain"
    return EffectOutcome("uncertain", error=fault.as_json(), protocol=state.note(status))


def _broken_off(state: _State, ended: Ended, error: BaseException | None) -> _Problem:
    if ended.reason is not None:
        return _Problem(TaskFault("cancelled", f"ended: {ended.reason}", details={"reason": ended.reason}))
    if ended.late or error is None:
        return _Problem(TaskFault("a2a_timeout", f"there was no result within {state.call.whole_seconds:g} s"))
    words = state.call.peer.words(f"{type(error).__name__}: {error}")
    return _Problem(TaskFault("a2a_malformed", f"the conversation with the agent broke off: {words}"))


# -- the conversation --------------------------------------------------------------------------------------------------


async def _delegate(state: _State, context: EffectContext, ended: Ended) -> dict[str, Any]:
    """Card, message, and the task until it has ended. Raises `_Problem`."""
    async with _client(state, Guard(context.monotonic)) as client:
        agent = await _discover(state, client)
        ended.must_leave(lambda: context.tell(state.note("submitting")))
        ended.must_leave(lambda: context.reach("after_call_prepared"))
        try:
            streams = agent.agent_card.capabilities.streaming
            answer = await (_stream(state, agent, context, ended) if streams else _send(state, agent, context, ended))
            if answer is not None:
                return answer
            return await _poll(state, agent)
        except asyncio.CancelledError:
            if ended.reason is not None and state.task_id is not None:
                await _cancel(state, agent, context, ended)
            raise


def _client(state: _State, guard: Guard) -> httpx.AsyncClient:
    from ..http_transport import async_client, with_own

    asked, seconds = state.call.peer, state.call.request_seconds
    headers = with_own(asked.headers, {VERSION_HEADER: asked.definition["protocolVersion"]})
    client = async_client(asked.policy, guard, headers=headers, timeout_seconds=seconds, tls=asked.tls)
    client.event_hooks = {"response": [partial(_listen, state)]}
    return client


async def _listen(state: _State, response: httpx.Response) -> None:
    """Keep what an answer says before the library makes its own of it (see `_exact`)."""
    import httpx

    from ..http_transport import EventBytes

    state.said = None
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "text/event-stream" and isinstance(response.stream, httpx.AsyncByteStream):
        response.stream = EventBytes(response.stream)
    if kind != "application/json":
        return
    try:
        answer = parse_json(await response.aread())
    except JsonError:
        return  # what is wrong with it is found by whoever reads it
    state.said = answer.get("result") if isinstance(answer, dict) else None


async def _discover(state: _State, client: httpx.AsyncClient) -> JsonRpcTransport:
    """The agent's card and its JSON-RPC interface, which has to have the card's origin (contract 11.2)."""
    from a2a.client.card_resolver import A2ACardResolver
    from a2a.client.transports.jsonrpc import JsonRpcTransport
    from google.protobuf.json_format import MessageToDict

    call = state.call
    parts = urlsplit(call.peer.url)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    resolver = A2ACardResolver(client, f"{parts.scheme}://{parts.netloc}", path)
    try:
        async with asyncio.timeout(call.request_seconds):
            card = await resolver.get_agent_card()
    except Exception as error:
        raise _problem_of(call, "the agent card", error, before=True) from error
    version = call.peer.definition["protocolVersion"]
    for interface in card.supported_interfaces:
        if interface.protocol_binding == BINDING and interface.protocol_version == version:
            state.rpc_url = interface.url
            break
    if state.rpc_url is None:
        message = f"the agent {call.peer.name!r} has no {BINDING} interface of protocol version {version}"
        raise _Problem(TaskFault("a2a_card", message))
    if not _same_origin(state.rpc_url, call.peer.target):
        message = f"the interface of the agent {call.peer.name!r} has another origin than its card"
        raise _Problem(TaskFault("a2a_card", message, details={"url": call.peer.words(state.rpc_url)}))
    state.card_digest = value_digest(MessageToDict(card))
    return JsonRpcTransport(client, card, state.rpc_url)


def _same_origin(url: str, target: Target) -> bool:
    try:
        return target_of(url) == target
    except ValueError:
        return False


def _request(call: _Call) -> Any:
    from a2a.types import Message, Part, Role, SendMessageConfiguration, SendMessageRequest

    message = Message(message_id=call.message_id, role=Role.ROLE_USER, parts=[Part(text=call.message)])
    # The name of the task is wanted at once; how it goes on is asked for afterwards.
    return SendMessageRequest(message=message, configuration=SendMessageConfiguration(return_immediately=True))


async def _send(state: _State, agent: JsonRpcTransport, context: EffectContext, ended: Ended) -> dict[str, Any] | None:
    """Send the message once; the result if it is there already, None when the task goes on. Raises `_Problem`."""
    call = state.call
    state.sent = True
    try:
        async with asyncio.timeout(call.request_seconds):
            answer = await agent.send_message(_request(call))
    except Exception as error:
        raise _sending_problem(state, error) from error
    ended.must_leave(lambda: context.reach("after_call_answered"))
    if answer.HasField("message"):
        return _message(state, answer.message)
    if not answer.HasField("task"):
        raise _malformed("the agent answered with neither a message nor a task")
    return _learn(state, answer.task, context, ended)


async def _stream(
    state: _State, agent: JsonRpcTransport, context: EffectContext, ended: Ended
) -> dict[str, Any] | None:
    """The same as a stream. A stream that ends before the task does is followed by polls."""
    call = state.call
    state.sent = True
    events = agent.send_message_streaming(_request(call))
    try:
        async for event in events:
            if event.HasField("message"):
                return _message(state, event.message)
            name = event.task.id or event.status_update.task_id or event.artifact_update.task_id
            if not name:
                raise _malformed("the agent sent an event without the name of its task")
            if state.task_id is None:
                ended.must_leave(lambda: context.reach("after_call_answered"))
                _named(state, name, context, ended)
            elif state.task_id != name:
                raise _malformed("the agent sent an event of another task")
            status = event.task.status if event.HasField("task") else event.status_update.status
            if status.state and _state_name(status.state) not in _RUNS:
                return None  # the whole task is asked for once more, with all that belongs to it
    except _Problem:
        raise
    except Exception as error:
        if ended.escaped is not None or state.task_id is None:
            raise _sending_problem(state, error) from error
        raise _problem_of(call, "the stream of the task", error) from error
    finally:
        await events.aclose()
    if state.task_id is None:
        raise _malformed("the stream ended before the agent had named a task")
    return None


def _named(state: _State, name: str, context: EffectContext, ended: Ended) -> None:
    """The agent has named its task: durable before anything else is asked."""
    state.task_id = name
    ended.must_leave(lambda: context.tell(state.note("polling")))
    ended.must_leave(lambda: context.reach("after_call_stored"))


def _learn(state: _State, task: Any, context: EffectContext, ended: Ended) -> dict[str, Any] | None:
    if not task.id:
        raise _malformed("the agent answered with a task that has no name")
    _named(state, task.id, context, ended)
    return _result(state, task)


async def _poll(state: _State, agent: JsonRpcTransport) -> dict[str, Any]:
    """Ask for the task until it has ended, at most `maxPolls` times. Raises `_Problem`."""
    from a2a.types import GetTaskRequest

    call = state.call
    limit = call.peer.definition["maxPolls"]
    while state.polls < limit:
        if state.polls:
            await asyncio.sleep(call.peer.definition["pollIntervalMs"] / 1000)
        state.polls += 1
        try:
            async with asyncio.timeout(call.request_seconds):
                task = await agent.get_task(GetTaskRequest(id=state.task_id or ""))
        except Exception as error:
            raise _problem_of(call, "the task", error) from error
        if task.id != state.task_id:
            raise _malformed("the agent answered with another task")
        found = _result(state, task)
        if found is not None:
            return found
    raise _Problem(TaskFault("a2a_poll_limit", f"the remote task had not ended after {limit} polls"))


async def _cancel(state: _State, agent: JsonRpcTransport, context: EffectContext, ended: Ended) -> None:
    """Ask the agent to cancel its task, at best: the effect is uncertain either way."""
    from a2a.types import CancelTaskRequest

    state.cancelling = True
    ended.must_leave(lambda: context.tell(state.note("cancellation_requested")))
    try:
        async with asyncio.timeout(COURTESY_SECONDS):
            await agent.cancel_task(CancelTaskRequest(id=state.task_id or ""))
    except Exception:
        logging.getLogger(__name__).info("the agent did not take the cancellation of %s", state.task_id)


# -- what an answer means ----------------------------------------------------------------------------------------------


def _state_name(number: int) -> str:
    from a2a.types import TaskState

    name: str = TaskState.Name(number)
    return name


def _json(state: _State, message: Any, kind: str) -> dict[str, Any]:
    """A `message` or a `task` as JSON."""
    from google.protobuf.json_format import MessageToDict

    said = state.said if isinstance(state.said, dict) else {}
    found: dict[str, Any] = _exact(MessageToDict(message), said.get(kind, said))
    cleaned: dict[str, Any] = state.call.peer.clean(_with_clean_bytes(found, known.redactor.long_forms()))
    return cleaned


def _with_clean_bytes(value: Any, secrets: list[bytes]) -> Any:
    """Take secrets out of the bytes of `raw` parts: in the base64 of more than the secret alone nobody sees them."""
    if not secrets:
        return value
    if isinstance(value, list):
        return [_with_clean_bytes(item, secrets) for item in value]
    if not isinstance(value, dict):
        return value
    data = decoded(value["raw"]) if isinstance(value.get("raw"), str) else None
    if data is not None and any(secret in data for secret in secrets):
        for secret in secrets:
            data = data.replace(secret, REDACTED.encode())
        return {**value, "raw": base64.b64encode(data).decode()}
    return {name: _with_clean_bytes(item, secrets) for name, item in value.items()}


def _exact(found: Any, said: Any) -> Any:
    """A value of the library with the numbers that the agent has said. In between all of them were floats: `42` became
    `42.0`, and a long number another one. Where its own words are not to be had a whole number is one again."""
    if isinstance(found, dict):
        words = said if isinstance(said, dict) else {}
        return {name: _exact(item, words.get(name)) for name, item in found.items()}
    if isinstance(found, list):
        items = said if isinstance(said, list) and len(said) == len(found) else [None] * len(found)
        return [_exact(item, word) for item, word in zip(found, items, strict=True)]
    if isinstance(found, float):
        if isinstance(said, int | float) and not isinstance(said, bool) and float(said) == found:
            return said
        if found.is_integer() and abs(found) < EXACT:
            return int(found)
    return found


def _message(state: _State, message: Any) -> dict[str, Any]:
    _check_parts(state, message.parts)
    return _json(state, message, "message")


def _result(state: _State, task: Any) -> dict[str, Any] | None:
    """The completed task, or None while it goes on. Raises `_Problem`."""
    found = _json(state, task, "task")
    state.task = found
    name = _state_name(task.status.state)
    if name in _RUNS:
        return None
    if name in _FAILED:
        text = " ".join(part.text for part in task.status.message.parts if part.text)
        word = name.removeprefix("TASK_STATE_").lower()
        message = f"the remote task ended as {word}" + (f": {state.call.peer.words(text)}" if text else "")
        details = {"remoteTaskId": state.task_id, "state": name}
        raise _Problem(
            TaskFault(_FAILED[name], message, retryable=name == "TASK_STATE_FAILED", details=details), definite=True
        )
    if name in _WAITS:
        raise _Problem(
            TaskFault("a2a_input_required", f"the remote task {_WAITS[name]}, which nobody can give it here")
        )
    if name != _DONE:
        raise _malformed(f"the remote task has the state {name}")
    for artifact in task.artifacts:
        _check_parts(state, artifact.parts)
    return found


def _check_parts(state: _State, parts: Any) -> None:
    """Each part is exactly one of text, raw, data and url (two at once are refused when they are read)."""
    for part in parts:
        kind = part.WhichOneof("content")
        if kind is None:
            raise _malformed("a part of the answer is none of text, raw, data and url")
        if kind == "url" and not _same_origin(part.url, state.call.peer.target):
            raise _malformed("a part of the answer is elsewhere: its url has another origin than the agent's card")


def _malformed(message: str) -> _Problem:
    return _Problem(TaskFault("a2a_malformed", message))


def _sending_problem(state: _State, error: Exception) -> _Problem:
    """Why there is no answer to the message; whether it may have arrived is noted."""
    from ..http_transport import never_sent

    if never_sent(error) is not None:
        state.sent = False
    return _problem_of(state.call, "the message", error, sending=True)


def _problem_of(call: _Call, what: str, error: Exception, *, before: bool = False, sending: bool = False) -> _Problem:
    """What an error of the library comes to: by its cause, since the library's own words tell little."""
    from a2a.client.errors import A2AClientError
    from a2a.utils.errors import A2AError

    from ..http_transport import AnswerTooLarge, AnswerUnreadable, RedirectRefused, never_sent

    words = call.peer.words(str(error) or type(error).__name__)
    unsent = never_sent(error)
    if unsent is not None:
        return _Problem(call.peer.unsent(unsent, "a2a_unavailable"))
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RedirectRefused):
            message = f"{what}: the agent answered with a redirect, which is not followed"
            return _Problem(TaskFault("a2a_http_error", message, details={"status": cause.status}), definite=sending)
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            definite = sending and (status < 500 or status == 503)
            again = status == 429 or status >= 500
            message = f"{what}: the agent answered with HTTP {status}"
            return _Problem(
                TaskFault("a2a_http_error", message, retryable=again, details={"status": status}), definite=definite
            )
        if isinstance(cause, AnswerTooLarge | AnswerUnreadable):
            return _Problem(TaskFault("a2a_malformed", f"{what}: the answer cannot be taken: {cause}"))
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            return _Problem(TaskFault("a2a_timeout", f"{what}: there was no answer in time", retryable=before))
        cause = cause.__cause__
    import httpx

    if isinstance(error, A2AClientError) and isinstance(error.__cause__, httpx.TransportError):
        message = f"{what}: the connection was lost: {words}"
        return _Problem(TaskFault("a2a_connection_lost", message, retryable=before))
    if isinstance(error, A2AError) and error.__cause__ is None and not words.startswith("Invalid JSON-RPC"):
        return _Problem(TaskFault("a2a_error", f"{what}: the agent answered with an error: {words}"), definite=sending)
    return _Problem(TaskFault("a2a_malformed", f"{what}: the answer is not to be understood: {words}"))


# -- afterwards --------------------------------------------------------------------------------------------------------


def observe(
    call: Mapping[str, Any],
    definition: Mapping[str, Any],
    policy: Policy,
    workspace: str,
    token: CancelToken,
    monotonic: Any,
) -> tuple[dict[str, Any] | None, TaskFault | None, ProtocolNote]:
    """Ask an agent what has become of a task that it has named: (completed task or None, why not, what is known now).

    `call` is the record of the call, `definition` that of the peer in the run's own workflow. Nothing is sent but
    `GetTask`, at most `maxPolls` times. Raises `policy_denied`, `secret_unavailable`, `unsupported_capability`.
    """
    require_extra("a2a.delegate")
    recorded = call["state"]
    asked = peer(call["peer"], recorded["action"], definition, "cardUrl", policy, workspace)
    seconds = float(definition["timeoutSeconds"])
    state = _State(
        _Call(asked, call["callIdentity"], "", seconds, seconds),
        rpc_url=recorded["rpcUrl"],
        card_digest=recorded["cardDigest"],
        sent=True,
        task_id=recorded["remoteTaskId"],
        task=recorded["task"],
    )
    if not _same_origin(str(recorded["rpcUrl"]), asked.target):
        raise TaskFault("policy_denied", "the interface of the agent has another origin than its card")

    async def look(ended: Ended) -> dict[str, Any]:
        from a2a.client.transports.jsonrpc import JsonRpcTransport
        from a2a.types import AgentCard

        async with _client(state, Guard(monotonic)) as client:
            return await _poll(state, JsonRpcTransport(client, AgentCard(), str(recorded["rpcUrl"])))

    most = definition["maxPolls"] * (definition["pollIntervalMs"] / 1000 + seconds)
    result, error, ended = carry_out(look, token, most)
    if result is not None:
        return result, None, state.note("succeeded")
    problem = error if isinstance(error, _Problem) else _broken_off(state, ended, error)
    return None, problem.fault, state.note("failed" if problem.definite else "uncertain")
