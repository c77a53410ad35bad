"""`mcp.call` against a server of the official library: what is sent, how often, and what each end comes to (12.5)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.worker.effects import EffectContext, EffectOutcome, Work, prepare
from agentctl.worker.watch import Token
from support.children import wait_until
from support.effects import error_of, execute, planned, state_of
from support.model_server import closed_port
from support.peers import PeerServer, PeerServers
from support.scale import time_limit

EFFECT = "e" * 64


class Site:
    """Servers of one test, and calls of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = PeerServers("mcp_server.py", folder)

    def server(self, *arguments: str, **plan: list[str]) -> PeerServer:
        """The server of these arguments, with another plan."""
        return self.servers.planned(arguments, {name.replace("__", "/"): what for name, what in plan.items()})

    def work(
        self,
        server: PeerServer | None,
        given: dict[str, Any] | None = None,
        *,
        idempotency: str | None = None,
        definition: dict[str, Any] | None = None,
        timeout: float = 20.0,
        **policy: Any,
    ) -> Work:
        action: dict[str, Any] = {"kind": "mcp.call", "with": {}}
        if idempotency is not None:
            action["idempotency"] = idempotency
        url = "http://127.0.0.1:1/mcp" if server is None else f"{server.origin}/mcp"
        action["peers"] = {
            "numbers": {"url": url, "headers": {}, "timeoutSeconds": 10, "protocolVersion": "2025-11-25"}
            | (definition or {})
        }
        rules = {
            "networkAllowlist": ["127.0.0.1"],
            "network": {"allowPrivate": True, "maxResponseBytes": 1_000_000},
            "environmentAllowlist": ["MCP_KEY"],
        }
        return Work(
            task_id="t",
            action_name="a",
            kind="mcp.call",
            action=action,
            input={"server": "numbers", "tool": "add", "arguments": {"a": 2, "b": 3}} | (given or {}),
            memory={},
            timeout_seconds=timeout,
            base_path=str(self.folder),
            policy=Policy.from_json(rules | policy),
        )

    def call(self, work: Work, token: Token | None = None) -> EffectOutcome:
        return execute(planned(work), EffectContext(EFFECT, token or Token(), time.monotonic))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("mcp"))
    yield made
    made.servers.stop()


@pytest.mark.parametrize("form", ["json", "sse"])
def test_a_call_and_its_result(site: Site, form: str) -> None:
    server = site.server(form)
    outcome = site.call(site.work(server))
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["structuredContent"] == {"sum": 5}
    assert outcome.result["content"] == [{"type": "text", "text": "5"}]
    counts = server.counts()
    assert counts["initialize"] == counts["notifications/initialized"] == counts["tools/call"] == 1
    assert counts["tools/list"] == 2  # the second page has the tool
    assert counts["DELETE"] == 1
    (called,) = server.requests("tools/call")
    assert called["headers"]["origin"] == server.origin
    assert called["headers"]["mcp-protocol-version"] == "2025-11-25"
    assert called["headers"]["mcp-session-id"]
    assert "idempotency-key" not in called["headers"]
    (opened,) = server.requests("initialize")
    assert opened["params"]["protocolVersion"] == "2025-11-25"
    status, state = state_of(outcome)
    assert (status, state["sessions"], state["sent"], state["tool"]) == ("succeeded", 1, True, "add")
    assert state["toolDigest"].startswith("sha256:v1:")


def test_a_keyed_call_carries_the_effect_id(site: Site) -> None:
    server = site.server()
    assert site.call(site.work(server, idempotency="keyed")).status == "succeeded"
    (called,) = server.requests("tools/call")
    assert called["headers"]["idempotency-key"] == EFFECT
    assert called["params"]["_meta"]["agentctl.dev/idempotencyKey"] == EFFECT
    assert all("idempotency-key" not in item["headers"] for item in server.requests() if item != called)


def test_headers_of_the_document_do_not_double_ours(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "mine")
    server = site.server()
    names = ("origin", "IDEMPOTENCY-KEY", "MCP-PROTOCOL-VERSION")
    work = site.work(server, idempotency="keyed", definition={"headers": {name: {"env": "MCP_KEY"} for name in names}})
    assert site.call(work).status == "succeeded"
    (called,) = server.requests("tools/call")
    wanted = {"origin": server.origin, "idempotency-key": EFFECT, "mcp-protocol-version": "2025-11-25"}
    assert {name: called["headers"][name] for name in wanted} == wanted


def test_another_pinned_version(site: Site) -> None:
    server = site.server()
    assert site.call(site.work(server, definition={"protocolVersion": "2025-06-18"})).status == "succeeded"
    (called,) = server.requests("tools/call")
    assert called["headers"]["mcp-protocol-version"] == "2025-06-18"


def test_a_server_that_answers_with_another_version(site: Site) -> None:
    answer = {"protocolVersion": "2025-03-26", "capabilities": {}, "serverInfo": {"name": "x", "version": "1"}}
    server = site.server(initialize=[f"result:{json.dumps(answer)}"])
    outcome = site.call(site.work(server))
    assert (outcome.status, error_of(outcome)["code"]) == ("not_dispatched", "mcp_protocol_version")
    assert "tools/call" not in server.counts()


BRIEF = {"definition": {"timeoutSeconds": time_limit()}}
UNSENT = [
    ("nobody there", None, {}, "mcp_unavailable", True),
    ("initialize refused", {"initialize": ["status:401"]}, {}, "mcp_http_error", False),
    ("initialize fails", {"initialize": ["status:500"]}, {}, "mcp_http_error", True),
    ("initialize cut", {"initialize": ["cut"]}, {}, "mcp_connection_lost", True),
    ("initialize garbage", {"initialize": ["garbage"]}, {}, "mcp_malformed", False),
    (
        "initialize hangs",
        {"initialize": ["hang"]},
        {"definition": {"timeoutSeconds": time_limit()}},
        "mcp_timeout",
        True,
    ),
    ("redirect", {"initialize": ["redirect"]}, {}, "mcp_http_error", False),
    ("no such tool", {}, {"given": {"tool": "nope"}}, "mcp_tool_missing", False),
    ("list cut", {"tools__list": ["cut"]}, {}, "mcp_connection_lost", True),
    ("list dies", {"tools__list": ["die"]}, {}, "mcp_connection_lost", True),
]


@pytest.mark.parametrize(("plan", "more", "code", "again"), [row[1:] for row in UNSENT], ids=[row[0] for row in UNSENT])
def test_what_goes_wrong_before_the_call_is_no_dispatch(
    site: Site, plan: dict[str, list[str]] | None, more: dict[str, Any], code: str, again: bool
) -> None:
    server = None if plan is None else site.server(**plan)
    outcome = site.call(site.work(server, more.get("given"), **{k: v for k, v in more.items() if k != "given"}))
    found = error_of(outcome)
    assert (outcome.status, found["code"], found["retryable"]) == ("not_dispatched", code, again), found
    if server is not None:
        assert "tools/call" not in server.counts()


DEFINITE = [
    ("tool error", {}, {"tool": "fail", "arguments": {}}, "mcp_tool_error"),
    ("rpc error", {"tools__call": ["error:-32602"]}, {}, "mcp_error"),
    ("rpc server error", {"tools__call": ["error:-32000"]}, {}, "mcp_error"),
    ("refused", {"tools__call": ["status:403"]}, {}, "mcp_http_error"),
    ("too many", {"tools__call": ["status:429"]}, {}, "mcp_http_error"),
    ("unavailable", {"tools__call": ["status:503"]}, {}, "mcp_http_error"),
    ("redirect", {"tools__call": ["redirect"]}, {}, "mcp_http_error"),
]


@pytest.mark.parametrize("idempotency", ["unknown", "idempotent"])
@pytest.mark.parametrize(("plan", "given", "code"), [row[1:] for row in DEFINITE], ids=[row[0] for row in DEFINITE])
def test_a_definite_answer_is_a_failure_and_asked_once(
    site: Site, plan: dict[str, list[str]], given: dict[str, Any], code: str, idempotency: str
) -> None:
    server = site.server(**plan)
    outcome = site.call(site.work(server, given, idempotency=idempotency))
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", code), outcome.error
    assert server.counts()["tools/call"] == 1
    assert state_of(outcome)[0] == "failed"


OPEN = [
    ("no answer", "hang", "mcp_timeout"),
    ("the answer to something else", "stray", "mcp_timeout"),
    ("carried out, no answer", "late", "mcp_timeout"),
    ("cut", "cut", "mcp_connection_lost"),
    ("server dies", "die", "mcp_connection_lost"),
    ("garbage", "garbage", "mcp_malformed"),
    ("html", "html", "mcp_malformed"),
    ("accepted", "accepted", "mcp_malformed"),
    ("too large", "huge", "mcp_malformed"),
    ("wrong shape", 'result:{"content": "x"}', "mcp_malformed"),
    ("no structured content", 'result:{"content": []}', "mcp_malformed"),
    ("outside its schema", 'result:{"content": [], "structuredContent": {"sum": "x"}}', "mcp_malformed"),
    ("session expired", "status:404", "mcp_session_expired"),
    ("gateway", "status:502", "mcp_http_error"),
]


@pytest.mark.parametrize("idempotency", ["unknown", "at_most_once"])
@pytest.mark.parametrize(("behaviour", "code"), [row[1:] for row in OPEN], ids=[row[0] for row in OPEN])
def test_what_is_not_known_stays_uncertain_and_is_sent_once(
    site: Site, behaviour: str, code: str, idempotency: str
) -> None:
    server = site.server(tools__call=[behaviour])
    outcome = site.call(site.work(server, idempotency=idempotency, definition={"timeoutSeconds": max(2, time_limit())}))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", code), outcome.error
    assert server.counts()["tools/call"] == 1
    assert server.counts()["initialize"] == 1
    status, state = state_of(outcome)
    assert (status, state["sent"]) == ("uncertain", True)


@pytest.mark.parametrize("form", ["json", "sse"])
def test_how_large_an_answer_may_be_is_said_by_the_policy(site: Site, form: str) -> None:
    """Above the limit that the client library has for an event of a stream, and below that of the policy; then not."""
    text = "x" * 1_500_000
    server = site.server(form)
    given = {"tool": "long", "arguments": {"size": len(text)}}
    network = {"allowPrivate": True, "maxResponseBytes": 2_000_000}
    outcome = site.call(site.work(server, given, network=network))
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["content"] == [{"type": "text", "text": text}]
    outcome = site.call(site.work(server, given))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "mcp_malformed")
    assert "maxResponseBytes" in error_of(outcome)["message"]
    assert "lost" not in error_of(outcome)["message"]


@pytest.mark.parametrize("idempotency", ["pure", "idempotent", "keyed"])
@pytest.mark.parametrize(
    "behaviour", [row[1] for row in OPEN if row[1] != "die"], ids=[row[0] for row in OPEN if row[1] != "die"]
)
def test_one_more_session_where_the_contract_allows_it(site: Site, behaviour: str, idempotency: str) -> None:
    server = site.server(tools__call=[behaviour])
    outcome = site.call(site.work(server, idempotency=idempotency, definition={"timeoutSeconds": max(2, time_limit())}))
    assert outcome.status == "succeeded", outcome.error
    counts = server.counts()
    assert (counts["tools/call"], counts["initialize"]) == (2, 2)
    status, state = state_of(outcome)
    assert (status, state["sessions"]) == ("succeeded", 2)
    if idempotency == "keyed":
        assert [item["headers"]["idempotency-key"] for item in server.requests("tools/call")] == [EFFECT, EFFECT]


@pytest.mark.parametrize("second", ["cut", "garbage", "status:404"])
def test_no_third_session(site: Site, second: str) -> None:
    server = site.server(tools__call=["cut", second])
    outcome = site.call(site.work(server, idempotency="idempotent"))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "mcp_reconnect_limit")
    assert (server.counts()["tools/call"], server.counts()["initialize"]) == (2, 2)
    assert error_of(outcome)["details"]["first"]["code"] == "mcp_connection_lost"


def test_a_server_that_is_gone_when_it_is_asked_again(site: Site) -> None:
    server = site.server(tools__call=["die"])
    outcome = site.call(site.work(server, idempotency="idempotent"))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "mcp_reconnect_limit")
    assert server.counts()["tools/call"] == 1


def test_a_tool_that_has_changed_is_not_called_again(site: Site) -> None:
    server = site.server(initialize=["ok", "change"], tools__call=["cut"])
    outcome = site.call(site.work(server, idempotency="idempotent"))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "mcp_tool_changed"), outcome.error
    assert (server.counts()["tools/call"], server.counts()["initialize"]) == (1, 2)


def test_the_definite_answer_of_the_second_session_counts(site: Site) -> None:
    server = site.server(tools__call=["cut", "error:-32602"])
    outcome = site.call(site.work(server, idempotency="idempotent"))
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", "mcp_error")


@pytest.mark.parametrize("idempotency", ["unknown", "idempotent"])
def test_a_cancellation_is_told_to_the_server(site: Site, idempotency: str) -> None:
    server = site.server()
    token = Token()
    given = {"tool": "slow", "arguments": {"seconds": 60}}

    def cancel() -> None:
        wait_until(lambda: "tools/call" in server.counts(), "the call arrives")
        token.cancel("cancel_requested")

    thread = threading.Thread(target=cancel)
    thread.start()
    outcome = site.call(site.work(server, given, idempotency=idempotency), token)
    thread.join()
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "cancelled")
    assert server.counts()["tools/call"] == 1
    assert server.counts()["notifications/cancelled"] == 1


def test_a_cancellation_before_anything(site: Site) -> None:
    server = site.server()
    token = Token()
    token.cancel("drain")
    assert site.call(site.work(server), token).status == "not_dispatched"
    assert server.requests() == []


def test_the_whole_call_has_a_limit(site: Site) -> None:
    server = site.server(tools__call=["hang", "hang"])
    outcome = site.call(
        site.work(server, idempotency="idempotent", definition={"timeoutSeconds": 60}, timeout=time_limit(2))
    )
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "mcp_timeout")


def test_a_secret_header_is_sent_and_kept_nowhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "Bearer hunter-2")
    server = site.server()
    definition = {"headers": {"Authorization": {"env": "MCP_KEY"}}}
    outcome = site.call(site.work(server, {"tool": "leak", "arguments": {}}, definition=definition))
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["content"][0]["text"] == "you are [REDACTED]"
    assert all(item["headers"]["authorization"] == "Bearer hunter-2" for item in server.requests())
    assert outcome.protocol is not None
    assert "hunter" not in canonical([outcome.result, outcome.protocol.state_json, outcome.protocol.session_json])


Refused = tuple[str, Callable[[Site], Work], str]
REFUSED: list[Refused] = [
    ("host", lambda site: site.work(None, networkAllowlist=["example.org"]), "policy_denied"),
    ("no hosts", lambda site: site.work(None, networkAllowlist=[]), "policy_denied"),
    ("scheme", lambda site: site.work(None, network={"allowedSchemes": ["https"]}), "policy_denied"),
    ("port", lambda site: site.work(None, network={"allowedPorts": [443]}), "policy_denied"),
    ("server", lambda site: site.work(None, {"server": "nope"}), "invalid_input"),
    ("tool", lambda site: site.work(None, {"tool": 5}), "invalid_input"),
    ("arguments", lambda site: site.work(None, {"arguments": [1]}), "invalid_input"),
    ("secret", lambda site: site.work(None, definition={"headers": {"A": {"env": "OTHER"}}}), "policy_denied"),
]


@pytest.mark.parametrize(("make", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused_before_there_is_an_effect(site: Site, make: Callable[[Site], Work], code: str) -> None:
    with pytest.raises(TaskFault) as caught:
        prepare(make(site))
    assert caught.value.code == code


def test_a_private_address_is_refused_where_the_name_leads_to_it(site: Site) -> None:
    server = site.server()
    work = site.work(server, network={"allowPrivate": False})
    outcome = site.call(work)
    assert (outcome.status, error_of(outcome)["code"]) == ("not_dispatched", "policy_denied")
    assert server.requests() == []


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("mcp.call", {"server": "p", "tool": "t"}),
        ("a2a.delegate", {"peer": "p", "messageId": "m", "message": "hello"}),
    ],
)
def test_nothing_large_is_imported_while_an_effect_is_in_flight(tmp_path: Path, kind: str, given: Any) -> None:
    """In a process of its own, as a worker has one; the connection is refused, which takes a call all its way."""
    peer = {
        "url": f"http://127.0.0.1:{closed_port()}/", "cardUrl": f"http://127.0.0.1:{closed_port()}/", "headers": {},
        "timeoutSeconds": 5, "maxPolls": 1, "pollIntervalMs": 1,
        "protocolVersion": "2025-11-25" if kind == "mcp.call" else "1.0",
    }  # fmt: skip
    task = {
        "task_id": "t", "action_name": "a", "kind": kind, "action": {"kind": kind, "peers": {"p": peer}},
        "input": given, "memory": {}, "timeout_seconds": 5.0, "base_path": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", FRESH, json.dumps(task)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["not_dispatched", []]


FRESH = """
import json, sys, time
from agentctl.store.policy import Policy
from agentctl.worker.effects import EffectContext, Work, prepare
from agentctl.worker.watch import Token
rules = {"networkAllowlist": ["127.0.0.1"], "network": {"allowPrivate": True}}
plan = prepare(Work(**json.loads(sys.argv[1]), policy=Policy.from_json(rules)))
before = set(sys.modules)
outcome = plan.execute(EffectContext("e" * 64, Token(), time.monotonic))
large = ("mcp", "a2a", "httpx", "httpx2", "httpcore", "google", "pydantic")
print(json.dumps([outcome.status, sorted(n for n in set(sys.modules) - before if n.partition(".")[0] in large)]))
"""
