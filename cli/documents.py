"""Verbs about documents, and how a run gets its inputs. Nothing here opens a database (contract 4.12)."""

from __future__ import annotations

import codecs
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from agentctl.store.errors import EnvironmentFault, UsageError
from agentctl.store.filesystem import belongs_to_open_database

from .main import Settings, Verb, pass_settings
from .render import Printer, clean, print_error, warn_findings
from .variables import read_pairs, unknown_inputs, unknown_variables, unreachable_names, variable_options

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.diagnostics import Diagnostic
    from agentctl.coordinator.plan import Plan

MAX_INPUTS = 1 << 20
"""Most bytes of the inputs on the command line."""

MAX_INPUTS_FILE = 16 << 20
"""Most bytes of an inputs file."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


def input_options(function: _Command) -> _Command:
    """`--input`, `--inputs` and `--inputs-file`, given as `pairs`, `inputs_text` and `inputs_file`."""
    for option in (
        click.option("--inputs-file", type=click.Path(), metavar="FILE", help="Inputs as a JSON file; - is stdin."),
        click.option("--inputs", "inputs_text", metavar="JSON", help="Inputs as a JSON object."),
        click.option(
            "--input",
            "pairs",
            multiple=True,
            metavar="KEY=VALUE",
            help="One input; VALUE is read as JSON, or kept as text. Wins over --inputs.",
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class Sources:
    """What a command line says of inputs and variables (`source_options`)."""

    pairs: tuple[str, ...] = ()
    inputs_text: str | None = None
    inputs_file: str | None = None
    vars_files: tuple[str, ...] = ()
    var_pairs: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether it says anything."""
        return self != Sources()

    def inputs(self) -> dict[str, Any]:
        """The inputs; see `read_inputs`."""
        return read_inputs(self.pairs, self.inputs_text, self.inputs_file)


def source_options(function: Callable[..., None]) -> Callable[..., None]:
    """`--input`, `--inputs`, `--inputs-file`, `--vars-file` and `--var`, given as one `sources`."""

    @wraps(function)
    def gathering(
        *arguments: Any,
        pairs: tuple[str, ...],
        inputs_text: str | None,
        inputs_file: str | None,
        vars_files: tuple[str, ...],
        var_pairs: tuple[str, ...],
        **rest: Any,
    ) -> None:
        function(*arguments, sources=Sources(pairs, inputs_text, inputs_file, vars_files, var_pairs), **rest)

    return input_options(variable_options(gathering))


def read_inputs(pairs: Sequence[str], text: str | None, file: str | None) -> dict[str, Any]:
    """The inputs of the command line: `--inputs` or `--inputs-file`, and over them each `--input` (contract 4.12).

    Raises `UsageError` for whatever is no JSON object, is too large, or cannot be read.
    """
    if text is not None and file is not None:
        raise UsageError("--inputs and --inputs-file exclude each other", remedy="give one of them")
    inputs: dict[str, Any] = {}
    if text is not None:
        if len(text.encode("utf-8", "surrogateescape")) > MAX_INPUTS:
            raise UsageError(f"--inputs has more than {MAX_INPUTS} bytes", remedy="use --inputs-file FILE")
        inputs = _json_object(text, "--inputs")
    elif file is not None:
        inputs = _json_object(read_file(file, "--inputs-file"), f"--inputs-file {file}")
    inputs |= read_values(pairs, "--input", 'name="Ada"')
    return inputs


def read_values(pairs: Sequence[str], option: str, example: str) -> dict[str, Any]:
    """The values of an option that is given as KEY=VALUE, each key once; a value is JSON, or text.

    Raises `UsageError`, with `example` as what to write instead.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {pair!r} is not KEY=VALUE", remedy=f"for example {option} {example}")
        if key in found:
            raise UsageError(f"{option} gives {key!r} twice", remedy="give each key once")
        found[key] = json_or_text(value, f"{option} {key}")
    return found


def json_or_text(text: str, what: str) -> Any:
    """JSON where it is JSON, else the text itself. Values that JSON cannot carry exactly are refused."""
    from agentctl.store.canonical import JsonError, check_value, parse_json

    try:
        json.loads(text, parse_constant=_not_json)
        is_json = True
    except (ValueError, RecursionError):
        is_json = False
    try:
        if is_json:
            return parse_json(text)
        check_value(text)
    except JsonError as error:
        remedy = _json_remedy(error.message, "give JSON that can be kept exactly, or quote it to make it a text")
        raise UsageError(f"{what}: {error.message}", remedy=remedy) from error
    return text


def _not_json(name: str) -> Any:
    raise ValueError(name)


def _json_object(text: str | bytes, what: str) -> dict[str, Any]:
    from agentctl.store.canonical import JsonError, parse_json

    try:
        value = parse_json(text)
    except JsonError as error:
        raise UsageError(f"{what}: {error.message}", remedy=_json_remedy(error.message)) from error
    if not isinstance(value, dict):
        raise UsageError(f"{what}: not a JSON object", remedy='it must be a JSON object such as {"name": "Ada"}')
    return value


def _json_remedy(message: str, otherwise: str = 'it must be a JSON object such as {"name": "Ada"}') -> str:
    if "surrogate" in message:
        return "write the character itself, or both halves of its pair, such as \\ud83d\\ude00"
    if "stands twice" in message:
        return "give each key of an object once"
    return otherwise


def read_json_file(file: str, option: str) -> Any:
    """The JSON value of a file that an option names. Raises `UsageError`."""
    from agentctl.store.canonical import JsonError, parse_json

    try:
        return parse_json(read_file(file, option))
    except JsonError as error:
        raise UsageError(f"{option} {file}: {error.message}", remedy="it must hold one JSON value") from error


def read_file(file: str, option: str) -> bytes:
    """The bytes of a text file, or of stdin for `-`, that an option names, without a byte order mark. Raises
    `UsageError`."""
    what = f"{option} {file}"
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_INPUTS_FILE + 1)
        else:
            if belongs_to_open_database(os.stat(file)):
                raise UsageError(f"{what}: it belongs to the database", remedy="check the name of the file")
            # O_NONBLOCK: opening a FIFO that nobody writes would wait for ever.
            descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            with open(descriptor, "rb") as stream:
                mode = os.fstat(descriptor).st_mode
                if not stat.S_ISREG(mode):
                    raise UsageError(f"{what}: not a regular file", remedy=f"pipe it in with {option} -")
                data = stream.read(MAX_INPUTS_FILE + 1)
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}", remedy="check the name of the file") from error
    except ValueError as error:
        raise UsageError(f"{what}: {error}", remedy="check the name of the file") from error
    if len(data) > MAX_INPUTS_FILE:
        raise UsageError(f"{what}: more than {MAX_INPUTS_FILE} bytes", remedy="let tasks read large data from files")
    return data.removeprefix(codecs.BOM_UTF8)


def compile_file(
    file: str, given: dict[str, Any], sources: Sources, *, workspace: Path | None = None
) -> tuple[LoadedDocument, Plan]:
    """Load one workflow file, capture its variables, and compile it with the inputs of the command line.

    `given` are the inputs of `sources`, read once for all files. Warnings are gathered in the document. Raises
    `UsageError` and `DocumentError`.
    """
    variables = read_pairs(sources.var_pairs)
    with without_plugins():
        from agentctl.coordinator.advice import (
            certain_denials,
            foreign_templates,
            idle_denials,
            never_called,
            repeated_calls,
        )
        from agentctl.coordinator.compiler import compile_workflow
        from agentctl.coordinator.definition import load_workflow
        from agentctl.coordinator.diagnostics import DocumentError
        from agentctl.coordinator.variables import capture

    document = capture(load_workflow(Path(file)), workspace=workspace, files=sources.vars_files, pairs=variables)
    odd = unknown_inputs(document, given, sources.pairs) + unknown_variables(document)
    if any(item.severity == "error" for item in odd):
        raise DocumentError(odd)
    plan = compile_workflow(document, inputs=given, warnings=document.warnings)
    document.warnings.extend(odd)
    document.warnings.extend(never_called(document))
    document.warnings.extend(unreachable_names(document))
    document.warnings.extend(certain_denials(document, plan))
    document.warnings.extend(idle_denials(document))
    document.warnings.extend(repeated_calls(document, plan))
    document.warnings.extend(foreign_templates(document))
    return document, plan


def refused_by_policy(document: LoadedDocument, plan: Plan) -> list[Diagnostic]:
    """A warning for each denial for which `run` refuses to begin: secrets, names of variables, and hosts.

    Raises `UsageError` when the endpoint of a provider is no address.
    """
    from .preflight import denials

    return [
        document.source.diagnostic("policy_denied", problem.message, place, help=problem.remedy, severity="warning")
        for place, problem in denials(document.workflow, plan, document.base_dir)
    ]


def presented(settings: Settings, document: LoadedDocument) -> Settings:
    """The settings, with what the document itself says of presentation (`spec.output.verbose`)."""
    return replace(settings, verbose=True) if document.model.spec.output.verbose else settings


@contextmanager
def without_plugins() -> Iterator[None]:
    """Import pydantic without its search for plugins, which reads the metadata of every installed package."""
    name = "PYDANTIC_DISABLE_PLUGINS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "__all__"
    try:
        yield
    finally:
        del os.environ[name]


@click.command(cls=Verb)
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@source_options
@pass_settings
@click.pass_context
def check(
    context: click.Context,
    settings: Settings,
    files: tuple[str, ...],
    sources: Sources,
) -> None:
    """Check workflow files: everything that can be known to be wrong before a run.

    With JSON output each file gives one envelope: CheckResult on stdout or Error on stderr. Exit 2 if any is wrong.
    """
    given = sources.inputs()
    wrong = 0
    for file in files:
        try:
            document, plan = compile_file(file, given, sources)
            document.warnings.extend(refused_by_policy(document, plan))
        except UsageError as error:
            wrong += 1
            print_error(
                settings,
                error.message,
                exit_code=error.exit_code,
                code=error.code,
                remedy=error.remedy,
                diagnostics=getattr(error, "diagnostics", ()),
            )
            continue
        warn_findings(settings, document.warnings)
        data = {
            "valid": True,
            "workflow": plan.workflow_name,
            "workflowDigest": plan.workflow_digest,
            "planDigest": plan.plan_digest,
            "tasks": len(plan.order),
            "file": file,
        }
        noun = "task" if data["tasks"] == 1 else "tasks"
        text = f"{clean(file)}: ok, workflow {clean(plan.workflow_name)}, {data['tasks']} {noun}"
        printer = Printer(presented(settings, document))
        printer.result("CheckResult", data, partial(Printer.line, text=text), document.warnings)
    if len(files) > 1 and not settings.json:
        Printer(settings).line(f"{len(files)} files, {wrong or 'all'} of them {'wrong' if wrong else 'fine'}")
    if wrong:
        context.exit(2)


@click.command(cls=Verb)
@click.argument("file", type=click.Path())
@source_options
@pass_settings
def plan(
    settings: Settings,
    file: str,
    sources: Sources,
) -> None:
    """Show the compiled plan of a workflow file: order, needs, effects and limits, counted after expansion."""
    document, compiled = compile_file(file, sources.inputs(), sources)
    document.warnings.extend(refused_by_policy(document, compiled))
    from agentctl.coordinator.plan import plan_as_json

    from .authoring import plan_for_people

    warn_findings(settings, document.warnings)
    settings = presented(settings, document)
    data = plan_as_json(compiled) if settings.json or settings.verbose else None
    Printer(settings).result("Plan", data, lambda out: plan_for_people(out, document, compiled), document.warnings)


@click.command(cls=Verb)
@click.option("--write", "target", type=click.Path(), metavar="FILE", help="Write it to a file instead.")
@pass_settings
def schema(settings: Settings, target: str | None) -> None:
    """Print the JSON Schema (Draft 2020-12) of workflow files, for editors."""
    text = schema_text()
    data = json.loads(text)
    if target is not None:
        write_file(target, text)
    printer = Printer(settings)
    if settings.json:
        written = {"written": target} if target is not None else data
        printer.result("Schema", written, lambda out: None)
    elif target is not None:
        printer.line(f"wrote {clean(target)}")
    else:
        click.echo(text, nl=False)


def schema_text() -> str:
    """The JSON Schema of workflow files as text."""
    with without_plugins():
        from agentctl.coordinator.definition import document_schema

    return json.dumps(document_schema(), ensure_ascii=False, indent=2) + "\n"


def write_file(target: str | Path, text: str, *, overwrite: bool = True) -> None:
    """Make a file at once, complete and durable, or leave everything as it was; a link is followed.

    Raises FileExistsError without `overwrite`, `UsageError` for what is no name of a file, and `EnvironmentFault`.
    """
    from .stopping import tidy

    # Path would take the slash at the end away, and make the folder "." of nothing.
    if not os.fspath(target) or os.fspath(target).endswith("/"):
        raise _no_file(target, "is not the name of a file")
    try:
        place = Path(os.path.realpath(target)) if overwrite else Path(target)
        if place.is_dir():
            raise _no_file(target, "is a folder")
        if place.exists() and not place.is_file():
            raise _no_file(target, "is no regular file")
        with tidy():
            put_file(place, text.encode(), overwrite=overwrite)
    except FileExistsError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise EnvironmentFault(f"cannot write {target}: {reason}", remedy="choose another place") from error


def put_file(place: Path, data: bytes, *, overwrite: bool = True, mode: int | None = None) -> None:
    """The file with these bytes, complete and durable, or everything as it was; `mode` counts whatever the umask.

    Raises FileExistsError without `overwrite`, and OSError.
    """
    from agentctl.store.blobs import write_atomically

    def fill(descriptor: int) -> None:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(data)
        if mode is not None:
            os.fchmod(descriptor, mode)

    write_atomically(place, fill, overwrite=overwrite)


def _no_file(target: str | Path, what: str) -> UsageError:
    return UsageError(f"{os.fspath(target)!r} {what}", remedy="give the name of a file")
