"""A signal while a command waits to write, and one that comes when it has written."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def _locked(cli: Any) -> Iterator[None]:
    """A program that knows no gate holds SQLite's write lock."""
    with closing(sqlite3.connect(cli.database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


def _scalar(cli: Any, sql: str) -> Any:
    with closing(sqlite3.connect(cli.database, timeout=60)) as connection:
        return connection.execute(sql).fetchone()[0]


def _picture(cli: Any) -> tuple[Any, ...]:
    return tuple(
        _scalar(cli, sql)
        for sql in (
            "SELECT COUNT(*) FROM runs",
            "SELECT COUNT(*) FROM audit_events",
            "SELECT COUNT(*) FROM runs WHERE cancel_requested_at IS NOT NULL OR pause_requested_at IS NOT NULL",
        )
    )


@pytest.mark.parametrize("verb", ["submit", "run", "cancel", "pause"])
def test_a_wait_behind_a_foreign_lock_says_so_and_ends_at_a_signal(cli: Any, verb: str) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    before = _picture(cli)
    number = SIGNALS[verb in ("submit", "cancel")]
    with _locked(cli):
        process = cli.start(verb, "hello.yaml" if verb in ("submit", "run") else run_id)
        said = process.stderr.readline()
        assert str(os.getpid()) in said
        assert "write lock" in said
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (130, "", "")
    assert _picture(cli) == before


def test_a_limit_of_time_counts_while_the_run_waits_to_be_created(cli: Any) -> None:
    """It is over when the run exists at last, so nothing of it is executed: not even what needs no worker."""
    cli.json("memory", "put", "a", "1")
    limit = 0.5
    with _locked(cli):
        process = cli.start("run", "hello.yaml", "--timeout-seconds", str(limit), "--output", "json")
        assert "write lock" in process.stderr.readline()
        over = time.monotonic() + limit
        wait_until(lambda: time.monotonic() > over, "the limit is over")
    out, _ = process.communicate(timeout=60)
    outcome = json.loads(out)["data"]
    assert (process.returncode, outcome["state"], outcome["reason"]) == (130, "cancelled", "cancel_requested")
    assert outcome["cancelReason"] == "--timeout-seconds 0.5 is over"
    [task] = cli.json("inspect", outcome["runId"]).data["tasks"]
    assert (task["state"], task["attempt"], task["output"]) == ("cancelled", 0, None)


def _looks_at(process: subprocess.Popen[str], database: Path) -> bool:
    """Whether a process has opened a database."""
    folder = Path(f"/proc/{process.pid}/fd")
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            if os.readlink(folder / name) == str(database.resolve()):
                return True
    return False


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", ["wait", "watch"])
def test_who_only_looks_on_leaves_at_a_signal(cli: Any, verb: str, number: signal.Signals) -> None:
    run_id = cli.json("submit", "hello.yaml").data["runId"]
    before = _picture(cli)
    process = cli.start(verb, run_id)
    wait_until(lambda: _looks_at(process, cli.database), "it looks at the run")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert _picture(cli) == before


@contextmanager
def _stuffed_pipe() -> Iterator[tuple[int, Callable[[], str]]]:
    """A pipe that takes nothing until the returned function has read it to its end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filler = 0
    try:
        while True:
            filler += os.write(writing, b".")
    except BlockingIOError:
        os.set_blocking(writing, True)

    def rest() -> str:
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as stream:
            return stream.read()[filler:]

    yield writing, rest


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("verb", ["submit", "cancel", "memory"])
def test_what_is_written_is_told_though_a_signal_comes(cli: Any, verb: str, number: signal.Signals) -> None:
    """The answer cannot be printed when the signal comes, and is printed whole when it can."""
    arguments, written, shown = {
        "submit": (["submit", "hello.yaml"], "SELECT COUNT(*) FROM runs", "SELECT run_id FROM runs"),
        "cancel": (
            ["cancel", "RUN"],
            "SELECT COUNT(*) FROM runs WHERE ended_at IS NOT NULL",
            "SELECT run_id FROM runs",
        ),
        "memory": (
            ["memory", "put", "shown", "1"],
            "SELECT COUNT(*) FROM memory_entries WHERE key = 'shown'",
            "SELECT 'shown'",
        ),
    }[verb]
    cli.json("memory", "put", "a", "1")  # the database exists
    if verb == "cancel":
        arguments[1] = cli.json("submit", "hello.yaml").data["runId"]
    with _stuffed_pipe() as (stdout, rest):
        process = cli.start(*arguments, stdout=stdout, stderr=subprocess.DEVNULL)
        wait_until(lambda: _scalar(cli, written) == 1, "it is written")
        process.send_signal(number)
        said = rest()
        assert process.wait(timeout=60) == 0
    assert _scalar(cli, shown) in said
