"""Places for the tests of retry, repair and fork, and one failed run that all of them may copy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recovery import Place, rich


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty field."""
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, str]]:
    """A field in which the rich workflow has failed, and the id of that run. Nobody changes it."""
    made = Place(tmp_path_factory.mktemp("master"))
    try:
        yield made, made.go(rich(made), code=4)
    finally:
        made.close()


@pytest.fixture
def copy(master: tuple[Place, str], place: Place) -> tuple[Place, str]:
    """A copy of the database and the files of `master`, to be changed at will."""
    source, run_id = master
    shutil.copytree(source.database.parent, place.database.parent, dirs_exist_ok=True)
    shutil.copytree(source.folder, place.folder, dirs_exist_ok=True)
    return place, run_id
