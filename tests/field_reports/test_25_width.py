"""Report 25: fan-out or loop wider than anyone meant. Agents are in `test_25_models.py`.

https://github.com/coleam00/Archon/pull/2224 · https://github.com/agno-agi/agno/issues/8304
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.field import Field, bound
from support.scale import repeats


def matrix(field: Field, name: str, rows: int, columns: int, limit: int, rest: float = 0) -> str:
    """One tick for each place of a table."""
    task = field.tick_task(name, rest, idempotent=True)
    axes: dict[str, Any] = {"x": list(range(rows)), "y": list(range(columns))}
    task["matrix"] = {"axes": axes, "maxItems": limit}
    return field.workflow(name, [task], concurrency=64)


@pytest.mark.parametrize(("rows", "columns"), [(200, 200), (73, 137)], ids=["40000", "10001"])
def test_a_matrix_that_is_too_wide_is_refused_before_anything_is_spent(field: Field, rows: int, columns: int) -> None:
    file = matrix(field, "wide", rows, columns, 10_000)
    for verb in ("check", "plan", "run", "submit"):
        result = field.json(verb, file)
        assert (result.code, result.error["code"]) == (2, "usage")
        [found] = result.diagnostics
        assert f"{rows * columns} children are more than maxItems, which is 10000" in found["message"]
    assert not field.database.exists()
    assert field.lines() == []


def test_a_matrix_of_exactly_its_limit_is_compiled_and_done(field: Field) -> None:
    """Ten thousand at full scale."""
    side = max(10, round(100 * (repeats(100) / 100) ** 0.5))
    count = side * side
    began = time.monotonic()
    assert field.json("plan", matrix(field, "full", 100, 100, 10_000)).code == 0
    assert time.monotonic() - began < bound(10)
    pool = field.pool(8)
    result = field.json("run", matrix(field, "square", side, side, count), limit=3000)
    assert (result.code, result.data["state"]) == (0, "succeeded")
    assert len(field.lines()) == count
    assert len(result.data["output"]["square"]["items"]) == count
    field.check_clean_end(drained=[pool])


@pytest.mark.parametrize("inside", [False, True], ids=["top", "sub-workflow"])
def test_a_loop_whose_guard_stays_true_ends_after_its_limit(field: Field, inside: bool) -> None:
    """Exactly five iterations, then it fails closed: nothing after it starts."""
    loop = field.tick_task("again", idempotent=False)
    loop["loop"] = {"maxIterations": 5, "while": "${{ vars.loopIndex < 99 }}"}
    after = field.tick_task("after", idempotent=False, needs=["call" if inside else "again"])
    if inside:
        schema = {"inputSchema": True, "outputSchema": True}
        sub = {"version": "1.0.0", **schema, "tasks": [loop]}
        call = {"id": "call", "uses": "workflow:sub"}
        file = field.workflow("loop", [call, after], subworkflows={"sub": sub})
    else:
        file = field.workflow("loop", [loop, after])
    result = field.json("run", file)
    name = "call--again" if inside else "again"
    assert (result.code, result.data["state"], result.data["error"]["code"]) == (4, "failed", "loop_limit")
    assert result.data["error"]["taskId"] == name
    assert "5 iterations" in result.data["error"]["message"]
    assert field.labels() == ["again"] * 5
    tasks = field.tasks(result.data["runId"])
    iterations = [state for task, (state, _, _) in tasks.items() if task.startswith(f"{name}--")]
    assert iterations == ["succeeded"] * 5
    assert field.scalar("SELECT state FROM tasks WHERE task_id = 'after'") == "cancelled"
    field.check_clean_end()


def test_budgets_of_a_plan_are_checked_before_the_run(field: Field) -> None:
    """Tasks, children and iterations: equal is fine, one more is refused with count and limit."""
    loop = {"id": "l", "uses": "action:tick-i", "loop": {"maxIterations": 3, "while": "${{ vars.loopIndex < 1 }}"}}
    fan = {"id": "f", "uses": "action:tick-i", "foreach": {"items": [1, 2]}}
    counts = {"maxTasks": 7, "maxExpansionItems": 2, "maxLoopIterations": 3}
    file = field.workflow("equal", [loop, fan], runtime={"maxConcurrency": 1, "budgets": counts})
    assert field.json("check", file).code == 0
    for name, count in counts.items():
        less = {**counts, name: count - 1}
        result = field.json("run", field.workflow(name, [loop, fan], runtime={"budgets": less}))
        assert result.code == 2
        [found] = result.diagnostics
        assert str(count) in found["message"]
        assert f"{name} allows {count - 1}" in found["message"]
    assert not field.database.exists()
