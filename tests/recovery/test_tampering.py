"""Columns that were changed behind the back of agentctl: `db verify` tells, and no verb takes anything from the run."""

from __future__ import annotations

import pytest
from support.recovery import Place

CHANGES = {
    "decision": "UPDATE tasks SET decision_json = '{\"skipped\":\"route\"}' WHERE task_id = 'maybe'",
    "error": (
        'UPDATE tasks SET error_json = \'{"code":"dependency_skipped","message":"so","retryable":true}\' '
        "WHERE task_id = 'bad'"
    ),
    "metadata version": "UPDATE tasks SET metadata_version = 0 WHERE task_id = 'bad'",
    "fingerprint": "UPDATE tasks SET definition_fingerprint = 'x' WHERE task_id = 'bad'",
    "end of a task": "UPDATE tasks SET ended_at = ended_at + 1 WHERE task_id = 'shape'",
    "idempotency": "UPDATE effects SET idempotency = 'idempotent' WHERE task_id = 'once'",
    "class": "UPDATE effects SET effect_class = 'observe' WHERE task_id = 'once'",
    "risk": "UPDATE effects SET risk = 'low' WHERE task_id = 'put'",
    "expected": "UPDATE effects SET expected_json = '{\"x\":1}' WHERE task_id = 'put'",
    "result": "UPDATE effects SET result_json = '{}' WHERE task_id = 'bad'",
    "error of an effect": "UPDATE effects SET error_json = '{}' WHERE task_id = 'once'",
    "notes": "UPDATE effects SET notes_json = '{}' WHERE task_id = 'once'",
    "request of an effect": "UPDATE effects SET requested_at = requested_at - 1 WHERE task_id = 'once'",
    "end of an effect": "UPDATE effects SET completed_at = completed_at + 1 WHERE task_id = 'once'",
    "start of an effect": "UPDATE effects SET started_at = started_at + 1 WHERE task_id = 'once'",
    "dispatches": "UPDATE effects SET dispatches = dispatches + 1 WHERE task_id = 'once'",
    "no dispatch": "UPDATE effects SET dispatches = 0 WHERE task_id = 'put'",
    "start of a task": "UPDATE tasks SET started_at = started_at - 1 WHERE task_id = 'once'",
    "a start of a task that had none": "UPDATE tasks SET started_at = ended_at WHERE task_id = 'maybe'",
    "superseded": "UPDATE effects SET superseded = 1 WHERE task_id = 'once'",
    "no effect": "DELETE FROM effects WHERE task_id = 'once'",
    "no attempt": "DELETE FROM attempts WHERE task_id = 'once'",
    "plan digest": "UPDATE runs SET plan_digest = 'x'",
    "mode": "UPDATE runs SET mode = 'fork'",
    "workspace": "UPDATE runs SET base_path = '/'",
    "error of the run": "UPDATE runs SET error_json = '{}'",
    "origin": "UPDATE runs SET parent_run_id = 'run-x'",
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_column_that_was_changed_is_found_by_every_verb(copy: tuple[Place, str], name: str) -> None:
    place, run_id = copy
    place.forge(CHANGES[name])
    for arguments in (
        ["retry", "rich.yaml", run_id, "--failed", "--workspace", "."],
        ["repair", "rich.yaml", run_id, "--from", "bad", "--workspace", "."],
        ["fork", run_id, "--workspace", "."],
        ["replay", run_id],
        ["compensate", run_id],
    ):
        result = place.json(*arguments)
        assert (result.code, result.error["code"]) == (5, "corrupt"), (arguments, result.out, result.err)
    assert place.scalar("SELECT COUNT(*) FROM runs") == 1
    assert place.json("db", "verify").code != 0


@pytest.mark.parametrize("text", ["no JSON", "{}", "[]"])
def test_a_damaged_plan_is_no_fault_of_the_program(copy: tuple[Place, str], text: str) -> None:
    place, run_id = copy
    place.forge("UPDATE run_documents SET plan_json = ?", text)
    for arguments in (["fork", run_id], ["replay", run_id], ["compensate", run_id]):
        result = place.json(*arguments)
        assert (result.code, result.error["code"]) == (5, "corrupt"), (arguments, result.err)


def test_what_was_made_from_a_run_is_held_to_its_own_history(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.text("ok", "")
    made = [
        str(place.derive("retry", "rich.yaml", run_id, "--failed", "--workspace", ".")["runId"]),
        str(place.json("replay", run_id).data["runId"]),
    ]
    place.assert_sound()
    for derived in made:
        place.forge_task(derived, "once", decision_json='{"x":1}')
    result = place.json("db", "verify")
    assert result.code != 0
    assert [name in result.out for name in made] == [True, True]
