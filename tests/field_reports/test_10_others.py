"""Report 10 for all that starts programs beside a command: tools of agents, extensions, and commands that give secrets.

https://github.com/python/cpython/issues/76116 · https://github.com/greyhaven-ai/autocontext/pull/940
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.field import Field, bound, gone
from support.field_models import action_tool, models
from support.model_server import Play, model_server
from support.scale import time_limit

LIMIT = time_limit(2)
BACKGROUND = 'sleep 300 & echo "$!" > "$0"; echo hi'
SLEEPER = 'sleep 300 & echo "$!" > "$0"; wait'
EXTENSION = """\
import json, subprocess, sys
told = {"protocolVersion": "agentctl.dev/process-extension/v1", "name": "x", "inputSchema": True,
        "outputSchema": True, "capabilities": []}
child = subprocess.Popen(["sleep", "300"])
open(sys.argv[1], "a").write(f"{child.pid}\\n")
if sys.argv[-1] == "--agentctl-invoke":
    call = json.load(sys.stdin)
    told = {key: call[key] for key in ("protocolVersion", "effectId")} | {"output": {"word": "hi"}}
    if sys.argv[2] == "sleeper":
        child.wait()
print(json.dumps(told))
"""


def _tool(field: Field, script: str, mark: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A task that asks an agent, whose tool is that script."""
    tool = action_tool("case", "at_most_once", timeoutSeconds=LIMIT)
    action = {
        "kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once", "timeoutSeconds": LIMIT,
        "with": {"args": ["-c", script, str(mark)]},
    }  # fmt: skip
    return {"uses": "agent:a", "with": {"prompt": "work"}}, {"tools": {"work": tool}, "action": action}


def _extension(field: Field, how: str, mark: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    field.text("x.py", EXTENSION)
    action = {
        "kind": "extension.process", "command": sys.executable, "args": ["x.py", str(mark), how],
        "protocolVersion": "agentctl.dev/process-extension/v1", "inputSchema": True, "outputSchema": True,
        "idempotency": "at_most_once", "timeoutSeconds": LIMIT,
    }  # fmt: skip
    return {"uses": "action:case", "with": {}}, {"action": action}


def _secret(field: Field, script: str, mark: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A command whose secret comes from that script."""
    giver = field.tool("giver", f'#!/bin/sh\nset -- "{mark}"\n{script.replace("$0", "$1")}\n')
    reference = {"process": {"command": str(giver), "timeoutSeconds": LIMIT}}
    action = {
        "kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once", "env": {"TOKEN": reference},
        "with": {"args": ["-c", "echo ${#TOKEN}"]},
    }  # fmt: skip
    return {"uses": "action:case"}, {"action": action}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["background", "sleeper"])
@pytest.mark.parametrize("what", ["tool", "extension", "secret"])
def test_the_worker_takes_its_next_task_in_time(field: Field, what: str, how: str) -> None:
    """Nobody waits for a child that holds a pipe: it is ended, and the direct child's own end decides."""
    script = BACKGROUND if how == "background" else SLEEPER
    mark = field.root / "pids"
    made = {"tool": _tool, "extension": _extension, "secret": _secret}[what]
    task, parts = made(field, how if what == "extension" else script, mark)
    with model_server() as server:
        server.plays(Play(text="", calls=[("c", "work", "{}")]), Play(text="hi"))
        policy = {
            "processAllowlist": ["tick", "sh", Path(sys.executable).name],
            "secretProcessAllowlist": ["giver"],
            "environmentAllowlist": ["TOKEN"],
        }
        spec = models(server.url, tools=parts.get("tools"), policy=policy)
        pool = field.pool(1)
        [worker] = field.workers("idle")
        tasks = [{"id": "case", "failure": "continue", **task}, field.tick_task("next", idempotent=True)]
        file = field.workflow("case", tasks, actions={"case": parts["action"]}, concurrency=1, **spec)
        run_id = field.submit(file)
        outcome = field.json("wait", run_id)
    inspected = field.json("inspect", run_id).data
    [case] = [item for item in inspected["tasks"] if item["taskId"] == "case"]
    requests = [(item["request"]["taskId"], item["request"]["operation"]) for item in inspected["effects"]]
    statuses = [
        item["status"]
        for item, (task_id, operation) in zip(inspected["effects"], requests, strict=True)
        if task_id == "case" and operation != "p"
    ]
    if how == "background":
        assert (outcome.code, case["state"]) == (0, "succeeded"), (case, outcome.out)
    elif what == "secret":
        assert (outcome.code, case["state"], case["error"]["code"]) == (4, "failed", "secret_unavailable")
        assert statuses == [], "without its secret nothing was requested"
    else:
        assert (outcome.code, outcome.data["reason"], statuses) == (3, "uncertain_effect", ["uncertain"])
    assert field.labels() == ["next"]
    [created] = field.rows("SELECT created_at FROM runs WHERE run_id = ?", run_id)
    assert field.lines()[-1].time - created[0] / 1000 < LIMIT + bound(5)
    assert mark.read_text().split() != []
    assert all(gone(int(pid)) for pid in mark.read_text().split()), "a background child lives on"
    assert [entry.pid for entry in field.workers()] == [worker.pid], "the worker itself lives on"
    field.check_clean_end(drained=[pool], uncertain=how == "sleeper")
