"""The frozen plan of a run: what the compiler makes, what is stored, what drivers and workers read. Pure: no
I/O.

The JSON forms are those of contract 2.11 plus the fields of this project (`position`, `actionKind`,
`memoryReads`, `memoryAfter`, `dataVars`, `route`, `loop`, and on the plan what a driver needs without the document).
Children of one expansion share their unchanged parts, in memory and after `from_json` of their own
values; nobody changes any part of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentctl.store.canonical import Json, canonical, hex_digest
from agentctl.store.errors import IncompatibleVersion

PLAN_FORMAT = 1
"""Version of the stored plan; a plan from a newer version is refused (contract section 0)."""

MAX_TASKS = 200_000
"""Most compiled tasks of a plan (contract table, row 4)."""

MEMORY_WRITERS = frozenset({"builtin.memory.write", "builtin.long_term_memory.promote"})
"""Action kinds whose output is a change of working memory (contract 3)."""


BY_HAND = {"onFailure": "manual", "approval": "policy"}
"""`spec.compensation` of a document that says nothing (contract 1.3)."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed attempts are followed by others (contract table, row 9). Times are in milliseconds."""

    max_attempts: int = 1
    backoff_ms: int = 0
    backoff_multiplier: float = 1.0
    max_backoff_ms: int = 60_000

    def to_json(self) -> dict[str, Json]:
        """The stored form."""
        return {
            "maxAttempts": self.max_attempts,
            "backoffMs": self.backoff_ms,
            "backoffMultiplier": self.backoff_multiplier,
            "maxBackoffMs": self.max_backoff_ms,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> RetryPolicy:
        """The policy of a stored form; equal policies are one object."""
        return _retry_policy(
            data["maxAttempts"], data["backoffMs"], float(data["backoffMultiplier"]), data["maxBackoffMs"]
        )


@lru_cache(maxsize=1024)
def _retry_policy(attempts: int, backoff: int, multiplier: float, longest: int) -> RetryPolicy:
    return RetryPolicy(attempts, backoff, multiplier, longest)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Which child of which expansion a task is (contract 2.3). `bindings` are the variables that it adds."""

    parent: str
    index: int
    bindings: dict[str, Any]


USES_KINDS = frozenset(
    {"action", "agent", "aggregate", "router", "loop_aggregate", "subworkflow_input", "subworkflow_aggregate"}
)
"""What a compiled task can be (contract 2.11). All but actions and agents are evaluated by the driver."""

AGGREGATES = frozenset({"aggregate", "loop_aggregate", "subworkflow_aggregate"})
"""Those that have the id of a fan-out, of a loop or of a call, and put together what the tasks of that have come to."""


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """One task of a plan.

    * `position`: place in compiled order, from 0.
    * `uses_kind`: one of `USES_KINDS`; `action_kind` such as `builtin.assign`, None for all but actions.
    * `vars`: the task's own variables; they win over `Plan.vars`. Those named in `data_vars` are data,
      all others are rendered once.
    * `input`: defaults of the action overlaid by the task's `with`, key by key; templates not rendered
      yet.
    * `memory_writes`: keys the task may write. `memory_reads`: keys it may read; None means every key.
    * `memory_after`: positions of tasks that must be terminal before this one starts although it does not
      need them: for each readable key the last earlier writer, for each written key the previous writer
      (architecture 5).
    * `timeout_seconds`: limit of one attempt, resolved. `output_schema`: as declared, None means the
      kind's contract.
    * `route_guards`: (router, destination) pairs; the task is skipped unless each router that succeeded
      has chosen the destination, which is the task itself or what it was expanded from.
    * `route`: of a router, its `cases` and `default`; what it selects by is `input["select"]`.
    * `instructions`: of an agent in a sub-workflow, the text with the paths that it has there; else the plan has it.
    * `loop`: of a loop aggregate, its `while` and `maxIterations`, and of the last decision the `vars` and `dataVars`.
    * `compensate`: the declared inverse: `uses` (name of an action), `actionKind`, `input`, `retry`, `timeoutSeconds`.
      Its templates are rendered when a compensation of the run is planned.
    """

    id: str
    position: int
    uses_kind: str
    uses_name: str
    action_kind: str | None
    needs: tuple[str, ...] = ()
    expansion: Expansion | None = None
    memory_writes: tuple[str, ...] = ()
    memory_reads: tuple[str, ...] | None = ()
    memory_after: tuple[int, ...] = ()
    when: str | None = None
    vars: dict[str, Any] = field(default_factory=dict)
    data_vars: tuple[str, ...] = ()
    input: dict[str, Any] = field(default_factory=dict)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout_seconds: int = 120
    failure: str = "stop"
    output_schema: dict[str, Any] | bool | None = None
    predictability: str = "fully_predictable"
    route_guards: tuple[tuple[str, str], ...] = ()
    route: dict[str, Any] | None = None
    loop: dict[str, Any] | None = None
    instructions: str | None = None
    compensate: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of contract 2.11 with this project's fields. Values are shared, not copied."""
        data: dict[str, Any] = {
            "id": self.id,
            "position": self.position,
            "uses": {"kind": self.uses_kind, "name": self.uses_name},
            "actionKind": self.action_kind,
            "needs": list(self.needs),
            "memoryReads": None if self.memory_reads is None else list(self.memory_reads),
            "memoryAfter": list(self.memory_after),
            "when": self.when,
            "vars": self.vars,
            "input": self.input,
            "retry": self.retry.to_json(),
            "timeoutSeconds": self.timeout_seconds,
            "failure": self.failure,
            "outputSchema": self.output_schema,
            "predictability": self.predictability,
        }
        if self.expansion is not None:
            item = self.expansion
            data["expansion"] = {"parent": item.parent, "index": item.index, "bindings": item.bindings}
        if self.memory_writes:
            data["memoryWrites"] = list(self.memory_writes)
        if self.data_vars:
            data["dataVars"] = list(self.data_vars)
        if self.route_guards:
            data["routeGuards"] = [
                {"router": router} if destination == self.id else {"destination": destination, "router": router}
                for router, destination in self.route_guards
            ]
        if self.route is not None:
            data["route"] = self.route
        if self.loop is not None:
            data["loop"] = self.loop
        if self.instructions is not None:
            data["instructions"] = self.instructions
        if self.compensate is not None:
            data["compensate"] = self.compensate
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> CompiledTask:
        """The task of a stored form. Raises `IncompatibleVersion` for a kind that this version does not know."""
        expansion = data.get("expansion")
        reads = data["memoryReads"]
        uses = data["uses"]
        if uses["kind"] not in USES_KINDS:
            raise IncompatibleVersion(
                f"the plan has a task of kind {uses['kind']!r}, which this agentctl does not know",
                remedy="use the agentctl that made it",
            )
        return CompiledTask(
            data["id"],
            data["position"],
            uses["kind"],
            uses["name"],
            data["actionKind"],
            tuple(data["needs"]),
            None if expansion is None else Expansion(expansion["parent"], expansion["index"], expansion["bindings"]),
            tuple(data.get("memoryWrites", ())),
            None if reads is None else tuple(reads),
            tuple(data["memoryAfter"]),
            data["when"],
            data["vars"],
            tuple(data.get("dataVars", ())),
            data["input"],
            RetryPolicy.from_json(data["retry"]),
            data["timeoutSeconds"],
            data["failure"],
            data["outputSchema"],
            data["predictability"],
            tuple((item["router"], item.get("destination", data["id"])) for item in data.get("routeGuards", ())),
            data.get("route"),
            data.get("loop"),
            data.get("instructions"),
            data.get("compensate"),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled workflow, frozen.

    `actions` are the definitions that tasks and tools use, `policy` the whole policy, both with every default;
    `agents` (each with the text of its `instructions`), `providers` and `tools` are those that tasks use;
    `memory` is the initial working memory, `inputs` the run inputs as merged at compile time, `vars` the
    workflow's variables (data, never rendered), `outputs` the templates of the run output. Both digests
    are bare hex. `compensation` says who starts the compensation of a failed run (`onFailure`), and whose approval its
    effects need (`approval`).
    """

    format_version: int
    workflow_name: str
    workflow_digest: str
    plan_digest: str
    order: tuple[str, ...]
    max_concurrency: int
    max_deliveries: int
    tasks: dict[str, CompiledTask]
    predictability: str
    requirements: dict[str, Any]
    budget: dict[str, Any]
    actions: dict[str, Any]
    policy: dict[str, Any]
    memory: dict[str, Any]
    inputs: dict[str, Any]
    vars: dict[str, Any]
    outputs: dict[str, Any]
    show_diff: bool
    agents: dict[str, Any] = field(default_factory=dict)
    providers: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)
    compensation: dict[str, str] = field(default_factory=lambda: dict(BY_HAND))

    def to_json(self) -> dict[str, Any]:
        """The stored form. For large plans prefer `canonical_chunks`, which never holds the whole text."""
        return {
            **self._head(),
            "order": list(self.order),
            "tasks": {key: task.to_json() for key, task in self.tasks.items()},
        }

    def _head(self) -> dict[str, Any]:
        return {
            "formatVersion": self.format_version,
            "workflowName": self.workflow_name,
            "workflowDigest": self.workflow_digest,
            "planDigest": self.plan_digest,
            "maxConcurrency": self.max_concurrency,
            "maxDeliveries": self.max_deliveries,
            "predictability": self.predictability,
            "requirements": self.requirements,
            "budget": self.budget,
            "actions": self.actions,
            "policy": self.policy,
            "memory": self.memory,
            "inputs": self.inputs,
            "vars": self.vars,
            "outputs": self.outputs,
            "showDiff": self.show_diff,
            **({} if not self.agents else {"agents": self.agents, "providers": self.providers, "tools": self.tools}),
            "compensation": self.compensation,
        }

    def canonical_chunks(self) -> Iterator[str]:
        """The canonical text of `to_json()` in pieces, one task a piece."""
        whole: dict[str, Any] = {**self._head(), "order": list(self.order), "tasks": None}
        first = True
        for name in sorted(whole):
            yield ("{" if first else ",") + canonical(name) + ":"
            first = False
            if name == "tasks":
                yield from tasks_chunks(self.tasks)
            else:
                yield canonical(whole[name])
        yield "}"

    @staticmethod
    def from_json(data: dict[str, Any]) -> Plan:
        """The plan of a stored form, tasks in compiled order. Raises `IncompatibleVersion` for another
        format.
        """
        version = data.get("formatVersion")
        if version != PLAN_FORMAT:
            raise IncompatibleVersion(
                f"the plan has format version {version!r}; this agentctl knows {PLAN_FORMAT}",
                remedy="use the agentctl that made it",
            )
        order = tuple(data["order"])
        stored, read = data["tasks"], CompiledTask.from_json
        return Plan(
            format_version=version,
            workflow_name=data["workflowName"],
            workflow_digest=data["workflowDigest"],
            plan_digest=data["planDigest"],
            order=order,
            max_concurrency=data["maxConcurrency"],
            max_deliveries=data["maxDeliveries"],
            tasks={key: read(stored[key]) for key in order},
            predictability=data["predictability"],
            requirements=data["requirements"],
            budget=data["budget"],
            actions=data["actions"],
            policy=data["policy"],
            memory=data["memory"],
            inputs=data["inputs"],
            vars=data["vars"],
            outputs=data["outputs"],
            show_diff=data["showDiff"],
            agents=data.get("agents", {}),
            providers=data.get("providers", {}),
            tools=data.get("tools", {}),
            compensation=data.get("compensation", BY_HAND),
        )


def keeps_artifacts(plan: Plan) -> bool:
    """Whether a task of this plan may leave artifacts, so that the run needs a store that can be written."""
    used = {task.uses_name for task in plan.tasks.values() if task.uses_kind == "action"}
    used |= {tool["action"] for tool in plan.tools.values() if tool.get("action")}
    actions = (plan.actions[name] for name in used if name in plan.actions)
    if any(action["kind"] == "builtin.write" or action.get("artifacts") for action in actions):
        return True
    if any(tool["kind"] == "builtin.workspace.write" for tool in plan.tools.values()):
        return True
    return any("artifacts" in task.input for task in plan.tasks.values() if task.action_kind == "builtin.shell.exec")


_PLAN_FIELDS = (
    "formatVersion", "workflowName", "workflowDigest", "planDigest", "order", "maxConcurrency", "tasks",
    "predictability", "requirements", "budget",
)  # fmt: skip


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """What `agentctl plan` prints (contract 2.11)."""
    data = plan.to_json()
    for task in data["tasks"].values():
        if task["uses"]["kind"] == "agent":
            own = task.pop("instructions", None)
            known = plan.agents[task["uses"]["name"]]["instructionsDigest"]
            task["instructionsDigest"] = known if own is None else hex_digest(own)
    return {name: data[name] for name in _PLAN_FIELDS}


def tasks_chunks(tasks: dict[str, CompiledTask]) -> Iterator[str]:
    """The canonical text of the tasks object in pieces, ids sorted as canonical JSON wants it."""
    lead = "{"
    for name in sorted(tasks):
        yield f"{lead}{canonical(name)}:{canonical(tasks[name].to_json())}"
        lead = ","
    yield "}" if lead == "," else "{}"
