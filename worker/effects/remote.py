"""What calls of MCP servers and A2A agents have in common: whom they ask, under which policy, and how they are ended.

The definition of a server or peer comes with the action (`coordinator.peers`). The client libraries are extras; they
are imported when an action of their kind is prepared. They are asynchronous: `carry_out` runs one call in a loop of
its own, ends it in time, and at once when the cancel token is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy

from ..network import ConnectionDenied, Target, require_allowed, target_of, tls_context
from ..redaction import known
from . import CancelToken, Work
from .paths import workspace_of

if TYPE_CHECKING:
    import ssl

    from ..http_transport import NeverSent

MAX_TEXT: Final = 512
"""Most characters of a text of the other side in a message for people."""

COURTESY_SECONDS: Final = 2.0
"""How long a best-effort word to the other side (a cancellation, the end of a session) may take."""

EXTRAS: Final = {"mcp.call": ("mcp", "mcp"), "a2a.delegate": ("a2a", "a2a")}
"""Action kind to: the package that it needs, the extra of this distribution that brings it."""

_T = TypeVar("_T")


def missing_extra(kind: str) -> str | None:
    """The extra that has to be installed before an action of this kind can run here, or None. Imports nothing."""
    needed = EXTRAS.get(kind)
    if needed is None or all(find_spec(name) is not None for name in (needed[0], "httpx")):
        return None
    return needed[1]


def require_extra(kind: str) -> None:
    """Raise `unsupported_capability` with the remedy when the client library of an action kind is not installed."""
    extra = missing_extra(kind)
    if extra is not None:
        raise TaskFault(
            "unsupported_capability", f"{kind} needs a package that is not installed: pip install 'agentctl[{extra}]'"
        )


_LOADED: Final = {
    "mcp.call": ("mcp.client.streamable_http", "mcp.types", "agentctl.worker.effects.mcp_http"),
    "a2a.delegate": (
        "a2a.client.card_resolver",
        "a2a.client.errors",
        "a2a.client.transports.jsonrpc",
        "a2a.utils.errors",
        "google.protobuf.json_format",
        "agentctl.worker.http_transport",
    ),
}
"""Action kind to what a call of it imports."""


def load(kind: str) -> None:
    """Import what calls of a kind need, before there is an effect: that takes seconds on a slow disk, and a worker that
    is ended meanwhile has sent nothing."""
    for name in _LOADED[kind]:
        import_module(name)


@dataclass(frozen=True, slots=True, repr=False)
class Peer:
    """A server or agent as a call sees it. Kept out of every repr and record: the headers may be secrets."""

    name: str
    action: str
    url: str
    target: Target
    definition: Mapping[str, Any]
    policy: Policy
    headers: dict[str, str]
    described: dict[str, Any]
    """Header to source and digest of its value: what is recorded of it."""
    tls: ssl.SSLContext | None

    def clean(self, value: _T) -> _T:
        """A JSON value without any of the secrets that this worker has read."""
        cleaned: _T = known.redactor.json(value)
        return cleaned

    def words(self, text: str) -> str:
        """A text of the other side for a message: clean, and not too long."""
        text = self.clean(text)
        return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"

    def unsent(self, error: NeverSent, unavailable: str) -> TaskFault:
        """The fault of a request of which nothing has left: `policy_denied`, or the code `unavailable`."""
        code = "policy_denied" if error.code == "denied" else unavailable
        return TaskFault(code, self.words(error.message), retryable=error.code not in ("denied", "proxy", "request"))


def peer_of(work: Work, field_name: str, url_field: str) -> Peer:
    """The server or peer that a rendered input names, checked by the policy as far as that is possible without asking
    for its address. Raises `invalid_input`, `policy_denied`, `secret_unavailable`."""
    name = text_field(work.input, field_name)
    known = work.action.get("peers") or {}
    if name not in known:
        raise TaskFault("invalid_input", f"there is no {field_name} {name!r} in this workflow")
    return peer(name, work.action_name, known[name], url_field, work.policy, workspace_of(work))


def peer(name: str, action: str, definition: Mapping[str, Any], url_field: str, policy: Policy, workspace: str) -> Peer:
    """The same for a definition. `workspace` is resolved."""
    url = definition[url_field]
    try:
        target = target_of(url)
        require_allowed(policy, target)
    except ValueError as error:
        raise TaskFault("invalid_input", f"the address of {name!r}: {error}") from error
    except ConnectionDenied as error:
        raise TaskFault("policy_denied", error.message, details={"peer": name}) from error
    headers: dict[str, str] = {}
    described: dict[str, Any] = {}
    for header, reference in (definition.get("headers") or {}).items():
        from .secret_values import resolve_secret

        secret = resolve_secret(reference, policy, workspace)
        headers[header] = secret.as_header()
        described[header] = secret.describe()
    return Peer(name, action, url, target, definition, policy, headers, described, _tls(policy, target, workspace))


def _tls(policy: Policy, target: Target, workspace: str) -> ssl.SSLContext | None:
    if target.scheme != "https" or policy.network.custom_ca is None:
        return None
    from .secret_values import resolve_secret

    try:
        return tls_context(resolve_secret(policy.network.custom_ca, policy, workspace).value)
    except ValueError as error:
        raise TaskFault("invalid_input", str(error)) from error


def text_field(data: Mapping[str, Any], name: str) -> str:
    """A non-empty text out of rendered input. Raises `invalid_input`."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise TaskFault("invalid_input", f"{name!r} must be a non-empty text")
    return value


def limit_of(work: Work, definition: Mapping[str, Any]) -> tuple[float, float]:
    """(seconds of the whole call, seconds of one request to the other side)."""
    whole = min(work.action.get("timeoutSeconds") or work.timeout_seconds, work.timeout_seconds)
    return float(whole), float(min(definition.get("timeoutSeconds") or whole, whole))


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ended:
    """Raised inside of a call when it has to end: set before its task is cancelled."""

    reason: str | None = None
    """The reason of the cancel token, None when the time is over or nothing ended it."""
    late: bool = False
    escaped: BaseException | None = field(default=None)
    """An exception that has to leave the call as it is (the lease was lost, the disk is full)."""

    def must_leave(self, action: Callable[[], None]) -> None:
        """Do something whose failure ends the whole attempt. Libraries wrap what passes through them; this does not."""
        try:
            action()
        except BaseException as error:
            self.escaped = error
            raise


def carry_out(
    call: Callable[[Ended], Coroutine[Any, Any, _T]], token: CancelToken, seconds: float
) -> tuple[_T | None, BaseException | None, Ended]:
    """Run a call to its end: (result, error, how it was ended). Raises what had to leave it as it is.

    After `seconds`, or when the token is raised, the task of the call is cancelled; it may take `COURTESY_SECONDS` more
    to say good-bye, and then it is left.
    """
    ended = Ended()
    result: _T | None = None
    error: BaseException | None = None

    async def main() -> _T | None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(call(ended))

        def cancel() -> None:
            loop.remove_reader(token.fileno())
            if ended.reason is None and not ended.late:
                ended.reason = token.reason or "cancelled"
                task.cancel()

        loop.add_reader(token.fileno(), cancel)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done:
                if ended.reason is None:
                    ended.late = True
                    task.cancel()
                await asyncio.wait({task}, timeout=2 * COURTESY_SECONDS)
            if task.done() and not task.cancelled():
                return task.result()
            return None
        finally:
            loop.remove_reader(token.fileno())

    try:
        result = asyncio.run(main())
    except asyncio.CancelledError as caught:
        error = caught
    except Exception as caught:
        error = caught
    if ended.escaped is not None:
        raise ended.escaped
    return result, error, ended
