"""Test servers in processes of their own: started on a free port of the loopback, asked what they have seen, ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from support.children import wait_until

SUPPORT = Path(__file__).resolve().parent


class PeerServer:
    """One server. `plan` says what it does to the requests of a method, in turn (see `peer_http`)."""

    def __init__(self, script: str, folder: Path, *arguments: str, plan: dict[str, list[str]] | None = None) -> None:
        self.folder = folder
        self._script = SUPPORT / script
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._plans = 0
        self.port = 0
        folder.mkdir(parents=True)
        self.plan(plan or {})

    def plan(self, plan: dict[str, list[str]]) -> None:
        """Another plan: what was received before is forgotten, and the server lives."""
        self._plans += 1
        text = json.dumps({"number": self._plans, "methods": plan})
        (self.folder / "plan.part").write_text(text, encoding="utf-8")
        (self.folder / "plan.part").rename(self.folder / "plan.json")
        (self.folder / "requests.jsonl").unlink(missing_ok=True)
        (self.folder / "changed").unlink(missing_ok=True)
        if self._process is None or self._process.poll() is not None:
            self.start()

    def start(self) -> None:
        """Start it, on the port that it had before if it was started before."""
        (self.folder / "port").unlink(missing_ok=True)
        with open(self.folder / "stderr", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(self._script), str(self.folder), str(self.port), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: (self.folder / "port").exists() or self._process.poll() is not None, "the server answers")  # type: ignore[union-attr]
        assert (self.folder / "port").exists(), (self.folder / "stderr").read_text()
        self.port = int((self.folder / "port").read_text())

    def stop(self) -> None:
        """End it now."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    def requests(self, method: str | None = None) -> list[dict[str, Any]]:
        """What it has received, in order."""
        path = self.folder / "requests.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [item for item in found if method is None or item["method"] == method]

    def counts(self) -> dict[str, int]:
        """How many requests of each method it has received."""
        return dict(Counter(item["method"] for item in self.requests()))

    def __enter__(self) -> PeerServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class PeerServers:
    """Servers of one script that live as long as a module of tests: one for each list of arguments."""

    def __init__(self, script: str, folder: Path) -> None:
        self._script = script
        self._folder = folder
        self._known: dict[tuple[str, ...], PeerServer] = {}

    def planned(self, arguments: tuple[str, ...], plan: dict[str, list[str]]) -> PeerServer:
        """The server of these arguments with this plan; nothing is received yet."""
        known = self._known.get(arguments)
        if known is None:
            folder = self._folder / f"server{len(self._known)}"
            known = self._known[arguments] = PeerServer(self._script, folder, *arguments, plan=plan)
        else:
            known.plan(plan)
        return known

    def stop(self) -> None:
        """End all of them."""
        for server in self._known.values():
            server.stop()
