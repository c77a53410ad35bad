"""agentctl as its users see it: a command with JSON on stdout. Only this file knows its verbs and records."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import end_tree, until

Record = dict[str, Any]

LONGEST_CALL = 900.0
RUN_ID = re.compile(r"run-[0-9a-f-]{32,36}")


class CallFailed(Exception):
    """agentctl ended with an exit code that the figure did not expect."""


def find_program() -> str:
    """The agentctl of this interpreter's environment, else the one on PATH."""
    beside = Path(sys.executable).with_name("agentctl")
    found = str(beside) if beside.exists() else shutil.which("agentctl")
    if found is None:
        raise CallFailed("agentctl is not installed in this environment")
    return found


@dataclass
class Program:
    """One database in one folder, and the verbs that the figures need."""

    folder: Path
    commands: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = find_program()
        self.database = self.folder / "bench.db"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENTCTL_")}

    def argv(self, *words: str) -> list[str]:
        """The command line, noted once for the report."""
        shown = RUN_ID.sub("RUN", " ".join(["agentctl", *words]).replace(str(self.folder), "$DIR"))
        if shown not in self.commands:
            self.commands.append(shown)
        return [self.path, *words]

    def call(self, *words: str, expect: tuple[int, ...] = (0,)) -> Record:
        """Run a verb on this database and give the `data` of its envelope."""
        argv = self.argv(*words, "--db", str(self.database), "--output", "json")
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LONGEST_CALL
        )
        if done.returncode not in expect:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise CallFailed(f"`agentctl {' '.join(words)}` ended with {done.returncode}: {said}")
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise CallFailed(f"`agentctl {' '.join(words)}` printed no JSON: {done.stdout[-300:]!r}")
        data: Record = json.loads(lines[-1])["data"]
        return data

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """A verb that goes on beside us. Its words go to a file that is shown when it ends too early."""
        log = (self.folder / f"{words[0]}.log").open("ab")
        argv = self.argv(*words, "--db", str(self.database))
        with log:
            return subprocess.Popen(
                argv, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @contextmanager
    def pool(self, size: int) -> Iterator[subprocess.Popen[bytes]]:
        """`workers start -n SIZE`, given to the caller once every worker is idle; drained at the end."""
        supervisor = self.start("workers", "start", "-n", str(size))
        try:
            until(f"{size} idle workers", 60, lambda: self.pool_is_idle(supervisor, size), pause=0.1)
            yield supervisor
        finally:
            supervisor.send_signal(signal.SIGTERM)
            try:
                supervisor.wait(20)
            except subprocess.TimeoutExpired:
                end_tree(supervisor.pid)
                supervisor.wait()

    def pool_is_idle(self, supervisor: subprocess.Popen[bytes], size: int) -> bool:
        if supervisor.poll() is not None:
            said = (self.folder / "workers.log").read_text(errors="replace")[-500:]
            raise CallFailed(f"`agentctl workers start` ended with {supervisor.returncode}: {said}")
        try:
            return self.idle_workers() >= size
        except CallFailed:
            return False  # the supervisor has not made the database yet

    def workers(self) -> list[Record]:
        found: list[Record] = self.call("workers", "list")["workers"]
        return found

    def idle_workers(self) -> int:
        return [worker["state"] for worker in self.workers()].count("idle")

    def run(self, workflow: Path, inputs: Path | None = None) -> str:
        """Drive a run in the foreground to its end and give its id."""
        words = ["run", str(workflow)] + (["--inputs-file", str(inputs)] if inputs else [])
        return self.succeeded(self.call(*words))

    def submit(self, workflow: Path, inputs: Path | None = None) -> str:
        words = ["submit", str(workflow)] + (["--inputs-file", str(inputs)] if inputs else [])
        return str(self.call(*words)["runId"])

    def wait(self, run: str) -> str:
        return self.succeeded(self.call("wait", run))

    def succeeded(self, outcome: Record) -> str:
        if outcome["state"] != "succeeded":
            raise CallFailed(f"run {outcome['runId']} ended as {outcome['state']}: {outcome.get('reason')}")
        return str(outcome["runId"])

    # What is read from records. Adapt these three when a record changes, nothing else.

    def run_seconds(self, run: str) -> float:
        """From the creation of a run to its end, as recorded."""
        status = self.call("status", run)
        ended = status.get("endedAt") or status["updatedAt"]
        return (milliseconds(ended) - milliseconds(status["createdAt"])) / 1000

    def enqueued_milliseconds(self, inspection: Record) -> float:
        """When the last attempt of the only task was enqueued: its row, else the event that made the task ready."""
        attempts = inspection.get("attempts") or inspection["tasks"][-1].get("attempts")
        if attempts:
            return milliseconds(attempts[-1]["enqueuedAt"])
        ready = [event for event in inspection["audit"] if event["payload"].get("to") == "ready"]
        return milliseconds(ready[-1]["createdAt"])

    def stdout_of_only_task(self, inspection: Record) -> str:
        output = inspection["tasks"][-1]["output"]
        return str((json.loads(output) if isinstance(output, str) else output)["stdout"])


def milliseconds(value: object) -> float:
    """A recorded time: epoch milliseconds, or ISO 8601 text."""
    if isinstance(value, int | float):
        return float(value)
    text = str(value)
    if text.isdecimal():
        return float(text)
    return datetime.datetime.fromisoformat(text).timestamp() * 1000
