"""Helpers of the command line's tests: the real program in a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.field import Field

PROGRAM = (sys.executable, "-c", "from agentctl.cli import main; main()")


@dataclass(frozen=True)
class Result:
    """What one command has done."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """`data` of the success envelope, which has to be the only line of stdout."""
        assert self.out.count("\n") == 1, self.out
        envelope = json.loads(self.out)
        assert envelope["apiVersion"] == "agentctl.dev/cli/v1"
        assert envelope["ok"] is True
        return envelope["data"]

    @property
    def error(self) -> Any:
        """`error` of the Error envelope, the only line of stderr; stdout has to be empty."""
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        envelope = json.loads(self.err)
        assert (envelope["kind"], envelope["ok"]) == ("Error", False)
        assert envelope["error"]["exitCode"] == self.code
        return envelope["error"]


class Cli:
    """Runs the program in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("AGENTCTL_", "NO_COLOR"))
        }

    def __call__(
        self,
        *arguments: str | Path,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        timeout: float = 60,
    ) -> Result:
        done = subprocess.run(
            [*prefix, *PROGRAM, *map(str, arguments)],
            cwd=self.folder,
            env={**self.environment, **(env or {})},
            input=input,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def json(self, *arguments: str | Path, **options: Any) -> Result:
        """The same with `--output json`."""
        return self(*arguments, "--output", "json", **options)

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """The program in the background, with pipes."""
        return subprocess.Popen(
            [*PROGRAM, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            stdout=options.get("stdout", subprocess.PIPE),
            stderr=options.get("stderr", subprocess.PIPE),
            encoding="utf-8",
        )

    def write(self, name: str, text: str) -> Path:
        """A file in the folder."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    @property
    def database(self) -> Path:
        """The default database."""
        return self.folder / ".agentctl" / "runtime.db"


HELLO = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: hello}
spec:
  inputs: {name: world}
  actions:
    say: {kind: builtin.assign}
  tasks:
    - id: hi
      uses: action:say
      with: {greeting: "hello ${{ inputs.name }}"}
  outputs:
    text: "${{ tasks.hi.output.output.greeting }}"
"""

SHELL = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: shell}
spec:
  inputs: {script: "true", items: [1]}
  policy: {approval: never, processAllowlist: [sh]}
  runtime: {maxConcurrency: 4}
  actions:
    sh: {kind: builtin.shell.exec, command: sh}
  tasks:
    - id: each
      uses: action:sh
      foreach: {items: "${{ inputs.items }}", maxItems: 1000}
      with: {args: ["-c", "${{ inputs.script }}", "sh", "${{ vars.item }}"]}
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The program, in an empty folder with `hello.yaml` and `shell.yaml`."""
    folder = tmp_path / "work"
    folder.mkdir()
    made = Cli(folder)
    made.write("hello.yaml", HELLO)
    made.write("shell.yaml", SHELL)
    return made


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """A field whose leases are short."""
    made = Field(tmp_path)
    made.lease(5, 1)
    yield made
    made.close()


@pytest.fixture
def unprivileged() -> Callable[[Path], list[str]]:
    """A command prefix that drops root where the tests run as root, and gives the folder away first."""

    def prefix(folder: Path) -> list[str]:
        if os.geteuid() != 0:
            return []
        for parent in (folder, *folder.parents):
            if parent.stat().st_mode & 0o005 != 0o005 and parent.owner() == "root":
                parent.chmod(parent.stat().st_mode | 0o055)
        return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

    return prefix
