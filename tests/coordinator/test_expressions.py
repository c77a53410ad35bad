"""The grammar of templates and conditions (contract 1.11)."""

from __future__ import annotations

import timeit
from typing import Any

import pytest
from agentctl.coordinator.expressions import (
    Ref,
    Scope,
    TemplateError,
    compile_condition,
    compile_value,
    compile_vars,
    has_template,
    is_exact_template,
    json_equal,
    rename_condition,
    rename_paths,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SCOPE = Scope(
    inputs={
        "a": 1,
        "f": 1.0,
        "t": True,
        "n": None,
        "s": "text",
        "o": {"x": [1], "k-1": {"_": 2}},
        "e": "",
        "big": 2**70,
    },
    vars={"tpl": "${{ inputs.a }}", "zero": 0},
    memory={"m": 3},
    tasks={"t1": {"output": {"y": 2}}, "t--0001-ab": {"z": 1}},
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("${{ inputs.a }}", 1),
        ("${{inputs.o}}", {"x": [1]}),
        ("${{ inputs.o.k-1._ }}", 2),
        ("${{ inputs.n }}", None),
        ("${{ tasks.t1.output }}", {"output": {"y": 2}}),
        ("${{ tasks.t1.output.output.y }}", 2),
        ("${{ tasks.t--0001-ab.output.z }}", 1),
        ("${{ memory.m }}", 3),
        ("${{ vars.tpl }}", "${{ inputs.a }}"),
        ("<${{ vars.tpl }}>", "<${{ inputs.a }}>"),
        ("${{inputs.a}}${{ inputs.f }}|${{ inputs.t }}|${{ inputs.n }}|${{ inputs.s }}", "11.0|true|null|text"),
        ("$${{ inputs.a }}", "$1"),
        (" ${{ inputs.a }}", " 1"),
        ("${{ inputs.a == 1 }}", True),
        ("${{ inputs.a == 1.0 }}", False),
        ("${{ inputs.a == '1' }}", False),
        ('${{ inputs.s == "text" }}', True),
        ("${{ inputs.s == text }}", True),
        ("${{ inputs.s == 'text' }}", True),
        ("${{ inputs.s != other }}", True),
        ("${{ inputs.t == true }}", True),
        ("${{ inputs.n == null }}", True),
        ("${{ inputs.o.x == [1] }}", True),
        ("${{ inputs.o.x == [1.0] }}", False),
        ("${{ inputs.a <= 1.0 }}", True),
        ("${{ inputs.a < 1 }}", False),
        ("${{ inputs.big > 1e10 }}", True),
        ("${{ memory.m >= 3 }}", True),
        ("${{ not inputs.a }}", False),
        ("${{ not inputs.a == 2 }}", True),
        ("${{ not vars.zero }}", True),
        ("${{ inputs.s == a<=b }}", False),
    ],
)
def test_rendering(text: str, value: Any) -> None:
    found = compile_value(text)(SCOPE)
    if text == "${{inputs.o}}":
        assert found is SCOPE.inputs["o"]
        return
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("${{ inputs.a", "unclosed"),
        ("x ${{ inputs.a }} ${{", "unclosed"),
        ("${{ }}", "empty"),
        ("a ${{}} b", "empty"),
        ("${{ inputs }}", "unsupported"),
        ("${{ inputs. }}", "unsupported"),
        ("${{ inputs..a }}", "unsupported"),
        ("${{ inputs.a[0] }}", "unsupported"),
        ("${{ inputs.'a' }}", "unsupported"),
        ("${{ env.HOME }}", "unsupported"),
        ("${{ tasks.t1 }}", "unsupported"),
        ("${{ tasks.t1.result }}", "unsupported"),
        ("${{ inputs.a == }}", "unsupported"),
        ("${{ == 1 }}", "unsupported"),
        ("${{ inputs.a < 'x' }}", "unsupported"),
        ("${{ inputs.a > inputs.f }}", "unsupported"),
        ("${{ inputs.a < 1e400 }}", "unsupported"),
        ("n ${{ inputs.a == 1 }}", "unsupported"),
        ("n ${{ not inputs.a }}", "unsupported"),
        ("${{ inputs.a && inputs.b }}", "unsupported"),
    ],
)
def test_static_errors(text: str, kind: str) -> None:
    with pytest.raises(TemplateError) as caught:
        compile_value({"deep": [text]})
    assert caught.value.kind == kind
    assert caught.value.as_json()["details"]["kind"] == kind
    assert caught.value.code == "template_error"
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("${{ inputs.gone }}", "undefined"),
        ("${{ inputs.a.b }}", "undefined"),
        ("${{ inputs.o.x.y }}", "undefined"),
        ("${{ tasks.gone.output }}", "undefined"),
        ("${{ tasks.t1.output.gone }}", "undefined"),
        ("${{ memory.gone }}", "undefined"),
        ("${{ vars.gone }}", "undefined"),
        ("<${{ inputs.o }}>", "non_scalar"),
        ("<${{ inputs.o.x }}>", "non_scalar"),
        ("${{ inputs.n < 3 }}", "unsupported"),
        ("${{ inputs.t < 3 }}", "unsupported"),
        ("${{ inputs.s >= 3 }}", "unsupported"),
        ("${{ inputs.gone == null }}", "undefined"),
    ],
)
def test_run_time_errors(text: str, kind: str) -> None:
    renderer = compile_value(text)
    with pytest.raises(TemplateError) as caught:
        renderer(SCOPE)
    assert caught.value.kind == kind


def test_constants_are_not_copied_and_parts_are_shared() -> None:
    value = {"a": {"b": [1]}, "c": "${{ inputs.a }}"}
    renderer = compile_value(value)
    assert not renderer.constant
    result = renderer(SCOPE)
    assert result == {"a": {"b": [1]}, "c": 1}
    assert result["a"] is value["a"]
    assert value["c"] == "${{ inputs.a }}"
    constant = compile_value(value["a"])
    assert constant.constant
    assert constant(SCOPE) is value["a"]
    assert compile_value(3)(SCOPE) == 3


def test_keys_are_not_rendered() -> None:
    assert compile_value({"${{ inputs.a }}": 1})(SCOPE) == {"${{ inputs.a }}": 1}


def test_references() -> None:
    renderer = compile_value(["${{ inputs.o.x }}", {"k": "a ${{ tasks.t1.output.output.y }} ${{ memory.m }}"}, 1])
    assert renderer.references == {
        Ref("inputs", ("o", "x")),
        Ref("tasks", ("t1", "output", "y")),
        Ref("memory", ("m",)),
    }
    assert compile_condition("vars.v == 1").references == {Ref("vars", ("v",))}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("inputs.a", True),
        ("${{ inputs.a }}", True),
        (" ${{ inputs.a == 1 }} ", True),
        ("inputs.a == 2", False),
        ("not inputs.a", False),
        ("vars.zero", False),
        ("inputs.e", False),
        ("inputs.s", True),
        ("inputs.n", False),
        ("inputs.o", True),
        ("inputs.f", True),
    ],
)
def test_conditions(text: str, value: bool) -> None:
    assert compile_condition(text)(SCOPE) is value


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("${{ }}", "empty"),
        ("${{ inputs.a", "unclosed"),
        ("${{ inputs.a }} and ${{ inputs.b }}", "unsupported"),
        ("true", "unsupported"),
        ("inputs.a and inputs.b", "unsupported"),
    ],
)
def test_bad_conditions(text: str, kind: str) -> None:
    with pytest.raises(TemplateError) as caught:
        compile_condition(text)
    assert caught.value.kind == kind


def test_a_missing_path_in_a_condition_is_an_error() -> None:
    with pytest.raises(TemplateError, match=r"inputs\.gone does not exist"):
        compile_condition("inputs.gone")(SCOPE)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("inputs.n > 1 and inputs.s == 2", "for `and` put one on each of two tasks"),
        ("inputs.a || inputs.b", "for `or` take a router"),
        ("inputs.names[0]", "take a foreach"),
        ("inputs.names | length", "no functions"),
        ("len(inputs.names)", "no functions"),
        ("item.n", "write vars.item.n"),
        ("matrix.os", "write vars.matrix.os"),
        ("loopIndex < 3", "write vars.loopIndex"),
        ("loop.output.x", "vars.loopPrevious"),
        ("env.HOME", "as a secret"),
        ("tasks.a.stdout", "write tasks.a.output.stdout"),
        ("steps.a.outputs.x.y", "write tasks.a.output.x.y"),
        ("tasks.a", "write tasks.a.output"),
        ("inputs.größe", "names in a path"),
        ("tasks.a.output.größe", "names in a path"),
    ],
)
def test_what_is_no_path_here_is_answered_with_what_to_write(text: str, instead: str) -> None:
    with pytest.raises(TemplateError) as caught:
        compile_value(f"${{{{ {text} }}}}")
    assert instead in str(caught.value.help)


def test_what_no_advice_fits_gets_none() -> None:
    for text in ("a", "one two", "inputs", "inputs.a b"):
        with pytest.raises(TemplateError) as caught:
            compile_value(f"${{{{ {text} }}}}")
        assert caught.value.help is None


def test_a_missing_path_tells_what_there_is() -> None:
    """The names only: values may be large, or nobody's business."""
    output = {"output": {"title": "x"}, "status": "ok", "text": "secret", "list": [1], "none": None, "empty": {}}
    scope = Scope(tasks={"a": output}, inputs={"many": {f"k{index:02}": 0 for index in range(20)}})
    told = {
        "tasks.a.output.title": "tasks.a.output has empty, list, none, output, status, text",
        "tasks.a.output.output.text": "tasks.a.output.output has title",
        "tasks.a.output.text.x": "tasks.a.output.text is text",
        "tasks.a.output.list.0": "tasks.a.output.list is a list",
        "tasks.a.output.none.x": "tasks.a.output.none is null",
        "tasks.a.output.empty.x": "tasks.a.output.empty is empty",
        "inputs.many.x": "inputs.many has k00, k01, k02, k03, k04, k05, k06, k07, k08, k09, k10, k11 and 8 more",
    }
    for path, what in told.items():
        with pytest.raises(TemplateError) as caught:
            compile_value(f"${{{{ {path} }}}}")(scope)
        assert caught.value.message == f"{path} does not exist: {what}"


def test_data_variables_are_not_rendered() -> None:
    variables = {"item": "${{ inputs.a }}", "x": "${{ inputs.a }}"}
    assert compile_vars(variables)(SCOPE) == {"item": 1, "x": 1}
    assert compile_vars(variables, ("item",))(SCOPE) == {"item": "${{ inputs.a }}", "x": 1}
    assert compile_vars(variables, ("item", "x"))(SCOPE) is variables


def test_helpers() -> None:
    assert is_exact_template("${{ a }}")
    assert not is_exact_template("${{ a }}${{ b }}")
    assert not is_exact_template(1)
    assert has_template({"a": [{"b": "x ${{ y }}"}]})
    assert not has_template({"${{ a }}": 1})


_VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)


@settings(max_examples=60, deadline=None)
@given(_VALUES, _VALUES)
def test_json_identity_never_mixes_kinds(left: Any, right: Any) -> None:
    if left in (float("inf"), float("-inf")) or right in (float("inf"), float("-inf")):
        return
    assert json_equal(left, left)
    assert json_equal(left, right) == (type(left) is type(right) and repr(left) == repr(right))


@settings(max_examples=60, deadline=None)
@given(st.text("$abc{}. =not'\"<0", max_size=25))
def test_any_text_compiles_or_is_refused_with_a_kind(text: str) -> None:
    try:
        compile_value(text)(SCOPE)
    except TemplateError as error:
        assert error.kind in {"unclosed", "empty", "unsupported", "undefined", "non_scalar"}


def test_rendering_is_fast() -> None:
    renderer = compile_value({"path": "out/${{ inputs.s }}.txt", "content": "${{ tasks.t1.output.output }}", "n": 1})
    best = min(timeit.repeat(lambda: renderer(SCOPE), number=1000, repeat=5)) / 1000
    assert best < 100e-6


# ------------------------------------------------------------------------------------------- renaming


def _in_a_call(reference: Ref) -> str | None:
    return {"inputs": "tasks.b.output.x", "tasks": "tasks.n--t.output.y"}.get(reference.root)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("${{ inputs.x }}", "${{ tasks.b.output.x }}"),
        ("${{inputs.x}}", "${{tasks.b.output.x}}"),
        ("a ${{ inputs.x }} inputs.x", "a ${{ tasks.b.output.x }} inputs.x"),
        ("${{ tasks.t.output.y }} or ${{ inputs.x }}", "${{ tasks.n--t.output.y }} or ${{ tasks.b.output.x }}"),
        ("${{ not inputs.x == 'inputs.x' }}", "${{ not tasks.b.output.x == 'inputs.x' }}"),
        ("${{ inputs.x != inputs.x }}", "${{ tasks.b.output.x != inputs.x }}"),
        ("${{ vars.inputs.x }}", "${{ vars.inputs.x }}"),
        ("${{ inputs.x", "${{ inputs.x"),
        ("${{ inputs.x }} ${{ }} ${{ inputs.x }}", "${{ tasks.b.output.x }} ${{ }} ${{ tasks.b.output.x }}"),
        ("inputs.x", "inputs.x"),
        ({"inputs.x": ["${{ inputs.x }}", 1]}, {"inputs.x": ["${{ tasks.b.output.x }}", 1]}),
    ],
)  # fmt: skip
def test_paths_are_renamed_and_nothing_else(before: Any, after: Any) -> None:
    assert rename_paths(before, _in_a_call) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("inputs.x", "tasks.b.output.x"),
        ("not inputs.x", "not tasks.b.output.x"),
        ("inputs.x == not inputs.x", "tasks.b.output.x == not inputs.x"),
        ("${{ tasks.t.output.y > 1 }}", "${{ tasks.n--t.output.y > 1 }}"),
        ("inputs.x and inputs.y", "inputs.x and inputs.y"),
    ],
)
def test_a_condition_is_renamed_with_or_without_its_wrapper(before: str, after: str) -> None:
    assert rename_condition(before, _in_a_call) == after


def test_a_comparison_that_fails_shows_its_expression_within_bounds() -> None:
    for left in ("inputs.x", "inputs." + ".".join(["y" * 90] * 4)):
        text = f"{left} > 3"
        value: object = "text"
        for part in reversed(left.split(".")[1:]):
            value = {part: value}
        assert isinstance(value, dict)
        with pytest.raises(TemplateError) as caught:
            compile_condition(text)(Scope(inputs=value))
        assert text[:200] in caught.value.message
        assert len(caught.value.message) < 260
