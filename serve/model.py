"""Which model a command means: a directory, or one of those bundled with the package. It finds files; it opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinfer import golden
from twinfer.config import ModelConfig
from twinfer.serve.failure import BadInput

BUNDLED = {"qwen3": golden.BUNDLED, "micro": golden.MICRO}
DEFAULT = "qwen3"
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
# For help texts, which open no file. The names alone would pass for the published models' (a test compares the sizes with the checkpoints').
CHOICES = "qwen3 (2 M parameters), micro (0.2 M)"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's directory (or, for a plan, its config.json) and the name to call it by. `bundled` ones come with the package."""

    path: Path
    name: str
    bundled: bool


def bundled(name: str) -> Model:
    """A bundled model, wherever the package is installed. Raises BadInput when the installation lacks it."""
    path = BUNDLED[name]
    if not (path / "config.json").is_file():
        raise BadInput(f"model = {name!r}: the bundled model is missing from this installation ({path}); install twinfer again")
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

    Raises BadInput; what is inside the directory is checked by whoever reads it.
    """
    if random_seed is not None:
        check_seed(random_seed)
        found = find(model, allow_config=True)
        if found.path.is_file() and found.path.name != CONFIG:
            raise BadInput(f"model = {model!r}: must be named {CONFIG}, or be a directory with one")
        directory = found.path.parent if found.path.is_file() else found.path
        return Model(directory, f"{found.name} with random weights (seed {random_seed})", found.bundled)
    path = Path(model)
    if path.is_dir():
        return Model(path, model, False)
    if path.exists():
        if allow_config:
            return Model(path, model, False)
        raise BadInput(f"model = {model!r}: must be a directory in Hugging Face format, it is a file")
    if model in BUNDLED:
        return bundled(model)
    also = "or a config.json, " if allow_config else ""
    raise BadInput(
        f"model = {model!r}: no such directory; give a directory in Hugging Face format, {also}or a bundled model: {CHOICES}; "
        "nothing is fetched from a hub"
    )
