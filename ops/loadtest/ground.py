"""The ground of a load test: a folder with a database, pools that are started again whenever they end, and looks.

What is done goes through the command line only, as a user would do it. What is looked at comes from the database by a
connection that cannot write. `bench/` lends its reading of /proc and its description of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
from agentctl.store import process_identity
from agentctl.store.process_identity import HOLDER_MARKER, Liveness, ProcessIdentity

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

from machine import describe
from processes import peak_bytes
from program import find_program

__all__ = ["Ground", "Services", "describe", "peak_bytes", "pools", "scratch", "wait_for"]

Record = dict[str, Any]

CALL_SECONDS = 600.0
ORDERS = "orders.jsonl"
"""What was asked for, one line of JSON for each run. The verifier needs it and the folder, nothing else."""


class CallFailed(Exception):
    """A verb ended with an exit code that nobody expected."""


@dataclass(frozen=True)
class Answer:
    """What a verb has said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Record:
        """`data` of its envelope."""
        found: Record = json.loads(self.out.splitlines()[-1])["data"]
        return found


@dataclass(frozen=True)
class Member:
    """A living process of the database."""

    process_id: str
    kind: str
    name: str
    identity: ProcessIdentity
    state: str


@dataclass
class Ground:
    """One folder and one database."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.program = find_program()
        self.database = self.folder / "state" / "runtime.db"
        own = {name: value for name, value in os.environ.items() if not name.startswith("AGENTCTL_")}
        self.environment = {**own, "AGENTCTL_DB": str(self.database), **self.environment}
        self._local = threading.local()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def ask(self, *words: str, seconds: float = CALL_SECONDS) -> Answer:
        """A verb to its end, with JSON on stdout."""
        done = subprocess.run(
            [self.program, *words, "--output", "json"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=seconds,
            check=False,
        )
        if "Traceback" in done.stderr:
            raise CallFailed(f"`agentctl {' '.join(words)}` showed a traceback:\n{done.stderr[-3000:]}")
        return Answer(done.returncode, done.stdout, done.stderr)

    def call(self, *words: str, expect: tuple[int, ...] = (0,), seconds: float = CALL_SECONDS) -> Record:
        """The same, for its data; `CallFailed` for an exit code that is not expected."""
        answer = self.ask(*words, seconds=seconds)
        if answer.code not in expect:
            said = (answer.err or answer.out).strip()[-800:]
            raise CallFailed(f"`agentctl {' '.join(words)}` ended with {answer.code}: {said}")
        return answer.data

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """A verb that goes on beside us; what it says goes to `NAME.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [self.program, *words],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def write(self, name: str, document: Record) -> Path:
        """A workflow file; JSON is YAML."""
        path = self.folder / name
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return path

    # -- what was ordered ------------------------------------------------------------------------------------------

    def note(self, order: Record) -> None:
        """Write down what was asked for."""
        with (self.folder / ORDERS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(order) + "\n")

    def orders(self) -> list[Record]:
        """Everything that was asked for; the last word on each run counts."""
        found: dict[str, Record] = {}
        path = self.folder / ORDERS
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            order: Record = json.loads(line)
            found[order["key"]] = {**found.get(order["key"], {}), **order}
        return list(found.values())

    # -- looks -----------------------------------------------------------------------------------------------------

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """A look that can write nothing. Each thread has a connection of its own."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = apsw.Connection(str(self.database), flags=apsw.SQLITE_OPEN_READWRITE)
            connection.execute("PRAGMA query_only = 1")
            connection.set_busy_timeout(60_000)
            self._local.connection = connection
        found: list[tuple[Any, ...]] = connection.execute(query, values).fetchall()
        return found

    def is_made(self) -> bool:
        """Whether there is a database with its tables; the first pool makes it."""
        return self.database.exists() and bool(self.rows("SELECT 1 FROM sqlite_schema WHERE name = 'processes'"))

    def members(self, *kinds: str) -> list[Member]:
        """Processes of some kinds that live; a stopped one does."""
        if not self.is_made():
            return []
        query = "SELECT process_id, kind, name, identity, state FROM processes WHERE stopped_at IS NULL"
        found = [
            Member(process_id, kind, name, ProcessIdentity.from_text(text), state)
            for process_id, kind, name, text, state in self.rows(query)
            if kind in kinds
        ]
        return [member for member in found if process_identity.liveness(member.identity) is Liveness.ALIVE]

    def effect_processes(self) -> list[int]:
        """Living processes that a worker of this database has started for an effect."""
        holders = [row[0] for row in self.rows("SELECT process_id FROM processes")]
        return process_identity.find_marked(holders, HOLDER_MARKER)

    def wal_bytes(self) -> int:
        """Size of the log beside the database; asked by name, never opened."""
        try:
            return os.stat(f"{self.database}-wal").st_size
        except FileNotFoundError:
            return 0


class Services:
    """Processes that a service manager would start again whenever they end."""

    def __init__(self, ground: Ground, commands: dict[str, tuple[str, ...]]) -> None:
        self.ground = ground
        self.ends: list[tuple[str, int]] = []
        """Names and exit codes of those that were started again."""
        self._commands = commands
        self._running = {name: ground.start(name, *words) for name, words in commands.items()}

    def look(self) -> None:
        """Start again what has ended."""
        for name, process in self._running.items():
            code = process.poll()
            if code is not None:
                self._running[name] = self.ground.start(name, *self._commands[name])
                self.ends.append((name, code))

    def stop(self, seconds: float) -> list[int | None]:
        """SIGTERM to all; exit codes, None for one that does not end."""
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + seconds
        codes: list[int | None] = []
        for process in self._running.values():
            try:
                codes.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes

    def kill(self) -> None:
        """The end of everything that is left, effects included. For a test that is over or has failed."""
        for process in self._running.values():
            process.kill()
            process.wait()
        if self.ground.is_made():
            for member in self.ground.members("worker", "supervisor", "coordinator", "run"):
                process_identity.kill(member.identity)
            holders = [row[0] for row in self.ground.rows("SELECT process_id FROM processes")]
            process_identity.kill_marked(holders, wait_seconds=10.0, marker=HOLDER_MARKER)


@contextmanager
def pools(ground: Ground, workers: int, count: int = 1) -> Iterator[Services]:
    """`count` pools with `workers` workers in all, given to the caller once all of them are idle."""
    share = [workers // count + (1 if number < workers % count else 0) for number in range(count)]
    commands = {
        f"pool{number}": ("workers", "start", "-n", str(size), "--name", f"pool{number}")
        for number, size in enumerate(share)
    }
    services = Services(ground, commands)
    try:
        wait_for(
            f"{workers} idle workers",
            120,
            lambda: sum(member.state == "idle" for member in ground.members("worker")) >= workers,
            0.1,
        )
        yield services
    finally:
        services.kill()


def wait_for(what: str, seconds: float, ready: Any, pause: float = 0.2) -> None:
    """Wait until `ready()`; `TimeoutError` says what did not come."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(pause)


@contextmanager
def scratch(keep: bool, folder: Path | None) -> Iterator[Path]:
    """A fresh folder (in `folder` if given), removed afterwards unless it is to be kept or something failed."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="agentctl-load-", dir=folder))
    try:
        yield path
    except BaseException:
        print(f"what there is of it is left in {path}", file=sys.stderr)  # noqa: T201
        raise
    if not keep:
        shutil.rmtree(path, ignore_errors=True)
