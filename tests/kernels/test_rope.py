"""Rope without a norm sums nothing, so that its bits must be the plain form's: every rounding of a product counts. The rest is in test_operations.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.guard import same_bits
from tests.kernels.test_operations import DEVICE, DTYPES, label, plain_outputs
from twinfer.kernels.rope.operation import QK_NORM_ROPE_WRITE
from twinfer.kernels.rope.tiles import HEAD_DIMS, head_tile


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_without_norm_the_bits_are_those_of_eager_pytorch(head_dim: int, dtype: torch.dtype) -> None:
    tokens = 300 if DEVICE == "cuda" else 3
    case = {"T": tokens, "H": 5, "K": 2, "d": head_dim, "pages": 100, "page": 16, "norm": False, "by_head": True, "wide_table": True}
    example = QK_NORM_ROPE_WRITE.make(case, dtype, torch.Generator(DEVICE).manual_seed(2))
    want = plain_outputs(QK_NORM_ROPE_WRITE, example, wide=False)
    QK_NORM_ROPE_WRITE.triton(**example.tensors, **example.constants)
    for name in example.outputs:
        assert same_bits(example.tensors[name], want[name]), name


@pytest.mark.parametrize("head_dim", [0, 1, 96, 80])
def test_a_head_dim_that_the_tiles_cannot_hold_is_refused(head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        head_tile(head_dim)


@pytest.mark.skipif(DEVICE == "cpu", reason="two caches of 4 GB")
def test_slots_whose_offset_passes_2_to_the_31() -> None:
    case = {"T": 1, "H": 8, "K": 8, "d": 128, "pages": 1, "page": 256, "norm": True, "by_head": True, "wide_table": False}
    example = QK_NORM_ROPE_WRITE.make(case, torch.bfloat16, torch.Generator(DEVICE).manual_seed(3))
    pages = 2**31 // (8 * 256 * 128) + 1
    far = {name: torch.zeros(pages, 8, 256, 128, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2) for name in ("keys", "values")}
    QK_NORM_ROPE_WRITE.triton(**example.tensors, **example.constants)
    slots = example.tensors["write_slots"] + (pages - 1) * 256
    QK_NORM_ROPE_WRITE.triton(**{**example.tensors, **far, "write_slots": slots}, **example.constants)
    slot = int(example.tensors["write_slots"][0])
    for name in far:
        assert same_bits(far[name][-1, slot], example.tensors[name][0, slot]), name
        assert not far[name][:-1].any(), name
