"""Checkpoint: a model directory in Hugging Face format, checked by its headers, then loaded. Names are `tensors`, rearranging is `layout`.

`Checkpoint.open` compares the names, shapes and dtypes in the safetensors headers with what config.json asks for, before any weight is read. The
tied head: with `tie_word_embeddings` true, a file may store the embedding, the head, or both. One alone serves as both. Two that are equal are
kept once. Two that differ are both kept, with a warning, as transformers does: the file's numbers win over the flag.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.config import ModelConfig
from twinfer.engine.layout import place
from twinfer.engine.tensors import EMBEDDING as EMBEDDING
from twinfer.engine.tensors import HEAD as HEAD
from twinfer.engine.tensors import StoredForm, expected_tensors, known_and_unused, stored_tensors
from twinfer.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED_DTYPES = ("BF16", "F16", "F32", "F64")  # safetensors' names

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a safetensors header says of one tensor: the file that holds it, its dtype in safetensors' spelling, its shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked model directory. Nothing is in memory until `weights` is called.

    tensors  where each stored tensor of the text model lies, by its name in the file
    ignored  names of what is stored beside it and never read: the vision tower, the draft module (`tensors.known_and_unused`)
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...] = ()

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Reads config.json and the safetensors headers of the directory `path`, and compares them.

        Raises ConfigError for config.json, and CheckpointError naming the file and the tensor for: no weights, an unreadable or truncated file, an
        index that points at nothing, a missing or unexpected tensor, a wrong shape, a dtype that is not a plain float.
        """
        directory = Path(path)
        config = ModelConfig.from_file(directory)
        check_present(directory)
        tensors, source = _read_headers(directory)
        ignored = known_and_unused(config, tensors)
        tensors = {name: stored for name, stored in tensors.items() if name not in set(ignored)}
        _check(config, StoredForm.of(config, tensors), tensors, source)
        return cls(directory, config, tensors, ignored)

    def weights(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", progress: Progress | None = None, into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Loads every tensor, cast to `dtype` on `device`, in the form of `expected_tensors`; embedding and head are both present, one object when tied.

        For a 16-bit dtype, what a file keeps in float32 (`tensors.KEPT_WIDE`) stays so.

        `progress(done, total)` is called after each tensor. Raises CheckpointError if a file can't be read any more.
        """
        import torch
        from safetensors import SafetensorError, safe_open

        files: dict[Path, list[str]] = {}
        for name, stored in self.tensors.items():
            files.setdefault(stored.file, []).append(name)

        def make(name: str, shape: tuple[int, ...], wide: torch.dtype | None) -> torch.Tensor:
            if into is not None and name in into:
                return into[name]
            return torch.empty(shape, dtype=dtype if wide is None or dtype.itemsize >= 4 else wide, device=device)

        loaded: dict[str, torch.Tensor] = {}
        done = 0
        for file, names in files.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in names:
                        place(self.config, name, reader.get_tensor(name), loaded, make)
                        done += 1
                        if progress is not None:
                            progress(done, len(self.tensors))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: changed since it was opened, not readable as safetensors ({error})") from None
        if self.config.tie_word_embeddings:
            self._tie(loaded)
        return loaded

    def _tie(self, loaded: dict[str, torch.Tensor]) -> None:
        """Makes embedding and head one object, unless both are stored and differ."""
        import torch

        if HEAD not in loaded:
            loaded[HEAD] = loaded[EMBEDDING]
        elif EMBEDDING not in loaded:
            loaded[EMBEDDING] = loaded[HEAD]
        elif torch.equal(loaded[HEAD], loaded[EMBEDDING]):
            loaded[HEAD] = loaded[EMBEDDING]
        else:
            file = self.tensors[HEAD].file
            warnings.warn(f"{file}: {HEAD} differs from {EMBEDDING} although config.json ties them; both are kept", stacklevel=3)


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu", into: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Made-up weights of the shapes of `config`, in the form that `Checkpoint.weights` gives. For tests, plans and benchmarks without a checkpoint.

    Each tensor is uniform, with the standard deviation below; its numbers are hashes of (seed, name, index), made by integer arithmetic on the device
    itself and rounded to `dtype`. So they depend on nothing else, the device and the other tensors included, and 8 billion take seconds on a GPU.

    norms                       1 + 0.1 u, or 0.1 u where a norm multiplies by 1 + weight
    embedding and head          2 / sqrt(hidden): logits with a standard deviation near 2
    o_proj, out_proj, down_proj 1 / sqrt(in * 2 * layers): the residual stream stays near 1 however deep the model
    other matrices              1 / sqrt(in)
    biases                      0.1
    A_log, dt_bias              -2 + u, 0.5 u: a state's half-life is from 1 to 40 tokens or so, differently in each head
    """
    import torch

    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(config).items():
        key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        centre, deviation = 0.0, shape[-1] ** -0.5
        if name.endswith("norm.weight"):
            centred = config.centred_norms and not name.endswith(".linear_attn.norm.weight")
            centre, deviation = 0.0 if centred else 1.0, 0.1
        elif name.endswith(".A_log"):
            centre, deviation = -2.0, 1.0
        elif name.endswith(".dt_bias"):
            deviation = 0.5
        elif name in (EMBEDDING, HEAD):
            deviation = 2 * config.hidden_size**-0.5
        elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            deviation = (shape[-1] * 2 * config.num_layers) ** -0.5
        elif name.endswith(".bias"):
            deviation = 0.1
        whole = into[name] if into and name in into else torch.empty(shape, dtype=dtype, device=device)
        made = whole.view(-1)
        for first in range(0, len(made), _HASHED_AT_ONCE):
            part = made[first : first + _HASHED_AT_ONCE]
            # uniform on [0, 1) has the deviation 1 / sqrt(12)
            values = _uniform(int.from_bytes(key[:8], "little", signed=True), first, len(part), device)
            part.copy_(values.sub_(0.5).mul_(deviation * math.sqrt(12)).add_(centre))
        weights[name] = whole
    if config.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    return weights


_HASHED_AT_ONCE = 2**24  # numbers; each takes some 40 bytes while it is made


def _uniform(key: int, first: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Numbers first .. first + count - 1 of a stream, float32 from 0 up to 1: the upper 24 bits of splitmix64's finaliser over key and index."""
    import torch

    def mixed(x: torch.Tensor, shift: int, factor: int) -> torch.Tensor:
        # A shift of int64 keeps the sign, which a logical one does not; products wrap around.
        x ^= (x >> shift) & (2 ** (64 - shift) - 1)
        return x.mul_(factor - 2**64 if factor >= 2**63 else factor)

    x = torch.arange(first, first + count, dtype=torch.int64, device=device).mul_(0x9E3779B97F4A7C15 - 2**64).add_(key)
    x = mixed(mixed(x, 30, 0xBF58476D1CE4E5B9), 27, 0x94D049BB133111EB)
    x ^= (x >> 31) & (2**33 - 1)
    return ((x >> 40) & (2**24 - 1)).float().mul_(2.0**-24)


def check_present(directory: Path) -> None:
    """Raises CheckpointError, with what to do, where a directory holds no weights. It opens none."""
    if not (directory / SINGLE).is_file() and not (directory / INDEX).is_file():
        raise CheckpointError(
            f"{directory}: neither {SINGLE} nor {INDEX} is there, and weights are read from safetensors files only; random_seed=1 (--random-weights 1) "
            "makes weights up for its config.json"
        )


def _read_headers(directory: Path) -> tuple[dict[str, StoredTensor], Path]:
    """All stored tensors, and the file to name when one is missing. A single file wins over an index, as in transformers."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file():
        return _read_header(single), single
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{index}: not readable as JSON ({error})") from None
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: weight_map must be an object that maps each tensor to its file")
    for name, shard in places.items():
        if not isinstance(shard, str) or shard != Path(shard).name or not (directory / shard).is_file():
            raise CheckpointError(f"{index}: tensor {name} is said to be in {shard!r}, there is no such file beside the index")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(places.values())):
        for name, stored in _read_header(directory / shard).items():
            if places.get(name) != shard:
                raise CheckpointError(f"{stored.file}: holds tensor {name}, which {INDEX} places in {places.get(name)!r}")
            tensors[name] = stored
    for name, shard in places.items():
        if name not in tensors:
            raise CheckpointError(f"{directory / shard}: tensor {name} is missing, {INDEX} places it there")
    return tensors, index


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Name, dtype and shape of every tensor in one file, without reading their data; safetensors checks that the data is all there."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 (not a dict)
            return {name: StoredTensor(file, str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from None


def _check(config: ModelConfig, form: StoredForm, tensors: Mapping[str, StoredTensor], source: Path) -> None:
    expected = stored_tensors(config, form)
    shapes = dict(expected)
    required = set(expected)
    embedding = form.stored_name(EMBEDDING)
    if config.tie_word_embeddings:
        shapes[HEAD] = expected[embedding]
        if HEAD in tensors:
            required.discard(embedding)
    missing = [name for name in expected if name in required and name not in tensors]
    if missing:
        raise CheckpointError(f"{source}: tensor {missing[0]} is missing{_others(missing)}; config.json asks for it")
    unexpected = [name for name in tensors if name not in shapes]
    if unexpected:
        file = tensors[unexpected[0]].file
        raise CheckpointError(f"{file}: tensor {unexpected[0]} is unexpected{_others(unexpected)}; config.json has no place for it")
    for name, stored in tensors.items():
        if stored.shape != shapes[name]:
            raise CheckpointError(f"{stored.file}: tensor {name} has the shape {list(stored.shape)}, config.json asks for {list(shapes[name])}")
        if stored.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{stored.file}: tensor {name} has the dtype {stored.dtype}; supported: {', '.join(STORED_DTYPES)}")


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
