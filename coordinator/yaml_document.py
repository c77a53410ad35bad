"""Reading a YAML or JSON file strictly, with the place of every value.

The rules (contract table row 16, field report 20):

* Regular files only, at most `MAX_BYTES`; a FIFO or a device is refused without waiting for it. UTF-8; a
  byte order mark at the start is accepted and dropped.
* Scalars follow the core schema of YAML 1.2, so `no`, `on`, `12:30` and dates are text.
* A plain scalar is a number only when the number's canonical JSON text is the scalar itself. `1.10`,
  `0123456`, `12e10`, `0x1F`, `+1` look like numbers but would lose their spelling: they are refused
  everywhere with a hint to quote them (text) or to spell the number canonically. `.nan` and `.inf` are
  refused. Integers are exact.
* Keys are text and unique. Merge keys (`<<`) are not part of YAML 1.2 and are refused, which also rules
  out duplicates that they would hide. Tags other than `!!str`, `!!seq`, `!!map` are refused. One document
  a file.
* Aliases are bounded by what they expand to, so that a small file cannot become a huge value.
* A file whose name ends in `.json` is JSON: there a number says by its syntax that it is one, so `1.10`
  is 1.1.
"""

from __future__ import annotations

import gc
import json
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from agentctl.store.canonical import MAX_DEPTH, Json
from agentctl.store.filesystem import belongs_to_open_database

from .diagnostics import Diagnostic, DocumentError, dotted

MAX_BYTES = 1_048_576
"""Largest document, in bytes (contract 1.1)."""

MAX_NODES = 1_000_000
"""Most values a document may have after every alias is expanded."""

MAX_CHARACTERS = 16 * 1_048_576
"""Most characters of text a document may have after every alias is expanded."""

MAX_DIGITS = 1_000
"""Longest integer, in digits."""

_CONSTANTS: dict[str, Json] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_NUMBER_START = frozenset("+-.0123456789")
_EXACT_INTEGER = re.compile(r"-?[1-9][0-9]*|0")
_CORE_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_CORE_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"


class _Ambiguous(Exception):
    """A plain scalar that must not become a value; carries message and help."""

    def __init__(self, message: str, help_text: str) -> None:
        super().__init__(message)
        self.message = message
        self.help = help_text


class YamlDocument:
    """The value of a file, and where each part of it stands.

    `value` may share sub-values (aliases), so nobody may change it.
    """

    __slots__ = ("_place", "_root", "_spots", "file", "value")

    def __init__(
        self,
        file: str,
        value: Json,
        spots: dict[int, Any],
        root: Any,
        place: Callable[[Any], tuple[int, int]],
    ) -> None:
        self.file = file
        self.value = value
        self._spots = spots
        self._root = root
        self._place = place

    def locate(self, path: Sequence[str | int], *, key: bool = False) -> tuple[int, int]:
        """Line and column (from 1) of the value at `path`, or of its key; of the deepest part that exists."""
        value: Any = self.value
        mark = self._root
        last = len(path) - 1
        for depth, part in enumerate(path):
            spots = self._spots.get(id(value))
            if isinstance(value, dict) and spots is not None and part in value:
                key_mark, value_mark = spots[part]
                mark = key_mark if key and depth == last else value_mark
                value = value[str(part)]
            elif isinstance(value, list) and spots is not None and isinstance(part, int) and part < len(value):
                mark = spots[part]
                value = value[part]
            else:
                break
        return self._place(mark)

    def diagnostic(
        self,
        code: str,
        message: str,
        path: Sequence[str | int],
        *,
        help: str | None = None,
        key: bool = False,
        severity: str = "error",
    ) -> Diagnostic:
        """A finding at `path` of this document."""
        line, column = self.locate(path, key=key)
        return Diagnostic(
            code, message, severity=severity, file=self.file, line=line, column=column,
            path=dotted(path) or None, help=help,
        )  # fmt: skip


def read_document(path: Path, *, name: str | None = None) -> YamlDocument:
    """Read a file. `name` is what messages call it (the path as given, otherwise). Raises `DocumentError`."""
    file = name if name is not None else str(path)
    return parse_document(read_bytes(path, file), file, as_json=str(path).lower().endswith(".json"))


def parse_document(data: bytes, file: str, *, as_json: bool = False) -> YamlDocument:
    """Read a document from memory, by the rules of this module. Raises `DocumentError`."""
    if len(data) > MAX_BYTES:
        _refuse(file, "schema_violation", f"the document has more than {MAX_BYTES} bytes", help=_TOO_LARGE)
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _line_and_column(data, error.start)
        _refuse(
            file,
            "yaml_syntax",
            f"not UTF-8: byte 0x{data[error.start]:02x}",
            line,
            column,
            "save the file as UTF-8",
        )
    nul = text.find("\0")
    if nul >= 0:
        line, column = text.count("\n", 0, nul) + 1, nul - text.rfind("\n", 0, nul)
        _refuse(file, "yaml_syntax", "a NUL character: this is not a text file", line, column)
    with collector_paused():
        return _parse_json(text, file) if as_json else _parse_yaml(text, file)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold back the garbage collector while many small objects are made that all stay.

    Each collection in between would walk them again and free nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_NOT_A_FILE = "give the name of a file; what comes from a pipe has to be saved first"
_TOO_LARGE = "large values belong into `--inputs-file`, or into files that tasks read"


def read_bytes(path: Path, file: str) -> bytes:
    """The bytes of a regular file within the size limit; `file` is its name in messages. Raises `DocumentError`."""
    try:
        if belongs_to_open_database(os.stat(path)):
            _refuse(file, "missing_reference", "it belongs to the database", help=_NOT_A_FILE)
        # O_NONBLOCK: opening a FIFO that nobody writes would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        _refuse(file, "missing_reference", "no such file")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _refuse(file, "missing_reference", f"cannot be opened: {reason}")
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            kind = "a directory" if stat.S_ISDIR(state.st_mode) else "not a regular file"
            _refuse(file, "missing_reference", f"is {kind}", help=_NOT_A_FILE)
        if state.st_size > MAX_BYTES:
            message = f"the document has {state.st_size} bytes, more than {MAX_BYTES}"
            _refuse(file, "schema_violation", message, help=_TOO_LARGE)
        parts: list[bytes] = []
        size = 0
        while size <= MAX_BYTES:
            part = os.read(descriptor, MAX_BYTES + 1 - size)
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)
    except OSError as error:
        _refuse(file, "missing_reference", f"cannot be read: {error.strerror}")
    finally:
        os.close(descriptor)


def _line_and_column(data: bytes, offset: int) -> tuple[int, int]:
    start = data.rfind(b"\n", 0, offset) + 1
    return data.count(b"\n", 0, offset) + 1, len(data[start:offset].decode("utf-8", "replace")) + 1


def _refuse(
    file: str,
    code: str,
    message: str,
    line: int | None = None,
    column: int | None = None,
    help: str | None = None,
) -> NoReturn:
    raise DocumentError([Diagnostic(code, message, file=file, line=line, column=column, help=help)])


# ---------------------------------------------------------------------- scalars


def resolve_plain(text: str) -> Json:
    """The value of a plain YAML scalar. Raises `_Ambiguous` for what must be quoted or spelled otherwise."""
    if text[:1] in _NUMBER_START:
        if _EXACT_INTEGER.fullmatch(text):
            if len(text) > MAX_DIGITS:
                raise _Ambiguous(f"an integer of {len(text)} characters is too long", "quote it to keep it as text")
            return int(text)
        if _CORE_FLOAT.fullmatch(text) or _CORE_INTEGER.fullmatch(text):
            return _exact_float(text)
        if _NOT_FINITE.fullmatch(text):
            raise _Ambiguous(f"{text} is not a number that JSON can carry", f'quote it if text is meant: "{text}"')
        return text
    return _CONSTANTS.get(text, text) if len(text) <= 5 else text


def _exact_float(text: str) -> float:
    if len(text) <= MAX_DIGITS:
        number: float | int
        try:
            number = int(text, 0) if text[1:2] in "ox" and text[:1] == "0" else int(text)
        except ValueError:
            number = float(text)
        spelled = repr(number)
        if spelled == text and isinstance(number, float):
            return number
        hint = f'quote it if text is meant: "{text}"'
        if spelled not in ("inf", "-inf"):
            hint += f"; write {spelled} if the number is meant"
        raise _Ambiguous(f"{text} is neither clearly a number nor clearly text", hint)
    raise _Ambiguous("a number of that many characters is too long", "quote it to keep it as text")


# ---------------------------------------------------------------------- YAML


class _Frame:
    """An open mapping or sequence. `nodes` and `characters` are the totals when it was opened."""

    __slots__ = ("anchor", "characters", "container", "height", "key", "key_mark", "nodes", "spots", "start")

    def __init__(self, container: Any, spots: Any, anchor: str | None, start: Any, nodes: int, characters: int) -> None:
        self.container = container
        self.spots = spots
        self.anchor = anchor
        self.start = start
        self.nodes = nodes
        self.characters = characters
        self.key: Any = None
        self.key_mark: Any = None
        self.height = 1


def _mark_place(mark: Any) -> tuple[int, int]:
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _parse_yaml(text: str, file: str) -> YamlDocument:
    import yaml

    loader_class: Any = getattr(yaml, "CSafeLoader", None) or yaml.SafeLoader
    builder = _YamlBuilder(file)
    try:
        parser = loader_class(text)
        try:
            return builder.build(parser)
        finally:
            parser.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = _mark_place(mark) if mark is not None else (None, None)
        message = error.problem or "not YAML"
        if error.context:
            message = f"{error.context}: {message}"
        help_text = None
        if line is not None and "\t" in _indentation(text, line):
            help_text = "YAML is indented with spaces, never with tabs"
        elif line is not None and _has_bare_template(_line(text, line)):
            help_text = 'a template inside of { } or [ ] stands in quotes: "${{ … }}"'
        builder.found.append(Diagnostic("yaml_syntax", message, file=file, line=line, column=column, help=help_text))
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
        builder.found.append(
            Diagnostic("yaml_syntax", f"a character that YAML does not allow: {error.reason}",
                       file=file, line=line, column=column)
        )  # fmt: skip
    except yaml.YAMLError as error:
        builder.found.append(Diagnostic("yaml_syntax", str(error), file=file))
    raise DocumentError(builder.found)


_QUOTED = re.compile(r"""\"[^"]*\"|'[^']*'""")


def _has_bare_template(line: str) -> bool:
    """Whether a template stands without quotes where YAML takes its braces for mappings."""
    before, template, _ = _QUOTED.sub("", line[:4096]).partition("${{")
    return bool(template) and ("{" in before or "[" in before)


def _line(text: str, line: int) -> str:
    lines = text.split("\n", line)
    return lines[line - 1] if line <= len(lines) else ""


def _indentation(text: str, line: int) -> str:
    content = _line(text, line)
    return content[: len(content) - len(content.lstrip())]


class _YamlBuilder:
    """Builds the value from parser events; no YAML node objects in between."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Diagnostic] = []

    def report(self, mark: Any, message: str, help_text: str | None = None, code: str = "yaml_syntax") -> None:
        line, column = _mark_place(mark)
        self.found.append(Diagnostic(code, message, file=self.file, line=line, column=column, help=help_text))
        if len(self.found) > 50:
            raise DocumentError(self.found)

    def stop(self, mark: Any, message: str, help_text: str | None = None) -> NoReturn:
        self.report(mark, message, help_text)
        raise DocumentError(self.found)

    def build(self, parser: Any) -> YamlDocument:
        from yaml import events as kinds

        scalar, alias = kinds.ScalarEvent, kinds.AliasEvent
        map_start, list_start = kinds.MappingStartEvent, kinds.SequenceStartEvent
        map_end, list_end = kinds.MappingEndEvent, kinds.SequenceEndEvent
        get_event = parser.get_event
        spots: dict[int, Any] = {}
        anchors: dict[str, tuple[Any, int, int, int] | None] = {}
        stack: list[_Frame] = []
        frame: _Frame | None = None
        root: Any = None
        root_mark: Any = None
        nodes = characters = documents = 0
        while True:
            event = get_event()
            kind = type(event)
            if kind is scalar:
                mark = event.start_mark
                text = event.value
                value: Any = text
                nodes += 1
                characters += len(text)
                if event.tag is not None or event.style or text[:1] in _NUMBER_START or text in _CONSTANTS:
                    value = self.scalar(event)
                if event.anchor:
                    anchors[event.anchor] = (value, 1, len(text), 0)
            elif kind is map_start or kind is list_start:
                mark = event.start_mark
                mapping = kind is map_start
                if event.tag is not None:
                    self.check_tag(event, mapping)
                container: Any = {} if mapping else []
                place: Any = {} if mapping else []
                spots[id(container)] = place
                if event.anchor:
                    anchors[event.anchor] = None
                if mapping and frame is not None and frame.key_mark is None and type(frame.container) is dict:
                    self.stop(mark, "a key must be text", "only text can be a key")
                nodes += 1
                frame = _Frame(container, place, event.anchor, mark, nodes - 1, characters)
                stack.append(frame)
                if len(stack) > MAX_DEPTH:
                    self.stop(mark, f"nesting is deeper than {MAX_DEPTH} levels")
                continue
            elif kind is map_end or kind is list_end:
                closed = stack.pop()
                value, mark = closed.container, closed.start
                if closed.anchor:
                    size = (nodes - closed.nodes, characters - closed.characters)
                    anchors[closed.anchor] = (value, *size, closed.height)
                frame = stack[-1] if stack else None
                if frame is not None and closed.height >= frame.height:
                    frame.height = closed.height + 1
            elif kind is alias:
                mark = event.start_mark
                value, more_nodes, more_characters, height = self.anchored(anchors, event)
                nodes += more_nodes
                characters += more_characters
                if frame is not None and height >= frame.height:
                    frame.height = height + 1
                if len(stack) + height > MAX_DEPTH:
                    self.stop(mark, f"nesting is deeper than {MAX_DEPTH} levels")
                if nodes > MAX_NODES or characters > MAX_CHARACTERS:
                    limits = f"at most {MAX_NODES} values and {MAX_CHARACTERS} characters"
                    self.stop(mark, "the aliases expand to too much", limits)
            elif kind is kinds.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    self.stop(event.start_mark, "a second document in one file", "keep one workflow a file")
                continue
            elif kind is kinds.StreamEndEvent:
                break
            else:
                continue

            if frame is None:
                root, root_mark = value, mark
            elif type(frame.container) is list:
                frame.container.append(value)
                frame.spots.append(mark)
            elif frame.key_mark is None:
                frame.key_mark = mark
                if type(value) is not str or value == "<<":
                    value = self.key(value, event, mark, kind is scalar)
                frame.key = value
                if value in frame.spots:
                    self.twice(value, mark, frame.spots[value][0])
            else:
                frame.container[frame.key] = value
                frame.spots[frame.key] = (frame.key_mark, mark)
                frame.key_mark = None
        if self.found:
            raise DocumentError(self.found)
        if documents == 0:
            hint = "write a workflow into it; `agentctl schema` prints what one may contain"
            _refuse(self.file, "yaml_syntax", "the file has no document in it", 1, 1, hint)
        return YamlDocument(self.file, root, spots, root_mark, _mark_place)

    def anchored(self, anchors: dict[str, tuple[Any, int, int, int] | None], event: Any) -> tuple[Any, int, int, int]:
        """What an alias stands for: value, number of values, of characters, and height."""
        if event.anchor not in anchors:
            self.stop(event.start_mark, f"the alias *{event.anchor} has no anchor before it")
        known = anchors[event.anchor]
        if known is None:
            self.stop(event.start_mark, f"the alias *{event.anchor} stands inside its own anchor")
        return known

    def twice(self, key: str, mark: Any, earlier: Any) -> None:
        line, column = _mark_place(earlier)
        self.report(
            mark,
            f"the key {key!r} stands twice in one mapping; the first is at {line}:{column}",
            "remove or rename one of the two",
        )

    def scalar(self, event: Any) -> Json:
        text: str = event.value
        tag = event.tag
        if tag is not None and tag not in ("!", _TAG + "str"):
            self.report(event.start_mark, f"the tag {_short_tag(tag)} is not supported", "remove the tag")
            return text
        if event.implicit[0] and not event.style and tag is None:
            try:
                return resolve_plain(text)
            except _Ambiguous as problem:
                self.report(event.start_mark, problem.message, problem.help, "schema_violation")
                return text
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                self.report(event.start_mark, "text contains a lone surrogate, which UTF-8 cannot carry")
                return ""
        return text

    def check_tag(self, event: Any, mapping: bool) -> None:
        wanted = _TAG + ("map" if mapping else "seq")
        if event.tag not in ("!", wanted):
            self.report(event.start_mark, f"the tag {_short_tag(event.tag)} is not supported", "remove the tag")

    def key(self, value: Any, event: Any, mark: Any, scalar: bool) -> str:
        if type(value) is not str:
            shown = event.value if scalar else type(value).__name__
            hint = f'quote it: "{shown}"' if scalar else "only text can be a key"
            self.report(mark, f"the key {shown} is not text", hint)
            return f"\0{mark.index}"
        if value == "<<" and scalar and not event.style:
            self.stop(mark, "merge keys (<<) are not part of YAML 1.2", "write the fields out where they are needed")
        return value


def _short_tag(tag: str) -> str:
    return "!!" + tag[len(_TAG) :] if tag.startswith(_TAG) else tag


# ---------------------------------------------------------------------- JSON

_TOKEN = re.compile(
    r"[ \t\n\r]*(?:(?P<text>\"(?:[^\"\\]|\\.)*\")|(?P<mark>[{}\[\]:,])"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?P<rest>(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9A-Za-z]))"
    r"|(?P<word>true|false|null))"
)


def _parse_json(text: str, file: str) -> YamlDocument:
    """JSON proper: the standard parser judges the syntax, this one builds values with their places."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(offset: int) -> tuple[int, int]:
        row = bisect_right(starts, offset) - 1
        return row + 1, offset - starts[row] + 1

    def refuse(offset: int, message: str, code: str = "yaml_syntax", help_text: str | None = None) -> NoReturn:
        line, column = place(offset)
        _refuse(file, code, message, line, column, help_text)

    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        refuse(error.pos, f"not JSON: {error.msg}")
    except RecursionError:
        _refuse(file, "yaml_syntax", f"nesting is deeper than {MAX_DEPTH} levels")
    except ValueError:
        _refuse(file, "schema_violation", "an integer is too long", help="quote it to keep it as text")

    spots: dict[int, Any] = {}
    stack: list[tuple[Any, Any, int]] = []
    keys: list[tuple[str, int] | None] = []
    root: Any = None
    root_mark = 0
    offset, end = 0, len(text.rstrip(" \t\n\r"))
    while offset < end:
        match = _TOKEN.match(text, offset)
        if match is None:
            start = len(text) - len(text[offset:].lstrip())
            refuse(start, "not a JSON value (NaN and Infinity cannot be carried)")
        offset = match.end()
        group = match.lastgroup
        sign = match["mark"]
        if sign is not None and sign in ":,":
            continue
        if sign is not None and sign in "{[":
            container: Any = {} if sign == "{" else []
            table: Any = {} if sign == "{" else []
            spots[id(container)] = table
            stack.append((container, table, match.start("mark")))
            keys.append(None)
            if len(stack) > MAX_DEPTH:
                refuse(match.start("mark"), f"nesting is deeper than {MAX_DEPTH} levels")
            continue
        value: Any
        if sign is not None:
            value, _, mark = stack.pop()
            keys.pop()
        else:
            mark = match.start(group if group in ("text", "word") else "number")
            token = text[mark:offset]
            value = json.loads(token)
            if isinstance(value, str):
                if "\\" in token:
                    try:
                        value.encode("utf-8")
                    except UnicodeEncodeError:
                        refuse(mark, "text contains a lone surrogate, which UTF-8 cannot carry")
            elif isinstance(value, float) and value in (float("inf"), float("-inf")):
                refuse(mark, f"{token} is out of range", "schema_violation")
            elif isinstance(value, int) and len(token) > MAX_DIGITS:
                refuse(mark, "an integer is too long", "schema_violation", "quote it to keep it as text")
        if not stack:
            root, root_mark = value, mark
            continue
        container, table, _ = stack[-1]
        if isinstance(container, list):
            container.append(value)
            table.append(mark)
        elif keys[-1] is None:
            if value in table:
                line, column = place(table[value][0])
                refuse(mark, f"the key {value!r} stands twice in one object; the first is at {line}:{column}")
            keys[-1] = (value, mark)
        else:
            name, key_mark = keys[-1]
            container[name] = value
            table[name] = (key_mark, mark)
            keys[-1] = None
    return YamlDocument(file, root, spots, root_mark, place)
