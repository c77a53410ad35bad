"""The picture of a plan: nodes and edges, as Mermaid, as DOT, or as a tree for a terminal. Pure: no I/O.

The children of an expansion are drawn as one node with their number, unless all of them are asked for: a fan-out of
thousands is one thing to its author.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .plan import CompiledTask, Plan

_FILL = {
    "succeeded": "#c8e6c9",
    "failed": "#ffcdd2",
    "running": "#bbdefb",
    "skipped": "#eeeeee",
    "cancelled": "#ffe0b2",
    "waiting": "#e1bee7",
}
_WORST_FIRST = (
    "failed", "waiting_for_effect", "waiting_for_approval", "cancelled", "running", "retry_scheduled", "ready",
    "pending", "succeeded", "skipped",
)  # fmt: skip


@dataclass(slots=True)
class Node:
    """One task, or all children of an expansion with their aggregate.

    `states` counts by state (runs only): the children, or the one task; `own` is the state of the aggregate. `state` is
    the one that matters most of all these: a failure before a wait, a wait before work that is left.
    """

    id: str
    kind: str
    uses: str
    children: int = 0
    needs: list[str] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    own: str | None = None

    @property
    def state(self) -> str | None:
        return next((word for word in _WORST_FIRST if self.states[word] or self.own == word), None)

    def as_json(self) -> dict[str, Any]:
        """The object of the envelope."""
        return {
            "id": self.id,
            "kind": self.kind,
            "uses": self.uses,
            "children": self.children,
            "needs": self.needs,
            "state": self.state,
            "taskCounts": dict(sorted(self.states.items())),
        }


def build_graph(plan: Plan, states: Sequence[str] | None = None, *, expand: bool = False) -> list[Node]:
    """The nodes in compiled order. `states` are those of a run, by position; `expand` draws every child by itself."""
    nodes: dict[str, Node] = {}
    inside: dict[str, str] = {}
    for task in plan.tasks.values():
        parent = None if expand or task.expansion is None else task.expansion.parent
        name = parent or task.id
        inside[task.id] = name
        node = nodes.get(name)
        if node is None:
            node = nodes[name] = Node(name, task.uses_kind, _uses(task))
        if parent is not None:
            node.children += 1
            node.uses = _uses(task)
        else:
            node.kind = task.uses_kind
        if states is None:
            continue
        if parent is None and node.children:
            node.own = states[task.position]
        else:
            node.states[states[task.position]] += 1
    seen: set[tuple[str, str]] = set()
    for task in plan.tasks.values():
        name = inside[task.id]
        for need in task.needs:
            edge = (name, inside[need])
            if edge[0] != edge[1] and edge not in seen:
                seen.add(edge)
                nodes[name].needs.append(edge[1])
    return list(nodes.values())


def _uses(task: CompiledTask) -> str:
    """What a task uses, as its author has written it."""
    if task.uses_kind in ("action", "agent"):
        return f"{task.uses_kind}:{task.uses_name}"
    if task.uses_kind == "subworkflow_input":
        return f"inputs of {task.uses_name}"
    return f"workflow:{task.uses_name}" if task.uses_kind == "subworkflow_aggregate" else task.uses_name


def draw(nodes: Sequence[Node], form: str) -> str:
    """The text of a graph as `tree`, `mermaid` or `dot`, without a line break at the end."""
    return {"mermaid": _mermaid, "dot": _dot, "tree": _tree}[form](nodes)


def label(node: Node) -> str:
    """What stands on a node besides its id."""
    parts = [node.uses] if node.uses != node.id else []
    if node.children:
        parts.append(f"x{node.children}")
    if node.states and not node.children:
        parts.append(str(node.state))
    elif node.states:
        parts.append(", ".join(f"{node.states[word]} {word}" for word in _WORST_FIRST if node.states[word]))
        if node.own == "failed" and not node.states["failed"]:
            parts.append("the whole failed")
    return ", ".join(parts)


def _color(state: str | None) -> str | None:
    if state is None:
        return None
    return _FILL.get("waiting" if state.startswith("waiting") else state)


def _mermaid(nodes: Sequence[Node]) -> str:
    names = {node.id: f"n{index}" for index, node in enumerate(nodes)}
    lines = ["flowchart TD"]
    for node in nodes:
        text = _entities(node.id) + "<br/>" + _entities(label(node))
        lines.append(f'  {names[node.id]}["{text}"]')
    for node in nodes:
        lines.extend(f"  {names[need]} --> {names[node.id]}" for need in node.needs)
    for node in nodes:
        fill = _color(node.state)
        if fill is not None:
            lines.append(f"  style {names[node.id]} fill:{fill}")
    return "\n".join(lines)


def _entities(text: str) -> str:
    """Text for a Mermaid label: what could end the label or begin a tag is written as an entity."""
    return "".join(c if c.isalnum() or c in " -_.:,/@+=" else f"#{ord(c)};" for c in text)


def _dot(nodes: Sequence[Node]) -> str:
    lines = ["digraph workflow {", "  node [shape=box, style=filled, fillcolor=white];"]
    for node in nodes:
        fill = _color(node.state)
        extra = f', fillcolor="{fill}"' if fill is not None else ""
        lines.append(f"  {_quoted(node.id)} [label={_quoted(node.id, label(node))}{extra}];")
    for node in nodes:
        lines.extend(f"  {_quoted(need)} -> {_quoted(node.id)};" for need in node.needs)
    lines.append("}")
    return "\n".join(lines)


def _quoted(*lines: str) -> str:
    parts = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return '"' + "\\n".join(part.replace("\\", "\\\\").replace('"', '\\"') for part in parts) + '"'


def _tree(nodes: Sequence[Node]) -> str:
    """Each node once, below the last of its needs; further needs are named behind it."""
    order = {node.id: index for index, node in enumerate(nodes)}
    below: dict[str, list[Node]] = {}
    roots: list[Node] = []
    for node in nodes:
        if node.needs:
            below.setdefault(max(node.needs, key=order.__getitem__), []).append(node)
        else:
            roots.append(node)
    return "\n".join(_branches(roots, below, order))


def _branches(roots: list[Node], below: dict[str, list[Node]], order: dict[str, int]) -> Iterator[str]:
    # With a stack of its own: a chain may be longer than Python likes to recurse.
    pending = [(node, "", True, True) for node in reversed(roots)]
    while pending:
        node, lead, last, root = pending.pop()
        mark = "" if root else ("└─ " if last else "├─ ")
        main = max(node.needs, key=order.__getitem__) if node.needs else None
        others = [need for need in node.needs if need != main]
        text = label(node)
        also = f"  (also needs {', '.join(others[:5])}{' …' if len(others) > 5 else ''})" if others else ""
        yield f"{lead}{mark}{node.id}{'  ' + text if text else ''}{also}"
        inner = lead if root else lead + ("   " if last else "│  ")
        children = below.get(node.id, [])
        for child in reversed(children):
            pending.append((child, inner, child is children[-1], False))
