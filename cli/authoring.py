"""What an author needs besides running: a start, an explanation, a plan to read, a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.errors import EnvironmentFault, UsageError

from .documents import Sources, compile_file, schema_text, source_options, write_file
from .main import Settings, Verb, pass_settings
from .render import Printer, clean, counted, item_text, warn_findings

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.plan import CompiledTask, Plan
    from agentctl.coordinator.variables import Origin
    from agentctl.store.policy import Policy

SCHEMA_FILE = "workflow.schema.json"
"""What `init` calls the schema that it puts beside a workflow."""

TEMPLATES = ("hello", "commands", "files", "fan-out")

SHOWN_CHILDREN = 5
"""An expansion of more children is shown as one line of a plan."""

FORMATS = ("tree", "mermaid", "dot")


# ---------------------------------------------------------------------- init


@click.command(cls=Verb)
@click.argument("file", default="workflow.yaml", type=click.Path())
@click.option("--template", type=click.Choice(TEMPLATES), default="hello", help="What to start from.")
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@pass_settings
def init(settings: Settings, file: str, template: str, force: bool) -> None:
    """Write a commented workflow to start from, and the schema by which editors complete and explain it.

    FILE is workflow.yaml unless given. hello: data and text; commands: programs with retries; files: reading, and
    writing with a person's approval; fan-out: one task for each item of a list. All of them run as they are.
    """
    from .templates import TEXTS

    target = Path(file)
    if target.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{file} is not the name of a YAML file", remedy="give a name that ends in .yaml")
    schema_file = target.with_name(SCHEMA_FILE)
    if not force and os.path.lexists(target):
        raise _taken(target)
    name = _workflow_name(target.stem)
    text = TEXTS[template].replace("NAME-OF-WORKFLOW", name)
    text = f"# yaml-language-server: $schema=./{SCHEMA_FILE}\n{text}"
    _make_folder(target.parent)
    wrote_schema = _put(schema_file, schema_text(), force=force, needed=False)
    _put(target, text, force=force, needed=True)
    data = {"written": file, "template": template, "schema": str(schema_file), "schemaWritten": wrote_schema}

    def human(out: Printer) -> None:
        kept = "" if wrote_schema else " (was there already; `agentctl schema --write` renews it)"
        out.line(f"wrote {clean(file)} from the template {template}")
        out.line(f"schema {clean(schema_file)}{kept}")
        out.line(f"next: `agentctl check {clean(file)}`, then `agentctl run {clean(file)}`")

    Printer(settings).result("Init", data, human)


def _taken(target: Path) -> UsageError:
    return UsageError(f"{target} is there already", remedy="choose another name, or --force overwrites it")


def _workflow_name(stem: str) -> str:
    """A file's name as the name of a workflow that needs no quotes."""
    kept = "".join(c if c.isascii() and c.isalnum() else "-" for c in stem).strip("-").lower()
    return kept if kept[:1].isalpha() else f"workflow-{kept}".strip("-")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(f"cannot make the folder {folder}: {reason}", remedy="choose another place") from error


def _put(target: Path, text: str, *, force: bool, needed: bool) -> bool:
    """Write a file; without `force` only if nothing has that name. False when it was there and is not `needed`."""
    try:
        write_file(target, text, overwrite=force)
    except FileExistsError as error:
        # Between the look and the writing somebody may have made it.
        if not needed:
            return False
        raise _taken(target) from error
    return True


# ---------------------------------------------------------------------- explain


@click.command(cls=Verb)
@click.argument("file")
@source_options
@click.option("--workspace", type=click.Path(path_type=Path), metavar="DIR", help="As for `run`.")
@pass_settings
def explain(
    settings: Settings,
    file: str,
    sources: Sources,
    workspace: Path | None,
) -> None:
    """Show where each variable gets its value, and what it wins over. Values are never shown."""
    document, plan = compile_file(file, sources.inputs(), sources, workspace=workspace)
    from agentctl.coordinator.variables import task_origins, workflow_origins

    warn_findings(settings, document.warnings)
    everywhere = workflow_origins(document)
    tasks = {
        task.id: task_origins(document, ("spec", "tasks", index), task)
        for index, task in enumerate(document.model.spec.tasks)
    }
    for name, sub in document.model.spec.subworkflows.items():
        for index, task in enumerate(sub.tasks):
            path = ("spec", "subworkflows", name, "tasks", index)
            tasks[f"workflow:{name}/{task.id}"] = task_origins(document, path, task)
    data = {
        "workflow": plan.workflow_name,
        "planDigest": plan.plan_digest,
        "variableOrigins": _origins_json(everywhere),
        "effectiveOrigins": {name: _origins_json(found) for name, found in tasks.items()},
    }
    rows = [("all tasks", name, found) for name, found in sorted(everywhere.items())]
    for task_id, found in tasks.items():
        rows += [(task_id, name, where) for name, where in sorted(found.items()) if where != everywhere.get(name)]

    def human(out: Printer) -> None:
        if not rows:
            out.line("the workflow has no variables")
            return
        table = [(name, who, where[-1].layer, _place(where[-1]), _overridden(where)) for who, name, where in rows]
        out.table(("VARIABLE", "FOR", "FROM", "WHERE", "WINS OVER"), table)

    Printer(settings).result("SourceExplanation", data, human, document.warnings)


def _origins_json(found: dict[str, list[Origin]]) -> dict[str, Any]:
    return {
        name: {**where[-1].as_json(), "overrides": [item.as_json() for item in reversed(where[:-1])]}
        for name, where in sorted(found.items())
    }


def _place(origin: Origin) -> str:
    return ":".join(str(part) for part in (origin.file, origin.line) if part is not None) or "command line"


def _overridden(where: Sequence[Origin]) -> str:
    return "; ".join(f"{item.layer} {_place(item)}" for item in reversed(where[:-1])) or "-"


# ---------------------------------------------------------------------- plan


def plan_for_people(out: Printer, document: LoadedDocument, plan: Plan) -> None:
    """The plan as text: what it comes to, then one line for each task. A wide expansion is one line."""
    declared = len(document.model.spec.tasks)
    children, rounds = plan.budget["plannedExpansionItems"], plan.budget["plannedLoopIterations"]
    called = len(plan.order) - declared - children - rounds
    more = [
        f"{number} {what}"
        for number, what in (
            (children, "children of expansions"),
            (rounds, "iterations of loops"),
            (called, "in sub-workflows"),
        )
        if number
    ]
    counted = f"{len(plan.order)}" + (f" ({declared} declared, {', '.join(more)})" if more else "")
    out.line(f"workflow        {clean(plan.workflow_name)}")
    out.line(f"plan digest     {plan.plan_digest}")
    out.line(f"tasks           {counted}, at most {plan.max_concurrency} at once")
    out.line(f"predictability  {plan.predictability.replace('_', ' ')}")
    out.line(f"effects         {', '.join(plan.requirements['effects']) or 'none'}")
    if plan.requirements["processes"]:
        out.line(f"programs        {', '.join(clean(name) for name in plan.requirements['processes'])}")
    out.line(f"approval        {plan.policy['approval']}")
    limits = [f"{name} {value}" for name, value in plan.budget["limits"].items() if value is not None]
    if limits:
        out.line(f"budget          {', '.join(limits)}")
    out.line()
    out.table(("#", "TASK", "USES", "NEEDS", "EFFECT", "LIMITS"), list(_plan_rows(plan)))


def _plan_rows(plan: Plan) -> Iterator[tuple[object, ...]]:
    from agentctl.coordinator.graph import build_graph
    from agentctl.store.approvals import redacted
    from agentctl.store.policy import Policy

    policy = Policy.from_json(plan.policy)
    first: dict[str, CompiledTask] = {}
    for task in plan.tasks.values():
        first.setdefault(task.expansion.parent if task.expansion is not None else task.id, task)
    for node in build_graph(plan):
        task = first[node.id]
        number = str(task.position + 1)
        if node.children:
            number += f"-{plan.tasks[node.id].position + 1}"
        name = f"{node.id} x{node.children}" if node.children else node.id
        yield number, name, node.uses, _few(node.needs), _effect(plan, policy, task), _limits(task, plan.tasks[node.id])
        if 0 < node.children <= SHOWN_CHILDREN:
            # The ids are what other verbs want to be told.
            for child in plan.tasks[node.id].needs:
                expansion = plan.tasks[child].expansion
                item = item_text(redacted(expansion.bindings)) if expansion is not None else ""
                yield str(plan.tasks[child].position + 1), f"  {child}", item, "", "", ""


def _effect(plan: Plan, policy: Policy, task: CompiledTask) -> str:
    from agentctl.coordinator.kinds import EFFECTS, approved_steps, decision_on

    if task.uses_kind == "agent":
        agent = plan.agents[task.uses_name]
        tools = len(agent["tools"])
        said = f"model {agent['provider']}" + (f", {counted(tools, 'tool')}" if tools else "")
        return said + (", asks a person" if any(approved_steps(policy, agent, plan.tools)) else "")
    decision = decision_on(policy, task.action_kind)
    if decision is None:
        return "none"
    words = [EFFECTS[str(task.action_kind)].effect_class.replace("_", " ")]
    declared = plan.actions.get(task.uses_name, {}).get("idempotency")
    if declared is not None:
        words.append(declared.replace("_", " "))
    if decision.needs_approval:
        words.append("asks a person")
    elif decision.denied:
        words.append("denied")
    return ", ".join(words)


def _limits(task: CompiledTask, whole: CompiledTask) -> str:
    words = [f"{task.timeout_seconds} s"]
    if task.retry.max_attempts > 1:
        words.append(f"{task.retry.max_attempts} attempts")
    if task.when is not None:
        words.append("if")
    if whole.failure == "continue":
        words.append("others go on")
    return ", ".join(words)


def _few(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---------------------------------------------------------------------- graph


@click.command(cls=Verb)
@click.argument("source", metavar="FILE|RUN")
@click.option("--format", "form", type=click.Choice(FORMATS), default="tree", help="tree: for a terminal.")
@click.option("--expand", is_flag=True, help="Draw every child of an expansion by itself.")
@source_options
@pass_settings
def graph(
    settings: Settings,
    source: str,
    form: str,
    expand: bool,
    sources: Sources,
) -> None:
    """Draw the tasks of a workflow file, or of a run with their states."""
    run_id: str | None = None
    states: list[str] | None = None
    if _is_file(source):
        document, plan = compile_file(source, sources.inputs(), sources)
        warn_findings(settings, document.warnings)
    elif sources.any:
        raise UsageError("a run has its inputs and variables already", remedy="leave these options out")
    else:
        run_id, plan, states = _run_of(settings, source)
    from agentctl.coordinator.graph import build_graph, draw

    nodes = build_graph(plan, states, expand=expand)
    text = draw(nodes, form)
    data = {
        "workflow": plan.workflow_name,
        "runId": run_id,
        "format": form,
        "text": text,
        "nodes": [node.as_json() for node in nodes],
        "edges": [{"from": need, "to": node.id} for node in nodes for need in node.needs],
    }
    Printer(settings).result("Graph", data, lambda out: out.line("\n".join(clean(line) for line in text.split("\n"))))


def _is_file(source: str) -> bool:
    """Whether a file is meant: names of runs have neither an ending nor a folder."""
    return os.path.exists(source) or "/" in source or source.endswith((".yaml", ".yml", ".json"))


def _run_of(settings: Settings, name: str) -> tuple[str, Plan, list[str]]:
    """A run's id, its stored plan and the states of its tasks by position, as they were at one moment."""
    from agentctl.coordinator.plan import Plan
    from agentctl.store.canonical import loads

    from .run import open_store, views_of

    with closing(open_store(settings)) as store:
        run_id = views_of(store).find_run(name)
        plan = Plan.from_json(loads(store.run_documents(run_id).plan_json))
        return run_id, plan, [row.state for row in store.snapshot(run_id).tasks]
