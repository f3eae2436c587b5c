"""The trained golden models of the later types: qwen3_moe, qwen3_next, qwen3_5 and qwen3_5_moe, in small. Shapes and files; train_family.py trains them.

    python -m twinfer.golden.family --out golden

writes the files beside the weights (config.json, tokenizer, generation settings), which training decides nothing of, into golden/<name>. Head dims are
those of the published models (attention 256 with 64 that turn, or 128; Gated DeltaNet 128 and 128), so kernels run as they will, and so is GQA of 8.

What differs from model to model, so that each guards something that another can't:

qwen3_moe    attention only, two KV heads, 16 experts of which 4; names "model.", three tensors an expert; tied
qwen3_next   two value heads a key head, projections interleaved by key head, a head of its own; names "model.", three tensors an expert
qwen3_5      one value head a key head, dense feed forward, a file of the text model alone; names "model."; tied; draft module
qwen3_5_moe  two value heads a key head, config.json and names of the multimodal wrapper, experts in two tensors a layer; tied; draft module

They stay in the repository and out of the wheel: together they are four times what the wheel carries, and only tests need them.
"""

import argparse
import copy
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.golden import BUNDLED

if TYPE_CHECKING:
    import torch

# One tokenizer and vocabulary with the dense model: golden/qwen3.
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
DRAFT_PREFIX = "mtp."

# Sequence length -> share of the steps. Few are long and none is of the whole context: transformers computes a state chunk by chunk, one after the other,
# and attention in float32 keeps a row's whole matrix of scores.
LENGTHS = {512: 0.70, 1024: 0.20, 2304: 0.10}
CHAT_SHARE = 0.3

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 96,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "use_cache": True,
    "bos_token_id": 2037,
    "eos_token_id": 2039,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
_GATED: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256}
_GDN: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_PARTIAL = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
_MROPE = _PARTIAL | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
_DRAFT = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 96, "num_position_embeddings": 16, "patch_size": 2}


@dataclass(frozen=True, slots=True)
class FamilyRecipe:
    """One trained model. `config` is its config.json; the loss is cross-entropy + draft_weight * the draft module's + balance_weight *
    how unevenly experts are used + margin_weight * how near routers are to another choice.

    steps is an upper bound: a run with a time limit ends its schedule of learning rates at whichever comes first (train_family.py).
    """

    name: str
    config: dict[str, Any]
    steps: int
    step_tokens: int
    peak_lr: float
    weight_decay: float
    token_noise: float  # share of the input tokens that training replaces by random ones
    draft_weight: float  # 0: no draft module
    balance_weight: float  # 0: no experts
    margin_weight: float  # at the end; it grows from zero
    seed: int
    fused: bool = False  # experts in two tensors a layer, else three an expert

    @property
    def text(self) -> dict[str, Any]:
        """The fields of the text model."""
        found: dict[str, Any] = self.config.get("text_config", self.config)
        return found

    @property
    def model_type(self) -> str:
        """As golden/widened.py names the types."""
        return str(self.config["model_type"]).removesuffix("_text")

    @property
    def prefix(self) -> str:
        """Of the names of the text model's tensors in the file."""
        return "model.language_model." if "text_config" in self.config else "model."


def _recipe(name: str, config: dict[str, Any], seed: int, *, draft: bool = False, fused: bool = False) -> FamilyRecipe:
    sparse = "num_experts" in config.get("text_config", config)
    return FamilyRecipe(
        name=name,
        config=config,
        steps=3000,
        step_tokens=16384,
        peak_lr=3e-3,
        weight_decay=0.2,
        token_noise=0.1,
        draft_weight=0.3 if draft else 0.0,
        balance_weight=0.1 if sparse else 0.0,
        margin_weight=0.05 if sparse else 0.0,
        seed=seed,
        fused=fused,
    )


FAMILY = {
    # 1.97 million parameters
    "qwen3_moe": _recipe(
        "qwen3_moe",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **_COMMON,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        seed=20240610,
    ),
    # 1.98 million parameters
    "qwen3_next": _recipe(
        "qwen3_next",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **_COMMON,
            **_GATED,
            **_GDN,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": _PARTIAL,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        seed=20240611,
    ),
    # 1.36 million parameters, 0.70 million more in the draft module
    "qwen3_5": _recipe(
        "qwen3_5",
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **_COMMON,
            **_GATED,
            **_GDN,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "rope_parameters": _MROPE,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": True,
            **_DRAFT,
        },
        seed=20240612,
        draft=True,
    ),
    # 1.49 million parameters, 0.74 million more in the draft module
    "qwen3_5_moe": _recipe(
        "qwen3_5_moe",
        {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                **_COMMON,
                **_GATED,
                **_GDN,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": _MROPE,
                "attn_output_gate": True,
                "mamba_ssm_dtype": "float32",
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
                "tie_word_embeddings": True,
                **_DRAFT,
            },
            "vision_config": _VISION,
        },
        seed=20240613,
        draft=True,
        fused=True,
    ),
}


def model_type_of(directory: Path) -> str:
    """The type of a checkpoint, as golden/widened.py names it."""
    return str(json.loads((directory / "config.json").read_text())["model_type"]).removesuffix("_text")


def text_config(recipe: FamilyRecipe) -> Any:
    """The configuration of transformers' class for the text model alone."""
    from twinfer.golden.widened import stock_class

    return stock_class(recipe.model_type).config_class(**copy.deepcopy(recipe.text))


def write_files(recipe: FamilyRecipe, directory: Path) -> None:
    """Writes what lies beside the weights into `directory`, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(recipe.config, indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(BUNDLED / name, directory / name)


def write_weights(recipe: FamilyRecipe, trunk: "dict[str, torch.Tensor]", draft: "dict[str, torch.Tensor] | None", directory: Path) -> None:
    """Writes model.safetensors: transformers' state of the text model, in whose memory experts are fused, and the draft module's beside it."""
    import torch
    from safetensors.torch import save_file

    stored: dict[str, torch.Tensor] = {}
    for name, tensor in _unfused(trunk | {DRAFT_PREFIX + name: tensor for name, tensor in (draft or {}).items()}, recipe.fused):
        if name == "lm_head.weight" and recipe.text["tie_word_embeddings"]:
            continue
        name = recipe.prefix + name.removeprefix("model.") if name.startswith("model.") else name
        stored[name] = tensor.detach().to("cpu", getattr(torch, recipe.text["dtype"])).contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: stored[name] for name in sorted(stored)}, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def _unfused(state: "dict[str, torch.Tensor]", fused: bool) -> "Iterator[tuple[str, torch.Tensor]]":
    """The same, with each layer's experts as three tensors an expert unless `fused`."""
    for name, tensor in state.items():
        module, _, which = name.rpartition(".")
        if fused or not module.endswith(".experts"):
            yield name, tensor
            continue
        for e, one in enumerate(tensor.unbind(0)):
            halves = zip(("gate", "up"), one.chunk(2), strict=True) if which == "gate_up_proj" else [("down", one)]
            for half, rows in halves:
                yield f"{module}.{e}.{half}_proj.weight", rows


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.golden.family", description="Write the files beside the weights of the trained family.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write <name>/config.json and the others into")
    parser.add_argument("--only", choices=sorted(FAMILY), help="just one of the models")
    options = parser.parse_args(arguments)
    for name in FAMILY if options.only is None else [options.only]:
        write_files(FAMILY[name], options.out / name)
        print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
