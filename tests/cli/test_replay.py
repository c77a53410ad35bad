"""`replay`: what a run has recorded, once more, with nothing executed (contract 9.5); what a resume records (4.9)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, bound
from support.undo import Undo

COPIED = (
    "taskId", "position", "state", "output", "error", "metadataVersion", "definitionFingerprint", "inputDigest",
    "outputContractFingerprint", "outputDigest", "decision", "stateDelta", "stateDeltaDigest", "artifactManifest",
)  # fmt: skip


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()


@pytest.fixture
def undo(field: Field) -> Undo:
    return Undo(field)


def everything(undo: Undo, *, holds: bool = True) -> str:
    """A document with effects, memory, artifacts, conditions, a router, an expansion and a loop."""
    tasks: list[dict[str, Any]] = [
        undo.fan("each", 2),
        undo.task("more", needs=["each"], when="inputs.stage == 'x'"),
        {"id": "way", "uses": "router", "needs": ["each"], "route": {
            "select": "${{ inputs.stage }}",
            "cases": [{"equals": "y", "tasks": ["left"]}, {"equals": "z", "tasks": ["right"]}],
        }},
        {"id": "left", "uses": "action:note", "needs": ["way"], "with": {"n": 1}},
        undo.task("right", needs=["way"]),
        {"id": "keep", "uses": "action:remember", "needs": ["left"], "with": {"key": "k", "value": [1, "two"]}},
        {"id": "file", "uses": "action:write", "needs": ["keep"], "with": {"path": "out/f", "content": "kept"}},
        {"id": "learn", "uses": "action:learn", "needs": ["keep"], "with": {"key": "fact", "value": "v1"}},
        undo.end("file", "learn", holds=holds),
    ]  # fmt: skip
    return undo.write(
        tasks,
        inputs={"stage": "y"},
        memory={"working": {"k": None, "j": 1}},
        runtime={"maxConcurrency": 4, "budgets": {"maxProcessOutputBytes": 100_000_000, "maxArtifactBytes": 1000}},
        actions={"learn": {"kind": "builtin.long_term_memory.write"}},
        outputs={"kept": "${{ memory.k }}", "left": "${{ tasks.left.output.output }}"},
    )


def tables(field: Field) -> dict[str, list[tuple[Any, ...]]]:
    """How things stand outside of the new run."""
    names = ("effects", "attempts", "budget_reservations", "long_term_memory", "approvals", "turns", "artifact_blobs")
    return {name: field.rows(f"SELECT * FROM {name}") for name in names}  # noqa: S608


@pytest.mark.parametrize("holds", [True, False])
def test_everything_is_there_and_nothing_was_executed(field: Field, undo: Undo, holds: bool) -> None:
    code = 0 if holds else 4
    first = field.json("run", everything(undo, holds=holds))
    assert first.code == code, first.err
    source = first.data["runId"]
    before, notes = tables(field), undo.notes()
    undo.forget_workspace()
    shutil.rmtree(field.root / "tools")
    again = field.json("replay", source, env={"PATH": "/nowhere"})
    assert again.code == code, again.err
    assert again.data["runId"].startswith("replay-")
    assert {**again.data, "runId": 0, "traceId": 0} == {**first.data, "runId": 0, "traceId": 0}
    assert (tables(field), undo.notes()) == (before, notes)
    old, new = (field.json("inspect", name).data for name in (source, again.data["runId"]))
    for one, other in zip(old["tasks"], new["tasks"], strict=True):
        assert {name: other[name] for name in COPIED} == {name: one[name] for name in COPIED}
        lineage = (other["disposition"], other["sourceRunId"], other["sourceTaskId"], other["sourceAttempt"])
        assert lineage == ("recorded", source, one["taskId"], one["attempt"])
        ran = one["attempt"] > 0
        assert (other["attempt"], other["startedAt"]) == (1 if ran else 0, None)
    assert {task["state"] for task in new["tasks"]} >= {"succeeded", "skipped"}
    for name in ("workflow", "plan", "inputs", "workingMemory", "output", "state", "reason", "error", "planDigest"):
        assert new["run"][name] == old["run"][name]
    assert (new["run"]["mode"], new["run"]["parentRunId"], new["run"]["sourceRunId"]) == ("replay", source, None)
    assert new["effects"] == new["approvals"] == new["toolCalls"] == []
    budget = {**new["budget"]["usage"], "wallTimeSeconds": 0}
    assert {*budget.values(), *new["budget"]["reserved"].values()} <= {0}
    assert [(item["path"], item["digest"], item["sourceRunId"]) for item in new["artifacts"]] == [
        (item["path"], item["digest"], source) for item in old["artifacts"]
    ]
    assert new["artifacts"] != []
    listed = [event for event in new["audit"] if event["eventType"] == "replay.effects_reused"]
    assert [item["effectId"] for item in listed[0]["payload"]["effects"]] == [
        effect["request"]["id"] for effect in old["effects"]
    ]
    recorded = [event["taskId"] for event in new["audit"] if event["eventType"] == "replay.task_recorded"]
    assert recorded == [task["taskId"] for task in old["tasks"]]
    assert "task.transition" not in {event["eventType"] for event in new["audit"]}, "nothing of it was ever running"
    undo.sound()


def test_the_source_may_be_deleted_afterwards(field: Field, undo: Undo) -> None:
    first = field.json("run", everything(undo)).data
    made = field.json("replay", first["runId"]).data["runId"]
    again = field.json("replay", made).data["runId"]
    before = [field.json("inspect", name).data for name in (made, again)]
    [kept] = before[0]["artifacts"]
    field.change("DELETE FROM runs WHERE run_id = ?", first["runId"])
    undo.forget_workspace()
    assert field.json("artifacts", "gc", "--older-than-days", "0").code == 0
    after = [field.json("inspect", name).data for name in (made, again)]
    for one in (*before, *after):
        one["run"].pop("derivedRuns")
    assert after == before
    assert field.json("wait", made).data["output"] == first["output"]
    assert field.json("artifacts", "export", kept["digest"], "copy").code == 0
    assert (field.folder / "copy").read_text() == "kept"
    assert field.json("replay", made).code == 0
    undo.sound()


def test_a_cancelled_run(field: Field, undo: Undo) -> None:
    field.text("slow-a", "")
    process = field.start("run", undo.write([undo.task("a"), undo.task("b", needs=["a"])]))
    wait_until(lambda: undo.notes() == ["a"], "a runs")
    [source] = undo.runs()
    refused = field.json("replay", source)
    assert (refused.code, refused.error["code"]) == (4, "not_terminal")
    assert undo.runs() == [source]
    field.json("cancel", source, "--reason", "enough")
    assert process.wait().code == 130
    again = field.json("replay", source)
    assert (again.code, again.data["state"], again.data["cancelReason"]) == (130, "cancelled", "enough")
    undo.sound()


def test_a_decision_is_kept_over_a_retry(field: Field, undo: Undo) -> None:
    """It is made once, before the first attempt; the second one, which succeeds, does not lose it."""
    script = '[ -e "$1" ] || { touch "$1"; exit 1; }'

    def flaky(id: str, label: str, **fields: Any) -> dict[str, Any]:
        task = undo.task(id, uses="again", undo=None, retry={"maxAttempts": 2, "backoffMs": 0}, **fields)
        return {**task, "with": undo.arguments(script, label)}

    often = {"maxIterations": 3, "while": "${{ vars.loopIndex < 2 }}"}
    tasks = [flaky("a", "a", when="inputs.go"), flaky("each", "each-${{ vars.loopIndex }}", loop=often)]
    result = field.json("run", undo.write(tasks, inputs={"go": True}))
    assert result.code == 0, result.out
    made = field.json("replay", result.data["runId"]).data["runId"]
    first, again = (field.json("inspect", run_id).data["tasks"] for run_id in (result.data["runId"], made))
    assert [task["attempt"] for task in first[:4]] == [2, 2, 2, 0]
    decisions = [task["decision"] for task in first[:4]]
    assert [decision and decision["result"] for decision in decisions] == [True, True, True, False]
    assert [task["decision"] for task in again[:4]] == decisions
    assert [decision["expression"] for decision in decisions[:2]] == ["inputs.go", "${{ vars.loopIndex < 2 }}"]
    told = [event["payload"] for event in field.json("events", result.data["runId"]).data["events"]]
    assert [item["decision"] for item in told if "decision" in item] == decisions
    undo.sound()


def test_a_run_that_is_not_there(field: Field, undo: Undo) -> None:
    assert field.json("run", undo.write([undo.task("a")])).code == 0
    missing = field.json("replay", "run-nothing")
    assert (missing.code, missing.error["code"]) == (5, "not_found")


DAMAGES = {
    "output": "UPDATE tasks SET output_json = '{\"exitCode\":7}' WHERE task_id LIKE 'each--0000%'",
    "output and digest": "UPDATE tasks SET output_json = '{}', output_digest = 'sha256:v1:0' WHERE task_id = 'left'",
    "delta": 'UPDATE tasks SET delta_json = \'{"formatVersion":1,"remove":[],"set":{}}\' WHERE task_id = \'keep\'',
    "state": "DROP TRIGGER tasks_final",
    "checkpoint": "DROP TRIGGER checkpoints_no_update",
    "trail": "DROP TRIGGER audit_events_no_update",
    "plan": 'UPDATE run_documents SET plan_json = replace(plan_json, \'"failure":"stop"\', \'"failure":"continue"\')',
    "workflow": "UPDATE run_documents SET workflow_json = replace(workflow_json, 'work', 'play')",
    "inputs": "UPDATE run_documents SET inputs_json = '{}'",
    "run output": "UPDATE run_outputs SET output_json = '{}'",
    "memory": "DELETE FROM memory_values WHERE key = 'k'",
    "effect": "UPDATE effects SET input_json = '{}'",
    "result": "UPDATE effects SET result_json = '{}' WHERE operation = 'builtin.shell.exec'",
    "manifest": "UPDATE tasks SET artifact_manifest_json = '[]' WHERE task_id = 'file'",
}
AFTER = {
    "state": "UPDATE tasks SET state = 'failed' WHERE task_id = 'left'",
    "checkpoint": "UPDATE checkpoints SET state_json = replace(state_json, 'succeeded', 'failed')",
    "trail": "UPDATE audit_events SET payload_json = '{\"to\":\"failed\"}' WHERE event_type = 'task.transition'",
}


def test_a_damaged_source_is_refused_before_a_run_exists(field: Field, undo: Undo) -> None:
    source = field.json("run", everything(undo)).data["runId"]
    shutil.copytree(field.database.parent, field.root / "sound")
    for name, change in DAMAGES.items():
        shutil.rmtree(field.database.parent)
        shutil.copytree(field.root / "sound", field.database.parent)
        if "TRIGGER" in change:
            field.change_schema(change)
            change = AFTER[name]
        field.change(change)
        refused = field.json("replay", source)
        assert (refused.code, refused.error["code"]) == (5, "corrupt"), name
        assert undo.runs() == [source], name


@pytest.mark.parametrize("how", ["missing", "corrupt"])
def test_damaged_artifacts_are_found_before_a_run_exists(field: Field, undo: Undo, how: str) -> None:
    source = field.json("run", everything(undo)).data["runId"]
    [kept] = field.json("artifacts", "list").data["references"]
    blob = field.database.parent / kept["storePath"]
    if not blob.exists():
        [blob] = [path for path in field.database.parent.rglob("*") if path.name == kept["digest"][7:]]
    blob.chmod(0o600)
    if how == "missing":
        blob.unlink()
    else:
        blob.write_text("tampe")
    refused = field.json("replay", source)
    assert (refused.code, refused.error["code"]) == (5, "corrupt")
    assert how in refused.error["message"]
    assert undo.runs() == [source]


def test_ten_thousand_tasks_in_a_few_seconds(field: Field, undo: Undo) -> None:
    fan = {"id": "each", "uses": "action:note", "foreach": {"items": list(range(10_000)), "maxItems": 10_000}}
    source = field.json("run", undo.write([fan], outputs={"n": 1}), limit=300).data["runId"]
    began = time.monotonic()
    assert field.json("replay", source).code == 0
    # Measured 1.2 s on two shared cores, the start of the program included.
    assert time.monotonic() - began < bound(5)
    assert field.scalar("SELECT COUNT(*) FROM tasks WHERE disposition = 'recorded'") == 10_001


def test_each_resume_has_a_trace_of_its_own(field: Field, undo: Undo) -> None:
    file = undo.write([undo.task("a"), undo.task("b", needs=["a"])], policy={"approval": "mutations"})
    traces = [field.json("run", file).data["traceId"]]
    [run_id] = undo.runs()
    for _ in range(2):
        [asked] = field.json("approvals", "list").data["approvals"]
        assert field.json("approvals", "approve", asked["approvalId"]).code == 0
        traces.append(field.json("resume", run_id).data["traceId"])
    assert len(set(traces)) == 3
    assert field.scalar("SELECT trace_id FROM runs") == traces[-1]
    told = [row[0] for row in field.rows("SELECT DISTINCT trace_id FROM audit_events ORDER BY sequence")]
    assert told == traces
    undo.sound()
    field.change("UPDATE runs SET trace_id = ?", traces[0])
    assert field.json("db", "verify").code != 0
