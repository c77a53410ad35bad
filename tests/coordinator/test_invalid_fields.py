"""The bounds and shapes of every part of a document (contract 1.3 to 1.9), and of tools (2.12): code, path, place.

The mark § stands where the finding is; it is taken out before the document is read.
"""
# ruff: noqa: E501 - a table reads best with one case a line

from __future__ import annotations

from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.diagnostics import CODES, DocumentError

HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"
REST = "  actions: {set: {kind: builtin.assign}, sh: {kind: builtin.shell.exec, command: /bin/true}, read: {kind: builtin.read}}\n  tasks: [{id: a, uses: action:set}]\n"
PROVIDER = "providers: {p: {kind: fake}}\n  "
SHA = "sha256:" + "a" * 64

TOOL = "kind: builtin.workspace.read, description: d, inputSchema: {type: object, additionalProperties: false}, outputSchema: {}, capability: filesystem.read, risk: low, effectClass: observe, idempotency: idempotent, retrySafe: true, timeoutSeconds: 5"
EXTENSION = "kind: extension.process, command: x, idempotency: pure, inputSchema: {}, outputSchema: {}, protocolVersion: agentctl.dev/process-extension/v1"


def tool(**changes: str) -> str:
    """A tool of the document with some fields written otherwise."""
    text = TOOL
    for name, value in changes.items():
        start = text.index(f"{name}: ")
        end = text.find(", ", start) if name not in ("inputSchema",) else text.index(", outputSchema")
        text = text[:start] + f"{name}: {value}" + (text[end:] if end >= 0 else "")
    return f"tools: {{t: {{{text}}}}}"


CASES = [
    # providers and agents
    ("schema_violation", "spec.providers.p.kind", "providers: {p: {kind: §gpt}}"),
    ("schema_violation", "spec.providers.p.kind", "providers: {p: §{endpoint: 'http://x'}}"),
    *[
        ("schema_violation", f"spec.{place}.{field}", f"{place.split('.')[0]}: {{p: {{{kind}{field}: §{url}}}}}")
        for place, field, kind in (
            ("providers.p", "endpoint", "kind: openai_compatible, "),
            ("mcpServers.p", "url", ""),
            ("a2aPeers.p", "cardUrl", ""),
        )
        for url in ("ftp://h", "http://u:p@h", "http://h:99999", "http://h:0", "h", "'http://h /'")
    ],
    *[
        ("schema_violation", f"spec.{place}.p.headers.{name}", f"{place}: {{p: {{{rest}, headers: {{{text}: §{{env: K}}}}}}}}")
        for place, rest in (
            ("providers", "kind: openai"),
            ("mcpServers", "url: http://h"),
            ("a2aPeers", "cardUrl: http://h"),
        )
        for name, text in (
            ("Content-Length", "Content-Length"),
            ("transfer-encoding", "transfer-encoding"),
            ("Connection", "Connection"),
            ("Host", "Host"),
            ("X Y", "'X Y'"),
            ("Ümlaut", "Ümlaut"),
        )
    ],
    ("schema_violation", "spec.providers.p.headers.x-a", "providers: {p: {kind: openai, headers: {X-A: {env: K}, x-a: §{env: K}}}}"),
    ("schema_violation", "spec.agents.g", PROVIDER + "agents: {g: §{provider: p, model: m, instructions: a, instructionsFile: b}}"),
    ("schema_violation", "spec.agents.g.maxTurns", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, maxTurns: §65}}"),
    ("schema_violation", "spec.agents.g.maxToolCalls", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, maxToolCalls: §257}}"),
    ("schema_violation", "spec.agents.g.maxOutputTokens", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, maxOutputTokens: §0}}"),
    ("schema_violation", "spec.agents.g.reasoning.effort", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, reasoning: {effort: §huge}}}"),
    ("schema_violation", "spec.agents.g.tools[1]", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, tools: [t, §t]}}"),
    ("schema_violation", "spec.agents.g.usageLimit.maxCostUsd", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, usageLimit: {maxCostUsd: §0.0}}}"),
    ("schema_violation", "spec.agents.g.structuredOutput", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, structuredOutput: §{type: objekt}}}"),
    ("schema_violation", "spec.agents.g.vars.loopIndex", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, vars: {loopIndex: §1}}}"),
    ("missing_reference", "spec.agents.g.tools[0]", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, tools: [§t]}}"),
    ("unsupported_capability", "spec.agents.g.usageLimit", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, usageLimit: §{maxCostUsd: 1.5}}}"),
    ("unsupported_capability", "spec.agents.g.providerOptions.store", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, providerOptions: {store: §false}}}"),
    ("unsupported_capability", "spec.agents.g.providerOptions.delayMs", PROVIDER + "agents: {g: {provider: p, model: m, instructions: a, providerOptions: {delayMs: §-1}}}"),
    ("unsupported_capability", "spec.agents.g.providerOptions.store", "providers: {p: {kind: openai}}\n  " + tool() + "\n  agents: {g: {provider: p, model: m, instructions: a, tools: [t], providerOptions: {store: §false}}}"),
    ("unsupported_capability", "spec.agents.g.stream", "providers: {p: {kind: anthropic}}\n  agents: {g: {provider: p, model: m, instructions: a, stream: §true}}"),
    # tools
    ("schema_violation", "spec.tools.t.capability", tool(capability="§filesystem.write")),
    ("schema_violation", "spec.tools.t.effectClass", tool(effectClass="§workspace_mutate")),
    ("schema_violation", "spec.tools.t.idempotency", tool(idempotency="§pure")),
    ("schema_violation", "spec.tools.t.risk", tool(risk="§none")),
    ("schema_violation", "spec.tools.t.inputSchema", tool(inputSchema="§{type: object}")),
    ("schema_violation", "spec.tools.t.inputSchema", tool(inputSchema="§{type: array, additionalProperties: false}")),
    ("schema_violation", "spec.tools.t.inputSchema", tool(inputSchema="§{type: object, additionalProperties: false, properties: {x: {}}}")),
    ("schema_violation", "spec.tools.t.inputSchema", tool(inputSchema="§{type: object, additionalProperties: false, minProperties: many}")),
    ("schema_violation", "spec.tools.t.timeoutSeconds", tool(timeoutSeconds="§86401")),
    ("schema_violation", "spec.tools.t", f"tools: {{t: §{{{TOOL}, action: set}}}}"),
    ("schema_violation", "spec.tools.t.compensation", f"tools: {{t: {{{TOOL}, §compensation: x}}}}"),
    ("unsupported_capability", "spec.tools.t.secrets", f"tools: {{t: {{{TOOL}, secrets: §[{{env: A}}]}}}}"),
    ("unsupported_capability", "spec.tools.t.network", f"tools: {{t: {{{TOOL}, network: §[x.test]}}}}"),
    ("missing_reference", "spec.tools.t.action", f"tools: {{t: {{{TOOL.replace('builtin.workspace.read', 'action')}, action: §gone}}}}"),
    ("schema_violation", "spec.tools.1t", f"tools: {{§1t: {{{TOOL}}}}}"),
    # actions
    ("schema_violation", "spec.actions.x.kind", "actions: {x: {kind: §builtin.exec}}"),
    ("schema_violation", "spec.actions.x", "actions: {x: §{kind: builtin.shell.exec}}"),
    ("schema_violation", "spec.actions.x", "actions: {x: §{kind: extension.process, command: x}}"),
    ("schema_violation", "spec.actions.x", f"actions: {{x: §{{{EXTENSION.replace('idempotency: pure, ', '')}}}}}"),
    ("schema_violation", "spec.actions.x.protocolVersion", f"actions: {{x: {{{EXTENSION.replace('agentctl.dev/process-extension/v1', '§v2')}}}}}"),
    ("schema_violation", "spec.actions.x.capabilities[1]", f"actions: {{x: {{{EXTENSION}, capabilities: [a, §a]}}}}"),
    ("schema_violation", "spec.actions.x.capabilities[0]", f"actions: {{x: {{{EXTENSION}, capabilities: [§'']}}}}"),
    ("schema_violation", "spec.actions.x.inputSchema", f"actions: {{x: {{{EXTENSION.replace('inputSchema: {}', 'inputSchema: §{type: objekt}')}}}}}"),
    ("schema_violation", "spec.actions.x.stdoutLimitBytes", "actions: {x: {kind: builtin.shell.exec, command: x, stdoutLimitBytes: §16777217}}"),
    ("schema_violation", "spec.actions.x.combinedOutputLimitBytes", "actions: {x: {kind: builtin.shell.exec, command: x, combinedOutputLimitBytes: §0}}"),
    ("schema_violation", "spec.actions.x.successExitCodes[0]", "actions: {x: {kind: builtin.shell.exec, command: x, successExitCodes: [§256]}}"),
    ("schema_violation", "spec.actions.x.successExitCodes", "actions: {x: {kind: builtin.shell.exec, command: x, successExitCodes: §[]}}"),
    ("schema_violation", "spec.actions.x", "actions: {x: §{kind: builtin.shell.exec, command: x, isolation: container}}"),
    ("schema_violation", "spec.actions.x", f"actions: {{x: §{{kind: builtin.shell.exec, command: x, container: {{image: '{SHA}'}}}}}}"),
    ("schema_violation", "spec.actions.x.container.image", "actions: {x: {kind: builtin.shell.exec, command: x, isolation: container, container: {image: §alpine}}}"),
    ("schema_violation", "spec.actions.x.container.pidsLimit", f"actions: {{x: {{kind: builtin.shell.exec, command: x, isolation: container, container: {{image: '{SHA}', pidsLimit: §4097}}}}}}"),
    ("schema_violation", "spec.actions.x.container.cpuLimitMillis", f"actions: {{x: {{kind: builtin.shell.exec, command: x, isolation: container, container: {{image: '{SHA}', cpuLimitMillis: §0}}}}}}"),
    ("schema_violation", "spec.actions.x.container.memoryLimitBytes", f"actions: {{x: {{kind: builtin.shell.exec, command: x, isolation: container, container: {{image: '{SHA}', memoryLimitBytes: §1}}}}}}"),
    ("schema_violation", "spec.actions.x.env.PATH", f"actions: {{x: {{kind: builtin.shell.exec, command: x, isolation: container, container: {{image: '{SHA}'}}, env: {{PATH: §{{env: A}}}}}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A: §{}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.value", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A: {§value: secret}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.process.timeoutSeconds", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A: {process: {command: c, timeoutSeconds: §61}}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.process.outputLimitBytes", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A: {process: {command: c, outputLimitBytes: §65537}}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.process.args[0]", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A: {process: {command: c, args: [§'" + "é" * 2049 + "']}}}}}"),
    # policy and network
    ("schema_violation", "spec.policy.approval", "policy: {approval: §sometimes}"),
    ("schema_violation", "spec.policy.nonInteractive", "policy: {nonInteractive: §wait}"),
    ("schema_violation", "spec.policy.writableRoots", "policy: {writableRoots: §build}"),
    ("schema_violation", "spec.policy.maxArtifactBytes", "policy: {maxArtifactBytes: §0}"),
    ("schema_violation", "spec.policy.network.allowedSchemes", "policy: {network: {allowedSchemes: §[]}}"),
    ("schema_violation", "spec.policy.network.allowedSchemes[0]", "policy: {network: {allowedSchemes: [§ftp]}}"),
    ("schema_violation", "spec.policy.network.allowedPorts[0]", "policy: {network: {allowedPorts: [§0]}}"),
    ("schema_violation", "spec.policy.network.connectTimeoutSeconds", "policy: {network: {connectTimeoutSeconds: §121}}"),
    ("schema_violation", "spec.policy.network.maxResponseBytes", "policy: {network: {maxResponseBytes: §67108865}}"),
    # runtime
    ("schema_violation", "spec.runtime.defaultTimeoutSeconds", "runtime: {defaultTimeoutSeconds: §86401}"),
    ("schema_violation", "spec.runtime.budgets.maxTurns", "runtime: {budgets: {maxTurns: §0}}"),
    ("schema_violation", "spec.runtime.budgets.maxCostMicrousd", "runtime: {budgets: {maxCostMicrousd: §5}}"),
    ("schema_violation", "spec.runtime.budgets.maxTokens", "runtime: {budgets: {§maxTokens: 5}}"),
    ("schema_violation", "spec.runtime.pricing.models", "runtime: {pricing: {version: v, models: §{}}}"),
    ("schema_violation", "spec.runtime.pricing.models.gpt", "runtime: {pricing: {version: v, models: {gpt: §{inputMicrousdPerMillionTokens: 1, outputMicrousdPerMillionTokens: 1}}}}"),
    ("schema_violation", "spec.runtime.pricing.models.p/m.outputMicrousdPerMillionTokens", "runtime: {pricing: {version: v, models: {p/m: §{inputMicrousdPerMillionTokens: 1}}}}"),
    ("schema_violation", "spec.runtime.pricing.models.p/m.inputMicrousdPerMillionTokens", "runtime: {pricing: {version: v, models: {p/m: {inputMicrousdPerMillionTokens: §0, outputMicrousdPerMillionTokens: 1}}}}"),
    # memory, peers, the rest
    ("schema_violation", "spec.memory.longTerm.retentionDays", "memory: {longTerm: {retentionDays: §36501}}"),
    ("schema_violation", "spec.memory.longTerm.provider", "memory: {longTerm: {provider: §redis}}"),
    ("schema_violation", "spec.memory.longTerm.embedding.dimensions", "memory: {longTerm: {embedding: {dimensions: §7}}}"),
    ("missing_reference", "spec.memory.longTerm.embedding.provider", "memory: {longTerm: {embedding: {provider: §cloud}}}"),
    ("schema_violation", "spec.mcpServers.m.url", "mcpServers: {m: §{timeoutSeconds: 5}}"),
    ("schema_violation", "spec.a2aPeers.q.maxPolls", "a2aPeers: {q: {cardUrl: u, maxPolls: §1001}}"),
    ("schema_violation", "spec.a2aPeers.q.pollIntervalMs", "a2aPeers: {q: {cardUrl: u, pollIntervalMs: §0}}"),
    ("invalid_secret_reference", "spec.mcpServers.m.headers.A", "mcpServers: {m: {url: u, headers: {A: §token}}}"),
    ("schema_violation", "spec.packs[0].version", "packs: [§{name: p}]"),
    ("schema_violation", "spec.packTrust.unsigned", "packTrust: {unsigned: §maybe}"),
    ("schema_violation", "spec.compensation.approval", "compensation: {approval: §ask}"),
    ("schema_violation", "spec.output.showDiff", "output: {showDiff: §'yes'}"),
    ("schema_violation", "spec.inputs", "inputs: §[a]"),
    ("schema_violation", "spec.vars.foreachIndex", "vars: {foreachIndex: §1}"),
    ("schema_violation", "spec.varsFiles[0]", "varsFiles: [§'']"),
    # sub-workflows and control flow, as far as one part of the document shows it
    ("schema_violation", "spec.subworkflows.w.version", "subworkflows: {w: {version: §'1.0', inputSchema: {}, outputSchema: {}, tasks: [{id: b, uses: action:set}]}}"),
    ("schema_violation", "spec.subworkflows.w.inputSchema", "subworkflows: {w: §{version: 1.0.0, outputSchema: {}, tasks: [{id: b, uses: action:set}]}}"),
    ("schema_violation", "spec.subworkflows.w.tasks", "subworkflows: {w: {version: 1.0.0, inputSchema: {}, outputSchema: {}, tasks: §[]}}"),
    *(
        ("schema_violation", "spec.subworkflows.w.version", f"subworkflows: {{w: {{version: §'{version}', inputSchema: {{}}, outputSchema: {{}}, tasks: [{{id: b, uses: action:set}}]}}}}")
        for version in ("01.0.0", "1.0.0-", "1.0.0-a..b", "1.0.0-01", "1.0.0+a..b", "1.1\N{ARABIC-INDIC DIGIT TWO}.0")
    ),
    # a contract that is there and empty
    ("schema_violation", "spec.subworkflows.w.inputSchema", "subworkflows: {w: {version: 1.0.0, inputSchema: §null, outputSchema: {}, tasks: [{id: b, uses: action:set}]}}"),
    ("schema_violation", "spec.subworkflows.w.outputSchema", "subworkflows: {w: {version: 1.0.0, inputSchema: {}, outputSchema: §null, tasks: [{id: b, uses: action:set}]}}"),
    ("schema_violation", "spec.tools.t.outputSchema", tool(outputSchema="§null")),
]  # fmt: skip

ZERO = '§"a\\0b"'
"""A text that YAML can hold, and no path, argument or variable of the system."""
CASES += [
    ("schema_violation", "spec.policy.workspaceRoot", f"policy: {{workspaceRoot: {ZERO}}}"),
    ("schema_violation", "spec.policy.writableRoots[0]", f"policy: {{writableRoots: [{ZERO}]}}"),
    ("schema_violation", "spec.policy.secretFileRoots[0]", f"policy: {{secretFileRoots: [{ZERO}]}}"),
    ("schema_violation", "spec.providers.p.script", f"providers: {{p: {{kind: fake, script: {ZERO}}}}}"),
    ("schema_violation", "spec.actions.x.command", f"actions: {{x: {{kind: builtin.shell.exec, command: {ZERO}}}}}"),
    ("schema_violation", "spec.actions.x.args[1]", f"actions: {{x: {{kind: builtin.shell.exec, command: x, args: ['', {ZERO}]}}}}"),
    ("schema_violation", "spec.actions.x.cwd", f"actions: {{x: {{kind: builtin.shell.exec, command: x, cwd: {ZERO}}}}}"),
    ("schema_violation", "spec.actions.x.artifacts[0]", f"actions: {{x: {{kind: builtin.shell.exec, command: x, artifacts: [{ZERO}]}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.file", f"actions: {{x: {{kind: builtin.shell.exec, command: x, env: {{A: {{file: {ZERO}}}}}}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.process.command", f"actions: {{x: {{kind: builtin.shell.exec, command: x, env: {{A: {{process: {{command: {ZERO}}}}}}}}}}}"),
    ("invalid_secret_reference", "spec.actions.x.env.A.process.args[0]", f"actions: {{x: {{kind: builtin.shell.exec, command: x, env: {{A: {{process: {{command: c, args: [{ZERO}]}}}}}}}}}}"),
    ("schema_violation", "spec.actions.x.env.A=B", "actions: {x: {kind: builtin.shell.exec, command: x, env: {A=B: §{env: A}}}}"),
    ("schema_violation", "spec.actions.x.env.", "actions: {x: {kind: builtin.shell.exec, command: x, env: {'': §{env: A}}}}"),
]  # fmt: skip

TASKS = [
    ("spec.tasks[0].loop.maxIterations", "{id: a, uses: action:set, loop: {while: x, maxIterations: §1001}}"),
    ("spec.tasks[0].loop.while", "{id: a, uses: action:set, loop: §{maxIterations: 2}}"),
    ("spec.tasks[0].when", "{id: a, uses: action:set, when: §x, loop: {maxIterations: 2, while: x}}"),
    ("spec.tasks[0].loop", "{id: a, uses: action:set, foreach: {items: []}, loop: §{maxIterations: 2, while: x}}"),
    ("spec.tasks[0]", "§{id: a, uses: router}"),
    ("spec.tasks[0].route", "{id: a, uses: action:set, route: §{select: x, cases: [{equals: 1, tasks: [a]}]}}"),
    ("spec.tasks[0].route.cases", "{id: a, uses: router, route: {select: x, cases: §[]}}"),
    ("spec.tasks[0].route.cases[0].tasks", "{id: a, uses: router, route: {select: x, cases: [{equals: 1, tasks: §[]}]}}"),
    ("spec.tasks[0].foreach", "{id: a, uses: router, route: {select: x, cases: [{equals: 1, tasks: [a]}]}, foreach: §{items: []}}"),
    ("spec.tasks[0].with", "{id: a, uses: workflow:w, with: §[]}"),
    ("spec.tasks[0].when", "{id: a, uses: workflow:w, when: §x}"),
    ("spec.tasks[0].compensate.uses", "{id: a, uses: action:set, compensate: {uses: §agent:g}}"),
    ("spec.tasks[0].matrix.axes.a b", "{id: a, uses: action:set, matrix: {axes: {§a b: [1]}}}"),
    ("spec.tasks[0].matrix.maxItems", "{id: a, uses: action:set, matrix: {axes: {x: [1]}, maxItems: §0}}"),
    ("spec.tasks[0].retry.backoffMultiplier", "{id: a, uses: action:set, retry: {backoffMultiplier: §0.5}}"),
    ("spec.tasks[0].vars.matrixIndex", "{id: a, uses: action:set, vars: {matrixIndex: §1}}"),
]  # fmt: skip


def check_place(load: Any, code: str, path: str, marked: str) -> None:
    before, mark, after = marked.partition("§")
    assert mark, "the document has no mark"
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    with pytest.raises(DocumentError) as caught:
        compile_workflow(load(before + after))
    found = [(item.code, item.path, item.line, item.column) for item in caught.value.diagnostics]
    assert (code, path, line, column) in found, [item.as_text() for item in caught.value.diagnostics]
    assert all(item.help for item in caught.value.diagnostics), "every finding says what to do"
    assert {item.code for item in caught.value.diagnostics} <= CODES


@pytest.mark.parametrize(("code", "path", "spec"), CASES, ids=range(len(CASES)))
def test_field(load: Any, code: str, path: str, spec: str) -> None:
    rest = REST[REST.index("  tasks") :] if spec.startswith("actions:") else REST
    check_place(load, code, path, f"{HEAD}  {spec}\n{rest}")


@pytest.mark.parametrize(("path", "task"), TASKS, ids=range(len(TASKS)))
def test_task(load: Any, path: str, task: str) -> None:
    rest = REST[: REST.index("  tasks")]
    check_place(load, "schema_violation", path, f"{HEAD}{rest}  tasks: [{task}]\n")


@pytest.mark.parametrize("version", ["0.0.0", "1.2.3-rc.1+b", "1.0.0--", "1.0.0-0a.0", "1.0.0+01.a-b"])
def test_semantic_versions(load: Any, version: str) -> None:
    sub = f"subworkflows: {{w: {{version: '{version}', inputSchema: {{}}, outputSchema: {{}}, tasks: [{{id: b, uses: action:set}}]}}}}"
    compile_workflow(load(f"{HEAD}  {sub}\n{REST}"))
