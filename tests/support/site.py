"""A folder with a database, and the real program in real processes around it. Nothing that starts here stays behind.

Every process carries a marker in its environment, which its children inherit; effects, whose environment is cleared,
carry the id of their worker. `close` ends all of them, whatever has happened to their parents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from agentctl.store import process_identity
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.process_identity import HOLDER_MARKER, Liveness, ProcessIdentity
from agentctl.store.records import ProcessRow, Run

from support.artifacts import assert_sound
from support.children import PATIENCE, wait_until
from support.rows import check_chains, rows
from support.scale import time_factor

PROGRAM = (sys.executable, "-c", "from agentctl.cli import main; main()")
MARKER = "TEST_SITE"
SHELL = """\
"$@" & child=$!
trap "told=1; kill -TERM $child" TERM
wait $child; code=$?
if [ -n "$told" ]; then wait $child; code=$?; fi
exit $code
"""
ORPHAN = re.compile(
    r"Traceback \(most recent call last\):\n(?:  .*\n)+?.*reduction\.pickle\.load\(from_parent\)\n(?:  .*\n)*"
    r"(?:EOFError|_pickle\.UnpicklingError): .*\n"
)
"""What Python's own `multiprocessing` says in a child whose parent is killed while it starts that child."""


@dataclass(frozen=True)
class Answer:
    """What one command has said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """`data` of the JSON envelope."""
        assert self.out, self.err
        return json.loads(self.out)["data"]


@dataclass(frozen=True)
class Picture:
    """What a run has come to, without anything that depends on time, delivery or chance."""

    state: str
    reason: str | None
    output: str | None
    tasks: dict[str, tuple[str, str | None, str | None]]
    """task id -> (state, output, error)"""
    memory: dict[str, Any]


class Site:
    """One database and everything that runs on it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.database = folder / "state" / "runtime.db"
        self._marker = uuid.uuid4().hex
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("AGENTCTL_")}
        self._environment |= {MARKER: self._marker, "AGENTCTL_DB": str(self.database), **environment}
        self._started: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._store: Store | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # -- processes -------------------------------------------------------------------------------------------------

    def start(
        self, *arguments: str | Path, fault: str | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A command in the background. A shell stands above it: whatever kills its parent does not kill the test."""
        log = self.folder / f"stderr-{len(self._started):03d}"
        env = {**self._environment, **(environment or {})}
        if fault is not None:
            env["AGENTCTL_FAULT"] = fault
        with open(log, "wb") as err, open(log.with_name(log.name.replace("err", "out")), "wb") as out:
            process = subprocess.Popen(
                ["/bin/sh", "-c", SHELL, "sh", *PROGRAM, *map(str, arguments)],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started.append((process, log))
        return process

    def ask(
        self, *arguments: str | Path, seconds: float = PATIENCE, fault: str | None = None, form: str = "json"
    ) -> Answer:
        """A command to its end, with a JSON answer, or with `form="human"` one for people."""
        env = dict(self._environment)
        if fault is not None:
            env["AGENTCTL_FAULT"] = fault
        done = subprocess.run(
            [*PROGRAM, *map(str, arguments), "--output", form],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=seconds * time_factor(),
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Answer(done.returncode, done.stdout, done.stderr)

    def submit(self, file: str | Path, **inputs: Any) -> str:
        """Submit a workflow; the id of its run."""
        given = ["--inputs", json.dumps(inputs)] if inputs else []
        answer = self.ask("submit", file, *given)
        assert answer.code == 0, answer.err
        return str(answer.data["runId"])

    def write(self, name: str, document: Mapping[str, Any]) -> Path:
        """A workflow file; JSON is YAML."""
        path = self.folder / name
        path.write_text(json.dumps(document), encoding="utf-8")
        return path

    # -- looks -----------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """A connection of the test's own, to look and never to write."""
        if self._store is None:
            self._store = Store(self.database, SystemClock())
        return self._store

    def wait_for(self, condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
        """Wait for something that has to come; a failure tells how things stand."""
        try:
            wait_until(condition, what, seconds=seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    def run(self, run_id: str) -> Run:
        """The row of a run."""
        return self.store.get_run(run_id)

    def only_run(self) -> str | None:
        """The id of the only run, if there is one."""
        if not self.database.exists():
            return None
        found = rows(self.store, "SELECT run_id FROM runs")
        assert len(found) < 2
        return found[0][0] if found else None

    def wait_for_end(self, run_id: str, *, seconds: float = PATIENCE) -> Run:
        """Wait until a run does not go on by itself any more."""
        self.wait_for(lambda: self.run(run_id).state != "running", f"{run_id} ends", seconds=seconds)
        return self.run(run_id)

    def living(self, kind: str) -> list[ProcessRow]:
        """Processes of a kind that live."""
        if not self.database.exists():
            return []
        return [row for row in self.store.live_processes(kind) if lives(row)]

    def wait_for_workers(self, count: int) -> None:
        """Wait until so many workers are idle."""
        self.wait_for(
            lambda: sum(1 for row in self.living("worker") if row.state == "idle") >= count, f"{count} idle workers"
        )

    def picture(self, run_id: str) -> Picture:
        """What a run has come to."""
        return picture_of(self.store, run_id)

    def deliveries(self, run_id: str) -> dict[str, int]:
        """How often each task was handed to a worker."""
        return dict(rows(self.store, "SELECT task_id, SUM(delivery) FROM attempts WHERE run_id = ? GROUP BY 1", run_id))

    def uncertain(self, run_id: str) -> list[str]:
        """Tasks with an effect of which nobody knows whether it happened."""
        found = rows(self.store, "SELECT task_id FROM effects WHERE run_id = ? AND status = 'uncertain'", run_id)
        return sorted(task for (task,) in found)

    def artifacts(self, run_id: str) -> dict[tuple[str, str], bytes]:
        """(task, path) -> the bytes that a run keeps."""
        store = self.store.artifacts
        return {
            (item["taskId"], item["path"]): store.blobs.path_of(item["digest"]).read_bytes()
            for item in store.references(run_id, None)
        }

    def report(self) -> str:
        """How things stand, for the message of a failure."""
        parts = []
        if self.database.exists():
            for query in (
                "SELECT run_id, state, reason, driver FROM runs",
                "SELECT state, COUNT(*) FROM tasks GROUP BY 1",
                "SELECT task_id, state, holder, delivery, outcome FROM attempts WHERE state <> 'closed' LIMIT 20",
            ):
                parts.append(str(rows(self.store, query)))
            parts += [f"{row.kind} {row.name} {row.pid} {row.state} {lives(row)}" for row in self.store.all_processes()]
        for process, log in self._started:
            parts.append(f"-- {process.args[7:]!r} -> {process.poll()}")  # type: ignore[index]
            parts.append(log.read_text(encoding="utf-8", errors="replace")[-2000:])
        return "\n".join(parts)

    # -- the end ---------------------------------------------------------------------------------------------------

    def assert_clean(self) -> None:
        """The clean end check: nothing damaged, nothing left over, nothing said that looks like a bug."""
        with self.store.database.read() as tx:
            assert tx.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        living = {row.process_id for row in self.store.live_processes() if lives(row)}
        for holder, task in rows(self.store, "SELECT holder, task_id FROM attempts WHERE state = 'claimed'"):
            assert holder in living, f"{task} is held by {holder}, who is dead"
        stray = (
            "SELECT t.task_id FROM tasks t WHERE t.state = 'running' AND NOT EXISTS "
            "(SELECT 1 FROM attempts a WHERE a.task_no = t.task_no AND a.state IN ('claimed', 'finished'))"
        )
        assert rows(self.store, stray) == []
        ended = (
            "SELECT t.task_id FROM tasks t JOIN runs r USING (run_id) "
            "WHERE r.state <> 'running' AND t.state = 'running'"
        )
        assert rows(self.store, ended) == []
        opened = (
            "SELECT b.reservation_id FROM budget_reservations b LEFT JOIN effects e ON e.effect_id = b.reservation_id "
            "JOIN runs r ON r.run_id = b.run_id "
            "WHERE b.state = 'open' AND r.state <> 'running' AND e.status IS NOT 'uncertain'"
        )
        assert rows(self.store, opened) == []
        done = "SELECT e.effect_id FROM effects e JOIN runs r USING (run_id) WHERE r.state <> 'running'"
        assert process_identity.find_marked(row[0] for row in rows(self.store, done)) == []
        check_chains(self.store)
        Store(self.database, SystemClock()).close()  # whoever opens next clears up after the dead
        assert_sound(self.store.artifacts)
        self.assert_quiet()

    def assert_quiet(self) -> None:
        """No traceback on any stderr."""
        for process, log in self._started:
            text = ORPHAN.sub("", log.read_text(encoding="utf-8", errors="replace"))
            assert "Traceback" not in text, f"{process.args!r}\n{text}"

    def kill_everything(self) -> None:
        """SIGKILL to all agentctl processes of this site, as fast as it goes; their effects live on."""
        found = process_identity.find_marked([self._marker], MARKER)
        effects = set(self._effects())
        for pid in found:
            if pid not in effects:
                _signal(pid, signal.SIGKILL)
        for process, _ in self._started:
            process.wait(PATIENCE)
        self.wait_for(
            lambda: not (set(process_identity.find_marked([self._marker], MARKER)) - set(self._effects())),
            "everything is dead",
        )

    def _effects(self) -> list[int]:
        if not self.database.exists():
            return []
        return process_identity.find_marked((row.process_id for row in self.store.all_processes()), HOLDER_MARKER)

    def wake_everything(self) -> None:
        """SIGCONT to every process of this site."""
        for pid in process_identity.find_marked([self._marker], MARKER):
            _signal(pid, signal.SIGCONT)

    def stop(self) -> list[int]:
        """SIGTERM to all that was started and still runs; the exit codes."""
        running = [process for process, _ in self._started if process.poll() is None]
        for process in running:
            _signal(process.pid, signal.SIGTERM)
        return [process.wait(PATIENCE * time_factor()) for process in running]

    def close(self) -> None:
        """End everything that was started here, and everything that it has started."""
        try:
            process_identity.kill_marked([self._marker], wait_seconds=PATIENCE, marker=MARKER)
            if self.database.exists():
                holders = [row.process_id for row in self.store.all_processes()]
                process_identity.kill_marked(holders, wait_seconds=PATIENCE, marker=HOLDER_MARKER)
        finally:
            for process, _ in self._started:
                if process.poll() is None:
                    process.kill()
                process.wait(PATIENCE)
            if self._store is not None:
                self._store.close()

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def picture_of(store: Store, run_id: str) -> Picture:
    """What a run has come to."""
    run = store.get_run(run_id)
    tasks = rows(store, "SELECT task_id, state, output_json, error_json FROM tasks WHERE run_id = ?", run_id)
    memory = rows(store, "SELECT key, value_json FROM memory_values WHERE run_id = ? ORDER BY key, position", run_id)
    return Picture(
        run.state,
        run.reason,
        store.run_output(run_id),
        {task: (state, output, error) for task, state, output, error in tasks},
        {key: None if value is None else json.loads(value) for key, value in memory},
    )


def lives(row: ProcessRow) -> bool:
    """Whether the process of a row is there. A stopped one is."""
    return process_identity.liveness(ProcessIdentity.from_text(row.identity)) is Liveness.ALIVE


def is_stopped(row: ProcessRow) -> bool:
    """Whether a process was stopped by a signal."""
    stat = process_identity.read_stat(row.pid)
    return stat is not None and stat.state in "Tt"


def kill(row: ProcessRow, number: int = signal.SIGKILL) -> bool:
    """Send a signal to exactly that process."""
    return process_identity.kill(ProcessIdentity.from_text(row.identity), number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
