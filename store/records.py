"""What crosses the border of the store: frozen records, no handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from .errors import LeaseLost

Record = TypeVar("Record")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[Record]) -> type[Record]:
    """A dataclass that nobody changes: the type checker sees to that.

    At runtime it is not frozen, because the constructor of a frozen one takes five times as long, and an attempt
    makes some twenty records. Nor has it a hash, which would double the time of importing this module.
    """
    return dataclass(slots=True)(cls)


RUNTIME_STATE_VERSION = 1
PLAN_FORMAT_VERSION = 1
EFFECT_FORMAT_VERSION = 1
CHECKPOINT_FORMAT_VERSION = 1
AUDIT_EVENT_VERSION = 1
BUDGET_FORMAT_VERSION = 1
TASK_METADATA_VERSION = 1
APPROVAL_FORMAT_VERSION = 1
RECONCILIATION_FORMAT_VERSION = 1
PROTOCOL_SESSION_VERSION = 1
PROTOCOL_CALL_VERSION = 1
PROVIDER_SESSION_FORMAT_VERSION = 1
STREAM_EVENT_FORMAT_VERSION = 1


@record
class NewRun:
    """A compiled run that does not exist yet. All texts are canonical JSON."""

    run_id: str
    trace_id: str
    mode: str
    workflow_name: str
    workflow_digest: str
    plan_digest: str
    submission_digest: str
    workflow_json: str
    plan_json: str
    inputs_json: str
    settings_json: str
    base_path: str
    task_ids: tuple[str, ...]
    max_concurrency: int
    max_deliveries: int
    memory: dict[str, str]
    budget_limits: dict[str, int] = field(default_factory=dict)
    """Ledger dimension to limit; `wallTimeSeconds` becomes the deadline, counted from the creation of the run."""
    pricing_version: str | None = None
    planned_expansion_items: int = 0
    planned_loop_iterations: int = 0
    priority: int = 0
    idempotency_key: str | None = None
    actor: str = "cli-user"
    parent_run_id: str | None = None
    """The run of which this one is a replay or a fork (contract 9.1)."""
    source_run_id: str | None = None
    """The run that this one retries, repairs or compensates (contract 9.1)."""
    lineage_json: str | None = None
    """Why and how it was derived: `{formatVersion, sourceWorkflowDigest, roots, reason, failedOnly, ...}`."""


@record
class Run:
    """The row of a run."""

    run_id: str
    workflow_name: str
    workflow_digest: str
    plan_digest: str
    mode: str
    state: str
    reason: str | None
    error_json: str | None
    trace_id: str
    priority: int
    base_path: str
    parent_run_id: str | None
    source_run_id: str | None
    first_task: int
    task_count: int
    max_concurrency: int
    max_deliveries: int
    deadline_at: int | None
    cancel_requested_at: int | None
    pause_requested_at: int | None
    revision: int
    epoch: int
    driver: str | None
    driver_lease_expires_at: int | None
    created_at: int
    updated_at: int
    ended_at: int | None


@record
class RunDocuments:
    """The immutable texts of a run."""

    workflow_json: str
    plan_json: str
    inputs_json: str
    settings_json: str


@record
class TaskRow:
    """The state of a task, without its output."""

    position: int
    task_id: str
    state: str
    attempt: int
    output_digest: str | None
    retry_at: int | None


@record
class Fence:
    """The right to write for one delivery of an attempt (architecture 4)."""

    attempt_id: int
    delivery: int
    holder: str

    def lost(self) -> LeaseLost:
        """What to raise where it does not hold any more."""
        return LeaseLost(f"attempt {self.attempt_id}, delivery {self.delivery} was taken away")


class HeldClaim(NamedTuple):
    """A claimed attempt as others see it: which delivery, who holds it, and until when (epoch ms)."""

    attempt_id: int
    delivery: int
    holder: str
    run_id: str
    lease_expires_at: int


@record
class Claim:
    """A claimed attempt: what a worker has to know to execute it."""

    fence: Fence
    run_id: str
    task_id: str
    number: int
    timeout_ms: int
    input_json: str
    trace_id: str
    enqueued_at: int
    lease_expires_at: int


@record
class ApprovalAsk:
    """Why an effect needs the approval of a person, and what that person is shown (contract 4.7).

    `redacted_json` is the input without anything that looks like a secret; `agent` is set for tools of a model only.
    """

    reason: str
    tool: str
    capability: str
    redacted_json: str
    agent: str | None = None


@record
class NextRun:
    """The run that is served next, and whether other runs wait beside it."""

    run_id: str
    trace_id: str
    others: bool


@record
class Candidate:
    """A ready attempt that nobody has claimed yet, seen without any lock: a worker may prepare for it, and lose it."""

    attempt_id: int
    run_id: str
    task_id: str
    number: int
    timeout_ms: int
    input_json: str
    trace_id: str = ""
    others: bool = False


@record
class ToolCallStart:
    """The call of a model that an effect carries out. `call_id` is the model's own name of it."""

    call_id: str
    tool_id: str
    input_digest: str


@record
class SessionUpdate:
    """Where the conversation of a task stands after an answer. `continuation_json` is what the provider gave, if it
    gave something; `attempt` is the number of the attempt that talks."""

    provider: str
    attempt: int
    continuation_json: str | None


@record
class EffectRequest:
    """An effect before its dispatch (contract 5.2). `input_json` and `expected_json` are canonical.

    With `approval` it starts only after a person has approved exactly this action. `tool_call` is the call that it
    carries out; its row begins and ends with the effect.
    """

    effect_id: str
    ordinal: int
    operation: str
    effect_class: str
    risk: str
    idempotency: str
    input_digest: str
    input_json: str
    expected_json: str
    estimate: dict[str, int]
    approval: ApprovalAsk | None = None
    tool_call: ToolCallStart | None = None


@record
class StartedEffect:
    """The effect is durably `started`: dispatch it. `dispatch` counts from 1.

    `key` is its idempotency key, where that is not its id.
    """

    dispatch: int
    key: str | None = None


@record
class RecordedEffect:
    """The effect has ended before: use what was recorded, dispatch nothing.

    `reconciled`: the result is that of a reconciliation, not of the effect's own row.
    """

    status: str
    result_json: str | None
    error_json: str | None
    reconciled: bool = False


@record
class RecordedStep:
    """An effect of an attempt whose result is known. `result_json` is canonical.

    `confirmed`: by its worker, not by a person afterwards. `undone`: it was compensated since, so its result is nothing
    to go on with.
    """

    effect_id: str
    result_json: str | None
    confirmed: bool = True
    undone: bool = False


@record
class AttemptHeld:
    """The delivery is over: the attempt waits for `approval` or `budget`, and its worker is free."""

    why: str
    approval_id: str | None = None


@record
class StartRefused:
    """The effect must not start now: `cancel_requested`, `paused`, `deadline` or `budget`."""

    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


@record
class Following:
    """What a worker does next: the claim, and how the start of its effect was answered if that was tried with it."""

    claim: Claim
    answer: StartedEffect | RecordedEffect | StartRefused | AttemptHeld | None = None


@record
class MemoryWrite:
    """An entry of long-term memory that is to be put; `entry_json` is canonical (see `long_term.new_write`)."""

    namespace: str
    key: str
    entry_json: str
    terms: str
    embedding_provider: str
    embedding_dimensions: int
    embedding: bytes
    expires_at: int | None


@record
class ProtocolNote:
    """What an effect knows of its remote side (see `protocols`). Texts are canonical JSON.

    `call_identity` (the tool of an MCP server, the message of an A2A agent) never changes for an effect. With
    `session_json` a session has just been made, the first one of the task or another one.
    """

    protocol: str
    peer: str
    call_identity: str
    status: str
    state_json: str
    session_json: str | None = None


@record
class EffectEnd:
    """How a dispatch ended.

    `succeeded`, `failed`, `uncertain` are ends of the effect. The others concern the dispatch only: `requested` (it
    provably never began; the effect may start again), `cancelled` (it provably never began and never will) and `lost`
    (it was ended half-way, and its contract allows to send it again: it stays charged). `usage` is in budget units;
    `reserved` is false for an effect that estimates none, so that there is nothing to settle. `memory` is the write to
    long-term memory that the effect consists of; it is carried out in the transaction that confirms the effect, and
    `session` is where the conversation stands with it. `protocol` is what is known of its remote side at the end.
    """

    effect_id: str
    status: str
    result_json: str | None = None
    error_json: str | None = None
    notes_json: str | None = None
    dispatch: int = 1
    usage: dict[str, int] = field(default_factory=dict)
    reserved: bool = True
    memory: MemoryWrite | None = None
    protocol: ProtocolNote | None = None
    session: SessionUpdate | None = None


@record
class AttemptEnd:
    """How a delivery ended: `succeeded`, `failed`, `uncertain` or `cancelled`.

    A result that is the result of the last effect is not stored twice: `result_effect` names the effect instead.
    """

    outcome: str
    result_json: str | None = None
    result_effect: str | None = None
    error_json: str | None = None


@record
class FinishedAttempt:
    """An attempt that waits for its batch commit."""

    attempt_id: int
    position: int
    number: int
    outcome: str
    result_json: str | None
    error_json: str | None
    effect_id: str | None
    effect_class: str | None
    idempotency: str | None
    artifacts_json: str | None = None
    """The manifest of what it has ingested, or None."""
    bound: bool = False
    """It is uncertain or failed, and its task has done things that must not be repeated: no other attempt follows."""


@record
class NewArtifact:
    """A file that an attempt has ingested. `path` is its logical path: below the workspace, else absolute."""

    path: str
    digest: str
    size_bytes: int


@record
class SourceFile:
    """A declared file as it was when the effect that left it was confirmed; `path` as in `NewArtifact`."""

    path: str
    size_bytes: int
    modified_ns: int
    inode: int


@record
class LiveAttempt:
    """An attempt that is not closed."""

    attempt_id: int
    position: int
    number: int
    state: str
    hold: str | None


@record
class HeldAttempt:
    """An attempt that holds no place: `why` is `approval`, `budget` or `place` (see `holds`)."""

    attempt_id: int
    position: int
    number: int
    why: str


@record
class NewReconciliation:
    """What a person says about an effect (contract 5.5). All texts ending in `_json` are canonical.

    `status` is `applied`, `not_applied` or `compensated`. Result, schema and policy have been checked by the caller.
    `usage` is what an applied effect has used in budget units, if its result tells; None: what was reserved.
    """

    reconciliation_id: str
    effect_id: str
    status: str
    actor: str
    reason: str
    evidence_json: str
    authorization_json: str
    result_json: str | None = None
    result_schema_json: str | None = None
    compensation_effect_id: str | None = None
    protocol: ProtocolNote | None = None
    """What was observed of the remote side, when that is where the conclusion comes from."""
    usage: dict[str, int] | None = None


@record
class Event:
    """An audit event of the transaction that writes it. `payload_json` is JSON text."""

    event_type: str
    task_id: str | None
    payload_json: str


@record
class NewAttempt:
    """An attempt to be enqueued."""

    position: int
    task_id: str
    number: int
    timeout_ms: int
    input_json: str


@dataclass(slots=True)
class Batch:
    """What one driver transaction commits (architecture 5). Built by the scheduler, written by `commits.commit_batch`.

    `finals` are (state, attempt, input_digest, output_json, output_digest, error_json, decision_json, delta_json,
    delta_digest, position) of tasks that end; `waits` are (state, retry_at, error_json, position) of tasks that stop
    running without an end. Positions are in compiled order. `abandoned` are those of `closed` that end without a result
    and may have requested what is never sent. `artifacts` are (attempt, position, manifest) of successes
    that have ingested something; `proofs` are (definition fingerprint, output-contract fingerprint) by position, of all
    successes. `undone` are (position, source effects) of tasks of a compensation run that end; `compensation_due`: the
    run fails, and its declared compensation starts by itself. `brief` is how many of `enqueues` are of `BRIEF_KINDS`.
    """

    finals: list[tuple[Any, ...]] = field(default_factory=list)
    waits: list[tuple[Any, ...]] = field(default_factory=list)
    readies: list[tuple[str | None, str | None, int]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    superseded: list[str] = field(default_factory=list)
    abandoned: list[int] = field(default_factory=list)
    enqueues: list[NewAttempt] = field(default_factory=list)
    brief: int = 0
    unheld: list[int] = field(default_factory=list)
    memory: list[tuple[str, int, str | None]] = field(default_factory=list)
    artifacts: list[tuple[int, int, str]] = field(default_factory=list)
    proofs: dict[int, tuple[str, str]] = field(default_factory=dict)
    undone: list[tuple[int, list[str]]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    changes: list[list[Any]] = field(default_factory=list)
    stop: str | None = None
    run_state: str | None = None
    run_reason: str | None = None
    run_error_json: str | None = None
    run_output_json: str | None = None
    compensation_due: bool = False

    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.finals
            or self.waits
            or self.closed
            or self.parked
            or self.enqueues
            or self.unheld
            or self.stop
            or self.run_state
        )


@record
class ProcessRow:
    """A process that works, or worked, on the database."""

    process_id: str
    kind: str
    name: str
    identity: str
    pid: int
    parent_process_id: str | None
    only_run: str | None
    unit: str | None
    state: str
    version: str
    started_at: int
    heartbeat_at: int
    drain_requested_at: int | None
    stopped_at: int | None
    done: int
    failed: int
    rss_bytes: int

    @property
    def drains(self) -> bool:
        """Whether it takes nothing new any more, since somebody has asked it to drain or a signal has told it to."""
        return self.drain_requested_at is not None or self.state == "draining"
