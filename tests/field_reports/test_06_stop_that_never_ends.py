"""Report 6: a stop that never ends.

https://github.com/celery/celery/pull/7339 · https://github.com/celery/django-celery/issues/142 ·
https://github.com/celery/celery/issues/2807
"""

from __future__ import annotations

import signal
import time

import pytest
from support.children import wait_until
from support.field import Field, bound

DRAIN = 3
DEAF = """\
#!/bin/sh
trap '' TERM
echo "$AGENTCTL_EFFECT_ID $2 0" >> "$1"
[ "$3" = 0 ] || { sleep "$3" & wait; sleep 600; }
"""


@pytest.mark.parametrize("how", ["once", "twice", "deaf"])
def test_a_drain_has_an_end(field: Field, how: str) -> None:
    """Two tasks that take ten minutes: the drain limit, a second signal, or a child that ignores SIGTERM."""
    if how == "deaf":
        field.tool("tick", DEAF)
    tasks = [field.tick_task("n", 600, idempotent=False), field.tick_task("i", 600, idempotent=True)]
    quick = field.tick_fan("q", 4, idempotent=False)
    driver = field.coordinator()
    pool = field.pool(3, "--drain-seconds", str(DRAIN), "--no-coordinator")
    run_id = field.submit(field.workflow("drain", [quick, *tasks]))
    wait_until(lambda: {"n", "i"} <= set(field.labels()), "both run")
    wait_until(lambda: field.json("status", run_id).data["taskCounts"].get("succeeded", 0) >= 4, "the quick ones ended")
    began = time.monotonic()
    pool.signal(signal.SIGTERM)
    if how == "twice":
        time.sleep(1)
        pool.signal(signal.SIGTERM)
    result = pool.wait(DRAIN + 15)
    assert result.code == 3, "a forced drain is told from a clean one"
    assert time.monotonic() - began < bound((1 if how == "twice" else DRAIN) + 7)
    assert field.effect_processes() == {}
    states = field.tasks(run_id)
    assert states["i"][0] == "ready"
    assert states["i"][1] == 1
    assert field.rows("SELECT lease_expires_at FROM attempts WHERE task_id = 'i'") == [(None,)]
    assert field.rows("SELECT status FROM effects WHERE task_id = 'n'") == [("uncertain",)]
    assert sum(1 for name, state in states.items() if name.startswith("q") and state[0] == "succeeded") == 4
    wait_until(lambda: field.tasks(run_id)["n"][0] == "waiting_for_effect", "the driver knows")
    field.check_clean_end(drained=[driver], uncertain=True)
