"""The workflows that `agentctl init` starts from. Each one runs as it stands."""

from __future__ import annotations

HELLO = """\
# Run it:  agentctl run FILE.yaml --input name=Ada
apiVersion: agentctl.dev/v1
kind: Workflow
metadata:
  name: NAME-OF-WORKFLOW
  description: Makes a greeting.
spec:
  # Inputs have defaults here; a run replaces them with --input KEY=VALUE or --inputs-file FILE.
  inputs:
    name: world
  # Variables are for what seldom changes. `agentctl explain` shows where each one comes from.
  vars:
    greeting: Hello
  # What tasks can do. builtin.assign only computes: it has no effect outside.
  actions:
    compose:
      kind: builtin.assign
    verify:
      kind: builtin.assert
  # A task starts when all that it needs have succeeded.
  tasks:
    - id: greet
      uses: action:compose
      with:
        text: "${{ vars.greeting }}, ${{ inputs.name }}!"
    - id: proof
      uses: action:verify
      needs: [greet]
      with:
        that: ${{ tasks.greet.output.output.text != "" }}
        message: the greeting must not be empty
  # What the run gives back.
  outputs:
    text: ${{ tasks.greet.output.output.text }}
"""

COMMANDS = """\
# Run it:  agentctl run FILE.yaml
apiVersion: agentctl.dev/v1
kind: Workflow
metadata:
  name: NAME-OF-WORKFLOW
  description: Runs programs, one after the other.
spec:
  inputs:
    folder: .
  policy:
    # Nothing is allowed that is not named here. Programs are started without a shell.
    processAllowlist: [ls, date]
    # mutations (the default) asks a person before each program; never asks nobody.
    approval: never
  actions:
    list:
      kind: builtin.shell.exec
      command: ls
      # Says that it may be started again after a crash. Leave it out for what must never happen twice.
      idempotency: idempotent
    stamp:
      kind: builtin.shell.exec
      command: date
      args: [-u]
      idempotency: idempotent
  tasks:
    - id: list
      uses: action:list
      timeoutSeconds: 60
      # A failed attempt is followed by others, after 1 s and then 2 s.
      retry:
        maxAttempts: 3
        backoffMs: 1000
        backoffMultiplier: 2.0
      with:
        args: ["-1", --, "${{ inputs.folder }}"]
    - id: stamp
      uses: action:stamp
      needs: [list]
  outputs:
    files: ${{ tasks.list.output.stdout }}
    at: ${{ tasks.stamp.output.stdout }}
"""

FILES = """\
# See what it would write:  agentctl run FILE.yaml --check --diff
# Run it:                   agentctl run FILE.yaml
# It pauses before it writes. `agentctl approvals list` shows what is asked, `agentctl approvals approve ID` allows
# it, and `agentctl resume RUN` goes on.
apiVersion: agentctl.dev/v1
kind: Workflow
metadata:
  name: NAME-OF-WORKFLOW
  description: Writes a file, after a person has agreed, and reads it back.
spec:
  inputs:
    title: Notes
  policy:
    # Folders that may be written; without any, no write is possible.
    writableRoots: [build]
    # A person has to approve what changes something outside.
    approval: mutations
  actions:
    write:
      kind: builtin.write
    read:
      kind: builtin.read
  tasks:
    - id: write
      uses: action:write
      with:
        path: build/notes.md
        content: |
          # ${{ inputs.title }}
    - id: read
      uses: action:read
      needs: [write]
      with:
        path: build/notes.md
  outputs:
    content: ${{ tasks.read.output.content }}
"""

FAN_OUT = """\
# Run it:  agentctl run FILE.yaml --input 'words=["one","two","three"]'
apiVersion: agentctl.dev/v1
kind: Workflow
metadata:
  name: NAME-OF-WORKFLOW
  description: Does the same with each item of a list, several at a time.
spec:
  inputs:
    words: [alpha, beta, gamma]
  policy:
    approval: never
    processAllowlist: [printf]
  runtime:
    # Most tasks at a time.
    maxConcurrency: 4
  actions:
    shout:
      kind: builtin.shell.exec
      command: printf
      idempotency: pure
  tasks:
    - id: each
      uses: action:shout
      # One child task for each item; maxItems is the most that are accepted.
      foreach:
        items: ${{ inputs.words }}
        as: word
        maxItems: 100
      # continue: a failed child does not stop the others.
      failure: continue
      with:
        args: ["%s!", "${{ vars.word }}"]
  outputs:
    # One entry for each child: index, taskId, state, output, error.
    results: ${{ tasks.each.output.items }}
"""

TEXTS = {"hello": HELLO, "commands": COMMANDS, "files": FILES, "fan-out": FAN_OUT}
