"""The program itself: global options, errors, exit codes, pipes, start-up, unusable databases."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import filesystem
from agentctl.store.errors import EnvironmentFault

VERBS = (
    "cancel", "check", "completion", "coordinator", "events", "inspect", "logs", "plan", "resume", "run", "runs",
    "doctor", "metrics", "schema", "status", "submit", "version", "wait", "watch", "worker", "workers",
)  # fmt: skip


def test_help_lists_every_verb_and_imports_next_to_nothing(cli: Any) -> None:
    result = cli("--help")
    assert result.code == 0
    for verb in VERBS:
        assert f"  {verb} " in result.out
    script = (
        "import sys\nfrom agentctl.cli.main import run\ntry:\n    run(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('rich', 'pydantic', 'apsw', 'yaml', 'psutil', 'logging')"
        " or n.startswith(('agentctl.store', 'agentctl.coordinator', 'agentctl.worker'))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_with_the_global_options(cli: Any, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.code == 0
    assert "Global options, before or after the verb" in result.out
    assert "--output" in result.out


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, agentctl.cli; print([n for n in sys.modules if n.startswith(('click', 'agentctl.cli.'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "[]"


def test_global_options_before_and_after_the_verb(cli: Any) -> None:
    before = cli("--output", "json", "--db", "a/x.db", "submit", "hello.yaml")
    after = cli("submit", "hello.yaml", "--output=json", "--db=b/x.db")
    assert before.code == after.code == 0
    assert (cli.folder / "a/x.db").is_file()
    assert (cli.folder / "b/x.db").is_file()
    assert before.data["created"] is after.data["created"] is True
    last = cli("--db", "c/x.db", "submit", "--db", "d/x.db", "hello.yaml")
    assert last.code == 0
    assert not (cli.folder / "c").exists()
    by_environment = cli.json("runs", "list", env={"AGENTCTL_DB": "d/x.db"})
    assert len(by_environment.data["runs"]) == 1
    assert len(cli.json("runs", "list", "--db", "a/x.db", env={"AGENTCTL_DB": "d/x.db"}).data["runs"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["wait"],
        ["check"],
        ["runs", "lst"],
        ["run", "hello.yaml", "--prioritie", "1"],
        ["run", "hello.yaml", "--priority", "high"],
        ["--color", "blue", "version"],
        ["workers", "start", "-n", "0"],
        ["completion", "cmd"],
    ],
)
def test_usage_errors(cli: Any, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err
    as_json = cli("--output", "json", *arguments)
    assert (as_json.code, as_json.error["code"]) == (2, "usage")
    if arguments:
        assert cli(*arguments, "--output", "json").error["code"] == "usage"
    assert not cli.database.parent.exists()


def test_a_misspelt_verb_gets_a_hint(cli: Any) -> None:
    assert "'check'" in cli("chek", "hello.yaml").err


def test_version(cli: Any) -> None:
    data = cli.json("version").data
    assert data.keys() >= {"version", "databaseSchema", "python", "sqlite"}
    assert cli("--version").out == f"agentctl {data['version']}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(cli: Any, shell: str) -> None:
    result = cli("completion", shell)
    assert result.code == 0
    assert "_AGENTCTL_COMPLETE" in result.out
    if shell == "bash":
        answer = cli(env={"_AGENTCTL_COMPLETE": "bash_complete", "COMP_WORDS": "agentctl workers", "COMP_CWORD": "1"})
        assert answer.out.strip() == "plain,workers"


@pytest.mark.parametrize(
    ("name", "value"),
    [("AGENTCTL_LEASE_SECONDS", "soon"), ("AGENTCTL_HEARTBEAT_SECONDS", "nan"), ("AGENTCTL_FAULT", "nowhere")],
)
def test_an_environment_that_makes_no_sense_changes_nothing(cli: Any, name: str, value: str) -> None:
    """Told when the run is there already, it would leave it to the next coordinator: a second run of the same."""
    for verb in ("run", "submit"):
        refused = cli.json(verb, "hello.yaml", env={name: value})
        assert (refused.code, refused.error["code"]) == (2, "usage")
        assert name in refused.error["message"]
    assert not cli.database.parent.exists()
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    for verb in ("cancel", "pause", "resume"):
        assert cli.json(verb, run_id, env={name: value}).code == 2
    seen = cli.json("status", run_id).data
    assert (seen["cancelRequestedAt"], seen["pauseRequestedAt"], seen["driver"]) == (None, None, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "run-x"],
        ["inspect", "run-x"],
        ["logs", "run-x"],
        ["events", "run-x"],
        ["wait", "run-x"],
        ["watch", "run-x"],
        ["resume", "run-x"],
        ["cancel", "run-x"],
        ["workers", "drain", "w9"],
    ],
)
def test_unknown_ids_and_a_missing_database(cli: Any, arguments: list[str]) -> None:
    missing = cli.json(*arguments)
    assert (missing.code, missing.error["code"]) == (5, "not_found")
    assert not cli.database.parent.exists()
    assert cli("submit", "hello.yaml").code == 0
    unknown = cli.json(*arguments)
    assert (unknown.code, unknown.error["code"]) == (5, "not_found")
    assert unknown.error["remedy"]


def test_human_errors_name_the_remedy(cli: Any) -> None:
    result = cli("status", "run-x")
    assert result.code == 5
    assert result.err.startswith("error: there is no database at ")
    assert "--db PATH" in result.err


def test_an_internal_error_is_one_line(cli: Any) -> None:
    broken = (
        "import agentctl.coordinator.definition as d\n"
        "def load(path): raise ZeroDivisionError('boom')\n"
        "d.load_workflow = load\n"
        "from agentctl.cli.main import run\n"
    )
    for arguments, lines in ((["check", "hello.yaml"], 2), (["check", "hello.yaml", "--output", "json"], 1)):
        done = subprocess.run(
            [sys.executable, "-c", broken + f"run({arguments!r})"],
            cwd=cli.folder,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 70
        assert "internal error: ZeroDivisionError: boom" in done.stderr
        assert len(done.stderr.splitlines()) == lines
    verbose = subprocess.run(
        [sys.executable, "-c", broken + "run(['check', 'hello.yaml', '--verbose'])"],
        cwd=cli.folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "Traceback" in verbose.stderr


def test_colours(cli: Any) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    assert "\x1b[" not in cli("status", run_id).out
    assert "\x1b[" in cli("status", run_id, "--color", "always").out
    assert "\x1b[" in cli("status", run_id, "--color", "always", env={"NO_COLOR": "1"}).out


def test_text_of_documents_cannot_steer_the_terminal(cli: Any) -> None:
    result = cli("check", "no\x1b[2Jthing.yaml", "--color", "never")
    assert result.code == 2
    assert "\x1b" not in result.err


# -- pipes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_runs(cli: Any) -> Any:
    """Enough runs that their list does not fit into a pipe."""
    cli("submit", "hello.yaml")
    # Rows are multiplied by hand: what matters here is the length of the output only.
    connection = sqlite3.connect(cli.database)
    row = connection.execute("SELECT * FROM runs").fetchone()
    columns = [item[1] for item in connection.execute("PRAGMA table_info(runs)")]
    at = {name: columns.index(name) for name in ("run_id", "first_task", "created_at")}
    rows = []
    for number in range(1, 5000):
        copy = list(row)
        copy[at["run_id"]] = f"{row[at['run_id']]}-{number:05d}"
        copy[at["first_task"]] = number + 1
        copy[at["created_at"]] += number
        rows.append(copy)
    with connection:
        marks = ",".join("?" * len(columns))
        connection.executemany(f"INSERT INTO runs VALUES ({marks})", rows)  # noqa: S608
        connection.executemany(
            "INSERT INTO tasks (task_no, run_id, task_id, position, state, updated_at) VALUES (?,?,'hi',0,'pending',0)",
            [(copy[at["first_task"]], copy[at["run_id"]]) for copy in rows],
        )
    connection.close()
    return cli


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "verb", ["runs list --limit 1000", "runs list --limit 1000 --output json", "schema", "--help", "inspect @latest"]
)
def test_a_reader_that_closes_the_pipe(many_runs: Any, verb: str, unbuffered: str) -> None:
    program = f"{sys.executable} -c 'from agentctl.cli import main; main()' {verb}"
    # `true` closes its end at once; the pipe is full or gone when the program writes.
    for reader in ("head -1 > /dev/null", "true"):
        done = subprocess.run(
            ["bash", "-c", f"{program} | {reader}; echo ${{PIPESTATUS[0]}}"],
            cwd=many_runs.folder,
            env={**many_runs.environment, "PYTHONUNBUFFERED": unbuffered},
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        assert done.stderr == ""
        assert done.stdout.strip() in ("0", "141")


def test_a_pipe_that_is_closed_before_anything_is_written(many_runs: Any) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = many_runs.start("runs", "list", stdout=writer)
    os.close(writer)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (141, "")


def test_a_stdout_that_cannot_be_written_or_is_closed(cli: Any) -> None:
    with open("/dev/full", "w") as full:
        process = cli.start("schema", stdout=full)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "Traceback" not in errors


def _in_shell(cli: Any, line: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -c 'from agentctl.cli import main; main()'"
    return subprocess.run(
        ["bash", "-c", line.replace("agentctl", program)],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "verb",
    ["schema", "check flow.yaml", "plan flow.yaml --output json", "graph flow.yaml", "version", "--help", "--version"],
)
def test_a_stdout_that_is_closed_from_the_start(cli: Any, verb: str) -> None:
    assert cli("init", "flow.yaml").code == 0
    closed = _in_shell(cli, f"agentctl {verb} >&-")
    assert closed.returncode == 5
    assert "stdout is closed" in closed.stderr
    assert (cli.folder / "flow.yaml").read_text().startswith("#")
    assert _in_shell(cli, f"agentctl {verb} <&- >&- 2>&-").returncode == 5
    assert _in_shell(cli, f"agentctl {verb} <&- 2>&-").returncode == 0


@pytest.mark.parametrize(
    ("verb", "code"),
    [(f"run hello.yaml {option}", code) for option, code in (("--interactive", 3), ("--inputs-file -", 2))],
)
def test_a_stdin_that_is_closed_from_the_start_is_an_empty_one(cli: Any, verb: str, code: int) -> None:
    closed = _in_shell(cli, f"agentctl {verb} <&-")
    assert (closed.returncode, "internal error" in closed.stderr) == (code, False)


def test_a_run_goes_on_without_its_closed_stdout_and_keeps_its_database_clean(cli: Any) -> None:
    assert cli("init", "flow.yaml").code == 0
    closed = _in_shell(cli, "agentctl run flow.yaml <&- >&-")
    assert (closed.returncode, "stdout is closed" in closed.stderr) == (0, True)
    assert cli("db", "verify").code == 0
    assert len(cli.json("runs", "list").data["runs"]) == 1


def test_too_little_memory_is_no_internal_error(cli: Any) -> None:
    items = ", ".join(f"{number}" for number in range(300))
    cli.write(
        "wide.yaml",
        "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: wide}\nspec:\n"
        "  actions: {n: {kind: builtin.assign}}\n  tasks:\n    - id: a\n      uses: action:n\n"
        f"      matrix: {{maxItems: 90000, axes: {{p: [{items}], q: [{items}]}}}}\n",
    )
    short = _in_shell(cli, "ulimit -v 130000; agentctl check wide.yaml --output json")
    assert (short.returncode, short.stdout) == (5, "")
    error = json.loads(short.stderr)["error"]
    assert (error["code"], "memory" in error["message"]) == ("environment", True)


def test_lists_are_quick_with_thousands_of_runs_and_can_be_read_page_by_page(many_runs: Any) -> None:
    seen: list[str] = []
    cursor: list[str] = []
    while True:
        data = many_runs.json("runs", "list", "--limit", "999", *cursor).data
        seen += [run["runId"] for run in data["runs"]]
        if data["next"] is None:
            break
        cursor = ["--next", data["next"]]
    assert len(seen) == len(set(seen)) == 5000
    assert seen[0].endswith("-04999")
    wrong = many_runs.json("runs", "list", "--next", "yesterday")
    assert wrong.error["code"] == "usage"
    assert many_runs.json("runs", "list", "--state", "failed").data == {"runs": [], "next": None}


# -- databases that cannot be used -------------------------------------------------------------------------------

DATABASE_VERBS = (
    ["runs", "list"],
    ["status", "x"],
    ["submit", "hello.yaml"],
    ["run", "hello.yaml"],
    ["workers", "list"],
)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


@pytest.mark.parametrize("kind", ["nfs", "strangefs"])
def test_a_network_or_unknown_filesystem(cli: Any, kind: str) -> None:
    env = {"AGENTCTL_FILESYSTEM_TYPE": kind}
    for verb in DATABASE_VERBS:
        result = cli.json(*verb, env=env)
        assert (result.code, result.error["code"]) == (5, "environment")
        assert kind in result.error["message"]
        assert "--db" in result.error["remedy"]
    assert not cli.database.parent.exists()
    cli("submit", "hello.yaml")
    before = _bytes(cli.database.parent)
    for verb in DATABASE_VERBS:
        assert cli(*verb, env=env).code == 5
    assert _bytes(cli.database.parent) == before


def _newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 9999")
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def _foreign(path: Path) -> None:
    path.unlink()
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.commit()
    connection.close()


def _corrupt(path: Path) -> None:
    for companion in ("-wal", "-shm"):
        path.with_name(path.name + companion).unlink(missing_ok=True)
    path.write_bytes(b"this is no database at all, but a text of some length\n" * 100)


@pytest.mark.parametrize(
    ("damage", "code"), [(_newer, "incompatible_version"), (_foreign, "incompatible_version"), (_corrupt, "corrupt")]
)
def test_a_database_that_is_not_ours(cli: Any, damage: Callable[[Path], None], code: str) -> None:
    cli("submit", "hello.yaml")
    damage(cli.database)
    before = cli.database.read_bytes()
    for verb in DATABASE_VERBS:
        result = cli.json(*verb)
        assert (result.code, result.error["code"]) == (5, code), verb
        assert result.error["remedy"]
    assert cli.database.read_bytes() == before


def test_a_folder_or_a_fifo_as_database(cli: Any) -> None:
    os.mkfifo(cli.folder / "fifo.db")
    (cli.folder / "folder.db").mkdir()
    cli.write("file", "")
    for place in ("fifo.db", "folder.db", "file/x.db"):
        result = cli.json("submit", "hello.yaml", "--db", place)
        assert (result.code, result.error["code"]) == (5, "environment")


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="cannot drop root")
def test_an_unwritable_folder(cli: Any, unprivileged: Callable[[Path], list[str]]) -> None:
    prefix = unprivileged(cli.folder)
    locked = cli.folder / "locked"
    locked.mkdir(mode=0o555)
    locked.chmod(0o555)
    for place in ("locked/x.db", "locked/deeper/x.db"):
        result = cli.json("submit", "hello.yaml", "--db", place, prefix=prefix)
        assert (result.code, result.error["code"]) == (5, "environment")
        assert str(locked) in result.error["message"]
        assert "permission" in result.error["message"].lower()
    assert list(locked.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may enter everywhere")
def test_a_folder_that_is_closed_is_named_with_what_to_do(cli: Any) -> None:
    """The database of another user, say: it is there or not, and nobody can tell."""
    prefix = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    closed = cli.folder / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        for verb in (("runs", "list"), ("submit", "hello.yaml"), ("db", "migrate")):
            for place in ("closed/x.db", "closed/deeper/x.db"):
                result = cli.json(*verb, "--db", place, prefix=prefix)
                assert (result.code, result.error["code"]) == (5, "environment"), verb
                assert result.error["message"] == f"no permission to enter the folder {closed}", verb
                assert "--db" in result.error["remedy"]
        checks = cli.json("doctor", "--db", "closed/x.db", prefix=prefix).data["checks"]
        assert checks[0]["message"] == f"no permission to enter the folder {closed}"
    finally:
        closed.chmod(0o700)


def test_the_folder_is_named_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a database in it, which is not there, or which could be written."""
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)
    for name in ("absent.db", "there.db"):
        (tmp_path / "there.db").touch()
        with pytest.raises(EnvironmentFault) as caught:
            filesystem.require_writable(tmp_path / name)
        assert caught.value.message == f"no permission to write in the folder {tmp_path}"


def test_the_envelope_of_an_error_is_json_whatever_the_text(cli: Any) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from agentctl.cli import main; main()",
            b"check",
            b"bad\xff.yaml",
            b"--output",
            b"json",
        ],
        cwd=cli.folder,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 2
    assert json.loads(result.stderr.decode("utf-8"))["ok"] is False


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "soon"])
@pytest.mark.parametrize("words", [("wait", "run-x"), ("run", "hello.yaml"), ("workers", "start")])
def test_seconds_are_a_number_that_ends(cli: Any, words: tuple[str, ...], text: str) -> None:
    option = "--drain-seconds" if words[0] == "workers" else "--timeout-seconds"
    result = cli(*words, option, text)
    assert result.code == 2, result.err
    assert option in result.err
    assert not (cli.folder / ".agentctl").exists()
