"""A child of a supervisor that Ctrl-C meets while it still imports. Whoever else imports this is left alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from support import supervised_children

if multiprocessing.current_process().name != "MainProcess":
    os.kill(os.getpid(), signal.SIGINT)


def ready_and_silent(path: Path, process_id: str, now: int) -> None:
    """As that of `supervised_children`, once this module is there."""
    supervised_children.ready_and_silent(path, process_id, now)
