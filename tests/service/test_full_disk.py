"""The disk of the database becomes full under a pool: it ends and says so, and goes on when there is room again."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, Started


def _may_mount() -> bool:
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    command = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="needs a mount namespace")
def test_a_pool_ends_and_goes_on_later(field: Field) -> None:
    place = field.folder / ".agentctl"
    place.mkdir()
    holder = field.spawn("unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=64m none {place}; exec sleep 900")
    inside = ("nsenter", "--mount", "-t", str(holder.pid), "--wd=" + str(field.folder))

    def run(*words: str) -> Any:
        return field.json(*words, prefix=inside)

    def start() -> Started:
        return field.start("workers", "start", "-n", "2", prefix=inside)

    wait_until(lambda: "tmpfs" in run("doctor").out, "the small disk is there", seconds=20)
    tasks = [field.tick_fan("t", 20, idempotent=False), field.tick_fan("u", 100, field.may_end, idempotent=False)]
    file = field.workflow("w", tasks, concurrency=4)
    run_id = run("submit", file).data["runId"]
    pool = start()
    wait_until(lambda: len(field.lines()) == 22, "twenty are done, and both workers are in the middle of one")
    subprocess.run([*inside, "sh", "-c", f"dd if=/dev/zero of={place}/fill bs=64k 2>/dev/null || true"], check=True)
    field.may_end.touch()
    ended = pool.wait(60)
    assert ended.code == 5, ended.err
    assert "is full" in ended.err
    assert "Traceback" not in ended.err
    found = {check["id"]: check for check in run("doctor").data["checks"]}
    assert found["disk_space"]["status"] == "fail"
    subprocess.run([*inside, "rm", f"{place}/fill"], check=True)
    again = start()  # as the service manager does
    assert run("wait", run_id).code in (0, 3)
    labels = field.labels()
    assert len(labels) == len(set(labels))
    uncertain = len(run("effects", "list", "--uncertain").data["effects"])
    succeeded = run("status", run_id).data["taskCounts"]["succeeded"]
    # The fan-outs themselves are tasks, too, when all of their children have succeeded.
    assert 120 <= succeeded + uncertain <= 122
    assert uncertain <= 2  # what the two workers had in hand
    assert run("db", "verify").code == 0
    field.stop(again)
    holder.popen.kill()
