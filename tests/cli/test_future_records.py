"""What a newer agentctl has written is refused by name, never shown as if it were understood, and hides no other."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support import tampering
from support.children import wait_until
from support.field import Field, kill
from support.rows import TABLES

RECORDS = {
    "effects": ("UPDATE effects SET format_version = 99", "an effect"),
    "events": ("UPDATE audit_events SET event_version = 99 WHERE sequence = 1", "an event"),
    "tasks": ("UPDATE tasks SET metadata_version = 99", "a task"),
    "runs": ("UPDATE runs SET runtime_state_version = 99", "was written by a newer"),
}


def _change(cli: Any, *statements: str) -> None:
    for sql in statements:
        tampering.change(cli.database, sql)


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_of_the_future_is_told_by_verify_and_inspect(cli: Any, what: str) -> None:
    sql, word = RECORDS[what]
    run_id = cli.json("run", "shell.yaml").data["runId"]
    assert cli.json("db", "verify").data["ok"]
    _change(cli, sql)
    verified = cli.json("db", "verify")
    assert verified.code == 5
    assert [problem["where"] for problem in verified.data["problems"]] == [run_id]
    assert word in verified.data["problems"][0]["message"]
    for result in (cli("inspect", run_id), cli.json("inspect", run_id)):
        assert (result.code, result.out) == (5, "")
        assert word in result.err
        assert "upgrade agentctl" in result.err


def test_an_entry_of_the_future_in_long_term_memory_is_told_by_verify(cli: Any) -> None:
    assert cli.json("memory", "put", "a", "1").code == 0
    _change(cli, "UPDATE long_term_memory SET format_version = 99")
    verified = cli.json("db", "verify")
    assert verified.code == 5
    assert "'a' of 'default'" in verified.data["problems"][0]["message"]


@pytest.mark.parametrize("what", ["runs", "tasks"])
def test_one_run_of_the_future_does_not_hide_the_others(cli: Any, what: str) -> None:
    strange = cli.json("submit", "hello.yaml").data["runId"]
    _change(cli, RECORDS[what][0])
    usual = cli.json("run", "hello.yaml").data["runId"]
    listed = cli.json("runs", "list")
    assert listed.code == 0
    problems = {run["runId"]: run["problem"] for run in listed.data["runs"]}
    assert problems[usual] is None
    assert problems[strange]["code"] == "incompatible_version"
    shown = cli("runs", "list")
    assert usual in shown.out
    assert "newer agentctl" in shown.err


@pytest.mark.parametrize("what", ["runs", "tasks", "events"])
def test_resume_says_nothing_of_going_on_before_it_refuses(cli: Any, what: str) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    _change(cli, RECORDS[what][0])
    result = cli("resume", run_id)
    assert (result.code, result.out) == (5, "")
    assert "resumed" not in result.err
    assert "newer agentctl" in result.err


def _tables(database: Path) -> dict[str, list[tuple[Any, ...]]]:
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection:
        return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}  # noqa: S608


def test_workers_take_nothing_of_such_a_run_and_go_on_when_it_is_none_any_more(field: Field) -> None:
    """Everybody has died in the middle of it: what was claimed is not rescued, and what is ready is not claimed."""
    tasks = [field.tick_task("a", idempotent=True), field.tick_fan("again", 5, field.may_end, idempotent=True)]
    started = field.start("run", field.workflow("one", tasks), "--workers", "1")
    wait_until(lambda: len(field.lines()) > 1, "the second command")
    while victims := field.processes():
        kill(*victims)
    started.wait()
    [(run_id,)] = field.rows("SELECT run_id FROM runs")
    sql = "SELECT * FROM {} WHERE run_id = ? ORDER BY 1, 2"
    questions = [sql.format(table) for table in ("attempts", "tasks", "effects", "audit_events", "checkpoints")]
    tampering.change(field.database, "UPDATE run_budgets SET format_version = 99")
    before, done = [field.rows(question, run_id) for question in questions], field.labels()
    pool = field.pool(2)
    other = field.submit(field.workflow("two", [field.tick_fan("b", 6, idempotent=True)]))
    assert field.json("wait", other).code == 0
    assert [field.rows(question, run_id) for question in questions] == before
    assert [label for label in field.labels() if label.startswith("a")] == done
    field.stop(pool)
    tampering.change(field.database, "UPDATE run_budgets SET format_version = 1 WHERE run_id = ?", run_id)
    field.may_end.touch()
    assert field.json("resume", run_id).code == 0
    assert {f"again-{number}" for number in range(5)} <= set(field.labels())
    field.check_clean_end()


def _refused(cli: Any, *arguments: str) -> None:
    """The command says which run, and changes nothing at all."""
    before = _tables(cli.database)
    result = cli.json(*arguments)
    assert (result.code, result.error["code"]) == (5, "incompatible_version"), arguments
    assert result.error["remedy"] == "upgrade agentctl"
    assert _tables(cli.database) == before, arguments


def test_nobody_answers_pauses_or_concludes(cli: Any) -> None:
    cli.write("gate.yaml", GATE)
    asked = cli.json("run", "gate.yaml")
    assert asked.data["reason"] == "approval_required"
    [approval] = cli.json("approvals", "list").data["approvals"]
    cli.write("unclear.yaml", GATE.replace("always", "never"))
    unclear = cli.json("run", "unclear.yaml")
    assert unclear.data["reason"] == "uncertain_effect"
    [effect] = cli.json("effects", "list", "--uncertain").data["effects"]
    cli.write("result.json", "{}")
    _change(cli, "UPDATE checkpoints SET format_version = 99")
    for verb in ("approve", "reject"):
        _refused(cli, "approvals", verb, approval["approvalId"])
    for run in (asked, unclear):
        _refused(cli, "pause", run.data["runId"])
    said = ("effects", "reconcile", effect["request"]["id"], "--reason", "looked", "--approved", "--status")
    _refused(cli, *said, "not-applied")
    _refused(cli, *said, "applied", "--result-file", "result.json")


GATE = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: gate}
spec:
  policy: {approval: always, processAllowlist: [sleep]}
  actions: {wait: {kind: builtin.shell.exec, command: sleep, args: ["60"]}}
  tasks: [{id: a, uses: action:wait, timeoutSeconds: 1}]
"""


def test_a_derived_run_with_a_lineage_of_the_future_is_refused(cli: Any) -> None:
    cli.write("fails.yaml", cli.folder.joinpath("shell.yaml").read_text().replace('"true"', '"exit 1"'))
    source = cli.json("run", "fails.yaml").data["runId"]
    made = cli.json("retry", "fails.yaml", source, "--failed").data["runId"]
    assert made != source
    assert cli.json("inspect", made).code == 0
    _change(cli, "UPDATE runs SET lineage_json = json_set(lineage_json, '$.formatVersion', 2) WHERE mode = 'retry'")
    _refused(cli, "inspect", made)
    _refused(cli, "retry", "fails.yaml", made, "--failed")
    _refused(cli, "replay", made)
    assert cli.json("inspect", source).code == 0
    assert cli.json("db", "verify").code == 5
