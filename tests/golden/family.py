"""The models of the later types for tests: the trained ones where they are in the checkout, else the same shapes with made-up weights. Not a test."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.conftest import ROOT
from tests.hybrid.driver import run_alone
from tests.hybrid.tiny import randomise
from twinfer.engine.checkpoint import Checkpoint
from twinfer.golden import make
from twinfer.golden.documents import Document
from twinfer.golden.family import FAMILY, FamilyRecipe, write_files, write_weights
from twinfer.golden.manifest import FOLDER
from twinfer.golden.train_family import build
from twinfer.reference.hybrid import Hybrid

NAMES = tuple(FAMILY)
TRAINED = tuple(name for name in NAMES if (ROOT / name / FOLDER / "manifest.json").is_file())
SEED = 5
# What is recorded of made-up weights: as much as the tests below read.
SHORT = (
    Document("tragedy", 192, ((0, 192),), ((0, 192),), (0, 64, 191)),
    Document("chat", 64, ((0, 64),), ((0, 64),), (63,)),
)


def made_up(recipe: FamilyRecipe, directory: Path) -> Path:
    """A checkpoint of the recipe's shape with every parameter random, as training would write it."""
    model, draft = build(recipe, "cpu")
    randomise(model, SEED)
    # So that the logits are neither flat nor certain.
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    if draft is not None:
        randomise(draft, SEED + 1)
    write_files(recipe, directory)
    write_weights(recipe, model.state_dict(), None if draft is None else draft.state_dict(), directory)
    (directory / "training.json").write_text(json.dumps({"recipe": {"seed": SEED}, "held_out": {"loss": 8.0}}))
    return directory


@functools.cache
def model_directory(name: str, place: Path) -> Path:
    """The trained model with its goldens, or one with made-up weights, made with its goldens in `place` once."""
    if name in TRAINED:
        return ROOT / name
    directory = made_up(FAMILY[name], place / name)
    layout, make.layout = make.layout, lambda _: SHORT
    try:
        make.make(directory, ROOT / "prompts", "made-up weights for a test")
    finally:
        make.layout = layout
    return directory


@functools.cache
def reference(directory: Path, dtype: str) -> Hybrid:
    """The reference engine's model of a checkpoint."""
    found = Checkpoint.open(directory)
    return Hybrid(found.config, found.weights(getattr(torch, dtype)))


def logits(model: Hybrid, ids: np.ndarray, pieces: Sequence[int] | None = None) -> torch.Tensor:
    """Logits [T, V] of one request, computed whole or in pieces."""
    return run_alone(model, ids.tolist(), [len(ids)] if pieces is None else pieces)


def copy_of(directory: Path, place: Path) -> Path:
    """A writable copy without the goldens."""
    return Path(shutil.copytree(directory, place / directory.name, ignore=shutil.ignore_patterns(FOLDER)))


def state_of(directory: Path) -> dict[str, Any]:
    """Every stored tensor by its name in the file."""
    from safetensors.torch import load_file

    return dict(load_file(directory / "model.safetensors"))
