"""Report 16: a hard limit passed by parallel calls. Without models: the units are bytes that processes may print.

https://github.com/garrytan/gbrain/issues/4365 · https://github.com/use-agent-os/agent-os/issues/823 ·
https://github.com/BerriAI/litellm/issues/34732
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, kill
from support.scale import repeats

LIMIT = 10


def document(field: Field, rest: str) -> str:
    script = f'echo "$AGENTCTL_EFFECT_ID $1 0" >> "$0"; printf x; {rest}'
    action = {
        "kind": "builtin.shell.exec",
        "command": "sh",
        "combinedOutputLimitBytes": 1,
        "idempotency": "at_most_once",
    }
    tasks: list[dict[str, Any]] = [
        {
            "id": "p",
            "uses": "action:one",
            "failure": "continue",
            "foreach": {"items": list(range(100)), "maxItems": 100},
            "with": {"args": ["-c", script, str(field.ledger), "${{ vars.item }}"]},
        }
    ]
    runtime = {"maxConcurrency": 8, "budgets": {"maxProcessOutputBytes": LIMIT}}
    return field.workflow("limit", tasks, actions={"one": action}, runtime=runtime)


def sample(field: Field, run_id: str) -> int:
    sql = "SELECT used + reserved FROM budget_lines WHERE run_id = ? AND dimension = 'processOutputBytes'"
    return int(field.scalar(sql, run_id))


@pytest.mark.slow
def test_ten_of_a_hundred_to_the_last_unit(field: Field) -> None:
    pool = field.pool(8)
    file = document(field, "sleep 0.02")
    for _ in range(repeats(50, at_least=2)):
        field.ledger.unlink(missing_ok=True)
        run_id = field.submit(file)
        samples = []
        while field.scalar("SELECT state FROM runs WHERE run_id = ?", run_id) == "running":
            samples.append(sample(field, run_id))
            time.sleep(0.02)
        outcome = field.json("wait", run_id)
        assert (outcome.code, outcome.data["reason"]) == (4, "budget_exceeded")
        assert len(field.lines()) == LIMIT
        assert max([*samples, sample(field, run_id)]) == LIMIT
        counts = dict(field.rows("SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id))
        assert counts["succeeded"] == LIMIT
        assert set(counts) <= {"succeeded", "failed", "cancelled", "skipped"}
        sent = field.scalar("SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id)
        assert sent == LIMIT
    field.check_clean_end(drained=[pool])


@pytest.mark.slow
def test_the_limit_holds_while_workers_are_killed_and_after_reconciliation(field: Field) -> None:
    """What a killed worker had begun keeps its unit until a person says that it happened; then it is used."""
    chance = random.Random(16)
    field.text("result.json", "{}")
    pool = field.pool(8)
    file = document(field, "sleep 0.3")
    for _ in range(repeats(10, at_least=1)):
        field.ledger.unlink(missing_ok=True)
        run_id = field.submit(file)
        ended = ("failed", "succeeded", "cancelled")
        killed = 0
        while (state := field.scalar("SELECT state FROM runs WHERE run_id = ?", run_id)) not in ended:
            assert sample(field, run_id) <= LIMIT
            holder = field.holder(run_id)
            if holder is not None and killed < 3 and chance.random() < 0.3:
                kill(holder.pid)
                killed += 1
            if state == "paused":
                for effect in field.json("effects", "list", "--uncertain").data["effects"]:
                    name = effect["request"]["id"]
                    said = field.json("effects", "reconcile", name, "--status", "applied", "--result-file",
                                      "result.json", "--reason", "seen in the ledger")  # fmt: skip
                    assert said.code == 0, said.err
            time.sleep(0.02)
        assert field.json("wait", run_id).data["reason"] == "budget_exceeded"
        assert sample(field, run_id) <= LIMIT
        assert field.scalar("SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id) <= LIMIT
        assert len(field.lines()) <= LIMIT
        wait_until(lambda: len(field.workers()) == 8, "killed workers are replaced")
    field.check_clean_end(drained=[pool], uncertain=True)
