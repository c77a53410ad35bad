"""What the tests of a service share: a place with real processes, and a manager that listens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.field import Field
from support.manager import Manager


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """A place for real processes; all of them end with the test."""
    made = Field(tmp_path)
    try:
        yield made
    finally:
        made.close()
        assert made.processes() == []


@pytest.fixture(params=["path", "abstract"])
def any_manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    """A manager behind each kind of address."""
    made = Manager(str(tmp_path / "notify") if request.param == "path" else f"@agentctl-test-{os.getpid()}")
    yield made
    made.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    """A manager."""
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()
