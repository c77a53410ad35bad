"""The rooms and the arrows between them, read from the source (architecture 2 and 8)."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentctl.store.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("store", "coordinator", "worker", "cli")
MAY_IMPORT = {
    "store": {"store"},
    "coordinator": {"coordinator", "store"},
    "worker": {"worker", "store"},
    "cli": {"cli", "coordinator", "worker", "store"},
}
PURE = (
    "states",
    "records",
    "canonical",
    "errors",
    "policy",
    "version",
    "migrations/__init__",
    "embedding",
    "memory_entries",
)
"""Modules of the store that decide or describe, and touch nothing."""

PURE_LIBRARY = frozenset(
    [
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "fnmatch",
        "functools",
        "hashlib",
        "ipaddress",
        "itertools",
        "json",
        "math",
        "re",
        "string",
        "typing",
        "types",
        "urllib",
        "abc",
        "operator",
        "posixpath",
    ]
)
"""What a pure module may import. `pathlib` is not in it: its paths can be opened."""

CLOCK_AND_CHANCE = {
    "time": None,
    "datetime": {"now", "today", "utcnow"},
    "random": None,
    "uuid": None,
    "secrets": None,
    "os": {"urandom", "getrandom", "times"},
}
"""Modules, and names of them, that tell the time or throw dice; None stands for every use of the module."""

ALLOWED = {
    "store/clock.py": "it is the one source",
    "store/process_identity.py": "waits for the end of real processes, whose time nobody can inject",
    "worker/effects/process.py": "bounds of waits on real processes; the clock of an effect is an argument",
    "cli/render.py": "shows a stored time in the reader's zone",
}

"""Modules that bear a name of the standard library all the same. Nothing is run from inside that folder."""


def sources(*rooms: str) -> Iterator[Path]:
    for room in rooms or ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a module, wherever it stands, by its full name."""
    package = ["agentctl", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


# -- arrows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_arrows_allow(room: str) -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources(room)
        for line, name in imports(path)
        if name.split(".")[0] == "agentctl" and name.split(".")[1] not in MAY_IMPORT[room]
    ]
    assert wrong == []


def test_nobody_imports_a_room_by_the_name_of_its_folder() -> None:
    """`import store` would work in a checkout and nowhere else."""
    wrong = [
        f"{name_of(path)}:{line} imports {name}"
        for path in sources()
        for line, name in imports(path)
        if name.split(".")[0] in {*ROOMS, "tests", "support", "ops"}
    ]
    assert wrong == []


def test_relative_imports_stay_in_their_room() -> None:
    for path in sources():
        depth = len(path.relative_to(ROOT).parent.parts)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_touch_nothing(module: str) -> None:
    path = ROOT / "store" / f"{module}.py"
    own = {f"agentctl.store.{name}" for name in PURE}
    for line, name in imports(path):
        inside = any(name == pure or name.startswith(pure + ".") for pure in own)
        assert inside or name.split(".")[0] in PURE_LIBRARY, f"{name_of(path)}:{line} imports {name}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("open", "input", "print", "exec", "eval", "__import__"), (
                f"{name_of(path)}:{node.lineno}"
            )


# -- time and chance ---------------------------------------------------------------------------------------------------


def uses_of_clock_and_chance(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Where a module asks a clock or a random source, under whatever name it has imported it."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                if top in CLOCK_AND_CHANCE:
                    modules[alias.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in CLOCK_AND_CHANCE:
            names = CLOCK_AND_CHANCE[node.module]
            for alias in node.names:
                if names is None or alias.name in names:
                    yield node.lineno, f"{node.module}.{alias.name}"
                elif node.module == "datetime":
                    modules[alias.asname or alias.name] = "datetime"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        root: ast.expr = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in modules:
            names = CLOCK_AND_CHANCE[modules[root.id]]
            if names is None or node.attr in names:
                yield node.lineno, f"{root.id}.{node.attr}"


def test_there_is_one_source_of_time_and_chance() -> None:
    found = {
        f"{name_of(path)}:{line} {what}"
        for path in sources()
        if name_of(path) not in ALLOWED
        for line, what in uses_of_clock_and_chance(tree_of(path))
    }
    assert found == set()


def test_what_is_allowed_is_needed() -> None:
    for name in ALLOWED:
        if name != "cli/render.py":  # it only formats, which asks no clock
            assert list(uses_of_clock_and_chance(tree_of(ROOT / name))), f"{name} needs no permission any more"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "import time as t\nt.monotonic_ns()",
        "from time import sleep",
        "def f():\n    from random import random",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as d\nd.utcnow()",
        "from datetime import date\ndate.today()",
        "import uuid\nuuid.uuid4()",
        "import os\nos.urandom(8)",
        "from os import urandom",
        "import secrets\nsecrets.token_hex()",
    ],
)
def test_the_look_for_clocks_finds_them(text: str) -> None:
    assert list(uses_of_clock_and_chance(ast.parse(text)))


@pytest.mark.parametrize("text", ["from datetime import datetime\ndatetime.fromtimestamp(0)", "import os\nos.close(1)"])
def test_the_look_for_clocks_blames_nobody_else(text: str) -> None:
    assert not list(uses_of_clock_and_chance(ast.parse(text)))


def test_sql_asks_no_clock() -> None:
    word = re.compile(
        r"\b(CURRENT_TIME(STAMP)?|CURRENT_DATE|strftime\(|julianday\(|unixepoch\(|datetime\('now|random\(\))", re.I
    )
    for path in [*sources("store"), *(ROOT / "store" / "migrations").glob("*.sql")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if path.name not in ("clock.py",):
                assert not word.search(line), f"{name_of(path)}:{number}: {line.strip()}"


def test_a_sleep_in_a_test_says_why() -> None:
    """No test sleeps to be right (house rule 5). One that varies a moment, or measures a time, says so in its line."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "CLOCK.sleep", "sleep"):
                line = text.splitlines()[node.lineno - 1]
                if "  # " not in line:
                    silent.append(f"{name_of(path)}:{node.lineno}: {line.strip()}")
    assert silent == []


# -- processes ---------------------------------------------------------------------------------------------------------


def test_processes_are_spawned_and_never_forked() -> None:
    """A child of a fork would carry open connections and locks along."""
    contexts = 0
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{name_of(path)}:{node.lineno}"
            assert called not in ("os.fork", "os.forkpty", "pty.fork"), where
            assert called not in ("multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.Queue"), where
            assert called != "multiprocessing.set_start_method", where
            if called.endswith("get_context"):
                contexts += 1
                method = node.args[0] if node.args else None
                assert isinstance(method, ast.Constant), where
                assert method.value in ("spawn", "forkserver"), where
            assert not any(word.arg == "preexec_fn" for word in node.keywords), where
    assert contexts > 0


# -- names and packaging -----------------------------------------------------------------------------------------------


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script that is run from inside the folder would import it instead: multiprocessing, click, pydantic break."""
    named = {name_of(path) for path in sources() if path.stem in sys.stdlib_module_names}
    assert not named


def test_every_folder_is_packaged_and_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = set(project["tool"]["setuptools"]["packages"])
    folders = {
        "agentctl." + ".".join(path.parent.relative_to(ROOT).parts) for path in sources() if path.name == "__init__.py"
    }
    assert packages == folders
    directories = project["tool"]["setuptools"]["package-dir"]
    for package in packages:
        assert directories[package] == package.removeprefix("agentctl.").replace(".", "/")
    for room in ROOMS:
        assert (ROOT / room / "py.typed").exists()
        assert "py.typed" in project["tool"]["setuptools"]["package-data"][f"agentctl.{room}"]


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in {path.parent for path in sources()}:
        assert (folder / "__init__.py").exists(), name_of(folder)


def test_the_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == VERSION
