"""The proofs hold for all limits, wrong bounds are refuted with a counterexample, and no assumption is idle or contradictory."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import z3
from hypothesis import given, settings

from tests.budget import examples, repeatable
from twinfer.invariants import prove
from twinfer.invariants.bound import Bound
from twinfer.invariants.bounds import BOUNDS, BY_NAME
from twinfer.invariants.expr import Const, by_reference, ceil_div
from twinfer.invariants.laws import LAWS
from twinfer.invariants.prove import FACT_NAMES, Prover, ProverMissing, lemmas, main, prove_all
from twinfer.invariants.symbols import (
    MAX_BATCH,
    MAX_BUCKET,
    MAX_CONTEXT,
    NUM_PAGES,
    NUM_ROWS,
    ONE_REFERENCE_A_ROW,
    PADDED_ROWS,
    PAGE_SIZE,
    ROW_EXTENT,
    SPECULATIVE_TOKENS,
    WARMUP_TOKENS,
)
from twinfer.invariants.unit import UnitMismatch

from .random_plans import Drawn, drawn_plans, environment

NO_PADDING = PADDED_ROWS.equals(NUM_ROWS)  # so that an example shows the outage, not padding
NO_DRAFTS = SPECULATIVE_TOKENS.equals(Const(0, SPECULATIVE_TOKENS.dimension))


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
    proof = Prover().smallest(with_capacity("page_indices", forced), [NO_PADDING])
    assert proof.verdict == "refuted"
    at = proof.counterexample
    assert at["page_references"] + at["padded_rows"] - at["num_rows"] > at["num_pages"] + at["max_batch"]
    assert at["page_references"] > at["num_pages"], "without sharing, a page cannot be listed more than once"
    assert max(at[name] for name in FACT_NAMES) <= 10, "not the smallest"
    assert at["num_pages"] >= at["num_rows"] > 1, "not a step that requests can make: each writes a page of its own"
    assert f"{at['num_rows']} request" in proof.words
    assert "shared page" in proof.words
    assert f"needs {at['page_references'] + at['padded_rows'] - at['num_rows']} page references" in proof.words
    assert f"it holds {at['num_pages'] + at['max_batch']} (num_pages + max_batch x 1)" in proof.words


def test_the_capped_profiling_outage_is_refuted_in_words() -> None:
    for name in ("token_ids", "positions", "write_slots"):
        proof = Prover().smallest(with_capacity(name, WARMUP_TOKENS), [NO_PADDING, NO_DRAFTS])
        assert proof.verdict == "refuted"
        demand = BY_NAME[name].demand.evaluate(proof.counterexample)
        assert demand == proof.counterexample["num_tokens"] > proof.counterexample["warmup_tokens"]
        assert f"{name} needs {demand} tokens" in proof.words
        assert f"it holds {proof.counterexample['warmup_tokens']} (warmup_tokens)" in proof.words


def test_a_true_bound_has_no_words() -> None:
    proof = Prover().smallest(BY_NAME["page_indices"])
    assert (proof.verdict, proof.words, proof.counterexample) == ("proved", "", {})


@given(drawn_plans())
@settings(max_examples=examples(40), deadline=None, derandomize=repeatable(), database=None)
def test_real_plans_satisfy_what_the_proofs_assume(drawn: Drawn) -> None:
    """An assumption that some right plan breaks would leave that plan unproven; so each is tested against plans, not only taken for granted."""
    prover, env = Prover(), environment(drawn)
    for name, terms in {**prover.assumptions, "what makes an example realistic": prover._realistic()}.items():
        solver = z3.Solver()
        solver.add(*(prover.env[symbol] == value for symbol, value in env.items()), *prover.assumptions["facts are counts"], *terms)
        assert solver.check() == z3.sat, name


def test_an_assumption_named_after_a_check_names_one_that_exists() -> None:
    """Laws and bounds that the proofs rest on are checked at run time under that very name."""
    names = [name.split(":")[0].split() for name in Prover().assumptions]
    laws, bounds = [n[1] for n in names if n[0] == "law"], [n[1] for n in names if n[0] == "bound"]
    assert len(laws) == 4
    assert set(laws) <= {law.name for law in LAWS}
    assert len(bounds) == 1
    assert set(bounds) <= set(BY_NAME)


def test_without_z3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "z3", None)
    with pytest.raises(ProverMissing, match=r"twinfer\[prove\]"):
        prove_all()


def test_the_command_prints_every_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main() == 0
    assert capsys.readouterr().out.count("proved") == len(BOUNDS) + len(lemmas())
    wrong = with_capacity("kv_keys", NUM_PAGES)
    monkeypatch.setattr(prove, "prove_all", lambda: [Prover().bound(wrong)])
    assert main() == 1
    assert "refuted" in capsys.readouterr().out


def test_undecided_is_not_proved() -> None:
    """z3 gets no time: the verdict is unknown, which the suite and the command take as a failure."""
    prover = Prover(timeout_ms=1)
    x, y, n = z3.Ints("x y n")
    hard = [x > 1, y > 1, n > 3, x * x * x + y * y * y == n * n * n]
    assert prover._decide("fermat", hard, z3.BoolVal(False)).verdict == "unknown"


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
    kinds = {bound.relation: bound for bound in BOUNDS}.values()  # many buffers ask the same of a plan
    idle = []
    for name in Prover().assumptions:
        prover = Prover(dropped=name, timeout_ms=1500)
        if not any(prover.bound(bound).verdict == "refuted" for bound in kinds):
            idle.append(name)
    assert idle == []
