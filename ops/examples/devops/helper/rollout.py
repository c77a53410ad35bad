"""What changes something: an installation, the steps of a rollout, a build with its tests, and small repairs.

Everything happens below the folder that is given. What an operation has done is in the file `ledger` there, a line for
each time, so that everybody can see how often it has happened.
"""

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from protocol import FLAG, OBJECT, TEXT, TEXTS, Json, fields, operation, read_json

Server = dict[str, Any]


def _told(folder: Path, line: str) -> None:
    """A line at the end of the ledger, in one write."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "ledger", "a", encoding="utf-8") as stream:
        stream.write(f"{line}\n")


def _digest(folder: Path) -> str:
    """One digest for names and contents of all files below a folder."""
    summed = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(folder)).encode(), path.read_bytes()
        summed.update(b"%d %b %d " % (len(name), name, len(content)) + content)
    return summed.hexdigest()


@operation(
    "install",
    fields(source=TEXT, root=TEXT, release=TEXT),
    fields(release=TEXT, previous=TEXT, digest=TEXT, report=TEXT),
)
def install(given: Json) -> Json:
    """Copy a release beside the others and turn the link `current` to it in one step. Twice is like once."""
    root, source = Path(given["root"]), Path(given["source"])
    target, link = root / given["release"], root / "current"
    previous = os.readlink(link) if link.is_symlink() else ""
    if not target.exists():
        part = root / f".{given['release']}.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source, part)
        part.rename(target)
    if _digest(target) != _digest(source):
        raise ValueError(f"{target} is there, with another content")
    fresh = root / ".current.part"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(given["release"])
    fresh.replace(link)
    _told(root, f"install {given['release']}")
    digest = _digest(target)
    report = f"# {given['release']}\n\nDigest {digest}, before it: {previous or 'nothing'}\n"
    return {"release": given["release"], "previous": previous, "digest": digest, "report": report}


@operation("step", fields(folder=TEXT, host=TEXT, release=TEXT, fault=TEXT), fields(host=TEXT, previous=TEXT))
def step(given: Json) -> Json:
    """Put a release on one host, which is a file here. With `fault` equal to the host the answer gets lost.

    What a host had before is kept beside it, so that a second time says the same of it as the first.
    """
    folder = Path(given["folder"])
    _told(folder, f"{given['host']} {given['release']}")
    state, before = folder / f"{given['host']}.release", folder / f"{given['host']}.before"
    current = state.read_text(encoding="utf-8") if state.exists() else "none"
    if current != given["release"]:
        before.write_text(current, encoding="utf-8")
        state.write_text(given["release"], encoding="utf-8")
    if given["fault"] == given["host"]:
        raise ValueError("the line is dead: it has happened, and nobody is told")
    return {"host": given["host"], "previous": before.read_text(encoding="utf-8")}


@operation("build", fields(source=TEXT, folder=TEXT), fields(archive=TEXT, digest=TEXT))
def build(given: Json) -> Json:
    """An archive that is the same byte for byte whenever the sources are."""
    folder, source = Path(given["folder"]), Path(given["source"])
    _told(folder, "build")
    archive = folder / "product.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            out.writestr(zipfile.ZipInfo(str(path.relative_to(source))), path.read_bytes())
    return {"archive": str(archive), "digest": hashlib.sha256(archive.read_bytes()).hexdigest()}


@operation("test", fields(archive=TEXT, folder=TEXT, wanted=TEXTS), fields(passed=FLAG, missing=TEXTS))
def test(given: Json) -> Json:
    """Whether an archive holds what it has to hold, and every JSON file in it can be read."""
    _told(Path(given["folder"]), "test")
    with zipfile.ZipFile(given["archive"]) as archive:
        names = archive.namelist()
        for name in names:
            if name.endswith(".json"):
                json.loads(archive.read(name))
    missing = [name for name in given["wanted"] if name not in names]
    return {"passed": not missing, "missing": missing}


def _problems(server: Server) -> list[tuple[str, str, Any]]:
    """What is wrong with the settings of a server, the worst first: problem, setting, value that puts it right."""
    found: list[tuple[str, str, Any]] = []
    if server.get("tls") != "1.3":
        found.append(("TLS is older than 1.3", "tls", "1.3"))
    if server.get("debug"):
        found.append(("debugging is on", "debug", False))
    if server.get("timeoutSeconds", 0) not in range(1, 61):
        found.append(("no sane time limit", "timeoutSeconds", 30))
    return found


@operation("remediate", fields(path=TEXT, before=OBJECT), fields(done=FLAG, settings=OBJECT, fixed=TEXTS, left=TEXTS))
def remediate(given: Json) -> Json:
    """Put right the worst problem that may be touched, and no other. `before` is what the round before has given.

    Settings that are named in `pinned` stay as they are, with their problems.
    """
    before = given["before"]
    settings = dict(before.get("settings") or read_json(given["path"]))
    fixed = list(before.get("fixed", []))
    pinned = settings.get("pinned", [])
    for problem, name, value in _problems(settings):
        if name not in pinned:
            settings[name] = value
            fixed.append(problem)
            break
    left = [problem for problem, _, _ in _problems(settings)]
    return {"done": not left, "settings": settings, "fixed": fixed, "left": left}
