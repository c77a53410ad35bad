"""Budgets of models, held by eight workers to the last unit; the scripted model counts what arrives (contract 6).

https://github.com/garrytan/gbrain/issues/4365 · https://github.com/use-agent-os/agent-os/issues/823
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.agents import READ, asked, document, write_script
from support.rows import rows, scalar
from support.scale import repeats
from support.site import Site

TASKS, WORKERS = 100, 8
PRICE = {"inputMicrousdPerMillionTokens": 1, "outputMicrousdPerMillionTokens": 1_000_000}
PRICING = {"version": "2026-11", "models": {"model/m": PRICE}}
FAN = [
    {
        "id": "ask",
        "uses": "agent:helper",
        "failure": "continue",
        "foreach": {"items": list(range(TASKS)), "maxItems": TASKS},
        "with": {"prompt": "number ${{ vars.item }}"},
    }
]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    try:
        yield made
        assert set(made.stop()) <= {0, 3}
        made.assert_clean()
        assert made.ask("db", "verify").data["problems"] == []
    finally:
        made.close()


def flow(budgets: dict[str, int], *, concurrency: int = WORKERS, **agent: Any) -> dict[str, Any]:
    runtime = {"maxConcurrency": concurrency, "budgets": budgets, "pricing": PRICING}
    return document(FAN, runtime=runtime, agent={"maxOutputTokens": 10, **agent})


def play(site: Site, file: Path) -> str:
    """One run to its end, counted from nothing."""
    (site.folder / "out" / "asked").unlink(missing_ok=True)
    run_id = site.submit(file)
    run = site.wait_for_end(run_id, seconds=120)
    assert (run.state, run.reason) == ("failed", "budget_exceeded"), site.report()
    return run_id


def judge(site: Site, run_id: str, expected: int, dimension: str) -> None:
    """Exactly so many requests arrived, were dispatched, and succeeded."""
    assert asked(site.folder) == {1: expected}
    assert scalar(site.store, "SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id) == expected
    states = dict(rows(site.store, "SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id))
    assert states["succeeded"] == expected
    assert set(states) <= {"succeeded", "failed", "cancelled", "skipped"}
    told = json.loads(scalar(site.store, "SELECT exceeded_json FROM run_budgets WHERE run_id = ?", run_id))
    assert told["dimension"] == dimension
    for limit, used, reserved in rows(
        site.store, "SELECT limit_units, used, reserved FROM budget_lines WHERE run_id = ? AND limit_units > 0", run_id
    ):
        assert used <= limit
        assert reserved == 0


@pytest.mark.slow
def test_ten_of_a_hundred_requests(site: Site) -> None:
    write_script(site.folder, [{"text": "yes", "delayMs": 10}])
    site.start("workers", "start", "-n", str(WORKERS), "--drain-seconds", "10")
    file = site.write("flow.yaml", flow({"maxProviderRequests": 10}))
    for _ in range(repeats(50, at_least=2)):
        judge(site, play(site, file), 10, "providerRequests")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budgets", "usage", "expected", "dimension"),
    [
        ({"maxOutputTokens": 100}, {"outputTokens": 10}, 10, "outputTokens"),
        # What an answer has not used is free for others: they wait for it instead of being denied.
        ({"maxOutputTokens": 40}, {"outputTokens": 1}, 31, "outputTokens"),
        ({"maxCostMicrousd": 110}, {"inputTokens": 1, "outputTokens": 10}, 10, "costMicrousd"),
        ({"maxCostMicrousd": 110}, {"costMicrousd": 11}, 10, "costMicrousd"),
        ({"maxTurns": 12}, {}, 12, "turns"),
    ],
)
def test_tokens_turns_and_cost(
    site: Site, budgets: dict[str, int], usage: dict[str, int], expected: int, dimension: str
) -> None:
    write_script(site.folder, [{"text": "yes", "usage": usage}])
    site.start("workers", "start", "-n", str(WORKERS), "--drain-seconds", "10")
    file = site.write("flow.yaml", flow(budgets))
    for _ in range(repeats(5)):
        judge(site, play(site, file), expected, dimension)


def test_an_answer_that_overshoots_is_kept_and_the_last_one(site: Site) -> None:
    """It cannot be undone: it is recorded and paid for, its task fails, and nothing more is sent."""
    write_script(site.folder, [{"text": "a lot", "usage": {"outputTokens": 50}}])
    answer = site.ask("run", site.write("flow.yaml", flow({"maxOutputTokens": 30}, concurrency=1)))
    assert (answer.code, answer.data["reason"]) == (4, "budget_exceeded")
    assert asked(site.folder) == {1: 1}
    found = site.ask("inspect", "@latest").data
    assert found["effects"][0]["status"] == "succeeded"
    assert found["effects"][0]["result"]["text"] == "a lot"
    assert found["budget"]["usage"]["outputTokens"] == 50
    assert found["budget"]["exceeded"] == {"dimension": "outputTokens", "limit": 30, "attempted": 50}
    assert [event["eventType"] for event in found["audit"] if "exceeded" in event["eventType"]] == [
        "budget.reconciled_exceeded"
    ]


def test_an_overshoot_in_the_middle_of_a_conversation_dispatches_no_tool(site: Site) -> None:
    (site.folder / "log.txt").write_text("x")
    call = {"toolCalls": [{"name": "read", "input": {"path": "log.txt"}}], "usage": {"outputTokens": 50}}
    write_script(site.folder, [call, {"text": "done"}])
    value = document(
        [{"id": "ask", "uses": "agent:helper", "with": {"prompt": "x"}}],
        tools={"read": READ},
        agent={"maxOutputTokens": 10},
        runtime={"budgets": {"maxOutputTokens": 30}},
    )
    answer = site.ask("run", site.write("flow.yaml", value))
    assert (answer.code, answer.data["reason"]) == (4, "budget_exceeded")
    assert rows(site.store, "SELECT operation, status FROM effects") == [("model", "succeeded")]
    assert asked(site.folder) == {1: 1}


@pytest.mark.parametrize("approval", ["policy", "always"])
def test_an_overshoot_dispatches_no_tool_though_its_worker_died_with_the_news(site: Site, approval: str) -> None:
    """The settlement is recorded, and the attempt has not been ended: whoever takes over learns of it all the same."""
    (site.folder / "log.txt").write_text("x")
    call = {"toolCalls": [{"name": "read", "input": {"path": "log.txt"}}], "usage": {"outputTokens": 50}}
    write_script(site.folder, [call, {"text": "done"}])
    value = document(
        [{"id": "ask", "uses": "agent:helper", "with": {"prompt": "x"}}],
        tools={"read": {**READ, "approval": approval}},
        agent={"maxOutputTokens": 10},
        runtime={"budgets": {"maxOutputTokens": 30}},
    )
    answer = site.ask("run", site.write("flow.yaml", value), fault="after_effect_start:2")
    assert scalar(site.store, "SELECT delivery FROM attempts") == 2
    assert (answer.code, answer.data["reason"]) == (4, "budget_exceeded")
    assert scalar(site.store, "SELECT COUNT(*) FROM effects WHERE operation <> 'model' AND status <> 'requested'") == 0
    assert asked(site.folder) == {1: 1}


def test_tool_calls_are_reserved_before_the_call(site: Site) -> None:
    (site.folder / "log.txt").write_text("x")
    calls = [{"name": "read", "input": {"path": "log.txt"}} for _ in range(3)]
    write_script(site.folder, [{"toolCalls": calls}, {"text": "done"}])
    value = document(
        [{"id": "ask", "uses": "agent:helper", "with": {"prompt": "x"}}],
        tools={"read": READ},
        runtime={"budgets": {"maxToolCalls": 2}},
    )
    answer = site.ask("run", site.write("flow.yaml", value))
    assert (answer.code, answer.data["reason"]) == (4, "budget_exceeded")
    found = rows(site.store, "SELECT operation, status FROM effects ORDER BY ordinal")
    assert found == [
        ("model", "succeeded"), ("tool.read", "succeeded"), ("tool.read", "succeeded"), ("tool.read", "requested"),
    ]  # fmt: skip


def test_a_first_request_that_can_never_fit_is_denied_unsent(site: Site) -> None:
    write_script(site.folder, [{"text": "yes"}])
    answer = site.ask("run", site.write("flow.yaml", flow({"maxInputTokens": 256}, concurrency=1)))
    assert (answer.code, answer.data["reason"]) == (4, "budget_exceeded")
    assert asked(site.folder) == {}
    assert rows(site.store, "SELECT DISTINCT status FROM effects") == [("requested",)]
