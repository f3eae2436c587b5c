"""The forward of every model as a sequence of kernel launches over the executor's buffers. It allocates nothing and reads nothing back.

Every launch depends on the number of tokens and on `Launches` alone, so that the sequence can be captured as a graph.
"""

from __future__ import annotations

import torch

from twinfer.config import ModelConfig
from twinfer.errors import BoundViolation
from twinfer.fast.attention import Attention
from twinfer.fast.buffers import TOKEN_BUFFERS, Buffers
from twinfer.fast.experts import Experts
from twinfer.fast.gdn import Gdn
from twinfer.fast.launches import Launches
from twinfer.fast.mlp import Mlp
from twinfer.fast.states import States
from twinfer.fast.weights import AttentionWeights, ExpertsWeights, Weights
from twinfer.kernels.embedding.kernel import embedding
from twinfer.kernels.matmul.cublas import Products
from twinfer.kernels.norm.kernel import add_rms_norm, rms_norm


class Model:
    """Weights and buffers of one model, and the order in which kernels run over them."""

    def __init__(self, config: ModelConfig, weights: Weights, buffers: Buffers, products: Products) -> None:
        self.config, self.weights, self._linear = config, weights, products.linear
        self._tensors = buffers.tensors
        # Of one capacity by their bounds. Were one shorter, its slice would be too, and kernels would write behind its end.
        self._shortest = min(((len(buffers.tensors[name]), name) for name in TOKEN_BUFFERS), default=(0, ""))
        self._attention = Attention(config, buffers.tensors, products)
        self.states = None if config.gdn is None else States(buffers.tensors)
        self._gdn = None if config.gdn is None or self.states is None else Gdn(config, config.gdn, buffers.tensors, self.states, products)
        self._mlp = Mlp(buffers.tensors, products)
        self._experts = None if config.experts is None else Experts(config.experts, buffers.tensors, products, self._mlp)

    def forward(self, num_tokens: int, launches: Launches) -> torch.Tensor:
        """Computes `num_tokens` tokens from the step inputs and writes their keys and values. Returns the hidden vectors [num_tokens, h], normed."""
        b, w, eps, centred = self._tensors, self.weights, self.config.rms_norm_eps, self.config.centred_norms
        _within(self._shortest[1], num_tokens, self._shortest[0])
        residual, normed, projected = (b[name][:num_tokens] for name in ("residual", "normed", "projected"))
        embedding(b["token_ids"][:num_tokens], b["token_feed"], w.embedding, residual)
        rms_norm(residual, w.layers[0].input_norm, normed, eps, centred)
        for i, layer in enumerate(w.layers):
            if isinstance(layer.mixer, AttentionWeights):
                self._attention.mix(layer.mixer, normed, projected, launches.attention)
            else:
                assert self._gdn is not None and launches.gdn is not None, "a layer of it"
                self._gdn.mix(layer.mixer, normed, projected, launches.gdn)
            add_rms_norm(projected, residual, layer.post_norm, normed, eps, centred)
            if isinstance(layer.feed_forward, ExpertsWeights):
                assert self._experts is not None, "a layer of them"
                self._experts.work(layer.feed_forward, normed, projected)
            else:
                self._mlp.work(layer.feed_forward, normed, projected)
            following = w.layers[i + 1].input_norm if i + 1 < len(w.layers) else w.norm
            add_rms_norm(projected, residual, following, normed, eps, centred)
        return normed

    def clear(self) -> None:
        """Forgets the weights: nothing can be computed any more. It asks nothing of the device, which may be lost."""
        empty = torch.empty(0)
        self.weights = Weights(empty, empty, empty, ())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, h], at most max_logit_tokens rows -> [n, V] in the buffer of logits, valid until the next call."""
        _within("logits", len(hidden), len(self._tensors["logits"]))
        out = self._tensors["logits"][: len(hidden)]
        self._linear(hidden, self.weights.head, out)
        return out


def _within(bound: str, demand: int, capacity: int) -> None:
    """A slice beyond a buffer's end would be shorter, not fail."""
    if demand > capacity:
        raise BoundViolation(bound, "tokens", demand, capacity, "the step is larger than the limits that this buffer was made for")
