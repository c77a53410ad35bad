"""`doctor`: what is in order is called so, what is not is named with a remedy, and nothing is changed by the look."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agentctl.cli.doctor import judge_units, units_of
from agentctl.store import doctor, facts
from agentctl.store.doctor import Check, examine, worst
from agentctl.store.engine import Store
from agentctl.store.version import VERSION
from support.builders import Driver, Hand, new_run, open_store, process_row
from support.children import Children, wait_until
from support.clock import ManualClock
from support.field import Field, kill

NOW = 1_790_000_000_000
ALL = [
    "filesystem",
    "permissions",
    "disk_space",
    "sync",
    "sqlite",
    "database",
    "gate",
    "wal",
    "clock",
    "processes",
    "orphans",
    "coordinator",
    "workers",
    "artifacts",
    "attention",
]


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.id: check for check in checks}


@pytest.fixture
def now() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def store(tmp_path: Path, now: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, now)
    yield opened
    opened.close()


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_nothing_there_yet(field: Field) -> None:
    result = field.json("doctor")
    assert result.code == 0
    assert named_json(result.data)["database"]["status"] == "warn"
    assert not (field.folder / ".agentctl").exists()
    assert field.json("doctor", "--live").code == 6
    ready = field.json("doctor", "--ready")
    assert ready.code == 6
    assert {check["status"] for check in ready.data["checks"] if check["id"] in ("coordinator", "workers")} == {"fail"}


def named_json(data: dict[str, list[dict[str, str]]]) -> dict[str, dict[str, str]]:
    return {check["id"]: check for check in data["checks"]}


def test_a_pool_at_work_is_well(field: Field) -> None:
    pool = field.pool(2)
    run_id = field.submit(field.workflow("w", [field.tick_fan("t", 4, 0.5, idempotent=False)]))
    wait_until(lambda: len(field.lines()) >= 2, "it works")
    result = field.json("doctor")
    assert result.code == 0, result.out
    found = named_json(result.data)
    assert list(found) == [*ALL, "units"]
    assert {name for name, check in found.items() if check["status"] != "ok"} <= {"disk_space", "sync"}
    for probe in ("--live", "--ready"):
        assert field.json("doctor", probe).code == 0
    assert "workers alive" in field("doctor").out
    assert field.json("wait", run_id).code == 0
    field.check_clean_end(drained=[pool])


def test_what_the_dead_have_left_is_named(field: Field) -> None:
    """Everybody is killed at one instant: rows that are not true, and a command that lives on."""
    pool = field.pool(1)
    run_id = field.submit(field.workflow("w", [field.tick_task("t", 600, idempotent=True)]))
    field.busy(run_id)
    pids = [row[0] for row in field.rows("SELECT pid FROM processes ORDER BY kind")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # nobody sees the end of another one
    kill(*pids)
    pool.wait()
    before = field.rows("SELECT process_id, state FROM processes ORDER BY 1")
    result = field.json("doctor")
    assert result.code == 6
    found = named_json(result.data)
    assert found["processes"]["status"] == "warn"
    assert "with 1 claimed attempt, driving 1 run" in found["processes"]["message"]
    assert (found["coordinator"]["status"], found["workers"]["status"]) == ("warn", "warn")
    assert "1 run not ended" in found["coordinator"]["message"]
    assert "1 attempt held by workers that are gone" in found["workers"]["message"]
    assert found["orphans"]["status"] == "fail"
    [pid] = field.effect_processes()
    assert str(pid) in found["orphans"]["message"]
    assert field.rows("SELECT process_id, state FROM processes ORDER BY 1") == before
    assert field.json("cancel", run_id).code == 0
    assert field.json("doctor").code == 0


def test_a_stranger_that_locks_the_database_is_named(field: Field) -> None:
    pool = field.pool(1)
    locker = field.locker(120, 120, 1, 1)
    # Whoever writes next holds the gate, and waits behind the stranger.
    said: list[str] = []

    def stuck() -> bool:
        gate = named_json(field.json("doctor", "--ready").data)["gate"]
        said.append(gate["message"])
        return gate["status"] == "warn"

    wait_until(stuck, "the gate is stuck")
    assert f"pid {locker.pid} " in said[-1]
    locker.signal(signal.SIGKILL)
    locker.wait()
    wait_until(lambda: field.json("doctor", "--ready").code == 0, "all is well again")
    field.check_clean_end(drained=[pool])


def test_a_stranger_is_named_though_nobody_waits_behind_it(field: Field) -> None:
    field.submit(field.workflow("w", [field.tick_task("t", idempotent=True)]))
    locker = field.locker(120, 120, 1, 1)

    def gate() -> Check:
        return named(examine(field.database, ManualClock(NOW), ["gate", "database"]))["gate"]

    wait_until(lambda: gate().status == "warn", "the lock is seen")
    assert f"pid {locker.pid} " in gate().message
    locker.signal(signal.SIGKILL)
    locker.wait()
    assert gate().status == "ok"


@pytest.mark.parametrize("how", [[], ["--live"]])
def test_a_place_where_no_database_can_be(field: Field, how: list[str]) -> None:
    folder = field.root / "folder"
    folder.mkdir()
    for place, word in ((folder, "is not a file"), (Path("/proc/x/r.db"), "unknown type")):
        result = field.json("--db", place, "doctor", *how)
        assert result.code == 6
        found = named_json(result.data)["database"]
        assert found["status"] == "fail"
        assert word in found["message"]
        assert "agentctl run" not in found["remedy"]


def test_who_reads_and_who_has_it_open(field: Field, store: Store) -> None:
    with sqlite3.connect(store.path, isolation_level=None) as reader:
        assert facts.wal_use(store.database) == facts.FileUse([os.getpid()], [], [])
    with store.database.read():
        assert facts.wal_use(store.database).read_by == [os.getpid()]
    with store.database.write():
        assert facts.wal_use(store.database).written_by == [os.getpid()]
    reader.close()


@pytest.mark.parametrize("how", ["newer", "foreign", "older", "damaged"])
def test_a_database_that_is_not_for_us(field: Field, how: str) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    if how == "damaged":
        with open(field.database, "r+b") as file:
            file.write(b"this is no database.")
    else:
        pragma = {"newer": "user_version = 99", "foreign": "application_id = 7", "older": "user_version = 1"}[how]
        connection = sqlite3.connect(field.database)
        connection.execute(f"PRAGMA {pragma}")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
    before = field.database.read_bytes()
    result = field.json("doctor")
    assert result.code == (0 if how == "older" else 6), result.out
    check = named_json(result.data)["database"]
    assert check["status"] == ("warn" if how == "older" else "fail")
    assert check["remedy"]
    assert field.json("doctor", "--live").code == 6
    assert field.database.read_bytes() == before  # also not migrated


def test_a_network_filesystem_is_a_failure(field: Field) -> None:
    result = field.json("doctor", env={"AGENTCTL_FILESYSTEM_TYPE": "nfs4"})
    assert result.code == 6
    assert named_json(result.data)["filesystem"]["status"] == "fail"


def test_memory_is_a_warning(field: Field) -> None:
    result = field.json("doctor", env={"AGENTCTL_FILESYSTEM_TYPE": "tmpfs"})
    assert named_json(result.data)["filesystem"]["status"] == "warn"


# -- the checks, with time in our hands --------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_is_told_of(store: Store, now: ManualClock) -> None:
    store.register(process_row("w1", now=now.now()))
    assert named(examine(store.path, now))["clock"].status == "ok"
    now.set_wall(NOW - 3_600_000)
    found = named(examine(store.path, now))["clock"]
    assert found.status == "warn"
    assert "60 minutes" in found.message
    now.set_wall(0)
    assert named(examine(store.path, now))["clock"].status == "fail"


def test_a_silent_worker_is_told_of_after_lease_and_grace(store: Store, now: ManualClock) -> None:
    store.register(replace(process_row("w1", now=now.now()), version=VERSION))
    for seconds, status in ((29.0, "ok"), (2.0, "fail")):
        now.advance(seconds)
        assert named(examine(store.path, now))["workers"].status == status


def test_work_without_anybody_is_a_warning(store: Store, now: ManualClock) -> None:
    store.create_run(new_run(tasks=1))
    found = named(examine(store.path, now))
    assert found["coordinator"].status == "warn"
    Driver(store, "run-1").enqueue([0])
    assert named(examine(store.path, now))["workers"].status == "warn"
    strict = named(examine(store.path, now, doctor.READY))
    assert (strict["coordinator"].status, strict["workers"].status) == ("fail", "fail")
    assert list(strict) == list(dict.fromkeys(["disk_space", *doctor.READY]))


def test_another_version_at_work_is_told_of(store: Store, now: ManualClock) -> None:
    store.register(process_row("w1", now=now.now()))
    with store.database.write() as tx:
        tx.execute("UPDATE processes SET version = '0.0.1'")
    assert "0.0.1" in named(examine(store.path, now))["workers"].message


def test_what_a_dead_holder_leaves(store: Store, now: ManualClock, children: Children) -> None:
    from agentctl.store import process_identity

    process = children.command("sleep", "600")
    identity = process_identity.of(process.pid)
    assert identity is not None
    store.register(process_row("w1", now=now.now(), identity=identity.as_text(), pid=process.pid))
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    Hand(store, "w1").take()
    assert named(examine(store.path, now))["processes"].status == "ok"
    process.kill()
    process.wait()
    found = named(examine(store.path, now))["processes"]
    assert found.status == "warn"
    assert "1 process died without a word, with 1 claimed attempt" in found.message


@pytest.mark.parametrize(
    ("free", "status"), [(10 << 20, "fail"), (200 << 20, "warn"), (50 << 30, "ok")], ids=["full", "low", "fine"]
)
def test_disk_space(store: Store, now: ManualClock, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        values = list(real(path))
        values[1], values[4] = 4096, free // 4096
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert named(examine(store.path, now))["disk_space"].status == status


class SlowDisk(ManualClock):
    """Every look at the clock comes later: so every sync takes as long."""

    step = 0.0

    def monotonic(self) -> float:
        self.advance(self.step)
        return super().monotonic()


@pytest.mark.parametrize(("step", "status"), [(0.001, "ok"), (0.1, "warn"), (2.0, "fail")])
def test_a_slow_disk(store: Store, step: float, status: str) -> None:
    clock = SlowDisk(NOW)
    clock.step = step
    found = named(examine(store.path, clock, ["sync"]))["sync"]
    assert found.status == status
    assert f"{step * 1000:.2f} ms" in found.message


def test_permissions(store: Store, now: ManualClock) -> None:
    assert named(examine(store.path, now))["permissions"].status == "ok"
    store.path.chmod(0o644)
    found = named(examine(store.path, now))["permissions"]
    assert found.status == "warn"
    assert "0644" in found.message


def test_a_sqlite_that_damages_databases_is_refused(
    store: Store, now: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.apsw, "sqlite_lib_version", lambda: "3.51.2")
    assert named(examine(store.path, now))["sqlite"].status == "fail"


def test_the_worst_counts() -> None:
    assert worst([]) == "ok"
    assert worst([Check("a", "ok", ""), Check("b", "warn", "")]) == "warn"
    assert worst([Check("a", "fail", ""), Check("b", "warn", "")]) == "fail"


UNITS = """\
agentctl-coordinator.service loaded active running agentctl coordinator
● agentctl-workers.service   loaded failed failed  agentctl workers
agentctl-worker@1.service    loaded activating auto-restart agentctl worker 1
something-else.service       loaded active running x
"""


def test_states_of_units() -> None:
    found = units_of(UNITS)
    assert [unit[0] for unit in found] == [
        "agentctl-coordinator.service",
        "agentctl-workers.service",
        "agentctl-worker@1.service",
    ]
    assert judge_units(found).status == "fail"
    assert judge_units([found[0], found[2]]).status == "warn"
    assert judge_units(found[:1]).status == "ok"
    assert judge_units([]).status == "ok"


RUNS = ("active", "running")
REST = ("inactive", "dead")
POOL = "agentctl-workers.service"
COORDINATOR = "agentctl-coordinator.service"
WORKER_1, WORKER_2 = "agentctl-worker@1.service", "agentctl-worker@2.service"


@pytest.mark.parametrize(
    ("system", "user", "status", "words"),
    [
        ([(POOL, *RUNS)], [], "ok", ["active"]),
        ([(POOL, *RUNS), (WORKER_1, *RUNS), (WORKER_2, *RUNS)], [], "warn", ["a pool and 2 single workers", POOL]),
        ([], [(POOL, *RUNS), (WORKER_1, *RUNS)], "warn", ["systemctl --user disable --now"]),
        ([(POOL, *RUNS)], [(COORDINATOR, *RUNS), (WORKER_1, *RUNS)], "ok", ["active"]),
        ([(POOL, *REST)], [], "warn", [f"inactive: {POOL}", f"systemctl start {POOL}"]),
        ([], [(COORDINATOR, *REST), (WORKER_1, *RUNS)], "warn", [f"systemctl --user start {COORDINATOR}"]),
        ([(POOL, *RUNS), (COORDINATOR, *REST)], [], "ok", ["active"]),
        ([], [(POOL, "failed", "failed")], "fail", [f"journalctl --user -u {POOL}"]),
        ([(POOL, "failed", "failed")], [], "fail", [f"journalctl -u {POOL}"]),
        ([], [(POOL, "activating", "auto-restart")], "warn", [f"journalctl --user -u {POOL}"]),
    ],
)
def test_layouts_and_scopes_of_units(
    system: list[tuple[str, str, str]], user: list[tuple[str, str, str]], status: str, words: list[str]
) -> None:
    found = judge_units(system, user)
    assert found.status == status
    for word in words:
        assert word in f"{found.message} {found.remedy}"


def test_a_name_that_is_only_mentioned_is_no_unit() -> None:
    assert units_of("agentctl-coordinator.service not-found inactive dead agentctl-coordinator.service") == []
