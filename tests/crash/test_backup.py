"""A backup that is taken in the middle of a fan-out restores to a sound database, on which the run comes to its end."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.artifacts import digest_of
from support.children import wait_until
from support.field import Field
from support.scale import repeats

ITEMS = 40
SCRIPT = """\
echo "$1" >> "$2"
if [ "$1" -ge "$3" ]; then while [ -e "$4" ]; do sleep 0.02; done; fi
echo "kept $1" > "out/$1"
"""
DONE = "SELECT COUNT(*) FROM tasks WHERE run_id = ? AND state = 'succeeded'"


def fan_out(field: Field, idempotency: str) -> str:
    hold = field.root / "hold"
    task = {
        "id": "keep",
        "uses": "action:keep",
        "foreach": {"items": list(range(ITEMS)), "maxItems": ITEMS},
        "with": {
            "args": ["-c", SCRIPT, "sh", "${{ vars.item }}", str(field.ledger), "${{ inputs.held }}", str(hold)],
            "artifacts": ["out/${{ vars.item }}"],
        },
    }
    return field.workflow(
        "fan-out",
        [task],
        actions={"keep": {"kind": "builtin.shell.exec", "command": "sh", "idempotency": idempotency}},
        inputs={"held": 0},
        policy={"approval": "never", "processAllowlist": ["sh"], "writableRoots": ["out"]},
    )


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    place = Field(tmp_path)
    try:
        yield place
    finally:
        place.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("idempotency", ["idempotent", "unknown"])
def test_a_backup_in_the_middle_of_a_fan_out(field: Field, idempotency: str) -> None:
    (field.folder / "out").mkdir()
    pool = field.pool(4)
    file = fan_out(field, idempotency)
    for round_ in range(repeats(20)):
        (field.root / "hold").touch()
        middle = 1 + (round_ * 7 + 5) % (ITEMS - 10)
        run_id = field.submit(file, "--input", f"held={middle}")

        def reached(run_id: str = run_id, middle: int = middle) -> bool:
            return bool(field.scalar(DONE, run_id) >= middle)

        wait_until(reached, "the middle")
        taken = field.json("db", "backup", f"backup-{round_}")
        assert taken.code == 0, taken.err
        (field.root / "hold").unlink()
        # The original is not disturbed: nobody of it was taken for dead.
        assert field.json("wait", run_id).data["state"] == "succeeded"
        assert field.rows("SELECT 1 FROM attempts WHERE run_id = ? AND delivery > 1", run_id) == []
        assert Counter(field.ledger.read_text().split()).total() == ITEMS * (round_ + 1)
        if round_:
            shutil.rmtree(field.root / "restored", ignore_errors=True)
        place = field.root / "restored" / f"{round_}.db"
        assert field.json("db", "restore", f"backup-{round_}", "--db", place).code == 0
        verified = field.json("db", "verify", "--db", place)
        assert (verified.code, verified.data["problems"]) == (0, [])
        resumed = field.json("resume", run_id, "--workers", "2", "--db", place)
        inspected = field.json("inspect", run_id, "--db", place).data["tasks"]
        doubtful = [task["taskId"] for task in inspected if task["state"] == "waiting_for_effect"]
        if idempotency == "idempotent":
            assert (resumed.code, resumed.data["state"]) == (0, "succeeded"), resumed.err
            assert doubtful == []
        else:
            # What was in flight at that moment is in doubt, and nothing of it was repeated.
            assert resumed.code == 3
            assert 1 <= len(doubtful) <= 4
        kept = field.json("artifacts", "list", "--run", run_id, "--db", place).data["references"]
        assert len(kept) == ITEMS - len(doubtful)
        assert {item["digest"] for item in kept} <= {digest_of(f"kept {n}\n".encode()) for n in range(ITEMS)}
        assert field.json("db", "verify", "--db", place).code == 0
        executed = Counter(field.ledger.read_text().split())
        if idempotency == "unknown":
            assert sum(executed.values()) == ITEMS * (round_ + 1) + ITEMS - middle - len(doubtful)
        field.ledger.write_text("".join(f"{n}\n" for n in range(ITEMS)) * (round_ + 1))
    field.check_clean_end(drained=[pool])
