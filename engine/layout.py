"""Layout: turns stored tensors into the form that engines compute with, and back. It moves numbers; it multiplies none.

What is moved: the input projections of Gated DeltaNet that qwen3_next stores interleaved by key head (model specification, 2.3), and experts that are
stored one by one (2.4). Everything else only changes its prefix. The names are `twinfer.engine.tensors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from twinfer.config import ModelConfig
from twinfer.engine.tensors import KEPT_WIDE, StoredForm, engine_name
from twinfer.gdn import GatedDeltaNet

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_QKVZ, _BA = ".in_proj_qkvz.weight", ".in_proj_ba.weight"


Make = Callable[[str, tuple[int, ...], "torch.dtype | None"], "torch.Tensor"]
"""Gives the tensor of a name and shape that is to be filled; a dtype where it is not to have the model's."""


def place(config: ModelConfig, name: str, tensor: torch.Tensor, loaded: dict[str, torch.Tensor], make: Make) -> None:
    """Copies one stored tensor, under its name in the file, to where the engine's form has it, and puts that into `loaded`.

    Experts are filled in one at a time, so beside the result at most one stored tensor is in memory. What a file keeps in float32 for a 16-bit model
    (`KEPT_WIDE`) stays float32.
    """
    name = engine_name(name)
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        _place_expert(config, expert, tensor, loaded, make)
        return
    wide = tensor.dtype if name.endswith(KEPT_WIDE) and tensor.element_size() == 4 else None
    parts = {name: tensor}
    if config.gdn is not None and name.endswith(_QKVZ):
        parts = _split_qkvz(config.gdn, name.removesuffix(_QKVZ), tensor)
    elif config.gdn is not None and name.endswith(_BA):
        parts = _split_ba(config.gdn, name.removesuffix(_BA), tensor)
    for part, rows in parts.items():
        # always a copy: what safetensors hands out may still be a mapping of the file
        loaded[part] = make(part, tuple(rows.shape), wide).copy_(rows)


def from_stored(config: ModelConfig, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The engine's form of a whole model that is in memory, each tensor in its own dtype."""
    loaded: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():

        def make(name: str, shape: tuple[int, ...], wide: torch.dtype | None, like: torch.Tensor = tensor) -> torch.Tensor:
            return like.new_empty(shape)

        place(config, name, tensor, loaded, make)
    return loaded


def to_stored(config: ModelConfig, weights: Mapping[str, torch.Tensor], form: StoredForm) -> dict[str, torch.Tensor]:
    """The inverse: a model in the engine's form as a file of `form` stores it."""
    found: dict[str, torch.Tensor] = {}
    joined = config.gdn is not None and config.gdn.interleaved
    for name, tensor in weights.items():
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        if joined and matrix in ("in_proj_qkv", "in_proj_b"):
            assert config.gdn is not None, "joined"
            other = weights[f"{module}.in_proj_{'z' if matrix == 'in_proj_qkv' else 'a'}.weight"]
            joint, rows = (_QKVZ, _join_qkvz) if matrix == "in_proj_qkv" else (_BA, _join_ba)
            found[module + joint] = rows(config.gdn, tensor, other)
        elif joined and matrix in ("in_proj_z", "in_proj_a"):
            pass  # with their partner
        elif module.endswith(".mlp.experts") and not form.fused:
            for e, one in enumerate(tensor.unbind(0)):
                halves = zip(("gate", "up"), one.chunk(2), strict=True) if matrix == "gate_up_proj" else [("down", one)]
                found |= {f"{module}.{e}.{which}_proj.weight": half.contiguous() for which, half in halves}
        else:
            found[name] = tensor
    return {form.stored_name(name): tensor for name, tensor in found.items()}


def _place_expert(config: ModelConfig, found: re.Match[str], tensor: torch.Tensor, loaded: dict[str, torch.Tensor], make: Make) -> None:
    assert config.experts is not None, "a checked checkpoint of a model with experts"
    num, width, hidden = config.experts.num_experts, config.experts.intermediate_size, config.hidden_size
    module, e, which = found[1], int(found[2]), found[3]
    target, shape = (module + "down_proj", (num, hidden, width)) if which == "down" else (module + "gate_up_proj", (num, 2 * width, hidden))
    if target not in loaded:
        loaded[target] = make(target, shape, None)
    whole = loaded[target][e]
    part = whole if which == "down" else whole[:width] if which == "gate" else whole[width:]
    part.copy_(tensor)


def _groups(gdn: GatedDeltaNet) -> tuple[int, int]:
    """Rows of a key head's queries (and of its keys), and of its value heads' values (and of their gates z)."""
    return gdn.key_head_dim, gdn.num_value_heads // gdn.num_key_heads * gdn.value_head_dim


def _by_head(gdn: GatedDeltaNet, rows: torch.Tensor) -> torch.Tensor:
    """rows [n, h] -> [key heads, n / key heads, h]."""
    return rows.reshape(gdn.num_key_heads, -1, rows.shape[-1])


def _split_qkvz(gdn: GatedDeltaNet, module: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    key, value = _groups(gdn)
    q, k, v, z = (part.flatten(0, 1) for part in torch.split(_by_head(gdn, tensor), [key, key, value, value], dim=1))
    return {module + ".in_proj_qkv.weight": torch.cat((q, k, v)), module + ".in_proj_z.weight": z}


def _split_ba(gdn: GatedDeltaNet, module: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    b, a = (part.flatten(0, 1) for part in _by_head(gdn, tensor).chunk(2, dim=1))
    return {module + ".in_proj_b.weight": b, module + ".in_proj_a.weight": a}


def _join_qkvz(gdn: GatedDeltaNet, qkv: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    import torch

    parts = (*torch.split(qkv, [gdn.key_dim, gdn.key_dim, gdn.value_dim]), z)
    return torch.cat([_by_head(gdn, part) for part in parts], dim=1).flatten(0, 1)


def _join_ba(gdn: GatedDeltaNet, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([_by_head(gdn, part) for part in (b, a)], dim=1).flatten(0, 1)
