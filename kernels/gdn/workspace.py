"""What Gated DeltaNet's launches of one layer leave for each other within a step: shapes for the bounds, tensors for the launches. Nothing outlives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from twinfer.kernels.gdn.state import CHUNK, Precision


def workspace_shapes(
    max_tasks: int, max_singles: int, num_value_heads: int, value_dim: int, dtype: torch.dtype, precision: Precision
) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """By field of `Workspace`: dtype and shape, for so many tasks (`tasks.max_chunk_tasks`) and singles. Fields that a precision does not have are left out."""
    square = (max_tasks, num_value_heads, CHUNK, CHUNK)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "sums": (torch.float32, (max_tasks, CHUNK, num_value_heads)),
        "strength": (torch.float32, (max_tasks, CHUNK, num_value_heads)),
        "t_high": (dtype, square),
        "m_high": (dtype, square),
        "diagonal": (torch.float32, (max_tasks, num_value_heads, CHUNK)),
        "weights": (torch.float32, (max_singles, num_value_heads, CHUNK)),
        "streamed": (torch.float32, (max_singles, num_value_heads, 2, value_dim)),
    }
    return shapes | ({"t_low": (dtype, square), "m_low": (dtype, square)} if precision.pieces == 2 else {})


@dataclass(frozen=True, slots=True)
class Workspace:
    """Tensors that all layers share.

    sums      [tasks, 64, nv] float32: G_i of each task's rows; strength likewise: beta
    t_*, m_*  [tasks, nv, 64, 64] model dtype: T, and M = P T below the diagonal
    diagonal  [tasks, nv, 64] float32: P_ii
    weights   [singles, nv, 64] float32: w_i between the two launches of single rows, P_ii in place i
    streamed  [singles, nv, 2, dv] float32: anchor^T k_i and anchor^T q_i between them
    """

    sums: torch.Tensor
    strength: torch.Tensor
    t_high: torch.Tensor
    m_high: torch.Tensor
    diagonal: torch.Tensor
    weights: torch.Tensor
    streamed: torch.Tensor
    t_low: torch.Tensor | None = None
    m_low: torch.Tensor | None = None
