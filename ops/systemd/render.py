"""Write the units of this folder anew from `agentctl.cli.unit_files`; a test fails while they differ.

python ops/systemd/render.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentctl.cli.unit_files import Site, units

FOLDER = Path(__file__).parent
SITES = {
    "system": Site("/usr/bin/agentctl", "agentctl"),
    "user": Site("%h/.local/bin/agentctl", None),
}


def rendered() -> Iterator[tuple[Path, str]]:
    """Every file of this folder that is made, with its text."""
    for kind, site in SITES.items():
        for name, text in units(site).items():
            yield FOLDER / kind / name, text


if __name__ == "__main__":
    for path, text in rendered():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
