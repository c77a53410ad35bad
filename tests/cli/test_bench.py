"""`agentctl bench`: figures for people and programs, and nothing left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.children import PATIENCE, wait_until
from support.scale import time_factor

from .conftest import PROGRAM, Cli

NAMES = ["sync", "commits", "commitsShared", "freeTasks", "effects", "commands", "claim"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "measured"
    folder.mkdir()
    return folder


def working_in(folder: Path) -> list[int]:
    """Processes whose working folder is below `folder`, or was until it was removed."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                cwd = os.readlink(f"/proc/{name}/cwd")
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if cwd.startswith(f"{folder}/") and state not in "ZX":
                found.append(int(name))
    return found


def test_what_fails_in_the_scratch_folder_is_told_of_the_folder_that_was_named(place: Path) -> None:
    """The name of the scratch folder says nothing to anybody, and --db is not how another place is chosen."""
    from agentctl.cli import bench
    from agentctl.store.errors import EnvironmentFault

    for fault in (
        lambda scratch: EnvironmentFault(f"{scratch}/bench.db is on nfs", remedy="another place with --db PATH"),
        lambda scratch: OSError(28, "No space left on device", f"{scratch}/bench-free.yaml"),
    ):
        with pytest.raises(EnvironmentFault) as caught, bench._scratch(place) as scratch:
            raise fault(scratch)
        assert str(place) in caught.value.message
        assert bench.SCRATCH not in caught.value.message
        assert "--folder" in (caught.value.remedy or "")
        assert list(place.iterdir()) == []


def test_it_measures_and_leaves_nothing(cli: Cli, place: Path) -> None:
    data = cli.json("bench", "--folder", place, "-n", "2", timeout=120 * time_factor()).data
    figures = {figure["name"]: figure for figure in data["figures"]}
    assert list(figures) == NAMES
    assert all(figure["value"] > 0 for name, figure in figures.items() if name != "claim")
    assert figures["claim"]["value"] >= 0
    for name in ("sync", "claim"):
        assert figures[name]["p99"] >= figures[name]["value"]
    # One sync serves many: writers together never do less than a half of one alone, however busy the machine is.
    assert figures["commitsShared"]["value"] > figures["commits"]["value"] / 2
    assert (data["folder"], data["workers"]) == (str(place), 2)
    assert list(place.iterdir()) == []
    assert working_in(place) == []
    assert not (cli.folder / ".agentctl").exists()


def test_a_folder_that_is_not_there(cli: Cli, place: Path) -> None:
    error = cli.json("bench", "--folder", place / "nowhere").error
    assert (error["code"], error["exitCode"]) == ("environment", 5)
    assert "--folder" in error["remedy"]
    assert not (place / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_where_one_may_not_write(cli: Cli, place: Path) -> None:
    place.chmod(0o500)
    error = cli.json("bench", "--folder", place).error
    assert (error["code"], error["exitCode"]) == ("environment", 5)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_an_interrupt_leaves_nothing(cli: Cli, place: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "bench", "--folder", str(place), "-n", "2"],
        cwd=cli.folder,
        env=cli.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: bool(list(place.glob("*/bench-read.yaml"))), "a pool at work", seconds=PATIENCE)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE * time_factor())
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (code, b"")
    assert list(place.iterdir()) == []
    wait_until(lambda: working_in(place) == [], "the end of everything that it had started", seconds=PATIENCE)
