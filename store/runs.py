"""Runs: creation, the driver's lease with its epoch, requests of people. Every function takes the open transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import audit, ledger, seals
from .canonical import canonical, text_digest
from .clock import LAST_INSTANT
from .database import Connection
from .errors import AlreadyTerminal, ConflictError, IncompatibleVersion, NotFoundError, NotTerminal, RunMoved
from .records import (
    APPROVAL_FORMAT_VERSION,
    AUDIT_EVENT_VERSION,
    BUDGET_FORMAT_VERSION,
    CHECKPOINT_FORMAT_VERSION,
    EFFECT_FORMAT_VERSION,
    PLAN_FORMAT_VERSION,
    PROTOCOL_CALL_VERSION,
    PROTOCOL_SESSION_VERSION,
    PROVIDER_SESSION_FORMAT_VERSION,
    RECONCILIATION_FORMAT_VERSION,
    RUNTIME_STATE_VERSION,
    STREAM_EVENT_FORMAT_VERSION,
    TASK_METADATA_VERSION,
    Event,
    NewRun,
    Run,
    RunDocuments,
    TaskRow,
)
from .versions import check_versions

COLUMNS = (
    "run_id, workflow_name, workflow_digest, plan_digest, mode, state, reason, error_json, trace_id, priority, "
    "base_path, parent_run_id, source_run_id, first_task, task_count, max_concurrency, max_deliveries, deadline_at, "
    "cancel_requested_at, pause_requested_at, revision, epoch, driver, driver_lease_expires_at, created_at, "
    "updated_at, ended_at"
)


def create_run(tx: Connection, new: NewRun, digests: dict[str, str], *, now: int) -> tuple[str, bool]:
    """Create a run with all its tasks, ledger, memory, first audit event and checkpoint.

    `digests` are the `document_digests` of its texts.

    Returns (run id, created). With an idempotency key that is known, the earlier run is returned if it was submitted
    with the same content; with other content `ConflictError` is raised.
    """
    if new.idempotency_key is not None:
        row = tx.execute(
            "SELECT run_id, submission_digest FROM runs WHERE idempotency_key = ?", (new.idempotency_key,)
        ).fetchone()
        if row is not None:
            if row[1] != new.submission_digest:
                raise ConflictError(
                    f"the idempotency key {new.idempotency_key!r} belongs to {row[0]}, which was submitted with other "
                    "content",
                    remedy="use a new key, or submit the same workflow and inputs",
                    run_id=row[0],
                )
            return row[0], False
    insert(tx, new, now=now)
    audit.append(tx, new.run_id, [Event("run.created", None, canonical(creation(new)))], actor=new.actor, now=now)
    audit.append_checkpoint(tx, new.run_id, canonical(first_state(tx, new, digests)), now=now)
    return new.run_id, True


def creation(new: NewRun) -> dict[str, object]:
    """What the first event of a run tells of it, and of where it comes from."""
    payload: dict[str, object] = {
        "workflow": new.workflow_name,
        "workflowDigest": new.workflow_digest,
        "planDigest": new.plan_digest,
        "mode": new.mode,
        "tasks": len(new.task_ids),
    }
    origin = {"parentRunId": new.parent_run_id, "sourceRunId": new.source_run_id, "lineage": as_json(new.lineage_json)}
    return payload | {name: value for name, value in origin.items() if value is not None}


def first_state(tx: Connection, new: NewRun, digests: dict[str, str]) -> dict[str, object]:
    """What the first checkpoint of a run tells, when all of its tasks are pending; its rows are there already."""
    return {
        "runId": new.run_id,
        "state": "running",
        "created": len(new.task_ids),
        "workingMemory": new.memory,
        "documents": digests,
        "row": seals.of_run(tx, new.run_id),
    }


def insert(tx: Connection, new: NewRun, *, now: int) -> int:
    """Write the rows of a run: itself, its documents, pending tasks, memory and ledger; the number of its first task.

    Whoever calls it writes the first event and the first checkpoint in the same transaction.
    """
    # From creation, so that no pause and no resume can move it (seed).
    wall_time = new.budget_limits.get("wallTimeSeconds")
    first = next_task_no(tx)
    tx.execute(
        "INSERT INTO runs (run_id, runtime_state_version, plan_format_version, workflow_name, workflow_digest, "
        "plan_digest, mode, state, trace_id, priority, idempotency_key, submission_digest, base_path, first_task, "
        "task_count, max_concurrency, max_deliveries, deadline_at, created_at, updated_at, parent_run_id, "
        "source_run_id, lineage_json) VALUES (?,?,?,?,?,?,?,'running',?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            new.run_id,
            RUNTIME_STATE_VERSION,
            PLAN_FORMAT_VERSION,
            new.workflow_name,
            new.workflow_digest,
            new.plan_digest,
            new.mode,
            new.trace_id,
            new.priority,
            new.idempotency_key,
            new.submission_digest,
            new.base_path,
            first,
            len(new.task_ids),
            new.max_concurrency,
            new.max_deliveries,
            None if wall_time is None else min(now + wall_time * 1000, LAST_INSTANT),
            now,
            now,
            new.parent_run_id,
            new.source_run_id,
            new.lineage_json,
        ),
    )
    tx.execute(
        "INSERT INTO run_documents VALUES (?,?,?,?,?)",
        (new.run_id, new.workflow_json, new.plan_json, new.inputs_json, new.settings_json),
    )
    tx.executemany(
        "INSERT INTO tasks (task_no, run_id, task_id, position, state, updated_at) VALUES (?,?,?,?,'pending',?)",
        ((first + i, new.run_id, task_id, i, now) for i, task_id in enumerate(new.task_ids)),
    )
    tx.executemany(
        "INSERT INTO memory_values VALUES (?,?,-1,?)",
        [(new.run_id, key, value) for key, value in new.memory.items()],
    )
    tx.execute(
        "INSERT INTO run_budgets VALUES (?,?,?,NULL,?,?,?,?)",
        (
            new.run_id,
            BUDGET_FORMAT_VERSION,
            new.pricing_version,
            len(new.task_ids),
            new.planned_expansion_items,
            new.planned_loop_iterations,
            now,
        ),
    )
    tx.executemany(
        "INSERT INTO budget_lines (run_id, dimension, limit_units) VALUES (?,?,?)",
        [(new.run_id, dimension, limit) for dimension, limit in new.budget_limits.items()],
    )
    put_in_turn(tx, new.run_id, new.priority)
    return first


def next_task_no(tx: Connection) -> int:
    """The number of the first task of a run that is about to be written."""
    return int((tx.execute("SELECT MAX(task_no) FROM tasks").fetchone() or (0,))[0] or 0) + 1


def document_digests(workflow: str, plan: str, inputs: str, settings: str) -> dict[str, str]:
    """What the first checkpoint says of the texts of a run: once it is part of the chain, none of them can change."""
    texts = {"workflow": workflow, "plan": plan, "inputs": inputs, "settings": settings}
    return {name: text_digest(text) for name, text in texts.items()}


def origin_mode(mode: str, settings: Mapping[str, Any]) -> str:
    """The mode of what a run is made of: its own one, or that of the run which a replay (of a replay, …) recorded.

    A replay copies the settings, so this is known when the recorded run is gone.
    """
    if mode != "replay":
        return mode
    if settings.get("check"):
        return "check"
    # Only the run of a compensation carries out its actions whatever they find (contract 5.7).
    return "compensation" if settings.get("forceEffect") else "execute"


def put_in_turn(tx: Connection, run_id: str, priority: int) -> None:
    """Let workers serve this run; a newcomer stands in front of its equals, since it has had nothing yet."""
    tx.execute(
        "INSERT OR IGNORE INTO turns VALUES (?, ?, (SELECT COALESCE(MIN(turn), 0) FROM turns WHERE priority = ?))",
        (run_id, priority, priority),
    )


def get(tx: Connection, run_id: str) -> Run:
    """The run's row. Raises `NotFoundError`, and `IncompatibleVersion` for a run of a newer agentctl."""
    row = tx.execute(
        f"SELECT runtime_state_version, plan_format_version, {COLUMNS} FROM runs WHERE run_id = ?",  # noqa: S608
        (run_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(
            f"there is no run {run_id} in this database", remedy="`agentctl runs list` shows the runs", run_id=run_id
        )
    check_versions(run_id, row[0], row[1])
    return Run(*row[2:])


def require_ended(run: Run) -> None:
    """Raise `NotTerminal` for a run that goes on: nothing is made of it before its end."""
    if run.ended_at is None:
        raise NotTerminal(
            f"{run.run_id} has not ended: it is {run.state}",
            remedy=f"wait for its end, or end it with `agentctl cancel {run.run_id}`",
            run_id=run.run_id,
        )


VERSIONED = (
    ("a task", "tasks", "metadata_version", TASK_METADATA_VERSION),
    ("an effect", "effects", "format_version", EFFECT_FORMAT_VERSION),
    ("the budget", "run_budgets", "format_version", BUDGET_FORMAT_VERSION),
    ("a checkpoint", "checkpoints", "format_version", CHECKPOINT_FORMAT_VERSION),
    ("an approval", "approvals", "format_version", APPROVAL_FORMAT_VERSION),
    ("a reconciliation", "effect_reconciliations", "format_version", RECONCILIATION_FORMAT_VERSION),
    ("a session with a provider", "provider_sessions", "format_version", PROVIDER_SESSION_FORMAT_VERSION),
    ("an event of a streamed answer", "stream_events", "format_version", STREAM_EVENT_FORMAT_VERSION),
    ("a session of a protocol", "protocol_sessions", "format_version", PROTOCOL_SESSION_VERSION),
    ("a call of a protocol", "protocol_calls", "format_version", PROTOCOL_CALL_VERSION),
    ("an event", "audit_events", "event_version", AUDIT_EVENT_VERSION),
)
"""What belongs to a run and has a version of its own."""


LINEAGE_FORMAT_VERSION = 1
"""Of what the row of a derived run says of its source (contract, section 0)."""

NOTHING_NEWER = " AND ".join(
    f"NOT EXISTS (SELECT 1 FROM {table} v WHERE v.run_id = {{0}} AND v.{column} > {known})"  # noqa: S608
    for _, table, column, known in VERSIONED
)
"""A condition with the run's name in place of {0}: no newer agentctl has written anything that belongs to it."""


def future_records(tx: Connection, run_id: str) -> list[str]:
    """What of a run was written by a newer agentctl, in words: the first of each kind.

    Indexes of such records alone answer it, whatever the run's size.
    """
    found = []
    for what, table, column, known in VERSIONED:
        # The number stands in the text, since only then SQLite sees that the index is the right one.
        row = tx.execute(
            f"SELECT {column} FROM {table} WHERE run_id = ? AND {column} > {known} LIMIT 1",  # noqa: S608
            (run_id,),
        ).fetchone()
        if row is not None:
            found.append(
                f"{what} of {run_id} was written by a newer agentctl (version {row[0]}, this one knows {known})"
            )
    row = tx.execute(
        "SELECT json_extract(lineage_json, '$.formatVersion') FROM runs WHERE run_id = ?1 AND json_valid(lineage_json) "
        "AND json_extract(lineage_json, '$.formatVersion') > ?2",
        (run_id, LINEAGE_FORMAT_VERSION),
    ).fetchone()
    if row is not None:
        found.append(
            f"the lineage of {run_id} was written by a newer agentctl "
            f"(version {row[0]}, this one knows {LINEAGE_FORMAT_VERSION})"
        )
    return found


def refuse_future_records(tx: Connection, run_id: str) -> None:
    """Raise `IncompatibleVersion` if anything that belongs to a run was written by a newer agentctl.

    Asked before a run is taken, resumed or cancelled, and before all of it is shown.
    """
    if tx.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone() is None:
        raise NotFoundError(f"there is no run {run_id} in this database", run_id=run_id)
    found = future_records(tx, run_id)
    if found:
        raise IncompatibleVersion(f"{found[0]}; nothing was changed", remedy="upgrade agentctl", run_id=run_id)


def documents(tx: Connection, run_id: str) -> RunDocuments:
    """The immutable texts of a run."""
    row = tx.execute(
        "SELECT workflow_json, plan_json, inputs_json, settings_json FROM run_documents WHERE run_id = ?", (run_id,)
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id} in this database", run_id=run_id)
    return RunDocuments(*row)


def settings(tx: Connection, run_id: str) -> tuple[str, str]:
    """(settings_json, base_path): what a worker has to know about a run."""
    row = tx.execute(
        "SELECT d.settings_json, r.base_path, r.runtime_state_version, r.plan_format_version "
        "FROM run_documents d JOIN runs r USING (run_id) WHERE d.run_id = ?",
        (run_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id} in this database", run_id=run_id)
    check_versions(run_id, row[2], row[3])
    return row[0], row[1]


def task_rows(tx: Connection, run: Run) -> list[TaskRow]:
    """All tasks of a run in compiled order, without outputs."""
    return [
        TaskRow(*row)
        for row in tx.execute(
            "SELECT position, task_id, state, attempt, output_digest, retry_at FROM tasks "
            "WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
            (run.first_task, run.first_task + run.task_count - 1),
        )
    ]


def task_outputs(tx: Connection, run: Run, positions: list[int]) -> dict[int, tuple[str | None, str | None]]:
    """(output_json, error_json) of some tasks, by position."""
    found: dict[int, tuple[str | None, str | None]] = {}
    if len(positions) * 4 > run.task_count:
        wanted = set(positions)
        for position, output, error in tx.execute(
            "SELECT position, output_json, error_json FROM tasks WHERE task_no BETWEEN ? AND ?",
            (run.first_task, run.first_task + run.task_count - 1),
        ):
            if position in wanted:
                found[position] = (output, error)
        return found
    for position in positions:
        row = tx.execute(
            "SELECT output_json, error_json FROM tasks WHERE task_no = ?", (run.first_task + position,)
        ).fetchone()
        if row is not None:
            found[position] = (row[0], row[1])
    return found


def memory_rows(tx: Connection, run_id: str) -> list[tuple[str, int, str | None]]:
    """All working-memory rows of a run: (key, position, value or None for removed), ordered by key and position."""
    return [
        (key, position, value)
        for key, position, value in tx.execute(
            "SELECT key, position, value_json FROM memory_values WHERE run_id = ? ORDER BY key, position", (run_id,)
        )
    ]


def output(tx: Connection, run_id: str) -> str | None:
    """The run's declared output as canonical JSON, or None if it has none."""
    row = tx.execute("SELECT output_json FROM run_outputs WHERE run_id = ?", (run_id,)).fetchone()
    return row[0] if row else None


# -- the driver's lease ------------------------------------------------------------------------------------------------


def take_run(
    tx: Connection,
    run_id: str,
    *,
    driver: str,
    epoch: int,
    lease_ms: int,
    resume: bool,
    actor: str,
    trace_id: str | None = None,
    now: int,
) -> int | None:
    """Become the driver of a run, from the epoch that the caller has seen; returns the new epoch.

    Returns None when somebody else was faster or the run has ended. A paused run is taken only with `resume`, which
    sets it `running` again. With `trace_id` what follows is told under that one (contract 4.9).
    """
    row = tx.execute(
        "SELECT state, epoch, priority, runtime_state_version, plan_format_version, created_at FROM runs "
        "WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id} in this database", run_id=run_id)
    state, current, priority = row[:3]
    check_versions(run_id, row[3], row[4])
    refuse_future_records(tx, run_id)
    if current != epoch or state not in (("running", "paused") if resume else ("running",)):
        return None
    tx.execute(
        "UPDATE runs SET driver = ?, epoch = epoch + 1, driver_lease_expires_at = ?, updated_at = ?, "
        "trace_id = COALESCE(?, trace_id) WHERE run_id = ? AND epoch = ?",
        (driver, now + lease_ms, now, trace_id, run_id, epoch),
    )
    payload: dict[str, object] = {"driver": driver, "epoch": epoch + 1}
    if trace_id is not None:
        payload["traceId"] = trace_id
    events = [Event("run.driver", None, canonical(payload))]
    if resume:
        events.append(ledger.wall_time_observed(row[5], now=now))
    if state == "paused":
        tx.execute(
            "UPDATE runs SET state = 'running', reason = NULL, pause_requested_at = NULL, pause_reason = NULL, "
            "revision = revision + 1 WHERE run_id = ?",
            (run_id,),
        )
        put_in_turn(tx, run_id, priority)
        events.append(Event("run.state", None, canonical({"from": "paused", "to": "running"})))
        audit.append_checkpoint(tx, run_id, canonical({"state": "running"}), now=now)
    audit.append(tx, run_id, events, actor=actor, now=now)
    return epoch + 1


def go_on(tx: Connection, run: Run, events: list[Event], *, now: int) -> bool:
    """Somebody has changed the run from outside: what its driver has decided meanwhile is decided again.

    A run that was paused because only a person could move it is `running` again, without a driver: a live coordinator
    adopts it, `resume` takes it. One that an operator has paused stays so. Returns whether it runs again.
    """
    tx.execute("UPDATE runs SET revision = revision + 1, updated_at = ? WHERE run_id = ?", (now, run.run_id))
    if run.state != "paused" or run.pause_requested_at is not None:
        return False
    tx.execute(
        "UPDATE runs SET state = 'running', reason = NULL, driver = NULL, driver_lease_expires_at = NULL "
        "WHERE run_id = ?",
        (run.run_id,),
    )
    put_in_turn(tx, run.run_id, run.priority)
    events.append(Event("run.state", None, canonical({"from": "paused", "to": "running"})))
    return True


def renew_runs(tx: Connection, driver: str, *, lease_ms: int, now: int) -> None:
    """Push the lease of every run that this process drives."""
    tx.execute(
        "UPDATE runs SET driver_lease_expires_at = ? WHERE driver = ? AND ended_at IS NULL AND state = 'running'",
        (now + lease_ms, driver),
    )


def leave_run(tx: Connection, run_id: str, *, driver: str, epoch: int) -> None:
    """Give the run back for others to drive; it is a hint for speed, since a dead driver loses it anyway."""
    tx.execute(
        "UPDATE runs SET driver = NULL, driver_lease_expires_at = NULL WHERE run_id = ? AND driver = ? AND epoch = ?",
        (run_id, driver, epoch),
    )


def check_driver(tx: Connection, run_id: str, *, driver: str, epoch: int, revision: int) -> None:
    """Raise `RunMoved` unless the run is as it was when the batch was decided (architecture 3)."""
    row = head(tx, run_id)
    if row[0] != epoch or row[2] != driver:
        raise RunMoved(f"{run_id} is driven by another process now", run_id=run_id)
    if row[1] != revision:
        raise RunMoved(f"{run_id} has changed since this batch was decided", run_id=run_id)
    if row[3] != "running":
        raise RunMoved(f"{run_id} is {row[3]}", run_id=run_id)


def open_runs(tx: Connection) -> list[Run]:
    """Runs that are `running`, oldest first. Runs of a newer agentctl are left alone."""
    return [
        Run(*row)
        for row in tx.execute(
            f"SELECT {COLUMNS} FROM runs WHERE ended_at IS NULL AND state = 'running' "  # noqa: S608
            "AND runtime_state_version <= ? AND plan_format_version <= ? ORDER BY created_at",
            (RUNTIME_STATE_VERSION, PLAN_FORMAT_VERSION),
        )
    ]


def undriven(tx: Connection) -> list[str]:
    """Runs that are `running` and that nobody drives, as far as their rows say."""
    sql = "SELECT run_id FROM runs WHERE ended_at IS NULL AND state = 'running' AND driver IS NULL"
    return [row[0] for row in tx.execute(sql)]


def overdue_runs(tx: Connection, *, now: int) -> list[Run]:
    """Paused runs whose wall time is over: nobody drives them, and they have to end."""
    return [
        Run(*row)
        for row in tx.execute(
            f"SELECT {COLUMNS} FROM runs WHERE ended_at IS NULL AND state = 'paused' AND deadline_at < ? "  # noqa: S608
            "AND runtime_state_version <= ? AND plan_format_version <= ? ORDER BY created_at",
            (now, RUNTIME_STATE_VERSION, PLAN_FORMAT_VERSION),
        )
    ]


def drivers(tx: Connection) -> list[str]:
    """Processes that drive a run at present."""
    return [
        row[0] for row in tx.execute("SELECT DISTINCT driver FROM runs WHERE ended_at IS NULL AND driver IS NOT NULL")
    ]


def head(tx: Connection, run_id: str) -> tuple[int, int, str | None, str]:
    """(epoch, revision, driver, state): what tells a driver whether its view is still current."""
    row = tx.execute(
        "SELECT epoch, revision, driver, state, runtime_state_version, plan_format_version FROM runs WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    if row is None:
        raise NotFoundError(f"there is no run {run_id} in this database", run_id=run_id)
    check_versions(run_id, row[4], row[5])
    return row[0], row[1], row[2], row[3]


# -- requests of people ------------------------------------------------------------------------------------------------


def request_cancel(tx: Connection, run_id: str, *, reason: str, actor: str, now: int) -> tuple[bool, str]:
    """Set the durable flag. Returns (requested, state); a run that has ended is left alone.

    From the commit of this transaction on no effect of the run starts, since every start looks at the flag.
    """
    run = get(tx, run_id)
    if run.ended_at is not None:
        return False, run.state
    if run.cancel_requested_at is None:
        refuse_future_records(tx, run_id)
        tx.execute(
            "UPDATE runs SET cancel_requested_at = ?, cancel_reason = ?, revision = revision + 1, updated_at = ? "
            "WHERE run_id = ?",
            (now, reason, now, run_id),
        )
        audit.append(
            tx,
            run_id,
            [Event("run.cancellation_requested", None, canonical({"reason": reason}))],
            actor=actor,
            now=now,
        )
        audit.append_checkpoint(tx, run_id, canonical({"cancellationRequested": True}), now=now)
    return True, run.state


def cancel_reason(tx: Connection, run_id: str) -> str | None:
    """What whoever asked for the cancellation has said, or None."""
    row = tx.execute("SELECT cancel_reason FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return row[0] if row else None


def pause_reason(tx: Connection, run_id: str) -> str | None:
    """What whoever asked for the pause has said, or None."""
    row = tx.execute("SELECT pause_reason FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return row[0] if row else None


def request_pause(tx: Connection, run_id: str, *, reason: str, actor: str, now: int) -> tuple[str, str | None]:
    """Ask that a run pause: what runs finishes, nothing new starts. Returns (state, reason of the state).

    A run that waits for a person already is paused by the operator from now on: an answer does not set it going.
    Raises `AlreadyTerminal`, and `ConflictError` for a run that is being cancelled.
    """
    run = get(tx, run_id)
    refuse_future_records(tx, run_id)
    if run.ended_at is not None:
        raise AlreadyTerminal(
            f"{run_id} has ended already: {run.state}; there is nothing to pause",
            remedy=f"`agentctl inspect {run_id}` shows what happened",
            run_id=run_id,
        )
    if run.cancel_requested_at is not None:
        raise ConflictError(f"{run_id} is being cancelled", run_id=run_id)
    if run.pause_requested_at is not None:
        return run.state, run.reason
    tx.execute(
        "UPDATE runs SET pause_requested_at = ?, pause_reason = ?, revision = revision + 1, updated_at = ?, "
        "reason = CASE state WHEN 'paused' THEN 'paused_by_operator' ELSE reason END WHERE run_id = ?",
        (now, reason, now, run_id),
    )
    state: dict[str, object] = {"pauseRequested": True}
    if run.state == "paused":
        state |= {"state": "paused", "reason": "paused_by_operator"}
    audit.append(tx, run_id, [Event("run.pause_requested", None, canonical({"reason": reason}))], actor=actor, now=now)
    audit.append_checkpoint(tx, run_id, canonical(state), now=now)
    return run.state, "paused_by_operator" if run.state == "paused" else run.reason


def withdraw_pause(tx: Connection, run_id: str, *, actor: str, now: int) -> bool:
    """Take back the request to pause a run that runs still. False when there is none."""
    run = get(tx, run_id)
    if run.state != "running" or run.pause_requested_at is None:
        return False
    tx.execute(
        "UPDATE runs SET pause_requested_at = NULL, pause_reason = NULL, revision = revision + 1, updated_at = ? "
        "WHERE run_id = ?",
        (now, run_id),
    )
    audit.append(tx, run_id, [Event("run.pause_withdrawn", None, "{}")], actor=actor, now=now)
    audit.append_checkpoint(tx, run_id, canonical({"pauseRequested": False}), now=now)
    return True


def stop_signals(tx: Connection, run_id: str) -> tuple[bool, bool, int | None]:
    """(cancel requested, pause requested, deadline) of a run; what a busy worker asks every 100 ms."""
    row = tx.execute(
        "SELECT cancel_requested_at IS NOT NULL, pause_requested_at IS NOT NULL, deadline_at "
        "FROM runs WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    return (bool(row[0]), bool(row[1]), row[2]) if row else (True, False, None)


def as_json(text: str | None) -> object:
    """A stored JSON text as a value; None stays None."""
    return None if text is None else json.loads(text)
