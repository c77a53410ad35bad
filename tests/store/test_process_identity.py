"""Identity, liveness and signalling of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from agentctl.store import process_identity as identities
from agentctl.store.errors import CorruptStore
from agentctl.store.process_identity import EFFECT_MARKER, Liveness, ProcessIdentity, parse_stat
from support.children import PATIENCE, wait_until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def identity_of(pid: int) -> ProcessIdentity:
    found = identities.of(pid)
    assert found is not None
    return found


def test_own_identity_is_stable_and_alive() -> None:
    me = identities.current()
    assert me == identities.current()
    assert me.pid == os.getpid()
    assert me.start_ticks > 0 and me.pid_namespace > 0 and me.boot_id
    assert identities.liveness(me) is Liveness.ALIVE


def test_text_form_comes_back() -> None:
    me = identities.current()
    assert ProcessIdentity.from_text(me.as_text()) == me


@pytest.mark.parametrize("text", ["", "a b c", "boot 1 2 x", "boot 1 2 -3", " 1 2 3", "boot 1 2 3 4", "boot  1 2"])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(CorruptStore):
        ProcessIdentity.from_text(text)


def test_a_reaped_process_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identity_of(sleeper.pid)
    assert identities.liveness(identity) is Liveness.ALIVE
    sleeper.kill()
    sleeper.wait()
    assert identities.liveness(identity) is Liveness.DEAD
    assert identities.of(sleeper.pid) is None
    assert not identities.kill(identity)


def test_a_zombie_is_dead_and_gets_no_signal(sleeper: subprocess.Popen[bytes]) -> None:
    identity = identity_of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert identities.liveness(identity) is Liveness.DEAD
    assert identities.of(sleeper.pid) is None
    assert not identities.kill(identity)


def test_a_recycled_pid_is_dead_and_is_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    other = replace(identity_of(sleeper.pid), start_ticks=1)
    assert identities.liveness(other) is Liveness.DEAD
    assert not identities.kill(other)
    assert sleeper.poll() is None


def test_another_boot_is_dead_whatever_the_pid(sleeper: subprocess.Popen[bytes]) -> None:
    other = replace(identity_of(sleeper.pid), boot_id="another", pid_namespace=1)
    assert identities.liveness(other) is Liveness.DEAD
    assert not identities.kill(other)
    assert sleeper.poll() is None


def test_another_namespace_is_unknown(sleeper: subprocess.Popen[bytes]) -> None:
    other = replace(identity_of(sleeper.pid), pid_namespace=1)
    assert identities.liveness(other) is Liveness.UNKNOWN
    assert not identities.kill(other)
    assert sleeper.poll() is None


def test_kill_hits_exactly_that_process(sleeper: subprocess.Popen[bytes]) -> None:
    assert identities.kill(identity_of(sleeper.pid), signal.SIGTERM)
    assert sleeper.wait(10) == -signal.SIGTERM


def test_a_stopped_process_is_alive(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity_of(sleeper.pid)
    assert not identities.is_stopped(known.as_text())
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert identities.liveness(known) is Liveness.ALIVE
    assert identities.is_stopped(known.as_text())
    recycled = replace(known, start_ticks=known.start_ticks + 1)
    assert not identities.is_stopped(recycled.as_text())
    assert not identities.is_stopped("no identity")
    assert identities.kill(known)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not identities.is_stopped(known.as_text())


def test_a_process_whose_first_thread_ended_is_alive() -> None:
    script = "import ctypes,threading,time;threading.Thread(target=time.sleep,args=(300,)).start();"
    script += "ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        stat = None

        def leader_gone() -> bool:
            nonlocal stat
            stat = identities.read_stat(process.pid)
            return stat is not None and stat.state == "Z"

        wait_until(leader_gone, "the leader is gone")
        assert stat is not None and stat.threads > 1 and not stat.dead
        assert identities.liveness(identity_of(process.pid)) is Liveness.ALIVE
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["sleep", "a b", "a) R 1 (b", ")", "((", "x\ny", ""])
def test_names_do_not_confuse_the_parser(name: str) -> None:
    fields = ["S", "7", "8", "9", *(["0"] * 13), "3", "0", "123456", "0", "0"]
    stat = parse_stat(f"42 ({name}) {' '.join(fields)}")
    assert (stat.pid, stat.name, stat.state, stat.parent, stat.group, stat.session) == (42, name, "S", 7, 8, 9)
    assert (stat.threads, stat.start_ticks) == (3, 123456)


def test_a_process_in_the_middle_of_an_exec_is_seen_as_such() -> None:
    def stat(flags: str, end_of_environment: str) -> identities.ProcessStat:
        fields = ["R", "1", "1", "1", "0", "0", flags, *(["0"] * 12), "5", *(["0"] * 28), end_of_environment, "0"]
        return parse_stat(f"42 (x) {' '.join(fields)}")

    assert stat("4194304", "0").in_exec
    assert not stat("4194304", "140737").in_exec
    assert not stat(str(0x00200000), "0").in_exec, "a kernel thread has no environment at all"
    me = identities.read_stat(os.getpid())
    assert me is not None and not me.in_exec


def test_a_real_process_with_a_strange_name() -> None:
    script = "open('/proc/self/comm','w').write('x) Z 1 (');print(flush=True);import time;time.sleep(300)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        stat = identities.read_stat(process.pid)
        assert stat is not None and stat.name == "x) Z 1 (" and stat.parent == os.getpid()
        assert identities.liveness(identity_of(process.pid)) is Liveness.ALIVE
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_pid_one_and_impossible_pids() -> None:
    assert identities.of(1) is not None
    assert identities.of(2**22 + 5) is None
    assert identities.read_stat(2**22 + 5) is None


# -- the marker ---------------------------------------------------------------------------------------------


def marked(effect: str, *argv: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, EFFECT_MARKER: effect}
    return subprocess.Popen(argv, env=environment, start_new_session=True, stdout=subprocess.PIPE)


def reap(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_kill_marked_ends_all_of_one_effect_and_nobody_else() -> None:
    effect, other = uuid4().hex, uuid4().hex
    mine = [marked(effect, "sleep", "300") for _ in range(3)]
    bystander = marked(other, "sleep", "300")
    longer = marked(effect + "0", "sleep", "300")
    try:
        assert identities.find_marked([effect]) == sorted(p.pid for p in mine)
        killed = identities.kill_marked([effect, "nobody"], wait_seconds=5)
        assert killed == sorted(p.pid for p in mine)
        assert identities.find_marked([effect]) == []
        assert all(p.wait(0) == -signal.SIGKILL for p in mine)
        assert bystander.poll() is None and longer.poll() is None
        assert identities.kill_marked([effect], wait_seconds=5) == []
    finally:
        reap(*mine, bystander, longer)


def test_kill_marked_finds_who_cleared_the_environment() -> None:
    effect = uuid4().hex
    script = (
        "env -i setsid sh -c 'echo $$; exec sleep 300' & env -i sh -c 'echo $$; exec sleep 300' & wait; exec sleep 300"
    )
    # It does not end by itself when its children are gone, or it would not always be there to be signalled.
    parent = marked(effect, "sh", "-c", script)
    assert parent.stdout is not None
    try:
        hidden = {int(parent.stdout.readline()) for _ in range(2)}
        assert hidden <= set(identities.find_marked([effect]))
        killed = identities.kill_marked([effect], wait_seconds=5)
        assert hidden | {parent.pid} <= set(killed)
        wait_until(lambda: all(identities.of(pid) is None for pid in hidden), "both are gone")
    finally:
        reap(parent)


def test_kill_marked_ends_stopped_and_stubborn_processes() -> None:
    effect = uuid4().hex
    stubborn = marked(effect, "sh", "-c", "trap '' TERM INT HUP; echo ready; while :; do sleep 300; done")
    stopped = marked(effect, "sleep", "300")
    assert stubborn.stdout is not None
    try:
        stubborn.stdout.readline()
        stopped.send_signal(signal.SIGSTOP)
        killed = identities.kill_marked([effect], wait_seconds=5)
        assert {stubborn.pid, stopped.pid} <= set(killed)
        assert stubborn.wait(0) == stopped.wait(0) == -signal.SIGKILL
    finally:
        reap(stubborn, stopped)


def test_kill_marked_of_nothing_is_quick() -> None:
    assert identities.kill_marked([], wait_seconds=5) == []
    started = time.monotonic()
    assert identities.kill_marked([uuid4().hex], wait_seconds=2 * PATIENCE) == []
    assert time.monotonic() - started < PATIENCE


def test_the_caller_is_never_a_target() -> None:
    effect = uuid4().hex
    script = (
        "import sys; from agentctl.store.process_identity import *;"
        f"print(find_marked(['{effect}']), kill_marked(['{effect}'], wait_seconds=1))"
    )
    process = marked(effect, sys.executable, "-c", script)
    assert process.stdout is not None
    try:
        assert process.stdout.read() == b"[] []\n"
        assert process.wait(10) == 0
    finally:
        reap(process)


def test_markers_are_whole_entries() -> None:
    block = b"A=1\0XAGENTCTL_EFFECT_ID=no\0AGENTCTL_EFFECT_ID=yes\0B=AGENTCTL_EFFECT_ID=no\0"
    assert identities.marker_ids(block) == ["yes"]
    assert identities.marker_ids(b"") == []
