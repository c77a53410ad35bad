"""What valid documents compile to: ids, order, memory, digests, plan JSON, speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from agentctl.coordinator.compiler import compile_workflow, merge_inputs, plan_as_json
from agentctl.coordinator.definition import document_schema, load_workflow
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.expansion import expansion_id
from agentctl.coordinator.expressions import Scope, compile_vars
from agentctl.coordinator.plan import Plan, RetryPolicy
from agentctl.coordinator.yaml_document import parse_document
from agentctl.store.errors import IncompatibleVersion
from hypothesis import given, settings
from hypothesis import strategies as st

Build = Callable[..., Plan]
HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"
ACTIONS = """\
  policy: {approval: never}
  actions:
    set: {kind: builtin.assign, with: {a: 1, b: [x]}}
    sh: {kind: builtin.shell.exec, command: /bin/true, timeoutSeconds: 7}
    sh2: {kind: builtin.shell.exec, command: /bin/false}
    get: {kind: builtin.memory.read}
    put: {kind: builtin.memory.write}
    read: {kind: builtin.read}
"""


# ------------------------------------------------------------------------------------------- expansion


def test_golden_ids(build: Build) -> None:
    plan = build(
        ACTIONS + "  tasks:\n"
        "  - {id: each, uses: action:set, foreach: {items: [alpha, beta], as: value}}\n"
        "  - {id: t, uses: action:set, foreach: {items: [1, null, {b: 1, a: 2}]}}\n"
        "  - id: coverage\n    uses: action:set\n"
        "    matrix: {axes: {profile: [debug, release], platform: [linux, macos]}}\n"
    )
    assert plan.order == (
        "each--0000-92b13011ab9e", "each--0001-ef9f0b26cfb8", "each",
        "t--0000-8f9c4658c318", "t--0001-e4e07ac4fc87", "t--0002-b1fa780c3e27", "t",
        "coverage--0000-c660ad53f743", "coverage--0001-9db1f8eb7daf",
        "coverage--0002-df0ee3c0b623", "coverage--0003-19cbb007d07a", "coverage",
    )  # fmt: skip
    matrix = plan.tasks["coverage--0001-9db1f8eb7daf"].expansion
    assert matrix is not None
    assert matrix.bindings == {"matrix": {"platform": "linux", "profile": "release"}, "matrixIndex": 1}


def test_golden_ids_of_a_chain() -> None:
    previous: Any = {"value": "seed"}
    ids = []
    for index in range(3):
        ids.append(expansion_id("refine", index, {"loopIndex": index, "loopPrevious": previous}))
        previous = f"${{{{ tasks.{ids[-1]}.output }}}}"
    assert ids == ["refine--0000-ce12bbac409d", "refine--0001-d1e11b2f41fc", "refine--0002-4f7df97973fa"]
    assert expansion_id("x", 12_345, {}).startswith("x--12345-")


def test_children_and_aggregate(build: Build) -> None:
    plan = build(
        ACTIONS + "  tasks:\n  - {id: first, uses: action:set}\n"
        "  - {id: e, uses: action:sh, needs: [first], when: inputs.go, vars: {v: 1}, failure: continue,"
        " timeoutSeconds: 9, retry: {maxAttempts: 3, backoffMs: 5}, outputSchema: {type: object},"
        " with: {args: ['${{ vars.item }}']}, foreach: {items: [p, q]}}\n"
        "  - {id: last, uses: action:set, needs: [e]}\n"
    )
    children = [task for task in plan.tasks.values() if task.expansion is not None]
    assert [child.vars for child in children] == [
        {"v": 1, "item": "p", "foreachIndex": 0},
        {"v": 1, "item": "q", "foreachIndex": 1},
    ]
    for child in children:
        assert (child.needs, child.when, child.failure) == (("first",), "inputs.go", "continue")
        assert child.timeout_seconds == 7
        assert child.retry == RetryPolicy(3, 5)
        assert child.output_schema == {"type": "object"}
    assert children[0].input is children[1].input
    aggregate = plan.tasks["e"]
    assert aggregate.needs == tuple(child.id for child in children)
    assert (aggregate.uses_kind, aggregate.uses_name, aggregate.action_kind) == ("aggregate", "foreach", None)
    assert (aggregate.when, aggregate.vars, aggregate.input, aggregate.failure) == (None, {}, {}, "continue")
    assert (aggregate.retry, aggregate.timeout_seconds) == (RetryPolicy(), 120)
    assert plan.tasks["last"].needs == ("e",)
    assert plan.budget["plannedExpansionItems"] == 2
    assert plan.budget["plannedTasks"] == 5


def test_empty_expansions(build: Build) -> None:
    plan = build(
        ACTIONS + "  tasks:\n  - {id: a, uses: action:set}\n"
        "  - {id: e, uses: action:set, needs: [a], foreach: {items: []}}\n"
        "  - {id: m, uses: action:set, needs: [a], matrix: {axes: {x: [1], y: []}}}\n"
    )
    assert plan.order == ("a", "e", "m")
    assert plan.tasks["e"].needs == plan.tasks["m"].needs == ()


def test_items_from_inputs_and_vars(build: Build) -> None:
    spec = (
        ACTIONS + "  inputs: {xs: [d], keep: 1}\n  vars: {ys: [1, 2]}\n  tasks:\n"
        "  - {id: e, uses: action:set, foreach: {items: '${{ inputs.xs }}'}}\n"
        "  - {id: m, uses: action:set, matrix: {axes: {y: '${{ vars.ys }}', z: [0]}}}\n"
    )
    assert len(build(spec).order) == 2 + 3
    plan = build(spec, inputs={"xs": ["a", "b", "c"]})
    assert len(plan.order) == 4 + 3
    assert plan.inputs == {"xs": ["d"], "keep": 1}
    assert plan.workflow_digest == build(spec).workflow_digest
    assert plan.plan_digest != build(spec).plan_digest
    assert len(build(spec, variables={"ys": []}).order) == 2 + 1


def test_given_items_are_data_and_literal_ones_may_be_templates(build: Build) -> None:
    spec = ACTIONS + "  tasks: [{id: e, uses: action:set, vars: {w: '${{ inputs.q }}'}, foreach: {items: %s}}]\n"
    scope = Scope(inputs={"q": 5})
    given = build(spec % "'${{ inputs.xs }}'", inputs={"xs": ["${{ inputs.q }}"]})
    child = given.tasks[given.order[0]]
    assert child.data_vars == ("item",)
    assert compile_vars(child.vars, child.data_vars)(scope)["item"] == "${{ inputs.q }}"
    assert compile_vars(child.vars, child.data_vars)(scope)["w"] == 5
    literal = build(spec % "['${{ inputs.q }}']")
    child = literal.tasks[literal.order[0]]
    assert compile_vars(child.vars, child.data_vars)(scope)["item"] == 5
    assert build(spec % "'${{ inputs.xs }}'", inputs={"xs": ["plain"]}).tasks["e"].data_vars == ()


@pytest.mark.parametrize(("limit", "good"), [(40_000, True), (39_999, False)])
def test_width_is_checked_before_anything_is_made(build: Build, limit: int, good: bool) -> None:
    axis = json.dumps(list(range(200)))
    spec = (
        ACTIONS
        + f"  tasks: [{{id: m, uses: action:set, matrix: {{maxItems: {limit}, axes: {{x: {axis}, y: {axis}}}}}}}]\n"
    )
    if good:
        assert len(build(spec).order) == 40_001
    else:
        with pytest.raises(DocumentError, match="40000 children are more than maxItems, which is 39999"):
            build(spec)


def test_a_product_that_overflows_is_refused_at_once(build: Build) -> None:
    axes = ", ".join(f"a{n}: &a [{', '.join('0123456789')}]" if n == 0 else f"a{n}: *a" for n in range(60))
    with pytest.raises(DocumentError, match="more than maxItems"):
        build(ACTIONS + f"  tasks: [{{id: m, uses: action:set, matrix: {{axes: {{{axes}}}}}}}]\n")


def test_a_plan_has_a_largest_size(build: Build) -> None:
    task = "  - {id: e%d, uses: action:set, foreach: {maxItems: 100000, items: '${{ inputs.xs }}'}}\n"
    with pytest.raises(DocumentError, match="300003 compiled tasks are more than 200000"):
        build(ACTIONS + "  tasks:\n" + "".join(task % n for n in range(3)), inputs={"xs": [0] * 100_000})


# ------------------------------------------------------------------------------------------- fields


def test_task_fields_are_resolved(build: Build) -> None:
    plan = build(
        ACTIONS + "  runtime: {defaultTimeoutSeconds: 50, maxConcurrency: 4, maxDeliveries: 9}\n"
        "  vars: {w: 1}\n  memory: {working: {k: [1]}}\n  outputs: {o: '${{ tasks.b.output }}'}\n"
        "  output: {showDiff: false}\n  tasks:\n"
        "  - {id: a, uses: action:set, vars: {v: '${{ inputs.x }}'}, with: {b: 2, c: '${{ vars.v }}'}}\n"
        "  - {id: b, uses: action:sh, needs: [a, a], timeoutSeconds: 60}\n"
        "  - {id: c, uses: action:sh2, timeoutSeconds: 61}\n"
        "  - {id: d, uses: action:sh2}\n"
    )
    assert plan.tasks["a"].input == {"a": 1, "b": 2, "c": "${{ vars.v }}"}
    assert plan.tasks["a"].vars == {"v": "${{ inputs.x }}"}
    assert plan.tasks["b"].needs == ("a",)
    assert [plan.tasks[name].timeout_seconds for name in "abcd"] == [50, 7, 61, 50]
    assert [plan.tasks[name].position for name in plan.order] == [0, 1, 2, 3]
    assert (plan.max_concurrency, plan.max_deliveries, plan.show_diff) == (4, 9, False)
    assert plan.vars == {"w": 1}
    assert plan.memory == {"k": [1]}
    assert plan.outputs == {"o": "${{ tasks.b.output }}"}
    assert plan.predictability == "requires_execution"
    assert plan.requirements == {
        "providers": [], "tools": [], "effects": ["builtin.shell.exec"], "processes": ["/bin/false", "/bin/true"],
    }  # fmt: skip
    assert plan.policy["maxArtifactBytes"] == 1 << 30
    assert plan.policy["network"]["allowedSchemes"] == ["https", "http"]
    assert plan.actions["sh"]["successExitCodes"] == [0]
    assert plan.actions["sh"]["combinedOutputLimitBytes"] == 2_097_152
    assert set(plan.actions) == {"set", "sh", "sh2"}


def test_command_line_variables_win_over_task_variables(build: Build) -> None:
    spec = ACTIONS + "  vars: {a: 1, b: 2}\n  tasks: [{id: t, uses: action:set, vars: {b: 3, c: 4}}]\n"
    plan = build(spec, variables={"b": 9, "d": "${{ x }}"})
    assert plan.vars == {"a": 1, "b": 9, "d": "${{ x }}"}
    assert plan.tasks["t"].vars == {"c": 4}
    assert plan.workflow_digest != build(spec).workflow_digest
    with pytest.raises(DocumentError, match="reserved"):
        build(spec, variables={"matrix": 1})
    with pytest.raises(DocumentError, match="bound by foreach"):
        build(spec.replace("uses: action:set,", "uses: action:set, foreach: {items: [1], as: z},"), variables={"z": 1})


def test_inputs_are_merged_key_by_key_and_must_be_json(build: Build) -> None:
    assert merge_inputs({"a": {"x": 1}, "b": 2}, {"a": {"y": 1}}) == {"a": {"y": 1}, "b": 2}
    assert merge_inputs({"a": 1}, None) == {"a": 1}
    with pytest.raises(DocumentError, match="inputs: "):
        build(ACTIONS + "  tasks: [{id: t, uses: action:set}]\n", inputs={"x": float("nan")})


# ------------------------------------------------------------------------------------------- order


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """Needs of each declared task; acyclic by a hidden order that is not the declared one."""
    size = draw(st.integers(1, 12))
    hidden = draw(st.permutations(range(size)))
    needs: list[list[int]] = [[] for _ in range(size)]
    for place, task in enumerate(hidden):
        earlier = hidden[:place]
        if earlier:
            needs[task] = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True))
    return needs


def naive_order(needs: list[list[int]]) -> list[int]:
    """The rule of contract 2.2, word for word: a queue that is kept sorted by declaration."""
    left = [set(items) for items in needs]
    queue = [task for task, items in enumerate(left) if not items]
    order: list[int] = []
    while queue:
        task = queue.pop(0)
        order.append(task)
        for other, items in enumerate(left):
            if task in items:
                items.remove(task)
                if not items:
                    place = next((at for at, queued in enumerate(queue) if queued > other), len(queue))
                    queue.insert(place, other)
    return order


def tasks_text(needs: list[list[int]], extra: Callable[[int], str]) -> str:
    lines = [
        f"  - {{id: t{n}, needs: [{', '.join(f't{i}' for i in items)}], {extra(n)}}}\n" for n, items in enumerate(needs)
    ]
    return "  tasks:\n" + "".join(lines)


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_order_is_the_rule_of_the_contract(build: Build, needs: list[list[int]]) -> None:
    plan = build(ACTIONS + tasks_text(needs, lambda _: "uses: action:set"))
    assert plan.order == tuple(f"t{n}" for n in naive_order(needs))
    for task in plan.tasks.values():
        assert all(plan.tasks[need].position < task.position for need in task.needs)


# ------------------------------------------------------------------------------------------- memory


def test_memory_keys(build: Build) -> None:
    plan = build(
        ACTIONS + "  tasks:\n"
        "  - {id: w, uses: action:put, with: {key: k, value: '${{ memory.other.deep }}'}}\n"
        "  - {id: d, uses: action:put, memoryWrites: [b, a], with: {key: '${{ inputs.k }}'}}\n"
        "  - {id: g, uses: action:get, with: {key: k}}\n"
        "  - {id: all, uses: action:get, with: {key: '${{ inputs.k }}'}}\n"
        "  - {id: t, uses: action:set, when: memory.k, vars: {x: '${{ memory.z }}'},"
        " with: {y: 'a ${{ memory.y.q }}'}}\n"
        "  - {id: f, uses: action:set, foreach: {items: ['${{ memory.k }}']}}\n"
        "  - {id: n, uses: action:set}\n"
    )
    tasks = plan.tasks
    assert (tasks["w"].memory_writes, tasks["w"].memory_reads) == (("k",), ("k", "other"))
    assert (tasks["d"].memory_writes, tasks["d"].memory_reads) == (("b", "a"), ("a", "b"))
    assert (tasks["g"].memory_reads, tasks["all"].memory_reads) == (("k",), None)
    assert tasks["t"].memory_reads == ("k", "y", "z")
    assert tasks["n"].memory_reads == tasks["f"].memory_reads == ()
    child = next(task for task in tasks.values() if task.expansion)
    assert child.memory_reads == ("k",)
    assert [tasks[name].memory_after for name in ("w", "d", "g", "all", "t", "n")] == [(), (), (0,), (0, 1), (0,), ()]


_KINDS = st.sampled_from(["put", "get", "get all", "set", "template"])


@settings(max_examples=60, deadline=None)
@given(graphs(), st.lists(st.tuples(_KINDS, st.sampled_from("kmn")), min_size=12, max_size=12))
def test_memory_after_equals_brute_force(build: Build, needs: list[list[int]], uses: list[tuple[str, str]]) -> None:
    def extra(task: int) -> str:
        kind, key = uses[task]
        return {
            "put": f"uses: action:put, with: {{key: {key}}}",
            "get": f"uses: action:get, with: {{key: {key}}}",
            "get all": "uses: action:get, with: {key: '${{ inputs.x }}'}",
            "set": "uses: action:set",
            "template": f"uses: action:set, with: {{v: '${{{{ memory.{key} }}}}'}}",
        }[kind]

    plan = build(ACTIONS + tasks_text(needs, extra))
    ordered = [plan.tasks[name] for name in plan.order]
    for task in ordered:
        expected = set()
        for key in "kmn":
            touches = task.memory_reads is None or key in task.memory_reads or key in task.memory_writes
            writers = [other.position for other in ordered[: task.position] if key in other.memory_writes]
            if touches and writers:
                expected.add(writers[-1])
        expected -= {plan.tasks[need].position for need in task.needs}
        assert task.memory_after == tuple(sorted(expected))


@settings(max_examples=60, deadline=None)
@given(graphs(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_unordered_writers_of_a_key_are_found(build: Build, needs: list[list[int]], writes: list[bool]) -> None:
    def extra(task: int) -> str:
        return "uses: action:put, with: {key: k}" if writes[task] else "uses: action:set"

    above: dict[int, set[int]] = {}
    for task in naive_order(needs):
        above[task] = set(needs[task]).union(*(above[need] for need in needs[task]))
    writers = [task for task in range(len(needs)) if writes[task]]
    conflict = any(a not in above[b] and b not in above[a] for a in writers for b in writers if a != b)
    spec = ACTIONS + "  runtime: {maxConcurrency: %d}\n" + tasks_text(needs, extra)
    build(spec % 1)
    if conflict:
        with pytest.raises(DocumentError, match="both write the memory key 'k'"):
            build(spec % 2)
    else:
        build(spec % 2)


# ------------------------------------------------------------------------------------------- digests, JSON

FLOW = (
    HEAD
    + ACTIONS
    + """\
  vars: {one: 1, two: {x: 1, y: 2}}
  inputs: {q: 1, p: [1]}
  tasks:
  - {id: a, uses: action:set, vars: {m: 1, n: 2}, with: {s: {u: 1, v: 2}, t: 2}}
  - {id: m, uses: action:set, needs: [a], matrix: {axes: {x: [1, 2], y: [a, b]}}}
  - {id: e, uses: action:set, needs: [m], foreach: {items: [{k: 1, l: 2}]}}
"""
)
SHUFFLED = (
    HEAD
    + ACTIONS
    + """\
  tasks:
  - {with: {t: 2, s: {v: 2, u: 1}}, uses: action:set, vars: {n: 2, m: 1}, id: a}
  - {id: m, uses: action:set, needs: [a], matrix: {axes: {y: [a, b], x: [1, 2]}}}
  - {id: e, uses: action:set, foreach: {items: [{l: 2, k: 1}]}, needs: [m]}
  inputs: {p: [1], q: 1}
  vars: {two: {y: 2, x: 1}, one: 1}
"""
)


def test_reordered_maps_change_nothing(load: Any) -> None:
    one, two = compile_workflow(load(FLOW)), compile_workflow(load(SHUFFLED))
    assert one.workflow_digest == two.workflow_digest
    assert one.plan_digest == two.plan_digest
    assert one.order == two.order
    assert "".join(one.canonical_chunks()) == "".join(two.canonical_chunks())


def test_digests_see_every_change(load: Any) -> None:
    base = compile_workflow(load(FLOW))
    for old, new in [
        ("t: 2", "t: 2.0"),
        ("[1, 2]", "[2, 1]"),
        ("{k: 1, l: 2}", "{k: 1, l: null}"),
        ("one: 1", "one: 2"),
    ]:
        other = compile_workflow(load(FLOW.replace(old, new)))
        assert other.workflow_digest != base.workflow_digest
        assert other.plan_digest != base.plan_digest


def test_digests_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(FLOW)
    code = (
        "import sys, pathlib\n"
        "from agentctl.coordinator.definition import load_workflow\n"
        "from agentctl.coordinator.compiler import compile_workflow\n"
        "plan = compile_workflow(load_workflow(pathlib.Path(sys.argv[1])))\n"
        "print(plan.plan_digest, hash('x'), ''.join(plan.canonical_chunks()))\n"
    )
    seen = [
        subprocess.run(
            [sys.executable, "-c", code, str(path)], env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout.split(" ", 2)
        for seed in ("1", "2", "77")
    ]  # fmt: skip
    assert len({digest for digest, _, _ in seen}) == len({text for _, _, text in seen}) == 1
    assert len({number for _, number, _ in seen}) == 3


def test_plan_json_round_trip(load: Any) -> None:
    plan = compile_workflow(load(FLOW), inputs={"q": 2})
    data = json.loads("".join(plan.canonical_chunks()))
    assert data == plan.to_json()
    assert Plan.from_json(data) == plan
    assert list(Plan.from_json(data).tasks) == list(plan.order)
    with pytest.raises(IncompatibleVersion):
        Plan.from_json({**data, "formatVersion": 2})


def test_printed_plan_has_the_fields_of_the_contract(load: Any) -> None:
    printed = plan_as_json(compile_workflow(load(FLOW)))
    assert set(printed) == {
        "formatVersion", "workflowName", "workflowDigest", "planDigest", "order", "maxConcurrency", "tasks",
        "predictability", "requirements", "budget",
    }  # fmt: skip
    assert len(printed["planDigest"]) == len(printed["workflowDigest"]) == 64
    child = printed["tasks"][printed["order"][1]]
    assert child["uses"] == {"kind": "action", "name": "set"}
    assert child["expansion"]["parent"] == "m"
    assert {"id", "needs", "when", "vars", "input", "retry", "timeoutSeconds", "failure", "outputSchema",
            "predictability", "memoryReads", "memoryAfter", "actionKind"} <= set(child)  # fmt: skip


def test_loading_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "flow.yaml"
    path.write_text(FLOW)
    document = load_workflow(path)
    assert document.base_dir == tmp_path
    assert document.file == str(path)
    assert document.workflow["spec"]["runtime"]["maxConcurrency"] == 1
    as_json = tmp_path / "flow.json"
    as_json.write_text(json.dumps(document.source.value))
    assert compile_workflow(load_workflow(as_json)).plan_digest == compile_workflow(document).plan_digest


def test_editor_schema_accepts_what_the_models_accept() -> None:
    schema = document_schema()
    validator = jsonschema_rs.Draft202012Validator(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    value: Any = parse_document(FLOW.encode(), "f").value
    assert validator.is_valid(value)
    value["spec"]["tasks"][0]["wiht"] = {}
    assert not validator.is_valid(value)
    for name, part in {"": schema, **schema["$defs"]}.items():
        assert part["description"], f"{name} has no description"
        for field, rule in part.get("properties", {}).items():
            assert rule["description"], f"{name}.{field} has no description"
    for secret, good in (({"env": "A"}, True), ({}, False), ({"env": "A", "file": "b"}, False)):
        value["spec"]["tasks"][0].pop("wiht", None)
        value["spec"]["providers"] = {"p": {"kind": "fake", "credential": secret}}
        assert validator.is_valid(value) is good


# ------------------------------------------------------------------------------------------- robustness

_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["", "a", "${{ inputs.q }}", "${{ x", "action:set", "never"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "a", "kind", "env"]), inner),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_document_is_refused_with_a_place(load: Any, data: st.DataObject) -> None:
    value: Any = parse_document(FLOW.encode(), "f").value
    value["spec"]["runtime"] = {"maxConcurrency": 2}
    holder: Any = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 3)) == 0:
            break
        holder = inner
    holder[key] = data.draw(_ANY)
    if data.draw(st.booleans()) and isinstance(holder, dict):
        holder["extra"] = holder.pop(key)
    try:
        compile_workflow(load(json.dumps(value)))
    except DocumentError as error:
        assert all(item.line for item in error.diagnostics if "more findings" not in item.message)


def test_many_findings_stay_cheap(build: Build) -> None:
    tasks = "".join(f"  - {{id: task{n}, uses: action:set, needs: [tusk{n}]}}\n" for n in range(5000))
    start = time.thread_time()
    with pytest.raises(DocumentError, match="4900 more findings"):
        build(ACTIONS + "  tasks:\n" + tasks)
    assert time.thread_time() - start < 20


# ------------------------------------------------------------------------------------------- speed


def test_large_plans_compile_in_time(tmp_path: Path, build: Build) -> None:
    lines = "".join(
        f"  - {{id: t{n}, uses: action:set, needs: [t{n // 2}], with: {{v: '${{{{ inputs.x }}}} {n}'}}}}\n"
        for n in range(1, 10_000)
    )
    path = tmp_path / "flow.yaml"
    path.write_text(HEAD + ACTIONS + "  tasks:\n  - {id: t0, uses: action:set}\n" + lines)
    start = time.process_time()
    assert len(compile_workflow(load_workflow(path)).order) == 10_000
    plain = time.process_time() - start
    spec = ACTIONS + "  tasks: [{id: e, uses: action:set, foreach: {maxItems: 10000, items: '${{ inputs.xs }}'}}]\n"
    start = time.process_time()
    plan = build(spec, inputs={"xs": [f"file {n}" for n in range(10_000)]})
    children = time.process_time() - start
    data = json.loads("".join(plan.canonical_chunks()))
    start = time.process_time()
    Plan.from_json(data)
    # Time of this process: 1.1 s, 0.4 s and 0.1 s on a quiet machine. A busy one costs some more.
    assert (plain < 10, children < 10, time.process_time() - start < 5) == (True, True, True)


def test_a_compensation_is_compiled_with_its_task(build: Callable[..., Plan]) -> None:
    plan = build(
        ACTIONS
        + """  tasks:
    - id: each
      uses: action:sh
      foreach: {items: [a, b]}
      with: {args: ["${{ vars.item }}"]}
      compensate: {uses: action:sh, with: {args: ["${{ vars.item }}", "${{ tasks.last.output.output }}"]}}
    - {id: last, uses: action:set, needs: [each]}
"""
    )
    children = [task for task in plan.tasks.values() if task.expansion is not None]
    assert [task.compensate for task in children] == 2 * [
        {
            "uses": "sh",
            "actionKind": "builtin.shell.exec",
            "input": {"args": ["${{ vars.item }}", "${{ tasks.last.output.output }}"]},
            "retry": {"maxAttempts": 1, "backoffMs": 0, "backoffMultiplier": 1.0, "maxBackoffMs": 60000},
            "timeoutSeconds": 7,
        }
    ]
    assert all(task.compensate is None for task in plan.tasks.values() if task.expansion is None)
    assert Plan.from_json(json.loads("".join(plan.canonical_chunks()))) == plan
    assert plan.compensation == {"onFailure": "manual", "approval": "policy"}
