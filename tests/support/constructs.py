"""Random workflows with nested constructs, and what they have to come to: an interpreter that reads the document.

Routers, loops, foreach, matrix, conditions and sub-workflows stand in one another in all ways that are allowed. The
interpreter knows nothing of the compiler: it lists the tasks under the names that the contract gives them (2.3, 2.7),
puts them in order (2.2), and does one after the other, looking names up in the call that a task belongs to. Nothing
stops the run: every task says `failure: continue`.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from support.graphs import FILES, SEED_TEXT, Expected, as_text, identical, perform, workflow

KEYS = ("red", "green")
INPUTS = {"yes": True, "no": False, "n": 2, "name": "Ada", "items": [1, "two"]}
MOST_TASKS = 500
NOT_DONE = "a dependency did not succeed"


class Undefined(Exception):
    """A path that leads nowhere."""


# -- generation --------------------------------------------------------------------------------------------------------


class _Author:
    """Writes one document. Chance decides."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.definitions: dict[str, dict[str, Any]] = {}

    def document(self) -> dict[str, Any]:
        for number in reversed(range(self.chance.choice([0, 1, 2, 3]))):
            self.definitions[f"s{number}"] = self.definition(number)
        tasks = self.tasks(self.chance.choice([2, 4, 8, 14, 40, 100]), list(self.definitions))
        return {"subworkflows": self.definitions, "tasks": tasks}

    def definition(self, number: int) -> dict[str, Any]:
        callable_ = [name for name in self.definitions if name > f"s{number}"]
        tasks = self.tasks(self.chance.choice([1, 2, 4, 6]), callable_)
        outputs = {"seen": "${{ inputs.n }}"}
        for task in self.chance.sample(tasks, min(2, len(tasks))):
            outputs[task["id"]] = "${{ tasks." + task["id"] + ".output }}"
        if self.chance.random() < 0.3:
            outputs["kept"] = "${{ memory." + self.chance.choice(KEYS) + " }}"
        strict = {"type": "object", "properties": {"n": {"type": ["integer", "string"]}}}
        return {
            "version": f"{number}.0.0",
            "inputs": {"n": self.chance.choice([0, 1, 2]), "yes": True, "no": False, "name": "Eve", "items": [3]},
            "inputSchema": strict,
            "outputs": outputs,
            "outputSchema": {"type": "object"},
            "tasks": tasks,
        }

    def tasks(self, count: int, callable_: list[str]) -> list[dict[str, Any]]:
        """Tasks of one group, declared in any order."""
        made: list[dict[str, Any]] = []
        writer: dict[str, str] = {}
        while len(made) < count:
            name = f"t{len(made)}"
            needs = set(
                self.chance.sample([task["id"] for task in made], min(len(made), self.chance.choice([0, 1, 2])))
            )
            shape = self.chance.choice(["plain", "plain", "foreach", "matrix", "loop", "router", "call"])
            if shape == "call" and not callable_:
                shape = "plain"
            if shape == "router":
                made += self.router(name, needs, made)
                continue
            made.append(self.task(name, shape, needs, made, writer, callable_))
        self.chance.shuffle(made)
        return made

    def router(self, name: str, needs: set[str], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A router and tasks for it to choose from, each of any simple shape."""
        number = len(made) + 1
        chosen = [f"t{number + at}" for at in range(self.chance.choice([1, 2, 3]))]
        values = self.chance.sample([0, 1, 2, True, "Ada", None], len(chosen))
        cases = [{"equals": value, "tasks": [task]} for value, task in zip(values, chosen, strict=True)]
        route: dict[str, Any] = {"select": self.value(needs, made, []), "cases": cases}
        if "${{" not in str(route["select"]):
            route["select"] = "${{ inputs.n }}"
        if len(cases) > 1 and self.chance.random() < 0.5:
            route["default"] = cases.pop()["tasks"]
        router = {"id": name, "uses": "router", "needs": sorted(needs), "route": route, "failure": "continue"}
        shapes = ["plain", "foreach", "loop"]
        made = [*made, router]
        branches = [self.task(task, self.chance.choice(shapes), {name}, made, {}, [], effects=False) for task in chosen]
        return [router, *branches]

    def task(
        self,
        name: str,
        shape: str,
        needs: set[str],
        made: list[dict[str, Any]],
        writer: dict[str, str],
        callable_: list[str],
        *,
        effects: bool = True,
    ) -> dict[str, Any]:
        task: dict[str, Any] = {"id": name, "failure": "continue"}
        if shape == "call":
            task["uses"] = "workflow:" + self.chance.choice(callable_)
            given = self.chance.sample(["n", "name"], self.chance.choice([0, 1, 2]))
            task["with"] = {key: self.value(needs, made, []) for key in given}
            if self.chance.random() < 0.5:
                task["with"]["items"] = self.chance.choice([[], [0, "x"], "${{ inputs.items }}"])
            return {**task, "needs": sorted(needs)}
        seen: list[str] = []
        if shape == "foreach":
            items = [self.chance.choice([0, 1, "a"]) for _ in range(self.chance.choice([0, 1, 3, 9]))]
            task["foreach"] = {"items": self.chance.choice([items, "${{ inputs.items }}"])}
            seen = ["vars.item", "vars.foreachIndex"]
        elif shape == "matrix":
            task["matrix"] = {"axes": {"y": [0, 1], "x": self.chance.choice([["p"], "${{ inputs.items }}"])}}
            seen = ["vars.matrix.x", "vars.matrixIndex"]
        elif shape == "loop":
            task["loop"] = self.loop()
            seen = ["vars.loopIndex", "vars.loopPrevious.n"]
        kinds = ["assign", "assign", "assert", "recall"]
        if effects:
            kinds += ["echo", "echo", "remember"] if shape in ("plain", "loop") else ["echo"]
        action = self.chance.choice(kinds)
        task["uses"] = f"action:{action}"
        if action == "assign":
            task["with"] = {"n": self.value(needs, made, seen), "m": self.value(needs, made, seen)}
        elif action == "echo":
            task["with"] = {"args": [self.text(needs, made, seen)]}
        elif action == "assert":
            task["with"] = {
                "that": self.chance.choice(
                    [True, True, True, "${{ inputs.yes }}", "${{ inputs.yes }}", "${{ inputs.no }}"]
                )
            }
        else:
            key = self.chance.choice(KEYS)
            task["with"] = {"key": key}
            if action == "remember":
                task["with"]["value"] = self.value(needs, made, seen)
                needs = needs | ({writer[key]} if key in writer else set())
                writer[key] = name
        if shape != "loop" and self.chance.random() < 0.2:
            task["when"] = self.condition(needs, made, seen)
        return {**task, "needs": sorted(needs)}

    def loop(self) -> dict[str, Any]:
        most = self.chance.choice([1, 2, 4])
        guards = ["vars.loopIndex < 2", "vars.loopIndex < 2", "not inputs.yes", "inputs.n != 1", "loop.output.changed"]
        guards += ["memory.red != 1", "memory.green == 0"]
        initial = {"n": self.chance.choice([7, "${{ inputs.n }}"]), "changed": True}
        return {"maxIterations": most, "while": "${{ " + self.chance.choice(guards) + " }}", "initial": initial}

    def paths(self, needs: set[str], made: list[dict[str, Any]], seen: list[str]) -> list[str]:
        """What can be read here. Some of it may not be there when it is looked for."""
        found = ["inputs.n", "inputs.name", f"memory.{self.chance.choice(KEYS)}", *seen]
        for task in made:
            if task["id"] not in needs:
                continue
            read = f"tasks.{task['id']}.output"
            if task["uses"].startswith("workflow:"):
                found.append(f"{read}.seen")
            elif task["uses"] == "router":
                found.append(f"{read}.matched")
            elif "loop" in task:
                found.append(f"{read}.iterations")
            elif task["uses"] == "action:assign" and not {"foreach", "matrix"} & set(task):
                found.append(f"{read}.output.n")
        return found

    def value(self, needs: set[str], made: list[dict[str, Any]], seen: list[str]) -> Any:
        if self.chance.random() < 0.3:
            return self.chance.choice([0, 1, 2, "inputs.n is only text"])
        return "${{ " + self.chance.choice(self.paths(needs, made, seen)) + " }}"

    def text(self, needs: set[str], made: list[dict[str, Any]], seen: list[str]) -> str:
        return f"x {self.value(needs, made, seen)}"

    def condition(self, needs: set[str], made: list[dict[str, Any]], seen: list[str]) -> str:
        path = self.chance.choice(self.paths(needs, made, seen))
        plain = self.chance.choice([f"not {path}", path, f"{path} == 2", f"{path} != 1"])
        return plain if self.chance.random() < 0.5 else "${{ " + plain + " }}"


@dataclass(frozen=True)
class Program:
    """A document with nested constructs. `nodes` are its compiled tasks."""

    spec: dict[str, Any]
    nodes: tuple[str, ...]

    def document(self, concurrency: int) -> dict[str, Any]:
        """The workflow, to be written as JSON."""
        memory = {"working": dict.fromkeys(KEYS, 0)}
        return workflow("nested", concurrency, inputs=INPUTS, memory=memory, **self.spec)


def write_program(seed: int, most: int = MOST_TASKS) -> Program:
    """The document of a seed, with at most so many compiled tasks."""
    chance = random.Random(seed)
    while True:
        spec = _Author(chance).document()
        steps = _ordered(list(_steps(spec, spec["tasks"], None)))
        if len(steps) <= most:
            return Program(spec, tuple(step.id for step in steps))


def programs(most: int = MOST_TASKS) -> st.SearchStrategy[Program]:
    """Documents by their seeds."""
    return st.integers(0, 2**32).map(lambda seed: write_program(seed, most))


# -- the list of tasks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The call that a task belongs to."""

    id: str
    boundary: str

    @property
    def prefix(self) -> str:
        return self.id.replace("-", "_") + "__"


@dataclass
class _Step:
    id: str
    role: str
    task: dict[str, Any]
    needs: list[str]
    call: _Call | None
    vars: dict[str, Any] = field(default_factory=dict)
    when: str | None = None
    previous: str | None = None
    """The iteration whose output is `loopPrevious`."""
    guards: list[tuple[str, str]] = field(default_factory=list)
    """(router, destination)"""


def _digits(bindings: Any, count: int) -> str:
    text = json.dumps(bindings, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:count]


def _full(call: _Call | None, name: str) -> str:
    return name if call is None else f"{call.id}--{name}"


def _steps(spec: dict[str, Any], tasks: list[dict[str, Any]], call: _Call | None) -> Iterator[_Step]:
    """The compiled tasks of a group, in declaration order."""
    guards: dict[str, list[tuple[str, str]]] = {}
    for task in tasks:
        route = task.get("route", {})
        for case in [*route.get("cases", []), {"tasks": route.get("default", [])}]:
            for name in case["tasks"]:
                guards.setdefault(name, []).append((_full(call, task["id"]), _full(call, name)))
    for task in tasks:
        name = _full(call, task["id"])
        needs = [_full(call, need) for need in task["needs"]] + ([] if call is None else [call.boundary])
        own = guards.get(task["id"], [])
        for step in _steps_of(spec, task, name, needs, call):
            if not step.guards and (step.call is call or step.role == "output"):
                step.guards = own if step.role != "output" or step.id == name else []
            yield step


def _steps_of(
    spec: dict[str, Any], task: dict[str, Any], name: str, needs: list[str], call: _Call | None
) -> Iterator[_Step]:
    if task["uses"].startswith("workflow:"):
        workflow = task["uses"].removeprefix("workflow:")
        definition = spec["subworkflows"][workflow]
        mark = hashlib.sha256(f"{workflow}@{definition['version']}".encode()).hexdigest()[:8]
        inner = _Call(name, f"{name}--inputs-{mark}")
        given = {"with": {**definition["inputs"], **task["with"]}, "schema": definition["inputSchema"]}
        yield _Step(inner.boundary, "input", given, needs, call)
        yield from _steps(spec, definition["tasks"], inner)
        children = [f"{name}--{local['id']}" for local in definition["tasks"]]
        yield _Step(name, "output", {"with": definition["outputs"]}, [*children, inner.boundary], inner)
    elif "foreach" in task or "matrix" in task:
        children = []
        for index, bound in enumerate(_bound(spec, task, call)):
            children.append(f"{name}--{index:04d}-{_digits(bound, 12)}")
            yield _Step(children[-1], "task", task, needs, call, bound, task.get("when"))
        yield _Step(name, "aggregate", task, children, call)
    elif "loop" in task:
        children = []
        previous: Any = _renamed(task["loop"]["initial"], call)
        before: str | None = None
        for index in range(task["loop"]["maxIterations"]):
            child = f"{name}--{index:04d}-{_digits({'loopIndex': index, 'loopPrevious': previous}, 12)}"
            bound = {"loopIndex": index, "loopPrevious": task["loop"]["initial"]}
            chain = needs if before is None else [*needs, before]
            yield _Step(child, "task", task, chain, call, bound, task["loop"]["while"], before)
            children.append(child)
            before, previous = child, f"${{{{ tasks.{child}.output }}}}"
        yield _Step(name, "loop", task, children, call)
    else:
        yield _Step(name, "router" if "route" in task else "task", task, needs, call, when=task.get("when"))


def _bound(spec: dict[str, Any], task: dict[str, Any], call: _Call | None) -> Iterator[dict[str, Any]]:
    if "foreach" in task:
        for index, item in enumerate(_items(spec, task["foreach"]["items"], call)):
            yield {"item": item, "foreachIndex": index}
        return
    axes = {axis: _items(spec, values, call) for axis, values in task["matrix"]["axes"].items()}
    index = 0
    for x in axes["x"]:
        for y in axes["y"]:
            yield {"matrix": {"x": x, "y": y}, "matrixIndex": index}
            index += 1


def _items(spec: dict[str, Any], value: Any, call: _Call | None) -> list[Any]:
    """Items are literal, or what `inputs.items` is here: of the run, or of the call and all calls around it."""
    if isinstance(value, list):
        return value
    if call is None:
        return INPUTS["items"]  # type: ignore[return-value]
    path = call.id.split("--")
    tasks, items = spec["tasks"], INPUTS["items"]
    for name in path:
        task = next(task for task in tasks if task["id"] == name)
        definition = spec["subworkflows"][task["uses"].removeprefix("workflow:")]
        given = task["with"].get("items", definition["inputs"]["items"])
        items = items if isinstance(given, str) else given
        tasks = definition["tasks"]
    return items  # type: ignore[return-value]


def _renamed(initial: Any, call: _Call | None) -> Any:
    """The start of a loop as the plan spells it; its digest is part of the id."""
    if call is None:
        return initial
    text = json.dumps(initial).replace("inputs.n", f"tasks.{call.boundary}.output.n")
    return json.loads(text)


def _ordered(declared: list[_Step]) -> list[_Step]:
    """Of what is ready, the one declared first."""
    place = {step.id: i for i, step in enumerate(declared)}
    assert len(place) == len(declared)
    before = [{place[n] for n in [*step.needs, *(router for router, _ in step.guards)]} for step in declared]
    after: list[list[int]] = [[] for _ in declared]
    for i, places in enumerate(before):
        for j in places:
            after[j].append(i)
    ready = [i for i, places in enumerate(before) if not places]
    heapq.heapify(ready)
    order: list[_Step] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(declared[i])
        for j in after[i]:
            before[j].discard(i)
            if not before[j]:
                heapq.heappush(ready, j)
    assert len(order) == len(declared)
    return order


# -- interpretation ----------------------------------------------------------------------------------------------------


class _Run:
    def __init__(self) -> None:
        self.tasks: dict[str, tuple[str, Any]] = {}
        self.errors: dict[str, str] = {}
        self.memory: dict[str, Any] = dict.fromkeys(KEYS, 0)
        self.files = dict.fromkeys((f"files/{name}" for name in FILES), SEED_TEXT)

    def perform(self, step: _Step) -> None:
        try:
            self.tasks[step.id] = self.outcome(step)
        except Undefined as error:
            self.tasks[step.id] = ("failed", None)
            self.errors[step.id] = str(error)

    def outcome(self, step: _Step) -> tuple[str, Any]:
        ended = [self.tasks[need][0] == "succeeded" for need in step.needs]
        passed_over = self.passed_over(step)
        needed = {"aggregate": [], "loop": [], "output": ended[-1:]}.get(step.role, ended)
        if not all(needed) and not (step.role == "output" and passed_over):
            self.errors[step.id] = NOT_DONE
            return "skipped", None
        if passed_over is not None:
            return "skipped", passed_over
        scope = self.variables(step)
        if step.when is not None and not self.truth(step.when, step, scope):
            return "skipped", {"reason": "when condition was false"}
        if step.role in ("aggregate", "loop"):
            return self.aggregate(step)
        if step.role == "router":
            return "succeeded", self.route(step)
        given = self.render(step.task["with"], step, scope)
        if step.role in ("input", "output"):
            if type(given.get("n", 0)) not in (int, str) and "schema" in step.task:
                raise Undefined("n does not fit")
            return "succeeded", given
        return self.act(step, given)

    def passed_over(self, step: _Step) -> dict[str, Any] | None:
        for router, destination in step.guards:
            state, output = self.tasks[router]
            if state == "succeeded" and destination not in output["destinations"]:
                route = {"router": router, "selected": output["selected"], "matched": output["matched"]}
                return {"reason": "route not selected", "route": route}
        return None

    def variables(self, step: _Step) -> dict[str, Any]:
        if "loopIndex" not in step.vars:
            return step.vars
        if step.previous is not None:
            return {**step.vars, "loopPrevious": self.tasks[step.previous][1]}
        return {**step.vars, "loopPrevious": self.render(step.vars["loopPrevious"], step, {})}

    def aggregate(self, step: _Step) -> tuple[str, Any]:
        items = [
            {
                "error": self.errors.get(n),
                "index": i,
                "output": self.tasks[n][1],
                "state": self.tasks[n][0],
                "taskId": n,
            }
            for i, n in enumerate(step.needs)
        ]
        if step.role == "aggregate":
            return "succeeded", {"items": items}
        state, last = self.tasks[step.needs[-1]]
        if state == "succeeded":
            bound = {"loopIndex": len(items), "loopPrevious": last}
            if self.truth(step.task["loop"]["while"], step, bound):
                self.errors[step.id] = "the guard stays true"
                return "failed", None
        return "succeeded", {"items": items, "iterations": sum(item["state"] != "skipped" for item in items)}

    def route(self, step: _Step) -> dict[str, Any]:
        route = step.task["route"]
        selected = self.render(route["select"], step, {})
        for case in route["cases"]:
            if identical(case["equals"], selected):
                chosen, matched = case["tasks"], True
                break
        else:
            chosen, matched = route.get("default", []), False
        return {"selected": selected, "matched": matched, "destinations": [_full(step.call, name) for name in chosen]}

    def act(self, step: _Step, given: dict[str, Any]) -> tuple[str, Any]:
        action = step.task["uses"].removeprefix("action:")
        if "key" in given:
            given["key"] = ("" if step.call is None else step.call.prefix) + given["key"]
        if action == "assert" and given["that"] is not True:
            raise Undefined("assertion failed")
        if action == "recall" and given["key"] not in self.memory:
            raise Undefined("no such key")
        if action == "echo":
            given = {"text": given["args"][0]}
        return "succeeded", perform(action, given, self.memory, self.files)

    # templates

    def render(self, value: Any, step: _Step, scope: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self.render(item, step, scope) for key, item in value.items()}
        if isinstance(value, list):
            return [self.render(item, step, scope) for item in value]
        if not isinstance(value, str) or "${{" not in value:
            return value
        before, _, rest = value.partition("${{")
        inner, _, after = rest.partition("}}")
        found = self.look_up(inner.strip(), step, scope)
        if not before and not after:
            return found
        if isinstance(found, (dict, list)):
            raise Undefined("not a scalar")
        return before + as_text(found) + after

    def truth(self, text: str, step: _Step, scope: dict[str, Any]) -> bool:
        words = text.replace("${{", "").replace("}}", "").split()
        if words[0] == "not":
            return not self.truth(" ".join(words[1:]), step, scope)
        value = self.look_up(words[0], step, scope)
        if len(words) == 1:
            return bool(value)
        literal = json.loads(words[2])
        if words[1] == "<":
            return bool(value < literal)
        return identical(value, literal) == (words[1] == "==")

    def look_up(self, path: str, step: _Step, scope: dict[str, Any]) -> Any:
        root, *rest = path.replace("loop.output", "vars.loopPrevious").split(".")
        value: Any
        if root == "vars":
            value = scope
        elif root == "inputs":
            value = INPUTS if step.call is None else self.tasks[step.call.boundary][1]
        elif root == "memory":
            value, rest = self.memory, [("" if step.call is None else step.call.prefix) + rest[0], *rest[1:]]
        else:
            value = self.tasks[_full(step.call, rest[0])][1]
            rest = rest[2:]
            if value is None:
                raise Undefined(path)
        for part in rest:
            if not isinstance(value, dict) or part not in value:
                raise Undefined(path)
            value = value[part]
        return value


def interpret_program(program: Program) -> Expected:
    """Do all tasks one by one."""
    steps = _ordered(list(_steps(program.spec, program.spec["tasks"], None)))
    run = _Run()
    for step in steps:
        run.perform(step)
    failed = any(state == "failed" for state, _ in run.tasks.values())
    return Expected("failed" if failed else "succeeded", run.tasks, run.memory, run.files, [step.id for step in steps])


def coarse(output: Any) -> Any:
    """An output without digests, and with nothing of an error but that there is one."""
    if isinstance(output, list):
        return [coarse(item) for item in output]
    if not isinstance(output, dict):
        return output
    kept = {key: coarse(value) for key, value in output.items() if not (key == "condition" and isinstance(value, dict))}
    if {"index", "taskId", "state", "error"} <= kept.keys() and kept["error"] is not None:
        kept["error"] = "an error"
    return kept
