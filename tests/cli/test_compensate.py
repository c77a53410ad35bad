"""`compensate`: what is undone, in which order, what blocks it, and what starts by itself (contract 5.7)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import time_limit
from support.undo import AUTOMATIC, DO, UNDO, Undo


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    place = Field(tmp_path)
    try:
        yield place
        if place.database.exists():
            place.check_clean_end(uncertain=True)
    finally:
        place.close()


@pytest.fixture
def undo(field: Field) -> Undo:
    return Undo(field)


def three(undo: Undo, **options: Any) -> list[dict[str, Any]]:
    a, b = undo.task("a", **options), undo.task("b", needs=["a"], **options)
    return [a, b, undo.task("c", needs=["b"], **options), undo.end("c")]


# -- what is done ------------------------------------------------------------------------------------------------------


def test_everything_is_undone_in_reverse_order_and_once(field: Field, undo: Undo) -> None:
    source = undo.failed(three(undo))
    planned = undo.plan(source)
    assert [item["sourceTaskId"] for item in planned["tasks"]] == ["c", "b", "a"] == planned["selectedTasks"]
    assert planned["tasks"][0] == {
        "sourceTaskId": "c",
        "compensationTaskId": "compensate--c",
        "action": "undo",
        "sourceEffectIds": [undo.effect(source, "c")],
    }
    assert (planned["executable"], planned["complete"], planned["automatic"]) == (True, True, False)
    assert undo.runs() == [source]
    result = undo.compensate(source)
    assert result.code == 0, result.err
    made = result.data
    assert made == {
        "runId": made["runId"],
        "sourceRunId": source,
        "traceId": made["traceId"],
        "state": "succeeded",
        "reason": None,
        "compensatedTasks": ["c", "b", "a"],
        "failedTasks": [],
        "failures": [],
        "uncertainEffects": [],
        "pendingApprovals": [],
        "blocked": [],
        "elsewhere": [],
        "warnings": [],
    }
    assert made["runId"].startswith("compensation-")
    assert undo.notes() == ["a", "b", "c", "undo-c", "undo-b", "undo-a"]
    assert undo.conclusions(source) == [(task, "compensated") for task in "cba"]
    again = undo.plan(source)
    assert (again["executable"], again["complete"], again["tasks"]) == (False, True, [])
    assert again["alreadyCompensatedEffects"] == [undo.effect(source, task) for task in "cba"]
    nothing = undo.compensate(source)
    assert (nothing.code, nothing.data["runId"], nothing.data["state"]) == (0, None, None)
    undo.sound()


def test_the_run_is_an_ordinary_one_and_tells_where_it_comes_from(field: Field, undo: Undo) -> None:
    source = undo.failed(three(undo), memory={"working": {"k": 1}})
    made = undo.compensate(source).data["runId"]
    found = field.json("inspect", made).data
    run = found["run"]
    assert (run["mode"], run["sourceRunId"], run["parentRunId"]) == ("compensation", source, None)
    assert run["workflowName"] == "work-compensation"
    assert run["workflow"]["metadata"]["labels"] == {"agentctl.dev/compensation-source": source}
    assert run["inputs"] == {
        "__agentctlCompensation": {
            f"compensate--{task}": {"sourceTaskId": task, "sourceEffectIds": [undo.effect(source, task)]}
            for task in "cba"
        }
    }
    assert (run["workingMemory"], run["maxConcurrency"], run["output"]["compensate--a"]["exitCode"]) == ({"k": 1}, 1, 0)
    assert [task["taskId"] for task in found["tasks"]] == [f"compensate--{task}" for task in "cba"]
    assert {task["disposition"] for task in found["tasks"]} == {"executed"}
    assert {effect["status"] for effect in found["effects"]} == {"succeeded"}
    said = field.json("inspect", source).data
    assert [item["compensationEffectId"] for item in said["effectReconciliations"]] == [
        effect["request"]["id"] for effect in found["effects"]
    ]
    assert {item["actor"] for item in said["effectReconciliations"]} == {"agentctl-runtime"}
    assert said["effectReconciliations"][0]["evidence"] == {
        "source": "declared-compensation",
        "sourceRunId": source,
        "compensationRunId": made,
        "compensationTaskId": "compensate--c",
    }
    assert [(item["runId"], item["mode"]) for item in said["run"]["derivedRuns"]] == [(made, "compensation")]
    listed = {item["runId"]: item for item in field.json("runs", "list").data["runs"]}
    assert listed[made]["sourceRunId"] == source
    assert source in field("status", made).out
    assert made in field("status", source).out


def test_a_partial_failure_is_retried_alone(field: Field, undo: Undo) -> None:
    source = undo.failed(three(undo))
    field.text("fail-b", "")
    first = undo.compensate(source)
    assert (first.code, first.data["state"]) == (4, "failed")
    assert (first.data["compensatedTasks"], first.data["failedTasks"]) == (["c", "a"], ["b"])
    assert [item["sourceTaskId"] for item in undo.plan(source)["tasks"]] == ["b"]
    (field.folder / "fail-b").unlink()
    second = undo.compensate(source)
    assert (second.code, second.data["compensatedTasks"]) == (0, ["b"])
    assert undo.done() == ["c", "a", "b"]
    undo.sound()


def test_what_was_undone_and_failed_afterwards(field: Field, undo: Undo) -> None:
    """The inverse action has done its part, and its artifact is out of reach: it is done once, and that is said."""
    task = undo.task("a")
    task["compensate"] = {**task["compensate"], "retry": {"maxAttempts": 3}}
    task["compensate"]["with"] = {**task["compensate"]["with"], "artifacts": ["notes-file/receipt"]}
    field.text("notes-file", "")
    source = undo.failed([task, undo.end("a")], policy={"writableRoots": ["."]})
    first = undo.compensate(source)
    assert (first.code, first.data["failedTasks"], first.data["failures"][0]["undone"]) == (4, ["a"], True)
    again = undo.compensate(source)
    assert (again.code, again.data["runId"]) == (0, None)
    assert undo.done() == ["a"]
    undo.sound()


def test_only_the_chosen_tasks(field: Field, undo: Undo) -> None:
    source = undo.failed(three(undo))
    assert undo.plan(source, "--task", "b")["selectedTasks"] == ["b"]
    assert undo.compensate(source, "--task", "b", "--task", "a").code == 0
    assert undo.done() == ["b", "a"]
    assert undo.compensate(source).data["compensatedTasks"] == ["c"]


def test_the_inverse_reads_all_that_the_run_has_come_to(field: Field, undo: Undo) -> None:
    tasks = [
        undo.fan("each", 2),
        {"id": "keep", "uses": "action:remember", "needs": ["each"], "with": {"key": "k", "value": "last"}},
        undo.task("z", needs=["keep"], vars={"own": "${{ inputs.word }}-own"}),
        undo.end("z"),
    ]
    tasks[2]["compensate"]["with"] = undo.arguments(
        UNDO, "${{ memory.k }}/${{ vars.own }}/${{ tasks.z.output.exitCode }}/${{ inputs.word }}/${{ vars.all }}"
    )
    source = undo.failed(tasks, inputs={"word": "w"}, vars={"all": "v"}, memory={"working": {"k": "first"}})
    assert undo.compensate(source).code == 0
    assert undo.done() == ["last/w-own/0/w/v", "each1", "each0"]


def test_what_was_rendered_is_data_even_if_it_looks_like_a_template(field: Field, undo: Undo) -> None:
    task = undo.task("a")
    task["compensate"]["with"] = undo.arguments(UNDO, "${{ inputs.word }}")
    file = undo.write([task, undo.end("a")], inputs={"word": ""})
    source = field.json("run", file, "--input", "word=${{inputs.word}}").data["runId"]
    assert undo.compensate(source).code == 0
    assert undo.done() == ["${{inputs.word}}"]
    undo.sound()


def test_a_failed_task_with_a_confirmed_effect_is_undone(field: Field, undo: Undo) -> None:
    source = undo.failed([undo.task("a", outputSchema={"required": ["nothing"]})])
    assert field.scalar("SELECT state FROM tasks WHERE run_id = ? AND task_id = 'a'", source) == "failed"
    assert undo.compensate(source).data["compensatedTasks"] == ["a"]
    assert undo.done() == ["a"]


def test_a_succeeded_run_can_be_undone_and_so_can_a_cancelled_one(field: Field, undo: Undo) -> None:
    done = field.json("run", undo.write([undo.task("a")])).data["runId"]
    assert undo.compensate(done).code == 0
    field.text("slow-b", "")
    file = undo.write([undo.task("c"), undo.task("b", needs=["c"], uses="again")], name="other")
    process = field.start("run", file)
    wait_until(lambda: "b" in undo.notes(), "b runs")
    other = undo.runs()[-1]
    assert field.json("cancel", other).code == 0
    assert process.wait().code == 130
    assert undo.done() == ["a"], "a cancellation starts no compensation"
    assert undo.rules(other) == [("b", "unreconciled_source_effect")]
    assert undo.compensate(other).code == 3
    assert undo.done() == ["a", "c"]


def test_an_unchanged_write_is_an_effect_of_a_compensation(field: Field, undo: Undo) -> None:
    task = {
        "id": "a",
        "uses": "action:write",
        "with": {"path": "out/f", "content": "new"},
        "compensate": {"uses": "action:write", "with": {"path": "out/f", "content": "old"}},
    }
    source = undo.failed([task, undo.end("a")])
    (field.folder / "out" / "f").write_text("old")
    made = undo.compensate(source)
    assert made.code == 0
    [effect] = field.json("effects", "list", made.data["runId"]).data["effects"]
    assert (effect["request"]["operation"], effect["status"]) == ("builtin.write", "succeeded")
    assert undo.conclusions(source) == [("a", "compensated")]
    assert (field.folder / "out" / "f").read_text() == "old"


def test_a_task_that_found_all_as_it_should_be_says_why_nothing_of_it_is_undone(field: Field, undo: Undo) -> None:
    """Run twice: the second run has written nothing, and an inverse of it would take back what the first one did."""
    task = {
        "id": "a",
        "uses": "action:write",
        "with": {"path": "out/f", "content": "new"},
        "compensate": {"uses": "action:write", "with": {"path": "out/f", "content": "old"}},
    }
    first, second = (undo.failed([task, undo.end("a")]) for _ in range(2))
    assert field.json("compensate", first, "--plan").data["warnings"] == []
    why = "a has changed nothing, since all was there already: nothing of it is undone"
    assert field.json("compensate", second, "--plan").data["warnings"] == [why]
    for more in (["--plan"], []):
        told = field("compensate", second, *more)
        assert (told.code, why in told.out) == (0, True)
    assert (field.folder / "out" / "f").read_text() == "new"


def test_an_inverse_whose_artifact_cannot_be_examined_is_done_once(field: Field, undo: Undo) -> None:
    """It has succeeded, whatever became of its receipt: neither its retry nor another compensation does it again."""
    task = undo.task("a")
    inverse = 'echo "undo-$1" >> "$2"; mkdir -p out; touch out/f'
    given = {**undo.arguments(inverse, "a"), "artifacts": ["out/f/receipt"]}
    task["compensate"] |= {"with": given, "retry": {"maxAttempts": 3, "backoffMs": 0}}
    source = undo.failed([task, undo.end("a")])
    first = undo.compensate(source)
    assert (first.code, first.data["state"], first.data["failedTasks"]) == (4, "failed", ["a"])
    assert undo.done() == ["a"]
    again = undo.compensate(source)
    assert (again.code, again.data["runId"]) == (0, None), again.out
    assert undo.plan(source)["alreadyCompensatedEffects"] == [undo.effect(source, "a")]
    assert undo.conclusions(source) == [("a", "compensated")]
    assert undo.done() == ["a"]
    undo.sound()


def test_a_run_in_check_mode_and_a_replay_have_done_nothing(field: Field, undo: Undo) -> None:
    task = {
        "id": "a",
        "uses": "action:remember",
        "with": {"key": "k", "value": 1},
        "compensate": undo.task("a")["compensate"],
    }
    file = undo.write([task, undo.task("b", needs=["a"])])
    checked = field.json("run", file, "--check").data["runId"]
    replayed = field.json("replay", field.json("run", file).data["runId"]).data["runId"]
    for run_id in (checked, replayed):
        result = undo.compensate(run_id)
        assert (result.code, result.data["runId"]) == (0, None)
    assert undo.done() == []


# -- approvals ---------------------------------------------------------------------------------------------------------


def test_approval_never_and_always_override_the_policy(field: Field, undo: Undo) -> None:
    policy = {"approval": "mutations", "nonInteractive": "pause"}
    file = undo.write([undo.task("a"), undo.end("a")], policy=policy, compensation={"approval": "never"})
    source = field.json("run", file).data["runId"]
    [asked] = field.json("approvals", "list").data["approvals"]
    assert field.json("approvals", "approve", asked["approvalId"]).code == 0
    assert field.json("resume", source).code == 4
    assert undo.compensate(source).code == 0
    always = undo.failed([undo.task("b"), undo.end("b")], name="always", compensation={"approval": "always"})
    paused = undo.compensate(always)
    assert (paused.code, paused.data["state"], paused.data["reason"]) == (3, "paused", "approval_required")
    made = paused.data["runId"]
    assert undo.rules(always) == [("*", "compensation_in_progress")]
    refused = undo.compensate(always)
    assert (refused.code, refused.data["runId"]) == (3, None)
    [asked] = field.json("approvals", "list", made).data["approvals"]
    assert field.json("approvals", "approve", asked["approvalId"]).code == 0
    assert undo.done() == ["a"]
    assert field.json("resume", made).code == 0
    assert undo.done() == ["a", "b"]
    assert undo.conclusions(always) == [("b", "compensated")]
    undo.sound()


def test_a_rejected_inverse_is_planned_again(field: Field, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.end("a")], compensation={"approval": "always"})
    made = undo.compensate(source).data["runId"]
    [asked] = field.json("approvals", "list", made).data["approvals"]
    assert field.json("approvals", "reject", asked["approvalId"]).code == 0
    assert field.json("resume", made).code == 4
    assert [item["sourceTaskId"] for item in undo.plan(source)["tasks"]] == ["a"]
    assert undo.done() == []


# -- what blocks -------------------------------------------------------------------------------------------------------


def test_unknown_and_undeclared_tasks(field: Field, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.task("b", needs=["a"], undo=None), undo.end("b")])
    assert undo.rules(source, "--task", "nope", "--task", "b") == [
        ("nope", "unknown_task"),
        ("b", "undeclared_compensation"),
    ]
    blocked = undo.compensate(source, "--task", "nope")
    assert (blocked.code, blocked.data["runId"], blocked.data["blocked"][0]["rule"]) == (3, None, "unknown_task")
    partly = undo.compensate(source, "--task", "nope", "--task", "a")
    assert (partly.code, partly.data["state"], partly.data["compensatedTasks"]) == (3, "succeeded", ["a"])


def test_an_uncertain_source_effect_blocks_until_somebody_has_looked(field: Field, undo: Undo) -> None:
    field.text("slow-b", "")
    file = undo.write([undo.task("a"), undo.task("b", timeoutSeconds=1)])
    result = field.json("run", file)
    assert (result.code, result.data["reason"]) == (3, "uncertain_effect")
    source = result.data["runId"]
    refused = undo.compensate(source)
    assert (refused.code, refused.error["code"]) == (4, "not_terminal")
    assert field.json("cancel", source).code == 0
    assert undo.rules(source) == [("b", "unreconciled_source_effect")]
    first = undo.compensate(source)
    assert (first.code, first.data["compensatedTasks"]) == (3, ["a"])
    field.text("result.json", '{"exitCode": 0}')
    said = ("effects", "reconcile", undo.effect(source, "b"), "--reason", "seen", "--status", "applied")
    assert field.json(*said, "--result-file", "result.json").code == 0
    assert undo.compensate(source).code == 0
    assert undo.done() == ["a", "b"]
    assert undo.conclusions(source) == [("a", "compensated"), ("b", "applied"), ("b", "compensated")]
    undo.sound()


def test_an_effect_that_did_not_happen_is_not_undone(field: Field, undo: Undo) -> None:
    field.text("slow-b", "")
    source = field.json("run", undo.write([undo.task("b", timeoutSeconds=1)])).data["runId"]
    assert field.json("cancel", source).code == 0
    said = ("effects", "reconcile", undo.effect(source, "b"), "--reason", "seen", "--status", "not-applied")
    assert field.json(*said).code == 0
    planned = undo.plan(source)
    assert (planned["tasks"], planned["blocked"], planned["alreadyCompensatedEffects"]) == ([], [], [])


def test_an_attempt_that_was_repeated_answers_for_the_one_before(field: Field, undo: Undo) -> None:
    field.text("slow-b", "")
    again = undo.task("b", uses="again", timeoutSeconds=time_limit(), retry={"maxAttempts": 2, "backoffMs": 60000})
    process = field.start("run", undo.write([again, undo.end("b")]))
    wait_until(
        lambda: field.rows("SELECT 1 FROM tasks WHERE state = 'retry_scheduled'") != [], "the second attempt waits"
    )
    (field.folder / "slow-b").unlink()
    [source] = undo.runs()
    field.change("UPDATE tasks SET retry_at = 1 WHERE state = 'retry_scheduled'")
    process.popen.kill()
    process.popen.wait()
    assert field.json("resume", source).code == 4
    planned = undo.plan(source)
    assert (len(planned["tasks"][0]["sourceEffectIds"]), planned["blocked"]) == (1, [])


def test_a_lost_source_effect_blocks_until_somebody_has_looked(field: Field, undo: Undo) -> None:
    """A command that may be repeated was sent, its worker died with everybody else, and then the run was cancelled."""
    file = undo.write([undo.task("a", uses="again")])
    struck = field.root / "struck"
    field.start("run", file, env={"AGENTCTL_FAULT": f"after_effect_result:parent@{struck}"}).popen.wait()
    [source] = undo.runs()
    assert field.json("cancel", source).code == 0
    assert field.rows("SELECT status, dispatches FROM effects") == [("cancelled", 1)]
    assert undo.rules(source) == [("a", "unconfirmed_source_effect")]
    assert undo.compensate(source).code == 3
    field.text("result.json", '{"exitCode": 0}')
    said = ("effects", "reconcile", undo.effect(source, "a"), "--reason", "seen", "--status", "applied")
    assert field.json(*said, "--result-file", "result.json").code == 0
    assert undo.compensate(source).code == 0
    assert undo.notes() == ["a", "undo-a"]
    undo.sound()


def test_an_input_that_cannot_be_rendered_blocks_its_task_alone(field: Field, undo: Undo) -> None:
    tasks = three(undo)
    tasks[1]["compensate"]["with"] = undo.arguments(UNDO, "${{ tasks.end.output.nothing }}")
    source = undo.failed(tasks)
    assert undo.rules(source) == [("b", "compensation_input_unavailable")]
    result = undo.compensate(source)
    assert (result.code, result.data["compensatedTasks"]) == (3, ["c", "a"])
    assert undo.compensate(source).data["runId"] is None


def test_an_uncertain_inverse_effect_blocks_until_somebody_has_looked(field: Field, undo: Undo) -> None:
    tasks = [undo.task("a"), undo.end("a")]
    tasks[0]["compensate"]["timeoutSeconds"] = 1
    source = undo.failed(tasks)
    field.text("slow-undo-a", "")
    paused = undo.compensate(source)
    assert (paused.code, paused.data["reason"]) == (3, "uncertain_effect")
    made = paused.data["runId"]
    assert undo.rules(source) == [("*", "compensation_in_progress")]
    assert field.json("cancel", made).code == 0
    assert undo.rules(source) == [("a", "unreconciled_compensation_effect")]
    assert undo.compensate(source).code == 3
    inverse = undo.effect(made, "compensate--a")
    field.text("result.json", '{"exitCode": 0}')
    said = ("effects", "reconcile", inverse, "--reason", "seen", "--status", "applied", "--result-file", "result.json")
    assert field.json(*said).code == 0
    planned = undo.plan(source)
    assert (planned["complete"], planned["alreadyCompensatedEffects"]) == (True, [undo.effect(source, "a")])
    assert undo.conclusions(source) == [("a", "compensated")]
    undo.sound()


def test_an_uncertain_inverse_effect_is_concluded_by_the_resume(field: Field, undo: Undo) -> None:
    tasks = [undo.task("a"), undo.end("a")]
    tasks[0]["compensate"]["timeoutSeconds"] = 1
    source = undo.failed(tasks)
    field.text("slow-undo-a", "")
    made = undo.compensate(source).data["runId"]
    field.text("result.json", '{"exitCode": 0}')
    inverse = undo.effect(made, "compensate--a")
    said = ("effects", "reconcile", inverse, "--reason", "seen", "--status", "applied", "--result-file", "result.json")
    assert field.json(*said).code == 0
    assert field.json("resume", made).code == 0
    assert undo.conclusions(source) == [("a", "compensated")]
    assert undo.done() == ["a"]


def test_a_lost_inverse_effect_blocks_until_somebody_has_looked(field: Field, undo: Undo) -> None:
    source = undo.failed([undo.task("a", undo="undo-again"), undo.end("a")])
    struck = field.root / "struck"
    fault = {"AGENTCTL_FAULT": f"after_effect_result:parent@{struck}"}
    field.start("compensate", source, env=fault).popen.wait()
    [(made, state)] = undo.derived(source)
    assert state == "running"
    assert field.json("cancel", made).code == 0
    assert undo.rules(source) == [("a", "unconfirmed_compensation_effect")]
    inverse = undo.effect(made, "compensate--a")
    assert field.json("effects", "reconcile", inverse, "--reason", "r", "--status", "not-applied").code == 0
    assert undo.compensate(source).code == 0
    assert undo.done() == ["a", "a"], "a person has said that the first one did not happen"


def test_an_inverse_effect_that_was_itself_undone_blocks(field: Field, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.task("b"), undo.end("a", "b")])
    made = undo.compensate(source).data["runId"]
    first, second = (undo.effect(made, f"compensate--{task}") for task in "ab")
    said = ("--reason", "r", "--status", "compensated", "--compensation-effect")
    # What b's inverse has done was undone after it; the one of a came later.
    older = field.json("effects", "reconcile", first, *said, second)
    assert (older.code, older.error["code"]) == (5, "conflict")
    assert field.json("effects", "reconcile", second, *said, first).code == 0
    assert undo.rules(source) == [("b", "compensation_effect_reversed")]
    assert undo.plan(source)["alreadyCompensatedEffects"] == [undo.effect(source, "a")]
    result = undo.compensate(source)
    assert (result.code, result.data["runId"]) == (3, None)


def test_a_run_that_is_not_there_or_has_not_ended(field: Field, undo: Undo) -> None:
    field.text("slow-a", "")
    process = field.start("run", undo.write([undo.task("a")]))
    wait_until(lambda: undo.notes() == ["a"], "a runs")
    [source] = undo.runs()
    refused = undo.compensate(source)
    assert (refused.code, refused.error["code"]) == (4, "not_terminal")
    missing = undo.compensate("run-nothing")
    assert (missing.code, missing.error["code"]) == (5, "not_found")
    assert undo.runs() == [source]
    field.json("cancel", source)
    process.wait()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE tasks SET output_json = '{\"exitCode\":7}' WHERE task_id = 'a'",
        'UPDATE run_documents SET inputs_json = \'{"word":"x"}\'',
        "UPDATE run_documents SET plan_json = replace(plan_json, 'undo-$1', 'destroy-$1')",
        "UPDATE effects SET input_json = '{}'",
    ],
)
def test_a_damaged_source_is_found_before_a_run_exists(field: Field, undo: Undo, change: str) -> None:
    source = undo.failed(three(undo))
    field.change(change)
    for arguments in ((), ("--plan",)):
        refused = undo.compensate(source, *arguments)
        assert (refused.code, refused.error["code"]) == (5, "corrupt")
    assert undo.runs() == [source]
    assert undo.done() == []


# -- automatic ---------------------------------------------------------------------------------------------------------


def test_it_starts_by_itself_and_the_command_reports_the_failure(field: Field, undo: Undo) -> None:
    result = field.json("run", undo.write(three(undo), compensation=AUTOMATIC))
    assert (result.code, result.data["state"], result.data["reason"]) == (4, "failed", "task_failed")
    source = result.data["runId"]
    [(made, state)] = undo.derived(source)
    assert result.data["compensation"] == {"runId": made, "state": "succeeded", "reason": None}
    assert (state, undo.done()) == ("succeeded", ["c", "b", "a"])
    assert undo.plan(source)["automatic"] is True
    events = [event["eventType"] for event in field.json("events", source).data["events"]]
    assert events.index("compensation.due") < events.index("compensation.created")
    assert field.rows("SELECT * FROM compensations_due") == []
    refused = field.json("resume", source)
    assert (refused.code, refused.error["code"]) == (4, "already_terminal")
    assert len(undo.derived(source)) == 1
    undo.sound()


def test_it_starts_by_itself_after_failures_that_do_not_stop_the_run(field: Field, undo: Undo) -> None:
    tasks = [undo.task("a"), {**undo.end(), "failure": "continue"}, undo.task("b", needs=["a"])]
    assert field.json("run", undo.write(tasks, compensation=AUTOMATIC)).code == 4
    assert undo.done() == ["b", "a"]


def test_on_a_pool_it_starts_by_itself(field: Field, undo: Undo) -> None:
    pool = field.pool(2)
    source = field.submit(undo.write(three(undo), compensation=AUTOMATIC))
    assert field.json("wait", source).code == 4
    wait_until(lambda: [state for _, state in undo.derived(source)] == ["succeeded"], "the compensation")
    assert undo.done() == ["c", "b", "a"]
    # A foreground run beside a live pool, which may be faster with everything.
    result = field.json("run", undo.write([undo.task("x"), undo.end("x")], name="x", compensation=AUTOMATIC))
    assert (result.code, result.data["compensation"]["state"]) == (4, "succeeded")
    assert undo.done() == ["c", "b", "a", "x"]
    field.stop(pool)
    undo.sound()


def test_it_does_not_start_by_itself_after_success_cancellation_or_a_check(field: Field, undo: Undo) -> None:
    assert field.json("run", undo.write([undo.task("a")], compensation=AUTOMATIC)).code == 0
    field.text("slow-b", "")
    process = field.start(
        "run", undo.write([undo.task("c"), undo.task("b", needs=["c"])], name="x", compensation=AUTOMATIC)
    )
    wait_until(lambda: "b" in undo.notes(), "b runs")
    field.json("cancel", undo.runs()[-1])
    assert process.wait().code == 130
    assert field.json("run", undo.write([undo.end()], name="y", compensation=AUTOMATIC), "--check").code == 4
    assert undo.done() == []
    assert field.rows("SELECT 1 FROM runs WHERE mode = 'compensation'") == []


def test_a_compensation_that_fails_is_not_compensated(field: Field, undo: Undo) -> None:
    field.text("fail-b", "")
    result = field.json("run", undo.write(three(undo), compensation=AUTOMATIC))
    assert (result.code, result.data["compensation"]["state"]) == (4, "failed")
    assert [state for _, state in undo.derived(result.data["runId"])] == ["failed"]
    (field.folder / "fail-b").unlink()
    assert undo.compensate(result.data["runId"]).code == 0
    assert undo.done() == ["c", "a", "b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_undoes_by_itself(field: Field, undo: Undo, number: signal.Signals) -> None:
    """It is cancelled as a run would be; what the inverse in flight has done, somebody has to say."""
    field.text("slow-undo-b", "")
    process = field.start("run", undo.write(three(undo), compensation=AUTOMATIC), "--output", "json")
    wait_until(lambda: undo.done() == ["c", "b"], "the inverse of b runs")
    process.signal(number)
    assert process.wait().code == 130
    (field.folder / "slow-undo-b").unlink()
    [source, made] = undo.runs()
    assert undo.derived(source) == [(made, "cancelled")]
    assert undo.conclusions(source) == [("c", "compensated")]
    assert undo.rules(source) == [("b", "unreconciled_compensation_effect")]
    rest = undo.compensate(source)
    assert (rest.code, rest.data["compensatedTasks"]) == (3, ["a"]), rest.err
    said = ("effects", "reconcile", undo.effect(made, "compensate--b"), "--reason", "seen", "--status", "not-applied")
    assert field.json(*said).code == 0
    assert undo.compensate(source).code == 0
    assert undo.done() == ["c", "b", "a", "b"]
    assert undo.conclusions(source) == [(task, "compensated") for task in "cab"]
    undo.sound()


def test_what_is_blocked_is_left_to_a_person(field: Field, undo: Undo) -> None:
    task = undo.task("a")
    task["compensate"]["with"] = undo.arguments(UNDO, "${{ tasks.end.output.nothing }}")
    result = field.json("run", undo.write([task, undo.end("a")], compensation=AUTOMATIC))
    assert (result.code, "compensation" in result.data) == (4, False)
    source = result.data["runId"]
    events = {event["eventType"]: event["payload"] for event in field.json("events", source).data["events"]}
    assert events["compensation.skipped"] == {"blocked": 1}
    assert field.rows("SELECT * FROM compensations_due") == []
    undo.sound()


# -- inside a nested sub-workflow --------------------------------------------------------------------------------------


def test_approval_cancel_replay_and_compensation_inside_a_nested_sub_workflow(field: Field, undo: Undo) -> None:
    local = undo.task("act")
    local["with"] = undo.arguments(DO, "${{ inputs.name }}")
    local["compensate"]["with"] = undo.arguments(UNDO, "${{ inputs.name }}/${{ tasks.act.output.exitCode }}")
    schema = {"type": "object"}
    inner = {"version": "1.0.0", "inputSchema": schema, "outputSchema": schema, "tasks": [local]}
    call = {"id": "in", "uses": "workflow:inner", "with": {"name": "${{ inputs.name }}"}}
    outer = {"version": "1.0.0", "inputSchema": schema, "outputSchema": schema, "tasks": [call]}
    spec: dict[str, Any] = {
        "subworkflows": {"inner": inner, "outer": outer},
        "policy": {"approval": "mutations"},
        "inputs": {"fails": False},
    }
    tasks = [
        {"id": "one", "uses": "workflow:outer", "with": {"name": "first"}},
        {"id": "two", "uses": "workflow:outer", "needs": ["one"], "with": {"name": "second"}},
        {"id": "end", "uses": "action:check", "needs": ["two"], "with": {"that": "${{ inputs.fails }}"}},
    ]
    file = undo.write(tasks, **spec)

    def approve(run_id: str) -> None:
        [asked] = field.json("approvals", "list", run_id).data["approvals"]
        assert field.json("approvals", "approve", asked["approvalId"]).code == 0

    source = field.json("run", file).data["runId"]
    [asked] = field.json("approvals", "list", source).data["approvals"]
    assert asked["taskId"] == "one--in--act"
    approve(source)
    assert field.json("resume", source).code == 3
    approve(source)
    assert field.json("resume", source).code == 4
    assert undo.notes() == ["first", "second"]
    replayed = field.json("replay", source)
    assert replayed.code == 4
    kept = field.json("inspect", replayed.data["runId"]).data["tasks"]
    assert {task["taskId"]: task["state"] for task in kept}["two--in--act"] == "succeeded"
    made = undo.compensate(source)
    assert (made.code, made.data["reason"]) == (3, "approval_required")
    approve(made.data["runId"])
    assert field.json("resume", made.data["runId"]).code == 3
    approve(made.data["runId"])
    assert field.json("resume", made.data["runId"]).code == 0
    assert undo.done() == ["second/0", "first/0"]
    cancelled = field.json("run", file).data["runId"]
    assert field.json("cancel", cancelled).code == 0
    states = dict(field.rows("SELECT task_id, state FROM tasks WHERE run_id = ?", cancelled))
    assert (states["one--in--act"], states["two--in--act"]) == ("cancelled", "cancelled")
    assert undo.compensate(cancelled).data["runId"] is None
    assert undo.notes() == ["first", "second", "undo-second/0", "undo-first/0"]
    undo.sound()


def test_what_a_person_undid_first_is_told_with_the_failed_run(field: Field, undo: Undo) -> None:
    """It was to be undone by itself, and somebody else was quicker than whoever drives the run."""
    file = undo.write([undo.task("a"), undo.end("a")], compensation=AUTOMATIC)
    field.start("run", file, env={"AGENTCTL_FAULT": "before_compensation"}).popen.wait()
    source = field.scalar("SELECT run_id FROM runs")
    made = undo.compensate(source)
    assert made.code == 0, made.err
    told = field.json("wait", source)
    assert (told.code, told.data["compensation"]["runId"]) == (4, made.data["runId"])
    assert field.rows("SELECT * FROM compensations_due") == []


def test_a_task_that_waits_for_budget_of_an_uncertain_effect_says_so(field: Field) -> None:
    tasks = [
        {"id": "a", "uses": "action:nap", "with": {"args": ["60"]}},
        {"id": "b", "uses": "action:nap", "with": {"args": ["0"]}},
    ]
    nap = {"kind": "builtin.shell.exec", "command": "sleep", "timeoutSeconds": 1, "idempotency": "at_most_once"}
    file = field.workflow(
        "nap", tasks, actions={"nap": nap}, policy={"approval": "never", "processAllowlist": ["sleep"]},
        runtime={"budgets": {"maxProcessOutputBytes": 3_000_000}},
    )  # fmt: skip
    paused = field.json("run", file)
    assert (paused.code, paused.data["reason"]) == (3, "uncertain_effect"), paused.err
    waiting = {item["taskId"]: item for item in field.json("status", paused.data["runId"]).data["waiting"]}
    effect = field.scalar("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    assert waiting["b"]["why"] == "budget"
    assert f"uncertain effect {effect[:12]}" in waiting["b"]["detail"]
