"""The verb that makes a run of what another has recorded (contract 9.5)."""

from __future__ import annotations

from contextlib import closing

import click
from agentctl.store.faults import Faults

from .main import Settings, Verb, pass_settings
from .render import Printer
from .run import ACTOR, EXIT_BY_STATE, open_store, print_outcome, until_told, views_of


@click.command(cls=Verb)
@click.argument("run_name", metavar="RUN")
@click.option(
    "--plan", "only_plan", is_flag=True, help="Show what would be recorded, after all checks; change nothing."
)
@pass_settings
@click.pass_context
def replay(context: click.Context, settings: Settings, run_name: str, only_plan: bool) -> None:
    """Make a new run of what a run that has ended has recorded: outputs, errors, states, memory, artifacts.

    Nothing is executed, and nothing but the database is needed. A source that is damaged is refused (exit 5). Exit by
    the state of the source: 0 succeeded, 4 failed, 130 cancelled. With --plan: 0 when it could be made.
    """
    from agentctl.coordinator.replaying import replay as make_replay
    from agentctl.coordinator.replaying import verify_source
    from agentctl.store.clock import SystemIds

    with closing(open_store(settings)) as store:
        source_id = views_of(store).find_run(run_name)
        if only_plan:
            from .foretold import replay_plan, show_replay

            verify_source(store, source_id)
            views = views_of(store)
            data = replay_plan(views, source_id, EXIT_BY_STATE[views.state(source_id)])
            Printer(settings).result("ReplayPlan", data, lambda out: show_replay(out, data))
            return
        with until_told():
            run_id = make_replay(
                store, source_id, SystemIds(store.clock), actor=ACTOR, faults=Faults.from_environment()
            )
            code = print_outcome(Printer(settings), store, run_id)
        context.exit(code)
