"""Ids and prompts that no model has: refused by name for the request that holds them, whoever else is there, and the engine goes on. Ghost executor.

An id that is used as an index before it is checked ended public servers for everybody (docs/known_faults.md).
"""

from __future__ import annotations

from typing import Any

import pytest

from twinfer.errors import RequestRefused
from twinfer.request import Request
from twinfer.sampling import SamplingParams

from .ghosts import GhostEngine, drain, limits, solo, tokens_of

VOCAB = 32
GREEDY = {"temperature": 0.0, "max_tokens": 3}


def ask(field: str, token: int) -> Request:
    """A request that names `token` in one place."""
    prompt: tuple[int, ...] = (1, 2)
    values: dict[str, Any] = dict(GREEDY)
    if field == "logit_bias":
        values["logit_bias"] = {1: 0.5, token: 1.0}
    elif field == "stop_token_ids":
        values["stop_token_ids"] = (1, token)
    else:
        prompt = {"prompt": (token,), "last of the prompt": (1, 2, token)}[field]
    return Request(prompt, SamplingParams(**values))


FIELDS = ("prompt", "last of the prompt", "logit_bias", "stop_token_ids")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("token", [-1, VOCAB, VOCAB + 1, 2**31 - 1, 2**31, 2**32, 10**9, 2**40, 2**64, -(2**31)])
def test_an_id_outside_the_vocabulary_is_refused_wherever_it_stands(field: str, token: int) -> None:
    engine = GhostEngine(limits(), vocab_size=VOCAB)
    running = engine.add(Request((3, 4), SamplingParams(**GREEDY)))  # type: ignore[arg-type]
    events = engine.step()
    with pytest.raises(RequestRefused) as error:
        engine.add(ask(field, token))
    assert error.value.field.startswith(field if field in ("logit_bias", "stop_token_ids") else "prompt[")
    assert str(token) in str(error.value)
    events += drain(engine)
    assert tokens_of(events, running) == solo((3, 4), 3, vocab_size=VOCAB)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("token", [0, VOCAB - 1])
def test_the_first_and_the_last_id_are_accepted(field: str, token: int) -> None:
    engine = GhostEngine(limits(), vocab_size=VOCAB)
    request_id = engine.add(ask(field, token))
    events = drain(engine)
    assert tokens_of(events, request_id)
    assert not any(event.error for event in events)


def test_a_bias_that_its_owner_changes_after_it_was_checked_changes_nothing() -> None:
    """One object for several requests is common, and its mapping can be written to: what was checked is what is used."""
    engine = GhostEngine(limits(), vocab_size=VOCAB)
    params = SamplingParams(**GREEDY, logit_bias={1: 1.0})  # type: ignore[arg-type]
    ids = [engine.add(Request((1, 2), params)), engine.add([3], params)]
    params.logit_bias.update({VOCAB: 1.0, -5: 1.0})  # type: ignore[attr-defined]
    while engine.scheduler.has_work:
        plan = engine.scheduler.plan()
        assert plan is not None
        assert set(plan.sampling.bias_ids.tolist()) == {1}
        assert not any(event.error for event in engine.step())
    assert ids == [0, 1]
    with pytest.raises(RequestRefused, match="logit_bias"):
        engine.add([1], params)


EMPTY: tuple[Any, ...] = ([], (), [[]], [[], []], [[1, 2], []], [[], [1, 2]], [Request(())], [[1], Request(())])


@pytest.mark.parametrize("prompts", EMPTY[2:], ids=str)
def test_an_empty_prompt_is_refused_alone_and_in_company(prompts: Any) -> None:
    """Before any of its company is queued; what runs already is not touched, and the next call is served."""
    engine = GhostEngine(limits(), vocab_size=VOCAB)
    running = engine.add(Request((3, 4), SamplingParams(**GREEDY)))  # type: ignore[arg-type]
    events = engine.step()
    with pytest.raises(RequestRefused, match=r"prompt = \[\]: must be at least 1 token"):
        engine.generate(prompts, SamplingParams(**GREEDY))  # type: ignore[arg-type]
    assert engine.scheduler.num_running + engine.scheduler.num_waiting == 1
    events += drain(engine)
    assert tokens_of(events, running) == solo((3, 4), 3, vocab_size=VOCAB)
    (result,) = engine.generate([[1, 2]], SamplingParams(**GREEDY))  # type: ignore[arg-type]
    assert list(result.tokens) == solo((1, 2), 3, vocab_size=VOCAB)


def test_no_prompts_are_no_results() -> None:
    engine = GhostEngine(limits(), vocab_size=VOCAB)
    for prompts in EMPTY[:2]:
        assert engine.generate(prompts, SamplingParams(**GREEDY)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 1025, 10**6, 2**40])
def test_a_number_of_samples_that_nobody_can_mean_is_refused_before_anything_is_made(n: int) -> None:
    with pytest.raises(RequestRefused, match=f"n = {n}: must be an integer from 1 to 1024"):
        SamplingParams(n=n)


@pytest.mark.parametrize("top_k", [1, 31, 32, 33, 2**31 - 1, 2**31, 2**40, 10**30])
def test_a_top_k_beyond_the_vocabulary_or_int32_keeps_all(top_k: int) -> None:
    """Beside rows that filter nothing: the column is int32, and an overflow would be every row's."""
    engine = GhostEngine(limits(max_batch=3), vocab_size=VOCAB)
    ids = [engine.add(Request((i, 5), SamplingParams(max_tokens=3, seed=1, top_k=k))) for i, k in enumerate((0, top_k, 0))]
    plan = engine.scheduler.plan()
    assert plan is not None
    assert plan.sampling.top_k.tolist() == [0, min(top_k, 2**31 - 1), 0]
    events = drain(engine)
    assert all(len(tokens_of(events, request_id)) == 3 for request_id in ids)
