"""Runs to retry, repair and fork, with the real program: a ledger tells what was executed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from agentctl.store.audit import checksum

from support import tampering
from support.field import Field, Result


class Place(Field):
    """A field with what recovery is about: sources, plans, and forgers."""

    def go(self, file: str, *options: str, code: int = 0) -> str:
        """Run a workflow to its end; the id of the run."""
        result = self.json("run", file, *options)
        assert result.code == code, (result.code, result.out, result.err)
        return str(result.data["runId"])

    def edit(self, file: str, name: str, *changes: tuple[tuple[str | int, ...], Any]) -> str:
        """A copy of a workflow file with some values changed; a value of `...` removes it."""
        document = json.loads((self.folder / file).read_text())
        for path, value in changes:
            target = document
            for part in path[:-1]:
                target = target[part]
            if value is ...:
                del target[path[-1]]
            elif isinstance(target, list) and path[-1] == len(target):
                target.append(value)
            else:
                target[path[-1]] = value
        self.text(name, json.dumps(document))
        return name

    def plan(self, verb: str, file: str, source: str, *options: str, compatible: bool = True) -> dict[str, Any]:
        """The plan of a retry or a repair, which changes nothing."""
        before = self.scalar("SELECT COUNT(*) FROM runs")
        result = self.json(verb, file, source, *options, "--plan")
        assert result.code == (0 if compatible else 3), (result.code, result.out, result.err)
        assert result.data["compatible"] is compatible
        assert self.scalar("SELECT COUNT(*) FROM runs") == before
        found: dict[str, Any] = result.data
        return found

    def refused(self, verb: str, file: str, source: str, *options: str) -> Result:
        """A retry or repair that makes no run."""
        before = self.scalar("SELECT COUNT(*) FROM runs")
        result = self.json(verb, file, source, *options)
        assert self.scalar("SELECT COUNT(*) FROM runs") == before
        return result

    def derive(self, verb: str, file: str, source: str, *options: str, code: int = 0) -> dict[str, Any]:
        """Carry out a retry or a repair; its outcome. The whole database is sound afterwards."""
        result = self.json(verb, file, source, *options)
        assert result.code == code, (result.code, result.out, result.err)
        self.assert_sound()
        found: dict[str, Any] = result.data
        return found

    def record(self, run_id: str) -> dict[str, Any]:
        """RunInspection."""
        result = self.json("inspect", run_id)
        assert result.code == 0, result.err
        found: dict[str, Any] = result.data
        return found

    def forge(self, statement: str, *values: Any) -> None:
        """Change rows as somebody with a tool of his own might: triggers are no hindrance."""
        tampering.change(self.database, statement, *values)

    def forge_task(self, run_id: str, task_id: str, **columns: Any) -> None:
        """Change some columns of one task."""
        names = ", ".join(f"{name} = ?" for name in columns)
        sql = f"UPDATE tasks SET {names} WHERE run_id = ? AND task_id = ?"  # noqa: S608
        self.forge(sql, *columns.values(), run_id, task_id)

    def forge_chain(self, run_id: str, old: str, new: str) -> None:
        """Change what the checkpoints of a run tell, with all the links made anew."""
        with contextlib.closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("DROP TRIGGER IF EXISTS checkpoints_no_update")
            rows = connection.execute(
                "SELECT sequence, state_json FROM checkpoints WHERE run_id = ? ORDER BY sequence", (run_id,)
            ).fetchall()
            assert any(old in text for _, text in rows)
            previous = ""
            for sequence, text in rows:
                text = text.replace(old, new)
                link = checksum(previous, text)
                connection.execute(
                    "UPDATE checkpoints SET state_json = ?, previous_checksum = ?, checksum = ? "
                    "WHERE run_id = ? AND sequence = ?",
                    (text, previous, link, run_id, sequence),
                )
                previous = link
            connection.execute("UPDATE runs SET checkpoint_checksum = ? WHERE run_id = ?", (previous, run_id))


def rules(plan: Mapping[str, Any]) -> dict[str, str]:
    """Task -> rule of all that a plan cannot reuse, or execute again."""
    return {block["taskId"]: block["rule"] for block in plan["blockedReuse"]}


def gate(place: Place, id: str, file: str, **fields: Any) -> dict[str, Any]:
    """A task that tells the ledger, and fails until there is a file of that name."""
    script = 'printf "%s %s 0\\n" "$AGENTCTL_EFFECT_ID" "$2" >> "$1"; test -e "$3"'
    task = {"id": id, "uses": "action:gate", "with": {"args": ["-c", script, "sh", str(place.ledger), id, file]}}
    return {**task, **fields}


GATE = {"gate": {"kind": "builtin.shell.exec", "command": "sh"}, "say": {"kind": "builtin.assign"}}
"""The actions that `gate` and its companions use."""

RICH_TASKS: list[Mapping[str, Any]] = [
    {"id": "remember", "uses": "action:remember", "with": {"key": "k", "value": "v"}},
    {"id": "put", "uses": "action:put", "with": {"path": "out/a.txt", "content": "hello"}},
    {"id": "shape", "uses": "action:say", "with": {"x": 1}, "outputSchema": {"type": "object"}},
    {
        "id": "reads",
        "uses": "action:say",
        "needs": ["once", "twice", "shape"],
        "with": {"k": "${{ memory.k }}", "first": "${{ memory.given }}", "v": "${{ vars.v }}"},
    },
    {"id": "maybe", "uses": "action:say", "needs": ["shape"], "when": '${{ vars.v == "other" }}', "with": {}},
    {"id": "later", "uses": "action:say", "needs": ["maybe"], "with": {}},
    {"id": "bad", "uses": "action:test", "needs": ["once"], "failure": "continue"},
    {
        "id": "below",
        "uses": "action:say",
        "needs": ["bad", "reads"],
        "with": {"it": "${{ tasks.reads.output.after.k }}"},
    },
]


def rich(place: Place) -> str:
    """A workflow with everything that planning looks at; `bad` fails until there is a file `ok`."""
    return place.workflow(
        "rich",
        [
            place.tick_task("once", idempotent=False),
            place.tick_task("twice", idempotent=True),
            *RICH_TASKS,
        ],
        actions={
            "say": {"kind": "builtin.assign"},
            "remember": {"kind": "builtin.memory.write"},
            "put": {"kind": "builtin.write"},
            "test": {"kind": "builtin.shell.exec", "command": "sh", "args": ["-c", "test -e ok"]},
        },
        policy={"approval": "never", "processAllowlist": ["tick", "sh"], "writableRoots": ["out"]},
        memory={"working": {"given": 1}},
        vars={"v": "one"},
    )
