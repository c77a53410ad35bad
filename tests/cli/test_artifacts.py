"""The verbs of the artifact store through the program: flags, reports, exit codes (contract 8)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tampering
from support.artifacts import digest_of

WORKFLOW = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: keeps}
spec:
  inputs: {script: "echo one > out/1.txt; echo two > out/2.txt", keep: ["out/*.txt"]}
  policy: {approval: never, processAllowlist: [sh], writableRoots: [out], maxArtifactBytes: 1000}
  actions:
    sh: {kind: builtin.shell.exec, command: sh}
    write: {kind: builtin.write}
  tasks:
    - id: text
      uses: action:write
      with: {path: out/text.json, content: "{}"}
    - id: files
      uses: action:sh
      needs: [text]
      with: {args: ["-c", "${{ inputs.script }}"], artifacts: "${{ inputs.keep }}"}
"""
ONE, TWO, TEXT = digest_of(b"one\n"), digest_of(b"two\n"), digest_of(b"{}")


@pytest.fixture
def kept(cli: Any) -> str:
    """A run that has kept three files; its id."""
    cli.write("keeps.yaml", WORKFLOW)
    result = cli.json("run", "keeps.yaml")
    assert (result.code, result.data["state"]) == (0, "succeeded"), result.err
    return str(result.data["runId"])


def test_list(cli: Any, kept: str) -> None:
    found = cli.json("artifacts", "list").data
    assert [(item["taskId"], item["path"], item["digest"], item["sizeBytes"]) for item in found["references"]] == [
        ("files", "out/1.txt", ONE, 4),
        ("files", "out/2.txt", TWO, 4),
        ("text", "out/text.json", TEXT, 2),
    ]
    assert {item["digest"]: item["references"] for item in found["blobs"]} == {ONE: 1, TWO: 1, TEXT: 1}
    of_task = cli.json("artifacts", "list", "--run", "@latest", "--task", "text").data
    assert (of_task["runId"], [item["path"] for item in of_task["references"]]) == (kept, ["out/text.json"])
    human = cli("artifacts", "list")
    assert (human.code, "out/text.json" in human.out) == (0, True)
    assert cli.json("artifacts", "list", "--task", "text").error["code"] == "usage"
    assert cli.json("artifacts", "list", "--run", "run-none").error["code"] == "not_found"


LOST = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: lost}
spec:
  policy: {approval: never, writableRoots: [out]}
  actions: {write: {kind: builtin.write}}
  tasks:
    - id: lost
      uses: action:write
      with: {path: out/lost.txt, content: lost}
      outputSchema: {type: object, required: [nothing]}
"""


def test_list_shows_people_what_nothing_refers_to(cli: Any) -> None:
    """What a task has kept before it failed is nobody's, and is there all the same."""
    cli.write("lost.yaml", LOST)
    failed = cli.json("run", "lost.yaml")
    assert (failed.code, failed.data["error"]["code"]) == (4, "output_contract")
    run_id, name = failed.data["runId"], digest_of(b"lost")[7:19]
    [blob] = cli.json("artifacts", "list").data["blobs"]
    assert (blob["references"], blob["leasedUntil"] > blob["createdAt"]) == (0, True)
    assert cli("artifacts", "list", "--run", run_id).out == "no artifacts\n"
    [_, line] = cli("artifacts", "list").out.splitlines()
    assert line.startswith(name)
    assert "(leased until " in line
    kept = [{"runId": run_id, "why": "ingestion_lease"}]
    for more in (("--dry-run",), ()):
        assert cli.json("gc", "--older-than-days", "0", *more).data["runs"]["kept"] == kept
    tampering.change(cli.database, "UPDATE artifact_ingests SET expires_at = 1")
    assert cli.json("gc", "--older-than-days", "0", "--dry-run").data["runs"]["kept"] == []
    tampering.change(cli.database, "DELETE FROM artifact_ingests")
    [_, line] = cli("artifacts", "list").out.splitlines()
    assert line.startswith(name)
    assert line.endswith("(nothing refers to it)")
    assert cli.json("gc", "--older-than-days", "0").data["artifacts"]["removed"] == [digest_of(b"lost")]
    assert cli("artifacts", "list").out == "no artifacts\n"


def test_inspect_shows_manifest_and_references(cli: Any, kept: str) -> None:
    data = cli.json("inspect", kept).data
    assert [item["path"] for item in data["artifacts"]] == ["out/1.txt", "out/2.txt", "out/text.json"]
    tasks = {task["taskId"]: task for task in data["tasks"]}
    assert [item["path"] for item in tasks["files"]["artifactManifest"]] == ["out/1.txt", "out/2.txt"]
    for task in tasks.values():
        assert task["definitionFingerprint"].startswith("sha256:v1:")
        assert task["outputContractFingerprint"].startswith("sha256:v1:")
    assert tasks["text"]["definitionFingerprint"] != tasks["files"]["definitionFingerprint"]
    blob = cli.json("artifacts", "inspect", ONE[7:15]).data
    assert (blob["digest"], blob["status"], blob["leases"]) == (ONE, "ok", [])
    assert [item["runId"] for item in blob["references"]] == [kept]


def test_verify_finds_what_is_damaged(cli: Any, kept: str) -> None:
    assert cli.json("artifacts", "verify").data["ok"] is True
    root = cli.folder / ".agentctl" / "artifacts" / "sha256"
    one, two = (root / digest[7:9] / digest[7:] for digest in (ONE, TWO))
    one.chmod(0o600)
    one.write_bytes(b"ONE\n")
    two.unlink()
    for arguments in ((), ("--all",)):
        result = cli.json("artifacts", "verify", *arguments)
        assert (result.code, result.data["ok"]) == (5, False)
        assert (result.data["checked"], result.data["corrupt"], result.data["missing"]) == (3, [ONE], [TWO])
    assert cli.json("artifacts", "verify", TEXT).code == 0
    assert cli.json("artifacts", "verify", ONE).data["corrupt"] == [ONE]
    assert cli("artifacts", "verify").code == 5
    assert cli.json("artifacts", "inspect", TWO).data["status"] == "missing"
    refused = cli.json("artifacts", "export", ONE, "out.txt")
    assert (refused.code, refused.error["code"]) == (5, "corrupt")
    assert not (cli.folder / "out.txt").exists()
    assert cli.json("artifacts", "verify", ONE, "--all").code == 2
    # The next run that makes the same bytes repairs them.
    assert cli.json("run", "keeps.yaml").code == 0
    assert cli.json("artifacts", "verify").data["ok"] is True


def test_export_and_its_refusals(cli: Any, kept: str) -> None:
    result = cli.json("artifacts", "export", ONE, "copy.txt")
    assert (result.code, result.data["sizeBytes"]) == (0, 4)
    assert (cli.folder / "copy.txt").read_bytes() == b"one\n"
    again = cli.json("artifacts", "export", TWO, "copy.txt")
    assert (again.code, again.error["code"]) == (5, "conflict")
    assert "--overwrite" in again.error["remedy"]
    assert cli.json("artifacts", "export", TWO, "copy.txt", "--overwrite").code == 0
    assert (cli.folder / "copy.txt").read_bytes() == b"two\n"
    assert cli.json("artifacts", "export", "0" * 64, "x").error["code"] == "not_found"
    assert cli.json("artifacts", "export", "what", "x").error["code"] == "usage"
    assert cli.json("artifacts", "export", ONE, "no/such/folder").error["code"] == "usage"
    database = cli.json("artifacts", "export", ONE, str(cli.database), "--overwrite")
    assert (database.code, database.error["code"]) == (2, "usage")
    assert cli.json("artifacts", "verify").code == 0


def test_gc_reports_and_does_only_what_it_is_told(cli: Any, kept: str) -> None:
    for arguments in ((), ("--older-than-days", "0"), ("--dry-run",)):
        data = cli.json("artifacts", "gc", *arguments).data
        assert (data["considered"], data["removed"], data["reclaimedBytes"]) == (0, [], 0)
    assert cli.json("artifacts", "gc", "--older-than-days", "-1").code == 2


@pytest.mark.parametrize(
    ("script", "keep", "code"),
    [
        ("true", ["out/none.txt"], "artifact_missing"),
        ("true", ["../x"], "policy_denied"),
        ("true", ["keeps.yaml"], "policy_denied"),
        ("ln -s /etc/hostname out/link", ["out/link"], "artifact_refused"),
        ("head -c 1001 /dev/zero > out/big", ["out/big"], "artifact_too_large"),
        ("echo x > out/$(printf 'a\\377')", ["out/a*"], "artifact_refused"),
    ],
)
def test_a_promise_that_is_not_kept_fails_the_task(cli: Any, script: str, keep: list[str], code: str) -> None:
    cli.write("keeps.yaml", WORKFLOW)
    result = cli.json("run", "keeps.yaml", "--inputs", json.dumps({"script": script, "keep": keep}))
    assert (result.code, result.data["error"]["code"]) == (4, code), result.out
    data = cli.json("inspect", "@latest").data
    assert [item["path"] for item in data["artifacts"]] == ["out/text.json"]
    if "true" not in script:
        # The command itself has succeeded, and is recorded so.
        [effect] = [item for item in data["effects"] if item["request"]["operation"] == "builtin.shell.exec"]
        assert (effect["status"], effect["confirmed"]) == ("succeeded", True)
    assert cli.json("artifacts", "verify").code == 0


UNREADABLE = """\
apiVersion: agentctl.dev/v1
kind: Workflow
metadata: {name: receipt}
spec:
  policy: {approval: never, processAllowlist: [sh], writableRoots: [out]}
  actions:
    pay: {kind: builtin.shell.exec, command: sh, idempotency: CONTRACT}
  tasks:
    - id: pay
      uses: action:pay
      retry: {maxAttempts: 3, backoffMs: 0}
      with: {args: ["-c", "echo paid >> ledger; mkdir -p out; touch out/f"], artifacts: [out/f/receipt]}
"""


@pytest.mark.parametrize(("contract", "times"), [("unknown", 1), ("at_most_once", 1), ("keyed", 3), ("idempotent", 3)])
def test_a_command_whose_artifact_cannot_be_examined_is_repeated_only_if_it_may_be(
    cli: Any, contract: str, times: int
) -> None:
    """The command has succeeded, and is not done again for the sake of a file that lies below another file."""
    cli.write("receipt.yaml", UNREADABLE.replace("CONTRACT", contract))
    result = cli.json("run", "receipt.yaml")
    assert (result.code, result.data["state"], result.data["error"]["taskId"]) == (4, "failed", "pay"), result.out
    assert result.data["error"]["retryable"] is (times > 1)
    assert (cli.folder / "ledger").read_text().split() == ["paid"] * times
    effects = cli.json("inspect", "@latest").data["effects"]
    assert [(effect["status"], effect["confirmed"]) for effect in effects] == [("succeeded", True)] * times
    assert cli.json("db", "verify").code == 0


def test_a_file_that_is_unchanged_is_no_artifact(cli: Any, kept: str) -> None:
    """`builtin.write` with the bytes that are there already is no effect, and keeps nothing (contract 3)."""
    assert cli.json("run", "keeps.yaml").code == 0
    assert [item["taskId"] for item in cli.json("inspect", "@latest").data["artifacts"]] == ["files", "files"]


def test_a_budget_of_bytes_is_never_passed(cli: Any) -> None:
    cli.write("keeps.yaml", WORKFLOW.replace("  actions:", "  runtime: {budgets: {maxArtifactBytes: 9}}\n  actions:"))
    result = cli.json("run", "keeps.yaml")
    assert (result.code, result.data["reason"]) == (4, "budget_exceeded")
    data = cli.json("inspect", "@latest").data
    assert data["budget"]["exceeded"] == {"dimension": "artifactBytes", "limit": 9, "attempted": 10}
    assert data["budget"]["usage"]["artifactBytes"] == 2
    assert data["budget"]["reserved"]["artifactBytes"] == 0
    assert [item["path"] for item in data["artifacts"]] == ["out/text.json"]


def test_a_workflow_that_keeps_nothing_makes_no_folder(cli: Any) -> None:
    assert cli.json("run", "shell.yaml").code == 0
    assert not (cli.folder / ".agentctl" / "artifacts").exists()


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="cannot drop root")
def test_a_store_of_mode_0500_is_refused_before_a_run_exists(
    cli: Any, unprivileged: Callable[[Path], list[str]]
) -> None:
    cli.write("keeps.yaml", WORKFLOW)
    prefix = unprivileged(cli.folder)
    cli.folder.chmod(0o777)
    assert cli.json("submit", "hello.yaml", prefix=prefix).code == 0
    root = cli.folder / ".agentctl" / "artifacts"
    for folder in (root, root / "tmp", root / "sha256"):
        folder.mkdir()
        shutil.chown(folder, cli.folder.joinpath(".agentctl").stat().st_uid)
    for folder in (root / "tmp", root / "sha256", root):
        folder.chmod(0o500)
        result = cli.json("submit", "keeps.yaml", prefix=prefix)
        assert (result.code, result.error["code"]) == (5, "environment")
        assert str(folder) in result.error["message"]
        assert "0500" in result.error["message"]
        folder.chmod(0o700)
    assert len(cli.json("runs", "list", prefix=prefix).data["runs"]) == 1
    # What keeps nothing is not concerned.
    root.chmod(0o500)
    assert cli.json("submit", "shell.yaml", prefix=prefix).code == 0
    root.chmod(0o700)
    assert cli.json("submit", "keeps.yaml", prefix=prefix).code == 0


def test_a_task_that_the_run_does_not_have(cli: Any, kept: str) -> None:
    refused = cli.json("artifacts", "list", "--run", kept, "--task", "nope")
    assert (refused.code, refused.error["code"]) == (5, "not_found")
    assert "nope" in refused.error["message"]


def test_export_to_no_file(cli: Any, kept: str) -> None:
    digest = cli.json("artifacts", "list").data["references"][0]["digest"]
    refused = cli.json("artifacts", "export", digest, "-")
    assert (refused.code, refused.error["code"]) == (2, "usage")
    assert not (cli.folder / "-").exists()
    assert cli.json("artifacts", "export", digest, "./-").code == 0
    assert (cli.folder / "-").exists()
