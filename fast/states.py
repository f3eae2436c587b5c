"""States: the tensors that Gated DeltaNet layers keep by state slot and in snapshots, as the kernels take them, and the copies between the two.

A snapshot is taken where a chunk of 64 has just been filled, so that of a slot it needs the anchor and the convolution's history alone: no row of an
open chunk exists. The anchor's piece in the model's dtype is made again from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from twinfer.kernels.gdn.state import GdnState
from twinfer.kernels.gdn.workspace import Workspace

_LOW = ("t_low", "x_low", "r_low")
STATE = ("keys", "decay_sums", "beta", "t_high", "x_high", "r_high", "anchor_high", *_LOW)
"""Fields of GdnState beside the anchor; the bound of each is state_ and its name."""
_SAME = ("t_high", "m_high", "diagonal", "weights", "streamed", "t_low", "m_low")
WORKSPACE = {"sums": "gdn_sums", "strength": "gdn_strengths", **{name: f"gdn_{name}" for name in _SAME}}
"""Fields of Workspace, and the bound of each."""


class States:
    """Over the executor's buffers, for a model with such layers.

    histories  [layers, slots, K - 1, C]; layers: a GdnState each; workspace: what the launches of one layer leave for each other
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.histories = tensors["conv_histories"]
        # A float32 model has no pieces: the bounds of second ones hold nothing that is read.
        whole = self.histories.dtype == torch.float32
        held = {name: f"state_{name}" for name in STATE if not (whole and (name in _LOW or name == "anchor_high"))} | {"anchor": "recurrent_states"}
        self.layers = [GdnState(**{field: tensors[bound][i] for field, bound in held.items()}) for i in range(len(self.histories))]
        self.workspace = Workspace(**{name: tensors[bound] for name, bound in WORKSPACE.items() if not (whole and name.endswith("_low"))})

    def restore(self, pairs: Sequence[Sequence[int]]) -> None:
        """Copies each (snapshot, slot): the slot goes on from there."""
        t = self._tensors
        for snapshot, slot in pairs:
            t["conv_histories"][:, slot].copy_(t["conv_snapshots"][:, snapshot])
            anchor = t["recurrent_snapshots"][:, snapshot]
            t["recurrent_states"][:, slot].copy_(anchor)
            t["state_anchor_high"][:, slot].copy_(anchor)

    def save(self, pairs: Sequence[Sequence[int]]) -> None:
        """Copies each (slot, snapshot)."""
        t = self._tensors
        for slot, snapshot in pairs:
            t["conv_snapshots"][:, snapshot].copy_(t["conv_histories"][:, slot])
            t["recurrent_snapshots"][:, snapshot].copy_(t["recurrent_states"][:, slot])
