"""Bad values are refused on construction, by an error that names the field, the value and the limit; the interface stays free of torch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from twinfer import Limits, SamplingParams
from twinfer.errors import LimitError, RequestRefused
from twinfer.limits import default_buckets

GOOD = {
    "max_batch": 4,
    "max_step_tokens": 16,
    "max_chunk_tokens": 8,
    "warmup_tokens": 4,
    "max_context": 32,
    "max_step_context": 64,
    "max_logit_tokens": 4,
    "page_size": 4,
    "num_pages": 8,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 0),
        ("n", 10**9),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10**400),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("logit_bias", [1]),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {-1: 0.0}),
        ("min_tokens", -1),
        ("stop", ("",)),
        ("stop", "" ),
        ("stop", 5),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("logprobs", -1),
        ("prompt_logprobs", 2.0),
    ],
)  # fmt: skip
def test_bad_sampling_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as error:
        SamplingParams(**{field: value})
    assert isinstance(error.value, ValueError)
    assert error.value.field.startswith(field)
    assert str(error.value.limit) in str(error.value)


def test_contradictions_are_named() -> None:
    with pytest.raises(RequestRefused, match="min_tokens = 5: must be at most max_tokens = 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_a_lone_stop_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", sorted(GOOD))
@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, True, None, "4"])
def test_bad_limits_are_named(field: str, value: Any) -> None:
    with pytest.raises(LimitError, match=field):
        Limits(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_step_tokens": 3, "max_chunk_tokens": 3}, "max_batch"),
        ({"speculative_tokens": 4}, "speculative_tokens"),
        ({"max_chunk_tokens": 17}, "max_step_tokens"),
        ({"max_step_context": 31}, "max_context"),
        ({"buckets": (1, 2)}, "max_batch"),
        ({"buckets": (4, 2)}, "ascending"),
        ({"buckets": (2, 2, 4)}, "ascending"),
    ],
)
def test_contradictory_limits_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LimitError, match=named):
        Limits(**{**GOOD, **changes})


@pytest.mark.parametrize("max_batch", [1, 2, 3, 5, 8, 9, 64, 65, 256, 257, 1000, 1025, 2**31 - 1])
def test_the_last_bucket_reaches_max_batch_and_none_is_idle(max_batch: int) -> None:
    buckets = default_buckets(max_batch)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] >= max_batch
    assert len(buckets) == 1 or buckets[-2] < max_batch
    assert len(buckets) < 80


def test_bucket_is_the_smallest_that_fits() -> None:
    limits = Limits(**{**GOOD, "max_batch": 9, "max_step_tokens": 16})
    assert [limits.bucket(n) for n in (1, 3, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, 16]
    with pytest.raises(LimitError, match="17 rows"):
        limits.bucket(17)


def test_llm_is_the_engine_that_the_machine_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import twinfer
    from twinfer.fast import device
    from twinfer.fast.engine import Engine as Fast
    from twinfer.reference.engine import Engine as Reference

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert twinfer.LLM is Reference
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for interpreting, expected in ((False, Fast), (True, Reference)):
        monkeypatch.setattr(device, "interpreting", lambda answer=interpreting: answer)
        assert twinfer.LLM is expected
