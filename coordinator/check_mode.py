"""What a run in check mode can know without doing anything (contract 3, check mode).

Such a run goes the way of every run. Tasks without effect are evaluated, files are read, working memory is written;
what would change something outside is foreseen by the worker (a write of a file) or not executed at all. The output of
a task that was not executed is unknown, so whatever reads it cannot be foreseen either: it is not evaluated, and its
output says so with `status: requires_execution`. The state here can be rebuilt from the outputs of a run at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from posixpath import normpath
from typing import Any

from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault

from .expressions import Ref, Renderer, Scope, compile_value
from .plan_index import PlanIndex

UNKNOWN = "requires_execution"

_GATHERING = frozenset({"aggregate", "loop_aggregate"})
"""Kinds whose output is made of those of their needs, whatever these are."""

_FROM_THE_INPUT = frozenset({"policy_denied", "invalid_input", "unsupported_capability", "assertion_failed"})
"""Failures that follow from the policy and the input of a task alone, whatever other tasks do."""


class CheckMode:
    """The questions that a scheduler asks about a run in check mode.

    `output` gives the output of a task that has one, and raises KeyError otherwise.
    """

    def __init__(self, index: PlanIndex, state: Sequence[str], output: Callable[[int], Any]) -> None:
        self._index = index
        self._state = state
        self._output = output
        self._tainted: dict[int, bool] = {}
        self._certain: dict[int, bool] = {}
        self._writers: dict[str, list[int]] = {}
        for position, task in enumerate(index.tasks):
            for key in task.memory_writes:
                self._writers.setdefault(key, []).append(position)
        self._written: dict[str, list[int]] = {}
        for position, task in enumerate(index.tasks):
            if task.action_kind == "builtin.write" and state[position] == "succeeded":
                self.wrote(position)

    # -- before a task begins --------------------------------------------------------------------------------------

    def blocked_guard(self, position: int) -> list[str]:
        """The tasks with unknown outputs that decide whether a task runs, or that its variables read."""
        condition, variables = self._index.condition(position), self._index.variables(position)
        references = [item.references for item in (condition, variables) if item is not None]
        routers = [name for name, _ in self._index.tasks[position].route_guards if self._is_unknown(name)]
        return sorted({*routers, *self._unknown(position, frozenset().union(*references))})

    def _is_unknown(self, task_id: str) -> bool:
        return self.unknown(self._index.place[task_id])

    def blocked_input(self, position: int) -> list[str]:
        """The same for its input, and for the memory that it reads."""
        task = self._index.tasks[position]
        if task.uses_kind in _GATHERING:
            return []
        blocked = self._unknown(position, self._index.input(position).references)
        if task.action_kind == "builtin.memory.read":
            keys = self._writers if task.memory_reads is None else task.memory_reads
            blocked += [name for key in keys if (name := self._unknown_writer(position, key)) is not None]
        return list(dict.fromkeys(blocked))

    def _unknown(self, position: int, references: Iterable[Ref]) -> list[str]:
        found = []
        for item in references:
            if item.root == "tasks" and self._is_unknown(item.path[0]):
                found.append(item.path[0])
            elif item.root == "memory" and (name := self._unknown_writer(position, item.path[0])) is not None:
                found.append(name)
        return sorted(set(found))

    def _unknown_writer(self, position: int, key: str) -> str | None:
        """The task that would have set a key of working memory before `position`, if its value is unknown."""
        for writer in reversed(self._writers.get(key, ())):
            if writer < position and self._state[writer] == "succeeded":
                return self._index.tasks[writer].id if self.unknown(writer) else None
        return None

    def unknown(self, position: int) -> bool:
        """Whether the output of a task that has ended is unknown, in whole or in a part."""
        if self._state[position] != "succeeded":
            return False
        task = self._index.tasks[position]
        if task.uses_kind in _GATHERING:
            return any(self.unknown(child) for child in self._index.needs[position])
        output = self._output(position)
        return isinstance(output, dict) and output.get("status") == UNKNOWN and output.get("predictability") == UNKNOWN

    # -- files -----------------------------------------------------------------------------------------------------

    def wrote(self, position: int) -> None:
        """Take note of a write that has been foreseen."""
        output = self._output(position)
        if isinstance(output, dict) and isinstance(output.get("after"), str) and isinstance(output.get("path"), str):
            self._written.setdefault(normpath(output["path"]), []).append(position)

    def foreseen_text(self, position: int, path: Any) -> str | None:
        """What a file would hold by then: the text of the last write before `position`, if one was foreseen."""
        if not isinstance(path, str):
            return None
        earlier = [item for item in self._written.get(normpath(path), ()) if item < position]
        if not earlier:
            return None
        text: str = self._output(max(earlier))["after"]
        return text

    # -- failures --------------------------------------------------------------------------------------------------

    def is_certain(self, position: int, error: dict[str, Any]) -> bool:
        """Whether a task that failed here would fail in a real run, too.

        Its input has to be certain; and unless the failure follows from that alone, nothing that was not executed may
        come before the task, because it could have made what is missing.
        """
        if not self._sure(position):
            return False
        return error.get("code") in _FROM_THE_INPUT or not self._taint(position)

    def _taint(self, position: int) -> bool:
        """Whether something that was not executed comes before a task, directly or not."""
        return self._settle(
            position,
            self._tainted,
            lambda at: self._index.waits[at],
            lambda at, known: any(known) or self._left_out(at),
        )

    def _left_out(self, position: int) -> bool:
        return any(self.unknown(before) for before in self._index.waits[position])

    def _sure(self, position: int) -> bool:
        """Whether all that a task reads is what a real run would read."""
        return self._settle(
            position,
            self._certain,
            self._read_tasks,
            lambda at, earlier: all(earlier) and not self.unknown(at) and not self._reads_the_world(at),
        )

    def _reads_the_world(self, position: int) -> bool:
        """Whether a task has read what something that was not executed may change."""
        task = self._index.tasks[position]
        return self._state[position] == "succeeded" and task.action_kind == "builtin.read" and self._taint(position)

    def _read_tasks(self, position: int) -> list[int]:
        task, places = self._index.tasks[position], self._index.place
        if task.uses_kind in _GATHERING:
            return list(self._index.needs[position])
        parts = (self._index.condition(position), self._index.variables(position), self._index.input(position))
        found: set[int] = set()
        for part in parts:
            for item in part.references if part is not None else ():
                if item.root == "tasks":
                    found.add(places[item.path[0]])
                elif item.root == "memory":
                    found.update(writer for writer in self._writers.get(item.path[0], ()) if writer < position)
        return sorted(found)

    @staticmethod
    def _settle(
        position: int,
        known: dict[int, bool],
        before: Callable[[int], Iterable[int]],
        judge: Callable[[int, list[bool]], bool],
    ) -> bool:
        """Judge a task after all that come before it, each once. With a stack of its own: chains may be long."""
        pending = [position]
        while pending:
            at = pending[-1]
            if at in known:
                pending.pop()
                continue
            earlier = list(before(at))
            missing = [item for item in earlier if item not in known]
            if missing:
                pending.extend(missing)
                continue
            known[at] = judge(at, [known[item] for item in earlier])
            pending.pop()
        return known[position]

    # -- the end ---------------------------------------------------------------------------------------------------

    def run_output(self, outputs: dict[str, Any], scope: Scope) -> dict[str, Any]:
        """The declared outputs of a run, those that cannot be known marked as such. Raises `TaskFault`."""
        result: dict[str, Any] = {}
        for name, value in outputs.items():
            renderer: Renderer = compile_value(value)
            blocked = self._unknown(len(self._index.tasks), renderer.references)
            try:
                result[name] = not_executed(blocked=blocked) if blocked else renderer(scope)
            except TaskFault as fault:
                if all(self._sure(self._index.place[i.path[0]]) for i in renderer.references if i.root == "tasks"):
                    raise
                result[name] = not_executed(reason=fault.message)
        return result


def not_executed(*, blocked: Sequence[str] = (), reason: str | None = None) -> dict[str, Any]:
    """The output of what cannot be known: the tasks that it depends on, or why else."""
    output: dict[str, Any] = {"status": UNKNOWN, "changed": False, "predictability": UNKNOWN}
    if blocked:
        output["dependsOn"] = list(blocked)
    if reason is not None:
        output["reason"] = reason
    return output


def not_executed_text(**why: Any) -> str:
    """The same as canonical text."""
    return canonical(not_executed(**why))
