"""Remote calls through the real program: crashes around a call, what is recorded, how a run goes on (12.5, 12.6)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.field_models import NETWORK
from support.peers import PeerServer
from support.rows import rows
from support.scale import short_lease
from support.site import Answer, Site

POLICY = {**NETWORK, "approval": "never"}
FAST = {"AGENTCTL_LEASE_SECONDS": str(short_lease(2)), "AGENTCTL_HEARTBEAT_SECONDS": "0.3"}


class Remote:
    """A site, and the servers of its workflow."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder / "site", **FAST)
        self._folder = folder
        self.peer: PeerServer | None = None

    def mcp(self, idempotency: str, **plan: list[str]) -> Path:
        named = {name.replace("__", "/"): what for name, what in plan.items()}
        self.peer = PeerServer("mcp_server.py", self._folder / "mcp", plan=named)
        return self._write(
            {"mcpServers": {"numbers": {"url": f"{self.peer.origin}/mcp", "timeoutSeconds": 10}}},
            {"kind": "mcp.call", "idempotency": idempotency, "with": {"server": "numbers", "tool": "add"}},
            {"arguments": {"a": 2, "b": 3}},
        )

    def a2a(self, *arguments: str, message: str = "work hello", **peer: Any) -> Path:
        self.peer = PeerServer("a2a_server.py", self._folder / "a2a", *arguments)
        card = f"{self.peer.origin}/.well-known/agent-card.json"
        return self._write(
            {"a2aPeers": {"worker": {"cardUrl": card, "pollIntervalMs": 20, **peer}}},
            {"kind": "a2a.delegate", "with": {"peer": "worker"}},
            {"messageId": "m-1", "message": message},
        )

    def _write(self, peers: dict[str, Any], action: dict[str, Any], given: dict[str, Any]) -> Path:
        return self.site.write(
            "flow.json",
            {
                "apiVersion": "agentctl.dev/v1",
                "kind": "Workflow",
                "metadata": {"name": "remote"},
                "spec": {
                    **peers,
                    "policy": POLICY,
                    "actions": {"ask": action, "note": {"kind": "builtin.assign"}},
                    "tasks": [
                        {"id": "ask", "uses": "action:ask", "with": given},
                        {
                            "id": "after",
                            "uses": "action:note",
                            "needs": ["ask"],
                            "with": {"got": "${{ tasks.ask.output }}"},
                        },
                    ],
                    "outputs": {"got": "${{ tasks.after.output.output.got }}"},
                },
            },
        )

    def inspect(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.site.ask("inspect", run_id).data
        return found

    def sound(self) -> None:
        """`db verify` finds nothing wrong."""
        answer = self.site.ask("db", "verify")
        assert answer.code == 0, (answer.out, answer.err)
        self.site.assert_clean()

    def run_killed(self, file: Path, point: str) -> tuple[Answer, str]:
        """Run with a worker that is killed at a point, once."""
        struck = self.site.folder / "struck"
        answer = self.site.ask("run", file, fault=f"{point}@{struck}")
        assert struck.exists(), self.site.report()
        run_id = self.site.only_run()
        assert run_id is not None
        return answer, run_id


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    made = Remote(tmp_path)
    yield made
    made.site.close()
    if made.peer is not None:
        made.peer.stop()


def error(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.err)["error"]
    return found


def test_an_mcp_call_and_what_is_recorded_of_it(remote: Remote) -> None:
    answer = remote.site.ask("run", remote.mcp("keyed"))
    assert answer.code == 0, answer.err
    assert answer.data["output"]["got"]["structuredContent"] == {"sum": 5}
    seen = remote.inspect(answer.data["runId"])
    (session,) = seen["protocolSessions"]
    assert (session["status"], session["generation"], session["protocol"]) == ("initialized", 1, "mcp")
    assert session["state"]["server"] == {"name": "numbers", "version": "1.0"}
    (call,) = seen["protocolCalls"]
    assert (call["status"], call["callIdentity"], call["peer"]) == ("succeeded", "add", "numbers")
    (effect,) = seen["effects"]
    assert (effect["request"]["effectClass"], effect["request"]["risk"]) == ("network", "medium")
    (sent,) = remote.peer.requests("tools/call")  # type: ignore[union-attr]
    assert sent["headers"]["idempotency-key"] == effect["request"]["id"] == call["effectId"]
    shown = remote.site.ask("effects", "inspect", call["effectId"])
    assert shown.data["protocolCall"] == call
    remote.sound()


@pytest.mark.parametrize(
    "point", ["after_effect_start", "after_call_prepared", "after_call_answered", "after_effect_result"]
)
@pytest.mark.parametrize("idempotency", ["keyed", "at_most_once"])
def test_a_worker_that_dies_around_an_mcp_call(remote: Remote, point: str, idempotency: str) -> None:
    file = remote.mcp(idempotency)
    answer, run_id = remote.run_killed(file, point)
    assert remote.peer is not None
    sent = remote.peer.counts().get("tools/call", 0)
    arrived = point in ("after_call_answered", "after_effect_result")
    seen = remote.inspect(run_id)
    if idempotency == "keyed":
        assert answer.code == 0, answer.err
        assert sent == (2 if arrived else 1)
        keys = {item["headers"]["idempotency-key"] for item in remote.peer.requests("tools/call")}
        assert keys == {seen["effects"][0]["request"]["id"]}
        (session,) = seen["protocolSessions"]
        again = point != "after_effect_start"
        assert (session["status"], session["generation"]) == (("reinitialized", 2) if again else ("initialized", 1))
    else:
        assert answer.code == 3, answer.err
        assert answer.data["reason"] == "uncertain_effect"
        assert sent == (1 if arrived else 0)
        assert [call["status"] for call in seen["protocolCalls"]] == (
            [] if point == "after_effect_start" else ["uncertain"]
        )
        refused = remote.site.ask("effects", "continue-remote", seen["effects"][0]["request"]["id"], "--approved")
        assert (refused.code, error(refused)["code"]) == (5, "conflict")
    remote.sound()


def test_a_changed_tool_is_not_called_again_by_the_next_worker(remote: Remote) -> None:
    answer, run_id = remote.run_killed(remote.mcp("idempotent", tools__call=["change"]), "after_call_answered")
    assert answer.code == 4, answer.err
    (effect,) = remote.inspect(run_id)["effects"]
    assert (effect["status"], effect["error"]["code"]) == ("uncertain", "mcp_tool_changed")
    assert remote.peer is not None
    assert remote.peer.counts()["tools/call"] == 1
    remote.sound()


def test_an_a2a_task_and_what_is_recorded_of_it(remote: Remote) -> None:
    answer = remote.site.ask("run", remote.a2a())
    assert answer.code == 0, answer.err
    assert answer.data["output"]["got"]["status"]["state"] == "TASK_STATE_COMPLETED"
    seen = remote.inspect(answer.data["runId"])
    (call,) = seen["protocolCalls"]
    assert (call["status"], call["callIdentity"], call["protocol"]) == ("succeeded", "m-1", "a2a")
    told = [event["payload"]["status"] for event in seen["audit"] if event["eventType"] == "protocol.call"]
    assert told == ["submitting", "polling", "succeeded"]
    assert seen["effects"][0]["request"]["idempotency"] == "at_most_once"
    remote.sound()


@pytest.mark.parametrize(
    ("point", "sent"), [("after_effect_start", 0), ("after_call_prepared", 0), ("after_call_answered", 1)]
)
def test_a_worker_that_dies_before_the_task_has_a_name(remote: Remote, point: str, sent: int) -> None:
    answer, run_id = remote.run_killed(remote.a2a(), point)
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    assert remote.peer is not None
    assert remote.peer.counts().get("SendMessage", 0) == sent
    seen = remote.inspect(run_id)
    if point == "after_effect_start":
        assert seen["protocolCalls"] == []
    else:
        (call,) = seen["protocolCalls"]
        assert (call["status"], call["state"]["submissionAmbiguous"]) == ("uncertain", True)
    effect = seen["effects"][0]["request"]["id"]
    refused = remote.site.ask("effects", "continue-remote", effect, "--approved")
    assert (refused.code, error(refused)["code"]) == (5, "conflict")
    assert remote.peer.counts().get("SendMessage", 0) == sent
    remote.sound()


@pytest.mark.parametrize("form", [(), ("stream",)])
def test_a_worker_that_dies_after_the_task_has_a_name(remote: Remote, form: tuple[str, ...]) -> None:
    file = remote.a2a(*form, maxPolls=3)
    answer, run_id = remote.run_killed(file, "after_call_stored")
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    (call,) = remote.inspect(run_id)["protocolCalls"]
    assert (call["status"], call["state"]["submissionAmbiguous"]) == ("uncertain", False)
    assert call["state"]["remoteTaskId"]
    remote.sound()
    assert remote.peer is not None

    done = remote.site.ask("effects", "continue-remote", call["effectId"], "--actor", "ann")
    assert done.code == 0, done.err
    assert (done.data["status"], done.data["actor"]) == ("applied", "ann")
    assert done.data["evidence"]["kind"] == "protocol_observation"
    assert done.data["evidence"]["remoteTaskId"] == call["state"]["remoteTaskId"]

    resumed = remote.site.ask("resume", run_id)
    assert resumed.code == 0, resumed.err
    assert resumed.data["output"]["got"]["artifacts"][0]["parts"] == [{"text": "done: hello"}]
    seen = remote.inspect(run_id)
    assert seen["protocolCalls"][0]["status"] == "succeeded"
    assert seen["effects"][0]["status"] == "uncertain"
    counts = remote.peer.counts()
    assert counts.get("SendMessage", 0) + counts.get("SendStreamingMessage", 0) == 1
    again = remote.site.ask("effects", "continue-remote", call["effectId"])
    assert (again.code, error(again)["code"]) == (5, "conflict")
    remote.sound()


FILES = {
    "a2a/report/2-notes.md": b"hello",
    "a2a/report/notes.md": b"# hello",
    "a2a/report/pixels.png": b"\x00\x01hello\xff",
    "a2a/report/report-2.json": b'{"lines":"three"}',
}


def kept(remote: Remote, run_id: str) -> dict[str, bytes]:
    """The artifacts of a run by path, read out of the store."""
    found = {}
    for item in remote.site.ask("artifacts", "list", "--run", run_id).data["references"]:
        target = remote.site.folder / f"export-{len(found)}"
        answer = remote.site.ask("artifacts", "export", item["digest"], target, "--overwrite")
        assert answer.code == 0, answer.err
        found[item["path"]] = target.read_bytes()
    return found


@pytest.mark.parametrize("form", [(), ("stream",)])
def test_what_an_agent_delivers_is_kept(remote: Remote, form: tuple[str, ...]) -> None:
    answer = remote.site.ask("run", remote.a2a(*form, message="files hello"))
    assert answer.code == 0, answer.err
    run_id = answer.data["runId"]
    assert kept(remote, run_id) == FILES
    seen = remote.inspect(run_id)
    assert [item["path"] for item in seen["tasks"][0]["artifactManifest"]] == sorted(FILES)
    assert seen["budget"]["usage"]["artifactBytes"] == sum(map(len, FILES.values()))
    assert answer.data["output"]["got"]["artifacts"][0]["parts"][2] == {"data": {"lines": "three"}}
    remote.sound()


@pytest.mark.parametrize("point", ["after_staging", "after_placing", "after_ingestion"])
def test_a_worker_that_dies_while_an_answer_is_stored(remote: Remote, point: str) -> None:
    """The answer is recorded: it is stored from there, and the agent hears nothing more."""
    answer, run_id = remote.run_killed(remote.a2a(message="files hello"), point)
    assert answer.code == 0, answer.err
    assert kept(remote, run_id) == FILES
    assert remote.peer is not None
    assert remote.peer.counts()["SendMessage"] == 1
    remote.sound()


def test_what_an_observed_task_has_delivered_is_kept(remote: Remote) -> None:
    answer, run_id = remote.run_killed(remote.a2a(message="files hello"), "after_effect_result")
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    assert kept(remote, run_id) == {}
    (call,) = remote.inspect(run_id)["protocolCalls"]
    assert remote.site.ask("effects", "continue-remote", call["effectId"]).code == 0
    assert remote.site.ask("resume", run_id).code == 0
    assert kept(remote, run_id) == FILES
    replayed = remote.site.ask("replay", run_id)
    assert replayed.code == 0, replayed.err
    assert kept(remote, replayed.data["runId"]) == FILES
    remote.sound()


def test_a_result_that_a_person_supplies_may_have_any_form(remote: Remote) -> None:
    answer, run_id = remote.run_killed(remote.a2a(), "after_call_stored")
    assert answer.code == 3, answer.err
    (effect,) = remote.inspect(run_id)["effects"]
    result = remote.site.write("result.json", {"artifacts": [{"parts": "by telephone"}], "said": "it is done"})
    told = ("--status", "applied", "--reason", "x", "--result-file", result)
    assert remote.site.ask("effects", "reconcile", effect["request"]["id"], *told).code == 0
    resumed = remote.site.ask("resume", run_id)
    assert (resumed.code, resumed.data["output"]["got"]["said"]) == (0, "it is done"), resumed.err
    assert kept(remote, run_id) == {}
    remote.sound()


@pytest.mark.parametrize(
    ("where", "code"),
    [("policy", "artifact_too_large"), ("budget", "budget_exceeded"), ("number", "artifact_limit")],
)
def test_an_answer_that_is_larger_than_what_may_be_kept(remote: Remote, where: str, code: str) -> None:
    """The task fails; what the agent has done is recorded as done, and nothing is sent again."""
    file = remote.a2a(message="files hello")
    document = json.loads(file.read_text())
    if where == "policy":
        document["spec"]["policy"]["maxArtifactBytes"] = 8
    elif where == "number":
        parts = [{"text": "x"}] * 10_001
        done = {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"}}
        task = {**done, "artifacts": [{"artifactId": "many", "parts": parts}]}
        assert remote.peer is not None
        remote.peer.plan({"SendMessage": [f"result:{json.dumps({'task': task})}"]})
    else:
        document["spec"]["runtime"] = {"budgets": {"maxArtifactBytes": sum(map(len, FILES.values())) - 1}}
    document["spec"]["tasks"][0]["retry"] = {"maxAttempts": 3}
    file.write_text(json.dumps(document))
    answer = remote.site.ask("run", file)
    assert answer.code == 4, answer.err
    seen = remote.inspect(answer.data["runId"])
    assert seen["tasks"][0]["error"]["code"] == code
    assert [effect["status"] for effect in seen["effects"]] == ["succeeded"]
    assert kept(remote, answer.data["runId"]) == {}
    assert remote.peer is not None
    assert remote.peer.counts()["SendMessage"] == 1
    assert seen["budget"]["reserved"].get("artifactBytes", 0) == 0
    remote.sound()


def test_an_observed_answer_that_cannot_be_kept_is_not_reused(remote: Remote) -> None:
    """Its task has failed for good reason: a retry does not take the answer over without its artifacts."""
    file = remote.a2a(message="files hello")
    document = json.loads(file.read_text())
    document["spec"]["policy"]["maxArtifactBytes"] = 8
    file.write_text(json.dumps(document))
    answer, run_id = remote.run_killed(file, "after_call_stored")
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    (call,) = remote.inspect(run_id)["protocolCalls"]
    assert remote.site.ask("effects", "continue-remote", call["effectId"]).code == 0
    assert remote.site.ask("resume", run_id).code == 4
    assert remote.inspect(run_id)["tasks"][0]["error"]["code"] == "artifact_too_large"
    plan = remote.site.ask("retry", file, run_id, "--failed", "--plan")
    assert (plan.code, plan.data["reusedTasks"]) == (3, []), plan.out
    assert [block["taskId"] for block in plan.data["blockedReuse"]] == ["ask"]
    assert remote.peer is not None
    assert remote.peer.counts()["SendMessage"] == 1
    remote.sound()


def test_continuing_needs_a_task_that_has_ended_well(remote: Remote) -> None:
    file = remote.a2a(maxPolls=2, timeoutSeconds=5)
    assert remote.peer is not None
    (remote.peer.folder / "hold").touch()
    answer = remote.site.ask("run", file)
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    (call,) = remote.inspect(answer.data["runId"])["protocolCalls"]
    early = remote.site.ask("effects", "continue-remote", call["effectId"])
    assert early.code == 3, early.err
    assert "2 polls" in error(early)["message"]
    remote.peer.stop()
    gone = remote.site.ask("effects", "continue-remote", call["effectId"])
    assert gone.code == 6, gone.err
    assert rows(remote.site.store, "SELECT COUNT(*) FROM effect_reconciliations") == [(0,)]
    remote.sound()


def test_the_policy_has_a_say_in_continuing(remote: Remote) -> None:
    file = remote.a2a(maxPolls=1)
    document = json.loads(file.read_text())
    document["spec"]["policy"] = {**POLICY, "approval": "high_risk"}
    file.write_text(json.dumps(document))
    assert remote.peer is not None
    (remote.peer.folder / "hold").touch()
    asked = remote.site.ask("run", file)
    assert (asked.code, asked.data["reason"]) == (3, "approval_required")
    run_id = asked.data["runId"]
    (approval,) = remote.site.ask("approvals", "list", run_id).data["approvals"]
    remote.site.ask("approvals", "approve", approval["approvalId"], "--reason", "x")
    assert remote.site.ask("resume", run_id).code == 3
    (call,) = remote.inspect(run_id)["protocolCalls"]
    (remote.peer.folder / "hold").unlink()
    before = remote.peer.counts()["GetTask"]
    refused = remote.site.ask("effects", "continue-remote", call["effectId"])
    assert refused.code == 3
    assert "--approved" in refused.err
    assert remote.peer.counts()["GetTask"] == before
    remote.sound()


def test_records_go_with_their_run(remote: Remote) -> None:
    answer = remote.site.ask("run", remote.a2a())
    assert answer.code == 0, answer.err
    backup = remote.site.folder / "backup"
    assert remote.site.ask("db", "backup", backup).code == 0
    removed = remote.site.ask("gc", "--older-than-days", "0")
    assert removed.code == 0, removed.err
    assert rows(remote.site.store, "SELECT COUNT(*) FROM protocol_calls") == [(0,)]
    assert rows(remote.site.store, "SELECT COUNT(*) FROM protocol_sessions") == [(0,)]


def test_nothing_exists_when_a_server_is_out_of_reach_of_the_policy(remote: Remote) -> None:
    file = remote.mcp("unknown")
    document = json.loads(file.read_text())
    document["spec"]["policy"] = {"approval": "never"}
    file.write_text(json.dumps(document))
    answer = remote.site.ask("run", file)
    assert answer.code == 3, answer.err
    assert not remote.site.database.exists()
    assert remote.peer is not None
    assert remote.peer.requests() == []


def test_a_damaged_record_is_found(remote: Remote) -> None:
    answer = remote.site.ask("run", remote.mcp("unknown"))
    assert answer.code == 0, answer.err
    remote.site.store.database.connection.execute("UPDATE protocol_calls SET status = 'failed'")
    found = remote.site.ask("db", "verify")
    assert found.code != 0
    assert "protocol call" in found.out + found.err
