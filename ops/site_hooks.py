"""What the site does beside the pages of `ops/docs/`: it makes the navigation and takes in pages from elsewhere.

A page that nobody has put into a part of the navigation is found all the same, under its title in `How to`, so a new
page needs no change here. Called by mkdocs (`hooks` in mkdocs.yml).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

OPS = Path(__file__).resolve().parent
DOCS = OPS / "docs"

PARTS: dict[str, tuple[str, ...]] = {
    "": ("index.md", "tutorial.md"),
    "Write workflows": (
        "authoring.md",
        "variables.md",
        "conditions.md",
        "routers.md",
        "loops.md",
        "sub-workflows.md",
        "fan-out.md",
        "memory.md",
        "artifacts.md",
        "check-mode.md",
    ),
    "Agents and tools": (
        "agents.md",
        "tools.md",
        "budgets.md",
        "providers.md",
        "secrets.md",
        "network.md",
        "mcp.md",
        "a2a.md",
        "extensions.md",
    ),
    "When something goes wrong": (
        "uncertain-effects.md",
        "recovery.md",
        "replay.md",
        "compensation.md",
    ),
    "In service": (
        "operations.md",
        "systemd.md",
        "monitoring.md",
        "runbook.md",
        "backup-and-retention.md",
        "measuring.md",
    ),
    "How to": (),  # whatever is in no other part
    "What holds": ("guarantees.md", "field-reports.md", "comparison.md"),
    "Reference": ("reference/",),
}
"""Part -> pages in their order, those that exist. A name that ends in `/` is a whole folder."""

FROM_ELSEWHERE: dict[str, Path] = {
    "reference/glossary.md": OPS / "glossary.md",
    "project/contributing.md": OPS.parent / "CONTRIBUTING.md",
    "project/changelog.md": OPS.parent / "CHANGELOG.md",
    "project/benchmark.md": OPS / "bench" / "RESULTS.md",
    "project/load-tests.md": OPS / "loadtest" / "RESULTS.md",
    **{f"project/decisions/{path.name}": path for path in sorted((OPS / "decisions").glob("*.md"))},
}
"""Pages of the site that are kept at another place of the repository."""


def navigation(pages: set[str]) -> list[Any]:
    """The navigation over these pages: each of them exactly once."""
    named = {name for names in PARTS.values() for name in names}
    folders = tuple(name for name in named if name.endswith("/"))
    rest = sorted(page for page in pages if page not in named and not page.startswith((*folders, "project/")))
    made: list[Any] = []
    for title, names in PARTS.items():
        found: list[str] = []
        for name in names:
            found += sorted(page for page in pages if page.startswith(name)) if name.endswith("/") else [name]
        found = [page for page in found if page in pages] + (rest if title == "How to" else [])
        if not title:
            made += found
        elif found:
            made.append({title: found})
    project = sorted(page for page in pages if page.startswith("project/") and "/decisions/" not in page)
    decisions = sorted((page for page in pages if page.startswith("project/decisions/")), reverse=True)
    made.append({"Project": [*project, {"Decisions": decisions}]})
    return made


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give mkdocs the navigation before it looks for one."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    config.nav = navigation(pages | {name for name, path in FROM_ELSEWHERE.items() if path.exists()})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Take in what is kept elsewhere."""
    from mkdocs.structure.files import File

    for name, path in FROM_ELSEWHERE.items():
        if path.exists():
            files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files
