"""Field report 23: idle workers burn processor time. One paused run has an uncertain effect, one waits for a person."""

from __future__ import annotations

import time

import pytest
from support.field import Field, bound, cpu_seconds, seconds
from support.scale import repeats, scale

PER_MINUTE = 1.2


def _rest(field: Field, pids: list[int], length: float) -> float:
    """Processor seconds per minute that these processes use while nothing is to be done."""
    before = {pid: cpu_seconds(pid) for pid in pids}
    time.sleep(length)  # what is measured is this very time
    return sum(cpu_seconds(pid) - before[pid] for pid in pids) * 60 / length


@pytest.mark.timeout(3600)
def test_a_pool_at_rest(field: Field) -> None:
    """Eight workers without work, then one task again and again, then a rest beside a paused run."""
    pool = field.pool(8)
    pids = [worker.pid for worker in field.workers("idle")]
    assert len(pids) == 8
    wal = field.database.with_name(field.database.name + "-wal")
    length = seconds(60, 10)
    audit = field.scalar("SELECT COUNT(*) FROM audit_events")
    written = wal.stat().st_size
    assert _rest(field, pids, length) < PER_MINUTE
    assert field.scalar("SELECT COUNT(*) FROM audit_events") == audit
    # Apart from heartbeats (every 10 s for ten processes, a page or two each) nothing is written.
    beats = 10 * (length / 10 + 2)
    assert wal.stat().st_size - written <= beats * 4 * 4200
    file = field.workflow("one", [field.tick_task("t", idempotent=True)])
    delays = []
    for _ in range(repeats(50, at_least=8)):
        run_id = field.submit(file)
        assert field.json("wait", run_id).code == 0
        began = field.scalar("SELECT created_at FROM runs WHERE run_id = ?", run_id)
        delays.append(field.lines()[-1].time - began / 1000)
    delays.sort()
    assert delays[-1] < bound(1)
    assert delays[int(len(delays) * 0.95) - 1] < bound(0.5)
    slow = {"id": "slow", "uses": "action:slow", "timeoutSeconds": 1, "with": {"args": ["60"]}}
    actions = {"slow": {"kind": "builtin.shell.exec", "command": "sleep", "idempotency": "at_most_once"}}
    run_id = field.submit(field.workflow("paused", [slow], actions=actions, programs=["sleep"]))
    assert field.json("wait", run_id).data["reason"] == "uncertain_effect"
    gate = field.workflow("gate", [field.tick_task("g", idempotent=True)], policy={"processAllowlist": ["tick"]})
    asking = field.submit(gate)
    assert field.json("wait", asking).data["reason"] == "approval_required"
    assert _rest(field, [*pids, pool.pid], 1800 if scale() >= 1 else 10) < PER_MINUTE * 1.5
    assert {field.json("status", run).data["state"] for run in (run_id, asking)} == {"paused"}
    [approval] = field.json("approvals", "list").data["approvals"]
    assert field.json("approvals", "approve", approval["approvalId"]).code == 0
    assert field.json("wait", asking).code == 0
    field.check_clean_end(drained=[pool], uncertain=True)
