"""Every error that agentctl raises on purpose. Pure: no I/O.

    AgentctlError
    ├── UsageError            exit 2   bad input: a flag, a document, an input value
    ├── PolicyError           exit 3   a policy refused something outside a task
    ├── NotFoundError         exit 5   an id that the database does not know
    ├── ConflictError         exit 5   another process or an earlier decision stands in the way
    │   ├── LeaseLost         exit 5   the fence (attempt, delivery, holder) no longer holds
    │   ├── RunMoved          exit 5   epoch or revision of the run changed under a decision
    │   └── LockHeld          exit 5   another process holds a lock of the artifact store, and does not let go
    ├── AlreadyTerminal       exit 4   the run has ended; there is nothing to go on with or to pause
    ├── NotTerminal           exit 4   the run goes on; what needs its end has to wait for it
    ├── RecoveryBlocked       exit 3   what was done before cannot be proven to be reusable, or is unsafe to repeat
    ├── UncertainError        exit 3   an operator has to reconcile an effect first
    ├── EnvironmentFault      exit 5   disk, permission, filesystem, missing feature of the machine
    ├── PrerequisiteError     exit 6   something that a run needs is not there: a credential, a name's address, an extra
    └── StoreError            exit 5   the database itself
        ├── IncompatibleVersion        written by a newer or another program; nothing was changed
        └── CorruptStore               a checksum, an invariant or SQLite says that it is damaged

Each class carries the process exit code (contract 4.10) and a stable word for `error.code` of the JSON envelope, so the
command line needs no mapping table. Outcomes of attempts are data (`TaskFault` below is what becomes such data),
never exceptions that cross a process.
"""

from __future__ import annotations

from typing import Any


class AgentctlError(Exception):
    """Root of all expected errors. `remedy` tells a person what to do next."""

    exit_code = 4
    code = "error"

    def __init__(self, message: str, *, remedy: str | None = None, run_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.run_id = run_id


class UsageError(AgentctlError):
    """The caller's words or files are wrong; nothing was changed."""

    exit_code = 2
    code = "usage"


class PolicyError(AgentctlError):
    """A policy refused something before a run existed."""

    exit_code = 3
    code = "blocked"


class NotFoundError(AgentctlError):
    """An id that this database does not know."""

    exit_code = 5
    code = "not_found"


class ConflictError(AgentctlError):
    """Somebody else's earlier decision stands; nothing was changed."""

    exit_code = 5
    code = "conflict"


class LeaseLost(ConflictError):
    """A guarded write of a worker changed no row: its delivery of the attempt is over."""

    code = "conflict"


class RunMoved(ConflictError):
    """A batch was decided on an epoch or revision that is no longer current; decide again."""

    code = "busy"


class LockHeld(ConflictError):
    """A lock of the artifact store stays taken; the message names who has it."""

    code = "busy"


class AlreadyTerminal(AgentctlError):
    """The run has ended (contract 4.9 and 4.10)."""

    code = "already_terminal"


class NotTerminal(AgentctlError):
    """The run goes on: it cannot be replayed, compensated or taken as the source of another (contract 4.10)."""

    code = "not_terminal"


class RecoveryBlocked(AgentctlError):
    """A retry or repair that its plan does not allow (contract 9.2); `diagnostics` has one finding for each block."""

    exit_code = 3
    code = "blocked"

    def __init__(
        self, message: str, *, diagnostics: tuple[Any, ...] = (), remedy: str | None = None, run_id: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, run_id=run_id)
        self.diagnostics = diagnostics


class UncertainError(AgentctlError):
    """An effect was started and never confirmed; a person has to reconcile it."""

    exit_code = 3
    code = "uncertain_effect"


class EnvironmentFault(AgentctlError):
    """The machine does not let us work: disk, permission, filesystem."""

    exit_code = 5
    code = "environment"


class PrerequisiteError(AgentctlError):
    """Something outside this machine's own state that a run needs is missing; found before the run exists."""

    exit_code = 6
    code = "environment"


class StoreError(AgentctlError):
    """The database cannot be used."""

    exit_code = 5
    code = "corrupt"


class IncompatibleVersion(StoreError):
    """Written by a newer version or by another program. Refused; the file is left as it was."""

    code = "incompatible_version"


class CorruptStore(StoreError):
    """SQLite, a checksum or an invariant says that the database is damaged."""

    code = "corrupt"


class TaskFault(AgentctlError):
    """Why one task (not the program) failed. It is caught at the edge of an attempt or a commit and stored as data.

    `code` is a stable word (`assertion_failed`, `template_error`, `policy_denied`, `output_contract`, …),
    `retryable` says whether the task's retry policy may start another attempt (contract table, row 9), and `details`
    is JSON that helps a person to find the cause.
    """

    exit_code = 4

    def __init__(
        self, code: str, message: str, *, retryable: bool = False, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.details = details

    def as_json(self) -> dict[str, Any]:
        """The stored form: `{code, message, retryable, details?}`."""
        data: dict[str, Any] = {"code": self.code, "message": self.message, "retryable": self.retryable}
        if self.details is not None:
            data["details"] = self.details
        return data
