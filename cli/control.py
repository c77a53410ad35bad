"""Verbs by which a person decides: approvals, and what became of uncertain effects (contract 4.7, 5.5)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click
from agentctl.store.errors import ConflictError, UsageError
from agentctl.store.faults import Faults

from .documents import read_json_file
from .main import Settings, VerbGroup, pass_settings
from .remote import continue_remote
from .render import Printer, clean, shortened, when
from .run import ACTOR, open_store, until_told, views_of, warn_undriven

if TYPE_CHECKING:
    from agentctl.store.views import Views

SHOWN_INPUT = 2000
SHOWN_DIFF = 100
SHOWN_STANDING = 5

_actor_option = click.option("--actor", default=ACTOR, metavar="NAME", help="Who decides; kept in the audit trail.")


# -- approvals ---------------------------------------------------------------------------------------------------


@click.group(cls=VerbGroup)
def approvals() -> None:
    """List and decide what waits for a person."""


@approvals.command("list")
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--all", "everything", is_flag=True, help="Decided ones, too.")
@pass_settings
def approvals_list(settings: Settings, run_name: str | None, everything: bool) -> None:
    """Approvals that nobody has answered yet, of one run or of all."""
    with closing(open_store(settings)) as store:
        views = views_of(store)
        run_id = None if run_name is None else views.find_run(run_name)
        found = views.approvals(run_id, pending=not everything)

    def human(out: Printer) -> None:
        for asked in found:
            state = asked["status"]
            decided = f" by {clean(asked['resolvedBy'])} {when(asked['resolvedAt'])}" if asked["resolvedAt"] else ""
            out.line(f"{out.bold(asked['approvalId'])} {state}{decided}")
            out.line(f"  run {asked['runId']}, task {clean(asked['taskId'])}, since {when(asked['requestedAt'])}")
            out.line(
                f"  {clean(asked['tool'])} ({asked['capability']}, risk {asked['risk']}): {clean(asked['reason'])}"
            )
            effect = asked["expectedEffect"]
            diff = effect.get("diff") if isinstance(effect, dict) else None
            lines = diff.removesuffix("\n").split("\n") if isinstance(diff, str) else []
            if lines:
                effect = {name: value for name, value in effect.items() if name != "diff"}
            for title, value in (("input", asked["redactedInput"]), ("would do", effect)):
                out.line(f"  {title}: {shortened(json.dumps(value, ensure_ascii=False), SHOWN_INPUT)}")
            # Indented, so that no line of a file can be taken for another approval.
            for line in lines[:SHOWN_DIFF]:
                out.line(f"    {shortened(line, SHOWN_INPUT)}")
            if len(lines) > SHOWN_DIFF:
                out.line(f"    … and {len(lines) - SHOWN_DIFF} more lines; --output json has all")
        if not found:
            out.line("nothing waits for an approval")

    Printer(settings).result("ApprovalList", {"runId": run_id, "approvals": found}, human)


@approvals.command("approve")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@_actor_option
@click.option("--reason", default="", metavar="TEXT", help="Why; kept in the audit trail.")
@pass_settings
def approvals_approve(settings: Settings, names: tuple[str, ...], actor: str, reason: str) -> None:
    """Approve: the action is carried out, once. A live coordinator goes on by itself; else `resume` does.

    Several are approved together, all of them or none. Exit 5 when somebody has decided before.
    """
    _resolve(settings, names, approve=True, actor=actor, reason=reason)


@approvals.command("reject")
@click.argument("names", nargs=-1, required=True, metavar="ID...")
@_actor_option
@click.option("--reason", default="", metavar="TEXT", help="Why; kept in the audit trail.")
@pass_settings
def approvals_reject(settings: Settings, names: tuple[str, ...], actor: str, reason: str) -> None:
    """Reject: the action is never carried out, and its task fails.

    Several are rejected together, all of them or none. Exit 5 when somebody has decided before.
    """
    _resolve(settings, names, approve=False, actor=actor, reason=reason)


def _resolve(settings: Settings, names: Sequence[str], *, approve: bool, actor: str, reason: str) -> None:
    if not actor.strip():
        raise UsageError("--actor must not be empty")
    faults = Faults.from_environment()
    with until_told():
        with closing(open_store(settings)) as store:
            views = views_of(store)
            wanted = list(dict.fromkeys(views.find_approval(name) for name in names))
            faults.reach("before_decision")
            try:
                run_ids = store.resolve_approvals(wanted, approve=approve, actor=actor, reason=reason)
            except ConflictError as error:
                if len(wanted) == 1:
                    raise
                message = f"{error.message}; none of the {len(wanted)} was answered now"
                raise ConflictError(message, remedy=error.remedy, run_id=error.run_id) from None
            faults.reach("after_decision")
            diagnostics = [item for run_id in dict.fromkeys(run_ids) for item in warn_undriven(settings, store, run_id)]
        status = "approved" if approve else "rejected"
        decided = [
            {"approvalId": approval_id, "status": status, "runId": run_id}
            for approval_id, run_id in zip(wanted, run_ids, strict=True)
        ]

        def human(out: Printer) -> None:
            for item in decided:
                out.line(f"{item['approvalId']} of {item['runId']} is {status}")

        if len(names) == 1:
            Printer(settings).result("ApprovalResolution", decided[0], human, diagnostics)
        else:
            Printer(settings).result("ApprovalResolutions", {"resolutions": decided}, human, diagnostics)


# -- effects -----------------------------------------------------------------------------------------------------


@click.group(cls=VerbGroup)
def effects() -> None:
    """Show effects; reconcile uncertain ones."""


effects.add_command(continue_remote)


@effects.command("list")
@click.argument("run_name", metavar="[RUN]", required=False)
@click.option("--task", "task_name", metavar="TASK", help="Only those of one task: its id, or the beginning of it.")
@click.option("--uncertain", is_flag=True, help="Only those that somebody has to reconcile; without RUN of all runs.")
@pass_settings
def effects_list(settings: Settings, run_name: str | None, task_name: str | None, uncertain: bool) -> None:
    """The effects of a run in compiled order, or the uncertain ones of all runs."""
    if run_name is None and not uncertain:
        raise UsageError(
            "give a RUN, or --uncertain",
            remedy="`agentctl effects list RUN`, or `agentctl effects list --uncertain` for all runs",
        )
    if run_name is None and task_name is not None:
        raise UsageError("--task belongs to a RUN", remedy="`agentctl effects list RUN --task TASK --uncertain`")
    with closing(open_store(settings)) as store:
        views = views_of(store)
        data = views.uncertain_effects() if run_name is None else _of_run(views, run_name, task_name, uncertain)

    def human(out: Printer) -> None:
        rows = []
        for effect in data["effects"]:
            request = effect["request"]
            started = None if effect["startedAt"] is None else when(effect["startedAt"])
            cells = (request["id"][:12], effect["status"], request["taskId"], request["attempt"])
            rows.append((*cells, request["operation"], effect["attemptNumber"], started, request["runId"]))
        heads = ("EFFECT", "STATUS", "TASK", "ATTEMPT", "OPERATION", "SENT", "STARTED", "RUN")
        out.table(heads, rows, states=1)

    Printer(settings).result("EffectList", data, human)


def _of_run(views: Views, run_name: str, task_name: str | None, uncertain: bool) -> dict[str, Any]:
    run_id = views.find_run(run_name)
    data = views.effects(run_id, None if task_name is None else views.find_task(run_id, task_name))
    if uncertain:
        open_ones = {effect["effectId"] for effect in views.uncertain(run_id, limit=-1)[0]}
        data["effects"] = [effect for effect in data["effects"] if effect["request"]["id"] in open_ones]
        data["reconciliations"] = []  # of an effect with one nobody asks any more
    return data


@effects.command("inspect")
@click.argument("name", metavar="EFFECT")
@pass_settings
def effects_inspect(settings: Settings, name: str) -> None:
    """Everything that is recorded about one effect. EFFECT is an id or the beginning of one."""
    with closing(open_store(settings)) as store:
        views = views_of(store)
        data = views.effect(views.find_effect(name))

    def human(out: Printer) -> None:
        effect = data["effect"]
        request = effect["request"]
        out.line(f"{out.bold(request['id'])} {out.state(effect['status'])}")
        out.line(f"  run {request['runId']}, task {clean(request['taskId'])}, attempt {request['attempt']}")
        out.line(
            f"  {request['operation']} ({request['effectClass']}, risk {request['risk']}, {request['idempotency']}), "
            f"{_times(effect['attemptNumber'])}"
        )
        for word in ("requestedAt", "startedAt", "completedAt"):
            if effect[word] is not None:
                out.line(f"  {word[:-2]} {when(effect[word])}")
        for label, value in (
            ("input", request["input"]),
            ("expected", request["expectedEffect"]),
            ("result", effect["result"]),
            ("error", effect["error"]),
            ("notes", effect["notes"]),
        ):
            if value is not None:
                out.line(f"  {label}: {shortened(json.dumps(value, ensure_ascii=False), SHOWN_INPUT)}")
        call = data["protocolCall"]
        if call is not None:
            state = shortened(json.dumps(call["state"], ensure_ascii=False), SHOWN_INPUT)
            out.line(f"  {call['protocol']} call of {clean(call['peer'])}: {out.state(call['status'])}, {state}")
        for said in data["reconciliations"]:
            out.line(
                f"  {said['status']} says {clean(said['actor'])} {when(said['createdAt'])}: {clean(said['reason'])}"
            )

    Printer(settings).result("EffectInspection", data, human)


def _times(dispatches: int) -> str:
    return {0: "never sent", 1: "sent once", 2: "sent twice"}.get(dispatches, f"sent {dispatches} times")


@effects.command("reconcile")
@click.argument("name", metavar="EFFECT")
@click.option(
    "--status",
    required=True,
    type=click.Choice(("applied", "not-applied", "compensated")),
    help="It happened; it did not; it happened and was undone.",
)
@_actor_option
@click.option("--reason", required=True, metavar="TEXT", help="How you know; kept for ever.")
@click.option(
    "--evidence-file",
    type=click.Path(),
    metavar="FILE",
    help="JSON that proves it; without it your reason is the evidence.",
)
@click.option(
    "--result-file", type=click.Path(), metavar="FILE", help="JSON result with which the task goes on (applied)."
)
@click.option("--result-schema-file", type=click.Path(), metavar="FILE", help="JSON Schema that the result has to fit.")
@click.option("--compensation-effect", metavar="EFFECT", help="The effect that has undone it (compensated).")
@click.option("--approved", is_flag=True, help="You may approve such an action, and do.")
@pass_settings
def effects_reconcile(
    settings: Settings,
    name: str,
    status: str,
    actor: str,
    reason: str,
    evidence_file: str | None,
    result_file: str | None,
    result_schema_file: str | None,
    compensation_effect: str | None,
    approved: bool,
) -> None:
    """Say what became of an uncertain effect. It is appended, never changed, and the run goes on with it.

    applied: the task has the given result. not-applied: a fresh attempt follows, unless it would repeat what else the
    task has done and must not be done twice: then the task fails. Exit 3 when the policy wants --approved, 5 when the
    effect is still in flight or something else was said before.
    """
    from agentctl.coordinator.reconciliation import Conclusion, reconcile
    from agentctl.store.clock import SystemIds

    from .pool import rescue_the_dead

    evidence = None if evidence_file is None else read_json_file(evidence_file, "--evidence-file")
    if evidence_file is not None and evidence is None:
        raise UsageError("--evidence-file: null is no evidence")
    result = None if result_file is None else read_json_file(result_file, "--result-file")
    schema = None if result_schema_file is None else read_json_file(result_schema_file, "--result-schema-file")
    if schema is not None and not isinstance(schema, dict | bool):
        raise UsageError("--result-schema-file: not a JSON Schema")
    with until_told():
        with closing(open_store(settings)) as store:
            views = views_of(store)
            effect_id = views.find_effect(name)
            inverse = None if compensation_effect is None else views.find_effect(compensation_effect)
            rescue_the_dead(settings.database)
            conclusion = Conclusion(
                status.replace("-", "_"),
                actor,
                reason,
                evidence,
                result_file is not None,
                result,
                schema,
                inverse,
                approved,
            )
            made, run_id = reconcile(store, views.effect(effect_id)["effect"], conclusion, SystemIds(store.clock))
            stands = views.failed_by(effect_id)
            data: dict[str, Any] = {**views.reconciliation(made), "standingEffects": stands}
            diagnostics = warn_undriven(settings, store, run_id)

        def human(out: Printer) -> None:
            out.line(f"effect {effect_id[:12]} of {run_id} is reconciled: {status}")
            if stands:
                shown = ", ".join(name[:12] for name in stands[:SHOWN_STANDING])
                more = f" and {len(stands) - SHOWN_STANDING} more" if len(stands) > SHOWN_STANDING else ""
                out.line(f"no fresh attempt follows, its task fails: it would repeat {shown}{more}, which happened and")
                out.line("must not be done twice")
                out.advise(
                    f"next: when {run_id} has ended, `agentctl compensate {run_id}` undoes what declares how, "
                    f"and `agentctl fork {run_id}` does everything once more"
                )

        Printer(settings).result("EffectReconciliation", data, human, diagnostics)
