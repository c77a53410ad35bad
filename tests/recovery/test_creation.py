"""The creation of a derived run: whole or not at all, whatever happens meanwhile; and how long planning takes."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from agentctl.coordinator.recovery import Wish, is_unsafe, plan_recovery
from agentctl.coordinator.submission import Circumstances, derive
from agentctl.store.canonical import loads
from agentctl.store.clock import SystemClock
from agentctl.store.derived_runs import SourceEffect
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, NotFoundError
from agentctl.store.faults import Faults
from agentctl.store.verification import require_sound
from support.children import wait_until
from support.clock import FixedIds, ManualClock
from support.constructs import Program, write_program
from support.field import state_of
from support.play import Play, compiled
from support.recovery import GATE, Place, gate
from support.rows import rows
from support.scale import time_factor

POINTS = ("before_derived_run", "during_derived_run", "after_create_run")


def simple(place: Place) -> str:
    return place.workflow(
        "simple",
        [place.tick_task("a", idempotent=False), gate(place, "bad", "ok", needs=["a"])],
        actions=GATE,
    )


@pytest.mark.parametrize("verb", ["retry", "repair", "fork"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_creation(place: Place, verb: str, point: str) -> None:
    """There is no run, or a whole one that goes on; and the same command may be given again."""
    if (verb, point) == ("fork", "during_derived_run"):
        pytest.skip("a fork takes nothing over")
    file = simple(place)
    source = place.go(file, code=4)
    place.text("ok", "")
    words = {
        "retry": ["retry", file, source, "--failed"],
        "repair": ["repair", file, source, "--from", "bad"],
        "fork": ["fork", source],
    }[verb]
    killed = place.json(*words, env={"AGENTCTL_FAULT": point})
    assert killed.code == -9
    made = [row[0] for row in place.rows("SELECT run_id FROM runs WHERE run_id <> ?", source)]
    assert len(made) == (1 if point == "after_create_run" else 0)
    place.assert_sound()
    assert place.labels() == ["a", "bad"]
    if made:
        assert place.record(made[0])["run"]["mode"] == verb
        ended = place.json("resume", made[0])
    else:
        ended = place.json(*words)
    assert (ended.code, ended.data["state"]) == (0, "succeeded")
    place.assert_sound()
    assert place.labels()[2:] == (["a", "bad"] if verb == "fork" else ["bad"])


@pytest.mark.parametrize("point", ["before_commit:1", "after_commit:1", "after_commit:2", "before_run_end"])
def test_a_driver_that_is_killed_in_a_derived_run(place: Place, point: str) -> None:
    """What is reused is there for whoever goes on with it, and nothing is executed twice."""
    file = place.workflow(
        "long",
        [
            place.tick_task("a", idempotent=False),
            gate(place, "bad", "ok", needs=["a"]),
            place.tick_fan("each", 5, idempotent=False, needs=["bad"]),
        ],
        actions=GATE,
    )
    source = place.go(file, code=4)
    place.text("ok", "")
    killed = place.json("retry", file, source, "--failed", env={"AGENTCTL_FAULT": point})
    assert killed.code == -9
    made = place.scalar("SELECT run_id FROM runs WHERE run_id <> ?", source)
    ended = place.json("resume", made)
    assert (ended.code, ended.data["state"]) == (0, "succeeded")
    assert sorted(place.labels()) == sorted(["a", "bad", "bad", *(f"each-{number}" for number in range(5))])
    place.assert_sound()


def test_a_source_that_changes_after_the_plan(tmp_path: Path) -> None:
    """A reconciliation, or the removal of the source, between the plan and the creation: nothing is created."""
    clock = ManualClock()
    store = Store(tmp_path / "state" / "agentctl.db", clock, create=True)
    try:
        program = smallest()
        play = Play(store, clock, program, 2, 1, random.Random(0))
        play.perform()
        document, target = compiled(program, 2)
        source = store.read_source(play.run_id)
        wish = Wish("repair", (target.order[-1],), restart_successful=True)
        plan = plan_recovery(source, target, play.inputs, wish, lambda *_: "ok")
        plan.blocks.clear()
        how, ids, faults = Circumstances(Path("/base"), "test"), FixedIds(), Faults(None)
        with store.database.write() as tx:
            tx.execute("UPDATE runs SET revision = revision + 1 WHERE run_id = ?", (play.run_id,))
        with pytest.raises(ConflictError, match="has changed since the repair was planned"):
            derive(store, document, plan, play.inputs, how, reason=None, ids=ids, faults=faults)
        with store.database.write() as tx:
            tx.execute("DELETE FROM runs WHERE run_id = ?", (play.run_id,))
        with pytest.raises(NotFoundError):
            derive(store, document, plan, play.inputs, how, reason=None, ids=ids, faults=faults)
        assert rows(store, "SELECT run_id FROM runs") == []
        assert rows(store, "SELECT task_id FROM tasks") == []
    finally:
        store.close()


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_an_artifact_that_goes_after_the_plan(place: Place, damage: str) -> None:
    """The bytes are read once more before the run exists (contract 8)."""
    make = {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", "mkdir -p out; echo made > out/made"]}
    file = place.workflow(
        "keeps",
        [{"id": "make", "uses": "action:make"}, gate(place, "bad", "ok", needs=["make"])],
        actions={**GATE, "make": {**make, "artifacts": ["out/made"]}},
        policy={"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
    )
    source = place.go(file, code=4)
    [blob] = [path for path in (place.database.parent / "artifacts" / "sha256").rglob("*") if path.is_file()]
    place.text("ok", "")
    waiting = place.start("retry", file, source, "--failed", "--output", "json", env={"AGENTCTL_FAULT": STOPPED})
    wait_until(lambda: state_of(waiting.pid) == "T", "it stands before the creation")
    blob.chmod(0o600)
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(b"fake\n")
    waiting.signal(signal.SIGCONT)
    refused = waiting.wait()
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert "nothing was created" in refused.error["message"]
    assert place.rows("SELECT run_id FROM runs") == [(source,)]


STOPPED = "before_derived_run:stop"


def smallest() -> Program:
    return min((write_program(seed) for seed in range(6)), key=lambda made: len(made.nodes))


MUTATING = ["workspace_mutate", "external_mutate", "process_execution", "network", "remote_agent"]


@pytest.mark.parametrize("effect_class", [*MUTATING, "observe", "pure", "internal_state", "model"])
@pytest.mark.parametrize("idempotency", ["pure", "idempotent", "keyed", "at_most_once", "unknown"])
@pytest.mark.parametrize("status", ["started", "uncertain", "succeeded", "failed", "cancelled", "requested"])
@pytest.mark.parametrize("reconciled", [None, "applied", "not_applied", "compensated"])
def test_what_is_unsafe_to_repeat(effect_class: str, idempotency: str, status: str, reconciled: str | None) -> None:
    """The rule of contract 5.6 over its whole table."""
    effect = SourceEffect("e", "t", "o", effect_class, idempotency, status, status == "succeeded", False, reconciled)
    repeatable = idempotency in ("pure", "idempotent", "keyed")
    if effect_class not in MUTATING:
        expected = False
    elif reconciled is not None:
        expected = reconciled == "applied" and not repeatable
    elif status in ("started", "uncertain"):
        expected = True
    else:
        expected = status == "succeeded" and not repeatable
    assert is_unsafe(effect) is expected
    given_up = SourceEffect("e", "t", "o", effect_class, idempotency, "uncertain", False, True, None)
    assert is_unsafe(given_up) is False


@pytest.mark.timeout(600)
def test_planning_ten_thousand_tasks_is_quick(place: Place) -> None:
    """From the rows of the source to the plan, for a retry and a repair; then the creation of the run.

    Measured in time of this process, which neither waits nor sleeps: others may be at work on the machine.
    """
    count = 10_000
    script = {"args": ["-c", "test -e ok"]}
    file = place.workflow(
        "big",
        [
            {"id": "first", "uses": "action:say", "with": {"base": 1}},
            {
                "id": "each",
                "uses": "action:say",
                "needs": ["first"],
                "foreach": {"items": list(range(count - 3)), "maxItems": count},
                "with": {"value": "${{ vars.item }}", "more": "${{ tasks.first.output.output.base }}"},
            },
            {"id": "last", "uses": "action:gate", "needs": ["each"], "with": script},
        ],
        actions=GATE,
    )
    source_id = place.go(file, code=4)
    fixed = place.edit(file, "fixed.yaml", (("spec", "tasks", 2, "with", "args", 1), "test -e /"))
    from agentctl.coordinator.compiler import compile_workflow, merge_inputs
    from agentctl.coordinator.definition import load_workflow

    store = Store(place.database, SystemClock())
    try:
        for name, mode in ((file, "retry"), (fixed, "repair")):
            document = load_workflow(place.folder / name)
            target = compile_workflow(document, inputs={})
            inputs = merge_inputs(document.model.spec.inputs, {})
            began = time.process_time()
            source = store.read_source(source_id)
            wish = Wish(mode, () if mode == "retry" else ("last",), failed_only=mode == "retry")
            plan = plan_recovery(source, target, inputs, wish, store.artifacts.blobs.check)
            text = json.dumps(plan.as_json())
            require_sound(store.database, source_id)
            spent = time.process_time() - began
            print(f"{mode}: planned {count} tasks in {spent:.2f} s")  # noqa: T201
            assert spent < 3 * time_factor()
            assert plan.compatible
            assert (len(plan.reused), plan.rerun) == (count - 1, ["last"])
            assert len(loads(text)["tasks"]) == count
            began = time.process_time()
            how = Circumstances(place.folder, "test")
            derive(store, document, plan, inputs, how, reason=None, ids=FixedIds(), faults=Faults(None))
            spent = time.process_time() - began
            print(f"{mode}: created it in {spent:.2f} s")  # noqa: T201
            assert spent < 3 * time_factor()
    finally:
        store.close()
    place.assert_sound()
