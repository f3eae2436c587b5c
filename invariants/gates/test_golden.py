"""Gate: greedy tokens and log probabilities are those that HF transformers computed of the same checkpoint in float64. The record is in the package."""

from __future__ import annotations

import pytest

from twinfer.golden.manifest import Case
from twinfer.invariants.gates.adapter import Ask
from twinfer.invariants.gates.judge import Judge, Tally
from twinfer.invariants.gates.oracle import Oracle, golden_logprobs
from twinfer.invariants.gates.prompts import Prompts
from twinfer.invariants.gates.subject import Subject

# One token, and around every page of 16, 32, 64 and 128 tokens.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
NUM_POSITIONS = 40  # of a prompt's log probabilities that the record must hold


def document(oracle: Oracle, length: int) -> Case:
    """The shortest document of at least `length` tokens."""
    return min((d for d in oracle.goldens.documents.values() if len(d.token_ids) >= length), key=lambda d: len(d.token_ids))


def compare_next(engine: Subject, judge: Judge, case: Case, lengths: tuple[int, ...]) -> None:
    """The token after each beginning of a document, each request alone."""
    ids = case.token_ids.tolist()
    tally = Tally()
    for length in lengths:
        (answer,) = engine.generate([Ask(tuple(ids[:length]), 1)])
        wanted = golden_logprobs(case.fp64, length - 1)
        assert wanted, f"the record of {case.name} lacks position {length - 1}"
        # Outside the likeliest 64 the 64th stands in: a lower bound, and far over any limit.
        own = wanted.get(answer.tokens[0], min(wanted.values()))
        difference = None if answer.logprobs is None else abs(answer.logprobs[0] - own)
        tally.add(f"{case.name}, after {length} tokens", max(wanted.values()) - own, difference)
    tally.judged().check(judge.few)


def test_next_token_after_each_length(engine: Subject, judge: Judge, twinfer_oracle: Oracle) -> None:
    case = document(twinfer_oracle, max(LENGTHS))
    compare_next(engine, judge, case, LENGTHS)


def test_next_token_after_a_long_prompt(engine: Subject, judge: Judge, twinfer_oracle: Oracle) -> None:
    """2049 tokens: beyond tables of positions that are too short, and longer than most engines' chunks."""
    compare_next(engine, judge, document(twinfer_oracle, 2049), (1025, 2049))


@pytest.mark.parametrize("length", [257, 2049])
@pytest.mark.twinfer_requires("prompt_logprobs")
def test_logprobs_of_a_prompt(engine: Subject, judge: Judge, twinfer_oracle: Oracle, length: int) -> None:
    case = document(twinfer_oracle, length)
    ids = case.token_ids.tolist()
    (answer,) = engine.generate([Ask(tuple(ids), 1, prompt_logprobs=True)])
    assert answer.prompt_logprobs is not None
    tally = Tally()
    for position, given in enumerate(answer.prompt_logprobs):
        wanted = golden_logprobs(case.fp64, position).get(ids[position + 1])
        if wanted is not None:
            tally.add(f"{case.name}, token {position + 1}", 0.0, abs(given - wanted))
    found = tally.judged()
    assert found.num_positions >= NUM_POSITIONS
    found.check(judge.many)


def test_generated_tokens(engine: Subject, judge: Judge, prompts: Prompts) -> None:
    """Decoding goes on as a prefill of the same tokens would: each generated token is scored by the oracle, which was held against the record."""
    asks = [Ask(prompts.fresh(length), 24) for length in (1, 15, 16, 47, 130)]
    answers = [answer for ask in asks for answer in engine.generate([ask])]
    judge.judge(asks, answers)
