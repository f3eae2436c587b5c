"""GdnState: what one Gated DeltaNet layer keeps of each state slot for its recurrence. Not the convolution's history, and nothing of a step.

A sequence's tokens stand in chunks of 64 that begin at multiples of 64. Its slot holds the state at the last such multiple, the anchor, and of every token
after it, row i of the open chunk, what later tokens need. A row is written once. Rows that were not written in this chunk, and the anchor of a sequence
below position 64, are never read: a slot that is taken over needs no zeroing.

In a 16-bit model, fp32 values that enter products are held as pieces of the model's dtype, high = round(x) and low = round(x - high), so that the product
of a tile is on a matrix unit. A float32 model has no pieces: the high one is the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

CHUNK = 64  # tokens. Arithmetic: another number gives other bits
BLOCK = 16  # rows of a chunk that are solved together. Arithmetic too


@dataclass(frozen=True, slots=True)
class Precision:
    """How fp32 values enter products: in `pieces`, the anchor in `anchor_pieces` where it meets keys and queries.

    (2, 1) serves 16-bit models: output error 1e-3 in fp32, half that of the public chunk kernel in bf16; (2, 2), "exact", has 5e-6 for a second copy of the
    anchor. (1, 1) is for float32, whose products are IEEE's.
    """

    pieces: int
    anchor_pieces: int


def precision_of(dtype: torch.dtype, exact: bool = False) -> Precision:
    """The precision of a model of `dtype`."""
    return Precision(1, 1) if dtype == torch.float32 else Precision(2, 2 if exact else 1)


def state_shapes(
    num_key_heads: int, num_value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, precision: Precision
) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """By field of `GdnState`: dtype and shape of one slot. Fields that a precision does not have are left out."""
    anchor, by_row = (num_value_heads, key_dim, value_dim), (num_value_heads, CHUNK)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "anchor": (torch.float32, anchor),
        "keys": (dtype, (num_key_heads, CHUNK, key_dim)),
        "decay_sums": (torch.float32, by_row),
        "beta": (torch.float32, by_row),
        "t_high": (dtype, (*by_row, CHUNK)),
        "x_high": (dtype, (num_value_heads, BLOCK, CHUNK)),
        "r_high": (dtype, (*by_row, value_dim)),
    }
    if dtype != torch.float32:
        shapes["anchor_high"] = (dtype, anchor)
    if precision.anchor_pieces == 2:
        shapes["anchor_low"] = (dtype, anchor)
    if precision.pieces == 2:
        shapes |= {name + "_low": shapes[name + "_high"] for name in ("t", "x", "r")}
    return shapes


@dataclass(frozen=True, slots=True)
class GdnState:
    """Tensors of one layer, first dim the slots, contiguous.

    anchor      [slots, nv, dk, dv] float32: state behind the last full chunk. A snapshot at a chunk's end is the anchor and its pieces, nothing else
    keys        [slots, nk, 64, dk] model dtype
    decay_sums  [slots, nv, 64] float32: sum of log_decay from the anchor on, G_i
    beta        [slots, nv, 64] float32
    t_*         [slots, nv, 64, 64]: row i of T = (I + A)^-1
    x_*         [slots, nv, 16, 64]: row i % 16 of the open block: its part of A T left of the block
    r_*         [slots, nv, 64, dv]: beta_i (v_i - exp(G_i) (anchor^T k_i))
    anchor_*    [slots, nv, dk, dv]: pieces of the anchor, 16-bit models only
    *_low       None where a precision has no second piece
    """

    anchor: torch.Tensor
    keys: torch.Tensor
    decay_sums: torch.Tensor
    beta: torch.Tensor
    t_high: torch.Tensor
    x_high: torch.Tensor
    r_high: torch.Tensor
    anchor_high: torch.Tensor | None = None
    anchor_low: torch.Tensor | None = None
    t_low: torch.Tensor | None = None
    x_low: torch.Tensor | None = None
    r_low: torch.Tensor | None = None

    @property
    def precision(self) -> Precision:
        return Precision(1 if self.t_low is None else 2, 1 if self.anchor_low is None else 2)
