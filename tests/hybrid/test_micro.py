"""The tiny hybrid checkpoint that golden/hybrid.py writes: the same bytes each time, whole for transformers and for us, with a tokenizer that fits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file
from transformers import Qwen3NextForCausalLM

from tests.model.tiny import hf_logits
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.generation_config import GenerationDefaults
from twinfer.engine.tokenizer import Tokenizer
from twinfer.golden.hybrid import main, write
from twinfer.golden.manifest import sha256
from twinfer.reference.hybrid import Hybrid

from . import tiny
from .driver import run_alone

TEXT = "To be, or not to be, that is the question."


def digest(path: Path) -> str:
    """Of names and numbers, whatever order and padding the library gives the file."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(path / "model.safetensors").items()):
        found.update(name.encode() + tensor.tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hybrid"))


def test_the_same_bytes_again(micro: Path, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path / "new" / "folder")]) == 0
    files = sorted(file.name for file in micro.iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert {name: sha256(micro / name) for name in files} == {name: sha256(tmp_path / "new" / "folder" / name) for name in files}
    # As on any other machine: made of integers and of float32 operations that IEEE 754 defines to the bit.
    assert digest(micro) == "8bfb580e8e15b16366f6859d3ca061cd3d808668fe66f53a9a00179e0625435e"
    other = write(tmp_path / "other", seed=1)
    assert sha256(other / "model.safetensors") != sha256(micro / "model.safetensors")


def test_every_kind_of_layer_is_in_it(micro: Path) -> None:
    config = Checkpoint.open(micro).config
    kinds = {(config.has_gdn(i), config.has_experts(i)) for i in range(config.num_layers)}
    assert kinds == {(a, b) for a in (True, False) for b in (True, False)}
    assert config.num_parameters == 362_992


def test_transformers_loads_it_whole_and_agrees(micro: Path) -> None:
    _, report = Qwen3NextForCausalLM.from_pretrained(micro, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = Tokenizer.from_directory(micro).encode(TEXT)
    assert len(tokens) == len(TEXT)
    assert GenerationDefaults.from_directory(micro) is not None
    found = Checkpoint.open(micro)
    expected = hf_logits(tiny.load_hf(micro, "qwen3_next", "float64"), tokens, 30)
    logits = run_alone(Hybrid(found.config, found.weights(torch.float64)), tokens, [30] + [1] * (len(tokens) - 30))
    assert float((logits - expected).abs().max()) < 1e-10
    # Peaked enough that a fault shows, and not so much that one token is all: perplexity far from both ends.
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert 1 < float(entropy.mean()) < 5.4


def test_fused_is_the_same_model(micro: Path, tmp_path: Path) -> None:
    one, other = (Checkpoint.open(path).weights(torch.float32) for path in (micro, write(tmp_path, fused=True)))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
