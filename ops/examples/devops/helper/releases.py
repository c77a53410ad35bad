"""Whether and how something is released: notes, readiness, and the verdict on a canary."""

import re
from collections import defaultdict
from datetime import datetime
from typing import Any

from protocol import FLAG, INTEGER, NUMBER, TEXT, TEXTS, Json, fields, operation, read_json, read_lines, table, version

_HEADINGS = {"feat": "New", "fix": "Fixed", "perf": "Faster", "docs": "Documentation"}


@operation(
    "changes",
    fields(path=TEXT, last=TEXT),
    fields(next=TEXT, breaking=TEXTS, counted=INTEGER, unreadable=TEXTS, report=TEXT),
)
def changes(given: Json) -> Json:
    """Conventional commits, one subject a line as of `git log --format='%h %s'`: the notes and the next version."""
    groups: dict[str, list[str]] = defaultdict(list)
    breaking, unreadable = [], []
    for line in read_lines(given["path"]):
        commit, _, subject = line.partition(" ")
        parts = re.fullmatch(r"(\w+)(?:\(([\w./-]+)\))?(!?): (.+)", subject)
        if parts is None:
            unreadable.append(line)
            continue
        entry = (f"{parts[2]}: " if parts[2] else "") + f"{parts[4]} ({commit})"
        groups[parts[1]].append(entry)
        if parts[3]:
            breaking.append(entry)
    major, minor, patch = version(given["last"])
    if breaking:
        chosen = (major + 1, 0, 0)
    elif groups["feat"]:
        chosen = (major, minor + 1, 0)
    else:
        chosen = (major, minor, patch + 1)
    following = ".".join(map(str, chosen))
    report = f"# {following}\n"
    for heading, entries in [("Changes that need your attention", breaking)] + [
        (heading, groups[kind]) for kind, heading in _HEADINGS.items()
    ]:
        if entries:
            report += f"\n## {heading}\n\n" + "".join(f"- {entry}\n" for entry in entries)
    counted = sum(map(len, groups.values()))
    return {
        "next": following, "breaking": breaking, "counted": counted, "unreadable": unreadable, "report": report,
    }  # fmt: skip


@operation(
    "readiness",
    fields(path=TEXT, now=TEXT, minCoverage=NUMBER),
    fields(go=FLAG, decision=TEXT, reasons=TEXTS, report=TEXT),
)
def readiness(given: Json) -> Json:
    """Go or no-go, with every reason against it; what is not known counts against it."""
    evidence, now = read_json(given["path"]), datetime.fromisoformat(given["now"])
    tests, coverage = evidence.get("tests", {}), evidence.get("coverage")
    reasons = []
    if not tests or tests.get("failed", 1):
        reasons.append(f"{tests.get('failed', 'no')} tests have failed" if tests else "no test results")
    if coverage is None or coverage < given["minCoverage"]:
        reasons.append(f"coverage is {coverage}, wanted are {given['minCoverage']}")
    reasons += [f"{issue['id']} blocks the release: {issue['title']}" for issue in evidence.get("blockers", [])]
    for freeze in evidence.get("freezes", []):
        if datetime.fromisoformat(freeze["from"]) <= now < datetime.fromisoformat(freeze["until"]):
            reasons.append(f"{freeze['name']}: nothing is released until {freeze['until']}")
    decision = "no-go" if reasons else "go"
    report = f"# {evidence['release']}: {decision}\n\n" + "".join(f"- {reason}\n" for reason in reasons)
    return {"go": not reasons, "decision": decision, "reasons": reasons, "report": report}


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _measured(side: Json) -> dict[str, Any]:
    return {
        "requests": side["requests"],
        "errors %": round(100 * side["errors"] / side["requests"], 3),
        "p95 ms": _percentile(side["latencies"], 0.95),
    }


@operation(
    "canary",
    fields(path=TEXT, minRequests=INTEGER, maxErrorIncrease=NUMBER, maxSlowdown=NUMBER),
    fields(verdict=TEXT, reason=TEXT, report=TEXT),
)
def canary(given: Json) -> Json:
    """Metrics of a canary beside those of the rest: `promote`, `hold` when they say too little, or `rollback`."""
    metrics = read_json(given["path"])
    canary, rest = _measured(metrics["canary"]), _measured(metrics["baseline"])
    verdict, reason = "promote", "no worse than the rest"
    if canary["requests"] < given["minRequests"]:
        verdict, reason = "hold", f"only {canary['requests']} requests"
    elif canary["errors %"] - rest["errors %"] > given["maxErrorIncrease"]:
        verdict, reason = "rollback", f"{canary['errors %']} % errors instead of {rest['errors %']} %"
    elif canary["p95 ms"] > rest["p95 ms"] * given["maxSlowdown"]:
        verdict, reason = "rollback", f"p95 is {canary['p95 ms']} ms instead of {rest['p95 ms']} ms"
    rows = [[name, canary[name], rest[name]] for name in canary]
    report = f"# {verdict}: {reason}\n\n" + table(["metric", "canary", "baseline"], rows)
    return {"verdict": verdict, "reason": reason, "report": report}
