"""Each field of a request does something: changed alone, it changes what comes back. A field that is read by nobody is a silent default. Micro model.

That an option was accepted and ignored is a fault that several public engines had, each with a status of success (docs/known_faults.md).
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

import pytest

from twinfer.reference import Engine
from twinfer.request import GenerateResult, Request
from twinfer.sampling import SamplingParams

from .recorder import open_engine

PROMPT = tuple(b"If music be the food of love, play on; give me excess of it")
DRAWN = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
GREEDY = {"temperature": 0.0, "max_tokens": 8}


@lru_cache
def engine() -> Engine:
    return open_engine("micro", "float64", max_batch=4, max_context=128, max_step_tokens=64, num_pages=64)


def run(prompt: tuple[int, ...] = PROMPT, salt: str = "", **values: Any) -> GenerateResult:
    (result,) = engine().generate([Request(prompt, SamplingParams(**values), salt)])
    return result


def told(result: GenerateResult) -> tuple[Any, ...]:
    """Everything that a caller sees of a result but its number and what came from the cache."""
    return result.prompt, result.completions, result.prompt_logprobs


@lru_cache
def drawn() -> GenerateResult:
    return run(**DRAWN)


@lru_cache
def cases() -> dict[str, tuple[dict[str, Any], Any]]:
    """Field -> (the other fields, another value than the field's default or than theirs)."""
    end = min(engine().end_tokens)
    ends_at_once = {**GREEDY, "logit_bias": {end: 100.0}}
    greedy = run(**GREEDY)
    piece = greedy.text[2:4]
    assert len(piece) == 2
    return {
        "max_tokens": (DRAWN, 5),
        "temperature": (DRAWN, 2.5),
        "top_k": (DRAWN, 1),
        "top_p": (DRAWN, 1e-6),
        "min_p": (DRAWN, 1.0),
        "seed": (DRAWN, 4),
        "n": (DRAWN, 2),
        "repetition_penalty": (GREEDY, 4.0),
        "presence_penalty": (GREEDY, 10.0),
        "frequency_penalty": (GREEDY, 10.0),
        "logit_bias": (GREEDY, {greedy.tokens[0]: -float("inf")}),
        "min_tokens": (ends_at_once, 3),
        "stop": (GREEDY, (piece,)),
        "include_stop": ({**GREEDY, "stop": (piece,)}, True),
        "stop_token_ids": (GREEDY, (greedy.tokens[1],)),
        "ignore_eos": (ends_at_once, True),
        "logprobs": (DRAWN, 2),
        "prompt_logprobs": (DRAWN, 1),
    }


def test_every_field_has_a_case() -> None:
    assert set(cases()) == {field.name for field in fields(SamplingParams)}
    assert {field.name for field in fields(Request)} == {"prompt", "params", "cache_salt"}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_field_changed_alone_changes_the_answer(name: str) -> None:
    others, value = cases()[name]
    plain = run(**others)
    assert told(run(**others)) == told(plain), "the answer varies by itself"
    assert told(run(**{**others, name: value})) != told(plain)


def test_prompt_and_salt_change_the_answer() -> None:
    assert run(PROMPT[:-1], **DRAWN).tokens != drawn().tokens
    hits = [run(salt=salt, **GREEDY).num_cached_tokens for salt in ("tenant", "tenant", "another")]
    assert hits == [0, 48, 0]
