"""Penalties, logit bias, filters and log probabilities of whole runs against transformers' processors, fed the raw logits that the engine computed.

Presence and frequency have no processor in transformers: they are a formula here. Draws use the noise of tests/sampling/plain.py, in Python's integers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.sampling.plain import plain_draw
from twinfer.request import GenerateResult, Request
from twinfer.sampling import SamplingParams

from .recorder import F64, Recorder, open_engine

MAX_NEW = 16
# Of log probabilities, in nat: the recorder's product has other rows than the sampler's, 1.7e-6 apart in float32 with one thread, 0 with two.
TOLERANCE = 5e-6
PROMPTS = tuple(tuple(text) for text in (b"To be, or not to be, that is", b"O Romeo, Romeo! wherefore", b"the the the the the"))

# All numbers are exact in float32, the dtype of a plan's columns.
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.75},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.5},
    "negative frequency": {"frequency_penalty": -0.25},
    "bias": {"logit_bias": {32: -4.0, 101: 3.0, 116: -float("inf"), 200: -1.0}},
    "all": {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {32: -3.0, 97: 2.0, 111: -float("inf")}},
}
DRAWN: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75, "temperature": 1.25},
    "min_p": {"min_p": 0.125, "temperature": 2.0},
    "all": {**GREEDY["all"], "temperature": 1.5, "top_k": 12, "top_p": 0.875, "min_p": 0.03125},
}


def processed(params: SamplingParams, history: list[int], num_prompt: int, raw: F64) -> torch.Tensor:
    """Scores [vocabulary] fp64 after bias, penalties and filters, for the token after `history`."""
    ids, scores = torch.tensor([history]), torch.tensor(raw[None])
    before = LogitsProcessorList()
    if params.logit_bias:
        before.append(SequenceBiasLogitsProcessor({(token,): float(bias) for token, bias in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        before.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = before(ids, scores)
    for token, count in Counter(history[num_prompt:]).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return scores[0]
    filters = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        filters.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        filters.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        filters.append(MinPLogitsWarper(params.min_p))
    return filters(ids, scores)[0]


def check(recorder: Recorder, sequence: int, params: SamplingParams, result: GenerateResult, sample: int = 0) -> int:
    """Every token of one output from its own raw logits; returns at how many positions the processors changed the best token."""
    completion, prompt, changed = result.completions[sample], list(result.prompt), 0
    assert len(completion.tokens) == MAX_NEW
    for i, token in enumerate(completion.tokens):
        history = [*prompt, *completion.tokens[:i]]
        raw = recorder.logits[sequence][len(history) - 1][0]
        scores = processed(params, history, len(prompt), raw)
        want = int(scores.argmax())
        if params.temperature > 0:
            assert params.seed is not None
            want = plain_draw(scores.tolist(), 1.0, params.seed, sample, len(history))
        assert token == want, f"prompt {bytes(prompt)!r}, sample {sample}, output token {i}"
        changed += token != int(raw.argmax())
        if completion.logprobs is not None:
            entry, logprobs = completion.logprobs[i], torch.from_numpy(raw).double().log_softmax(0)
            assert entry.token == token
            assert abs(entry.logprob - float(logprobs[token])) <= TOLERANCE
            best = logprobs.sort(descending=True, stable=True)
            assert [t for t, _ in entry.top] == best.indices[: params.logprobs].tolist()
            assert max((abs(value - float(best.values[k])) for k, (_, value) in enumerate(entry.top)), default=0.0) <= TOLERANCE
    for position, scored in enumerate((result.prompt_logprobs or ()) if sample == 0 else ()):  # only the first sample scores the prompt
        logprobs = torch.from_numpy(recorder.logits[sequence][position][0]).double().log_softmax(0)
        assert scored.token == prompt[position + 1]
        assert abs(scored.logprob - float(logprobs[scored.token])) <= TOLERANCE
        assert [t for t, _ in scored.top] == logprobs.sort(descending=True, stable=True).indices[: len(scored.top)].tolist()
    return changed


def run(cases: list[tuple[tuple[int, ...], SamplingParams]], model: str = "micro", dtype: str = "float64") -> tuple[Recorder, list[GenerateResult]]:
    """All requests at once, four at a time in mixed steps with chunks of 7 tokens, two logits at a time."""
    limits = {"max_batch": 4, "max_step_tokens": 17, "max_chunk_tokens": 7, "max_context": 128, "max_logit_tokens": 2, "num_pages": 32}
    engine = open_engine(model, dtype, **limits)
    recorder = Recorder(engine)
    return recorder, engine.generate([Request(prompt, params) for prompt, params in cases])


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_the_processors(name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True, logprobs=3, **GREEDY[name])
    recorder, results = run([(prompt, params) for prompt in PROMPTS])
    changed = sum(check(recorder, i, params, result) for i, result in enumerate(results))
    assert (changed > 0) is (name != "plain"), "the parameters changed no token"


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_tokens_are_the_warpers_with_the_same_noise(name: str) -> None:
    many = [SamplingParams(**{"max_tokens": MAX_NEW, "ignore_eos": True, "logprobs": 2, **DRAWN[name]}, seed=seed) for seed in (5, 2**63 + 11)]
    recorder, results = run(list(zip(PROMPTS[:2], many, strict=True)))
    assert sum(check(recorder, i, params, result) for i, (params, result) in enumerate(zip(many, results, strict=True))) > 0


def test_every_kind_of_request_in_one_batch_with_prompt_logprobs_and_samples() -> None:
    """Parameters of one row must not reach another's: greedy and drawn, with and without penalties, bias and log probabilities, side by side."""
    many = []
    for i, extra in enumerate((*GREEDY.values(), *DRAWN.values())):
        values = {"temperature": 0.0, **extra, "logprobs": (None, 0, 4)[i % 3], "prompt_logprobs": (None, 2, 0, None)[i % 4]}
        many.append((PROMPTS[i % 3], SamplingParams(**values, max_tokens=MAX_NEW, ignore_eos=True, seed=i, n=1 + (i % 5 == 0))))
    recorder, results = run(many)
    sequence = scored = 0
    for (prompt, params), result in zip(many, results, strict=True):
        assert (result.prompt_logprobs is None) is (params.prompt_logprobs is None)
        scored += len(result.prompt_logprobs or ())
        assert len(result.prompt_logprobs or prompt[1:]) == len(prompt) - 1
        for sample in range(params.n):
            check_logprob_counts(params, result, sample)
            check(recorder, sequence, params, result, sample)
            sequence += 1
    assert sequence == len(recorder.logits) > len(many)
    assert scored > 100


def check_logprob_counts(params: SamplingParams, result: GenerateResult, sample: int) -> None:
    """As many entries and alternatives as were asked for, none where nobody asked."""
    logprobs = result.completions[sample].logprobs
    assert (logprobs is None) is (params.logprobs is None)
    assert all(len(entry.top) == params.logprobs for entry in logprobs or ())
    assert all(len(entry.top) == params.prompt_logprobs for entry in result.prompt_logprobs or ())


def test_the_bundled_model_in_fp32() -> None:
    """Penalties from fp32 logits, the dtype that people serve in; log probabilities still those of the raw logits."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW, ignore_eos=True, logprobs=5, prompt_logprobs=1, repetition_penalty=1.25, presence_penalty=0.5)
    prompts = [(1800, 17, 250, 17, 901), tuple(range(300, 330))]
    recorder, results = run([(prompt, params) for prompt in prompts], "qwen3", "float32")
    assert sum(check(recorder, i, params, result) for i, result in enumerate(results)) > 0
