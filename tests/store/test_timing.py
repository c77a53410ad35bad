"""How long who has nothing to do rests."""

from __future__ import annotations

import math

import pytest
from agentctl.store.service_manager import ServiceManager
from agentctl.store.timing import LONGEST_REST_SECONDS, TOGETHER_SECONDS, Timing
from hypothesis import given
from hypothesis import strategies as st

LEASES = st.floats(0.1, 86_400)
MOMENTS = st.floats(0, 1e9)


@given(LEASES, st.floats(0.0, 0.5))
def test_a_rest_is_shorter_than_the_patience_of_others(lease: float, part: float) -> None:
    """Silent for a lease and the grace is who is believed to be stuck; a rest must not look like that."""
    timing = Timing(lease, lease * part)
    assert min(timing.heartbeat, LONGEST_REST_SECONDS) <= timing.rest <= min(lease, LONGEST_REST_SECONDS)


def test_the_rest_of_a_pool_as_it_comes() -> None:
    assert (Timing().rest, Timing().heartbeat) == (10.0, 3.0)


@given(st.integers(1, 600), MOMENTS, MOMENTS, st.integers(1, 4), st.floats(0, 1))
def test_all_who_rest_wake_up_together(lease: int, one: float, other: float, parts: int, chance: float) -> None:
    timing = Timing(float(lease), 0.05)
    length = timing.rest / parts
    for now in (one, other):
        pause = timing.until_rest_ends(now, parts=parts)
        assert 0 < pause <= length
        # Whole parts of a rest since the machine's clock began: the same moments for everybody.
        assert (now + pause) / length == pytest.approx(round((now + pause) / length), abs=1e-4)
        later = timing.until_rest_ends(now, parts=parts, chance=chance)
        assert later - pause == pytest.approx(chance * TOGETHER_SECONDS, abs=1e-6)


def test_nobody_sleeps_beyond_his_watchdog() -> None:
    assert ServiceManager(None).longest_sleep == math.inf
    assert ServiceManager(None, 2.0).longest_sleep <= 1.0
