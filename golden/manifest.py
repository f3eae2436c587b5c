"""Reads golden logits: manifest.json and logits.safetensors beside a checkpoint, hashes verified. Only make.py writes them; no torch."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SCHEMA = 1
FOLDER = "goldens"
PRECISIONS = ("fp64", "fp32", "bf16")


class GoldenMissing(FileNotFoundError):
    """A model directory holds no goldens, or a file that their manifest lists is absent."""


class GoldenTampered(ValueError):
    """A file's sha256 is not the one in the manifest, or the manifest's schema is another one."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one precision of HF gave at some positions of a document: P of them, K tokens each.

    `top_ids` are the K likeliest tokens in float64, best first, whatever the record's precision; `top1_ids` the record's own likeliest.
    """

    vocab_size: int
    positions: "NDArray[np.int64]"  # [P], ascending
    top_ids: "NDArray[np.int64]"  # [P, K]
    logprobs: "NDArray[np.float64]"  # [P, K], nat, at top_ids
    logsumexp: "NDArray[np.float64]"  # [P], nat
    top1_ids: "NDArray[np.int64]"  # [P]

    def before(self, length: int) -> "Recorded":
        """The record of the prefix of `length` tokens."""
        count = int(np.searchsorted(self.positions, length))
        return Recorded(
            self.vocab_size,
            self.positions[:count],
            self.top_ids[:count],
            self.logprobs[:count],
            self.logsumexp[:count],
            self.top1_ids[:count],
        )


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Full float64 logits and hidden states at F positions: the outputs of the embedding, of each layer and of the final norm."""

    positions: "NDArray[np.int64]"  # [F], ascending
    logits: "NDArray[np.float64]"  # [F, V]
    hidden: "NDArray[np.float64]"  # [F, L + 2, h]

    def before(self, length: int) -> "Boundaries":
        """The part of it inside the prefix of `length` tokens."""
        count = int(np.searchsorted(self.positions, length))
        return Boundaries(self.positions[:count], self.logits[:count], self.hidden[:count])


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt [T] and HF's answers to it, prefilled whole."""

    name: str
    document: str
    token_ids: "NDArray[np.int64]"  # [T]
    fp64: Recorded
    fp32: Recorded
    bf16: Recorded
    boundaries: Boundaries

    def before(self, name: str, length: int) -> "Case":
        """The case that is the first `length` tokens of this one."""
        fp64, fp32, bf16 = self.fp64.before(length), self.fp32.before(length), self.bf16.before(length)
        return Case(name, self.document, self.token_ids[:length], fp64, fp32, bf16, self.boundaries.before(length))


@dataclass(frozen=True, slots=True)
class Goldens:
    """All goldens of a model: `documents` share no position, `cases` are prefixes of them at every boundary."""

    directory: Path
    manifest: dict[str, Any]
    documents: dict[str, Case]
    cases: dict[str, Case]


def sha256(path: Path) -> str:
    """Hex digest of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_goldens(model_dir: Path, *, checkpoint: bool = True) -> Goldens:
    """The goldens of the checkpoint in `model_dir`, every listed file's hash verified.

    `checkpoint=False` leaves the checkpoint's own files unverified: the writer compares new logits with the goldens of older weights.
    Raises `GoldenMissing` or `GoldenTampered`, each naming the file.
    """
    path = model_dir / FOLDER / "manifest.json"
    if not path.is_file():
        raise GoldenMissing(f"{path}: no such file; make it with: python -m twinfer.golden.make --model {model_dir} --reason '...'")
    manifest = json.loads(path.read_text())
    if manifest["schema"] != SCHEMA:
        raise GoldenTampered(f"{path}: schema {manifest['schema']}, this code reads {SCHEMA}")
    for name, digest in ((manifest["checkpoint"] if checkpoint else {}) | manifest["data"]).items():
        file = model_dir / name
        if not file.is_file():
            raise GoldenMissing(f"{file}: listed in {path}, but absent")
        if (found := sha256(file)) != digest:
            raise GoldenTampered(f"{file}: sha256 {found}, the manifest says {digest}")
    tensors = _read_tensors(model_dir / FOLDER / "logits.safetensors")
    documents = {name: _document(name, tensors, manifest["model"]["vocab_size"]) for name in manifest["documents"]}
    cases = {name: documents[case["document"]].before(name, case["length"]) for name, case in manifest["cases"].items()}
    return Goldens(model_dir, manifest, documents, cases)


def _read_tensors(path: Path) -> "dict[str, NDArray[Any]]":
    from safetensors.numpy import load_file

    return load_file(path)


def _document(name: str, tensors: "dict[str, NDArray[Any]]", vocab_size: int) -> Case:
    def get(key: str, dtype: type) -> "NDArray[Any]":
        return tensors[f"{name}.{key}"].astype(dtype)

    fine, coarse, top_ids = get("fine_positions", np.int64), get("coarse_positions", np.int64), get("top_ids", np.int64)
    records = {}
    for precision in PRECISIONS:
        positions = fine if precision == "fp64" else coarse
        records[precision] = Recorded(
            vocab_size,
            positions,
            top_ids[np.searchsorted(fine, positions)],
            get(f"{precision}.logprobs", np.float64),
            get(f"{precision}.logsumexp", np.float64),
            get(f"{precision}.top1_ids", np.int64),
        )
    boundaries = Boundaries(get("full_positions", np.int64), get("full_logits", np.float64), get("full_hidden", np.float64))
    return Case(name, name, get("token_ids", np.int64), **records, boundaries=boundaries)
