"""The fast engine's gates on as little as shows a fault: a dozen steps of `micro`, attention of a few rows, staging on the host. Not a test.

The tests of these gates are tests/fast and tests/kernels, which run far more.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from tests.fast import test_buffers, test_law2, test_staging
from tests.fast.pair import GATE, Pair
from tests.kernels import test_attention
from tests.kernels.order import sum_in_order
from tests.kernels.test_operations import test_triton_form_equals_plain_form as check_operation
from twinfer.golden import MICRO
from twinfer.invariants.gates.law2 import Law2
from twinfer.kernels.operations import OPERATIONS
from twinfer.sampling import SamplingParams

TEXT = list(b"Now is the winter of our discontent made glorious summer by this sun of York")
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def _pair(**limits: int) -> Pair:
    return Pair(MICRO, graphs=True, **{"look_ahead": 1, "page_size": 4, "max_step_tokens": 8, "max_chunk_tokens": 6, "max_context": 32, **limits})


def _check(pair: Pair, at_least: int) -> Any:
    found = pair.compare()
    assert found.num_positions >= at_least
    assert found.largest <= GATE, f"{found.largest:.1e} nat from the reference"
    return found


def alone() -> None:
    """One request, with a token that only the device has."""
    pair = _pair()
    pair.serve((TEXT[:5], replace(GREEDY, max_tokens=2)))
    assert any((plan.tokens < 0).any() for plan in pair.new_plans()), "no token was known to the device alone"
    _check(pair, at_least=6)
    pair.close()


def beside() -> None:
    """Three requests in a bucket of four, one of which ends early, and one of which begins a page."""
    pair = _pair()
    pair.serve((TEXT[8:11], GREEDY), (TEXT[30:31], replace(GREEDY, max_tokens=2)), (TEXT[20:21], replace(GREEDY, temperature=1.0, seed=3)))
    plans = pair.new_plans()
    assert any(plan.num_tokens == plan.num_rows == 3 for plan in plans), "no step of three rows was padded to four"
    assert any(plan.slot.tolist() != list(range(plan.num_rows)) for plan in plans), "every row was in the slot of its own number"
    assert any(len(plan.delta.entry_slot) == 1 for plan in plans), "no page table entry changed alone"
    _check(pair, at_least=10)
    pair.close()


def log_probabilities() -> None:
    """Rows that ask for different numbers of alternatives, of samples and of prompts."""
    pair = _pair()
    pair.serve((TEXT[:5], replace(GREEDY, max_tokens=1, logprobs=3, prompt_logprobs=2)), (TEXT[3:6], replace(GREEDY, max_tokens=1, logprobs=1)))
    _check(pair, at_least=8)
    pair.close()


def not_a_number() -> None:
    """Both engines name the same row, and the other one goes on."""
    poisoned = 200
    pair = _pair()
    weights: Any = (pair.engine.executor.model.weights.embedding, pair.reference.model.weights["model.embed_tokens.weight"])  # type: ignore[attr-defined]
    for embedding in weights:
        embedding[poisoned] = torch.nan
    events = pair.serve(([*TEXT[:3], poisoned], replace(GREEDY, max_tokens=1)), (TEXT[30:33], replace(GREEDY, max_tokens=1)))
    found = _check(pair, at_least=3)
    assert list(found.row_errors) == [0]
    assert "nan" in found.row_errors[0]
    assert [own[-1].error is None for own in events.values()] == [False, True]
    pair.close()


def staging() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for graphs in (True, False):
            test_staging.run(test_staging.SHAPES[0], graphs, patch)
        test_staging.run(test_staging.SHAPES[3], False, patch)
        test_staging.run_shared(patch)


def sets_in_flight() -> None:
    test_buffers.test_a_staging_set_stays_as_it_is_while_its_step_is_in_flight()


def padding_page() -> None:
    test_buffers.test_a_step_writes_its_own_slots_and_the_padding_page_alone()


def law_2() -> None:
    """Alone, without graphs, and in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        sum_in_order(patch)
        law = Law2(test_law2.make, test_law2.LIMITS, test_law2.PROMPTS[:1], num_tokens=1, batches=(), chunks=(8,))
        for finding in islice(law.run(), 3):
            assert finding.holds, f"{finding.schedule}: {len(finding.different)} of {finding.num_positions} positions have other bits"


def attention_bits() -> None:
    """A sequence whole and alone, its tokens in chunks and beside other rows, over more than one split."""
    with pytest.MonkeyPatch.context() as patch:
        sum_in_order(patch)
        sequences = test_attention.Sequences.random((276, 37), 1, 2, 64, 16, test_attention.DTYPES[0])
        whole = sequences.launch([(0, 0, 276)], test_attention.WIDE, spread=False)[0]
        assert whole.isfinite().all()
        rows: list[test_attention.Row] = [(1, 0, 37), (0, 275, 1), (0, 255, 1), (0, 100, 11), (0, 250, 16), (2, 0, 1)]
        for tile, spread in ((test_attention.NARROW, True), (test_attention.NARROW, False)):
            for (sequence, start, length), got in zip(rows, sequences.launch(rows, tile, spread), strict=True):
                if sequence == 0:
                    assert not test_attention.differing(got, whole[start : start + length]), f"{start}+{length}, {'SPREAD' if spread else 'SERIAL'}"


def used_workspace() -> None:
    with pytest.MonkeyPatch.context() as patch:
        sum_in_order(patch)
        test_attention.test_a_used_workspace_is_as_good_as_new()


# Cases by operation that the faults of the catalogue show in; tests/kernels/test_operations.py runs all.
CASES = {"update_page_table": (1,), "embedding": (0, 1), "swiglu": (0,), "qk_norm_rope_write": (0, 1), "attention": (1, 3),
         "route": (1, 2), "grouped_gate_up": (0,), "grouped_down": (0,), "combine": (1,)}  # fmt: skip


def operations() -> None:
    by_name = {operation.name: operation for operation in OPERATIONS}
    for name, indices in CASES.items():
        for index in indices:
            check_operation(by_name[name], by_name[name].cases[index], torch.float32)
