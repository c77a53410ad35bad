"""Field report 8: a task that kills its worker comes back for ever."""

from __future__ import annotations

import pytest
from support.field import Field
from support.field_models import action_tool, ask, models
from support.model_server import Play, model_server

GOOD = 20
POISON = 'printf "%s bad %s\\n" "$AGENTCTL_EFFECT_ID" 0 >> "$0"; kill -9 "$PPID"; sleep 60'


def _poison(field: Field, idempotency: str) -> str:
    return field.workflow(
        "poison",
        [
            {
                "id": "bad",
                "uses": "action:poison",
                "failure": "continue",
                "retry": {"maxAttempts": 3},
                "with": {"args": ["-c", POISON, str(field.ledger)]},
            },
            field.tick_fan("good", GOOD, 0.05, idempotent=True),
        ],
        actions={"poison": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency}},
    )


@pytest.mark.timeout(300)
def test_a_task_that_kills_its_worker_ends_after_three_deliveries(field: Field) -> None:
    """Every delivery is counted when it is claimed; the retry policy does not start it anew; the good ones succeed."""
    pool = field.pool(4)
    run_id = field.submit(_poison(field, "idempotent"))
    outcome = field.json("wait", run_id, limit=120)
    assert (outcome.code, outcome.data["state"], outcome.data["reason"]) == (4, "failed", "worker_lost")
    assert field.labels().count("bad") == 3
    tasks = field.tasks(run_id)
    assert tasks.pop("bad") == ("failed", 1, 3)
    assert set(tasks.values()) == {("succeeded", 1, 1)}
    assert len(tasks) == GOOD
    inspected = field.json("inspect", run_id).data
    [bad] = [task for task in inspected["tasks"] if task["taskId"] == "bad"]
    assert bad["error"]["code"] == "worker_lost"
    sent = "SELECT status, dispatches, superseded FROM effects WHERE task_id = 'bad'"
    assert field.rows(sent) == [("uncertain", 3, 1)], "sent three times, never confirmed, and nobody is asked about it"
    assert field.json("effects", "list", "--uncertain").data["effects"] == []
    assert {line.effect for line in field.lines() if line.label == "bad"} == {inspected["effects"][0]["request"]["id"]}
    assert field.json("status", run_id).data["uncertainEffects"] == []
    workers = field.json("workers", "list").data["workers"]
    assert sum(worker["state"] == "dead" for worker in workers) == 3
    assert len(workers) <= 4 + 3
    # A retry begins anew, executes that one task only, and stops at three again.
    again = field.json("retry", "poison.yaml", run_id, "--failed", limit=120)
    assert (again.code, again.data["state"], again.data["reason"]) == (4, "failed", "worker_lost")
    assert field.labels().count("bad") == 6
    assert len(field.labels()) == 6 + GOOD
    assert field.tasks(again.data["runId"]) == {"bad": ("failed", 1, 3)}, "the others were reused"
    workers = field.json("workers", "list").data["workers"]
    assert sum(worker["state"] == "dead" for worker in workers) == 6
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("idempotency", ["idempotent", "at_most_once"])
def test_a_tool_that_kills_its_worker(field: Field, idempotency: str) -> None:
    """The turn before it is asked for once. What must not be repeated is carried out once; what may be is so bounded:
    three lost deliveries that have confirmed nothing, after the one that has confirmed the turn."""
    action = {
        "kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency,
        "with": {"args": ["-c", POISON, str(field.ledger)]},
    }  # fmt: skip
    with model_server() as server:
        server.plays(Play(text="", calls=[("c", "kill", "{}")]), Play(text="never"))
        tasks = [ask("talk", retry={"maxAttempts": 3, "backoffMs": 0})]
        spec = models(server.url, tools={"kill": action_tool("poison", idempotency)})
        file = field.workflow("tool", tasks, actions={"poison": action}, **spec)
        outcome = field.json("run", file, "--workers", "2", limit=120)
        assert server.count == 1
    [(state, attempt, deliveries)] = field.tasks(outcome.data["runId"]).values()
    if idempotency == "idempotent":
        assert (outcome.code, outcome.data["reason"]) == (4, "worker_lost")
        assert (state, attempt, deliveries) == ("failed", 1, 1 + 3)
    else:
        assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
        assert (state, attempt, deliveries) == ("waiting_for_effect", 1, 1)
    assert field.labels() == ["bad"] * deliveries
    field.check_clean_end(uncertain=idempotency != "idempotent")


@pytest.mark.timeout(300)
def test_one_that_must_not_be_repeated_does_it_once(field: Field) -> None:
    """The same with an action that is not idempotent, in a foreground run with a pool of its own."""
    outcome = field.json("run", _poison(field, "at_most_once"), "--workers", "4", limit=120)
    assert (outcome.code, outcome.data["state"], outcome.data["reason"]) == (3, "paused", "uncertain_effect")
    run_id = outcome.data["runId"]
    assert field.labels().count("bad") == 1
    tasks = field.tasks(run_id)
    assert tasks.pop("bad") == ("waiting_for_effect", 1, 1)
    assert set(tasks.values()) == {("succeeded", 1, 1)}
    # Resuming does not execute it, either.
    again = field.json("resume", run_id, limit=120)
    assert (again.code, again.data["reason"]) == (3, "uncertain_effect")
    assert field.labels().count("bad") == 1
    field.check_clean_end(uncertain=True)
