"""Which module serves which kind of provider. Loaded by name, so a worker imports only what its agents use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, TypeAlias

from agentctl.store.errors import TaskFault
from agentctl.store.policy import Policy

from . import Provider

ResolveSecret: TypeAlias = Callable[[Mapping[str, Any]], str]
"""A secret reference (contract 1.9) to its value. Raises `TaskFault`; the value is never recorded."""

Factory: TypeAlias = Callable[[Mapping[str, Any], Policy, str, ResolveSecret], Provider]
"""(definition of spec.providers, policy of the run, resolved workspace, secrets) to a provider."""

_KINDS: Final[dict[str, str]] = {
    "fake": "fake:make",
    "openai": "openai:make",
    "azure_openai": "openai:make_azure",
    "openai_compatible": "chat:make",
    "anthropic": "anthropic:make",
    "google": "google:make",
}
"""Kind to `module:function` below this package; the function is a `Factory`."""


def load(kind: str) -> None:
    """Import what a provider of a kind needs, so that this is done before a request counts as started.

    What cannot be imported is told by `provider_for`, which can say what to do about it.
    """
    target = _KINDS.get(kind)
    if target is None:
        return
    import_module(f"{__package__}.{target.partition(':')[0]}")
    if kind != "fake":
        with suppress(ImportError):
            import_module("agentctl.worker.http_transport")


def provider_for(
    kind: str, definition: Mapping[str, Any], policy: Policy, workspace: str, resolve_secret: ResolveSecret
) -> Provider:
    """Build the provider of a definition. Nothing is sent.

    Raises `TaskFault` `unsupported_capability` for a kind without a module, and `ProviderFault` with `sent="no"` for
    what is missing (a credential, an extra that is not installed).
    """
    target = _KINDS.get(kind)
    if target is None:
        raise TaskFault("unsupported_capability", f"this worker has no provider of kind {kind}")
    module, _, name = target.partition(":")
    factory: Factory = getattr(import_module(f"{__package__}.{module}"), name)
    return factory(definition, policy, workspace, resolve_secret)
