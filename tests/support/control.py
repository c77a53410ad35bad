"""A run without effects from its text to its end, in this process: real compiler, store and driver, no workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentctl.coordinator.compiler import compile_workflow, merge_inputs
from agentctl.coordinator.definition import document_from_source
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.coordinator.yaml_document import parse_document
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.timing import Timing

from support.builders import open_store
from support.clock import FixedIds, ManualClock
from support.rows import rows

HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"


@dataclass(frozen=True)
class Ended:
    """One task after the end of its run. `moves` are the states that it went through, as the audit tells; `decided` are
    the decisions that stand in the audit.
    """

    state: str
    output: Any
    error: Any
    decision: Any
    moves: tuple[str, ...]
    decided: tuple[Any, ...]


@dataclass(frozen=True)
class Outcome:
    """A run after its end."""

    run_id: str
    plan: Plan
    state: str
    output: Any
    error: Any
    tasks: dict[str, Ended]

    def states(self) -> dict[str, str]:
        """The state of each task, in compiled order."""
        return {name: task.state for name, task in self.tasks.items()}


class Bench:
    """Runs documents one after the other over one database."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.folder = folder
        self.clock = clock
        self.ids = FixedIds()
        self.store: Store = open_store(folder, clock)

    def run(
        self,
        spec: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        looks: int = 500,
    ) -> Outcome:
        """Drive a `spec` to its end. Every few batches the driver leaves, and the next one begins from the database.

        `looks` is how often time passes at most: what waits for a later look needs more of them.
        """
        document = document_from_source(parse_document((HEAD + spec).encode(), "flow.yaml"), base_dir=self.folder)
        plan = compile_workflow(document, inputs=inputs)
        merged = merge_inputs(document.model.spec.inputs, inputs)
        run_id = submit(self.store, document, plan, merged, ids=self.ids, base_path=self.folder, actor="tester").run_id
        for _ in range(looks):
            driver = self.driver()
            driver.tick()
            driver.close()
            if self.store.get_run(run_id).state != "running":
                break
            self.clock.advance(0.6)
        return self.outcome(run_id, plan)

    def driver(self) -> Coordinator:
        """A coordinator of its own that takes whatever nobody drives."""
        name = self.ids.new_id("coordinator")
        self.store.register(process_row("coordinator", name, "coordinator", "0", self.clock.now()))
        return Coordinator(self.store, self.clock, self.ids, Timing(), Faults(None), process_id=name, adopts=True)

    def outcome(self, run_id: str, plan: Plan) -> Outcome:
        """What a run has come to."""
        columns = "task_id, state, output_json, error_json, decision_json"
        found = rows(self.store, f"SELECT {columns} FROM tasks WHERE run_id = ? ORDER BY task_no", run_id)  # noqa: S608
        moves: dict[str, list[dict[str, Any]]] = {}
        events = "SELECT task_id, payload_json FROM audit_events WHERE run_id = ? AND event_type = 'task.transition'"
        for task, payload in rows(self.store, events + " ORDER BY sequence", run_id):
            moves.setdefault(task, []).append(json.loads(payload))
        tasks = {
            name: Ended(
                state,
                _value(output),
                _value(error),
                _value(decision),
                tuple(move["to"] for move in moves.get(name, ())),
                tuple(move["decision"] for move in moves.get(name, ()) if "decision" in move),
            )
            for name, state, output, error, decision in found
        }
        run = self.store.get_run(run_id)
        return Outcome(run_id, plan, run.state, _value(self.store.run_output(run_id)), _value(run.error_json), tasks)


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def bench(folder: Path, clock: ManualClock) -> Iterator[Bench]:
    """A bench that is closed in the end."""
    made = Bench(folder, clock)
    try:
        yield made
    finally:
        made.store.close()
