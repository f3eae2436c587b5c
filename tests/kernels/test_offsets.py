"""Offsets beyond 2^31 elements, on any machine: a page id, a token id or a token's number times a stride. Not what the kernels compute.

The tensors are views of address space that costs no memory until it is touched. They begin in its middle, so that a product that wrapped around in
32 bits reads zeros of ours and is told by the comparison, not by a crash. Programs far down a grid are run alone, by shifting the interpreter's program
ids. Page ids that overflowed against their stride are faults of public kernels (docs/known_faults.md); compiled code is looked at on a GPU
(test_rope.py, test_norm_swiglu_rope_rows.py).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.guard import same_bits
from twinfer.bench.probes.gdn_layer import Heads, Layer, random_inputs
from twinfer.kernels.attention import kernel as attention_kernel
from twinfer.kernels.attention.tiles import Tile
from twinfer.kernels.embedding.operation import EMBEDDING
from twinfer.kernels.experts import kernel as experts_kernel
from twinfer.kernels.experts.tiles import Tile as ExpertTile
from twinfer.kernels.experts.tiles import Tiling
from twinfer.kernels.gdn.state import GdnState
from twinfer.kernels.gdn_inputs.kernel import gdn_inputs, write_histories
from twinfer.kernels.matmul.kernel import constants, matmul_kernel
from twinfer.kernels.matmul.tiles import Tile as MatmulTile
from twinfer.kernels.norm.operation import ADD_RMS_NORM, RMS_NORM
from twinfer.kernels.page_table.kernel import update_page_table
from twinfer.kernels.rope.operation import QK_NORM_ROPE_WRITE
from twinfer.kernels.swiglu.operation import SWIGLU

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="address space without memory is the interpreter's; GPUs have tests of their own")
FAR = 2**31  # elements
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python names it from 3.13 on


def vast(num_elements: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """[num_elements] zeros with as much address space again on either side."""
    size = (num_elements + 2 * FAR) * dtype.itemsize
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(held, dtype=dtype)[FAR : FAR + num_elements]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


@pytest.fixture
def from_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """from_program(n): launches begin with program n of the first axis."""
    builder = interpreter.interpreter_builder
    right = builder.set_grid_idx

    def start_at(first: int) -> None:
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: right(x + first, y, z))
        monkeypatch.setattr(builder, "set_grid_dim", lambda x, y, z: None)
        builder.grid_dim = (2**31 - 1,) * 3

    return start_at


PAGE, HEADS, D = 64, 8, 128
PAGES = FAR // (PAGE * HEADS * D) + 2  # the last page begins beyond 2^31 elements


def caches() -> list[torch.Tensor]:
    """Keys and values [PAGES, PAGE, HEADS, D], in memory page after page, head after head, as the fast engine keeps them."""
    return [vast(PAGES * PAGE * HEADS * D).view(PAGES, HEADS, PAGE, D).transpose(1, 2) for _ in range(2)]


def attended(keys: torch.Tensor, values: torch.Tensor, pages: list[int], q: torch.Tensor, spread: bool) -> torch.Tensor:
    """One row of one token over a context of 70 tokens."""

    def ints(*shown: int) -> torch.Tensor:
        return torch.tensor(shown, dtype=torch.int32)

    workspace = [torch.zeros(4, *q.shape[1:]), torch.zeros(4, q.shape[1]), torch.zeros(4, q.shape[1]), torch.zeros(4, HEADS, dtype=torch.int32)]
    out = torch.full_like(q, torch.nan)
    attention_kernel.attention(
        q, keys, values, ints(*pages)[None], ints(0), ints(0, 1), ints(70), ints(0, 0, 0, 0)[None], ints(1), *workspace, out,
        scale=D**-0.5, window=0, spread=spread, tile=Tile(16, 4, 2), num_programs=1,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("spread", [False, True])
def test_attention_reads_the_last_page_of_a_large_pool(spread: bool) -> None:
    q, (keys, values) = draw(1, HEADS, D), caches()
    for tensor in (keys, values):
        tensor[PAGES - 1], tensor[1] = draw(PAGE, HEADS, D), draw(PAGE + 1, HEADS, D)[1:]
    near = [torch.stack([tensor[0], tensor[1], tensor[PAGES - 1]]).transpose(1, 2).contiguous().transpose(1, 2) for tensor in (keys, values)]
    got = attended(keys, values, [PAGES - 1, 1], q, spread)
    assert same_bits(got, attended(near[0], near[1], [2, 1], q, spread))
    assert not same_bits(got, attended(near[0], near[1], [0, 1], q, spread)), "the page does not matter"


def test_keys_are_written_to_the_last_page_of_a_large_pool() -> None:
    case = {"T": 1, "H": HEADS, "K": HEADS, "d": D, "pages": 1, "page": PAGE, "norm": True, "by_head": True, "wide_table": False}
    example = QK_NORM_ROPE_WRITE.make(case, torch.float16, torch.Generator().manual_seed(3))
    keys, values = caches()
    slots = example.tensors["write_slots"]
    QK_NORM_ROPE_WRITE.triton(**example.tensors, **example.constants)
    far = {**example.tensors, "keys": keys, "values": values, "write_slots": slots + (PAGES - 1) * PAGE}
    QK_NORM_ROPE_WRITE.triton(**far, **example.constants)
    slot = int(slots[0])
    for name, tensor in (("keys", keys), ("values", values)):
        assert same_bits(tensor[PAGES - 1, slot], example.tensors[name][0, slot]), name
        assert tensor[PAGES - 1].any()


def test_the_embedding_of_the_last_token_of_a_large_vocabulary() -> None:
    width = 2**14
    vocabulary = FAR // width + 2
    weight, out = vast(vocabulary * width).view(vocabulary, width), torch.full((2, width), torch.nan).half()
    weight[-1], weight[0] = draw(width), draw(width + 1)[1:]
    feed = torch.tensor([vocabulary - 1], dtype=torch.int32)
    EMBEDDING.triton(torch.tensor([vocabulary - 1, -1], dtype=torch.int32), feed, weight, out)  # given, and fed back
    assert same_bits(out[0], weight[-1])
    assert same_bits(out[1], weight[-1])


def test_the_last_slot_of_a_large_page_table() -> None:
    width = 2**20
    slots = FAR // width + 2
    table = vast(slots * width, torch.int32).view(slots, width)

    def ints(*shown: int) -> torch.Tensor:
        return torch.tensor(shown, dtype=torch.int32)

    update_page_table(ints(slots - 1, 0), ints(width - 1, 1), ints(77, 78), table)
    assert (int(table[-1, -1]), int(table[0, 1])) == (77, 78)


def test_the_last_token_of_a_large_step(from_program: Callable[[int], None]) -> None:
    """Norms and the MLP's product, at a token whose row begins beyond 2^31 elements."""
    width = 2**12
    token = FAR // width + 1
    weight, row, other = draw(width), draw(width), draw(width + 1)[1:]
    x, residual, out, half = (vast((token + 1) * n).view(token + 1, n) for n in (width, width, width, width // 2))
    x[token], residual[token] = row, other
    want = [torch.empty(1, width).half(), torch.empty(1, width).half(), torch.empty(1, width // 2).half()]
    kept = other[None].clone()
    RMS_NORM.triton(row[None], weight, want[0], eps=1e-6)
    ADD_RMS_NORM.triton(row[None], kept, weight, want[1], eps=1e-6)
    SWIGLU.triton(row[None], want[2])
    from_program(token)
    RMS_NORM.triton(x[:1], weight, out[:1], eps=1e-6)
    assert same_bits(out[token], want[0][0])
    ADD_RMS_NORM.triton(x[:1], residual[:1], weight, out[:1], eps=1e-6)
    assert same_bits(out[token], want[1][0])
    assert same_bits(residual[token], kept[0])
    # The offsets of gate and up pass 2^31 here; those of the result, whose rows are half as wide, do not.
    SWIGLU.triton(x[:1], half[:1])
    assert same_bits(half[token], want[2][0])


@pytest.mark.parametrize("swap", [False, True])
def test_the_last_token_and_the_last_weight_row_of_large_products(swap: bool, from_program: Callable[[int], None]) -> None:
    """One tile of tokens and one of weight rows, each behind 2^31 elements of its matrix; the other matrix is small."""
    tile, width = MatmulTile(16, 16, 64, 4, 1, swap=swap), 2**14
    last = FAR // width + 16
    large, small = vast(last * width).view(last, width), draw(1, width) / 64
    row = draw(width + 1)[1:] / 64
    large[last - 1] = row
    want = (row.float() @ small[0].float()).half()
    near, far = torch.full((last, 1), torch.nan).half(), torch.full((1, last), torch.nan).half()
    from_program(last // 16 - 1)
    matmul_kernel[(1,)](large, small, None, near, last, 1, width, **constants(tile, width))
    matmul_kernel[(1,)](small, large, None, far, 1, last, width, **constants(tile, width))
    for got in (near[last - 1, 0], far[0, last - 1]):
        assert torch.allclose(got, want, rtol=2e-3, atol=1e-5)
        assert got != 0


H, M, PER_TOKEN = 2**12, 2**10, 8  # widths of a layer of experts, and experts of a token


def listed(expert: int, pair: int) -> dict[str, torch.Tensor]:
    """One tile of one pair."""
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in (("pairs", [pair]), ("tiles", [[expert, 0, 1]]), ("num_tiles", [1]))}


def test_the_last_expert_of_a_large_layer() -> None:
    tiling = Tiling(16, ExpertTile(128, 128, 4, 1), ExpertTile(128, 128, 4, 1))
    num_experts = FAR // (2 * M * H) + 2
    gate_up, down = (vast(num_experts * rows * width).view(num_experts, rows, width) for rows, width in ((2 * M, H), (H, 2 * M)))
    gate_up[-1], down[-1] = draw(2 * M, H) / 64, draw(H, 2 * M) / 64
    x, wide = draw(1, H), draw(1, 2 * M)
    found = []
    for first, second, expert in ((gate_up, down, num_experts - 1), (gate_up[-1:].clone(), down[-1:].clone(), 0)):
        activated, outputs = torch.full((1, M), torch.nan).half(), torch.full((1, 1, H), torch.nan).half()
        experts_kernel.grouped_gate_up(x, **listed(expert, 0), weight=first, activated=activated, num_per_token=1, tiling=tiling)
        experts_kernel.grouped_down(wide, **listed(expert, 0), weight=second, outputs=outputs, tiling=tiling)
        found.append((activated, outputs))
    for far, near in zip(*found, strict=True):
        assert same_bits(far, near)
        assert far.any()


def test_the_experts_of_the_last_token_of_a_large_step(from_program: Callable[[int], None]) -> None:
    """Each pair's output has a place of its own; the last one's begins beyond 2^31 elements."""
    tiling = Tiling(16, ExpertTile(128, 128, 4, 1), ExpertTile(128, 128, 4, 1))
    token = FAR // (PER_TOKEN * H) + 1
    outputs, near = vast((token + 1) * PER_TOKEN * H).view(token + 1, PER_TOKEN, H), torch.zeros(1, PER_TOKEN, H).half()
    activated, weight = draw(1, M), draw(1, H, M) / 64
    experts_kernel.grouped_down(activated, **listed(0, token * PER_TOKEN + 7), weight=weight, outputs=outputs, tiling=tiling)
    experts_kernel.grouped_down(activated, **listed(0, 7), weight=weight, outputs=near, tiling=tiling)
    assert same_bits(outputs[token], near[0])
    assert near.any()
    shares, experts = draw(1, PER_TOKEN), torch.arange(PER_TOKEN, dtype=torch.int32)[None]
    want, out = torch.empty(1, H).half(), vast((token + 1) * H).view(token + 1, H)
    experts_kernel.combine(near, shares, experts, want)
    from_program(token)
    experts_kernel.combine(outputs[:1], shares.expand(token + 1, -1).contiguous()[:1], experts.expand(token + 1, -1).contiguous()[:1], out[:1])
    assert same_bits(out[token], want[0])


def test_the_last_slot_of_a_large_state() -> None:
    """Every tensor of a Gated DeltaNet layer's state begins its last slot beyond 2^31 elements: a chunk and its tail, single rows, a commit."""
    x = random_inputs(66, Heads(1, 1, 16, 16), torch.float16, 4)
    steps = [(0, 0, 2), (0, 2, 60), (0, 62, 1), (0, 63, 1), (0, 64, 1), (0, 65, 1)]
    near, far = Layer([x]), Layer([x])
    slots = []
    for name in GdnState.__slots__:
        small = getattr(near.state, name)
        if small is not None:
            slots.append(FAR // small[0].numel() + 2)
    last = max(slots) - 1
    state = {}
    for name in GdnState.__slots__:
        small = getattr(near.state, name)
        state[name] = None if small is None else vast((last + 1) * small[0].numel(), small.dtype).view(last + 1, *small.shape[1:])
    far.state, far.slots = GdnState(**state), [last]
    for step in steps:
        assert same_bits(near.step([step])[0], far.step([step])[0]), step
    for name, tensor in state.items():
        if tensor is not None:
            got, want = tensor[last], getattr(near.state, name)[near.slots[0]]
            assert got.any() and torch.equal(got, want.nan_to_num(0.0)), name  # what nobody wrote is NaN here, zero there


def test_the_last_slot_of_large_histories() -> None:
    """The convolution's inputs before a row, and what a row leaves of its own."""
    heads, taps = Heads(1, 1, 16, 16), 4
    channels = 48
    slots = FAR // (channels * (taps - 1)) + 2
    histories = vast(slots * (taps - 1) * channels).view(slots, taps - 1, channels)
    histories[-1] = draw(taps - 1, channels)
    small = torch.stack([histories[-1], torch.full_like(histories[-1], torch.nan)])
    projected, weights = draw(1, channels + heads.dv + 2), (draw(channels, taps), draw(1), draw(1))

    def ints(*shown: int) -> torch.Tensor:
        return torch.tensor(shown, dtype=torch.int32)

    found = []
    for kept, slot in ((small, 0), (histories, slots - 1)):
        outs = [torch.full((1, 1, 16), torch.nan).half() for _ in range(3)] + [torch.full((1, 1), torch.nan) for _ in range(2)]
        gdn_inputs(projected, *weights, kept, ints(5), ints(0), ints(slot), *outs)
        write_histories(projected, ints(0, 1), ints(6), ints(slot), kept)
        found.append([*outs, kept[slot]])
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)
        assert not a.isnan().any()
