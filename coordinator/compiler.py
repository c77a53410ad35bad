"""From a document to a frozen plan (contract section 2). Pure: reads no file, no clock, no randomness.

Everything that can be known to be wrong is found here, before a run exists, and reported together: a
feature that this version does not have is refused by name, never ignored. The phases follow contract 2.1:
an error of expansion ends the compilation, errors of the task checks are collected, a cycle is reported
alone, then order and memory are settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from heapq import heapify, heappop, heappush
from typing import Any

from agentctl.store.canonical import JsonError, canonical, check_value, hex_digest
from agentctl.store.embedding import LOCAL_HASH
from agentctl.store.memory_entries import DEFAULT_NAMESPACE

from .capabilities import agent_problems, embedding_problem
from .definition import PROCESS_KINDS, Action, Compensate, LoadedDocument, Retry, Route, Task, Tool
from .diagnostics import Diagnostic, DocumentError, Path, did_you_mean
from .expansion import ExpansionError, Fanout, expansion_id, loop_guard, output_of, plan_foreach, plan_loop, plan_matrix
from .expressions import (
    Ref,
    Scope,
    TemplateError,
    compile_condition,
    compile_value,
    has_template,
    is_exact_template,
)
from .kinds import EFFECTS, MUTATING, may_mutate
from .long_term_input import embeds, long_term_problems
from .peers import (
    address_problems,
    asked_by,
    call_problems,
    declared_peers,
    embedding_provider,
    version_problem,
    with_peers,
)
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
from .plan_size import problem, task_size
from .readings import NOBODY, Reader, Readings, strings_in
from .routing import destinations, route_as_json, route_problems
from .subworkflows import Declared, Namespace, Role, flatten, uncalled
from .tools import EFFECT_OF_TOOL, input_problems, tool_problems
from .variables import instructions_of, of_document, recorded_workflow, task_variables, workflow_variables
from .yaml_document import collector_paused

__all__ = ["compile_workflow", "merge_inputs", "plan_as_json"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the compiler knows of an action kind (contract section 3)."""

    predictability: str
    fields: Mapping[str, str] | None = None
    required: tuple[str, ...] = ()


_FULLY, _PARTLY, _RUN = "fully_predictable", "partially_predictable", "requires_execution"
_PREDICTABILITY = (_FULLY, _PARTLY, _RUN)

_KINDS: dict[str, _Kind] = {
    "builtin.assign": _Kind(_FULLY),
    "builtin.assert": _Kind(_FULLY, {"that": "bool", "message": "text"}, ("that",)),
    "builtin.memory.read": _Kind(_FULLY, {"key": "name"}, ("key",)),
    "builtin.memory.write": _Kind(_FULLY, {"key": "name", "value": "any"}, ("key",)),
    "builtin.long_term_memory.read": _Kind(_RUN, {"key": "name", "namespace": "name"}, ("key",)),
    "builtin.long_term_memory.search": _Kind(
        _RUN,
        {"query": "any", "mode": "any", "limit": "any", "filters": "any", "namespace": "name"},
        ("query",),
    ),
    "builtin.long_term_memory.write": _Kind(
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
    "builtin.long_term_memory.promote": _Kind(_RUN, {"key": "name", "value": "any"}, ("key",)),
    "builtin.read": _Kind(_PARTLY, {"path": "name"}, ("path",)),
    "builtin.write": _Kind(_PARTLY, {"path": "name", "content": "text"}, ("path", "content")),
    "builtin.shell.exec": _Kind(
        _RUN,
        {"args": "texts", "stdin": "text", "env": "text map", "cwd": "name", "artifacts": "texts"},
    ),
    "extension.process": _Kind(_RUN),
    "mcp.call": _Kind(_RUN, {"server": "name", "tool": "name", "arguments": "any"}, ("server", "tool")),
    "a2a.delegate": _Kind(
        _RUN, {"peer": "name", "messageId": "name", "message": "name"}, ("peer", "messageId", "message")
    ),
}
"""The kinds that run; every other kind of the contract is refused by name where a task uses it."""

MAX_SECONDS = 86_400
"""Longest limit of a task (contract 1.7)."""

_HINTS = 20
"""Findings that come with a hint."""

_OWN_NAMES = {
    "builtin.memory.read": "key",
    "builtin.memory.write": "key",
    "builtin.long_term_memory.promote": "key",
    "builtin.long_term_memory.read": "namespace",
    "builtin.long_term_memory.search": "namespace",
    "builtin.long_term_memory.write": "namespace",
}
"""What of an action's input is a name of its own in each call of a sub-workflow."""

_OPEN_KINDS = frozenset({"builtin.assign", "builtin.assert"})
"""Kinds whose input may have further fields."""


def merge_inputs(spec_inputs: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Run inputs over the document's defaults, key by key (contract 1.3)."""
    return {**spec_inputs, **(given or {})}


def compile_workflow(
    document: LoadedDocument,
    *,
    inputs: Mapping[str, Any] | None = None,
    warnings: list[Diagnostic] | None = None,
) -> Plan:
    """Compile a document. Raises `DocumentError` with every finding; what is only suspicious goes to `warnings`.

    `inputs` are the run's inputs (a fan-out may take its items from them). Variables come from what was captured
    for the document.
    """
    with collector_paused():
        compiler = _Compiler(document, inputs)
        plan = compiler.compile()
    if warnings is not None:
        warnings.extend(compiler.readings.warnings())
    return plan


@dataclass(slots=True)
class _Source:
    """What all compiled tasks of one declared task share.

    `guards` are the routers that choose it, with the destination that stands for it; `guard` is the condition of a
    loop, and `decision_reads` the memory keys that its last decision reads.
    """

    index: int
    task: Task
    path: Path
    needs: tuple[str, ...]
    vars: dict[str, Any]
    data_vars: tuple[str, ...] = ()
    needed: frozenset[str] = frozenset()
    role: Role = "task"
    namespace: Namespace | None = None
    workflow: str = ""
    given: frozenset[str] = frozenset()
    guards: list[tuple[str, str]] = field(default_factory=list)
    guard: str | None = None
    fanout: Fanout | None = None
    child_ids: tuple[str, ...] = ()
    action_name: str = ""
    action_kind: str | None = None
    agent_name: str = ""
    instructions: str | None = None
    input: dict[str, Any] = field(default_factory=dict)
    memory_writes: tuple[str, ...] = ()
    memory_reads: tuple[str, ...] | None = ()
    decision_reads: tuple[str, ...] = ()
    timeout_seconds: int = 120
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    predictability: str = _FULLY
    compensate: dict[str, Any] | None = None


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
    def __init__(self, document: LoadedDocument, inputs: Mapping[str, Any] | None) -> None:
        self.document = document
        self.spec = document.model.spec
        self.workflow = document.workflow
        self.captured = of_document(document)
        self.given = self.captured.given
        self.found: dict[tuple[Any, ...], Diagnostic] = {}
        self.schemas_seen: set[int] = set()
        self.returned: set[str] = set()
        self._check_inputs(inputs)
        self.inputs = merge_inputs(self.spec.inputs, inputs)
        self.vars = workflow_variables(document)
        self.action_references: dict[tuple[str, Namespace | None], dict[str, frozenset[Ref]]] = {}
        self.static: dict[str, dict[str, Any]] = {}
        self.asked: dict[str, set[str]] = {}
        self.declared: list[Declared] = []
        self.calls: dict[str, Path] = {}
        self.call_outputs: dict[str, str] = {}
        self.every_id: tuple[set[str], frozenset[str]] = (set(), frozenset())
        self.readings = Readings(document.source, self.inputs, self.vars)

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

    @staticmethod
    def _check_inputs(values: Mapping[str, Any] | None) -> None:
        try:
            check_value(dict(values or {}))
        except JsonError as error:
            raise DocumentError([Diagnostic("schema_violation", f"inputs: {error.message}")]) from None

    # ---------------------------------------------------------------------- phases

    def compile(self) -> Plan:
        self.declared = flatten(self.spec, self.report, self.document.source.locate)
        self.stop_if_wrong()
        self.call_outputs = _call_outputs(self.declared)
        sources = [self.source(index, item) for index, item in enumerate(self.declared)]
        self.stop_if_wrong()
        self.check_features()
        self.check_declarations()
        ids = self.unique_ids(sources)
        for source in sources:
            self.check_task(source, ids)
        self.check_routes(sources, ids)
        self.check_outputs(ids)
        self.check_budgets(sources)
        never_called = [self.check_uncalled(items) for _, items in uncalled(self.spec, self.declared)]
        self.stop_if_wrong()
        for items in never_called:
            self.order(list(self.nodes(items)), {})
        nodes = list(self.nodes(sources))
        by_id = {node.id: node for node in nodes}
        ordered = self.order(nodes, by_id)
        if self.spec.runtime.max_concurrency > 1:
            self.check_memory_conflicts(ordered, by_id)
            self.stop_if_wrong()
        return self.plan(ordered, by_id)

    def source(self, index: int, item: Declared, *, expand: bool = True) -> _Source:
        """The declared task with its expansion. Findings here belong to phase 2."""
        task, path = item.task, item.path
        own, data = task_variables(self.document, self.captured, path, task)
        needs = tuple(dict.fromkeys(task.needs)) if len(task.needs) > 1 else tuple(task.needs)
        source = _Source(
            index, task, path, needs, own, data, frozenset(needs), item.role, item.namespace, item.workflow, item.given
        )
        if task.loop is not None:
            source.guard = loop_guard(task.loop.while_)
        if not expand:
            return source
        if item.role == "subworkflow_input":
            self.static[task.id] = self.known_inputs(task.with_)
            self.readings.boundary(task.id, task.with_)
        if task.foreach is None and task.matrix is None and task.loop is None:
            return source
        plain = {name: value for name, value in own.items() if name in data or not has_template(value)}
        scope = Scope(inputs=self.inputs, vars={**self.vars, **plain}, tasks=self.static)
        try:
            if task.foreach is not None:
                source.fanout = plan_foreach(task.foreach, scope)
            elif task.matrix is not None:
                source.fanout = plan_matrix(task.matrix, scope)
            elif task.loop is not None:
                source.fanout = plan_loop(task.loop, task.id)
        except ExpansionError as error:
            message = error.message + self.in_call(item.namespace)
            if item.namespace is not None:
                message = item.namespace.as_written(message)
            self.report(error.code, message, (*path, *error.path), help=error.help)
            return source
        assert source.fanout is not None
        of_task = {*task.vars, *self.captured.of_files(path), *self.given}
        for name in source.fanout.names:
            if name in of_task:
                place = (*path, "vars", name) if name in task.vars else (*path, source.fanout.kind)
                self.report(
                    "schema_violation",
                    f"the variable {name} is bound by {source.fanout.kind}",
                    place,
                    key=True,
                )
        # What an expansion binds is of the task, so it wins over what the agent has under that name.
        source.vars = {name: value for name, value in own.items() if name not in source.fanout.names}
        source.data_vars = tuple(name for name in data if name not in source.fanout.names)
        return source

    def in_call(self, namespace: Namespace | None) -> str:
        """Which call a finding about a sub-workflow is due to: each of several calls is told, with its place."""
        if namespace is None:
            return ""
        if not self.calls:
            self.calls = {item.task.id: item.path for item in self.declared if item.role == "subworkflow_input"}
        line, column = self.document.source.locate(self.calls[namespace.boundary])
        return f", in the call {namespace.call!r} at {line}:{column}"

    def known_inputs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those inputs of a call that can be known before the run: a fan-out inside may take its items from them."""
        scope = Scope(inputs=self.inputs, vars=self.vars, tasks=self.static)
        known: dict[str, Any] = {}
        for name, value in values.items():
            try:
                renderer = compile_value(value)
                if all(
                    item.root in ("inputs", "vars") or (item.root == "tasks" and item.path[0] in self.static)
                    for item in renderer.references
                ):
                    known[name] = renderer(scope)
            except TemplateError:
                continue
        return known

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
        self.check_size(sources)
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

    def check_size(self, sources: list[_Source]) -> None:
        """Refuse a plan that would be too large, before a child of it is made."""
        sizes = [
            task_size(source.task, source.vars, self.defaults_by_name(source.task), source.fanout) for source in sources
        ]
        message = problem(sizes)
        if message is not None:
            largest = max(range(len(sizes)), key=sizes.__getitem__)
            hint = "let tasks read long texts from files, or have fewer children; most of it comes from this task"
            self.report("schema_violation", message, sources[largest].path, help=hint)
            self.stop_if_wrong()

    def defaults_by_name(self, task: Task) -> dict[str, Any]:
        """The `with` of the action that a task names, if there is one."""
        action = self.spec.actions.get(task.uses.removeprefix("action:"))
        return {} if action is None else action.with_

    @staticmethod
    def nodes(sources: list[_Source]) -> Iterator[_Node]:
        for source in sources:
            if source.fanout is None:
                yield _Node(source.task.id, source, source.needs)
                continue
            chained = source.fanout.kind == "loop"
            for index, bindings in enumerate(source.fanout.bindings()):
                needs = (*source.needs, source.child_ids[index - 1]) if chained and index else source.needs
                yield _Node(source.child_ids[index], source, needs, bindings, index)
            yield _Node(source.task.id, source, source.child_ids, aggregate=True)

    # ---------------------------------------------------------------------- features

    def check_uncalled(self, items: list[Declared]) -> list[_Source]:
        """The tasks of a sub-workflow that nothing calls, held to what holds for every call; its inputs are unknown."""
        self.call_outputs = _call_outputs(items)
        sources = [self.source(index, item, expand=False) for index, item in enumerate(items)]
        ids = {source.task.id for source in sources}
        for source in sources:
            self.check_task(source, ids)
        self.check_routes(sources, ids)
        return sources

    def check_features(self) -> None:
        """Refuse by name what this version does not have, wherever a document relies on it."""
        spec = self.spec
        if spec.packs:
            self.unsupported("packs", ("spec", "packs"))

    def check_budgets(self, sources: list[_Source]) -> None:
        """What is known before anything runs must fit; equal is fine (contract 2.10)."""
        budgets = self.spec.runtime.budgets
        children, iterations = _planned(sources)
        total = len(sources) + children + iterations
        for name, limit, count, what in (
            ("maxTasks", budgets.max_tasks, total, "compiled tasks, aggregates included"),
            ("maxExpansionItems", budgets.max_expansion_items, children, "children of expansions"),
            ("maxLoopIterations", budgets.max_loop_iterations, iterations, "declared loop iterations"),
        ):
            if limit is not None and count > limit:
                message = f"the workflow has {count} {what}; {name} allows {limit}"
                place = ("spec", "runtime", "budgets", name)
                self.report("schema_violation", message, place, help=f"raise {name}, or do less")

    def check_declarations(self) -> None:
        """References, addresses and schemas of what is declared, used or not."""
        spec = self.spec
        for where, message, hint in address_problems(spec):
            self.report("schema_violation", message, where, help=hint)
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
                prices = spec.runtime.pricing.models if spec.runtime.pricing is not None else {}
                priced = f"{agent.provider}/{agent.model}" in prices
                for place, message, remedy in agent_problems(agent, provider.kind, priced=priced):
                    self.report("unsupported_capability", message, (*path, *place), help=remedy)
        for name, item in spec.tools.items():
            path = ("spec", "tools", name)
            if item.action is not None and item.action not in spec.actions:
                self.missing("action", item.action, spec.actions, (*path, "action"))
            self.check_schema(item.input_schema, (*path, "inputSchema"))
            self.check_schema(item.output_schema, (*path, "outputSchema"))
            self.check_tool(item, path)
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

    def check_tool(self, tool: Tool, path: Path) -> None:
        """A tool of kind action against its action."""
        action = self.spec.actions.get(tool.action or "")
        if action is None:
            return
        found = list(tool_problems(tool, action))
        facts = _KINDS.get(action.kind)
        if facts is not None and not found:
            found = list(input_problems(tool, action, facts.fields, facts.required))
        for place, message, hint in found:
            self.report("schema_violation", message, (*path, *place), help=hint)

    def missing(self, what: str, name: str, known: Mapping[str, Any] | set[str], path: Sequence[str | int]) -> None:
        # Likeness is dear among thousands of names, and nobody reads hints by the hundred.
        hint = None
        if len(self.found) < _HINTS:
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
        source.timeout_seconds = self.spec.runtime.default_timeout_seconds
        if source.role == "subworkflow_aggregate":
            self.check_boundary(source, ids)
            return
        # The needs of a task in a sub-workflow were checked there, and its boundary was added to them.
        for index, need in enumerate(task.needs if source.namespace is None else ()):
            if need not in ids:
                self.missing("task", need, ids, (*path, "needs", index))
        if source.role == "subworkflow_input":
            self.check_boundary(source, ids)
            return
        if task.compensate is not None:
            self.check_compensation(source, task.compensate, ids)
        self.check_schema(task.output_schema, (*path, "outputSchema"))

        rendered = source.vars
        if source.data_vars:
            rendered = {name: value for name, value in rendered.items() if name not in source.data_vars}
        references = set(self.references(rendered, (*path, "vars"), source, ids))
        if source.fanout is not None:
            for place, items in source.fanout.templates:
                references |= self.references(items, (*path, *place), source, ids)
        else:
            # Not expanded, as nothing calls it: what its children would read is looked at by itself.
            for place, items in _unexpanded(task):
                self.references(items, (*path, *place), source, ids)
        if task.when is not None:
            references |= self.condition(task.when, (*path, "when"), source, ids)
        if task.loop is not None:
            references |= self.check_loop(source, ids, references)
        references |= self.references(task.with_, (*path, "with"), source, ids)

        if task.route is not None:
            self.check_router(task.route, source, ids, references)
            return
        kind, _, name = task.uses.partition(":")
        if kind == "agent":
            self.check_agent(source, name, ids, references)
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
        defaults = self.defaults_of(source)
        source.input = {**defaults, **task.with_} if defaults and task.with_ else task.with_ or defaults
        source.timeout_seconds = self.limit_of(action, task.timeout_seconds, source.timeout_seconds)
        references |= self.action_defaults(source, ids)
        self.check_use(source, facts)
        if self.own_memory(source):
            self.memory_keys(source, references)

    @staticmethod
    def limit_of(action: Action, own: int | None, usual: int) -> int:
        """Seconds that a use of an action may take: what it says itself, or else `usual`.

        That holds for every kind (contract table, row 10); a process or a call has the smaller of it and its action's.
        """
        limit = action.timeout_seconds if action.kind in PROCESS_KINDS or asked_by(action.kind) else None
        return min((seconds for seconds in (own, limit) if seconds is not None), default=usual)

    def check_use(self, source: _Source, facts: _Kind) -> None:
        """What holds for every use of an action: by a task, or to undo one."""
        kind = self.spec.actions[source.action_name].kind
        self.check_action_features(source.action_name)
        self.check_input(source, facts)
        for field_name, message in (*long_term_problems(kind, source.input), *call_problems(kind, source.input)):
            self.report("schema_violation", message, self.input_path(source, field_name))
        self.check_extension_input(source)
        self.check_peers(source)
        self.check_embedding(kind)

    def check_embedding(self, kind: str) -> None:
        """The provider that embeds has to be able to; a kind that needs no embedding does not mind."""
        long_term = self.spec.memory.long_term
        if long_term is None or not embeds(kind) or long_term.embedding.provider == LOCAL_HASH:
            return
        provider = self.spec.providers.get(long_term.embedding.provider)
        problem = None if provider is None else embedding_problem(provider.kind, long_term.embedding.model)
        if problem is not None:
            field_name, message, hint = problem
            place = ("spec", "memory", "longTerm", "embedding", field_name)
            code = "unsupported_capability" if field_name == "provider" else "schema_violation"
            self.report(code, message, place, help=hint)

    def check_extension_input(self, source: _Source) -> None:
        """The input of an extension holds to its contract here already, where all of it is known."""
        schema = self.spec.actions[source.action_name].input_schema
        if source.action_kind != "extension.process" or has_template(source.input) or _schema_problem(schema):
            return
        for error in _validator(schema).iter_errors(source.input):
            message = f"the input does not fit inputSchema of {source.action_name!r}: {error.message[:300]}"
            place = tuple(error.instance_path)
            path = self.input_path(source, str(place[0]), *place[1:]) if place else (*source.path, "with")
            self.report("schema_violation", message, path)

    def check_peers(self, source: _Source) -> None:
        """The servers or peers that a task may ask: the one that it names, or all when only the run knows the name."""
        asked = asked_by(source.action_kind)
        if asked is None or source.action_kind is None:
            return
        field_name, place = asked
        declared = declared_peers(self.spec, source.action_kind)
        name = source.input.get(field_name)
        if type(name) is not str or not name:
            return  # reported with the other fields
        if has_template(name):
            names = set(declared)
        elif name in declared:
            names = {name}
        else:
            self.missing(
                "MCP server" if place == "mcpServers" else "A2A peer",
                name,
                declared,
                self.input_path(source, field_name),
            )
            return
        self.check_asked(source.action_name, names)

    def check_asked(self, action_name: str, names: set[str]) -> None:
        """Take note of the servers or peers that an action may ask, and check those that are new."""
        known = self.asked.setdefault(action_name, set())
        for each in sorted(names - known):
            problem = version_problem(self.spec, self.spec.actions[action_name].kind, each)
            if problem is not None:
                path, message, hint = problem
                self.report("unsupported_capability", message, path, help=hint)
        known |= names

    def check_agent(self, source: _Source, name: str, ids: set[str], references: set[Ref]) -> None:
        """A task that a model carries out. What it reads is in `references`, but for the instructions of its agent."""
        agent = self.spec.agents.get(name)
        if agent is None:
            self.missing("agent", name, self.spec.agents, (*source.path, "uses"))
            return
        source.agent_name, source.predictability, source.input = name, _RUN, source.task.with_
        tools = [(tool, self.spec.tools[tool]) for tool in agent.tools if tool in self.spec.tools]
        calls = max((tool.timeout_seconds for _, tool in tools), default=0)
        # Without a limit of its own a task may take what its turns and calls may take together.
        longest = min(MAX_SECONDS, agent.max_turns * agent.timeout_seconds + agent.max_tool_calls * calls)
        source.timeout_seconds = source.task.timeout_seconds or longest
        text = instructions_of(self.document, name)
        if has_template(text):
            own = text if source.namespace is None else source.namespace.value(text)
            place = "instructions" if agent.instructions is not None else "instructionsFile"
            references |= self.references(own, ("spec", "agents", name, place), source, ids)
            source.instructions = own if own != text else None
        for tool_name, tool in tools:
            action = self.spec.actions.get(tool.action or "")
            if tool.action is None or action is None:
                continue
            if action.kind not in _KINDS:
                self.unsupported(f"an action of kind {action.kind}", ("spec", "tools", tool_name, "action"))
                continue
            self.check_action_features(tool.action)
            self.check_embedding(action.kind)
            asked = asked_by(action.kind)
            if asked is not None:
                # The model chooses, unless the action itself names one.
                declared = declared_peers(self.spec, action.kind)
                fixed = action.with_.get(asked[0])
                self.check_asked(tool.action, {fixed} if type(fixed) is str and fixed in declared else set(declared))
            if source.namespace is not None and action.kind in _OWN_NAMES:
                self.unsupported("a tool for long-term memory in a sub-workflow", (*source.path, "uses"))
        self.memory_keys(source, references)

    def check_compensation(self, source: _Source, declared: Compensate, ids: set[str]) -> None:
        """What undoes a task has an effect, and so has the task (contract 2.9). It may read whatever the run has."""
        path: Path = (*source.path, "compensate")
        name = declared.uses.removeprefix("action:")
        if not may_mutate(self.spec, source.task.uses):
            message = f"{source.task.uses} changes nothing that could be undone"
            hint = "leave compensate out here, or put it on the task that changes something"
            self.report("unsupported_capability", message, path, help=hint, key=True)
            return
        action = self.spec.actions.get(name)
        if action is None:
            self.missing("action", name, self.spec.actions, (*path, "uses"))
            return
        facts = _KINDS.get(action.kind)
        if action.kind not in MUTATING:
            message = f"an action of kind {action.kind} changes nothing, so it undoes nothing"
            hint = f"use an action that changes something: {', '.join(sorted(MUTATING))}"
            self.report("unsupported_capability", message, (*path, "uses"), help=hint)
            return
        if facts is None:
            self.unsupported(f"an action of kind {action.kind}", (*path, "uses"))
            return
        if self.every_id[0] is not ids:
            self.every_id = (ids, frozenset(ids))
        # As a task of its own with the names of this one, which all tasks have ended before.
        task = source.task.model_copy(
            update={"id": f"{source.task.id}.compensate", "uses": declared.uses, "with_": declared.with_}
        )
        own = replace(source, task=task, path=path, needed=self.every_id[1], action_name=name, action_kind=action.kind)
        defaults = self.defaults_of(own)
        own.input = {**defaults, **declared.with_}
        self.references(declared.with_, (*path, "with"), own, ids)
        self.action_defaults(own, ids)
        self.check_use(own, facts)
        self.own_memory(own)
        source.compensate = {
            "uses": name,
            "actionKind": action.kind,
            "input": own.input,
            "retry": _retry(declared.retry).to_json(),
            "timeoutSeconds": self.limit_of(
                action, declared.timeout_seconds, self.spec.runtime.default_timeout_seconds
            ),
        }

    def check_action_features(self, name: str) -> None:
        action = self.spec.actions[name]
        path: Path = ("spec", "actions", name)
        for index, pattern in enumerate(action.artifacts):
            self.check_artifact(pattern, (*path, "artifacts", index))
        if action.isolation == "container":
            self.unsupported("isolation: container", (*path, "isolation"))

    def check_artifact(self, pattern: str, path: Path) -> None:
        """A path or glob of `artifacts`, as far as it is literal (contract 11.2)."""
        if ".." in pattern.split("/"):
            self.report("policy_denied", f"the path {pattern!r} has a '..' component", path)
        elif not self.spec.policy.writable_roots:
            hint = "name the folder that the command writes to"
            message = "artifacts come from under policy.writableRoots, and there are none"
            self.report("policy_denied", message, path, help=hint)

    def action_defaults(self, source: _Source, ids: set[str]) -> set[Ref]:
        """What the action's own `with` reads, as far as the task does not override it."""
        name = source.action_name
        defaults = self.defaults_of(source)
        if not defaults:
            return set()
        known = self.action_references.get((name, source.namespace))
        if known is None:
            known = self.action_references[name, source.namespace] = {}
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

    def defaults_of(self, source: _Source) -> dict[str, Any]:
        """The `with` of the action that a task uses, as it reads where the task is."""
        defaults = self.spec.actions[source.action_name].with_
        if source.namespace is None or not has_template(defaults):
            return defaults
        renamed: dict[str, Any] = source.namespace.value(defaults)
        return renamed

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
        """The type of a literal input field. What one template gives is judged at run time; beside text it is text."""
        if shape == "any" or (shape not in ("text", "name") and type(value) is str and is_exact_template(value)):
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
                hint = f'write each one by itself: {name}: ["first", "second"]' if type(value) is str else None
                self.report("schema_violation", f"{name} must be a list of texts", path, help=hint)
                return
            for index, item in enumerate(value):
                self.check_text(item, (*path, index), f"{name}[{index}]", may_be_empty=name != "artifacts")
                if name == "artifacts" and type(item) is str and item:
                    self.check_artifact(item, (*path, index))
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

    # ---------------------------------------------------------------------- control flow

    def check_boundary(self, source: _Source, ids: set[str]) -> None:
        """What a boundary of a sub-workflow renders; its contract is the schema of the definition."""
        task, path = source.task, source.path
        source.input = task.with_
        references: set[Ref] = set()
        for name, value in task.with_.items():
            place: Path = ("spec", "subworkflows", source.workflow, "outputs", name)
            if source.role == "subworkflow_input":
                place = (*place[:3], "inputs", name) if name not in source.given else (*path, "with", name)
            references |= self.references(value, place, source, ids)
        # What nothing calls has the place of its definition, and no call that could be wrong.
        if source.role == "subworkflow_input" and source.path[-2:] != ("subworkflows", source.workflow):
            self.check_call(source)
        if source.role == "subworkflow_aggregate":
            self.check_returned(source)
        self.memory_keys(source, references)

    def check_call(self, source: _Source) -> None:
        """Inputs of a call that are all known hold to inputSchema here already, and not only in the run."""
        values, schema = source.input, source.task.output_schema
        if schema is None or has_template(values) or _schema_problem(schema) is not None:
            return
        for error in _validator(schema).iter_errors(values):
            place = tuple(error.instance_path)
            path = (*source.path, "with", *place) if place and place[0] in source.given else (*source.path, "with")
            message = f"the inputs of the call do not fit inputSchema of {source.workflow!r}: {error.message[:300]}"
            self.report("schema_violation", message, path, help="give what inputSchema wants, or correct it there")

    def check_returned(self, source: _Source) -> None:
        """Outputs of a sub-workflow that are all known hold to outputSchema here already; told once for all calls."""
        values, schema, name = source.input, source.task.output_schema, source.workflow
        if schema is None or name in self.returned or has_template(values) or _schema_problem(schema) is not None:
            return
        self.returned.add(name)
        for error in _validator(schema).iter_errors(values):
            path = ("spec", "subworkflows", name, "outputs", *error.instance_path)
            message = f"the outputs of {name!r} do not fit its outputSchema: {error.message[:300]}"
            self.report("schema_violation", message, path, help="give what outputSchema promises, or correct it there")

    def check_loop(self, source: _Source, ids: set[str], references: set[Ref]) -> frozenset[Ref]:
        """The guard of a loop. `references` are those of the variables, which its last decision reads as well."""
        assert source.task.loop is not None
        assert source.guard is not None
        place: Path = (*source.path, "loop", "while")
        if not is_exact_template(source.guard):
            self.report("invalid_template", "while must be exactly one template", place, help=_EXACT)
            return frozenset()
        found = self.condition(source.guard, place, source, ids)
        keys = {item.path[0] for item in references | found if item.root == "memory"}
        source.decision_reads = tuple(sorted(keys))
        return found

    def check_router(self, route: Route, source: _Source, ids: set[str], references: set[Ref]) -> None:
        """A router by itself; its destinations are looked at when all tasks are known."""
        path: Path = (*source.path, "route")
        if not is_exact_template(route.select):
            self.report("invalid_template", "select must be exactly one template", (*path, "select"), help=_EXACT)
        for message, place in route_problems(route):
            self.report("schema_violation", message, (*path, *place))
        if source.task.with_:
            self.report("schema_violation", "a router takes no with", (*source.path, "with"), key=True)
        references |= self.references(route.select, (*path, "select"), source, ids)
        source.input = {"select": route.select}
        self.memory_keys(source, references)

    def check_routes(self, sources: list[_Source], ids: set[str]) -> None:
        """Destinations exist and need their router; they get it as a guard (contract 2.6)."""
        entries = {source.task.id: source for source in sources}
        # What stands for a call is its aggregate, and what begins it its boundary.
        ends: dict[str, _Source] = {}
        for source in sources:
            if source.role == "subworkflow_aggregate" and source.namespace is not None:
                ends[source.task.id] = source
                entries[source.task.id] = entries[source.namespace.boundary]
        for source in sources:
            if source.task.route is None:
                continue
            router = source.task.id
            for place, name in destinations(source.task.route):
                path: Path = (*source.path, "route", *place)
                entry = entries.get(name)
                if entry is None:
                    self.missing("task", *self.around(source, name, ids), path)
                    continue
                if name == router:
                    hint = "name the tasks that it chooses from"
                    self.report("schema_violation", "a router cannot be its own destination", path, help=hint)
                    continue
                if router not in entry.needed:
                    shown, chosen = self.shown(source, router), self.shown(source, name)
                    message = f"{chosen!r} is a destination of {shown!r} but does not need it"
                    self.report("schema_violation", message, path, help=f"add {shown} to the needs of {chosen}")
                    continue
                entry.guards.append((router, name))
                if name in ends:
                    ends[name].guards.append((router, name))

    @staticmethod
    def shown(source: _Source, task_id: str) -> str:
        """A task id as the author of this part of the document wrote it."""
        if source.role == "subworkflow_input" and task_id == source.task.id:
            task_id = task_id.rpartition("--")[0]
        return task_id if source.namespace is None else source.namespace.local(task_id)

    def around(self, source: _Source | None, task_id: str, ids: set[str]) -> tuple[str, set[str]]:
        """A task id and all that there are, as the author of this part of the document knows them."""
        if source is None or source.namespace is None:
            return task_id, ids
        if len(self.found) >= _HINTS:
            return self.shown(source, task_id), set()
        inside = f"{source.namespace.call}--"
        own = {
            name.removeprefix(inside) for name in ids if name.startswith(inside) and name != source.namespace.boundary
        }
        return self.shown(source, task_id), own

    def own_memory(self, source: _Source) -> bool:
        """Put the prefix of a sub-workflow before the memory key or namespace of its task (contract 2.7).

        False if that cannot be. A namespace that is not given is the default one, with the prefix.
        """
        field = _OWN_NAMES.get(source.action_kind or "")
        if source.namespace is None or field is None:
            return True
        long_term = self.spec.memory.long_term
        default = DEFAULT_NAMESPACE if long_term is None else long_term.namespace
        name = source.input.get(field, default if field == "namespace" else None)
        if type(name) is str and "${{" in name:
            message = f"a templated memory {field} in a sub-workflow"
            self.unsupported(message, self.input_path(source, field), f"write the {field} as a literal")
            return False
        if type(name) is str:
            source.input = {**source.input, field: source.namespace.memory_prefix + name}
        return True

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
            self.report("invalid_template", error.message, path, help=error.help)
            return frozenset()
        self.check_task_references(found, text, path, source, ids, condition=True)
        return found

    def locate_problems(self, value: Any, path: Path) -> None:
        for place, text in strings_in(value, path):
            try:
                compile_value(text)
            except TemplateError as error:
                self.report("invalid_template", error.message, place, help=error.help)

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
        self.readings.look(found, value, path, self.reader(source, path), condition=condition)
        for reference in found:
            if reference.root != "tasks":
                continue
            name = reference.path[0]
            if name not in ids:
                shown, known = self.around(source, name, ids)
                for place in [path] if condition else _reading(value, path, name):
                    self.missing("task", shown, known, place)
            elif source is not None and name == source.task.id:
                hint = "leave it out" if source.guard is None else "the last output is loop.output in while"
                for place in [path] if condition else _reading(value, path, name):
                    message = f"{self.shown(source, name)!r} reads its own output, which it does not have yet"
                    self.report("invalid_template", message, place, help=hint)
            elif source is not None and name not in source.needed:
                for place in [path] if condition else _reading(value, path, name):
                    reader, read = self.shown(source, source.task.id), self.shown(source, name)
                    message = f"{reader!r} reads the output of {read!r} without needing it"
                    self.report("invalid_template", message, place, help=f"add {read} to needs")
            elif len(reference.path) > 1 and (workflow := self.call_outputs.get(name)) is not None:
                self.check_output_of_call(reference, workflow, [path] if condition else _places(value, path, reference))

    def check_output_of_call(self, reference: Ref, workflow: str, places: Iterable[Path]) -> None:
        """What is read of a call is declared; a call that a router did not choose has a reason and a route instead."""
        outputs, name = self.spec.subworkflows[workflow].outputs, reference.path[1]
        if name in outputs or name in ("reason", "route"):
            return
        hint = did_you_mean(name, outputs, else_list="its outputs") or f"declare it under outputs of {workflow}"
        for place in places:
            message = f"the sub-workflow {workflow!r} has no output {name!r}"
            self.report("missing_reference", message, place, help=hint)

    @staticmethod
    def reader(source: _Source | None, path: Path) -> Reader:
        """What can be read at a place of a task, or in the outputs of the run."""
        if source is None:
            return NOBODY
        bound = source.fanout.names if source.fanout is not None else ()
        rendered = [name for name, value in source.vars.items() if name not in source.data_vars and has_template(value)]
        below = path[len(source.path) :] if path[: len(source.path)] == source.path else ()
        makes = below[:1] in (("vars",), ("foreach",), ("matrix",)) or below[:2] == ("loop", "initial")
        open_names = (*bound, *rendered)
        space = source.namespace
        if space is None:
            return Reader(source.vars, open_names, makes)
        return Reader(source.vars, open_names, makes, space.boundary, space.call)

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
                    shown = literal if source.namespace is None else source.namespace.as_written(literal)
                    message = f"the key {shown!r} is written but not in memoryWrites"
                    self.report("schema_violation", message, place, help=f"add {shown}, or leave memoryWrites out")
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
            for router, _ in node.source.guards:
                # Its children need the router; without children an aggregate would come before its decision.
                if router not in node.needs:
                    waiting[index] += 1
                    dependents[declared[router]].append(index)
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
            # The message has all that have no place in the order (contract 2.2), the advice which of them to change.
            circle = _circle(left)
            ids = [node.source.task.id for node in circle]
            hint = f"{' needs '.join(ids)}: remove one of these `needs`" if len(ids) <= 20 else None
            self.report("dependency_cycle", message, (*circle[0].source.path, "needs"), help=hint)
            self.stop_if_wrong()
        return ordered

    def memory_after(self, ordered: list[_Node], by_id: dict[str, _Node]) -> list[tuple[int, ...]]:
        last: dict[str, int] = {}
        every: tuple[int, ...] | None = None
        result: list[tuple[int, ...]] = []
        for node in ordered:
            after: tuple[int, ...] = ()
            source = node.source
            reads = source.decision_reads if node.aggregate else source.memory_reads
            if reads is None:
                if every is None:
                    every = tuple(sorted(set(last.values())))
                after = every
            elif reads and last:
                # A writer reads its own keys, so its reads cover the previous writers as well.
                after = tuple(sorted({last[key] for key in reads if key in last}))
            if after and node.needs:
                direct = {by_id[need].position for need in node.needs}
                if not direct.isdisjoint(after):
                    after = tuple(position for position in after if position not in direct)
            if source.memory_writes and not node.aggregate:
                every = None
                for key in source.memory_writes:
                    last[key] = node.position
            result.append(after)
        return result

    def plan(self, ordered: list[_Node], by_id: dict[str, _Node]) -> Plan:
        after = self.memory_after(ordered, by_id)
        tasks = {node.id: self.compiled(node, after[node.position]) for node in ordered}
        workflow = self.workflow
        if any(item.role != "task" for item in self.declared):
            workflow = {**workflow, "spec": {**workflow["spec"], "tasks": [_flat(item) for item in self.declared]}}
        workflow = recorded_workflow(workflow, self.document)
        spec = workflow["spec"]
        agents = sorted({node.source.agent_name for node in ordered} - {""})
        tools = sorted({tool for name in agents for tool in self.spec.agents[name].tools})
        called = {self.spec.tools[tool].action or "" for tool in tools}
        used = sorted({node.source.action_name for node in ordered} - {""} | called - {""})
        kinds = sorted(
            {node.source.action_kind for node in ordered if node.source.action_kind is not None}
            | {self.spec.actions[name].kind for name in called - {""}}
            | {EFFECT_OF_TOOL.get(self.spec.tools[tool].kind, "") for tool in tools}
        )
        inverse = {node.source.compensate["uses"] for node in ordered if node.source.compensate is not None}
        asked = {self.spec.agents[name].provider for name in agents}
        embedding = (embedding_provider(spec, self.spec.actions[name].kind) for name in {*used, *inverse})
        providers = sorted(asked.union(name for name in embedding if name is not None))
        requirements: dict[str, Any] = {
            "providers": providers,
            "tools": tools,
            "effects": [kind for kind in kinds if kind in EFFECTS],
            "processes": sorted({command for name in used if (command := self.spec.actions[name].command)}),
        }
        workflow_digest = hex_digest(canonical(workflow))
        name = self.document.model.metadata.name
        order = tuple(tasks)
        concurrency = self.spec.runtime.max_concurrency
        children, iterations = _planned({node.source.index: node.source for node in ordered}.values())
        return Plan(
            format_version=PLAN_FORMAT,
            workflow_name=name,
            workflow_digest=workflow_digest,
            plan_digest=digest_of_plan(name, workflow_digest, order, concurrency, tasks, requirements),
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
                "plannedLoopIterations": iterations,
            },
            actions={
                name: with_peers(spec["actions"][name], spec, self.asked.get(name, ()))
                for name in sorted({*used, *inverse})
            },
            agents={name: self.compiled_agent(name, spec["agents"][name]) for name in agents},
            providers={name: spec["providers"][name] for name in providers},
            tools={name: spec["tools"][name] for name in tools},
            policy=spec["policy"],
            memory=spec["memory"]["working"],
            inputs=spec["inputs"],
            vars=spec["vars"],
            outputs=spec["outputs"],
            show_diff=self.spec.output.show_diff,
            compensation=spec["compensation"],
        )

    def compiled_agent(self, name: str, declared: dict[str, Any]) -> dict[str, Any]:
        """An agent with the text of its instructions, wherever that stands."""
        text = instructions_of(self.document, name)
        return {**declared, "instructions": text, "instructionsDigest": hex_digest(text)}

    def compiled(self, node: _Node, after: tuple[int, ...]) -> CompiledTask:
        source, task = node.source, node.source.task
        if node.aggregate:
            assert source.fanout is not None
            looped = task.loop is not None
            kind = "loop_aggregate" if looped else "aggregate"
            return CompiledTask(
                node.id, node.position, kind, source.fanout.kind, None, node.needs,
                memory_reads=source.decision_reads, memory_after=after,
                timeout_seconds=self.spec.runtime.default_timeout_seconds, failure=task.failure,
                route_guards=tuple(source.guards), loop=self.last_decision(node) if looped else None,
            )  # fmt: skip
        bindings, fanout = node.bindings, source.fanout
        expansion, variables = None, source.vars
        if bindings is not None:
            expansion = Expansion(task.id, node.child_index, bindings)
            variables = {**source.vars, **bindings} if source.vars else bindings
        return CompiledTask(
            node.id,
            node.position,
            _uses_kind(source),
            source.workflow or source.action_name or source.agent_name or "router",
            source.action_kind,
            node.needs,
            expansion,
            source.memory_writes,
            source.memory_reads,
            after,
            task.when if source.guard is None else source.guard,
            variables,
            (*source.data_vars, *fanout.data_names) if fanout is not None else source.data_vars,
            source.input,
            source.retry,
            source.timeout_seconds,
            task.failure,
            task.output_schema,
            source.predictability,
            tuple(source.guards),
            None if task.route is None else route_as_json(task.route),
            instructions=source.instructions,
            compensate=source.compensate,
        )

    def last_decision(self, node: _Node) -> dict[str, Any]:
        """The guard once more, after the last iteration (contract 2.5)."""
        loop = node.source.task.loop
        assert loop is not None
        bindings = {"loopIndex": loop.max_iterations, "loopPrevious": output_of(node.needs[-1])}
        last: dict[str, Any] = {
            "maxIterations": loop.max_iterations,
            "vars": {**node.source.vars, **bindings},
            "while": node.source.guard,
        }
        if node.source.data_vars:
            last["dataVars"] = list(node.source.data_vars)
        return last


# ---------------------------------------------------------------------- helpers


_EXACT = "${{ tasks.NAME.output.FIELD }}"


def _planned(sources: Iterable[_Source]) -> tuple[int, int]:
    """Children of foreach and matrix, and iterations of loops."""
    children = iterations = 0
    for source in sources:
        if source.fanout is None:
            continue
        if source.fanout.kind == "loop":
            iterations += source.fanout.size
        else:
            children += source.fanout.size
    return children, iterations


def _uses_kind(source: _Source) -> str:
    if source.task.route is not None:
        return "router"
    if source.role != "task":
        return source.role
    return "agent" if source.agent_name else "action"


def _flat(item: Declared) -> dict[str, Any]:
    """A task of the flattened workflow, which the workflow digest is taken over."""
    data = item.task.model_dump(by_alias=True)
    return data if item.role == "task" else {**data, "uses": f"{item.role}:{item.workflow}"}


def _retry(retry: Retry) -> RetryPolicy:
    return RetryPolicy(retry.max_attempts, retry.backoff_ms, retry.backoff_multiplier, retry.max_backoff_ms)


def _reading(value: Any, path: Path, task_id: str) -> Iterator[Path]:
    """The places of the strings that read a task."""
    for place, text in strings_in(value, path):
        if any(item.root == "tasks" and item.path[0] == task_id for item in compile_value(text).references):
            yield place


def _unexpanded(task: Task) -> Iterator[tuple[Path, Any]]:
    """What an expansion is made of, with the places below its task."""
    if task.foreach is not None:
        yield ("foreach", "items"), task.foreach.items
    if task.matrix is not None:
        for name, items in task.matrix.axes.items():
            yield ("matrix", "axes", name), items
    if task.loop is not None:
        yield ("loop", "initial"), task.loop.initial


def _places(value: Any, path: Path, reference: Ref) -> Iterator[Path]:
    """The places of the strings that read exactly this."""
    for place, text in strings_in(value, path):
        if reference in compile_value(text).references:
            yield place


def _call_outputs(items: Iterable[Declared]) -> dict[str, str]:
    """The sub-workflow of each call, by the id under which its outputs are read."""
    return {item.task.id: item.workflow for item in items if item.role == "subworkflow_aggregate"}


def _circle(left: list[_Node]) -> list[_Node]:
    """One circle among tasks that can never be ready, from the task declared first to that task again.

    Tasks that only come after a circle are not in it. Children of an expansion count as the task that they come from.
    """
    by_id = {node.id: node for node in left}
    way: dict[str, _Node] = {}
    node = left[0]
    while node.id not in way:
        way[node.id] = node
        needs = (*node.needs, *(router for router, _ in node.source.guards))
        node = next(by_id[need] for need in needs if need in by_id)
    nodes = list(way.values())
    circle = list({each.source.task.id: each for each in nodes[nodes.index(node) :]}.values())
    places = {each.id: place for place, each in enumerate(left)}
    first = circle.index(min(circle, key=lambda each: places[each.id]))
    return [*circle[first:], *circle[:first], circle[first]]


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


def _validator(schema: dict[str, Any] | bool) -> Any:
    import jsonschema_rs

    return jsonschema_rs.Draft202012Validator(schema)


def digest_of_plan(
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
