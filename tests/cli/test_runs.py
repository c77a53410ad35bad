"""run, submit, wait, watch, cancel, resume, logs and the pool, end to end in real processes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.clock import SystemClock
from support.children import wait_until
from support.field import Field

CLOCK = SystemClock()


def script(text: str) -> str:
    return "script=" + json.dumps(text)


@pytest.fixture
def pool(cli: Any) -> Iterator[Any]:
    """A pool of two workers with a coordinator on the default database."""
    process = cli.start("workers", "start", "-n", "2", "--name", "p", "--drain-seconds", "2")
    try:
        wait_until(
            lambda: (
                cli.database.exists()
                and sum(w["state"] == "idle" for w in cli.json("workers", "list").data["workers"]) == 2
            ),
            "two idle workers",
        )
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def test_run_hello(cli: Any) -> None:
    result = cli.json("run", "hello.yaml", "--input", "name=Ada")
    assert result.code == 0
    assert result.err == ""
    assert result.data.keys() == {
        "runId",
        "traceId",
        "state",
        "reason",
        "cancelReason",
        "pauseReason",
        "output",
        "error",
    }
    assert (result.data["state"], result.data["output"]) == ("succeeded", {"text": "hello Ada"})
    human = cli("run", "hello.yaml")
    assert human.code == 0
    assert "started: hello, 1 task" in human.out
    assert "succeeded" in human.out
    assert '"text": "hello world"' in human.out
    assert "\x1b[" not in human.out


def test_a_failed_run_is_an_outcome_with_exit_4(cli: Any) -> None:
    result = cli.json("run", "shell.yaml", "--input", script("echo no >&2; exit 7"))
    assert (result.code, result.err) == (4, "")
    assert (result.data["state"], result.data["reason"]) == ("failed", "task_failed")
    run_id = result.data["runId"]
    human = cli("wait", run_id)
    assert human.code == 4
    assert "process_exit" in human.out
    assert f"next: `agentctl inspect {run_id}`" in human.out
    assert cli.json("wait", run_id).data == result.data
    assert cli("status", run_id).code == 0
    assert cli("inspect", run_id).code == 0
    log = cli.json("logs", run_id).data["attempts"]
    assert [(entry["exitCode"], entry["stderr"]) for entry in log] == [(7, "no\n")]
    assert "no\n" in cli("logs", run_id, log[0]["taskId"]).out
    assert cli.json("logs", run_id, "absent").error["code"] == "not_found"


EXTENSION = """\
case "$1" in
--agentctl-handshake)
  echo '{"protocolVersion":"agentctl.dev/process-extension/v1","name":"e","inputSchema":{},"outputSchema":{},\
"capabilities":[]}' ;;
*)
  echo note >&2
  echo '{"protocolVersion":"agentctl.dev/process-extension/v1","effectId":"'"$AGENTCTL_EFFECT_ID"'",\
"output":{"exitCode":9,"stdout":"never printed","stderr":"nor this"}}' ;;
esac
"""


def test_status_and_inspect_tell_why_a_run_has_failed(cli: Any) -> None:
    """Whoever has submitted a run and comes later has only these; and of many tasks the first of the list are fine."""
    of_a_task = cli.json("run", "shell.yaml", "--input", script("exit 7")).data["runId"]
    late = (cli.folder / "shell.yaml").read_text() + "  outputs: {no: '${{ inputs.script.nothing }}'}\n"
    cli.write("late.yaml", late)
    of_its_own = cli.json("run", "late.yaml", "--input", script("exit 0")).data["runId"]
    for verb in ("status", "inspect"):
        told = cli(verb, of_a_task).out
        assert re.search(r"\nfailed:\n  task each--0000-\w+ \(item=1\): process_exit: 'sh' exited with 7\n", told)
        assert re.search(r"\nfailed:\n  template_error: .*nothing", cli(verb, of_its_own).out)


def test_logs_of_an_extension_are_what_it_has_printed_not_what_it_answers(cli: Any) -> None:
    cli.write("e.sh", EXTENSION)
    action = {"kind": "extension.process", "command": "sh", "args": ["e.sh"], "idempotency": "pure"}
    contract = {"protocolVersion": "agentctl.dev/process-extension/v1", "inputSchema": {}, "outputSchema": {}}
    spec = {
        "policy": {"approval": "never", "processAllowlist": ["sh"]},
        "actions": {"e": action | contract},
        "tasks": [{"id": "e", "uses": "action:e"}],
    }
    document = {"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "e"}, "spec": spec}
    cli.write("e.yaml", json.dumps(document))
    result = cli.json("run", "e.yaml")
    assert (result.code, result.data["output"]["e"]["exitCode"]) == (0, 9)
    [log] = cli.json("logs", result.data["runId"]).data["attempts"]
    assert (log["exitCode"], log["stdout"], log["stderr"]) == (0, None, "note\n")


def test_a_program_that_does_not_exist_fails_its_task(cli: Any) -> None:
    text = (cli.folder / "shell.yaml").read_text()
    cli.write("absent.yaml", text.replace("command: sh", "command: absent-program").replace("[sh]", "[absent-program]"))
    result = cli.json("run", "absent.yaml")
    assert result.code == 4
    tasks = cli.json("inspect", result.data["runId"]).data["tasks"]
    assert tasks[0]["error"]["code"] == "command_not_found"


def test_a_run_that_has_ended_is_not_cancelled_or_resumed(cli: Any) -> None:
    run_id = cli.json("run", "hello.yaml").data["runId"]
    cancelled = cli.json("cancel", run_id)
    assert cancelled.code == 0
    assert cancelled.data == {"runId": run_id, "requested": False, "state": "succeeded"}
    resumed = cli.json("resume", run_id)
    assert (resumed.code, resumed.error["code"], resumed.error["runId"]) == (4, "already_terminal", run_id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_cancels_a_foreground_run(cli: Any, number: signal.Signals) -> None:
    process = cli.start("run", "shell.yaml", "--input", script("echo $$ > pid; exec sleep 60"), "--output", "json")
    pid = cli.folder / "pid"
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "its command runs")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    outcome = json.loads(out)["data"]
    assert (outcome["state"], outcome["reason"]) == ("cancelled", "cancel_requested")
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_a_run_whose_terminal_is_closed_stays_and_its_command_comes_to_its_end(cli: Any) -> None:
    """As `operations.md` says; closing a window is no decision about the run."""
    text = "echo once >> lines; until [ -e go ]; do /bin/sleep 0.05; done"
    run = cli.start("run", "shell.yaml", "--input", script(text))
    lines = cli.folder / "lines"
    wait_until(lines.exists, "the command")
    run.send_signal(signal.SIGHUP)
    assert run.wait(timeout=30) == -signal.SIGHUP
    assert cli.json("status", "@latest").data["state"] == "running"
    (cli.folder / "go").touch()
    wait_until(lambda: cli.json("status", "@latest").data["unrecorded"], "the end of the command")
    assert cli("resume", "@latest").code == 0
    assert lines.read_text() == "once\n"
    run.communicate(timeout=30)  # its worker has ended as well


def test_a_signal_at_any_moment_leaves_no_run_to_nobody(cli: Any) -> None:
    for round in range(12):
        process = cli.start("run", "shell.yaml", "--input", script("exec sleep 60"), "--output", "json")
        CLOCK.sleep(0.05 + 0.06 * round)  # the moment is what is varied
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            # Python loads the `.pth` files of its environment before any of our code, makes another error of an
            # interrupt in there, tells of it, and goes on. The next signal meets us.
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
            assert "Error processing line" in err and "KeyboardInterrupt" in err, err
        # An interpreter that is interrupted in its own start dies of it, or reports it; nothing of ours has run then.
        assert process.returncode in (130, -signal.SIGINT) or "init_import_site" in err, err
    if cli.database.exists():
        runs = cli.json("runs", "list").data["runs"]
        assert {run["state"] for run in runs} <= {"cancelled"}


def test_a_foreground_run_goes_on_when_its_stdout_is_lost(cli: Any) -> None:
    for arguments in ([], ["--output", "json"], ["--output", "jsonl"]):
        reader, writer = os.pipe()
        process = cli.start(
            "run", "shell.yaml", "--input", "items=[1,2,3,4,5,6]", "--input", script("sleep 0.6"), *arguments,
            stdout=writer,
        )  # fmt: skip
        os.close(writer)
        os.close(reader)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    assert {run["state"] for run in cli.json("runs", "list").data["runs"]} == {"succeeded"}


def test_plain_progress_is_at_most_a_line_a_second(cli: Any) -> None:
    began = CLOCK.monotonic()
    result = cli("run", "shell.yaml", "--input", "items=" + str(list(range(12))), "--input", script("sleep 0.5"))
    spent = CLOCK.monotonic() - began
    lines = [line for line in result.out.splitlines() if "done, " in line]
    assert result.code == 0
    assert 1 <= len(lines) <= spent + 1
    assert all("/13 done, " in line for line in lines)


def test_a_terminal_gets_live_progress(cli: Any) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {**cli.environment, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    program = "from agentctl.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "run", "shell.yaml", "--input", "items=[1,2,3,4,5,6,7,8]", "--input",
         script("sleep 0.5")],
        cwd=cli.folder, env=environment, stdout=follower, stderr=follower, stdin=follower,
    )  # fmt: skip
    os.close(follower)
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(leader, 65536):
                shown.extend(part)
        except OSError:
            return

    thread = threading.Thread(target=read)
    thread.start()
    assert process.wait(timeout=60) == 0
    thread.join(timeout=10)
    os.close(leader)
    text = shown.decode("utf-8", "replace")
    assert "/9" in text
    assert "\x1b[" in text
    assert "Traceback" not in text
    assert "succeeded" in text


def test_submit_without_a_coordinator_warns(cli: Any) -> None:
    result = cli("submit", "hello.yaml")
    assert result.code == 0
    assert result.out.startswith("run-")
    assert "no coordinator is live" in result.err
    as_json = cli("submit", "hello.yaml", "--output", "json")
    assert [item["code"] for item in json.loads(as_json.out)["diagnostics"]] == ["no_driver"]
    run_id = as_json.data["runId"]
    assert cli.json("status", run_id).data["waiting"][0]["why"] == "no_driver"
    waited = cli.json("wait", run_id, "--timeout-seconds", "0.2")
    assert (waited.code, waited.data["state"]) == (4, "running")
    cancelled = cli.json("cancel", run_id)
    assert cancelled.data == {"runId": run_id, "requested": True, "state": "cancelled"}
    assert cli.json("wait", run_id).code == 130


def test_resume_drives_a_run_that_nobody_drives(cli: Any) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    result = cli.json("resume", run_id)
    assert (result.code, result.data["state"], result.data["runId"]) == (0, "succeeded", run_id)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_resumes_what_a_pool_drives_looks_on_like_wait(cli: Any, pool: Any, number: signal.Signals) -> None:
    run_id = cli.json("submit", "shell.yaml", "--input", script("until test -e go; do sleep 0.1; done")).data["runId"]
    wait_until(lambda: cli.json("status", run_id).data["driver"] is not None, "the pool drives it")
    process = cli.start("resume", run_id)
    with closing(sqlite3.connect(cli.database)) as database:
        follows = "SELECT COUNT(*) FROM processes WHERE kind = 'run' AND stopped_at IS NULL"
        wait_until(lambda: database.execute(follows).fetchone() == (1,), "it follows")
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    status = cli.json("status", run_id).data
    assert (status["state"], status["cancelRequestedAt"]) == ("running", None)
    cli.write("go", "")
    assert cli.json("wait", run_id).data["state"] == "succeeded"


def test_an_idempotency_key_gives_the_same_run_back(cli: Any) -> None:
    first = cli.json("submit", "hello.yaml", "--idempotency-key", "k")
    again = cli.json("submit", "hello.yaml", "--idempotency-key", "k")
    assert (first.data["created"], again.data["created"]) == (True, False)
    assert again.data["runId"] == first.data["runId"]
    other = cli.json("submit", "hello.yaml", "--idempotency-key", "k", "--input", "name=Bob")
    assert (other.code, other.error["code"], other.error["runId"]) == (5, "conflict", first.data["runId"])
    ran = cli.json("run", "hello.yaml", "--idempotency-key", "k")
    assert (ran.code, ran.data["runId"]) == (0, first.data["runId"])
    assert cli.json("run", "hello.yaml", "--idempotency-key", "k").data == ran.data
    assert len(cli.json("runs", "list").data["runs"]) == 1


def test_a_pool_serves_what_is_submitted(cli: Any, pool: Any) -> None:
    result = cli("submit", "shell.yaml", "--input", "items=[1,2,3]", "--output", "json")
    assert (result.code, result.err) == (0, "")
    run_id = result.data["runId"]
    waited = cli.json("wait", run_id)
    assert (waited.code, waited.data["state"]) == (0, "succeeded")
    tasks = cli.json("inspect", run_id).data["tasks"]
    assert [task["deliveries"] for task in tasks] == [1, 1, 1, 0]
    workers = cli.json("workers", "list").data["workers"]
    assert {worker["name"] for worker in workers} == {"p-1", "p-2"}
    assert "p-1" in cli("workers", "list").out


def test_watch_and_cancel_from_other_shells(cli: Any, pool: Any) -> None:
    run_id = cli.json("submit", "shell.yaml", "--input", script("exec sleep 60"), "--input", "items=[1,2,3]").data[
        "runId"
    ]
    watching = cli.start("watch", run_id, "--output", "json")
    first = watching.stdout.readline()  # it has seen the run before that is cancelled
    wait_until(lambda: len(cli.json("status", run_id).data["running"]) == 2, "two of three run")
    status = cli.json("status", run_id).data
    assert {item["why"] for item in status["waiting"]} == {"place", "needs"}
    assert status["driver"]["liveness"] == "alive"
    assert "all 2 workers are busy" in cli("status", run_id).out
    cancelled = cli.json("cancel", run_id, "--reason", "not needed")
    assert (cancelled.code, cancelled.data["requested"]) == (0, True)
    out, err = watching.communicate(timeout=30)
    assert (watching.returncode, err) == (130, "")
    lines = [json.loads(line) for line in (first + out).splitlines()]
    assert len(lines) >= 2
    assert [line["kind"] for line in lines[:-1]] == ["RunStatus"] * (len(lines) - 1)
    assert lines[0]["data"]["state"] == "running"
    assert lines[-1]["kind"] == "RunOutcome"
    assert lines[-1]["data"]["state"] == "cancelled"
    record = cli.json("inspect", run_id).data["run"]
    assert record["cancelReason"] == "not needed"


def test_a_list_tells_of_runs_that_nobody_drives(cli: Any) -> None:
    """Its driver was killed, or there was never one: `running` alone would make everybody wait."""
    process = cli.start("run", "shell.yaml", "--input", script("exec sleep 60"), "--output", "json")
    wait_until(lambda: cli.database.exists() and bool(cli.json("runs", "list").data["runs"]), "there is a run")
    wait_until(lambda: bool(cli.json("status", "@latest").data["running"]), "its command runs")
    assert "no driver" not in cli("runs", "list").out
    process.kill()
    process.wait()
    assert cli("submit", "hello.yaml").code == 0
    dead, never = cli.json("runs", "list").data["runs"][::-1]
    assert (dead["driver"]["liveness"], never["driver"]) == ("dead", None)
    shown = cli("runs", "list").out
    assert shown.count("no driver") == 2
    assert "nobody drives 2 of these runs: `agentctl workers start` or `agentctl resume RUN` goes on" in shown
    assert cli("resume", never["runId"]).code == 0
    assert cli("cancel", dead["runId"]).code == 0
    shown = cli("runs", "list").out
    assert "no driver" not in shown and "nobody drives" not in shown


def test_a_foreground_run_that_is_cancelled_elsewhere_exits_130(cli: Any) -> None:
    process = cli.start("run", "shell.yaml", "--input", script("exec sleep 60"), "--output", "json")
    wait_until(lambda: cli.database.exists() and bool(cli.json("runs", "list").data["runs"]), "there is a run")
    wait_until(lambda: bool(cli.json("status", "@latest").data["running"]), "its command runs")
    run_id = cli.json("runs", "list").data["runs"][0]["runId"]
    assert cli("cancel", run_id).code == 0
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["data"]["state"] == "cancelled"


def test_leaving_watch_does_not_touch_the_run(cli: Any, pool: Any) -> None:
    waits = "until [ -e go ]; do sleep 0.05; done"
    run_id = cli.json("submit", "shell.yaml", "--input", script(waits)).data["runId"]
    watching = cli.start("watch", run_id, "--output", "json")
    watching.stdout.readline()  # an interpreter that still starts would die of the signal by itself
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=30)
    assert (watching.returncode, err) == (130, "")
    assert cli.json("status", run_id).data["state"] == "running"
    cli.write("go", "")
    assert cli.json("wait", run_id).data["state"] == "succeeded"


def test_watch_ends_when_nobody_reads(cli: Any, pool: Any) -> None:
    run_id = cli.json("submit", "shell.yaml", "--input", script("exec sleep 60")).data["runId"]
    for output in ("human", "json"):
        reader, writer = os.pipe()
        watching = cli.start("watch", run_id, "--output", output, stdout=writer)
        os.close(writer)
        os.close(reader)
        _, err = watching.communicate(timeout=30)
        assert (watching.returncode, err) == (141, "")
    assert cli.json("status", run_id).data["state"] == "running"
    cli("cancel", run_id)
    assert cli("wait", run_id).code == 130


def test_a_pool_that_drains_takes_nothing_new_so_a_run_here_has_its_own(field: Field) -> None:
    pool = field.pool(1, "--drain-seconds", "60")
    long = field.submit(field.workflow("long", [field.tick_task("long", 60, idempotent=True)]))
    field.busy(long)
    pool.signal(signal.SIGTERM)
    wait_until(lambda: field.workers("draining"), "its worker drains")
    ready = {check["id"]: check["status"] for check in field.json("doctor", "--ready").data["checks"]}
    assert ready["workers"] == "fail", "what is submitted now is executed by nobody"
    short = field.json("run", field.workflow("short", [field.tick_task("short", idempotent=True)]))
    assert (short.code, field.workers("draining") != []) == (0, True)
    assert field.json("cancel", long).code == 0
    pool.wait()


def test_a_run_here_that_a_coordinator_without_workers_has_taken_gets_workers_of_its_own(field: Field) -> None:
    """Between the creation of a run and its driver lies a moment, and coordinators look for runs that nobody drives."""
    struck = field.folder / "struck"
    here = field.start(
        "run",
        field.workflow("short", [field.tick_task("short", idempotent=True)]),
        env={"AGENTCTL_FAULT": f"after_create_run:stop@{struck}"},
    )
    wait_until(struck.exists, "the run is there and its command stands still")
    coordinator = field.start("coordinator", "start")
    driver = "SELECT p.kind FROM runs r JOIN processes p ON p.process_id = r.driver"
    wait_until(lambda: field.rows(driver) == [("coordinator",)], "the coordinator has taken it")
    here.popen.send_signal(signal.SIGCONT)
    assert here.wait().code == 0
    assert [line.label for line in field.lines()] == ["short"]
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait().code == 0


def test_drain_and_stop(cli: Any, pool: Any) -> None:
    drained = cli.json("workers", "drain", "p-1").data
    assert (drained["name"], drained["requested"]) == ("p-1", True)

    def states() -> dict[str, str]:
        return {w["name"]: w["state"] for w in cli.json("workers", "list").data["workers"]}

    wait_until(lambda: states() == {"p-1": "stopped", "p-2": "idle"}, "one worker has drained")
    stopped = cli.json("workers", "stop")
    assert stopped.code == 0
    assert [process["pid"] for process in stopped.data["signalled"]] == [pool.pid]
    assert pool.wait(timeout=30) == 0
    wait_until(lambda: states() == {"p-1": "stopped", "p-2": "stopped"}, "both have stopped")
    again = cli("workers", "stop")
    assert again.code == 0
    assert "no pool is live" in again.err


def test_status_is_quick_while_another_program_locks_the_database(cli: Any) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    locker = subprocess.Popen(
        [sys.executable, "-c",
         "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE');"
         "print('locked', flush=True); sys.stdin.read()", str(cli.database)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip
    assert locker.stdout is not None
    assert locker.stdout.readline() == "locked\n"
    try:
        for verb in (["status", run_id], ["inspect", run_id], ["runs", "list"], ["workers", "list"]):
            assert cli(*verb, timeout=10).code == 0
    finally:
        locker.communicate(timeout=10)


def test_a_run_of_a_newer_version_is_refused_by_every_verb(cli: Any) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    change = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('UPDATE runs SET plan_format_version = 99');"
        "c.commit(); c.close()"
    )
    subprocess.run([sys.executable, "-c", change, str(cli.database)], check=True)
    for verb in ("status", "inspect", "logs", "wait", "watch", "resume", "cancel"):
        result = cli.json(verb, run_id)
        assert (result.code, result.error["code"]) == (5, "incompatible_version"), verb
    assert [run["problem"]["code"] for run in cli.json("runs", "list").data["runs"]] == ["incompatible_version"]


def test_with_one_place_tasks_go_in_compiled_order_also_those_without_effect(cli: Any) -> None:
    """`first` was ready when `fails` was not yet: a failure that stands later in the plan does not take its place."""
    cli.write(
        "order.yaml",
        "apiVersion: agentctl.dev/v1\n"
        "kind: Workflow\n"
        "metadata: {name: order}\n"
        "spec:\n"
        "  policy: {approval: never}\n"
        "  actions: {put: {kind: builtin.memory.write}, ensure: {kind: builtin.assert}}\n"
        "  tasks:\n"
        "    - {id: p, uses: action:put, with: {key: one, value: 1}}\n"
        "    - {id: first, uses: action:put, with: {key: two, value: 2}}\n"
        "    - {id: fails, uses: action:ensure, needs: [p], with: {that: false}}\n"
        "    - {id: never, uses: action:put, with: {key: three, value: 3}}\n",
    )
    result = cli.json("run", "order.yaml")
    assert result.code == 4
    tasks = cli.json("inspect", result.data["runId"]).data["tasks"]
    assert [(task["taskId"], task["state"]) for task in tasks] == [
        ("p", "succeeded"), ("first", "succeeded"), ("fails", "failed"), ("never", "cancelled"),
    ]  # fmt: skip


def test_a_retry_that_is_due_at_once(cli: Any) -> None:
    """The task waits for its retry and is ready again within one commit: what is written last has to be `ready`."""
    cli.write("again.yaml", AGAIN)
    result = cli.json("run", "again.yaml", timeout=50)
    assert (result.code, result.data["state"]) == (4, "failed")
    assert cli.json("db", "verify").data["problems"] == []


AGAIN = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: again}
spec:
  policy: {approval: never, processAllowlist: [sh]}
  actions: {sh: {kind: builtin.shell.exec, command: sh, idempotency: idempotent}}
  tasks:
    - id: fails
      uses: action:sh
      retry: {maxAttempts: 2}
      with: {args: ["-c", "exit 1"]}
"""
