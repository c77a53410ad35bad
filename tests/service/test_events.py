"""The audit trail, followed: every event once, in its run's order, whoever restarts and whatever is removed."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from agentctl.store.backup import backup, restore
from agentctl.store.engine import Store
from agentctl.store.errors import UsageError
from agentctl.store.records import Event
from agentctl.store.trail import FULL_LOOK_SECONDS, Cursor, Trail
from support.builders import new_run, open_store
from support.children import wait_until
from support.clock import ManualClock
from support.field import Field, Started
from support.rows import rows, scalar


def lines(process: Started) -> list[dict[str, Any]]:
    """What a follower has written, in whole lines."""
    text = process._out.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def told(found: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(e["data"]["runId"], e["data"]["sequence"]) for e in found if e["kind"] == "Event"]


def cursors(found: list[dict[str, Any]]) -> list[str]:
    return [line["data"]["cursor"] for line in found if line["kind"] == "EventCursor"]


def recorded(field: Field) -> list[tuple[str, int]]:
    return field.rows("SELECT run_id, sequence FROM audit_events ORDER BY 1, 2")


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_to_its_end(field: Field) -> None:
    file = field.workflow("w", [field.tick_fan("t", 3, 0.2, idempotent=False)])
    run_id = field.submit(file)
    follower = field.start("events", run_id, "--follow", "--output", "json")
    wait_until(lambda: len(lines(follower)) >= 1, "what was there")
    pool = field.pool(2)
    result = follower.wait(60)
    assert result.code == 0, result.err
    assert told(lines(follower)) == recorded(field)
    half = len(lines(follower)) // 2
    again = field("events", run_id, "--follow", "--output", "json", "--after", str(half))
    assert [json.loads(line)["data"]["sequence"] for line in again.out.splitlines()] == list(
        range(half + 1, len(lines(follower)) + 1)
    )
    assert run_id in field("events", run_id, "--follow").out
    field.check_clean_end(drained=[pool])


def test_what_is_cut_is_told_and_can_be_gone_on_with(field: Field) -> None:
    """By pages of one run and of all: together they are everything, and the last one says that it is."""
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    everything = recorded(field)
    assert len(everything) > 4
    run_id = everything[0][0]
    for words in ([run_id], []):
        found: list[tuple[str, int]] = []
        after = "start"
        while True:
            page = field.json("events", *words, "--limit", "3", "--after", after)
            assert page.code == 0
            assert page.err == ""
            found += [(event["runId"], event["sequence"]) for event in page.data["events"]]
            if page.data["next"] is None:
                break
            after = page.data["next"]
        assert sorted(found) == everything
        people = field("events", *words, "--limit", "3")
        assert f"agentctl events{''.join(f' {word}' for word in words)} --after " in people.err
        assert "more" not in field("events", *words).err
    exact = field.json("events", run_id, "--limit", str(len(everything)))
    assert exact.data["next"] is None


def test_what_cannot_be_followed_is_refused_before_anything_is_said(field: Field) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    refused = field.json("events", "--follow", "--limit", "5")
    assert (refused.code, refused.out) == (2, "")
    away = field.folder / "no" / "cursor"
    for words in (["--follow"], []):
        refused = field.json("events", *words, "--after", "start", "--cursor-file", away)
        assert refused.code == 2
        refused = field.json("events", *words, "--cursor-file", away)
        assert (refused.code, refused.out, refused.error["code"]) == (5, "", "environment")
        assert str(away) in refused.error["message"]
    broken = field.folder / "cursor"
    broken.write_text("something else\n")
    refused = field.json("events", "--cursor-file", broken)
    assert (refused.code, refused.out) == (2, "")
    assert str(broken) in refused.error["message"]
    assert "that file" in refused.error["remedy"]


def test_a_cursor_is_kept_behind_a_link(field: Field) -> None:
    """A file that is named through a link is the file that is written, and the link stays."""
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    real, link = field.folder / "state" / "cursor", field.folder / "cursor"
    real.parent.mkdir()
    link.symlink_to(real)
    found = field.json("events", "--cursor-file", link)
    assert found.code == 0
    assert link.is_symlink()
    assert real.read_text() == found.data["cursor"] + "\n"


def test_all_runs_are_followed_through_kills_and_restarts(field: Field) -> None:
    """The reader is killed again and again, the pool as well, old runs are removed: nothing is left out."""
    place = field.root / "cursor"
    command = ("events", "--follow", "--cursor-file", place, "--output", "json")
    file = field.workflow("w", [field.tick_fan("t", 6, 0.02, idempotent=False)])
    chance = random.Random(8)
    pool = field.pool(2)
    followers = [field.start(*command)]
    wait_until(place.exists, "it has begun", seconds=20)
    runs = []
    for _ in range(4):
        before = len(lines(followers[-1]))  # a short run is over before `submit` has returned
        runs.append(field.submit(file))
        wait_until(lambda n=before: len(lines(followers[-1])) >= n + chance.randint(1, 6), "it reads", seconds=20)  # type: ignore[misc]
        followers[-1].signal(signal.SIGKILL)
        followers[-1].wait()
        runs.append(field.submit(file))
        followers.append(field.start(*command))
    for run_id in runs:
        assert field.json("wait", run_id).code == 0
    everything = set(recorded(field))
    seen: list[tuple[str, int]] = []

    def complete() -> bool:
        seen[:] = [event for follower in followers for event in told(lines(follower))]
        return set(seen) == everything

    wait_until(complete, "every event", seconds=20)
    for follower in followers:
        own = told(lines(follower))
        assert len(own) == len(set(own))
        for run_id in runs:
            mine = [sequence for run, sequence in own if run == run_id]
            assert mine == sorted(mine)
    assert field.json("gc", "--older-than-days", "0").code == 0
    assert recorded(field) == []
    later = field.submit(file)
    assert field.json("wait", later).code == 0
    wait_until(
        lambda: set(told(lines(followers[-1]))) >= set(recorded(field)), "it goes on after the removal", seconds=20
    )
    wait_until(
        lambda: place.read_text().strip() == cursors(lines(followers[-1]))[-1],
        "what was handed over is covered by the cursor that is kept",
        seconds=20,
    )
    followers[-1].signal(signal.SIGKILL)
    followers[-1].wait()
    again = field.json("events", "--cursor-file", place)
    assert again.code == 0
    assert again.data["events"] == []
    field.check_clean_end(drained=[pool])


def test_from_now_on_or_from_the_start(field: Field) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    total = len(recorded(field))
    start = field.json("events").data
    assert (start["runId"], len(start["events"])) == (None, total)
    part = field.json("events", "--limit", "2").data
    rest = field.json("events", "--after", part["cursor"]).data
    assert [*part["events"], *rest["events"]] == start["events"]
    assert field.json("events", "--after", rest["cursor"]).data["events"] == []
    follower = field.start("events", "--follow", "--output", "json")
    wait_until(lambda: len(lines(follower)) == 1, "the first cursor")
    assert field("run", "hello.yaml").code == 0
    wait_until(lambda: len(told(lines(follower))) == len(recorded(field)) - total, "the events of the new run")
    assert lines(follower)[0]["kind"] == "EventCursor"


@pytest.mark.parametrize(
    "words",
    [
        ["--after", "no-cursor"],
        ["--after", "c1-AAAA"],
        ["--after", "12"],
        ["@latest", "--after", "c1-AAAA"],
        ["@latest", "--after", "-1"],
        ["@latest", "--cursor-file", "x"],
        ["--after", "start", "--cursor-file", "x"],
    ],
)
def test_what_is_no_cursor(field: Field, words: list[str]) -> None:
    field("init", "hello.yaml")
    assert field("run", "hello.yaml").code == 0
    assert field.json("events", *words).code == 2


# -- cursors, with time in our hands -----------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = open_store(tmp_path, clock)
    yield opened
    opened.close()


def append(store: Store, run_id: str, count: int = 1) -> None:
    from agentctl.store import audit

    with store.database.write() as tx:
        audit.append(tx, run_id, [Event("test", None, "{}")] * count, actor="t", now=store.clock.now())


def end(store: Store, run_id: str) -> None:
    with store.database.write() as tx:
        tx.execute("UPDATE runs SET state = 'failed', ended_at = 1 WHERE run_id = ?", (run_id,))


def rest(trail: Trail, monotonic: float = 0.0) -> list[tuple[str, int]]:
    return [(event["runId"], event["sequence"]) for event in trail.look(1000, monotonic)]


def test_a_cursor_is_a_word_that_comes_back() -> None:
    cursor = Cursor(12, 5, {3: 17, 11: 2})
    assert Cursor.parse(cursor.as_text()) == cursor
    assert Cursor.parse(Cursor().as_text()) == Cursor()
    text = cursor.as_text()
    for bad in ("", "c1-", text[:-3], text[:5] + "!" + text[6:], "c2" + text[2:], "ü"):
        with pytest.raises(UsageError):
            Cursor.parse(bad)


def test_long_ended_runs_are_not_in_the_cursor(store: Store) -> None:
    for number in range(40):
        store.create_run(new_run(f"run-{number}", tasks=1))
        end(store, f"run-{number}")
    store.create_run(new_run("open", tasks=1))
    trail = Trail(store.database, Cursor())
    assert len(rest(trail)) == scalar(store, "SELECT COUNT(*) FROM audit_events")
    assert list(trail.cursor().partly) == [41]
    assert len(trail.cursor().as_text()) < 80


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_whatever_the_size_of_a_look_nothing_is_lost(store: Store, limit: int) -> None:
    """After every look somebody else goes on from the cursor."""
    for name in ("a", "b", "c"):
        store.create_run(new_run(name, tasks=1))
        append(store, name, 3)
    end(store, "b")
    cursor, found = Cursor(), []
    for _ in range(40):
        trail = Trail(store.database, cursor)
        events = trail.look(limit, 0.0)
        found += [(event["runId"], event["sequence"]) for event in events]
        cursor = Cursor.parse(trail.cursor().as_text())
    assert sorted(found) == sorted(set(found))
    assert len(found) == scalar(store, "SELECT COUNT(*) FROM audit_events")


def test_an_event_after_the_end_of_a_run_is_found(store: Store, clock: ManualClock) -> None:
    store.create_run(new_run("a", tasks=1))
    end(store, "a")
    trail = Trail(store.database, Cursor())
    rest(trail)
    clock.advance(10)
    append(store, "a")
    assert rest(trail, FULL_LOOK_SECONDS - 1) == []
    last = scalar(store, "SELECT MAX(sequence) FROM audit_events")
    assert rest(trail, FULL_LOOK_SECONDS) == [("a", last)]
    cursor = trail.cursor()
    clock.advance(10)
    append(store, "a")  # while nobody follows
    assert rest(Trail(store.database, cursor)) == [("a", last + 1)]


def test_a_clock_that_is_set_back_hides_no_new_run(store: Store, clock: ManualClock) -> None:
    store.create_run(new_run("z", tasks=1))
    end(store, "z")
    trail = Trail(store.database, Cursor())
    rest(trail)
    clock.set_wall(clock.now() - 86_400_000)
    store.create_run(new_run("a", tasks=1))
    assert {run for run, _ in rest(Trail(store.database, trail.cursor()))} == {"a"}
    assert {run for run, _ in rest(trail)} == {"a"}


def test_numbers_are_not_used_again(store: Store) -> None:
    store.create_run(new_run("a", tasks=1))
    trail = Trail(store.database, Cursor())
    rest(trail)
    with store.database.write() as tx:
        tx.execute("DELETE FROM runs WHERE run_id = 'a'")
    store.create_run(new_run("b", tasks=1))
    assert {run for run, _ in rest(Trail(store.database, trail.cursor()))} == {"b"}


def test_who_began_with_what_was_new_goes_on_with_what_is_new(store: Store, clock: ManualClock) -> None:
    """What was passed over at first is not told by the next follower instead."""
    for name in ("ended", "open"):
        store.create_run(new_run(name, tasks=1))
        append(store, name, 2)
    end(store, "ended")
    trail = Trail(store.database, None)
    assert rest(trail) == []
    clock.advance(10)
    append(store, "open")
    last = scalar(store, "SELECT MAX(sequence) FROM audit_events WHERE run_id = 'open'")
    assert rest(Trail(store.database, trail.cursor())) == [("open", last)]


def test_a_cursor_outlives_a_restored_backup(store: Store, clock: ManualClock, tmp_path: Path) -> None:
    """Runs go on from an earlier event there, and new ones get numbers that others had: all that is new is told."""
    for name in ("open", "ended"):
        store.create_run(new_run(name, tasks=1))
    end(store, "ended")
    backup(store, tmp_path / "copy")
    append(store, "open", 5)
    store.create_run(new_run("lost", tasks=1))
    append(store, "lost", 5)
    trail = Trail(store.database, Cursor())
    rest(trail)
    cursor = trail.cursor()
    restore(tmp_path / "copy", tmp_path / "restored.db", clock)
    with closing(Store(tmp_path / "restored.db", clock)) as restored:
        known = scalar(restored, "SELECT COUNT(*) FROM audit_events")
        for more in (1, 9):  # fewer events than were read of the run that is lost, and more
            clock.advance(10)
            append(restored, "open", more)
            if more == 1:
                restored.create_run(new_run("new", tasks=1))
            new = everything_after(restored, known)
            assert {run for run, _ in new} == {"open", "new"}
            assert rest(Trail(restored.database, cursor)) == new


def everything_after(store: Store, known: int) -> list[tuple[str, int]]:
    """What was appended since there were so many events of the runs that a backup holds, by run."""
    found = rows(store, "SELECT run_id, sequence FROM audit_events ORDER BY event_no")
    old = rows(store, "SELECT run_id, sequence FROM audit_events ORDER BY created_at, event_no LIMIT ?", known)
    return [event for event in found if event not in old]
