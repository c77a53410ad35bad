"""init, explain, plan, graph, variables of the command line, and check of what is certain to be denied."""
# ruff: noqa: E501 - documents in a line each read best

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from typing import Any

import jsonschema_rs
import pytest
import yaml

TEMPLATES = ("hello", "commands", "files", "fan-out")
HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: flow}\nspec:\n"


# ---------------------------------------------------------------------- init


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_template_is_valid_for_us_and_for_editors_and_runs(cli: Any, template: str) -> None:
    made = cli.json("init", "new.yaml", "--template", template)
    assert made.code == 0
    assert made.data["written"] == "new.yaml"
    text = (cli.folder / "new.yaml").read_text()
    first = text.split("\n")[0]
    assert first == f"# yaml-language-server: $schema=./{made.data['schema']}"
    schema = json.loads((cli.folder / made.data["schema"]).read_text())
    assert jsonschema_rs.Draft202012Validator(schema).is_valid(yaml.safe_load(text))
    assert len([line for line in text.split("\n") if line.lstrip().startswith("#")]) > 5
    checked = cli("check", "new.yaml")
    assert (checked.code, checked.out, checked.err) == (0, checked.out, "")
    assert "workflow new," in checked.out
    foreseen = cli.json("run", "new.yaml", "--check")
    assert foreseen.code == 0
    assert cli.json("run", "new.yaml").code == (3 if template == "files" else 0)


def test_init_never_overwrites_without_force(cli: Any) -> None:
    cli.write("workflow.yaml", "mine\n")
    refused = cli.json("init")
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert "--force" in refused.error["remedy"]
    assert (cli.folder / "workflow.yaml").read_text() == "mine\n"
    assert not (cli.folder / "workflow.schema.json").exists()
    cli.write("workflow.schema.json", "{}")
    kept = cli.json("init", "other.yaml")
    assert (kept.code, kept.data["schemaWritten"]) == (0, False)
    assert (cli.folder / "workflow.schema.json").read_text() == "{}"
    assert cli("init", "--force").code == 0
    assert (cli.folder / "workflow.yaml").read_text().startswith("# yaml-language-server")
    assert "$defs" in (cli.folder / "workflow.schema.json").read_text()
    (cli.folder / "link.yaml").symlink_to("nowhere.yaml")
    assert cli("init", "link.yaml").code == 2


def test_nothing_is_left_of_a_file_for_which_there_is_no_room(cli: Any) -> None:
    program = f"{sys.executable} -B -c 'from agentctl.cli import main; main()'"
    before = sorted(cli.folder.iterdir())
    for verb in ("init new.yaml", "init new.yaml --force", "schema --write new.json"):
        full = subprocess.run(
            ["bash", "-c", f"ulimit -f 8; {program} {verb}"],
            cwd=cli.folder,
            env=cli.environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert full.returncode == 5
        assert "cannot write" in full.stderr
        assert sorted(cli.folder.iterdir()) == before
    made = cli.json("init", "new.yaml")
    assert (made.code, made.data["schemaWritten"]) == (0, True)


@pytest.mark.parametrize("target", [".", "/", "", "..", "folder", "folder/", "new/", "fifo", "/dev/null"])
def test_what_is_no_name_of_a_file_is_not_written(cli: Any, target: str) -> None:
    (cli.folder / "folder").mkdir()
    os.mkfifo(cli.folder / "fifo")
    before = sorted(cli.folder.iterdir())
    refused = cli.json("schema", "--write", target)
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert cli("init", target).code == 2
    (cli.folder / "pipe.yaml").symlink_to("fifo")
    assert cli("init", "pipe.yaml", "--force").code == 2
    (cli.folder / "pipe.yaml").unlink()
    (cli.folder / "workflow.schema.json").unlink(missing_ok=True)
    assert sorted(cli.folder.iterdir()) == before


def test_a_schema_is_written_to_where_a_link_leads(cli: Any) -> None:
    (cli.folder / "link.json").symlink_to("real.json")
    assert cli("schema", "--write", "link.json").code == 0
    assert (cli.folder / "link.json").is_symlink()
    assert "$defs" in (cli.folder / "real.json").read_text()


@pytest.mark.parametrize(
    ("file", "name"), [("deep/down/My Flow.yaml", "my-flow"), ("7.yml", "workflow-7"), ("Ünï.yaml", "n")]
)
def test_init_names_the_workflow_after_its_file(cli: Any, file: str, name: str) -> None:
    assert cli("init", file).code == 0
    assert cli.json("check", file).data["workflow"] == name


def test_init_refuses_other_endings_and_places_that_cannot_be(cli: Any) -> None:
    assert cli.json("init", "flow.txt").error["code"] == "usage"
    assert cli.json("init", "hello.yaml/flow.yaml").error["code"] == "environment"
    assert cli.json("init", "--template", "none").code == 2


# ---------------------------------------------------------------------- variables

VARS = HEAD + (
    "  varsFiles: [base.yaml]\n"
    "  vars: {b: workflow}\n"
    "  actions: {set: {kind: builtin.assign}}\n"
    "  tasks:\n"
    "    - {id: t, uses: action:set, vars: {c: task}, with: {a: '${{ vars.a }}', b: '${{ vars.b }}', c: '${{ vars.c }}'}}\n"
    "  outputs: {all: '${{ tasks.t.output.output }}'}\n"
)


@pytest.fixture
def flow(cli: Any) -> Any:
    """The program in a folder with `flow.yaml`, which has variables from three layers."""
    cli.write("flow.yaml", VARS)
    cli.write("base.yaml", "a: file\nb: file\n")
    cli.write("more.yaml", "b: more\nc: more\n")
    return cli


def test_variables_of_the_command_line_win(flow: Any) -> None:
    def run(*arguments: str) -> Any:
        return flow.json("run", "flow.yaml", *arguments).data["output"]["all"]

    assert run() == {"a": "file", "b": "workflow", "c": "task"}
    assert run("--vars-file", "more.yaml") == {"a": "file", "b": "more", "c": "more"}
    assert run("--var", "b=[1]", "--vars-file", "more.yaml") == {"a": "file", "b": [1], "c": "more"}
    assert run("--var", "b=1", "--var", "b=null") == {"a": "file", "b": None, "c": "task"}
    assert run("--var", 'a="${{ inputs.x }}"')["a"] == "${{ inputs.x }}"
    assert flow.json("check", "flow.yaml", "--vars-file", "more.yaml").code == 0
    plans = {
        flow.json("plan", "flow.yaml", *more).data["planDigest"]
        for more in ((), ("--vars-file", "more.yaml"), ("--var", "b=1"))
    }
    assert len(plans) == 3


def test_a_run_keeps_what_was_captured(flow: Any) -> None:
    run_id = flow.json("submit", "flow.yaml", "--vars-file", "more.yaml").data["runId"]
    flow.write("base.yaml", "a: changed\n")
    (flow.folder / "more.yaml").unlink()
    assert flow.json("resume", run_id).data["output"]["all"] == {"a": "file", "b": "more", "c": "more"}
    kept = flow.json("inspect", run_id).data["run"]["workflow"]["sourceSnapshot"]
    assert kept["files"][0]["values"] == {"a": "file", "b": "file"}
    assert kept["givenFiles"][0]["values"] == {"b": "more", "c": "more"}


BAD_VARIABLES = {
    "no pair": ["--var", "name"],
    "no name": ["--var", "=1"],
    "no JSON": ["--var", "name=Ada"],
    "NaN": ["--var", "x=NaN"],
    "too deep": ["--var", "x=" + "[" * 100 + "]" * 100],
    "a key twice": ["--var", 'x={"a":1,"a":2}'],
    "reserved": ["--var", "matrix=1"],
    "lone surrogate": ["--var", 'x="\\ud800"'],
    "absent file": ["--vars-file", "absent.yaml"],
    "folder": ["--vars-file", "."],
    "bad file": ["--vars-file", "bad.yaml"],
    "stdin": ["--vars-file", "-"],
}


@pytest.mark.parametrize("verb", ["check", "plan", "explain", "graph", "run", "submit"])
def test_bad_variables_are_usage_errors_without_a_database(flow: Any, verb: str) -> None:
    flow.write("bad.yaml", "include: [x.yaml]\n")
    for name, arguments in BAD_VARIABLES.items():
        result = flow.json(verb, "flow.yaml", *arguments)
        assert (result.code, json.loads(result.err)["error"]["code"]) == (2, "usage"), name
        assert json.loads(result.err)["error"]["remedy"], name
    assert not flow.database.parent.exists()


def test_text_that_is_no_json_gets_the_right_spelling(flow: Any) -> None:
    result = flow.json("run", "flow.yaml", "--var", "name=Ada Lovelace")
    assert "--var 'name=\"Ada Lovelace\"'" in result.error["remedy"]


def test_explain_shows_the_origin_and_never_the_value(flow: Any) -> None:
    flow.write("more.yaml", "b: hush-file\nc: hush\n")
    result = flow.json("explain", "flow.yaml", "--vars-file", "more.yaml", "--var", 'd="hush-pair"')
    assert result.code == 0
    assert "hush" not in result.out
    data = result.data
    assert data.keys() == {"workflow", "planDigest", "variableOrigins", "effectiveOrigins"}
    assert data["variableOrigins"]["b"] == {
        "layer": "--vars-file", "file": "more.yaml", "line": 1, "column": 1,
        "overrides": [
            {"layer": "workflow vars", "file": "flow.yaml", "line": 6, "column": 10},
            {"layer": "workflow varsFiles", "file": "base.yaml", "line": 2, "column": 1},
        ],
    }  # fmt: skip
    assert data["variableOrigins"]["d"]["layer"] == "--var"
    mine = data["effectiveOrigins"]["t"]["c"]
    assert (mine["layer"], [item["layer"] for item in mine["overrides"]]) == ("--vars-file", ["task vars"])
    human = flow("explain", "flow.yaml", "--vars-file", "more.yaml", "--var", 'd="hush-pair"')
    assert "hush" not in human.out
    assert re.search(
        r"^b +all tasks +--vars-file +more.yaml:1 +workflow vars flow.yaml:6; .*base.yaml:2$", human.out, re.M
    )
    assert flow("explain", "hello.yaml").out == "the workflow has no variables\n"
    assert not flow.database.parent.exists()


# ---------------------------------------------------------------------- inputs


def test_a_slip_in_the_name_of_an_input_is_refused(cli: Any) -> None:
    for verb in ("check", "plan", "run", "submit"):
        result = cli.json(verb, "hello.yaml", "--input", "nmae=Ada")
        assert result.error["code"] == "usage"
        [found] = json.loads(result.err)["diagnostics"]
        assert (found["code"], found["help"]) == ("schema_violation", "did you mean 'name'?")
        assert "it has name" in found["message"]
    assert not cli.database.parent.exists()


def test_an_input_without_any_effect_is_a_warning(cli: Any) -> None:
    cli.write("in.json", '{"nmae": 1, "shared": 2}')
    for arguments in (["--input", "other=1"], ["--inputs", '{"nmae": 1}'], ["--inputs-file", "in.json"]):
        result = cli.json("run", "hello.yaml", *arguments)
        assert (result.code, result.data["output"]) == (0, {"text": "hello world"})
    checked = cli("check", "hello.yaml", "--inputs-file", "in.json")
    assert (checked.code, checked.err.count("warning: schema_violation: the workflow has no input")) == (0, 2)


def test_an_input_that_only_templates_name_is_known(cli: Any) -> None:
    spec = "  actions: {s: {kind: builtin.assign}}\n  tasks: [{id: t, uses: action:s, when: 'inputs.go', with: {x: '${{ inputs.x-1 }}'}}]\n"
    cli.write("flow.yaml", HEAD + spec)
    result = cli("run", "flow.yaml", "--input", "go=true", "--input", "x-1=2")
    assert (result.code, result.err) == (0, "")


# ---------------------------------------------------------------------- denials

DENIALS = {
    "program": ("tasks: [{id: t, uses: action:sh}]", "'rm'", "processAllowlist: [rm]"),
    "write": ("tasks: [{id: t, uses: action:write, with: {path: a, content: b}}]", "writableRoots", "writableRoots"),
    "tool": (
        "policy: {toolsDeny: [filesystem.read]}\n  tasks: [{id: t, uses: action:read, with: {path: hello.yaml}}]",
        "toolsDeny",
        "allow filesystem.read",
    ),
    "second program": (
        "policy: {processAllowlist: [wc, ls]}\n  tasks: [{id: t, uses: action:sh}]",
        "'rm'",
        "processAllowlist: [ls, wc, rm]",
    ),
    "write elsewhere": (
        "policy: {writableRoots: [build]}\n  tasks: [{id: t, uses: action:write, with: {path: ../a, content: b}}]",
        "'../a'",
        "write under build, or name its folder in writableRoots",
    ),
    "variable": (
        "policy: {processAllowlist: [rm]}\n  tasks: [{id: t, uses: action:sh, with: {env: {HOME: x}}}]",
        "'HOME'",
        "environmentAllowlist: [HOME]",
    ),
}


@pytest.mark.parametrize("what", DENIALS)
def test_what_is_certain_to_be_denied_is_a_warning_with_its_place(cli: Any, what: str) -> None:
    spec, named, hint = DENIALS[what]
    actions = "  actions:\n    sh: {kind: builtin.shell.exec, command: /bin/rm}\n    write: {kind: builtin.write}\n    read: {kind: builtin.read}\n"
    text = HEAD + actions + "  " + spec + "\n"
    cli.write("flow.yaml", text)
    result = cli.json("check", "flow.yaml")
    assert result.code == 0
    [found] = json.loads(result.out)["diagnostics"]
    assert (found["code"], found["severity"]) == ("policy_denied", "warning")
    assert named in found["message"]
    assert hint in found["help"]
    assert text.split("\n")[found["line"] - 1].strip()
    assert (
        found["line"]
        == {"program": 6, "second program": 6, "write": 9, "tool": 10, "variable": 10, "write elsewhere": 10}[what]
    )
    # It is true: the run is denied, and as a failed task, not as a refused document.
    run = cli.json("run", "flow.yaml")
    assert (run.code, run.data["error"]["code"]) == (4, "policy_denied")


def test_nothing_is_said_of_what_may_be_allowed(cli: Any) -> None:
    checked = cli.json("check", "shell.yaml")
    assert json.loads(checked.out)["diagnostics"] == []


# ---------------------------------------------------------------------- plan and graph

GRAPH = HEAD + (
    "  policy: {approval: mutations, processAllowlist: ['true'], writableRoots: [out]}\n"
    "  runtime: {maxConcurrency: 3, budgets: {maxTasks: 50}}\n"
    "  inputs: {items: [1, 2, 3]}\n"
    "  actions:\n"
    "    set: {kind: builtin.assign}\n"
    "    'odd \"<name>': {kind: builtin.assign}\n"
    "    run: {kind: builtin.shell.exec, command: 'true', idempotency: pure}\n"
    "  tasks:\n"
    "    - {id: first, uses: action:set}\n"
    "    - {id: each, uses: action:run, needs: [first], foreach: {items: '${{ inputs.items }}', maxItems: 10000}, timeoutSeconds: 7, retry: {maxAttempts: 4}, failure: continue}\n"
    "    - {id: side, uses: 'action:odd \"<name>', needs: [first], when: inputs.items}\n"
    "    - {id: last, uses: action:set, needs: [each, side, first]}\n"
)


def test_plan_for_people(cli: Any) -> None:
    cli.write("flow.yaml", GRAPH)
    out = cli("plan", "flow.yaml").out
    assert "tasks           7 (4 declared, 3 children of expansions), at most 3 at once" in out
    assert "budget          maxTasks 50" in out
    rows = {re.split(" {2,}", line)[1]: line for line in out.split("\n\n")[1].splitlines()[1:]}
    assert rows["each x3"].startswith("2-5 ")
    assert "process execution, pure, asks a person" in rows["each x3"]
    assert "7 s, 4 attempts, others go on" in rows["each x3"]
    assert "120 s, if" in rows["side"]
    assert "first, each, side" in rows["last"] or "each, side, first" in rows["last"]
    many = json.dumps(list(range(5000)))
    cli.write("many.json", json.dumps({"items": json.loads(many)}))
    assert len(cli("plan", "flow.yaml", "--inputs-file", "many.json").out.splitlines()) < 20


def test_graph_of_a_file(cli: Any) -> None:
    cli.write("flow.yaml", GRAPH)
    result = cli.json("graph", "flow.yaml")
    assert result.data["runId"] is None
    assert result.data["edges"] == [
        {"from": "first", "to": "each"},
        {"from": "first", "to": "side"},
        {"from": "each", "to": "last"},
        {"from": "side", "to": "last"},
        {"from": "first", "to": "last"},
    ]
    assert [node["children"] for node in result.data["nodes"]] == [0, 3, 0, 0]
    assert cli("graph", "flow.yaml").out == (
        "first  action:set\n"
        "├─ each  action:run, x3\n"
        '└─ side  action:odd "<name>\n'
        "   └─ last  action:set  (also needs each, first)\n"
    )
    expanded = cli.json("graph", "flow.yaml", "--expand").data["nodes"]
    assert len(expanded) == 7
    mermaid = cli("graph", "flow.yaml", "--format", "mermaid").out
    assert mermaid.startswith("flowchart TD\n")
    assert 'n2["side<br/>action:odd #34;#60;name#62;"]' in mermaid
    assert "n0 --> n1" in mermaid
    dot = cli("graph", "flow.yaml", "--format", "dot").out
    assert dot.startswith("digraph workflow {")
    assert dot.endswith("}\n")
    assert '"side" [label="side\\naction:odd \\"<name>"];' in dot
    assert '"first" -> "each";' in dot
    assert not cli.database.parent.exists()


def test_graph_of_a_run_tells_children_from_their_aggregate(cli: Any) -> None:
    spec = (
        "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: g}\nspec:\n"
        "  actions: {set: {kind: builtin.assign}}\n"
        "  tasks:\n"
        "    - {id: each, uses: action:set, foreach: {items: [1, 2, 3]}}\n"
        "    - {id: none, uses: action:set, foreach: {items: []}}\n"
        "    - {id: again, uses: action:set, failure: continue, loop: {maxIterations: 2, while: '${{ vars.loopIndex < 9 }}'}}\n"
    )
    cli.write("g.yaml", spec)
    run_id = cli.json("run", "g.yaml").data["runId"]
    each, none, again = cli.json("graph", run_id).data["nodes"]
    assert (each["children"], each["taskCounts"], each["state"]) == (3, {"succeeded": 3}, "succeeded")
    assert (none["children"], none["taskCounts"], none["state"]) == (0, {"succeeded": 1}, "succeeded")
    assert (again["children"], again["taskCounts"], again["state"]) == (2, {"succeeded": 2}, "failed")
    tree = cli("graph", run_id).out
    assert "each  action:set, x3, 3 succeeded\n" in tree
    assert "again  action:set, x2, 2 succeeded, the whole failed\n" in tree
    for form in ("mermaid", "dot"):
        drawn = cli("graph", run_id, "--format", form).out
        assert "x3, 3 succeeded" in drawn
        assert "4 succeeded" not in drawn


def test_graph_of_a_run_shows_states(cli: Any) -> None:
    result = cli.json("run", "shell.yaml", "--input", 'script=[ "$1" != 2 ]', "--input", "items=[1,2,3]")
    assert result.code == 4
    run_id = result.data["runId"]
    [node] = cli.json("graph", run_id).data["nodes"]
    assert node["state"] == "failed"
    assert node["taskCounts"]["failed"] == 1
    assert node["children"] == sum(node["taskCounts"].values()) == 3
    assert "style n0 fill:#ffcdd2" in cli("graph", "@latest", "--format", "mermaid").out
    assert "1 failed" in cli("graph", run_id).out
    # The stored plan is drawn: the file may be gone.
    (cli.folder / "shell.yaml").unlink()
    assert cli("graph", run_id).code == 0
    assert cli.json("graph", run_id, "--input", "a=1").error["code"] == "usage"


def test_graph_of_what_is_not_there(cli: Any) -> None:
    assert cli.json("graph", "absent.yaml").code == 2
    cli.json("run", "hello.yaml")
    assert cli.json("graph", "run-absent").error["code"] == "not_found"
    with sqlite3.connect(cli.database) as connection:
        plan = "UPDATE run_documents SET plan_json = replace(plan_json, '\"formatVersion\":1', '\"formatVersion\":9')"
        connection.execute(plan)
    assert cli.json("graph", "@latest").error["code"] == "incompatible_version"


def test_a_long_chain_can_be_drawn(cli: Any) -> None:
    tasks = "".join(f"    - {{id: t{n}, uses: action:s, needs: [t{n - 1}]}}\n" for n in range(1, 3000))
    cli.write(
        "flow.yaml",
        HEAD + f"  actions: {{s: {{kind: builtin.assign}}}}\n  tasks:\n    - {{id: t0, uses: action:s}}\n{tasks}",
    )
    out = cli("graph", "flow.yaml").out
    assert out.count("\n") == 3000


# ---------------------------------------------------------------------- check of several files


def test_check_of_several_files_ends_with_the_count(cli: Any) -> None:
    cli.write("bad.yaml", HEAD + "  tasks: [{id: a, uses: action:none}, {id: a, uses: action:none}]\n")
    cli.write("old.yaml", "playbook: old\ntasks: []\n")
    result = cli("check", "hello.yaml", "bad.yaml", "old.yaml")
    assert result.code == 2
    assert result.out.splitlines()[-1] == "3 files, 2 of them wrong"
    assert "old.yaml:1:1: error: migration_required: this is a playbook of an old format" in result.err
    assert "agentctl init" in result.err
    for line in (line for line in result.err.splitlines() if not line.startswith("  ")):
        assert re.match(r"(bad|old)\.yaml:\d+:\d+: error: [a-z_]+: .+ \(.+\)$", line), line
    assert cli("check", "hello.yaml", "shell.yaml").out.splitlines()[-1] == "2 files, all of them fine"


def test_warnings_in_a_sub_workflow_have_their_place_and_one_that_nobody_calls_is_told(cli: Any) -> None:
    head = "      version: 1.0.0\n      inputSchema: true\n      outputSchema: true\n      tasks:\n"
    cli.write(
        "calls.yaml",
        f"{HEAD}  policy: {{approval: never, processAllowlist: [sh]}}\n"
        "  actions:\n    w: {kind: builtin.write}\n    s: {kind: builtin.shell.exec, command: sh, idempotency: idempotent}\n"
        f"  subworkflows:\n    used:\n{head}"
        "        - {id: a, uses: action:w, with: {path: x, content: y}}\n"
        "        - {id: e, uses: action:s, foreach: {items: [1, 2]}, with: {env: {HOME: x}}}\n"
        f"    outer:\n{head}        - {{id: i, uses: workflow:used}}\n"
        f"    idle:\n{head}        - {{id: f, uses: action:w, foreach: {{items: '${{{{ inputs.z }}}}'}}, with: {{path: x, content: y}}}}\n"
        "  tasks:\n    - {id: c, uses: workflow:outer}\n",
    )
    found = json.loads(cli("check", "calls.yaml", "--output", "json").out)["diagnostics"]
    assert [(item["severity"], item["path"], item["line"]) for item in found] == [
        ("warning", "spec.subworkflows.idle", 23),
        ("warning", "spec.subworkflows.used.tasks[0].uses", 15),
        ("warning", "spec.subworkflows.used.tasks[1].with.env.HOME", 16),
    ]
    assert "never called" in found[0]["message"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{foreach: {items: [1]}, matrix: null}", "{foreach: {items: [1]}, matrix: {axes: {a: [1]}}}"),
        (
            "{loop: {maxIterations: 1, while: '${{ loop.output.x }}'}}",
            "{loop: {maxIterations: 1, while: '${{ loop.output.x }}'}, when: inputs.x}",
        ),
        ("{uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}", "{uses: router}"),
        (
            "{uses: action:set}",
            "{uses: action:set, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}",
        ),
        ("{uses: workflow:w, with: {x: 1}}", "{uses: workflow:w, when: inputs.x}"),
        ("{uses: workflow:w, failure: continue}", "{uses: workflow:w, retry: {maxAttempts: 2}}"),
        ("{vars: {mine: 1}}", "{vars: {foreachIndex: 1}}"),
        ("{foreach: {items: [1], as: each}}", "{foreach: {items: [1], as: matrix}}"),
    ],
)
def test_the_schema_for_editors_knows_which_fields_of_a_task_go_together(cli: Any, right: str, wrong: str) -> None:
    validator = jsonschema_rs.Draft202012Validator(cli.json("schema").data)
    for fields, valid in ((right, True), (wrong, False)):
        task = {"id": "a", "uses": "action:set", **yaml.safe_load(fields)}
        sub = {
            "version": "1.0.0",
            "inputSchema": True,
            "outputSchema": True,
            "tasks": [{"id": "t", "uses": "action:set"}],
        }
        tasks = [task, {"id": "b", "uses": "action:set", "needs": ["a"]}]
        spec = {"actions": {"set": {"kind": "builtin.assign"}}, "subworkflows": {"w": sub}, "tasks": tasks}
        document = {"apiVersion": "agentctl.dev/v1", "kind": "Workflow", "metadata": {"name": "x"}, "spec": spec}
        cli.write("flow.json", json.dumps(document))
        assert validator.is_valid(document) is valid
        assert cli("check", "flow.json").code == (0 if valid else 2)


def test_a_place_in_a_variables_file_is_one_that_can_be_opened_from_here(cli: Any) -> None:
    (cli.folder / "deep").mkdir()
    cli.write("deep/more.yaml", "a: [\n")
    cli.write(
        "deep/flow.yaml",
        f"{HEAD}  varsFiles: [more.yaml]\n  actions: {{n: {{kind: builtin.assign}}}}\n  tasks: [{{id: a, uses: action:n}}]\n",
    )
    refused = json.loads(cli("check", "deep/flow.yaml", "--output", "json").err)
    assert {item["file"] for item in refused["diagnostics"]} == {"deep/more.yaml"}
    cli.write("deep/more.yaml", "a: 1\n")
    origin = cli.json("explain", "deep/flow.yaml").data["variableOrigins"]["a"]
    assert origin["file"] == "deep/more.yaml"


ITEMS = """apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: items}
spec:
  inputs: {files: ["a b.wav", "bad\\e.wav", "LONG/1.wav"]}
  policy: {approval: never, processAllowlist: [sh]}
  runtime: {maxConcurrency: 1}
  actions:
    convert: {kind: builtin.shell.exec, command: sh}
    note: {kind: builtin.assign}
  tasks:
    - id: convert
      uses: action:convert
      failure: continue
      foreach: {items: "${{ inputs.files }}", as: file}
      with: {args: [-c, 'case $1 in bad*) exit 3;; esac', sh, "${{ vars.file }}"]}
    - id: each
      uses: action:note
      matrix: {axes: {token: [abc], os: [linux]}}
      with: {os: "${{ vars.matrix.os }}"}
"""


def test_people_see_which_item_a_child_of_an_expansion_is_for(cli: Any) -> None:
    """Its id does not tell, and what its command prints need not. No item can steer a terminal, or show a secret."""
    (cli.folder / "items.yaml").write_text(ITEMS.replace("LONG", "long" * 20))
    planned = cli("plan", "items.yaml").out
    assert "  file=a b.wav" in planned
    assert "  os=linux, token=[REDACTED]" in planned
    assert re.search("  file=longlong[long]*…[long]*long/1.wav\n", planned)
    ran = cli("run", "items.yaml")
    assert ran.code == 4
    [failed] = [line for line in ran.out.splitlines() if line.startswith("  task convert--0001-")]
    assert " (file=bad\\x1b.wav): process_exit: " in failed
    inspected = cli("inspect", "@latest").out.splitlines()
    assert [line.split()[:2] for line in inspected if line.startswith("TASK")] == [["TASK", "ITEM"]]
    assert any(line.startswith("convert--0000-") and "  file=a b.wav  " in line for line in inspected)
    assert any(line.startswith("each--0000-") and "  os=linux, token=[REDACTED]  " in line for line in inspected)


def test_a_command_with_its_arguments_in_it_gets_advice_that_helps(cli: Any) -> None:
    """Not to allow a program of that name: there is none."""
    spec = "  policy: {processAllowlist: [echo]}\n  actions: {say: {kind: builtin.shell.exec, command: echo -n x}}\n"
    cli.write("flow.yaml", HEAD + spec + "  tasks: [{id: t, uses: action:say}]\n")
    [found] = json.loads(cli.json("check", "flow.yaml").out)["diagnostics"]
    assert (found["code"], found["severity"]) == ("policy_denied", "warning")
    assert found["help"] == "command: echo, and the rest as args, one text for each"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{{ inputs.name }}", "${{ inputs.name }}"),
        ("a {{vars.name}} b", "${{ vars.name }}"),
        ("${ tasks.t.output.x }", "${{ tasks.t.output.x }}"),
        ("${inputs.name}", "${{ inputs.name }}"),
        ("${{ inputs.name }}", None),
        ("{{ .Names }} {{ name }} ${HOME} ${{ inputs.name }}", None),
    ],
)
def test_a_template_as_other_programs_spell_it_is_a_warning(cli: Any, text: str, meant: str | None) -> None:
    spec = "  inputs: {name: Ada}\n  actions: {set: {kind: builtin.assign}}\n"
    cli.write("flow.yaml", HEAD + spec + f"  tasks: [{{id: t, uses: action:set, with: {{x: '{text}'}}}}]\n")
    checked = cli.json("check", "flow.yaml")
    found = json.loads(checked.out)["diagnostics"]
    assert checked.code == 0
    assert [item["help"] for item in found] == ([] if meant is None else [f"write {meant} if the value is meant"])
    assert all((item["line"], item["path"]) == (7, "spec.tasks[0].with.x") for item in found)
