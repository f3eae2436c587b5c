"""Law 2 for the operations that treat each token alone: a token's bits are the same alone and among others. Not a test of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.guard import same_bits
from tests.kernels.test_operations import DEVICE, DTYPES, label
from twinfer.kernels.experts.operation import COMBINE
from twinfer.kernels.gated_norm.operation import GATED_RMS_NORM
from twinfer.kernels.norm.operation import ADD_RMS_NORM, RMS_NORM
from twinfer.kernels.operation import Operation
from twinfer.kernels.rope.operation import QK_NORM_ROPE_WRITE
from twinfer.kernels.router.operation import ROUTE
from twinfer.kernels.swiglu.operation import SWIGLU

WIDE = {"T": 9, "h": 4096} if DEVICE == "cuda" else {"T": 7, "h": 200}
# The tensors that hold one entry a token, by operation; all others are given whole to every call.
BY_TOKEN: list[tuple[Operation, dict[str, int], tuple[str, ...]]] = [
    (RMS_NORM, WIDE, ("x", "out")),
    (ADD_RMS_NORM, WIDE, ("x", "residual", "out")),
    (
        QK_NORM_ROPE_WRITE,
        {"T": WIDE["T"], "H": 9, "K": 3, "d": 64, "pages": 3, "page": 4, "norm": True, "by_head": True, "wide_table": False},
        ("qkv", "positions", "write_slots", "q"),
    ),
    (GATED_RMS_NORM, {"T": WIDE["T"], "H": 9, "d": 128}, ("x", "gate", "out")),
    (SWIGLU, {"T": WIDE["T"], "I": WIDE["h"] + 8}, ("gate_up", "out")),
    (ROUTE, {"T": WIDE["T"], "E": 100, "k": 8, "normalise": True, "values": 30, "padding": (2,)}, ("logits", "token_row", "shares", "experts")),
    (COMBINE, {**WIDE, "E": 20, "k": 8, "shared": True, "padding": (2,)}, ("outputs", "shares", "experts", "shared", "shared_gate", "out")),
]


def called(form: Callable[..., None], tensors: dict[str, torch.Tensor], constants: dict[str, Any]) -> dict[str, torch.Tensor]:
    own = {name: tensor.clone() for name, tensor in tensors.items()}
    form(**own, **constants)
    return own


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize(("operation", "case", "by_token"), BY_TOKEN, ids=[o.name for o, _, _ in BY_TOKEN])
def test_a_token_alone_has_the_bits_that_it_has_among_others(operation: Operation, case: dict[str, int], by_token: tuple[str, ...], dtype: torch.dtype) -> None:
    example = operation.make(case, dtype, torch.Generator(DEVICE).manual_seed(1))
    whole = called(operation.triton, example.tensors, example.constants)
    count = len(example.tensors[by_token[-1]])
    alone = {name: example.tensors[name].clone() for name in example.outputs}
    for i in range(count):
        one = {name: t[i : i + 1] if name in by_token else t for name, t in {**example.tensors, **alone}.items()}
        after = called(operation.triton, one, example.constants)
        for name in example.outputs:  # what is not by token (the cache) gathers what every call wrote
            if name in by_token:
                alone[name][i : i + 1] = after[name]
            else:
                alone[name] = after[name]
    for name in example.outputs:
        assert same_bits(alone[name], whole[name]), name


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 13 GB and takes hours in the interpreter")
def test_offsets_pass_2_to_the_31() -> None:
    tokens, width = 2**19 + 1, 4096
    x = torch.full((tokens, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = torch.randn(width, device=DEVICE).to(torch.bfloat16)
    weight, out = torch.ones(width, dtype=torch.bfloat16, device=DEVICE), torch.empty_like(x)
    RMS_NORM.triton(x, weight, out, eps=1e-6)
    alone = torch.empty_like(x[-1:])
    RMS_NORM.triton(x[-1:], weight, alone, eps=1e-6)
    assert same_bits(out[-1:], alone) and not alone.isnan().any()
    half, last = torch.empty(tokens, width // 2, dtype=torch.bfloat16, device=DEVICE), torch.empty(1, width // 2, dtype=torch.bfloat16, device=DEVICE)
    SWIGLU.triton(x, half)
    SWIGLU.triton(x[-1:], last)
    assert same_bits(half[-1:], last) and not last.isnan().any()
