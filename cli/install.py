"""`agentctl workers install`: write the systemd units and enable them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from agentctl.store.errors import ConflictError, EnvironmentFault, UsageError

from . import unit_files
from .main import DEFAULT_DATABASE, Settings
from .render import Printer, clean, warn
from .unit_files import MARK, Site

SYSTEM_FOLDER = Path("/etc/systemd/system")
ENABLE_SECONDS = 180


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
    """Write the units that are wanted, then `systemctl enable --now` them. With `only_print` nothing is written.

    Raises `EnvironmentFault` (no permission, no such user, systemctl fails) and `ConflictError` (a unit of somebody
    else is in the way); then no file was written, but for the last case of a failing systemctl.
    """
    made = unit_files.units(site)
    names = [unit_files.COORDINATOR, unit_files.WORKER] if each else [unit_files.POOL]
    wanted = {name: made[name] for name in names}
    started = _instances(site.count) if each else names
    folder = _user_folder() if user else SYSTEM_FOLDER
    systemctl = ["systemctl", *(["--user"] if user else [])]
    data = {
        "user": user,
        "folder": str(folder),
        "database": site.database,
        "units": [{"name": name, "path": str(folder / name), "text": text} for name, text in wanted.items()],
        "started": started,
        "written": not only_print,
        "enabled": False,
    }
    if not only_print:
        if not user:
            _require_account(run_as)
        _write(folder, wanted)
        if enable:
            _enable(systemctl, started)
            data["enabled"] = True

    def human(out: Printer) -> None:
        if only_print:
            for name, text in wanted.items():
                out.line(f"# {clean(folder / name)}")
                out.line(text)
            return
        for name in wanted:
            out.line(f"written: {clean(folder / name)}")
        if data["enabled"]:
            out.line(f"enabled and started: {' '.join(started)}")
        else:
            out.line(f"next: `{' '.join([*systemctl, 'daemon-reload'])}`")
            out.line(f"then: `{' '.join([*systemctl, 'enable', '--now', *started])}`")
        where = site.database or ("~/.local/state/agentctl/runtime.db" if user else "/var/lib/agentctl/runtime.db")
        out.line(f"their database: `export AGENTCTL_DB={clean(where)}`")

    Printer(settings).result("Installation", data, human)
    if user and data["enabled"] and not _lingers():
        warn(settings, "units of a user end with the last login; `loginctl enable-linger` lets them stay")


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


def _require_account(name: str) -> None:
    import pwd

    try:
        pwd.getpwnam(name)
    except KeyError as error:
        raise EnvironmentFault(
            f"there is no user {name!r} for the units to run as",
            remedy=f"`useradd --system --home-dir /var/lib/agentctl {name}`, or name another one with --run-as",
        ) from error


def _write(folder: Path, wanted: dict[str, str]) -> None:
    """All or none: what is in the way is found before anything is written."""
    try:
        for name in wanted:
            path = folder / name
            if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
                raise ConflictError(
                    f"{path} was not made by agentctl; it is left alone", remedy="move it away, or use --print"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            partial = folder / f".{name}.partial"
            partial.write_text(text, encoding="utf-8")
            partial.chmod(0o644)
            partial.replace(folder / name)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write units to {folder}: {error.strerror}",
            remedy="units of the system need root; --user installs them for you alone, --print only shows them",
        ) from error


def _enable(systemctl: list[str], started: list[str]) -> None:
    for words in (["daemon-reload"], ["enable", "--now", *started]):
        command = [*systemctl, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ENABLE_SECONDS)
        except FileNotFoundError as error:
            raise EnvironmentFault(
                "the units were written, but there is no systemctl here to enable them",
                remedy="--no-enable writes them only; any other service manager can run the commands in them",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFault(f"`{' '.join(command)}` did not end within {ENABLE_SECONDS} s") from error
        if done.returncode:
            said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
            raise EnvironmentFault(
                f"the units were written, but `{' '.join(command)}` failed: {said}",
                remedy="put that right, then run that command by hand; `journalctl -u agentctl-workers` shows more",
            )


def _lingers() -> bool:
    return os.path.exists(f"/var/lib/systemd/linger/{os.environ.get('USER', '')}")
