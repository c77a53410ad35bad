"""Field report 24: a busy worker hoards tasks that idle ones could do."""

from __future__ import annotations

import pytest
from support.children import wait_until
from support.field import Field, bound, seconds

SHORT = 200


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", ["long", "short"])
def test_no_task_waits_behind_a_long_one(field: Field, first: str) -> None:
    """4 TICK-I(60) and 200 TICK-I(0.1) for eight workers; nobody holds more than one."""
    pool = field.pool(8)
    rest = seconds(60, 8)
    fans = {
        "long": field.tick_fan("long", 4, rest, idempotent=True),
        "short": field.tick_fan("short", SHORT, seconds(0.1), idempotent=True),
    }
    order = [first, *(name for name in fans if name != first)]
    run_id = field.submit(field.workflow("mixed", [fans[name] for name in order], concurrency=SHORT + 4))
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, field.scalar("SELECT COUNT(*) FROM attempts WHERE state = 'claimed'"))
        return bool(field.rows("SELECT 1 FROM runs WHERE run_id = ? AND ended_at IS NOT NULL", run_id))

    wait_until(over, "the end", seconds=rest + 60)
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["state"]) == (0, "succeeded")
    assert 4 <= most <= 8
    lines = field.lines()
    assert len(lines) == SHORT + 4
    begin = field.scalar("SELECT created_at / 1000.0 FROM runs WHERE run_id = ?", run_id)
    end = field.scalar("SELECT ended_at / 1000.0 FROM runs WHERE run_id = ?", run_id)
    shorts = [line.time for line in lines if line.label.startswith("short")]
    longs = [line.time for line in lines if line.label.startswith("long")]
    assert max(shorts) - begin < bound(seconds(15, 7))
    if first == "long":
        assert max(longs) - begin < bound(2), "they were first in order and all began at once"
    assert end - max(longs) < rest + bound(3)
    holders = field.rows(
        "SELECT holder, COUNT(*) FROM attempts WHERE run_id = ? AND task_id LIKE 'long-%' GROUP BY holder", run_id
    )
    if first == "long":
        assert [count for _, count in holders] == [1, 1, 1, 1]
    assert max(count for _, count in holders) <= 2
    field.check_clean_end(drained=[pool])
