"""Compensation of a run that has ended: what its tasks have done is undone by what they declare (contract 5.7).

Planning carries nothing out. The plan goes through the tasks in reverse compiled order and renders the inverse of each
one that is known to have changed something; what is not known blocks, and needs a person. The run that follows is an
ordinary one: effects, policy, approvals, retries, budget and history of its own. This is inverse execution as well as
it can be done, and no transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentctl.store.canonical import canonical, hex_digest, loads
from agentctl.store.clock import IdSource
from agentctl.store.compensations import (
    MAPPING,
    Compensations,
    CompensationSource,
    EffectFact,
    TakenOver,
    by_task,
    in_doubt,
)
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, RunMoved, TaskFault
from agentctl.store.faults import Faults
from agentctl.store.records import NewRun
from agentctl.store.verification import require_sound

from .compiler import digest_of_plan
from .expressions import Scope, compile_value, compile_vars, has_template
from .plan import MEMORY_WRITERS, PLAN_FORMAT, CompiledTask, Plan, RetryPolicy, keeps_artifacts
from .submission import fields_of

log = logging.getLogger(__name__)

API_VERSION = "agentctl.dev/compensation-plan/v1"
SOURCE_LABEL = "agentctl.dev/compensation-source"
TRIES = 5
"""How often a plan is made anew when something has changed before its run could be created."""


LIVE_RUN = "live_derived_run"
"""The rule of what is not undone while a retry or repair that has not ended stands on it."""

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Block:
    """Why something is not undone (rules: contract 5.7). `task_id` is `*` for the whole plan."""

    task_id: str
    effect_id: str | None
    rule: str
    message: str

    def as_json(self) -> dict[str, Any]:
        """The object of a plan."""
        return {"taskId": self.task_id, "effectId": self.effect_id, "rule": self.rule, "message": self.message}


@dataclass(frozen=True, slots=True)
class Inverse:
    """One task of the compensation run; `input` is rendered."""

    source_task_id: str
    effect_ids: tuple[str, ...]
    input: dict[str, Any]
    declared: Mapping[str, Any]

    @property
    def task_id(self) -> str:
        """Its id in the compensation run."""
        return f"compensate--{self.source_task_id}"


@dataclass(slots=True)
class CompensationPlan:
    """What a compensation would do, in its order. `selected` are the tasks that were looked at.

    `elsewhere` is what stands behind tasks that the run has taken over and not executed: it is undone where it was
    done. `warnings` are what a person should know.
    """

    source_run_id: str
    automatic: bool
    selected: list[str] = field(default_factory=list)
    inverses: list[Inverse] = field(default_factory=list)
    blocked: list[Block] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    elsewhere: list[TakenOver] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def waits(self) -> Block | None:
        """The first block that goes by itself, when another run has ended."""
        return next((block for block in self.blocked if block.rule == LIVE_RUN), None)

    @property
    def executable(self) -> bool:
        """Whether a run follows from it."""
        return bool(self.inverses) and not any(block.rule == "compensation_in_progress" for block in self.blocked)

    def as_json(self) -> dict[str, Any]:
        """CompensationPlan of contract 5.7."""
        return {
            "apiVersion": API_VERSION,
            "sourceRunId": self.source_run_id,
            "executable": self.executable,
            "complete": not self.blocked,
            "automatic": self.automatic,
            "selectedTasks": self.selected,
            "tasks": [
                {
                    "sourceTaskId": item.source_task_id,
                    "compensationTaskId": item.task_id,
                    "action": item.declared["uses"],
                    "sourceEffectIds": list(item.effect_ids),
                }
                for item in self.inverses
            ],
            "blocked": [block.as_json() for block in self.blocked],
            "alreadyCompensatedEffects": self.already,
            "elsewhere": self.elsewhere_as_json(),
            "warnings": self.warnings,
        }

    def elsewhere_as_json(self) -> list[dict[str, Any]]:
        """One object for each task that was taken over: `runId` (null when that run is gone) has the effects."""
        found: dict[tuple[str, str | None], list[str]] = {}
        for item in self.elsewhere:
            found.setdefault((item.task_id, item.run_id), []).append(item.effect_id)
        return [{"taskId": task, "runId": run, "sourceEffectIds": ids} for (task, run), ids in found.items()]


# -- verbs -------------------------------------------------------------------------------------------------------------


def plan_compensation(
    store: Store, run_id: str, tasks: Sequence[str] = ()
) -> tuple[CompensationPlan, CompensationSource, Plan]:
    """What undoing a run would do, with what that is based on; with `tasks` only theirs.

    What earlier compensation runs have undone is concluded first, in transactions of its own; nothing else is written.
    Raises `NotFoundError`, `NotTerminal`, `IncompatibleVersion`, and `CorruptStore` when the run is not what it says.
    """
    compensations = Compensations(store.database, store.clock)
    source = compensations.source(run_id)
    if compensations.settle(source):
        source = compensations.source(run_id)
    require_sound(store.database, run_id)
    plan = Plan.from_json(loads(source.documents.plan_json))
    return _Planner(source, plan).plan(tasks), source, plan


def start_compensation(
    store: Store,
    run_id: str,
    ids: IdSource,
    *,
    tasks: Sequence[str] = (),
    automatic: bool = False,
    actor: str,
    faults: Faults,
    before: Callable[[dict[str, Any], Plan, str], None] | None = None,
    base_path: str | None = None,
) -> tuple[CompensationPlan, str | None]:
    """Plan, and create the run if something can be undone: (plan, id of the new run or None).

    `before` gets the workflow, the plan and the base of paths of a run that is about to be created; what it raises
    keeps the run from being made. `base_path` is used instead of that of the source.

    One durable transaction creates it, and only on what the plan was made from; two that compensate the same run at
    once make one run. With `automatic` a run is made only while somebody has to start it (`compensations.due`), and
    that is over when it has been made, or when there is nothing to do. Raises as `plan_compensation`, and
    `ConflictError`, with nothing made, when others change the source again and again meanwhile; with `automatic` also
    while a retry or repair that goes on stands on what would be undone: then it stays due.
    """
    compensations = Compensations(store.database, store.clock)
    for _ in range(TRIES):
        found, source, plan = plan_compensation(store, run_id, tasks)
        if automatic and not compensations.is_due(run_id):
            return found, None
        if automatic and found.waits is not None:
            raise ConflictError(
                f"it stays due: {found.waits.message}",
                remedy=f"when that has ended, a live coordinator starts it, or `agentctl resume {run_id}`",
                run_id=run_id,
            )
        if not found.executable:
            if automatic and not any(block.rule == "compensation_in_progress" for block in found.blocked):
                compensations.give_up(run_id, blocked=len(found.blocked), actor=actor)
            return found, None
        new, workflow, inverse = _new_run(
            found, source, plan, ids, automatic=automatic, actor=actor, chosen=tuple(tasks), base_path=base_path
        )
        if before is not None:
            before(workflow, inverse, new.base_path)
        # What is left because another run goes on is left to the automatic one, if that is due.
        everything = not tasks and found.waits is None
        faults.reach("before_compensation")
        try:
            created = compensations.create(new, source.basis, automatic=automatic, everything=everything)
        except RunMoved as moved:
            log.info("%s", moved.message)
            continue
        faults.reach("after_compensation")
        return found, created
    raise ConflictError(
        f"others compensate or reconcile {run_id} all the time", remedy="try again when they are done", run_id=run_id
    )


def start_what_is_due(
    store: Store,
    ids: IdSource,
    faults: Faults,
    run_id: str,
    *,
    actor: str,
    before: Callable[[dict[str, Any], Plan, str], None] | None = None,
) -> str | None:
    """Start the automatic compensation of a failed run if nobody has; the id of its run, or None.

    The look is cheap. `before` and what it raises are those of `start_compensation`.
    """
    if not Compensations(store.database, store.clock).is_due(run_id):
        return None
    return start_compensation(store, run_id, ids, automatic=True, actor=actor, faults=faults, before=before)[1]


# -- the plan ----------------------------------------------------------------------------------------------------------


class _Texts(Mapping[str, Any]):
    """Values that are parsed when somebody looks."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            self._values[key] = loads(self._texts[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


class _Planner:
    def __init__(self, source: CompensationSource, plan: Plan) -> None:
        self._source = source
        self._plan = plan
        self._inputs = loads(source.documents.inputs_json)
        self._tasks = _Texts(source.outputs)
        self._memory = _Texts(source.memory)
        self._effects = by_task(source.effects)
        self._unresolved = dict(self._attempted())

    def plan(self, tasks: Sequence[str]) -> CompensationPlan:
        """The plan; with `tasks` only of these."""
        found = CompensationPlan(self._source.run.run_id, self._plan.compensation["onFailure"] == "automatic")
        for earlier in self._source.earlier:
            if not earlier.ended:
                ways = "`agentctl resume` or `agentctl cancel` brings it to an end"
                message = f"{earlier.run_id} is {earlier.state}: {ways}"
                found.blocked.append(Block("*", None, "compensation_in_progress", message))
        wanted = dict.fromkeys(tasks)
        for name in wanted:
            task = self._plan.tasks.get(name)
            if task is None:
                found.blocked.append(Block(name, None, "unknown_task", "the run has no task of that name"))
            elif task.compensate is None:
                message = "the task declares no compensation"
                found.blocked.append(Block(name, None, "undeclared_compensation", message))
        for name in reversed(self._plan.order):
            task = self._plan.tasks[name]
            if task.compensate is not None and (not wanted or name in wanted):
                found.selected.append(name)
                self._look(task, task.compensate, found)
        chosen = set(found.selected)
        found.warnings += self._unchanged(found.selected)
        found.elsewhere = [item for item in self._source.taken_over if item.task_id in chosen]
        return found

    def _unchanged(self, names: Sequence[str]) -> Iterator[str]:
        """Tasks that declare an inverse and have found everything as it should be: that is no effect, and whoever sees
        that it stays as it is wants to know why."""
        taken_over = {item.task_id for item in self._source.taken_over}
        for name in names:
            if name in self._effects or name in taken_over or name not in self._tasks:
                continue
            output = self._tasks[name]
            if isinstance(output, dict) and output.get("status") == "unchanged":
                yield f"{name} has changed nothing, since all was there already: nothing of it is undone"

    def _look(self, task: CompiledTask, declared: dict[str, Any], found: CompensationPlan) -> None:
        effects = self._effects.get(task.id, [])
        undo: list[str] = []
        for place, effect in enumerate(effects):
            block: tuple[str, str] | None = None
            if effect.reconciled == "compensated":
                if effect.inverse_reconciled == "compensated":
                    message = f"effect {_short(effect.inverse)}, which has undone it, was itself undone"
                    block = ("compensation_effect_reversed", message)
                else:
                    found.already.append(effect.effect_id)
            elif effect.happened:
                block = self._unresolved.get(effect.effect_id)
                if block is None:
                    undo.append(effect.effect_id)
            else:
                block = _doubt(effect, effects[place + 1 :], "source")
            if block is not None:
                found.blocked.append(Block(task.id, effect.effect_id, *block))
        if undo and not self._leant_on(task, undo, found):
            try:
                found.inverses.append(Inverse(task.id, tuple(undo), self._input(task, declared), declared))
            except TaskFault as fault:
                message = f"the input of the compensation cannot be rendered: {fault.message}"
                found.blocked.append(Block(task.id, None, "compensation_input_unavailable", message))
                return
            attempts = {effect.attempt for effect in effects if effect.effect_id in undo}
            if len(attempts) > 1:
                found.warnings.append(
                    f"one inverse action of {task.id} stands for {len(undo)} effects of {len(attempts)} attempts: "
                    "all of them count as undone when it has succeeded"
                )

    def _leant_on(self, task: CompiledTask, undo: Sequence[str], found: CompensationPlan) -> bool:
        """Block a task on which a run that goes on stands, and warn of one that has succeeded."""
        others = [other for other in self._source.leaning if other.concerns(task.id, undo)]
        for other in others:
            if not other.ended:
                how = "executes it once more" if other.effect_id is None else f"has taken over what {task.id} has done"
                message = (
                    f"{other.run_id} is {other.state} and {how}; when it has ended, this can be undone "
                    f"(`agentctl wait {other.run_id}`, or `cancel`)"
                )
                found.blocked.append(Block(task.id, other.effect_id, LIVE_RUN, message))
                return True
        names = list(dict.fromkeys(other.run_id for other in others if other.state == "succeeded"))
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            found.warnings.append(
                f"what {task.id} has done is undone under {', '.join(names[:SHOWN])}{more}, which took it over and "
                "succeeded with it"
            )
        return False

    def _input(self, task: CompiledTask, declared: dict[str, Any]) -> dict[str, Any]:
        """What the inverse gets: rendered with all that the run has come to. Raises `TaskFault`."""
        renderer = compile_value(declared["input"])
        scope = Scope(inputs=self._inputs, vars={}, memory=self._memory, tasks=self._tasks)
        own: dict[str, Any] = {}
        if task.vars and any(reference.root == "vars" for reference in renderer.references):
            own = compile_vars(task.vars, task.data_vars)(scope)
        scope.vars = {**self._plan.vars, **own} if own else self._plan.vars
        rendered: dict[str, Any] = renderer(scope)
        canonical(rendered)
        return rendered

    def _attempted(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """Source effects that an earlier compensation may or may not have undone, with (rule, message)."""
        for earlier in self._source.earlier:
            if not earlier.ended:
                continue
            for task_id, effects in by_task(earlier.effects).items():
                for place, effect in enumerate(effects):
                    doubt = None if effect.happened else _doubt(effect, effects[place + 1 :], "compensation")
                    if doubt is not None:
                        for effect_id in earlier.mapping.get(task_id, ()):
                            yield effect_id, doubt


def _doubt(effect: EffectFact, later: Sequence[EffectFact], whose: str) -> tuple[str, str] | None:
    """(rule, message) when nobody knows whether an effect happened, else None."""
    doubt = in_doubt(effect, later)
    if doubt is None:
        return None
    what = "is uncertain" if doubt == "unreconciled" else "was sent, and its end was never confirmed"
    how = f"`agentctl effects reconcile {effect.effect_id} --status applied|not-applied …` says what became of it"
    return f"{doubt}_{whose}_effect", f"{effect.operation} {what}; {how}"


def _short(effect_id: str | None) -> str:
    return (effect_id or "")[:12]


# -- the run -----------------------------------------------------------------------------------------------------------


def _new_run(
    found: CompensationPlan,
    source: CompensationSource,
    plan: Plan,
    ids: IdSource,
    *,
    automatic: bool,
    actor: str,
    chosen: tuple[str, ...],
    base_path: str | None,
) -> tuple[NewRun, dict[str, Any], Plan]:
    """The run of a plan, with its workflow and its compiled plan, made together, as no document is read again."""
    run = source.run
    place = run.base_path if base_path is None else base_path
    tasks = list(_tasks(found.inverses))
    approval = plan.compensation["approval"]
    policy = {**plan.policy, "approval": approval} if approval != "policy" else plan.policy
    actions = {name: plan.actions[name] for name in sorted({task.uses_name for task in tasks})}
    inputs = {
        MAPPING: {
            item.task_id: {"sourceTaskId": item.source_task_id, "sourceEffectIds": list(item.effect_ids)}
            for item in found.inverses
        }
    }
    memory = {key: loads(text) for key, text in source.memory.items()}
    old = loads(source.documents.workflow_json)
    name = f"{run.workflow_name}-compensation"
    workflow = _workflow(old, name, run.run_id, actions, policy, memory, inputs, tasks)
    derived = _derived_plan(plan, name, hex_digest(canonical(workflow)), tasks, actions, policy, memory, inputs)
    inputs_json = canonical(inputs)
    settings = _settings(loads(source.documents.settings_json), derived)
    lineage = {
        "formatVersion": 1,
        "sourceWorkflowDigest": run.workflow_digest,
        "roots": list(chosen),
        "reason": None,
        "automatic": automatic,
    }
    new = NewRun(
        run_id=ids.new_id("compensation"),
        trace_id=ids.new_id("trace"),
        mode="compensation",
        submission_digest=hex_digest(f"{derived.plan_digest}\n{inputs_json}\n{place}"),
        workflow_json=canonical(workflow),
        plan_json="".join(derived.canonical_chunks()),
        inputs_json=inputs_json,
        settings_json=canonical(settings),
        base_path=place,
        priority=run.priority,
        actor=actor,
        source_run_id=run.run_id,
        lineage_json=canonical(lineage),
        **fields_of(derived),
    )
    return new, workflow, derived


def _derived_plan(
    plan: Plan,
    name: str,
    workflow_digest: str,
    tasks: Sequence[CompiledTask],
    actions: dict[str, Any],
    policy: dict[str, Any],
    memory: dict[str, Any],
    inputs: dict[str, Any],
) -> Plan:
    """The compiled plan of a compensation: one inverse after the other, with the limits of what it undoes."""
    kinds = {str(task.action_kind) for task in tasks}
    requirements: dict[str, Any] = {
        "providers": [],
        "tools": [],
        "effects": sorted(kinds),
        "processes": sorted({action["command"] for action in actions.values() if action.get("command")}),
    }
    by_id = {task.id: task for task in tasks}
    order = tuple(by_id)
    return Plan(
        format_version=PLAN_FORMAT,
        workflow_name=name,
        workflow_digest=workflow_digest,
        plan_digest=digest_of_plan(name, workflow_digest, order, 1, by_id, requirements),
        order=order,
        max_concurrency=1,
        max_deliveries=plan.max_deliveries,
        tasks=by_id,
        predictability="requires_execution",
        requirements=requirements,
        budget={
            **plan.budget,
            "plannedTasks": len(tasks),
            "plannedExpansionItems": 0,
            "plannedLoopIterations": 0,
        },
        actions=actions,
        policy=policy,
        memory=memory,
        inputs=inputs,
        vars={},
        outputs={},
        show_diff=plan.show_diff,
    )


def _settings(before: dict[str, Any], derived: Plan) -> dict[str, Any]:
    """What the workers of a compensation are told: as its source was, but to carry out every effect anew."""
    settings: dict[str, Any] = {
        "actions": derived.actions,
        "policy": derived.policy,
        "showDiff": bool(before.get("showDiff", derived.show_diff)),
        "diff": bool(before.get("diff", False)),
        "interactive": False,
        "keepsArtifacts": keeps_artifacts(derived),
        "forceEffect": True,
    }
    if "longTerm" in before:
        settings["longTerm"] = before["longTerm"]
        settings["pricing"] = (before.get("models") or before).get("pricing", {})
    return settings


def _tasks(inverses: Sequence[Inverse]) -> Iterator[CompiledTask]:
    """The compiled tasks: none needs another, so each goes on whatever has become of those before it.

    But it begins only when they have ended, as it does with memory: an inverse that waits for a person, or for its next
    attempt, is not overtaken, or the order would not be the reverse one any more.
    """
    for position, item in enumerate(inverses):
        declared = item.declared
        values: dict[str, Any] = {}
        given: dict[str, Any] = {}
        for number, (name, value) in enumerate(item.input.items()):
            given[name] = value
            if has_template(value):
                # What was rendered is data, even where it looks like a template.
                values[f"given{number}"] = value
                given[name] = f"${{{{ vars.given{number} }}}}"
        keys: tuple[str, ...] = ()
        if declared["actionKind"] in MEMORY_WRITERS and isinstance(item.input.get("key"), str):
            keys = (item.input["key"],)
        yield CompiledTask(
            item.task_id,
            position,
            "action",
            declared["uses"],
            declared["actionKind"],
            memory_writes=keys,
            memory_reads=keys,
            memory_after=(position - 1,) if position else (),
            vars=values,
            data_vars=tuple(values),
            input=given,
            retry=RetryPolicy.from_json(declared["retry"]),
            timeout_seconds=declared["timeoutSeconds"],
            failure="continue",
            predictability="requires_execution",
        )


def _workflow(
    old: dict[str, Any],
    name: str,
    source_id: str,
    actions: dict[str, Any],
    policy: dict[str, Any],
    memory: dict[str, Any],
    inputs: dict[str, Any],
    tasks: Sequence[CompiledTask],
) -> dict[str, Any]:
    """The flattened workflow that is stored with the run."""
    spec = old["spec"]
    metadata = {**old["metadata"], "name": name}
    metadata["labels"] = {**(metadata.get("labels") or {}), SOURCE_LABEL: source_id}
    flat = [
        {
            "id": task.id,
            "uses": f"action:{task.uses_name}",
            "vars": task.vars,
            "with": task.input,
            "retry": task.retry.to_json(),
            "timeoutSeconds": task.timeout_seconds,
            "failure": task.failure,
        }
        for task in tasks
    ]
    return {
        "apiVersion": old["apiVersion"],
        "kind": old["kind"],
        "metadata": metadata,
        "spec": {
            **spec,
            "actions": actions,
            "policy": policy,
            "inputs": inputs,
            "outputs": {},
            "vars": {},
            "varsFiles": [],
            "subworkflows": {},
            "compensation": {"onFailure": "manual", "approval": spec["compensation"]["approval"]},
            "memory": {**spec["memory"], "working": memory},
            "runtime": {**spec["runtime"], "maxConcurrency": 1},
            "tasks": flat,
        },
    }
