"""The command line. Nothing is imported here: spawned processes import this package again."""


def main() -> None:
    """Entry point of the `agentctl` program; ends the process with the documented exit code (contract 4.10)."""
    try:
        import os
        import signal

        # Not an exception until a verb asks for one: imports and compilers swallow interrupts or turn them into others.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        from .main import run

        run()
    except KeyboardInterrupt:
        # Before or after the part that reports for itself: nothing was begun, or all has been said.
        raise SystemExit(130) from None
