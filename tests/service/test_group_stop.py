"""A stop that reaches every process of a unit at one instant, as with `KillMode=control-group` or at a shutdown."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import pytest
from support.children import wait_until
from support.field import Field, Started, kill

SLOW = 600
DEAF = "trap '' TERM INT; printf '%s deaf 0\\n' \"$AGENTCTL_EFFECT_ID\" >> \"$0\"; sleep 1; exit 0"
TRAPS = "trap 'exit 143' TERM; printf '%s traps 0\\n' \"$AGENTCTL_EFFECT_ID\" >> \"$0\"; while :; do sleep 0.05; done"


def stop_all(field: Field, order: int) -> None:
    """SIGTERM to everything that runs here: pool, workers, coordinator and commands, in one of two orders."""
    for pid in sorted(field.processes(), reverse=bool(order)):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue


def uncertain(field: Field) -> list[str]:
    return [row[0] for row in field.rows("SELECT task_id FROM effects WHERE status = 'uncertain' AND superseded = 0")]


def begun(field: Field, count: int) -> None:
    wait_until(lambda: len(field.lines()) == count, f"{count} commands have begun")


def sh(idempotency: str) -> dict[str, object]:
    return {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency}


@pytest.mark.parametrize("order", [0, 1], ids=["oldest first", "youngest first"])
def test_one_instant_is_one_stop_and_spends_no_retry(field: Field, order: int) -> None:
    """What may be repeated is ready again in its first attempt; what may not is for a person; nothing has failed."""
    tasks = [
        field.tick_task("again", SLOW, idempotent=True),
        field.tick_task("once", SLOW, idempotent=False),
        {"id": "deaf", "uses": "action:deaf", "with": {"args": ["-c", DEAF, str(field.ledger)]}},
        {"id": "traps", "uses": "action:traps", "with": {"args": ["-c", TRAPS, str(field.ledger)]}},
    ]
    actions = {"deaf": sh("at_most_once"), "traps": sh("idempotent")}
    pool = field.pool(4)
    run_id = field.submit(field.workflow("stopped", tasks, actions=actions))
    begun(field, 4)
    stop_all(field, order)
    ended = pool.wait(30)
    assert ended.code == 0, ended.err  # drained, not forced: nobody has asked twice
    assert field.workers() == []
    assert field.rows("SELECT 1 FROM attempts WHERE state = 'claimed'") == []
    states = field.tasks(run_id)
    assert states["again"][:2] == ("ready", 1)
    assert states["traps"][:2] == ("ready", 1)  # a shell hands the death of its command on as 143
    assert states["deaf"][:2] == ("succeeded", 1)  # it was awaited, and the coordinator went last
    assert states["once"] == ("waiting_for_effect", 1, 1)
    assert uncertain(field) == ["once"]
    assert field.rows("SELECT 1 FROM effects WHERE status = 'failed'") == []
    assert field.rows("SELECT 1 FROM attempts WHERE number > 1") == []
    assert field.rows("SELECT lost FROM attempts WHERE lost > 0") == []
    assert field("db", "verify").code == 0
    again = field.pool(2, name="q")
    begun(field, 6)  # those two again, in another delivery of the same attempt
    assert field.tasks(run_id)["again"] == ("running", 1, 2)
    assert field("cancel", run_id).code == 0
    field.stop(again)


def test_a_command_that_somebody_else_ends_has_failed(field: Field) -> None:
    """Without a stop of the worker the death of a command is what it always was: a failure, with a retry."""
    coordinator = field.coordinator()
    pool = field.pool(1, "--no-coordinator")
    task = field.tick_task("t", SLOW, idempotent=True, retry={"maxAttempts": 2, "backoffMs": 1})
    run_id = field.submit(field.workflow("ended", [task]))
    for count in (1, 2):
        begun(field, count)
        wait_until(lambda: len(field.effect_processes()) == 1, "its process")
        os.kill(*field.effect_processes(), signal.SIGTERM)
    assert field.json("wait", run_id).code == 4
    assert field.rows("SELECT status FROM effects ORDER BY attempt") == [("failed",), ("failed",)]
    field.check_clean_end(drained=[pool, coordinator])


def test_the_second_stop_of_the_group_ends_it_hard(field: Field) -> None:
    pool = field.pool(2)
    script = DEAF.replace("sleep 1", "while :; do sleep 0.1; done")
    tasks = [{"id": "deaf", "uses": "action:deaf", "with": {"args": ["-c", script, str(field.ledger)]}}]
    run_id = field.submit(field.workflow("hard", tasks, actions={"deaf": sh("at_most_once")}))
    begun(field, 1)
    stop_all(field, 0)
    wait_until(lambda: len(field.workers()) == 1, "the idle worker has ended")
    stop_all(field, 0)
    assert pool.wait(20).code == 3
    assert field.effect_processes() == {}
    # Nobody was there any more to commit it; whoever comes does.
    assert field.json("resume", run_id).code == 3
    assert uncertain(field) == ["deaf"]


def test_a_login_session_that_ends_is_one_stop(field: Field) -> None:
    """SIGTERM and SIGHUP, one right behind the other."""
    pool = field.pool(1)
    run_id = field.submit(field.workflow("session", [field.tick_task("t", 1, idempotent=False)]))
    begun(field, 1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal_those(pool, [worker.pid for worker in field.workers()], number)
    assert pool.wait(30).code == 0
    assert field.tasks(run_id)["t"][:2] == ("succeeded", 1)


def signal_those(pool: Started, pids: Iterable[int], number: int) -> None:
    pool.signal(number)
    for pid in pids:
        os.kill(pid, number)


def test_workers_whose_supervisor_is_lost_finish_and_end(field: Field) -> None:
    coordinator = field.coordinator()
    pool = field.pool(2, "--no-coordinator")
    run_id = field.submit(field.workflow("lost", [field.tick_fan("t", 2, 1, idempotent=False)]))
    begun(field, 2)
    kill(pool.pid)
    wait_until(lambda: not field.workers(), "the workers have ended")
    assert field.json("wait", run_id).code == 0
    assert len(field.lines()) == 2
    field.check_clean_end(drained=[coordinator])
