"""Canonical JSON, digests and effect identity. Pure: no I/O.

One rule for the whole system (contract, table row 17): keys sorted by code point, no spaces, UTF-8, integers exact, no
NaN or Infinity, lone surrogates refused. Numbers keep their kind: `1`, `1.0` and `-0.0` are three different values
with three different digests, in every process.

There are three digest styles, and they are never mixed (contract 5.1): bare hex (effect ids, effect inputs, workflow
and plan), `sha256:v1:` + hex (fingerprints, inputs, outputs, deltas, contexts) and `sha256:` + hex (artifact bytes).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, TypeAlias

from .errors import TaskFault

Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

MAX_DEPTH = 64
"""Deepest nesting of JSON that comes from outside (process output, inputs)."""


def _encoder(*, ascii_only: bool) -> Callable[[Any], str]:
    """`JSONEncoder.encode`, without building the C encoder anew at every call (it is on every hot path)."""
    plain = json.JSONEncoder(
        ensure_ascii=ascii_only, allow_nan=False, sort_keys=True, separators=(",", ":"), check_circular=False
    )
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    strings = json.encoder.encode_basestring_ascii if ascii_only else json.encoder.encode_basestring
    encode = make(None, plain.default, strings, None, ":", ",", True, False, False)

    def text(value: Any) -> str:
        return "".join(encode(value, 0))

    sample = {"b": [1, 1.5, "é"], "a": None}
    try:
        if text(sample) == plain.encode(sample):
            return text
    except TypeError:
        pass
    return plain.encode


_encode = _encoder(ascii_only=False)
ascii_json = _encoder(ascii_only=True)
"""The JSON text of texts, numbers and nulls, in ASCII alone: what has to have a digest whatever its characters are."""


class JsonError(TaskFault):
    """A value that has no canonical form. `code` is `invalid_json_value`."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_json_value", message)


def canonical(value: Any) -> str:
    """The canonical text of a JSON value. Raises `JsonError` for what JSON cannot carry."""
    try:
        text = _encode(value)
    except ValueError as error:
        raise JsonError(f"a number that JSON cannot carry (NaN or Infinity): {error}") from error
    except RecursionError as error:
        raise JsonError("nesting is too deep") from error
    except TypeError as error:
        raise JsonError(str(error)) from error
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise JsonError("text contains a lone surrogate, which UTF-8 cannot carry") from error
    return text


def _refuse_constant(name: str) -> Any:
    raise JsonError(f"{name} is not a JSON value")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that comes from outside, strictly.

    Refuses with `JsonError`: bad syntax, duplicate keys, NaN, Infinity, a float out of range such as `1e400`,
    lone surrogates, nesting deeper than `MAX_DEPTH`, bytes that are not UTF-8. Integers of any size stay exact.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_object)
    except RecursionError as error:
        raise JsonError("nesting is too deep") from error
    except ValueError as error:
        raise JsonError(f"not JSON: {error}") from error
    check_value(value)
    return value


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"the key {key!r} stands twice in one object")
            seen.add(key)
    return result


def check_value(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """Raise `JsonError` unless `value` is JSON within `max_depth` levels and has a canonical form."""
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if depth > max_depth:
            raise JsonError(f"nesting is deeper than {max_depth} levels")
        if isinstance(item, dict):
            pending.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            pending.extend((child, depth + 1) for child in item)
    canonical(value)


def least_length(value: Any) -> int:
    """How long the canonical text of a value is at least (exactly, but for escapes and numbers).

    What stands in many places of it is looked at once, so that this costs little where the text would not fit into
    memory.
    """
    return _least_length(value, {})


def _least_length(value: Any, known: dict[int, int]) -> int:
    kind = type(value)
    if kind is str:
        return len(value) + 2
    if kind is not dict and kind is not list:
        return 1
    length = known.get(id(value))
    if length is None:
        if not value:
            length = 2
        elif kind is dict:
            length = 1 + sum([len(key) + 4 + _least_length(item, known) for key, item in value.items()])
        else:
            length = 1 + sum([1 + _least_length(item, known) for item in value])
        known[id(value)] = length
    return length


_BRACKETS = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))


def nests_deeper(text: str, most: int) -> bool:
    """Whether a canonical text nests deeper than `most` levels. Only of a text with many brackets it costs anything."""
    if text.count("{") + text.count("[") <= most:
        return False
    # What is left are brackets, and quotes around those in texts; two quotes side by side hold nothing.
    data = text.encode("utf-8").replace(b"\\\\", b"").replace(b'\\"', b"")
    data = data.translate(_BRACKETS, _NO_BRACKETS).replace(b'""', b"")
    if b'"' in data:
        data = re.sub(rb'"[^"]*"', b"", data)
    for _ in range(most):
        data = data.replace(b"{}", b"")  # the innermost level of every part
        if not data:
            break
    return bool(data)


def loads(text: str) -> Any:
    """Parse JSON that this system wrote itself."""
    return json.loads(text)


def hex_digest(text: str) -> str:
    """Bare hex SHA-256 of a text's UTF-8 bytes."""
    return sha256(text.encode("utf-8")).hexdigest()


def value_digest(value: Any) -> str:
    """`sha256:v1:` + hex over the canonical JSON of `value`."""
    return text_digest(canonical(value))


def text_digest(canonical_text: str) -> str:
    """`sha256:v1:` + hex over a text that is canonical JSON already."""
    return "sha256:v1:" + sha256(canonical_text.encode("utf-8")).hexdigest()


def input_digest(effect_input: Mapping[str, Any]) -> str:
    """The bare hex digest of an effect's input (contract 5.1)."""
    return hex_digest(canonical(effect_input))


def effect_id(run_id: str, task_id: str, attempt: int, ordinal: int, operation: str, digest: str) -> str:
    """Identity of an effect (seed; contract 5.1): SHA-256 over six parts that are joined by zero bytes."""
    return hex_digest(f"{run_id}\0{task_id}\0{attempt}\0{ordinal}\0{operation}\0{digest}")


def approval_id(effect: str) -> str:
    """Identity of the approval of an effect (contract 4.7)."""
    return "approval-" + effect[:16]
