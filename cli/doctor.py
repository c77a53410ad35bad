"""`agentctl doctor`: is everything in order, for people and for monitors."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import click
from agentctl.store.doctor import Check

from .main import Settings, Verb, pass_settings
from .render import Printer, clean

Unit = tuple[str, str, str]
"""Name, active state and sub-state of a unit."""

POOL = "agentctl-workers.service"
EXIT_UNWELL = 6
SYSTEMCTL_SECONDS = 10
_COLORS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(cls=Verb)
@click.option("--live", "probe", flag_value="live", help="Only liveness: the database can be read.")
@click.option("--ready", "probe", flag_value="ready", help="Only readiness: what is submitted now is executed.")
@pass_settings
@click.pass_context
def doctor(context: click.Context, settings: Settings, probe: str | None) -> None:
    """Look whether machine, database and processes are in order; nothing is changed. Exit 0, or 6 when a check fails.

    A warning leaves the exit at 0. The probes are for monitors: quick, and a missing pool fails --ready.
    """
    from agentctl.store.clock import SystemClock
    from agentctl.store.doctor import LIVE, READY, examine, worst

    only = {None: None, "live": LIVE, "ready": READY}[probe]
    checks = examine(settings.database, SystemClock(), only)
    if only is None:
        checks.append(_units())
    status = worst(checks)

    def human(out: Printer) -> None:
        for check in checks:
            mark = out.paint(check.status.ljust(4), _COLORS[check.status])
            out.line(f"{mark}  {check.id.ljust(12)}  {clean(check.message)}")
            if check.remedy is not None and check.status != "ok":
                out.advise(f"{' ' * 20}{clean(check.remedy)}")

    Printer(settings).result("Doctor", {"status": status, "checks": [check.as_json() for check in checks]}, human)
    if status == "fail":
        context.exit(EXIT_UNWELL)


def _units() -> Check:
    """The state of our systemd units, of the system and of this user; where there is no systemd, nothing is wrong."""
    if not os.path.isdir("/run/systemd/system"):
        return Check("units", "ok", "systemd does not run here")
    found: list[list[Unit]] = []
    for scope in ([], ["--user"]):
        words = ["systemctl", *scope, "list-units", "--all", "--plain", "--no-legend", "agentctl-*"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SYSTEMCTL_SECONDS)
            found.append(units_of(done.stdout))
        except (OSError, subprocess.TimeoutExpired):
            found.append([])
    return judge_units(*found)


def units_of(text: str) -> list[Unit]:
    """(unit, active state, sub-state) from what `systemctl list-units --plain` prints; without names of no file."""
    rows = (line.replace("●", " ").split() for line in text.splitlines())
    return [
        (row[0], row[2], row[3])
        for row in rows
        if len(row) >= 4 and row[0].startswith("agentctl-") and row[1] != "not-found"
    ]


def judge_units(system: list[Unit], user: Sequence[Unit] = ()) -> Check:
    """What the states of units mean: those of the system's manager, and those of this user's."""
    scoped = [
        (name, active, sub, scope)
        for units, scope in ((system, ""), (user, " --user"))
        for name, active, sub in units
        if name.endswith(".service")
    ]
    failed = [(name, scope) for name, active, _, scope in scoped if active == "failed"]
    if failed:
        return Check("units", "fail", f"failed: {_names(failed)}", _journal(failed[0]))
    restarting = [(name, scope) for name, _, sub, scope in scoped if sub == "auto-restart"]
    if restarting:
        return Check("units", "warn", f"started again and again: {_names(restarting)}", _journal(restarting[0]))
    if not scoped:
        return Check("units", "ok", "none is installed; `agentctl workers install` does")
    for scope in ("", " --user"):
        running = [name for name, active, _, where in scoped if where == scope and active != "inactive"]
        single = [name for name in running if name.startswith("agentctl-worker@")]
        if POOL in running and single:
            return Check(
                "units",
                "warn",
                f"a pool and {len(single)} single workers are active: {POOL}, {', '.join(single)}",
                f"keep one of both: `systemctl{scope} disable --now {' '.join(single)}`, or the same with {POOL}",
            )
        idle = [name for name, active, _, where in scoped if where == scope and active == "inactive"]
        # What the running layout does not consist of may stay loaded for a while after it was disabled.
        missing = [name for name in idle if not running or (name == POOL) == (POOL in running)]
        if missing:
            return Check(
                "units",
                "warn",
                f"inactive: {', '.join(missing)}",
                f"`systemctl{scope} start {missing[0]}`, or `disable` it if it is to stay down",
            )
    return Check("units", "ok", ", ".join(f"{name} {active}" for name, active, _, _ in scoped))


def _names(units: list[tuple[str, str]]) -> str:
    return ", ".join(name for name, _ in units)


def _journal(unit: tuple[str, str]) -> str:
    return f"`journalctl{unit[1]} -u {unit[0]}` tells why"
