"""Crashes around replay and compensation: whoever makes the run, drives it, or would start it, dies exactly at a point.

A replay is there whole or not at all. An inverse action is carried out once, and a compensation that is declared to
start by itself is started once, by whoever comes next. The notes outside tell what was really executed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.children import wait_until
from support.field import Field
from support.scale import repeats, short_lease
from support.undo import AUTOMATIC, Undo

SEED = int(os.environ.get("AGENTCTL_TEST_SEED") or random.randrange(2**32))
DRIVER_POINTS = ("after_compensation", "before_commit", "after_commit", "before_run_end")
WORKER_POINTS = ("after_claim", "before_effect_start", "before_finish", "after_finish")


@pytest.fixture
def undo(tmp_path: Path) -> Iterator[Undo]:
    print(f"AGENTCTL_TEST_SEED={SEED}")  # noqa: T201
    field = Field(tmp_path)
    field.lease(short_lease())
    try:
        yield Undo(field)
    finally:
        field.close()


def failed(undo: Undo, idempotent: bool = True, **options: object) -> str:
    inverse = "undo-again" if idempotent else "undo"
    tasks = [undo.task("a", undo=inverse), undo.task("b", needs=["a"], undo=inverse), undo.end("b")]
    return undo.failed(tasks, **options)


def die(undo: Undo, point: str, *arguments: str, action: str = "kill") -> None:
    """A command that kills itself, or its worker its parent, at a point; it has to come to that."""
    marker = undo.field.root / f"struck-{point}"
    process = undo.field.start(*arguments, env={"AGENTCTL_FAULT": f"{point}:{action}@{marker}"})
    process.popen.wait(120)
    assert marker.exists(), process.err


@pytest.mark.parametrize("point", ["before_replay", "after_replay"])
def test_a_replay_is_there_whole_or_not_at_all(undo: Undo, point: str) -> None:
    source = failed(undo)
    notes = undo.notes()
    die(undo, point, "replay", source)
    made = undo.derived(source, "replay")
    assert [state for _, state in made] == (["failed"] if point == "after_replay" else [])
    undo.sound()
    assert undo.field.json("replay", source).code == 4
    assert undo.notes() == notes
    undo.sound()


def test_nothing_is_made_before_the_compensation_exists(undo: Undo) -> None:
    source = failed(undo)
    die(undo, "before_compensation", "compensate", source)
    assert undo.derived(source) == []
    assert undo.compensate(source).code == 0
    assert undo.done() == ["b", "a"]
    undo.sound()


@pytest.mark.parametrize(
    ("point", "action"), [*((p, "kill") for p in DRIVER_POINTS), *((p, "parent") for p in WORKER_POINTS)]
)
def test_a_compensation_goes_on_where_it_was(undo: Undo, point: str, action: str) -> None:
    source = failed(undo)
    die(undo, point, "compensate", source, action=action)
    [(made, state)] = undo.derived(source)
    if state == "running":
        assert undo.rules(source) == [("*", "compensation_in_progress")]
        assert undo.field.json("resume", made).code == 0
    assert undo.derived(source) == [(made, "succeeded")]
    assert undo.plan(source)["tasks"] == []
    assert sorted(undo.conclusions(source)) == [("a", "compensated"), ("b", "compensated")]
    # What may be repeated, may have been: then its worker died before it could say that it was done.
    assert list(dict.fromkeys(undo.done())) == ["b", "a"]
    if point != "before_finish":
        assert undo.done() == ["b", "a"]
    undo.sound()


@pytest.mark.parametrize("point", ["before_run_end", "before_compensation", "after_compensation"])
@pytest.mark.parametrize("who", ["resume", "compensate", "coordinator"])
def test_an_automatic_compensation_is_started_once_by_whoever_comes_next(undo: Undo, point: str, who: str) -> None:
    field = undo.field
    tasks = [undo.task("a"), undo.task("b", needs=["a"]), undo.end("b")]
    file = undo.write(tasks, compensation=AUTOMATIC)
    die(undo, point, "run", file)
    [source, *made] = undo.runs()
    assert len(made) == (point == "after_compensation")
    assert len(field.rows("SELECT 1 FROM compensations_due")) == (point == "before_compensation")
    if who == "coordinator":
        pool = field.pool(2)
        wait_until(lambda: [state for _, state in undo.derived(source)] == ["succeeded"], "the compensation")
        field.stop(pool)
    elif point == "before_run_end" or who == "resume":
        assert field.json("resume", source).code == 4
    else:
        assert undo.compensate(source).code == (3 if point == "after_compensation" else 0)
        for name, _ in undo.derived(source):
            field.json("resume", name)
    assert [state for _, state in undo.derived(source)] == ["succeeded"]
    assert undo.notes() == ["a", "b", "undo-b", "undo-a"]
    assert field.rows("SELECT 1 FROM compensations_due") == []
    undo.sound()


def test_several_that_compensate_at_once_undo_once(undo: Undo) -> None:
    source = failed(undo, idempotent=False)
    commands = [undo.field.start("compensate", source, "--output", "json") for _ in range(4)]
    codes = [command.wait().code for command in commands]
    assert codes.count(0) >= 1
    assert set(codes) <= {0, 3}
    assert [state for _, state in undo.derived(source)] == ["succeeded"]
    assert undo.done() == ["b", "a"]
    undo.sound()


def test_repeated_compensation_after_partial_failures_undoes_each_effect_once(undo: Undo) -> None:
    chance = random.Random(SEED)
    for round_ in range(repeats(20)):
        count = chance.randrange(1, 7)
        names = [f"r{round_}t{n}" for n in range(count)]
        tasks = [undo.task(name, needs=names[:n] if chance.random() < 0.5 else []) for n, name in enumerate(names)]
        source = undo.failed([*tasks, undo.end(*names)], name=f"r{round_}")
        order = [item["sourceTaskId"] for item in undo.plan(source)["tasks"]]
        assert sorted(order) == sorted(names)
        before, left = len(undo.done()), order
        while left:
            failing = {name for name in left if chance.random() < 0.4}
            for name in names:
                flag = undo.field.folder / f"fail-{name}"
                flag.touch() if name in failing else flag.unlink(missing_ok=True)
            chosen = [name for name in left if chance.random() < 0.7] if chance.random() < 0.3 else []
            tried = [name for name in left if name in chosen or not chosen]
            result = undo.compensate(source, *(word for name in chosen for word in ("--task", name)))
            assert result.data["compensatedTasks"] == [name for name in tried if name not in failing]
            assert result.data["failedTasks"] == [name for name in tried if name in failing]
            assert result.code == (4 if failing & set(tried) else 0)
            left = [name for name in left if name not in tried or name in failing]
        assert sorted(undo.done()[before:]) == sorted(names)
        assert undo.plan(source)["tasks"] == []
        assert sorted(undo.conclusions(source)) == sorted((name, "compensated") for name in names)
    undo.sound()
