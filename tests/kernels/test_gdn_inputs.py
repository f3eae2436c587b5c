"""Inputs of Gated DeltaNet layers: law 2 over every way to cut a sequence, and faults that the operations' own cases find. Cases: test_operations.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.guard import Guarded, same_bits
from tests.kernels.test_operations import DEVICE, DTYPES, example_of, label, plain_outputs, relative_error
from twinfer.invariants.faults.switch import edited
from twinfer.kernels.gated_norm.operation import GATED_RMS_NORM
from twinfer.kernels.gdn_inputs.kernel import gdn_inputs, write_histories
from twinfer.kernels.gdn_inputs.operation import GDN_INPUTS, WRITE_HISTORIES
from twinfer.kernels.operation import Operation

NK, NV, DK, DV, TAPS = 2, 4, 32, 16, 4
CHANNELS, WIDTH = 2 * NK * DK + NV * DV, 2 * NK * DK + NV * (2 * DV + 2)


class Layer:
    """Random weights and one sequence's projections, computed by steps that are cut as a test says; slot 1 of 3, the others NaN as it is itself at first."""

    def __init__(self, num_tokens: int, dtype: torch.dtype) -> None:
        generator = torch.Generator(DEVICE).manual_seed(7)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        self.projected = random(num_tokens, WIDTH)
        self.weights = (random(CHANNELS, TAPS), random(NV), random(NV))
        self.dtype = dtype
        self.histories = torch.full((3, TAPS - 1, CHANNELS), torch.nan, dtype=dtype, device=DEVICE)

    def step(self, start: int, length: int, before: int) -> list[torch.Tensor]:
        """Outputs of positions start .. start + length, as the last of two rows behind `before` padding tokens and a row of `before` tokens at position 0."""

        def integers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        def unwritten(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)

        total = 2 * before + length
        projected = torch.cat((torch.full_like(self.projected[:before], torch.nan), self.projected[:before], self.projected[start : start + length]))
        positions = integers([0] * before + list(range(before)) + list(range(start, start + length)))
        rows = integers([-1] * before + [0] * before + [1] * length)
        slots = integers([2, 1])
        out = [unwritten(total, NK, DK), unwritten(total, NK, DK), unwritten(total, NV, DV)]
        out += [unwritten(total, NV, dtype=torch.float32) for _ in range(2)]
        gdn_inputs(projected, *self.weights, self.histories, positions, rows, slots, *out)
        write_histories(projected, integers([before, 2 * before, total]), integers([before, start + length]), slots, self.histories)
        assert all(part[:before].isnan().all() for part in out), "padding tokens were written"
        return [part[2 * before :] for part in out]


@pytest.mark.parametrize("dtype", DTYPES, ids=label)
def test_a_sequence_in_pieces_has_the_bits_that_it_has_whole(dtype: torch.dtype) -> None:
    """Pieces shorter than the convolution, as long as it, and longer; among other rows; in a slot whose history is NaN at first."""
    num_tokens = 12
    whole = Layer(num_tokens, dtype).step(0, num_tokens, 0)
    assert all(part.isfinite().all() for part in whole)
    for pieces in ([1] * num_tokens, [2, 1, 3, 1, 5], [1, 2, 9], [3, 4, 5], [11, 1]):
        layer, start, parts = Layer(num_tokens, dtype), 0, []
        for length in pieces:
            parts.append(layer.step(start, length, before=start % 3))
            start += length
        for name, got, want in zip(("q", "k", "v", "log_decay", "beta"), zip(*parts, strict=True), whole, strict=True):
            assert same_bits(torch.cat(got), want), f"{name} in pieces {pieces}"
        assert same_bits(layer.histories[1], layer.projected[-(TAPS - 1) :, :CHANNELS])


_KERNEL, _NORM = "twinfer.kernels.gdn_inputs.kernel:", "twinfer.kernels.gated_norm.kernel:gated_rms_norm_kernel"
MUTANTS = {
    "history off by one": (GDN_INPUTS, _KERNEL + "convolved", "(i + own).to(tl.int64)", "tl.minimum(i + own + 1, TAPS - 2).to(tl.int64)"),
    "taps reversed": (GDN_INPUTS, _KERNEL + "convolved", "channel * TAPS + i", "channel * TAPS + back"),
    "a tap from the row before": (GDN_INPUTS, _KERNEL + "gdn_inputs_kernel", "other=-1) == row)", "other=-1) >= 0)"),
    "a history before position 0": (GDN_INPUTS, _KERNEL + "convolved", "inside & (position >= back)", "inside & (position >= back - 1)"),
    "a history by row, not by slot": (GDN_INPUTS, _KERNEL + "gdn_inputs_kernel", "tl.load(STATE_SLOT + row).to", "row.to"),
    "padding taken for a row": (GDN_INPUTS, _KERNEL + "gdn_inputs_kernel", "tl.load(TOKEN_ROW + t)", "tl.maximum(tl.load(TOKEN_ROW + t), 0)"),
    "keys scaled": (GDN_INPUTS, _KERNEL + "gdn_inputs_kernel", "tl.store(K + t * NK * DK + place, x", "tl.store(K + t * NK * DK + place, (x * scale)"),
    "a and b swapped": (GDN_INPUTS, _KERNEL + "gdn_inputs_kernel", "tl.load(at + NV, mask", "tl.load(at, mask"),
    "a small softplus lost": (GDN_INPUTS, _KERNEL + "softplus", "tl.where(u == 1.0, y, mended)", "tl.where(u < 1.001, 0.0, mended)"),
    "a short row forgets": (WRITE_HISTORIES, _KERNEL + "write_histories_kernel", "(end - begin + i) * C", "i * C"),
    "zeros left out": (WRITE_HISTORIES, _KERNEL + "write_histories_kernel", "fresh, old), mask=inside)", "fresh, old), mask=written)"),
    "a padding row written": (WRITE_HISTORIES, _KERNEL + "write_histories_kernel", "tl.load(STATE_SLOT + row)", "tl.maximum(tl.load(STATE_SLOT + row), 0)"),
    "the gate by packed rows": (GATED_RMS_NORM, _NORM, "GATE + t * stride", "GATE + t * H * D"),
    "silu of the norm": (GATED_RMS_NORM, _NORM, "(gate / (1.0 + tl.exp(-gate)))", "(gate / (1.0 + tl.exp(-u)))"),
    "a head too many": (GATED_RMS_NORM, _NORM, "(head < H)", "(head <= H)"),
}  # fmt: skip


def check(operation: Operation) -> None:
    """The cases of an operation, as in test_operations.py, in float32."""
    for case in operation.cases:
        example = example_of(operation, case, torch.float32)
        guarded = {name: Guarded(tensor, (0, 8) if name in ("projected", "gate") else ()) for name, tensor in example.tensors.items()}
        operation.triton(**{name: g.tensor for name, g in guarded.items()}, **example.constants)
        want = plain_outputs(operation, example, wide=operation.tolerance["float32"] > 0)
        for name, g in guarded.items():
            assert g.intact(), name
            if name in example.outputs:
                error = relative_error(g.tensor, want[name])
                assert error <= operation.tolerance["float32"], f"{name}: {error:.1e}"


@pytest.mark.parametrize("operation", [GDN_INPUTS, WRITE_HISTORIES, GATED_RMS_NORM], ids=label)
def test_the_check_of_the_mutants_passes_without_them(operation: Operation) -> None:
    check(operation)


@pytest.mark.skipif(DEVICE != "cpu", reason="what a wrong kernel does to a device's context would outlive its test")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(mutant: str) -> None:
    operation, place, old, new = MUTANTS[mutant]
    with edited(place, old, new)(), pytest.raises(AssertionError):
        check(operation)
