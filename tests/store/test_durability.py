"""What is promised is on the disk before it is told; what is not synced has a reason not to be."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import agentctl.store
import apsw
import pytest
from agentctl.store import database
from agentctl.store.embedding import LocalHash
from agentctl.store.engine import Store
from agentctl.store.long_term import new_write
from agentctl.store.memory_entries import entry_of
from agentctl.store.records import (
    AttemptEnd,
    AttemptHeld,
    Batch,
    Candidate,
    Claim,
    EffectEnd,
    EffectRequest,
    Fence,
    NewReconciliation,
    ProtocolNote,
    StartedEffect,
)
from support.builders import LEASE_MS, Driver, Hand, effect_request, new_run, open_store, process_row
from support.clock import ManualClock

NOT_SYNCED = {
    "engine.Store.note_aside": "a note for people",
    "engine.Store.forget_asides": "a note for people",
    "engine.Store.leave_run": "who takes the run over looks at the epoch and at who lives",
    "engine.Store.commit_batch": "syncs by itself, when those are called that it gives work to",
    "engine.Store.claim": "nothing is dispatched before the start, which syncs",
    "engine.Store.stream_event": "the confirmation of the answer syncs",
    "engine.Store.renew": "a lease that is lost is an older lease",
    "engine.Store.driver_heartbeat": "a lease that is lost is an older lease",
    "engine.Store.register": "nobody of before a power cut lives after it",
    "engine.Store.prune_processes": "rows of the dead",
    "artifacts.Artifacts.begin": "what follows it syncs; until then the effect is started and unconfirmed, as it was",
    "artifacts.Artifacts.keep": "what follows it syncs; until then the bytes are untracked, and ingested again",
    "artifacts.Artifacts.give_up": "what follows it syncs",
    "database.Database._record_statement": "it is stated anew at every opening",
}
"""Functions that write without a sync, and why that is no broken promise."""


def test_a_library_that_others_may_use_is_not_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A binding of the system's own SQLite shares it with Python's `sqlite3`, whose connections it does not know."""
    shut: list[bool] = []
    monkeypatch.setattr(apsw, "connections", list)
    monkeypatch.setattr(apsw, "shutdown", lambda: shut.append(True))
    database._count_no_memory(own_library=False)
    assert shut == []
    database._count_no_memory(own_library=True)
    assert shut == [True], "else this would prove nothing"


def test_who_writes_without_a_sync_has_a_reason() -> None:
    """`durable=` with anything but False counts: when it is so is tried below."""
    found = set()
    for path in sorted(Path(agentctl.store.__path__[0]).rglob("*.py")):
        for owner, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("database.write", "self.write")):
                    durable = [ast.unparse(word.value) for word in node.keywords if word.arg == "durable"]
                    if durable in ([], ["False"]):
                        found.add(f"{path.stem}.{owner}{function.name}")
    assert found == set(NOT_SYNCED)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.", item) for item in node.body if isinstance(item, ast.FunctionDef))


class Disk:
    """A store whose syncs are counted, with one run of some tasks that are all enqueued."""

    def __init__(self, folder: Path, clock: ManualClock) -> None:
        self.syncs = 0
        self.store: Store = open_store(folder, clock, sync=self._sync)
        self.store.create_run(new_run(tasks=4, budget_limits={"turns": 40}))
        self.driver = Driver(self.store, "run-1")
        self.driver.enqueue(range(4))
        self.hand = Hand(self.store)

    def _sync(self) -> None:
        self.syncs += 1

    def started(self) -> tuple[Claim, EffectRequest]:
        """An attempt whose effect is in flight."""
        claim = self.hand.take()
        request = effect_request(claim)
        assert self.hand.start(claim, request) == StartedEffect(1)
        return claim, request

    def asked(self) -> str:
        """The id of a question to a person."""
        claim = self.hand.take()
        answer = self.hand.start(claim, effect_request(claim, ask=True))
        assert isinstance(answer, AttemptHeld)
        assert answer.approval_id is not None
        return answer.approval_id

    def uncertain(self) -> str:
        """The id of an effect of unknown end."""
        claim, request = self.started()
        assert self.rescue(claim) == ["uncertain"]
        return request.effect_id

    def rescue(self, claim: Claim) -> list[str]:
        fence = (claim.fence.attempt_id, claim.fence.delivery)
        return self.store.rescue([fence], dead=[], why="test", actor="test")

    def prepared(self, effect_class: str) -> tuple[Candidate, EffectRequest]:
        """What a worker has got ready for before it claims it."""
        candidate = self.store.peek(None)
        assert candidate is not None
        fence = Fence(candidate.attempt_id, 1, self.hand.name)
        claim = Claim(fence, candidate.run_id, candidate.task_id, candidate.number, 1, "{}", "trace", 0, 0)
        return candidate, effect_request(claim, effect_class=effect_class)


@pytest.fixture
def disk(tmp_path: Path, clock: ManualClock) -> Iterator[Disk]:
    made = Disk(tmp_path, clock)
    yield made
    made.store.close()


Act = Callable[[], object]
PROMISES: dict[str, Callable[[Disk], Act]] = {}


def promise(prepare: Callable[[Disk], Act]) -> Callable[[Disk], Act]:
    PROMISES[prepare.__name__] = prepare
    return prepare


@promise
def create_run(disk: Disk) -> Act:
    return lambda: disk.store.create_run(new_run("run-2"))


@promise
def take_run(disk: Disk) -> Act:
    return lambda: disk.store.take_run("run-1", driver="d", epoch=disk.driver.epoch, lease_ms=LEASE_MS)


@promise
def commit_batch(disk: Disk) -> Act:
    return lambda: disk.driver.write(Batch(memory=[("k", 0, "1")]))


@promise
def request_cancel(disk: Disk) -> Act:
    return lambda: disk.store.request_cancel("run-1", reason="test", actor="test")


@promise
def request_pause(disk: Disk) -> Act:
    return lambda: disk.store.request_pause("run-1", reason="test", actor="test")


@promise
def withdraw_pause(disk: Disk) -> Act:
    disk.store.request_pause("run-1", reason="test", actor="test")
    return lambda: disk.store.withdraw_pause("run-1", actor="test")


@promise
def resolve_approval(disk: Disk) -> Act:
    question = disk.asked()
    return lambda: disk.store.resolve_approval(question, approve=True, actor="test", reason="test")


@promise
def reconcile(disk: Disk) -> Act:
    said = NewReconciliation("r-1", disk.uncertain(), "not_applied", "test", "test", "{}", "{}")
    return lambda: disk.store.reconcile(said)


@promise
def rescue(disk: Disk) -> Act:
    claim, _ = disk.started()
    return lambda: disk.rescue(claim)


@promise
def tell_protocol(disk: Disk) -> Act:
    claim, request = disk.started()
    note = ProtocolNote("a2a", "peer", "m-1", "submitting", '{"remoteTaskId":null}')
    return lambda: disk.store.tell_protocol(claim.fence, request.effect_id, note)


@promise
def finish_and_rest(disk: Disk) -> Act:
    claim, request = disk.started()
    return lambda: disk.hand.finish(claim, effect=EffectEnd(request.effect_id, "succeeded", "1", dispatch=1))


@promise
def release(disk: Disk) -> Act:
    claim = disk.hand.take()
    return lambda: disk.store.release(claim, effect=None, reason="drain")


@promise
def request_drain(disk: Disk) -> Act:
    disk.store.register(process_row("w"))
    return lambda: disk.store.request_drain("w")


@promise
def memory_put(disk: Disk) -> Act:
    entry = entry_of({"content": {"type": "text", "text": "x"}, "metadata": {}})
    return lambda: disk.store.memory_put(new_write("n", "k", entry, LocalHash(64), None))


@pytest.mark.parametrize("verb", PROMISES)
def test_what_is_promised_is_synced_before_it_is_told(disk: Disk, verb: str) -> None:
    act = PROMISES[verb](disk)
    before = disk.syncs
    act()
    assert disk.syncs > before


def test_a_promise_syncs_the_log_of_sqlite_itself(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a copy of the descriptor and not the database: what was committed lies in the log."""
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    store = open_store(tmp_path, clock)
    synced.clear()
    store.create_run(new_run())
    store.register(process_row("w"))
    store.close()
    assert synced == [f"{store.path}-wal"]


def test_what_follows_a_finish_needs_no_sync_of_its_own(disk: Disk) -> None:
    """The next start, or the rest of the worker, brings it to the disk."""
    claim, request = disk.started()
    before = disk.syncs
    end = EffectEnd(request.effect_id, "succeeded", "1", dispatch=1)
    assert disk.hand.finish(claim, effect=end, next_claim=True) is not None
    assert disk.syncs == before


@pytest.mark.parametrize(
    ("request_of", "synced"),
    [
        ({"effect_class": "external_mutate"}, True),
        ({"effect_class": "process_execution", "idempotency": "pure"}, True),
        ({"effect_class": "workspace_mutate"}, True),
        ({"effect_class": "model"}, True),
        ({"effect_class": "observe"}, False),
        ({"effect_class": "internal_state"}, False),
        ({"effect_class": "observe", "estimate": {"turns": 1}}, True),
        ({"effect_class": "observe", "ask": True}, True),
    ],
    ids=str,
)
def test_only_a_start_that_leaves_no_trace_goes_without_a_sync(
    disk: Disk, request_of: dict[str, object], synced: bool
) -> None:
    claim = disk.hand.take()
    before = disk.syncs
    disk.hand.start(claim, effect_request(claim, **request_of))  # type: ignore[arg-type]
    assert (disk.syncs > before) is synced


def test_a_start_that_records_an_end_is_synced_whatever_it_is(disk: Disk) -> None:
    claim, request = disk.started()
    end = EffectEnd(request.effect_id, "succeeded", "1", dispatch=1)
    before = disk.syncs
    disk.hand.start(claim, effect_request(claim, ordinal=2, effect_class="observe"), end)
    assert disk.syncs > before


@pytest.mark.parametrize(("effect_class", "synced"), [("external_mutate", True), ("observe", False)])
@pytest.mark.parametrize("when", ["claim", "finish"])
def test_a_start_that_comes_with_its_claim_is_synced_as_any_other(
    disk: Disk, when: str, effect_class: str, synced: bool
) -> None:
    """The attempt was prepared for; its claim and the start of its effect are one transaction."""
    hand = disk.hand
    done = hand.take() if when == "finish" else None
    ahead = disk.prepared(effect_class)
    before = disk.syncs
    if done is None:
        following = disk.store.claim(hand.name, only_run=None, lease_ms=LEASE_MS, awake=False, ahead=ahead)
    else:
        end = AttemptEnd("succeeded", result_json="1")
        following, _ = disk.store.finish(
            done, end, effect=None, next_claim=True, only_run=None, lease_ms=LEASE_MS, ahead=ahead
        )
    assert following is not None
    assert following.answer == StartedEffect(1)
    assert (disk.syncs > before) is synced
