"""Runs that are made from another run: what its source has recorded, and their creation (contract 9.2 and 9.4).

`read_source` gives everything that planning a retry or a repair looks at, from one snapshot, and holds it to the
source's chain of checkpoints: what was changed behind the back of agentctl is found before a run exists. `create`
writes the new run with all that it has taken over in one transaction, in rows of its own, so that nothing of it depends
on the source afterwards. Every function takes the open transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from . import audit, compensations, conclusions, runs, seals
from .canonical import canonical, text_digest
from .compensations import Undoing
from .database import Connection, all_rows
from .errors import ConflictError, CorruptStore, NotFoundError
from .faults import Faults
from .records import Event, NewRun, Run, RunDocuments, record
from .states import MUTATING, REPEATABLE_IDEMPOTENCY
from .verification import rebuild


@record
class SourceTask:
    """The row of a task of the source. `told_output` and `told_manifest` are the digests that the chain tells."""

    task_id: str
    position: int
    state: str
    attempt: int
    disposition: str
    metadata_version: int
    input_digest: str | None
    output_json: str | None
    output_digest: str | None
    error_json: str | None
    decision_json: str | None
    delta_json: str | None
    delta_digest: str | None
    definition_fingerprint: str | None
    output_contract_fingerprint: str | None
    manifest_json: str | None
    reuse_decision_json: str | None
    told_output: str | None
    told_manifest: str | None


@record
class SourceEffect:
    """An effect of the source, and the conclusion about it that counts (None without any)."""

    effect_id: str
    task_id: str
    operation: str
    effect_class: str
    idempotency: str
    status: str
    confirmed: bool
    superseded: bool
    reconciled: str | None


@record
class ContinuedCall:
    """The remote task of an ended task was observed after all (`effects continue-remote`): it has done its work.

    `told_result` is the digest of its result that the chain tells, None in chains of earlier versions.
    """

    effect_id: str
    result_json: str
    told_result: str | None


@record
class DoneElsewhere:
    """What another run made from the same source has done of a task, or goes on to do.

    `effect_id` is an effect that may have happened and must not be repeated; without one the run has not ended, and
    executes the task.
    """

    run_id: str
    state: str
    task_id: str
    effect_id: str | None


@record
class SourceHead:
    """How far the history of a run had come: whatever happens to it afterwards changes this."""

    revision: int
    audit_sequence: int
    checkpoint_checksum: str


@record
class SourceRun:
    """A run as others may be made from it, with its tasks in compiled order.

    `effects` are by task, oldest first. `earlier` are conclusions (or None) about effects of other runs, by effect: of
    those that tasks depend on which were reused before. `memory` are the values that each position has written to
    working memory, as the chain tells; `references` are (path, digest, size) of the artifacts of each task. `continued`
    are calls by the tasks that have ended without their result. `undoing` are effects, by id, that a compensation of
    this run or of an earlier one may undo or have undone. `done_elsewhere` is what was made from it before, and has
    done.
    """

    run: Run
    documents: RunDocuments
    head: SourceHead
    tasks: dict[str, SourceTask]
    effects: dict[str, list[SourceEffect]]
    earlier: dict[str, str | None]
    memory: dict[int, dict[str, str | None]]
    references: dict[str, list[tuple[str, str, int]]]
    continued: dict[str, ContinuedCall]
    undoing: dict[str, Undoing]
    done_elsewhere: list[DoneElsewhere]


@record
class ReusedTask:
    """A task of the new run that takes over the end of one of the source; `memory` is (key, value or None).

    `decision_json` tells why it could be reused; the fingerprints are those of the new run's plan. With `recovered`
    the end is not the one of the source's row, but what `source` says in its place.
    """

    position: int
    source: SourceTask
    decision_json: str
    definition_fingerprint: str
    output_contract_fingerprint: str
    memory: tuple[tuple[str, str | None], ...] = ()
    recovered: bool = False


# -- the source --------------------------------------------------------------------------------------------------------


def read_source(tx: Connection, run_id: str) -> SourceRun:
    """Everything about a run that planning looks at.

    Raises `NotFoundError`, `IncompatibleVersion`, and `CorruptStore` when the chain is broken, or tells of other
    documents, states or memory than the tables. Outputs and manifests are left to the plan, task by task.
    """
    run = runs.get(tx, run_id)
    runs.refuse_future_records(tx, run_id)
    documents = runs.documents(tx, run_id)
    links = [state for _, state, _, _ in audit.read_chain(tx, run_id)]
    _check_documents(run, documents, links)
    told = rebuild(links)
    if told["memory"] != [list(row) for row in runs.memory_rows(tx, run_id)]:
        raise _damaged(run_id, "its checkpoints tell of another working memory")
    if told["state"] != run.state:
        raise _damaged(run_id, f"it is {run.state}, its checkpoints say {told['state']}")
    tasks = {task.task_id: task for task in _tasks(tx, run, told)}
    if len(tasks) != len(told["tasks"]):
        raise _damaged(run_id, f"it has {len(tasks)} tasks, its checkpoints tell of {len(told['tasks'])}")
    memory: dict[int, dict[str, str | None]] = {}
    for key, position, value in told["memory"]:
        if position >= 0:
            memory.setdefault(position, {})[key] = value
    references: dict[str, list[tuple[str, str, int]]] = {}
    for task_id, path, digest, size in tx.execute(
        "SELECT task_id, logical_path, digest, size_bytes FROM artifact_refs WHERE run_id = ? "
        "ORDER BY task_id, logical_path",
        (run_id,),
    ):
        references.setdefault(task_id, []).append((path, digest, size))
    effects: dict[str, list[SourceEffect]] = {}
    for effect in _effects(tx, run):
        effects.setdefault(effect.task_id, []).append(effect)
    earlier, owners = _earlier(tx, tasks.values())
    return SourceRun(
        run,
        documents,
        _head(tx, run_id),
        tasks,
        effects,
        earlier,
        memory,
        references,
        dict(_continued(tx, run, told["results"])),
        compensations.undoing(tx, [run_id, *sorted(owners - {run_id})]),
        done_elsewhere(tx, run_id),
    )


_MADE_FROM = (
    "WITH RECURSIVE made(run_id) AS (SELECT ?1 UNION "
    "SELECT r.run_id FROM made m JOIN runs r ON r.source_run_id = m.run_id WHERE r.mode IN ('retry', 'repair') UNION "
    "SELECT r.run_id FROM made m JOIN runs r ON r.parent_run_id = m.run_id WHERE r.mode = 'fork') "
)
"""A run, its retries, repairs and forks, and those of these."""


def done_elsewhere(tx: Connection, run_id: str) -> list[DoneElsewhere]:
    """What runs made from this one have done that must not be repeated, or go on to do, oldest run first.

    For whoever makes a further one: nothing forbids it, but the same part is executed once more (contract 5.6).
    """
    found = tx.execute(
        _MADE_FROM + "SELECT r.run_id, r.state, t.task_id, "  # noqa: S608
        # One effect stands for all of its task.
        "(SELECT e.effect_id FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
        "WHERE a.task_no = t.task_no AND e.superseded = 0 "
        f"AND e.effect_class IN ({_words(MUTATING)}) AND e.idempotency NOT IN ({_words(REPEATABLE_IDEMPOTENCY)}) "
        f"AND COALESCE({_CONCLUSION}, CASE WHEN e.status IN ('started', 'succeeded', 'uncertain') "
        "THEN 'applied' END) = 'applied' ORDER BY a.number, e.ordinal LIMIT 1) AS effect "
        # CROSS JOIN and plus: the tasks of these runs are looked at, and no index of all tasks is made.
        "FROM made CROSS JOIN runs r ON r.run_id = made.run_id "
        "CROSS JOIN tasks t ON t.task_no BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
        "AND +t.disposition = 'executed' WHERE r.run_id <> ?1 "
        "AND (effect IS NOT NULL OR (r.ended_at IS NULL AND t.ended_at IS NULL)) "
        "ORDER BY r.created_at, r.run_id, t.task_no",
        (run_id,),
    )
    return [DoneElsewhere(*row) for row in all_rows(found)]


def _words(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def read_documents(tx: Connection, run_id: str) -> tuple[Run, RunDocuments]:
    """A run and its texts, held to its chain: all that a fork takes from it. Errors as for `read_source`."""
    run = runs.get(tx, run_id)
    runs.refuse_future_records(tx, run_id)
    documents = runs.documents(tx, run_id)
    _check_documents(run, documents, [state for _, state, _, _ in audit.read_chain(tx, run_id)])
    return run, documents


def _damaged(run_id: str, what: str) -> CorruptStore:
    return CorruptStore(
        f"{run_id} is damaged: {what}; nothing is taken from it",
        remedy="`agentctl db verify` shows everything that does not fit",
        run_id=run_id,
    )


def _check_documents(run: Run, documents: RunDocuments, links: Sequence[str]) -> None:
    told = json.loads(links[0]).get("documents") if links else None
    if told is None:
        return  # made before checkpoints told of them
    found = runs.document_digests(
        documents.workflow_json, documents.plan_json, documents.inputs_json, documents.settings_json
    )
    for name, digest in found.items():
        if told.get(name) != digest:
            raise _damaged(run.run_id, f"the stored {name} is not the one that its checkpoints tell of")


def _head(tx: Connection, run_id: str) -> SourceHead:
    row = tx.execute(
        "SELECT revision, audit_sequence, checkpoint_checksum FROM runs WHERE run_id = ?", (run_id,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id} in this database any more", run_id=run_id)
    return SourceHead(*row)


_COLUMNS = (
    "task_id, position, state, attempt, disposition, metadata_version, input_digest, output_json, output_digest, "
    "error_json, decision_json, delta_json, delta_digest, definition_fingerprint, output_contract_fingerprint, "
    "artifact_manifest_json, reuse_decision_json"
)


def _tasks(tx: Connection, run: Run, told: dict[str, Any]) -> Iterator[SourceTask]:
    for row in tx.execute(
        f"SELECT {_COLUMNS} FROM tasks WHERE task_no BETWEEN ? AND ? ORDER BY task_no",  # noqa: S608
        (run.first_task, run.first_task + run.task_count - 1),
    ):
        position, state, attempt = row[1:4]
        known = told["tasks"][position] if position < len(told["tasks"]) else [None, None, None]
        shown = "ready" if state == "running" else state
        if shown != known[0] or (shown != "ready" and attempt != known[1]):
            raise _damaged(run.run_id, f"task {row[0]} is {state}, its checkpoints say {known[0]}, or another attempt")
        yield SourceTask(*(*row, known[2], told["artifacts"].get(position)))


_CONCLUSION = conclusions.latest_sql("status", "e.effect_id")


def _effects(tx: Connection, run: Run) -> Iterator[SourceEffect]:
    for row in tx.execute(
        "SELECT e.effect_id, e.task_id, e.operation, e.effect_class, e.idempotency, e.status, e.confirmed, "  # noqa: S608
        f"e.superseded, {_CONCLUSION} FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
        "WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ? ORDER BY a.task_no, a.number, e.ordinal",
        (run.first_task, run.first_task + run.task_count - 1, run.run_id),
    ):
        yield SourceEffect(*(*row[:6], bool(row[6]), bool(row[7]), row[8]))


def _continued(tx: Connection, run: Run, told: dict[str, str]) -> Iterator[tuple[str, ContinuedCall]]:
    """Calls of the last attempts of tasks that did not succeed, whose remote task was observed to be completed.

    Not of an attempt that went on with the answer and failed by it: what it brought could not be kept, say.
    """
    for task_id, effect_id, result in tx.execute(
        "SELECT t.task_id, e.effect_id, c.result_json FROM effect_reconciliations c "  # noqa: S608
        "JOIN effects e ON e.effect_id = c.effect_id AND e.operation = 'a2a.delegate' "
        "JOIN attempts a ON a.attempt_id = e.attempt_id AND a.outcome IS NOT 'failed' "
        "JOIN tasks t ON t.task_no = a.task_no AND t.attempt = a.number AND t.state IN ('failed', 'cancelled') "
        "WHERE c.run_id = ? AND c.status = 'applied' "
        "AND json_extract(c.evidence_json, '$.kind') = 'protocol_observation' AND c.reconciliation_no = "
        f"{conclusions.latest_sql('reconciliation_no', 'e.effect_id')}",
        (run.run_id,),
    ):
        yield task_id, ContinuedCall(effect_id, result, told.get(effect_id))


def _earlier(tx: Connection, tasks: Iterable[SourceTask]) -> tuple[dict[str, str | None], set[str]]:
    """What was concluded about the effects that reused tasks of the source go back to, and whose effects they are.

    A run whose effects were compensated is kept as long as others have reused them (see `retention`), so whatever is
    not there any more was not undone.
    """
    return _concluded(tx, [effect for task in tasks for effect in _named(task.reuse_decision_json)])


def _concluded(tx: Connection, wanted: Sequence[str]) -> tuple[dict[str, str | None], set[str]]:
    if not wanted:
        return {}, set()
    rows = all_rows(
        tx.execute(
            f"SELECT e.effect_id, {_CONCLUSION}, e.run_id FROM effects e "  # noqa: S608
            "WHERE e.effect_id IN (SELECT value FROM json_each(?))",
            (json.dumps(wanted),),
        )
    )
    return {effect_id: said for effect_id, said, _ in rows}, {owner for _, _, owner in rows}


def _named(text: str | None) -> list[str]:
    """The effects that a reuse decision names. What is wrong with it is for the plan to find."""
    if text is None:
        return []
    try:
        return [str(item["effectId"]) for item in json.loads(text)["sourceEffects"]]
    except (ValueError, TypeError, KeyError):
        return []


# -- the new run -------------------------------------------------------------------------------------------------------


def create(
    tx: Connection,
    new: NewRun,
    digests: dict[str, str],
    head: SourceHead,
    reused: Sequence[ReusedTask],
    faults: Faults,
    *,
    now: int,
) -> None:
    """Create a run whose `reused` tasks have ended already: everything of it, or nothing (contract 9.4).

    Its ledger begins with nothing used: what is reused dispatches nothing. Raises `ConflictError`, with nothing
    written, when anything has happened to the source since `head` was read, and `NotFoundError` when it is gone.
    """
    assert new.source_run_id is not None
    source = runs.get(tx, new.source_run_id)
    if _head(tx, source.run_id) != head:
        raise ConflictError(
            f"{source.run_id} has changed since the {new.mode} was planned; nothing was created",
            remedy="plan it again: the same command does",
            run_id=source.run_id,
        )
    _require_standing(tx, new.mode, source.run_id, reused)
    first = runs.insert(tx, new, now=now)
    _take_over(tx, new, source, first, reused, now)
    faults.reach("during_derived_run")
    memory = sorted((key, task.position, value) for task in reused for key, value in task.memory)
    tx.executemany(
        "INSERT INTO memory_values VALUES (?,?,?,?)",
        [(new.run_id, key, position, value) for key, position, value in memory],
    )
    manifests = [
        [task.position, text_digest(task.source.manifest_json)]
        for task in reused
        if task.source.manifest_json is not None
    ]
    events = [Event(f"{new.mode}.created", None, canonical({**runs.creation(new), "reused": len(reused)}))]
    events += [Event(f"{new.mode}.task_reused", item.source.task_id, _told(item, source.run_id)) for item in reused]
    audit.append(tx, new.run_id, events, actor=new.actor, now=now)
    state = runs.first_state(tx, new, digests)
    state["tasks"] = [
        [task.position, task.source.state, 0, task.source.output_digest, _code(source.run_id, task.source)]
        for task in reused
    ]
    if memory:
        state["memory"] = [list(item) for item in memory]
    if manifests:
        state["artifacts"] = manifests
    if reused:
        state["seals"] = seals.of_tasks(tx, first, [task.position for task in reused])
    audit.append_checkpoint(tx, new.run_id, canonical(state), now=now)


def _require_standing(tx: Connection, mode: str, source_id: str, reused: Sequence[ReusedTask]) -> None:
    """Raise `ConflictError` when an effect behind a reused task was undone since it was planned, or may be.

    The head of the source tells nothing of the runs from which it has taken over results itself.
    """
    wanted = [effect for task in reused for effect in _named(task.decision_json)]
    said, owners = _concluded(tx, wanted)
    undone = compensations.undoing(tx, sorted(owners))
    for effect_id in wanted:
        if said.get(effect_id) == "compensated" or effect_id in undone:
            raise ConflictError(
                f"effect {effect_id[:12]} may have been undone since the {mode} was planned; nothing was created",
                remedy="plan it again: the same command does",
                run_id=source_id,
            )


def _take_over(tx: Connection, new: NewRun, source: Run, first: int, reused: Sequence[ReusedTask], now: int) -> None:
    """Copy rows of tasks and references to artifacts. The bytes of outputs never leave SQLite."""
    before = tx.total_changes()
    tx.executemany(
        "UPDATE tasks AS t SET state = s.state, disposition = 'reused', metadata_version = s.metadata_version, "
        "input_digest = s.input_digest, output_json = s.output_json, output_digest = s.output_digest, "
        "error_json = s.error_json, decision_json = s.decision_json, delta_json = s.delta_json, "
        "delta_digest = s.delta_digest, artifact_manifest_json = s.artifact_manifest_json, "
        "definition_fingerprint = ?, output_contract_fingerprint = ?, source_run_id = s.run_id, "
        "source_task_id = s.task_id, source_attempt = s.attempt, reuse_decision_json = ?, ended_at = ?, "
        "updated_at = ? FROM tasks s WHERE t.task_no = ? AND s.task_no = ? AND s.state = ? AND s.output_digest IS ?",
        [
            (
                task.definition_fingerprint,
                task.output_contract_fingerprint,
                task.decision_json,
                now,
                now,
                first + task.position,
                source.first_task + task.source.position,
                task.source.state,
                task.source.output_digest,
            )
            for task in reused
            if not task.recovered
        ],
    )
    tx.executemany(
        "UPDATE tasks AS t SET state = 'succeeded', disposition = 'reused', metadata_version = s.metadata_version, "
        "input_digest = s.input_digest, output_json = ?, output_digest = ?, decision_json = s.decision_json, "
        "definition_fingerprint = ?, output_contract_fingerprint = ?, source_run_id = s.run_id, "
        "source_task_id = s.task_id, source_attempt = s.attempt, reuse_decision_json = ?, ended_at = ?, "
        "updated_at = ? FROM tasks s WHERE t.task_no = ? AND s.task_no = ? AND s.state IN ('failed', 'cancelled')",
        [
            (
                task.source.output_json,
                task.source.output_digest,
                task.definition_fingerprint,
                task.output_contract_fingerprint,
                task.decision_json,
                now,
                now,
                first + task.position,
                source.first_task + task.source.position,
            )
            for task in reused
            if task.recovered
        ],
    )
    if tx.total_changes() - before != len(reused):
        raise ConflictError("a task that was to be reused is not there any more", run_id=source.run_id)
    for task in reused:
        if task.source.manifest_json is None:
            continue
        tx.execute(
            "INSERT INTO artifact_refs (run_id, task_id, logical_path, digest, size_bytes, media_type, logical_name, "
            "source_run_id, source_task_id, created_at) SELECT ?, task_id, logical_path, digest, size_bytes, "
            "media_type, logical_name, run_id, task_id, ? FROM artifact_refs WHERE run_id = ? AND task_id = ?",
            (new.run_id, now, source.run_id, task.source.task_id),
        )
        if tx.changes() != len(json.loads(task.source.manifest_json)):
            raise ConflictError(f"the artifacts of task {task.source.task_id} have changed", run_id=source.run_id)


def _told(task: ReusedTask, source_run_id: str) -> str:
    return canonical(
        {
            "to": task.source.state,
            "sourceRunId": source_run_id,
            "sourceTaskId": task.source.task_id,
            "sourceAttempt": task.source.attempt,
            "outputDigest": task.source.output_digest,
            "decisionDigest": text_digest(task.decision_json),
        }
    )


def _code(run_id: str, task: SourceTask) -> object:
    """The code of the error of a task that was skipped. Raises `CorruptStore`."""
    if task.error_json is None:
        return None
    try:
        return json.loads(task.error_json)["code"]
    except (ValueError, TypeError, KeyError):
        raise _damaged(run_id, f"the error of task {task.task_id} is none") from None
