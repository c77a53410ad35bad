"""A run that no coordinator drives is no riddle: log, `status`, `watch`, `runs list` and `doctor` tell why."""

from __future__ import annotations

import pytest
from support import tampering
from support.children import wait_until
from support.field import Field

STRANGE = {
    "event": ("UPDATE audit_events SET event_version = 99 WHERE run_id = ? AND sequence = 1", "an event of"),
    "run": ("UPDATE runs SET runtime_state_version = 99 WHERE run_id = ?", "runtime state 99"),
    "damage": ("UPDATE run_documents SET plan_json = '{}' WHERE run_id = ?", "plan"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_why_nobody_drives_a_run(field: Field, kind: str) -> None:
    sql, word = STRANGE[kind]
    file = field.workflow("strange", [field.tick_task("t", idempotent=True)])
    run_id = field.submit(file)
    tampering.change(field.database, sql, run_id)
    pool = field.pool(1)
    wait_until(lambda: f"{run_id} cannot be driven and is set aside" in pool.err, "a line in the log")
    other = field.submit(file)
    assert field.json("wait", other).data["state"] == "succeeded"

    status = field("status", run_id)
    if kind == "run":  # nothing of it is read
        assert status.code == 5
        assert word in status.err
    else:
        assert word in status.out
        assert "workers start" not in status.out
        assert word in field.json("status", run_id).data["problem"]["message"]
        watched = field.start("watch", run_id)
        wait_until(lambda: word in watched.err, "a word of the one who watches")
        watched.signal(2)
        watched.wait()
    listed = {run["runId"]: run["problem"] for run in field.json("runs", "list").data["runs"]}
    assert word in listed[run_id]["message"]
    assert listed[other] is None
    attention = next(c for c in field.json("doctor").data["checks"] if c["id"] == "attention")
    assert attention["status"] == "warn"
    assert run_id in attention["message"]
    assert word in attention["message"]

    field.stop(pool)
    assert field.scalar("SELECT COUNT(*) FROM meta WHERE key LIKE 'aside:%'") == 0
