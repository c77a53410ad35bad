"""Records of the future are refused, never guessed at (contract, section 0). Pure."""

from __future__ import annotations

from .errors import IncompatibleVersion
from .records import PLAN_FORMAT_VERSION, RUNTIME_STATE_VERSION


def check_versions(run_id: str, runtime_version: int, plan_version: int) -> None:
    """Raise `IncompatibleVersion` for a run that a newer agentctl has written."""
    if runtime_version > RUNTIME_STATE_VERSION or plan_version > PLAN_FORMAT_VERSION:
        raise IncompatibleVersion(
            f"{run_id} was written by a newer agentctl (runtime state {runtime_version}, plan {plan_version}); "
            "nothing was changed",
            remedy="upgrade agentctl",
            run_id=run_id,
        )
