"""Templates and conditions (contract 1.11; table rows 6 and 19). Pure: no I/O.

An expression is `["not "] path [op literal]`. A string that is exactly one `${{ ... }}` keeps the JSON
type of its value (a comparison or `not` gives a boolean); in longer text only scalars are put in. Missing
is an error, never null. Object keys are not rendered. Values that are put in are data: they are never
read as templates again.

`compile_value` and `compile_condition` find static errors; the compiled forms are called with a `Scope`
and raise `TemplateError` for what only a run can know. Compiled strings are cached, so compiling the same
text again costs a look-up. Comparison is JSON identity: `1`, `1.0` and `"1"` are three values; order
compares numbers as 64-bit floats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from agentctl.store.canonical import Json, JsonError, canonical, parse_json
from agentctl.store.errors import TaskFault

Evaluate: TypeAlias = "Callable[[Scope], Any]"
Rename: TypeAlias = "Callable[[Ref], str | None]"
"""Gives the new text of a path, or None to keep it."""

_OPERATORS = ("==", "!=", "<=", ">=", "<", ">")
_SEGMENT = re.compile(r"[A-Za-z0-9_-]+")
_ROOTS = ("inputs", "vars", "memory")
_EXPANDED = ("item", "foreachIndex", "matrix", "matrixIndex", "loopIndex", "loopPrevious")
"""Variables that expansions give, which are paths of their own in other programs."""

_SEVERAL = re.compile(r"\s(?:and|or)\s|&&|\|\|")
MAX_TEXT = 32 << 20
"""Longest text that is put together of several values, in characters. It is measured before it is made: a value of many
megabytes may stand in it a thousand times."""

_NAMES, _NAME = 12, 40
"""Most names of a value in a message, and most characters of one."""

_SHOWN = 200
"""Most characters of an expression in a message; all of it is in the details."""


class TemplateError(TaskFault):
    """An expression that cannot be compiled or evaluated. Never retried.

    `kind` is one of `unclosed`, `empty`, `unsupported`, `undefined`, `non_scalar`. `help` is what to write instead,
    where that can be told.
    """

    def __init__(self, kind: str, message: str, expression: str, help: str | None = None) -> None:
        super().__init__("template_error", message, details={"kind": kind, "expression": expression})
        self.kind = kind
        self.expression = expression
        self.help = help


@dataclass(frozen=True, slots=True)
class Ref:
    """What an expression reads: root `inputs`, `vars`, `memory` or `tasks`, and the path below it.

    For `tasks` the path is the task id, then the segments below its output.
    """

    root: str
    path: tuple[str, ...]


@dataclass(slots=True)
class Scope:
    """The values that expressions see. `tasks` maps a task id to its output."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    vars: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    tasks: Mapping[str, Any] = field(default_factory=dict)


class Renderer:
    """A compiled JSON value with templates in it.

    Calling it with a scope gives the rendered value; a value without templates is returned as it is, not
    copied, so results may share structure with the plan and must not be changed.
    """

    __slots__ = ("_evaluate", "_value", "references")

    def __init__(self, value: Json, evaluate: Evaluate | None, references: frozenset[Ref]) -> None:
        self._value = value
        self._evaluate = evaluate
        self.references = references

    @property
    def constant(self) -> bool:
        """Whether the value has no template."""
        return self._evaluate is None

    def __call__(self, scope: Scope) -> Any:
        return self._value if self._evaluate is None else self._evaluate(scope)


class Condition:
    """A compiled `when` or guard. Calling it gives its truth (contract 1.11); a missing path is an error."""

    __slots__ = ("_evaluate", "references", "text")

    def __init__(self, text: str, evaluate: Evaluate, references: frozenset[Ref]) -> None:
        self.text = text
        self._evaluate = evaluate
        self.references = references

    def __call__(self, scope: Scope) -> bool:
        return truth(self._evaluate(scope))


_NO_REFERENCES: frozenset[Ref] = frozenset()


def compile_value(value: Json) -> Renderer:
    """Compile any JSON value. Raises `TemplateError` for static errors (all kinds but `undefined`)."""
    if type(value) is str:
        evaluate, references = _compile_text(value)
        return Renderer(value, evaluate, references)
    if type(value) is not dict and type(value) is not list:
        return Renderer(value, None, _NO_REFERENCES)
    found: set[Ref] = set()
    walker = _compile_node(value, found)
    return Renderer(value, walker, frozenset(found) if found else _NO_REFERENCES)


def compile_vars(variables: dict[str, Any], data: Iterable[str] = ()) -> Renderer:
    """Compile the `vars` of a task; the names in `data` hold plain data and are not rendered (contract 1.10).

    The renderer gives the variables. It is to be called with a scope whose own `vars` are empty.
    """
    names = frozenset(data)
    if not names:
        return compile_value(variables)
    plain = {name: value for name, value in variables.items() if name in names}
    rendered = compile_value({name: value for name, value in variables.items() if name not in names})
    if rendered.constant:
        return Renderer(variables, None, _NO_REFERENCES)
    return Renderer(variables, lambda scope: {**plain, **rendered(scope)}, rendered.references)


@lru_cache(maxsize=4096)
def compile_condition(text: str) -> Condition:
    """Compile a condition; the `${{ }}` around it is optional. Raises `TemplateError` for static errors."""
    stripped = text.strip()
    if "${{" in stripped:
        if not _is_exact(stripped):
            if "}}" not in stripped:
                raise TemplateError("unclosed", "a template is not closed by }}", text)
            raise TemplateError("unsupported", "a condition is one expression", text)
        stripped = stripped[3:-2]
    evaluate, reference = _compile_expression(stripped)
    return Condition(text, evaluate, frozenset((reference,)))


def is_exact_template(value: Any) -> bool:
    """Whether a value is a string that is exactly one `${{ ... }}`."""
    return type(value) is str and _is_exact(value)


def has_template(value: Any) -> bool:
    """Whether `${{` stands in any string of a JSON value (keys excluded)."""
    if type(value) is str:
        return "${{" in value
    if type(value) is dict:
        return any(has_template(item) for item in value.values())
    if type(value) is list:
        return any(has_template(item) for item in value)
    return False


def rename_paths(value: Json, rename: Rename) -> Any:
    """A JSON value with the paths of its templates renamed; text outside of templates is nobody's path and stays.

    What cannot be compiled stays as it is: who compiles the result reports it.
    """
    if type(value) is str:
        return _rename_text(value, rename) if "${{" in value else value
    if type(value) is dict:
        return {key: rename_paths(item, rename) for key, item in value.items()} if has_template(value) else value
    if type(value) is list:
        return [rename_paths(item, rename) for item in value] if has_template(value) else value
    return value


def rename_condition(text: str, rename: Rename) -> str:
    """A condition with its path renamed; the `${{ }}` around it is optional."""
    return _rename_text(text, rename) if "${{" in text else _rename_expression(text, rename)


def resolve(reference: Ref, scope: Scope) -> Any:
    """The value of a path. Raises `TemplateError` when it does not exist."""
    return _lookup(reference, _path_text(reference))(scope)


def unquoted_literal(text: str) -> str | None:
    """What is compared with if it is text only because it is neither JSON nor in quotes, else None.

    `text` is a condition or exactly one template, and has been compiled.
    """
    body = text.strip()
    if _is_exact(body):
        body = body[3:-2].strip()
    for operator in _OPERATORS:
        _, found, right = body.partition(operator)
        if found:
            right = right.strip()
            quoted = len(right) > 1 and right[0] == right[-1] and right[0] in "'\"" and right[0] not in right[1:-1]
            return None if quoted or _is_json(right) else right
    return None


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except JsonError:
        return False
    return True


def truth(value: Any) -> bool:
    """Truth of a JSON value: null and false are false, a number is true unless it is 0, text and containers
    unless empty.
    """
    return bool(value)


def json_equal(left: Any, right: Any) -> bool:
    """JSON identity: equal kind and equal value, so `1`, `1.0`, `true` and `"1"` differ."""
    kind = type(left)
    if kind is not type(right):
        return False
    if kind is str or kind is int or kind is bool or left is None:
        return bool(left == right)
    return canonical(left) == canonical(right)


# ---------------------------------------------------------------------- renaming


def _rename_text(text: str, rename: Rename) -> str:
    pieces: list[str] = []
    position, start = 0, text.find("${{")
    while start >= 0:
        end = text.find("}}", start + 3)
        if end < 0:
            break
        pieces += [text[position : start + 3], _rename_expression(text[start + 3 : end], rename)]
        position, start = end, text.find("${{", end)
    pieces.append(text[position:])
    return "".join(pieces)


def _rename_expression(source: str, rename: Rename) -> str:
    try:
        _, reference = _compile_expression(source)
    except TemplateError:
        return source
    renamed = rename(reference)
    # The path is what stands first, so its text is found before any literal that looks like it.
    return source if renamed is None else source.replace(_path_text(reference), renamed, 1)


def _path_text(reference: Ref) -> str:
    root, *rest = (reference.root, *reference.path)
    if root == "tasks":
        rest.insert(1, "output")
    return ".".join([root, *rest])


# ---------------------------------------------------------------------- compiling


def _is_exact(text: str) -> bool:
    return text.startswith("${{") and text.find("}}") == len(text) - 2 and text.find("${{", 3) < 0


def _compile_node(value: Any, found: set[Ref]) -> Evaluate | None:
    kind = type(value)
    if kind is str:
        if "${{" not in value:
            return None
        evaluate, references = _compile_text(value)
        found |= references
        return evaluate
    if kind is dict:
        parts = [(key, part) for key, item in value.items() if (part := _compile_node(item, found)) is not None]
        return _dict_walker(value, parts) if parts else None
    if kind is list:
        places = [(at, part) for at, item in enumerate(value) if (part := _compile_node(item, found)) is not None]
        return _list_walker(value, places) if places else None
    return None


def _dict_walker(value: dict[str, Any], parts: list[tuple[str, Evaluate]]) -> Evaluate:
    def walk(scope: Scope) -> Any:
        result = value.copy()
        for key, part in parts:
            result[key] = part(scope)
        return result

    return walk


def _list_walker(value: list[Any], parts: list[tuple[int, Evaluate]]) -> Evaluate:
    def walk(scope: Scope) -> Any:
        result = value.copy()
        for at, part in parts:
            result[at] = part(scope)
        return result

    return walk


@lru_cache(maxsize=8192)
def _compile_text(text: str) -> tuple[Evaluate | None, frozenset[Ref]]:
    start = text.find("${{")
    if start < 0:
        return None, _NO_REFERENCES
    if _is_exact(text):
        evaluate, reference = _compile_expression(text[3:-2])
        return evaluate, frozenset((reference,))
    pieces: list[str | Evaluate] = []
    references: set[Ref] = set()
    position = 0
    while start >= 0:
        end = text.find("}}", start + 3)
        if end < 0:
            raise TemplateError("unclosed", "a template is not closed by }}", text)
        if start > position:
            pieces.append(text[position:start])
        expression = text[start + 3 : end].strip()
        if not expression:
            raise TemplateError("empty", "a template has no expression in it", text)
        reference = _parse_path(expression, expression)
        references.add(reference)
        pieces.append(_scalar_text(_lookup(reference, expression), expression))
        position = end + 2
        start = text.find("${{", position)
    if position < len(text):
        pieces.append(text[position:])

    def join(scope: Scope) -> str:
        parts: list[str] = [piece if type(piece) is str else piece(scope) for piece in pieces]  # type: ignore[operator]
        length = sum(map(len, parts))
        if length > MAX_TEXT:
            message = f"a text would have {length:,} characters, {MAX_TEXT:,} are possible; large data belongs in files"
            raise TemplateError("unsupported", message, text[:_SHOWN])
        return "".join(parts)

    return join, frozenset(references)


def _scalar_text(lookup: Evaluate, expression: str) -> Evaluate:
    def text(scope: Scope) -> str:
        value = lookup(scope)
        if type(value) is str:
            return value
        if isinstance(value, (dict, list)):
            raise TemplateError(
                "non_scalar", f"{expression} is an object or a list and cannot stand inside text", expression
            )
        return canonical(value)

    return text


def _compile_expression(source: str) -> tuple[Evaluate, Ref]:
    expression = source.strip()
    if not expression:
        raise TemplateError("empty", "a template has no expression in it", source)
    negated = expression.startswith("not ")
    body = expression[4:].strip() if negated else expression
    for operator in _OPERATORS:
        left, found, right = body.partition(operator)
        if found:
            reference = _parse_path(left.strip(), expression)
            evaluate = _comparison(operator, _lookup(reference, expression), right.strip(), expression)
            break
    else:
        reference = _parse_path(body, expression)
        evaluate = _lookup(reference, expression)
    if negated:
        inner = evaluate

        def negate(scope: Scope) -> bool:
            return not truth(inner(scope))

        return negate, reference
    return evaluate, reference


def _parse_path(text: str, expression: str) -> Ref:
    root, *segments = text.split(".")
    valid = bool(segments) and all(_SEGMENT.fullmatch(segment) for segment in segments)
    if valid and root in _ROOTS:
        return Ref(root, tuple(segments))
    if valid and root == "tasks" and len(segments) >= 2 and segments[1] == "output":
        return Ref("tasks", (segments[0], *segments[2:]))
    raise TemplateError(
        "unsupported",
        f"{text!r} is not a path: use inputs.X, vars.X, memory.X or tasks.ID.output.X",
        expression,
        _instead(text),
    )


def _instead(text: str) -> str | None:
    """What to write for something that is no path here: mostly it is one in the language of another program."""
    root, *segments = text.split(".")
    if _SEVERAL.search(text):
        return "a condition is one comparison: for `and` put one on each of two tasks in a row, for `or` take a router"
    if "[" in text:
        return "elements of a list cannot be read one by one: take a foreach over it, or hand it on as a whole"
    if re.search(r"[|(+*?]", text):
        return "there are no functions, filters and sums: let a task make the value, and read its output"
    if root in _EXPANDED:
        return f"write vars.{text}"
    if root == "loop":
        return "loop.output can be read in `while` only; elsewhere it is vars.loopPrevious"
    if root in ("env", "secrets"):
        return "give it as an input (--input NAME=VALUE), or to a command as a secret: env: {NAME: {env: NAME}}"
    if any(letter.isspace() for letter in text) or not segments:
        return None
    readable = all(map(_SEGMENT.fullmatch, segments))
    if root in ("tasks", "steps", "needs") and readable:
        rest = segments[2:] if segments[1:2] in (["output"], ["outputs"]) else segments[1:]
        return f"write {'.'.join(('tasks', segments[0], 'output', *rest))}"
    if root in (*_ROOTS, "tasks") and not readable:
        return "names in a path have letters from a to z, digits, _ and -; a value under another name cannot be read"
    return None


def _literal(text: str) -> Any:
    try:
        return parse_json(text)
    except JsonError:
        return text.strip("'\"")


def _comparison(operator: str, lookup: Evaluate, right: str, expression: str) -> Evaluate:
    if not right:
        raise TemplateError("unsupported", f"nothing stands to the right of {operator}", expression)
    literal = _literal(right)
    if operator == "==":
        return lambda scope: json_equal(lookup(scope), literal)
    if operator == "!=":
        return lambda scope: not json_equal(lookup(scope), literal)
    if type(literal) is not int and type(literal) is not float:
        raise TemplateError("unsupported", f"{operator} compares with a number only", expression)
    bound = _as_float(literal)

    def compare(scope: Scope) -> bool:
        value = lookup(scope)
        if type(value) is not int and type(value) is not float:
            shown = expression if len(expression) <= _SHOWN else f"{expression[:_SHOWN]}…"
            raise TemplateError("unsupported", f"{operator} needs a number on the left: {shown}", expression)
        number = _as_float(value)
        if operator == "<":
            return number < bound
        if operator == "<=":
            return number <= bound
        return number > bound if operator == ">" else number >= bound

    return compare


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _what_it_is(value: Any) -> str:
    """What could be read below a value: names only, since values may be anything, and only so many."""
    if type(value) is dict:
        names = sorted(value)
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        return f"has {', '.join(name[:_NAME] for name in names[:_NAMES])}{more}" if names else "is empty"
    kinds = {str: "text", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return f"is {kinds.get(type(value), 'null')}"


def _lookup(reference: Ref, expression: str) -> Evaluate:
    root, path = reference.root, reference.path
    first, rest = path[0], path[1:]

    def shown(place: int) -> str:
        parts = path[: place + 1] if root != "tasks" else (path[0], "output", *path[1 : place + 1])
        return ".".join((root, *parts))

    def missing(place: int) -> TemplateError:
        return TemplateError("undefined", f"{shown(place)} does not exist", expression)

    def step(value: Any) -> Any:
        for place, segment in enumerate(rest, 1):
            if type(value) is not dict or segment not in value:
                message = f"{shown(place)} does not exist: {shown(place - 1)} {_what_it_is(value)}"
                raise TemplateError("undefined", message, expression)
            value = value[segment]
        return value

    # One closure a root: the attribute look-up by name would cost as much as the whole evaluation.
    def from_inputs(scope: Scope) -> Any:
        try:
            value = scope.inputs[first]
        except KeyError:
            raise missing(0) from None
        return step(value) if rest else value

    def from_vars(scope: Scope) -> Any:
        try:
            value = scope.vars[first]
        except KeyError:
            raise missing(0) from None
        return step(value) if rest else value

    def from_memory(scope: Scope) -> Any:
        try:
            value = scope.memory[first]
        except KeyError:
            raise missing(0) from None
        return step(value) if rest else value

    def from_tasks(scope: Scope) -> Any:
        try:
            value = scope.tasks[first]
        except KeyError:
            raise missing(0) from None
        return step(value) if rest else value

    return {"inputs": from_inputs, "vars": from_vars, "memory": from_memory, "tasks": from_tasks}[root]
