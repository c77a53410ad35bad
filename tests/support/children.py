"""Real child processes that never outlive their test.

Only `spawn`: a child of a fork would carry the parent's open database along, which SQLite forbids. Targets have to be
functions of an importable module (`support.…`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from support.scale import time_factor

SPAWN: SpawnContext = multiprocessing.get_context("spawn")
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Wait for something that has to come. The deadline only serves to fail."""
    deadline = time.monotonic() + seconds * time_factor()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds * time_factor():g} s: {what}")
        time.sleep(0.005)


class Children:
    """Starts processes and, at the end, kills and reaps all of them, whatever happened."""

    def __init__(self) -> None:
        self._spawned: list[BaseProcess] = []
        self._commands: list[subprocess.Popen[bytes]] = []

    def spawn(self, target: Callable[..., None], *args: Any) -> BaseProcess:
        """Run `target(*args)` in a process of its own."""
        process = SPAWN.Process(target=target, args=args, daemon=True)
        process.start()
        self._spawned.append(process)
        return process

    def command(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        """Run a program."""
        process: subprocess.Popen[bytes] = subprocess.Popen(argv, **options)
        self._commands.append(process)
        return process

    def join(self, *, seconds: float = PATIENCE) -> list[int | None]:
        """Wait for the end of all spawned processes; their exit codes."""
        deadline = time.monotonic() + seconds * time_factor()
        for process in self._spawned:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise AssertionError(f"process {process.pid} did not end within {seconds * time_factor():g} s")
        return [process.exitcode for process in self._spawned]

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._spawned:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)
            process.close()
        for command in self._commands:
            if command.poll() is None:
                command.kill()
            command.wait(PATIENCE)
