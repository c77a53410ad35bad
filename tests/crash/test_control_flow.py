"""A driver that dies amid routers, loops and calls: what it had decided stays, and the rest is decided once.

All of it is evaluated by drivers, so the points are theirs: before a commit, after it, before the end of the run. Each
driver may make few batches only; the next one begins from the database.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rows import rows
from support.site import Picture, Site

SET, ECHO = "action:set", "action:echo"


def workflow() -> dict[str, Any]:
    """A call with a fan-out, a router and a loop in it, and a router and a loop around it; some of it needs workers."""
    inner = {
        "version": "1.0.0",
        "inputs": {"names": []},
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object"},
        "outputs": {"ways": "${{ tasks.way.output.destinations }}", "said": "${{ tasks.loud.output }}"},
        "tasks": [
            {
                "id": "each",
                "uses": ECHO,
                "foreach": {"items": "${{ inputs.names }}"},
                "with": {"args": ["${{ vars.item }}"]},
            },
            {
                "id": "way",
                "uses": "router",
                "needs": ["each"],
                "route": {
                    "select": "${{ inputs.way }}",
                    "cases": [{"equals": "loud", "tasks": ["loud"]}],
                    "default": ["soft"],
                },
            },
            {
                "id": "loud",
                "uses": ECHO,
                "needs": ["way"],
                "loop": {"maxIterations": 3, "while": "${{ vars.loopIndex < 2 }}"},
                "with": {"args": ["${{ vars.loopIndex }}"]},
            },
            {"id": "soft", "uses": SET, "needs": ["way"]},
        ],
    }
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "control"},
        "spec": {
            "policy": {"approval": "never", "processAllowlist": ["echo"]},
            "runtime": {"maxConcurrency": 2},
            "actions": {
                "set": {"kind": "builtin.assign"},
                "echo": {"kind": "builtin.shell.exec", "command": "echo", "idempotency": "idempotent"},
            },
            "subworkflows": {"inner": inner},
            "tasks": [
                {"id": "first", "uses": "workflow:inner", "with": {"names": ["a", "b"], "way": "loud"}},
                {
                    "id": "again",
                    "uses": SET,
                    "needs": ["first"],
                    "loop": {"maxIterations": 2, "while": "${{ vars.loopIndex < 2 }}"},
                },
                {"id": "second", "uses": "workflow:inner", "needs": ["again"], "with": {"names": ["c"], "way": "soft"}},
                {"id": "never", "uses": SET, "needs": ["again"], "when": "${{ vars.flag }}", "vars": {"flag": False}},
            ],
        },
    }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path / "site") as started:
        yield started


def decisions(site: Site, run_id: str) -> list[tuple[Any, ...]]:
    """What was decided, in compiled order; digests of contexts included."""
    found = rows(site.store, "SELECT task_id, decision_json FROM tasks WHERE run_id = ? ORDER BY task_no", run_id)
    return [(task, None if text is None else json.loads(text)) for task, text in found]


@pytest.mark.parametrize("point", ["before_commit", "after_commit", "before_run_end"])
def test_a_driver_that_dies_again_and_again_changes_nothing(site: Site, point: str) -> None:
    file = site.write("flow.yaml", workflow())
    calm = site.ask("run", file, "--workers", "2")
    assert (calm.code, calm.data["state"]) == (0, "succeeded"), calm.err
    undisturbed: Picture = site.picture(calm.data["runId"])
    ways = calm.data["output"]["first"]["ways"], calm.data["output"]["second"]["ways"]
    assert ways == (["first--loud"], ["second--soft"])
    run_id = site.submit(file)
    deaths = 0
    # The n-th driver dies at its n-th batch, so that each of the early batches is once the last of a driver.
    for number in range(1, 5):
        fault = point if point == "before_run_end" else f"{point}:{number}"
        site.start("resume", run_id, "--workers", "2", fault=fault).wait()
        if site.run(run_id).state != "running":
            break
        deaths += 1
    assert deaths > 0
    last = site.ask("resume", run_id, "--workers", "2")
    assert last.code in (0, 4), last.err
    assert site.run(run_id).state == "succeeded"
    assert site.picture(run_id) == undisturbed
    assert decisions(site, run_id) == decisions(site, calm.data["runId"])
    site.assert_clean()
