"""The widest plans that are allowed, and one more (contract table, row 4; field report 25)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.expansion import plan_matrix
from agentctl.coordinator.expressions import Scope
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.plan_size import task_size
from support.scale import time_factor

Build = Callable[..., Plan]
WIDEST = 100_000
SECONDS, BYTES = 20, 1 << 30
HEAD = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: wide}
spec:
  policy: {approval: never, processAllowlist: [echo]}
  actions: {say: {kind: builtin.shell.exec, command: echo, idempotency: idempotent}}
"""
HEAD += f"  vars: {{s: {list(range(100))}, t: {list(range(10))}}}\n"
SUB = """\
  subworkflows:
    sub:
      version: 1.0.0
      inputSchema: {type: object}
      outputSchema: {type: object}
      tasks:
        - id: each
          uses: action:say
          foreach: {items: "${{ inputs.items }}", maxItems: 100000}
          with: {args: ["${{ vars.item }}"]}
"""
TASKS = {
    "foreach": 'foreach: {items: "${{ inputs.items }}", maxItems: 100000}, with: {args: ["${{ vars.item }}"]}',
    "matrix": 'matrix: {maxItems: 100000, axes: {a: "${{ vars.s }}", b: "${{ vars.t }}", c: "${{ vars.s }}"}}',
}
CHILD = """
import json, pathlib, resource, sys, time
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.compiler import compile_workflow
inputs = json.loads(pathlib.Path("inputs.json").read_text())
began = time.process_time()
plan = compile_workflow(load_workflow(pathlib.Path("flow.yaml")), inputs=inputs)
size = sum(len(chunk) for chunk in plan.canonical_chunks())
seconds = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([len(plan.order), seconds, peak, size]))
"""


LONG = f"      with: {{text: '{'x' * 500_000}'}}\n"
FAT = {
    "matrix": "    - id: a\n      uses: action:set\n"
    f"      matrix: {{maxItems: 10000, axes: {{p: {list(range(100))}, q: {list(range(100))}}}}}\n{LONG}",
    "axis": "    - id: a\n      uses: action:set\n"
    f"      matrix: {{maxItems: 10000, axes: {{p: {list(range(5000))}, q: [{'x' * 500_000}, 1]}}}}\n",
    "loop": "    - id: a\n      uses: action:set\n"
    f'      loop: {{maxIterations: 1000, while: "${{{{ loop.output.more }}}}"}}\n{LONG}',
    "calls": "".join(f"    - {{id: c{number}, uses: workflow:sub}}\n" for number in range(1000)),
    "action": "    - id: a\n      uses: action:long\n"
    f"      matrix: {{maxItems: 10000, axes: {{p: {list(range(100))}, q: {list(range(100))}}}}}\n",
    "needs": "".join(f"    - {{id: t{number}, uses: action:set}}\n" for number in range(5000))
    + f"    - id: a\n      uses: action:set\n      needs: {[f't{number}' for number in range(5000)]}\n"
    f"      matrix: {{maxItems: 10000, axes: {{p: {list(range(100))}, q: {list(range(100))}}}}}\n",
}


@pytest.mark.parametrize("shape", FAT)
def test_a_plan_that_is_too_large_is_refused_before_it_is_made(load: Callable[[str], Any], shape: str) -> None:
    head = HEAD.partition("  policy")[0] + "  actions:\n    set: {kind: builtin.assign}\n"
    if shape == "action":
        head += f"    long: {{kind: builtin.assign, with: {{text: '{'x' * 500_000}'}}}}\n"
    if shape == "calls":
        head += "  subworkflows:\n    sub:\n      version: 1.0.0\n      inputSchema: {type: object}\n"
        head += "      outputSchema: {type: object}\n      tasks:\n    - id: a\n      uses: action:set\n".replace(
            "    - id: a\n      uses", "        - id: a\n          uses"
        ) + LONG.replace("      with", "          with")
    began = time.process_time()
    with pytest.raises(DocumentError) as caught:
        compile_workflow(load(f"{head}  tasks:\n{FAT[shape]}"))
    assert time.process_time() - began < 5 * time_factor()
    [finding] = caught.value.diagnostics
    assert finding.code == "schema_violation"
    assert re.search(r"the plan would have about \d+ MiB; at most 256 MiB are allowed", finding.message)
    assert finding.path is not None
    assert finding.path.startswith("spec.")


def test_the_size_of_a_plan_is_foreseen_well(load: Callable[[str], Any]) -> None:
    """The bound means what it says: what is counted before is what comes of it, to a few percent."""
    document = load(HEAD + "  tasks:\n    - {id: a, uses: action:say, " + TASKS["matrix"] + "}\n")
    [task] = document.model.spec.tasks
    scope = Scope(vars=document.model.spec.vars)
    foreseen = task_size(task, {}, {}, plan_matrix(task.matrix, scope))
    made = sum(len(chunk) for chunk in compile_workflow(document).canonical_chunks())
    assert 0.8 * made < foreseen < 1.2 * made


@pytest.mark.parametrize("shape", ["foreach", "matrix", "sub-workflow"])
def test_the_widest_plan_compiles_quickly_and_within_memory(tmp_path: Path, shape: str) -> None:
    """A hundred thousand children, from text to the text of the plan."""
    if shape == "sub-workflow":
        text = HEAD + SUB + '  tasks: [{id: call, uses: workflow:sub, with: {items: "${{ inputs.items }}"}}]\n'
    else:
        text = HEAD + f"  tasks: [{{id: each, uses: action:say, {TASKS[shape]}}}]\n"
    (tmp_path / "flow.yaml").write_text(text)
    inputs = {"items": [f"item {n}" for n in range(WIDEST)]}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=tmp_path, capture_output=True, text=True, check=True)
    count, seconds, peak, _ = json.loads(done.stdout)
    assert count == WIDEST + (3 if shape == "sub-workflow" else 1)
    assert seconds < SECONDS * time_factor()
    assert peak < BYTES


def test_one_more_is_refused_with_count_and_limit(build: Build) -> None:
    spec = HEAD.partition("spec:\n")[2]
    tasks = f"  tasks: [{{id: each, uses: action:say, {TASKS['foreach']}}}]\n"
    with pytest.raises(DocumentError, match=f"{WIDEST + 1} children are more than maxItems, which is {WIDEST}"):
        build(spec + tasks, inputs={"items": [0] * (WIDEST + 1)})
    with pytest.raises(DocumentError, match=f"{WIDEST + 1} children are more than maxItems, which is {WIDEST}"):
        build(
            spec + SUB + '  tasks: [{id: call, uses: workflow:sub, with: {items: "${{ inputs.items }}"}}]\n',
            inputs={"items": [0] * (WIDEST + 1)},
        )


def test_a_plan_of_many_calls_has_a_largest_size(build: Build) -> None:
    """Children inside of calls count as well: nobody nests more than a plan may hold."""
    spec = HEAD.partition("spec:\n")[2] + SUB + "  tasks:\n"
    call = '    - {id: c%d, uses: workflow:sub, with: {items: "${{ inputs.items }}"}}\n'

    def tasks(count: int) -> str:
        return "".join(call % number for number in range(count))

    inputs: dict[str, Any] = {"items": [0] * 49_997}
    assert len(build(spec + tasks(4), inputs=inputs).order) == 200_000
    with pytest.raises(DocumentError, match="200001 compiled tasks are more than 200000"):
        build(spec + tasks(4) + "    - {id: one, uses: action:say}\n", inputs=inputs)


def test_the_longest_loop(build: Build) -> None:
    """A thousand iterations are allowed; the model refuses one more with its limit."""
    spec = HEAD.partition("spec:\n")[2]
    loop = '  tasks: [{id: l, uses: action:say, loop: {maxIterations: %d, while: "${{ vars.loopIndex < 1 }}"}}]\n'
    plan = build(spec + loop % 1000)
    assert len(plan.order) == 1001
    assert plan.order[999].startswith("l--0999-")
    with pytest.raises(DocumentError, match="1000"):
        build(spec + loop % 1001)


def test_loops_that_come_to_too_much_are_refused_at_once(build: Build) -> None:
    """Five million iterations: told before any of them is computed."""
    loop = "    - {id: l%d, uses: action:say, loop: {maxIterations: 1000, while: '${{ vars.loopIndex < 1 }}'}}\n"
    spec = HEAD.partition("spec:\n")[2] + "  tasks:\n" + "".join(loop % number for number in range(5000))
    began = time.thread_time()
    with pytest.raises(DocumentError, match="5005000 compiled tasks are more than 200000"):
        build(spec)
    assert time.thread_time() - began < 5 * time_factor()
