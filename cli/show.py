"""Verbs that show what is recorded. They only read, and are never blocked by those who write."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from .main import Settings, Verb, VerbGroup, pass_settings
from .render import (
    Printer,
    beginning,
    clean,
    clean_output,
    counts_text,
    duration,
    effect_status,
    ended,
    item_text,
    let_go_on,
    of_item,
    program,
    settle_step,
    warn,
    when,
    why_uncertain,
)
from .run import failure_text, open_store, views_of, why_failed

if TYPE_CHECKING:
    from agentctl.store.views import Views

SHOWN_TASKS = 200
SHOWN_WAITING = 20
SHOWN_VALUE = 200
SHOWN_NOTE = 120

_STATES = ("running", "paused", "succeeded", "failed", "cancelled")


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@pass_settings
def status(settings: Settings, run_name: str) -> None:
    """How a run stands, and why each waiting task waits. Exit 0 whatever the state.

    RUN is an id, the beginning of one with or without its first word (run-), or @latest.
    """
    with closing(open_store(settings)) as store:
        views = views_of(store)
        data = views.status(views.find_run(run_name))
        now = store.clock.now()
        Printer(settings).result("RunStatus", data, lambda out: _status_for_people(out, views, data, now))


def _status_for_people(out: Printer, views: Views, data: dict[str, Any], now: int) -> None:
    reason = f" ({data['reason']})" if data["reason"] else ""
    out.line(f"{out.bold(data['runId'])} {out.state(data['state'])}{reason}")
    over = data["state"] not in ("running", "paused")
    spent = duration((data["updatedAt"] if over else now) - data["createdAt"])
    out.line(f"workflow  {clean(data['workflow'])}, mode {data['mode']}, priority {data['priority']}")
    for line in _origin(data):
        out.line(f"origin    {line}")
    for derived in data["derivedRuns"][:SHOWN_WAITING]:
        out.line(f"made into {derived['runId']} {out.state(derived['state'])} ({derived['mode']})")
    _more(out, len(data["derivedRuns"]) - SHOWN_WAITING)
    out.line(f"created   {when(data['createdAt'])}, {'took' if over else 'since'} {spent}")
    if data["deadlineAt"] is not None:
        out.line(f"deadline  {when(data['deadlineAt'])}")
    if data["cancelRequestedAt"] is not None:
        said = f": {clean(data['cancelReason'])}" if data["cancelReason"] else ""
        out.line(f"cancel    requested {when(data['cancelRequestedAt'])}{said}")
    if data["pauseRequestedAt"] is not None:
        said = f": {clean(data['pauseReason'])}" if data["pauseReason"] else ""
        out.line(f"pause     requested {when(data['pauseRequestedAt'])}{said}")
    counts = data["taskCounts"]
    out.line(f"tasks     {ended(counts)} of {sum(counts.values())} ended: {counts_text(counts)}")
    if not over:
        if data["problem"] is not None:
            out.line(f"driver    nobody can drive it: {clean(data['problem']['message'])}")
        else:
            out.advise(f"driver    {_driver(data)}")
    if data["running"]:
        out.line("running:")
        shown = data["running"][:SHOWN_WAITING]
        bound = views.bindings(data["runId"], [task["taskId"] for task in shown])
        for task in shown:
            since = duration(now - task["claimedAt"])
            out.line(
                f"  {of_item(task['taskId'], bound)}: attempt {task['attempt']}, delivery {task['delivery']}, "
                f"by {clean(task['workerId'])}{_of_the_dead(task)}, for {since}{_step(task)}"
            )
        in_hand = counts.get("running", 0) - len(data["unrecorded"])
        _more(out, in_hand - min(len(data["running"]), SHOWN_WAITING))
    if data["unrecorded"]:
        out.line("ended, and not yet recorded by the driver of the run:")
        for task in data["unrecorded"][:SHOWN_WAITING]:
            out.line(
                f"  {clean(task['taskId'])}: attempt {task['attempt']} {task['outcome']} {when(task['finishedAt'])}"
            )
        _more(out, len(data["unrecorded"]) - SHOWN_WAITING)
    if counts.get("failed") or data["state"] == "failed":
        error = views.outcome(data["runId"])["error"] if over else None
        if lines := why_failed(views, data["runId"], error, SHOWN_WAITING):
            out.line("failed:")
            for line in lines:
                out.line(f"  {line}")
    if data["waiting"]:
        out.line("waiting:")
        for task in data["waiting"][:SHOWN_WAITING]:
            why = out.paint(task["why"], "yellow")
            out.line(f"  {clean(task['taskId'])}: {why}: {clean(task['detail'])}")
        _more(out, data["waitingCount"] - min(len(data["waiting"]), SHOWN_WAITING))
    _budget_for_people(out, data["budget"])
    if data["pendingApprovals"]:
        out.line("approvals (a person has to answer):")
        for asked in data["pendingApprovals"][:SHOWN_WAITING]:
            out.line(
                f"  {asked['approvalId']}  task {clean(asked['taskId'])}, {asked['tool']} (risk {asked['risk']}), "
                f"since {when(asked['requestedAt'])}"
            )
        _more(out, data["pendingApprovalCount"] - min(len(data["pendingApprovals"]), SHOWN_WAITING))
    if data["uncertainEffects"]:
        out.line("uncertain effects (began, never confirmed):")
        for effect in data["uncertainEffects"][:SHOWN_WAITING]:
            out.line(
                f"  {effect['effectId'][:12]}  task {clean(effect['taskId'])}, attempt {effect['attempt']}, "
                f"{effect['operation']}, started {when(effect['startedAt'])}"
            )
            if (cause := why_uncertain(effect)) is not None:
                out.line(f"    {cause}")
            if effect["remoteTaskId"] is not None:
                out.advise(f"    {settle_step(effect)}")
        _more(out, data["uncertainEffectCount"] - min(len(data["uncertainEffects"]), SHOWN_WAITING))


def recorded_note(lineage: dict[str, Any]) -> list[str]:
    """What a replay shows, where that is not the work of a workflow."""
    notes = {
        "check": "what it shows is a check: nothing of it was ever executed",
        "compensation": "what it shows is a compensation: its actions have undone those of another run",
    }
    note = notes.get(lineage.get("recordedMode", ""))
    return [] if note is None else [note]


def _origin(data: dict[str, Any]) -> list[str]:
    """Where a run comes from, and why it was made; nothing for one that was made from a file alone."""
    other = data["sourceRunId"] or data["parentRunId"]
    if other is None:
        return []
    lineage = data["lineage"] or {}
    roots = lineage.get("roots") or []
    shown = ", ".join(clean(name) for name in roots[:5]) + (f" and {len(roots) - 5} more" if len(roots) > 5 else "")
    lines = [f"{data['mode']} of {other}" + (f", from {shown}" if roots else "")]
    lines += recorded_note(lineage)
    if lineage.get("reason"):
        lines.append(f"because {clean(lineage['reason'])}")
    return lines


def _step(task: dict[str, Any]) -> str:
    """Where an agent is in its conversation; what has one effect only says enough with its name."""
    step = task.get("step")
    if step is None or step["ordinal"] == 1:
        return ""
    return f", step {step['ordinal']}: {clean(step['operation'])} {step['status']}"


def _of_the_dead(task: dict[str, Any]) -> str:
    """What a dead worker holds is shown as such: it does not run, and nobody has settled it yet."""
    return " (dead)" if task["workerLiveness"] == "dead" else ""


def _budget_for_people(out: Printer, budget: dict[str, Any]) -> None:
    """One line for each limit: used, reserved, limit."""
    for dimension, limit in budget["limits"].items():
        used, held = budget["usage"].get(dimension, 0), budget["reserved"].get(dimension, 0)
        if dimension == "totalTokens":
            used, held = (
                sum(budget[part].get(name, 0) for name in ("inputTokens", "outputTokens"))
                for part in ("usage", "reserved")
            )
        reserved = f" and {held} reserved" if held else ""
        out.line(f"budget    {dimension}: {used} used{reserved} of {limit}")
    if budget.get("exceeded"):
        over = budget["exceeded"]
        out.line(f"budget    exceeded: {over['dimension']} would be {over['attempted']} of {over['limit']}")


def _driver(data: dict[str, Any]) -> str:
    driver = data["driver"]
    if driver is None and data["state"] == "paused":
        return "nobody while it is paused"  # whoever is live has given it back, and takes it when it may go on
    if driver is None:
        return f"nobody; `agentctl workers start` or `agentctl resume {data['runId']}` drives it"
    who = f"{driver['kind'] or 'process'} {clean(driver['processId'])}"
    pid = f", pid {driver['pid']}" if driver["pid"] is not None else ""
    if driver["stopped"]:
        on = let_go_on(driver["pid"])
        return f"{who}{pid}, stopped, as by Ctrl-Z: {on}; `agentctl resume {data['runId']}` takes over from it"
    # A foreground `run` that was killed has nobody who takes over by himself.
    step = f"; `agentctl workers start` or `agentctl resume {data['runId']}` goes on with it"
    return f"{who}{pid}, {driver['liveness']}" + (step if driver["liveness"] == "dead" else "")


def _more(out: Printer, number: int) -> None:
    if number > 0:
        out.line(f"  and {number} more")


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@pass_settings
def inspect(settings: Settings, run_name: str) -> None:
    """Everything that is recorded about a run. For people: its tasks; with JSON output all records."""
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = views.find_run(run_name)
        if settings.json:
            Printer(settings).result("RunInspection", views.inspect(run_id), lambda out: None)
            return
        store.refuse_future_records(run_id)
        out = Printer(settings)
        _status_for_people(out, views, views.status(run_id), store.clock.now())
        tasks, count = views.tasks(run_id, limit=SHOWN_TASKS)
        out.line()
        rows = []
        bound = views.bindings(run_id, [task["taskId"] for task in tasks])
        for task in tasks:
            spent = None
            if task["startedAt"] is not None and task["endedAt"] is not None:
                spent = duration(task["endedAt"] - task["startedAt"])
            error = task["error"] if isinstance(task["error"], dict) else {}
            note = f"{error.get('code')}: {error.get('message')}" if error else ""
            if task["disposition"] != "executed":
                note = f"{task['disposition']} from {task['sourceRunId']}"
            cells = (task["state"], task["attempt"], task["deliveries"], spent, beginning(note, SHOWN_NOTE))
            item = item_text(bound.get(task["taskId"], {}))
            rows.append((task["taskId"], item, *cells) if bound else (task["taskId"], *cells))
        names = ("TASK", "ITEM") if bound else ("TASK",)
        out.table((*names, "STATE", "ATTEMPT", "DELIVERIES", "TOOK", "NOTE"), rows, states=len(names))
        if count > len(tasks):
            out.line(f"and {count - len(tasks)} more tasks; --output json shows all")
        if settings.verbose:
            out.line(json.dumps(views.inspect(run_id), ensure_ascii=False, indent=2))


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.argument("task_name", metavar="[TASK]", required=False)
@click.option(
    "--failed", is_flag=True, help="Only attempts that have ended without success, and why tasks have failed."
)
@pass_settings
def logs(settings: Settings, run_name: str, task_name: str | None, failed: bool) -> None:
    """What the commands of a run have printed, attempt by attempt, and what its models and tools have said; with TASK
    (an id or the beginning of one) only those of one task.

    It is recorded when a command has ended, so there is nothing yet of one that runs. For people a head line with the
    exit code comes before each attempt, and stderr after stdout, and what could steer a terminal is shown as an escape;
    with JSON output they are separate texts, as they were printed.
    """
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = views.find_run(run_name)
        task_id = None if task_name is None else views.find_task(run_id, task_name)
        entries = views.logs(run_id, task_id, failed=failed)
        said = views.conversation(run_id, task_id, failed=failed)
        below = [] if task_id is None or entries or said else views.below(run_id, task_id)
        failures = _failures(views, run_id, {task_id, *below} if task_id is not None else None) if failed else []
        data = {"runId": run_id, "taskId": task_id, "attempts": entries, "conversation": said}
        if failed:
            data["failures"] = failures
            below = [name for name in below if any(failure["taskId"] == name for failure in failures)]

        def human(out: Printer) -> None:
            _logs_for_people(out, entries)
            _conversation_for_people(out, said)
            if below:
                only = " --failed" if failed else ""
                out.line(f"{clean(task_id)} has no output of its own; that of its {len(below)} tasks is shown by")
                for name in below[:SHOWN_WAITING]:
                    out.line(f"  {program(settings)} logs {run_id} {clean(name)}{only}")
                _more(out, len(below) - SHOWN_WAITING)
            elif not entries and not said:
                out.line(
                    "no task has failed" if failed and not failures else "no output is recorded: no command has ended"
                )
            if failures:
                _failures_for_people(out, views, run_id, failures)

        Printer(settings).result("Logs", data, human)


def _failures(views: Views, run_id: str, only: set[str] | None) -> list[dict[str, Any]]:
    """The failed tasks with their reasons; many fail without an effect, or after one that has succeeded."""
    found, _ = views.failures(run_id, limit=-1)
    return [failure for failure in found if only is None or failure["taskId"] in only]


def _failures_for_people(out: Printer, views: Views, run_id: str, failures: list[dict[str, Any]]) -> None:
    shown = failures[:SHOWN_WAITING]
    bound = views.bindings(run_id, [failure["taskId"] for failure in shown])
    out.line(out.bold("==> failed tasks <=="))
    for failure in shown:
        out.line(failure_text(failure, bound))
    _more(out, len(failures) - SHOWN_WAITING)


def _logs_for_people(out: Printer, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        how = effect_status(entry) if entry["exitCode"] is None else f"exit {entry['exitCode']}"
        out.line(out.bold(f"==> {clean(entry['taskId'])}, attempt {entry['attempt']}: {how} <=="))
        for name in ("stdout", "stderr"):
            text = entry[name]
            if not text:
                continue
            if name == "stderr":
                out.line(out.paint("--- stderr ---", "yellow"))
            shown = clean_output(text, color=out.color)
            click.echo(shown, nl=not text.endswith("\n"), color=out.color)
        if entry["truncated"]:
            out.line(out.paint("(only a part was kept)", "yellow"))
        if entry["error"] is not None:
            out.line(out.paint(f"{entry['error']['code']}: {clean(entry['error']['message'])}", "red"))


def _conversation_for_people(out: Printer, said: list[dict[str, Any]]) -> None:
    """Turns and tool calls, each under a head line of its attempt."""
    at = None
    for step in said:
        if at != (at := (step["taskId"], step["attempt"])):
            out.line(out.bold(f"==> {clean(step['taskId'])}, attempt {step['attempt']}: conversation <=="))
        if step["kind"] == "turn":
            usage = step["usage"] or {}
            spent = f", {usage.get('inputTokens', 0)} tokens in, {usage.get('outputTokens', 0)} out" if usage else ""
            ended_by = f", {step['finishReason']}" if step["finishReason"] else ""
            out.line(f"[{step['ordinal']}] {clean(step['provider'])}: {effect_status(step)}{ended_by}{spent}")
            if step["text"]:
                out.line("\n".join("    " + clean(line) for line in step["text"].split("\n")))
        else:
            asked = (step["input"] or {}).get("input")
            out.line(f"[{step['ordinal']}] {clean(step['tool'])}({_short(asked)}): {effect_status(step)}")
            if step["output"] is not None:
                out.line("    " + _short(step["output"]))
        if step["error"] is not None:
            out.line(out.paint(f"    {step['error']['code']}: {clean(step['error']['message'])}", "red"))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return clean(beginning(text, SHOWN_VALUE))


def _nobody_drives(run: dict[str, Any]) -> bool:
    """Whether a run of a list stands still: it should go on, and nobody sees to it."""
    driver = run["driver"]
    dead = driver is None or driver["liveness"] == "dead"
    return run["state"] == "running" and run["problem"] is None and dead


@click.group(cls=VerbGroup)
def runs() -> None:
    """List runs."""


@runs.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="At most so many (50).")
@click.option("--state", type=click.Choice(_STATES), help="Only runs in this state.")
@click.option("--next", "cursor", metavar="CURSOR", help="Go on where an earlier list ended: its `next`.")
@pass_settings
def runs_list(settings: Settings, limit: int, state: str | None, cursor: str | None) -> None:
    """List runs, newest first, and say which of them stand still since nobody drives them."""
    from .requests import coordinator_is_live

    with closing(open_store(settings)) as store:
        data = views_of(store).list_runs(limit=limit, state=state, cursor=cursor)

        def human(out: Printer) -> None:
            rows: list[tuple[object, ...]] = []
            left = 0
            for run in data["runs"]:
                counts = run["taskCounts"]
                tasks = f"{ended(counts)}/{sum(counts.values())}"
                if counts.get("failed"):
                    tasks += f", {counts['failed']} failed"
                origin = run["sourceRunId"] or run["parentRunId"]
                made = "" if origin is None else f"{run['mode']} of {origin}"
                created = when(run["createdAt"])
                reason = run["reason"] if run["problem"] is None else run["problem"]["code"]
                if _nobody_drives(run):
                    reason, left = "no driver", left + 1
                elif run["state"] == "running" and run["driver"] is not None and run["driver"]["stopped"]:
                    reason = "driver is stopped"  # its process, as by Ctrl-Z; `status` says how it goes on
                rows.append((run["runId"], run["state"], run["workflow"], tasks, created, reason, made))
            heads: tuple[str, ...] = ("RUN", "STATE", "WORKFLOW", "TASKS", "CREATED", "REASON", "ORIGIN")
            if not any(row[-1] for row in rows):
                heads, rows = heads[:-1], [row[:-1] for row in rows]
            out.table(heads, rows, states=1)
            if data["next"] is not None:
                out.line(f"more: {program(settings)} runs list --next {data['next']}")
            if left and not coordinator_is_live(store):  # else it takes them in a moment
                steps = "`agentctl workers start` or `agentctl resume RUN` goes on"
                out.advise(f"nobody drives {left} of these runs: {steps}")
            for run in data["runs"]:
                if run["problem"] is not None:
                    warn(settings, f"{run['runId']}: {clean(run['problem']['message'])}")

        Printer(settings).result("RunList", data, human)
