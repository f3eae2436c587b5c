"""Which model a command means: a directory, or one of those bundled with the package. It finds files; it opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinfer import golden
from twinfer.serve.failure import BadInput

BUNDLED = {"qwen3": golden.BUNDLED, "micro": golden.MICRO}
DEFAULT = "qwen3"


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
    return Model(path, f"{name} (bundled)", True)


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
        f"model = {model!r}: no such directory; give a directory in Hugging Face format, {also}or a bundled model ({', '.join(BUNDLED)}); "
        "nothing is fetched from a hub"
    )
