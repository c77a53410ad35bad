"""The systemd units: made from the code, checked by systemd's own tools where they exist, written and enabled."""

from __future__ import annotations

import json
import os
import pwd
import runpy
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from agentctl.cli import install
from agentctl.cli.installed_units import Options, read
from agentctl.cli.unit_checks import closed_folder, doubts, problems
from agentctl.cli.unit_files import COORDINATOR, MARK, POOL, STOP_SLACK_SECONDS, WORKER, Site, quoted, units
from agentctl.coordinator.supervisor import end_resource_tracker
from agentctl.worker.effects.process import hidden_by_unit
from support.children import wait_until
from support.field import Field

ROOT = Path(__file__).resolve().parents[2]
ANALYZE = shutil.which("systemd-analyze")
NEEDS_ANALYZE = pytest.mark.skipif(ANALYZE is None, reason="there is no systemd-analyze here")
EXPOSURE_LIMIT = 25
"""Tenths: systemd calls less than 5.0 medium and less than 2.0 safe; what is open is named in `cli.unit_files`."""


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def write(folder: Path, made: Mapping[str, str]) -> list[Path]:
    for name, text in made.items():
        (folder / name).write_text(text)
    return [folder / name for name in made]


def analyze(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    env = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:", "XDG_RUNTIME_DIR": str(folder), "SYSTEMD_COLORS": "0"}
    return subprocess.run([ANALYZE, *map(str, words)], capture_output=True, text=True, check=False, env=env)


def test_the_files_in_the_repository_are_what_the_code_makes() -> None:
    made = dict(runpy.run_path(str(ROOT / "ops/systemd/render.py"))["rendered"]())
    for path, text in made.items():
        assert path.read_text() == text, f"run `python ops/systemd/render.py`: {path.name} differs"
    assert set((ROOT / "ops/systemd").rglob("*.service")) == set(made)


@pytest.mark.parametrize("user", [None, "agentctl"], ids=["user", "system"])
def test_what_every_unit_promises(user: str | None) -> None:
    for name, text in units(Site("/usr/bin/agentctl", user, drain_seconds=90)).items():
        found = settings(text)
        assert text.startswith(MARK)
        for key, value in {
            "Type": "notify",
            "NotifyAccess": "main",
            "KillMode": "mixed",
            "Restart": "on-failure",
            "OOMPolicy": "continue",
            "NoNewPrivileges": "yes",
            "StartLimitIntervalSec": "0",
        }.items():
            assert found[key] == [value], (name, key)
        assert int(found["WatchdogSec"][0]) > 0
        drain = 0 if name == COORDINATOR else 90
        assert int(found["TimeoutStopSec"][0]) == drain + STOP_SLACK_SECONDS
        # What is read from /proc decides who is alive: it must be the same for all.
        assert "ProcSubset" not in found
        assert "RestrictRealtime" not in found
        assert ("User" in found) == (user is not None)
        assert found["WantedBy"] == ["multi-user.target" if user else "default.target"]


@NEEDS_ANALYZE
@pytest.mark.parametrize("user", [None, "root"], ids=["user", "system"])
def test_systemd_understands_them(tmp_path: Path, user: str | None) -> None:
    odd = tmp_path / "a b%c$d"
    odd.mkdir()
    program = odd / "agentctl"
    program.symlink_to("/bin/true")
    site = Site(str(program), user, str(odd / "runtime.db"), max_tasks=9, max_rss="1G", writable=(str(odd),))
    for number, made in enumerate((units(site), units(Site("/bin/true", user)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        paths = write(folder, made)
        paths[-1].rename(folder / "agentctl-worker@1.service")
        names = [*paths[:-1], folder / "agentctl-worker@1.service"]
        done = analyze("verify", "--man=no", *(["--user"] if user is None else []), *names, folder=folder)
        said = [line for line in done.stderr.splitlines() if "agentctl" in line or str(folder) in line]
        assert said == [], done.stderr
        assert done.returncode == 0, done.stderr


@NEEDS_ANALYZE
def test_they_leave_little_open(tmp_path: Path) -> None:
    for path in write(tmp_path, units(Site("/bin/true", "root"))):
        place = path.rename(path.with_name(path.name.replace("@", "@1")))
        # `root` exists everywhere, which verification needs, and costs points that the account `agentctl` does not.
        place.write_text(place.read_text().replace("User=root", "User=nobody"))
        done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE_LIMIT}", place, folder=tmp_path)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("/plain/path", "/plain/path"),
        ("/a b", '"/a b"'),
        ("/50%", "/50%%"),
        ('/q"x', '"/q\\"x"'),
        ("/b\\s", '"/b\\\\s"'),
        ("%h/.local/bin/agentctl", "%h/.local/bin/agentctl"),
        ("", '""'),
        ("/pay$me", "/pay$me"),
    ],
)
def test_words_keep_their_meaning(word: str, text: str) -> None:
    assert quoted(word) == text


# -- `workers install` -------------------------------------------------------------------------------------------------

SYSTEMCTL = """\
#!/bin/sh
case "$*" in *list-units*) for unit in $RUNNING; do echo "$unit loaded active running $unit"; done; exit 0;; esac
printf '%s\\n' "$*" >> "$SAID"
case "$*" in *"$FAILS"*) echo "Failed to connect to bus" >&2; exit 1;; esac
"""

JOURNALCTL = """\
#!/bin/sh
echo '{"SYSLOG_IDENTIFIER": "systemd", "MESSAGE": "Starting it..."}'
echo '{"SYSLOG_IDENTIFIER": "agentctl", "MESSAGE": "error: the disk is full"}'
echo '{"SYSLOG_IDENTIFIER": "systemd", "MESSAGE": "Failed to start it."}'
"""


@pytest.fixture
def systemd(field: Field) -> Path:
    """A folder in which a user's units lie, and a `systemctl` that writes down what it is told."""
    field.tool("systemctl", SYSTEMCTL)
    field.tool("journalctl", JOURNALCTL)
    said = field.root / "said"
    said.touch()
    tools = field.root / "tools"
    field.environment |= {
        "SAID": str(said),
        "FAILS": "nothing of this",
        "RUNNING": "",
        "XDG_CONFIG_HOME": str(field.root / "config"),
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    return field.root / "config" / "systemd" / "user"


def test_a_pool_is_written_and_enabled(field: Field, systemd: Path) -> None:
    database = field.root / "data base" / "runtime.db"
    result = field.json("--db", database, "workers", "install", "--user", "-n", "3", "--max-age", "12h")
    assert result.code == 0, result.err
    assert result.data["enabled"] is True
    assert [path.name for path in systemd.iterdir()] == [POOL]
    text = (systemd / POOL).read_text()
    assert f'Environment="AGENTCTL_DB={database}"' in text
    command = shlex.split(settings(text)["ExecStart"][0])
    assert command[1:] == ["workers", "start", "-n", "3", "--name", "pool", "--drain-seconds", "30", "--max-age", "12h"]
    assert os.access(command[0], os.X_OK)
    assert (field.root / "said").read_text().splitlines() == ["--user daemon-reload", f"--user enable --now {POOL}"]
    assert not database.exists()  # whoever starts the unit makes it


def test_a_unit_for_each_worker(field: Field, systemd: Path) -> None:
    assert field.json("workers", "install", "--user", "-n", "2", "--each").code == 0
    assert sorted(path.name for path in systemd.iterdir()) == sorted([COORDINATOR, WORKER])
    told = (field.root / "said").read_text().splitlines()[1]
    assert told == f"--user enable --now {COORDINATOR} agentctl-worker@1.service agentctl-worker@2.service"


def test_the_command_of_the_unit_works(field: Field, systemd: Path) -> None:
    """What is in the unit is started as it stands there, told its socket, and stopped."""
    assert field.json("workers", "install", "--user", "-n", "1", "--no-enable").code == 0
    found = settings((systemd / POOL).read_text())
    home = field.root / "home"
    home.mkdir()
    environment = dict(pair.split("=", 1) for line in found["Environment"] for pair in line.split())
    environment = {name: value.replace("%h", str(home)).replace("%n", POOL) for name, value in environment.items()}
    process = field.spawn(*shlex.split(found["ExecStart"][0]), env=environment)
    database = home / ".local/state/agentctl/runtime.db"
    assert environment["AGENTCTL_DB"] == str(database)

    def listed() -> list[dict[str, object]]:
        if not database.exists():
            return []
        answer = field.json("workers", "list", env={"AGENTCTL_DB": str(database)})
        return [] if answer.code else answer.data["workers"]

    wait_until(lambda: any(worker["state"] == "idle" for worker in listed()), process.err or "an idle worker")
    assert [worker["unit"] for worker in listed()] == [POOL]
    field.stop(process)


def test_print_writes_nothing(field: Field, systemd: Path) -> None:
    for words in (["--user"], ["--each"], []):
        result = field("workers", "install", "--print", *words)
        assert result.code == 0
        assert "ExecStart=" in result.out
    assert not systemd.exists()
    assert (field.root / "said").read_text() == ""
    data = field.json("workers", "install", "--print").data
    assert (data["written"], data["enabled"]) == (False, False)
    assert json.dumps(data).count("User=agentctl") == 1


def test_units_of_others_are_left_alone_and_ours_are_replaced(field: Field, systemd: Path) -> None:
    systemd.mkdir(parents=True)
    (systemd / WORKER).write_text("[Service]\nExecStart=/bin/true\n")
    result = field.json("workers", "install", "--user", "--each")
    assert (result.code, result.error["code"]) == (5, "conflict")
    assert [path.name for path in systemd.iterdir()] == [WORKER]  # all or none
    assert (systemd / WORKER).read_text() == "[Service]\nExecStart=/bin/true\n"
    for count in ("2", "5"):
        assert field.json("workers", "install", "--user", "-n", count).code == 0
        assert f"-n {count} " in (systemd / POOL).read_text()


@pytest.mark.parametrize("step", ["daemon-reload", "enable"])
def test_a_systemctl_that_fails_is_told_of(field: Field, systemd: Path, step: str) -> None:
    result = field.json("workers", "install", "--user", env={"FAILS": step})
    assert (result.code, result.error["code"]) == (5, "environment")
    assert "Failed to connect to bus" in result.error["message"]
    assert step in result.error["message"]
    assert (systemd / POOL).exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--run-as", "no-such-user-here"], 5),
        (["--run-as", "a;b"], 2),
        (["--user", "--max-rss", "1M"], 2),
        (["--user", "--max-age", "soon"], 2),
        (["--user", "--writable", "/tmp/a\nb"], 2),
        (["--user", "-n", "0"], 2),
        (["--user", "--writable", "/srv"], 2),
        (["--run-as", "root", "--writable", "/no/such/folder"], 2),
        (["--run-as", "root", "--db", "/tmp/runtime.db"], 2),
    ],
)
def test_what_cannot_be_installed(field: Field, systemd: Path, words: list[str], code: int) -> None:
    result = field.json("workers", "install", *words)
    assert result.code == code, result.err
    assert not systemd.exists()
    assert (field.root / "said").read_text() == ""


def told(field: Field) -> list[str]:
    """What `systemctl` was told since the last look, without the reload that comes first."""
    said = field.root / "said"
    lines = said.read_text().splitlines()
    said.write_text("")
    assert lines[:1] == ["--user daemon-reload"]
    return lines[1:]


def test_what_has_changed_is_restarted(field: Field, systemd: Path) -> None:
    """`enable --now` leaves a unit that runs with its old settings."""
    running = {"RUNNING": POOL}
    assert field.json("workers", "install", "--user", "-n", "2").data["restarted"] == []
    assert told(field) == [f"--user enable --now {POOL}"]
    assert field.json("workers", "install", "--user", "-n", "2", env=running).data["restarted"] == []
    assert told(field) == [f"--user enable --now {POOL}"]  # nothing has changed: nothing is interrupted
    result = field("workers", "install", "--user", "-n", "3", env=running)
    assert f"restarted, since they have changed: {POOL}" in result.out
    assert told(field) == [f"--user try-restart {POOL}", f"--user enable --now {POOL}"]


@pytest.mark.parametrize("first", ["daemon-reload", "try-restart", "--no-enable"])
def test_what_an_unfinished_install_has_changed_is_restarted_by_the_next(
    field: Field, systemd: Path, first: str
) -> None:
    """The files say it already, but what runs has its old options."""
    running = {"RUNNING": POOL}
    assert field.json("workers", "install", "--user", "-n", "2").code == 0
    if first == "--no-enable":
        shown = field("workers", "install", "--user", "-n", "3", first, env=running).out
        assert f"then: `systemctl --user try-restart {POOL}`" in shown
    else:
        assert field.json("workers", "install", "--user", "-n", "3", env={**running, "FAILS": first}).code == 5
    told(field)
    assert field.json("workers", "install", "--user", "-n", "3", env=running).data["restarted"] == [POOL]
    assert told(field) == [f"--user try-restart {POOL}", f"--user enable --now {POOL}"]
    assert field.json("workers", "install", "--user", "-n", "3", env=running).data["restarted"] == []
    assert [path.name for path in systemd.iterdir()] == [POOL]


def test_a_unit_that_runs_though_its_file_was_gone_is_restarted(field: Field, systemd: Path) -> None:
    assert field.json("workers", "install", "--user", env={"RUNNING": POOL}).data["restarted"] == [POOL]


def test_the_place_that_is_shown_can_be_pasted(field: Field, systemd: Path) -> None:
    place = field.root / "a b'c"
    shown = field("--db", place / "r.db", "workers", "install", "--user", "--no-enable").out
    line = shown.splitlines()[-1].partition("`")[2].rstrip("`")
    assert shlex.split(line) == ["export", f"AGENTCTL_DB={place}/r.db"]


def wanted_by(systemd: Path, *names: str) -> None:
    wants = systemd / "default.target.wants"
    wants.mkdir(exist_ok=True)
    for name in names:
        (wants / name).symlink_to(systemd / name)


def test_another_layout_and_higher_numbers_are_replaced(field: Field, systemd: Path) -> None:
    eight = [f"agentctl-worker@{number}.service" for number in range(1, 9)]
    assert field.json("workers", "install", "--user", "--each", "-n", "8").code == 0
    wanted_by(systemd, COORDINATOR, *eight[:4], "agentctl-worker@big.service")
    running = {"RUNNING": " ".join([COORDINATOR, *eight])}
    told(field)
    result = field.json("workers", "install", "--user", "--each", "-n", "6", env=running)
    assert (result.data["replaced"], result.data["left"]) == (eight[6:], ["agentctl-worker@big.service"])
    assert "agentctl-worker@big.service" in result.err
    assert told(field)[-1] == f"--user disable --now {' '.join(eight[6:])}"
    result = field.json("workers", "install", "--user", "-n", "6", env=running)
    assert set(result.data["replaced"]) == {COORDINATOR, *eight}
    start, stop = told(field)
    assert start == f"--user enable --now {POOL}"
    assert stop.startswith("--user disable --now ")
    assert set(stop.split()[3:]) == {COORDINATOR, *eight}
    shown = field("workers", "install", "--user", "-n", "6", "--no-enable", env=running).out
    assert "then: `systemctl --user disable --now" in shown


def test_units_of_others_are_never_disabled(field: Field, systemd: Path) -> None:
    systemd.mkdir(parents=True)
    (systemd / COORDINATOR).write_text("[Service]\nExecStart=/bin/true\n")
    wanted_by(systemd, COORDINATOR)
    result = field.json("workers", "install", "--user", env={"RUNNING": COORDINATOR})
    assert (result.data["replaced"], result.data["left"]) == ([], [])
    assert told(field) == [f"--user enable --now {POOL}"]


@pytest.mark.parametrize(("step", "words"), [("daemon-reload", "XDG_RUNTIME_DIR"), ("enable", "journalctl --user -u")])
def test_a_failing_systemctl_has_a_remedy(field: Field, systemd: Path, step: str, words: str) -> None:
    result = field.json("workers", "install", "--user", env={"FAILS": step})
    assert words in result.error["remedy"]


def test_a_unit_that_only_quotes_ours_is_left_alone(field: Field, systemd: Path) -> None:
    systemd.mkdir(parents=True)
    foreign = f"# not: {MARK}\n[Service]\nExecStart=/bin/true\n"
    (systemd / POOL).write_text(foreign)
    assert field.json("workers", "install", "--user").error["code"] == "conflict"
    assert (systemd / POOL).read_text() == foreign


def test_whoever_lingers_is_the_user_that_we_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LINGER", tmp_path)
    monkeypatch.delenv("USER", raising=False)
    assert not install._lingers()
    (tmp_path / "somebody").touch()
    monkeypatch.setenv("USER", "somebody")
    assert not install._lingers()
    (tmp_path / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert install._lingers()


def root_site(**facts: object) -> Site:
    return Site(**{"program": "/usr/bin/agentctl", "user": "root", **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({}, None),
        ({"writable": ("/no/such/folder",)}, "there is no folder /no/such/folder"),
        ({"database": "/no/such/folder/runtime.db"}, "there is no folder /no/such/folder"),
        ({"database": "/tmp/runtime.db"}, "a /tmp of its own"),
        ({"writable": ("/var/tmp",)}, "a /tmp of its own"),
        ({"needs": ("/tmp/venv/bin/python",)}, "could not start agentctl"),
        ({"database": "/proc/runtime.db"}, "unknown type"),
    ],
)
def test_system_units_that_could_not_work(facts: dict[str, object], word: str | None) -> None:
    found = [problem.message for problem in problems(root_site(**facts), None, each=False)]
    assert (found == []) if word is None else (word in found[0])


def test_a_program_that_the_user_of_the_units_cannot_reach() -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)  # those of pytest are closed to other users
        folder = Path(made) / "venv"
        folder.mkdir(mode=0o700)
        nobody = pwd.getpwnam("nobody")
        assert closed_folder(str(folder / "python"), nobody) == str(folder)
        assert closed_folder(str(folder / "python"), pwd.getpwnam("root")) is None
        folder.chmod(0o755)
        assert closed_folder(str(folder / "python"), nobody) is None


@pytest.mark.parametrize(
    ("place", "home"),
    [("/home/me/venv/bin/python", "read-only"), ("/root/x", "read-only"), ("/rootfs/x", "yes"), ("/opt/x", "yes")],
)
def test_an_interpreter_at_home_can_be_seen(place: str, home: str) -> None:
    """The program itself may be a link from elsewhere."""
    made = units(Site("/usr/local/bin/agentctl", "agentctl", needs=(place,)))
    assert {settings(text)["ProtectHome"][0] for text in made.values()} == {home}


def test_print_tells_what_could_not_work(field: Field, systemd: Path) -> None:
    result = field("workers", "install", "--print", "--writable", "/no/such/folder")
    assert result.code == 0
    assert "there is no folder /no/such/folder" in result.err


def test_a_stop_leaves_time_for_what_a_drain_takes() -> None:
    """The supervisor's own bounds after the drain limit, which `TimeoutStopSec` has to exceed."""
    from agentctl.coordinator.supervisor import HARD_END_SECONDS

    assert STOP_SLACK_SECONDS >= 4 * HARD_END_SECONDS


def test_only_a_mark_at_the_head_of_a_unit_counts(field: Field, systemd: Path) -> None:
    """Somebody's own unit may quote one of ours."""
    systemd.mkdir(parents=True)
    own = f"# It was once:\n{MARK}\n[Service]\nExecStart=/bin/true\n"
    (systemd / POOL).write_text(own)
    result = field.json("workers", "install", "--user")
    assert (result.code, result.error["code"]) == (5, "conflict")
    assert (systemd / POOL).read_text() == own
    assert (field.root / "said").read_text() == ""


# -- single workers and /tmp -------------------------------------------------------------------------------------------


def test_single_workers_may_write_to_the_tmp_that_they_share() -> None:
    """The root is read-only for a unit, and with `PrivateTmp=no` /tmp is a part of it."""
    made = units(Site("/usr/bin/agentctl", "agentctl", "/srv/db/runtime.db", writable=("/srv/work", "/tmp/more")))
    found = {name: settings(text) for name, text in made.items()}
    assert found[WORKER]["PrivateTmp"] == ["no"]
    assert found[WORKER]["ReadWritePaths"] == ["/tmp /var/tmp /srv/work /srv/db"]
    assert found[COORDINATOR]["ReadWritePaths"] == ["/srv/db"]  # it starts no command


def test_a_folder_in_the_tmp_that_single_workers_share_is_no_problem() -> None:
    site = root_site(writable=("/tmp/of/somebody",))
    assert problems(site, None, each=True) == []
    assert "a pool's unit has a /tmp of its own" in problems(site, None, each=False)[0].message
    (hidden,) = problems(root_site(database="/tmp/runtime.db"), None, each=True)
    assert "the coordinator's unit has a /tmp of its own" in hidden.message


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [POOL, WORKER])
@pytest.mark.parametrize(
    "site",
    [
        Site("/usr/bin/agentctl", None),
        Site("/a b/agentctl", "runner", '/50% "x"/a\'b/run time.db', 3, 7, writable=("/srv/a b", "/srv/c")),
        Site("/x", "agentctl", None, 4, max_tasks=9, max_age="12h", max_rss="512M", writable=("/srv/work",)),
    ],
    ids=["user", "odd", "limits"],
)
def test_what_a_unit_was_made_from_can_be_read(name: str, site: Site) -> None:
    assert read(name, units(site)[name], instances={f"agentctl-worker@{site.count}.service"}) == Options(
        site.user,
        site.database,
        site.count,
        site.drain_seconds,
        site.max_tasks,
        site.max_age,
        site.max_rss,
        site.writable,
    )


def test_what_a_command_does_not_say_is_kept(field: Field, systemd: Path) -> None:
    place = field.root / "db2" / "runtime.db"
    first = ("--db", place, "workers", "install", "--user", "-n", "4", "--max-rss", "512M", "--max-age", "12h")
    assert field.json(*first).data["kept"] == []
    without = {"AGENTCTL_DB": ""}
    result = field.json("workers", "install", "--user", "-n", "3", env=without)
    assert result.data["kept"] == ["--max-age", "12h", "--max-rss", "512M", "--db", str(place)]
    assert result.data["databaseBefore"] is None
    text = (systemd / POOL).read_text()
    assert f"AGENTCTL_DB={place}" in text
    assert " -n 3 " in text
    assert "--max-age 12h --max-rss 512M" in text
    shown = field("workers", "install", "--user", "--drain-seconds", "9", env=without).out
    assert "kept from the units before: -n 3 " in shown
    result = field.json("workers", "install", "--user", "--fresh", env=without)
    assert (result.data["kept"], result.data["database"]) == ([], None)
    assert result.data["databaseBefore"] == str(place)
    assert " -n 8 --name pool --drain-seconds 30\n" in (systemd / POOL).read_text()


def test_the_other_layout_keeps_the_same(field: Field, systemd: Path) -> None:
    without = {"AGENTCTL_DB": ""}
    place = field.root / "db2" / "runtime.db"
    assert field.json("--db", place, "workers", "install", "--user", "-n", "3", "--max-tasks", "7").code == 0
    wanted_by(systemd, POOL)
    data = field.json("workers", "install", "--user", "--each", env={**without, "RUNNING": POOL}).data
    assert (len(data["started"]), data["database"]) == (4, str(place))
    assert "--max-tasks 7" in (systemd / WORKER).read_text()
    running = {**without, "RUNNING": " ".join(data["started"])}
    (systemd / "default.target.wants" / POOL).unlink()
    data = field.json("workers", "install", "--user", "--each", "--max-tasks", "8", env=running).data
    assert (len(data["started"]), data["database"]) == (4, str(place))
    data = field.json("workers", "install", "--user", env=running).data  # the file of the pool is older
    assert "--max-tasks 8" in (systemd / POOL).read_text()
    assert data["kept"] == ["-n", "3", "--max-tasks", "8", "--db", str(place)]


def test_the_same_database_by_another_name_changes_nothing(field: Field, systemd: Path) -> None:
    home = {"HOME": str(field.root / "home"), "AGENTCTL_DB": ""}
    assert field.json("workers", "install", "--user", env=home).data["database"] is None
    place = field.root / "home/.local/state/agentctl/runtime.db"
    again = {**home, "AGENTCTL_DB": str(place), "RUNNING": POOL}
    data = field.json("workers", "install", "--user", env=again).data
    assert (data["database"], data["databaseBefore"], data["restarted"]) == (None, None, [])


def test_runs_of_a_database_that_is_left_are_told_of(field: Field, systemd: Path) -> None:
    old, new = field.root / "old.db", field.root / "new.db"
    document = field.workflow("one", [field.tick_task("t", idempotent=True)])
    assert field.json("--db", old, "submit", document).code == 0
    assert field.json("--db", old, "workers", "install", "--user").code == 0
    result = field("--db", new, "workers", "install", "--user")
    assert result.code == 0
    assert f"the units worked on {old} before: one run has not ended there" in result.err
    assert f"`agentctl --db {old} workers install --user` goes back" in result.err
    new.mkdir()  # what cannot be read is no reason to fail after all is done
    result = field("--db", old, "workers", "install", "--user")
    assert (result.code, "its runs cannot be read" in result.err) == (0, True)


# -- a database that cannot be used ------------------------------------------------------------------------------------


def test_a_database_that_the_user_of_the_units_cannot_write() -> None:
    nobody = pwd.getpwnam("nobody")

    def found(place: Path) -> list[str]:
        site = Site("/usr/bin/agentctl", "nobody", str(place))
        return [problem.message for problem in problems(site, nobody, each=False) if "/usr/bin" not in problem.message]

    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        place = Path(made) / "folder" / "runtime.db"
        place.parent.mkdir()
        place.parent.chmod(0o755)
        assert any("may not write to" in message for message in found(place))
        place.parent.chmod(0o700)
        assert any("may not enter" in message for message in found(place))
        place.parent.chmod(0o777)
        assert not any("may not" in message for message in found(place))
        place.touch(mode=0o600)
        assert any(f"may not read and write {place}" in message for message in found(place))
        site = Site("/usr/bin/agentctl", "nobody", writable=(made,))
        assert "may not write to" in doubts(site, nobody, each=False)[0]


def test_units_of_a_user_with_an_impossible_database_are_not_written(field: Field, systemd: Path) -> None:
    (field.root / "file").touch()
    for place in ("/proc/1/state/runtime.db", field.root / "file" / "runtime.db"):
        result = field.json("--db", place, "workers", "install", "--user")
        assert (result.code, result.error["code"]) == (5, "environment")
        shown = field("--db", place, "workers", "install", "--user", "--print")
        assert (shown.code, "warning: " in shown.err) == (0, True)
    assert not systemd.exists()
    assert (field.root / "said").read_text() == ""


# -- a start that fails ------------------------------------------------------------------------------------------------


def test_units_that_worked_are_put_back_when_the_new_ones_do_not_start(field: Field, systemd: Path) -> None:
    assert field.json("workers", "install", "--user", "-n", "2").code == 0
    before = (systemd / POOL).read_text()
    told(field)
    result = field.json("workers", "install", "--user", "-n", "3", env={"RUNNING": POOL, "FAILS": "try-restart"})
    assert result.code == 5
    assert "error: the disk is full" in result.error["message"]
    assert "systemd" not in result.error["message"].partition("\n")[2]
    assert result.error["message"].endswith("the units from before are back, and work")
    assert (systemd / POOL).read_text() == before
    assert [path.name for path in systemd.iterdir()] == [POOL]
    assert told(field) == [f"--user try-restart {POOL}", "--user daemon-reload", f"--user restart {POOL}"]


def test_another_layout_that_does_not_start_leaves_the_one_that_works(field: Field, systemd: Path) -> None:
    assert field.json("workers", "install", "--user", "-n", "2").code == 0
    wanted_by(systemd, POOL)
    told(field)
    failing = {"RUNNING": POOL, "FAILS": "enable --now agentctl-coordinator"}
    result = field.json("workers", "install", "--user", "-n", "1", "--each", env=failing)
    assert result.code == 5
    assert not (systemd / WORKER).exists()
    assert not (systemd / COORDINATOR).exists()
    new = f"{COORDINATOR} agentctl-worker@1.service"
    assert told(field) == [f"--user enable --now {new}", f"--user disable --now {new}", "--user daemon-reload"]


# -- beside the units --------------------------------------------------------------------------------------------------


def test_the_helper_of_the_library_ends_with_the_pool() -> None:
    """It would be left for a moment, and systemd would kill it, and log that, at every stop."""
    resource_tracker.ensure_running()
    pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    end_resource_tracker()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    end_resource_tracker()  # there is none
    resource_tracker.ensure_running()  # and it can be started again


MOUNTS = """\
700 650 254:0 / / ro,relatime shared:1 - ext4 /dev/vda rw
701 700 0:50 /tmp/systemd-private-0f-agentctl-workers.service-x1/tmp /tmp rw shared:2 - tmpfs tmpfs rw
702 700 0:25 /systemd/inaccessible/dir /home ro shared:3 - tmpfs tmpfs rw
703 700 254:0 /srv /srv rw shared:4 - ext4 /dev/vda rw
704 703 254:0 /systemd-private-looks /srv/tmp rw shared:4 - ext4 /dev/vda rw
"""


@pytest.mark.parametrize(
    ("folder", "word"),
    [
        ("/tmp/x", "a /tmp of its own"),
        ("/tmp", "a /tmp of its own"),
        ("/home/me/x", "hides /home"),
        ("/homes/x", None),
        ("/srv/x", None),
        ("/", None),
    ],
)
def test_what_a_unit_hides_is_told(folder: str, word: str | None) -> None:
    said = hidden_by_unit(folder, MOUNTS.splitlines(keepends=True))
    assert said is None if word is None else word in str(said)
