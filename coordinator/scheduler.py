"""What happens next in a run: a pure decision, without a database, a clock or chance of its own.

A `Scheduler` holds the state of one run in memory. `decide` takes what workers have finished and gives the batch that
the driver commits: results in compiled order, guards, tasks without effect, attempts for the free places, and the end
of the run. If the commit is refused (the run has moved), the driver throws the scheduler away and builds a new one from
the database, which alone is the truth.

Serial-equivalent memory (architecture 5): a task starts when all tasks that it needs, and all earlier writers of what
it reads, have ended; its snapshot is, for each readable key, the value of the greatest position below its own.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentctl.store.canonical import canonical, least_length, loads, nests_deeper, text_digest
from agentctl.store.clock import DAY_MS
from agentctl.store.compensations import MAPPING
from agentctl.store.engine import BATCH_BYTES, BATCH_RESULTS, RunSnapshot
from agentctl.store.errors import TaskFault
from agentctl.store.records import Batch, Event, FinishedAttempt, HeldAttempt, NewAttempt, Run
from agentctl.store.states import BRIEF_KINDS, TASK_FINAL, may_repeat

from .check_mode import CheckMode, not_executed_text
from .expressions import Scope, compile_condition, compile_vars
from .plan import MEMORY_WRITERS, CompiledTask, RetryPolicy
from .plan_index import PlanIndex
from .routing import choose, not_selected

OutputLoader = Callable[[list[int]], dict[int, tuple[str | None, str | None]]]

_EMPTY: dict[str, Any] = {}

_AGGREGATES = frozenset({"aggregate", "loop_aggregate"})
"""What is evaluated however its children ended (contract 4.4)."""

_CONTRACTS = {
    "subworkflow_input": "the inputs of the call do not fit inputSchema",
    "subworkflow_aggregate": "the outputs of the sub-workflow do not fit outputSchema",
}

MAX_INPUT_CHARACTERS = 32 << 20
MAX_AGGREGATE_CHARACTERS = 256 << 20
"""How long a rendered input, and the output of an aggregate or of a run, may be as JSON. A value that grows with each
iteration of a loop would otherwise take the memory of the process that drives all runs."""

SHORT_CHARACTERS = 4096
"""A value up to this length is not measured before it becomes text."""

MAX_INPUT_DEPTH = 128
"""How deep a rendered input may nest. Everything that a run makes comes from one, and everybody has to be able to read
it: a value that nests once more with each iteration of a loop would end whoever parses it."""

HELD_WINDOW = 256
"""How many attempts of a run may wait for budget before no further ones are tried: each try costs a claim."""


class _Outputs(Mapping[str, Any]):
    """Outputs by task id, parsed when somebody looks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def __getitem__(self, task_id: str) -> Any:
        return self._scheduler.output_value(self._scheduler.index.place[task_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._scheduler.index.place)

    def __len__(self) -> int:
        return len(self._scheduler.index.place)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would come of a task: why it would be `skipped` (`dependency`, `route` or `condition`), or what it gets.

    `input_digest` is what it depends on; an aggregate has none, and `output_digest` of what it gathers instead.
    """

    skipped: str | None
    input_digest: str | None = None
    output_digest: str | None = None


class Scheduler:
    """The state of one run and the next decision about it."""

    def __init__(
        self,
        index: PlanIndex,
        snapshot: RunSnapshot,
        inputs: dict[str, Any],
        load_outputs: OutputLoader,
        uniform: Callable[[], float],
    ) -> None:
        """`uniform` gives numbers in [0, 1) for the jitter of backoff."""
        run = snapshot.run
        self.index = index
        self.run: Run = run
        self.inputs = inputs
        self.inputs_digest = text_digest(canonical(inputs))
        self.vars_digest = text_digest(canonical(index.plan.vars))
        self.state = [row.state for row in snapshot.tasks]
        self.attempt = [row.attempt for row in snapshot.tasks]
        self.digest: list[str | None] = [row.output_digest for row in snapshot.tasks]
        self.stopping: str | None = "cancel_requested" if run.cancel_requested_at is not None else None
        self.paused = run.pause_requested_at is not None
        self.more = False
        self._stop_written = False
        self._claimed: set[int] | None = None
        self._load = load_outputs
        self._uniform = uniform
        self._text: dict[int, str] = {}
        self._value: dict[int, Any] = {}
        self._error: dict[int, str | None] = {}
        self._outputs = _Outputs(self)
        self._candidates: list[int] = []
        self._work: list[int] = []
        self._timers: list[tuple[int, int]] = []
        self._memory: dict[str, tuple[list[int], list[str | None]]] = {}
        for key, position, value in snapshot.memory:
            positions, values = self._memory.setdefault(key, ([], []))
            positions.append(position)
            values.append(value)
        self._granted: dict[int, int] = {}
        self._short: dict[int, int] = {}
        # What has finished holds its place until its batch: with it, something in the run still moves.
        self._in_flight = {a.position for a in snapshot.live if a.state != "waiting" and a.hold is None}
        self._undoes: dict[str, Any] = inputs.get(MAPPING, _EMPTY) if run.mode == "compensation" else _EMPTY
        self._check = CheckMode(index, self.state, self.output_value) if run.mode == "check" else None
        self._left = [0] * len(self.state)
        self._open = 0
        for position, state in enumerate(self.state):
            if state in TASK_FINAL:
                continue
            self._open += 1
            self._left[position] = sum(1 for p in index.waits[position] if self.state[p] not in TASK_FINAL)
            if state == "pending" and self._left[position] == 0:
                heapq.heappush(self._candidates, position)
            elif state == "retry_scheduled":
                heapq.heappush(self._timers, (snapshot.tasks[position].retry_at or 0, position))
        if any(state == "failed" and index.tasks[p].failure == "stop" for p, state in enumerate(self.state)):
            self.stopping = self.stopping or "task_failed"
        if snapshot.exceeded and any(state == "failed" for state in self.state):
            self.stopping = self.stopping or "budget_exceeded"
        self.notice(snapshot.held)

    # -- what others ask -------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Attempts that hold a place."""
        return len(self._in_flight)

    def next_timer(self) -> int | None:
        """When the next backoff ends or the wall time of the run is over (epoch ms), or None."""
        timer = self._timers[0][0] if self._timers and not self.paused else None
        deadline = self.run.deadline_at
        if deadline is None or self.stopping is not None:
            return timer
        return deadline + 1 if timer is None else min(timer, deadline + 1)

    def notice(self, held: list[HeldAttempt]) -> None:
        """Take over which attempts are held now: they have no place, and those that wait for one are work."""
        self._short.clear()
        if held and self._stop_written:
            # They were in flight when the run was stopped, and came to a halt before they had begun.
            self._stop_written = False
        for attempt in held:
            position = attempt.position
            self._in_flight.discard(position)
            if attempt.why == "place":
                if position not in self._granted:
                    heapq.heappush(self._work, position)
                self._granted[position] = attempt.attempt_id
            elif attempt.why == "budget":
                self._short[position] = attempt.attempt_id
            else:
                self.state[position] = "waiting_for_approval"
                self.attempt[position] = attempt.number

    @property
    def claims_nothing(self) -> bool:
        """Whether workers take no attempt of this run any more, as it is paused or cancelled."""
        return self.paused or self.run.cancel_requested_at is not None

    def only_these_run(self, claimed: set[int]) -> None:
        """Of a run that `claims_nothing`: what no worker holds, and has not finished, is not going to move."""
        self._claimed = claimed

    def output_value(self, position: int) -> Any:
        """The output of a task as a value. Raises KeyError when it has none."""
        value = self._value.get(position)
        if value is None:
            text = self._output_text(position)
            if text is None:
                raise KeyError(position)
            value = self._value[position] = loads(text)
        return value

    def _output_text(self, position: int) -> str | None:
        text = self._text.get(position)
        if text is None and self.digest[position] is not None:
            self._fetch([position])
            text = self._text.get(position)
        return text

    def _fetch(self, positions: list[int]) -> None:
        """Bring outputs and errors of tasks that ended before this scheduler was built."""
        for position, (output, error) in self._load(positions).items():
            if output is not None:
                self._text[position] = output
            self._error[position] = error

    # -- the decision ----------------------------------------------------------------------------------------------

    def decide(self, finished: list[FinishedAttempt], now: int, *, backlog: bool = False) -> Batch:
        """The next batch. It changes this scheduler; when the commit is refused, build a new one.

        `backlog`: more has finished than is given here, so the run cannot be at rest.

        `more` tells afterwards whether another batch can follow at once.
        """
        batch = Batch()
        self._bytes = 0
        deadline = self.run.deadline_at
        late = self.stopping is None and deadline is not None and now > deadline
        if late:
            self.stopping = "deadline_exceeded"
        for attempt in finished:
            self._absorb(attempt, batch, now)
        if self._claimed is not None and not backlog:
            self._come_to_a_halt(self._in_flight - self._claimed)
        if late and not self._open:
            self.stopping = None  # everything had ended in time
        if self.stopping is None and not self.paused:
            self._wake_retries(now, batch)
            self._advance(batch)
        if self.stopping is not None and not self._stop_written:
            batch.stop = self.stopping
            self._stop_written = True
            self.more = True
            return batch
        self.more = self.stopping is None and not self.paused and self._can_go_on(batch)
        if not self.more and not self._in_flight and not backlog:
            self._maybe_end(batch, now)
        return batch

    def _come_to_a_halt(self, halted: set[int]) -> None:
        """Attempts were given back, or their workers have died, and nobody takes them again."""
        if self.stopping is None:
            self._in_flight -= halted
        elif halted:
            # The stop that was written left them to finish. They stay in flight until the next one has ended them: a
            # worker that looked before may have taken one since.
            self._stop_written = False

    def stopped(self, ended: list[tuple[int, str, str]]) -> None:
        """Tell which tasks the commit of a stop has ended."""
        for position, state, code in ended:
            self._error[position] = canonical({"code": code, "message": f"not executed: {code}", "retryable": False})
            self._in_flight.discard(position)
            self.state[position] = state
            self._open -= 1
        self._candidates.clear()
        self._work.clear()
        self._timers.clear()
        self._granted.clear()
        self._short.clear()

    # -- results ---------------------------------------------------------------------------------------------------

    def _absorb(self, done: FinishedAttempt, batch: Batch, now: int) -> None:
        position = done.position
        self._in_flight.discard(position)
        task = self.index.tasks[position]
        origin = self.state[position] if self.state[position].startswith("waiting") else "running"
        self.attempt[position] = done.number
        if done.outcome == "succeeded":
            batch.closed.append(done.attempt_id)
            try:
                self._succeed(position, done.result_json or "{}", batch, task.action_kind, origin)
                if done.artifacts_json is not None:
                    batch.artifacts.append((done.attempt_id, position, done.artifacts_json))
            except TaskFault as fault:
                self._fail(position, fault.as_json(), batch, origin)
            return
        error = loads(done.error_json) if done.error_json else {"code": "failed", "message": "failed"}
        if self._check is not None and done.outcome == "failed" and not self._check.is_certain(position, error):
            batch.closed.append(done.attempt_id)
            self._leave_out(position, batch, origin, reason=self._supposed(position, error))
            return
        if error.get("code") == "budget_exceeded" and self.stopping is None:
            # A denial stops the run whatever the task declares (contract table, row 7).
            self.stopping = "budget_exceeded"
        if error.get("code") != "budget_exceeded" and done.outcome != "uncertain":
            batch.abandoned.append(done.attempt_id)
        repeatable = done.outcome == "uncertain" and _may_come_again(done)
        if repeatable and done.effect_id is not None:
            batch.superseded.append(done.effect_id)  # it blocks nobody, whatever becomes of its task here
        if done.outcome == "cancelled" or (done.outcome == "uncertain" and self.stopping == "cancel_requested"):
            batch.closed.append(done.attempt_id)
            late = self.stopping == "deadline_exceeded" or error.get("code") == "deadline"
            self._final(position, "failed" if late else "cancelled", None, error, batch, origin)
            return
        retryable = bool(error.get("retryable"))
        if retryable and done.bound and done.outcome == "failed":
            # Its effect has succeeded, and what failed came after it: another attempt would do it once more.
            retryable = False
            error = {**error, "retryable": False}
        if done.outcome == "uncertain":
            if repeatable and done.effect_id is not None:
                # The call may come again; a conversation that begins anew would repeat the others, too.
                retryable = not done.bound
                error = {**error, "retryable": retryable}
            elif self.stopping is None:
                batch.parked.append(done.attempt_id)
                batch.waits.append(("waiting_for_effect", None, canonical(error), position))
                self._move(position, "waiting_for_effect", "running", batch, code=str(error.get("code")))
                return
        batch.closed.append(done.attempt_id)
        if retryable and done.number < task.retry.max_attempts and self.stopping is None:
            retry_at = now + backoff_ms(task.retry, done.number, self._uniform(), error)
            batch.waits.append(("retry_scheduled", retry_at, canonical(error), position))
            heapq.heappush(self._timers, (retry_at, position))
            self._move(position, "retry_scheduled", "running", batch, code=str(error.get("code")))
            return
        self._fail(position, error, batch, origin)

    def _succeed(self, position: int, text: str, batch: Batch, kind: str | None, origin: str) -> None:
        """Check the contract of an output and take over what it writes to memory. Raises `TaskFault`."""
        task = self.index.tasks[position]
        check = self.index.contract(position) if self._check is None else None
        delta: str | None = None
        if check is not None or kind in MEMORY_WRITERS:
            value = loads(text)
            if check is not None:
                problem = check(value)
                if problem is not None:
                    raise TaskFault("output_contract", f"the output does not fit outputSchema: {problem}")
            if kind in MEMORY_WRITERS and (self._check is None or "key" in value):
                if not isinstance(value, dict) or not {"key", "after"} <= value.keys():
                    raise TaskFault("output_contract", "the output of a memory write has `key` and `after`")
                key = value["key"]
                if key not in task.memory_writes:
                    raise TaskFault("undeclared_memory_write", f"the key {key!r} is not in memoryWrites")
                delta = canonical({"formatVersion": 1, "remove": [], "set": {key: value["after"]}})
                written = canonical(value["after"])
                batch.memory.append((key, position, written))
                positions, values = self._memory.setdefault(key, ([], []))
                place = bisect_left(positions, position)
                positions.insert(place, position)
                values.insert(place, written)
        self._final(position, "succeeded", text, None, batch, origin, delta=delta)
        if self._check is not None and kind == "builtin.write":
            self._check.wrote(position)

    def _leave_out(self, position: int, batch: Batch, origin: str, decision: str | None = None, **why: Any) -> None:
        """End a task of a run in check mode that cannot be foreseen."""
        self._final(position, "succeeded", not_executed_text(**why), None, batch, origin, decision=decision)

    def _supposed(self, position: int, error: dict[str, Any]) -> str:
        """Why a task that failed in check mode need not fail in a real run."""
        assert self._check is not None
        text = f"{error.get('code', 'failed')}: {error.get('message', '')}"
        if not self._check.is_reached(position):
            return f"would fail if it ran, which is not certain: {text}"
        return f"would fail with what is known now, which may change: {text}"

    def _fail(self, position: int, error: dict[str, Any], batch: Batch, origin: str) -> None:
        self._final(position, "failed", None, error, batch, origin)
        if self.index.tasks[position].failure == "stop" and self.stopping is None:
            self.stopping = "task_failed"

    def _final(
        self,
        position: int,
        state: str,
        text: str | None,
        error: dict[str, Any] | None,
        batch: Batch,
        origin: str,
        *,
        input_digest: str | None = None,
        decision: str | None = None,
        delta: str | None = None,
    ) -> None:
        digest = None
        if text is not None:
            digest = self.digest[position] = text_digest(text)
            self._text[position] = text
            self._bytes += len(text)
        error_text = None if error is None else canonical(error)
        self._error[position] = error_text
        batch.finals.append(
            (
                state,
                self.attempt[position],
                input_digest,
                text,
                digest,
                error_text,
                decision,
                delta,
                None if delta is None else text_digest(delta),
                position,
            )
        )
        if state == "succeeded":
            batch.proofs[position] = self.index.fingerprints(position)
        undoes = self._undoes.get(self.index.tasks[position].id)
        if undoes is not None:
            batch.undone.append((position, undoes["sourceEffectIds"]))
        code = None if error is None else error.get("code")
        self._move(position, state, origin, batch, digest=digest, code=code, decision=decision)
        self._open -= 1
        for dependent in self.index.dependents[position]:
            self._left[dependent] -= 1
            if self._left[dependent] == 0 and self.state[dependent] == "pending":
                heapq.heappush(self._candidates, dependent)

    def _move(
        self,
        position: int,
        state: str,
        origin: str,
        batch: Batch,
        *,
        digest: str | None = None,
        code: str | None = None,
        decision: str | None = None,
    ) -> None:
        self.state[position] = state
        attempt = self.attempt[position]
        batch.changes.append([position, state, attempt, digest, code])
        why = "" if code is None else f'"code":{canonical(code)},'
        if decision is not None:
            why += f'"decision":{decision},'
        payload = f'{{"attempt":{attempt},{why}"from":"{origin}","to":"{state}"}}'
        batch.events.append(Event("task.transition", self.index.tasks[position].id, payload))

    # -- what can begin --------------------------------------------------------------------------------------------

    def _wake_retries(self, now: int, batch: Batch) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, position = heapq.heappop(self._timers)
            if self.state[position] == "retry_scheduled":
                heapq.heappush(self._work, position)

    def _advance(self, batch: Batch) -> None:
        """Evaluate what is ready, in compiled order, until the batch is full; then fill the places.

        With a single place, tasks go one by one in compiled order: what has no effect waits as well for what was
        there before it. With more of them it does not: it needs no place, and no order is promised.
        """
        if self.run.max_concurrency == 1:
            self._advance_singly(batch)
            return
        while self._candidates and self._has_room(batch):
            self._sift(batch)
            if self.stopping is not None:
                return
        while self._work and len(self._in_flight) < self.run.max_concurrency and self._can_fill(batch):
            self._fill(batch)
            if self.stopping is not None:
                return

    def _advance_singly(self, batch: Batch) -> None:
        while not self._in_flight and self.stopping is None and self._has_room(batch):
            fill = bool(self._work) and self._can_fill(batch)
            if self._candidates and not (fill and self._work[0] < self._candidates[0]):
                self._sift(batch)
            elif fill:
                self._fill(batch)
            else:
                return

    def _can_go_on(self, batch: Batch) -> bool:
        """Whether another batch can follow at once: what it would hold has found no room in this one."""
        places = self.run.max_concurrency - len(self._in_flight)
        if self._candidates and (places > 0 or self.run.max_concurrency > 1):
            return True
        full = len(batch.finals) >= BATCH_RESULTS or len(batch.enqueues) >= 4 * BATCH_RESULTS
        return full and bool(self._work) and places > 0

    def _has_room(self, batch: Batch) -> bool:
        return len(batch.finals) < BATCH_RESULTS and self._bytes < BATCH_BYTES

    def _can_fill(self, batch: Batch) -> bool:
        if len(batch.finals) >= BATCH_RESULTS or len(batch.enqueues) >= 4 * BATCH_RESULTS:
            return False
        return len(self._short) < HELD_WINDOW or self._work[0] in self._granted

    def _sift(self, batch: Batch) -> None:
        """Take the first candidate: end it, or put it to the work that needs a place."""
        position = heapq.heappop(self._candidates)
        if self._dependency_failed(position):
            error = {"code": "dependency_not_succeeded", "message": "a dependency did not succeed"}
            self._final(position, "skipped", None, error, batch, "pending")
        elif (chosen := self._passed_over(position)) is not None:
            self._final(position, "skipped", chosen, None, batch, "pending")
        elif self.index.effect_free(position):
            self._begin(position, batch)
        else:
            heapq.heappush(self._work, position)

    def _fill(self, batch: Batch) -> None:
        """Give a place to the first of the work."""
        position = heapq.heappop(self._work)
        attempt_id = self._granted.pop(position, None)
        if attempt_id is not None:
            batch.unheld.append(attempt_id)
            self._in_flight.add(position)
            return
        self._begin(position, batch)

    def _dependency_failed(self, position: int) -> bool:
        kind, needs = self.index.tasks[position].uses_kind, self.index.needs[position]
        if kind in _AGGREGATES:
            return False
        if kind == "subworkflow_aggregate":
            # The boundary comes last. What never began has no outputs; what began has whatever its children left.
            return self.state[needs[-1]] != "succeeded" and self._passed_over(position) is None
        return any(self.state[need] != "succeeded" for need in needs)

    def _passed_over(self, position: int) -> str | None:
        """The output of a task that a router has not chosen, or None. A router that did not succeed chooses nothing."""
        for router, destination in self.index.tasks[position].route_guards:
            place = self.index.place[router]
            if self.state[place] == "succeeded":
                output = self.output_value(place)
                # Without destinations, in check mode, it is not known which one would be chosen.
                if destination not in output.get("destinations", (destination,)):
                    return canonical(not_selected(router, output))
        return None

    def foresee(self, position: int) -> Foreseen:
        """What would come of a task if it began now, as a planner of retry and repair asks. It changes nothing.

        Raises `TaskFault` when it would fail before it begins: its guard, variables or input cannot be rendered.
        """
        task = self.index.tasks[position]
        if self._dependency_failed(position):
            return Foreseen("dependency")
        if self._passed_over(position) is not None:
            return Foreseen("route")
        snapshot, scope, own = self._seen_by(position)
        condition = self.index.condition(position)
        if condition is not None and not condition(scope):
            return Foreseen("condition")
        if task.uses_kind in _AGGREGATES:
            decision = self._last_decision(position, scope, snapshot)
            if decision is not None and loads(decision)["result"]:
                raise _not_converged(task)
            return Foreseen(None, output_digest=text_digest(self._aggregate(position)))
        told = _told(canonical(self.index.input(position)(scope)), self._instructions(position, scope))
        return Foreseen(None, input_digest=self._input_digest(position, told, own, snapshot))

    def leave_open(self, position: int) -> None:
        """Take a task that had ended for one that has not: nothing can be foreseen from it any more."""
        self.state[position] = "pending"
        self.digest[position] = None
        self._text.pop(position, None)
        self._value.pop(position, None)

    def _seen_by(self, position: int) -> tuple[dict[str, str], Scope, dict[str, Any]]:
        """What a task reads: its snapshot of memory, the scope of its templates, and its own variables rendered."""
        snapshot = self._snapshot(position)
        memory_values = {key: loads(text) for key, text in snapshot.items()} if snapshot else _EMPTY
        scope = Scope(inputs=self.inputs, vars=_EMPTY, memory=memory_values, tasks=self._outputs)
        renderer = self.index.variables(position)
        own = renderer(scope) if renderer is not None else _EMPTY
        scope.vars = self.index.plan.vars
        if own:
            _refuse_long_values(own, "its variables")
            scope.vars = {**scope.vars, **own}
        return snapshot, scope, own

    def _begin(self, position: int, batch: Batch) -> None:
        """Decide the guard, render the input, then finish the task (no effect) or enqueue an attempt.

        What goes wrong here fails this task with a typed error and nothing else (contract table, row 6).
        """
        task = self.index.tasks[position]
        origin = self.state[position]
        decision: str | None = None
        because = "guard"
        try:
            if self._check is not None and (blocked := self._check.blocked_guard(position)):
                self._leave_out(position, batch, origin, blocked=blocked)
                return
            snapshot, scope, own = self._seen_by(position)
            condition = self.index.condition(position)
            if condition is not None and origin == "pending":
                result = condition(scope)
                record = self._decision(condition.text, own, snapshot, self.index.needs[position], result)
                decision = canonical(record)
                if not result:
                    text = canonical({"condition": record, "reason": "when condition was false"})
                    self._final(position, "skipped", text, None, batch, origin, decision=decision)
                    return
            if self._check is not None:
                if (known := self._check.known_fault(position, scope)) is not None:
                    raise known
                if blocked := self._check.blocked_input(position):
                    self._leave_out(position, batch, origin, decision, blocked=blocked)
                    return
            because = "input"
            digest: str | None = None
            if task.uses_kind == "aggregate":
                text = self._aggregate(position)
            elif task.uses_kind == "loop_aggregate":
                because = "loop"
                decision = self._last_decision(position, scope, snapshot)
                if decision is not None and loads(decision)["result"]:
                    raise _not_converged(task)
                text = self._aggregate(position)
            else:
                rendered = self.index.input(position)(scope)
                _refuse_long_values(rendered, "the input")
                rendered_text = _shallow(_bounded(canonical(rendered), MAX_INPUT_CHARACTERS, "the input"))
                said = self._instructions(position, scope)
                digest = self._input_digest(position, _told(rendered_text, said), own, snapshot)
                if not self.index.effect_free(position):
                    self._enqueue(position, rendered, rendered_text, decision, digest, snapshot, batch, said)
                    return
                text = self._evaluate(task, rendered, rendered_text, scope.memory)
            self.attempt[position] += 1
            # A check run holds inputs to their contract, not outputs (contract 3, check mode).
            held = self._check is None or task.uses_kind == "subworkflow_input"
            check = self.index.contract(position) if held else None
            if check is not None:
                problem = check(loads(text))
                if problem is not None:
                    what = _CONTRACTS.get(task.uses_kind, "the output does not fit outputSchema")
                    raise TaskFault("output_contract", f"{what}: {problem}")
            self._final(position, "succeeded", text, None, batch, origin, input_digest=digest, decision=decision)
        except (TaskFault, MemoryError, RecursionError) as raised:
            fault = _fault_of(raised)
            error = fault.as_json()
            if self._check is not None and not self._check.is_certain(position, error, because=because):
                open_ends = self._check.unknown_children(position) if because == "loop" else []
                why = {"blocked": open_ends} if open_ends else {"reason": self._supposed(position, error)}
                self._leave_out(position, batch, origin, decision, **why)
                return
            self._final(position, "failed", None, fault.as_json(), batch, origin, decision=decision)
            if task.failure == "stop" and self.stopping is None:
                self.stopping = "task_failed"

    def _enqueue(
        self,
        position: int,
        rendered: dict[str, Any],
        rendered_text: str,
        decision: str | None,
        digest: str,
        snapshot: dict[str, str],
        batch: Batch,
        said: str | None = None,
    ) -> None:
        task = self.index.tasks[position]
        memory = ""
        if task.action_kind in MEMORY_WRITERS:
            key = rendered.get("key")
            if isinstance(key, str) and key in snapshot:
                memory = f',"memory":{{{canonical(key)}:{snapshot[key]}}}'
        if self._check is not None and task.action_kind in ("builtin.read", "builtin.write"):
            foreseen = self._check.foreseen_text(position, rendered.get("path"))
            memory = "" if foreseen is None else f',"foreseen":{canonical(foreseen)}'
        input_json = f'{{"action":{canonical(task.uses_name)},"input":{rendered_text}{memory}}}'
        if task.uses_kind == "agent":
            instructions = "" if said is None else f',"instructions":{canonical(said)}'
            input_json = f'{{"agent":{canonical(task.uses_name)},"input":{rendered_text}{instructions}}}'
        number = self.attempt[position] + 1
        origin = self.state[position]
        batch.readies.append((decision, digest, position))
        batch.enqueues.append(NewAttempt(position, task.id, number, task.timeout_seconds * 1000, input_json))
        batch.brief += task.action_kind in BRIEF_KINDS
        self._bytes += len(input_json)
        self._in_flight.add(position)
        self._move(position, "ready", origin, batch, decision=decision)

    def _instructions(self, position: int, scope: Scope) -> str | None:
        """The rendered instructions of an agent, if they have templates. Raises `TaskFault`."""
        renderer = self.index.instructions(position)
        if renderer is None:
            return None
        said = renderer(scope)
        if not isinstance(said, str):
            raise TaskFault("invalid_input", "the instructions of an agent must be text; this template gives a value")
        return said

    def _decision(
        self, expression: str, own: Any, snapshot: dict[str, str], needs: Iterable[int], result: bool
    ) -> dict[str, Any]:
        """What is kept of a condition: with the digest of all that it could read (contract 4.4)."""
        context = {
            "inputs": self.inputs_digest,
            "vars": [self.vars_digest, own],
            "memory": snapshot,
            "tasks": self._digests(needs),
        }
        return {"expression": expression, "contextDigest": text_digest(canonical(context)), "result": result}

    def _last_decision(self, position: int, scope: Scope, snapshot: dict[str, str]) -> str | None:
        """The guard of a loop after its last iteration, or None if that one did not succeed (contract 2.5)."""
        loop, iterations = self.index.tasks[position].loop, self.index.needs[position]
        if loop is None or self.state[iterations[-1]] != "succeeded":
            return None
        own = compile_vars(loop["vars"], loop.get("dataVars", ()))(scope)
        condition = compile_condition(loop["while"])
        scope.vars = {**self.index.plan.vars, **own}
        needs = (*self.index.needs[iterations[0]], iterations[-1])
        return canonical(self._decision(condition.text, own, snapshot, needs, condition(scope)))

    def _evaluate(self, task: CompiledTask, value: Any, text: str, memory: Mapping[str, Any]) -> str:
        """The output of a task without effect, as canonical text (contract 2.6, 2.7, 3)."""
        if task.route is not None:
            return canonical(choose(task.route, value["select"]))
        if task.uses_kind != "action":
            return text  # a boundary of a sub-workflow: what it renders is what it gives
        kind = task.action_kind
        if kind == "builtin.assign":
            return (
                f'{{"after":{text},"before":null,"changed":false,"diff":null,"output":{text},'
                '"predictability":"fully_predictable","status":"unchanged"}'
            )
        if kind == "builtin.assert":
            that = value.get("that")
            if type(that) is not bool:
                raise TaskFault("invalid_input", f"`that` must be true or false, not {canonical(that)[:80]}")
            if not that:
                message = value.get("message")
                raise TaskFault("assertion_failed", message if isinstance(message, str) else "assertion failed")
            return '{"changed":false,"passed":true,"status":"unchanged"}'
        key = value.get("key")
        if not isinstance(key, str):
            raise TaskFault("invalid_input", "`key` must be text")
        if key not in memory:
            raise TaskFault("memory_key_missing", f"working memory has no key {key!r}")
        return f'{{"changed":false,"status":"unchanged","value":{canonical(memory[key])}}}'

    def _aggregate(self, position: int) -> str:
        """The output of an aggregate: its children in expansion order (contract 2.4, 2.5), from stored texts."""
        children = self.index.needs[position]
        missing = [p for p in children if p not in self._error and p not in self._text]
        if missing:
            self._fetch(missing)
        items = []
        for i, child in enumerate(children):
            error = self._error.get(child)
            message = "null" if error is None else canonical(loads(error)["message"])
            items.append(
                f'{{"error":{message},"index":{i},"output":{self._output_text(child) or "null"},'
                f'"state":"{self.state[child]}","taskId":{canonical(self.index.tasks[child].id)}}}'
            )
        count = ""
        if self.index.tasks[position].uses_kind == "loop_aggregate":
            count = f',"iterations":{sum(self.state[child] != "skipped" for child in children)}'
        return _bounded(
            '{"items":[' + ",".join(items) + f"]{count}}}", MAX_AGGREGATE_CHARACTERS, "the outputs of its children"
        )

    # -- memory and digests ----------------------------------------------------------------------------------------

    def _snapshot(self, position: int) -> dict[str, str]:
        """The readable part of working memory at this position: key to canonical text."""
        if not self._memory:
            return _EMPTY
        reads = self.index.tasks[position].memory_reads
        found: dict[str, str] = {}
        for key in self._memory if reads is None else reads:
            entry = self._memory.get(key)
            if entry is None:
                continue
            place = bisect_left(entry[0], position) - 1
            text = entry[1][place] if place >= 0 else None
            if text is not None:
                found[key] = text
        return found

    def _digests(self, positions: Iterable[int]) -> dict[str, str | None]:
        return {self.index.tasks[position].id: self.digest[position] for position in positions}

    def _input_digest(self, position: int, text: str, own: Any, snapshot: dict[str, str]) -> str:
        """The digest of all that an attempt depends on: input, own variables, readable memory, outputs of its needs."""
        rest = ""
        if own or snapshot or self.index.needs[position]:
            rest = canonical([own, snapshot, self._digests(self.index.needs[position])])
        return text_digest(f"[{text},{rest}]")

    # -- the end ---------------------------------------------------------------------------------------------------

    def _maybe_end(self, batch: Batch, now: int) -> None:
        """End or pause the run if nothing in it can move by itself (contract table, row 24)."""
        if self._timers and self.stopping is None and not self.paused:
            return
        if self.paused and self.stopping is None and self._open:
            batch.run_state, batch.run_reason = "paused", "paused_by_operator"
            return
        if self._open:
            waiting = {state for state in self.state if state.startswith("waiting")}
            if not waiting and self._short:
                # Nobody holds what they wait for: they are tried again, and get it or are denied.
                batch.unheld.extend(self._short.values())
                self._in_flight.update(self._short)
                self._short.clear()
                return
            if not waiting or (self._work and len(self._short) < HELD_WINDOW):
                return
            batch.run_state = "paused"
            batch.run_reason = "approval_required" if "waiting_for_approval" in waiting else "uncertain_effect"
            return
        failed = [p for p, state in enumerate(self.state) if state == "failed"]
        if self.stopping == "cancel_requested":
            batch.run_state, batch.run_reason = "cancelled", "cancel_requested"
            return
        if self.stopping == "deadline_exceeded":
            batch.run_state, batch.run_reason = "failed", "deadline_exceeded"
            message = "the wall time of the run is over (runtime.budgets.maxWallTimeSeconds)"
            late = {"code": "deadline_exceeded", "message": message, "retryable": False, "taskId": None}
            batch.run_error_json = canonical(late)
            batch.compensation_due = self._compensates_itself()
            return
        output: str | None = None
        problem: TaskFault | None = None
        if self.stopping is None:
            try:
                output = self._run_output()
            except (TaskFault, MemoryError, RecursionError) as raised:
                problem = _fault_of(raised)
        if failed:
            first = failed[0]
            if first not in self._error:
                self._fetch([first])
            error = loads(self._error.get(first) or "null") or {"code": "failed", "message": "failed"}
            batch.run_state = "failed"
            batch.run_reason = "worker_lost" if error["code"] == "worker_lost" else "task_failed"
            if self.stopping == "budget_exceeded":
                batch.run_reason = "budget_exceeded"
            batch.run_error_json = canonical({**error, "taskId": self.index.tasks[first].id})
            batch.run_output_json = output
        elif problem is not None:
            batch.run_state, batch.run_reason = "failed", "task_failed"
            batch.run_error_json = canonical({**problem.as_json(), "taskId": None})
        else:
            batch.run_state = "succeeded"
            batch.run_output_json = output
        batch.compensation_due = batch.run_state == "failed" and self._compensates_itself()

    def _compensates_itself(self) -> bool:
        """Whether what this run has done is undone by itself when it fails (contract 5.7)."""
        automatic = self.index.plan.compensation["onFailure"] == "automatic"
        return automatic and self.run.mode not in ("compensation", "check")

    def _run_output(self) -> str:
        """The declared outputs, or without any the outputs of all tasks by id."""
        if self.index.plan.outputs:
            scope = Scope(
                inputs=self.inputs, vars=self.index.plan.vars, memory=_FinalMemory(self._memory), tasks=self._outputs
            )
            if self._check is not None:
                return canonical(self._check.run_output(self.index.plan.outputs, scope))
            output = self.index.outputs(scope)
            _refuse_long(least_length(output), MAX_AGGREGATE_CHARACTERS, "the output of the run")
            return _bounded(canonical(output), MAX_AGGREGATE_CHARACTERS, "the output of the run")
        missing = [p for p, digest in enumerate(self.digest) if digest is not None and p not in self._text]
        if missing:
            self._fetch(missing)
        tasks = sorted((task.id, i) for i, task in enumerate(self.index.tasks) if i in self._text)
        return "{" + ",".join(f"{canonical(task_id)}:{self._text[i]}" for task_id, i in tasks) + "}"


def _told(input_text: str, instructions: str | None) -> str:
    """What an attempt is given, for its input digest: its input, and the instructions that were rendered for it."""
    return input_text if instructions is None else f"{input_text},{canonical(instructions)}"


def _may_come_again(done: FinishedAttempt) -> bool:
    """Whether the effect of an attempt, whose end nobody knows, may be dispatched again by what its action says."""
    if done.effect_class is None or done.idempotency is None:
        return False
    return may_repeat(done.effect_class, done.idempotency)


def _not_converged(task: CompiledTask) -> TaskFault:
    loop = task.loop or {}
    limit = loop.get("maxIterations")
    return TaskFault(
        "loop_limit",
        f"the guard is still true after {limit} iterations, and maxIterations is {limit}",
        details={"maxIterations": limit, "while": loop.get("while")},
    )


class _FinalMemory(Mapping[str, Any]):
    """Working memory after the last task."""

    def __init__(self, memory: dict[str, tuple[list[int], list[str | None]]]) -> None:
        self._memory = memory

    def __getitem__(self, key: str) -> Any:
        text = self._memory[key][1][-1]
        if text is None:
            raise KeyError(key)
        return loads(text)

    def __iter__(self) -> Iterator[str]:
        return (key for key, (_, values) in self._memory.items() if values[-1] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _bounded(text: str, most: int, what: str) -> str:
    _refuse_long(len(text), most, what)
    return text


def _refuse_long(length: int, most: int, what: str) -> None:
    if length > most:
        raise TaskFault(
            "too_large",
            f"{what} would have {length:,} characters as JSON, {most:,} are possible; large data belongs in files",
            details={"characters": length, "limit": most},
        )


def _refuse_long_values(values: Mapping[str, Any], what: str) -> None:
    """Measure values before their text is made. Most tasks have a few short ones, which need no measuring."""
    for value in values.values():
        kind = type(value)
        if kind is dict or kind is list or (kind is str and len(value) > SHORT_CHARACTERS):
            _refuse_long(least_length(values), MAX_INPUT_CHARACTERS, what)
            return


def _shallow(text: str) -> str:
    if nests_deeper(text, MAX_INPUT_DEPTH):
        raise TaskFault(
            "too_large",
            f"the input would nest more than {MAX_INPUT_DEPTH} levels deep; take out of a value only what is needed",
            details={"levels": MAX_INPUT_DEPTH},
        )
    return text


def _fault_of(raised: TaskFault | MemoryError | RecursionError) -> TaskFault:
    if isinstance(raised, TaskFault):
        return raised
    if isinstance(raised, RecursionError):
        return TaskFault("too_large", "its values nest too deep to be read")
    # The frames hold what was being made, and saying so needs memory as well.
    raised.__traceback__ = None
    return TaskFault("too_large", "there is not enough memory for its values; large data belongs in files")


def backoff_ms(policy: RetryPolicy, attempt: int, uniform: float, error: dict[str, Any]) -> int:
    """How long to wait before the attempt after `attempt`: exponential, bounded, with up to a tenth of jitter.

    A `retryAfterMs` in the error's details (a server has said when to come again) is a lower bound.
    """
    wait = min(float(policy.max_backoff_ms), policy.backoff_ms * policy.backoff_multiplier ** (attempt - 1))
    wait += wait * 0.1 * uniform
    details = error.get("details") or {}
    return int(max(wait, min(details.get("retryAfterMs", 0), DAY_MS)))
