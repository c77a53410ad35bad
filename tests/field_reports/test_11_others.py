"""Report 11 for all that starts programs: tools of agents, extensions and commands that give secrets inherit nothing.

https://github.com/kirodotdev/KiroCrew/pull/810 · https://github.com/brooklyncentral/clocker/pull/382
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.field import Field
from support.field_models import action_tool, ask, models
from support.model_server import Play, model_server

LOOK = 'for fd in /proc/$$/fd/*; do echo "${fd##*/} $(readlink "$fd")"; done > "$0.$1"\n'
EXTENSION = """\
import json, os, sys
told = {"protocolVersion": "agentctl.dev/process-extension/v1", "name": "x", "inputSchema": True,
        "outputSchema": True, "capabilities": []}
with open(f"{sys.argv[1]}{sys.argv[-1]}", "w") as file:
    for name in sorted(os.listdir("/proc/self/fd")):
        if os.path.islink(f"/proc/self/fd/{name}") and os.path.exists(f"/proc/self/fd/{name}"):
            file.write(f"{name} {os.readlink(f'/proc/self/fd/{name}')}\\n")
if sys.argv[-1] == "--agentctl-invoke":
    call = json.load(sys.stdin)
    told = {key: call[key] for key in ("protocolVersion", "effectId")} | {"output": {"word": "hi"}}
print(json.dumps(told))
"""


@pytest.mark.timeout(120)
def test_what_is_started_beside_commands_has_no_descriptor_of_its_worker(field: Field) -> None:
    """While the worker has the database, a connection to a model and a store of artifacts open."""
    seen = field.root / "seen"
    (field.folder / "out").mkdir()
    field.text("x.py", EXTENSION)
    python = Path(sys.executable).name
    script = LOOK.replace("$0", "$1").replace("$1.$1", "$1.$2")
    shell = {"kind": "builtin.shell.exec", "command": "sh", "idempotency": "at_most_once"}
    giver = field.tool("giver", f"#!/bin/sh\n{script}echo secret\n")
    reference = {"process": {"command": str(giver), "args": [str(seen), "secret"]}}
    actions = {
        "tool": {**shell, "with": {"args": ["-c", LOOK, str(seen), "tool"]}},
        "command": {**shell, "env": {"TOKEN": reference},
                    "with": {"args": ["-c", LOOK + "echo x > out/x", str(seen), "command"], "artifacts": ["out/x"]}},
        "extension": {
            "kind": "extension.process", "command": sys.executable, "args": ["x.py", str(seen)],
            "protocolVersion": "agentctl.dev/process-extension/v1", "inputSchema": True, "outputSchema": True,
            "idempotency": "at_most_once",
        },
    }  # fmt: skip
    policy = {
        "processAllowlist": ["sh", python], "secretProcessAllowlist": ["giver"], "environmentAllowlist": ["TOKEN"],
        "writableRoots": ["out"],
    }  # fmt: skip
    with model_server() as server:
        server.plays(Play(text="", calls=[("c", "work", "{}")]), Play(text="hi"))
        spec = models(server.url, tools={"work": action_tool("tool", "at_most_once")}, policy=policy)
        tasks = [
            {"id": "command", "uses": "action:command"},
            ask("talk", needs=["command"]),
            {"id": "extension", "uses": "action:extension", "needs": ["talk"], "with": {}},
        ]
        result = field.json("run", field.workflow("look", tasks, actions=actions, **spec), "--workers", "1")
    assert result.code == 0, (result.out, result.err)
    found = {path.name: path.read_text().splitlines() for path in field.root.glob("seen*")}
    wanted = ("seen.tool", "seen.command", "seen.secret", "seen--agentctl-handshake", "seen--agentctl-invoke")
    assert set(found) == set(wanted), json.dumps(found)
    for name, lines in found.items():
        targets = dict(line.split(" ", 1) for line in lines)
        assert {"0", "1", "2"} <= targets.keys(), (name, lines)
        # What the looking itself has open: the file that it writes, and a pipe to the program that reads links.
        rest = {fd: target for fd, target in targets.items() if int(fd) > 2 and "seen" not in target}
        rest = {fd: target for fd, target in rest.items() if "/tools/" not in target}  # a shell and its own script
        assert all(target.startswith(("pipe:", "/proc/")) for target in rest.values()), (name, rest)
        assert not any(".agentctl" in target or "socket:" in target for target in targets.values()), (name, targets)
    field.check_clean_end()
