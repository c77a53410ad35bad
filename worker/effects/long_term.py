"""Long-term memory: read, search, write, and promotion to working memory (contract 3 and 7).

Reads and searches look at the database when they are dispatched, and what they saw is the recorded result. A write is
only described here: it is carried out in the transaction that confirms its effect, so a worker that dies at any moment
leaves both or neither, and a delivery that follows a confirmed one finds the result and writes nothing.

Where the document lets a service embed, it is asked within the dispatch, before anything is written: a request that
fails, or whose end nobody knows, has failed and may be made again (contract 5.4). It is paid for like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from agentctl.store import answers
from agentctl.store import memory_entries as entries
from agentctl.store.clock import DAY_MS
from agentctl.store.embedding import DEFAULT_DIMENSIONS, LOCAL_HASH, Embedder, embedder
from agentctl.store.engine import Store
from agentctl.store.errors import IncompatibleVersion, TaskFault
from agentctl.store.long_term import new_write

from . import EffectContext, EffectOutcome, EffectPlan, Work, refuse_cancelled
from .memory import working_memory_write
from .paths import workspace_of

if TYPE_CHECKING:
    from ..providers import ProviderFault
    from ..providers.embeddings import Embedding, ServiceEmbedder

READ = "builtin.long_term_memory.read"
SEARCH = "builtin.long_term_memory.search"
WRITE = "builtin.long_term_memory.write"
PROMOTE = "builtin.long_term_memory.promote"

Look: TypeAlias = Callable[[EffectContext], EffectOutcome]


def prepare_read(work: Work) -> EffectPlan:
    """`key` and `namespace`; output `{status, changed, value, record}`, both null when there is no such entry."""
    namespace = _namespace(work)
    key = entries.check_name("key", work.input.get("key"))
    return _observation(READ, "memory.read", {"namespace": namespace, "key": key}, partial(_read, namespace, key))


def _read(namespace: str, key: str, context: EffectContext) -> EffectOutcome:
    record = _store(context).memory_entry(namespace, key)
    value = None if record is None else entries.value_of(record["entry"])
    return EffectOutcome("succeeded", {"status": "unchanged", "changed": False, "value": value, "record": record})


def prepare_search(work: Work) -> EffectPlan:
    """`query`, `mode`, `limit`, `filters`, `namespace`; output `{status, changed, count, query, results}`."""
    question = entries.search_of(work.input, _default_namespace(work))
    given: dict[str, Any] = {
        "namespace": question.namespace,
        "query": question.query,
        "mode": question.mode,
        "limit": question.limit,
        "filters": dict(question.filters),
    }
    if question.mode == "text":
        return _observation(SEARCH, "memory.search", given, partial(_search, question, embedder()))
    service = _service(work)
    given["embedding"] = _named(work, service)
    if service is None:
        return _observation(SEARCH, "memory.search", given, partial(_search, question, _built_in(work)))
    plan = _observation(SEARCH, "memory.search", given, partial(_with, service, work, partial(_search, question)))
    return replace(plan, estimate=_most(service, work, question.query), asks=True)


def _search(question: entries.Search, chosen: Embedder, context: EffectContext) -> EffectOutcome:
    results = _store(context).memory_search(question, chosen)
    output = {"status": "unchanged", "changed": False, "count": len(results), "query": question.query}
    return EffectOutcome("succeeded", {**output, "results": results})


def prepare_write(work: Work) -> EffectPlan:
    """`key`, one of `entry`, `content` and `value`, `retentionDays`, `namespace`; output with the stored entry."""
    namespace = _namespace(work)
    key = entries.check_name("key", work.input.get("key"))
    entry = entries.entry_of(work.input)
    days = entries.check_retention(work.input.get("retentionDays", (work.long_term or {}).get("retentionDays")))
    service = _service(work)
    given = {
        "namespace": namespace,
        "key": key,
        "entry": entry,
        "retentionDays": days,
        "embedding": _named(work, service),
    }
    write = partial(_write, namespace, key, entry, days)
    return EffectPlan(
        operation=WRITE,
        effect_class="external_mutate",
        risk="medium",
        idempotency="keyed",
        policy_name="memory.write",
        input=given,
        expected_effect={"namespace": namespace, "key": key, "retentionDays": days},
        estimate={} if service is None else _most(service, work, entries.searchable_text(entry)),
        execute=partial(
            _carry_out, partial(write, _built_in(work)) if service is None else partial(_with, service, work, write)
        ),
        asks=service is not None,
    )


def _write(
    namespace: str, key: str, entry: dict[str, Any], days: int | None, chosen: Embedder, context: EffectContext
) -> EffectOutcome:
    store = _store(context)
    store.refuse_newer_entry(namespace, key)  # it is not lost to an older one
    expires_at = None if days is None else store.clock.now() + days * DAY_MS
    write = new_write(namespace, key, entry, chosen, expires_at)
    output: dict[str, Any] = {
        "status": "changed",
        "changed": True,
        "namespace": namespace,
        "key": key,
        "entry": entry,
        "embeddingProvider": chosen.provider,
        "embeddingDimensions": chosen.dimensions,
        "expiresAt": expires_at,
    }
    return EffectOutcome("succeeded", output, memory=write)


def prepare_promote(work: Work) -> EffectPlan:
    """`key` and `value`: an explicit value goes into the working memory of the run, as `builtin.memory.write` does it.

    Nothing is read from long-term memory here; the value is what the task says, from a read or a search before it.
    """
    return working_memory_write(work, operation=PROMOTE, policy_name="memory.promote")


def _observation(operation: str, policy_name: str, given: dict[str, Any], look: Look) -> EffectPlan:
    return EffectPlan(
        operation=operation,
        effect_class="observe",
        risk="low",
        idempotency="keyed",
        policy_name=policy_name,
        input=given,
        expected_effect={},
        estimate={},
        execute=partial(_carry_out, look),
    )


def _carry_out(look: Look, context: EffectContext) -> EffectOutcome:
    try:
        return refuse_cancelled(context) or look(context)
    except TaskFault as fault:
        return EffectOutcome.failed(fault)
    except IncompatibleVersion as error:
        return EffectOutcome.failed(TaskFault(error.code, error.message))


def _default_namespace(work: Work) -> str:
    return str((work.long_term or {}).get("namespace", entries.DEFAULT_NAMESPACE))


def _namespace(work: Work) -> str:
    return entries.check_name("namespace", work.input.get("namespace", _default_namespace(work)))


def _built_in(work: Work) -> Embedder:
    settings = (work.long_term or {}).get("embedding") or {}
    return embedder(settings.get("provider", LOCAL_HASH), settings.get("dimensions", DEFAULT_DIMENSIONS))


# -- embedding by a service --------------------------------------------------------------------------------------------


def _service(work: Work) -> Embedding | None:
    """The service that embeds, None for what is built in."""
    definition = work.action.get("embedding")
    if definition is None:
        return None
    from ..providers.embeddings import embedding_of

    return embedding_of(work.long_term, definition)


def _named(work: Work, service: Embedding | None) -> dict[str, Any]:
    chosen = _built_in(work) if service is None else service
    return {"provider": chosen.provider, "dimensions": chosen.dimensions}


def _price(service: Embedding, work: Work) -> Mapping[str, Any] | None:
    price: Mapping[str, Any] | None = (work.prices or {}).get(f"{service.name}/{service.model}")
    return price


def _most(service: Embedding, work: Work, text: str) -> dict[str, int]:
    """The units to reserve: a request that embeds is no turn of a conversation, and gives no tokens back."""
    return _units(answers.most(len(text.encode("utf-8")), 0, _price(service, work)))


def _used(asked: ServiceEmbedder, service: Embedding, work: Work) -> dict[str, int]:
    return _units(answers.used(asked.usage.as_json(), _price(service, work)))


def _units(units: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in units.items() if count and name != "turns"}


Use: TypeAlias = Callable[[Embedder, EffectContext], EffectOutcome]


def _with(service: Embedding, work: Work, use: Use, context: EffectContext) -> EffectOutcome:
    """Carry out what needs vectors, with an embedder that asks the service; what it has used is charged."""
    from ..providers import Call, ProviderFault
    from ..providers.embeddings import ServiceEmbedder
    from .secret_values import as_texts

    policy, workspace = work.policy, workspace_of(work)
    call = Call(context.token, work.timeout_seconds, context.key, context.monotonic)
    try:
        asked = ServiceEmbedder(service, policy, workspace, as_texts(policy, workspace), call)
        try:
            outcome = use(asked, context)
        except TaskFault as fault:
            outcome = EffectOutcome.failed(fault)
    except ProviderFault as fault:
        return _unanswered(fault, context)
    return replace(outcome, usage=_used(asked, service, work)) if asked.requests else outcome


def _unanswered(fault: ProviderFault, context: EffectContext) -> EffectOutcome:
    """A request without an answer. Nothing was written, so the attempt has failed, whatever became of the request."""
    again = fault.retryable or fault.code in ("provider_timeout", "provider_transport")
    error = fault.as_task_fault(retryable=again).as_json()
    if fault.sent == "no":
        return EffectOutcome("not_dispatched", error=error)
    if context.token.reason == "drain":
        return EffectOutcome("uncertain", error=error)  # the worker ends: another delivery asks again
    return EffectOutcome("failed", error=error, usage={} if fault.passed else {"providerRequests": 1})


def _store(context: EffectContext) -> Store:
    if context.store is None:
        raise TaskFault("unsupported_capability", "this worker has no database for long-term memory")
    return context.store
