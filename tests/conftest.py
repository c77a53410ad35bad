"""What all tests share: the kit in `support/` is importable, also by child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from support.children import Children  # noqa: E402
from support.clock import FixedIds, ManualClock  # noqa: E402
from support.model_server import ModelServer, model_server  # noqa: E402
from support.scale import share  # noqa: E402

SAMPLED = (
    *("cli/", "crash/", "recovery/", "service/", "field_reports/", "examples/test_devops.py"),
    *("worker/test_a2a.py", "worker/test_extension.py", "worker/test_mcp.py", "worker/test_providers.py"),
    *("worker/test_numbers_of_peers.py", "worker/test_secrets_on_disk.py", "store/test_real_chain.py"),
    *("coordinator/test_limits.py", "property/"),
)
"""Tests that start real processes or servers for each case. Below full scale a part of the cases runs (`share`)."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Side by side, whoever is done takes over what others have not begun: the long ones would make them wait."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave cases out, always the same ones of the same set; not where the command line names cases."""
    if any("::" in argument for argument in config.args) or config.option.keyword:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if "[" in name and name.startswith(SAMPLED):
            cases.setdefault(name.partition("[")[0], []).append(item)
    left_out: set[str] = set()
    for found in cases.values():
        found.sort(key=lambda item: crc32(item.nodeid.encode()))
        left_out.update(item.nodeid for item in found[share(len(found)) :])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


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


@pytest.fixture
def server() -> Iterator[ModelServer]:
    """A model service on the loopback interface."""
    with model_server() as running:
        yield running
