"""Sessions and calls of remote protocols: who may tell, what never changes, and what becomes of them with their run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import pytest
from agentctl.store import audit, protocols
from agentctl.store.clock import SystemClock
from agentctl.store.engine import Store
from agentctl.store.errors import ConflictError, IncompatibleVersion, LeaseLost
from agentctl.store.records import AttemptEnd, Claim, EffectEnd, EffectRequest, ProtocolNote
from agentctl.store.views import Views
from support.builders import Driver, Hand, effect_request, new_run, open_store
from support.rows import rows

NOTE = ProtocolNote("a2a", "worker", "m-1", "submitting", '{"remoteTaskId":null}')
NAMED = replace(NOTE, status="polling", state_json='{"remoteTaskId":"r-1"}')


class Table:
    """A run with one started effect."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(folder, SystemClock())
        self.store.create_run(new_run())
        self.driver = Driver(self.store, "run-1")
        self.driver.enqueue([0])
        self.hand = Hand(self.store)
        self.claim: Claim = self.hand.take()
        self.request: EffectRequest = effect_request(self.claim)
        self.hand.start(self.claim, self.request)

    def tell(self, note: ProtocolNote) -> None:
        self.store.tell_protocol(self.claim.fence, self.request.effect_id, note)

    def call(self) -> tuple[str, str]:
        [found] = rows(self.store, "SELECT status, state_json FROM protocol_calls")
        return found


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    made = Table(tmp_path)
    yield made
    made.store.close()


def test_who_has_lost_the_lease_tells_nothing(table: Table) -> None:
    assert table.store.rescue([(table.claim.fence.attempt_id, 1)], dead=[], why="x", actor="t") == ["uncertain"]
    with pytest.raises(LeaseLost):
        table.tell(NOTE)
    assert rows(table.store, "SELECT * FROM protocol_calls") == []


def test_another_delivery_does_not_tell_either(table: Table) -> None:
    for fence in (replace(table.claim.fence, delivery=2), replace(table.claim.fence, holder="other")):
        with pytest.raises(LeaseLost):
            table.store.tell_protocol(fence, table.request.effect_id, NOTE)


def test_an_effect_that_has_ended_tells_nothing_more(table: Table) -> None:
    end = EffectEnd(table.request.effect_id, "succeeded", "{}", protocol=replace(NAMED, status="succeeded"))
    finish = AttemptEnd("succeeded", result_effect=table.request.effect_id)
    table.store.finish(table.claim, finish, effect=end, next_claim=False, only_run=None, lease_ms=1000)
    assert table.call() == ("succeeded", NAMED.state_json)
    with pytest.raises(LeaseLost):
        table.tell(NAMED)


def test_a_call_is_about_one_thing(table: Table) -> None:
    table.tell(NOTE)
    with pytest.raises(ConflictError):
        table.tell(replace(NAMED, call_identity="m-2"))
    with pytest.raises(apsw.ConstraintError):
        table.store.database.connection.execute("UPDATE protocol_calls SET call_identity = 'm-2'")
    assert table.call() == ("submitting", NOTE.state_json)


@pytest.mark.parametrize(("note", "ambiguous"), [(NOTE, "true"), (NAMED, "false")])
def test_a_rescue_says_whether_the_submission_is_ambiguous(table: Table, note: ProtocolNote, ambiguous: str) -> None:
    table.tell(note)
    table.store.rescue([(table.claim.fence.attempt_id, 1)], dead=[], why="x", actor="t")
    status, state = table.call()
    assert status == "uncertain"
    assert f'"submissionAmbiguous":{ambiguous}' in state


def test_sessions_are_counted(table: Table) -> None:
    note = ProtocolNote("mcp", "numbers", "add", "prepared", "{}", '{"n":1}')
    table.tell(note)
    table.tell(replace(note, session_json='{"n":2}'))
    found = rows(table.store, "SELECT status, generation, state_json FROM protocol_sessions")
    assert found == [("reinitialized", 2, '{"n":2}')]


def test_a_replay_has_copies_of_its_own(table: Table) -> None:
    table.tell(ProtocolNote("mcp", "numbers", "add", "prepared", '{"sent":true}', '{"n":1}'))
    store: Store = table.store
    store.create_run(new_run("run-2", submission_digest="d" * 64))
    with store.database.write() as tx:
        events = protocols.record_again(tx, "run-1", "run-2", now=5)
        audit.append(tx, "run-2", events, actor="t", now=5)
    views = Views(store.database, SystemClock())
    seen = views.inspect("run-2")
    [call] = seen["protocolCalls"]
    assert call["effectId"] == f"recorded:run-2:{table.request.effect_id}"
    assert (call["status"], call["state"]) == ("recorded", {"sent": True})
    [session] = seen["protocolSessions"]
    assert (session["status"], session["generation"]) == ("recorded", 1)
    with store.database.read() as tx:
        told = protocols.told_by_rows(tx, "run-2")
    assert len(told) == len(events) == 2


def test_records_of_the_future_are_refused(table: Table) -> None:
    table.tell(NOTE)
    table.store.database.connection.execute("UPDATE protocol_calls SET format_version = 2")
    with pytest.raises(IncompatibleVersion):
        table.store.protocol_call(table.request.effect_id)
    with pytest.raises(ConflictError):
        table.tell(NAMED)
