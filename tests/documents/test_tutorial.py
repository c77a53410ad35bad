"""The tutorial, command by command, as a newcomer would type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import PATIENCE
from support.scale import time_factor
from support.site import Site

PAGE = Path(__file__).resolve().parents[2] / "ops" / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
WAIT = "sleep 3\n"
"""How long the page tells a person to wait. Here it is waited for what the wait is for."""


class Newcomer:
    """Somebody in an empty folder with agentctl on the PATH."""

    def __init__(self, site: Site, programs: Path) -> None:
        self.site = site
        programs.mkdir()
        script = programs / "agentctl"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from agentctl.cli import main; main()" "$@"\n')
        script.chmod(0o755)
        # The site ends whatever carries its marker.
        self._environment = {**site._environment, "PATH": f"{programs}:{os.environ['PATH']}"}

    def types(self, script: str, expect: int = 0) -> str:
        """Commands into a shell, to the last one, whose exit code is looked at. What they print."""
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.site.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=PATIENCE * time_factor(),
            check=False,
        )
        assert done.returncode == expect, f"{script}\n{done.stdout}\n{done.stderr}\n{self.site.report()}"
        return done.stdout

    def lines(self, name: str) -> list[str]:
        return (self.site.folder / name).read_text().splitlines()


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    with Site(tmp_path / "tutorial") as site:
        yield Newcomer(site, tmp_path / "programs")


def until(condition: str) -> str:
    return f"until {condition}; do /bin/sleep 0.02; done\n"


def test_the_tutorial(newcomer: Newcomer) -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert [kind for kind, _ in blocks] == [
        "yaml",
        "sh",
        "sh",
        "yaml",
        "sh",
        "sh",
        "yaml",
        "sh",
        "sh",
        "json",
        *["sh"] * 3,
    ]
    texts = [text for _, text in blocks]
    folder = newcomer.site.folder

    (folder / "letters.yaml").write_text(texts[0])
    newcomer.types("set -e\n" + texts[1])
    assert sorted(newcomer.lines("sent.txt")) == ["Dear Ann", "Dear Bob", "Dear Cem"]
    assert "succeeded" in newcomer.types("set -e\n" + texts[2])
    (folder / "wrong.yaml").write_text(texts[0].replace("command: sh", "command: bash"))
    assert "policy_denied" in newcomer.types("agentctl check wrong.yaml 2>&1")

    (folder / "slow.yaml").write_text(texts[3])
    assert WAIT in texts[4]
    newcomer.types(texts[4].replace(WAIT, until("[ -s steps.txt ] && [ $(wc -l < steps.txt) -eq 2 ]")))
    newcomer.types("set -e\n" + texts[5])
    assert newcomer.lines("steps.txt") == ["one more"] * 3

    (folder / "pay.yaml").write_text(texts[6])
    assert WAIT in texts[7] and "kill -9 PID\n" in texts[7]
    pid = "$(agentctl workers list | awk '$2 == \"busy\" {print $3}')"  # what a person reads off the table
    script = texts[7].replace(WAIT, until("[ -s bank.txt ]")).replace("PID", pid)
    newcomer.types(script, expect=3)
    assert "paid 10" in newcomer.types(texts[8])
    [effect] = newcomer.site.ask("effects", "list", "--uncertain").data["effects"]
    (folder / "result.json").write_text(texts[9])
    assert json.loads(texts[9])["stdout"] == "paid 10\n"
    newcomer.types("set -e\n" + texts[10].replace("EFFECT", effect["request"]["id"]))
    assert newcomer.lines("bank.txt") == ["paid 10"]

    pool = newcomer.site.start(*texts[11].split()[1:])
    newcomer.site.wait_for_workers(4)
    newcomer.types("set -e\n" + texts[12])
    assert pool.wait(PATIENCE * time_factor()) == 0
    assert len(newcomer.lines("sent.txt")) == 6
    newcomer.site.assert_clean()
