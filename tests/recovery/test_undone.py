"""What is undone, or may be, or soon is, nobody reuses; and what was only recorded is not done once more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agentctl.coordinator.compensation import start_compensation
from agentctl.store.clock import SystemClock, SystemIds
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from support.children import wait_until
from support.field import Started
from support.recovery import Place, rules
from support.undo import AUTOMATIC, Undo


@pytest.fixture
def undo(place: Place) -> Undo:
    return Undo(place)


def hint(place: Place, verb: str, source: str, *options: str) -> list[str]:
    """The next steps that a refusal names."""
    result = place.refused(verb, "work.yaml", source, *options)
    assert (result.code, result.error["code"]) == (3, "blocked"), result.err
    return [item["help"] for item in result.diagnostics]


def uncertain(undo: Undo, source: str) -> tuple[str, str]:
    """A compensation whose only inverse action nobody knows of, and that has ended; it, and the inverse effect."""
    place = undo.field
    place.text("slow-undo-a", "")
    paused = undo.compensate(source)
    assert paused.data["reason"] == "uncertain_effect", paused.err
    made = paused.data["runId"]
    assert place.json("cancel", made).code == 0
    (place.folder / "slow-undo-a").unlink()
    return made, undo.effect(made, "compensate--a")


def impatient(undo: Undo) -> list[dict[str, Any]]:
    tasks = [undo.task("a"), undo.end("a")]
    tasks[0]["compensate"]["timeoutSeconds"] = 1
    return tasks


# -- while it is undone, and when nobody knows -------------------------------------------------------------------------


def test_nothing_is_reused_while_it_is_being_undone(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a", uses="again"), undo.task("b"), undo.end("a", "b")])
    place.text("slow-undo-a", "")
    process = place.start("compensate", source)
    wait_until(lambda: "undo-a" in undo.notes(), "the inverse of a runs")
    [(made, _)] = undo.derived(source)
    plan = place.plan("retry", "work.yaml", source, "--failed", compatible=False)
    assert rules(plan) == {"a": "unresolved_reused_effect", "b": "unresolved_reused_effect"}
    assert made in plan["blockedReuse"][0]["message"]
    # What may be repeated is not repeated now: its inverse would undo the new one.
    plan = place.plan("repair", "work.yaml", source, "--from", "a", "--restart-successful", compatible=False)
    assert rules(plan)["a"] == "unreconciled_effect"
    assert place.json("cancel", made).code == 0
    process.wait()


def test_nothing_is_reused_when_its_inverse_is_uncertain(place: Place, undo: Undo) -> None:
    source = undo.failed(impatient(undo))
    _, inverse = uncertain(undo, source)
    plan = place.plan("retry", "work.yaml", source, "--failed", compatible=False)
    assert rules(plan) == {"a": "unresolved_reused_effect"}
    assert any(inverse in text for text in hint(place, "retry", source, "--failed"))
    said = place.json("effects", "reconcile", inverse, "--status", "not-applied", "--reason", "seen", "--approved")
    assert said.code == 0, said.err
    place.plan("retry", "work.yaml", source, "--failed")
    undo.sound()


def test_what_somebody_found_to_be_undone_is_concluded_at_once(place: Place, undo: Undo) -> None:
    source = undo.failed(impatient(undo))
    _, inverse = uncertain(undo, source)
    place.text("result.json", '{"exitCode":0}')
    options = ("--status", "applied", "--reason", "seen", "--approved", "--result-file", "result.json")
    said = place.json("effects", "reconcile", inverse, *options)
    assert said.code == 0, said.err
    assert undo.conclusions(source) == [("a", "compensated")]
    assert rules(place.plan("retry", "work.yaml", source, "--failed", compatible=False)) == {
        "a": "unresolved_reused_effect"
    }
    # The step that is named is one that helps.
    assert hint(place, "retry", source, "--failed") == [
        "what it did is undone, so it has to be executed again: --from a --restart-successful"
    ]
    place.plan("repair", "work.yaml", source, "--from", "a", "--restart-successful")
    undo.sound()


def test_nothing_is_reused_before_a_due_compensation(place: Place, undo: Undo) -> None:
    source = place.json("submit", undo.write([undo.task("a"), undo.end("a")], compensation=AUTOMATIC)).data["runId"]
    crashed = place.json("resume", source, env={"AGENTCTL_FAULT": "before_compensation"})
    assert crashed.code != 0
    assert place.scalar("SELECT COUNT(*) FROM compensations_due") == 1
    plan = place.plan("retry", "work.yaml", source, "--failed", compatible=False)
    assert rules(plan) == {"a": "unresolved_reused_effect"}


# -- results of results, and removed runs ------------------------------------------------------------------------------


def retried(place: Place, undo: Undo) -> tuple[str, str]:
    """A run that has failed, and its retry that has failed as well: `a` was taken over."""
    tasks = [undo.task("a"), {**undo.end("a"), "uses": "action:do", "with": {"args": ["-c", "test -e ok"]}}]
    tasks[0]["compensate"]["timeoutSeconds"] = 1
    source = undo.failed(tasks)
    again = place.json("retry", "work.yaml", source, "--failed")
    assert again.code == 4, again.err
    return source, str(again.data["runId"])


def collect(place: Place) -> dict[str, Any]:
    result = place.json("gc", "--older-than-days", "0", "--state", "failed", "--state", "cancelled")
    assert result.code == 0, result.err
    found: dict[str, Any] = result.data["runs"]
    return found


def test_what_is_undone_is_known_as_long_as_somebody_stands_on_it(place: Place, undo: Undo) -> None:
    source, again = retried(place, undo)
    assert undo.compensate(source).code == 0
    place.change("UPDATE runs SET updated_at = updated_at - 1000")
    # Only its retry is there to be taken from; it is young.
    place.change("UPDATE runs SET updated_at = updated_at + 90000000 WHERE run_id = ?", again)
    found = place.json("gc", "--older-than-days", "0", "--state", "failed", "--state", "succeeded").data["runs"]
    assert {"runId": source, "why": "compensated_and_reused"} in found["kept"]
    plan = place.plan("retry", "work.yaml", again, "--failed", compatible=False)
    assert rules(plan) == {"a": "unresolved_reused_effect"}
    assert "fork" in hint(place, "retry", again, "--failed")[0]


def test_a_run_is_kept_while_nobody_knows_whether_it_was_undone(place: Place, undo: Undo) -> None:
    source = undo.failed(impatient(undo))
    made, _ = uncertain(undo, source)
    place.change("UPDATE runs SET updated_at = updated_at - 1000")
    kept = {item["runId"]: item["why"] for item in collect(place)["kept"]}
    assert kept == {source: "compensation_uncertain", made: "uncertain_effect"}


def test_an_undone_result_of_an_earlier_run_is_not_taken_over_again(place: Place, undo: Undo) -> None:
    source, again = retried(place, undo)
    place.text("slow-undo-a", "")
    process = place.start("compensate", source)
    wait_until(lambda: "undo-a" in undo.notes(), "the inverse of a runs")
    [(made, _)] = undo.derived(source)
    plan = place.plan("retry", "work.yaml", again, "--failed", compatible=False)
    assert rules(plan) == {"a": "unresolved_reused_effect"}
    assert place.json("cancel", made).code == 0
    process.wait()


# -- what is only recorded ---------------------------------------------------------------------------------------------


def delete(place: Place, *run_ids: str) -> None:
    for run_id in run_ids:
        place.change("DELETE FROM runs WHERE run_id = ?", run_id)


def test_a_replay_of_a_compensation_does_not_undo_again(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.end("a")])
    made = undo.compensate(source).data["runId"]
    once = place.json("replay", made).data["runId"]
    twice = place.json("replay", once).data["runId"]
    delete(place, source, made, once)
    result = place.json("fork", twice)
    assert (result.code, result.error["code"]) == (2, "usage"), result.err
    assert "compensation" in result.error["message"]
    assert undo.done() == ["a"]


def test_a_replay_of_a_check_is_no_run_and_says_so(place: Place, undo: Undo) -> None:
    checked = place.json("run", undo.write([undo.task("a")]), "--check").data["runId"]
    again = place.json("replay", checked).data["runId"]
    delete(place, checked)
    for arguments in (["fork", again], ["retry", "work.yaml", again, "--failed"]):
        result = place.json(*arguments)
        assert (result.code, result.error["code"]) == (2, "usage"), result.err
        assert "check" in result.error["message"]
    assert undo.notes() == []
    assert place.json("inspect", again).data["run"]["lineage"]["recordedMode"] == "check"
    assert place.json("status", again).data["lineage"]["recordedMode"] == "check"
    for verb in ("status", "inspect", "replay"):
        assert "is a check" in place(verb, again).out, verb


# -- the next step -----------------------------------------------------------------------------------------------------


def test_a_known_effect_is_undone_and_not_done_twice(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.task("b", undo=None), undo.end("a", "b")])
    options = ("--from", "a", "--from", "b", "--restart-successful")
    first, second = hint(place, "retry", source, *options)
    assert first.startswith(f"`agentctl compensate {source} --task a` undoes it")
    assert "everything again" in first
    assert undo.effect(source, "b") in second
    assert "compensate" not in second.split("`")[0]
    assert undo.compensate(source, "--task", "a").code == 0
    place.plan("retry", "work.yaml", source, "--from", "a", "--restart-successful")


def test_a_blocked_plan_does_not_say_that_effects_are_sent_again(place: Place, undo: Undo) -> None:
    place.text("slow-b", "")
    result = place.json("run", undo.write([undo.task("b", timeoutSeconds=1)]))
    source = result.data["runId"]
    assert place.json("cancel", source).code == 0
    plan = place.plan("retry", "work.yaml", source, "--failed", compatible=False)
    assert rules(plan) == {"b": "unreconciled_effect"}
    assert plan["freshEffectSummary"]["uncertainSourceEffects"] == 1
    assert plan["warnings"] == []
    [step] = hint(place, "retry", source, "--failed")
    assert f"effects reconcile {undo.effect(source, 'b')} " in step


# -- compensate tells --------------------------------------------------------------------------------------------------


def test_the_outcome_of_a_compensation_says_why_and_what_next(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.end("a")])
    place.text("fail-a", "")
    failed = undo.compensate(source, "--task", "a")
    assert failed.code == 4
    [failure] = failed.data["failures"]
    assert (failure["taskId"], failure["error"]["code"]) == ("a", "process_exit"), failure
    told = place("compensate", source, "--task", "a")
    assert "not undone: a: process_exit: " in told.out
    assert f"`agentctl compensate {source} --task a` tries the rest again" in told.out


def test_an_uncertain_inverse_action_is_told_with_the_whole_next_command(place: Place, undo: Undo) -> None:
    source = undo.failed(impatient(undo))
    place.text("slow-undo-a", "")
    told = place("compensate", source)
    assert told.code == 3
    [(made, _)] = undo.derived(source)
    inverse = undo.effect(made, "compensate--a")
    assert f"nobody knows whether a was undone: effect {inverse}" in told.out
    assert f"agentctl effects reconcile {inverse} --status" in told.out
    assert f"`agentctl resume {made}`" in told.out
    assert place.json("cancel", made).code == 0


def test_an_inverse_action_that_waits_for_a_person(place: Place, undo: Undo) -> None:
    manual = {"onFailure": "manual", "approval": "always"}
    source = undo.failed([undo.task("a"), undo.end("a")], compensation=manual)
    paused = undo.compensate(source)
    assert paused.code == 3, paused.err
    [asked] = paused.data["pendingApprovals"]
    made = paused.data["runId"]
    assert place.json("cancel", made).code == 0
    told = place("compensate", source)
    assert "a person has to answer approval-" in told.out
    assert "agentctl approvals approve|reject approval-" in told.out
    assert asked["approvalId"].startswith("approval-")
    place.json("cancel", undo.derived(source)[-1][0])


def test_a_workspace_that_is_gone_is_found_before_a_run_exists(place: Place, undo: Undo) -> None:
    (place.folder / "there").mkdir()
    file = undo.write([undo.task("a"), undo.end("a")])
    result = place.json("run", file, "--workspace", "there")
    source = result.data["runId"]
    (place.folder / "there").rmdir()
    assert "--workspace" in place("compensate", source, "--plan").err
    refused = undo.compensate(source)
    assert (refused.code, refused.error["code"]) == (2, "usage"), refused.err
    assert "--workspace" in refused.error["remedy"]
    assert undo.runs() == [source]
    assert undo.compensate(source, "--workspace", "nowhere").code == 2
    done = undo.compensate(source, "--workspace", ".")
    assert (done.code, done.data["compensatedTasks"]) == (0, ["a"]), done.err
    # The inverse of an inverse is not there; whoever asks is told of the run that can be undone.
    told = place("compensate", done.data["runId"])
    assert (told.code, f"agentctl compensate {source}" in told.out) == (0, True), told.out
    undo.sound()


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_root_that_is_not_there_is_answered_with_full_ids(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.fan("each", 2), undo.end("each")])
    told = place("retry", "work.yaml", source, "--from", "each--0000", "--plan")
    full = [row[0] for row in place.rows("SELECT task_id FROM tasks WHERE task_id LIKE 'each--%' ORDER BY task_no")]
    assert told.code == 3
    assert f"did you mean {full[0]}" in told.out
    assert told.out.index("why it is blocked") < told.out.index("did you mean")
    assert "reused:" not in told.out.split("why it is blocked")[0], "the reason comes first"
    assert "did you mean end?" in place("retry", "work.yaml", source, "--from", "ent", "--plan").out


def test_the_same_step_is_told_once(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.fan("each", 3), undo.end("each")], compensation=AUTOMATIC)
    told = place("retry", "work.yaml", source, "--failed", "--plan")
    lines = [line.strip() for line in told.out.splitlines()]
    assert len([line for line in lines if "was compensated" in line]) == 3
    assert len(lines) == len(set(lines))


def test_what_was_undone_by_itself_is_not_proposed_for_a_retry(place: Place, undo: Undo) -> None:
    told = place("run", undo.write([undo.task("a"), undo.end("a")], compensation=AUTOMATIC))
    assert told.code == 4
    assert "retry" not in told.out
    assert "agentctl fork run-" in told.out


def test_the_source_is_refused_before_the_file_is_looked_at(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.task("a"), undo.end("a")])
    made = undo.compensate(source).data["runId"]
    told = place("retry", "work.yaml", made, "--failed")
    assert told.code == 2
    assert "__agentctlCompensation" not in told.err
    assert "is a compensation" in told.err


def test_what_waits_for_a_person_is_not_executed_yet(place: Place, undo: Undo) -> None:
    place.text("slow-a", "")
    file = undo.write([undo.task("a", timeoutSeconds=1)], policy={"approval": "always"})
    paused = place.json("run", file)
    source = paused.data["runId"]
    assert place.json("cancel", source).code == 0
    again = place.json("retry", file, source, "--failed")
    assert (again.code, again.data["executedTasks"]) == (3, []), again.err
    assert place.json("cancel", again.data["runId"]).code == 0


def test_a_chain_whose_last_link_was_changed_is_told_in_words_that_fit(place: Place, undo: Undo) -> None:
    source = undo.failed([undo.end()])
    place.forge("UPDATE runs SET checkpoint_checksum = 'x' WHERE run_id = ?", source)
    told = place("fork", source)
    assert (told.code, "ends with another checksum" in told.err) == (5, True), told.err


# -- what others stand on ----------------------------------------------------------------------------------------------

SECOND = '[ -e ok ] && { echo "$1" >> "$2"; [ ! -e slow ] || exec sleep 60; }'


def two(undo: Undo) -> str:
    """A run that has failed at `b`, which needs `a`: with the file `ok` it would succeed."""
    second = {"id": "b", "uses": "action:do", "needs": ["a"], "with": undo.arguments(SECOND, "b")}
    return undo.failed([undo.task("a"), second])


def alive(place: Place, undo: Undo, source: str) -> tuple[str, Started]:
    """A retry of it that goes on, and stands on what `a` has done."""
    place.text("ok", "")
    place.text("slow", "")
    process = place.start("retry", "work.yaml", source, "--failed")
    wait_until(lambda: "b" in undo.notes(), "b runs")
    [(made, _)] = [run for run in undo.derived(source, "retry") if run[1] == "running"]
    return made, process


def end(place: Place, made: str, process: Started) -> None:
    assert place.json("cancel", made).code == 0
    process.wait()


def test_nothing_is_undone_under_a_run_that_goes_on(place: Place, undo: Undo) -> None:
    source = two(undo)
    made, process = alive(place, undo, source)
    plan = undo.plan(source)
    assert [(block["taskId"], block["rule"]) for block in plan["blocked"]] == [("a", "live_derived_run")]
    assert made in plan["blocked"][0]["message"]
    assert not plan["executable"]
    refused = undo.compensate(source)
    assert (refused.code, refused.data["runId"]) == (3, None)
    assert undo.done() == []
    end(place, made, process)
    assert undo.plan(source)["warnings"] == []
    assert undo.compensate(source).code == 0
    assert undo.done() == ["a"]
    undo.sound()


def test_nothing_is_undone_under_a_run_that_was_made_through_another_one(place: Place, undo: Undo) -> None:
    source = two(undo)
    assert place.json("retry", "work.yaml", source, "--failed").code == 4
    [(between, _)] = undo.derived(source, "retry")
    made, process = alive(place, undo, between)
    assert undo.rules(source) == [("a", "live_derived_run")]
    end(place, made, process)
    assert undo.rules(source) == []


def test_what_a_run_that_goes_on_does_once_more_is_not_undone_meanwhile(place: Place, undo: Undo) -> None:
    """The other way round it is refused, too: what is sent again could be undone right after it."""
    source = undo.failed([undo.task("a", uses="again"), undo.task("c"), undo.end("a", "c")])
    place.text("slow-a", "")
    process = place.start("repair", "work.yaml", source, "--from", "a", "--restart-successful")
    wait_until(lambda: undo.notes().count("a") == 2, "a runs again")
    [(made, _)] = undo.derived(source, "repair")
    assert sorted(undo.rules(source)) == [("a", "live_derived_run"), ("c", "live_derived_run")]
    end(place, made, process)


def test_a_run_that_succeeded_on_it_is_named(place: Place, undo: Undo) -> None:
    source = two(undo)
    place.text("ok", "")
    assert place.json("retry", "work.yaml", source, "--failed").code == 0
    [(made, _)] = undo.derived(source, "retry")
    [warning] = undo.plan(source)["warnings"]
    assert made in warning
    assert warning.startswith("what a has done is undone under")
    assert undo.compensate(source).data["warnings"] == [warning]
    assert undo.done() == ["a"]


def test_a_retry_that_is_faster_than_a_compensation_keeps_its_ground(place: Place, undo: Undo) -> None:
    """Both were planned on the same source; the second one to be created sees the first one."""
    source = two(undo)
    begun: list[tuple[str, Started]] = []

    def meanwhile(*_: object) -> None:
        begun.append(alive(place, undo, source))

    store = Store(place.database, SystemClock())
    try:
        found, started = start_compensation(
            store, source, SystemIds(store.clock), actor="me", faults=Faults.from_environment(), before=meanwhile
        )
    finally:
        store.close()
    assert started is None
    assert [block.rule for block in found.blocked] == ["live_derived_run"]
    assert len(begun) == 1
    assert undo.derived(source) == []
    end(place, *begun[0])


def test_an_automatic_compensation_waits_for_a_run_that_goes_on(place: Place, undo: Undo) -> None:
    source = two(undo)
    made, process = alive(place, undo, source)
    place.forge("INSERT INTO compensations_due VALUES (?, 1)", source)
    answer = place.json("resume", source)
    assert answer.code == 4
    assert "it stays due" in answer.err
    assert undo.derived(source) == []
    end(place, made, process)
    assert place.scalar("SELECT COUNT(*) FROM compensations_due") == 1
    assert place.json("resume", source).code == 4
    assert undo.done() == ["a"]
    assert place.scalar("SELECT COUNT(*) FROM compensations_due") == 0


# -- what others have done, too ----------------------------------------------------------------------------------------


def test_a_second_retry_is_told_of_the_first_one(place: Place, undo: Undo) -> None:
    source = two(undo)
    assert place.plan("retry", "work.yaml", source, "--failed")["warnings"] == []
    place.text("ok", "")
    assert place.json("retry", "work.yaml", source, "--failed").code == 0
    [(first, _)] = undo.derived(source, "retry")
    [warning] = place.plan("retry", "work.yaml", source, "--failed")["warnings"]
    assert warning == f"{first} (succeeded) has done this part, too, which must not be repeated: b"
    assert place.plan("repair", "work.yaml", source, "--from", "b")["warnings"] == [warning]
    assert place.json("fork", source, "--plan").data["warnings"] == [warning]
    again = place.json("retry", "work.yaml", source, "--failed")
    assert again.code == 0, "a person may want it"
    assert warning in again.err
    assert undo.notes() == ["a", "b", "b"]


def test_a_second_retry_is_told_of_one_that_goes_on_and_of_a_fork(place: Place, undo: Undo) -> None:
    source = two(undo)
    third = {"id": "c", "uses": "action:do", "needs": ["b"], "with": undo.arguments("exit 0", "c")}
    source = undo.failed([*json.loads((place.folder / "work.yaml").read_text())["spec"]["tasks"], third])
    made, process = alive(place, undo, source)
    assert place.plan("retry", "work.yaml", source, "--failed")["warnings"] == [
        f"{made} (running) has done this part, too, which must not be repeated: b",
        f"{made} (running) has not ended, and executes the same part: c",
    ]
    end(place, made, process)
    (place.folder / "slow").unlink()
    assert place.json("fork", source).code == 0
    [(fork, _)] = undo.derived(source, "fork")
    warnings = place.plan("retry", "work.yaml", source, "--failed")["warnings"]
    assert warnings[-1] == f"{fork} (succeeded) has done this part, too, which must not be repeated: b, c"
    # Nothing of the fork stands on what the source has done.
    assert undo.rules(source) == []
