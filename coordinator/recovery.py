"""Planning of retry and repair: what can be reused, what is executed again, and why (contract 9.2).

It is effect-free: it takes the rows of the source that one transaction has read (`derived_runs.SourceRun`) and the
compiled target, and gives a `RecoveryPlan`. Only the bytes of artifacts are looked at outside of that, through a
function that the caller gives.

The closure is what is executed: the roots and everything that depends on them in the target, through `needs` and
through working memory alike. A task outside of it is reused only if everything is proven of it; the checks of one task
stop at the first that fails. A task that a decision has skipped (a condition, a router, or an end of a loop) is taken
over like one that has succeeded, if the same decision would be made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agentctl.store.canonical import canonical, loads, text_digest
from agentctl.store.compensations import Undoing
from agentctl.store.derived_runs import ReusedTask, SourceEffect, SourceRun, SourceTask
from agentctl.store.engine import RunSnapshot
from agentctl.store.errors import AlreadyTerminal, CorruptStore, NotTerminal, TaskFault
from agentctl.store.records import TASK_METADATA_VERSION, TaskRow
from agentctl.store.states import MUTATING, REPEATABLE_IDEMPOTENCY

from .fresh_work import fresh_work
from .plan import AGGREGATES, MEMORY_WRITERS, CompiledTask, Plan
from .plan_index import PlanIndex, contract_of
from .recovery_plan import (
    WORKFLOW,
    Block,
    RecoveryPlan,
    Verdict,
    being_undone,
    do_again,
    done_before,
    find_out,
    fitting,
    unsafe_remedy,
)
from .scheduler import Scheduler
from .submission import refuse_source

BlobCheck = Callable[[str, int], str]
"""Whether the stored bytes of a digest are `ok` (see `Blobs.check`)."""

CHECKS = (
    "outside_rerun_closure",
    "definition_fingerprint",
    "resolved_input_digest",
    "dependency_set",
    "output_contract",
    "output_digest",
    "artifact_integrity",
    "state_delta_digest",
    "effect_certainty",
)
"""What has been proven of a reused task, besides how it has ended (contract 9.4)."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks for: `retry` or `repair`, from these roots or from whatever has failed."""

    mode: str
    roots: tuple[str, ...] = ()
    failed_only: bool = False
    restart_successful: bool = False


def plan_recovery(
    source: SourceRun, target: Plan, inputs: Mapping[str, Any], wish: Wish, check_blob: BlobCheck
) -> RecoveryPlan:
    """The plan of a retry or repair of `source` with the compiled `target` and the inputs of the new run.

    Raises `NotTerminal`, `AlreadyTerminal` when nothing of the source failed, and `UsageError` for a source from which
    nothing is derived. Whatever else stands in the way is a block of the plan.
    """
    require_source(source)
    return _Planner(source, target, inputs, wish, check_blob).plan()


def require_source(source: SourceRun) -> None:
    """Raise `UsageError` or `NotTerminal` for a run from which no retry or repair is derived, whatever the file is."""
    run = source.run
    refuse_source(run, loads(source.documents.settings_json))
    if run.ended_at is None:
        raise NotTerminal(
            f"{run.run_id} has not ended yet: {run.state}",
            remedy=f"wait for its end, `agentctl resume {run.run_id}` goes on with it, `cancel` ends it",
            run_id=run.run_id,
        )


def is_unsafe(effect: SourceEffect) -> bool:
    """Whether an effect must not be sent again, as far as is known (contract 5.6).

    One that is superseded is safe: its own contract allows it to be repeated, and it was given up.
    """
    if effect.effect_class not in MUTATING or effect.reconciled in ("not_applied", "compensated"):
        return False
    if effect.reconciled == "applied":
        return effect.idempotency not in REPEATABLE_IDEMPOTENCY
    if effect.status in ("started", "uncertain"):
        return not effect.superseded
    return effect.status == "succeeded" and effect.idempotency not in REPEATABLE_IDEMPOTENCY


def settled_skips(source: SourceRun, needs: Mapping[str, Iterable[str]]) -> set[str]:
    """Tasks that a decision has skipped, by itself or because all that they lack was skipped by one.

    `needs` are those of the source's plan, in compiled order.
    """
    found: set[str] = set()
    for task_id, before in needs.items():
        task = source.tasks[task_id]
        if task.state != "skipped":
            continue
        lacking = [name for name in before if source.tasks[name].state != "succeeded"]
        if task.output_json is not None or (lacking and found.issuperset(lacking)):
            found.add(task_id)
    return found


class _Fault(Exception):
    """A check that has failed."""

    def __init__(self, rule: str, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule
        self.message = message
        self.remedy = remedy


class _Planner:
    """One planning. Everything that it knows of the source comes from `SourceRun`."""

    def __init__(
        self, source: SourceRun, target: Plan, inputs: Mapping[str, Any], wish: Wish, check_blob: BlobCheck
    ) -> None:
        self.source = source
        self.target = target
        self.inputs = dict(inputs)
        self.wish = wish
        self.check_blob = check_blob
        self.index = PlanIndex(target)
        # The same plan needs no second index: a retry, mostly.
        self.same = target.plan_digest == source.run.plan_digest
        if list(source.tasks) != [task.id for task in self.source_index.tasks]:
            raise CorruptStore(
                f"{source.run.run_id} is damaged: its tasks are not those of its plan; nothing is taken from it",
                remedy="`agentctl db verify` shows everything that does not fit",
                run_id=source.run.run_id,
            )
        # A remote task that was found to be completed afterwards stands for the end that its task did not reach.
        self.ends = {**source.tasks, **{name: _recovered(source, name) for name in source.continued}}
        self.skips = settled_skips(source, self.source_needs)
        self.blobs: dict[tuple[str, int], str] = {}
        self.blocked: dict[str, Block] = {}
        self.closure: set[str] = set()
        self.effects: dict[str, list[SourceEffect]] = {}

    # -- the source's plan -----------------------------------------------------------------------------------------

    @cached_property
    def source_index(self) -> PlanIndex:
        return self.index if self.same else PlanIndex(Plan.from_json(loads(self.source.documents.plan_json)))

    @cached_property
    def source_needs(self) -> dict[str, tuple[str, ...]]:
        return {task.id: task.needs for task in self.source_index.tasks}

    def source_prints(self, task_id: str) -> tuple[str | None, str | None]:
        """(definition, output contract) of a task of the source: as recorded with its success, else of its plan."""
        task = self.source.tasks.get(task_id)
        if task is None:
            return None, None
        if task.state == "succeeded":
            return task.definition_fingerprint, task.output_contract_fingerprint
        position = self.source_index.place[task_id]
        return self.prints[position] if self.same else self.source_index.fingerprints(position)

    @cached_property
    def prints(self) -> list[tuple[str, str]]:
        """(definition, output contract) of every task of the target."""
        return [self.index.fingerprints(position) for position in range(len(self.index.tasks))]

    # -- the plan --------------------------------------------------------------------------------------------------

    def plan(self) -> RecoveryPlan:
        wish = self.wish
        plan = RecoveryPlan(
            wish.mode, self.source, self.target, self.chosen_roots(), wish.failed_only, wish.restart_successful
        )
        self.compare(plan)
        whole = self.whole_workflow(plan)
        if whole is not None:
            plan.blocks.append(whole)
            plan.verdicts = [self.verdict(task, plan, whole) for task in self.index.tasks]
            return plan
        self.close(plan.roots)
        plan.rerun = [task.id for task in self.index.tasks if task.id in self.closure]
        plan.blocks += self.root_problems(plan.roots)
        blocked_roots = {block.task_id for block in plan.blocks}
        for name in plan.rerun:
            if name not in blocked_roots and (block := self.closure_problem(name)) is not None:
                plan.blocks.append(block)
        plan.reused = self.reuse()
        blocks = {**self.blocked, **{block.task_id: block for block in plan.blocks}}
        plan.blocks += [self.blocked[task.id] for task in self.index.tasks if task.id in self.blocked]
        plan.verdicts = [self.verdict(task, plan, blocks.get(task.id)) for task in self.index.tasks]
        plan.verdicts += [self.gone(name) for name in plan.removed]
        self.summarize(plan)
        return plan

    def chosen_roots(self) -> list[str]:
        if not self.wish.failed_only:
            return list(dict.fromkeys(name for root in self.wish.roots for name in self.named(root)))
        open_ends = [name for name, task in self.ends.items() if task.state != "succeeded" and name not in self.skips]
        if not open_ends and not self.source.continued:
            run = self.source.run
            raise AlreadyTerminal(
                f"nothing of {run.run_id} is left to do: every task has succeeded, or a decision has skipped it",
                remedy="name tasks with --from, and add --restart-successful to execute them again",
                run_id=run.run_id,
            )
        return self.first_of(set(open_ends))

    def named(self, root: str) -> list[str]:
        """The tasks that a root of the command line names: one, or with `*` in it all whose ids fit."""
        return fitting(root, self.target.order) if "*" in root else [root]

    def first_of(self, names: Collection[str]) -> list[str]:
        """Those that have failed, and of the others what is no descendant of any of them: the rest follows anyway."""
        index, below = self.source_index, _below(self.source_index, names)
        return [
            task.id
            for position, task in enumerate(index.tasks)
            if task.id in names and (position not in below or self.source.tasks[task.id].state == "failed")
        ]

    def compare(self, plan: RecoveryPlan) -> None:
        """What differs between source and target (a retry has no differences)."""
        if self.wish.mode == "retry":
            return
        old = self.source.tasks
        plan.added = [task.id for task in self.index.tasks if task.id not in old]
        plan.removed = [name for name in old if name not in self.index.place]
        plan.changed = [
            task.id
            for task in self.index.tasks
            if task.id in old and self.source_prints(task.id)[0] != self.prints[task.position][0]
        ]

    def whole_workflow(self, plan: RecoveryPlan) -> Block | None:
        """What stands in the way of any reuse at all."""
        run = self.source.run
        if run.mode == "replay":
            message = f"{run.run_id} is a replay: it has recorded results, and no effects of its own"
            return Block(WORKFLOW, "recorded_replay_has_no_direct_effect_history", message, full_fork=True)
        if run.workflow_name != self.target.workflow_name:
            message = f"the file describes {self.target.workflow_name!r}, the run was one of {run.workflow_name!r}"
            return Block(WORKFLOW, "workflow_identity_mismatch", message, full_fork=True)
        if self.wish.mode == "retry" and run.workflow_digest != self.target.workflow_digest:
            return Block(
                WORKFLOW,
                "retry_workflow_definition_mismatch",
                f"{self.difference()}: {run.run_id} was made from something else, which a retry does not take",
                run.workflow_digest,
                self.target.workflow_digest,
                tuple(self.differing()),
            )
        return None

    def difference(self) -> str:
        if loads(self.source.documents.plan_json)["vars"] != self.target.vars:
            return "the variables are not those (a retry needs the same --var and --vars-file, and the same files)"
        return "the workflow has changed"

    def differing(self) -> list[str]:
        """Tasks that are new or have changed, as roots of a repair; only those that no other one implies."""
        old = self.source.tasks
        found = [
            task.id
            for task in self.index.tasks
            if task.id not in old or self.source_prints(task.id)[0] != self.prints[task.position][0]
        ]
        below = _below(self.index, found)
        return [name for name in found if self.index.place[name] not in below]

    # -- what is executed ------------------------------------------------------------------------------------------

    def close(self, roots: Iterable[str]) -> None:
        known = [name for name in roots if name in self.index.place]
        self.closure = {*known, *(self.index.tasks[position].id for position in _below(self.index, known))}

    def root_problems(self, roots: Iterable[str]) -> Iterable[Block]:
        for name in roots:
            if name not in self.index.place:
                yield self.block(name, "repair_root_missing", f"the file has no task {name!r}")
                continue
            task = self.source.tasks.get(name)
            if task is None or task.state != "succeeded":
                continue
            if not self.wish.restart_successful:
                message = f"{name} has succeeded; to execute it again has to be asked for"
                yield self.block(name, "successful_root_requires_acknowledgement", message)
            elif task.disposition != "executed":
                message = f"{name} was taken over by {self.source.run.run_id} and not executed in it: its effects"
                message += " are in the history of another run"
                yield self.block(name, "indirect_effect_history", message, full_fork=True)

    def closure_problem(self, name: str) -> Block | None:
        """Whether an effect of a task must not be sent again."""
        task = self.source.tasks.get(name)
        if task is None:
            return None
        try:
            effects = self.history(task)
        except _Fault as fault:
            return self.block(name, fault.rule, fault.message, full_fork=True)
        for effect in effects:
            undoing = self.undoing(effect)
            if undoing is not None and undoing.how in ("due", "in_progress"):
                # What is sent again now could be undone right after it.
                message, remedy = being_undone(effect, name, undoing)
                return self.block(name, "unreconciled_effect", message, remedy=remedy)
            if is_unsafe(effect):
                how = effect.reconciled or effect.status
                message = (
                    f"effect {effect.effect_id[:12]} of {name} ({effect.operation or effect.effect_class}, idempotency "
                    f"{effect.idempotency}) is {how}: to send it again may do it twice"
                )
                inverse, stays = self.declares_inverse(name), self.can_stay(name)
                source_id = self.source.run.run_id
                remedy = unsafe_remedy(effect, name, source_id, undoing, declares_inverse=inverse, can_stay=stays)
                return self.block(name, "unreconciled_effect", message, remedy=remedy)
        return None

    def undoing(self, effect: SourceEffect) -> Undoing | None:
        """Why an effect may have been undone, or soon may be, if it may: what was concluded about it is over that."""
        if effect.reconciled in ("compensated", "not_applied"):
            return None
        return self.source.undoing.get(effect.effect_id)

    def declares_inverse(self, name: str) -> bool:
        """Whether the source can undo what this task has done, by its own plan."""
        index = self.source_index
        task = self.source.tasks[name]
        return task.disposition == "executed" and index.tasks[index.place[name]].compensate is not None

    def can_stay(self, name: str) -> bool:
        """Whether some choice of roots could leave the result of a task as it is."""
        return self.ends[name].state == "succeeded" and self.index.place[name] not in self.below_open

    @cached_property
    def below_open(self) -> set[int]:
        """The positions of all that depends on something without a result."""
        known = self.index.place
        names = [name for name, task in self.ends.items() if task.state != "succeeded" and name not in self.skips]
        return _below(self.index, [name for name in names if name in known])

    def history(self, task: SourceTask) -> list[SourceEffect]:
        """The effects of a task, also of one that was taken over. Raises `_Fault` for a bad provenance."""
        known = self.effects.get(task.task_id)
        if known is None:
            if task.disposition == "executed":
                known = self.source.effects.get(task.task_id, [])
            else:
                known = list(_provenance(task, self.source.earlier))
            self.effects[task.task_id] = known
        return known

    # -- what is reused --------------------------------------------------------------------------------------------

    def reuse(self) -> list[ReusedTask]:
        """Every task outside of the closure that passes all checks; the others are blocked."""
        deltas: dict[str, tuple[tuple[str, str | None], ...]] = {}
        wrong: dict[str, _Fault] = {}
        for task in self.index.tasks:
            if task.id in self.closure:
                continue
            try:
                self.check_record(task)
            except _Fault as fault:
                self.block_reuse(task, fault)
                continue
            try:
                deltas[task.id] = self.delta(task, self.ends[task.id])
            except _Fault as fault:
                deltas[task.id], wrong[task.id] = (), fault
        scheduler = self.scheduler(deltas)
        reused = []
        for task in self.index.tasks:
            if task.id in deltas:
                try:
                    self.check_input(scheduler, task)
                    if task.id in wrong:
                        raise wrong[task.id]
                except _Fault as fault:
                    self.block_reuse(task, fault)
                    scheduler.leave_open(task.position)
                    continue
                reused.append(self.taken_over(task, deltas[task.id]))
            elif task.id in self.closure:
                self.foresee_fresh(scheduler, task, deltas)
        return reused

    def check_record(self, task: CompiledTask) -> None:
        """What can be said of a task by itself, in the order of the table of contract 9.2. Raises `_Fault`."""
        name, old = task.id, self.ends.get(task.id)
        if old is None:
            raise _Fault("new_task_outside_repair_closure", f"{name} is new: it has no result that could be reused")
        if old.state != "succeeded" and name not in self.skips:
            message = f"{name} is {old.state} in {self.source.run.run_id}: it has no result that could be reused"
            raise _Fault("source_task_not_successful", message)
        definition, contract = self.source_prints(name)
        if old.metadata_version != TASK_METADATA_VERSION or definition is None or contract is None:
            raise _Fault("legacy_task_metadata", f"the record of {name} is too old to prove anything of it")
        wanted = self.prints[task.position]
        if contract != wanted[1]:
            raise _Fault("output_contract_mismatch", f"the output contract of {name} has changed")
        if self.source_needs[name] != task.needs:
            raise _Fault("dependency_set_mismatch", f"{name} needs other tasks than it did: {_needs(task)}")
        if definition != wanted[0]:
            raise _Fault("definition_fingerprint_mismatch", f"the definition of {name} has changed")
        self.check_effects(old)
        if task.uses_kind == "agent" and self.index.declared_schema(task) is None and self.feeds(task):
            message = f"{name} is an agent without an output contract, and other tasks use what it says"
            raise _Fault("missing_output_contract", message)
        self.check_output(task, old)
        self.check_artifacts(old)

    def feeds(self, task: CompiledTask) -> bool:
        return bool(self.index.dependents[task.position])

    def check_effects(self, old: SourceTask) -> None:
        for effect in self.history(old):
            open_end = effect.status in ("started", "uncertain") and not effect.superseded
            if open_end and effect.reconciled not in ("applied", "not_applied"):
                message = (
                    f"effect {effect.effect_id[:12]} of {old.task_id} is {effect.status}: nobody knows what it did"
                )
                raise _Fault("unresolved_reused_effect", message, find_out(effect.effect_id))
            if effect.reconciled == "compensated":
                message = f"effect {effect.effect_id[:12]} of {old.task_id} was compensated: what it did is undone"
                raise _Fault("unresolved_reused_effect", message, do_again(old, self.source.run.run_id))
            undoing = self.undoing(effect)
            if undoing is not None:
                message, remedy = being_undone(effect, old.task_id, undoing)
                raise _Fault("unresolved_reused_effect", message, remedy)

    def check_output(self, task: CompiledTask, old: SourceTask) -> None:
        digest = None if old.output_json is None else text_digest(old.output_json)
        if digest != old.output_digest or digest != old.told_output:
            raise _Fault("output_digest_mismatch", f"the stored output of {task.id} is not the one that was recorded")
        if old.state != "succeeded":
            return
        try:
            value = loads(old.output_json or "null")
        except (TaskFault, ValueError):
            raise _Fault("output_contract_validation", f"the stored output of {task.id} is no JSON") from None
        check = self.index.contract(task.position)
        problem = check(value) if check is not None else None
        if check is None and contract_of(task.uses_kind, None) is not None and not isinstance(value, dict):
            problem = "it is not an object"
        if problem is not None:
            raise _Fault("output_contract_validation", f"the output of {task.id} does not fit its contract: {problem}")

    def check_artifacts(self, old: SourceTask) -> None:
        kept = self.source.references.get(old.task_id, [])
        digest = None if old.manifest_json is None else text_digest(old.manifest_json)
        sound = digest == old.told_manifest
        if sound:
            items = [] if old.manifest_json is None else loads(old.manifest_json)
            sound = sorted((item["path"], item["digest"], item["sizeBytes"]) for item in items) == sorted(kept)
        if not sound:
            raise _Fault("artifact_integrity", f"the artifacts of {old.task_id} are not those that were recorded")
        for path, blob, size in kept:
            state = self.blobs.get((blob, size))
            if state is None:
                state = self.blobs[blob, size] = self.check_blob(blob, size)
            if state != "ok":
                raise _Fault("artifact_integrity", f"the stored bytes of {path!r} of {old.task_id} are {state}")

    def delta(self, task: CompiledTask, old: SourceTask) -> tuple[tuple[str, str | None], ...]:
        """What a task has written to working memory. Raises `_Fault` when it is not what was recorded."""
        told = self.source.memory.get(old.position, {})
        if old.state != "succeeded" or task.action_kind not in MEMORY_WRITERS:
            if told or old.delta_json is not None:
                raise _Fault("state_delta_invalid", f"{task.id} cannot have written to working memory, and has")
            return ()
        if old.delta_json is None:
            raise _Fault("state_delta_missing", f"what {task.id} has written to working memory was not recorded")
        if text_digest(old.delta_json) != old.delta_digest:
            message = f"the stored state delta of {task.id} is not the one that was recorded"
            raise _Fault("state_delta_digest_mismatch", message)
        written = _written(old.delta_json)
        if written is None or dict(written) != told or not {key for key, _ in written} <= set(task.memory_writes):
            raise _Fault("state_delta_invalid", f"the state delta of {task.id} is not what it has written")
        return written

    def scheduler(self, deltas: Mapping[str, tuple[tuple[str, str | None], ...]]) -> Scheduler:
        """The new run as its driver would see it at its start, if everything that is not blocked is reused."""
        rows: list[TaskRow] = []
        memory: list[tuple[str, int, str | None]] = [
            (key, -1, canonical(value)) for key, value in self.target.memory.items()
        ]
        for task in self.index.tasks:
            old = self.ends[task.id] if task.id in deltas else None
            state, digest = ("pending", None) if old is None else (old.state, old.output_digest)
            rows.append(TaskRow(task.position, task.id, state, 0, digest, None))
            memory += [(key, task.position, value) for key, value in deltas.get(task.id, ())]
        run = replace(
            self.source.run,
            mode=self.wish.mode,
            max_concurrency=self.target.max_concurrency,
            task_count=len(rows),
            deadline_at=None,
            cancel_requested_at=None,
            pause_requested_at=None,
        )
        snapshot = RunSnapshot(run, rows, [], sorted(memory, key=lambda item: item[:2]))
        return Scheduler(self.index, snapshot, self.inputs, self.outputs, lambda: 0.0)

    def outputs(self, positions: list[int]) -> dict[int, tuple[str | None, str | None]]:
        found = {}
        for position in positions:
            old = self.ends.get(self.index.tasks[position].id)
            if old is not None:
                found[position] = (old.output_json, old.error_json)
        return found

    def check_input(self, scheduler: Scheduler, task: CompiledTask) -> None:
        """Whether a task would get what it got, from the initial memory of the target and what is reused."""
        old = self.ends[task.id]
        for before in sorted(self.index.waits[task.position]):
            if scheduler.state[before] == "pending":
                message = f"{task.id} depends on {self.index.tasks[before].id}, which cannot be reused"
                raise _Fault("resolved_input_unavailable", message)
        try:
            foreseen = scheduler.foresee(task.position)
        except TaskFault as fault:
            message = f"what {task.id} gets cannot be rendered: {fault.message}"
            raise _Fault("resolved_input_unavailable", message) from None
        if foreseen.skipped != _skipped_by(old):
            was = "was skipped and now would not be" if old.state == "skipped" else "would be skipped now"
            raise _Fault("resolved_input_digest_mismatch", f"{task.id} {was}")
        same = foreseen.skipped is not None
        if not same and foreseen.output_digest is not None:
            same = foreseen.output_digest == old.output_digest
        elif not same:
            same = foreseen.input_digest == old.input_digest
        if not same:
            message = f"{task.id} would get other input, variables or memory than it got"
            raise _Fault("resolved_input_digest_mismatch", message)

    def foresee_fresh(
        self, scheduler: Scheduler, task: CompiledTask, deltas: Mapping[str, tuple[tuple[str, str | None], ...]]
    ) -> None:
        """A task that is executed, and begins with nothing but what is reused: it must be able to begin."""
        if any(self.index.tasks[before].id not in deltas for before in self.index.waits[task.position]):
            return
        if any(scheduler.state[before] == "pending" for before in self.index.waits[task.position]):
            return  # blocked for itself
        try:
            scheduler.foresee(task.position)
        except TaskFault as fault:
            message = f"{task.id} would fail before it begins: {fault.message}"
            self.blocked[task.id] = self.block(task.id, "target_input_resolution", message)

    def taken_over(self, task: CompiledTask, memory: tuple[tuple[str, str | None], ...]) -> ReusedTask:
        old = self.ends[task.id]
        call = self.source.continued.get(task.id)
        how = "source_succeeded" if old.state == "succeeded" else "source_skipped_by_decision"
        if call is not None:
            how = "continued_protocol_effect_applied"
        decision = {
            "formatVersion": 1,
            "reason": self.reason_to_reuse(old),
            "checks": [how, *CHECKS],
            "sourceWorkflowDigest": self.source.run.workflow_digest,
            "targetWorkflowDigest": self.target.workflow_digest,
            "sourceEffects": [_as_provenance(effect) for effect in self.history(old)],
            "recoveredEffectId": None if call is None else call.effect_id,
        }
        definition, contract = self.prints[task.position]
        return ReusedTask(
            task.position, old, canonical(decision), definition, contract, memory, recovered=call is not None
        )

    def reason_to_reuse(self, old: SourceTask) -> str:
        if old.task_id in self.source.continued:
            peer_did = "its remote task was observed to be completed after its run had ended"
            return f"{peer_did}, and nothing that it depends on has changed"
        how = "succeeded" if old.state == "succeeded" else "was skipped by a decision that would be made again"
        return f"{how}, and nothing that it depends on has changed"

    # -- blocks and verdicts ---------------------------------------------------------------------------------------

    def block(
        self,
        name: str,
        rule: str,
        message: str,
        roots: tuple[str, ...] = (),
        full_fork: bool = False,
        remedy: str | None = None,
    ) -> Block:
        position = self.index.place.get(name)
        target = None if position is None else self.prints[position][0]
        return Block(name, rule, message, self.source_prints(name)[0], target, roots, full_fork, remedy)

    def block_reuse(self, task: CompiledTask, fault: _Fault) -> None:
        """Block a task; the roots that help are those of what it depends on, if that is blocked, else itself.

        What was taken over cannot be a root itself (`indirect_effect_history`), so for that no roots help.
        """
        roots: dict[str, None] = {}
        fork = False
        for before in sorted(self.index.waits[task.position]):
            block = self.blocked.get(self.index.tasks[before].id)
            if block is not None:
                roots.update(dict.fromkeys(block.roots))
                fork = fork or block.full_fork
        wanted = tuple(roots)
        if not wanted and not fork:
            old = self.source.tasks.get(task.id)
            fork = old is not None and old.state == "succeeded" and old.disposition != "executed"
            wanted = () if fork else (task.id,)
        self.blocked[task.id] = self.block(task.id, fault.rule, fault.message, wanted, fork, remedy=fault.remedy)

    def verdict(self, task: CompiledTask, plan: RecoveryPlan, block: Block | None) -> Verdict:
        old = self.source.tasks.get(task.id)
        disposition = "blocked"
        if block is not None:
            reason = block.message
        elif task.id in self.closure:
            disposition, reason = "execute", self.reason_to_execute(task, plan)
        else:
            assert old is not None
            disposition, reason = "reuse", self.reason_to_reuse(old)
        return Verdict(
            task.id,
            disposition,
            reason,
            None if old is None else old.state,
            self.source_prints(task.id)[0],
            self.prints[task.position][0],
        )

    def reason_to_execute(self, task: CompiledTask, plan: RecoveryPlan) -> str:
        old = self.source.tasks.get(task.id)
        if task.id in plan.roots and not plan.failed_only:
            return "was asked for"
        if task.id in plan.roots and old is not None:
            return f"{_HOW.get(old.state, old.state)} in the source"
        new = " (new)" if old is None else ""
        for name in task.needs:
            if name in self.closure:
                return f"needs {name}, which is executed{new}"
        for before in sorted(self.index.waits[task.position]):
            if self.index.tasks[before].id in self.closure:
                return f"uses memory after {self.index.tasks[before].id}, which is executed{new}"
        return "is executed"

    def gone(self, name: str) -> Verdict:
        task = self.source.tasks[name]
        return Verdict(name, "removed", "the file has it no more", task.state, self.source_prints(name)[0], None)

    # -- what a person should know ---------------------------------------------------------------------------------

    def summarize(self, plan: RecoveryPlan) -> None:
        fresh = [self.target.tasks[name] for name in plan.rerun]
        open_ends = sum(
            effect.status in ("started", "uncertain") and effect.reconciled is None
            for name in plan.rerun
            for effect in self.source.effects.get(name, ())
        )
        work = fresh_work(self.target, fresh, interactive=False)
        plan.effects = {**work["freshEffectSummary"], "uncertainSourceEffects": open_ends}
        plan.approvals = work["approvalSummary"]
        plan.warnings += self.gathering(plan)
        plan.warnings += self.warnings(fresh, open_ends, not plan.compatible)

    def gathering(self, plan: RecoveryPlan) -> Iterable[str]:
        """Named roots that execute nothing: aggregates of which all that they stand for is reused.

        Who names a fan-out, a loop or a call by its own id means its tasks, mostly.
        """
        reused = {task.source.task_id for task in plan.reused}
        for name in () if plan.failed_only else plan.roots:
            task = self.target.tasks.get(name)
            if task is not None and task.uses_kind in AGGREGATES and task.needs and reused.issuperset(task.needs):
                again = f"`--from '{name}--*' --restart-successful` executes them again"
                yield f"{name} only puts together what its tasks have come to, and these are reused; {again}"

    def warnings(self, fresh: Sequence[CompiledTask], open_ends: int, blocked: bool) -> Iterable[str]:
        yield from done_before(self.source.done_elsewhere, self.closure)
        if open_ends and not blocked:
            yield f"{open_ends} effects of the source began and were never confirmed; they are sent again"
        searches = [task.id for task in fresh if str(task.action_kind) in _LONG_TERM_READS]
        if searches:
            yield f"long-term memory is read again, and may have changed: {', '.join(searches[:5])}"
        if self.wish.mode == "retry" or self.same:
            return
        stored = loads(self.source.documents.plan_json)
        if stored["policy"] != self.target.policy:
            yield "the policy has changed; it holds for what is executed, and not for what is reused"
        ignored = [name for name, value in self.target.inputs.items() if self.inputs.get(name, value) != value]
        changed = [name for name in ignored if stored["inputs"].get(name) != self.target.inputs[name]]
        if changed:
            yield f"inputs are those of the source; other defaults in the file have no effect: {', '.join(changed)}"


_HOW = {"failed": "failed", "cancelled": "was cancelled", "skipped": "was skipped", "succeeded": "succeeded"}
_LONG_TERM_READS = frozenset({"builtin.long_term_memory.read", "builtin.long_term_memory.search"})


def _below(index: PlanIndex, names: Iterable[str]) -> set[int]:
    """The positions of all that depends on these tasks, through `needs` and through working memory alike."""
    pending = [index.place[name] for name in names]
    found: set[int] = set()
    while pending:
        for dependent in index.dependents[pending.pop()]:
            if dependent not in found:
                found.add(dependent)
                pending.append(dependent)
    return found


def _needs(task: CompiledTask) -> str:
    shown = ", ".join(task.needs[:5]) or "nothing"
    return shown if len(task.needs) <= 5 else f"{shown} and {len(task.needs) - 5} more"


def _recovered(source: SourceRun, name: str) -> SourceTask:
    """A task of the source as if its run had had the result of its remote task in time."""
    call = source.continued[name]
    return replace(
        source.tasks[name],
        state="succeeded",
        output_json=call.result_json,
        output_digest=text_digest(call.result_json),
        error_json=None,
        told_output=call.told_result,
    )


def _skipped_by(old: SourceTask) -> str | None:
    """Why a settled task was skipped, in the words of `Foreseen.skipped`."""
    if old.state != "skipped":
        return None
    if old.output_json is None:
        return "dependency"
    output = loads(old.output_json)
    return "route" if isinstance(output, dict) and "route" in output else "condition"


def _written(text: str) -> tuple[tuple[str, str | None], ...] | None:
    """The changes of a state delta as rows of memory, or None when it is none (contract 7)."""
    try:
        delta = loads(text)
    except (TaskFault, ValueError):
        return None
    if not isinstance(delta, dict) or delta.keys() != {"formatVersion", "set", "remove"} or delta["formatVersion"] != 1:
        return None
    if not isinstance(delta["set"], dict) or not isinstance(delta["remove"], list):
        return None
    found: list[tuple[str, str | None]] = [(key, canonical(value)) for key, value in delta["set"].items()]
    return tuple(found + [(str(key), None) for key in delta["remove"]])


_PROVENANCE = {"effectId": str, "effectClass": str, "idempotency": str, "status": str, "confirmed": bool}


def _as_provenance(effect: SourceEffect) -> dict[str, Any]:
    data: dict[str, Any] = {
        "effectId": effect.effect_id,
        "effectClass": effect.effect_class,
        "idempotency": effect.idempotency,
        "status": effect.status,
        "confirmed": effect.confirmed,
    }
    if effect.superseded:
        data["superseded"] = True
    if effect.reconciled is not None:
        data["reconciled"] = effect.reconciled
    return data


def _provenance(task: SourceTask, earlier: Mapping[str, str | None]) -> Iterable[SourceEffect]:
    """The effects that a task which was taken over goes back to. What was concluded since then counts.

    Raises `_Fault` when its reuse decision is not one.
    """
    fault = _Fault("reuse_effect_provenance", f"the record of where {task.task_id} was taken from is damaged")
    try:
        decision = loads(task.reuse_decision_json or "null")
        effects, version, checks = decision["sourceEffects"], decision["formatVersion"], decision["checks"]
    except (TaskFault, ValueError, TypeError, KeyError):
        raise fault from None
    if version != 1 or not isinstance(checks, list) or not isinstance(effects, list):
        raise fault
    for item in effects:
        if not isinstance(item, dict) or any(type(item.get(name)) is not kind for name, kind in _PROVENANCE.items()):
            raise fault
        yield SourceEffect(
            item["effectId"],
            task.task_id,
            "",
            item["effectClass"],
            item["idempotency"],
            item["status"],
            item["confirmed"],
            bool(item.get("superseded", False)),
            earlier.get(item["effectId"]) or item.get("reconciled"),
        )
