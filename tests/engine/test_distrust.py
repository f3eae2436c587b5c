"""A row whose logits are not numbers spoils nobody after it: what it sealed, and what it found in the cache, is not found again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import twinfer.reference
from twinfer.engine.scheduler import Scheduler
from twinfer.golden import MICRO
from twinfer.output import StepOutput
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
LIMITS = {"max_batch": 2, "max_step_tokens": 16, "max_chunk_tokens": 10, "max_context": 24, "page_size": 4, "num_pages": 12}
PREFIX = list(b"Once upo")


def spoiled() -> tuple[list[str | None], list[int]]:
    """Errors and cached tokens of three requests over one prefix, where token 200 has no number for an embedding. The first holds it behind the prefix,
    in the same chunk, so that 0 x NaN reaches the prefix's own values; the others do not hold it.
    """
    engine = twinfer.reference.Engine.from_pretrained(MICRO, dtype="float32", limits=LIMITS, audit="full", tokenizer=False)
    engine.executor.model.weights["model.embed_tokens.weight"][200] = torch.nan  # type: ignore[attr-defined]
    results = [engine.generate([[*PREFIX, *tail]], GREEDY)[0] for tail in ([65, 200, 70, 71], [66, 67], [68, 69])]
    engine.close()
    return [result.completions[0].error for result in results], [result.num_cached_tokens for result in results]


def test_a_number_that_is_none_stays_with_its_request() -> None:
    errors, cached = spoiled()
    assert errors[0] is not None
    assert errors[1:] == [None, None]
    assert cached == [0, 0, 8], "the second request writes the prefix again, the third finds it"


def test_the_first_prompt_position_that_is_no_number_is_told() -> None:
    engine = twinfer.reference.Engine.from_pretrained(MICRO, dtype="float32", limits=LIMITS, audit="full", tokenizer=False)
    engine.executor.model.weights["model.embed_tokens.weight"][200] = torch.nan  # type: ignore[attr-defined]
    result = engine.generate([[65, 200, 70, 71, 72]], dataclasses.replace(GREEDY, prompt_logprobs=0))[0]
    assert "prompt position 0 " in (result.completions[0].error or ""), "0 x NaN reaches the query before it"
    engine.close()


def test_without_distrust_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "distrust", lambda *arguments: None)
    errors, cached = spoiled()
    assert "nan" in (errors[1] or "")
    assert cached[1] == 8


def test_pages_that_others_hold_are_kept_and_no_longer_found() -> None:
    """Two requests share a prefix; one's row goes wrong. The other ends as ever, and every page is free afterwards."""
    engine = GhostEngine(limits(page_size=2))
    first = engine.add(Request((0, 1, 0, 1, 1), dataclasses.replace(GREEDY, max_tokens=6)))
    engine.step()
    second = engine.add(Request((0, 1, 0, 1, 0), dataclasses.replace(GREEDY, max_tokens=6)))
    collect = engine.executor.collect

    def wrong() -> StepOutput:
        engine.executor.collect = collect  # type: ignore[method-assign]
        output = collect()
        return dataclasses.replace(output, row_error={1: "the logit of token 0 is nan"})

    engine.executor.collect = wrong  # type: ignore[method-assign]
    events = drain(engine)
    ends = {event.request_id: event.error for event in events if event.terminal}
    assert ends[first] is None
    assert "nan" in (ends[second] or "")
    assert engine.scheduler.num_prefix_hits == 4
    assert at_baseline(engine.scheduler)
    again = engine.generate([[0, 1, 0, 1, 0]], GREEDY)[0]
    assert again.num_cached_tokens == 0, "what the failed row had read is not trusted"


def test_snapshots_behind_a_bad_row_are_no_longer_found() -> None:
    """A prompt leaves two snapshots; the next one goes on from the second, and its row goes wrong: some state before may be no number."""
    within = limits(page_size=16, max_context=256, max_step_tokens=200, num_state_slots=2, num_snapshots=6, snapshot_interval=64)
    engine = GhostEngine(within)
    prompt = [0, 1, 1] * 50
    engine.generate([prompt], GREEDY)
    pool = engine.scheduler.keeping.pool
    assert len(pool.keys()) == 2
    collect = engine.executor.collect

    def wrong() -> StepOutput:
        engine.executor.collect = collect  # type: ignore[method-assign]
        return dataclasses.replace(collect(), row_error={0: "the logit of token 0 is nan"})

    engine.executor.collect = wrong  # type: ignore[method-assign]
    bad = engine.generate([prompt], GREEDY)[0]
    assert "nan" in (bad.completions[0].error or "")
    assert bad.num_cached_tokens == 128
    assert pool.keys() == {}
    assert len(pool.free()) == pool.num_snapshots
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    assert engine.generate([prompt], GREEDY)[0].num_cached_tokens == 128


def test_a_snapshot_behind_anothers_page_is_no_longer_found() -> None:
    """One that leaves the pages of a running prompt computes their tokens again on pages of its own; its snapshot at the branch is behind the other's page.
    When its row goes wrong, that snapshot goes, and the other's page and snapshot stay.
    """
    within = limits(page_size=16, max_context=256, max_step_tokens=200, num_state_slots=2, num_snapshots=6)
    engine = GhostEngine(within)
    prompt = [0, 1, 1] * 50
    first = engine.add(Request(tuple(prompt), dataclasses.replace(GREEDY, max_tokens=20)))
    for _ in range(3):
        engine.step()
    second = engine.add(Request((*prompt[:100], *[0, 1] * 50), GREEDY))
    collect, pool = engine.executor.collect, engine.scheduler.keeping.pool

    def wrong() -> StepOutput:
        plan, output = engine.in_flight[0], collect()
        rows = {int(plan.start[row]): row for row, sequence in enumerate(plan.sequence.tolist()) if sequence == 1}
        return dataclasses.replace(output, row_error={rows[64]: "the logit of token 0 is nan"}) if 64 in rows else output

    engine.executor.collect = wrong  # type: ignore[method-assign]
    engine.step()
    assert sorted(int(pool.length[snapshot]) for snapshot in pool.keys().values()) == [64, 128]
    ends = {event.request_id: event.error for event in drain(engine) if event.terminal}
    assert ends[first] is None
    assert "nan" in (ends[second] or "")
    assert [int(pool.length[snapshot]) for snapshot in pool.keys().values()] == [128]
