"""What a newer agentctl has written is refused by name, never shown as if it were understood, and hides no other."""

from __future__ import annotations

from typing import Any

import pytest
from support import tampering

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
