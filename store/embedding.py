"""Making text findable: tokens, embeddings, and the scores of a search (contract 7). Pure.

`local_hash` is the embedding that is always there: it needs no model and gives the same vector on every machine. Other
embeddings come from providers; `Embedder` is what they have to offer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol

from .errors import TaskFault

LOCAL_HASH = "local_hash"
DEFAULT_DIMENSIONS = 64
MIN_DIMENSIONS, MAX_DIMENSIONS = 8, 4096
FULL_SCORE = 1_000_000
"""Scores are whole millionths: equal on every machine, and sortable without surprises."""

_WORD = re.compile(r"[^\W_]+")


def tokens(text: str) -> list[str]:
    """The words of a text: everything between characters that are neither letters nor digits, in lower case."""
    return [word.lower() for word in _WORD.findall(text)]


def terms_of(text: str) -> str:
    """The distinct tokens of a text as ` one two `, so that a substring search with blanks finds whole tokens."""
    return f" {' '.join(sorted(set(tokens(text))))} "


class Embedder(Protocol):
    """Turns texts into vectors. Vectors can only be compared when provider and dimensions are the same.

    A provider's embedder does its I/O in `embed`, so nobody calls it inside of a transaction.
    """

    @property
    def provider(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """One vector for each text, of length 1 or all zeros. Raises what its provider raises."""
        ...


class LocalHash:
    """The embedded default: every token moves one coordinate up or down, as its SHA-256 says."""

    provider = LOCAL_HASH

    def __init__(self, dimensions: int = DEFAULT_DIMENSIONS) -> None:
        if not MIN_DIMENSIONS <= dimensions <= MAX_DIMENSIONS:
            raise TaskFault("invalid_input", f"dimensions must be {MIN_DIMENSIONS} to {MAX_DIMENSIONS}")
        self.dimensions = dimensions

    def embed(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> tuple[float, ...]:
        sums = [0] * self.dimensions
        for token, count in Counter(tokens(text)).items():
            digest = sha256(token.encode("utf-8")).digest()
            sums[int.from_bytes(digest[:2], "big") % self.dimensions] += count if digest[2] % 2 == 0 else -count
        # Whole numbers up to here: their order cannot change the result.
        length = math.sqrt(sum(value * value for value in sums))
        return tuple(value / length for value in sums) if length else (0.0,) * self.dimensions


def embedder(provider: str = LOCAL_HASH, dimensions: int = DEFAULT_DIMENSIONS) -> Embedder:
    """The embedder that is built in. Raises `TaskFault`: `unsupported_capability` for all but `local_hash`."""
    if provider != LOCAL_HASH:
        raise TaskFault(
            "unsupported_capability",
            f"embeddings of {provider!r} are not built in; {LOCAL_HASH} is",
        )
    return LocalHash(dimensions)


def text_score(query: frozenset[str], terms: str) -> int:
    """The share of the query's tokens that an entry has, in millionths. `terms` is from `terms_of`."""
    if not query:
        return 0
    return FULL_SCORE * sum(f" {token} " in terms for token in query) // len(query)


def vector_score(query: Sequence[tuple[int, float]], vector: Sequence[float]) -> int:
    """The cosine of two vectors of length 1, in millionths; what points away counts as 0.

    `query` holds the coordinates that are not zero. The exact sum makes the order of the terms, and the version of
    Python, irrelevant.
    """
    cosine = math.fsum(weight * vector[index] for index, weight in query)
    return max(0, min(FULL_SCORE, round(cosine * FULL_SCORE)))
