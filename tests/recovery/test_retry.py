"""What a retry executes and what it reuses, told by a ledger to which each command appends a line."""

from __future__ import annotations

import shutil
import signal

from support.children import wait_until
from support.recovery import GATE, Place, gate, rules

CHECKED = [
    "outside_rerun_closure",
    "definition_fingerprint",
    "resolved_input_digest",
    "dependency_set",
    "output_contract",
    "output_digest",
    "artifact_integrity",
    "state_delta_digest",
    "effect_certainty",
]


def fan(place: Place, count: int) -> str:
    """A fan-out of which items 3 and 7 fail until there are files for them; something before, beside and behind it."""
    script = 'printf "%s each-%s 0\\n" "$AGENTCTL_EFFECT_ID" "$2" >> "$1"; case $2 in 3|7) test -e ok-$2;; esac'
    each = {
        "id": "each",
        "uses": "action:gate",
        "needs": ["before"],
        "failure": "continue",
        "foreach": {"items": list(range(count)), "maxItems": count},
        "with": {"args": ["-c", script, "sh", str(place.ledger), "${{ vars.item }}"]},
    }
    return place.workflow(
        "fan",
        [
            place.tick_task("before", idempotent=False),
            each,
            place.tick_task("beside", idempotent=False),
            place.tick_task("behind", idempotent=True, needs=["each"]),
        ],
        actions=GATE,
        runtime={"maxConcurrency": 8, "budgets": {"maxProcessOutputBytes": 10_000_000, "maxTasks": 1000}},
    )


def test_two_items_of_a_hundred(place: Place) -> None:
    file = fan(place, 100)
    source = place.go(file, code=4)
    assert len(place.labels()) == 103
    plan = place.plan("retry", file, source, "--failed")
    assert len(place.labels()) == 103, "a plan executes nothing"
    failed = [task["taskId"] for task in place.record(source)["tasks"] if task["state"] == "failed"]
    assert plan["retryRoots"] == failed
    assert plan["rerunTasks"] == [*failed, "each", "behind"]
    assert len(plan["reusedTasks"]) == 100
    assert plan["freshEffectSummary"] == {
        "providerTasks": 0,
        "actionTasks": 4,
        "declaredEffects": 3,
        "uncertainSourceEffects": 0,
    }
    for name in ("ok-3", "ok-7"):
        place.text(name, "")
    outcome = place.derive("retry", file, source, "--failed", "--reason", "the files are there")
    assert sorted(place.labels()[103:]) == ["behind", "each-3", "each-7"]
    assert (outcome["state"], outcome["sourceRunId"], outcome["failedOnly"]) == ("succeeded", source, True)
    assert outcome["retryRoots"] == failed
    assert outcome["executedTasks"] == [*failed, "each", "behind"]
    assert outcome["reusedTasks"] == plan["reusedTasks"]
    items = outcome["output"]["each"]["items"]
    assert [item["state"] for item in items] == ["succeeded"] * 100

    record = place.record(outcome["runId"])
    run = record["run"]
    assert (run["mode"], run["sourceRunId"], run["parentRunId"]) == ("retry", source, None)
    assert run["lineage"] == {
        "formatVersion": 1,
        "sourceWorkflowDigest": run["workflowDigest"],
        "roots": failed,
        "reason": "the files are there",
        "restartSuccessful": False,
        "failedOnly": True,
    }
    assert run["runId"].startswith("retry-")
    before = {task["taskId"]: task for task in place.record(source)["tasks"]}
    for task in record["tasks"]:
        if task["taskId"] in plan["rerunTasks"]:
            assert (task["disposition"], task["attempt"], task["sourceRunId"]) == ("executed", 1, None)
            continue
        old = before[task["taskId"]]
        assert (task["disposition"], task["state"], task["attempt"]) == ("reused", "succeeded", 0)
        assert (task["sourceRunId"], task["sourceTaskId"], task["sourceAttempt"]) == (source, task["taskId"], 1)
        for name in ("output", "outputDigest", "inputDigest", "definitionFingerprint", "stateDeltaDigest"):
            assert task[name] == old[name]
        decision = task["reuseDecision"]
        assert decision["checks"] == ["source_succeeded", *CHECKED]
        assert [effect["status"] for effect in decision["sourceEffects"]] == ["succeeded"]
    # Nothing but what was executed has effects, attempts or charges.
    assert {effect["request"]["taskId"] for effect in record["effects"]} == {*failed, "behind"}
    events = [event["eventType"] for event in record["audit"]]
    assert events[0] == "retry.created"
    assert events.count("retry.task_reused") == 100
    assert "run.created" not in events
    used = record["budget"]["usage"]
    sql = "SELECT COUNT(DISTINCT reservation_id) FROM budget_reservations WHERE run_id = ?"
    assert place.scalar(sql, outcome["runId"]) == 3
    assert used["processOutputBytes"] == 0


def test_a_derived_run_needs_nothing_of_its_source(place: Place) -> None:
    """Source and workspace are deleted: the run can be inspected, its artifacts read, and a repair made of it."""
    script = "mkdir -p out; echo hello > out/a.txt"
    make = {
        "kind": "builtin.shell.exec",
        "command": "sh",
        "args": ["-c", script],
        "artifacts": ["out/a.txt"],
        "idempotency": "idempotent",
    }
    file = place.workflow(
        "keeps",
        [
            {"id": "make", "uses": "action:make"},
            place.tick_task("count", idempotent=True, needs=["make"]),
            gate(place, "last", "ok", needs=["count"]),
        ],
        actions={"gate": {**GATE["gate"], "idempotency": "idempotent"}, "make": make},
        policy={"approval": "never", "processAllowlist": ["sh", "tick"], "writableRoots": ["out"]},
    )
    source = place.go(file, code=4)
    place.text("ok", "")
    outcome = place.derive("retry", file, source, "--failed")
    assert [(item["taskId"], item["path"]) for item in outcome["artifacts"]] == [("make", "out/a.txt")]
    assert outcome["artifacts"][0]["sourceRunId"] == source
    assert outcome["artifacts"][0]["sourceTaskId"] == "make"
    record = place.record(outcome["runId"])

    assert place.json("gc", "--older-than-days", "0", "--state", "failed").data["runs"]["removed"] == [source]
    shutil.rmtree(place.folder / "out")
    assert place.record(outcome["runId"]) == record
    place.assert_sound()
    target = place.root / "copy.txt"
    digest = outcome["artifacts"][0]["digest"]
    assert place.json("artifacts", "export", digest, str(target)).code == 0
    assert target.read_text() == "hello\n"
    changed = place.edit(file, "changed.yaml", (("spec", "tasks", 2, "with", "args", 4), "afterwards"))
    place.derive("repair", changed, outcome["runId"], "--from", "last", "--restart-successful")
    assert place.labels() == ["count", "last", "last", "afterwards"]


def test_a_retry_of_a_retry(place: Place) -> None:
    """What was reused is reused again, and each run tells where it has it from."""
    file = place.workflow(
        "twice",
        [
            place.tick_task("a", idempotent=False),
            gate(place, "b", "ok-b", needs=["a"]),
            gate(place, "c", "ok-c", needs=["b"]),
        ],
        actions=GATE,
    )
    first = place.go(file, code=4)
    place.text("ok-b", "")
    second = place.derive("retry", file, first, "--failed", code=4)["runId"]
    place.text("ok-c", "")
    third = place.derive("retry", file, second, "--failed")
    assert place.labels() == ["a", "b", "b", "c", "c"]
    tasks = {task["taskId"]: task for task in place.record(third["runId"])["tasks"]}
    assert [tasks[name]["sourceRunId"] for name in ("a", "b")] == [second, second]
    assert [tasks[name]["sourceAttempt"] for name in ("a", "b")] == [0, 1]
    # The effects behind it are those of the first run, although the second one has none for this task.
    effect = place.scalar("SELECT effect_id FROM effects WHERE run_id = ? AND task_id = 'a'", first)
    assert [item["effectId"] for item in tasks["a"]["reuseDecision"]["sourceEffects"]] == [effect]


def test_what_a_stop_left_undone_is_taken_up(place: Place) -> None:
    """After a stop, tasks that never ran are roots like the failed one; what depends on either needs no naming."""
    file = place.workflow(
        "stop",
        [
            place.tick_task("done", idempotent=False),
            gate(place, "bad", "ok", needs=["done"]),
            place.tick_task("behind", idempotent=False, needs=["bad"]),
            place.tick_task("far", idempotent=False, needs=["done"]),
            place.tick_task("beyond", idempotent=False, needs=["far"]),
        ],
        actions=GATE,
        concurrency=1,
    )
    source = place.go(file, code=4)
    assert place.labels() == ["done", "bad"]
    plan = place.plan("retry", file, source, "--failed")
    assert plan["retryRoots"] == ["bad", "far"]
    place.text("ok", "")
    place.derive("retry", file, source, "--failed")
    assert sorted(place.labels()[2:]) == ["bad", "behind", "beyond", "far"]


def test_what_decisions_have_skipped_stays_skipped(place: Place) -> None:
    """A condition, a router and a loop that came to its end early: none of them makes what follows run again."""
    said = "${{ tasks.start.output.output.way }}"
    file = place.workflow(
        "decided",
        [
            {"id": "start", "uses": "action:say", "with": {"way": "left"}},
            {"id": "never", "uses": "action:say", "needs": ["start"], "when": "${{ vars.no }}", "with": {}},
            {"id": "nor", "uses": "action:say", "needs": ["never"], "with": {}},
            {
                "id": "way",
                "uses": "router",
                "needs": ["start"],
                "route": {
                    "select": said,
                    "cases": [
                        {"equals": "left", "tasks": ["left"]},
                        {"equals": "right", "tasks": ["right"]},
                    ],
                },
            },
            place.tick_task("left", idempotent=False, needs=["way"]),
            place.tick_task("right", idempotent=False, needs=["way"]),
            place.tick_task("further", idempotent=False, needs=["right"]),
            {
                "id": "loop",
                "uses": "action:say",
                "needs": ["start"],
                "loop": {
                    "maxIterations": 5,
                    "while": "${{ loop.output.output.left > 0 }}",
                    "initial": {"output": {"left": 1}},
                },
                "with": {"left": 0},
            },
            place.tick_task("behind-loop", idempotent=False, needs=["loop"]),
            gate(place, "bad", "ok", needs=["start"]),
        ],
        actions=GATE,
        vars={"no": False},
    )
    source = place.go(file, code=4)
    executed = sorted(place.labels())
    assert executed == ["bad", "behind-loop", "left"]
    plan = place.plan("retry", file, source, "--failed")
    assert plan["rerunTasks"] == ["bad"]
    place.text("ok", "")
    outcome = place.derive("retry", file, source, "--failed")
    assert sorted(place.labels()) == sorted([*executed, "bad"])
    old = {task["taskId"]: task for task in place.record(source)["tasks"]}
    for task in place.record(outcome["runId"])["tasks"]:
        if task["taskId"] != "bad":
            assert (task["state"], task["output"], task["error"], task["decision"]) == tuple(
                old[task["taskId"]][name] for name in ("state", "output", "error", "decision")
            )
            if task["state"] == "skipped":
                assert task["reuseDecision"]["checks"][0] == "source_skipped_by_decision"


def test_memory_goes_with_what_is_reused(place: Place) -> None:
    """A reader of a key whose writer is executed again is executed again, although it does not need it."""
    memory = {"kind": "builtin.memory.write"}
    file = place.workflow(
        "memory",
        [
            {"id": "one", "uses": "action:remember", "with": {"key": "k", "value": 1}},
            {"id": "two", "uses": "action:remember", "with": {"key": "other", "value": "${{ memory.k }}"}},
            gate(place, "bad", "ok", failure="continue"),
            {
                "id": "late",
                "uses": "action:remember",
                "needs": ["bad"],
                "with": {"key": "k", "value": "${{ tasks.bad.output.exitCode }}"},
            },
            {"id": "reads", "uses": "action:say", "with": {"k": "${{ memory.k }}", "other": "${{ memory.other }}"}},
        ],
        actions={**GATE, "remember": memory},
        concurrency=1,
    )
    source = place.go(file, code=4)
    tasks = {task["taskId"]: task for task in place.record(source)["tasks"]}
    assert tasks["reads"]["output"]["output"] == {"k": 1, "other": 1}
    place.text("ok", "")
    plan = place.plan("retry", file, source, "--failed")
    assert plan["rerunTasks"] == ["bad", "late", "reads"]
    outcome = place.derive("retry", file, source, "--failed")
    record = place.record(outcome["runId"])
    assert {task["taskId"]: task for task in record["tasks"]}["reads"]["output"]["output"] == {"k": 0, "other": 1}
    assert record["run"]["workingMemory"] == {"k": 0, "other": 1}


def test_captured_variables_belong_to_what_is_retried(place: Place) -> None:
    place.text("values.json", '{"x": 1}')
    file = place.workflow(
        "captured",
        [{"id": "a", "uses": "action:say", "with": {"x": "${{ vars.x }}"}}, gate(place, "bad", "ok", needs=["a"])],
        actions=GATE,
        varsFiles=["values.json"],
        vars={"y": 1},
    )
    source = place.go(file, "--var", "y=2", code=4)
    place.text("ok", "")
    result = place.refused("retry", file, source, "--failed")
    assert (result.code, result.diagnostics[0]["code"]) == (3, "retry_workflow_definition_mismatch")
    place.text("values.json", '{"x": 2}')
    result = place.refused("retry", file, source, "--failed", "--var", "y=2")
    assert result.code == 3
    place.text("values.json", '{"x": 1}')
    place.derive("retry", file, source, "--failed", "--var", "y=2")


def test_inputs_are_those_of_the_source(place: Place) -> None:
    file = place.workflow(
        "inputs",
        [
            {
                "id": "each",
                "uses": "action:say",
                "foreach": {"items": "${{ inputs.items }}"},
                "with": {"it": "${{ vars.item }}"},
            },
            gate(place, "bad", "ok", needs=["each"]),
        ],
        actions=GATE,
        inputs={"items": [1]},
    )
    source = place.go(file, "--input", "items=[1,2,3]", code=4)
    place.text("ok", "")
    outcome = place.derive("retry", file, source, "--failed")
    assert len(outcome["output"]["each"]["items"]) == 3
    assert place.record(outcome["runId"])["run"]["inputs"] == {"items": [1, 2, 3]}


def test_a_workspace_that_is_gone(place: Place) -> None:
    (place.root / "elsewhere").mkdir()
    file = place.workflow("small", [gate(place, "bad", "ok")], actions=GATE)
    source = place.go(file, "--workspace", str(place.root / "elsewhere"), code=4)
    # The results that may be reused rest on the source's workspace, and so does what is executed.
    (place.root / "elsewhere" / "ok").write_text("")
    assert place.derive("retry", file, source, "--failed")["state"] == "succeeded"
    shutil.rmtree(place.root / "elsewhere")
    for arguments in (["retry", file, source, "--failed"], ["fork", source]):
        result = place.json(*arguments)
        assert (result.code, result.error["code"]) == (2, "usage")
        assert "--workspace" in result.error["remedy"]
    place.text("ok", "")
    plan = place.plan("retry", file, source, "--failed", "--workspace", ".")
    assert any("workspace" in text for text in plan["warnings"])
    place.derive("retry", file, source, "--failed", "--workspace", ".")


def test_for_people(place: Place) -> None:
    file = fan(place, 10)
    source = place.go(file, code=4)
    shown = place("retry", file, source, "--failed", "--plan")
    assert shown.code == 0
    assert "can be done: 10 reused, 4 to execute" in shown.out
    assert "each: needs each--0003-" in shown.out
    assert "before: succeeded, and nothing that it depends on has changed" in shown.out
    blocked = place("retry", file, source, "--from", "before", "--restart-successful", "--plan")
    assert blocked.code == 3
    assert "before: unreconciled_effect:" in blocked.out
    refused = place("retry", file, source, "--from", "before", "--restart-successful")
    assert refused.code == 3
    assert "unreconciled_effect" in refused.err
    for name in ("ok-3", "ok-7"):
        place.text(name, "")
    done = place("retry", file, source, "--failed", "--reason", "why not")
    assert done.code == 0
    assert "reused 10, executed 4" in done.out
    assert f"retry of {source}" in place("runs", "list").out
    status = place("status", "@latest").out
    assert f"retry of {source}, from each--0003-" in status
    assert "because why not" in status
    assert f"reused from {source}" in place("inspect", "@latest").out


def test_approval_pause_and_signals(place: Place) -> None:
    """A derived run is driven like any other: it waits for a person, it is resumed, and a signal cancels it."""
    file = place.workflow(
        "asks",
        [place.tick_task("a", idempotent=False), gate(place, "bad", "ok", needs=["a"])],
        actions=GATE,
        policy={"approval": "never", "processAllowlist": ["sh", "tick"]},
    )
    source = place.go(file, code=4)
    changed = place.edit(file, "careful.yaml", (("spec", "policy", "approval"), "mutations"))
    place.text("ok", "")
    plan = place.plan("repair", changed, source, "--from", "bad")
    assert plan["approvalSummary"] == ["bad:builtin.shell.exec"]
    assert any("policy" in text for text in plan["warnings"])
    outcome = place.derive("repair", changed, source, "--from", "bad", code=3)
    assert (outcome["state"], outcome["reason"]) == ("paused", "approval_required")
    approval = place.record(outcome["runId"])["approvals"][0]["approvalId"]
    assert place.json("approvals", "approve", approval, "--actor", "me", "--reason", "fine").code == 0
    resumed = place.json("resume", outcome["runId"])
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded")
    assert place.labels() == ["a", "bad", "bad"]
    place.assert_sound()

    slow = place.edit(file, "slow.yaml", (("spec", "tasks", 1, "with", "args", 1), "sleep 60"))
    late = place.derive("repair", slow, source, "--from", "bad", "--timeout-seconds", "0.5", code=130)
    assert late["state"] == "cancelled"
    process = place.start("repair", slow, source, "--from", "bad", "--output", "json")
    running = "SELECT 1 FROM attempts WHERE state = 'claimed' AND task_id = 'bad'"
    wait_until(lambda: bool(place.rows(running)), "the command runs")
    process.signal(signal.SIGINT)
    ended = process.wait()
    assert (ended.code, ended.data["state"]) == (130, "cancelled")
    place.assert_sound()


def test_a_live_pool_serves_a_retry(place: Place) -> None:
    file = fan(place, 10)
    source = place.go(file, code=4)
    pool = place.pool(2)
    for name in ("ok-3", "ok-7"):
        place.text(name, "")
    outcome = place.derive("retry", file, source, "--failed")
    assert outcome["state"] == "succeeded"
    holders = {row[0] for row in place.rows("SELECT holder FROM attempts WHERE run_id = ?", outcome["runId"])}
    assert holders <= {worker.process_id for worker in place.workers()}
    place.stop(pool)


def test_what_was_cancelled_and_may_be_repeated_needs_no_person(place: Place) -> None:
    """A cancel ends a command in the middle; by the contract of its action a retry may execute it once more."""
    tasks = [place.tick_task(name, 60, idempotent=name != "once") for name in ("a", "b", "once")]
    file = place.workflow("slow", tasks, runtime={"maxConcurrency": 8, "budgets": {"maxProcessOutputBytes": 10**8}})
    running = place.start("run", file, "--workers", "3", "--output", "json")
    wait_until(lambda: sorted(place.labels()) == ["a", "b", "once"], "all run")
    assert place.json("cancel", "@latest").code == 0
    assert running.wait().code == 130
    source = str(place.scalar("SELECT run_id FROM runs"))
    uncertain = "SELECT task_id FROM effects WHERE status = 'uncertain' ORDER BY task_id"
    assert place.rows(uncertain) == [("a",), ("b",), ("once",)]
    [effect] = place.json("effects", "list", source, "--uncertain").data["effects"]
    assert effect["request"]["taskId"] == "once"
    assert place.scalar("SELECT COUNT(*) FROM budget_reservations WHERE state = 'open'") == 1
    plan = place.plan("retry", file, source, "--failed", compatible=False)
    assert rules(plan) == {"once": "unreconciled_effect"}
    said = ("--status", "not-applied", "--reason", "looked")
    assert place.json("effects", "reconcile", effect["request"]["id"], *said).code == 0
    plan = place.plan("retry", file, source, "--failed")
    assert plan["rerunTasks"] == ["a", "b", "once"]
    place.assert_sound()
