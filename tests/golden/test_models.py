"""The bundled checkpoints and goldens as files: sizes, hashes, shapes, what HF makes of them. Trains and records nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, Qwen3ForCausalLM

from tests.golden.conftest import MODELS, ROOT
from twinfer.golden.compare import FP32, compare
from twinfer.golden.documents import token_ids
from twinfer.golden.manifest import FOLDER, GoldenMissing, Goldens, GoldenTampered, load_goldens, sha256
from twinfer.golden.recipe import RECIPES
from twinfer.golden.widened import NarrowTensor, forward, load_stock, load_widened

# Bytes: the budgets for the bundled model; micro's are ours.
CHECKPOINT_BUDGET = {"qwen3": 5_000_000, "micro": 1_000_000}
GOLDENS_BUDGET = {"qwen3": 2_500_000, "micro": 500_000}


@pytest.mark.parametrize("model", MODELS)
def test_sizes(model: str) -> None:
    checkpoint = sum(file.stat().st_size for file in (ROOT / model).iterdir() if file.is_file())
    goldens = sum(file.stat().st_size for file in (ROOT / model / FOLDER).iterdir())
    assert checkpoint <= CHECKPOINT_BUDGET[model]
    assert goldens <= GOLDENS_BUDGET[model]


def test_manifest_covers_every_file(goldens: Goldens) -> None:
    listed = goldens.manifest["checkpoint"] | goldens.manifest["data"]
    present = {file.relative_to(goldens.directory).as_posix() for file in goldens.directory.rglob("*") if file.is_file()}
    assert present == set(listed) | {f"{FOLDER}/manifest.json"}
    assert all(sha256(goldens.directory / name) == digest for name, digest in listed.items())
    assert {name: sha256(ROOT / "prompts" / name) for name in goldens.manifest["prompts"]} == goldens.manifest["prompts"]
    for key in ("reason", "command", "attention", "versions", "seeds", "noise_floor", "training", "prompt_recipe"):
        assert goldens.manifest[key]


def test_coverage() -> None:
    goldens = load_goldens(ROOT / "qwen3")
    documents = goldens.documents.values()
    assert sum(len(case.fp64.positions) for case in documents) >= 2049
    assert sum(len(case.fp32.positions) for case in documents) >= 800
    assert sum(len(case.bf16.positions) for case in documents) >= 800
    assert sum(len(case.boundaries.positions) for case in documents) <= 64


def test_lengths_at_every_boundary(goldens: Goldens) -> None:
    lengths = {len(case.token_ids) for case in goldens.cases.values()}
    assert lengths >= {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025, 2049}
    for case in goldens.cases.values():
        assert len(case.fp64.positions)
        assert case.fp64.positions.max() == len(case.token_ids) - 1
    assert goldens.documents["comedy"].boundaries.positions.max() == 2048
    pages = goldens.documents["repeated"].token_ids.reshape(-1, 16)
    assert len(pages) >= 3
    assert (pages == pages[0]).all()


def test_goldens_are_consistent(goldens: Goldens) -> None:
    for case in goldens.documents.values():
        fp64 = case.fp64
        assert (np.diff(fp64.logprobs, axis=1) <= 0).all()
        assert np.array_equal(fp64.top_ids[:, 0], fp64.top1_ids)
        mass = np.exp(fp64.logprobs).sum(axis=1)
        assert ((mass > 0.4) & (mass <= 1 + 1e-12)).all()
        rows = np.searchsorted(fp64.positions, case.boundaries.positions)
        logits = case.boundaries.logits
        assert np.allclose(np.log(np.exp(logits).sum(axis=1)), fp64.logsumexp[rows], atol=1e-12, rtol=0)
        listed = np.take_along_axis(logits, fp64.top_ids[rows], axis=1) - fp64.logsumexp[rows, None]
        assert np.allclose(listed, fp64.logprobs[rows], atol=1e-12, rtol=0)
        assert not np.array_equal(case.fp32.logprobs, case.bf16.logprobs)


def test_logits_are_peaked(goldens: Goldens) -> None:
    uniform = 1 / goldens.manifest["model"]["vocab_size"]
    top1 = np.concatenate([np.exp(case.fp64.logprobs[:, 0]) for case in goldens.documents.values()])
    assert top1.mean() > max(0.2, 50 * uniform)
    assert goldens.manifest["training"]["held_out"]["loss"] < 0.6 * np.log(1 / uniform)


def test_stored_ids_are_the_tokenizer_s(goldens: Goldens) -> None:
    from twinfer.golden.documents import layout

    for document in layout(goldens.directory.name):
        ids = token_ids(document, goldens.directory / "tokenizer.json", ROOT / "prompts")
        assert ids == goldens.documents[document.name].token_ids.tolist()


@pytest.mark.parametrize("model", MODELS)
def test_hf_loads_it_whole(model: str) -> None:
    loaded, report = Qwen3ForCausalLM.from_pretrained(ROOT / model, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = loaded.config
    assert config.num_attention_heads * config.head_dim != config.hidden_size
    assert config.num_attention_heads > config.num_key_value_heads > 1
    assert config.max_position_embeddings >= 4096
    assert config.tie_word_embeddings is (model == "qwen3")
    assert json.loads((ROOT / model / "config.json").read_text())["dtype"] == RECIPES[model].dtype
    assert {key: getattr(config, key) for key in RECIPES[model].shape} == RECIPES[model].shape
    tokenizer = AutoTokenizer.from_pretrained(ROOT / model)
    wanted = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert GenerationConfig.from_pretrained(ROOT / model).eos_token_id == wanted


def test_hf_live_fp32_agrees(goldens: Goldens) -> None:
    case = goldens.cases["tragedy_65"]
    model = load_stock(goldens.directory, "float32")
    result = compare(case, forward(model, case.token_ids)[0], against="fp32", tolerance=FP32).check()
    assert result.num_positions == 65


@pytest.mark.parametrize("factor", [1.1, 1.001])
def test_another_model_fails_the_fp32_gate(goldens: Goldens, factor: float) -> None:
    """The same model with one layer's query norm scaled: the weakest kind of wrong model, one part in a thousand included."""
    case = goldens.cases["tragedy_65"]
    model = load_stock(goldens.directory, "float32")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_norm.weight *= factor
    result = compare(case, forward(model, case.token_ids)[0], against="fp32", tolerance=FP32)
    assert not result.passed
    assert result.max > 10 * 1e-4


def test_widened_hf_agrees_and_is_not_fp32(goldens: Goldens) -> None:
    case = goldens.cases["tragedy_17"]
    wide, boundaries = forward(load_widened(goldens.directory), case.token_ids)
    narrow, _ = forward(load_stock(goldens.directory, "float32"), case.token_ids)
    assert compare(case, wide).max < 1e-10
    kept = case.boundaries
    assert np.abs(boundaries[kept.positions] - kept.hidden).max() < 1e-10
    assert 0 < compare(case, narrow).max < 1e-4


def test_widened_hf_agrees_at_long_positions(micro: Goldens) -> None:
    case = micro.cases["comedy_2049"]
    result = compare(case, forward(load_widened(micro.directory), case.token_ids)[0])
    assert result.max < 1e-10
    assert result.num_positions == len(case.fp64.positions) == 48


def test_plain_double_is_refused(micro: Goldens) -> None:
    """`model.double()` leaves HF's float32 casts in place; the watch over every operation says so."""
    with pytest.raises(NarrowTensor, match="float32"):
        forward(load_stock(micro.directory, "float32").double(), [1, 2, 3])


@pytest.mark.parametrize("name", ["goldens/logits.safetensors", "model.safetensors", "tokenizer.json"])
def test_a_tampered_file_is_detected(tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(ROOT / "micro", tmp_path / "micro")
    load_goldens(copy)
    data = bytearray((copy / name).read_bytes())
    data[-9] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(GoldenTampered, match=name):
        load_goldens(copy)
    (copy / name).unlink()
    with pytest.raises(GoldenMissing, match=name):
        load_goldens(copy)


def test_another_schema_and_no_manifest(tmp_path: Path) -> None:
    copy = shutil.copytree(ROOT / "micro", tmp_path / "micro")
    path = copy / FOLDER / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(GoldenTampered, match="99"):
        load_goldens(copy)
    path.unlink()
    with pytest.raises(GoldenMissing, match="--reason"):
        load_goldens(copy)
