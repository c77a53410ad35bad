"""Log lines of processes that work for long: text or JSON, with run and task, and never more than can be read.

`AGENTCTL_LOG_FORMAT` is `text` or `json`, `AGENTCTL_LOG_LEVEL` one of `debug`, `info`, `warning`, `error`; children
inherit both. A record may carry run, task, attempt, delivery and trace as `extra`; what a worker has bound while an
attempt runs is added to all of its lines.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .clock import SystemClock
from .errors import UsageError

FORMAT_VARIABLE = "AGENTCTL_LOG_FORMAT"
LEVEL_VARIABLE = "AGENTCTL_LOG_LEVEL"
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
FIELDS = ("run", "task", "attempt", "delivery", "trace")

LIMIT_LINES = 20
LIMIT_SECONDS = 60.0
"""So many lines of one place in the code are let through in that time; the next one tells how many were left out."""

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_bound: dict[str, Any] = {}


def bind(**fields: Any) -> None:
    """Add these fields to every line of this process, until `unbind`. A worker holds one attempt at a time."""
    global _bound
    _bound = fields


def unbind() -> None:
    """The attempt is over."""
    global _bound
    _bound = {}


def level_of(default: int = logging.WARNING) -> int:
    """The level that the environment asks for. Raises `UsageError`."""
    word = os.environ.get(LEVEL_VARIABLE)
    if not word:
        return default
    if word.lower() not in LEVELS:
        raise UsageError(f"{LEVEL_VARIABLE}={word!r} is none of {', '.join(LEVELS)}")
    return int(getattr(logging, word.upper()))


def configure(level: int, name: str) -> None:
    """Let this process, called `name`, write its lines to stderr, in place of whatever else was set up for that."""
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(name))
    handler.addFilter(RateLimit(SystemClock().monotonic))
    root.addHandler(handler)
    root.setLevel(level)


def check_format() -> None:
    """Raise `UsageError` for a format that does not exist. A child, which cannot ask anybody, takes text for it."""
    word = os.environ.get(FORMAT_VARIABLE) or "text"
    if word not in FORMATS:
        raise UsageError(f"{FORMAT_VARIABLE}={word!r} is none of {', '.join(FORMATS)}")


def _formatter(name: str) -> logging.Formatter:
    if os.environ.get(FORMAT_VARIABLE) == "json":
        return JsonLines(name)
    return TextLines(name, journal=_is_journal())


def _is_journal() -> bool:
    """Whether stderr goes to the journal, which has its own times and reads priorities."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
    return {**_bound, **own}


def _message(record: logging.LogRecord) -> str:
    left_out = getattr(record, "left_out", 0)
    more = f" (and {left_out} more like it, left out)" if left_out else ""
    return record.getMessage() + more


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, pid, message, and the fields that are known."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._name,
            "pid": record.process,
            "message": _message(record),
            **_fields(record),
        }
        if left_out := getattr(record, "left_out", 0):
            line["leftOut"] = left_out
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=str)


class TextLines(logging.Formatter):
    """A line for people: what it is about stands behind it, so that columns stay where they are."""

    def __init__(self, name: str, *, journal: bool = False) -> None:
        super().__init__()
        self._name = name
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = _message(record)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if self._journal:
            return "\n".join(f"<{_PRIORITIES.get(record.levelno, 5)}>{line}" for line in (text + fields).splitlines())
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        return f"{time} {self._name} {record.levelname} {text}{fields}"


class RateLimit(logging.Filter):
    """Lets through `LIMIT_LINES` lines of one place in `LIMIT_SECONDS`; the first one after that tells of the rest."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, str(record.msg))
        now = self._monotonic()
        since, count = self._seen.get(key, (now, 0))
        if now - since >= LIMIT_SECONDS:
            record.left_out = max(0, count - LIMIT_LINES)
            since, count = now, 0
        self._seen[key] = (since, count + 1)
        return count < LIMIT_LINES
