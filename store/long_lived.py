"""What a process does once, when it has begun and will go on for long."""

from __future__ import annotations

import gc


def rarely_collect() -> None:
    """Let the collector of cycles forget what is loaded by now, and look seldom.

    What was loaded stays, and neither an attempt nor a look makes many cycles: looking for them after every few
    allocations cost a twentieth of a worker's time, and a process that rests would fetch all of its memory for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
