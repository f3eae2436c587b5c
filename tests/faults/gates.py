"""The gates of `invariants.faults.gate` as calls without arguments, which return where all is well and raise where something is not. Not a test.

Most run other tests' checks, on as little as shows a fault: the tests themselves run far more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

from tests.engine import test_audit, test_containment, test_distrust, test_eviction, test_snapshots
from tests.engine.test_machine import EngineMachine
from tests.engine.test_snapshot_machine import SnapshotMachine
from tests.faults import draws, fast_gates, law2_toy, scores
from tests.golden import test_compare
from tests.golden.conftest import ROOT, rebuilt_logits
from tests.hybrid import test_plan as hybrid_plan
from tests.hybrid import test_snapshots as hybrid_snapshots
from tests.invariants import test_auditor, test_bounds, test_expr, test_ledger, test_oracle
from tests.invariants.random_plans import Drawn, drawn_plans
from tests.kernels import test_attention_tasks, test_sampling
from tests.model import tiny
from tests.model.driver import run_alone
from tests.outages import capped_profiling, shared_prefixes
from twinfer.golden.manifest import load_goldens
from twinfer.invariants.bounds import BY_NAME
from twinfer.invariants.expr import Relation, Sym, ceil_div
from twinfer.invariants.prove import Prover
from twinfer.invariants.symbols import MAX_BUCKET
from twinfer.invariants.unit import TOKENS

Gate = Callable[[], object]
PLANS = drawn_plans()


# ---- bounds and laws ---------------------------------------------------------------------------------------------------------------


def over_random_plans(check: Callable[[Drawn], object], plans: SearchStrategy[Drawn] = PLANS) -> Gate:
    """A property as a gate: the first failing plan ends it, unshrunk."""

    def gate() -> None:
        @given(plans)
        @settings(max_examples=800, deadline=None, derandomize=True, database=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
        def each(drawn: Drawn) -> None:
            check(drawn)

        each()

    return gate


_proved: set[Relation] = set()  # by an earlier call: what was proved once needs no second proof


def proofs() -> None:
    """One proof for each thing that bounds ask of a plan; many buffers ask the same."""
    prover = Prover()
    for relation, bound in {bound.relation: bound for bound in BY_NAME.values()}.items():
        if relation not in _proved:
            assert prover.bound(bound).verdict == "proved", bound.name
            _proved.add(relation)


def readings() -> None:
    """Four readings of one quotient that does not come out even."""
    a, b = Sym("a", TOKENS), Sym("b", TOKENS)
    test_expr.readings_agree(ceil_div(a, b) * a + a, {"a": 7, "b": 3})


def breakers() -> None:
    for name in test_auditor.CONTRACT_BREAKERS:
        test_auditor.test_a_bound_is_refused_by_name_and_numbers(name)
    for name in test_auditor.LAW_BREAKERS:
        test_auditor.test_a_broken_law_is_refused_by_name_with_its_rows(name)
    test_auditor.test_a_column_of_another_dtype_is_refused_by_name("length")


def refutations() -> None:
    """The prover can say no."""
    assert Prover().bound(replace(BY_NAME["row_indptr"], capacity=MAX_BUCKET, shape=())).verdict == "refuted"


def units() -> None:
    for mix in test_expr.MIXES:
        test_expr.test_units_do_not_mix(mix)


def ledger() -> None:
    test_ledger.test_another_size_or_dtype_than_the_bound_is_refused(test_ledger.short, "change a limit")
    test_ledger.test_one_owner_gets_a_buffer_once()


def outputs() -> None:
    test_auditor.test_output_is_checked()
    test_auditor.test_what_an_output_holds_has_its_dtype()


def audit() -> None:
    patched = pytest.MonkeyPatch()
    with patched.context() as patch:
        test_audit.test_with_it_the_scan_after_a_step_finds_a_lost_reference("full", patch)
        test_audit.test_with_it_the_scan_before_a_launch_refuses_the_row_at_fault("full", patch)


# ---- decisions ---------------------------------------------------------------------------------------------------------------------


def machine(which: type[EngineMachine] = EngineMachine) -> None:
    """Up to 1500 random runs; test_machine.py has others, of other seeds. How many are needed changes with the modules that are loaded: hypothesis draws the
    numbers that it finds in them."""
    quick = settings(
        max_examples=1500, stateful_step_count=40, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        report_multiple_bugs=False, derandomize=True,
    )  # fmt: skip
    run_state_machine_as_test(which, settings=quick)


def snapshots() -> None:
    machine(SnapshotMachine)


def _without_parameters(module: ModuleType) -> None:
    """Every test of the module that needs no fixture."""
    for name, check in vars(module).items():
        if name.startswith("test_") and not inspect.signature(check).parameters:
            check()


def containment() -> None:
    _without_parameters(test_containment)


def snapshot_hits() -> None:
    test_snapshots.test_the_same_prompt_hits_the_last_point_before_its_end(64, 1)
    _without_parameters(test_snapshots)


def copies_of_states() -> None:
    with TemporaryDirectory() as folder:
        hybrid_snapshots.test_the_reference_goes_on_from_a_snapshot("qwen3_next", Path(folder))


def grid_of_states() -> None:
    for page_size in (48, 96):
        with TemporaryDirectory() as folder:
            hybrid_plan.test_a_page_that_shares_no_grid_with_chunks_is_refused(page_size, Path(folder))


# ---- arithmetic --------------------------------------------------------------------------------------------------------------------


@cache
def _checkpoints() -> tuple[TemporaryDirectory[str], list[tuple[Path, torch.Tensor]]]:
    """Tiny random checkpoints and transformers' logits of them, with and without a sliding window; made once. The folder lives as long as this."""
    folder = TemporaryDirectory()
    made = []
    for name in ("untied", "window_by_layer_types"):
        path = tiny.write_checkpoint(Path(folder.name) / name, tiny.VARIANTS[name])
        made.append((path, tiny.hf_logits(tiny.load_hf(path, "float32"), scores.TOKENS, scores.PIECES[0])))
    return folder, made


def transformers() -> None:
    """Within the float32 gate; a NaN is not."""
    from twinfer.engine.checkpoint import Checkpoint
    from twinfer.reference.qwen3 import Qwen3

    for path, expected in _checkpoints()[1]:
        found = Checkpoint.open(path)
        ours = run_alone(Qwen3(found.config, found.weights(torch.float32)), scores.TOKENS, scores.PIECES, page_size=3)
        difference = tiny.nats(ours, expected)
        assert difference <= scores.GATE, f"{difference:.1e} nat from transformers"


# ---- kernels -----------------------------------------------------------------------------------------------------------------------


def task_list() -> None:
    met, neighbours, bounds = (
        check.hypothesis.inner_test  # type: ignore[attr-defined]
        for check in (
            test_attention_tasks.test_every_token_meets_every_key_once,
            test_attention_tasks.test_splits_of_a_tile_are_neighbours_and_partials_do_not_overlap,
            test_attention_tasks.test_bounds_hold,
        )
    )

    @given(test_attention_tasks.ROWS, test_attention_tasks.TILE_TOKENS)
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=(Phase.generate,))
    def each(rows: test_attention_tasks.Rows, tile_tokens: int) -> None:
        for spread in (False, True):
            met(rows, tile_tokens, spread)
            bounds(rows, tile_tokens, spread, 2)
        neighbours(rows, tile_tokens)

    each()


def triton_sampler() -> None:
    test_sampling.test_adjusted_scores_are_the_references_to_the_bit()
    test_sampling.test_words_are_the_references_to_the_bit()
    test_sampling.test_failing_positions_are_named_as_the_reference_names_them()
    test_sampling.test_of_a_tie_the_lowest_ids_win_across_blocks_and_chunks(test_sampling.CUT_UP)


# ---- checks of checks --------------------------------------------------------------------------------------------------------------


def golden_comparison() -> None:
    micro = load_goldens(ROOT / "micro")
    case = micro.cases[test_compare.CASE]
    right = rebuilt_logits(case)[0]
    test_compare.test_right_logits_pass(case, right)
    for where in ((0, 0), (256, 31)):
        test_compare.test_one_nan_fails(case, right, where)
    test_compare.test_infinity_fails(case, right)
    test_compare.test_zero_positions_raise(case, micro)
    test_compare.test_shifted_positions_fail(case, right)
    test_compare.test_constant_offset_is_seen(case, right)
    test_compare.test_bad_shapes_dtypes_positions(case, right)


RUNNERS: dict[str, Gate] = {
    "proofs": proofs,
    "random plans fit": over_random_plans(test_bounds.fits),
    "random demand": over_random_plans(test_bounds.within),
    "naive facts": over_random_plans(test_bounds.facts_are_right),
    "judge": over_random_plans(test_oracle.verdict, test_oracle.tampered()),
    "breakers": breakers,
    "readings": readings,
    "refutations": refutations,
    "units": units,
    "references": test_expr.test_only_by_reference_turns_pages_into_references,
    "ledger": ledger,
    "outputs": outputs,
    "audit": audit,
    "machine": machine,
    "snapshots": snapshots,
    "snapshot hits": snapshot_hits,
    "copies of states": copies_of_states,
    "grid of states": grid_of_states,
    "distrust": test_distrust.test_a_snapshot_behind_anothers_page_is_no_longer_found,
    "prompt scores": scores.check_prompt_scores,
    "eviction by pool": test_eviction.test_evictions_follow_the_last_use_whatever_the_traffic,
    "eviction by engine": test_eviction.check_engine_order,
    "containment": containment,
    "shared prefixes": shared_prefixes.gate,
    "capped profiling": capped_profiling.gate,
    "transformers": transformers,
    **draws.GATES,
    "fast alone": fast_gates.alone,
    "fast beside": fast_gates.beside,
    "fast scores": fast_gates.log_probabilities,
    "not a number": fast_gates.not_a_number,
    "staging": fast_gates.staging,
    "sets in flight": fast_gates.sets_in_flight,
    "padding page": fast_gates.padding_page,
    "law 2": fast_gates.law_2,
    "attention bits": fast_gates.attention_bits,
    "used workspace": fast_gates.used_workspace,
    "task list": task_list,
    "operations": fast_gates.operations,
    "Triton sampler": triton_sampler,
    "law 2 finds": law2_toy.gate,
    "golden comparison": golden_comparison,
}

# Errors of Python itself, and of a gate that was called wrongly: a fault that dies of one is broken, and shows nothing.
BROKEN = ("NameError", "SyntaxError", "TypeError", "AttributeError", "UnboundLocalError", "IndentationError", "InvalidArgument")


class BrokenFault(Exception):
    """A gate failed for a reason that has nothing to do with what it checks."""


def red(gate: str) -> str:
    """What the gate says where it fails, "" where it passes. pytest's own failures are no Exceptions. Raises BrokenFault."""
    try:
        RUNNERS[gate]()
    except (Exception, pytest.fail.Exception) as error:
        told = first_words(error)
        if any(f"{name}: " in told for name in BROKEN):
            raise BrokenFault(f"{gate}: {told}") from error
        return told
    return ""


def first_words(error: BaseException) -> str:
    """Of what failed first: a state machine that has failed still tears down, and says what is left undone."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def red_of(gates: Iterable[str]) -> dict[str, str]:
    """The gates that fail, with what they say."""
    found: dict[str, Any] = {gate: red(gate) for gate in gates}
    return {gate: told for gate, told in found.items() if told}
