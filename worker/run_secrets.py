"""The secrets of a run, known to a worker before it records anything of that run.

A value is taken out of what any task of the run leaves, and not only of the task that it was given to: a command that
prints the file which another task takes its key from leaks it as well. Variables and files are read when a worker meets
a run for the first time. A command that yields a secret is not started for this: its value is known to the workers that
have used it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy

if TYPE_CHECKING:
    from .effects.secret_values import Secret


def learn(settings: Mapping[str, Any], policy: Policy, workspace: str) -> None:
    """Read the variables and files that the recorded settings of a run refer to. What cannot be read is no fault here:
    whoever needs it says so."""
    models = settings.get("models") or {}
    places = (settings.get("actions"), models.get("providers"), policy.network.custom_ca)
    for reference in (found for place in places for found in references_in(place)):
        from .effects.secret_values import resolve_secret

        try:
            resolve_secret(reference, policy, workspace)
        except TaskFault:
            continue
    embedding = (action["embedding"] for action in settings["actions"].values() if action.get("embedding"))
    for definition in (*(models.get("providers") or {}).values(), *embedding):
        _default(definition)


def readable_secrets(
    references: Any, providers: Mapping[str, Mapping[str, Any]], policy: Policy, workspace: str
) -> list[Secret]:
    """The values of variables and files among `references`, and of the variables that belong to the kinds of
    `providers`; what is denied or cannot be had is left out, and each source is read once."""
    from .effects.secret_values import resolve_secret

    found: dict[str, Secret] = {}
    for reference in references_in(references):
        try:
            secret = resolve_secret(reference, policy, workspace)
        except TaskFault:
            continue
        found[secret.source] = secret
    for definition in providers.values():
        default = _default(definition)
        if default is not None:
            found[default.source] = default
    return list(found.values())


def references_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """The references to variables and files anywhere in a definition."""
    if isinstance(value, Mapping):
        given = {name: item for name, item in value.items() if item is not None}
        if len(given) == 1 and given.keys() <= {"env", "file"} and isinstance(next(iter(given.values())), str):
            yield given
            return
        for item in value.values():
            yield from references_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from references_in(item)


def takes_secrets(action: Mapping[str, Any], policy: Policy) -> bool:
    """Whether preparing an action reads secrets: variables of its command, headers and `customCa` of its peers.

    The service that embeds for it is asked with a key that is read in the dispatch, when the attempt has a holder.
    """
    peers = (action.get("peers") or {}).values()
    if action.get("env") or any(peer.get("headers") for peer in peers):
        return True
    return bool(peers) and policy.network.custom_ca is not None


def _default(definition: Mapping[str, Any]) -> Secret | None:
    """The variable of a provider's kind, which no allowlist has to name, if it is set and can be read."""
    from .effects.secret_values import from_variable
    from .providers.exchange import credential_of, is_default

    kind = definition["kind"]
    reference = credential_of(kind, definition)
    if reference is None or not is_default(kind, reference) or reference["env"] not in os.environ:
        return None
    try:
        return from_variable(reference["env"])
    except TaskFault:
        return None


def without_secrets(action: Mapping[str, Any], policy: Policy, workspace: str) -> tuple[dict[str, Any], Policy]:
    """An action and its policy whose secrets are judged and not read, for a check: no command is started for one, no
    file is opened.

    Raises `policy_denied` as a run would.
    """
    from .effects.secret_values import require_permitted, require_variable

    for name in action.get("env") or ():
        require_variable(policy, name)
    peers = action.get("peers") or {}
    custom_ca = policy.network.custom_ca if peers else None
    named = [action.get("env"), *(peer.get("headers") for peer in peers.values()), custom_ca and {"": custom_ca}]
    for reference in (found for references in named if references for found in references.values()):
        require_permitted(reference, policy, workspace)
    bare = {**action, "env": {}, "peers": {name: {**peer, "headers": {}} for name, peer in peers.items()}}
    return bare, replace(policy, network=replace(policy.network, custom_ca=None))
