"""Long rows in Triton: the chunks of a step, computed whole. Plans no chunk and chooses no tile. The arithmetic is described in kernel.py.

A chunk's rows 0 .. begin - 1 were computed in earlier steps and come from the state; rows begin .. end - 1 are tokens of this step. Nothing of a row
depends on later rows, so it does not matter that all rows of T are computed again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinfer.kernels.gdn.products import dot_pieces, dot_state, dot_wide, next_state, split


@triton.jit
def rows_of(STEP, CACHE, i, column, begin, end, stride, WIDTH: tl.constexpr):
    """Rows i of a chunk, of any shape: those before `begin` from CACHE [64, WIDTH], the others from STEP, `stride` elements apart; zero from `end` on."""
    # One load for both: the value side holds all that it loads in shared memory, once a stage.
    return tl.load(tl.where(i < begin, CACHE + i * WIDTH, STEP + i * stride) + column, mask=(i < end) & (column < WIDTH), other=0.0)


@triton.jit
def decay_sums_kernel(LOG_DECAY, BETA, STATE_SUMS, STATE_BETA, TASKS, COUNTS, SUMS, STRENGTH, NV: tl.constexpr, NVP: tl.constexpr):
    """Grid (tasks,). SUMS [tasks, 64, NV]: G_i, one add a token from the anchor on; STRENGTH likewise: beta. Rows of earlier steps are the state's."""
    task = tl.program_id(0)
    if task < tl.load(COUNTS):
        token = tl.load(TASKS + task * 4).to(tl.int64)
        slot = tl.load(TASKS + task * 4 + 1).to(tl.int64)
        begin = tl.load(TASKS + task * 4 + 2)
        end = tl.load(TASKS + task * 4 + 3)
        h = tl.arange(0, NVP)
        total = tl.zeros((NVP,), tl.float32)
        for i in range(end):
            cached = (slot * NV + h) * 64 + i
            fresh = (token + i) * NV + h
            here = (task.to(tl.int64) * 64 + i) * NV + h
            old = (h < NV) & (i < begin)
            new = (h < NV) & (i >= begin)
            summed = total + tl.load(LOG_DECAY + fresh, mask=new, other=0.0)
            total = tl.where(i < begin, tl.load(STATE_SUMS + cached, mask=old, other=0.0), summed)
            strength = tl.load(STATE_BETA + cached, mask=old, other=0.0)
            strength = tl.where(i < begin, strength, tl.load(BETA + fresh, mask=new, other=0.0))
            tl.store(SUMS + here, total, mask=h < NV)
            tl.store(STRENGTH + here, strength, mask=h < NV)


@triton.jit
def solve(
    STEP,
    CACHE,
    SUMS,
    STRENGTH,
    X_HIGH,
    X_LOW,
    keys,
    sums,
    begin,
    end,
    stride,
    NV: tl.constexpr,
    DK: tl.constexpr,
    SP: tl.constexpr,
    LP: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """T = (I + A)^-1 of one chunk, [64, 64] fp32; rows from `end` on are unit rows. Leaves x of the block that stays open.

    Diagonal blocks of 16 first, all four at once: ROUNDS = 15 times t = I - A t, after which row i has been final for 15 - i rounds. Then, block by
    block: x = A T left of the block, T = -x - (T of the block, strictly below its diagonal) x.
    """
    c = tl.arange(0, 64)
    r = tl.arange(0, 16)
    d = tl.arange(0, DK)
    block = tl.arange(0, 4)
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    below = r[None, :] < r[:, None]
    i4 = block[:, None] * 16 + r[None, :]
    k4 = rows_of(STEP, CACHE, i4[:, :, None], d[None, None, :], begin, end, stride, DK)
    g4 = tl.load(SUMS + i4 * NV, mask=i4 < end, other=0.0)
    b4 = tl.load(STRENGTH + i4 * NV, mask=i4 < end, other=0.0)
    kk4 = tl.dot(k4, tl.permute(k4, (0, 2, 1)), input_precision="ieee")
    # Rows from `end` on have no sum: exp of what lies between them and a real one could overflow, and a zero times infinity would reach every row.
    decay4 = tl.exp(tl.where(below[None, :, :] & (i4 < end)[:, :, None], g4[:, :, None] - g4[:, None, :], 0.0))
    a_high, a_low = split(tl.where(below[None, :, :], (b4[:, :, None] * kk4) * decay4, 0.0), LP)
    t4 = tl.zeros((4, 16, 16), tl.float32) + eye[None, :, :]
    for _ in range(ROUNDS):
        t_high, t_low = split(t4, LP)
        t4 = eye[None, :, :] - dot_pieces(a_high, a_low, t_high, t_low, SP)
    T = tl.zeros((64, 64), tl.float32)
    for b in tl.static_range(4):
        i = b * 16 + r
        t = tl.sum(tl.where((block == b)[:, None, None], t4, 0.0), 0)
        rows = tl.reshape(tl.broadcast_to(t[:, None, :], (16, 4, 16)), (16, 64))
        if b > 0:
            left = (c < b * 16)[None, :]
            k = rows_of(STEP, CACHE, i[:, None], d[None, :], begin, end, stride, DK)
            g = tl.load(SUMS + i * NV, mask=i < end, other=0.0)
            beta = tl.load(STRENGTH + i * NV, mask=i < end, other=0.0)
            kk = tl.dot(k, tl.trans(keys), input_precision="ieee")
            a = tl.where(left, (beta[:, None] * kk) * tl.exp(tl.where(left & (i < end)[:, None], g[:, None] - sums[None, :], 0.0)), 0.0)
            x = dot_wide(a, T, SP, LP)
            rows = tl.where(left, (-x) - dot_wide(tl.where(below, t, 0.0), x, SP, LP), tl.where((c < b * 16 + 16)[None, :], rows, 0.0))
            kept = (i < end)[:, None] & (end < b * 16 + 16)  # a block that this step fills is not open
            x_high, x_low = split(x, LP)
            tl.store(X_HIGH + r[:, None] * 64 + c[None, :], x_high, mask=kept & (c < 64)[None, :])
            if SP == 2:
                tl.store(X_LOW + r[:, None] * 64 + c[None, :], x_low, mask=kept & (c < 64)[None, :])
        else:
            rows = tl.where((c < 16)[None, :], rows, 0.0)
        T = tl.where((c // 16 == b)[:, None], tl.reshape(tl.broadcast_to(rows[None, :, :], (4, 16, 64)), (64, 64)), T)
    return T


@triton.jit
def key_side_kernel(
    Q,
    K,
    KEYS,
    STATE_SUMS,
    STATE_BETA,
    STATE_T_HIGH,
    STATE_T_LOW,
    STATE_X_HIGH,
    STATE_X_LOW,
    TASKS,
    COUNTS,
    SUMS,
    STRENGTH,
    T_HIGH,
    T_LOW,
    M_HIGH,
    M_LOW,
    DIAGONAL,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    SP: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Grid (tasks, NV). Per task and value head [.., 64, 64]: T, and M = P T strictly below the diagonal, in pieces; DIAGONAL [.., 64]: P_ii.

    Of a chunk that stays open the state gets rows of T, x, sums and beta; nothing of it is read here but keys, which are left alone.
    """
    LP: tl.constexpr = KEYS.dtype.element_ty
    task = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    if task < tl.load(COUNTS):
        token = tl.load(TASKS + task * 4).to(tl.int64)
        slot = tl.load(TASKS + task * 4 + 1).to(tl.int64)
        begin = tl.load(TASKS + task * 4 + 2)
        end = tl.load(TASKS + task * 4 + 3)
        key_head = h // (NV // NK)
        c = tl.arange(0, 64)
        d = tl.arange(0, DK)
        step = (token * NK + key_head) * DK
        cache = KEYS + (slot * NK + key_head) * 64 * DK
        mine = slot * NV + h
        SUMS += task * 64 * NV + h
        STRENGTH += task * 64 * NV + h
        keys = rows_of(K + step, cache, c[:, None], d[None, :], begin, end, NK * DK, DK)
        sums = tl.load(SUMS + c * NV, mask=c < end, other=0.0)
        T = solve(
            K + step, cache, SUMS, STRENGTH, STATE_X_HIGH + mine * 16 * 64, STATE_X_LOW + mine * 16 * 64, keys, sums, begin, end, NK * DK,
            NV, DK, SP, LP, ROUNDS,
        )  # fmt: skip
        queries = tl.load(Q + step + c[:, None] * (NK * DK) + d[None, :], mask=((c >= begin) & (c < end))[:, None], other=0.0)
        seen = c[None, :] <= c[:, None]
        below = c[None, :] < c[:, None]
        P = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        P = tl.where(seen, P * tl.exp(tl.where(seen & (c < end)[:, None], sums[:, None] - sums[None, :], 0.0)), 0.0)
        diagonal = tl.sum(tl.where(c[None, :] == c[:, None], P, 0.0), 1)  # one term that is not zero
        M = tl.where(below, diagonal[:, None] * T - (-dot_wide(tl.where(below, P, 0.0), T, SP, LP)), 0.0)
        here = (task * NV + h) * 64 * 64 + c[:, None] * 64 + c[None, :]
        m_high, m_low = split(M, LP)
        t_high, t_low = split(T, LP)
        tl.store(T_HIGH + here, t_high)
        tl.store(M_HIGH + here, m_high)
        if SP == 2:
            tl.store(T_LOW + here, t_low)
            tl.store(M_LOW + here, m_low)
        tl.store(DIAGONAL + (task * NV + h) * 64 + c, diagonal)
        kept = (c < end) & (end < 64)
        place = mine * 64 * 64 + c[:, None] * 64 + c[None, :]
        tl.store(STATE_T_HIGH + place, t_high, mask=kept[:, None])
        if SP == 2:
            tl.store(STATE_T_LOW + place, t_low, mask=kept[:, None])
        tl.store(STATE_SUMS + mine * 64 + c, sums, mask=kept)
        tl.store(STATE_BETA + mine * 64 + c, tl.load(STRENGTH + c * NV, mask=c < end, other=0.0), mask=kept)


@triton.jit
def value_side_kernel(
    Q,
    K,
    V,
    KEYS,
    ANCHOR,
    ANCHOR_HIGH,
    ANCHOR_LOW,
    R_HIGH,
    R_LOW,
    LONGS,
    COUNTS,
    SUMS,
    STRENGTH,
    T_HIGH,
    T_LOW,
    M_HIGH,
    M_LOW,
    DIAGONAL,
    OUT,
    NK: tl.constexpr,
    NV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BV: tl.constexpr,
    SP: tl.constexpr,
    SS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid (DV / BV, NV, long rows): a row's chunks in order, for BV columns of a value head. PIECES: the anchor has a copy in the model's dtype.

    What it overwrites in the state, the anchor and rows of R, no other program reads. Its own loads come first: a barrier stands between.
    """
    LP: tl.constexpr = KEYS.dtype.element_ty
    tile = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2)
    if row < tl.load(COUNTS + 1):
        first_task = tl.load(LONGS + row * 6).to(tl.int64)
        token = tl.load(LONGS + row * 6 + 1).to(tl.int64)
        first = tl.load(LONGS + row * 6 + 2)
        last = tl.load(LONGS + row * 6 + 3)
        slot = tl.load(LONGS + row * 6 + 4).to(tl.int64)
        position = tl.load(LONGS + row * 6 + 5)
        key_head = h // (NV // NK)
        mine = slot * NV + h
        c = tl.arange(0, 64)
        d = tl.arange(0, DK)
        e = tile * BV + tl.arange(0, BV)
        cache = KEYS + (slot * NK + key_head) * 64 * DK
        anchored = mine * DK * DV + d[:, None] * DV + e[None, :]
        cached = mine * 64 * DV + c[:, None] * DV + e[None, :]
        S = tl.load(ANCHOR + anchored, mask=(d >= 0)[:, None] & (position > 0), other=0.0)
        earlier = (c < first)[:, None]
        old_high = tl.load(R_HIGH + cached, mask=earlier, other=0.0)
        old_low = old_high
        if SP == 2:
            old_low = tl.load(R_LOW + cached, mask=earlier, other=0.0)
        tl.debug_barrier()
        for chunk in range(tl.cdiv(last, 64)):
            begin = tl.where(chunk == 0, first, 0)
            end = tl.minimum(64, last - chunk * 64)
            new = (c >= begin) & (c < end)
            old = c < begin
            at = token + chunk * 64
            task = first_task + chunk
            step = (at * NK + key_head) * DK
            keys = rows_of(K + step, cache, c[:, None], d[None, :], begin, end, NK * DK, DK)
            queries = tl.load(Q + step + c[:, None] * (NK * DK) + d[None, :], mask=new[:, None], other=0.0)
            here = ((at + c)[:, None] * NV + h) * DV + e[None, :]
            values = tl.load(V + here, mask=new[:, None], other=0.0).to(tl.float32)
            sums = tl.load(SUMS + (task * 64 + c) * NV + h, mask=c < end, other=0.0)
            beta = tl.load(STRENGTH + (task * 64 + c) * NV + h, mask=c < end, other=0.0)
            square = (task * NV + h) * 64 * 64 + c[:, None] * 64 + c[None, :]
            t_high = tl.load(T_HIGH + square)
            m_high = tl.load(M_HIGH + square)
            if SP == 2:
                t_low = tl.load(T_LOW + square)
                m_low = tl.load(M_LOW + square)
            else:
                t_low = t_high
                m_low = m_high
            diagonal = tl.load(DIAGONAL + (task * NV + h) * 64 + c)
            decay = tl.exp(sums)
            R = beta[:, None] * (values - decay[:, None] * dot_state(keys, S, SS, LP))
            r_high, r_low = split(R, LP)
            r_high = tl.where(old[:, None], old_high, r_high)
            r_low = tl.where(old[:, None], old_low, r_low)
            recalled = dot_state(queries, S, SS, LP)
            U = dot_pieces(t_high, t_low, r_high, r_low, SP)
            W = dot_pieces(m_high, m_low, r_high, r_low, SP)
            whole = tl.load(SUMS + (task * 64 + end - 1) * NV + h)
            after = next_state(tl.trans(keys), tl.exp(whole - sums)[:, None] * U, S, tl.exp(whole), SP, LP)
            S = tl.where(end == 64, after, S)
            out = decay[:, None] * recalled - (-(diagonal[:, None] * R - (-W)))
            tl.store(OUT + here, out.to(OUT.dtype.element_ty), mask=new[:, None])
            kept = (new & (end < 64))[:, None]
            tl.store(R_HIGH + cached, r_high, mask=kept)
            if SP == 2:
                tl.store(R_LOW + cached, r_low, mask=kept)
        if last >= 64:
            tl.store(ANCHOR + anchored, S)
            if PIECES:
                s_high, s_low = split(S, LP)
                tl.store(ANCHOR_HIGH + anchored, s_high)
                if SS == 2:
                    tl.store(ANCHOR_LOW + anchored, s_low)


@triton.jit
def leave_keys_kernel(K, KEYS, LONGS, COUNTS, NK: tl.constexpr, DK: tl.constexpr):
    """Grid (long rows, NK). Keys of each row's open chunk, when nobody reads those of the chunk before any more."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    if row < tl.load(COUNTS + 1):
        token = tl.load(LONGS + row * 6 + 1).to(tl.int64)
        first = tl.load(LONGS + row * 6 + 2)
        last = tl.load(LONGS + row * 6 + 3)
        slot = tl.load(LONGS + row * 6 + 4).to(tl.int64)
        chunk = last // 64
        i = tl.arange(0, 64)[:, None]
        d = tl.arange(0, DK)[None, :]
        open_ = (i >= tl.where(chunk == 0, first, 0)) & (i < last % 64) & (d < DK)
        key = tl.load(K + ((token + chunk * 64 + i) * NK + head) * DK + d, mask=open_, other=0.0)
        tl.store(KEYS + ((slot * NK + head) * 64 + i) * DK + d, key, mask=open_)
