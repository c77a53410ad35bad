"""Bad input, item by item: a message with place, reason and remedy, the documented exit code, and no traceback.

Faults of a document or of inputs leave no run and no database; a fault of a command fails its task with a typed error,
and the worker takes the next; records of the future are refused and nothing is changed.
"""

# ruff: noqa: E501 - a table reads best with one case a line

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import tampering
from support.children import wait_until
from support.field import Field, bound

HEAD = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: bad}
spec:
  policy: {approval: never}
  actions: {set: {kind: builtin.assign}}
"""
GOOD = HEAD + "  tasks: [{id: a, uses: 'action:set'}]\n"
BOMB = HEAD + "  inputs:\n    a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
for _level in range(1, 9):
    BOMB += f"    a{_level}: &a{_level} [{','.join([f'*a{_level - 1}'] * 10)}]\n"
BOMB += "  tasks: [{id: a, uses: 'action:set'}]\n"

# What is wrong -> (document, code of a finding, a part of its message, its line or None where a file has none)
DOCUMENTS: dict[str, tuple[str | bytes, str, str, int | None]] = {
    "unknown field": (HEAD + "  tasks: [{id: a, uses: 'action:set', wiht: {}}]\n", "schema_violation", "wiht", 7),
    "duplicate key": (GOOD + "  inputs: {x: 1, x: 2}\n", "yaml_syntax", "twice", 8),
    "duplicate id": (HEAD + "  tasks: [{id: a, uses: 'action:set'}, {id: a, uses: 'action:set'}]\n", "duplicate_task", "twice", 7),
    "cycle": (HEAD + "  tasks: [{id: a, uses: 'action:set', needs: [b]}, {id: b, uses: 'action:set', needs: [a]}]\n", "dependency_cycle", "a -> b", 7),
    "missing reference": (HEAD + "  tasks: [{id: a, uses: 'action:none'}]\n", "missing_reference", "none", 7),
    "missing need": (HEAD + "  tasks: [{id: a, uses: 'action:set', needs: [b]}]\n", "missing_reference", "b", 7),
    "wrong type": (HEAD + "  tasks: [{id: a, uses: 'action:set', needs: b}]\n", "schema_violation", "list", 7),
    "bad template": (HEAD + "  tasks: [{id: a, uses: 'action:set', with: {x: '${{ inputs.'}}]\n", "invalid_template", "", 7),
    "undefined input": (HEAD + "  tasks: [{id: a, uses: 'action:set', foreach: {items: '${{ inputs.no }}'}}]\n", "invalid_template", "no", 7),
    "not supported yet": (HEAD.replace("never", "always") + "  tasks: [{id: a, uses: 'action:set'}]\n  packs: [{name: p, version: 1.0.0}]\n", "unsupported_capability", "pack", 8),
    "oversized": (GOOD + "# " + "x" * 1_048_576, "schema_violation", "1048576", None),
    "bomb": (BOMB, "yaml_syntax", "alias", None),
    "tab": (HEAD + "\ttasks: []\n", "yaml_syntax", "tab", 7),
    "two documents": (GOOD + "---\na: 1\n", "yaml_syntax", "document", 8),
    "not a number": (GOOD + "  inputs: {x: .nan}\n", "schema_violation", "", 8),
    "unclosed": (HEAD + "  tasks: [{id: a\n", "yaml_syntax", "", None),
    "binary junk": (bytes(range(256)) * 8, "yaml_syntax", "", None),
    "empty": ("", "yaml_syntax", "", None),
    "a legacy playbook": ("playbook: x\ntasks: []\n", "migration_required", "", 1),
}  # fmt: skip


@pytest.mark.parametrize("what", DOCUMENTS)
def test_documents(field: Field, what: str) -> None:
    """Exit 2 with code, place, reason and remedy; `check`, `plan`, `run` and `submit` say the same."""
    text, code, part, line = DOCUMENTS[what]
    (field.folder / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    verdicts = []
    for verb in ("check", "run", "submit", "plan"):
        result = field.json(verb, "bad.yaml")
        assert (result.code, result.error["code"]) == (2, "usage"), verb
        verdicts.append(result.diagnostics)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    found = [item for item in verdicts[0] if item["code"] == code]
    assert found, verdicts[0]
    assert any(part in item["message"] + item["help"] for item in found), found
    assert all(Path(item["file"]).name == "bad.yaml" for item in found)
    if line is not None:
        assert line in [item["line"] for item in found], found
        assert all(item["column"] for item in found)
    assert all(item["help"] for item in found), found
    assert not field.database.parent.exists()


def test_a_long_or_deep_document_is_refused_quickly(field: Field) -> None:
    """What would take minutes to understand is not tried."""
    cases = {
        "deep.yaml": "[" * 100_000,
        "deep.json": '{"a":' * 100_000,
        "wide.yaml": HEAD + "  inputs:\n" + "".join(f"    k{i}: {{a: [1,2,3]}}\n" for i in range(40_000)) + "  wrong: 1\n",
    }  # fmt: skip
    for name, text in cases.items():
        field.text(name, text[:1_048_576])
        result = field.json("check", name)
        assert result.code == 2
        assert result.seconds < bound(10), name
        assert result.error["message"]


@pytest.mark.parametrize("verb", ["check", "plan", "run", "submit"])
def test_what_is_no_file(field: Field, verb: str) -> None:
    """A FIFO, a folder, a device, a loop of links, nothing: refused at once, by name."""
    os.mkfifo(field.folder / "fifo.yaml")
    (field.folder / "folder.yaml").mkdir()
    (field.folder / "loop.yaml").symlink_to("loop.yaml")
    for name in ("fifo.yaml", "folder.yaml", "loop.yaml", "none.yaml", "/dev/null", "/dev/zero", "a\nb.yaml"):
        result = field.json(verb, name, limit=20)
        assert result.code == 2, (name, result.err)
        said = str(result.error) + str(result.diagnostics)
        assert os.path.basename(name).split("\n")[0] in said, said
        assert result.error.get("remedy") or all(item["help"] for item in result.diagnostics), said
    assert not field.database.parent.exists()


INPUTS: dict[str, list[str]] = {
    "no equals sign": ["--input", "x"],
    "twice": ["--input", "x=1", "--input", "x=2"],
    "both": ["--inputs", "{}", "--inputs-file", "x.json"],
    "no object": ["--inputs", "[1]"],
    "no json": ["--inputs", "{x: 1}"],
    "not a number": ["--inputs", '{"x": NaN}'],
    "too large a number": ["--input", "x=1e400"],
    "surrogate": ["--inputs", '{"x": "\\ud800"}'],
    "duplicate": ["--inputs", '{"x": 1, "x": 2}'],
    "too deep": ["--inputs", '{"x": ' + "[" * 500 + "]" * 500 + "}"],
    "no such file": ["--inputs-file", "none.json"],
    "a folder": ["--inputs-file", "."],
    "a fifo": ["--inputs-file", "fifo.json"],
    "junk": ["--inputs-file", "junk.json"],
    "no workspace": ["--workspace", "none"],
    "empty key": ["--idempotency-key", ""],
    "priority": ["--priority", "11"],
    "workers": ["--workers", "0"],
    "unknown flag": ["--wrokers", "2"],
}


@pytest.mark.parametrize("what", INPUTS)
def test_inputs_and_flags(field: Field, what: str) -> None:
    """Exit 2, the flag is named, no database."""
    field.text("good.yaml", GOOD)
    os.mkfifo(field.folder / "fifo.json")
    (field.folder / "junk.json").write_bytes(bytes(range(256)))
    result = field.json("run", "good.yaml", *INPUTS[what], limit=20)
    assert (result.code, result.error["code"]) == (2, "usage")
    assert INPUTS[what][-2] in result.error["message"]
    assert not field.database.parent.exists()


# -- databases -----------------------------------------------------------------------------------------------------


def _newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9999")
        connection.commit()


def _foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE notes (text)")


def _junk(path: Path) -> None:
    path.write_bytes(b"this is no database at all, but a text of some length\n" * 200)


def _hole(path: Path) -> None:
    data = bytearray(path.read_bytes())
    assert len(data) > 8192
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "code"),
    [(_newer, "incompatible_version"), (_foreign, "incompatible_version"), (_junk, "corrupt"), (_hole, "corrupt")],
)
def test_databases(field: Field, damage: Callable[[Path], None], code: str) -> None:
    """Exit 5 from every verb; the file stays as it is."""
    field.text("good.yaml", GOOD)
    assert field.json("run", "good.yaml").code == 0
    assert not field.database.with_name("runtime.db-wal").exists()
    damage(field.database)
    before = field.database.read_bytes()
    for verb in (
        ["runs", "list"],
        ["status", "@latest"],
        ["submit", "good.yaml"],
        ["run", "good.yaml"],
        ["workers", "list"],
        ["workers", "start", "-n", "1"],
        ["coordinator", "start"],
        ["cancel", "@latest"],
        ["resume", "@latest"],
    ):
        result = field.json(*verb, limit=30)
        assert (result.code, result.error["code"]) == (5, code), (verb, result.err)
        assert result.error["remedy"]
        assert field.database.read_bytes() == before, verb


def test_places_of_a_database_that_cannot_be(field: Field) -> None:
    """A folder, a FIFO, a file as folder, /proc: exit 5, the place is named."""
    field.text("good.yaml", GOOD)
    os.mkfifo(field.folder / "fifo.db")
    (field.folder / "folder.db").mkdir()
    field.text("file", "")
    for place in ("fifo.db", "folder.db", "file/x.db", "/proc/x.db", "/dev/null"):
        result = field.json("submit", "good.yaml", "--db", place, limit=20)
        assert (result.code, result.error["code"]) == (5, "environment"), (place, result.err)
        assert place.rsplit("/", 1)[0] in result.error["message"]
        assert result.error["remedy"]
    missing = field.json("status", "@latest", "--db", "none.db")
    assert (missing.code, missing.error["code"]) == (5, "not_found")
    assert not (field.folder / "none.db").exists()


# -- commands ------------------------------------------------------------------------------------------------------

COMMANDS: dict[str, tuple[dict[str, Any], list[str], str | None]] = {
    "no program": ({"command": "absent-program"}, [], "command_not_found"),
    "no interpreter": ({"command": "./script"}, [], "spawn_failed"),
    "not executable": ({"command": "./plain"}, [], "spawn_failed"),
    "not utf-8": ({"command": "sh"}, ["-c", "printf 'a\\377b'"], None),
    "not utf-8 json": ({"command": "sh", "parse": "json"}, ["-c", "printf '\"\\377\"'"], "output_not_json"),
    "overflow": ({"command": "sh", "stdoutLimitBytes": 1000}, ["-c", "head -c 1001 /dev/zero"], "subprocess_output_limit_exceeded"),
    "no permission by policy": ({"command": "cat"}, [], "policy_denied"),
    "exit code": ({"command": "sh"}, ["-c", "exit 9"], "process_exit"),
    "signal": ({"command": "sh"}, ["-c", "kill -11 $$"], "process_exit"),
    "a zero byte": ({"command": "sh"}, ["-c", "\0"], "invalid_input"),
    "too long an argument": ({"command": "sh"}, ["-c", "true", "x" * 140_000], "spawn_failed"),
}  # fmt: skip


@pytest.mark.timeout(300)
def test_faults_of_commands(field: Field) -> None:
    """One worker for all: each fault fails its own task with a typed error, and the next one runs."""
    field.text("script", "#!/absent/interpreter\n").chmod(0o755)
    field.text("plain", "true\n")
    actions, tasks = {}, []
    given = {}
    for number, (what, (action, arguments, _)) in enumerate(COMMANDS.items()):
        actions[f"a{number}"] = {"kind": "builtin.shell.exec", "idempotency": "idempotent", **action}
        given[f"g{number}"] = arguments
        task = {"id": f"t{number}", "uses": f"action:a{number}", "failure": "continue"}
        tasks.append({**task, "with": {"args": f"${{{{ inputs.g{number} }}}}"}} if what != "no program" else task)
    tasks.append(field.tick_task("after", idempotent=True))
    programs = ["absent-program", "script", "plain"]
    file = field.workflow("faults", tasks, actions=actions, programs=programs, concurrency=1, inputs=given)
    pool = field.pool(1)
    [worker] = field.workers("idle")
    run_id = field.submit(file)
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["state"], outcome.data["reason"]) == (4, "failed", "task_failed")
    found = {task["taskId"]: task for task in field.json("inspect", run_id).data["tasks"]}
    for number, (what, (_, _, code)) in enumerate(COMMANDS.items()):
        task = found[f"t{number}"]
        if code is None:
            assert (task["state"], task["output"]["stdout"]) == ("succeeded", "a\ufffdb"), what
            assert task["output"]["stdoutBase64"] == "Yf9i"
        else:
            assert (task["state"], (task["error"] or {}).get("code")) == ("failed", code), what
            assert task["error"]["message"]
    assert found["after"]["state"] == "succeeded"
    assert field.labels() == ["after"]
    assert [entry.pid for entry in field.workers()] == [worker.pid]
    human = field("inspect", run_id)
    assert "command_not_found" in human.out
    field.check_clean_end(drained=[pool])


# -- records of the future ------------------------------------------------------------------------------------------

FUTURES = {
    "runs": "UPDATE runs SET runtime_state_version = 2",
    "plans": "UPDATE runs SET plan_format_version = 2",
    "effects": "UPDATE effects SET format_version = 2",
    "tasks": "UPDATE tasks SET metadata_version = 2",
    "budgets": "UPDATE run_budgets SET format_version = 2",
    "checkpoints": "UPDATE checkpoints SET format_version = 2",
    "events": "UPDATE audit_events SET event_version = 2",
}
READERS = {
    "runs": ["status RUN", "inspect RUN", "resume RUN", "cancel RUN", "logs RUN", "wait RUN", "events RUN"],
    "plans": ["status RUN", "inspect RUN", "resume RUN", "cancel RUN", "logs RUN", "wait RUN"],
    "effects": ["inspect RUN", "logs RUN", "status RUN", "resume RUN", "cancel RUN"],
    "tasks": ["status RUN", "inspect RUN", "resume RUN", "cancel RUN"],
    "budgets": ["status RUN", "inspect RUN", "resume RUN", "cancel RUN"],
    "checkpoints": ["inspect RUN", "resume RUN", "cancel RUN"],
    "events": ["events RUN", "inspect RUN", "resume RUN", "cancel RUN"],
}  # fmt: skip


def _future(field: Field, kind: str) -> None:
    """Make all records of a kind those of a newer version, past the triggers that keep history as it is."""
    tampering.change(field.database, FUTURES[kind])


def _content(field: Field) -> list[str]:
    """Everything that is recorded about runs."""
    with closing(sqlite3.connect(field.database, timeout=30)) as connection:
        return [line for line in connection.iterdump() if 'INTO "processes"' not in line]


def _paused(field: Field) -> str:
    """A run that has done something and waits for a person: it has records of every kind."""
    actions = {"slow": {"kind": "builtin.shell.exec", "command": "sleep", "idempotency": "at_most_once"}}
    slow = {"id": "slow", "uses": "action:slow", "timeoutSeconds": 1, "with": {"args": ["60"]}}
    tasks = [slow, field.tick_task("done", idempotent=True), field.tick_task("later", idempotent=True, needs=["slow"])]
    outcome = field.json("run", field.workflow("paused", tasks, actions=actions, programs=["sleep"]))
    assert outcome.data["reason"] == "uncertain_effect"
    return str(outcome.data["runId"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FUTURES)
def test_records_of_the_future(field: Field, kind: str) -> None:
    """Whoever meets one refuses with exit 5, and nothing is changed; a list of runs shows the others, and says so."""
    run_id = _paused(field)
    _future(field, kind)
    before = _content(field)
    for verb in READERS[kind]:
        result = field.json(*verb.replace("RUN", run_id).split(), limit=60)
        assert (result.code, result.error["code"]) == (5, "incompatible_version"), (verb, result.out, result.err)
        assert "newer" in result.error["message"]
        assert result.error["remedy"]
        assert _content(field) == before, verb
    problem = field.json("runs", "list").data["runs"][0]["problem"]
    assert problem is None or problem["code"] == "incompatible_version"
    assert (problem is not None) or kind not in ("runs", "plans", "tasks")
    assert field.labels() == ["done"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["runs", "plans"])
def test_a_pool_leaves_a_run_of_the_future_alone_and_serves_the_others(field: Field, kind: str) -> None:
    """It is neither driven nor executed nor changed."""
    file = field.workflow("small", [field.tick_task("small", idempotent=True)])
    run_id = field.submit(file)
    _future(field, kind)
    before = [line for line in _content(field) if run_id in line]
    pool = field.pool(2)
    other = field.submit(file)
    assert field.json("wait", other).code == 0
    assert [line for line in _content(field) if run_id in line] == before
    assert len(field.lines()) == 1
    assert pool.running()
    field.stop(pool)


@pytest.mark.timeout(300)
def test_a_worker_leaves_work_of_the_future_alone(field: Field) -> None:
    """The run is taken over by a newer version while its work waits: an old worker does not claim it."""
    file = field.workflow("small", [field.tick_task("small", idempotent=True)])
    coordinator = field.coordinator()
    run_id = field.submit(file)
    wait_until(lambda: bool(field.rows("SELECT 1 FROM attempts WHERE state = 'ready'")), "ready work")
    field.change("UPDATE runs SET runtime_state_version = 2 WHERE run_id = ?", run_id)
    pool = field.pool(2, "--no-coordinator")
    other = field.submit(file)
    assert field.json("wait", other).code == 0, "what came later is taken in its place"
    assert field.labels() == ["small"]
    assert field.rows("SELECT state FROM attempts WHERE run_id = ?", run_id) == [("ready",)]
    for process in (pool, coordinator):
        field.stop(process)


def test_json_of_errors_is_one_line(field: Field) -> None:
    """Whatever the text of a fault is."""
    for argument in ("a\nb", "\x1b[31m", "\u2028", '"'):
        result = field.json("status", argument)
        assert result.code == 5
        json.loads(result.err)
        assert "\x1b" not in field("status", argument).err
