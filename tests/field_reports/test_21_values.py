"""Field report 21: values that break JSON or the digest.

Results of commands; those of models are in `test_21_models.py`. Files with odd names are refused or kept in the tests
of what becomes an artifact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.field import Field
from support.scale import some

REFUSED = {
    "surrogate": '{"v":"\\ud800"}',
    "surrogate key": '{"\\udfff":1}',
    "nan": '{"v":NaN}',
    "infinity": '{"v":-Infinity}',
    "too large": '{"v":1e400}',
    "too deep": "[" * 65 + "]" * 65,
    "far too deep": "[" * 100_000 + "]" * 100_000,
    "duplicate key": '{"a":1,"a":2}',
    "cut": '{"v":[1,2',
    "empty": "",
    "not utf-8": b'{"v":"\xff"}',
}
ACCEPTED: dict[str, Any] = {
    "pair": '{"v":"\\ud83d\\ude00"}',
    "minus zero": '{"v":-0.0}',
    "float": '{"v":1.0}',
    "integer": '{"v":1}',
    "large": '{"v":1180591620717411303424}',
    "keys abc": '{"a":1,"b":{"x":1,"y":2},"c":3}',
    "keys cab": '{"c":3,"a":1,"b":{"y":2,"x":1}}',
    "keys bca": ' { "b" : {"x":1, "y":2}, "c":3, "a":1 } ',
    "composed": '{"v":"\\u00e9"}',
    "decomposed": '{"v":"e\\u0301"}',
    "sixty levels": "[" * 60 + "]" * 60,
}


def _document(field: Field, cases: dict[str, Any]) -> str:
    """Each case is the output of one command, and becomes the `output.json` of its task."""
    names = []
    for number, (_, text) in enumerate(cases.items()):
        names.append(f"c{number}")
        (field.folder / names[-1]).write_bytes(text if isinstance(text, bytes) else text.encode())
    actions = {
        "show": {"kind": "builtin.shell.exec", "command": "cat", "idempotency": "idempotent", "parse": "json"},
        "keep": {"kind": "builtin.assign"},
    }
    tasks: list[dict[str, Any]] = []
    for name in names:
        tasks.append({"id": name, "uses": "action:show", "failure": "continue", "with": {"args": [name]}})
        keep = {"v": f"${{{{ tasks.{name}.output.json }}}}"}
        tasks.append({"id": f"k{name[1:]}", "uses": "action:keep", "needs": [name], "with": keep})
    tasks.append(field.tick_task("after", idempotent=True))
    return field.workflow("values", tasks, actions=actions, programs=["cat"], concurrency=2)


@pytest.mark.timeout(300)
def test_what_json_cannot_carry_fails_its_task_with_a_type(field: Field) -> None:
    """Typed errors, the same worker goes on, and the next task runs."""
    pool = field.pool(1)
    [worker] = field.workers("idle")
    run_id = field.submit(_document(field, REFUSED))
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["state"]) == (4, "failed")
    tasks = {task["taskId"]: task for task in field.json("inspect", run_id).data["tasks"]}
    for number, what in enumerate(REFUSED):
        task = tasks[f"c{number}"]
        assert (task["state"], task["error"]["code"]) == ("failed", "output_not_json"), what
        assert tasks[f"k{number}"]["state"] == "skipped"
    assert tasks["after"]["state"] == "succeeded"
    assert field.labels() == ["after"]
    assert [entry.pid for entry in field.workers()] == [worker.pid]
    field.check_clean_end(drained=[pool])


@pytest.mark.timeout(300)
def test_values_come_back_exactly_and_digests_follow_the_rule(field: Field) -> None:
    """Order of keys gives one digest, composed and decomposed give two; 1, 1.0 and -0.0 are three, in each process."""
    digests: list[dict[str, str]] = []
    for _ in range(2):
        result = field.json("run", _document(field, ACCEPTED))
        assert result.code == 0
        tasks = {task["taskId"]: task for task in field.json("inspect", result.data["runId"]).data["tasks"]}
        found = {}
        for number, (what, text) in enumerate(ACCEPTED.items()):
            kept = tasks[f"k{number}"]
            assert repr(kept["output"]["output"]["v"]) == repr(_sorted(json.loads(text))), what
            found[what] = kept["outputDigest"]
        digests.append(found)
    assert digests[0] == digests[1]
    one = digests[0]
    assert one["keys abc"] == one["keys cab"] == one["keys bca"]
    assert one["composed"] != one["decomposed"]
    assert len({one["integer"], one["float"], one["minus zero"]}) == 3
    assert all(digest.startswith("sha256:v1:") for digest in one.values())
    field.check_clean_end()


def _sorted(value: Any) -> Any:
    """The same value with the keys in canonical order."""
    return json.loads(json.dumps(value, sort_keys=True))


NOT_VARIABLES = {
    "surrogate": '{"v": "\\ud800"}',
    "nan": '{"v": NaN}',
    "too large": '{"v": 1e400}',
    "too deep": '{"v": ' + "[" * 100 + "]" * 100 + "}",
    "duplicate key": '{"v": {"a": 1, "a": 2}}',
    "not utf-8": b'{"v": "\xff"}',
}


@pytest.mark.timeout(300)
def test_variables_and_inputs_are_held_to_the_same_rules(field: Field) -> None:
    """What a task could not give is not taken from a file or the command line; what it could comes back exactly."""
    keep = {"kind": "builtin.assign"}
    tasks = [{"id": "k", "uses": "action:keep", "with": {"v": "${{ vars.v }}", "i": "${{ inputs.i }}"}}]
    document = field.workflow("kept", tasks, actions={"keep": keep})
    for what, text in some(NOT_VARIABLES.items()):
        (field.folder / "v.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        for option in ("--vars-file", "--inputs-file"):
            result = field.json("run", document, option, "v.json")
            assert (result.code, result.error["code"]) == (2, "usage"), (what, option)
    assert not field.database.exists()
    for what, text in some(ACCEPTED.items()):
        (field.folder / "v.json").write_text(text if text.strip().startswith("{") else '{"v":' + text + "}")
        value = json.loads((field.folder / "v.json").read_text())
        wanted = _sorted(value)
        given = ["--var", f"v={json.dumps(wanted)}", "--inputs", json.dumps({"i": wanted})]
        output = field.json("run", document, *given).data["output"]["k"]["output"]
        assert repr(output) == repr({"i": wanted, "v": wanted}), what
        if "v" in wanted:
            result = field.json("run", document, "--vars-file", "v.json", "--input", "i=0")
            assert repr(result.data["output"]["k"]["output"]["v"]) == repr(wanted["v"]), what
    field.check_clean_end()


@pytest.mark.timeout(300)
def test_names_that_are_not_utf_8_end_in_no_traceback(field: Field) -> None:
    """A document, an inputs file, a workspace and a database with the byte 0xFF in their names: used, or refused."""
    field.workflow("small", [field.tick_task("small", idempotent=True)])
    text = (field.folder / "small.yaml").read_bytes()
    odd = bytes(field.folder) + b"/odd\xff"
    Path(str(odd, "utf-8", "surrogateescape") + ".yaml").write_bytes(text)
    Path(str(odd, "utf-8", "surrogateescape")).mkdir()
    for verb in (["check", b"odd\xff.yaml"], ["run", b"odd\xff.yaml"], ["submit", b"odd\xff.yaml"]):
        result = field(*verb, "--output", "json")
        assert result.code in (0, 2), result.err
        json.loads(result.out or result.err)
    for option, value in (("--workspace", b"odd\xff"), ("--db", b"odd\xff/x.db"), ("--inputs-file", b"none\xff.json")):
        result = field("run", "small.yaml", option, value, "--output", "json")
        assert result.code in (0, 2, 5), result.err
        json.loads((result.out or result.err).splitlines()[-1])
    for option, value in (("--input", b"x=\xff"), ("--var", b'x="\xff"'), ("--var", b"\xff=1")):
        result = field("run", "small.yaml", option, value, "--output", "json")
        assert (result.code, result.error["code"]) == (2, "usage")
    Path(str(odd, "utf-8", "surrogateescape") + ".vars.yaml").write_bytes(b"x: 1\n")
    for value in (b"odd\xff.vars.yaml", b"none\xff.yaml"):
        result = field("explain", "small.yaml", "--vars-file", value, "--output", "json")
        assert result.code == (2 if value.startswith(b"none") else 0), result.err
        json.loads(result.out or result.err)
    # A name from a listing reaches the next task as text with a replacement, and all of its bytes beside it.
    (field.folder / "listed").mkdir()
    Path(str(bytes(field.folder) + b"/listed/a\xff", "utf-8", "surrogateescape")).touch()
    actions = {
        "ls": {"kind": "builtin.shell.exec", "command": "ls", "idempotency": "idempotent"},
        "read": {"kind": "builtin.read"},
    }
    tasks: list[dict[str, Any]] = [
        {"id": "ls", "uses": "action:ls", "with": {"args": ["listed"]}},
        {
            "id": "read",
            "uses": "action:read",
            "needs": ["ls"],
            "failure": "continue",
            "with": {"path": "listed/${{ tasks.ls.output.stdout }}"},
        },
        field.tick_task("after", idempotent=True, needs=["ls"]),
    ]
    outcome = field.json("run", field.workflow("odd", tasks, actions=actions, programs=["ls"]))
    assert outcome.code == 4
    listed = {task["taskId"]: task for task in field.json("inspect", outcome.data["runId"]).data["tasks"]}
    assert listed["ls"]["output"]["stdout"] == "a\ufffd\n"
    assert listed["ls"]["output"]["stdoutBase64"] == "Yf8K"
    assert (listed["read"]["state"], listed["read"]["error"]["code"]) == ("failed", "not_found")
    assert listed["after"]["state"] == "succeeded"
    field.check_clean_end()
