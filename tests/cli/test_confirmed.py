"""What was confirmed is neither done nor planned again, and what is repeated is repeated under its key."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field, sh
from support.scale import time_limit

POLICY = {"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"], "environmentAllowlist": ["TOKEN"]}
KEEPS = "echo $AGENTCTL_EFFECT_ID >> ledger; mkdir -p out; echo made > out/made"


def ledger(field: Field) -> list[str]:
    return (field.folder / "ledger").read_text(encoding="utf-8").split()


def one(field: Field, action: dict[str, Any], **task: Any) -> Path:
    return field.workflow("one", [{"id": "a", "uses": "action:do", **task}], actions={"do": action}, policy=POLICY)


def killed_while_storing(field: Field, file: Path, env: dict[str, str]) -> str:
    """The run, when its worker has died between the confirmed effect and the end of the ingestion."""
    field.coordinator()
    run_id = field.json("submit", file, env=env).data["runId"]
    worker = field.start("worker", "start", env={**env, "AGENTCTL_FAULT": "after_staging"})
    assert worker.wait().code == -signal.SIGKILL
    assert len(ledger(field)) == 1
    return str(run_id)


def carried_on(field: Field, run_id: str) -> None:
    """Another worker comes to the end without doing anything again, and the artifact is kept."""
    worker = field.start("worker", "start")
    assert field.json("wait", run_id).code == 0
    field.stop(worker)
    assert len(ledger(field)) == 1
    assert field.rows("SELECT status, dispatches FROM effects") == [("succeeded", 1)]
    assert [item["path"] for item in field.json("artifacts", "list").data["references"]] == ["out/made"]
    assert field("db", "verify").code == 0


def test_a_secret_that_is_gone_is_not_asked_for_again(field: Field) -> None:
    action = sh(KEEPS, env={"TOKEN": {"env": "TOKEN"}}, artifacts=["out/made"])
    carried_on(field, killed_while_storing(field, one(field, action), {"TOKEN": "of yesterday, and long enough"}))


def test_a_folder_that_is_gone_is_not_looked_for_again(field: Field) -> None:
    (field.folder / "place").mkdir()
    script = "cd ..; rmdir place; touch place; " + KEEPS
    carried_on(field, killed_while_storing(field, one(field, sh(script, cwd="place", artifacts=["out/made"])), {}))


def test_a_file_that_was_replaced_is_not_looked_at_again(field: Field) -> None:
    """What is kept is what the confirmed write wrote, whatever lies there by now."""
    file = one(field, {"kind": "builtin.write"}, **{"with": {"path": "out/made", "content": "made\n"}})
    field.coordinator()
    run_id = field.submit(file)
    worker = field.start("worker", "start", env={"AGENTCTL_FAULT": "after_staging"})
    assert worker.wait().code == -signal.SIGKILL
    (field.folder / "out" / "made").write_bytes(b"\xff" * 2_000_000)
    worker = field.start("worker", "start")
    assert field.json("wait", run_id).code == 0
    field.stop(worker)
    [kept] = field.json("artifacts", "list").data["references"]
    assert (kept["path"], kept["sizeBytes"]) == ("out/made", 5)


ONCE_IN_VAIN = "echo $AGENTCTL_EFFECT_ID >> ledger; [ $(wc -l < ledger) -ge 2 ] || exec sleep 60"


@pytest.mark.parametrize("idempotency", ["keyed", "idempotent"])
def test_a_keyed_command_is_repeated_under_its_key(field: Field, idempotency: str) -> None:
    """Another attempt has effects of its own, with ids of their own; the other side knows the key only."""
    file = one(
        field, sh(ONCE_IN_VAIN, idempotency=idempotency), timeoutSeconds=max(2, time_limit()), retry={"maxAttempts": 2}
    )
    assert field.json("run", file).code == 0
    first, second = ledger(field)
    effects = field.rows("SELECT effect_id, idempotency_key FROM effects ORDER BY attempt")
    assert (first == second) == (idempotency == "keyed")
    assert effects == [(effects[0][0], first), (effects[1][0], second)]
    assert effects[0][0] == first != effects[1][0]
    assert field("db", "verify").code == 0


def test_what_repeats_under_a_key_is_found_by_it(field: Field) -> None:
    """Its worker dies: its process is ended before anybody sends it once more, under the same key."""
    script = "echo $AGENTCTL_EFFECT_ID >> ledger; [ $(wc -l < ledger) -ge 3 ] || exec sleep 60"
    file = one(field, sh(script, idempotency="keyed"), timeoutSeconds=time_limit(3), retry={"maxAttempts": 2})
    pool = field.pool(1)
    run_id = field.submit(file)
    wait_until(lambda: (field.folder / "ledger").exists() and len(ledger(field)) == 2, "the second attempt")
    [worker] = field.workers()
    os.kill(worker.pid, signal.SIGKILL)
    assert field.json("wait", run_id).code == 0
    assert len(set(ledger(field))) == 1
    assert len(ledger(field)) == 3
    wait_until(lambda: field.effect_processes() == {}, "what the dead worker had started is gone")
    field.stop(pool)


def test_a_provider_that_is_named_like_a_tool(field: Field) -> None:
    document = {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": "named"},
        "spec": {
            "policy": {"approval": "never"},
            "providers": {"tool.x": {"kind": "fake"}},
            "agents": {"helper": {"provider": "tool.x", "model": "m", "instructions": "Help."}},
            "tasks": [{"id": "ask", "uses": "agent:helper", "with": {"task": "x"}}],
        },
    }
    file = field.text("named.yaml", json.dumps(document))
    result = field.json("run", file)
    assert result.code == 0, result.err
    assert field("db", "verify").code == 0
    assert field.json("replay", result.data["runId"]).code == 0
