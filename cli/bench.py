"""`agentctl bench`: what this machine and this disk give, measured in a few seconds on a database that is thrown away.

It measures what a user gets: workflows go through the command line of this very program, to a pool of its own. Only
the two figures below them (a sync, a durable commit) are taken here, so that a slow disk can be told from slow tasks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from agentctl.store.clock import Clock, SystemClock, SystemIds
from agentctl.store.engine import Store
from agentctl.store.errors import EnvironmentFault

from .main import Settings, Verb, pass_settings
from .render import Printer, clean
from .stopping import tidy

PROGRAM = (sys.executable, "-c", "from agentctl.cli import main; main()")
SCRATCH = "agentctl-bench-"
SYNC_SAMPLES = 200
FIGURE_SECONDS = 1.0
WRITERS = 8
FREE_TASKS = 5_000
READ_TASKS = 1_000
COMMANDS = 400
CHAIN = 60
_OTHER_FOLDER = "choose another folder, on a local disk with room, with --folder"
START_SECONDS = 60.0
CALL_SECONDS = 300.0
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result. `worst` is the 99th percentile where `value` is a median."""

    name: str
    what: str
    value: float
    unit: str
    worst: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of the envelope."""
        worst = None if self.worst is None else round(self.worst, 3)
        return {"name": self.name, "what": self.what, "value": round(self.value, 3), "unit": self.unit, "p99": worst}


@click.command(cls=Verb)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to measure; else the database's folder, or the current one while there is no database.",
)
@click.option("-n", "--workers", type=click.IntRange(1, 64), default=8, metavar="N", help="Size of its pool (8).")
@pass_settings
def bench(settings: Settings, folder: Path | None, workers: int) -> None:
    """Measure what this disk and this machine give: syncs, commits, tasks, effects, latency. Takes some seconds.

    It works on a database of its own in a scratch folder, which is removed afterwards. Yours is not touched. For
    figures that mean something, let the machine do nothing else meanwhile.
    """
    place = _place(settings, folder)
    clock = SystemClock()
    with tidy(), _scratch(place) as scratch:
        figures = list(_measure(scratch, clock, workers))
    data = {"folder": str(place), "workers": workers, **_machine(place), "figures": [f.as_json() for f in figures]}

    def human(out: Printer) -> None:
        out.line(f"{out.bold(clean(place))} {data['filesystem']}, {data['processors']} processors, {workers} workers")
        rows = [(f.what, _shown(f.value), f.unit, "" if f.worst is None else _shown(f.worst)) for f in figures]
        out.table(("FIGURE", "VALUE", "UNIT", "P99"), rows)

    Printer(settings).result("Benchmark", data, human)


def _place(settings: Settings, folder: Path | None) -> Path:
    if folder is None:
        folder = settings.database.parent if settings.database.exists() else Path()
    place = folder.absolute()
    if not place.is_dir():
        raise EnvironmentFault(f"there is no folder {place}", remedy="make it, or choose another one with --folder")
    return place


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    try:
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot measure in {place}: {error.strerror}", remedy="choose a folder where you may write, with --folder"
        ) from error
    try:
        yield scratch
    except EnvironmentFault as error:
        # What a person has named is the folder; the database in it is ours, and --db has nothing to do with it.
        message = error.message.replace(str(scratch / "bench.db"), str(place)).replace(str(scratch), str(place))
        remedy = error.remedy if error.remedy is not None and "--db" not in error.remedy else _OTHER_FOLDER
        raise EnvironmentFault(message, remedy=remedy) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentFault(f"cannot measure in {place}: {error.strerror}", remedy=_OTHER_FOLDER) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _machine(place: Path) -> dict[str, Any]:
    import platform

    from agentctl.store.database import sqlite_version
    from agentctl.store.filesystem import filesystem_type
    from agentctl.store.version import VERSION

    return {
        "filesystem": filesystem_type(place),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "sqlite": sqlite_version(),
        "version": VERSION,
    }


def _measure(scratch: Path, clock: Clock, workers: int) -> Iterator[Figure]:
    with closing(Store(scratch / "bench.db", clock, create=True)):
        pass  # a network filesystem or a full disk is told here, before anything is measured
    samples = _syncs(scratch, clock)
    yield Figure("sync", "a sync of 4 KiB", statistics.median(samples), "ms", _p99(samples))
    one = _commits(scratch, clock, 1)
    yield Figure("commits", "durable commits, one writer", one, "commits/s")
    yield Figure("commitsShared", f"durable commits, {WRITERS} writers", _commits(scratch, clock, WRITERS), "commits/s")
    program = _Program(scratch)
    _, seconds = program.run(_fan_out("free", {"kind": "builtin.assign"}, {"value": "${{ vars.item }}"}, FREE_TASKS))
    yield Figure("freeTasks", "tasks without an effect", FREE_TASKS / seconds, "tasks/s")
    with program.pool(workers, clock):
        yield from _effects(program, scratch)


def _effects(program: _Program, scratch: Path) -> Iterator[Figure]:
    (scratch / "small.txt").write_text("a small file\n", encoding="utf-8")
    reading: dict[str, Any] = {"kind": "builtin.read", "with": {"path": "small.txt"}}
    _, seconds = program.run(_fan_out("read", reading, {}, READ_TASKS))
    yield Figure("effects", "tasks with an effect (reading a small file)", READ_TASKS / seconds, "tasks/s")
    command = shutil.which("true", path="/usr/bin:/bin")
    if command is not None:
        action = {"kind": "builtin.shell.exec", "command": command, "idempotency": "pure"}
        _, seconds = program.run(_fan_out("commands", action, {}, COMMANDS))
        yield Figure("commands", "commands (`true`)", COMMANDS / seconds, "tasks/s")
    run_id, _ = program.run(_chain(reading))
    waits = _claim_waits(program.call("inspect", run_id))
    yield Figure(
        "claim", "from the queue to the start of the effect, idle pool", statistics.median(waits), "ms", _p99(waits)
    )


# -- disk and database ---------------------------------------------------------------------------------------------


def _syncs(scratch: Path, clock: Clock) -> list[float]:
    """Milliseconds of `fdatasync` after 4 KiB, one after the other, for at most a second."""
    samples: list[float] = []
    descriptor = os.open(scratch / "sync", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = clock.monotonic() + FIGURE_SECONDS
        while len(samples) < SYNC_SAMPLES and (not samples or clock.monotonic() < end):
            os.pwrite(descriptor, b"x" * 4096, len(samples) * 4096)
            started = clock.monotonic()
            os.fdatasync(descriptor)
            samples.append((clock.monotonic() - started) * 1000)
    finally:
        os.close(descriptor)
    return samples


def _commits(scratch: Path, clock: Clock, writers: int) -> float:
    """Commits a second of the smallest write that is promised, through the gate, by so many connections at once."""
    counts = [0] * writers
    failed: list[Exception] = []
    ready = threading.Barrier(writers + 1)
    ids = SystemIds(clock)

    def write(number: int) -> None:
        from agentctl.coordinator.service import process_row

        try:
            with closing(Store(scratch / "bench.db", clock)) as store:
                process_id = ids.new_id("bench")
                store.register(process_row("run", process_id, "bench", "bench", clock.now()))
                ready.wait()
                end = clock.monotonic() + FIGURE_SECONDS
                while clock.monotonic() < end:
                    store.set_process_state(process_id, "busy", durable=True)
                    counts[number] += 1
                store.set_process_state(process_id, "stopped")
        except Exception as error:
            failed.append(error)
            ready.abort()

    threads = [threading.Thread(target=write, args=(number,), daemon=True) for number in range(writers)]
    for thread in threads:
        thread.start()
    started = clock.monotonic()
    try:
        ready.wait()
        started = clock.monotonic()
    except threading.BrokenBarrierError:
        pass  # the reason is in `failed`
    for thread in threads:
        thread.join()
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return sum(counts) / (clock.monotonic() - started)


# -- workflows -----------------------------------------------------------------------------------------------------


def _document(name: str, action: dict[str, Any], tasks: list[dict[str, Any]], places: int) -> dict[str, Any]:
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": f"bench-{name}"},
        "spec": {
            "policy": {"approval": "never", "processAllowlist": ["true"]},
            "runtime": {"maxConcurrency": places},
            "actions": {"act": action},
            "tasks": tasks,
            "outputs": {"done": "yes"},  # not a copy of every task's output
        },
    }


def _fan_out(name: str, action: dict[str, Any], given: dict[str, Any], count: int) -> dict[str, Any]:
    each = {"items": list(range(count)), "maxItems": count}
    task = {"id": "each", "uses": "action:act", "foreach": each, "with": given}
    return _document(name, action, [task], 64)


def _chain(action: dict[str, Any]) -> dict[str, Any]:
    """One task after the other: each is put into the queue while every worker is idle."""
    tasks: list[dict[str, Any]] = []
    for number in range(CHAIN):
        needs = {"needs": [f"t{number - 1}"]} if number else {}
        tasks.append({"id": f"t{number}", "uses": "action:act", **needs})
    return _document("chain", action, tasks, 1)


def _claim_waits(inspection: dict[str, Any]) -> list[float]:
    """Milliseconds from the moment in which each task became ready to the start of its effect, both as recorded."""
    ready = {
        event["taskId"]: event["createdAt"] for event in inspection["audit"] if event["payload"].get("to") == "ready"
    }
    return [float(effect["startedAt"] - ready[effect["request"]["taskId"]]) for effect in inspection["effects"]]


class _Program:
    """This program on the scratch database, as a user would call it."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._database = scratch / "bench.db"
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENTCTL_")}

    def run(self, document: dict[str, Any]) -> tuple[str, float]:
        """Run a document to its end. Its id, and the seconds from its creation to its end as recorded."""
        path = self._scratch / f"{document['metadata']['name']}.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        outcome = self.call("run", str(path))
        if outcome["state"] != "succeeded":
            raise EnvironmentFault(f"{path.name} ended as {outcome['state']}: {clean(outcome.get('error'))[:300]}")
        run_id = str(outcome["runId"])
        status = self.call("status", run_id)
        return run_id, max(0.001, (status["updatedAt"] - status["createdAt"]) / 1000)

    def call(self, *words: str) -> dict[str, Any]:
        """A verb to its end; `data` of its envelope."""
        done = subprocess.run(
            [*PROGRAM, *words, "--db", str(self._database), "--output", "json"],
            cwd=self._scratch,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=CALL_SECONDS,
            check=False,
        )
        if done.returncode not in (0, 4) or not done.stdout:
            raise EnvironmentFault(f"`agentctl {words[0]}` ended with {done.returncode}: {_said(done.stderr)}")
        data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["data"]
        return data

    @contextmanager
    def pool(self, workers: int, clock: Clock) -> Iterator[None]:
        """A pool, once all of its workers are idle; drained at the end."""
        words = ("workers", "start", "-n", str(workers), "--db", str(self._database))
        with (self._scratch / "pool.log").open("wb") as log:
            pool = subprocess.Popen(
                [*PROGRAM, *words],
                cwd=self._scratch,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt of ours is not its own; it is ended below, whatever happens
            )
        try:
            self._wait_until_idle(pool, workers, clock)
            yield
        finally:
            pool.send_signal(signal.SIGTERM)
            try:
                pool.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                pool.kill()
                pool.wait()

    def _wait_until_idle(self, pool: subprocess.Popen[bytes], workers: int, clock: Clock) -> None:
        end = clock.monotonic() + START_SECONDS
        with closing(Store(self._database, clock)) as store:
            while sum(row.state == "idle" for row in store.live_processes("worker")) < workers:
                if pool.poll() is not None or clock.monotonic() > end:
                    said = (self._scratch / "pool.log").read_text(encoding="utf-8", errors="replace")
                    raise EnvironmentFault(
                        f"{workers} workers could not be started: {clean(said.strip()[-500:])}",
                        remedy="try fewer of them with -n",
                    )
                clock.sleep(POLL_SECONDS)


def _said(text: str) -> str:
    """The message of an Error envelope, or the end of whatever was said."""
    last = text.strip().rpartition("\n")[2]
    try:
        return str(json.loads(last)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return clean(text.strip()[-500:])


def _p99(samples: list[float]) -> float:
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * 99 // 100) - 1)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
