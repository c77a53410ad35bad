"""Is the wheel what it should be? Exactly the rooms of the repository under `agentctl/`, and nothing else.

python ops/check_wheel.py dist/agentctl-0.1.0-py3-none-any.whl
"""
# ruff: noqa: T201  (the check talks to the person or the job that started it)

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOMS = ("store", "coordinator", "worker", "cli")
SHIPPED = {".py", ".sql", ".typed"}


def expected(repository: Path) -> set[str]:
    """Every source, SQL and marker file of the rooms, as the wheel has to name it."""
    found = set()
    for room in ROOMS:
        for path in (repository / room).rglob("*"):
            if path.is_file() and path.suffix in SHIPPED and "__pycache__" not in path.parts:
                found.add(f"agentctl/{path.relative_to(repository).as_posix()}")
    return found


def complaints(wheel: Path, repository: Path) -> list[str]:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    held, wanted = names - metadata, expected(repository)
    said = [f"not in the wheel: {name}" for name in sorted(wanted - held)]
    said += [f"should not be in the wheel: {name}" for name in sorted(held - wanted)]
    for room in ROOMS:
        for needed in ("__init__.py", "py.typed"):
            if f"agentctl/{room}/{needed}" not in held:
                said.append(f"not in the wheel: agentctl/{room}/{needed}")
    if not any(name.startswith("agentctl/store/") and name.endswith(".sql") for name in held):
        said.append("the wheel holds no SQL")
    if any("tests" in name.split("/") for name in names):
        said.append("the wheel holds tests")
    for needed in ("entry_points.txt", "licenses/LICENSE"):
        if not any(name.endswith(f".dist-info/{needed}") for name in metadata):
            said.append(f"its metadata lacks {needed}")
    return said


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    said = complaints(Path(sys.argv[1]), Path(__file__).parents[1])
    for line in said:
        print(line, file=sys.stderr)
    if not said:
        print("the wheel holds exactly the four rooms")
    return 1 if said else 0


if __name__ == "__main__":
    raise SystemExit(main())
