"""What a process does once, when it has begun and will go on for long."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Let the collector of cycles pass over what is loaded by now, since it stays: a process that rests would fetch all
    of its memory for it."""
    gc.collect()
    gc.freeze()


def rarely_collect() -> None:
    """The same, and let it look seldom: an attempt makes hardly any cycles, and looking for them after every few
    allocations cost a twentieth of a worker's time. Not for a coordinator: a run that has ended is a large cycle."""
    keep_what_is_loaded()
    gc.set_threshold(20_000, 20, 50)
