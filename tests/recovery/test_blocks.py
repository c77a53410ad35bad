"""Every block code of contract 9.2, produced through the command line, before any run exists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import text_digest
from support.recovery import Place, rules

TASKS = ["once", "twice", "remember", "put", "shape", "reads", "maybe", "later", "bad", "below"]


def at(name: str, *path: str) -> tuple[str | int, ...]:
    """Where something of a task stands in the rich workflow."""
    return ("spec", "tasks", TASKS.index(name), *path)


def blocks(plan: dict[str, Any]) -> dict[str, str]:
    """Task -> rule. What is blocked is not reused, and says so among the tasks."""
    found = rules(plan)
    assert not set(found) & set(plan["reusedTasks"])
    verdicts = {task["taskId"]: task for task in plan["tasks"]}
    for block in plan["blockedReuse"]:
        if block["taskId"] in verdicts:
            assert verdicts[block["taskId"]]["disposition"] == "blocked"
            assert verdicts[block["taskId"]]["reason"] == block["message"]
    return found


def roots(plan: dict[str, Any], task: str) -> list[str]:
    """The roots that are suggested for a task."""
    return next(block["suggestedRepairRoots"] for block in plan["blockedReuse"] if block["taskId"] == task)


# -- the whole workflow ------------------------------------------------------------------------------------------------


def test_a_replay_is_no_source(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge("UPDATE runs SET mode = 'replay' WHERE run_id = ?", run_id)
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan) == {"$workflow": "recorded_replay_has_no_direct_effect_history"}
    assert plan["blockedReuse"][0]["fullForkRequired"] is True
    assert plan["reusedTasks"] == []


def test_another_workflow(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (("metadata", "name"), "other"))
    plan = place.plan("repair", file, run_id, "--from", "bad", compatible=False)
    assert blocks(plan) == {"$workflow": "workflow_identity_mismatch"}


def test_a_retry_takes_no_changed_workflow(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (at("shape", "with", "x"), 2))
    plan = place.plan("retry", file, run_id, "--failed", compatible=False)
    assert blocks(plan) == {"$workflow": "retry_workflow_definition_mismatch"}
    assert roots(plan, "$workflow") == ["shape"]
    block = plan["blockedReuse"][0]
    assert block["sourceFingerprint"] != block["targetFingerprint"]
    result = place.refused("retry", file, run_id, "--failed")
    assert (result.code, result.error["code"]) == (3, "blocked")
    assert [item["code"] for item in result.diagnostics] == ["retry_workflow_definition_mismatch"]
    # The same tasks with other variables are another workflow as well, and the message says which of both it is.
    result = place.refused("retry", "rich.yaml", run_id, "--failed", "--var", 'v="two"')
    assert result.code == 3
    assert "variables" in result.diagnostics[0]["message"]


# -- roots and the closure ---------------------------------------------------------------------------------------------


def test_a_root_that_is_not_there(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    plan = place.plan("repair", "rich.yaml", run_id, "--from", "bad", "--from", "bed", compatible=False)
    assert blocks(plan) == {"bed": "repair_root_missing"}


def test_a_root_that_has_succeeded(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    options = ("--from", "bad", "--from", "twice")
    plan = place.plan("repair", "rich.yaml", run_id, *options, compatible=False)
    assert blocks(plan) == {"twice": "successful_root_requires_acknowledgement"}
    plan = place.plan("repair", "rich.yaml", run_id, *options, "--restart-successful")
    assert plan["rerunTasks"] == ["twice", "reads", "bad", "below"]


def test_an_effect_that_is_unsafe_to_repeat(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    plan = place.plan("repair", "rich.yaml", run_id, "--from", "once", "--restart-successful", compatible=False)
    assert blocks(plan) == {"once": "unreconciled_effect"}
    # What was compensated may be done again.
    effects = {row[0]: row[1] for row in place.rows("SELECT task_id, effect_id FROM effects WHERE run_id = ?", run_id)}
    reconcile(place, effects["once"], "compensated", "--compensation-effect", effects["twice"])
    place.plan("repair", "rich.yaml", run_id, "--from", "once", "--restart-successful")


def test_what_cannot_be_the_inverse_of_an_effect(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    effects = {row[0]: row[1] for row in place.rows("SELECT task_id, effect_id FROM effects WHERE run_id = ?", run_id)}
    said = ("--status", "compensated", "--reason", "seen", "--approved", "--compensation-effect")
    for source, inverse, why in (
        ("once", "once", "does not compensate itself"),
        ("once", "bad", "not known to have happened"),
        ("twice", "once", "began before"),
    ):
        refused = place.refused("effects", "reconcile", effects[source], *said, effects[inverse])
        assert (refused.code, refused.error["code"]) == (5, "conflict"), refused.err
        assert why in refused.error["message"]
    place.forge("UPDATE effects SET effect_class = 'observe' WHERE effect_id = ?", effects["twice"])
    refused = place.refused("effects", "reconcile", effects["once"], *said, effects["twice"])
    assert "changes nothing" in refused.error["message"]
    assert place.scalar("SELECT COUNT(*) FROM effect_reconciliations") == 0


ONCE = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: once}
spec:
  policy: {approval: never, processAllowlist: [sh]}
  actions:
    sh: {kind: builtin.shell.exec, command: sh}
  tasks:
    - id: first
      uses: action:sh
      with: {args: [-c, "true"]}
    - id: t
      uses: action:sh
      needs: [first]
      with: {args: [-c, "true"]}
      outputSchema: {required: [never]}
"""


def test_the_advice_for_what_happened_can_be_followed(place: Place) -> None:
    """Nothing keeps the result of a task that has failed, and only an effect can be named as an inverse."""
    place.text("once.yaml", ONCE)
    run_id = place.go("once.yaml", code=4)
    shown = place("retry", "once.yaml", run_id, "--failed", "--plan").out
    assert "t: unreconciled_effect" in shown
    assert "there is no result that could be kept" in shown
    assert "no root at or above" not in shown
    assert "--status compensated --compensation-effect EFFECT" in shown
    shown = place("repair", "once.yaml", run_id, "--from", "first", "--restart-successful", "--plan").out
    assert "no root at or above first keeps its result" in shown


def reconcile(place: Place, effect: str, status: str, *options: str) -> None:
    result = place.json("effects", "reconcile", effect, "--status", status, "--reason", "seen", "--approved", *options)
    assert result.code == 0, result.err


def test_a_root_that_was_taken_over_before(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.text("ok", "")
    derived = place.derive("retry", "rich.yaml", run_id, "--failed", "--workspace", ".")["runId"]
    options = ("--from", "twice", "--restart-successful")
    plan = place.plan("repair", "rich.yaml", derived, *options, compatible=False)
    assert blocks(plan) == {"twice": "indirect_effect_history"}
    assert plan["blockedReuse"][0]["fullForkRequired"] is True


# -- what is to be reused ----------------------------------------------------------------------------------------------


def test_a_new_task(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    new = {"id": "new", "uses": "action:say", "with": {}}
    file = place.edit("rich.yaml", "other.yaml", (("spec", "tasks", len(TASKS)), new))
    plan = place.plan("repair", file, run_id, "--from", "bad", compatible=False)
    assert blocks(plan) == {"new": "new_task_outside_repair_closure"}
    assert plan["newTasks"] == roots(plan, "new") == ["new"]
    plan = place.plan("repair", file, run_id, "--from", "bad", "--from", "new")
    assert set(plan["rerunTasks"]) == {"new", "bad", "below"}


def test_a_task_that_did_not_succeed(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    plan = place.plan("repair", "rich.yaml", run_id, "--from", "below", compatible=False)
    assert blocks(plan) == {"bad": "source_task_not_successful"}
    assert roots(plan, "bad") == ["bad"]


def test_a_record_that_proves_nothing(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge_task(run_id, "twice", metadata_version=0)
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    # What depends on it cannot be proven either, and the same root takes both in.
    assert blocks(plan) == {"twice": "legacy_task_metadata", "reads": "resolved_input_unavailable"}
    assert roots(plan, "twice") == roots(plan, "reads") == ["twice"]


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (at("shape", "outputSchema"), {"type": "object", "minProperties": 1}, "output_contract_mismatch"),
        (at("reads", "needs"), ["twice", "once", "shape"], "dependency_set_mismatch"),
        (at("shape", "with", "x"), 2, "definition_fingerprint_mismatch"),
        (("spec", "memory", "working", "given"), 2, "resolved_input_digest_mismatch"),
        (("spec", "vars", "v"), "two", "resolved_input_digest_mismatch"),
        (("spec", "memory", "working", "given"), ..., "resolved_input_unavailable"),
    ],
)
def test_what_has_changed(copy: tuple[Place, str], path: tuple[str | int, ...], value: Any, rule: str) -> None:
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (path, value))
    plan = place.plan("repair", file, run_id, "--from", "bad", compatible=False)
    found = blocks(plan)
    task = "shape" if path[:3] == at("shape") else "reads"
    assert found[task] == rule
    # Whatever is above it is proven all the same.
    assert {"once", "twice", "remember", "put"} <= set(plan["reusedTasks"])
    options = ("--from", "bad", *from_all(roots_of(plan)), "--restart-successful")
    if value is not ...:
        place.plan("repair", file, run_id, *options)
    else:
        # What it reads is not there for a fresh attempt either.
        assert blocks(place.plan("repair", file, run_id, *options, compatible=False)) == {
            "reads": "target_input_resolution"
        }


def roots_of(plan: dict[str, Any]) -> list[str]:
    return sorted({root for block in plan["blockedReuse"] for root in block["suggestedRepairRoots"]})


def from_all(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--from", name)]


def test_a_skip_that_would_not_be_one(copy: tuple[Place, str]) -> None:
    """The condition of `maybe` holds with the new variable: it cannot be taken over as skipped."""
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (("spec", "vars", "v"), "other"))
    plan = place.plan("repair", file, run_id, "--from", "bad", compatible=False)
    assert blocks(plan) == {
        "maybe": "resolved_input_digest_mismatch",
        "later": "resolved_input_unavailable",
        "reads": "resolved_input_digest_mismatch",
    }
    assert roots(plan, "later") == ["maybe"]
    shown = place("repair", file, run_id, "--from", "bad", "--plan")
    assert shown.code == 3
    words = "--from reads --from maybe --from bad --restart-successful"
    assert f"what takes all of this in: {words}" in shown.out
    place.plan("repair", file, run_id, *words.split())


def test_an_effect_that_was_compensated(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    effects = {row[0]: row[1] for row in place.rows("SELECT task_id, effect_id FROM effects WHERE run_id = ?", run_id)}
    reconcile(place, effects["once"], "compensated", "--compensation-effect", effects["twice"])
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan)["once"] == "unresolved_reused_effect"


def test_an_effect_that_nobody_knows_of(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge("UPDATE effects SET status = 'uncertain', confirmed = 0 WHERE run_id = ? AND task_id = 'once'", run_id)
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan)["once"] == "unresolved_reused_effect"
    # One that was superseded blocks nothing, neither where it is reused nor where it is repeated; but that is part of
    # the history, which does not tell of this one.
    place.forge("UPDATE effects SET superseded = 1 WHERE run_id = ? AND task_id = 'once'", run_id)
    for verb, *options in (["retry", "--failed"], ["repair", "--from", "once", "--restart-successful"]):
        result = place.refused(verb, "rich.yaml", run_id, *options)
        assert (result.code, result.error["code"]) == (5, "corrupt"), result.err


@pytest.mark.parametrize("damage", ["empty", "no JSON", "missing", "a status"])
def test_a_damaged_provenance(copy: tuple[Place, str], damage: str) -> None:
    place, run_id = copy
    place.text("ok", "")
    derived = place.derive("retry", "rich.yaml", run_id, "--failed", "--workspace", ".")["runId"]
    sql = "SELECT reuse_decision_json FROM tasks WHERE run_id = ? AND task_id = 'once'"
    decision = json.loads(place.scalar(sql, derived))
    decision["sourceEffects"][0]["status"] = 1
    texts = {"empty": "{}", "no JSON": "nothing", "missing": None, "a status": json.dumps(decision)}
    place.forge_task(derived, "once", reuse_decision_json=texts[damage])
    plan = place.plan("repair", "rich.yaml", derived, "--from", "below", "--restart-successful", compatible=False)
    assert blocks(plan)["once"] == "reuse_effect_provenance"
    assert place.json("db", "verify").code != 0


@pytest.mark.parametrize("superseded", [False, True])
def test_an_effect_that_was_given_up_blocks_no_second_reuse_either(copy: tuple[Place, str], superseded: bool) -> None:
    """What a repeatable effect that was repeated has left behind is known as such in the provenance, too."""
    place, run_id = copy
    place.text("ok", "")
    derived = place.derive("retry", "rich.yaml", run_id, "--failed", "--workspace", ".")["runId"]
    sql = "SELECT reuse_decision_json FROM tasks WHERE run_id = ? AND task_id = 'twice'"
    decision = json.loads(place.scalar(sql, derived))
    decision["sourceEffects"][0] |= {"status": "uncertain", "confirmed": False, "superseded": superseded}
    place.forge_task(derived, "twice", reuse_decision_json=json.dumps(decision))
    plan = place.plan("repair", "rich.yaml", derived, "--from", "below", compatible=False)
    found = blocks(plan)
    assert found.pop("below") == "successful_root_requires_acknowledgement"
    assert found.get("twice") == (None if superseded else "unresolved_reused_effect")
    assert ("twice" in plan["reusedTasks"]) is superseded


def test_a_compensation_that_came_after_the_first_reuse(copy: tuple[Place, str]) -> None:
    """The source of a source: what was concluded about its effects counts for whoever reuses its results again."""
    place, run_id = copy
    place.text("ok", "")
    derived = place.derive("retry", "rich.yaml", run_id, "--failed", "--workspace", ".")["runId"]
    options = ("--from", "below", "--restart-successful")
    place.plan("repair", "rich.yaml", derived, *options)
    effects = {row[0]: row[1] for row in place.rows("SELECT task_id, effect_id FROM effects WHERE run_id = ?", run_id)}
    reconcile(place, effects["once"], "compensated", "--compensation-effect", effects["twice"])
    plan = place.plan("repair", "rich.yaml", derived, *options, compatible=False)
    assert blocks(plan)["once"] == "unresolved_reused_effect"
    # It cannot be a root, since it was taken over, and neither can what depends on it: the first plan says so.
    once = next(block for block in plan["blockedReuse"] if block["taskId"] == "once")
    assert (once["fullForkRequired"], once["suggestedRepairRoots"]) == (True, [])
    shown = place("repair", "rich.yaml", derived, *options, "--plan").out
    assert f"`agentctl fork {derived}`" in shown
    assert "what takes all of this in" not in shown


def test_each_advice_has_the_acknowledgement_that_its_roots_need(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (at("shape", "with", "x"), 2))
    shown = place("repair", file, run_id, "--from", "bad", "--plan").out
    assert "take it into what is executed: --from shape --restart-successful" in shown


# -- what was changed behind the back of agentctl ----------------------------------------------------------------------


@pytest.mark.parametrize("with_digest", [False, True])
def test_a_forged_output(copy: tuple[Place, str], with_digest: bool) -> None:
    place, run_id = copy
    text = '{"after":{"x":9}}'
    digest = {"output_digest": text_digest(text)} if with_digest else {}
    place.forge_task(run_id, "shape", output_json=text, **digest)
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan)["shape"] == "output_digest_mismatch"
    assert place.refused("retry", "rich.yaml", run_id, "--failed").code == 3


@pytest.mark.parametrize("task", ["shape", "twice"])
def test_an_output_that_breaks_its_contract(copy: tuple[Place, str], task: str) -> None:
    """A forger who is careful: output, digest and the whole chain fit one another, and the contract still does not.

    That of `shape` is its `outputSchema`, that of `twice` the one of every action: an object.
    """
    place, run_id = copy
    old = place.scalar("SELECT output_digest FROM tasks WHERE run_id = ? AND task_id = ?", run_id, task)
    place.forge_task(run_id, task, output_json="[1]", output_digest=text_digest("[1]"))
    place.forge_chain(run_id, old, text_digest("[1]"))
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan)[task] == "output_contract_validation"


def blob(place: Place) -> Path:
    digest = place.scalar("SELECT digest FROM artifact_refs")
    return place.database.parent / "artifacts" / "sha256" / digest[7:9] / digest[7:]


def test_bytes_that_are_gone_or_changed(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    path = blob(place)
    path.chmod(0o600)
    path.write_bytes(b"HELLO")
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan) == {"put": "artifact_integrity"}
    path.unlink()
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan) == {"put": "artifact_integrity"}
    result = place.refused("retry", "rich.yaml", run_id, "--failed")
    assert (result.code, result.diagnostics[0]["code"]) == (3, "artifact_integrity")


def test_references_that_are_not_those_of_the_manifest(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge("UPDATE artifact_refs SET logical_path = 'out/b.txt'")
    assert blocks(place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)) == {
        "put": "artifact_integrity"
    }


DELTA = '{"formatVersion":1,"remove":[],"set":{"k":"w"}}'


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"delta_json": None, "delta_digest": None}, "state_delta_missing"),
        ({"delta_json": DELTA}, "state_delta_digest_mismatch"),
        ({"delta_json": DELTA, "delta_digest": text_digest(DELTA)}, "state_delta_invalid"),
    ],
)
def test_a_forged_state_delta(copy: tuple[Place, str], columns: dict[str, Any], rule: str) -> None:
    place, run_id = copy
    place.forge_task(run_id, "remember", **columns)
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan)["remember"] == rule
    assert blocks(plan)["reads"] == "resolved_input_unavailable"


def test_a_skip_whose_record_is_damaged(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge_task(run_id, "later", error_json="no JSON")
    result = place.refused("retry", "rich.yaml", run_id, "--failed")
    assert (result.code, result.error["code"]) == (5, "corrupt")


def test_a_manifest_that_is_none(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge_task(run_id, "put", artifact_manifest_json="no JSON")
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan) == {"put": "artifact_integrity"}


def test_a_forged_input_digest(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    place.forge_task(run_id, "reads", input_digest="x")
    plan = place.plan("retry", "rich.yaml", run_id, "--failed", compatible=False)
    assert blocks(plan) == {"reads": "resolved_input_digest_mismatch"}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE run_documents SET plan_json = replace(plan_json, 'hello', 'hullo')",
        "UPDATE run_documents SET workflow_json = replace(workflow_json, 'hello', 'hullo')",
        "UPDATE run_documents SET settings_json = replace(settings_json, 'tick', 'tack')",
        "UPDATE run_documents SET inputs_json = '{\"x\":1}'",
        "UPDATE checkpoints SET state_json = replace(state_json, 'succeeded', 'skipped') WHERE sequence > 1",
        "UPDATE checkpoints SET checksum = 'x' WHERE sequence = 2",
        "UPDATE memory_values SET value_json = '\"w\"' WHERE key = 'k'",
        "UPDATE tasks SET state = 'succeeded' WHERE task_id = 'bad'",
        "UPDATE tasks SET task_id = 'onze' WHERE task_id = 'once'",
        "UPDATE tasks SET attempt = 7 WHERE task_id = 'once'",
        "UPDATE runs SET state = 'succeeded'",
    ],
)
def test_a_damaged_history(copy: tuple[Place, str], statement: str) -> None:
    """Whatever does not fit the chain of checkpoints is damage, and nothing is taken from such a run."""
    place, run_id = copy
    place.forge(statement)
    # The last one is blocked in a sound history: what was read is held to the chain before anything is made of it.
    for verb, *options in (["retry", "--failed"], ["repair", "--from", "bad"], ["repair", "--from", "shape"]):
        result = place.refused(verb, "rich.yaml", run_id, *options)
        assert (result.code, result.error["code"]) == (5, "corrupt"), result.err
    if "documents" in statement:
        result = place.json("fork", run_id)
        assert (result.code, result.error["code"]) == (5, "corrupt")


@pytest.mark.parametrize("held", ["nobody", "the agent", "the task"])
def test_what_an_agent_has_said_is_reused_if_something_holds_it_to_a_form(place: Place, held: str) -> None:
    agent: dict[str, Any] = {"provider": "local", "model": "m", "instructions": "Answer."}
    agent["providerOptions"] = {"finalText": '{"word": "yes"}'}
    task: dict[str, Any] = {"id": "ask", "uses": "agent:one", "with": {"prompt": "?"}}
    if held == "the agent":
        agent["structuredOutput"] = {"type": "object", "required": ["word"]}
    elif held == "the task":
        task["outputSchema"] = {"type": "object", "required": ["text"]}
    bad = {"id": "bad", "uses": "action:test", "needs": ["ask"], "with": {"that": False}}
    more = {"providers": {"local": {"kind": "fake"}}, "agents": {"one": agent}}
    file = place.workflow("asks", [task, bad], actions={"test": {"kind": "builtin.assert"}}, **more)
    source = place.go(file, code=4)
    plan = place.plan("retry", file, source, "--failed", compatible=held != "nobody")
    if held == "nobody":
        assert blocks(plan) == {"ask": "missing_output_contract"}
        assert roots(plan, "ask") == ["ask"]
    else:
        assert plan["reusedTasks"] == ["ask"]
        assert place.record(place.derive("retry", file, source, "--failed", code=4)["runId"])["effects"] == []


# -- what is executed --------------------------------------------------------------------------------------------------


def test_a_root_that_could_not_begin(copy: tuple[Place, str]) -> None:
    place, run_id = copy
    file = place.edit("rich.yaml", "other.yaml", (at("bad", "with"), {"stdin": "${{ tasks.once.output.nothing }}"}))
    plan = place.plan("repair", file, run_id, "--from", "bad", compatible=False)
    assert blocks(plan) == {"bad": "target_input_resolution"}


# -- sources that are none ---------------------------------------------------------------------------------------------


def test_sources_that_are_none(place: Place) -> None:
    file = place.workflow(
        "small", [{"id": "a", "uses": "action:say", "with": {}}], actions={"say": {"kind": "builtin.assign"}}
    )
    done = place.go(file)
    result = place.refused("retry", file, done, "--failed")
    assert (result.code, result.error["code"]) == (4, "already_terminal")
    check = place.json("run", file, "--check").data["runId"]
    for arguments in (["retry", file, check, "--failed"], ["repair", file, check, "--from", "a"], ["fork", check]):
        result = place.json(*arguments)
        assert (result.code, result.error["code"]) == (2, "usage")
        assert "check" in result.error["message"]
    waiting = place.submit(file)
    result = place.refused("retry", file, waiting, "--failed")
    assert (result.code, result.error["code"]) == (4, "not_terminal")
    result = place.refused("retry", file, "run-nothing", "--failed")
    assert (result.code, result.error["code"]) == (5, "not_found")
    for words in (["retry", file, done], ["retry", file, done, "--failed", "--from", "a"], ["repair", file, done]):
        result = place.json(*words)
        assert (result.code, result.error["code"]) == (2, "usage")
    assert len(json.loads(place.json("runs", "list").out)["data"]["runs"]) == 3
