"""Checkpoints of the four types: names and shapes from the config alone against transformers' own models, both layouts of experts, what is left unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import HEAD, SINGLE, Checkpoint, random_weights
from twinfer.engine.layout import from_stored, to_stored
from twinfer.engine.tensors import MULTIMODAL_PREFIX, PREFIX, StoredForm, expected_tensors, stored_tensors
from twinfer.errors import CheckpointError

from . import tiny
from .shapes import HYBRID, KINDS, NEW, SPARSE, WRAPPED

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "one_value_head_a_key_head": {"linear_num_value_heads": 2},
    "dense_layers": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
}


def config_of(model: Any) -> ModelConfig:
    return ModelConfig.from_dict(json.loads(model.config.to_json_string(use_diff=False)))


def variants(name: str) -> list[str]:
    return [
        variant
        for variant in VARIANTS
        if (variant != "one_value_head_a_key_head" or name in HYBRID) and (variant != "dense_layers" or name in ("qwen3_moe", "qwen3_next"))
    ]


CASES = [(name, variant) for name in NEW for variant in variants(name)]


def edit(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    file = path / SINGLE
    tensors = {**load_file(file), **change}
    file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return path


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_stored_tensors_are_transformers_parameters(name: str, variant: str) -> None:
    """In memory transformers has fused experts; its files have them one by one."""
    model = tiny.make(name, VARIANTS[variant])
    theirs = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    ours = config_of(model)
    assert stored_tensors(ours, StoredForm(fused=True)) == theirs
    assert ours.num_parameters == sum(torch.Size(shape).numel() for shape in theirs.values())
    assert ours.num_parameters == sum(torch.Size(shape).numel() for shape in expected_tensors(ours).values())
    assert ours.num_parameters == sum(torch.Size(shape).numel() for shape in stored_tensors(ours, StoredForm()).values())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("prefix", [PREFIX, MULTIMODAL_PREFIX])
@pytest.mark.parametrize("name", WRAPPED)
def test_inside_a_multimodal_model(name: str, prefix: str, fused: bool, tmp_path: Path) -> None:
    """Both prefixes are in use with either config: transformers 5.5 writes the longer one for a text model alone."""
    model = tiny.make(name, wrapper=True)
    theirs = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    ours = config_of(model)
    visual = {key for key in theirs if key.startswith("model.visual.")}
    assert visual
    assert stored_tensors(ours, StoredForm(MULTIMODAL_PREFIX, True)) == {key: shape for key, shape in theirs.items() if key not in visual}
    model.save_pretrained(tmp_path)
    inner = "mlp.experts.gate_up_proj" if name in SPARSE else "mlp.gate_proj.weight"
    draft = {"mtp.fc.weight": torch.zeros(3), f"mtp.layers.0.{inner}": torch.zeros(1)}
    opened = Checkpoint.open(edit(tmp_path, dict(draft)))
    assert set(opened.ignored) == visual | set(draft)  # told by name
    assert not set(opened.tensors) & set(opened.ignored)
    loaded = opened.weights(torch.float32)
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in visual}
    same(loaded, from_stored(ours, state))
    assert set(loaded) == set(expected_tensors(ours))
    form = StoredForm(prefix, fused)
    whole = {**to_stored(ours, loaded, form), **{key: model.state_dict()[key] for key in visual}}
    assert StoredForm.of(ours, whole) == (form if name in SPARSE else StoredForm(prefix))
    save_file({key: tensor.contiguous() for key, tensor in whole.items()}, tmp_path / SINGLE)
    same(Checkpoint.open(tmp_path).weights(torch.float32), loaded)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("name", NEW)
def test_loaded_weights_are_transformers(name: str, shard: str, dtype: str, tmp_path: Path) -> None:
    """Against the model that transformers loads from the same file, its tensors rearranged in memory."""
    tiny.write(tmp_path, name, dtype=dtype, shard=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "100KB")
    calls: list[tuple[int, int]] = []
    opened = Checkpoint.open(tmp_path)
    assert StoredForm.of(opened.config, opened.tensors) == StoredForm()
    loaded = opened.weights(getattr(torch, dtype), progress=lambda done, total: calls.append((done, total)))
    state = KINDS[name].model.from_pretrained(tmp_path, dtype=getattr(torch, dtype)).state_dict()
    same(loaded, from_stored(opened.config, state))
    assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == expected_tensors(opened.config)
    assert calls == [(i + 1, len(opened.tensors)) for i in range(len(opened.tensors))]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("name", "variant"), CASES)
def test_there_and_back(name: str, variant: str, fused: bool) -> None:
    ours = config_of(tiny.make(name, VARIANTS[variant]))
    weights = random_weights(ours, 3, torch.float32)
    weights.pop(HEAD) if ours.tie_word_embeddings else None
    stored = to_stored(ours, weights, StoredForm(fused=fused))
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == stored_tensors(ours, StoredForm(fused=fused))
    same(from_stored(ours, stored), weights)


def test_interleaved_rows_go_where_they_belong() -> None:
    """Rows of qwen3_next's projections, numbered: group g of two key heads has q, k, v, z (or b, a) of its own heads."""
    ours = config_of(tiny.make("qwen3_next"))
    assert ours.gdn is not None
    key, value, heads = 16, 24, 3  # dims, and value heads a key head
    rows = torch.arange(2 * (2 * key + 2 * heads * value)).float()[:, None].expand(-1, 64)
    layer = "model.layers.0.linear_attn."
    found = from_stored(ours, {layer + "in_proj_qkvz.weight": rows, layer + "in_proj_ba.weight": rows[:12]})
    size = 2 * key + 2 * heads * value

    def span(first: int, count: int) -> list[int]:
        return [group * size + first + i for group in range(2) for i in range(count)]

    assert found[layer + "in_proj_qkv.weight"][:, 0].tolist() == span(0, key) + span(key, key) + span(2 * key, heads * value)
    assert found[layer + "in_proj_z.weight"][:, 0].tolist() == span(2 * key + heads * value, heads * value)
    assert found[layer + "in_proj_b.weight"][:, 0].tolist() == [0, 1, 2, 6, 7, 8]
    assert found[layer + "in_proj_a.weight"][:, 0].tolist() == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("name", HYBRID)
def test_float32_beside_bfloat16_is_kept(name: str, tmp_path: Path) -> None:
    """As Qwen3.5's files have it: A_log and the norm inside Gated DeltaNet in float32."""
    tiny.write(tmp_path, name, dtype="bfloat16")
    wide = [key for key in load_file(tmp_path / SINGLE) if key.endswith(("A_log", "linear_attn.norm.weight"))]
    value = torch.tensor(1 / 3)
    shapes = {key: tensor.shape for key, tensor in load_file(tmp_path / SINGLE).items()}
    other = "model.layers.0.linear_attn.dt_bias"
    opened = Checkpoint.open(edit(tmp_path, {key: value.expand(shapes[key]).contiguous() for key in [*wide, other]}))
    loaded = opened.weights(torch.bfloat16)
    assert {str(loaded[key].dtype) for key in wide} == {"torch.float32"}
    assert all(torch.equal(loaded[key], value.expand(shapes[key])) for key in wide)
    assert {str(tensor.dtype) for key, tensor in loaded.items() if key not in wide} == {"torch.bfloat16"}
    assert {str(tensor.dtype) for tensor in opened.weights(torch.float64).values()} == {"torch.float64"}


@pytest.mark.parametrize("name", WRAPPED)
def test_tied_inside_a_multimodal_model(name: str, tmp_path: Path) -> None:
    tiny.write(tmp_path, name, {"tie_word_embeddings": True}, wrapper=True)
    table = load_file(tmp_path / SINGLE)["model.language_model.embed_tokens.weight"]
    for change in ({HEAD: None}, {HEAD: table.clone()}, {"model.language_model.embed_tokens.weight": None}):
        weights = Checkpoint.open(edit(tmp_path, change)).weights(torch.float32)
        assert weights[HEAD] is weights["model.embed_tokens.weight"]
        assert torch.equal(weights[HEAD], table)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


LOST = {
    "qwen3_moe": "model.layers.1.mlp.experts.7.down_proj.weight",
    "qwen3_next": "model.layers.2.linear_attn.in_proj_ba.weight",
    "qwen3_5": "model.layers.0.linear_attn.dt_bias",
    "qwen3_5_moe": "model.layers.3.mlp.shared_expert_gate.weight",
}


@pytest.mark.parametrize("name", LOST)
def test_missing(name: str, tmp_path: Path) -> None:
    refused(edit(tiny.write(tmp_path, name), {LOST[name]: None}), SINGLE, LOST[name], "is missing")


EXTRA = [
    ("qwen3_moe", "mtp.fc.weight"),
    ("qwen3_moe", "model.layers.0.mlp.shared_expert_gate.weight"),
    ("qwen3_moe", "model.layers.0.mlp.experts.8.up_proj.weight"),
    ("qwen3_next", "model.visual.patch_embed.proj.weight"),
    ("qwen3_next", "model.layers.0.linear_attn.in_proj_z.weight"),
    ("qwen3_next", "model.language_model.layers.0.linear_attn.dt_bias"),
    ("qwen3_5", "model.mtp.fc.weight"),
    ("qwen3_5", "mtp.layers.0.mlp.experts.gate_up_proj"),
    ("qwen3_5", "mtp.layers.weight"),
    ("qwen3_next", "mtp.fc.bias"),
    ("qwen3_next", "mtp.layers.0.linear_attn.A_log"),
    ("qwen3_5", "model.layers.0.linear_attn.conv1d.bias"),
    ("qwen3_5_moe", "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv"),
    ("qwen3_5_moe", "model.mtp.fc.weight"),
]


@pytest.mark.parametrize(("name", "extra"), EXTRA)
def test_unexpected(name: str, extra: str, tmp_path: Path) -> None:
    refused(edit(tiny.write(tmp_path, name), {extra: torch.zeros(2, 2)}), SINGLE, extra, "is unexpected")


@pytest.mark.parametrize("name", WRAPPED)
def test_both_prefixes_at_once(name: str, tmp_path: Path) -> None:
    refused(edit(tiny.write(tmp_path, name), {"model.language_model.norm.weight": torch.zeros(64)}), "model.language_model.", "is missing")


@pytest.mark.parametrize("name", SPARSE)
def test_both_layouts_of_experts_at_once(name: str, tmp_path: Path) -> None:
    refused(edit(tiny.write(tmp_path, name), {"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 64, 24)}), "experts.down_proj is unexpected")


@pytest.mark.parametrize("name", HYBRID)
def test_wrong_shape(name: str, tmp_path: Path) -> None:
    key = "model.layers.1.self_attn.q_proj.weight"  # without its gate
    refused(edit(tiny.write(tmp_path, name), {key: torch.zeros(128, 64)}), key, "[128, 64]", "[256, 64]")


@pytest.mark.parametrize("name", NEW)
def test_random_weights(name: str) -> None:
    """Norms about 1 in effect, in either form; a seed's numbers depend on nothing else."""
    ours = config_of(tiny.make(name))
    weights = random_weights(ours, 5, torch.float32)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == expected_tensors(ours)
    for key, tensor in weights.items():
        if key.endswith("norm.weight"):
            plain = not ours.centred_norms or ".linear_attn." in key
            assert abs(float(tensor.mean()) - plain) < 0.1, key
        assert tensor.std() > 0, key
    again = random_weights(ours, 5, torch.float32)
    same(weights, again)
    assert not torch.equal(weights["model.norm.weight"], random_weights(ours, 6, torch.float32)["model.norm.weight"])
