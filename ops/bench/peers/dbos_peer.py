"""Peer: DBOS Transact on SQLite, steps sent through one of its queues.

One process, in which the queue's concurrency is the number of workers. The clock runs from the first enqueue
until every handle has given its result. DBOS is slow at this on SQLite: the benchmark gives it fewer tasks.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dbos import DBOS, DBOSConfig, WorkflowHandle
from report import PeerResult


@DBOS.step()
def give(value: int) -> int:
    return value


@DBOS.step()
def read(path: str) -> str:
    return Path(path).read_text()


@DBOS.step()
def true(number: int) -> int:
    subprocess.run(["/bin/true"], check=True, capture_output=True)
    return number


def measure(work: str, tasks: int, workers: int, polling: float, folder: Path) -> PeerResult:
    text = folder / "small.txt"
    text.write_text("a small file\n")
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": f"sqlite:///{folder / 'dbos.db'}",
        "log_level": "ERROR",
        "notification_listener_polling_interval_sec": 0.01,
    }
    steps: dict[str, Callable[..., Any]] = {"give": give, "read": read, "true": true}
    step = steps[work]
    DBOS(config=config)
    DBOS.launch()
    try:
        queue = DBOS.register_queue("bench", worker_concurrency=workers, polling_interval_sec=polling)
        for handle in [queue.enqueue(give, number) for number in range(workers)]:
            handle.get_result(polling_interval_sec=0.01)
        started = time.perf_counter()
        handles: list[WorkflowHandle[Any]] = []
        for number in range(tasks):
            handles.append(queue.enqueue(read, str(text)) if step is read else queue.enqueue(step, number))
        for handle in handles:
            handle.get_result(polling_interval_sec=0.01)
        seconds = time.perf_counter() - started
    finally:
        DBOS.destroy()
    note = f"SQLite, queued steps, {workers} at once, queue polled every {polling:g} s"
    return PeerResult("dbos", version("dbos"), work, tasks, seconds, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=["give", "read", "true"], default="give")
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--polling", type=float, default=0.05, help="seconds; the default of DBOS is 1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dbos-bench-") as made:
        measure(options.work, options.tasks, options.workers, options.polling, Path(made)).print()


if __name__ == "__main__":
    main()
