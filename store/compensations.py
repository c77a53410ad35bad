"""Compensation: what a run has done, what of it was undone, the run that undoes it, and its conclusions (contract 5.7).

Functions that take `tx` belong to the caller's transaction; the methods of `Compensations` are verbs: one transaction
each (`settle`: one for some conclusions), which may be run again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from . import audit, conclusions, reconciliations, runs
from .canonical import canonical, loads
from .clock import Clock
from .database import Connection, Database, all_rows
from .errors import RunMoved
from .records import Event, NewReconciliation, NewRun, Run, RunDocuments, record
from .states import LOOKS_ONLY, sql_words

ACTOR = "agentctl-runtime"
"""Who concludes that an effect was compensated, when a declared inverse was confirmed."""

MAPPING = "__agentctlCompensation"
"""The input of a compensation run that says which task undoes which effects."""

CONCLUSIONS = 500
"""How many conclusions `settle` appends in one transaction."""

_CHANGES = f"NOT IN ({sql_words(LOOKS_ONLY)})"
"""What the class of an effect is that may have changed something."""


@record
class EffectFact:
    """An effect as far as its compensation is concerned.

    `reconciled` is the conclusion that counts, `inverse` the effect that has undone it according to that conclusion,
    and `inverse_reconciled` what was concluded about that one.
    """

    effect_id: str
    task_id: str
    attempt: int
    ordinal: int
    operation: str
    effect_class: str
    status: str
    confirmed: bool
    dispatches: int
    reconciled: str | None
    inverse: str | None
    inverse_reconciled: str | None

    @property
    def happened(self) -> bool:
        """Whether it is known to have had its effect."""
        return self.reconciled == "applied" or (self.reconciled is None and self.confirmed)


@record
class EarlierRun:
    """A compensation run of the source. `mapping` is task to the source effects that it undoes."""

    run_id: str
    state: str
    ended: bool
    mapping: dict[str, list[str]]
    effects: list[EffectFact]


@record
class TakenOver:
    """What a reused task of the source has done: an effect of another run, which alone can be asked to undo it.

    `run_id` is None when that run was removed.
    """

    task_id: str
    effect_id: str
    run_id: str | None


@record
class Leaning:
    """A task of a retry or repair, made directly or through others, that stands on what the source has done.

    It has taken over the result of `effect_id`. Without one it executes the task once more, while its run goes on: what
    both have done could not be told apart by an inverse action.
    """

    run_id: str
    state: str
    ended: bool
    task_id: str
    effect_id: str | None

    def concerns(self, task_id: str, effect_ids: Collection[str]) -> bool:
        """Whether undoing these effects of a task of the source touches it."""
        return self.task_id == task_id if self.effect_id is None else self.effect_id in effect_ids


@record
class CompensationSource:
    """Everything that the plan of a compensation depends on, from one snapshot.

    `outputs` are texts by task, `memory` the final values as texts. `taken_over` are effects behind reused tasks that
    count as not undone, `leaning` what others stand on. `basis` stands for what may change: the number of compensation
    runs, and the last conclusion about an effect of any of these runs.
    """

    run: Run
    documents: RunDocuments
    outputs: dict[str, str]
    memory: dict[str, str]
    effects: list[EffectFact]
    taken_over: list[TakenOver]
    leaning: list[Leaning]
    earlier: list[EarlierRun]
    basis: tuple[int, int]


@record
class Undoing:
    """Why an effect may not stand as it was recorded, though nothing was concluded about it yet.

    `how`: `due` (an automatic compensation has to be started), `in_progress` (one may reach it any time), `doubt`
    (nobody knows whether its inverse happened), or `undone` (its inverse happened). `by` is the compensation run, and
    `inverse` the inverse effect, where there is one.
    """

    owner: str
    how: str
    by: str | None = None
    inverse: str | None = None


class Compensations:
    """The verbs of compensation on one database connection. Belongs to the thread of its `Database`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def source(self, run_id: str) -> CompensationSource:
        """What there is to know of a run that has ended.

        Raises `NotFoundError`, `NotTerminal`, `IncompatibleVersion`.
        """
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            runs.require_ended(run)
            runs.refuse_future_records(tx, run_id)
            earlier = list(_earlier(tx, run_id))
            memory: dict[str, str] = {}
            for key, _, value in runs.memory_rows(tx, run_id):
                if value is None:
                    memory.pop(key, None)
                else:
                    memory[key] = value
            # What a run in check mode records of itself has changed nothing outside.
            effects = [] if run.mode == "check" else _effects(tx, run)
            happened = by_task(effect for effect in effects if effect.happened)
            undoable = {task: [effect.effect_id for effect in found] for task, found in happened.items()}
            return CompensationSource(
                run,
                runs.documents(tx, run_id),
                dict(
                    all_rows(
                        tx.execute(
                            "SELECT task_id, output_json FROM tasks WHERE task_no BETWEEN ? AND ? "
                            "AND output_json IS NOT NULL",
                            (run.first_task, run.first_task + run.task_count - 1),
                        )
                    )
                ),
                memory,
                effects,
                list(_taken_over(tx, run)),
                leaning(tx, run_id, undoable),
                earlier,
                _basis(tx, run_id),
            )

    def settle(self, source: CompensationSource) -> int:
        """Conclude `compensated` of every source effect whose inverse is known to have happened; how many. Durable.

        The batch of a compensation run does so itself; what is left are inverse effects that a person has reconciled
        after the end of their run.
        """
        open_effects = {effect.effect_id for effect in source.effects if effect.happened}
        found: list[tuple[str, str, str, str]] = []
        for earlier in source.earlier:
            for inverse in earlier.effects:
                if inverse.happened:
                    for effect_id in earlier.mapping.get(inverse.task_id, ()):
                        if effect_id in open_effects:
                            open_effects.discard(effect_id)
                            found.append((earlier.run_id, inverse.task_id, inverse.effect_id, effect_id))
        done = 0
        for at in range(0, len(found), CONCLUSIONS):
            with self._database.write(durable=True) as tx:
                for run_id, task_id, inverse_id, effect_id in found[at : at + CONCLUSIONS]:
                    done += _conclude(tx, run_id, source.run.run_id, task_id, inverse_id, effect_id, self._clock.now())
        return done

    def create(self, new: NewRun, basis: tuple[int, int], *, automatic: bool, everything: bool) -> str:
        """Create the run that undoes what `new.source_run_id` has done; its id. Durable.

        Raises `RunMoved`, with nothing written, when something has changed since `basis` was seen, when another
        compensation of the source has not ended, or when a run that goes on leans on what would be undone. With
        `automatic` also when nobody has to start it any more.
        `everything`: it undoes all that can be undone, so nobody has to start another one.
        """
        source_id = new.source_run_id or ""
        digests = runs.document_digests(new.workflow_json, new.plan_json, new.inputs_json, new.settings_json)
        mapping = loads(new.inputs_json)[MAPPING].values()
        undoes = {item["sourceTaskId"]: item["sourceEffectIds"] for item in mapping}
        with self._database.write(durable=True) as tx:
            now = self._clock.now()
            if _basis(tx, source_id) != basis:
                raise RunMoved(f"what is known of {source_id} has changed since this plan was made", run_id=source_id)
            if in_progress(tx, source_id) is not None:
                raise RunMoved(f"another compensation of {source_id} has not ended", run_id=source_id)
            for other in leaning(tx, source_id, undoes):
                if not other.ended:
                    raise RunMoved(f"{other.run_id} leans on what {source_id} has done", run_id=source_id)
            was_due = False
            if automatic or everything:
                tx.execute("DELETE FROM compensations_due WHERE run_id = ?", (source_id,))
                was_due = tx.changes() == 1
            if automatic and not was_due:
                raise RunMoved(f"the compensation of {source_id} was started by somebody else", run_id=source_id)
            runs.create_run(tx, new, digests, now=now)
            payload = {"automatic": automatic, "compensationRunId": new.run_id, "tasks": len(new.task_ids)}
            events = [Event("compensation.created", None, canonical(payload))]
            audit.append(tx, source_id, events, actor=new.actor, now=now)
        return new.run_id

    def due(self) -> list[str]:
        """Failed runs whose automatic compensation nobody has started yet, oldest first."""
        with self._database.read() as tx:
            return [row[0] for row in tx.execute("SELECT run_id FROM compensations_due ORDER BY created_at, run_id")]

    def is_due(self, run_id: str) -> bool:
        """Whether the automatic compensation of this run has to be started yet."""
        with self._database.read() as tx:
            return tx.execute("SELECT 1 FROM compensations_due WHERE run_id = ?", (run_id,)).fetchone() is not None

    def give_up(self, run_id: str, *, blocked: int, actor: str) -> None:
        """There is nothing that an automatic compensation could undo (`blocked`: not without a person). Durable."""
        with self._database.write(durable=True) as tx:
            tx.execute("DELETE FROM compensations_due WHERE run_id = ?", (run_id,))
            if tx.changes():
                events = [Event("compensation.skipped", None, canonical({"blocked": blocked}))]
                audit.append(tx, run_id, events, actor=actor, now=self._clock.now())

    def started_by(self, run_id: str) -> str | None:
        """The compensation run of a run that was to be undone by itself, or None; the first one if there were several.

        Whoever asked for it first: a person may have come before the command that drives the run.
        """
        with self._database.read() as tx:
            row = tx.execute(
                "SELECT run_id FROM runs WHERE source_run_id = ?1 AND mode = 'compensation' "  # noqa: S608
                "AND (json_extract(lineage_json, '$.automatic') = 1 OR EXISTS "
                f"(SELECT 1 FROM audit_events WHERE {audit.OF_RUN} AND event_type = 'compensation.due')) "
                "ORDER BY created_at, run_id LIMIT 1",
                (run_id, 0),
            ).fetchone()
        return row[0] if row else None

    def tasks_by_state(self, run_id: str) -> list[tuple[str, str]]:
        """(source task, state) of the tasks of a compensation run, in its order."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            mapping = loads(runs.documents(tx, run_id).inputs_json)[MAPPING]
            return [(mapping[row.task_id]["sourceTaskId"], row.state) for row in runs.task_rows(tx, run)]

    def undone_by(self, run_id: str) -> set[str]:
        """Source tasks of which a compensation run has undone an effect, whatever became of its own task."""
        with self._database.read() as tx:
            run = runs.get(tx, run_id)
            mapping = loads(runs.documents(tx, run_id).inputs_json)[MAPPING]
            found = tx.execute(
                "SELECT DISTINCT e.task_id FROM effect_reconciliations c "
                "JOIN effects e ON e.effect_id = c.compensation_effect_id "
                "WHERE c.run_id = ? AND c.status = 'compensated' AND e.run_id = ?",
                (run.source_run_id, run_id),
            )
            return {mapping[task_id]["sourceTaskId"] for (task_id,) in found if task_id in mapping}


# -- inside a transaction ----------------------------------------------------------------------------------------------


def mark_due(tx: Connection, run_id: str, *, now: int) -> Event:
    """Its declared compensation has to be started; part of the transaction that ends the run."""
    tx.execute("INSERT INTO compensations_due VALUES (?, ?)", (run_id, now))
    return Event("compensation.due", None, "{}")


def in_progress(tx: Connection, source_id: str) -> str | None:
    """The compensation run of a source that has not ended, or None."""
    row = tx.execute(
        "SELECT run_id FROM runs WHERE source_run_id = ? AND mode = 'compensation' AND ended_at IS NULL LIMIT 1",
        (source_id,),
    ).fetchone()
    return row[0] if row else None


def undoing(tx: Connection, owners: Iterable[str]) -> dict[str, Undoing]:
    """The effects of these runs that are being undone, or may have been; what is concluded already may be among them.

    Runs that are not there any more have none. Raises `IncompatibleVersion`.
    """
    found: dict[str, Undoing] = {}
    for owner in owners:
        if tx.execute("SELECT 1 FROM compensations_due WHERE run_id = ?", (owner,)).fetchone() is not None:
            for effect in (item for item in _effects(tx, runs.get(tx, owner)) if item.happened):
                found[effect.effect_id] = Undoing(owner, "due")
        for earlier in _earlier(tx, owner):
            for effect_id, what in _undoing_of(owner, earlier):
                found[effect_id] = what
    return found


def _undoing_of(owner: str, earlier: EarlierRun) -> Iterator[tuple[str, Undoing]]:
    if not earlier.ended:
        for effect_ids in earlier.mapping.values():
            for effect_id in effect_ids:
                yield effect_id, Undoing(owner, "in_progress", earlier.run_id)
        return
    for task_id, effects in by_task(earlier.effects).items():
        for place, effect in enumerate(effects):
            how = "undone" if effect.happened else "doubt"
            if effect.happened or in_doubt(effect, effects[place + 1 :]) is not None:
                for effect_id in earlier.mapping.get(task_id, ()):
                    yield effect_id, Undoing(owner, how, earlier.run_id, effect.effect_id)


_MADE_FROM = (
    "WITH RECURSIVE made(run_id) AS (SELECT run_id FROM runs WHERE source_run_id = ?1 AND mode IN ('retry', 'repair') "
    "UNION SELECT r.run_id FROM made m JOIN runs r ON r.source_run_id = m.run_id WHERE r.mode IN ('retry', 'repair')) "
)
"""Retries and repairs of a run, and those of theirs."""


def leaning(tx: Connection, run_id: str, undoes: Mapping[str, Sequence[str]]) -> list[Leaning]:
    """What retries and repairs stand on the effects `undoes` (task of this run to effects), oldest run first.

    A run that has ended leans on what it has taken over; one that goes on also executes tasks once more.
    """
    if not undoes:
        return []
    effects = canonical(sorted(effect for found in undoes.values() for effect in found))
    found = all_rows(
        tx.execute(
            _MADE_FROM + "SELECT r.run_id, r.state, r.ended_at IS NOT NULL, t.task_id, "  # noqa: S608
            # One that goes on is found though a run between it and the source was removed.
            "json_extract(j.value, '$.effectId') FROM (SELECT run_id FROM made UNION ALL SELECT run_id FROM runs "
            "WHERE ended_at IS NULL AND mode IN ('retry', 'repair') AND run_id NOT IN made) o "
            # CROSS JOIN fixes the order: these runs and their tasks, and never all tasks there ever were.
            "CROSS JOIN runs r ON r.run_id = o.run_id "
            "CROSS JOIN tasks t ON t.task_no BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
            # The plus keeps SQLite from making an index of all tasks for this.
            "AND +t.disposition = 'reused' "
            "CROSS JOIN json_each(CASE WHEN json_valid(t.reuse_decision_json) THEN t.reuse_decision_json "
            "ELSE '{}' END, '$.sourceEffects') j "
            "WHERE json_extract(j.value, '$.effectId') IN (SELECT value FROM json_each(?2)) "
            "ORDER BY r.created_at, r.run_id, t.task_no",
            (run_id, effects),
        )
    )
    found += all_rows(
        tx.execute(
            _MADE_FROM + "SELECT r.run_id, r.state, 0, t.task_id, NULL FROM made "  # noqa: S608
            "CROSS JOIN runs r ON r.run_id = made.run_id "
            "CROSS JOIN tasks t ON t.task_no BETWEEN r.first_task AND r.first_task + r.task_count - 1 "
            "AND +t.disposition = 'executed' AND +t.task_id IN (SELECT value FROM json_each(?2)) "
            "WHERE r.ended_at IS NULL ORDER BY r.created_at, r.run_id, t.task_no",
            (run_id, canonical(sorted(undoes))),
        )
    )
    return [Leaning(name, state, bool(ended), task, effect) for name, state, ended, task, effect in found]


def by_task(effects: Iterable[EffectFact]) -> dict[str, list[EffectFact]]:
    """The effects of each task, in their order. Pure."""
    found: dict[str, list[EffectFact]] = {}
    for effect in effects:
        found.setdefault(effect.task_id, []).append(effect)
    return found


def in_doubt(effect: EffectFact, later: Sequence[EffectFact]) -> str | None:
    """`unreconciled` or `unconfirmed` when nobody knows whether an effect happened, else None.

    A later attempt that has done the same thing answers for it: only what may be repeated is tried again.
    """
    if effect.reconciled is not None:
        return None
    if any((o.ordinal, o.operation) == (effect.ordinal, effect.operation) and o.happened for o in later):
        return None
    if effect.status == "uncertain":
        return "unreconciled"
    if effect.status == "started" or (effect.status in ("requested", "cancelled") and effect.dispatches > 0):
        return "unconfirmed"
    return None


def conclude_inverse(tx: Connection, effect_id: str, *, now: int) -> None:
    """Somebody has found out that an effect happened: if it is an inverse one, what it undid is `compensated`."""
    row = tx.execute(
        "SELECT e.run_id, e.task_id, r.source_run_id, r.mode FROM effects e JOIN runs r USING (run_id) "  # noqa: S608
        f"WHERE e.effect_id = ? AND e.effect_class {_CHANGES}",
        (effect_id,),
    ).fetchone()
    if row is None or row[3] != "compensation":
        return
    mapping = loads(runs.documents(tx, row[0]).inputs_json)[MAPPING]
    for undone in mapping.get(row[1], {}).get("sourceEffectIds", ()):
        _conclude(tx, row[0], row[2] or "", row[1], effect_id, undone, now)


def conclude_batch(tx: Connection, run: Run, undone: Sequence[tuple[int, Sequence[str]]], *, now: int) -> None:
    """Tasks of a compensation run have ended (position, source effects): what their inverse effects have undone."""
    for position, effect_ids in undone:
        row = tx.execute(
            "SELECT e.effect_id, e.task_id FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "  # noqa: S608
            f"WHERE a.task_no = ? AND e.effect_class {_CHANGES} AND "
            f"(e.confirmed = 1 OR {conclusions.latest_sql('status', 'e.effect_id')} = 'applied') "
            "ORDER BY a.number DESC, e.ordinal DESC LIMIT 1",
            (run.first_task + position,),
        ).fetchone()
        if row is None:
            continue
        for effect_id in effect_ids:
            _conclude(tx, run.run_id, run.source_run_id or "", row[1], row[0], effect_id, now)


def _conclude(
    tx: Connection, run_id: str, source_id: str, task_id: str, inverse_id: str, effect_id: str, now: int
) -> bool:
    """Append `compensated` to a source effect, if that is still to be said. The source may be gone."""
    row = tx.execute("SELECT run_id, confirmed FROM effects WHERE effect_id = ?", (effect_id,)).fetchone()
    if row is None or row[0] != source_id:
        return False
    before = reconciliations.latest(tx, effect_id)
    if not (bool(row[1]) if before is None else before[1] == "applied"):
        return False
    evidence = {
        "source": "declared-compensation",
        "sourceRunId": source_id,
        "compensationRunId": run_id,
        "compensationTaskId": task_id,
    }
    new = NewReconciliation(
        # Named by what it is about, so that it cannot be said twice.
        reconciliation_id="reconciliation-" + sha256(f"{effect_id}\0{inverse_id}".encode()).hexdigest()[:32],
        effect_id=effect_id,
        status="compensated",
        actor=ACTOR,
        reason=f"undone by task {task_id} of {run_id}",
        evidence_json=canonical(evidence),
        authorization_json=canonical(
            {"kind": "policy_allow", "reason": "the inverse effect was allowed", "explicitApproval": False}
        ),
        compensation_effect_id=inverse_id,
    )
    reconciliations.reconcile(tx, new, now=now)
    return True


def _basis(tx: Connection, run_id: str) -> tuple[int, int]:
    row = tx.execute(
        "SELECT (SELECT COUNT(*) FROM runs WHERE source_run_id = ?1 AND mode = 'compensation'), "
        "(SELECT COALESCE(MAX(reconciliation_no), 0) FROM effect_reconciliations WHERE run_id = ?1 OR run_id IN "
        "(SELECT run_id FROM runs WHERE source_run_id = ?1 AND mode = 'compensation'))",
        (run_id,),
    ).fetchone()
    assert row is not None  # it has no FROM
    return row[0], row[1]


def _earlier(tx: Connection, run_id: str) -> Iterator[EarlierRun]:
    ids = all_rows(
        tx.execute(
            "SELECT run_id FROM runs WHERE source_run_id = ? AND mode = 'compensation' ORDER BY created_at, run_id",
            (run_id,),
        )
    )
    for (name,) in ids:
        run = runs.get(tx, name)
        runs.refuse_future_records(tx, name)
        mapping: dict[str, Any] = loads(runs.documents(tx, name).inputs_json)[MAPPING]
        yield EarlierRun(
            name,
            run.state,
            run.ended_at is not None,
            {task: item["sourceEffectIds"] for task, item in mapping.items()},
            _effects(tx, run),
        )


def _effects(tx: Connection, run: Run) -> list[EffectFact]:
    """All effects of a run that may have changed something, in the order of task, attempt and ordinal."""
    status = conclusions.latest_sql("status", "e.effect_id")
    inverse = conclusions.latest_sql("compensation_effect_id", "e.effect_id")
    said = conclusions.latest_sql("status", inverse)
    return [
        EffectFact(name, task, attempt, ordinal, operation, kind, state, bool(confirmed), dispatches, *said_of)
        for name, task, attempt, ordinal, operation, kind, state, confirmed, dispatches, *said_of in tx.execute(
            "SELECT e.effect_id, e.task_id, e.attempt, e.ordinal, e.operation, e.effect_class, e.status, e.confirmed, "  # noqa: S608
            f"e.dispatches, {status}, {inverse}, {said} "
            "FROM attempts a JOIN effects e ON e.attempt_id = a.attempt_id "
            f"WHERE a.task_no BETWEEN ? AND ? AND a.run_id = ? AND e.effect_class {_CHANGES} "
            "ORDER BY a.task_no, a.number, e.ordinal",
            (run.first_task, run.first_task + run.task_count - 1, run.run_id),
        )
    ]


def _taken_over(tx: Connection, run: Run) -> Iterator[TakenOver]:
    """Effects that reused tasks go back to, in the order of the tasks, and that may have changed something."""
    status = conclusions.latest_sql("status", "e.effect_id")
    for task_id, effect_id, owner in tx.execute(
        "SELECT t.task_id, json_extract(j.value, '$.effectId'), e.run_id "  # noqa: S608
        # A damaged text is found by whoever verifies the run; here it must not keep anybody from getting there.
        "FROM tasks t JOIN json_each(CASE WHEN json_valid(t.reuse_decision_json) THEN t.reuse_decision_json ELSE '{}' "
        "END, '$.sourceEffects') j "
        "LEFT JOIN effects e ON e.effect_id = json_extract(j.value, '$.effectId') "
        "WHERE t.task_no BETWEEN ? AND ? AND t.disposition = 'reused' "
        f"AND json_extract(j.value, '$.effectClass') {_CHANGES} "
        f"AND COALESCE({status}, json_extract(j.value, '$.reconciled'), "
        "CASE WHEN json_extract(j.value, '$.confirmed') THEN 'applied' END) = 'applied' ORDER BY t.task_no, j.key",
        (run.first_task, run.first_task + run.task_count - 1),
    ):
        yield TakenOver(task_id, effect_id, owner)
