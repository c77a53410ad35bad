"""Processes at rest: with long leases they give signs of life seldom, and whoever wants something calls them."""

from __future__ import annotations

from support.children import wait_until
from support.field import Field


def test_an_idle_worker_drains_when_it_is_asked(field: Field) -> None:
    """It is called, and finds no work: then it looks whether something else is wanted of it."""
    field.lease(3600)
    coordinator = field.coordinator()
    worker = field.start("worker", "start", "--name", "solo")
    wait_until(lambda: bool(field.workers("idle")), "it rests")
    assert field.json("workers", "drain", "solo").data["requested"]
    assert worker.wait().code == 0
    field.check_clean_end(drained=[coordinator])
