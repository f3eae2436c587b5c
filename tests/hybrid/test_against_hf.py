"""The hybrid reference against transformers' eager code, live: 1e-10 in float64, 2e-3 in float32, the same bits in bfloat16.

float64 is transformers' own source with its float32 casts widened. The bits of bfloat16 are those of its function for one token at a time, which it
calls by itself in decode and here for the prompt too; its chunked form differs from that in the last bits of float32, which bfloat16 then amplifies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import driver as dense
from tests.model.tiny import hf_logits
from twinfer.engine.checkpoint import Checkpoint
from twinfer.engine.layout import from_stored
from twinfer.reference.hybrid import Hybrid
from twinfer.reference.qwen3 import Qwen3

from . import tiny
from .driver import Driver, Sequence, run_alone
from .shapes import HYBRID, NEW, SPARSE, WRAPPED

DTYPES = ("float64", "float32", "bfloat16")
TOKENS = torch.randint(0, 97, (138,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPT = 131  # three chunks of transformers', the last one short; then one token at a time

# Largest difference of a logit; the largest logits are from 10 to 14. Found, largest of all variants: in float32 qwen3_moe 3.0e-6, qwen3_next 5.9e-5,
# qwen3_5 4.9e-5, qwen3_5_moe 3.9e-5; in float64 0, 2.4e-13, 6.3e-14, 1.3e-13; in bfloat16 no bit differs.
TOLERANCE = {"float64": 1e-10, "float32": 2e-3, "bfloat16": 0.0}

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "tiny": (NEW, {}),
    "tied": (("qwen3_5",), {"tie_word_embeddings": True}),
    "bias": (("qwen3_moe", "qwen3_5"), {"attention_bias": True}),
    "yarn": (NEW, {"rope_parameters": YARN}),
    "half_of_a_head": (("qwen3_next", "qwen3_5"), {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}),
    "one_value_head_a_key_head": (("qwen3_next", "qwen3_5"), {"linear_num_value_heads": 2}),
    "two_taps": (("qwen3_5",), {"linear_conv_kernel_dim": 2}),
    "three_of_four_are_linear": (("qwen3_next",), {"layer_types": None}),
    "attention_first": (("qwen3_5",), {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    "not_normalised": (("qwen3_moe", "qwen3_next"), {"norm_topk_prob": False}),
    "all_experts": (SPARSE, {"num_experts_per_tok": 8}),
    "one_expert": (("qwen3_moe", "qwen3_5_moe"), {"num_experts_per_tok": 1}),
    "every_second_layer": (("qwen3_moe", "qwen3_next"), {"decoder_sparse_step": 2}),
    "dense_layers": (("qwen3_moe", "qwen3_next"), {"mlp_only_layers": [0, 3]}),
    "window": (("qwen3_moe",), {"use_sliding_window": True, "sliding_window": 7}),
}
# float32 tells nothing of a formula that float64 and bfloat16 don't, so it runs where its angles or masks are its own.
CASES = [
    (name, variant, dtype)
    for variant, (names, _) in VARIANTS.items()
    for name in names
    for dtype in DTYPES
    if dtype != "float32" or variant in ("tiny", "yarn", "window")
]


def found_and_expected(path: Path, name: str, dtype: str, patch: pytest.MonkeyPatch, *, wrapper: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and theirs, on their tensors: the bits of a product may depend on the address of a matrix. That ours are equal, test_checkpoint.py shows."""
    theirs = tiny.load_hf(path, name, dtype, wrapper=wrapper)
    config = Checkpoint.open(path).config
    state = {key: tensor for key, tensor in theirs.state_dict().items() if not key.startswith("model.visual.")}
    if dtype == "bfloat16":
        tiny.by_our_rules(patch, name, dtype)
    expected = hf_logits(theirs, TOKENS, PROMPT)
    assert expected.isfinite().all()
    assert 3 < float(expected.abs().max()) < 30
    return run_alone(Hybrid(config, from_stored(config, state)), TOKENS, [PROMPT] + [1] * (len(TOKENS) - PROMPT)), expected


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return float((one.double() - other.double()).abs().max())


@pytest.mark.parametrize(("name", "variant", "dtype"), CASES)
def test_variant(name: str, variant: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write(tmp_path, name, VARIANTS[variant][1], dtype="bfloat16" if dtype == "bfloat16" else "float32")
    distance = difference(*found_and_expected(tmp_path, name, dtype, monkeypatch))
    assert distance <= TOLERANCE[dtype], distance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WRAPPED)
def test_inside_a_multimodal_model(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its M-RoPE gives every token of a text the same position three times."""
    tiny.write(tmp_path, name, wrapper=True, dtype=dtype)
    distance = difference(*found_and_expected(tmp_path, name, dtype, monkeypatch, wrapper=True))
    assert distance <= TOLERANCE[dtype], distance


@pytest.mark.parametrize("name", HYBRID)
def test_bfloat16_against_the_chunked_form(name: str, tmp_path: Path) -> None:
    """As transformers runs by itself. Found: 0, 2 and 29 % of the logits differ, by 0.007 in the mean and 0.11 at most, as other roundings do too."""
    tiny.write(tmp_path, name, dtype="bfloat16")
    theirs = tiny.load_hf(tmp_path, name, "bfloat16")
    config = Checkpoint.open(tmp_path).config
    expected = hf_logits(theirs, TOKENS[:60], 60).double()
    found = run_alone(Hybrid(config, from_stored(config, theirs.state_dict())), TOKENS[:60], [60]).double()
    assert float((found - expected).abs().mean()) < 0.02


@pytest.mark.parametrize("name", NEW)
def test_layer_boundaries(name: str, tmp_path: Path) -> None:
    """What `observe` sees is what transformers' modules put out."""
    tiny.write(tmp_path, name)
    theirs = tiny.load_hf(tmp_path, name, "float64")
    config = Checkpoint.open(tmp_path).config
    seen: dict[str, torch.Tensor] = {}
    ours = Hybrid(config, from_stored(config, theirs.state_dict()))
    Driver(ours).step([(Sequence(), TOKENS[:70])], observe=lambda name, tensor: seen.update({name: tensor.clone()}))
    expected: dict[str, torch.Tensor] = {}
    modules = {"embedding": theirs.model.embed_tokens, "norm": theirs.model.norm}
    modules |= {f"layers.{i}": layer for i, layer in enumerate(theirs.model.layers)}
    for place, module in modules.items():
        module.register_forward_hook(lambda _m, _i, out, place=place: expected.update({place: out[0] if out.dim() == 3 else out}))
    hf_logits(theirs, TOKENS[:70], 70)
    assert set(seen) == set(expected) == set(modules)
    for place in modules:
        assert difference(seen[place], expected[place]) < 1e-11, place


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_qwen3_is_a_special_case(dtype: str, tmp_path: Path) -> None:
    """The same bits as the dense model's own file gives: a config without any of the additions adds nothing."""
    found = Checkpoint.open(tiny.write(tmp_path, "qwen3", {"attention_bias": True}))
    weights = found.weights(getattr(torch, dtype))
    pieces = [PROMPT] + [1] * (len(TOKENS) - PROMPT)
    assert torch.equal(run_alone(Hybrid(found.config, weights), TOKENS, pieces), dense.run_alone(Qwen3(found.config, weights), TOKENS, pieces))
