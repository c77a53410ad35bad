"""The command line. Nothing is imported here: spawned processes import this package again."""


def main() -> None:
    """Entry point of the `agentctl` program; ends the process with the documented exit code (contract 4.10)."""
    from .main import run

    run()
