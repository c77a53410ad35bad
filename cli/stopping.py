"""What a verb does when it is told to stop while it has something half-written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from .main import EXIT_INTERRUPTED

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """Unwinds the block, so that everything in it that cleans up does so."""


@contextmanager
def tidy() -> Iterator[None]:
    """Let signals end the block by an exception instead of ending the process, and end the process after it.

    Only the first signal counts: a second one would hit the cleaning up. The process ends as without this: 130 after
    SIGINT and SIGTERM, by the signal itself after a hang-up. What is ignored (nohup) stays ignored.
    """
    asked: list[int] = []

    def stop(number: int, frame: object) -> None:
        if not asked:
            asked.append(number)
            raise _Stopped

    obeyed = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in obeyed}
    try:
        yield
    except _Stopped:
        pass
    finally:
        if asked:
            _end(asked[0])
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int) -> None:
    if number != signal.SIGHUP:
        os._exit(EXIT_INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
