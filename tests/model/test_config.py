"""config.json: what is read as transformers reads it, and what is refused, with the file, the field and the value in the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from twinfer.config import ModelConfig
from twinfer.errors import ConfigError, UnsupportedModel

GOOD: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
COUNTS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
YARN = {"rope_type": "yarn", "factor": 4.0}

BAD: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field in [*COUNTS, "max_position_embeddings"] for value in (0, -1, 2.0, True, "4")),
    *(({field: None}, field) for field in COUNTS if field != "num_key_value_heads"),
    *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (0, -1e-6, float("nan"), float("inf"), "1e-6", True, None)),
    *(({field: value}, field) for field in ("tie_word_embeddings", "attention_bias", "use_sliding_window") for value in (1, "true", None)),
    ({"num_attention_heads": 3}, "num_attention_heads = 3 is not a multiple of num_key_value_heads = 2"),
    ({"head_dim": 31}, "head_dim = 31"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"dtype": "int8"}, "dtype = 'int8'"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor = 0.25"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_type = 'llama3'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type = 'mrope'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}}, "full_attention"),
    ({"rope_parameters": [1]}, "rope parameters"),
    ({"rope_theta": 0}, "rope_theta = 0"),
    ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta = '1e6'"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope factor = None"),
    ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "rope factor = -2.0"),
    *(
        ({"rope_parameters": {**YARN, field: -1.0}}, f"rope {field} = -1.0")
        for field in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    ),
    ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings = 0"),
    ({"rope_parameters": {**YARN, "truncate": 1}}, "rope truncate = 1"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
    ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1"),
    ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
    ({"layer_types": ["full_attention", "linear_attention"]}, r"layer_types\[1\] = 'linear_attention'"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types\[0\] is sliding_attention"),
    ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": None}, r"layer_types\[0\] is sliding_attention"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[json.dumps(change) for change, _ in BAD])
def test_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("model_type", ["llama", "qwen4_exp", "qwen3_5_vision", "qwen3_text", None, 3])
def test_unknown_model_type(model_type: object) -> None:
    with pytest.raises(UnsupportedModel, match="supported: qwen3") as caught:
        ModelConfig.from_dict({**GOOD, "model_type": model_type}, source="here/config.json")
    assert caught.value.model_type == model_type
    assert "here/config.json" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_not_an_object(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize("name", [*COUNTS, "max_position_embeddings"])
def test_a_file_names_the_models_shape(name: str, tmp_path: Path) -> None:
    """transformers writes these into every file, whether they are its defaults or not; a plan of its defaults would be of no model."""
    assert name in json.loads(Qwen3Config().to_json_string(use_diff=True))
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in GOOD.items() if key != name}))
    with pytest.raises(ConfigError, match=rf"config\.json: {name} missing; the file must name"):
        ModelConfig.from_file(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"), [({}, "model_type is missing; supported: qwen3"), ({"model_type": "qwen3"}, "vocab_size, hidden_size, .* missing")]
)
def test_a_nearly_empty_file(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_file(tmp_path)


def test_defaults_that_are_taken_are_told() -> None:
    """And they are transformers': its class agrees with what is told, field by field."""
    silent = ModelConfig.from_dict(GOOD)
    assert silent.assumed == (
        "rms_norm_eps = 1e-06", "tie_word_embeddings = false", "attention_bias = false", "rope_theta = 10000.0", "dtype = float32",
    )  # fmt: skip
    theirs = Qwen3Config(**GOOD)
    assert (theirs.rms_norm_eps, theirs.tie_word_embeddings, theirs.attention_bias, theirs.rope_parameters["rope_theta"]) == (1e-6, False, False, 10000.0)
    said = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False}
    for rope in ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}, {"rope_scaling": {"rope_theta": 5.0, "type": "linear", "factor": 2.0}}):
        for dtype in ("dtype", "torch_dtype"):
            assert ModelConfig.from_dict({**GOOD, **said, **rope, dtype: "bfloat16"}).assumed == ()
    assert ModelConfig.from_dict({**GOOD, "rms_norm_eps": 1e-6}) == silent  # what is told of a file is no part of the shape
    assert ModelConfig.from_dict(json.loads(theirs.to_json_string(use_diff=True))).assumed == ("dtype = float32",)


def test_sizes_of_parts_that_a_file_leaves_out_are_told() -> None:
    """512 experts of transformers' defaults are most of a small model's memory."""
    told = ModelConfig.from_dict({**GOOD, "model_type": "qwen3_next"}).assumed
    assert {"num_experts = 512", "linear_num_value_heads = 32", "moe_intermediate_size = 512"} <= set(told)
    assert "num_experts = 8" not in ModelConfig.from_dict({**GOOD, "model_type": "qwen3_moe", "num_experts": 8}).assumed
    assert not any(part.startswith(("linear", "num_experts")) for part in ModelConfig.from_dict(GOOD).assumed)


def test_absent_and_null() -> None:
    """Absent is the class default of transformers; null is allowed where transformers gives it a meaning."""
    assert ModelConfig.from_dict({"model_type": "qwen3"}).num_kv_heads == 32
    assert ModelConfig.from_dict({**GOOD, "num_key_value_heads": None}).num_kv_heads == 4
    assert ModelConfig.from_dict({**GOOD, "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}).windows == (None, None)
    assert ModelConfig.from_dict({**GOOD, "use_sliding_window": True, "max_window_layers": 1}).windows == (None, 4096)
    assert ModelConfig.from_dict({**GOOD, "sliding_window": 5, "max_window_layers": 0}).windows == (None, None)
