"""Running real processes: capture, limits, stubborn children, and what they leave behind."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.errors import TaskFault
from agentctl.store.process_identity import EFFECT_MARKER, find_marked, kill_marked, read_stat
from agentctl.worker.effects import process
from agentctl.worker.effects.process import Command, Ending, ProcessResult
from support.children import wait_until
from support.clock import over_when

pytestmark = pytest.mark.usefixtures("subreaper")

AT_ONCE = 60.0
"""Far more than anything here takes, and far less than those sleep that nobody must wait for."""


class Token:
    """A cancel token over a pipe."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self.reason: str | None = None

    def fileno(self) -> int:
        return self._reader

    @property
    def cancelled(self) -> bool:
        return self.reason is not None

    def cancel(self, reason: str = "cancel_requested") -> None:
        self.reason = reason
        os.write(self._writer, b"x")

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def token() -> Iterator[Token]:
    made = Token()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_helper_of_multiprocessing() -> None:
    """Earlier tests may have left its resource tracker, which is a child of this process and no stray."""
    tracker = resource_tracker._resource_tracker
    if getattr(tracker, "_fd", None) is not None:
        tracker._stop()


def command(effect: str, *argv: str, **overrides: Any) -> Command:
    executable = process.resolve(argv[0])
    assert executable is not None
    values: dict[str, Any] = {
        "executable": executable,
        "argv": [a.encode() for a in argv],
        "environment": {EFFECT_MARKER.encode(): effect.encode(), b"PATH": b"/usr/bin:/bin"},
        "cwd": "/",
        "timeout_seconds": AT_ONCE,
    }
    return Command(**(values | overrides))


def sh(effect: str, script: str, **overrides: Any) -> Command:
    return command(effect, "sh", "-c", script, **overrides)


def py(effect: str, script: str, **overrides: Any) -> Command:
    return command(effect, sys.executable, "-c", script, **overrides)


def cancel_when(token: Token, condition: Callable[[], bool], reason: str = "cancel_requested") -> threading.Thread:
    """Cancel from another thread as soon as the condition holds."""

    def body() -> None:
        wait_until(condition, "the moment to cancel")
        token.cancel(reason)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def stopped(effect: str) -> bool:
    return any(stat is not None and stat.state == "T" for stat in map(read_stat, find_marked([effect])))


def gone(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.dead


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- the plain cases ----------------------------------------------------------------------------------------


def test_output_and_exit_code(effect: str, token: Token) -> None:
    before = descriptors()
    result = process.run(sh(effect, "echo out; echo err >&2; exit 7"), token)
    assert result == ProcessResult(Ending.EXITED, 7, None, b"out\n", b"err\n")
    assert descriptors() == before


def test_death_by_signal(effect: str) -> None:
    result = process.run(sh(effect, "echo a; kill -SEGV $$"))
    assert (result.ending, result.exit_code, result.signal) == (Ending.EXITED, None, signal.SIGSEGV)
    assert result.stdout == b"a\n"


def test_the_environment_is_exactly_what_was_given(effect: str) -> None:
    result = process.run(command(effect, "env", environment={b"A": b"1", b"B": b"\xff x=y"}))
    assert sorted(result.stdout.splitlines()) == [b"A=1", b"B=\xff x=y"]


def test_the_working_folder_is_set_and_restored(effect: str, tmp_path: Path) -> None:
    here = Path.cwd()
    assert process.run(command(effect, "pwd", cwd=str(tmp_path))).stdout == f"{tmp_path}\n".encode()
    assert Path.cwd() == here


def test_session_signals_and_descriptors(effect: str, tmp_path: Path) -> None:
    """Field report 11: no descriptor of the worker, not even an inheritable one, reaches a child."""
    inherited = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    old_usr1 = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    try:
        assert process.run(sh(effect, "ls /proc/$$/fd")).stdout == b"0\n1\n2\n"
        lines = process.run(command(effect, "cat", "/proc/self/status")).stdout.decode().splitlines()
        reported = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert int(reported["SigBlk"], 16) == 0
        # The C library itself leaves its two internal signals (32 and 33) ignored in what it spawns.
        assert int(reported["SigIgn"], 16) & ~0x1_8000_0000 == 0
        pid, group, session = process.run(
            sh(effect, "echo $$; cut -d' ' -f 5 /proc/$$/stat; cut -d' ' -f 6 /proc/$$/stat")
        ).stdout.split()
        assert pid == group == session
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.signal(signal.SIGUSR1, old_usr1)
        os.close(inherited)


def test_descriptors_without_the_c_function(effect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_close_range", None)
    inherited = os.open("/", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        assert process.run(sh(effect, "ls /proc/$$/fd")).stdout == b"0\n1\n2\n"
    finally:
        os.close(inherited)


def test_a_worker_without_standard_descriptors(effect: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            result = process.run(sh(effect, "cat; echo err >&2; echo out", stdin=b"in\n"))
            os._exit(0 if (result.stdout, result.stderr) == (b"in\nout\n", b"err\n") else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


# -- input --------------------------------------------------------------------------------------------------


def test_no_input_is_an_empty_one(effect: str) -> None:
    for stdin in (None, b""):
        result = process.run(command(effect, "cat", stdin=stdin))
        assert (result.exit_code, result.stdout) == (0, b"")


def test_large_input_and_output_at_once(effect: str) -> None:
    data = os.urandom(5_000_000)
    limits = {"stdout_limit": 8_000_000, "combined_limit": 8_000_000}
    result = process.run(command(effect, "cat", stdin=data, **limits))
    assert result.exit_code == 0 and result.stdout == data


@pytest.mark.parametrize("script", ["exec true", "exec <&-; echo done", "head -c 10 >/dev/null; exec <&-; sleep 0.05"])
def test_input_that_nobody_reads(effect: str, script: str) -> None:
    result = process.run(sh(effect, script, stdin=b"x" * 3_000_000))
    assert (result.ending, result.exit_code) == (Ending.EXITED, 0)


def test_a_child_that_closes_its_outputs_runs_on(effect: str) -> None:
    result = process.run(sh(effect, "echo a; exec >&- 2>&-; sleep 0.1; exit 3"))
    assert (result.exit_code, result.stdout) == (3, b"a\n")


# -- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "limits", "overflow"),
    [
        ("printf 12345678", {"stdout_limit": 8}, None),
        ("printf 123456789", {"stdout_limit": 8}, "stdout"),
        ("printf 123456789 >&2", {"stderr_limit": 8}, "stderr"),
        ("printf 12345; printf 12345 >&2", {"combined_limit": 10}, None),
        ("printf 12345; printf 123456 >&2", {"combined_limit": 10}, "combined"),
    ],
)
def test_limits_are_exact(effect: str, script: str, limits: dict[str, int], overflow: str | None) -> None:
    for _ in range(5):
        result = process.run(sh(effect, script, **limits))
        assert result.overflow == overflow
        assert result.ending is (Ending.OVERFLOW if overflow else Ending.EXITED)
        assert len(result.stdout) <= limits.get("stdout_limit", 99)
        assert len(result.stdout) + len(result.stderr) <= limits.get("combined_limit", 99)


def test_endless_output_is_bounded_in_memory_and_time(effect: str) -> None:
    """Field report 10 (e)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    result = process.run(sh(effect, "head -c 200000000 /dev/zero"))
    assert result.ending is Ending.OVERFLOW and result.overflow == "stdout"
    assert len(result.stdout) == 1 << 20
    assert time.monotonic() - started < AT_ONCE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_output_up_to_the_largest_limit(effect: str) -> None:
    limit = 16 << 20
    result = process.run(sh(effect, f"head -c {limit} /dev/zero", stdout_limit=limit, combined_limit=limit))
    assert result.ending is Ending.EXITED and len(result.stdout) == limit


def test_overflow_of_a_stubborn_printer(effect: str) -> None:
    started = time.monotonic()
    result = process.run(sh(effect, "trap '' TERM; yes", grace_seconds=0.2))
    assert result.ending is Ending.OVERFLOW
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []


# -- timeout and cancel: field report 10 --------------------------------------------------------------------


def test_a_background_child_holds_the_pipe(effect: str) -> None:
    """(a): the direct child's exit decides; the rest of its group is killed, and not waited for."""
    started = time.monotonic()
    result = process.run(sh(effect, "sleep 300 & echo hi"))
    assert (result.ending, result.exit_code, result.stdout) == (Ending.EXITED, 0, b"hi\n")
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []
    assert len(result.strays) == 1 and not result.strays[0].escaped
    assert result.survivors == []


def test_timeout_of_a_child_that_waits(effect: str) -> None:
    """(b)"""
    started = time.monotonic()
    result = process.run(sh(effect, "sleep 300", timeout_seconds=1.0))
    assert (result.ending, result.signal) == (Ending.TIMED_OUT, signal.SIGTERM)
    assert 1.0 <= time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []


def test_timeout_of_a_child_that_ignores_sigterm(effect: str, tmp_path: Path) -> None:
    """(c)"""
    started = time.monotonic()
    script = "trap 'echo no' TERM; echo begun; : > up; while :; do sleep 300; done"
    wanted = sh(effect, script, cwd=str(tmp_path), timeout_seconds=0.3, grace_seconds=0.5)
    result = process.run(wanted, monotonic=over_when((tmp_path / "up").exists))
    assert (result.ending, result.signal) == (Ending.TIMED_OUT, signal.SIGKILL)
    assert result.stdout.startswith(b"begun\n")
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []


def test_a_child_that_uses_its_grace(effect: str, tmp_path: Path) -> None:
    script = "trap 'echo cleaned; exit 5' TERM; echo ready; : > up; while :; do sleep 0.01; done"
    wanted = sh(effect, script, cwd=str(tmp_path), timeout_seconds=0.3, grace_seconds=AT_ONCE)
    result = process.run(wanted, monotonic=over_when((tmp_path / "up").exists))
    assert (result.ending, result.exit_code) == (Ending.TIMED_OUT, 5)
    assert result.stdout == b"ready\ncleaned\n"


def test_an_escaped_background_child_is_found(effect: str) -> None:
    """(d): found, killed and reported, not waited for."""
    started = time.monotonic()
    result = process.run(sh(effect, "setsid sleep 300 & echo hi"))
    assert (result.ending, result.exit_code, result.stdout) == (Ending.EXITED, 0, b"hi\n")
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []
    # Whether `setsid` had got as far as its own session when its parent ended is a matter of luck.
    assert len(result.strays) == 1


DAEMON = """
import fcntl
import os
ready, execs = os.pipe()
if os.fork():
    os.close(execs)
    os.read(ready, 1)  # ends when both daemons have been executed
    os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
if os.fork() == 0:
    os.setsid()
    os.execve("/bin/sleep", ["deep", "300"], {})
os.execve("/bin/sleep", ["daemon", "300"], {})
"""


def test_a_daemon_with_a_cleared_environment_is_found(effect: str) -> None:
    result = process.run(py(effect, DAEMON))
    assert (result.ending, result.exit_code) == (Ending.EXITED, 0)
    assert len(result.strays) == 2 and all(s.escaped for s in result.strays)
    assert all(gone(s.pid) for s in result.strays)
    assert not process._has_children()


def test_strays_that_print_for_ever(effect: str) -> None:
    started = time.monotonic()
    result = process.run(sh(effect, "setsid sh -c 'while :; do echo x; done' & exit 0"))
    assert result.exit_code == 0
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []


def test_many_strays_of_several_generations(effect: str, tmp_path: Path) -> None:
    deep = "sleep 300 & : > $$; wait"
    middle = f"setsid sh -c '{deep}' & sleep 300 & : > $$; wait"
    (tmp_path / "middle").write_text(middle)
    script = "for i in 1 2 3 4 5; do setsid sh middle & done; until [ $(ls | wc -l) = 11 ]; do sleep 0.01; done"
    result = process.run(sh(effect, script, cwd=str(tmp_path)))
    assert result.exit_code == 0
    assert find_marked([effect]) == [] and not process._has_children()
    assert len(result.strays) == 20
    assert len({s.pid for s in result.strays}) == 20


def test_children_that_ended_by_themselves_are_reaped_but_not_reported(effect: str) -> None:
    script = """
import os
for _ in range(5):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
"""
    result = process.run(py(effect, script))
    assert result.exit_code == 0 and result.strays == []
    assert not process._has_children()


ESCAPE = "setsid sh -c ': > up; exec sleep 300' & until [ -e up ]; do sleep 0.01; done; "


def test_own_children_of_the_worker_are_left_alone(effect: str, tmp_path: Path) -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "300"], {})
    try:
        result = process.run(sh(effect, ESCAPE, cwd=str(tmp_path)))
        assert len(result.strays) == 1
        assert not gone(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_strays_without_a_subreaper_are_found_by_their_marker(effect: str, tmp_path: Path) -> None:
    process.become_subreaper(False)
    result = process.run(sh(effect, ESCAPE + "echo hi", cwd=str(tmp_path)))
    assert (result.exit_code, result.stdout) == (0, b"hi\n")
    assert [s.escaped for s in result.strays] == [True]
    assert find_marked([effect]) == []


def test_a_stopped_child(effect: str) -> None:
    started = time.monotonic()
    wanted = sh(effect, "kill -STOP $$; echo never", timeout_seconds=0.3, grace_seconds=2 * AT_ONCE)
    result = process.run(wanted, monotonic=over_when(lambda: stopped(effect)))
    assert (result.ending, result.signal, result.stdout) == (Ending.TIMED_OUT, signal.SIGTERM, b"")
    assert time.monotonic() - started < AT_ONCE


def test_a_stopped_child_that_ignores_sigterm(effect: str) -> None:
    script = (
        "import os,signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: os.kill(os.getpid(), signal.SIGSTOP)"
    )
    started = time.monotonic()
    wanted = py(effect, script, timeout_seconds=0.3, grace_seconds=0.3)
    result = process.run(wanted, monotonic=over_when(lambda: stopped(effect)))
    assert (result.ending, result.signal) == (Ending.TIMED_OUT, signal.SIGKILL)
    assert time.monotonic() - started < AT_ONCE


@pytest.mark.parametrize("reason", ["cancel_requested", "drain", "lease_lost", "deadline"])
def test_cancel_ends_the_process(effect: str, token: Token, reason: str) -> None:
    thread = cancel_when(token, lambda: bool(find_marked([effect])), reason)
    started = time.monotonic()
    result = process.run(sh(effect, "sleep 300"), token)
    thread.join()
    assert (result.ending, result.reason, result.signal) == (Ending.CANCELLED, reason, signal.SIGTERM)
    assert time.monotonic() - started < AT_ONCE
    assert find_marked([effect]) == []


def test_cancel_ends_escaped_processes_too(effect: str, token: Token) -> None:
    script = "setsid sleep 301 & sleep 302"
    thread = cancel_when(token, lambda: len(find_marked([effect])) >= 3)
    result = process.run(sh(effect, script), token)
    thread.join()
    assert result.ending is Ending.CANCELLED
    assert find_marked([effect]) == []


def test_cancel_costs_no_cpu_during_the_grace(effect: str, token: Token) -> None:
    """The token stays readable; waiting for the grace must not turn into a hot loop."""
    script = "trap '' TERM; echo; while :; do sleep 1; done"
    thread = cancel_when(token, lambda: bool(find_marked([effect])))
    cpu = time.thread_time()
    result = process.run(sh(effect, script, grace_seconds=1.0), token)
    thread.join()
    assert result.signal in (signal.SIGKILL, signal.SIGTERM)
    assert time.thread_time() - cpu < 0.3


def test_the_timeout_is_measured_by_the_given_clock(effect: str) -> None:
    readings = iter([0.0, 0.0, 100.0])
    result = process.run(sh(effect, "echo a; sleep 300", timeout_seconds=50), monotonic=lambda: next(readings, 100.0))
    assert result.ending is Ending.TIMED_OUT


def test_a_process_that_ended_while_the_worker_was_held_up_did_end(effect: str) -> None:
    def held_up() -> float:
        wait_until(process._has_children, "the child")
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return next(readings)

    readings = iter([0.0, 100.0])
    result = process.run(sh(effect, "echo a; exit 4", timeout_seconds=50), monotonic=held_up)
    assert (result.ending, result.exit_code, result.stdout) == (Ending.EXITED, 4, b"a\n")


def test_an_interrupted_worker_leaves_nothing_behind(effect: str) -> None:
    class Stop(BaseException):
        pass

    def raiser() -> float:
        if find_marked([effect]):
            raise Stop
        return 0.0

    before = descriptors()
    with pytest.raises(Stop):
        process.run(sh(effect, "sleep 300"), monotonic=raiser)
    assert find_marked([effect]) == [] and not process._has_children()
    assert descriptors() == before


# -- what cannot be started ---------------------------------------------------------------------------------


def fault_of(wanted: Command) -> TaskFault:
    before = descriptors()
    here = Path.cwd()
    with pytest.raises(TaskFault) as caught:
        process.run(wanted)
    assert descriptors() == before
    assert Path.cwd() == here
    return caught.value


def test_a_missing_program(effect: str) -> None:
    fault = fault_of(command(effect, "/nowhere/tool"))
    assert (fault.code, fault.retryable) == ("command_not_found", True)
    assert process.resolve("no-such-program-anywhere") is None


def test_a_missing_interpreter(effect: str, tmp_path: Path) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/nowhere/interpreter\n")
    script.chmod(0o755)
    fault = fault_of(command(effect, str(script)))
    assert (fault.code, fault.retryable) == ("spawn_failed", True)
    assert "interpreter" in fault.message


def test_a_program_that_may_not_be_executed(effect: str, tmp_path: Path) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/bin/sh\n")
    fault = fault_of(command(effect, str(script)))
    assert (fault.code, fault.retryable) == ("spawn_failed", True)
    assert fault.details is not None and fault.details["errno"] == "EACCES"


def test_no_program_at_all(effect: str, tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("noise", b"\0\1\2")):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o755)
        assert fault_of(command(effect, str(tmp_path / name))).code == "spawn_failed"
    assert fault_of(command(effect, str(tmp_path))).code == "spawn_failed"


def test_a_missing_working_folder(effect: str, tmp_path: Path) -> None:
    fault = fault_of(sh(effect, "true", cwd=str(tmp_path / "gone")))
    assert (fault.code, fault.retryable) == ("spawn_failed", True)
    assert "folder" in fault.message


def test_too_many_arguments(effect: str) -> None:
    fault = fault_of(command(effect, "true", *["x" * 100_000] * 60))
    assert (fault.code, fault.retryable) == ("spawn_failed", False)


def test_no_descriptors_left(effect: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(n) for n in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    taken = []
    try:
        try:
            while True:
                taken.append(os.dup(1))
        except OSError:
            pass
        with pytest.raises(TaskFault) as caught:
            process.run(sh(effect, "true"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    assert (caught.value.code, caught.value.retryable) == ("spawn_failed", True)


def test_relative_commands_start_in_the_working_folder(effect: str, tmp_path: Path) -> None:
    script = tmp_path / "tool"
    script.write_text("#!/bin/sh\necho here\n")
    script.chmod(0o755)
    assert process.run(command(effect, "./tool", cwd=str(tmp_path))).stdout == b"here\n"


def test_relative_entries_of_the_search_path_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert process.resolve("tool", ".::/bin") is None
    assert process.resolve("tool", f"/nowhere:{tmp_path}") == os.fsencode(tmp_path / "tool")


# -- cost ---------------------------------------------------------------------------------------------------


def test_the_worker_pays_little_for_a_process(effect: str, token: Token) -> None:
    """Own processor time per process; the kernel's share of a start is in it."""
    wanted = command(effect, "true")
    process.run(wanted, token)
    started = time.thread_time()
    for _ in range(100):
        process.run(wanted, token)
    assert (time.thread_time() - started) / 100 < 0.002


# -- a worker's death: field report 11 ----------------------------------------------------------------------

WORKER = """
import fcntl, sys
from agentctl.worker.effects import process
lock = open(sys.argv[2], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock_again = open(sys.argv[2], "r")
process.become_subreaper()
script = "setsid sleep 300 & env -i setsid sleep 300 & sleep 300"
effect = sys.argv[1].encode()
command = process.Command(b"/bin/sh", [b"sh", b"-c", script.encode()], {b"AGENTCTL_EFFECT_ID": effect}, "/", 300.0)
process.run(command)
"""


def test_what_a_dead_worker_leaves_holds_no_lock_and_is_found(effect: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, effect, str(lock)], stderr=subprocess.PIPE)
    assert worker.stderr is not None

    def sleepers() -> list[int]:
        stats = [read_stat(pid) for pid in find_marked([effect])]
        return [stat.pid for stat in stats if stat is not None and stat.name == "sleep"]

    try:
        # The third sleeper, whose environment and session are its own, is known by its parent as long as that lives.
        wait_until(lambda: len(sleepers()) == 3, "all three sleepers")
        left = sleepers()
        worker.kill()
        worker.wait()
        for pid in left:
            assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"]
            assert not any(str(lock) in str(p.readlink()) for p in Path(f"/proc/{pid}/fd").iterdir())
        with lock.open() as mine:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        started = time.monotonic()
        assert set(left) <= set(kill_marked([effect], wait_seconds=2 * AT_ONCE))
        assert time.monotonic() - started < AT_ONCE
        assert all(gone(pid) for pid in left)
    finally:
        worker.kill()
        worker.wait()
        worker.stderr.close()


def test_workers_that_die_while_they_start_processes(effect: str) -> None:
    """Killed at any moment, the start itself included: nothing of the effect is left after `kill_marked`."""
    script = """
import sys
from agentctl.worker.effects import process
process.become_subreaper()
effect = sys.argv[1].encode()
command = process.Command(b"/bin/sleep", [b"sleep", b"0.002"], {b"AGENTCTL_EFFECT_ID": effect}, "/", 300.0)
last = process.Command(b"/bin/sleep", [b"sleep", b"300"], {b"AGENTCTL_EFFECT_ID": effect}, "/", 300.0)
print(flush=True)
for _ in range(int(sys.argv[2])): process.run(command)
process.run(last)
"""
    for starts in range(12):
        argv = [sys.executable, "-c", script, effect, str(starts)]
        worker = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        worker.stdout.readline()
        wait_until(lambda: bool(find_marked([effect])), "a process of the effect")
        worker.kill()
        worker.wait()
        worker.stdout.close()
        kill_marked([effect], wait_seconds=5)
        assert find_marked([effect]) == []
