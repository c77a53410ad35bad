"""A worker dies, or is stopped, at every point of a write to long-term memory: each entry is written exactly once.

A trigger in the database of the test writes down every change of an entry, and how many writes were confirmed at that
moment. Whatever happens to the workers, the n-th change belongs to the n-th confirmation.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.rows import rows
from support.scale import scale, short_lease
from support.site import Site, is_stopped, kill

POINTS = (
    "after_claim",
    "before_effect_start",
    "after_effect_start",
    "after_effect_result",
    "before_finish",
    "after_finish",
)
KEYS = [f"k{number}" for number in range(5)]
SHORT = {"AGENTCTL_LEASE_SECONDS": str(short_lease()), "AGENTCTL_HEARTBEAT_SECONDS": "0.2"}
CONFIRMED = "SELECT COUNT(*) FROM effects WHERE operation = 'builtin.long_term_memory.write' AND status = 'succeeded'"

WORKFLOW: dict[str, Any] = {
    "apiVersion": "agentctl.dev/v1",
    "kind": "Workflow",
    "metadata": {"name": "notes"},
    "spec": {
        "policy": {"approval": "never"},
        "runtime": {"maxConcurrency": 4},
        "memory": {"working": {"best": None}, "longTerm": {"namespace": "n"}},
        "actions": {
            "keep": {"kind": "builtin.long_term_memory.write"},
            "find": {"kind": "builtin.long_term_memory.search"},
            "promote": {"kind": "builtin.long_term_memory.promote"},
        },
        "tasks": [
            {
                "id": "keep",
                "uses": "action:keep",
                "foreach": {"items": KEYS, "as": "key"},
                "with": {"key": "${{ vars.key }}", "value": "copper ${{ vars.key }}"},
            },
            {"id": "find", "uses": "action:find", "needs": ["keep"], "with": {"query": "copper k3", "mode": "hybrid"}},
            {
                "id": "promote",
                "uses": "action:promote",
                "needs": ["find"],
                "with": {"key": "best", "value": "${{ tasks.find.output.results }}"},
            },
        ],
        "outputs": {"count": "${{ tasks.find.output.count }}"},
    },
}


def watched(folder: Path, **environment: str) -> tuple[Site, Path, Path]:
    """A site whose database keeps a log of all changes, its workflow, and the mark of who struck."""
    site = Site(folder, **environment)
    answer = site.ask("memory", "put", "other", "of somebody else")
    assert answer.code == 0, answer.err
    with site.store.database.write() as tx:
        tx.execute("CREATE TABLE log (key TEXT, confirmed INTEGER)")
        body = f"BEGIN INSERT INTO log VALUES (NEW.memory_key, ({CONFIRMED})); END"  # noqa: S608
        tx.execute(f"CREATE TRIGGER log_insert AFTER INSERT ON long_term_memory {body}")
        tx.execute(f"CREATE TRIGGER log_update AFTER UPDATE ON long_term_memory {body}")
    return site, site.write("notes.yaml", WORKFLOW), folder / "struck"


def judge(site: Site, run_id: str) -> None:
    """Every entry was written once, together with its confirmation, and the run has come to its end."""
    log = rows(site.store, "SELECT key, confirmed FROM log ORDER BY rowid")
    assert sorted(key for key, _ in log) == KEYS, site.report()
    assert [confirmed for _, confirmed in log] == list(range(1, len(KEYS) + 1))
    assert site.uncertain(run_id) == []
    picture = site.picture(run_id)
    assert (picture.state, picture.output) == ("succeeded", f'{{"count":{len(KEYS)}}}')
    assert picture.memory["best"][0]["record"]["key"] == "k3"
    held = rows(site.store, "SELECT memory_key FROM long_term_memory WHERE namespace = 'n' ORDER BY 1")
    assert [key for (key,) in held] == KEYS


CASES = [(point, action, number) for number in (1, 3) for action in ("kill", "parent") for point in POINTS]


@pytest.mark.parametrize(("point", "action", "number"), CASES if scale() >= 1 else [*CASES[::5], CASES[4], CASES[9]])
def test_a_worker_dies(tmp_path: Path, point: str, action: str, number: int) -> None:
    """`parent`: together with the process that drives the run; before anybody goes on, memory and effects agree."""
    site, file, struck = watched(tmp_path / "site")
    with site:
        process = site.start("run", file, "--workers", "2", fault=f"{point}:{number}:{action}@{struck}")
        site.wait_for(lambda: process.poll() is not None, "the foreground run ends")
        assert struck.exists()
        run_id = site.only_run()
        assert run_id is not None
        if action == "parent":
            confirmed = rows(
                site.store, "SELECT json_extract(input_json, '$.key') FROM effects WHERE status = 'succeeded'"
            )
            written = rows(site.store, "SELECT memory_key FROM long_term_memory WHERE namespace = 'n'")
            assert {key for (key,) in written} == {key for (key,) in confirmed} & set(KEYS)
            assert site.ask("resume", run_id).code == 0
        else:
            assert process.returncode == 0, site.report()
        judge(site, run_id)
        site.assert_clean()


def test_a_stopped_worker_comes_back_too_late(tmp_path: Path) -> None:
    """It has its result and has not told anybody; its work is handed on; then it goes on, and changes nothing."""
    site, file, struck = watched(tmp_path / "site", **SHORT)
    with site:
        site.start("workers", "start", "-n", "2", "--drain-seconds", "3", fault=f"before_finish:stop@{struck}")
        site.wait_for_workers(2)
        run_id = site.submit(file)
        site.wait_for(struck.exists, "somebody reaches the point")
        site.wait_for_end(run_id)
        judge(site, run_id)
        for row in site.store.live_processes():
            if is_stopped(row):
                kill(row, signal.SIGCONT)
        assert set(site.stop()) <= {0, 3}, site.report()
        judge(site, run_id)
        site.assert_clean()
