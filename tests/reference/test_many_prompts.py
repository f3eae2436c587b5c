"""Many prompts at once: a refusal names the one that it is about, and nothing of the others is queued. What a prompt may be: tests/text."""

from __future__ import annotations

import pytest

from twinfer.errors import LimitError, RequestRefused
from twinfer.golden import MICRO
from twinfer.reference import Engine
from twinfer.sampling import SamplingParams

from .recorder import DEVICE


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_pretrained(MICRO, dtype="float32", device=DEVICE, memory_bytes="1GiB", limits={"max_context": 64})


def test_a_refusal_names_the_prompt_among_many(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match=r"^prompts\[1\]: prompt = "):
        engine.generate(["ok", "", "x"])
    with pytest.raises(RequestRefused, match=r"^prompts\[1\]: prompt\[1\] = 999999: must be a token id"):
        engine.generate([[1, 2], [3, 999999]])
    with pytest.raises(RequestRefused, match=r"^prompt\[1\] = 999999: must be"):
        engine.generate([[3, 999999]])
    with pytest.raises(RequestRefused, match=r"^prompts\[0\]: max_tokens = 1000: must be"):
        engine.generate(["a", "b"], [SamplingParams(max_tokens=1000), None])
    assert not engine.has_work


def test_parameters_that_are_none_are_shown(engine: Engine) -> None:
    with pytest.raises(RequestRefused, match=r"params = \{'max_tokens': 3\}: must be a SamplingParams"):
        engine.generate("a", {"max_tokens": 3})  # type: ignore[arg-type]


def test_memory_may_be_a_text(engine: Engine) -> None:
    assert engine.limits.num_pages > 1
    with pytest.raises(LimitError, match="'1 gig' is not a size"):
        Engine.from_pretrained(MICRO, memory_bytes="1 gig")
