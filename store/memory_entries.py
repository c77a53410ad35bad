"""Long-term memory as data: entries, and what its actions and verbs may be asked (contract 3, 7, 11.3). Pure.

Every check raises `TaskFault` with code `invalid_input` and the field in `details`, so that a document, a task and a
command line get the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .canonical import canonical
from .errors import TaskFault

ENTRY_FORMAT = 1
DEFAULT_NAMESPACE = "default"
MAX_ENTRY_BYTES = 1 << 20
"""Most bytes of an entry as canonical JSON, where a text that is made of its value does not count."""
MAX_NAME_BYTES = 1024
"""Most bytes of a key and of a namespace: they are parts of an index, and of what people read."""
MAX_QUERY_BYTES = 64 << 10
MAX_CANDIDATES = 10_000
"""Most visible entries of a namespace that a search looks at."""
MAX_RESULTS = 100
DEFAULT_RESULTS = 10
MAX_RETENTION_DAYS = 36_500
MODES = ("text", "vector", "hybrid")

FORMS = ("entry", "content", "value")
"""The three ways to give an entry; exactly one is used."""


@dataclass(frozen=True, slots=True)
class Search:
    """A checked question to one namespace."""

    namespace: str
    query: str
    mode: str = "text"
    limit: int = DEFAULT_RESULTS
    filters: Mapping[str, Any] = field(default_factory=dict)


def _fault(name: str, message: str) -> TaskFault:
    return TaskFault("invalid_input", f"'{name}' {message}", details={"field": name})


def check_name(name: str, value: Any) -> str:
    """A key or a namespace: a text that is not empty, within its limit."""
    if not isinstance(value, str) or not value:
        raise _fault(name, "must be a non-empty text")
    canonical(value)
    size = len(value.encode("utf-8"))
    if size > MAX_NAME_BYTES:
        raise _fault(name, f"has {size} bytes; at most {MAX_NAME_BYTES} are allowed")
    return value


def check_query(value: Any) -> str:
    """A query: text with something in it, within its limit."""
    if not isinstance(value, str) or not value.strip():
        raise _fault("query", "must be a non-empty text")
    canonical(value)
    size = len(value.encode("utf-8"))
    if size > MAX_QUERY_BYTES:
        raise _fault("query", f"has {size} bytes; at most {MAX_QUERY_BYTES} are allowed")
    return value


def check_mode(value: Any) -> str:
    """How to search."""
    if not isinstance(value, str) or value not in MODES:
        raise _fault("mode", f"must be one of {', '.join(MODES)}")
    return value


def check_limit(value: Any) -> int:
    """How many results at most."""
    if type(value) is not int or not 1 <= value <= MAX_RESULTS:
        raise _fault("limit", f"must be a whole number from 1 to {MAX_RESULTS}")
    return value


def check_filters(value: Any) -> dict[str, Any]:
    """Values that the metadata of a result must equal."""
    return _named("filters", value)


def check_metadata(value: Any) -> dict[str, Any]:
    """Metadata of an entry."""
    return _named("metadata", value)


def _named(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _fault(name, "must be an object")
    if "" in value:
        raise _fault(name, "must not have an empty key")
    return value


def check_retention(value: Any) -> int | None:
    """Days until an entry ends; None is for ever."""
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MAX_RETENTION_DAYS:
        raise _fault("retentionDays", f"must be a whole number from 1 to {MAX_RETENTION_DAYS}")
    return value


def search_of(given: Mapping[str, Any], default_namespace: str) -> Search:
    """The question of a search action. Raises `TaskFault`."""
    return Search(
        check_name("namespace", given.get("namespace", default_namespace)),
        check_query(given.get("query")),
        check_mode(given.get("mode", "text")),
        check_limit(given.get("limit", DEFAULT_RESULTS)),
        check_filters(given.get("filters", {})),
    )


def entry_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that a write gives as `entry`, as `content`, or as `value` (with `text`), in its stored form.

    `content` and `value` may have `metadata` beside them; an `entry` brings its own. Raises `TaskFault`.
    """
    forms = [name for name in FORMS if name in given]
    if len(forms) != 1:
        said = f"not {' and '.join(forms)}" if forms else "and none is given"
        raise TaskFault("invalid_input", f"a write has exactly one of entry, content and value, {said}")
    if forms != ["value"] and "text" in given:
        raise _fault("text", "stands beside value only")
    if forms == ["entry"]:
        if "metadata" in given:
            raise _fault("metadata", "belongs into entry")
        return checked_entry(given["entry"])
    metadata = given.get("metadata", {})
    if forms == ["content"]:
        return checked_entry({"formatVersion": ENTRY_FORMAT, "content": given["content"], "metadata": metadata})
    value = given["value"]
    text = given["text"] if "text" in given else _text_of(value)
    content = {"type": "json", "value": value, "text": text}
    return checked_entry({"formatVersion": ENTRY_FORMAT, "content": content, "metadata": metadata}, name="value")


def checked_entry(entry: Any, *, name: str = "entry") -> dict[str, Any]:
    """An entry in its stored form: format, content and metadata, no more. Raises `TaskFault`."""
    if not isinstance(entry, dict) or not entry.keys() <= {"formatVersion", "content", "metadata"}:
        raise _fault("entry", "must be an object with formatVersion, content and metadata")
    version = entry.get("formatVersion", ENTRY_FORMAT)
    if type(version) is not int or version != ENTRY_FORMAT:
        raise _fault("entry", f"has formatVersion {canonical(version)}; this agentctl knows {ENTRY_FORMAT}")
    content = entry.get("content")
    if not isinstance(content, dict) or not _content_fits(content):
        raise _fault("content", "must be {type: text, text} or {type: json, value, text}, where the last text may miss")
    if "text" in content and not isinstance(content["text"], str):
        raise _fault("text", "must be text")
    metadata = check_metadata(entry.get("metadata", {}))
    whole = {"formatVersion": ENTRY_FORMAT, "content": content, "metadata": metadata}
    if not searchable_text(whole).strip():
        raise _fault(name, "leaves nothing to search for: the text of the entry is empty")
    size = len(canonical(_given(whole)).encode("utf-8"))
    if size > MAX_ENTRY_BYTES:
        raise _fault(name, f"makes an entry of {size} bytes; at most {MAX_ENTRY_BYTES} are allowed")
    return whole


def _given(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as it counts: a text for searches that only repeats the value was not given by anybody."""
    content = entry["content"]
    if content["type"] == "json" and content.get("text") == _text_of(content["value"]):
        return {**entry, "content": {"type": "json", "value": content["value"]}}
    return entry


def _content_fits(content: Mapping[str, Any]) -> bool:
    kind = content.get("type")
    if kind == "text":
        return content.keys() == {"type", "text"}
    return kind == "json" and {"type", "value"} <= content.keys() <= {"type", "value", "text"}


def searchable_text(entry: Mapping[str, Any]) -> str:
    """What a search looks through."""
    content = entry["content"]
    if "text" in content:
        text: str = content["text"]
        return text
    return _text_of(content["value"])


def value_of(entry: Mapping[str, Any]) -> Any:
    """What a read gives: the JSON value, or the text."""
    content = entry["content"]
    return content["text"] if content["type"] == "text" else content["value"]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value)
