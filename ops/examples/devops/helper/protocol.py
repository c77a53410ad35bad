"""The process extension protocol of agentctl, and a short way to write contracts."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

PROTOCOL = "agentctl.dev/process-extension/v1"
Json = dict[str, Any]

TEXT: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
FLAG: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
TEXTS: Json = {"type": "array", "items": {"type": "string"}}
OBJECTS: Json = {"type": "array", "items": {"type": "object"}}


def fields(**properties: Json) -> Json:
    """The schema of an object that has exactly these fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


class Operation(NamedTuple):
    """One thing that this extension can do."""

    name: str
    takes: Json
    gives: Json
    work: Callable[[Json], Json]


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, takes: Json, gives: Json) -> Callable[[Callable[[Json], Json]], Callable[[Json], Json]]:
    """Mark a function as an operation: it takes the task's input and returns the task's output."""

    def mark(work: Callable[[Json], Json]) -> Callable[[Json], Json]:
        OPERATIONS[name] = Operation(name, takes, gives, work)
        return work

    return mark


def serve(chosen: Operation, question: str, given: TextIO, answer: TextIO) -> int:
    """Answer the handshake or a call; returns the exit code. What is wrong with the input goes to stderr."""
    if question == "--agentctl-handshake":
        contract = {
            "protocolVersion": PROTOCOL,
            "name": chosen.name,
            "inputSchema": chosen.takes,
            "outputSchema": chosen.gives,
            "capabilities": [chosen.name],
        }
        json.dump(contract, answer)
        return 0
    call = json.load(given)
    try:
        output = chosen.work(call["input"])
    except (OSError, ValueError, LookupError, SyntaxError) as fault:
        print(f"{chosen.name}: {type(fault).__name__}: {fault}", file=sys.stderr)
        return 1
    json.dump({"protocolVersion": PROTOCOL, "effectId": call["effectId"], "output": output}, answer)
    return 0


def table(heads: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; a bar in a cell does not end it."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def read_json(path: str) -> Any:
    """A JSON file of the workspace."""
    with open(path, encoding="utf-8") as stream:
        return json.load(stream)


def read_lines(path: str) -> list[str]:
    """The lines of a text file of the workspace."""
    with open(path, encoding="utf-8-sig") as stream:
        return stream.read().splitlines()


def version(text: str) -> tuple[int, ...]:
    """`1.10.2` as numbers that compare; what follows a `-` or `+` does not count. Raises `ValueError`."""
    head = text.lstrip("v").split("-")[0].split("+")[0]
    return tuple(int(part) for part in head.split("."))
