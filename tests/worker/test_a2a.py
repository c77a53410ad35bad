"""`a2a.delegate` against an agent of the official library: sent once, observed, and what each end comes to (12.6)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.store.records import ProtocolNote
from agentctl.worker.effects import EffectContext, EffectOutcome, Work, prepare
from agentctl.worker.effects.a2a import _exact, observe
from agentctl.worker.effects.a2a_artifacts import artifacts_of
from agentctl.worker.watch import Token
from support.children import wait_until
from support.effects import error_of, execute, planned, state_of
from support.peers import PeerServer, PeerServers
from support.scale import time_limit

EFFECT = "e" * 64
CARD = "GET"


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = PeerServers("a2a_server.py", folder)
        self.told: list[ProtocolNote] = []

    def server(self, *arguments: str, **plan: list[str]) -> PeerServer:
        known = self.servers.planned(arguments, plan)
        self.told.clear()
        for name in ("hold", "card.json"):
            (known.folder / name).unlink(missing_ok=True)
        return known

    def work(
        self,
        server: PeerServer | None,
        message: Any = "work hello",
        given: dict[str, Any] | None = None,
        *,
        definition: dict[str, Any] | None = None,
        timeout: float = 20.0,
        **policy: Any,
    ) -> Work:
        origin = "http://127.0.0.1:1" if server is None else server.origin
        peer = {
            "cardUrl": f"{origin}/.well-known/agent-card.json",
            "headers": {},
            "timeoutSeconds": 10,
            "maxPolls": 100,
            "pollIntervalMs": 20,
            "protocolVersion": "1.0",
        }
        rules = {
            "networkAllowlist": ["127.0.0.1"],
            "network": {"allowPrivate": True, "maxResponseBytes": 1_000_000},
            "environmentAllowlist": ["A2A_KEY"],
        }
        return Work(
            task_id="t",
            action_name="a",
            kind="a2a.delegate",
            action={"kind": "a2a.delegate", "peers": {"worker": peer | (definition or {})}},
            input={"peer": "worker", "messageId": "m-1", "message": message} | (given or {}),
            memory={},
            timeout_seconds=timeout,
            base_path=str(self.folder),
            policy=Policy.from_json(rules | policy),
        )

    def call(self, work: Work, token: Token | None = None) -> EffectOutcome:
        plan = planned(work)
        assert plan.idempotency == "at_most_once"
        self.told.clear()
        return execute(plan, _Context(EFFECT, token or Token(), time.monotonic, told=self.told))


class _Context(EffectContext):
    """Keeps what an effect tells, where a worker would write it into the store."""

    def __init__(self, *arguments: Any, told: list[ProtocolNote]) -> None:
        super().__init__(*arguments)
        self._told = told

    def tell(self, note: ProtocolNote) -> None:
        self._told.append(note)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("a2a"))
    yield made
    made.servers.stop()


def sends(server: PeerServer) -> int:
    counts = server.counts()
    return counts.get("SendMessage", 0) + counts.get("SendStreamingMessage", 0)


FORMS = [(), ("stream",)]


@pytest.mark.parametrize("form", FORMS)
def test_a_message_that_is_answered_at_once(site: Site, form: tuple[str, ...]) -> None:
    server = site.server(*form)
    outcome = site.call(site.work(server, "say hi"))
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["parts"] == [{"text": "hi"}]
    assert (sends(server), server.counts()[CARD]) == (1, 1)
    assert "GetTask" not in server.counts()


def test_headers_of_the_document_do_not_double_ours(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_KEY", "mine")
    server = site.server()
    headers = {"a2a-version": {"env": "A2A_KEY"}, "X-More": {"env": "A2A_KEY"}}
    assert site.call(site.work(server, "say hi", definition={"headers": headers})).status == "succeeded"
    (sent,) = server.requests("SendMessage")
    assert (sent["headers"]["a2a-version"], sent["headers"]["x-more"]) == ("1.0", "mine")


NUMBERS = {
    "id": 9007199254740993,
    "count": 42,
    "one": 1.0,
    "half": 0.5,
    "long": 2**70,
    "list": [7, {"deep": -3}],
    "t": True,
}
PARTS = [{"text": "x"}, {"data": NUMBERS}]


def test_numbers_are_those_that_the_agent_has_said(site: Site) -> None:
    """Not what one kind of float makes of them: long ids stay, and 42 equals 42."""
    message = {"messageId": "r", "role": "ROLE_AGENT", "parts": PARTS}
    server = site.server(SendMessage=[f"result:{json.dumps({'message': message})}"])
    outcome = site.call(site.work(server))
    assert outcome.status == "succeeded", outcome.error
    assert canonical(outcome.result["parts"]) == canonical(PARTS)


def test_a_letter_of_a_streamed_text_ends_no_line(site: Site) -> None:
    """Line and paragraph separators may stand in JSON as they are."""
    text = "one\u2028two\u2029three\u0085four\u00e9\u20ac"
    message = {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": text}, {"data": {"n": 42}}]}
    server = site.server("stream", SendStreamingMessage=[f"event:{json.dumps({'message': message})}"])
    outcome = site.call(site.work(server))
    assert outcome.status == "succeeded", outcome.error
    assert canonical(outcome.result["parts"]) == canonical(message["parts"])


def test_also_in_the_artifacts_of_a_task(site: Site) -> None:
    task = {"id": "t-1", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
    done = {**task, "status": {"state": "TASK_STATE_COMPLETED"}, "artifacts": [{"artifactId": "a", "parts": PARTS}]}
    plan = {"SendMessage": [f"result:{json.dumps({'task': task})}"], "GetTask": [f"result:{json.dumps(done)}"]}
    outcome = site.call(site.work(site.server(**plan)))
    assert outcome.status == "succeeded", outcome.error
    assert canonical(outcome.result["artifacts"][0]["parts"]) == canonical(PARTS)
    plan = {"SendMessage": [f"result:{json.dumps({'task': done})}"]}
    outcome = site.call(site.work(site.server(**plan)))
    assert canonical(outcome.result["artifacts"][0]["parts"]) == canonical(PARTS)


@pytest.mark.parametrize(
    ("told", "shown"), [(None, 42), ({"n": 42.0}, 42.0), ({"n": 43}, 42), ({"n": True}, 42), ([42], 42)]
)
def test_a_number_whose_words_are_lost_is_a_whole_one(told: Any, shown: Any) -> None:
    assert canonical(_exact({"n": 42.0}, told)) == canonical({"n": shown})
    assert canonical(_exact([2.0**60, 0.5, "x", None], None)) == canonical([2.0**60, 0.5, "x", None])


@pytest.mark.parametrize("form", FORMS)
def test_a_task_that_is_completed(site: Site, form: tuple[str, ...]) -> None:
    server = site.server(*form)
    (server.folder / "hold").touch()
    asked = "GetTask" if not form else "SendStreamingMessage"

    def release() -> None:
        wait_until(lambda: asked in server.counts(), "the task is observed")
        (server.folder / "hold").unlink()

    thread = threading.Thread(target=release)
    thread.start()
    outcome = site.call(site.work(server))
    thread.join()
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["status"]["state"] == "TASK_STATE_COMPLETED"
    assert outcome.result["artifacts"][0]["parts"] == [{"text": "done: hello"}]
    assert sends(server) == 1
    assert server.counts().get("GetTask", 0) >= 1
    # The name of the remote task was durable before anything was asked about it.
    assert [note.status for note in site.told] == ["submitting", "polling"]
    assert json.loads(site.told[0].state_json)["remoteTaskId"] is None
    assert json.loads(site.told[1].state_json)["remoteTaskId"] == outcome.result["id"]
    status, state = state_of(outcome)
    assert (status, state["remoteTaskId"], state["submissionAmbiguous"]) == ("succeeded", outcome.result["id"], False)
    assert (state["messageId"], state["peer"], state["task"]["status"]["state"]) == (
        "m-1",
        "worker",
        "TASK_STATE_COMPLETED",
    )
    (message,) = [item for item in server.requests() if item["method"].startswith("Send")]
    assert message["params"]["message"]["messageId"] == "m-1"
    assert message["headers"]["a2a-version"] == "1.0"


ENDS = [("fail", "a2a_task_failed"), ("reject", "a2a_task_rejected")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("message", "code"), ENDS)
def test_a_task_that_ends_badly_is_a_failure(site: Site, form: tuple[str, ...], message: str, code: str) -> None:
    server = site.server(*form)
    outcome = site.call(site.work(server, message))
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", code)
    assert state_of(outcome)[0] == "failed"
    assert sends(server) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_task_that_wants_more_input(site: Site, form: tuple[str, ...]) -> None:
    outcome = site.call(site.work(site.server(*form), "ask"))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "a2a_input_required")
    assert state_of(outcome)[1]["remoteTaskId"]


def _interface(origin: str | None = None, binding: str = "JSONRPC", version: str = "1.0") -> dict[str, Any]:
    """An interface of a card, at the origin of the card itself unless another one is given."""
    return {"url": origin, "protocolBinding": binding, "protocolVersion": version}


UNSENT: list[tuple[str, dict[str, list[str]] | None, list[dict[str, Any]] | None, str]] = [
    ("nobody there", None, None, "a2a_unavailable"),
    ("no card", {CARD: ["status:404"]}, None, "a2a_http_error"),
    ("card garbage", {CARD: ["garbage"]}, None, "a2a_malformed"),
    ("card cut", {CARD: ["cut"]}, None, "a2a_connection_lost"),
    ("card hangs", {CARD: ["hang"]}, None, "a2a_timeout"),
    ("card redirects", {CARD: ["redirect"]}, None, "a2a_http_error"),
    ("card too large", {CARD: ["huge"]}, None, "a2a_malformed"),
    ("other origin", {}, [_interface("http://127.0.0.1:2")], "a2a_card"),
    ("other host", {}, [_interface("http://example.org")], "a2a_card"),
    ("other version", {}, [_interface(version="0.3")], "a2a_card"),
    ("other binding", {}, [_interface(binding="GRPC")], "a2a_card"),
    ("no interface", {}, [], "a2a_card"),
]


@pytest.mark.parametrize(("plan", "interfaces", "code"), [row[1:] for row in UNSENT], ids=[row[0] for row in UNSENT])
def test_what_goes_wrong_before_the_message_is_no_dispatch(
    site: Site, plan: dict[str, list[str]] | None, interfaces: list[dict[str, Any]] | None, code: str
) -> None:
    server = None if plan is None else site.server(**plan)
    if server is not None and interfaces is not None:
        told = [{**one, "url": f"{one['url'] or server.origin}/rpc"} for one in interfaces]
        (server.folder / "card.json").write_text(json.dumps({"supportedInterfaces": told}))
    outcome = site.call(site.work(server, definition={"timeoutSeconds": time_limit()}))
    assert (outcome.status, error_of(outcome)["code"]) == ("not_dispatched", code), outcome.error
    assert site.told == []
    if server is not None:
        assert sends(server) == 0


DEFINITE = [
    ("error", "error:-32602", "a2a_error"),
    ("refused", "status:401", "a2a_http_error"),
    ("too many", "status:429", "a2a_http_error"),
    ("unavailable", "status:503", "a2a_http_error"),
    ("redirect", "redirect", "a2a_http_error"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("behaviour", "code"), [row[1:] for row in DEFINITE], ids=[row[0] for row in DEFINITE])
def test_a_message_that_was_refused(site: Site, form: tuple[str, ...], behaviour: str, code: str) -> None:
    server = site.server(*form, SendMessage=[behaviour], SendStreamingMessage=[behaviour])
    outcome = site.call(site.work(server))
    assert (outcome.status, error_of(outcome)["code"]) == ("failed", code), outcome.error
    assert sends(server) == 1


AMBIGUOUS = [
    ("no answer", "hang", "a2a_timeout"),
    ("carried out, no answer", "late", "a2a_timeout"),
    ("cut", "cut", "a2a_connection_lost"),
    ("dies", "die", "a2a_connection_lost"),
    ("garbage", "garbage", "a2a_malformed"),
    ("too large", "huge", "a2a_malformed"),
    ("gateway", "status:502", "a2a_http_error"),
    ("nothing", "result:{}", "a2a_malformed"),
    ("a task without a name", 'result:{"task": {"status": {"state": "TASK_STATE_WORKING"}}}', "a2a_malformed"),
    (
        "a part that is two things",
        'result:{"message": {"messageId": "r", "role": "ROLE_AGENT", "parts": [{"text": "a", "url": "b"}]}}',
        "a2a_malformed",
    ),
    (
        "a part that is nothing",
        'result:{"message": {"messageId": "r", "role": "ROLE_AGENT", "parts": [{}]}}',
        "a2a_malformed",
    ),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("behaviour", "code"), [row[1:] for row in AMBIGUOUS], ids=[row[0] for row in AMBIGUOUS])
def test_a_submission_whose_fate_is_not_known(site: Site, form: tuple[str, ...], behaviour: str, code: str) -> None:
    server = site.server(*form, SendMessage=[behaviour], SendStreamingMessage=[behaviour])
    outcome = site.call(site.work(server, definition={"timeoutSeconds": time_limit()}))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", code), outcome.error
    assert sends(server) == 1
    status, state = state_of(outcome)
    assert (status, state["submissionAmbiguous"], state["remoteTaskId"]) == ("uncertain", True, None)


POLLS = [
    ("hangs", ["hang"], "a2a_timeout"),
    ("cut", ["cut"], "a2a_connection_lost"),
    ("dies", ["die"], "a2a_connection_lost"),
    ("garbage", ["garbage"], "a2a_malformed"),
    ("refused", ["status:401"], "a2a_http_error"),
    ("error", ["error:-32001"], "a2a_error"),
    ("another task", ['result:{"id": "x", "status": {"state": "TASK_STATE_WORKING"}}'], "a2a_malformed"),
]


@pytest.mark.parametrize(("behaviours", "code"), [row[1:] for row in POLLS], ids=[row[0] for row in POLLS])
def test_a_known_task_that_cannot_be_observed(site: Site, behaviours: list[str], code: str) -> None:
    server = site.server(GetTask=behaviours)
    (server.folder / "hold").touch()
    outcome = site.call(site.work(server, definition={"timeoutSeconds": time_limit()}))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", code), outcome.error
    status, state = state_of(outcome)
    assert (status, state["submissionAmbiguous"]) == ("uncertain", False)
    assert state["remoteTaskId"]
    assert sends(server) == 1


def test_the_limit_of_polls(site: Site) -> None:
    server = site.server()
    (server.folder / "hold").touch()
    outcome = site.call(site.work(server, definition={"maxPolls": 3}))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "a2a_poll_limit")
    assert server.counts()["GetTask"] == 3


def test_the_limit_of_the_whole_call(site: Site) -> None:
    server = site.server()
    (server.folder / "hold").touch()
    outcome = site.call(site.work(server, definition={"maxPolls": 1000}, timeout=1.5))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "a2a_timeout")


def test_a_stream_that_breaks_off_leaves_a_known_task(site: Site) -> None:
    server = site.server("stream")
    (server.folder / "hold").touch()

    def end() -> None:
        wait_until(lambda: len(site.told) == 2, "the task has a name")
        server.stop()

    thread = threading.Thread(target=end)
    thread.start()
    outcome = site.call(site.work(server))
    thread.join()
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "a2a_connection_lost"), outcome.error
    assert state_of(outcome)[1]["remoteTaskId"]


@pytest.mark.parametrize("message", ["elsewhere x", "empty x"])
def test_artifacts_that_are_not_to_be_taken(site: Site, message: str) -> None:
    outcome = site.call(site.work(site.server(), message))
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "a2a_malformed")


@pytest.mark.parametrize("form", FORMS)
def test_a_cancellation_is_told_to_the_agent(site: Site, form: tuple[str, ...]) -> None:
    server = site.server(*form)
    (server.folder / "hold").touch()
    token = Token()

    def cancel() -> None:
        wait_until(lambda: len(site.told) == 2, "the task has a name")
        token.cancel("cancel_requested")

    thread = threading.Thread(target=cancel)
    thread.start()
    outcome = site.call(site.work(server), token)
    thread.join()
    assert (outcome.status, error_of(outcome)["code"]) == ("uncertain", "cancelled")
    assert state_of(outcome)[0] == "cancellation_requested"
    assert server.counts()["CancelTask"] == 1
    assert site.told[-1].status == "cancellation_requested"


def test_a_cancellation_while_the_message_is_on_its_way(site: Site) -> None:
    server = site.server(SendMessage=["hang"])
    token = Token()

    def cancel() -> None:
        wait_until(lambda: sends(server) == 1, "the message arrives")
        token.cancel("cancel_requested")

    thread = threading.Thread(target=cancel)
    thread.start()
    outcome = site.call(site.work(server), token)
    thread.join()
    assert (outcome.status, state_of(outcome)[1]["submissionAmbiguous"]) == ("uncertain", True)
    assert "CancelTask" not in server.counts()


def test_a_secret_header_is_sent_and_kept_nowhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A2A_KEY", "hunter-2")
    server = site.server()
    outcome = site.call(
        site.work(server, "work for hunter-2", definition={"headers": {"Authorization": {"env": "A2A_KEY"}}})
    )
    assert outcome.status == "succeeded", outcome.error
    assert all(item["headers"]["authorization"] == "hunter-2" for item in server.requests())
    assert outcome.result["artifacts"][0]["parts"] == [{"text": "done: for [REDACTED]"}]
    assert "hunter" not in canonical([outcome.result, *(note.state_json for note in site.told), state_of(outcome)[1]])


def test_a_secret_inside_of_bytes_is_kept_nowhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """In base64 it looks another way at each offset, so it is looked for in the bytes themselves."""
    monkeypatch.setenv("A2A_KEY", "hunter-2")
    secret = {"headers": {"Authorization": {"env": "A2A_KEY"}}}
    outcome = site.call(site.work(site.server(), "files hunter-2", definition=secret))
    assert outcome.status == "succeeded", outcome.error
    kept = {item.path: item.data for item in artifacts_of(outcome.result)}
    assert kept["a2a/report/pixels.png"] == b"\x00\x01[REDACTED]\xff"
    assert kept["a2a/report/notes.md"] == b"# [REDACTED]"


REFUSED: list[tuple[str, Callable[[Site], Work], str]] = [
    ("host", lambda site: site.work(None, networkAllowlist=["example.org"]), "policy_denied"),
    ("peer", lambda site: site.work(None, given={"peer": "nope"}), "invalid_input"),
    ("message", lambda site: site.work(None, {"a": 1}), "invalid_input"),
    ("no message", lambda site: site.work(None, ""), "invalid_input"),
    ("message id", lambda site: site.work(None, given={"messageId": None}), "invalid_input"),
]


@pytest.mark.parametrize(("make", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_is_refused_before_there_is_an_effect(site: Site, make: Callable[[Site], Work], code: str) -> None:
    with pytest.raises(TaskFault) as caught:
        prepare(make(site))
    assert caught.value.code == code


def test_a_known_task_is_observed_afterwards(site: Site) -> None:
    server = site.server()
    (server.folder / "hold").touch()
    work = site.work(server, definition={"maxPolls": 2})
    outcome = site.call(work)
    assert outcome.status == "uncertain"
    status, state = state_of(outcome)
    record = {"peer": "worker", "callIdentity": "m-1", "status": status, "state": state}
    definition = work.action["peers"]["worker"]
    look = (record, definition, work.policy, str(site.folder), Token(), time.monotonic)
    result, fault, note = observe(*look)
    assert (result, note.status) == (None, "uncertain")
    assert fault is not None
    assert fault.code == "a2a_poll_limit"
    (server.folder / "hold").unlink()

    def ended() -> bool:
        return observe(*look)[0] is not None

    wait_until(ended, "the task ends")
    result, fault, note = observe(*look)
    assert result is not None
    assert (result["status"]["state"], fault, note.status) == ("TASK_STATE_COMPLETED", None, "succeeded")
    assert sends(server) == 1
