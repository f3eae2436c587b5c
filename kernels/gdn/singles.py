"""Rows of one token in Triton: row i of the open chunk, from what the state keeps of rows before it. Chooses no tile. The arithmetic is in kernel.py.

Row i of keys, sums, T, x and R is written by these kernels and read by none of them: what a program needs of row i it computes itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinfer.kernels.gdn.products import dot_pieces, next_state, row_of, split


@triton.jit
def key_side(
    Q,
    K,
    KEYS,
    STATE_SUMS,
    STATE_BETA,
    T_HIGH,
    T_LOW,
    X_HIGH,
    X_LOW,
    i,
    log_decay,
    beta,
    writes,
    writes_key,
    DK: tl.constexpr,
    SP: tl.constexpr,
    LP: tl.constexpr,
):
    """w_i [64], strictly before column i, P_ii and G_i. writes: whether the state gets row i (of keys: writes_key).

    Three rows of one tile of 16: 0, A left of the block; 1, A inside the block; 2, P.
    """
    c = tl.arange(0, 64)
    r = tl.arange(0, 16)
    d = tl.arange(0, DK)
    q = tl.load(Q + d)
    k = tl.load(K + d)
    own_block = (i // 16) * 16
    before = c < i
    sums = tl.load(STATE_SUMS + c, mask=before, other=0.0)
    total = tl.load(STATE_SUMS + tl.maximum(i - 1, 0), mask=i > 0, other=0.0) + log_decay
    sums = tl.where(c == i, total, sums)
    keys = tl.load(KEYS + c[:, None] * DK + d[None, :], mask=before[:, None] & (d < DK)[None, :], other=0.0)
    keys = tl.where((c == i)[:, None], k[None, :], keys)
    pair = tl.where((r == 2)[:, None], q[None, :], k[None, :])
    D = tl.exp(tl.where(c <= i, total - sums, 0.0))
    kk = tl.dot(pair, tl.trans(keys), input_precision="ieee")
    m = tl.where((r < 2)[:, None], beta * kk, kk) * D[None, :]
    diagonal = tl.sum(tl.sum(tl.where((r == 2)[:, None] & (c == i)[None, :], m, 0.0), 1), 0)  # one term that is not zero
    low = tl.where(r == 1, own_block, 0)
    high = tl.where(r == 0, own_block, i)
    m = tl.where((c[None, :] >= low[:, None]) & (c[None, :] < high[:, None]) & (r < 3)[:, None], m, 0.0)
    written = before[:, None] & (c[None, :] <= c[:, None])
    t_high = tl.load(T_HIGH + c[:, None] * 64 + c[None, :], mask=written, other=0.0)
    in_ring = (own_block + r < i)[:, None] & (c < own_block)[None, :]
    x_high = tl.load(X_HIGH + r[:, None] * 64 + c[None, :], mask=in_ring, other=0.0)
    if SP == 2:
        t_low = tl.load(T_LOW + c[:, None] * 64 + c[None, :], mask=written, other=0.0)
        x_low = tl.load(X_LOW + r[:, None] * 64 + c[None, :], mask=in_ring, other=0.0)
    else:
        t_low = t_high
        x_low = x_high
    m_high, m_low = split(m, LP)
    Z = dot_pieces(m_high, m_low, t_high, t_low, SP)
    x = tl.where(c < own_block, row_of(Z, 0, 16), 0.0)
    inside = tl.where((c >= own_block) & before, 0.0 - row_of(Z, 1, 16), 0.0)
    block_row = tl.sum(tl.reshape(inside, (4, 16)), 0)  # one of four is not zero
    t16_high, t16_low = split(tl.where((r == 0)[:, None], block_row[None, :], 0.0), LP)
    solved = row_of(dot_pieces(t16_high, t16_low, x_high, x_low, SP), 0, 16)
    t = tl.where(c < own_block, (-x) - solved, tl.where(c == i, 1.0, inside))
    if writes:
        new_high, new_low = split(t, LP)
        left_high, left_low = split(x, LP)
        tl.store(T_HIGH + i * 64 + c, new_high)
        tl.store(X_HIGH + i % 16 * 64 + c, left_high)
        if SP == 2:
            tl.store(T_LOW + i * 64 + c, new_low)
            tl.store(X_LOW + i % 16 * 64 + c, left_low)
        tl.store(STATE_SUMS + i, total)
        tl.store(STATE_BETA + i, beta)
    if writes_key:
        tl.store(KEYS + i * DK + d, k)
    return tl.where(before, diagonal * t - (-row_of(Z, 2, 16)), 0.0), diagonal, total


@triton.jit
def stream(Q, K, HIGH, LOW, e, anchored, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, SS: tl.constexpr, LP: tl.constexpr,
           STAGES: tl.constexpr):  # fmt: skip
    """[16, BV]: row 0 anchor^T k_i, row 1 anchor^T q_i. Nothing is read where the anchor is zero by definition."""
    r = tl.arange(0, 16)
    high = tl.zeros((16, BV), tl.float32)
    low = tl.zeros((16, BV), tl.float32)
    for start in tl.range(0, DK, BK, num_stages=STAGES):
        d = start + tl.arange(0, BK)
        there = (d < DK)[:, None] & anchored
        pair = tl.where((r == 1)[:, None], tl.load(Q + d)[None, :], tl.load(K + d)[None, :])
        if SS == 2:
            s_low = tl.load(LOW + d[:, None] * DV + e[None, :], mask=there, other=0.0)
            low = tl.dot(pair, s_low, low, input_precision="ieee")
        s_high = tl.load(HIGH + d[:, None] * DV + e[None, :], mask=there, other=0.0)
        high = tl.dot(pair, s_high, high, input_precision="ieee")
    if SS == 2:
        return low - (-high)
    else:
        return high


@triton.jit
def value_row(
    V,
    OUT,
    R_HIGH,
    R_LOW,
    recalled,
    queried,
    w,
    diagonal,
    total,
    beta,
    i,
    e,
    DV: tl.constexpr,
    SP: tl.constexpr,
    LP: tl.constexpr,
):
    """Row i of R goes to the state, the output to OUT."""
    c = tl.arange(0, 64)
    r = tl.arange(0, 16)
    written = (c < i)[:, None] & (e < DV)[None, :]
    r_high = tl.load(R_HIGH + c[:, None] * DV + e[None, :], mask=written, other=0.0)
    if SP == 2:
        r_low = tl.load(R_LOW + c[:, None] * DV + e[None, :], mask=written, other=0.0)
    else:
        r_low = r_high
    decay = tl.exp(total)
    own = beta * (tl.load(V + e).to(tl.float32) - decay * recalled)
    w_high, w_low = split(tl.where((r == 0)[:, None], w[None, :], 0.0), LP)
    W = row_of(dot_pieces(w_high, w_low, r_high, r_low, SP), 0, 16)
    own_high, own_low = split(own, LP)
    tl.store(R_HIGH + i * DV + e, own_high)
    if SP == 2:
        tl.store(R_LOW + i * DV + e, own_low)
    out = decay * queried - (-(diagonal * own - (-W)))
    tl.store(OUT + e, out.to(OUT.dtype.element_ty))


@triton.jit
def single_kernel(
    Q,
    K,
    V,
    LOG_DECAY,
    BETA,
    KEYS,
    STATE_SUMS,
    STATE_BETA,
    ANCHOR_HIGH,
    ANCHOR_LOW,
    T_HIGH,
    T_LOW,
    X_HIGH,
    X_LOW,
    R_HIGH,
    R_LOW,
    SINGLES,
    COUNTS,
    W,
    STREAMED,
    OUT,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PART: tl.constexpr,
    SP: tl.constexpr,
    SS: tl.constexpr,
):
    """Grid (programs of a head * NV * singles,), heads of one single together.

    PART 0, DV / BV programs of a head: all of it, the key side in each. In two launches instead: PART 1, 1 + DV / BV programs of a head: the key side,
    beside the pass over the anchor; PART 2, DV / BV programs: the rest. Between the two W [singles, NV, 64] (P_ii in place i) and STREAMED
    [singles, NV, 2, DV].
    """
    LP: tl.constexpr = KEYS.dtype.element_ty
    TILES: tl.constexpr = DV // BV + (1 if PART == 1 else 0)
    program = tl.program_id(0)
    tile = program % TILES
    h = program // TILES % NV
    single = program // (TILES * NV)
    if single < tl.load(COUNTS + 2):
        token = tl.load(SINGLES + single * 3).to(tl.int64)
        position = tl.load(SINGLES + single * 3 + 1)
        slot = tl.load(SINGLES + single * 3 + 2).to(tl.int64)
        i = position % 64
        anchored = position >= 64
        GROUP: tl.constexpr = NV // NK
        key_head = h // GROUP
        mine = slot * NV + h
        there = single.to(tl.int64) * NV + h
        c = tl.arange(0, 64)
        beta = tl.load(BETA + token * NV + h)
        query = Q + (token * NK + key_head) * DK
        key = K + (token * NK + key_head) * DK
        first = tile == 0
        if PART == 1:
            if first:
                w, diagonal, total = key_side(
                    query, key, KEYS + (slot * NK + key_head) * 64 * DK, STATE_SUMS + mine * 64, STATE_BETA + mine * 64, T_HIGH + mine * 64 * 64,
                    T_LOW + mine * 64 * 64, X_HIGH + mine * 16 * 64, X_LOW + mine * 16 * 64, i, tl.load(LOG_DECAY + token * NV + h), beta, first,
                    first & (h % GROUP == 0), DK, SP, LP,
                )  # fmt: skip
                tl.store(W + there * 64 + c, tl.where(c == i, diagonal, w))
            else:
                column = (tile - 1) * BV + tl.arange(0, BV)
                both = stream(query, key, ANCHOR_HIGH + mine * DK * DV, ANCHOR_LOW + mine * DK * DV, column, anchored, DK, DV, BV, BK, SS, LP, STAGES)
                r = tl.arange(0, 16)
                tl.store(STREAMED + there * 2 * DV + r[:, None] * DV + column[None, :], both, mask=(r < 2)[:, None])
        else:
            e = tile * BV + tl.arange(0, BV)
            if PART == 0:
                both = stream(query, key, ANCHOR_HIGH + mine * DK * DV, ANCHOR_LOW + mine * DK * DV, e, anchored, DK, DV, BV, BK, SS, LP, STAGES)
                recalled = row_of(both, 0, 16)
                queried = row_of(both, 1, 16)
                w, diagonal, total = key_side(
                    query, key, KEYS + (slot * NK + key_head) * 64 * DK, STATE_SUMS + mine * 64, STATE_BETA + mine * 64, T_HIGH + mine * 64 * 64,
                    T_LOW + mine * 64 * 64, X_HIGH + mine * 16 * 64, X_LOW + mine * 16 * 64, i, tl.load(LOG_DECAY + token * NV + h), beta, first,
                    first & (h % GROUP == 0), DK, SP, LP,
                )  # fmt: skip
            else:
                w = tl.load(W + there * 64 + c)
                w = tl.where(c < i, w, 0.0)
                diagonal = tl.load(W + there * 64 + i)
                total = tl.load(STATE_SUMS + mine * 64 + i)
                recalled = tl.load(STREAMED + there * 2 * DV + e)
                queried = tl.load(STREAMED + there * 2 * DV + DV + e)
            value_row(
                V + (token * NV + h) * DV, OUT + (token * NV + h) * DV, R_HIGH + mine * 64 * DV, R_LOW + mine * 64 * DV, recalled, queried, w, diagonal,
                total, beta, i, e, DV, SP, LP,
            )  # fmt: skip


@triton.jit
def commit_kernel(
    KEYS,
    STATE_SUMS,
    ANCHOR,
    ANCHOR_HIGH,
    ANCHOR_LOW,
    T_HIGH,
    T_LOW,
    R_HIGH,
    R_LOW,
    COMMITS,
    COUNTS,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    SP: tl.constexpr,
    SS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid (DV / BV * NV * commits,). The anchor of a chunk whose last row a single has written."""
    LP: tl.constexpr = KEYS.dtype.element_ty
    TILES: tl.constexpr = DV // BV
    program = tl.program_id(0)
    tile = program % TILES
    h = program // TILES % NV
    commit = program // (TILES * NV)
    if commit < tl.load(COUNTS + 3):
        slot = tl.load(COMMITS + commit * 2).to(tl.int64)
        position = tl.load(COMMITS + commit * 2 + 1)
        mine = slot * NV + h
        c = tl.arange(0, 64)
        e = tile * BV + tl.arange(0, BV)
        keys = KEYS + (slot * NK + h // (NV // NK)) * 64 * DK
        sums = tl.load(STATE_SUMS + mine * 64 + c)
        whole = tl.load(STATE_SUMS + mine * 64 + 63)
        square = mine * 64 * 64 + c[:, None] * 64 + c[None, :]
        cached = mine * 64 * DV + c[:, None] * DV + e[None, :]
        t_high = tl.load(T_HIGH + square)
        r_high = tl.load(R_HIGH + cached)
        if SP == 2:
            t_low = tl.load(T_LOW + square)
            r_low = tl.load(R_LOW + cached)
        else:
            t_low = t_high
            r_low = r_high
        weighted = tl.exp(whole - sums)[:, None] * dot_pieces(t_high, t_low, r_high, r_low, SP)
        for start in range(0, DK, BK):
            d = start + tl.arange(0, BK)
            at = mine * DK * DV + d[:, None] * DV + e[None, :]
            S = tl.load(ANCHOR + at, mask=(d < DK)[:, None] & (position >= 64), other=0.0)
            S = next_state(tl.load(keys + c[None, :] * DK + d[:, None]), weighted, S, tl.exp(whole), SP, LP)
            tl.store(ANCHOR + at, S)
            if PIECES:
                s_high, s_low = split(S, LP)
                tl.store(ANCHOR_HIGH + at, s_high)
                if SS == 2:
                    tl.store(ANCHOR_LOW + at, s_low)
