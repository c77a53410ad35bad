"""Coordinators in a test's own process: runs that wait for them, and workers that only note that they were called."""

from __future__ import annotations

import socket
from pathlib import Path

from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.driver import Coordinator
from agentctl.coordinator.service import process_row
from agentctl.coordinator.submission import submit
from agentctl.store.engine import Store
from agentctl.store.faults import Faults
from agentctl.store.timing import Timing

from . import builders
from .clock import FixedIds

WORKERS = 6
READ = "{kind: builtin.read, with: {path: x}}"
COMMAND = "{kind: builtin.shell.exec, command: /bin/true}"

_FAN_OUT = """
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {{name: many}}
spec:
  inputs: {{items: {items}}}
  policy: {{approval: never, processAllowlist: ["true"]}}
  runtime: {{maxConcurrency: 8}}
  actions: {{act: {action}}}
  tasks:
    - {{id: each, uses: "action:act", foreach: {{items: "${{{{ inputs.items }}}}", maxItems: 8}}}}
"""


def fan_out(action: str, items: int = 8) -> str:
    """A document with so many tasks that do the same."""
    return _FAN_OUT.format(action=action, items=list(range(items)))


def submitted(store: Store, ids: FixedIds, folder: Path, text: str) -> str:
    """A run of this document, which nobody drives yet."""
    file = folder / "flow.yaml"
    file.write_text(text)
    document = load_workflow(file)
    return submit(store, document, compile_workflow(document), {}, ids=ids, base_path=folder, actor="tester").run_id


def registered(store: Store, ids: FixedIds, timing: Timing | None = None, *, adopts: bool) -> Coordinator:
    """A coordinator with a row, by the store's clock."""
    process_id = ids.new_id("coordinator")
    store.register(process_row("coordinator", process_id, "coordinator", "0", store.clock.now()))
    timing = Timing() if timing is None else timing
    return Coordinator(store, store.clock, ids, timing, Faults(None), process_id=process_id, adopts=adopts)


def begun(store: Store, ids: FixedIds, folder: Path, action: str, items: int = 8) -> Coordinator:
    """The coordinator of a fan-out, which it has just enqueued."""
    submitted(store, ids, folder, fan_out(action, items))
    coordinator = registered(store, ids, adopts=True)
    while not store.has_ready(None):
        coordinator.tick()
    return coordinator


class Sleepers:
    """Idle workers that only note that they were called."""

    def __init__(self, store: Store) -> None:
        self._listeners: dict[str, socket.socket] = {}
        for number in range(WORKERS):
            name = f"sleeper-{number}"
            store.register(builders.process_row(name, state="idle"))
            self._listeners[name] = store.wakes.listen(name)

    def called(self) -> int:
        """How many calls have come since the last question, announcements left out."""
        return self._messages().count(b"w")

    def announced(self) -> list[str]:
        """The runs that were announced to somebody since the last question."""
        return [message[1:].decode() for message in self._messages() if message.startswith(b"a")]

    def _messages(self) -> list[bytes]:
        found = []
        for listener in self._listeners.values():
            try:
                while message := listener.recv(256):
                    found.append(message)
            except BlockingIOError:
                continue
        return found

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
