"""Reference engines over tiny models of the later types, with made-up weights. Not a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinfer.reference import Engine

from .shapes import KINDS

VOCAB = 97


def write_config(directory: Path, name: str) -> Path:
    """config.json of a tiny model, as transformers writes it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(KINDS[name].config(**json.loads(json.dumps(KINDS[name].shape))).to_json_string(use_diff=False))
    return directory


def open_engine(directory: Path, *, dtype: str = "float64", **limits: Any) -> Engine:
    """Audited fully. The prefix cache is asked for; a model that keeps states has none."""
    return Engine.from_pretrained(directory, dtype=dtype, limits={"max_context": 96, **limits}, audit="full", random_seed=3)
