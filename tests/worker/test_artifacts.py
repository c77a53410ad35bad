"""Which files become artifacts: names, globs, links, roots (contract 8 and row 11)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agentctl.store.errors import TaskFault
from agentctl.worker.effects import Declared
from agentctl.worker.effects import artifacts as subject
from agentctl.worker.effects.artifacts import find, open_found, refuse_out_of_reach


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A workspace `w` with a writable root `out`, another root beside it, and something outside of both."""
    for name in ("w/out/deep/er", "root", "outside"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("w/out/b.txt", "w/out/a.txt", "w/out/deep/c.txt", "w/out/deep/er/d.log", "w/out/.hidden", "w/in.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "root" / "r.txt").write_text("root")
    (tmp_path / "outside" / "o.txt").write_text("outside")
    return tmp_path


def declared(base: Path, *patterns: str) -> Declared:
    return Declared(patterns, str(base / "w"), (str(base / "w" / "out"), str(base / "root")))


def paths(base: Path, *patterns: str) -> list[str]:
    return [item.path for item in find(declared(base, *patterns))]


def refused(base: Path, *patterns: str) -> TaskFault:
    with pytest.raises(TaskFault) as caught:
        find(declared(base, *patterns))
    assert not caught.value.retryable
    return caught.value


def test_names_and_globs(base: Path) -> None:
    assert paths(base, "out/a.txt") == ["out/a.txt"]
    assert paths(base, "out/*.txt") == ["out/a.txt", "out/b.txt"]
    assert paths(base, "out/**/*.txt") == ["out/a.txt", "out/b.txt", "out/deep/c.txt"]
    assert paths(base, "out/**") == ["out/a.txt", "out/b.txt", "out/deep/c.txt", "out/deep/er/d.log"]
    assert paths(base, "out/**/er/*", "out/**/**/c.*") == ["out/deep/c.txt", "out/deep/er/d.log"]
    assert paths(base, "out/**/c.txt", "out/*/**/d.log") == ["out/deep/c.txt", "out/deep/er/d.log"]
    assert paths(base, "out/[ab].txt", "out/a.*", "out/./a.txt", "out//b.txt") == ["out/a.txt", "out/b.txt"]
    assert paths(base, "out/.h*", "out/.hidden") == ["out/.hidden"]
    assert paths(base, "out/none*", "out/a*/", "out/**/", "out/**/a*/") == []
    assert [item.size for item in find(declared(base, "out/a.txt"))] == [len("w/out/a.txt")]


def test_absolute_names_and_roots_outside_of_the_workspace(base: Path) -> None:
    assert paths(base, str(base / "w" / "out" / "a.txt")) == ["out/a.txt"]
    assert paths(base, str(base / "root" / "*")) == [str(base / "root" / "r.txt")]


@pytest.mark.parametrize("name", ["job[1]", "what?", "*"])
def test_a_workspace_with_a_name_like_a_pattern(base: Path, name: str) -> None:
    """What stands in its name means itself: neither nothing nor the folder beside it is matched."""
    for folder in (name, "job1", "whatx"):
        (base / folder / "out").mkdir(parents=True)
        (base / folder / "out" / f"of {folder.replace('*', 'star')}").write_text("x")
    workspace = os.path.realpath(base / name)
    here = Declared(("out/*",), workspace, (os.path.join(workspace, "out"),))
    assert [item.path for item in find(here)] == [f"out/of {name.replace('*', 'star')}"]


def test_a_name_that_is_not_there_is_a_broken_promise(base: Path) -> None:
    fault = refused(base, "out/a.txt", "out/missing.txt")
    assert (fault.code, fault.details) == ("artifact_missing", {"path": "out/missing.txt"})
    assert refused(base, "out/no/folder.txt").code == "artifact_missing"


@pytest.mark.parametrize("pattern", ["in.txt", "*.txt", "{base}/outside/o.txt", "{base}/outside/*", "out"])
def test_only_what_lies_under_a_writable_root(base: Path, pattern: str) -> None:
    fault = refused(base, pattern.format(base=base))
    assert fault.code == ("artifact_refused" if pattern == "out" else "policy_denied")


def test_links(base: Path) -> None:
    """A link is refused wherever it leads, and a linked folder counts as the place that it leads to."""
    out = base / "w" / "out"
    (out / "link.txt").symlink_to(out / "a.txt")
    (out / "dangling").symlink_to("nowhere")
    (out / "away").symlink_to(base / "outside")
    (out / "near").symlink_to(out / "deep")
    for pattern in ("out/link.txt", "out/l*", "out/dangling"):
        assert refused(base, pattern).code == "artifact_refused"
    assert refused(base, "out/away/o.txt").code == "policy_denied"
    assert refused(base, "out/away/*").code == "policy_denied"
    assert paths(base, "out/near/c.txt") == ["out/deep/c.txt"]


def test_links_that_lead_upwards_are_walked_once(base: Path) -> None:
    """Each of them doubles the number of paths at every depth."""
    out = base / "w" / "out"
    for number in range(4):
        (out / "deep" / f"up-{number}").symlink_to("..")
        (out / f"self-{number}").symlink_to(".")
    assert paths(base, "out/**/*.txt") == ["out/a.txt", "out/b.txt", "out/deep/c.txt"]
    assert paths(base, "out/**/deep/**/*.log") == ["out/deep/er/d.log"]
    assert paths(base, "**/*.nothing") == []
    assert refused(base, "out/**").code == "artifact_refused"


def test_what_is_no_file(base: Path) -> None:
    os.mkfifo(base / "w" / "out" / "pipe")
    for pattern in ("out/pipe", "out/p*", "out/deep"):
        assert refused(base, pattern).code == "artifact_refused"


@pytest.mark.parametrize(
    "name", ["a\u202fPM.txt", "\u0646\u200c\u0645.txt", "\U0001f469\u200d\U0001f467.txt", "a\u00a0b.txt"]
)
def test_names_that_people_have(base: Path, name: str) -> None:
    """Narrow and other spaces, joiners and such are no control characters, though they cannot be printed one by one."""
    (base / "w" / "out" / name).write_text("x")
    assert f"out/{name}" in paths(base, "out/*.txt")


@pytest.mark.parametrize("name", [b"\xff.txt", b"a\nb.txt", b"a\x1bb.txt", b"a\x7fb.txt", "a\x85b.txt".encode()])
def test_names_that_no_record_can_carry(base: Path, name: bytes) -> None:
    (Path(os.fsdecode(os.fsencode(base / "w" / "out") + b"/" + name))).write_text("x")
    fault = refused(base, "out/*.txt")
    assert fault.code == "artifact_refused"
    fault.args[0].encode("utf-8")


def test_names_that_only_look_odd(base: Path) -> None:
    out = base / "w" / "out"
    for name in (
        "é ü.txt",
        "$(touch oops).txt",
        "-x.txt",
        "💾.txt",
        "写真\u30002.txt",
        "a\u00a0b.txt",
        "👨\u200d👩.txt",
    ):
        (out / name).write_text("x")
        assert f"out/{name}" in paths(base, "out/*.txt")


def test_names_that_look_like_globs(base: Path) -> None:
    """A fan-out names the file of each item, and items are called as people call them."""
    out = base / "w" / "out"
    for name in ("Report [final].txt", "[a].txt", "what?.txt", "a*.txt"):
        (out / name).write_text("x")
        assert paths(base, f"out/{name}") == [f"out/{name}"]
    (out / "a*.txt").unlink()
    assert paths(base, "out/a*.txt") == ["out/a.txt"]


def test_a_workspace_whose_name_looks_like_a_glob(base: Path) -> None:
    place = base / "w" / "out" / "data [2024]"
    (place / "build").mkdir(parents=True)
    (place / "build" / "a.csv").write_text("x")
    inside = Declared(("build/*.csv", "build/**/a.*"), str(place), (str(place),))
    assert [item.path for item in find(inside)] == ["build/a.csv"]


FIND = """
import sys
from agentctl.store.errors import TaskFault
from agentctl.worker.effects import Declared
from agentctl.worker.effects.artifacts import find
workspace, pattern = sys.argv[1:]
try:
    print(*(item.path for item in find(Declared((pattern,), workspace, (workspace + "/out",)))))
except TaskFault as fault:
    print(fault.code, fault.details["path"])
"""


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may look everywhere")
@pytest.mark.parametrize(
    ("closed", "mode", "pattern", "said"),
    [
        ("out/deep", 0o000, "out/**/*.txt", "io_error out/deep"),
        ("out/deep", 0o000, "out/**", "io_error out/deep"),
        ("out/deep", 0o000, "out/*/c.txt", "io_error out/deep/c.txt"),
        ("out/deep", 0o000, "out/*/*", "io_error out/deep"),
        ("out/deep", 0o000, "out/deep/c*", "io_error out/deep"),
        ("out/deep", 0o000, "out/deep/**/er/*", "io_error out/deep"),
        ("out/deep", 0o300, "out/d*/*.txt", "io_error out/deep"),
        ("out/deep", 0o400, "out/*/er/d.*", "io_error out/deep/er"),
        ("out/deep/er", 0o000, "out/*/*", "out/deep/c.txt"),
        ("out", 0o000, "out/*.txt", "io_error out"),
        ("out/deep", 0o000, "out/*.txt", "out/a.txt out/b.txt"),
        ("out/deep", 0o000, "out/*", "out/a.txt out/b.txt"),
        ("in", 0o000, "**/a.txt", "out/a.txt"),
        ("in", 0o000, "*/a.txt", "out/a.txt"),
    ],
)
def test_a_folder_that_cannot_be_looked_into_is_not_left_out_in_silence(
    base: Path, closed: str, mode: int, pattern: str, said: str
) -> None:
    """What a container or another user has left there would be missing, and the task would have succeeded. Where
    nothing could be kept anyway, closed folders matter to nobody."""
    (base / "w" / "in").mkdir()
    prefix = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    (base / "w" / closed).chmod(mode)
    try:
        command = [*prefix, sys.executable, "-c", FIND, os.path.realpath(base / "w"), pattern]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    finally:
        (base / "w" / closed).chmod(0o700)
    assert ran.stdout.strip() == said


def test_too_many(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_ARTIFACTS", 2)
    assert len(paths(base, "out/*.txt")) == 2
    assert refused(base, "out/**").code == "artifact_limit"


def test_what_is_opened_is_what_was_found(base: Path) -> None:
    here = declared(base, "out/a.txt", "out/b.txt", "out/deep/c.txt")
    a, b, c = find(here)
    descriptor = open_found(a, here)
    assert os.read(descriptor, 100) == b"w/out/a.txt"
    os.close(descriptor)
    Path(b.place).unlink()
    Path(b.place).symlink_to(base / "outside" / "o.txt")
    (base / "w" / "out" / "deep").rename(base / "outside" / "deep")
    (base / "w" / "out" / "deep").symlink_to(base / "outside" / "deep")
    Path(a.place).unlink()
    for item, code in ((a, "artifact_changed"), (b, "artifact_refused"), (c, "policy_denied")):
        with pytest.raises(TaskFault) as caught:
            open_found(item, here)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("pattern", "reachable"),
    [
        ("out/a.txt", True),
        ("out/not/yet", True),
        ("out/**/x", True),
        ("**/*.txt", True),
        ("*/a.txt", True),
        ("{base}/root/r.txt", True),
        ("{base}/*/r.txt", True),
        ("in.txt", False),
        ("build/x", False),
        ("build/*", False),
        ("outside.txt", False),
        ("out/away/o.txt", False),
        ("out/away/*", False),
        ("{base}/outside/o.txt", False),
        ("{base}/outside/*", False),
    ],
)
def test_what_can_never_be_kept_is_refused_before_its_command_runs(base: Path, pattern: str, reachable: bool) -> None:
    (base / "w" / "out" / "away").symlink_to(base / "outside")
    given = declared(base, pattern.format(base=base))
    if reachable:
        refuse_out_of_reach(given)
        return
    with pytest.raises(TaskFault) as caught:
        refuse_out_of_reach(given)
    assert (caught.value.code, caught.value.details) == ("policy_denied", {"path": pattern.format(base=base)})
