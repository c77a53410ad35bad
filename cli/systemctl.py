"""`systemctl` and `journalctl`: what `cli.install` asks them for, and tells them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

from agentctl.store.clock import SystemClock
from agentctl.store.errors import EnvironmentFault

from . import unit_files
from .doctor import units_of

ENABLE_SECONDS = 180
JOURNAL_SECONDS = 10
JOURNAL_LINES = 3
"""How much of what a unit has said is told."""


class SystemctlFailed(EnvironmentFault):
    """A command of `systemctl` said no: `what`, about `unit`, if it was about one."""

    def __init__(self, what: str, *, remedy: str, unit: str | None) -> None:
        super().__init__(f"the units were written, but {what}", remedy=remedy)
        self.what = what
        self.unit = unit


class Systemctl:
    """`systemctl` of the system's manager or of the user's."""

    def __init__(self, user: bool) -> None:
        self._user = user
        self.patience = ENABLE_SECONDS
        self._began = SystemClock().now() // 1000

    def words(self, *words: str) -> str:
        """The command as a person would write it."""
        return " ".join(self._command(*words))

    def _command(self, *words: str) -> list[str]:
        return ["systemctl", *(["--user"] if self._user else []), *words]

    def states(self) -> dict[str, str]:
        """Units of ours that the manager knows, and whether they are active; empty when nobody can tell."""
        command = self._command("list-units", "--plain", "--no-legend", "agentctl-*.service")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENABLE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        return {name: state for name, state, _ in units_of(done.stdout)}

    def reason(self, unit: str | None) -> str:
        """What a unit has said in the journal since we began, to be added to a message; or nothing."""
        scope = ["--user"] if self._user else []
        command = ["journalctl", *scope, "-u", unit or unit_files.POOL, "--since", f"@{self._began}", "-o", "json"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=JOURNAL_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return ""
        said = list(dict.fromkeys(_said_by_the_unit(done.stdout)))
        return "".join(f"\n  {line}" for line in said[-JOURNAL_LINES:])

    def run(self, *words: str) -> None:
        """Raises `EnvironmentFault` with what `systemctl` says, and what to do."""
        command = self._command(*words)
        shown = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self.patience)
        except FileNotFoundError as error:
            raise EnvironmentFault(
                "the units were written, but there is no systemctl here to enable them",
                remedy="--no-enable writes them only; any other service manager can run the commands in them",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"the units were written, but `{shown}` did not end within {self.patience} s",
                remedy=f"`{self.words('list-jobs')}` shows what it waits for; then run this command again",
            ) from error
        if done.returncode:
            said, failed = _what_failed(done.stderr or done.stdout)
            unit = failed or next((word for word in words if word.startswith("agentctl-")), None)
            raise SystemctlFailed(f"`{shown}` failed: {said}", remedy=self._remedy(words[0], unit), unit=unit)

    def _remedy(self, verb: str, unit: str | None) -> str:
        if verb != "daemon-reload":
            shown = f"journalctl{' --user' if self._user else ''} -u {unit or unit_files.POOL}"
            return f"`{shown}` tells why; put that right, then run this command again"
        if self._user:
            return (
                "this user's systemd cannot be reached: log in as the user (su and sudo start none), or, after "
                f"`loginctl enable-linger`, `export XDG_RUNTIME_DIR=/run/user/{os.getuid()}`; then run this command "
                "again"
            )
        return "see whether systemd runs here, and whether you are root; then run this command again"


def _what_failed(text: str) -> tuple[str, str | None]:
    """What `systemctl` says of a failure, and of which unit: between what it did, and advice for people."""
    lines = text.strip().splitlines() or ["it does not say why"]
    for line in lines:
        if (found := re.match(r"Job for (\S+) failed", line)) is not None:
            return line, found[1]
    told = [line for line in lines if not line.startswith(("Created symlink", "Removed", "See "))]
    return (told or lines)[-1], None


def _said_by_the_unit(journal: str) -> Iterator[str]:
    """What a unit itself has said, from lines of JSON; what systemd says of it is no reason."""
    for line in journal.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        said = entry.get("MESSAGE")
        if entry.get("SYSLOG_IDENTIFIER") != "systemd" and isinstance(said, str) and said.strip():
            yield said.strip()
