"""Field report 14: a collection deletes a blob that was stored a millisecond ago.

That a blob whose task never commits goes exactly when its lease is over is told of in the tests of the store, where
time stands still.
"""

from __future__ import annotations

import pytest
from support.artifacts import digest_of
from support.children import wait_until
from support.field import Field, kill
from support.scale import repeats

KIB_64 = 'head -c 65528 /dev/zero > "out/$1"; printf %08d "$1" >> "out/$1"'


def keeping(field: Field, name: str, count: int, script: str) -> str:
    """A fan-out in which every task declares the file that it writes."""
    return field.workflow(
        name,
        [
            {
                "id": "keep",
                "uses": "action:keep",
                "foreach": {"items": list(range(count)), "maxItems": count},
                "with": {
                    "args": ["-c", script, "sh", "${{ vars.item }}"],
                    "artifacts": ["out/${{ vars.item }}"],
                },
            }
        ],
        actions={"keep": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "idempotent"}},
        policy={"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
    )


@pytest.mark.timeout(1800)
def test_eight_workers_store_while_collections_run_in_a_loop(field: Field) -> None:
    count = repeats(5_000)
    (field.folder / "out").mkdir()
    pool = field.pool(8)
    run_id = field.submit(keeping(field, "many", count, KIB_64))
    collections = 0
    while field.scalar("SELECT state FROM runs WHERE run_id = ?", run_id) == "running":
        report = field.json("artifacts", "gc", "--older-than-days", "0")
        assert (report.code, report.data["removed"]) == (0, []), report.err
        collections += 1
    assert collections > 1
    assert field.json("wait", run_id).code == 0
    states = field.rows("SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id)
    assert states == [("succeeded", count + 1)]
    verified = field.json("artifacts", "verify").data
    assert (verified["checked"], verified["missing"], verified["corrupt"]) == (count, [], [])
    assert verified["bytes"] == count * 65536
    root = field.database.parent / "artifacts"
    for folder in ("tmp", "trash"):
        assert list((root / folder).iterdir()) == []
    # Nothing refers to any of it any more: all of it goes, and not before.
    gone = field.json("gc", "--older-than-days", "0").data
    assert (gone["runs"]["removed"], len(gone["artifacts"]["removed"])) == ([run_id], count)
    assert field.json("artifacts", "verify").data["checked"] == 0
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
def test_a_worker_is_killed_between_its_ingestion_and_its_commit(field: Field) -> None:
    (field.folder / "out").mkdir()
    marker = field.root / "struck"
    pool = field.pool(1, env={"AGENTCTL_FAULT": f"after_ingestion:stop@{marker}"})
    run_id = field.submit(keeping(field, "one", 1, 'echo hello > "out/$1"'))
    wait_until(marker.exists, "the artifact is stored, and its task is not finished")
    digest = digest_of(b"hello\n")
    assert field.scalar("SELECT digest FROM artifact_blobs") == digest
    assert field.rows("SELECT 1 FROM artifact_refs") == []
    [worker] = field.workers()
    kill(pool.pid, worker.pid, *[row[0] for row in field.rows("SELECT pid FROM processes WHERE stopped_at IS NULL")])
    report = field.json("artifacts", "gc", "--older-than-days", "0").data
    assert (report["considered"], report["removed"]) == (0, [])
    assert field.json("artifacts", "verify").data["ok"] is True
    # The next delivery finds the result recorded, and executes nothing again.
    resumed = field.json("resume", run_id, "--workers", "1")
    assert (resumed.code, resumed.data["state"]) == (0, "succeeded"), resumed.err
    assert field.rows("SELECT delivery FROM attempts") == [(2,)]
    assert field.rows("SELECT dispatches FROM effects") == [(1,)]
    assert field.scalar("SELECT digest FROM artifact_refs") == digest
    field.check_clean_end()
