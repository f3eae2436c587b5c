"""Sampling parameters of a command: what was given on the command line over what the checkpoint brings along. Their meaning is SamplingParams'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from twinfer.engine.generation_config import GenerationDefaults
from twinfer.sampling import SamplingParams
from twinfer.serve.model import Model

_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The parameters, a line that says what they are and where they come from, and what the checkpoint asks for that is not honoured."""

    params: SamplingParams
    line: str
    warnings: tuple[str, ...]


def choose_params(model: Model, given: Mapping[str, Any], use_defaults: bool) -> Chosen:
    """Merges. `given` holds fields of SamplingParams, None where the command line is silent. Raises RequestRefused, CheckpointError."""
    overrides = {name: value for name, value in given.items() if value is not None}
    # By themselves first: a value that is wrong whatever the model says is refused before any file of it is read.
    SamplingParams(**{"max_tokens": None, **overrides})
    defaults = GenerationDefaults.from_directory(model.path) if use_defaults else GenerationDefaults()
    values = dict(defaults.sampling_values())
    params = SamplingParams(**{**values, **overrides})
    plain = {field.name: field.default for field in fields(SamplingParams)}
    parts = []
    for name in _SHOWN:
        value = getattr(params, name)
        if name in overrides or name in values or value != plain[name]:
            source = "" if name in overrides else " (checkpoint)" if name in values else ""
            parts.append(f"{name} {value:g}{source}")
    line = "greedy" if params.temperature == 0 else ", ".join(parts) or "plain sampling, temperature 1"
    warnings = tuple(f"{defaults.source}: {what} is not honoured" for what in defaults.unused)
    return Chosen(params, line, warnings)
