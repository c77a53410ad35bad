"""Priorities and fair share, with a real pool: who is served when there is more to do than workers."""

from __future__ import annotations

from support.children import wait_until
from support.field import Field


def test_a_small_run_does_not_wait_for_a_large_one_and_a_higher_one_for_nobody(field: Field) -> None:
    large = field.submit(field.workflow("large", [field.tick_fan("large", 900, 0.05, idempotent=False)]))
    pool = field.pool(1)
    wait_until(lambda: len(field.lines()) >= 5, "the large run is under way")
    small = field.submit(field.workflow("small", [field.tick_fan("small", 5, 0.05, idempotent=False)]))
    assert field.json("wait", small).code == 0
    labels = field.labels()
    first, last = labels.index("small-0"), labels.index("small-4")
    between = labels[first : last + 1]
    assert labels.count("small-0") == 1
    assert sum(label.startswith("large") for label in between) <= 6  # turn by turn
    assert len(labels) < 900
    high = field.submit(
        "--priority", "5", field.workflow("high", [field.tick_fan("high", 8, 0.05, idempotent=False)], concurrency=8)
    )
    assert field.json("wait", high).code == 0
    labels = field.labels()
    first, last = labels.index("high-0"), labels.index("high-7")
    # Once it is there, the only worker takes nothing else until it has nothing ready.
    assert [label for label in labels[first : last + 1] if not label.startswith("high")] == []
    assert len(set(labels)) == len(labels)
    assert field("cancel", large).code == 0
    field.check_clean_end(drained=[pool], uncertain=True)
