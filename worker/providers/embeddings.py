"""Embeddings by a service: texts of long-term memory become vectors (contract 1.9 and 7).

A service is asked for what the document declares, and its answer is held to it: one vector for each text, of the
declared length, of finite numbers. Vectors are brought to length 1, as those of `local_hash` are. Which service and
which model has made a vector is stored with it, so vectors of two models are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from agentctl.store.embedding import LocalHash
from agentctl.store.policy import Policy

from . import Call, ProviderFault, Usage
from .exchange import Exchange, Malformed, a_list, an_object, charged, units
from .google import goog_api_key
from .openai import api_key, bearer
from .registry import ResolveSecret

MAX_TEXTS: Final = 64
"""Most texts of one request. Services allow 100 and more."""

MOST_EXTRA_TOKENS: Final = 256
"""What a request may count beyond a token for each byte of its texts, as for other requests (contract 6)."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """`memory.longTerm.embedding` of a document together with the entry of `spec.providers` that it names."""

    name: str
    definition: Mapping[str, Any]
    model: str | None
    dimensions: int

    @property
    def provider(self) -> str:
        """What is stored with each vector: only those of the same provider and model can be compared."""
        return self.name if self.model is None else f"{self.name}:{self.model}"


def embedding_of(long_term: Mapping[str, Any] | None, definition: Mapping[str, Any] | None) -> Embedding | None:
    """The embedding by a service that `spec.memory.longTerm` declares, None for the one that is built in.

    `definition` is that of the provider which it names.
    """
    declared = (long_term or {}).get("embedding")
    if definition is None or declared is None:
        return None
    return Embedding(declared["provider"], definition, declared.get("model"), declared["dimensions"])


class ServiceEmbedder:
    """Embeds by a service; one instance serves one call of an effect or of a verb, and knows what it has used.

    Raises `ProviderFault` with `sent="no"` when it is made and a credential or the library is missing.
    """

    def __init__(
        self, embedding: Embedding, policy: Policy, workspace: str, resolve_secret: ResolveSecret, call: Call
    ) -> None:
        self.provider = embedding.provider
        self.dimensions = embedding.dimensions
        self.usage = Usage()
        self.requests = 0
        self._ask = _asker(embedding, policy, workspace, resolve_secret, call)

    def embed(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """One vector for each text, of length 1 or all zeros. Raises `ProviderFault`."""
        found: list[tuple[float, ...]] = []
        for start in range(0, len(texts), MAX_TEXTS):
            part = texts[start : start + MAX_TEXTS]
            self.requests += 1
            vectors, used = self._ask(part)
            tokens = most_tokens(part) if used is None else used
            self.usage = Usage(input_tokens=self.usage.input_tokens + tokens)
            found += vectors
        return found


def most_tokens(texts: Sequence[str]) -> int:
    """Never less than what a request with these texts takes: a token has at least one byte."""
    return sum(len(text.encode("utf-8")) for text in texts) + MOST_EXTRA_TOKENS


_Answer = tuple[list[tuple[float, ...]], int | None]
_Asker = Callable[[Sequence[str]], _Answer]


def _asker(embedding: Embedding, policy: Policy, workspace: str, resolve_secret: ResolveSecret, call: Call) -> _Asker:
    kind = embedding.definition["kind"]
    if kind == "fake":
        local = LocalHash(embedding.dimensions)
        return lambda texts: (local.embed(texts), len(texts))
    if embedding.model is None:
        raise ProviderFault("provider_request", f"an embedding of a {kind} provider needs a model", sent="no")
    authorizations = {"azure_openai": api_key, "google": goog_api_key}
    exchange = Exchange(kind, embedding.definition, policy, resolve_secret, authorizations.get(kind, bearer))
    url, body_of, read = _DIALECTS[kind](embedding, exchange.url)

    def ask(texts: Sequence[str]) -> _Answer:
        with exchange.understood():
            answer = an_object(exchange.post(url, {}, body_of(texts), call), "the answer")
            vectors, used = read(answer)
            with charged(None if used is None else Usage(input_tokens=used)):
                if len(vectors) != len(texts):
                    raise Malformed(f"it has {len(vectors)} vectors for {len(texts)} texts")
                return [_unit(vector, embedding.dimensions) for vector in vectors], used

    return ask


_Body = Callable[[Sequence[str]], dict[str, Any]]
_Read = Callable[[dict[str, Any]], tuple[list[Any], int | None]]
_Dialect = tuple[str, _Body, _Read]
"""The URL; the body of a request for some texts; the vectors, and the tokens if they are told, of an answer."""


def _openai(embedding: Embedding, url: str, *, sized: bool = True, version: str | None = None) -> _Dialect:
    """`/embeddings`, as OpenAI has it. A server of one's own is not asked for a length, which not all of them know."""
    parts = urlsplit(url)
    base = next(parts.path.removesuffix(end) for end in ("/responses", "/chat/completions") if parts.path.endswith(end))
    query = parts.query if version is None else "&".join(filter(None, (parts.query, f"api-version={quote(version)}")))
    given: dict[str, Any] = {"model": embedding.model, "encoding_format": "float"}
    if sized:
        given["dimensions"] = embedding.dimensions

    def read(answer: dict[str, Any]) -> tuple[list[Any], int | None]:
        items = [an_object(item, "an item of the data") for item in a_list(answer.get("data"), "data")]
        places = [item.get("index", place) for place, item in enumerate(items)]
        if sorted(map(repr, places)) != sorted(map(repr, range(len(items)))):
            raise Malformed("the vectors are not numbered from 0")
        ordered = sorted(zip(places, items, strict=True), key=lambda pair: pair[0])
        usage = answer.get("usage")
        used = None if usage is None else units(an_object(usage, "usage"), "prompt_tokens")
        return [item.get("embedding") for _, item in ordered], used

    place = urlunsplit((parts.scheme, parts.netloc, f"{base}/embeddings", query, ""))
    return place, lambda texts: {**given, "input": list(texts)}, read


def _google(embedding: Embedding, url: str) -> _Dialect:
    """`batchEmbedContents`. The service does not tell what was used."""
    parts = urlsplit(url)
    name = str(embedding.model).removeprefix("models/")

    def body_of(texts: Sequence[str]) -> dict[str, Any]:
        common = {"model": f"models/{name}", "outputDimensionality": embedding.dimensions}
        return {"requests": [{**common, "content": {"parts": [{"text": text}]}} for text in texts]}

    def read(answer: dict[str, Any]) -> tuple[list[Any], int | None]:
        items = a_list(answer.get("embeddings"), "embeddings")
        return [an_object(item, "an embedding").get("values") for item in items], None

    path = f"{parts.path}/{quote(name, safe='')}:batchEmbedContents"
    return urlunsplit(parts._replace(path=path)), body_of, read


_DIALECTS: Final[Mapping[str, Callable[[Embedding, str], _Dialect]]] = {
    "openai": _openai,
    "azure_openai": lambda embedding, url: _openai(
        embedding, url, version=str(embedding.definition.get("apiVersion") or "v1")
    ),
    "openai_compatible": lambda embedding, url: _openai(embedding, url, sized=False),
    "google": _google,
}


def _unit(vector: Any, dimensions: int) -> tuple[float, ...]:
    """A vector of length 1 (or all zeros) from what a service has sent. Raises `Malformed`."""
    values = a_list(vector, "a vector")
    if any(type(value) not in (int, float) for value in values):
        raise Malformed("a vector holds something else than numbers")
    if len(values) != dimensions:
        raise Malformed(f"a vector has {len(values)} numbers where embedding.dimensions is {dimensions}")
    try:
        length = math.hypot(*values)
        if not math.isfinite(length):
            raise OverflowError
        return tuple(value / length for value in values) if length else (0.0,) * dimensions
    except OverflowError:
        raise Malformed("a vector holds a number that is too large") from None
