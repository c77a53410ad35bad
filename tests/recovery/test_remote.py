"""Runs that talk to MCP servers, A2A agents and extensions: what is derived from them, and what undoes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.agents import asked, document, shell_tool, write_script
from support.children import wait_until
from support.field_models import NETWORK
from support.peers import PeerServer
from support.recovery import Place, rules

SH = {"kind": "builtin.shell.exec", "command": "sh"}
SAY = {"note": {"kind": "builtin.assign"}, "check": {"kind": "builtin.assert"}}


class Peers:
    """A place, and the servers of its workflows."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place = place
        self.mcp = PeerServer("mcp_server.py", folder / "mcp")
        self.a2a = PeerServer("a2a_server.py", folder / "a2a")

    def stop(self) -> None:
        self.mcp.stop()
        self.a2a.stop()

    def spec(self, *, secret: bool = False, **policy: Any) -> dict[str, Any]:
        """Policy, servers and actions that all workflows of these tests have; with `secret` the server wants one."""
        rules = {
            **NETWORK,
            "approval": "never",
            "processAllowlist": ["sh", Path(sys.executable).name],
            "environmentAllowlist": ["MCP_KEY"],
            "writableRoots": ["out"],
            **policy,
        }
        headers = {"headers": {"authorization": {"env": "MCP_KEY"}}} if secret else {}
        card = f"{self.a2a.origin}/.well-known/agent-card.json"
        return {
            "policy": rules,
            "mcpServers": {"numbers": {"url": f"{self.mcp.origin}/mcp", "timeoutSeconds": 10, **headers}},
            "a2aPeers": {"worker": {"cardUrl": card, "pollIntervalMs": 20, "maxPolls": 200}},
            "actions": {
                "sum": {
                    "kind": "mcp.call",
                    "idempotency": "at_most_once",
                    "with": {"server": "numbers", "tool": "add"},
                },
                "ask": {"kind": "a2a.delegate", "with": {"peer": "worker"}},
                "double": self.extension(),
                "sh": SH,
                **SAY,
            },
        }

    def extension(self) -> dict[str, Any]:
        """An extension that writes down what it doubles."""
        contract = {
            "protocolVersion": "agentctl.dev/process-extension/v1",
            "inputSchema": {
                "type": "object",
                "properties": {"n": {"type": "integer"}},
                "required": ["n"],
                "additionalProperties": False,
            },
            "outputSchema": {"type": "object", "properties": {"double": {"type": "integer"}}, "required": ["double"]},
            "capabilities": ["arithmetic"],
        }
        program = f"""\
import json, sys
if sys.argv[-1] == "--agentctl-handshake":
    print({json.dumps(json.dumps({"name": "double", **contract}))})
else:
    call = json.load(sys.stdin)
    with open({str(self.place.root / "doubled")!r}, "a") as ledger:
        ledger.write("%d\\n" % call["input"]["n"])
    output = {{"double": 2 * call["input"]["n"]}}
    print(json.dumps({{"protocolVersion": call["protocolVersion"], "effectId": call["effectId"], "output": output}}))
"""
        self.place.text("double.py", program)
        head = {"kind": "extension.process", "command": sys.executable, "idempotency": "at_most_once"}
        return {**head, "args": [str(self.place.folder / "double.py")], **contract}

    def doubled(self) -> list[int]:
        """What the extension was really asked."""
        path = self.place.root / "doubled"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def write(self, tasks: list[dict[str, Any]], spec: Mapping[str, Any], name: str = "flow.json", **more: Any) -> str:
        head = {"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "remote"}}
        self.place.text(name, json.dumps({**head, "spec": {**spec, "tasks": tasks, **more}}))
        return name

    def counts(self) -> tuple[int, int]:
        """(calls of tools, messages) that have arrived."""
        return self.mcp.counts().get("tools/call", 0), self.a2a.counts().get("SendMessage", 0)


@pytest.fixture
def peers(place: Place, tmp_path: Path) -> Iterator[Peers]:
    made = Peers(place, tmp_path / "peers")
    try:
        yield made
    finally:
        made.stop()


def message(text: str, number: int = 1) -> dict[str, Any]:
    return {"messageId": f"m-{number}", "message": text}


# -- a remote task that was completed after its run had ended ----------------------------------------------------------


def unfinished(peers: Peers, how: str) -> tuple[str, str, str]:
    """A run that has ended while its remote task was at work: (file, run, effect)."""
    place = peers.place
    spec = peers.spec()
    spec["a2aPeers"]["worker"]["maxPolls"] = 2
    wait = "while ! test -e go; do sleep 0.05; done; test -e fine"
    tasks = [
        {"id": "ask", "uses": "action:ask", "with": message("work hello")},
        {"id": "beside", "uses": "action:sh", "with": {"args": ["-c", wait]}},
        {"id": "after", "uses": "action:note", "needs": ["ask"], "with": {"got": "${{ tasks.ask.output.artifacts }}"}},
    ]
    if how == "cancelled":
        del tasks[1]
    elif how == "alone":
        del tasks[1:]
    file = peers.write(tasks, spec)
    (peers.a2a.folder / "hold").touch()
    started = place.start("run", file, "--output", "json")
    state = "SELECT state FROM tasks WHERE task_id = 'ask'"
    parked = [("waiting_for_effect",)]
    wait_until(lambda: place.rows(state) == parked, "the remote task outlives the patience of the run")
    source = str(place.scalar("SELECT run_id FROM runs"))
    if how == "failed":
        place.text("go", "")
        assert started.wait().code == 4
    else:
        assert place.json("cancel", source).code == 0
        started.wait()
    assert place.scalar(state) == ("failed" if how == "failed" else "cancelled")
    return file, source, str(place.scalar("SELECT effect_id FROM effects WHERE task_id = 'ask'"))


def complete(peers: Peers, effect: str) -> None:
    """Let the agent end its task, and the run know of it."""
    (peers.a2a.folder / "hold").unlink()
    wait_until(lambda: peers.place.json("effects", "continue-remote", effect).code == 0, "the remote task is completed")


@pytest.mark.parametrize("how", ["failed", "cancelled", "alone"])
def test_a_remote_task_that_was_completed_afterwards_is_reused(peers: Peers, how: str) -> None:
    place = peers.place
    file, source, effect = unfinished(peers, how)
    early = place.plan("retry", file, source, "--failed", compatible=False)
    assert rules(early) == {"ask": "unreconciled_effect"}
    complete(peers, effect)
    plan = place.plan("retry", file, source, "--failed")
    assert plan["reusedTasks"] == ["ask"]
    assert plan["rerunTasks"] == {"failed": ["beside", "after"], "cancelled": ["after"], "alone": []}[how]
    [verdict] = [item for item in plan["tasks"] if item["taskId"] == "ask"]
    assert (verdict["disposition"], verdict["sourceState"]) == ("reuse", "failed" if how == "failed" else "cancelled")
    assert "remote task" in verdict["reason"]
    blocked = place.plan("retry", file, source, "--from", "ask", compatible=False)
    assert rules(blocked)["ask"] == "unreconciled_effect"

    for name in ("go", "fine"):
        place.text(name, "")
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["state"] == "succeeded"
    assert peers.counts() == (0, 1)
    record = place.record(outcome["runId"])
    kept = {task["taskId"]: task for task in record["tasks"]}["ask"]
    assert (kept["state"], kept["disposition"], kept["attempt"], kept["error"]) == ("succeeded", "reused", 0, None)
    assert kept["output"]["artifacts"][0]["parts"] == [{"text": "done: hello"}]
    assert (kept["sourceRunId"], kept["sourceTaskId"], kept["sourceAttempt"]) == (source, "ask", 1)
    assert kept["reuseDecision"]["checks"][0] == "continued_protocol_effect_applied"
    assert kept["reuseDecision"]["recoveredEffectId"] == effect
    assert record["protocolCalls"] == record["protocolSessions"] == []
    assert "ask" not in {item["request"]["taskId"] for item in record["effects"]}
    if how != "failed":
        return
    # Once more from the derived run, and a replay of it: the agent is asked nothing any more.
    peers.stop()
    again = place.derive("repair", file, outcome["runId"], "--from", "after", "--restart-successful")
    assert again["reusedTasks"] == ["ask", "beside"]
    replay = place.json("replay", again["runId"])
    assert (replay.code, replay.data["output"]) == (0, again["output"])
    place.assert_sound()


def test_a_forged_result_of_a_remote_task_is_found(peers: Peers) -> None:
    place = peers.place
    file, source, effect = unfinished(peers, "cancelled")
    complete(peers, effect)
    place.assert_sound()
    sql = "UPDATE effect_reconciliations SET result_json = ? WHERE effect_id = ?"
    place.forge(sql, '{"status":{"state":"TASK_STATE_COMPLETED"}}', effect)
    plan = place.plan("retry", file, source, "--failed", compatible=False)
    assert rules(plan)["ask"] == "output_digest_mismatch"
    verified = place.json("db", "verify")
    assert verified.code != 0
    assert "another result of effect" in verified.out
    place.forge("UPDATE effect_reconciliations SET status = 'not_applied' WHERE effect_id = ?", effect)
    assert "another conclusion about effect" in place.json("db", "verify").out


# -- retry, repair, fork and replay ------------------------------------------------------------------------------------


CALLS: list[dict[str, Any]] = [
    {"id": "sum", "uses": "action:sum", "with": {"arguments": {"a": 2, "b": 3}}},
    {"id": "ask", "uses": "action:ask", "with": message("work hello")},
    {"id": "double", "uses": "action:double", "with": {"n": 4}},
]


def test_a_replay_of_remote_calls_makes_no_connection(peers: Peers) -> None:
    place = peers.place
    place.environment["MCP_KEY"] = "key-of-the-server"
    gate = {"id": "end", "uses": "action:sh", "needs": ["sum", "ask", "double"], "with": {"args": ["-c", "test -e ok"]}}
    file = peers.write([*CALLS, gate], peers.spec(secret=True))
    source = place.go(file, code=4)
    assert (peers.counts(), peers.doubled()) == ((1, 1), [4])
    peers.stop()
    # Only what is executed has to be there: the server that wants a secret is not asked again.
    del place.environment["MCP_KEY"]
    place.text("ok", "")
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["reusedTasks"] == ["sum", "ask", "double"]
    assert place.record(outcome["runId"])["protocolCalls"] == []
    for command in (
        ("repair", file, source, "--from", "sum", "--restart-successful"),
        ("fork", source),
    ):
        runs = place.scalar("SELECT COUNT(*) FROM runs")
        refused = place.json(*command)
        assert place.scalar("SELECT COUNT(*) FROM runs") == runs
        # The call has happened, and may not be repeated; a fork repeats everything, and needs the secret.
        assert (refused.code, refused.error["code"]) == (
            (3, "blocked") if command[0] == "repair" else (6, "environment")
        )

    for name in ("double.py", file):
        (place.folder / name).unlink()
    replay = place.json("replay", source)
    assert replay.code == 4
    run_id = replay.data["runId"]
    old, record = place.record(source), place.record(run_id)
    assert record["effects"] == []
    known = {call["effectId"]: call for call in old["protocolCalls"]}
    assert len(known) == 2
    for call in record["protocolCalls"]:
        mark, of, effect = call["effectId"].split(":")
        assert (mark, of, call["status"]) == ("recorded", run_id, "recorded")
        assert (call["state"], call["callIdentity"]) == (known[effect]["state"], known[effect]["callIdentity"])
    assert [item["status"] for item in record["protocolSessions"]] == ["recorded"]
    assert [task["output"] for task in record["tasks"]] == [task["output"] for task in old["tasks"]]
    assert place("inspect", run_id).code == 0
    again = place.json("replay", run_id)
    copied = place.record(again.data["runId"])["protocolCalls"]
    assert {item["effectId"] for item in copied} == {f"recorded:{again.data['runId']}:{effect}" for effect in known}
    refused = place.json("effects", "continue-remote", record["protocolCalls"][0]["effectId"])
    assert refused.code == 5
    assert peers.doubled() == [4]
    place.assert_sound()


# -- compensation ------------------------------------------------------------------------------------------------------


def undoing(peers: Peers, **more: Any) -> list[dict[str, Any]]:
    """Three commands that are undone by a tool, an agent and an extension; then the end, which fails."""
    touch = {"args": ["-c", "echo x >> ../done"]}
    undone_by: list[tuple[str, str, dict[str, Any]]] = [
        ("first", "sum", {"arguments": {"a": 1, "b": 1}}),
        ("second", "ask", message("say undone ${{ tasks.first.output.exitCode }}", 7)),
        ("third", "double", {"n": 6}),
    ]
    tasks: list[dict[str, Any]] = [
        {
            "id": name,
            "uses": "action:sh",
            "needs": [] if number == 0 else [undone_by[number - 1][0]],
            "with": touch,
            "compensate": {"uses": f"action:{action}", "with": given},
        }
        for number, (name, action, given) in enumerate(undone_by)
    ]
    return [*tasks, {"id": "end", "uses": "action:check", "needs": ["third"], "with": {"that": False}}]


def test_remote_inverse_actions_undo_in_reverse_order_and_once(peers: Peers) -> None:
    place = peers.place
    place.environment["MCP_KEY"] = "key-of-the-server"
    file = peers.write(undoing(peers), peers.spec(secret=True, approval="never"))
    source = place.go(file, code=4)
    # What an inverse needs is looked at before there is a compensation run, for those that are chosen.
    del place.environment["MCP_KEY"]
    runs = place.scalar("SELECT COUNT(*) FROM runs")
    refused = place.json("compensate", source)
    assert (refused.code, refused.error["code"]) == (6, "environment")
    assert "MCP_KEY" in refused.error["message"]
    assert place.json("compensate", source, "--plan").code == 0
    assert place.scalar("SELECT COUNT(*) FROM runs") == runs
    some = place.json("compensate", source, "--task", "second", "--task", "third")
    assert (some.code, some.data["compensatedTasks"]) == (0, ["third", "second"])
    assert (peers.counts(), peers.doubled()) == ((0, 1), [6])
    [sent] = peers.a2a.requests("SendMessage")
    assert "undone 0" in json.dumps(sent)

    place.environment["MCP_KEY"] = "key-of-the-server"
    done = place.json("compensate", source)
    assert (done.code, done.data["compensatedTasks"]) == (0, ["first"])
    assert (peers.counts(), peers.doubled()) == ((1, 1), [6])
    [call] = place.record(done.data["runId"])["protocolCalls"]
    assert (call["protocol"], call["status"]) == ("mcp", "succeeded")
    again = place.json("compensate", source)
    assert (again.code, again.data["runId"]) == (0, None)
    plan = place.json("compensate", source, "--plan").data
    assert (plan["tasks"], len(plan["alreadyCompensatedEffects"])) == ([], 3)
    # What was undone cannot be reused.
    blocked = place.plan("repair", file, source, "--from", "end", compatible=False)
    assert set(rules(blocked).values()) == {"unresolved_reused_effect"}
    # A replay of the compensation is none: it calls nobody.
    replay = place.json("replay", done.data["runId"])
    assert (replay.code, peers.counts()) == (0, (1, 1))
    place.assert_sound()


def test_an_uncertain_remote_inverse_is_continued_and_counts(peers: Peers) -> None:
    place = peers.place
    spec = peers.spec()
    spec["a2aPeers"]["worker"]["maxPolls"] = 2
    tasks = [
        {"id": "do", "uses": "action:sh", "with": {"args": ["-c", "true"]},
         "compensate": {"uses": "action:ask", "with": message("work undo")}},
        {"id": "end", "uses": "action:check", "needs": ["do"], "with": {"that": False}},
    ]  # fmt: skip
    source = place.go(peers.write(tasks, spec), code=4)
    (peers.a2a.folder / "hold").touch()
    asked_for = place.json("compensate", source)
    assert (asked_for.code, asked_for.data["reason"]) == (3, "uncertain_effect")
    effect = str(place.scalar("SELECT effect_id FROM effects WHERE operation = 'a2a.delegate'"))
    complete(peers, effect)
    resumed = place.json("resume", asked_for.data["runId"])
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded")
    assert place.json("compensate", source, "--plan").data["tasks"] == []
    assert peers.counts() == (0, 1)
    place.assert_sound()


def test_an_agent_is_undone_by_what_its_task_declares(peers: Peers) -> None:
    """What its tools have changed is what is undone; what the model was asked is not an effect to undo."""
    place = peers.place
    calls = [{"name": "append", "input": {"args": ["-c", f"echo {n} >> ../did"]}} for n in (1, 2)]
    write_script(place.folder, [{"toolCalls": calls}, {"json": {"undo": 5}}])
    answer = {"type": "object", "required": ["undo"], "properties": {"undo": {"type": "integer"}}}
    tasks: list[dict[str, Any]] = [
        {
            "id": "change",
            "uses": "agent:helper",
            "with": {"prompt": "go"},
            "compensate": {"uses": "action:double", "with": {"n": "${{ tasks.change.output.undo }}"}},
        },
        {"id": "end", "uses": "action:check", "needs": ["change"], "with": {"that": False}},
    ]
    spec = peers.spec()
    spec["actions"]["append"] = {**SH, "idempotency": "at_most_once"}
    tools = {"append": shell_tool("append", "at_most_once")}
    value = document(tasks, tools=tools, agent={"structuredOutput": answer}, **spec)
    place.text("flow.json", json.dumps(value))
    source = place.go("flow.json", code=4)
    assert (place.root / "did").read_text() == "1\n2\n"
    [planned] = place.json("compensate", source, "--plan").data["tasks"]
    kinds = [
        place.scalar("SELECT operation FROM effects WHERE effect_id = ?", name) for name in planned["sourceEffectIds"]
    ]
    assert kinds == ["tool.append", "tool.append"]
    done = place.json("compensate", source)
    assert (done.code, done.data["compensatedTasks"]) == (0, ["change"])
    assert peers.doubled() == [5]
    assert asked(place.folder) == {1: 1, 2: 1}
    assert len(place.json("compensate", source, "--plan").data["alreadyCompensatedEffects"]) == 2
    blocked = place.plan("retry", "flow.json", source, "--failed", compatible=False)
    assert rules(blocked) == {"change": "unresolved_reused_effect"}
    place.assert_sound()


def test_a_retry_is_undone_where_each_thing_was_done(peers: Peers) -> None:
    """Reused tasks have no effects of their own: the plan says whose they are, and that run undoes them."""
    place = peers.place
    tasks = undoing(peers)[:3]
    tasks.append({"id": "gate", "uses": "action:sh", "needs": ["second"], "with": {"args": ["-c", "test -e ok"]}})
    tasks[2] = {**tasks[2], "needs": ["gate"]}
    file = peers.write(tasks, peers.spec())
    source = place.go(file, code=4)
    place.text("ok", "")
    retried = place.derive("retry", file, source, "--failed")["runId"]
    plan = place.json("compensate", retried, "--plan").data
    assert [item["sourceTaskId"] for item in plan["tasks"]] == ["third"]
    sql = "SELECT effect_id FROM effects WHERE run_id = ? AND task_id = ?"
    theirs = [
        {"taskId": name, "runId": source, "sourceEffectIds": [place.scalar(sql, source, name)]}
        for name in ("first", "second")
    ]
    assert plan["elsewhere"] == theirs
    alone = place("compensate", retried, "--task", "first")
    assert alone.code == 0
    assert "nothing was undone" in alone.out
    assert f"`agentctl compensate {source} --task first`" in alone.out
    done = place.json("compensate", retried)
    assert (done.code, done.data["compensatedTasks"], peers.doubled()) == (0, ["third"], [6])
    assert (done.data["elsewhere"], peers.counts()) == (theirs, (0, 0))

    # A retry of the retry goes back to the same effects; what was undone there is told no more.
    again = place.derive("repair", file, retried, "--from", "third", "--restart-successful", code=0)["runId"]
    assert place.json("compensate", again, "--plan").data["elsewhere"] == theirs
    rest = place.json("compensate", source)
    assert (rest.code, rest.data["compensatedTasks"], peers.counts()) == (0, ["second", "first"], (1, 1))
    assert place.json("compensate", retried, "--plan").data["elsewhere"] == []
    assert place("compensate", retried).out.strip().endswith("there is nothing to undo")
    # And what was undone is reused by nobody.
    blocked = place.plan("repair", file, again, "--from", "third", "--restart-successful", compatible=False)
    assert rules(blocked)["first"] == "unresolved_reused_effect"
    place.assert_sound()


# -- tools of a model that are remote ----------------------------------------------------------------------------------


TOOLS: dict[str, dict[str, Any]] = {
    "sum": {
        "kind": "action", "action": "sum", "description": "Add two numbers.",
        "inputSchema": {
            "type": "object", "additionalProperties": False, "required": ["arguments"],
            "properties": {
                "arguments": {
                    "type": "object", "additionalProperties": False, "required": ["a", "b"],
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                }
            },
        },
        "outputSchema": {"type": "object", "required": ["structuredContent"]}, "capability": "mcp.call",
        "risk": "medium", "effectClass": "network", "idempotency": "at_most_once", "retrySafe": False,
        "timeoutSeconds": 20,
    },
    "double": {
        "kind": "action", "action": "double", "description": "Double a number.",
        "inputSchema": {
            "type": "object", "additionalProperties": False, "required": ["n"],
            "properties": {"n": {"type": "integer"}},
        },
        "outputSchema": {"type": "object", "required": ["double"]}, "capability": "extension.process",
        "risk": "high", "effectClass": "process_execution", "idempotency": "at_most_once", "retrySafe": False,
        "timeoutSeconds": 20, "approval": "always",
    },
}  # fmt: skip


def test_a_model_calls_a_server_and_an_extension_with_an_approval_in_between(peers: Peers) -> None:
    place = peers.place
    calls = [
        {"name": "sum", "input": {"arguments": {"a": 2, "b": 3}}},
        {"name": "double", "input": {"n": 21}},
    ]
    write_script(place.folder, [{"toolCalls": calls}, {"text": "42"}])
    task = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "go"}}
    value = document([task], tools=TOOLS, **peers.spec())
    place.text("flow.json", json.dumps(value))
    paused = place.json("run", "flow.json")
    assert (paused.code, paused.data["reason"]) == (3, "approval_required"), paused.out
    assert (peers.counts(), peers.doubled()) == ((1, 0), [])
    [approval] = place.json("approvals", "list").data["approvals"]
    assert (approval["tool"], approval["agent"], approval["risk"]) == ("double", "helper", "high")
    assert approval["redactedInput"]["input"] == {"n": 21}
    assert place.json("approvals", "approve", approval["approvalId"]).code == 0
    done = place.json("resume", paused.data["runId"])
    assert (done.code, done.data["output"]["ask"]["text"]) == (0, "42")
    assert (peers.counts(), peers.doubled()) == ((1, 0), [21])
    assert asked(place.folder) == {1: 1, 2: 1}
    record = place.record(paused.data["runId"])
    operations = ["model", "tool.sum", "tool.double", "model"]
    assert [effect["request"]["operation"] for effect in record["effects"]] == operations
    [call] = record["protocolCalls"]
    assert (call["effectId"], call["status"]) == (record["effects"][1]["request"]["id"], "succeeded")
    assert record["effects"][1]["result"]["structuredContent"] == {"sum": 5}
    assert record["effects"][2]["result"] == {"double": 42}
    assert [call["status"] for call in record["toolCalls"]] == ["succeeded", "succeeded"]
    peers.stop()
    replay = place.json("replay", paused.data["runId"])
    assert (replay.code, replay.data["output"]) == (0, done.data["output"])
    copied = place.record(replay.data["runId"])
    assert [(item["status"], item["callIdentity"]) for item in copied["protocolCalls"]] == [("recorded", "add")]
    assert copied["effects"] == copied["toolCalls"] == []
    place.assert_sound()


DELEGATE: dict[str, Any] = {
    "kind": "action", "action": "ask", "description": "Let another agent do it.",
    "inputSchema": {
        "type": "object", "additionalProperties": False, "required": ["messageId", "message"],
        "properties": {"messageId": {"type": "string"}, "message": {"type": "string"}},
    },
    "outputSchema": {"type": "object", "required": ["artifacts"]}, "capability": "a2a.delegate", "risk": "high",
    "effectClass": "remote_agent", "idempotency": "at_most_once", "retrySafe": False, "timeoutSeconds": 20,
}  # fmt: skip


@pytest.mark.parametrize("ends", [False, True])
def test_a_model_delegates_and_the_answer_comes_late(peers: Peers, ends: bool) -> None:
    """The conversation goes on with it. After the end of the run there is none that could, and it is not sent again."""
    place = peers.place
    write_script(place.folder, [{"toolCalls": [{"name": "delegate", "input": message("work hello")}]}, {"text": "ok"}])
    spec = peers.spec()
    spec["a2aPeers"]["worker"]["maxPolls"] = 2
    task = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "go"}}
    value = document([task], tools={"delegate": DELEGATE}, **spec)
    place.text("flow.json", json.dumps(value))
    (peers.a2a.folder / "hold").touch()
    paused = place.json("run", "flow.json")
    assert (paused.code, paused.data["reason"]) == (3, "uncertain_effect"), paused.out
    effect = str(place.scalar("SELECT effect_id FROM effects WHERE operation = 'tool.delegate'"))
    remote = str(place.scalar("SELECT json_extract(state_json, '$.remoteTaskId') FROM protocol_calls"))
    for shown in (place("status", paused.data["runId"]).out, place("resume", paused.data["runId"]).out):
        assert f"`agentctl effects continue-remote {effect[:12]}`" in shown
        assert remote in shown
    if ends:
        assert place.json("cancel", paused.data["runId"]).code == 0
    complete(peers, effect)
    if ends:
        plan = place.plan("retry", "flow.json", paused.data["runId"], "--failed", compatible=False)
        assert rules(plan) == {"ask": "unreconciled_effect"}
    else:
        done = place.json("resume", paused.data["runId"])
        assert (done.code, done.data["output"]["ask"]["text"]) == (0, "ok"), done.err
        assert asked(place.folder) == {1: 1, 2: 1}
    assert peers.counts() == (0, 1)
    place.assert_sound()


def test_what_a_delegated_task_delivers_to_a_model_is_kept(peers: Peers) -> None:
    """Two answers of one conversation have artifacts of the same names; and a retry takes over what it reuses."""
    place = peers.place
    calls = [{"toolCalls": [{"name": "delegate", "input": message(f"files {n}", n)}]} for n in (1, 2)]
    write_script(place.folder, [*calls, {"text": "ok"}])
    tasks = [
        {"id": "ask", "uses": "agent:helper", "with": {"prompt": "go"}},
        {"id": "end", "failure": "continue", "uses": "action:sh", "with": {"args": ["-c", "test -e ok"]}},
    ]
    place.text("flow.json", json.dumps(document(tasks, tools={"delegate": DELEGATE}, **peers.spec())))
    ended = place.json("run", "flow.json")
    assert (ended.code, peers.counts()) == (4, (0, 2)), ended.out

    def kept(run_id: str) -> dict[str, int]:
        return {item["path"]: item["sizeBytes"] for item in place.record(run_id)["artifacts"]}

    found = kept(ended.data["runId"])
    names = ("notes.md", "2-notes.md", "3-notes.md", "4-notes.md", "pixels.png", "2-pixels.png")
    assert set(found) == {f"a2a/report/{name}" for name in (*names, "report-2.json", "2-report-2.json")}
    place.text("ok", "")
    outcome = place.derive("retry", "flow.json", ended.data["runId"], "--failed")
    assert (outcome["state"], outcome["reusedTasks"], peers.counts()) == ("succeeded", ["ask"], (0, 2))
    assert kept(outcome["runId"]) == found
    place.assert_sound()
