"""What the planning of a retry or a repair comes to: verdicts, blocks, and the JSON of contract 9.3. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentctl.store.compensations import Undoing
from agentctl.store.derived_runs import DoneElsewhere, ReusedTask, SourceEffect, SourceRun, SourceTask

from .diagnostics import Diagnostic
from .plan import Plan

API_VERSIONS = {"retry": "agentctl.dev/retry-plan/v1", "repair": "agentctl.dev/repair-plan/v1"}
WORKFLOW = "$workflow"
"""What a block belongs to that concerns no single task."""

_SUMMARY = ("providerTasks", "actionTasks", "declaredEffects", "uncertainSourceEffects")

MAX_FINDINGS = 20
"""Blocks that an error lists; the plan has all of them."""


@dataclass(frozen=True, slots=True)
class Block:
    """Why a run cannot be made: a rule of contract 9.2, and which roots would take the task into the closure.

    `full_fork` says that no choice of roots helps: only a run with fresh effects throughout. `remedy` is the next step
    where the state of an effect decides about it.
    """

    task_id: str
    rule: str
    message: str
    source_fingerprint: str | None = None
    target_fingerprint: str | None = None
    roots: tuple[str, ...] = ()
    full_fork: bool = False
    remedy: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of a plan."""
        return {
            "taskId": self.task_id,
            "rule": self.rule,
            "message": self.message,
            "sourceFingerprint": self.source_fingerprint,
            "targetFingerprint": self.target_fingerprint,
            "suggestedRepairRoots": list(self.roots),
            "fullForkRequired": self.full_fork,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one task, and why in words: `reuse`, `execute`, `removed` or `blocked`."""

    task_id: str
    disposition: str
    reason: str
    source_state: str | None
    source_fingerprint: str | None
    target_fingerprint: str | None

    def as_json(self) -> dict[str, Any]:
        """The object of a plan."""
        return {
            "taskId": self.task_id,
            "disposition": self.disposition,
            "reason": self.reason,
            "sourceState": self.source_state,
            "sourceFingerprint": self.source_fingerprint,
            "targetFingerprint": self.target_fingerprint,
        }


@dataclass(slots=True)
class RecoveryPlan:
    """A retry or a repair before it exists. `reused` and `rerun` are in the compiled order of the target."""

    mode: str
    source: SourceRun
    target: Plan
    roots: list[str]
    failed_only: bool
    restart_successful: bool
    reused: list[ReusedTask] = field(default_factory=list)
    rerun: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    effects: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMARY, 0))
    approvals: list[str] = field(default_factory=list)

    @property
    def compatible(self) -> bool:
        """Whether the run can be made."""
        return not self.blocks

    def suggested_roots(self) -> list[str]:
        """The roots that would resolve what is blocked as far as roots can, in compiled order."""
        wanted = {root for block in self.blocks for root in block.roots} | set(self.roots)
        return [name for name in self.target.order if name in wanted]

    def as_json(self) -> dict[str, Any]:
        """RetryPlan or RepairPlan (contract 9.3)."""
        head: dict[str, Any] = {
            "apiVersion": API_VERSIONS[self.mode],
            "compatible": self.compatible,
            "sourceRunId": self.source.run.run_id,
        }
        if self.mode == "retry":
            head |= {
                "workflowDigest": self.source.run.workflow_digest,
                "failedOnly": self.failed_only,
                "retryRoots": self.roots,
            }
        else:
            head |= {
                "sourceWorkflowDigest": self.source.run.workflow_digest,
                "targetWorkflowDigest": self.target.workflow_digest,
                "repairRoots": self.roots,
            }
        head |= {
            "restartSuccessful": self.restart_successful,
            "reusedTasks": [task.source.task_id for task in self.reused],
            "rerunTasks": self.rerun,
        }
        if self.mode == "repair":
            head |= {"newTasks": self.added, "removedTasks": self.removed, "changedTasks": self.changed}
        return head | {
            "blockedReuse": [block.as_json() for block in self.blocks],
            "freshEffectSummary": self.effects,
            "approvalSummary": self.approvals,
            "estimatedProviderTasks": self.effects["providerTasks"],
            "warnings": self.warnings,
            "tasks": [verdict.as_json() for verdict in self.verdicts],
        }

    def findings(self) -> Iterator[Diagnostic]:
        """The blocks as findings of an error, at most `MAX_FINDINGS`."""
        said: set[str | None] = set()
        for block in self.blocks[:MAX_FINDINGS]:
            hint = advice(block, self)
            if hint in said:
                hint = None  # the same step for several tasks is told once
            said.add(hint)
            yield Diagnostic(block.rule, block.message, path=block.task_id, help=hint)
        left = len(self.blocks) - MAX_FINDINGS
        if left > 0:
            yield Diagnostic("blocked", f"and {left} more; `--plan` shows all of them")


def done_before(elsewhere: Sequence[DoneElsewhere], tasks: Collection[str]) -> Iterator[str]:
    """A warning for each other run of the same source that executes some of these tasks, or has.

    What must not be repeated is then done twice, which a person may want (contract 5.6 blocks the source's own only).
    """
    runs: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for item in elsewhere:
        if item.task_id in tasks:
            done, going_on = runs.setdefault((item.run_id, item.state), ([], []))
            (going_on if item.effect_id is None else done).append(item.task_id)
    for (run_id, state), (done, going_on) in runs.items():
        if done:
            yield f"{run_id} ({state}) has done this part, too, which must not be repeated: {some(done)}"
        if going_on:
            yield f"{run_id} ({state}) has not ended, and executes the same part: {some(going_on)}"


def some(names: Sequence[str]) -> str:
    """Names for a line, the first five of many."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def everything_again(source_id: str) -> str:
    """The last resort."""
    return f"`agentctl fork {source_id}` executes everything once more, with all its effects"


def find_out(effect_id: str) -> str:
    """The next step when nobody knows whether an effect happened."""
    return f"find out what was done, then `agentctl effects reconcile {effect_id} --status applied|not-applied …`"


def do_again(task: SourceTask, source_id: str) -> str:
    """The next step for a result that is undone: only a fresh one helps."""
    if task.disposition != "executed":
        return f"what it did is undone, in another run than this one; {everything_again(source_id)}"
    task_id = task.task_id
    acknowledged = " --restart-successful" if task.state == "succeeded" else ""
    return f"what it did is undone, so it has to be executed again: --from {task_id}{acknowledged}"


def being_undone(effect: SourceEffect, task_id: str, undoing: Undoing) -> tuple[str, str]:
    """(message, next step) for an effect that somebody undoes, or may have undone."""
    what = f"effect {effect.effect_id[:12]} of {task_id}"
    if undoing.how == "due":
        return f"{what} is about to be undone: the compensation of {undoing.owner} is due", (
            f"`agentctl compensate {undoing.owner}` carries that out; then plan again"
        )
    if undoing.how == "in_progress":
        return f"{what} is being undone by {undoing.by}, which has not ended", (
            f"`agentctl status {undoing.by}` shows what that waits for; plan again when it has ended"
        )
    if undoing.how == "undone":
        return f"{what} was undone by {undoing.by}", f"`agentctl compensate {undoing.owner}` records that; plan again"
    inverse = undoing.inverse or ""
    return f"nobody knows whether {what} was undone: {inverse[:12]} of {undoing.by} is uncertain", find_out(inverse)


def unsafe_remedy(
    effect: SourceEffect,
    task_id: str,
    source_id: str,
    undoing: Undoing | None,
    *,
    declares_inverse: bool,
    can_stay: bool,
) -> str:
    """The next step for an effect that must not be sent again as things stand.

    `can_stay`: the task has a result, and nothing above it has to be executed. Only an effect of agentctl can be named
    as what has undone another one (contract 5.5), so for what was undone by hand a fork is all that is left.
    """
    if undoing is not None:
        return being_undone(effect, task_id, undoing)[1]
    if effect.reconciled is None and effect.status in ("started", "uncertain"):
        return find_out(effect.effect_id)
    if declares_inverse:
        undo = f"`agentctl compensate {source_id} --task {task_id}` undoes it, then plan again"
        return f"{undo}; `agentctl fork {source_id}` would do everything again, this effect too"
    known = "it is known to have happened, and "
    known += f"no root at or above {task_id} keeps its result" if can_stay else "there is no result that could be kept"
    return (
        f"{known}; if a later effect of the same run has undone it, `agentctl effects reconcile {effect.effect_id} "
        f"--status compensated --compensation-effect EFFECT …` says so; otherwise `agentctl fork {source_id}` does "
        "everything again, this effect too"
    )


def advice(block: Block, plan: RecoveryPlan) -> str | None:
    """What a person can do about a block of a plan."""
    mode, source_id = plan.mode, plan.source.run.run_id
    if block.remedy is not None:
        return block.remedy
    if block.rule == "successful_root_requires_acknowledgement":
        return "add --restart-successful if it is to be executed again"
    if block.rule == "repair_root_missing":
        close = similar(block.task_id, plan.target.order)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        return f"{meant}`agentctl plan FILE` shows the tasks of the file, those of fan-outs by their full ids"
    if block.full_fork:
        return f"no choice of roots helps here; {everything_again(source_id)}"
    if block.roots and mode == "retry" and block.task_id == WORKFLOW:
        return f"`agentctl repair FILE {source_id} {root_options(block.roots, plan)}` takes the changed file"
    if block.roots:
        return f"take it into what is executed: {root_options(block.roots, plan)}"
    return None


def fitting(pattern: str, order: Sequence[str]) -> list[str]:
    """The ids that fit a pattern with `*`, in compiled order; if none does, the pattern itself, which is no id."""
    from fnmatch import fnmatchcase

    return [task_id for task_id in order if fnmatchcase(task_id, pattern)] or [pattern]


def similar(name: str, order: Sequence[str]) -> list[str]:
    """Up to three full ids that somebody may have meant: what goes on as `name` does, else what is spelled like it."""
    from difflib import get_close_matches

    longer = [task_id for task_id in order if task_id.startswith(f"{name}-")]
    return longer[:3] or get_close_matches(name, order[:10_000], 3)


def _together(roots: Sequence[str], target: Plan) -> Iterator[str]:
    """The names of these roots for a command line: one pattern for all children of an expansion, if all are meant."""
    parents: dict[str, list[str]] = {}
    for root in roots:
        task = target.tasks.get(root)
        if task is not None and task.expansion is not None:
            parents.setdefault(task.expansion.parent, []).append(root)
    patterns: dict[str, str] = {}
    for parent, children in parents.items():
        # Ids of others may begin like that as well; then the pattern would mean them, too.
        if len(children) > 1 and len(children) == sum(1 for name in target.order if name.startswith(f"{parent}--")):
            patterns |= dict.fromkeys(children, f"'{parent}--*'")
    yield from dict.fromkeys(patterns.get(root, root) for root in roots)


def root_options(roots: Sequence[str], plan: RecoveryPlan, most: int = 5) -> str:
    """The options that choose these roots, with the acknowledgement that they need."""
    named = list(_together(roots, plan.target))
    words = [f"--from {name}" for name in named[:most]]
    if len(named) > most:
        words.append(f"and {len(named) - most} more")
    known = plan.source.tasks
    if any(name in known and known[name].state == "succeeded" for name in roots):
        words.append("--restart-successful")
    return " ".join(words)
