"""`mcp.call`: one call of a tool of an MCP server over Streamable HTTP (contract 3, 5.4 and 12.5).

One session for each effect: `initialize` with the pinned protocol version, `tools/list`, then `tools/call`. Until the
call is sent nothing has happened, so whatever goes wrong before is no dispatch. From then on:

- an answer of the tool, an error result or a JSON-RPC error included, is definite;
- a refusal by HTTP (4xx but for an expired session, and 503) is definite: the server did not take it;
- no answer in time, a lost connection, an answer that is not to be understood, an expired session, any other 5xx, and a
  cancellation leave it open what has happened.

In the last case an action that declares `pure`, `idempotent` or `keyed` gets one more session and one more call, if the
tool is still the same: name, schemas and execution have the digest that they had. For `keyed` the effect's id goes with
the call, as the header `Idempotency-Key` and as `_meta` of the request. What a server says about its tools
(annotations) is never asked when it comes to what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from agentctl.store.canonical import JsonError, canonical, check_value, value_digest
from agentctl.store.errors import TaskFault
from agentctl.store.records import ProtocolNote
from agentctl.store.states import REPEATABLE_IDEMPOTENCY
from agentctl.store.version import VERSION

from ..network import Guard
from . import EffectContext, EffectOutcome, EffectPlan, Work, refuse_cancelled
from .contracts import mismatch
from .remote import COURTESY_SECONDS, Ended, Peer, carry_out, limit_of, load, peer_of, require_extra, text_field

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp.types import Tool

    from .mcp_http import Bridge, Exchange

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
IDEMPOTENCY_META: Final = "agentctl.dev/idempotencyKey"
MAX_PAGES: Final = 100
_CALL: Final = "tools/call"
_OF_SESSIONS: Final = frozenset({"mcp-protocol-version", "mcp-session-id"})
"""Headers that the client library sends when it is their time."""
_DEFINITE_STATUS: Final = frozenset({503})
_REQUEST_TIMEOUT: Final = -32001
_CLOSED: Final = -32000
_PARSE: Final = -32700


@dataclass(frozen=True, slots=True, repr=False)
class _Call:
    peer: Peer
    tool: str
    arguments: dict[str, Any]
    idempotency: str
    whole_seconds: float
    request_seconds: float


@dataclass(slots=True)
class _State:
    """What is known of a call by now; `note` is its stored form."""

    call: _Call
    tool_digest: str | None = None
    sessions: int = 0
    sent: bool = False
    sent_before: bool = False
    """A call of an earlier session, or of an earlier dispatch of the effect, may have arrived."""
    facts: dict[str, Any] = field(default_factory=dict)

    def note(self, status: str, session: dict[str, Any] | None = None) -> ProtocolNote:
        peer = self.call.peer
        state = {
            "action": peer.action,
            "url": peer.url,
            "protocolVersion": peer.definition["protocolVersion"],
            "tool": self.call.tool,
            "toolDigest": self.tool_digest,
            "sessions": self.sessions,
            "sent": self.sent,
            **self.facts,
        }
        text = None if session is None else canonical(session)
        return ProtocolNote("mcp", peer.name, self.call.tool, status, canonical(state), text)


class _Problem(Exception):
    """Why one session did not bring a result. `open`: the call was sent, and nobody knows what it did."""

    def __init__(self, fault: TaskFault, *, open: bool = False, definite: bool = False) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.open = open
        self.definite = definite


def prepare_mcp(work: Work) -> EffectPlan:
    """Check server, tool and arguments. Raises `invalid_input`, `policy_denied`, `secret_unavailable`,
    `unsupported_capability` when the client library is not installed."""
    require_extra("mcp.call")
    load("mcp.call")
    peer = peer_of(work, "server", "url")
    tool = text_field(work.input, "tool")
    arguments = work.input.get("arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise TaskFault("invalid_input", "'arguments' must be an object")
    idempotency = work.action.get("idempotency") or "unknown"
    whole, each = limit_of(work, peer.definition)
    call = _Call(peer, tool, arguments, idempotency, whole, each)
    return EffectPlan(
        operation="mcp.call",
        effect_class="network",
        risk="medium",
        idempotency=idempotency,
        policy_name="mcp.call",
        input={
            "server": peer.name,
            "tool": tool,
            "arguments": arguments,
            "url": peer.url,
            "protocolVersion": peer.definition["protocolVersion"],
        },
        expected_effect={"server": peer.name, "url": peer.url, "tool": tool, "arguments": arguments},
        estimate={},
        execute=partial(_execute, call),
    )


def _execute(call: _Call, context: EffectContext) -> EffectOutcome:
    if (refused := refuse_cancelled(context)) is not None:
        return refused
    # The library reports each lost connection with a traceback; what matters of it is in our own errors.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    state = _State(call)
    before = None if context.store is None else context.store.protocol_call(context.effect_id)
    if before is not None:
        # An earlier dispatch of this effect was lost: only the same tool may be asked again.
        state.tool_digest = before["state"].get("toolDigest")
        # A call that was prepared and has no end may have been sent: its worker died somewhere behind that mark.
        state.sent = state.sent_before = bool(before["state"].get("sent")) or before["status"] == "prepared"
    # The token ends the task of the call, not its HTTP: a last word has to get through.
    guard = Guard(context.monotonic)
    result, error, ended = carry_out(partial(_converse, call, state, context, guard), context.token, call.whole_seconds)
    if result is not None:
        return EffectOutcome("succeeded", result, protocol=state.note("succeeded"))
    problem = error if isinstance(error, _Problem) else _ended(state, ended, error)
    fault = problem.fault
    if problem.definite:
        return EffectOutcome("failed", error=fault.as_json(), protocol=state.note("failed"))
    if state.sent:
        return EffectOutcome("uncertain", error=fault.as_json(), protocol=state.note("uncertain"))
    note = state.note("failed") if state.sessions or before is not None else None
    return EffectOutcome("not_dispatched", error=fault.as_json(), protocol=note)


def _ended(state: _State, ended: Ended, error: BaseException | None) -> _Problem:
    """Why the whole call was ended from here."""
    if ended.reason is not None:
        return _Problem(TaskFault("cancelled", f"ended: {ended.reason}", details={"reason": ended.reason}))
    if ended.late or error is None:
        seconds = state.call.whole_seconds
        return _Problem(TaskFault("mcp_timeout", f"there was no result within {seconds:g} s", retryable=True))
    words = state.call.peer.words(f"{type(error).__name__}: {error}")
    return _Problem(TaskFault("mcp_malformed", f"the conversation with the server broke off: {words}"))


async def _converse(call: _Call, state: _State, context: EffectContext, guard: Guard, ended: Ended) -> dict[str, Any]:
    """A session with its call and, where the contract allows it, one more of both."""
    try:
        return await _session(call, state, context, guard, ended)
    except _Problem as problem:
        if not problem.open or ended.reason is not None or call.idempotency not in REPEATABLE_IDEMPOTENCY:
            raise
        first = problem.fault
    state.facts["reconnectedAfter"] = first.code
    state.sent_before = True
    try:
        return await _session(call, state, context, guard, ended)
    except _Problem as problem:
        if problem.definite or ended.reason is not None:
            raise
        if problem.fault.code == "mcp_tool_changed":
            raise
        details = {"first": first.as_json(), "second": problem.fault.as_json()}
        message = f"another session did not bring a result either: {problem.fault.message}"
        raise _Problem(
            TaskFault("mcp_reconnect_limit", message, retryable=True, details=details), open=True
        ) from problem


async def _session(call: _Call, state: _State, context: EffectContext, guard: Guard, ended: Ended) -> dict[str, Any]:
    """One session from `initialize` to the answer of the call. Raises `_Problem`."""
    from ..http_transport import AsyncPolicyTransport
    from .mcp_http import Bridge

    peer = call.peer
    keyed = {IDEMPOTENCY_HEADER: context.key} if call.idempotency == "keyed" else {}
    inner = AsyncPolicyTransport(peer.policy, guard, tls=peer.tls)
    bridge = Bridge(inner, {_CALL: keyed})
    at_work: dict[str, Any] = {}
    try:
        return await _talk(call, state, context, ended, bridge, at_work)
    except _Problem:
        raise
    except BaseException as error:
        if "result" in at_work:
            found: dict[str, Any] = at_work["result"]
            return found  # the answer was there; only the end of the session has failed
        if "problem" in at_work:
            raise at_work["problem"] from error
        if ended.escaped is not None or ended.reason is not None or ended.late:
            raise
        raise _problem_of(call, bridge, at_work, error) from error


async def _talk(
    call: _Call, state: _State, context: EffectContext, ended: Ended, bridge: Bridge, at_work: dict[str, Any]
) -> dict[str, Any]:
    import httpx2
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import Implementation

    from ..http_transport import with_own

    peer = call.peer
    given = {name: value for name, value in peer.headers.items() if name.lower() not in _OF_SESSIONS}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            httpx2.AsyncClient(
                transport=bridge,
                headers=with_own(given, {"Origin": peer.target.origin}),
                timeout=None,
                trust_env=False,
                follow_redirects=False,
            )
        )
        # The library's own limit is for one event; an answer is one, and the policy has a limit for answers.
        most = peer.policy.network.max_response_bytes
        read, write = await stack.enter_async_context(
            streamable_http_client(peer.url, http_client=client, max_sse_event_size=most)
        )
        session = await stack.enter_async_context(
            ClientSession(
                read,
                write,
                read_timeout_seconds=call.request_seconds,
                client_info=Implementation(name="agentctl", version=VERSION),
            )
        )
        # What is raised below must not pass through the library's task groups, which would wrap it.
        try:
            told = await _open(call, state, session, bridge, at_work)
            state.sessions += 1
            ended.must_leave(lambda: context.tell(state.note("prepared", told)))
            ended.must_leave(lambda: context.reach("after_call_prepared"))
            at_work["result"] = await _ask(call, state, session, bridge, at_work, context)
            ended.must_leave(lambda: context.reach("after_call_answered"))
        except _Problem as caught:
            at_work["problem"] = caught
        except asyncio.CancelledError:
            await _courtesy(bridge, at_work)
            raise
        except Exception as caught:
            if ended.escaped is not None:
                raise
            at_work["problem"] = _problem_of(call, bridge, at_work, caught)
    if "problem" in at_work:
        raise at_work["problem"]
    found: dict[str, Any] = at_work["result"]
    return found


def _ask_for(at_work: dict[str, Any], method: str) -> None:
    """Note what is asked for from now on."""
    at_work["method"], at_work["since"] = method, asyncio.get_running_loop().time()


async def _courtesy(bridge: Bridge, at_work: dict[str, Any]) -> None:
    """Let the library's word that the call is cancelled go out, for a moment."""
    if at_work.get("method") != _CALL:
        return
    end = asyncio.get_running_loop().time() + COURTESY_SECONDS
    while asyncio.get_running_loop().time() < end:
        told = bridge.exchanges.get("notifications/cancelled")
        if told is not None and (told.status is not None or told.unsent is not None or told.lost is not None):
            return
        await asyncio.sleep(0.01)


async def _open(
    call: _Call, state: _State, session: ClientSession, bridge: Bridge, at_work: dict[str, Any]
) -> dict[str, Any]:
    """`initialize`, and the tool that is to be called; what is recorded of the session. Raises `_Problem`."""
    from mcp.types import (
        ClientCapabilities,
        Implementation,
        InitializedNotification,
        InitializeRequest,
        InitializeRequestParams,
        InitializeResult,
    )

    peer = call.peer
    version = peer.definition["protocolVersion"]
    _ask_for(at_work, "initialize")
    params = InitializeRequestParams(
        protocol_version=version,
        capabilities=ClientCapabilities(),
        client_info=Implementation(name="agentctl", version=VERSION),
    )
    said = await session.send_request(InitializeRequest(params=params), InitializeResult)
    if said.protocol_version != version:
        theirs = peer.words(said.protocol_version)
        message = f"the server speaks protocol version {theirs!r}, the workflow pins {version!r}"
        raise _Problem(TaskFault("mcp_protocol_version", message))
    session.adopt(said)
    await session.send_notification(InitializedNotification())
    _ask_for(at_work, "tools/list")
    tool = await _find_tool(call, session)
    try:
        # Its JSON form says null for these, so two different tools would have one digest.
        _require_finite(tool.model_dump(mode="python"))
    except JsonError as error:
        raise _Problem(TaskFault("mcp_malformed", f"the tool {call.tool!r}: {error.message}")) from error
    digest = _tool_digest(tool)
    if state.tool_digest is not None and state.tool_digest != digest:
        details = {"before": state.tool_digest, "now": digest}
        message = f"the tool {call.tool!r} is not the one any more that the call was meant for"
        raise _Problem(TaskFault("mcp_tool_changed", message, details=details))
    state.tool_digest = digest
    at_work["tool"] = tool
    server = said.server_info
    return {
        "url": peer.url,
        "protocolVersion": version,
        "headers": peer.described,
        "server": peer.clean({"name": server.name, "version": server.version}),
        "sessionIdDigest": _session_id_digest(bridge),
    }


def _session_id_digest(bridge: Bridge) -> str | None:
    """The id of a session may be all that it takes to go on with it, so only its digest is kept."""
    value = bridge.session_id
    return None if value is None else sha256(value.encode()).hexdigest()


async def _find_tool(call: _Call, session: ClientSession) -> Tool:
    from mcp.types import PaginatedRequestParams

    cursor: str | None = None
    for _ in range(MAX_PAGES):
        params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
        page = await session.list_tools(params=params)
        for tool in page.tools:
            if tool.name == call.tool:
                return tool
        cursor = page.next_cursor
        if cursor is None:
            break
    raise _Problem(TaskFault("mcp_tool_missing", f"the server {call.peer.name!r} has no tool {call.tool!r}"))


def _tool_digest(tool: Tool) -> str:
    """What makes a tool the same one (contract 12.5)."""
    data = tool.model_dump(by_alias=True, mode="json", exclude_none=True)
    return value_digest({name: data.get(name) for name in ("name", "inputSchema", "outputSchema", "execution")})


async def _ask(
    call: _Call,
    state: _State,
    session: ClientSession,
    bridge: Bridge,
    at_work: dict[str, Any],
    context: EffectContext,
) -> dict[str, Any]:
    """`tools/call` and its answer, which is the result of the effect. Raises `_Problem`."""
    from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult

    meta: Any = {IDEMPOTENCY_META: context.key} if call.idempotency == "keyed" else None
    _ask_for(at_work, _CALL)
    state.sent = True
    request = CallToolRequest(params=CallToolRequestParams(name=call.tool, arguments=call.arguments, _meta=meta))
    try:
        said = await session.send_request(request, CallToolResult)
    except BaseException:
        exchange = bridge.exchanges.get(_CALL)
        if exchange is None or exchange.unsent is not None:
            state.sent = state.sent_before
        raise
    answer = call.peer.clean(said.model_dump(by_alias=True, mode="json", exclude_none=True))
    try:
        # As it was read: the JSON form of the library says null where the server has said NaN or 1e400.
        _require_finite(said.model_dump(mode="python"))
        check_value(answer)
    except JsonError as error:
        raise _malformed(f"the result is not to be stored: {error.message}") from error
    if said.is_error:
        text = " ".join(str(part.get("text", "")) for part in answer.get("content", ()) if part.get("type") == "text")
        message = f"the tool {call.tool!r} reports an error: {call.peer.words(text)}"
        raise _Problem(TaskFault("mcp_tool_error", message, retryable=True, details={"result": answer}), definite=True)
    schema = at_work["tool"].output_schema
    if schema is not None:
        try:
            wrong = mismatch(schema, answer.get("structuredContent"))
        except ValueError as error:
            raise _malformed(f"the output schema of the tool does not compile: {error}") from error
        if wrong is not None:
            raise _malformed(f"the result does not fit the output schema of the tool: {wrong}")
    return dict(answer)


def _require_finite(value: Any) -> None:
    """Raise `JsonError` for a number that JSON cannot carry, wherever it is in an answer."""
    if isinstance(value, dict):
        for item in value.values():
            _require_finite(item)
    elif isinstance(value, list):
        for item in value:
            _require_finite(item)
    elif isinstance(value, float) and not isfinite(value):
        raise JsonError("NaN and infinite numbers are no JSON")


def _malformed(message: str) -> _Problem:
    return _Problem(TaskFault("mcp_malformed", message), open=True)


# -- what an error means -----------------------------------------------------------------------------------------------


def _problem_of(call: _Call, bridge: Bridge, at_work: Mapping[str, Any], error: BaseException) -> _Problem:
    """What an error of the library comes to, by what was seen on the wire (see the head of this module)."""
    from mcp import MCPError

    method = at_work.get("method", "")
    # The library has the same error for a limit that is over as a server may have sent.
    late = bool(method) and asyncio.get_running_loop().time() - at_work["since"] >= call.request_seconds
    exchange = bridge.exchanges.get(method)
    asked = method == _CALL
    words = call.peer.words(str(error) or type(error).__name__)
    if exchange is None:
        return _Problem(TaskFault("mcp_unavailable", f"the server cannot be asked: {words}", retryable=True))
    if exchange.unsent is not None:
        return _Problem(call.peer.unsent(exchange.unsent, "mcp_unavailable"))
    if exchange.redirected:
        message = f"the server answered {method} with a redirect ({exchange.status}), which is not followed"
        return _Problem(TaskFault("mcp_http_error", message, details={"status": exchange.status}), definite=asked)
    code, message, definite, again = _reading(
        exchange, method, error if isinstance(error, MCPError) else None, words, late
    )
    details = {"method": method, "status": exchange.status}
    fault_found = TaskFault(code, message, retryable=again, details=details)
    return _Problem(fault_found, open=asked and not definite, definite=asked and definite)


def _reading(exchange: Exchange, method: str, error: Any, words: str, late: bool) -> tuple[str, str, bool, bool]:
    """(code, message, whether it is definite, whether another attempt makes sense). `late`: the time of the request is
    over."""
    status = exchange.status
    number = None if error is None else error.code
    if exchange.refused:
        return "mcp_malformed", f"the answer to {method} cannot be taken: {exchange.lost}", False, False
    if exchange.lost is not None:
        return "mcp_connection_lost", f"the connection was lost after {method}: {exchange.lost}", False, True
    if status is None:
        if number == _REQUEST_TIMEOUT:
            return "mcp_timeout", f"{method} was not answered in time", False, True
        return "mcp_connection_lost", f"{method} was not answered: {words}", False, True
    if (
        status == 404
        and error is not None
        and "ession" in error.message
        and exchange.content_type != "text/event-stream"
    ):
        return "mcp_session_expired", f"the server does not know the session any more ({method})", False, True
    if number == _REQUEST_TIMEOUT and (late or not (exchange.ended and exchange.content_type == "application/json")):
        return "mcp_timeout", f"{method} was not answered in time", False, True
    json_error = exchange.ended and exchange.content_type == "application/json" and number not in (None, _PARSE)
    if status >= 400:
        if json_error and words != "Server returned an error response":
            return "mcp_error", f"the server answered {method} with error {number}: {words}", True, status in (429, 503)
        definite = status < 500 or status in _DEFINITE_STATUS
        again = status == 429 or status >= 500
        return "mcp_http_error", f"the server answered {method} with HTTP {status}", definite, again
    if json_error:
        return "mcp_error", f"the server answered {method} with error {number}: {words}", True, True
    if error is not None and exchange.content_type == "text/event-stream" and number not in (_PARSE, _CLOSED):
        return "mcp_error", f"the server answered {method} with error {number}: {words}", True, True
    if number == _CLOSED:
        return "mcp_connection_lost", f"the answer to {method} broke off: {words}", False, True
    return "mcp_malformed", f"the answer to {method} is not to be understood: {words}", False, False
