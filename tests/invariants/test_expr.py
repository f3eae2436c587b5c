"""Units refuse to mix, and the four readings of one formula (integers, compiled, z3, text) give one value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import z3
from hypothesis import given, settings

from tests.budget import examples, repeatable
from twinfer.invariants.bound import Bound, concrete_dtype
from twinfer.invariants.bounds import BOUNDS
from twinfer.invariants.expr import Const, Expr, Relation, Sym, by_reference, ceil_div, compile_check, maximum, minimum
from twinfer.invariants.symbols import MAX_BATCH, MAX_STEP_TOKENS, NUM_PAGES, NUM_TOKENS, PAGE_REFS, PAGE_SIZE
from twinfer.invariants.unit import BYTES, ONE, PAGE_REFERENCES, PAGES, ROWS, TOKENS, Dimension, Unit, UnitMismatch, of

NAMES = ("a", "b", "c", "d")
ONE_TOKEN = Const(1, TOKENS)


def grow(trees: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    """Every node that an expression may have, all in tokens; a quotient of tokens has no unit and scales another tree."""
    pairs = st.tuples(trees, trees)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] - p[1]),
        pairs.map(lambda p: minimum(*p)),
        pairs.map(lambda p: maximum(*p)),
        st.tuples(trees, trees, trees).map(lambda p: p[0] * ceil_div(p[1], maximum(p[2], ONE_TOKEN))),
        st.tuples(trees, st.integers(0, 9)).map(lambda p: p[0] * p[1]),
    )


LEAVES = st.one_of(st.sampled_from(NAMES).map(lambda name: Sym(name, TOKENS)), st.integers(0, 50).map(lambda n: Const(n, TOKENS)))
TREES = st.recursive(LEAVES, grow, max_leaves=8)
ENVIRONMENTS = st.fixed_dictionaries({name: st.integers(0, 1000) for name in NAMES})


def read_text(text: str, env: dict[str, int]) -> int:
    """What a person would compute from the printed formula, in exact fractions."""
    source = re.sub(r"\b(\d+)\b", r"F(\1)", text.replace(" x ", " * "))
    return int(eval(source, {"F": Fraction, "ceil": math.ceil, "min": min, "max": max, **{k: Fraction(v) for k, v in env.items()}}))


def read_z3(expr: Expr, env: dict[str, int]) -> int:
    """The one value that z3 allows the term to have."""
    side: list[object] = []
    value, free = z3.Int("value"), {name: z3.Int(name) for name in env}
    term = expr.to_z3(free, side)
    solver = z3.Solver()
    solver.add(*(free[name] == number for name, number in env.items()), *side, value == term)
    assert solver.check() == z3.sat
    found = solver.model()[value].as_long()
    solver.add(value != found)
    assert solver.check() == z3.unsat, "the term has two values"
    return int(found)


def readings_agree(expr: Expr, env: dict[str, int]) -> None:
    value = expr.evaluate(env)
    assert eval(expr.source(), dict(env)) == value
    assert read_text(expr.text(), env) == value
    assert read_z3(expr, env) == value


@given(TREES, ENVIRONMENTS)
@settings(max_examples=examples(150), deadline=None, derandomize=repeatable(), database=None)
def test_the_four_readings_agree(expr: Expr, env: dict[str, int]) -> None:
    readings_agree(expr, env)


@given(st.data())
@settings(max_examples=examples(30), deadline=None, derandomize=repeatable(), database=None)
def test_the_four_readings_of_every_bound_agree(data: st.DataObject) -> None:
    bound = data.draw(st.sampled_from(BOUNDS))
    for expr in (bound.capacity, bound.demand):
        names = {symbol.name: (symbol.label or symbol.name) for symbol in expr.symbols()}
        env = {name: data.draw(st.integers(1, 300), label=name) for name in names}
        value = expr.evaluate(env)
        assert eval(expr.source(), dict(env)) == value
        assert read_z3(expr, env) == value
        text = expr.text()
        for name, label in names.items():
            text = text.replace(label, name)
        assert read_text(text, env) == value


@given(TREES, TREES, ENVIRONMENTS)
@settings(max_examples=examples(150), deadline=None, derandomize=repeatable(), database=None)
def test_a_compiled_check_names_the_first_relation_that_fails(left: Expr, right: Expr, env: dict[str, int]) -> None:
    relations = [left <= right, left < right + ONE_TOKEN, left.equals(right)]
    check = compile_check(relations, NAMES[:2], {name: env[name] for name in NAMES[2:]})
    wanted = next((i for i, relation in enumerate(relations) if not relation.evaluate(env)), -1)
    assert check([env[name] for name in NAMES[:2]]) == wanted
    kinds = {"<=": left.evaluate(env) <= right.evaluate(env), "==": left.evaluate(env) == right.evaluate(env)}
    assert relations[0].evaluate(env) == kinds["<="]
    assert relations[2].evaluate(env) == kinds["=="]


MIXES: dict[str, Callable[[], object]] = {
    "sum": lambda: NUM_PAGES + PAGE_REFS,
    "difference": lambda: NUM_PAGES - PAGE_REFS,
    "minimum": lambda: minimum(NUM_PAGES, PAGE_REFS),
    "maximum": lambda: maximum(NUM_PAGES, PAGE_REFS),
    "at most": lambda: PAGE_REFS <= NUM_PAGES,
    "less": lambda: PAGE_REFS < NUM_PAGES,
    "equal": lambda: PAGE_REFS.equals(NUM_PAGES),
    "bound": lambda: Bound("page_indices", PAGE_REFERENCES, "int32", NUM_PAGES, PAGE_REFS, "sized by the pool"),
}


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_units_do_not_mix(mix: str) -> None:
    with pytest.raises(UnitMismatch) as error:
        MIXES[mix]()
    assert {str(error.value.left), str(error.value.right)} == {"pages", "page references"}
    assert "pages" in str(error.value)
    assert "page references" in str(error.value)


def test_a_bare_number_has_no_unit() -> None:
    with pytest.raises(UnitMismatch, match="one"):
        MAX_BATCH + 1
    assert (MAX_BATCH * 2).dimension == ROWS


def test_only_by_reference_turns_pages_into_references() -> None:
    assert by_reference(NUM_PAGES).dimension == PAGE_REFERENCES
    assert by_reference(ceil_div(NUM_TOKENS, PAGE_SIZE)).dimension == PAGE_REFERENCES
    assert ceil_div(NUM_TOKENS, PAGE_SIZE).dimension == PAGES
    assert by_reference(MAX_STEP_TOKENS).dimension == TOKENS


DIMENSIONS = st.lists(st.sampled_from(list(Unit)), max_size=4).map(lambda units: math.prod(map(of, units), start=ONE))


@given(DIMENSIONS, DIMENSIONS)
@settings(max_examples=examples(100), deadline=None, derandomize=repeatable(), database=None)
def test_dimensions_multiply_and_divide(left: Dimension, right: Dimension) -> None:
    assert left * right == right * left
    assert left * right / right == left
    assert (left / left) == ONE
    assert str(ONE) == "one"


def test_the_units_are_a_closed_set() -> None:
    assert [unit.value for unit in Unit] == ["rows", "tokens", "pages", "page references", "state slots", "snapshots", "tasks", "elements", "bytes"]


def test_a_bound_says_what_to_change_and_is_its_own_axis() -> None:
    bound = Bound("rows", ROWS, "int32", MAX_BATCH, MAX_BATCH, "example")
    assert "max_batch" in bound.remedy
    assert bound.bytes_expr("float32").dimension == BYTES
    with pytest.raises(ValueError, match="no axis"):
        Bound("rows", ROWS, "int32", MAX_BATCH, MAX_BATCH, "example", shape=(Const(3),))
    with pytest.raises(ValueError, match="int7"):
        concrete_dtype("int7", "float32")


def test_relations_print_as_they_are_read() -> None:
    assert str(Relation("<=", PAGE_REFS, by_reference(NUM_PAGES))) == "page_references <= num_pages"
    assert (Sym("a", TOKENS) - (Sym("b", TOKENS) - ONE_TOKEN)).text() == "a - (b - 1)"
