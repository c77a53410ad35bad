"""What the answer of an A2A agent brings becomes files with names of ours (contract 8)."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from agentctl.store.errors import TaskFault
from agentctl.worker.effects import a2a_artifacts
from agentctl.worker.effects.a2a_artifacts import MAX_NAME, artifacts_of


def task(*artifacts: Any) -> dict[str, Any]:
    return {"id": "t", "status": {"state": "TASK_STATE_COMPLETED"}, "artifacts": list(artifacts)}


def artifact(*parts: Any, name: Any = "report") -> dict[str, Any]:
    return {"artifactId": name, "parts": list(parts)}


def kept(result: Any, *taken: str) -> dict[str, bytes]:
    return {item.path: item.data for item in artifacts_of(result, taken)}


def test_each_form_of_a_part_has_its_bytes() -> None:
    raw = base64.b64encode(b"\x00\xff").decode()
    found = kept(
        task(
            artifact(
                {"text": "grüße", "filename": "hello.txt"},
                {"raw": raw, "filename": "pixels.png"},
                {"data": {"b": 1, "a": [2.5]}, "filename": "table.json"},
                {"url": "http://agent/elsewhere", "filename": "far.bin"},
            )
        )
    )
    assert found == {
        "a2a/report/hello.txt": "grüße".encode(),
        "a2a/report/pixels.png": b"\x00\xff",
        "a2a/report/table.json": b'{"a":[2.5],"b":1}',
    }


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"text": ""}, "report-0.txt"),
        ({"text": "", "mediaType": "text/markdown; charset=utf-8"}, "report-0.md"),
        ({"text": "", "mediaType": "text/x-log"}, "report-0.txt"),
        ({"text": "", "mediaType": "application/x-unknown"}, "report-0.txt"),
        ({"data": None}, "report-0.json"),
        ({"raw": ""}, "report-0.bin"),
        ({"raw": "", "mediaType": "image/PNG"}, "report-0.png"),
        ({"text": "", "filename": ""}, "report-0.txt"),
    ],
)
def test_a_part_without_a_name_is_named_after_its_artifact(part: dict[str, Any], name: str) -> None:
    assert list(kept(task(artifact(part)))) == [f"a2a/report/{name}"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../../etc/passwd", "passwd"),
        ("/etc/passwd", "passwd"),
        ("C:\\temp\\list.csv", "list.csv"),
        ("..", "report-0.txt"),
        ("a/..", "report-0.txt"),
        ("folder/", "report-0.txt"),
        ("two\nlines\u2028.txt", "two_lines_.txt"),
        ("Übersicht 1.pdf", "Übersicht 1.pdf"),
        ("x" * 400 + ".pdf", "x" * (MAX_NAME - 4) + ".pdf"),
        (7, "report-0.txt"),
    ],
)
def test_a_name_is_no_path(given: Any, name: str) -> None:
    assert list(kept(task(artifact({"text": "x", "filename": given})))) == [f"a2a/report/{name}"]


@pytest.mark.parametrize("name", [None, "", "..", "a/../.."])
def test_an_artifact_without_a_usable_id_has_one(name: Any) -> None:
    assert list(kept(task(artifact({"text": "x"}, name=name)))) == ["a2a/artifact/artifact-0.txt"]


def test_two_parts_of_one_name_are_both_kept() -> None:
    parts = [{"text": letter, "filename": "a.txt"} for letter in "xyz"]
    assert kept(task(artifact(*parts[:2]), artifact(parts[2])), "a2a/report/2-a.txt") == {
        "a2a/report/a.txt": b"x",
        "a2a/report/3-a.txt": b"y",
        "a2a/report/4-a.txt": b"z",
    }


@pytest.mark.parametrize(
    "result",
    [
        None,
        "done",
        ["a"],
        {"parts": [{"text": "a message is no task"}]},
        {"artifacts": {"parts": []}},
        {"artifacts": ["x", {"parts": "y"}, {"parts": ["z", {}, {"text": 1}, {"raw": 2}, {"raw": "no base64!"}]}]},
    ],
)
def test_what_is_no_artifact_is_passed_over(result: Any) -> None:
    """A person may have supplied any result at all."""
    assert kept(result) == {}


def test_there_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_artifacts, "MAX_ARTIFACTS", 2)
    assert len(kept(task(artifact({"text": "1"}, {"text": "2"})))) == 2
    with pytest.raises(TaskFault) as caught:
        artifacts_of(task(artifact({"text": "1"}, {"text": "2"}, {"text": "3"})))
    assert caught.value.code == "artifact_limit"
