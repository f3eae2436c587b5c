"""Writes a tiny hybrid checkpoint with made-up weights: qwen3_next in small, beside the dense models that are trained. It records no goldens.

Every kind of layer is in it, with unequal numbers everywhere, so that a mix-up of two dims shows: Gated DeltaNet with two value heads a key head and
attention with a gate, a layer of each kind with experts and one of each without. Tokenizer and generation settings are micro's, one token a byte.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from twinfer.golden import MICRO

SEED = 20240609
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

# 0.36 million parameters, 1.5 MB in float32.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2, 3],
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "bos_token_id": 253,
    "eos_token_id": 255,
    "pad_token_id": None,
    "dtype": "float32",
}


def write(directory: Path, *, seed: int = SEED, fused: bool = False) -> Path:
    """Writes the checkpoint into `directory`, which is made. The same seed gives the same bytes anywhere. fused: experts in two tensors a layer."""
    import torch
    from safetensors.torch import save_file

    from twinfer.config import ModelConfig
    from twinfer.engine.checkpoint import random_weights
    from twinfer.engine.layout import to_stored
    from twinfer.engine.tensors import StoredForm

    config = ModelConfig.from_dict(CONFIG, source="golden/hybrid.py")
    stored = to_stored(config, random_weights(config, seed, torch.float32), StoredForm(fused=fused))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(MICRO / name, directory / name)
    return directory


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.golden.hybrid", description="Write a tiny hybrid checkpoint with made-up weights.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the checkpoint into")
    parser.add_argument("--seed", type=int, default=SEED, help="of the weights (default: %(default)s)")
    parser.add_argument("--fused", action="store_true", help="store a layer's experts in two tensors, not three an expert")
    options = parser.parse_args(arguments)
    path = write(options.out, seed=options.seed, fused=options.fused)
    print(f"{path}: {(path / 'model.safetensors').stat().st_size} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
