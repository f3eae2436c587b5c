"""Wrong bounds and broken checkers: for each, the gates that must turn red and do. A gate that no mutant turns red would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from twinfer.invariants import auditor as auditor_module
from twinfer.invariants import expr, facts, laws, prove
from twinfer.invariants.auditor import Auditor
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BUFFERS, BY_NAME
from twinfer.invariants.expr import Binary, ByReference, Const, Expr, Relation, by_reference, ceil_div, minimum
from twinfer.invariants.ledger import Ledger
from twinfer.invariants.prove import Prover
from twinfer.invariants.symbols import (
    LOGIT_TILE,
    MAX_BATCH,
    MAX_BUCKET,
    MAX_CONTEXT,
    MAX_STEP_CONTEXT,
    NUM_PAGES,
    ONE_REFERENCE_A_ROW,
    PAGE_SIZE,
    ROW_EXTENT,
    SPLIT,
    SPLIT_REST,
    SPREAD_ROWS,
    SPREAD_SPLITS,
    STEP_EXTENT,
    VERIFY_TOKENS,
    WARMUP_TOKENS,
)
from twinfer.invariants.unit import ROWS, TASKS, TOKENS, Dimension

from ..engine.mutate import mutated
from . import test_auditor, test_bounds, test_expr, test_ledger, test_oracle
from .random_plans import Drawn, drawn_plans

Bounds = dict[str, Bound]
Gate = Callable[[Bounds], Any]
PLANS = drawn_plans()


def over_random_plans(check: Callable[[Drawn, Bounds], object], plans: SearchStrategy[Drawn] = PLANS) -> Gate:
    """A property as a gate: the first failing plan ends it, unshrunk."""

    def gate(bounds: Bounds) -> None:
        @given(plans)
        @settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
        def each(drawn: Drawn) -> None:
            check(drawn, bounds)

        each()

    return gate


def proven(bounds: Bounds) -> None:
    prover = Prover()
    changed = [name for name in WATCHED if bounds[name] is not BY_NAME[name]] or WATCHED  # a proof speaks of one bound alone
    for bound in {bounds[name].relation: bounds[name] for name in changed}.values():
        assert prover.bound(bound).verdict == "proved", bound.name


def readings(bounds: Bounds) -> None:
    """Four readings of one quotient that does not come out even."""
    a, b = expr.Sym("a", TOKENS), expr.Sym("b", TOKENS)
    test_expr.readings_agree(ceil_div(a, b) * a + a, {"a": 7, "b": 3})


def breakers(bounds: Bounds) -> None:
    """Each contract bound and each law is broken by a minimal plan, which is refused."""
    for name in test_auditor.CONTRACT_BREAKERS:
        test_auditor.test_a_bound_is_refused_by_name_and_numbers(name)
    for name in test_auditor.LAW_BREAKERS:
        test_auditor.test_a_broken_law_is_refused_by_name_with_its_rows(name)


def wrong_bound_refuted(bounds: Bounds) -> None:
    """The prover can say no."""
    assert Prover().bound(replace(BY_NAME["row_indptr"], capacity=MAX_BUCKET, shape=())).verdict == "refuted"


def units(bounds: Bounds) -> None:
    for mix in test_expr.MIXES:
        test_expr.test_units_do_not_mix(mix)


def another_size(bounds: Bounds) -> None:
    test_ledger.test_another_size_or_dtype_than_the_bound_is_refused(test_ledger.short, "change a limit")
    test_ledger.test_one_owner_gets_a_buffer_once()


GATES: dict[str, Gate] = {
    "proofs": proven,
    "random plans fit their buffers": over_random_plans(test_bounds.fits),
    "demand of random plans": over_random_plans(test_bounds.within),
    "facts against a naive count": over_random_plans(lambda drawn, bounds: test_bounds.facts_are_right(drawn)),
    "four readings": readings,
    "breakers are refused": breakers,
    "wrong bounds are refuted": wrong_bound_refuted,
    "units": units,
    "ledger": another_size,
    "judge": over_random_plans(lambda drawn, bounds: test_oracle.verdict(drawn), test_oracle.tampered()),
}

# Buffers of what a plan spreads, and of a tile of positions: each is made too small in turn below.
SPREAD = tuple(bound.name for bound in BUFFERS if bound.demand == SPREAD_SPLITS)
TILES = tuple(bound.name for bound in BUFFERS if bound.demand == LOGIT_TILE)
WATCHED = (
    "page_indices", "token_ids", "positions", "row_indptr", "page_indptr", "rope_table", "sampled_tokens", "seen_ids", "kv_keys", "page_table_width",
    *SPREAD, *TILES,
)  # fmt: skip


@dataclass(frozen=True)
class WrongBound:
    """A capacity that somebody might write; `red` are gates that must see it."""

    fault: str
    name: str
    capacity: Expr
    red: tuple[str, ...]


_FITS = ("proofs", "random plans fit their buffers", "demand of random plans")
_PLANNED = ("proofs", "demand of random plans")
_ROW_LIST = by_reference(ceil_div(ROW_EXTENT, PAGE_SIZE))
_OTHER_SPLITS = (SPREAD_ROWS - Const(1, ROWS)) * SPLIT_REST
WITHOUT_OVERSHOOT = minimum(ceil_div(MAX_STEP_CONTEXT + _OTHER_SPLITS, SPLIT), SPREAD_ROWS * ceil_div(MAX_CONTEXT, SPLIT))
WRONG_BOUNDS = (
    WrongBound("the page list is sized by the pool", "page_indices", by_reference(NUM_PAGES) + MAX_BATCH * ONE_REFERENCE_A_ROW, _FITS),
    WrongBound("padding rows list nothing", "page_indices", MAX_BATCH * _ROW_LIST, _FITS),
    WrongBound("the last, partly filled page is forgotten: floor for ceil", "page_indices", MAX_BUCKET * (_ROW_LIST - ONE_REFERENCE_A_ROW), _FITS),
    WrongBound("pages by the sum of contexts, as if rows shared partly filled pages", "page_indices", by_reference(ceil_div(STEP_EXTENT, PAGE_SIZE)), _FITS),
    WrongBound("look-ahead and verify tokens list no page", "page_indices", MAX_BUCKET * by_reference(ceil_div(MAX_CONTEXT, PAGE_SIZE)), _FITS),
    WrongBound("tokens by the warm-up forward", "token_ids", WARMUP_TOKENS, _FITS),
    WrongBound("positions by the warm-up forward", "positions", WARMUP_TOKENS, _FITS),
    WrongBound("tokens by decode rows alone", "token_ids", MAX_BUCKET * VERIFY_TOKENS, _FITS),
    WrongBound("row pointers without the last", "row_indptr", MAX_BUCKET, _FITS),
    WrongBound("page pointers by max_batch, which is no bucket", "page_indptr", MAX_BATCH + Const(1, BY_NAME["page_indptr"].unit), _FITS),
    WrongBound("positions beyond max_context", "rope_table", MAX_CONTEXT, ("proofs", "demand of random plans")),
    WrongBound("one sample a row", "sampled_tokens", MAX_BUCKET * Const(1, BY_NAME["row_samples"].unit), ("proofs", "demand of random plans")),
    WrongBound("seen tokens by the step's tokens", "seen_ids", BY_NAME["step_tokens"].capacity, ("proofs", "demand of random plans")),
    WrongBound("the padding page is forgotten", "kv_keys", NUM_PAGES, ("proofs", "demand of random plans")),
    WrongBound("a page list as long as max_context", "page_table_width", ceil_div(MAX_CONTEXT, PAGE_SIZE), ("proofs", "demand of random plans")),
    *(WrongBound(f"{name}: a row's last split, which is not full, is forgotten", name, ceil_div(STEP_EXTENT, SPLIT), _PLANNED) for name in SPREAD),
    *(WrongBound(f"{name}: one split a row, whatever its context", name, SPREAD_ROWS * Const(1, TASKS / ROWS), _PLANNED) for name in SPREAD),
    *(WrongBound(f"{name}: look-ahead and verify tokens are no keys", name, WITHOUT_OVERSHOOT, ("proofs",)) for name in SPREAD[:1]),
    *(WrongBound(f"{name}: one position a row of a graph", name, MAX_BUCKET * Const(1, TOKENS / ROWS), _PLANNED) for name in TILES),
)


def red(gate: str, bounds: Bounds = BY_NAME) -> bool:
    """Whether the gate fails; pytest's own failures (`pytest.raises` that saw nothing) are no Exceptions."""
    try:
        GATES[gate](bounds)
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_is_green_without_a_fault(gate: str) -> None:
    assert not red(gate)


@pytest.mark.parametrize("wrong", WRONG_BOUNDS, ids=lambda wrong: wrong.fault)
def test_a_wrong_bound_turns_its_gates_red(wrong: WrongBound) -> None:
    bounds = {**BY_NAME, wrong.name: replace(BY_NAME[wrong.name], capacity=wrong.capacity, shape=())}
    assert [gate for gate in wrong.red if not red(gate, bounds)] == []


def swapped(owner: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    patch = pytest.MonkeyPatch.context()

    class Swap(AbstractContextManager[None]):
        def __enter__(self) -> None:
            patch.__enter__().setattr(owner, name, value)

        def __exit__(self, *error: object) -> None:
            patch.__exit__(None, None, None)

    return Swap()


def floor_div(left: int, right: int) -> int:
    return left // right


CHECKERS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "a compiled check that never fails": (lambda: mutated(auditor_module, "compile_check", 'return {i}"', 'pass"'), "breakers are refused"),
    "a compiled check off by one": (lambda: mutated(Relation, "source", "{self.kind} {self.right", "{self.kind} 1 + {self.right"), "breakers are refused"),
    "a compiled ceil that rounds down": (lambda: mutated(Binary, "source", "(-(-{left} // {right}))", "({left} // {right})"), "four readings"),
    "an integer ceil that rounds down": (lambda: swapped(expr, "_INTEGER", {**expr._INTEGER, "cdiv": floor_div}), "four readings"),
    "a relation that holds whatever its sides": (
        lambda: mutated(Relation, "to_z3", 'return left <= right if self.kind == "<="', 'return left <= left if self.kind == "<="'),
        "wrong bounds are refuted",
    ),
    "a prover that takes unknown and sat for proved": (
        lambda: mutated(prove.Prover, "_decide", '"proved" if answer == z3.unsat', '"proved" if answer'),
        "wrong bounds are refuted",
    ),
    "a quotient without its lower side": (lambda: mutated(Binary, "to_z3", "quotient * right >= left, ", ""), "four readings"),
    "pages and page references are one unit": (lambda: swapped(Dimension, "__eq__", lambda a, b: True), "units"),
    "a ledger that takes any shape": (lambda: mutated(Ledger, "allocate", "tuple(made) != shape", "False"), "ledger"),
    "a ledger that forgets what it gave": (lambda: mutated(Ledger, "allocate", "if key in self._rows", "if False"), "ledger"),
    "contexts without the step's own tokens": (
        lambda: mutated(facts.StepView, "__init__", "plan.start + plan.length\n", "plan.start + 0 * plan.length\n"),
        "judge",
    ),
    "padding forgotten": (
        lambda: mutated(facts.StepView, "_columns", "limits.bucket(num_rows) if num_rows <= limits.buckets[-1]", "num_rows if True"),
        "facts against a naive count",
    ),
    "pages rounded down": (lambda: mutated(facts.StepView, "__init__", "(context + (page_size - 1)) //", "context //"), "facts against a naive count"),
    "blame on the whole step": (lambda: mutated(Auditor, "_culprits", "return alone", "return tuple(range(num_rows))"), "breakers are refused"),
    "laws of level full are never run": (
        lambda: mutated(Auditor, "__init__", 'law.level == "step" or level == "full"', 'law.level == "step"'),
        "judge",
    ),
    "a search for the rows at fault that finds none": (lambda: mutated(laws, "row_of", "entries[:size]]", "entries[:0]]"), "breakers are refused"),
    "by reference converts nothing": (
        lambda: mutated(ByReference, "__post_init__", "self.inner.dimension.by_reference()", "self.inner.dimension"),
        "by reference",
    ),
}
GATES["by reference"] = lambda bounds: test_expr.test_only_by_reference_turns_pages_into_references()


@pytest.mark.parametrize("fault", sorted(CHECKERS))
def test_a_broken_checker_turns_a_gate_red(fault: str) -> None:
    switch, gate = CHECKERS[fault]
    with switch():
        assert red(gate), f"{gate} stays green"


def test_every_gate_has_a_fault_that_turns_it_red() -> None:
    seen = {gate for wrong in WRONG_BOUNDS for gate in wrong.red} | {gate for _, gate in CHECKERS.values()}
    assert seen == set(GATES)
