"""Peer: huey on SQLite with `fsync=True` and worker processes.

The consumer is the one that huey ships, started as a process of its own. Two figures, since the process that
enqueues and those that work get into one another's way:

- `live`: the workers are idle when the clock starts, which runs from the first enqueue until the last result
  is stored. This is how a run of agentctl is measured, too.
- `filled`: the queue is filled first; the clock runs from the first result to the last. Enqueueing costs
  nothing here: a rate in huey's favour.

huey keeps no ledger of what a task did: a task that its worker loses is lost.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from huey import SqliteHuey
from report import PeerResult

FOLDER = "AGENTCTL_BENCH_FOLDER"
DEADLINE = 120.0

folder = Path(os.environ.get(FOLDER) or tempfile.gettempdir())
queue = SqliteHuey("bench", filename=str(folder / "huey.db"), fsync=True, timeout=60, immediate=False)


@queue.task()
def give(value: int) -> int:
    return value


@queue.task()
def read(path: str) -> str:
    return Path(path).read_text()


@queue.task()
def true(number: int) -> int:
    subprocess.run(["/bin/true"], check=True, capture_output=True)
    return number


@contextmanager
def consumer(workers: int) -> Iterator[None]:
    """huey's own consumer, with the pauses of idle workers that gave it the best rates."""
    # `--delay` is the shortest pause of an idle worker and `--max-delay` the longest.
    command = [sys.executable, "-m", "huey.bin.huey_consumer", "huey_peer.queue", "--workers", str(workers)]
    command += ["--worker-type", "process", "--no-periodic", "--quiet"]
    command += ["--delay", "0.02", "--max-delay", "0.05"]
    here = str(Path(__file__).parent)
    child = subprocess.Popen(command, cwd=here, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": here})
    try:
        yield
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_for_results(count: int) -> None:
    end = time.monotonic() + DEADLINE
    while queue.result_count() < count:
        if time.monotonic() > end:
            raise SystemExit(f"only {queue.result_count()} of {count} results after {DEADLINE:.0f} s")
        time.sleep(0.01)


def enqueue(work: str, tasks: int) -> None:
    text = folder / "small.txt"
    text.write_text("a small file\n")
    for number in range(tasks):
        if work == "read":
            read(str(text))
        elif work == "true":
            true(number)
        else:
            give(number)


def measure_live(work: str, tasks: int, workers: int) -> float:
    with consumer(workers):
        enqueue("give", workers * 4)  # until every worker has started up
        wait_for_results(workers * 4)
        queue.flush()
        started = time.perf_counter()
        enqueue(work, tasks)
        wait_for_results(tasks)
        return time.perf_counter() - started


def measure_filled(work: str, tasks: int, workers: int) -> float:
    queue.flush()
    enqueue(work, tasks)
    with consumer(workers):
        wait_for_results(1)
        started = time.perf_counter()
        wait_for_results(tasks)
        return time.perf_counter() - started


def measure(work: str, tasks: int, workers: int, order: str) -> PeerResult:
    seconds = (measure_filled if order == "filled" else measure_live)(work, tasks, workers)
    note = f"SqliteHuey, fsync, {workers} processes, {order}"
    return PeerResult("huey", version("huey"), work, tasks, seconds, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["give", "read", "true"], default="give")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--order", choices=["live", "filled"], default="live")
    options = parser.parse_args()
    if FOLDER not in os.environ:
        # The folder is part of the queue's identity: start again with it in the environment.
        with tempfile.TemporaryDirectory(prefix="huey-bench-") as made:
            command = [sys.executable, __file__, *sys.argv[1:]]
            raise SystemExit(subprocess.run(command, env=os.environ | {FOLDER: made}).returncode)
    # Tasks are known by the module they were imported from: use the one that the consumer imports.
    from huey_peer import measure as measure_as_module

    measure_as_module(options.work, options.tasks, options.workers, options.order).print()


if __name__ == "__main__":
    main()
