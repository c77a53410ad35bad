"""The actions of long-term memory, dispatched against a real database."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.canonical import canonical
from agentctl.store.clock import DAY_MS
from agentctl.store.embedding import LocalHash
from agentctl.store.engine import Store
from agentctl.store.errors import TaskFault
from agentctl.store.long_term import new_write
from agentctl.store.memory_entries import entry_of
from agentctl.store.policy import Policy
from agentctl.worker.effects import EffectContext, EffectOutcome, EffectPlan, Work, prepare
from support.builders import open_store
from support.clock import ManualClock

LEAD = "builtin.long_term_memory."


class Token:
    """A token that was, or was not, cancelled before the dispatch."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def fileno(self) -> int:
        return -1

    @property
    def cancelled(self) -> bool:
        return self.reason is not None


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def planned(kind: str, given: dict[str, Any], long_term: Mapping[str, Any] | None = None, **memory: Any) -> EffectPlan:
    work = Work("t", "a", LEAD + kind, {}, given, memory, 10.0, "/base", Policy(), long_term=long_term)
    made = prepare(work)
    assert isinstance(made, EffectPlan)
    assert made.operation == LEAD + kind
    canonical(made.input)
    canonical(made.expected_effect)
    return made


def execute(plan: EffectPlan, store: Store | None, reason: str | None = None) -> EffectOutcome:
    outcome = plan.execute(EffectContext("e1", Token(reason), time.monotonic, store=store))
    canonical(outcome.result)
    canonical(outcome.error)
    return outcome


def settings(namespace: str = "default", days: int | None = None, dimensions: int = 64) -> dict[str, Any]:
    embedding = {"provider": "local_hash", "model": None, "dimensions": dimensions}
    return {"provider": "sqlite", "namespace": namespace, "retentionDays": days, "embedding": embedding}


def fill(store: Store, key: str, text: str, *, namespace: str = "default", dimensions: int = 64) -> None:
    entry = entry_of({"content": {"type": "text", "text": text}})
    store.memory_put(new_write(namespace, key, entry, LocalHash(dimensions), None))


def facts(plan: EffectPlan) -> tuple[str, str, str, str]:
    return plan.effect_class, plan.risk, plan.idempotency, plan.policy_name


def test_classes_of_the_effects() -> None:
    assert facts(planned("read", {"key": "k"})) == ("observe", "low", "keyed", "memory.read")
    assert facts(planned("search", {"query": "q"})) == ("observe", "low", "keyed", "memory.search")
    write = planned("write", {"key": "k", "value": 1})
    assert facts(write) == ("external_mutate", "medium", "keyed", "memory.write")
    promote = planned("promote", {"key": "k", "value": 1})
    assert facts(promote) == ("internal_state", "low", "keyed", "memory.promote")


def test_read(store: Store) -> None:
    fill(store, "k", "copper")
    outcome = execute(planned("read", {"key": "k"}), store)
    record = store.memory_entry("default", "k")
    expected = {"status": "unchanged", "changed": False, "value": "copper", "record": record}
    assert (outcome.status, outcome.result) == ("succeeded", expected)
    # What is not there is no error.
    absent = execute(planned("read", {"key": "k"}, settings("elsewhere")), store)
    assert absent.result == {"status": "unchanged", "changed": False, "value": None, "record": None}
    assert execute(planned("read", {"key": "k", "namespace": "default"}, settings("x")), store).result == expected


def test_search(store: Store) -> None:
    fill(store, "a", "copper roof")
    fill(store, "b", "copper pipe")
    plan = planned("search", {"query": "copper pipe", "mode": "hybrid", "limit": 1})
    assert plan.input == {
        "namespace": "default",
        "query": "copper pipe",
        "mode": "hybrid",
        "limit": 1,
        "filters": {},
        "embedding": {"provider": "local_hash", "dimensions": 64},
    }
    outcome = execute(plan, store)
    result = outcome.result
    assert result is not None
    assert (result["status"], result["changed"], result["count"]) == ("unchanged", False, 1)
    assert (result["query"], len(result["results"])) == ("copper pipe", 1)
    assert (result["results"][0]["record"]["key"], result["results"][0]["scoreMillionths"]) == ("b", 1_000_000)
    assert "embedding" not in planned("search", {"query": "q"}).input
    other = execute(planned("search", {"query": "copper", "mode": "vector"}, settings(dimensions=8)), store)
    assert (other.status, (other.error or {})["code"]) == ("failed", "reindex_required")


def test_a_write_is_described_and_not_carried_out(store: Store, clock: ManualClock) -> None:
    given = {"key": "k", "value": {"a": 1}, "text": "words", "metadata": {"m": 1}, "retentionDays": 2, "namespace": "n"}
    entry = {"formatVersion": 1, "content": {"type": "json", "value": {"a": 1}, "text": "words"}, "metadata": {"m": 1}}
    plan = planned("write", given, settings("default", 30, 16))
    assert plan.input == {
        "namespace": "n",
        "key": "k",
        "entry": entry,
        "retentionDays": 2,
        "embedding": {"provider": "local_hash", "dimensions": 16},
    }
    assert plan.expected_effect == {"namespace": "n", "key": "k", "retentionDays": 2}
    outcome = execute(plan, store)
    ends = clock.now() + 2 * DAY_MS
    assert outcome.result == {
        "status": "changed",
        "changed": True,
        "namespace": "n",
        "key": "k",
        "entry": entry,
        "embeddingProvider": "local_hash",
        "embeddingDimensions": 16,
        "expiresAt": ends,
    }
    assert store.memory_entry("n", "k") is None
    assert outcome.memory is not None
    assert outcome.memory == new_write("n", "k", entry, LocalHash(16), ends)


@pytest.mark.parametrize(
    ("own", "of_the_document", "days"), [({}, None, None), ({}, 30, 30), ({"retentionDays": 1}, 30, 1)]
)
def test_retention_of_the_task_wins(
    store: Store, clock: ManualClock, own: dict[str, Any], of_the_document: int | None, days: int | None
) -> None:
    outcome = execute(planned("write", {"key": "k", "value": 1, **own}, settings(days=of_the_document)), store)
    assert outcome.result is not None
    assert outcome.result["expiresAt"] == (None if days is None else clock.now() + days * DAY_MS)


def test_promote() -> None:
    changed = execute(planned("promote", {"key": "k", "value": [1]}), None)
    assert changed.result == {"status": "changed", "changed": True, "before": None, "after": [1], "key": "k"}
    same = execute(planned("promote", {"key": "k", "value": [1]}, k=[1]), None)
    assert same.result == {"status": "unchanged", "changed": False, "before": [1], "after": [1], "key": "k"}


def test_what_was_cancelled_before_the_dispatch_does_nothing(store: Store) -> None:
    for kind, given in (("read", {"key": "k"}), ("search", {"query": "q"}), ("write", {"key": "k", "value": 1})):
        outcome = execute(planned(kind, given), store, "cancel_requested")
        assert (outcome.status, outcome.memory) == ("not_dispatched", None)


def test_an_entry_of_a_newer_agentctl_fails_the_effect_and_stays(store: Store) -> None:
    fill(store, "k", "copper")
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET format_version = 2")
    for kind, given in (
        ("read", {"key": "k"}),
        ("search", {"query": "copper"}),
        ("write", {"key": "k", "value": 1}),
    ):
        outcome = execute(planned(kind, given), store)
        assert (outcome.status, outcome.memory) == ("failed", None)
        assert (outcome.error or {})["code"] == "incompatible_version"


def test_an_entry_of_a_newer_agentctl_whose_time_is_over_is_not_written_over(store: Store, clock: ManualClock) -> None:
    fill(store, "k", "copper")
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET format_version = 2, expires_at = ?", (clock.now(),))
    outcome = execute(planned("write", {"key": "k", "value": 1}), store)
    assert (outcome.status, outcome.memory) == ("failed", None)
    assert (outcome.error or {})["code"] == "incompatible_version"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("read", {}, "'key'"),
        ("read", {"key": "k", "namespace": ""}, "'namespace'"),
        ("search", {"query": ""}, "'query'"),
        ("search", {"query": "q", "limit": "3"}, "'limit'"),
        ("write", {"key": 3, "value": 1}, "'key'"),
        ("write", {"key": "k"}, "exactly one"),
        ("write", {"key": "k", "value": 1, "retentionDays": "3"}, "'retentionDays'"),
        ("promote", {"value": 1}, "'key'"),
    ],
)
def test_bad_rendered_input(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFault) as caught:
        planned(kind, given)
    assert caught.value.code == "invalid_input"
    assert message in caught.value.message


def test_a_provider_that_this_worker_does_not_have_is_refused_before_anything_starts() -> None:
    given = {**settings(), "embedding": {"provider": "p", "model": "m", "dimensions": 1536}}
    with pytest.raises(TaskFault) as caught:
        planned("write", {"key": "k", "value": 1}, given)
    assert caught.value.code == "unsupported_capability"
