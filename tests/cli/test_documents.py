"""check, plan, schema and the inputs of a run: nothing here may leave a database behind."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

BAD_DOCUMENTS = {
    "unknown field": ("surprise: 1\n", "schema_violation"),
    "duplicate key": ("kind: Workflow\n", "yaml_syntax"),
    "tab": ("x:\n\ty: 1\n", "yaml_syntax"),
    "two documents": ("---\na: 1\n", "yaml_syntax"),
    "NaN": ("x: .nan\n", None),
}


def test_check_of_a_good_file(cli: Any) -> None:
    result = cli.json("check", "hello.yaml")
    assert result.code == 0
    assert set(result.data) >= {"valid", "workflow", "workflowDigest", "planDigest", "tasks"}
    assert (result.data["valid"], result.data["workflow"], result.data["tasks"]) == (True, "hello", 1)
    human = cli("check", "hello.yaml")
    assert (human.code, human.out) == (0, "hello.yaml: ok, workflow hello, 1 task\n")
    assert not cli.database.parent.exists()


def test_check_looks_at_every_file_and_remembers_the_wrong_one(cli: Any) -> None:
    cli.write("bad.yaml", "apiVersion: agentctl.dev/v1\nkind: Nothing\n")
    result = cli("check", "bad.yaml", "hello.yaml", "absent.yaml")
    assert result.code == 2
    assert result.out == "hello.yaml: ok, workflow hello, 1 task\n3 files, 2 of them wrong\n"
    assert "bad.yaml:2:" in result.err
    assert "absent.yaml" in result.err
    lines = cli("check", "bad.yaml", "hello.yaml", "--output", "json")
    assert lines.code == 2
    assert json.loads(lines.out)["kind"] == "CheckResult"
    found = json.loads(lines.err)
    assert found["diagnostics"][0].keys() == {
        "code", "severity", "message", "file", "line", "column", "path", "help",
    }  # fmt: skip


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
@pytest.mark.parametrize("verb", ["check", "plan", "run", "submit"])
def test_a_bad_document_is_a_usage_error_without_a_database(cli: Any, verb: str, name: str) -> None:
    text, code = BAD_DOCUMENTS[name]
    good = (cli.folder / "hello.yaml").read_text()
    cli.write("bad.yaml", good + text)
    result = cli.json(verb, "bad.yaml")
    assert result.error["code"] == "usage"
    assert result.code == 2
    diagnostics = json.loads(result.err)["diagnostics"]
    assert diagnostics[0]["line"] is not None
    if code is not None:
        assert code in {item["code"] for item in diagnostics}
    assert not cli.database.parent.exists()


@pytest.mark.parametrize("kind", ["directory", "fifo", "binary", "large", "absent"])
def test_what_is_no_document_file(cli: Any, kind: str) -> None:
    path = cli.folder / "odd.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "binary":
        path.write_bytes(bytes(range(256)))
    elif kind == "large":
        path.write_text("#" * ((1 << 20) + 1))
    for verb in ("check", "run"):
        result = cli(verb, "odd.yaml")
        assert result.code == 2
        assert "odd.yaml" in result.err
    assert not cli.database.parent.exists()


def test_plan(cli: Any) -> None:
    result = cli.json("plan", "hello.yaml")
    assert result.code == 0
    assert result.data["order"] == ["hi"]
    human = cli("plan", "hello.yaml")
    assert "hi" in human.out
    assert result.data["planDigest"] in human.out


def test_the_plan_depends_on_the_inputs_of_the_command_line(cli: Any) -> None:
    result = cli.json("plan", "shell.yaml", "--input", "items=[1,2,3]")
    assert len(result.data["order"]) == 4


def test_schema(cli: Any) -> None:
    printed = cli("schema")
    said = json.loads(printed.out)
    assert (said["$schema"].startswith("https://json-schema.org/"), said["title"]) == (True, "agentctl workflow")
    assert cli("schema", "--write", "schema.json").code == 0
    assert (cli.folder / "schema.json").read_text() == printed.out
    assert cli.json("schema").data == json.loads(printed.out)
    refused = cli.json("schema", "--write", "absent/schema.json")
    assert (refused.code, refused.error["code"]) == (5, "environment")


BAD_INPUTS = {
    "not JSON": ["--inputs", "{"],
    "no object": ["--inputs", "[1]"],
    "duplicate key": ["--inputs", '{"a": 1, "a": 2}'],
    "NaN": ["--inputs", '{"a": NaN}'],
    "infinite": ["--inputs", '{"a": 1e400}'],
    "lone surrogate": ["--inputs", '{"a": "\\ud800"}'],
    "too deep": ["--inputs", '{"a": ' + "[" * 100 + "]" * 100 + "}"],
    "no pair": ["--input", "name"],
    "no key": ["--input", "=1"],
    "pair twice": ["--input", "a=1", "--input", "a=2"],
    "duplicate key in a pair": ["--input", 'a={"b": 1, "b": 2}'],
    "infinite in a pair": ["--input", "a=1e400"],
    "absent file": ["--inputs-file", "absent.json"],
    "folder": ["--inputs-file", "."],
    "fifo": ["--inputs-file", "fifo"],
    "not UTF-8": ["--inputs-file", "bytes.json"],
    "both": ["--inputs", "{}", "--inputs-file", "ok.json"],
    "large": ["--inputs-file", "large.json"],
    "no workspace": ["--workspace", "absent"],
    "priority": ["--priority", "11"],
    "key": ["--idempotency-key", ""],
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_are_usage_errors_without_a_database(cli: Any, name: str) -> None:
    cli.write("ok.json", "{}")
    (cli.folder / "bytes.json").write_bytes(b'{"a": "\xff"}')
    if name == "fifo":
        os.mkfifo(cli.folder / "fifo")
    if name == "large":
        (cli.folder / "large.json").write_text('{"a": "' + "x" * (16 << 20) + '"}')
    result = cli.json("submit", "hello.yaml", *BAD_INPUTS[name])
    assert result.code == 2
    assert result.error["code"] == "usage"
    assert not cli.database.parent.exists()


def test_inputs_come_from_the_document_then_from_the_object_then_from_pairs(cli: Any) -> None:
    cli.write(
        "inputs.yaml",
        (cli.folder / "hello.yaml").read_text().replace("{name: world}", "{name: world, a: doc, b: doc, c: doc}"),
    )
    cli.write("given.json", json.dumps({"b": "file", "c": "file"}))
    result = cli.json("submit", "inputs.yaml", "--inputs-file", "given.json", "--input", "c=pair", "--input", "d=1.50")
    assert result.code == 0
    run = cli.json("inspect", result.data["runId"]).data["run"]
    assert run["inputs"] == {"name": "world", "a": "doc", "b": "file", "c": "pair", "d": 1.5}
    (cli.folder / "marked.json").write_bytes(b'\xef\xbb\xbf{"name": "Ada"}')
    assert cli.json("run", "hello.yaml", "--inputs-file", "marked.json").data["output"] == {"text": "hello Ada"}
    piped = cli.json("submit", "hello.yaml", "--inputs-file", "-", input='{"name": 18446744073709551616}')
    assert cli.json("inspect", piped.data["runId"]).data["run"]["inputs"] == {"name": 18446744073709551616}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("1.0", 1.0),
        ("true", True),
        ("null", None),
        ('"12"', "12"),
        ("NaN", "NaN"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_pair_is_json_or_else_text(cli: Any, text: str, value: object) -> None:
    run_id = cli.json("submit", "hello.yaml", "--input", f"x={text}").data["runId"]
    found = cli.json("inspect", run_id).data["run"]["inputs"]["x"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("verb", ["check", "plan", "run"])
def test_a_document_may_ask_for_more_output(cli: Any, verb: str) -> None:
    cli.write("loud.yaml", (cli.folder / "hello.yaml").read_text() + "  output: {verbose: true}\n")
    quiet, asked, loud = cli(verb, "hello.yaml"), cli(verb, "hello.yaml", "--verbose"), cli(verb, "loud.yaml")
    assert {quiet.code, asked.code, loud.code} == {0}
    assert "\n{\n" not in quiet.out
    assert "\n{\n" in asked.out
    assert "\n{\n" in loud.out
