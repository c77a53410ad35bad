"""The program `agentctl`: global options, verbs that are loaded when they are used, and what becomes of errors.

Only click is imported here and `--help` imports nothing else. Global options may stand before or after the verb
(contract, new verbs): every command carries them, and the last one wins.

Exit codes (contract 4.10) are those of the error classes in `store.errors`. Besides them: 2 for usage errors found by
click, 70 for an internal error, 130 after an interrupt, 141 when the reader of stdout is gone.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from gettext import gettext
from importlib import import_module
from pathlib import Path
from typing import Any

import click

PROGRAM = "agentctl"
COMPLETE_VARIABLE = "_AGENTCTL_COMPLETE"
DEFAULT_DATABASE = ".agentctl/runtime.db"

OUTPUT_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What a stream answers that takes nothing more, though somebody reads it. Faults of files carry the file's name."""

EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141

OUTPUTS = ("human", "json", "jsonl")
COLORS = ("auto", "always", "never")


class Seconds(click.FloatRange):
    """A number of seconds: `nan` and `inf` are numbers to Python, but no time to wait."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class Text(click.types.StringParamType):
    """A word of the command line that is looked up or recorded: only UTF-8 can be. Names of files may be anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = super().convert(value, param, ctx)
        try:
            str(text).encode()
        except UnicodeEncodeError:
            self.fail("it is not UTF-8, and nothing else can be looked up or recorded.", param, ctx)
        return str(text)


TEXT = Text()

WHOLE = 500
"""More characters than the first sentence of a verb's help has."""


@dataclass(slots=True)
class Settings:
    """The global options."""

    database: Path
    output: str = "human"
    color: str = "auto"
    verbose: bool = False
    offline: bool = False
    said_database: bool = False
    """Whether --db was given: what a person is told to do next needs it, too."""

    @property
    def json(self) -> bool:
        """Whether programs read the output."""
        return self.output != "human"


def settings_of(context: click.Context) -> Settings:
    """The one settings object of this invocation."""
    root = context.find_root()
    if root.obj is None:
        root.obj = Settings(Path(os.environ.get("AGENTCTL_DB") or DEFAULT_DATABASE))
    settings: Settings = root.obj
    return settings


pass_settings = click.make_pass_decorator(Settings)


def _database(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    if value is not None and str(value) == ".":
        raise click.BadParameter("a database is a file; give its path.", context, parameter)
    _store("database")(context, parameter, value)
    if value is not None:
        settings_of(context).said_database = True


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        settings = settings_of(context)
        if value is not None:
            setattr(settings, name, value)

    return keep


def _refuse_locked(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Contract table, row 37: what it asks for cannot be given, and a run that silently lacks it would be worse."""
    if value and not context.resilient_parsing:
        from agentctl.coordinator.diagnostics import Diagnostic, DocumentError

        message = "--locked holds packs to their lock file, and this version has no packs"
        raise DocumentError([Diagnostic("unsupported_capability", message)])


def _global_options() -> list[click.Option]:
    return [
        click.Option(
            ["--db"],
            type=click.Path(path_type=Path),
            metavar="PATH",
            expose_value=False,
            callback=_database,
            help=f"The database; AGENTCTL_DB, else {DEFAULT_DATABASE}.",
        ),
        click.Option(
            ["--output"],
            type=click.Choice(OUTPUTS),
            expose_value=False,
            callback=_store("output"),
            help="For people, or one JSON envelope, or JSON lines while it goes on.",
        ),
        click.Option(
            ["--color"],
            type=click.Choice(COLORS),
            expose_value=False,
            callback=_store("color"),
            help="Colours; auto: on a terminal without NO_COLOR.",
        ),
        click.Option(
            ["--verbose"],
            is_flag=True,
            default=None,
            expose_value=False,
            callback=_store("verbose"),
            help="Say more: log lines, details, tracebacks of internal errors.",
        ),
        click.Option(
            ["--offline"],
            is_flag=True,
            default=None,
            expose_value=False,
            callback=_store("offline"),
            help="Connect to nobody: what needs a model service, MCP server or A2A agent is refused.",
        ),
        click.Option(
            ["--locked"],
            is_flag=True,
            default=False,
            expose_value=False,
            callback=_refuse_locked,
            help="Hold packs to their lock file; refused, since this version has no packs.",
        ),
    ]


class _WithGlobals(click.Command):
    """A command that takes the global options, too, and shows them last in its help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.globals = _global_options()
        for parameter in self.params:
            if parameter.type is click.STRING:
                parameter.type = TEXT
            elif isinstance(parameter.type, click.IntRange):
                parameter.type.name = "integer"  # click says "integer range"
            elif isinstance(parameter.type, click.FloatRange):
                parameter.type.name = "number"
        self.params = [*self.params, *self.globals]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The usage line shows the arguments, and the text above tells what they are.
        shown = (p for p in self.get_params(ctx) if p not in self.globals and isinstance(p, click.Option))
        own = [p.get_help_record(ctx) for p in shown]
        rows = [row for row in own if row is not None]
        if rows:
            with formatter.section(gettext("Options")):
                formatter.write_dl(rows)
        rows = [row for option in self.globals if (row := option.get_help_record(ctx)) is not None]
        with formatter.section(gettext("Global options, before or after the verb")):
            formatter.write_dl(rows)


class Verb(_WithGlobals):
    """A verb."""


class VerbGroup(_WithGlobals, click.Group):
    """A verb with verbs of its own: `runs list`, `workers start`."""

    command_class = Verb

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _WithGlobals.format_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Whole sentences: click would cut them where the line ends.
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section(gettext("Verbs")):
            formatter.write_dl([(name, verb.get_short_help_str(limit=WHOLE)) for name, verb in verbs if verb])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from difflib import get_close_matches

            close = get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


_VERBS: dict[str, tuple[str, str, str]] = {
    "init": ("authoring", "init", "Write a workflow file to start from."),
    "check": ("documents", "check", "Check workflow files; nothing is executed or written."),
    "plan": ("documents", "plan", "Show the compiled plan of a workflow file."),
    "explain": ("authoring", "explain", "Show where variables get their values."),
    "graph": ("authoring", "graph", "Draw a workflow file or a run."),
    "schema": ("documents", "schema", "Print the JSON Schema of workflow files, for editors."),
    "run": ("run", "run", "Run a workflow file here and wait for its end."),
    "submit": ("run", "submit", "Hand a workflow file to the pool and return."),
    "resume": ("run", "resume", "Go on with a run and wait for its end."),
    "retry": ("recovery", "retry", "Execute what failed again, in a new run with the rest reused."),
    "repair": ("recovery", "repair", "The same with a corrected file, from tasks that you name."),
    "fork": ("recovery", "fork", "Run the stored workflow of a run once more."),
    "replay": ("replay", "replay", "Make a run of what another has recorded; nothing is executed."),
    "compensate": ("compensate", "compensate", "Undo what a run has done, as its tasks declare."),
    "cancel": ("run", "cancel", "Cancel a run; its commands are ended."),
    "pause": ("run", "pause", "Pause a run; what runs finishes."),
    "wait": ("run", "wait", "Wait for the end of a run."),
    "watch": ("run", "watch", "Follow a run until its end."),
    "status": ("show", "status", "How a run stands, and why things wait."),
    "inspect": ("show", "inspect", "Everything that is recorded about a run."),
    "logs": ("show", "logs", "What the commands of a run have printed."),
    "events": ("events", "events", "The audit trail of a run or of all, once or followed."),
    "approvals": ("control", "approvals", "List and decide what waits for a person."),
    "effects": ("control", "effects", "Show effects; reconcile uncertain ones."),
    "artifacts": ("artifacts", "artifacts", "List, check, export and collect what runs keep."),
    "db": ("care", "db", "Look after the database: stats, verify, backup, restore, migrate."),
    "doctor": ("doctor", "doctor", "Look whether machine, database and processes are in order."),
    "metrics": ("metrics", "metrics", "Numbers for Prometheus: show, write, serve."),
    "gc": ("care", "gc", "Remove old runs, and give the space back."),
    "runs": ("show", "runs", "List runs."),
    "bench": ("bench", "bench", "Measure what this disk and this machine give."),
    "memory": ("memory", "memory", "Long-term memory: get, put, search, reindex."),
    "providers": ("providers", "providers", "What each kind of model provider can do."),
    "auth": ("providers", "auth", "Check the credentials of model providers."),
    "workers": ("workers", "workers", "Start, list, drain and stop workers."),
    "worker": ("workers", "worker", "Start one worker alone."),
    "coordinator": ("workers", "coordinator", "Start a coordinator alone."),
    "version": ("misc", "version", "Show the version."),
    "completion": ("misc", "completion", "Print a completion script for a shell."),
}


_SERVICES = ("workers", "worker", "coordinator", "metrics")
"""What runs until it is told to end: its manager takes death by SIGTERM for a clean end."""


class _Program(VerbGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _VERBS.get(cmd_name)
        if entry is None:
            return None
        if cmd_name not in _SERVICES and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # As an interrupt (seed), until the verb has its own way to end.
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(EXIT_INTERRUPTED))
        command: click.Command = getattr(import_module(f"{__package__}.{entry[0]}"), entry[1])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(gettext("Verbs")):
            formatter.write_dl([(name, entry[2]) for name, entry in _VERBS.items()])


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from agentctl.store.version import VERSION

        click.echo(f"{PROGRAM} {VERSION}")
        context.exit()


@click.command(cls=_Program, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version)
@click.pass_context
def program(context: click.Context) -> None:
    """Durable workflows of commands and files on one machine.

    `agentctl run FILE` executes a workflow. `agentctl workers start` keeps a pool for those of `agentctl submit`.
    """
    settings_of(context)


def run(arguments: Sequence[str] | None = None) -> None:
    """Execute one command line and end the process with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _hold_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # Backslashes for what UTF-8 cannot carry: the result is readable, and valid inside of JSON.
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    code = _execute(given)
    # All has been said; an interrupt while the interpreter ends would only make noise.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(_end_output(code, Settings(Path(), *_early(given))))


def _hold_closed_streams() -> None:
    """Put something in the place of standard streams that were closed by whoever started the program.

    Else the next file that is opened, the database even, gets their number and what is printed. Writing to the stdout
    that is made here fails, so that an answer which nobody can get is an error; what is said on stderr gets lost.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one. Processes that are started must find it taken, too.
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the rest of the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for the rest of the process


def _execute(given: list[str]) -> int:
    # What the line says of the output is asked for before it is understood: an error may be in any part of it.
    settings = early = Settings(Path(), *_early(given))
    try:
        instruction = os.environ.get(COMPLETE_VARIABLE)
        if instruction:
            from click.shell_completion import shell_complete

            return shell_complete(program, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
        context = program.make_context(PROGRAM, given)
        settings = settings_of(context)
        if settings.verbose:
            _log_to_stderr()
        with context:
            program.invoke(context)
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except click.ClickException as error:
        return _click_error(early, error)
    except MemoryError as error:
        # What was being made is freed with the frames that hold it: saying so needs memory as well.
        error.__traceback__ = None
        return _failure(settings, error)
    except Exception as error:
        return _failure(settings, error)


def _early(given: Sequence[str]) -> tuple[str, str, bool]:
    """Output, color and verbose as far as they can be seen before the line is understood; for usage errors."""
    words = {"--output": "human", "--color": "auto"}
    choices = {"--output": OUTPUTS, "--color": COLORS}
    for index, word in enumerate(given):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name in words:
            value = value if equals else (given[index + 1] if index + 1 < len(given) else "")
            if value in choices[name]:
                words[name] = value
    return words["--output"], words["--color"], "--verbose" in given


def _click_error(settings: Settings, error: click.ClickException) -> int:
    from .render import print_error

    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError) and not settings.json:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        message, help_of = "no verb was given", PROGRAM
    else:
        message, help_of = error.format_message(), PROGRAM if context is None else context.command_path
    remedy = f"`{help_of} --help` shows the usage"
    print_error(settings, message, exit_code=error.exit_code, code="usage", remedy=remedy)
    return error.exit_code


def _failure(settings: Settings, error: Exception) -> int:
    from agentctl.store.errors import AgentctlError

    from .render import print_error

    if isinstance(error, AgentctlError):
        # Findings of a document travel as data; reading them by name keeps the compiler out of every start.
        diagnostics = getattr(error, "diagnostics", ())
        print_error(
            settings,
            error.message,
            exit_code=error.exit_code,
            code=error.code,
            remedy=error.remedy,
            run_id=error.run_id,
            diagnostics=diagnostics,
        )
        return error.exit_code
    if isinstance(error, MemoryError):
        print_error(
            settings,
            "there is not enough memory for this",
            exit_code=5,
            code="environment",
            remedy="give it more memory (see `ulimit -v`), or work with less at once",
        )
        return 5
    if isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_LOST:
        _tell_output_lost(settings, error)
        return 5
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        print_error(settings, f"{place}{error.strerror}", exit_code=5, code="environment")
        _traceback(settings)
        return 5
    print_error(
        settings,
        f"internal error: {type(error).__name__}: {error}",
        exit_code=EXIT_INTERNAL,
        code="internal",
        remedy="please report it, with what --verbose shows",
        bare=True,
    )
    _traceback(settings)
    return EXIT_INTERNAL


def _tell_output_lost(settings: Settings, error: OSError) -> None:
    from .render import print_error

    remedy = "let it write elsewhere; what the command was asked for may have been done all the same"
    message = f"the output cannot be written: {why_lost(error)}"
    print_error(settings, message, exit_code=5, code="environment", remedy=remedy)


def why_lost(error: OSError) -> str:
    """Why a stream takes nothing more, for people."""
    return "stdout is closed" if error.errno == errno.EBADF else error.strerror or str(error)


def _traceback(settings: Settings) -> None:
    if settings.verbose:
        import traceback

        click.echo(traceback.format_exc().rstrip(), err=True)


def _log_to_stderr() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def _end_output(code: int, settings: Settings) -> int:
    """Write out what is buffered. A reader that is gone ends in silence: nothing is left for interpreter shutdown."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError as error:
            abandon(number)
            if number == 1 and not isinstance(error, BrokenPipeError) and code == 0:
                _tell_output_lost(settings, error)
            if number == 1:
                code = EXIT_PIPE if isinstance(error, BrokenPipeError) else code or 5
    if code == EXIT_PIPE:
        abandon(1)
    return code


def abandon(number: int) -> None:
    """Let a lost descriptor swallow what Python still holds for it, and all that follows."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, number)
        os.close(nothing)
    except OSError:
        return
