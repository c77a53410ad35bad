"""Load tests of agentctl on this machine, one command each. Exit code: 0 passed, 1 failed, 2 not started.

    python ops/loadtest/run.py many-runs            100 runs of 100 tasks, all there before the pool starts
    python ops/loadtest/run.py large-run            one run of 100,000 tasks
    python ops/loadtest/run.py mixed                tasks of all lengths, and short runs in the middle of them
    python ops/loadtest/run.py steady               10 minutes of the same load, with watchers
    python ops/loadtest/run.py torture              kill -9, stopped processes, foreign locks; then the verdict
    python ops/loadtest/run.py verify FOLDER        judge the kept folder of a torture run again

`--keep` keeps the folder. A run that failed always keeps it and says where.
"""
# ruff: noqa: T201  (a load test talks to the person who started it)

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import loads
import torture
import verifier
from ground import ORDERS, CallFailed, Ground, describe, scratch


class BadFolder(Exception):
    """A folder in which nothing can be done; the message is for people."""


def at_least_one(word: str) -> int:
    """A count."""
    if not word.isascii() or not word.isdecimal() or not 1 <= int(word[:9]) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 to 1000000")
    return int(word)


def none_or_more(word: str) -> int:
    """A count that may be 0."""
    return 0 if word == "0" else at_least_one(word)


def positive(word: str) -> float:
    """A length of time."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return value


def say(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def shown(value: float) -> str:
    """A figure as people read it."""
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.3g}"


def report(title: str, folder: Path, lines: dict[str, str], problems: list[str]) -> int:
    """Print the report as Markdown; the exit code."""
    print(f"## {title}\n")
    print(f"    python ops/loadtest/run.py {' '.join(sys.argv[1:])}\n")
    for name, value in [*describe(folder), ("date", time.strftime("%Y-%m-%d %H:%M"))]:
        print(f"- {name}: {value}")
    print("\n| what | figure |\n|---|---|")
    for name, value in lines.items():
        print(f"| {name} | {value} |")
    if not problems:
        print("\n**Passed.**")
        return 0
    print(f"\n**Failed**, {len(problems)} problems:\n")
    for problem in problems[: verifier.SHOWN]:
        print(f"- {problem}")
    if len(problems) > verifier.SHOWN:
        print(f"- and {len(problems) - verifier.SHOWN} more")
    return 1


def run_load(options: argparse.Namespace, title: str, load: Callable[[Ground], loads.Outcome]) -> int:
    """A load in a fresh folder."""
    with scratch(options.keep, options.folder) as folder:
        outcome = load(Ground(folder))
        lines = {name: shown(value) for name, value in outcome.figures.items()}
        code = report(title, folder, lines, outcome.problems)
        if code:
            raise SystemExit(code)
    return 0


def run_torture(options: argparse.Namespace) -> int:
    """The torture run and its verdict."""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**32)
    plan = torture.Torture(options.minutes, seed, options.workers, options.kill_every, options.lease)
    say(f"seed {seed}")
    with scratch(options.keep, options.folder) as folder:
        verdict, counts, figures = torture.run(Ground(folder), plan, say)
        lines = {"seed": str(seed), "minutes": f"{options.minutes:g}", "workers": str(options.workers)}
        lines |= {name: shown(value) for name, value in figures.items()}
        lines |= {name: shown(number) for name, number in sorted(counts.items())}
        lines |= {name: shown(number) for name, number in sorted(verdict.counts.items())}
        code = report(f"Torture, {options.minutes:g} minutes", folder, lines, verdict.problems)
        if code:
            raise SystemExit(code)
    return 0


def run_verify(options: argparse.Namespace) -> int:
    """Judge a folder that was kept."""
    for name in (ORDERS, "state/runtime.db"):
        if not (options.kept / name).is_file():
            raise BadFolder(f"{options.kept} is no folder that a torture run has kept: it has no {name}")
    verdict = verifier.judge(Ground(options.kept))
    lines = {name: shown(number) for name, number in sorted(verdict.counts.items())}
    return report(f"Verdict on {options.kept}", options.kept, lines, verdict.problems)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Load tests of agentctl.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, text: str, workers: int) -> argparse.ArgumentParser:
        found = verbs.add_parser(name, help=text)
        found.add_argument("--folder", type=Path, help="where the scratch folder is made (the temporary folder)")
        found.add_argument("--keep", action="store_true", help="keep it")
        found.add_argument("--workers", type=at_least_one, default=workers)
        return found

    many = verb("many-runs", "100 runs of 100 tasks at once", 8)
    many.add_argument("--runs", type=at_least_one, default=100)
    many.add_argument("--tasks", type=at_least_one, default=100)
    large = verb("large-run", "one run of 100,000 tasks", 8)
    large.add_argument("--tasks", type=at_least_one, default=100_000)
    mixed = verb("mixed", "tasks of all lengths", 8)
    mixed.add_argument("--tasks", type=at_least_one, default=2_000)
    mixed.add_argument("--seed", type=int, default=1)
    steady = verb("steady", "the same load for minutes, with watchers", 8)
    steady.add_argument("--minutes", type=at_least_one, default=10)
    steady.add_argument("--watchers", type=none_or_more, default=4)
    torment = verb("torture", "everything that can go wrong with processes", 16)
    torment.add_argument("--minutes", type=positive, default=30.0)
    torment.add_argument("--seed", type=int, help="else one is drawn, and told")
    torment.add_argument("--kill-every", type=positive, default=1.0, metavar="SECONDS")
    torment.add_argument(
        "--lease", type=positive, default=3.0, metavar="SECONDS", help="short, so that leases run out often"
    )
    verify = verbs.add_parser("verify", help="judge the kept folder of a torture run again")
    verify.add_argument("kept", type=Path, metavar="FOLDER")
    return parser.parse_args()


def main() -> int:
    """Dispatch."""
    given = arguments()
    workers = getattr(given, "workers", 0)
    if given.verb == "verify":
        return run_verify(given)
    if given.verb == "torture":
        return run_torture(given)
    if given.verb == "many-runs":
        return run_load(
            given,
            f"{given.runs} runs of {given.tasks} tasks at once",
            lambda ground: loads.many_runs(ground, say, runs=given.runs, tasks=given.tasks, workers=workers),
        )
    if given.verb == "large-run":
        return run_load(
            given,
            f"One run of {given.tasks:,} tasks",
            lambda ground: loads.large_run(ground, say, tasks=given.tasks, workers=workers),
        )
    if given.verb == "mixed":
        return run_load(
            given,
            f"{given.tasks:,} tasks of all lengths",
            lambda ground: loads.mixed(ground, say, tasks=given.tasks, workers=workers, seed=given.seed),
        )
    return run_load(
        given,
        f"A steady load for {given.minutes} minutes",
        lambda ground: loads.steady(ground, say, minutes=given.minutes, workers=workers, watchers=given.watchers),
    )


def told() -> int:
    """`main`, with an error told in a line: 2 for a place where nothing can be done."""
    try:
        return main()
    except CallFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BadFolder as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(told())
