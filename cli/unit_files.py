"""The systemd units: their text, made from a few facts. Pure; writing and enabling is `cli.install`.

`ops/systemd/` holds what comes out for the usual places, for people who install by hand; a test keeps both the same.
What an installed unit says is read back by `cli.installed_units`.

What is deliberately not hardened: `ProcSubset=pid` would hide the boot id and `/proc/locks`, and processes that see
different boot ids take one another for dead. `RestrictRealtime=` refuses the batch scheduling that keeps the write gate
fast, and without capabilities nothing can become realtime anyway. Units of single workers share `/tmp` with everybody,
and may write there, since the tasks of one run may hand files on. `UMask=` would be that of every file that a workflow
writes; the database is private by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARK = "# Made by `agentctl workers install`; changes belong into a drop-in (`systemctl edit`)."
"""The first line of every unit of ours: a file without it is somebody else's and never overwritten."""

COORDINATOR = "agentctl-coordinator.service"
POOL = "agentctl-workers.service"
WORKER = "agentctl-worker@.service"

DEFAULT_COUNT = 8
DEFAULT_DRAIN_SECONDS = 30
DEFAULT_USER = "agentctl"

STOP_SLACK_SECONDS = 30
"""What a stop may take after the drain limit: ending effects hard, their results, the last commit."""

HOMES = ("/home", "/root", "/run/user")
"""What `ProtectHome=` hides."""

TEMPORARY = ("/tmp", "/var/tmp")
"""What `PrivateTmp=` replaces by folders of the unit's own."""

_COMMON_SERVICE = """\
Type=notify
NotifyAccess=main
WatchdogSec={watchdog}
TimeoutStartSec=120
TimeoutStopSec={stop}
KillMode=mixed
KillSignal=SIGTERM
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
SuccessExitStatus=3
OOMPolicy=continue
"""

_HARDENING_ANYWHERE = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
"""

_HARDENING_SYSTEM = """\
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome={home}
PrivateTmp={private_tmp}
PrivateDevices=yes
DevicePolicy=closed
ProtectClock=yes
ProtectHostname=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectProc=invisible
RestrictNamespaces=yes
RestrictAddressFamilies={families}
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
KeyringMode=private
"""


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how the units run.

    `database` None: `runtime.db` in the state folder that systemd makes (`StateDirectory=`). `user` None: units of the
    user's own manager. `writable` are further folders in which workflows write; only system units need to know.
    """

    program: str
    user: str | None
    database: str | None = None
    count: int = DEFAULT_COUNT
    drain_seconds: int = DEFAULT_DRAIN_SECONDS
    watchdog_seconds: int = 60
    max_tasks: int | None = None
    max_age: str | None = None
    max_rss: str | None = None
    writable: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """Where the program really lies, its interpreter and its libraries: what the units must be able to see."""

    @property
    def own_folders(self) -> tuple[str, ...]:
        """The folder of the database, unless systemd makes it."""
        return () if self.database is None else (self.database.rpartition("/")[0] or "/",)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders that a system unit is given to write into; each has to exist when it starts."""
        return (*self.writable, *self.own_folders)


def is_below(place: str, *folders: str) -> bool:
    """Whether an absolute path is one of these folders, or inside of one."""
    return any(place == folder or place.startswith(f"{folder}/") for folder in folders)


def units(site: Site) -> dict[str, str]:
    """All units by file name."""
    return {COORDINATOR: _coordinator(site), POOL: _pool(site), WORKER: _worker(site)}


def _coordinator(site: Site) -> str:
    stop = STOP_SLACK_SECONDS
    lines = _unit("agentctl coordinator: drives the runs of one database")
    # It starts no command, so the folders of workflows are none of its business.
    folders = site.own_folders
    lines += _service(site, ["coordinator", "start"], folders, stop=stop, private_tmp=True, network=False)
    return _text(lines, site)


def _pool(site: Site) -> str:
    command = ["workers", "start", "-n", str(site.count), "--name", "pool", *_care(site)]
    lines = _unit("agentctl workers: a pool, with a coordinator of its own unless one is live")
    stop = site.drain_seconds + STOP_SLACK_SECONDS
    lines += _service(site, command, site.folders, stop=stop, private_tmp=True, network=True)
    return _text(lines, site)


def _worker(site: Site) -> str:
    command = ["worker", "start", "--name", "%i", *_care(site)]
    lines = _unit("agentctl worker %i", f"Wants={COORDINATOR}", f"After={COORDINATOR}")
    stop = site.drain_seconds + STOP_SLACK_SECONDS
    # The root is read-only for the unit, and a `/tmp` that is not its own is a part of it.
    folders = (*TEMPORARY, *(folder for folder in site.folders if not is_below(folder, *TEMPORARY)))
    lines += _service(site, command, folders, stop=stop, private_tmp=False, network=True)
    return _text(lines, site)


def _care(site: Site) -> list[str]:
    words = ["--drain-seconds", str(site.drain_seconds)]
    for option, value in (("--max-tasks", site.max_tasks), ("--max-age", site.max_age), ("--max-rss", site.max_rss)):
        if value is not None:
            words += [option, str(value)]
    return words


def _unit(description: str, *more: str) -> list[str]:
    return [
        MARK,
        "[Unit]",
        f"Description={description}",
        *more,
        # A disk that is full, or a mount that comes late, is tried again for as long as it takes.
        "StartLimitIntervalSec=0",
        "",
    ]


def _service(
    site: Site, command: Sequence[str], folders: Sequence[str], *, stop: int, private_tmp: bool, network: bool
) -> list[str]:
    lines = ["[Service]"]
    lines += _COMMON_SERVICE.format(watchdog=site.watchdog_seconds, stop=stop).splitlines()
    # A worker's own name holds a specifier of systemd's, which must stay one.
    lines.append(f"ExecStart={' '.join([quoted(site.program), *command])}")
    lines.append("Environment=AGENTCTL_UNIT=%n AGENTCTL_LOG_LEVEL=info")
    if site.database is None:
        state = "%S/agentctl" if site.user is not None else "%h/.local/state/agentctl"
        lines.append(f"Environment=AGENTCTL_DB={state}/runtime.db")
    else:
        lines.append(f"Environment={quoted('AGENTCTL_DB=' + site.database)}")
    # What the commands need besides, or secrets; the file may be missing.
    settings = "%h/.config/agentctl/environment" if site.user is None else "/etc/agentctl/environment"
    lines.append(f"EnvironmentFile=-{settings}")
    if site.user is None:
        return [*lines, *_HARDENING_ANYWHERE.splitlines(), ""]
    lines.append(f"User={site.user}")
    if site.database is None:
        lines += ["StateDirectory=agentctl", "StateDirectoryMode=0700", "WorkingDirectory=%S/agentctl"]
    if folders:
        lines.append("ReadWritePaths=" + " ".join(quoted(folder) for folder in folders))
    lines += _HARDENING_ANYWHERE.splitlines()
    at_home = any(is_below(place, *HOMES) for place in (*folders, site.program, *site.needs))
    lines += _HARDENING_SYSTEM.format(
        home="read-only" if at_home else "yes",
        private_tmp="yes" if private_tmp else "no",
        families="AF_UNIX AF_INET AF_INET6 AF_NETLINK" if network else "AF_UNIX",
    ).splitlines()
    if not network:
        lines.append("IPAddressDeny=any")
    return [*lines, ""]


def _text(lines: list[str], site: Site) -> str:
    target = "default.target" if site.user is None else "multi-user.target"
    return "\n".join([*lines, "[Install]", f"WantedBy={target}", ""])


def quoted(word: str) -> str:
    """A word as a unit file spells it: specifiers and blanks lose their meaning.

    Not for arguments of a command, where `$` would need care: in the path of a program it has no meaning.
    """
    if word.startswith("%h/"):  # no absolute path begins so: the home folder, as systemd knows it
        return "%h/" + quoted(word[3:])
    text = word.replace("%", "%%")
    if not text or any(c in " \t\"'\\;" for c in text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return text
