"""The documents that the figures run, written into the benchmark's folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

Document = dict[str, Any]

LARGEST_FAN_OUT = 100_000
PLACES = 256  # many more than there are workers: what huey is given is not bounded at all

# The first delivery stays busy until it is killed; every later one ends at once. $0 is the ledger.
LEDGER_SCRIPT = """
{date} +%s%N >> "$0"
lines=0
while read -r line; do lines=$((lines + 1)); done < "$0"
if [ "$lines" -lt 2 ]; then exec {sleep} 30; fi
"""


def document(name: str, action: Document, task: Document, programs: list[str] | None = None) -> Document:
    """One action and one task around it; the fan-out, if any, is in `task`."""
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {
            "inputs": {"items": []},
            "policy": {"approval": "never", "processAllowlist": programs or []},
            "runtime": {"maxConcurrency": PLACES},
            "actions": {"act": action},
            "tasks": [{"id": "each", "uses": "action:act", **task}],
            "outputs": {"done": "yes"},  # not a copy of every task's output
        },
    }


def fan_out(**task: Any) -> Document:
    return {"foreach": {"items": "${{ inputs.items }}", "maxItems": LARGEST_FAN_OUT}, **task}


def write(folder: Path, content: Document) -> Path:
    """JSON is YAML, too."""
    path = folder / f"{content['metadata']['name']}.yaml"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def items(folder: Path, count: int) -> Path:
    path = folder / f"items-{count}.json"
    path.write_text(json.dumps({"items": list(range(count))}))
    return path


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"`{name}` is not installed")
    return found


def assign(folder: Path) -> Path:
    action = {"kind": "builtin.assign"}
    return write(folder, document("bench-assign", action, fan_out(**{"with": {"value": "${{ vars.item }}"}})))


def read(folder: Path) -> Path:
    (folder / "small.txt").write_text("a small file\n")
    action = {"kind": "builtin.read", "with": {"path": "small.txt"}}
    return write(folder, document("bench-read", action, fan_out()))


def true(folder: Path) -> Path:
    action = {"kind": "builtin.shell.exec", "command": "/bin/true"}
    return write(folder, document("bench-true", action, fan_out(), ["true"]))


def clock(folder: Path) -> Path:
    """A command that says when it started, in nanoseconds."""
    action = {"kind": "builtin.shell.exec", "command": program("date"), "args": ["+%s%N"]}
    return write(folder, document("bench-clock", action, {}, ["date"]))


def ledger(folder: Path, path: Path) -> Path:
    """An idempotent command that notes each of its deliveries in a ledger file."""
    script = LEDGER_SCRIPT.format(date=program("date"), sleep=program("sleep"))
    action = {
        "kind": "builtin.shell.exec",
        "command": "/bin/sh",
        "args": ["-c", script, str(path)],
        "idempotency": "idempotent",
    }
    return write(folder, document("bench-ledger", action, {}, ["sh"]))


def sleepers(folder: Path) -> Path:
    action = {"kind": "builtin.shell.exec", "command": program("sleep"), "args": ["60"]}
    return write(folder, document("bench-sleep", action, fan_out(), ["sleep"]))


def artifact(folder: Path, size: int) -> Path:
    """A command that does nothing, and a large file that it is said to have left."""
    with (folder / "large.bin").open("wb") as file:
        for number in range(size >> 20):
            file.write(number.to_bytes(8, "big") * (1 << 17))
    action = {"kind": "builtin.shell.exec", "command": "/bin/true", "artifacts": ["large.bin"]}
    content = document("bench-artifact", action, {}, ["true"])
    content["spec"]["policy"].update(writableRoots=["."], maxArtifactBytes=2 * size)
    return write(folder, content)


def hello(folder: Path) -> Path:
    action = {"kind": "builtin.assign"}
    return write(folder, document("bench-hello", action, {"with": {"greeting": "hello"}}))
