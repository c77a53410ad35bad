"""From a document to a frozen plan (contract section 2). Pure: reads no file, no clock, no randomness.

Everything that can be known to be wrong is found here, before a run exists, and reported together: a
feature that this version does not have is refused by name, never ignored. The phases follow contract 2.1:
an error of expansion ends the compilation, errors of the task checks are collected, a cycle is reported
alone, then order and memory are settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heapify, heappop, heappush
from typing import Any

from agentctl.store.canonical import JsonError, canonical, check_value, hex_digest
from agentctl.store.embedding import LOCAL_HASH

from .capabilities import agent_problems
from .definition import PROCESS_KINDS, RESERVED_VARIABLES, LoadedDocument, Retry, Task
from .diagnostics import Diagnostic, DocumentError, Path, did_you_mean
from .expansion import ExpansionError, Fanout, expansion_id, plan_foreach, plan_matrix
from .expressions import Ref, Scope, TemplateError, compile_condition, compile_value, has_template
from .long_term_input import embeds, long_term_problems
from .plan import (
    MAX_TASKS,
    MEMORY_WRITERS,
    PLAN_FORMAT,
    CompiledTask,
    Expansion,
    Plan,
    RetryPolicy,
    plan_as_json,
    tasks_chunks,
)
from .yaml_document import collector_paused

__all__ = ["compile_workflow", "merge_inputs", "plan_as_json"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the compiler knows of an action kind (contract section 3)."""

    effect_class: str | None
    risk: str
    predictability: str
    fields: Mapping[str, str] | None = None
    required: tuple[str, ...] = ()


_FULLY, _PARTLY, _RUN = "fully_predictable", "partially_predictable", "requires_execution"
_PREDICTABILITY = (_FULLY, _PARTLY, _RUN)

_KINDS: dict[str, _Kind] = {
    "builtin.assign": _Kind(None, "low", _FULLY),
    "builtin.assert": _Kind(None, "low", _FULLY, {"that": "bool", "message": "text"}, ("that",)),
    "builtin.memory.read": _Kind(None, "low", _FULLY, {"key": "name"}, ("key",)),
    "builtin.memory.write": _Kind("internal_state", "low", _FULLY, {"key": "name", "value": "any"}, ("key",)),
    "builtin.long_term_memory.read": _Kind("observe", "low", _RUN, {"key": "name", "namespace": "name"}, ("key",)),
    "builtin.long_term_memory.search": _Kind(
        "observe",
        "low",
        _RUN,
        {"query": "any", "mode": "any", "limit": "any", "filters": "any", "namespace": "name"},
        ("query",),
    ),
    "builtin.long_term_memory.write": _Kind(
        "external_mutate",
        "medium",
        _RUN,
        {
            "key": "name",
            "entry": "any",
            "content": "any",
            "value": "any",
            "text": "any",
            "metadata": "any",
            "retentionDays": "any",
            "namespace": "name",
        },
        ("key",),
    ),
    "builtin.long_term_memory.promote": _Kind("internal_state", "low", _RUN, {"key": "name", "value": "any"}, ("key",)),
    "builtin.read": _Kind("observe", "low", _PARTLY, {"path": "name"}, ("path",)),
    "builtin.write": _Kind(
        "workspace_mutate", "medium", _PARTLY, {"path": "name", "content": "text"}, ("path", "content")
    ),
    "builtin.shell.exec": _Kind(
        "process_execution",
        "high",
        _RUN,
        {"args": "texts", "stdin": "text", "env": "text map", "cwd": "name"},
    ),
}
"""The kinds that run; every other kind of the contract is refused by name where a task uses it."""

_OPEN_KINDS = frozenset({"builtin.assign", "builtin.assert"})
"""Kinds whose input may have further fields."""


def merge_inputs(spec_inputs: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Run inputs over the document's defaults, key by key (contract 1.3)."""
    return {**spec_inputs, **(given or {})}


def compile_workflow(
    document: LoadedDocument,
    *,
    inputs: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Plan:
    """Compile a document. Raises `DocumentError` with every finding.

    `inputs` are the run's inputs (a fan-out may take its items from them); `variables` are those of the
    command line, which win over all variables of the document (contract 1.10).
    """
    with collector_paused():
        return _Compiler(document, inputs, variables).compile()


@dataclass(slots=True)
class _Source:
    """What all compiled tasks of one declared task share."""

    index: int
    task: Task
    path: Path
    needs: tuple[str, ...]
    vars: dict[str, Any]
    needed: frozenset[str] = frozenset()
    fanout: Fanout | None = None
    child_ids: tuple[str, ...] = ()
    action_name: str = ""
    action_kind: str | None = None
    input: dict[str, Any] = field(default_factory=dict)
    memory_writes: tuple[str, ...] = ()
    memory_reads: tuple[str, ...] | None = ()
    timeout_seconds: int = 120
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    predictability: str = _FULLY


@dataclass(slots=True)
class _Node:
    """A compiled task to be, in declaration order."""

    id: str
    source: _Source
    needs: tuple[str, ...]
    bindings: dict[str, Any] | None = None
    child_index: int = 0
    aggregate: bool = False
    position: int = -1


class _Compiler:
    def __init__(
        self, document: LoadedDocument, inputs: Mapping[str, Any] | None, variables: Mapping[str, Any] | None
    ) -> None:
        self.document = document
        self.spec = document.model.spec
        self.workflow = document.workflow
        self.given = dict(variables or {})
        self.found: dict[tuple[Any, ...], Diagnostic] = {}
        self.schemas_seen: set[int] = set()
        self._check_given(inputs, "inputs")
        self._check_given(variables, "variables")
        self.inputs = merge_inputs(self.spec.inputs, inputs)
        self.vars = {**self.spec.vars, **self.given}
        self.action_references: dict[str, dict[str, frozenset[Ref]]] = {}

    # ---------------------------------------------------------------------- findings

    def report(
        self,
        code: str,
        message: str,
        path: Sequence[str | int],
        *,
        help: str | None = None,
        key: bool = False,
    ) -> None:
        item = self.document.source.diagnostic(code, message, path, help=help, key=key)
        self.found.setdefault((item.code, item.line, item.column, item.message), item)

    def stop_if_wrong(self) -> None:
        if self.found:
            raise DocumentError(self.found.values())

    def unsupported(self, feature: str, path: Sequence[str | int], help: str | None = None) -> None:
        self.report("unsupported_capability", f"{feature} is not supported by this version", path, help=help, key=True)

    def _check_given(self, values: Mapping[str, Any] | None, what: str) -> None:
        try:
            check_value(dict(values or {}))
        except JsonError as error:
            raise DocumentError([Diagnostic("schema_violation", f"{what}: {error.message}")]) from None
        if what == "variables":
            for name in sorted(RESERVED_VARIABLES.intersection(values or {})):
                message = f"the variable name {name} is reserved for expansion"
                raise DocumentError([Diagnostic("schema_violation", message)])

    # ---------------------------------------------------------------------- phases

    def compile(self) -> Plan:
        sources = [self.source(index, task) for index, task in enumerate(self.spec.tasks)]
        self.stop_if_wrong()
        self.check_features()
        self.check_declarations()
        ids = self.unique_ids(sources)
        for source in sources:
            self.check_task(source, ids)
        self.check_outputs(ids)
        self.check_budgets(sources)
        self.stop_if_wrong()
        nodes = list(self.nodes(sources))
        by_id = {node.id: node for node in nodes}
        ordered = self.order(nodes, by_id)
        if self.spec.runtime.max_concurrency > 1:
            self.check_memory_conflicts(ordered, by_id)
            self.stop_if_wrong()
        return self.plan(ordered, by_id)

    def source(self, index: int, task: Task) -> _Source:
        """The declared task with its fan-out. Findings here belong to phase 2."""
        path: Path = ("spec", "tasks", index)
        own = task.vars
        if self.given and not self.given.keys().isdisjoint(own):
            own = {name: value for name, value in own.items() if name not in self.given}
        needs = tuple(dict.fromkeys(task.needs)) if len(task.needs) > 1 else tuple(task.needs)
        source = _Source(index, task, path, needs, own, frozenset(needs))
        if task.foreach is None and task.matrix is None:
            return source
        plain = {name: value for name, value in own.items() if not has_template(value)}
        scope = Scope(inputs=self.inputs, vars={**self.vars, **plain})
        try:
            if task.foreach is not None:
                source.fanout = plan_foreach(task.foreach, scope)
            elif task.matrix is not None:
                source.fanout = plan_matrix(task.matrix, scope)
        except ExpansionError as error:
            self.report(error.code, error.message, (*path, *error.path), help=error.help)
            return source
        assert source.fanout is not None
        for name in source.fanout.names:
            if name in task.vars or name in self.given:
                place = (*path, "vars", name) if name in task.vars else (*path, source.fanout.kind)
                self.report(
                    "schema_violation",
                    f"the variable {name} is bound by {source.fanout.kind}",
                    place,
                    key=True,
                )
        return source

    def unique_ids(self, sources: list[_Source]) -> set[str]:
        """All compiled ids; declared twice or equal to a child's id is an error."""
        first: dict[str, _Source] = {}
        total = 0
        for source in sources:
            name = source.task.id
            total += 1 + (source.fanout.size if source.fanout else 0)
            other = first.setdefault(name, source)
            if other is not source:
                line, column = self.document.source.locate((*other.path, "id"))
                message = f"the task id {name!r} stands twice; the first is at {line}:{column}"
                self.report("duplicate_task", message, (*source.path, "id"), help="give each task its own id")
        if total > MAX_TASKS:
            message = f"{total} compiled tasks are more than {MAX_TASKS}"
            self.report("schema_violation", message, ("spec", "tasks"), key=True)
            self.stop_if_wrong()
        ids = set(first)
        for source in sources:
            if source.fanout is None:
                continue
            parent = source.task.id
            source.child_ids = tuple(
                [expansion_id(parent, index, bindings) for index, bindings in enumerate(source.fanout.bindings())]
            )
            for child in first.keys() & source.child_ids:
                message = f"the task id {child!r} is also that of a child of {parent!r}"
                self.report("duplicate_task", message, (*first[child].path, "id"))
            ids.update(source.child_ids)
        return ids

    @staticmethod
    def nodes(sources: list[_Source]) -> Iterator[_Node]:
        for source in sources:
            if source.fanout is None:
                yield _Node(source.task.id, source, source.needs)
                continue
            for index, bindings in enumerate(source.fanout.bindings()):
                yield _Node(source.child_ids[index], source, source.needs, bindings, index)
            yield _Node(source.task.id, source, source.child_ids, aggregate=True)

    # ---------------------------------------------------------------------- features

    def check_features(self) -> None:
        """Refuse by name what this version does not have, wherever a document relies on it."""
        spec = self.spec
        if spec.packs:
            self.unsupported("packs", ("spec", "packs"))
        if spec.vars_files:
            self.unsupported("varsFiles", ("spec", "varsFiles"), "write the variables into vars")
        if spec.compensation.on_failure == "automatic":
            self.unsupported("automatic compensation", ("spec", "compensation", "onFailure"))
        for name, agent in spec.agents.items():
            if agent.vars_files:
                self.unsupported("varsFiles", ("spec", "agents", name, "varsFiles"), "write the variables into vars")

    def check_budgets(self, sources: list[_Source]) -> None:
        """What is known before anything runs must fit; equal is fine (contract 2.10)."""
        budgets = self.spec.runtime.budgets
        children = sum(source.fanout.size for source in sources if source.fanout is not None)
        for name, limit, count, what in (
            ("maxTasks", budgets.max_tasks, len(sources) + children, "compiled tasks, aggregates included"),
            ("maxExpansionItems", budgets.max_expansion_items, children, "children of expansions"),
        ):
            if limit is not None and count > limit:
                message = f"the workflow has {count} {what}; {name} allows {limit}"
                place = ("spec", "runtime", "budgets", name)
                self.report("schema_violation", message, place, help=f"raise {name}, or do less")

    def check_declarations(self) -> None:
        """References and schemas of what is declared, used or not."""
        spec = self.spec
        for name, agent in spec.agents.items():
            path: Path = ("spec", "agents", name)
            if agent.provider not in spec.providers:
                self.missing("provider", agent.provider, spec.providers, (*path, "provider"))
            for index, tool in enumerate(agent.tools):
                if tool not in spec.tools:
                    self.missing("tool", tool, spec.tools, (*path, "tools", index))
            self.check_schema(agent.structured_output, (*path, "structuredOutput"))
            provider = spec.providers.get(agent.provider)
            if provider is not None:
                for where, message in agent_problems(agent, provider.kind):
                    self.report("unsupported_capability", message, (*path, *where))
        for name, item in spec.tools.items():
            path = ("spec", "tools", name)
            if item.action is not None and item.action not in spec.actions:
                self.missing("action", item.action, spec.actions, (*path, "action"))
            self.check_schema(item.input_schema, (*path, "inputSchema"))
            self.check_schema(item.output_schema, (*path, "outputSchema"))
        for name, action in spec.actions.items():
            self.check_schema(action.input_schema, ("spec", "actions", name, "inputSchema"))
            self.check_schema(action.output_schema, ("spec", "actions", name, "outputSchema"))
        for name, sub in spec.subworkflows.items():
            self.check_schema(sub.input_schema, ("spec", "subworkflows", name, "inputSchema"))
            self.check_schema(sub.output_schema, ("spec", "subworkflows", name, "outputSchema"))
        long_term = spec.memory.long_term
        if long_term is not None and long_term.embedding.provider not in ("local_hash", *spec.providers):
            place = ("spec", "memory", "longTerm", "embedding", "provider")
            self.missing("provider", long_term.embedding.provider, spec.providers, place)

    def missing(self, what: str, name: str, known: Mapping[str, Any] | set[str], path: Sequence[str | int]) -> None:
        # Likeness is dear among thousands of names, and nobody reads hints by the hundred.
        hint = None
        if len(self.found) < 20:
            hint = did_you_mean(name, known, else_list=f"known {what}s")
        self.report("missing_reference", f"there is no {what} {name!r}", path, help=hint)

    def check_schema(self, schema: Any, path: Sequence[str | int]) -> None:
        if schema is None or isinstance(schema, bool) or id(schema) in self.schemas_seen:
            return
        self.schemas_seen.add(id(schema))
        message = _schema_problem(schema)
        if message is not None:
            self.report("schema_violation", f"not a JSON Schema (Draft 2020-12): {message}", path)

    # ---------------------------------------------------------------------- one task

    def check_task(self, source: _Source, ids: set[str]) -> None:
        task, path = source.task, source.path
        source.retry = _retry(task.retry)
        for index, need in enumerate(task.needs):
            if need not in ids:
                self.missing("task", need, ids, (*path, "needs", index))
        for name, value in (("loop", task.loop), ("compensate", task.compensate)):
            if value is not None:
                self.unsupported(name, (*path, name))
        if task.vars_files:
            self.unsupported("varsFiles", (*path, "varsFiles"), "write the variables into vars")
        self.check_schema(task.output_schema, (*path, "outputSchema"))

        references = set(self.references(source.vars, (*path, "vars"), source, ids))
        if source.fanout is not None:
            for place, items in source.fanout.templates:
                references |= self.references(list(items), (*path, *place), source, ids)
        if task.when is not None:
            references |= self.condition(task.when, (*path, "when"), source, ids)
        references |= self.references(task.with_, (*path, "with"), source, ids)

        kind, _, name = task.uses.partition(":")
        if kind != "action":
            feature = {"router": "a router", "agent": f"an agent ({name})"}.get(kind, f"a sub-workflow ({name})")
            self.unsupported(feature, (*path, "uses"))
            return
        action = self.spec.actions.get(name)
        if action is None:
            self.missing("action", name, self.spec.actions, (*path, "uses"))
            return
        source.action_name, source.action_kind = name, action.kind
        facts = _KINDS.get(action.kind)
        if facts is None:
            self.unsupported(f"an action of kind {action.kind}", (*path, "uses"))
            return
        source.predictability = facts.predictability
        source.input = {**action.with_, **task.with_} if action.with_ and task.with_ else task.with_ or action.with_
        default = self.spec.runtime.default_timeout_seconds
        limit = action.timeout_seconds if action.kind in PROCESS_KINDS else None
        # The task's own limit holds for every kind (contract table, row 10); a process has the smaller of both.
        given = [seconds for seconds in (task.timeout_seconds, limit) if seconds is not None]
        source.timeout_seconds = min(given) if given else default
        references |= self.action_defaults(source, ids)
        self.check_action_features(name)
        self.check_input(source, facts)
        for field_name, message in long_term_problems(action.kind, source.input):
            self.report("schema_violation", message, self.input_path(source, field_name))
        long_term = self.spec.memory.long_term
        if long_term is not None and embeds(action.kind) and long_term.embedding.provider != LOCAL_HASH:
            place = ("spec", "memory", "longTerm", "embedding", "provider")
            self.unsupported("an embedding by a provider", place, f"use {LOCAL_HASH}")
        self.memory_keys(source, references)

    def check_action_features(self, name: str) -> None:
        action = self.spec.actions[name]
        path: Path = ("spec", "actions", name)
        if action.env:
            hint = "pass plain values in the task's with.env, or let the program read the secret itself"
            self.unsupported("a secret reference in the env of an action", (*path, "env"), hint)
        if action.artifacts:
            self.unsupported("artifacts of a process", (*path, "artifacts"))
        if action.isolation == "container":
            self.unsupported("isolation: container", (*path, "isolation"))

    def action_defaults(self, source: _Source, ids: set[str]) -> set[Ref]:
        """What the action's own `with` reads, as far as the task does not override it."""
        name = source.action_name
        defaults = self.spec.actions[name].with_
        if not defaults:
            return set()
        known = self.action_references.get(name)
        if known is None:
            known = self.action_references[name] = {}
            for key, value in defaults.items():
                try:
                    known[key] = compile_value(value).references
                except TemplateError:
                    self.locate_problems(value, ("spec", "actions", name, "with", key))
                    known[key] = frozenset()
        found: set[Ref] = set()
        for key, references in known.items():
            if key not in source.task.with_:
                self.check_task_references(
                    references, defaults[key], ("spec", "actions", name, "with", key), source, ids
                )
                found |= references
        return found

    def check_input(self, source: _Source, facts: _Kind) -> None:
        if facts.fields is None:
            return
        for name, value in source.input.items():
            shape = facts.fields.get(name)
            if shape is not None:
                self.check_shape(source, name, value, shape)
            elif source.action_kind not in _OPEN_KINDS:
                hint = did_you_mean(name, facts.fields, else_list="fields here")
                message = f"unknown field {name!r} for {source.action_kind}"
                self.report("schema_violation", message, self.input_path(source, name), help=hint, key=True)
        for name in facts.required:
            if name not in source.input:
                message = f"{source.action_kind} needs {name}"
                self.report("schema_violation", message, self.input_path(source, name))

    def input_path(self, source: _Source, name: str, *more: str | int) -> Path:
        defaults = self.spec.actions[source.action_name].with_
        if name in defaults and name not in source.task.with_:
            return ("spec", "actions", source.action_name, "with", name, *more)
        return (*source.path, "with", name, *more)

    def check_shape(self, source: _Source, name: str, value: Any, shape: str) -> None:
        """The type of a literal input field; a template is judged at run time."""
        if shape == "any" or (shape not in ("text", "name") and type(value) is str and "${{" in value):
            return
        path = self.input_path(source, name)
        if shape in ("text", "name"):
            self.check_text(value, path, name, may_be_empty=shape == "text")
        elif shape == "bool":
            if type(value) is not bool:
                message = f"{name} must be true, false or a template"
                self.report("schema_violation", message, path, help="${{ inputs.NAME == 1 }}")
        elif shape == "texts":
            if type(value) is not list:
                self.report("schema_violation", f"{name} must be a list of texts", path)
                return
            for index, item in enumerate(value):
                self.check_text(item, (*path, index), f"{name}[{index}]")
        elif type(value) is not dict:
            self.report("schema_violation", f"{name} must be a mapping of texts", path)
        else:
            for key, item in value.items():
                self.check_text(item, (*path, key), f"{name}.{key}")

    def check_text(self, value: Any, path: Path, name: str, *, may_be_empty: bool = True) -> None:
        if type(value) is not str:
            hint = f'quote it: "{canonical(value)}"' if isinstance(value, (bool, int, float)) else None
            self.report("schema_violation", f"{name} must be text", path, help=hint)
        elif not value and not may_be_empty:
            self.report("schema_violation", f"{name} must not be empty", path)

    # ---------------------------------------------------------------------- references

    def references(self, value: Any, path: Path, source: _Source | None, ids: set[str]) -> frozenset[Ref]:
        """What a value reads, after checking its templates."""
        if not value:
            return frozenset()
        try:
            found = compile_value(value).references
        except TemplateError:
            self.locate_problems(value, path)
            return frozenset()
        self.check_task_references(found, value, path, source, ids)
        return found

    def condition(self, text: str, path: Path, source: _Source, ids: set[str]) -> frozenset[Ref]:
        try:
            found = compile_condition(text).references
        except TemplateError as error:
            self.report("invalid_template", error.message, path)
            return frozenset()
        self.check_task_references(found, text, path, source, ids, condition=True)
        return found

    def locate_problems(self, value: Any, path: Path) -> None:
        for place, text in _strings(value, path):
            try:
                compile_value(text)
            except TemplateError as error:
                self.report("invalid_template", error.message, place)

    def check_task_references(
        self,
        found: frozenset[Ref],
        value: Any,
        path: Path,
        source: _Source | None,
        ids: set[str],
        *,
        condition: bool = False,
    ) -> None:
        for reference in found:
            if reference.root != "tasks":
                continue
            name = reference.path[0]
            if name not in ids:
                for place in [path] if condition else _reading(value, path, name):
                    self.missing("task", name, ids, place)
            elif source is not None and name not in source.needed:
                for place in [path] if condition else _reading(value, path, name):
                    message = f"{source.task.id!r} reads the output of {name!r} without needing it"
                    self.report("invalid_template", message, place, help=f"add {name} to needs")

    def check_outputs(self, ids: set[str]) -> None:
        self.references(self.spec.outputs, ("spec", "outputs"), None, ids)

    # ---------------------------------------------------------------------- memory

    def memory_keys(self, source: _Source, references: set[Ref]) -> None:
        """The keys that a task may write and read (contract 2.8, architecture 5)."""
        declared = source.task.memory_writes
        place: Path = (*source.path, "memoryWrites")
        key = source.input.get("key")
        literal = key if type(key) is str and "${{" not in key else None
        reads = {reference.path[0] for reference in references if reference.root == "memory"}
        everything = False
        if source.action_kind in MEMORY_WRITERS:
            if declared is not None:
                source.memory_writes = tuple(declared)
                if literal is not None and literal not in declared:
                    message = f"the key {literal!r} is written but not in memoryWrites"
                    self.report("schema_violation", message, place, help=f"add {literal}, or leave memoryWrites out")
            elif literal is not None:
                source.memory_writes = (literal,)
            elif type(key) is str:
                message = "a templated key needs memoryWrites with every key that it can give"
                self.report("schema_violation", message, self.input_path(source, "key"))
            reads.update(source.memory_writes)
        elif declared is not None:
            message = f"memoryWrites stands only on tasks that use {' or '.join(sorted(MEMORY_WRITERS))}"
            self.report("schema_violation", message, place, key=True)
        elif source.action_kind == "builtin.memory.read":
            if literal is not None:
                reads.add(literal)
            else:
                everything = True
        source.memory_reads = None if everything else tuple(sorted(reads))

    def check_memory_conflicts(self, ordered: list[_Node], by_id: dict[str, _Node]) -> None:
        """Two writers of one key must be ordered by needs. In compiled order it is enough to look at
        neighbours.
        """
        last: dict[str, _Node] = {}
        for node in ordered:
            if node.aggregate:
                continue
            for key in node.source.memory_writes:
                earlier = last.get(key)
                last[key] = node
                if earlier is not None and not _reaches(node, earlier, by_id):
                    self.report(
                        "schema_violation",
                        f"{earlier.id!r} and {node.id!r} both write the memory key {key!r}, "
                        "and neither comes after the other",
                        ("spec", "runtime", "maxConcurrency"),
                        help="order them with needs, or set maxConcurrency: 1",
                    )

    # ---------------------------------------------------------------------- order and plan

    def order(self, nodes: list[_Node], by_id: dict[str, _Node]) -> list[_Node]:
        """Topological; of the tasks that are ready the one declared first (contract 2.2)."""
        declared = {node.id: index for index, node in enumerate(nodes)}
        waiting = [len(node.needs) for node in nodes]
        dependents: list[list[int]] = [[] for _ in nodes]
        for index, node in enumerate(nodes):
            for need in node.needs:
                dependents[declared[need]].append(index)
        ready = [index for index, count in enumerate(waiting) if count == 0]
        heapify(ready)
        ordered: list[_Node] = []
        while ready:
            index = heappop(ready)
            node = nodes[index]
            node.position = len(ordered)
            ordered.append(node)
            for dependent in dependents[index]:
                waiting[dependent] -= 1
                if waiting[dependent] == 0:
                    heappush(ready, dependent)
        if len(ordered) < len(nodes):
            left = [node for node in nodes if node.position < 0]
            names = " -> ".join(node.id for node in left[:1000])
            message = f"tasks need one another in a circle: {names}"
            self.report("dependency_cycle", message, (*left[0].source.path, "needs"))
            self.stop_if_wrong()
        return ordered

    def memory_after(self, ordered: list[_Node], by_id: dict[str, _Node]) -> list[tuple[int, ...]]:
        last: dict[str, int] = {}
        every: tuple[int, ...] | None = None
        result: list[tuple[int, ...]] = []
        for node in ordered:
            after: tuple[int, ...] = ()
            if not node.aggregate:
                source = node.source
                if source.memory_reads is None:
                    if every is None:
                        every = tuple(sorted(set(last.values())))
                    after = every
                elif source.memory_reads and last:
                    # A writer reads its own keys, so its reads cover the previous writers as well.
                    after = tuple(sorted({last[key] for key in source.memory_reads if key in last}))
                if after and node.needs:
                    direct = {by_id[need].position for need in node.needs}
                    if not direct.isdisjoint(after):
                        after = tuple(position for position in after if position not in direct)
                if source.memory_writes:
                    every = None
                    for key in source.memory_writes:
                        last[key] = node.position
            result.append(after)
        return result

    def plan(self, ordered: list[_Node], by_id: dict[str, _Node]) -> Plan:
        after = self.memory_after(ordered, by_id)
        tasks = {node.id: self.compiled(node, after[node.position]) for node in ordered}
        workflow = self.workflow
        if self.given:
            workflow = {**workflow, "spec": {**workflow["spec"], "vars": self.vars}}
        spec = workflow["spec"]
        used = sorted({node.source.action_name for node in ordered})
        kinds = sorted({str(node.source.action_kind) for node in ordered})
        requirements: dict[str, Any] = {
            "providers": [],
            "tools": [],
            "effects": [kind for kind in kinds if _KINDS[kind].effect_class is not None],
            "processes": sorted({command for name in used if (command := self.spec.actions[name].command)}),
        }
        workflow_digest = hex_digest(canonical(workflow))
        name = self.document.model.metadata.name
        order = tuple(tasks)
        concurrency = self.spec.runtime.max_concurrency
        children = sum(1 for node in ordered if node.bindings is not None)
        return Plan(
            format_version=PLAN_FORMAT,
            workflow_name=name,
            workflow_digest=workflow_digest,
            plan_digest=_plan_digest(name, workflow_digest, order, concurrency, tasks, requirements),
            order=order,
            max_concurrency=concurrency,
            max_deliveries=self.spec.runtime.max_deliveries,
            tasks=tasks,
            predictability=max((node.source.predictability for node in ordered), key=_PREDICTABILITY.index),
            requirements=requirements,
            budget={
                "limits": spec["runtime"]["budgets"],
                "pricing": spec["runtime"]["pricing"],
                "plannedTasks": len(tasks),
                "plannedExpansionItems": children,
                "plannedLoopIterations": 0,
            },
            actions={name: spec["actions"][name] for name in used},
            policy=spec["policy"],
            memory=spec["memory"]["working"],
            inputs=spec["inputs"],
            vars=spec["vars"],
            outputs=spec["outputs"],
            show_diff=self.spec.output.show_diff,
        )

    def compiled(self, node: _Node, after: tuple[int, ...]) -> CompiledTask:
        source, task = node.source, node.source.task
        if node.aggregate:
            assert source.fanout is not None
            return CompiledTask(
                node.id, node.position, "aggregate", source.fanout.kind, None, node.needs,
                timeout_seconds=self.spec.runtime.default_timeout_seconds, failure=task.failure,
            )  # fmt: skip
        bindings, fanout = node.bindings, source.fanout
        expansion, variables = None, source.vars
        if bindings is not None:
            expansion = Expansion(task.id, node.child_index, bindings)
            variables = {**source.vars, **bindings} if source.vars else bindings
        return CompiledTask(
            node.id,
            node.position,
            "action",
            source.action_name,
            source.action_kind,
            node.needs,
            expansion,
            source.memory_writes,
            source.memory_reads,
            after,
            task.when,
            variables,
            fanout.data_names if fanout is not None else (),
            source.input,
            source.retry,
            source.timeout_seconds,
            task.failure,
            task.output_schema,
            source.predictability,
        )


# ---------------------------------------------------------------------- helpers


def _retry(retry: Retry) -> RetryPolicy:
    return RetryPolicy(retry.max_attempts, retry.backoff_ms, retry.backoff_multiplier, retry.max_backoff_ms)


def _strings(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if type(value) is str:
        yield path, value
    elif type(value) is dict:
        for key, item in value.items():
            yield from _strings(item, (*path, key))
    elif type(value) is list:
        for index, item in enumerate(value):
            yield from _strings(item, (*path, index))


def _reading(value: Any, path: Path, task_id: str) -> Iterator[Path]:
    """The places of the strings that read a task."""
    for place, text in _strings(value, path):
        if any(item.root == "tasks" and item.path[0] == task_id for item in compile_value(text).references):
            yield place


def _reaches(later: _Node, earlier: _Node, by_id: dict[str, _Node]) -> bool:
    """Whether `later` needs `earlier`, directly or not. Looks only at what lies between the two in compiled
    order.
    """
    goal, floor = earlier.id, earlier.position
    seen: set[str] = set()
    pending = [later]
    while pending:
        for need in pending.pop().needs:
            if need == goal:
                return True
            node = by_id[need]
            if node.position > floor and need not in seen:
                seen.add(need)
                pending.append(node)
    return False


def _schema_problem(schema: dict[str, Any]) -> str | None:
    """Why a schema does not compile, or None. References to other documents are never followed."""
    import jsonschema_rs

    def refuse(uri: str) -> Any:
        raise ValueError(f"{uri} is outside this document")

    try:
        jsonschema_rs.Draft202012Validator(schema, retriever=refuse)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        return str(error).split("\n", 1)[0]
    return None


def _plan_digest(
    name: str,
    workflow_digest: str,
    order: Sequence[str],
    max_concurrency: int,
    tasks: dict[str, CompiledTask],
    requirements: dict[str, Any],
) -> str:
    """Bare hex over the canonical JSON of the six parts (contract 2.11), hashed piece by piece."""
    digest = sha256()
    head = f"[{canonical(name)},{canonical(workflow_digest)},{canonical(list(order))},{max_concurrency},"
    digest.update(head.encode("utf-8"))
    for chunk in tasks_chunks(tasks):
        digest.update(chunk.encode("utf-8"))
    digest.update(f",{canonical(requirements)}]".encode())
    return digest.hexdigest()
