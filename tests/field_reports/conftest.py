"""What the field reports share: a folder, the program, and the end of everything that a test has started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.field import Field


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """A field report's place. Whatever was started in it ends with the test."""
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()
        assert place.processes() == []
