"""A signal that meets the interpreter in a callback whose exceptions go nowhere still ends the command."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROLOGUE = """
import os, signal, time, weakref

class Thing:
    def __del__(self):
        if finalizer:
            struck()

def struck():
    os.kill(os.getpid(), signal.{name})
    for _ in range(100):  # the handler runs in here, and what it raises is only reported
        pass

def lose():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: finalizer or struck())
    del thing
    return reference

finalizer = {finalizer}
"""
TIDY = """
from agentctl.cli.stopping import tidy
with tidy():
    try:
        lose()
        time.sleep(60)
        print("slept")
    finally:
        print("cleaned up", flush=True)
"""
FOREGROUND = """
from agentctl.cli.run import signals_held
try:
    with signals_held():
        pass
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    lose()
    time.sleep(60)
    print("slept")
except KeyboardInterrupt:
    print("cleaned up", flush=True)
    raise SystemExit(130)
"""


@pytest.mark.parametrize("finalizer", [False, True], ids=["weak reference", "finalizer"])
@pytest.mark.parametrize(
    ("name", "body", "code"),
    [("SIGTERM", TIDY, 130), ("SIGHUP", TIDY, -signal.SIGHUP), ("SIGTERM", FOREGROUND, 130)],
    ids=["tidy", "hang-up", "foreground"],
)
def test_an_interrupt_that_is_lost_is_raised_again(name: str, body: str, code: int, finalizer: bool) -> None:
    script = PROLOGUE.format(name=name, finalizer=finalizer) + body
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "cleaned up\n", "")


def test_what_is_no_interrupt_is_reported_as_ever() -> None:
    script = """
from agentctl.cli.stopping import heed_lost_interrupts
heed_lost_interrupts()
heed_lost_interrupts()
class Thing:
    def __del__(self):
        raise ValueError("of a finalizer")
Thing()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, encoding="utf-8", timeout=50, check=True)
    assert done.stderr.count("ValueError: of a finalizer") == 1
