"""Routers (contract 2.6): what is wrong with one before a run, and what it comes to in a run. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from agentctl.store.canonical import canonical

if TYPE_CHECKING:
    from .definition import Route
    from .diagnostics import Path


def route_problems(route: Route) -> Iterator[tuple[str, Path]]:
    """What is wrong with cases and destinations by themselves: message, and place below the route."""
    values: dict[str, int] = {}
    for index, case in enumerate(route.cases):
        text = canonical(case.equals)
        if values.setdefault(text, index) != index:
            yield f"the case {text[:80]} stands twice; the first is number {values[text]}", ("cases", index, "equals")
    seen: set[str] = set()
    for place, name in destinations(route):
        if name in seen:
            yield f"{name!r} is a destination already; a task belongs to one case", place
        seen.add(name)


def destinations(route: Route) -> Iterator[tuple[Path, str]]:
    """All destinations with their place below the route."""
    for index, case in enumerate(route.cases):
        for at, name in enumerate(case.tasks):
            yield ("cases", index, "tasks", at), name
    for at, name in enumerate(route.default):
        yield ("default", at), name


def route_as_json(route: Route) -> dict[str, Any]:
    """Cases and default as a plan keeps them."""
    return {
        "cases": [{"equals": case.equals, "tasks": list(case.tasks)} for case in route.cases],
        "default": list(route.default),
    }


def choose(route: dict[str, Any], selected: Any) -> dict[str, Any]:
    """The output of a router. Cases are compared by JSON identity; no case and no default chooses nothing."""
    text = canonical(selected)
    for case in route["cases"]:
        if canonical(case["equals"]) == text:
            return {"destinations": case["tasks"], "matched": True, "selected": selected}
    return {"destinations": route["default"], "matched": False, "selected": selected}


def not_selected(router: str, output: dict[str, Any]) -> dict[str, Any]:
    """The output of a task that a router has not chosen."""
    decision = {"matched": output["matched"], "router": router, "selected": output["selected"]}
    return {"reason": "route not selected", "route": decision}
