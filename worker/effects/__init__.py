"""Effects by kind: what a worker can do to the outside world, and the protocol between an attempt and an
action.

An attempt hands a `Work` to `prepare`. That makes the static checks (paths, programs, environment names,
types of `with`), changes nothing, and returns either `Done` (finished without an effect) or an
`EffectPlan`. The attempt records and starts the effect of that plan, and only then calls `plan.execute`,
which never raises for anything that the outside world does: the outcome is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy
from agentctl.store.records import Fence, MemoryWrite, ProtocolNote, record

if TYPE_CHECKING:
    from agentctl.store.engine import Store

Status: TypeAlias = Literal["succeeded", "failed", "uncertain", "not_dispatched"]


class CancelToken(Protocol):
    """Tells a running effect to end. `fileno()` becomes readable, and stays so, when it is cancelled."""

    def fileno(self) -> int: ...

    @property
    def cancelled(self) -> bool: ...

    @property
    def reason(self) -> str | None:
        """`cancel_requested`, `drain`, `lease_lost`, `deadline` (of the run) or `timeout` (of the attempt); None as
        long as it is not cancelled."""
        ...


@record
class Work:
    """What an attempt gives to an action.

    `action` is the action's definition (JSON, camelCase). `input` is the rendered `with`. `memory` holds
    the keys that the task can read; a missing key is absent. `timeout_seconds` is the limit of the attempt.
    `base_path` is the folder that `policy.workspaceRoot` is relative to. `recorded` is the `expectedEffect`
    of an effect row that an earlier delivery of the same attempt requested, else None. `force_effect`: an
    unchanged `builtin.write` is an effect, too (a compensation run, contract 3). `show_diff`: what a write would do is
    shown with a diff; `record_diff`: its output has it, too. `foreseen` is what the file would hold
    by now according to earlier writes of a run in check mode, which were not carried out. `workspace` is the resolved
    workspace root if the caller knows it already (a worker resolves it once per run). `long_term` is
    `spec.memory.longTerm`, None when the document has none. `prices` are those of `runtime.pricing.models`.
    """

    task_id: str
    action_name: str
    kind: str
    action: Mapping[str, Any]
    input: dict[str, Any]
    memory: Mapping[str, Any]
    timeout_seconds: float
    base_path: str
    policy: Policy
    show_diff: bool = False
    record_diff: bool = False
    recorded: Mapping[str, Any] | None = None
    force_effect: bool = False
    foreseen: str | None = None
    workspace: str | None = None
    long_term: Mapping[str, Any] | None = None
    prices: Mapping[str, Any] | None = None


@dataclass(slots=True)
class EffectContext:
    """What a dispatch knows: the effect's id, its cancel token, the clock that its limits are measured by, the
    worker (process id of the store) that dispatches, and the database, for effects that look at it. With `fence` an
    effect may tell about itself while it runs; `reach` is for crash points (see `store.faults`). `repeats` is the
    idempotency key, where that is not the id: that of the effect which this one repeats."""

    effect_id: str
    token: CancelToken
    monotonic: Callable[[], float]
    holder: str = ""
    store: Store | None = None
    fence: Fence | None = None
    reach: Callable[[str], None] = lambda point: None
    repeats: str | None = None

    @property
    def key(self) -> str:
        """By what the other side tells a repetition, and we the processes of the effect."""
        return self.repeats or self.effect_id

    def tell(self, note: ProtocolNote) -> None:
        """Make it durable what is known of the remote side by now. Raises `LeaseLost`: then nothing more is sent."""
        if self.store is not None and self.fence is not None:
            self.store.tell_protocol(self.fence, self.effect_id, note)


@record
class EffectOutcome:
    """How one dispatch ended.

    `succeeded`: `result` is the action's output. `failed`: the effect definitely failed. `uncertain`: it
    was dispatched and nobody knows how far it came. `not_dispatched`: provably nothing happened (contract
    row 22).

    For the last three `error` is `TaskFault.as_json()`. A process that failed or was ended may have a
    `result`, too: what it printed so far, for `logs`; it is never a task's output. `usage` is in budget
    units. `notes` are findings for people (processes that were left behind and had to be ended, say).
    `memory` is a write to long-term memory that comes true with the confirmation of the effect, never without.
    `protocol` is what is known of the remote side at the end.
    """

    status: Status
    result: Any = None
    error: dict[str, Any] | None = None
    usage: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    memory: MemoryWrite | None = None
    protocol: ProtocolNote | None = None

    @classmethod
    def not_dispatched(cls, fault: TaskFault) -> EffectOutcome:
        return cls("not_dispatched", error=fault.as_json())

    @classmethod
    def failed(cls, fault: TaskFault) -> EffectOutcome:
        return cls("failed", error=fault.as_json())


@record
class Written:
    """A file that an effect writes, and its bytes: what is kept is what this effect wrote, whoever writes next."""

    path: str
    data: bytes


@record
class Declared:
    """Files that a process promises to leave: paths, or globs, below the workspace or absolute (contract row 11).

    `workspace` and `roots` (the writable ones) are resolved.
    """

    patterns: tuple[str, ...]
    workspace: str
    roots: tuple[str, ...]


@record
class Several:
    """What several effects of one attempt leave, in the order in which they were confirmed."""

    parts: tuple[Written | Declared, ...]


@record
class InAnswer:
    """What the answer of an effect brings with it (`a2a.delegate`): only the recorded result tells (`kept_of`)."""


Keeps: TypeAlias = Written | Declared | Several


@record
class EffectPlan:
    """An effect that is ready to be requested.

    `input` is what is recorded and digested for the effect's identity (contract 3 and 5.1).
    `expected_effect` is recorded with the request and shown to who approves. `estimate` is reserved before
    the start, in budget units. `foreseen` is the output, if it is known without carrying the effect out. `keeps` is
    what becomes artifacts when it has succeeded. What `asks` a service is not carried out by a check, whatever its
    class.
    """

    operation: str
    effect_class: str
    risk: str
    idempotency: str
    policy_name: str
    input: dict[str, Any]
    expected_effect: dict[str, Any]
    estimate: dict[str, int]
    execute: Callable[[EffectContext], EffectOutcome]
    foreseen: dict[str, Any] | None = None
    keeps: Keeps | InAnswer | None = None
    asks: bool = False


@record
class Done:
    """Finished without an effect: no row, no approval, no charge (an unchanged `builtin.write`, contract
    3)."""

    output: dict[str, Any]


Preparer: TypeAlias = Callable[[Work], EffectPlan | Done]

# Named, not imported: a worker loads only the kinds that its tasks use.
_BUILTIN: Final[dict[str, tuple[str, str]]] = {
    "builtin.read": ("files", "prepare_read"),
    "builtin.write": ("files", "prepare_write"),
    "builtin.memory.write": ("memory", "prepare_memory_write"),
    "builtin.long_term_memory.read": ("long_term", "prepare_read"),
    "builtin.long_term_memory.search": ("long_term", "prepare_search"),
    "builtin.long_term_memory.write": ("long_term", "prepare_write"),
    "builtin.long_term_memory.promote": ("long_term", "prepare_promote"),
    "builtin.shell.exec": ("shell", "prepare_shell"),
    "extension.process": ("extension", "prepare_extension"),
    "mcp.call": ("mcp", "prepare_mcp"),
    "a2a.delegate": ("a2a", "prepare_a2a"),
}
_preparers: dict[str, Preparer] = {}


def register(kind: str, preparer: Preparer) -> None:
    """Make `prepare` know another kind of action, or replace one."""
    _preparers[kind] = preparer


def supported(kind: str) -> bool:
    """Whether `prepare` knows this kind of action."""
    return kind in _preparers or kind in _BUILTIN


def prepare(work: Work) -> EffectPlan | Done:
    """Check a piece of work and describe its effect, without any outside effect.

    Raises `TaskFault`: `policy_denied`, `invalid_input`, `not_found`, `io_error`, or
    `unsupported_capability` for a kind that this worker does not have.
    """
    preparer = _preparers.get(work.kind)
    if preparer is None:
        preparer = _load(work.kind)
        _preparers[work.kind] = preparer
    return preparer(work)


def _load(kind: str) -> Preparer:
    if kind not in _BUILTIN:
        raise TaskFault("unsupported_capability", f"this worker has no action kind {kind}")
    module, name = _BUILTIN[kind]
    preparer: Preparer = getattr(import_module(f"{__name__}.{module}"), name)
    return preparer


def kept(work: Work) -> Keeps | InAnswer | None:
    """What a succeeded effect of this work leaves, without planning it again: its secrets, its working folder and its
    program may be gone, and its result is recorded. Raises `TaskFault` as `prepare` does."""
    if work.kind == "builtin.shell.exec":
        from .shell import kept_by_command

        return kept_by_command(work)
    if work.kind == "builtin.write":
        from .files import kept_by_write

        return kept_by_write(work)
    return InAnswer() if work.kind == "a2a.delegate" else None


def vouched(keeps: Keeps | InAnswer | None, *, confirmed: bool) -> Keeps | InAnswer | None:
    """What to store of an effect whose result is recorded. Of files that a person tells about in a reconciliation
    nobody has seen any; an answer holds what it brings, whoever has told it."""
    return keeps if confirmed or isinstance(keeps, InAnswer) else None


def kept_of(keeps: Keeps | InAnswer | None, result: Any, taken: Iterable[str] = ()) -> Keeps | None:
    """What is to be stored of an effect whose recorded result is known; `taken` are logical paths that are not free."""
    if not isinstance(keeps, InAnswer):
        return keeps
    from .a2a_artifacts import artifacts_of

    found = artifacts_of(result, taken)
    return Several(found) if found else None


def refuse_cancelled(context: EffectContext) -> EffectOutcome | None:
    """The outcome of an effect whose token was cancelled before anything was sent, else None."""
    if not context.token.cancelled:
        return None
    reason = context.token.reason
    return EffectOutcome.not_dispatched(
        TaskFault("cancelled", f"ended before it was dispatched: {reason}", details={"reason": reason})
    )
