"""Root works on the database of somebody else, who has to be able to go on afterwards."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from agentctl.store import migrate
from agentctl.store.backup import backup, restore
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from support.artifacts import ingest, litter
from support.builders import Driver, Hand, new_run, process_row

OWNER = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work on files that are closed to others")
def test_what_root_makes_beside_a_database_belongs_to_its_owner(tmp_path: Path) -> None:
    """One `sudo agentctl` would lock the owner out: of the gate, of the locks, of the store of artifacts."""
    folder = tmp_path / "state"
    folder.mkdir()
    with closing(sqlite3.connect(folder / "run.db")) as connection:  # of an older schema, so that root migrates it
        connection.executescript(migrate.script(1))
        connection.execute(f"PRAGMA application_id = {migrate.APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 1")
    for path in (folder, folder / "run.db"):
        os.chown(path, OWNER, OWNER)
    (tmp_path / "of root").touch()
    os.link(tmp_path / "of root", folder / "run.db.gate")
    store = Store(folder / "run.db", SystemClock())
    try:
        litter(store, b"kept")
        with store.artifacts.blobs.locked(".collect.lock"):
            store.wakes.listen("somebody").close()
        made = {str(path.relative_to(folder)): path.stat().st_uid for path in folder.rglob("*")}
    finally:
        store.close()
    # The socket is a name to call its process by, whoever may remove it; a file with another name is none of ours.
    assert {name for name, owner in made.items() if owner != OWNER} == {"run.db.wake/somebody", "run.db.gate"}
    assert {"run.db.gate-line", "run.db.migrate.lock", "run.db-wal", "artifacts/.collect.lock"} < made.keys()
    assert len(made) >= 15


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work on files that are closed to others")
def test_a_database_that_root_makes_in_the_folder_of_a_service_belongs_to_it(tmp_path: Path) -> None:
    """Root makes one, and root restores one: the user of the service has to be able to open either."""
    made, restored, clock = tmp_path / "made", tmp_path / "restored", SystemClock()
    for folder in (made, restored):
        folder.mkdir()
        os.chown(folder, OWNER, OWNER)
    with closing(Store(made / "run.db", clock, create=True)) as store:
        store.register(process_row("worker-1"))
        store.register(process_row("driver-1", kind="coordinator"))
        store.create_run(new_run(tasks=1))
        Driver(store, "run-1").enqueue([0])
        ingest(store, Hand(store).take(), {"x": b"bytes"})
        backup(store, tmp_path / "copy")
        owners = {path.name: path.stat().st_uid for path in made.rglob("*")}
    assert {"run.db", "run.db-wal", "run.db.gate"} < owners.keys()
    assert set(owners.values()) == {OWNER}
    assert restore(tmp_path / "copy", restored / "run.db", clock)["artifacts"] == 1
    owners = {str(path.relative_to(restored)): path.stat().st_uid for path in restored.rglob("*")}
    assert {"run.db", "artifacts/sha256", "artifacts/.lock"} < owners.keys()
    assert set(owners.values()) == {OWNER}
    assert (restored / "run.db").stat().st_mode & 0o777 == 0o600
