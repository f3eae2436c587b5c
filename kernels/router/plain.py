"""The choice among experts in plain PyTorch. Not used by the engine: it says what the kernels compute.

Shapes: T tokens (padding included), E experts, k of them for each token, P = T k pairs. Pair t k + j is token t's j-th expert.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def route(logits: torch.Tensor, token_row: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, normalise: bool) -> None:
    """The k most probable experts of each token, in ascending number, and their shares.

    Probabilities are over all E experts in float32 (float64 for float64); of experts that tie, the lower number is chosen. Where a logit is NaN, or one is
    infinite, no probability is a number: the token gets experts 0 .. k - 1 and shares that are NaN, so that its own result tells.

    logits     [T, E], the router's product
    token_row  [T] int32: negative marks padding, which gets no expert
    shares     [T, k], logits' dtype: written; 0 for padding
    experts    [T, k] int32: written; -1 for padding
    normalise  the chosen probabilities are divided by their sum
    """
    k = experts.shape[1]
    probabilities = F.softmax(logits, dim=-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    chosen, numbers = ordered.values[:, :k], ordered.indices[:, :k]  # [T, k] each
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    numbers, slots = numbers.sort(-1)
    live = (token_row >= 0)[:, None]
    shares.copy_(torch.where(live, chosen.gather(1, slots), 0.0))
    experts.copy_(torch.where(live, numbers, -1))


def group(experts: torch.Tensor, pairs: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, rows: int) -> None:
    """Pairs by expert, and the tiles in which a grouped product takes them: at most `rows` pairs of one expert each.

    experts    [T, k] int32; a number outside of 0 .. E - 1 is no expert, and its pair is in no list
    pairs      [P] int32: written up to the number of pairs that have an expert; by expert, and of one expert in ascending order
    offsets    [E + 1] int32: written; expert e's pairs are pairs[offsets[e] : offsets[e + 1]]
    tiles      [max_tiles(P, E, rows), 3] int32: written up to num_tiles; (expert, first place in `pairs`, number of pairs), in the order of `pairs`
    num_tiles  [1] int32: written
    """
    num_experts, flat = len(offsets) - 1, experts.flatten()
    place, found = 0, []
    for e in range(num_experts):
        own = (flat == e).nonzero().flatten()
        offsets[e] = place
        pairs[place : place + len(own)] = own
        found += [(e, place + i, min(rows, len(own) - i)) for i in range(0, len(own), rows)]
        place += len(own)
    offsets[num_experts] = place
    num_tiles.fill_(len(found))
    tiles[: len(found)] = torch.tensor(found, dtype=torch.int32, device=tiles.device).view(-1, 3)


def max_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Most tiles of at most `rows` pairs that `group` can list; grows with num_pairs and num_experts, falls with rows.

    Experts without a pair have no tile, so n <= min(num_pairs, num_experts) have one each, and each tile more takes `rows` more pairs.
    """
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // rows
