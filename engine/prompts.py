"""Prompts as people give them, one or many, brought into one form. It refuses what is no prompt; token ids are checked by `admission`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinfer.errors import RequestRefused
from twinfer.request import Request

Prompt = str | Sequence[int] | Request


def plain_ids(values: Any) -> Any:
    """Arrays and tensors as lists, sequences as they are. Raises RequestRefused for what is no sequence of ids (bytes would pass for one)."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RequestRefused("prompt", values, "text, a list of token ids, a Request, or a list of these")
    return values


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a Request and a sequence of numbers are one."""
    if isinstance(prompts, str | Request):
        return [prompts]
    many = list(plain_ids(prompts))
    return [many] if many and isinstance(many[0], int | float | np.integer) else many
