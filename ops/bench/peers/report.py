"""What every peer's script prints: one line of JSON that the benchmark reads."""
# ruff: noqa: T201  (printing is what these scripts are for)

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PeerResult:
    """One measurement: `tasks` tasks took `seconds` from the first enqueue to the last result."""

    peer: str
    version: str
    work: str
    tasks: int
    seconds: float
    note: str = ""

    def print(self) -> None:
        record = asdict(self) | {"rate": self.tasks / self.seconds}
        print(json.dumps(record), flush=True)
