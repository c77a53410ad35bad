"""The loads without trouble: many runs at once, one large run, tasks of all lengths, and a steady load over time."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import orders
from ground import Ground, peak_bytes, pools, wait_for

LOG_LIMIT = 64 * 2**20
KEEPS = 0.8


@dataclass
class Outcome:
    """What was measured and what was wrong."""

    figures: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def _submit(ground: Ground, key: str, count: int, pause: str = "", *, gather: bool = True) -> str:
    document = orders.document("once", key, count, pause, ground.folder, gather=gather)
    # A document has at most 1 MiB, so the names come from outside.
    fanout = document["spec"]["tasks"][0]["foreach"]
    inputs = ground.write(f"{key}.inputs.json", {"items": fanout["items"]})
    fanout["items"] = "${{ inputs.items }}"
    document["spec"]["inputs"] = {"items": []}
    workflow = ground.write(f"{key}.yaml", document)
    run_id = str(ground.call("submit", str(workflow), "--inputs-file", str(inputs))["runId"])
    ground.note({"key": key, "kind": "once", "count": count, "runId": run_id})
    return run_id


def _all_ended(ground: Ground) -> bool:
    return not ground.rows("SELECT 1 FROM runs WHERE state = 'running' LIMIT 1")


def _proof(ground: Ground, outcome: Outcome, keys: dict[str, int]) -> None:
    """Each item once in the ledger outside, each run succeeded, each effect sent once, the store sound."""
    for state, number in ground.rows("SELECT state, COUNT(*) FROM runs GROUP BY state"):
        if state != "succeeded":
            outcome.problems.append(f"{number} runs are {state}")
    for key, count in keys.items():
        lines = [line.split(" ")[0] for line in orders.ledger(ground.folder, key).read_text().splitlines()]
        if sorted(lines) != orders.item_names(count):
            outcome.problems.append(f"{key}: {len(lines)} executions ({len(set(lines))} different) of {count} items")
    again = ground.rows("SELECT COUNT(*) FROM effects WHERE dispatches <> 1 OR status <> 'succeeded'")[0][0]
    if again:
        outcome.problems.append(f"{again} effects were not sent exactly once")
    answer = ground.ask("db", "verify")
    if answer.code != 0:
        outcome.problems.append(f"`agentctl db verify` ended with {answer.code}: {(answer.out + answer.err)[:800]}")
    outcome.figures["database in MiB"] = ground.database.stat().st_size / 2**20


def many_runs(ground: Ground, say: Any, *, runs: int, tasks: int, workers: int) -> Outcome:
    """Runs that are all there before the pool starts, so that they are really at once."""
    outcome = Outcome()
    keys = {f"run-{number:04d}": tasks for number in range(runs)}
    say(f"handing in {runs} runs of {tasks} tasks")
    with ThreadPoolExecutor(4) as hands:
        list(hands.map(lambda key: _submit(ground, key, tasks), keys))
    say("starting the pool")
    began = time.monotonic()
    with pools(ground, workers) as services:
        wait_for("the end of all runs", 3600, lambda: _all_ended(ground))
        seconds = time.monotonic() - began
        outcome.figures["seconds from the start of the pool to the last end"] = seconds
        outcome.figures["tasks/s"] = runs * tasks / seconds
        first, last = ground.rows("SELECT MIN(ended_at), MAX(ended_at) FROM runs")[0]
        begun = ground.rows("SELECT MIN(started_at) FROM effects")[0][0]
        outcome.figures["seconds to the end of the first run"] = (first - begun) / 1000
        outcome.figures["seconds to the end of the last run"] = (last - begun) / 1000
        services.stop(60)
    _proof(ground, outcome, keys)
    return outcome


def large_run(ground: Ground, say: Any, *, tasks: int, workers: int) -> Outcome:
    """One run; a look at the memory of everybody while it goes on."""
    outcome = Outcome()
    key = "large"
    began = time.monotonic()
    with pools(ground, workers) as services:
        say(f"one run of {tasks} tasks")
        handed = time.monotonic()
        _submit(ground, key, tasks, gather=False)
        outcome.figures["seconds to hand it in"] = time.monotonic() - handed
        most: dict[str, int] = {}
        log = 0

        def ended() -> bool:
            nonlocal log
            log = max(log, ground.wal_bytes())
            for member in ground.members("worker", "coordinator"):
                try:
                    most[member.kind] = max(most.get(member.kind, 0), peak_bytes(member.identity.pid))
                except OSError:
                    continue
            return _all_ended(ground)

        wait_for("the end of the run", 7200, ended, 1.0)
        seconds = time.monotonic() - handed
        services.stop(60)
    outcome.figures["seconds from handing in to the end"] = seconds
    outcome.figures["tasks/s"] = tasks / seconds
    outcome.figures["peak memory of the coordinator in MB"] = most.get("coordinator", 0) / 1e6
    outcome.figures["peak memory of a worker in MB"] = most.get("worker", 0) / 1e6
    outcome.figures["largest log in MiB"] = log / 2**20
    verify = time.monotonic()
    _proof(ground, outcome, {key: tasks})
    outcome.figures["seconds of the proof, `db verify` included"] = time.monotonic() - verify
    outcome.figures["seconds in all"] = time.monotonic() - began
    if log > LOG_LIMIT:
        outcome.problems.append(f"the log grew to {log / 2**20:.0f} MiB")
    return outcome


LENGTHS = (("", 0.0, 80), ("0.05", 0.1, 14), ("0.5", 1.0, 4), ("2.5", 5.0, 2))
"""Pause of the command (before and after its line), seconds that it takes, share in a hundred."""


def mixed(ground: Ground, say: Any, *, tasks: int, workers: int, seed: int) -> Outcome:
    """Long and short tasks together. Short runs that come in the middle must not wait for the long ones."""
    outcome = Outcome()
    chance = random.Random(seed)
    drawn = chance.choices(LENGTHS, [share for _, _, share in LENGTHS], k=tasks)
    keys: dict[str, int] = {}
    latencies: list[float] = []
    with pools(ground, workers) as services:
        began = time.monotonic()
        for pause, length, _ in LENGTHS:
            count = sum(1 for entry in drawn if entry[0] == pause)
            if count:
                key = f"length-{length:g}"
                keys[key] = count
                _submit(ground, key, count, pause)
        while not _all_ended(ground):
            key = f"visitor-{len(latencies):03d}"
            keys[key] = 3
            run_id = _submit(ground, key, 3)
            ground.call("wait", run_id)
            made, ended = ground.rows("SELECT created_at, ended_at FROM runs WHERE run_id = ?", run_id)[0]
            latencies.append((ended - made) / 1000)
            time.sleep(0.5)
        seconds = time.monotonic() - began
        services.stop(60)
    ideal = sum(length for _, length, _ in drawn) / workers
    outcome.figures["seconds to the end of everything"] = seconds
    outcome.figures["seconds that the pauses alone take with all workers busy"] = ideal
    latencies.sort()
    outcome.figures["visitors (runs of 3 short tasks in the middle of it)"] = len(latencies)
    outcome.figures["a visitor from creation to end, median seconds"] = latencies[len(latencies) // 2]
    outcome.figures["a visitor from creation to end, worst seconds"] = latencies[-1]
    longest = max(length for _, length, _ in LENGTHS)
    if latencies[-1] > 2 * longest:
        outcome.problems.append(
            f"a run of 3 short tasks took {latencies[-1]:.1f} s beside tasks of at most {longest:g} s"
        )
    _proof(ground, outcome, keys)
    return outcome


def _finished(ground: Ground) -> int:
    """How many effects there have been."""
    return int(ground.rows("SELECT COALESCE(MAX(effect_no), 0) FROM effects")[0][0])


class _Feeder:
    """A thread that keeps a few runs going and people watching them. It is ahead of the pool, never of its clock."""

    RUNS = 4
    SIZE = 2_000

    def __init__(self, ground: Ground, watchers: int) -> None:
        self.keys: dict[str, int] = {}
        self.errors: list[str] = []
        self.started = 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self._ground = ground
        self._watchers = watchers
        self._seen: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()

    def end(self) -> None:
        """No more runs."""
        self._over.set()
        self.thread.join(120)

    def wait_for_watchers(self, seconds: float) -> None:
        """They end with their runs."""
        for process in self._seen:
            process.wait(seconds)
        self._see_watchers()

    def _see_watchers(self) -> None:
        """Forget those whose run has ended; they end with 0."""
        for process in list(self._seen):
            code = process.poll()
            if code is not None:
                self._seen.remove(process)
                if code != 0:
                    self.errors.append(f"a watcher ended with {code}")

    def _work(self) -> None:
        try:
            while not self._over.wait(0.05):
                self._feed()
        except Exception as error:
            self.errors.append(f"nothing was handed in any more: {type(error).__name__}: {error}")

    def _feed(self) -> None:
        if self._ground.rows("SELECT COUNT(*) FROM runs WHERE state = 'running'")[0][0] >= self.RUNS:
            return
        key = f"run-{len(self.keys):05d}"
        self.keys[key] = self.SIZE
        run_id = _submit(self._ground, key, self.SIZE, gather=False)
        self._see_watchers()
        while len(self._seen) < self._watchers:
            self._seen.append(self._ground.start("watch", "watch", run_id, "--output", "jsonl"))
            self.started += 1


def steady(ground: Ground, say: Any, *, minutes: int, workers: int, watchers: int) -> Outcome:
    """The same load for minutes, with people who watch. The last minute has to do at least 80 % of the first."""
    outcome = Outcome()
    done: list[int] = []
    log = 0
    with pools(ground, workers) as services:
        say("a pool is there")
        feeder = _Feeder(ground, watchers)
        feeder.thread.start()
        wait_for("the first hundred effects", 120, lambda: _finished(ground) > 100)
        say("the load has begun")
        start, at = time.monotonic(), _finished(ground)
        for minute in range(1, minutes + 1):
            while (left := start + minute * 60 - time.monotonic()) > 0:
                log = max(log, ground.wal_bytes())
                time.sleep(min(0.1, left))
            now = _finished(ground)
            done.append(now - at)
            at = now
            say(f"minute {minute}: {done[-1]} tasks, log {log / 2**20:.1f} MiB at most")
        feeder.end()
        wait_for("the end of all runs", 600, lambda: _all_ended(ground))
        feeder.wait_for_watchers(60)
        services.stop(60)
    outcome.problems += feeder.errors
    outcome.figures["runs"] = len(feeder.keys)
    outcome.figures["watchers that were started"] = feeder.started
    for minute, count in enumerate(done, 1):
        outcome.figures[f"tasks in minute {minute}"] = count
    ratio = done[-1] / done[0] if done[0] else 0.0
    outcome.figures["last minute by first"] = ratio
    outcome.figures["largest log in MiB"] = log / 2**20
    if ratio < KEEPS:
        outcome.problems.append(f"the last minute did {ratio:.0%} of the first; {KEEPS:.0%} is the least")
    if log > LOG_LIMIT:
        outcome.problems.append(f"the log grew to {log / 2**20:.1f} MiB; {LOG_LIMIT / 2**20:.0f} is the most")
    _proof(ground, outcome, feeder.keys)
    return outcome
