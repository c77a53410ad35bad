"""What a document compiles to depends on nothing but the document: not on the order of its maps, nor on the machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentctl.coordinator.compiler import compile_workflow
from agentctl.coordinator.definition import document_from_source
from agentctl.coordinator.diagnostics import DocumentError
from agentctl.coordinator.plan import Plan
from agentctl.coordinator.yaml_document import parse_document
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.constructs import Program, programs, write_program
from support.scale import repeats


def plan_of(document: dict[str, Any]) -> Plan:
    source = parse_document(json.dumps(document).encode(), "flow.yaml")
    return compile_workflow(document_from_source(source, base_dir=Path("/base")), inputs={})


def shuffled(value: Any, chance: random.Random) -> Any:
    """The same JSON with the members of every object in another order."""
    if isinstance(value, list):
        return [shuffled(item, chance) for item in value]
    if not isinstance(value, dict):
        return value
    members = list(value.items())
    chance.shuffle(members)
    return {key: shuffled(item, chance) for key, item in members}


@settings(max_examples=repeats(100, 20), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(program=programs(), chance=st.integers(0, 2**32))
def test_expansion_is_stable_under_reordering_of_maps(program: Program, chance: int) -> None:
    document = program.document(4)
    plan, other = plan_of(document), plan_of(shuffled(document, random.Random(chance)))
    assert plan.order == other.order == program.nodes
    assert (plan.workflow_digest, plan.plan_digest) == (other.workflow_digest, other.plan_digest)
    assert list(plan.canonical_chunks()) == list(other.canonical_chunks())


@settings(max_examples=repeats(2_000, 150), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(program=programs(80), chance=st.integers(0, 2**32))
def test_a_damaged_document_is_refused_and_never_crashes(program: Program, chance: int) -> None:
    """Any part of a document replaced by any other: findings with a place, or a plan that is whole."""
    draw = random.Random(chance)
    document = json.loads(json.dumps(program.document(4)))
    for _ in range(draw.choice([1, 1, 2, 3])):
        damage(document, draw)
    try:
        plan = plan_of(document)
    except DocumentError as error:
        assert error.diagnostics
        assert all(found.line is not None and found.column is not None for found in error.diagnostics)
    else:
        assert Plan.from_json(json.loads("".join(plan.canonical_chunks()))) == plan
        seen: set[str] = set()
        for name in plan.order:
            assert seen.issuperset(plan.tasks[name].needs)
            seen.add(name)


def damage(document: dict[str, Any], chance: random.Random) -> None:
    """Replace, remove or exchange something below `spec`."""
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [document["spec"]]
    while pending:
        holder = pending.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                pending.append(holder[key])
    holder, key = chance.choice(places)
    other, other_key = chance.choice(places)
    what = chance.randrange(4)
    if what == 0:
        holder[key] = chance.choice(
            [None, 0, 1, -1, 1.5, True, "", "t0", "t1", "${{", "${{ tasks.t0.output }}", [], {}]
        )
    elif what == 1 and isinstance(holder, dict):
        del holder[key]
    elif what == 2:
        holder[key] = json.loads(json.dumps(other[other_key]))
    else:
        one, two = json.loads(json.dumps([holder[key], other[other_key]]))
        holder[key] = two
        if other is not holder or other_key != key:
            other[other_key] = one


def test_a_plan_depends_on_neither_hash_seed_nor_locale_nor_place(tmp_path: Path) -> None:
    """The same digest from processes that differ in all that Python takes from its surroundings."""
    program = max((write_program(seed) for seed in range(12)), key=lambda made: len(made.nodes))
    document = program.document(4)
    document["metadata"]["description"] = "Größe, naïve, İstanbul, 漢字"
    code = (
        "import hashlib, json, locale, pathlib, sys\n"
        "try: locale.setlocale(locale.LC_ALL, '')\n"
        "except locale.Error: pass\n"
        "from agentctl.coordinator.definition import load_workflow\n"
        "from agentctl.coordinator.compiler import compile_workflow\n"
        "plan = compile_workflow(load_workflow(pathlib.Path('flow.yaml')))\n"
        "text = ''.join(plan.canonical_chunks()).encode()\n"
        "print(plan.plan_digest, hashlib.sha256(text).hexdigest(), hash('x'))\n"
    )
    seen = []
    surroundings = [
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Kolkata", "PYTHONUTF8": "1"},
        {"PYTHONHASHSEED": "3", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONUTF8": "0"},
    ]
    for number, environment in enumerate(surroundings):
        folder = tmp_path / f"place {number}"
        folder.mkdir()
        (folder / "flow.yaml").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.append(done.stdout.split())
    assert len({(digest, text) for digest, text, _ in seen}) == 1
    assert len({number for _, _, number in seen}) == len(seen)
    assert seen[0][0] == plan_of(document).plan_digest
