"""Starts the peers' scripts. A peer that is not there, or fails, is a line that says so."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from figures import WORKERS, Scale

PEERS = Path(__file__).parent / "peers"
LONGEST = 600.0


@dataclass
class PeerRow:
    """One peer's rates at one figure's work. `must` and `aim` bound agentctl's rate by the peer's."""

    figure: str
    peer: str
    words: list[str]
    must: float | None = None
    aim: float | None = None
    version: str = ""
    note: str = ""
    values: list[float] = field(default_factory=list)
    reason: str = ""

    @property
    def command(self) -> str:
        return " ".join(["python", f"ops/bench/peers/{self.peer}_peer.py", *self.words])

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def measure(self) -> None:
        if self.reason:
            return  # it will not be there the next time either
        argv = [sys.executable, str(PEERS / f"{self.peer}_peer.py"), *self.words]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            self.reason = f"no result within {LONGEST:.0f} s"
            return
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            said = (done.stderr or done.stdout).strip().splitlines()
            self.reason = said[-1] if said else f"exit code {done.returncode}"
            return
        record = json.loads(lines[-1])
        self.version, self.note = record["version"], record["note"]
        self.values.append(float(record["rate"]))


def peers_of(figure: str, scale: Scale) -> list[PeerRow]:
    workers = ["--workers", str(WORKERS)]
    many = [*workers, "--tasks", str(scale.fan_out)]
    commands = [*workers, "--tasks", str(scale.commands)]
    few = [*workers, "--tasks", str(scale.dbos_tasks)]
    if figure == "a":
        return [
            PeerRow("a", "dbos", ["--work", "give", *few], 50, None),
            PeerRow("a", "huey", ["--work", "give", *many]),
        ]
    if figure == "a2":
        return [
            PeerRow("a2", "huey", ["--work", "read", *many], 1, 2),
            PeerRow("a2", "huey", ["--work", "read", *many, "--order", "filled"], 1, 2),
            PeerRow("a2", "dbos", ["--work", "read", *few]),
        ]
    if figure == "b":
        return [
            PeerRow("b", "xargs", commands, 0.5, 0.8),
            PeerRow("b", "parallel", commands, 3, None),
            PeerRow("b", "huey", ["--work", "true", *commands]),
            PeerRow("b", "huey", ["--work", "true", *commands, "--order", "filled"]),
            PeerRow("b", "dbos", ["--work", "true", *few]),
        ]
    return []
