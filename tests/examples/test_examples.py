"""Every file of `ops/examples/` does what its header promises, in a fresh copy of the folder."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.field import Field

EXAMPLES = Path(__file__).resolve().parents[2] / "ops" / "examples"
FILES = ["hello", "dataflow", "condition", "fan-out", "matrix", "memory", "retry"]


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    """A copy of the examples, and the end of everything that was started in it."""
    place = Field(tmp_path)
    shutil.copytree(EXAMPLES, place.folder, dirs_exist_ok=True)
    try:
        yield place
    finally:
        place.close()


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hello(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"greeting": "Hello, world!"}
    assert run("--input", "name=Ada") == {"greeting": "Hello, Ada!"}


def _dataflow(field: Field, run: Callable[..., Any]) -> None:
    path = field.folder / "build/dataflow/notes.txt"
    assert run() == {"path": "build/dataflow/notes.txt", "content": "Notes on workflows (3 lines)\n"}
    assert path.read_text() == "Notes on workflows (3 lines)\n"
    stamp = path.stat().st_mtime_ns
    # The second time nothing is written, and no effect is recorded for it.
    run()
    assert path.stat().st_mtime_ns == stamp
    effects = field.json("inspect", "@latest").data["effects"]
    assert "builtin.write" not in {effect["request"]["operation"] for effect in effects}
    assert run("--input", "subject=plans")["content"] == "Notes on plans (3 lines)\n"
    failed = field.json("run", "dataflow.yaml", "--input", "lines=0")
    assert failed.code == 4
    assert "there must be at least one line" in str(failed.data["error"])


def _condition(field: Field, run: Callable[..., Any]) -> None:
    first = run()
    assert first["rehearsal"]["output"] == {"message": "a rehearsal on test"}
    second = run("--input", "stage=production", "--input", "replicas=4")
    assert second["production"]["output"] == {"message": "4 replicas for production"}
    assert second["spread"]["output"] == {"message": "spread over 4 places"}
    tasks = {task["taskId"]: task for task in field.json("inspect", "@latest").data["tasks"]}
    assert {name: task["state"] for name, task in tasks.items()} == {
        "production": "succeeded",
        "rehearsal": "skipped",
        "spread": "succeeded",
    }
    # What was not chosen says why, also in the outputs.
    for skipped in (first["production"], first["spread"], second["rehearsal"]):
        assert "reason" in skipped
        assert "output" not in skipped


def _fan_out(field: Field, run: Callable[..., Any]) -> None:
    items = run()["checksums"]
    assert [item["output"]["stdout"].split() for item in items] == [
        [_sum(field.folder / f"{name}.yaml"), f"{name}.yaml"] for name in FILES
    ]
    (field.folder / "-x").write_text("a name that looks like an option")
    (field.folder / "a b").write_text("a name with a blank")
    items = run("--workspace", ".", "--input", 'files=["-x","a b"]')["checksums"]
    assert [item["output"]["stdout"][:64] for item in items] == [_sum(field.folder / "-x"), _sum(field.folder / "a b")]


def _matrix(field: Field, run: Callable[..., Any]) -> None:
    builds = run()["builds"]
    assert [item["output"]["stdout"] for item in builds] == [
        "linux debug number 0\n",
        "linux release number 1\n",
        "macos debug number 2\n",
        "macos release number 3\n",
    ]
    plan = field("plan", "matrix.yaml").out
    assert all(item["taskId"] in plan for item in builds)


def _memory(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"recalled": "green", "text": "green, size 42", "before": 0}


def _long_term_memory(field: Field, run: Callable[..., Any]) -> None:
    for _ in range(2):
        output = run()
        assert (output["found"], output["trees"]) == (1, ["apple", "plum"])
        [best] = output["answer"]
        record = best["record"]
        assert (record["namespace"], record["key"]) == ("notes", "roof")
        assert record["entry"]["content"] == {"type": "text", "text": "The roof is covered with copper."}
        assert (best["textScoreMillionths"], best["vectorScoreMillionths"]) == (500_000, 408_248)
        assert best["scoreMillionths"] == 454_124
        # 30 days, up to the moment between the look at the clock and the commit.
        assert abs(record["expiresAt"] - record["updatedAt"] - 30 * 86_400_000) < 60_000
        effects = field.json("inspect", "@latest").data["effects"]
        assert {(e["request"]["operation"].rpartition(".")[2], e["request"]["effectClass"]) for e in effects} == {
            ("write", "external_mutate"),
            ("read", "observe"),
            ("search", "observe"),
            ("promote", "internal_state"),
        }
        assert {e["status"] for e in effects} == {"succeeded"}
    found = field.json("memory", "search", "copper roof", "--namespace", "notes").data
    assert (found["count"], found["results"][0]["scoreMillionths"]) == (1, 1_000_000)
    assert field.json("memory", "get", "roof", "--namespace", "notes").data == found["results"][0]["record"]
    assert run("--input", "question=nothing of that kind") == {"found": 0, "answer": [], "trees": ["apple", "plum"]}


def _retry(field: Field, run: Callable[..., Any]) -> None:
    for _ in range(2):
        assert run() == {"said": "connected at the second attempt\n"}
        [task] = field.json("inspect", "@latest").data["tasks"]
        assert (task["state"], task["attempt"], task["deliveries"]) == ("succeeded", 2, 1)
        log = field.json("logs", "@latest").data["attempts"]
        assert [(entry["attempt"], entry["exitCode"]) for entry in log] == [(1, 1), (2, 0)]
        assert log[0]["stderr"] == "nobody answers yet\n"


def _archive(field: Field, run: Callable[..., Any]) -> None:
    output = run()
    assert output["report"] == "build/archive/report.md"
    report = (field.folder / output["report"]).read_text()
    assert report.startswith("# Examples\n")
    for name in FILES:
        original = field.folder / f"{name}.yaml"
        copy = field.folder / f"build/archive/{name}.yaml.gz"
        assert gzip.decompress(copy.read_bytes()) == original.read_bytes()
        assert f"{_sum(original)}  {name}.yaml" in report
    assert len(output["copies"]) == len(FILES)
    assert {item["state"] for item in output["copies"]} == {"succeeded"}
    assert not list((field.folder / "build").rglob("*.part"))
    papers = field.folder / "papers"
    (papers / "sub").mkdir(parents=True)
    (papers / "a b.txt").write_text("one")
    (papers / "sub" / "$(touch oops).txt").write_text("two")
    field.text("files.json", '{"files": ["a b.txt", "sub/$(touch oops).txt"]}')
    run("--workspace", "papers", "--inputs-file", "files.json", "--input", "title=Papers")
    assert (papers / "build/archive/report.md").read_text().startswith("# Papers\n")
    copy = papers / "build/archive/sub/$(touch oops).txt.gz"
    assert gzip.decompress(copy.read_bytes()) == b"two"
    assert not list(field.root.rglob("oops"))


def _approval(field: Field, run: Callable[..., Any]) -> None:
    result = field.json("run", "approval.yaml")
    assert (result.code, result.data["reason"]) == (3, "approval_required")
    target = field.folder / "artifacts" / "approved.txt"
    assert not target.exists()
    [asked] = field.json("approvals", "list").data["approvals"]
    assert "approval was durable" in asked["expectedEffect"]["diff"]
    assert field.json("approvals", "approve", asked["approvalId"], "--actor", "you", "--reason", "read it").code == 0
    assert field.json("resume", result.data["runId"]).code == 0
    assert target.read_text() == "approval was durable"


def _budget(field: Field, run: Callable[..., Any]) -> None:
    result = field.json("run", "budget.yaml")
    assert (result.code, result.data["reason"]) == (4, "budget_exceeded")
    found = field.json("inspect", "@latest").data
    assert [task["state"] for task in found["tasks"]].count("succeeded") == 10
    assert found["budget"]["exceeded"]["dimension"] == "processOutputBytes"
    assert found["budget"]["usage"]["processOutputBytes"] == found["budget"]["limits"]["processOutputBytes"] == 20


PROMISES: dict[str, Callable[[Field, Callable[..., Any]], None]] = {
    "hello.yaml": _hello,
    "dataflow.yaml": _dataflow,
    "condition.yaml": _condition,
    "fan-out.yaml": _fan_out,
    "matrix.yaml": _matrix,
    "memory.yaml": _memory,
    "long-term-memory.yaml": _long_term_memory,
    "retry.yaml": _retry,
    "archive.yaml": _archive,
    "approval.yaml": _approval,
    "budget.yaml": _budget,
}


def test_every_example_is_in_this_table() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(PROMISES)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", PROMISES)
def test_example(field: Field, file: str) -> None:
    checked = field.json("check", file)
    assert (checked.code, checked.data["valid"], checked.err) == (0, True, "")
    planned = field.json("plan", file)
    assert (planned.code, planned.err) == (0, "")
    assert checked.data["workflow"] == file.removesuffix(".yaml")
    assert not field.database.exists()

    def run(*arguments: str) -> Any:
        result = field.json("run", file, *arguments)
        assert (result.code, result.data["state"], result.err) == (0, "succeeded", "")
        return result.data["output"]

    PROMISES[file](field, run)
    # The lines of the header that are commands of ours are spelled as the program wants them.
    header = [line for line in (EXAMPLES / file).read_text().splitlines() if line.startswith("#   agentctl ")]
    assert header
    assert all(f"ops/examples/{file}" in line for line in header)
    field.check_clean_end()
