"""Many commands on many single workers: each is executed once, whoever is killed meanwhile (field reports 1 and 19).

Every command appends one line to a ledger outside, the truth about how often something was really executed. They are
declared `unknown`: nothing may ever be executed twice, and what is in doubt is listed as `uncertain`.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.rows import rows, scalar
from support.scale import repeats
from support.site import Site, kill

SEED = int(os.environ.get("AGENTCTL_TEST_SEED") or random.randrange(2**32))
COMMANDS = repeats(1_000)
WORKERS = 8
APPEND = 'while [ -e "$3" ]; do /bin/sleep 0.02; done; echo "$1" >> "$2"'


@pytest.fixture(autouse=True)
def tell_the_seed() -> Iterator[None]:
    print(f"AGENTCTL_TEST_SEED={SEED}")  # noqa: T201
    yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path / "site") as started:
        yield started


def fan_out(site: Site, name: str, count: int, idempotency: str = "unknown") -> Path:
    """A workflow of `count` commands with a ledger of its own."""
    arguments = ["-c", APPEND, "sh", "${{ vars.item }}", str(ledger_of(site, name)), str(site.folder / "hold")]
    document: dict[str, Any] = {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "fan-out"},
        "spec": {
            "policy": {"approval": "never", "processAllowlist": ["sh"]},
            "runtime": {"maxConcurrency": 16, "maxDeliveries": 1000},
            "actions": {"append": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency}},
            "tasks": [
                {
                    "id": "append",
                    "uses": "action:append",
                    "foreach": {"items": [f"i{n}" for n in range(count)], "maxItems": max(1, count)},
                    "with": {"args": arguments},
                }
            ],
        },
    }
    return site.write(f"{name}.yaml", document)


def ledger_of(site: Site, name: str) -> Path:
    return site.folder / f"{name}.ledger"


def lines(site: Site, name: str) -> Counter[str]:
    path = ledger_of(site, name)
    return Counter(path.read_text(encoding="utf-8").split()) if path.exists() else Counter()


def judge_lines(site: Site, name: str, run_id: str, count: int) -> int:
    """No line twice; what is missing is listed as uncertain. Returns how many are."""
    executed = lines(site, name)
    assert set(executed.values()) <= {1}, [item for item, often in executed.items() if often > 1]
    query = "SELECT task_id, position FROM tasks WHERE run_id = ? AND task_id LIKE 'append--%' ORDER BY position"
    children = [task for task, _ in rows(site.store, query, run_id)]
    item_of = {task: f"i{n}" for n, task in enumerate(children)}
    assert len(children) == count
    doubtful = {item_of[task] for task in site.uncertain(run_id)}
    assert {f"i{n}" for n in range(count)} - set(executed) <= doubtful
    run = site.run(run_id)
    wanted = ("paused", "uncertain_effect") if doubtful else ("succeeded", None)
    assert (run.state, run.reason) == wanted, site.report()
    return len(doubtful)


class Services:
    """Processes that a service manager would start again whenever they end."""

    def __init__(self, site: Site, commands: list[tuple[str, ...]]) -> None:
        self._site = site
        self._running: list[tuple[tuple[str, ...], subprocess.Popen[bytes]]] = [
            (command, site.start(*command)) for command in commands
        ]
        self.restarts = 0

    def look(self) -> None:
        for i, (command, process) in enumerate(self._running):
            if process.poll() is not None:
                self._running[i] = (command, self._site.start(*command))
                self.restarts += 1


def eight_singles(chance: random.Random) -> list[tuple[str, ...]]:
    """Eight workers and a coordinator, each started by itself, in any order."""
    commands: list[tuple[str, ...]] = [
        ("workers", "start", "-n", "1", "--no-coordinator", "--name", f"single{n}") for n in range(WORKERS)
    ]
    commands.append(("coordinator", "start"))
    chance.shuffle(commands)
    return commands


def test_each_command_is_executed_once_by_eight_single_workers(site: Site) -> None:
    chance = random.Random(SEED)
    Services(site, eight_singles(chance))
    site.wait_for_workers(WORKERS)
    rounds = repeats(20)
    for round_ in range(rounds):
        name = f"round-{round_}"
        run_id = site.submit(fan_out(site, name, COMMANDS))
        site.wait_for_end(run_id, seconds=120)
        assert judge_lines(site, name, run_id, COMMANDS) == 0
        assert len(lines(site, name)) == COMMANDS
        assert set(site.deliveries(run_id).values()) == {1}
    assert set(site.stop()) == {0}
    assert len(rows(site.store, "SELECT 1 FROM processes WHERE kind = 'worker'")) == WORKERS
    site.assert_clean()


def test_each_command_is_executed_at_most_once_while_processes_are_killed(site: Site) -> None:
    chance = random.Random(SEED)
    services = Services(site, eight_singles(chance))
    site.wait_for_workers(WORKERS)
    killed: Counter[str] = Counter()
    doubtful = 0
    for round_ in range(repeats(20)):
        name = f"round-{round_}"
        run_id = site.submit(fan_out(site, name, COMMANDS))
        moments = sorted(chance.randrange(4 * COMMANDS) for _ in range(6))

        def ended(run_id: str = run_id, moments: list[int] = moments) -> bool:
            progress = scalar(site.store, "SELECT audit_sequence FROM runs WHERE run_id = ?", run_id)
            while moments and moments[0] <= progress:
                moments.pop(0)
                kind = chance.choice(("worker", "worker", "supervisor", "coordinator"))
                found = site.living(kind)
                if found and kill(chance.choice(found)):
                    killed[kind] += 1
            services.look()
            return site.run(run_id).state != "running"

        site.wait_for(ended, f"{run_id} ends", seconds=120)
        doubtful += judge_lines(site, name, run_id, COMMANDS)
    print(f"killed: {dict(killed)}, uncertain: {doubtful}, started again: {services.restarts}")  # noqa: T201
    assert killed.total() > 0
    site.stop()
    site.assert_clean()


def test_cancel_when_everybody_is_dead(site: Site) -> None:
    hold = site.folder / "hold"
    hold.touch()
    site.start("workers", "start", "-n", "2")
    site.wait_for_workers(2)
    run_id = site.submit(fan_out(site, "cancelled", 10))
    started = "SELECT COUNT(*) FROM effects WHERE status = 'started'"
    site.wait_for(lambda: scalar(site.store, started) == 2, "two commands run")
    site.kill_everything()
    assert site.run(run_id).state == "running"
    answer = site.ask("cancel", run_id)
    assert answer.code == 0, answer.err
    run = site.run(run_id)
    assert (run.state, run.reason) == ("cancelled", "cancel_requested")
    states = Counter(state for state, _, _ in site.picture(run_id).tasks.values())
    assert states == {"cancelled": 11}
    assert len(site.uncertain(run_id)) == 2
    hold.unlink()
    site.assert_clean()
    assert lines(site, "cancelled") == Counter()
    assert site.ask("resume", run_id).code != 0


@pytest.mark.parametrize("idempotency", ["idempotent", "unknown"])
def test_resume_after_the_death_of_everybody_at_any_moment(site: Site, idempotency: str) -> None:
    chance = random.Random(SEED)
    count = 30
    # What must not be repeated is the heart of it (seed, resume).
    for round_ in range(repeats(100 if idempotency == "unknown" else 20)):
        name = f"round-{round_}"
        moment = chance.randrange(1, 4 * count)
        known = {row[0] for row in rows(site.store, "SELECT run_id FROM runs")} if site.database.exists() else set()
        process = site.start("run", fan_out(site, name, count, idempotency), "--workers", "2")

        def new_run(known: set[str] = known) -> str | None:
            if not site.database.exists():
                return None
            found = {row[0] for row in rows(site.store, "SELECT run_id FROM runs")} - known
            return found.pop() if found else None

        def reached(process: subprocess.Popen[bytes] = process, moment: int = moment) -> bool:
            run_id = new_run()
            if run_id is None:
                return False
            progress = scalar(site.store, "SELECT audit_sequence FROM runs WHERE run_id = ?", run_id)
            return progress >= moment or process.poll() is not None

        site.wait_for(reached, "the moment comes")
        run_id = new_run()
        assert run_id is not None
        site.kill_everything()
        if site.run(run_id).state == "running":
            answer = site.ask("resume", run_id)
            assert answer.code in (0, 3), answer.err
        if idempotency == "unknown":
            judge_lines(site, name, run_id, count)
        else:
            assert site.run(run_id).state == "succeeded"
            deliveries = site.deliveries(run_id)
            executed = lines(site, name)
            assert len(executed) == count
            assert executed.total() <= sum(deliveries.values())
        site.assert_clean()
