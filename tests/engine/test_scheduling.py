"""What the scheduler promises, one promise a test: order, samples, salts, priorities, prefix hits, traces. Ghost executor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twinfer.engine.trace import Trace
from twinfer.errors import RequestRefused, TableVersionError
from twinfer.request import FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of


def greedy(max_tokens: int = 5, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def test_prefix_hit_counts_whole_sealed_pages_and_leaves_one_token_to_compute() -> None:
    engine = GhostEngine(limits(page_size=4))
    engine.add(Request((0, 1, 0, 1, 0, 1, 0, 1), greedy(1)))
    drain(engine)
    same = engine.add(Request((0, 1, 0, 1, 0, 1, 0, 1), greedy(1)))
    longer = engine.add(Request((0, 1, 0, 1, 0, 1, 0, 1, 0), greedy(1)))
    cached = {e.request_id: e.num_cached_tokens for e in drain(engine)}
    assert cached == {same: 4, longer: 8}


def test_second_turn_hits_the_answer() -> None:
    engine = GhostEngine(limits(page_size=4))
    answer = tokens_of(drain_one(engine, (0, 1, 0), 10), 0)
    turn = engine.add(Request((0, 1, 0, *answer, 2), greedy(1)))
    event = next(e for e in drain(engine) if e.request_id == turn)
    # 3 + 10 tokens, the last answer token was never computed: 12 are written, so 3 pages of 4 are sealed.
    assert event.num_cached_tokens == 12


def drain_one(engine: GhostEngine, prompt: tuple[int, ...], max_tokens: int) -> list:  # type: ignore[type-arg]
    engine.add(Request(prompt, greedy(max_tokens)))
    return drain(engine)


def test_salts_do_not_share_pages() -> None:
    engine = GhostEngine(limits(page_size=2))
    for salt in ("a", "b", "a"):
        engine.add(Request((0, 1, 0, 1, 0), greedy(1), cache_salt=salt))
        hit = drain(engine)[-1].num_cached_tokens
    assert hit == 4
    assert engine.scheduler.num_prefix_hits == 4


def test_no_sharing_without_prefix_cache() -> None:
    engine = GhostEngine(limits(page_size=2), prefix_cache=False)
    for _ in range(2):
        engine.add(Request((0, 1, 0, 1, 0), greedy(1)))
        drain(engine)
    assert engine.scheduler.num_prefix_hits == 0
    assert engine.scheduler.pool.num_free == engine.limits.num_pages


def test_samples_share_the_prompt_and_differ() -> None:
    engine = GhostEngine(limits(max_batch=4), vocab_size=997)
    request = engine.add(Request((1, 2, 3, 4, 5), SamplingParams(n=4, max_tokens=8, seed=3)))
    events = drain(engine)
    outputs = {tuple(tokens_of(events, request, sample)) for sample in range(4)}
    assert len(outputs) == 4
    assert sum(e.terminal for e in events) == 1
    assert events[-1].terminal
    assert sum(e.finish_reason is not None for e in events) == 4


def test_samples_wait_for_the_pages_of_the_first_and_compute_the_prompt_once() -> None:
    engine = GhostEngine(limits(max_batch=4, max_chunk_tokens=5, page_size=4), vocab_size=997)
    engine.add(Request(tuple(range(14)), SamplingParams(n=4, max_tokens=2, seed=3)))
    cached = [e.num_cached_tokens for e in sorted(drain(engine), key=lambda e: e.sample) if e.finish_reason]
    assert cached == [0, 12, 12, 12]


def test_seeds_decide_and_batches_do_not() -> None:
    def run(neighbours: int) -> list[int]:
        engine = GhostEngine(limits(max_batch=5, max_step_tokens=7), vocab_size=997)
        for i in range(neighbours):
            engine.add(Request((i, 8), SamplingParams(max_tokens=9, seed=i)))
        mine = engine.add(Request((5, 6), SamplingParams(max_tokens=9, seed=42)))
        return tokens_of(drain(engine), mine)

    assert run(0) == run(1) == run(4)


def test_requests_without_a_seed_get_reproducible_different_ones() -> None:
    def run(seed: int) -> list[list[int]]:
        engine = GhostEngine(limits(), vocab_size=997, seed=seed)
        ids = [engine.add(Request((5, 6), SamplingParams(max_tokens=9))) for _ in range(2)]
        events = drain(engine)
        return [tokens_of(events, i) for i in ids]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]


def test_end_tokens_stop_and_min_tokens_delays() -> None:
    out = solo((0, 1), 20)
    stop = out[0]
    engine = GhostEngine(limits())
    request = engine.add(Request((0, 1), greedy(20, stop_token_ids=(stop,))))
    events = drain(engine)
    assert tokens_of(events, request) == [stop]
    assert events[-1].finish_reason is FinishReason.STOP


def test_bans_of_min_tokens_are_in_the_plan() -> None:
    engine = GhostEngine(limits())
    engine.add(Request((0, 1), greedy(6, stop_token_ids=(2,), min_tokens=3)))
    bans = []
    while engine.scheduler.has_work:
        plan = engine.scheduler.plan()
        assert plan is not None
        bans.append(plan.sampling.bias_ids.tolist())
        assert np.isneginf(plan.sampling.bias_values).all()
        engine.scheduler.delivered(plan)
        engine.scheduler.commit(plan, np.zeros(int(plan.num_samples.sum()), np.int32))
    assert bans == [[2], [2], [2], [], [], []]


def test_penalties_carry_seen_tokens_with_counts() -> None:
    engine = GhostEngine(limits())
    engine.add(Request((0, 1, 1), greedy(3, presence_penalty=1.0)))
    seen = []
    for token in (2, 2, 0):
        plan = engine.scheduler.plan()
        assert plan is not None
        seen.append(dict(zip(plan.sampling.seen_ids.tolist(), plan.sampling.seen_counts.tolist(), strict=True)))
        engine.scheduler.delivered(plan)
        engine.scheduler.commit(plan, np.array([token], np.int32))
    assert seen == [{0: 0, 1: 0}, {0: 0, 1: 0, 2: 1}, {0: 0, 1: 0, 2: 2}]


def test_first_come_first_served_under_preemption() -> None:
    """The oldest request is never preempted, so under the tightest pool requests end in order of arrival."""
    engine = GhostEngine(limits(max_batch=4, max_context=16, page_size=2, num_pages=9))
    ids = [engine.add(Request((0, i % 2), greedy(14))) for i in range(4)]
    ends = [e.request_id for e in drain(engine) if e.terminal]
    assert engine.scheduler.num_preemptions > 0
    assert ends == ids
    assert at_baseline(engine.scheduler)


def test_a_request_that_just_fits_the_pool_runs_and_one_more_token_is_refused() -> None:
    small = limits(max_context=64, page_size=4, num_pages=3)
    engine = GhostEngine(small)
    # The last token is never written, so 12 slots hold a prompt of 5 and 8 tokens of answer.
    request = engine.add(Request((0, 1, 0, 1, 0), greedy(8)))
    assert tokens_of(drain(engine), request) == solo((0, 1, 0, 1, 0), 8)
    with pytest.raises(RequestRefused, match="max_tokens"):
        engine.add(Request((0, 1, 0, 1, 0), greedy(9)))
    open_end = engine.add(Request((0, 1, 0, 1, 0), SamplingParams(temperature=0.0, max_tokens=None)))
    assert len(tokens_of(drain(engine), open_end)) == 8


def test_prompt_logprobs_cover_every_prompt_token_once_whatever_the_chunks() -> None:
    for chunk in (1, 2, 5, 32):
        engine = GhostEngine(limits(max_chunk_tokens=chunk))
        prompt = (0, 1, 2, 0, 1, 2, 1)
        engine.add(Request(prompt, greedy(2, prompt_logprobs=1, logprobs=2)))
        events = drain(engine)
        scored = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
        assert len(scored) == 1
        assert tuple(entry.token for entry in scored[0]) == prompt[1:]
        assert all(len(e.logprobs or ()) == 1 and len(e.logprobs[0].top) == 2 for e in events if e.tokens)  # type: ignore[index]


def test_the_same_run_gives_the_same_plans_and_a_saved_trace_replays(tmp_path: Path) -> None:
    def run() -> tuple[GhostEngine, list[int]]:
        engine = GhostEngine(limits(max_batch=3, page_size=2, num_pages=14, max_context=20))
        engine.executor.history = None
        engine.trace = Trace(engine.limits)
        for i in range(6):
            engine.add(Request((0, 1, 0, 1, i % 3), greedy(9)))
        return engine, [t for e in drain(engine) for t in e.tokens]

    first, tokens = run()
    second, _ = run()
    assert first.trace is not None
    assert second.trace is not None
    first.trace.save(tmp_path / "a.npz")
    loaded = Trace.load(tmp_path / "a.npz")
    assert loaded.limits == first.limits
    for mine, theirs, read in zip(first.trace.plans, second.trace.plans, loaded.plans, strict=True):
        for plan in (theirs, read):
            assert np.array_equal(mine.tokens, plan.tokens)
            assert np.array_equal(mine.slot, plan.slot)
            assert np.array_equal(mine.delta.entry_page, plan.delta.entry_page)
            assert np.array_equal(mine.sampling.seed, plan.sampling.seed)
    fresh = GhostEngine(first.limits).executor
    fresh.history = None
    assert [t for output in loaded.replay(fresh) for t in output.tokens.tolist()] == replayed_order(first.trace, first)
    assert tokens
    with pytest.raises(TableVersionError):
        loaded.replay(fresh)  # not fresh any more
    (tmp_path / "b.npz").write_bytes(b"junk")
    with pytest.raises(ValueError, match="not a trace"):
        Trace.load(tmp_path / "b.npz")


def replayed_order(trace: Trace, engine: GhostEngine) -> list[int]:
    """Sampled tokens in plan order, from another replay on a fresh executor."""
    executor = GhostEngine(engine.limits).executor
    executor.history = None
    return [t for output in trace.replay(executor) for t in output.tokens.tolist()]


def test_expand_is_self_contained() -> None:
    engine = GhostEngine(limits(page_size=2))
    engine.add(Request((0, 1, 2, 0, 1), greedy(1)))
    plan = engine.scheduler.plan()
    assert plan is not None
    (row,) = plan.expand(engine.scheduler.table, 2)
    assert row.tokens == (0, 1, 2, 0, 1)
    assert row.start == 0
    assert len(row.pages) == 3
    assert row.num_samples == 1


def test_generate_and_stream_join_events() -> None:
    engine = GhostEngine(limits(max_batch=2))
    results = engine.generate([[0, 1], [1, 0], Request((2,), greedy(3))], [greedy(4), greedy(2), None])
    assert [list(r.tokens) for r in results] == [solo((0, 1), 4), solo((1, 0), 2), solo((2,), 3)]
    assert [r.completions[0].finish_reason for r in results] == [FinishReason.LENGTH] * 3
    assert [t for e in engine.stream([0, 1], greedy(4)) for t in e.tokens] == solo((0, 1), 4)
    events = engine.stream([0, 1], greedy(4))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert not engine.has_work
    calls: list[tuple[int, int]] = []
    engine.generate([[0], [1]], greedy(1), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
    with pytest.raises(RequestRefused, match="params"):
        engine.generate([[0], [1]], [greedy(1)])


def test_streams_run_side_by_side_and_beside_step_and_generate() -> None:
    engine = GhostEngine(limits(max_batch=4))
    watched = engine.add(Request((2, 2), greedy(4)))
    first, second = engine.stream([0, 1], greedy(6)), engine.stream([1, 0], greedy(6))
    tokens: tuple[list[int], list[int]] = ([], [])
    for event, other in zip(first, second, strict=True):
        tokens[0].extend(event.tokens)
        tokens[1].extend(other.tokens)
        assert list(engine.generate([[2, 1]], greedy(2))[0].tokens) == solo((2, 1), 2)
    assert tokens == (solo((0, 1), 6), solo((1, 0), 6))
    assert tokens_of(drain(engine), watched) == solo((2, 2), 4)
    assert at_baseline(engine.scheduler)


def test_prompts_may_be_arrays_and_other_numbers_are_refused() -> None:
    engine = GhostEngine(limits())
    expected = solo((0, 1), 3)
    for prompt in (np.array([0, 1]), [np.int64(0), np.int32(1)], (0, 1), np.array([[0, 1]])):
        assert list(engine.generate(prompt, greedy(3))[0].tokens) == expected  # type: ignore[arg-type]
    for wrong in ([0.5], [True, 1], [0, None]):
        with pytest.raises(RequestRefused, match=r"prompt\["):
            engine.generate(wrong, greedy(3))  # type: ignore[arg-type]


def test_a_long_request_is_not_starved_by_steady_arrivals_while_the_step_context_binds() -> None:
    engine = GhostEngine(limits(max_batch=3, max_context=64, max_step_tokens=16, max_step_context=64, page_size=4, num_pages=64))
    engine.add(Request((1, 2, 1, 2), greedy(6)))
    engine.step()
    long = engine.add(Request((0, 1, 2) * 20, greedy(4)))
    for _ in range(200):
        while engine.scheduler.num_waiting < 2:
            engine.add(Request((1, 2, 1, 2), greedy(12)))
        if any(e.request_id == long and e.terminal for e in engine.step()):
            return
    raise AssertionError("the long request did not end in 200 steps")


def test_defaults_that_nobody_gave_fit_the_room() -> None:
    engine = GhostEngine(limits(max_context=16, page_size=4, num_pages=3))
    (result,) = engine.generate([0, 1, 2])
    assert len(result.tokens) == 10  # 12 slots hold 3 prompt tokens and 9 of the answer, the tenth is never written
    with pytest.raises(RequestRefused, match="max_tokens"):
        engine.generate([0, 1, 2], SamplingParams())


@pytest.mark.parametrize("wrong", [b"ROMEO", bytearray(b"x"), None, 5, {0, 1}, {"a": 1}, (i for i in (0, 1)), object()])
def test_what_is_no_prompt_is_refused(wrong: object) -> None:
    engine = GhostEngine(limits())
    with pytest.raises(RequestRefused):
        engine.generate(wrong, greedy(3))  # type: ignore[arg-type]
    with pytest.raises(RequestRefused):
        engine.generate([wrong], greedy(3))  # type: ignore[list-item]


def test_params_of_another_type_are_refused() -> None:
    engine = GhostEngine(limits())
    for wrong in ({"max_tokens": 3}, "greedy", 3):
        with pytest.raises(RequestRefused, match="params"):
            engine.add([0, 1], wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match="params"):
        engine.add(Request((0, 1), {"max_tokens": 3}))  # type: ignore[arg-type]


def test_a_request_without_params_takes_the_defaults_and_what_room_is_left() -> None:
    engine = GhostEngine(limits(max_context=16), seed=2)
    result = engine.generate([Request((0, 1, 0)), [0, 1, 0]])
    assert [len(r.tokens) for r in result] == [13, 13]
    assert engine.request(Request((0, 1, 0))).sampling == engine.request([0, 1, 0]).sampling


def test_ids_of_numpy_are_ids() -> None:
    engine = GhostEngine(limits())
    ids = np.array([0, 1, 0])
    results = engine.generate([Request(tuple(ids)), Request(ids), ids, list(ids)], greedy(3))  # type: ignore[arg-type,list-item]
    assert {r.tokens for r in results} == {tuple(solo((0, 1, 0), 3))}
    assert all(type(token) is int for r in results for token in r.prompt)


def test_a_stream_is_refused_at_the_call_and_a_dropped_one_ends_its_request() -> None:
    engine = GhostEngine(limits())
    with pytest.raises(RequestRefused):
        engine.stream([], greedy(3))
    stream = engine.stream([0, 1], greedy(9))
    assert engine.scheduler.has_work
    del stream
    assert engine.step() == []
    assert not engine.scheduler.has_work
    with engine.stream([0, 1], greedy(9)) as events:
        assert next(events).tokens == tuple(solo((0, 1), 1))
    assert not engine.scheduler.has_work
    assert list(events) == []
    assert engine.step() == []


def test_samples_that_wait_for_the_first_one_hold_up_nobody_else() -> None:
    """The prompt takes several steps; its further samples wait for its pages, a stranger behind them in the queue does not."""
    engine = GhostEngine(limits(max_batch=4, max_chunk_tokens=4, max_step_tokens=8), vocab_size=997)
    crowd = engine.add(Request(tuple(range(20)), SamplingParams(n=3, max_tokens=2, seed=3)))
    stranger = engine.add(Request((5, 6), greedy(1)))
    events = engine.step()
    assert [e.request_id for e in events] == [stranger]
    events += drain(engine)
    assert sum(e.terminal for e in events) == 2
    assert [e.num_cached_tokens for e in sorted(events, key=lambda e: e.sample) if e.request_id == crowd and e.finish_reason] == [0, 16, 16]


def test_a_trace_keeps_what_it_may_and_says_so() -> None:
    engine = GhostEngine(limits())
    engine.trace = Trace(engine.limits, max_plans=2)
    engine.generate([0, 1], greedy(5))
    assert len(engine.trace.plans) == 2
    with pytest.raises(ValueError, match="max_plans = 2 plans and has dropped 3"):
        engine.trace.replay(engine.executor)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04junk", b"\x93NUMPY"])
def test_a_broken_trace_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.npz: not a trace"):
        Trace.load(tmp_path / "t.npz")


def test_lengths_are_int32_in_every_kind_of_step() -> None:
    engine = GhostEngine(limits(max_chunk_tokens=5))
    engine.trace = Trace(engine.limits)
    engine.add(Request((0, 1) * 10, greedy(3)))
    drain(engine)
    assert {plan.length.dtype for plan in engine.trace.plans} == {np.dtype(np.int32)}
