"""Crashes around an approval: whoever asks, whoever decides, and whoever carries out what was approved.

A run with one command that a person has to approve. A process dies, or is stopped, exactly at a point. The question is
asked once, it is decided once, and what was approved is carried out as its contract allows: once, or again only where
it may be repeated. The ledger outside tells what was really executed.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.rows import rows, scalar
from support.scale import scale, short_lease
from support.site import Site, is_stopped, kill

ASK_POINTS = ("after_claim", "before_effect_start", "after_effect_start", "before_finish", "after_finish")
"""What a worker passes that asks: it dispatches nothing, so there is no result."""
DECISION_POINTS = ("before_decision", "after_decision")
WORKER_POINTS = (*ASK_POINTS, "after_effect_result")
IN_DOUBT = ("after_effect_start", "after_effect_result", "before_finish")
DRIVER_POINTS = ("before_commit", "after_commit", "before_run_end")
ACTIONS = ("kill", "parent", "stop")
REPEATABLE = ("pure", "idempotent", "keyed")
CLASSES = (*REPEATABLE, "at_most_once", "unknown")

LEASE, HEARTBEAT = short_lease(), 0.2
SHORT = {"AGENTCTL_LEASE_SECONDS": str(LEASE), "AGENTCTL_HEARTBEAT_SECONDS": str(HEARTBEAT)}
GRACE = 2 * LEASE + 5 + 5
AT_ONCE = 14.0


def workflow(ledger: Path, idempotency: str) -> dict[str, Any]:
    """One command between two tasks without effects. Commands need an approval, as by default."""
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "gate"},
        "spec": {
            "policy": {"processAllowlist": ["sh"]},
            "actions": {
                "note": {"kind": "builtin.assign"},
                "append": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency},
            },
            "tasks": [
                {"id": "before", "uses": "action:note", "with": {"n": 1}},
                {
                    "id": "gate",
                    "uses": "action:append",
                    "needs": ["before"],
                    "with": {"args": ["-c", 'echo line >> "$0"', str(ledger)]},
                },
                {"id": "after", "uses": "action:note", "needs": ["gate"], "with": {"n": 2}},
            ],
        },
    }


@dataclass(frozen=True)
class Case:
    """A place of the matrix."""

    point: str
    action: str
    idempotency: str = "at_most_once"

    @property
    def name(self) -> str:
        return f"{self.point}-{self.action}-{self.idempotency}"


def selection(cases: list[Case], each: int) -> list[Any]:
    """All cases at full scale, else every so many of them: each point, action and class is in it."""
    chosen = cases if scale() >= 1 else cases[::each]
    return [pytest.param(case, id=case.name) for case in chosen]


class Gate:
    """A site with that workflow, a pool that a service manager would look after, and the ledger."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.site = Site(folder, **(SHORT if case.action == "stop" else {}))
        self.case = case
        self.ledger = folder / "ledger"
        self.struck = folder / "struck"
        self.fault = f"{case.point}:{case.action}@{self.struck}"
        self.patience = GRACE if case.action == "stop" else AT_ONCE
        self.file = self.site.write("gate.yaml", workflow(self.ledger, case.idempotency))
        self._pool: subprocess.Popen[bytes] | None = None
        self._doomed: subprocess.Popen[bytes] | None = None

    def start_pool(self, fault: str | None = None) -> None:
        """Two workers and a coordinator. With a fault they may be dead before anybody has seen them."""
        self._pool = self.site.start("workers", "start", "-n", "2", "--drain-seconds", "3", fault=fault)
        if fault is None:
            self.site.wait_for_workers(2)
        elif self.case.action == "parent":
            self._doomed = self._pool

    def stop_pool(self) -> None:
        assert self.site.stop() == [0]
        self._pool = None

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        def looked_after() -> bool:
            if self._pool is not None and self._pool.poll() is not None:
                self._pool = self.site.start("workers", "start", "-n", "2", "--drain-seconds", "3")
            return condition()

        self.site.wait_for(looked_after, what, seconds=seconds)

    def wait_for_question(self, run_id: str) -> str:
        """Until the run has come to rest at its one question; the question's id."""
        self.wait(lambda: self.site.run(run_id).state == "paused", "the run pauses", self.patience)
        assert self.site.run(run_id).reason == "approval_required"
        [(approval, status)] = rows(self.site.store, "SELECT approval_id, status FROM approvals")
        assert status == "pending"
        assert rows(self.site.store, "SELECT status, dispatches FROM effects") == [("waiting_for_approval", 0)]
        assert self.lines() == 0
        assert rows(self.site.store, "SELECT holder FROM attempts WHERE state = 'claimed'") == []
        return str(approval)

    def question(self) -> tuple[str, str]:
        """A run that waits for its answer, asked by a pool to which nothing happens: (run, approval)."""
        self.start_pool()
        run_id = self.site.submit(self.file)
        return run_id, self.wait_for_question(run_id)

    def wait_for_end(self, run_id: str) -> None:
        self.wait(lambda: self.site.run(run_id).state != "running", "the run goes on to its end", self.patience)

    def lines(self) -> int:
        """How often the command was executed."""
        return len(self.ledger.read_text(encoding="utf-8").split()) if self.ledger.exists() else 0

    def judge_decision(self, word: str) -> None:
        """Asked once, decided once."""
        assert rows(self.site.store, "SELECT status FROM approvals") == [(word,)]
        events = "SELECT event_type FROM audit_events WHERE event_type LIKE 'approval.%' ORDER BY sequence"
        assert rows(self.site.store, events) == [("approval.requested",), (f"approval.{word}",)]

    def leave(self) -> None:
        for row in self.site.store.live_processes():
            if is_stopped(row):
                kill(row, signal.SIGCONT)
        if self._doomed is not None:
            self.wait(lambda: self._doomed is None or self._doomed.poll() is not None, "the killed pool has ended")
        if self._pool is not None and self._pool.poll() is None:
            # One that was just started again does not obey signals before it is there.
            self.wait(lambda: bool(self.site.living("supervisor")), "a pool")
        assert set(self.site.stop()) <= {0, 3}, self.site.report()
        self.site.assert_clean()


@pytest.fixture
def gate(tmp_path: Path, case: Case) -> Iterator[Gate]:
    made = Gate(tmp_path / "site", case)
    try:
        yield made
    finally:
        made.site.close()


# -- who asks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", selection([Case(p, a) for a in ACTIONS for p in ASK_POINTS], 4))
def test_whoever_asks(gate: Gate, case: Case) -> None:
    """The question is there once, and its answer counts, whatever became of the worker that asked."""
    gate.start_pool(gate.fault)
    run_id = gate.site.submit(gate.file)
    gate.wait(gate.struck.exists, "somebody reaches the point")
    approval = gate.wait_for_question(run_id)
    assert gate.site.ask("approvals", "approve", approval).code == 0
    gate.wait_for_end(run_id)
    assert gate.site.run(run_id).state == "succeeded"
    assert gate.lines() == 1
    assert rows(gate.site.store, "SELECT status, dispatches FROM effects") == [("succeeded", 1)]
    gate.judge_decision("approved")
    gate.leave()


# -- who decides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["approve", "reject"])
@pytest.mark.parametrize("case", selection([Case(p, a) for a in ACTIONS for p in DECISION_POINTS], 1))
def test_whoever_decides(gate: Gate, case: Case, verb: str) -> None:
    """Before the decision is on the disk nothing has happened; afterwards it stands and the run goes on."""
    run_id, approval = gate.question()
    other = {"approve": "reject", "reject": "approve"}[verb]
    shell = gate.site.start("approvals", verb, approval, "--actor", "first", fault=gate.fault)
    gate.wait(gate.struck.exists, "the shell reaches the point")
    if case.action != "stop":
        gate.wait(lambda: shell.poll() is not None, "the shell is dead")
    answer = gate.site.ask("approvals", other, approval, "--actor", "second")
    decided = verb if case.point == "after_decision" else other
    if case.point == "before_decision":
        assert answer.code == 0, answer.err
    else:
        assert answer.code == 5
        assert "by first" in answer.err
    if case.action == "stop":
        gate.site.wake_everything()
        gate.wait(lambda: shell.poll() is not None, "the woken shell ends")
        assert shell.returncode == (5 if case.point == "before_decision" else 0)
    gate.wait_for_end(run_id)
    gate.judge_decision({"approve": "approved", "reject": "rejected"}[decided])
    assert gate.site.run(run_id).state == ("succeeded" if decided == "approve" else "failed")
    assert gate.lines() == (decided == "approve")
    gate.leave()


# -- who carries it out ------------------------------------------------------------------------------------------------

START_CASES = [Case(p, a, c) for a in ACTIONS for c in CLASSES for p in WORKER_POINTS]


@pytest.mark.parametrize("case", selection(START_CASES, 7))
def test_whoever_carries_out_what_was_approved(gate: Gate, case: Case) -> None:
    """Answered when nobody was alive; then a worker dies with it. One approval does not send anything twice."""
    run_id, approval = gate.question()
    gate.stop_pool()
    assert gate.site.ask("approvals", "approve", approval).code == 0
    gate.start_pool(gate.fault)
    gate.wait(gate.struck.exists, "somebody reaches the point")
    gate.wait_for_end(run_id)
    run = gate.site.run(run_id)
    in_doubt = case.idempotency not in REPEATABLE and case.point in IN_DOUBT
    gate.judge_decision("approved")
    [(status, dispatches)] = rows(gate.site.store, "SELECT status, dispatches FROM effects")
    if in_doubt:
        assert (run.state, run.reason, status, dispatches) == ("paused", "uncertain_effect", "uncertain", 1)
        done = 0 if case.point == "after_effect_start" else 1
        assert gate.lines() == done
        result = gate.site.folder / "result.json"
        result.write_text('{"exitCode": 0}', encoding="utf-8")
        name = scalar(gate.site.store, "SELECT effect_id FROM effects")
        said = gate.site.ask("effects", "reconcile", name, "--status", "applied", "--result-file", result,
                             "--reason", "looked", "--approved")  # fmt: skip
        assert said.code == 0, said.err
        gate.wait_for_end(run_id)
        assert gate.lines() == done
    else:
        again = case.point in IN_DOUBT
        assert (status, dispatches) == ("succeeded", 2 if again else 1)
        assert gate.lines() == (2 if again and case.point != "after_effect_start" else 1)
    assert gate.site.run(run_id).state == "succeeded"
    gate.judge_decision("approved")
    gate.leave()


@pytest.mark.parametrize("case", selection([Case(p, a) for a in ACTIONS for p in DRIVER_POINTS], 4))
def test_whoever_drives_a_run_that_was_approved(gate: Gate, case: Case) -> None:
    """The coordinator dies while it gives the approved task a place, or with its result."""
    run_id, approval = gate.question()
    gate.stop_pool()
    assert gate.site.ask("approvals", "approve", approval).code == 0
    gate.start_pool(gate.fault)
    gate.wait(gate.struck.exists, "the coordinator reaches the point")
    gate.wait_for_end(run_id)
    assert gate.site.run(run_id).state == "succeeded"
    assert gate.lines() == 1
    assert rows(gate.site.store, "SELECT status, dispatches FROM effects") == [("succeeded", 1)]
    gate.judge_decision("approved")
    gate.leave()
