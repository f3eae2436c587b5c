"""What each golden model is: its shape, its tokenizer's size and how long it trains. Numbers only; train.py acts on them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Recipe:
    """One golden model. `shape` holds keyword arguments of transformers' Qwen3Config."""

    name: str
    shape: dict[str, Any]
    num_tokens: int  # tokenizer entries, special tokens included; at most shape["vocab_size"]
    dtype: str  # of the weights on disk
    steps: int
    step_tokens: int
    peak_lr: float
    weight_decay: float
    attention_dropout: float  # of training only; the stored configuration says 0
    token_noise: float  # share of the input tokens that training replaces by random ones
    seed: int


# Sequence length -> share of the steps. Most are short; the long ones, up to max_position_embeddings, train every position of the context.
LENGTHS = {512: 0.60, 1024: 0.24, 2304: 0.10, 4096: 0.06}

# Share of the rows that hold conversations in the chat template instead of running text.
CHAT_SHARE = 0.3

# Of every third training conversation, and of the golden chat prompt.
SYSTEM_PROMPT = "You are a player upon the stage. Answer in the manner of Shakespeare."

# Measured on qwen3: without any regularisation and with 4000 steps, held-out text costs 5.4 nat a token instead of 3.7, and the logits get
# so steep that two right fp32 implementations (eager and fused attention) differ by 8e-5 nat, too close to the 1e-4 that the fp32 gate
# allows. As it is they differ by 1.3e-5.
RECIPES = {
    # 2.16 million parameters, 4.3 MB in bf16. 4 x 128 != 192, two query heads per KV head, tied, eight embedding rows that no token uses.
    "qwen3": Recipe(
        name="qwen3",
        shape={
            "vocab_size": 2048,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
        num_tokens=2040,
        dtype="bfloat16",
        steps=2200,
        step_tokens=32768,
        peak_lr=3e-3,
        weight_decay=0.5,
        attention_dropout=0.2,
        token_noise=0.2,
        seed=20240607,
    ),
    # 0.18 million parameters, 0.7 MB in fp32. Another rope base and an untied head, so that the two models differ where real ones do.
    "micro": Recipe(
        name="micro",
        shape={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "tie_word_embeddings": False,
        },
        num_tokens=256,
        dtype="float32",
        steps=2500,
        step_tokens=32768,
        peak_lr=4e-3,
        weight_decay=0.1,
        attention_dropout=0.0,
        token_noise=0.0,
        seed=20240608,
    ),
}
