"""The output gate in plain PyTorch. Not used by the engine: it says what the kernel computes."""

from __future__ import annotations

import torch


def output_gate(qkv: torch.Tensor, attended: torch.Tensor) -> None:
    """attended <- attended * sigmoid(gate); the sigmoid is rounded to the dtype before the product, as two operations in that dtype are.

    qkv       [T, (2 H + 2 K) d]: H times a query and its gate, then keys and values; any stride between tokens
    attended  [T, H, d], read and written, qkv's dtype (model specification, section 3.3)
    """
    num_tokens, num_heads, head_dim = attended.shape
    gate = qkv[:, : 2 * num_heads * head_dim].reshape(num_tokens, num_heads, 2, head_dim)[:, :, 1]
    attended.mul_(torch.sigmoid(gate))
