"""Where the files may lie that a document names: in its workspace, or beside it (contract 1.4 and 11.3)."""

from __future__ import annotations

import os
from collections.abc import Callable

from agentctl.store.policy import is_inside

Report = Callable[[str, str, str | None], None]
"""Takes note of a finding: code, message, help."""


def locate(name: str, what: str, home: str, workspace: str, elsewhere: str, report: Report) -> str | None:
    """The real path of a file that a document names, or None when that was refused; then `report` was told why.

    `home` (the folder of the document) and `workspace` are real paths. `what` and `elsewhere` are for people: what the
    file is, and what helps when it lies somewhere else.
    """
    if "${{" in name:
        report("invalid_template", f"the path of {what} is literal", None)
        return None
    if ".." in name.split("/"):
        hint = "name a file beside the workflow, below it, or in the workspace"
        report("policy_denied", f"the path {name!r} has a '..' component", hint)
        return None
    try:
        resolved = os.path.realpath(os.path.join(home, name))
    except (OSError, ValueError) as error:
        report("missing_reference", f"{name!r} is no path: {error}", None)
        return None
    if not is_inside(resolved, workspace) and not is_inside(resolved, home):
        message = f"{name!r} leads out of the workspace and of the folder of the workflow"
        report("policy_denied", message, elsewhere)
        return None
    return resolved
