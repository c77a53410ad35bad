"""The torture run: much work, and everything that can go wrong with processes, for as long as asked; then the verdict.

16 workers in two pools, each with its supervisor, and one coordinator. Meanwhile

- one random `kill -9` a second among workers, supervisors and coordinator;
- stopped processes: for a moment, for longer than lease and grace, all at once;
- a foreign process that holds SQLite's write lock, now and then five in a row;
- people who are killed while they hand in a workflow and ask again under the same key;
- runs that are cancelled;
- a housekeeper who verifies, collects and makes backups;
- a person who looks into the ledger outside and reconciles what is uncertain.

Whatever ends is started again, as a service manager would. Afterwards it is quiet, everything has to come to its end,
and the verifier judges.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import orders
import verifier
from ground import Ground, Services, pools, wait_for
from trouble import Trouble, submit

OPEN_RUNS = 6
QUIET_SECONDS = 600.0
STOP_SECONDS = 90.0
CANCELLED = 0.05
DIES_WHILE_SUBMITTING = 0.2


@dataclass(frozen=True)
class Torture:
    """How much of it."""

    minutes: float
    seed: int
    workers: int
    kill_every: float
    lease: float

    @property
    def patience(self) -> float:
        """Lease and grace."""
        return 2 * self.lease


def run(ground: Ground, torture: Torture, say: Any) -> tuple[verifier.Verdict, Counter[str], dict[str, float]]:
    """Torture, let everything come to its end, stop, and judge."""
    ground.environment["AGENTCTL_LEASE_SECONDS"] = str(torture.lease)
    ground.environment["AGENTCTL_HEARTBEAT_SECONDS"] = str(torture.lease / 5)
    figures: dict[str, float] = {}
    began = time.monotonic()
    with pools(ground, torture.workers, 2) as services:
        trouble = Trouble(ground, torture.seed, kill_every=torture.kill_every, patience=torture.patience)
        trouble.begin()
        client = _Client(ground, torture.seed, services, say)
        client.work(torture.minutes * 60, figures)
        trouble.quiet()
        figures["seconds of trouble"] = time.monotonic() - began
        say("quiet: everything has to come to its end now")
        quiet = time.monotonic()
        complaint = _settle(ground, services)
        figures["seconds until everything had ended"] = time.monotonic() - quiet
        trouble.end()
        codes = services.stop(STOP_SECONDS)
        verdict = verifier.judge(ground)
    verdict.problems += trouble.errors + client.errors
    if complaint:
        verdict.blame(complaint)
    if set(codes) != {0}:
        verdict.blame(f"the pools ended with {codes} after SIGTERM, not all with 0")
    for name, code in services.ends:
        if code != -signal.SIGKILL:
            verdict.blame(f"{name} ended by itself with {code}")
    trouble.counts["pools started again"] = len(services.ends)
    return verdict, trouble.counts + client.counts, figures


def _settle(ground: Ground, services: Services) -> str | None:
    """Wait for the end of all runs."""

    def ended() -> bool:
        services.look()
        return not ground.rows("SELECT 1 FROM runs WHERE ended_at IS NULL LIMIT 1")

    try:
        wait_for("the end of all runs", QUIET_SECONDS, ended)
    except TimeoutError as error:
        left = ground.rows("SELECT run_id, workflow_name, state, reason FROM runs WHERE ended_at IS NULL")
        held = ground.rows(
            "SELECT task_id, state, hold, holder, outcome FROM attempts WHERE state <> 'closed' LIMIT 20"
        )
        return f"{error}: {left}; {held}"
    return None


class _Client:
    """Hands in work so that there is always some, cancels a part of it, and starts again what has ended."""

    def __init__(self, ground: Ground, seed: int, services: Services, say: Any) -> None:
        self.ground = ground
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._chance = random.Random(f"{seed} client")
        self._services = services
        self._say = say
        self._number = 0
        self._to_cancel: list[tuple[float, str, str]] = []

    def work(self, seconds: float, figures: dict[str, float]) -> None:
        """For so many seconds."""
        end = time.monotonic() + seconds
        told = time.monotonic()
        moved, progress, standstill, widest = time.monotonic(), -1, 0.0, 0
        while time.monotonic() < end or self._number < len(orders.KINDS):
            self._services.look()
            try:
                self._hand_in()
                self._cancel()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
            seen = self.ground.rows("SELECT COALESCE(SUM(audit_sequence), 0) FROM runs")[0][0]
            if seen != progress:
                moved, progress = time.monotonic(), seen
            standstill = max(standstill, time.monotonic() - moved)
            widest = max(widest, self.ground.wal_bytes())
            if time.monotonic() - told > 30:
                told = time.monotonic()
                done = self.ground.rows("SELECT state, COUNT(*) FROM runs GROUP BY state")
                self._say(f"{end - told:.0f} s left; runs: {dict(done)}; audit events: {progress}")
            time.sleep(0.1)
        figures["longest standstill in seconds"] = standstill
        figures["largest log in MiB"] = widest / 2**20

    def _hand_in(self) -> None:
        going = self.ground.rows("SELECT COUNT(*) FROM runs WHERE state = 'running'")[0][0]
        if going >= OPEN_RUNS:
            return
        # Each kind at least once, however short the torture is.
        first = self._number < len(orders.KINDS)
        kind = orders.KINDS[self._number] if first else self._chance.choice(orders.KINDS)
        key = f"{kind}-{self._number:05d}"
        self._number += 1
        count = self._chance.choice((1, 20, 100, 300))
        pause = self._chance.choice(("", "", "0.05", "0.3"))
        workflow = self.ground.write(f"{key}.yaml", orders.document(kind, key, count, pause, self.ground.folder))
        self.ground.note({"key": key, "kind": kind, "count": count})
        dies = self._chance.uniform(0.05, 1.0) if self._chance.random() < DIES_WHILE_SUBMITTING else None
        self.counts["submissions killed and repeated"] += dies is not None
        run_id = submit(self.ground, workflow, key, dies)
        self.ground.note({"key": key, "runId": run_id})
        self.counts["runs handed in"] += 1
        if self._chance.random() < CANCELLED:
            self._to_cancel.append((time.monotonic() + self._chance.uniform(0.0, 3.0), key, run_id))

    def _cancel(self) -> None:
        for entry in list(self._to_cancel):
            due, key, run_id = entry
            if time.monotonic() < due:
                continue
            self._to_cancel.remove(entry)
            answer = self.ground.ask("cancel", run_id)
            # 4: it had come to its end before.
            if answer.code == 0 and answer.data.get("requested", True):
                self.ground.note({"key": key, "cancelled": True})
                self.counts["runs cancelled"] += 1
            elif answer.code not in (0, 4):
                self.errors.append(f"cancel {run_id} ended with {answer.code}: {answer.err[-500:]}")
