"""The figures: what is measured, how often, and what it must be."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import processes
import workflows
from machine import percentile
from program import Program

WORKERS = 8


@dataclass(frozen=True)
class Scale:
    """How much is done for one sample. With `--quick` just enough to see that the benchmark works."""

    fan_out: int = 10_000
    commands: int = 3_000
    dbos_tasks: int = 300
    sizes: tuple[int, int, int] = (1_000, 10_000, 50_000)
    latencies: int = 40
    kills: int = 10
    cancels: int = 5
    starts: int = 20
    idle_seconds: float = 60.0
    artifact_bytes: int = 1 << 30


QUICK = Scale(1_000, 300, 50, (100, 1_000, 5_000), 10, 3, 2, 5, 10.0, 64 << 20)


@dataclass
class Row:
    """One line of the table. `most` says that smaller is better and `must` is an upper bound."""

    figure: str
    what: str
    unit: str
    must: float | None = None
    aim: float | None = None
    most: bool = False
    values: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        if not self.values or (self.must is None and self.aim is None):
            return ""
        if self.aim is not None and self.reaches(self.aim):
            return "aim"
        if self.must is None:
            return "aim missed"
        return "must" if self.reaches(self.must) else "missed"

    def reaches(self, bound: float) -> bool:
        return self.median <= bound if self.most else self.median >= bound


@dataclass
class Bench:
    scale: Scale
    repeat: int
    commands: list[str]

    @contextmanager
    def program(self) -> Iterator[Program]:
        """A fresh folder and database, gone afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="agentctl-bench-"))
        try:
            yield Program(folder, self.commands)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


Figure = Callable[[Bench], list[Row]]


def throughput(bench: Bench, write: Callable[[Path], Path], count: int, pool: bool, rows: list[Row]) -> list[Row]:
    """Tasks per second of `count` tasks in one run, on a fresh database for each repeat."""
    for _ in range(bench.repeat):
        with bench.program() as program:
            workflow, inputs = write(program.folder), workflows.items(program.folder, count)
            if pool:
                with program.pool(WORKERS):
                    run = program.run(workflow, inputs)
                    seconds = program.run_seconds(run)
            else:
                run = program.run(workflow, inputs)
                seconds = program.run_seconds(run)
            rows[0].values.append(count / seconds)
    return rows


def figure_a(bench: Bench) -> list[Row]:
    count = bench.scale.fan_out
    row = Row("a", f"{count:,} assign tasks", "tasks/s", 8_000, 20_000)
    return throughput(bench, workflows.assign, count, False, [row])


def figure_a2(bench: Bench) -> list[Row]:
    count = bench.scale.fan_out
    row = Row("a2", f"{count:,} tasks that read a small file, {WORKERS} workers", "tasks/s", 2_500, 5_000)
    return throughput(bench, workflows.read, count, True, [row])


def figure_b(bench: Bench) -> list[Row]:
    count = bench.scale.commands
    row = Row("b", f"{count:,} /bin/true tasks, {WORKERS} workers", "tasks/s")
    return throughput(bench, workflows.true, count, True, [row])


def figure_c(bench: Bench) -> list[Row]:
    """From the enqueue, as recorded (whole milliseconds), to what the clock says in the started program."""
    middle = Row("c", "enqueue to effect start, idle pool, p50", "ms", 5, 2, most=True)
    high = Row("c", "the same, p99 of all samples", "ms", 50, None, most=True)
    pooled: list[float] = []
    with bench.program() as program, program.pool(WORKERS):
        workflow = workflows.clock(program.folder)
        program.wait(program.submit(workflow))  # the first one finds cold caches
        for _ in range(bench.repeat):
            runs = []
            for _ in range(bench.scale.latencies):
                runs.append(program.submit(workflow))
                time.sleep(0.05)
            samples = []
            for run in runs:
                program.wait(run)
                seen = program.call("inspect", run)
                started = int(program.stdout_of_only_task(seen)) / 1e6
                samples.append(started - program.enqueued_milliseconds(seen))
            middle.values.append(statistics.median(samples))
            pooled += samples
    high.values = [percentile(pooled, 99)]
    return [middle, high]


def figure_d(bench: Bench) -> list[Row]:
    """From `kill -9` of the busy worker to the line that the next delivery writes."""
    middle = Row("d", "kill -9 of a worker to the next delivery, p50", "ms", None, 100, most=True)
    high = Row("d", "the same, p99 of all samples", "ms", 1_000, None, most=True)
    pooled: list[float] = []
    with bench.program() as program, program.pool(WORKERS):
        for _ in range(bench.repeat):
            samples = [kill_one(program, len(pooled) + number) for number in range(bench.scale.kills)]
            middle.values.append(statistics.median(samples))
            pooled += samples
    high.values = [percentile(pooled, 99)]
    return [middle, high]


def kill_one(program: Program, number: int) -> float:
    path = program.folder / f"ledger-{number}"
    run = program.submit(workflows.ledger(program.folder, path))
    processes.until("the first delivery", 30, lambda: lines_of(path) >= 1)
    busy = [worker for worker in program.workers() if worker.get("runId") == run]
    if len(busy) != 1:
        raise RuntimeError(f"{len(busy)} workers hold the only task of {run}")
    killed = time.time_ns()
    os.kill(int(busy[0]["pid"]), signal.SIGKILL)
    processes.until("the next delivery", 60, lambda: lines_of(path) >= 2)
    program.wait(run)
    processes.until("a full pool", 30, lambda: program.idle_workers() >= WORKERS, pause=0.05)
    return (int(path.read_text().split()[1]) - killed) / 1e6


def lines_of(path: Path) -> int:
    try:
        return path.read_text().count("\n")
    except FileNotFoundError:
        return 0


def figure_e(bench: Bench) -> list[Row]:
    """From the start of `agentctl cancel` until no effect process is left; its children obey SIGTERM."""
    high = Row("e", f"cancel to the last of {WORKERS} effects gone, p99", "ms", 1_000, 200, most=True)
    middle = Row("e", "the same, p50", "ms", most=True)
    pooled: list[float] = []
    with bench.program() as program, program.pool(WORKERS):
        workflow, inputs = workflows.sleepers(program.folder), workflows.items(program.folder, WORKERS)
        for _ in range(bench.repeat):
            samples = [cancel_one(program, workflow, inputs) for _ in range(bench.scale.cancels)]
            middle.values.append(statistics.median(samples))
            pooled += samples
    high.values = [percentile(pooled, 99)]
    return [high, middle]


def cancel_one(program: Program, workflow: Path, inputs: Path) -> float:
    run = program.submit(workflow, inputs)
    found: set[int] = set()

    def all_started() -> bool:
        found.update(processes.effect_processes(program.folder))
        return len(found) >= WORKERS

    processes.until("eight effect processes", 30, all_started, pause=0.02)
    started = time.perf_counter()
    cancel = subprocess.Popen(
        program.argv("cancel", run, "--db", str(program.database), "--output", "json"),
        cwd=program.folder,
        env=program.environment,
        stdout=subprocess.DEVNULL,
    )
    processes.until("the last effect", 60, lambda: not any(processes.alive(pid) for pid in found))
    seconds = time.perf_counter() - started
    if cancel.wait(60) != 0:
        raise RuntimeError(f"`agentctl cancel` ended with {cancel.returncode}")
    program.call("wait", run, expect=(130,))
    if processes.effect_processes(program.folder):
        raise RuntimeError("an effect was started after the cancellation")
    return seconds * 1000


def figure_f(bench: Bench) -> list[Row]:
    """Cost of one assign task in runs of three sizes, and the largest against the smallest."""
    rows = [Row("f", f"cost of a task in a run of {size:,}", "µs", most=True) for size in bench.scale.sizes]
    growth = Row("f", "cost in the largest run by cost in the smallest", "x", 1.3, 1.05, most=True)
    for _ in range(bench.repeat):
        for row, size in zip(rows, bench.scale.sizes, strict=True):
            with bench.program() as program:
                run = program.run(workflows.assign(program.folder), workflows.items(program.folder, size))
                row.values.append(program.run_seconds(run) / size * 1e6)
        growth.values.append(rows[-1].values[-1] / rows[0].values[-1])
    return [*rows, growth]


def figure_g(bench: Bench) -> list[Row]:
    """Start-up (each run of hello makes its database) and the memory of a worker that has nothing to do."""
    rows = [
        Row("g", "`agentctl --help`", "ms", 150, 80, most=True),
        Row("g", "`agentctl run` of hello, new database", "ms", 700, 400, most=True),
        Row("g", "resident memory of an idle worker", "MB", 45, 30, most=True),
        Row("g", "`python -c pass`, for comparison", "ms", most=True),
    ]
    for _ in range(bench.scale.starts):
        with bench.program() as program:
            rows[0].values.append(timed(program, program.argv("--help")))
            workflow = workflows.hello(program.folder)
            words = ("run", str(workflow), "--db", str(program.database), "--output", "json")
            rows[1].values.append(timed(program, program.argv(*words)))
            rows[3].values.append(timed(program, [sys.executable, "-c", "pass"]))
    with bench.program() as program, program.pool(WORKERS):
        time.sleep(1)
        for worker in program.workers():
            size = int(worker.get("rssBytes") or 0) or processes.resident_bytes(int(worker["pid"]))
            rows[2].values.append(size / 1e6)
    return rows


def timed(program: Program, argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, cwd=program.folder, env=program.environment, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - started) * 1000


def figure_h(bench: Bench) -> list[Row]:
    """Processor time of supervisor, coordinator and workers while there is nothing to do."""
    seconds = bench.scale.idle_seconds
    row = Row("h", f"processor time of an idle pool of {WORKERS}, all together", "s/min", 1.2, 0.3, most=True)
    with bench.program() as program, program.pool(WORKERS) as supervisor:
        time.sleep(3)
        for _ in range(min(bench.repeat, 3)):
            before = processes.processor_seconds(processes.descendants(supervisor.pid))
            time.sleep(seconds)
            after = processes.processor_seconds(processes.descendants(supervisor.pid))
            used = sum(after.values()) - sum(before[pid] for pid in after if pid in before)
            row.values.append(used * 60 / seconds)
    return [row]


def figure_i(bench: Bench) -> list[Row]:
    """A run that keeps one large artifact, beside `sha256sum` and then `cp` of the same file."""
    size = bench.scale.artifact_bytes
    rate = Row("i", f"artifact of {size >> 20} MiB, start to end of its run", "MB/s")
    ratio = Row("i", "the same by the rate of sha256sum and then cp", "x", 0.5)
    memory = Row("i", "peak memory of the worker meanwhile", "MB", 64, most=True)
    for _ in range(bench.repeat):
        with bench.program() as program:
            workflow = workflows.artifact(program.folder, size)
            os.sync()  # what is written back while we measure is not ours
            with program.pool(1):
                worker = int(program.workers()[0]["pid"])
                seconds = program.run_seconds(program.run(workflow))
                memory.values.append(processes.peak_bytes(worker) / 1e6)
            os.sync()  # nor is what we have written theirs
            started = time.perf_counter()
            subprocess.run(["sha256sum", "large.bin"], cwd=program.folder, check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["cp", "large.bin", "copy.bin"], cwd=program.folder, check=True)
            rate.values.append(size / 1e6 / seconds)
            ratio.values.append((time.perf_counter() - started) / seconds)
    return [rate, ratio, memory]


FIGURES: dict[str, Figure] = {
    "a": figure_a,
    "a2": figure_a2,
    "b": figure_b,
    "c": figure_c,
    "d": figure_d,
    "e": figure_e,
    "f": figure_f,
    "g": figure_g,
    "h": figure_h,
    "i": figure_i,
}
