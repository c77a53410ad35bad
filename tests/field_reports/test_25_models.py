"""Report 25 for agents: a model that asks for its tool for ever is stopped at the limit, and so is what it costs.

https://github.com/agno-agi/agno/issues/8304 · https://github.com/anthropics/claude-code/issues/30150
"""

from __future__ import annotations

from typing import Any

import pytest
from support.field import Field
from support.field_models import action_tool, ask, models
from support.model_server import ModelServer, Play

ENDLESS = {"maxTurns": 64, "maxToolCalls": 10}


def document(field: Field, url: str, task: dict[str, Any], agent: dict[str, Any], **spec: Any) -> str:
    action = {
        "kind": "builtin.shell.exec", "command": str(field.tick), "idempotency": "idempotent",
        "with": {"args": [str(field.ledger), "note", "0"]},
    }  # fmt: skip
    more = models(url, tools={"note": action_tool("note", "idempotent")}, agent=agent)
    return field.workflow("endless", [task], actions={"note": action}, **spec, **more)


def calls(count: int) -> Play:
    return Play(text="", calls=[(f"c{number}", "note", "{}") for number in range(count)])


@pytest.mark.parametrize(
    ("each", "agent", "code", "noted", "asked"),
    [
        pytest.param(1, ENDLESS, "tool_call_limit", 10, 11, id="one by one"),
        pytest.param(3, ENDLESS, "tool_call_limit", 10, 4, id="three at once"),
        pytest.param(64, ENDLESS, "tool_call_limit", 10, 1, id="all at once"),
        pytest.param(1, {"maxTurns": 5, "maxToolCalls": 64}, "turn_limit", 4, 5, id="turns"),
    ],
)
def test_a_model_that_never_comes_to_an_end(
    field: Field, server: ModelServer, each: int, agent: dict[str, Any], code: str, noted: int, asked: int
) -> None:
    """Exactly the calls that are allowed, then the task ends failed; its retry policy does not begin it anew."""
    server.plays(calls(each))
    task = ask("talk", retry={"maxAttempts": 3, "backoffMs": 0})
    result = field.json("run", document(field, server.url, task, agent))
    assert (result.code, result.data["state"], result.data["error"]["code"]) == (4, "failed", code)
    assert (len(field.lines()), server.count) == (noted, asked)
    limit = agent["maxToolCalls"] if code == "tool_call_limit" else agent["maxTurns"]
    assert str(limit) in result.data["error"]["message"]
    assert field.rows("SELECT state, attempt FROM tasks") == [("failed", 1)]
    field.check_clean_end()


@pytest.mark.parametrize("budget", ["maxToolCalls", "maxTurns", "maxProviderRequests"])
def test_a_budget_of_the_run_holds_for_all_its_agents_together(field: Field, server: ModelServer, budget: str) -> None:
    """Four that never end, at once: together they get ten, and nothing is sent beyond it."""
    server.plays(calls(1))
    task = ask("talk", foreach={"items": [1, 2, 3, 4]}, failure="continue")
    runtime = {"maxConcurrency": 4, "budgets": {budget: 10}}
    result = field.json("run", document(field, server.url, task, {"maxTurns": 64}, runtime=runtime), "--workers", "4")
    assert (result.code, result.data["state"], result.data["reason"]) == (4, "failed", "budget_exceeded")
    counted = len(field.lines()) if budget == "maxToolCalls" else server.count
    assert counted == 10
    assert server.count <= 14
    field.check_clean_end()


def test_a_loop_around_an_agent_that_never_ends(field: Field, server: ModelServer) -> None:
    """Five iterations of an agent that calls its tool once, then the loop fails closed."""
    server.plays(*[play for _ in range(5) for play in (calls(1), Play(text="again"))])
    task = ask("talk", loop={"maxIterations": 5, "while": "${{ vars.loopIndex < 99 }}"})
    result = field.json("run", document(field, server.url, task, ENDLESS))
    assert (result.code, result.data["error"]["code"]) == (4, "loop_limit")
    assert (len(field.lines()), server.count) == (5, 10)
    field.check_clean_end()
