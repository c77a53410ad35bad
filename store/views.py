"""Read-only questions about runs and workers, answered as JSON values (contract: new verbs, 4.11, 5.2, 10).

Every method of `Views` is one short reading transaction: it is never blocked by writers and holds nothing open. A row
of any kind that a newer agentctl has written is refused with `IncompatibleVersion`, wherever it is met; so what is
shown was understood. Lists for people are bounded and say how much was left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from . import artifacts, asides, audit, ledger, process_identity, processes, protocols, runs, standing
from .approvals import redacted
from .canonical import text_digest
from .clock import Clock
from .conversations import PREFIX
from .database import Connection, Database
from .errors import IncompatibleVersion, NotFoundError, UsageError
from .process_identity import Liveness
from .records import (
    APPROVAL_FORMAT_VERSION,
    AUDIT_EVENT_VERSION,
    BUDGET_FORMAT_VERSION,
    EFFECT_FORMAT_VERSION,
    PROVIDER_SESSION_FORMAT_VERSION,
    RECONCILIATION_FORMAT_VERSION,
    STREAM_EVENT_FORMAT_VERSION,
    TASK_METADATA_VERSION,
    ProcessRow,
    Run,
)
from .states import TASK_FINAL
from .versions import check_versions

MAX_WAITING = 100
"""How many waiting tasks, uncertain effects and running tasks a status lists; counts are always complete."""

MAX_PAGE = 1000
"""Most runs or events of one page."""

StreamCursor: TypeAlias = tuple[int, str, int, int]
"""How far a reader of stream events has come: time, task, attempt and sequence of the last one."""

_RUN_WORDS = ("run", "fork", "replay", "repair", "retry", "compensation")
"""What the ids of runs begin with, by the verb that has made them (contract 4.12)."""

_STREAMS = (("stdout", "stdoutTail", "stdoutPrefix"), ("stderr", "stderrTail", "stderrPrefix"))


class Views:
    """Questions to one database. The object belongs to the thread of its `Database`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find_run(self, name: str) -> str:
        """The id of the run that `name` means: an id, a prefix of exactly one id with or without its first word
        (`run-`, `fork-`, …), or `@latest`.

        Raises `NotFoundError` for none and `UsageError` for a prefix of several.
        """
        with self._database.read() as tx:
            return _find_run(tx, name)

    def list_runs(self, *, limit: int, state: str | None = None, cursor: str | None = None) -> dict[str, Any]:
        """RunList: `{runs: [RunSummary], next}`, newest first. `next` is the cursor of the next page or None.

        Raises `UsageError` for a cursor that no list has given out.
        """
        with self._database.read() as tx:
            return _list_runs(tx, limit=max(1, min(limit, MAX_PAGE)), state=state, cursor=cursor)

    def status(self, run_id: str) -> dict[str, Any]:
        """RunStatus: the summary, who drives the run, and why each waiting task waits."""
        with self._database.read() as tx:
            return _status(tx, runs.get(tx, run_id), now=self._clock.now())

    def problem(self, run_id: str) -> dict[str, Any] | None:
        """`{code, message}` of what keeps every coordinator from driving a run that has not ended, or None."""
        with self._database.read() as tx:
            return asides.problem_of(tx, run_id)

    def progress(self, run_id: str) -> dict[str, Any]:
        """The little that a progress display needs: `state, reason, taskCounts, taskCount, running`."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            return {
                "runId": run_id,
                "workflow": run.workflow_name,
                "state": run.state,
                "reason": run.reason,
                "cancelRequested": run.cancel_requested_at is not None,
                "taskCounts": _task_counts(tx, [run_id])[run_id],
                "taskCount": run.task_count,
                "running": _running_tasks(tx, run_id, limit=8),
            }

    def stream_events(
        self, run_id: str, after: StreamCursor | None, *, limit: int
    ) -> tuple[list[dict[str, Any]], StreamCursor | None]:
        """Events of streamed answers after those that were read, and the cursor for the next question.

        One that is stored late with an earlier time than one that was read is passed over: this is for a display.
        """
        with self._database.read() as tx:
            return _stream_events(tx, run_id, after=after, limit=limit)

    def conversation(self, run_id: str, task_id: str | None, *, failed: bool = False) -> list[dict[str, Any]]:
        """The turns and tool calls of agents, in compiled order, as `logs` shows them."""
        with self._database.read() as tx:
            return list(_conversation(tx, runs.get(tx, run_id), task_id, failed=failed))

    def outcome(self, run_id: str) -> dict[str, Any]:
        """RunOutcome: `runId, traceId, state, reason, cancelReason, pauseReason, output, error`.

        `cancelReason` is what whoever asked for the cancellation has said, else null; `pauseReason` likewise.
        """
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            output = runs.output(tx, run_id)
            return {
                "runId": run.run_id,
                "traceId": run.trace_id,
                "state": run.state,
                "reason": run.reason,
                "cancelReason": runs.cancel_reason(tx, run_id),
                "pauseReason": runs.pause_reason(tx, run_id),
                "output": _value(output),
                "error": _value(run.error_json),
            }

    def recovery(self, run_id: str) -> dict[str, Any]:
        """What a RetryOutcome or RepairOutcome has besides the outcome (contract 9.3).

        `sourceRunId, reusedTasks, executedTasks, artifacts`, and of a retry `failedOnly, retryRoots`; of a repair
        `repairRoots`.
        """
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            reused, executed = [], []
            for task_id, disposition, attempt, state in tx.execute(
                "SELECT task_id, disposition, attempt, state FROM tasks WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
                _span(run),
            ):
                if disposition == "reused":
                    reused.append(task_id)
                # What waits for a person has an attempt, and has not been executed yet; what fails in the driver's own
                # hands (an assertion) has none, and was.
                elif state in ("succeeded", "failed") or (attempt > 0 and state in TASK_FINAL):
                    executed.append(task_id)
            lineage = _lineage(tx, run_id) or {}
            data: dict[str, Any] = {
                "sourceRunId": run.source_run_id,
                "reusedTasks": reused,
                "executedTasks": executed,
                "artifacts": list(artifacts.references(tx, run_id)),
                f"{run.mode}Roots": lineage.get("roots", []),
            }
            if run.mode == "retry":
                data["failedOnly"] = lineage.get("failedOnly", False)
            return data

    def now(self) -> int:
        """The time to which what is shown refers (epoch ms)."""
        return self._clock.now()

    def state(self, run_id: str) -> str:
        """The state of a run alone; what a waiting command asks again and again."""
        with self._database.read() as tx:
            return runs.get(tx, run_id).state

    def failures(self, run_id: str, *, limit: int) -> tuple[list[dict[str, Any]], int]:
        """Failed tasks in compiled order as `{taskId, attempt, error}`, and how many there are in all."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            span = _span(run)
            rows = _rows(
                tx,
                "SELECT task_id, attempt, error_json FROM tasks "
                "WHERE task_no BETWEEN ? AND ? AND state = 'failed' ORDER BY task_no LIMIT ?",
                (*span, limit),
            )
            found = [{"taskId": row[0], "attempt": row[1], "error": _value(row[2])} for row in rows]
            count = len(found)
            if count == limit:
                sql = "SELECT COUNT(*) FROM tasks WHERE task_no BETWEEN ? AND ? AND state = 'failed'"
                count = _count(tx, sql, span)
            return found, count

    def uncertain(self, run_id: str, *, limit: int = MAX_WAITING) -> tuple[list[dict[str, Any]], int]:
        """Uncertain effects of a run (at most `limit`, all when it is -1) and their number."""
        with self._database.read() as tx:
            runs.get(tx, run_id)
            return _uncertain(tx, run_id, limit)

    def inspect(self, run_id: str) -> dict[str, Any]:
        """RunInspection with every key of contract 4.11. Raises `CorruptStore` for a broken checkpoint chain."""
        with self._database.read() as tx:
            return _inspect(tx, runs.get(tx, run_id), now=self._clock.now())

    def approvals(self, run_id: str | None, *, pending: bool) -> list[dict[str, Any]]:
        """Approvals of a run, or of all runs, oldest first; with `pending` only those that nobody has decided."""
        with self._database.read() as tx:
            if run_id is not None:
                runs.get(tx, run_id)
            return _approvals(tx, run_id, pending=pending, limit=-1)

    def find_approval(self, name: str) -> str:
        """The id of the approval that `name` means: an id or a prefix of exactly one."""
        with self._database.read() as tx:
            return _find(tx, "approvals", "approval_id", name, "approval", "`agentctl approvals list` shows them")

    def find_effect(self, name: str) -> str:
        """The id of the effect that `name` means: an id or a prefix of exactly one. Errors as for `find_run`."""
        with self._database.read() as tx:
            return _find(tx, "effects", "effect_id", name, "effect", "`agentctl effects list RUN` shows them")

    def effects(self, run_id: str, task_id: str | None) -> dict[str, Any]:
        """EffectList of a run, or of one of its tasks, in compiled order."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            task_no = None if task_id is None else _task_no(tx, run, task_id)
            found = [_effect_record(row, run_id) for row in _effect_rows(tx, run, task_no)]
            wanted = {effect["request"]["id"] for effect in found}
            said = [item for item in _reconciliations(tx, "run_id", run_id) if item["effectId"] in wanted]
            return {"runId": run_id, "taskId": task_id, "effects": found, "reconciliations": said}

    def uncertain_effects(self) -> dict[str, Any]:
        """EffectList over all runs: what a person has to reconcile, oldest first."""
        with self._database.read() as tx:
            found = [
                _effect_record(row[:-1], row[-1])
                for row in tx.execute(
                    f"SELECT {_EFFECT_COLUMNS}, e.run_id FROM effects e WHERE e.effect_no IN "  # noqa: S608
                    f"(SELECT effect_no FROM effects WHERE {_UNRESOLVED}) ORDER BY e.effect_no"
                )
            ]
            return {"runId": None, "taskId": None, "effects": found, "reconciliations": []}

    def effect(self, effect_id: str) -> dict[str, Any]:
        """EffectInspection: the effect, everything that was concluded about it, and which conclusion counts."""
        with self._database.read() as tx:
            row = tx.execute(
                f"SELECT {_EFFECT_COLUMNS}, e.run_id FROM effects e WHERE e.effect_id = ?",  # noqa: S608
                (effect_id,),
            ).fetchone()
            if row is None:
                raise NotFoundError(f"there is no effect {effect_id} in this database")
            said = _reconciliations(tx, "effect_id", effect_id)
            return {
                "effect": _effect_record(row[:-1], row[-1]),
                "reconciliations": said,
                "effectiveReconciliation": said[-1] if said else None,
                "protocolCall": protocols.call(tx, effect_id),
            }

    def reconciliation(self, reconciliation_id: str) -> dict[str, Any]:
        """EffectReconciliation: one conclusion."""
        with self._database.read() as tx:
            return _reconciliations(tx, "reconciliation_id", reconciliation_id)[0]

    def barred(self, run_id: str) -> list[dict[str, Any]]:
        """Tasks of a run that can have no fresh attempt, and why; see `standing.barred`."""
        with self._database.read() as tx:
            return standing.barred(tx, run_id)

    def failed_by(self, effect_id: str) -> list[str]:
        """The effects that stand, and that a fresh attempt would repeat, when an effect was said not to have happened.

        Its task fails or has failed then; empty for every other effect.
        """
        with self._database.read() as tx:
            row = tx.execute(
                "SELECT a.error_json FROM effects e JOIN attempts a ON a.attempt_id = e.attempt_id "
                "WHERE e.effect_id = ? AND a.result_effect = e.effect_id AND a.outcome = 'failed'",
                (effect_id,),
            ).fetchone()
            return [] if row is None else standing.standing_of(row[0])

    def tasks(self, run_id: str, *, limit: int) -> tuple[list[dict[str, Any]], int]:
        """The first tasks of a run in compiled order, without outputs, and the number of all."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            rows = _rows(
                tx,
                "SELECT t.task_id, t.state, t.attempt, t.started_at, t.ended_at, t.error_json, "
                "t.metadata_version, (SELECT a.delivery FROM attempts a WHERE a.task_no = t.task_no "
                "ORDER BY a.number DESC LIMIT 1), t.disposition, t.source_run_id "
                "FROM tasks t WHERE t.task_no BETWEEN ? AND ? ORDER BY t.task_no LIMIT ?",
                (*_span(run), limit),
            )
            found = []
            for task_id, state, attempt, started_at, ended_at, error, version, deliveries, disposition, origin in rows:
                _check_version(f"task {task_id}", version, TASK_METADATA_VERSION, run_id)
                found.append(
                    {
                        "taskId": task_id,
                        "state": state,
                        "attempt": attempt,
                        "deliveries": deliveries or 0,
                        "startedAt": started_at,
                        "endedAt": ended_at,
                        "error": _value(error),
                        "disposition": disposition,
                        "sourceRunId": origin,
                    }
                )
            return found, run.task_count

    def below(self, run_id: str, task_id: str) -> list[str]:
        """The tasks that an expansion or a sub-workflow has put in the place of one, in compiled order."""
        with self._database.read() as tx:
            rows = tx.execute(
                "SELECT task_id FROM tasks WHERE run_id = ? AND substr(task_id, 1, ?) = ? ORDER BY task_no",
                (run_id, len(task_id) + 2, f"{task_id}--"),
            )
            return [row[0] for row in rows]

    def bindings(self, run_id: str, task_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The variables that an expansion has given to each of these tasks; those of no expansion are left out.

        Values under keys that tell of secrets are hidden, as in approvals. A plan that cannot be read has none: why a
        run has failed is to be seen all the same.
        """
        with self._database.read() as tx:
            rows = tx.execute(
                "SELECT e.key, json_extract(e.value, '$.expansion.bindings') FROM run_documents d, "
                "json_each(CASE WHEN json_valid(d.plan_json) THEN d.plan_json ELSE '{}' END, '$.tasks') e "
                "WHERE d.run_id = ? AND e.key IN (SELECT value FROM json_each(?)) "
                "AND json_extract(e.value, '$.expansion') IS NOT NULL",
                (run_id, json.dumps(list(task_ids))),
            )
            return {task_id: redacted(_value(bound)) for task_id, bound in rows}

    def find_task(self, run_id: str, name: str) -> str:
        """The id of the task of a run that `name` means: an id, or a prefix of exactly one that was declared.

        Raises `NotFoundError` for none and `UsageError` for a prefix of several.
        """
        with self._database.read() as tx:
            return _find_task(tx, runs.get(tx, run_id), name)

    def logs(self, run_id: str, task_id: str | None, *, failed: bool = False) -> list[dict[str, Any]]:
        """What process tasks have printed, per attempt and effect, in compiled order; with `failed` only those of
        attempts that have ended without success.

        Each entry: `taskId, attempt, effectId, status, dispatches, exitCode, stdout, stderr, truncated,
        reconciliation`. A stream that was not recorded is None; `truncated` says that only a part was kept;
        `reconciliation` is what a person has concluded about an uncertain effect, or None. Raises `NotFoundError` for
        a task that the run does not have.
        """
        with self._database.read() as tx:
            return list(_logs(tx, runs.get(tx, run_id), task_id, failed=failed))

    def workers(self) -> dict[str, Any]:
        """WorkerList: every incarnation that is still recorded, the living first, then the ended, latest first."""
        with self._database.read() as tx:
            return {"workers": _workers(tx)}

    def processes(self, kind: str) -> list[dict[str, Any]]:
        """Processes of a kind without a recorded end: `processId, name, pid, state, liveness, startedAt`."""
        with self._database.read() as tx:
            return [
                {
                    "processId": row.process_id,
                    "name": row.name,
                    "pid": row.pid,
                    "state": row.state,
                    "liveness": _liveness(row).value,
                    "startedAt": row.started_at,
                }
                for row in processes.live(tx, kind)
            ]

    def events(self, run_id: str, *, after: int = 0, limit: int = MAX_PAGE) -> list[dict[str, Any]]:
        """Audit events of a run with a sequence above `after`, oldest first."""
        with self._database.read() as tx:
            runs.get(tx, run_id)
            return event_rows(tx, run_id, after=after, limit=limit)

    def data_version(self) -> tuple[int, int]:
        """Changes when another connection has committed; cheap. Outside of any transaction."""
        return self._database.data_version()


# -- helpers -------------------------------------------------------------------------------------------------


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _span(run: Run) -> tuple[int, int]:
    return run.first_task, run.first_task + run.task_count - 1


def _rows(tx: Connection, sql: str, arguments: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    return list(tx.execute(sql, arguments))


def _count(tx: Connection, sql: str, arguments: Sequence[Any]) -> int:
    row = tx.execute(sql, arguments).fetchone()
    return int(row[0]) if row else 0


def _check_version(what: str, version: int | None, known: int, run_id: str) -> None:
    if version is not None and version > known:
        raise IncompatibleVersion(
            f"{what} of {run_id} was written by a newer agentctl (version {version}, this one knows {known}); "
            "nothing was changed",
            remedy="upgrade agentctl",
            run_id=run_id,
        )


def _liveness(row: ProcessRow) -> Liveness:
    if row.state in ("stopped", "dead"):
        return Liveness.DEAD
    return process_identity.liveness_of(row.identity)


def _stopped(row: ProcessRow) -> bool:
    """Whether a process that is alive does nothing: it was stopped, as by Ctrl-Z, and waits to be let go on."""
    return row.state not in ("stopped", "dead") and process_identity.is_stopped(row.identity)


def _find_run(tx: Connection, name: str) -> str:
    if name == "@latest":
        row = tx.execute("SELECT run_id FROM runs ORDER BY created_at DESC, run_id DESC LIMIT 1").fetchone()
        if row is None:
            raise NotFoundError("there is no run in this database", remedy="`agentctl run FILE` makes one")
        return str(row[0])
    if tx.execute("SELECT 1 FROM runs WHERE run_id = ?", (name,)).fetchone() is not None:
        return name
    found = []
    if len(name) >= 4:
        found = _runs_from(tx, name)
        # What tells runs apart is the number behind the word, and that alone is what people copy or remember.
        found = found or [row for word in _RUN_WORDS for row in _runs_from(tx, f"{word}-{name}")]
    if len(found) > 1:
        shown = " and ".join(str(row[0]) for row in found[:2])
        raise UsageError(
            f"{name!r} is the beginning of several run ids, {shown} among them",
            remedy="give more of it; `agentctl runs list` shows the runs",
        )
    if not found:
        raise NotFoundError(f"there is no run {name} in this database", remedy="`agentctl runs list` shows the runs")
    return str(found[0][0])


def _runs_from(tx: Connection, beginning: str) -> list[tuple[Any, ...]]:
    """Two runs at most whose ids begin so: a range of the primary key.

    Ids are ASCII, so the last code point bounds every id with this prefix.
    """
    sql = "SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? LIMIT 2"
    return _rows(tx, sql, (beginning, beginning + "\U0010ffff"))


# -- runs ----------------------------------------------------------------------------------------------------


def _task_counts(tx: Connection, run_ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """Tasks per state of some runs, by ranges of the primary key: outputs are never read.

    The cross joins fix the order: page, run, its range of tasks. Left to itself the planner may scan every task.
    """
    counts: dict[str, dict[str, int]] = {run_id: {} for run_id in run_ids}
    for run_id, state, number, version in tx.execute(
        "SELECT r.run_id, t.state, COUNT(*), MAX(t.metadata_version) "
        "FROM json_each(?) p CROSS JOIN runs r ON r.run_id = p.value "
        "CROSS JOIN tasks t ON t.task_no BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
        "GROUP BY r.run_id, t.state ORDER BY r.run_id, t.state",
        (json.dumps(list(run_ids)),),
    ):
        _check_version("a task", version, TASK_METADATA_VERSION, run_id)
        counts[run_id][state] = number
    return counts


def _summary(run: Run, counts: dict[str, int]) -> dict[str, Any]:
    return {
        "runId": run.run_id,
        "workflow": run.workflow_name,
        "state": run.state,
        "reason": run.reason,
        "mode": run.mode,
        "sourceRunId": run.source_run_id,
        "parentRunId": run.parent_run_id,
        "createdAt": run.created_at,
        "updatedAt": run.updated_at,
        "taskCounts": counts,
    }


def _lineage(tx: Connection, run_id: str) -> Any:
    """Why and how a run was derived from another one, or None."""
    row = tx.execute("SELECT lineage_json FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    return None if row is None else _value(row[0])


def _derived(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    """Runs that were made from this one, oldest first."""
    return [
        {"runId": name, "mode": mode, "state": state, "createdAt": created_at}
        for name, mode, state, created_at in tx.execute(
            "SELECT run_id, mode, state, created_at FROM runs WHERE source_run_id = ?1 UNION "
            "SELECT run_id, mode, state, created_at FROM runs WHERE parent_run_id = ?1 ORDER BY created_at, run_id",
            (run_id,),
        )
    ]


def _list_runs(tx: Connection, *, limit: int, state: str | None, cursor: str | None) -> dict[str, Any]:
    conditions, arguments = [], []
    if state is not None:
        conditions.append("state = ?")
        arguments.append(state)
    if cursor is not None:
        created, _, run_id = cursor.partition(":")
        if not (created.isascii() and created.isdigit() and len(created) <= 18 and run_id):
            raise UsageError(f"{cursor!r} is not the `next` of a list", remedy="copy `next` as it was printed")
        conditions.append("(created_at, run_id) < (CAST(? AS INTEGER), ?)")
        arguments += [created, run_id]
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    rows = _rows(
        tx,
        f"SELECT runtime_state_version, plan_format_version, {runs.COLUMNS} FROM runs {where}"  # noqa: S608
        "ORDER BY created_at DESC, run_id DESC LIMIT ?",
        (*arguments, limit + 1),
    )
    found = [Run(*row[2:]) for row in rows[:limit]]
    counts, problems = _readable_counts(tx, rows[:limit])
    problems = asides.problems(tx) | problems
    following = f"{found[-1].created_at}:{found[-1].run_id}" if len(rows) > limit else None
    drivers: dict[str | None, dict[str, Any] | None] = {}
    for run in found:
        if run.driver not in drivers:  # one look at each process, however many runs it drives
            drivers[run.driver] = _driver(tx, run)
    shown = []
    for run in found:
        driver = drivers[run.driver]
        shown.append(
            {
                **_summary(run, counts.get(run.run_id, {})),
                "driver": driver and {**driver, "epoch": run.epoch, "leaseExpiresAt": run.driver_lease_expires_at},
                "problem": problems.get(run.run_id),
            }
        )
    return {"runs": shown, "next": following}


def _readable_counts(
    tx: Connection, rows: Sequence[tuple[Any, ...]]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, Any]]]:
    """Tasks per state of a page of runs, and what to say of those that a newer agentctl has written.

    One that cannot be read must not hide the others; what is told of it is its row, as it stands there.
    """
    problems: dict[str, dict[str, Any]] = {}
    readable = []
    for row in rows:
        try:
            check_versions(row[2], row[0], row[1])
            readable.append(row[2])
        except IncompatibleVersion as error:
            problems[row[2]] = {"code": error.code, "message": error.message}
    try:
        return _task_counts(tx, readable), problems
    except IncompatibleVersion:  # a task of one of them: which one, tells a look at each
        counts: dict[str, dict[str, int]] = {}
        for run_id in readable:
            try:
                counts |= _task_counts(tx, [run_id])
            except IncompatibleVersion as error:
                problems[run_id] = {"code": error.code, "message": error.message}
        return counts, problems


# -- status --------------------------------------------------------------------------------------------------


def _status(tx: Connection, run: Run, *, now: int) -> dict[str, Any]:
    counts = _task_counts(tx, [run.run_id])[run.run_id]
    driver = _driver(tx, run)
    waiting_count = sum(number for state, number in counts.items() if state not in TASK_FINAL and state != "running")
    waiting: list[dict[str, Any]] = []
    if run.ended_at is None and waiting_count:
        waiting = _waiting(tx, run, driver, now)
    approvals, approval_count = _pending_approvals(tx, run.run_id)
    effects, effect_count = _uncertain(tx, run.run_id, MAX_WAITING)
    return {
        **_summary(run, counts),
        "lineage": _lineage(tx, run.run_id),
        "derivedRuns": _derived(tx, run.run_id),
        "traceId": run.trace_id,
        "priority": run.priority,
        "deadlineAt": run.deadline_at,
        "cancelRequestedAt": run.cancel_requested_at,
        "cancelReason": runs.cancel_reason(tx, run.run_id),
        "pauseRequestedAt": run.pause_requested_at,
        "pauseReason": runs.pause_reason(tx, run.run_id),
        "driver": driver,
        "problem": asides.problem_of(tx, run.run_id),
        "running": _with_liveness(tx, _running_tasks(tx, run.run_id, limit=MAX_WAITING)),
        "unrecorded": _unrecorded(tx, run, limit=MAX_WAITING),
        "waiting": waiting,
        "waitingCount": waiting_count if run.ended_at is None else 0,
        "pendingApprovals": approvals,
        "pendingApprovalCount": approval_count,
        "uncertainEffects": effects,
        "uncertainEffectCount": effect_count,
        "budget": _budget(tx, run.run_id, now),
    }


def _driver(tx: Connection, run: Run) -> dict[str, Any] | None:
    if run.driver is None:
        return None
    row = processes.get(tx, run.driver)
    return {
        "processId": run.driver,
        "kind": None if row is None else row.kind,
        "name": None if row is None else row.name,
        "pid": None if row is None else row.pid,
        "liveness": Liveness.DEAD.value if row is None else _liveness(row).value,
        "stopped": row is not None and _stopped(row),
        "epoch": run.epoch,
        "leaseExpiresAt": run.driver_lease_expires_at,
    }


def _running_tasks(tx: Connection, run_id: str, *, limit: int) -> list[dict[str, Any]]:
    """Claimed attempts of a run, the oldest claim first."""
    return [
        {
            "taskId": task_id,
            "attempt": number,
            "delivery": delivery,
            "workerId": holder,
            "claimedAt": claimed_at,
            "leaseExpiresAt": expires,
            "step": None if operation is None else {"ordinal": ordinal, "operation": operation, "status": status},
        }
        for task_id, number, delivery, holder, claimed_at, expires, ordinal, operation, status in tx.execute(
            # What it does at the moment: its last effect, found by the index of the effects' attempts.
            "SELECT a.task_id, a.number, a.delivery, a.holder, a.claimed_at, a.lease_expires_at, e.ordinal, "
            "e.operation, e.status FROM attempts a LEFT JOIN effects e ON e.attempt_id = a.attempt_id AND e.ordinal = "
            "(SELECT MAX(ordinal) FROM effects l WHERE l.attempt_id = a.attempt_id) "
            "WHERE a.queue = 'claimed' AND a.run_id = ? ORDER BY a.claimed_at, a.attempt_id LIMIT ?",
            (run_id, limit),
        )
    ]


def _with_liveness(tx: Connection, running: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with `workerLiveness`: what a dead worker holds does not go on until somebody rescues it."""
    known: dict[str, str] = {}
    for task in running:
        holder = task["workerId"]
        if holder not in known:
            row = processes.get(tx, holder)
            known[holder] = Liveness.DEAD.value if row is None or row.stopped_at is not None else _liveness(row).value
        task["workerLiveness"] = known[holder]
    return running


def _unrecorded(tx: Connection, run: Run, *, limit: int) -> list[dict[str, Any]]:
    """Attempts that have ended and whose task says `running` until the driver of the run has committed the result."""
    return [
        {"taskId": task_id, "attempt": number, "outcome": outcome, "finishedAt": finished_at}
        for task_id, number, outcome, finished_at in tx.execute(
            "SELECT a.task_id, a.number, a.outcome, a.finished_at FROM attempts a JOIN tasks t USING (task_no) "
            "WHERE a.queue = 'finished' AND a.run_id = ? AND t.state = 'running' ORDER BY a.task_no LIMIT ?",
            (run.run_id, limit),
        )
    ]


_UNRESOLVED = (
    "status = 'uncertain' AND superseded = 0 AND NOT EXISTS "
    "(SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = effects.effect_id)"
)


def _pending_approvals(tx: Connection, run_id: str) -> tuple[list[dict[str, Any]], int]:
    found = _approvals(tx, run_id, pending=True, limit=MAX_WAITING)
    count = len(found)
    if count == MAX_WAITING:
        count = _count(tx, "SELECT COUNT(*) FROM approvals WHERE status = 'pending' AND run_id = ?", (run_id,))
    return found, count


def _uncertain(tx: Connection, run_id: str, limit: int) -> tuple[list[dict[str, Any]], int]:
    found = []
    for effect_id, task_id, attempt, ordinal, operation, started_at, error, version in tx.execute(
        "SELECT effect_id, task_id, attempt, ordinal, operation, started_at, error_json, format_version "  # noqa: S608
        f"FROM effects WHERE {_UNRESOLVED} AND run_id = ? ORDER BY effect_no LIMIT ?",
        (run_id, limit),
    ):
        _check_version(f"effect {effect_id}", version, EFFECT_FORMAT_VERSION, run_id)
        found.append(
            {
                "effectId": effect_id,
                "taskId": task_id,
                "attempt": attempt,
                "ordinal": ordinal,
                "operation": operation,
                "startedAt": started_at,
                "error": _value(error),
                "remoteTaskId": _remote_task(tx, effect_id),
            }
        )
    count = len(found)
    if count == limit:
        sql = f"SELECT COUNT(*) FROM effects WHERE {_UNRESOLVED} AND run_id = ?"  # noqa: S608
        count = _count(tx, sql, (run_id,))
    return found, count


def _remote_task(tx: Connection, effect_id: str) -> str | None:
    """The task of a remote agent that can be asked how an effect has ended (`effects continue-remote`)."""
    row = tx.execute(
        "SELECT json_extract(state_json, '$.remoteTaskId') FROM protocol_calls "
        "WHERE effect_id = ? AND protocol = 'a2a'",
        (effect_id,),
    ).fetchone()
    return None if row is None else row[0]


def _budget(tx: Connection, run_id: str, now: int) -> dict[str, Any]:
    row = tx.execute("SELECT format_version FROM run_budgets WHERE run_id = ?", (run_id,)).fetchone()
    _check_version("the budget", None if row is None else row[0], BUDGET_FORMAT_VERSION, run_id)
    return ledger.as_json(tx, run_id, now=now)


def _waiting(tx: Connection, run: Run, driver: dict[str, Any] | None, now: int) -> list[dict[str, Any]]:
    """Why each of the first waiting tasks waits: first those that need a person, then in compiled order."""
    rows: list[tuple[Any, ...]] = _rows(
        tx,
        "SELECT task_no, task_id, state, attempt, retry_at, error_json FROM tasks "
        "WHERE task_no BETWEEN ? AND ? AND ended_at IS NULL AND state <> 'running' "
        "ORDER BY CASE state WHEN 'waiting_for_approval' THEN 0 WHEN 'waiting_for_effect' THEN 1 "
        "WHEN 'retry_scheduled' THEN 2 ELSE 3 END, task_no LIMIT ?",
        (*_span(run), MAX_WAITING),
    )
    paused = run.state == "paused" or run.pause_requested_at is not None
    driven = driver is not None and driver["liveness"] != Liveness.DEAD.value
    holds: dict[int, str] = dict(
        _rows(
            tx,
            "SELECT task_no, hold FROM attempts "
            "WHERE live_task BETWEEN ? AND ? AND state = 'ready' AND hold IS NOT NULL",
            _span(run),
        )
    )
    asked: dict[str, str] = {}
    if any(row[2] == "waiting_for_approval" for row in rows):
        sql = "SELECT task_id, approval_id FROM approvals WHERE run_id = ? AND status = 'pending'"
        asked = dict(_rows(tx, sql, (run.run_id,)))
    unmet = _unmet(tx, run, [row[1] for row in rows if row[2] == "pending"])
    workers = _serving(tx, run.run_id) if any(row[2] == "ready" for row in rows) else (0, 0)
    found = []
    for task_no, task_id, state, attempt, retry_at, error in rows:
        if state == "waiting_for_approval":
            why = "approval"
            detail = f"a person has to answer {asked[task_id]}" if task_id in asked else "its approval was rejected"
        elif state == "waiting_for_effect":
            why = "reconciliation"
            detail = _message(error) or "an effect is uncertain; a person has to reconcile it"
        elif state == "retry_scheduled":
            seconds = max(0.0, ((retry_at or now) - now) / 1000)
            reason = _message(error)
            why = "backoff"
            detail = f"attempt {attempt + 1} follows in {seconds:.1f} s"
            detail += f" after: {reason}" if reason else ""
        elif state == "pending" and task_id in unmet:
            why, detail = unmet[task_id]
        elif holds.get(task_no) == "budget" and (holder := _budget_holder(tx, run.run_id)) is not None:
            # Going on with the run does not help: nothing but this conclusion gives the budget back.
            why = "budget"
            detail = f"uncertain effect {holder[:12]} holds the budget that it needs, until a person has reconciled it"
        elif paused:
            why, detail = "paused", f"the run is paused; `agentctl resume {run.run_id}` lets it go on"
        elif not driven:
            why = "no_driver"
            detail = "no living process drives the run" if driver is not None else "nobody drives the run yet"
        elif state == "ready":
            why, detail = _ready_reason(holds.get(task_no) == "budget", *workers)
        else:
            why, detail = "place", _places(run.max_concurrency)
        found.append({"taskId": task_id, "why": why, "detail": detail})
    return found


def _budget_holder(tx: Connection, run_id: str) -> str | None:
    """The first unresolved effect of a run that holds budget which only its reconciliation gives back."""
    row = tx.execute(
        f"SELECT effect_id FROM effects WHERE {_UNRESOLVED} AND run_id = ?1 AND EXISTS "  # noqa: S608
        "(SELECT 1 FROM budget_reservations b WHERE b.run_id = ?1 AND b.reservation_id = effects.effect_id "
        "AND b.state = 'open' AND b.units > 0) ORDER BY effect_no LIMIT 1",
        (run_id,),
    ).fetchone()
    return None if row is None else row[0]


def _places(limit: int) -> str:
    return f"at most {limit} tasks of the run go on at once" if limit > 1 else "its tasks go on one at a time"


def _ready_reason(held: bool, serving: int, idle: int) -> tuple[str, str]:
    if held:
        return "budget", "what it may need does not fit beside what is reserved now"
    if serving == 0:
        return "no_worker", "no living worker serves this run; `agentctl workers start` starts some"
    if idle:
        return "place", "a worker is about to take it"
    return "place", f"all {serving} workers are busy" if serving > 1 else "the only worker is busy"


def _serving(tx: Connection, run_id: str) -> tuple[int, int]:
    """(living workers that may serve the run, those of them that are idle)."""
    serving = idle = 0
    for row in processes.live(tx, "worker"):
        if row.drains or row.only_run not in (None, run_id) or _liveness(row) is Liveness.DEAD:
            continue
        serving += 1
        idle += row.state == "idle"
    return serving, idle


def _unmet(tx: Connection, run: Run, task_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(why, detail) of pending tasks whose needs, or whose earlier users of memory, have not ended."""
    if not task_ids:
        return {}
    # One pass of SQLite over the plan, which can be large: only the wanted tasks become text, and of them few parts.
    plan: dict[str, tuple[list[str], list[int]]] = {}
    for task_id, needs, after, guards in tx.execute(
        "SELECT e.key, json_extract(e.value, '$.needs'), json_extract(e.value, '$.memoryAfter'), "
        "json_extract(e.value, '$.routeGuards') FROM run_documents d, json_each(d.plan_json, '$.tasks') e "
        "WHERE d.run_id = ? AND e.key IN (SELECT value FROM json_each(?))",
        (run.run_id, json.dumps(list(task_ids))),
    ):
        # An aggregate waits for the router that guards it although it does not need it.
        routers = [guard["router"] for guard in _value(guards) or []]
        plan[task_id] = (list(dict.fromkeys([*(_value(needs) or []), *routers])), _value(after) or [])
    open_needs = {
        row[0]
        for row in tx.execute(
            "SELECT task_id FROM json_each(?) n JOIN tasks ON run_id = ? AND task_id = n.value WHERE ended_at IS NULL",
            (json.dumps(sorted({need for needs, _ in plan.values() for need in needs})), run.run_id),
        )
    }
    positions = sorted({position for _, after in plan.values() for position in after})
    open_positions: dict[int, str] = dict(
        _rows(
            tx,
            "SELECT position, task_id FROM json_each(?) n JOIN tasks ON task_no = ? + n.value WHERE ended_at IS NULL",
            (json.dumps(positions), run.first_task),
        )
    )
    found = {}
    for task_id, (needs, after) in plan.items():
        unmet = [need for need in needs if need in open_needs]
        earlier = [open_positions[position] for position in after if position in open_positions]
        if unmet:
            found[task_id] = ("needs", "waits for " + _names(unmet))
        elif earlier and run.mode == "compensation":
            found[task_id] = ("needs", "what was done later is undone first: waits for " + _names(earlier))
        elif earlier:
            found[task_id] = ("memory", "uses working memory after " + _names(earlier))
    return found


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _message(error_json: str | None) -> str | None:
    error = _value(error_json)
    return error.get("message") if isinstance(error, dict) else None


# -- inspection ----------------------------------------------------------------------------------------------


def _inspect(tx: Connection, run: Run, *, now: int) -> dict[str, Any]:
    runs.refuse_future_records(tx, run.run_id)
    return {
        "run": _run_record(tx, run),
        "tasks": list(_task_records(tx, run)),
        "effects": [_effect_record(row, run.run_id) for row in _effect_rows(tx, run)],
        "effectReconciliations": _reconciliations(tx, "run_id", run.run_id),
        "approvals": _approvals(tx, run.run_id, pending=True, limit=-1),
        "checkpoints": [
            {
                "runId": run.run_id,
                "sequence": sequence,
                "formatVersion": 1,
                "state": json.loads(state_json),
                "checksum": link,
                "createdAt": created_at,
            }
            for sequence, state_json, link, created_at in audit.read_chain(tx, run.run_id)
        ],
        "providerSessions": _provider_sessions(tx, run.run_id),
        "streamEvents": _stream_events(tx, run.run_id, after=None, limit=-1)[0],
        "protocolSessions": protocols.sessions(tx, run.run_id),
        "protocolCalls": protocols.calls(tx, run.run_id),
        "toolCalls": _tool_calls(tx, run.run_id),
        "artifacts": list(artifacts.references(tx, run.run_id)),
        "budget": _budget(tx, run.run_id, now),
        "audit": event_rows(tx, run.run_id, after=0, limit=-1),
        "traces": [],
    }


def _run_record(tx: Connection, run: Run) -> dict[str, Any]:
    documents = runs.documents(tx, run.run_id)
    memory: dict[str, Any] = {}
    for key, _, value in runs.memory_rows(tx, run.run_id):
        if value is None:
            memory.pop(key, None)
        else:
            memory[key] = json.loads(value)
    head = tx.execute(
        "SELECT runtime_state_version, plan_format_version, idempotency_key, cancel_reason, pause_reason, "
        "lineage_json FROM runs WHERE run_id = ?",
        (run.run_id,),
    ).fetchone()
    assert head is not None  # the same snapshot has just shown the row
    return {
        "runId": run.run_id,
        "runtimeStateVersion": head[0],
        "workflowName": run.workflow_name,
        "workflowDigest": run.workflow_digest,
        "planDigest": run.plan_digest,
        "planFormatVersion": head[1],
        "workflow": _value(documents.workflow_json),
        "plan": _value(documents.plan_json),
        "inputs": _value(documents.inputs_json),
        "workingMemory": memory,
        "output": _value(runs.output(tx, run.run_id)),
        "state": run.state,
        "reason": run.reason,
        "error": _value(run.error_json),
        "mode": run.mode,
        "traceId": run.trace_id,
        "priority": run.priority,
        "idempotencyKey": head[2],
        "basePath": run.base_path,
        "parentRunId": run.parent_run_id,
        "sourceRunId": run.source_run_id,
        "lineage": _value(head[5]),
        "derivedRuns": _derived(tx, run.run_id),
        "cancellationRequested": run.cancel_requested_at is not None,
        "cancelRequestedAt": run.cancel_requested_at,
        "cancelReason": head[3],
        "pauseRequestedAt": run.pause_requested_at,
        "pauseReason": head[4],
        "deadlineAt": run.deadline_at,
        "maxConcurrency": run.max_concurrency,
        "maxDeliveries": run.max_deliveries,
        "revision": run.revision,
        "epoch": run.epoch,
        "driver": run.driver,
        "createdAt": run.created_at,
        "updatedAt": run.updated_at,
        "endedAt": run.ended_at,
    }


EMPTY_DELTA = '{"formatVersion":1,"remove":[],"set":{}}'
"""The state delta of a task that has succeeded and written nothing to working memory."""


def _task_records(tx: Connection, run: Run) -> Iterator[dict[str, Any]]:
    # The last attempt's count of hand-overs; one pass over the attempts instead of one look-up a task.
    deliveries: dict[int, int] = dict(
        _rows(
            tx,
            "SELECT task_no, delivery FROM attempts WHERE task_no BETWEEN ? AND ? AND run_id = ? "
            "ORDER BY task_no, number",
            (*_span(run), run.run_id),
        )
    )
    for row in tx.execute(
        "SELECT task_no, task_id, position, state, attempt, disposition, metadata_version, input_digest, "
        "output_json, output_digest, error_json, decision_json, delta_json, delta_digest, retry_at, started_at, "
        "ended_at, updated_at, definition_fingerprint, output_contract_fingerprint, artifact_manifest_json, "
        "source_run_id, source_task_id, source_attempt, reuse_decision_json FROM tasks "
        "WHERE task_no BETWEEN ? AND ? ORDER BY task_no",
        _span(run),
    ):
        _check_version(f"task {row[1]}", row[6], TASK_METADATA_VERSION, run.run_id)
        # Most tasks write nothing to memory; what is the same for all of them is not stored with each (contract 7).
        untouched = row[3] == "succeeded" and row[12] is None
        yield {
            "runId": run.run_id,
            "taskId": row[1],
            "position": row[2],
            "state": row[3],
            "attempt": row[4],
            "deliveries": deliveries.get(row[0], 0),
            "output": _value(row[8]),
            "error": _value(row[10]),
            "disposition": row[5],
            "metadataVersion": row[6],
            "sourceRunId": row[21],
            "sourceTaskId": row[22],
            "sourceAttempt": row[23],
            "reuseDecision": _value(row[24]),
            "definitionFingerprint": row[18],
            "inputDigest": row[7],
            "outputContractFingerprint": row[19],
            "outputDigest": row[9],
            "decision": _value(row[11]),
            "stateDelta": _value(EMPTY_DELTA if untouched else row[12]),
            "stateDeltaDigest": text_digest(EMPTY_DELTA) if untouched else row[13],
            "artifactManifest": _value(row[20]),
            "retryAt": row[14],
            "startedAt": row[15],
            "endedAt": row[16],
            "updatedAt": row[17],
        }


_EFFECT_COLUMNS = (
    "e.effect_id, e.format_version, e.task_id, e.attempt, e.ordinal, e.operation, e.effect_class, e.risk, "
    "e.idempotency, e.idempotency_key, e.input_digest, e.input_json, e.expected_json, e.trace_id, e.status, "
    "e.dispatches, e.requested_at, e.started_at, e.completed_at, e.result_json, e.error_json, e.notes_json, "
    "e.confirmed, e.superseded"
)


def _effect_rows(
    tx: Connection, run: Run, task_no: int | None = None, *, failed: bool = False
) -> Iterator[tuple[Any, ...]]:
    """Effects in compiled order; with `failed` only those of attempts that have ended without success."""
    first, last = _span(run) if task_no is None else (task_no, task_no)
    outcomes = "AND a.outcome IN ('failed', 'uncertain', 'cancelled') " if failed else ""
    # By the attempts' index of tasks, then by the effects' index of attempts: no scan over other runs' rows.
    yield from tx.execute(
        f"SELECT {_EFFECT_COLUMNS} FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "  # noqa: S608
        f"WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ? {outcomes}ORDER BY a.task_no, a.number, e.ordinal",
        (first, last, run.run_id),
    )


def _effect_record(row: tuple[Any, ...], run_id: str) -> dict[str, Any]:
    _check_version(f"effect {row[0]}", row[1], EFFECT_FORMAT_VERSION, run_id)
    return {
        "request": {
            "formatVersion": row[1],
            "id": row[0],
            "runId": run_id,
            "taskId": row[2],
            "attempt": row[3],
            "ordinal": row[4],
            "operation": row[5],
            "effectClass": row[6],
            "risk": row[7],
            "idempotency": row[8],
            "idempotencyKey": row[9],
            "inputDigest": row[10],
            "input": _value(row[11]),
            "expectedEffect": _value(row[12]),
            "traceId": row[13],
        },
        "status": row[14],
        "attemptNumber": row[15],
        "requestedAt": row[16],
        "startedAt": row[17],
        "completedAt": row[18],
        "result": _value(row[19]),
        "error": _value(row[20]),
        "notes": _value(row[21]),
        "confirmed": bool(row[22]),
        "superseded": bool(row[23]),
    }


def event_rows(tx: Connection, run_id: str, *, after: int, limit: int) -> list[dict[str, Any]]:
    """Audit events of a run with a sequence above `after`, oldest first. Raises `IncompatibleVersion`."""
    found = []
    for sequence, version, event_type, task_id, actor, trace_id, payload, created_at in tx.execute(
        "SELECT sequence, event_version, event_type, task_id, actor, trace_id, payload_json, created_at "  # noqa: S608
        f"FROM audit_events WHERE {audit.OF_RUN} ORDER BY event_no LIMIT ?3",
        (run_id, after, limit),
    ):
        _check_version(f"audit event {sequence}", version, AUDIT_EVENT_VERSION, run_id)
        found.append(
            {
                "runId": run_id,
                "sequence": sequence,
                "eventVersion": version,
                "eventType": event_type,
                "taskId": task_id,
                "actor": actor,
                "traceId": trace_id,
                "payload": json.loads(payload),
                "createdAt": created_at,
            }
        )
    return found


def _task_no(tx: Connection, run: Run, task_id: str) -> int:
    sql = "SELECT task_no FROM tasks WHERE run_id = ? AND task_id = ?"
    known = tx.execute(sql, (run.run_id, task_id)).fetchone()
    if known is None:
        raise _no_task(run, task_id)
    return int(known[0])


def _no_task(run: Run, name: str) -> NotFoundError:
    return NotFoundError(
        f"{run.run_id} has no task {name!r}",
        remedy=f"`agentctl inspect {run.run_id}` shows its tasks",
        run_id=run.run_id,
    )


def _find_task(tx: Connection, run: Run, name: str) -> str:
    """A declared task stands for those that were made of it (`each` for `each--0000-…`), also by its beginning."""
    begins = "FROM tasks WHERE run_id = ? AND task_id >= ? AND task_id < ?"
    among = (run.run_id, name, name + "\U0010ffff")
    shortest = tx.execute(f"SELECT task_id {begins} ORDER BY length(task_id), task_no LIMIT 1", among).fetchone()
    if shortest is None or not name:
        raise _no_task(run, name)
    found = str(shortest[0])
    if found == name:
        return found
    other = tx.execute(
        f"SELECT task_id {begins} AND task_id <> ? AND substr(task_id, 1, ?) <> ? ORDER BY task_no LIMIT 1",
        (*among, found, len(found) + 2, f"{found}--"),
    ).fetchone()
    if other is not None:
        raise UsageError(
            f"{name!r} is the beginning of several tasks of {run.run_id}, {found} and {other[0]} among them",
            remedy=f"give more of it; `agentctl inspect {run.run_id}` shows its tasks",
        )
    return found


def _find(tx: Connection, table: str, column: str, name: str, what: str, remedy: str) -> str:
    if tx.execute(f"SELECT 1 FROM {table} WHERE {column} = ?", (name,)).fetchone() is not None:  # noqa: S608
        return name
    found = []
    if len(name) >= 4:
        sql = f"SELECT {column} FROM {table} WHERE {column} >= ? AND {column} < ? LIMIT 2"  # noqa: S608
        found = _rows(tx, sql, (name, name + "\U0010ffff"))
    if len(found) > 1:
        raise UsageError(f"{name!r} is the beginning of several ids", remedy="give more of it")
    if not found:
        raise NotFoundError(f"there is no {what} {name} in this database", remedy=remedy)
    return str(found[0][0])


def _approvals(tx: Connection, run_id: str | None, *, pending: bool, limit: int) -> list[dict[str, Any]]:
    conditions = (["status = 'pending'"] if pending else []) + ([] if run_id is None else ["run_id = ?"])
    where = f"WHERE {' AND '.join(conditions)} " if conditions else ""
    found = []
    for row in tx.execute(
        "SELECT approval_id, format_version, run_id, effect_id, task_id, agent, tool, capability, risk, "  # noqa: S608
        "redacted_input_json, expected_json, reason, trace_id, requested_at, status, resolved_at, resolved_by, "
        f"resolution_reason, action_digest FROM approvals {where}ORDER BY requested_at, approval_id LIMIT ?",
        (*([] if run_id is None else [run_id]), limit),
    ):
        _check_version(f"approval {row[0]}", row[1], APPROVAL_FORMAT_VERSION, row[2])
        found.append(
            {
                "approvalId": row[0],
                "formatVersion": row[1],
                "runId": row[2],
                "effectId": row[3],
                "taskId": row[4],
                "agent": row[5],
                "tool": row[6],
                "capability": row[7],
                "risk": row[8],
                "redactedInput": _value(row[9]),
                "expectedEffect": _value(row[10]),
                "reason": row[11],
                "traceId": row[12],
                "requestedAt": row[13],
                "status": row[14],
                "resolvedAt": row[15],
                "resolvedBy": row[16],
                "resolutionReason": row[17],
                "actionDigest": row[18],
            }
        )
    return found


def concluded_of(reconciliations: list[dict[str, Any]]) -> dict[str, str]:
    """What counts as concluded about each effect, by records of which the one that counts comes last."""
    return {said["effectId"]: said["status"] for said in reconciliations}


def _reconciliations(tx: Connection, column: str, value: str) -> list[dict[str, Any]]:
    """Conclusions with this run, effect or id, the one that counts last."""
    found = []
    for row in tx.execute(
        "SELECT reconciliation_id, format_version, effect_id, run_id, status, actor, reason, "  # noqa: S608
        "evidence_json, result_json, result_schema_json, authorization_json, compensation_effect_id, supersedes_id, "
        f"trace_id, created_at FROM effect_reconciliations WHERE {column} = ? ORDER BY created_at, reconciliation_no",
        (value,),
    ):
        _check_version(f"reconciliation {row[0]}", row[1], RECONCILIATION_FORMAT_VERSION, row[3])
        found.append(
            {
                "reconciliationId": row[0],
                "formatVersion": row[1],
                "effectId": row[2],
                "runId": row[3],
                "status": row[4],
                "actor": row[5],
                "reason": row[6],
                "evidence": _value(row[7]),
                "result": _value(row[8]),
                "resultSchema": _value(row[9]),
                "authorization": _value(row[10]),
                "compensationEffectId": row[11],
                "supersedesId": row[12],
                "traceId": row[13],
                "createdAt": row[14],
            }
        )
    return found


def _tool_calls(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    return [
        {
            "runId": run_id,
            "effectId": row[0],
            "callId": row[1],
            "taskId": row[2],
            "toolId": row[3],
            "inputDigest": row[4],
            "outputDigest": row[5],
            "status": row[6],
            "createdAt": row[7],
            "completedAt": row[8],
        }
        for row in tx.execute(
            "SELECT effect_id, call_id, task_id, tool_id, input_digest, output_digest, status, created_at, "
            "completed_at FROM tool_calls WHERE run_id = ? ORDER BY created_at, effect_id, call_id",
            (run_id,),
        )
    ]


def _provider_sessions(tx: Connection, run_id: str) -> list[dict[str, Any]]:
    found = []
    for row in tx.execute(
        "SELECT task_id, format_version, provider, attempt, effect_id, continuation_json, updated_at "
        "FROM provider_sessions WHERE run_id = ? ORDER BY task_id",
        (run_id,),
    ):
        _check_version(f"the provider session of {row[0]}", row[1], PROVIDER_SESSION_FORMAT_VERSION, run_id)
        found.append(
            {
                "runId": run_id,
                "taskId": row[0],
                "formatVersion": row[1],
                "provider": row[2],
                "attempt": row[3],
                "effectId": row[4],
                "continuation": _value(row[5]),
                "updatedAt": row[6],
            }
        )
    return found


def _stream_events(
    tx: Connection, run_id: str, *, after: StreamCursor | None, limit: int
) -> tuple[list[dict[str, Any]], StreamCursor | None]:
    """Events in the order in which they were stored, and where to go on."""
    found = []
    for row in tx.execute(
        "SELECT task_id, attempt, sequence, format_version, effect_id, event_type, payload_json, source_run_id, "
        "source_sequence, created_at FROM stream_events WHERE run_id = ? "
        "AND (created_at, task_id, attempt, sequence) > (?,?,?,?) "
        "ORDER BY created_at, task_id, attempt, sequence LIMIT ?",
        (run_id, *(after or (-1, "", 0, 0)), limit),
    ):
        _check_version(f"a stream event of {row[0]}", row[3], STREAM_EVENT_FORMAT_VERSION, run_id)
        found.append(
            {
                "runId": run_id,
                "taskId": row[0],
                "attempt": row[1],
                "sequence": row[2],
                "formatVersion": row[3],
                "effectId": row[4],
                "type": row[5],
                "payload": _value(row[6]),
                "sourceRunId": row[7],
                "sourceSequence": row[8],
                "createdAt": row[9],
            }
        )
        after = (row[9], row[0], row[1], row[2])
    return found, after


# -- logs and workers ----------------------------------------------------------------------------------------


def _logs(tx: Connection, run: Run, task_id: str | None, *, failed: bool) -> Iterator[dict[str, Any]]:
    task_no = None if task_id is None else _task_no(tx, run, task_id)
    concluded = concluded_of(_reconciliations(tx, "run_id", run.run_id))
    for row in _effect_rows(tx, run, task_no, failed=failed):
        _check_version(f"effect {row[0]}", row[1], EFFECT_FORMAT_VERSION, run.run_id)
        if row[6] != "process_execution":
            continue
        result, error = _value(row[19]), _value(row[20])
        notes = _value(row[21])
        if row[14] == "succeeded" and isinstance(notes, dict) and "extension" in notes:
            result = notes  # its result is whatever the extension answers, not what it has printed
        entry: dict[str, Any] = {
            "taskId": row[2],
            "attempt": row[3],
            "effectId": row[0],
            "status": row[14],
            "dispatches": row[15],
            "startedAt": row[17],
            "completedAt": row[18],
            "exitCode": None,
            "stdout": None,
            "stderr": None,
            "truncated": False,
            "error": None if not isinstance(error, dict) else {k: error.get(k) for k in ("code", "message")},
            "reconciliation": concluded.get(row[0]),
        }
        details = error.get("details") if isinstance(error, dict) else None
        for source in (result, details):
            if not isinstance(source, dict):
                continue
            if entry["exitCode"] is None:
                entry["exitCode"] = source.get("exitCode")
            for stream, *parts in _STREAMS:
                if entry[stream] is None and isinstance(source.get(stream), str):
                    entry[stream] = source[stream]
                for part in parts:
                    if entry[stream] is None and isinstance(source.get(part), str):
                        entry[stream] = source[part]
                        entry["truncated"] = True
        yield entry


def _conversation(tx: Connection, run: Run, task_id: str | None, *, failed: bool) -> Iterator[dict[str, Any]]:
    task_no = None if task_id is None else _task_no(tx, run, task_id)
    concluded = concluded_of(_reconciliations(tx, "run_id", run.run_id))
    for row in _effect_rows(tx, run, task_no, failed=failed):
        _check_version(f"effect {row[0]}", row[1], EFFECT_FORMAT_VERSION, run.run_id)
        tool = row[5].removeprefix(PREFIX) if row[5].startswith(PREFIX) else None
        if row[6] != "model" and tool is None:
            continue
        result, error = _value(row[19]), _value(row[20])
        said = result if isinstance(result, dict) and tool is None else {}
        yield {
            "taskId": row[2],
            "attempt": row[3],
            "ordinal": row[4],
            "effectId": row[0],
            "kind": "turn" if tool is None else "tool_call",
            "provider": row[5] if tool is None else None,
            "tool": tool,
            "status": row[14],
            "dispatches": row[15],
            "startedAt": row[17],
            "completedAt": row[18],
            "text": said.get("text"),
            "toolCalls": said.get("toolCalls", []),
            "finishReason": said.get("finishReason"),
            "usage": said.get("usage"),
            "input": _value(row[11]) if tool is not None else None,
            "output": result if tool is not None else None,
            "error": None if not isinstance(error, dict) else {k: error.get(k) for k in ("code", "message")},
            "reconciliation": concluded.get(row[0]),
        }


def _workers(tx: Connection) -> list[dict[str, Any]]:
    claims = {
        row[0]: row[1:]
        for row in tx.execute(
            "SELECT holder, run_id, task_id, number, delivery, lease_expires_at FROM attempts WHERE queue = 'claimed'"
        )
    }
    alive: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    for row in processes.everyone(tx):
        if row.kind != "worker":
            continue
        state = row.state
        if state not in ("stopped", "dead") and _liveness(row) is Liveness.DEAD:
            state = "dead"
        run_id, task_id, attempt, delivery, expires = claims.get(row.process_id, (None,) * 5)
        entry = {
            "workerId": row.process_id,
            "name": row.name,
            "pid": row.pid,
            "unit": row.unit,
            "state": state,
            "runId": run_id,
            "taskId": task_id,
            "attempt": attempt,
            "delivery": delivery,
            "leaseExpiresAt": expires,
            "rssBytes": row.rss_bytes,
            "done": row.done,
            "failed": row.failed,
            "version": row.version,
        }
        (ended if state in ("stopped", "dead") else alive).append(entry)
    return [*alive, *reversed(ended)]
