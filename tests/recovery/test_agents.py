"""Retry, repair, fork and replay of runs with agents: who is asked again, and what of a conversation goes where."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

from support.agents import ECHO, READ, WRITE, asked, document, shell_tool, write_script
from support.model_server import ModelServer, Play
from support.recovery import Place, rules

ANSWER: dict[str, Any] = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
FIRST: dict[str, Any] = {"id": "first", "uses": "agent:counter", "with": {"prompt": "count the first"}}
SECOND: dict[str, Any] = {
    "id": "second",
    "uses": "agent:helper",
    "needs": ["first"],
    "with": {"prompt": "look at ${{ tasks.first.output.n }}"},
}
LAST: dict[str, Any] = {"id": "last", "uses": "action:note", "needs": ["second"], "with": {"said": "x"}}
COUNTED = {"when": {"contains": "count"}, "turns": [{"json": {"n": 3}}]}
OLD = [
    {"text": "OLD-THOUGHT", "toolCalls": [{"name": "echo", "input": {"word": "OLD-CALL"}, "id": "old-call-id"}]},
    {"text": "OLD-REFUSAL", "finish": "refusal"},
]
NEW = [{"text": "fine", "toolCalls": [{"name": "echo", "input": {"word": "again"}}]}, {"text": "all is well"}]


def chat(place: Place, name: str = "flow.json", *changes: tuple[str, Any], **spec: Any) -> str:
    """A counter whose answer has a contract, a helper with tools behind it, and a note; the file."""
    counter = {"provider": "model", "model": "m", "instructions": "Count.", "structuredOutput": ANSWER}
    tools = {"echo": ECHO, "read": READ, "write": WRITE}
    value = document([FIRST, SECOND, LAST], tools=tools, actions={"note": {"kind": "builtin.assign"}}, **spec)
    value["spec"]["agents"]["counter"] = counter
    for path, given in changes:
        target = value["spec"]
        *parts, last = path.split("/")
        for part in parts:
            target = target[int(part) if isinstance(target, list) else part]
        target[last] = given
    place.text(name, json.dumps(value))
    return name


def script(place: Place, turns: list[dict[str, Any]]) -> None:
    write_script(place.folder, [], conversations=[COUNTED, {"turns": turns}])


def failed(place: Place) -> tuple[str, str]:
    """A run whose helper was refused; its file and its id."""
    script(place, OLD)
    file = chat(place)
    return file, place.go(file, code=4)


def requests(place: Place) -> int:
    """How many requests have arrived at the model in all."""
    return sum(asked(place.folder).values())


def everything_of(place: Place, run_id: str) -> dict[str, str]:
    """All rows that belong to a run, as text by table."""
    found: dict[str, str] = {}
    with closing(sqlite3.connect(place.database)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            if "run_id" in columns:
                rows = connection.execute(f"SELECT * FROM {name} WHERE run_id = ?", (run_id,)).fetchall()  # noqa: S608
                found[name] = json.dumps(rows, default=str)
    assert {"tasks", "attempts", "effects", "turns", "provider_sessions", "tool_calls", "checkpoints"} <= found.keys()
    return found


# -- retry and repair --------------------------------------------------------------------------------------------------


def test_a_retry_asks_the_failed_agent_only_and_afresh(place: Place) -> None:
    file, source = failed(place)
    before = requests(place)
    assert before == 3
    plan = place.plan("retry", file, source, "--failed")
    assert plan["reusedTasks"] == ["first"]
    assert plan["rerunTasks"] == ["second", "last"]
    assert plan["freshEffectSummary"]["providerTasks"] == plan["estimatedProviderTasks"] == 1
    assert plan["freshEffectSummary"]["actionTasks"] == 1
    assert requests(place) == before, "a plan asks nobody"

    script(place, NEW)
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["output"]["second"]["text"] == "all is well"
    assert requests(place) == before + 2
    record = place.record(outcome["runId"])
    assert {effect["request"]["taskId"] for effect in record["effects"]} == {"second"}
    assert {session["taskId"] for session in record["providerSessions"]} == {"second"}
    assert record["budget"]["usage"]["providerRequests"] == record["budget"]["usage"]["turns"] == 2
    # The conversation begins with its first message, and nothing of the other one is anywhere in this run.
    first = record["effects"][0]["request"]["input"]
    assert [message["role"] for message in first["messages"]] == ["user"]
    assert first["continuation"] is None
    for table, text in everything_of(place, outcome["runId"]).items():
        assert "OLD-" not in text and "old-call-id" not in text, table
    sources = place.rows("SELECT effect_id FROM effects WHERE run_id = ? AND task_id = 'second'", source)
    mine = everything_of(place, outcome["runId"])
    for (effect,) in sources:
        assert not [table for table, text in mine.items() if effect in text]
    # The one that was reused says where it comes from, and has nothing else.
    kept = next(task for task in record["tasks"] if task["taskId"] == "first")
    assert (kept["disposition"], kept["attempt"], kept["output"]) == ("reused", 0, {"n": 3})
    [effect] = kept["reuseDecision"]["sourceEffects"]
    assert effect["effectClass"] == "model"


def test_a_repaired_agent_continues_no_session_of_its_service(place: Place, server: ModelServer) -> None:
    """What a service calls its answer, and would go on from, stays with the run that got it."""
    policy = {
        "approval": "never",
        "networkAllowlist": ["127.0.0.1"],
        "network": {"allowPrivate": True},
        "environmentAllowlist": ["KEY"],
    }
    provider = {"kind": "openai", "endpoint": f"{server.url}/v1/responses", "credential": {"env": "KEY"}}
    task = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "hello"}}
    value = document([task], tools={"echo": ECHO}, policy=policy, providers={"model": provider})
    place.text("flow.json", json.dumps(value))
    place.environment["KEY"] = "sk-0123456789"
    call = [("call-old", "echo", '{"word": "x"}')]
    reasoning = [{"type": "reasoning", "id": "rs_old", "encrypted_content": "OLD-REASONING", "summary": []}]
    opening = [*reasoning, {"type": "function_call", "call_id": "call-old", "name": "echo", "arguments": call[0][2]}]
    server.plays(
        Play(text="", calls=call, extra={"id": "resp_old", "output": opening}),
        Play(status=400, error="OLD-ERROR"),
    )
    source = place.go("flow.json", code=4)
    assert server.seen[1].body["previous_response_id"] == "resp_old"
    assert "resp_old" in "".join(everything_of(place, source).values())

    fixed = place.edit("flow.json", "fixed.json", (("spec", "agents", "helper", "instructions"), "Help, please."))
    server.plays(Play(extra={"id": "resp_new"}))
    outcome = place.derive("repair", fixed, source, "--from", "ask")
    assert server.count == 3
    body = server.seen[2].body
    assert "previous_response_id" not in body
    assert len(body["input"]) == 1
    for table, text in everything_of(place, outcome["runId"]).items():
        for word in ("resp_old", "rs_old", "OLD-", "call-old"):
            assert word not in text, (table, word)

    # Without its key it is refused before a run exists; a replay needs neither key nor service.
    del place.environment["KEY"]
    runs = place.scalar("SELECT COUNT(*) FROM runs")
    for command in (
        ("repair", fixed, outcome["runId"], "--from", "ask", "--restart-successful"),
        ("fork", outcome["runId"]),
    ):
        refused = place.json(*command)
        assert (refused.code, refused.error["code"]) == (6, "environment"), refused.err
        assert "KEY" in refused.error["message"]
    assert place.scalar("SELECT COUNT(*) FROM runs") == runs
    server.stop()
    again = place.json("replay", outcome["runId"])
    assert (again.code, again.data["output"]) == (0, outcome["output"])
    assert server.count == 3
    place.assert_sound()


def test_what_an_agent_is_made_of_belongs_to_its_definition(place: Place) -> None:
    script(place, OLD)
    sh = {"kind": "builtin.shell.exec", "command": "sh"}
    counter = {"provider": "model", "model": "m", "instructions": "Count.", "structuredOutput": ANSWER}
    ways: list[tuple[str, Any]] = [
        ("tools/sh", shell_tool("sh", "unknown")),
        ("actions/sh", sh),
        ("agents/counter", {**counter, "tools": ["echo", "sh"]}),
    ]
    file = chat(place, "flow.json", *ways)
    source = place.go(file, code=4)
    place.plan("repair", file, source, "--from", "second")
    changed = "definition_fingerprint_mismatch"
    changes: list[tuple[str, Any, str]] = [
        ("agents/counter/instructions", "Count well.", changed),
        ("agents/counter/model", "m2", changed),
        ("agents/counter/maxTurns", 7, changed),
        ("providers/model", {"kind": "fake"}, changed),
        ("tools/echo", {**ECHO, "description": "Say it twice."}, changed),
        ("actions/sh", {**sh, "args": ["-e"]}, changed),
        ("agents/counter/structuredOutput", {"type": "object"}, "output_contract_mismatch"),
    ]
    for path, value, rule in changes:
        other = chat(place, "other.json", *ways, (path, value))
        plan = place.plan("repair", other, source, "--from", "second", compatible=False)
        assert rules(plan) == {"first": rule}, path


def test_the_text_of_an_instructions_file_belongs_to_the_definition(place: Place) -> None:
    script(place, OLD)
    place.text("count.md", "Count.")
    counter = {"provider": "model", "model": "m", "instructionsFile": "count.md", "structuredOutput": ANSWER}
    file = chat(place, "flow.json", ("agents/counter", counter))
    source = place.go(file, code=4)
    place.plan("retry", file, source, "--failed")
    place.text("count.md", "Count well.")
    plan = place.plan("repair", file, source, "--from", "second", compatible=False)
    assert rules(plan) == {"first": "definition_fingerprint_mismatch"}
    plan = place.plan("retry", file, source, "--failed", compatible=False)
    assert rules(plan) == {"$workflow": "retry_workflow_definition_mismatch"}
    # The source is what it was: it is still made from the text of its start.
    place.text("count.md", "Count.")
    script(place, NEW)
    place.derive("retry", file, source, "--failed")


def test_instructions_with_templates_are_proven_like_the_input(place: Place) -> None:
    script(place, OLD)
    counter = {
        "provider": "model",
        "model": "m",
        "instructions": "Count for ${{ vars.who }}.",
        "structuredOutput": ANSWER,
    }
    file = chat(place, "flow.json", ("agents/counter", counter), vars={"who": "ann"})
    source = place.go(file, code=4)
    script(place, NEW)
    before = requests(place)
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["reusedTasks"] == ["first"]
    assert requests(place) == before + 2
    other = chat(place, "other.json", ("agents/counter", counter), vars={"who": "bob"})
    plan = place.plan("repair", other, source, "--from", "second", compatible=False)
    assert rules(plan) == {"first": "resolved_input_digest_mismatch"}


def test_an_answer_without_a_contract_feeds_nobody_without_being_asked_again(place: Place) -> None:
    script(place, NEW)
    loose = {"provider": "model", "model": "m", "instructions": "Count."}
    check: dict[str, Any] = {"id": "check", "uses": "action:check", "needs": ["second"], "with": {"that": False}}
    tasks = [{**FIRST}, {**SECOND, "with": {"prompt": "look"}}, check]
    actions = {"check": {"kind": "builtin.assert"}}
    file = chat(place, "flow.json", ("agents/counter", loose), ("tasks", tasks), ("actions", actions))
    source = place.go(file, code=4)
    plan = place.plan("retry", file, source, "--failed", compatible=False)
    assert rules(plan) == {"first": "missing_output_contract", "second": "missing_output_contract"}
    # A contract of the task counts like one of the agent, and what feeds nobody needs none.
    tasks = [
        {**FIRST, "outputSchema": {"type": "object", "required": ["text"]}},
        {**SECOND, "needs": [], "with": {"prompt": "look"}},
        {**check, "needs": ["first"]},
    ]
    file = chat(place, "flow.json", ("agents/counter", loose), ("tasks", tasks), ("actions", actions))
    source = place.go(file, code=4)
    before = requests(place)
    plan = place.plan("retry", file, source, "--failed")
    assert plan["reusedTasks"] == ["first", "second"]
    assert plan["estimatedProviderTasks"] == 0
    place.derive("retry", file, source, "--failed", code=4)
    assert requests(place) == before


def test_an_agent_that_has_changed_something_is_not_carried_out_again(place: Place) -> None:
    """Its tool calls are effects as others are: one that may not be repeated stands in the way of its task."""
    append = {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once"}
    tool = shell_tool("append", "at_most_once")
    call = {"name": "append", "input": {"args": ["-c", "echo x >> ../appended"]}}
    write_script(place.folder, [{"toolCalls": [call]}, {"finish": "refusal", "text": "no"}])
    task = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "go"}}
    place.text("flow.json", json.dumps(document([task], tools={"append": tool}, actions={"append": append})))
    source = place.go("flow.json", code=4)
    plan = place.plan("retry", "flow.json", source, "--failed", compatible=False)
    assert rules(plan) == {"ask": "unreconciled_effect"}
    [block] = plan["blockedReuse"]
    assert "tool.append" in block["message"]
    assert (place.root / "appended").read_text() == "x\n"


def test_the_plan_tells_of_the_approvals_inside_of_agents(place: Place) -> None:
    _, source = failed(place)
    policy = {"approval": "mutations", "writableRoots": ["out"]}
    fixed = chat(place, "fixed.json", policy=policy)
    plan = place.plan("repair", fixed, source, "--from", "second")
    assert plan["approvalSummary"] == ["second:tool.write"]
    policy["approval"] = "always"
    plan = place.plan("repair", chat(place, "fixed.json", policy=policy), source, "--from", "second")
    assert plan["approvalSummary"] == ["second:model", "second:tool.echo", "second:tool.read", "second:tool.write"]
    policy["approval"] = "never"
    careful = chat(place, "fixed.json", ("tools/read", {**READ, "approval": "always"}), policy=policy)
    plan = place.plan("repair", careful, source, "--from", "second")
    assert plan["approvalSummary"] == ["second:tool.read"]


# -- fork and replay ---------------------------------------------------------------------------------------------------


def test_a_fork_asks_everybody_once_more(place: Place) -> None:
    _, source = failed(place)
    before = requests(place)
    script(place, NEW)
    fork = place.json("fork", source)
    assert (fork.code, fork.data["output"]["second"]["text"]) == (0, "all is well")
    assert requests(place) == before + 3
    for table, text in everything_of(place, fork.data["runId"]).items():
        assert "OLD-" not in text, table
    place.assert_sound()


def test_a_replay_asks_nobody_and_shows_what_was_streamed(place: Place) -> None:
    script(place, [*NEW[:1], {"text": "a long answer"}])
    file = chat(place, "flow.json", ("agents/helper/stream", True))
    source = place.go(file)
    before = requests(place)
    old = place.record(source)
    assert old["streamEvents"]
    assert old["toolCalls"] and old["providerSessions"]
    for name in ("model.json", file):
        (place.folder / name).unlink()
    replay = place.json("replay", source)
    assert (replay.code, replay.data["output"]) == (0, place.json("wait", source).data["output"])
    run_id = replay.data["runId"]
    again = place.json("replay", run_id)
    assert again.code == 0
    for number, name in enumerate((run_id, again.data["runId"])):
        record = place.record(name)
        assert requests(place) == before
        assert record["effects"] == record["toolCalls"] == record["providerSessions"] == []
        assert place.scalar("SELECT COUNT(*) FROM attempts WHERE run_id = ?", name) == 0
        told = [(e["taskId"], e["sequence"], e["type"], e["payload"]) for e in old["streamEvents"]]
        assert [(e["taskId"], e["sequence"], e["type"], e["payload"]) for e in record["streamEvents"]] == told
        where = [(e["sourceRunId"], e["sourceSequence"]) for e in record["streamEvents"]]
        assert where == [(source, event["sequence"]) for event in old["streamEvents"]]
        events = [e["payload"] for e in record["audit"] if e["eventType"] == "replay.effects_reused"]
        kept = [effect["request"]["id"] for effect in old["effects"]] if number == 0 else []
        assert [effect["effectId"] for event in events for effect in event["effects"]] == kept
        calls = [call["callId"] for call in old["toolCalls"]] if number == 0 else []
        assert [call["callId"] for event in events for call in event["toolCalls"]] == calls
        assert not any(record["budget"]["usage"].values())
    assert place("inspect", run_id).code == 0
    place.assert_sound()


def test_what_is_derived_from_what_was_derived(place: Place) -> None:
    """Retry of a retry, replay of a retry, fork of a replay, replay of a fork: each knows what its results rest on."""
    file, source = failed(place)
    before = requests(place)
    retried = place.derive("retry", file, source, "--failed", code=4)["runId"]
    assert requests(place) == before + 2
    script(place, NEW)
    outcome = place.derive("retry", file, retried, "--failed")
    assert (outcome["reusedTasks"], requests(place)) == (["first"], before + 4)
    kept = {task["taskId"]: task for task in place.record(outcome["runId"])["tasks"]}["first"]
    assert (kept["sourceRunId"], kept["output"]) == (retried, {"n": 3})
    [effect] = kept["reuseDecision"]["sourceEffects"]
    assert effect["effectId"] == place.scalar(
        "SELECT effect_id FROM effects WHERE run_id = ? AND task_id = 'first'", source
    )
    replay = place.json("replay", outcome["runId"])
    assert (replay.code, replay.data["output"]) == (0, outcome["output"])
    assert place.record(replay.data["runId"])["effects"] == []
    blocked = place.plan("repair", file, replay.data["runId"], "--from", "second", compatible=False)
    assert rules(blocked) == {"$workflow": "recorded_replay_has_no_direct_effect_history"}
    assert requests(place) == before + 4
    fork = place.json("fork", replay.data["runId"])
    assert (fork.code, requests(place)) == (0, before + 7)
    again = place.json("replay", fork.data["runId"])
    assert (again.code, again.data["output"]) == (0, fork.data["output"])
    assert requests(place) == before + 7
    last = place.derive("repair", file, fork.data["runId"], "--from", "second", "--restart-successful")
    assert (last["reusedTasks"], requests(place)) == (["first"], before + 9)


def test_a_fan_out_of_agents_asks_for_the_failed_items_alone(place: Place) -> None:
    each = {
        "id": "each",
        "uses": "agent:counter",
        "failure": "continue",
        "foreach": {"items": list(range(6)), "maxItems": 6},
        "with": {"prompt": "count item ${{ vars.item }}"},
    }
    busy = {"when": {"contains": "item 3"}, "turns": [{"fail": {"status": 400}}]}
    write_script(place.folder, [], conversations=[busy, COUNTED])
    file = chat(place, "flow.json", ("tasks", [each]))
    source = place.go(file, code=4)
    assert requests(place) == 6
    write_script(place.folder, [], conversations=[COUNTED])
    plan = place.plan("retry", file, source, "--failed")
    assert (len(plan["reusedTasks"]), plan["estimatedProviderTasks"]) == (5, 1)
    outcome = place.derive("retry", file, source, "--failed")
    assert requests(place) == 7
    assert [item["state"] for item in outcome["output"]["each"]["items"]] == ["succeeded"] * 6


def test_a_model_call_that_nobody_knows_the_end_of(place: Place) -> None:
    """Where its task is executed again it is told and blocks nothing; an answer that a person has given counts."""
    script(place, [{"fail": "lost"}])
    file = chat(place, "flow.json", ("tasks/1/outputSchema", {"type": "object"}))
    paused = place.json("run", file)
    assert (paused.code, paused.data["reason"]) == (3, "uncertain_effect")
    source = paused.data["runId"]
    assert place.json("cancel", source).code == 0
    plan = place.plan("retry", file, source, "--failed")
    assert plan["freshEffectSummary"]["uncertainSourceEffects"] == 1
    assert plan["rerunTasks"] == ["second", "last"]
    assert any("sent again" in text for text in plan["warnings"])
    before = requests(place)
    script(place, [{"fail": "lost"}])
    again = place.json("retry", file, source, "--failed")
    assert (again.code, again.data["reason"], requests(place)) == (3, "uncertain_effect", before + 1)
    run_id = again.data["runId"]
    [effect] = [item[0] for item in place.rows("SELECT effect_id FROM effects WHERE run_id = ?", run_id)]
    answer = {
        "responseId": "r", "text": "as I have seen", "toolCalls": [], "assistantContent": [],
        "continuation": None, "usage": {"inputTokens": 1, "outputTokens": 1}, "finishReason": "complete",
    }  # fmt: skip
    place.text("answer.json", json.dumps(answer))
    words = (
        "--status",
        "applied",
        "--actor",
        "ann",
        "--reason",
        "it is in the console",
        "--result-file",
        "answer.json",
    )
    told = place.json("effects", "reconcile", effect, *words)
    assert told.code == 0, told.err
    done = place.json("resume", run_id)
    assert (done.code, done.data["output"]["second"]["text"]) == (0, "as I have seen")
    # Reused, with the conclusion as a part of what it rests on.
    last = place.derive("repair", file, run_id, "--from", "last", "--restart-successful")
    assert last["reusedTasks"] == ["first", "second"]
    kept = {task["taskId"]: task for task in place.record(last["runId"])["tasks"]}["second"]
    [rests_on] = kept["reuseDecision"]["sourceEffects"]
    assert (rests_on["effectId"], rests_on["status"], rests_on["reconciled"]) == (effect, "uncertain", "applied")
    assert requests(place) == before + 1


def test_a_tool_call_that_a_person_answers_for_keeps_nothing(place: Place) -> None:
    """Nobody has seen its files, so the conversation does not fail for want of them."""
    script(place, [{"toolCalls": [{"name": "leave", "input": {"args": ["-c", "exec sleep 60"]}}]}, {"text": "ok"}])
    action = {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once", "artifacts": ["out/left"]}
    tool = {**shell_tool("leave", "at_most_once"), "timeoutSeconds": 1}
    task = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "go"}}
    place.text("flow.json", json.dumps(document([task], tools={"leave": tool}, actions={"leave": action})))
    paused = place.json("run", "flow.json")
    assert (paused.code, paused.data["reason"]) == (3, "uncertain_effect"), paused.out
    effect = str(place.scalar("SELECT effect_id FROM effects WHERE operation = 'tool.leave'"))
    place.text("result.json", json.dumps({"exitCode": 0}))
    told = ("--status", "applied", "--reason", "seen", "--result-file", "result.json", "--approved")
    assert place.json("effects", "reconcile", effect, *told).code == 0
    done = place.json("resume", paused.data["runId"])
    assert (done.code, done.data["output"]["ask"]["text"]) == (0, "ok"), done.out
    assert place.record(paused.data["runId"])["artifacts"] == []
    place.assert_sound()
