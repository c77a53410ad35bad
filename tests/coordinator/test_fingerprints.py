"""Fingerprints of tasks: what changes them, and what must not (contract table, row 14; 4.6)."""

from __future__ import annotations

from typing import Any

import pytest
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.plan_index import PlanIndex
from agentctl.store.canonical import canonical, loads, value_digest

SPEC = """\
  inputs: {unused: 1}
  policy: {approval: never, processAllowlist: [sh, env], writableRoots: [out]}
  runtime: {maxConcurrency: 2}
  memory: {working: {k: 1}}
  actions:
    sh: {kind: builtin.shell.exec, command: sh}
    say: {kind: builtin.assign}
  tasks:
    - id: first
      uses: action:say
      with: {a: 1}
    - id: each
      uses: action:sh
      needs: [first]
      foreach: {items: [x, y]}
      with: {args: ["-c", "true", "sh", "${{ vars.item }}"]}
    - id: last
      uses: action:say
      needs: [each]
      outputSchema: {type: object}
"""


def fingerprints(plan: Plan) -> dict[str, tuple[str, str]]:
    index = PlanIndex(plan)
    return {task.id: index.fingerprints(task.position) for task in index.tasks}


def changed(build: Any, old: str, new: str) -> set[str]:
    """The tasks whose definition fingerprint changes with the document."""
    assert old in SPEC
    before, after = fingerprints(build(SPEC)), fingerprints(build(SPEC.replace(old, new, 1)))
    return {name.partition("--")[0] for name in before if before[name][0] != after.get(name, ("",))[0]}


def test_every_task_has_its_own_and_a_stored_plan_gives_the_same(build: Any) -> None:
    plan = build(SPEC)
    found = fingerprints(plan)
    assert len({definition for definition, _ in found.values()}) == 5
    assert fingerprints(Plan.from_json(loads(canonical(plan.to_json())))) == found
    assert {contract for _, contract in found.values()} == {value_digest({"type": "object"})}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("command: sh", "command: env", {"each"}),
        ('"true"', '"false"', {"each"}),
        ("items: [x, y]", "items: [x, z]", {"each"}),
        ("with: {a: 1}", "with: {a: 2}", {"first"}),
        ("outputSchema: {type: object}", "outputSchema: {type: object, minProperties: 1}", {"last"}),
        ("needs: [each]", "needs: [each, first]", {"last"}),
        # Neither policy, inputs, memory, concurrency nor a task that comes before change what a task is.
        ("writableRoots: [out]", "writableRoots: [out, more]", set()),
        ("unused: 1", "unused: 2", set()),
        ("k: 1", "k: 2", set()),
        ("maxConcurrency: 2", "maxConcurrency: 1", set()),
        ("  tasks:\n", "  tasks:\n    - {id: before, uses: 'action:say'}\n", set()),
    ],
)
def test_what_changes_a_definition(build: Any, old: str, new: str, expected: set[str]) -> None:
    assert changed(build, old, new) == expected


def test_what_changes_an_output_contract(build: Any) -> None:
    other = build(SPEC.replace("outputSchema: {type: object}", "outputSchema: {type: object, minProperties: 1}"))
    before, after = fingerprints(build(SPEC)), fingerprints(other)
    assert {name for name in before if before[name][1] != after[name][1]} == {"last"}
    assert after["last"][1] == value_digest({"type": "object", "minProperties": 1})
