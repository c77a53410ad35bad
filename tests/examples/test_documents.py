"""The workflows that stand in the pages of `ops/docs/` are real: they compile, and come to their end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from support.clock import ManualClock
from support.control import Bench, Outcome, bench
from support.site import Site

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "ops" / "docs"
PAGES = [
    *("conditions", "routers", "loops", "sub-workflows", "fan-out", "recovery"),
    *("agents", "tools", "budgets", "providers", "secrets", "network"),
]
LINKED = [*PAGES, "extensions", "mcp", "a2a"]


@pytest.fixture
def table(tmp_path: Path, clock: ManualClock) -> Iterator[Bench]:
    yield from bench(tmp_path, clock)


def workflow_of(page: str) -> str:
    """The `spec` of the workflow of a page."""
    [block] = re.findall(r"^```yaml\n(apiVersion: .*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    return block.partition("spec:\n")[2]


def states(done: Outcome) -> dict[str, str]:
    return {name: state for name, state in done.states().items() if "--" not in name}


def test_conditions(table: Bench) -> None:
    done = table.run(workflow_of("conditions"))
    assert states(done) == {"test": "succeeded", "deploy": "succeeded", "spread": "skipped", "announce": "skipped"}
    assert set(done.tasks["spread"].output["condition"]) == {"expression", "result", "contextDigest"}


def test_routers(table: Bench) -> None:
    done = table.run(workflow_of("routers"))
    assert done.tasks["way"].output == {"selected": True, "matched": True, "destinations": ["review"]}
    assert done.tasks["accept"].output == {
        "reason": "route not selected",
        "route": {"router": "way", "selected": True, "matched": True},
    }
    assert table.run(workflow_of("routers"), {"total": 7}).tasks["accept"].state == "succeeded"


def test_loops(table: Bench) -> None:
    done = table.run(workflow_of("loops"))
    assert (done.state, done.tasks["refine"].output["iterations"]) == ("succeeded", 2)


def test_sub_workflows(table: Bench) -> None:
    done = table.run(workflow_of("sub-workflows"))
    assert (done.state, done.output) == ("succeeded", {"letters": ["Dear Ann", "Hello Bob"]})


def test_fan_out(table: Bench) -> None:
    done = table.run(workflow_of("fan-out"))
    assert (done.state, len(done.tasks["build"].output["items"])) == ("succeeded", 4)


def test_providers(tmp_path: Path) -> None:
    file = tmp_path / "providers.yaml"
    [block] = re.findall(r"^```yaml\n(apiVersion: .*?)^```", (DOCS / "providers.md").read_text(), re.M | re.S)
    file.write_text(block)
    assert compile_workflow(load_workflow(file)).requirements["providers"] == ["local"]


@pytest.mark.parametrize("page", ["agents", "budgets"])
def test_pages_about_models(tmp_path: Path, page: str) -> None:
    """These need a worker, so the real program runs them."""
    spec = workflow_of(page)
    with Site(tmp_path / "site") as site:
        file = tmp_path / "flow.yaml"
        file.write_text(f"apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {{name: {page}}}\nspec:\n{spec}")
        answer = site.ask("run", file)
        assert answer.code == 0, answer.err
        said = {"agents": {"said": "fake: Say hello to Ada."}, "budgets": None}[page]
        assert said is None or answer.data["output"] == said
        site.assert_clean()


@pytest.mark.parametrize("page", LINKED)
def test_pages_point_to_what_is_there(page: str) -> None:
    """Links, files and the table of contents in the README."""
    text = (DOCS / f"{page}.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (DOCS / target.partition("#")[0]).is_file(), target  # places within a page are looked at by the site
    for file in re.findall(r"ops/examples/[a-z-]+\.yaml", text):
        assert (ROOT / file).is_file(), file
    assert f"ops/docs/{page}.md" in (ROOT / "README.md").read_text()
