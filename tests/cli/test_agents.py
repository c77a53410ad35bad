"""Agents from the outside: the real program, a scripted model, and what is recorded (contract 12.1, 5.4, 6, 11.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.agents import ECHO, READ, WRITE, asked, document, shell_tool, write_script
from support.rows import rows, scalar
from support.scale import time_limit
from support.site import Answer, Site

ASK: dict[str, Any] = {"id": "ask", "uses": "agent:helper", "with": {"prompt": "why?"}}
LOOK = {"text": "Let me look.", "toolCalls": [{"name": "read", "input": {"path": "log.txt"}}]}
DONE = {"text": "All is well."}


class Talk:
    """A site, a script and a workflow."""

    def __init__(self, folder: Path) -> None:
        self.site = Site(folder)
        self.folder = folder
        (folder / "log.txt").write_text("FAILED\n", encoding="utf-8")

    def run(
        self, value: dict[str, Any], turns: list[dict[str, Any]] | None = None, *more: str, **script: Any
    ) -> Answer:
        if turns is not None:
            write_script(self.folder, turns, **script)
        return self.site.ask("run", self.site.write("flow.yaml", value), *more)

    def effects(self) -> list[tuple[Any, ...]]:
        return rows(self.site.store, "SELECT operation, status, dispatches FROM effects ORDER BY effect_no")

    def error(self) -> dict[str, Any]:
        sql = "SELECT error_json FROM tasks WHERE task_id = 'ask' ORDER BY task_no DESC LIMIT 1"
        return json.loads(scalar(self.site.store, sql) or "null")

    def budget(self) -> dict[str, Any]:
        return self.site.ask("inspect", "@latest").data["budget"]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    made = Talk(tmp_path / "site")
    try:
        yield made
        if made.site.database.exists():
            verified = made.site.ask("db", "verify")
            assert (verified.code, verified.data["problems"]) == (0, [])
            made.site.assert_clean()
    finally:
        made.site.close()


# -- what an agent says ------------------------------------------------------------------------------------------------


def test_an_answer_is_an_output_with_its_usage(talk: Talk) -> None:
    answer = talk.run(document([ASK], script=None))
    assert (answer.code, answer.data["state"]) == (0, "succeeded")
    assert answer.data["output"]["ask"] == {
        "text": "fake: why?",
        "usage": {
            "inputTokens": 1,
            "outputTokens": 1,
            "reasoningTokens": 0,
            "cacheReadTokens": 0,
            "cacheWriteTokens": 0,
            "costMicrousd": None,
        },
    }
    usage = talk.budget()["usage"]
    assert {k: v for k, v in usage.items() if k != "wallTimeSeconds"} == {
        "providerRequests": 1, "turns": 1, "inputTokens": 1, "outputTokens": 1, "unpricedProviderRequests": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompt": {"a": 1}}, '{"prompt":{"a":1}}'),
        ({"prompt": "${{ inputs.n }}", "x": True}, '{"prompt":7,"x":true}'),
        ({"question": "who"}, '{"question":"who"}'),
        ({"prompt": "number ${{ inputs.n }}", "x": 1}, "number 7"),
    ],
)
def test_what_is_not_a_text_prompt_is_given_whole(talk: Talk, given: Any, said: str) -> None:
    answer = talk.run(document([{**ASK, "with": given}], script=None, inputs={"n": 7}))
    assert answer.data["output"]["ask"]["text"] == f"fake: {said}"


def test_instructions_tools_and_options_stand_in_the_recorded_request(talk: Talk) -> None:
    (talk.folder / "i.md").write_text("Help ${{ vars.who }}.", encoding="utf-8")
    agent = {
        "reasoning": None,
        "maxOutputTokens": 99,
        "providerOptions": {"toolInput": {"word": "hi"}},
        "vars": {"who": "Ada"},
    }
    value = document([ASK], script=None, tools={"echo": ECHO}, agent=agent)
    del value["spec"]["agents"]["helper"]["instructions"]
    value["spec"]["agents"]["helper"]["instructionsFile"] = "i.md"
    answer = talk.run(value)
    assert answer.code == 0, answer.out
    assert answer.data["output"]["ask"]["usage"]["inputTokens"] == 2
    seen = talk.site.ask("inspect", "@latest").data
    requests = [effect["request"] for effect in seen["effects"]]
    assert [(r["ordinal"], r["operation"], r["effectClass"], r["risk"], r["idempotency"]) for r in requests] == [
        (1, "agent.instructions.read", "observe", "low", "idempotent"),
        (2, "model", "model", "medium", "at_most_once"),
        (3, "tool.echo", "pure", "low", "pure"),
        (4, "model", "model", "medium", "at_most_once"),
    ]
    text = "Help ${{ vars.who }}."
    assert seen["effects"][0]["result"] == {
        "path": "i.md", "bytes": len(text), "sha256": sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    first, second = requests[1]["input"], requests[3]["input"]
    assert first["instructions"] == "Help Ada."
    assert first["promptCacheKey"] == "agents:helper"
    assert first["maxOutputTokens"] == 99
    assert [tool["name"] for tool in first["tools"]] == ["echo"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][2]["content"] == [
        {"type": "tool_result", "toolCallId": "fake-call-1", "output": {"word": "hi"}, "isError": False}
    ]
    [call] = seen["toolCalls"]
    assert (call["toolId"], call["callId"], call["status"]) == ("echo", "fake-call-1", "succeeded")
    [session] = seen["providerSessions"]
    assert (session["provider"], session["attempt"], session["continuation"]) == ("model", 1, None)
    assert session["effectId"] == seen["effects"][3]["request"]["id"]
    log = talk.site.ask("logs", "@latest").data
    assert [step["kind"] for step in log["conversation"]] == ["turn", "tool_call", "turn"]


def test_instructions_of_a_run_are_those_of_its_start(talk: Talk) -> None:
    """A file that changes afterwards changes nothing: the text belongs to the run."""
    (talk.folder / "i.md").write_text("first", encoding="utf-8")
    value = document([ASK], script=None, agent={"instructions": None, "instructionsFile": "i.md"})
    run_id = talk.site.submit(talk.site.write("flow.yaml", value))
    (talk.folder / "i.md").write_text("second", encoding="utf-8")
    assert talk.site.ask("resume", run_id).code == 0
    inputs = [json.loads(text) for (text,) in rows(talk.site.store, "SELECT input_json FROM effects ORDER BY ordinal")]
    assert inputs[1]["instructions"] == "first"


def test_an_absurd_bill_is_counted_as_far_as_it_goes(talk: Talk) -> None:
    """Two answers whose sum no column holds: both are kept, and the worker lives."""
    two = [ASK, {**ASK, "id": "again", "needs": ["ask"]}]
    most = 2**63 - 1
    answer = talk.run(document(two), [{"text": "yes", "usage": {"inputTokens": most, "costMicrousd": most}}])
    assert (answer.code, answer.data["state"]) == (0, "succeeded")
    assert answer.data["output"]["again"]["usage"]["inputTokens"] == most
    usage = talk.budget()["usage"]
    assert (usage["inputTokens"], usage["costMicrousd"], usage["providerRequests"]) == (most, most, 2)


def test_a_secret_of_one_character_loses_no_answer(talk: Talk) -> None:
    """What is said is cleaned of it; the form of the answer is ours, and stays."""
    (talk.folder / "tiny").write_text("e", encoding="utf-8")
    provider = {"kind": "fake", "script": "model.json", "headers": {"X-Tiny": {"file": "tiny"}}}
    value = document([ASK], providers={"model": provider})
    value["spec"]["policy"]["secretFileRoots"] = ["."]
    answer = talk.run(value, [{"text": "yes"}])
    assert (answer.code, answer.data["state"]) == (0, "succeeded")
    assert answer.data["output"]["ask"]["text"] == "y[REDACTED]s"


def test_structured_output_is_the_output(talk: Talk) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    use = {"id": "use", "uses": "action:say", "needs": ["ask"], "with": {"n": "${{ tasks.ask.output.n }}"}}
    value = document([ASK, use], agent={"structuredOutput": schema}, actions={"say": {"kind": "builtin.assign"}})
    answer = talk.run(value, [{"json": {"n": 3}}])
    assert answer.data["output"]["ask"] == {"n": 3}
    assert answer.data["output"]["use"]["output"] == {"n": 3}


@pytest.mark.parametrize(
    ("agent", "turn", "code"),
    [
        ({"structuredOutput": {"type": "object"}}, {"text": "not JSON"}, "structured_output"),
        ({"structuredOutput": {"type": "object"}}, {"json": [1]}, "structured_output"),
        ({"structuredOutput": {"type": "object"}}, {"text": '{"a": 1, "a": 2}'}, "structured_output"),
        ({}, {"text": "half of", "finish": "max_tokens"}, "answer_cut_off"),
        ({"structuredOutput": {"type": "object"}}, {"json": {}, "finish": "max_tokens"}, "answer_cut_off"),
        ({}, {"text": "no", "finish": "refusal"}, "model_refused"),
        ({}, {"text": "", "finish": "cancelled"}, "model_cancelled"),
        ({"maxTurns": 1}, LOOK, "turn_limit"),
        ({"maxToolCalls": 0}, LOOK, "tool_call_limit"),
        ({"tools": []}, LOOK, "unknown_tool"),
        ({}, {"toolCalls": [{"name": "read", "input": {"path": 1}}]}, "tool_input"),
        ({}, {"toolCalls": [{"name": "read", "input": {"path": "log.txt", "x": 1}}]}, "tool_input"),
        ({}, {"toolCalls": [{"name": "read", "input": {"path": "../x"}}]}, "policy_denied"),
        ({}, {"toolCalls": [{"name": "read", "input": {"path": "gone"}}]}, "not_found"),
        ({}, {**LOOK, "finish": "max_tokens"}, "answer_cut_off"),
        ({"usageLimit": {"maxInputTokens": 9}}, {**LOOK, "usage": {"inputTokens": 10}}, "usage_limit"),
        ({"usageLimit": {"maxOutputTokens": 9}}, {**DONE, "usage": {"outputTokens": 10}}, "usage_limit"),
    ],
)
def test_answers_that_fail_the_task_are_kept_and_paid_for(talk: Talk, agent: Any, turn: Any, code: str) -> None:
    """A failure of the task, not retried: no second request, and no effect of a tool that must not be."""
    value = document([{**ASK, "retry": {"maxAttempts": 3}}], tools={"read": READ}, agent=agent)
    answer = talk.run(value, [turn, DONE])
    assert (answer.code, answer.data["state"], answer.data["reason"]) == (4, "failed", "task_failed")
    assert talk.error()["code"] == code
    assert not talk.error()["retryable"]
    assert asked(talk.folder) == {1: 1}
    assert talk.effects() == [("model", "succeeded", 1)]
    assert talk.budget()["usage"]["providerRequests"] == 1


def test_usage_limits_count_all_turns(talk: Talk) -> None:
    turns = [{**LOOK, "usage": {"inputTokens": 6}}, {**DONE, "usage": {"inputTokens": 6}}]
    assert (
        talk.run(document([ASK], tools={"read": READ}, agent={"usageLimit": {"maxInputTokens": 12}}), turns).code == 0
    )
    assert (
        talk.run(document([ASK], tools={"read": READ}, agent={"usageLimit": {"maxInputTokens": 11}}), turns).code == 4
    )


def test_a_limit_in_dollars_is_held_by_the_price_list(talk: Talk) -> None:
    price = {"inputMicrousdPerMillionTokens": 1_000_000, "outputMicrousdPerMillionTokens": 2_000_000}
    runtime = {"pricing": {"version": "1", "models": {"model/m": price}}}
    turns = [{**DONE, "usage": {"inputTokens": 10, "outputTokens": 5}}]
    for dollars, code in ((0.00002, 0), (0.000019, 4)):
        value = document([ASK], agent={"usageLimit": {"maxCostUsd": dollars}}, runtime=runtime)
        assert talk.run(value, turns).code == code
        assert talk.budget()["usage"]["costMicrousd"] == 20


# -- requests that end without an answer -------------------------------------------------------------------------------


def test_a_server_that_is_busy_is_asked_again_and_nothing_is_charged(talk: Talk) -> None:
    fail = {**DONE, "fail": {"status": 429, "retryAfterMs": 300}, "times": 2}
    value = document([{**ASK, "retry": {"maxAttempts": 3}}], runtime={"budgets": {"maxProviderRequests": 1}})
    assert talk.run(value, [fail]).code == 0
    assert asked(talk.folder) == {1: 3}
    assert talk.effects() == [("model", "failed", 1), ("model", "failed", 1), ("model", "succeeded", 1)]
    budget = talk.budget()
    assert (budget["usage"]["providerRequests"], budget["reserved"]["providerRequests"]) == (1, 0)
    starts = [row[0] for row in rows(talk.site.store, "SELECT started_at FROM effects ORDER BY effect_no")]
    assert all(later - earlier >= 300 for earlier, later in pairwise(starts))


@pytest.mark.parametrize(
    ("fail", "attempts", "charged"),
    [("unreachable", 3, 0), ({"status": 503}, 3, 0), ({"status": 500}, 3, 3), ({"status": 401}, 1, 1)],
)
def test_definitive_failures_follow_the_retry_policy(talk: Talk, fail: Any, attempts: int, charged: int) -> None:
    answer = talk.run(document([{**ASK, "retry": {"maxAttempts": 3}}]), [{"fail": fail}])
    assert (answer.code, answer.data["state"]) == (4, "failed")
    assert talk.effects() == [("model", "failed", 1)] * attempts
    assert talk.budget()["usage"].get("providerRequests", 0) == charged
    assert sum(asked(talk.folder).values()) == (0 if fail == "unreachable" else attempts)


@pytest.mark.parametrize("fail", ["lost", "timeout", "malformed", "cut"])
def test_what_nobody_knows_waits_for_a_person(talk: Talk, fail: str) -> None:
    """Never asked again by itself; with the answer that a person gives the attempt goes on to its end."""
    value = document([{**ASK, "retry": {"maxAttempts": 5}}], tools={"read": READ}, agent={"stream": fail == "cut"})
    answer = talk.run(value, [{**LOOK, "fail": fail}, DONE])
    assert (answer.code, answer.data["state"], answer.data["reason"]) == (3, "paused", "uncertain_effect")
    assert asked(talk.folder) == {1: 1}
    [(effect,)] = rows(talk.site.store, "SELECT effect_id FROM effects")
    for verb in ("wait", "status"):
        told = talk.site.ask(verb, "@latest", form="human")
        assert f"the script says: {fail}" in told.out, told
    given = talk.folder / "given.json"

    def reconcile(value: Any) -> Answer:
        given.write_text(json.dumps(value), encoding="utf-8")
        return talk.site.ask(
            "effects", "reconcile", effect, "--status", "applied", "--reason", "seen", "--result-file", given
        )

    good = {
        "responseId": "r", "text": "", "toolCalls": [{"id": "c", "name": "read", "input": {"path": "log.txt"}}],
        "assistantContent": [], "continuation": {"kind": "conversation", "value": [1]},
        "usage": {"inputTokens": 5, "outputTokens": 6}, "finishReason": "tool_calls",
    }  # fmt: skip
    much = {**good, "usage": {"inputTokens": 10**30}}
    for bad in (
        "yes",
        {},
        much,
        {**good, "finishReason": "done"},
        {**good, "toolCalls": [{"id": "c"}]},
        {**good, "x": 1},
    ):
        refused = reconcile(bad)
        assert refused.code == 2, refused
        assert "no answer of a model" in refused.err
    assert reconcile(good).code == 0
    assert talk.site.ask("resume", "@latest").code == 0
    assert asked(talk.folder) == {1: 1, 2: 1}
    assert rows(talk.site.store, "SELECT DISTINCT attempt FROM effects") == [(1,)]
    usage = talk.budget()["usage"]
    assert (usage["providerRequests"], usage["inputTokens"]) == (2, 6)
    second = json.loads(scalar(talk.site.store, "SELECT input_json FROM effects WHERE ordinal = 3"))
    assert second["continuation"] == {"kind": "conversation", "value": [1]}


def test_fail_first_succeeds_one_attempt_later_whoever_works(talk: Talk) -> None:
    value = document(
        [{**ASK, "retry": {"maxAttempts": 3}}],
        script=None,
        agent={"providerOptions": {"failFirst": 2, "finalText": "ok"}},
    )
    for workers in ("1", "3"):
        assert talk.run(value, None, "--workers", workers).code == 0
        assert talk.site.ask("inspect", "@latest").data["tasks"][0]["attempt"] == 3


# -- tools -------------------------------------------------------------------------------------------------------------


def test_files_are_written_once_and_kept(talk: Talk) -> None:
    calls = [
        {"name": "write", "input": {"path": "out/a.txt", "content": "one\n"}},
        {"name": "write", "input": {"path": "out/b.txt", "content": "two\n"}},
        {"name": "write", "input": {"path": "out/a.txt", "content": "three\n"}},
    ]
    for _ in range(2):  # the second time nothing changes, and it is the same effect all the same
        answer = talk.run(document([ASK], tools={"write": WRITE}), [{"toolCalls": calls}, DONE])
        assert answer.code == 0, answer.out
    run_id = answer.data["runId"]
    assert (talk.folder / "out" / "a.txt").read_text() == "three\n"
    kept = {path: data for (task, path), data in talk.site.artifacts(run_id).items() if task == "ask"}
    assert kept == {"out/a.txt": b"three\n", "out/b.txt": b"two\n"}
    results = [
        json.loads(text)
        for (text,) in rows(
            talk.site.store,
            "SELECT result_json FROM effects WHERE run_id = ? AND operation = 'tool.write' ORDER BY ordinal",
            run_id,
        )
    ]
    assert results[0] == {"path": "out/a.txt", "bytes": 4, "sha256": sha256(b"one\n").hexdigest()}
    assert len(results) == 3


def test_a_declared_action_is_a_tool_under_its_own_rules(talk: Talk) -> None:
    action = {"kind": "builtin.shell.exec", "command": "sh", "parse": "json", "artifacts": ["out/*.txt"]}
    call = {"name": "run", "input": {"args": ["-c", "mkdir -p out; echo x > out/x.txt; echo '{\"n\": 2}'"]}}
    value = document([ASK], tools={"run": shell_tool("sh", "unknown")}, actions={"sh": action})
    answer = talk.run(value, [{"toolCalls": [call]}, DONE])
    assert answer.code == 0, answer.out
    seen = talk.site.ask("inspect", "@latest").data
    request = seen["effects"][1]["request"]
    assert (request["operation"], request["effectClass"], request["risk"]) == ("tool.run", "process_execution", "high")
    assert request["input"] == {"callId": "call-1-1", "tool": "run", "input": call["input"]}
    assert seen["effects"][1]["result"]["json"] == {"n": 2}
    assert [item["path"] for item in seen["artifacts"]] == ["out/x.txt"]
    assert seen["budget"]["usage"]["toolCalls"] == 1
    assert talk.site.ask("logs", "@latest").data["attempts"][0]["exitCode"] == 0


def test_a_tool_that_fails_fails_the_task(talk: Talk) -> None:
    tools = {"run": shell_tool("sh", "unknown"), "echo": {**ECHO, "outputSchema": {"required": ["other"]}}}
    actions = {"sh": {"kind": "builtin.shell.exec", "command": "sh"}}
    value = document([{**ASK, "retry": {"maxAttempts": 3}}], tools=tools, actions=actions)
    assert talk.run(value, [{"toolCalls": [{"name": "run", "input": {"args": ["-c", "exit 3"]}}]}, DONE]).code == 4
    assert talk.error()["code"] == "process_exit"
    assert talk.effects() == [("model", "succeeded", 1), ("tool.run", "failed", 1)]
    assert talk.run(value, [{"toolCalls": [{"name": "echo", "input": {"word": "a"}}]}, DONE]).code == 4
    assert talk.error()["code"] == "tool_output"
    assert talk.effects()[2:] == [("model", "succeeded", 1), ("tool.echo", "failed", 1)]
    assert rows(talk.site.store, "SELECT status FROM tool_calls") == [("failed",), ("failed",)]


def test_a_schema_of_any_dialect_is_read_as_draft_2020_12(talk: Talk) -> None:
    """As the compiler has read it: one that nobody knows would end a driver or a worker, an older one says less."""
    unknown, older = "https://example.invalid/dialect", "http://json-schema.org/draft-07/schema#"
    echo = {**ECHO, "inputSchema": {**ECHO["inputSchema"], "$schema": unknown}, "outputSchema": {"$schema": unknown}}
    note = {"id": "note", "uses": "action:note", "with": {}, "outputSchema": {"$schema": unknown, "type": "object"}}
    value = document(
        [ASK, note],
        tools={"echo": echo},
        agent={"structuredOutput": {"$schema": older, "type": "object", "dependentRequired": {"a": ["b"]}}},
        actions={"note": {"kind": "builtin.assign"}},
    )
    say = {"toolCalls": [{"name": "echo", "input": {"word": "a"}}]}
    answer = talk.run(value, [say, {"json": {"a": 1, "b": 2}}])
    assert answer.code == 0, answer.err
    assert talk.run(value, [say, {"json": {"a": 1}}]).code == 4
    assert talk.error()["code"] == "structured_output"


def test_an_input_is_held_against_a_schema_of_any_dialect(talk: Talk) -> None:
    extension = {
        "kind": "extension.process",
        "command": "sh",
        "idempotency": "pure",
        "protocolVersion": "agentctl.dev/process-extension/v1",
        "inputSchema": {"$schema": "https://example.invalid/dialect", "type": "object", "required": ["needed"]},
        "outputSchema": {},
        "capabilities": [],
    }
    answer = talk.run(document([{"id": "it", "uses": "action:it", "with": {"n": 1}}], actions={"it": extension}))
    assert (answer.code, "needed" in answer.err) == (2, True), answer.err


def test_a_tool_that_may_be_repeated_is_retried_with_its_task(talk: Talk) -> None:
    """Retrying begins the conversation anew; after a call that must not be repeated, it does not."""
    script = "test -e out/again && echo ok || { mkdir -p out; touch out/again; exit 1; }"
    call = {"name": "run", "input": {"args": ["-c", script]}}
    actions = {"sh": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "idempotent"}}
    value = document(
        [{**ASK, "retry": {"maxAttempts": 2}}], tools={"run": shell_tool("sh", "idempotent")}, actions=actions
    )
    assert talk.run(value, [{"toolCalls": [call]}, DONE]).code == 0
    assert asked(talk.folder) == {1: 2, 2: 1}


@pytest.mark.parametrize("name", ["filesystem.read", "read", "tool.read"])
def test_tools_are_denied_and_allowed_by_any_of_their_names(talk: Talk, name: str) -> None:
    policy = {"approval": "never", "writableRoots": ["out"]}
    value = document([ASK], tools={"read": READ}, policy={**policy, "toolsDeny": [name]})
    assert talk.run(value, [LOOK, DONE]).code == 4
    assert talk.error()["code"] == "policy_denied"
    assert talk.effects() == [("model", "succeeded", 1)]
    value["spec"]["policy"] = {**policy, "toolsAllow": [name]}
    assert talk.run(value).code == 0
    value["spec"]["policy"] = {**policy, "toolsAllow": ["something.else"]}
    assert talk.run(value).code == 4


@pytest.mark.parametrize("name", ["process.exec", "pay", "tool.pay"])
def test_a_call_is_reconciled_under_the_name_that_has_allowed_it(talk: Talk, name: str) -> None:
    actions = {"sh": {"kind": "builtin.shell.exec", "command": "sh"}}
    tools = {"pay": {**shell_tool("sh", "unknown"), "timeoutSeconds": 1}}
    policy = {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"], "toolsAllow": [name]}
    wait = {"toolCalls": [{"name": "pay", "input": {"args": ["-c", "sleep 30"]}}]}
    answer = talk.run(document([ASK], tools=tools, actions=actions, policy=policy), [wait, DONE])
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    assert say(talk, uncertain(talk), "not-applied").data["status"] == "not_applied"


def test_providers_can_be_denied(talk: Talk) -> None:
    value = document([ASK], policy={"approval": "never", "providers": ["other"], "writableRoots": ["out"]})
    for more in ((), ("--check",)):
        assert talk.run(value, [DONE], *more).code == 4
    assert talk.error()["code"] == "policy_denied"
    assert asked(talk.folder) == {}
    assert talk.effects() == []


# -- approvals ---------------------------------------------------------------------------------------------------------


def test_an_approval_inside_a_conversation(talk: Talk) -> None:
    """The attempt is held with all its answers; once approved it goes on and asks nothing twice."""
    call = {"name": "write", "input": {"path": "out/a.txt", "content": "one\n"}}
    value = document([ASK], tools={"read": READ, "write": WRITE}, policy={"writableRoots": ["out"]})
    answer = talk.run(value, [LOOK, {"toolCalls": [call]}, DONE])
    assert (answer.code, answer.data["reason"]) == (3, "approval_required")
    assert not (talk.folder / "out" / "a.txt").exists()
    [approval] = talk.site.ask("approvals", "list", "@latest").data["approvals"]
    assert (approval["agent"], approval["tool"], approval["capability"]) == ("helper", "write", "filesystem.write")
    assert approval["redactedInput"]["input"] == call["input"]
    assert rows(talk.site.store, "SELECT holder FROM attempts WHERE state = 'claimed'") == []
    assert talk.site.ask("approvals", "approve", approval["approvalId"]).code == 0
    done = talk.site.ask("resume", "@latest")
    assert (done.code, done.data["output"]["ask"]["text"]) == (0, DONE["text"])
    assert asked(talk.folder) == {1: 1, 2: 1, 3: 1}
    assert [row[2] for row in talk.effects()] == [1] * 5
    assert (talk.folder / "out" / "a.txt").read_text() == "one\n"


def test_a_rejected_call_fails_the_task(talk: Talk) -> None:
    tools = {"read": {**READ, "approval": "always"}}
    assert talk.run(document([ASK], tools=tools), [LOOK, DONE]).code == 3
    [approval] = talk.site.ask("approvals", "list", "@latest").data["approvals"]
    assert talk.site.ask("approvals", "reject", approval["approvalId"]).code == 0
    assert talk.site.ask("resume", "@latest").code == 4
    assert talk.error()["code"] == "approval_rejected"
    assert rows(talk.site.store, "SELECT * FROM tool_calls") == []


def test_approval_always_asks_for_every_step(talk: Talk) -> None:
    value = document([ASK], tools={"read": READ}, policy={"approval": "always", "writableRoots": ["out"]})
    answer = talk.run(value, [LOOK, DONE])
    seen = []
    while answer.code == 3:
        [approval] = talk.site.ask("approvals", "list", "@latest").data["approvals"]
        seen.append(approval["tool"])
        assert talk.site.ask("approvals", "approve", approval["approvalId"]).code == 0
        answer = talk.site.ask("resume", "@latest")
    assert (answer.code, seen) == (0, ["model", "read", "model"])
    assert asked(talk.folder) == {1: 1, 2: 1}


# -- check, streams, stopping ------------------------------------------------------------------------------------------


def test_a_check_asks_no_model(talk: Talk) -> None:
    use = {"id": "use", "uses": "action:say", "needs": ["ask"], "with": {"n": "${{ tasks.ask.output.text }}"}}
    value = document([ASK, use], actions={"say": {"kind": "builtin.assign"}})
    answer = talk.run(value, [DONE], "--check")
    assert answer.code == 0
    found = {row["taskId"]: row["result"] for row in answer.data["tasks"]}
    assert found == {"ask": "requires_execution", "use": "requires_execution"}
    output = json.loads(scalar(talk.site.store, "SELECT output_json FROM tasks WHERE task_id = 'ask'"))
    assert output == {
        "status": "requires_execution", "changed": False, "predictability": "requires_execution", "provider": "model",
    }  # fmt: skip
    assert asked(talk.folder) == {}
    assert talk.effects() == []


def test_streamed_answers_are_stored_bounded_and_shown(talk: Talk) -> None:
    text = "0123456789abcdef" * 300
    value = document([ASK], agent={"stream": True})
    write_script(talk.folder, [{"text": text}])
    file = talk.site.write("flow.yaml", value)
    process = talk.site.start("run", file, "--output", "jsonl")
    talk.site.wait_for(lambda: process.poll() is not None, "the run ends")
    lines = [json.loads(line) for line in (talk.folder / "stdout-000").read_text().splitlines()]
    events = [line["data"] for line in lines if line["kind"] == "StreamEvent"]
    assert [event["sequence"] for event in events] == list(range(1, 257))
    assert events[-1]["type"] == "stream.truncated"
    assert events[-1]["payload"] == {"reason": "event_limit", "maxEvents": 256}
    assert lines[-1]["kind"] == "RunOutcome"
    assert lines[-1]["data"]["output"]["ask"]["text"] == text
    assert talk.site.ask("inspect", "@latest").data["streamEvents"] == events
    assert talk.run(value).code == 0
    assert "| 0123" not in (talk.folder / "stdout-000").read_text()
    human = talk.site.start("run", file)
    talk.site.wait_for(lambda: human.poll() is not None, "the run ends")
    shown = (talk.folder / "stderr-001").read_text()
    assert shown.startswith("ask| 0123456789abcdef")
    assert "more of this answer is not shown" in shown


def test_cancelling_ends_a_slow_model(talk: Talk) -> None:
    write_script(talk.folder, [{**DONE, "delayMs": 60_000}])
    process = talk.site.start("run", talk.site.write("flow.yaml", document([ASK])))
    talk.site.wait_for(lambda: asked(talk.folder) == {1: 1}, "the model is asked")
    assert talk.site.ask("cancel", str(talk.site.only_run())).code == 0
    talk.site.wait_for(lambda: process.poll() is not None, "the run ends")
    assert talk.effects() == [("model", "uncertain", 1)]
    assert talk.site.run(str(talk.site.only_run())).state == "cancelled"


def test_the_limit_of_a_task_ends_its_calls(talk: Talk) -> None:
    """A task's own limit holds for all its calls together: what is asked then is in doubt, and nothing follows."""
    value = document([{**ASK, "timeoutSeconds": time_limit(), "retry": {"maxAttempts": 3}}], tools={"read": READ})
    answer = talk.run(value, [LOOK, {**DONE, "delayMs": 60_000}])
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    assert talk.effects()[-1] == ("model", "uncertain", 1)
    assert asked(talk.folder) == {1: 1, 2: 1}


def test_a_worker_that_drains_stops_between_two_steps(talk: Talk) -> None:
    """What it has is recorded; who takes over goes on with the next step."""
    write_script(talk.folder, [{**LOOK, "delayMs": 1500 * time_limit()}, DONE])
    file = talk.site.write("flow.yaml", document([ASK], tools={"read": READ}))
    first = talk.site.start("workers", "start", "-n", "1", "--drain-seconds", "20")
    run_id = talk.site.submit(file)
    talk.site.wait_for(lambda: asked(talk.folder) == {1: 1}, "the model is asked")
    assert talk.site.stop() == [0]
    assert first.poll() == 0
    assert talk.effects() == [("model", "succeeded", 1)]
    assert talk.site.ask("resume", run_id).code == 0
    assert asked(talk.folder) == {1: 1, 2: 1}
    assert [row[2] for row in talk.effects()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "log", "code"), [(None, None, 6), ("{", None, 6), ("", "/elsewhere/log", 3)], ids=["none", "bad", "log"]
)
def test_a_script_that_cannot_be_played_is_told_before_a_run_exists(
    talk: Talk, text: str | None, log: str | None, code: int
) -> None:
    value = document([{**ASK, "retry": {"maxAttempts": 3}}])
    if text is not None:
        script = text or json.dumps({"conversations": [{"turns": [{"text": "x"}]}], "log": log})
        (talk.folder / "model.json").write_text(script, encoding="utf-8")
    refused = talk.run(value)
    assert refused.code == code, refused.err
    assert "'model.json'" in refused.err
    assert not talk.site.database.exists()


# -- a fresh attempt after a conclusion --------------------------------------------------------------------------------

PAY = {"toolCalls": [{"name": "pay", "input": {"args": ["-c", "echo paid >> out/ledger"]}}]}
AGAIN = {"toolCalls": [{"name": "again", "input": {"args": ["-c", "echo again >> out/ledger; exec sleep 60"]}}]}
LOST = {"fail": "lost", "times": 1, "text": "done"}


def shells(*tasks: dict[str, Any], retry_safe: bool = False, **tools: str) -> dict[str, Any]:
    """A workflow whose agent has these tools: name to idempotency."""
    actions = {
        name: {"kind": "builtin.shell.exec", "command": "sh", "idempotency": how}
        for name, how in {**tools, "other": "at_most_once"}.items()
    }
    found = {name: {**shell_tool(name, how), "timeoutSeconds": time_limit()} for name, how in tools.items()}
    found["pay"]["retrySafe"] = retry_safe
    return document([ASK, *tasks], tools=found, actions=actions)


def paid(talk: Talk) -> list[str]:
    return (talk.folder / "out" / "ledger").read_text(encoding="utf-8").split()


def uncertain(talk: Talk) -> str:
    sql = "SELECT effect_id FROM effects WHERE status = 'uncertain' ORDER BY effect_no DESC LIMIT 1"
    return str(scalar(talk.site.store, sql))


def say(talk: Talk, effect: str, status: str, *more: str) -> Answer:
    answer = talk.site.ask("effects", "reconcile", effect, "--status", status, "--reason", "looked", *more)
    assert answer.code == 0, answer.err
    return answer


def test_a_payment_is_not_repeated_because_a_later_answer_was_lost(talk: Talk) -> None:
    answer = talk.run(shells(pay="at_most_once"), [PAY, LOST])
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    [(payment,)] = rows(talk.site.store, "SELECT effect_id FROM effects WHERE operation = 'tool.pay'")
    lost = uncertain(talk)
    told = {"taskId": "ask", "effectId": lost, "standingEffects": [payment]}
    assert talk.site.ask("resume", "@latest", "--plan").data["noFreshAttempt"] == [{**told, "fails": False}]
    said = say(talk, lost, "not-applied")
    assert said.data["standingEffects"] == [payment]
    assert talk.site.ask("resume", "@latest", "--plan").data["noFreshAttempt"] == [{**told, "fails": True}]
    assert talk.site.ask("db", "verify").code == 0
    ended = talk.site.ask("resume", "@latest")
    assert (ended.code, ended.data["state"]) == (4, "failed")
    error = talk.error()
    assert (error["code"], error["details"]) == ("not_repeatable", {"effectIds": [payment], "notApplied": lost})
    assert paid(talk) == ["paid"]
    [block] = talk.site.ask("retry", "flow.yaml", "@latest", "--failed", "--plan").data["blockedReuse"]
    assert block["rule"] == "unreconciled_effect"


def test_a_payment_whose_author_lets_it_come_again_bars_nothing(talk: Talk) -> None:
    talk.run(shells(pay="at_most_once", retry_safe=True), [PAY, LOST])
    assert say(talk, uncertain(talk), "not-applied").data["standingEffects"] == []
    assert talk.site.ask("resume", "@latest").code == 0
    assert paid(talk) == ["paid", "paid"]


def test_a_payment_that_was_undone_bars_nothing(talk: Talk) -> None:
    refund = {"id": "refund", "uses": "action:other", "with": {"args": ["-c", "echo refund >> out/ledger"]}}
    talk.run(shells(refund, pay="at_most_once"), [PAY, LOST])
    sql = "SELECT effect_id FROM effects WHERE operation = ? ORDER BY effect_no DESC LIMIT 1"
    payment, inverse = (scalar(talk.site.store, sql, name) for name in ("tool.pay", "builtin.shell.exec"))
    say(talk, str(payment), "compensated", "--compensation-effect", str(inverse), "--approved")
    assert talk.site.ask("resume", "@latest", "--plan").data["noFreshAttempt"] == []
    assert say(talk, uncertain(talk), "not-applied").data["standingEffects"] == []
    assert talk.site.ask("resume", "@latest").code == 0
    assert sorted(paid(talk)) == ["paid", "paid", "refund"]


REFUND = {"id": "refund", "uses": "action:other", "with": {"args": ["-c", "echo refund >> out/ledger"]}}
NEWEST = "SELECT effect_id FROM effects WHERE operation = ? ORDER BY effect_no DESC LIMIT 1"


def undo_payment(talk: Talk, by: str = "builtin.shell.exec") -> str:
    """Say that the payment was undone by the last effect of that operation; the id of the payment."""
    effect, inverse = (str(scalar(talk.site.store, NEWEST, name)) for name in ("tool.pay", by))
    say(talk, effect, "compensated", "--compensation-effect", inverse, "--approved")
    return effect


def found_answer(talk: Talk) -> Answer:
    """The lost answer of the model has turned up: it says that all is done."""
    [given] = rows(talk.site.store, "SELECT result_json FROM effects WHERE effect_class = 'model' AND confirmed = 1")
    answer = {**json.loads(given[0]), "text": "done", "toolCalls": [], "finishReason": "complete"}
    answer["assistantContent"] = [{"type": "text", "text": "done"}]
    (talk.folder / "given.json").write_text(json.dumps(answer), encoding="utf-8")
    return say(talk, uncertain(talk), "applied", "--result-file", "given.json")


def test_a_conversation_does_not_go_on_over_a_payment_that_was_undone(talk: Talk) -> None:
    """The answer is known, and what it was an answer to has been undone: a fresh attempt (contract 5.3)."""
    talk.run(shells(REFUND, pay="at_most_once"), [PAY, LOST])
    undo_payment(talk)
    found_answer(talk)
    assert talk.site.ask("resume", "@latest").code == 0
    assert sorted(paid(talk)) == ["paid", "paid", "refund"]
    assert asked(talk.folder) == {1: 2, 2: 2}
    assert rows(talk.site.store, "SELECT number, state FROM attempts WHERE task_id = 'ask' ORDER BY number") == [
        (1, "closed"), (2, "closed"),
    ]  # fmt: skip
    assert talk.site.ask("db", "verify").code == 0


def test_and_has_no_fresh_attempt_where_another_payment_stands(talk: Talk) -> None:
    both = {"toolCalls": [*PAY["toolCalls"], {"name": "more", "input": {"args": ["-c", "echo more >> out/ledger"]}}]}
    talk.run(shells(REFUND, pay="at_most_once", more="at_most_once"), [both, LOST])
    undo_payment(talk)
    found_answer(talk)
    assert talk.site.ask("resume", "@latest").code == 4
    error, stands = talk.error(), str(scalar(talk.site.store, NEWEST, "tool.more"))
    assert (error["code"], error["details"]) == ("not_repeatable", {"effectIds": [stands]})
    assert sorted(paid(talk)) == ["more", "paid", "refund"]


def test_a_conversation_that_pauses_does_not_go_on_over_what_was_undone(talk: Talk) -> None:
    waits = "echo refund >> out/ledger; until [ -e out/go ]; do sleep 0.05; done"
    value = shells(pay="at_most_once", refund="idempotent")
    value["spec"]["tools"]["refund"]["timeoutSeconds"] = 100
    write_script(talk.folder, [PAY, {"toolCalls": [{"name": "refund", "input": {"args": ["-c", waits]}}]}, DONE])
    process = talk.site.start("run", talk.site.write("flow.yaml", value))
    ledger = talk.folder / "out" / "ledger"
    talk.site.wait_for(lambda: ledger.exists() and "refund" in paid(talk), "it is undone")
    run_id = talk.site.only_run()
    assert talk.site.ask("pause", str(run_id)).code == 0
    (talk.folder / "out" / "go").touch()
    talk.site.wait_for(lambda: process.poll() is not None, "it pauses")
    undo_payment(talk, by="tool.refund")
    assert talk.site.ask("resume", str(run_id)).code == 0
    assert paid(talk) == ["paid", "refund"] * 2, "a fresh attempt, from the beginning"
    assert asked(talk.folder) == {1: 2, 2: 2, 3: 1}


HANGS = "echo paid >> out/ledger; [ -e out/go ] || exec sleep 60"
"""A payment that is made at once, but whose end nobody sees."""


def lost_payment(talk: Talk, *before: dict[str, Any], **tools: str) -> str:
    """The payment is in doubt, a refund came after it, and then somebody has found out that it was made."""
    pay = {"toolCalls": [*before, {"name": "pay", "input": {"args": ["-c", HANGS]}}]}
    answer = talk.run(shells(REFUND, pay="at_most_once", **tools), [pay, DONE])
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    payment = uncertain(talk)
    (talk.folder / "given.json").write_text('{"exitCode": 0}', encoding="utf-8")
    say(talk, payment, "applied", "--result-file", "given.json")
    (talk.folder / "out" / "go").touch()
    return payment


def test_a_call_that_was_in_doubt_and_then_undone_gets_a_fresh_attempt(talk: Talk) -> None:
    payment = lost_payment(talk)
    assert undo_payment(talk) == payment
    assert talk.site.ask("effects", "list", "--uncertain").data["effects"] == []
    assert talk.site.ask("resume", "@latest").code == 0
    assert paid(talk) == ["paid", "refund", "paid"]
    assert asked(talk.folder) == {1: 2, 2: 1}
    attempts = "SELECT number, state, outcome FROM attempts WHERE task_id = 'ask' ORDER BY number"
    assert rows(talk.site.store, attempts) == [(1, "closed", "uncertain"), (2, "closed", "succeeded")]


def test_and_no_fresh_attempt_where_another_call_stands_that_must_not_be_repeated(talk: Talk) -> None:
    lost_payment(talk, {"name": "more", "input": {"args": ["-c", "echo more >> out/ledger"]}}, more="at_most_once")
    undo_payment(talk)
    assert talk.site.ask("resume", "@latest").code == 4
    error, stands = talk.error(), str(scalar(talk.site.store, NEWEST, "tool.more"))
    assert (error["code"], error["details"]["effectIds"]) == ("not_repeatable", [stands])
    assert paid(talk) == ["more", "paid", "refund"]
    assert asked(talk.folder) == {1: 1}


def test_a_call_that_was_found_to_have_happened_counts_with_all_that_it_had_reserved(talk: Talk) -> None:
    """How much it has printed nobody knows, so the whole of its reservation is used, as for a plain command."""
    value = shells(pay="at_most_once")
    budgets = {"maxToolCalls": 5, "maxProcessOutputBytes": 5000}
    value["spec"]["runtime"] = {"budgets": budgets}
    value["spec"]["actions"]["pay"]["combinedOutputLimitBytes"] = 100
    pay = {"toolCalls": [{"name": "pay", "input": {"args": ["-c", HANGS]}}]}
    assert talk.run(value, [pay, DONE]).code == 3
    kinds = ("toolCalls", "processOutputBytes")
    before = talk.budget()
    assert [before["usage"].get(kind, 0) for kind in kinds] == [0, 0]
    assert [before["reserved"][kind] for kind in kinds] == [1, 100]
    (talk.folder / "given.json").write_text('{"exitCode": 0, "stdout": "short"}', encoding="utf-8")
    say(talk, uncertain(talk), "applied", "--result-file", "given.json")
    for _ in range(2):
        found = talk.budget()
        assert [found["usage"][kind] for kind in kinds] == [1, 100]
        assert [found["reserved"][kind] for kind in kinds] == [0, 0]
        talk.site.ask("resume", "@latest")
    assert talk.site.run(str(talk.site.only_run())).state == "succeeded"


def test_a_conclusion_about_the_payment_itself_leads_on(talk: Talk) -> None:
    """What did not happen bars nothing; what was found to have happened does, like what was confirmed."""
    slow = {"toolCalls": [{"name": "pay", "input": {"args": ["-c", "echo paid >> out/ledger; exec sleep 60"]}}]}
    talk.run(shells(pay="at_most_once"), [slow, LOST])
    assert say(talk, uncertain(talk), "not-applied", "--approved").data["standingEffects"] == []
    answer = talk.site.ask("resume", "@latest")
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    payment = uncertain(talk)
    (talk.folder / "given.json").write_text('{"exitCode": 0}', encoding="utf-8")
    assert say(talk, payment, "applied", "--result-file", "given.json", "--approved").data["standingEffects"] == []
    answer = talk.site.ask("resume", "@latest")
    assert (answer.code, answer.data["reason"]) == (3, "uncertain_effect")
    assert say(talk, uncertain(talk), "not-applied").data["standingEffects"] == [payment]
    assert talk.site.ask("resume", "@latest").code == 4
    assert paid(talk) == ["paid", "paid"], "once for each that a person has allowed"


def test_a_call_that_may_be_repeated_takes_no_payment_with_it(talk: Talk) -> None:
    """A command that was ended in the middle is started again by the retry policy, but not with all before it."""
    value = shells(pay="at_most_once", again="idempotent")
    value["spec"]["tasks"][0]["retry"] = {"maxAttempts": 3, "backoffMs": 0}
    answer = talk.run(value, [PAY, AGAIN, DONE])
    assert (answer.code, answer.data["state"]) == (4, "failed")
    assert paid(talk) == ["paid", "again"]
    assert talk.error()["retryable"] is False


def test_one_inverse_action_for_several_attempts_is_told(talk: Talk) -> None:
    value = shells(pay="at_most_once", retry_safe=True)
    refund = {"uses": "action:other", "with": {"args": ["-c", "echo refund >> out/ledger"]}}
    value["spec"]["tasks"][0] |= {"retry": {"maxAttempts": 3, "backoffMs": 0}, "compensate": refund}
    busy = {"fail": {"status": 503}, "times": 1, "text": "done"}
    assert talk.run(value, [PAY, busy]).code == 0
    assert paid(talk) == ["paid", "paid"]
    plan = talk.site.ask("compensate", "@latest", "--plan").data
    assert len(plan["tasks"][0]["sourceEffectIds"]) == 2
    [warning] = plan["warnings"]
    assert warning.startswith("one inverse action of ask stands for 2 effects of 2 attempts")
