"""Which model a name means: a directory, or one of the small models that come with the package. It finds files; it opens none of them.

The bundled models lie in the folder of `twinfer.golden`, which made them; its place is looked up, no code of it is loaded.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from twinfer.errors import ConfigError

CONFIG = "config.json"
# Name -> its parameters in words. The names alone would pass for the published models' (a test compares the sizes with the checkpoints').
BUNDLED = {"qwen3": "2 M parameters", "micro": "0.2 M"}
CHOICES = ", ".join(f"{name} ({size})" for name, size in BUNDLED.items())


def bundled(name: str) -> Path:
    """Directory of a bundled model, wherever the package is installed. Raises ConfigError where the installation lacks it."""
    spec = find_spec("twinfer.golden")
    places = spec.submodule_search_locations if spec is not None else None
    path = Path(next(iter(places or ["twinfer/golden"]))).resolve() / name
    if not (path / CONFIG).is_file():
        raise ConfigError(f"model = {name!r}: the bundled model is missing from this installation ({path}); install twinfer again")
    return path


def locate(model: str | Path) -> Path:
    """`model` as a path, or as a bundled model's name where there is no such path. Raises ConfigError naming what would do."""
    path = Path(model)
    if path.exists():
        return path
    if str(model) in BUNDLED:
        return bundled(str(model))
    raise ConfigError(
        f"model = {str(model)!r}: no such directory; give a directory in Hugging Face format (or a {CONFIG}, where weights are planned or made up), "
        f"or a bundled model: {CHOICES}; nothing is fetched from a hub"
    )


def directory_of(model: str | Path, with_weights: bool) -> Path:
    """The directory of a model. Without its weights, its config.json may be named in its place. Raises ConfigError."""
    path = locate(model)
    if not path.is_file():
        return path
    if with_weights:
        raise ConfigError(
            f"model = {str(model)!r}: must be a directory in Hugging Face format, it is a file; random_seed=1 (--random-weights 1) runs a {CONFIG} with "
            "made-up weights"
        )
    if path.name != CONFIG:
        raise ConfigError(f"model = {str(model)!r}: must be named {CONFIG}, or be a directory with one")
    return path.parent
