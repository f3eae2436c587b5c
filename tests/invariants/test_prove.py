"""The proofs hold for all limits, wrong bounds are refuted with a counterexample, and no assumption is idle or contradictory."""

from __future__ import annotations

import dataclasses

import pytest

from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS, BY_NAME
from twinfer.invariants.expr import Const, by_reference, ceil_div
from twinfer.invariants.prove import Prover, lemmas, prove_all
from twinfer.invariants.symbols import (
    MAX_BATCH,
    MAX_BUCKET,
    MAX_CONTEXT,
    NUM_PAGES,
    ONE_REFERENCE_A_ROW,
    PAGE_SIZE,
    ROW_EXTENT,
    WARMUP_TOKENS,
)
from twinfer.invariants.unit import UnitMismatch


def with_capacity(name: str, capacity: object) -> Bound:
    bound = BY_NAME[name]
    return dataclasses.replace(bound, capacity=capacity, shape=())  # type: ignore[arg-type]


def test_everything_is_proved() -> None:
    proofs = prove_all()
    assert {p.name: p.verdict for p in proofs if p.verdict != "proved"} == {}
    assert len(proofs) == len(lemmas()) + len(BOUNDS)


def test_the_shared_prefix_outage_is_refuted_in_words() -> None:
    """The pool's pages cannot even be compared with page references; forced through, a plan exceeds them."""
    with pytest.raises(UnitMismatch):
        with_capacity("page_indices", NUM_PAGES)
    forced = by_reference(NUM_PAGES) + MAX_BATCH * ONE_REFERENCE_A_ROW  # the bound that failed in openinfer #403
    proof = Prover().bound(with_capacity("page_indices", forced))
    assert proof.verdict == "refuted"
    at = proof.counterexample
    words = f"{at['num_rows']} requests list {at['page_references']} pages of a pool of {at['num_pages']}"
    assert at["page_references"] + at["padded_rows"] - at["num_rows"] > at["num_pages"] + at["max_batch"], words


def test_the_capped_profiling_outage_is_refuted() -> None:
    for name in ("token_ids", "positions", "write_slots"):
        proof = Prover().bound(with_capacity(name, WARMUP_TOKENS))
        assert proof.verdict == "refuted"
        assert proof.counterexample["num_tokens"] > proof.counterexample["warmup_tokens"] or proof.counterexample["uniform_rows"] > 0


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        ("page_indices", MAX_BATCH * by_reference(ceil_div(ROW_EXTENT, PAGE_SIZE))),  # padding rows forgotten
        ("page_indices", MAX_BUCKET * by_reference(ceil_div(MAX_CONTEXT, PAGE_SIZE))),  # look-ahead and verify tokens forgotten
        ("row_indptr", MAX_BUCKET),  # the last entry of a row-pointer array forgotten
        ("kv_keys", NUM_PAGES),  # the padding page forgotten
        ("rope_table", MAX_CONTEXT),  # overshoot tokens have positions too
        ("sampled_tokens", MAX_BUCKET * Const(1, BY_NAME["row_samples"].unit)),  # one sample a row, verify rows forgotten
    ],
)
def test_wrong_capacities_are_refuted(name: str, capacity: object) -> None:
    assert Prover().bound(with_capacity(name, capacity)).verdict == "refuted"


def test_the_assumptions_are_satisfiable_and_each_is_needed() -> None:
    assert Prover().consistent()
    # Refuted, not merely undecided: a plan exists that breaks the rest and exceeds a bound. Products make some searches long, so each is short.
    idle = []
    for name in Prover().assumptions:
        prover = Prover(dropped=name, timeout_ms=500)
        if not any(prover.bound(bound).verdict == "refuted" for bound in BOUNDS):
            idle.append(name)
    assert idle == []
