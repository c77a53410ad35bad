"""Verbs about long-term memory: look at entries, write them by hand, search, and embed them anew (contract 4.12, 7)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.embedding import DEFAULT_DIMENSIONS
from agentctl.store.errors import ConflictError, NotFoundError, TaskFault, UsageError

from .documents import json_or_text, read_json_file, read_values
from .main import Settings, VerbGroup, pass_settings
from .render import Printer, beginning, clean, counted, when
from .run import open_store, until_told

if TYPE_CHECKING:
    from agentctl.store.embedding import Embedder
    from agentctl.store.engine import Store

SHOWN_TEXT = 4000
SHOWN_LINE = 100

_IN_THE_WAY = ("reindex_required", "too_many_candidates")
"""Faults that say how things stand in the database; all others are about what the caller has said."""

_namespace_option = click.option(
    "--namespace", default="default", metavar="NAME", show_default=True, help="Namespace of the key."
)
_workflow_option = click.option(
    "--workflow",
    "workflow",
    type=click.Path(),
    metavar="FILE",
    help="Embed as memory.longTerm.embedding of this workflow file says.",
)
_dimensions_option = click.option(
    "--dimensions",
    type=int,
    metavar="N",
    help="Length of the vectors; else that of the namespace's entries, or 64.",
)


@click.group(cls=VerbGroup)
def memory() -> None:
    """Long-term memory: entries that outlive the runs."""


@memory.command("get")
@click.argument("key")
@_namespace_option
@pass_settings
def memory_get(settings: Settings, key: str, namespace: str) -> None:
    """Show an entry. Exit 5 when there is none, or when its time is over."""
    from agentctl.store.memory_entries import check_name

    with _faults():
        check_name("namespace", namespace)
        check_name("key", key)
    with closing(open_store(settings)) as store:
        record = store.memory_entry(namespace, key)
    if record is None:
        raise NotFoundError(
            f"the namespace {namespace!r} has no entry {key!r}",
            remedy="`agentctl memory search` finds keys; --namespace names another namespace",
        )
    Printer(settings).result("MemoryRecord", record, lambda out: _record_for_people(out, record))


@memory.command("put")
@click.argument("key")
@click.argument("value", required=False)
@click.option("--file", "file", metavar="FILE", help="The value as a JSON file; - is stdin.")
@click.option("--entry", "whole", is_flag=True, help="The value is a whole entry, as `memory get` shows it.")
@click.option("--text", metavar="TEXT", help="What a search looks through; else the value itself.")
@click.option(
    "--metadata", "pairs", multiple=True, metavar="KEY=VALUE", help="For the filters of a search; JSON or text."
)
@click.option("--retention-days", type=int, metavar="N", help="Days until the entry ends; else never.")
@_namespace_option
@_dimensions_option
@_workflow_option
@pass_settings
def memory_put(
    settings: Settings,
    key: str,
    value: str | None,
    file: str | None,
    whole: bool,
    text: str | None,
    pairs: tuple[str, ...],
    retention_days: int | None,
    namespace: str,
    dimensions: int | None,
    workflow: str | None,
) -> None:
    """Write an entry, over an earlier one of that key. VALUE is read as JSON, or kept as text.

    It belongs to no run: no approval is asked for, and nothing is recorded but the entry.
    """
    from agentctl.store import memory_entries as entries
    from agentctl.store.clock import DAY_MS
    from agentctl.store.long_term import new_write

    if (value is None) == (file is None):
        raise UsageError("give either a VALUE or --file", remedy="`agentctl memory put KEY VALUE`")
    content = json_or_text(value, "VALUE") if value is not None else read_json_file(str(file), "--file")
    given: dict[str, Any] = {"entry" if whole else "value": content}
    if text is not None:
        given["text"] = text
    if pairs:
        given["metadata"] = read_values(pairs, "--metadata", "topic=house")
    with _faults():
        entries.check_name("namespace", namespace)
        entries.check_name("key", key)
        entry = entries.entry_of(given)
        days = entries.check_retention(retention_days)
        stated = _stated(settings, dimensions, workflow)
    with closing(open_store(settings, create=True)) as store, _faults():
        expires_at = None if days is None else store.clock.now() + days * DAY_MS
        write = new_write(namespace, key, entry, stated or _embedder(store, namespace), expires_at)
        with until_told():
            record = store.memory_put(write)
            Printer(settings).result("MemoryRecord", record, lambda out: _record_for_people(out, record))


@memory.command("search")
@click.argument("query")
@click.option("--mode", default="text", metavar="MODE", show_default=True, help="text, vector or hybrid.")
@click.option("--limit", type=int, default=10, metavar="N", show_default=True, help="Most results; 1 to 100.")
@click.option("--filter", "pairs", multiple=True, metavar="KEY=VALUE", help="Only entries with that metadata.")
@_namespace_option
@_dimensions_option
@_workflow_option
@pass_settings
def memory_search(
    settings: Settings,
    query: str,
    mode: str,
    limit: int,
    pairs: tuple[str, ...],
    namespace: str,
    dimensions: int | None,
    workflow: str | None,
) -> None:
    """The entries of a namespace that fit best: by words, by vector, or by the mean of both.

    Exit 5 when the entries were embedded otherwise than the query is, or are too many.
    """
    from agentctl.store.memory_entries import search_of

    filters = read_values(pairs, "--filter", "topic=house")
    given = {"query": query, "mode": mode, "limit": limit, "filters": filters, "namespace": namespace}
    with _faults():
        question = search_of(given, namespace)
        stated = _stated(settings, dimensions, workflow)
    with closing(open_store(settings)) as store, _faults():
        chosen = stated or (_local() if mode == "text" else _embedder(store, namespace))
        results = store.memory_search(question, chosen)
    data = {"namespace": namespace, "query": query, "mode": mode, "count": len(results), "results": results}

    def human(out: Printer) -> None:
        rows = []
        for result in results:
            record = result["record"]
            line = _shown(record["entry"]).replace("\n", " ")
            score = f"{result['scoreMillionths'] / 1_000_000:.6f}"
            rows.append((score, record["key"], beginning(line, SHOWN_LINE)))
        if rows:
            out.table(("SCORE", "KEY", "TEXT"), rows)
        else:
            out.line(f"nothing in the namespace {clean(namespace)} fits")

    Printer(settings).result("MemorySearch", data, human)


@memory.command("reindex")
@click.option("--namespace", metavar="NAME", help="Only this namespace; else all.")
@click.option("--dimensions", type=int, metavar="N", help="Length of the vectors; 64 if nothing is said.")
@_workflow_option
@pass_settings
def memory_reindex(settings: Settings, namespace: str | None, dimensions: int | None, workflow: str | None) -> None:
    """Make the words and vectors of all entries anew. Others may use the memory meanwhile; it can be interrupted.

    Give the dimensions that workflows have in memory.longTerm.embedding, or such a workflow.
    """
    from agentctl.store.memory_entries import check_name

    with _faults():
        if namespace is not None:
            check_name("namespace", namespace)
        chosen = _stated(settings, dimensions, workflow) or _local()
    with closing(open_store(settings)) as store:
        count = store.memory_reindex(namespace, chosen)
    data = {
        "namespace": namespace,
        "entries": count,
        "embeddingProvider": chosen.provider,
        "embeddingDimensions": chosen.dimensions,
    }
    where = "all namespaces" if namespace is None else f"the namespace {clean(namespace)}"
    Printer(settings).result(
        "MemoryReindex",
        data,
        lambda out: out.line(
            f"{counted(count, 'entry', 'entries')} of {where}: {chosen.provider}, {chosen.dimensions} dimensions"
        ),
    )


# -- helpers -----------------------------------------------------------------------------------------------------


@contextmanager
def _faults() -> Iterator[None]:
    """A fault of a value as the error of a verb: exit 2 for what was said, 5 for how things stand."""
    try:
        yield
    except TaskFault as fault:
        remedy = (fault.details or {}).get("remedy")
        if fault.code in _IN_THE_WAY:
            raise ConflictError(fault.message, remedy=remedy) from fault
        raise UsageError(
            fault.message, remedy=remedy or "nothing was changed; `--help` shows what is allowed"
        ) from fault


def _local(dimensions: int = DEFAULT_DIMENSIONS) -> Embedder:
    from agentctl.store.embedding import LOCAL_HASH, embedder

    return embedder(LOCAL_HASH, dimensions)


def _stated(settings: Settings, dimensions: int | None, workflow: str | None) -> Embedder | None:
    """The embedder that the caller names, None when he leaves it open."""
    if workflow is None:
        return None if dimensions is None else _local(dimensions)
    if dimensions is not None:
        raise UsageError("give either --dimensions or --workflow", remedy="the workflow says how long its vectors are")
    from .embedders import embedder_of_file

    return embedder_of_file(settings, workflow)


def _embedder(store: Store, namespace: str) -> Embedder:
    """As the entries of the namespace are embedded, if that is one way."""
    from agentctl.store.embedding import LOCAL_HASH

    known = store.memory_embeddings(namespace)
    if len(known) != 1:
        return _local()
    provider, dimensions = known[0]
    if provider != LOCAL_HASH:
        raise UsageError(
            f"the entries of the namespace {namespace!r} were embedded by {provider}",
            remedy="--workflow FILE names a workflow whose memory.longTerm.embedding is this one",
        )
    return _local(dimensions)


def _record_for_people(out: Printer, record: dict[str, Any]) -> None:
    ends = "no end" if record["expiresAt"] is None else f"ends {when(record['expiresAt'])}"
    out.line(f"{out.bold(clean(record['key']))} in {clean(record['namespace'])}, {ends}")
    out.line(f"  written {when(record['updatedAt'])}, first {when(record['createdAt'])}")
    for name, value in record["entry"]["metadata"].items():
        out.line(f"  {clean(name)}: {clean(json.dumps(value, ensure_ascii=False))}")
    text = _shown(record["entry"])
    for line in text[:SHOWN_TEXT].splitlines():
        out.line(f"  {clean(line)}")
    if len(text) > SHOWN_TEXT:
        out.line(f"  … ({counted(len(text) - SHOWN_TEXT, 'more character')}; --output json has all)")


def _shown(entry: dict[str, Any]) -> str:
    from agentctl.store.memory_entries import value_of

    value = value_of(entry)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
