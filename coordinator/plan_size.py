"""How large a plan will be, known before anything of it is made. Pure: no I/O.

Children of an expansion share their parts in memory, but a stored plan holds each child by itself: a long text in the
`with` of a wide expansion comes to gigabytes. Sizes are those of the JSON text, counted in characters: texts are not
encoded for it, so that the cost depends on the document and not on what it would come to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .definition import Task
    from .expansion import Fanout

MAX_PLAN_SIZE = 256 << 20
"""Most characters of a stored plan: more than two thousand for each of 100,000 children."""

_TASK = 400
"""What a task comes to by the names of its fields and their usual values, besides its id."""

_CHILD = 120
"""What its expansion adds to a child, besides the bindings: parent, index, and its digest here and at its aggregate."""


def json_size(value: Any) -> int:
    """Characters of a JSON value as text; escapes in texts are not counted."""
    kind = type(value)
    if kind is str:
        return len(value) + 2
    if kind is dict:
        return 2 + sum(len(key) + 4 + json_size(item) for key, item in value.items())
    if kind is list or kind is tuple:
        return 2 + sum(1 + json_size(item) for item in value)
    return len(str(value))


def task_size(task: Task, variables: dict[str, Any], defaults: dict[str, Any], fanout: Fanout | None) -> int:
    """Characters of a task in a plan, with all its children. `defaults` is the `with` of its action."""
    name = 2 * len(task.id)
    own = _TASK + name + sum(map(json_size, (task.needs, variables, task.with_, task.output_schema, task.when)))
    own += json_size({key: value for key, value in defaults.items() if key not in task.with_})
    if task.compensate is not None:
        own += _TASK + json_size(task.compensate.with_)
    if fanout is None:
        return own
    return _TASK + name + fanout.size * (own + _CHILD + name) + _bindings_size(fanout)


def _bindings_size(fanout: Fanout) -> int:
    """Characters of what all children bind."""
    if fanout.kind == "loop":
        # The first iteration binds the initial value, every other one the name of the one before.
        return fanout.size * (2 * _CHILD + len(fanout.parent)) + sum(json_size(items) for _, items in fanout.values)
    total = 0
    for name, items in fanout.values:
        # Each value of an axis stands in as many children as the other axes have combinations.
        each = fanout.size // max(1, len(items))
        total += fanout.size * (len(name) + 4) + each * json_size(items)
    return total


def problem(sizes: Iterable[int]) -> str | None:
    """What to say of a plan whose tasks come to these sizes, or None."""
    total = sum(sizes)
    if total <= MAX_PLAN_SIZE:
        return None
    return f"the plan would have about {total >> 20} MiB; at most {MAX_PLAN_SIZE >> 20} MiB are allowed"
