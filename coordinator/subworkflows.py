"""Sub-workflows in place of their calls (contract 2.7): boundaries, names and memory of their own. Pure: no I/O.

A call becomes an input boundary, the local tasks under names that start with the id of the call, and an aggregate that
has the id of the call. After that there are only ordinary tasks, with ordinary recovery.

Paths in templates are renamed, not text: `inputs.x` of the sub-workflow is the output of its boundary, `tasks.X` the
local task, `memory.k` a key with a prefix. Variables are those of the workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from .definition import Spec, Subworkflow, Task
from .diagnostics import Path, did_you_mean
from .expressions import Ref, rename_condition, rename_paths
from .plan import MAX_TASKS

MAX_NESTING = 64
"""Deepest nesting of calls. The names of tasks grow with it."""

MAX_ID = 1000
"""Longest id of a call with those around it, in characters."""

Role = Literal["task", "subworkflow_input", "subworkflow_aggregate"]
Report = Callable[..., None]
Locate = Callable[[Path], tuple[int, int]]
"""Line and column of a place in the document."""


def boundary_id(call: str, workflow: str, version: str) -> str:
    """Id of the input boundary of a call: `ID--inputs-DDDDDDDD`."""
    digest = sha256(f"{workflow}@{version}".encode()).hexdigest()
    return f"{call}--inputs-{digest[:8]}"


@dataclass(frozen=True, slots=True)
class Namespace:
    """What names mean inside one call: its own id (with those of the calls around it), workflow and boundary."""

    call: str
    workflow: str
    boundary: str

    def task_id(self, local: str) -> str:
        """The id of a local task in the plan."""
        return f"{self.call}--{local}"

    def local(self, task_id: str) -> str:
        """A task id of the plan as the author of the sub-workflow knows it."""
        return task_id.removeprefix(f"{self.call}--")

    def as_written(self, text: str) -> str:
        """A message about an expression of the plan, with the names that stand in the sub-workflow."""
        text = text.replace(f"tasks.{self.boundary}.output", "inputs").replace(f"tasks.{self.call}--", "tasks.")
        return text.replace(self.memory_prefix, "")

    @property
    def memory_prefix(self) -> str:
        """What stands before each key of working memory."""
        return self.call.replace("-", "_") + "__"

    def value(self, value: Any) -> Any:
        """A JSON value with its paths renamed."""
        return rename_paths(value, self._rename)

    def task(self, task: Task) -> Task:
        """A local task under its name in the plan. Input of its action is renamed by who merges it."""
        changes: dict[str, Any] = {
            "id": self.task_id(task.id),
            "needs": [*(self.task_id(need) for need in task.needs), self.boundary],
            "vars": self.value(task.vars),
            "with_": self.value(task.with_),
        }
        if task.when is not None:
            changes["when"] = rename_condition(task.when, self._rename)
        if task.foreach is not None:
            changes["foreach"] = task.foreach.model_copy(update={"items": self.value(task.foreach.items)})
        if task.matrix is not None:
            changes["matrix"] = task.matrix.model_copy(update={"axes": self.value(task.matrix.axes)})
        if task.loop is not None:
            loop = {"while_": self.value(task.loop.while_), "initial": self.value(task.loop.initial)}
            changes["loop"] = task.loop.model_copy(update=loop)
        if task.route is not None:
            cases = [
                case.model_copy(update={"tasks": [self.task_id(name) for name in case.tasks]})
                for case in task.route.cases
            ]
            default = [self.task_id(name) for name in task.route.default]
            route = {"select": self.value(task.route.select), "cases": cases, "default": default}
            changes["route"] = task.route.model_copy(update=route)
        if task.compensate is not None:
            changes["compensate"] = task.compensate.model_copy(update={"with_": self.value(task.compensate.with_)})
        if task.memory_writes is not None:
            changes["memory_writes"] = [self.memory_prefix + key for key in task.memory_writes]
        return task.model_copy(update=changes)

    def _rename(self, reference: Ref) -> str | None:
        root, path = reference.root, reference.path
        if root == "inputs":
            return ".".join(("tasks", self.boundary, "output", *path))
        if root == "memory":
            return ".".join((root, self.memory_prefix + path[0], *path[1:]))
        if root == "tasks":
            return ".".join((root, self.task_id(path[0]), "output", *path[1:]))
        return None


@dataclass(frozen=True, slots=True)
class Declared:
    """One task after sub-workflows were put in place of their calls.

    `path` is where it is declared, for messages; `namespace` is that of its names, None at the top. Of a
    boundary the task's `with` is what it renders and `output_schema` its contract; `given` says which fields of the
    input boundary the call gives, the others are defaults of `workflow`.
    """

    role: Role
    task: Task
    path: Path
    namespace: Namespace | None = None
    workflow: str = ""
    given: frozenset[str] = frozenset()


def flatten(spec: Spec, report: Report, locate: Locate) -> list[Declared]:
    """All tasks in declaration order. Findings go to `report`; then the result is not to be used."""
    if not _definitions_are_sound(spec, report, locate):
        return []
    prefixes: dict[str, Path] = {}
    return list(_tasks(spec, spec.tasks, ("spec", "tasks"), None, prefixes, report))


def uncalled(spec: Spec, tasks: Sequence[Declared]) -> Iterator[tuple[str, list[Declared]]]:
    """Each sub-workflow that nothing calls, as if one call did, which has its name. Calls inside stay closed: what they
    call is looked at by itself. `tasks` are those of `flatten`, without findings.
    """
    reached = {item.workflow for item in tasks}
    for name, sub in spec.subworkflows.items():
        if name not in reached:
            place: Path = ("spec", "subworkflows", name)
            call = spec.tasks[0].model_copy(update={**_BARE, "id": name, "uses": f"workflow:{name}"})
            inner = Namespace(name, name, boundary_id(name, name, sub.version))
            prefixes: dict[str, Path] = {}
            begin = {"id": inner.boundary, "with_": sub.inputs}
            found = [Declared("subworkflow_input", call.model_copy(update=begin), place, None, name)]
            for index, local in enumerate(sub.tasks):
                task, at = inner.task(local), (*place, "tasks", index)
                called = _called(task)
                if called is None:
                    found.append(Declared("task", task, at, inner))
                else:
                    found += _call(spec, task, called, at, inner, prefixes, _silent, closed=True)
            end = {"needs": [item.task.id for item in found], "with_": inner.value(sub.outputs)}
            end["output_schema"] = sub.output_schema
            yield name, [*found, Declared("subworkflow_aggregate", call.model_copy(update=end), place, inner, name)]


_BARE: dict[str, Any] = {
    "needs": [], "foreach": None, "matrix": None, "route": None, "loop": None, "memory_writes": None, "when": None,
    "vars": {}, "vars_files": [], "with_": {}, "timeout_seconds": None, "failure": "stop", "compensate": None,
    "output_schema": None,
}  # fmt: skip


def _silent(*_: Any, **__: Any) -> None:
    return


def _called(task: Task) -> str | None:
    return task.uses.removeprefix("workflow:") if task.uses.startswith("workflow:") else None


# ---------------------------------------------------------------------- expansion


def _tasks(
    spec: Spec,
    tasks: Sequence[Task],
    path: Path,
    namespace: Namespace | None,
    prefixes: dict[str, Path],
    report: Report,
) -> Iterator[Declared]:
    for index, local in enumerate(tasks):
        place: Path = (*path, index)
        task = local if namespace is None else namespace.task(local)
        name = _called(task)
        if name is None:
            yield Declared("task", task, place, namespace)
        else:
            yield from _call(spec, task, name, place, namespace, prefixes, report)


def _call(
    spec: Spec,
    task: Task,
    name: str,
    path: Path,
    outer: Namespace | None,
    prefixes: dict[str, Path],
    report: Report,
    *,
    closed: bool = False,
) -> Iterator[Declared]:
    sub = spec.subworkflows[name]
    if len(task.id) > MAX_ID:
        report("schema_violation", f"the id of this call has more than {MAX_ID} characters", (*path, "id"))
        return
    inner = Namespace(task.id, name, boundary_id(task.id, name, sub.version))
    if prefixes.setdefault(inner.memory_prefix, path) is not path:
        message = f"the memory of the call {task.id!r} would have the same prefix as that of another call"
        report("schema_violation", message, (*path, "id"), help="give ids that differ in more than - and _")
    defaults = sub.inputs if outer is None else outer.value(sub.inputs)
    begin = {"id": inner.boundary, "with_": {**defaults, **task.with_}, "output_schema": sub.input_schema}
    yield Declared("subworkflow_input", task.model_copy(update=begin), path, outer, name, frozenset(task.with_))
    if closed:
        shut: dict[str, Any] = {"needs": [inner.boundary], "with_": {}, "output_schema": None}
        yield Declared("subworkflow_aggregate", task.model_copy(update=shut), path, inner, name)
        return
    yield from _tasks(spec, sub.tasks, ("spec", "subworkflows", name, "tasks"), inner, prefixes, report)
    needs = [*(inner.task_id(local.id) for local in sub.tasks), inner.boundary]
    end = {"needs": needs, "with_": inner.value(sub.outputs), "output_schema": sub.output_schema}
    yield Declared("subworkflow_aggregate", task.model_copy(update=end), path, inner, name)


# ---------------------------------------------------------------------- checks of definitions


def _definitions_are_sound(spec: Spec, report: Report, locate: Locate) -> bool:
    """Whether every call has a definition, no definition calls itself, and the whole is not too large.

    Each definition is looked at once, however often it is called, and also when it never is.
    """
    sound = True
    for name, sub in spec.subworkflows.items():
        sound &= _names_are_sound(name, sub, report, locate)
    groups: list[tuple[Path, list[Task]]] = [(("spec", "tasks"), spec.tasks)]
    groups += [(("spec", "subworkflows", name, "tasks"), sub.tasks) for name, sub in spec.subworkflows.items()]
    for path, tasks in groups:
        for index, task in enumerate(tasks):
            called = _called(task)
            if called is not None and called not in spec.subworkflows:
                hint = did_you_mean(called, spec.subworkflows, else_list="known sub-workflows")
                report("missing_reference", f"there is no sub-workflow {called!r}", (*path, index, "uses"), help=hint)
                sound = False
    return sound and _nesting_is_sound(spec, report)


def _names_are_sound(name: str, sub: Subworkflow, report: Report, locate: Locate) -> bool:
    sound = True
    path: Path = ("spec", "subworkflows", name, "tasks")
    known = {task.id for task in sub.tasks}
    seen: dict[str, int] = {}
    for index, task in enumerate(sub.tasks):
        if seen.setdefault(task.id, index) != index:
            line, column = locate((*path, seen[task.id], "id"))
            message = f"the task id {task.id!r} stands twice in the sub-workflow; the first is at {line}:{column}"
            report("duplicate_task", message, (*path, index, "id"), help="give each task its own id")
            sound = False
        for at, need in enumerate(task.needs):
            if need not in known:
                hint = did_you_mean(need, known, else_list=f"tasks of {name}")
                message = f"there is no task {need!r} in the sub-workflow {name!r}"
                report("missing_reference", message, (*path, index, "needs", at), help=hint)
                sound = False
    return sound


def _nesting_is_sound(spec: Spec, report: Report) -> bool:
    """Whether calls end somewhere, and how much they come to is bearable: known before anything is copied."""
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    trail: list[str] = []

    def visit(name: str, at: Path) -> bool:
        if name in trail:
            circle = " -> ".join([*trail[trail.index(name) :], name])
            hint = "leave one of these calls out: nothing calls itself; what is to be done again is a loop"
            message = f"sub-workflows call one another in a circle: {circle}"
            report("dependency_cycle", message, (*at, "uses"), help=hint)
            return False
        if name in sizes and len(trail) + depths[name] <= MAX_NESTING:
            return True
        if len(trail) >= MAX_NESTING or name in sizes:
            report("schema_violation", f"calls are nested more than {MAX_NESTING} deep", (*at, "uses"))
            return False
        trail.append(name)
        size, depth = 2, 0
        for index, task in enumerate(spec.subworkflows[name].tasks):
            called = _called(task)
            if called is None:
                size += 1
            elif visit(called, ("spec", "subworkflows", name, "tasks", index)):
                size += sizes[called]
                depth = max(depth, depths[called])
            else:
                return False
        trail.pop()
        sizes[name], depths[name] = size, depth + 1
        return True

    for name in spec.subworkflows:
        if not visit(name, ("spec", "subworkflows", name)):
            return False
    total = sum(1 if (called := _called(task)) is None else sizes[called] for task in spec.tasks)
    if total > MAX_TASKS:
        shown = str(total) if total < 10**15 else "more than 10^15"
        report("schema_violation", f"{shown} compiled tasks are more than {MAX_TASKS}", ("spec", "tasks"), key=True)
        return False
    return True
