"""The reference model against transformers' eager code, live: the same bits in bfloat16 and float32, 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from twinfer.engine.checkpoint import Checkpoint
from twinfer.reference.qwen3 import Qwen3

from . import tiny
from .driver import Driver, Sequence, run_alone

TOKENS = torch.randint(0, 97, (45,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPT = 31


def compare(path: Path, dtype: str, page_sizes: Seq[int] = (16,), tokens: list[int] = TOKENS, prompt: int = PROMPT) -> None:
    """Ours against theirs. The weights that we load must equal theirs; the model is then run on *their* tensors, since the bits of a product with
    one row of float32 may depend on the address of the matrix (the alignment of what it is copied to), which is no part of the model.
    """
    found, theirs = Checkpoint.open(path), tiny.load_hf(path, dtype)
    weights, state = found.weights(tiny.DTYPES[dtype]), theirs.state_dict()
    assert set(weights) == set(state)
    assert all(weights[name].dtype == state[name].dtype and torch.equal(weights[name], state[name]) for name in state)
    pieces = [prompt] + [1] * (len(tokens) - prompt)
    expected = tiny.hf_logits(theirs, tokens, prompt)
    assert expected.dtype == tiny.DTYPES[dtype]
    assert expected.isfinite().all()
    for page_size in page_sizes:
        logits = run_alone(Qwen3(found.config, state), tokens, pieces, page_size)
        assert logits.dtype == expected.dtype
        difference = float((logits.double() - expected.double()).abs().max())
        assert difference <= (1e-10 if dtype == "float64" else 0.0), f"page size {page_size}"
    loaded = run_alone(Qwen3(found.config, weights), tokens, pieces)
    assert tiny.nats(loaded, expected) <= {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}[dtype]


@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_variant(variant: str, dtype: str, tmp_path: Path) -> None:
    compare(tiny.write_checkpoint(tmp_path, tiny.VARIANTS[variant]), dtype)


@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("prompt", [1, 3, 4, 45])
def test_page_sizes_and_prompt_lengths(checkpoint: Path, prompt: int, dtype: str) -> None:
    compare(checkpoint, dtype, (1, 3, 16), prompt=prompt)


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_longer_than_a_window_many_times_over(windowed: Path, dtype: str) -> None:
    tokens = torch.randint(0, 97, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    compare(windowed, dtype, (3,), tokens, prompt=120)


OLD_STYLE: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 5000.0, "rope_scaling": None},
    "yarn": {"rope_theta": 5000.0, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}},
    "yarn_theta_inside": {"rope_theta": 3.0, "rope_scaling": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0}},
    "no_theta": {},
    "yarn_original_length_at_top": {
        "original_max_position_embeddings": 40,
        "rope_theta": 5000.0,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128},
    },
    "scaling_wins_over_parameters": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
    },
}


@pytest.mark.parametrize("dtype", tiny.DTYPES)
@pytest.mark.parametrize("style", OLD_STYLE)
def test_old_style_config(style: str, dtype: str, tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path, {})
    tiny.edit_config(tmp_path, {"torch_dtype": "float32", **OLD_STYLE[style]}, drop=("rope_parameters", "layer_types", "dtype"))
    compare(tmp_path, dtype)


@pytest.mark.parametrize("dtype", tiny.DTYPES)
def test_sharded(dtype: str, tmp_path: Path) -> None:
    tiny.write_checkpoint(tmp_path, {}, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    compare(tmp_path, dtype)


def test_layer_boundaries(checkpoint: Path) -> None:
    """What `observe` sees is what transformers' modules put out, to the bit."""
    found = Checkpoint.open(checkpoint)
    ours, theirs = Qwen3(found.config, found.weights(torch.float32)), tiny.load_hf(checkpoint, "float32")
    seen: dict[str, torch.Tensor] = {}
    Driver(ours, 16).step([(Sequence(), TOKENS)], observe=lambda name, tensor: seen.update({name: tensor.clone()}))
    expected: dict[str, torch.Tensor] = {}
    names = {"embedding": theirs.model.embed_tokens, "norm": theirs.model.norm}
    names |= {f"layers.{i}": layer for i, layer in enumerate(theirs.model.layers)}
    for name, module in names.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: expected.update({name: out[0] if out.dim() == 3 else out}))
    tiny.hf_logits(theirs, TOKENS, len(TOKENS))
    assert set(seen) == set(expected) == set(names)
    for name in names:
        assert torch.equal(seen[name], expected[name]), name
