"""What is wrong with a document, and where. Pure: no I/O.

A diagnostic is one finding with a stable code (contract 1.1); a `DocumentError` carries all findings of
one reading or one compilation, so that a person repairs a file in one go. Lines and columns count from 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from agentctl.store.errors import UsageError

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands in a document: field names and list indices from the root."""

MAX_DIAGNOSTICS = 100
"""A document with more findings than this is reported up to here, with a last line that gives the number
left out.
"""

CODES = frozenset(
    {
        "yaml_syntax",
        "schema_violation",
        "unsupported_version",
        "migration_required",
        "duplicate_task",
        "missing_reference",
        "dependency_cycle",
        "invalid_template",
        "unsupported_capability",
        "invalid_secret_reference",
        "policy_denied",
        "incompatible_state",
    }
)
"""The closed list of codes (contract 1.1)."""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `path` is dotted (`spec.tasks[2].with.path`); everything after `message` may be absent."""

    code: str
    message: str
    severity: str = "error"
    file: str | None = None
    line: int | None = None
    column: int | None = None
    path: str | None = None
    help: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The object of the JSON envelope (contract 1.1); absent parts are null."""
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "path": self.path,
            "help": self.help,
        }

    def as_text(self) -> str:
        """One line for a terminal: `file:line:column: code: message (path)`. What helps is told apart from it."""
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        text = f"{place}: {self.code}: {self.message}" if place else f"{self.code}: {self.message}"
        if self.severity != "error":
            text = text.replace(f"{self.code}: ", f"{self.severity}: {self.code}: ", 1)
        if self.path:
            text += f" ({self.path})"
        return text


REMEDIES = {
    "yaml_syntax": "correct the YAML here, or right before this place",
    "schema_violation": "`agentctl schema` prints what is allowed at each place",
    "unsupported_version": "use `apiVersion: agentctl.dev/v1`",
    "migration_required": "write it as a document with `apiVersion: agentctl.dev/v1`",
    "duplicate_task": "give each task an id of its own",
    "missing_reference": "give the name of something that is there",
    "dependency_cycle": "remove one of these `needs`",
    "invalid_template": "a template reads ${{ inputs.NAME }}, ${{ vars.NAME }} or ${{ tasks.ID.output.KEY }}",
    "unsupported_capability": "leave it out: this version cannot do it",
    "invalid_secret_reference": "a secret is {env: NAME}, {file: PATH} or {process: {command: PROGRAM}}",
    "policy_denied": "allow it under `policy`, or leave it out",
    "incompatible_state": "start a new run",
}
"""What to do about a finding that has no better advice of its own."""


class DocumentError(UsageError):
    """A document cannot be used; nothing was changed. `diagnostics` is never empty and sorted by place."""

    def __init__(self, diagnostics: Iterable[Diagnostic], *, more: int = 0) -> None:
        """`more` is how many further findings there are that nobody has worked out."""
        found = sorted(
            (item if item.help else replace(item, help=REMEDIES.get(item.code)) for item in diagnostics),
            key=lambda item: (item.file or "", item.line or 0, item.column or 0, item.path or ""),
        )
        left = max(0, len(found) - MAX_DIAGNOSTICS) + more
        if left:
            found = [
                *found[:MAX_DIAGNOSTICS],
                Diagnostic("schema_violation", f"{left} more findings not shown"),
            ]
        self.diagnostics: tuple[Diagnostic, ...] = tuple(found)
        super().__init__(render_diagnostics(self.diagnostics), remedy=found[0].help if found else None)


def render_diagnostics(diagnostics: Sequence[Diagnostic]) -> str:
    """All findings as text, one a line."""
    return "\n".join(item.as_text() for item in diagnostics)


def dotted(path: Sequence[str | int]) -> str:
    """`("spec", "tasks", 2, "id")` as `spec.tasks[2].id`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def did_you_mean(word: str, known: Iterable[str], *, else_list: str | None = None) -> str | None:
    """`did you mean X?` for the closest known word; otherwise `else_list` and all known words when they are
    few.
    """
    from difflib import get_close_matches

    words = sorted(known)
    if len(words) > 1000:
        near = [item for item in words if item[:1] == word[:1] and abs(len(item) - len(word)) <= 2]
        words = near[:1000]
    lowered = {item.lower(): item for item in words}
    close = get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    if close:
        return f"did you mean {lowered[close[0]]!r}?"
    if else_list is not None and words and len(words) <= 40:
        return f"{else_list}: {', '.join(words)}"
    return None
