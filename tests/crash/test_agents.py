"""The crash matrix of an agent: three turns, two tools, and a worker that dies exactly at a point.

Whatever it was doing, each step is executed as often as its contract allows: a model is asked at most once for a turn,
a command that must not be repeated is started at most once, and what may be repeated may be. What is in doubt waits for
a person, and with their answer the same attempt goes on: nothing that was recorded is sent again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.agents import READ, STEPS, asked, document, shell_tool, write_script
from support.rows import rows
from support.scale import scale
from support.site import Site

LAST = len(STEPS)
POINTS = (
    "after_claim",
    *(f"{point}:{step}" for step in range(1, LAST + 1) for point in (
        "before_effect_start", "after_effect_start", "after_effect_result")),
    "before_finish",
    "after_finish",
)  # fmt: skip
ANSWER = {"verdict": "flaky", "because": "it depends on time"}
TURNS = [
    {"text": "Let me look.", "toolCalls": [{"name": "read", "input": {"path": "log.txt"}}]},
    {"toolCalls": [{"name": "append", "input": {"args": ["-c", 'echo line >> "$0"', "out/ledger"]}}]},
    {"json": ANSWER},
]
PATIENCE = 30.0


@dataclass(frozen=True)
class Case:
    """A place of the matrix. `step` is the one whose end nobody has recorded, 0 for none."""

    point: str
    idempotency: str

    @property
    def step(self) -> int:
        point, _, number = self.point.partition(":")
        if point == "before_finish":
            return LAST
        if point == "before_effect_start":
            return int(number) - 1  # its end is recorded together with the start of the next one
        return int(number) if point in ("after_effect_start", "after_effect_result") else 0

    @property
    def sent(self) -> bool:
        """Whether the step in doubt was carried out."""
        return not self.point.startswith("after_effect_start")

    @property
    def in_doubt(self) -> bool:
        """Whether a person has to say what happened."""
        if self.step == 0 or STEPS[self.step - 1] == "tool.read":
            return False
        return STEPS[self.step - 1] != "tool.append" or self.idempotency != "idempotent"


CASES = [Case(point, idempotency) for point in POINTS for idempotency in ("at_most_once", "idempotent")]


def selection(cases: list[Case]) -> list[Any]:
    """All cases at full scale; else those of a command that must not be repeated, and every fifth of the others."""
    chosen = (
        cases if scale() >= 1 else [c for i, c in enumerate(cases) if c.idempotency == "at_most_once" or i % 5 == 0]
    )
    return [pytest.param(case, id=f"{case.point}-{case.idempotency}") for case in chosen]


class Scene:
    """A site with that agent."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.site = Site(folder)
        self.case = case
        self.struck = folder / "struck"
        (folder / "log.txt").write_text("FAILED test_clock\n", encoding="utf-8")
        write_script(folder, TURNS)
        tools = {"read": READ, "append": shell_tool("append", case.idempotency)}
        action = {"kind": "builtin.shell.exec", "command": "sh", "idempotency": case.idempotency}
        schema = {"type": "object", "required": ["verdict"]}
        self.file = self.site.write(
            "flow.yaml",
            document(
                [{"id": "triage", "uses": "agent:helper", "with": {"prompt": "why?"}}],
                tools=tools,
                agent={"structuredOutput": schema},
                actions={"append": action},
            ),
        )

    def lines(self) -> int:
        ledger = self.site.folder / "out" / "ledger"
        return len(ledger.read_text(encoding="utf-8").splitlines()) if ledger.exists() else 0

    def reference(self) -> dict[int, Any]:
        """The result of each step in a run that nobody disturbs; what it has left is removed."""
        answer = self.site.ask("run", self.file)
        assert answer.code == 0, answer.err
        assert answer.data["output"] == {"triage": ANSWER}
        assert asked(self.site.folder) == {1: 1, 2: 1, 3: 1}
        assert self.lines() == 1
        for name in ("asked", "ledger"):
            (self.site.folder / "out" / name).unlink()
        return dict(rows(self.site.store, "SELECT ordinal, json(result_json) FROM effects ORDER BY ordinal"))

    def strike(self) -> str:
        """A run whose worker dies at the point; until it has come to rest."""
        pool = self.site.start("workers", "start", "-n", "2", "--drain-seconds", "3",
                               fault=f"{self.case.point}:kill@{self.struck}")  # fmt: skip
        assert pool.poll() is None
        run_id = self.site.submit(self.file)
        self.site.wait_for(self.struck.exists, "the worker reaches the point", seconds=PATIENCE)
        self.site.wait_for_end(run_id, seconds=PATIENCE)
        return run_id

    def effects(self, run_id: str) -> dict[int, tuple[str, str, int]]:
        sql = "SELECT ordinal, operation, status, dispatches FROM effects WHERE run_id = ? AND attempt = 1"
        return {ordinal: rest for ordinal, *rest in map(list, rows(self.site.store, sql, run_id))}  # type: ignore[misc]

    def reconcile(self, run_id: str, *arguments: str | Path) -> None:
        [(effect,)] = rows(
            self.site.store, "SELECT effect_id FROM effects WHERE run_id = ? AND status = 'uncertain'", run_id
        )
        answer = self.site.ask("effects", "reconcile", effect, "--reason", "looked", *arguments)
        assert answer.code == 0, answer.err
        self.site.wait_for_end(run_id, seconds=PATIENCE)

    def leave(self, run_id: str) -> None:
        assert set(self.site.stop()) <= {0, 3}, self.site.report()
        self.site.assert_clean()
        verified = self.site.ask("db", "verify")
        assert (verified.code, verified.data["problems"]) == (0, [])
        sql = (
            "SELECT e.status, c.status FROM effects e LEFT JOIN tool_calls c USING (effect_id) "
            "WHERE e.run_id = ? AND e.operation LIKE 'tool.%'"
        )
        calls = rows(self.site.store, sql, run_id)
        assert all(effect == call for effect, call in calls), calls


@pytest.fixture
def scene(tmp_path: Path, case: Case) -> Iterator[Scene]:
    made = Scene(tmp_path / "site", case)
    try:
        yield made
    finally:
        made.site.close()


@pytest.mark.parametrize("case", selection(CASES))
def test_each_step_is_executed_as_often_as_its_contract_allows(scene: Scene, case: Case) -> None:
    """With the answer of a person, where one is needed, the same attempt goes on to the same end."""
    results = scene.reference()
    run_id = scene.strike()
    if case.in_doubt:
        run = scene.site.run(run_id)
        assert (run.state, run.reason) == ("paused", "uncertain_effect")
        status = scene.effects(run_id)[case.step]
        assert status[1:] == ["uncertain", 1]
        assert len(scene.effects(run_id)) == case.step
        given = scene.site.folder / "given.json"
        given.write_text(results[case.step], encoding="utf-8")
        approved = ["--approved"] if STEPS[case.step - 1].startswith("tool.") else []
        scene.reconcile(run_id, "--status", "applied", "--result-file", given, *approved)
    run = scene.site.run(run_id)
    assert run.state == "succeeded", scene.site.report()
    assert json.loads(scene.site.store.run_output(run_id) or "null") == {"triage": ANSWER}
    lost = case.step if case.in_doubt and not case.sent else 0
    turns = {1: 1, 2: 3, 3: 5}
    assert asked(scene.site.folder) == {turn: 1 for turn, step in turns.items() if step != lost}
    again = case.step == 4 and not case.in_doubt
    assert scene.lines() == (0 if lost == 4 else 1 if not again or not case.sent else 2)
    for ordinal, (operation, state, dispatches) in scene.effects(run_id).items():
        repeated = ordinal == case.step and not case.in_doubt
        assert dispatches == (2 if repeated else 1), (ordinal, operation)
        assert state == ("uncertain" if ordinal == case.step and case.in_doubt else "succeeded")
    assert rows(scene.site.store, "SELECT number FROM attempts WHERE run_id = ?", run_id) == [(1,)]
    scene.leave(run_id)


DOUBTFUL = [
    *(Case(f"after_effect_result:{step}", "at_most_once") for step in (1, 3, 4)),
    Case("after_effect_result:5", "idempotent"),
]


@pytest.mark.parametrize("case", [pytest.param(case, id=case.point) for case in DOUBTFUL])
def test_what_was_not_applied_is_done_in_a_fresh_attempt(scene: Scene, case: Case) -> None:
    """It begins at the first turn with nothing of the attempt before, and its steps are new effects."""
    scene.reference()
    run_id = scene.strike()
    approved = ["--approved"] if case.step == 4 else []
    scene.reconcile(run_id, "--status", "not-applied", *approved)
    assert scene.site.run(run_id).state == "succeeded", scene.site.report()
    turns = {1: 1, 2: 3, 3: 5}
    assert asked(scene.site.folder) == {turn: 1 + (step <= case.step) for turn, step in turns.items()}
    second = rows(scene.site.store, "SELECT ordinal, status FROM effects WHERE run_id = ? AND attempt = 2", run_id)
    assert sorted(second) == [(ordinal, "succeeded") for ordinal in range(1, LAST + 1)]
    [(attempt,)] = rows(scene.site.store, "SELECT attempt FROM provider_sessions WHERE run_id = ?", run_id)
    assert attempt == 2
    scene.leave(run_id)


@pytest.mark.parametrize("case", [pytest.param(Case("after_effect_result:5", "at_most_once"), id="turn 3")])
def test_what_must_not_be_repeated_is_not_repeated_by_a_fresh_attempt(scene: Scene, case: Case) -> None:
    """The command of step 4 has happened: that the answer after it did not come allows nobody to start it again."""
    scene.reference()
    run_id = scene.strike()
    scene.reconcile(run_id, "--status", "not-applied")
    run = scene.site.run(run_id)
    assert (run.state, run.reason) == ("failed", "task_failed"), scene.site.report()
    [(code,)] = rows(scene.site.store, "SELECT json_extract(error_json, '$.code') FROM tasks WHERE run_id = ?", run_id)
    assert code == "not_repeatable"
    assert scene.lines() == 1
    assert rows(scene.site.store, "SELECT number FROM attempts WHERE run_id = ?", run_id) == [(1,)]
    scene.leave(run_id)
