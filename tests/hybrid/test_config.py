"""config.json of the four types beside dense Qwen3: read as transformers reads it; what is refused, with the field and the value in the error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from twinfer.config import SUPPORTED_MODEL_TYPES, ModelConfig
from twinfer.defaults import DEFAULTS
from twinfer.engine.frequencies import inverse_frequencies
from twinfer.errors import ConfigError, UnsupportedModel

from .shapes import HYBRID, KINDS, NEW, SPARSE, VISION, WRAPPED

LAYERS = ("linear_attention", "full_attention")


def written(name: str, change: dict[str, Any], drop: tuple[str, ...] = ()) -> tuple[Any, dict[str, Any]]:
    """transformers' config of a tiny model, and what it writes into config.json."""
    kind = KINDS[name]
    shape = {field: value for field, value in {**kind.shape, **change}.items() if field not in drop}
    theirs = kind.config(**copy.deepcopy(shape))
    return theirs, json.loads(theirs.to_json_string(use_diff=False))


def agree(ours: ModelConfig, theirs: Any) -> None:
    """Every field of ours that transformers has too."""
    for field, name in (
        *(("vocab_size", "vocab_size"), ("hidden_size", "hidden_size"), ("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")),
        *(("num_kv_heads", "num_key_value_heads"), ("rms_norm_eps", "rms_norm_eps"), ("max_position", "max_position_embeddings")),
        *(("tie_word_embeddings", "tie_word_embeddings"), ("attention_bias", "attention_bias")),
    ):
        assert getattr(ours, field) == getattr(theirs, name), field
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.intermediate_size == (0 if ours.model_type == "qwen3_5_moe" else theirs.intermediate_size)
    rope = theirs.rope_parameters
    assert (ours.rope.theta, ours.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    partial = rope.get("partial_rotary_factor", 1.0) if ours.model_type in HYBRID else 1.0
    assert ours.rotary_dim == int(ours.head_dim * partial)
    hybrid = ours.model_type in HYBRID
    assert (ours.gdn is not None, ours.attention_gate, ours.centred_norms) == (hybrid, hybrid, hybrid)
    kinds = theirs.layer_types if hybrid else ["full_attention"] * ours.num_layers
    assert [LAYERS[not ours.has_gdn(i)] for i in range(ours.num_layers)] == kinds
    if ours.gdn is not None:
        for field in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
            assert getattr(ours.gdn, field) == getattr(theirs, "linear_" + field), field
        assert ours.gdn.conv_kernel == theirs.linear_conv_kernel_dim
        assert ours.gdn.interleaved == (ours.model_type == "qwen3_next")
    assert (ours.experts is not None) == (ours.model_type in SPARSE)
    if ours.experts is not None:
        assert ours.experts.num_experts == theirs.num_experts
        assert ours.experts.num_per_token == theirs.num_experts_per_tok
        assert ours.experts.intermediate_size == theirs.moe_intermediate_size
        assert ours.experts.normalise == getattr(theirs, "norm_topk_prob", True)
        assert ours.experts.shared_intermediate_size == getattr(theirs, "shared_expert_intermediate_size", None)


CHANGES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}},
    "no_rope": {"rope_parameters": None},
    "scaling_wins": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "old_rope": {"rope_parameters": None, "rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NEW)
def test_read_as_transformers_reads_it(name: str, change: str) -> None:
    theirs, data = written(name, CHANGES[change])
    ours = ModelConfig.from_dict(data)
    agree(ours, theirs)
    again = ModelConfig.from_dict({**KINDS[name].shape, **CHANGES[change], "model_type": theirs.model_type})  # the file that it was made from
    assert again == ours


@pytest.mark.parametrize("name", KINDS)
def test_defaults_are_transformers(name: str) -> None:
    theirs = KINDS[name].config()
    for field, value in DEFAULTS[name].items():
        if field == "full_attention_interval":  # a default of the code, not of the class
            assert [i for i, kind in enumerate(theirs.layer_types) if kind == "full_attention"] == list(range(value - 1, theirs.num_hidden_layers, value))
        elif field == "sliding_window":  # forced to null unless it is used
            assert KINDS[name].config(use_sliding_window=True).sliding_window == value
        else:
            assert getattr(theirs, field) == value, field
    agree(ModelConfig.from_dict({"model_type": theirs.model_type}), theirs)


@pytest.mark.parametrize("name", HYBRID)
def test_partial_factor_beside_the_rope_parameters(name: str) -> None:
    """As Qwen3-Next's own file has it; one inside wins, and a quarter is what neither says."""
    old = {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0, "partial_rotary_factor": 0.125}, "partial_rotary_factor": 0.5}
    for change, dims in ((old, 16), (inside, 4), ({"rope_parameters": {"rope_type": "default"}}, 8), ({"rope_parameters": None}, 8)):
        theirs, data = written(name, change)
        agree(ModelConfig.from_dict(data), theirs)
        again = ModelConfig.from_dict({**KINDS[name].shape, **change, "model_type": theirs.model_type})
        agree(again, theirs)
        assert again.rotary_dim == dims


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", HYBRID)
def test_interval(name: str, interval: int) -> None:
    theirs, data = written(name, {"full_attention_interval": interval, "num_hidden_layers": 6}, drop=("layer_types",))
    agree(ModelConfig.from_dict(data), theirs)
    del data["layer_types"]
    agree(ModelConfig.from_dict({**data, "full_attention_interval": interval}), theirs)


PLACES = [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {"norm_topk_prob": False}]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("change", PLACES)
def test_which_layers_have_experts(name: str, change: dict[str, Any]) -> None:
    theirs, data = written(name, change)
    ours = ModelConfig.from_dict(data)
    agree(ours, theirs)
    model = KINDS[name].model(theirs)
    assert [ours.has_experts(i) for i in range(ours.num_layers)] == [hasattr(layer.mlp, "experts") for layer in model.model.layers]


WINDOWS = [{"use_sliding_window": True, "sliding_window": 5}, {"sliding_window": 5}, {"use_sliding_window": True, "sliding_window": None}]


@pytest.mark.parametrize("sliding", WINDOWS)
def test_every_layer_of_qwen3_moe_slides_or_none(sliding: dict[str, Any]) -> None:
    theirs, data = written("qwen3_moe", sliding)
    assert ModelConfig.from_dict({**data, **sliding}).windows == (theirs.sliding_window,) * 4


def test_qwen3_moe_head_dim_has_no_default() -> None:
    _, data = written("qwen3_moe", {}, drop=("head_dim",))
    assert "head_dim" not in data
    assert ModelConfig.from_dict(data).head_dim == 16
    with pytest.raises(ConfigError, match=r"head_dim is absent, and hidden_size = 64 is not a multiple of num_attention_heads = 6"):
        ModelConfig.from_dict({**data, "num_attention_heads": 6})


def test_qwen3_moe_number_of_experts_has_two_names() -> None:
    _, data = written("qwen3_moe", {"num_experts": 5})
    assert data["num_local_experts"] == 5  # what transformers 5 writes
    experts = ModelConfig.from_dict(data).experts
    assert experts is not None
    assert experts.num_experts == 5
    with pytest.raises(ConfigError, match="num_experts = 6 and num_local_experts = 5 differ"):
        ModelConfig.from_dict({**data, "num_experts": 6})


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapper(name: str) -> None:
    """The same text model inside a multimodal file, and by itself."""
    kind = KINDS[name]
    assert kind.wrapper is not None
    theirs = kind.wrapper(text_config=copy.deepcopy(kind.shape), vision_config=VISION, tie_word_embeddings=True)
    data = json.loads(theirs.to_json_string(use_diff=False))
    ours = ModelConfig.from_dict(data)
    alone = ModelConfig.from_dict({**data["text_config"], "tie_word_embeddings": True})
    assert ours == alone
    assert ours.tie_word_embeddings  # the wrapper's own flag, though text_config says false
    assert data["text_config"]["tie_word_embeddings"] is False
    del data["tie_word_embeddings"]
    assert ModelConfig.from_dict(data).tie_word_embeddings is False
    with pytest.raises(ConfigError, match=r"here\.json: text_config\.head_dim = 3 must be even"):
        ModelConfig.from_dict({**data, "text_config": {**data["text_config"], "head_dim": 3}}, source="here.json")
    with pytest.raises(ConfigError, match=r"text_config\.model_type = 'qwen4_exp_text' is not supported"):
        ModelConfig.from_dict({**data, "text_config": {**data["text_config"], "model_type": "qwen4_exp_text"}})
    for where in (data, data["text_config"]):
        where["quantization_config"] = {"quant_method": "fp8"}
        with pytest.raises(ConfigError, match="quantization_config is set"):
            ModelConfig.from_dict(data)
        del where["quantization_config"]
    with pytest.raises(ConfigError, match="text_config must be an object"):
        ModelConfig.from_dict({**data, "text_config": 3})


REAL_FILE: dict[str, Any] = {  # the text_config of Qwen3.6-27B, where it differs from the class (model specification, 5.2)
    "model_type": "qwen3_5_text",
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}

HYBRID_SHAPE = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "max_position_embeddings": 262144}


def shape(h: int, layers: int, heads: str, *, vocab: int = 248320, nv: int = 0, mlp: int = 0, experts: str = "", tied: bool = False) -> dict[str, Any]:
    """A row of the specification's tables 5.1 and 5.2. heads "H/Hk"; experts "E/k/m" or "E/k/m/s"."""
    q, kv = heads.split("/")
    found: dict[str, Any] = {"hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": int(q), "num_key_value_heads": int(kv), "vocab_size": vocab}
    found["tie_word_embeddings"] = tied
    if nv:
        found |= {**HYBRID_SHAPE, "linear_num_value_heads": nv}
    else:
        found["head_dim"] = 128
    if mlp:
        found["intermediate_size"] = mlp
    if experts:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        found |= dict(zip(names, map(int, experts.split("/")), strict=False))
    return found


PUBLISHED = [  # parameters of the text model: sums over the published checkpoints' tensors (model specification, 5.1 and 5.2)
    ("qwen3", shape(1024, 28, "16/8", vocab=151936, mlp=3072, tied=True), 596_049_920),
    ("qwen3_moe", shape(2048, 48, "32/4", vocab=151936, mlp=6144, experts="128/8/768"), 30_532_122_624),
    ("qwen3_moe", shape(4096, 94, "64/4", vocab=151936, mlp=12288, experts="128/8/1536"), 235_093_634_560),
    ("qwen3_next", shape(2048, 48, "16/2", vocab=151936, nv=32, mlp=5120, experts="512/10/512/512"), 79_674_391_296),
    ("qwen3_5", shape(1024, 24, "8/2", nv=16, mlp=3584, tied=True), 752_393_024),
    ("qwen3_5", shape(2560, 32, "16/4", nv=32, mlp=9216, tied=True), 4_205_751_296),
    ("qwen3_5", shape(4096, 32, "16/4", nv=32, mlp=12288), 8_953_803_264),
    ("qwen3_5", shape(5120, 64, "24/4", nv=48, mlp=17408), 26_895_998_464),
    ("qwen3_5_moe", shape(2048, 40, "16/2", nv=32, experts="256/8/512/512"), 34_660_610_688),
    ("qwen3_5_moe", shape(4096, 60, "32/2", nv=64, experts="512/10/1024/1024"), 396_346_350_336),
    ("qwen3_5_moe", shape(8192, 92, "64/4", nv=128, experts="512/10/2048/2048"), 2_419_804_697_984),
]


@pytest.mark.parametrize(("name", "fields", "published"), PUBLISHED, ids=[f"{name}-{published}" for name, _, published in PUBLISHED])
def test_published_parameter_counts(name: str, fields: dict[str, Any], published: int) -> None:
    assert ModelConfig.from_dict({"model_type": name, **fields}).num_parameters == published


def test_a_real_file() -> None:
    ours = ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": REAL_FILE, "vision_config": {"model_type": "qwen3_5"}, "language_model_only": False})
    assert (ours.model_type, ours.rotary_dim, ours.rope.theta, ours.dtype) == ("qwen3_5", 64, 1e7, "bfloat16")


def test_frequencies_of_a_part_of_a_head() -> None:
    """What turns is a head of rotary_dim dims by itself."""
    import torch

    theirs, data = written("qwen3_next", {"rope_parameters": {**CHANGES["yarn"]["rope_parameters"], "partial_rotary_factor": 0.5}})
    ours = ModelConfig.from_dict(data)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    found = inverse_frequencies(ours.rope, ours.rotary_dim, torch.float32)
    assert torch.equal(found[0], expected)
    assert found[1] == factor


def _any(change: dict[str, Any], words: str, names: tuple[str, ...] = HYBRID) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, change, words) for name in names]


BAD: list[tuple[str, dict[str, Any], str]] = [
    *_any({"attn_output_gate": False}, "attn_output_gate = False is not supported; supported: true"),
    *_any({"attn_output_gate": 1}, "attn_output_gate = 1 is not supported; supported: true"),
    *_any({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not supported; supported: swish, silu"),
    *_any({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not supported; supported: float32"),
    *_any({"use_sliding_window": True}, "use_sliding_window = True is not supported; supported: false"),
    *_any({"layer_types": ["sliding_attention"] * 4}, r"layer_types\[0\] = 'sliding_attention' is not supported; supported: full_attention, linear_attention"),
    *_any({"layer_types": ["full_attention"] * 3}, "layer_types must list 4 layers"),
    *_any({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval = 0 must be an integer of at least 1"),
    *_any({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 must be an integer of at least 2"),
    *_any({"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is not a multiple of linear_num_key_heads = 2"),
    *(bad for field in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim") for bad in _any({field: 0}, f"{field} = 0")),
    *_any({"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.1}}, "partial_rotary_factor = 0.1 makes 3 dims of head_dim = 32 turn"),
    *_any({"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 1.5}}, "partial_rotary_factor = 1.5 makes 48 dims of head_dim = 32 turn"),
    *_any({"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.0}}, "partial_rotary_factor = 0.0 must be a positive number"),
    *_any({"rope_parameters": {"rope_type": "mrope"}}, "rope_type = 'mrope' is not supported"),
    *_any({"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section = .1, 2. must list three integers", WRAPPED),
    *_any({"rope_parameters": {"mrope_interleaved": 1}}, "mrope_interleaved = 1 must be true or false", WRAPPED),
    *_any({"rope_parameters": {"mrope_section": [2, 1, 1]}}, "rope field 'mrope_section'", ("qwen3_moe", "qwen3_next")),
    *_any({"hidden_act": "gelu"}, "hidden_act = 'gelu'", NEW),
    *_any({"num_key_value_heads": None}, "num_key_value_heads = None must be an integer", NEW),
    *_any({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3", NEW),
    *_any({"num_experts": 0, "num_local_experts": 0}, "num_experts = 0 must be an integer of at least 1", SPARSE),
    *_any({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be at most num_experts = 8", SPARSE),
    *_any({"moe_intermediate_size": 2.0}, "moe_intermediate_size = 2.0", SPARSE),
    *_any({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0", ("qwen3_next", "qwen3_5_moe")),
    *_any({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes'", SPARSE),
    *_any({"norm_topk_prob": False}, "norm_topk_prob = False is not supported; supported: true", ("qwen3_5_moe",)),
    *_any({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\] is not supported; supported: \[\]", ("qwen3_5_moe",)),
    *_any({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported; supported: 1", ("qwen3_5_moe",)),
    *_any({"decoder_sparse_step": 0}, "decoder_sparse_step = 0", ("qwen3_moe", "qwen3_next")),
    *_any({"mlp_only_layers": [-1]}, r"mlp_only_layers = \[-1\] must list layer numbers", ("qwen3_moe", "qwen3_next")),
    *_any({"text_config": {}}, "text_config is set; supported for qwen3_5, qwen3_5_moe", ("qwen3", "qwen3_moe", "qwen3_next")),
    *_any({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported for qwen3_moe", ("qwen3_moe",)),
    *_any({"layer_types": ["full_attention"] * 4, "use_sliding_window": True, "sliding_window": 5}, r"layer_types\[0\] is full_attention but", ("qwen3_moe",)),
    *_any({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set", NEW),
]


@pytest.mark.parametrize(("name", "change", "words"), BAD, ids=[f"{name}-{json.dumps(change)}" for name, change, _ in BAD])
def test_refused(name: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    _, data = written(name, {})
    ModelConfig.from_dict(data)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**data, **change}))
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["qwen4_exp", "qwen4_exp_text", "qwen3_next_text", "qwen3_vl", "olmo_hybrid"])
def test_other_types_are_refused_by_name(name: str) -> None:
    _, data = written("qwen3_5_moe", {})
    with pytest.raises(UnsupportedModel, match=f"model_type '{name}' is not supported"):
        ModelConfig.from_dict({**data, "model_type": name})


@pytest.mark.parametrize("dim", ["linear_key_head_dim", "linear_value_head_dim"])
def test_the_fast_engine_refuses_head_dims_that_it_has_no_kernels_for(dim: str, tmp_path: Path) -> None:
    """Before anything is allocated; the command line takes the reference for them."""
    from twinfer.fast import Engine
    from twinfer.serve.backend import Backend, choose

    _, data = written("qwen3_5", {"head_dim": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16, dim: 24})
    (tmp_path / "config.json").write_text(json.dumps(data))
    refused = f"{dim} = 24: the fast engine's kernels have 16, 32, 64, 128; the reference engine has any \\(--backend reference\\)"
    with pytest.raises(ConfigError, match=refused):
        Engine.from_pretrained(tmp_path, random_seed=1)
    config = ModelConfig.from_file(tmp_path)
    assert choose(Backend.AUTO, None, config).backend is Backend.REFERENCE
    with pytest.raises(ConfigError, match=refused):
        choose(Backend.FAST, None, config)


def test_every_type_that_is_read_runs() -> None:
    assert set(SUPPORTED_MODEL_TYPES) == set(DEFAULTS) == set(KINDS)
