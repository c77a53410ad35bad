"""Small verbs that need neither a document nor a database."""

from __future__ import annotations

import click

from .main import COMPLETE_VARIABLE, PROGRAM, Settings, Verb, pass_settings, program
from .render import Printer


@click.command(cls=Verb)
@pass_settings
def version(settings: Settings) -> None:
    """Show the versions of agentctl, of its database and of what it stands on."""
    import platform

    import apsw
    from agentctl.store.migrate import LATEST
    from agentctl.store.version import VERSION

    data = {
        "version": VERSION,
        "databaseSchema": LATEST,
        "python": platform.python_version(),
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
    }

    def human(out: Printer) -> None:
        out.line(f"{PROGRAM} {data['version']}")
        if settings.verbose:
            return
        out.line(f"schema {LATEST}, Python {data['python']}, SQLite {data['sqlite']}")

    Printer(settings).result("Version", data, human)


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    For example: `agentctl completion bash > ~/.local/share/bash-completion/completions/agentctl`
    """
    from click.shell_completion import ShellComplete, get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click knows the three that the argument allows
    # The base class's method: that of bash starts a shell only to ask for its version.
    click.echo(ShellComplete.source(found(program, {}, PROGRAM, COMPLETE_VARIABLE)))
