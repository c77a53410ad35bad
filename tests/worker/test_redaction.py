"""Secrets are taken out in every form in which they come."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import pytest
from agentctl.worker import redaction
from agentctl.worker.redaction import LogFilter, Redactor, forms, holds_secret
from hypothesis import given
from hypothesis import strategies as st

SECRET = 's3cr"et\\käy/+ 0'
VALUE = SECRET.encode()


@pytest.mark.parametrize(
    "form",
    [
        SECRET,
        json.dumps(SECRET)[1:-1],
        json.dumps(SECRET, ensure_ascii=False)[1:-1],
        quote(SECRET, safe=""),
        base64.b64encode(VALUE).decode(),
        base64.b64encode(VALUE).decode().rstrip("="),
        base64.urlsafe_b64encode(VALUE).decode(),
    ],
    ids=["exact", "json-ascii", "json", "url", "base64", "base64-unpadded", "base64-url"],
)
def test_every_form_is_found(form: str) -> None:
    redactor = Redactor([VALUE])
    assert redactor.text(f"<{form}>") == "<[REDACTED]>"
    assert redactor.bytes(f"<{form}>".encode()) == b"<[REDACTED]>"
    assert redactor.json({"a": [f"x{form}", 1, None], form: True}) == {
        "a": ["x[REDACTED]", 1, None],
        "[REDACTED]": True,
    }


def test_a_number_can_be_a_secret() -> None:
    assert Redactor([b"4711"]).json({"pin": 4711, "other": 47110}) == {"pin": "[REDACTED]", "other": 47110}


def test_the_longer_secret_goes_first() -> None:
    assert Redactor([b"abc", b"abcdef"]).text("abcdef abc") == "[REDACTED] [REDACTED]"


def test_a_short_secret_is_not_looked_for_in_base64() -> None:
    redactor = Redactor([b"yes"])
    assert redactor.text("eWVz yes") == "eWVz [REDACTED]"


def test_a_secret_that_is_no_text_is_found_in_text() -> None:
    value = b"\xff\xfe12345678"
    redactor = Redactor([value])
    assert redactor.bytes(b"<" + value + b">") == b"<[REDACTED]>"
    assert redactor.text("<" + value.decode("utf-8", errors="replace") + ">") == "<[REDACTED]>"


def pieces_of(text: str, cuts: tuple[int, ...]) -> list[str]:
    places = [0, *cuts, len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def told_of(redactor: Redactor, pieces: Iterable[str]) -> tuple[str, list[str]]:
    """(all that is told of a text in pieces, what is held back after each piece)."""
    told, held, kept = "", "", []
    for piece in pieces:
        some, held = redactor.split(held + piece)
        told += some
        kept.append(held)
    return told + redactor.text(held), kept


@pytest.mark.parametrize("form", sorted(forms(VALUE)))
def test_a_secret_that_comes_in_pieces(form: bytes) -> None:
    redactor = Redactor([VALUE])
    text = form.decode()
    for cut in range(1, len(text)):
        told, held = told_of(redactor, ["so ", text[:cut], text[cut:], " it is"])
        assert told == "so [REDACTED] it is"
        assert held[1] == text[:cut], "the beginning is not told before the rest is there"
    assert told_of(redactor, f"so {text} it is")[0] == "so [REDACTED] it is", "one character at a time"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.text("abc", max_size=16),
    st.sets(st.integers(1, 15), max_size=6),
)
def test_no_cut_lets_a_secret_through(values: list[str], text: str, cuts: set[int]) -> None:
    """Secrets within and across one another; what is told holds none, and nothing else is lost."""
    redactor = Redactor(value.encode() for value in values)
    told, held = told_of(redactor, pieces_of(text, tuple(sorted(cut for cut in cuts if cut < len(text)))))
    assert not any(value in piece for value in values for piece in told.split("[REDACTED]"))
    assert all(len(kept) < max(map(len, values)) for kept in held)
    rest = text
    for number, piece in enumerate(told.split("[REDACTED]")):
        assert rest.startswith(piece) if number == 0 else piece in rest, "what is told is what was said"
        rest = rest[rest.index(piece) + len(piece) :]
    if not any(value in text for value in values):
        assert told == text


def test_nothing_known_changes_nothing() -> None:
    value = {"a": [1, "x"]}
    assert Redactor().json(value) is value
    assert Redactor([b""]).text("x") == "x"


@pytest.mark.parametrize(
    "before", [0, 1, redaction.PIECE_BYTES - 5, redaction.PIECE_BYTES, 3 * redaction.PIECE_BYTES - 1]
)
def test_a_secret_in_a_file_is_found_wherever_it_lies(
    before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redaction.known, "redactor", Redactor([VALUE]))
    path = tmp_path / "file"
    for content, expected in ((VALUE, True), (VALUE[:-1], False)):
        path.write_bytes(b"." * before + content)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            assert holds_secret(descriptor, path.stat().st_size, lambda: False) is expected
        finally:
            os.close(descriptor)


def test_a_log_record_is_cleaned_with_its_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction.known, "redactor", Redactor([VALUE]))
    record = logging.LogRecord("n", logging.ERROR, "p", 1, "the key %s", (SECRET,), None)
    try:
        raise ValueError(SECRET)
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert LogFilter().filter(record)
    text = logging.Formatter().format(record)
    assert SECRET not in text
    assert text.count("[REDACTED]") >= 2
