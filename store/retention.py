"""How long runs are kept: removing old ones with everything that belongs to them, and giving the space back.

Only runs that have ended go, one transaction each, and never one that somebody still needs: one with an effect that
nobody has reconciled, the source of a run that goes on, or one whose compensation others have to know of. Their
artifacts are collected afterwards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import apsw

from . import runs
from .artifacts import Artifacts
from .blobs import never
from .clock import Clock
from .collection import Collector
from .database import Connection, Database, all_rows, translate
from .faults import Faults
from .records import PLAN_FORMAT_VERSION, RUNTIME_STATE_VERSION
from .states import RUN_FINAL

log = logging.getLogger(__name__)

_NEEDED = (
    # A newer agentctl knows what this is; we do not (contract, section 0).
    f"CASE WHEN r.runtime_state_version > {RUNTIME_STATE_VERSION} OR r.plan_format_version > {PLAN_FORMAT_VERSION} "  # noqa: S608
    f"OR NOT ({runs.NOTHING_NEWER.format('r.run_id')}) "
    "OR COALESCE(json_extract(CASE WHEN json_valid(r.lineage_json) THEN r.lineage_json ELSE '{}' END, "
    f"'$.formatVersion'), 0) > {runs.LINEAGE_FORMAT_VERSION} THEN 'written_by_a_newer_agentctl' "
    # Somebody ingests still: until the lease is over its blobs are not collected.
    "WHEN EXISTS (SELECT 1 FROM artifact_ingests i WHERE i.run_id = r.run_id AND i.expires_at > ?1) "
    "THEN 'ingestion_lease' "
    "WHEN EXISTS (SELECT 1 FROM effects e WHERE e.run_id = r.run_id AND e.status = 'uncertain' "
    "AND e.superseded = 0 AND NOT EXISTS (SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = e.effect_id)) "
    "THEN 'uncertain_effect' "
    "WHEN EXISTS (SELECT 1 FROM runs o WHERE o.ended_at IS NULL AND (o.source_run_id = r.run_id "
    "OR o.parent_run_id = r.run_id)) THEN 'source_of_a_live_run' "
    "WHEN EXISTS (SELECT 1 FROM compensations_due d WHERE d.run_id = r.run_id) THEN 'compensation_due' "
    "WHEN EXISTS (SELECT 1 FROM runs o "
    "JOIN attempts a ON a.task_no BETWEEN o.first_task AND o.first_task + o.task_count - 1 "
    "JOIN effects e ON e.attempt_id = a.attempt_id WHERE o.mode = 'compensation' AND o.run_id IN "
    "(SELECT r.run_id UNION ALL SELECT s.run_id FROM runs s WHERE s.source_run_id = r.run_id) "
    # Nobody knows whether such an inverse effect happened (compare `compensations.in_doubt`).
    "AND (e.status IN ('started', 'uncertain') OR (e.status IN ('requested', 'cancelled') AND e.dispatches > 0)) "
    "AND NOT EXISTS (SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = e.effect_id)) "
    "THEN 'compensation_uncertain' "
    # Whoever takes over such a result once more has to see that it was undone.
    "WHEN EXISTS (SELECT 1 FROM effect_reconciliations c WHERE c.run_id = r.run_id AND c.status = 'compensated') "
    "AND EXISTS (SELECT 1 FROM runs o JOIN tasks t ON t.run_id = o.run_id AND t.disposition = 'reused' "
    "JOIN json_each(CASE WHEN json_valid(t.reuse_decision_json) THEN t.reuse_decision_json ELSE '{}' END, "
    "'$.sourceEffects') j "
    "WHERE o.mode IN ('retry', 'repair') AND o.run_id <> r.run_id AND json_extract(j.value, '$.effectId') IN "
    "(SELECT c.effect_id FROM effect_reconciliations c WHERE c.run_id = r.run_id AND c.status = 'compensated')) "
    "THEN 'compensated_and_reused' END"
)
"""Why a run that has ended stays all the same, or NULL. One parameter, ?1: now."""


def collect_runs(
    database: Database,
    artifacts: Artifacts,
    clock: Clock,
    faults: Faults,
    *,
    older_than_ms: int,
    states: Sequence[str],
    dry_run: bool,
    stopped: Callable[[], bool] = never,
) -> dict[str, Any]:
    """Remove runs in these final states that have not changed for that long, then what only they have kept.

    `{runs: {considered, removed, kept: [{runId, why}]}, artifacts: the report of a collection, fileBytesBefore,
    fileBytesAfter, dryRun}`. A dry run changes nothing and lists in `removed` of the runs what would go. When
    `stopped()` is true nothing more is removed, and what was removed is told.

    Raises as `Collector.alone`, before any run is removed.
    """
    assert set(states) <= RUN_FINAL
    cutoff = clock.now() - older_than_ms
    with database.read() as tx:
        found = _old_runs(tx, cutoff, states, now=clock.now())
    kept = [{"runId": run_id, "why": why} for run_id, why in found if why is not None]
    old = [run_id for run_id, why in found if why is None]
    before = _size(database)
    collector = Collector(database, artifacts, clock, faults)
    if dry_run:
        removed = old
        report = collector.collect(older_than_ms=older_than_ms, dry_run=True, without_runs=old)
    else:
        with collector.alone():
            removed = []
            for run_id in old:
                if stopped():
                    break
                if _remove(database, run_id, now=clock.now()):
                    removed.append(run_id)
            report = collector.collect_alone(older_than_ms=older_than_ms, stopped=stopped)
    if not dry_run and removed and not stopped():
        _give_back(database)
    return {
        "runs": {"considered": len(found), "removed": removed, "kept": kept},
        "artifacts": report,
        "fileBytesBefore": before,
        "fileBytesAfter": _size(database),
        "dryRun": dry_run,
    }


def _old_runs(tx: Connection, cutoff: int, states: Sequence[str], *, now: int) -> list[tuple[str, str | None]]:
    return all_rows(
        tx.execute(
            f"SELECT r.run_id, {_NEEDED} FROM runs r WHERE r.ended_at IS NOT NULL AND r.updated_at <= ? "  # noqa: S608
            "AND r.state IN (SELECT value FROM json_each(?)) ORDER BY r.created_at, r.run_id",
            (now, cutoff, json.dumps(sorted(states))),
        )
    )


def _remove(database: Database, run_id: str, *, now: int) -> bool:
    """Remove one run, if it is still not needed; everything of it goes with its row."""
    with database.write(durable=True) as tx:
        tx.execute(
            f"DELETE FROM runs AS r WHERE r.run_id = ?2 AND r.ended_at IS NOT NULL AND ({_NEEDED}) IS NULL",  # noqa: S608
            (now, run_id),
        )
        return tx.changes() == 1


def _size(database: Database) -> int:
    wal = database.path.with_name(database.path.name + "-wal")
    return database.path.stat().st_size + (wal.stat().st_size if wal.exists() else 0)


def _give_back(database: Database) -> None:
    """Rewrite the file without the free pages. Others read meanwhile; who writes waits.

    Where that cannot be done now (a reader holds the log, no room for the second copy), the space is used again later.
    """
    database.gate.acquire()
    try:
        database.connection.execute("VACUUM")
        database.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (apsw.BusyError, apsw.FullError, apsw.IOError) as error:
        log.warning("the free space of the database could not be given back now: %s", translate(error, database.path))
    finally:
        database.gate.release()
