"""Variables: layers and their precedence, what is captured, what is refused, and where each value comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import LoadedDocument, load_workflow
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.expressions import Scope, compile_vars
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.variables import (
    MAX_FILES,
    capture,
    of_document,
    task_origins,
    task_variables,
    workflow_origins,
)

HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"
ACTIONS = "  policy: {approval: never}\n  actions: {set: {kind: builtin.assign}}\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of the workflow, with something beside it that it must not read."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "secret.yaml").write_text("stolen: 1\n")
    return folder


@pytest.fixture
def write(home: Path) -> Callable[..., LoadedDocument]:
    """The document of a `spec`, with files beside it (name to text), not captured yet."""

    def make(spec: str, **files: str) -> LoadedDocument:
        for name, text in files.items():
            (home / f"{name}.yaml").write_text(text)
        (home / "flow.yaml").write_text(HEAD + ACTIONS + spec)
        return load_workflow(home / "flow.yaml")

    return make


def own_of(plan: Plan, task_id: str) -> dict[str, Any]:
    """What a task sees of its variables, rendered."""
    task = plan.tasks[task_id]
    own = compile_vars(task.vars, task.data_vars)(Scope(inputs=plan.inputs))
    return {**plan.vars, **own}


LAYERS = """\
  varsFiles: [w1.yaml, w2.yaml]
  vars: {c: workflow, d: workflow, e: workflow, f: workflow, g: workflow}
  tasks:
    - id: t
      uses: action:set
      varsFiles: [t1.yaml, t2.yaml]
      vars: {e: task, f: task, g: task}
    - {id: other, uses: action:set}
"""


def test_each_layer_wins_over_those_below(write: Any, home: Path) -> None:
    names = "abcdefg"
    document = write(
        LAYERS,
        w1="".join(f"{name}: w1\n" for name in names),
        w2="".join(f"{name}: w2\n" for name in names[1:]),
        t1="".join(f"{name}: t1\n" for name in names[3:]),
        t2="e: t2\n",
        c1="f: c1\ng: c1\n",
        c2="f: c2\n",
    )
    given = [str(home / "c1.yaml"), str(home / "c2.yaml")]
    plan = compile_workflow(capture(document, files=given, pairs={"g": "pair"}))
    assert own_of(plan, "t") == {
        "a": "w1", "b": "w2", "c": "workflow", "d": "t1", "e": "task", "f": "c2", "g": "pair",
    }  # fmt: skip
    assert own_of(plan, "other") == {**dict.fromkeys("cde", "workflow"), "a": "w1", "b": "w2", "f": "c2", "g": "pair"}


def test_a_later_value_replaces_the_whole_earlier_one(write: Any) -> None:
    document = write(
        "  varsFiles: [w.yaml]\n  vars: {map: {b: 2}, list: [3], nothing: null}\n"
        "  tasks: [{id: t, uses: action:set}]\n",
        w="map: {a: 1}\nlist: [1, 2]\nnothing: 5\n",
    )
    assert compile_workflow(capture(document)).vars == {"map": {"b": 2}, "list": [3], "nothing": None}


def test_values_of_files_and_of_the_command_line_are_data(write: Any) -> None:
    document = write(
        "  tasks: [{id: t, uses: action:set, varsFiles: [t.yaml], vars: {inline: '${{ inputs.x }}'}}]\n",
        t='text: ${{ inputs.x }}\ninside: ["${{ broken"]\n',
    )
    plan = compile_workflow(capture(document, pairs={"given": "${{ inputs.y }}"}), inputs={"x": 7})
    task = plan.tasks["t"]
    assert task.data_vars == ("inside", "text")
    assert compile_vars(task.vars, task.data_vars)(Scope(inputs={"x": 7})) == {
        "text": "${{ inputs.x }}",
        "inside": ["${{ broken"],
        "inline": 7,
    }
    assert plan.vars == {"given": "${{ inputs.y }}"}


def test_items_of_a_fan_out_may_come_from_a_file(write: Any) -> None:
    spec = "  tasks: [{id: t, uses: action:set, varsFiles: [t.yaml], foreach: {items: '${{ vars.xs }}'}}]\n"
    plan = compile_workflow(capture(write(spec, t="xs: [a, b, c]\n")))
    assert len(plan.order) == 4
    with pytest.raises(DocumentError, match="bound by foreach"):
        compile_workflow(capture(write(spec, t="xs: [a]\nitem: 1\n")))


def test_what_an_expansion_binds_wins_over_the_variables_of_the_agent(write: Any) -> None:
    document = write(
        "  providers: {p: {kind: fake}}\n"
        "  agents: {g: {provider: p, model: m, instructions: x, varsFiles: [g.yaml], "
        "vars: {item: '${{ inputs.nothing }}', keep: 1}}}\n"
        "  inputs: {n: 5}\n"
        "  tasks: [{id: t, uses: agent:g, foreach: {items: [o, '${{ inputs.n }}']}, with: {x: '${{ vars.item }}'}}]\n",
        g="item: file\nother: file\n",
    )
    plan = compile_workflow(capture(document))
    [first, second, _] = plan.order
    assert own_of(plan, first) == {"item": "o", "foreachIndex": 0, "keep": 1, "other": "file"}
    assert own_of(plan, second) == {"item": 5, "foreachIndex": 1, "keep": 1, "other": "file"}
    in_file = write(
        "  tasks: [{id: t, uses: action:set, varsFiles: [g.yaml], foreach: {items: [1]}}]\n", g="item: file\n"
    )
    with pytest.raises(DocumentError, match="bound by foreach"):
        compile_workflow(capture(in_file))


def test_an_agent_has_a_layer_between_workflow_and_task(write: Any) -> None:
    document = write(
        "  vars: {a: workflow, b: workflow, c: workflow, d: workflow}\n"
        "  providers: {p: {kind: fake}}\n"
        "  agents: {g: {provider: p, model: m, instructions: x, varsFiles: [g.yaml], vars: {c: agent, d: agent}}}\n"
        "  tasks: [{id: t, uses: agent:g, vars: {d: task}}, {id: plain, uses: action:set}]\n",
        g="b: file\nc: file\n",
    )
    captured = capture(document)
    task, plain = captured.model.spec.tasks
    own, data = task_variables(captured, of_document(captured), ("spec", "tasks", 0), task)
    assert (own, data) == ({"b": "file", "c": "agent", "d": "task"}, ())
    assert task_variables(captured, of_document(captured), ("spec", "tasks", 1), plain) == ({}, ())
    assert [item.layer for item in task_origins(captured, ("spec", "tasks", 0), task)["d"]] == [
        "workflow vars",
        "agent vars",
        "task vars",
    ]


def test_what_was_captured_is_compiled_whatever_happens_to_the_file(write: Any, home: Path) -> None:
    document = write("  varsFiles: [w.yaml]\n  tasks: [{id: t, uses: action:set}]\n", w="a: 1\n")
    captured = capture(document)
    before = compile_workflow(captured)
    (home / "w.yaml").write_text("a: 2\n")
    assert compile_workflow(captured).plan_digest == before.plan_digest
    (home / "w.yaml").unlink()
    assert compile_workflow(captured).vars == {"a": 1}
    digest = sha256(b"a: 1\n").hexdigest()
    assert of_document(captured).as_json()["files"] == [
        {"at": ["spec"], "path": "w.yaml", "digest": digest, "values": {"a": 1}}
    ]


def test_a_document_with_files_is_not_compiled_without_them(write: Any) -> None:
    with pytest.raises(ValueError, match="captured"):
        compile_workflow(write("  varsFiles: [w.yaml]\n  tasks: [{id: t, uses: action:set}]\n"))


def test_the_digest_follows_the_values_and_not_where_files_of_the_command_line_lie(
    write: Any, home: Path, tmp_path: Path
) -> None:
    document = write("  tasks: [{id: t, uses: action:set}]\n", a="x: 1\n", b="x: 2\n")
    (tmp_path / "elsewhere.yaml").write_text("x: 1\n")

    def digests(*files: Path) -> tuple[str, str]:
        plan = compile_workflow(capture(document, files=[str(file) for file in files]))
        return plan.plan_digest, plan.workflow_digest

    assert digests(home / "a.yaml") == digests(tmp_path / "elsewhere.yaml")
    assert len({digests(), digests(home / "a.yaml"), digests(home / "b.yaml")}) == 3
    # Without any variables from outside, a document keeps the digest it has always had.
    assert compile_workflow(document).plan_digest == digests()[0]


# ---------------------------------------------------------------------- refusals

ONE = "  varsFiles: [w.yaml]\n  tasks: [{id: t, uses: action:set}]\n"
BAD_CONTENT = {
    "a list": ("schema_violation", "§- a\n"),
    "text": ("schema_violation", "§hello\n"),
    "includes others": ("schema_violation", "a: 1\n§include: [x.yaml]\n"),
    "includes others, plural": ("schema_violation", "§includes: x.yaml\n"),
    "names files": ("schema_violation", "§varsFiles: [x.yaml]\n"),
    "reserved": ("schema_violation", "§loopPrevious: 1\n"),
    "reserved matrix": ("schema_violation", "x: 1\n§matrix: {}\n"),
    "a key twice": ("yaml_syntax", "a: 1\nb: 2\n§a: 3\n"),
    "a number that is no text": ("schema_violation", "version: §1.10\n"),
    "not a number": ("schema_violation", "a: §.nan\n"),
    "a merge key": ("yaml_syntax", "a: &x {b: 1}\nc:\n  §<<: *x\n"),
    "a second document": ("yaml_syntax", "a: 1\n§---\nb: 1\n"),
    "a key that is no text": ("yaml_syntax", "§1: a\n"),
}


@pytest.mark.parametrize("what", BAD_CONTENT)
@pytest.mark.parametrize("given", [False, True])
def test_a_bad_file_has_its_own_place(write: Any, home: Path, what: str, given: bool) -> None:
    code, marked = BAD_CONTENT[what]
    before, _, after = marked.partition("§")
    place = (before.count("\n") + 1, len(before) - before.rfind("\n"))
    file = home / "w.yaml"
    document = write(ONE if not given else "  tasks: [{id: t, uses: action:set}]\n", w=before + after)
    with pytest.raises(DocumentError) as caught:
        capture(document, files=[str(file)] if given else [])
    [found] = caught.value.diagnostics
    assert (found.code, found.line, found.column) == (code, *place), found.as_text()
    assert found.file == str(file)
    assert found.help


BAD_PATHS = {
    "absent": ("missing_reference", "absent.yaml"),
    "a folder": ("missing_reference", "folder"),
    "a FIFO": ("missing_reference", "fifo"),
    "empty of documents": ("yaml_syntax", "empty.yaml"),
    "too large": ("schema_violation", "large.yaml"),
    "upwards": ("policy_denied", "../secret.yaml"),
    "upwards and back": ("policy_denied", "folder/../w.yaml"),
    "absolute, outside": ("policy_denied", "/etc/hostname"),
    "a link to the outside": ("policy_denied", "link.yaml"),
    "a folder that leads outside": ("policy_denied", "out/secret.yaml"),
    "a template": ("invalid_template", "${{ inputs.env }}.yaml"),
}


@pytest.mark.parametrize("what", BAD_PATHS)
def test_a_bad_path_has_the_place_where_it_is_named(write: Any, home: Path, what: str) -> None:
    code, name = BAD_PATHS[what]
    (home / "folder").mkdir()
    os.mkfifo(home / "fifo")
    (home / "empty.yaml").write_text("")
    (home / "large.yaml").write_text("a: " + "x" * (1 << 20))
    (home / "link.yaml").symlink_to(home.parent / "secret.yaml")
    (home / "out").symlink_to(home.parent)
    document = write(f"  tasks:\n    - {{id: t, uses: action:set, varsFiles: [{json.dumps(name)}]}}\n", w="a: 1\n")
    with pytest.raises(DocumentError) as caught:
        capture(document)
    [found] = caught.value.diagnostics
    assert found.code == code, found.as_text()
    if what != "empty of documents":
        assert (found.file, found.path) == (str(home / "flow.yaml"), "spec.tasks[0].varsFiles[0]")
        assert (found.line, found.column) == document.source.locate(("spec", "tasks", 0, "varsFiles", 0))
    assert found.help


def test_a_link_inside_and_an_absolute_path_inside_are_fine(write: Any, home: Path) -> None:
    document = write(f"  varsFiles: [link.yaml, {home}/w.yaml]\n  tasks: [{{id: t, uses: action:set}}]\n", w="a: 1\n")
    (home / "link.yaml").symlink_to("w.yaml")
    assert compile_workflow(capture(document)).vars == {"a": 1}


def test_files_lie_beside_the_workflow_or_in_the_workspace(write: Any, home: Path, tmp_path: Path) -> None:
    other = tmp_path / "work"
    other.mkdir()
    (other / "x.yaml").write_text("where: workspace\n")
    document = write(f"  varsFiles: [w.yaml, {other}/x.yaml]\n  tasks: [{{id: t, uses: action:set}}]\n", w="a: 1\n")
    assert compile_workflow(capture(document, workspace=other)).vars == {"a": 1, "where": "workspace"}
    with pytest.raises(DocumentError, match="leads out of the workspace"):
        capture(document)


def test_all_findings_of_all_files_come_together(write: Any) -> None:
    document = write(
        "  varsFiles: [a.yaml, none.yaml]\n  tasks: [{id: t, uses: action:set, varsFiles: [../x.yaml]}]\n",
        a="matrix: 1\ninclude: 2\n",
    )
    with pytest.raises(DocumentError) as caught:
        capture(document, pairs={"loopIndex": 1})
    assert len(caught.value.diagnostics) == 5


def test_the_number_of_files_and_their_bytes_are_bounded(write: Any) -> None:
    names = ", ".join(["w.yaml"] * MAX_FILES)
    tasks = "  tasks: [{id: t, uses: action:set}]\n"
    assert compile_workflow(capture(write(f"  varsFiles: [{names}]\n{tasks}", w="a: 1\n"))).vars == {"a": 1}
    with pytest.raises(DocumentError, match="more than 256"):
        capture(write(f"  varsFiles: [{names}, w.yaml]\n{tasks}", w="a: 1\n"))
    large = "a: " + "x" * 1_000_000
    with pytest.raises(DocumentError, match="together"):
        capture(write(f"  varsFiles: [{', '.join(['w.yaml'] * 17)}]\n{tasks}", w=large))
    capture(write(f"  varsFiles: [{', '.join(['w.yaml'] * 16)}]\n{tasks}", w=large))


# ---------------------------------------------------------------------- origins


def test_origins_name_file_and_line_of_winner_and_losers(write: Any, home: Path) -> None:
    document = write(LAYERS, w1="a: 1\nd: 1\n", w2="b: 1\n", t1="d: 1\n", t2="x: 1\n\ng: 1\n", c1="f: 1\n")
    captured = capture(document, files=[str(home / "c1.yaml")], pairs={"g": "hidden value"})
    everywhere = workflow_origins(captured)
    assert [(item.layer, item.file, item.line) for item in everywhere["d"]] == [
        ("workflow varsFiles", str(home / "w1.yaml"), 2),
        ("workflow vars", str(home / "flow.yaml"), 8),
    ]
    task = captured.model.spec.tasks[0]
    found = task_origins(captured, ("spec", "tasks", 0), task)
    assert [(item.layer, item.line) for item in found["g"]] == [
        ("workflow vars", 8),
        ("task varsFiles", 3),
        ("task vars", 13),
        ("--var", None),
    ]
    assert [(item.layer, item.file) for item in found["f"]][-1] == ("--vars-file", str(home / "c1.yaml"))
    assert "hidden value" not in repr(found)


def test_what_an_expansion_binds_has_an_origin(write: Any) -> None:
    document = capture(write("  tasks: [{id: t, uses: action:set, foreach: {items: [1], as: word}}]\n"))
    found = task_origins(document, ("spec", "tasks", 0), document.model.spec.tasks[0])
    assert {name: where[-1].layer for name, where in found.items()} == {
        "word": "expansion",
        "foreachIndex": "expansion",
    }


# ---------------------------------------------------------------------- control flow

SUB = """\
  vars: {a: workflow}
  subworkflows:
    w:
      version: 1.0.0
      inputSchema: {}
      outputSchema: {}
      tasks:
        - {id: inner, uses: action:set, varsFiles: [s.yaml], vars: {c: '${{ inputs.x }}'}}
  tasks:
    - {id: call, uses: workflow:w, with: {x: 1}}
"""


def test_tasks_of_a_sub_workflow_have_files_of_their_own(write: Any, home: Path) -> None:
    document = write(SUB, s="a: sub\nb: ${{ tasks.none.output }}\n")
    plan = compile_workflow(capture(document, pairs={"d": 4}))
    inner = plan.tasks["call--inner"]
    assert inner.vars["a"] == "sub"
    assert inner.data_vars == ("b",)
    assert inner.vars["c"].startswith("${{ tasks.call--inputs-")
    with pytest.raises(DocumentError) as caught:
        capture(write(SUB, s="loopIndex: 1\n"))
    assert [(item.file, item.line) for item in caught.value.diagnostics] == [(str(home / "s.yaml"), 1)]


def test_the_last_decision_of_a_loop_takes_data_as_data(write: Any) -> None:
    spec = (
        "  tasks:\n    - id: t\n      uses: action:set\n      varsFiles: [t.yaml]\n"
        "      loop: {maxIterations: 2, while: '${{ vars.loopIndex < 1 }}'}\n"
    )
    plan = compile_workflow(capture(write(spec, t="text: ${{ nothing }}\n")))
    loop = plan.tasks["t"].loop
    assert loop is not None
    assert loop["dataVars"] == ["text"]
    assert Plan.from_json(plan.to_json()).tasks["t"].loop == loop
    assert [task.data_vars for task in plan.tasks.values() if task.expansion is not None] == [("text",), ("text",)]


def test_names_that_a_loop_binds_cannot_come_from_a_file_of_its_task(write: Any) -> None:
    spec = "  tasks: [{id: t, uses: action:set, foreach: {items: [1], as: word}, varsFiles: [t.yaml]}]\n"
    with pytest.raises(DocumentError, match="bound by foreach"):
        compile_workflow(capture(write(spec, t="word: 1\n")))
