"""Field report 4: a task stuck «running» since its worker's row went first, or came back under the same name."""

from __future__ import annotations

import pytest
from support.field import Field, Started, WorkerRow, eventually, gone, kill, seconds
from support.scale import short_lease

LEASE = short_lease(1.5)


def _begin(field: Field, idempotent: bool) -> tuple[Started, WorkerRow, str]:
    """A worker `w3`, alone in its unit, that runs a task which is far from its end."""
    unit = field.pool(1, "--no-coordinator", name="w3")
    run_id = field.submit(field.workflow("long", [field.tick_task("t", 600, idempotent=idempotent)]))
    worker = field.busy(run_id)
    assert worker.name == "w3"
    return unit, worker, run_id


def _resolved(field: Field, run_id: str, idempotent: bool) -> bool:
    """The old claim is over: another delivery has begun, or the effect is uncertain."""
    state, _, delivery = field.tasks(run_id)["t"]
    if idempotent:
        return state == "ready" or (state == "running" and delivery == 2)
    return state == "waiting_for_effect"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_worker_that_comes_back_under_its_name_hides_nothing(field: Field, idempotent: bool) -> None:
    """The whole unit is killed and starts again at once as `w3`."""
    field.lease(seconds(5, LEASE))
    coordinator = field.coordinator()
    unit, worker, run_id = _begin(field, idempotent)
    kill(unit.pid, worker.pid)
    again = field.start("workers", "start", "-n", "1", "--name", "w3", "--no-coordinator")
    limit = 2 * seconds(5, LEASE) + 1
    eventually(lambda: _resolved(field, run_id, idempotent), "the old claim is resolved", limit)
    if idempotent:
        eventually(lambda: len(field.lines()) == 2, "it is executed again", 10)
        assert field.tasks(run_id)["t"] == ("running", 1, 2)
    else:
        assert field.labels() == ["t"]
    eventually(lambda: len(field.workers("busy" if idempotent else "idle")) == 1, "the new incarnation", 10)
    listed = field.json("workers", "list").data["workers"]
    states = [entry["state"] for entry in listed if entry["name"] == "w3"]
    assert set(states) == {"busy" if idempotent else "idle", "dead"}
    assert len(states) == 2
    assert field.json("cancel", run_id).code == 0
    field.json("wait", run_id)
    field.check_clean_end(drained=[again, coordinator], uncertain=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("idempotent", [True, False])
def test_no_other_worker_is_there(field: Field, idempotent: bool) -> None:
    """Only a coordinator is left. The task does not stay `running`, and its process does not stay behind."""
    field.lease(seconds(5, LEASE))
    coordinator = field.coordinator()
    unit, worker, run_id = _begin(field, idempotent)
    kill(unit.pid, worker.pid)
    eventually(lambda: _resolved(field, run_id, idempotent), "the claim is resolved", 2 * seconds(5, LEASE) + 1)
    assert field.effect_processes() == {}
    if idempotent:
        status = field.json("status", run_id).data
        assert [item["why"] for item in status["waiting"]] == ["no_worker"]
    assert field.labels() == ["t"]
    field.check_clean_end(drained=[coordinator], uncertain=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("idempotent", [True, False])
def test_the_row_of_the_dead_worker_is_deleted_before_its_lease_ends(field: Field, idempotent: bool) -> None:
    """No verb prunes, so a person does it by hand, before anybody has looked. The lease and its grace still hold."""
    field.lease(seconds(5, LEASE))
    coordinator = field.coordinator()
    unit, worker, run_id = _begin(field, idempotent)
    kill(coordinator.pid, unit.pid, worker.pid)
    field.change("DELETE FROM processes WHERE process_id = ?", worker.process_id)
    pool = field.pool(1, name="other")
    eventually(lambda: _resolved(field, run_id, idempotent), "the claim is resolved", 3 * seconds(5, LEASE) + 5)
    if idempotent:
        eventually(lambda: len(field.lines()) == 2, "it is executed again", 10)
    else:
        assert field.labels() == ["t"]
    assert len(field.effect_processes()) == (1 if idempotent else 0)
    assert gone(worker.pid)
    assert field.json("cancel", run_id).code == 0
    field.json("wait", run_id)
    field.check_clean_end(drained=[pool], uncertain=True)
