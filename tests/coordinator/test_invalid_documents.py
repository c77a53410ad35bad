"""Documents that are refused, each with its code and its exact place.

The mark § stands where the finding is; it is taken out before the document is read.
"""
# ruff: noqa: E501 - a table reads best with one case a line

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import load_workflow
from agentctl.coordinator.diagnostics import Diagnostic, DocumentError

HEAD = "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: demo}\nspec:\n"
ACTIONS = """\
  policy: {approval: never}
  actions:
    set: {kind: builtin.assign}
    check: {kind: builtin.assert}
    read: {kind: builtin.read}
    write: {kind: builtin.write}
    sh: {kind: builtin.shell.exec, command: /bin/true}
    get: {kind: builtin.memory.read}
    put: {kind: builtin.memory.write}
"""


def first_finding(load: Callable[[str], Any], marked: str) -> tuple[Diagnostic, int, int]:
    """The finding at the mark, with the mark's line and column."""
    before, mark, after = marked.partition("§")
    assert mark, "the document has no mark"
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    with pytest.raises(DocumentError) as caught:
        compile_workflow(load(before + after))
    assert caught.value.exit_code == 2
    here = [item for item in caught.value.diagnostics if (item.line, item.column) == (line, column)]
    assert here, [item.as_text() for item in caught.value.diagnostics]
    return here[0], line, column


ENVELOPES = [
    ("migration_required", "apiVersion", "§kind: Workflow\nspec: {}\n"),
    ("migration_required", "playbook", "§playbook: old\nmodules: {}\ntasks: []\n"),
    ("unsupported_version", "apiVersion", "apiVersion: §agentctl.dev/v2\nkind: Workflow\n"),
    ("unsupported_version", "apiVersion", "apiVersion: §1\nkind: Workflow\n"),
    ("schema_violation", None, "§- a\n- b\n"),
    ("schema_violation", "sourceSnapshot", "apiVersion: agentctl.dev/v1\n§sourceSnapshot: {}\n"),
    ("schema_violation", "spec.sourceSnapshot", HEAD + "  §sourceSnapshot: {}\n  tasks: []\n"),
    ("schema_violation", "kind", "apiVersion: agentctl.dev/v1\nkind: §Flow\nmetadata: {name: a}\nspec: {tasks: [{id: a, uses: action:a}]}"),
    ("schema_violation", "metadata.name", "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: §''}\nspec: {tasks: []}"),
    ("schema_violation", "metadata.owner", "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: a, §owner: b}\nspec: {tasks: []}"),
    ("schema_violation", "metadata.labels.version", "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: a, labels: {version: §1.5}}\nspec: {tasks: []}"),
    ("schema_violation", "spec.tasks", HEAD + "  tasks: §[]\n"),
    ("schema_violation", "spec", "apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {name: a}\nspec: §[]\n"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "path", "text"), ENVELOPES)
def test_envelope(load: Callable[[str], Any], code: str, path: str | None, text: str) -> None:
    found, _, _ = first_finding(load, text)
    assert (found.code, found.path) == (code, path)


SPECS = [
    # shapes and bounds
    ("schema_violation", "spec.tasks[0].wiht", "tasks: [{id: a, uses: action:set, §wiht: {}}]"),
    ("schema_violation", "spec.taks", "taks: []\n  tasks: [{id: a, uses: action:set}]".replace("taks", "§taks", 1)),
    ("schema_violation", "spec.tasks[0].uses", "tasks: [§{id: a}]"),
    ("schema_violation", "spec.tasks[0].id", "tasks: [{id: §1a, uses: action:set}]"),
    ("schema_violation", "spec.tasks[0].id", "tasks: [{id: §12, uses: action:set}]"),
    ("schema_violation", "spec.tasks[0].uses", "tasks: [{id: a, uses: §set}]"),
    ("unsupported_capability", "spec.tasks[0].uses", "tasks: [{id: a, uses: §team:x}]"),
    ("schema_violation", "spec.tasks[0].needs", "tasks: [{id: a, uses: action:set, needs: §b}]"),
    ("schema_violation", "spec.tasks[0].with", "tasks: [{id: a, uses: action:set, with: §}]"),
    ("schema_violation", "spec.tasks[0].when", "tasks: [{id: a, uses: action:set, when: §true}]"),
    ("schema_violation", "spec.tasks[0].timeoutSeconds", "tasks: [{id: a, uses: action:set, timeoutSeconds: §0}]"),
    ("schema_violation", "spec.tasks[0].timeoutSeconds", "tasks: [{id: a, uses: action:set, timeoutSeconds: §'5'}]"),
    ("schema_violation", "spec.tasks[0].timeoutSeconds", "tasks: [{id: a, uses: action:set, timeoutSeconds: §1.5}]"),
    ("schema_violation", "spec.tasks[0].retry.maxAttempts", "tasks: [{id: a, uses: action:set, retry: {maxAttempts: §21}}]"),
    ("schema_violation", "spec.tasks[0].retry.maxAttempts", "tasks: [{id: a, uses: action:set, retry: {maxAttempts: §true}}]"),
    ("schema_violation", "spec.tasks[0].retry.backoffMs", "tasks: [{id: a, uses: action:set, retry: {backoffMs: §60001}}]"),
    ("schema_violation", "spec.tasks[0].failure", "tasks: [{id: a, uses: action:set, failure: §ignore}]"),
    ("schema_violation", "spec.runtime.maxConcurrency", "runtime: {maxConcurrency: §4097}\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.runtime.maxDeliveries", "runtime: {maxDeliveries: §0}\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.vars.matrix", "vars: {matrix: §1}\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.tasks[0].outputSchema", "tasks: [{id: a, uses: action:set, outputSchema: §[]}]"),
    ("schema_violation", "spec.tasks[0].outputSchema", "tasks: [{id: a, uses: action:set, outputSchema: §{type: objekt}}]"),
    ("schema_violation", "spec.tasks[0].outputSchema", "tasks: [{id: a, uses: action:set, outputSchema: §{$ref: 'http://x.test/s'}}]"),
    ("invalid_secret_reference", "spec.providers.p.credential", "providers: {p: {kind: fake, credential: §{env: A, file: b}}}\n  tasks: [{id: a, uses: action:set}]"),
    ("invalid_secret_reference", "spec.providers.p.headers.X.env", "providers: {p: {kind: fake, headers: {X: {env: §1A}}}}\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.providers.p", "providers: {p: §{kind: openai_compatible}}\n  tasks: [{id: a, uses: action:set}]"),
    ("missing_reference", "spec.agents.g.provider", "agents: {g: {provider: §nope, model: m, instructions: x}}\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.agents.g", "agents: {g: §{provider: p, model: m}}\n  tasks: [{id: a, uses: action:set}]"),
    ("unsupported_capability", "spec.agents.g.reasoning", "providers: {p: {kind: fake}}\n  agents: {g: {provider: p, model: m, instructions: x, reasoning: §{effort: low}}}\n  tasks: [{id: a, uses: action:set}]"),
    # references and order
    ("missing_reference", "spec.tasks[0].uses", "tasks: [{id: a, uses: §action:sett}]"),
    ("missing_reference", "spec.tasks[0].needs[0]", "tasks: [{id: a, uses: action:set, needs: [§b]}]"),
    ("duplicate_task", "spec.tasks[1].id", "tasks: [{id: a, uses: action:set}, {id: §a, uses: action:set}]"),
    ("duplicate_task", "spec.tasks[1].id", "tasks: [{id: each, uses: action:set, foreach: {items: [alpha], as: value}}, {id: §each--0000-92b13011ab9e, uses: action:set}]"),
    ("dependency_cycle", "spec.tasks[0].needs", "tasks: [{id: a, uses: action:set, needs: §[b]}, {id: b, uses: action:set, needs: [a]}]"),
    ("dependency_cycle", "spec.tasks[0].needs", "tasks: [{id: a, uses: action:set, needs: §[a]}]"),
    ("dependency_cycle", "spec.tasks[1].needs", "tasks: [{id: x, uses: action:set, needs: [a]}, {id: a, uses: action:set, needs: §[b]}, {id: b, uses: action:set, needs: [a]}]"),
    # templates
    ("invalid_template", "spec.tasks[0].with.x[1]", "tasks: [{id: a, uses: action:set, with: {x: [1, §'${{ env.A }}']}}]"),
    ("invalid_template", "spec.tasks[0].vars.x", "tasks: [{id: a, uses: action:set, vars: {x: §'${{ inputs.a'}}]"),
    ("invalid_template", "spec.tasks[0].when", "tasks: [{id: a, uses: action:set, when: §'inputs.a or inputs.b'}]"),
    ("invalid_template", "spec.tasks[1].with.x", "tasks: [{id: a, uses: action:set}, {id: b, uses: action:set, with: {x: §'${{ tasks.a.output }}'}}]"),
    ("invalid_template", "spec.tasks[1].when", "tasks: [{id: a, uses: action:set}, {id: b, uses: action:set, when: §tasks.a.output.changed}]"),
    ("missing_reference", "spec.tasks[0].with.when", "tasks: [{id: a, uses: action:set, with: {when: §'${{ tasks.b.output }}'}}]"),
    ("missing_reference", "spec.outputs.r", "outputs: {r: §'${{ tasks.b.output }}'}\n  tasks: [{id: a, uses: action:set}]"),
    ("invalid_template", "spec.outputs.r", "outputs: {r: §'${{ }}'}\n  tasks: [{id: a, uses: action:set}]"),
    # action inputs
    ("schema_violation", "spec.tasks[0].with.paht", "tasks: [{id: a, uses: action:read, with: {path: x, §paht: y}}]"),
    ("schema_violation", "spec.tasks[0].with.path", "tasks: [§{id: a, uses: action:read}]"),
    ("schema_violation", "spec.tasks[0].with.path", "tasks: [{id: a, uses: action:read, with: {path: §7}}]"),
    ("schema_violation", "spec.tasks[0].with.content", "tasks: [{id: a, uses: action:write, with: §{path: x}}]"),
    ("schema_violation", "spec.tasks[0].with.content", "tasks: [{id: a, uses: action:write, with: {path: x, content: §1.5}}]"),
    ("schema_violation", "spec.tasks[0].with.that", "tasks: [{id: a, uses: action:check, with: §{message: x}}]"),
    ("schema_violation", "spec.tasks[0].with.that", "tasks: [{id: a, uses: action:check, with: {that: §'yes'}}]"),
    ("schema_violation", "spec.tasks[0].with.command", "tasks: [{id: a, uses: action:sh, with: {§command: x}}]"),
    ("schema_violation", "spec.tasks[0].with.args[1]", "tasks: [{id: a, uses: action:sh, with: {args: [a, §1]}}]"),
    ("schema_violation", "spec.tasks[0].with.env.A", "tasks: [{id: a, uses: action:sh, with: {env: {A: §true}}}]"),
    ("schema_violation", "spec.tasks[0].with.stdin", "tasks: [{id: a, uses: action:sh, with: {stdin: §[x]}}]"),
    ("schema_violation", "spec.tasks[0].with.key", "tasks: [{id: a, uses: action:get, with: {key: §''}}]"),
    # memory
    ("schema_violation", "spec.tasks[0].memoryWrites", "tasks: [{id: a, uses: action:set, §memoryWrites: [k]}]"),
    ("schema_violation", "spec.tasks[0].memoryWrites", "tasks: [{id: a, uses: action:put, memoryWrites: §[], with: {key: k}}]"),
    ("schema_violation", "spec.tasks[0].memoryWrites", "tasks: [{id: a, uses: action:put, memoryWrites: §[b], with: {key: k}}]"),
    ("schema_violation", "spec.tasks[0].with.key", "tasks: [{id: a, uses: action:put, with: {key: §'${{ inputs.k }}'}}]"),
    ("schema_violation", "spec.runtime.maxConcurrency", "runtime: {maxConcurrency: §2}\n  tasks: [{id: a, uses: action:put, with: {key: k}}, {id: b, uses: action:put, with: {key: k}}]"),
    # expansion
    ("schema_violation", "spec.tasks[0].matrix", "tasks: [{id: a, uses: action:set, foreach: {items: []}, matrix: §{axes: {x: [1]}}}]"),
    ("schema_violation", "spec.tasks[0].foreach", "tasks: [{id: a, uses: action:set, foreach: §{items: [1, 2], maxItems: 1}}]"),
    ("schema_violation", "spec.tasks[0].foreach.maxItems", "tasks: [{id: a, uses: action:set, foreach: {items: [], maxItems: §100001}}]"),
    ("schema_violation", "spec.tasks[0].foreach.as", "tasks: [{id: a, uses: action:set, foreach: {items: [], as: §a-b}}]"),
    ("schema_violation", "spec.tasks[0].foreach.items", "tasks: [{id: a, uses: action:set, foreach: {items: §3}}]"),
    ("invalid_template", "spec.tasks[0].foreach.items", "tasks: [{id: a, uses: action:set, foreach: {items: §'${{ inputs.xs }}'}}]"),
    ("invalid_template", "spec.tasks[0].foreach.items", "tasks: [{id: a, uses: action:set, foreach: {items: §'${{ memory.xs }}'}}]"),
    ("schema_violation", "spec.tasks[0].foreach.items", "inputs: {xs: 3}\n  tasks: [{id: a, uses: action:set, foreach: {items: §'${{ inputs.xs }}'}}]"),
    ("schema_violation", "spec.tasks[0].matrix.axes", "tasks: [{id: a, uses: action:set, matrix: {axes: §{}}}]"),
    ("schema_violation", "spec.tasks[0].vars.item", "tasks: [{id: a, uses: action:set, vars: {§item: 1}, foreach: {items: [1]}}]"),
    ("invalid_template", "spec.tasks[1].foreach.items[0]", "tasks: [{id: a, uses: action:set}, {id: b, uses: action:set, foreach: {items: [§'${{ tasks.a.output }}']}}]"),
    # features that are not there
    ("unsupported_capability", "spec.packs", "§packs: [{name: p, version: '1'}]\n  tasks: [{id: a, uses: action:set}]"),
    ("schema_violation", "spec.runtime.budgets.maxTasks", "runtime: {budgets: {maxTasks: §2}}\n  tasks: [{id: a, uses: action:set, foreach: {items: [1, 2]}}]"),
    ("schema_violation", "spec.runtime.budgets.maxExpansionItems", "runtime: {budgets: {maxExpansionItems: §1}}\n  tasks: [{id: a, uses: action:set, foreach: {items: [1, 2]}}]"),
    # compensation
    ("unsupported_capability", "spec.tasks[0].compensate", "tasks: [{id: a, uses: action:set, §compensate: {uses: action:write, with: {path: x, content: y}}}]"),
    ("unsupported_capability", "spec.tasks[1].compensate", "tasks: [{id: b, uses: action:set, needs: [a]}, {id: a, uses: router, §compensate: {uses: action:write}, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}]"),
    ("missing_reference", "spec.tasks[0].compensate.uses", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: §action:nope}}]"),
    ("unsupported_capability", "spec.tasks[0].compensate.uses", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: §action:set}}]"),
    ("unsupported_capability", "spec.tasks[0].compensate.uses", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: §action:read, with: {path: x}}}]"),
    ("schema_violation", "spec.tasks[0].compensate.with.content", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: action:write, with: §{path: x}}}]"),
    ("schema_violation", "spec.tasks[0].compensate.with.paht", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: action:write, with: {path: x, content: z, §paht: y}}}]"),
    ("missing_reference", "spec.tasks[0].compensate.with.path", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: action:write, with: {path: §'${{ tasks.b.output.path }}', content: z}}}]"),
    ("invalid_template", "spec.tasks[0].compensate.with.path", "tasks: [{id: a, uses: action:write, with: {path: x, content: y}, compensate: {uses: action:write, with: {path: §'${{ env.A }}', content: z}}}]"),
    ("missing_reference", "spec.tasks[0].uses", "tasks: [{id: a, uses: §agent:g}]"),
    # routers
    ("schema_violation", "spec.tasks[0]", "tasks: [§{id: a, uses: router}]"),
    ("schema_violation", "spec.tasks[0].route", "tasks: [{id: a, uses: action:set, route: §{select: x, cases: [{equals: 1, tasks: [b]}]}}]"),
    ("schema_violation", "spec.tasks[0].foreach", "tasks: [{id: a, uses: router, foreach: §{items: []}, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}]"),
    ("schema_violation", "spec.tasks[0].route.cases", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: §[]}}]"),
    ("schema_violation", "spec.tasks[0].route.cases[0].tasks", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: §[]}]}}]"),
    ("invalid_template", "spec.tasks[0].route.select", "tasks: [{id: a, uses: router, route: {select: §inputs.x, cases: [{equals: 1, tasks: [b]}]}}, {id: b, uses: action:set, needs: [a]}]"),
    ("invalid_template", "spec.tasks[1].route.select", "tasks: [{id: c, uses: action:set}, {id: a, uses: router, route: {select: §'${{ tasks.c.output }}', cases: [{equals: 1, tasks: [b]}]}}, {id: b, uses: action:set, needs: [a]}]"),
    ("schema_violation", "spec.tasks[0].route.cases[1].equals", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: {x: 1, y: 2}, tasks: [b]}, {equals: §{y: 2, x: 1}, tasks: [c]}]}}, {id: b, uses: action:set, needs: [a]}, {id: c, uses: action:set, needs: [a]}]"),
    ("schema_violation", "spec.tasks[0].route.default[0]", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}], default: [§b]}}, {id: b, uses: action:set, needs: [a]}]"),
    ("missing_reference", "spec.tasks[0].route.cases[0].tasks[0]", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [§b]}]}}]"),
    ("schema_violation", "spec.tasks[0].route.cases[0].tasks[0]", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [§b]}]}}, {id: b, uses: action:set}]"),
    ("schema_violation", "spec.tasks[0].with", "tasks: [{id: a, uses: router, §with: {x: 1}, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}, {id: b, uses: action:set, needs: [a]}]"),
    ("schema_violation", "spec.tasks[0].memoryWrites", "tasks: [{id: a, uses: router, §memoryWrites: [k], route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}}, {id: b, uses: action:set, needs: [a]}]"),
    # loops
    ("schema_violation", "spec.tasks[0].loop.maxIterations", "tasks: [{id: a, uses: action:set, loop: {maxIterations: §1001, while: '${{ vars.loopIndex < 1 }}'}}]"),
    ("schema_violation", "spec.tasks[0].loop.maxIterations", "tasks: [{id: a, uses: action:set, loop: {maxIterations: §0, while: '${{ vars.loopIndex < 1 }}'}}]"),
    ("schema_violation", "spec.tasks[0].loop.while", "tasks: [{id: a, uses: action:set, loop: §{maxIterations: 2}}]"),
    ("invalid_template", "spec.tasks[0].loop.while", "tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: §'vars.loopIndex < 1'}}]"),
    ("invalid_template", "spec.tasks[0].loop.while", "tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: §'${{ loops.output }}'}}]"),
    ("missing_reference", "spec.tasks[0].loop.while", "tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: §'${{ tasks.b.output.x }}'}}]"),
    ("invalid_template", "spec.tasks[1].loop.initial.x", "tasks: [{id: b, uses: action:set}, {id: a, uses: action:set, loop: {maxIterations: 2, while: '${{ loop.output.x }}', initial: {x: §'${{ tasks.b.output }}'}}}]"),
    ("schema_violation", "spec.tasks[0].when", "tasks: [{id: a, uses: action:set, when: §inputs.x, loop: {maxIterations: 2, while: '${{ vars.loopIndex < 1 }}'}}]"),
    ("schema_violation", "spec.tasks[0].loop", "tasks: [{id: a, uses: action:set, foreach: {items: []}, loop: §{maxIterations: 2, while: '${{ vars.loopIndex < 1 }}'}}]"),
    ("schema_violation", "spec.tasks[0].loop", "tasks: [{id: a, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [b]}]}, loop: §{maxIterations: 2, while: '${{ vars.loopIndex < 1 }}'}}]"),
    ("schema_violation", "spec.tasks[0].vars.loopIndex", "tasks: [{id: a, uses: action:set, vars: {loopIndex: §1}}]"),
    ("schema_violation", "spec.runtime.budgets.maxLoopIterations", "runtime: {budgets: {maxLoopIterations: §1}}\n  tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: '${{ vars.loopIndex < 1 }}'}}]"),
    # sub-workflows
    ("missing_reference", "spec.tasks[0].uses", "tasks: [{id: a, uses: §workflow:w}]"),
    ("schema_violation", "spec.tasks[0].when", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w, when: §inputs.x}]"),
    ("schema_violation", "spec.subworkflows.w.version", "subworkflows: {w: {version: §'1.0', inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("schema_violation", "spec.subworkflows.w.inputSchema", "subworkflows: {w: {version: 1.0.0, inputSchema: §{type: objekt}, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("schema_violation", "spec.subworkflows.w.outputSchema", "subworkflows: {w: §{version: 1.0.0, inputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].uses", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: §action:nope}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("invalid_template", "spec.subworkflows.w.tasks[0].when", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, when: §x y z}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].with.v", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, with: {v: §'${{ tasks.q.output }}'}}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("invalid_template", "spec.subworkflows.w.tasks[1].with.v", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}, {id: u, uses: action:set, with: {v: §'${{ tasks.t.output }}'}}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("dependency_cycle", "spec.subworkflows.w.tasks[0].needs", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, needs: §[u]}, {id: u, uses: action:set, needs: [t]}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("schema_violation", "spec.subworkflows.w.tasks[0].with.path", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:read, with: {path: §1}}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("missing_reference", "spec.subworkflows.w.outputs.o", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, outputs: {o: §'${{ tasks.q.output }}'}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("invalid_template", "spec.subworkflows.w.tasks[0].foreach.items", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, foreach: {items: §'${{ }}'}}]}}\n  tasks: [{id: b, uses: action:set}]"),
    ("schema_violation", "spec.tasks[0].with.x", "subworkflows: {w: {version: 1.0.0, inputSchema: {type: object, properties: {x: {type: string}}}, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: c, uses: workflow:w, with: {x: §1}}]"),
    ("schema_violation", "spec.tasks[0].with", "subworkflows: {w: {version: 1.0.0, inputSchema: {type: object, required: [y]}, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: c, uses: workflow:w, with: §{x: 1}}]"),
    ("schema_violation", "spec.subworkflows.w.outputs.x", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: {properties: {x: {type: string}}}, outputs: {x: §1}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: c, uses: workflow:w}, {id: d, uses: workflow:w}]"),
    ("schema_violation", "spec.subworkflows.w.outputs", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: {required: [y]}, outputs: §{x: 1}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: action:set}]"),
    ("missing_reference", "spec.tasks[1].with.v", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, outputs: {good: 1}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: c, uses: workflow:w}, {id: d, uses: action:set, needs: [c], with: {u: '${{ tasks.c.output.good }}', v: §'${{ tasks.c.output.nope }}'}}]"),
    ("missing_reference", "spec.tasks[1].when", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, outputs: {good: 1}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: c, uses: workflow:w}, {id: d, uses: action:set, needs: [c], when: §tasks.c.output.nope}]"),
    ("dependency_cycle", "spec.subworkflows.w.tasks[0].uses", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: §workflow:w}]}}\n  tasks: [{id: a, uses: action:set}]"),
    ("dependency_cycle", "spec.subworkflows.v.tasks[0].uses", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: workflow:v}]}, v: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: §workflow:w}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].uses", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: §workflow:v}]}}\n  tasks: [{id: a, uses: action:set}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].uses", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: §action:nope}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("duplicate_task", "spec.subworkflows.w.tasks[1].id", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}, {id: §t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("duplicate_task", "spec.tasks[1].id", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}, {id: §a--t, uses: action:set}]"),
    ("duplicate_task", "spec.tasks[1].id", "subworkflows: {summarize: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: summary, uses: workflow:summarize}, {id: §summary--inputs-4d45e657, uses: action:set}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].needs[0]", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, needs: [§b]}]}}\n  tasks: [{id: b, uses: action:set}, {id: a, uses: workflow:w}]"),
    ("missing_reference", "spec.subworkflows.w.tasks[0].with.x", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, with: {x: §'${{ tasks.b.output }}'}}]}}\n  tasks: [{id: b, uses: action:set}, {id: a, uses: workflow:w}]"),
    ("invalid_template", "spec.subworkflows.w.tasks[1].when", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}, {id: u, uses: action:set, when: §tasks.t.output.changed}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("missing_reference", "spec.subworkflows.w.outputs.r", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, outputs: {r: §'${{ tasks.b.output }}'}, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("invalid_template", "spec.tasks[1].with.x", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: b, uses: action:set}, {id: a, uses: workflow:w, with: {x: §'${{ tasks.b.output }}'}}]"),
    ("invalid_template", "spec.subworkflows.w.inputs.x", "subworkflows: {w: {version: 1.0.0, inputs: {x: §'${{ }}'}, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("invalid_template", "spec.subworkflows.w.tasks[0].foreach.items", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set, foreach: {items: §'${{ inputs.xs }}'}}]}}\n  tasks: [{id: b, uses: action:set}, {id: a, uses: workflow:w, needs: [b], with: {xs: '${{ tasks.b.output.xs }}'}}]"),
    ("unsupported_capability", "spec.subworkflows.w.tasks[0].with.key", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:get, with: {§key: '${{ inputs.k }}'}}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("schema_violation", "spec.subworkflows.w.tasks[0].route.cases[0].tasks[0]", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: r, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [§t]}]}}, {id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w}]"),
    ("dependency_cycle", "spec.tasks[0].needs", "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n  tasks: [{id: a, uses: workflow:w, needs: §[b]}, {id: b, uses: action:set, needs: [a]}]"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "path", "spec"), SPECS, ids=range(len(SPECS)))
def test_spec(load: Callable[[str], Any], code: str, path: str, spec: str) -> None:
    found, _, _ = first_finding(load, f"{HEAD}{ACTIONS}  {spec}\n")
    assert (found.code, found.path) == (code, path), found.as_text()
    assert found.file == "flow.yaml"
    assert found.severity == "error"


USED_ACTIONS = [
    (
        "spec.actions.x.isolation",
        "{kind: builtin.shell.exec, command: x, isolation: container, container: {image: 'sha256:" + "a" * 64 + "'}}",
        "isolation: container",
    ),
]


@pytest.mark.parametrize(("path", "action", "named"), USED_ACTIONS)
def test_actions_that_cannot_run_are_named_when_used_only(build: Any, path: str, action: str, named: str) -> None:
    spec = f"  policy: {{approval: never}}\n  actions: {{s: {{kind: builtin.assign}}, x: {action}}}\n  tasks: [{{id: a, uses: action:%s}}]"
    build(spec % "s")
    with pytest.raises(DocumentError) as caught:
        build(spec % "x")
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("unsupported_capability", path)
    assert named in found.message


@pytest.mark.parametrize(
    ("policy", "action", "task", "path", "named"),
    [
        ("", "artifacts: [a]", "", "spec.actions.x.artifacts[0]", "writableRoots"),
        ("writableRoots: [out]", "artifacts: [out/a, ../a]", "", "spec.actions.x.artifacts[1]", "'..'"),
        ("", "", "with: {artifacts: [a]}", "spec.tasks[0].with.artifacts[0]", "writableRoots"),
        ("writableRoots: [out]", "", "with: {artifacts: [out/../a]}", "spec.tasks[0].with.artifacts[0]", "'..'"),
    ],
)
def test_artifacts_come_from_writable_roots(
    build: Any, policy: str, action: str, task: str, path: str, named: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        build(
            f"  policy: {{approval: never, {policy}}}\n"
            f"  actions: {{x: {{kind: builtin.shell.exec, command: x, {action}}}}}\n"
            f"  tasks: [{{id: a, uses: action:x, {task}}}]"
        )
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("policy_denied", path)
    assert named in found.message


@pytest.mark.parametrize("value", ["[5]", "['']", "a", "{a: b}"])
def test_artifacts_of_a_task_are_a_list_of_names(build: Any, value: str) -> None:
    with pytest.raises(DocumentError) as caught:
        build(
            "  policy: {approval: never, writableRoots: [out]}\n"
            "  actions: {x: {kind: builtin.shell.exec, command: x}}\n"
            f"  tasks: [{{id: a, uses: action:x, with: {{artifacts: {value}}}}}]"
        )
    assert {found.code for found in caught.value.diagnostics} == {"schema_violation"}


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ("{kind: builtin.assign, §command: x}", "command"),
        ("{kind: builtin.assign, §timeoutSeconds: 3}", "timeoutSeconds"),
        ("{kind: builtin.read, §idempotency: pure}", "idempotency"),
        ("{kind: builtin.shell.exec, command: x, §capabilities: [a]}", "capabilities"),
        ("{kind: builtin.memory.read, §stdoutLimitBytes: 1}", "stdoutLimitBytes"),
        ("{kind: extension.process, command: x, §parse: json}", "parse"),
    ],
)
def test_action_fields_fit_their_kind(build: Any, action: str, field: str) -> None:
    with pytest.raises(DocumentError) as caught:
        build(f"  actions: {{x: {action.replace('§', '')}}}\n  tasks: [{{id: a, uses: action:x}}]")
    found = caught.value.diagnostics[0]
    assert (found.code, found.path) == ("schema_violation", f"spec.actions.x.{field}")


def test_what_is_wrong_in_one_call_of_several_names_the_call_and_its_place(build: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        build(
            f"{ACTIONS}  subworkflows: {{w: {{version: 1.0.0, inputSchema: true, outputSchema: true, "
            "tasks: [{id: t, uses: action:set, foreach: {items: '${{ inputs.xs }}'}}]}}\n"
            "  tasks:\n"
            "    - {id: p, uses: action:set}\n"
            "    - {id: c, uses: workflow:w, needs: [p], with: {xs: [1]}}\n"
            "    - {id: d, uses: workflow:w, needs: [p], with: {xs: '${{ tasks.p.output.q }}'}}\n"
            "    - {id: e, uses: workflow:w, needs: [p], with: {xs: 5}}\n"
            "    - {id: f, uses: workflow:w, needs: [p]}\n"
        )
    found = sorted(item.message for item in caught.value.diagnostics)
    assert [message.rpartition(", in the call ")[2] for message in found] == [
        "'e' at 19:7",
        "'d' at 18:7",
        "'f' at 20:7",
    ]
    assert found[0].startswith("${{ inputs.xs }} gives a number")
    assert "--" not in "".join(found)


def test_no_hint_names_what_the_author_has_not_written(build: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        build(
            f"{ACTIONS}  subworkflows: {{w: {{version: 1.0.0, inputSchema: true, outputSchema: true, tasks: ["
            "{id: t, uses: action:set, with: {x: '${{ tasks.q.output }}'}}, "
            "{id: u, uses: action:put, with: {key: k, value: 1}, memoryWrites: [j]}]}}\n"
            "  tasks: [{id: a, uses: workflow:w}]"
        )
    first, second = caught.value.diagnostics
    assert first.help == "known tasks: t, u"
    assert second.message == "the key 'k' is written but not in memoryWrites"


@pytest.mark.parametrize(
    ("spec", "right"),
    [
        ("tasks: [{id: a, uses: action:set, when: tasks.a.output.x}]", "leave it out"),
        (
            "tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: '${{ tasks.a.output.x }}'}}]",
            "loop.output",
        ),
        (
            "tasks: [{id: r, uses: router, route: {select: '${{ inputs.x }}', cases: [{equals: 1, tasks: [r]}]}}]",
            "chooses from",
        ),
        ("tasks: [{id: a, uses: action:set, when: true}]", "such as inputs.stage"),
        ("tasks: [{id: a, uses: action:set, loop: {maxIterations: 2, while: true}}]", "loop.output.more"),
        ("tasks: [{id: a, uses: 5}]", "action:NAME"),
        (
            "subworkflows: {w: {version: 1.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: action:set}]}}\n"
            "  tasks: [{id: a, uses: workflow:w}]",
            "such as 1.0.0",
        ),
        (
            "subworkflows: {w: {version: 1.0.0, inputSchema: true, outputSchema: true, tasks: [{id: t, uses: workflow:w}]}}\n"
            "  tasks: [{id: a, uses: workflow:w}]",
            "a loop",
        ),
        (
            "vars: {s: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}\n  tasks: [{id: a, uses: action:set, matrix: {maxItems: 100000, "
            "axes: {a: '${{ vars.s }}', b: '${{ vars.s }}', c: '${{ vars.s }}', d: '${{ vars.s }}', e: '${{ vars.s }}', "
            "f: [1, 2]}}}]",
            "100000 at most",
        ),
    ],
)
def test_what_a_hint_says_leads_on(build: Any, spec: str, right: str) -> None:
    with pytest.raises(DocumentError) as caught:
        build(f"{ACTIONS}  {spec}")
    hint = caught.value.diagnostics[0].help
    assert hint is not None
    assert right in hint
    assert not re.match("quote it|add a to needs|raise|remove one of these", hint)


def test_hints(build: Any) -> None:
    for spec, hint in [
        ("tasks: [{id: a, uses: action:sett}]", "did you mean 'set'?"),
        ("tasks: [{id: a, uses: action:set, wiht: {}}]", "did you mean 'with'?"),
        ("tasks: [{id: first, uses: action:set}, {id: b, uses: action:set, needs: [frist]}]", "did you mean 'first'?"),
        ("tasks: [{id: a, uses: action:read, with: {path: x, pahts: y}}]", "did you mean 'path'?"),
        ("tasks: [{id: 12, uses: action:set}]", "a letter comes first, then letters, digits, _ and -"),
        ("tasks: [{id: a, uses: action:set, needs: [12]}]", 'quote it: "12"'),
        ("tasks: [{id: a, uses: action:set, timeoutSeconds: '5'}]", "remove the quotes"),
        ("tasks: [{id: a, uses: action:set, failure: stpo}]", "did you mean 'stop'?"),
        ("tasks: [{id: a, uses: action:set}, {id: b, uses: action:set, when: tasks.a.output.x}]", "add a to needs"),
    ]:
        with pytest.raises(DocumentError) as caught:
            build(f"{ACTIONS}  {spec}")
        assert caught.value.diagnostics[0].help == hint


def test_findings_of_task_checks_are_collected(build: Any) -> None:
    with pytest.raises(DocumentError) as caught:
        build(
            f"{ACTIONS}  outputs: {{o: '${{{{ x }}}}'}}\n  tasks:\n"
            "    - {id: a, uses: action:gone}\n    - {id: a, uses: action:set, needs: [zz]}\n"
            "    - {id: c, uses: action:read}\n"
        )
    assert sorted(item.code for item in caught.value.diagnostics) == [
        "duplicate_task",
        "invalid_template",
        "missing_reference",
        "missing_reference",
        "schema_violation",
    ]


def test_a_cycle_lists_what_it_holds_up_in_declaration_order(build: Any) -> None:
    tasks = "".join(
        f"    - {{id: {name}, uses: action:set, needs: [{need}]}}\n"
        for name, need in [("x", ""), ("c", "a"), ("b", "c"), ("a", "b"), ("after", "a")]
    )
    with pytest.raises(DocumentError, match="c -> b -> a -> after") as caught:
        build(f"{ACTIONS}  tasks:\n{tasks}")
    assert len(caught.value.diagnostics) == 1


def test_too_many_findings_are_cut(build: Any) -> None:
    tasks = "".join(f"    - {{id: t{n}, uses: action:gone}}\n" for n in range(500))
    with pytest.raises(DocumentError) as caught:
        build(f"{ACTIONS}  tasks:\n{tasks}")
    assert len(caught.value.diagnostics) == 101
    assert "400 more findings" in caught.value.diagnostics[-1].message


def test_of_many_findings_only_those_that_are_shown_are_put_into_words(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worded = []
    monkeypatch.setattr(
        "agentctl.coordinator.definition._diagnostic",
        lambda source, error: worded.append(error) or source.diagnostic("schema_violation", "x", error["loc"]),
    )
    fields = "".join(f"      odd{number}: 1\n" for number in range(2000))
    needs = ", ".join(["1"] * 3000)
    with pytest.raises(DocumentError) as caught:
        load(f"{HEAD}{ACTIONS}  tasks:\n    - id: a\n      uses: action:set\n{fields}      needs: [{needs}]\n")
    lines = [item.line for item in caught.value.diagnostics]
    assert lines == [*range(17, 117), None]
    assert caught.value.diagnostics[-1].message == "4900 more findings not shown"
    assert len(worded) == 100


def test_the_old_version_name_is_a_warning(load: Any) -> None:
    spec = "spec:\n  actions: {s: {kind: builtin.assign}}\n  tasks: [{id: a, uses: action:s}]\n"
    old = load(f"apiVersion: agentctl.dev/v1alpha1\nkind: Workflow\nmetadata: {{name: demo}}\n{spec}")
    new = load(f"apiVersion: agentctl.dev/v1\nkind: Workflow\nmetadata: {{name: demo}}\n{spec}")
    assert [(item.severity, item.code, item.line) for item in old.warnings] == [("warning", "unsupported_version", 1)]
    assert new.warnings == []
    assert compile_workflow(old).plan_digest == compile_workflow(new).plan_digest


def test_a_template_where_nothing_is_rendered_gets_a_warning(load: Any) -> None:
    document = load(
        f"{HEAD}  vars: {{v: '${{{{ inputs.a }}}}'}}\n"
        "  inputs: {a: 1, b: ['${{ vars.v }}']}\n"
        "  memory: {working: {k: '${{ inputs.a }}'}}\n"
        "  providers: {p: {kind: fake}}\n"
        "  agents: {g: {provider: p, model: m, instructions: '${{ vars.v }}', vars: {w: '${{ inputs.a }}'}}}\n"
        "  actions: {s: {kind: builtin.assign, with: {x: '${{ inputs.a }}'}}, c: {kind: builtin.shell.exec, command: x, args: ['${{ inputs.a }}']}}\n"
        "  tasks:\n"
        "    - {id: r, uses: router, route: {select: '${{ inputs.a }}', cases: [{equals: '${{ vars.v }}', tasks: [a]}]}}\n"
        "    - {id: a, uses: action:s, needs: [r], vars: {x: '${{ inputs.a }}'}}\n"
    )
    assert [item.path for item in document.warnings] == [
        "spec.vars.v",
        "spec.agents.g.vars.w",
        "spec.inputs.b",
        "spec.memory.working.k",
        "spec.actions.c.args",
        "spec.tasks[0].route.cases[0].equals",
    ]
    assert {(item.code, item.severity) for item in document.warnings} == {("invalid_template", "warning")}


PEERS = """  policy: {approval: never}
  mcpServers: {good: {url: 'http://h/mcp'}, far: {url: §URL}, old: {url: 'http://h/mcp', protocolVersion: '2024-11-05'}}
  a2aPeers: {good: {cardUrl: 'https://h/card'}, old: {cardUrl: 'https://h/card', protocolVersion: '0.3'}}
  actions: {m: {kind: mcp.call}, a: {kind: a2a.delegate}}
"""


@pytest.mark.parametrize(
    ("code", "path", "url", "task"),
    [
        ("missing_reference", "spec.tasks[0].with.server", "x", "uses: action:m, with: {server: gone, tool: t}"),
        ("schema_violation", "spec.tasks[0].with.tool", "x", "uses: action:m, with: {server: good}"),
        ("schema_violation", "spec.tasks[0].with.arguments", "x", "uses: action:m, with: {server: good, tool: t, arguments: [1]}"),
        ("schema_violation", "spec.tasks[0].with.more", "x", "uses: action:m, with: {server: good, tool: t, more: 1}"),
        ("schema_violation", "spec.tasks[0].compensate.with.arguments", "x", "uses: action:m, with: {server: good, tool: t}, compensate: {uses: action:m, with: {server: good, tool: t, arguments: [1]}}"),
        ("schema_violation", "spec.mcpServers.far.url", "ftp://h/", "uses: action:m, with: {server: far, tool: t}"),
        ("schema_violation", "spec.mcpServers.far.url", "http://u:p@h/", "uses: action:m, with: {server: far, tool: t}"),
        ("schema_violation", "spec.mcpServers.far.url", "nowhere", "uses: action:m, with: {server: '${{ inputs.s }}', tool: t}"),
        ("unsupported_capability", "spec.mcpServers.old.protocolVersion", "x", "uses: action:m, with: {server: old, tool: t}"),
        ("missing_reference", "spec.tasks[0].with.peer", "x", "uses: action:a, with: {peer: gone, messageId: m, message: m}"),
        ("schema_violation", "spec.tasks[0].with.messageId", "x", "uses: action:a, with: {peer: good, message: m}"),
        ("unsupported_capability", "spec.a2aPeers.old.protocolVersion", "x", "uses: action:a, with: {peer: old, messageId: m, message: m}"),
    ],
)  # fmt: skip
def test_servers_and_peers_are_checked_where_they_are_asked(
    build: Any, code: str, path: str, url: str, task: str
) -> None:
    head = PEERS.replace("§URL", f"'{url}'") + "  inputs: {s: good}\n"
    with pytest.raises(DocumentError) as caught:
        build(head + f"  tasks: [{{id: t, {task}}}]")
    assert (code, path) in {(found.code, found.path) for found in caught.value.diagnostics}


def test_an_action_carries_the_servers_that_it_may_ask(build: Any) -> None:
    head = PEERS.replace("§URL", "'http://far/mcp'") + "  inputs: {s: good}\n"
    head = head.replace(", protocolVersion: '2024-11-05'", "")
    plan = build(head + "  tasks: [{id: t, uses: action:m, with: {server: good, tool: t}}]")
    assert list(plan.actions["m"]["peers"]) == ["good"]
    plan = build(head + "  tasks: [{id: t, uses: action:m, with: {server: '${{ inputs.s }}', tool: t}}]")
    assert list(plan.actions["m"]["peers"]) == ["far", "good", "old"]


def test_a_call_that_undoes_a_task_has_the_limit_of_its_action(build: Any) -> None:
    head = PEERS.replace("§URL", "'http://far/mcp'").replace("kind: mcp.call", "kind: mcp.call, timeoutSeconds: 3")
    for own, limit in (("", 3), (", timeoutSeconds: 2", 2), (", timeoutSeconds: 9", 3)):
        undo = f"compensate: {{uses: action:m, with: {{server: good, tool: t}}{own}}}"
        plan = build(head + f"  tasks: [{{id: t, uses: action:m, with: {{server: good, tool: t}}, {undo}}}]")
        assert plan.tasks["t"].compensate["timeoutSeconds"] == limit


def test_the_literal_input_of_an_extension_is_checked(build: Any) -> None:
    action = (
        "  policy: {approval: never}\n  actions: {x: {kind: extension.process, command: x, idempotency: pure, outputSchema: {}, "
        "protocolVersion: agentctl.dev/process-extension/v1, "
        "inputSchema: {type: object, properties: {n: {type: integer}}, required: [n]}}}\n  inputs: {n: 1}\n"
    )
    build(action + "  tasks: [{id: t, uses: action:x, with: {n: 5}}]")
    build(action + "  tasks: [{id: t, uses: action:x, with: {n: '${{ inputs.n }}'}}]")
    for given in ("{n: x}", "{}"):
        with pytest.raises(DocumentError) as caught:
            build(action + f"  tasks: [{{id: t, uses: action:x, with: {given}}}]")
        (found,) = caught.value.diagnostics
        assert found.code == "schema_violation"


def test_advice_is_told_beside_the_message_and_not_within_it(tmp_path: Path) -> None:
    """Programs get it as `remedy` and `help`; glued to the message it would be said twice."""
    with pytest.raises(DocumentError) as caught:
        load_workflow(tmp_path / "nowhere.yaml")
    error = caught.value
    assert error.message.endswith("no such file")
    assert error.remedy == error.diagnostics[0].help is not None


@pytest.mark.parametrize(
    ("tasks", "circle"),
    [
        ("{id: x, uses: action:set, needs: [a]}, {id: a, uses: action:set, needs: §[b]}, {id: b, uses: action:set, needs: [a]}", "a needs b needs a"),
        ("{id: a, uses: action:set, foreach: {items: [1, 2]}, needs: §[b]}, {id: b, uses: action:set, needs: [a]}", "a needs b needs a"),
        ("{id: a, uses: action:set, loop: {maxIterations: 2, while: '${{ loop.output.x }}'}, needs: §[b]}, {id: b, uses: action:set, needs: [a]}", "a needs b needs a"),
    ],
)  # fmt: skip
def test_a_circle_is_named_as_it_is(load: Callable[[str], Any], tasks: str, circle: str) -> None:
    """The message has all that the circle holds up. The place and the advice are of the tasks in it, as the file calls them."""
    found, _, _ = first_finding(load, HEAD + ACTIONS + f"  tasks: [{tasks}]\n")
    assert found.help == f"{circle}: remove one of these `needs`"


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("tasks: [{id: a, uses: action:sh, with: {args: §'-i ${{ vars.x }}'}}]", 'args: ["first", "second"]'),
        ("tasks: [{id: a, uses: action:sh, with: {env: §'A=${{ vars.x }}'}}]", ""),
        ("tasks: [{id: a, uses: action:set, timeoutSeconds: §5m}]", "without a unit"),
        ("tasks: [{id: a, uses: action:set, timeoutSeconds: §'5'}]", "remove the quotes"),
        ("output: {verbose: §yes}\n  tasks: [{id: a, uses: action:set}]", "write true or false"),
        ("output: {verbose: §'true'}\n  tasks: [{id: a, uses: action:set}]", "remove the quotes"),
    ],
)  # fmt: skip
def test_advice_fits_the_slip(load: Callable[[str], Any], spec: str, advice: str) -> None:
    found, _, _ = first_finding(load, HEAD + ACTIONS + "  " + spec)
    assert found.code == "schema_violation"
    assert advice in (found.help or "")


def test_a_plain_variable_of_an_action_is_told_where_it_belongs(load: Callable[[str], Any]) -> None:
    spec = "  actions: {sh: {kind: builtin.shell.exec, command: ls, env: {LANG: §C}}}\n  tasks: [{id: a, uses: action:sh}]\n"
    found, _, _ = first_finding(load, HEAD + spec)
    assert "`env` in the `with` of the task" in (found.help or "")


def test_a_template_without_quotes_in_braces_is_told_to_be_quoted(load: Callable[[str], Any]) -> None:
    spec = "  tasks:\n    - {id: a, uses: action:set, foreach: {items: $§{{ inputs.x }}}}\n"
    found, _, _ = first_finding(load, HEAD + ACTIONS + spec)
    assert (found.code, "stands in quotes" in (found.help or "")) == ("yaml_syntax", True)


@pytest.mark.parametrize(
    ("tasks", "instead"),
    [
        ("[{id: a, uses: action:set, with: {x: §'${{ item.n }}'}}]", "write vars.item.n"),
        ("[{id: a, uses: action:set, when: §'inputs.a and inputs.b'}]", "one on each of two tasks"),
        ("[{id: a, uses: action:set, foreach: {items: §'${{ inputs.xs[0] }}'}}]", "take a foreach"),
        (
            "[{id: b, uses: action:set}, {id: a, uses: action:set, needs: [b], foreach: {items: §'${{ tasks.b.output }}'}}]",
            "take the items from an input or a variable",
        ),
    ],
)
def test_the_advice_about_a_template_fits_it(load: Callable[[str], Any], tasks: str, instead: str) -> None:
    finding, _, _ = first_finding(load, HEAD + ACTIONS + f"  tasks: {tasks}\n")
    assert instead in str(finding.help)


@pytest.mark.parametrize(
    ("tasks", "message", "instead"),
    [
        ("§[]", "tasks must not be empty: it needs 1 or more", None),
        ("[{id: a, uses: action:set, retry: {maxAttempts: §0}}]", "maxAttempts must be at least 1", None),
        (
            "[{id: a, uses: action:set, foreach: {items: [], maxItems: §1000000}}]",
            "maxItems must be at most 100000",
            None,
        ),
        ("[{id: b, uses: action:set}, {id: a, uses: action:set, needs: §b}]", "needs must be a list", "needs: [b]"),
    ],
)
def test_a_limit_and_a_list_are_told_in_words(
    load: Callable[[str], Any], tasks: str, message: str, instead: str | None
) -> None:
    finding, _, _ = first_finding(load, HEAD + ACTIONS + f"  tasks: {tasks}\n")
    assert finding.message == message
    assert (instead or "") in str(finding.help)
