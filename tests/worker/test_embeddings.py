"""Embedding by a service, with a real server on the loopback interface: what is asked, and what an answer has to be."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agentctl.store.embedding import LocalHash
from agentctl.store.policy import Policy
from agentctl.worker.effects.secret_values import resolve_secret
from agentctl.worker.providers import Call, ProviderFault
from agentctl.worker.providers.embeddings import MAX_TEXTS, Embedding, ServiceEmbedder, most_tokens
from agentctl.worker.watch import Token
from support.model_server import LENGTH, ModelServer, Play, closed_port, vector_of

KINDS = ("openai", "azure_openai", "openai_compatible", "google")
KEY = "sk-test-0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", KEY)


def embedder(kind: str, url: str, *, model: str | None = "m", dimensions: int = LENGTH, **more: Any) -> ServiceEmbedder:
    policy = Policy.from_json(
        {
            "networkAllowlist": ["127.0.0.1"],
            "environmentAllowlist": ["MODEL_KEY"],
            "network": {"allowPrivate": True},
        }
    )
    definition: dict[str, Any] = {"kind": kind, "credential": {"env": "MODEL_KEY"}, **more}
    if url:
        definition["endpoint"] = url

    def resolve(reference: Mapping[str, Any]) -> str:
        return resolve_secret(reference, policy, "/").value.decode()

    embedding = Embedding("p", definition, model, dimensions)
    return ServiceEmbedder(embedding, policy, "/", resolve, Call(Token(), 30.0, "e" * 64, time.monotonic))


def unit(text: str) -> tuple[float, ...]:
    vector = vector_of(text)
    length = math.hypot(*vector)
    return tuple(value / length for value in vector)


def near(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> bool:
    return [pytest.approx(vector) for vector in wanted] == [list(vector) for vector in found]


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_gets_its_vector_of_length_one(kind: str, server: ModelServer) -> None:
    made = embedder(kind, server.url)
    texts = ["a cab", "feed", "xyz"]
    vectors = made.embed(texts)
    assert near(vectors, [unit("a cab"), unit("feed"), (0.0,) * LENGTH])
    assert (made.provider, made.dimensions, made.requests, server.count) == ("p:m", LENGTH, 1, 1)
    told = 5 if kind != "google" else most_tokens(texts)
    assert made.usage.input_tokens == told


@pytest.mark.parametrize(
    ("kind", "endpoint", "path", "header"),
    [
        ("openai", "", "/v1/embeddings", ("authorization", f"Bearer {KEY}")),
        ("openai", "/v1/responses", "/v1/embeddings", ("authorization", f"Bearer {KEY}")),
        ("azure_openai", "/openai/v1", "/openai/v1/embeddings?api-version=v1", ("api-key", KEY)),
        ("openai_compatible", "/v1/chat/completions", "/v1/embeddings", ("authorization", f"Bearer {KEY}")),
        ("openai_compatible", "/proxy/v1", "/proxy/v1/embeddings", ("authorization", f"Bearer {KEY}")),
        ("google", "", "/v1beta/models/m:batchEmbedContents", ("x-goog-api-key", KEY)),
    ],
)
def test_what_is_asked(kind: str, endpoint: str, path: str, header: tuple[str, str], server: ModelServer) -> None:
    embedder(kind, server.url + endpoint).embed(["a", "b"])
    (seen,) = server.seen
    assert (seen.path, seen.headers[header[0]]) == (path, header[1])
    if kind == "google":
        asked = [
            {"model": "models/m", "outputDimensionality": LENGTH, "content": {"parts": [{"text": t}]}} for t in "ab"
        ]
        assert seen.body == {"requests": asked}
    else:
        sized = {} if kind == "openai_compatible" else {"dimensions": LENGTH}
        assert seen.body == {"model": "m", "encoding_format": "float", "input": ["a", "b"], **sized}


def test_many_texts_are_several_requests(server: ModelServer) -> None:
    made = embedder("openai", server.url)
    texts = ["a" * (1 + n % 7) + "b" * (n % 3) for n in range(2 * MAX_TEXTS + 1)]
    assert near(made.embed(texts), [unit(text) for text in texts])
    assert [len(seen.body["input"]) for seen in server.seen] == [MAX_TEXTS, MAX_TEXTS, 1]
    assert (made.requests, made.usage.input_tokens) == (3, 15)


def test_an_answer_without_usage_counts_a_token_for_each_byte(server: ModelServer) -> None:
    server.plays(Play(no_usage=True))
    made = embedder("openai_compatible", server.url)
    made.embed(["häuser"])
    assert made.usage.input_tokens == most_tokens(["häuser"]) == 7 + 256


def data(*vectors: Any) -> list[dict[str, Any]]:
    return [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]


WHOLE = [1.0] * LENGTH


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"data": data([1.0] * 7)}, f"a vector has 7 numbers where embedding.dimensions is {LENGTH}"),
        ({"data": data()}, "it has 0 vectors for 1 texts"),
        ({"data": data(WHOLE, WHOLE)}, "it has 2 vectors for 1 texts"),
        ({"data": [{"index": 1, "embedding": WHOLE}]}, "not numbered from 0"),
        ({"data": [{"index": True, "embedding": WHOLE}]}, "not numbered from 0"),
        ({"data": data(["1"] * LENGTH)}, "something else than numbers"),
        ({"data": data([True] * LENGTH)}, "something else than numbers"),
        ({"data": data("AAAA")}, "a vector is no list"),
        ({"data": data([1e308] * LENGTH)}, "too large"),
        ({"data": data([10**400] * LENGTH)}, "too large"),
        ({"data": data(WHOLE), "usage": {"prompt_tokens": -1}}, "usage.prompt_tokens is no count"),
        ({"data": 3}, "data is no list"),
        ([], "the answer is no object"),
    ],
)
def test_an_answer_that_is_none(answer: Any, complaint: str, server: ModelServer) -> None:
    server.plays(Play(body=json.dumps(answer).encode()))
    with pytest.raises(ProviderFault) as caught:
        embedder("openai", server.url).embed(["a"])
    assert complaint in caught.value.message
    assert (caught.value.code, caught.value.sent) == ("provider_malformed", "unknown")


def test_a_number_that_is_none_is_no_answer(server: ModelServer) -> None:
    server.plays(Play(body=b'{"data": [{"index": 0, "embedding": [NaN, 1, 1, 1, 1, 1, 1, 1]}]}'))
    with pytest.raises(ProviderFault) as caught:
        embedder("openai", server.url).embed(["a"])
    assert caught.value.code == "provider_malformed"


def test_a_refusal_and_nobody_there(server: ModelServer) -> None:
    server.plays(Play(status=401, echo="authorization"))
    with pytest.raises(ProviderFault) as caught:
        embedder("openai", server.url).embed(["a"])
    assert (caught.value.sent, caught.value.status, KEY in caught.value.message) == ("refused", 401, False)
    with pytest.raises(ProviderFault) as caught:
        embedder("openai", f"http://127.0.0.1:{closed_port()}").embed(["a"])
    assert (caught.value.sent, caught.value.retryable) == ("no", True)


def test_the_fake_provider_embeds_without_anybody() -> None:
    made = embedder("fake", "", model=None)
    assert made.embed(["Alpha alpha beta"]) == LocalHash(LENGTH).embed(["Alpha alpha beta"])
    assert (made.provider, made.usage.input_tokens) == ("p", 1)


def test_a_service_needs_a_model(server: ModelServer) -> None:
    with pytest.raises(ProviderFault) as caught:
        embedder("openai", server.url, model=None)
    assert (caught.value.sent, server.count) == ("no", 0)
