"""`agentctl workers install`: write the systemd units, enable them, and put them in the place of those before."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import sys
from collections.abc import Iterable, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentctl.store.errors import AgentctlError, ConflictError, EnvironmentFault, NotFoundError, UsageError

from . import unit_files
from .documents import put_file
from .installed_units import Options, database_of, installed, keep, own_text
from .main import DEFAULT_DATABASE, Settings
from .render import Printer, clean, warn
from .run import open_store, views_of
from .systemctl import ENABLE_SECONDS, Systemctl, SystemctlFailed
from .unit_checks import doubts, problems
from .unit_files import MARK, Site

SYSTEM_FOLDER = Path("/etc/systemd/system")
LINGER = Path("/var/lib/systemd/linger")
"""Has a file for each user whose manager stays without a login."""

DUE = ".agentctl-restart-due"
"""Beside the units: the names of those that were written and not restarted since, one in a line."""


def install(
    settings: Settings,
    given: Options,
    *,
    user: bool,
    each: bool,
    fresh: bool,
    enable: bool,
    only_print: bool,
) -> None:
    """Write the units that are wanted, then start what is new, restart what has changed, and disable what they replace.

    What installed units say and `given` does not is kept, unless `fresh`. With `only_print` nothing is written.
    Raises `UsageError` and `EnvironmentFault` (units that could not work, no permission, no such user, systemctl fails)
    and `ConflictError` (a unit of somebody else is in the way); then no file was written, but for the last case of a
    failing systemctl. When units that worked do not start any more, those before are put back.
    """
    folder = _user_folder() if user else SYSTEM_FOLDER
    manager = Systemctl(user)
    states = manager.states()
    active = {name for name, state in states.items() if state not in ("inactive", "failed")}
    enabled = {link.name for link in folder.glob("*.wants/agentctl-*.service")}
    before = installed(folder, each=each, used=active | enabled)
    options, kept = keep(given, None if fresh else before, user=user)
    site = _site(options, user=user)
    manager.patience = ENABLE_SECONDS + site.drain_seconds + unit_files.STOP_SLACK_SECONDS
    made = unit_files.units(site)
    names = [unit_files.COORDINATOR, unit_files.WORKER] if each else [unit_files.POOL]
    wanted = {name: made[name] for name in names}
    started = _instances(site.count) if each else names
    moved_from = None
    if before is not None and database_of(before.database, user=user) != database_of(site.database, user=user):
        moved_from = database_of(before.database, user=user)
    data: dict[str, Any] = {
        "user": user,
        "folder": str(folder),
        "database": site.database,
        "databaseBefore": None if moved_from is None else str(moved_from),
        "units": [{"name": name, "path": str(folder / name), "text": text} for name, text in wanted.items()],
        "kept": kept,
        "started": started,
        "restarted": [],
        "replaced": [],
        "left": [],
        "written": not only_print,
        "enabled": False,
    }
    for doubt in _judge(settings, site, each=each, only_print=only_print):
        warn(settings, doubt)
    if not only_print:
        old = _old_units(folder, active | enabled, set(started))
        former = Former(folder, wanted, {name for name, state in states.items() if state == "active"}, enabled)
        changed = _write(folder, wanted)
        # What was written by a command that got no further is no change any more, yet runs with its old options.
        data["restarted"] = [name for name in started if name in active and _file_of(name) in changed]
        data["replaced"] = [name for name in old if _is_numbered(name)]
        data["left"] = [name for name in old if not _is_numbered(name)]
        if enable:
            _put_in_place(manager, former, started, data["restarted"], data["replaced"])
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
        if kept:
            out.line(f"kept from the units before: {clean(shlex.join(kept))} (`--fresh` begins with the defaults)")
        _tell_started(out, manager, data)
        where = site.database or ("~/.local/state/agentctl/runtime.db" if user else "/var/lib/agentctl/runtime.db")
        word = where if where.startswith("~") else shlex.quote(where)
        out.line(f"their database: `export AGENTCTL_DB={clean(word)}`")

    Printer(settings).result("Installation", data, human)
    if moved_from is not None:
        warn(settings, _of_the_old_database(moved_from, settings, site, each=each, written=not only_print))
    if data["left"]:
        warn(settings, f"other units of ours are still there: {' '.join(data['left'])}; disable what you do not need")
    if user and data["enabled"] and not _lingers():
        warn(settings, "units of a user end with the last login; `loginctl enable-linger` lets them stay")


def _site(options: Options, *, user: bool) -> Site:
    return Site(
        program(),
        None if user else options.run_as or unit_files.DEFAULT_USER,
        options.database,
        unit_files.DEFAULT_COUNT if options.count is None else options.count,
        unit_files.DEFAULT_DRAIN_SECONDS if options.drain_seconds is None else options.drain_seconds,
        max_tasks=options.max_tasks,
        max_age=options.max_age,
        max_rss=options.max_rss,
        writable=() if user else options.writable or (),
        needs=() if user else runtime_places(),
    )


def _judge(settings: Settings, site: Site, *, each: bool, only_print: bool) -> list[str]:
    """What is to be said of units that may be written. Raises what speaks against them, unless they are only shown."""
    said = []
    account = None
    try:
        account = None if site.user is None else _account(site.user)
    except EnvironmentFault as fault:
        if not only_print:
            raise
        said.append(f"{fault.message}; {fault.remedy}")
    for problem in problems(site, account, each=each):
        if not only_print:
            raise problem
        said.append(f"{problem.message}; {problem.remedy}")
    return [*said, *doubts(site, account, each=each)]


def _of_the_old_database(database: Path, settings: Settings, site: Site, *, each: bool, written: bool) -> str:
    """What becomes of the database that these units worked on before."""
    named = f"agentctl --db {shlex.quote(str(database))}"
    moved = f"the units {'worked' if written else 'work'} on {database} {'before' if written else 'until now'}"
    same = f"{' --user' if site.user is None else ''}{' --each' if each else ''}"
    back = f"`{named} workers install{same}` goes back"
    try:
        with closing(open_store(replace(settings, database=database))) as store:
            views = views_of(store)
            left = [run for state in ("running", "paused") for run in views.list_runs(limit=1000, state=state)["runs"]]
    except NotFoundError:
        return f"{moved}, which is not there any more"
    except (AgentctlError, OSError) as error:
        why = error.message if isinstance(error, AgentctlError) else error.strerror
        return f"{moved}, and nobody drives what is left there; its runs cannot be read: {why}; {back}"
    if not left:
        return f"{moved}; no run is left there"
    number = "one run has" if len(left) == 1 else f"{len(left)} runs have"
    return (
        f"{moved}: {number} not ended there, and these units do not drive any of them; "
        f"`{'' if site.user is None else f'sudo -u {site.user} '}{named} workers start` lets them go on; {back}"
    )


def _tell_started(out: Printer, manager: Systemctl, data: dict[str, Any]) -> None:
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


# -- putting them in place ---------------------------------------------------------------------------------------------


class Former:
    """What was there before: texts, and who worked. To be made before anything is written."""

    def __init__(self, folder: Path, wanted: Iterable[str], working: Set[str], enabled: Set[str]) -> None:
        self.working = working
        self._folder = folder
        self._enabled = enabled
        self._texts = {name: own_text(folder / name) for name in wanted}
        due = folder / DUE
        self._due = due.read_bytes() if due.exists() else None

    def put_back(self, manager: Systemctl, started: Iterable[str], restarted: Iterable[str]) -> None:
        """Raises `EnvironmentFault` when that fails, too."""
        new = [name for name in started if name not in self.working and name not in self._enabled]
        if new:
            manager.run("disable", "--now", *new)
        try:
            for name, text in self._texts.items():
                if text is None:
                    (self._folder / name).unlink(missing_ok=True)
                else:
                    put_file(self._folder / name, text.encode(), mode=0o644)
            if self._due is None:
                (self._folder / DUE).unlink(missing_ok=True)
            else:
                put_file(self._folder / DUE, self._due, mode=0o644)
        except OSError as error:
            raise EnvironmentFault(f"cannot write to {self._folder}: {error.strerror}") from error
        manager.run("daemon-reload")
        again = [name for name in restarted if name in self.working]
        if again:
            manager.run("restart", *again)


def _put_in_place(
    manager: Systemctl, former: Former, started: list[str], restarted: list[str], replaced: list[str]
) -> None:
    """Restart, start and disable. What worked before goes on working when the new units do not start."""
    manager.run("daemon-reload")
    try:
        # The new ones first: two on one database get along, and none at all would leave runs waiting.
        if restarted:
            manager.run("try-restart", *restarted)
        manager.run("enable", "--now", *started)
    except SystemctlFailed as fault:
        reason = manager.reason(fault.unit)
        if former.working:
            end = _return(manager, former, started, restarted)
            fault.message = f"{fault.what}{reason}\n  {end}"
        else:
            fault.message += reason
        raise
    if replaced:
        manager.run("disable", "--now", *replaced)


def _return(manager: Systemctl, former: Former, started: list[str], restarted: list[str]) -> str:
    """Put back what worked before; returns what became of it."""
    try:
        former.put_back(manager, started, restarted)
    except SystemctlFailed as other:
        return f"the units from before are back as well, but {other.what}"
    except EnvironmentFault as other:
        return f"the units from before could not be put back: {other.message}"
    return "the units from before are back, and work"


# -- this program ----------------------------------------------------------------------------------------------------


def runtime_places() -> tuple[str, ...]:
    """Where this program really is: links resolved, its interpreter, what a virtual environment was made from, and its
    own code."""
    places = (program(), sys.executable, sys.prefix, sys.base_prefix, __file__)
    return tuple(dict.fromkeys(os.path.realpath(place) for place in places if place))


# -- what was there before ---------------------------------------------------------------------------------------------


def _old_units(folder: Path, used: set[str], started: set[str]) -> list[str]:
    """Units of ours that are enabled or active and are not among those that are wanted."""
    return sorted(
        (name for name in used - started if own_text(folder / _file_of(name)) is not None),
        key=lambda name: (len(name), name),
    )


def _file_of(name: str) -> str:
    """The file of a unit: that of its template, for an instance."""
    return f"{name.partition('@')[0]}@.service" if "@" in name else name


def _is_numbered(name: str) -> bool:
    """Whether `install` gives such names; an instance with another name was made by somebody on purpose."""
    return "@" not in name or name.partition("@")[2].removesuffix(".service").isdecimal()


def given_database(settings: Settings) -> str | None:
    """The database that was named by the person, where it really lies; None when it is only the default.

    What belongs to it lies beside the file itself, so that is the folder which units have to see.
    """
    if str(settings.database) == DEFAULT_DATABASE and not os.environ.get("AGENTCTL_DB"):
        return None
    return checked_path(os.path.realpath(settings.database), "--db")


def checked_path(path: Path | str, what: str) -> str:
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


def _lingers() -> bool:
    """Whether units of this user stay after the last login; asked for the user that we are, not the one in USER."""
    try:
        return (LINGER / pwd.getpwuid(os.getuid()).pw_name).exists()
    except KeyError:
        return False
