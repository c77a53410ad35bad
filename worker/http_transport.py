"""HTTP under `spec.policy`: transports for `httpx`, for our own providers and for the official MCP and A2A libraries.

Every request of a client, wherever it goes and whoever built it, passes `PolicyTransport` (or `AsyncPolicyTransport`):
its target is decided by the policy, its name is looked up once, the socket goes to one of the checked addresses, a
redirect is refused, an answer is read up to `policy.network.maxResponseBytes`. The environment (proxies, certificate
files of other programs) plays no part, except for the proxy variables when `policy.network.allowProxy` is set.

How far a request came is told by what is raised:

- `NeverSent`: not one byte of the request has left. Denied, not resolved, not connected, no TLS, cancelled before.
- `RedirectRefused`: the server has answered, with a redirect. It is definitive, and nothing was followed.
- anything else of `httpx.TransportError`: it may have been received. `AnswerTooLarge` and `Cancelled` belong here.

`never_sent` finds the first kind below what a library makes of it. Needs the `httpx` package, which every extra for
remote services brings.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpcore
import httpx
from agentctl.store.policy import Policy

from .network import (
    DEFAULT_PORTS,
    Guard,
    Interrupted,
    NetworkFault,
    NotConnected,
    ProxyUnusable,
    Resolver,
    Target,
    TlsFailed,
    checked_addresses,
    connect,
    lookup,
    proxy_of,
    require_allowed,
    require_proxy,
    system_resolver,
)

REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_T = TypeVar("_T")
_SENDING: Final = ".send_request_headers.started"
_WRITTEN: Final = ".send_request_headers.complete"


class NeverSent(httpx.ConnectError):
    """Nothing of the request has left this machine. `code` is `denied`, `resolve`, `connect`, `tls`, `cancelled`,
    `timeout`, `proxy`, or `request` for one that HTTP cannot carry; `message` is for people."""

    def __init__(self, code: str, message: str, request: httpx.Request | None = None) -> None:
        super().__init__(message, request=request)
        self.code = code
        self.message = message


class Cancelled(httpx.ReadError):
    """The cancel token was raised after something was sent."""


class AnswerTooLarge(httpx.ReadError):
    """The answer has more bytes than the policy lets in; the rest was not read."""


class AnswerUnreadable(httpx.RemoteProtocolError):
    """The answer comes in a content coding that was not asked for."""


class RedirectRefused(httpx.RequestError):
    """The server wants the request to go elsewhere. Redirects are never followed (contract 11.2)."""

    def __init__(self, status: int, request: httpx.Request) -> None:
        super().__init__(f"the server answered with a redirect ({status}), which is not followed", request=request)
        self.status = status


def never_sent(error: BaseException | None) -> NeverSent | None:
    """The `NeverSent` that is the cause of an error of a library, through causes, contexts and exception groups.

    In a group every member must have one: a group with another error may stand for a request that was sent.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, NeverSent):
            return error
        if isinstance(error, BaseExceptionGroup):
            found = [never_sent(member) for member in error.exceptions]
            return found[0] if all(item is not None for item in found) else None
        error = error.__cause__ or error.__context__
    return None


# -- sockets that a token can end --------------------------------------------------------------------------------------


class _Stream(httpcore.NetworkStream):
    """A non-blocking socket, with or without TLS. Every wait is bounded by the guard and ended by its token."""

    def __init__(self, connection: socket.socket, guard: Guard) -> None:
        self._socket = connection
        self._guard = guard

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._each(lambda: self._socket.recv(max_bytes), select.POLLIN, timeout, httpcore.ReadTimeout) or b""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        while rest:
            size = self._each(lambda: self._socket.send(rest), select.POLLOUT, timeout, httpcore.WriteTimeout)  # noqa: B023
            rest = rest[size or 0 :]

    def _each(self, action: Callable[[], _T], events: int, timeout: float | None, late: type[Exception]) -> _T | None:
        """Do one operation as soon as the socket lets it happen."""
        while True:
            if self._guard.cancelled or self._guard.left() == 0:
                self._wait(events, 0, late)
            try:
                return action()
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, timeout, late)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, timeout, late)
            except BlockingIOError:
                self._wait(events, timeout, late)
            except ssl.SSLZeroReturnError:
                return None
            except OSError as error:
                kind = httpcore.ReadError if late is httpcore.ReadTimeout else httpcore.WriteError
                raise kind(error.strerror or str(error)) from error

    def _wait(self, events: int, timeout: float | None, late: type[Exception]) -> None:
        if not self._guard.wait(self._socket.fileno(), events, timeout):
            raise late("not in time")
        if self._guard.left() == 0:
            raise late("not in time")

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        try:
            secured = ssl_context.wrap_socket(
                self._socket, server_hostname=server_hostname, do_handshake_on_connect=False
            )
            stream = _Stream(secured, self._guard)
            stream._handshake(secured, timeout)
        except BaseException:
            self.close()
            raise
        return stream

    def _handshake(self, secured: ssl.SSLSocket, timeout: float | None) -> None:
        started = self._guard.monotonic()
        while True:
            left = None if timeout is None else max(0.0, timeout - (self._guard.monotonic() - started))
            try:
                secured.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, left, httpcore.ConnectTimeout)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, left, httpcore.ConnectTimeout)
            except OSError as error:
                raise TlsFailed(f"no TLS: {getattr(error, 'verify_message', '') or error.strerror or error}") from error

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            poll = select.poll()
            poll.register(self._socket.fileno(), select.POLLIN)
            return bool(poll.poll(0))
        if info == "ssl_object":
            return self._socket if isinstance(self._socket, ssl.SSLSocket) else None
        if info == "socket":
            return self._socket
        return None


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the connections of a pool may go: to the checked addresses of a name, or to the operator's proxy."""

    policy: Policy
    guard: Guard
    resolver: Resolver
    scheme: str
    to_proxy: bool

    @property
    def seconds(self) -> float:
        """How long a connection may take."""
        return float(self.policy.network.connect_timeout_seconds)

    def target(self, host: str, port: int) -> Target:
        """What `httpcore` asks for."""
        return Target(self.scheme, host.removeprefix("[").removesuffix("]"), port)

    def addresses(self, target: Target) -> tuple[str, ...]:
        """Where to connect to. Raises `NetworkFault`."""
        if self.to_proxy:
            return lookup(target, guard=self.guard, seconds=self.seconds, resolver=self.resolver)
        return checked_addresses(self.policy, target, guard=self.guard, resolver=self.resolver)


class _Backend(httpcore.NetworkBackend):
    """Connects along a route."""

    def __init__(self, route: _Route) -> None:
        self._route = route

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        route, target = self._route, self._route.target(host, port)
        addresses = route.addresses(target)
        return _Stream(connect(addresses, target, guard=route.guard, seconds=route.seconds), route.guard)


class _AsyncBackend(httpcore.AsyncNetworkBackend):
    """The same for asynchronous clients; they are cancelled by their task, so the streams are the library's own."""

    def __init__(self, route: _Route) -> None:
        self._route = route
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        from anyio.to_thread import run_sync

        target = self._route.target(host, port)
        addresses = await run_sync(self._route.addresses, target, abandon_on_cancel=True)
        reason: Exception | None = None
        for address in addresses:
            try:
                return await self._inner.connect_tcp(address, port, timeout=self._route.seconds / len(addresses))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                reason = error
        detail = "not in time" if isinstance(reason, httpcore.ConnectTimeout) else str(reason)
        raise NotConnected(f"no connection to {target.origin}: {detail}")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


# -- transports --------------------------------------------------------------------------------------------------------


def _target(request: httpx.Request) -> Target:
    url = request.url
    port = url.port or DEFAULT_PORTS.get(url.scheme, 0)
    return Target(url.scheme, url.raw_host.decode("ascii").removeprefix("[").removesuffix("]"), port)


class _Passage:
    """How far one request has come. `trace` is the hook of `httpcore` that tells it."""

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self.sending = False
        self._written = False

    def _see(self, name: str) -> None:
        if name.endswith(_SENDING):
            self.sending = True
        elif name.endswith(_WRITTEN):
            self._written = True

    def trace(self, name: str, info: Mapping[str, Any]) -> None:
        self._see(name)

    async def atrace(self, name: str, info: Mapping[str, Any]) -> None:
        self._see(name)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Turn what goes wrong into what `httpx` raises, and into `NeverSent` while nothing has been sent."""
        try:
            yield
        except NetworkFault as error:
            if self.sending:
                raise Cancelled(error.message, request=self._request) from error
            raise NeverSent(error.code, error.message, self._request) from error
        except httpcore.ProxyError as error:
            raise NeverSent("connect", f"the proxy refused: {error}", self._request) from error
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            if isinstance(error, httpcore.LocalProtocolError) and not self._written:
                # Head of a request that is none: it is refused here, before the first byte of it is written.
                raise NeverSent("request", f"the request cannot be written: {error}", self._request) from error
            if self.sending:
                kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__, httpx.TransportError)
                raise kind(str(error) or "the connection was lost", request=self._request) from error
            code = "timeout" if isinstance(error, httpcore.TimeoutException) else "connect"
            raise NeverSent(code, str(error) or "no connection", self._request) from error
        except ssl.SSLError as error:
            if self.sending:
                raise httpx.ReadError(str(error), request=self._request) from error
            raise NeverSent("tls", f"no TLS: {error.strerror or error}", self._request) from error


def _judge(status: int, headers: httpx.Headers, request: httpx.Request, limit: int) -> None:
    """Refuse an answer that is not to be read: a redirect, another coding, one that says it is too large."""
    if status in REDIRECTS:
        raise RedirectRefused(status, request)
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise AnswerUnreadable(
            f"the answer is {headers['content-encoding']!r}, which was not asked for", request=request
        )
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit, request)


def _too_large(limit: int, request: httpx.Request) -> AnswerTooLarge:
    return AnswerTooLarge(f"the answer has more than {limit} bytes (policy.network.maxResponseBytes)", request=request)


class _Body(httpx.SyncByteStream):
    def __init__(self, inner: Any, passage: _Passage, request: httpx.Request, limit: int, after: Callable[[], None]):
        self._inner, self._passage, self._request, self._limit, self._after = inner, passage, request, limit, after

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        with self._passage.told():
            for part in self._inner:
                size += len(part)
                if size > self._limit:
                    raise _too_large(self._limit, self._request)
                yield part

    def close(self) -> None:
        with self._passage.told():
            self._inner.close()
        self._after()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, inner: Any, passage: _Passage, request: httpx.Request, limit: int):
        self._inner, self._passage, self._request, self._limit = inner, passage, request, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        with self._passage.told():
            async for part in self._inner:
                size += len(part)
                if size > self._limit:
                    raise _too_large(self._limit, self._request)
                yield part

    async def aclose(self) -> None:
        with self._passage.told():
            await self._inner.aclose()


class _Settings:
    def __init__(
        self,
        policy: Policy,
        guard: Guard,
        tls: ssl.SSLContext | None,
        resolver: Resolver,
        environment: Mapping[str, str],
    ) -> None:
        self.policy = policy
        self.guard = guard
        self.resolver = resolver
        self.environment = environment
        self._tls = tls

    def tls(self, scheme: str) -> ssl.SSLContext | None:
        """The context of TLS connections, made when the first one is needed."""
        if self._tls is None and scheme == "https":
            from .network import tls_context

            self._tls = tls_context()
        return self._tls

    def admit(self, target: Target) -> None:
        """Raise `Interrupted` or `ConnectionDenied` for a request that must not go out. No name is looked up."""
        if self.guard.cancelled:
            raise Interrupted("ended before it was sent")
        require_allowed(self.policy, target)

    def proxy(self, target: Target) -> httpcore.Proxy | None:
        """The proxy that the environment names for a target, if the policy allows proxies. Raises `ProxyUnusable`."""
        text = proxy_of(target, self.environment) if self.policy.network.allow_proxy else None
        if text is None:
            return None
        require_proxy(text)
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL as error:
            raise ProxyUnusable("the proxy of the environment cannot be used: its address is no URL") from error
        auth = (url.username.encode(), url.password.encode()) if url.username else None
        return httpcore.Proxy(str(url.copy_with(username=None, password=None)), auth=auth)

    def route(self, target: Target, proxy: httpcore.Proxy | None) -> _Route:
        """How a connection for a target is made."""
        return _Route(self.policy, self.guard, self.resolver, target.scheme, proxy is not None)

    def _timeout(self, request: httpx.Request) -> dict[str, Any]:
        """The client's waits; that for a connection, its TLS included, is the policy's."""
        return {
            **request.extensions.get("timeout", {}),
            "connect": float(self.policy.network.connect_timeout_seconds),
        }

    def outgoing(self, request: httpx.Request, trace: Any) -> dict[str, Any]:
        """The request as `httpcore` takes it: without a coding that would hide its size, and observed."""
        headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"accept-encoding"]
        url = request.url
        return {
            "method": request.method,
            "url": httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            "headers": [*headers, (b"Accept-Encoding", b"identity")],
            "content": request.stream,
            "extensions": {**request.extensions, "trace": trace, "timeout": self._timeout(request)},
        }


class PolicyTransport(httpx.BaseTransport):
    """For synchronous clients. Each request has a connection of its own, which is closed with its answer: a connection
    that idles may be closed by the server just when the next request goes out, and nobody could tell what became of it.

    `guard` bounds every request of the client in time, and its token closes the connection at once. `tls` is a context
    of `network.tls_context`, None for the default one.
    """

    def __init__(
        self,
        policy: Policy,
        guard: Guard,
        *,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver = system_resolver,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = _Settings(policy, guard, tls, resolver, os.environ if environment is None else environment)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        settings, target, passage = self._settings, _target(request), _Passage(request)
        limit = settings.policy.network.max_response_bytes
        with passage.told():
            settings.admit(target)
            proxy = settings.proxy(target)
            pool = httpcore.ConnectionPool(
                ssl_context=settings.tls(target.scheme),
                proxy=proxy,
                max_connections=1,
                max_keepalive_connections=0,
                network_backend=_Backend(settings.route(target, proxy)),
            )
            try:
                answer = pool.handle_request(httpcore.Request(**settings.outgoing(request, passage.trace)))
                headers = httpx.Headers(answer.headers)
                _judge(answer.status, headers, request, limit)
            except BaseException:
                pool.close()
                raise
        return httpx.Response(
            answer.status,
            headers=headers,
            stream=_Body(answer.stream, passage, request, limit, pool.close),
            extensions=answer.extensions,
        )


class AsyncPolicyTransport(httpx.AsyncBaseTransport):
    """For asynchronous clients (asyncio), with connections that are kept and used again.

    Cancel the task that waits. Only the deadline of `guard` plays a part, for looking a name up.
    """

    def __init__(
        self,
        policy: Policy,
        guard: Guard,
        *,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver = system_resolver,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._settings = _Settings(policy, guard, tls, resolver, os.environ if environment is None else environment)
        self._pools: dict[tuple[str, str], httpcore.AsyncConnectionPool] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        settings, target, passage = self._settings, _target(request), _Passage(request)
        limit = settings.policy.network.max_response_bytes
        with passage.told():
            settings.admit(target)
            pool = self._pool(target)
            answer = await pool.handle_async_request(httpcore.Request(**settings.outgoing(request, passage.atrace)))
            headers = httpx.Headers(answer.headers)
            try:
                _judge(answer.status, headers, request, limit)
            except BaseException:
                await answer.aclose()
                raise
        return httpx.Response(
            answer.status,
            headers=headers,
            stream=_AsyncBody(answer.stream, passage, request, limit),
            extensions=answer.extensions,
        )

    def _pool(self, target: Target) -> httpcore.AsyncConnectionPool:
        settings = self._settings
        proxy = settings.proxy(target)
        key = (target.scheme, "" if proxy is None else str(proxy.url))
        if key not in self._pools:
            self._pools[key] = httpcore.AsyncConnectionPool(
                ssl_context=settings.tls(target.scheme),
                proxy=proxy,
                network_backend=_AsyncBackend(settings.route(target, proxy)),
            )
        return self._pools[key]

    async def aclose(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()


_NO_ENDS: Final = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Letters that end a line for `httpx` and not in a stream of events, with what JSON says for them."""


class EventBytes(httpx.AsyncByteStream):
    """A stream of events with JSON in them, in which no letter of a text ends a line."""

    def __init__(self, inner: httpx.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        rest = b""
        async for piece in self._inner:
            part = rest + piece
            # Such a letter may be cut in two.
            keep = 2 if part.endswith(b"\xe2\x80") else 1 if part.endswith((b"\xe2", b"\xc2")) else 0
            part, rest = part[: len(part) - keep], part[len(part) - keep :]
            for letter, escaped in _NO_ENDS:
                part = part.replace(letter, escaped)
            yield part
        if rest:
            yield rest

    async def aclose(self) -> None:
        await self._inner.aclose()


def with_own(given: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The headers of a document together with our own, which win. A name has no case: none may be there twice."""
    names = {name.lower() for name in own}
    return {**{name: value for name, value in given.items() if name.lower() not in names}, **own}


def client(
    policy: Policy,
    guard: Guard,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    resolver: Resolver = system_resolver,
    environment: Mapping[str, str] | None = None,
) -> httpx.Client:
    """A synchronous client under the policy. Its time is that of the guard."""
    transport = PolicyTransport(policy, guard, tls=tls, resolver=resolver, environment=environment)
    return httpx.Client(transport=transport, trust_env=False, timeout=None, headers=headers, follow_redirects=False)


def async_client(
    policy: Policy,
    guard: Guard,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    tls: ssl.SSLContext | None = None,
    resolver: Resolver = system_resolver,
    environment: Mapping[str, str] | None = None,
) -> httpx.AsyncClient:
    """An asynchronous client under the policy, as the MCP and A2A libraries take one.

    `timeout_seconds` bounds each wait for bytes; the whole of a call is bounded by who runs it.
    """
    transport = AsyncPolicyTransport(policy, guard, tls=tls, resolver=resolver, environment=environment)
    return httpx.AsyncClient(
        transport=transport, trust_env=False, timeout=timeout_seconds, headers=headers, follow_redirects=False
    )


__all__ = [
    "AnswerTooLarge",
    "AnswerUnreadable",
    "AsyncPolicyTransport",
    "Cancelled",
    "EventBytes",
    "NeverSent",
    "PolicyTransport",
    "RedirectRefused",
    "async_client",
    "client",
    "never_sent",
    "with_own",
]
