"""Field report 15: the temporary directory is on another filesystem; the store cannot be written.

Other filesystems and read-only mounts are made in a mount namespace of the test's own, which needs root.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest
from support.artifacts import digest_of
from support.field import Field


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True, check=False
    )
    return done.returncode == 0


mounts = pytest.mark.skipif(not _may_mount(), reason="needs a mount namespace")


def inside(*commands: str) -> list[str]:
    """A prefix that runs the program in a mount namespace, after these commands."""
    return ["unshare", "--mount", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def keeping(field: Field) -> str:
    """One tick that must not be repeated, whose result is an artifact, and one file."""
    tick = {"kind": "builtin.shell.exec", "command": str(field.tick), "idempotency": "at_most_once"}
    return field.workflow(
        "keeping",
        [
            {
                "id": "tick",
                "uses": "action:tick-k",
                "with": {"args": [str(field.ledger), "tick", "0"], "artifacts": ["out/result.txt"]},
            },
            {"id": "file", "uses": "action:write", "with": {"path": "out/file.txt", "content": "file"}},
        ],
        actions={"tick-k": tick, "write": {"kind": "builtin.write"}},
        policy={"approval": "never", "processAllowlist": ["tick"], "writableRoots": ["out"]},
    )


@mounts
@pytest.mark.timeout(300)
def test_three_filesystems(field: Field) -> None:
    """Workspace, store and TMPDIR on filesystems of their own; everything happens in one namespace."""
    file = keeping(field)
    store, temporary, out = (field.root / name for name in ("store", "tmp", "exported"))
    for folder in (store, temporary, out, field.folder / "out"):
        folder.mkdir()
    script = [
        *(f"mount -t tmpfs none {folder}" for folder in (store, temporary, field.folder / "out")),
        "echo result > out/result.txt",
        f"A='{_program()} --db {store}/db/runtime.db'",
        f"$A run {file} --workers 2 --output json",
        "$A artifacts verify --output json",
        f"$A artifacts export {digest_of(b'result' + bytes([10]))} {out}/result.txt",
        f"$A artifacts export {digest_of(b'file')} {temporary}/file.txt",
        f"cat {temporary}/file.txt && rm {temporary}/file.txt",
        f"$A db backup {out}/backup",
        f"ls -A {temporary} {store}/db/artifacts/tmp {store}/db/artifacts/trash | grep -v : | grep . && exit 9",
        "true",
    ]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", "\n".join(script)],
        cwd=field.folder,
        env={**field.environment, "TMPDIR": str(temporary)},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert '"state":"succeeded"' in done.stdout
    assert (out / "result.txt").read_text() == "result\n"
    assert (out / "backup" / "runtime.db").exists()
    assert field.labels() == ["tick"]


def _program() -> str:
    from support.field import PROGRAM

    assert len(PROGRAM) == 1, "needs the installed program"
    return PROGRAM[0]


@mounts
@pytest.mark.timeout(300)
def test_a_read_only_store_is_refused_before_a_run_exists(field: Field) -> None:
    file = keeping(field)
    root = field.database.parent / "artifacts"
    (field.folder / "out").mkdir()
    (field.folder / "out" / "result.txt").write_text("result")
    assert field.json("run", file).code == 0
    assert field.labels() == ["tick"]
    (field.folder / "out" / "file.txt").unlink()
    read_only = inside(f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}")
    for verb in ("run", "submit"):
        refused = field.json(verb, file, prefix=read_only)
        assert (refused.code, refused.error["code"]) == (5, "environment")
        assert str(root) in refused.error["message"]
        assert "read-only" in refused.error["message"]
    assert field.scalar("SELECT COUNT(*) FROM runs") == 1
    # What only reads, or keeps nothing, works all the same.
    assert field.json("artifacts", "verify", prefix=read_only).code == 0
    assert field.json("runs", "list", prefix=read_only).code == 0
    # A run that exists already: nothing of it is dispatched, and it goes on where it can.
    run_id = field.submit(file)
    refused = field.json("resume", run_id, prefix=read_only)
    assert (refused.code, refused.error["code"]) == (5, "environment")
    assert field.rows("SELECT 1 FROM effects WHERE run_id = ?", run_id) == []
    assert field.labels() == ["tick"]
    resumed = field.json("resume", run_id)
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded")
    assert field.labels() == ["tick", "tick"]
    field.check_clean_end()


@mounts
@pytest.mark.timeout(300)
def test_collections_of_a_read_only_store_change_nothing(field: Field) -> None:
    """`gc` removes no run whose artifacts it could not collect, and each verb says where, why and what to do."""
    file = keeping(field)
    root = field.database.parent / "artifacts"
    (field.folder / "out").mkdir()
    (field.folder / "out" / "result.txt").write_text("result")
    assert field.json("run", file).code == 0
    read_only = inside(f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}")
    old = ("--older-than-days", "0")
    for words in (("gc", *old), ("artifacts", "gc", *old), ("db", "backup", str(field.root / "backup"))):
        refused = field.json(*words, prefix=read_only)
        assert (refused.code, refused.error["code"]) == (5, "environment"), words
        assert str(root) in refused.error["message"]
        assert "read-only" in refused.error["message"].lower()
        assert refused.error["remedy"]
    assert field.scalar("SELECT COUNT(*) FROM runs") == 1
    assert not (field.root / "backup").exists()
    assert field.json("gc", *old, "--dry-run", prefix=read_only).code == 0
    assert len(field.json("gc", *old).data["runs"]["removed"]) == 1
    field.check_clean_end()


@mounts
@pytest.mark.timeout(300)
def test_a_worker_that_cannot_store_dispatches_nothing(field: Field) -> None:
    """The run was submitted where the store can be written; the pool sees it read-only."""
    file = keeping(field)
    root = field.database.parent / "artifacts"
    (field.folder / "out").mkdir()
    (field.folder / "out" / "result.txt").write_text("result")
    assert field.json("run", file).code == 0
    pool = field.pool(1, prefix=inside(f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}"))
    run_id = field.submit(file)
    ended = field.json("wait", run_id)
    assert (ended.code, ended.data["error"]["code"]) == (4, "artifact_store")
    assert str(root) in ended.data["error"]["message"]
    assert "read-only" in ended.data["error"]["message"]
    assert field.rows("SELECT status FROM effects WHERE run_id = ?", run_id) == []
    assert field.labels() == ["tick"]
    field.check_clean_end(drained=[pool])


@mounts
@pytest.mark.timeout(300)
def test_a_full_disk_pauses_the_run_and_loses_nothing(field: Field) -> None:
    """The store is on a small filesystem: the command has succeeded, its file stays, and with more room it is stored,
    while nothing is executed again."""
    root = field.database.parent / "artifacts"
    for folder in (root, field.folder / "out"):
        folder.mkdir(parents=True, mode=0o700)
    file = field.workflow(
        "large",
        [
            {
                "id": "large",
                "uses": "action:sh",
                "with": {
                    "args": ["-c", "echo x >> out/times; head -c 4000000 /dev/urandom > out/large"],
                    "artifacts": ["out/large"],
                },
            }
        ],
        actions={"sh": {"kind": "builtin.shell.exec", "command": "sh"}},
        policy={"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
    )
    small = inside(f"mount -t tmpfs -o size=1m none {root}")
    paused = field.json("run", file, "--workers", "1", prefix=small)
    assert (paused.code, paused.data["state"]) == (3, "paused"), paused.err
    run_id = paused.data["runId"]
    assert "No space left" in paused.data["pauseReason"]
    assert "free some space" in paused.data["pauseReason"]
    assert f"agentctl resume {run_id}" in paused.data["pauseReason"]
    assert "free some space" in field("status", run_id).out
    assert "out/large" in str(field.rows("SELECT expected_json FROM effects"))
    assert field.rows("SELECT status FROM effects") == [("succeeded",)]
    assert (field.folder / "out" / "large").stat().st_size == 4_000_000
    assert field.rows("SELECT 1 FROM artifact_blobs") == []
    resumed = field.json("resume", run_id, "--workers", "1")
    assert (resumed.code, resumed.data["state"], resumed.data["pauseReason"]) == (0, "succeeded", None)
    assert [item["path"] for item in field.json("artifacts", "list").data["references"]] == ["out/large"]
    assert (field.folder / "out" / "times").read_text() == "x\n"
    field.check_clean_end()
