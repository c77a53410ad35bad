"""The reference pages, made from the code: verbs (click), fields of a document (its model), error codes (the source).

    python ops/reference.py            write what has changed
    python ops/reference.py --check    change nothing; exit 1 when a page is not what the code says

The pages are in the repository so that they can be read there; a test compares them with the code.
"""
# ruff: noqa: T201  (it talks to the person or the job that started it)

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "docs" / "reference"
ROOMS = ("store", "coordinator", "worker", "cli")
MADE = "<!-- Made by ops/reference.py from the code. Change the code, then make it again. -->"

Schema = dict[str, Any]


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]


def cell(text: str) -> str:
    """Text for a cell: one line, and nothing in it that Markdown or HTML would take for its own."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Code for a cell."""
    return f"`{text}`".replace("|", "\\|")


# -- verbs ---------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every verb with its arguments and options."""
    from agentctl.cli.main import program

    lines = [
        MADE,
        "# Verbs",
        "",
        "Every verb takes the global options, before or after its own. Exit codes are on a page of their own: "
        "[errors and exit codes](errors.md).",
        "",
        "## Global options",
        "",
    ]
    lines += options_table([option for option in globals_of(program) if not isinstance(option, click.Argument)])
    for path, command in walk(program, ()):
        lines += verb(path, command)
    return "\n".join(lines) + "\n"


def globals_of(command: click.Command) -> list[click.Parameter]:
    """The options that every command carries."""
    found: list[click.Parameter] = list(getattr(command, "globals", []))
    return found


def walk(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands below a group, in its order; groups come before their members."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))


def verb(path: tuple[str, ...], command: click.Command) -> list[str]:
    """The section of one verb."""
    everywhere = globals_of(command)
    own = [item for item in command.params if item not in everywhere and not getattr(item, "hidden", False)]
    arguments = [parameter for parameter in own if isinstance(parameter, click.Argument)]
    words = ["agentctl", *path]
    if isinstance(command, click.Group):
        words.append("VERB ...")
    elif any(not isinstance(parameter, click.Argument) for parameter in own):
        words.append("[OPTIONS]")
    words += [argument_words(argument) for argument in arguments]
    lines = ["", f"{'#' * (1 + len(path))} {' '.join(path)}", "", "```text", " ".join(words), "```", ""]
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "")
    lines += [help_text.replace("<", "&lt;")] if help_text else []
    shown = options_table([parameter for parameter in own if not isinstance(parameter, click.Argument)])
    return [*lines, "", *shown] if shown else lines


def argument_words(argument: click.Argument) -> str:
    """An argument as the usage shows it."""
    name = argument.metavar or (argument.name or "").upper()
    name = f"{name}..." if argument.nargs == -1 and not name.endswith("...") else name
    return name if argument.required else f"[{name}]"


def options_table(options: list[click.Parameter]) -> list[str]:
    """Options, what they take, and what they mean."""
    rows = []
    for option in options:
        assert isinstance(option, click.Option)
        names = ", ".join(code(name) for name in [*option.opts, *option.secondary_opts])
        rows.append([names, value_of(option), cell(option.help or "")])
    return table(["option", "value", "meaning"], rows) if rows else []


def value_of(option: click.Option) -> str:
    """What an option takes."""
    kind = option.type
    if option.is_flag or option.count:
        return ""
    if isinstance(kind, click.Choice):
        found = " ".join(code(str(choice)) for choice in kind.choices)
    else:
        found = code(option.metavar or kind.name.upper().replace(" RANGE", ""))
        low, high = getattr(kind, "min", None), getattr(kind, "max", None)
        found += f", at least {low}" if low is not None and high is None else ""
        found += f", {low} to {high}" if low is not None and high is not None else ""
    return found + (", several" if option.multiple else "") + (", required" if option.required else "")


# -- fields of a document ------------------------------------------------------------------------------------------


def document_page() -> str:
    """Every field of a workflow file."""
    from agentctl.coordinator.definition import document_schema

    schema = document_schema()
    kinds: dict[str, Schema] = schema["$defs"]
    lines = [
        MADE,
        "# Fields of a workflow",
        "",
        "What is checked while you type is in the schema that `agentctl schema` prints; this page is made from the "
        "same model. Fields that are not here are refused. What this version knows and cannot do yet is refused by "
        "`agentctl check` with `unsupported_capability`.",
    ]
    lines += part("Workflow", schema, kinds)
    for name in reachable(schema, kinds):
        lines += part(name, kinds[name], kinds)
    return "\n".join(lines) + "\n"


def reachable(schema: Schema, kinds: dict[str, Schema]) -> list[str]:
    """Names of parts in the order in which a reader meets them."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        text = json.dumps(waiting.pop(0), ensure_ascii=False)
        for piece in text.split('"#/$defs/')[1:]:
            name = piece.partition('"')[0]
            if name not in found:
                found.append(name)
                waiting.append(kinds[name])
    return found


def part(name: str, schema: Schema, kinds: dict[str, Schema]) -> list[str]:
    """The section of one part of a document."""
    lines = ["", f"## {name}", ""]
    if schema.get("description"):
        lines += [" ".join(schema["description"].split()).replace("<", "&lt;"), ""]
    if "properties" not in schema:
        return [*lines, type_of(schema, kinds)]
    required = schema.get("required", [])
    rows = []
    for field, about in schema["properties"].items():
        default = "required" if field in required else default_of(about)
        rows.append([code(field), type_of(about, kinds), default, cell(about.get("description", ""))])
    return [*lines, *table(["field", "type", "default", "meaning"], rows)]


def default_of(about: Schema) -> str:
    """The value that counts when a field is left out."""
    value = about.get("default")
    return "" if value is None else code(json.dumps(value, ensure_ascii=False))


def type_of(about: Schema, kinds: dict[str, Schema]) -> str:
    """The type of a value, with its bounds, in words."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in about:
        return code(json.dumps(about["const"]))
    if "enum" in about:
        return " ".join(code(str(value)) for value in about["enum"])
    for word in ("anyOf", "oneOf"):
        if word in about:
            options = [type_of(option, kinds) for option in about[word] if option != {"type": "null"}]
            return " or ".join(dict.fromkeys(options))
    kind = about.get("type", "any value")
    if isinstance(kind, list):
        kind = " or ".join(item for item in kind if item != "null")
    if kind == "array":
        inner = type_of(about["items"], kinds) if about.get("items") else "any value"
        return f"list of {inner}" + bounds(about, "minItems", "maxItems", " entries")
    if kind == "object":
        inner = about.get("additionalProperties")
        return f"map to {type_of(inner, kinds)}" if isinstance(inner, dict) and inner else "map"
    if kind == "string":
        return "text" + bounds(about, None, "maxLength", " characters")
    return str(kind) + bounds(about, "minimum", "maximum", "") + bounds(about, "exclusiveMinimum", None, "", ">")


def bounds(about: Schema, low: str | None, high: str | None, unit: str, sign: str = "≥") -> str:
    """Bounds in words."""
    least = about.get(low) if low else None
    most = about.get(high) if high else None
    if least is not None and most is not None:
        return f", {least} to {most}{unit}"
    if least is not None:
        return f", {sign} {least}{unit}"
    return f", ≤ {most}{unit}" if most is not None else ""


# -- errors --------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Exit codes, words of `error.code`, of findings in a document, and of tasks that fail."""
    lines = [
        MADE,
        "# Errors and exit codes",
        "",
        "With `--output json` an error is one line on stderr; `error.code` is one of the words below. Scripts may rely "
        "on the words and the exit codes, not on the messages.",
    ]
    lines += ["", "## Errors of the program", "", *program_errors()]
    lines += ["", "## Findings in a document", "", *findings()]
    lines += [
        "",
        "## Why a task failed",
        "",
        "`error.code` of a task, of an attempt, or of a run that has failed. What stands in place of `…` is known only "
        "when it happens.",
        "",
        *task_faults(),
    ]
    return "\n".join(lines) + "\n"


def program_errors() -> list[str]:
    """The tree of expected errors, and what the program itself adds."""
    from agentctl.cli import main
    from agentctl.store.errors import AgentctlError, TaskFault

    rows = []
    seen = set()
    for kind in subclasses(AgentctlError):
        if kind is TaskFault or (kind.exit_code, kind.code) in seen:
            continue
        seen.add((kind.exit_code, kind.code))
        meaning = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        rows.append([str(kind.exit_code), code(kind.code), cell(meaning)])
    rows += [
        [str(main.EXIT_INTERNAL), "`internal`", "A bug of agentctl. With `--verbose` it shows where."],
        [str(main.EXIT_INTERRUPTED), "", "The command was interrupted, or the run it waited for was cancelled."],
        [str(main.EXIT_PIPE), "", "The reader of the output is gone."],
    ]
    rows.sort(key=lambda row: (int(row[0]), row[1]))
    return table(["exit code", "`error.code`", "meaning"], rows)


def subclasses(kind: type) -> Iterator[Any]:
    """All classes below one, parents first. Only those of the package that are loaded anyhow."""
    for child in kind.__subclasses__():
        if child.__module__ == "agentctl.store.errors":
            yield child
        yield from subclasses(child)


def findings() -> list[str]:
    """Codes of diagnostics with what to do about them."""
    from agentctl.coordinator.diagnostics import CODES, REMEDIES

    return table(["code", "what helps"], [[code(word), cell(REMEDIES[word])] for word in sorted(CODES)])


def task_faults() -> list[str]:
    """Codes and messages of what becomes the error of a task, read from the source."""
    found: dict[str, dict[str, None]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for word, message in [*raised(tree), *written(tree), *subclassed(tree)]:
                for text in words_of(word):
                    found.setdefault(text, {})[message_of(message)] = None
    rows = [
        [code(word), "<br>".join(cell(text) for text in messages if text.strip("… :'"))]
        for word, messages in sorted(found.items())
    ]
    return table(["code", "messages"], rows)


def raised(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """`TaskFault(code, message, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "TaskFault" and node.args:
            yield node.args[0], node.args[1] if len(node.args) > 1 else None


def written(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """`{"code": ..., "message": ...}`, the stored form of the same."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            parts = {key.value: value for key, value in zip(node.keys, node.values, strict=True) if is_text(key)}
            if "code" in parts and "message" in parts:
                yield parts["code"], parts["message"]


def subclassed(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """`super().__init__(code, ...)` in a kind of `TaskFault` with a code of its own."""
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and "TaskFault" in [ast.unparse(base) for base in kind.bases]:
            for node in ast.walk(kind):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__" and node.args:
                    yield node.args[0], None


def is_text(node: ast.expr | None) -> bool:
    """Whether it is a text that stands there as such."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def called(node: ast.Call) -> str:
    """The name of what is called."""
    return (
        node.func.id
        if isinstance(node.func, ast.Name)
        else node.func.attr
        if isinstance(node.func, ast.Attribute)
        else ""
    )


def words_of(node: ast.expr) -> list[str]:
    """The texts that an expression can be; none where only the running program knows."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return words_of(node.body) + words_of(node.orelse)
    return []


def message_of(node: ast.expr | None) -> str:
    """A message with `…` for what is only known later."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(piece.value) if isinstance(piece, ast.Constant) else "…" for piece in node.values)
    return ""


# -- all of it -----------------------------------------------------------------------------------------------------

PAGES = {"cli.md": cli_page, "document.md": document_page, "errors.md": errors_page}


def main() -> int:
    """Write the pages, or compare them."""
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not sys.argv[1:]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    if sys.argv[1:] and stale:
        print(f"not what the code says: {', '.join(stale)}; run `python ops/reference.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
