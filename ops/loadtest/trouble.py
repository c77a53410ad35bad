"""What goes wrong during the torture run, one thread for each kind of trouble, all of it drawn from one seed.

The order of events depends on the machine, so the same seed gives the same intentions, not the same history.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import orders
from agentctl.store import process_identity
from ground import CallFailed, Ground, Member

VICTIMS = ("worker", "worker", "worker", "worker", "worker", "worker", "coordinator", "coordinator", "supervisor")
FOREIGN_LOCK = """
import sys, time, apsw
connection = apsw.Connection(sys.argv[1])
connection.set_busy_timeout(10000)
connection.execute("BEGIN IMMEDIATE")
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""


class Trouble:
    """Kills, stops, locks and a person who reconciles, until `quiet` is called."""

    def __init__(self, ground: Ground, seed: int, *, kill_every: float, patience: float) -> None:
        self.ground = ground
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._seed = seed
        self._kill_every = kill_every
        self._patience = patience
        self._over = threading.Event()
        self._quiet = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, work), name=name, daemon=True)
            for name, work in (
                ("kills", self._kill),
                ("stops", self._stop),
                ("locks", self._lock),
                ("person", self._reconcile),
                ("housekeeper", self._look_after),
            )
        ]

    def begin(self) -> None:
        """Let it go wrong."""
        for thread in self._threads:
            thread.start()

    def quiet(self) -> None:
        """No more trouble; the person goes on."""
        self._quiet.set()
        for thread in self._threads:
            if thread.name != "person":
                thread.join(120)

    def end(self) -> None:
        """The person goes home, too."""
        self._over.set()
        self._quiet.set()
        for thread in self._threads:
            thread.join(120)

    def _guarded(self, name: str, work: Callable[[random.Random], None]) -> None:
        try:
            work(random.Random(f"{self._seed} {name}"))
        except Exception as error:
            self.errors.append(f"the thread of {name} ended: {type(error).__name__}: {error}")

    # -- kill -9, one after the other ------------------------------------------------------------------------------

    def _kill(self, chance: random.Random) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._kill_every, time.monotonic())
            if self._quiet.wait(max(0.0, due - time.monotonic())):
                return
            kind = chance.choice(VICTIMS)
            found = self.ground.members(kind)
            if found and process_identity.kill(chance.choice(found).identity):
                self.counts[f"killed: {kind}"] += 1

    # -- SIGSTOP and SIGCONT ---------------------------------------------------------------------------------------

    def _stop(self, chance: random.Random) -> None:
        """One process for a moment, or for longer than lease and grace together; now and then all at once."""
        while not self._quiet.wait(chance.uniform(0.5, 4.0)):
            found = self.ground.members("worker", "coordinator", "supervisor")
            if not found:
                continue
            if chance.random() < 0.1:
                self._hold(found, chance.uniform(0.5, 3.0), "stopped: everybody at once")
                continue
            victim = chance.choice(found)
            long = chance.random() < 0.25
            seconds = self._patience * chance.uniform(1.0, 1.5) if long else chance.uniform(0.05, 2.0)
            self._hold(
                [victim], seconds, f"stopped: {victim.kind}, {'longer than lease and grace' if long else 'short'}"
            )

    def _hold(self, members: list[Member], seconds: float, what: str) -> None:
        for member in members:
            process_identity.kill(member.identity, signal.SIGSTOP)
        self.counts[what] += 1
        try:
            self._quiet.wait(seconds)
        finally:
            for member in members:
                process_identity.kill(member.identity, signal.SIGCONT)

    # -- a foreign process that holds SQLite's write lock ----------------------------------------------------------

    def _lock(self, chance: random.Random) -> None:
        while not self._quiet.wait(chance.uniform(1.0, 8.0)):
            for _ in range(chance.choice((1, 1, 1, 5))):  # five of them stand in line
                seconds = chance.choice((0.01, 0.1, 0.5, 2.0))
                argv = [sys.executable, "-c", FOREIGN_LOCK, str(self.ground.database), str(seconds)]
                if subprocess.run(argv, check=False, stderr=subprocess.DEVNULL).returncode == 0:
                    self.counts["foreign locks"] += 1

    # -- housekeeping at the same time ------------------------------------------------------------------------------

    def _look_after(self, chance: random.Random) -> None:
        """Nothing is wrong with a store at work, and what is collected is needed by nobody."""
        while not self._quiet.wait(chance.uniform(5.0, 30.0)):
            verb = chance.choice(
                (("db", "verify", "--no-artifacts"), ("artifacts", "gc", "--older-than-days", "0"), ("db", "backup"))
            )
            if verb == ("db", "backup"):
                self._back_up()
                continue
            answer = self.ground.ask(*verb)
            self.counts[f"meanwhile: {' '.join(verb[:2])}"] += 1
            if answer.code != 0:
                self.errors.append(
                    f"`agentctl {' '.join(verb)}`, meanwhile: {answer.code}: {answer.out + answer.err}"[:1000]
                )

    def _back_up(self) -> None:
        """A copy of one moment, which has to be sound by itself."""
        copy = self.ground.folder / "backup"
        self.ground.call("db", "backup", str(copy))
        answer = self.ground.ask("db", "verify", "--db", str(copy / "runtime.db"))
        self.counts["meanwhile: db backup"] += 1
        if answer.code != 0:
            self.errors.append(f"a backup is not sound: {answer.out + answer.err}"[:1000])
        shutil.rmtree(copy)

    # -- the person who looks what has become of uncertain effects --------------------------------------------------

    def _reconcile(self, chance: random.Random) -> None:
        """The ledger outside tells what happened. What somebody still has in hand is asked for again later."""
        query = (
            "SELECT e.effect_id, r.workflow_name, r.run_id FROM effects e JOIN runs r USING (run_id) "
            "WHERE e.status = 'uncertain' AND e.superseded = 0 AND r.cancel_requested_at IS NULL AND NOT EXISTS "
            "(SELECT 1 FROM effect_reconciliations c WHERE c.effect_id = e.effect_id)"
        )
        while not self._over.wait(0.3):
            for effect, key, _ in self.ground.rows(query):
                if self._over.is_set():
                    return
                item = executed(orders.ledger(self.ground.folder, key)).get(effect)
                self._tell(effect, item)

    def _tell(self, effect: str, item: str | None) -> None:
        words = ["effects", "reconcile", effect, "--actor", "torture", "--reason", "the ledger outside says so"]
        if item is None:
            words += ["--status", "not-applied"]
        else:
            result = {"changed": True, "exitCode": 0, "status": "changed", "stderr": "", "stdout": f"{item}\n"}
            path = self.ground.folder / "result.json"
            path.write_text(json.dumps(result))
            words += ["--status", "applied", "--result-file", str(path)]
        try:
            answer = self.ground.ask(*words)
        except CallFailed as error:
            self.errors.append(str(error))
            return
        if answer.code == 0:
            self.counts[f"reconciled: {'applied' if item else 'not applied'}"] += 1
        elif answer.code == 5:
            self.counts["reconciliation refused for now"] += 1
        else:
            self.errors.append(f"reconcile ended with {answer.code}: {answer.err[-500:]}")


def executed(path: Path) -> dict[str, str]:
    """Effect -> item, as a ledger file tells."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {effect: item for item, _, effect in (line.partition(" ") for line in lines)}


def submit(ground: Ground, workflow: Path, key: str, die_after: float | None) -> str:
    """Hand a workflow in; with `die_after` the first try is killed meanwhile and the same is asked for again."""
    words = ("submit", str(workflow), "--idempotency-key", key)
    if die_after is not None:
        process = subprocess.Popen(
            [ground.program, *words],
            cwd=ground.folder,
            env=ground.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            process.wait(die_after)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return str(ground.call(*words)["runId"])
