"""The load tests work, pass in small, and their verifier finds what it is there to find."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from support.scale import time_factor

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "ops" / "loadtest" / "run.py"


def load(*words: str | Path, code: int = 0) -> str:
    """One load test; its report."""
    done = subprocess.run(
        [sys.executable, str(RUN), *map(str, words)],
        capture_output=True,
        encoding="utf-8",
        timeout=240 * time_factor(),
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "/no/such/folder"),
        ("verify", str(ROOT)),
        ("steady", "--minutes", "0"),
        ("torture", "--minutes", "-1"),
        ("torture", "--minutes", "nan"),
        ("torture", "--kill-every", "0"),
        ("many-runs", "--workers", "0"),
        ("many-runs", "--runs", "0"),
        ("mixed", "--tasks", "1.5"),
        ("mixed", "--folder", str(RUN)),
    ],
)
def test_bad_arguments_are_told_in_a_line(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), *words], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr.splitlines()[-1]


def figure(report: str, name: str) -> float:
    """A figure of a report."""
    [line] = [line for line in report.splitlines() if line.startswith(f"| {name} |")]
    return float(line.split("|")[2].replace(",", ""))


def test_many_runs(tmp_path: Path) -> None:
    report = load("many-runs", "--runs", "4", "--tasks", "10", "--workers", "2", "--folder", tmp_path)
    assert "**Passed.**" in report
    assert figure(report, "tasks/s") > 0
    assert list(tmp_path.iterdir()) == []


def test_one_run(tmp_path: Path) -> None:
    report = load("large-run", "--tasks", "200", "--workers", "2", "--folder", tmp_path)
    assert figure(report, "peak memory of the coordinator in MB") > 1


def ledger_of(folder: Path, *kinds: str) -> Path:
    """The longest ledger of some kinds."""
    found = [path for kind in kinds for path in folder.glob(f"{kind}-*.ledger")]
    return max(found, key=lambda path: path.stat().st_size)


def twice(folder: Path) -> None:
    path = ledger_of(folder, "once", "budget")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[0]]) + "\n")


def never(folder: Path) -> None:
    path = ledger_of(folder, "once", "budget")
    path.write_text("\n".join(path.read_text().splitlines()[1:]) + "\n")


def in_the_database(statement: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        connection = apsw.Connection(str(folder / "state" / "runtime.db"))
        connection.execute(statement)
        assert connection.changes() > 0
        connection.close()

    return change


def told_of_a_lock(folder: Path) -> None:
    with (folder / "pool0.log").open("a") as log:
        log.write("w1: database is locked\n")


CLAIMED = (
    "UPDATE attempts SET state = 'claimed', queue = 'claimed', holder = 'nobody', outcome = NULL, "
    "lease_expires_at = 1, live_task = task_no WHERE attempt_id = (SELECT MIN(attempt_id) FROM attempts)"
)
DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (twice, "was executed 2 times"),
    (never, "was never executed, but the run has succeeded"),
    (in_the_database("UPDATE budget_lines SET used = used + 1 WHERE used > 0"), "units used"),
    (in_the_database("UPDATE run_outputs SET output_json = '{}'"), "its output is not that of"),
    (in_the_database("UPDATE tasks SET output_json = '1'"), "db verify"),
    (in_the_database(CLAIMED), "is still held by nobody"),
    (told_of_a_lock, "database is locked"),
]


@pytest.mark.timeout(900)
def test_a_short_torture_and_its_verdict(tmp_path: Path) -> None:
    """One torture run for all of it: it takes its time. Then its folder is damaged in each way, one after the other."""
    words = ("--minutes", "0.1", "--seed", "7", "--workers", "4", "--kill-every", "0.5", "--lease", "1")
    report = load("torture", *words, "--folder", tmp_path, "--keep")
    assert "**Passed.**" in report
    assert figure(report, "executions") > 0
    assert "| killed: " in report
    [kept] = tmp_path.glob("agentctl-load-*")
    assert "**Passed.**" in load("verify", kept)
    for damage, word in DAMAGES:
        copy = tmp_path / "copy"
        shutil.copytree(kept, copy)
        damage(copy)
        report = load("verify", copy, code=1)
        assert "**Failed**" in report
        assert word in report
        shutil.rmtree(copy)
