"""What real drivers write: after whole runs the chain of checkpoints tells what the tables tell."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from support.rows import check_chains, rows
from support.scale import time_factor

EXAMPLES = Path(__file__).resolve().parents[2] / "ops" / "examples"


@pytest.mark.parametrize("example", ["hello", "dataflow", "condition", "memory", "matrix", "retry"])
def test_the_chain_of_a_real_run_equals_its_tables(tmp_path: Path, example: str) -> None:
    shutil.copy(EXAMPLES / f"{example}.yaml", tmp_path)
    database = tmp_path / "state" / "agentctl.db"
    command = [sys.executable, "-c", "from agentctl.cli import main; main()", "--db", str(database), "run"]
    done = subprocess.run(
        [*command, f"{example}.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60 * time_factor()
    )
    store = Store(database, SystemClock())
    assert rows(store, "SELECT state FROM runs") == [("succeeded",)], done.stderr
    check_chains(store)
    store.close()
