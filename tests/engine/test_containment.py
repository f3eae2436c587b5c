"""Failures stay where they belong and are told: one terminal event for each accepted request, whatever breaks. Ghost executor."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest

from twinfer.errors import ExecutorLost, RequestRefused, StepFailed
from twinfer.output import StepOutput
from twinfer.plan import StepPlan
from twinfer.request import Event, FinishReason, Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, at_baseline, drain, limits, solo, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def terminals(events: list[Event]) -> dict[int, int]:
    count: dict[int, int] = {}
    for event in events:
        count[event.request_id] = count.get(event.request_id, 0) + event.terminal
    return count


def test_step_failure_ends_its_rows_and_nobody_else() -> None:
    engine = GhostEngine(limits(max_batch=2))
    ids = [engine.add(Request((0, 1, i), GREEDY)) for i in range(3)]  # the third waits: two rows at most
    events = engine.step()

    def fail(plan: StepPlan) -> None:
        engine.executor.fail_on = None
        raise StepFailed("the kernel said no")

    engine.executor.fail_on = fail
    events += drain(engine)
    ends = {e.request_id: e for e in events if e.terminal}
    assert [ends[i].finish_reason for i in ids] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert "the kernel said no" in (ends[ids[0]].error or "")
    assert tokens_of(events, ids[2]) == solo((0, 1, 2), 6)
    assert engine.healthy
    assert at_baseline(engine.scheduler)


def test_executor_loss_ends_everything_at_once_and_health_is_false() -> None:
    engine = GhostEngine(limits(max_batch=2))
    ids = [engine.add(Request((0, 1, 2), dataclasses.replace(GREEDY, n=2))) for _ in range(3)]

    def die(plan: StepPlan) -> None:
        raise RuntimeError("device fell off the bus")

    engine.executor.fail_on = die
    events = engine.step()
    assert terminals(events) == dict.fromkeys(ids, 1)
    assert all(e.finish_reason is FinishReason.ERROR for e in events)
    assert not engine.healthy
    assert not engine.has_work
    assert at_baseline(engine.scheduler)
    with pytest.raises(ExecutorLost, match="fell off the bus"):
        engine.add(Request((0,), GREEDY))


def test_one_bad_row_ends_alone() -> None:
    engine = GhostEngine(limits(max_batch=3))
    ids = [engine.add(Request((0, 1, i), GREEDY)) for i in range(3)]
    collect = engine.executor.collect
    bad = {"step": 2}

    def with_error() -> StepOutput:
        output = collect()
        return dataclasses.replace(output, row_error={1: "the logits are not numbers"}) if output.step == bad["step"] else output

    engine.executor.collect = with_error  # type: ignore[method-assign]
    events = drain(engine)
    ends = {e.request_id: e.finish_reason for e in events if e.terminal}
    assert ends == {ids[0]: FinishReason.LENGTH, ids[1]: FinishReason.ERROR, ids[2]: FinishReason.LENGTH}
    assert tokens_of(events, ids[0]) == solo((0, 1, 0), 6)
    assert tokens_of(events, ids[1]) == solo((0, 1, 1), 6)[:2]
    assert at_baseline(engine.scheduler)


def test_a_plan_over_a_bound_refuses_its_rows_only() -> None:
    """A violated bound before launch: the rows that cause it end with an error that names the bound, the others run in the same step."""
    engine = GhostEngine(limits(max_batch=3, max_step_context=64))
    ids = [engine.add(Request((0,) * 20, GREEDY)) for _ in range(3)]
    # The scheduler is made to ignore the limit that the auditor still knows.
    engine.scheduler.limits = dataclasses.replace(engine.limits, max_step_context=10**6)
    events = drain(engine)
    ends = {e.request_id: e for e in events if e.terminal}
    errors = [i for i in ids if ends[i].finish_reason is FinishReason.ERROR]
    assert errors, "the auditor let a plan pass that is over max_step_context"
    assert len(errors) < 3, "rows that fit were refused too"
    assert all("step_context" in (ends[i].error or "") for i in errors)
    for i in set(ids) - set(errors):
        assert tokens_of(events, i) == solo((0,) * 20, 6)
    assert at_baseline(engine.scheduler)


def test_refusals_touch_nobody() -> None:
    engine = GhostEngine(limits())
    running = engine.add(Request((0, 1), GREEDY))
    engine.step()
    for bad in (
        Request((), GREEDY),
        Request((0, 99), GREEDY),
        Request((-1,), GREEDY),
        Request((0,) * 65, GREEDY),
        Request((0,) * 60, GREEDY),
        Request((0,), SamplingParams(logprobs=3)),
        Request((0,), SamplingParams(stop=("x",))),
        Request((0,), SamplingParams(logit_bias={7: 1.0})),
        Request((0,), SamplingParams(stop_token_ids=(3,))),
    ):
        with pytest.raises(RequestRefused) as error:
            engine.add(bad)
        assert isinstance(error.value, ValueError)
        assert error.value.field
        assert str(error.value.limit) in str(error.value)
    assert tokens_of(drain(engine), running) == solo((0, 1), 6)[1:]


def test_abort_frees_pages_at_once_and_ends_once() -> None:
    engine = GhostEngine(limits(page_size=2))
    request_id = engine.add(Request((0, 1, 0, 1, 0), GREEDY))
    engine.step()
    assert engine.scheduler.pool.num_held > 0
    assert engine.abort(request_id)
    assert engine.scheduler.pool.num_held == 0
    assert not engine.abort(request_id)
    events = engine.step()
    assert [e.finish_reason for e in events] == [FinishReason.ABORT]
    assert events[0].terminal
    assert not engine.abort(12345)


def test_close_ends_what_is_open_and_may_be_repeated() -> None:
    engine = GhostEngine(limits())
    engine.add(Request((0, 1), GREEDY))
    engine.close()
    engine.close()
    assert terminals(engine.step()) == {0: 1}
    assert at_baseline(engine.scheduler)


def test_an_output_out_of_range_is_a_failed_step() -> None:
    engine = GhostEngine(limits())
    first = engine.add(Request((0, 1), GREEDY))
    collect = engine.executor.collect
    engine.executor.collect = lambda: dataclasses.replace(collect(), tokens=collect_tokens())  # type: ignore[method-assign]
    events = engine.step()
    engine.executor.collect = collect  # type: ignore[method-assign]
    assert [(e.request_id, e.finish_reason) for e in events] == [(first, FinishReason.ERROR)]
    assert engine.healthy
    second = engine.add(Request((0, 1), GREEDY))
    assert tokens_of(drain(engine), second) == solo((0, 1), 6)


def collect_tokens() -> np.ndarray:  # type: ignore[type-arg]
    return np.array([99], np.int32)


def test_a_malformed_output_ends_the_rows_and_step_does_not_raise() -> None:
    """Log probabilities that are missing or short, errors for rows that do not exist: one terminal event each, and the engine goes on."""
    for wrong in (
        lambda o: dataclasses.replace(o, scored=None),
        lambda o: dataclasses.replace(o, sampled=dataclasses.replace(o.sampled, logprob=o.sampled.logprob[:1])),
        lambda o: dataclasses.replace(o, tokens=o.tokens[:1]),
        lambda o: dataclasses.replace(o, row_error={9: "nobody"}),
    ):
        engine = GhostEngine(limits())
        ids = [engine.add(Request((0, 1, 2), dataclasses.replace(GREEDY, prompt_logprobs=0, logprobs=1))) for _ in range(2)]
        collect = engine.executor.collect
        engine.executor.collect = lambda wrong=wrong, collect=collect: wrong(collect())  # type: ignore[method-assign,misc]
        events = engine.step()
        assert terminals(events) == dict.fromkeys(ids, 1)
        assert all(e.finish_reason is FinishReason.ERROR for e in events)
        engine.executor.collect = collect  # type: ignore[method-assign]
        assert engine.healthy
        assert not engine.has_work
        assert at_baseline(engine.scheduler)


def test_one_token_out_of_range_ends_its_row_only() -> None:
    engine = GhostEngine(limits())
    ids = [engine.add(Request((0, 1, i), GREEDY)) for i in range(3)]
    collect = engine.executor.collect

    def with_a_bad_token() -> StepOutput:
        output = collect()
        return dataclasses.replace(output, tokens=np.array([output.tokens[0], 99, output.tokens[2]], np.int32)) if output.step == 0 else output

    engine.executor.collect = with_a_bad_token  # type: ignore[method-assign]
    events = drain(engine)
    ends = {e.request_id: e.finish_reason for e in events if e.terminal}
    assert ends == {ids[0]: FinishReason.LENGTH, ids[1]: FinishReason.ERROR, ids[2]: FinishReason.LENGTH}
    assert tokens_of(events, ids[2]) == solo((0, 1, 2), 6)


def test_an_output_of_another_step_is_the_executors_loss() -> None:
    """Plan and output no longer go together, so no later step can be trusted: health must not stay true while every step fails."""
    engine = GhostEngine(limits())
    engine.add(Request((0, 1), GREEDY))
    collect = engine.executor.collect
    engine.executor.collect = lambda: dataclasses.replace(collect(), step=7)  # type: ignore[method-assign]
    assert [e.finish_reason for e in engine.step()] == [FinishReason.ERROR]
    assert not engine.healthy


def test_an_interrupt_inside_a_step_leaves_no_step_uncollected() -> None:
    engine = GhostEngine(limits())
    engine.add(Request((0, 1), GREEDY))

    def interrupted() -> StepOutput:
        raise KeyboardInterrupt

    engine.executor.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.healthy
    assert [e.terminal for e in engine.step()] == [True]


def test_a_closed_stream_or_a_failing_callback_loses_nobodys_events() -> None:
    engine = GhostEngine(limits())
    stream = engine.stream([0, 1, 2], GREEDY)
    next(stream)
    other = engine.add(Request((1, 1, 1), GREEDY))
    next(stream)
    stream.close()  # type: ignore[attr-defined]

    def fail(done: int, total: int) -> None:
        raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"):
        engine.generate([[0, 1], [1, 0]], [GREEDY, dataclasses.replace(GREEDY, max_tokens=20)], progress=fail)
    assert engine.scheduler.num_running + engine.scheduler.num_waiting <= 1  # what generate left behind was aborted
    events = drain(engine)
    assert tokens_of(events, other) == solo((1, 1, 1), 6)
    assert terminals(events) == {other: 1}


@pytest.mark.parametrize(
    ("owner", "method"),
    [("scheduler", "plan"), ("scheduler", "_enter"), ("scheduler", "delivered"), ("auditor", "audit"), ("executor", "launch"), ("executor", "collect"),
     ("auditor", "check_output"), ("scheduler", "commit"), ("scheduler", "_leave"), ("scheduler", "_refresh")],
)  # fmt: skip
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_whatever_breaks_anywhere_in_a_step_each_request_ends_once(owner: str, method: str, error: type[BaseException]) -> None:
    """Interrupted halfway through, the scheduler's state can't be trusted: the engine is lost, every request is told so, nothing is leaked."""
    engine = GhostEngine(limits(max_batch=2, max_chunk_tokens=3, page_size=2))
    ids = [engine.add(Request((0, 1, 0, 1, i), dataclasses.replace(GREEDY, max_tokens=2, n=2))) for i in range(3)]
    target = getattr(engine, owner)
    real = getattr(target, method)

    def broken(*arguments: object) -> object:
        setattr(target, method, real)  # once
        real(*arguments)
        raise error

    setattr(target, method, broken)
    events: list[Event] = []
    with contextlib.suppress(KeyboardInterrupt):
        for _ in range(50):
            events += engine.step()
    events += engine.step()
    assert terminals(events) == dict.fromkeys(ids, 1)
    assert not engine.healthy
    assert at_baseline(engine.scheduler)


@pytest.mark.parametrize(("owner", "method"), [("scheduler", "drop"), ("engine", "_end"), ("engine", "_emit")])
def test_an_interrupted_abort_leaves_nobody_without_an_end(owner: str, method: str) -> None:
    """With the request out of the scheduler and no event for it, no step would ever tell of it."""
    engine = GhostEngine(limits(max_batch=2))
    ids = [engine.add(Request((0, 1, i), dataclasses.replace(GREEDY, n=2))) for i in range(2)]
    events = engine.step()
    target = engine if owner == "engine" else engine.scheduler
    real = getattr(target, method)

    def interrupted(*arguments: object, **named: object) -> object:
        setattr(target, method, real)  # once
        real(*arguments, **named)
        raise KeyboardInterrupt

    setattr(target, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.abort(ids[0])
    events += engine.step()
    assert terminals(events) == dict.fromkeys(ids, 1)
    assert not engine.healthy
    assert at_baseline(engine.scheduler)


def test_a_failed_step_that_wrote_nothing_takes_the_step_behind_it_along_and_nobody_else() -> None:
    """Look-ahead: the next step is in flight when one fails. Its rows of the same requests are garbage and dropped; a newcomer's row in it stands."""
    engine = GhostEngine(dataclasses.replace(limits(max_batch=3), look_ahead=1))
    first = engine.add(Request((0, 0), GREEDY))
    events = engine.step()

    def fail(plan: StepPlan) -> None:
        engine.executor.fail_on = None
        raise StepFailed("the kernel said no")

    events += engine.step()
    engine.executor.fail_on = fail
    newcomer = engine.add(Request((0, 1, 1), GREEDY))
    events += drain(engine)
    ends = {e.request_id: e for e in events if e.terminal}
    assert ends[first].finish_reason is FinishReason.ERROR
    assert ends[newcomer].finish_reason is FinishReason.LENGTH
    assert tokens_of(events, newcomer) == solo((0, 1, 1), 6)
    assert terminals(events) == {first: 1, newcomer: 1}
    assert engine.healthy
    assert at_baseline(engine.scheduler)


def test_closing_with_a_step_in_flight_leaves_no_work() -> None:
    engine = GhostEngine(dataclasses.replace(limits(max_batch=2), look_ahead=1))
    ids = [engine.add(Request((0, 0), GREEDY)) for _ in range(3)]
    for _ in range(3):
        engine.step()
    engine.close()
    events = drain(engine, max_steps=3)
    assert {e.request_id: e.finish_reason for e in events if e.terminal} == dict.fromkeys(ids, FinishReason.ABORT)
    assert not engine.has_work
    engine.close()
