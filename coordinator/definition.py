"""The document model: every field of a workflow, its bounds and its meaning (contract section 1).

The models are strict: an unknown field, a value of another type or out of bounds, and a field that does
not fit the kind of its object are findings with line, column and path. The same models give the JSON
Schema for editors. What needs two parts of the document at once (references, order, templates) is the
compiler's work.

Importing this module costs pydantic, so only code that reads documents does it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path as FilePath
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from .diagnostics import MAX_DIAGNOSTICS, Diagnostic, DocumentError, Path, did_you_mean
from .expressions import has_template
from .yaml_document import YamlDocument, collector_paused, read_document

if TYPE_CHECKING:
    from .variables import Captured

API_VERSION = "agentctl.dev/v1"
OLD_API_VERSION = "agentctl.dev/v1alpha1"

MAX_EXPANSION = 100_000
"""Largest `maxItems` of a foreach or matrix (contract table, row 4)."""

RESERVED_VARIABLES = frozenset({"loopIndex", "loopPrevious", "foreachIndex", "matrix", "matrixIndex"})
"""Names that expansion binds; no variable layer may use them (contract 1.10)."""

MAX_ARGUMENT = 4096
"""Longest argument of a command that prints a secret, in bytes (contract 1.9)."""

PROCESS_KINDS = frozenset({"builtin.shell.exec", "extension.process"})

JsonMap: TypeAlias = dict[str, Any]


def problem(
    message: str, *, at: Sequence[str | int] = (), code: str = "schema_violation", help: str | None = None
) -> PydanticCustomError:
    """A finding of ours inside a validator; `at` is the place below the model that is validated."""
    return PydanticCustomError(
        "agentctl", "{message}", {"message": message, "at": tuple(at), "code": code, "help": help}
    )


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


class Part(BaseModel):
    """Base of all models: strict types, camelCase names, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=_camel, populate_by_name=False)


def _schema_shape(value: Any) -> Any:
    if value is not None and type(value) is not dict and type(value) is not bool:
        raise problem("must be a JSON Schema: an object or a boolean")
    return value


def _present_schema(value: Any) -> Any:
    # A field that is there and empty would be a contract that nobody holds anything to.
    if value is None:
        raise problem("must be a JSON Schema: an object or a boolean", help="true allows everything")
    return _schema_shape(value)


def _list_or_template(value: Any) -> Any:
    if type(value) is not list and type(value) is not str:
        raise problem("must be a list, or one template over inputs or vars that gives a list")
    return value


def _variables(value: JsonMap) -> JsonMap:
    for name in value:
        if name in RESERVED_VARIABLES:
            raise problem(f"the variable name {name} is reserved for expansion", at=(name,))
    return value


def _unique(value: list[str]) -> list[str]:
    seen: set[str] = set()
    for index, item in enumerate(value):
        if item in seen:
            raise problem(f"{item!r} stands twice", at=(index,))
        seen.add(item)
    return value


def _short_argument(value: str) -> str:
    if len(value.encode("utf-8")) > MAX_ARGUMENT:
        raise problem(f"an argument has at most {MAX_ARGUMENT} bytes")
    return value


def _no_zero_byte(value: str) -> str:
    if "\0" in value:
        raise problem("contains a zero byte, which no path, argument or variable can", help="remove the \\0")
    return value


def _variable_names(value: dict[str, SecretReference]) -> dict[str, SecretReference]:
    for name in value:
        if not name or "=" in name or "\0" in name:
            raise problem(f"{name!r} cannot name a variable", at=(name,), help="letters, digits and _")
    return value


Text = Annotated[str, Field(min_length=1)]
SystemText = Annotated[str, Field(min_length=1), AfterValidator(_no_zero_byte)]
SchemaValue = Annotated[Any, AfterValidator(_schema_shape), WithJsonSchema({"type": ["object", "boolean", "null"]})]
RequiredSchema = Annotated[Any, AfterValidator(_present_schema), WithJsonSchema({"type": ["object", "boolean"]})]
Items = Annotated[
    Any,
    AfterValidator(_list_or_template),
    WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "string", "pattern": r"^\$\{\{.*\}\}$"}]}),
]
Variables = Annotated[JsonMap, AfterValidator(_variables)]
Seconds = Annotated[int, Field(ge=1, le=86_400)]
OutputLimit = Annotated[int, Field(ge=1, le=16_777_216)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
Idempotency = Literal["pure", "idempotent", "keyed", "at_most_once", "unknown"]
EffectClass = Literal[
    "pure", "internal_state", "observe", "workspace_mutate", "external_mutate", "process_execution",
    "network", "model", "remote_agent",
]  # fmt: skip
Risk = Literal["low", "medium", "high", "critical"]
ActionKind = Literal[
    "builtin.assign",
    "builtin.assert",
    "builtin.read",
    "builtin.write",
    "builtin.shell.exec",
    "extension.process",
    "builtin.memory.read",
    "builtin.memory.write",
    "builtin.long_term_memory.read",
    "builtin.long_term_memory.search",
    "builtin.long_term_memory.write",
    "builtin.long_term_memory.promote",
    "mcp.call",
    "a2a.delegate",
]


# ---------------------------------------------------------------------- secrets


class SecretProcess(Part):
    """A command that prints a secret."""

    command: SystemText = Field(
        description="Program whose standard output is the secret; its basename must be allowlisted."
    )
    args: list[
        Annotated[str, Field(max_length=MAX_ARGUMENT), AfterValidator(_short_argument), AfterValidator(_no_zero_byte)]
    ] = Field(default_factory=list, max_length=64, description="Arguments of the program.")
    timeout_seconds: int = Field(default=5, ge=1, le=60, description="Time limit in seconds.")
    output_limit_bytes: int = Field(default=16_384, ge=1, le=65_536, description="Most bytes that are read.")


class SecretReference(Part):
    """Where a secret comes from; never the secret itself. Exactly one field."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Name of an environment variable."
    )
    file: SystemText | None = Field(default=None, description="Path of a file below policy.secretFileRoots.")
    process: SecretProcess | None = Field(default=None, description="A command that prints the secret.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(item is not None for item in (self.env, self.file, self.process)) != 1:
            raise problem("a secret reference has exactly one of env, file, process")
        return self


SecretMap: TypeAlias = dict[str, SecretReference]

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""What a header may be called (RFC 9110, 5.6.2)."""

_OWN_HEADERS = frozenset(
    {
        "accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect",
        "host", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that say where a message ends, whom it is for and in which form it is. A second word about that is taken for
an attack by some servers, and ends the connection of others."""


def _header_names(value: SecretMap) -> SecretMap:
    seen: dict[str, str] = {}
    for name in value:
        if _TOKEN.fullmatch(name) is None:
            raise problem(f"{name!r} cannot be the name of a header", at=(name,), help="letters, digits and -")
        if name.lower() in _OWN_HEADERS:
            raise problem(f"the header {name} is set by agentctl alone", at=(name,), help="leave it out")
        if name.lower() in seen:
            raise problem(f"the header {name} stands twice (as {seen[name.lower()]})", at=(name,), help="keep one")
        seen[name.lower()] = name
    return value


HeaderMap = Annotated[dict[str, SecretReference], AfterValidator(_header_names)]


# ---------------------------------------------------------------------- providers, agents


class Provider(Part):
    """A model service."""

    kind: Literal["fake", "openai", "anthropic", "google", "azure_openai", "openai_compatible"] = Field(
        description="Which protocol the service speaks."
    )
    endpoint: Text | None = Field(default=None, description="Address; required for openai_compatible.")
    credential: SecretReference | None = Field(default=None, description="Where the API key comes from.")
    api_version: Text | None = Field(default=None, description="Version that the service expects in requests.")
    headers: HeaderMap = Field(default_factory=dict, description="Extra request headers by name.")
    script: SystemText | None = Field(
        default=None, description="File in the workspace with the answers that a provider of kind fake plays."
    )

    @model_validator(mode="after")
    def _endpoint(self) -> Self:
        if self.script is not None and self.kind != "fake":
            raise problem("only a provider of kind fake has a script", at=("script",))
        if self.kind == "openai_compatible" and self.endpoint is None:
            raise problem("a provider of kind openai_compatible needs an endpoint")
        return self


class Reasoning(Part):
    """How much a model is asked to think."""

    effort: Literal["none", "low", "medium", "high", "xhigh", "max"] = Field(description="Amount of reasoning.")
    mode: Text | None = Field(default=None, description="Provider-specific mode of reasoning.")


class UsageLimit(Part):
    """Limits over all turns of one task attempt."""

    max_input_tokens: Count | None = Field(default=None, description="Most input tokens.")
    max_output_tokens: Count | None = Field(default=None, description="Most output tokens.")
    max_cost_usd: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Most US dollars."
    )


class Retry(Part):
    """When and how often a failed attempt is followed by another (contract table, row 9)."""

    max_attempts: int = Field(default=1, ge=1, le=20, description="Most attempts, the first one included.")
    backoff_ms: int = Field(default=0, ge=0, le=60_000, description="Wait before the second attempt, milliseconds.")
    backoff_multiplier: float = Field(
        default=1.0,
        ge=1.0,
        le=100.0,
        allow_inf_nan=False,
        description="Growth of the wait from attempt to attempt.",
    )
    max_backoff_ms: int = Field(default=60_000, ge=0, le=86_400_000, description="Longest wait, milliseconds.")


class Agent(Part):
    """A model with instructions and tools."""

    provider: Text = Field(description="Name of an entry of spec.providers.")
    model: Text = Field(description="Model name as the provider spells it.")
    description: str | None = Field(default=None, description="For people.")
    instructions: Text | None = Field(default=None, description="System text; or use instructionsFile.")
    instructions_file: Text | None = Field(default=None, description="File with the system text.")
    vars: Variables = Field(default_factory=dict, description="Variables of tasks that use this agent.")
    vars_files: list[Text] = Field(default_factory=list, description="Files with variables, the later one wins.")
    tools: Annotated[list[Text], AfterValidator(_unique)] = Field(
        default_factory=list, description="Names of entries of spec.tools that the model may call."
    )
    max_turns: int = Field(default=8, ge=1, le=64, description="Most requests to the model in one attempt.")
    max_tool_calls: int = Field(default=16, ge=0, le=256, description="Most tool calls in one attempt.")
    max_output_tokens: Count = Field(default=2048, description="Most tokens of one response.")
    timeout_seconds: Count = Field(default=120, description="Time limit of one request, seconds.")
    retry: Retry = Field(default_factory=Retry, description="Accepted; the retry of the task is the one that counts.")
    reasoning: Reasoning | None = Field(default=None, description="Amount of reasoning, where supported.")
    structured_output: SchemaValue = Field(default=None, description="JSON Schema of the answer.")
    usage_limit: UsageLimit | None = Field(default=None, description="Limits over all turns of an attempt.")
    stream: bool = Field(default=False, description="Ask for a streamed response.")
    provider_options: JsonMap = Field(default_factory=dict, description="Options of the provider kind.")

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.instructions is None) == (self.instructions_file is None):
            raise problem("an agent has exactly one of instructions and instructionsFile")
        return self


# ---------------------------------------------------------------------- actions, tools


class Container(Part):
    """The container of an action with `isolation: container`."""

    image: Annotated[str, Field(pattern=r"^([^@\s]+@)?sha256:[0-9a-f]{64}$")] = Field(
        description="Image by digest: NAME@sha256:HEX or sha256:HEX."
    )
    runtime: Literal["auto", "docker", "podman"] = Field(default="auto", description="Container engine.")
    memory_limit_bytes: int = Field(
        default=268_435_456, ge=16_777_216, le=17_179_869_184, description="Memory limit in bytes."
    )
    cpu_limit_millis: int = Field(default=1000, ge=1, le=64_000, description="CPU limit, thousandths of a core.")
    pids_limit: int = Field(default=64, ge=1, le=4096, description="Most processes.")


_ENGINE_NAMES = re.compile(
    r"DOCKER_.*|CONTAINER_.*|PODMAN_CONNECTIONS_CONF|HOME|PATH|TMP|TEMP|TMPDIR"
    r"|XDG_CONFIG_HOME|XDG_RUNTIME_DIR"
)
_PROCESS_FIELDS = (
    "command", "args", "cwd", "env", "stdout_limit_bytes", "stderr_limit_bytes", "combined_output_limit_bytes",
    "isolation", "container",
)  # fmt: skip
_SHELL_FIELDS = ("success_exit_codes", "parse", "artifacts")
_EXTENSION_FIELDS = ("protocol_version", "input_schema", "output_schema", "capabilities")


class Action(Part):
    """Something a task can do, without a model."""

    kind: ActionKind = Field(
        description="What the action does. builtin.assign gives back its input; builtin.assert fails unless `that` is "
        "true; builtin.read and builtin.write take a `path`, the latter also the `content`; builtin.shell.exec starts "
        "a program; builtin.memory.read and builtin.memory.write take a `key` of working memory, the latter a `value`."
    )
    description: str | None = Field(default=None, description="For people.")
    with_: JsonMap = Field(
        default_factory=dict, alias="with", description="Defaults of the task input; a task wins key by key."
    )
    idempotency: Idempotency | None = Field(
        default=None, description="What happens when the effect is done twice (mcp.call, processes)."
    )
    command: SystemText | None = Field(default=None, description="Program to start, without a shell (processes).")
    args: list[Annotated[str, AfterValidator(_no_zero_byte)]] = Field(
        default_factory=list, description="Arguments of the program (processes)."
    )
    cwd: SystemText | None = Field(default=None, description="Working directory inside the workspace (processes).")
    env: Annotated[SecretMap, AfterValidator(_variable_names)] = Field(
        default_factory=dict, description="Environment variables from secret references (processes)."
    )
    timeout_seconds: Seconds | None = Field(default=None, description="Time limit; before that of the task, seconds.")
    stdout_limit_bytes: OutputLimit = Field(default=1_048_576, description="Most bytes of standard output.")
    stderr_limit_bytes: OutputLimit = Field(default=1_048_576, description="Most bytes of standard error.")
    combined_output_limit_bytes: OutputLimit = Field(default=2_097_152, description="Most bytes of both.")
    isolation: Literal["process", "container"] = Field(default="process", description="Where the program runs.")
    container: Container | None = Field(default=None, description="Required exactly with isolation: container.")
    protocol_version: Literal["agentctl.dev/process-extension/v1"] | None = Field(
        default=None, description="Protocol of a process extension."
    )
    input_schema: SchemaValue = Field(default=None, description="Input contract of a process extension.")
    output_schema: SchemaValue = Field(default=None, description="Output contract of a process extension.")
    capabilities: Annotated[list[Text], AfterValidator(_unique)] = Field(
        default_factory=list, description="What a process extension says it needs."
    )
    success_exit_codes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=1)] = Field(
        default_factory=lambda: [0], description="Exit codes that mean success (builtin.shell.exec)."
    )
    parse: Literal["json"] | None = Field(
        default=None, description="json: standard output becomes output.json (builtin.shell.exec)."
    )
    artifacts: list[SystemText] = Field(
        default_factory=list, description="Paths or globs that are stored after success (builtin.shell.exec)."
    )

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        given = self.model_fields_set
        process = self.kind in PROCESS_KINDS
        if not process:
            self._forbid(given, _PROCESS_FIELDS, "only a process action has")
            if self.kind not in ("mcp.call", "a2a.delegate"):
                self._forbid(given, ("timeout_seconds",), "only a process action has", "give the task a timeoutSeconds")
            if self.kind != "mcp.call":
                self._forbid(given, ("idempotency",), "only mcp.call and process actions have")
        if self.kind != "builtin.shell.exec":
            self._forbid(given, _SHELL_FIELDS, "only builtin.shell.exec has")
        if self.kind != "extension.process":
            self._forbid(given, _EXTENSION_FIELDS, "only extension.process has")
        elif self.protocol_version is None or self.input_schema is None or self.output_schema is None:
            raise problem("extension.process needs protocolVersion, inputSchema and outputSchema")
        elif self.idempotency is None:
            raise problem("extension.process needs idempotency")
        if process and self.command is None:
            raise problem(f"{self.kind} needs a command")
        if (self.isolation == "container") != (self.container is not None):
            raise problem("container stands exactly where isolation is container")
        if self.container is not None:
            for name in self.env:
                if _ENGINE_NAMES.fullmatch(name):
                    raise problem(f"a container action cannot set {name}", at=("env", name))
        return self

    @staticmethod
    def _forbid(given: set[str], names: Sequence[str], who: str, help_text: str | None = None) -> None:
        for name in names:
            if name in given:
                raise problem(f"{who} {_camel(name)}", at=(_camel(name),), help=help_text)


_TOOL_FACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "builtin.workspace.read": ("filesystem.read", "observe", ("idempotent",)),
    "builtin.workspace.write": ("filesystem.write", "workspace_mutate", ("idempotent", "keyed")),
    "builtin.echo": ("internal", "pure", ("pure",)),
}


class Tool(Part):
    """Something a model may call."""

    kind: Literal["builtin.workspace.read", "builtin.workspace.write", "builtin.echo", "action"] = Field(
        description="What the tool does."
    )
    action: Text | None = Field(default=None, description="Name of an entry of spec.actions, for kind action.")
    description: Text = Field(description="What the model is told.")
    input_schema: dict[str, Any] = Field(description="JSON Schema of the input: a closed object.")
    output_schema: RequiredSchema = Field(description="JSON Schema of the output.")
    capability: Text = Field(description="Name that policy rules use.")
    risk: Risk = Field(description="How much harm a call can do.")
    effect_class: EffectClass = Field(description="What kind of change a call makes.")
    idempotency: Idempotency = Field(description="What happens when a call is done twice.")
    retry_safe: bool = Field(
        description="Whether a new attempt of the task may call it again, whatever `idempotency` says."
    )
    timeout_seconds: Seconds = Field(description="Time limit of a call, seconds.")
    secrets: list[SecretReference] = Field(default_factory=list, description="Secrets that the tool needs.")
    network: list[Text] = Field(default_factory=list, description="Hosts that the tool talks to.")
    approval: Literal["policy", "never", "always"] = Field(
        default="policy", description="always: each call needs a person; never cannot lower the policy."
    )

    @model_validator(mode="after")
    def _facts(self) -> Self:
        if (self.kind == "action") != (self.action is not None):
            raise problem("action stands exactly on a tool of kind action")
        if self.input_schema.get("type") != "object" or self.input_schema.get("additionalProperties") is not False:
            raise problem("inputSchema must have type: object and additionalProperties: false", at=("inputSchema",))
        properties, required = self.input_schema.get("properties", {}), self.input_schema.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list):
            for name in properties:
                if name not in required:
                    raise problem(f"every property must be required; {name!r} is not", at=("inputSchema",))
        facts = _TOOL_FACTS.get(self.kind)
        if facts is not None:
            capability, effect_class, idempotency = facts
            if self.capability != capability:
                raise problem(f"{self.kind} has the capability {capability}", at=("capability",))
            if self.effect_class != effect_class:
                raise problem(f"{self.kind} has the effectClass {effect_class}", at=("effectClass",))
            if self.idempotency not in idempotency:
                raise problem(f"{self.kind} has the idempotency {' or '.join(idempotency)}", at=("idempotency",))
            for name, value in (("secrets", self.secrets), ("network", self.network)):
                if value:
                    raise problem(f"a built-in tool has no {name}", at=(name,), code="unsupported_capability")
        return self


# ---------------------------------------------------------------------- tasks


class Foreach(Part):
    """One child task for each item."""

    items: Items = Field(description="A list, or one template over inputs or vars that gives a list.")
    as_: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        default="item", alias="as", description="Variable that holds the item in each child."
    )
    max_items: int = Field(default=32, ge=1, le=MAX_EXPANSION, description="Most children.")

    @model_validator(mode="after")
    def _free_name(self) -> Self:
        if self.as_ in RESERVED_VARIABLES:
            raise problem(f"the name {self.as_} is reserved for expansion", at=("as",))
        return self


class Matrix(Part):
    """One child task for each combination of axis values."""

    axes: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], Items], Field(min_length=1)] = (
        Field(description="Axis name to its values: a list, or one template that gives a list.")
    )
    max_items: int = Field(default=32, ge=1, le=MAX_EXPANSION, description="Most children.")


class RouteCase(Part):
    """One way out of a router."""

    equals: Any = Field(description="Value of select that chooses this case.")
    tasks: Annotated[list[Text], Field(min_length=1), AfterValidator(_unique)] = Field(
        description="Tasks that then run."
    )


class Route(Part):
    """A choice between tasks."""

    select: Text = Field(description="One template whose value chooses the case.")
    cases: Annotated[list[RouteCase], Field(min_length=1)] = Field(description="The cases.")
    default: list[Text] = Field(default_factory=list, description="Tasks that run when no case fits.")


class Loop(Part):
    """Bounded repetition of a task."""

    max_iterations: int = Field(ge=1, le=1000, description="Most iterations.")
    while_: Text = Field(alias="while", description="One template: go on while it is true.")
    initial: Any = Field(default=None, description="loopPrevious of the first iteration.")


class Compensate(Part):
    """What undoes a task."""

    uses: Annotated[str, Field(pattern=r"^action:.+$")] = Field(description="action:NAME")
    with_: JsonMap = Field(default_factory=dict, alias="with", description="Input of the compensation.")
    retry: Retry = Field(default_factory=Retry, description="Retry policy of the compensation.")
    timeout_seconds: Seconds | None = Field(default=None, description="Time limit, seconds.")


def _uses(value: str) -> str:
    if value == "router":
        return value
    kind, colon, name = value.partition(":")
    if kind == "team" and colon:
        raise problem("teams are not supported", code="unsupported_capability", help="use action:NAME or agent:NAME")
    if not colon or not name or kind not in ("action", "agent", "workflow"):
        raise problem(
            f"{value!r} names nothing that a task can use",
            help="action:NAME, agent:NAME, workflow:NAME or router",
        )
    return value


class Task(Part):
    """One node of the workflow."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=200)] = Field(
        description="Unique name: a letter, then letters, digits, _ and -."
    )
    uses: Annotated[
        str,
        AfterValidator(_uses),
        WithJsonSchema({"type": "string", "pattern": "^(router|(action|agent|workflow):.+)$"}),
    ] = Field(description="What runs: action:NAME, agent:NAME, workflow:NAME or router.")
    needs: list[Text] = Field(default_factory=list, description="Tasks that must have ended before.")
    foreach: Foreach | None = Field(default=None, description="One child for each item of a list.")
    matrix: Matrix | None = Field(default=None, description="One child for each combination of axis values.")
    route: Route | None = Field(default=None, description="The choice of a router task.")
    loop: Loop | None = Field(default=None, description="Bounded repetition.")
    memory_writes: Annotated[list[Text], Field(min_length=1), AfterValidator(_unique)] | None = Field(
        default=None,
        description="Working-memory keys that the task may write; needed where its key is a template.",
    )
    when: str | None = Field(
        default=None,
        description='Condition such as inputs.stage == "test"; the task is skipped when it is false. '
        "A task whose output it reads stands in needs.",
    )
    vars: Variables = Field(default_factory=dict, description="Variables of this task; templates are rendered once.")
    vars_files: list[Text] = Field(
        default_factory=list, description="Files with variables of this task, the later one wins; data."
    )
    with_: JsonMap = Field(
        default_factory=dict,
        alias="with",
        description="Input; templates such as ${{ inputs.NAME }}, ${{ vars.NAME }} and ${{ tasks.ID.output.KEY }} are "
        "rendered. It wins over the `with` of the action, key by key. For builtin.shell.exec: args, stdin, env, cwd.",
    )
    retry: Retry = Field(default_factory=Retry, description="Retry policy.")
    timeout_seconds: Seconds | None = Field(
        default=None,
        description="Time limit of an attempt, seconds; runtime.defaultTimeoutSeconds otherwise.",
    )
    failure: Literal["stop", "continue"] = Field(
        default="stop", description="stop: a failure ends the run; continue: only descendants are skipped."
    )
    compensate: Compensate | None = Field(default=None, description="What undoes the task.")
    output_schema: SchemaValue = Field(default=None, description="JSON Schema of the output.")

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        shapes = [name for name in ("foreach", "matrix", "loop") if getattr(self, name) is not None]
        if len(shapes) > 1:
            raise problem(f"a task has only one of {' and '.join(shapes)}", at=(shapes[1],))
        if self.uses == "router":
            if self.route is None:
                raise problem("a router needs a route")
            if shapes:
                raise problem(f"a router cannot have {shapes[0]}", at=(shapes[0],))
        elif self.route is not None:
            raise problem("only a router has a route", at=("route",), help="uses: router")
        if self.loop is not None and self.when is not None:
            raise problem("a task with a loop cannot have when", at=("when",))
        if self.uses.startswith("workflow:"):
            for name in sorted(self.model_fields_set - {"id", "uses", "needs", "with_", "failure"}):
                raise problem("a call of a sub-workflow takes only needs, with and failure", at=(_alias(name),))
        return self


def _alias(name: str) -> str:
    return name[:-1] if name.endswith("_") else _camel(name)


_NUMBER = "(0|[1-9][0-9]*)"
_PRE_RELEASE = f"({_NUMBER}|[0-9]*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = rf"^{_NUMBER}\.{_NUMBER}\.{_NUMBER}(-{_PRE_RELEASE}(\.{_PRE_RELEASE})*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?$"
"""Semantic Versioning 2.0.0, in ASCII."""


class Subworkflow(Part):
    """Tasks that can be called as one task."""

    version: Annotated[str, Field(pattern=_SEMVER)] = Field(description="Semantic version, MAJOR.MINOR.PATCH.")
    inputs: JsonMap = Field(default_factory=dict, description="Default inputs.")
    input_schema: RequiredSchema = Field(description="JSON Schema of the inputs.")
    outputs: JsonMap = Field(default_factory=dict, description="Templates of the outputs.")
    output_schema: RequiredSchema = Field(description="JSON Schema of the outputs.")
    tasks: Annotated[list[Task], Field(min_length=1)] = Field(description="The tasks.")


# ---------------------------------------------------------------------- policy, runtime


def _both_schemes() -> list[Literal["https", "http"]]:
    return ["https", "http"]


class Network(Part):
    """Rules for connections of effects."""

    allowed_schemes: Annotated[list[Literal["https", "http"]], Field(min_length=1), AfterValidator(_unique)] = Field(
        default_factory=_both_schemes, description="URL schemes that are allowed."
    )
    allowed_ports: list[Annotated[int, Field(ge=1, le=65_535)]] = Field(
        default_factory=list, description="Ports that are allowed; empty: all."
    )
    allow_private: bool = Field(default=False, description="Allow private, loopback and reserved addresses.")
    allow_proxy: bool = Field(default=False, description="Allow a proxy from the environment.")
    custom_ca: SecretReference | None = Field(default=None, description="Certificate authority to trust.")
    connect_timeout_seconds: int = Field(default=10, ge=1, le=120, description="Time limit to connect, seconds.")
    max_response_bytes: int = Field(default=8_388_608, ge=1, le=67_108_864, description="Largest response in bytes.")


class Policy(Part):
    """What effects may do. The defaults allow no write, no process and no network."""

    workspace_root: SystemText = Field(default=".", description="Root of all paths, relative to the workflow's folder.")
    writable_roots: list[SystemText] = Field(
        default_factory=list, description="Folders for writes; empty: no write at all."
    )
    environment_allowlist: list[Text] = Field(default_factory=list, description="Names that a process may get.")
    network_allowlist: list[Text] = Field(default_factory=list, description="Hosts: exact, or *.suffix; empty: none.")
    network: Network = Field(default_factory=Network, description="Rules for connections.")
    process_allowlist: list[Text] = Field(default_factory=list, description="Basenames of programs that may start.")
    secret_file_roots: list[SystemText] = Field(default_factory=list, description="Folders for file secrets.")
    secret_process_allowlist: list[Text] = Field(default_factory=list, description="Basenames for process secrets.")
    providers: list[Text] = Field(default_factory=list, description="Providers that may be used; empty: all.")
    tools_allow: list[Text] = Field(default_factory=list, description="Policy names that may be used; empty: all.")
    tools_deny: list[Text] = Field(default_factory=list, description="Policy names that are denied; wins.")
    approval: Literal["never", "mutations", "high_risk", "always"] = Field(
        default="mutations", description="Which effects a person must approve."
    )
    non_interactive: Literal["pause", "deny_approval", "fail"] = Field(
        default="pause", description="What an approval does where nobody can be asked."
    )
    max_artifact_bytes: Count = Field(default=1_073_741_824, description="Largest artifact in bytes.")


class Budgets(Part):
    """Limits of a run; absent means no limit."""

    max_provider_requests: Count | None = Field(default=None, description="Requests to model providers.")
    max_turns: Count | None = Field(default=None, description="Turns of agents.")
    max_tool_calls: Count | None = Field(default=None, description="Tool calls of models.")
    max_input_tokens: Count | None = Field(default=None, description="Input tokens.")
    max_output_tokens: Count | None = Field(default=None, description="Output tokens.")
    max_total_tokens: Count | None = Field(default=None, description="Input and output tokens.")
    max_wall_time_seconds: Count | None = Field(default=None, description="Seconds since the run was created.")
    max_process_output_bytes: Count | None = Field(default=None, description="Bytes that processes print.")
    max_artifact_bytes: Count | None = Field(default=None, description="Bytes of artifacts.")
    max_tasks: Count | None = Field(default=None, description="Tasks of the plan.")
    max_expansion_items: Count | None = Field(default=None, description="Children of expansions.")
    max_loop_iterations: Count | None = Field(default=None, description="Declared loop iterations.")
    max_cost_microusd: Count | None = Field(
        default=None, alias="maxCostMicrousd", description="Millionths of a US dollar."
    )


class ModelPrice(Part):
    """Millionths of a US dollar for a million tokens."""

    input: Count = Field(alias="inputMicrousdPerMillionTokens", description="Price of input.")
    output: Count = Field(alias="outputMicrousdPerMillionTokens", description="Price of output.")
    reasoning: Count | None = Field(
        default=None,
        alias="reasoningMicrousdPerMillionTokens",
        description="Price of reasoning; as output otherwise.",
    )
    cache_read: Count | None = Field(
        default=None,
        alias="cacheReadMicrousdPerMillionTokens",
        description="Price of cache reads; as input otherwise.",
    )
    cache_write: Count | None = Field(
        default=None,
        alias="cacheWriteMicrousdPerMillionTokens",
        description="Price of cache writes; as input otherwise.",
    )


class Pricing(Part):
    """Prices of models."""

    version: Text = Field(description="Name of this price list.")
    models: Annotated[dict[str, ModelPrice], Field(min_length=1)] = Field(description="Price by PROVIDER/MODEL.")

    @model_validator(mode="after")
    def _names(self) -> Self:
        for name in self.models:
            if "/" not in name.strip("/") or name != name.strip("/"):
                raise problem("the key of a price is PROVIDER/MODEL", at=("models", name))
        return self


class Runtime(Part):
    """How a run is driven."""

    max_concurrency: int = Field(default=1, ge=1, le=4096, description="Most tasks in flight at a time.")
    max_deliveries: int = Field(
        default=3, ge=1, le=1000, description="Most hand-overs of one attempt to workers that die."
    )
    default_timeout_seconds: Seconds = Field(default=120, description="Time limit of tasks without one, seconds.")
    budgets: Budgets = Field(default_factory=Budgets, description="Limits of a run.")
    pricing: Pricing | None = Field(default=None, description="Prices of models.")

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.budgets.max_cost_microusd is not None and self.pricing is None:
            raise problem("maxCostMicrousd needs runtime.pricing", at=("budgets", "maxCostMicrousd"))
        return self


class Embedding(Part):
    """How long-term memory is made searchable by meaning."""

    provider: Text = Field(default="local_hash", description="local_hash, or an entry of spec.providers.")
    model: Text | None = Field(default=None, description="Embedding model.")
    dimensions: int = Field(default=64, ge=8, le=4096, description="Length of the vectors.")


class LongTerm(Part):
    """Memory that outlives a run."""

    provider: Literal["sqlite"] = Field(default="sqlite", description="Where it is kept.")
    namespace: Text = Field(default="default", description="Namespace of keys.")
    retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = Field(
        default=None, description="Days after which entries end; absent: never."
    )
    embedding: Embedding = Field(default_factory=Embedding, description="How entries are made searchable.")


class Memory(Part):
    """Working memory of a run and long-term memory."""

    working: JsonMap = Field(default_factory=dict, description="Initial working memory.")
    long_term: LongTerm | None = Field(default=None, description="Long-term memory.")


class McpServer(Part):
    """A server of tools."""

    url: Text = Field(description="Address.")
    headers: HeaderMap = Field(default_factory=dict, description="Request headers.")
    timeout_seconds: Seconds = Field(default=120, description="Time limit of a call, seconds.")
    protocol_version: Text = Field(default="2025-11-25", description="Protocol version.")


class A2aPeer(Part):
    """A remote agent."""

    card_url: Text = Field(description="Address of the agent card.")
    headers: HeaderMap = Field(default_factory=dict, description="Request headers.")
    timeout_seconds: Seconds = Field(default=120, description="Time limit of a request, seconds.")
    max_polls: int = Field(default=100, ge=1, le=1000, description="Most polls of a remote task.")
    poll_interval_ms: int = Field(default=100, ge=1, le=60_000, description="Time between polls, milliseconds.")
    protocol_version: Text = Field(default="1.0", description="Protocol version.")


class PackReference(Part):
    """A pack of reusable definitions."""

    name: Text = Field(description="Name of the pack.")
    version: Text = Field(description="Version of the pack.")
    source: str | None = Field(default=None, description="Where it comes from.")
    signature: str | None = Field(default=None, description="Signature.")
    path: str | None = Field(default=None, description="Local path.")
    integrity: str | None = Field(default=None, description="Digest.")


class PackIdentity(Part):
    """Who may sign packs."""

    identity: Text = Field(description="Identity of the signer.")
    issuer: Text = Field(description="Who vouches for the identity.")


class PackTrust(Part):
    """Which packs are trusted."""

    unsigned: Literal["deny", "warn", "allow"] = Field(default="warn", description="What an unsigned pack does.")
    identities: list[PackIdentity] = Field(default_factory=list, description="Trusted signers.")
    allow_unsigned_process: bool = Field(default=False, description="Allow processes of unsigned packs.")


class Compensation(Part):
    """How compensation of a failed run starts."""

    on_failure: Literal["manual", "automatic"] = Field(default="manual", description="Who starts it.")
    approval: Literal["policy", "never", "always"] = Field(default="policy", description="Approval of its effects.")


class OutputOptions(Part):
    """Presentation only."""

    verbose: bool = Field(default=False, description="Print more, as --verbose does.")
    show_diff: bool = Field(default=True, description="Show a diff of each write that waits for an approval.")


class Spec(Part):
    """What the workflow does."""

    vars_files: list[Text] = Field(default_factory=list, description="Files with variables, the later one wins.")
    vars: Variables = Field(default_factory=dict, description="Variables of all tasks; values are data.")
    inputs: JsonMap = Field(default_factory=dict, description="Defaults of run inputs; a run wins key by key.")
    outputs: JsonMap = Field(default_factory=dict, description="Templates of the run's output.")
    providers: dict[Text, Provider] = Field(default_factory=dict, description="Model services by name.")
    agents: dict[Text, Agent] = Field(default_factory=dict, description="Agents by name.")
    actions: dict[Text, Action] = Field(default_factory=dict, description="Actions by name.")
    tools: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")], Tool] = Field(
        default_factory=dict, description="Tools of agents by name."
    )
    subworkflows: dict[Text, Subworkflow] = Field(default_factory=dict, description="Sub-workflows by name.")
    compensation: Compensation = Field(default_factory=Compensation, description="How compensation starts.")
    tasks: Annotated[list[Task], Field(min_length=1)] = Field(description="The tasks.")
    policy: Policy = Field(default_factory=Policy, description="What effects may do.")
    memory: Memory = Field(default_factory=Memory, description="Memory.")
    mcp_servers: dict[Text, McpServer] = Field(default_factory=dict, description="Tool servers by name.")
    a2a_peers: dict[Text, A2aPeer] = Field(default_factory=dict, alias="a2aPeers", description="Remote agents by name.")
    packs: list[PackReference] = Field(default_factory=list, description="Packs.")
    pack_trust: PackTrust = Field(default_factory=PackTrust, description="Which packs are trusted.")
    runtime: Runtime = Field(default_factory=Runtime, description="How a run is driven.")
    output: OutputOptions = Field(default_factory=OutputOptions, description="Presentation.")


class Metadata(Part):
    """Name and notes."""

    name: Text = Field(description="Name of the workflow.")
    description: str | None = Field(default=None, description="For people.")
    labels: dict[str, str] = Field(default_factory=dict, description="Free labels.")


class Workflow(Part):
    """A workflow document."""

    api_version: Literal["agentctl.dev/v1"] = Field(description="Version of the document format.")
    kind: Literal["Workflow"] = Field(description="Always Workflow.")
    metadata: Metadata = Field(description="Name and notes.")
    spec: Spec = Field(description="What the workflow does.")


# ---------------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True)
class LoadedDocument:
    """A document that passed the model.

    `workflow` is its JSON with every default filled in (what the workflow digest is taken over), `source`
    gives places in the file, `base_dir` is the folder that relative paths start from, `variables` is what was
    captured for it (None: nobody has looked yet). Nobody changes any of it.
    """

    file: str
    base_dir: FilePath
    model: Workflow
    workflow: dict[str, Any]
    source: YamlDocument
    warnings: list[Diagnostic] = field(default_factory=list)
    variables: Captured | None = None


def load_workflow(path: FilePath) -> LoadedDocument:
    """Read and check a workflow file. Raises `DocumentError` with all findings."""
    return document_from_source(read_document(path), base_dir=path.absolute().parent)


def document_from_source(source: YamlDocument, *, base_dir: FilePath) -> LoadedDocument:
    """Check a document that was read already. Raises `DocumentError` with all findings."""
    value, warnings = _check_version(source)
    try:
        with collector_paused():
            model = Workflow.model_validate(value)
    except ValidationError as error:
        # To say what is wrong, and what to do, costs far more than to find it: only what is shown is put into words.
        wrong = nsmallest(MAX_DIAGNOSTICS, error.errors(include_url=False), lambda item: source.locate(item["loc"]))
        more = error.error_count() - len(wrong)
        raise DocumentError([_diagnostic(source, item) for item in wrong], more=more) from None
    for place, what, value, hint in _data(model.spec):
        if has_template(value):
            message = f"{what} is data; the template in it is not rendered"
            warnings.append(source.diagnostic("invalid_template", message, place, help=hint, severity="warning"))
    return LoadedDocument(source.file, base_dir, model, model.model_dump(by_alias=True), source, warnings)


def _data(spec: Spec) -> Iterator[tuple[Path, str, Any, str]]:
    """What people take for a place of templates although nothing is rendered there: place, name, value and hint."""
    variable, in_task = "the value of the variable", "write it into the vars or the with of a task"
    named: list[tuple[Path, JsonMap, str, str]] = [(("spec", "vars"), spec.vars, variable, in_task)]
    named += [(("spec", "agents", name, "vars"), agent.vars, variable, in_task) for name, agent in spec.agents.items()]
    named.append((("spec", "inputs"), spec.inputs, "the default of the input", "write it where the input is read"))
    by_task = "let a task write it, with builtin.memory.write"
    named.append((("spec", "memory", "working"), spec.memory.working, "the initial value of the memory key", by_task))
    for path, values, what, hint in named:
        for name, value in values.items():
            yield (*path, name), f"{what} {name}", value, hint
    for name, action in spec.actions.items():
        elsewhere = "`with` of a task" if action.kind == "builtin.shell.exec" else "input of the extension"
        for field_name in ("command", "args", "cwd", "artifacts"):
            hint = f"give it in the {elsewhere}" if field_name != "command" else "declare an action for each program"
            place: Path = ("spec", "actions", name, field_name)
            yield place, f"what stands in {field_name} of an action", getattr(action, field_name), hint
    groups: list[tuple[Path, list[Task]]] = [(("spec", "tasks"), spec.tasks)]
    groups += [(("spec", "subworkflows", name, "tasks"), sub.tasks) for name, sub in spec.subworkflows.items()]
    hint = "write the value; what changes stands in `select`"
    for path, tasks in groups:
        for index, task in enumerate(tasks):
            for at, case in enumerate(task.route.cases if task.route is not None else ()):
                place = (*path, index, "route", "cases", at, "equals")
                yield place, "what a case is compared with", case.equals, hint


def document_schema() -> dict[str, Any]:
    """JSON Schema (Draft 2020-12) of a workflow document, for editors."""
    schema = Workflow.model_json_schema(by_alias=True)
    parts = schema["$defs"]
    for part in (schema, *parts.values()):
        for rule in part.get("properties", {}).values():
            # Left out by the generator where it is that of the model as well; not every editor follows the reference.
            if "$ref" in rule and "description" not in rule:
                rule["description"] = parts[rule["$ref"].rpartition("/")[2]]["description"]
        if "vars" in part.get("properties", {}):
            part["properties"]["vars"]["propertyNames"] = {"not": {"enum": sorted(RESERVED_VARIABLES)}}
    parts["Task"]["allOf"] = _task_rules()
    parts["Foreach"]["properties"]["as"]["not"] = {"enum": sorted(RESERVED_VARIABLES)}
    del schema["title"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "agentctl workflow", **schema}


def _task_rules() -> list[dict[str, Any]]:
    """What fields of a task exclude or want one another, as far as JSON Schema can say it. `null` is like left out."""
    shapes = ("foreach", "matrix", "loop")
    kinds = {**dict.fromkeys(shapes, "object"), "when": "string"}
    pairs = [("foreach", "matrix"), ("foreach", "loop"), ("matrix", "loop"), ("loop", "when")]
    rules: list[dict[str, Any]] = [
        {"not": {"required": list(pair), "properties": {name: {"type": kinds[name]} for name in pair}}}
        for pair in pairs
    ]
    router = {"route": {"type": "object"}, "with": {"maxProperties": 0}}
    rules.append(
        {
            "if": {"properties": {"uses": {"const": "router"}}},
            "then": {"required": ["route"], "properties": {**router, **{key: {"type": "null"} for key in shapes}}},
            "else": {"properties": {"route": {"type": "null"}}},
        }
    )
    rules.append(
        {
            "if": {"properties": {"uses": {"type": "string", "pattern": "^workflow:"}}, "required": ["uses"]},
            "then": {"propertyNames": {"enum": ["id", "uses", "needs", "with", "failure"]}},
        }
    )
    return rules


def _check_version(source: YamlDocument) -> tuple[dict[str, Any], list[Diagnostic]]:
    value = source.value
    if not isinstance(value, dict):
        raise DocumentError([source.diagnostic("schema_violation", "a workflow is a mapping", ())])
    if "apiVersion" not in value:
        if "playbook" in value:
            message = (
                "this is a playbook of an old format: it has `playbook` and no apiVersion; "
                "such documents are not translated"
            )
            hint = f"write it anew with apiVersion: {API_VERSION}; `agentctl init` makes a file to start from"
            raise DocumentError([source.diagnostic("migration_required", message, ("playbook",), key=True, help=hint)])
        line, column = source.locate(())
        raise DocumentError(
            [Diagnostic("migration_required", "the document has no apiVersion", file=source.file, line=line,
                        column=column, path="apiVersion", help=f"write apiVersion: {API_VERSION}")]
        )  # fmt: skip
    found: list[Diagnostic] = []
    spec = value.get("spec")
    for path, holder in ((("sourceSnapshot",), value), (("spec", "sourceSnapshot"), spec)):
        if isinstance(holder, dict) and "sourceSnapshot" in holder:
            message = "sourceSnapshot belongs to captured run state and cannot stand in a document"
            found.append(source.diagnostic("schema_violation", message, path, key=True, help="remove it"))
    if found:
        raise DocumentError(found)
    version = value["apiVersion"]
    if version == API_VERSION:
        return value, []
    if version == OLD_API_VERSION:
        message = f"{OLD_API_VERSION} is an old name of this format"
        warning = source.diagnostic(
            "unsupported_version", message, ("apiVersion",), help=f"write {API_VERSION}", severity="warning"
        )
        return {**value, "apiVersion": API_VERSION}, [warning]
    message = f"apiVersion {version!r} is not supported"
    raise DocumentError(
        [source.diagnostic("unsupported_version", message, ("apiVersion",), help=f"write {API_VERSION}")]
    )


# ---------------------------------------------------------------------- findings

_MESSAGES = {
    "missing": "is required",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is out of range",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}

_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "too_short": ("min_length", "must not be empty: it needs {} or more"),
}
"""Limits of numbers and lists: where the limit stands in a finding, and how it is told."""


def _diagnostic(source: YamlDocument, error: ErrorDetails) -> Diagnostic:
    kind, context = error["type"], error.get("ctx") or {}
    on_key = error["loc"] and error["loc"][-1] == "[key]"
    path: tuple[str | int, ...] = error["loc"][:-1] if on_key else error["loc"]
    code, help_text = "schema_violation", None
    owners = _models_along(path)
    name = "document" if not path else "the entry" if isinstance(path[-1], int) else str(path[-1])
    value = error["input"]
    if kind == "agentctl":
        path = (*path, *context["at"])
        code, help_text = context["code"], context["help"]
        message = context["message"]
    elif kind == "extra_forbidden":
        message = f"unknown field {name!r}"
        known = [item.alias or key for key, item in owners[-1].model_fields.items()] if owners else []
        help_text = did_you_mean(name, known, else_list="fields here")
        on_key = True
    elif kind == "literal_error":
        words = _literal_words(context)
        message = f"{name} must be one of {', '.join(words)}"
        if isinstance(value, str):
            help_text = did_you_mean(value, words)
    elif kind in _MESSAGES:
        message = f"{name} {_MESSAGES[kind]}"
        if kind == "string_type":
            help_text = _form(owners, name) or _quote_hint(value)
        elif kind != "missing" and isinstance(value, str):
            help_text = _bare_hint(kind, value, name)
            if owners[-1:] == [SecretReference] and path[:2] == ("spec", "actions"):
                help_text = "here stand secrets: {env: NAME}; a plain text goes into `env` in the `with` of the task"
    elif kind in _BOUNDS:
        limit, told = _BOUNDS[kind]
        message = f"{name} {told.format(context.get(limit))}"
    elif kind == "string_pattern_mismatch":
        message = f"{name} does not have the right form"
        help_text = _form(owners, name) or f"it must match {context.get('pattern')}"
    else:
        message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    if any(owner in (SecretReference, SecretProcess) for owner in owners):
        code = "invalid_secret_reference"
    return source.diagnostic(code, message, path, help=help_text, key=bool(on_key))


_FORMS: dict[tuple[type[BaseModel], str], str] = {
    (Task, "when"): 'write a condition, such as inputs.stage == "test"; without when the task always runs',
    (Loop, "while"): "write a condition as one template, such as ${{ loop.output.more }}",
    (Route, "select"): "write what is looked at as one template, such as ${{ inputs.stage }}",
    (Subworkflow, "version"): "write MAJOR.MINOR.PATCH, such as 1.0.0",
    (Task, "id"): "a letter comes first, then letters, digits, _ and -",
    (Task, "uses"): "write action:NAME, workflow:NAME or router",
    (Foreach, "as"): "a letter or _ comes first, then letters, digits and _",
}
"""What fields look like whose values, put into quotes, would be wrong still."""


def _form(owners: Sequence[type[BaseModel]], name: str) -> str | None:
    return _FORMS.get((owners[-1], name)) if owners else None


def _quote_hint(value: Any) -> str | None:
    if value is None:
        return 'write text, or "" for empty text'
    if isinstance(value, (bool, int, float)):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        return f'quote it: "{shown}"'
    return None


def _bare_hint(kind: str, text: str, name: str) -> str | None:
    """What to write instead of a text where a number, a truth value or a list stands."""
    if kind == "list_type":
        return f"write a list: {name}: [{text if re.fullmatch(r'[A-Za-z0-9_-]{1,64}', text) else '…'}]"
    if kind == "bool_type":
        return "remove the quotes" if text in ("true", "false") else "write true or false"
    if kind not in ("int_type", "float_type"):
        return None
    try:
        float(text)
    except ValueError:
        return "write the number alone, without a unit or other text"
    return "remove the quotes"


def _literal_words(context: Mapping[str, Any]) -> list[str]:
    return re.findall(r"'([^']*)'", str(context.get("expected", "")))


def _models_along(path: Sequence[str | int]) -> list[type[BaseModel]]:
    """The models that a path runs through, from the root; the last one holds the last field."""
    models: list[type[BaseModel]] = [Workflow]
    annotation: Any = Workflow
    for part in path:
        current = _without_extras(annotation)
        if isinstance(current, type) and issubclass(current, BaseModel):
            if current is not models[-1]:
                models.append(current)
            for key, item in current.model_fields.items():
                if (item.alias or key) == part:
                    annotation = item.annotation
                    break
            else:
                return models
        elif typing.get_origin(current) in (dict, list):
            annotation = typing.get_args(current)[-1]
        else:
            return models
    current = _without_extras(annotation)
    if isinstance(current, type) and issubclass(current, BaseModel) and current in (SecretReference, SecretProcess):
        models.append(current)
    return models


def _without_extras(annotation: Any) -> Any:
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin is typing.Union or origin is UnionType:
            annotation = next(item for item in typing.get_args(annotation) if item is not type(None))
        else:
            return annotation
