"""Which model a command means: a directory, or one of those bundled with the package. It finds files; it opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinfer import models
from twinfer.config import ModelConfig
from twinfer.models import BUNDLED, CHOICES, CONFIG
from twinfer.serve.failure import BadInput

__all__ = ["BUNDLED", "CHOICES", "CONFIG", "DEFAULT", "Model", "bundled", "find", "has_tokenizer", "millions"]

DEFAULT = "qwen3"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's directory (or, for a plan, its config.json) and the name to call it by. `bundled` ones come with the package."""

    path: Path
    name: str
    bundled: bool


def bundled(name: str) -> Model:
    """A bundled model, wherever the package is installed. Raises ConfigError when the installation lacks it."""
    path = models.bundled(name)
    return Model(path, f"{name} (bundled, {millions(ModelConfig.from_file(path).num_parameters)} parameters)", True)


def has_tokenizer(model: Model) -> bool:
    """Whether a model has a tokenizer of its own. No other model's is taken in its place: their ids mean different texts."""
    return (model.path / TOKENIZER).is_file()


def check_seed(seed: int) -> None:
    """Raises BadInput for a --random-weights that is no seed."""
    if not 0 <= seed < 2**63:
        raise BadInput(f"random_weights = {seed}: must be an integer from 0 to {2**63 - 1}")


def millions(count: int) -> str:
    """A count in millions, to one digit that counts: 2164800 is 2 M."""
    return f"{count / 1e6:.1g} M" if count < 10**7 else f"{count / 1e6:,.0f} M"


def find(model: str, allow_config: bool = False, random_seed: int | None = None) -> Model:
    """`model` as a directory, or as a bundled model's name where no such directory exists. With allow_config a config.json will do.

    random_seed  the weights will be made up from it: a config.json, or a directory with nothing else, will do; gives the directory

    Raises BadInput or ConfigError; what is inside the directory is checked by whoever reads it.
    """
    if random_seed is not None:
        check_seed(random_seed)
    path = models.locate(model) if allow_config else models.directory_of(model, with_weights=random_seed is None)
    of_the_package = model in BUNDLED and not Path(model).exists()
    found = bundled(model) if of_the_package else Model(path, model, False)
    if random_seed is None:
        return found
    return Model(path, f"{found.name} with random weights (seed {random_seed})", found.bundled)
