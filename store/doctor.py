"""Is this a place where agentctl can be left alone? Checks of machine and store, each with what to do about it.

`examine` never creates, migrates, repairs or ends anything: it can be asked of a database at work, and by a monitor
every few seconds. A check that cannot be made is a finding itself, never an exception.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import apsw

from . import filesystem, migrate, process_identity
from .artifacts import Artifacts
from .clock import Clock
from .database import Database
from .errors import AgentctlError, CorruptStore, EnvironmentFault
from .facts import Facts, gather, liveness, wal_use
from .gate import MASKED, flock_holder
from .process_identity import HOLDER_MARKER, Liveness
from .records import ProcessRow, record
from .timing import Timing
from .version import VERSION

SQLITE_LEAST = (3, 51, 3)
"""Older ones can corrupt a WAL database when a checkpoint races another connection's reset."""

DISK_FAIL_BYTES = 64 << 20
DISK_WARN_BYTES = 1 << 30
SYNC_WARN_MS = 25.0
SYNC_FAIL_MS = 1000.0
SYNC_ROUNDS = 8
WAL_WARN_BYTES = 64 << 20
CLOCK_WARN_MS = 60_000
YEAR_2025_MS = 1_735_689_600_000
GATE_SECONDS = 2.0
GATE_POLL_SECONDS = 0.05
SHOWN = 5

LIVE = ("database",)
"""Liveness: the database can be opened and read."""
READY = ("database", "disk_space", "gate", "coordinator", "workers")
"""Readiness: what is submitted now is driven and executed."""


@record
class Check:
    """One finding: `status` is `ok`, `warn` or `fail`; `remedy` is what a person can do."""

    id: str
    status: str
    message: str
    remedy: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """The JSON of contract, new verbs."""
        return {"id": self.id, "status": self.status, "message": self.message, "remedy": self.remedy}


def worst(checks: Iterable[Check]) -> str:
    """The worst status of all."""
    return max((check.status for check in checks), key=("ok", "warn", "fail").index, default="ok")


def examine(path: Path, clock: Clock, only: Iterable[str] | None = None) -> list[Check]:
    """All checks, or those of `only`, in a fixed order. `only` makes a missing coordinator or worker a failure."""
    examination = _Examination(Path(os.path.realpath(path)), clock, strict=only is not None)
    try:
        return examination.run(None if only is None else frozenset(only))
    finally:
        examination.close()


class _Examination:
    def __init__(self, path: Path, clock: Clock, *, strict: bool) -> None:
        self._path = path
        self._clock = clock
        self._strict = strict
        self._database: Database | None = None
        self._facts: Facts | None = None

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def run(self, only: frozenset[str] | None) -> list[Check]:
        place: list[tuple[str, Callable[[], Check]]] = [
            ("filesystem", self._filesystem),
            ("permissions", self._permissions),
            ("disk_space", self._disk_space),
            ("sync", self._sync),
            ("sqlite", self._sqlite),
            ("database", self._open),
        ]
        inside: list[tuple[str, Callable[[Facts, Database], Check]]] = [
            ("gate", self._gate),
            ("wal", self._wal),
            ("clock", self._wall_clock),
            ("processes", self._processes),
            ("orphans", self._orphans),
            ("coordinator", self._coordinator),
            ("workers", self._workers),
            ("artifacts", self._artifacts),
            ("attention", self._attention),
        ]
        found = [self._guarded(name, look) for name, look in place if only is None or name in only]
        facts, database = self._facts, self._database
        for name, question in inside:
            if only is not None and name not in only:
                continue
            if facts is None or database is None:
                if self._strict:
                    found.append(Check(name, "fail", "not known: the database cannot be read"))
                continue
            found.append(self._guarded(name, lambda q=question: q(facts, database)))  # type: ignore[misc]
        return found

    @staticmethod
    def _guarded(name: str, look: Callable[[], Check]) -> Check:
        try:
            return look()
        except AgentctlError as error:
            return Check(name, "fail", error.message, error.remedy)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            return Check(name, "fail", f"{place}{error.strerror}")

    # -- the place -------------------------------------------------------------------------------------------------

    def _filesystem(self) -> Check:
        filesystem.require_local(self._path)
        kind = filesystem.filesystem_type(self._path)
        if kind in ("tmpfs", "ramfs"):
            return Check(
                "filesystem",
                "warn",
                f"{self._path} is on {kind}, in memory: a restart of the machine takes it away",
                "put the database on a disk with --db PATH or AGENTCTL_DB",
            )
        return Check("filesystem", "ok", f"{kind}, local")

    def _permissions(self) -> Check:
        folder = self._path.parent
        self._require_file()
        if not folder.is_dir():
            self._require_room()
            return Check("permissions", "ok", f"{folder} does not exist yet")
        if self._path.exists():
            filesystem.require_writable(self._path)
        open_to: list[str] = []
        strange: list[str] = []
        for place in (folder, *(Path(f"{self._path}{end}") for end in ("", "-wal", "-shm", ".gate", ".gate-line"))):
            try:
                status = place.stat()
            except FileNotFoundError:
                continue
            if stat.S_IMODE(status.st_mode) & 0o077 and place != folder:
                open_to.append(f"{place.name} ({stat.S_IMODE(status.st_mode):04o})")
            if status.st_uid != os.geteuid():
                strange.append(f"{place} belongs to user {status.st_uid}")
        if strange:
            return Check(
                "permissions",
                "warn",
                f"this is user {os.geteuid()}, but {', '.join(strange[:SHOWN])}",
                "let one user run everything that works on a database",
            )
        if open_to:
            return Check(
                "permissions",
                "warn",
                f"others may read or write {', '.join(open_to)}; inputs and outputs of runs are in there",
                f"chmod go-rwx {folder}/*",
            )
        return Check("permissions", "ok", f"only user {os.geteuid()} can read and write the database")

    def _disk_space(self) -> Check:
        found = os.statvfs(filesystem.nearest_existing(self._path.parent))
        free = found.f_bavail * found.f_frsize
        message = f"{_size(free)} free"
        remedy = "free some space; `agentctl gc` removes old runs"
        if free < DISK_FAIL_BYTES:
            return Check("disk_space", "fail", message, remedy)
        if found.f_files and found.f_favail < found.f_files / 100:
            return Check("disk_space", "warn", f"{message}, but only {found.f_favail} inodes", remedy)
        return Check(
            "disk_space",
            "warn" if free < DISK_WARN_BYTES else "ok",
            message,
            remedy if free < DISK_WARN_BYTES else None,
        )

    def _sync(self) -> Check:
        folder = self._path.parent
        if not folder.is_dir():
            return Check("sync", "ok", "not measured: the folder does not exist yet")
        descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            spent = []
            for number in range(SYNC_ROUNDS):
                os.pwrite(descriptor, bytes(4096), number * 4096)
                begun = self._clock.monotonic()
                os.fdatasync(descriptor)
                spent.append((self._clock.monotonic() - begun) * 1000)
        finally:
            os.close(descriptor)
        median = sorted(spent)[len(spent) // 2]
        message = f"a sync takes {median:.2f} ms (worst of {SYNC_ROUNDS}: {max(spent):.1f} ms)"
        if median >= SYNC_WARN_MS:
            status = "fail" if median >= SYNC_FAIL_MS else "warn"
            return Check(
                "sync",
                status,
                message,
                "every task waits for about one: a faster disk helps more than workers",
            )
        return Check("sync", "ok", message)

    def _sqlite(self) -> Check:
        version = apsw.sqlite_lib_version()
        if tuple(int(part) for part in version.split(".")[:3]) < SQLITE_LEAST:
            return Check(
                "sqlite",
                "fail",
                f"SQLite {version} can damage a database in WAL mode; {'.'.join(map(str, SQLITE_LEAST))} is needed",
                "install a newer apsw: pip install -U apsw",
            )
        missing = [name for name in ("OMIT_JSON", "OMIT_WAL", "THREADSAFE=0") if name in apsw.compile_options]
        if missing:
            return Check(
                "sqlite", "fail", f"SQLite {version} was built with {', '.join(missing)}", "pip install -U apsw"
            )
        return Check("sqlite", "ok", f"SQLite {version} (apsw {apsw.apsw_version()})")

    def _open(self) -> Check:
        """Opens nothing that it would have to make or to change."""
        self._require_file()
        if not self._path.exists():
            # Nobody can make one where it could not be.
            filesystem.require_local(self._path)
            self._require_room()
        if not self._path.exists() or (self._path.is_file() and self._path.stat().st_size == 0):
            return Check(
                "database",
                "fail" if self._strict else "warn",
                f"there is no database at {self._path} yet",
                "`agentctl run FILE` or `agentctl workers start` makes one; another place is given with --db PATH",
            )
        version = migrate.version_of(self._path)
        migrate.refuse_newer(version, self._path)
        if 0 < version < migrate.LATEST:
            return Check(
                "database",
                "fail" if self._strict else "warn",
                f"schema {version}; this agentctl works with {migrate.LATEST} and migrates it when it is used next",
                "take a copy first (end everybody who uses it), then `agentctl db migrate`",
            )
        self._database = Database(self._path, self._clock)
        self._facts = gather(self._database)
        runs = ", ".join(f"{number} {state}" for state, number in sorted(self._facts.runs.items())) or "none"
        return Check("database", "ok", f"schema {version}; runs: {runs}")

    def _require_file(self) -> None:
        if self._path.exists() and not self._path.is_file():
            raise EnvironmentFault(f"{self._path} is not a file", remedy="choose another place with --db PATH")

    def _require_room(self) -> None:
        existing = filesystem.nearest_existing(self._path.parent)
        if not existing.is_dir():
            raise EnvironmentFault(f"{existing} is not a folder", remedy="choose another place with --db PATH")
        filesystem.require_writable(existing / self._path.name)

    # -- the store -------------------------------------------------------------------------------------------------

    def _gate(self, facts: Facts, database: Database) -> Check:
        """Whether writers get their turn: the gate can be had, or at least changes hands, and then SQLite's lock."""
        gate = database.gate.path
        descriptor = os.open(gate, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            holders: set[int | None] = set()
            foreign, waited = False, 0.0
            while waited < GATE_SECONDS:
                try:
                    if _writer_may_begin(descriptor, database):
                        break
                    foreign = True
                except BlockingIOError:
                    holders.add(flock_holder(os.fstat(descriptor)))
                self._clock.sleep(GATE_POLL_SECONDS)
                waited += GATE_POLL_SECONDS
            else:
                known = {row.pid: row for row in facts.processes if row.stopped_at is None}
                if foreign or len(holders) == 1:
                    return self._stuck(next(iter(holders), None), known, database, foreign=foreign)
        finally:
            os.close(descriptor)
        return Check("gate", "ok", "writers get their turn")

    def _stuck(self, pid: int | None, known: dict[int, ProcessRow], database: Database, *, foreign: bool) -> Check:
        strangers = [other for other in wal_use(database).written_by if other not in known]
        if strangers or foreign:
            found = process_identity.read_stat(strangers[0]) if strangers else None
            name = f" ({found.name})" if found is not None else ""
            who = f"pid {strangers[0]}{name}, which is no agentctl process," if strangers else "another program"
            return Check(
                "gate",
                "warn",
                f"{who} has locked the database for {GATE_SECONDS:g} s",
                "end that program, or wait for it: nothing is lost meanwhile",
            )
        who = "somebody" if pid is None else f"pid {pid}"
        return Check(
            "gate",
            "fail",
            f"{who} has held the write gate for {GATE_SECONDS:g} s",
            "one of ours that is stopped is ended after five seconds by whoever waits; see whether the disk hangs",
        )

    def _wal(self, facts: Facts, database: Database) -> Check:
        path = Path(f"{self._path}-wal")
        size = path.stat().st_size if path.exists() else 0
        use = wal_use(database)
        ours = {row.pid: row for row in facts.processes if row.stopped_at is None}
        others = [pid for pid in use.open_by if pid != os.getpid()]
        message = f"{_size(size)}, open in {_count(len(others), 'process')}"
        strangers = [pid for pid in others if pid not in ours]
        if size > WAL_WARN_BYTES:
            readers = [_who(pid, ours) for pid in use.read_by if pid != os.getpid()]
            blame = f"; read by {', '.join(readers[:SHOWN])}" if readers else ""
            return Check(
                "wal",
                "warn",
                message + blame,
                "a reader that keeps a snapshot open keeps the log from shrinking: end it",
            )
        # Short-lived commands (`watch`, another doctor) are none of ours in the table; they are only told.
        if strangers:
            message += f" ({', '.join(_who(pid, ours) for pid in strangers[:SHOWN])} not in the process table)"
        return Check("wal", "ok", message)

    def _wall_clock(self, facts: Facts, database: Database) -> Check:
        now = self._clock.now()
        if now < YEAR_2025_MS:
            return Check("clock", "fail", "the clock of this machine is years behind", "set the clock; use NTP")
        ahead = facts.newest_at - now
        if ahead > CLOCK_WARN_MS:
            return Check(
                "clock",
                "warn",
                f"the clock was set back: something was recorded {ahead / 60_000:.0f} minutes in the future",
                "leases count real time and do not suffer; deadlines, retries and retention count wall time: use NTP",
            )
        return Check("clock", "ok", "nothing recorded lies in the future")

    def _processes(self, facts: Facts, database: Database) -> Check:
        """Rows that say more than is true: of processes that died without a word and that nobody has settled yet, or
        that live and are stopped."""
        dead = {row.process_id for row in facts.processes if row.stopped_at is None and liveness(row) is Liveness.DEAD}
        known = {row.process_id for row in facts.processes}
        gone = dead | {claim.holder for claim in facts.claims if claim.holder not in known}
        claims = sum(1 for claim in facts.claims if claim.holder in gone)
        runs = [run for run, driver in facts.drivers.items() if driver is not None and driver in dead]
        if not gone:
            live = [row for row in facts.processes if row.stopped_at is None]
            if still := [row for row in live if process_identity.is_stopped(row.identity)]:
                shown = ", ".join(f"{row.kind} {row.name} (pid {row.pid})" for row in still[:SHOWN])
                return Check(
                    "processes",
                    "warn",
                    f"{_count(len(still), 'process')} stopped, as by Ctrl-Z: {shown}",
                    f"let it go on: `fg` in its shell, or `kill -CONT {still[0].pid}`",
                )
            alive = len(live)
            return Check("processes", "ok", f"{_count(alive, 'process')} recorded as alive, and so they are")
        held = f", with {_count(claims, 'claimed attempt')}" if claims else ""
        driven = f", driving {_count(len(runs), 'run')}" if runs else ""
        return Check(
            "processes",
            "warn",
            f"{_count(len(gone), 'process')} died without a word{held}{driven}",
            "any coordinator or pool on this database settles that at once: `agentctl coordinator start`",
        )

    def _orphans(self, facts: Facts, database: Database) -> Check:
        ended = [row.process_id for row in facts.processes if row.kind == "worker" and liveness(row) is Liveness.DEAD]
        pids = process_identity.find_marked(ended, HOLDER_MARKER) if ended else []
        if pids:
            shown = ", ".join(map(str, pids[:SHOWN]))
            return Check(
                "orphans",
                "fail",
                f"{_count(len(pids), 'process')} of commands live on though their worker is dead: {shown}",
                "start a coordinator or a pool, which ends them before it goes on; or end them by hand",
            )
        return Check("orphans", "ok", "no command outlives its worker")

    def _coordinator(self, facts: Facts, database: Database) -> Check:
        live = [row for row in self._alive(facts, "coordinator") if not self._silent(row)]
        known = {row.process_id: row for row in facts.processes}
        # A driver that died without a word, or is silent, drives nothing, whatever the run says.
        waiting = [
            run
            for run, driver in facts.drivers.items()
            if driver is None or driver not in known or not _lives(known[driver]) or self._silent(known[driver])
        ]
        if live:
            return Check("coordinator", "ok", ", ".join(f"{row.name} (pid {row.pid})" for row in live[:SHOWN]))
        silent = self._alive(facts, "coordinator")
        remedy = "`agentctl workers start`, `agentctl coordinator start`, or the units: `agentctl workers install`"
        if silent:
            pids = ", ".join(str(row.pid) for row in silent[:SHOWN])
            return Check("coordinator", "fail", f"silent for longer than lease and grace: pid {pids}", remedy)
        open_runs = facts.runs.get("running", 0)
        if self._strict or (open_runs and waiting):
            status = "fail" if self._strict else "warn"
            return Check("coordinator", status, f"none is live; {_count(open_runs, 'run')} not ended", remedy)
        return Check("coordinator", "ok", "none is live, and no run needs one")

    def _workers(self, facts: Facts, database: Database) -> Check:
        live = self._alive(facts, "worker")
        silent = [row for row in live if self._silent(row)]
        old = sorted({row.version for row in facts.processes if liveness(row) is not Liveness.DEAD} - {VERSION})
        ready = facts.queue.get("ready", 0)
        if silent:
            pids = ", ".join(str(row.pid) for row in silent[:SHOWN])
            return Check(
                "workers",
                "fail",
                f"silent for longer than lease and grace: pid {pids}",
                "they are ended and replaced soon",
            )
        if old:
            return Check(
                "workers",
                "warn",
                f"processes of version {', '.join(old)} work here, this is {VERSION}",
                "restart the pool",
            )
        names = {row.process_id for row in live}
        left = sum(1 for claim in facts.claims if claim.holder not in names)
        serving = [row for row in live if row.only_run is None and not row.drains]
        held = f"; {_count(left, 'attempt')} held by workers that are gone" if left else ""
        if not serving and (self._strict or ready or left):
            status = "fail" if self._strict else "warn"
            waits = (f"; {_count(ready, 'attempt')} wait" if ready else "") + held
            return Check("workers", status, f"no worker of a pool is live{waits}", "`agentctl workers start`")
        busy = len(facts.claims) - left
        message = f"{_count(len(live), 'worker')} alive, {busy} busy, {ready} waiting attempts{held}"
        return Check("workers", "ok", message)

    def _artifacts(self, facts: Facts, database: Database) -> Check:
        artifacts = Artifacts(database, self._clock)
        artifacts.blobs.require_writable()
        left = len(artifacts.blobs.temporary())
        return Check("artifacts", "ok", "can be stored" + (f"; {left} being written or left behind" if left else ""))

    def _attention(self, facts: Facts, database: Database) -> Check:
        wait = []
        if facts.problems:
            run_id, problem = next(iter(facts.problems.items()))
            one = f"{run_id} ({problem['message']})"
            more = "" if len(facts.problems) == 1 else f" and {len(facts.problems) - 1} more (`agentctl runs list`)"
            wait.append(f"{_count(len(facts.problems), 'run')} that nobody can drive: {one}{more}")
        if facts.uncertain_effects:
            wait.append(f"{_count(facts.uncertain_effects, 'uncertain effect')} (`agentctl effects list --uncertain`)")
        if facts.pending_approvals:
            wait.append(f"{_count(facts.pending_approvals, 'approval')} (`agentctl approvals list`)")
        if not wait:
            return Check("attention", "ok", "nothing waits for a person")
        status = "warn" if facts.uncertain_effects or facts.problems else "ok"
        return Check(
            "attention", status, f"waits for a person: {', '.join(wait)}", "decide them" if status == "warn" else None
        )

    # -- helpers ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _alive(facts: Facts, kind: str) -> list[ProcessRow]:
        return [row for row in facts.processes if row.kind == kind and _lives(row)]

    def _silent(self, row: ProcessRow) -> bool:
        timing = Timing.from_environment()
        return self._clock.now() - row.heartbeat_at > (timing.lease + timing.grace) * 1000


def _writer_may_begin(gate: int, database: Database) -> bool:
    """Take the gate and SQLite's write lock, and give both back at once; False when a program that knows no gate has
    the lock. Raises BlockingIOError when the gate is held. Nobody stops this process in between."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, MASKED)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return database.may_begin()
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lives(row: ProcessRow) -> bool:
    try:
        return row.stopped_at is None and liveness(row) is not Liveness.DEAD
    except CorruptStore:
        return False


def _who(pid: int, known: dict[int, ProcessRow]) -> str:
    row = known.get(pid)
    if row is not None:
        return f"{row.kind} {row.name} (pid {pid})"
    found = process_identity.read_stat(pid)
    return f"{found.name} (pid {pid})" if found is not None else f"pid {pid}"


def _count(number: int, noun: str) -> str:
    many = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else many}"


def _size(number: int) -> str:
    amount = float(number)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
