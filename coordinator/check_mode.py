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

from .expressions import Ref, Renderer, Scope, compile_condition, compile_value, compile_vars, has_template, resolve
from .plan import MEMORY_WRITERS
from .plan_index import PlanIndex

UNKNOWN = "requires_execution"

_GATHERING = frozenset({"aggregate", "loop_aggregate"})
"""Kinds whose output is made of those of their needs, whatever these are."""

_FROM_THE_INPUT = frozenset({"policy_denied", "invalid_input", "unsupported_capability", "assertion_failed"})
"""Failures that follow from the policy and the input of a task alone, whatever other tasks do."""

_MEMORY_KINDS = frozenset({"builtin.memory.read", *MEMORY_WRITERS})
"""Kinds whose output tells of a key of working memory."""

_OPAQUE = frozenset({"builtin.shell.exec", "extension.process", "mcp.call", "a2a.delegate"})
"""Kinds of which nobody knows what they change: programs, and whoever is asked over a network."""

_CHANGES = _OPAQUE | {"builtin.write", "builtin.long_term_memory.write"}
"""Kinds that change the world, which a check leaves as it is. What an agent does, nobody knows either."""

_LOOKS = frozenset(
    {"builtin.read", "builtin.write", "builtin.long_term_memory.read", "builtin.long_term_memory.search"}
)
"""Kinds whose output in a check, or whose failure, tells of the world."""

_MAX_STEPS = 2_000_000
"""Most steps along the edges of a plan in one check, some seconds: what more would tell is left uncertain."""


class CheckMode:
    """The questions that a scheduler asks about a run in check mode.

    `output` gives the output of a task that has one, and raises KeyError otherwise.
    """

    def __init__(self, index: PlanIndex, state: Sequence[str], output: Callable[[int], Any]) -> None:
        self._index = index
        self._state = state
        self._output = output
        self._certain: dict[int, bool] = {}
        self._stale: dict[int, bool] = {}
        self._changes: dict[tuple[str | None, ...], list[int]] = {}
        self._walked: dict[int, tuple[int, frozenset[int]]] = {}
        self._steps = _MAX_STEPS
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
            return self._unknown(position, self.decision_reads(position))
        blocked = self._unknown(position, self._index.reads(position))
        if task.action_kind == "builtin.memory.read":
            keys = self._writers if task.memory_reads is None else task.memory_reads
            blocked += [name for key in keys if (name := self._unknown_writer(position, key)) is not None]
        return list(dict.fromkeys(blocked))

    def unknown_children(self, position: int) -> list[str]:
        """The needs of a task whose outputs are unknown."""
        return [self._index.tasks[item].id for item in self._index.needs[position] if self.unknown(item)]

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

    def known_fault(self, position: int, scope: Scope) -> TaskFault | None:
        """What is wrong with an input because of inputs and variables of the workflow alone, which never change.

        It is found even where the rest of the input cannot be known.
        """
        own = self._index.tasks[position].vars
        for item in sorted(self._index.reads(position), key=lambda ref: (ref.root, ref.path)):
            if item.root == "inputs" or (item.root == "vars" and item.path[0] not in own):
                try:
                    resolve(item, scope)
                except TaskFault as fault:
                    return fault
        return None

    def is_certain(self, position: int, error: dict[str, Any], *, because: str = "input") -> bool:
        """Whether the failure of a task here makes a real run fail, too.

        A real run has to come to the task (unless it fails before), and what the failure follows from has to be what
        a real run would see. `because` says what that is: only what a guard reads too (`guard`), the last decision of
        a loop (`loop`), or the input. What is read from outside has to be settled as well, unless the policy and the
        input alone are to blame.
        """
        if not self.is_reached(position):
            return False
        if because == "guard":
            return True
        if because == "loop":
            last = self._index.needs[position][-1]
            reads = self._sources(position, self.decision_reads(position))
            return self.is_reached(last) and all(self._sure(item) for item in reads - {last})
        if not all(self._sure(item) for item in self._input_tasks(position)):
            return False
        return error.get("code") in _FROM_THE_INPUT or not self._is_stale(position)

    def is_reached(self, position: int) -> bool:
        """Whether a real run comes to a task, or passes it over, as this one did; failures before it left aside."""
        return self._settle(2 * position, self._certain, self._before, self._judge)

    def _sure(self, position: int) -> bool:
        """Whether a task has the output that it would have in a real run."""
        return self._settle(2 * position + 1, self._certain, self._before, self._judge)

    # The two questions lean on each other, so they are settled together: 2n is whether n is reached, 2n + 1 whether its
    # output is sure.

    def _before(self, question: int) -> list[int]:
        position, of_output = divmod(question, 2)
        if of_output:
            return [2 * position, *(2 * item + 1 for item in self._input_tasks(position)), *self._leans_on(position)]
        task, places = self._index.tasks[position], self._index.place
        found = {2 * places[router] + 1 for router, _ in task.route_guards}
        if task.uses_kind in _GATHERING:
            return sorted(found)  # it is there however its children end
        needs = self._index.needs[position]
        # The outputs of a call need its boundary; how the tasks between have ended does not matter.
        found.update(2 * item for item in (needs[-1:] if task.uses_kind == "subworkflow_aggregate" else needs))
        found.update(2 * item + 1 for item in self._guard_tasks(position))
        return sorted(found)

    def _judge(self, question: int, before: list[bool]) -> bool:
        position, of_output = divmod(question, 2)
        if not of_output:
            return all(before)
        return all(before) and not self.unknown(position) and not self._is_stale(position)

    def _guard_tasks(self, position: int) -> set[int]:
        """The tasks whose outputs, or writes to working memory, the guard and the variables of a task read."""
        parts = (self._index.condition(position), self._index.variables(position))
        return self._sources(position, (item for part in parts if part is not None for item in part.references))

    def _input_tasks(self, position: int) -> list[int]:
        """The same for all that its output is made of."""
        task = self._index.tasks[position]
        if task.uses_kind in _GATHERING:
            return list(self._index.needs[position])
        found = self._guard_tasks(position) | self._sources(position, self._index.reads(position))
        if task.action_kind in _MEMORY_KINDS:
            for key in self._writers if task.memory_reads is None else task.memory_reads:
                found.update(writer for writer in self._writers.get(key, ()) if writer < position)
        return sorted(found)

    def _sources(self, position: int, references: Iterable[Ref]) -> set[int]:
        found: set[int] = set()
        for item in references:
            if item.root == "tasks":
                found.add(self._index.place[item.path[0]])
            elif item.root == "memory":
                found.update(writer for writer in self._writers.get(item.path[0], ()) if writer < position)
        return found

    def decision_reads(self, position: int) -> frozenset[Ref]:
        """What the last decision of a loop reads."""
        loop = self._index.tasks[position].loop
        if loop is None:
            return frozenset()
        found = set(compile_condition(loop["while"]).references)
        names = {item.path[0] for item in found if item.root == "vars"}
        # Every variable is rendered; that the output before is bound, too, matters only to a guard that reads it.
        read = {name: value for name, value in loop["vars"].items() if name != "loopPrevious" or name in names}
        found |= compile_vars(read, loop.get("dataVars", ())).references
        return frozenset(found)

    # -- the world -------------------------------------------------------------------------------------------------

    def _is_stale(self, position: int) -> bool:
        """Whether something may change what a task has seen of the world before a real run comes to it."""
        task = self._index.tasks[position]
        if task.action_kind not in _LOOKS or self._state[position] == "skipped":
            return False
        known = self._stale.get(position)
        if known is None:
            known = self._stale[position] = any(self._may_change(other, position) for other in self._changers(position))
        return known

    def _changers(self, position: int) -> list[int]:
        """The tasks that change what a task looks at, or may: of two literal names only equal ones meet."""
        seen = self._seen_at(position)
        found = self._changes.get(seen)
        if found is None:
            found = self._changes[seen] = [
                other
                for other, task in enumerate(self._index.tasks)
                if (task.action_kind in _CHANGES or task.uses_kind == "agent") and _meet(self._seen_at(other), seen)
            ]
        return found

    def _seen_at(self, position: int) -> tuple[str | None, ...]:
        """What of the world a task looks at or changes: a sort and names, None for a name that only a run knows."""
        task = self._index.tasks[position]
        kind = str(task.action_kind)
        if kind in _OPAQUE or task.uses_kind == "agent":
            return (None,)
        if kind in ("builtin.read", "builtin.write"):
            path = _literal(task.input.get("path"))
            return ("file", None if path is None else normpath(path))
        if kind == "builtin.long_term_memory.search":
            return ("memory", None, None)
        # A namespace that is left out is the one of the workflow, which is not looked up here.
        return ("memory", _literal(task.input.get("namespace")), _literal(task.input.get("key")))

    def _may_change(self, other: int, position: int) -> bool:
        """Whether `other` may come before `position` in a real run with more than is foreseen here."""
        if other == position:
            return False
        if other > position:
            return other not in self._related(position, self._index.dependents)
        harmless = self._state[other] in ("skipped", "failed", "cancelled") or self._is_foreseen(other)
        return not harmless or other not in self._related(position, self._index.waits)

    def _is_foreseen(self, position: int) -> bool:
        task = self._index.tasks[position]
        written = task.action_kind == "builtin.write" and self._state[position] == "succeeded"
        return written and not self.unknown(position)

    def _leans_on(self, position: int) -> list[int]:
        """Of what comes before a task and might change what it looks at: that it is skipped, or what it writes."""
        if self._index.tasks[position].action_kind not in _LOOKS or self._is_stale(position):
            return []
        found = []
        for other in self._changers(position):
            if other < position:
                found.append(2 * other + (1 if self._is_foreseen(other) else 0))
        return found

    def _related(self, position: int, edges: Sequence[Iterable[int]]) -> frozenset[int]:
        """All that comes before a task (edges `waits`) or after it (`dependents`), directly or not.

        When that has cost too much in all, nothing is said to be related: fewer failures are called certain then.
        """
        last = self._walked.get(id(edges))
        if last is not None and last[0] == position:
            return last[1]
        found: set[int] = set()
        pending = [position]
        while pending and self._steps > 0:
            for item in edges[pending.pop()]:
                if item not in found:
                    found.add(item)
                    pending.append(item)
                    self._steps -= 1
        result = frozenset() if pending else frozenset(found)
        self._walked[id(edges)] = (position, result)
        return result

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
                if all(self._sure(item) for item in self._sources(len(self._index.tasks), renderer.references)):
                    raise
                result[name] = not_executed(reason=fault.message)
        return result


def _literal(value: Any) -> str | None:
    return value if type(value) is str and not has_template(value) else None


def _meet(one: tuple[str | None, ...], other: tuple[str | None, ...]) -> bool:
    """Whether two places can be the same one: as far as both are known, they are equal."""
    return all(a is None or b is None or a == b for a, b in zip(one, other, strict=False))


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
