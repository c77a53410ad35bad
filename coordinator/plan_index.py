"""What a scheduler looks up in a plan, computed once per run. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentctl.store.canonical import canonical, text_digest

from .expressions import Condition, Ref, Renderer, compile_condition, compile_value, compile_vars, has_template
from .plan import CompiledTask, Plan

EFFECT_FREE = frozenset({"builtin.assign", "builtin.assert", "builtin.memory.read"})
"""Actions that the driver evaluates itself (architecture 1)."""


class PlanIndex:
    """Positions instead of names: dependencies, dependents, children of aggregates, compiled templates."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tasks: list[CompiledTask] = [plan.tasks[name] for name in plan.order]
        place = {task.id: i for i, task in enumerate(self.tasks)}
        self.needs: list[tuple[int, ...]] = [tuple(place[name] for name in task.needs) for task in self.tasks]
        self.waits: list[frozenset[int]] = []
        self.dependents: list[list[int]] = [[] for _ in self.tasks]
        for i, task in enumerate(self.tasks):
            # An aggregate does not need the router that guards it; without children it would not wait for it either.
            routers = [place[router] for router, _ in task.route_guards]
            before = frozenset((*self.needs[i], *task.memory_after, *routers))
            self.waits.append(before)
            for position in before:
                self.dependents[position].append(i)
        self.place = place
        self.outputs = compile_value(plan.outputs)
        self._renderers: dict[int, Renderer] = {}
        self._validators: dict[int, Callable[[Any], str | None]] = {}
        self._shared: dict[tuple[object, ...], tuple[str, str]] = {}

    def effect_free(self, position: int) -> bool:
        """Whether the driver itself evaluates this task."""
        task = self.tasks[position]
        return task.uses_kind not in ("action", "agent") or task.action_kind in EFFECT_FREE

    def condition(self, position: int) -> Condition | None:
        """The guard of a task."""
        text = self.tasks[position].when
        return None if text is None else compile_condition(text)

    def variables(self, position: int) -> Renderer | None:
        """The renderer of a task's own variables, or None if it has none."""
        task = self.tasks[position]
        if not task.vars:
            return None
        return compile_vars(task.vars, task.data_vars)

    def input(self, position: int) -> Renderer:
        """The renderer of a task's input. Children of one expansion share it, since they share the dictionary."""
        value = self.tasks[position].input
        renderer = self._renderers.get(id(value))
        if renderer is None:
            renderer = self._renderers[id(value)] = compile_value(value)
        return renderer

    def instructions(self, position: int) -> Renderer | None:
        """The renderer of an agent's instructions; None for other tasks, and for text without templates."""
        task = self.tasks[position]
        if task.uses_kind != "agent":
            return None
        text = task.instructions if task.instructions is not None else self.plan.agents[task.uses_name]["instructions"]
        return compile_value(text) if has_template(text) else None

    def reads(self, position: int) -> frozenset[Ref]:
        """All that the rendering of a task's input reads, for an agent with its instructions."""
        said = self.instructions(position)
        found = self.input(position).references
        return found if said is None else found | said.references

    def fingerprints(self, position: int) -> tuple[str, str]:
        """(definition, output contract) of a task: what it takes to tell later whether its result can be reused.

        The definition is the compiled task and its action (or its agent with provider, tools, their actions and the
        instructions), without the policy, without its place in the plan, and without
        the order that only memory gives it (contract table, row 14).
        """
        task = self.tasks[position]
        schema = task.output_schema
        # Children of one expansion share these objects, and nearly all of the text.
        parts = (task.input, task.needs, schema, task.retry, task.memory_writes, task.memory_reads, task.compensate)
        key = (*map(id, parts), task.uses_kind, task.uses_name, task.when, task.timeout_seconds, task.failure)
        known = self._shared.get(key)
        if known is None:
            data = task.to_json()
            for name in ("id", "vars", "dataVars", "expansion", "position", "memoryAfter"):
                data.pop(name, None)
            shared = text_digest(canonical([data, self._definition(task)]))
            contract = text_digest(canonical(contract_of(task.uses_kind, self.declared_schema(task))))
            known = self._shared[key] = (shared, contract)
        child = task.expansion
        own = canonical([task.id, None if child is None else [child.index, child.bindings], task.vars, task.data_vars])
        return text_digest(f'[{own},"{known[0]}"]'), known[1]

    def _definition(self, task: CompiledTask) -> Any:
        if task.uses_kind != "agent":
            return self.plan.actions.get(task.uses_name)
        plan, agent = self.plan, self.plan.agents[task.uses_name]
        tools = {name: plan.tools[name] for name in agent["tools"]}
        actions = {tool["action"]: plan.actions[tool["action"]] for tool in tools.values() if tool.get("action")}
        return [agent, plan.providers[agent["provider"]], tools, actions]

    def declared_schema(self, task: CompiledTask) -> dict[str, Any] | bool | None:
        """The declared schema of a task's output, for an agent that of its answer (contract 4.6)."""
        if task.output_schema is None and task.uses_kind == "agent":
            answer: dict[str, Any] | bool | None = self.plan.agents[task.uses_name]["structuredOutput"]
            return answer
        return task.output_schema

    def contract(self, position: int) -> Callable[[Any], str | None] | None:
        """The check of a task's output schema: returns what is wrong, or None. None if the kind's contract holds."""
        task = self.tasks[position]
        schema = self.declared_schema(task)
        if schema is None:
            # All other kinds make nothing but objects.
            return _no_object if task.action_kind == "extension.process" else None
        check = self._validators.get(id(schema))
        if check is None:
            check = self._validators[id(schema)] = _compile_schema(schema)
        return check


def contract_of(uses_kind: str, schema: dict[str, Any] | bool | None) -> Any:
    """The output contract of a task: its own schema, else that of its kind (contract 4.6)."""
    if schema is not None:
        return schema
    return {"type": "object"} if uses_kind in ("action", "aggregate") else None


def _no_object(value: Any) -> str | None:
    return None if isinstance(value, dict) else "the output is no object, and the task has no outputSchema of its own"


def _compile_schema(schema: dict[str, Any] | bool) -> Callable[[Any], str | None]:
    import jsonschema_rs

    validator = jsonschema_rs.Draft202012Validator(schema)

    def check(value: Any) -> str | None:
        if validator.is_valid(value):
            return None
        error = next(validator.iter_errors(value))
        where = "/".join(str(part) for part in error.instance_path)
        return f"{error.message} (at /{where})"

    return check
