"""Secrets that stand in what a run would store: found before the run exists, and refused (contract 11.2).

A document, its variables, its instructions and its inputs are stored as they are; whoever copies a value into one of
them has it in clear in the database and in each of its backups. Looked for are the variables and files that the
document refers to, as far as this process may and can read them; no command is started for this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentctl.store.errors import PolicyError

if TYPE_CHECKING:
    from agentctl.coordinator.definition import LoadedDocument
    from agentctl.coordinator.plan import Plan

_HOLDERS = ("actions", "providers", "mcpServers", "a2aPeers", "tools")
"""The parts of a spec with references to secrets, and `policy.network.customCa`."""


_OF_A_LOGIN = frozenset(
    {
        "DISPLAY",
        "EDITOR",
        "HOME",
        "HOSTNAME",
        "LANG",
        "LANGUAGE",
        "LOGNAME",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "TERM",
        "TMPDIR",
        "TZ",
        "USER",
        "WAYLAND_DISPLAY",
    }
)
"""Variables that every session has, with what their names begin with: whoever passes them on has no secret in mind."""
_OF_A_LOGIN_PREFIXES = ("LC_", "XDG_")


def refuse_stored_secrets(document: LoadedDocument, plan: Plan, inputs: Mapping[str, Any], base: Path) -> None:
    """Raise `PolicyError` (exit 3), which names the place and the reference, for a secret that would be stored.

    `inputs` are those that would be stored with the run. `base` is what `policy.workspaceRoot` is relative to. Values
    of less than 8 bytes turn up by chance, and are not looked for.
    """
    spec = document.workflow["spec"]
    held = {name: spec[name] for name in _HOLDERS if spec[name]}
    ca = spec["policy"]["network"]["customCa"]
    if not held and ca is None:
        return
    from agentctl.store.policy import Policy
    from agentctl.worker.run_secrets import readable_secrets

    policy = Policy.from_json(plan.policy)
    workspace = os.path.realpath(os.path.join(base, policy.workspace_root))
    references = [*(_of_fields(held[name]) for name in held), ca]
    found = readable_secrets(references, spec["providers"], policy, workspace)
    secrets = [secret for secret in found if not _is_of_a_login(secret.source)]
    if not secrets:
        return
    from agentctl.worker.redaction import place_of

    for where, value in _stored(document, inputs):
        for secret in secrets:
            place = place_of(secret.value, value)
            if place is not None:
                raise PolicyError(
                    f"{where}{_below(where, place)} holds the value of the secret {secret.source}, which would be "
                    "stored in clear",
                    remedy="take it out there, and give a task or a service that needs it the reference",
                )


def _is_of_a_login(source: str) -> bool:
    kind, _, name = source.partition(":")
    return kind == "env" and (name in _OF_A_LOGIN or name.startswith(_OF_A_LOGIN_PREFIXES))


def _of_fields(entries: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The fields of declared entries that hold references, and not what has the form of one by chance."""
    names = ("env", "credential", "headers", "secrets")
    return [entry[name] for entry in entries.values() for name in names if entry.get(name)]


def _stored(document: LoadedDocument, inputs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What would be stored, each with what it is called."""
    from agentctl.coordinator.diagnostics import dotted
    from agentctl.coordinator.variables import of_document

    yield "", document.workflow
    captured = of_document(document)
    for agent, text in captured.instructions.items():
        name = document.model.spec.agents[agent].instructions_file
        yield f"the instructionsFile {name!r} (spec.agents.{agent})", text
    for path, files in captured.files.items():
        for item in files:
            yield f"the variables file {item.name!r} ({dotted(path)})", item.values
    for item in captured.given_files:
        yield f"the variables file {item.name!r}", item.values
    yield "--var", captured.given_pairs
    yield "inputs", inputs


def _below(where: str, place: tuple[str | int, ...]) -> str:
    from agentctl.coordinator.diagnostics import dotted

    if not place:
        return ""
    return dotted(place) if not where else f": {dotted(place)}"
