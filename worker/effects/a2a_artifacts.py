"""The artifacts that the answer of an A2A agent brings, as files that a run keeps (contract 8).

Logical path: `a2a/<artifactId>/<filename>`. They come from the recorded result alone, so that every delivery, and a
result that was observed afterwards (`effects continue-remote`), leaves the same. Choices that the contract leaves open:

- **Bytes**: a text in UTF-8, `raw` decoded, `data` as canonical JSON. A part by `url` is named in the result and stays
  where it is.
- **Names** are the agent's, so they are no paths: only what follows the last slash counts, and what no record can carry
  becomes `_`. A part without a name is `<artifactId>-<number>.<extension>`, counted from 0. Of two parts with one path
  the later gets a number before its name: nothing is lost.
- A result that a person has supplied may have any form: what is no artifact in it is passed over.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Final
from unicodedata import category

from agentctl.store.canonical import canonical
from agentctl.store.errors import TaskFault

from . import Written
from .artifacts import CONTROLS, MAX_ARTIFACTS

MAX_NAME: Final = 200
"""Most characters of a name that an agent gives; the end stays, for the sake of its extension."""

_EXTENSIONS: Final = {
    "application/json": "json",
    "application/pdf": "pdf",
    "application/yaml": "yaml",
    "image/jpeg": "jpg",
    "image/png": "png",
    "image/svg+xml": "svg",
    "text/csv": "csv",
    "text/html": "html",
    "text/markdown": "md",
}
"""Our own, since `mimetypes` answers by the tables of the machine and the version of Python: a later delivery has to
give the same names."""
_FORMS: Final = {"text": "txt", "data": "json", "raw": "bin"}
"""Form of a part to: the extension of one whose media type tells none."""


def artifacts_of(result: Any, taken: Iterable[str] = ()) -> tuple[Written, ...]:
    """The artifacts of a completed task by its recorded result; `taken` are paths that are not free.

    Raises `TaskFault`: `artifact_limit` for too many.
    """
    used = set(taken)
    found: list[Written] = []
    for folder, name, data in _parts(result):
        path = next(path for path in _candidates(folder, name) if path not in used)
        used.add(path)
        found.append(Written(path, data))
        if len(found) > MAX_ARTIFACTS:
            raise TaskFault(
                "artifact_limit",
                f"the answer brings more than {MAX_ARTIFACTS} artifacts",
                details={"limit": MAX_ARTIFACTS},
            )
    return tuple(found)


def _candidates(folder: str, name: str) -> Iterator[str]:
    yield f"a2a/{folder}/{name}"
    yield from (f"a2a/{folder}/{number}-{name}" for number in count(2))


def _parts(result: Any) -> Iterator[tuple[str, str, bytes]]:
    """(name of the artifact, name of the part, its bytes), in the order of the answer."""
    for artifact in _list(result, "artifacts"):
        folder = _name(artifact.get("artifactId")) or "artifact"
        for number, part in enumerate(_list(artifact, "parts")):
            form = next((form for form in _FORMS if form in part), None)
            data = None if form is None else _bytes(form, part[form])
            if form is not None and data is not None:
                extension = _extension(part.get("mediaType"), form)
                yield folder, _name(part.get("filename")) or f"{folder}-{number}.{extension}", data


def _list(value: Any, name: str) -> list[dict[str, Any]]:
    """The objects of a list, as far as there are any."""
    items = value.get(name) if isinstance(value, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _bytes(form: str, value: Any) -> bytes | None:
    if form == "data":
        return canonical(value).encode("utf-8")
    if not isinstance(value, str):
        return None
    return value.encode("utf-8") if form == "text" else decoded(value)


def decoded(text: str) -> bytes | None:
    """The bytes of a `raw` part, None when that is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def _extension(media_type: Any, form: str) -> str:
    if not isinstance(media_type, str):
        return _FORMS[form]
    kind = media_type.partition(";")[0].strip().lower()
    return _EXTENSIONS.get(kind) or ("txt" if kind.startswith("text/") else _FORMS[form])


def _name(value: Any) -> str:
    """A name of the agent as one component of a path; empty when it says nothing."""
    if not isinstance(value, str):
        return ""
    name = value.replace("\\", "/").rpartition("/")[2].strip()
    name = "".join("_" if category(letter) in CONTROLS else letter for letter in name)[-MAX_NAME:]
    return "" if name in (".", "..") else name
