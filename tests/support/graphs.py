"""Random workflows, and what they have to come to: a plain interpreter that knows nothing of the scheduler.

The interpreter takes one task after the other in compiled order (contract 2.2) and does what the contract says about
its kind. There are no stop failures, budgets or cancels in these workflows, and every effect may be repeated.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

KEYS = ("red", "green", "blue")
FILES = ("a.txt", "b.txt")
SEED_TEXT = "seed"
INPUTS = {"yes": True, "no": False, "name": "Ada"}

ACTIONS: dict[str, dict[str, Any]] = {
    "assign": {"kind": "builtin.assign"},
    "assert": {"kind": "builtin.assert"},
    "recall": {"kind": "builtin.memory.read"},
    "remember": {"kind": "builtin.memory.write"},
    "read": {"kind": "builtin.read"},
    "write": {"kind": "builtin.write"},
    "echo": {"kind": "builtin.shell.exec", "command": "echo", "idempotency": "idempotent"},
}

ODDS = [*ACTIONS, "echo", "recall", "remember"]
"""What a random task does: all kinds, those that can overtake each other more often."""

SCALAR = {
    "assign": ("output", "n"),
    "assert": ("passed",),
    "recall": ("value",),
    "remember": ("after",),
    "read": ("content",),
    "write": ("path",),
    "echo": ("stdout",),
}
"""Where the output of each kind has a scalar, for tasks that read it."""


@dataclass(frozen=True)
class Source:
    """Where a value comes from: a constant, an input, a key of working memory, a task that is needed, the item."""

    kind: str
    value: Any

    def template(self, kinds: Mapping[str, str]) -> Any:
        if self.kind == "constant":
            return self.value
        if self.kind == "task":
            return "${{ tasks." + ".".join([self.value, "output", *SCALAR[kinds[self.value]]]) + " }}"
        return "${{ " + self.kind + "." + self.value + " }}"


@dataclass(frozen=True)
class Node:
    """One task as declared."""

    id: str
    action: str
    needs: tuple[str, ...] = ()
    when: tuple[Source, str, Any] | None = None
    """(what, `==` or `!=`, constant)"""
    items: tuple[Any, ...] | None = None
    with_: dict[str, Source] = field(default_factory=dict)
    continues: bool = False

    def document(self, kinds: Mapping[str, str]) -> dict[str, Any]:
        given = {name: source.template(kinds) for name, source in self.with_.items()}
        if self.action == "echo":
            given = {"args": [as_text(given["text"])]}
        task: dict[str, Any] = {"id": self.id, "uses": f"action:{self.action}", "with": given}
        if self.needs:
            task["needs"] = list(self.needs)
        if self.items is not None:
            task["foreach"] = {"items": list(self.items)}
        if self.when is not None:
            source, operator, constant = self.when
            inner = str(source.template(kinds)).removeprefix("${{ ").removesuffix(" }}")
            task["when"] = "${{ " + f"{inner} {operator} {json.dumps(constant)}" + " }}"
        if self.continues:
            task["failure"] = "continue"
        return task


def workflow(name: str, concurrency: int, **spec: Any) -> dict[str, Any]:
    """A document with the actions, inputs and memory of these tests, to be written as JSON."""
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {
            "inputs": INPUTS,
            "policy": {"approval": "never", "processAllowlist": ["echo"], "writableRoots": ["files"]},
            "runtime": {"maxConcurrency": concurrency, "maxDeliveries": 1000},
            "output": {"showDiff": False},
            "memory": {"working": dict.fromkeys(KEYS, 0)},
            "actions": ACTIONS,
            **spec,
        },
    }


@dataclass(frozen=True)
class Graph:
    """A workflow in the order of its declaration."""

    nodes: tuple[Node, ...]

    def document(self, concurrency: int) -> dict[str, Any]:
        """The workflow, to be written as JSON."""
        kinds = {node.id: node.action for node in self.nodes}
        return workflow("random", concurrency, tasks=[node.document(kinds) for node in self.nodes])


@dataclass
class Expected:
    """What a graph comes to."""

    state: str
    tasks: dict[str, tuple[str, Any]]
    """task id -> (state, output without what depends on digests)"""
    memory: dict[str, Any]
    files: dict[str, str]
    order: list[str]


# -- generation --------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn, most: int = 25) -> Graph:
    """Acyclic, with ordered writers of each key and each file, and declared in any order."""
    nodes: list[Node] = []
    last_writer: dict[str, str] = {}
    file_writer: dict[str, str] = {}
    file_readers: dict[str, list[str]] = {name: [] for name in FILES}
    constants = st.integers(0, 2).map(lambda n: Source("constant", n))
    size = draw(st.sampled_from([2, 4, 8, 12, 18, 25]))
    for number in range(min(size, most)):
        name = f"t{number}"
        action = draw(st.sampled_from(ODDS))
        needs = set(draw(st.sets(st.sampled_from([n.id for n in nodes]), max_size=2))) if nodes else set()
        continues = False
        items: tuple[Any, ...] | None = None
        if action in ("assign", "echo") and draw(st.integers(0, 3)) == 0:
            items = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
        sources = [constants, st.sampled_from(KEYS).map(lambda key: Source("memory", key))]
        readable = sorted(n.id for n in nodes if n.id in needs and n.items is None)
        if readable:
            sources.append(st.sampled_from(readable).map(lambda task: Source("task", task)))
        if items is not None:
            sources.append(st.just(Source("vars", "item")))
        value = st.one_of(sources)
        with_: dict[str, Source] = {}
        if action == "assign":
            with_ = {"n": draw(value)}
        elif action == "echo":
            with_ = {"text": draw(value)}
        elif action == "assert":
            continues = draw(st.integers(0, 7)) == 0
            with_ = {"that": Source("constant", False) if continues else Source("inputs", "yes")}
        elif action == "recall":
            with_ = {"key": Source("constant", draw(st.sampled_from(KEYS)))}
        elif action == "remember":
            key = draw(st.sampled_from(KEYS))
            with_ = {"key": Source("constant", key), "value": draw(value)}
            needs |= {last_writer[key]} if key in last_writer else set()
            last_writer[key] = name
        elif action == "read":
            file = draw(st.sampled_from(FILES))
            with_ = {"path": Source("constant", f"files/{file}")}
            needs |= {file_writer[file]} if file in file_writer else set()
            file_readers[file].append(name)
        else:
            file = draw(st.sampled_from(FILES))
            text = draw(st.sampled_from([SEED_TEXT, "one", "two"]))
            with_ = {"path": Source("constant", f"files/{file}"), "content": Source("constant", text)}
            needs |= {file_writer[file]} if file in file_writer else set()
            needs |= set(file_readers[file])
            file_writer[file], file_readers[file] = name, []
        when = None
        if draw(st.integers(0, 7)) == 0:
            what = draw(st.one_of(*sources[1:], st.sampled_from(["yes", "no"]).map(lambda n: Source("inputs", n))))
            constant = draw(st.sampled_from([0, 1, 2, True, "one"]))
            when = (what, draw(st.sampled_from(["==", "!="])), constant)
        nodes.append(Node(name, action, tuple(sorted(needs)), when, items, with_, continues))
    return Graph(tuple(draw(st.permutations(nodes))))


# -- interpretation ----------------------------------------------------------------------------------------------------


def child_id(parent: str, index: int, item: Any) -> str:
    """The id of a child (contract 2.3)."""
    text = json.dumps({"item": item, "foreachIndex": index}, sort_keys=True, separators=(",", ":"))
    return f"{parent}--{index:04d}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class _Step:
    """One compiled task: a node itself, a child of it, or the aggregate of its children."""

    id: str
    node: Node
    needs: tuple[str, ...]
    role: str
    item: Any = None


def _steps(graph: Graph) -> list[_Step]:
    declared: list[_Step] = []
    for node in graph.nodes:
        if node.items is None:
            declared.append(_Step(node.id, node, node.needs, "task"))
            continue
        names = [child_id(node.id, index, item) for index, item in enumerate(node.items)]
        declared += [_Step(n, node, node.needs, "child", item) for n, item in zip(names, node.items, strict=True)]
        declared.append(_Step(node.id, node, tuple(names), "aggregate"))
    place = {step.id: i for i, step in enumerate(declared)}
    missing = [len(set(step.needs)) for step in declared]
    ready = [i for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order: list[_Step] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(declared[i])
        for j, step in enumerate(declared):
            if declared[i].id in step.needs:
                missing[j] -= 1
                if missing[j] == 0:
                    heapq.heappush(ready, j)
    assert len(order) == len(place)
    return order


def identical(left: Any, right: Any) -> bool:
    """Equality as JSON: 1 and true differ."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def as_text(value: Any) -> str:
    """How a scalar stands on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def interpret(graph: Graph) -> Expected:
    """Do all tasks one by one."""
    kinds = {node.id: node.action for node in graph.nodes}
    memory: dict[str, Any] = dict.fromkeys(KEYS, 0)
    files = dict.fromkeys((f"files/{name}" for name in FILES), SEED_TEXT)
    tasks: dict[str, tuple[str, Any]] = {}
    errors: dict[str, str] = {}
    steps = _steps(graph)

    def resolve(source: Source, item: Any) -> Any:
        if source.kind == "constant":
            return source.value
        if source.kind == "inputs":
            return INPUTS[source.value]
        if source.kind == "memory":
            return memory[source.value]
        if source.kind == "vars":
            return item
        value = tasks[source.value][1]
        for part in SCALAR[kinds[source.value]]:
            value = value[part]
        return value

    for step in steps:
        node = step.node
        if step.role == "aggregate":
            items = [
                {"error": errors.get(n), "index": i, "output": tasks[n][1], "state": tasks[n][0], "taskId": n}
                for i, n in enumerate(step.needs)
            ]
            tasks[step.id] = ("succeeded", {"items": items})
            continue
        if any(tasks[need][0] != "succeeded" for need in step.needs):
            tasks[step.id] = ("skipped", None)
            errors[step.id] = "a dependency did not succeed"
            continue
        if node.when is not None:
            source, operator, constant = node.when
            if identical(resolve(source, step.item), constant) != (operator == "=="):
                tasks[step.id] = ("skipped", {"reason": "when condition was false"})
                continue
        given = {name: resolve(source, step.item) for name, source in node.with_.items()}
        if node.action == "assert" and given["that"] is False:
            tasks[step.id] = ("failed", None)
            errors[step.id] = "assertion failed"
            continue
        tasks[step.id] = ("succeeded", perform(node.action, given, memory, files))
    failed = any(state == "failed" for state, _ in tasks.values())
    return Expected("failed" if failed else "succeeded", tasks, memory, files, [step.id for step in steps])


def perform(action: str, given: dict[str, Any], memory: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """The output of a task that succeeds (contract 3), and what it does to memory and files."""
    still = {"status": "unchanged", "changed": False}
    if action == "assign":
        rest = {"before": None, "diff": None, "predictability": "fully_predictable"}
        return {**still, **rest, "after": given, "output": given}
    if action == "assert":
        return {**still, "passed": True}
    if action == "recall":
        return {**still, "value": memory[given["key"]]}
    if action == "read":
        return {**still, "content": files[given["path"]]}
    if action == "echo":
        text = as_text(given["text"]) + "\n"
        return {"status": "changed", "changed": True, "exitCode": 0, "stdout": text, "stderr": ""}
    if action == "remember":
        before, after = memory.get(given["key"]), given["value"]
        memory[given["key"]] = after
        changed = not identical(before, after)
        return {
            "status": "changed" if changed else "unchanged",
            "changed": changed,
            "before": before,
            "after": after,
            "key": given["key"],
        }
    path, content = given["path"], given["content"]
    before = files[path]
    files[path] = content
    return {
        "status": "changed" if before != content else "unchanged",
        "changed": before != content,
        "before": before,
        "after": content,
        "diff": None,
        "path": path,
        "predictability": "fully_predictable",
    }


def plain(output: Any) -> Any:
    """An output without the record of its guard, which holds digests."""
    if isinstance(output, dict):
        return {
            key: plain(value) for key, value in output.items() if not (key == "condition" and isinstance(value, dict))
        }
    if isinstance(output, list):
        return [plain(item) for item in output]
    return output


def perform_claim(graph_input: Mapping[str, Any], files: dict[str, str]) -> dict[str, Any]:
    """What a worker would answer to the input of an attempt."""
    action = str(graph_input["action"])
    given = dict(graph_input["input"])
    if action == "echo":
        given = {"text": given["args"][0]}
    return perform(action, given, dict(graph_input.get("memory", {})), files)
