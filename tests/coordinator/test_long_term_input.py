"""Documents with actions of long-term memory: what they compile to, and what is refused before a run exists."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.plan import Plan

Build = Callable[..., Plan]

ACTIONS = """\
  inputs: {q: x, n: 3, m: {a: 1}}
  actions:
    get: {kind: builtin.long_term_memory.read}
    find: {kind: builtin.long_term_memory.search}
    keep: {kind: builtin.long_term_memory.write}
    raise: {kind: builtin.long_term_memory.promote}
    set: {kind: builtin.memory.write}
    use: {kind: builtin.memory.read}
"""


def task(action: str, given: str) -> str:
    return f"{ACTIONS}  tasks: [{{id: a, uses: action:{action}, with: {given}}}]\n"


@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("get", "{key: k}"),
        ("get", "{key: '${{ inputs.q }}', namespace: other}"),
        ("find", "{query: q}"),
        ("find", "{query: q, mode: hybrid, limit: 100, filters: {a: 1}, namespace: n}"),
        (
            "find",
            "{query: '${{ inputs.q }}', mode: '${{ inputs.q }}', limit: '${{ inputs.n }}', filters: '${{ inputs.m }}'}",
        ),
        ("keep", "{key: k, value: null}"),
        ("keep", "{key: k, value: {a: 1}, text: words, metadata: {a: 1}, retentionDays: 30}"),
        ("keep", "{key: k, content: {type: text, text: '${{ inputs.q }}'}, metadata: {a: '${{ inputs.q }}'}}"),
        ("keep", "{key: k, entry: '${{ inputs.m }}', retentionDays: '${{ inputs.n }}'}"),
        ("keep", "{key: k, entry: {formatVersion: 1, content: {type: json, value: 1}, metadata: {}}}"),
        ("raise", "{key: k, value: '${{ inputs.m }}'}"),
    ],
)
def test_good_input(build: Build, action: str, given: str) -> None:
    plan = build(task(action, given))
    assert plan.predictability == "requires_execution"
    assert plan.requirements["effects"] == [plan.tasks["a"].action_kind]


BAD: list[tuple[str, str, str, str]] = [
    ("get", "{}", "with.key", "needs key"),
    ("get", "{key: ''}", "with.key", "must not be empty"),
    ("get", "{key: k, namespace: 3}", "with.namespace", "must be text"),
    ("get", "{key: k, query: q}", "with.query", "unknown field"),
    ("find", "{}", "with.query", "needs query"),
    ("find", "{query: ' '}", "with.query", "non-empty text"),
    ("find", "{query: 3}", "with.query", "non-empty text"),
    ("find", "{query: q, mode: fuzzy}", "with.mode", "one of text, vector, hybrid"),
    ("find", "{query: q, limit: 101}", "with.limit", "1 to 100"),
    ("find", "{query: q, limit: '3'}", "with.limit", "1 to 100"),
    ("find", "{query: q, filters: [a]}", "with.filters", "must be an object"),
    ("keep", "{value: 1}", "with.key", "needs key"),
    ("keep", "{key: k}", "with.value", "exactly one of"),
    ("keep", "{key: k, value: '${{ inputs.q }}', content: '${{ inputs.m }}'}", "with.value", "exactly one of"),
    ("keep", "{key: k, content: {type: html}}", "with.content", "'content' must be"),
    ("keep", "{key: k, entry: {formatVersion: 2, content: {type: text, text: t}}}", "with.entry", "formatVersion 2"),
    ("keep", "{key: k, entry: {content: 3}}", "with.entry", "'content' must be"),
    ("keep", "{key: k, content: '${{ inputs.m }}', text: '${{ inputs.q }}'}", "with.text", "beside value only"),
    ("keep", "{key: k, value: '${{ inputs.q }}', metadata: 3}", "with.metadata", "must be an object"),
    ("keep", "{key: k, value: 1, text: 3}", "with.text", "must be text"),
    ("keep", "{key: k, value: 1, retentionDays: 0}", "with.retentionDays", "1 to 36500"),
    ("raise", "{value: 1}", "with.key", "needs key"),
]


@pytest.mark.parametrize(("action", "given", "path", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(build: Build, action: str, given: str, path: str, message: str) -> None:
    with pytest.raises(DocumentError) as caught:
        build(task(action, given))
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("schema_violation", f"spec.tasks[0].{path}")
    assert message in found.message
    assert found.line is not None


def test_a_fault_in_the_defaults_of_an_action_is_shown_there(build: Build) -> None:
    spec = (
        "  actions: {find: {kind: builtin.long_term_memory.search, with: {mode: fuzzy}}}\n"
        "  tasks: [{id: a, uses: action:find, with: {query: q}}]\n"
    )
    with pytest.raises(DocumentError) as caught:
        build(spec)
    assert [item.path for item in caught.value.diagnostics] == ["spec.actions.find.with.mode"]
    build(spec.replace("{query: q}", "{query: q, mode: text}"))


def test_a_promotion_writes_working_memory(build: Build) -> None:
    plan = build(
        f"{ACTIONS}  tasks:\n"
        "  - {id: a, uses: action:raise, with: {key: k, value: 1}}\n"
        "  - {id: b, uses: action:use, with: {key: k}}\n"
        "  - {id: c, uses: action:raise, memoryWrites: [k, l], needs: [b], with: {key: '${{ inputs.q }}', value: 2}}\n"
    )
    tasks = plan.tasks
    assert (tasks["a"].memory_writes, tasks["b"].memory_after, tasks["c"].memory_writes) == (("k",), (0,), ("k", "l"))
    with pytest.raises(DocumentError, match="needs memoryWrites"):
        build(task("raise", "{key: '${{ inputs.q }}', value: 1}"))
    with pytest.raises(DocumentError, match=r"long_term_memory\.promote or builtin\.memory\.write"):
        build(f"{ACTIONS}  tasks: [{{id: a, uses: action:keep, memoryWrites: [k], with: {{key: k, value: 1}}}}]\n")
    with pytest.raises(DocumentError, match="both write the memory key 'k'"):
        build(
            f"{ACTIONS}  runtime: {{maxConcurrency: 2}}\n  tasks:\n"
            "  - {id: a, uses: action:raise, with: {key: k, value: 1}}\n"
            "  - {id: b, uses: action:set, with: {key: k, value: 1}}\n"
        )


@pytest.mark.parametrize(
    ("action", "given", "refused"),
    [
        ("keep", "{key: k, value: 1}", True),
        ("find", "{query: q}", True),
        ("get", "{key: k}", False),
        ("set", "{key: k, value: 1}, compensate: {uses: action:keep, with: {key: k, value: 1}}", True),
    ],
)
def test_a_provider_that_cannot_embed_is_refused_where_it_would_have_to(
    build: Build, action: str, given: str, refused: bool
) -> None:
    declared = (
        "  providers: {p: {kind: anthropic}, f: {kind: fake}}\n"
        "  memory: {longTerm: {embedding: {provider: p, model: m, dimensions: 1536}}}\n"
    )
    spec = declared + task(action, given)
    if not refused:
        build(spec)
        return
    with pytest.raises(DocumentError) as caught:
        build(spec)
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("unsupported_capability", "spec.memory.longTerm.embedding.provider")
    assert "local_hash" in str(found.help)
    build(spec.replace("provider: p,", "provider: local_hash,"))
    build(spec.replace("provider: p,", "provider: f,"))


@pytest.mark.parametrize("kind", ["openai", "azure_openai", "openai_compatible", "google"])
def test_a_service_embeds_by_a_model_that_is_named(build: Build, kind: str) -> None:
    spec = (
        f"  providers: {{p: {{kind: {kind}, endpoint: 'https://models.example.org'}}}}\n"
        "  memory: {longTerm: {embedding: {provider: p, MODEL dimensions: 1536}}}\n" + task("find", "{query: q}")
    )
    plan = build(spec.replace("MODEL", "model: m,"))
    assert plan.requirements["providers"] == ["p"]
    assert plan.actions["find"]["embedding"]["kind"] == kind
    with pytest.raises(DocumentError) as caught:
        build(spec.replace("MODEL", ""))
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("schema_violation", "spec.memory.longTerm.embedding.model")


def test_settings_of_the_document_are_bounded(build: Build) -> None:
    for settings in ("namespace: ''", "retentionDays: 0", "retentionDays: 36501", "embedding: {dimensions: 7}"):
        with pytest.raises(DocumentError):
            build(f"  memory: {{longTerm: {{{settings}}}}}\n" + task("get", "{key: k}"))
