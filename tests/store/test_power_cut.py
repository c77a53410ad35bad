"""The power fails at a random moment: nothing that was promised is lost, nothing is damaged.

A recording VFS (see `support.disk`) sits between SQLite and the disk while drivers and workers use the store. The state
of all tables after each transaction is kept. Then the power is cut at random moments of the record, the files that may
be left are laid out, and the store is opened on them in the ordinary way. What it then shows has to be one of the
states that the store really was in, and none older than the last promise before the cut.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import apsw
import pytest
from agentctl.store.database import SyncFailed
from agentctl.store.engine import Store
from agentctl.store.errors import EnvironmentFault
from agentctl.store.records import Claim, EffectEnd, EffectRequest
from support.builders import Driver, Hand, effect_request, new_run, process_row
from support.clock import ManualClock
from support.disk import Disk, RecordingVFS
from support.rows import check_chains, dump, effect, one, rows, scalar
from support.scale import repeats

CUTS = 500
IDEMPOTENCY = ("pure", "idempotent", "keyed", "at_most_once", "unknown")


@dataclass
class Known:
    """The store after one transaction."""

    moment: int
    """How many happenings of the disk came before."""
    promised: bool
    digest: str
    effects: frozenset[str]
    """Effects that have been started: one of them that vanished could be dispatched twice."""


@dataclass
class Story:
    """A store at work on a recorded disk."""

    store: Store
    disk: Disk
    chance: random.Random
    clock: ManualClock
    history: list[Known] = field(default_factory=list)
    claims: dict[str, tuple[Claim, EffectEnd | None, int]] = field(default_factory=dict)
    drivers: dict[str, Driver] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=dict)
    verbs: set[str] = field(default_factory=set)

    def note(self, verb: str, *, promised: bool) -> None:
        """Keep what the store shows after a verb."""
        moment = len(self.disk.record)
        with self.store.database.read() as tx:
            state = dump(tx)
        started = frozenset(row[1] for row in state["effects"])
        self.history.append(Known(moment, promised, _digest(state), started))
        self.verbs.add(verb)

    def act(self) -> None:
        """One random verb."""
        self.clock.advance(self.chance.random())
        moves: list[Callable[[], None]] = [self._claim, self._claim, self._work, self._work, self._work, self._commit]
        if len(self.drivers) < 6 and self.chance.random() < 0.2:
            self._create()
        elif self.waiting and self.chance.random() < 0.25:
            self._enqueue()
        elif self.chance.random() < 0.05:
            self._die()
        elif self.drivers and self.chance.random() < 0.02:
            self._cancel()
        else:
            self.chance.choice(moves)()

    def _create(self) -> None:
        run_id = f"run-{len(self.drivers) + 1}"
        tasks = self.chance.choice([3, 12, 60])
        self.store.create_run(new_run(run_id, tasks, memory={"k": '"v"'}, budget_limits={"turns": 40}))
        self.note("create_run", promised=True)
        self.drivers[run_id] = Driver(self.store, run_id)
        self.note("take_run", promised=True)
        self.waiting[run_id] = list(range(tasks))

    def _enqueue(self) -> None:
        run_id = self.chance.choice(sorted(self.waiting))
        count = self.chance.randint(1, 8)
        positions, self.waiting[run_id] = self.waiting[run_id][:count], self.waiting[run_id][count:]
        if not self.waiting[run_id]:
            del self.waiting[run_id]
        self.drivers[run_id].enqueue(positions)
        self.note("commit_batch", promised=True)

    def _claim(self) -> None:
        free = [name for name in ("w1", "w2", "w3") if name not in self.claims]
        if free:
            claim = Hand(self.store, free[0]).claim()
            if claim is not None:
                self.claims[free[0]] = (claim, None, 0)
            self.note("claim", promised=False)

    def _work(self) -> None:
        if not self.claims:
            return
        name = self.chance.choice(sorted(self.claims))
        claim, previous, ordinal = self.claims.pop(name)
        hand = Hand(self.store, name)
        if ordinal < 2 and (ordinal == 0 or self.chance.random() < 0.3):
            request = effect_request(
                claim, ordinal=ordinal + 1, idempotency=self.chance.choice(IDEMPOTENCY), estimate={"turns": 1}
            )
            request = _as_recorded(self.store, request)
            answer = hand.start(claim, request, previous)
            self.note("start_effect", promised=True)
            dispatch = getattr(answer, "dispatch", None)
            if dispatch is not None:
                end = EffectEnd(
                    request.effect_id, "succeeded", result_json='"r"' * 50, dispatch=dispatch, usage={"turns": 1}
                )
                self.claims[name] = (claim, end, ordinal + 1)
                return
            previous = None
        if self.chance.random() < 0.1:
            if previous is not None and self.chance.random() < 0.5:
                previous = EffectEnd(previous.effect_id, "requested", dispatch=previous.dispatch)
            self.store.release(claim, effect=previous, reason="drain")
            self.note("release", promised=True)
            return
        follows = self.chance.random() < 0.7
        following = hand.finish(claim, effect=previous, next_claim=follows, result=None if previous else '"none"')
        self.note("finish", promised=not follows)
        if following is not None:
            self.claims[name] = (following, None, 0)

    def _commit(self) -> None:
        for driver in self.drivers.values():
            if driver.commit():
                self.note("commit_batch", promised=True)

    def _die(self) -> None:
        if self.claims:
            name = self.chance.choice(sorted(self.claims))
            claim, _, _ = self.claims.pop(name)
            self.store.rescue(
                [(claim.fence.attempt_id, claim.fence.delivery)], dead=[name], why="the test says so", actor="rescuer"
            )
            self.note("rescue", promised=True)

    def _cancel(self) -> None:
        run_id = self.chance.choice(sorted(self.drivers))
        self.store.request_cancel(run_id, reason="a change of mind", actor="cli-user")
        self.note("request_cancel", promised=True)


def _as_recorded(store: Store, request: EffectRequest) -> EffectRequest:
    """A second delivery asks for the same effect with the same contract."""
    found = rows(store, "SELECT idempotency FROM effects WHERE effect_id = ?", request.effect_id)
    return replace(request, idempotency=found[0][0]) if found else request


def _digest(state: object) -> str:
    return sha256(repr(state).encode()).hexdigest()


@contextmanager
def recorded(folder: Path) -> Iterator[Disk]:
    """A recorded disk; SQLite knows it by the name `recorded` meanwhile."""
    disk = Disk(folder / "agentctl.db")
    vfs = RecordingVFS("recorded", disk)
    try:
        yield disk
    finally:
        vfs.unregister()


def tell(disk: Disk, seed: int, sync: Callable[[], None], *, actions: int = 150) -> Story:
    """Let a store live through `actions` random verbs on the recorded disk."""
    clock = ManualClock()
    # A small cache spills uncommitted pages into the WAL; a small limit makes checkpoints come often.
    store = Store(disk.path, clock, create=True, vfs="recorded", sync=sync, cache_kib=48)
    story = Story(store, disk, random.Random(seed), clock)
    try:
        store.database.checkpoint_pages = 40
        story.note("open", promised=False)
        for name in ("w1", "w2", "w3"):
            store.register(process_row(name, state="busy"))
            story.note("register", promised=False)
        story._create()
        for _ in range(actions):
            story.act()
    finally:
        store.close()
    return story


def find_after_cut(story: Story, seed: int, folder: Path) -> str | None:
    """Cut the power once; what is wrong with what is found then, or None."""
    chance = random.Random(seed)
    moment = chance.randint(1, len(story.disk.record))
    folder.mkdir(parents=True)
    for name, content in story.disk.after_cut(moment, chance).items():
        (folder / Path(name).name).write_bytes(content)
    promised = max(
        (i for i, known in enumerate(story.history) if known.promised and known.moment <= moment), default=-1
    )
    store = Store(folder / "agentctl.db", ManualClock(), create=True)
    try:
        if scalar(store, "PRAGMA integrity_check") != "ok":
            return "the file is damaged"
        check_chains(store)
        with store.database.read() as tx:
            state = dump(tx)
        if promised < 0:
            return None
        digest = _digest(state)
        started = {row[1] for row in state["effects"]}
        lost = story.history[promised].effects - started
        if lost:
            return f"the start of {sorted(lost)} is gone: it could be dispatched twice"
        if all(known.digest != digest for known in story.history[promised:]):
            older = any(known.digest == digest for known in story.history[:promised])
            return "an older state than promised" if older else "a state in which the store never was"
        # And life goes on: what the dead held is settled, and the next run begins.
        claims = [(claim[0], claim[1]) for claim in store.claims()]
        store.rescue(claims, dead=[], why="power cut", actor="rescuer")
        store.create_run(new_run("run-after"))
        check_chains(store)
        return None
    finally:
        store.close()


def test_a_power_cut_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    cuts = repeats(CUTS, at_least=50)
    per_story = 50
    done = 0
    verbs: set[str] = set()
    for seed in range(-(-cuts // per_story)):
        with recorded(tmp_path / f"live-{seed}") as disk:
            story = tell(disk, seed, disk.fdatasync_of_wal)
        assert _checkpoints(disk) > 3, "the story is too short to meet a checkpoint"
        verbs |= story.verbs
        for cut in range(per_story):
            problem = find_after_cut(story, seed * 1000 + cut, tmp_path / f"cut-{seed}-{cut}")
            assert problem is None, f"story {seed}, cut {cut}: {problem}"
            done += 1
    assert done >= cuts
    assert {"create_run", "start_effect", "commit_batch", "rescue", "claim", "finish"} <= verbs


def _checkpoints(disk: Disk) -> int:
    """How often the database itself, not its WAL, was synced after it had been made."""
    database = {event.inode for event in disk.record if event.kind == "create" and event.name == str(disk.path)}
    return sum(event.kind == "sync" and event.inode in database for event in disk.record)


def test_the_same_cuts_without_the_sync_do_lose_promises(tmp_path: Path) -> None:
    """The test above can fail: commits alone, without the store's own sync, do not survive."""
    with recorded(tmp_path / "live") as disk:
        story = tell(disk, 1, lambda: None)
    problems = [find_after_cut(story, cut, tmp_path / f"cut-{cut}") for cut in range(40)]
    assert [problem for problem in problems if problem], "the simulated disk loses nothing"
    assert not [p for p in problems if p and ("damaged" in p or "never was" in p)], "it may lose, but never damage"


# -- disks that refuse -------------------------------------------------------------------------------------------------


def test_a_failed_sync_is_no_promise_and_neither_is_the_next_one(tmp_path: Path) -> None:
    """The kernel reports a lost write once. A second sync that succeeds says nothing about the first."""
    broken: list[bool] = []

    def sync() -> None:
        if broken and broken.pop():
            raise OSError(errno.EIO, "Input/output error")

    store = Store(tmp_path / "agentctl.db", ManualClock(), create=True, sync=sync)
    store.create_run(new_run())
    driver = Driver(store, "run-1")
    driver.enqueue([0, 1])
    hand = Hand(store)
    claim = hand.take()
    broken.append(True)
    with pytest.raises(SyncFailed):
        hand.start(claim, effect_request(claim))
    with pytest.raises(SyncFailed):
        hand.finish(claim)
    with pytest.raises(SyncFailed):
        store.create_run(new_run("run-2"))
    store.close()


def test_a_sync_that_fails_inside_a_checkpoint_is_not_swallowed(tmp_path: Path) -> None:
    """SQLite ignores errors of its automatic checkpoint; the kernel reports them to nobody a second time."""
    with recorded(tmp_path / "live") as disk:
        store = Store(disk.path, ManualClock(), create=True, vfs="recorded", sync=disk.fdatasync_of_wal)
        store.create_run(new_run())
        store.database.checkpoint_pages = 1

        def fail_once(name: str) -> None:
            if name.endswith("-wal"):
                disk.on_sync = None
                error = apsw.IOError("the disk lost a write")
                error.extendedresult = apsw.SQLITE_IOERR_FSYNC
                raise error

        disk.on_sync = fail_once
        with pytest.raises(SyncFailed):
            store.create_run(new_run("run-2"))
        assert disk.on_sync is None, "no checkpoint was made"
        with pytest.raises(SyncFailed):
            store.request_cancel("run-1", reason="late", actor="cli-user")
        store.close()


def test_a_commit_that_syncs_itself_and_fails_is_a_failed_sync(tmp_path: Path) -> None:
    """Where the WAL's descriptor cannot be found commits are synchronous, and their failure is the same failure."""
    with recorded(tmp_path / "live") as disk:
        store = Store(disk.path, ManualClock(), create=True, vfs="recorded", sync=disk.fdatasync_of_wal)
        store.create_run(new_run())
        store.database.connection.execute("PRAGMA synchronous = FULL")

        def fail(name: str) -> None:
            error = apsw.IOError("the disk lost a write")
            error.extendedresult = apsw.SQLITE_IOERR_FSYNC
            raise error

        disk.on_sync = fail
        with pytest.raises(SyncFailed):
            store.create_run(new_run("run-2"))
        disk.on_sync = None
        assert rows(store, "SELECT run_id FROM runs") == [("run-1",)]
        store.close()


@pytest.mark.parametrize("fits", [0, 1, 512, 700, 4000])
def test_a_full_disk_is_told_changes_nothing_and_passes(tmp_path: Path, fits: int) -> None:
    with recorded(tmp_path / "live") as disk:
        store = Store(disk.path, ManualClock(), create=True, vfs="recorded", sync=disk.fdatasync_of_wal)
        store.create_run(new_run())
        driver = Driver(store, "run-1")
        driver.enqueue([0, 1, 2])
        hand = Hand(store)
        claim = hand.take()
        with store.database.read() as tx:
            before = dump(tx)
        disk.on_write = lambda name, data: min(fits, len(data) - 1) if name.endswith("-wal") else None
        with pytest.raises(EnvironmentFault, match="full"):
            hand.start(claim, effect_request(claim))
        with pytest.raises(EnvironmentFault, match="full"):
            store.create_run(new_run("run-2"))
        disk.on_write = None
        with store.database.read() as tx:
            assert dump(tx) == before
        hand.start(claim, effect_request(claim))
        assert effect(store, effect_request(claim).effect_id)["status"] == "started"
        assert one(store, "PRAGMA integrity_check") == ("ok",)
        check_chains(store)
        store.close()


def test_a_disk_that_is_full_at_a_checkpoint_delays_the_checkpoint_only(tmp_path: Path) -> None:
    with recorded(tmp_path / "live") as disk:
        store = Store(disk.path, ManualClock(), create=True, vfs="recorded", sync=disk.fdatasync_of_wal)
        store.database.checkpoint_pages = 1
        refused: list[str] = []

        def full(name: str, data: bytes) -> int | None:
            if name.endswith("-wal"):
                return None
            refused.append(name)
            return 0

        disk.on_write = full
        for number in range(5):
            store.create_run(new_run(f"run-{number}"))
        assert refused, "no checkpoint was tried"
        disk.on_write = None
        store.create_run(new_run("run-last"))
        assert scalar(store, "SELECT COUNT(*) FROM runs") == 6
        assert one(store, "PRAGMA integrity_check") == ("ok",)
        store.close()
