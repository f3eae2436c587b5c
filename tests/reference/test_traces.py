"""Traces travel: the ghost engine's plans run on the reference executor, and a reference run, saved and loaded, replays to the same output. Micro model."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.ghosts import GhostEngine, drain, limits
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.trace import Trace
from twinfer.errors import TableVersionError
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits
from twinfer.output import LogprobColumns, StepOutput
from twinfer.plan import StepPlan
from twinfer.reference import Engine
from twinfer.reference.executor import ReferenceExecutor
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .recorder import DEVICE, GOLDEN, teacher_forced

VOCAB = 256
TEXT = tuple(b"Now is the winter of our discontent made glorious")
TIGHT = limits(max_batch=4, max_step_tokens=24, max_chunk_tokens=9, max_context=64, page_size=4, num_pages=22)


def requests() -> list[Request]:
    """Shared prefixes, samples, penalties, bias, bans, log probabilities, seeds of 64 bits; in a pool so small that some are preempted."""
    common = {"max_tokens": 10, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"n": 3, "seed": 2**64 - 1, "repetition_penalty": 1.25, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1, "presence_penalty": 0.5},
        {"seed": 8, "top_k": 20, "top_p": 0.9, "logit_bias": {101: 1.5, 32: -float("inf")}},
        {"temperature": 0.0, "stop_token_ids": (101,), "min_tokens": 4, "frequency_penalty": 0.5},
        {"temperature": 0.0},
        {"seed": 3, "min_p": 0.05, "temperature": 1.5},
    ]
    return [Request((*TEXT[: 17 + 5 * (i % 4)], i % 3), SamplingParams(**{**common, **kind})) for i, kind in enumerate(kinds)]


def fresh(made_for: Limits) -> ReferenceExecutor:
    """A reference executor of the micro model in fp64 that has run nothing."""
    checkpoint = Checkpoint.open(GOLDEN / "micro")
    weights = checkpoint.weights(torch.float64, DEVICE)
    return ReferenceExecutor(checkpoint.config, made_for, weights, Ledger(made_for, checkpoint.config, "float64"))


def ghost_run() -> tuple[GhostEngine, Trace]:
    """The requests on the ghost, which knows nothing of the model: half of them at first, the others while those run."""
    engine = GhostEngine(TIGHT, vocab_size=VOCAB)
    engine.trace = Trace(TIGHT)
    for i, request in enumerate(requests()):
        engine.add(request)
        if i >= 3:
            engine.step()
    drain(engine)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.num_prefix_hits > 0
    assert engine.scheduler.pool.num_evictions > 0
    return engine, engine.trace


def histories(plans: list[StepPlan]) -> dict[int, list[int]]:
    """Every sequence's tokens, read off the plans: token p of a sequence is the one computed at position p."""
    found: dict[int, dict[int, int]] = {}
    for plan in plans:
        at = 0
        for sequence, start, length in zip(plan.sequence.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True):
            for i in range(length):
                token = int(plan.tokens[at + i])
                assert found.setdefault(sequence, {}).setdefault(start + i, token) == token, "a token changed when it was computed again"
            at += length
    for sequence, request in sequences().items():  # prompt tokens that a prefix hit spared stand in no plan of that sequence
        found[sequence] = {**dict(enumerate(request.prompt)), **found[sequence]}
    return {sequence: [tokens[p] for p in range(max(tokens) + 1)] for sequence, tokens in found.items()}


def sequences() -> dict[int, Request]:
    """Sequence ids in the order in which the engine gives them: one a sample."""
    each = [request for request in requests() for _ in range(request.params.n)]
    return dict(enumerate(each))


def is_plain(params: SamplingParams) -> bool:
    """Whether the token is the best of the raw logits."""
    return params.temperature == 0 and not params.has_penalties and not params.logit_bias and not params.min_tokens


def check_outputs(plans: list[StepPlan], outputs: list[StepOutput]) -> None:
    """What every executor owes a plan: as many tokens as are asked for, all in the vocabulary, log probabilities where asked for, no row that failed."""
    for plan, output in zip(plans, outputs, strict=True):
        assert output.step == plan.step
        assert output.row_error == {}
        assert len(output.tokens) == plan.num_samples.sum()
        assert ((output.tokens >= 0) & (output.tokens < VOCAB)).all()
        for columns, wanted in ((output.sampled, int((plan.sampling.num_logprobs >= 0) @ plan.num_samples)), (output.scored, int(plan.num_scored.sum()))):
            assert (columns is not None) is (wanted > 0)
            assert columns is None or (np.isfinite(columns.logprob).all() and (columns.logprob <= 0).all())


def test_a_ghost_trace_runs_on_the_reference(tmp_path: Path) -> None:
    """The same plans, valid outputs, and the same slots of the same pages written: the interface hides nothing that only one executor knows."""
    engine, trace = ghost_run()
    trace.save(tmp_path / "ghost.npz")
    executor = fresh(TIGHT)
    outputs = Trace.load(tmp_path / "ghost.npz").replay(executor)
    check_outputs(trace.plans, outputs)

    ghost, reference = engine.executor.buffers(), executor.buffers()
    for name in ("page_table", "page_counts"):
        assert np.array_equal(ghost[name], reference[name]), name
    written = torch.from_numpy(engine.executor.slot_token >= 0)
    assert 0 < int(written.sum()) < len(written)
    for name in ("kv_keys", "kv_values"):
        slots = reference[name].cpu().flatten(1, 2)  # [layers, slots, heads, dim]
        assert all(torch.equal(~layer.isnan().any(-1).any(-1), written) for layer in slots), f"{name}: other slots are written than the ghost's"


def test_the_reference_s_answers_to_a_ghost_trace_are_the_model_s() -> None:
    """Fed the ghost's tokens, every greedy row without penalties gives the best token of that history computed alone, whole and without a cache."""
    _, trace = ghost_run()
    outputs = trace.replay(fresh(TIGHT))
    history = histories(trace.plans)
    plain = [sequence for sequence, request in sequences().items() if is_plain(request.params)]
    alone = {sequence: teacher_forced("micro", "float64", np.array(history[sequence]), max_context=80, num_pages=8) for sequence in plain}
    compared = 0
    for plan, output in zip(trace.plans, outputs, strict=True):
        first = np.cumsum(plan.num_samples) - plan.num_samples
        for row, sequence in enumerate(plan.sequence.tolist()):
            if sequence in alone and plan.num_samples[row]:
                logits = torch.from_numpy(alone[sequence][int(plan.start[row] + plan.length[row]) - 1]).double()
                assert output.tokens[first[row]] == int(logits.argmax())
                if plan.sampling.num_logprobs[row] >= 0:
                    assert output.sampled is not None
                    assert abs(output.sampled.logprob[first[row]] - float(logits.log_softmax(0).max())) <= 1e-9
                compared += 1
    assert compared >= 20


def equal(a: Any, b: Any) -> bool:
    """Equality of values of plans and outputs: arrays by dtype and every bit."""
    if is_dataclass(a):
        return type(a) is type(b) and all(equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def reference_run(prefix_cache: bool) -> tuple[Engine, Trace, list[StepOutput]]:
    """The requests on the reference engine, with a trace of its plans and what came back for each."""
    engine = Engine.from_pretrained(GOLDEN / "micro", dtype="float64", limits=TIGHT, prefix_cache=prefix_cache, audit="full", device=DEVICE)
    engine.trace = Trace(engine.limits)
    outputs: list[StepOutput] = []
    collect = engine.executor.collect

    def keep() -> StepOutput:
        outputs.append(collect())
        return outputs[-1]

    engine.executor.collect = keep  # type: ignore[method-assign]
    results = engine.generate(requests())
    assert sum(len(completion.tokens) for result in results for completion in result.completions) == sum(len(output.tokens) for output in outputs)
    return engine, engine.trace, outputs


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_saved_reference_trace_replays_to_the_same_output(tmp_path: Path, prefix_cache: bool) -> None:
    engine, trace, outputs = reference_run(prefix_cache)
    assert engine.scheduler.num_preemptions > 0
    assert (engine.scheduler.num_prefix_hits > 0) is prefix_cache
    trace.save(tmp_path / "run.npz")
    loaded = Trace.load(tmp_path / "run.npz")
    assert loaded.limits == engine.limits
    assert len(loaded.plans) == len(trace.plans) == len(outputs)
    for mine, read in zip(trace.plans, loaded.plans, strict=True):
        assert equal(mine, read), f"step {mine.step} is not what was saved"

    executor = fresh(loaded.limits)
    again = loaded.replay(executor)
    check_outputs(loaded.plans, again)
    for before, after in zip(outputs, again, strict=True):
        assert equal(before, after), f"step {before.step} gave something else"  # same process, same shapes: to the bit
    assert any(isinstance(output.sampled, LogprobColumns) for output in again)
    assert any(isinstance(output.scored, LogprobColumns) for output in again)
    for name, buffer in engine.executor.buffers().items():
        same = np.array_equal if isinstance(buffer, np.ndarray) else lambda a, b: torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert same(buffer, executor.buffers()[name]), name
    with pytest.raises(TableVersionError):
        loaded.replay(executor)  # it is not fresh any more


def test_two_runs_give_the_same_trace() -> None:
    """Nothing in a plan depends on the clock, on hashing or on memory addresses."""
    (_, first, _), (_, second, _) = reference_run(True), reference_run(True)
    assert len(first.plans) == len(second.plans)
    assert all(equal(a, b) for a, b in zip(first.plans, second.plans, strict=True))
