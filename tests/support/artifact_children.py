"""What child processes do with artifacts until somebody kills them. Functions of an importable module (spawn)."""

from __future__ import annotations

import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

from agentctl.store.blobs import Blobs
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store

from support.artifacts import collect, ingest
from support.builders import Hand


def content(number: int) -> bytes:
    """Bytes by a number: the same ones come again and again, of very different sizes."""
    return random.Random(number).randbytes((number % 7) ** 5 * 16 + number)


def ingest_until_killed(database: str, name: str, seed: int, ready: str) -> None:
    """Claim, ingest, finish; new contents and ones that were collected before."""
    store = Store(Path(database), SystemClock())
    hand = Hand(store, name)
    Path(ready).touch()
    while True:
        claim = hand.claim()
        if claim is None:
            os._exit(9)
        # Every delivery of an attempt finds the same files.
        chance = random.Random(f"{seed} {claim.fence.attempt_id}")
        numbers = [chance.randrange(60) for _ in range(chance.randrange(1, 4))]
        ingest(store, claim, {f"f{number}": content(number) for number in numbers})
        hand.finish(claim)


def collect_until_killed(database: str, ready: str) -> None:
    """One collection after the other."""
    store = Store(Path(database), SystemClock())
    Path(ready).touch()
    while True:
        collect(store)


def export_until_killed(database: str, digest: str, folder: str, ready: str) -> None:
    """Export to new names, and over an old one."""
    store = Store(Path(database), SystemClock())
    Path(ready).touch()
    number = 0
    while True:
        number += 1
        target = Path(folder) / (f"file-{number}" if number % 2 else "file")
        store.artifacts.export(digest, target, overwrite=True)
        if number % 2:
            target.unlink()


def collect_at(database: str, point: str) -> None:
    """A collection that dies at a crash point."""
    store = Store(Path(database), SystemClock())
    collect(store, fault=point)


def measure_staging(folder: str, size: int, out: Connection) -> None:
    """Copy a file into a store; tell the most memory in bytes that was ever resident."""
    blobs = Blobs(Path(folder) / "agentctl.db", SystemClock())
    with open(Path(folder) / "large", "rb") as file:
        blobs.discard(blobs.stage_file(file.fileno(), size, lambda: False).path)
    # Not `ru_maxrss`: that keeps what the process was before its exec, which may be a large test runner.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    out.send(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024)
