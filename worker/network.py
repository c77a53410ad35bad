"""Names, addresses and sockets under `spec.policy` (contract 1.8 and 11.2). The standard library only.

A connection is decided twice by `store.policy.decide_connection`: before its name is looked up, and again for all
addresses that the lookup gave. The socket is then connected to one of exactly these addresses; the name is not asked
for again, so an answer that changes in between (DNS rebinding) reaches nothing. What is checked before a run exists is
the same, except that nothing is connected; see `agentctl.worker.preflight`.

`agentctl.worker.http_transport` makes HTTP clients of it.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from agentctl.store.gate import start_quiet_thread
from agentctl.store.policy import Policy, decide_connection

from .effects import CancelToken

Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""Host and port to addresses in the order of preference. Raises OSError."""

DEFAULT_PORTS = {"http": 80, "https": 443}


class NetworkFault(Exception):
    """A connection that was not made: nothing has been sent. `message` is for people, and holds no secret."""

    code = "connect"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectionDenied(NetworkFault):
    """The policy does not allow it. Trying again changes nothing."""

    code = "denied"


class NameNotResolved(NetworkFault):
    """The name has no address, or nobody could be asked."""

    code = "resolve"


class NotConnected(NetworkFault):
    """Refused, unreachable, or not in time."""

    code = "connect"


class TlsFailed(NetworkFault):
    """The server could not prove who it is, or speaks no TLS."""

    code = "tls"


class ProxyUnusable(NetworkFault):
    """The environment names a proxy that nothing can be sent through. Trying again changes nothing."""

    code = "proxy"


class Interrupted(NetworkFault):
    """The cancel token of the call was raised before anything was sent."""

    code = "cancelled"


@dataclass(frozen=True, slots=True)
class Target:
    """What a connection is made to."""

    scheme: str
    host: str
    port: int

    @property
    def origin(self) -> str:
        """`scheme://host:port`, for messages; an address in its brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def target_of(url: str) -> Target:
    """The target of an absolute http or https URL. Raises ValueError with a sentence for people.

    A user name in the URL is refused: a secret belongs into a secret reference, and never into a document.
    """
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {str(error).lower()}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError("not an absolute http or https URL")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL with a user name or a password, which belong into a secret reference")
    if port == 0 or any(ord(letter) <= 32 or ord(letter) == 127 for letter in url):
        raise ValueError("not a URL: it has a port of 0, a space or a control character")
    return Target(parts.scheme, parts.hostname, DEFAULT_PORTS[parts.scheme] if port is None else port)


@dataclass(slots=True)
class Guard:
    """What ends a call early: the clock's `deadline` (None: none) and a cancel token (None: nobody cancels)."""

    monotonic: Callable[[], float]
    deadline: float | None = None
    token: CancelToken | None = None

    def left(self, most: float | None = None) -> float | None:
        """Seconds that may still be waited, at least 0; None without any bound."""
        bounds = [] if most is None else [most]
        if self.deadline is not None:
            bounds.append(max(0.0, self.deadline - self.monotonic()))
        return min(bounds) if bounds else None

    @property
    def cancelled(self) -> bool:
        return self.token is not None and self.token.cancelled

    def wait(self, descriptor: int, events: int, most: float | None) -> bool:
        """Wait for a descriptor. False when the time is over. Raises `Interrupted` as soon as the token is raised."""
        poll = select.poll()
        poll.register(descriptor, events)
        if self.token is not None:
            poll.register(self.token.fileno(), select.POLLIN)
        left = self.left(most)
        ready = poll.poll(None if left is None else int(left * 1000) + 1)
        if self.cancelled:
            raise Interrupted(f"ended by {self.token.reason if self.token else None}")
        return any(number == descriptor for number, _ in ready)


def system_resolver(host: str, port: int) -> list[str]:
    """The addresses that this machine knows for a name, without repeats. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def require_allowed(policy: Policy, target: Target, addresses: Sequence[str] | None = None) -> None:
    """Raise `ConnectionDenied` with the reason when the policy does not allow the target, or one of its addresses."""
    decision = decide_connection(policy, scheme=target.scheme, host=target.host, port=target.port, addresses=addresses)
    if decision.denied:
        raise ConnectionDenied(decision.reason)


def checked_addresses(
    policy: Policy, target: Target, *, guard: Guard, resolver: Resolver = system_resolver
) -> tuple[str, ...]:
    """Decide, look up, decide again: the addresses that may be connected to.

    Raises `ConnectionDenied`, `NameNotResolved`, `Interrupted`. Waits as long as the connect timeout and the guard
    allow.
    """
    require_allowed(policy, target)
    addresses = lookup(target, guard=guard, seconds=policy.network.connect_timeout_seconds, resolver=resolver)
    require_allowed(policy, target, addresses)
    return addresses


def lookup(target: Target, *, guard: Guard, seconds: float, resolver: Resolver = system_resolver) -> tuple[str, ...]:
    """The addresses of a target, within `seconds`, and cancellable: the system's resolver knows neither.

    It is asked in a thread of its own, which is left behind when it does not answer in time.
    """
    answer: list[Sequence[str] | OSError | UnicodeError] = []
    done = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    mine = os.dup(done)  # the thread may outlive this call: it has a descriptor of its own to close

    def ask() -> None:
        try:
            answer.append(resolver(target.host, target.port))
        except (OSError, UnicodeError) as error:
            answer.append(error)
        finally:
            os.eventfd_write(mine, 1)
            os.close(mine)

    try:
        start_quiet_thread(ask, "lookup")
        guard.wait(done, select.POLLIN, seconds)
    finally:
        os.close(done)
    if not answer:
        raise NameNotResolved(f"the name {target.host!r} was not resolved in time")
    found = answer[0]
    if isinstance(found, (OSError, UnicodeError)):
        reason = getattr(found, "strerror", None) or str(found)
        raise NameNotResolved(f"the name {target.host!r} cannot be resolved: {reason}")
    if not found:
        raise NameNotResolved(f"the name {target.host!r} has no address")
    return tuple(found)


def connect(addresses: Sequence[str], target: Target, *, guard: Guard, seconds: float) -> socket.socket:
    """A non-blocking socket to the first of the addresses that answers. Raises `NotConnected`, `Interrupted`.

    Each address gets its share of the time, so one that swallows packets does not take it all.
    """
    started = guard.monotonic()
    reason = "no address"
    for index, address in enumerate(addresses):
        left = seconds - (guard.monotonic() - started)
        if left <= 0:
            break
        try:
            return _connect_one(address, target.port, guard, left / (len(addresses) - index))
        except OSError as error:
            reason = "not in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
    raise NotConnected(f"no connection to {target.origin}: {reason}")


def _connect_one(address: str, port: int, guard: Guard, seconds: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # A numeric address: nothing is looked up any more.
            connection.connect((address, port))
        except BlockingIOError:
            if not guard.wait(connection.fileno(), select.POLLOUT, seconds):
                raise TimeoutError from None
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code)) from None
    except BaseException:
        connection.close()
        raise
    return connection


def tls_context(custom_ca: bytes | None = None) -> ssl.SSLContext:
    """Verify servers by the system's certificate authorities, and by those of `policy.network.customCa` (PEM) as well.

    Where the system keeps none, those of the `certifi` package are used, if it is there. The environment has no say
    (OpenSSL would let `SSL_CERT_FILE` and `SSL_CERT_DIR` take the place of the system's). Raises ValueError when
    `custom_ca` holds no certificate.
    """
    paths = ssl.get_default_verify_paths()
    file = paths.openssl_cafile if os.path.isfile(paths.openssl_cafile) else None
    folder = paths.openssl_capath if _has_entries(paths.openssl_capath) else None
    if file is None and folder is None:
        try:
            import certifi
        except ImportError:
            pass
        else:
            file = certifi.where()
    if file is None and folder is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody yet
    else:
        context = ssl.create_default_context(cafile=file, capath=folder)
    if custom_ca is not None:
        try:
            context.load_verify_locations(cadata=custom_ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError("policy.network.customCa holds no certificate in PEM form") from error
    return context


def _has_entries(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(True for _ in entries)
    except OSError:
        return False


def proxy_of(target: Target, environment: Mapping[str, str]) -> str | None:
    """The URL of the proxy that an environment names for a target (`https_proxy`, `no_proxy`, … in either case).

    The proxy looks the name up and connects, so addresses cannot be checked here: that is what `allowProxy` accepts.
    """
    values = {name.lower(): value for name, value in environment.items() if value}
    text = values.get(f"{target.scheme}_proxy") or values.get("all_proxy")
    if not text or _excepted(target.host, values.get("no_proxy", "")):
        return None
    return text if "://" in text else f"http://{text}"


def require_proxy(text: str) -> None:
    """Raise `ProxyUnusable` for a URL from `proxy_of` that is none of a proxy which can be used. The message does not
    repeat the URL: it may hold a password."""
    try:
        parts = urlsplit(text)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise ProxyUnusable("the proxy of the environment cannot be used: its address is no URL") from error
    if parts.scheme not in DEFAULT_PORTS:
        raise ProxyUnusable(
            f"the proxy of the environment cannot be used: it is one of {parts.scheme}, only http and https are known"
        )
    if not host:
        raise ProxyUnusable("the proxy of the environment cannot be used: its address names no host")


def _excepted(host: str, exceptions: str) -> bool:
    for entry in exceptions.split(","):
        name = entry.strip().lstrip("*").lstrip(".").lower()
        if entry.strip() == "*" or (name and (host.lower() == name or host.lower().endswith("." + name))):
            return True
    return False
