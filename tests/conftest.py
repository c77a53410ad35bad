"""What all tests share: the kit in `support/` is importable, also by child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from support.children import Children  # noqa: E402
from support.clock import FixedIds, ManualClock  # noqa: E402


@pytest.fixture
def clock() -> ManualClock:
    """Time that only the test moves."""
    return ManualClock()


@pytest.fixture
def ids() -> FixedIds:
    """Ids that count, and chance that repeats."""
    return FixedIds()


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts real processes, and ends every one of them when the test is over."""
    with Children() as started:
        yield started
