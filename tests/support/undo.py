"""A workflow whose commands write down what they do, and whose compensations write down what they undo.

The notes lie outside of agentctl: one line for each command that was really executed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from support.field import Field, Result

DO = 'echo "$1" >> "$2"; [ ! -e "slow-$1" ] || exec sleep 60'
UNDO = '[ ! -e "fail-$1" ] || exit 1; echo "undo-$1" >> "$2"; [ ! -e "slow-undo-$1" ] || exec sleep 60'
MANUAL = {"onFailure": "manual", "approval": "policy"}
AUTOMATIC = {"onFailure": "automatic", "approval": "policy"}


class Undo:
    """Builds documents, and asks what has come of them."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.path = field.root / "notes"

    def notes(self) -> list[str]:
        """What was executed, in its order."""
        return self.path.read_text().split() if self.path.exists() else []

    def done(self) -> list[str]:
        """What was undone, in its order."""
        return [line.removeprefix("undo-") for line in self.notes() if line.startswith("undo-")]

    def task(self, id: str, *, uses: str = "do", undo: str | None = "undo", **fields: Any) -> dict[str, Any]:
        """A command that notes its name, and its inverse."""
        found: dict[str, Any] = {"id": id, "uses": f"action:{uses}", "with": self.arguments(DO, id), **fields}
        if undo is not None:
            found["compensate"] = {"uses": f"action:{undo}", "with": self.arguments(UNDO, id)}
        return found

    def arguments(self, script: str, label: str) -> dict[str, Any]:
        """The `with` of a command."""
        return {"args": ["-c", script, "sh", label, str(self.path)]}

    def fan(self, id: str, count: int, **fields: Any) -> dict[str, Any]:
        """`count` of them as one `foreach`, labelled ID0, ID1, …"""
        items = [f"{id}{n}" for n in range(count)]
        label = "${{ vars.item }}"
        task = self.task(id, foreach={"items": items, "maxItems": max(1, count)}, **fields)
        task["with"] = self.arguments(DO, label)
        task["compensate"]["with"] = self.arguments(UNDO, label)
        return task

    def end(self, *needs: str, holds: bool = False) -> dict[str, Any]:
        """The task at which a run fails, or not."""
        return {"id": "end", "uses": "action:check", "needs": list(needs), "with": {"that": holds}}

    def write(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        name: str = "work",
        compensation: Mapping[str, str] = MANUAL,
        policy: Mapping[str, Any] | None = None,
        **spec: Any,
    ) -> str:
        """The file of a document; its name."""

        def shell(idempotency: str) -> dict[str, Any]:
            return {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency}

        actions = {
            "do": shell("at_most_once"),
            "again": shell("idempotent"),
            "undo": shell("at_most_once"),
            "undo-again": shell("idempotent"),
            "write": {"kind": "builtin.write"},
            "check": {"kind": "builtin.assert"},
            "note": {"kind": "builtin.assign"},
            "remember": {"kind": "builtin.memory.write"},
            **spec.pop("actions", {}),
        }
        rules = {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"], **(policy or {})}
        return self.field.workflow(
            name, tasks, actions=actions, policy=rules, concurrency=4, compensation=dict(compensation), **spec
        )

    def failed(self, tasks: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A run of these tasks that has failed; its id."""
        result = self.field.json("run", self.write(tasks, **options))
        assert result.code == 4, (result.out, result.err)
        return str(result.data["runId"])

    def plan(self, source: str, *arguments: str) -> dict[str, Any]:
        """The plan of a compensation, whose exit code fits it."""
        result = self.field.json("compensate", source, "--plan", *arguments)
        found: dict[str, Any] = result.data
        assert found["apiVersion"] == "agentctl.dev/compensation-plan/v1"
        assert found["complete"] == (found["blocked"] == [])
        assert result.code == (0 if found["complete"] else 3), result.err
        return found

    def rules(self, source: str, *arguments: str) -> list[tuple[str, str]]:
        """(task, rule) of all that blocks."""
        return [(block["taskId"], block["rule"]) for block in self.plan(source, *arguments)["blocked"]]

    def compensate(self, source: str, *arguments: str, **options: Any) -> Result:
        """Undo a run."""
        return self.field.json("compensate", source, *arguments, **options)

    def effect(self, run_id: str, task_id: str) -> str:
        """The id of the only effect of a task."""
        return str(self.field.scalar("SELECT effect_id FROM effects WHERE run_id = ? AND task_id = ?", run_id, task_id))

    def conclusions(self, run_id: str) -> list[tuple[str, str]]:
        """(task, conclusion) about the effects of a run, in their order."""
        return [
            (task, status)
            for task, status in self.field.rows(
                "SELECT e.task_id, c.status FROM effect_reconciliations c JOIN effects e USING (effect_id) "
                "WHERE c.run_id = ? ORDER BY c.reconciliation_no",
                run_id,
            )
        ]

    def runs(self) -> list[str]:
        """All runs, oldest first."""
        return [row[0] for row in self.field.rows("SELECT run_id FROM runs ORDER BY created_at, run_id")]

    def derived(self, run_id: str, mode: str = "compensation") -> list[tuple[str, str]]:
        """(run, state) of the runs that were made from one."""
        sql = (
            "SELECT run_id, state FROM runs WHERE ? IN (source_run_id, parent_run_id) AND mode = ? ORDER BY created_at"
        )
        return [(name, state) for name, state in self.field.rows(sql, run_id, mode)]

    def sound(self) -> None:
        """The database is what it says."""
        self.field.assert_sound()

    def forget_workspace(self) -> None:
        """Everything is gone but the database and what lies beside it."""
        for path in self.field.folder.iterdir():
            if path.name != ".agentctl":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
