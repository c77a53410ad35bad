"""The documents: the reference is what the code says, every page is in the navigation, no link leads nowhere."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.children import PATIENCE
from support.scale import time_factor

ROOT = Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"


def load(name: str) -> ModuleType:
    """A script of `ops/`, which is no package."""
    spec = importlib.util.spec_from_file_location(f"ops_{name}", OPS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(part: Any) -> Iterator[str]:
    """The pages of a navigation."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for inner in part.values():
            yield from leaves(inner)
    else:
        for inner in part:
            yield from leaves(inner)


# -- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_is_what_the_code_says() -> None:
    reference = load("reference")
    for name, page in reference.PAGES.items():
        written = (OPS / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert written == page(), f"{name} is stale: run `python ops/reference.py`"


def test_the_reference_is_complete() -> None:
    """Every verb and every code; counted here by another way than the pages are made."""
    from agentctl.cli.main import program
    from agentctl.coordinator.diagnostics import CODES

    reference = load("reference")
    verbs = reference.cli_page()
    for name in program.list_commands(None):  # type: ignore[arg-type]
        assert f"\n## {name}\n" in verbs
    assert "\n### effects reconcile\n" in verbs
    assert "| `--status` | `applied` `not-applied` `compensated`, required |" in verbs
    errors = reference.errors_page()
    for code in [
        *CODES,
        "worker_lost",
        "template_error",
        "process_timeout",
        "budget_exceeded",
        "not_found",
        "internal",
    ]:
        assert f"| `{code}` |" in errors
    fields = reference.document_page()
    for place in ("| `maxConcurrency` |", "| `idempotency` |", "## Foreach", "[SecretReference](#secretreference)"):
        assert place in fields


def test_a_change_of_the_code_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load("reference")
    shutil.copytree(OPS / "docs" / "reference", tmp_path / "reference")
    monkeypatch.setattr(reference, "FOLDER", tmp_path / "reference")
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0
    page = tmp_path / "reference" / "cli.md"
    page.write_text(page.read_text().replace("## bench", "## brench"))
    assert reference.main() == 1


# -- the site --------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation_once() -> None:
    hooks = load("site_hooks")
    pages = {path.relative_to(OPS / "docs").as_posix() for path in (OPS / "docs").rglob("*.md")}
    pages |= {name for name, path in hooks.FROM_ELSEWHERE.items() if path.exists()}
    found = Counter(leaves(hooks.navigation(pages)))
    assert found == Counter(pages)


def test_a_page_that_nobody_has_listed_is_found() -> None:
    hooks = load("site_hooks")
    made = hooks.navigation({"index.md", "something-new.md", "reference/cli.md"})
    assert {"How to": ["something-new.md"]} in made
    assert made[0] == "index.md"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (pip install -e '.[docs]'); .ci/run builds the site")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(OPS, tmp_path / "ops", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def build(repository: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-f",
            "ops/mkdocs.yml",
            "-d",
            str(repository / "site"),
        ],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE * time_factor(),
        check=False,
    )


def test_the_site_is_built_and_links_nowhere_that_is_not_there(repository: Path) -> None:
    done = build(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "tutorial", "reference/cli", "reference/glossary", "project/contributing"):
        assert (repository / "site" / f"{page}.html").is_file()
    text = (repository / "site" / "index.html").read_text(encoding="utf-8")
    assert "fonts.googleapis" not in text
    with (repository / "ops" / "docs" / "tutorial.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md) and [no part](index.md#nothing-like-that)\n")
    done = build(repository)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr and "nothing-like-that" in done.stderr
