"""Repair with a corrected file, fork, and both inside of nested sub-workflows: what is executed, told by a ledger."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.children import wait_until
from support.recovery import GATE, Place, gate, rules


def chain(place: Place) -> str:
    """a before b before c, and d beside them; b is wrong."""
    return place.workflow(
        "chain",
        [
            place.tick_task("a", idempotent=False),
            gate(place, "b", "/nothing", needs=["a"]),
            place.tick_task("c", idempotent=False, needs=["b"]),
            place.tick_task("d", idempotent=False, needs=["a"]),
        ],
        actions=GATE,
        concurrency=4,
    )


def test_a_repair_executes_the_closure_only(place: Place) -> None:
    file = chain(place)
    source = place.go(file, code=4)
    assert sorted(place.labels()) == ["a", "b", "d"]
    fixed = place.edit(file, "fixed.yaml", (("spec", "tasks", 1, "with", "args", 5), "/"))
    plan = place.plan("repair", fixed, source, "--from", "b")
    assert (plan["reusedTasks"], plan["rerunTasks"]) == (["a", "d"], ["b", "c"])
    assert (plan["changedTasks"], plan["newTasks"], plan["removedTasks"]) == (["b"], [], [])
    assert plan["sourceWorkflowDigest"] != plan["targetWorkflowDigest"]
    outcome = place.derive("repair", fixed, source, "--from", "b", "--reason", "a slip")
    assert sorted(place.labels()[3:]) == ["b", "c"]
    assert (outcome["reusedTasks"], outcome["executedTasks"]) == (["a", "d"], ["b", "c"])
    assert (outcome["repairRoots"], outcome["sourceRunId"]) == (["b"], source)
    run = place.record(outcome["runId"])["run"]
    assert run["runId"].startswith("repair-")
    assert (run["mode"], run["lineage"]["reason"], run["lineage"]["roots"]) == ("repair", "a slip", ["b"])
    assert run["lineage"]["sourceWorkflowDigest"] == plan["sourceWorkflowDigest"]
    assert "failedOnly" not in run["lineage"]
    assert [event["eventType"] for event in place.record(outcome["runId"])["audit"]][:3] == [
        "repair.created",
        "repair.task_reused",
        "repair.task_reused",
    ]


def test_tasks_come_and_go(place: Place) -> None:
    file = chain(place)
    source = place.go(file, code=4)
    document = json.loads((place.folder / file).read_text())
    tasks = document["spec"]["tasks"]
    new = place.tick_task("new", idempotent=False, needs=["a"])
    fixed = place.edit(
        file, "fixed.yaml", (("spec", "tasks"), [tasks[0], {**tasks[2], "needs": ["new"]}, tasks[3], new])
    )
    plan = place.plan("repair", fixed, source, "--from", "new")
    assert (plan["newTasks"], plan["removedTasks"], plan["changedTasks"]) == (["new"], ["b"], ["c"])
    assert {task["taskId"]: task["disposition"] for task in plan["tasks"]} == {
        "a": "reuse",
        "d": "reuse",
        "new": "execute",
        "c": "execute",
        "b": "removed",
    }
    place.derive("repair", fixed, source, "--from", "new")
    assert place.labels()[3:] == ["new", "c"]


def test_a_fork_executes_everything_once_more(place: Place) -> None:
    file = chain(place)
    source = place.go(file, "--input", "unused=1", code=4)
    before = place.labels()
    (place.folder / file).unlink()  # what is stored is enough
    result = place.json("fork", source, "--reason", "again")
    assert result.code == 4
    assert sorted(place.labels()[3:]) == sorted(before)
    run = place.record(result.data["runId"])["run"]
    old = place.record(source)["run"]
    assert run["runId"].startswith("fork-")
    assert (run["mode"], run["parentRunId"], run["sourceRunId"]) == ("fork", source, None)
    assert run["lineage"]["reason"] == "again"
    for name in ("workflow", "plan", "inputs", "workflowDigest", "planDigest", "basePath"):
        assert run[name] == old[name]
    assert place.record(result.data["runId"])["audit"][0]["eventType"] == "run.created"
    place.assert_sound()
    # From a run that has not even begun, too, and from a fork.
    waiting = place.submit(place.workflow("w", [place.tick_task("x", idempotent=False)]))
    forked = place.json("fork", waiting)
    assert forked.code == 0
    assert place.json("fork", forked.data["runId"]).code == 0
    assert place.labels().count("x") == 2
    place.assert_sound()


def test_a_search_that_is_repaired_sees_what_was_written_later(place: Place) -> None:
    kinds = {
        "put": {"kind": "builtin.long_term_memory.write"},
        "find": {"kind": "builtin.long_term_memory.search"},
    }
    find = {"id": "find", "uses": "action:find", "with": {"query": "boats"}}
    file = place.workflow(
        "search",
        [find, gate(place, "bad", "ok", needs=["find"], failure="continue")],
        actions={**GATE, **kinds},
        memory={"longTerm": {"namespace": "n"}},
    )
    source = place.go(file, code=4)
    assert place.json("memory", "put", "k", "boats on a lake", "--namespace", "n").code == 0
    place.text("ok", "")
    # Reused, it says what it said; executed again, it says what there is now.
    kept = place.derive("retry", file, source, "--failed")
    assert {task["taskId"]: task for task in place.record(kept["runId"])["tasks"]}["find"]["output"]["count"] == 0
    options = ("--from", "find", "--restart-successful")
    plan = place.plan("repair", file, source, *options)
    assert any("long-term memory" in text for text in plan["warnings"])
    fresh = place.derive("repair", file, source, *options)
    assert {task["taskId"]: task for task in place.record(fresh["runId"])["tasks"]}["find"]["output"]["count"] == 1


@pytest.mark.parametrize("kind", ["read", "search"])
def test_what_was_read_elsewhere_is_not_reused(place: Place, kind: str) -> None:
    """Where long-term memory is read stands beside the action, and is a part of what the task is."""
    with_ = {"read": {"key": "price"}, "search": {"query": "price"}}[kind]
    find = {"id": "find", "uses": "action:find", "with": with_}

    def file(namespace: str) -> str:
        return place.workflow(
            "ns",
            [find, gate(place, "bad", "ok", needs=["find"], failure="continue")],
            actions={**GATE, "find": {"kind": f"builtin.long_term_memory.{kind}"}},
            memory={"longTerm": {"namespace": namespace}},
        )

    for namespace, price in (("prod", "100"), ("staging", "7")):
        place.go(file(namespace), code=4)  # the first one makes the database
        assert place.json("memory", "put", "price", price, "--namespace", namespace).code == 0
    source = place.go(file("prod"), code=4)
    plan = place.plan("repair", file("staging"), source, "--from", "bad", compatible=False)
    assert rules(plan) == {"find": "definition_fingerprint_mismatch"}
    place.text("ok", "")
    place.derive("repair", file("prod"), source, "--from", "bad")


def nested(place: Place) -> str:
    """Calls in calls: an inner one makes a file, tells the ledger, remembers, and fails until there is a file `ok`."""
    make = {
        "kind": "builtin.shell.exec",
        "command": "sh",
        "args": ["-c", "mkdir -p out && echo made >> out/made.txt"],
        "artifacts": ["out/made.txt"],
    }
    inner: dict[str, Any] = {
        "version": "1.0.0",
        "inputs": {"name": "nobody"},
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
        "tasks": [
            {"id": "make", "uses": "action:make"},
            {"id": "keep", "uses": "action:remember", "with": {"key": "who", "value": "${{ inputs.name }}"}},
            {
                **place.tick_task("tell", idempotent=False, needs=["make"]),
                "with": {"args": [str(place.ledger), "${{ inputs.name }}", "0"]},
            },
            gate(place, "bad", "ok", needs=["tell", "keep"]),
        ],
        "outputs": {"who": "${{ memory.who }}", "code": "${{ tasks.bad.output.exitCode }}"},
    }
    outer = {
        "version": "1.0.0",
        "inputs": {"names": "x"},
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
        "tasks": [
            {"id": "in", "uses": "workflow:inner", "with": {"name": "${{ inputs.names }}"}},
            place.tick_task("after", idempotent=False, needs=["in"]),
        ],
        "outputs": {"inner": "${{ tasks.in.output }}"},
    }
    return place.workflow(
        "nested",
        [
            place.tick_task("before", idempotent=False),
            {"id": "out", "uses": "workflow:outer", "needs": ["before"], "with": {"names": "ada"}},
            place.tick_task("last", idempotent=False, needs=["out"]),
        ],
        actions={**GATE, "make": make, "remember": {"kind": "builtin.memory.write"}},
        subworkflows={"inner": inner, "outer": outer},
        policy={"approval": "never", "processAllowlist": ["sh", "tick"], "writableRoots": ["out"]},
    )


def test_inside_of_nested_calls(place: Place) -> None:
    """Retry, approval, artifacts and memory in the second level; the boundaries are proven like all other tasks."""
    file = nested(place)
    source = place.go(file, code=4)
    assert place.labels() == ["before", "ada", "bad"]
    plan = place.plan("retry", file, source, "--failed")
    assert plan["retryRoots"] == ["out--in--bad"]
    assert plan["rerunTasks"] == ["out--in--bad", "out--in", "out--after", "out", "last"]
    assert {"out--in--make", "out--in--tell", "out--in--keep"} <= set(plan["reusedTasks"])
    place.text("ok", "")
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["output"]["out"] == {"inner": {"who": "ada", "code": 0}}
    assert place.labels()[3:] == ["bad", "after", "last"]
    assert [(item["taskId"], item["sourceTaskId"]) for item in outcome["artifacts"]] == [("out--in--make",) * 2]
    assert (place.folder / "out" / "made.txt").read_text() == "made\n"

    careful = place.edit(file, "careful.yaml", (("spec", "policy", "approval"), "mutations"))
    asked = place.derive("repair", careful, source, "--from", "out--in--bad", code=3)
    while asked["state"] == "paused":
        approval = place.record(asked["runId"])["approvals"][0]["approvalId"]
        assert place.json("approvals", "approve", approval, "--actor", "me", "--reason", "fine").code == 0
        asked = {**asked, **place.json("resume", asked["runId"]).data}
    assert asked["state"] == "succeeded"
    assert place.labels()[6:] == ["bad", "after", "last"]
    place.assert_sound()


def test_a_run_that_was_cancelled_inside_of_a_call(place: Place) -> None:
    """What the cancel left open has to be reconciled; then the retry takes up whatever was not done."""
    file = nested(place)
    slow = place.edit(
        file, "slow.yaml", (("spec", "subworkflows", "inner", "tasks", 3, "with", "args", 1), "test -e ok || sleep 60")
    )
    process = place.start("run", slow, "--output", "json")
    running = "SELECT 1 FROM effects WHERE status = 'started' AND task_id = 'out--in--bad'"
    wait_until(lambda: bool(place.rows(running)), "the inner command runs")
    source = place.scalar("SELECT run_id FROM runs")
    assert place.json("cancel", source).code == 0
    assert process.wait().code == 130
    place.text("ok", "")
    plan = place.plan("retry", slow, source, "--failed", compatible=False)
    assert rules(plan) == {"out--in--bad": "unreconciled_effect"}
    assert plan["freshEffectSummary"]["uncertainSourceEffects"] == 1
    [effect] = place.rows("SELECT effect_id FROM effects WHERE status = 'uncertain'")
    options = ("--status", "not-applied", "--reason", "it only slept", "--approved")
    assert place.json("effects", "reconcile", effect[0], *options).code == 0
    outcome = place.derive("retry", slow, source, "--failed")
    assert outcome["state"] == "succeeded"
    assert place.labels() == ["before", "ada", "after", "last"]


def test_a_changed_inner_workflow_is_found_at_its_tasks(place: Place) -> None:
    file = nested(place)
    source = place.go(file, code=4)
    changed = place.edit(file, "changed.yaml", (("spec", "subworkflows", "inner", "inputs"), {"name": "n", "more": 1}))
    plan = place.plan("repair", changed, source, "--from", "out--in--bad", compatible=False)
    found = rules(plan)
    boundary = next(name for name in found if name.startswith("out--in--inputs-"))
    assert found[boundary] == "definition_fingerprint_mismatch"
    assert {block["suggestedRepairRoots"][0] for block in plan["blockedReuse"]} == {boundary}


def test_one_root_names_all_items_of_a_fan_out(place: Place) -> None:
    """The correction of a wide fan-out is asked for in one word, and that word is what a blocked plan proposes."""
    each = {
        "id": "each",
        "uses": "action:tick-i",
        "needs": ["before"],
        "foreach": {"items": list(range(80)), "maxItems": 80},
        "with": {"args": [str(place.ledger), "each-${{ vars.item }}", "0"]},
    }
    other = place.tick_task("each-other", idempotent=True, needs=["before"])
    file = place.workflow("fan", [place.tick_task("before", idempotent=False), each, other])
    source = place.go(file)
    changed = place.edit(file, "changed.yaml", (("spec", "tasks", 1, "with", "args", 1), "again-${{ vars.item }}"))
    advice = "--from 'each--*' --from each --restart-successful"
    assert f"what takes all of this in: {advice}\n" in place("repair", changed, source, "--from", "each", "--plan").out
    refused = place("retry", changed, source, "--from", "each")
    assert f"agentctl repair FILE {source} --from 'each--*' --restart-successful`" in refused.err
    plan = place.plan("repair", changed, source, "--from", "each--*", "--restart-successful")
    assert plan["reusedTasks"] == ["before", "each-other"]
    assert len(plan["repairRoots"]) == 80
    shown = place("repair", changed, source, "--from", "each--*", "--restart-successful", "--plan").out
    assert len(shown.splitlines()[0]) < 300
    outcome = place.derive("repair", changed, source, *advice.replace("'", "").split())
    assert len(outcome["executedTasks"]) == 81
    assert place.labels().count("before") == 1
    assert sorted(place.labels()[-80:]) == sorted(f"again-{number}" for number in range(80))
    assert rules(place.plan("repair", changed, source, "--from", "other--*", compatible=False))["other--*"] == (
        "repair_root_missing"
    )
    everything = place.plan("repair", changed, source, "--from", "*", "--restart-successful", compatible=False)
    assert rules(everything) == {"before": "unreconciled_effect"}, "what must not happen twice stays what it is"


def test_who_names_what_only_gathers_is_told_how_to_name_its_tasks(place: Place) -> None:
    """A fan-out, a loop or a call by its own id is its aggregate: to execute that again executes no action."""
    tick = {"uses": "action:tick-i"}
    tasks: list[dict[str, Any]] = [
        {
            "id": "each",
            **tick,
            "foreach": {"items": [1, 2]},
            "with": {"args": [str(place.ledger), "each-${{ vars.item }}", "0"]},
        },
        {
            "id": "loop",
            **tick,
            "loop": {"maxIterations": 2, "while": "${{ vars.loopIndex < 2 }}"},
            "with": {"args": [str(place.ledger), "loop-${{ vars.loopIndex }}", "0"]},
        },
        {"id": "call", "uses": "workflow:inner", "with": {}},
        place.tick_task("alone", idempotent=True),
    ]
    inner = {
        "version": "1.0.0",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
        "outputs": {},
        "tasks": [{"id": "in", **tick, "with": {"args": [str(place.ledger), "in", "0"]}}],
    }
    file = place.workflow("gathering", tasks, subworkflows={"inner": inner})
    source = place.go(file)
    for name in ("each", "loop", "call"):
        plan = place.plan("retry", file, source, "--from", name, "--restart-successful")
        assert plan["rerunTasks"] == [name]
        [warning] = plan["warnings"]
        assert f"--from '{name}--*' --restart-successful`" in warning
        for roots in ((f"{name}--*",), (name, f"{name}--*"), ("alone",)):
            words = [word for root in roots for word in ("--from", root)]
            assert place.plan("retry", file, source, *words, "--restart-successful")["warnings"] == []
    # A new item says by itself what has to be named.
    more = place.edit(file, "more.yaml", (("spec", "tasks", 0, "foreach", "items"), [1, 2, 3]))
    plan = place.plan("repair", more, source, "--from", "each", "--restart-successful", compatible=False)
    assert plan["warnings"] == [] and "new_task_outside_repair_closure" in rules(plan).values()
    before = place.labels()
    place.derive("retry", file, source, "--from", "each--*", "--restart-successful")
    assert sorted(set(place.labels()[len(before) :])) == ["each-1", "each-2"]
