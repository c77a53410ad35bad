"""Field report 6: a stop that never ends."""

from __future__ import annotations

import signal

import pytest
from support.children import wait_until
from support.field import Field, bound, seconds
from support.scale import repeats

STUBBORN = "trap '' TERM; printf '%s deaf 0\\n' \"$AGENTCTL_EFFECT_ID\" >> \"$0\"; while :; do sleep 1; done"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["limit", "second signal", "deaf child"])
def test_a_pool_ends_within_its_limit(field: Field, how: str) -> None:
    """Commands of ten minutes: whole groups end, the repeatable task is ready again, the other one is uncertain."""
    limit = seconds(10, 1)
    coordinator = field.coordinator()
    drain = limit if how != "second signal" else 600
    pool = field.pool(3, "--no-coordinator", "--drain-seconds", f"{drain:g}")
    tasks = [
        field.tick_task("once", 600, idempotent=False),
        field.tick_task("again", 600, idempotent=True),
        field.tick_fan("quick", 10, 0.01, idempotent=False),
    ]
    if how == "deaf child":
        tasks[0] = {"id": "once", "uses": "action:deaf", "with": {"args": ["-c", STUBBORN, str(field.ledger)]}}
    actions = {"deaf": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once"}}
    run_id = field.submit(field.workflow("long", tasks, actions=actions))
    wait_until(lambda: len(field.lines()) == 12, "everything has begun and the quick ones have ended")
    wait_until(
        lambda: sum(state == "succeeded" for state, _, _ in field.tasks(run_id).values()) == 10, "they are committed"
    )
    effects = field.effect_processes()
    assert len(set(effects.values())) == 2
    pool.signal(signal.SIGTERM)
    if how == "second signal":
        wait_until(lambda: len(field.workers()) == 2, "the idle worker has ended")
        pool.signal(signal.SIGTERM)
    began = pool.wait(bound(limit + 5) if how != "second signal" else bound(6))
    assert began.code == 3, began.err
    assert field.effect_processes() == {}
    assert field.workers() == []
    wait_until(lambda: field.tasks(run_id)["once"][0] == "waiting_for_effect", "the one that may not be repeated")
    assert field.tasks(run_id)["again"][:2] == ("ready", 1)
    assert field.rows("SELECT task_id FROM effects WHERE status = 'uncertain'") == [("once",)]
    assert field.rows("SELECT 1 FROM attempts WHERE state = 'claimed'") == []
    assert sum(state == "succeeded" for state, _, _ in field.tasks(run_id).values()) == 10
    field.check_clean_end(drained=[coordinator], uncertain=True)


@pytest.mark.timeout(300)
def test_a_drain_that_has_nothing_to_force_is_clean(field: Field) -> None:
    """Commands that end within the limit are awaited, and the exit says so."""
    pool = field.pool(2, "--drain-seconds", "30")
    run_id = field.submit(field.workflow("short", [field.tick_fan("t", 2, 1, idempotent=False)]))
    wait_until(lambda: len(field.lines()) == 2, "both have begun")
    field.stop(pool, expected=0)
    assert field.rows("SELECT COUNT(*) FROM attempts WHERE outcome = 'succeeded'") == [(2,)]
    assert field.json("wait", run_id).code == 0  # the coordinator has committed them before it went
    assert len(field.lines()) == 2
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_stop_hard_ends_what_runs_every_time(field: Field) -> None:
    """`workers stop --hard` sends two signals; together they are a hard end, however close they come."""
    for number in range(repeats(30, at_least=3)):
        pool = field.pool(2)
        begun = len(field.lines())
        run_id = field.submit(field.workflow(f"hard-{number}", [field.tick_fan("t", 2, 600, idempotent=False)]))
        wait_until(lambda begun=begun: len(field.lines()) == begun + 2, "both have begun")
        assert field("workers", "stop", "--hard").code == 0
        assert pool.wait(bound(6)).code == 3
        assert field.effect_processes() == {}
        assert field("cancel", run_id).code == 0
