"""HTTP clients under the policy against real sockets: where a connection goes, and how far a request came."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from agentctl.store.policy import Policy
from agentctl.worker import http_transport as transport
from agentctl.worker.network import (
    Guard,
    NameNotResolved,
    lookup,
    proxy_of,
    target_of,
    tls_context,
)
from agentctl.worker.watch import Token
from support.children import PATIENCE
from support.model_server import ModelServer, Play, closed_port, model_server


def policy(*hosts: str, **network: Any) -> Policy:
    return Policy.from_json({"networkAllowlist": list(hosts), "network": {"allowPrivate": True, **network}})


def guard(token: Token | None = None, seconds: float = 30.0) -> Guard:
    return Guard(time.monotonic, time.monotonic() + seconds, token)


class Names:
    """A resolver that gives the next answer each time it is asked, and counts."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def post(url: str, rules: Policy, **options: Any) -> httpx.Response:
    """One request of the synchronous client."""
    with transport.client(rules, options.pop("guard", guard()), **options) as client:
        return client.post(url, json={})


def apost(url: str, rules: Policy, **options: Any) -> httpx.Response:
    """The same with the asynchronous one."""

    async def go() -> httpx.Response:
        async with transport.async_client(rules, options.pop("guard", guard()), **options) as client:
            return await client.post(url, json={})

    return asyncio.run(go())


BOTH = pytest.mark.parametrize("send", [post, apost])


@BOTH
def test_a_request_goes_to_the_address_that_was_checked(send: Any, server: ModelServer) -> None:
    names = Names(["127.0.0.1"])
    url = f"http://model.test:{server.port}/v1/messages"
    assert send(url, policy("model.test"), resolver=names).status_code == 200
    assert names.asked == ["model.test"], "the name was asked for more than once"
    assert server.seen[0].headers["host"] == f"model.test:{server.port}"


@BOTH
def test_a_name_that_changes_its_address_reaches_nothing(send: Any, server: ModelServer) -> None:
    """Public at the first look, private at the second: DNS rebinding."""
    names = Names(["203.0.114.1", "127.0.0.1"])
    rules = policy("model.test", allowPrivate=False)
    with pytest.raises(transport.NeverSent) as caught:
        send(f"http://model.test:{server.port}/v1/messages", rules, resolver=names)
    assert caught.value.code == "denied"
    assert server.count == 0


@BOTH
def test_the_second_address_is_tried_when_the_first_does_not_answer(send: Any, server: ModelServer) -> None:
    names = Names(["127.0.0.2", "127.0.0.1"])  # the server listens on 127.0.0.1 alone
    assert send(f"http://model.test:{server.port}/v1/messages", policy("model.test"), resolver=names).status_code == 200


@BOTH
@pytest.mark.parametrize(
    ("rules", "url", "code"),
    [
        (policy(), "http://127.0.0.1:1/", "denied"),
        (policy("127.0.0.1", allowedPorts=[443]), "http://127.0.0.1:1/", "denied"),
        (policy("127.0.0.1", allowedSchemes=["https"]), "http://127.0.0.1:1/", "denied"),
        (policy("127.0.0.1", allowPrivate=False), "http://127.0.0.1:1/", "denied"),
        (policy("[::1]", allowPrivate=False), "http://[::1]:1/", "denied"),
        (policy("nowhere.invalid"), "http://nowhere.invalid/", "resolve"),
    ],
)
def test_what_was_never_sent_says_so(send: Any, rules: Policy, url: str, code: str) -> None:
    with pytest.raises(transport.NeverSent) as caught:
        send(url, rules)
    assert caught.value.code == code
    assert transport.never_sent(caught.value) is caught.value


@BOTH
def test_a_refused_connection_was_never_sent(send: Any) -> None:
    with pytest.raises(transport.NeverSent) as caught:
        send(f"http://127.0.0.1:{closed_port()}/", policy("127.0.0.1"))
    assert caught.value.code == "connect"


@BOTH
def test_a_redirect_is_refused_even_if_the_client_would_follow(send: Any, server: ModelServer) -> None:
    server.plays(Play(status=302, headers={"Location": server.url + "/elsewhere"}))
    with pytest.raises(transport.RedirectRefused):
        send(server.url, policy("127.0.0.1"))
    assert server.count == 1

    async def follow() -> None:
        async with transport.async_client(policy("127.0.0.1"), guard()) as client:
            await client.post(server.url, json={}, follow_redirects=True)

    with pytest.raises(transport.RedirectRefused):
        asyncio.run(follow())
    assert server.count == 2


@BOTH
def test_an_answer_is_read_up_to_the_limit(send: Any, server: ModelServer) -> None:
    server.plays(Play(body=b"x" * 1000))
    assert len(send(server.url, policy("127.0.0.1", maxResponseBytes=1000)).content) == 1000
    with pytest.raises(transport.AnswerTooLarge) as caught:
        send(server.url, policy("127.0.0.1", maxResponseBytes=999))
    assert transport.never_sent(caught.value) is None


@BOTH
def test_a_lost_connection_may_have_been_received(send: Any, server: ModelServer) -> None:
    server.plays(Play(drop=True))
    with pytest.raises(httpx.TransportError) as caught:
        send(server.url, policy("127.0.0.1"))
    assert transport.never_sent(caught.value) is None


def test_a_token_ends_the_wait_for_an_answer(server: ModelServer) -> None:
    token = Token()
    server.plays(Play(gate=threading.Event()))
    canceller = threading.Thread(target=lambda: (server.wait_for(1), token.cancel("drain")))
    canceller.start()
    with pytest.raises(transport.Cancelled):
        post(server.url, policy("127.0.0.1"), guard=guard(token))
    canceller.join()
    assert server.gone.wait(PATIENCE)


def test_a_token_ends_a_lookup_that_does_not_answer() -> None:
    token, asked, never = Token(), threading.Event(), threading.Event()

    def hang(host: str, port: int) -> list[str]:
        asked.set()
        never.wait(60)
        return []

    canceller = threading.Thread(target=lambda: (asked.wait(30), token.cancel("drain")))
    canceller.start()
    with pytest.raises(transport.NeverSent) as caught:
        post("http://model.test/", policy("model.test"), guard=guard(token), resolver=hang)
    assert caught.value.code == "cancelled"
    canceller.join()
    never.set()


def test_a_lookup_has_a_limit() -> None:
    never = threading.Event()

    def hang(host: str, port: int) -> list[str]:
        never.wait(60)
        return []

    with pytest.raises(NameNotResolved, match="in time"):
        lookup(target_of("http://model.test/"), guard=guard(), seconds=0.05, resolver=hang)
    never.set()


def test_a_connection_has_a_limit() -> None:
    """A server whose backlog is full swallows connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for item in waiting:
            item.setblocking(False)
            item.connect_ex(("127.0.0.1", port))
        with pytest.raises(transport.NeverSent) as caught:
            post(f"http://127.0.0.1:{port}/", policy("127.0.0.1"), guard=guard(seconds=0.3))
        assert caught.value.code == "connect"
        for item in waiting:
            item.close()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own authority for `model.test`, with its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=model.test -keyout key.pem -out cert.pem"
    names = ["-addext", "subjectAltName=DNS:model.test"]
    subprocess.run([*words.split(), *names], cwd=folder, capture_output=True, check=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    return both


@pytest.fixture
def secure(certificate: Path) -> Iterator[ModelServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with model_server(tls=context) as running:
        yield running


def ca(certificate: Path) -> bytes:
    return certificate.with_name("cert.pem").read_bytes()


@BOTH
def test_a_custom_authority_is_trusted(send: Any, secure: ModelServer, certificate: Path) -> None:
    names = Names(["127.0.0.1"])
    url = f"https://model.test:{secure.port}/v1/messages"
    answer = send(url, policy("model.test"), resolver=names, tls=tls_context(ca(certificate)))
    assert answer.status_code == 200


@BOTH
@pytest.mark.parametrize("host", ["model.test", "other.test"])
def test_a_server_that_cannot_prove_its_name_gets_nothing(
    send: Any, host: str, secure: ModelServer, certificate: Path
) -> None:
    """Unknown authority for the right name, known authority for a wrong one."""
    tls = tls_context(None if host == "model.test" else ca(certificate))
    with pytest.raises(transport.NeverSent) as caught:
        send(f"https://{host}:{secure.port}/", policy(host), resolver=Names(["127.0.0.1"]), tls=tls)
    assert caught.value.code in ("tls", "connect")
    assert "certificate" in caught.value.message.lower()
    assert secure.count == 0


@BOTH
def test_the_environment_does_not_say_whom_to_trust(
    send: Any, secure: ModelServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_name("cert.pem")))
    monkeypatch.setenv("SSL_CERT_DIR", str(certificate.parent))
    with pytest.raises(transport.NeverSent):
        send(f"https://model.test:{secure.port}/", policy("model.test"), resolver=Names(["127.0.0.1"]))
    assert secure.count == 0


def test_a_server_without_tls_gets_nothing(server: ModelServer) -> None:
    with pytest.raises(transport.NeverSent) as caught:
        post(f"https://127.0.0.1:{server.port}/", policy("127.0.0.1"))
    assert caught.value.code == "tls"
    assert server.count == 0


@pytest.mark.parametrize("data", [b"no certificate", b"", b"\xff"])
def test_a_custom_authority_has_to_be_one(data: bytes) -> None:
    with pytest.raises(ValueError, match="PEM"):
        tls_context(data)


def test_letters_that_end_no_line_are_found_wherever_they_are_cut() -> None:
    data = "a\u2028b\u2029c\u0085d\u00e9\u20ac\u00c2e\u2028".encode()
    wanted = "a\\u2028b\\u2029c\\u0085d\u00e9\u20ac\u00c2e\\u2028".encode()

    class Pieces(httpx.AsyncByteStream):
        def __init__(self, size: int) -> None:
            self.size = size

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for start in range(0, len(data), self.size):
                yield data[start : start + self.size]

    async def read(size: int) -> bytes:
        return b"".join([part async for part in transport.EventBytes(Pieces(size))])

    assert {asyncio.run(read(size)) for size in range(1, len(data) + 1)} == {wanted}


# -- proxies -----------------------------------------------------------------------------------------------------------


def test_the_proxy_of_the_environment_is_used_only_if_allowed(server: ModelServer) -> None:
    environment = {"HTTP_PROXY": server.url}
    names = Names(["127.0.0.1"])
    answer = post("http://far.test/v1/messages", policy("far.test", allowProxy=True), environment=environment)
    assert answer.status_code == 200
    assert server.seen[0].path == "http://far.test/v1/messages"
    with pytest.raises(transport.NeverSent):
        post(f"http://far.test:{closed_port()}/", policy("far.test"), environment=environment, resolver=names)
    with pytest.raises(transport.NeverSent) as caught:
        post("http://other.test/", policy("far.test", allowProxy=True), environment=environment)
    assert caught.value.code == "denied"
    assert server.count == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"https_proxy": "http://p:1"}, "http://p:1"),
        ({"HTTPS_PROXY": "p:1"}, "http://p:1"),
        ({"ALL_PROXY": "http://p:1"}, "http://p:1"),
        ({"HTTP_PROXY": "http://p:1"}, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "example.com"}, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "ample.com"}, "http://p:1"),
    ],
)
def test_which_proxy(environment: dict[str, str], expected: str | None) -> None:
    assert proxy_of(target_of("https://api.example.com/x"), environment) == expected


@BOTH
@pytest.mark.parametrize(
    "proxy",
    [
        "socks5://u:pw-1@127.0.0.1:9",
        "socks4://h:9",
        "ftp://h",
        "http://",
        "http://u:pw-1/x@h",
        "http://[h",
        "http://h:99999",
    ],
)
def test_a_proxy_that_cannot_be_used_is_no_bug(send: Any, proxy: str) -> None:
    environment = {"ALL_PROXY": proxy}
    with pytest.raises(transport.NeverSent) as caught:
        send("http://127.0.0.1:1/", policy("127.0.0.1", allowProxy=True), environment=environment)
    assert caught.value.code == "proxy"
    assert "pw-1" not in caught.value.message


@BOTH
def test_a_proxy_gets_a_password_in_any_script(send: Any, server: ModelServer) -> None:
    environment = {"HTTP_PROXY": server.url.replace("://", "://who:p\u00e4ss@")}
    answer = send("http://far.test/v1/messages", policy("far.test", allowProxy=True), environment=environment)
    assert answer.status_code == 200
    assert server.seen[0].headers["proxy-authorization"] == "Basic " + b64encode("who:p\u00e4ss".encode()).decode()


@pytest.mark.parametrize(
    "url",
    ["", "x", "ftp://h/", "http://", "http://h:0/", "http://h:99999/", "http://user:pw@h/", "http://h/ x", "//h/x"],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL"):
        target_of(url)


def test_the_cause_is_found_below_what_libraries_make_of_it() -> None:
    inner = transport.NeverSent("connect", "refused")
    wrapped = RuntimeError("library")
    wrapped.__cause__ = inner
    assert transport.never_sent(ExceptionGroup("g", [wrapped])) is inner
    assert transport.never_sent(ExceptionGroup("g", [wrapped, ValueError()])) is None
    assert transport.never_sent(ValueError()) is None
