"""`builtin.read`, `builtin.write` and `builtin.memory.write` on real files."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical, effect_id, input_digest
from agentctl.store.clock import SystemClock
from agentctl.store.database import Database
from agentctl.store.engine import Store
from agentctl.store.errors import TaskFault
from agentctl.store.gate import record_locks
from agentctl.store.policy import Policy, policy_name_of
from agentctl.worker.effects import (
    Done,
    EffectContext,
    EffectOutcome,
    EffectPlan,
    Work,
    files,
    prepare,
    register,
    supported,
)
from agentctl.worker.effects.paths import real_path

LIMIT = 1 << 20


class Token:
    """A token that was, or was not, cancelled before the dispatch."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def fileno(self) -> int:
        return -1

    @property
    def cancelled(self) -> bool:
        return self.reason is not None


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "w").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    return tmp_path


def work(base: Path, kind: str, given: dict[str, Any], **overrides: Any) -> Work:
    policy = {"workspaceRoot": "w", "writableRoots": ["out"]} | overrides.pop("policy", {})
    values: dict[str, Any] = {
        "task_id": "t",
        "action_name": "a",
        "kind": kind,
        "action": {},
        "input": given,
        "memory": {},
        "timeout_seconds": 10.0,
        "base_path": str(base),
        "policy": Policy.from_json(policy),
    }
    return Work(**(values | overrides))


def planned(wanted: Work) -> EffectPlan:
    made = prepare(wanted)
    assert isinstance(made, EffectPlan)
    assert made.policy_name == policy_name_of(made.operation)
    return made


def execute(plan: EffectPlan, effect: str = "e1", reason: str | None = None) -> EffectOutcome:
    outcome = plan.execute(EffectContext(effect, Token(reason), time.monotonic))
    canonical(outcome.result)
    canonical(outcome.error)
    return outcome


def refused(wanted: Work) -> TaskFault:
    with pytest.raises(TaskFault) as caught:
        prepare(wanted)
    return caught.value


def read(base: Path, path: Any, **overrides: Any) -> Work:
    return work(base, "builtin.read", {"path": path}, **overrides)


def write(base: Path, path: Any, content: Any = "new\n", **overrides: Any) -> Work:
    return work(base, "builtin.write", {"path": path, "content": content}, **overrides)


def files_under(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir() or p.is_symlink())


# -- registry -----------------------------------------------------------------------------------------------


def test_registry(base: Path) -> None:
    assert all(supported(kind) for kind in ("builtin.read", "builtin.write", "builtin.shell.exec"))
    assert not supported("builtin.unheard_of")
    assert refused(work(base, "builtin.unheard_of", {})).code == "unsupported_capability"
    register("test.done", lambda wanted: Done({"id": wanted.task_id}))
    assert prepare(work(base, "test.done", {})) == Done({"id": "t"})


# -- read ---------------------------------------------------------------------------------------------------


def test_read(base: Path) -> None:
    text = "é\r\nline without end"
    (base / "w" / "a.txt").write_bytes(text.encode())
    plan = planned(read(base, "a.txt"))
    assert (plan.operation, plan.effect_class, plan.risk) == ("builtin.read", "observe", "low")
    assert (plan.idempotency, plan.policy_name, plan.input) == ("idempotent", "filesystem.read", {"path": "a.txt"})
    assert execute(plan).result == {"status": "unchanged", "changed": False, "content": text}
    absolute = str(base / "w" / "a.txt")
    assert execute(planned(read(base, absolute))).status == "succeeded"


@pytest.mark.parametrize("path", ["../outside/secret", "sub/../a", "/etc/passwd", "link", "dir/secret", "up"])
def test_read_stays_inside(base: Path, path: str) -> None:
    (base / "w" / "link").symlink_to(base / "outside" / "secret")
    (base / "w" / "dir").symlink_to(base / "outside")
    (base / "w" / "up").symlink_to("..")
    assert refused(read(base, path)).code == "policy_denied"


@pytest.mark.parametrize("name", ["run.db", "run.db-shm", "run.db-wal", "other-name"])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_the_files_of_the_database_are_left_to_sqlite(base: Path, kind: str, name: str) -> None:
    """To open and close one of them drops the locks of the whole process, and others take the database for unused."""
    database = Database(base / "w" / "run.db", SystemClock(), create=True)
    try:
        os.link(base / "w" / "run.db-shm", base / "w" / "other-name")
        held = [record_locks(str(base / "w" / each)) for each in ("run.db", "run.db-shm")]
        assert all(held)
        roots = {"writableRoots": ["."]}
        fault = refused(read(base, name) if kind == "read" else write(base, name, policy=roots))
        assert fault.code == "policy_denied"
        assert [record_locks(str(base / "w" / each)) for each in ("run.db", "run.db-shm")] == held
    finally:
        database.close()
    (base / "w" / "run.db-wal").write_text("nobody's")
    assert execute(planned(read(base, "run.db-wal"))).status == "succeeded"


@pytest.mark.parametrize("way", ["w", "link", "w/../link"])
def test_nothing_is_written_where_the_database_has_its_own(base: Path, way: str) -> None:
    """A gate that is replaced is a gate for some and another one for the rest; the same with locks, sockets, blobs."""
    (base / "link").symlink_to("w")
    database = base / "w" / "run.db"
    store = Store(database, SystemClock(), create=True)
    wake = store.wakes.listen("somebody")
    try:
        with store.artifacts.blobs.locked(), store.artifacts.blobs.locked(".collect.lock"):
            pass
        (base / "w" / "artifacts" / "mine").write_text("of the user")
        own = [path for path in sorted((base / "w").rglob("*")) if path.name not in ("artifacts", "mine")]
        assert {path.name for path in own} >= {"run.db.gate", "run.db.gate-line", "somebody", "sha256", ".lock"}
        before = {path: path.stat().st_ino for path in own}
        policy = {"workspaceRoot": way, "writableRoots": ["."]}
        names = [str(path.relative_to(base / "w")) for path in own]
        for name in [*names, "run.db-journal", "run.db.wake/new", "artifacts/sha256/ab/cd"]:
            fault = refused(write(base, name, policy=policy))
            assert (fault.code, "belongs to the database" in fault.message) == ("policy_denied", True), name
        assert {path: path.stat().st_ino for path in own} == before
        for name in ("run.db.txt", "sub/run.db.gate", "artifacts/mine", "artifacts/sub/tmp"):
            assert execute(planned(write(base, name, policy=policy))).status == "succeeded", name
    finally:
        wake.close()
        store.close()
    assert execute(planned(write(base, "run.db.gate", policy=policy))).status == "succeeded", "nobody's any more"


def test_a_link_that_comes_to_lead_to_the_gate_is_not_followed(base: Path) -> None:
    store = Store(base / "w" / "run.db", SystemClock(), create=True)
    try:
        (base / "w" / "state").mkdir()
        plan = planned(write(base, "state/run.db.gate", policy={"writableRoots": ["."]}))
        (base / "w" / "state").rmdir()
        (base / "w" / "state").symlink_to(".")
        outcome = execute(plan)
        assert outcome.error is not None and outcome.error["code"] == "policy_denied"
        assert (base / "w" / "run.db.gate").read_bytes() == b""
    finally:
        store.close()


def test_the_kernel_resolves_paths_as_the_library_does(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("x")
    (folder / "odd (deleted)").write_text("x")
    os.mkfifo(folder / "pipe")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "chain").symlink_to("link/file")
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    (tmp_path / "round").symlink_to("round")
    (folder / "\udcff").write_text("x")
    names = ["folder", "link", "link/file", "link/../folder", "chain", "dangling", "round", "missing", "link/pipe"]
    for name in [*names, "folder/odd (deleted)", "folder/\udcff", "link/file/below", "", "folder//file", "n" * 300]:
        path = os.path.join(tmp_path, name)
        assert real_path(path) == os.path.realpath(path), name


def test_read_follows_links_that_stay_inside(base: Path) -> None:
    (base / "w" / "real").write_text("x")
    (base / "w" / "link").symlink_to("real")
    result = execute(planned(read(base, "link"))).result
    assert result is not None and result["content"] == "x"


def test_read_through_a_workspace_that_is_a_link(base: Path) -> None:
    (base / "w" / "a").write_text("x")
    (base / "alias").symlink_to("w")
    assert execute(planned(read(base, "a", policy={"workspaceRoot": "alias"}))).status == "succeeded"


@pytest.mark.parametrize("path", [None, 1, "", ["a"], "a\0b", "\ud800"])
def test_read_refuses_what_is_no_path(base: Path, path: Any) -> None:
    assert refused(read(base, path)).code == "invalid_input"


def test_read_of_what_is_no_file(base: Path) -> None:
    assert refused(read(base, "missing")).code == "not_found"
    (base / "w" / "folder").mkdir()
    assert refused(read(base, "folder")).code == "invalid_input"
    os.mkfifo(base / "w" / "fifo")
    assert refused(read(base, "fifo")).code == "invalid_input"
    (base / "w" / "loop").symlink_to("loop")
    assert refused(read(base, "loop")).code == "io_error"


def test_read_limits(base: Path) -> None:
    (base / "w" / "a").write_bytes(b"x" * LIMIT)
    assert execute(planned(read(base, "a"))).status == "succeeded"
    (base / "w" / "a").write_bytes(b"x" * (LIMIT + 1))
    outcome = execute(planned(read(base, "a")))
    assert outcome.status == "failed" and outcome.error is not None and outcome.error["code"] == "too_large"
    (base / "w" / "a").write_bytes(b"ab\xff")
    outcome = execute(planned(read(base, "a")))
    assert outcome.error is not None and outcome.error["code"] == "not_utf8"
    assert outcome.error["retryable"] is False


def test_read_checks_again_when_it_is_dispatched(base: Path) -> None:
    target = base / "w" / "a"
    target.write_text("x")
    plan = planned(read(base, "a"))
    target.unlink()
    gone = execute(plan)
    assert gone.error is not None and (gone.error["code"], gone.error["retryable"]) == ("not_found", True)
    target.symlink_to(base / "outside" / "secret")
    escaped = execute(plan)
    assert escaped.error is not None and escaped.error["code"] == "policy_denied"
    target.unlink()
    os.mkfifo(target)
    fifo = execute(plan)
    assert fifo.error is not None and fifo.error["code"] == "invalid_input"


def test_read_verifies_the_file_that_was_opened(base: Path) -> None:
    """Even when a folder is swapped for a link between resolving and opening."""
    (base / "w" / "d").symlink_to(base / "outside")
    with pytest.raises(TaskFault) as caught:
        files.read_text("d/secret", str(base / "w" / "d" / "secret"), str(base / "w"))
    assert caught.value.code == "policy_denied"


# -- write --------------------------------------------------------------------------------------------------


def test_write_of_a_new_file(base: Path) -> None:
    plan = planned(write(base, "out/x/y/a.txt", "hello\n"))
    assert (plan.operation, plan.effect_class, plan.risk) == ("builtin.write", "workspace_mutate", "medium")
    assert (plan.idempotency, plan.policy_name) == ("idempotent", "filesystem.write")
    digest = sha256(b"hello\n").hexdigest()
    assert plan.input == {"path": "out/x/y/a.txt", "contentDigest": digest}
    assert plan.expected_effect == {"path": "out/x/y/a.txt", "before": None, "changed": True, "diff": None}
    assert not (base / "w" / "out").exists()
    outcome = execute(plan)
    assert outcome.status == "succeeded"
    assert outcome.result == {
        "status": "changed",
        "changed": True,
        "before": None,
        "after": "hello\n",
        "diff": None,
        "path": "out/x/y/a.txt",
        "predictability": "fully_predictable",
    }
    assert files_under(base / "w") == ["out/x/y/a.txt"]
    assert (base / "w/out/x/y/a.txt").read_text() == "hello\n"


def test_identity_of_a_write_is_the_golden_one(base: Path) -> None:
    plan = planned(write(base, "artifacts/a.txt", "hello", policy={"writableRoots": ["artifacts"]}))
    digest = input_digest(plan.input)
    assert digest == "a7854b1d9b8470f3ddf3e3c13574f9e89c93890af858b527ffe1c5ae3efea3c3"
    expected = "e71541c8f28635fd4a4cbd63ea4af0956dd14521203d2a42b6b4d7cf49f3b52b"
    assert effect_id("run-1", "write", 1, 1, plan.operation, digest) == expected


def test_write_keeps_mode_and_leaves_no_temporary_file(base: Path) -> None:
    target = base / "w" / "out" / "a"
    target.parent.mkdir()
    target.write_text("old\n")
    target.chmod(0o750)
    inode = target.stat().st_ino
    outcome = execute(planned(write(base, "out/a")))
    assert outcome.result is not None and outcome.result["before"] == "old\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o750
    assert target.stat().st_ino != inode
    assert files_under(base / "w") == ["out/a"]


def test_a_new_file_follows_the_umask(base: Path) -> None:
    old = os.umask(0o027)
    try:
        execute(planned(write(base, "out/a")))
    finally:
        os.umask(old)
    assert stat.S_IMODE((base / "w/out/a").stat().st_mode) == 0o640


def test_unchanged_content_has_no_effect(base: Path) -> None:
    (base / "w" / "out").mkdir()
    (base / "w" / "out" / "a").write_text("same")
    made = prepare(write(base, "out/a", "same", show_diff=True))
    assert isinstance(made, Done)
    assert made.output["status"] == "unchanged" and made.output["changed"] is False
    assert made.output["before"] == made.output["after"] == "same" and made.output["diff"] is None
    forced = planned(write(base, "out/a", "same", force_effect=True))
    assert execute(forced).result == made.output


def test_a_second_delivery_reports_what_the_first_one_saw(base: Path) -> None:
    first = planned(write(base, "out/a", "new\n", show_diff=True))
    execute(first, "e1")
    again = planned(write(base, "out/a", "new\n", show_diff=True, recorded=first.expected_effect))
    assert again.input == first.input
    assert execute(again, "e1").result == execute(first, "e1").result
    result = execute(again, "e1").result
    assert result is not None and result["changed"] is True and result["before"] is None


def test_a_leftover_of_a_dead_dispatch_is_replaced(base: Path) -> None:
    (base / "w" / "out").mkdir()
    leftover = base / "w" / "out" / ".agentctl-e1.tmp"
    leftover.write_text("half")
    other = base / "w" / "out" / ".agentctl-e2.tmp"
    other.write_text("of another effect, maybe alive")
    assert execute(planned(write(base, "out/a", "whole")), "e1").status == "succeeded"
    assert files_under(base / "w") == ["out/.agentctl-e2.tmp", "out/a"]


def test_a_leftover_that_is_a_link_is_not_followed(base: Path) -> None:
    (base / "w" / "out").mkdir()
    (base / "w" / "out" / ".agentctl-e1.tmp").symlink_to(base / "outside" / "secret")
    assert execute(planned(write(base, "out/a", "whole")), "e1").status == "succeeded"
    assert (base / "outside" / "secret").read_text() == "secret"


def test_no_writable_root_means_no_write(base: Path) -> None:
    assert refused(write(base, "out/a", policy={"writableRoots": []})).code == "policy_denied"


def test_roots_may_be_absolute_and_outside(base: Path) -> None:
    root = str(base / "outside" / "deep" / "root")
    plan = planned(write(base, f"{root}/a", policy={"writableRoots": [root]}))
    assert execute(plan).status == "succeeded"
    assert Path(root, "a").read_text() == "new\n"
    assert refused(write(base, "out/a", policy={"writableRoots": [root]})).code == "policy_denied"


@pytest.mark.parametrize("path", ["a", "out/../a", "../w/out/a", "/tmp/a", "outx/a", "out/link/a", "out/file"])
def test_write_stays_under_its_roots(base: Path, path: str) -> None:
    out = base / "w" / "out"
    out.mkdir()
    (out / "link").symlink_to(base / "outside")
    (out / "file").symlink_to(base / "outside" / "secret")
    assert refused(write(base, path)).code == "policy_denied"
    assert files_under(base / "outside") == ["secret"]
    assert (base / "outside" / "secret").read_text() == "secret"


def test_write_through_a_link_inside_changes_what_it_points_to(base: Path) -> None:
    out = base / "w" / "out"
    out.mkdir()
    (out / "real").write_text("old")
    (out / "link").symlink_to("real")
    assert execute(planned(write(base, "out/link", "new"))).status == "succeeded"
    assert (out / "link").is_symlink() and (out / "real").read_text() == "new"


def swap_folder(base: Path) -> None:
    (base / "w" / "out" / "d").rename(base / "moved")
    (base / "w" / "out" / "d").symlink_to(base / "outside")


def swap_file(base: Path) -> None:
    (base / "w" / "out" / "d" / "secret").symlink_to(base / "outside" / "secret")


def swap_root(base: Path) -> None:
    (base / "w" / "out").rename(base / "moved")
    (base / "w" / "out").symlink_to(base / "outside")


@pytest.mark.parametrize("swap", [swap_folder, swap_file, swap_root])
def test_links_that_appear_before_the_dispatch(base: Path, swap: Callable[[Path], None]) -> None:
    (base / "w" / "out" / "d").mkdir(parents=True)
    plan = planned(write(base, "out/d/secret"))
    swap(base)
    outcome = execute(plan)
    assert outcome.error is not None and outcome.error["code"] == "policy_denied"
    assert files_under(base / "outside") == ["secret"]
    assert (base / "outside" / "secret").read_text() == "secret"


@pytest.mark.parametrize("swap", [swap_folder, swap_root])
def test_links_that_appear_after_the_last_look(base: Path, swap: Callable[[Path], None]) -> None:
    """The walk itself follows no link, so even a swap right after resolving leads nowhere."""
    (base / "w" / "out" / "d").mkdir(parents=True)
    swap(base)
    root = str(base / "w" / "out")
    with pytest.raises((TaskFault, OSError)):
        files._replace("p", root, f"{root}/d/secret", b"evil", ".tmp")
    assert files_under(base / "outside") == ["secret"]
    assert (base / "outside" / "secret").read_text() == "secret"


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "invalid_input"), (5, "invalid_input"), ({"a": 1}, "invalid_input"), ("\ud800", "invalid_input")],
)
def test_write_refuses_what_is_no_text(base: Path, content: Any, code: str) -> None:
    assert refused(write(base, "out/a", content)).code == code


def test_write_limits(base: Path) -> None:
    assert execute(planned(write(base, "out/a", "é" * (LIMIT // 2)))).status == "succeeded"
    assert refused(write(base, "out/a", "x" * (LIMIT + 1))).code == "too_large"
    (base / "w/out/big").write_bytes(b"x" * (LIMIT + 1))
    assert refused(write(base, "out/big")).code == "too_large"
    (base / "w/out/bin").write_bytes(b"\xff")
    assert refused(write(base, "out/bin")).code == "not_utf8"


def test_write_over_what_is_no_file(base: Path) -> None:
    (base / "w" / "out" / "d").mkdir(parents=True)
    assert refused(write(base, "out/d")).code == "invalid_input"
    assert refused(write(base, "out")).code == "invalid_input"
    os.mkfifo(base / "w" / "out" / "fifo")
    assert refused(write(base, "out/fifo")).code == "invalid_input"
    plan = planned(write(base, "out/late"))
    (base / "w" / "out" / "late").mkdir()
    outcome = execute(plan)
    assert outcome.status == "failed" and files_under(base / "w" / "out") == ["fifo"]


def test_a_file_in_the_place_of_a_folder(base: Path) -> None:
    (base / "w" / "out").mkdir()
    (base / "w" / "out" / "f").write_text("x")
    outcome = execute(planned(write(base, "out/f/a")))
    assert outcome.status == "failed" and outcome.error is not None
    assert (base / "w" / "out" / "f").read_text() == "x"


def test_a_name_that_is_too_long(base: Path) -> None:
    (base / "w" / "out").mkdir()
    longest = "n" * 255
    assert execute(planned(write(base, f"out/{longest}")), "e" * 64).status == "succeeded"
    outcome = execute(planned(write(base, f"out/{longest}n")), "e" * 64)
    assert outcome.error is not None and outcome.error["code"] == "io_error"
    assert files_under(base / "w" / "out") == [longest]


def test_a_full_device_leaves_the_old_file(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = base / "w" / "out" / "a"
    target.parent.mkdir()
    target.write_text("old")
    plan = planned(write(base, "out/a", "new"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    outcome = execute(plan)
    assert outcome.error is not None and outcome.error["code"] == "io_error" and outcome.error["retryable"]
    assert target.read_text() == "old" and files_under(base / "w") == ["out/a"]


def test_nothing_is_written_after_a_cancel(base: Path) -> None:
    outcome = execute(planned(write(base, "out/a")), reason="cancel_requested")
    assert outcome.status == "not_dispatched"
    assert not (base / "w" / "out").exists()


# -- diff ---------------------------------------------------------------------------------------------------


def apply(before: str | None, diff: str, folder: Path) -> str:
    """What `patch` makes of it."""
    target = folder / "f"
    if before is not None:
        target.write_bytes(before.encode())
    done = subprocess.run(["patch", "-p1", "-s", "-d", str(folder)], input=diff.encode(), check=False)
    assert done.returncode == 0, diff
    return target.read_bytes().decode() if target.exists() else ""


CASES = [
    (None, "a\nb\n"),
    ("", "a"),
    ("a\nb\n", "a\nB\n"),
    ("a\nb", "a\nb\n"),
    ("a\nb\n", "a\nb"),
    ("\n".join(map(str, range(100))), "\n".join(map(str, [*range(40), "x", *range(45, 100)]))),
    ("a\x0cb\u2028c\r\n", "a\x0cb\u2028d\r\n"),
    ("one\n" * 50, "two\n" * 60),
]


@pytest.mark.parametrize(("before", "after"), CASES)
@pytest.mark.parametrize("bound", [files.DIFF_WORK_LIMIT, 0])
def test_diffs_are_real_ones(
    tmp_path: Path, before: str | None, after: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "DIFF_WORK_LIMIT", bound)
    diff = files.unified_diff("f", before, after)
    assert diff.startswith("--- /dev/null\n+++ b/f\n@@" if before is None else "--- a/f\n+++ b/f\n@@")
    if subprocess.run(["which", "patch"], capture_output=True, check=False).returncode == 0:
        assert apply(before, diff, tmp_path) == after


def test_a_write_shows_its_diff_only_when_asked(base: Path) -> None:
    shown = "--- /dev/null\n+++ b/out/a\n@@ -0,0 +1 @@\n+x\n"
    for options, in_output in (({"show_diff": True}, None), ({"record_diff": True}, shown)):
        plan = planned(write(base, "out/a", "x\n", **options))
        assert plan.expected_effect["diff"] == shown
        assert plan.foreseen is not None and plan.foreseen["diff"] == in_output
    assert execute(plan).result == execute(plan).result


def test_large_texts_are_compared_in_bounded_time() -> None:
    before = "".join(f"a{i % 7}\n" for i in range(200_000))
    after = "".join(f"a{i % 5}\n" for i in range(200_000))
    started = time.thread_time()
    assert files.unified_diff("f", before, after).count("\n") > 200_000
    worst = "x\n" * 1999
    files.unified_diff("f", "p\n" + worst + "q\n", "r\n" + worst + "s\n")
    assert time.thread_time() - started < 10


# -- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "value", "changed"),
    [
        ({}, None, True),
        ({"k": None}, None, False),
        ({"k": 1}, 1, False),
        ({"k": 1}, 1.0, True),
        ({"k": True}, 1, True),
        ({"k": {"a": 1, "b": 2}}, {"b": 2, "a": 1}, False),
        ({"k": "é"}, "e\u0301", True),
    ],
)
def test_memory_write(base: Path, memory: dict[str, Any], value: Any, changed: bool) -> None:
    plan = planned(work(base, "builtin.memory.write", {"key": "k", "value": value}, memory=memory))
    assert (plan.operation, plan.effect_class, plan.risk) == ("builtin.memory.write", "internal_state", "low")
    assert (plan.idempotency, plan.policy_name) == ("keyed", "memory.write")
    assert execute(plan).result == {
        "status": "changed" if changed else "unchanged",
        "changed": changed,
        "before": memory.get("k"),
        "after": value,
        "key": "k",
    }


def test_memory_write_defaults_and_refusals(base: Path) -> None:
    result = execute(planned(work(base, "builtin.memory.write", {"key": "k"}))).result
    assert result is not None and result["after"] is None
    assert refused(work(base, "builtin.memory.write", {})).code == "invalid_input"
    assert refused(work(base, "builtin.memory.write", {"key": 3})).code == "invalid_input"
    assert refused(work(base, "builtin.memory.write", {"key": "k", "value": float("nan")})).code == "invalid_json_value"
