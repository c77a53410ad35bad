"""Variables: their layers, the capture of their files, and which layer wins (contract 1.10).

From low to high: files and `vars` of the workflow, of the agent, of the task, then `--vars-file` and `--var` of the
command line. A higher layer replaces the whole value of a name. Everything but the `vars` that a task has inline is
data: what looks like a template in it is never rendered.

`capture` reads every file once, before compilation. What it has read travels with the document, is compiled from, and
is stored with the run; a file that changes later changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path as FilePath
from typing import Any

from agentctl.store.canonical import JsonError, check_value

from .definition import RESERVED_VARIABLES, Agent, LoadedDocument, Task
from .diagnostics import Diagnostic, DocumentError, Path
from .expressions import has_template
from .instructions import read_instructions
from .named_files import locate
from .yaml_document import YamlDocument, parse_document, read_bytes

MAX_FILES = 256
"""Most references to files of variables, those of the command line included."""

MAX_TOTAL_BYTES = 16 * 1_048_576
"""Most bytes of all these files, each counted as often as it is referred to."""

FORBIDDEN_NAMES = frozenset({"varsFiles", "include", "includes"})
"""Top-level names that a file of variables must not have: it cannot pull in others."""


@dataclass(frozen=True, slots=True)
class VariableFile:
    """A file as it was read. `name` is what it is called where it is referred to, `digest` is over its bytes."""

    name: str
    digest: str
    size: int
    source: YamlDocument

    @property
    def values(self) -> dict[str, Any]:
        """Its variables; nobody changes them."""
        values = self.source.value
        assert isinstance(values, dict)
        return values


def _merged(files: Iterable[VariableFile]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for item in files:
        values.update(item.values)
    return values


def _order(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Sorts paths of a document: indices as numbers."""
    return tuple((0, part, "") if isinstance(part, int) else (1, 0, part) for part in path)


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured: files by the object that names them (such as `("spec", "tasks", 2)`), and the command line."""

    files: Mapping[Path, tuple[VariableFile, ...]] = field(default_factory=dict)
    given_files: tuple[VariableFile, ...] = ()
    given_pairs: Mapping[str, Any] = field(default_factory=dict)
    instructions: Mapping[str, str] = field(default_factory=dict)
    """The texts of `instructionsFile`, by agent."""
    given: dict[str, Any] = field(init=False)
    """What the command line gives in all; it wins over all of the document."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", {**_merged(self.given_files), **self.given_pairs})

    def of_files(self, path: Path) -> dict[str, Any]:
        """The variables of the files that one object of the document names."""
        return _merged(self.files.get(path, ()))

    def is_empty(self) -> bool:
        """Whether all variables stand in the document itself."""
        return not (self.files or self.given_files or self.given_pairs or self.instructions)

    def as_json(self) -> dict[str, Any]:
        """The stored form. Names of files on the command line are left out: where they lie means nothing to a run."""
        declared = [
            {"at": list(path), "path": item.name, "digest": item.digest, "values": item.values}
            for path in sorted(self.files, key=_order)
            for item in self.files[path]
        ]
        given = [{"digest": item.digest, "values": item.values} for item in self.given_files]
        data = {"formatVersion": 1, "files": declared, "givenFiles": given, "given": dict(self.given_pairs)}
        return {**data, "instructions": dict(self.instructions)} if self.instructions else data


NOTHING = Captured()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a variable gets its value: the layer, and as far as known the place. Never the value."""

    layer: str
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of the envelope."""
        return {"layer": self.layer, "file": self.file, "line": self.line, "column": self.column}


# ---------------------------------------------------------------------- capture


def capture(
    document: LoadedDocument,
    *,
    workspace: FilePath | None = None,
    files: Sequence[str] = (),
    pairs: Mapping[str, Any] | None = None,
) -> LoadedDocument:
    """The document with all its variables captured. Raises `DocumentError` with every finding.

    `workspace` is the base of `policy.workspaceRoot`, the folder of the document otherwise. `files` and `pairs` are
    those of the command line; its files are relative to the working directory and may lie anywhere.
    """
    reader = _Reader(document, document.base_dir if workspace is None else workspace)
    declared = {path: tuple(reader.declared(path, names)) for path, names in _declarations(document)}
    given = tuple(reader.given(files))
    instructions = read_instructions(document, reader.found, workspace)
    values = dict(pairs or {})
    for name in sorted(RESERVED_VARIABLES.intersection(values)):
        reader.found.append(Diagnostic("schema_violation", f"--var {name}: {_RESERVED}", help="use another name"))
    try:
        check_value(values)
    except JsonError as error:
        reader.found.append(Diagnostic("schema_violation", f"--var: {error.message}"))
    if reader.found:
        raise DocumentError(reader.found)
    return replace(document, variables=Captured(declared, given, values, instructions))


def _declarations(document: LoadedDocument) -> Iterator[tuple[Path, list[str]]]:
    """Each object that names files, with the names."""
    spec = document.model.spec
    holders: list[tuple[Path, list[str]]] = [(("spec",), spec.vars_files)]
    holders += [(("spec", "agents", name), agent.vars_files) for name, agent in spec.agents.items()]
    holders += [(("spec", "tasks", i), task.vars_files) for i, task in enumerate(spec.tasks)]
    for name, sub in spec.subworkflows.items():
        holders += [(("spec", "subworkflows", name, "tasks", i), task.vars_files) for i, task in enumerate(sub.tasks)]
    return ((path, names) for path, names in holders if names)


_RESERVED = "the name is reserved for expansion"


class _Reader:
    """Reads files within the limits; collects what is wrong."""

    def __init__(self, document: LoadedDocument, workspace: FilePath) -> None:
        self.found: list[Diagnostic] = []
        self._document = document
        self._home = os.path.realpath(document.base_dir)
        self._workspace = os.path.realpath(os.path.join(workspace, document.model.spec.policy.workspace_root))
        self._known: dict[str, VariableFile | None] = {}
        self._count = 0
        self._bytes = 0
        self._full = False

    def declared(self, path: Path, names: Sequence[str]) -> Iterator[VariableFile]:
        """The files that one object of the document names. They lie in the workspace or beside the document."""
        for index, name in enumerate(names):
            place: Path = (*path, "varsFiles", index)
            resolved = self._resolve(name, place)
            if resolved is not None:
                # As a person would open it: names in a document start from its folder, messages from where we are.
                shown = os.path.join(os.path.dirname(self._document.file), name)
                item = self._read(name, resolved, resolved, place, shown)
                if item is not None:
                    yield item

    def given(self, names: Sequence[str]) -> Iterator[VariableFile]:
        """The files of the command line."""
        for name in names:
            item = self._read(name, name, f"given\0{name}", None)
            if item is not None:
                yield item

    def _resolve(self, name: str, place: Path) -> str | None:
        def report(code: str, message: str, help: str | None) -> None:
            self._report(code, message, place, help)

        elsewhere = "copy the file, or give it with --vars-file"
        return locate(name, "a variables file", self._home, self._workspace, elsewhere, report)

    def _read(
        self, name: str, file: str, key: str, place: Path | None, shown: str | None = None
    ) -> VariableFile | None:
        self._count += 1
        if self._count == MAX_FILES + 1:
            self._report("schema_violation", f"more than {MAX_FILES} variables files are named", place)
            return None
        if self._count > MAX_FILES or self._full:
            return None
        if key not in self._known:
            self._known[key] = self._open(shown or name, file, place)
        item = self._known[key]
        if item is None:
            return None
        self._bytes += item.size
        if self._bytes > MAX_TOTAL_BYTES:
            self._full = True
            message = f"all variables files together have more than {MAX_TOTAL_BYTES} bytes"
            self._report("schema_violation", message, place)
            return None
        return replace(item, name=name)

    def _open(self, name: str, file: str, place: Path | None) -> VariableFile | None:
        try:
            data = read_bytes(FilePath(file), name)
            source = parse_document(data, name, as_json=file.lower().endswith(".json"))
        except DocumentError as error:
            for item in error.diagnostics:
                if item.line is None and place is not None:
                    # Nothing in the file is to blame: the finding belongs to where it is named.
                    self._report(item.code, f"{name!r}: {item.message}", place, item.help)
                else:
                    self.found.append(item)
            return None
        if not isinstance(source.value, dict):
            message, hint = "a variables file is a mapping of names to values", "for example `region: eu`"
            self.found.append(source.diagnostic("schema_violation", message, (), help=hint))
            return None
        for key in source.value:
            if key in FORBIDDEN_NAMES:
                message = f"a variables file cannot have {key!r} at its top: it names no other files"
                hint = "name all files in varsFiles or with --vars-file"
                self.found.append(source.diagnostic("schema_violation", message, (key,), key=True, help=hint))
            elif key in RESERVED_VARIABLES:
                message = f"the variable {key}: {_RESERVED}"
                hint = "use another name"
                self.found.append(source.diagnostic("schema_violation", message, (key,), key=True, help=hint))
        return VariableFile(name, sha256(data).hexdigest(), len(data), source)

    def _report(self, code: str, message: str, place: Path | None, help: str | None = None) -> None:
        if place is None:
            self.found.append(Diagnostic(code, message, help=help))
        else:
            self.found.append(self._document.source.diagnostic(code, message, place, help=help))


# ---------------------------------------------------------------------- layers


def of_document(document: LoadedDocument) -> Captured:
    """What was captured for a document. Raises `ValueError` when it names files and nobody has captured them."""
    if document.variables is not None:
        return document.variables
    agents = document.model.spec.agents.values()
    if any(True for _ in _declarations(document)) or any(agent.instructions_file is not None for agent in agents):
        raise ValueError("the variables and instructions of this document were not captured")
    return NOTHING


def instructions_of(document: LoadedDocument, agent: str) -> str:
    """The system text of an agent, templates not rendered. `ValueError` as for `of_document`."""
    text = document.model.spec.agents[agent].instructions
    return of_document(document).instructions[agent] if text is None else text


def workflow_variables(document: LoadedDocument) -> dict[str, Any]:
    """The variables that every task sees, all of them data."""
    captured = of_document(document)
    return {**captured.of_files(("spec",)), **document.model.spec.vars, **captured.given}


def task_variables(
    document: LoadedDocument, captured: Captured, path: Path, task: Task
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A task's own variables, and the names of those that are data although they look like templates.

    They win over those of the workflow; names that the command line gives are left out, because it wins over them.
    `captured` is what was captured for the document.
    """
    data: dict[str, Any] = {}
    agent = _agent_of(document, task)
    if agent is not None:
        data = {**captured.of_files(("spec", "agents", agent[0])), **agent[1].vars}
    data = {**data, **captured.of_files(path)}
    given = captured.given
    if not data and not (given and task.vars):
        return task.vars, ()
    own = {name: value for name, value in {**data, **task.vars}.items() if name not in given}
    looks = (name for name in own if name not in task.vars and has_template(own[name]))
    return own, tuple(sorted(looks))


def recorded_workflow(workflow: dict[str, Any], document: LoadedDocument) -> dict[str, Any]:
    """What is stored, and what the workflow digest is taken over: the workflow together with what was captured."""
    captured = of_document(document)
    if captured.is_empty():
        return workflow
    spec = {**workflow["spec"], "vars": workflow_variables(document)}
    return {**workflow, "spec": spec, "sourceSnapshot": captured.as_json()}


def _agent_of(document: LoadedDocument, task: Task) -> tuple[str, Agent] | None:
    kind, _, name = task.uses.partition(":")
    agent = document.model.spec.agents.get(name) if kind == "agent" else None
    return None if agent is None else (name, agent)


# ---------------------------------------------------------------------- origins


def workflow_origins(document: LoadedDocument) -> dict[str, list[Origin]]:
    """For each variable that all tasks see where it is set, the winner last."""
    found: dict[str, list[Origin]] = {}
    _add_layer(document, found, "workflow", ("spec",), document.model.spec.vars)
    _add_given(document, found)
    return found


def task_origins(document: LoadedDocument, path: Path, task: Task) -> dict[str, list[Origin]]:
    """The same for one task: also its agent's layer, its own, and what an expansion binds."""
    found: dict[str, list[Origin]] = {}
    _add_layer(document, found, "workflow", ("spec",), document.model.spec.vars)
    agent = _agent_of(document, task)
    if agent is not None:
        _add_layer(document, found, "agent", ("spec", "agents", agent[0]), agent[1].vars)
    _add_layer(document, found, "task", path, task.vars)
    _add_given(document, found)
    bound: list[tuple[str, Path]] = []
    if task.foreach is not None:
        bound = [(task.foreach.as_, (*path, "foreach", "items")), ("foreachIndex", (*path, "foreach"))]
    elif task.matrix is not None:
        bound = [("matrix", (*path, "matrix", "axes")), ("matrixIndex", (*path, "matrix"))]
    elif task.loop is not None:
        bound = [("loopPrevious", (*path, "loop")), ("loopIndex", (*path, "loop"))]
    for name, place in bound:
        found.setdefault(name, []).append(_place(document.source, "expansion", place))
    return found


def _add_layer(
    document: LoadedDocument, found: dict[str, list[Origin]], layer: str, path: Path, inline: Mapping[str, Any]
) -> None:
    for item in of_document(document).files.get(path, ()):
        for name in item.values:
            found.setdefault(name, []).append(_place(item.source, f"{layer} varsFiles", (name,)))
    for name in inline:
        found.setdefault(name, []).append(_place(document.source, f"{layer} vars", (*path, "vars", name)))


def _add_given(document: LoadedDocument, found: dict[str, list[Origin]]) -> None:
    captured = of_document(document)
    for item in captured.given_files:
        for name in item.values:
            found.setdefault(name, []).append(_place(item.source, "--vars-file", (name,)))
    for name in captured.given_pairs:
        found.setdefault(name, []).append(Origin("--var"))


def _place(source: YamlDocument, layer: str, path: Path) -> Origin:
    line, column = source.locate(path, key=True)
    return Origin(layer, source.file, line, column)
