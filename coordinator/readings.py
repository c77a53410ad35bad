"""Warnings about what a template reads and cannot find, and about conditions that say something else than they seem to.

A path without a value fails its task when that is reached (contract 1.11), so such a document is valid and not refused.
Its author is told before anything runs: later, the tasks before it have had their effects. Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .diagnostics import MAX_DIAGNOSTICS, Diagnostic, Path, did_you_mean
from .expressions import Ref, compile_condition, compile_value, has_template, is_exact_template, unquoted_literal
from .yaml_document import YamlDocument

_HINTS = 20
"""Findings that look for a similar name."""

_SEVERAL = re.compile(r"\s(?:and|or)\s|&&|\|\||==|!=|<=|>=")
_PATH = re.compile(r"(?:inputs|vars|memory|tasks|loop)\.[A-Za-z0-9_.-]+")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, slots=True)
class Reader:
    """Where a value with templates stands, as far as it matters to what it can read.

    `own` are the variables of its task, of which those in `open_names` have values that only a run knows.
    `makes_variables`: what is rendered becomes a variable of the task, and no other variable can be read there.
    `boundary` and `call` belong to a sub-workflow: its inputs are the outputs of the boundary.
    """

    own: Mapping[str, Any]
    open_names: Collection[str] = ()
    makes_variables: bool = False
    boundary: str | None = None
    call: str = ""


NOBODY = Reader({})


class Readings:
    """Collects the warnings of one compilation."""

    def __init__(self, source: YamlDocument, inputs: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        """`inputs` and `variables` are what every task sees."""
        self._source = source
        self._inputs = inputs
        self._variables = variables
        self._found: dict[tuple[Path, str], Diagnostic] = {}
        self._given: dict[str, Collection[str]] = {}

    def boundary(self, task_id: str, names: Collection[str]) -> None:
        """Take note of which inputs a sub-workflow has: those of its call and its defaults."""
        self._given[task_id] = names

    def look(self, found: Iterable[Ref], value: Any, path: Path, reader: Reader, *, condition: bool = False) -> None:
        """Judge one value or condition, which has been compiled."""
        for reference in found:
            problem = self._problem(reference, reader)
            if problem is not None:
                for place in _places(value, path, reference, condition=condition):
                    self._warn(place, *problem)
        for place, text in _expressions(value, path, condition=condition):
            literal = unquoted_literal(text)
            doubt = None if literal is None else _doubt(literal)
            if doubt is not None:
                self._warn(place, *doubt)

    def warnings(self) -> list[Diagnostic]:
        """All of them by place, and how many were left out."""
        found = sorted(self._found.values(), key=lambda item: (item.line or 0, item.column or 0))
        if len(found) <= MAX_DIAGNOSTICS:
            return found
        left = f"{len(found) - MAX_DIAGNOSTICS} more warnings not shown"
        more = Diagnostic("invalid_template", left, severity="warning", file=self._source.file)
        return [*found[:MAX_DIAGNOSTICS], more]

    def _warn(self, place: Path, message: str, hint: str) -> None:
        if (place, message) not in self._found:
            warning = self._source.diagnostic("invalid_template", message, place, help=hint, severity="warning")
            self._found[place, message] = warning

    def _problem(self, reference: Ref, reader: Reader) -> tuple[str, str] | None:
        root, name = reference.root, reference.path[0]
        if root == "inputs":
            if name not in self._inputs:
                hint = f"give it (--input {name}=VALUE), or a default in spec.inputs"
                return f"inputs.{name} has no value, so this will fail", self._near(name, self._inputs, hint)
            return _below(reference, self._inputs[name])
        if root == "tasks" and name == reader.boundary and len(reference.path) > 1:
            inputs, name = self._given.get(name), reference.path[1]
            if inputs is None or name in inputs:  # what nobody calls is given nothing, and nothing is known of it
                return None
            message = f"inputs.{name} of this sub-workflow has no value in the call {reader.call!r}, so this will fail"
            return message, self._near(name, inputs, "give it in the `with` of the call, or a default in `inputs`")
        if root != "vars":
            return None
        if reader.makes_variables:
            message = (
                f"vars.{name} is read where a variable of the task is made: no variable reads another, this will fail"
            )
            return message, "write its value here, or put both together in `with`"
        if name in reader.open_names:
            return None
        if name in reader.own:
            return _below(reference, reader.own[name])
        if name not in self._variables:
            hint = f"give it (--var {name}=JSON), or declare it in vars"
            known = [*reader.own, *reader.open_names, *self._variables]
            return f"vars.{name} has no value in any layer, so this will fail", self._near(name, known, hint)
        return _below(reference, self._variables[name])

    def _near(self, name: str, known: Iterable[str], hint: str) -> str:
        near = did_you_mean(name, known) if len(self._found) < _HINTS else None
        return hint if near is None else f"{near} Otherwise {hint}"


def _below(reference: Ref, value: Any) -> tuple[str, str] | None:
    """What is missing in a value that is known: data, or text that is not rendered."""
    for place, segment in enumerate(reference.path[1:], 1):
        if has_template(value) and type(value) is not dict:
            return None
        if type(value) is not dict or segment not in value:
            shown = ".".join((reference.root, *reference.path[: place + 1]))
            what = "is no mapping" if type(value) is not dict else f"has no {segment!r}"
            parent = ".".join((reference.root, *reference.path[:place]))
            return f"{shown} does not exist, so this will fail: {parent} {what}", "read what is there, or add it"
        value = value[segment]
    return None


def _doubt(literal: str) -> tuple[str, str] | None:
    """Why a text without quotes on the right of a comparison is hardly meant as a text."""
    shown = literal if len(literal) <= 80 else literal[:80] + "…"
    if _SEVERAL.search(literal):
        hint = (
            "for `and` put one condition on each of two tasks in a row, for `or` take a router; a text stands in quotes"
        )
        return f"a condition is one comparison: all on the right is one text, {shown!r}", hint
    if _PATH.fullmatch(literal):
        hint = f'compare with a value; if this text is meant, write "{literal}" in quotes'
        return f"the right side of a comparison is never a path: this is the text {shown!r}", hint
    constant = _CONSTANTS.get(literal.lower())
    if constant is not None:
        return f"this compares with the text {shown!r}", f"write {constant}, or the text in quotes"
    return None


def _expressions(value: Any, path: Path, *, condition: bool) -> Iterator[tuple[Path, str]]:
    """The places that may hold a comparison."""
    if condition:
        yield path, value
        return
    for place, text in strings_in(value, path):
        if is_exact_template(text):
            yield place, text


def _places(value: Any, path: Path, reference: Ref, *, condition: bool) -> Iterator[Path]:
    if condition:
        if reference in compile_condition(value).references:
            yield path
        return
    for place, text in strings_in(value, path):
        if "${{" in text and reference in compile_value(text).references:
            yield place


def strings_in(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Every text in a JSON value, with its place."""
    if type(value) is str:
        yield path, value
    elif type(value) is dict:
        for key, item in value.items():
            yield from strings_in(item, (*path, key))
    elif type(value) is list:
        for index, item in enumerate(value):
            yield from strings_in(item, (*path, index))
