"""The texts that `instructionsFile` of agents names, read once when a document is captured (contract 1.4 and 11.3).

Like variables they travel with the document, are compiled from and stored with the run: a file that changes later
changes neither a run nor what its tasks are proven to be.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath

from .definition import LoadedDocument
from .diagnostics import Diagnostic, DocumentError, Path
from .named_files import locate
from .yaml_document import read_bytes


def read_instructions(
    document: LoadedDocument, found: list[Diagnostic], workspace: FilePath | None = None
) -> dict[str, str]:
    """The text of each agent that names a file. What is wrong goes to `found`.

    A file lies in the workspace or beside the document, has at most 1 MiB, and is UTF-8.
    """
    texts: dict[str, str] = {}
    home = os.path.realpath(document.base_dir)
    base = document.base_dir if workspace is None else workspace
    root = os.path.realpath(os.path.join(base, document.model.spec.policy.workspace_root))
    for agent, declared in document.model.spec.agents.items():
        name = declared.instructions_file
        if name is None:
            continue
        place: Path = ("spec", "agents", agent, "instructionsFile")

        def report(code: str, message: str, help: str | None = None, place: Path = place) -> None:
            found.append(document.source.diagnostic(code, message, place, help=help))

        path = locate(name, "instructions", home, root, "copy the file", report)
        if path is None:
            continue
        try:
            text = read_bytes(FilePath(path), name).decode("utf-8")
        except DocumentError as error:
            for item in error.diagnostics:
                report(item.code, f"{name!r}: {item.message}", item.help)
            continue
        except UnicodeDecodeError as error:
            report("schema_violation", f"{name!r} is not UTF-8 (byte {error.start})")
            continue
        if not text:
            report("schema_violation", f"{name!r} is empty: an agent needs instructions")
            continue
        texts[agent] = text
    return texts
