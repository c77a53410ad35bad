"""A driver that takes over a run while results wait for it."""

from __future__ import annotations

import random
from pathlib import Path

from agentctl.store.records import AttemptEnd, EffectEnd
from support.builders import LEASE_MS, effect_request, open_store
from support.clock import ManualClock
from support.graphs import Graph, Node, Source
from support.play import Play


def test_results_that_do_not_fit_into_the_first_batch_keep_the_run_going(tmp_path: Path) -> None:
    """One task is in doubt, another has succeeded, and a batch is full after the first: nothing is paused yet."""
    clock = ManualClock()
    store = open_store(tmp_path, clock)
    text = {"text": Source("constant", 1)}
    nodes = (Node("doubtful", "echo", with_=text), Node("done", "echo", with_=text), Node("after", "assign", ("done",)))
    play = Play(store, clock, Graph(nodes), 2, 2, random.Random(0))
    play.chance.random = lambda: 1.0  # type: ignore[method-assign]
    play.step()
    first, second = (hand.take() for hand in play.hands)
    play.hands[0].start(first, effect_request(first, idempotency="unknown"))
    request = effect_request(second)
    play.hands[1].start(second, request)
    claims = [(first.fence.attempt_id, first.fence.delivery)]
    assert store.rescue(claims, dead=["worker-0"], why="died", actor="test") == ["uncertain"]
    end = AttemptEnd("succeeded", result_effect=request.effect_id)
    confirmed = EffectEnd(request.effect_id, "succeeded", "{}")
    store.finish(second, end, effect=confirmed, next_claim=False, only_run=None, lease_ms=LEASE_MS)

    play.take()
    finished, _ = store.finished_attempts(play.run)
    assert [attempt.outcome for attempt in finished] == ["uncertain", "succeeded"]
    batch = play.scheduler.decide(finished[:1], store.clock.now())
    assert batch.run_state is None
    batch = play.scheduler.decide(finished[1:], store.clock.now())
    assert (batch.run_state, batch.run_reason) == ("paused", "uncertain_effect")
    assert [final[0] for final in batch.finals] == ["succeeded", "succeeded"]
    store.close()
