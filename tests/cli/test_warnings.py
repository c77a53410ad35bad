"""What `check`, `plan`, `run` and `submit` warn of before anything runs: missing values, doubtful conditions."""
# ruff: noqa: E501 - documents in a line each read best

from __future__ import annotations

import json
from typing import Any

import pytest

HEAD = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: flow}
spec:
  inputs: {stage: test, deep: {a: {b: 1}}}
  vars: {region: eu, data: {x: 1}}
  actions: {set: {kind: builtin.assign}}
"""


def told(result: Any) -> list[dict[str, Any]]:
    """The findings of an envelope, on stdout or stderr."""
    found: list[dict[str, Any]] = json.loads(result.out or result.err)["diagnostics"]
    return found


def warned(cli: Any, tasks: str, *arguments: str) -> list[tuple[str, str]]:
    """(path, message) of each warning; the document is valid."""
    cli.write("flow.yaml", HEAD + tasks)
    result = cli.json("check", "flow.yaml", *arguments)
    assert result.code == 0, result.err
    found = told(result)
    assert all(item["severity"] == "warning" and item["line"] and item["help"] for item in found)
    return [(item["path"], item["message"]) for item in found]


def test_a_value_that_nobody_gives_is_told_with_its_place(cli: Any) -> None:
    found = warned(
        cli,
        "  tasks:\n"
        "    - {id: a, uses: action:set, when: 'inputs.one == 1', with: {t: ['${{ vars.two }}', 'x ${{ inputs.three }}']}}\n"
        "    - {id: b, uses: action:set, with: {t: '${{ inputs.deep.a.c }}', u: '${{ vars.data.y.z }}'}}\n"
        "    - {id: c, uses: action:set, needs: [a], loop: {maxIterations: 1, while: '${{ vars.four > 1 }}'}}\n"
        "  outputs: {o: '${{ inputs.five }}'}\n",
    )
    assert [(path, message.split()[0]) for path, message in found] == [
        ("spec.tasks[0].when", "inputs.one"),
        ("spec.tasks[0].with.t[0]", "vars.two"),
        ("spec.tasks[0].with.t[1]", "inputs.three"),
        ("spec.tasks[1].with.t", "inputs.deep.a.c"),
        ("spec.tasks[1].with.u", "vars.data.y"),
        ("spec.tasks[2].loop.while", "vars.four"),
        ("spec.outputs.o", "inputs.five"),
    ]


def test_a_value_that_any_layer_gives_is_not_told(cli: Any) -> None:
    tasks = (
        "  tasks:\n"
        "    - {id: a, uses: action:set, vars: {own: 1, made: '${{ inputs.stage }}'}, with: {t: '${{ vars.own }} ${{ vars.made.x }}'}}\n"
        "    - {id: b, uses: action:set, foreach: {items: [{n: 1}]}, with: {t: '${{ vars.item.n }} ${{ vars.foreachIndex }}'}}\n"
        "    - {id: c, uses: action:set, loop: {maxIterations: 1, while: '${{ vars.loopIndex < 0 }}'}, with: {t: '${{ vars.loopPrevious }}'}}\n"
        "    - {id: d, uses: action:set, with: {t: '${{ inputs.given }} ${{ vars.told }} ${{ vars.region }} ${{ inputs.deep.a.b }}'}}\n"
    )
    cli.write("given.yaml", "told: 1\n")
    assert warned(cli, tasks, "--input", "given=1", "--var", "told=1") == []
    assert warned(cli, tasks, "--input", "given=1", "--vars-file", "given.yaml") == []


@pytest.mark.parametrize("verb", ["check", "plan", "run", "submit"])
def test_every_verb_that_begins_with_a_document_warns(cli: Any, verb: str) -> None:
    cli.write("flow.yaml", HEAD + "  tasks: [{id: a, uses: action:set, with: {t: '${{ inputs.stag }}'}}]\n")
    error = cli(verb, "flow.yaml").err
    assert "flow.yaml:8:47: warning: invalid_template: inputs.stag has no value" in error
    assert "did you mean 'stage'?" in error


def test_a_variable_in_a_variable_has_words_of_its_own(cli: Any) -> None:
    found = warned(
        cli,
        "  tasks:\n"
        "    - {id: a, uses: action:set, vars: {title: 'in ${{ vars.region }}'}, with: {t: '${{ vars.title }}'}}\n"
        "    - {id: b, uses: action:set, foreach: {items: ['${{ vars.region }}']}, with: {t: '${{ vars.item }}'}}\n",
    )
    assert [path for path, _ in found] == ["spec.tasks[0].vars.title", "spec.tasks[1].foreach.items[0]"]
    assert all("no variable reads another" in message for _, message in found)


def test_inputs_of_a_sub_workflow_come_from_its_call(cli: Any) -> None:
    sub = (
        "  subworkflows:\n"
        "    w:\n"
        "      version: 1.0.0\n"
        "      inputs: {kept: 1}\n"
        "      inputSchema: {type: object}\n"
        "      outputSchema: {type: object}\n"
        "      tasks: [{id: t, uses: action:set, with: {a: '${{ inputs.kept }}', b: '${{ inputs.given }}'}}]\n"
        "  tasks: [{id: call, uses: workflow:w, with: {%s}}]\n"
    )
    assert warned(cli, sub % "given: 1") == []
    [(path, message)] = warned(cli, sub % "")
    assert path == "spec.subworkflows.w.tasks[0].with.b"
    assert message.startswith("inputs.given of this sub-workflow has no value in the call 'call'")


DOUBTFUL = [
    'inputs.stage != "prod" and inputs.stage != "test"',
    "inputs.stage == prod or test",
    "inputs.stage == prod && x",
    "inputs.stage == a || b",
    "inputs.stage == a == b",
    "inputs.stage == inputs.other",
    "not inputs.stage == vars.region",
    "inputs.stage == tasks.a.output",
    "inputs.stage == True",
    "inputs.stage == None",
]
CLEAR = [
    "inputs.stage == prod",
    "inputs.stage == 'this and that'",
    'inputs.stage == "inputs.other"',
    "inputs.stage == true",
    "inputs.stage != null",
    "inputs.stage == sand",
    "inputs.stage",
]


@pytest.mark.parametrize("text", DOUBTFUL)
def test_a_doubtful_right_side_of_a_comparison_is_told(cli: Any, text: str) -> None:
    for wrapped in (text, "${{ " + text + " }}"):
        quoted = wrapped.replace("'", "''")
        [(path, _)] = warned(cli, f"  tasks: [{{id: a, uses: action:set, when: '{quoted}'}}]\n")
        assert path == "spec.tasks[0].when"
        [(path, _)] = warned(
            cli,
            f"  outputs: {{o: '${{{{ {text.replace(chr(39), chr(39) * 2)} }}}}'}}\n  tasks: [{{id: a, uses: action:set}}]\n",
        )
        assert path == "spec.outputs.o"


@pytest.mark.parametrize("text", CLEAR)
def test_a_clear_right_side_is_not(cli: Any, text: str) -> None:
    quoted = text.replace("'", "''")
    assert warned(cli, f"  tasks: [{{id: a, uses: action:set, when: '{quoted}'}}]\n") == []


def test_variables_without_effect_are_told_and_slips_refused(cli: Any) -> None:
    task = "  tasks: [{id: a, uses: action:set, with: {t: '${{ vars.region }}'}}]\n"
    cli.write("flow.yaml", HEAD + task)
    slip = cli.json("run", "flow.yaml", "--var", "regoin=1")
    assert slip.code == 2
    [finding] = told(slip)
    assert (finding["severity"], finding["help"]) == ("error", "did you mean 'region'?")
    odd = cli.json("run", "flow.yaml", "--var", "a b=1")
    assert (odd.code, told(odd)[0]["severity"]) == (2, "error")
    assert cli.json("run", "flow.yaml", "--input", "a.b=1").code == 2
    assert not cli.database.exists()
    cli.write("more.yaml", "region: us\nq1: 1\nq2: 1\n")
    result = cli.json("check", "flow.yaml", "--var", "zzz=1", "--vars-file", "more.yaml")
    assert result.code == 0
    assert sorted((item["severity"], item["file"]) for item in told(result)) == [
        ("warning", "flow.yaml"), ("warning", "more.yaml"),
    ]  # fmt: skip
    assert any("'q1', 'q2'" in item["message"] for item in told(result))
    cli.write("flow.yaml", HEAD.replace("region: eu", "a.b: 1") + "  tasks: [{id: a, uses: action:set}]\n")
    [finding] = told(cli.json("check", "flow.yaml"))
    assert (finding["path"], finding["severity"]) == ("spec.vars.a.b", "warning")


def test_an_artifact_out_of_reach_is_told_before_its_command_runs(cli: Any) -> None:
    cli.write(
        "flow.yaml",
        """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: flow}
spec:
  inputs: {name: x}
  policy: {processAllowlist: ["true"], writableRoots: [build/out, dist]}
  actions:
    one: {kind: builtin.shell.exec, command: "true", artifacts: [build/out/a, dist, "build/*/b", "*/c", src/d, "docs/**"]}
    two: {kind: builtin.shell.exec, command: "true"}
  tasks:
    - {id: a, uses: action:one}
    - {id: b, uses: action:two, with: {artifacts: ["dist/${{ inputs.name }}", "${{ inputs.name }}", /tmp/e, build/f]}}
""",
    )
    assert [(item["path"], item["message"].split("'")[1]) for item in told(cli.json("check", "flow.yaml"))] == [
        ("spec.actions.one.artifacts[4]", "src/d"),
        ("spec.actions.one.artifacts[5]", "docs/**"),
        ("spec.tasks[1].with.artifacts[3]", "build/f"),
    ]


def test_a_denial_of_nothing_is_told(cli: Any) -> None:
    """A slip in a list of denials denies nothing, and nobody would notice."""
    names = "filesystem.write, filesystem.wirte, builtin.write, builtin.long_term_memory.write, memory.write, mcp.call, internal"
    found = warned(
        cli, f"  policy: {{toolsDeny: [{names}]}}\n  tasks:\n    - {{id: a, uses: action:set, with: {{x: 1}}}}\n"
    )
    assert [path for path, _ in found] == [f"spec.policy.toolsDeny[{index}]" for index in (1, 2, 3)]
    hints = [item["help"] for item in told(cli.json("check", "flow.yaml"))]
    assert hints == ["did you mean 'filesystem.write'?", "write filesystem.write", "write memory.write"]
