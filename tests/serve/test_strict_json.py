"""`--json` is JSON by the letter: no NaN and no Infinity, whatever bans, masks and sharp filters do to probabilities.

Tokens that cannot be drawn have a log probability of minus infinity somewhere, and an encoder that refuses it turned answers of a public server into
errors (docs/known_faults.md).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from twinfer.request import TokenLogprob
from twinfer.serve.stream import logprob_record

from .command import run


def strict(text: str) -> list[dict[str, Any]]:
    """The objects of JSON lines; names that JSON lacks are refused, as most readers do."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize(
    "options",
    ["--top-k 1 --temperature 0.01", "--temperature 0", "--top-p 0.000001 --temperature 0.0001", "--min-p 1", "--temperature 100 --min-tokens 6"],
)
def test_log_probabilities_of_sharp_distributions(options: str) -> None:
    outcome = run("generate", "To be", "--model", "micro", "--max-tokens", "6", "--seed", "1", "--logprobs", "5", "--json", "--quiet", *options.split())
    assert outcome.code == 0, outcome.err
    (record,) = strict(outcome.out)
    assert len(record["logprobs"]) == len(record["tokens"]) >= 1
    for entry in record["logprobs"]:
        assert len(entry["top"]) == 5
        assert all(isinstance(one["logprob"], float) for one in (entry, *entry["top"]))


def test_what_json_lacks_is_null() -> None:
    """A model may give a token no probability at all."""
    record = logprob_record(TokenLogprob(3, -math.inf, ((1, 0.0), (3, -math.inf), (4, math.nan))), None)
    (again,) = strict(json.dumps(record, allow_nan=False))
    assert [again["logprob"], *(one["logprob"] for one in again["top"])] == [None, 0.0, None, None]
