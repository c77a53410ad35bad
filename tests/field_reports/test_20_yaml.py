"""Field report 20: YAML that means something else than it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.field import Field

HEAD = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: yaml}
spec:
  policy: {approval: never}
  actions: {set: {kind: builtin.assign}}
"""
TASKS = """\
  tasks: [{id: a, uses: 'action:set', with: {value: '${{ inputs.value }}'}}]
  outputs: {value: '${{ tasks.a.output.output.value }}'}
"""

# The mark § stands where the finding has to be, the mark ¶ where the other of two equal keys is.
REFUSED = {
    "duplicate task id": HEAD + "  tasks:\n    - {id: ¶a, uses: 'action:set'}\n    - {id: §a, uses: 'action:set'}\n",
    "duplicate task id in a sub-workflow": HEAD
    + "  subworkflows:\n    s:\n      version: 1.0.0\n      inputSchema: true\n      outputSchema: true\n      tasks:\n"
    + "        - {id: ¶a, uses: 'action:set'}\n        - {id: §a, uses: 'action:set'}\n" + TASKS,
    "duplicate nested key": HEAD + "  inputs:\n    deep:\n      ¶x: 1\n      y: 2\n      §x: 3\n" + TASKS,
    "duplicate behind a merge": HEAD + "  inputs:\n    base: &b {x: 1}\n    more:\n      §<<: *b\n      x: 2\n" + TASKS,
    "not a number": HEAD + "  inputs: {value: §.nan}\n" + TASKS,
    "infinite": HEAD + "  inputs: {value: §-.inf}\n" + TASKS,
    "tab": HEAD + "  inputs:\n§\tvalue: 1\n" + TASKS,
    "two documents": HEAD + "  inputs: {value: 1}\n" + TASKS + "§---\na: 1\n",
    "number as key": HEAD + "  inputs: {§1: one}\n" + TASKS,
    "truth as key": HEAD + "  inputs: {§true: yes}\n" + TASKS,
    "list as key": HEAD + "  inputs: {§[a]: one}\n" + TASKS,
    "a version": HEAD + "  inputs: {value: §1.10}\n" + TASKS,
    "a commit": HEAD + "  inputs: {value: §0123456}\n" + TASKS,
    "a commit that looks like a power": HEAD + "  inputs: {value: §12e10}\n" + TASKS,
}  # fmt: skip

KEPT: dict[str, Any] = {
    "no": "no",
    "yes": "yes",
    "on": "on",
    "off": "off",
    "x": "x",
    "12:30": "12:30",
    "2026-01-02": "2026-01-02",
    "2026-01-02T03:04:05Z": "2026-01-02T03:04:05Z",
    '"1.10"': "1.10",
    "'0123456'": "0123456",
    '"12e10"': "12e10",
    "1180591620717411303424": 2**70,
    "true": True,
    "1.5": 1.5,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_has_its_place(field: Field, what: str) -> None:
    """Exit 2 from `check` and `run` alike; file, line and column; both lines of a duplicate; no run, no database."""
    marked = REFUSED[what]
    other, place = marked.find("¶"), marked.replace("¶", "").find("§")
    text = marked.replace("§", "").replace("¶", "")
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    field.text("case.yaml", text)
    verdicts = []
    for verb in ("check", "plan", "run", "submit"):
        result = field.json(verb, "case.yaml")
        assert (result.code, result.error["code"]) == (2, "usage"), verb
        verdicts.append(result.diagnostics)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    found = [item for item in verdicts[0] if (item["line"], item["column"]) == (line, column)]
    assert found, verdicts[0]
    assert all(Path(item["file"]).name == "case.yaml" for item in verdicts[0])
    if other >= 0:
        assert f" {text.count(chr(10), 0, other) + 1}:" in found[0]["message"]
    human = field("check", "case.yaml")
    assert human.code == 2
    assert f"case.yaml:{line}:{column}" in human.err
    if what.startswith("a "):
        assert "quote" in human.err
    assert not field.database.exists()


SUB = """\
  subworkflows:
    typed:
      version: 1.0.0
      inputSchema: {type: object, required: [value], properties: {value: {type: string}}}
      outputs: {value: '${{ tasks.a.output.output.value }}'}
      outputSchema: {type: object, properties: {value: {type: string}}}
      tasks: [{id: a, uses: 'action:set', with: {value: '${{ inputs.value }}'}}]
"""


@pytest.mark.parametrize("spelled", KEPT)
def test_an_input_of_the_type_text_is_the_exact_text_or_refused(field: Field, spelled: str) -> None:
    """Through a typed boundary: what is text arrives as it stands in the file, and nothing else is made into text."""
    tasks = f"  tasks: [{{id: call, uses: 'workflow:typed', with: {{value: {spelled}}}}}]\n"
    field.text("case.yaml", HEAD + SUB + tasks + "  outputs: {value: '${{ tasks.call.output.value }}'}\n")
    checked, result = field.json("check", "case.yaml"), field.json("run", "case.yaml")
    if isinstance(KEPT[spelled], str):
        assert checked.code == 0
        assert (result.code, result.data["output"]) == (0, {"value": KEPT[spelled]})
    else:
        assert checked.code == result.code == 2
        assert ["inputSchema" in item["message"] + item["help"] for item in result.diagnostics] == [True]


@pytest.mark.parametrize("spelled", KEPT)
def test_what_is_kept_is_kept_exactly(field: Field, spelled: str) -> None:
    """The value comes out of the run as it stands in the file."""
    field.text("case.yaml", HEAD + f"  inputs: {{value: {spelled}}}\n" + TASKS)
    assert field.json("check", "case.yaml").code == 0
    result = field.json("run", "case.yaml")
    assert result.code == 0
    value = result.data["output"]["value"]
    assert (value, type(value)) == (KEPT[spelled], type(KEPT[spelled]))


def test_a_byte_order_mark_changes_nothing(field: Field) -> None:
    """It is dropped, and places are counted without it."""
    text = HEAD + "  inputs: {value: no}\n" + TASKS
    (field.folder / "case.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert field.json("run", "case.yaml").data["output"] == {"value": "no"}
    (field.folder / "wrong.yaml").write_bytes(b"\xef\xbb\xbfapiversion: x\n")
    [finding, *_] = field.json("check", "wrong.yaml").diagnostics
    assert finding["line"] == 1


def test_a_run_count_is_unchanged_by_what_is_refused(field: Field) -> None:
    """With a database that has a run in it."""
    field.text("good.yaml", HEAD + "  inputs: {value: no}\n" + TASKS)
    assert field.json("run", "good.yaml").code == 0
    for what in ("duplicate task id", "not a number", "two documents"):
        field.text("case.yaml", REFUSED[what].replace("§", "").replace("¶", ""))
        assert field("run", "case.yaml").code == 2
        assert field("submit", "case.yaml").code == 2
    assert field.scalar("SELECT COUNT(*) FROM runs") == 1
    field.check_clean_end()


DATA = {
    "duplicate key": "value: one\nvalue: two\n",
    "duplicate nested key": "deep:\n  x: 1\n  x: 2\n",
    "not a number": "value: .nan\n",
    "tab": "deep:\n\tx: 1\n",
    "two documents": "value: 1\n---\nvalue: 2\n",
    "number as key": "1: one\n",
    "a version": "value: 1.10\n",
    "a commit": "value: 0123456\n",
    "a power": "value: 12e10\n",
}


def test_files_of_variables_and_corrected_files_are_read_in_the_same_way(field: Field) -> None:
    """What a document may not say, a file of variables may not say, nor a file that is to repair a run."""
    tasks = "  tasks: [{id: a, uses: 'action:set', with: {value: '${{ vars.value }}'}}]\n"
    end = "  outputs: {value: '${{ tasks.a.output.output.value }}'}\n"
    field.text("case.yaml", HEAD + "  vars: {value: none}\n" + tasks + end)
    source = field.json("run", "case.yaml").data["runId"]
    for what, text in DATA.items():
        field.text("data.yaml", text)
        result = field.json("explain" if what.startswith("a ") else "run", "case.yaml", "--vars-file", "data.yaml")
        assert (result.code, result.error["code"]) == (2, "usage"), what
        assert result.diagnostics[0]["line"] >= 1, what
        assert "data.yaml" in result.diagnostics[0]["file"], what
    field.text("data.yaml", "value:\n" + "".join(f"- {spelled}\n" for spelled in KEPT))
    kept = field.json("run", "case.yaml", "--vars-file", "data.yaml").data["output"]["value"]
    assert repr(kept) == repr(list(KEPT.values()))
    count = field.scalar("SELECT COUNT(*) FROM runs")
    for what in ("duplicate task id", "not a number"):
        field.text("fixed.yaml", REFUSED[what].replace("§", "").replace("¶", ""))
        checked = field.json("check", "fixed.yaml")
        for words in (("repair", "fixed.yaml", source, "--from", "a"), ("retry", "fixed.yaml", source, "--failed")):
            result = field.json(*words)
            assert (result.code, result.diagnostics) == (2, checked.diagnostics), (what, words)
    assert field.scalar("SELECT COUNT(*) FROM runs") == count
    field.check_clean_end()
