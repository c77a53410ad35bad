"""Field report 13: the home is on a network filesystem.

The type comes from the variable that states it by hand, as a person would use it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.field import Field

STATEMENT = "AGENTCTL_FILESYSTEM_TYPE"
KINDS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "strangefs", "unknown")
VERBS = (
    ("run", "small.yaml"),
    ("submit", "small.yaml"),
    ("workers", "start", "-n", "1"),
    ("coordinator", "start"),
    ("status", "@latest"),
    ("resume", "@latest"),
    ("cancel", "@latest"),
    ("wait", "@latest"),
    ("watch", "@latest"),
    ("inspect", "@latest"),
    ("logs", "@latest"),
    ("events", "@latest"),
    ("runs", "list"),
    ("workers", "list"),
    ("workers", "stop"),
    ("artifacts", "list"),
    ("artifacts", "gc"),
    ("db", "verify"),
    ("db", "stats"),
    ("gc",),
    ("pause", "@latest"),
    ("retry", "small.yaml", "@latest", "--failed"),
    ("repair", "small.yaml", "@latest", "--from", "small"),
    ("fork", "@latest"),
    ("replay", "@latest"),
    ("compensate", "@latest"),
    ("approvals", "list"),
    ("effects", "list", "--uncertain"),
    ("memory", "put", "key", "1"),
    ("memory", "search", "key"),
    ("metrics", "show"),
    ("graph", "@latest"),
    ("worker", "start"),
    ("db", "backup", "copy"),
)
WITHOUT_DATABASE = {
    "auth", "bench", "check", "completion", "doctor", "explain", "init", "plan", "providers", "schema", "version",
}  # fmt: skip
"""Verbs that open no database of the home; `doctor` looks and tells, which its own tests show."""


def _files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of change of everything in a folder; sockets and folders count by their names."""
    return {
        str(path.relative_to(folder)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def test_no_verb_is_forgotten(field: Field) -> None:
    """Every verb of the program is either tried here or known to open no database."""
    shown = field("--help").out
    listed = shown[shown.index("\nVerbs:\n") :].splitlines()[2:]
    verbs = {line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "}
    assert verbs > {"run", "doctor", "replay"}
    assert verbs == {verb[0] for verb in VERBS} | WITHOUT_DATABASE


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_before_anything_is_created_or_opened(field: Field, kind: str) -> None:
    """Path, type and setting are named; an unknown type is called unknown, not safe."""
    field.workflow("small", [field.tick_task("small", idempotent=True)])
    verbs = {"nfs": VERBS, "strangefs": VERBS[:8]}.get(kind, VERBS[:2])
    for verb in verbs:
        result = field.json(*verb, env={STATEMENT: kind})
        assert (result.code, result.error["code"]) == (5, "environment"), verb
        message = result.error["message"]
        assert str(field.database) in message
        assert kind in message
        assert ("network" if kind not in ("strangefs", "unknown") else "unknown") in message
        assert "--db" in result.error["remedy"]
        assert STATEMENT in result.error["remedy"]
        human = field(*verb, env={STATEMENT: kind}) if verb is VERBS[0] else None
        assert human is None or (human.code, str(field.database) in human.err) == (5, True)
    assert not field.database.parent.exists()
    assert field.lines() == []


@pytest.mark.timeout(300)
def test_files_that_are_there_stay_as_they_are(field: Field) -> None:
    """With the log and its index in place, since somebody still has the database open, byte for byte."""
    coordinator = field.coordinator()
    file = field.workflow("small", [field.tick_task("small", idempotent=True)])
    field.submit(file)
    coordinator.popen.kill()
    coordinator.wait()
    before = _files(field.database.parent)
    assert {"runtime.db", "runtime.db-wal", "runtime.db-shm"} <= set(before)
    for verb in (*VERBS, ("db", "migrate")):
        assert field(*verb, env={STATEMENT: "nfs"}).code == 5
    assert _files(field.database.parent) == before


@pytest.mark.timeout(300)
def test_the_statement_is_explicit_and_recorded(field: Field) -> None:
    """Who says that an unknown filesystem is local is believed, and the database says so."""
    file = field.workflow("small", [field.tick_task("small", idempotent=True)])
    assert field.json("run", file, env={STATEMENT: "ext4"}).code == 0
    assert field.rows("SELECT value FROM meta WHERE key = 'filesystem_type'") == [("ext4",)]
    field.check_clean_end()
