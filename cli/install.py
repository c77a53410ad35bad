"""`agentctl workers install`: write the systemd units, enable them, and put them in the place of those before."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentctl.store.errors import AgentctlError, ConflictError, EnvironmentFault, UsageError

from . import unit_files
from .doctor import units_of
from .documents import put_file
from .main import DEFAULT_DATABASE, Settings
from .render import Printer, clean, warn
from .unit_files import MARK, Site

SYSTEM_FOLDER = Path("/etc/systemd/system")
LINGER = Path("/var/lib/systemd/linger")
"""Has a file for each user whose manager stays without a login."""

ENABLE_SECONDS = 180

DUE = ".agentctl-restart-due"
"""Beside the units: the names of those that were written and not restarted since, one in a line."""


def install(
    settings: Settings,
    *,
    user: bool,
    run_as: str,
    each: bool,
    enable: bool,
    only_print: bool,
    site: Site,
) -> None:
    """Write the units that are wanted, then start what is new, restart what has changed, and disable what they replace.

    With `only_print` nothing is written. Raises `UsageError` and `EnvironmentFault` (units that could not work, no
    permission, no such user, systemctl fails) and `ConflictError` (a unit of somebody else is in the way); then no file
    was written, but for the last case of a failing systemctl.
    """
    made = unit_files.units(site)
    names = [unit_files.COORDINATOR, unit_files.WORKER] if each else [unit_files.POOL]
    wanted = {name: made[name] for name in names}
    started = _instances(site.count) if each else names
    folder = _user_folder() if user else SYSTEM_FOLDER
    manager = _Systemctl(user, ENABLE_SECONDS + site.drain_seconds + unit_files.STOP_SLACK_SECONDS)
    data: dict[str, Any] = {
        "user": user,
        "folder": str(folder),
        "database": site.database,
        "units": [{"name": name, "path": str(folder / name), "text": text} for name, text in wanted.items()],
        "started": started,
        "restarted": [],
        "replaced": [],
        "left": [],
        "written": not only_print,
        "enabled": False,
    }
    if only_print:
        for problem in [] if user else _problems(site, None):
            warn(settings, f"{problem.message}; {problem.remedy}")
    else:
        account = None if user else _account(run_as)
        for problem in [] if user else _problems(site, account):
            raise problem
        active = manager.active()
        old = _old_units(folder, active, set(started))
        changed = _write(folder, wanted)
        # What was written by a command that got no further is no change any more, yet runs with its old options.
        data["restarted"] = [name for name in started if name in active and _file_of(name) in changed]
        data["replaced"] = [name for name in old if _is_numbered(name)]
        data["left"] = [name for name in old if not _is_numbered(name)]
        if enable:
            # The new ones first: two on one database get along, and none at all would leave runs waiting.
            manager.run("daemon-reload")
            if data["restarted"]:
                manager.run("try-restart", *data["restarted"])
            manager.run("enable", "--now", *started)
            if data["replaced"]:
                manager.run("disable", "--now", *data["replaced"])
            (folder / DUE).unlink(missing_ok=True)
            data["enabled"] = True

    def human(out: Printer) -> None:
        if only_print:
            for name, text in wanted.items():
                out.line(f"# {clean(folder / name)}")
                out.line(text)
            return
        for name in wanted:
            out.line(f"written: {clean(folder / name)}")
        _tell_started(out, manager, data)
        where = site.database or ("~/.local/state/agentctl/runtime.db" if user else "/var/lib/agentctl/runtime.db")
        word = where if where.startswith("~") else shlex.quote(where)
        out.line(f"their database: `export AGENTCTL_DB={clean(word)}`")

    Printer(settings).result("Installation", data, human)
    if data["left"]:
        warn(settings, f"other units of ours are still there: {' '.join(data['left'])}; disable what you do not need")
    if user and data["enabled"] and not _lingers():
        warn(settings, "units of a user end with the last login; `loginctl enable-linger` lets them stay")


def _tell_started(out: Printer, manager: _Systemctl, data: dict[str, Any]) -> None:
    words = [
        ("restarted, since they have changed", ["try-restart"], data["restarted"]),
        ("enabled and started", ["enable", "--now"], [n for n in data["started"] if n not in data["restarted"]]),
        ("stopped and disabled, since these replace them", ["disable", "--now"], data["replaced"]),
    ]
    if not data["enabled"]:
        out.line(f"next: `{manager.words('daemon-reload')}`")
    for said, command, units in words:
        if units and data["enabled"]:
            out.line(f"{said}: {' '.join(units)}")
        elif units:
            out.line(f"then: `{manager.words(*command, *units)}`")


# -- what could not work -----------------------------------------------------------------------------------------------


def _problems(site: Site, account: pwd.struct_passwd | None) -> list[AgentctlError]:
    """Why units of the system would not start as they are written; `account`: whom they run as, if that is known."""
    found: list[AgentctlError] = []
    database = [] if site.database is None else [site.database]
    for place in (*database, *site.writable):
        if unit_files.is_below(place, *unit_files.TEMPORARY):
            found.append(
                UsageError(
                    f"{place}: a unit of the system has a /tmp of its own, so this place would be another one",
                    remedy="give a place outside of /tmp and /var/tmp",
                )
            )
    for folder in site.folders:
        if not os.path.isdir(folder):
            found.append(
                UsageError(
                    f"there is no folder {folder}, and a unit that may write there cannot start without it",
                    remedy=f"make it first: `install -d -o {site.user} {shlex.quote(folder)}`",
                )
            )
    for place in (site.program, *site.needs):
        why = "the unit has a /tmp of its own" if unit_files.is_below(place, *unit_files.TEMPORARY) else None
        closed = None if account is None else _closed_folder(place, account)
        if closed is not None:
            why = f"the user {site.user} may not enter {closed}"
        if why is not None:
            found.append(
                EnvironmentFault(
                    f"the units could not start agentctl, which needs {place}: {why}",
                    remedy="install agentctl where every user can read it, for example with `pipx install --global`",
                )
            )
    return found


def _closed_folder(place: str, account: pwd.struct_passwd) -> str | None:
    """The first folder on the way to a place that this user may not enter."""
    if account.pw_uid == 0:
        return None
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    for folder in reversed(Path(place).parents):
        try:
            status = folder.stat()
        except OSError:
            return None  # not there, or not for us to see: the start tells
        shift = 6 if status.st_uid == account.pw_uid else 3 if status.st_gid in groups else 0
        if not status.st_mode >> shift & 1:
            return str(folder)
    return None


def runtime_places() -> tuple[str, ...]:
    """Where this program really is: links resolved, its interpreter, what a virtual environment was made from, and its
    own code."""
    places = (program(), sys.executable, sys.prefix, sys.base_prefix, __file__)
    return tuple(dict.fromkeys(os.path.realpath(place) for place in places if place))


# -- what was there before ---------------------------------------------------------------------------------------------


def _old_units(folder: Path, active: set[str], started: set[str]) -> list[str]:
    """Units of ours that are enabled or active and are not among those that are wanted."""
    enabled = {link.name for link in folder.glob("*.wants/agentctl-*.service")}
    return sorted(
        (name for name in (enabled | active) - started if _is_ours(folder / _file_of(name))),
        key=lambda name: (len(name), name),
    )


def _is_ours(path: Path) -> bool:
    try:
        return path.read_text(encoding="utf-8", errors="replace").startswith(MARK)
    except OSError:
        return False


def _file_of(name: str) -> str:
    """The file of a unit: that of its template, for an instance."""
    return f"{name.partition('@')[0]}@.service" if "@" in name else name


def _is_numbered(name: str) -> bool:
    """Whether `install` gives such names; an instance with another name was made by somebody on purpose."""
    return "@" not in name or name.partition("@")[2].removesuffix(".service").isdecimal()


def given_database(settings: Settings) -> str | None:
    """The database that was named by the person, absolute; None when it is only the default."""
    if str(settings.database) == DEFAULT_DATABASE and not os.environ.get("AGENTCTL_DB"):
        return None
    return checked_path(settings.database, "--db")


def checked_path(path: Path, what: str) -> str:
    """An absolute path that a unit file can carry. Raises `UsageError`."""
    text = os.path.abspath(path)
    if not text.isprintable():
        raise UsageError(f"{what}: {text!r} has characters that a unit file cannot carry")
    return text


def program() -> str:
    """The absolute path of this very program. Raises `EnvironmentFault`."""
    called = Path(sys.argv[0])
    if called.name.startswith("agentctl") and called.is_absolute() and os.access(called, os.X_OK):
        return checked_path(called, "the program")
    beside = Path(sys.executable).with_name("agentctl")
    for found in (str(beside) if os.access(beside, os.X_OK) else None, shutil.which("agentctl")):
        if found is not None:
            return checked_path(Path(found), "the program")
    raise EnvironmentFault(
        "there is no program `agentctl` that a unit could start", remedy="install agentctl, for example with pipx"
    )


def _instances(count: int) -> list[str]:
    return [unit_files.COORDINATOR, *(unit_files.WORKER.replace("@", f"@{n}") for n in range(1, count + 1))]


def _user_folder() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME")
    base = Path(home) if home and os.path.isabs(home) else Path.home() / ".config"
    return base / "systemd" / "user"


def _account(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name)
    except KeyError as error:
        raise EnvironmentFault(
            f"there is no user {name!r} for the units to run as",
            remedy=f"`useradd --system --home-dir /var/lib/agentctl {name}`, or name another one with --run-as",
        ) from error


def _write(folder: Path, wanted: dict[str, str]) -> set[str]:
    """All or none: what is in the way is found before anything is written.

    Returns which of them have changed since whatever runs was started, as far as that is known; the file `DUE` keeps it
    for the next command, until this one has restarted them.
    """
    due = folder / DUE
    changed = set()
    try:
        if due.exists():
            changed.update(due.read_text(encoding="utf-8", errors="replace").split())
        for name, text in wanted.items():
            path = folder / name
            if not path.exists():
                changed.add(name)  # what runs under that name has another file, or one that is gone
                continue
            before = path.read_text(encoding="utf-8", errors="replace")
            if not before.startswith(MARK):
                raise ConflictError(
                    f"{path} was not made by agentctl; it is left alone", remedy="move it away, or use --print"
                )
            if before != text:
                changed.add(name)
        folder.mkdir(parents=True, exist_ok=True)
        if changed:
            put_file(due, "".join(f"{name}\n" for name in sorted(changed)).encode(), mode=0o644)
        for name, text in wanted.items():
            put_file(folder / name, text.encode(), mode=0o644)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write units to {folder}: {error.strerror}",
            remedy="units of the system need root; --user installs them for you alone, --print only shows them",
        ) from error
    return changed


class _Systemctl:
    """`systemctl` of the system's manager or of the user's."""

    def __init__(self, user: bool, seconds: int) -> None:
        self._user = user
        self._seconds = seconds

    def words(self, *words: str) -> str:
        """The command as a person would write it."""
        return " ".join(self._command(*words))

    def _command(self, *words: str) -> list[str]:
        return ["systemctl", *(["--user"] if self._user else []), *words]

    def active(self) -> set[str]:
        """Units of ours that run or try to; empty when nobody can tell."""
        command = self._command("list-units", "--plain", "--no-legend", "agentctl-*.service")
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENABLE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return set()
        return {name for name, state, _ in units_of(done.stdout) if state not in ("inactive", "failed")}

    def run(self, *words: str) -> None:
        """Raises `EnvironmentFault` with what `systemctl` says, and what to do."""
        command = self._command(*words)
        shown = " ".join(command)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=self._seconds)
        except FileNotFoundError as error:
            raise EnvironmentFault(
                "the units were written, but there is no systemctl here to enable them",
                remedy="--no-enable writes them only; any other service manager can run the commands in them",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(
                f"the units were written, but `{shown}` did not end within {self._seconds} s",
                remedy=f"`{self.words('list-jobs')}` shows what it waits for; then run this command again",
            ) from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
            raise EnvironmentFault(f"the units were written, but `{shown}` failed: {said}", remedy=self._remedy(words))

    def _remedy(self, words: tuple[str, ...]) -> str:
        if words[0] != "daemon-reload":
            scope = " --user" if self._user else ""
            unit = next((word for word in words if word.startswith("agentctl-")), "agentctl-workers")
            return f"`journalctl{scope} -u {unit}` tells why; put that right, then run this command again"
        if self._user:
            return (
                "this user's systemd cannot be reached: log in as the user (su and sudo start none), or, after "
                f"`loginctl enable-linger`, `export XDG_RUNTIME_DIR=/run/user/{os.getuid()}`; then run this command "
                "again"
            )
        return "see whether systemd runs here, and whether you are root; then run this command again"


def _lingers() -> bool:
    """Whether units of this user stay after the last login; asked for the user that we are, not the one in USER."""
    try:
        return (LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    except KeyError:
        return False
