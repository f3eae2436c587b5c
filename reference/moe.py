"""Reference. Slow on purpose: a feed forward that is a choice among experts, as pure functions: the router, a loop over experts, the shared expert.

Maths: model specification, section 3.5. The order of operations and the roundings are those of transformers' eager code.

Shapes: T tokens, h hidden_size, E experts of width m, k of them for each token.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from twinfer.reference.qwen3 import wide_dtype


def route(x: torch.Tensor, weight: torch.Tensor, num_per_token: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts each token goes through, and their shares: x [T, h], weight [E, h] -> shares [T, k] in x's dtype, experts [T, k] int64.

    Probabilities are over all experts, in wide. Of experts that tie, the lower number is chosen, so that a token's experts depend on nothing else.
    normalise: the chosen probabilities are divided by their sum.
    """
    probabilities = F.softmax(F.linear(x, weight), dim=-1, dtype=wide_dtype(x.dtype))  # [T, E] wide
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    shares, experts = ordered.values[:, :num_per_token], ordered.indices[:, :num_per_token]  # [T, k] each
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return shares.to(x.dtype), experts


def mix(x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Sum of the chosen experts' outputs by their shares, in x's dtype, in the order of the experts' numbers: x [T, h] -> [T, h].

    shares and experts [T, k]; gate_up [E, 2 m, h], the gate's rows first; down [E, h, m].
    """
    mixed = torch.zeros_like(x)  # [T, h]
    for e in range(len(down)):
        slots, tokens = torch.where(experts.t() == e)  # [n] each: the tokens that this expert gets, and which of their k it is
        if len(tokens):
            gate, up = F.linear(x[tokens], gate_up[e]).chunk(2, dim=-1)  # [n, m] each
            output = F.linear(F.silu(gate) * up, down[e])  # [n, h]
            mixed[tokens] += output * shares[tokens, slots, None]
    return mixed


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """A dense feed forward: x [T, h], gate and up [I, h], down [h, I] -> [T, h]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def shared_share(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How much of the shared expert each token gets: x [T, h], weight [1, h] -> [T, 1] from 0 to 1."""
    return torch.sigmoid(F.linear(x, weight))
