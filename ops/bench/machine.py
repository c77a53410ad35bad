"""What the figures were measured on, in words that a reader can compare with his own machine."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from pathlib import Path


def sync_milliseconds(folder: Path, count: int = 200) -> tuple[float, float]:
    """Median and 99th percentile of `fdatasync` after 4 KiB: what a durable commit costs at least."""
    samples = []
    descriptor, path = tempfile.mkstemp(prefix="sync-probe-", dir=folder)
    try:
        for number in range(count):
            os.pwrite(descriptor, b"x" * 4096, number * 4096)
            started = time.perf_counter()
            os.fdatasync(descriptor)
            samples.append((time.perf_counter() - started) * 1000)
    finally:
        os.close(descriptor)
        Path(path).unlink()
    return statistics.median(samples), percentile(samples, 99)


def percentile(samples: list[float], rank: float) -> float:
    """The smallest sample that at least `rank` per cent of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, min(len(ordered) - 1, -(-len(ordered) * int(rank) // 100) - 1))]


def filesystem_of(folder: Path) -> str:
    """Type of the filesystem that holds `folder`, from the mount table."""
    best = ("", "unknown")
    resolved = str(folder.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def sqlite_version() -> str:
    try:
        import apsw
    except ImportError:
        return "apsw is not installed"
    return f"{apsw.sqlite_lib_version()} (apsw {apsw.apsw_version()})"


def describe(folder: Path) -> list[tuple[str, str]]:
    median, worst = sync_milliseconds(folder)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()
    return [
        ("processor", f"{processor()}, {os.cpu_count()} cores, {memory:.1f} GiB"),
        ("kernel", platform.release()),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("SQLite", sqlite_version()),
        ("filesystem", f"{filesystem_of(folder)}, fdatasync p50 {median:.2f} ms, p99 {worst:.2f} ms"),
        ("load before", f"{load[0]:.2f}"),
    ]
