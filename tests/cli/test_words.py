"""What a person is told: the remedy that fits the fault, the name that is known, and nothing twice."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.field import PROGRAM, Field

RAW = b"\xff"

WITH_NAMES = [
    ("status", RAW),
    ("inspect", RAW),
    ("logs", RAW),
    ("logs", b"@latest", RAW),
    ("events", RAW),
    ("wait", RAW),
    ("watch", RAW),
    ("resume", RAW),
    ("pause", RAW),
    ("pause", b"@latest", "--reason", RAW),
    ("cancel", RAW),
    ("cancel", b"@latest", "--reason", RAW),
    ("cancel", b"@latest", "--actor", RAW),
    ("effects", "list", RAW),
    ("effects", "list", b"@latest", "--task", RAW),
    ("effects", "inspect", RAW),
    ("effects", "reconcile", RAW, "--status", "applied", "--reason", "x"),
    ("effects", "reconcile", b"x", "--status", "applied", "--reason", RAW),
    ("approvals", "list", RAW),
    ("approvals", "approve", RAW),
    ("approvals", "reject", b"x", "--actor", RAW),
    ("approvals", "reject", b"x", "--reason", RAW),
    ("workers", "drain", RAW),
    ("workers", "start", "-n", "1", "--name", RAW),
    ("runs", "list", "--next", RAW),
    ("run", "w.yaml", "--input", b"name=" + RAW),
    ("run", "w.yaml", "--input", RAW + b"=1"),
    ("run", "w.yaml", "--inputs", b'{"name": "' + RAW + b'"}'),
    ("submit", "w.yaml", "--idempotency-key", RAW),
]


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    made = Field(tmp_path)
    yield made
    made.close()


@pytest.fixture
def waiting(field: Field) -> str:
    """A run that a person has to let go on."""
    return str(field.json("run", gated(field)).data["runId"])


def gated(field: Field) -> str:
    policy = {"processAllowlist": ["tick"]}
    return field.workflow("w", [field.tick_task("a", idempotent=False)], policy=policy, inputs={"name": "x"})


def test_bytes_that_are_no_text_are_refused_wherever_they_stand(field: Field, waiting: str) -> None:
    """Only UTF-8 can be looked up or recorded. Nothing is changed, and it is no internal error."""
    before = field.rows("SELECT run_id, state, revision, audit_sequence FROM runs")
    for arguments in WITH_NAMES:
        result = field.json(*arguments, limit=20)
        assert (result.code, result.error["code"]) == (2, "usage"), arguments
        assert "UTF-8" in result.error["message"] or "printable" in result.error["message"], arguments
        assert result.error["remedy"], arguments
    assert field.rows("SELECT run_id, state, revision, audit_sequence FROM runs") == before
    assert field.rows("SELECT name FROM processes WHERE kind = 'supervisor'") == []


def test_names_of_files_may_be_any_bytes(field: Field) -> None:
    name = os.fsencode(field.folder) + b"/odd" + RAW + b".yaml"
    os.rename(field.folder / gated(field), name)
    assert field("check", name).code == 0


def test_a_lone_surrogate_in_inputs_gets_a_remedy_that_fits(field: Field) -> None:
    result = field.json("run", gated(field), "--inputs", '{"name": "\\ud800"}')
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "surrogate" in result.error["message"]
    assert "pair" in result.error["remedy"]


@pytest.mark.parametrize("arguments", [("--db", ""), ("--db", ".")])
def test_an_empty_name_is_no_database(field: Field, arguments: tuple[str, ...]) -> None:
    result = field.json("runs", "list", *arguments)
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "--db" in result.error["message"]


@pytest.mark.parametrize("kind", ["empty", "pipe", "large", "folder"])
def test_what_is_no_document_gets_a_remedy_that_fits(field: Field, kind: str) -> None:
    path = field.folder / "w.yaml"
    if kind == "empty":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(b"#" * (1 << 20) + b"\n")
    else:
        path.mkdir()
    words = {"empty": "write a workflow", "pipe": "saved first", "large": "--inputs-file", "folder": "name of a file"}
    for verb in ("check", "plan", "run"):
        result = field(verb, path, limit=20)
        assert result.code == 2
        assert words[kind] in result.err, result.err
    assert not field.database.exists()


# -- output that is lost -----------------------------------------------------------------------------------------------


def into_full(field: Field, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdout takes nothing."""
    started = field.spawn("/bin/sh", "-c", '"$@" > /dev/full', "sh", *PROGRAM, *arguments)
    result = started.wait()
    return result.code, result.err


@pytest.mark.parametrize("output", ["human", "json"])
def test_output_that_nobody_takes_is_an_error(field: Field, waiting: str, output: str) -> None:
    commands = [("runs", "list"), ("version",), ("status", waiting), ("inspect", waiting), ("check", "w.yaml")]
    if output == "human":
        commands += [("schema",), ("--help",), ("run", "--help"), ("completion", "bash")]
    for command in commands:
        code, err = into_full(field, *command, "--output", output)
        assert code == 5, command
        assert err.count("the output cannot be written: No space left on device") == 1, (command, err)


def test_a_run_whose_output_is_lost_goes_on_and_says_so_once(field: Field) -> None:
    """Its exit code tells how it has ended."""
    file = field.workflow("w", [field.tick_task("a", idempotent=False)])
    for output in ("human", "json", "jsonl"):
        code, err = into_full(field, "run", file, "--output", output)
        assert code == 0
        assert err.count("No space left on device") == 1, err
        assert "the work goes on without it" in err
    assert field.labels() == ["a", "a", "a"]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_that_has_ended_can_neither_be_resumed_nor_paused(field: Field) -> None:
    """Exit 4 (contract 4.10), and where to look."""
    run_id = field.json("run", field.workflow("w", [field.tick_task("a", idempotent=False)])).data["runId"]
    for verb in ("resume", "pause"):
        error = field.json(verb, run_id).error
        assert (error["exitCode"], error["code"], error["runId"]) == (4, "already_terminal", run_id)
        assert "succeeded" in error["message"]
        assert f"agentctl inspect {run_id}" in error["remedy"]


def test_the_outcome_says_that_the_time_was_over(field: Field) -> None:
    file = field.workflow("w", [field.tick_task("a", 60, idempotent=False)])
    result = field.json("run", file, "--timeout-seconds", "0.5")
    assert (result.code, result.data["reason"]) == (130, "cancel_requested")
    assert result.data["cancelReason"] == "--timeout-seconds 0.5 is over"
    assert "--timeout-seconds 0.5 is over" in field("status", result.data["runId"]).out
    told = field("run", file, "--timeout-seconds", "0.5")
    assert told.code == 130
    assert "cancelled (cancel_requested: --timeout-seconds 0.5 is over)" in told.out


def test_a_run_that_goes_on_is_timed_until_now(field: Field) -> None:
    """Nothing happens in it, so its row is as old as its beginning."""
    run_id = field.submit(field.workflow("w", [field.tick_task("a", idempotent=False)]))
    field.change("UPDATE runs SET created_at = created_at - 60000, updated_at = updated_at - 60000")
    result = field("wait", run_id, "--timeout-seconds", "0.1")
    assert result.code == 4
    seconds = int(result.out.split(" after ")[1].split(" ")[0])
    assert 60 <= seconds < 600, result.out


def test_the_fault_of_the_only_task_is_told_once(field: Field) -> None:
    action = {"x": {"kind": "builtin.shell.exec", "command": "sh"}}
    task = {"id": "a", "uses": "action:x", "with": {"args": ["-c", "exit 3"]}}
    result = field("run", field.workflow("w", [task], actions=action))
    assert result.code == 4
    assert result.out.count("exited with 3") == 1, result.out


def test_the_run_is_named_in_what_to_do_next(field: Field) -> None:
    run_id = field.submit(field.workflow("w", [field.tick_task("a", idempotent=False)]))
    told = field("status", run_id)
    assert f"agentctl resume {run_id}" in told.out
    assert "resume RUN" not in told.out
    assert field("pause", run_id).code == 0
    [waiting] = field.json("status", run_id).data["waiting"]
    assert waiting["why"] == "paused"
    assert f"agentctl resume {run_id}" in waiting["detail"]


def test_the_status_after_a_stop_tells_what_became_of_running_tasks(field: Field) -> None:
    """The coordinator ended first, so nobody has recorded what the workers have finished."""
    pool = field.pool(2, "--no-coordinator")
    coordinator = field.coordinator()
    run_id = field.submit(field.workflow("w", [field.tick_fan("t", 3, field.may_end, idempotent=False)], concurrency=2))
    wait_until(lambda: len(field.lines()) == 2, "two run")
    field.stop(coordinator)
    field.may_end.touch()
    field.stop(pool)
    data = field.json("status", run_id).data
    assert data["taskCounts"]["running"] == 2
    assert data["running"] == []
    assert [(task["attempt"], task["outcome"]) for task in data["unrecorded"]] == [(1, "succeeded")] * 2
    told = field("status", run_id).out
    assert all(f"{task['taskId']}: attempt 1 succeeded" in told for task in data["unrecorded"]), told
    assert field.json("resume", run_id).code == 0
    assert field.json("status", run_id).data["unrecorded"] == []
    assert len(field.lines()) == 3


def test_the_status_tells_who_of_the_workers_is_dead(field: Field) -> None:
    pool = field.pool(1)
    run_id = field.submit(field.workflow("w", [field.tick_task("a", 60, idempotent=False)]))
    field.busy(run_id)
    effects = field.effect_processes()
    for pid in field.processes():
        if pid not in effects:
            os.kill(pid, signal.SIGKILL)
    pool.popen.wait()
    [task] = field.json("status", run_id).data["running"]
    assert task["workerLiveness"] == "dead"
    assert f"{task['workerId']} (dead), for" in field("status", run_id).out


def test_numbers_in_words(field: Field) -> None:
    run_id = field.json("run", field.workflow("w", [field.tick_task("a", idempotent=False)])).data["runId"]
    effect = field.scalar("SELECT effect_id FROM effects WHERE run_id = ?", run_id)
    assert "sent once" in field("effects", "inspect", effect).out


def test_what_was_settled_is_told_in_words(field: Field) -> None:
    pool = field.pool(1)
    run_id = field.submit(field.workflow("w", [field.tick_task("a", 60, idempotent=False)]))
    worker = field.busy(run_id)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: "attempts settled" in pool.err, "it is told")
    assert "attempts settled: 1 uncertain" in pool.err
    assert "[" not in pool.err.split("attempts settled")[1], pool.err
    field.stop(pool)


def test_a_pool_that_was_ended_hard_says_so(field: Field) -> None:
    pool = field.pool(1, "--drain-seconds", "0")
    field.busy(field.submit(field.workflow("w", [field.tick_task("a", 60, idempotent=False)])))
    pool.signal(signal.SIGTERM)
    result = pool.wait()
    assert result.code == 3
    assert "ended hard" in result.err


@pytest.mark.parametrize("command", [("logs",), ("effects", "list"), ("approvals", "list")])
def test_the_usage_shows_what_may_be_left_out(field: Field, command: tuple[str, ...]) -> None:
    usage = field(*command, "--help").out.splitlines()[0]
    assert "[TASK]" in usage if command == ("logs",) else "[RUN]" in usage, usage


def test_the_readme_names_every_exit_code() -> None:
    from agentctl.cli.main import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PIPE
    from agentctl.store import errors

    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.split("## Exit codes")[1].split("\n## ")[0]
    named = {int(line.split("|")[1]) for line in table.splitlines() if line.startswith("| ") and line[2].isdigit()}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "exit_code")}
    assert named >= {0, *raised, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PIPE}
    assert "`workers start`" in table


# -- filesystems -------------------------------------------------------------------------------------------------------


def in_a_mount(field: Field, options: str, script: str) -> tuple[int, str] | None:
    """A shell in a mount namespace of its own, with a tmpfs at `mnt`. None where that is not allowed."""
    (field.folder / "mnt").mkdir(exist_ok=True)
    setup = f"mount -t tmpfs -o {options} none mnt && "
    try:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{setup} echo ready >&2 && {script}", "sh", *PROGRAM],
            cwd=field.folder,
            env=field.environment,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        return None
    if not done.stderr.startswith("ready\n"):
        return None
    return done.returncode, done.stderr.removeprefix("ready\n")


def test_a_filesystem_that_is_mounted_read_only_is_no_fault_of_permissions(field: Field) -> None:
    file = field.workflow("w", [field.tick_task("a", idempotent=False)])
    for before in ("", '"$@" run w.yaml --db mnt/a/runtime.db --output json > out.json && '):
        found = in_a_mount(
            field, "size=8m", f'{before} mount -o remount,ro mnt && "$@" run {file} --db mnt/a/runtime.db'
        )
        if found is None:
            pytest.skip("no mount namespace here")
        code, err = found
        assert code == 5
        assert "read-only" in err.lower(), err
        assert "mount it writable" in err, err
        assert "permission" not in err, err


def test_a_full_tmpfs_is_a_full_disk(field: Field) -> None:
    """Whatever SQLite calls it: the remedy is to free some space."""
    file = field.workflow("w", [field.tick_task("a", idempotent=False)])
    for left in (0, 8, 64, 160):
        script = (
            f"head -c {left}k /dev/zero > mnt/keep; cat /dev/zero > mnt/fill 2> /dev/null; rm -f mnt/keep; "
            f'"$@" run {file} --db mnt/a/runtime.db'
        )
        found = in_a_mount(field, "size=1m", script)
        if found is None:
            pytest.skip("no mount namespace here")
        code, err = found
        assert code == 5, (left, err)
        assert "full" in err or "No space left" in err, (left, err)
        assert "free some space" in err or "choose another place" in err or "put that right" in err, (left, err)


# -- interrupts --------------------------------------------------------------------------------------------------------


def test_an_interrupt_at_the_very_beginning_leaves_no_traceback(field: Field) -> None:
    """From the entry of the program on; before it there is only the interpreter, which is not ours."""
    for name in ("click", "agentctl.cli.main", "agentctl.cli.misc", "apsw"):
        done = subprocess.run(
            [sys.executable, "-c", STRIKE, name],
            cwd=field.folder,
            env=field.environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert (done.returncode, done.stderr) == (130, ""), name


STRIKE = """
import os, signal, sys
from agentctl.cli import main

struck = sys.argv[1]
sys.argv[1:] = ["version"]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == struck:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
main()
"""


@pytest.mark.parametrize("verb", [("workers", "start"), ("worker", "start")])
@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 500, "tail "])
def test_a_name_that_nobody_could_read_or_type_is_refused(cli: Any, verb: tuple[str, str], name: str) -> None:
    result = cli.json(*verb, "--name", name)
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "--name" in result.error["message"]
    assert not cli.database.exists()


def test_an_empty_cursor_file_means_the_start(cli: Any) -> None:
    cli("submit", "hello.yaml")
    place = cli.write("cursor", "")
    first = cli.json("events", "--cursor-file", place)
    assert first.code == 0
    assert first.data["events"]
    assert place.read_text().strip() == first.data["cursor"]
    assert cli.json("events", "--cursor-file", place).data["events"] == []


def test_logs_of_an_aggregate_show_the_way_to_its_tasks(cli: Any) -> None:
    run_id = cli.json("run", "shell.yaml", "--inputs", '{"script": "echo $1 here"}').data["runId"]
    shown = cli("logs", run_id, "each").out
    [command] = [line.strip() for line in shown.splitlines() if "agentctl logs" in line]
    assert "1 here" in cli(*command.split()[1:]).out


def of_three(field: Field) -> str:
    """A run with a fan-out whose second item fails at its first attempt only, whose third always does, and a task."""
    script = 'echo "out of $1"; test "$1" = good || { test "$1" = late && test -e late; } || { : > "$1"; exit 3; }'
    each = {
        "id": "each",
        "uses": "action:sh",
        "failure": "continue",
        "retry": {"maxAttempts": 2, "backoffMs": 1},
        "foreach": {"items": ["good", "late", "bad"]},
        "with": {"args": ["-c", script, "sh", "${{ vars.item }}"]},
    }
    last = {"id": "last", "uses": "action:sh", "needs": ["each"], "with": {"args": ["-c", "echo the last"]}}
    actions = {"sh": {"kind": "builtin.shell.exec", "command": "sh"}}
    file = field.workflow("w", [each, last], actions=actions, policy={"approval": "never", "processAllowlist": ["sh"]})
    result = field.json("run", file)
    assert result.code == 4, result.err
    return str(result.data["runId"])


def test_logs_of_what_failed_leave_out_the_rest(field: Field) -> None:
    run_id = of_three(field)
    told = field.json("logs", run_id, "--failed").data
    assert [entry["stdout"] for entry in told["attempts"]] == ["out of late\n", "out of bad\n", "out of bad\n"]
    [bad] = told["failures"]
    assert (bad["taskId"][:11], bad["attempt"], bad["error"]["code"]) == ("each--0002-", 2, "process_exit")
    shown = field("logs", run_id, "--failed").out
    assert (shown.count("==> each--"), shown.count(": exit 3 <=="), "good" in shown) == (3, 3, False)
    assert f"==> failed tasks <==\n{bad['taskId']} (item=bad): process_exit: 'sh' exited with 3\n" in shown
    assert field.json("logs", run_id, "last", "--failed").data["attempts"] == []
    assert field("logs", run_id, "last", "--failed").out == "no task has failed\n"
    of_all = field("logs", run_id, "each", "--failed").out
    [command] = [line.strip() for line in of_all.splitlines() if line.startswith("  ")]
    assert command.endswith(f"{bad['taskId']} --failed")
    assert "failures" not in field.json("logs", run_id).data


def test_logs_of_what_failed_tell_of_what_has_no_output(field: Field) -> None:
    """A task may fail without an effect, or after one that has succeeded."""
    actions = {
        "sh": {"kind": "builtin.shell.exec", "command": "true", "artifacts": ["out/absent"]},
        "say": {"kind": "builtin.assign"},
    }
    a = {"id": "a", "uses": "action:sh", "failure": "continue"}
    b = {"id": "b", "uses": "action:say", "with": {"x": "${{ inputs.map.no }}"}, "failure": "continue"}
    policy = {"approval": "never", "processAllowlist": ["true"], "writableRoots": ["out"]}
    file = field.workflow("w", [a, b], actions=actions, policy=policy, inputs={"map": {"yes": 1}})
    assert field.json("run", file).code == 4
    shown = field("logs", "@latest", "--failed").out
    assert "\na: artifact_missing: " in shown
    assert "\nb: template_error: inputs.map.no does not exist: inputs.map has yes\n" in shown
    assert field("logs", "@latest", "b", "--failed").out.startswith("no output is recorded")


def test_a_task_is_named_by_the_beginning_of_its_id(field: Field) -> None:
    """A declared task stands for those that were made of it."""
    run_id = of_three(field)
    good, late, _ = [entry for entry in field.json("logs", run_id).data["attempts"] if entry["attempt"] == 1][:3]
    for beginning in (good["taskId"], good["taskId"][:11], "each--0000"):
        found = field.json("logs", run_id, beginning).data
        assert (found["taskId"], [e["stdout"] for e in found["attempts"]]) == (good["taskId"], ["out of good\n"])
    assert field.json("logs", run_id, "e").data["taskId"] == "each"
    assert field.json("effects", "list", run_id, "--task", "la").data["taskId"] == "last"
    assert field.json("artifacts", "list", "--run", run_id, "--task", "la").data["taskId"] == "last"
    several = field.json("logs", run_id, "each--")
    assert (several.code, several.error["code"]) == (2, "usage")
    assert good["taskId"] in several.error["message"]
    assert late["taskId"] in several.error["message"]
    for verb in (
        ("logs", run_id),
        ("effects", "list", run_id, "--task"),
        ("artifacts", "list", "--run", run_id, "--task"),
    ):
        for absent in ("", "each--0003", "%", "lastly"):
            assert field.json(*verb, absent).error["code"] == "not_found"


# -- what is too long, or too odd, to be shown as it is ----------------------------------------------------------------


SAVE = {"save": {"kind": "builtin.write", "with": {"path": "out/x", "content": "x"}}}


def test_more_approvals_than_are_shown_are_counted(field: Field) -> None:
    """In the outcome, in the status and, one by one, in the plan of a resume."""
    count = 105
    file = field.workflow(
        "w",
        [{"id": "a", "uses": "action:save", "foreach": {"items": list(range(count)), "maxItems": count}}],
        actions={"save": {"kind": "builtin.write", "with": {"path": "out/${{ vars.item }}", "content": "x"}}},
        policy={"writableRoots": ["out"]},
        concurrency=count,
    )
    told = field("run", file)
    assert told.code == 3
    assert f"    and {count - 10} more\n" in told.out
    status = field.json("status", "@latest").data
    assert (len(status["pendingApprovals"]), status["pendingApprovalCount"]) == (100, count)
    assert f"  and {count - 20} more\n" in field("status", "@latest").out.split("approvals (a person")[1]
    assert len(field.json("resume", "@latest", "--plan").data["pendingApprovals"]) == count


def test_what_is_cut_says_so(field: Field) -> None:
    """A person who approves a command has to know whether the whole of it is shown."""
    script = "true " + "x" * 3000
    task = {"id": "a", "uses": "action:x", "with": {"args": ["-c", script]}}
    action = {"x": {"kind": "builtin.shell.exec", "command": "sh"}}
    policy = {"processAllowlist": ["sh"]}
    checked = field("run", field.workflow("w", [task], actions=action, policy=policy), "--check")
    assert "x…; asks a person first" in checked.out
    assert field("run", "w.yaml").code == 3
    shown = field("approvals", "list").out
    assert shown.count("more characters; --output json has all)") == 2, shown
    [approval] = field.json("approvals", "list").data["approvals"]
    assert approval["expectedEffect"]["args"] == ["-c", script]
    assert "more characters" in field("effects", "inspect", approval["effectId"]).out


def test_what_a_command_prints_cannot_steer_the_terminal(field: Field) -> None:
    """Lines, tabs and, where they are wanted, colours stay; JSON has what was printed."""
    printed = "a\tb\x1b[31m red\x1b[0m\x1b[2J\x1b]0;title\x07 10%\r20%\r\n\u202eend\n"
    field.text("odd.txt", printed)
    action = {"x": {"kind": "builtin.shell.exec", "command": "cat", "args": ["odd.txt"]}}
    file = field.workflow(
        "w",
        [{"id": "a", "uses": "action:x"}],
        actions=action,
        policy={"approval": "never", "processAllowlist": ["cat"]},
    )
    assert field("run", file).code == 0
    plain = field("logs", "@latest").out
    assert "a\tb red\\x1b[2J\\x1b]0;title\\x07 10%\n20%\n\\u202eend\n" in plain
    painted = field("logs", "@latest", "--color", "always").out
    assert "a\tb\x1b[31m red\x1b[0m\\x1b[2J" in painted
    assert field.json("logs", "@latest").data["attempts"][0]["stdout"] == printed


def test_logs_without_output_say_so(cli: Any) -> None:
    cli("submit", "hello.yaml")
    assert "no output is recorded" in cli("logs", "@latest").out


def test_the_verbs_of_a_group_are_told_in_whole_sentences(cli: Any) -> None:
    for group in ("workers", "effects", "artifacts", "db", "memory", "metrics"):
        verbs = cli(group, "--help").out.split("Verbs:")[1]
        assert "..." not in verbs, verbs
    assert "SIGTERM or SIGINT." in " ".join(cli("workers", "--help").out.split())


def test_a_number_is_asked_for_in_words(cli: Any) -> None:
    assert "'10s' is not a valid number." in cli("run", "hello.yaml", "--timeout-seconds", "10s").err
    assert "'x' is not a valid integer." in cli("run", "hello.yaml", "--workers", "x").err


@pytest.mark.parametrize("given", ["a.csv", '{"a": 1}', "null"])
def test_items_that_are_no_list_are_asked_for_where_they_come_from(cli: Any, given: str) -> None:
    refused = cli("run", "shell.yaml", "--input", f"items={given}")
    assert refused.code == 2
    assert 'give it a JSON list, such as --input \'items=["a", "b"]\'' in refused.err
    [command] = [line for line in refused.err.splitlines() if "--input" in line]
    option = command.split("'")[1]
    assert cli("check", "shell.yaml", "--input", option).code == 0


def test_uncertain_effects_of_one_run(field: Field) -> None:
    file = field.workflow("w", [field.tick_task("a", 60, idempotent=False, timeoutSeconds=1)])
    runs = [field.json("run", file).data["runId"] for _ in range(2)]
    for run_id in runs:
        [effect] = field.json("effects", "list", run_id, "--uncertain").data["effects"]
        assert effect["request"]["runId"] == run_id
    assert field.json("effects", "list", runs[0], "--uncertain", "--task", "a").data["effects"]
    said = ("--status", "not-applied", "--reason", "looked")
    assert field("effects", "reconcile", effect["request"]["id"], *said).code == 0
    assert field.json("effects", "list", runs[1], "--uncertain").data["effects"] == []
    assert len(field.json("effects", "list", "--uncertain").data["effects"]) == 1
    assert field.json("effects", "list").error["remedy"]


def test_what_to_do_next_names_the_database_that_was_given(field: Field) -> None:
    """As it stands it would look into the default one, where there is nothing."""
    db = ("--db", "an other/x.db")
    file = field.workflow("w", [{"id": "a", "uses": "action:save"}], actions=SAVE, policy={"writableRoots": ["out"]})
    told = field("run", file, *db)
    assert told.code == 3
    [step] = [line for line in told.out.splitlines() if line.startswith("next: ")]
    listed = field(*shlex.split(step.split("`")[1])[1:])
    assert (listed.code, "approval-" in listed.out) == (0, True), listed.err
    wrong = field("status", "run-x", *db)
    assert field(*shlex.split(wrong.err.split("`")[1])[1:]).code == 0
    assert "--db" not in field("check", "w.yaml", "--input", "b=1", *db).err
    undriven = field("submit", file, *db).err
    assert "`agentctl --db 'an other/x.db' workers start`" in undriven
    assert "--db" not in field("doctor", env={"AGENTCTL_DB": "an other/x.db"}).out


def test_what_a_command_printed_is_told_once_and_its_limit_by_name(field: Field) -> None:
    actions = {"x": {"kind": "builtin.shell.exec", "command": "sh", "parse": "json", "stdoutLimitBytes": 100}}
    scripts = {"a": "echo words", "b": "yes | head -c 200"}
    tasks = [
        {"id": name, "uses": "action:x", "with": {"args": ["-c", script]}, "failure": "continue"}
        for name, script in scripts.items()
    ]
    told = field("run", field.workflow("w", tasks, actions=actions)).out
    assert "stdout of 'sh' is not JSON: Expecting value" in told
    assert "wrote more than 100 bytes (stdout) and was ended; stdoutLimitBytes sets the limit" in told
