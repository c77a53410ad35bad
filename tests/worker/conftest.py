"""What the tests share that start real programs."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from agentctl.store.process_identity import kill_marked
from agentctl.worker.effects import process


@pytest.fixture
def subreaper() -> Iterator[None]:
    """This process adopts what its children leave, as a worker does."""
    process.become_subreaper()
    yield
    process.become_subreaper(False)


@pytest.fixture
def effect() -> Iterator[str]:
    """The id of an effect, of which no process is left afterwards."""
    made = uuid4().hex
    yield made
    kill_marked([made], wait_seconds=5)
