"""What people are told of a stop, and of a run that waits for them afterwards."""

from __future__ import annotations

from support.children import wait_until
from support.field import Field


def test_a_hard_stop_is_asked_for_and_its_run_waits_for_a_person(field: Field) -> None:
    """The command does not wait for the end, and says so; a pool that is live has nothing to drive."""
    pool = field.pool(1)
    run_id = field.submit(field.workflow("one", [field.tick_task("t", 600, idempotent=False)]))
    wait_until(lambda: len(field.lines()) == 1, "it has begun")
    told = field("workers", "stop", "--hard").out
    assert told.startswith("asked to end now: p ")
    assert pool.wait().code == 3
    field.pool(1)
    wait_until(lambda: field.json("status", run_id).data["state"] == "paused", "an uncertain effect pauses the run")
    wait_until(lambda: field.json("status", run_id).data["driver"] is None, "its driver has given it back")
    shown = field("status", run_id).out
    assert "driver    nobody while it is paused\n" in shown
    assert "workers start" not in shown
