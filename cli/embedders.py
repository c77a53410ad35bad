"""Who makes vectors for the verbs about long-term memory: the built-in hash, or the service of a workflow file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentctl.store.errors import PrerequisiteError, UsageError

from .documents import without_plugins
from .main import Settings
from .preflight import proxy_for, refuse_offline

if TYPE_CHECKING:
    from agentctl.store.embedding import Embedder
    from agentctl.store.policy import Policy
    from agentctl.worker.providers.embeddings import ServiceEmbedder

REQUEST_SECONDS = 60.0
"""How long one request of a verb may take."""


def embedder_of_file(settings: Settings, file: str) -> Embedder:
    """The embedder that `spec.memory.longTerm.embedding` of a workflow file declares. Nothing is sent yet.

    Raises `DocumentError` and `UsageError` (exit 2), `PolicyError` (3), and `PrerequisiteError` (6) with `--offline`,
    without a credential, or without the library.
    """
    with without_plugins():
        from agentctl.coordinator.capabilities import embedding_problem
        from agentctl.coordinator.definition import load_workflow
        from agentctl.coordinator.variables import capture
    from agentctl.store.embedding import LOCAL_HASH, embedder
    from agentctl.store.policy import Policy

    document = capture(load_workflow(Path(file)))
    spec = document.workflow["spec"]
    declared = (spec["memory"]["longTerm"] or {}).get("embedding")
    if declared is None:
        raise UsageError(f"{file} declares no memory.longTerm", remedy="name the file whose tasks use this namespace")
    if declared["provider"] == LOCAL_HASH:
        return embedder(LOCAL_HASH, declared["dimensions"])
    definition = spec["providers"].get(declared["provider"])
    if definition is None:
        raise UsageError(f"{file}: there is no provider {declared['provider']!r}", remedy="see `agentctl check`")
    problem = embedding_problem(definition["kind"], declared.get("model"))
    if problem is not None:
        raise UsageError(f"{file}: {problem[1]}", remedy=problem[2])
    policy = Policy.from_json(spec["policy"])
    workspace = os.path.realpath(os.path.join(document.base_dir, policy.workspace_root))
    return _of_service(settings, spec, declared["provider"], policy, workspace)


def _of_service(settings: Settings, spec: Mapping[str, Any], name: str, policy: Policy, workspace: str) -> Embedder:
    from agentctl.store.clock import SystemClock
    from agentctl.worker.effects.secret_values import as_texts
    from agentctl.worker.network import Guard
    from agentctl.worker.preflight import provider_service, require
    from agentctl.worker.providers import Call, ProviderFault
    from agentctl.worker.providers.embeddings import ServiceEmbedder, embedding_of
    from agentctl.worker.watch import Token

    definition = spec["providers"][name]
    monotonic = SystemClock().monotonic
    service = provider_service(name, definition)
    if service is not None:
        if settings.offline:
            raise refuse_offline(f"embedding uses the provider {name!r}")
        require(service, policy, workspace, Guard(monotonic), proxy=proxy_for(service.url, spec["policy"]))
    embedding = embedding_of(spec["memory"]["longTerm"], definition)
    assert embedding is not None
    call = Call(Token(), REQUEST_SECONDS, "", monotonic)
    try:
        return _Telling(ServiceEmbedder(embedding, policy, workspace, as_texts(policy, workspace), call))
    except ProviderFault as fault:
        raise PrerequisiteError(f"the provider {name!r}: {fault.message}", remedy="nothing was changed") from fault


class _Telling:
    """An embedder of a service whose faults are errors of a verb (exit 6)."""

    def __init__(self, service: ServiceEmbedder) -> None:
        self._service = service
        self.provider = service.provider
        self.dimensions = service.dimensions

    def embed(self, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """See `ServiceEmbedder.embed`. Raises `PrerequisiteError`."""
        from agentctl.worker.providers import ProviderFault

        try:
            return self._service.embed(texts)
        except ProviderFault as fault:
            raise PrerequisiteError(
                f"the embedding by {self.provider} failed: {fault.message}",
                remedy="what was stored before is as it was; try again when the service answers",
            ) from fault
