"""What a verb does when it is told to stop while it has something half-written, and how no such word is lost."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .main import EXIT_INTERRUPTED

AGAIN_SECONDS = 0.01
"""How long after an interrupt was lost it is raised again: not within the callback that has lost it."""

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """Unwinds the block, so that everything in it that cleans up does so."""


@contextmanager
def tidy() -> Iterator[None]:
    """Let signals end the block by an exception instead of ending the process, and end the process after it.

    Only the first signal counts: a second one would hit the cleaning up. The process ends as without this: 130 after
    SIGINT and SIGTERM, by the signal itself after a hang-up. What is ignored (nohup) stays ignored.
    """
    heed_lost_interrupts()
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


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """For a block of many steps of which each stands for itself: SIGINT or SIGTERM is noted, so that it ends after the
    step in hand and tells what it has done. The yielded function says whether one has come; a second one ends at once.
    """
    heed_lost_interrupts()
    asked: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: object) -> None:
        asked.append(number)
        back()

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield lambda: bool(asked)
    finally:
        back()


def _end(number: int) -> None:
    if number != signal.SIGHUP:
        os._exit(EXIT_INTERRUPTED)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def heed_lost_interrupts() -> None:
    """Raise again what a signal handler has raised to nobody.

    A handler runs wherever the interpreter is, and that may be a callback of which exceptions are only reported: of a
    weak reference, as every import has them, or a finalizer. The program would go on as if nobody had asked.
    """
    sys.unraisablehook = _raise_again


def _raise_again(lost: Any) -> None:
    if lost.exc_type is None or issubclass(lost.exc_type, (Exception, SystemExit, GeneratorExit)):
        sys.__unraisablehook__(lost)
        return
    kind: type[BaseException] = lost.exc_type

    def strike(number: int, frame: object) -> None:
        raise kind

    # Handlers run in the main thread only, and so does this.
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
