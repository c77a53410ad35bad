"""What the field reports share: a folder, the program, and the end of everything that a test has started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from support.field import Field

HERE = Path(__file__).resolve().parent
LIMIT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes too long is interrupted, not ended hard: what it has started has to end, too."""
    for item in items:
        if item.path.is_relative_to(HERE):
            mark = item.get_closest_marker("timeout")
            limit = mark.args[0] if mark is not None else LIMIT
            item.add_marker(pytest.mark.timeout(limit, method="signal"), append=False)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """A field report's place. Whatever was started in it ends with the test, also when the tests are stopped."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()
        signal.signal(signal.SIGTERM, before)
        assert place.processes() == []
