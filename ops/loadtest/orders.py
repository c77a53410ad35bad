"""The workflows of the torture run. Each leaves a ledger outside of the database: one line for each execution.

A line is `ITEM EFFECT`, appended in one write (`O_APPEND`), so it tells how often something was really executed, and
under which effect.

| kind   | its commands are                        | in the end the ledger has                            |
|--------|-----------------------------------------|------------------------------------------------------|
| once   | `unknown`: may never be executed twice  | exactly one line for each item                       |
| again  | `idempotent`: may be repeated           | one to as many lines as there were dispatches        |
| budget | `unknown`, eight units of output each   | exactly one line, and exactly 8 units for each item  |
| kept   | `idempotent`, each leaves an artifact   | as `again`, and the bytes of each file               |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Record = dict[str, Any]

KINDS = ("once", "again", "budget", "kept")
NEVER_TWICE = ("once", "budget")
UNITS = 8
"""What a command of `budget` prints, in bytes; its budget is exactly that for each item."""

# $1 item, $2 ledger, $3 seconds before and after the line (or nothing), $4 the file that is kept
PAUSE = '[ -z "$3" ] || /bin/sleep "$3"; '
APPEND = PAUSE + 'echo "$1 $AGENTCTL_EFFECT_ID" >> "$2"; ' + PAUSE + 'echo "$1"'
KEEP = APPEND + '; echo "kept $1" > "$4"'
MOST_DELIVERIES = 1_000  # a command that meets ten deaths in a row is no poison here


def item_names(count: int) -> list[str]:
    """Seven letters each: with its line feed a printed item is `UNITS` bytes."""
    return [f"i{number:06d}" for number in range(count)]


def document(kind: str, key: str, count: int, pause: str, folder: Path, *, gather: bool = True) -> Record:
    """The workflow for `count` items; `pause` in seconds, as `sleep` takes it, or nothing for none.

    `gather`: a last task copies what all items have printed into the output of the run.
    """
    kept = f"kept/{key}/${{{{ vars.item }}}}"
    arguments = ["-c", KEEP if kind == "kept" else APPEND, "sh", "${{ vars.item }}", str(ledger(folder, key)), pause]
    task: Record = {"args": arguments}
    action: Record = {
        "kind": "builtin.shell.exec",
        "command": "sh",
        "idempotency": "unknown" if kind in NEVER_TWICE else "idempotent",
    }
    runtime: Record = {"maxConcurrency": 16, "maxDeliveries": MOST_DELIVERIES}
    policy: Record = {"approval": "never", "processAllowlist": ["sh"]}
    if kind == "budget":
        action["combinedOutputLimitBytes"] = UNITS
        runtime["budgets"] = {"maxProcessOutputBytes": UNITS * count}
    if kind == "kept":
        (folder / "kept" / key).mkdir(parents=True, exist_ok=True)
        task = {"args": [*arguments, kept], "artifacts": [kept]}
        policy["writableRoots"] = ["kept"]
    tasks: list[Record] = [
        {
            "id": "each",
            "uses": "action:append",
            "foreach": {"items": item_names(count), "maxItems": count},
            "with": task,
        }
    ]
    outputs: Record = {}
    if gather:
        seen = {"seen": "${{ tasks.each.output }}"}
        tasks.append({"id": "all", "uses": "action:note", "needs": ["each"], "with": seen})
        outputs = {"seen": "${{ tasks.all.output.after.seen }}"}
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": key},
        "spec": {
            "policy": policy,
            "runtime": runtime,
            "actions": {"append": action, "note": {"kind": "builtin.assign"}},
            "tasks": tasks,
            "outputs": outputs,
        },
    }


def ledger(folder: Path, key: str) -> Path:
    """The file outside of the database."""
    return folder / f"{key}.ledger"
