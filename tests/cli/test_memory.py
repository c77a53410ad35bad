"""`memory get|put|search|reindex`: envelopes, exit codes, and what bad input leaves behind."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import Any

import pytest

DAY_MS = 86_400_000


def kind_of(result: Any) -> str:
    return str(json.loads(result.out)["kind"])


def test_put_get_and_search(cli: Any) -> None:
    put = cli.json("memory", "put", "roof", '{"of": "copper"}', "--metadata", "topic=house", "--metadata", "floor=3")
    assert (put.code, kind_of(put)) == (0, "MemoryRecord")
    record = put.data
    assert record["entry"] == {
        "formatVersion": 1,
        "content": {"type": "json", "value": {"of": "copper"}, "text": '{"of":"copper"}'},
        "metadata": {"topic": "house", "floor": 3},
    }
    assert record.keys() == {
        "namespace", "key", "entry", "embeddingProvider", "embeddingDimensions", "createdAt", "updatedAt", "expiresAt"
    }  # fmt: skip
    assert (record["namespace"], record["key"], record["expiresAt"]) == ("default", "roof", None)
    got = cli.json("memory", "get", "roof")
    assert (kind_of(got), got.data) == ("MemoryRecord", record)
    found = cli.json("memory", "search", "copper thatch", "--mode", "hybrid", "--filter", "floor=3")
    assert (found.code, kind_of(found)) == (0, "MemorySearch")
    assert {name: found.data[name] for name in ("namespace", "query", "mode", "count")} == {
        "namespace": "default",
        "query": "copper thatch",
        "mode": "hybrid",
        "count": 1,
    }
    [best] = found.data["results"]
    assert best["record"] == record
    assert (best["textScoreMillionths"], best["vectorScoreMillionths"]) == (500_000, 500_000)
    for filter in ("floor=4", "floor=3.0", "walls=1"):
        assert cli.json("memory", "search", "copper", "--filter", filter).data["count"] == 0
    assert cli.json("memory", "search", "copper", "--namespace", "other").data["results"] == []


def test_other_ways_to_put(cli: Any) -> None:
    text = cli.json("memory", "put", "k", "no JSON: x", "--text", "words", "--retention-days", "3", "--namespace", "n")
    assert text.data["entry"]["content"] == {"type": "json", "value": "no JSON: x", "text": "words"}
    # Up to the moment between the look at the clock and the write.
    assert 0 <= text.data["updatedAt"] + 3 * DAY_MS - text.data["expiresAt"] < 60_000
    cli.write("value.json", '{"a": [1, 2.0]}')
    assert cli.json("memory", "put", "f", "--file", "value.json").data["entry"]["content"]["value"] == {"a": [1, 2.0]}
    entry = text.data["entry"]
    piped = cli.json("memory", "put", "copy", "--entry", "--file", "-", input=json.dumps(entry))
    assert piped.data["entry"] == entry
    again = cli.json("memory", "put", "k", "null", "--namespace", "n")
    assert (again.data["entry"]["content"]["value"], again.data["expiresAt"]) == (None, None)
    assert again.data["createdAt"] == text.data["createdAt"]


def test_for_people(cli: Any) -> None:
    shown = cli("memory", "put", "roof", "copper\x1b[31m\nand tin", "--metadata", "topic=house")
    assert shown.code == 0
    assert "roof in default, no end" in shown.out
    assert 'topic: "house"' in shown.out
    assert "  copper\\x1b[31m\n  and tin\n" in shown.out
    assert cli("memory", "get", "roof").out == shown.out
    found = cli("memory", "search", "copper").out.splitlines()
    assert found[0].split() == ["SCORE", "KEY", "TEXT"]
    assert found[1].split()[:2] == ["1.000000", "roof"]
    assert cli("memory", "search", "slate").out == "nothing in the namespace default fits\n"


def test_reindex_after_a_change_of_dimensions(cli: Any) -> None:
    assert cli("memory", "put", "a", "copper").code == 0
    wrong = cli.json("memory", "search", "copper", "--mode", "vector", "--dimensions", "128")
    assert (wrong.code, wrong.error["code"]) == (5, "conflict")
    assert wrong.error["remedy"].startswith("`agentctl memory reindex --namespace default --dimensions 128`")
    done = cli.json("memory", "reindex", "--namespace", "default", "--dimensions", "128")
    assert (kind_of(done), done.data) == (
        "MemoryReindex",
        {"namespace": "default", "entries": 1, "embeddingProvider": "local_hash", "embeddingDimensions": 128},
    )
    # Without --dimensions a verb takes those that the entries have.
    assert cli.json("memory", "put", "b", "copper").data["embeddingDimensions"] == 128
    assert cli.json("memory", "search", "copper", "--mode", "vector").data["count"] == 2
    assert cli("memory", "reindex").out == "2 entries of all namespaces: local_hash, 64 dimensions\n"
    assert cli.json("memory", "reindex", "--namespace", "nobody").data["entries"] == 0


def test_an_entry_whose_time_is_over_is_not_found(cli: Any) -> None:
    assert cli("memory", "put", "k", "copper", "--retention-days", "1").code == 0
    connection = sqlite3.connect(cli.database)
    connection.execute("UPDATE long_term_memory SET expires_at = updated_at")
    connection.commit()
    connection.close()
    gone = cli.json("memory", "get", "k")
    assert (gone.code, gone.error["code"]) == (5, "not_found")
    assert cli.json("memory", "search", "copper").data["count"] == 0


def test_a_task_does_not_write_over_an_entry_of_a_newer_agentctl_whose_time_is_over(cli: Any) -> None:
    """Its task fails, by name and at once; its worker lives on and does the next one."""
    assert cli("memory", "put", "k", "copper", "--retention-days", "1").code == 0
    entry = "SELECT * FROM long_term_memory WHERE memory_key = 'k'"
    with closing(sqlite3.connect(cli.database)) as connection, connection:
        connection.execute("UPDATE long_term_memory SET format_version = 99, expires_at = updated_at")
        before = connection.execute(entry).fetchall()
    cli.write(
        "flow.yaml",
        "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: flow}\nspec:\n"
        "  policy: {approval: never}\n"
        "  actions: {keep: {kind: builtin.long_term_memory.write}}\n"
        "  tasks:\n"
        "    - {id: over, uses: action:keep, with: {key: k, value: 1}, failure: continue}\n"
        "    - {id: beside, uses: action:keep, with: {key: other, value: 2}}\n",
    )
    run = cli.json("run", "flow.yaml", "--workers", "1")
    assert run.code == 4, run.err
    over, beside = cli.json("inspect", run.data["runId"]).data["tasks"]
    assert (over["state"], over["error"]["code"], beside["state"]) == ("failed", "incompatible_version", "succeeded")
    assert "newer agentctl" in over["error"]["message"]
    with closing(sqlite3.connect(cli.database)) as connection:
        assert connection.execute("SELECT delivery, lost FROM attempts").fetchall() == [(1, 0), (1, 0)]
        assert connection.execute("SELECT COUNT(DISTINCT holder) FROM attempts").fetchone() == (1,)
        assert connection.execute(entry).fetchall() == before


BAD: list[tuple[list[str], int, str, str]] = [
    (["get", "nope"], 5, "not_found", "no entry 'nope'"),
    (["get", "k", "--namespace", ""], 2, "usage", "'namespace' must be"),
    (["get", ""], 2, "usage", "'key' must be"),
    (["put", "k"], 2, "usage", "either a VALUE or --file"),
    (["put", "k", "1", "--file", "x"], 2, "usage", "either a VALUE or --file"),
    (["put", "k", "--file", "missing.json"], 2, "usage", "missing.json"),
    (["put", "", "1"], 2, "usage", "'key' must be"),
    (["put", "k", " "], 2, "usage", "nothing to search for"),
    (["put", "k", "NaN1", "--text", ""], 2, "usage", "nothing to search for"),
    (["put", "k", '{"a":1,"a":2}'], 2, "usage", "stands twice"),
    (["put", "k", "1", "--metadata", "x"], 2, "usage", "not KEY=VALUE"),
    (["put", "k", "1", "--metadata", "x=1", "--metadata", "x=2"], 2, "usage", "'x' twice"),
    (["put", "k", "1", "--retention-days", "0"], 2, "usage", "1 to 36500"),
    (["put", "k", "1", "--dimensions", "7"], 2, "usage", "8 to 4096"),
    (["put", "k", '{"formatVersion": 9}', "--entry"], 2, "usage", "formatVersion 9"),
    (["put", "k", '{"content": {}}', "--entry", "--text", "t"], 2, "usage", "beside value only"),
    (["search", ""], 2, "usage", "'query' must be"),
    (["search", "q", "--mode", "fuzzy"], 2, "usage", "text, vector, hybrid"),
    (["search", "q", "--limit", "101"], 2, "usage", "1 to 100"),
    (["search", "q", "--limit", "many"], 2, "usage", "many"),
    (["search", "q", "--filter", "=1"], 2, "usage", "not KEY=VALUE"),
    (["reindex", "--dimensions", "5000"], 2, "usage", "8 to 4096"),
    (["reindex", "--namespace", ""], 2, "usage", "'namespace' must be"),
    (["forget", "k"], 2, "usage", "No such command"),
]


@pytest.mark.parametrize(("arguments", "code", "word", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_changes_nothing(cli: Any, arguments: list[str], code: int, word: str, message: str) -> None:
    if word == "not_found":
        assert cli("memory", "put", "other", "1").code == 0
    result = cli.json("memory", *arguments)
    assert (result.code, result.error["code"]) == (code, word), result.err
    assert message in result.error["message"]
    assert result.error["remedy"]
    assert cli.database.exists() == (word == "not_found")


def test_a_value_that_is_too_large(cli: Any) -> None:
    cli.write("large.json", json.dumps("x" * (1 << 20)))
    result = cli.json("memory", "put", "k", "--file", "large.json")
    assert (result.code, result.error["code"]) == (2, "usage")
    assert "at most 1048576" in result.error["message"]
    result = cli.json("memory", "search", "x" * 65_537)
    assert result.code == 2
    assert "65537 bytes" in result.error["message"]
    assert not cli.database.exists()


def test_looking_does_not_make_a_database(cli: Any) -> None:
    for arguments in (["get", "k"], ["search", "q"], ["reindex"]):
        result = cli.json("memory", *arguments)
        assert (result.code, result.error["code"]) == (5, "not_found")
    assert not cli.database.exists()


def test_a_write_of_a_task_waits_for_its_approval(cli: Any) -> None:
    """An external mutation: gated unless the document says otherwise. Looking is not."""
    cli.write(
        "flow.yaml",
        "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: flow}\nspec:\n"
        "  actions:\n"
        "    keep: {kind: builtin.long_term_memory.write}\n"
        "    get: {kind: builtin.long_term_memory.read}\n"
        "  tasks:\n"
        "    - {id: look, uses: action:get, with: {key: k}}\n"
        "    - {id: write, uses: action:keep, needs: [look], with: {key: k, value: kept}}\n",
    )
    run = cli.json("run", "flow.yaml")
    assert (run.code, run.data["reason"]) == (3, "approval_required")
    assert cli.json("memory", "get", "k").code == 5
    [asked] = cli.json("approvals", "list").data["approvals"]
    assert (asked["capability"], asked["risk"]) == ("memory.write", "medium")
    assert asked["expectedEffect"] == {"namespace": "default", "key": "k", "retentionDays": None}
    assert cli("approvals", "approve", asked["approvalId"]).code == 0
    assert cli.json("resume", run.data["runId"]).code == 0
    assert cli.json("memory", "get", "k").data["entry"]["content"]["value"] == "kept"


def test_limits_of_a_key_and_of_a_value(cli: Any) -> None:
    too_long = cli.json("memory", "put", "k" * 1025, "x")
    assert (too_long.code, too_long.error["message"]) == (2, "'key' has 1025 bytes; at most 1024 are allowed")
    assert cli.json("memory", "put", "k" * 1024, "x").code == 0
    # A text is the value and what is searched; it counts once.
    cli.write("large.json", '"' + "x" * 1_000_000 + '"')
    assert cli.json("memory", "put", "large", "--file", "large.json").code == 0
    cli.write("larger.json", '"' + "x" * (1 << 20) + '"')
    assert cli.json("memory", "put", "large", "--file", "larger.json").code == 2


def test_a_key_that_stands_twice_has_a_remedy_of_its_own(cli: Any) -> None:
    for arguments in (("memory", "put", "k", '{"a":1,"a":2}'), ("run", "hello.yaml", "--inputs", '{"a":1,"a":2}')):
        refused = cli.json(*arguments)
        assert (refused.code, refused.error["remedy"]) == (2, "give each key of an object once")
