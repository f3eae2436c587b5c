"""Which model a command means: a directory, or one of those bundled with the package. It finds files; it opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinfer import golden
from twinfer.config import ModelConfig
from twinfer.serve.failure import BadInput

BUNDLED = {"qwen3": golden.BUNDLED, "micro": golden.MICRO}
DEFAULT = "qwen3"
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


def millions(count: int) -> str:
    """A count in millions, to one digit that counts: 2164800 is 2 M."""
    return f"{count / 1e6:.1g} M" if count < 10**7 else f"{count / 1e6:,.0f} M"


def find(model: str, allow_config: bool = False) -> Model:
    """`model` as a directory, or as a bundled model's name where no such directory exists. With allow_config a config.json will do.

    Raises BadInput; what is inside the directory is checked by whoever reads it.
    """
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
