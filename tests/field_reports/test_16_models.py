"""Report 16 at a real service: requests counted by the server itself, and what is reserved looked at all the time.

https://github.com/garrytan/gbrain/issues/4365 · https://github.com/BerriAI/litellm/issues/34732
"""

from __future__ import annotations

import time

import pytest
from support.field import Field, seconds
from support.field_models import ask_fan, models
from support.model_server import ModelServer, Play
from support.scale import scale

LIMIT, WORKERS = 10, 8


def play(field: Field, server: ModelServer, file: str, dimension: str) -> tuple[str, list[tuple[int, int]]]:
    """One run to its end, counted from nothing; and (used, reserved) of one dimension, every 20 ms."""
    server.seen.clear()
    run_id = field.submit(file)
    question = (
        "SELECT r.state, l.used, l.reserved FROM runs r LEFT JOIN budget_lines l ON l.run_id = r.run_id "
        "AND l.dimension = ? WHERE r.run_id = ?"
    )
    samples, state = [], "running"
    while state == "running":
        [(state, used, reserved)] = field.rows(question, dimension, run_id)
        samples.append((used or 0, reserved or 0))
        time.sleep(0.02)  # the distance of two samples
    outcome = field.json("wait", run_id)
    assert (outcome.code, outcome.data["reason"]) == (4, "budget_exceeded")
    return run_id, samples


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_requests_of_a_hundred(field: Field, server: ModelServer) -> None:
    """The server counts exactly ten; ten tasks succeed, and ninety are never sent."""
    server.plays(Play(delay=seconds(0.3, 0.05)))
    pool = field.pool(WORKERS)
    runtime = {"maxConcurrency": WORKERS, "budgets": {"maxProviderRequests": LIMIT}}
    file = field.workflow("limit", [ask_fan("q", 100, failure="continue")], runtime=runtime, **models(server.url))
    for _ in range(max(1, round(50 * scale() ** 2))):  # each takes a while; the scripted model has more of them
        run_id, samples = play(field, server, file, "providerRequests")
        assert server.count == LIMIT
        assert max(used + reserved for used, reserved in samples) == LIMIT
        assert samples[-1] == (LIMIT, 0)
        states = field.rows("SELECT state, COUNT(*) FROM tasks WHERE run_id = ? GROUP BY 1", run_id)
        assert dict(states)["succeeded"] == LIMIT
        assert field.scalar("SELECT SUM(dispatches) FROM effects WHERE run_id = ?", run_id) == LIMIT
        why = field.rows(
            "SELECT json_extract(error_json, '$.code'), COUNT(*) FROM tasks "
            "WHERE run_id = ? AND task_id LIKE 'q--%' AND state <> 'succeeded' GROUP BY 1",
            run_id,
        )
        assert why == [("budget_exceeded", 100 - LIMIT)]
    field.check_clean_end(drained=[pool])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_that_use_three_times_what_was_reserved(field: Field, server: ModelServer) -> None:
    """The overshoot is that of what was in flight, it is shown as such, and nothing is sent after it is known."""
    server.plays(Play(delay=seconds(0.3, 0.05), usage={"prompt_tokens": 1, "completion_tokens": 3}))
    pool = field.pool(WORKERS)
    runtime = {"maxConcurrency": WORKERS, "budgets": {"maxOutputTokens": LIMIT}}
    spec = models(server.url, agent={"maxOutputTokens": 1})
    file = field.workflow("over", [ask_fan("q", 100, failure="continue")], runtime=runtime, **spec)
    for _ in range(max(1, round(50 * scale() ** 2))):  # each takes a while; the scripted model has more of them
        run_id, samples = play(field, server, file, "outputTokens")
        used, reserved = samples[-1]
        assert (used, reserved) == (3 * server.count, 0), "every answer is charged with what it has used"
        assert LIMIT < used <= LIMIT + 3 * WORKERS
        known = field.rows(
            "SELECT MIN(sequence) FROM audit_events WHERE run_id = ? AND event_type = 'budget.reconciled_exceeded'",
            run_id,
        )[0][0]
        assert known is not None, "the overshoot is told of"
        late = "SELECT 1 FROM audit_events WHERE run_id = ? AND event_type = 'effect.started' AND sequence > ?"
        assert field.rows(late, run_id, known) == [], "something was sent after the overshoot was known"
        exceeded = field.json("inspect", run_id).data["budget"]["exceeded"]
        assert (exceeded["dimension"], exceeded["limit"]) == ("outputTokens", LIMIT)
        assert exceeded["attempted"] > LIMIT
        assert field.rows("SELECT DISTINCT status FROM effects WHERE run_id = ? AND dispatches > 0", run_id) == [
            ("succeeded",)
        ]
    field.check_clean_end(drained=[pool])
