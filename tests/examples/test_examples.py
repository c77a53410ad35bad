"""Every file of `ops/examples/` does what its header promises, in a fresh copy of the folder."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.children import wait_until
from support.field import Field
from support.model_server import closed_port

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


def _vars(field: Field, run: Callable[..., Any]) -> None:
    labels = {"team": "core", "tier": "basic"}
    first = run()
    assert first["deployment"] == {"service": "web", "region": "us", "replicas": 1, "labels": labels}
    assert first["canary"] == {"title": "canary of web", "replicas": 1}
    file = ("--vars-file", "vars/production.yaml")
    second = run(*file)
    assert second["deployment"] == {"service": "web", "region": "us", "replicas": 3, "labels": {"tier": "gold"}}
    assert second["canary"]["replicas"] == 3
    assert run(*file, "--var", "replicas=5")["deployment"]["replicas"] == 5
    origins = field.json("explain", "vars.yaml", *file).data
    assert origins["variableOrigins"]["region"]["layer"] == "workflow vars"
    assert origins["variableOrigins"]["region"]["overrides"][0]["file"] == "vars/defaults.yaml"
    assert origins["effectiveOrigins"]["canary"]["replicas"]["file"] == "vars/production.yaml"
    assert origins["effectiveOrigins"]["canary"]["title"]["layer"] == "task vars"


def _check_diff(field: Field, run: Callable[..., Any]) -> None:
    def check(*arguments: str) -> dict[str, Any]:
        result = field.json("run", "check-diff.yaml", "--check", "--diff", *arguments)
        assert (result.code, result.data["mode"]) == (0, "check")
        return {task["taskId"]: task for task in result.data["tasks"]}

    folder = field.folder / "build" / "check-diff"
    new = check()
    assert not folder.exists()
    assert new["settings"]["diff"].splitlines()[2:] == [
        "@@ -0,0 +1,3 @@", "+[server]", "+host = localhost", "+port = 8080",
    ]  # fmt: skip
    assert {name: task["result"] for name, task in new.items()} == {
        "settings": "predicted",
        "copy": "predicted",
        "backup": "predicted",
        "count": "requires_execution",
        "note": "requires_execution",
    }
    assert run()["note"] == "3 build/check-diff/settings.bak\n"
    assert [task["changed"] for task in check().values()] == [False, False, False, None, None]
    changed = check("--input", "port=9090")
    for name in ("settings", "backup"):
        assert changed[name]["diff"].splitlines()[-2:] == ["-port = 8080", "+port = 9090"]
    assert "8080" in (folder / "settings.ini").read_text()


def _router(field: Field, run: Callable[..., Any]) -> None:
    first = run()
    assert (first["selected"], first["matched"], first["ship"]["output"]) == ("ship", True, {"result": "shipped"})
    record = {"router": "choose", "selected": "ship", "matched": True}
    assert first["hold"] == {"reason": "route not selected", "route": record}
    second = run("--input", "selected=other")
    assert (second["matched"], second["hold"]["output"]) == (False, {"result": "held"})
    assert second["ship"]["route"] == {"router": "choose", "selected": "other", "matched": False}


def _parallel(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"joined": {"left": 20, "right": 22, "was": 0}}


def _loop(field: Field, run: Callable[..., Any]) -> None:
    output = run()
    assert output["iterations"] == 2
    assert [item["state"] for item in output["items"]] == ["succeeded", "succeeded", "skipped"]
    first, second, third = output["items"]
    assert first["output"]["output"] == {"round": 0, "before": {"value": "seed"}}
    assert second["output"]["output"] == {"round": 1, "before": first["output"]}
    assert third["output"]["condition"]["result"] is False
    assert "refine--0000-ce12bbac409d" in field("plan", "loop.yaml").out


def _repair(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"calls": 2}
    assert run("--input", "left=4") == {"calls": 4}
    result = field.json("run", "repair.yaml", "--input", "left=9")
    assert (result.code, result.data["error"]["code"]) == (4, "loop_limit")
    states = [task["state"] for task in field.json("inspect", "@latest").data["tasks"]]
    assert states == ["succeeded"] * 4 + ["failed"]


def _subworkflow(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"result": "durable", "text": "summary: durable"}
    tasks = [task["taskId"] for task in field.json("inspect", "@latest").data["tasks"]]
    assert tasks == ["summary--inputs-4d45e657", "summary--prepare", "summary--finish", "summary", "tell"]
    assert run("--input", "topic=plans")["result"] == "plans"
    result = field.json("run", "subworkflow.yaml", "--input", "topic=3")
    assert (result.code, result.data["error"]["taskId"]) == (4, "summary--inputs-4d45e657")
    assert "inputSchema" in result.data["error"]["message"]


def _release(field: Field, run: Callable[..., Any]) -> None:
    output = run()
    assert [item["output"]["stdout"] for item in output["shop"]["checks"]] == [
        f"shop {platform} {kind}\n" for kind in ("unit", "smoke") for platform in ("linux", "macos")
    ]
    assert (output["shop"]["raised"]["iterations"], output["admin"]["way"]) == (2, "internal")
    assert output["shop"]["switched"]["route"]["router"] == "shop--way"
    assert output["admin"]["raised"]["reason"] == "route not selected"
    assert output["admin"]["switched"]["output"] == {"share": 100}
    output = run("--input", "tier=internal", "--input", 'platforms=["linux"]')
    assert len(output["shop"]["checks"]) == 2
    assert "iterations" not in output["shop"]["raised"]


def _crash_resume(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"content": "written once\n"}
    target = field.folder / "build/crash-resume/note.txt"
    target.unlink()
    # Its driver is killed right after the first commit; the write may be on its way.
    killed = field("run", "crash-resume.yaml", "--workers", "1", env={"AGENTCTL_FAULT": "after_commit:1"})
    assert killed.code == -9
    run_id = field.json("runs", "list").data["runs"][0]["runId"]
    resumed = field.json("resume", run_id)
    assert (resumed.code, resumed.data["output"]) == (0, {"content": "written once\n"})
    assert target.read_text() == "written once\n"


def _policy_denial(field: Field, run: Callable[..., Any]) -> None:
    result = field.json("run", "policy-denial.yaml")
    assert (result.code, result.data["state"], result.data["error"]["taskId"]) == (4, "failed", "save")
    assert not (field.folder / "build").exists()
    [task] = field.json("inspect", "@latest").data["tasks"]
    assert (task["state"], task["attempt"]) == ("failed", 1)


def _artifacts(field: Field, run: Callable[..., Any]) -> None:
    files = ["hello.yaml", "dataflow.yaml", "condition.yaml"]
    assert [item["state"] for item in run()["copies"]] == ["succeeded"] * 3
    kept = field.json("artifacts", "list", "--run", "@latest").data["references"]
    copies = {item["path"]: item["digest"] for item in kept}
    assert sorted(copies) == sorted([*(f"build/artifacts/{name}.gz" for name in files), "build/artifacts/summary.txt"])
    shutil.rmtree(field.folder / "build")
    for name in files:
        assert field.json("artifacts", "export", copies[f"build/artifacts/{name}.gz"], f"{name}.copy").code == 0
        assert gzip.decompress((field.folder / f"{name}.copy").read_bytes()) == (field.folder / name).read_bytes()
    assert field.json("artifacts", "verify").data["ok"] is True
    run()
    assert field.json("artifacts", "verify").data["checked"] == 4


def _recovery(field: Field, run: Callable[..., Any]) -> None:
    ledger = field.folder / "build" / "recovery" / "ledger"

    def said() -> list[str]:
        lines = ledger.read_text().splitlines()
        ledger.write_text("")
        return sorted(lines)

    assert field.json("run", "recovery.yaml").code == 4
    assert said() == ["count east", "count north", "count south", "prepare", "report"]
    planned = field.json("retry", "recovery.yaml", "@latest", "--failed", "--plan")
    assert (planned.code, len(planned.data["rerunTasks"]), said()) == (0, 3, [])
    (field.folder / "build" / "recovery" / "south").mkdir()
    retried = field.json("retry", "recovery.yaml", "@latest", "--failed")
    assert (retried.code, retried.data["state"]) == (0, "succeeded")
    assert said() == ["count south", "report"]
    text = (field.folder / "recovery.yaml").read_text()
    (field.folder / "recovery.yaml").write_text(text.replace(' regions"', ' regions in all"'))
    repaired = field.json("repair", "recovery.yaml", "@latest", "--from", "report", "--restart-successful")
    assert (repaired.code, said()) == (0, ["report"])
    assert repaired.data["output"]["report"].split() == ["3", "regions", "in", "all"]


def _fake_provider(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"answer": "fake: hello", "tokens": 1}
    assert run("--input", "question=who are you?")["answer"] == "fake: who are you?"


def _streaming(field: Field, run: Callable[..., Any]) -> None:
    shown = field("run", "streaming.yaml")
    assert shown.code == 0
    assert shown.err.splitlines()[:2] == [
        "tell| Once there was a run that was killed in the middle.",
        "tell| It was taken up again, and nobody noticed.",
    ]
    events = field.json("inspect", "@latest").data["streamEvents"]
    text = "".join(event["payload"]["text"] for event in events)
    assert text == run()["story"]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))


def _structured_handoff(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"decision": "approved"}
    found = field.json("inspect", "@latest").data
    operations = [effect["request"]["operation"] for effect in found["effects"]]
    assert operations == ["local", "tool.evidence", "local", "local"]
    assert "build 4711" in found["effects"][1]["result"]["content"]


def _resource_budget(field: Field, run: Callable[..., Any]) -> None:
    result = field.json("run", "resource-budget.yaml")
    assert (result.code, result.data["reason"]) == (4, "budget_exceeded")
    found = field.json("inspect", "@latest").data
    assert [task["state"] for task in found["tasks"]] == ["succeeded", "failed"]
    assert found["budget"]["exceeded"] == {"dimension": "providerRequests", "limit": 1, "attempted": 2}
    assert found["budget"]["usage"]["providerRequests"] == 1
    assert [effect["status"] for effect in found["effects"]] == ["succeeded", "requested"]


def _triage(field: Field, run: Callable[..., Any]) -> None:
    output = run()
    assert output == {
        "kind": "bug",
        "failed": ["tests/test_invoice.py::test_invoice_is_due_tomorrow"],
        "report": "build/triage/report.md",
    }
    assert (field.folder / output["report"]).read_text().startswith("# bug\n\n28 to 29 March 2026")
    steps = field.json("logs", "@latest", "investigate").data["conversation"]
    assert [step["tool"] or "model" for step in steps] == [
        "model", "read_file", "model", "read_file", "find_text", "model",
    ]  # fmt: skip
    budget = field.json("inspect", "@latest").data["budget"]
    assert (budget["usage"]["providerRequests"], budget["usage"]["toolCalls"]) == (3, 3)
    # One line makes it a workflow with a real model.
    text = (EXAMPLES / "triage.yaml").read_text()
    assert text.count("      provider: scripted") == 1
    (field.folder / "live.yaml").write_text(text.replace("      provider: scripted", "      provider: live"))
    checked = field.json("check", "live.yaml")
    assert (checked.code, checked.err) == (0, "")


@contextmanager
def _peer(field: Field, script: str, file: str, port: int) -> Iterator[None]:
    """A peer of the examples on a free port, which takes the place of `port` in the copied file."""
    free = closed_port()
    path = field.folder / file
    path.write_text(path.read_text().replace(f":{port}/", f":{free}/"))
    process = subprocess.Popen([sys.executable, str(field.folder / "peers" / script), str(free)])
    try:
        wait_until(lambda: _answers(free) or process.poll() is not None, f"{script} answers")
        yield
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _mcp(field: Field, run: Callable[..., Any]) -> None:
    with _peer(field, "mcp_peer.py", "mcp.yaml", 8765):
        assert run() == {"sentence": "5 words"}
        assert run("--input", "text=four words are here") == {"sentence": "4 words"}
    failed = field.json("run", "mcp.yaml")
    assert failed.code == 4
    assert field.json("inspect", "@latest").data["effects"][0]["status"] == "failed"


def _operational(field: Field, run: Callable[..., Any]) -> None:
    name = "operational-workflow.yaml"
    with _peer(field, "mcp_peer.py", name, 8765):
        assert run() == {"words": 6, "rounds": 2}
        state = field.folder / "build/operation/state.txt"
        failed = field.json("run", name, "--input", "mode=failure")
        assert (failed.code, state.read_text()) == (4, "open for failure, 6 words")
        tasks = {task["taskId"]: task["state"] for task in field.json("inspect", "@latest").data["tasks"]}
        assert (tasks["refuse"], tasks["wait"], tasks["done"]) == ("failed", "cancelled", "cancelled")
        waiting = field.start("run", name, "--input", "mode=cancel", "--output", "json")
        asked = "SELECT run_id FROM effects WHERE operation = 'slow' AND status = 'started'"
        wait_until(lambda: bool(field.rows(asked)), "the model is asked")
        waiting.signal(signal.SIGTERM)
        cancelled = waiting.wait()
        assert (cancelled.code, cancelled.data["state"]) == (130, "cancelled")
        assert state.read_text() == "open for cancel, 6 words"
        # The row says `started` an instant before the request leaves: whoever cancels in between has sent nothing.
        [effect] = field.rows("SELECT status, dispatches FROM effects WHERE operation = 'slow'")
        assert effect in {("uncertain", 1), ("cancelled", 0)}
    # To undo it nobody has to be asked again.
    for source in (failed, cancelled):
        state.write_text("open")
        undone = field.json("compensate", source.data["runId"])
        assert (undone.code, undone.data["compensatedTasks"], state.read_text()) == (0, ["open"], "compensated")


def _durable_pipeline(field: Field, run: Callable[..., Any]) -> None:
    name = "durable-pipeline.yaml"
    target = field.folder / "artifacts" / "framework-completeness.txt"
    paused = field.json("run", name)
    assert (paused.code, paused.data["reason"], target.exists()) == (3, "approval_required", False)
    source = paused.data["runId"]
    [asked] = field.json("approvals", "list").data["approvals"]
    assert asked["taskId"] == "publish"
    assert field.json("approvals", "approve", asked["approvalId"], "--actor", "you", "--reason", "read").code == 0
    failed = field.json("resume", source)
    assert (failed.code, failed.data["error"]["taskId"]) == (4, "validate")
    assert target.read_text() == "DURABLE_PIPELINE_VERIFIED"
    assert len(field.json("inspect", source).data["tasks"]) == 10
    retried = field.json("retry", name, source, "--failed")
    assert (retried.code, retried.data["executedTasks"], len(retried.data["reusedTasks"])) == (4, ["validate"], 9)
    target.unlink()
    repaired = field.json("repair", "durable-pipeline-repaired.yaml", source, "--from", "validate")
    assert (repaired.code, repaired.data["executedTasks"]) == (0, ["validate"])
    assert repaired.data["output"]["word"] == "complete"
    for made in (retried.data["runId"], repaired.data["runId"]):
        found = field.json("inspect", made).data
        assert (found["effects"], found["budget"]["usage"]["providerRequests"]) == ([], 0)
    assert not target.exists()
    [kept] = field.json("artifacts", "list", "--run", repaired.data["runId"]).data["references"]
    assert field.json("artifacts", "export", kept["digest"], "copy.txt").code == 0
    assert (field.folder / "copy.txt").read_text() == "DURABLE_PIPELINE_VERIFIED"


def _durable_pipeline_repaired(field: Field, run: Callable[..., Any]) -> None:
    first, second = ((EXAMPLES / f"durable-pipeline{end}.yaml").read_text() for end in ("", "-repaired"))
    old, new = (text[text.index("apiVersion") :].splitlines() for text in (first, second))
    assert [pair[1].strip() for pair in zip(old, new, strict=True) if pair[0] != pair[1]] == [
        'that: ${{ memory.summary == "complete" }}'
    ]


def _secret_reference(field: Field, run: Callable[..., Any]) -> None:
    missing = field.json("run", "secret-reference.yaml")
    assert (missing.code, missing.data["error"]["code"]) == (4, "secret_unavailable")
    assert field.json("inspect", missing.data["runId"]).data["effects"] == []
    field.environment["SHOP_TOKEN"] = token = "kept-to-itself-4711"
    assert run() == {"said": "deploying with [REDACTED], which has 19 characters\n"}
    told = field("logs", "@latest").out + field("inspect", "@latest").out
    assert token not in told
    written = [path for path in field.folder.joinpath(".agentctl").rglob("*") if path.is_file()]
    assert [path.name for path in written if token.encode() in path.read_bytes()] == []


def _a2a(field: Field, run: Callable[..., Any]) -> None:
    with _peer(field, "a2a_peer.py", "a2a.yaml", 8766):
        [answer] = run("--input", "message=say it loud")["answer"]
        assert answer["parts"] == [{"text": "SAY IT LOUD"}]


def _extension(field: Field, run: Callable[..., Any]) -> None:
    assert run() == {"mean": 2.8, "median": 3}
    assert run("--input", "numbers=[1,2,3,4]") == {"mean": 2.5, "median": 2.5}
    refused = field.json("run", "extension.yaml", "--input", "numbers=[]")
    assert refused.code == 4
    assert field.json("inspect", "@latest").data["effects"] == []


def _compensation(field: Field, run: Callable[..., Any]) -> None:
    result = field.json("run", "compensation.yaml")
    assert (result.code, result.data["error"]["taskId"]) == (4, "verify")
    source = result.data["runId"]
    target = field.folder / "artifacts" / "provisioned.txt"
    assert target.read_text() == "provisioned"
    [planned] = field.json("compensate", source, "--plan").data["tasks"]
    assert (planned["sourceTaskId"], planned["action"]) == ("provision", "write")
    assert target.read_text() == "provisioned"
    assert field.json("compensate", source).code == 0
    assert target.read_text() == "compensated"
    [said] = field.json("effects", "inspect", planned["sourceEffectIds"][0]).data["reconciliations"]
    assert said["status"] == "compensated"
    again = field.json("compensate", source, "--plan")
    assert (again.code, again.data["tasks"]) == (0, [])


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
    "artifacts.yaml": _artifacts,
    "approval.yaml": _approval,
    "budget.yaml": _budget,
    "vars.yaml": _vars,
    "check-diff.yaml": _check_diff,
    "router.yaml": _router,
    "parallel.yaml": _parallel,
    "loop.yaml": _loop,
    "repair.yaml": _repair,
    "recovery.yaml": _recovery,
    "subworkflow.yaml": _subworkflow,
    "release.yaml": _release,
    "crash-resume.yaml": _crash_resume,
    "policy-denial.yaml": _policy_denial,
    "fake-provider.yaml": _fake_provider,
    "streaming.yaml": _streaming,
    "structured-handoff.yaml": _structured_handoff,
    "resource-budget.yaml": _resource_budget,
    "triage.yaml": _triage,
    "mcp.yaml": _mcp,
    "a2a.yaml": _a2a,
    "operational-workflow.yaml": _operational,
    "secret-reference.yaml": _secret_reference,
    "durable-pipeline.yaml": _durable_pipeline,
    "durable-pipeline-repaired.yaml": _durable_pipeline_repaired,
    "extension.yaml": _extension,
    "compensation.yaml": _compensation,
}
REFUSED = {"capability-failure.yaml": ("unsupported_capability", "spec.agents.thinker.reasoning")}
"""Examples of what is found before anything runs."""
UNCERTAIN = {"operational-workflow.yaml"}
"""Examples that are cancelled while a model answers: nobody knows what became of that request."""


def test_every_example_is_in_this_table() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == {*PROMISES, *REFUSED}
    listed = re.findall(r"^\| `([a-z0-9-]+\.yaml)` \|", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted({*PROMISES, *REFUSED})


@pytest.mark.parametrize("file", REFUSED)
def test_refused_example(field: Field, file: str) -> None:
    for verb in ("check", "plan", "run"):
        result = field(verb, file, "--output", "json")
        assert result.code == 2
        [found] = json.loads(result.err)["diagnostics"]
        assert (found["code"], found["path"]) == REFUSED[file]
    assert not field.database.exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("file", PROMISES)
def test_example(field: Field, file: str) -> None:
    checked = field.json("check", file)
    assert (checked.code, checked.data["valid"], checked.err) == (0, True, "")
    planned = field.json("plan", file)
    assert (planned.code, planned.err) == (0, "")
    assert checked.data["workflow"] == file.removesuffix(".yaml").removesuffix("-repaired")
    assert not field.database.exists()

    def run(*arguments: str) -> Any:
        result = field.json("run", file, *arguments)
        assert (result.code, result.data["state"], result.err) == (0, "succeeded", "")
        return result.data["output"]

    PROMISES[file](field, run)
    # The commands of the header name this file, and no file that is not there.
    header = [line for line in (EXAMPLES / file).read_text().splitlines() if line.startswith("#   agentctl ")]
    named = [word for line in header for word in line.split() if word.endswith(".yaml")]
    assert f"ops/examples/{file}" in named
    assert [word for word in named if not (EXAMPLES.parents[1] / word).is_file()] == []
    if field.database.exists():  # what only another example executes leaves none
        field.check_clean_end(uncertain=file in UNCERTAIN)
