"""Peer: `xargs -P8 -n1`: starts processes and remembers nothing. The ceiling for commands."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time

from report import PeerResult


def measure(tasks: int, workers: int) -> PeerResult:
    xargs = shutil.which("xargs")
    if xargs is None:
        raise SystemExit("xargs is not installed")
    words = "".join(f"{number}\n" for number in range(tasks)).encode()
    started = time.perf_counter()
    subprocess.run([xargs, f"-P{workers}", "-n1", "/bin/true"], input=words, check=True)
    seconds = time.perf_counter() - started
    first = subprocess.run([xargs, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    return PeerResult("xargs", first.split()[-1] if first else "", "true", tasks, seconds, f"-P{workers} -n1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=3_000)
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    measure(options.tasks, options.workers).print()


if __name__ == "__main__":
    main()
