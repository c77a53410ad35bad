"""Long-term memory: entries by namespace and key that outlive the runs (contract 7). Every function takes the open
transaction and the time.

An entry is visible until its `expires_at`; then it is as good as absent for everybody but `prune`. The write of a task
is carried out by `effects.end`, in the transaction that confirms its effect: there is no moment at which one of the two
is there without the other, and a fence that no longer holds undoes both.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote
from typing import Any

from .canonical import canonical, loads
from .database import Connection, all_rows
from .embedding import LOCAL_HASH, Embedder, terms_of, text_score, tokens, vector_score
from .errors import IncompatibleVersion, TaskFault
from .memory_entries import ENTRY_FORMAT, MAX_CANDIDATES, Search, searchable_text
from .records import MemoryWrite

_RECORD = (
    "namespace, memory_key, format_version, value_json, embedding_provider, embedding_dimensions, created_at, "
    "updated_at, expires_at"
)
_VISIBLE = "(expires_at IS NULL OR expires_at > ?)"


def packed(vector: Sequence[float]) -> bytes:
    """A vector as it is stored: little-endian doubles."""
    numbers = array("d", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _unpacked(embedding: bytes) -> array[float]:
    numbers = array("d", embedding)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def new_write(
    namespace: str, key: str, entry: Mapping[str, Any], embedder: Embedder, expires_at: int | None
) -> MemoryWrite:
    """A checked entry, ready to be put: made searchable outside of any transaction. Raises what `embed` raises."""
    text = searchable_text(entry)
    (vector,) = embedder.embed([text])
    return MemoryWrite(
        namespace,
        key,
        canonical(entry),
        terms_of(text),
        embedder.provider,
        embedder.dimensions,
        packed(vector),
        expires_at,
    )


def put(tx: Connection, write: MemoryWrite, *, now: int) -> None:
    """Write an entry, over an earlier one of that key if there is one; the last writer wins.

    The time of creation is that of the first entry since the key was last absent. Raises `IncompatibleVersion`, with
    nothing changed, when a newer agentctl has written the entry that would be lost.
    """
    tx.execute(
        "INSERT INTO long_term_memory VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT (namespace, memory_key) DO UPDATE SET "
        "format_version = excluded.format_version, value_json = excluded.value_json, terms = excluded.terms, "
        "embedding_provider = excluded.embedding_provider, embedding_dimensions = excluded.embedding_dimensions, "
        "embedding = excluded.embedding, expires_at = excluded.expires_at, "
        "created_at = CASE WHEN expires_at <= excluded.updated_at THEN excluded.created_at ELSE created_at END, "
        "updated_at = excluded.updated_at WHERE format_version <= excluded.format_version",
        (
            write.namespace,
            write.key,
            ENTRY_FORMAT,
            write.entry_json,
            write.terms,
            write.embedding_provider,
            write.embedding_dimensions,
            write.embedding,
            write.expires_at,
            now,
            now,
        ),
    )
    if tx.changes() != 1:
        raise _newer(write.namespace, write.key)


def get(tx: Connection, namespace: str, key: str, *, now: int) -> dict[str, Any] | None:
    """The record of a visible entry, or None. Raises `IncompatibleVersion` for an entry of a newer agentctl."""
    row = tx.execute(
        f"SELECT {_RECORD} FROM long_term_memory WHERE namespace = ? AND memory_key = ? AND {_VISIBLE}",  # noqa: S608
        (namespace, key, now),
    ).fetchone()
    return None if row is None else _record(row)


def refuse_newer(tx: Connection, namespace: str, key: str) -> None:
    """Raise `IncompatibleVersion` if a newer agentctl has written this entry, be its time over or not."""
    row = tx.execute(
        "SELECT 1 FROM long_term_memory WHERE namespace = ? AND memory_key = ? AND format_version > ?",
        (namespace, key, ENTRY_FORMAT),
    ).fetchone()
    if row is not None:
        raise _newer(namespace, key)


def _record(row: tuple[Any, ...]) -> dict[str, Any]:
    namespace, key, version, value_json, provider, dimensions, created_at, updated_at, expires_at = row
    if version > ENTRY_FORMAT:
        raise _newer(namespace, key)
    return {
        "namespace": namespace,
        "key": key,
        "entry": loads(value_json),
        "embeddingProvider": provider,
        "embeddingDimensions": dimensions,
        "createdAt": created_at,
        "updatedAt": updated_at,
        "expiresAt": expires_at,
    }


def _newer(namespace: str, key: str) -> IncompatibleVersion:
    return IncompatibleVersion(
        f"the entry {key!r} of {namespace!r} was written by a newer agentctl", remedy="upgrade agentctl"
    )


# -- search --------------------------------------------------------------------------------------------------------


def search(
    tx: Connection, question: Search, embedder: Embedder, vector: Sequence[float] | None, *, now: int
) -> list[dict[str, Any]]:
    """The best visible entries: highest score first, then by key; what scores nothing is left out.

    `vector` is the embedding of the query, None for a text search. Raises `TaskFault`: `too_many_candidates`, and
    `reindex_required` when a stored vector cannot be compared with `vector`; and `IncompatibleVersion`.
    """
    _refuse_too_many(tx, question.namespace, now)
    if vector is not None:
        _refuse_other_vectors(tx, question.namespace, embedder, now)
    best = heapq.nsmallest(question.limit, _scored(tx, question, vector, now))
    results = []
    for rank, key, text, similarity in best:
        record = get(tx, question.namespace, key, now=now)
        assert record is not None  # the same snapshot
        scores = {"scoreMillionths": -rank, "textScoreMillionths": text, "vectorScoreMillionths": similarity}
        results.append({"record": record, **scores})
    return results


def _refuse_too_many(tx: Connection, namespace: str, now: int) -> None:
    row = tx.execute(
        f"SELECT COUNT(*) FROM long_term_memory WHERE namespace = ? AND {_VISIBLE}",  # noqa: S608
        (namespace, now),
    ).fetchone()
    if row is not None and row[0] > MAX_CANDIDATES:
        raise TaskFault(
            "too_many_candidates",
            f"the namespace {namespace!r} has {row[0]} entries; a search looks at {MAX_CANDIDATES} at most",
            details={"remedy": "spread the entries over several namespaces, or let them expire"},
        )


def _refuse_other_vectors(tx: Connection, namespace: str, embedder: Embedder, now: int) -> None:
    row = tx.execute(
        f"SELECT memory_key, embedding_provider, embedding_dimensions FROM long_term_memory "  # noqa: S608
        f"WHERE namespace = ? AND {_VISIBLE} AND (embedding_provider <> ? OR embedding_dimensions <> ?) LIMIT 1",
        (namespace, now, embedder.provider, embedder.dimensions),
    ).fetchone()
    if row is not None:
        how = f"--dimensions {embedder.dimensions}" if embedder.provider == LOCAL_HASH else "--workflow FILE"
        raise TaskFault(
            "reindex_required",
            f"the entry {row[0]!r} of {namespace!r} was embedded by {row[1]} with {row[2]} dimensions and cannot be "
            f"compared with {embedder.provider} and {embedder.dimensions}",
            details={
                "remedy": f"`agentctl memory reindex --namespace {quote(namespace)} {how}`"
                ", or set memory.longTerm.embedding to what the entries have"
            },
        )


def _scored(
    tx: Connection, question: Search, vector: Sequence[float] | None, now: int
) -> Iterator[tuple[int, str, int, int]]:
    """(negative score, key, text score, vector score) of every entry that counts; one row at a time is in memory."""
    words = frozenset(tokens(question.query))
    weights = [(index, value) for index, value in enumerate(vector or ()) if value]
    wanted = {name: canonical(value) for name, value in question.filters.items()}
    rows = tx.execute(
        "SELECT memory_key, terms, CASE WHEN ? THEN embedding END, CASE WHEN ? THEN value_json END "  # noqa: S608
        f"FROM long_term_memory WHERE namespace = ? AND {_VISIBLE}",
        (vector is not None, bool(wanted), question.namespace, now),
    )
    for key, terms, embedding, value_json in rows:
        text = 0 if question.mode == "vector" else text_score(words, terms)
        similarity = 0
        if vector is not None:
            similarity = vector_score(weights, _unpacked(embedding))
        score = (text + similarity) // 2 if question.mode == "hybrid" else max(text, similarity)
        if score and (not wanted or _fits(value_json, wanted)):
            yield -score, key, text, similarity


def _fits(value_json: str, wanted: Mapping[str, str]) -> bool:
    metadata = loads(value_json).get("metadata", {})
    return all(name in metadata and canonical(metadata[name]) == text for name, text in wanted.items())


# -- care ----------------------------------------------------------------------------------------------------------


def embeddings_of(tx: Connection, namespace: str, *, now: int) -> list[tuple[str, int]]:
    """(provider, dimensions) of the visible entries of a namespace, each pair once."""
    return all_rows(
        tx.execute(
            "SELECT DISTINCT embedding_provider, embedding_dimensions FROM long_term_memory "  # noqa: S608
            f"WHERE namespace = ? AND {_VISIBLE} ORDER BY 1, 2",
            (namespace, now),
        )
    )


def texts_after(
    tx: Connection, namespace: str | None, after: tuple[str, str], *, limit: int
) -> list[tuple[str, str, str]]:
    """(namespace, key, entry as JSON) of the next entries of one namespace or of all, expired ones included."""
    rows = all_rows(
        tx.execute(
            "SELECT namespace, memory_key, value_json, format_version FROM long_term_memory "
            "WHERE (namespace, memory_key) > (?, ?) AND namespace = COALESCE(?, namespace) "
            "ORDER BY namespace, memory_key LIMIT ?",
            (*after, namespace, limit),
        )
    )
    for row in rows:
        if row[3] > ENTRY_FORMAT:
            raise _newer(row[0], row[1])
    return [row[:3] for row in rows]


def set_embeddings(
    tx: Connection, items: Sequence[tuple[tuple[str, str, str], str, bytes]], embedder: Embedder
) -> list[tuple[str, str]]:
    """Store terms and vectors of entries that still are what they were made from; keys of those that are not."""
    changed = []
    for (namespace, key, value_json), terms, embedding in items:
        tx.execute(
            "UPDATE long_term_memory SET terms = ?, embedding_provider = ?, embedding_dimensions = ?, embedding = ? "
            "WHERE namespace = ? AND memory_key = ? AND value_json = ?",
            (terms, embedder.provider, embedder.dimensions, embedding, namespace, key, value_json),
        )
        if tx.changes() != 1:
            changed.append((namespace, key))
    return changed


def text_of(tx: Connection, namespace: str, key: str) -> tuple[str, str, str] | None:
    """The same as an item of `texts_after` for one key, or None when it is gone."""
    row = tx.execute(
        "SELECT namespace, memory_key, value_json FROM long_term_memory WHERE namespace = ? AND memory_key = ?",
        (namespace, key),
    ).fetchone()
    return None if row is None else (row[0], row[1], row[2])


def expired(tx: Connection, *, before: int) -> int:
    """How many entries had no time left at `before`, without those of a newer agentctl, which alone removes them."""
    row = tx.execute(
        "SELECT COUNT(*) FROM long_term_memory WHERE expires_at <= ? AND format_version <= ?", (before, ENTRY_FORMAT)
    ).fetchone()
    return int(row[0]) if row else 0


def collect(tx: Connection, *, before: int, limit: int) -> int:
    """Delete some entries whose time was over at `before`; how many."""
    tx.execute(
        "DELETE FROM long_term_memory WHERE rowid IN "
        "(SELECT rowid FROM long_term_memory WHERE expires_at <= ? AND format_version <= ? LIMIT ?)",
        (before, ENTRY_FORMAT, limit),
    )
    return tx.changes()
