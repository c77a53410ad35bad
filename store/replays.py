"""Replays: a run made of what another has recorded, whole in one transaction and in its end state (contract 9.5).

Nothing of it was ever running: there are no attempts, no effects and no reservations. All that it shows is in its own
rows, so the source may be deleted afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from . import audit, protocols, runs, seals, verification
from .artifacts import Artifacts
from .canonical import canonical, text_digest
from .clock import Clock
from .database import Connection, Database, all_rows
from .errors import CorruptStore, RunMoved
from .records import Event, Run
from .states import TASK_FINAL

EFFECTS_OF_AN_EVENT = 1000
"""How many source effects one audit event lists."""

TASKS_OF_A_CHECKPOINT = 5000
"""How many tasks one checkpoint tells of."""

TRIES = 5
"""How often the source is looked at anew when it has changed meanwhile (a conclusion was appended, say)."""


class Replays:
    """The verb of replay on one database connection. Belongs to the thread of its `Database`."""

    def __init__(self, database: Database, artifacts: Artifacts, clock: Clock) -> None:
        self._database = database
        self._artifacts = artifacts
        self._clock = clock

    def create(self, source_id: str, run_id: str, trace_id: str, *, actor: str) -> None:
        """Create the replay `run_id` of a run that has ended. Durable.

        Everything of the source is verified first, its artifacts included: chain, trail, digests, documents, bytes.
        Raises `NotFoundError`, `NotTerminal`, `IncompatibleVersion`, `CorruptStore`, and `RunMoved` when the source
        changes all the time; then there is no new row.
        """
        for _ in range(TRIES):
            seen = self.verified(source_id)
            with self._database.write(durable=True) as tx:
                if _seen(tx, source_id) == seen:
                    _create(tx, runs.get(tx, source_id), run_id, trace_id, actor=actor, now=self._clock.now())
                    return
        raise RunMoved(f"{source_id} changes all the time", remedy="try again later", run_id=source_id)

    def verified(self, source_id: str) -> tuple[int, int]:
        """Hold a run that has ended to everything that is recorded of it; how far its history goes. Writes nothing.

        Raises as `create`.
        """
        with self._database.read() as tx:
            run = runs.get(tx, source_id)
            runs.require_ended(run)
            runs.refuse_future_records(tx, source_id)
            open_tasks = [row.task_id for row in runs.task_rows(tx, run) if row.state not in TASK_FINAL]
            kept = all_rows(
                tx.execute(
                    "SELECT DISTINCT r.digest, b.size_bytes FROM artifact_refs r JOIN artifact_blobs b USING (digest) "
                    "WHERE r.run_id = ? ORDER BY r.digest",
                    (source_id,),
                )
            )
            seen = _seen(tx, source_id)
        if open_tasks:
            raise CorruptStore(f"{source_id} has ended, and its task {open_tasks[0]} has not", run_id=source_id)
        verification.require_sound(self._database, source_id)
        for digest, size in kept:
            state = self._artifacts.blobs.check_anywhere(digest, size)
            if state != "ok":
                raise CorruptStore(
                    f"an artifact of {source_id} is {state}: {digest}; nothing was made from it",
                    remedy="take its bytes from a backup; `agentctl artifacts verify` tells of all of them",
                    run_id=source_id,
                )
        return seen


def _seen(tx: Connection, run_id: str) -> tuple[int, int]:
    """What rises when something is appended to a run that has ended."""
    row = tx.execute("SELECT checkpoint_sequence, audit_sequence FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return (row[0], row[1]) if row else (-1, -1)


def _create(tx: Connection, source: Run, run_id: str, trace_id: str, *, actor: str, now: int) -> None:
    first = runs.next_task_no(tx)
    lineage = canonical(
        {
            "formatVersion": 1,
            "sourceWorkflowDigest": source.workflow_digest,
            "recorded": True,
            "recordedMode": _recorded_mode(tx, source),
        }
    )
    # A deadline is for what goes on; the source's own may be over.
    tx.execute(
        "INSERT INTO runs (run_id, runtime_state_version, plan_format_version, workflow_name, workflow_digest, "
        "plan_digest, mode, state, reason, error_json, trace_id, priority, submission_digest, base_path, "
        "parent_run_id, first_task, task_count, max_concurrency, max_deliveries, cancel_requested_at, cancel_reason, "
        "created_at, updated_at, ended_at, lineage_json) "
        "SELECT ?, runtime_state_version, plan_format_version, workflow_name, workflow_digest, plan_digest, 'replay', "
        "state, reason, error_json, ?, priority, submission_digest, base_path, run_id, ?, task_count, "
        "max_concurrency, max_deliveries, cancel_requested_at, cancel_reason, ?, ?, ?, ? FROM runs WHERE run_id = ?",
        (run_id, trace_id, first, now, now, now, lineage, source.run_id),
    )
    for sql in (
        "INSERT INTO run_documents SELECT ?, workflow_json, plan_json, inputs_json, settings_json FROM run_documents "
        "WHERE run_id = ?",
        "INSERT INTO run_outputs SELECT ?, output_json FROM run_outputs WHERE run_id = ?",
        "INSERT INTO memory_values SELECT ?, key, position, value_json FROM memory_values WHERE run_id = ?",
        "INSERT INTO budget_lines (run_id, dimension, limit_units) SELECT ?, dimension, limit_units FROM budget_lines "
        "WHERE run_id = ?",
    ):
        tx.execute(sql, (run_id, source.run_id))
    tx.execute(
        "INSERT INTO run_budgets SELECT ?, format_version, pricing_version, NULL, planned_tasks, "
        "planned_expansion_items, planned_loop_iterations, ? FROM run_budgets WHERE run_id = ?",
        (run_id, now, source.run_id),
    )
    # What had an attempt shows one, what had none shows none; times of work belong to the source.
    tx.execute(
        "INSERT INTO tasks (task_no, run_id, task_id, position, state, attempt, disposition, metadata_version, "
        "input_digest, output_json, output_digest, error_json, decision_json, delta_json, delta_digest, ended_at, "
        "updated_at, definition_fingerprint, output_contract_fingerprint, artifact_manifest_json, source_run_id, "
        "source_task_id, source_attempt) "
        "SELECT ? + position, ?, task_id, position, state, CASE WHEN state = 'succeeded' OR attempt > 0 THEN 1 ELSE 0 "
        "END, 'recorded', metadata_version, input_digest, output_json, output_digest, error_json, decision_json, "
        "delta_json, delta_digest, ?, ?, definition_fingerprint, output_contract_fingerprint, artifact_manifest_json, "
        "run_id, task_id, attempt FROM tasks WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
        (first, run_id, now, now, source.first_task, source.first_task + source.task_count - 1),
    )
    tx.execute(
        "INSERT INTO artifact_refs (run_id, task_id, logical_path, digest, size_bytes, media_type, logical_name, "
        "source_run_id, source_task_id, created_at) SELECT ?, task_id, logical_path, digest, size_bytes, media_type, "
        "logical_name, run_id, task_id, ? FROM artifact_refs WHERE run_id = ?",
        (run_id, now, source.run_id),
    )
    rows = all_rows(
        tx.execute(
            "SELECT position, task_id, state, attempt, output_digest, json_extract(error_json, '$.code'), "
            "source_attempt, artifact_manifest_json FROM tasks WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
            (first, first + source.task_count - 1),
        )
    )
    tx.execute(
        "INSERT INTO stream_events (run_id, task_id, attempt, sequence, format_version, effect_id, event_type, "
        "payload_json, source_run_id, source_sequence, created_at) SELECT ?, task_id, attempt, sequence, "
        "format_version, effect_id, event_type, payload_json, COALESCE(source_run_id, run_id), "
        "COALESCE(source_sequence, sequence), ? FROM stream_events WHERE run_id = ?",
        (run_id, now, source.run_id),
    )
    events = [*_events(tx, source, lineage, rows), *protocols.record_again(tx, source.run_id, run_id, now=now)]
    audit.append(tx, run_id, events, actor=actor, now=now)
    for state in _checkpoints(tx, source, run_id, rows):
        audit.append_checkpoint(tx, run_id, canonical(state), now=now)


def _recorded_mode(tx: Connection, source: Run) -> str:
    """The mode of the run that has really done what the replay shows."""
    row = tx.execute("SELECT lineage_json FROM runs WHERE run_id = ?", (source.run_id,)).fetchone()
    lineage = json.loads(row[0]) if row is not None and row[0] else {}
    settings = json.loads(runs.documents(tx, source.run_id).settings_json)
    return str(lineage.get("recordedMode") or runs.origin_mode(source.mode, settings))


def _events(tx: Connection, source: Run, lineage: str, rows: Sequence[tuple[Any, ...]]) -> Iterator[Event]:
    created = {
        "workflow": source.workflow_name,
        "workflowDigest": source.workflow_digest,
        "planDigest": source.plan_digest,
        "mode": "replay",
        "tasks": source.task_count,
        "parentRunId": source.run_id,
        "lineage": json.loads(lineage),
    }
    yield Event("run.created", None, canonical(created))
    effects = [
        {"effectId": effect, "taskId": task, "attempt": attempt, "operation": operation, "status": status}
        for effect, task, attempt, operation, status in tx.execute(
            "SELECT e.effect_id, e.task_id, e.attempt, e.operation, e.status FROM attempts a "
            "JOIN effects e ON e.attempt_id = a.attempt_id WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ? "
            "ORDER BY a.task_no, a.number, e.ordinal",
            (source.first_task, source.first_task + source.task_count - 1, source.run_id),
        )
    ]
    calls = [
        {"callId": call, "effectId": effect, "toolId": tool, "status": status}
        for call, effect, tool, status in tx.execute(
            "SELECT call_id, effect_id, tool_id, status FROM tool_calls WHERE run_id = ? ORDER BY created_at, call_id",
            (source.run_id,),
        )
    ]
    size = EFFECTS_OF_AN_EVENT
    for at in range(0, max(len(effects), len(calls), 1), size):
        payload = {
            "sourceRunId": source.run_id,
            "effects": effects[at : at + size],
            "toolCalls": calls[at : at + size],
        }
        yield Event("replay.effects_reused", None, canonical(payload))
    for _, task_id, state, attempt, digest, _, source_attempt, _ in rows:
        recorded = {"attempt": attempt, "outputDigest": digest, "sourceAttempt": source_attempt, "to": state}
        yield Event("replay.task_recorded", task_id, canonical(recorded))
    yield Event("run.state", None, canonical({"from": None, "to": source.state, "reason": source.reason}))


def _checkpoints(
    tx: Connection, source: Run, run_id: str, rows: Sequence[tuple[Any, ...]]
) -> Iterator[dict[str, object]]:
    """The chain: what it was made from, then the states of some tasks each, the last one with the end."""
    texts = runs.documents(tx, run_id)
    memory = runs.memory_rows(tx, run_id)
    yield {
        "runId": run_id,
        "state": source.state,
        "created": source.task_count,
        "workingMemory": {key: value for key, position, value in memory if position < 0},
        "documents": runs.document_digests(
            texts.workflow_json, texts.plan_json, texts.inputs_json, texts.settings_json
        ),
        "row": seals.of_run(tx, run_id),
    }
    told = [[position, state, attempt, digest, code] for position, _, state, attempt, digest, code, _, _ in rows]
    last: dict[str, object] = {"state": source.state, "reason": source.reason}
    if source.cancel_requested_at is not None:
        last["cancellationRequested"] = True
    written = [list(row) for row in memory if row[1] >= 0]
    if written:
        last["memory"] = written
    manifests = [[row[0], text_digest(row[7])] for row in rows if row[7] is not None]
    if manifests:
        last["artifacts"] = manifests
    output = runs.output(tx, run_id)
    if output is not None:
        last["output"] = text_digest(output)
    if source.error_json is not None:
        last["error"] = text_digest(source.error_json)
    size = TASKS_OF_A_CHECKPOINT
    first = runs.get(tx, run_id).first_task
    for at in range(0, len(told), size):
        places = [row[0] for row in rows[at : at + size]]
        some: dict[str, object] = {"tasks": told[at : at + size], "seals": seals.of_tasks(tx, first, places)}
        yield {**some, **last} if at + size >= len(told) else some
