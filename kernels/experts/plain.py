"""A layer's experts in plain PyTorch. Not used by the engine: it says what the kernels compute.

Shapes: T tokens, hidden_size h, E experts of width m, k of them for each token, P = T k pairs; pair t k + j is token t's j-th expert, in ascending number.
`pairs`, `tiles` and `num_tiles` are what `router.plain.group` wrote.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, K], weight [N, K] -> [n, N], summed in float32 (float64 for float64) and rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (x.to(wide) @ weight.to(wide).T).to(x.dtype)


def gate_up(
    x: torch.Tensor, pairs: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, weight: torch.Tensor, activated: torch.Tensor, num_per_token: int
) -> None:
    """The first product of each pair's expert and its SwiGLU. Gate, up and silu are rounded to the dtype, as separate operations in it are.

    x              [T, h]
    weight         [E, 2 m, h], x's dtype: the gate's rows, then up's
    activated      [P, m], x's dtype: row i is of the pair pairs[i]; rows that no tile has stay as they are
    num_per_token  k
    """
    for e, first, count in tiles[: int(num_tiles)].tolist():
        rows = slice(first, first + count)
        gate, up = _product(x[pairs[rows].long() // num_per_token], weight[e]).chunk(2, dim=1)
        activated[rows] = F.silu(gate) * up


def down(activated: torch.Tensor, pairs: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor) -> None:
    """The second product of each pair's expert.

    activated  [P, m], as `gate_up` wrote it
    weight     [E, h, m], activated's dtype
    outputs    [T, k, h], activated's dtype: each pair in its own place; those of no expert stay as they are
    """
    flat = outputs.view(-1, outputs.shape[2])
    for e, first, count in tiles[: int(num_tiles)].tolist():
        rows = slice(first, first + count)
        flat[pairs[rows].long()] = _product(activated[rows], weight[e])


def combine(
    outputs: torch.Tensor,
    shares: torch.Tensor,
    experts: torch.Tensor,
    out: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> None:
    """out[t] = sum over j of shares[t, j] outputs[t, j] (+ sigmoid(shared_gate[t]) shared[t]), added in this order in float32 (float64), rounded once.

    The reference works in the dtype: it rounds each product, each sum, the sigmoid and its product. In float32 the two are the same but for rounding.

    outputs      [T, k, h]
    shares       [T, k], outputs' dtype, as `route` wrote them
    experts      [T, k] int32: a negative one adds nothing, and what `outputs` holds there is not read
    out          [T, h], outputs' dtype; 0 for a token without any expert, shared or not
    shared       [T, h], outputs' dtype: the output of the expert that every token goes through; None: there is none
    shared_gate  [T] or [T, 1], outputs' dtype: logit of its share
    """
    wide = torch.float64 if outputs.dtype == torch.float64 else torch.float32
    live = experts >= 0
    total = torch.zeros(out.shape, dtype=wide, device=out.device)
    for j in range(experts.shape[1]):
        total += torch.where(live[:, j, None], shares[:, j, None].to(wide) * outputs[:, j].to(wide), 0.0)
    if shared is not None and shared_gate is not None:
        share = torch.sigmoid(shared_gate.view(-1, 1).to(wide))
        total += torch.where(live.any(1)[:, None], share * shared.to(wide), 0.0)
    out.copy_(total)
