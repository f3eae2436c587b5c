"""Every operation at random shapes: Triton form against plain form, among poison. Not fixed cases (test_operations.py), not offsets (test_offsets.py).

A failing draw is printed whole, with its seed. `--hypothesis-profile=soak` goes on with new draws for as long as SOAK_FACTOR says; TEST_DEVICE=cuda runs
compiled kernels, bf16 and larger shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.budget import examples, repeatable
from tests.kernels.guard import Guarded, bits, same_bits
from tests.kernels.shapes import DEVICE, SUBJECTS, Draw, Subject
from tests.kernels.test_operations import dtype_name, plain_outputs
from twinfer.invariants.faults.switch import edited


def distance(got: torch.Tensor, want: torch.Tensor, unit: float) -> float:
    """Largest difference over the largest value; infinite where the NaN of both don't match."""
    if not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    got, want = got.double().nan_to_num(0.0), want.double().nan_to_num(0.0)
    return float((got - want).abs().max() / want.abs().max().clamp(min=max(unit, 1e-30))) if want.numel() else 0.0


def check(subject: Subject, draw: Draw) -> None:
    """Results are the plain form's, computed in float64 or in the dtype, to the operation's tolerance; nothing else has changed by a bit."""
    example = subject.example(draw)
    tolerance = subject.tolerance[dtype_name(draw.dtype)]
    guarded = {name: Guarded(tensor, draw.gaps.get(name, (draw.spare, *(0,) * (tensor.dim() - 1)))) for name, tensor in example.tensors.items()}
    subject.call(draw)(**{name: g.tensor for name, g in guarded.items()}, **example.constants)
    own = plain_outputs(subject.operation, example, wide=False)
    wide = plain_outputs(subject.operation, example, wide=True) if tolerance else own
    for name, g in guarded.items():
        before, got = example.tensors[name], g.tensor
        assert g.intact(), f"{name}: written outside the tensor"
        if name in example.workspace:
            continue
        if name not in example.outputs:
            assert same_bits(got, before), f"{name} is an input and was written"
            continue
        stray = (bits(own[name]) == bits(before)) & (bits(got) != bits(before))
        assert not stray.any(), f"{name}: {int(stray.sum())} elements changed that the plain form leaves alone"
        if tolerance == 0 or not got.dtype.is_floating_point:
            assert same_bits(got, own[name]), f"{name} differs: {(got != own[name]).sum()} elements"
        else:
            error = min(distance(got, want[name], subject.unit) for want in (wide, own))
            assert error <= tolerance, f"{name}: {error:.2e} from the plain form, tolerance {tolerance:.2e}"


def hold(subject: Subject, times: int = 1) -> None:
    """`check` for all draws of a subject. The interpreter is slow, so a failing draw is shown as it was found."""
    usual = subject.usual * times * (1 if DEVICE == "cpu" else 4)

    @settings(
        max_examples=examples(usual),
        derandomize=repeatable(),
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(draw=subject.draws)
    def holds(draw: Draw) -> None:
        check(subject, draw)

    holds()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's arithmetic on what is not a number
@pytest.mark.parametrize("name", SUBJECTS)
def test_an_operation_at_random_shapes(name: str) -> None:
    hold(SUBJECTS[name])


# ----------------------------------------------------------------------------------------------- what the property finds

_KERNELS = "twinfer.kernels."
_ROPE = "rope.kernel:qk_norm_rope_write_kernel"
_WALK, _ATTENTION, _CALL = (f"attention.kernel:{name}" for name in ("walk", "attention_kernel", "attention"))
# What is broken, in the subjects that must find it: (subject, place, fragment, what stands there instead). None writes farther than the poison reaches.
MUTANTS = {
    "a column too many": ("embedding", "embedding.kernel:embedding_kernel", "inside = columns < h", "inside = columns <= h"),
    "columns behind the first block left out": ("embedding", "embedding.kernel:embedding_kernel", "range(0, h, BLOCK)", "range(0, h // BLOCK * BLOCK, BLOCK)"),
    "a value too many in the mean": ("rms_norm", "norm.kernel:rms_norm_kernel", "inside = columns < h", "inside = columns <= h"),
    "the last column left out": ("add_rms_norm", "norm.kernel:add_rms_norm_kernel", "inside = columns < h", "inside = columns < tl.maximum(h - 1, 1)"),
    "no mask at the tail": ("swiglu", "swiglu.kernel:swiglu_kernel", "inside = columns < I", "inside = columns < I + 8"),
    "the last block left out": ("swiglu", "swiglu.kernel:swiglu", "triton.cdiv(width, block)", "max(1, width // block)"),
    "the query taken for its gate": ("output_gate", "output_gate.kernel:output_gate_kernel", "(2 * (at // D) + 1) * D", "2 * (at // D) * D"),
    "a partner among the dims that pass": ("qk_norm_rope_write", _ROPE, "TURN: tl.constexpr = ROTARY // 2", "TURN: tl.constexpr = D // 2"),
    "queries taken for packed": ("qk_norm_rope_write", _ROPE, "tl.where(is_query, Q_STEP * head,", "tl.where(is_query, head,"),
    "a query head too many": ("qk_norm_rope_write", _ROPE, "head < tl.where(is_query, H, K)", "head < tl.where(is_query, H + 1, K)"),
    "pages taken for neighbours": ("qk_norm_rope_write", _ROPE, "KEYS + page * k_page + offset * k_slot", "KEYS + slot * k_slot"),
    "values by the strides of keys' slots": ("qk_norm_rope_write", _ROPE, "VALUES + page * v_page + offset * v_slot", "VALUES + slot * v_slot"),
    "the last changes left out": (
        "update_page_table", "page_table.kernel:update_page_table", "triton.cdiv(len(slots), BLOCK)", "max(1, len(slots) // BLOCK)",
    ),
    "the own key hidden behind others": ("attention, serial", _WALK, "at[None, :] <= pos[:, None]", "(at[None, :] < pos[:, None]) | (at[None, :] == 0)"),
    "a value too many": ("attention, serial", _WALK, "written = at < seen", "written = at <= seen"),
    "a window one key longer": ("attention, spread", _WALK, "at[None, :] > pos[:, None] - WINDOW)", "at[None, :] >= pos[:, None] - WINDOW)"),
    "pages taken for packed": ("attention, spread", _CALL, "page_size, keys.stride()[:3])", "page_size, (keys[0].numel(), *keys.stride()[1:3]))"),
    "a split that has one key left out": (
        "attention, spread", _ATTENTION, "splits = (end - 1) // SPLIT + 1", "splits = tl.maximum(end - 2, 0) // SPLIT + 1",
    ),
    "the last token of a tile left out": ("attention, serial", _ATTENTION, "live = (place < count)", "live = (place < tl.maximum(count - 1, 1))"),
    "a product too many": ("matmul", "matmul.kernel:matmul_kernel", "inside = (k + j < K)[None, :]", "inside = (k + j <= K)[None, :]"),
    "a group of tiles too large": ("matmul", "matmul.kernel:matmul_kernel", "high = tl.minimum(token_tiles - first, GROUP)", "high = GROUP"),
    "an expert too many": ("route", "router.kernel:route_kernel", "inside = i < E", "inside = i <= E"),
    "a padding token gets experts": ("route", "router.kernel:route_kernel", "tl.load(TOKEN_ROW + t) >= 0", "tl.load(TOKEN_ROW + t) >= -1"),
    "a tile of pairs too few": ("group", "router.kernel:list_tiles", "own = (counts + ROWS - 1) // ROWS", "own = tl.maximum(counts // ROWS, counts > 0)"),
    "the last pair's tile one longer": ("group", "router.kernel:list_tiles", "tl.minimum(counts - j * ROWS, ROWS)", "tl.minimum(counts - j * ROWS + 1, ROWS)"),
    "the last pair of a tile left out": (
        "grouped_gate_up", "experts.kernel:experts_kernel", "there = i < count", "there = i < tl.maximum(count - 1, 1)",
    ),
    "up read a row early": ("grouped_gate_up", "experts.kernel:experts_kernel", "N.to(tl.int64) * K", "(N - 1).to(tl.int64) * K"),
    "each pair's output in its neighbour's place": (
        "grouped_down", "experts.kernel:experts_kernel", "target = pair.to(tl.int64)", "target = tl.maximum(pair - 1, 0).to(tl.int64)",
    ),
    "a product of an expert too many": ("grouped_down", "experts.kernel:experts_kernel", "inside = (k + j < K)[None, :]", "inside = (k + j <= K)[None, :]"),
    "gates taken for packed": ("combine", "experts.kernel:combine_kernel", "SHARED_GATE + t * gate_stride", "SHARED_GATE + t"),
    "a pair without an expert is added": ("combine", "experts.kernel:combine_kernel", "mask=inside & live, other=0.0", "mask=inside, other=0.0"),
    "a logit too many": ("sample", "sampling.kernel:stats_kernel", "inside = t < V", "inside = t <= V"),
    "logits taken for packed": ("sample", "sampling.kernel:scores_of", "LOGITS + i * stride + t", "LOGITS + i * V + t"),
    "an alternative too many": ("logprobs", "sampling.kernel:peaks_kernel", "inside = t < V", "inside = t <= V"),
    "rows of logits taken for packed": ("logprobs", "sampling.kernel:mass_kernel", "LOGITS + i * stride + t", "LOGITS + i * V + t"),
}  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="what a wrong kernel does to a device's context would outlive its test")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_found(mutant: str) -> None:
    """Within the draws that CI makes of the right one: of four seeds none took more than 20. Three times as many, since each hypothesis draws others."""
    name, place, old, new = MUTANTS[mutant]
    with edited(_KERNELS + place, old, new)(), pytest.raises(AssertionError):
        hold(SUBJECTS[name], times=3)


def test_every_subject_has_a_mutant() -> None:
    assert {name for name, *_ in MUTANTS.values()} == set(SUBJECTS)


def _outside(q: torch.Tensor, **others: torch.Tensor) -> None:
    q.as_strided((1,), (1,), q.storage_offset() + q.numel()).zero_()


def _input(positions: torch.Tensor, **others: torch.Tensor) -> None:
    positions += 1


def _free_slot(keys: torch.Tensor, write_slots: torch.Tensor, **others: torch.Tensor) -> None:
    taken = torch.zeros(len(keys) * keys.shape[1], dtype=torch.bool, device=keys.device).index_fill(0, write_slots, True)
    for slot in (~taken).nonzero().flatten()[:1].tolist():
        keys[slot // keys.shape[1], slot % keys.shape[1], 0, 0] = -torch.nan  # another NaN than the one that was there


@pytest.mark.parametrize(
    ("stray", "told"),
    [(_outside, "q: written outside"), (_input, "positions is an input"), (_free_slot, "keys: 1 elements changed that the plain form leaves alone")],
)
def test_a_write_that_does_not_belong_is_found(stray: Callable[..., None], told: str) -> None:
    """The plain form stands for the kernel, and then writes once more."""
    right = SUBJECTS["qk_norm_rope_write"]

    def call(eps: float, centred: bool, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None, **tensors: torch.Tensor) -> None:
        right.operation.plain(q_weight=q_weight, k_weight=k_weight, eps=eps, centred=centred, **tensors)
        stray(**tensors)

    with pytest.raises(AssertionError, match=told):
        hold(replace(right, call=lambda draw: call))
