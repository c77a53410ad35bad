"""Peer: GNU `parallel -j8 --joblog`: captures the output of processes and logs a line for each."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from report import PeerResult


def measure(tasks: int, workers: int, folder: Path) -> PeerResult:
    parallel = shutil.which("parallel")
    if parallel is None:
        raise SystemExit("GNU parallel is not installed")
    environment = os.environ | {"PARALLEL_HOME": str(folder)}
    said = subprocess.run([parallel, "--version"], capture_output=True, text=True, env=environment).stdout
    if not said.startswith("GNU parallel"):
        raise SystemExit("`parallel` is another program, not GNU parallel")
    log = folder / "joblog"
    words = "".join(f"{number}\n" for number in range(tasks)).encode()
    command = [parallel, f"-j{workers}", "--joblog", str(log), "/bin/true"]
    started = time.perf_counter()
    subprocess.run(command, input=words, check=True, env=environment, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    lines = len(log.read_text().splitlines()) - 1
    if lines != tasks:
        raise SystemExit(f"the job log has {lines} lines instead of {tasks}")
    release = said.partition("\n")[0].split()[-1]
    return PeerResult("parallel", release, "true", tasks, seconds, f"-j{workers} --joblog")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=3_000)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parallel-bench-") as made:
        measure(options.tasks, options.workers, Path(made)).print()


if __name__ == "__main__":
    main()
