"""`--plan` of fork, replay and resume: what would be done, and nothing is."""

from __future__ import annotations

import json
import sqlite3

import pytest
from support.recovery import Place
from support.undo import Undo


@pytest.fixture
def undo(place: Place) -> Undo:
    return Undo(place)


def content(place: Place) -> list[str]:
    """Everything that stands in the database, but who has opened it."""
    connection = sqlite3.connect(place.database)
    try:
        return [line for line in connection.iterdump() if '"processes"' not in line]
    finally:
        connection.close()


def test_the_plan_of_a_fork(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.task("b", uses="again"), undo.end("a", "b")])
    before = content(place)
    result = place.json("fork", source, "--plan")
    assert (result.code, json.loads(result.out)["kind"]) == (0, "ForkPlan"), result.err
    plan = result.data
    assert (plan["sourceRunId"], plan["tasks"]) == (source, ["a", "b", "end"])
    assert plan["freshEffectSummary"] == {"providerTasks": 0, "actionTasks": 3, "declaredEffects": 2}
    assert plan["approvalSummary"] == []
    # Only what is not safe to do twice is worth a warning.
    assert plan["repeatedEffects"] == [{"effectId": undo.effect(source, "a"), "taskId": "a", "status": "succeeded"}]
    told = place("fork", source, "--plan")
    assert (told.code, "done once more" in told.out) == (0, True)
    assert content(place) == before
    assert undo.notes() in (["a", "b"], ["b", "a"])


@pytest.mark.parametrize(
    ("concluded", "options", "repeats"),
    [
        pytest.param("applied", ("--result-file", "result.json"), True, id="it has happened"),
        pytest.param("not-applied", (), False, id="it has not"),
    ],
)
def test_the_plan_of_a_fork_knows_what_a_person_has_concluded(
    place: Place, concluded: str, options: tuple[str, ...], repeats: bool
) -> None:
    slow = {"id": "t", "uses": "action:slow", "timeoutSeconds": 1, "with": {"args": ["60"]}}
    actions = {"slow": {"kind": "builtin.shell.exec", "command": "sleep", "idempotency": "at_most_once"}}
    source = place.submit(place.workflow("slow", [slow], actions=actions, programs=["sleep"]))
    assert place.json("resume", source).code == 3
    [[effect]] = place.rows("SELECT effect_id FROM effects")
    known = {"effectId": effect, "taskId": "t", "status": "uncertain"}
    assert place.json("fork", source, "--plan").data["repeatedEffects"] == [known]
    reason = ("--reason", "seen", "--approved")
    place.text("result.json", "{}")
    assert place.json("effects", "reconcile", effect, "--status", concluded, *reason, *options).code == 0
    assert place.json("cancel", source).code == 0
    repeated = place.json("fork", source, "--plan").data["repeatedEffects"]
    assert repeated == ([{**known, "reconciliation": concluded}] if repeats else [])
    shown = place("fork", source, "--plan").out
    assert ("done once more" in shown) == repeats
    assert ("t (uncertain, reconciled as applied)" in shown) == repeats


def test_the_plan_of_a_replay(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.end("a")])
    before = content(place)
    result = place.json("replay", source, "--plan")
    assert (result.code, json.loads(result.out)["kind"]) == (0, "ReplayPlan"), result.err
    plan = result.data
    assert (plan["state"], plan["exitCode"], plan["executedTasks"]) == ("failed", 4, [])
    assert plan["taskCounts"] == {"succeeded": 1, "failed": 1}
    assert "nothing is executed" in place("replay", source, "--plan").out
    assert content(place) == before
    place.forge_task(source, "a", output_json="{}")
    damaged = place.json("replay", source, "--plan")
    assert (damaged.code, damaged.error["code"]) == (5, "corrupt")


def test_the_plan_of_a_resume(place: Place, undo: Undo) -> None:
    file = undo.write([undo.task("a"), undo.task("b", needs=["a"])], policy={"approval": "always"})
    paused = place.json("run", file)
    assert paused.code == 3
    source = paused.data["runId"]
    before = content(place)
    result = place.json("resume", source, "--plan")
    assert (result.code, json.loads(result.out)["kind"]) == (0, "ResumePlan"), result.err
    plan = result.data
    assert (plan["state"], plan["settledTasks"]) == ("paused", [])
    assert plan["openTasks"] == [
        {"taskId": "a", "state": "waiting_for_approval"},
        {"taskId": "b", "state": "pending"},
    ]
    assert len(plan["pendingApprovals"]) == 1
    assert "waits for the answer of a person" in place("resume", source, "--plan").out
    assert content(place) == before
    assert place.json("cancel", source).code == 0
    ended = place.json("resume", source, "--plan")
    assert (ended.code, ended.error["code"]) == (4, "already_terminal")
