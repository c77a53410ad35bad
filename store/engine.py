"""All verbs of the store: each method is one transaction that may be run again, and shows no handle (architecture 9).

Reading order: `database` (transactions), `runs`, `task_queue`, `effects`, `ledger`, `commits`, `audit`, `processes`,
`views`, `artifacts`. A method that promises something returns only when it is on the disk; the others say so.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import (
    approvals,
    asides,
    audit,
    commits,
    compensations,
    conversations,
    effects,
    holds,
    ledger,
    long_term,
    process_identity,
    processes,
    protocols,
    reconciliations,
    runs,
    task_queue,
)
from .artifacts import Artifacts
from .blobs import never
from .board import Board
from .canonical import canonical, loads
from .clock import Clock
from .database import Connection, Database
from .embedding import Embedder, terms_of
from .errors import AgentctlError, IncompatibleVersion, NotFoundError, UsageError
from .memory_entries import Search, searchable_text
from .records import (
    AttemptEnd,
    AttemptHeld,
    Batch,
    Candidate,
    Claim,
    EffectEnd,
    EffectRequest,
    Event,
    Fence,
    FinishedAttempt,
    Following,
    HeldAttempt,
    HeldClaim,
    LiveAttempt,
    MemoryWrite,
    NewReconciliation,
    NewRun,
    NextRun,
    ProcessRow,
    ProtocolNote,
    RecordedEffect,
    RecordedStep,
    Run,
    RunDocuments,
    StartedEffect,
    StartRefused,
    TaskRow,
)
from .states import LEAVES_NO_TRACE
from .wakeups import WakeFolder

if TYPE_CHECKING:
    from .derived_runs import DoneElsewhere, ReusedTask, SourceHead, SourceRun
    from .faults import Faults

log = logging.getLogger(__name__)

BATCH_RESULTS = 256
BATCH_BYTES = 8 * 1024 * 1024
REINDEX_ENTRIES = 16
"""Entries of at most 1 MiB each that a reindex holds at a time."""
COLLECT_ENTRIES = 256
CROWDED_RATE = 600.0
"""Results a second of one worker from which its work takes nothing but the processor: another worker on the same
processors would only be in its way."""
EVERYBODY = 1000
"""As many workers as are called where nobody counts how many are needed."""
NOTHING_NEWER_SECONDS = 0.25
"""How long those who look ahead believe that a run which this version could serve is still such a one. Whoever writes
into it with a newer version might have come a moment later as well."""
LONE_SECONDS = 0.02
"""How long a run that was alone is believed to be so by those who look ahead: no other run waits longer for that."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything a driver needs to go on with a run, from one snapshot."""

    run: Run
    tasks: list[TaskRow]
    live: list[LiveAttempt]
    memory: list[tuple[str, int, str | None]]
    held: list[HeldAttempt] = field(default_factory=list)
    exceeded: bool = False


class Store:
    """One connection with all verbs. Each thread opens its own."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        create: bool = False,
        cache_kib: int = 4096,
        vfs: str | None = None,
        sync: Callable[[], None] | None = None,
    ) -> None:
        """Open the store at `path`; errors as for `Database`."""
        self.clock = clock
        self.database = Database(
            path, clock, create=create, cache_kib=cache_kib, end_stuck=self._end_stuck, vfs=vfs, sync=sync
        )
        self.path = self.database.path
        self.wakes = WakeFolder(self.path)
        self.unsynced = False
        """Whether a batch is committed that may not be on the disk yet (see `commit_batch`)."""
        self._board = Board(self.database.gate.line, clock)
        self._processors = len(os.sched_getaffinity(0))
        self._next_run: tuple[NextRun | None, float] = (None, 0.0)
        self._nothing_newer: tuple[str | None, float] = (None, 0.0)
        self.artifacts = Artifacts(self.database, clock)
        try:
            if self.artifacts.blobs.needs_care():
                self.artifacts.recover()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self.wakes.close()
        self.database.close()

    def _end_stuck(self, pid: int) -> str | None:
        """Kill `pid`, which holds the gate without end, if it is one of this database's processes (architecture 6).

        Only one that is stopped: one that runs waits itself, for a program outside the gate or for the disk.
        """
        identity = process_identity.of(pid)
        stat = process_identity.read_stat(pid)
        if identity is None or stat is None:
            return "it is gone"
        other = Database(self.path, self.clock)
        try:
            with other.read() as tx:
                known = {row.identity for row in processes.live(tx)}
        finally:
            other.close()
        if identity.as_text() not in known:
            started = datetime.fromtimestamp(self.clock.now() / 1000 - stat.age_seconds()).isoformat(" ", "seconds")
            return f"it is no agentctl process of this database ({stat.name}, started {started}); end it if it hangs"
        if not stat.stopped:
            return "it runs, and waits for another program that locks the database, or for the disk"
        return None if process_identity.kill(identity, signal.SIGKILL) else f"no permission to end pid {pid}"

    # -- runs ------------------------------------------------------------------------------------------------------

    def create_run(self, new: NewRun) -> tuple[str, bool]:
        """Create a run; (run id, created). Durable when it returns. See `runs.create_run`."""
        # Hashing a large plan takes a while, in which nobody should wait at the gate.
        digests = runs.document_digests(new.workflow_json, new.plan_json, new.inputs_json, new.settings_json)
        with self.database.write(durable=True) as tx:
            return runs.create_run(tx, new, digests, now=self.clock.now())

    def read_source(self, run_id: str) -> SourceRun:
        """What a retry or a repair of a run is planned from, from one snapshot; see `derived_runs.read_source`."""
        from . import derived_runs

        with self.database.read() as tx:
            return derived_runs.read_source(tx, run_id)

    def done_elsewhere(self, run_id: str) -> list[DoneElsewhere]:
        """What runs made from this one have done that must not be repeated; see `derived_runs.done_elsewhere`."""
        from . import derived_runs

        with self.database.read() as tx:
            return derived_runs.done_elsewhere(tx, run_id)

    def read_verified_documents(self, run_id: str) -> tuple[Run, RunDocuments]:
        """A run and its texts, held to its chain; see `derived_runs.read_documents`."""
        from . import derived_runs

        with self.database.read() as tx:
            return derived_runs.read_documents(tx, run_id)

    def create_derived_run(self, new: NewRun, head: SourceHead, reused: Sequence[ReusedTask], faults: Faults) -> None:
        """Create a run with what it takes over from its source (see `derived_runs.create`). Durable.

        The bytes of every artifact that is taken over are read once more: they may have gone since it was planned.
        """
        from . import derived_runs

        self.artifacts.require_sound([task.source.manifest_json for task in reused], of=new.source_run_id)
        digests = runs.document_digests(new.workflow_json, new.plan_json, new.inputs_json, new.settings_json)
        with self.database.write(durable=True) as tx:
            derived_runs.create(tx, new, digests, head, reused, faults, now=self.clock.now())

    def get_run(self, run_id: str) -> Run:
        """The run's row; `NotFoundError`, `IncompatibleVersion`."""
        with self.database.read() as tx:
            return runs.get(tx, run_id)

    def run_head(self, run_id: str) -> tuple[int, int, str | None, str]:
        """(epoch, revision, driver, state) of a run."""
        with self.database.read() as tx:
            return runs.head(tx, run_id)

    def run_documents(self, run_id: str) -> RunDocuments:
        """The immutable texts of a run."""
        with self.database.read() as tx:
            return runs.documents(tx, run_id)

    def run_settings(self, run_id: str) -> tuple[str, str]:
        """(settings_json, base_path) of a run."""
        with self.database.read() as tx:
            return runs.settings(tx, run_id)

    def run_output(self, run_id: str) -> str | None:
        """The output of a run as canonical JSON."""
        with self.database.read() as tx:
            return runs.output(tx, run_id)

    def open_runs(self) -> list[Run]:
        """Runs in state `running`, oldest first."""
        with self.database.read() as tx:
            return runs.open_runs(tx)

    def undriven_runs(self) -> list[str]:
        """Ids of runs in state `running` whose row names no driver."""
        with self.database.read() as tx:
            return runs.undriven(tx)

    def runs_of_a_newer(self) -> dict[str, IncompatibleVersion]:
        """Runs that have not ended and that this version leaves alone, each with what to say of it."""
        with self.database.read() as tx:
            return asides.of_a_newer(tx)

    def note_aside(self, run_id: str, error: AgentctlError, *, by: str) -> None:
        """Keep why the process `by` does not drive a run, for whoever asks about it."""
        with self.database.write() as tx:
            asides.put(tx, run_id, error, by=by, now=self.clock.now())

    def forget_asides(self, by: str) -> None:
        """The process `by` leaves: its reasons count no more."""
        with self.database.write() as tx:
            asides.forget(tx, by)

    def refuse_future_records(self, run_id: str) -> None:
        """Raise `IncompatibleVersion` when anything of a run was written by a newer agentctl."""
        with self.database.read() as tx:
            runs.get(tx, run_id)
            runs.refuse_future_records(tx, run_id)

    def overdue_runs(self) -> list[Run]:
        """Paused runs whose wall time is over."""
        with self.database.read() as tx:
            return runs.overdue_runs(tx, now=self.clock.now())

    def snapshot(self, run_id: str) -> RunSnapshot:
        """The state of a run for its driver, from one snapshot."""
        with self.database.read() as tx:
            run = runs.get(tx, run_id)
            return RunSnapshot(
                run,
                runs.task_rows(tx, run),
                task_queue.live_attempts(tx, run_id, run.first_task, run.task_count),
                runs.memory_rows(tx, run_id),
                holds.held(tx, run_id, run.first_task),
                ledger.exceeded(tx, run_id),
            )

    def task_outputs(self, run: Run, positions: list[int]) -> dict[int, tuple[str | None, str | None]]:
        """(output_json, error_json) by position."""
        with self.database.read() as tx:
            return runs.task_outputs(tx, run, positions)

    def take_run(
        self,
        run_id: str,
        *,
        driver: str,
        epoch: int,
        lease_ms: int,
        resume: bool = False,
        actor: str = "coordinator",
        trace_id: str | None = None,
    ) -> int | None:
        """Become the driver of a run; the new epoch, or None when somebody else was faster. Durable."""
        with self.database.write(durable=True) as tx:
            return runs.take_run(
                tx,
                run_id,
                driver=driver,
                epoch=epoch,
                lease_ms=lease_ms,
                resume=resume,
                actor=actor,
                trace_id=trace_id,
                now=self.clock.now(),
            )

    def leave_run(self, run_id: str, *, driver: str, epoch: int) -> None:
        """Give a run back."""
        with self.database.write() as tx:
            runs.leave_run(tx, run_id, driver=driver, epoch=epoch)

    def request_cancel(self, run_id: str, *, reason: str, actor: str) -> tuple[bool, str]:
        """Set the cancel flag; (requested, state). Durable. No effect of the run starts after it returns."""
        with self.database.write(durable=True) as tx:
            return runs.request_cancel(tx, run_id, reason=reason, actor=actor, now=self.clock.now())

    def request_pause(self, run_id: str, *, reason: str, actor: str) -> tuple[str, str | None]:
        """Ask that a run pause; (state, reason). Durable. No effect of the run starts after it returns."""
        with self.database.write(durable=True) as tx:
            return runs.request_pause(tx, run_id, reason=reason, actor=actor, now=self.clock.now())

    def withdraw_pause(self, run_id: str, *, actor: str) -> bool:
        """Take back the request to pause a run that runs still. Durable."""
        with self.database.write(durable=True) as tx:
            taken = runs.withdraw_pause(tx, run_id, actor=actor, now=self.clock.now())
        if taken:
            self.wake_driver(run_id)
            self.wake_workers(run_id)
        return taken

    def resolve_approval(self, approval_id: str, *, approve: bool, actor: str, reason: str) -> str:
        """Decide an approval (see `approvals.resolve`); the run's id. Durable."""
        return self.resolve_approvals([approval_id], approve=approve, actor=actor, reason=reason)[0]

    def resolve_approvals(self, approval_ids: Sequence[str], *, approve: bool, actor: str, reason: str) -> list[str]:
        """Decide several approvals the same way, all of them or none; the id of the run of each. Durable."""
        with self.database.write(durable=True) as tx:
            now = self.clock.now()
            decided = [
                approvals.resolve(tx, approval_id, approve=approve, actor=actor, reason=reason, now=now)
                for approval_id in approval_ids
            ]
        for driver in dict.fromkeys(driver for _, driver in decided):
            self._wake_those_who_drive(driver)
        return [run_id for run_id, _ in decided]

    def reconcile(self, new: NewReconciliation) -> str:
        """Append a conclusion about an effect (see `reconciliations.reconcile`); the run's id. Durable."""
        with self.database.write(durable=True) as tx:
            now = self.clock.now()
            run_id, driver = reconciliations.reconcile(tx, new, now=now)
            if new.status == "applied":
                compensations.conclude_inverse(tx, new.effect_id, now=now)
        self._wake_those_who_drive(driver)
        return run_id

    def _wake_those_who_drive(self, driver: str | None) -> None:
        if driver is not None:
            self.wakes.wake(driver)
        else:
            self.call_coordinators()

    def call_coordinators(self) -> None:
        """Call whoever adopts runs: there is one that nobody drives, or whose driver has to be watched from now on."""
        for row in self.live_processes("coordinator"):
            self.wakes.wake(row.process_id)

    def stop_signals(self, run_id: str) -> tuple[bool, bool, int | None]:
        """(cancel requested, pause requested, deadline)."""
        with self.database.read() as tx:
            return runs.stop_signals(tx, run_id)

    # -- the driver ------------------------------------------------------------------------------------------------

    def finished_attempts(self, run: Run) -> tuple[list[FinishedAttempt], bool]:
        """Results that wait for their commit, one batch of them, and whether more are there.

        A success whose stored artifacts are gone is a failure (see `Artifacts.checked`).
        """
        with self.database.read() as tx:
            found, more = task_queue.finished(
                tx, run.run_id, run.first_task, limit=BATCH_RESULTS, max_bytes=BATCH_BYTES
            )
        return [done if done.artifacts_json is None else self.artifacts.checked(done) for done in found], more

    def held_attempts(self, run: Run) -> list[HeldAttempt]:
        """Attempts of a run that hold no place, and why."""
        with self.database.read() as tx:
            return holds.held(tx, run.run_id, run.first_task)

    def claimed_positions(self, run: Run) -> set[int]:
        """Tasks of a run that workers hold now."""
        with self.database.read() as tx:
            return task_queue.claimed_positions(tx, run.run_id, run.first_task)

    def commit_batch(
        self,
        run: Run,
        batch: Batch,
        *,
        driver: str,
        epoch: int,
        revision: int,
        rate: float | None = None,
        syncs_later: bool = False,
    ) -> list[tuple[int, str, str]]:
        """Commit one batch (see `commits.commit_batch`), durably, and wake as many workers as it gives work to.

        They are called before the sync: whatever they start is on the disk only together with this commit. Who
        `syncs_later` sees to it before it sleeps (`sync_batch`): a sync now would only be in the way of theirs. The end
        of a run is always on the disk when this returns.

        For brief work no more are up than there are processors, as long as it goes on as fast as it can: `rate` is how
        many results a second have come in lately, or None if nobody can tell yet. Whoever passes one makes sure that
        work at which nobody moves gets all workers (`wake_workers`); see `ops/decisions`, "hands for brief work".
        """
        sleepers: list[str] = []
        with self.database.write(urgent=True) as tx:
            now = self.clock.now()
            stopped = commits.commit_batch(tx, run, batch, driver=driver, epoch=epoch, revision=revision, now=now)
            wanted = len(batch.enqueues) + len(batch.unheld)
            if batch.brief:
                hands = task_queue.brisk(tx, now=now)
                if rate is None or rate >= CROWDED_RATE * min(hands, self._processors):
                    wanted -= max(0, batch.brief - max(0, self._processors - hands))
            if wanted:
                sleepers = processes.idle_workers(tx, wanted, for_run=run.run_id)
        for sleeper in sleepers:
            self.wakes.wake(sleeper)
        self.unsynced = syncs_later and bool(sleepers) and batch.run_state is None
        if not self.unsynced:
            self.database.sync()
        return stopped

    def sync_batch(self) -> None:
        """Make durable what `commit_batch` has committed without. Raises `SyncFailed`, once for each such batch."""
        if self.unsynced:
            # First of all: who is told that it failed ends his workers, and waits for them meanwhile.
            self.unsynced = False
            self.database.sync()

    def enough_hands(self) -> bool:
        """Whether for brief work nobody needs to get up: as many workers as there are processors come and go."""
        with self.database.read() as tx:
            return task_queue.brisk(tx, now=self.clock.now()) >= self._processors

    def wake_workers(self, run_id: str, limit: int = EVERYBODY) -> None:
        """Call idle workers: there may be work of this run."""
        with self.database.read() as tx:
            sleepers = processes.idle_workers(tx, limit, for_run=run_id)
        for sleeper in sleepers:
            self.wakes.wake(sleeper)

    def announce_work(self, run_id: str) -> None:
        """Let one idle worker get up: there will be work of this run in a moment, for which workers are then called."""
        with self.database.read() as tx:
            sleepers = processes.idle_workers(tx, 1, for_run=run_id)
        for sleeper in sleepers:
            self.wakes.announce(sleeper, run_id)

    def wake_everybody(self) -> None:
        """Call every live process: something that all have to see (a cancel) has happened."""
        with self.database.read() as tx:
            rows = processes.live(tx)
        for row in rows:
            self.wakes.wake(row.process_id)

    def wake_driver(self, run_id: str) -> None:
        """Call whoever drives a run."""
        with self.database.read() as tx:
            driver = runs.get(tx, run_id).driver
        if driver is not None:
            self.wakes.wake(driver)

    def stay_up(self, driver: str, up: bool) -> None:
        """Tell the workers whether a driver will look once more before it sleeps (see `Board.stay_up`)."""
        if up:
            self._board.stay_up(driver)
        else:
            self._board.lie_down(driver)

    def wake_unless_up(self, driver: str) -> None:
        """Call a driver because of what was committed before, unless it is up and will see it by itself."""
        if not self._board.is_up(driver):
            self.wakes.wake(driver)

    # -- workers ---------------------------------------------------------------------------------------------------

    def has_ready(self, only_run: str | None) -> bool:
        """Whether a claim would find something; takes no lock."""
        with self.database.read() as tx:
            return task_queue.has_ready(tx, only_run)

    def claim(
        self,
        holder: str,
        *,
        only_run: str | None,
        lease_ms: int,
        awake: bool,
        ahead: tuple[Candidate, EffectRequest] | None = None,
    ) -> Following | None:
        """Claim the next attempt, or None; `ahead` as for `finish`. A claim is not durable, the start of its effect is.

        With `awake` the worker was idle, and its row says so no longer when it has got something.
        """
        now = self.clock.now()
        with self.database.write() as tx:
            following = self._follow(tx, holder, only_run, lease_ms, now, None, [], ahead)
            if awake and following is not None:
                processes.set_state(tx, holder, "busy", now=now)
        if ahead is not None and following is not None and following.answer is not None:
            self._sync_start(ahead[1])
            if isinstance(following.answer, AttemptHeld):
                self.wake_driver(following.claim.run_id)
        return following

    def start_effect(
        self, fence: Fence, request: EffectRequest, *, previous: EffectEnd | None, task_id: str
    ) -> StartedEffect | RecordedEffect | StartRefused | AttemptHeld:
        """Record the end of the previous effect and start the next one, in one transaction; dispatch may follow.

        Durable when it returns, but for a start that a power cut may undo without harm: its class leaves no trace in
        the outside world, it reserves nothing, and no earlier effect ends with it (`ops/decisions`, "starts without
        sync").
        Raises `LeaseLost`, `ConflictError` (see `effects.start`) and `SyncFailed`, after which nothing is dispatched.
        """
        now = self.clock.now()
        harmless = previous is None and _leaves_no_trace(request)
        with self.database.write(durable=not harmless) as tx:
            answer, run_id, events = effects.start(tx, fence, request, previous=previous, now=now)
            driver = audit.append(tx, run_id, events, actor=fence.holder, now=now)
        if isinstance(answer, AttemptHeld) and driver is not None:
            self.wakes.wake(driver)
        return answer

    def tell_protocol(self, fence: Fence, effect_id: str, note: ProtocolNote) -> None:
        """Write down what an effect knows of its remote side, before it goes on (see `protocols.tell`). Durable.

        Raises `LeaseLost` when the delivery is over, and `SyncFailed`: then nothing more may be sent.
        """
        now = self.clock.now()
        with self.database.write(durable=True) as tx:
            run_id, events = protocols.tell(tx, fence, effect_id, note, now=now)
            audit.append(tx, run_id, events, actor=fence.holder, now=now)

    def protocol_call(self, effect_id: str) -> dict[str, Any] | None:
        """What is known of the remote side of an effect, or None (see `protocols.call`)."""
        with self.database.read() as tx:
            return protocols.call(tx, effect_id)

    def peek(self, only_run: str | None) -> Candidate | None:
        """What a claim would probably take, besides what others prepare for; takes no lock and promises nothing.

        The others are told, so that they prepare for something else.
        """
        taken = self._board.others()
        candidate = self._peek(self._lone_run(only_run), taken)
        if candidate is None:
            found = self._likely_run(only_run)
            self._next_run = (found, self.clock.monotonic())
            candidate = self._peek(found, taken)
        if candidate is not None:
            self._board.announce(candidate.attempt_id)
        return candidate

    def _peek(self, run: NextRun | None, besides: set[int]) -> Candidate | None:
        return None if run is None else self.database.guess(lambda tx: task_queue.peek(tx, run, besides=besides))

    def _likely_run(self, only_run: str | None) -> NextRun | None:
        """The run that a claim would serve. That no newer agentctl has written into it is looked at now and then."""
        run_id, since = self._nothing_newer
        now = self.clock.monotonic()
        if run_id is not None and only_run is None and now - since < NOTHING_NEWER_SECONDS:
            found = self.database.guess(task_queue.likely_run)
            if found is None or found.run_id == run_id:
                return found
        found = self.database.guess(lambda tx: task_queue.next_run(tx, only_run))
        self._nothing_newer = (None if found is None else found.run_id, now)
        return found

    def _lone_run(self, only_run: str | None) -> NextRun | None:
        """The run that had no other beside it a moment ago: looking again costs more than all the rest of a look."""
        run, since = self._next_run
        if run is None or run.others or only_run not in (None, run.run_id):
            return None
        return run if self.clock.monotonic() - since < LONE_SECONDS else None

    def finish(
        self,
        claim: Claim,
        end: AttemptEnd,
        *,
        effect: EffectEnd | None,
        next_claim: bool,
        only_run: str | None,
        lease_ms: int,
        ahead: tuple[Candidate, EffectRequest] | None = None,
    ) -> tuple[Following | None, str | None]:
        """Confirm the last effect, finish the attempt and claim the next one: one transaction (architecture 4, step 7).

        With `ahead`, an attempt for which the worker has prepared, that one is claimed and its effect started in the
        same transaction; if somebody else was faster, whatever comes next is claimed, and its effect not yet started.

        Returns (what follows, driver of the finished run). It becomes durable with the next start, or before the worker
        rests: until then a power cut may undo it, and the effect is then `started` and unconfirmed, as it was.
        Raises `LeaseLost`, with nothing changed, when the delivery is over, and `SyncFailed` like `start_effect`.
        """
        now = self.clock.now()
        following: Following | None = None
        with self.database.write(durable=not next_claim) as tx:
            events: list[Event] = []
            if effect is not None:
                overdrawn = effects.end(tx, claim.run_id, claim.task_id, effect, events, now=now)
                if overdrawn is not None:
                    end = _overdrawn(end, overdrawn)
            task_queue.finish(tx, claim.fence, end, now=now)
            if next_claim:
                holder = claim.fence.holder
                following = self._follow(tx, holder, only_run, lease_ms, now, claim.run_id, events, ahead)
            if events:
                driver = audit.append(tx, claim.run_id, events, actor=claim.fence.holder, now=now)
            else:
                driver = runs.head(tx, claim.run_id)[2]
        if ahead is not None and following is not None and following.answer is not None:
            self._sync_start(ahead[1])
            if isinstance(following.answer, AttemptHeld):
                self.wake_driver(following.claim.run_id)
        return following, driver

    def _follow(
        self,
        tx: Connection,
        holder: str,
        only_run: str | None,
        lease_ms: int,
        now: int,
        run_id: str | None,
        events: list[Event],
        ahead: tuple[Candidate, EffectRequest] | None,
    ) -> Following | None:
        """Claim what the worker has prepared for and start its effect, or else claim what comes next."""
        if ahead is not None:
            taken = self._claim(tx, holder, only_run, lease_ms, now, run_id, events, ahead[0])
            if taken is not None:
                answer, its_run, started = effects.start(tx, taken.fence, ahead[1], previous=None, now=now)
                self._record(tx, its_run, run_id, started, events, holder, now)
                return Following(taken, answer)
        taken = self._claim(tx, holder, only_run, lease_ms, now, run_id, events)
        return None if taken is None else Following(taken)

    def _sync_start(self, request: EffectRequest) -> None:
        """Make the start that was just committed durable, unless a power cut may undo it without harm."""
        if not _leaves_no_trace(request):
            self.database.sync()

    @staticmethod
    def _record(
        tx: Connection, run_id: str, own_run: str | None, new: list[Event], own: list[Event], actor: str, now: int
    ) -> None:
        """Events of the transaction's own run are gathered, so that its row is written once; others go out at once."""
        if run_id == own_run:
            own.extend(new)
        else:
            audit.append(tx, run_id, new, actor=actor, now=now)

    def _claim(
        self,
        tx: Connection,
        holder: str,
        only_run: str | None,
        lease_ms: int,
        now: int,
        run_id: str | None,
        events: list[Event],
        exactly: Candidate | None = None,
    ) -> Claim | None:
        """Claim; the event goes to `events` if it is one of `run_id`, else it is written at once."""
        claimed: list[tuple[str, Event]] = []
        besides = self._board.others() if exactly is None else ()
        following = task_queue.claim(
            tx,
            holder,
            only_run=only_run,
            lease_ms=lease_ms,
            now=now,
            events=claimed,
            exactly=exactly,
            besides=besides,
        )
        for claimed_run, event in claimed:
            self._record(tx, claimed_run, run_id, [event], events, holder, now)
        return following

    def release(self, claim: Claim, *, effect: EffectEnd | None, reason: str, pause: str | None = None) -> None:
        """Give back a claim; see `task_queue.release`. Durable.

        With `pause`, the reason for a person, the run pauses in the same transaction, unless it is ending anyway: what
        has just failed would be claimed again at once.
        """
        now = self.clock.now()
        with self.database.write(durable=True) as tx:
            events: list[Event] = []
            runs.head(tx, claim.run_id)
            if effect is not None:
                effects.end(tx, claim.run_id, claim.task_id, effect, events, now=now)
            events.append(task_queue.release(tx, claim.fence, reason=reason, now=now))
            audit.append(tx, claim.run_id, events, actor=claim.fence.holder, now=now)
            if pause is not None:
                run = runs.get(tx, claim.run_id)
                if run.ended_at is None and run.cancel_requested_at is None:
                    runs.request_pause(tx, claim.run_id, reason=pause, actor=claim.fence.holder, now=now)
        if pause is not None:
            self.wake_driver(claim.run_id)

    def recorded_expectation(self, attempt_id: int, ordinal: int) -> str | None:
        """What an earlier delivery recorded as expected for this ordinal."""
        with self.database.read() as tx:
            return effects.expected_of(tx, attempt_id, ordinal)

    def recorded_steps(self, attempt_id: int) -> dict[int, RecordedStep]:
        """The effects of an attempt whose results are known, by ordinal."""
        with self.database.read() as tx:
            return effects.recorded(tx, attempt_id)

    def stream_event(self, fence: Fence, effect_id: str, event: dict[str, Any]) -> bool:
        """Store an event of a streamed answer, before more of it is read; see `conversations.append_event`.

        A killed process does not lose it; a power cut may, and then the answer that it belongs to is lost with it: the
        confirmation of the answer makes all its events durable.
        """
        now = self.clock.now()
        with self.database.write() as tx:
            return conversations.append_event(tx, fence, effect_id, event, now=now)

    def request_number(self, effect_id: str) -> int:
        """Which request of its run to its provider a model effect is, from 1."""
        with self.database.read() as tx:
            return conversations.request_number(tx, effect_id)

    def renew(
        self, process_id: str, fence: Fence | None, *, lease_ms: int, rss: int, done: int, failed: int
    ) -> tuple[bool, bool]:
        """Heartbeat of a process and, with a fence, renewal of its lease: (lease still held, asked to drain).

        Raises `StoreGone`: whoever lives is the first to see that what he works on is not there any more.
        """
        self.database.require_place()
        now = self.clock.now()
        with self.database.write() as tx:
            drain = processes.heartbeat(tx, process_id, rss_bytes=rss, done=done, failed=failed, now=now)
            held = fence is None or task_queue.renew(tx, fence, lease_ms=lease_ms, now=now)
        return held, drain

    # -- long-term memory ------------------------------------------------------------------------------------------

    def memory_entry(self, namespace: str, key: str) -> dict[str, Any] | None:
        """The record of a visible entry, or None; see `long_term.get`."""
        with self.database.read() as tx:
            return long_term.get(tx, namespace, key, now=self.clock.now())

    def refuse_newer_entry(self, namespace: str, key: str) -> None:
        """Raise `IncompatibleVersion` if a newer agentctl has written this entry; see `long_term.refuse_newer`."""
        with self.database.read() as tx:
            long_term.refuse_newer(tx, namespace, key)

    def memory_put(self, write: MemoryWrite) -> dict[str, Any]:
        """Write an entry outside of any run; the record. Durable. See `long_term.put`."""
        now = self.clock.now()
        with self.database.write(durable=True) as tx:
            long_term.put(tx, write, now=now)
            record = long_term.get(tx, write.namespace, write.key, now=now)
        assert record is not None  # it ends later than now
        return record

    def memory_search(self, question: Search, embedder: Embedder) -> list[dict[str, Any]]:
        """The best entries for a question, from one snapshot; see `long_term.search`. Embeds before it reads."""
        vector = None if question.mode == "text" else embedder.embed([question.query])[0]
        with self.database.read() as tx:
            return long_term.search(tx, question, embedder, vector, now=self.clock.now())

    def memory_embeddings(self, namespace: str) -> list[tuple[str, int]]:
        """(provider, dimensions) with which the visible entries of a namespace are embedded."""
        with self.database.read() as tx:
            return long_term.embeddings_of(tx, namespace, now=self.clock.now())

    def memory_reindex(self, namespace: str | None, embedder: Embedder) -> int:
        """Embed all entries of one namespace, or of all, anew; how many. Others may go on meanwhile.

        Transaction boundaries: one durable write for some entries at a time, and nothing is embedded inside of one. An
        interruption leaves every entry whole, with its old or its new vector. An entry that somebody has changed
        meanwhile is embedded again.
        """
        done, after = 0, ("", "")
        while True:
            with self.database.read() as tx:
                todo = long_term.texts_after(tx, namespace, after, limit=REINDEX_ENTRIES)
            if not todo:
                return done
            after = (todo[-1][0], todo[-1][1])
            while todo:
                todo, stored = self._embed(todo, embedder)
                done += stored

    def _embed(self, todo: list[tuple[str, str, str]], embedder: Embedder) -> tuple[list[tuple[str, str, str]], int]:
        """Embed these entries: (those that have changed meanwhile and are still there, how many were stored)."""
        texts = [searchable_text(loads(value_json)) for _, _, value_json in todo]
        vectors = embedder.embed(texts)
        items = [
            (entry, terms_of(text), long_term.packed(vector))
            for entry, text, vector in zip(todo, texts, vectors, strict=True)
        ]
        with self.database.write(durable=True) as tx:
            changed = long_term.set_embeddings(tx, items, embedder)
            again = [long_term.text_of(tx, *name) for name in changed]
        return [entry for entry in again if entry is not None], len(todo) - len(changed)

    def memory_expired(self, *, older_than_ms: int) -> int:
        """How many entries have expired so long ago."""
        with self.database.read() as tx:
            return long_term.expired(tx, before=self.clock.now() - older_than_ms)

    def memory_collect(self, *, older_than_ms: int, stopped: Callable[[], bool] = never) -> int:
        """Delete entries that have expired so long ago (ms), some in each transaction, until `stopped()` is true; how
        many. Durable."""
        before, done = self.clock.now() - older_than_ms, 0
        while not stopped():
            with self.database.write(durable=True) as tx:
                removed = long_term.collect(tx, before=before, limit=COLLECT_ENTRIES)
            done += removed
            if removed < COLLECT_ENTRIES:
                break
        return done

    # -- processes and rescue --------------------------------------------------------------------------------------

    def register(self, row: ProcessRow) -> None:
        """A process begins to work here."""
        with self.database.write() as tx:
            processes.register(tx, row)

    def set_process_state(self, process_id: str, state: str, *, durable: bool = False) -> None:
        """`idle`, `busy`, `draining` or `stopped`."""
        with self.database.write(durable=durable) as tx:
            processes.set_state(tx, process_id, state, now=self.clock.now())

    def request_drain(self, process_id: str) -> bool:
        """Ask a process to drain; False when it has ended."""
        with self.database.write(durable=True) as tx:
            done = processes.request_drain(tx, process_id, now=self.clock.now())
        self.wakes.wake(process_id)
        return done

    def live_processes(self, kind: str | None = None) -> list[ProcessRow]:
        """Rows of processes that have not ended; ask `process_identity.liveness` who really lives."""
        with self.database.read() as tx:
            return processes.live(tx, kind)

    def all_processes(self) -> list[ProcessRow]:
        """All rows, oldest first."""
        with self.database.read() as tx:
            return processes.everyone(tx)

    def get_process(self, process_id: str) -> ProcessRow | None:
        """One process row, or None."""
        with self.database.read() as tx:
            return processes.get(tx, process_id)

    def driver_heartbeat(self, process_id: str, *, lease_ms: int, rss: int) -> bool:
        """Heartbeat of a driver with renewal of all its runs; True when it was asked to drain. Raises `StoreGone`."""
        self.database.require_place()
        now = self.clock.now()
        with self.database.write() as tx:
            runs.renew_runs(tx, process_id, lease_ms=lease_ms, now=now)
            return processes.heartbeat(tx, process_id, rss_bytes=rss, done=0, failed=0, now=now)

    def claims(self, holders: Iterable[str] | None = None) -> list[HeldClaim]:
        """Claimed attempts, of some holders or of all."""
        with self.database.read() as tx:
            return task_queue.all_claims(tx) if holders is None else task_queue.claims_of(tx, holders)

    def effects_in_flight(self, attempt_ids: Iterable[int]) -> list[str]:
        """Ids of started effects of these attempts."""
        with self.database.read() as tx:
            return task_queue.started_effects(tx, attempt_ids)

    def rescue(
        self,
        claims: Sequence[tuple[int, int]],
        *,
        dead: Sequence[str],
        why: str,
        actor: str,
        holder_may_live: bool = False,
    ) -> list[str]:
        """Settle the claims of dead holders and mark those processes dead, in one durable transaction.

        The caller has made sure that the holders, and every process with the marker of their effects, are gone.
        With `holder_may_live` that could not be done: then every effect in flight becomes uncertain. Returns the
        outcomes (see `task_queue.rescue`).
        """
        now = self.clock.now()
        outcomes = []
        with self.database.write(durable=True) as tx:
            for attempt_id, delivery in claims:
                outcome = task_queue.rescue(
                    tx, attempt_id, delivery, why=why, holder_may_live=holder_may_live, actor=actor, now=now
                )
                if outcome is not None:
                    outcomes.append(outcome)
            for process_id in dead:
                processes.set_state(tx, process_id, "dead", now=now)
            drivers = runs.drivers(tx)
            # It may be work of several runs, some with workers of their own, and a rescue is rare.
            sleepers = processes.idle_workers(tx, EVERYBODY, for_run=None) if outcomes else []
        for process_id in [*drivers, *sleepers]:
            self.wakes.wake(process_id)
        for process_id in dead:
            self.wakes.forget(process_id)
        return outcomes

    def prune_processes(self, *, older_than_ms: int) -> int:
        """Delete rows of processes that ended long ago and hold nothing, and notes that count no more."""
        with self.database.write() as tx:
            asides.prune(tx)
            return processes.prune(tx, before=self.clock.now() - older_than_ms)

    def find_process(self, name_or_id: str, kind: str) -> ProcessRow:
        """A live process by id, by name or by pid; raises `NotFoundError`, and `UsageError` when several are meant."""
        found = [row for row in self.live_processes(kind) if name_or_id in (row.process_id, row.name, str(row.pid))]
        found = [row for row in found if row.process_id == name_or_id] or found
        if len(found) > 1:
            each = ", ".join(f"{row.process_id} (pid {row.pid})" for row in found)
            raise UsageError(f"{name_or_id} is the name of {len(found)} live {kind}s: {each}", remedy="give an id")
        if found:
            return found[0]
        raise NotFoundError(
            f"there is no live {kind} {name_or_id}", remedy="`agentctl workers list` shows who is there"
        )


def _overdrawn(end: AttemptEnd, detail: dict[str, object]) -> AttemptEnd:
    """The end of an attempt whose effect has used more than was reserved, and more than the limit (contract 6)."""
    error = {
        "code": "budget_exceeded",
        "message": f"{detail['dimension']}: {detail['attempted']} were used, the limit is {detail['limit']}",
        "retryable": False,
        "details": detail,
    }
    return replace(end, outcome="failed", error_json=canonical(error))


def _leaves_no_trace(request: EffectRequest) -> bool:
    return not request.estimate and request.approval is None and request.effect_class in LEAVES_NO_TRACE


def own_rss() -> int:
    """Resident memory of this process in bytes."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)
