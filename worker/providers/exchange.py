"""One HTTP exchange with a model service: sent once, read strictly, and told apart by how far it came.

What every service has in common lives here: where it is, how it is told who asks, what a status means (contract 12.4),
and that an answer which is not to be understood makes the effect uncertain (contract 5.4). A dialect (`openai`, `chat`,
`anthropic`, `google`) only says how a request is written and how an answer is read.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from agentctl.store.canonical import JsonError, canonical, parse_json
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy

from ..network import Guard, Resolver, system_resolver, target_of, tls_context
from ..redaction import Redactor
from . import Call, ModelRequest, ProviderFault, ToolCall, Usage
from .registry import ResolveSecret

if TYPE_CHECKING:
    import httpx

MAX_ERROR_TEXT: Final = 512
"""Most characters of a service's own error text (contract 11.3)."""

MAX_ERROR_BYTES: Final = 65_536
MAX_EVENT_BYTES: Final = 8_388_608
MAX_RETRY_AFTER_MS: Final = 86_400_000
REQUEST_ID_HEADERS: Final = ("x-request-id", "request-id", "apim-request-id", "x-goog-request-id")

DEFAULT_CREDENTIALS: Final = {
    "openai": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
    "azure_openai": "AZURE_OPENAI_API_KEY",
}
"""Kind to the variable that holds its key when the document names none (contract 1.4)."""

DEFAULT_ENDPOINTS: Final = {
    "openai": "https://api.openai.com/v1/responses",
    "anthropic": "https://api.anthropic.com/v1/messages",
    "google": "https://generativelanguage.googleapis.com/v1beta/models",
}

_PATHS: Final = {
    "openai": ("/v1", "responses"),
    "azure_openai": ("/openai/v1", "responses"),
    "openai_compatible": ("/v1", "chat/completions"),
    "anthropic": ("/v1", "messages"),
    "google": ("/v1beta", "models"),
}
"""Kind to the base path of a bare address, and the operation that a URL has to end with."""


class Malformed(Exception):
    """An answer that is not what it has to be. `usage` is what it says it has cost, if that much can be read."""

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.usage = usage


class Declined(Exception):
    """A complete answer that says in its body that the request has failed."""

    def __init__(self, message: str, *, retryable: bool, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retryable = retryable
        self.usage = usage


def endpoint_of(kind: str, definition: Mapping[str, Any]) -> str:
    """The URL of a provider's operation. Raises `ProviderFault` with `sent="no"`.

    An address alone is completed: `http://127.0.0.1:11434` and `…/v1` mean `…/v1/chat/completions` for a server of kind
    `openai_compatible`.
    """
    given = definition.get("endpoint") or DEFAULT_ENDPOINTS.get(kind)
    if given is None:
        raise ProviderFault("provider_endpoint", f"a provider of kind {kind} needs an endpoint", sent="no")
    try:
        target_of(given)
    except ValueError as error:
        raise ProviderFault("provider_endpoint", f"the endpoint of a {kind} provider: {error}", sent="no") from error
    parts: SplitResult = urlsplit(given)
    base, operation = _PATHS[kind]
    path = parts.path.rstrip("/") or base
    if not path.endswith("/" + operation):
        path = f"{path}/{operation}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def credential_of(kind: str, definition: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The secret reference of a provider's key: the document's, or the variable of its kind; None if it needs none."""
    given: Mapping[str, Any] | None = definition.get("credential")
    if given is not None:
        return given
    name = DEFAULT_CREDENTIALS.get(kind)
    return None if name is None else {"env": name}


def secrets_may_change(definition: Mapping[str, Any], policy: Policy) -> bool:
    """Whether a secret of a provider comes from a file or a command: by the next request it may be another one."""
    given = [definition.get("credential"), *(definition.get("headers") or {}).values(), policy.network.custom_ca]
    return any(reference is not None and reference.get("env") is None for reference in given)


def is_default(kind: str, reference: Mapping[str, Any]) -> bool:
    """Whether a reference is the variable of its kind. It needs no entry in `policy.environmentAllowlist`, which is
    about what a document may pick from the environment: this name is fixed here, and its value goes to this service."""
    return kind in DEFAULT_CREDENTIALS and reference.get("env") == DEFAULT_CREDENTIALS[kind]


def _from_variable(reference: Mapping[str, Any]) -> str:
    from ..effects.secret_values import from_variable

    return from_variable(reference["env"]).value.decode("utf-8", errors="replace")


class Exchange:
    """The way to one configured service: its URL, its headers, its TLS. One call at a time.

    `authorization` makes the header of the key. Raises `ProviderFault` with `sent="no"` when the extra is not
    installed, or a secret cannot be had.
    """

    def __init__(
        self,
        kind: str,
        definition: Mapping[str, Any],
        policy: Policy,
        resolve_secret: ResolveSecret,
        authorization: Callable[[str], tuple[str, str]],
        *,
        resolver: Resolver = system_resolver,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        require_extra(kind)
        from ..http_transport import with_own

        self.kind = kind
        self.url = endpoint_of(kind, definition)
        self._policy = policy
        self._resolver = resolver
        self._environment = environment
        secrets: list[str] = []
        self._headers: dict[str, str] = {}
        for name, reference in (definition.get("headers") or {}).items():
            value = _secret(reference, f"the header {name}", resolve_secret)
            secrets.append(value)
            self._headers[name] = value
        reference = credential_of(kind, definition)
        if reference is not None:
            resolve = _from_variable if is_default(kind, reference) else resolve_secret
            key = _secret(reference, f"the credential of a {kind} provider", resolve)
            secrets.append(key)
            self._headers = with_own(self._headers, dict([authorization(key)]))
        ca = policy.network.custom_ca
        try:
            self._tls: ssl.SSLContext | None = (
                None if ca is None else tls_context(_secret(ca, "policy.network.customCa", resolve_secret).encode())
            )
        except ValueError as error:
            raise ProviderFault("provider_credential", str(error), sent="no") from error
        self._redactor = Redactor(value.encode() for value in secrets)

    def post(self, url: str, headers: Mapping[str, str], body: Mapping[str, Any], call: Call) -> Any:
        """Send a request once and read its whole answer as JSON. Raises `ProviderFault`."""
        with self._sent(url, headers, body, call) as response:
            data = response.read()
            with self._understood(response):
                return strict_json(data)

    def stream(self, url: str, headers: Mapping[str, str], body: Mapping[str, Any], call: Call) -> _Events:
        """Send a request once and read its answer event by event (`with` it, then iterate). Raises `ProviderFault`."""
        return _Events(self, url, headers, body, call)

    @contextmanager
    def understood(self) -> Iterator[None]:
        """Turn `Malformed` and `Declined`, which reading an answer raises, into what a provider raises."""
        with self._understood(None):
            yield

    @contextmanager
    def _understood(self, response: httpx.Response | None) -> Iterator[None]:
        try:
            yield
        except Malformed as error:
            raise ProviderFault(
                "provider_malformed",
                self.clean(f"the answer of the {self.kind} service is not to be understood: {error.message}"),
                sent="unknown",
                status=None if response is None else response.status_code,
                usage=error.usage,
            ) from None
        except Declined as error:
            raise ProviderFault(
                "provider_http_error",
                self.clean(f"the {self.kind} service answered that the request failed: {error.message}"),
                sent="refused",
                retryable=error.retryable,
                status=200,
                usage=error.usage,
            ) from None

    @contextmanager
    def _sent(
        self, url: str, headers: Mapping[str, str], body: Mapping[str, Any], call: Call
    ) -> Iterator[httpx.Response]:
        """The answer of a request, its status seen to. Whatever goes wrong, while it is read as well, is told."""
        import httpx

        from .. import http_transport as transport

        try:
            content = canonical(body).encode()
        except JsonError as error:
            raise ProviderFault("provider_request", f"the request is no JSON: {error.message}", sent="no") from error
        guard = Guard(call.monotonic, call.monotonic() + call.timeout_seconds, call.token)
        answered = False
        try:
            with (
                transport.client(
                    self._policy,
                    guard,
                    headers=transport.with_own(self._headers, {**headers, "Content-Type": "application/json"}),
                    tls=self._tls,
                    resolver=self._resolver,
                    environment=self._environment,
                ) as client,
                client.stream("POST", url, content=content) as response,
            ):
                answered = True
                if response.status_code != 200:
                    raise self._refusal(response)
                yield response
        except transport.NeverSent as error:
            raise self._never_sent(error, call) from error
        except (UnicodeEncodeError, httpx.InvalidURL) as error:
            # A header or an address that the library cannot write: it builds the whole request before it connects.
            if answered:
                raise
            message = self.clean(f"the request cannot be written: {error}")
            raise ProviderFault("provider_request", message, sent="no") from error
        except transport.RedirectRefused as error:
            raise ProviderFault("provider_http_error", str(error), sent="refused", status=error.status) from error
        except transport.Cancelled as error:
            message = f"cancelled while the answer was awaited: {call.token.reason}"
            raise ProviderFault("provider_cancelled", message, sent="unknown") from error
        except (transport.AnswerTooLarge, transport.AnswerUnreadable) as error:
            raise ProviderFault("provider_malformed", self.clean(str(error)), sent="unknown") from error
        except httpx.TimeoutException as error:
            message = f"no complete answer within {call.timeout_seconds:g} s"
            raise ProviderFault("provider_timeout", message, sent="unknown") from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            message = self.clean(f"the connection was lost after the request was sent: {error}")
            raise ProviderFault("provider_transport", message, sent="unknown") from error

    def _never_sent(self, error: Any, call: Call) -> ProviderFault:
        codes = {
            "denied": "policy_denied",
            "cancelled": "provider_cancelled",
            "timeout": "provider_timeout",
            "request": "provider_request",
        }
        message = self.clean(error.message)
        if error.code == "cancelled":
            message = f"cancelled before it was sent: {call.token.reason}"
        return ProviderFault(
            codes.get(error.code, "provider_unreachable"),
            message,
            sent="no",
            retryable=error.code in ("resolve", "connect", "timeout"),
        )

    def _refusal(self, response: httpx.Response) -> ProviderFault:
        """A status other than 200. What the service says about it is read as far as it goes, and changes nothing."""
        status = response.status_code
        if status < 300:
            return ProviderFault(
                "provider_malformed", f"the service answered {status} and no result", sent="unknown", status=status
            )
        # Cleaned before it is cut: half a secret is not recognised any more.
        words = self._redactor.text(_error_text(response))[:MAX_ERROR_TEXT]
        return ProviderFault(
            "provider_http_error",
            self.clean(f"the {self.kind} service answered {status}: {words}"),
            sent="refused",
            retryable=status == 429 or status >= 500,
            status=status,
            retry_after_ms=_retry_after_ms(response.headers),
            request_id=next((response.headers[n] for n in REQUEST_ID_HEADERS if n in response.headers), None),
        )

    def clean(self, text: str) -> str:
        """A text without any secret of this provider, and not longer than a message may be."""
        return self._redactor.text(text)[: MAX_ERROR_TEXT + 128]


class _Events:
    """The events of a streamed answer (`text/event-stream`): JSON objects, until the connection ends."""

    def __init__(
        self, exchange: Exchange, url: str, headers: Mapping[str, str], body: Mapping[str, Any], call: Call
    ) -> None:
        self._exchange = exchange
        self._sent = exchange._sent(url, {**headers, "Accept": "text/event-stream"}, body, call)
        self._response: httpx.Response | None = None

    def __enter__(self) -> _Events:
        self._response = self._sent.__enter__()
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        return self._sent.__exit__(*raised)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Each event's data. `[DONE]` ends the stream. What is no JSON object is `Malformed`."""
        assert self._response is not None
        lines: list[bytes] = []
        for line in _lines(self._response.iter_raw()):
            if line:
                if line.startswith(b"data:"):
                    lines.append(line[5:].removeprefix(b" "))
                continue
            if not lines:
                continue
            data = b"\n".join(lines)
            lines = []
            if data.strip() == b"[DONE]":
                return
            event = strict_json(data)
            if not isinstance(event, dict):
                raise Malformed("an event of the stream is no object")
            yield event


def _lines(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of a body without their ends (LF or CR LF), as soon as each is complete."""
    rest = bytearray()
    for part in parts:
        rest += part
        if len(rest) > MAX_EVENT_BYTES:
            raise Malformed(f"a line of the stream has more than {MAX_EVENT_BYTES} bytes")
        if b"\n" not in part:
            continue
        *whole, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in whole:
            yield line.removesuffix(b"\r")
    if rest:
        yield bytes(rest)


def require_extra(kind: str) -> None:
    """Raise `ProviderFault` unless the library for a kind of provider is installed; it names what to install."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ProviderFault("provider_extra_missing", missing_extra(kind), sent="no") from error


def missing_extra(kind: str) -> str:
    """What to tell whoever has no library for a kind of provider."""
    extra = "openai" if "openai" in kind else kind
    return f"a provider of kind {kind} needs the extra: pip install 'agentctl[{extra}]'"


def _secret(reference: Mapping[str, Any], what: str, resolve_secret: ResolveSecret) -> str:
    try:
        value = resolve_secret(reference)
    except TaskFault as fault:
        raise ProviderFault("provider_credential", f"{what}: {fault.message}", sent="no") from fault
    if what.startswith("policy"):
        return value
    # Before anything is connected: a line break in a key would be found by the HTTP library in mid-request.
    if not value or not value.isascii() or not value.isprintable():
        message = f"{what} is empty, or has characters that an HTTP header cannot carry"
        raise ProviderFault("provider_credential", message, sent="no")
    return value


def strict_json(data: bytes | str) -> Any:
    """JSON of a service. Raises `Malformed` for what is none, in the sense of `store.canonical.parse_json`."""
    try:
        return parse_json(data)
    except JsonError as error:
        raise Malformed(error.message) from error


def _error_text(response: httpx.Response) -> str:
    """The service's own words: `error.message` of its JSON, or the beginning of its body."""
    import httpx

    data = bytearray()
    try:
        for part in response.iter_raw():
            data += part
            if len(data) > MAX_ERROR_BYTES:
                break
    except httpx.TransportError:
        pass  # the status was seen: it is a refusal, whatever became of the explanation
    text = data.decode("utf-8", errors="replace").strip()
    try:
        value = parse_json(bytes(data))
    except JsonError:
        return text or "no explanation"
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else text


def _retry_after_ms(headers: httpx.Headers) -> int | None:
    """`retry-after-ms`, or `Retry-After` in seconds or as a date, which is compared with the service's own clock."""
    text = headers.get("retry-after-ms", "").strip()
    if _is_number(text):
        return int(min(float(text), MAX_RETRY_AFTER_MS))
    text = headers.get("retry-after", "").strip()
    if _is_number(text):
        return int(min(float(text) * 1000, MAX_RETRY_AFTER_MS))
    try:
        then, now = parsedate_to_datetime(text), parsedate_to_datetime(headers.get("date", ""))
        return max(0, min(int((then - now).total_seconds() * 1000), MAX_RETRY_AFTER_MS))
    except (ValueError, TypeError, OverflowError):
        return None


def _is_number(text: str) -> bool:
    """Plain digits, with a fraction or not; however many they are, they make a float (infinity, if need be)."""
    return text.isascii() and text.replace(".", "", 1).isdigit()


# -- reading answers ---------------------------------------------------------------------------------------------------


def an_object(value: Any, what: str) -> dict[str, Any]:
    """`value` if it is a JSON object. Raises `Malformed`."""
    if not isinstance(value, dict):
        raise Malformed(f"{what} is no object")
    return value


def a_list(value: Any, what: str) -> list[Any]:
    """`value` if it is a list; nothing counts as an empty one. Raises `Malformed`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed(f"{what} is no list")
    return value


def a_text(value: Any, what: str) -> str:
    """`value` if it is a text. Raises `Malformed`."""
    if not isinstance(value, str):
        raise Malformed(f"{what} is no text")
    return value


def a_word(value: Any, known: Collection[str], what: str) -> str:
    """`value` if it is one of the words that are known. Raises `Malformed`: it may be anything, a list say."""
    if not isinstance(value, str) or value not in known:
        raise Malformed(f"{what} is {value!r}")
    return value


def arguments_of(text: Any, name: str) -> dict[str, Any]:
    """The arguments of a tool call, which services give as JSON in a text. Half of them are no call at all."""
    if text == "":
        return {}
    try:
        value = parse_json(a_text(text, f"the arguments of the call of {name}"))
    except JsonError as error:
        raise Malformed(f"the arguments of the call of {name} are not whole: {error.message}") from error
    return an_object(value, f"the argument of the call of {name}")


def distinct(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Calls that can be told apart: results are given back by their ids. Raises `Malformed`."""
    identities = [call.id for call in calls]
    if "" in identities or len(set(identities)) != len(identities):
        raise Malformed("two of its calls have the same id, or one has none")
    return tuple(calls)


def units(usage: Mapping[str, Any], *path: str) -> int:
    """A count of tokens below `usage`; 0 when it is not told. Raises `Malformed` for anything else than a count."""
    value: Any = usage
    for name in path:
        if value is None:
            return 0
        value = an_object(value, "usage").get(name)
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise Malformed(f"usage.{'.'.join(path)} is no count")
    return value


@contextmanager
def charged(usage: Usage | None) -> Iterator[None]:
    """Reading an answer whose usage is known: a `Malformed` that is raised meanwhile tells what was paid for it."""
    try:
        yield
    except Malformed as error:
        error.usage = error.usage or usage
        raise


def estimated(request: ModelRequest, text: str, calls: Sequence[ToolCall]) -> Usage:
    """For a service that does not tell its usage: never less than it was, since a token has at least one byte."""
    inputs = canonical([dict(call.input) for call in calls])
    return Usage(len(canonical(request.as_json()).encode()), max(1, len(text.encode()) + len(inputs.encode())))


def keeps_strictness(schema: Any) -> bool:
    """Whether a service's strict mode takes a schema: every object is closed and requires all its properties."""
    if isinstance(schema, list):
        return all(keeps_strictness(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" or "properties" in schema:
        names = set(schema.get("properties") or {})
        if schema.get("additionalProperties") is not False or set(schema.get("required") or ()) != names:
            return False
    return all(keeps_strictness(value) for name, value in schema.items() if name not in ("enum", "const", "default"))
