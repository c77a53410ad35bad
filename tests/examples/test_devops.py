"""Every folder of `ops/examples/devops/` does what its headers promise; all of them share one pool with one worker."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from support.field import Field, Result

ROOT = Path(__file__).resolve().parents[2]
DEVOPS = ROOT / "ops" / "examples" / "devops"


class Desk(Field):
    """A field with a copy of the examples."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # `python3` is this Python, by its full name: it gets no PATH in which it could find itself.
        tools = self.tool("python3", f'#!/bin/sh\nexec "{Path(sys.executable).resolve()}" "$@"\n').parent
        self.environment["PATH"] = f"{tools}:{self.environment['PATH']}"
        shutil.copytree(DEVOPS, self.folder / "devops", ignore=shutil.ignore_patterns("__pycache__", "build"))

    def example(self, name: str) -> Example:
        """One of the examples, and where it works."""
        return Example(self, name)


class Example:
    """One folder, which is the workspace of its documents."""

    def __init__(self, desk: Desk, name: str) -> None:
        self.desk = desk
        self.name = name
        self.folder = desk.folder / "devops" / name
        self.build = self.folder / "build"

    def file(self, document: str = "workflow.yaml") -> str:
        """A document as the command line names it."""
        return f"devops/{self.name}/{document}"

    def run(self, *options: str, document: str = "workflow.yaml", code: int = 0) -> Any:
        """Run a document to its end, or pause; `data` of the outcome."""
        return self.data(self.desk.json("run", self.file(document), *options), code)

    @staticmethod
    def data(result: Result, code: int = 0) -> Any:
        """`data` of a result that has this exit code."""
        assert result.code == code, (result.code, result.out, result.err)
        return result.data

    def done(self, *options: str, document: str = "workflow.yaml") -> Any:
        """The outputs of a run that succeeds; its report is an artifact."""
        return self.reported(self.run(*options, document=document))

    def reported(self, outcome: Any) -> Any:
        """The outputs of an outcome whose report is an artifact, byte for byte."""
        assert outcome["state"] == "succeeded"
        path = self.folder / outcome["output"]["report"]
        digest = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
        kept = self.desk.rows("SELECT DISTINCT logical_path FROM artifact_refs WHERE digest = ?", digest)
        assert (str(path.relative_to(self.folder)),) in kept
        return outcome["output"]

    def text(self, name: str) -> str:
        """A file that has come to be."""
        return (self.build / name).read_text()

    def approve(self, run_id: str) -> Any:
        """Allow the one thing that a run asks for, and see it through; the outcome."""
        asked = [ask for ask in self.desk.json("approvals", "list").data["approvals"] if ask["runId"] == run_id]
        assert len(asked) == 1
        self.data(self.desk.json("approvals", "approve", asked[0]["approvalId"], "--actor", "you", "--reason", "read"))
        return self.data(self.desk.json("wait", run_id))

    def uncertain(self, run_id: str) -> str:
        """The one effect of a run of which nobody knows."""
        sql = "SELECT effect_id FROM effects WHERE run_id = ? AND status = 'uncertain' AND superseded = 0"
        return str(self.desk.scalar(sql, run_id))

    def happened(self, effect: str, result: dict[str, Any], run_id: str, code: int) -> Any:
        """Tell what has happened, with the lost result; the outcome of the run."""
        self.desk.text("result.json", json.dumps(result))
        words = ("--result-file", "result.json", "--actor", "you", "--reason", "seen")
        self.data(self.desk.json("effects", "reconcile", effect, "--status", "applied", *words))
        return self.data(self.desk.json("wait", run_id), code)

    def operations(self, run_id: str) -> list[str]:
        """What a run has really done."""
        return [
            row[0] for row in self.desk.rows("SELECT operation FROM effects WHERE run_id = ? ORDER BY rowid", run_id)
        ]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    place = Desk(tmp_path_factory.mktemp("devops"))
    try:
        # A pool of one, which serves all of them.
        pool = place.pool(1)
        yield place
        place.check_clean_end(drained=[pool], uncertain=True)
        assert place.json("db", "verify").code == 0
    finally:
        place.close()


def _with_a_real_model(example: Example) -> None:
    text = (DEVOPS / example.name / "workflow.yaml").read_text()
    assert text.count("      provider: scripted\n") == 1
    live = example.folder / "live.yaml"
    live.write_text(text.replace("      provider: scripted\n", "      provider: live\n"))
    assert compile_workflow(load_workflow(live)).requirements["providers"] == ["live"]


def _unproven(example: Example) -> None:
    """A claim that quotes what is nowhere fails the run, and nothing is reported."""
    script = example.folder / "fixtures/model.json"
    script.write_text(script.read_text().replace('"quote": "', '"quote": "not said: ', 1))
    shutil.rmtree(example.build)
    assert example.run(code=4)["error"]["taskId"] == "proven"
    assert not example.build.exists()


def _ci_diagnosis(example: Example) -> None:
    assert example.done() == {"kind": "infrastructure", "step": "Build the image", "report": "build/ci-diagnosis.md"}
    assert "(line 8: `no space left on device`)" in example.text("ci-diagnosis.md")
    _with_a_real_model(example)
    _unproven(example)


def _junit_triage(example: Example) -> None:
    both = example.done()
    assert (both["tests"], both["flaky"]) == (5, ["shop.mail::sends"])
    assert both["groups"] == [{"reason": "KeyError: …", "tests": ["shop.cart::removes", "shop.cart::sums"]}]
    one = example.done("--input", 'results=["fixtures/first.xml"]')
    assert (one["flaky"], len(one["failed"])) == ([], 3)
    assert "3 of 5 tests fail" in example.text("junit-triage.md")


def _rules(findings: list[dict[str, Any]]) -> list[str]:
    return sorted(f"{finding['rule']} {finding['where'].rpartition('/')[2]}" for finding in findings)


def _pipeline_review(example: Example) -> None:
    found = example.done()
    assert _rules(found["findings"]) == [
        "injection ci.yml:11", "permissions ci.yml", "permissions ci.yml:6", "pinned-action ci.yml:9",
        "pipe-to-shell ci.yml:12", "timeout ci.yml",
    ]  # fmt: skip
    trusted = example.done("--var", 'trustedOwners=["actions","acme"]')
    assert (found["high"], trusted["high"]) == (3, 2)


def _apply(example: Example, patch: str) -> None:
    """Apply a patch as its header says."""
    done = subprocess.run(["git", "apply", f"build/{patch}"], cwd=example.folder, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def _dockerfile_review(example: Example) -> None:
    found = example.done()
    assert (found["high"], len(found["findings"])) == (3, 5)
    _apply(example, "dockerfile.patch")
    again = example.done()
    assert _rules(again["findings"]) == ["moving-tag Dockerfile:1", "root Dockerfile", "secret-in-image Dockerfile:3"]


def _kubernetes_review(example: Example) -> None:
    found = example.done()
    assert _rules(found["findings"]) == [
        "host-path shop", "limits proxy", "moving-tag web", "privileged proxy", "probe proxy", "replicas shop",
        "selector shop",
    ]  # fmt: skip
    assert len(example.done("--var", "minReplicas=1")["findings"]) == 6


def _terraform_plan(example: Example) -> None:
    paused = example.run(code=3)
    signed = example.build / "signed-off.json"
    assert (paused["reason"], signed.exists()) == ("approval_required", False)
    report = example.text("terraform-plan.md")
    assert "password (hidden)" in report
    assert "aws_vpc" not in report
    output = example.reported(example.approve(paused["runId"]))
    assert (output["delete"], output["replace"], output["signed"]) == (0, 1, True)
    assert output["endangered"] == ["aws_db_instance.orders"]
    assert json.loads(signed.read_text())["lost"] == ["aws_db_instance.orders"]


def _dependency_update(example: Example) -> None:
    minor = example.done()
    assert (minor["updated"], minor["left"]) == (["alpha 1.10.0"], ["alpha 2.0.0", "beta 3.0.1"])
    assert "| alpha | 1.4.2 | 1.10.0 | ADV-2026-7 |" in example.text("dependency-update.md")
    _apply(example, "requirements.patch")
    major = example.done("--var", 'allow="major"')
    assert (major["updated"], major["left"]) == (["alpha 2.0.0", "beta 3.0.1"], [])
    assert "+beta==3.0.1  # the last one with Python 3.11" in example.text("requirements.patch")


def _sbom_triage(example: Example) -> None:
    found = example.done()
    assert (found["added"], found["removed"], found["critical"]) == (["epsilon"], ["delta"], 1)
    assert found["changed"] == ["alpha 1.4.3 -> 1.10.0"]
    assert [finding["id"] for finding in found["findings"]] == ["ADV-2026-9", "ADV-2026-12", "AGPL-3.0-only"]
    blocked = example.run(document="gate.workflow.yaml", code=4)
    assert blocked["error"]["taskId"] == "gate"
    assert example.done("--input", "after=fixtures/before.json", document="gate.workflow.yaml")["critical"] == 0


def _release_notes(example: Example) -> None:
    notes = example.done()
    assert (notes["next"], notes["breaking"]) == ("2.0.0", ["api: prices are whole cents (0c77e21)"])
    assert notes["unreadable"] == ["a83c115 more tests"]
    assert "## Fixed\n\n- mail: send one mail for one order (9be01d3)\n" in example.text("release-notes.md")
    assert example.done("--var", 'last="3.0.0"')["next"] == "4.0.0"


def _release_readiness(example: Example) -> None:
    first = example.done()
    assert (first["decision"], len(first["reasons"])) == ("no-go", 3)
    assert len(example.done("--input", "now=2026-04-13T09:00:00+02:00")["reasons"]) == 2
    assert example.run(document="gate.workflow.yaml", code=4)["error"]["taskId"] == "gate"
    ready = example.done("--input", "evidence=fixtures/ready.json", document="gate.workflow.yaml")
    assert ready["decision"] == "go"


def _configuration_drift(example: Example) -> None:
    assert example.done()["drifted"] == ["limits.files", "logLevel"]
    assert example.done("--var", 'limits={"files": 1024}')["drifted"] == ["logLevel"]
    origins = example.data(example.desk.json("explain", example.file()))["variableOrigins"]
    assert origins["limits"]["file"].endswith("vars/production.yaml")
    assert origins["limits"]["overrides"][0]["file"].endswith("vars/all.yaml")


def _incident_timeline(example: Example) -> None:
    output = example.done()
    assert output["minutes"] == 26
    rows = [line for line in example.text("incident-timeline.md").splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[1] for row in rows] == [
        "21:55:10",
        "21:58:40",
        "21:59:30",
        "22:19:45",
        "22:21:03",
        "22:22:00",
    ]
    _with_a_real_model(example)
    _unproven(example)


def _canary_evaluation(example: Example) -> None:
    for options, verdict, share in (
        ((), "promote", "100"),
        (("--input", "metrics=fixtures/slow.json"), "rollback", "0"),
        (("--var", "minRequests=100000"), "hold", "5"),
    ):
        outcome = example.run(*options)
        assert (example.reported(outcome)["verdict"], example.text("share.txt")) == (verdict, share)
        states = dict(example.desk.rows("SELECT task_id, state FROM tasks WHERE run_id = ?", outcome["runId"]))
        ways = ("promote", "rollback", "hold")
        assert {way: states[way] for way in ways} == {way: "succeeded" if way == verdict else "skipped" for way in ways}
        assert example.operations(outcome["runId"]) == ["extension.process", "builtin.write", "builtin.write"]


def _local_deployment(example: Example) -> None:
    paused = example.run(code=3)
    releases = example.build / "releases"
    assert (paused["reason"], releases.exists()) == ("approval_required", False)
    first = example.reported(example.approve(paused["runId"]))
    assert (first["release"], first["previous"]) == ("shop-2.0.1", "")
    assert (releases / "current" / "assets" / "shop.css").read_text().startswith("body")
    second = example.approve(example.run("--input", "release=shop-2.0.2", code=3)["runId"])
    assert example.reported(second)["previous"] == "shop-2.0.1"
    assert (releases / "ledger").read_text() == "install shop-2.0.1\ninstall shop-2.0.2\n"


def _interrupted_deployment(example: Example) -> None:
    output = example.done()
    assert [item["output"] for item in output["hosts"]] == [
        {"host": host, "previous": "none"} for host in ("alpha", "beta", "gamma")
    ]
    shutil.rmtree(example.build)
    paused = example.run(document="fault.workflow.yaml", code=3)
    assert paused["reason"] == "uncertain_effect"
    assert example.text("hosts/beta.release") == "shop-2.0.1"
    result = {"host": "beta", "previous": "none"}
    outcome = example.happened(example.uncertain(paused["runId"]), result, paused["runId"], 0)
    assert example.reported(outcome)["previous"] == "none"
    assert example.text("hosts/ledger") == "alpha shop-2.0.1\nbeta shop-2.0.1\n"


def _retry_repair(example: Example) -> None:
    failed = example.run(code=4)
    assert (failed["error"]["taskId"], failed["error"]["code"]) == ("test", "output_contract")
    retried = example.data(example.desk.json("retry", example.file(), failed["runId"], "--failed"), 4)
    assert (retried["executedTasks"], sorted(retried["reusedTasks"])) == (["test"], ["build", "notes"])
    document = example.file("repaired.workflow.yaml")
    repaired = example.data(example.desk.json("repair", document, failed["runId"], "--from", "test"))
    assert (repaired["executedTasks"], example.reported(repaired)["passed"]) == (["test"], True)
    assert example.text("product/ledger") == "build\ntest\ntest\ntest\n"


def _compensated_rollout(example: Example) -> None:
    failed = example.run(code=4)
    assert (failed["error"]["taskId"], example.text("hosts/alpha.release")) == ("verify", "shop-2.0.1")
    undone = example.data(example.desk.json("compensate", failed["runId"]))
    assert undone["compensatedTasks"] == ["beta", "alpha"]
    assert [example.text(f"hosts/{host}.release") for host in ("alpha", "beta")] == ["none", "none"]
    steps = ["alpha shop-2.0.1", "beta shop-2.0.1", "beta none", "alpha none"]
    assert example.text("hosts/ledger").splitlines() == steps
    shutil.rmtree(example.build)
    example.done("--input", "broken=false")
    shutil.rmtree(example.build)
    paused = example.run(document="reconcile.workflow.yaml", code=3)
    assert paused["reason"] == "uncertain_effect"
    result = {"host": "alpha", "previous": "none"}
    ended = example.happened(example.uncertain(paused["runId"]), result, paused["runId"], 4)
    assert ended["error"]["taskId"] == "verify"
    example.data(example.desk.json("compensate", paused["runId"]))
    assert example.text("hosts/ledger") == "alpha shop-2.0.1\nalpha none\n"


def _parallel_matrix(example: Example) -> None:
    output = example.done()
    wheels = [(item["output"]["cell"], item["output"]["wheel"].removeprefix("shop-2.0.1")) for item in output["cells"]]
    assert wheels == [
        ("linux 3.11", "-cp311-cp311-manylinux_2_28_x86_64.whl"),
        ("linux 3.13", "-cp312-abi3-manylinux_2_28_x86_64.whl"),
        ("macos 3.11", ".tar.gz"),
        ("macos 3.13", "-cp313-cp313-macosx_14_0_arm64.whl"),
    ]
    rows = example.text("parallel-matrix.md").splitlines()[-4:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [cell for cell, _ in wheels]


def _role_subworkflow(example: Example) -> None:
    outcome = example.run()
    output = example.reported(outcome)
    assert output["verdict"] == "approve"
    assert output["summary"] == "2 files, 2 lines added, 1 removed: auth/session.py, docs/session.md"
    assert example.operations(outcome["runId"]) == [
        "extension.process", "scripted", "tool.read_change", "scripted", "scripted", "builtin.write",
    ]  # fmt: skip


def _bounded_remediation(example: Example) -> None:
    output = example.done()
    assert (output["rounds"], [item["state"] for item in output["items"]]) == (2, ["succeeded", "succeeded", "skipped"])
    last = output["items"][1]["output"]
    assert last["settings"] == {"tls": "1.3", "debug": False, "timeoutSeconds": 20}
    assert last["fixed"] == ["TLS is older than 1.3", "debugging is on"]
    failed = example.run("--input", "server=fixtures/pinned.json", code=4)
    assert (failed["error"]["taskId"], failed["error"]["code"]) == ("repair", "loop_limit")


PROMISES: dict[str, Callable[[Example], None]] = {
    "01-ci-diagnosis": _ci_diagnosis,
    "02-junit-triage": _junit_triage,
    "03-pipeline-review": _pipeline_review,
    "04-dockerfile-review": _dockerfile_review,
    "05-kubernetes-review": _kubernetes_review,
    "06-terraform-plan": _terraform_plan,
    "07-dependency-update": _dependency_update,
    "08-sbom-triage": _sbom_triage,
    "09-release-notes": _release_notes,
    "10-release-readiness": _release_readiness,
    "11-configuration-drift": _configuration_drift,
    "12-incident-timeline": _incident_timeline,
    "13-canary-evaluation": _canary_evaluation,
    "14-local-deployment": _local_deployment,
    "15-interrupted-deployment": _interrupted_deployment,
    "16-retry-repair": _retry_repair,
    "17-compensated-rollout": _compensated_rollout,
    "18-parallel-matrix": _parallel_matrix,
    "19-role-subworkflow": _role_subworkflow,
    "20-bounded-remediation": _bounded_remediation,
}


def test_every_example_is_in_this_table() -> None:
    assert {path.parent.name for path in DEVOPS.glob("*/workflow.yaml")} == set(PROMISES)
    listed = re.findall(r"^\| `(\d\d-[a-z-]+)` \|", (DEVOPS / "README.md").read_text(), re.M)
    assert listed == sorted(PROMISES)


@pytest.mark.parametrize("document", sorted(path.relative_to(DEVOPS).as_posix() for path in DEVOPS.glob("*/*.yaml")))
def test_commands_of_a_header(document: str) -> None:
    """They name this file, and no file that is not there."""
    header = [line for line in (DEVOPS / document).read_text().splitlines() if line.startswith("#   agentctl ")]
    named = [word for line in header for word in line.split() if word.endswith(".yaml")]
    assert f"ops/examples/devops/{document}" in named
    assert [word for word in named if not (ROOT / word).is_file()] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROMISES)
def test_example(desk: Desk, name: str) -> None:
    example = desk.example(name)
    # Where the policy lets nobody write nothing is written, whatever the workflow is for.
    denied = example.run("--input", "reports=elsewhere", code=4)
    assert (denied["state"], denied["error"]["code"]) == ("failed", "policy_denied")
    assert not (example.folder / "elsewhere").exists()
    shutil.rmtree(example.build, ignore_errors=True)
    PROMISES[name](example)


@pytest.mark.timeout(300)
def test_a_deployment_that_is_killed_goes_on(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    try:
        example = desk.example("15-interrupted-deployment")
        killed = desk("run", example.file(), "--workers", "1", env={"AGENTCTL_FAULT": "after_commit:2"})
        assert killed.code == -9
        run_id = desk.scalar("SELECT run_id FROM runs")
        outcome = Example.data(desk.json("resume", run_id))
        assert [item["output"]["previous"] for item in outcome["output"]["hosts"]] == ["none"] * 3
        lines = example.text("hosts/ledger").splitlines()
        assert set(lines) == {f"{host} shop-2.0.1" for host in ("alpha", "beta", "gamma")}
        # What was confirmed is not done again.
        assert lines.count("alpha shop-2.0.1") == 1
        desk.check_clean_end()
    finally:
        desk.close()
