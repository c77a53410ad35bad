"""Long-term memory: entries, their end, search against a plain reference, and writes that come with a confirmation."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from agentctl.store import effects, long_term
from agentctl.store import memory_entries as entries
from agentctl.store.canonical import canonical
from agentctl.store.clock import DAY_MS
from agentctl.store.embedding import Embedder, LocalHash, embedder, terms_of, tokens
from agentctl.store.engine import REINDEX_ENTRIES, Store
from agentctl.store.errors import IncompatibleVersion, LeaseLost, TaskFault
from agentctl.store.long_term import new_write
from agentctl.store.memory_entries import Search
from agentctl.store.records import EffectEnd, MemoryWrite, RecordedEffect, StartedEffect
from hypothesis import given, settings
from hypothesis import strategies as st
from support import store_children
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.children import SPAWN, Children
from support.clock import ManualClock
from support.rows import check_chains, effect, everything, one, rows, scalar

LOCAL = LocalHash()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    check_chains(opened)
    assert scalar(opened, "PRAGMA integrity_check") == "ok"
    opened.close()


def text_entry(text: str, **metadata: Any) -> dict[str, Any]:
    return entries.entry_of({"content": {"type": "text", "text": text}, "metadata": metadata})


def write_of(
    key: str,
    text: str = "some text",
    *,
    namespace: str = "n",
    dimensions: int = 64,
    expires_at: int | None = None,
    **metadata: Any,
) -> MemoryWrite:
    return new_write(namespace, key, text_entry(text, **metadata), LocalHash(dimensions), expires_at)


def keys(store: Store, query: str, mode: str = "text", **options: Any) -> list[str]:
    found = store.memory_search(Search("n", query, mode, **options), LOCAL)
    return [result["record"]["key"] for result in found]


# -- tokens and vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Alpha alpha beta", ["alpha", "alpha", "beta"]),
        ("don't stop_now 3.14", ["don", "t", "stop", "now", "3", "14"]),
        ("Größe ÄRGER, 東京 Ⅷ x²", ["größe", "ärger", "東京", "ⅷ", "x²"]),
        ("... \t\n—!", []),
        ("", []),
    ],
)
def test_tokens(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


def test_golden_vector() -> None:
    (vector,) = LocalHash(64).embed(["Alpha alpha beta"])
    assert {index: round(value, 6) for index, value in enumerate(vector) if value} == {14: 0.447214, 19: 0.894427}


@pytest.mark.parametrize("dimensions", [8, 64, 1000, 4096])
def test_vectors_are_those_of_the_rule(dimensions: int) -> None:
    texts = ["", "one", "One two TWO three", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]
    for text, vector in zip(texts, LocalHash(dimensions).embed(texts), strict=True):
        assert vector == pytest.approx(plain_vector(text, dimensions), abs=1e-12)
        assert math.hypot(*vector) == pytest.approx(1.0 if text else 0.0)
    assert any(value < 0 for value in LocalHash(dimensions).embed(texts)[3])


def test_vectors_are_stored_as_little_endian_doubles() -> None:
    assert long_term.packed((1.0, -0.5, 0.0)) == struct.pack("<3d", 1.0, -0.5, 0.0)


def test_other_embeddings_are_refused_by_name() -> None:
    with pytest.raises(TaskFault, match="'openai'") as caught:
        embedder("openai", 64)
    assert caught.value.code == "unsupported_capability"
    for dimensions in (7, 4097, -1):
        with pytest.raises(TaskFault, match="8 to 4096"):
            embedder("local_hash", dimensions)


def plain_tokens(text: str) -> list[str]:
    words, word = [], ""
    for letter in text + " ":
        if letter.isalnum():
            word += letter
        elif word:
            words.append(word.lower())
            word = ""
    return words


def plain_vector(text: str, dimensions: int) -> list[float]:
    vector = [0.0] * dimensions
    for token in plain_tokens(text):
        digest = sha256(token.encode()).digest()
        vector[(digest[0] * 256 + digest[1]) % dimensions] += 1.0 if digest[2] % 2 == 0 else -1.0
    length = sum(value**2 for value in vector) ** 0.5
    return [value / length for value in vector] if length else vector


# -- entries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "content", "text", "value"),
    [
        ({"value": "plain"}, {"type": "json", "value": "plain", "text": "plain"}, "plain", "plain"),
        ({"value": {"b": 1, "a": None}}, None, '{"a":null,"b":1}', {"a": None, "b": 1}),
        ({"value": None}, None, "null", None),
        ({"value": 1.0, "text": "one"}, {"type": "json", "value": 1.0, "text": "one"}, "one", 1.0),
        ({"content": {"type": "text", "text": "t"}}, {"type": "text", "text": "t"}, "t", "t"),
        ({"content": {"type": "json", "value": [1]}}, {"type": "json", "value": [1]}, "[1]", [1]),
        ({"entry": {"content": {"type": "text", "text": "t"}}}, {"type": "text", "text": "t"}, "t", "t"),
    ],
)
def test_forms_of_an_entry(given: dict[str, Any], content: Any, text: str, value: Any) -> None:
    entry = entries.entry_of(given)
    assert entry.keys() == {"formatVersion", "content", "metadata"}
    assert (entry["formatVersion"], entry["metadata"]) == (1, {})
    assert content is None or entry["content"] == content
    assert entries.searchable_text(entry) == text
    assert canonical(entries.value_of(entry)) == canonical(value)
    assert entries.entry_of({"entry": entry}) == entry


TEXT = {"type": "text", "text": "t"}
BAD_ENTRIES: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of"),
    ({"value": 1, "content": TEXT}, "not content and value"),
    ({"content": TEXT, "text": "t"}, "'text' stands beside value only"),
    ({"entry": {"content": TEXT}, "metadata": {}}, "belongs into entry"),
    ({"entry": "text"}, "'entry' must be an object"),
    ({"entry": {"content": TEXT, "more": 1}}, "'entry' must be an object with"),
    ({"entry": {"content": TEXT, "formatVersion": 2}}, "formatVersion 2"),
    ({"entry": {"content": TEXT, "formatVersion": True}}, "formatVersion true"),
    ({"entry": {"content": TEXT, "metadata": []}}, "'metadata' must be an object"),
    ({"content": "t"}, "'content' must be"),
    ({"content": {"type": "html", "text": "t"}}, "'content' must be"),
    ({"content": {"type": ["text"], "text": "t"}}, "'content' must be"),
    ({"content": {"type": "text", "text": "t", "value": 1}}, "'content' must be"),
    ({"content": {"type": "json", "text": "t"}}, "'content' must be"),
    ({"content": {"type": "text", "text": 1}}, "'text' must be text"),
    ({"content": TEXT, "metadata": {"": 1}}, "'metadata' must not have an empty key"),
    ({"value": " \n"}, "nothing to search for"),
    ({"value": 1, "text": ""}, "nothing to search for"),
    ({"value": float("nan")}, "JSON cannot carry"),
    ({"value": "\ud800"}, "lone surrogate"),
]


@pytest.mark.parametrize(("given", "message"), BAD_ENTRIES)
def test_bad_entries(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFault) as caught:
        entries.entry_of(given)
    assert message in caught.value.message


def test_the_largest_entry_and_the_largest_query() -> None:
    frame = len(canonical(text_entry("x")).encode()) - 1
    room = entries.MAX_ENTRY_BYTES - frame
    assert entries.entry_of({"content": {"type": "text", "text": "ä" * (room // 2)}})
    with pytest.raises(TaskFault, match="at most 1048576"):
        entries.entry_of({"content": {"type": "text", "text": "ä" * (room // 2) + "xx"}})
    assert entries.check_query("ä" * (entries.MAX_QUERY_BYTES // 2))
    with pytest.raises(TaskFault, match="65537 bytes"):
        entries.check_query("x" * (entries.MAX_QUERY_BYTES + 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'query'"),
        ({"query": "  "}, "'query'"),
        ({"query": 1}, "'query'"),
        ({"query": "q", "mode": "fuzzy"}, "one of text, vector, hybrid"),
        ({"query": "q", "mode": ["text"]}, "one of text, vector, hybrid"),
        ({"query": "q", "limit": 0}, "1 to 100"),
        ({"query": "q", "limit": 101}, "1 to 100"),
        ({"query": "q", "limit": True}, "1 to 100"),
        ({"query": "q", "limit": 1.0}, "1 to 100"),
        ({"query": "q", "filters": []}, "'filters' must be an object"),
        ({"query": "q", "namespace": ""}, "'namespace'"),
    ],
)
def test_bad_questions(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskFault) as caught:
        entries.search_of(given, "default")
    assert message in caught.value.message


@pytest.mark.parametrize("days", [0, -1, 36_501, 1.5, True, "3"])
def test_bad_retention(days: Any) -> None:
    with pytest.raises(TaskFault, match="1 to 36500"):
        entries.check_retention(days)


# -- put and get -------------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_and_is_replaced(store: Store, clock: ManualClock) -> None:
    began = clock.now()
    assert store.memory_entry("n", "k") is None
    first = store.memory_put(write_of("k", "one", topic="a"))
    assert first == {
        "namespace": "n",
        "key": "k",
        "entry": {"formatVersion": 1, "content": {"type": "text", "text": "one"}, "metadata": {"topic": "a"}},
        "embeddingProvider": "local_hash",
        "embeddingDimensions": 64,
        "createdAt": began,
        "updatedAt": began,
        "expiresAt": None,
    }
    clock.advance(5)
    second = store.memory_put(write_of("k", "two", dimensions=8, expires_at=clock.now() + 10))
    assert store.memory_entry("n", "k") == second
    assert (second["createdAt"], second["updatedAt"], second["embeddingDimensions"]) == (began, clock.now(), 8)
    assert store.memory_entry("other", "k") is None
    assert scalar(store, "SELECT COUNT(*) FROM long_term_memory") == 1


def test_an_entry_is_there_until_its_last_millisecond(store: Store, clock: ManualClock) -> None:
    born = clock.now()
    ends = born + 30 * DAY_MS
    store.memory_put(write_of("k", "copper roof", expires_at=ends))
    store.memory_put(write_of("stays", "copper pipe"))
    clock.set_wall(ends - 1)
    assert store.memory_entry("n", "k") is not None
    assert keys(store, "copper") == ["k", "stays"]
    clock.set_wall(ends)
    assert store.memory_entry("n", "k") is None
    assert keys(store, "copper", "hybrid") == ["stays"]
    assert store.memory_embeddings("n") == [("local_hash", 64)]
    # A new entry of that key begins anew.
    assert store.memory_put(write_of("k"))["createdAt"] == ends


def test_what_has_expired_long_ago_is_pruned(store: Store, clock: ManualClock) -> None:
    now = clock.now()
    for number in range(600):
        store.memory_put(write_of(f"k{number}", expires_at=now + 1 + number))
    store.memory_put(write_of("stays"))
    clock.set_wall(now + 1000)
    assert store.memory_collect(older_than_ms=500) == 500
    assert store.memory_collect(older_than_ms=500) == 0
    left = {key for (key,) in rows(store, "SELECT memory_key FROM long_term_memory")}
    assert left == {"stays", *(f"k{number}" for number in range(500, 600))}


def test_what_has_expired_of_a_newer_agentctl_is_neither_counted_nor_pruned(store: Store, clock: ManualClock) -> None:
    for key in ("old", "newer"):
        store.memory_put(write_of(key, expires_at=clock.now() + 1))
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET format_version = 2 WHERE memory_key = 'newer'")
    clock.advance(365 * DAY_MS / 1000)
    assert store.memory_expired(older_than_ms=0) == 1
    assert store.memory_collect(older_than_ms=0) == 1
    assert rows(store, "SELECT memory_key FROM long_term_memory") == [("newer",)]
    assert (store.memory_expired(older_than_ms=0), store.memory_collect(older_than_ms=0)) == (0, 0)


def test_an_entry_of_a_newer_agentctl_whose_time_is_over_is_not_lost(store: Store, clock: ManualClock) -> None:
    """It is not there for who looks, and nobody writes over it either."""
    store.memory_put(write_of("k", "copper", expires_at=clock.now() + 1))
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET format_version = 2")
    clock.advance(1)
    before = everything(store)
    assert store.memory_entry("n", "k") is None
    with pytest.raises(IncompatibleVersion, match="newer agentctl"):
        store.refuse_newer_entry("n", "k")
    with pytest.raises(IncompatibleVersion, match="newer agentctl"):
        store.memory_put(write_of("k", "lost"))
    assert everything(store) == before


def test_an_entry_of_a_newer_agentctl_is_neither_shown_nor_lost(store: Store) -> None:
    store.memory_put(write_of("k", "copper"))
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET format_version = 2")
    before = everything(store)
    with pytest.raises(IncompatibleVersion, match="newer agentctl"):
        store.memory_entry("n", "k")
    with pytest.raises(IncompatibleVersion):
        keys(store, "copper")
    with pytest.raises(IncompatibleVersion):
        store.memory_put(write_of("k", "lost"))
    with pytest.raises(IncompatibleVersion):
        store.memory_reindex(None, LOCAL)
    assert everything(store) == before


def test_two_processes_write_one_key(store: Store, children: Children) -> None:
    with store.database.write() as tx:
        tx.execute("CREATE TABLE log (value TEXT)")
        body = "BEGIN INSERT INTO log VALUES (json_extract(NEW.value_json, '$.content.text')); END"
        tx.execute(f"CREATE TRIGGER log_insert AFTER INSERT ON long_term_memory {body}")
        tx.execute(f"CREATE TRIGGER log_update AFTER UPDATE ON long_term_memory {body}")
    barrier = SPAWN.Barrier(2)
    for name in ("a", "b"):
        children.spawn(store_children.put_often, store.path, name, 100, barrier)
    assert children.join() == [0, 0]
    written = [text for (text,) in rows(store, "SELECT value FROM log ORDER BY rowid")]
    assert sorted(written) == sorted(f"{name} {number}" for name in "ab" for number in range(100))
    for name in "ab":
        own = [text for text in written if text.startswith(name)]
        assert own == [f"{name} {number}" for number in range(100)]
    entry, terms = one(store, "SELECT value_json, terms FROM long_term_memory")
    assert entry == canonical(text_entry(written[-1]))
    assert terms == terms_of(written[-1])


# -- search ------------------------------------------------------------------------------------------------------------


def plain_search(
    held: dict[str, tuple[str, dict[str, Any], int | None]], question: Search, dimensions: int, now: int
) -> list[tuple[str, int, int, int]]:
    """The rule of contract 7, as plainly as it can be said."""
    words = set(plain_tokens(question.query))
    asked = plain_vector(question.query, dimensions)
    found = []
    for key, (text, metadata, expires_at) in held.items():
        if expires_at is not None and expires_at <= now:
            continue
        if any(n not in metadata or canonical(metadata[n]) != canonical(v) for n, v in question.filters.items()):
            continue
        by_text = len(words & set(plain_tokens(text))) * 1_000_000 // len(words) if words else 0
        cosine = sum(a * b for a, b in zip(asked, plain_vector(text, dimensions), strict=True))
        by_vector = min(1_000_000, max(0, round(cosine * 1_000_000)))
        if question.mode == "text":
            by_vector = 0
        elif question.mode == "vector":
            by_text = 0
        score = (by_text + by_vector) // 2 if question.mode == "hybrid" else by_text + by_vector
        if score > 0:
            found.append((key, score, by_text, by_vector))
    found.sort(key=lambda item: (-item[1], item[0]))
    return found[: question.limit]


_WORDS = st.sampled_from(["red", "Red", "green", "blue", "ÄRGER", "ärger", "東京", "x1", "!", "-", "red-green"])
_TEXTS = st.lists(_WORDS, min_size=1, max_size=6).map(" ".join)
_VALUES = st.sampled_from([0, 1, 1.0, True, False, "1", None, [1], {"a": 1}])
_METADATA = st.dictionaries(st.sampled_from(["a", "b"]), _VALUES)
_ENDS = st.one_of(st.none(), st.integers(-2, 2))
_HELD = st.dictionaries(st.text("abÄ東z", min_size=1, max_size=3), st.tuples(_TEXTS, _METADATA, _ENDS), max_size=12)


def test_a_search_gives_what_a_plain_reference_gives(store: Store, clock: ManualClock) -> None:
    numbers = count()
    now = clock.now()

    @settings(max_examples=150, deadline=None)
    @given(_HELD, _TEXTS, st.sampled_from(entries.MODES), st.integers(1, 13), _METADATA, st.sampled_from([8, 64]))
    def check(
        drawn: dict[str, tuple[str, dict[str, Any], int | None]],
        query: str,
        mode: str,
        limit: int,
        filters: dict[str, Any],
        dimensions: int,
    ) -> None:
        namespace = f"example {next(numbers)}"
        held = {
            key: (text, metadata, None if end is None else now + end) for key, (text, metadata, end) in drawn.items()
        }
        for key, (text, metadata, expires_at) in held.items():
            entry = text_entry(text, **metadata)
            with store.database.write() as tx:
                long_term.put(tx, new_write(namespace, key, entry, LocalHash(dimensions), expires_at), now=now - 5)
        question = Search(namespace, query, mode, limit, filters)
        results = store.memory_search(question, LocalHash(dimensions))
        told = [
            (r["record"]["key"], r["scoreMillionths"], r["textScoreMillionths"], r["vectorScoreMillionths"])
            for r in results
        ]
        assert told == plain_search(held, question, dimensions, now)
        assert all(
            canonical(r["record"]["entry"]["metadata"]) == canonical(held[r["record"]["key"]][1]) for r in results
        )

    check()


def test_scores_and_order(store: Store) -> None:
    for key, text in (("b", "alpha beta"), ("a", "beta ALPHA"), ("c", "alpha"), ("d", "gamma")):
        store.memory_put(write_of(key, text))
    found = store.memory_search(Search("n", "alpha beta beta", "hybrid"), LOCAL)
    told = [(r["record"]["key"], r["textScoreMillionths"], r["vectorScoreMillionths"]) for r in found]
    # cos([1, 2], [1, 1]) = 3 / sqrt 10, and cos([1, 2], [1, 0]) = 1 / sqrt 5.
    assert told == [("a", 1_000_000, 948_683), ("b", 1_000_000, 948_683), ("c", 500_000, 447_214)]
    assert [r["scoreMillionths"] for r in found] == [974_341, 974_341, 473_607]
    assert keys(store, "gamma delta") == ["d"]
    assert keys(store, "delta") == keys(store, "?!") == []
    assert keys(store, "alpha", limit=2) == ["a", "b"]


def test_vectors_that_cannot_be_compared_ask_for_a_reindex(store: Store) -> None:
    store.memory_put(write_of("a", "copper roof"))
    store.memory_put(write_of("b", "copper pipe", dimensions=128))
    assert keys(store, "copper") == ["a", "b"]
    for mode in ("vector", "hybrid"):
        with pytest.raises(TaskFault, match="'b' of 'n' was embedded by local_hash with 128") as caught:
            keys(store, "copper", mode)
        assert caught.value.code == "reindex_required"
        assert "agentctl memory reindex --namespace n --dimensions 64" in (caught.value.details or {})["remedy"]
    assert store.memory_embeddings("n") == [("local_hash", 64), ("local_hash", 128)]
    assert store.memory_reindex("n", LOCAL) == 2
    assert keys(store, "copper", "vector") == ["a", "b"]


def test_too_many_candidates(store: Store, clock: ManualClock) -> None:
    store.memory_put(write_of("k00000", "copper"))
    with store.database.write() as tx:
        columns = "format_version, value_json, terms, embedding_provider, embedding_dimensions, embedding"
        tx.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "  # noqa: S608
            f"INSERT INTO long_term_memory SELECT namespace, printf('k%05d', i), {columns}, ?, created_at, updated_at "
            "FROM n, long_term_memory WHERE memory_key = 'k00000'",
            (entries.MAX_CANDIDATES, clock.now() + 10),
        )
    with pytest.raises(TaskFault, match="10001 entries") as caught:
        keys(store, "copper")
    assert caught.value.code == "too_many_candidates"
    with store.database.write() as tx:
        tx.execute("DELETE FROM long_term_memory WHERE memory_key = 'k00001'")
    assert keys(store, "copper", "hybrid", limit=3) == ["k00000", "k00002", "k00003"]
    clock.set_wall(clock.now() + 10)
    store.memory_put(write_of("k00001", "copper"))
    # What has expired is no candidate.
    assert keys(store, "copper") == ["k00000", "k00001"]


def test_reindex_goes_through_everything_and_keeps_what_it_does_not_own(store: Store, clock: ManualClock) -> None:
    for number in range(2 * REINDEX_ENTRIES + 3):
        store.memory_put(write_of(f"k{number}", f"text {number}", namespace=f"n{number % 2}", dimensions=8))
    before = rows(store, "SELECT namespace, memory_key, value_json, created_at, updated_at FROM long_term_memory")
    with store.database.write() as tx:
        tx.execute("UPDATE long_term_memory SET terms = ' damaged '")
    clock.advance(100)
    assert store.memory_reindex("n0", LOCAL) == REINDEX_ENTRIES + 2
    assert store.memory_embeddings("n1") == [("local_hash", 8)]
    assert store.memory_reindex(None, LOCAL) == 2 * REINDEX_ENTRIES + 3
    assert rows(store, "SELECT DISTINCT embedding_dimensions FROM long_term_memory") == [(64,)]
    for namespace, key, terms, embedding in rows(
        store, "SELECT namespace, memory_key, terms, embedding FROM long_term_memory"
    ):
        fresh = write_of(key, f"text {key[1:]}", namespace=namespace)
        assert (terms, embedding) == (fresh.terms, fresh.embedding)
    after = rows(store, "SELECT namespace, memory_key, value_json, created_at, updated_at FROM long_term_memory")
    assert after == before
    assert store.memory_reindex("nobody", LOCAL) == 0


class Meddler:
    """An embedder during whose work somebody else changes one entry and deletes another."""

    provider = "local_hash"
    dimensions = 16

    def __init__(self, store: Store) -> None:
        self.store = store
        self.rounds = 0

    def embed(self, texts: Any) -> list[tuple[float, ...]]:
        self.rounds += 1
        if self.rounds == 1:
            self.store.memory_put(write_of("a", "changed meanwhile"))
            with self.store.database.write() as tx:
                tx.execute("DELETE FROM long_term_memory WHERE memory_key = 'b'")
        return LocalHash(16).embed(texts)


def test_reindex_embeds_what_has_changed_meanwhile_once_more(store: Store) -> None:
    for key in "abc":
        store.memory_put(write_of(key, f"text {key}"))
    meddler: Embedder = Meddler(store)
    assert store.memory_reindex("n", meddler) == 2
    assert rows(store, "SELECT memory_key, terms, embedding_dimensions FROM long_term_memory ORDER BY 1") == [
        ("a", " changed meanwhile ", 16),
        ("c", " c text ", 16),
    ]


# -- writes of effects -------------------------------------------------------------------------------------------------


@pytest.fixture
def hand(store: Store) -> Hand:
    store.create_run(new_run(tasks=1))
    Driver(store, "run-1").enqueue([0])
    return Hand(store)


def test_the_entry_and_the_confirmation_are_one_transaction(store: Store, hand: Hand) -> None:
    claim = hand.take()
    request = effect_request(claim, idempotency="keyed")
    assert hand.start(claim, request) == StartedEffect(1)
    assert store.memory_entry("n", "k") is None
    end = EffectEnd(request.effect_id, "succeeded", '{"done":true}', memory=write_of("k"))
    hand.finish(claim, effect=end)
    assert effect(store, request.effect_id)["status"] == "succeeded"
    assert store.memory_entry("n", "k") is not None


@pytest.mark.parametrize("status", ["failed", "uncertain", "requested", "cancelled", "lost"])
def test_an_effect_that_is_not_confirmed_writes_nothing(store: Store, hand: Hand, status: str) -> None:
    claim = hand.take()
    request = effect_request(claim, idempotency="keyed")
    hand.start(claim, request)
    end = EffectEnd(request.effect_id, status, error_json='{"code":"x"}', memory=write_of("k"))
    if status in ("requested", "lost"):
        store.release(claim, effect=end, reason="drain")
    else:
        hand.finish(claim, "uncertain" if status == "uncertain" else "failed", effect=end)
    assert store.memory_entry("n", "k") is None


def test_a_worker_whose_delivery_is_over_writes_nothing(store: Store, hand: Hand) -> None:
    """It was taken for dead, its attempt was delivered again, and now it comes back with its result."""
    late = hand.take()
    request = effect_request(late, idempotency="keyed")
    hand.start(late, request)
    assert store.rescue([(late.fence.attempt_id, 1)], dead=[], why="silent", actor="test") == ["ready"]
    before = everything(store)
    end = EffectEnd(request.effect_id, "succeeded", "{}", memory=write_of("k", "late"))
    with pytest.raises(LeaseLost):
        hand.finish(late, effect=end)
    assert everything(store) == before
    other = Hand(store, "worker-2")
    again = other.take()
    assert other.start(again, request) == StartedEffect(2)
    with pytest.raises(LeaseLost):
        hand.finish(late, effect=end)
    assert store.memory_entry("n", "k") is None
    other.finish(again, effect=replace(end, memory=write_of("k", "right"), dispatch=2))
    record = store.memory_entry("n", "k")
    assert record is not None
    assert record["entry"]["content"]["text"] == "right"


def test_a_delivery_after_the_confirmation_finds_the_result(store: Store, hand: Hand) -> None:
    claim = hand.take()
    request = effect_request(claim, idempotency="keyed")
    hand.start(claim, request)
    with store.database.write() as tx:  # confirmed, but the attempt is not finished yet
        end = EffectEnd(request.effect_id, "succeeded", '{"done":true}', memory=write_of("k"))
        effects.end(tx, claim.run_id, claim.task_id, end, [], now=store.clock.now())
    assert store.rescue([(claim.fence.attempt_id, 1)], dead=[], why="died", actor="test") == ["ready"]
    assert hand.start(hand.take(), request) == RecordedEffect("succeeded", '{"done":true}', None)


def test_the_database_refuses_what_makes_no_sense(store: Store) -> None:
    good = write_of("k")
    for bad in (replace(good, key=""), replace(good, namespace=""), replace(good, embedding=b"short")):
        with pytest.raises(Exception, match="CHECK constraint"):
            store.memory_put(bad)
    assert scalar(store, "SELECT COUNT(*) FROM long_term_memory") == 0
