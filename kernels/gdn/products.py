"""Products of fp32 values in pieces: the parts of the open-chunk arithmetic that all of its kernels share. No kernel of its own.

`x + tl.dot(a, b)` must be written nowhere in this folder: Triton turns it into dot(a, b, acc=x), which rounds otherwise. `x - (-dot)` stays.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x, LP: tl.constexpr):
    """Two pieces of fp32 x in dtype LP; the second is zero for float32."""
    high = x.to(LP)
    return high, (x - high.to(tl.float32)).to(LP)


@triton.jit
def dot_pieces(a_high, a_low, b_high, b_low, SP: tl.constexpr):
    """a b for both operands in pieces: one accumulator takes low high, high low, high high."""
    if SP == 2:
        acc = tl.dot(a_low, b_high, input_precision="ieee")
        acc = tl.dot(a_high, b_low, acc, input_precision="ieee")
        return tl.dot(a_high, b_high, acc, input_precision="ieee")
    else:
        return tl.dot(a_high, b_high, input_precision="ieee")


@triton.jit
def dot_wide(a, b, SP: tl.constexpr, LP: tl.constexpr):
    """a b for both operands in fp32."""
    a_high, a_low = split(a, LP)
    b_high, b_low = split(b, LP)
    return dot_pieces(a_high, a_low, b_high, b_low, SP)


@triton.jit
def dot_state(a, state, SS: tl.constexpr, LP: tl.constexpr):
    """a state for `a` exact in LP and the state in fp32: an accumulator a piece, so that it may as well be read in parts."""
    high, low = split(state, LP)
    if SS == 2:
        return tl.dot(a, low, input_precision="ieee") - (-tl.dot(a, high, input_precision="ieee"))
    else:
        return tl.dot(a, high, input_precision="ieee")


@triton.jit
def next_state(keys, weighted, state, decay, SP: tl.constexpr, LP: tl.constexpr):
    """decay state + keys [dk, 64] weighted [64, dv]: the accumulator starts from the decayed state, then takes the low and the high piece."""
    high, low = split(weighted, LP)
    acc = state * decay
    if SP == 2:
        acc = tl.dot(keys, low, acc, input_precision="ieee")
    return tl.dot(keys, high, acc, input_precision="ieee")


@triton.jit
def row_of(x, r, R: tl.constexpr):
    """Row r of x [R, n]: a sum in which every other term is zero, so exact in any order."""
    return tl.sum(tl.where((tl.arange(0, R) == r)[:, None], x, 0.0), 0)
