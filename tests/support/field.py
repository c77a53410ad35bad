"""The place of a field report: a folder of its own, the real program in real processes, a ledger, and a clean end.

Nothing in here knows the inside of agentctl but for its tables, which are read past all verbs. Whatever a test starts,
and whatever that starts in turn, has its working folder below the folder of the test; so it is found and ended when the
test is over, however it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentctl.store.process_identity import Liveness, ProcessIdentity, liveness

from support.children import PATIENCE, wait_until
from support.scale import scale, time_factor

_SCRIPT = Path(sys.executable).with_name("agentctl")
PROGRAM: tuple[str, ...] = (
    (str(_SCRIPT),) if _SCRIPT.exists() else (sys.executable, "-c", "from agentctl.cli import main; main()")
)

TICK = """\
#!/bin/sh
# tick LEDGER LABEL REST: one line at the end of the ledger in one write, then a rest: so many seconds, or for a file.
printf '%s %s %s\\n' "$AGENTCTL_EFFECT_ID" "$2" "$(date +%s.%N)" >> "$1"
case "$3" in
0) ;;
/*) until [ -e "$3" ]; do sleep 0.02; done ;;
*) exec sleep "$3" ;;
esac
"""

LOCKER = """\
# locker DATABASE SHORTEST LONGEST SECONDS SEED: holds the write lock again and again, as a stranger would.
import random, sqlite3, sys, time
path, (shortest, longest, seconds, seed) = sys.argv[1], map(float, sys.argv[2:6])
chance, held, end = random.Random(seed), 0, time.monotonic() + seconds
while time.monotonic() < end:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    time.sleep(chance.uniform(shortest, longest))
    connection.execute("ROLLBACK")
    connection.close()
    held += 1
print(held)
"""

FORBIDDEN = ("Traceback (most recent call last)", "Exception ignored", "database is locked", "malformed", "disk I/O")


def seconds(full: float, at_least: float = 0.0) -> float:
    """A duration of a scenario: `full` at full scale, shorter otherwise."""
    return float(min(full, max(full * scale(), at_least)))


def bound(limit: float) -> float:
    """A bound of time that is asserted."""
    return float(limit * time_factor())


@dataclass(frozen=True)
class Result:
    """What one command has done."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def data(self) -> Any:
        """`data` of the success envelope, the last line of stdout."""
        envelope = json.loads(self.out.splitlines()[-1])
        assert envelope["ok"] is True, envelope
        return envelope["data"]

    @property
    def error(self) -> Any:
        """`error` of the Error envelope, the only line of stderr; stdout has to be empty."""
        assert self.out == "", self.out
        assert self.err.count("\n") == 1, self.err
        envelope = json.loads(self.err)
        assert (envelope["kind"], envelope["ok"]) == ("Error", False)
        assert envelope["error"]["exitCode"] == self.code
        return envelope["error"]

    @property
    def diagnostics(self) -> list[dict[str, Any]]:
        """`diagnostics` of the envelope on stderr."""
        found: list[dict[str, Any]] = json.loads(self.err)["diagnostics"]
        return found


@dataclass(frozen=True)
class Line:
    """One execution, as the ledger tells it."""

    effect: str
    label: str
    time: float


@dataclass(frozen=True)
class WorkerRow:
    """A worker that is recorded and alive."""

    process_id: str
    name: str
    pid: int
    state: str


class Started:
    """A process in the background, in a session of its own, with its output in files."""

    def __init__(self, popen: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.popen = popen
        self._out = out
        self._err = err
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def err(self) -> str:
        """What it has said on stderr until now."""
        return self._err.read_text(errors="replace")

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def wait(self, limit: float = PATIENCE) -> Result:
        """Its end, which has to come."""
        try:
            code = self.popen.wait(bound(limit))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.popen.args!r} did not end within {bound(limit):g} s\n{self.err}") from None
        spent = time.monotonic() - self._began
        return Result(code, self._out.read_text(errors="replace"), self.err, spent)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.running():
            self.popen.send_signal(number)


class Field:
    """The folder, the program, the ledger and the processes of one test."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.folder = self.root / "work"
        self.ledger = self.root / "ledger"
        self.may_end = self.root / "may-end"
        self.tick = self.tool("tick", TICK)
        self._logs = self.root / "logs"
        for folder in (self.folder, self._logs):
            folder.mkdir()
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("AGENTCTL_", "NO_COLOR"))
        }
        self._started: list[Started] = []
        self._count = 0

    # -- files -----------------------------------------------------------------------------------------------------

    @property
    def database(self) -> Path:
        """The default database."""
        return self.folder / ".agentctl" / "runtime.db"

    def tool(self, name: str, text: str) -> Path:
        """A program outside the workspace."""
        path = self.root / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def text(self, name: str, text: str) -> Path:
        """A file in the workspace."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def lease(self, lease: float, heartbeat: float | None = None) -> None:
        """Length of leases and heartbeats of every process that is started from now on."""
        self.environment["AGENTCTL_LEASE_SECONDS"] = f"{lease:g}"
        self.environment["AGENTCTL_HEARTBEAT_SECONDS"] = f"{lease / 5 if heartbeat is None else heartbeat:g}"

    # -- workflows -------------------------------------------------------------------------------------------------

    def workflow(
        self,
        name: str,
        tasks: Sequence[Mapping[str, Any]],
        *,
        actions: Mapping[str, Any] | None = None,
        programs: Sequence[str] = (),
        concurrency: int = 8,
        deliveries: int | None = None,
        **spec: Any,
    ) -> str:
        """A document with the actions `tick-n` and `tick-i` and what else is given; returns the name of the file.

        The runtime's `maxDeliveries` is the default of 3 unless given.
        """
        runtime: dict[str, Any] = {"maxConcurrency": concurrency}
        if deliveries is not None:
            runtime["maxDeliveries"] = deliveries
        document = {
            "apiVersion": "agentctl.dev/v1",
            "kind": "Workflow",
            "metadata": {"name": name},
            "spec": {
                "policy": {"approval": "never", "processAllowlist": ["tick", "sh", *programs]},
                "runtime": runtime,
                "actions": {
                    "tick-n": self._tick("at_most_once"),
                    "tick-i": self._tick("idempotent"),
                    **(actions or {}),
                },
                "tasks": list(tasks),
                **spec,
            },
        }
        self.text(f"{name}.yaml", json.dumps(document, indent=1))
        return f"{name}.yaml"

    def _tick(self, idempotency: str) -> dict[str, Any]:
        return {"kind": "builtin.shell.exec", "command": str(self.tick), "idempotency": idempotency}

    def tick_task(self, id: str, rest: float | Path = 0, *, idempotent: bool, **fields: Any) -> dict[str, Any]:
        """TICK-I or TICK-N: the idempotent one may be tried three times. It rests for so many seconds, or until a file
        is there (`may_end`): for what has to happen meanwhile, however long that takes."""
        task: dict[str, Any] = {
            "id": id,
            "uses": "action:tick-i" if idempotent else "action:tick-n",
            "timeoutSeconds": 3600,
            "with": {"args": [str(self.ledger), id, _rest(rest)]},
            **fields,
        }
        if idempotent:
            task.setdefault("retry", {"maxAttempts": 3})
        return task

    def tick_fan(
        self, id: str, count: int, rest: float | Path = 0, *, idempotent: bool, **fields: Any
    ) -> dict[str, Any]:
        """`count` ticks as one `foreach`, labelled ID-0, ID-1, …"""
        task = self.tick_task(id, rest, idempotent=idempotent, **fields)
        task["foreach"] = {"items": list(range(count)), "maxItems": max(1, count)}
        task["with"] = {"args": [str(self.ledger), f"{id}-${{{{ vars.item }}}}", _rest(rest)]}
        return task

    def lines(self) -> list[Line]:
        """What was really executed."""
        if not self.ledger.exists():
            return []
        found = []
        for text in self.ledger.read_text().splitlines():
            effect, label, moment = text.split(" ")
            found.append(Line(effect, label, float(moment)))
        return found

    def labels(self) -> list[str]:
        """The labels in the ledger, in their order."""
        return [line.label for line in self.lines()]

    # -- processes -------------------------------------------------------------------------------------------------

    def __call__(
        self,
        *arguments: str | bytes | Path,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        limit: float = PATIENCE,
        **options: Any,
    ) -> Result:
        """Run the program to its end."""
        began = time.monotonic()
        done = subprocess.run(
            [*prefix, *PROGRAM, *arguments],
            cwd=self.folder,
            env={**self.environment, **(env or {})},
            capture_output=True,
            timeout=bound(limit),
            check=False,
            **options,
        )
        result = Result(
            done.returncode,
            done.stdout.decode("utf-8", "replace"),
            done.stderr.decode("utf-8", "replace"),
            time.monotonic() - began,
        )
        refuse_noise(result.err, FORBIDDEN[:3])
        return result

    def json(self, *arguments: str | bytes | Path, **options: Any) -> Result:
        """The same with `--output json`."""
        return self(*arguments, "--output", "json", **options)

    def start(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> Started:
        """The program in the background."""
        return self.spawn(*prefix, *PROGRAM, *arguments, env=env)

    def spawn(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> Started:
        """Any program in the background."""
        self._count += 1
        out, err = (self._logs / f"{self._count}.{kind}" for kind in ("out", "err"))
        with open(out, "wb") as out_stream, open(err, "wb") as err_stream:
            popen = subprocess.Popen(
                argv,
                cwd=self.folder,
                env={**self.environment, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out_stream,
                stderr=err_stream,
                start_new_session=True,
            )
        started = Started(popen, out, err)
        self._started.append(started)
        return started

    def pool(self, count: int, *options: str, name: str = "p", **more: Any) -> Started:
        """`workers start`, which has become ready."""
        before = {worker.process_id for worker in self.workers()}
        process = self.start("workers", "start", "-n", str(count), "--name", name, *options, **more)

        def ready() -> bool:
            assert process.running(), process.err
            return sum(1 for worker in self.workers("idle", "busy") if worker.process_id not in before) >= count

        wait_until(ready, f"{count} workers of {name}")
        return process

    def coordinator(self) -> Started:
        """`coordinator start`, which has become ready."""
        process = self.start("coordinator", "start")

        def ready() -> bool:
            assert process.running(), process.err
            sql = "SELECT 1 FROM processes WHERE kind = 'coordinator' AND pid = ? AND stopped_at IS NULL"
            return bool(self.rows(sql, process.pid))

        wait_until(ready, "a coordinator")
        return process

    def locker(self, shortest: float, longest: float, seconds: float, seed: int) -> Started:
        """A stranger that locks the database back to back."""
        program = self.tool("locker.py", LOCKER)
        values = map(str, (shortest, longest, seconds, seed))
        return self.spawn(sys.executable, program, self.database, *values)

    def submit(self, *arguments: str) -> str:
        """Submit a file; the id of the run."""
        result = self.json("submit", *arguments)
        assert result.code == 0, result.err
        return str(result.data["runId"])

    def stop(self, process: Started, expected: int = 0, limit: float = PATIENCE) -> None:
        """SIGTERM, and the end with that exit code."""
        process.signal(signal.SIGTERM)
        result = process.wait(limit)
        assert result.code == expected, (result.code, result.err)

    # -- the database ----------------------------------------------------------------------------------------------

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The answer to a question, past all verbs; nothing if there is no database yet."""
        try:
            uri = f"file:{quote(str(self.database))}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30)) as connection:
                return connection.execute(sql, values).fetchall()
        except sqlite3.OperationalError as error:
            if "unable to open" in str(error) or "no such table" in str(error):
                return []
            raise

    def scalar(self, sql: str, *values: Any) -> Any:
        """The only value."""
        found = self.rows(sql, *values)
        assert len(found) == 1, found
        return found[0][0]

    def change(self, sql: str, *values: Any) -> None:
        """Change the database by hand, as a person with a shell might."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as connection, connection:
            connection.execute("PRAGMA foreign_keys = ON")
            assert connection.execute(sql, values).rowcount != 0, "nothing was changed"

    def change_schema(self, sql: str) -> None:
        """The same for a statement that changes no row: to take a guard away before a change."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=30)) as connection, connection:
            connection.execute(sql)

    def workers(self, *states: str) -> list[WorkerRow]:
        """The workers that are alive, by name."""
        found = []
        for process_id, name, pid, state, identity in self.rows(
            "SELECT process_id, name, pid, state, identity FROM processes WHERE kind = 'worker' ORDER BY name"
        ):
            wanted = not states or state in states
            if wanted and state not in ("stopped", "dead") and alive(identity):
                found.append(WorkerRow(process_id, name, pid, state))
        return found

    def tasks(self, run_id: str) -> dict[str, tuple[str, int, int]]:
        """Task id -> (state, attempt, deliveries of the last attempt), without the aggregates."""
        sql = (
            "SELECT t.task_id, t.state, t.attempt, a.delivery FROM tasks t JOIN attempts a ON a.task_no = t.task_no "
            "WHERE t.run_id = ? ORDER BY t.task_no, a.number"
        )
        return {row[0]: (row[1], row[2], row[3]) for row in self.rows(sql, run_id)}

    def holder(self, run_id: str) -> WorkerRow | None:
        """The worker that runs a task of this run whose effect has started."""
        sql = (
            "SELECT p.process_id, p.name, p.pid, p.state FROM attempts a JOIN processes p ON p.process_id = a.holder "
            "JOIN effects e ON e.attempt_id = a.attempt_id "
            "WHERE a.run_id = ? AND a.state = 'claimed' AND e.status = 'started' ORDER BY a.delivery, a.attempt_id"
        )
        found = self.rows(sql, run_id)
        return WorkerRow(*found[0]) if found else None

    def busy(self, run_id: str) -> WorkerRow:
        """The same, when it has come to that and the ledger has its line."""
        wait_until(lambda: self.holder(run_id) is not None, "a started effect")
        wait_until(lambda: bool(self.lines()), "a line in the ledger")
        found = self.holder(run_id)
        assert found is not None
        return found

    # -- the end ---------------------------------------------------------------------------------------------------

    def effect_processes(self) -> dict[int, str]:
        """Pid -> effect id of every process that carries the marker of an effect of this database."""
        known = {row[0] for row in self.rows("SELECT effect_id FROM effects")}
        found = {}
        for pid, environ in environments():
            match = re.search(rb"(?:^|\0)AGENTCTL_EFFECT_ID=([^\0]*)", environ)
            if match is not None and match[1].decode("utf-8", "replace") in known:
                found[pid] = match[1].decode()
        return found

    def assert_sound(self) -> None:
        """`db verify` finds nothing."""
        result = self.json("db", "verify")
        assert result.code == 0, result.out

    def check_clean_end(self, *, drained: Iterable[Started] = (), uncertain: bool = False) -> None:
        """After every scenario: nothing is left behind, whatever went wrong in it. `drained` pools are ended first."""
        for process in drained:
            self.stop(process)
        assert self.rows("PRAGMA integrity_check") == [("ok",)]
        orphaned = [
            (task_id, holder)
            for task_id, state, holder, identity in self.rows(
                "SELECT t.task_id, a.state, a.holder, p.identity FROM tasks t LEFT JOIN attempts a "
                "ON a.live_task = t.task_no LEFT JOIN processes p ON p.process_id = a.holder WHERE t.state = 'running'"
            )
            # What is finished waits for the next driver only.
            if state != "finished" and (identity is None or not alive(identity))
        ]
        assert orphaned == [], "tasks are running without a live owner"
        if not uncertain:
            assert self.rows("SELECT * FROM effects WHERE status = 'uncertain' AND superseded = 0") == []
            assert self.rows("SELECT * FROM budget_reservations WHERE state = 'open'") == []
        owned = {
            row[0]
            for row in self.rows(
                "SELECT e.effect_id FROM effects e JOIN attempts a ON a.attempt_id = e.attempt_id "
                "WHERE a.state = 'claimed'"
            )
        }
        survivors = {pid: effect for pid, effect in self.effect_processes().items() if effect not in owned}
        assert survivors == {}, "effect processes have survived"
        verified = self.json("artifacts", "verify")
        assert verified.code == 0, verified.out + verified.err
        for error in self.rows(
            "SELECT task_id, COUNT(*) FROM audit_events WHERE event_type = 'task.transition' AND task_id IS NOT NULL "
            "AND json_extract(payload_json, '$.to') IN ('succeeded', 'failed', 'skipped', 'cancelled') "
            "GROUP BY run_id, task_id HAVING COUNT(*) > 1"
        ):
            raise AssertionError(f"two end states of one task: {error}")
        for log in sorted(self._logs.glob("*.err")):
            refuse_noise(log.read_text(errors="replace"))

    def close(self) -> None:
        """End and reap everything."""
        for started in self._started:
            if started.running():
                started.popen.kill()
        deadline = time.monotonic() + PATIENCE
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for started in self._started:
            started.popen.wait(PATIENCE)

    def processes(self) -> list[int]:
        """Every living process whose working folder is below the folder of this test."""
        found = []
        for pid in pids():
            with contextlib.suppress(OSError):
                place = os.readlink(f"/proc/{pid}/cwd")
                if (place + "/").startswith(f"{self.root}/") and state_of(pid) not in "ZX":
                    found.append(pid)
        return found


def _rest(rest: float | Path) -> str:
    return str(rest) if isinstance(rest, Path) else f"{rest:g}"


def sh(script: str, **more: Any) -> dict[str, Any]:
    """An action that lets a shell carry out a script."""
    return {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", script], **more}


def refuse_noise(text: str, words: Sequence[str] = FORBIDDEN) -> None:
    """No traceback, and none of the words that users of a sound database must never see."""
    for word in words:
        assert word not in text, text


def alive(identity: str) -> bool:
    """Whether that very process lives."""
    return liveness(ProcessIdentity.from_text(identity)) is not Liveness.DEAD


def pids() -> list[int]:
    """Every process but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def environments() -> list[tuple[int, bytes]]:
    """Pid and environment of every process that shows it."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            found.append((pid, Path(f"/proc/{pid}/environ").read_bytes()))
    return found


def state_of(pid: int) -> str:
    """The letter of the kernel; X for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has)."""
    return state_of(pid) in "ZX"


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill(*victims: int) -> None:
    """kill -9, all at one instant as far as that is possible; those that have ended are passed over."""
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def eventually(condition: Callable[[], bool], what: str, limit: float) -> float:
    """Wait for something that has to come within `limit` seconds; how long it took."""
    began = time.monotonic()
    wait_until(condition, what, seconds=limit)
    return time.monotonic() - began
