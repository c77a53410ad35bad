"""Why units would not work as they are written: told before anything is written.

What a user may do is asked of the kernel, as that user, since access lists and groups decide it as well; where we may
not become that user (only `--print` gets so far), the bits of the mode have to do.
"""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from agentctl.store import filesystem
from agentctl.store.errors import AgentctlError, EnvironmentFault, UsageError

from . import unit_files
from .installed_units import database_of
from .unit_files import Site

COMPANIONS = ("", "-wal", "-shm", ".gate", ".gate-line")
"""Files of a database that whoever works on it has to be able to write."""

ASK_SECONDS = 10

Account = pwd.struct_passwd


def problems(site: Site, account: Account | None, *, each: bool) -> list[AgentctlError]:
    """What would keep units from starting; `account`: whom units of the system run as, if that is known."""
    if site.user is None:
        return list(_of_own_units(database_of(site.database, user=True)))
    return [
        *_hidden(site, each=each),
        *_missing(site, each=each),
        *_unusable_database(site, account),
        *_unreachable_program(site, account),
    ]


def doubts(site: Site, account: Account | None, *, each: bool) -> list[str]:
    """What lets units start, and commands fail."""
    if account is None:
        return []
    return [
        f"the user {site.user} may not write to {folder} (--writable), so commands cannot, either; "
        f"`chown {site.user} {shlex.quote(folder)}` changes that"
        for folder in _needed_folders(site.writable, each=each)
        if os.path.isdir(folder) and not _may_write(folder, account)
    ]


# -- units of the system -----------------------------------------------------------------------------------------------


def _needed_folders(folders: tuple[str, ...], *, each: bool) -> list[str]:
    """Folders that units name. Single workers share `/tmp` and may write there without a word about it."""
    return [folder for folder in folders if not (each and unit_files.is_below(folder, *unit_files.TEMPORARY))]


def _hidden(site: Site, *, each: bool) -> Iterator[AgentctlError]:
    # The coordinator has a /tmp of its own in both layouts.
    database = [] if site.database is None else [site.database]
    who = "the coordinator's unit" if each else "a pool's unit"
    for place in (*database, *_needed_folders(site.writable, each=each)):
        if unit_files.is_below(place, *unit_files.TEMPORARY):
            yield UsageError(
                f"{place}: {who} has a /tmp of its own, so this place would be another one",
                remedy="give a place outside of /tmp and /var/tmp",
            )


def _missing(site: Site, *, each: bool) -> Iterator[AgentctlError]:
    for folder in _needed_folders(site.folders, each=each):
        if not os.path.isdir(folder):
            yield UsageError(
                f"there is no folder {folder}, and a unit that may write there cannot start without it",
                remedy=f"make it first: `install -d -o {site.user} {shlex.quote(folder)}`",
            )


def _unusable_database(site: Site, account: Account | None) -> Iterator[AgentctlError]:
    database = database_of(site.database, user=False)
    folder = str(database.parent)
    if not os.path.isdir(folder):
        return  # told before, or made by systemd
    try:
        filesystem.require_local(database)
    except EnvironmentFault as fault:
        yield fault
    except OSError:
        return  # not for us to see: the start tells
    if account is None or (site.database is None and os.stat(folder).st_uid != account.pw_uid):
        return  # systemd gives a state folder to its user, and all that is in it
    for place in (folder, *(f"{database}{end}" for end in COMPANIONS)):
        if (place == folder or os.path.exists(place)) and not _may_write(place, account):
            yield _unwritable(place, database, account)
            return


def _unwritable(place: str, database: Path, account: Account) -> EnvironmentFault:
    user, folder = account.pw_name, str(database.parent)
    if filesystem.is_read_only(database.parent):
        return EnvironmentFault(
            f"{database} is on a filesystem that is mounted read-only", remedy="choose another place with --db PATH"
        )
    if (closed := closed_folder(str(database), account)) is not None:
        return EnvironmentFault(
            f"the user {user} may not enter {closed}, and the database {database} lies below it",
            remedy="choose another place with --db PATH, or another user with --run-as",
        )
    if place == folder:
        return EnvironmentFault(
            f"the user {user} may not write to {folder}, the folder of the database",
            remedy=f"`chown {user} {shlex.quote(folder)}` if it is there for the database alone, else choose another "
            "place with --db PATH",
        )
    return EnvironmentFault(
        f"the user {user} may not read and write {place}, which belongs to the database",
        remedy=f"`chown {user} {shlex.quote(str(database))}*`, or name the user who owns it with --run-as",
    )


def _unreachable_program(site: Site, account: Account | None) -> Iterator[AgentctlError]:
    for place in (site.program, *site.needs):
        why = "the unit has a /tmp of its own" if unit_files.is_below(place, *unit_files.TEMPORARY) else None
        closed = None if account is None else closed_folder(place, account)
        if closed is not None:
            why = f"the user {site.user} may not enter {closed}"
        if why is not None:
            yield EnvironmentFault(
                f"the units could not start agentctl, which needs {place}: {why}",
                remedy="install agentctl where every user can read it, for example with `pipx install --global`",
            )


# -- units of a user ---------------------------------------------------------------------------------------------------


def _of_own_units(database: Path) -> Iterator[AgentctlError]:
    """What the first command of the unit would stumble over, which works as the same user."""
    remedy = "choose another place with --db PATH"
    try:
        filesystem.require_local(database)
        if database.exists():
            filesystem.require_writable(database)
            return
        nearest = filesystem.nearest_existing(database.parent)
    except EnvironmentFault as fault:
        yield fault
        return
    except OSError as error:
        yield EnvironmentFault(f"there can be no database at {database}: {error.strerror}", remedy=remedy)
        return
    if not nearest.is_dir():
        why = "is not a folder"
    elif filesystem.is_read_only(nearest):
        why = "is on a filesystem that is mounted read-only"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written by you"
    else:
        return
    yield EnvironmentFault(f"there can be no database at {database}: {nearest} {why}", remedy=remedy)


# -- what a user may do ------------------------------------------------------------------------------------------------


def _may_write(place: str, account: Account) -> bool:
    """Whether a user may read and write a file, or make files in a folder."""
    if account.pw_uid == os.geteuid() != 0:
        return os.access(place, os.R_OK | os.W_OK | (os.X_OK if os.path.isdir(place) else 0))
    if os.geteuid() != 0 or account.pw_uid == 0:  # a unit of root's has no capability that would set it above the bits
        wanted = 0o7 if os.path.isdir(place) else 0o6
        return _bits(os.stat(place), account) & wanted == wanted and not filesystem.is_read_only(Path(place))
    question = 'test -r "$0" && test -w "$0" && { test ! -d "$0" || test -x "$0"; }'
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", question, place],
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=groups,
            cwd="/",
            capture_output=True,
            check=False,
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return True  # nobody can tell: the start does
    return done.returncode == 0


def _bits(status: os.stat_result, account: Account) -> int:
    """What the mode allows a user: 4 to read, 2 to write, 1 to enter or execute."""
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    shift = 6 if status.st_uid == account.pw_uid else 3 if status.st_gid in groups else 0
    return status.st_mode >> shift & 0o7


def closed_folder(place: str, account: Account) -> str | None:
    """The first folder on the way to a place that this user may not enter."""
    if account.pw_uid == 0:
        return None
    for folder in reversed(Path(place).parents):
        try:
            status = folder.stat()
        except OSError:
            return None  # not there, or not for us to see: the start tells
        if not _bits(status, account) & 1:
            return str(folder)
    return None
