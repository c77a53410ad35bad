"""Strict reading of YAML and JSON: scalars, refusals with places, hostile files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.yaml_document import MAX_BYTES, parse_document, read_document
from hypothesis import given, settings
from hypothesis import strategies as st


def value_of(text: str) -> Any:
    return parse_document(text.encode(), "f.yaml").value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("12:30", "12:30"),
        ("2026-01-02", "2026-01-02"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1.2.3", "1.2.3"),
        ("12e10x", "12e10x"),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        (str(2**70), 2**70),
        ("1.0", 1.0),
        ("-0.0", -0.0),
        ("0.1", 0.1),
        ("'1.10'", "1.10"),
        ('"0123456"', "0123456"),
        ("!!str 12", "12"),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    found = value_of(f"a: {text}")["a"]
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("1.10", 'quote it if text is meant: "1.10"; write 1.1'),
        ("0123456", "write 123456"),
        ("12e10", 'quote it if text is meant: "12e10"'),
        ("0x1F", "write 31"),
        ("0o17", "write 15"),
        ("+1", "write 1"),
        ("-0", "write 0"),
        (".5", "write 0.5"),
        ("1e400", "quote it"),
        (".nan", "quote it"),
        ("-.inf", "quote it"),
        ("9" * 2000, "quote it"),
    ],
)
def test_numbers_that_would_lose_their_spelling_are_refused(text: str, hint: str) -> None:
    with pytest.raises(DocumentError) as caught:
        value_of(f"x: 1\na: {text}")
    (item,) = caught.value.diagnostics
    assert (item.code, item.line, item.column) == ("schema_violation", 2, 4)
    assert item.help is not None
    assert hint in item.help
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, 1, "the first is at 1:1"),
        ("a:\n  b: 1\n  c: 2\n  'b': 3", 4, 3, "the first is at 2:3"),
        ("x: &a {b: 1}\ny: {<<: *a, b: 2}", 2, 5, "merge keys"),
        ("a: 1\n---\nb: 2", 2, 1, "a second document"),
        ("1: x", 1, 1, "not text"),
        ("true: x", 1, 1, "not text"),
        ("? [a]\n: b", 1, 3, "not text"),
        ("? {a: 1}\n: b", 1, 3, "must be text"),
        ("a:\n\t- b", 2, 1, "cannot start any token"),
        ("a: !!binary aGk=", 1, 4, "!!binary"),
        ("a: !mine x", 1, 4, "!mine"),
        ("a: !!set {x}", 1, 4, "!!set"),
        ("a: &x [1, *x]", 1, 11, "inside its own anchor"),
        ("a: *gone", 1, 4, "no anchor"),
        ("a: 'open\nb: 1", 2, 5, "unexpected end of stream"),
        ("a: [1, 2", 2, 1, "did not find expected"),
        ('a: "\\ud800"', 1, 7, ""),
        ("a: \x01", 1, 4, "does not allow"),
        ("a: b\0c", 1, 5, "NUL"),
        ("", 1, 1, "no document"),
        ("# only a comment", 1, 1, "no document"),
        ("[" * 65 + "]" * 65, 1, 65, "deeper than 64"),
    ],
)
def test_refusals_name_the_place(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        value_of(text)
    item = caught.value.diagnostics[0]
    assert (item.code, item.line, item.column) == ("yaml_syntax", line, column)
    assert words in item.message
    assert f"f.yaml:{line}:{column}: yaml_syntax: " in str(caught.value)


def test_tabs_get_a_hint() -> None:
    with pytest.raises(DocumentError) as caught:
        value_of("a:\n\tb: 1")
    assert caught.value.remedy == "YAML is indented with spaces, never with tabs"


def test_several_findings_come_together() -> None:
    with pytest.raises(DocumentError) as caught:
        value_of("a: 1.10\nb: 012\nb: 1")
    assert [(item.line, item.column) for item in caught.value.diagnostics] == [(1, 4), (2, 4), (3, 1)]


def test_byte_order_mark_is_dropped_and_positions_hold() -> None:
    document = parse_document(b"\xef\xbb\xbfa: 1\n", "f.yaml")
    assert document.value == {"a": 1}
    assert document.locate(("a",), key=True) == (1, 1)


@pytest.mark.parametrize(
    "data", [b"a: \xff", "a: 1".encode("utf-16"), b"\x7fELF\x02\x01\x01\0\0", os.urandom(0) + b"\x80"]
)
def test_binary_files_are_refused(data: bytes) -> None:
    with pytest.raises(DocumentError):
        parse_document(data, "f.yaml")


def test_alias_bomb_is_refused_quickly() -> None:
    lines = ["a0: &a0 [" + ",".join("x" * 10) + "]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    with pytest.raises(DocumentError, match="expand to too much"):
        value_of("\n".join(lines))
    with pytest.raises(DocumentError, match="expand to too much"):
        value_of(f"a: &a {'x' * 500_000}\nb: [{','.join(['*a'] * 100)}]")


def test_depth_counts_what_aliases_bring() -> None:
    deep = "a: &a " + "[" * 40 + "]" * 40 + "\nb: " + "[" * 30 + "*a" + "]" * 30
    with pytest.raises(DocumentError, match="deeper than 64"):
        value_of(deep)


def test_aliases_share_a_value() -> None:
    assert value_of("a: &x {b: [1]}\nc: *x") == {"a": {"b": [1]}, "c": {"b": [1]}}


def test_positions_of_keys_and_values() -> None:
    document = parse_document(b"a:\n  - b: 1\n    c: {d: e}\n", "f.yaml")
    assert document.locate(()) == (1, 1)
    assert document.locate(("a", 0)) == (2, 5)
    assert document.locate(("a", 0, "c"), key=True) == (3, 5)
    assert document.locate(("a", 0, "c")) == (3, 8)
    assert document.locate(("a", 0, "c", "d")) == (3, 12)
    assert document.locate(("a", 0, "gone", "x")) == (2, 5)


# ------------------------------------------------------------------------------------------- files


def test_fifo_directory_device_and_missing_file_are_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    for path, words in [
        (fifo, "not a regular file"),
        (tmp_path, "is a directory"),
        (Path("/dev/null"), "not a regular file"),
        (tmp_path / "gone.yaml", "no such file"),
        (Path("a\0b"), "cannot be opened"),
    ]:
        with pytest.raises(DocumentError, match=words):
            read_document(path)


def test_size_is_checked_before_parsing(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"a: '" + b"x" * MAX_BYTES + b"'")
    with pytest.raises(DocumentError) as caught:
        read_document(path)
    assert caught.value.diagnostics[0].code == "schema_violation"
    path.write_bytes(b"#" * MAX_BYTES)
    with pytest.raises(DocumentError, match="no document"):
        read_document(path)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.write_text("a: 1")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(DocumentError, match="cannot be opened"):
        read_document(path)


def test_the_pure_parser_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: [1, no, {b: 'x'}]\nc: &q |\n  text\nd: *q\n"
    fast = value_of(text)
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert value_of(text) == fast
    with pytest.raises(DocumentError, match="lone surrogate"):
        value_of('a: "\\ud800"')
    with pytest.raises(DocumentError, match="does not allow"):
        value_of("a: \x01")


def test_a_full_document_is_read_in_time() -> None:
    line = "- {id: task, uses: action:a, needs: [one, two], with: {value: 12, text: some words}}\n"
    data = (line * (MAX_BYTES // len(line))).encode()
    start = time.thread_time()
    parse_document(data, "f.yaml")
    assert time.thread_time() - start < 10


# ------------------------------------------------------------------------------------------- JSON


def test_json_files_keep_json_numbers(tmp_path: Path) -> None:
    path = tmp_path / "flow.json"
    path.write_text('{"a": 1.10,\n "b": [1e5, "\\ud83d\\ude00", -1, null, true]}')
    document = read_document(path)
    assert document.value == {"a": 1.1, "b": [100000.0, "\U0001f600", -1, None, True]}
    assert document.locate(("b", 2)) == (2, 29)
    assert document.locate(("b",), key=True) == (2, 2)


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('{"a": NaN}', 1, 7),
        ('{"a": -Infinity}', 1, 7),
        ('{"a": 1,\n "a": 2}', 2, 2),
        ('{"a": 1,}', 1, 9),
        ('{"a": "\\ud800"}', 1, 7),
        ('{"a": 1e400}', 1, 7),
        ("[" * 65 + "]" * 65, 1, 65),
        ("", 1, 1),
    ],
)
def test_json_refusals(text: str, line: int, column: int) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_document(text.encode(), "f.json", as_json=True)
    item = caught.value.diagnostics[0]
    assert (item.line, item.column) in [(line, column), (line, column - 1)]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(_JSON)
def test_json_reading_equals_the_standard_parser(value: Any) -> None:
    text = json.dumps(value, indent=1)
    assert repr(parse_document(text.encode(), "f.json", as_json=True).value) == repr(json.loads(text))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text("abc", min_size=1), st.integers() | st.booleans() | st.none() | st.text(), max_size=5))
def test_what_yaml_writes_is_read_back_or_refused(value: dict[str, Any]) -> None:
    text = yaml.safe_dump(value, allow_unicode=False, default_style='"' if all(map(_is_text, value.values())) else None)
    try:
        found = value_of(text)
    except DocumentError:
        return
    for key, item in value.items():
        # The writer knows YAML 1.1, so it quotes more than needed: what comes back is equal.
        assert found[key] == item


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text("a:-[]{}&*!|>'\"%@`? \n\t#,1.", max_size=40).map(str.encode))
def test_no_input_makes_a_traceback(data: bytes) -> None:
    try:
        parse_document(data, "f.yaml")
    except DocumentError as error:
        assert error.diagnostics
