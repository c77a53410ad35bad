"""Conditions, routers, loops and sub-workflows: what they compile to, and what their tasks come to in a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.plan import CompiledTask, Plan
from agentctl.store.canonical import canonical
from agentctl.store.errors import IncompatibleVersion
from support.clock import ManualClock
from support.control import Bench, Outcome, bench
from support.rows import check_chains, scalar

Build = Callable[..., Plan]
ACTIONS = """\
  policy: {approval: never}
  actions:
    set: {kind: builtin.assign}
    check: {kind: builtin.assert}
    put: {kind: builtin.memory.write}
    get: {kind: builtin.memory.read}
"""
NOT_DONE = "a dependency did not succeed"


@pytest.fixture
def table(tmp_path: Path, clock: ManualClock) -> Iterator[Bench]:
    yield from bench(tmp_path, clock)


# -- conditions --------------------------------------------------------------------------------------------------------

CONDITION = (
    ACTIONS
    + """\
  inputs: {go: false}
  vars: {depth: 3}
  tasks:
    - {id: a, uses: action:set, with: {n: 1}}
    - {id: b, uses: action:set, needs: [a], when: "${{ inputs.go }}"}
    - {id: c, uses: action:set, needs: [b]}
    - {id: d, uses: action:set, needs: [c], when: "tasks.c.output.changed"}
    - {id: e, uses: action:set, needs: [a], when: "vars.depth > 2"}
"""
)


def test_a_decision_is_kept_and_a_skip_is_passed_on(table: Bench) -> None:
    done = table.run(CONDITION)
    assert (done.state, done.states()) == (
        "succeeded",
        {"a": "succeeded", "b": "skipped", "c": "skipped", "d": "skipped", "e": "succeeded"},
    )
    record = done.tasks["b"].output
    assert set(record) == {"reason", "condition"}
    assert record["reason"] == "when condition was false"
    assert record["condition"] == done.tasks["b"].decision
    assert (record["condition"]["expression"], record["condition"]["result"]) == ("${{ inputs.go }}", False)
    assert record["condition"]["contextDigest"].startswith("sha256:v1:")
    for name in "be":
        assert done.tasks[name].decided == (done.tasks[name].decision,), "the audit has it, too"
    for name in "cd":
        assert (done.tasks[name].output, done.tasks[name].decision) == (None, None)
        assert done.tasks[name].error["message"] == NOT_DONE
    assert (done.tasks["e"].decision["expression"], done.tasks["e"].decision["result"]) == ("vars.depth > 2", True)
    for name in "bcd":
        assert done.tasks[name].moves == ("skipped",), "a skip passes through no other state"
    assert scalar(table.store, "SELECT COUNT(*) FROM attempts") == 0


def test_the_digest_of_a_context_covers_all_that_a_condition_could_read(table: Bench) -> None:
    """Inputs, variables of the workflow and of the task, memory that it reads, outputs that it needs."""
    spec = ACTIONS + (
        "  inputs: {go: true, other: %(other)d}\n  vars: {depth: %(depth)d}\n"
        "  memory: {working: {k: %(memory)d}}\n"
        "  tasks:\n    - {id: a, uses: action:set, with: {n: %(output)d}}\n"
        "    - {id: b, uses: action:set, needs: [a], vars: {own: %(own)d}, when: inputs.go,"
        " with: {m: '${{ memory.k }}'}}\n"
    )
    base = {"other": 1, "depth": 1, "memory": 1, "output": 1, "own": 1}

    def digest(**changes: Any) -> str:
        found: str = table.run(spec % {**base, **changes}).tasks["b"].decision["contextDigest"]
        return found

    first = digest()
    assert digest() == first
    changed = [digest(**{name: 2}) for name in base]
    assert first not in changed
    assert len(set(changed)) == len(base)


# -- routers -----------------------------------------------------------------------------------------------------------

ROUTER = (
    ACTIONS
    + """\
  inputs: {selected: ship}
  tasks:
    - {id: decide, uses: action:set, with: {route: "${{ inputs.selected }}"}}
    - id: choose
      uses: router
      needs: [decide]
      route:
        select: ${{ tasks.decide.output.output.route }}
        cases: [{equals: ship, tasks: [ship]}]
        default: [hold]
    - {id: ship, uses: action:set, needs: [choose], with: {result: shipped}}
    - {id: hold, uses: action:set, needs: [choose], with: {result: held}}
    - {id: after, uses: action:set, needs: [hold]}
  outputs:
    selected: ${{ tasks.choose.output.selected }}
    ship: ${{ tasks.ship.output }}
    hold: ${{ tasks.hold.output }}
"""
)


def test_a_router_chooses(table: Bench) -> None:
    done = table.run(ROUTER)
    assert done.state == "succeeded"
    assert done.tasks["choose"].output == {"selected": "ship", "matched": True, "destinations": ["ship"]}
    record = {"reason": "route not selected", "route": {"router": "choose", "selected": "ship", "matched": True}}
    assert (done.output["selected"], done.output["hold"]) == ("ship", record)
    assert done.output["ship"]["output"] == {"result": "shipped"}
    assert done.tasks["hold"].moves == ("skipped",)
    assert (done.tasks["after"].state, done.tasks["after"].output) == ("skipped", None)


def test_a_router_without_a_case_takes_the_default(table: Bench) -> None:
    done = table.run(ROUTER, {"selected": "other"})
    assert done.tasks["choose"].output == {"selected": "other", "matched": False, "destinations": ["hold"]}
    assert done.states() == {
        "decide": "succeeded", "choose": "succeeded", "ship": "skipped", "hold": "succeeded", "after": "succeeded",
    }  # fmt: skip
    assert done.output["ship"]["route"] == {"router": "choose", "selected": "other", "matched": False}


def test_a_router_without_a_default_chooses_nothing(table: Bench) -> None:
    alone = ROUTER.replace("        default: [hold]\n", "").replace("needs: [choose], with: {result: held}", "")
    done = table.run(alone, {"selected": None})
    assert done.state == "succeeded"
    assert done.tasks["choose"].output == {"selected": None, "matched": False, "destinations": []}
    assert done.tasks["ship"].state == "skipped"


@pytest.mark.parametrize(
    ("selected", "destination"),
    [(1, "integer"), (1.0, "float"), (True, "truth"), ("1", "text"), (None, "none"), ({"b": 1, "a": [2]}, "object")],
)
def test_cases_are_compared_as_json(table: Bench, selected: Any, destination: str) -> None:
    names = ["integer", "float", "truth", "text", "none", "object"]
    values = ["1", "1.0", "true", "'1'", "null", "{a: [2], b: 1}"]
    cases = ", ".join(f"{{equals: {value}, tasks: [{name}]}}" for name, value in zip(names, values, strict=True))
    tasks = "".join(f"    - {{id: {name}, uses: action:set, needs: [r]}}\n" for name in names)
    spec = (
        ACTIONS + "  inputs: {x: 0}\n  tasks:\n"
        f"    - {{id: r, uses: router, route: {{select: '${{{{ inputs.x }}}}', cases: [{cases}]}}}}\n" + tasks
    )
    done = table.run(spec, {"x": selected})
    assert done.tasks["r"].output == {"selected": selected, "matched": True, "destinations": [destination]}
    assert [name for name in names if done.tasks[name].state == "succeeded"] == [destination]


def test_the_router_decides_before_the_condition(table: Bench) -> None:
    spec = ROUTER.replace("{id: hold, uses: action:set,", "{id: hold, uses: action:set, when: inputs.missing,")
    done = table.run(spec)
    assert (done.state, done.tasks["hold"].output["reason"]) == ("succeeded", "route not selected")
    assert table.run(spec, {"selected": "other"}).tasks["hold"].error["code"] == "template_error"


def test_what_expands_can_be_a_destination(table: Bench) -> None:
    """All of it is skipped with the record of the router; what follows inside is skipped because of that."""
    spec = (
        ACTIONS
        + """\
  inputs: {to: none}
  subworkflows:
    sub:
      version: 1.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      outputs: {n: 1}
      tasks: [{id: t, uses: action:set}]
  tasks:
    - {id: each, uses: action:set, needs: [r], foreach: {items: [1, 2]}}
    - {id: empty, uses: action:set, needs: [r], foreach: {items: []}}
    - {id: again, uses: action:set, needs: [r], loop: {maxIterations: 2, while: "${{ vars.loopIndex < 1 }}"}}
    - {id: call, uses: workflow:sub, needs: [r]}
    - id: r
      uses: router
      route:
        select: ${{ inputs.to }}
        cases: [{equals: all, tasks: [each, empty, again, call]}]
"""
    )
    done = table.run(spec)
    record = {"reason": "route not selected", "route": {"router": "r", "selected": "none", "matched": False}}
    assert done.state == "succeeded"
    for name, task in done.tasks.items():
        if name == "call--t" or name.startswith("again--0001"):
            assert (task.state, task.error["message"]) == ("skipped", NOT_DONE)
        elif name != "r":
            assert (task.state, task.output) == ("skipped", record), name
            assert task.moves == ("skipped",)
    done = table.run(spec, {"to": "all"})
    assert done.state == "succeeded"
    assert done.tasks["again"].output["iterations"] == 1
    assert done.tasks["empty"].output == {"items": []}
    assert done.tasks["call"].output == {"n": 1}


def test_a_router_that_did_not_succeed_chooses_nothing(table: Bench) -> None:
    spec = (
        ACTIONS
        + """\
  inputs: {go: false, x: 1}
  tasks:
    - {id: gate, uses: action:set, when: inputs.go}
    - id: r
      uses: router
      needs: [gate]
      failure: continue
      route: {select: "${{ inputs.y }}", cases: [{equals: 1, tasks: [a]}]}
    - {id: a, uses: action:set, needs: [r]}
"""
    )
    done = table.run(spec)
    assert done.states() == {"gate": "skipped", "r": "skipped", "a": "skipped"}
    assert (done.tasks["a"].output, done.tasks["a"].error["message"]) == (None, NOT_DONE)
    done = table.run(spec, {"go": True})
    assert (done.state, done.states()) == ("failed", {"gate": "succeeded", "r": "failed", "a": "skipped"})
    assert done.tasks["r"].error["code"] == "template_error"


def test_two_routers_must_both_choose(table: Bench) -> None:
    spec = (
        ACTIONS
        + """\
  inputs: {x: 1, y: 1}
  tasks:
    - {id: p, uses: router, route: {select: "${{ inputs.x }}", cases: [{equals: 1, tasks: [a]}]}}
    - {id: q, uses: router, route: {select: "${{ inputs.y }}", cases: [{equals: 1, tasks: [a]}]}}
    - {id: a, uses: action:set, needs: [p, q]}
"""
    )
    assert table.run(spec).tasks["a"].state == "succeeded"
    assert table.run(spec, {"x": 2}).tasks["a"].output["route"]["router"] == "p"
    assert table.run(spec, {"y": 2}).tasks["a"].output["route"]["router"] == "q"


# -- loops -------------------------------------------------------------------------------------------------------------

LOOP = (
    ACTIONS
    + """\
  tasks:
    - id: refine
      uses: action:set
      loop: {maxIterations: 3, while: "${{ vars.loopIndex < 2 }}", initial: {value: seed}}
      with: {value: "${{ vars.loopPrevious }}"}
    - {id: last, uses: action:set, needs: [refine], with: {n: "${{ tasks.refine.output.iterations }}"}}
"""
)
GOLDEN = ["refine--0000-ce12bbac409d", "refine--0001-d1e11b2f41fc", "refine--0002-4f7df97973fa"]


def test_a_loop_is_a_chain(build: Build) -> None:
    plan = build(LOOP)
    assert plan.order == (*GOLDEN, "refine", "last")
    second = plan.tasks[GOLDEN[1]]
    assert second.needs == (GOLDEN[0],)
    assert second.when == "${{ vars.loopIndex < 2 }}"
    assert second.expansion is not None
    assert second.expansion.bindings == {
        "loopIndex": 1,
        "loopPrevious": f"${{{{ tasks.{GOLDEN[0]}.output }}}}",
    }
    aggregate = plan.tasks["refine"]
    assert (aggregate.uses_kind, aggregate.needs, aggregate.when) == ("loop_aggregate", tuple(GOLDEN), None)
    assert plan.budget["plannedTasks"] == 5
    assert plan.budget["plannedExpansionItems"] == 0
    assert plan.budget["plannedLoopIterations"] == 3
    assert Plan.from_json(plan.to_json()) == plan


def test_a_false_guard_ends_a_loop(table: Bench) -> None:
    done = table.run(LOOP)
    assert done.state == "succeeded"
    output = done.tasks["refine"].output
    assert output["iterations"] == 2
    assert [item["taskId"] for item in output["items"]] == GOLDEN
    assert [item["state"] for item in output["items"]] == ["succeeded", "succeeded", "skipped"]
    assert [set(item) for item in output["items"]] == [{"index", "taskId", "state", "output", "error"}] * 3
    first, second, third = (done.tasks[name] for name in GOLDEN)
    assert first.output["output"] == {"value": {"value": "seed"}}
    assert second.output["output"] == {"value": first.output}
    assert [task.decision["result"] for task in (first, second, third)] == [True, True, False]
    assert third.output["condition"] == third.decision
    assert done.tasks["last"].output["output"] == {"n": 2}
    assert done.tasks["refine"].decision is None, "the last iteration was skipped: there is nothing to decide"
    planned = "SELECT planned_loop_iterations FROM run_budgets WHERE run_id = ?"
    assert scalar(table.store, planned, done.run_id) == 3


def test_what_comes_after_a_false_guard_is_skipped_without_a_look(table: Bench) -> None:
    done = table.run(LOOP.replace("< 2", "!= 0"))
    assert done.tasks["refine"].output["iterations"] == 0
    assert [done.tasks[name].state for name in GOLDEN] == ["skipped"] * 3
    assert done.tasks[GOLDEN[1]].output is None
    assert done.tasks[GOLDEN[2]].decision is None, "its guard would have been true"


def test_a_guard_that_stays_true_fails_closed(table: Bench) -> None:
    done = table.run(LOOP.replace("< 2", "< 9"))
    assert (done.state, done.error["taskId"], done.error["code"]) == ("failed", "refine", "loop_limit")
    assert "3 iterations" in done.error["message"]
    assert "maxIterations" in done.error["message"]
    assert [done.tasks[name].state for name in GOLDEN] == ["succeeded"] * 3
    assert (done.tasks["refine"].state, done.tasks["refine"].output) == ("failed", None)
    assert done.tasks["refine"].decision["result"] is True
    assert [task.decided[0]["result"] for task in done.tasks.values() if task.decided] == [True] * 4


def test_a_guard_that_is_false_after_the_last_iteration_is_fine(table: Bench) -> None:
    done = table.run(LOOP.replace("< 2", "< 3"))
    assert (done.state, done.tasks["refine"].output["iterations"]) == ("succeeded", 3)
    assert done.tasks["refine"].decision["result"] is False


def test_the_last_decision_waits_for_the_memory_that_it_reads(build: Build) -> None:
    """A writer that comes between the last iteration and the aggregate has ended before the guard is decided again."""
    spec = LOOP.replace('while: "${{ vars.loopIndex < 2 }}"', 'while: "${{ memory.k }}"').replace(
        "  tasks:\n",
        "  memory: {working: {k: true}}\n  tasks:\n"
        f"    - {{id: w, uses: action:put, needs: [{GOLDEN[2]}], with: {{key: k, value: false}}}}\n",
    )
    plan = build(spec)
    assert plan.order[:5] == (*GOLDEN, "w", "refine")
    assert (plan.tasks["refine"].memory_reads, plan.tasks["refine"].memory_after) == (("k",), (3,))
    assert plan.tasks[GOLDEN[2]].memory_after == ()


def test_loop_output_is_the_output_before(table: Bench) -> None:
    """It may stand in the guard, and the last decision sees the last output, own variables and what the body needs."""
    spec = (
        ACTIONS
        + """\
  inputs: {stop: 2}
  tasks:
    - {id: base, uses: action:set, with: {go: true}}
    - id: grow
      uses: action:set
      needs: [base]
      vars: {own: "${{ tasks.base.output.output.go }}"}
      loop: {maxIterations: 2, while: "${{ GUARD }}", initial: {output: {n: -1}}}
      with: {n: "${{ vars.loopIndex }}", before: "${{ vars.loopPrevious.output.n }}"}
"""
    )
    done = table.run(spec.replace("GUARD", "loop.output.output.n < 1"))
    assert (done.state, done.tasks["grow"].output["iterations"]) == ("succeeded", 2)
    items = done.tasks["grow"].output["items"]
    assert [item["output"]["output"] for item in items] == [{"n": 0, "before": -1}, {"n": 1, "before": 0}]
    assert done.tasks["grow"].decision["expression"] == "${{ vars.loopPrevious.output.n < 1 }}"
    for guard in ("vars.own", "tasks.base.output.output.go", "not loop.output.output.n > 7", "inputs.stop"):
        assert table.run(spec.replace("GUARD", guard)).tasks["grow"].error["code"] == "loop_limit", guard


def test_a_failed_iteration_ends_its_loop(table: Bench) -> None:
    spec = (
        ACTIONS
        + """\
  tasks:
    - id: again
      uses: action:check
      failure: continue
      loop: {maxIterations: 3, while: "${{ vars.loopIndex < 9 }}"}
      with: {that: "${{ vars.loopIndex < 1 }}", message: no more}
    - {id: after, uses: action:set, needs: [again]}
"""
    )
    done = table.run(spec)
    output = done.tasks["again"].output
    assert (done.state, output["iterations"]) == ("failed", 2)
    assert [item["state"] for item in output["items"]] == ["succeeded", "failed", "skipped"]
    assert [item["error"] for item in output["items"]] == [None, "no more", NOT_DONE]
    assert (done.tasks["again"].state, done.tasks["after"].state) == ("succeeded", "succeeded")
    assert done.tasks["again"].decision is None, "after a failure there is no last decision"


# -- values that grow --------------------------------------------------------------------------------------------------

DOUBLES = (
    ACTIONS
    + """\
  tasks:
    - id: grow
      uses: action:set
      loop: {maxIterations: 12, while: "${{ vars.loopIndex < 1000 }}", initial: {value: seed}}
      with: {before: "${{ vars.loopPrevious }}"}
"""
)
"""The output of `builtin.assign` holds what it was given twice."""
SCHEDULER = "agentctl.coordinator.scheduler"


def fault(done: Outcome, task: str | None) -> tuple[str, int, int]:
    """The run has failed for a value that was too large: (words, length, limit)."""
    assert (done.state, done.error["code"], done.error["taskId"]) == ("failed", "too_large", task)
    assert done.error["retryable"] is False
    return done.error["message"], done.error["details"]["characters"], done.error["details"]["limit"]


def test_a_loop_whose_value_doubles_fails_at_the_limit(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SCHEDULER}.MAX_INPUT_CHARACTERS", 5000)
    done = table.run(DOUBLES)
    states = [task.state for task in done.tasks.values()]
    failed = states.index("failed")
    assert 2 < failed < 10
    assert states == ["succeeded"] * failed + ["failed"] + ["cancelled"] * (12 - failed)
    message, length, limit = fault(done, list(done.tasks)[failed])
    assert "files" in message
    assert 5000 == limit < length < 4 * limit
    outputs = [len(json.dumps(task.output, separators=(",", ":"))) for task in done.tasks.values() if task.output]
    assert max(outputs) < 3 * limit
    check_chains(table.store)


def test_a_loop_whose_value_nests_ever_deeper_fails_at_the_limit(table: Bench) -> None:
    done = table.run(
        ACTIONS
        + """\
  tasks:
    - id: grow
      uses: action:set
      loop: {maxIterations: 1000, while: "${{ vars.loopIndex < 999 }}", initial: {output: 0}}
      with: {p: ["${{ vars.loopPrevious.output }}"]}
"""
    )
    assert (done.state, done.error["code"], done.error["retryable"]) == ("failed", "too_large", False)
    states = list(done.states().values())
    assert states[:64] == ["succeeded"] * 64
    assert states[64:] == ["failed"] + ["cancelled"] * 936
    assert "128 levels" in done.error["message"]
    check_chains(table.store)


def test_what_just_fits_into_an_input_is_no_fault(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ACTIONS + "  tasks:\n    - {id: a, uses: action:set, with: {n: '${{ inputs.n }}'}}\n  inputs: {n: ''}\n"
    monkeypatch.setattr(f"{SCHEDULER}.MAX_INPUT_CHARACTERS", 100)
    assert table.run(spec, {"n": "x" * (100 - len('{"n":""}'))}).state == "succeeded"
    _, length, limit = fault(table.run(spec, {"n": "x" * (101 - len('{"n":""}'))}), "a")
    assert (length, limit) == (101, 100)


@pytest.mark.parametrize("place", ["with", "vars", "outputs"])
def test_what_would_be_too_large_is_never_made(table: Bench, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    made: list[int] = []

    def measured(value: Any) -> str:
        made.append(len(canonical(value)))
        return canonical(value)

    monkeypatch.setattr(f"{SCHEDULER}.canonical", measured)
    monkeypatch.setattr(f"{SCHEDULER}.MAX_INPUT_CHARACTERS", 5000)
    monkeypatch.setattr(f"{SCHEDULER}.MAX_AGGREGATE_CHARACTERS", 5000)
    many = "[" + ", ".join(["'${{ inputs.n }}'"] * 100) + "]"
    task, outputs = ("", f"{{x: {many}}}") if place == "outputs" else (f", {place}: {{x: {many}}}", "{y: 1}")
    spec = f"  inputs: {{n: 0}}\n  tasks:\n    - {{id: a, uses: action:set{task}}}\n  outputs: {outputs}\n"
    assert table.run(ACTIONS + spec).state == "succeeded"
    _, length, limit = fault(table.run(ACTIONS + spec, {"n": ["x" * 1000]}), None if place == "outputs" else "a")
    assert limit == 5000 < 100_000 < length
    assert max(made) < 2000


def test_a_text_that_would_be_too_long_is_never_made(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentctl.coordinator.expressions.MAX_TEXT", 5000)
    text = "${{ inputs.n }}" * 6
    spec = ACTIONS + f"  inputs: {{n: ''}}\n  tasks:\n    - {{id: a, uses: action:set, with: {{x: '{text}'}}}}\n"
    assert table.run(spec, {"n": "x" * 833}).state == "succeeded"
    done = table.run(spec, {"n": "x" * 834})
    assert (done.state, done.error["code"]) == ("failed", "template_error")
    assert "5,004 characters" in done.error["message"]


def test_an_aggregate_that_is_too_large_fails(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SCHEDULER}.MAX_AGGREGATE_CHARACTERS", 2000)
    spec = ACTIONS + (
        "  tasks:\n    - {id: each, uses: action:set, foreach: {items: [1, 2, 3, 4]}, with: {n: '${{ inputs.n }}'}}\n"
        "    - {id: after, uses: action:set, needs: [each]}\n  inputs: {n: ''}\n  outputs: {}\n"
    )
    assert table.run(spec, {"n": ""}).state == "succeeded"
    done = table.run(spec, {"n": "x" * 500})
    message, length, limit = fault(done, "each")
    assert "children" in message
    assert limit == 2000 < length
    assert list(done.states().values()) == [*["succeeded"] * 4, "failed", "cancelled"]


def test_an_aggregate_of_a_loop_that_is_too_large_fails(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SCHEDULER}.MAX_AGGREGATE_CHARACTERS", 2000)
    done = table.run(DOUBLES.replace("< 1000", "< 4"))
    fault(done, "grow")
    assert list(done.states().values()) == [*["succeeded"] * 4, *["skipped"] * 8, "failed"]


def test_an_output_of_the_run_that_is_too_large_fails_it(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SCHEDULER}.MAX_AGGREGATE_CHARACTERS", 2000)
    spec = ACTIONS + (
        "  tasks:\n    - {id: a, uses: action:set, with: {n: '${{ inputs.n }}'}}\n  inputs: {n: ''}\n"
        "  outputs: {one: '${{ tasks.a.output }}', two: '${{ tasks.a.output }}'}\n"
    )
    assert table.run(spec, {"n": ""}).state == "succeeded"
    done = table.run(spec, {"n": "x" * 800})
    message, length, limit = fault(done, None)
    assert "output of the run" in message
    assert limit == 2000 < length
    assert (done.states(), done.output) == ({"a": "succeeded"}, None)


def test_too_little_memory_for_an_input_fails_its_task_alone(table: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(value: Any) -> str:
        if value == {"m": "huge"}:
            raise MemoryError
        return canonical(value)

    monkeypatch.setattr(f"{SCHEDULER}.canonical", starved)
    spec = ACTIONS + (
        "  tasks:\n    - {id: a, uses: action:set, failure: continue, with: {m: '${{ inputs.n }}'}}\n"
        "    - {id: b, uses: action:set, with: {m: small}}\n  inputs: {n: huge}\n"
    )
    done = table.run(spec)
    assert (done.state, done.states()) == ("failed", {"a": "failed", "b": "succeeded"})
    assert (done.tasks["a"].error["code"], done.tasks["a"].error["retryable"]) == ("too_large", False)
    assert "memory" in done.tasks["a"].error["message"]
    assert table.run(spec, {"n": "small"}).state == "succeeded"


# -- sub-workflows -----------------------------------------------------------------------------------------------------

SUMMARIZE = (
    ACTIONS
    + """\
  inputs: {topic: durable}
  subworkflows:
    summarize:
      version: 1.0.0
      inputs: {style: short}
      inputSchema: {type: object, required: [topic], properties: {topic: {type: string}, style: {type: string}}}
      outputs: {result: "${{ tasks.finish.output.output.text }}", style: "${{ inputs.style }}"}
      outputSchema: {type: object, properties: {result: {type: string}}}
      tasks:
        - {id: prepare, uses: action:set, with: {text: "${{ inputs.topic }}", note: inputs.topic}}
        - {id: finish, uses: action:set, needs: [prepare], with: {text: "${{ tasks.prepare.output.output.text }}"}}
  tasks:
    - {id: summary, uses: workflow:summarize, with: {topic: "${{ inputs.topic }}"}}
    - {id: tell, uses: action:set, needs: [summary], with: {said: "${{ tasks.summary.output.result }}"}}
  outputs: {result: "${{ tasks.tell.output.output.said }}"}
"""
)
BOUNDARY = "summary--inputs-4d45e657"


def test_a_call_becomes_ordinary_tasks(build: Build) -> None:
    plan = build(SUMMARIZE)
    assert plan.order == (BOUNDARY, "summary--prepare", "summary--finish", "summary", "tell")
    kinds = {name: (task.uses_kind, task.uses_name) for name, task in plan.tasks.items()}
    assert kinds == {
        BOUNDARY: ("subworkflow_input", "summarize"),
        "summary--prepare": ("action", "set"),
        "summary--finish": ("action", "set"),
        "summary": ("subworkflow_aggregate", "summarize"),
        "tell": ("action", "set"),
    }
    assert plan.tasks[BOUNDARY].input == {"style": "short", "topic": "${{ inputs.topic }}"}
    assert plan.tasks["summary--prepare"].needs == (BOUNDARY,)
    assert plan.tasks["summary--prepare"].input == {
        "text": f"${{{{ tasks.{BOUNDARY}.output.topic }}}}",
        "note": "inputs.topic",
    }
    assert plan.tasks["summary--finish"].needs == ("summary--prepare", BOUNDARY)
    assert plan.tasks["summary"].needs == ("summary--prepare", "summary--finish", BOUNDARY)
    assert Plan.from_json(plan.to_json()) == plan
    # The workflow digest is that of the flattened workflow.
    assert plan.workflow_digest != build(SUMMARIZE.replace("note: inputs.topic", "note: x")).workflow_digest


def test_a_call_gives_its_outputs(table: Bench) -> None:
    done = table.run(SUMMARIZE)
    assert (done.state, done.output) == ("succeeded", {"result": "durable"})
    assert done.tasks[BOUNDARY].output == {"style": "short", "topic": "durable"}
    assert done.tasks["summary"].output == {"result": "durable", "style": "short"}
    assert set(done.states().values()) == {"succeeded"}


def test_boundaries_are_typed(table: Bench) -> None:
    done = table.run(SUMMARIZE, {"topic": 3})
    assert (done.state, done.error["taskId"], done.error["code"]) == ("failed", BOUNDARY, "output_contract")
    wrong = SUMMARIZE.replace("{result: {type: string}}", "{result: {type: integer}}")
    done = table.run(wrong)
    assert (done.state, done.error["taskId"], done.error["code"]) == ("failed", "summary", "output_contract")


def test_a_call_that_never_begins_is_skipped_as_a_whole(table: Bench) -> None:
    spec = SUMMARIZE.replace(
        "    - {id: summary, uses: workflow:summarize,",
        "    - {id: gate, uses: action:set, when: inputs.go}\n"
        "    - {id: summary, uses: workflow:summarize, needs: [gate],",
    ).replace("inputs: {topic: durable}", "inputs: {topic: durable, go: false}")
    spec = spec[: spec.index('  outputs: {result: "${{ tasks.tell')]
    done = table.run(spec)
    assert done.state == "succeeded"
    assert {name: task.state for name, task in done.tasks.items()} == dict.fromkeys(done.tasks, "skipped")
    assert done.tasks["summary"].error["message"] == NOT_DONE


def test_a_call_whose_children_failed_says_so(table: Bench) -> None:
    """The aggregate runs whatever its children came to; what its outputs miss fails it, as its own `failure` says."""
    spec = (
        ACTIONS
        + """\
  subworkflows:
    sub:
      version: 0.1.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      outputs: OUT
      tasks:
        - {id: bad, uses: action:check, failure: continue, with: {that: false, message: no}}
        - {id: good, uses: action:set, with: {n: 1}}
  tasks:
    - {id: call, uses: workflow:sub, failure: continue}
    - {id: after, uses: action:set, needs: [call]}
    - {id: other, uses: action:set}
"""
    )
    done = table.run(spec.replace("OUT", '{n: "${{ tasks.good.output.output.n }}"}'))
    assert (done.state, done.tasks["call"].output, done.tasks["after"].state) == ("failed", {"n": 1}, "succeeded")
    done = table.run(spec.replace("OUT", '{n: "${{ tasks.bad.output.passed }}"}'))
    assert (done.tasks["call"].state, done.tasks["call"].error["code"]) == ("failed", "template_error")
    assert (done.tasks["after"].state, done.tasks["other"].state) == ("skipped", "succeeded")


NESTED = (
    ACTIONS
    + """\
  inputs: {names: [ann, bob]}
  memory: {working: {k: top, outer__k: mine, outer__inner__k: deep}}
  subworkflows:
    outer:
      version: 1.0.0
      inputs: {names: []}
      inputSchema: {type: object}
      outputSchema: {type: object}
      outputs: {said: "${{ tasks.inner.output.said }}", k: "${{ memory.k }}"}
      tasks:
        - {id: first, uses: action:get, with: {key: k}}
        - id: inner
          uses: workflow:inner
          needs: [first]
          with: {names: "${{ inputs.names }}", tag: "${{ memory.k }}"}
    inner:
      version: 2.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      outputs: {said: "${{ tasks.pick.output.selected }}", each: "${{ tasks.each.output.items }}"}
      tasks:
        - id: each
          uses: action:set
          when: inputs.tag
          foreach: {items: "${{ inputs.names }}", as: name}
          with: {hello: "${{ vars.name }} ${{ inputs.tag }} ${{ memory.k }}"}
        - {id: table, uses: action:set, matrix: {axes: {x: "${{ inputs.names }}", y: [1]}}}
        - id: pick
          uses: router
          needs: [each]
          route: {select: "${{ inputs.tag }}", cases: [{equals: mine, tasks: [more]}], default: [none]}
        - id: more
          uses: action:set
          needs: [pick]
          loop: {maxIterations: 2, while: "${{ vars.loopIndex < 1 }}", initial: {go: "${{ inputs.tag }}"}}
          with: {go: "${{ vars.loopPrevious.go }}"}
        - {id: none, uses: action:set, needs: [pick]}
  tasks:
    - {id: outer, uses: workflow:outer, with: {names: "${{ inputs.names }}"}}
"""
)


def test_calls_nest(table: Bench) -> None:
    """Everything may stand in a sub-workflow: fan-outs over its inputs, routers, loops, calls; all under its names."""
    done = table.run(NESTED)
    assert done.state == "succeeded", done.error
    outer, inner = (hashlib.sha256(name).hexdigest()[:8] for name in (b"outer@1.0.0", b"inner@2.0.0"))
    assert [name for name in done.tasks if "--inputs-" in name] == [
        f"outer--inputs-{outer}",
        f"outer--inner--inputs-{inner}",
    ]
    assert done.tasks["outer--first"].output["value"] == "mine"
    assert done.tasks["outer"].output == {"said": "mine", "k": "mine"}
    hello = [item["output"]["output"]["hello"] for item in done.tasks["outer--inner--each"].output["items"]]
    assert hello == ["ann mine deep", "bob mine deep"]
    assert len(done.tasks["outer--inner--table"].output["items"]) == 2
    assert done.tasks["outer--inner--pick"].output["destinations"] == ["outer--inner--more"]
    assert done.tasks["outer--inner--none"].output["route"]["router"] == "outer--inner--pick"
    more = done.tasks["outer--inner--more"].output
    assert (more["iterations"], more["items"][0]["output"]["output"]) == (1, {"go": "mine"})
    check_chains(table.store)


def test_a_fan_out_inside_takes_what_the_call_gives(build: Build) -> None:
    """Items are known before the run when the call gives them as literals, inputs or variables."""
    short = NESTED.replace('with: {names: "${{ inputs.names }}"}}\n', "with: {names: [a, b, c]}}\n")
    assert len([name for name in build(short).order if name.startswith("outer--inner--each--")]) == 3
    assert len([name for name in build(NESTED, inputs={"names": []}).order if "each--" in name]) == 0
    late = NESTED.replace("    - {id: outer, uses: workflow:outer,", "    - {id: a, uses: action:set, with: {n: []}}\n"
                          "    - {id: outer, uses: workflow:outer, needs: [a],")  # fmt: skip
    late = late.replace('with: {names: "${{ inputs.names }}"}}\n', 'with: {names: "${{ tasks.a.output.output.n }}"}}\n')
    with pytest.raises(DocumentError, match="of this sub-workflow is not known before the run"):
        build(late)


def test_memory_of_a_call_is_its_own(build: Build) -> None:
    spec = (
        ACTIONS
        + """\
  runtime: {maxConcurrency: 4}
  subworkflows:
    note:
      version: 1.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      outputs: {k: "${{ memory.k }}"}
      tasks:
        - {id: put, uses: action:put, memoryWrites: [k, l], with: {key: k, value: 1}}
        - {id: get, uses: action:get, needs: [put], with: {key: k}}
  tasks:
    - {id: one-a, uses: workflow:note}
    - {id: two, uses: workflow:note}
    - {id: own, uses: action:put, with: {key: k, value: 2}}
"""
    )
    plan = build(spec)
    put, get = plan.tasks["one-a--put"], plan.tasks["one-a--get"]
    assert (put.memory_writes, put.input["key"]) == (("one_a__k", "one_a__l"), "one_a__k")
    assert (get.memory_reads, get.input["key"]) == (("one_a__k",), "one_a__k")
    assert plan.tasks["one-a"].input == {"k": "${{ memory.one_a__k }}"}
    assert plan.tasks["one-a"].memory_reads == ("one_a__k",)
    assert plan.tasks["two--put"].memory_writes == ("two__k", "two__l")
    assert plan.tasks["own"].memory_writes == ("k",)
    with pytest.raises(DocumentError, match="same prefix"):
        build(spec.replace("id: two", "id: one_a"))


def test_long_term_memory_of_a_call_is_its_own(build: Build) -> None:
    spec = """\
  memory: {longTerm: {namespace: team}}
  actions:
    keep: {kind: builtin.long_term_memory.write}
    find: {kind: builtin.long_term_memory.search}
    take: {kind: builtin.long_term_memory.promote}
  subworkflows:
    note:
      version: 1.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      tasks:
        - {id: keep, uses: action:keep, with: {key: k, value: 1}}
        - {id: find, uses: action:find, needs: [keep], with: {query: one, namespace: mine}}
        - {id: take, uses: action:take, needs: [find], with: {key: k, value: 1}}
  tasks:
    - {id: one-a, uses: workflow:note}
    - {id: own, uses: action:keep, with: {key: k, value: 2}}
"""
    plan = build(spec)
    assert plan.tasks["one-a--keep"].input["namespace"] == "one_a__team"
    assert plan.tasks["one-a--keep"].input["key"] == "k"
    assert plan.tasks["one-a--find"].input["namespace"] == "one_a__mine"
    assert plan.tasks["one-a--take"].input["key"] == "one_a__k"
    assert plan.tasks["one-a--take"].memory_writes == ("one_a__k",)
    assert "namespace" not in plan.tasks["own"].input
    with pytest.raises(DocumentError, match="templated memory namespace in a sub-workflow"):
        build(
            spec.replace("namespace: mine", 'namespace: "${{ vars.x }}"').replace(
                "tasks:\n    - {id: one-a", "vars: {x: y}\n  tasks:\n    - {id: one-a"
            )
        )


def test_defaults_of_an_action_mean_the_sub_workflow(build: Build) -> None:
    """The `with` of an action is read where it is used: its inputs are those of the call there."""
    spec = (
        ACTIONS.replace("set: {kind: builtin.assign}", "set: {kind: builtin.assign, with: {t: '${{ inputs.t }}'}}")
        + """\
  subworkflows:
    sub:
      version: 1.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      tasks: [{id: a, uses: action:set}]
  tasks:
    - {id: call, uses: workflow:sub, with: {t: 1}}
    - {id: own, uses: action:set}
"""
    )
    plan = build(spec)
    assert plan.tasks["own"].input == {"t": "${{ inputs.t }}"}
    [boundary] = [name for name in plan.order if "inputs-" in name]
    assert plan.tasks["call--a"].input == {"t": f"${{{{ tasks.{boundary}.output.t }}}}"}
    assert plan.tasks["call"].input == {}


def test_calls_that_come_to_too_much_are_refused_before_they_are_copied(build: Build) -> None:
    """Thirty definitions that call the next one twice: a billion tasks, told at once."""
    levels = 30
    subs = "".join(
        f"    s{n}: {{version: 1.0.0, inputSchema: true, outputSchema: true, tasks: "
        f"[{{id: a, uses: 'workflow:s{n + 1}'}}, {{id: b, uses: 'workflow:s{n + 1}'}}]}}\n"
        for n in range(levels)
    )
    subs += f"    s{levels}: {{version: 1.0.0, inputSchema: true, outputSchema: true, tasks: "
    subs += "[{id: t, uses: 'action:set'}]}\n"
    with pytest.raises(DocumentError, match="5368709118 compiled tasks are more than 200000"):
        build(ACTIONS + "  subworkflows:\n" + subs + "  tasks: [{id: go, uses: 'workflow:s0'}]\n")


@pytest.mark.parametrize(("levels", "good"), [(64, True), (65, False), (2000, False)])
def test_nesting_has_an_end(build: Build, levels: int, good: bool) -> None:
    head = "{version: 1.0.0, inputSchema: true, outputSchema: true, tasks: "
    subs = "".join(f"    s{n}: {head}[{{id: a, uses: 'workflow:s{n + 1}'}}]}}\n" for n in range(1, levels))
    subs += f"    s{levels}: {head}[{{id: t, uses: 'action:set'}}]}}\n"
    spec = ACTIONS + "  subworkflows:\n" + subs + "  tasks: [{id: go, uses: 'workflow:s1'}]\n"
    if good:
        assert len(build(spec).order) == 2 * levels + 1
    else:
        with pytest.raises(DocumentError, match="nested more than 64 deep"):
            build(spec)


# -- all together ------------------------------------------------------------------------------------------------------


def test_budgets_count_iterations(build: Build) -> None:
    spec = (
        ACTIONS
        + """\
  runtime: {budgets: {maxTasks: %d, maxExpansionItems: 2, maxLoopIterations: %d}}
  tasks:
    - {id: l, uses: action:set, loop: {maxIterations: 3, while: "${{ vars.loopIndex < 1 }}"}}
    - {id: m, uses: action:set, loop: {maxIterations: 1, while: "${{ vars.loopIndex < 1 }}"}}
    - {id: e, uses: action:set, foreach: {items: [1, 2]}}
"""
    )
    assert len(build(spec % (9, 4)).order) == 9
    with pytest.raises(DocumentError, match="9 compiled tasks"):
        build(spec % (8, 4))
    with pytest.raises(DocumentError, match="4 declared loop iterations; maxLoopIterations allows 3"):
        build(spec % (9, 3))


def test_a_kind_of_task_that_this_version_does_not_know_is_refused(build: Build) -> None:
    task = build(LOOP).tasks["last"].to_json()
    with pytest.raises(IncompatibleVersion, match="'sage'"):
        CompiledTask.from_json({**task, "uses": {"kind": "sage", "name": "x"}})


def test_plans_are_stored_and_read_back_whole(build: Build) -> None:
    for spec in (CONDITION, ROUTER, LOOP, SUMMARIZE, NESTED):
        plan = build(spec)
        assert Plan.from_json(plan.to_json()) == plan


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 8])
def test_guards_of_more_tasks_than_a_batch_holds_are_decided_without_a_pause(table: Bench, places: int) -> None:
    """The batches follow one another at once: nothing else would wake the driver."""
    spec = (
        f"  runtime: {{maxConcurrency: {places}}}\n"
        "  policy: {approval: never}\n"
        "  actions: {look: {kind: builtin.read}}\n"
        "  inputs: {go: false}\n"
        "  tasks:\n"
        "    - {id: f, uses: action:look, when: inputs.go, with: {path: x},\n"
        "       foreach: {maxItems: 1000, items: '${{ inputs.all }}'}}\n"
    )
    assert table.run(spec, {"all": list(range(700))}, looks=1).state == "succeeded"
