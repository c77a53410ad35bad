"""How often and how long. Two numbers from the environment, read in one place.

`AGENTCTL_TEST_SCALE` is a factor on the repeats of long tests: 1.0 is the full measure, by hand or at night. Without it
a tenth of that runs, so that the whole suite stays quick. `AGENTCTL_TIME_FACTOR` stretches deadlines on slow machines;
tests that run side by side (`pytest -n`) make every machine slow, so there it is 4 unless it is given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

DEFAULT_SCALE = 0.1


def scale() -> float:
    """The factor on repeats."""
    return float(os.environ.get("AGENTCTL_TEST_SCALE") or DEFAULT_SCALE)


def repeats(full: int, at_least: int = 1) -> int:
    """How often a test repeats what it does `full` times at full scale."""
    return max(at_least, math.ceil(full * scale()))


def share(cases: int) -> int:
    """How many cases of one test with real processes run: an eighth below full scale, never none."""
    return cases if scale() >= 1 else math.ceil(cases / 8)


def some(cases: Iterable[Case]) -> list[Case]:
    """The cases that a test with real processes goes through by itself: as many as `share` says, evenly spread."""
    every = list(cases)
    count = share(len(every))
    return [every[number * len(every) // count] for number in range(count)]


def time_factor() -> float:
    """The factor on every bound of time that a test checks."""
    usual = 4 if "PYTEST_XDIST_WORKER" in os.environ else 1
    return max(1.0, float(os.environ.get("AGENTCTL_TIME_FACTOR") or usual))


def time_limit(least: int = 1) -> int:
    """A limit in whole seconds for something that sleeps through it, while others have to get done within the same."""
    return math.ceil(least * time_factor())


def short_lease(least: float = 1.0) -> float:
    """A lease, in seconds, for tests that wait until one is over: no shorter than what those who are well can keep."""
    return least * max(1.0, time_factor() / 2)
