"""`agentctl doctor`: is everything in order, for people and for monitors."""

from __future__ import annotations

import os
import subprocess

import click
from agentctl.store.doctor import Check

from .main import Settings, Verb, pass_settings
from .render import Printer, clean

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
                out.line(f"{' ' * 20}{clean(check.remedy)}")

    Printer(settings).result("Doctor", {"status": status, "checks": [check.as_json() for check in checks]}, human)
    if status == "fail":
        context.exit(EXIT_UNWELL)


def _units() -> Check:
    """The state of our systemd units, of the system and of this user; where there is no systemd, nothing is wrong."""
    if not os.path.isdir("/run/systemd/system"):
        return Check("units", "ok", "systemd does not run here")
    found: list[tuple[str, str, str]] = []
    for scope in ([], ["--user"]):
        words = ["systemctl", *scope, "list-units", "--all", "--plain", "--no-legend", "agentctl-*"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SYSTEMCTL_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found += units_of(done.stdout)
    return judge_units(found)


def units_of(text: str) -> list[tuple[str, str, str]]:
    """(unit, active state, sub-state) from what `systemctl list-units --plain` prints."""
    rows = (line.replace("●", " ").split() for line in text.splitlines())
    return [(row[0], row[2], row[3]) for row in rows if len(row) >= 4 and row[0].startswith("agentctl-")]


def judge_units(found: list[tuple[str, str, str]]) -> Check:
    """What the states of units mean."""
    services = [unit for unit in found if unit[0].endswith(".service")]
    failed = [name for name, active, _ in services if active == "failed"]
    if failed:
        return Check("units", "fail", f"failed: {', '.join(failed)}", f"`journalctl -u {failed[0]}` tells why")
    restarting = [name for name, _, sub in services if sub == "auto-restart"]
    if restarting:
        why = f"started again and again: {', '.join(restarting)}"
        return Check("units", "warn", why, f"`journalctl -u {restarting[0]}` tells why")
    if not services:
        return Check("units", "ok", "none is installed; `agentctl workers install` does")
    return Check("units", "ok", ", ".join(f"{name} {active}" for name, active, _ in services))
