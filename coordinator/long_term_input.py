"""What can be known to be wrong with the input of a long-term memory action before anything runs. Pure.

The rules are those of `store.memory_entries`, which a worker applies to the rendered input; here they are applied to
whatever has no template in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentctl.store import memory_entries as entries
from agentctl.store.errors import TaskFault

from .expressions import has_template

_LEAD = "builtin.long_term_memory."
_WRITE = _LEAD + "write"
_ENTRY_FIELDS = (*entries.FORMS, "text", "metadata")
_CHECKS: dict[str, dict[str, Callable[[Any], Any]]] = {
    _LEAD + "search": {
        "query": entries.check_query,
        "mode": entries.check_mode,
        "limit": entries.check_limit,
        "filters": entries.check_filters,
    },
    _WRITE: {"retentionDays": entries.check_retention},
}


def embeds(kind: str) -> bool:
    """Whether an action of this kind may have to embed something."""
    return kind in _CHECKS


def long_term_problems(kind: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, message) of what is wrong with the literal part of an input."""
    for name, check in _CHECKS.get(kind, {}).items():
        if name in given and not has_template(given[name]):
            try:
                check(given[name])
            except TaskFault as fault:
                yield name, fault.message
    if kind == _WRITE:
        yield from _entry_problems({name: given[name] for name in _ENTRY_FIELDS if name in given})


def _entry_problems(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # Which fields there are is known before anything is rendered; what is in them may not be, and then something that
    # fits stands in for it.
    try:
        entries.entry_of({name: _stand_in(name) if has_template(value) else value for name, value in given.items()})
    except TaskFault as fault:
        field = str((fault.details or {}).get("field", "value"))
        yield field if field in given else next(iter(given), "value"), fault.message


def _stand_in(name: str) -> Any:
    """A value that fits the place of one that is not known yet."""
    content = {"type": "text", "text": "x"}
    return {"entry": {"content": content}, "content": content, "metadata": {}}.get(name, "x")
