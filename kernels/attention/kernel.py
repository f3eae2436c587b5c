"""Paged attention in Triton: one arithmetic, two schedules with the same bits. Chooses no tile and plans no task (tiles.py, schedule.py, tasks.py).

For one query at absolute position p and the keys first..p, first = 0 or with a window max(0, p - window + 1):
    out = sum_j softmax_j(scale q.k_j) v_j

The order of every reduction is anchored at position 0 and depends on nothing else (bench/probes/RESULTS.md has the forms that were compared):
    1. q.k over d: one dot.
    2. Keys in tiles of BN, ascending. Per tile: n = max(m, max_j(s) c), p = exp2(fma(s, c, -n)), a = exp2(m - n), acc = dot(p in v's dtype, v, acc a),
       with c = scale log2(e). The sum of p runs in 8 lanes: a tile is halved, left + right, down to 8 columns; one fixed tree at a split's end.
    3. Splits of SPLIT keys, each started afresh; they enter the result in index order by `fold`.
Every multiply-add is written as fma, so that contraction by the compiler cannot differ from kernel to kernel. A tile or a split in which a query sees
no key changes nothing for it (p = 0, a = 1), so it may as well be skipped.

SERIAL  a task is a tile of queries: one program walks all splits, with a second accumulator.
SPREAD  a task is a tile of queries and one split: partials go to memory, the last program to arrive folds them in index order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from twinfer.kernels.attention.tiles import BN, SPLIT, Tile, padded_group, tile_tokens

UNROLL = 8  # partials that the folding program loads at a time: 2, 8 and 16 were within 5 % in bench/probes


@triton.jit
def halve(x, R: tl.constexpr, C: tl.constexpr, TIMES: tl.constexpr):
    """[R, C] -> [R, C / 2^TIMES], left half + right half each time: the order of the sum is in the code, not in the layout."""
    for i in tl.static_range(TIMES):
        a, b = tl.split(tl.permute(tl.reshape(x, (R, 2, C >> (i + 1))), (0, 2, 1)))
        x = a + b
    return x


@triton.jit
def add_tile(den, p, a, BM: tl.constexpr, BN: tl.constexpr):
    """den [BM, 8] <- den a + p [BM, BN], column j in lane j % 8."""
    tl.static_assert(BN == 64)
    return tl.fma(den, tl.broadcast_to(a[:, None], (BM, 8)), halve(p, BM, BN, 3))


@triton.jit
def total(den, BM: tl.constexpr):
    """[BM, 8] -> [BM]: the lanes' sum."""
    return tl.reshape(halve(den, BM, 8, 3), (BM,))


@triton.jit
def fold(M, DEN, A, m, den, acc):
    """(M, DEN, A) <- (M, DEN, A), then the split (m, den, acc). A split without keys (m = -inf, den = 0, acc = 0) changes nothing."""
    n = tl.maximum(M, m)
    safe = tl.where(n == float("-inf"), 0.0, n)
    f0 = tl.exp2(M - safe)
    f1 = tl.exp2(m - safe)
    return n, tl.fma(den, f1, DEN * f0), tl.fma(acc, tl.broadcast_to(f1[:, None], acc.shape), A * f0[:, None])


@triton.jit
def fresh_split(BM: tl.constexpr, D: tl.constexpr):
    """m [BM], den [BM, 8], acc [BM, D] before the first key."""
    return tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM, 8), tl.float32), tl.zeros((BM, D), tl.float32)


@triton.jit
def finish(OUT, DEN, A, live):
    """OUT <- A / DEN. A place without a query may have seen no key; it is not stored."""
    tl.store(OUT, (A / tl.where(live, DEN, 1.0)[:, None]).to(OUT.dtype.element_ty), mask=live[:, None])


@triton.jit
def walk(
    q,
    pos,
    m,
    den,
    acc,
    M,
    DEN,
    A,
    lo,
    hi,
    first,
    seen,
    KEYS,
    VALUES,
    TABLE,
    c,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Tiles lo..hi of one chain, lo a multiple of BN. MASK: tiles that some query may not see whole. SERIAL closes each split inside the loop, so that
    the load pipeline is not restarted at every split. Keys outside first..seen - 1 may hold anything, NaN included."""
    columns = tl.arange(0, D)
    keys = tl.arange(0, BN)
    # Page ids are carried one tile ahead: a load whose address depends on a load of the same iteration costs the pipeline a stage of depth.
    if PAGE % BN == 0:
        page = tl.load(TABLE + tl.maximum(tl.minimum(lo, hi - 1), 0) // PAGE)
    else:
        page = tl.load(TABLE + (lo + keys) // PAGE, mask=lo + keys < seen, other=0)
    for t in range(lo, hi, BN):
        at = t + keys
        if PAGE % BN == 0:
            offset = page.to(tl.int64) * PAGE_STRIDE + (t % PAGE + keys) * SLOT_STRIDE
            page = tl.load(TABLE + tl.minimum(t + BN, hi - 1) // PAGE)
        else:
            offset = page.to(tl.int64) * PAGE_STRIDE + (at % PAGE) * SLOT_STRIDE
            page = tl.load(TABLE + (at + BN) // PAGE, mask=at + BN < seen, other=0)
        k = tl.load(KEYS + offset[:, None] + columns[None, :])
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASK:
            sees = at[None, :] <= pos[:, None]
            written = at < seen
            if WINDOW > 0:
                sees = sees & (at[None, :] > pos[:, None] - WINDOW)
                written = written & (at >= first)
            s = tl.where(sees, s, float("-inf"))
            v = tl.load(VALUES + offset[:, None] + columns[None, :], mask=written[:, None], other=0.0)  # 0 * NaN would be NaN
        else:
            v = tl.load(VALUES + offset[:, None] + columns[None, :])
        old = m
        if not SPREAD:  # a split begins: forget the maximum
            begins = (t > 0) & (t % SPLIT == 0)
            old = tl.where(begins, float("-inf"), m)
        n = tl.maximum(old, tl.max(s, 1) * c)
        safe = n
        if MASK:
            safe = tl.where(n == float("-inf"), 0.0, n)
        p = tl.exp2(tl.fma(s, c, -safe[:, None]))
        a = tl.exp2(old - safe)
        # The split before is closed here, where acc is rescaled anyway, so that its last dot still overlaps this tile's scores and softmax.
        if not SPREAD:  # noqa: SIM102 (one is decided at compile time)
            if begins:
                M, DEN, A = fold(M, DEN, A, m, total(den, BM), acc)
                _, den, acc = fresh_split(BM, D)
        den = add_tile(den, p, a, BM, BN)
        acc = tl.dot(p.to(v.dtype), v, acc * a[:, None], input_precision=PRECISION)
        m = n
    return m, den, acc, M, DEN, A


@triton.jit(do_not_specialize=["width"])
def attention_kernel(
    Q,
    KEYS,
    VALUES,
    PAGE_TABLE,
    SLOTS,
    ROW_INDPTR,
    CONTEXT,
    TASKS,
    NUM_TASKS,
    PARTIAL_ACC,
    PARTIAL_M,
    PARTIAL_DEN,
    ARRIVED,
    OUT,
    width,
    c,
    K: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    SPREAD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Grid (K, programs): program (h, i) does the tasks i, i + programs, .. of kv head h. A tile holds BM / GP tokens, GP >= G places a token.

    A partial has the layout of an entry of OUT: [place, K, G, D]. ARRIVED [place, K] counts the splits of a tile, at the tile's first place.
    """
    h = tl.program_id(0)
    BT: tl.constexpr = BM // GP
    H: tl.constexpr = K * G
    rows = tl.arange(0, BM)
    columns = tl.arange(0, D)
    head = h * G + rows % GP
    for task in range(tl.program_id(1), tl.load(NUM_TASKS), tl.num_programs(1)):
        row = tl.load(TASKS + task * 4)
        begin = tl.load(TASKS + task * 4 + 1)
        at = tl.load(ROW_INDPTR + row)
        length = tl.load(ROW_INDPTR + row + 1) - at
        seen = tl.load(CONTEXT + row)
        start = seen - length + begin  # position of the tile's first query
        count = tl.minimum(length - begin, BT)  # tokens of the tile
        place = rows // GP
        live = (place < count) & (rows % GP < G)
        pos = start + place
        end = start + count
        here = ((at + begin + place).to(tl.int64) * H + head)[:, None] * D + columns[None, :]
        q = tl.load(Q + here, mask=live[:, None], other=0.0)
        table = PAGE_TABLE + tl.load(SLOTS + row).to(tl.int64) * width
        keys = KEYS + h.to(tl.int64) * HEAD_STRIDE
        values = VALUES + h.to(tl.int64) * HEAD_STRIDE

        first = 0  # the first key that any query of the tile sees
        if WINDOW > 0:
            first = tl.maximum(start - WINDOW + 1, 0)
        lo = first // BN * BN
        hi = end
        if SPREAD:
            split = tl.load(TASKS + task * 4 + 2)
            lo = tl.maximum(lo, split * SPLIT)
            hi = tl.minimum(end, split * SPLIT + SPLIT)
        m, den, acc = fresh_split(BM, D)
        M = tl.full((BM,), float("-inf"), tl.float32)
        DEN = tl.zeros((BM,), tl.float32)
        A = tl.zeros((BM, D), tl.float32)
        middle = lo
        if WINDOW == 0:
            middle = tl.minimum(tl.maximum((start + 1) // BN * BN, lo), hi)  # every query sees the tiles before it whole
            m, den, acc, M, DEN, A = walk(
                q, pos, m, den, acc, M, DEN, A, lo, middle, first, seen, keys, values, table, c,
                BM, D, PAGE, PAGE_STRIDE, SLOT_STRIDE, BN, SPLIT, WINDOW, PRECISION, False, SPREAD,
            )  # fmt: skip
        m, den, acc, M, DEN, A = walk(
            q, pos, m, den, acc, M, DEN, A, middle, hi, first, seen, keys, values, table, c,
            BM, D, PAGE, PAGE_STRIDE, SLOT_STRIDE, BN, SPLIT, WINDOW, PRECISION, True, SPREAD,
        )  # fmt: skip
        sums = total(den, BM)
        if not SPREAD:
            M, DEN, A = fold(M, DEN, A, m, sums, acc)
            finish(OUT + here, DEN, A, live)
        else:
            oldest = first // SPLIT
            splits = (end - 1) // SPLIT + 1
            if splits - oldest == 1:
                if split == oldest:
                    M, DEN, A = fold(M, DEN, A, m, sums, acc)
                    finish(OUT + here, DEN, A, live)
            elif split >= oldest:
                base = tl.load(TASKS + task * 4 + 3).to(tl.int64)
                mine = (base + split * count + place) * H + head
                tl.store(PARTIAL_ACC + mine[:, None] * D + columns[None, :], acc, mask=live[:, None])
                tl.store(PARTIAL_M + mine, m, mask=live)
                tl.store(PARTIAL_DEN + mine, sums, mask=live)
                tl.debug_barrier()
                if tl.atomic_add(ARRIVED + base * K + h, 1, sem="acq_rel") == splits - oldest - 1:
                    for s in range(oldest, splits, UNROLL):
                        for i in tl.static_range(UNROLL):  # their loads are in flight together; absent ones fold as nothing
                            there = live & (s + i < splits)
                            other = (base + (s + i) * count + place) * H + head
                            ms = tl.load(PARTIAL_M + other, mask=there, other=float("-inf"), cache_modifier=".cg")
                            ds = tl.load(PARTIAL_DEN + other, mask=there, other=0.0, cache_modifier=".cg")
                            acs = tl.load(
                                PARTIAL_ACC + other[:, None] * D + columns[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
                            )
                            M, DEN, A = fold(M, DEN, A, ms, ds, acs)
                    finish(OUT + here, DEN, A, live)
                    tl.store(ARRIVED + base * K + h, 0)


def constants(
    tile: Tile,
    spread: bool,
    window: int,
    dtype: torch.dtype,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    strides: tuple[int, int, int],
) -> dict[str, object]:
    """The compile-time arguments of `attention_kernel`. strides: of a page, of a token within it, of a kv head, in elements."""
    return {
        "K": num_kv_heads,
        "G": group,
        "GP": padded_group(group),
        "D": head_dim,
        "PAGE": page_size,
        "PAGE_STRIDE": strides[0],
        "SLOT_STRIDE": strides[1],
        "HEAD_STRIDE": strides[2],
        "BM": tile.rows,
        "BN": BN,
        "SPLIT": SPLIT,
        "WINDOW": window,
        # TF32 is refused: fp32 means IEEE products. The other dtypes have one precision, whatever is asked for.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "SPREAD": spread,
        "UNROLL": UNROLL,
    }


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    slots: torch.Tensor,
    row_indptr: torch.Tensor,
    context: torch.Tensor,
    tasks: torch.Tensor,
    num_tasks: torch.Tensor,
    partial_acc: torch.Tensor,
    partial_m: torch.Tensor,
    partial_den: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int,
    spread: bool,
    tile: Tile,
    num_programs: int,
) -> None:
    """The call of `plain.attention`. Launches (K, num_programs) programs, whatever num_tasks holds: a graph's grid is fixed, its tasks are not."""
    _, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    # Shapes and strides are the same at every replay, so that these cost a graph nothing.
    if head_dim not in (64, 128, 256) or num_heads != group * num_kv_heads or not tile_tokens(tile, group):
        raise ValueError(f"attention: {num_heads} query heads of {head_dim} over {num_kv_heads} kv heads do not fit a tile of {tile.rows} rows")
    if keys.stride() != values.stride() or keys.stride(3) != 1:
        raise ValueError(f"attention: keys and values need the same strides and a contiguous last dim, got {keys.stride()} and {values.stride()}")
    if not (q.is_contiguous() and out.is_contiguous() and tasks.is_contiguous() and page_table.stride(1) == 1):
        raise ValueError("attention: q, out, tasks and a row of the page table must be contiguous")
    attention_kernel[(num_kv_heads, num_programs)](
        q,
        keys,
        values,
        page_table,
        slots,
        row_indptr,
        context,
        tasks,
        num_tasks,
        partial_acc,
        partial_m,
        partial_den,
        arrived,
        out,
        page_table.stride(0),
        scale * math.log2(math.e),
        **constants(tile, spread, window, q.dtype, num_kv_heads, group, head_dim, page_size, keys.stride()[:3]),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
