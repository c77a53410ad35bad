"""Workers that have done enough make room for fresh ones, and nothing is lost by it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from agentctl.store.recycling import NO_LIMITS, Limits
from support.children import wait_until
from support.field import Field
from support.manager import Manager
from support.scale import repeats


def started_workers(field: Field) -> list[tuple[str, int, str]]:
    return field.rows("SELECT state, done + failed, name FROM processes WHERE kind = 'worker' ORDER BY started_at")


@pytest.mark.parametrize("limits", [("--max-tasks", "7"), ("--max-age", "0.4")], ids=["count", "age"])
def test_a_pool_renews_its_workers_and_loses_nothing(field: Field, limits: tuple[str, str]) -> None:
    pool = field.pool(2, *limits)
    tasks = [field.tick_fan("n", 60, 0.02, idempotent=False), field.tick_fan("i", 20, 0, idempotent=True)]
    run_id = field.submit(field.workflow("many", tasks))
    assert field.json("wait", run_id).code == 0
    labels = field.labels()
    assert len(labels) == len(set(labels)) == 80  # each once
    assert field.rows("SELECT 1 FROM attempts WHERE number > 1 OR delivery > 1 OR lost > 0") == []
    ended = [row for row in started_workers(field) if row[0] == "stopped"]
    assert len(ended) >= 4
    assert field.rows("SELECT 1 FROM processes WHERE state = 'dead'") == []
    if limits[0] == "--max-tasks":
        assert {count for _, count, _ in ended} == {7}
        assert sum(count for _, count, _ in started_workers(field)) <= 80
    field.check_clean_end(drained=[pool])


def test_a_worker_alone_renews_itself_in_place(field: Field, manager: Manager) -> None:
    """The same pid for the service manager; another process for the database; and the manager hears of it."""
    coordinator = field.coordinator()
    worker = field.start("worker", "start", "--name", "solo", "--max-tasks", "5", env=manager.environment())
    run_id = field.submit(field.workflow("some", [field.tick_fan("t", 17, 0, idempotent=False)]))
    assert field.json("wait", run_id).code == 0
    assert len(set(field.labels())) == len(field.labels()) == 17
    rows = field.rows("SELECT pid, state, name, parent_process_id FROM processes WHERE kind = 'worker'")
    wait_until(lambda: len(manager_ready(manager)) == 4, "it is ready again")
    assert {(row[0], row[2], row[3]) for row in rows} == {(worker.pid, "solo", None)}
    assert manager_ready(manager) == [worker.pid] * 4
    # systemd takes STOPPING=1 at its word: it waits for the end of the main process, and kills it when its time is up.
    assert manager.heard("STOPPING=1") == []
    field.check_clean_end(drained=[worker, coordinator])
    manager.drain()
    assert set(manager.heard("STOPPING=1")) == {worker.pid}  # a real stop is still told


def manager_ready(manager: Manager) -> list[int]:
    manager.drain()
    return manager.heard("READY=1")


def test_a_stop_in_the_middle_of_a_renewal_is_not_lost(field: Field) -> None:
    """At any moment, also while the new program starts: the worker ends, and not by the bare signal."""
    coordinator = field.coordinator()
    run_id = field.submit(field.workflow("on", [field.tick_fan("t", 900, 0, idempotent=False)]))
    chance = random.Random(3)
    for _ in range(repeats(60, at_least=6)):
        before = len(field.lines())
        worker = field.start("worker", "start", "--max-tasks", "1")
        wait_until(lambda n=before: len(field.lines()) >= n + 2, "it was renewed once")  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.4))  # the moment is what is varied
        worker.signal(signal.SIGTERM)
        assert worker.wait(20).code == 0
    assert len(set(field.labels())) == len(field.labels())
    assert field("cancel", run_id).code == 0
    field.check_clean_end(drained=[coordinator])


def test_a_worker_alone_keeps_its_drain_limit(field: Field) -> None:
    coordinator = field.coordinator()
    worker = field.start("worker", "start", "--drain-seconds", "0.5")
    run_id = field.submit(field.workflow("slow", [field.tick_task("t", 600, idempotent=True)]))
    wait_until(lambda: len(field.lines()) == 1, "it has begun")
    worker.signal(signal.SIGTERM)
    ended = worker.wait(20)
    assert ended.code == 3, ended.err
    assert "ended hard" in ended.err
    assert field.tasks(run_id)["t"] == ("ready", 1, 1)
    assert field.effect_processes() == {}
    field.check_clean_end(drained=[coordinator])


def test_a_worker_alone_that_is_killed_is_rescued_and_its_commands_end(field: Field) -> None:
    coordinator = field.coordinator()
    worker = field.start("worker", "start", "--name", "a")
    run_id = field.submit(field.workflow("killed", [field.tick_task("t", field.may_end, idempotent=True)]))
    wait_until(lambda: len(field.lines()) == 1, "it has begun")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    field.may_end.touch()
    other = field.start("worker", "start", "--name", "a")
    assert field.json("wait", run_id).code == 0
    assert field.tasks(run_id)["t"] == ("succeeded", 1, 2)
    assert len(field.lines()) == 2
    field.check_clean_end(drained=[other, coordinator])


def test_workers_stop_reaches_a_worker_alone(field: Field) -> None:
    worker = field.start("worker", "start", "--name", "a")
    wait_until(lambda: bool(field.workers("idle")), "it is there")
    told = field.json("workers", "stop").data["signalled"]
    assert [entry["pid"] for entry in told] == [worker.pid]
    assert worker.wait(20).code == 0


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "pool"])
def test_a_worker_that_rests_drains_when_it_is_asked(field: Field, alone: bool) -> None:
    """It is called; its next heartbeat would be too late."""
    patient = {"AGENTCTL_LEASE_SECONDS": "9000", "AGENTCTL_HEARTBEAT_SECONDS": "3000"}
    command = ["worker", "start", "--name", "a"] if alone else ["workers", "start", "-n", "1", "--name", "p"]
    process = field.start(*command, env=patient)
    wait_until(lambda: bool(field.workers("idle")), "it is there")
    [worker] = field.workers("idle")
    assert field.json("workers", "drain", worker.name).data["requested"] is True
    wait_until(lambda: not field.workers(), "it has ended")
    if not alone:
        process.signal(signal.SIGTERM)
    assert process.wait(20).code == 0


def test_drain_of_a_worker_alone_ends_it_for_good(field: Field) -> None:
    worker = field.start("worker", "start", "--name", "a", "--max-tasks", "1")
    wait_until(lambda: bool(field.workers("idle")), "it is there")
    assert field.json("workers", "drain", "a").data["requested"] is True
    assert worker.wait(20).code == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-rss", "1M"),
        ("--max-rss", "lots"),
        ("--max-age", "0"),
        ("--max-age", "nan"),
        ("--max-age", "-1h"),
        ("--max-tasks", "0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(field: Field, option: str, value: str) -> None:
    for command in (("workers", "start"), ("worker", "start")):
        result = field.json(*command, option, value)
        assert result.code == 2
        assert option in result.error["message"]
    assert not field.database.exists()


# -- without processes -------------------------------------------------------------------------------------------------


def test_limits_differ_by_up_to_a_tenth() -> None:
    limits = Limits(100, 50.0, 1 << 30)
    assert limits.drawn(0.0) == limits
    assert limits.drawn(0.999) == Limits(91, pytest.approx(45.0, abs=0.01), 1 << 30)
    assert Limits(tasks=1).drawn(0.999).tasks == 1
    assert not NO_LIMITS.any
    assert NO_LIMITS.drawn(0.5) == NO_LIMITS


def test_what_is_reached() -> None:
    limits = Limits(10, 60.0, 100 << 20)
    small, large = (lambda: 50 << 20), (lambda: 200 << 20)
    assert limits.reached(9, 59.0, small) is None
    assert "10 attempts" in str(limits.reached(10, 0.0, small))
    assert "60 s old" in str(limits.reached(0, 60.0, small))
    assert "200 MiB" in str(limits.reached(1, 0.0, large))
    assert limits.reached(0, 0.0, large) is None  # a fresh one would be as large

    def unasked() -> int:
        raise AssertionError("memory is not asked for without a limit")

    assert Limits(tasks=5).reached(1, 1.0, unasked) is None


def test_memory_of_this_machine(tmp_path: Path) -> None:
    from agentctl.store.engine import own_rss

    assert Limits(rss_bytes=1 << 20).reached(1, 0.0, own_rss) is not None
