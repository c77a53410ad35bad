"""A model of the store in a few dictionaries, and Hypothesis that drives both through the same verbs.

After every step the tables have to agree with the model, and the rules that hold for ever have to hold: one live
attempt per task, no effect sent twice unless its contract allows it, what is reserved is what is open, limits hold,
final states stay, every move is in the tables of moves, and the history has no gap.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agentctl.store import states
from agentctl.store.approvals import approval_id_of
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, LeaseLost
from agentctl.store.records import (
    AttemptHeld,
    Batch,
    Claim,
    EffectEnd,
    EffectRequest,
    NewReconciliation,
    RecordedEffect,
    StartedEffect,
    StartRefused,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.builders import Driver, Hand, effect_request, new_run, rejected
from support.clock import ManualClock
from support.rows import check_chains, everything, ledger_line, rows
from support.scale import repeats, scale

HOLDERS = ("w1", "w2", "w3")
PICK = st.integers(0, 11)
IDEMPOTENCY = ("pure", "idempotent", "keyed", "at_most_once", "unknown")
CLASSES = ("observe", "external_mutate", "process_execution")
ENDS = ("succeeded", "failed", "uncertain", "requested", "cancelled")


def any_finished(store: Store) -> bool:
    """Whether results wait for their commit."""
    return bool(rows(store, "SELECT 1 FROM attempts WHERE queue = 'finished' LIMIT 1"))


@dataclass
class ModelRun:
    driver: Driver
    limit: int
    deliveries: int
    tasks: list[str]
    numbers: list[int]
    cancelled: bool = False
    ended: bool = False
    used: int = 0
    exceeded: bool = False
    reserved: dict[str, int] = field(default_factory=dict)


@dataclass
class ModelEffect:
    request: EffectRequest
    status: str
    sent: int = 0
    units: int = 0
    said: str | None = None
    superseded: bool = False

    @property
    def repeatable(self) -> bool:
        return states.may_repeat(self.request.effect_class, self.request.idempotency)


@dataclass
class ModelAttempt:
    run: str
    position: int
    lost: int = 0
    confirmed_before: int = 0
    closed: bool = False
    finished: bool = False
    hold: str | None = None
    needs: int = 0
    effects: list[ModelEffect] = field(default_factory=list)

    @property
    def confirmed(self) -> int:
        return sum(effect.status == "succeeded" for effect in self.effects)

    @property
    def in_flight(self) -> ModelEffect | None:
        return next((effect for effect in self.effects if effect.status == "started"), None)


class StoreMachine(RuleBasedStateMachine):
    @initialize(tasks=st.integers(1, 4), limit=st.integers(0, 6), deliveries=st.integers(1, 3))
    def open(self, tasks: int, limit: int, deliveries: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="agentctl-model-"))
        self.clock = ManualClock()
        self.store = Store(self.folder / "agentctl.db", self.clock, create=True, sync=lambda: None)
        self.runs: dict[str, ModelRun] = {}
        self.attempts: dict[int, ModelAttempt] = {}
        self.claims: dict[str, Claim] = {}
        self.late: list[Claim] = []
        self.seen: dict[tuple[str, object], str] = {}
        self.create(tasks, limit, deliveries)
        self.enqueue(0, tasks)
        self.claim(0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder)

    # -- runs ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.runs) < 3)
    @rule(tasks=st.integers(1, 4), limit=st.integers(0, 6), deliveries=st.integers(1, 3))
    def create(self, tasks: int, limit: int, deliveries: int) -> None:
        run_id = f"run-{len(self.runs) + 1}"
        new = new_run(run_id, tasks, budget_limits={"toolCalls": limit}, max_deliveries=deliveries)
        assert self.store.create_run(new) == (run_id, True)
        driver = Driver(self.store, run_id)
        self.runs[run_id] = ModelRun(driver, limit, deliveries, ["pending"] * tasks, [0] * tasks)

    def alive(self) -> list[ModelRun]:
        return [run for run in self.runs.values() if not run.ended and not run.cancelled]

    def open_run(self, pick: int) -> tuple[str, ModelRun] | None:
        candidates = [(run_id, run) for run_id, run in self.runs.items() if not run.ended]
        return candidates[pick % len(candidates)] if candidates else None

    @precondition(lambda self: any("pending" in run.tasks or "retry_scheduled" in run.tasks for run in self.alive()))
    @rule(pick=PICK, count=st.integers(1, 4))
    def enqueue(self, pick: int, count: int) -> None:
        found = self.open_run(pick)
        if found is None or found[1].cancelled:
            return
        run = found[1]
        waiting = [n for n, state in enumerate(run.tasks) if state in ("pending", "retry_scheduled")][:count]
        batch = Batch()
        for position in waiting:
            run.driver.add(batch, [position], number=run.numbers[position] + 1)
            run.tasks[position] = "ready"
        if waiting:
            run.driver.write(batch)

    @precondition(lambda self: any_finished(self.store))
    @rule(pick=PICK, retry=st.booleans())
    def commit(self, pick: int, retry: bool) -> None:
        found = self.open_run(pick)
        if found is None:
            return
        run = found[1]
        for done in run.driver.commit(retry=retry and not run.cancelled):
            state = done.outcome
            self.attempts[done.attempt_id].closed = state != "uncertain"
            self.attempts[done.attempt_id].finished = False
            for effect in self.attempts[done.attempt_id].effects:
                if state in ("failed", "cancelled") and effect.status == "requested":
                    effect.status = "cancelled"  # never sent, and nobody will
            if state == "uncertain":
                state = "waiting_for_effect"
            elif state == "failed" and retry and not run.cancelled and not rejected(done):
                state = "retry_scheduled"
            run.tasks[done.position] = state

    @precondition(lambda self: len(self.late) > 3 and self.alive())
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        found = self.open_run(pick)
        if found is not None:
            assert self.store.request_cancel(found[0], reason="model", actor="x") == (True, "running")
            found[1].cancelled = True

    @precondition(lambda self: any(run.cancelled and not run.ended for run in self.runs.values()))
    @rule(pick=PICK)
    def stop(self, pick: int) -> None:
        found = self.open_run(pick)
        if found is None or not found[1].cancelled:
            return
        run_id, run = found
        run.driver.write(Batch(stop="cancel_requested"))
        stays = {a.position for a in self.attempts.values() if a.run == run_id and a.finished}
        for attempt in self.attempts.values():
            if attempt.run != run_id or attempt.closed or attempt.finished or run.tasks[attempt.position] == "running":
                continue
            attempt.closed = True
            attempt.hold = None
            for effect in attempt.effects:
                if effect.status in ("requested", "waiting_for_approval"):
                    effect.status = "cancelled"
        for position, state in enumerate(run.tasks):
            if state not in states.TASK_FINAL | {"running"} and position not in stays:
                run.tasks[position] = "cancelled"
        if all(state in states.TASK_FINAL for state in run.tasks):
            run.driver.end("cancelled", "cancel_requested")
            run.ended = True

    # -- workers ---------------------------------------------------------------------------------------------------

    def holding(self, pick: int) -> tuple[str, Claim]:
        """One of those who hold a claim."""
        return sorted(self.claims.items())[pick % len(self.claims)]

    @precondition(lambda self: len(self.claims) < len(HOLDERS))
    @rule(pick=PICK)
    def claim(self, pick: int) -> None:
        free = [holder for holder in HOLDERS if holder not in self.claims]
        holder = free[pick % len(free)]
        claim = Hand(self.store, holder).claim()
        ready = self.claimable()
        if claim is None:
            assert ready == []
            return
        self.begin(holder, claim, ready)

    def claimable(self) -> list[tuple[str, int]]:
        """What is ready and not held."""
        held = {(attempt.run, attempt.position) for attempt in self.attempts.values() if attempt.hold is not None}
        return [
            (run_id, position)
            for run_id, run in self.runs.items()
            if not run.cancelled and not run.ended
            for position, state in enumerate(run.tasks)
            if state == "ready" and (run_id, position) not in held
        ]

    def let_go(self, run: ModelRun) -> None:
        """Units have become free: those who wait for them, in compiled order, as far as they fit."""
        taken = run.used + sum(run.reserved.values())
        waiting = [a for a in self.attempts.values() if self.runs[a.run] is run and a.hold == "budget"]
        for attempt in sorted(waiting, key=lambda a: a.position):
            never = run.used + attempt.needs > run.limit
            if not never and taken + attempt.needs > run.limit:
                return
            attempt.hold = "place"
            if never:
                continue
            taken += attempt.needs

    def begin(self, holder: str, claim: Claim, ready: list[tuple[str, int]]) -> None:
        position = int(claim.task_id[1:])
        assert (claim.run_id, position) in ready
        assert min(n for run_id, n in ready if run_id == claim.run_id) == position, "compiled order"
        run = self.runs[claim.run_id]
        run.tasks[position] = "running"
        run.numbers[position] = claim.number
        self.attempts.setdefault(claim.fence.attempt_id, ModelAttempt(claim.run_id, position))
        self.claims[holder] = claim

    def ended_as(self, attempt: ModelAttempt, how: str) -> EffectEnd | None:
        """The end of the effect in flight, and what it means in the model."""
        effect = attempt.in_flight
        if effect is None:
            return None
        run = self.runs[attempt.run]
        used = effect.units if how in ("succeeded", "failed") else 0
        if how != "uncertain":
            run.reserved.pop(effect.request.effect_id)
            run.used += used
            self.let_go(run)
        if how in ("requested", "cancelled"):
            effect.sent -= 1
        effect.status = how
        return EffectEnd(
            effect.request.effect_id,
            how,
            dispatch=effect.sent + (how in ("requested", "cancelled")),
            usage={"toolCalls": used} if used else {},
        )

    @precondition(lambda self: self.claims)
    @rule(
        pick=PICK,
        idempotency=st.sampled_from(IDEMPOTENCY),
        effect_class=st.sampled_from(CLASSES),
        units=st.integers(0, 3),
        previous=st.sampled_from(("succeeded", "failed")),
        ask=st.booleans(),
    )
    def start(self, pick: int, idempotency: str, effect_class: str, units: int, previous: str, ask: bool) -> None:
        holder, claim = self.holding(pick)
        attempt = self.attempts[claim.fence.attempt_id]
        run = self.runs[attempt.run]
        end = self.ended_as(attempt, previous)
        known = next((effect for effect in attempt.effects if effect.status == "requested"), None)
        if known is None:
            request = effect_request(
                claim,
                ordinal=len(attempt.effects) + 1,
                idempotency=idempotency,
                effect_class=effect_class,
                estimate={"toolCalls": units},
                ask=ask,
            )
            known = ModelEffect(request, "new", units=units)
        answer = Hand(self.store, holder).start(claim, known.request, end)
        taken = run.used + sum(run.reserved.values())
        if run.cancelled:
            assert answer == StartRefused("cancel_requested")
        elif known.status == "new" and ask:
            assert isinstance(answer, AttemptHeld)
            assert answer.why == "approval"
            known.status = "waiting_for_approval"
            attempt.effects.append(known)
            self.hold(holder, attempt, "approval", "waiting_for_approval")
        elif run.used + known.units > run.limit:
            assert isinstance(answer, StartRefused)
            assert answer.reason == "budget"
            if known.status == "new":
                known.status = "requested"
                attempt.effects.append(known)
            run.exceeded = True
        elif taken + known.units > run.limit:
            assert answer == AttemptHeld("budget")
            attempt.needs = known.units
            self.hold(holder, attempt, "budget", "ready")
        else:
            assert answer == StartedEffect(known.sent + 1)
            assert known.sent == 0 or known.repeatable, "sent twice against its contract"
            if known.status == "new":
                attempt.effects.append(known)
            known.status = "started"
            known.sent += 1
            run.reserved[known.request.effect_id] = known.units

    def hold(self, holder: str, attempt: ModelAttempt, why: str, state: str) -> None:
        """The worker is free, and it has cost no delivery."""
        self.late.append(self.claims.pop(holder))
        attempt.hold = why
        attempt.confirmed_before = attempt.confirmed
        self.runs[attempt.run].tasks[attempt.position] = state

    # -- people ----------------------------------------------------------------------------------------------------

    def asked(self) -> list[ModelAttempt]:
        """Attempts that wait for an answer."""
        return [attempt for attempt in self.attempts.values() if attempt.hold == "approval"]

    @precondition(lambda self: self.asked())
    @rule(pick=PICK, approve=st.booleans())
    def decide(self, pick: int, approve: bool) -> None:
        """A person answers; a second one is told that it is too late."""
        attempt = self.asked()[pick % len(self.asked())]
        run = self.runs[attempt.run]
        [effect] = [effect for effect in attempt.effects if effect.status == "waiting_for_approval"]
        approval_id = approval_id_of(effect.request.effect_id)
        if run.cancelled:
            with pytest.raises(ConflictError):
                self.store.resolve_approval(approval_id, approve=approve, actor="p", reason="")
            return
        assert self.store.resolve_approval(approval_id, approve=approve, actor="p", reason="") == attempt.run
        if approve:
            effect.status = "requested"
            attempt.hold = "place"
            run.tasks[attempt.position] = "ready"
        else:
            effect.status = "cancelled"
            attempt.hold = None
            attempt.finished = True
        with pytest.raises(ConflictError, match="before"):
            self.store.resolve_approval(approval_id, approve=not approve, actor="q", reason="")

    @precondition(lambda self: any(attempt.hold == "place" for attempt in self.attempts.values()))
    @rule(pick=PICK)
    def let_in(self, pick: int) -> None:
        """The driver has places again."""
        found = self.open_run(pick)
        if found is None or found[1].cancelled:
            return
        run_id, run = found
        waiting = [a for a in self.attempts.values() if a.run == run_id and a.hold == "place"]
        assert sorted(a.position for a in waiting) == run.driver.let_in()
        for attempt in waiting:
            attempt.hold = None

    def unclear(self) -> list[tuple[ModelAttempt, ModelEffect]]:
        """Effects of which nobody knows whether they happened."""
        return [
            (a, e) for a in self.attempts.values() for e in a.effects if e.status == "uncertain" and not e.superseded
        ]

    @precondition(lambda self: self.unclear())
    @rule(pick=PICK, status=st.sampled_from(("applied", "not_applied")))
    def reconcile(self, pick: int, status: str) -> None:
        """A person has found out. What contradicts an earlier conclusion is refused."""
        attempt, effect = self.unclear()[pick % len(self.unclear())]
        run = self.runs[attempt.run]
        name = effect.request.effect_id
        self.reconciled = getattr(self, "reconciled", 0) + 1
        new = NewReconciliation(
            f"reconciliation-{self.reconciled}", name, status, "p", "looked", "{}", "{}",
            result_json='{"ok":true}' if status == "applied" else None,
        )  # fmt: skip
        if effect.said is not None and effect.said != status:
            with pytest.raises(ConflictError):
                self.store.reconcile(new)
            return
        assert self.store.reconcile(new) == attempt.run
        first, effect.said = effect.said is None, status
        if not first:
            return
        units = run.reserved.pop(name)
        run.used += units if status == "applied" else 0
        self.let_go(run)
        if run.ended or attempt.closed or attempt.effects[-1] is not effect:
            return
        if status == "applied":
            attempt.finished = True
            run.tasks[attempt.position] = "running"
        else:
            attempt.closed = True
            run.tasks[attempt.position] = "retry_scheduled"

    @precondition(lambda self: self.claims)
    @rule(pick=PICK)
    def ask_again(self, pick: int) -> None:
        """What has ended before is remembered."""
        holder, claim = self.holding(pick)
        for effect in self.attempts[claim.fence.attempt_id].effects:
            if effect.status in states.EFFECT_FINAL:
                answer = Hand(self.store, holder).start(claim, effect.request)
                assert isinstance(answer, RecordedEffect)
                assert answer.status == ("succeeded" if effect.said == "applied" else effect.status)

    @precondition(lambda self: self.claims)
    @rule(
        pick=PICK,
        outcome=st.sampled_from(("succeeded", "failed", "cancelled")),
        how=st.sampled_from(("succeeded", "failed", "cancelled")),
        further=st.booleans(),
    )
    def finish(self, pick: int, outcome: str, how: str, further: bool) -> None:
        holder, claim = self.holding(pick)
        del self.claims[holder]
        end = self.ended_as(self.attempts[claim.fence.attempt_id], how)
        following = Hand(self.store, holder).finish(claim, outcome, effect=end, next_claim=further)
        self.late.append(claim)
        if following is not None:
            self.begin(holder, following, self.claimable())

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, how=st.sampled_from(("succeeded", "failed", "requested")))
    def release(self, pick: int, how: str) -> None:
        holder, claim = self.holding(pick)
        del self.claims[holder]
        attempt = self.attempts[claim.fence.attempt_id]
        self.store.release(claim, effect=self.ended_as(attempt, how), reason="drain")
        attempt.confirmed_before = attempt.confirmed
        self.runs[attempt.run].tasks[attempt.position] = "ready"
        self.late.append(claim)

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, alive=st.booleans())
    def die(self, pick: int, alive: bool) -> None:
        holder, claim = self.holding(pick)
        del self.claims[holder]
        self.late.append(claim)
        attempt = self.attempts[claim.fence.attempt_id]
        run = self.runs[attempt.run]
        effect = attempt.in_flight
        if attempt.confirmed <= attempt.confirmed_before:
            attempt.lost += 1
        if effect is not None and (alive or not effect.repeatable):
            expected = "uncertain"
            effect.status = "uncertain"
        else:
            expected = "worker_lost" if attempt.lost >= run.deliveries else "ready"
            if effect is not None:
                effect.superseded = expected == "worker_lost"
                effect.status = "uncertain" if effect.superseded else "requested"
                run.used += run.reserved.pop(effect.request.effect_id)
                self.let_go(run)
        [outcome] = self.store.rescue(
            [(claim.fence.attempt_id, claim.fence.delivery)],
            dead=[],
            why="the model says so",
            actor="rescuer",
            holder_may_live=alive,
        )
        assert outcome == expected
        if expected == "ready":
            attempt.confirmed_before = attempt.confirmed
            run.tasks[attempt.position] = "ready"

    @precondition(lambda self: self.late)
    @rule(pick=st.integers(0, 20), verb=st.sampled_from(("finish", "start", "release", "rescue")))
    def act_too_late(self, pick: int, verb: str) -> None:
        claim = self.late[pick % len(self.late)]
        hand = Hand(self.store, claim.fence.holder)
        before = everything(self.store)
        if verb == "rescue":
            fence = claim.fence
            assert self.store.rescue([(fence.attempt_id, fence.delivery)], dead=[], why="x", actor="x") == []
        else:
            with pytest.raises(LeaseLost):
                if verb == "finish":
                    hand.finish(claim, next_claim=True)
                elif verb == "start":
                    hand.start(claim, effect_request(claim, ordinal=9))
                else:
                    self.store.release(claim, effect=None, reason="late")
        assert everything(self.store) == before

    @rule(seconds=st.sampled_from((0.001, 1, 3600)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- what has to hold after every step -------------------------------------------------------------------------

    @invariant()
    def tables_agree_with_the_model(self) -> None:
        for run_id, run in self.runs.items():
            found = rows(self.store, "SELECT state FROM tasks WHERE run_id = ? ORDER BY position", run_id)
            assert [state for (state,) in found] == run.tasks, run_id
            assert ledger_line(self.store, "toolCalls", run_id) == (run.limit, run.used, sum(run.reserved.values()))
        recorded = dict(rows(self.store, "SELECT effect_id, status || ' ' || dispatches FROM effects"))
        modelled = {
            effect.request.effect_id: f"{effect.status} {effect.sent}"
            for attempt in self.attempts.values()
            for effect in attempt.effects
        }
        assert recorded == modelled
        holds = dict(rows(self.store, "SELECT attempt_id, hold FROM attempts WHERE hold IS NOT NULL"))
        assert holds == {name: a.hold for name, a in self.attempts.items() if a.hold is not None}
        over = dict(rows(self.store, "SELECT run_id, exceeded_json IS NOT NULL FROM run_budgets"))
        assert over == {run_id: int(run.exceeded) for run_id, run in self.runs.items()}

    @invariant()
    def one_live_attempt_per_task(self) -> None:
        sql = "SELECT task_no FROM attempts WHERE state <> 'closed' GROUP BY task_no HAVING COUNT(*) > 1"
        assert rows(self.store, sql) == []

    @invariant()
    def reservations_add_up_and_limits_hold(self) -> None:
        sql = (
            "SELECT b.reserved, COALESCE((SELECT SUM(units) FROM budget_reservations r WHERE r.run_id = b.run_id "
            "AND r.dimension = b.dimension AND r.state = 'open'), 0), b.used, b.limit_units FROM budget_lines b"
        )
        for reserved, held, used, limit in rows(self.store, sql):
            assert reserved == held
            assert used + reserved <= limit

    @invariant()
    def nothing_moves_against_the_tables(self) -> None:
        for kind, moves, sql in (
            ("run", states.RUN_MOVES, "SELECT run_id, state FROM runs"),
            ("task", states.TASK_MOVES, "SELECT task_no, state FROM tasks"),
            ("effect", states.EFFECT_MOVES, "SELECT effect_id, status FROM effects"),
        ):
            for name, state in rows(self.store, sql):
                before = self.seen.get((kind, name), state)
                # A dispatch that never was is given back and cancelled in one transaction.
                steps = moves[before] | (moves["requested"] - {"started"} if before == "started" else set())
                assert state == before or state in steps, f"{kind} {name}: {before} -> {state}"
                self.seen[(kind, name)] = state

    @invariant()
    def history_is_whole(self) -> None:
        check_chains(self.store)


StoreMachine.TestCase.settings = settings(
    max_examples=repeats(400, at_least=30),
    stateful_step_count=40,
    deadline=None,
    phases=[phase for phase in Phase if phase is not Phase.shrink or scale() >= 1],  # shrinking takes minutes
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestStoreMachine = StoreMachine.TestCase


@pytest.mark.parametrize("seed", range(repeats(80, at_least=8)))
def test_long_walks(seed: int) -> None:
    """The same machine on long random walks, weighted by what a busy pool does: they go deeper than short examples."""
    chance = random.Random(seed)
    machine = StoreMachine()
    machine.open(4, chance.choice([0, 3, 6, 6]), chance.randint(1, 3))

    def pick() -> int:
        return chance.randint(0, 11)

    def start() -> None:
        how = chance.choice(("succeeded", "failed"))
        ask = chance.random() < 0.2
        machine.start(pick(), chance.choice(IDEMPOTENCY), chance.choice(CLASSES), chance.randint(0, 3), how, ask)

    moves: list[tuple[int, Callable[[], object], Callable[[], object]]] = [
        (8, start, lambda: machine.claims),
        (4, lambda: machine.claim(pick()), lambda: len(machine.claims) < len(HOLDERS)),
        (2, lambda: machine.ask_again(pick()), lambda: machine.claims),
        (2, lambda: machine.die(pick(), chance.random() < 0.2), lambda: machine.claims),
        (
            2,
            lambda: machine.release(pick(), chance.choice(("succeeded", "failed", "requested", "requested"))),
            lambda: machine.claims,
        ),
        (
            3,
            lambda: machine.finish(
                pick(),
                chance.choice(("succeeded", "failed", "failed", "cancelled")),
                chance.choice(("succeeded", "failed", "cancelled")),
                chance.random() < 0.5,
            ),
            lambda: machine.claims,
        ),
        (4, lambda: machine.commit(pick(), chance.random() < 0.8), lambda: any_finished(machine.store)),
        (4, lambda: machine.enqueue(pick(), 3), machine.alive),
        (
            2,
            lambda: machine.act_too_late(pick(), chance.choice(("finish", "start", "release", "rescue"))),
            lambda: machine.late,
        ),
        (3, lambda: machine.decide(pick(), chance.random() < 0.7), machine.asked),
        (3, lambda: machine.reconcile(pick(), chance.choice(("applied", "not_applied"))), machine.unclear),
        (
            3,
            lambda: machine.let_in(pick()),
            lambda: any(attempt.hold == "place" for attempt in machine.attempts.values()),
        ),
        (1, lambda: machine.create(4, chance.randint(0, 6), chance.randint(1, 3)), lambda: len(machine.runs) < 4),
        (1, lambda: machine.cancel(pick()), lambda: len(machine.late) > 12 and machine.alive()),
        (1, lambda: machine.stop(pick()), lambda: machine.late),
    ]
    try:
        for _ in range(120):
            possible = [(weight, move) for weight, move, guard in moves if guard()]
            [move] = chance.choices([move for _, move in possible], [weight for weight, _ in possible])
            move()
            machine.tables_agree_with_the_model()
            machine.one_live_attempt_per_task()
            machine.reservations_add_up_and_limits_hold()
            machine.nothing_moves_against_the_tables()
            machine.history_is_whole()
    finally:
        machine.teardown()
