"""What people and programs get to see: envelopes, lines, tables, progress.

Programs get the envelope of contract 4.11, one a line, always UTF-8. People get plain lines; rich is imported only for
live progress on a terminal. Colours follow `--color`, and NO_COLOR in `auto`. Text that comes from documents and
commands is shown without control characters, so that it cannot steer a terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import click

from .main import Settings, abandon, why_lost

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

API_VERSION = "agentctl.dev/cli/v1"

SHOWN_ITEM = 60
"""Characters of a value by which an item of an expansion is told from the others."""

_NUMBERS = ("foreachIndex", "matrixIndex", "loopIndex", "loopPrevious")
"""Variables of an expansion that say no more than the id of the task does."""

_STATE_COLORS = {
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "skipped": "bright_black",
    "paused": "yellow",
    "running": "cyan",
    "uncertain": "magenta",
    "dead": "red",
    "busy": "cyan",
    "idle": "green",
}

_ORDER = (
    "succeeded",
    "failed",
    "skipped",
    "cancelled",
    "running",
    "ready",
    "retry_scheduled",
    "waiting_for_approval",
    "waiting_for_effect",
    "pending",
)


def wants_color(settings: Settings, stream: TextIO | None) -> bool:
    """Whether colours belong on this stream."""
    if settings.color != "auto":
        return settings.color == "always"
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether something can be redrawn there."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def clean(text: object) -> str:
    """Text from elsewhere on one line, with control characters shown as escapes."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def clean_lines(text: object) -> str:
    """Like `clean`, with its line breaks kept."""
    return "\n".join(clean(line) for line in str(text).splitlines())


_STEERING = re.compile("(\x1b\\[[0-9;:]*m)|[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""A change of colour, or any other character that a terminal or a reader's eye would obey. Not line breaks and tabs."""


def clean_output(text: str, *, color: bool) -> str:
    """What a command has printed, with its lines and tabs, and its colours where they are wanted."""
    if _STEERING.search(text) is None:
        return text
    lines = text.replace("\r\n", "\n").replace("\r", "\n")  # a line that was written over is a line of its own
    shown = _STEERING.sub(lambda found: (found[1] if color else "") if found[1] else clean(found[0]), lines)
    return shown + click.style("", reset=True) if color and "\x1b" in shown else shown


def beginning(text: str, limit: int) -> str:
    """Text that has room, or its beginning with a sign that there is more."""
    return text if len(text) <= limit else text[:limit] + "…"


def item_text(bindings: dict[str, Any]) -> str:
    """Which item of its expansion a task is for, such as `file=a.wav`.

    Empty for an iteration of a loop, since its number is in its id.
    """
    chosen = bindings["matrix"] if "matrixIndex" in bindings else bindings
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in chosen.items()
        if name not in _NUMBERS
    }
    return clean(", ".join(f"{name}={_ends(text, SHOWN_ITEM)}" for name, text in texts.items()))


def _ends(text: str, limit: int) -> str:
    """Text that has room, or its two ends: long names that belong together differ at either of them."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


def of_item(task_id: str, bound: dict[str, dict[str, Any]]) -> str:
    """The id of a task, and the item that it is for."""
    item = item_text(bound[task_id]) if task_id in bound else ""
    return f"{clean(task_id)} ({item})" if item else clean(task_id)


def shortened(text: str, limit: int) -> str:
    """Text from elsewhere on one line; of one that is too long the beginning, and where all of it is."""
    rest = counted(len(text) - limit, "more character")
    return clean(beginning(text, limit)) + (f" ({rest}; --output json has all)" if len(text) > limit else "")


_NAMED = re.compile("`agentctl (?![^`]*--db )")


def program(settings: Settings) -> str:
    """How a command begins that looks into the same database as this one."""
    from shlex import quote

    return f"agentctl --db {clean(quote(str(settings.database)))}" if settings.said_database else "agentctl"


def runnable(settings: Settings, text: str) -> str:
    """A text in which the commands that it names work as they stand."""
    if not settings.said_database:
        return text
    return _NAMED.sub(lambda found: f"`{program(settings)} ", text)


# -- programs ----------------------------------------------------------------------------------------------------


def envelope(kind: str, data: Any, diagnostics: Iterable[Any] = ()) -> str:
    """The success envelope as one line."""
    body = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "ok": True,
        "data": data,
        "diagnostics": [item if isinstance(item, dict) else item.as_json() for item in diagnostics],
    }
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def print_error(
    settings: Settings,
    message: str,
    *,
    exit_code: int,
    code: str,
    remedy: str | None = None,
    run_id: str | None = None,
    diagnostics: Sequence[Any] = (),
    bare: bool = False,
) -> None:
    """An error on stderr: the Error envelope for programs, message and remedy for people. Never raises."""
    message = runnable(settings, message)
    remedy = remedy and runnable(settings, remedy)
    with suppress(OSError):
        if settings.json:
            body = {
                "apiVersion": API_VERSION,
                "kind": "Error",
                "ok": False,
                "error": {
                    "message": message,
                    "exitCode": exit_code,
                    "code": code,
                    "runId": run_id,
                    "traceId": None,
                    "remedy": remedy,
                },
                "diagnostics": [item.as_json() for item in diagnostics],
            }
            click.echo(json.dumps(body, ensure_ascii=False, separators=(",", ":")), err=True)
            return
        color = wants_color(settings, sys.stderr)
        if diagnostics:
            for item in diagnostics:
                _finding(settings, item, color=color)
            return
        lead = "" if bare else _paint("error: ", "red", color)
        click.echo(lead + clean_lines(message), err=True, color=color)
        if remedy:
            click.echo("  " + clean_lines(remedy), err=True, color=color)


def _finding(settings: Settings, item: Any, *, color: bool) -> None:
    place = ":".join(clean(part) for part in (item.file, item.line, item.column) if part is not None)
    lead = _paint(f"{item.severity}: ", "red" if item.severity == "error" else "yellow", color)
    path = f" ({clean(item.path)})" if item.path else ""
    text = f"{place}: " if place else ""
    click.echo(f"{text}{lead}{item.code}: {clean(item.message)}{path}", err=True, color=color)
    if item.help:
        click.echo(f"  {runnable(settings, clean(item.help))}", err=True, color=color)


def warn(settings: Settings, message: str) -> None:
    """A warning on stderr. Never raises."""
    with suppress(OSError):
        color = wants_color(settings, sys.stderr)
        text = clean_lines(runnable(settings, message))
        click.echo(_paint("warning: ", "yellow", color) + text, err=True, color=color)


def warn_findings(settings: Settings, diagnostics: Sequence[Any]) -> None:
    """Warnings about a document on stderr, for people; programs find them in their envelope. Never raises."""
    if not settings.json:
        with suppress(OSError):
            for item in diagnostics:
                _finding(settings, item, color=wants_color(settings, sys.stderr))


# -- people ------------------------------------------------------------------------------------------------------


def _paint(text: str, color: str, wanted: bool) -> str:
    return click.style(text, fg=color) if wanted else text


class Printer:
    """Stdout of one command."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.color = wants_color(settings, sys.stdout)

    def result(self, kind: str, data: Any, human: Callable[[Printer], None], diagnostics: Iterable[Any] = ()) -> None:
        """The envelope for programs; for people what `human` prints, and with --verbose the data as well."""
        if self.settings.json:
            click.echo(envelope(kind, data, diagnostics))
            return
        human(self)
        if self.settings.verbose:
            self.line(json.dumps(data, ensure_ascii=False, indent=2))

    def line(self, text: str = "") -> None:
        """One line, already clean."""
        click.echo(text, color=self.color)

    def advise(self, text: str) -> None:
        """The same for our own words that name commands."""
        self.line(runnable(self.settings, text))

    def state(self, word: str) -> str:
        """A state in its colour."""
        return self.paint(word, _STATE_COLORS.get(word))

    def paint(self, text: str, color: str | None) -> str:
        """Text in a colour, where colours are wanted."""
        return click.style(text, fg=color) if self.color and color is not None else text

    def bold(self, text: str) -> str:
        """Text that stands out."""
        return click.style(text, bold=True) if self.color else text

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[object]], *, states: int | None = None) -> None:
        """Columns with two blanks between them; `states` is the column that is painted by its state."""
        shown = [[clean("-" if cell is None else cell) for cell in row] for row in rows]
        widths = [max([len(head), *(len(row[i]) for row in shown)]) for i, head in enumerate(heads)]
        lines = [self.bold(_pad(heads, widths))]
        for row in shown:
            cells = list(row)
            if states is not None:
                gap = " " * (widths[states] - len(cells[states]))
                cells[states] = self.state(cells[states]) + gap
            lines.append(_pad(cells, widths, ready=states))
        self.line("\n".join(lines))


def _pad(cells: Sequence[str], widths: Sequence[int], *, ready: int | None = None) -> str:
    parts = [
        cell if i == ready else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()


SHOWN_ENTRIES = 60
"""How many entries of each list of a plan people see; JSON has all."""


def show_list(out: Printer, title: str, entries: Sequence[str]) -> None:
    """A list for people under its title, if it has a title; nothing when it is empty."""
    if not entries:
        return
    if title:
        out.line(title)
    for entry in entries[:SHOWN_ENTRIES]:
        out.line(f"  {clean(entry)}")
    if len(entries) > SHOWN_ENTRIES:
        out.line(f"  and {len(entries) - SHOWN_ENTRIES} more; --output json has all")


def why_uncertain(effect: Mapping[str, Any]) -> str | None:
    """Why nobody knows what became of an effect, as its record tells it, in one line; None if it does not."""
    error = effect.get("error")
    if not isinstance(error, dict) or not error.get("message"):
        return None
    return f"{clean(error.get('code', 'uncertain'))}: {clean(error['message'])}"


def effect_status(effect: Mapping[str, Any]) -> str:
    """What became of an effect, and what a person has concluded about it since (`reconciliation`)."""
    said = effect.get("reconciliation")
    return str(effect["status"]) if said is None else f"{effect['status']}, reconciled as {said}"


def let_go_on(pid: int) -> str:
    """How a process goes on that was stopped."""
    return f"`fg` in its shell or `kill -CONT {pid}` lets it go on"


def settle_step(effect: Mapping[str, Any]) -> str:
    """The next step for an uncertain effect of a status."""
    short, remote = effect["effectId"][:12], effect.get("remoteTaskId")
    by_hand = f"find out what was done, then `agentctl effects reconcile {short} --status applied|not-applied …`"
    if remote is None:
        return by_hand
    asks = f"`agentctl effects continue-remote {short}` asks the remote agent how its task {clean(remote)} stands"
    return f"{asks}; or {by_hand}"


def when(milliseconds: int | None) -> str:
    """A stored time as local time."""
    if milliseconds is None:
        return "-"
    from datetime import datetime

    return datetime.fromtimestamp(milliseconds / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def duration(milliseconds: float) -> str:
    """A span of time for people."""
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 run`, `2 runs`."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def size(number: int) -> str:
    """A number of bytes for people."""
    amount = float(number)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def counts_text(counts: Mapping[str, int]) -> str:
    """`98 succeeded, 2 failed`, final states first."""
    known = [f"{counts[state]} {state}" for state in _ORDER if counts.get(state)]
    return ", ".join(known + [f"{number} {state}" for state, number in counts.items() if state not in _ORDER])


def ended(counts: Mapping[str, int]) -> int:
    """How many tasks have ended."""
    return sum(counts.get(state, 0) for state in _ORDER[:4])


# -- progress ----------------------------------------------------------------------------------------------------


class Progress(Protocol):
    """Shows how a run goes on. `interval` is the shortest time in seconds between two updates."""

    interval: float

    def update(self, progress: Mapping[str, Any]) -> None:
        """Show this state. May raise OSError when the reader is gone."""
        ...

    def close(self) -> None:
        """Leave the stream as it was found."""
        ...


class SilentProgress:
    """Shows nothing: programs read only the end."""

    interval = 3600.0

    def update(self, progress: Mapping[str, Any]) -> None:
        return

    def close(self) -> None:
        return


class PlainProgress:
    """At most one line a second, and only when something has changed."""

    interval = 1.0

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._last = ""

    def update(self, progress: Mapping[str, Any]) -> None:
        counts = progress["taskCounts"]
        text = f"{ended(counts)}/{progress['taskCount']} done, {counts.get('running', 0)} running"
        for state in ("failed", "retry_scheduled", "waiting_for_approval", "waiting_for_effect"):
            if counts.get(state):
                text += f", {counts[state]} {state.replace('_', ' ')}"
        if text != self._last:
            self._last = text
            self._printer.line(text)

    def close(self) -> None:
        return


class LiveProgress:
    """A bar with counts, and the running tasks, redrawn in place."""

    interval = 0.2

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._live: Live | None = None

    def update(self, progress: Mapping[str, Any]) -> None:
        if self._live is None:
            # Not before there is something to show: many runs end sooner than rich is imported.
            from rich.console import Console
            from rich.live import Live

            console = Console(no_color=not self._printer.color, highlight=False)
            self._live = Live(console=console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(_live_picture(progress), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _live_picture(progress: Mapping[str, Any]) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    counts, total = progress["taskCounts"], progress["taskCount"]
    head = Table.grid(padding=(0, 1))
    failed = bool(counts.get("failed"))
    style = "red" if failed else "green"
    head.add_row(
        Text(clean(progress["workflow"]), style="bold"),
        ProgressBar(total=total, completed=ended(counts), width=30, complete_style=style, finished_style=style),
        Text(f"{ended(counts)}/{total}"),
        Text(counts_text({s: n for s, n in counts.items() if s != "pending"})),
    )
    lines: list[Any] = [head]
    if progress["cancelRequested"]:
        lines.append(Text("  being cancelled", style="yellow"))
    for task in progress["running"]:
        again = f" (attempt {task['attempt']})" if task["attempt"] > 1 else ""
        lines.append(Text(f"  {clean(task['taskId'])}{again}", style="cyan"))
    more = counts.get("running", 0) - len(progress["running"])
    if more > 0:
        lines.append(Text(f"  and {more} more"))
    return Group(*lines)


def progress_for(printer: Printer) -> Progress:
    """What fits to stdout: nothing for programs, live on a terminal, plain lines elsewhere."""
    if printer.settings.json:
        return SilentProgress()
    if is_terminal(sys.stdout):
        return LiveProgress(printer)
    return PlainProgress(printer)


def give_up_stdout(settings: Settings, error: OSError) -> None:
    """Nobody takes what stdout is given and the work goes on: whatever is printed from here on is swallowed.

    A reader that is gone knows that it is; of a stream that takes nothing more the person is told.
    """
    abandon(1)
    if not isinstance(error, BrokenPipeError):
        warn(settings, f"the output cannot be written ({why_lost(error)}); the work goes on without it")


def reader_is_gone() -> bool:
    """Whether nobody can read stdout any more; found out without writing to it."""
    import select

    poll = select.poll()
    try:
        poll.register(1, 0)
        return any(found & select.POLLERR for _, found in poll.poll(0))
    except OSError:
        return False
