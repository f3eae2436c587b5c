"""The logic gate: in float32, each feature of the fast engine gives the reference's log probabilities and tokens. Not speed, not bits.

The gate is 1e-3 nat over all tokens of all steps and the whole vocabulary (GATE). The weakest of the faults that it is there for moved 3e-2; the
largest difference seen here is 4e-5 (a CPU, where the two sum in different orders). The fast engine plans, both compute its plans, so that schedules
can't differ; a trace that the reference engine recorded goes the other way in test_traces.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fast.pair import GATE, Compared, Pair
from twinfer.golden import MICRO
from twinfer.request import FinishReason
from twinfer.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, max_tokens=3, temperature=1.0, seed=5)
TEXT = list(b"Now is the winter of our discontent made glorious summer by this sun of York; and all the clouds")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(MICRO, graphs=True, look_ahead=1)
    yield made
    made.close()


def check(pair: Pair, at_least: int) -> Compared:
    """Compares what has been launched; `at_least` positions must have been."""
    found = pair.compare()
    assert found.num_positions >= at_least
    assert found.largest <= GATE, f"{found.largest:.1e} nat from the reference"
    return found


@pytest.mark.parametrize(("look_ahead", "graphs"), [(0, False), (1, True), (2, True)])
def test_prefill_chunks_mixed_steps_hits_and_preemption(look_ahead: int, graphs: bool) -> None:
    pair = Pair(MICRO, graphs=graphs, look_ahead=look_ahead, page_size=8, num_pages=6, max_chunk_tokens=8, max_context=48)

    def join(step: int) -> None:
        if step == 1 + look_ahead:
            pair.engine.add(TEXT[50:57], replace(GREEDY, max_tokens=11))  # whole in one step
        if step == 3 + look_ahead:
            pair.engine.add(TEXT[:18], GREEDY)  # behind two pages of the first

    pair.serve((TEXT[:20], replace(GREEDY, max_tokens=9)), before_step=join)
    plans = pair.new_plans()
    assert any((plan.length == 7).any() and (plan.start[plan.length == 7] == 0).any() for plan in plans), "no prompt was computed whole"
    assert sum(int((plan.length == 8).sum()) for plan in plans) >= 2, "no prompt was computed in chunks"
    assert any(plan.length.max() > 1 and plan.length.min() == 1 for plan in plans), "no step was mixed"
    assert any(plan.num_tokens == plan.num_rows == 3 for plan in plans), "no step of three rows was padded to four"
    assert any((plan.tokens < 0).any() for plan in plans) is (look_ahead > 0), "tokens that only the device has"
    assert pair.engine.scheduler.num_prefix_hits > 0
    assert pair.engine.scheduler.num_preemptions > 0
    check(pair, at_least=45)
    pair.close()


KINDS: dict[str, SamplingParams] = {
    "seeded": SEEDED,
    "filters": replace(SEEDED, top_k=20, top_p=0.8, min_p=0.02, temperature=1.3),
    "penalties": replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "bias and bans": replace(SEEDED, logit_bias={101: 2.5, 32: -float("inf"), 7: -1.0}),
    "min tokens": replace(GREEDY, stop_token_ids=tuple(range(32, 128)), min_tokens=3),
    "seed of 64 bits": replace(SEEDED, seed=2**64 - 1),
}


def test_every_kind_of_sampling(pair: Pair) -> None:
    """In one batch after another, so that plain rows share steps with rows that need the host."""
    events = pair.serve(*((TEXT[i : i + 4], params) for i, params in enumerate(KINDS.values())))
    check(pair, at_least=4 * len(KINDS))
    for name, own in zip(KINDS, events.values(), strict=True):
        tokens = [token for event in own for token in event.tokens]
        assert len(tokens) >= 3, name
        assert 32 not in tokens or name != "bias and bans"


def test_log_probabilities_of_samples_and_prompts(pair: Pair) -> None:
    """Rows that ask beside rows that don't, with different numbers of alternatives; a prompt that is scored in chunks."""
    events = pair.serve(
        (TEXT[:19], replace(GREEDY, max_tokens=3, logprobs=5, prompt_logprobs=2)),
        (TEXT[3:9], replace(SEEDED, max_tokens=3, logprobs=0)),
        (TEXT[5:8], replace(GREEDY, max_tokens=3)),
        (TEXT[7:12], replace(GREEDY, max_tokens=2, prompt_logprobs=0)),
    )
    check(pair, at_least=40)
    scores = [event.prompt_logprobs for event in events[0] if event.prompt_logprobs is not None]
    assert [len(s) for s in scores] == [18]
    assert all(len(event.logprobs or ()) == 1 and len(event.logprobs[0].top) == 5 for event in events[0] if event.logprobs is not None)


def test_samples_of_one_prompt(pair: Pair) -> None:
    events = pair.serve((TEXT[:17], replace(SEEDED, n=3, temperature=2.0)))
    check(pair, at_least=17 + 3 * 2)
    drawn = {sample: tuple(t for e in events[0] if e.sample == sample for t in e.tokens) for sample in range(3)}
    assert len(set(drawn.values())) == 3, "samples of one seed draw different noise"


def test_an_abort_in_flight_touches_nobody_else(pair: Pair) -> None:
    def abort(step: int) -> None:
        if step == 4:
            pair.engine.abort(0)

    events = pair.serve((TEXT[:9], replace(GREEDY, max_tokens=30)), (TEXT[30:35], GREEDY), before_step=abort)
    after = pair.serve((TEXT[20:30], replace(GREEDY, max_tokens=2)))  # takes the pages that became free
    assert events[0][-1].finish_reason is FinishReason.ABORT
    assert [own[-1].finish_reason for own in (events[1], after[2])] == [FinishReason.LENGTH] * 2
    check(pair, at_least=25)


def test_a_step_that_fails_ends_its_rows_alone(pair: Pair) -> None:
    """A row of the failed step has an error; one that waited outside of it runs on, and its answers are the reference's."""
    model: Any = pair.engine.executor.model
    forward = model.forward

    def failing(*args: Any) -> torch.Tensor:
        model.forward = forward
        raise RuntimeError("a kernel was refused")

    def fail(step: int) -> None:
        if step == 2:
            model.forward = failing
        if step == 3:
            pair.engine.add(TEXT[40:48], replace(GREEDY, max_tokens=3))

    events = pair.serve((TEXT[:9], GREEDY), before_step=fail)
    assert "a kernel was refused" in str(events[0][-1].error)
    assert events[1][-1].finish_reason is FinishReason.LENGTH
    assert pair.engine.healthy
    check(pair, at_least=15)


def test_logits_that_are_not_numbers_end_their_row_alone(pair: Pair) -> None:
    """Both engines name the same rows; the others' logits are compared."""
    poisoned = 200
    for executor in (pair.engine.executor, pair.reference):
        _embedding(executor)[poisoned] = torch.nan
    events = pair.serve(
        (TEXT[:5], GREEDY),
        ([*TEXT[:3], poisoned], GREEDY),
        (TEXT[30:34], replace(SEEDED, logprobs=2)),
        ([poisoned, *TEXT[3:7]], replace(GREEDY, prompt_logprobs=1)),
    )
    found = check(pair, at_least=15)
    assert list(found.row_errors) == [1, 3]
    assert "nan" in found.row_errors[1]
    assert "prompt position 0 " in str(events[3][-1].error), "the first of those that are not numbers"
    assert [own[-1].finish_reason for own in events.values()] == [FinishReason.LENGTH, FinishReason.ERROR] * 2


def _embedding(executor: Any) -> torch.Tensor:
    weights = executor.model.weights
    found: torch.Tensor = weights["model.embed_tokens.weight"] if isinstance(weights, dict) else weights.embedding
    return found


def test_the_gate_can_fail(pair: Pair) -> None:
    """A norm weight that is 3 % off moves more than the gate allows."""
    weight = pair.engine.executor.model.weights.layers[1].mixer.k_norm
    weight.mul_(1.03)
    pair.serve((TEXT[:12], replace(GREEDY, max_tokens=1)))
    assert pair.compare().largest > GATE
