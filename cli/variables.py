"""Variables and inputs of the command line, beyond reading them: the options, and which inputs a document knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from agentctl.store.errors import UsageError

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.diagnostics import Diagnostic

_Command = TypeVar("_Command", bound=Callable[..., Any])


def variable_options(function: _Command) -> _Command:
    """`--vars-file` and `--var`, given as `vars_files` and `var_pairs`."""
    for option in (
        click.option(
            "--var",
            "var_pairs",
            multiple=True,
            metavar="KEY=JSON",
            help="One variable; wins over all other places. Text is JSON, too: --var 'name=\"Ada\"'.",
        ),
        click.option(
            "--vars-file",
            "vars_files",
            type=click.Path(),
            multiple=True,
            metavar="FILE",
            help="Variables from a YAML or JSON file; wins over the document, the later file over the earlier.",
        ),
    ):
        function = option(function)
    return function


def read_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """The variables of `--var`, the later one wins. Raises `UsageError` for whatever is not KEY=JSON."""
    from agentctl.store.canonical import JsonError, parse_json

    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--var {pair!r} is not KEY=JSON", remedy="for example --var replicas=3")
        try:
            key.encode("utf-8")
            values[key] = parse_json(text)
        except UnicodeEncodeError as error:
            raise UsageError(f"--var {key!r}: the name is not UTF-8") from error
        except JsonError as error:
            raise UsageError(f"--var {key}: {error.message}", remedy=_remedy(key, text)) from error
    return values


def _remedy(key: str, text: str) -> str:
    try:
        quoted = json.dumps(text, ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "the value must be JSON"
    if text[:1] in "{[\"'" or not text.isprintable() or "'" in text:
        return "the value must be JSON; text stands in double quotes"
    return f"the value must be JSON; if text is meant: --var '{key}={quoted}'"


# ---------------------------------------------------------------------- inputs


def unknown_inputs(document: LoadedDocument, given: Mapping[str, Any], pairs: Sequence[str]) -> list[Diagnostic]:
    """Findings about inputs that the workflow neither declares nor reads, so that they could not have any effect.

    Inputs are no schema (contract 1.3), and whoever starts several workflows may give all of them the same: a warning.
    A name of `--input` that is nearly one that the workflow has is a slip of the pen: an error.
    """
    unknown = given.keys() - document.model.spec.inputs.keys()
    if unknown:
        unknown -= _read_names(document.workflow, "inputs")
    if not unknown:
        return []
    from agentctl.coordinator.diagnostics import Diagnostic, did_you_mean

    named = {pair.partition("=")[0] for pair in pairs}
    known = sorted(document.model.spec.inputs.keys() | _read_names(document.workflow, "inputs"))
    listed = "it has none" if not known else f"it has {', '.join(known[:40])}"
    found = []
    for name in sorted(unknown):
        near = did_you_mean(name, known)
        odd = _unreachable(name)
        severity = "error" if (near is not None or odd) and name in named else "warning"
        message = f"the workflow has no input {name!r}, so it has no effect; {listed}"
        if odd:
            message = f"no template can read an input of the name {name!r}, so it has no effect; {listed}"
        hint = near or (_NAMES if odd else "") or "leave it out, or read it in a template: ${{ inputs.NAME }}"
        found.append(Diagnostic("schema_violation", message, severity=severity, file=document.file, help=hint))
    return found


def unknown_variables(document: LoadedDocument) -> list[Diagnostic]:
    """Findings about variables of the command line that could not have any effect: nobody declares or reads them.

    As with inputs, a name of `--var` that is nearly a known one is an error, and so is one that no template can
    spell. Anything else is a warning; files may serve several workflows.
    """
    captured = document.variables
    if captured is None or not captured.given:
        return []
    from agentctl.coordinator.diagnostics import Diagnostic, did_you_mean

    known = _declared_variables(document) | _read_names(document.workflow, "vars")
    found = []
    for name in sorted(captured.given_pairs.keys() - known):
        near = did_you_mean(name, known)
        odd = _unreachable(name)
        severity = "error" if near is not None or odd else "warning"
        message = f"--var {name}: the workflow has no variable {name!r}, so it has no effect"
        if odd:
            message = f"--var {name!r}: no template can read a variable of this name"
        hint = near or (_NAMES if odd else "leave it out, or read it in a template: ${{ vars.NAME }}")
        found.append(Diagnostic("schema_violation", message, severity=severity, file=document.file, help=hint))
    for item in captured.given_files:
        unknown = sorted(item.values.keys() - known)
        if unknown:
            listed = ", ".join(repr(name) for name in unknown[:10]) + (" …" if len(unknown) > 10 else "")
            message = f"the workflow neither declares nor reads {listed}, so that has no effect"
            hint = did_you_mean(unknown[0], known) or "leave it out, or read it in a template: ${{ vars.NAME }}"
            found.append(Diagnostic("schema_violation", message, severity="warning", file=item.name, help=hint))
    return found


def unreachable_names(document: LoadedDocument) -> list[Diagnostic]:
    """Warnings about inputs and variables of a document whose names no template can spell."""
    spec = document.model.spec
    holders: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = [
        (("spec", "inputs"), spec.inputs),
        (("spec", "vars"), spec.vars),
    ]
    holders += [(("spec", "tasks", i, "vars"), task.vars) for i, task in enumerate(spec.tasks)]
    for name, sub in spec.subworkflows.items():
        holders.append((("spec", "subworkflows", name, "inputs"), sub.inputs))
        place = ("spec", "subworkflows", name, "tasks")
        holders += [((*place, i, "vars"), task.vars) for i, task in enumerate(sub.tasks)]
    found = []
    for path, values in holders:
        for name in filter(_unreachable, values):
            message = f"no template can read the name {name!r}"
            found.append(
                document.source.diagnostic(
                    "schema_violation", message, (*path, name), key=True, severity="warning", help=_NAMES
                )
            )
    return found


_NAMES = "a name that is read has letters, digits, _ and - only"


def _unreachable(name: str) -> bool:
    import re

    return re.fullmatch(r"[A-Za-z0-9_-]+", name) is None


def _declared_variables(document: LoadedDocument) -> set[str]:
    """The names of all layers below the command line."""
    spec, captured = document.model.spec, document.variables
    tasks = [*spec.tasks, *(task for sub in spec.subworkflows.values() for task in sub.tasks)]
    names = {name for holder in (spec.vars, *(agent.vars for agent in spec.agents.values())) for name in holder}
    names.update(name for task in tasks for name in task.vars)
    for files in captured.files.values() if captured is not None else ():
        names.update(name for item in files for name in item.values)
    return names


def _read_names(workflow: Any, root: str) -> set[str]:
    """The names that templates and conditions read. Text that only looks like it counts, too."""
    import re

    pattern = re.compile(rf"\b{root}\.([A-Za-z0-9_-]+)")
    return {name for text in _texts(workflow) if f"{root}." in text for name in pattern.findall(text)}


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is str:
            yield item
        elif type(item) is dict:
            pending.extend(item.values())
        elif type(item) is list:
            pending.extend(item)
