"""Field report 22: the reader closes the pipe."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing

import pytest
from support.children import wait_until
from support.field import PROGRAM, Field, bound
from support.scale import repeats

RUNS = 5000
LISTINGS = (
    "runs list --limit 1000",
    "runs list --limit 1000 --output json",
    "inspect @latest",
    "inspect @latest --output json",
    "logs @latest",
    "logs @latest --output json",
    "events @latest",
    "events @latest --output json",
    "status @latest --output json",
    "workers list",
    "artifacts list",
    "artifacts list --output json",
    "artifacts verify --output json",
    "db stats",
    "plan ticks.yaml",
    "plan ticks.yaml --output json",
    "schema",
    "graph @latest",
    "explain ticks.yaml",
    "doctor",
    "doctor --output json",
    "metrics show",
    "approvals list --output json",
    "effects list @latest",
    "effects list @latest --output json",
    "memory search x",
    "providers inspect",
    "retry ticks.yaml SOURCE --from say --restart-successful --plan",
    "retry ticks.yaml SOURCE --from say --restart-successful --plan --output json",
    "compensate SOURCE --plan --output json",
    "completion bash",
    "--help",
)


def _piped(field: Field, verb: str, reader: str, unbuffered: str = "") -> tuple[int, str, str]:
    """Exit code of the program, what the reader has printed, and stderr of all."""
    command = " ".join(PROGRAM) if len(PROGRAM) == 1 else f"{PROGRAM[0]} -c '{PROGRAM[2]}'"
    done = subprocess.run(
        ["bash", "-c", f"{command} {verb} | {reader}; echo ${{PIPESTATUS[0]}}"],
        cwd=field.folder,
        env={**field.environment, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        encoding="utf-8",
        timeout=bound(120),
        check=True,
    )
    *shown, code = done.stdout.splitlines()
    return int(code), "\n".join(shown), done.stderr


def _multiply(field: Field) -> None:
    """The row of the newest run 5,000 times. What matters here is the length of a list."""
    with closing(sqlite3.connect(field.database, timeout=30)) as connection, connection:
        newest = "(SELECT run_id FROM runs ORDER BY created_at DESC LIMIT 1)"
        columns = [item[1] for item in connection.execute("PRAGMA table_info(runs)")]
        changed = {
            "run_id": "run_id || '-' || printf('%05d', value)",
            "first_task": "1000000 + value",
            "task_count": "1",
            "created_at": "created_at - value",
        }
        chosen = ", ".join(changed.get(name, name) for name in columns)
        numbers = (
            "WITH RECURSIVE numbers(value) AS "  # noqa: S608
            f"(SELECT 1 UNION ALL SELECT value + 1 FROM numbers WHERE value < {RUNS})"
        )
        connection.execute(
            f"{numbers} INSERT INTO runs SELECT {chosen} FROM runs, numbers WHERE run_id = {newest}"  # noqa: S608
        )
        digest = "sha256:" + "0" * 64
        connection.execute("INSERT INTO artifact_blobs VALUES (?, 1, 1)", (digest,))
        connection.execute(
            f"{numbers} INSERT INTO artifact_refs "  # noqa: S608
            "SELECT run_id, 'task', 'out/' || value, ?, 1, 'text/plain', value, NULL, NULL, 1 "
            f"FROM runs, numbers WHERE run_id = {newest}",
            (digest,),
        )


@pytest.mark.timeout(1200)
def test_every_listing_ends_in_silence(field: Field) -> None:
    """5,000 runs, and one of many tasks; `head -1` and a reader that never reads; with and without buffers."""
    spoken = "x" * 120
    actions = {"say": {"kind": "builtin.shell.exec", "command": "echo", "idempotency": "idempotent"}}
    items = {"items": list(range(1200)), "maxItems": 1200}
    say = {"id": "say", "uses": "action:say", "foreach": items, "with": {"args": ["${{ vars.item }}", spoken]}}
    run_id = field.submit(field.workflow("ticks", [say], actions=actions, programs=["echo"], concurrency=64))
    assert field.json("resume", run_id, "--workers", "2", limit=300).code == 0
    _multiply(field)
    listings = [verb.replace("SOURCE", run_id) for verb in LISTINGS]
    choices = [(verb, reader, mode) for verb in listings for reader in ("head -1", "true") for mode in ("", "1")]
    step = max(1, len(choices) // repeats(len(choices), at_least=len(LISTINGS)))
    long = ("runs list", "inspect", "logs", "events @latest --output json", "plan", "schema")
    for verb, reader, unbuffered in [*choices[::step], ("runs list --limit 1000", "head -1", "1")]:
        code, shown, err = _piped(field, verb, reader, unbuffered)
        assert err == "", (verb, reader, unbuffered)
        # One artifact that the rows tell of has no bytes, so verifying ends with 5; a doctor may find fault.
        own = (5,) if "verify" in verb else (0, 3, 4, 5) if verb.startswith("doctor") else (0,)
        assert code in (*own, 141), (verb, reader, unbuffered)
        if reader == "head -1":
            assert shown.count("\n") == 0
            assert shown
        elif verb.startswith(long) and verb != "plan ticks.yaml":
            assert code in (0, 141)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["", "--output json", "--output jsonl"])
def test_a_foreground_run_goes_on_without_its_reader(field: Field, mode: str) -> None:
    """It reaches its normal end, and its exit code is that of the run."""
    file = field.workflow("ticks", [field.tick_fan("t", 20, 0.1, idempotent=False)])
    for reader in ("head -1", "true"):
        field.ledger.unlink(missing_ok=True)
        code, _, err = _piped(field, f"run {file} --workers 2 {mode}", reader)
        assert (code, err) == (0, "")
        assert len(field.lines()) == 20
    assert {row[0] for row in field.rows("SELECT state FROM runs")} == {"succeeded"}
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_runs_that_are_made_from_others_go_on_without_their_reader(field: Field) -> None:
    """`retry`, `repair`, `fork`, `resume`, `replay` and `compensate`: the end and the exit code of the run."""
    undo = {"uses": "action:undo", "with": {"args": [str(field.ledger), "undo", "0"]}}
    tick = {"kind": "builtin.shell.exec", "command": str(field.tick), "idempotency": "at_most_once"}
    tasks = [field.tick_task("t", 0.1, idempotent=True, compensate=undo)]
    file = field.workflow("ticks", tasks, actions={"undo": tick})
    source = field.json("run", file).data["runId"]
    waiting = field.submit(file)
    for words in (
        f"retry {file} {source} --from t --restart-successful",
        f"repair {file} {source} --from t --restart-successful --output json",
        f"fork {source}",
        f"resume {waiting} --output jsonl",
        f"replay {source}",
        f"compensate {source}",
    ):
        code, _, err = _piped(field, words, "true")
        # What a replay tells is all that it does after its end: it ends like a listing.
        assert (code in ((0, 141) if words.startswith("replay") else (0,)), err) == (True, ""), (words, code)
    assert field.labels() == ["t", "t", "t", "t", "t", "undo"]
    assert {row[0] for row in field.rows("SELECT state FROM runs")} == {"succeeded"}
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_whoever_only_watches_ends_and_the_run_does_not(field: Field) -> None:
    """`watch` and `wait` lose their reader."""
    pool = field.pool(2)
    run_id = field.submit(field.workflow("ticks", [field.tick_fan("t", 20, 0.1, idempotent=False)]))
    code, _, err = _piped(field, f"watch {run_id} --output json", "head -1")
    assert (code in (0, 141), err) == (True, "")
    wait_until(lambda: len(field.lines()) == 20, "the run goes on")
    assert field.json("wait", run_id).code == 0
    field.check_clean_end(drained=[pool])
