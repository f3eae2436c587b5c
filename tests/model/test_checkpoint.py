"""Reading checkpoint directories: what is accepted, and one clear error, naming file and tensor, for each way in which one can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import INDEX, SINGLE, Checkpoint, random_weights
from twinfer.engine.tensors import EMBEDDING, HEAD, expected_tensors
from twinfer.errors import CheckpointError

from . import tiny

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path, {})


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path, {}, max_shard_size="60KB")


def edit(path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """Rewrites model.safetensors with some tensors replaced, added, or (None) left out."""
    file = path / SINGLE
    tensors = {**load_file(file), **change}
    file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("variant", ["untied", "tied", "attention_bias"])
def test_expected_tensors_are_transformers_parameters(variant: str) -> None:
    config = tiny.Qwen3Config(**{**tiny.SHAPE, **tiny.VARIANTS[variant]})
    theirs = {name: tuple(parameter.shape) for name, parameter in tiny.Qwen3ForCausalLM(config).named_parameters()}
    ours = ModelConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert expected_tensors(ours) == theirs
    assert ours.num_parameters == sum(torch.Size(shape).numel() for shape in theirs.values())


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_weights(layout: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(layout)
    calls: list[tuple[int, int]] = []
    weights = Checkpoint.open(path).weights(torch.bfloat16, progress=lambda done, total: calls.append((done, total)))
    stored = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(weights) == set(stored)
    assert all(torch.equal(weights[name], stored[name].to(torch.bfloat16)) for name in stored)
    assert calls == [(i + 1, len(stored)) for i in range(len(stored))]


def test_weights_are_copies(single: Path) -> None:
    """Loaded weights outlive the file that they came from."""
    weights = Checkpoint.open(single).weights(torch.float32)
    before = weights[Q].clone()
    (single / SINGLE).write_bytes(bytes((single / SINGLE).stat().st_size))
    assert torch.equal(weights[Q], before)


def test_tied_head(tmp_path: Path) -> None:
    """Neither, either or both stored: one object, unless the two differ."""
    path = tiny.write_checkpoint(tmp_path, {"tie_word_embeddings": True})
    table = load_file(path / SINGLE)[EMBEDDING]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in ({HEAD: None}, {HEAD: table.clone()}, {EMBEDDING: None}):
            weights = Checkpoint.open(edit(path, change)).weights(torch.float32)
            assert weights[HEAD] is weights[EMBEDDING]
            assert torch.equal(weights[HEAD], table)
    refused(edit(path, {HEAD: None}), SINGLE, EMBEDDING, "missing")


def test_tied_but_different(tmp_path: Path) -> None:
    """As transformers does: a warning, and both are kept."""
    path = tiny.write_checkpoint(tmp_path, {"tie_word_embeddings": True})
    edit(path, {HEAD: load_file(path / SINGLE)[EMBEDDING] + 1})
    with pytest.warns(UserWarning, match=f"{SINGLE}: {HEAD} differs from {EMBEDDING}"):
        weights = Checkpoint.open(path).weights(torch.float32)
    assert torch.equal(weights[HEAD], weights[EMBEDDING] + 1)
    theirs = tiny.load_hf(path, "float32").state_dict()
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


def test_missing(single: Path) -> None:
    refused(edit(single, {Q: None}), SINGLE, Q, "missing")


def test_untied_and_no_head(single: Path) -> None:
    refused(edit(single, {HEAD: None}), SINGLE, HEAD, "missing")


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias", "model.visual.x", Q + "_scale_inv", "mtp.fc.weight"]
)
def test_unexpected(single: Path, name: str) -> None:
    refused(edit(single, {name: torch.zeros(2, 2)}), SINGLE, name, "unexpected")


@pytest.mark.parametrize("shape", [(64, 128), (127, 64), (128 * 64,), (1, 128, 64)])
def test_wrong_shape(single: Path, shape: tuple[int, ...]) -> None:
    refused(edit(single, {Q: torch.zeros(shape)}), SINGLE, Q, str(list(shape)), "[128, 64]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_wrong_dtype(single: Path, dtype: torch.dtype) -> None:
    refused(edit(single, {Q: torch.zeros(128, 64).to(dtype)}), SINGLE, Q, "dtype")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float_dtypes(single: Path, dtype: torch.dtype) -> None:
    weights = Checkpoint.open(edit(single, {Q: torch.full((128, 64), 0.5, dtype=dtype)})).weights(torch.float32)
    assert torch.equal(weights[Q], torch.full((128, 64), 0.5))


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated(single: Path, keep: int) -> None:
    content = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(content[:keep])
    refused(single, SINGLE, "not a whole safetensors file")


def test_corrupt_header(single: Path) -> None:
    content = bytearray((single / SINGLE).read_bytes())
    content[8:40] = b"\xff" * 32
    (single / SINGLE).write_bytes(content)
    refused(single, SINGLE, "not a whole safetensors file")


def test_truncated_after_open(single: Path) -> None:
    opened = Checkpoint.open(single)
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=SINGLE):
        opened.weights(torch.float32)


def test_no_weights(single: Path) -> None:
    (single / SINGLE).unlink()
    refused(single, str(single), SINGLE, INDEX)


def index(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / INDEX).read_text())
    return content


def test_index_names_a_missing_file(sharded: Path) -> None:
    shard = index(sharded)["weight_map"][Q]
    (sharded / shard).unlink()
    refused(sharded, INDEX, shard, "no such file")


@pytest.mark.parametrize("place", ["../other.safetensors", "nowhere.safetensors", "", 3, None])
def test_index_points_nowhere(sharded: Path, place: object) -> None:
    content = index(sharded)
    content["weight_map"][Q] = place
    (sharded / INDEX).write_text(json.dumps(content))
    refused(sharded, INDEX, Q, "no such file")


def test_index_points_at_the_wrong_shard(sharded: Path) -> None:
    content = index(sharded)
    content["weight_map"][Q] = content["weight_map"][EMBEDDING]
    (sharded / INDEX).write_text(json.dumps(content))
    refused(sharded, INDEX, Q)


def test_index_names_a_tensor_that_is_nowhere(sharded: Path) -> None:
    content = index(sharded)
    content["weight_map"]["model.extra"] = content["weight_map"][Q]
    (sharded / INDEX).write_text(json.dumps(content))
    refused(sharded, content["weight_map"][Q], "model.extra", "missing")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_unreadable(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    refused(sharded, INDEX)


def test_truncated_shard(sharded: Path) -> None:
    shard = index(sharded)["weight_map"][Q]
    (sharded / shard).write_bytes((sharded / shard).read_bytes()[:-1])
    refused(sharded, shard, "not a whole safetensors file")


def test_missing_in_shards(sharded: Path) -> None:
    """The tensor is neither stored nor in the index."""
    content = index(sharded)
    shard = sharded / content["weight_map"].pop(Q)
    tensors = load_file(shard)
    del tensors[Q]
    content["weight_map"] = {name: place for name, place in content["weight_map"].items() if tensors or place != shard.name}
    save_file(tensors, shard) if tensors else shard.unlink()
    (sharded / INDEX).write_text(json.dumps(content))
    refused(sharded, INDEX, Q, "missing")


def test_importing_brings_in_no_torch() -> None:
    code = "import sys, twinfer.engine.checkpoint; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_opening_brings_in_no_torch(single: Path) -> None:
    code = "import sys; from twinfer.engine.checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(single)], check=False).returncode == 0


def test_random_weights_of_a_tied_model() -> None:
    config = ModelConfig.from_dict({"model_type": "qwen3", **tiny.SHAPE, "tie_word_embeddings": True})
    weights = random_weights(config, 0, torch.float32)
    assert weights[HEAD] is weights[EMBEDDING]
    assert {name: tuple(tensor.shape) for name, tensor in weights.items() if name != HEAD} == expected_tensors(config)
