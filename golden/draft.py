"""The draft module (MTP) of the trained golden models, built of transformers' own layer and norm. For training and its tests; no engine uses it.

Model specification, section 4: from the trunk's final hidden state at token t and the embedding of token t + 1, one decoder layer with attention gives
the hidden state that the trunk's head turns into the logits of token t + 2. Its state's names are the checkpoint's after "mtp.".
"""

from typing import Any

import torch
from torch import nn


class Draft(nn.Module):
    """A draft module for `model`, a text model of transformers with attention in some layer. Embedding, rope and head stay the model's.

    Raises `ValueError` unless the model's attention is 'sdpa'.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config, norm = model.config, type(model.model.norm)
        if config._attn_implementation != "sdpa":
            raise ValueError(f"attention '{config._attn_implementation}': expected 'sdpa', which is causal without a mask")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        attention = len(config.layer_types) - 1 - config.layer_types[::-1].index("full_attention")
        self.layers = nn.ModuleList([type(model.model.layers[attention])(config, attention)])
        self.apply(model._init_weights)

    def forward(self, model: Any, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """hidden [B, T, h] of the trunk after its final norm, following [B, T] ids of the tokens one further on -> [B, T, h], which the head reads."""
        embedded = model.model.embed_tokens(following)
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)  # [B, T, 2 h]
        mixed = self.fc(both)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rope = model.model.rotary_emb
        turned = rope(mixed, positions.expand(3, 1, -1) if hasattr(rope, "mrope_section") else positions)  # a text's three positions are one
        mixed = self.layers[0](mixed, position_embeddings=turned, attention_mask=None, position_ids=positions)
        result: torch.Tensor = self.norm(mixed)
        return result
