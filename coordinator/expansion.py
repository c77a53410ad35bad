"""Static expansion: the children of foreach, matrix and loop, their bindings and ids (contract 2.3 to 2.5). Pure: no
I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from math import prod
from typing import Any

from agentctl.store.canonical import canonical

from .definition import MAX_EXPANSION, Foreach, Loop, Matrix
from .diagnostics import Path
from .expressions import Ref, Scope, TemplateError, compile_value, has_template, is_exact_template


class ExpansionError(Exception):
    """Why a task cannot be expanded. `path` is the place below the task."""

    def __init__(self, message: str, path: Path, code: str = "schema_violation", help: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.code = code
        self.help = help


@dataclass(frozen=True, slots=True)
class Fanout:
    """The children that a task will have.

    `kind` is `foreach`, `matrix` or `loop`; the children of a loop come one after the other. `names` are the
    variables that every child binds. `templates` are the literal values that hold templates (they are
    rendered in each child); `data_names` are the names whose values came from outside and only look like
    templates.
    """

    kind: str
    size: int
    names: tuple[str, ...]
    data_names: tuple[str, ...]
    templates: tuple[tuple[Path, Any], ...]
    values: tuple[tuple[str, Sequence[Any]], ...]
    parent: str = ""

    def bindings(self) -> Iterator[dict[str, Any]]:
        """The bindings of each child, in expansion order."""
        if self.kind == "loop":
            [(_, [previous])] = self.values
            for index in range(self.size):
                yield (bindings := {"loopIndex": index, "loopPrevious": previous})
                previous = output_of(expansion_id(self.parent, index, bindings))
        elif self.kind == "foreach":
            name, items = self.values[0]
            for index, item in enumerate(items):
                yield {name: item, "foreachIndex": index}
        else:
            axes = [name for name, _ in self.values]
            for index, chosen in enumerate(product(*(items for _, items in self.values))):
                yield {"matrix": dict(zip(axes, chosen, strict=True)), "matrixIndex": index}


def expansion_id(parent: str, index: int, bindings: dict[str, Any]) -> str:
    """`PARENT--IIII-DDDDDDDDDDDD` (contract 2.3); an index above 9999 keeps all its digits."""
    digest = sha256(canonical(bindings).encode("utf-8")).hexdigest()
    return f"{parent}--{index:04d}-{digest[:12]}"


def plan_foreach(foreach: Foreach, scope: Scope) -> Fanout:
    """The children of a foreach. Raises `ExpansionError`."""
    items, given = _items(foreach.items, ("foreach", "items"), scope)
    _check_width(len(items), foreach.max_items, "foreach")
    looks = has_template(items)
    return Fanout(
        "foreach",
        len(items),
        (foreach.as_, "foreachIndex"),
        (foreach.as_,) if given and looks else (),
        ((("foreach", "items"), items),) if looks and not given else (),
        ((foreach.as_, items),),
    )


def plan_matrix(matrix: Matrix, scope: Scope) -> Fanout:
    """The children of a matrix: axes in name order, the last one fastest. Raises `ExpansionError`."""
    values: list[tuple[str, Sequence[Any]]] = []
    templates: list[tuple[Path, Any]] = []
    data = False
    for name in sorted(matrix.axes):
        path: Path = ("matrix", "axes", name)
        items, given = _items(matrix.axes[name], path, scope)
        values.append((name, items))
        if has_template(items):
            if given:
                data = True
            else:
                templates.append((path, items))
    if data and templates:
        message = "an axis with templates cannot stand beside an axis whose given values look like templates"
        raise ExpansionError(message, templates[0][0])
    size = prod(len(items) for _, items in values)
    _check_width(size, matrix.max_items, "matrix")
    return Fanout(
        "matrix",
        size,
        ("matrix", "matrixIndex"),
        ("matrix",) if data else (),
        tuple(templates),
        tuple(values),
    )


_LOOP_OUTPUT = re.compile(r"^(\s*\$\{\{\s*(?:not\s+)?)loop\.output(?=[.\s}=!<>])")


def loop_guard(text: str) -> str:
    """The guard of a loop with `loop.output` spelled as the variable that it stands for (contract 2.5)."""
    return _LOOP_OUTPUT.sub(r"\1vars.loopPrevious", text)


def plan_loop(loop: Loop, parent: str) -> Fanout:
    """The iterations of a loop. Each one binds the output of the one before, so each id depends on all before it.

    Nothing is computed yet: whether so many are allowed is looked at first.
    """
    looks = has_template(loop.initial)
    return Fanout(
        "loop",
        loop.max_iterations,
        ("loopIndex", "loopPrevious"),
        (),
        ((("loop", "initial"), loop.initial),) if looks else (),
        (("loop", [loop.initial]),),
        parent,
    )


def output_of(task_id: str) -> str:
    """The template that reads the whole output of a task."""
    return f"${{{{ tasks.{task_id}.output }}}}"


def _items(value: Any, path: Path, scope: Scope) -> tuple[Sequence[Any], bool]:
    """The list of values, and whether it was given from outside."""
    if isinstance(value, list):
        return value, False
    if not is_exact_template(value):
        raise ExpansionError("must be a list or exactly one template", path, "invalid_template", "${{ inputs.NAME }}")
    try:
        renderer = compile_value(value)
        for reference in renderer.references:
            _check_known(reference, scope, path)
        items = renderer(scope)
    except TemplateError as error:
        hint = "give the input, or declare a default in spec.inputs" if error.kind == "undefined" else error.help
        raise ExpansionError(error.message, path, "invalid_template", hint) from None
    if not isinstance(items, list):
        raise ExpansionError(f"{value} gives {_kind(items)}, not a list", path, help=_list_hint(renderer.references))
    return items, True


def _list_hint(references: Iterable[Ref]) -> str:
    """How to give a list from outside, where it comes from there."""
    options = {"inputs": "--input", "vars": "--var"}
    for reference in references:
        if reference.root in options and len(reference.path) == 1:
            return f'give it a JSON list, such as {options[reference.root]} \'{reference.path[0]}=["a", "b"]\''
    return "let it give a list"


def _check_known(reference: Ref, scope: Scope, path: Path) -> None:
    """Raise unless a value is known before the run: an input, a variable, or an input that a call gives statically."""
    if reference.root in ("inputs", "vars"):
        return
    if reference.root == "tasks" and reference.path[0] in scope.tasks:
        # What is `inputs` in a sub-workflow is the output of its boundary here.
        if len(reference.path) < 2 or reference.path[1] in scope.tasks[reference.path[0]]:
            return
        message = f"inputs.{reference.path[1]} of this sub-workflow is not known before the run"
        hint = "let the call give it as a literal, or as a template over inputs or vars"
        raise ExpansionError(message, path, "invalid_template", hint)
    message = f"{reference.root} is not known before the run; only inputs and vars are"
    hint = "take the items from an input or a variable; for items that a task finds, let one command go through them"
    raise ExpansionError(message, path, "invalid_template", hint)


def _kind(value: Any) -> str:
    names = {str: "text", dict: "an object", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _check_width(size: int, limit: int, kind: str) -> None:
    if size > limit:
        raise ExpansionError(
            f"{size} children are more than maxItems, which is {limit}",
            (kind,),
            help=f"raise {kind}.maxItems if so many are meant"
            if size <= MAX_EXPANSION
            else f"maxItems can be {MAX_EXPANSION} at most: share them out among several tasks",
        )
