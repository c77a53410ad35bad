"""Log lines: text or JSON, with the fields of the attempt, and never more of one kind than a person can read."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest
from agentctl.store import log_lines
from agentctl.store.log_lines import LIMIT_LINES, LIMIT_SECONDS, JsonLines, RateLimit, TextLines
from support.children import wait_until
from support.clock import ManualClock
from support.field import Field


def record(message: str, *args: object, level: int = logging.WARNING, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("agentctl.test", level, "f.py", 1, message, args, None)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


@pytest.fixture(autouse=True)
def _free() -> object:
    yield
    log_lines.unbind()


def test_a_pool_writes_json_lines(field: Field) -> None:
    """Every line of every process is an object; what an attempt says carries its name."""
    pool = field.pool(1, "--log-format", "json", "--log-level", "info")
    run_id = field.submit(field.workflow("w", [field.tick_task("bad", 0, idempotent=False)], actions={
        "tick-n": {"kind": "builtin.shell.exec", "command": "sh"},
    }))  # fmt: skip
    assert field.json("wait", run_id).code == 4
    wait_until(lambda: "failed" in pool.err, "the failure is told")
    found = [json.loads(line) for line in pool.err.splitlines()]
    assert {"p", "coordinator"} & {line["process"] for line in found} != set()
    [line] = [line for line in found if line.get("task") == "bad"]
    assert (line["run"], line["attempt"], line["delivery"], line["level"]) == (run_id, 1, 1, "info")
    assert line["trace"]
    assert line["pid"] != pool.pid
    adopted = [line for line in found if "adopted" in line["message"]]
    assert [line["run"] for line in adopted] == [run_id]
    field.stop(pool)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"AGENTCTL_LOG_FORMAT": "xml"}, []),
        ({"AGENTCTL_LOG_LEVEL": "loud"}, []),
        ({}, ["--log-level", "loud"]),
        ({}, ["--log-format", "xml"]),
    ],
)
@pytest.mark.parametrize("verb", [("workers", "start"), ("worker", "start"), ("coordinator", "start")])
def test_what_is_no_level_or_format(
    field: Field, verb: list[str], environment: dict[str, str], words: list[str]
) -> None:
    result = field.json(*verb, *words, env=environment)
    assert result.code == 2
    assert "none of" in result.error["message"] or "not one of" in result.error["message"]
    assert not field.database.exists()


def test_a_json_line_has_everything() -> None:
    log_lines.bind(run="r", task="t", attempt=2, delivery=1, trace="x")
    line = json.loads(JsonLines("w1").format(record("a\n%s", "ü\ud800", task="other")))
    assert line["message"] == "a\nü\ud800"
    assert (line["process"], line["level"], line["logger"]) == ("w1", "warning", "agentctl.test")
    assert [line[name] for name in log_lines.FIELDS] == ["r", "other", 2, 1, "x"]
    assert line["time"].endswith("+00:00")
    assert "\n" not in JsonLines("w1").format(record("a\nb"))


def test_a_line_for_people_and_for_the_journal() -> None:
    log_lines.bind(run="r", task="t")
    text = TextLines("w1").format(record("it %s", "broke"))
    assert text.endswith("w1 WARNING it broke run=r task=t")
    journal = TextLines("w1", journal=True).format(record("two\nlines", level=logging.ERROR))
    assert journal == "<3>two\n<3>lines run=r task=t"


def test_the_journal_is_known_by_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert log_lines._is_journal()
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    assert not log_lines._is_journal()


def test_lines_of_one_kind_are_limited_and_counted(clock: ManualClock) -> None:
    limit = RateLimit(clock.monotonic)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(limit)
    handler.setFormatter(TextLines("w1"))
    for number in range(LIMIT_LINES + 30):
        handler.handle(record("lost %d", number))
    handler.handle(record("something else"))
    assert len(stream.getvalue().splitlines()) == LIMIT_LINES + 1
    clock.advance(LIMIT_SECONDS - 1)
    handler.handle(record("lost %d", 1))
    assert len(stream.getvalue().splitlines()) == LIMIT_LINES + 1
    clock.advance(1)
    handler.handle(record("lost %d", 2))
    assert "lost 2 (and 31 more like it, left out)" in stream.getvalue()
    clock.set_wall(0)
    handler.handle(record("lost %d", 3))  # a clock that is set back silences nobody
    assert "lost 3" in stream.getvalue()
