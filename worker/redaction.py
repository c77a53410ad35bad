"""Taking secrets out of what is kept (contract 11.2): in every text, key and byte, in the forms in which they come.

The exact value is replaced, and the same value escaped as in JSON, percent-encoded as in a URL, or in base64 (standard
and URL alphabet, padded or not). The encoded forms are looked for only from `MIN_ENCODED` bytes on: those of a short
value would be found by chance. What somebody has cut, reversed or enciphered is not recognised.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias
from urllib.parse import quote

Bytes: TypeAlias = bytes  # `Redactor.bytes` hides the name below it
REDACTED: Final = "[REDACTED]"
MIN_ENCODED: Final = 8
PIECE_BYTES: Final = 1_048_576


def forms(value: bytes) -> frozenset[bytes]:
    """Every form in which a secret value is looked for; none for an empty one."""
    if not value:
        return frozenset()
    found = {value}
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is not None:
        found.add(json.dumps(text, ensure_ascii=False)[1:-1].encode())
        found.add(json.dumps(text)[1:-1].encode())
    if len(value) >= MIN_ENCODED:
        found.add(quote(value, safe="").encode())
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found |= {encode(value), encode(value).rstrip(b"=")}
    return frozenset(found)


class Redactor:
    """Knows secret values and takes them out of bytes, texts and JSON values. Longer forms go first, so that a secret
    which holds another one does not leave its rest behind."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        self._values: set[bytes] = set()
        self._forms: list[bytes] = []
        self._texts: list[str] = []
        self._pattern: re.Pattern[str] | None = None
        self.learn(values)

    def learn(self, values: Iterable[bytes]) -> None:
        """Look for these as well."""
        new = {value for value in values if value} - self._values
        if not new:
            return
        self._values = self._values | new
        everything: set[bytes] = set()
        for value in self._values:
            everything |= forms(value)
        self._forms = sorted(everything, key=lambda form: (-len(form), form))
        texts = [form.decode("utf-8", errors="surrogateescape") for form in self._forms]
        # Output that is not UTF-8 is kept with replacement characters: a secret in it looks like that, too.
        texts += [form.decode("utf-8", errors="replace") for form in self._forms]
        self._texts = list(dict.fromkeys(texts))
        self._pattern = None

    def __bool__(self) -> bool:
        return bool(self._forms)

    def bytes(self, data: bytes) -> bytes:
        """`data` without any form of a secret."""
        for form in self._forms:
            if form in data:
                data = data.replace(form, REDACTED.encode())
        return data

    def long_forms(self) -> list[Bytes]:
        """The forms of values that are long enough not to turn up by chance, longest first."""
        values = (value for value in self._values if len(value) >= MIN_ENCODED)
        return sorted({form for value in values for form in forms(value)}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """`text` without any form of a secret."""
        for form in self._texts:
            if form in text:
                text = text.replace(form, REDACTED)
        return text

    def split(self, text: str) -> tuple[str, str]:
        """(what can be told of a text that goes on, its tail that may be the beginning of a secret).

        What is told over all pieces, put together, holds no form of a secret, wherever the pieces were cut. The tail is
        shorter than the longest form; it belongs before the next piece.
        """
        if not self._texts:
            return text, ""
        pattern = self._pattern
        if pattern is None:
            longest_first = sorted(self._texts, key=len, reverse=True)
            pattern = self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        told: list[str] = []
        start = 0
        while True:
            found, tail = pattern.search(text, start), self._beginning(text, start)
            # At the same place the tail goes first: it may become a longer form than the one that is there already.
            if found is None or tail <= found.start():
                return "".join([*told, text[start:tail]]), text[tail:]
            told += [text[start : found.start()], REDACTED]
            start = found.end()

    def _beginning(self, text: str, start: int) -> int:
        """The first place from `start` on where a form may begin that is longer than the rest; else the end."""
        size = len(text)
        longest = max(map(len, self._texts), default=0)
        for place in range(max(start, size - longest + 1), size):
            rest = text[place:]
            if any(len(form) > len(rest) and form.startswith(rest) for form in self._texts):
                return place
        return size

    def json(self, value: Any) -> Any:
        """A JSON value without any form of a secret, in texts, in keys, and as a number."""
        if not self._forms:
            return value
        return self._walk(value)

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(key): self._walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool) and repr(value) in self._texts:
            return REDACTED
        return value


def place_of(secret: Bytes, value: Any) -> tuple[str | int, ...] | None:
    """Where in a JSON value a secret of at least `MIN_ENCODED` bytes stands in any of its forms, or None.

    A key that holds it is no part of the place, which must not tell it.
    """
    if len(secret) < MIN_ENCODED:
        return None
    wanted = [form.decode("utf-8", errors="surrogateescape") for form in forms(secret)]
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while pending:
        place, item = pending.pop()
        if isinstance(item, str):
            found = any(form in item for form in wanted)
        elif isinstance(item, dict):
            found = any(form in key for key in item for form in wanted)
            pending += [((*place, key), below) for key, below in reversed(item.items())]
        elif isinstance(item, list | tuple):
            found = False
            pending += [((*place, index), below) for index, below in enumerate(item)]
        else:
            found = isinstance(item, int | float) and not isinstance(item, bool) and repr(item) in wanted
        if found:
            return place
    return None


class _Known:
    """The secrets that this process has read: what it records and logs is cleaned of them, whichever task they are for.

    A worker serves many runs; a value that came in with one of them is no less secret in the next.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.redactor = Redactor()

    def learn(self, value: bytes) -> None:
        with self._lock:
            self.redactor.learn([value])


known: Final = _Known()


def holds_secret(descriptor: int, size: int, stopped: Callable[[], bool]) -> bool:
    """Whether an open file holds a known secret of at least `MIN_ENCODED` bytes, in any form. Its position stays.

    Raises `Interrupted` as soon as `stopped()`.
    """
    from agentctl.store.blobs import Interrupted

    wanted = known.redactor.long_forms()
    if not wanted:
        return False
    overlap, offset, rest = len(wanted[0]) - 1, 0, b""
    while offset < size:
        piece = os.pread(descriptor, min(PIECE_BYTES, size - offset), offset)
        if not piece:
            return False
        if stopped():
            raise Interrupted
        window = rest + piece
        if any(form in window for form in wanted):
            return True
        rest = window[-overlap:] if overlap else b""
        offset += len(piece)
    return False


class LogFilter(logging.Filter):
    """Cleans log records of every known secret, their exceptions included. Belongs to a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        redactor = known.redactor
        if redactor:
            record.msg = redactor.text(record.getMessage())
            record.args = None
            if record.exc_info and not record.exc_text:
                record.exc_text = logging.Formatter().formatException(record.exc_info)
            if record.exc_text:
                record.exc_text = redactor.text(record.exc_text)
        return True
