"""Sampling in Triton: the kernels alone. `sampler.py` launches them and says what they compute together; nothing here runs on the host.

Letters: n positions (one token is drawn at each), V vocabulary, a position's V tokens are cut into S chunks of CHUNK tokens, one program a chunk.

No result depends on the order of a reduction, hence none depends on n, on CHUNK or on any other tile. Scores are exact: fp64 sums and quotients of
numbers that were fp32, so they, their order and their ties are the reference's to the bit. Whatever is added over the vocabulary is an integer: a count,
or a probability relative to the best token's in units of 2^-40. Everything else is a maximum, or the lowest id of one.

The only rounding beyond the reference's is in the noise and in probabilities, both fp32, by the polynomials below instead of a device's
approximate `log` and `exp`: same bits in every compiled form, and known errors (2e-7 of a value).
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinfer.noise import PHILOX_KEY_STEPS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS

ROUNDS = tl.constexpr(PHILOX_ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(PHILOX_MULTIPLIERS[0]), tl.constexpr(PHILOX_MULTIPLIERS[1])
KEY_STEP_0, KEY_STEP_1 = tl.constexpr(PHILOX_KEY_STEPS[0]), tl.constexpr(PHILOX_KEY_STEPS[1])

# What `begin` found that a position needs; bits of MODE.
DRAWN, TOP_K, TOP_P = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


NO_ID = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))
UNIT = tl.constexpr(2.0**40)  # a weight of 2^40 is the best token's: 2^20 tokens of it still fit an int64
LOG2_E = tl.constexpr(1.4426950408889634)

# Errors of a position.
FINE, IS_NAN, IS_INFINITE, NONE_LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


# ---------------------------------------------------------------------------------------------------------------- noise


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 of uint32 tensors of one shape (counter) and uint32 scalars (key); twinfer.noise has the keying."""
    for _ in tl.static_range(ROUNDS):
        p0 = c0.to(tl.uint64) * MULTIPLIER_0
        p1 = c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def words_of(first, seed, sample, position, purpose, BLOCK: tl.constexpr):
    """Words of the token ids first .. first + BLOCK - 1, uint32 [BLOCK]; first and BLOCK are multiples of 4. seed is int64, the other scalars int32."""
    c0 = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    none = tl.full([BLOCK // 4], 0, tl.uint32)
    c1, c2, c3 = none + position.to(tl.uint32), none + sample.to(tl.uint32), none + purpose.to(tl.uint32)
    w0, w1, w2, w3 = philox(c0, c1, c2, c3, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def log_1p(f):
    """log(1 + f) for f from sqrt(1/2) - 1 to sqrt(2) - 1, fp32, to 8e-8 of the value: f - f^2 / 2 + f^3 P(f).

    P interpolates (log(1 + f) - f + f^2 / 2) / f^3 at the Chebyshev points of that interval.
    """
    p = tl.full(f.shape, -0.079027459025383, tl.float32)
    p = tl.fma(p, f, 0.12622320652008057)
    p = tl.fma(p, f, -0.12998183071613312)
    p = tl.fma(p, f, 0.14214496314525604)
    p = tl.fma(p, f, -0.166412815451622)
    p = tl.fma(p, f, 0.20001044869422913)
    p = tl.fma(p, f, -0.25000306963920593)
    p = tl.fma(p, f, 0.3333333134651184)
    z = f * f
    return f + tl.fma(f * z, p, -0.5 * z)


@triton.jit
def split_log(x):
    """(e, f) with x = 2^e (1 + f) and f in log_1p's interval, for normal positive fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23  # of sqrt(1/2)
    return e.to(tl.float32), (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def gumbel(words):
    """Standard Gumbel noise of uint32 words, fp32, by twinfer.noise's complement form: to 3e-7 plus half a unit of fp32's last place."""
    r = words.to(tl.int32, bitcast=True)
    upper = r < 0  # words from 2^31 on: w above 1/2, whose complement is exact
    t = ((r ^ (r >> 31)).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    high_e, high_f = split_log(tl.maximum(t, 5.9604644775390625e-08))  # 2^-24
    # log(1 - t): directly for 1 - t above sqrt(1/2), else as 2^-1 (1 + (1 - 2 t)); both arguments are exact
    small = t < 0.29
    e = tl.where(upper, high_e, tl.where(small, 0.0, -1.0))
    f = tl.where(upper, high_f, tl.where(small, -t, 1.0 - 2.0 * t))
    exponential = -tl.fma(e, 0.6931471805599453, log_1p(f))
    e, f = split_log(exponential)
    return -tl.fma(e, 0.6931471805599453, log_1p(f))


# --------------------------------------------------------------------------------------------------- scores and weights


@triton.jit
def scores_of(LOGITS, SCORES, ADJUSTED, i, t, inside, stride, V, ADJUST: tl.constexpr):
    """Scores of the tokens t of position i, fp64; -inf where not inside. From SCORES where `dense_kernel` made some for this position."""
    adjusted = False
    if ADJUST:
        adjusted = tl.load(ADJUSTED + i) != 0
    s = tl.load(LOGITS + i * stride + t, mask=inside & (not adjusted), other=-float("inf")).to(tl.float64)
    if ADJUST:
        s = tl.where(adjusted, tl.load(SCORES + i * V + t, mask=inside & adjusted, other=-float("inf")), s)
    return s


@triton.jit
def key_of(s):
    """int64 keys in the order of fp64 scores; equal scores, 0 and -0 among them, have equal keys."""
    bits = tl.where(s == 0.0, 0.0, s).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def weight_of(s, top, scale):
    """2^((s - top) scale) in units of 2^-40, int64, for s <= top: to 2e-7 of the value and half a unit. The best token has exactly UNIT."""
    y = (s - top) * scale
    y = tl.where(y > -64.0, y, -64.0)  # also where both are infinite
    e = y.to(tl.int32)
    f = (y - e).to(tl.float32)
    # 2^f for f from -1 to 0, interpolated at the Chebyshev points, to 1.5e-7 of the value with its rounding
    p = tl.full(f.shape, 0.00010932892473647371, tl.float32)
    p = tl.fma(p, f, 0.0012755400966852903)
    p = tl.fma(p, f, 0.009579859673976898)
    p = tl.fma(p, f, 0.05549093335866928)
    p = tl.fma(p, f, 0.24022433161735535)
    p = tl.fma(p, f, 0.6931470632553101)
    p = tl.fma(p, f, 1.0)
    return (p * ((e + 167) << 23).to(tl.float32, bitcast=True) + 0.5).to(tl.int64)  # 167: the bias of an exponent, 127, and 40


# ------------------------------------------------------------------------------------- bias, mask and penalties


@triton.jit(do_not_specialize=["stride", "V", "words"])
def dense_kernel(
    LOGITS, stride, ROWS, BIAS_INDPTR, SEEN_INDPTR, MASK, words, SCORES, ADJUSTED, V, MASKED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (n, S). ADJUSTED[i]: whether the row has a mask, a bias or a seen token; SCORES[i, :] = logits, -inf where the mask bans; only for such rows."""
    i = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    row = tl.load(ROWS + i)
    if row < 0:
        return
    entries = tl.load(BIAS_INDPTR + row + 1) - tl.load(BIAS_INDPTR + row) + tl.load(SEEN_INDPTR + row + 1) - tl.load(SEEN_INDPTR + row)
    adjusted = MASKED or entries > 0
    if first == 0:
        tl.store(ADJUSTED + i, adjusted.to(tl.int32))
    if not adjusted:
        return
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + tl.arange(0, BLOCK)
        inside = t < V
        s = tl.load(LOGITS + i * stride + t, mask=inside).to(tl.float64)
        if MASKED:
            word = tl.load(MASK + row.to(tl.int64) * words + t // 32, mask=inside, other=0)
            s = tl.where((word >> (t % 32)) & 1 == 0, -float("inf"), s)
        tl.store(SCORES + i * V + t, s, mask=inside)


@triton.jit(do_not_specialize=["V"])
def bias_kernel(ROWS, BIAS_INDPTR, BIAS_IDS, BIAS_VALUES, SCORES, V, BLOCK: tl.constexpr):
    """Grid (n, programs). SCORES[i, id] += value for the row's entries, whose ids are distinct."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + i)
    if row < 0:
        return
    end = tl.load(BIAS_INDPTR + row + 1)
    for at in range(tl.load(BIAS_INDPTR + row) + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        t = tl.load(BIAS_IDS + entry, mask=entry < end, other=-1)
        inside = (t >= 0) & (t < V)
        value = tl.load(BIAS_VALUES + entry, mask=inside, other=0.0).to(tl.float64)
        s = tl.load(SCORES + i * V + t, mask=inside, other=0.0)
        tl.store(SCORES + i * V + t, s + value, mask=inside)


@triton.jit(do_not_specialize=["V"])
def penalty_kernel(ROWS, SEEN_INDPTR, SEEN_IDS, SEEN_COUNTS, REPETITION, PRESENCE, FREQUENCY, SCORES, V, BLOCK: tl.constexpr):
    """Grid (n, programs). SCORES[i, id] = penalised, for the row's seen tokens, whose ids are distinct."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + i)
    if row < 0:
        return
    repetition = tl.load(REPETITION + row).to(tl.float64)
    presence = tl.load(PRESENCE + row).to(tl.float64)
    frequency = tl.load(FREQUENCY + row).to(tl.float64)
    end = tl.load(SEEN_INDPTR + row + 1)
    for at in range(tl.load(SEEN_INDPTR + row) + tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        entry = at + tl.arange(0, BLOCK)
        t = tl.load(SEEN_IDS + entry, mask=entry < end, other=-1)
        inside = (t >= 0) & (t < V)
        count = tl.load(SEEN_COUNTS + entry, mask=inside, other=0)
        s = tl.load(SCORES + i * V + t, mask=inside, other=0.0)
        s = tl.where(s > 0.0, s / repetition, s * repetition)
        # the products are exact up to counts of 2^29, so it makes no difference whether they are fused with the subtraction
        s = s - frequency * count.to(tl.float64) - presence * (count > 0).to(tl.float64)
        tl.store(SCORES + i * V + t, s, mask=inside)


# ------------------------------------------------------------------------------------------------- the best of each chunk


@triton.jit
def best_of(values, ids):
    """The largest of fp64 values and the lowest of its ids; NO_ID where all are -inf."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where((values == best) & (values > -float("inf")), ids, NO_ID), 0)


@triton.jit(do_not_specialize=["stride", "V"])
def stats_kernel(
    LOGITS, stride, SCORES, ADJUSTED, ROWS, BEST, BEST_ID, BAD, BAD_ID, V, ADJUST: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (n, S). Of a chunk: the best score and its lowest id; how many raw logits are NaN or +inf, and the first of them."""
    i = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    if tl.load(ROWS + i) < 0:
        return
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    best_id = tl.full([BLOCK], NO_ID, tl.int32)
    count = tl.full([BLOCK], 0, tl.int32)
    bad_id = tl.full([BLOCK], NO_ID, tl.int32)
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + lane
        inside = t < V
        x = tl.load(LOGITS + i * stride + t, mask=inside, other=0.0).to(tl.float32)
        bad = (x != x) | (x == float("inf"))
        count += bad.to(tl.int32)
        bad_id = tl.minimum(bad_id, tl.where(bad, t, NO_ID))
        s = scores_of(LOGITS, SCORES, ADJUSTED, i, t, inside, stride, V, ADJUST)
        better = s > best
        best = tl.where(better, s, best)
        best_id = tl.where(better, t, best_id)
    value, index = best_of(best, best_id)
    at = i * S + tl.program_id(1)
    tl.store(BEST + at, value)
    tl.store(BEST_ID + at, index)
    tl.store(BAD + at, tl.sum(count, 0))
    tl.store(BAD_ID + at, tl.min(bad_id, 0))


@triton.jit
def combined(BEST, BEST_ID, i, wanted, S: tl.constexpr, PADDED: tl.constexpr):
    """The best of a position's chunks and its lowest id; nothing is read unless wanted."""
    s = tl.arange(0, PADDED)
    inside = (s < S) & wanted
    values = tl.load(BEST + i * S + s, mask=inside, other=-float("inf"))
    return best_of(values, tl.load(BEST_ID + i * S + s, mask=inside, other=NO_ID))


@triton.jit
def num_bad(BAD, i, S: tl.constexpr, PADDED: tl.constexpr):
    """How many logits of a position are NaN or +inf."""
    s = tl.arange(0, PADDED)
    return tl.sum(tl.load(BAD + i * S + s, mask=s < S, other=0), 0)


@triton.jit(do_not_specialize=["V"])
def begin_kernel(
    ROWS, TEMPERATURE, TOP_KS, TOP_PS, BEST, BEST_ID, BAD, MODE, TOP, CUT, CUT_ID, V, S: tl.constexpr, PADDED: tl.constexpr
):
    """Grid (n,). MODE: what the position needs (nothing where it is greedy or has an error); TOP: its best score; a cut that keeps all tokens."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + i)
    if row < 0:
        tl.store(MODE + i, 0)
        return
    top, _ = combined(BEST, BEST_ID, i, True, S, PADDED)
    drawn = (tl.load(TEMPERATURE + row) > 0.0) & (num_bad(BAD, i, S, PADDED) == 0) & (top > -float("inf"))
    k = tl.load(TOP_KS + row)
    mode = tl.where((k > 0) & (k < V), TOP_K, 0) + tl.where(tl.load(TOP_PS + row) < 1.0, TOP_P, 0) + DRAWN
    tl.store(MODE + i, tl.where(drawn, mode, 0))
    tl.store(TOP + i, top)
    tl.store(CUT + i, LOWEST)
    tl.store(CUT_ID + i, NO_ID)


# ------------------------------------------------------------------------------------------------------------ filters


@triton.jit
def narrowed(
    BINS, STATE, BOUND, i, row, level, BY_MASS: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, RADIX: tl.constexpr
):
    """(the cut's digits above `level`, what remains of the target below them), for level 1 or more, from the bins of the level before.

    BINS [n, 2, S, RADIX] holds the weight of each digit in each chunk, of two levels in turn. The cut's digit is the largest whose weight, with that
    of all larger digits, reaches what remains of the target.
    """
    at = (i * LEVELS + level - 1) * 2
    base = tl.load(STATE + at)
    remaining = tl.load(STATE + at + 1)
    digit = tl.arange(0, RADIX)
    s = tl.arange(0, PADDED)
    table = BINS + (i * 2 + (level - 1) % 2) * S * RADIX
    weight = tl.sum(tl.load(table + s[:, None] * RADIX + digit[None, :], mask=(s < S)[:, None], other=0), 0)
    if level == 1:
        if BY_MASS:
            # the shortest beginning that reaches p of the whole: at least one token, even where p is 0
            target = tl.load(BOUND + row).to(tl.float64) * tl.sum(weight, 0).to(tl.float64)
            remaining = target.to(tl.int64)
            remaining = tl.maximum(remaining + (remaining.to(tl.float64) < target).to(tl.int64), 1)
        else:
            remaining = tl.load(BOUND + row).to(tl.int64)
    from_top = tl.cumsum(weight, 0, reverse=True)
    chosen = tl.sum((from_top >= remaining).to(tl.int32), 0) - 1
    return base + chosen, remaining - tl.sum(tl.where(digit > chosen, weight, 0), 0)


@triton.jit
def weights_at(s, t, inside, key, top, scale, cut, cut_id, BY_MASS: tl.constexpr):
    """What tokens count in a search: 1 each, or their probability where the cut so far keeps them."""
    if BY_MASS:
        w = tl.where(inside & ((key > cut) | ((key == cut) & (t <= cut_id))), weight_of(s, top, scale), 0)
    else:
        w = inside.to(tl.int64)
    return w


@triton.jit(do_not_specialize=["stride", "V", "level", "shift", "last_shift"])
def digit_kernel(
    LOGITS, stride, SCORES, ADJUSTED, ROWS, TEMPERATURE, BOUND, MODE, TOP, CUT, CUT_ID, BINS, STATE, V, level, shift, last_shift,
    ADJUST: tl.constexpr, BY_MASS: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, RADIX: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n, S). One level of a search: BINS[i, level mod 2, chunk, d] = weight of the chunk's tokens whose key continues the cut's digits with d.

    The cut's digits above this level are `base`: (key >> shift) - base is the digit, or outside 0..RADIX-1 for keys that left the search. Keys are
    compared with a cut after `>> last_shift`, which leaves the bits that the whole search reads. STATE[i, level] keeps (base, remaining); a level reads
    that of the one before, since chunk 0 writes it while other chunks still read.
    """
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    mode = tl.load(MODE + i)
    if (mode & (TOP_P if BY_MASS else TOP_K)) == 0:
        return
    row = tl.load(ROWS + i)
    if level == 0:
        base = tl.full((), -(RADIX // 2), tl.int64)  # keys are signed, so their first digit is from -RADIX/2 to RADIX/2 - 1
        remaining = tl.full((), 0, tl.int64)
    else:
        prefix, remaining = narrowed(BINS, STATE, BOUND, i, row, level, BY_MASS, S, PADDED, LEVELS, RADIX)
        base = prefix * RADIX
    if chunk == 0:
        tl.store(STATE + (i * LEVELS + level) * 2, base)
        tl.store(STATE + (i * LEVELS + level) * 2 + 1, remaining)
    top = tl.load(TOP + i)
    scale = tl.full((), LOG2_E, tl.float64) / tl.load(TEMPERATURE + row).to(tl.float64)
    cut = tl.load(CUT + i)
    cut_id = tl.load(CUT_ID + i)
    digit = tl.arange(0, RADIX)
    lanes = tl.full([RADIX, BLOCK], 0, tl.int64)
    first = chunk * CHUNK
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + tl.arange(0, BLOCK)
        inside = t < V
        s = scores_of(LOGITS, SCORES, ADJUSTED, i, t, inside, stride, V, ADJUST)
        key = key_of(s)
        w = weights_at(s, t, inside, key >> last_shift, top, scale, cut, cut_id, BY_MASS)
        d = tl.minimum(tl.maximum((key >> shift) - base, -1), RADIX).to(tl.int32)
        lanes += tl.where(d[None, :] == digit[:, None], w[None, :], 0)
    tl.store(BINS + ((i * 2 + level % 2) * S + chunk) * RADIX + digit, tl.sum(lanes, 1))


@triton.jit(do_not_specialize=["stride", "V", "last", "last_shift"])
def settle_kernel(
    LOGITS, stride, SCORES, ADJUSTED, ROWS, TEMPERATURE, BOUND, MODE, TOP, CUT, CUT_ID, BINS, STATE, V, last, last_shift,
    ADJUST: tl.constexpr, BY_MASS: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, RADIX: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n,). The end of a search: the last digit of the cut and, of the tokens that tie there, the id at which the target is reached."""
    i = tl.program_id(0).to(tl.int64)
    mode = tl.load(MODE + i)
    if (mode & (TOP_P if BY_MASS else TOP_K)) == 0:
        return
    row = tl.load(ROWS + i)
    found, remaining = narrowed(BINS, STATE, BOUND, i, row, last + 1, BY_MASS, S, PADDED, LEVELS, RADIX)
    # the chunk in which the tied tokens, by id, reach what remains
    digit = found - tl.load(STATE + (i * LEVELS + last) * 2)
    c = tl.arange(0, PADDED)
    weight = tl.load(BINS + ((i * 2 + last % 2) * S + c) * RADIX + digit, mask=c < S, other=0)
    short = tl.cumsum(weight, 0) < remaining
    chunk = tl.minimum(tl.sum(short.to(tl.int32), 0), S - 1)
    remaining -= tl.sum(tl.where(short, weight, 0), 0)
    top = tl.load(TOP + i)
    scale = tl.full((), LOG2_E, tl.float64) / tl.load(TEMPERATURE + row).to(tl.float64)
    cut = tl.load(CUT + i)
    cut_id = tl.load(CUT_ID + i)
    id = tl.full((), NO_ID, tl.int32)
    first = chunk * CHUNK
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + tl.arange(0, BLOCK)
        inside = t < V
        s = scores_of(LOGITS, SCORES, ADJUSTED, i, t, inside, stride, V, ADJUST)
        key = key_of(s) >> last_shift
        w = tl.where(key == found, weights_at(s, t, inside, key, top, scale, cut, cut_id, BY_MASS), 0)
        reached = (tl.cumsum(w, 0) >= remaining) & (w > 0)
        id = tl.minimum(id, tl.min(tl.where(reached, t, NO_ID), 0))
        remaining -= tl.sum(w, 0)
    tl.store(CUT + i, found)
    tl.store(CUT_ID + i, id)


# --------------------------------------------------------------------------------------------------------------- draw


@triton.jit(do_not_specialize=["stride", "V", "last_shift", "purpose"])
def draw_kernel(
    LOGITS, stride, SCORES, ADJUSTED, ROWS, POSITIONS, TEMPERATURE, MIN_P, SEED, SAMPLE, MODE, TOP, CUT, CUT_ID, DRAW, DRAW_ID, V, last_shift, purpose,
    ADJUST: tl.constexpr, S: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n, S). Of a chunk's kept tokens, the best score / temperature + noise and its lowest id."""
    i = tl.program_id(0).to(tl.int64)
    if tl.load(MODE + i) == 0:
        return
    row = tl.load(ROWS + i)
    temperature = tl.load(TEMPERATURE + row).to(tl.float64)
    min_p = tl.load(MIN_P + row).to(tl.float64)
    lowest = tl.where(min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), -float("inf"))
    top = tl.load(TOP + i) / temperature
    cut = tl.load(CUT + i)
    cut_id = tl.load(CUT_ID + i)
    seed = tl.load(SEED + row)
    sample = tl.load(SAMPLE + row)
    position = tl.load(POSITIONS + i)
    best = tl.full([BLOCK], -float("inf"), tl.float64)
    best_id = tl.full([BLOCK], NO_ID, tl.int32)
    first = tl.program_id(1) * CHUNK
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + tl.arange(0, BLOCK)
        inside = t < V
        s = scores_of(LOGITS, SCORES, ADJUSTED, i, t, inside, stride, V, ADJUST)
        key = key_of(s) >> last_shift
        s = s / temperature
        allowed = inside & ((key > cut) | ((key == cut) & (t <= cut_id))) & (s - top >= lowest)
        s += gumbel(words_of(at, seed, sample, position, purpose, BLOCK)).to(tl.float64)
        better = allowed & (s > best)
        best = tl.where(better, s, best)
        best_id = tl.where(better, t, best_id)
    value, index = best_of(best, best_id)
    tl.store(DRAW + i * S + tl.program_id(1), value)
    tl.store(DRAW_ID + i * S + tl.program_id(1), index)


@triton.jit(do_not_specialize=["stride"])
def finish_kernel(
    LOGITS, stride, ROWS, TEMPERATURE, SLOTS, BEST, BEST_ID, BAD, BAD_ID, DRAW, DRAW_ID, TOKENS, ERRORS, FEED,
    ANY_DRAWN: tl.constexpr, FEEDS: tl.constexpr, S: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (n,). TOKENS[i], ERRORS[i] = (code, first such id, how many), FEED[slot of the row] = token where the row's slot is not negative."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + i)
    if row < 0:
        tl.store(TOKENS + i, 0)
        tl.store(ERRORS + i * 3, FINE)
        tl.store(ERRORS + i * 3 + 1, 0)
        tl.store(ERRORS + i * 3 + 2, 0)
        return
    _, token = combined(BEST, BEST_ID, i, True, S, PADDED)
    bad = num_bad(BAD, i, S, PADDED)
    code = tl.where(token == NO_ID, NONE_LEFT, FINE)
    bad_id = 0
    if bad > 0:
        s = tl.arange(0, PADDED)
        bad_id = tl.min(tl.load(BAD_ID + i * S + s, mask=s < S, other=NO_ID), 0)
        x = tl.load(LOGITS + i * stride + bad_id).to(tl.float32)
        code = tl.where(x != x, IS_NAN, IS_INFINITE)
    if ANY_DRAWN:
        drawn = (code == FINE) & (tl.load(TEMPERATURE + row) > 0.0)
        _, choice = combined(DRAW, DRAW_ID, i, drawn, S, PADDED)
        token = tl.where(drawn, choice, token)
    token = tl.where(code == FINE, token, 0)
    tl.store(TOKENS + i, token)
    tl.store(ERRORS + i * 3, code)
    tl.store(ERRORS + i * 3 + 1, bad_id)
    tl.store(ERRORS + i * 3 + 2, bad)
    if FEEDS:
        slot = tl.load(SLOTS + row)
        if slot >= 0:
            tl.store(FEED + slot, token)


# ------------------------------------------------------------------------------------------------- log probabilities


@triton.jit
def packed_of(x, t):
    """int64 keys of fp32 logits x of tokens t: larger for a larger logit, and of equal logits for the lower id; never two alike."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) + (t ^ NO_ID)


@triton.jit
def unpacked(packed):
    """(logit in fp64, token id) of `packed_of` keys."""
    key = (packed >> 32).to(tl.int32)
    x = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return x.to(tl.float64), ((packed & NO_ID) ^ NO_ID).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "V", "num_top"])
def peaks_kernel(LOGITS, stride, ROWS, ASKED, PEAKS, BAD, V, num_top, S: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Grid (n, S). PEAKS[i, chunk, :] = packed keys of the chunk's max(1, num_top) best raw logits, best first; BAD: how many are NaN or +inf."""
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(ROWS + i)
    if row < 0:
        return
    if tl.load(ASKED + row) < 0:
        return
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = t < V
    x = tl.load(LOGITS + i * stride + t, mask=inside, other=0.0).to(tl.float32)
    bad = (x != x) | (x == float("inf"))
    tl.store(BAD + i * S + chunk, tl.sum(bad.to(tl.int32), 0))
    packed = tl.where(inside, packed_of(x, t), LOWEST)
    for k in range(tl.maximum(num_top, 1)):
        best = tl.max(packed, 0)
        tl.store(PEAKS + (i * S + chunk) * WIDTH + k, best)
        packed = tl.where(packed == best, LOWEST, packed)


@triton.jit
def highest(PEAKS, i, S: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr):
    """A position's largest logit, fp64."""
    s = tl.arange(0, PADDED)
    top, _ = unpacked(tl.max(tl.load(PEAKS + (i * S + s) * WIDTH, mask=s < S, other=LOWEST), 0))
    return top


@triton.jit(do_not_specialize=["stride", "V"])
def mass_kernel(
    LOGITS, stride, ROWS, ASKED, PEAKS, MASS, V, S: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (n, S). MASS[i, chunk] = sum over the chunk of exp(logit - largest logit), in units of 2^-40."""
    i = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = tl.load(ROWS + i)
    if row < 0:
        return
    if tl.load(ASKED + row) < 0:
        return
    top = highest(PEAKS, i, S, PADDED, WIDTH)
    lanes = tl.full([BLOCK], 0, tl.int64)
    first = chunk * CHUNK
    for at in range(first, tl.minimum(first + CHUNK, V), BLOCK):
        t = at + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + i * stride + t, mask=t < V, other=-float("inf")).to(tl.float64)
        lanes += weight_of(x, top, tl.full((), LOG2_E, tl.float64))
    tl.store(MASS + i * S + chunk, tl.sum(lanes, 0))


@triton.jit(do_not_specialize=["stride", "V", "num_top", "out_width"])
def report_kernel(
    LOGITS, stride, ROWS, ASKED, TARGETS, PEAKS, BAD, MASS, LOGPROB, TOP_IDS, TOP_LOGPROBS, V, num_top, out_width,
    S: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Grid (n,). LOGPROB[i] of the position's target, TOP_IDS and TOP_LOGPROBS[i, :num_top] of the best, in fp64; NaN where a logit is NaN or +inf."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ROWS + i)
    if row < 0:
        return
    if tl.load(ASKED + row) < 0:
        return
    s = tl.arange(0, PADDED)
    mass = tl.sum(tl.load(MASS + i * S + s, mask=s < S, other=0), 0)
    top = highest(PEAKS, i, S, PADDED, WIDTH)
    total = top + tl.log(mass.to(tl.float64) / UNIT)
    if (num_bad(BAD, i, S, PADDED) > 0) | (top == -float("inf")):
        total = tl.full((), float("nan"), tl.float64)
    target = tl.load(TARGETS + i)
    known = (target >= 0) & (target < V)
    x = tl.load(LOGITS + i * stride + target, mask=known, other=float("nan")).to(tl.float64)
    tl.store(LOGPROB + i, x - total)
    # the first num_top of each chunk, so a table [S, num_top] in rows of WIDTH
    c = tl.arange(0, CANDIDATES)
    packed = tl.load(PEAKS + i * S * WIDTH + c, mask=(c < S * WIDTH) & (c % WIDTH < num_top), other=LOWEST)
    for k in range(num_top):
        best = tl.max(packed, 0)
        packed = tl.where(packed == best, LOWEST, packed)
        value, index = unpacked(best)
        tl.store(TOP_IDS + i * out_width + k, index)
        tl.store(TOP_LOGPROBS + i * out_width + k, value - total)
