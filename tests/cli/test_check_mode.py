"""`run --check`: what is executed, what is foreseen, what nobody can know; and that nothing is changed."""
# ruff: noqa: E501 - documents in a line each read best

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.scale import some

HEAD = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: flow}
spec:
  policy: {approval: APPROVAL, writableRoots: [out], processAllowlist: [touch, sh]}
  runtime: {maxConcurrency: 4}
  actions:
    set: {kind: builtin.assign}
    ensure: {kind: builtin.assert}
    read: {kind: builtin.read}
    write: {kind: builtin.write}
    put: {kind: builtin.memory.write}
    get: {kind: builtin.memory.read}
    touch: {kind: builtin.shell.exec, command: touch, args: [made-by-touch], parse: json}
"""


def snapshot(folder: Path) -> dict[str, Any]:
    """Every name, content and time of a folder, but for the database's own folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if ".agentctl" in path.parts:
            continue
        state = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        found[str(path.relative_to(folder))] = (state.st_mode, state.st_mtime_ns, state.st_ino, digest)
    return found


class Checked:
    """One check run: its outcome, and its tasks by id."""

    def __init__(self, result: Any) -> None:
        self.code = result.code
        self.data = result.data
        assert self.data["mode"] == "check"
        self.tasks = {task["taskId"]: task for task in self.data["tasks"]}

    @property
    def results(self) -> dict[str, str]:
        return {name: task["result"] for name, task in self.tasks.items()}


def check(cli: Any, spec: str, *arguments: str, approval: str = "never") -> Checked:
    """Check the document of a `spec`; the workspace has to be the same afterwards, and the run is recorded as a check."""
    cli.write("flow.yaml", HEAD.replace("APPROVAL", approval) + spec)
    before = snapshot(cli.folder)
    checked = Checked(cli.json("run", "flow.yaml", "--check", *arguments))
    assert snapshot(cli.folder) == before
    shown = cli.json("inspect", checked.data["runId"]).data
    assert shown["run"]["mode"] == "check"
    operations = {effect["request"]["operation"] for effect in shown["effects"]}
    assert operations <= {"builtin.read", "builtin.memory.write"}
    assert shown["approvals"] == []
    return checked


def test_each_kind_in_check_mode(cli: Any) -> None:
    cli.write("in.txt", "read me\n")
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: set, uses: action:set, with: {x: 1}}\n"
        "    - {id: ensure, uses: action:ensure, with: {that: true}}\n"
        "    - {id: read, uses: action:read, with: {path: in.txt}}\n"
        "    - {id: put, uses: action:put, needs: [read], with: {key: k, value: '${{ tasks.read.output.content }}'}}\n"
        "    - {id: get, uses: action:get, needs: [put], with: {key: k}}\n"
        "    - {id: write, uses: action:write, needs: [get], with: {path: out/a, content: '${{ tasks.get.output.value }}'}}\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: no, uses: action:set, when: inputs.go}\n"
        "  inputs: {go: false}\n",
        "--diff",
    )
    assert (checked.code, checked.data["state"]) == (0, "succeeded")
    assert checked.results == {
        "set": "executed",
        "ensure": "executed",
        "read": "executed",
        "put": "executed",
        "get": "executed",
        "write": "predicted",
        "touch": "requires_execution",
        "no": "skipped",
    }
    assert {name: task["predictability"] for name, task in checked.tasks.items()} == {
        **dict.fromkeys(("set", "ensure", "put", "get", "no"), "fully_predictable"),
        **dict.fromkeys(("read", "write"), "partially_predictable"),
        "touch": "requires_execution",
    }
    assert checked.tasks["write"]["diff"] == "--- /dev/null\n+++ b/out/a\n@@ -0,0 +1 @@\n+read me\n"
    assert checked.tasks["touch"]["expectedEffect"]["args"] == ["made-by-touch"]
    output = checked.data["output"]
    assert output["write"]["predictability"] == "fully_predictable"
    assert (output["write"]["before"], output["write"]["after"]) == (None, "read me\n")
    assert (output["touch"]["status"], output["touch"]["changed"]) == ("requires_execution", False)


def test_the_diff_is_that_of_diff_u_and_only_when_asked_for(cli: Any) -> None:
    (cli.folder / "out").mkdir()
    cli.write("out/a.txt", "one\ntwo\nthree\n")
    spec = '  tasks: [{id: w, uses: action:write, with: {path: out/a.txt, content: "one\\n2\\nthree\\n"}}]\n'
    assert check(cli, spec).tasks["w"]["diff"] is None
    with_diff = check(cli, spec, "--diff").tasks["w"]
    assert with_diff["changed"] is True
    assert with_diff["diff"].split("\n")[2:] == ["@@ -1,3 +1,3 @@", " one", "-two", "+2", " three", ""]
    human = cli("run", "flow.yaml", "--check", "--diff")
    assert human.code == 0
    assert with_diff["diff"] in human.out
    assert "nothing was changed" in human.out
    assert "-two" not in cli("run", "flow.yaml", "--check").out


def test_an_unchanged_file_is_foreseen_as_unchanged(cli: Any) -> None:
    (cli.folder / "out").mkdir()
    cli.write("out/a.txt", "same\n")
    spec = '  tasks: [{id: w, uses: action:write, with: {path: out/a.txt, content: "same\\n"}}]\n'
    task = check(cli, spec, "--diff", approval="mutations").tasks["w"]
    assert (task["result"], task["changed"], task["diff"], task["approval"]) == ("predicted", False, None, None)


def test_what_depends_on_something_that_was_not_executed_is_not_guessed(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: text, uses: action:set, needs: [touch], with: {t: '${{ tasks.touch.output.json }}'}}\n"
        "    - {id: status, uses: action:set, needs: [touch], with: {t: '${{ tasks.touch.output.changed }}'}}\n"
        "    - {id: guard, uses: action:set, needs: [touch], when: tasks.touch.output.exitCode == 0}\n"
        "    - {id: variable, uses: action:set, needs: [touch], vars: {v: '${{ tasks.touch.output.stdout }}'}}\n"
        "    - {id: ensure, uses: action:ensure, needs: [text], with: {that: '${{ tasks.text.output.output.t == 1 }}'}}\n"
        "    - {id: write, uses: action:write, needs: [text], with: {path: out/x, content: '${{ tasks.text.output.output.t }}'}}\n"
        "    - {id: put, uses: action:put, needs: [text], with: {key: k, value: '${{ tasks.text.output.output.t }}'}}\n"
        "    - {id: get, uses: action:get, needs: [put], with: {key: k}}\n"
        "    - {id: memory, uses: action:set, needs: [put], with: {m: '${{ memory.k }}'}}\n"
        "    - {id: free, uses: action:set, needs: [touch], with: {known: 1}}\n"
        "    - {id: off, uses: action:set, needs: [touch], when: inputs.go, with: {t: '${{ tasks.touch.output.stdout }}'}}\n"
        "  inputs: {go: false}\n"
        "  outputs: {known: '${{ tasks.free.output.output.known }}', open: '${{ tasks.text.output.output.t }}', mem: '${{ memory.k }}'}\n",
    )
    assert checked.code == 0
    unknown = {name for name, result in checked.results.items() if result == "requires_execution"}
    assert unknown == set(checked.tasks) - {"free", "off"}
    assert (checked.results["free"], checked.results["off"]) == ("executed", "skipped")
    assert checked.tasks["ensure"]["dependsOn"] == ["text"]
    assert checked.tasks["get"]["dependsOn"] == ["put"]
    assert checked.data["output"]["known"] == 1
    for name, on in (("open", "text"), ("mem", "put")):
        assert checked.data["output"][name]["status"] == "requires_execution"
        assert checked.data["output"][name]["dependsOn"] == [on]


def test_a_later_writer_makes_memory_known_again(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: put1, uses: action:put, needs: [touch], with: {key: k, value: '${{ tasks.touch.output.stdout }}'}}\n"
        "    - {id: put2, uses: action:put, needs: [put1], with: {key: k, value: known}}\n"
        "    - {id: get, uses: action:get, needs: [put2], with: {key: k}}\n",
    )
    assert (checked.results["put1"], checked.results["put2"], checked.results["get"]) == (
        "requires_execution", "executed", "executed",
    )  # fmt: skip
    assert checked.data["output"]["get"]["value"] == "known"


def test_writes_that_were_foreseen_are_seen_by_what_comes_later(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        '    - {id: one, uses: action:write, with: {path: out/a, content: "1\\n"}}\n'
        '    - {id: two, uses: action:write, needs: [one], with: {path: ./out//a, content: "1\\n2\\n"}}\n'
        "    - {id: read, uses: action:read, needs: [two], with: {path: out/a}}\n"
        "    - {id: early, uses: action:read, needs: [one], with: {path: out/b}, failure: continue}\n"
        "    - {id: late, uses: action:write, needs: [early], with: {path: out/b, content: x}}\n",
        "--diff",
    )
    assert checked.data["output"]["read"]["content"] == "1\n2\n"
    assert checked.results["read"] == "predicted"
    assert checked.tasks["two"]["diff"].split("\n")[2:] == ["@@ -1 +1,2 @@", " 1", "+2", ""]
    # Nothing before it makes the file: that fails in a real run, too.
    assert (checked.code, checked.results["early"], checked.results["late"]) == (4, "failed", "skipped")
    assert "not_found" in checked.tasks["early"]["reason"]


def test_a_file_that_a_program_may_make_is_not_called_missing(cli: Any) -> None:
    cli.write("in.txt", "old")
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: made, uses: action:read, needs: [touch], with: {path: made-by-touch}}\n"
        "    - {id: present, uses: action:read, needs: [touch], with: {path: in.txt}}\n"
        "    - {id: compare, uses: action:ensure, needs: [present], with: {that: '${{ tasks.present.output.content == new }}'}}\n"
        "    - {id: outside, uses: action:read, needs: [touch], failure: continue, with: {path: ../x}}\n",
    )
    assert checked.results["made"] == "requires_execution"
    assert "made-by-touch" in checked.tasks["made"]["reason"]
    assert checked.results["present"] == "executed"
    # It would fail with what the file holds now; the program may change that.
    assert checked.results["compare"] == "requires_execution"
    # This follows from the path alone.
    assert (checked.code, checked.results["outside"]) == (4, "failed")


def test_what_is_certain_to_fail_fails(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: bad, uses: action:ensure, with: {that: false, message: never true}}\n"
        "    - {id: after, uses: action:set, needs: [bad]}\n",
    )
    assert (checked.code, checked.data["state"], checked.data["reason"]) == (4, "failed", "task_failed")
    assert checked.results == {"bad": "failed", "after": "not_reached"}
    assert "never true" in checked.tasks["bad"]["reason"]
    denied = check(cli, "  tasks: [{id: w, uses: action:write, with: {path: elsewhere, content: x}}]\n")
    assert (denied.code, denied.results) == (4, {"w": "failed"})
    assert "policy_denied" in denied.tasks["w"]["reason"]


def test_nobody_is_asked_and_the_report_says_who_would_be(cli: Any) -> None:
    cli.write("in.txt", "text")
    spec = (
        "  tasks:\n"
        "    - {id: write, uses: action:write, with: {path: out/a, content: x}}\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: read, uses: action:read, with: {path: in.txt}}\n"
        "    - {id: put, uses: action:put, with: {key: k, value: 1}}\n"
        "    - {id: get, uses: action:get, needs: [put], with: {key: k}}\n"
    )
    mutations = check(cli, spec, approval="mutations")
    asked = {name for name, task in mutations.tasks.items() if task["approval"]}
    assert (mutations.code, asked) == (0, {"write", "touch"})
    assert mutations.results["read"] == "executed"
    always = check(cli, spec, approval="always")
    assert {name for name, task in always.tasks.items() if task["approval"]} == {"write", "touch", "read", "put"}
    assert (always.results["read"], always.results["put"]) == ("requires_execution", "executed")
    assert always.data["output"]["get"]["value"] == 1


def test_output_schemas_hold_for_what_was_executed_only_in_real_runs(cli: Any) -> None:
    spec = "  tasks: [{id: t, uses: action:set, outputSchema: {required: [absent]}}, {id: u, uses: action:touch, outputSchema: {required: [stdout]}}]\n"
    assert check(cli, spec).code == 0
    assert cli.json("run", "flow.yaml").code == 4


def test_children_of_an_expansion_are_foreseen_one_by_one(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: each, uses: action:write, foreach: {items: [a, b]}, with: {path: 'out/${{ vars.item }}', content: x}}\n"
        "    - {id: run, uses: action:touch, foreach: {items: [a, b]}}\n"
        "    - {id: sum, uses: action:set, needs: [run], with: {all: '${{ tasks.run.output.items }}'}}\n"
        "    - {id: files, uses: action:set, needs: [each], with: {all: '${{ tasks.each.output.items }}'}}\n",
    )
    assert [task["path"] for task in checked.tasks.values() if task["path"]] == ["out/a", "out/b"]
    assert checked.results["each"] == "executed"
    assert checked.results["run"] == checked.results["sum"] == "requires_execution"
    assert len(checked.data["output"]["files"]["output"]["all"]) == 2


def test_a_check_is_kept_apart_from_a_run(cli: Any) -> None:
    first = cli.json("run", "hello.yaml", "--check", "--idempotency-key", "k")
    assert cli.json("run", "hello.yaml", "--idempotency-key", "k").error["code"] == "conflict"
    assert cli.json("run", "hello.yaml", "--check", "--idempotency-key", "k").data["runId"] == first.data["runId"]
    [listed] = cli.json("runs", "list").data["runs"]
    assert listed["mode"] == "check"
    # Whoever looks later sees the same report.
    again = cli.json("wait", first.data["runId"])
    assert (again.data["mode"], again.data["tasks"]) == ("check", first.data["tasks"])


def test_a_pool_carries_out_a_check_as_carefully(cli: Any) -> None:
    """The worker knows the mode from the run, whoever has started it."""
    cli.write("flow.yaml", HEAD.replace("APPROVAL", "never") + "  tasks: [{id: t, uses: action:touch}]\n")
    pool = cli.start("workers", "start", "-n", "2")
    try:
        wait_until(lambda: "idle" in cli("workers", "list").out, what="an idle worker")
        result = cli.json("run", "flow.yaml", "--check")
        assert (result.code, result.data["tasks"][0]["result"]) == (0, "requires_execution")
        assert not (cli.folder / "made-by-touch").exists()
    finally:
        pool.terminate()
        pool.communicate(timeout=60)


@pytest.mark.parametrize("shown", [True, False])
def test_the_output_of_a_write_has_a_diff_only_with_diff(cli: Any, shown: bool) -> None:
    """`showDiff` is about what people see, and changes no result (contract 1.3 and 3)."""
    options = f"  output: {{showDiff: {str(shown).lower()}}}\n"
    spec = options + "  tasks: [{id: w, uses: action:write, with: {path: out/a, content: x}}]\n"
    cli.write("flow.yaml", HEAD.replace("APPROVAL", "never") + spec)
    assert cli.json("run", "flow.yaml").data["output"]["w"]["diff"] is None
    (cli.folder / "out/a").unlink()
    assert "+x" in cli.json("run", "flow.yaml", "--diff").data["output"]["w"]["diff"]


@pytest.mark.parametrize("shown", [True, False])
def test_an_approval_shows_a_diff_unless_the_document_says_otherwise(cli: Any, shown: bool) -> None:
    options = f"  output: {{showDiff: {str(shown).lower()}}}\n"
    spec = options + "  tasks: [{id: w, uses: action:write, with: {path: out/a, content: x}}]\n"
    cli.write("flow.yaml", HEAD.replace("APPROVAL", "mutations") + spec)
    assert cli.json("run", "flow.yaml").code == 3
    (asked,) = cli.json("approvals", "list").data["approvals"]
    assert ("+x" in (asked["expectedEffect"]["diff"] or "")) is shown
    assert cli("approvals", "approve", asked["approvalId"]).code == 0
    assert cli.json("resume", asked["runId"]).data["output"]["w"]["diff"] is None


# ---------------------------------------------------------------------- control flow

ROUTES = (
    "  tasks:\n"
    "    - {id: ask, uses: %s}\n"
    "    - {id: choose, uses: router, needs: [ask], route: {select: '${{ tasks.ask.output.changed }}', cases: [{equals: true, tasks: [yes]}], default: [no]}}\n"
    "    - {id: yes, uses: action:set, needs: [choose]}\n"
    "    - {id: no, uses: action:set, needs: [choose]}\n"
    "    - {id: after, uses: action:set, needs: [no], with: {x: '${{ tasks.no.output.changed }}'}}\n"
)


def test_a_router_chooses_where_it_can_and_else_leaves_all_ways_open(cli: Any) -> None:
    known = check(cli, ROUTES % "action:set")
    assert known.results == {
        "ask": "executed", "choose": "executed", "yes": "skipped", "no": "executed", "after": "executed",
    }  # fmt: skip
    unknown = check(cli, ROUTES % "action:touch")
    assert unknown.code == 0
    assert set(unknown.results.values()) == {"requires_execution"}
    assert unknown.tasks["yes"]["dependsOn"] == ["choose"]


def test_a_loop_whose_guard_cannot_be_known_does_not_fail(cli: Any) -> None:
    loop = (
        "  tasks:\n"
        "    - {id: again, uses: action:%s, loop: {maxIterations: 3, while: '${{ vars.loopIndex %s }}'}, with: {}}\n"
        "    - {id: after, uses: action:set, needs: [again], with: {n: '${{ tasks.again.output.iterations }}'}}\n"
    )
    known = check(cli, loop % ("set", "< 2"))
    assert (known.code, known.data["output"]["after"]["output"]) == (0, {"n": 2})
    unknown = check(cli, loop % ("touch", "< 2"))
    assert (unknown.code, set(unknown.results.values())) == (0, {"requires_execution"})
    endless = check(cli, loop % ("set", "< 9"))
    assert (endless.code, endless.results["again"]) == (4, "failed")
    assert check(cli, loop % ("touch", "< 9")).code == 0


def test_a_sub_workflow_is_foreseen_as_far_as_its_tasks_are(cli: Any) -> None:
    spec = (
        "  subworkflows:\n"
        "    w:\n"
        "      version: 1.0.0\n"
        "      inputSchema: {type: object, properties: {n: {type: integer}}, required: [n]}\n"
        "      outputSchema: {type: object}\n"
        "      outputs: {n: '${{ tasks.inner.output.output.n }}'}\n"
        "      tasks: [{id: inner, uses: action:set, with: {n: '${{ inputs.n }}'}}, {id: made, uses: action:touch}]\n"
        "  tasks:\n"
        "    - {id: touch, uses: action:touch}\n"
        "    - {id: known, uses: workflow:w, with: {n: 1}}\n"
        "    - {id: open, uses: workflow:w, needs: [touch], with: {n: '${{ tasks.touch.output.exitCode }}'}}\n"
        "    - {id: sum, uses: action:set, needs: [known], with: {n: '${{ tasks.known.output.n }}'}}\n"
    )
    checked = check(cli, spec)
    assert checked.code == 0
    assert checked.data["output"]["sum"]["output"] == {"n": 1}
    assert checked.results["known--made"] == checked.results["open--inner"] == "requires_execution"
    assert checked.results["open"] == "requires_execution"
    told = "uses: workflow:w, needs: [said], with: {n: '${{ tasks.said.output.output.n }}'}"
    said = "    - {id: said, uses: action:set, with: {n: text}}\n    - {id: known, "
    wrong = check(cli, spec.replace("    - {id: known, ", said).replace("uses: workflow:w, with: {n: 1}", told))
    assert wrong.code == 4
    assert "inputSchema" in str(wrong.data["error"])


# ---------------------------------------------------------------------- what is certain

UNDECIDED = (
    "  tasks:\n"
    "    - {id: p, uses: action:touch}\n"
    "    - {id: r, uses: router, needs: [p], route: {select: '${{ tasks.p.output.json }}', cases: [{equals: 1, tasks: [c]}], default: [d]}}\n"
    "    - {id: c, uses: action:set, needs: [r]}\n"
    "    - {id: d, uses: action:set, needs: [r]}\n"
    "    - {id: w, uses: action:set, needs: [p], when: tasks.p.output.json == 2}\n"
)
FAILS = {
    "an assertion": "uses: action:ensure, with: {that: false}",
    "a denial": "uses: action:write, with: {path: elsewhere, content: x}",
    "a missing input": "uses: action:set, with: {v: '${{ inputs.nope }}'}",
    "a guard": "uses: action:set, when: inputs.nope",
    "a fan-out": "uses: action:ensure, with: {that: false}, foreach: {items: [1]}",
    "a loop": "uses: action:set, loop: {maxIterations: 1, while: '${{ vars.loopIndex < 9 }}'}",
}


def test_nothing_is_certain_to_fail_while_it_is_open_whether_it_runs(cli: Any) -> None:
    for what, task in some(FAILS.items()):
        for need in ("d", "w"):
            between = f"    - {{id: x, uses: action:set, needs: [{need}]}}\n    - {{id: fail, needs: [x], {task}}}\n"
            checked = check(cli, UNDECIDED + between)
            assert (checked.code, checked.results["fail"]) == (0, "requires_execution"), (what, need)
        # Behind a program that is only not executed each of them is certain.
        checked = check(cli, UNDECIDED + f"    - {{id: fail, needs: [p], {task}}}\n")
        assert checked.code == 4, what


def test_what_is_not_certain_says_why(cli: Any) -> None:
    spec = UNDECIDED + "    - {id: fail, uses: action:ensure, needs: [d], with: {that: false, message: no}}\n"
    assert (
        check(cli, spec).tasks["fail"]["reason"] == "would fail if it ran, which is not certain: assertion_failed: no"
    )


def test_what_a_guard_has_read_too_early_decides_nothing(cli: Any) -> None:
    """The program may change the file that the guard of `go` looks at, so what follows need not happen."""
    cli.write("in.txt", "go")
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: p, uses: action:touch}\n"
        "    - {id: see, uses: action:read, needs: [p], with: {path: in.txt}}\n"
        "    - {id: go, uses: action:set, needs: [see], when: tasks.see.output.content == go}\n"
        "    - {id: fail, uses: action:ensure, needs: [go], with: {that: false}}\n",
    )
    assert (checked.code, checked.results["fail"]) == (0, "requires_execution")


def test_a_program_beside_a_read_may_be_first(cli: Any) -> None:
    read = "    - {id: read, uses: action:read, with: {path: made-by-touch}}\n"
    touch = "    - {id: p, uses: action:touch%s}\n"
    for tasks in (read + touch % "", touch % "" + read):
        assert check(cli, "  tasks:\n" + tasks).results["read"] == "requires_execution"
    assert check(cli, "  tasks:\n" + read + touch % ", needs: [read]").code == 4
    # A write of another file changes nothing of it, one of the same file does.
    write = "    - {id: w, uses: action:write, with: {path: out/%s, content: x}}\n"
    other = "  tasks:\n    - {id: read, uses: action:read, with: {path: out/a}}\n"
    assert check(cli, other + write % "b").code == 4
    assert check(cli, other + write % "a").code == 0


def test_long_term_memory_is_certain_only_where_nothing_writes_it_before(cli: Any) -> None:
    actions = HEAD + (
        "    keep: {kind: builtin.long_term_memory.write}\n"
        "    look: {kind: builtin.long_term_memory.read}\n"
        "    find: {kind: builtin.long_term_memory.search}\n"
        "  memory: {longTerm: {namespace: own}}\n"
    )

    def outcome(before: str, looks: str, test: str) -> int:
        tasks = (
            f"  tasks:\n    - {{id: before, {before}}}\n    - {{id: look, needs: [before], {looks}}}\n"
            f"    - {{id: ok, uses: action:ensure, needs: [look], with: {{that: '${{{{ tasks.look.output.{test} }}}}'}}}}\n"
        )
        cli.write("flow.yaml", actions.replace("APPROVAL", "never") + tasks)
        return int(cli.json("run", "flow.yaml", "--check").code)

    keep = "uses: action:keep, with: {namespace: x, key: fresh, value: 1}"
    look = "uses: action:look, with: {namespace: x, key: %s}"
    assert outcome(keep, look % "fresh", "value == 1") == 0
    assert outcome(keep, look % "other", "value == 1") == 4
    assert outcome(keep, "uses: action:look, with: {key: fresh}", "value == 1") == 0
    assert outcome(keep, "uses: action:find, with: {query: word, namespace: x}", "count == 1") == 0
    assert outcome("uses: action:touch", look % "fresh", "value == 1") == 0
    assert outcome("uses: action:set", look % "fresh", "value == 1") == 4


def test_what_went_through_working_memory_is_as_uncertain_as_before(cli: Any) -> None:
    cli.write("in.txt", "old")
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: p, uses: action:touch}\n"
        "    - {id: see, uses: action:read, needs: [p], with: {path: in.txt}}\n"
        "    - {id: put, uses: action:put, needs: [see], with: {key: k, value: '${{ tasks.see.output.content }}'}}\n"
        "    - {id: get, uses: action:get, needs: [put], with: {key: k}}\n"
        "    - {id: ok, uses: action:ensure, needs: [get], with: {that: '${{ tasks.get.output.value == new }}'}}\n",
    )
    assert (checked.code, checked.results["ok"]) == (0, "requires_execution")


def test_a_missing_input_is_certain_whatever_else_is_read(cli: Any) -> None:
    for read in ("${{ inputs.nope }}", "${{ vars.nope }}", "${{ inputs.known.deeper }}"):
        checked = check(
            cli,
            "  inputs: {known: {}}\n"
            "  tasks:\n"
            "    - {id: p, uses: action:touch}\n"
            f"    - {{id: e, uses: action:set, needs: [p], with: {{v: '{read}', w: '${{{{ tasks.p.output.json }}}}'}}}}\n",
        )
        assert (checked.code, checked.results["e"]) == (4, "failed"), read


def test_the_report_names_the_task_and_says_what_was_not_looked_at(cli: Any) -> None:
    spec = (
        "    keep: {kind: builtin.long_term_memory.write}\n"
        "  memory: {longTerm: {}}\n"
        "  tasks:\n"
        "    - {id: kept, uses: action:keep, with: {namespace: x, key: fresh, value: 1}}\n"
        "    - {id: bad, uses: action:ensure, needs: [kept], with: {that: false, message: never true}}\n"
        "    - {id: after, uses: action:set, needs: [bad]}\n"
    )
    cli.write("flow.yaml", HEAD.replace("APPROVAL", "never") + spec)
    lines = cli("run", "flow.yaml", "--check").out.splitlines()
    assert "  task bad: assertion_failed: never true" in lines
    rows = {line.split()[0]: line for line in lines if line[:1].isalpha()}
    assert rows["kept"].endswith("would write the entry fresh in x")
    assert rows["after"].endswith("not reached      the run ends before")


def test_a_loop_that_cannot_be_known_says_only_that(cli: Any) -> None:
    checked = check(
        cli,
        "  tasks:\n"
        "    - {id: p, uses: action:touch}\n"
        "    - {id: a, uses: action:set, needs: [p], loop: {maxIterations: 2, while: '${{ tasks.p.output.json == 2 }}'}}\n"
        "    - {id: b, uses: action:touch, loop: {maxIterations: 2, while: '${{ vars.loopIndex < 9 }}'}}\n",
    )
    assert checked.code == 0
    assert checked.tasks["a"]["reason"] == "depends on p"
    assert str(checked.tasks["b"]["reason"]).startswith("depends on b--0000-")
