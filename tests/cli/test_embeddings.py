"""Long-term memory whose entries a service embeds: runs, checks, budgets, recovery, and the verbs about memory."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.model_server import LENGTH, ModelServer, Play, closed_port, model_server

WORKFLOW = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {{name: notes}}
spec:
  policy: {{approval: never, networkAllowlist: [127.0.0.1], network: {{allowPrivate: true}}}}
  providers:
    vectors: {{kind: openai_compatible, endpoint: "{url}"}}
  memory:
    longTerm: {{namespace: notes, embedding: {{provider: vectors, model: small, dimensions: {length}}}}}
  runtime: {runtime}
  actions:
    keep: {{kind: builtin.long_term_memory.write}}
    find: {{kind: builtin.long_term_memory.search}}
    say: {{kind: builtin.assign}}
  tasks:
    - {{id: first, uses: action:keep, with: {{key: one, value: a cab}}}}
    - {{id: second, uses: action:keep, needs: [first], with: {{key: two, value: feed}}}}
    - id: look
      uses: action:find
      needs: [second]
      retry: {{maxAttempts: 2, backoffMs: 0}}
      with: {{query: abc, mode: vector}}
    - {{id: end, uses: action:say, needs: [look], with: {{value: "${{{{ tasks.look.output.count }}}}"}}}}
  outputs: {{found: "${{{{ tasks.look.output.results }}}}"}}
"""


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as made:
        yield made


def write(cli: Any, url: str, *, runtime: str = "{}", name: str = "notes.yaml") -> str:
    cli.write(name, WORKFLOW.format(url=url, length=LENGTH, runtime=runtime))
    return name


def usage(cli: Any, run_id: str) -> dict[str, int]:
    return {name: count for name, count in cli.json("inspect", run_id).data["budget"]["usage"].items() if count}


def test_a_run_writes_and_finds_by_the_vectors_of_a_service(cli: Any, server: ModelServer) -> None:
    done = cli.json("run", write(cli, server.url))
    assert done.code == 0, done
    [best] = done.data["output"]["found"]  # nothing of "feed" points to where "abc" does
    assert (best["record"]["key"], best["textScoreMillionths"]) == ("one", 0)
    assert best["vectorScoreMillionths"] == pytest.approx(942_809, abs=1)
    assert (best["record"]["embeddingProvider"], best["record"]["embeddingDimensions"]) == ("vectors:small", LENGTH)
    assert [seen.body["input"] for seen in server.seen] == [["a cab"], ["feed"], ["abc"]]
    counted = {"providerRequests": 3, "inputTokens": 15, "unpricedProviderRequests": 3}
    run_id = done.data["runId"]
    assert usage(cli, run_id).items() >= counted.items()
    inputs = [e["request"]["input"]["embedding"] for e in cli.json("inspect", run_id).data["effects"]]
    assert inputs == [{"provider": "vectors:small", "dimensions": LENGTH}] * 3

    again = cli.json("replay", run_id)
    assert (again.code, again.data["output"], server.count) == (0, done.data["output"], 3)  # nobody was asked


def test_a_check_asks_nobody(cli: Any, server: ModelServer) -> None:
    looked = cli.json("run", write(cli, server.url), "--check")
    assert (looked.code, server.count) == (0, 0)
    assert cli.json("plan", "notes.yaml").data["requirements"]["providers"] == ["vectors"]


def test_a_budget_holds_before_the_service_is_asked(cli: Any, server: ModelServer) -> None:
    price = "{inputMicrousdPerMillionTokens: 2000000, outputMicrousdPerMillionTokens: 9}"
    runtime = f"{{budgets: {{maxProviderRequests: 2}}, pricing: {{version: v1, models: {{vectors/small: {price}}}}}}}"
    done = cli.json("run", write(cli, server.url, runtime=runtime))
    assert (done.code, server.count) == (4, 2)
    counted = usage(cli, done.data["runId"])
    assert (counted["providerRequests"], counted["costMicrousd"]) == (2, 20)
    assert "unpricedProviderRequests" not in counted


def test_what_the_service_refuses_fails_the_task_and_stores_nothing(cli: Any, server: ModelServer) -> None:
    server.plays(Play(status=400, error="too long"))
    done = cli.json("run", write(cli, server.url))
    assert (done.code, server.count) == (4, 1)
    shown = cli.json("inspect", done.data["runId"]).data
    [effect] = shown["effects"]
    assert (effect["status"], effect["error"]["code"]) == ("failed", "provider_http_error")
    assert "too long" in effect["error"]["message"]
    assert cli("memory", "get", "one", "--namespace", "notes").code == 5


@pytest.mark.parametrize("play", [Play(status=503), Play(drop=True)], ids=["busy", "lost"])
def test_a_search_may_ask_again(cli: Any, server: ModelServer, play: Play) -> None:
    """Nothing was written when the answer did not come, so the retry policy goes on."""
    server.plays(Play(), Play(), play, Play())
    done = cli.json("run", write(cli, server.url))
    assert (done.code, server.count, len(done.data["output"]["found"])) == (0, 4, 1)


def test_a_cancelled_run_stores_nothing_of_what_it_was_about_to(cli: Any, server: ModelServer) -> None:
    server.plays(Play(gate=threading.Event()))
    process = cli.start("run", write(cli, server.url), "--output", "json")
    server.wait_for(1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out)["data"]["state"], server.count) == (130, "cancelled", 1)
    assert server.gone.wait(60)
    assert cli("memory", "get", "one", "--namespace", "notes").code == 5


def test_who_follows_a_dead_worker_asks_again(cli: Any, server: ModelServer) -> None:
    """A write is keyed, and a search only looks; what the lost request may have cost stays charged."""
    server.plays(Play(gate=threading.Event()), Play())
    process = cli.start("run", write(cli, server.url), "--output", "json")
    server.wait_for(1)
    [busy] = [worker for worker in cli.json("workers", "list").data["workers"] if worker["state"] == "busy"]
    os.kill(busy["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    done = json.loads(out)["data"]
    assert (process.returncode, server.count, len(done["output"]["found"])) == (0, 4, 1)
    first = cli.json("inspect", done["runId"]).data["effects"][0]
    assert (first["status"], first["request"]["taskId"]) == ("succeeded", "first")
    counted = usage(cli, done["runId"])
    assert (counted["providerRequests"], counted["inputTokens"]) == (4, 15 + len("a cab") + 256)


def test_what_is_missing_is_told_before_the_run_exists(cli: Any, server: ModelServer) -> None:
    write(cli, server.url)
    offline = cli("--offline", "run", "notes.yaml")
    assert (offline.code, "the provider 'vectors'" in offline.err) == (6, True)
    text = (cli.folder / "notes.yaml").read_text()
    cli.write("denied.yaml", text.replace("networkAllowlist: [127.0.0.1]", "networkAllowlist: [example.org]"))
    denied = cli("run", "denied.yaml")
    assert (denied.code, "networkAllowlist" in denied.err) == (3, True)
    keyed = text.replace("kind: openai_compatible", "kind: openai")
    cli.write("keyed.yaml", keyed)
    missing = cli("run", "keyed.yaml", env={"OPENAI_API_KEY": ""})
    assert (missing.code, "OPENAI_API_KEY" in missing.err) == (6, True)
    assert server.count == 0
    assert not cli.database.exists()


def test_the_verbs_embed_as_a_workflow_says(cli: Any, server: ModelServer) -> None:
    file = write(cli, server.url)
    named = ("--namespace", "notes")
    put = cli.json("memory", "put", "one", "a cab", *named, "--workflow", file)
    assert (put.code, put.data["embeddingProvider"]) == (0, "vectors:small")
    found = cli.json("memory", "search", "abc", "--mode", "vector", *named, "--workflow", file)
    assert [result["record"]["key"] for result in found.data["results"]] == ["one"]
    assert server.count == 2
    assert cli.json("memory", "search", "cab", *named).data["count"] == 1  # words need no vector

    for verb in (("put", "two", "x"), ("search", "x", "--mode", "hybrid")):
        refused = cli("memory", *verb, *named)
        assert (refused.code, "vectors:small" in refused.err, "--workflow" in refused.err) == (2, True, True)
    both = cli("memory", "put", "two", "x", "--dimensions", "8", "--workflow", file)
    assert (both.code, "--dimensions" in both.err) == (2, True)

    assert cli.json("memory", "reindex", *named).data["embeddingProvider"] == "local_hash"
    other = cli("memory", "search", "abc", "--mode", "vector", *named, "--workflow", file)
    assert (other.code, "--workflow FILE" in other.err) == (5, True)
    back = cli.json("memory", "reindex", *named, "--workflow", file)
    assert (back.code, back.data["entries"], back.data["embeddingProvider"]) == (0, 1, "vectors:small")


def test_verbs_say_what_keeps_the_service_from_embedding(cli: Any, server: ModelServer) -> None:
    file = write(cli, server.url)
    cli.json("memory", "put", "one", "a cab", "--namespace", "notes", "--workflow", file)
    before = cli.json("memory", "get", "one", "--namespace", "notes").data
    server.plays(Play(status=401, error="who are you"))
    for verb in (("put", "one", "b"), ("search", "x", "--mode", "vector"), ("reindex",)):
        failed = cli("memory", *verb, "--namespace", "notes", "--workflow", file)
        assert (failed.code, "who are you" in failed.err) == (6, True)
    dead = write(cli, f"http://127.0.0.1:{closed_port()}", name="dead.yaml")
    assert cli("memory", "put", "one", "b", "--namespace", "notes", "--workflow", dead).code == 6
    assert cli("--offline", "memory", "put", "one", "b", "--workflow", file).code == 6
    assert cli("memory", "put", "one", "b", "--workflow", "hello.yaml").code == 2
    assert cli("memory", "put", "one", "b", "--workflow", "none.yaml").code == 2
    assert cli.json("memory", "get", "one", "--namespace", "notes").data == before


def test_an_agent_may_search_with_a_service(cli: Any, server: ModelServer) -> None:
    cli.json("memory", "put", "one", "a cab", "--namespace", "notes", "--workflow", write(cli, server.url))
    text = (cli.folder / "notes.yaml").read_text()
    head = text[: text.index("  tasks:")]
    schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"query": {"type": "string"}, "mode": {"type": "string"}},
        "required": ["query", "mode"],
    }
    tool = {
        "kind": "action", "action": "find", "description": "Find notes.", "inputSchema": schema,
        "outputSchema": {"type": "object"}, "capability": "memory.search", "risk": "low", "effectClass": "observe",
        "idempotency": "keyed", "retrySafe": True, "timeoutSeconds": 60,
    }  # fmt: skip
    agent = {"provider": "model", "model": "m", "instructions": "Look.", "tools": ["search"],
             "providerOptions": {"toolInput": {"query": "abc", "mode": "vector"}, "finalText": "seen"}}  # fmt: skip
    head = head.replace("  providers:\n", "  providers:\n    model: {kind: fake}\n")
    rest = f"  tools: {json.dumps({'search': tool})}\n  agents: {json.dumps({'a': agent})}\n"
    cli.write("agent.yaml", head + rest + "  tasks: [{id: t, uses: 'agent:a', with: {prompt: hello}}]\n")
    done = cli.json("run", "agent.yaml")
    assert (done.code, server.count) == (0, 2), done.err
    shown = cli.json("inspect", done.data["runId"]).data
    found = next(e for e in shown["effects"] if e["request"]["operation"] == "tool.search")
    assert [result["record"]["key"] for result in found["result"]["results"]] == ["one"]
    assert usage(cli, done.data["runId"])["providerRequests"] == 3
