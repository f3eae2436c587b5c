"""The choice among experts in Triton, and its launches. No product here.

`route` is one program a token, which holds the token's logits whole: nothing is known of other tokens. `group` computes integers alone, which come out
the same however they are computed: one program for few pairs, one a expert and one more for many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WARPS = 1  # of `route`: k maxima one after another, each among the threads of one warp alone. Not tuned on a GPU yet
FEW = 256  # pairs that one program sorts, by comparing each with each. Not tuned on a GPU yet
CHUNK = 16  # of them that it compares at a time
BLOCK, SORT_WARPS, LIST_WARPS = 4096, 8, 4  # pairs that a program for one expert reads at a time. Not tuned on a GPU yet


@triton.jit
def route_kernel(LOGITS, TOKEN_ROW, SHARES, EXPERTS, stride, E, k: tl.constexpr, NORMALISE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T,). The call of `plain.route`; stride: from a token's logits to the next one's. BLOCK: next power of two of E.

    A key holds a probability's bits, which order as the probabilities do, and below them the expert's number counted from the top: of equal ones the
    lower number has the larger key. Chosen keys become -1. The sum of the chosen goes from the most probable on.
    """
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < E
    logits = tl.load(LOGITS + t * stride + i, mask=inside, other=-float("inf")).to(tl.float32)
    powers = tl.where(inside, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
    probabilities = powers / tl.sum(powers, axis=0)
    number = probabilities == probabilities
    bits = tl.where(number, probabilities.to(tl.int32, bitcast=True), 0x7FC00000)
    keys = tl.where(inside, (bits.to(tl.int64) << 32) + (BLOCK - 1 - i), -1)
    total = 0.0
    for _ in range(k):
        best = tl.max(keys, axis=0)
        total += (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        keys = tl.where(keys == best, -1, keys)
    chosen = inside & (keys == -1)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    live = tl.load(TOKEN_ROW + t) >= 0
    shares = probabilities
    if NORMALISE:
        shares = probabilities / total
    tl.store(SHARES + t * k + place, tl.where(live, shares, 0.0).to(SHARES.dtype.element_ty), mask=chosen)
    tl.store(EXPERTS + t * k + place, tl.where(live, i, -1), mask=chosen)


@triton.jit
def list_tiles(OFFSETS, TILES, NUM_TILES, counts, e, E, ROWS: tl.constexpr):
    """Writes the offsets, the tiles and their number for counts [experts] of pairs; e [experts] are the numbers, of which those from E on have none."""
    ends = tl.cumsum(counts, axis=0)
    own = (counts + ROWS - 1) // ROWS
    first = tl.cumsum(own, axis=0) - own
    tl.store(OFFSETS + e, ends - counts, mask=e <= E)
    tl.store(NUM_TILES, tl.sum(own, axis=0))
    for j in range(tl.max(own, axis=0)):
        at = TILES + (first + j) * 3
        tl.store(at, e, mask=j < own)
        tl.store(at + 1, ends - counts + j * ROWS, mask=j < own)
        tl.store(at + 2, tl.minimum(counts - j * ROWS, ROWS), mask=j < own)


@triton.jit(do_not_specialize=["P"])
def group_few_kernel(
    EXPERTS,
    PAIRS,
    OFFSETS,
    TILES,
    NUM_TILES,
    P,
    E,
    ROWS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (1,). The call of `plain.group` for P <= PAIR_BLOCK; EXPERT_BLOCK > E."""
    p = tl.arange(0, PAIR_BLOCK)
    e = tl.arange(0, EXPERT_BLOCK)
    mine = tl.load(EXPERTS + p, mask=p < P, other=-1)
    live = (mine >= 0) & (mine < E)
    place = tl.zeros((PAIR_BLOCK,), tl.int32)
    counts = tl.zeros((EXPERT_BLOCK,), tl.int32)
    for begin in range(0, P, CHUNK):
        q = begin + tl.arange(0, CHUNK)
        other = tl.load(EXPERTS + q, mask=q < P, other=-1)
        other = tl.where(other < E, other, -1)
        counts += tl.sum((other[None, :] == e[:, None]).to(tl.int32), axis=1)
        earlier = (other[None, :] < mine[:, None]) | ((other[None, :] == mine[:, None]) & (q[None, :] < p[:, None]))
        place += tl.sum((earlier & (other >= 0)[None, :]).to(tl.int32), axis=1)
    tl.store(PAIRS + place, p, mask=live)
    list_tiles(OFFSETS, TILES, NUM_TILES, counts, e, E, ROWS)


@triton.jit(do_not_specialize=["P"])
def sort_kernel(EXPERTS, PAIRS, OFFSETS, P, E, BLOCK: tl.constexpr):
    """Grid (E,). Program e writes the pairs of expert e, behind as many as experts below e have, and where they begin; the last one also where all end."""
    e = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, P, BLOCK):
        number = tl.load(EXPERTS + begin + i, mask=begin + i < P, other=-1)
        before += ((number >= 0) & (number < e)).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(OFFSETS + e, place)
    for begin in range(0, P, BLOCK):
        number = tl.load(EXPERTS + begin + i, mask=begin + i < P, other=-1)
        own = (number == e).to(tl.int32)
        tl.store(PAIRS + place + tl.cumsum(own, axis=0) - 1, begin + i, mask=own > 0)
        place += tl.sum(own, axis=0)
    tl.store(OFFSETS + E, place, mask=e == E - 1)


@triton.jit
def list_kernel(OFFSETS, TILES, NUM_TILES, E, ROWS: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """Grid (1,). Tiles and their number from the offsets, which stay as they are."""
    e = tl.arange(0, EXPERT_BLOCK)
    begin = tl.load(OFFSETS + e, mask=e < E, other=0)
    end = tl.load(OFFSETS + e + 1, mask=e < E, other=0)
    list_tiles(OFFSETS, TILES, NUM_TILES, end - begin, e, E, ROWS)


def route(logits: torch.Tensor, token_row: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, normalise: bool) -> None:
    """The call of `plain.route`. logits may be columns of something wider, whose rows start on 16 bytes, or a row may round differently than elsewhere; all
    other tensors contiguous. E is held in the registers of one warp: what it gives beyond 1024 was never looked at."""
    num_tokens, num_experts = logits.shape
    block = triton.next_power_of_2(num_experts)
    sizes = {"k": experts.shape[1], "NORMALISE": normalise, "BLOCK": block}
    route_kernel[(num_tokens,)](logits, token_row, shares, experts, logits.stride(0), num_experts, **sizes, num_warps=WARPS)


def group(experts: torch.Tensor, pairs: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, rows: int) -> None:
    """The call of `plain.group`; all tensors contiguous."""
    if experts.numel() <= FEW:
        launch_few(experts, pairs, offsets, tiles, num_tiles, rows)
    else:
        launch_many(experts, pairs, offsets, tiles, num_tiles, rows)


def launch_few(experts: torch.Tensor, pairs: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, rows: int) -> None:
    """By one program."""
    num_pairs, num_experts = experts.numel(), len(offsets) - 1
    sizes = {"PAIR_BLOCK": max(CHUNK, triton.next_power_of_2(num_pairs)), "EXPERT_BLOCK": triton.next_power_of_2(num_experts + 1), "CHUNK": CHUNK}
    group_few_kernel[(1,)](experts, pairs, offsets, tiles, num_tiles, num_pairs, num_experts, ROWS=rows, **sizes, num_warps=LIST_WARPS)


def launch_many(experts: torch.Tensor, pairs: torch.Tensor, offsets: torch.Tensor, tiles: torch.Tensor, num_tiles: torch.Tensor, rows: int) -> None:
    """By a program for each expert, then one that lists the tiles."""
    num_pairs, num_experts = experts.numel(), len(offsets) - 1
    sort_kernel[(num_experts,)](experts, pairs, offsets, num_pairs, num_experts, BLOCK=BLOCK, num_warps=SORT_WARPS)
    block = triton.next_power_of_2(num_experts + 1)
    list_kernel[(1,)](offsets, tiles, num_tiles, num_experts, ROWS=rows, EXPERT_BLOCK=block, num_warps=LIST_WARPS)
