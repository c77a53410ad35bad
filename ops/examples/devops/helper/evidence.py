"""What tests and logs tell: results in JUnit XML, logs of CI jobs, a timeline, and whether citations hold."""

import re
import xml.etree.ElementTree as xml
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from protocol import INTEGER, OBJECTS, TEXT, TEXTS, Json, fields, operation, read_json, read_lines, table


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or ["no message"])[0]


def _signature(message: str) -> str:
    """The message without what differs from run to run: addresses, numbers, quoted values."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "…", _first_line(message)))


def _cases(path: str) -> list[tuple[str, float, str | None]]:
    """Name, seconds and failure message of each test case of a file."""
    text = "\n".join(read_lines(path))
    if "<!DOCTYPE" in text:
        raise ValueError(f"{path}: a report has no document type")
    cases = []
    for case in xml.fromstring(text).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        bad = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        message = None if bad is None else bad.get("message") or bad.text or ""
        cases.append((name, float(case.get("time", 0)), message))
    return cases


@operation(
    "junit",
    fields(paths=TEXTS),
    fields(tests=INTEGER, failed=TEXTS, flaky=TEXTS, groups=OBJECTS, slowest=TEXTS, report=TEXT),
)
def junit(given: Json) -> Json:
    """Results of several attempts: what failed in all of them, what only sometimes, and for the same reason."""
    failures: dict[str, str] = {}
    passed: set[str] = set()
    seconds: dict[str, float] = {}
    for path in given["paths"]:
        for name, spent, message in _cases(path):
            seconds[name] = max(spent, seconds.get(name, 0.0))
            if message is None:
                passed.add(name)
            else:
                failures[name] = message
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(failures.keys() - passed):
        groups[_signature(failures[name])].append(name)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    failed = [name for _, names in ordered for name in names]
    flaky = sorted(failures.keys() & passed)
    slowest = sorted(seconds, key=lambda name: (-seconds[name], name))[:3]
    report = f"# {len(failed)} of {len(seconds)} tests fail, {len(flaky)} sometimes\n\n"
    report += table(["reason", "tests"], [[reason, ", ".join(names)] for reason, names in ordered])
    report += "".join(f"\nSometimes: {name}: {_first_line(failures[name])}\n" for name in flaky)
    return {
        "tests": len(seconds),
        "failed": failed,
        "flaky": flaky,
        "groups": [{"reason": reason, "tests": names} for reason, names in ordered],
        "slowest": slowest,
        "report": report,
    }


def _instant(text: str) -> datetime:
    """An ISO 8601 moment with its offset, in UTC."""
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} has no offset")
    return moment.astimezone(UTC)


_TROUBLE = re.compile(r"##\[error\]|\b(error|failed|fatal|exception|refused|timed out|no space)\b", re.I)


@operation("ci-log", fields(path=TEXT), fields(steps=OBJECTS, failedStep=TEXT, exitCode=INTEGER, evidence=OBJECTS))
def ci_log(given: Json) -> Json:
    """A log of a CI job: its steps with their durations, and the lines that speak of trouble, with their numbers."""
    steps: list[dict[str, Any]] = []
    evidence = []
    failed, code = "", 0
    for number, line in enumerate(read_lines(given["path"]), 1):
        if not line.strip():
            continue
        stamp, _, text = line.partition(" ")
        moment = _instant(stamp)
        if text.startswith("##[group]"):
            steps.append({"name": text.removeprefix("##[group]"), "line": number, "began": moment})
        if steps:
            steps[-1]["seconds"] = round((moment - steps[-1]["began"]).total_seconds(), 3)
        if _TROUBLE.search(text):
            evidence.append({"line": number, "text": text})
        ended = re.search(r"exit code (\d+)", text)
        if ended and int(ended[1]) and not failed:
            failed, code = (steps[-1]["name"] if steps else "?"), int(ended[1])
    plain = [{key: step[key] for key in ("name", "line", "seconds")} for step in steps]
    return {"steps": plain, "failedStep": failed, "exitCode": code, "evidence": evidence}


@operation("timeline", fields(logs=TEXTS, feeds=TEXTS), fields(evidence=OBJECTS, minutes=INTEGER, report=TEXT))
def timeline(given: Json) -> Json:
    """Lines of logs and entries of JSON feeds, whatever their time zones, in the order in which they happened."""
    events = []
    for path in given["logs"]:
        for line in filter(str.strip, read_lines(path)):
            stamp, _, text = line.partition(" ")
            events.append((_instant(stamp), path, text))
    for path in given["feeds"]:
        events += [(_instant(entry["at"]), path, str(entry["text"])) for entry in read_json(path)]
    if not events:
        raise ValueError("there are no events")
    events.sort(key=lambda event: (event[0], event[1]))
    rows = [[n, at.strftime("%H:%M:%S"), source, text] for n, (at, source, text) in enumerate(events, 1)]
    return {
        "evidence": [{"line": row[0], "text": f"{row[1]} {row[3]}"} for row in rows],
        "minutes": int((events[-1][0] - events[0][0]).total_seconds() // 60),
        "report": table(["#", "UTC", "source", "what"], rows),
    }


@operation("citations", fields(evidence=OBJECTS, claims=OBJECTS), fields(unsupported=INTEGER, report=TEXT))
def citations(given: Json) -> Json:
    """Whether each claim quotes, word for word, a line that exists."""
    lines = {entry["line"]: entry["text"] for entry in given["evidence"]}
    report, unsupported = "", 0
    for claim in given["claims"]:
        holds = bool(claim["quote"].strip()) and claim["quote"] in lines.get(claim["line"], "")
        unsupported += not holds
        mark = "line" if holds else "NOT in line"
        report += f"- {claim['claim']} ({mark} {claim['line']}: `{claim['quote']}`)\n"
    return {"unsupported": unsupported, "report": report}
