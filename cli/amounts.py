"""Amounts on the command line: durations and sizes with a unit."""

from __future__ import annotations

import re
from typing import Any

import click

_DURATIONS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Duration(click.types.FloatParamType):
    """Seconds, or a number with `s`, `m`, `h` or `d`: `90`, `90s`, `12h`. Above zero, at most ten years."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value).strip().lower(), re.ASCII)
        seconds = float(found[1]) * _DURATIONS[found[2]] if found else 0.0
        if not 0 < seconds <= 3650 * 86400:
            self.fail(f"{value!r} is no duration; give seconds, or a number with s, m, h or d: 90s, 12h", param, ctx)
        return seconds


class Size(click.types.IntParamType):
    """Bytes, or a number with `K`, `M` or `G`: `512M`. At least `smallest`."""

    name = "size"

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+)([kmg]?)(?:i?b)?", str(value).strip().lower(), re.ASCII)
        size = int(found[1]) * _SIZES[found[2]] if found and len(found[1]) < 16 else -1
        if size < 0:
            self.fail(f"{value!r} is no size; give bytes, or a number with K, M or G: 512M", param, ctx)
        if size < self._smallest:
            self.fail(f"{value!r} is too small; the least is {self._smallest >> 20}M", param, ctx)
        return size
