"""Values that the contract gives in digits: identities and digests must never change (contract 5.1 and 7)."""

from __future__ import annotations

from typing import Any

import pytest
from agentctl.store.canonical import (
    approval_id,
    canonical,
    effect_id,
    hex_digest,
    input_digest,
    least_length,
    nests_deeper,
    text_digest,
    value_digest,
)


def test_an_effect_its_input_and_its_approval() -> None:
    content = hex_digest("hello")
    assert content == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    digest = input_digest({"path": "artifacts/a.txt", "contentDigest": content})
    assert digest == "a7854b1d9b8470f3ddf3e3c13574f9e89c93890af858b527ffe1c5ae3efea3c3"
    effect = effect_id("run-1", "write", 1, 1, "builtin.write", digest)
    assert effect == "e71541c8f28635fd4a4cbd63ea4af0956dd14521203d2a42b6b4d7cf49f3b52b"
    assert approval_id(effect) == "approval-e71541c8f28635fd"


def test_an_empty_state_delta() -> None:
    delta = {"formatVersion": 1, "set": {}, "remove": []}
    digest = "sha256:v1:6bb66b760a4352963c62c5094a0de9e1f755bee6fadb53c571914cf9154e26f0"
    assert value_digest(delta) == text_digest(canonical(delta)) == digest


@pytest.mark.parametrize(
    ("value", "depth"),
    [
        ("{[", 0),
        ([], 1),
        ({"a": [1, {"b": {}}], "c": [[]]}, 4),
        ([["}"], {"{": "[\\"}, '"{"', "\\", '\\"{{{{{{', ["]]"], {}], 2),
        ([{"a": [{}]}, [[[1]]], {"b": {"c": {"d": [[]]}}}], 6),
    ],
)
def test_how_deep_a_text_nests(value: Any, depth: int) -> None:
    text = canonical([value, [[]] * 50])
    assert nests_deeper(text, max(depth, 2))
    assert not nests_deeper(text, max(depth, 2) + 1)


def test_the_length_of_a_text_without_making_it() -> None:
    for value in ({}, [], "", "é", {"a": [1, None], "b": {}}, [[], {"x": "y"}, ["z"] * 3]):
        assert least_length(value) <= len(canonical(value)) <= least_length(value) + 6
    shared: list[Any] = ["x"]
    for _ in range(200):
        shared = [shared, shared]
    assert least_length(shared) > 10**60
