"""The verbs that look after a store, through the program: reports and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import migrate
from filelock import FileLock
from support.children import wait_until

from .conftest import PROGRAM

KEEPS = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: keeps}
spec:
  policy: {approval: never, writableRoots: [out]}
  actions: {write: {kind: builtin.write}}
  tasks: [{id: text, uses: action:write, with: {path: out/text.json, content: "{}"}}]
"""


@pytest.fixture
def done(cli: Any) -> str:
    """A run that has kept a file; its id."""
    cli.write("keeps.yaml", KEEPS)
    return str(cli.json("run", "keeps.yaml").data["runId"])


def change(database: Path, sql: str) -> None:
    """Change something by hand, as a person with a shell might."""
    with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        connection.executescript(sql)


def test_stats(cli: Any, done: str) -> None:
    data = cli.json("db", "stats").data
    assert data["path"] == str(cli.database)
    assert (data["schema"], data["runs"]) == (migrate.LATEST, {"succeeded": 1})
    assert (data["rows"]["tasks"], data["artifacts"]["blobs"], data["artifacts"]["bytes"]) == (1, 1, 2)
    human = cli("db", "stats")
    assert (human.code, "1 succeeded" in human.out) == (0, True)


def test_verify(cli: Any, done: str) -> None:
    data = cli.json("db", "verify").data
    assert (data["ok"], data["runsChecked"], data["artifacts"]["checked"]) == (True, 1, 1)
    assert cli("db", "verify").code == 0
    assert cli.json("db", "verify", "--no-artifacts").data["artifacts"] is None
    change(cli.database, "UPDATE tasks SET output_json = '{\"a\":1}'")
    broken = cli.json("db", "verify")
    assert (broken.code, broken.data["ok"], broken.data["problemCount"]) == (5, False, 2)
    told = [problem["message"] for problem in broken.data["problems"]]
    assert "does not fit its digest" in told[0]
    assert "not the result of its attempt" in told[1]
    assert cli("db", "verify").code == 5


def test_verify_compares_what_effects_have_done_with_outputs(cli: Any, done: str) -> None:
    change(cli.database, "UPDATE effects SET result_json = '{}'")
    broken = cli.json("db", "verify").data["problems"]
    assert "not the result of its attempt" in broken[0]["message"]
    assert len(broken) == 2, "its seal is broken, too"


def test_verify_computes_the_digests_of_a_run_again(cli: Any, done: str) -> None:
    change(cli.database, "UPDATE run_documents SET plan_json = json_set(plan_json, '$.maxConcurrency', 63)")
    change(cli.database, "UPDATE run_outputs SET output_json = '{}'")
    found = [problem["message"] for problem in cli.json("db", "verify").data["problems"]]
    assert "the output of the run is not the one that its chain tells of" in found
    assert found.count("the plan of the run does not fit its digest") == 2, "that of its text, and that of the contract"


def test_the_delta_of_a_task_without_memory_is_the_empty_one(cli: Any, done: str) -> None:
    task = cli.json("inspect", done).data["tasks"][0]
    assert task["stateDelta"] == {"formatVersion": 1, "remove": [], "set": {}}
    known = "sha256:v1:6bb66b760a4352963c62c5094a0de9e1f755bee6fadb53c571914cf9154e26f0"
    assert task["stateDeltaDigest"] == known


def test_backup_and_restore(cli: Any, done: str) -> None:
    data = cli.json("db", "backup", "copy").data
    assert (data["runs"], data["artifacts"], data["settledAttempts"]) == (1, 1, 0)
    again = cli.json("db", "backup", "copy")
    assert (again.code, again.error["code"]) == (5, "conflict")
    refused = cli.json("db", "restore", "copy")
    assert (refused.code, refused.error["code"]) == (5, "conflict")
    assert "--db" in refused.error["remedy"]
    assert cli.json("db", "restore", "nowhere", "--db", "new/x.db").error["code"] == "not_found"
    assert not (cli.folder / "new").exists()
    restored = cli.json("db", "restore", "copy", "--db", "new/x.db")
    assert (restored.code, restored.data["runs"]) == (0, 1)
    assert cli.json("db", "verify", "--db", "new/x.db").data["ok"] is True
    assert cli.json("wait", done, "--db", "new/x.db").data["state"] == "succeeded"
    assert cli.json("run", "keeps.yaml", "--db", "new/x.db").code == 0


def inside(*commands: str) -> list[str]:
    """A prefix that runs the program in a mount namespace of its own, after these commands."""
    return ["unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run([*inside("mount -t tmpfs none /mnt"), "true"], capture_output=True, check=False).returncode == 0
    )


mounts = pytest.mark.skipif(not may_mount(), reason="needs a mount namespace")


def small_disk(cli: Any, room: float) -> list[str]:
    """A prefix with a disk at `small` that has room for so much of the database."""
    whole = cli.json("db", "backup", "copy").data["databaseBytes"]
    (cli.folder / "small").mkdir()
    return inside(f"mount -t tmpfs -o size={int(whole * room)} none {cli.folder / 'small'}")


@mounts
@pytest.mark.parametrize("room", [0.03, 0.6, 1.01])
def test_a_backup_to_a_full_disk_blames_that_disk(cli: Any, done: str, room: float) -> None:
    result = cli.json("db", "backup", "small/copy", prefix=small_disk(cli, room))
    assert (result.code, result.error["code"]) == (5, "environment")
    assert str(cli.folder / "small" / "copy") in result.error["message"]
    assert str(cli.database) not in result.error["message"]
    assert ".agentctl-" not in result.error["message"]
    assert "resume" not in result.error["remedy"]
    assert "choose another place" in result.error["remedy"]


@mounts
@pytest.mark.parametrize("room", [0.03, 0.6, 1.01])
def test_restoring_to_a_full_disk_blames_that_disk(cli: Any, done: str, room: float) -> None:
    result = cli.json("db", "restore", "copy", "--db", "small/new/r.db", prefix=small_disk(cli, room))
    assert (result.code, result.error["code"]) == (5, "environment")
    assert str(cli.folder / "small" / "new") in result.error["message"]
    assert "copy" not in result.error["message"]
    assert ".agentctl-" not in result.error["message"]
    assert "choose another place" in result.error["remedy"]


def test_bytes_that_cannot_be_read_are_not_a_place_that_cannot_be_written(
    cli: Any, done: str, unprivileged: Any
) -> None:
    assert cli.json("db", "backup", "copy").code == 0
    shelves = [next((root / "artifacts" / "sha256").glob("*/*")) for root in (cli.database.parent, cli.folder / "copy")]
    for blob in shelves:
        blob.chmod(0)
    prefix = unprivileged(cli.folder)
    if prefix:
        for path in (cli.folder, *cli.folder.rglob("*")):
            os.chown(path, 65534, 65534)
    for verb in (("db", "backup", "other"), ("artifacts", "export", shelves[0].name, "other")):
        result = cli.json(*verb, prefix=prefix)
        assert (result.code, result.error["code"]) == (5, "environment")
        assert f"cannot read {shelves[0]}" in result.error["message"]
        assert "space" not in result.error["remedy"]
    result = cli.json("db", "restore", "copy", "--db", "new/r.db", prefix=prefix)
    assert (result.code, result.error["code"]) == (5, "environment")
    assert f"cannot read {shelves[1].relative_to(cli.folder)}" in result.error["message"].replace(f"{cli.folder}/", "")
    assert not (cli.folder / "new").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_copy_that_is_stopped_leaves_nothing(cli: Any, done: str, number: signal.Signals) -> None:
    code = -number if number == signal.SIGHUP else 130
    with FileLock(cli.database.parent / "artifacts" / ".collect.lock"):
        child = cli.start("db", "backup", "copy")
        wait_until(lambda: any(cli.folder.glob(".agentctl-*.partial")), "the partial folder")
        child.send_signal(number)
        assert child.wait(60) == code
        child.communicate()
    assert list(cli.folder.glob(".agentctl-*")) == []
    assert not (cli.folder / "copy").exists()
    cli.json("db", "backup", "copy")
    artifacts = cli.folder / "new" / "artifacts"
    artifacts.mkdir(parents=True)
    with FileLock(artifacts / ".lock"):
        child = cli.start("db", "restore", "copy", "--db", "new/r.db")
        wait_until(lambda: any(artifacts.glob("tmp/*")), "a staged blob")
        child.send_signal(number)
        assert child.wait(60) == code
        child.communicate()
    assert {path.name for path in (cli.folder / "new").rglob("*")} == {"artifacts", ".lock"}
    assert cli.json("db", "restore", "copy", "--db", "new/r.db").code == 0


def test_nohup_stays_in_force_during_a_backup(cli: Any, done: str) -> None:
    with FileLock(cli.database.parent / "artifacts" / ".collect.lock"):
        command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *PROGRAM, "db", "backup", "copy"]
        child = subprocess.Popen(command, cwd=cli.folder, env=cli.environment, stdout=subprocess.DEVNULL)
        wait_until(lambda: any(cli.folder.glob(".agentctl-*.partial")), "the partial folder")
        child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 0
    assert (cli.folder / "copy" / "runtime.db").exists()


def test_what_people_are_told_of_a_backup(cli: Any, done: str) -> None:
    assert "1 run, " in (said := cli("db", "backup", "a copy").out) and "1 artifact, 2 B" in said
    said = cli("db", "restore", "a copy", "--db", "a new/x.db").out
    assert f"agentctl db verify --db '{cli.folder}/a new/x.db'" in said
    assert "1 run, 1 artifact\n" in said
    assert "resume" not in said, "nothing was running"
    assert cli("db", "verify").out == "1 run checked: everything is sound\n1 artifact, 2 B\n"
    assert cli.json("db", "backup", ".agentctl/artifacts/bk").error["code"] == "usage"


def test_migrate(cli: Any, done: str) -> None:
    data = cli.json("db", "migrate").data
    assert (data["from"], data["to"], data["migrated"]) == (migrate.LATEST, migrate.LATEST, False)
    missing = cli.json("db", "migrate", "--db", "none.db")
    assert (missing.code, missing.error["code"]) == (5, "not_found")
    old = cli.folder / "old.db"
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.executescript(migrate.script(1))
        connection.execute(f"PRAGMA application_id = {migrate.APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
    data = cli.json("db", "migrate", "--db", old).data
    assert (data["from"], data["to"], data["migrated"]) == (1, migrate.LATEST, True)
    change(cli.database, f"PRAGMA user_version = {migrate.LATEST + 1}")
    newer = cli.json("db", "migrate")
    assert (newer.code, newer.error["code"]) == (5, "incompatible_version")


def test_gc(cli: Any, done: str) -> None:
    assert cli.json("gc").data["runs"]["considered"] == 0  # it ended a moment ago
    dry = cli.json("gc", "--older-than-days", "0", "--dry-run").data
    assert (dry["runs"]["removed"], dry["artifacts"]["considered"], dry["dryRun"]) == ([done], 1, True)
    assert cli.json("gc", "--older-than-days", "0", "--state", "failed", "--state", "cancelled").data["runs"] == {
        "considered": 0,
        "removed": [],
        "kept": [],
    }
    assert len(cli.json("runs", "list").data["runs"]) == 1
    human = cli("gc", "--older-than-days", "0")
    assert (human.code, f"  {done}\n" in human.out) == (0, True)
    assert cli.json("runs", "list").data["runs"] == []
    assert cli.json("artifacts", "list").data["blobs"] == []
    assert cli.json("status", done).error["code"] == "not_found"
    assert cli.json("db", "verify").code == 0
    for bad in (("--older-than-days", "-1"), ("--state", "running")):
        assert cli.json("gc", *bad).code == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_collection_that_is_interrupted_tells_what_it_has_removed(
    cli: Any, done: str, number: signal.Signals
) -> None:
    """The runs are gone for good: whoever interrupts it has to learn which ones. A second signal ends it at once."""
    cli.json("run", "keeps.yaml")
    runs = lambda: [run["runId"] for run in cli.json("runs", "list").data["runs"]]  # noqa: E731
    both = runs()
    with FileLock(cli.database.parent / "artifacts" / ".lock"):
        child = cli.start("gc", "--older-than-days", "0", "--output", "json")
        wait_until(lambda: not runs(), "the runs are gone, and it waits to remove what they have kept")
        child.send_signal(number)
        wait_until(lambda: not _is_pending(child, number), "it has noted it")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")
    data = json.loads(out)["data"]
    assert (sorted(data["runs"]["removed"]), data["interrupted"]) == (sorted(both), True)
    (cli.folder / "out" / "text.json").unlink()
    cli.json("run", "keeps.yaml")
    with FileLock(cli.database.parent / "artifacts" / ".lock"):
        child = cli.start("gc", "--older-than-days", "0")
        wait_until(lambda: not runs(), "it waits again")

        def over() -> bool:
            child.send_signal(number)
            return child.poll() is not None

        wait_until(over, "one more signal ends it, with the lock still held")
    child.communicate()
    assert child.returncode == 130
    rest = cli.json("artifacts", "gc", "--older-than-days", "0")
    assert (rest.code, len(rest.data["removed"]), rest.data["interrupted"]) == (0, 1, False)


def _is_pending(child: subprocess.Popen[str], number: int) -> bool:
    """Whether a signal was sent to a process and not yet taken by it."""
    status = Path(f"/proc/{child.pid}/status").read_text()
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask >> (number - 1) & 1 for mask in pending)


def test_gc_forgets_memory_that_expired_long_ago(cli: Any, done: str) -> None:
    cli.json("memory", "put", "old", '"x"', "--retention-days", "1")
    cli.json("memory", "put", "kept", '"y"')
    assert cli.json("gc").data["memory"] == {"expired": 0}
    day = 24 * 3600 * 1000
    change(cli.database, f"UPDATE long_term_memory SET expires_at = expires_at - {40 * day} WHERE memory_key = 'old'")  # noqa: S608
    assert cli.json("gc", "--older-than-days", "60").data["memory"] == {"expired": 0}
    assert cli.json("gc", "--dry-run").data["memory"] == {"expired": 1}
    assert "1 expired memory entry removed" in cli("gc").out
    assert cli.json("gc").data["memory"] == {"expired": 0}
    assert cli.json("memory", "get", "kept").code == 0


@pytest.mark.parametrize("verb", ["db stats", "db verify", "db backup x", "artifacts list", "artifacts gc", "gc"])
def test_without_a_database(cli: Any, verb: str) -> None:
    result = cli.json(*verb.split())
    assert (result.code, result.error["code"]) == (5, "not_found")
    assert not cli.database.parent.exists()


def test_two_databases_do_not_share_a_folder_of_artifacts(cli: Any, done: str) -> None:
    """To each the other's blobs would be strays without a row, and a collection removes those."""
    other = cli.database.with_name("other.db")
    hello = cli.write("hello.yaml", KEEPS.replace("builtin.write", "builtin.assign"))
    assert cli("--db", str(other), "run", str(hello)).code == 0
    assert cli("--db", str(other), "artifacts", "gc", "--older-than-days", "0").code == 0
    assert cli("--db", str(other), "gc", "--older-than-days", "0").code == 0
    assert cli.json("db", "verify").data["artifacts"]["checked"] == 1
    assert cli("--db", str(other), "db", "backup", str(cli.folder / "copy")).code == 0
    refused = cli("--db", str(other), "run", "keeps.yaml")
    assert refused.code == 5
    assert f"belongs to the database {cli.database.name}" in refused.err
    assert "a folder of its own" in refused.err
    # Whose database is gone has left the folder.
    for name in (cli.database.name, f"{cli.database.name}-wal", f"{cli.database.name}-shm"):
        cli.database.with_name(name).unlink(missing_ok=True)
    assert cli("--db", str(other), "run", "keeps.yaml").code == 0
    assert cli.json("--db", str(other), "db", "verify").data["ok"]
