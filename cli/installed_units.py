"""What installed units of ours say about how they were made, so that a later `install` keeps what it is not told.

Read is what `cli.unit_files` writes, and only where nobody has changed it by hand: what is not understood counts as not
said.
"""

from __future__ import annotations

import shlex
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import unit_files
from .unit_files import MARK, TEMPORARY, is_below

STATE_FOLDER = Path("/var/lib/agentctl")
"""What `StateDirectory=` makes for units of the system."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a command says, or an installed unit: see `Site`. None: it says nothing."""

    run_as: str | None = None
    database: str | None = None
    count: int | None = None
    drain_seconds: int | None = None
    max_tasks: int | None = None
    max_age: str | None = None
    max_rss: str | None = None
    writable: tuple[str, ...] | None = None


_KEPT = (
    ("--run-as", "run_as", unit_files.DEFAULT_USER),
    ("-n", "count", unit_files.DEFAULT_COUNT),
    ("--drain-seconds", "drain_seconds", unit_files.DEFAULT_DRAIN_SECONDS),
    ("--max-tasks", "max_tasks", None),
    ("--max-age", "max_age", None),
    ("--max-rss", "max_rss", None),
)
"""Option, field, and what it is by default."""


def keep(given: Options, before: Options | None, *, user: bool) -> tuple[Options, list[str]]:
    """What a command says, completed by what the units say; and what was kept, as a person would write it.

    A database that is named in another way, and is the same, keeps its name in the units: nothing has changed.
    """
    if before is None:
        return given, []
    changes: dict[str, Any] = {}
    words: list[str] = []
    for option, name, usual in _KEPT:
        value = getattr(before, name)
        if getattr(given, name) is None and value is not None:
            changes[name] = value
            if value != usual:
                words += [option, str(value)]
    if given.writable is None and before.writable:
        changes["writable"] = before.writable
        for folder in before.writable:
            words += ["--writable", folder]
    if given.database is None and before.database is not None:
        changes["database"] = before.database
        words += ["--db", before.database]
    elif given.database is not None and str(database_of(before.database, user=user)) == given.database:
        changes["database"] = before.database
    return replace(given, **changes), words


def database_of(database: str | None, *, user: bool) -> Path:
    """Where the database of units lies; None is the one in the state folder."""
    if database is not None:
        return Path(database)
    return (Path.home() / ".local/state/agentctl" if user else STATE_FOLDER) / "runtime.db"


def installed(folder: Path, *, each: bool, used: Set[str]) -> Options | None:
    """What the installed units say: those that are used (enabled or active), else those of the wanted layout."""
    single = {name for name in used if name.startswith("agentctl-worker@")}
    found: dict[str, Options] = {}
    for name in (unit_files.WORKER, unit_files.POOL) if each else (unit_files.POOL, unit_files.WORKER):
        text = own_text(folder / name)
        if text is not None:
            found[name] = read(name, text, instances=single)
    for name, options in found.items():
        if name in used or (name == unit_files.WORKER and single):
            return options
    return next(iter(found.values()), None)


def own_text(path: Path) -> str | None:
    """The text of a unit of ours; None for one of somebody else, and where there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text if text.startswith(MARK) else None


def read(name: str, text: str, *, instances: Set[str] = frozenset()) -> Options:
    """The options that a unit was made from. `instances`: the single workers that are used, which tell their number."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        setting, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            values.setdefault(setting, []).extend(_words(value))
    command = values.get("ExecStart", [])[3:]
    options = dict(zip(command[::2], command[1::2], strict=False))
    places = [word.partition("=")[2] for word in values.get("Environment", []) if word.startswith("AGENTCTL_DB=")]
    # The place in the state folder is written with a specifier, with which no absolute path begins.
    database = next((place for place in places if place.startswith("/")), None)
    folders = values.get("ReadWritePaths", [])
    if database is not None:
        folders = folders[:-1]
    if name == unit_files.WORKER:
        numbers = [_number(instance.partition("@")[2].removesuffix(".service")) for instance in instances]
        count = max((number for number in numbers if number is not None), default=None)
        folders = [folder for folder in folders if not is_below(folder, *TEMPORARY)]
    else:
        count = _number(options.get("-n"))
    return Options(
        next(iter(values.get("User", [])), None),
        database,
        count,
        _number(options.get("--drain-seconds")),
        _number(options.get("--max-tasks")),
        options.get("--max-age"),
        options.get("--max-rss"),
        tuple(folders),
    )


def _words(value: str) -> list[str]:
    """The words of a value, as `unit_files.quoted` has written them."""
    try:
        return [word.replace("%%", "%") for word in shlex.split(value)]
    except ValueError:
        return []


def _number(word: str | None) -> int | None:
    return int(word) if word is not None and word.isascii() and word.isdigit() else None
