"""rope_theta wherever a config.json may say it: the value is transformers'. Not the angles (test_against_hf.py), and not
whether a default is told (test_config.py).

A nested object that hides the value at the top, and a reader that knows one of the two places, gave public engines an angle base fifty times too small
without a word (docs/known_faults.md).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from transformers import Qwen3Config

from twinfer.config import ModelConfig

from .test_config import GOOD

TOP: dict[str, dict[str, Any]] = {"nothing at the top": {}, "theta at the top": {"rope_theta": 1e7}}
NESTED: dict[str, dict[str, Any]] = {
    "nothing nested": {},
    "null": {"rope_parameters": None, "rope_scaling": None},
    "parameters without theta": {"rope_parameters": {"rope_type": "default"}},
    "parameters with theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "scaling without theta": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "scaling with theta": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    "scaling of the old spelling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "both": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
}


@pytest.mark.parametrize(("top", "nested"), list(itertools.product(TOP, NESTED)))
def test_the_value_is_transformers(top: str, nested: str) -> None:
    data = {**GOOD, **TOP[top], **NESTED[nested]}
    ours = ModelConfig.from_dict(data)
    # A copy: transformers writes what it found into the object that it is given.
    theirs = Qwen3Config(**{key: copy.deepcopy(value) for key, value in data.items() if key != "model_type"}).rope_parameters
    assert theirs is not None
    assert ours.rope.theta == theirs["rope_theta"]
    assert ours.rope.kind == theirs["rope_type"]
    assert ours.rope.factor == theirs.get("factor", 1.0)
