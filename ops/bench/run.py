"""The benchmark: agentctl and its peers, one after the other on this machine, as a Markdown table.

    python ops/bench/run.py [--quick] [--repeat 5] [--only a,b,...] [--no-peers] [--output FILE.md]

agentctl is measured through its command line only. A figure that fails says why and the next one is measured.
"""
# ruff: noqa: T201  (a benchmark talks to the person who started it)

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

import machine
from figures import FIGURES, QUICK, Bench, Row, Scale
from peer_runs import PeerRow, peers_of

NOT_MEASURED = "–"  # noqa: RUF001


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(figure: str, bench: Bench) -> list[Row]:
    try:
        return FIGURES[figure](bench)
    except Exception as error:
        say(traceback.format_exc(limit=-3))
        reason = " ".join(str(error).split())[:300]
        return [Row(figure, "not measured", "", error=f"{type(error).__name__}: {reason}")]


def measure_peers(figure: str, scale: Scale, repeat: int) -> list[PeerRow]:
    rows = peers_of(figure, scale)
    for _ in range(repeat):
        for row in rows:
            row.measure()
    for row in rows:
        say(f"  {row.peer}: {row.reason or number(row.median)}")
    return rows


def number(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    return f"{number(min(values))} to {number(max(values))}"


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in [head, rule, *lines]]


def our_lines(rows: list[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        if row.error:
            lines.append([row.figure, row.error.replace("|", "/"), *[NOT_MEASURED] * 5, "error"])
            continue
        lines.append(
            [
                row.figure,
                row.what,
                f"**{number(row.median)}** {row.unit}",
                spread(row.values),
                str(len(row.values)),
                number(row.must),
                number(row.aim),
                row.verdict,
            ]
        )
    return lines


def peer_lines(rows: list[PeerRow], ours: list[Row]) -> list[list[str]]:
    rates = {row.figure: row.median for row in reversed(ours) if row.values}
    lines = []
    for row in rows:
        if row.reason:
            reason = row.reason.replace("|", "/")
            lines.append([row.figure, row.peer, f"not available: {reason}", *[NOT_MEASURED] * 5])
            continue
        ratio = rates[row.figure] / row.median if row.figure in rates else None
        verdict = ""
        if ratio is not None and row.must is not None:
            reached = "aim" if row.aim is not None and ratio >= row.aim else "must"
            verdict = reached if ratio >= row.must else "missed"
        shown = NOT_MEASURED if ratio is None else f"**{number(ratio)}**"
        what = f"{row.peer} {row.version} ({row.note})"
        rate = f"{number(row.median)} tasks/s"
        lines.append([row.figure, what, rate, spread(row.values), shown, number(row.must), number(row.aim), verdict])
    return lines


def report(about: list[tuple[str, str]], ours: list[Row], peers: list[PeerRow], commands: list[str]) -> str:
    text = [f"- {name}: {value}" for name, value in about]
    text += ["", "Medians of the samples, spread from the smallest to the largest.", ""]
    head = ["figure", "what", "median", "spread", "samples", "must", "aim", "reached"]
    text += table(head, our_lines(ours))
    if peers:
        head = ["figure", "peer", "median", "spread", "agentctl / peer", "must", "aim", "reached"]
        text += ["", *table(head, peer_lines(peers, ours))]
    started = f"python ops/bench/run.py {' '.join(sys.argv[1:])}".rstrip()
    text += ["", "Commands (`$DIR` is a fresh folder):", "", "```", started]
    text += [*commands, *(row.command for row in peers), "```"]
    return "\n".join(text) + "\n"


def figure_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such figure: {', '.join(unknown)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure agentctl and its peers on this machine.")
    parser.add_argument("--quick", action="store_true", help="small counts: does it work at all?")
    parser.add_argument("--repeat", type=int, help="samples of each figure (5; 1 with --quick)")
    parser.add_argument("--only", type=figure_names, default=list(FIGURES), metavar="a,b,...")
    parser.add_argument("--no-peers", action="store_true", help="agentctl alone")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="write the table there, too")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    scale = QUICK if options.quick else Scale()
    bench = Bench(scale, options.repeat or (1 if options.quick else 5), [])
    about = machine.describe(Path(tempfile.gettempdir()))
    about.append(("date", time.strftime("%Y-%m-%d")))
    about.append(("scale", "quick: these numbers are no results" if options.quick else "full"))
    if machine.filesystem_of(Path(tempfile.gettempdir())) in ("tmpfs", "ramfs"):
        say("the temporary folder is memory, where syncs cost nothing: set TMPDIR to a folder on a disk")
    ours: list[Row] = []
    peers: list[PeerRow] = []
    for figure in options.only:
        say(f"figure {figure}")
        for row in measure(figure, bench):
            say(f"  agentctl: {row.error or f'{row.what}: {number(row.median)} {row.unit}'}")
            ours.append(row)
        if not options.no_peers:
            peers += measure_peers(figure, scale, bench.repeat)
    text = report(about, ours, peers, bench.commands)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
