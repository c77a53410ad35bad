"""Field report 10: the timeout does not fire since a grandchild holds the pipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.field import Field, bound, gone
from support.scale import time_limit

LIMIT = time_limit(2)

CASES = {
    "background": 'sleep 300 & echo "$!" > "$0"; echo hi',
    "sleeper": 'echo "$$" > "$0"; sleep 300',
    "stubborn": 'trap \'\' TERM; echo "$$" > "$0"; while :; do sleep 1; done',
    "escaped": ('setsid sh -c \'echo "$$" > "$0"; exec sleep 300\' "$0" & while [ ! -s "$0" ]; do :; done; echo hi'),
    "flood": "yes 0123456789012345678901234567890123456789 | head -c 209715200",
}


def _peak(pid: int) -> int:
    [line] = [text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_the_worker_takes_its_next_task_in_time(field: Field, case: str) -> None:
    """A limit of 2 s; one worker; whatever the child does, the next task begins 5 s after the limit at most."""
    pool = field.pool(1)
    [worker] = field.workers("idle")
    warm_up = field.workflow("warm", [field.tick_task("warm", idempotent=True)])
    assert field.json("wait", field.submit(warm_up)).code == 0
    before = _peak(worker.pid)
    mark = field.folder / "pid"
    file = field.workflow(
        "case",
        [
            {
                "id": "case",
                "uses": "action:case",
                "failure": "continue",
                "with": {"args": ["-c", CASES[case], str(mark)]},
            },
            field.tick_task("next", idempotent=True),
        ],
        actions={
            "case": {
                "kind": "builtin.shell.exec",
                "command": "sh",
                "timeoutSeconds": LIMIT,
                "idempotency": "at_most_once",
            }
        },
        programs=["setsid"],
        concurrency=1 if case in ("background", "escaped", "flood") else 2,
    )
    run_id = field.submit(file)
    outcome = field.json("wait", run_id)
    assert field.labels() == ["warm", "next"]
    [started] = field.rows("SELECT e.started_at FROM effects e WHERE e.run_id = ? AND e.task_id = 'case'", run_id)
    assert field.lines()[-1].time - started[0] / 1000 < LIMIT + bound(5)
    inspected = field.json("inspect", run_id).data
    [task] = [item for item in inspected["tasks"] if item["taskId"] == "case"]
    [effect] = [item for item in inspected["effects"] if item["request"]["taskId"] == "case"]
    if case in ("background", "escaped"):
        assert (outcome.code, task["state"]) == (0, "succeeded")
        assert task["output"]["stdout"] == "hi\n"
        [stray] = effect["notes"]["strays"]
        assert stray["name"] in ("sleep", "sh")  # it may be ended before it has become the other program
        assert stray["escaped"] is (case == "escaped")
    elif case == "flood":
        assert (outcome.code, task["state"]) == (4, "failed")
        assert task["error"]["code"] == "subprocess_output_limit_exceeded"
        assert task["error"]["details"]["limitBytes"] == 1 << 20
        assert _peak(worker.pid) - before < 50 << 20
    else:
        assert (outcome.code, outcome.data["reason"]) == (3, "uncertain_effect")
        assert task["state"] == "waiting_for_effect"
        assert effect["status"] == "uncertain"
        assert "process_timeout" in str(effect)
    if mark.exists():
        assert gone(int(mark.read_text()))
    assert [entry.pid for entry in field.workers()] == [worker.pid], "the worker itself lives on"
    field.check_clean_end(drained=[pool], uncertain=case in ("sleeper", "stubborn"))
