"""Field report 11: a lock is still held by a child of a dead process.

The locks are those of the write gate, of migrations and of the artifact store, besides the wake-up sockets.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field, bound, gone, kill

STRAY = 'setsid sh -c \'echo "$$" > "$0"; exec sleep 600\' "$0" & while [ ! -s "$0" ]; do :; done; exec sleep 600'

HOLDER = """\
# holder GATE SECONDS: a stranger that holds the write gate.
import fcntl, sys, time
with open(sys.argv[1], "r+") as gate:
    fcntl.flock(gate, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def _descriptors(pid: int) -> dict[int, str]:
    folder = f"/proc/{pid}/fd"
    return {int(name): os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}


@pytest.mark.timeout(300)
def test_a_stray_of_a_dead_worker_holds_nothing(field: Field) -> None:
    """A child leaves its session and outlives pool, worker and coordinator, which are killed at one instant."""
    pool = field.pool(3)
    file = field.workflow(
        "stray",
        [
            {"id": "stray", "uses": "action:stray", "with": {"args": ["-c", STRAY, str(field.root / "pid")]}},
            field.tick_fan("others", 200, 0.01, idempotent=True),
        ],
        actions={"stray": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once"}},
        programs=["setsid"],
    )
    run_id = field.submit(file)
    place = field.root / "pid"
    wait_until(lambda: place.exists() and place.read_text().endswith("\n"), "the stray")
    stray = int(place.read_text())
    wait_until(lambda: len(field.lines()) >= 5, "the other workers take and give the gate")
    held = _descriptors(stray)
    assert set(held) <= {0, 1, 2}, held
    assert held[0] == "/dev/null"
    assert not any(".agentctl" in target or "socket:" in target for target in held.values()), held
    family = [row[0] for row in field.rows("SELECT pid FROM processes WHERE stopped_at IS NULL")]
    assert pool.pid in family
    kill(*family)
    assert not gone(stray), "nobody is left who could end it"
    # Nobody has to be ended by hand first, and nothing waits for a lock of the dead.
    small = field.workflow("small", [field.tick_task("small", idempotent=True)])
    submitted = field.json("submit", small)
    assert (submitted.code, submitted.seconds < bound(2)) == (0, True)
    cancelled = field.json("cancel", submitted.data["runId"])
    assert cancelled.code == 0
    ran = field.json("run", small)
    assert (ran.code, ran.data["state"]) == (0, "succeeded")
    resumed = field.json("resume", run_id, "--workers", "2")
    assert (resumed.code, resumed.data["reason"]) == (3, "uncertain_effect")
    assert gone(stray), "whoever rescues the dead ends what they have left behind"
    field.check_clean_end(uncertain=True)


@pytest.mark.timeout(300)
def test_a_stray_of_a_worker_that_died_with_the_artifact_lock_holds_nothing(field: Field) -> None:
    """A worker dies in the middle of an ingestion; its stray lives on. Collections and ingestions go on at once."""
    (field.folder / "out").mkdir()
    marker, place = field.root / "struck", field.root / "pid"
    pool = field.pool(1, "--no-coordinator", env={"AGENTCTL_FAULT": f"after_placing:stop@{marker}"})
    keep = {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "idempotent"}
    script = 'setsid sh -c \'echo "$$" > "$0"; exec sleep 600\' "$1" & while [ ! -s "$1" ]; do :; done; echo x > out/x'
    file = field.workflow(
        "stray",
        [
            {
                "id": "keep",
                "uses": "action:keep",
                "with": {"args": ["-c", script, "sh", str(place)], "artifacts": ["out/x"]},
            }
        ],
        actions={"keep": keep},
        policy={"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
    )
    run_id = field.submit(file)
    coordinator = field.coordinator()
    wait_until(marker.exists, "a worker is stopped with the lock in its hands")
    [worker] = field.workers()
    lock = field.database.parent / "artifacts" / ".lock"
    assert str(lock) in _descriptors(worker.pid).values()
    kill(worker.pid, pool.pid, coordinator.pid)
    wait_until(lambda: gone(worker.pid), "the worker is gone")
    collected = field.json("artifacts", "gc", "--older-than-days", "0")
    assert (collected.code, collected.seconds < bound(2)) == (0, True), collected.err
    resumed = field.json("resume", run_id, "--workers", "1")
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded"), resumed.err
    assert field.json("artifacts", "verify").data["checked"] == 1
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_who_really_holds_the_artifact_lock_is_named(field: Field) -> None:
    """A living stranger holds it: a worker that ingests says who it is, and goes on when the lock is free."""
    (field.folder / "out").mkdir()
    keep = {"kind": "builtin.write"}
    tasks = [{"id": "keep", "uses": "action:keep", "with": {"path": "out/x", "content": "${{ inputs.text }}"}}]
    file = field.workflow(
        "keep",
        tasks,
        actions={"keep": keep},
        inputs={"text": "one"},
        policy={"approval": "never", "writableRoots": ["out"]},
    )
    assert field.json("run", file).code == 0
    program = field.tool("holder.py", HOLDER)
    lock = field.database.parent / "artifacts" / ".lock"
    holder = field.spawn(sys.executable, program, lock, "600")
    wait_until(lambda: _holds_file(lock, holder.pid), "the lock is held")
    running = field.start("run", file, "--input", "text=two", "--workers", "1")
    wait_until(lambda: str(holder.pid) in running.err, "the message")
    assert "started" in running.err
    assert str(lock) in running.err
    assert holder.running()
    kill(holder.pid)
    assert running.wait().code == 0
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_who_really_holds_the_gate_is_named(field: Field) -> None:
    """A living stranger holds it: the message has its pid and since when it lives; it is not killed for it."""
    file = field.workflow("small", [field.tick_task("small", idempotent=True)])
    assert field.json("run", file).code == 0
    program = field.tool("holder.py", HOLDER)
    gate = field.database.with_name(field.database.name + ".gate")
    holder = field.spawn(sys.executable, program, gate, "600")
    wait_until(lambda: bool(field.rows("SELECT 1")) and _holds(field, holder.pid), "the gate is held")
    submitting = field.start("submit", file)
    wait_until(lambda: str(holder.pid) in submitting.err, "the message")
    assert "gate" in submitting.err
    assert "started" in submitting.err
    assert holder.running()
    kill(holder.pid)
    result = submitting.wait()
    assert (result.code, result.out[:4]) == (0, "run-")
    field.check_clean_end()


def _holds(field: Field, pid: int) -> bool:
    return _holds_file(field.database.with_name(field.database.name + ".gate"), pid)


def _holds_file(path: Path, pid: int) -> bool:
    inode = os.stat(path).st_ino
    with open("/proc/locks", encoding="ascii") as table:
        return any(f" {pid} " in line and f":{inode} " in line for line in table)
