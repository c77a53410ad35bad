"""Short ways to runs, effects and a driver that decides nothing. All of it goes through the store's own verbs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentctl.store import canonical as identity
from agentctl.store.canonical import canonical, text_digest
from agentctl.store.clock import Clock
from agentctl.store.engine import Store
from agentctl.store.process_identity import current
from agentctl.store.records import (
    ApprovalAsk,
    AttemptEnd,
    AttemptHeld,
    Batch,
    Claim,
    EffectEnd,
    EffectRequest,
    Event,
    FinishedAttempt,
    NewAttempt,
    NewRun,
    ProcessRow,
    RecordedEffect,
    Run,
    StartedEffect,
    StartRefused,
)

LEASE_MS = 15_000


def open_store(folder: Path, clock: Clock, **options: Any) -> Store:
    """The store of a test: a real file in a folder of its own."""
    return Store(folder / "state" / "agentctl.db", clock, create=True, **options)


def new_run(run_id: str = "run-1", tasks: int = 3, **changes: Any) -> NewRun:
    """A compiled run with tasks t0, t1, … that depend on nothing."""
    fields: dict[str, Any] = {
        "run_id": run_id,
        "trace_id": f"trace-{run_id}",
        "mode": "execute",
        "workflow_name": "demo",
        "workflow_digest": "a" * 64,
        "plan_digest": "b" * 64,
        "submission_digest": "c" * 64,
        "workflow_json": "{}",
        "plan_json": "{}",
        "inputs_json": "{}",
        "settings_json": "{}",
        "base_path": "/base",
        "task_ids": tuple(f"t{i}" for i in range(tasks)),
        "max_concurrency": 8,
        "max_deliveries": 3,
        "memory": {},
    }
    return NewRun(**{**fields, **changes})


def effect_request(
    claim: Claim,
    *,
    ordinal: int = 1,
    idempotency: str = "at_most_once",
    effect_class: str = "external_mutate",
    estimate: Mapping[str, int] | None = None,
    value: object = "x",
    ask: bool = False,
) -> EffectRequest:
    """The effect `ordinal` of a claimed attempt, with the identity of contract 5.1."""
    text = canonical({"value": value})
    digest = identity.hex_digest(text)
    operation = "demo.operation"
    return EffectRequest(
        effect_id=identity.effect_id(claim.run_id, claim.task_id, claim.number, ordinal, operation, digest),
        ordinal=ordinal,
        operation=operation,
        effect_class=effect_class,
        risk="low",
        idempotency=idempotency,
        input_digest=digest,
        input_json=text,
        expected_json="{}",
        estimate=dict(estimate or {}),
        approval=ApprovalAsk("the test asks", operation, "demo", text) if ask else None,
    )


def process_row(
    process_id: str, *, kind: str = "worker", state: str = "idle", now: int = 0, **changes: Any
) -> ProcessRow:
    """The row of this very process under a name of the test's choice."""
    identity_text = current().as_text()
    fields: dict[str, Any] = {
        "process_id": process_id,
        "kind": kind,
        "name": process_id,
        "identity": identity_text,
        "pid": current().pid,
        "parent_process_id": None,
        "only_run": None,
        "unit": None,
        "state": state,
        "version": "0",
        "started_at": now,
        "heartbeat_at": now,
        "drain_requested_at": None,
        "stopped_at": None,
        "done": 0,
        "failed": 0,
        "rss_bytes": 0,
    }
    return ProcessRow(**{**fields, **changes})


class Hand:
    """A worker that acts only when it is told to."""

    def __init__(self, store: Store, name: str = "worker-1") -> None:
        self.store = store
        self.name = name

    def claim(self, only_run: str | None = None) -> Claim | None:
        """Take the next attempt, if there is one."""
        following = self.store.claim(self.name, only_run=only_run, lease_ms=LEASE_MS, awake=False)
        return None if following is None else following.claim

    def take(self, only_run: str | None = None) -> Claim:
        """Take the next attempt, which has to be there."""
        claim = self.claim(only_run)
        assert claim is not None
        return claim

    def start(
        self, claim: Claim, request: EffectRequest, previous: EffectEnd | None = None
    ) -> StartedEffect | RecordedEffect | StartRefused | AttemptHeld:
        """Start an effect, after the end of the previous one."""
        return self.store.start_effect(claim.fence, request, previous=previous, task_id=claim.task_id)

    def finish(
        self,
        claim: Claim,
        outcome: str = "succeeded",
        *,
        effect: EffectEnd | None = None,
        next_claim: bool = False,
        result: str | None = '"done"',
        only_run: str | None = None,
        code: str | None = None,
    ) -> Claim | None:
        """Finish, and take the next attempt if that is asked for. `code` is that of the error, else the outcome."""
        error = None if outcome == "succeeded" else canonical({"code": code or outcome, "message": "as told"})
        end = AttemptEnd(
            outcome,
            result_json=result if outcome == "succeeded" else None,
            result_effect=effect.effect_id if effect is not None else None,
            error_json=error,
        )
        following, _ = self.store.finish(
            claim, end, effect=effect, next_claim=next_claim, only_run=only_run, lease_ms=LEASE_MS
        )
        return None if following is None else following.claim


class Driver:
    """The least that a driver does: it enqueues what it is told, and commits what is finished, in compiled order."""

    def __init__(self, store: Store, run_id: str, name: str = "driver-1") -> None:
        self.store = store
        self.name = name
        self.run = store.get_run(run_id)
        epoch = store.take_run(run_id, driver=name, epoch=self.run.epoch, lease_ms=LEASE_MS)
        assert epoch is not None
        self.epoch = epoch

    def write(self, batch: Batch) -> list[tuple[int, str, str]]:
        """Commit a batch that was decided on the run as it is now."""
        revision = self.store.run_head(self.run.run_id)[1]
        return self.store.commit_batch(self.run, batch, driver=self.name, epoch=self.epoch, revision=revision)

    def enqueue(self, positions: Sequence[int], *, number: int = 1) -> None:
        """Make attempts of these tasks claimable."""
        batch = Batch()
        self.add(batch, positions, number=number)
        self.write(batch)

    def add(self, batch: Batch, positions: Sequence[int], *, number: int = 1) -> None:
        """Put the enqueueing of these tasks into a batch."""
        for position in positions:
            batch.readies.append((None, None, position))
            batch.enqueues.append(NewAttempt(position, f"t{position}", number, 60_000, "{}"))
            batch.changes.append([position, "ready", number - 1, None, None])
            batch.events.append(Event("task.transition", f"t{position}", '{"to":"ready"}'))

    def commit(self, *, retry: bool = False) -> list[FinishedAttempt]:
        """Commit everything that is finished; with `retry` a failure is tried again instead of being final."""
        found, _ = self.store.finished_attempts(self.run)
        batch = Batch()
        for done in found:
            self.settle(batch, done, retry=retry)
        if found:
            self.write(batch)
        return found

    def let_in(self) -> list[int]:
        """Give a place to every attempt that only waits for one; their positions."""
        found = [held for held in self.store.held_attempts(self.run) if held.why == "place"]
        if found:
            self.write(Batch(unheld=[held.attempt_id for held in found]))
        return [held.position for held in found]

    def settle(self, batch: Batch, done: FinishedAttempt, *, retry: bool = False) -> None:
        """Put the outcome of one finished attempt into a batch."""
        if done.outcome == "uncertain":
            batch.parked.append(done.attempt_id)
            batch.waits.append(("waiting_for_effect", None, done.error_json, done.position))
            batch.changes.append([done.position, "waiting_for_effect", done.number, None, "uncertain_effect"])
            batch.events.append(_transition(done, "waiting_for_effect"))
            return
        batch.closed.append(done.attempt_id)
        if done.outcome != "succeeded" and "budget_exceeded" not in (done.error_json or ""):
            batch.abandoned.append(done.attempt_id)
        if done.outcome == "failed" and retry and not rejected(done):
            batch.waits.append(("retry_scheduled", self.store.clock.now() + 1000, done.error_json, done.position))
            batch.changes.append([done.position, "retry_scheduled", done.number, None, "failed"])
            batch.events.append(_transition(done, "retry_scheduled"))
            return
        if done.outcome == "succeeded" and done.artifacts_json is not None:
            batch.artifacts.append((done.attempt_id, done.position, done.artifacts_json))
        text = done.result_json if done.outcome == "succeeded" else None
        digest = None if text is None else text_digest(text)
        batch.finals.append(
            (done.outcome, done.number, None, text, digest, done.error_json, None, None, None, done.position)
        )
        code = None if done.outcome == "succeeded" else done.outcome
        batch.changes.append([done.position, done.outcome, done.number, digest, code])
        batch.events.append(_transition(done, done.outcome))

    def end(self, state: str, reason: str | None = None, *, stop: str | None = None) -> list[tuple[int, str, str]]:
        """End the run, or pause it."""
        return self.write(Batch(stop=stop, run_state=state, run_reason=reason))


def _transition(done: FinishedAttempt, state: str) -> Event:
    return Event("task.transition", f"t{done.position}", canonical({"from": "running", "to": state}))


def rejected(done: FinishedAttempt) -> bool:
    """Whether a person did not want it; then no retry follows."""
    return "approval_rejected" in (done.error_json or "")


def refresh(store: Store, run: Run | str) -> Run:
    """The row of a run as it is now."""
    return store.get_run(run if isinstance(run, str) else run.run_id)
