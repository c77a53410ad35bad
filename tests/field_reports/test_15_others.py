"""Report 15 for what came later: agents that write, and runs that are made from other runs, on a store that is closed.

https://github.com/treeverse/dvc/issues/4232 · https://github.com/astral-sh/uv/pull/17825
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.agents import WRITE
from support.field import Field
from support.field_models import ask, models
from support.model_server import Play, model_server


def _prefix(root: Path) -> list[str]:
    """The program without the rights of root, and the store without the right to write."""
    root.chmod(0o500)
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may do everything")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.timeout(120)
def test_a_closed_store_is_refused_before_anybody_is_asked(field: Field) -> None:
    """An agent that may write asks no model; a retry, a repair and a fork make no run."""
    (field.folder / "out").mkdir()
    with model_server() as server:
        call = ("c", "write", '{"path": "out/a.txt", "content": "one"}')
        server.plays(Play(text="", calls=[call]), Play(text="ok"), Play(status=400))
        tasks = [ask("write", outputSchema={"type": "object"}), ask("fails", needs=["write"])]
        spec = models(server.url, tools={"write": WRITE}, policy={"writableRoots": ["out"]})
        file = field.workflow("agents", tasks, **spec)
        first = field.json("run", file)
        assert (first.code, first.data["error"]["taskId"]) == (4, "fails"), first.out
        source = first.data["runId"]
        asked = server.count
        root = field.database.parent / "artifacts"
        prefix = _prefix(root)
        for words in (
            ("run", file),
            ("submit", file),
            ("retry", file, source, "--failed"),
            ("repair", file, source, "--from", "fails"),
            ("fork", source),
        ):
            refused = field.json(*words, prefix=prefix)
            assert (refused.code, refused.error["code"]) == (5, "environment"), (words, refused.err)
            assert str(root) in refused.error["message"]
            assert "ermission" in refused.error["message"] or "0500" in refused.error["message"]
        assert field.scalar("SELECT COUNT(*) FROM runs") == 1
        assert server.count == asked
        root.chmod(0o700)
        server.plays(Play(text="well"))
        again = field.json("retry", file, source, "--failed")
        assert (again.code, again.data["output"]["fails"]["text"]) == (0, "well"), again.err
        assert server.count == asked + 1
    field.check_clean_end()


@pytest.mark.timeout(120)
def test_nothing_is_undone_while_the_store_is_closed(field: Field) -> None:
    """An inverse action that writes a file: no run is made of it before what it writes could be kept."""
    (field.folder / "out").mkdir()
    undo = {"uses": "action:undo", "with": {"path": "out/a", "content": "undone"}}
    task = {"id": "a", "uses": "action:do", "with": {"path": "out/a", "content": "done"}, "compensate": undo}
    actions = {"do": {"kind": "builtin.write"}, "undo": {"kind": "builtin.write"}}
    policy = {"approval": "never", "writableRoots": ["out"]}
    made = field.json("run", field.workflow("undo", [task], actions=actions, policy=policy))
    assert made.code == 0, made.err
    source = made.data["runId"]
    root = field.database.parent / "artifacts"
    prefix = _prefix(root)
    assert field.json("compensate", source, "--plan", prefix=prefix).code == 0
    refused = field.json("compensate", source, prefix=prefix)
    assert (refused.code, refused.error["code"]) == (5, "environment"), refused.out
    assert str(root) in refused.error["message"]
    assert field.scalar("SELECT COUNT(*) FROM runs") == 1
    assert (field.folder / "out" / "a").read_text() == "done"
    root.chmod(0o700)
    assert field.json("compensate", source).code == 0
    assert (field.folder / "out" / "a").read_text() == "undone"
    field.check_clean_end()
