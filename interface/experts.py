"""Experts: the shape of a model's mixture-of-experts layers, and which layers they are. None of their arithmetic.

Fields and defaults follow the model specification, section 1.2; the layer itself is section 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfer.errors import ConfigError
from twinfer.fields import Fields


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers whose feed forward is a choice among experts.

    layers                    [num_layers]: whether layer i is one; the others have one dense feed forward
    num_per_token             experts that each token goes through
    intermediate_size         width of one expert
    normalise                 whether the chosen probabilities are divided by their sum
    shared_intermediate_size  width of the expert that every token goes through, behind a gate of its own; None: there is none
    """

    layers: tuple[bool, ...]
    num_experts: int
    num_per_token: int
    intermediate_size: int
    normalise: bool
    shared_intermediate_size: int | None

    @property
    def num_router_rows(self) -> int:
        """Logits of a token as the fast engine computes them: one an expert, one for the shared expert's gate, padded to a multiple of 16."""
        num_rows = self.num_experts + self.num_shared
        return num_rows + -num_rows % 16

    @property
    def num_shared(self) -> int:
        """1 where every token also goes through a shared expert, else 0."""
        return int(self.shared_intermediate_size is not None)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of one such feed forward, router and shared expert included."""
        routed = self.num_experts * hidden_size * (3 * self.intermediate_size + 1)
        shared = 0 if self.shared_intermediate_size is None else hidden_size * (3 * self.shared_intermediate_size + 1)
        return routed + shared


def read_experts(read: Fields, model_type: str, num_layers: int) -> Experts:
    """The fields of qwen3_moe, qwen3_next or qwen3_5_moe. In qwen3_5_moe every layer has experts, and the probabilities are always normalised."""
    every = model_type == "qwen3_5_moe"
    if every:
        read.only("norm_topk_prob", True)
        read.only("mlp_only_layers", [])
        read.only("decoder_sparse_step", 1)
        layers = (True,) * num_layers
    else:
        step, dense = read.count("decoder_sparse_step"), _mlp_only_layers(read)
        layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    # transformers 5 writes qwen3_moe's number of experts under another name.
    fields = [field for field in ("num_experts", "num_local_experts") if field in read.data] if model_type == "qwen3_moe" else []
    counts = [read.count(field) for field in fields or ["num_experts"]]
    if counts[0] != counts[-1]:
        raise ConfigError(f"{read.source}: num_experts = {counts[0]} and num_local_experts = {counts[-1]} differ")
    chosen = read.count("num_experts_per_tok")
    if chosen > counts[0]:
        read.refuse("num_experts_per_tok", chosen, f"must be at most num_experts = {counts[0]}")
    return Experts(
        layers=layers,
        num_experts=counts[0],
        num_per_token=chosen,
        intermediate_size=read.count("moe_intermediate_size"),
        normalise=every or read.flag("norm_topk_prob"),
        shared_intermediate_size=None if model_type == "qwen3_moe" else read.count("shared_expert_intermediate_size"),
    )


def _mlp_only_layers(read: Fields) -> list[int]:
    value = read.data.get("mlp_only_layers") or []
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value):
        read.refuse("mlp_only_layers", value, "must list layer numbers from 0")
    return value
