"""Probe kernel of y = x W^T with a fixed K order, and what its bits are compared over. Not engine code.

Maths: y[m, n] = sum_k x[m, k] w[n, k], fp32 accumulation, one rounding to the output dtype.
Reduction order: K is cut into S equal ranges; each range is one chain of tl.dot, k ascending, from zero; the S sums are added in index
order, ((a0 + a1) + a2) + a3. S belongs to the weight shape; token tile, BN, BK, warps, stages, operand order and TMA must not show.

Forms: CHAIN S = 1. SPREAD one program a range, fp32 partials, the last program to arrive adds them in index order (small M).
SERIAL one program walks the ranges one after another with a second accumulator (large M; no traffic). STASH the same, but the sum
so far waits in device memory (L2) while a range is computed, so that it takes no registers.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .measure import Record, attempt, graph_us

CHAIN, SPREAD, SERIAL, STASH = 0, 1, 2, 3
FORMS = ("chain", "spread", "serial", "stash")


@triton.jit
def dots(
    X,
    W,
    m0,
    n0,
    kbeg,
    kend,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    IP: tl.constexpr,
):
    """One chain over kbeg..kend; [BN, BM] if SWAP (the weight is the first operand, so that its rows fill wgmma's 64), else [BM, BN]."""
    rk = tl.arange(0, BK)
    if TMA == 0:
        rm = m0 + tl.arange(0, BM)
        rn = n0 + tl.arange(0, BN)
        xp = X + rm.to(tl.int64)[:, None] * K + rk[None, :]
        wp = W + tl.minimum(rn, N - 1).to(tl.int64)[:, None] * K + rk[None, :]
        there = (rm < M)[:, None]
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    for k in range(kbeg, kend, BK):
        if TMA:
            x = X.load([m0, k])
            w = W.load([n0, k])
        else:
            x = tl.load(xp + k, mask=there, other=0.0)
            w = tl.load(wp + k)
        if SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=IP)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=IP)
    return acc


@triton.jit(do_not_specialize=["M", "S"])
def matmul_kernel(
    X,
    W,
    Y,
    WS,
    CNT,
    M,
    N,
    K,
    KS,
    S,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    IP: tl.constexpr,
):
    """Grid (tiles, S or 1). Tiles run in groups of GROUP token tiles, so that a group's weights are read from L2.
    Tile table: see `tiles`; token tile 16 (M <= 16), 64 (M <= 64), 128 (larger)."""
    pid = tl.program_id(0)
    nm = tl.cdiv(M, BM)
    nn = tl.cdiv(N, BN)
    width = GROUP * nn
    first = pid // width * GROUP
    rows = tl.minimum(nm - first, GROUP)
    pm = first + pid % width % rows
    pn = pid % width // rows
    m0 = pm * BM
    n0 = pn * BN
    rm = (m0 + tl.arange(0, BM)).to(tl.int64)
    rn = n0 + tl.arange(0, BN)
    if SWAP:
        at = rm[None, :] * N + rn[:, None]
        keep = (rm < M)[None, :] & (rn < N)[:, None]
    else:
        at = rm[:, None] * N + rn[None, :]
        keep = (rm < M)[:, None] & (rn < N)[None, :]
    if FORM == 0:
        acc = dots(X, W, m0, n0, 0, K, M, N, K, BM, BN, BK, SWAP, TMA, IP)
        tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)
    elif FORM == 2:
        tot = dots(X, W, m0, n0, 0, KS, M, N, K, BM, BN, BK, SWAP, TMA, IP)
        for s in range(1, S):
            tot += dots(X, W, m0, n0, s * KS, s * KS + KS, M, N, K, BM, BN, BK, SWAP, TMA, IP)
        tl.store(Y + at, tot.to(Y.dtype.element_ty), mask=keep)
    elif FORM == 3:
        acc = dots(X, W, m0, n0, 0, KS, M, N, K, BM, BN, BK, SWAP, TMA, IP)
        for s in range(1, S):
            tl.store(WS + at, acc, mask=keep)
            acc = dots(X, W, m0, n0, s * KS, s * KS + KS, M, N, K, BM, BN, BK, SWAP, TMA, IP)
            tl.debug_barrier()
            acc = tl.load(WS + at, mask=keep, other=0.0) + acc
        tl.store(Y + at, acc.to(Y.dtype.element_ty), mask=keep)
    else:
        ps = tl.program_id(1)
        size = M.to(tl.int64) * N
        acc = dots(X, W, m0, n0, ps * KS, ps * KS + KS, M, N, K, BM, BN, BK, SWAP, TMA, IP)
        tl.store(WS + ps * size + at, acc, mask=keep)
        tl.debug_barrier()
        if tl.atomic_add(CNT + pid, 1, sem="acq_rel") == S - 1:
            tot = tl.load(WS + at, mask=keep, other=0.0, cache_modifier=".cg")
            for s in range(1, S):
                tot += tl.load(WS + s * size + at, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(Y + at, tot.to(Y.dtype.element_ty), mask=keep)
            tl.store(CNT + pid, 0)


@dataclass(frozen=True)
class Tile:
    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    tma: bool = False
    group: int = 8

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk} w{self.warps} s{self.stages}{' swap' * self.swap}{' tma' * self.tma}"


# Small token tiles (weights stream once), then large ones. 16-token tiles without swap run on mma.sync, all others on wgmma.
SMALL = [
    Tile(16, 64, 128, 4, 4, swap=True),
    Tile(16, 64, 256, 4, 3, swap=True),
    Tile(16, 128, 64, 8, 4, swap=True),
    Tile(16, 128, 128, 8, 3),
    Tile(16, 64, 64, 4, 6, swap=True),
    Tile(16, 32, 128, 4, 6),
    Tile(16, 32, 256, 4, 5),
    Tile(16, 16, 256, 4, 5),
    Tile(16, 32, 256, 8, 5),
    Tile(16, 128, 128, 8, 3, tma=True),
    Tile(16, 64, 128, 4, 6, swap=True),
    Tile(16, 16, 256, 4, 10),
    Tile(16, 16, 512, 4, 6),
    Tile(16, 32, 256, 4, 8),
    Tile(16, 32, 512, 4, 4),
    Tile(16, 64, 128, 4, 10, swap=True),
    Tile(16, 64, 256, 4, 5, swap=True),
    Tile(16, 16, 256, 2, 10),
]
MIDDLE = [
    Tile(64, 64, 128, 4, 4, swap=True),
    Tile(64, 64, 64, 4, 5, tma=True),
    Tile(64, 128, 64, 4, 4, tma=True),
    Tile(64, 128, 64, 4, 3),
    Tile(64, 64, 128, 4, 3),
    Tile(64, 32, 128, 4, 4),
    Tile(64, 32, 256, 4, 3),
    Tile(64, 32, 128, 4, 6, tma=True),
    Tile(32, 64, 128, 4, 5, swap=True),
    Tile(32, 64, 256, 4, 3, swap=True),
    Tile(32, 32, 256, 4, 4),
    Tile(64, 32, 128, 4, 8, tma=True),
    Tile(64, 32, 256, 4, 4, tma=True),
    Tile(64, 64, 128, 4, 6, tma=True),
    Tile(64, 64, 64, 4, 1),
]
BETWEEN = [
    Tile(128, 64, 64, 4, 6, tma=True),
    Tile(128, 64, 128, 4, 4, tma=True),
    Tile(128, 64, 64, 8, 6, tma=True),
    Tile(128, 32, 128, 4, 5, tma=True),
]
LARGE = [
    Tile(128, 128, 64, 8, 3),
    Tile(128, 128, 64, 4, 3, tma=True),
    Tile(128, 256, 64, 8, 3, tma=True),
    Tile(128, 256, 64, 8, 4, tma=True),
    Tile(128, 128, 128, 8, 2, swap=True),
    Tile(64, 256, 64, 4, 4, tma=True),
    Tile(128, 128, 64, 8, 4, tma=True),
    Tile(256, 128, 64, 8, 3, tma=True),
]
TINY = [Tile(16, 32, 16, 4, 2), Tile(16, 16, 32, 4, 2, swap=True), Tile(32, 16, 16, 4, 2)]  # interpreter
IEEE = [Tile(16, 32, 32, 4, 2), Tile(16, 64, 32, 4, 2, swap=True), Tile(32, 32, 64, 4, 2), Tile(64, 64, 32, 8, 3), Tile(64, 64, 16, 8, 2)]

# merged weight shapes (N, K)
SHAPES = {
    "qwen3-0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "lm_head": (151936, 1024)},
    "qwen3-4b": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728), "lm_head": (151936, 2560)},
    "qwen3-32b": {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600), "lm_head": (151936, 5120)},
    "qwen3-8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288), "lm_head": (151936, 4096)},
}


def constants(tile: Tile, form: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        SWAP=int(tile.swap),
        TMA=int(tile.tma),
        FORM=form,
        GROUP=tile.group,
        IP="ieee" if dtype == torch.float32 else "tf32",
    )


class Scratch:
    """Partials and arrival counters, grown as needed; the kernel leaves the counters at zero."""

    def __init__(self, device: str) -> None:
        self.ws = torch.empty(1, dtype=torch.float32, device=device)
        self.cnt = torch.zeros(1 << 20, dtype=torch.int32, device=device)

    def fit(self, n: int) -> None:
        if self.ws.numel() < n:
            self.ws = torch.empty(n, dtype=torch.float32, device=self.ws.device)


def matmul(
    x: torch.Tensor, w: torch.Tensor, tile: Tile, form: int, splits: int, scratch: Scratch, out: torch.Tensor | None = None, **opts: Any
) -> torch.Tensor:
    (m, k), n = x.shape, w.shape[0]
    y = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    if form in (SPREAD, STASH):
        scratch.fit((splits if form == SPREAD else 1) * m * n)
    xa: Any = x
    wa: Any = w
    if tile.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        xa = TensorDescriptor.from_tensor(x, [tile.bm, tile.bk])
        wa = TensorDescriptor.from_tensor(w, [tile.bn, tile.bk])
    grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn), splits if form == SPREAD else 1)
    matmul_kernel[grid](
        xa,
        wa,
        y,
        scratch.ws,
        scratch.cnt,
        m,
        n,
        k,
        k // splits,
        splits,
        **constants(tile, form, x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **opts,
    )
    return y


def forms(tile: Tile, splits: int, m: int, n: int, k: int) -> list[int]:
    """Forms worth comparing. BK must divide a range (it would run into the next one); partials are kept under 1 GiB."""
    if k // splits % tile.bk:
        return []
    if splits == 1:
        return [CHAIN]
    spread = [SPREAD] if splits * m * n * 4 <= 1 << 30 else []
    stash = [STASH] if tile.bm >= 64 and m * n * 4 <= 1 << 30 else []
    return [SERIAL, *spread, *stash]


SIZES = (1, 2, 3, 5, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000, 2048, 8192)
TIMED_SIZES = (1, 16, 64, 128, 256, 2048, 8192)


def count_off(y: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    kind = torch.int16 if y.element_size() == 2 else torch.int32
    return (y.view(kind) != ref[: y.shape[0]].view(kind)).sum()


def compare(
    model: str, name: str, x: torch.Tensor, w: torch.Tensor, tiles: list[Tile], sizes: tuple[int, ...], rec: Record, scratch: Scratch
) -> list[str]:
    """Every (tile, form, M) against one serial large-tile product, per split count; cuBLAS against each of those."""
    n, lines, refs = w.shape[0], [], {}
    for s in (1, 2, 4):
        first = tiles[-1] if w.dtype == torch.float32 else LARGE[0]
        refs[s] = matmul(x, w, first, CHAIN if s == 1 else SERIAL, s, scratch)
        marks, off = [], []
        for t, m in product(tiles, sizes):
            if (m > 1024 and t.bm < 64) or (m > 1024 and n > 100_000 and t not in LARGE[:3]):
                continue
            for form in forms(t, s, m, n, w.shape[1]):
                marks.append((t, m, form))
                try:
                    off.append(count_off(matmul(x[:m], w, t, form, s, scratch), refs[s]))
                except Exception as e:  # told, not fatal
                    off.append(torch.tensor(-1, device=x.device))
                    print("not run:", t, m, FORMS[form], type(e).__name__, str(e)[:100], flush=True)
        bad = [(str(t), m, FORMS[f], c) for (t, m, f), c in zip(marks, torch.stack(off).tolist(), strict=True) if c]
        rec.add(
            f"probe_matmul_bits_{name}",
            "equal_products",
            len(marks) - len(bad),
            "products",
            model=model,
            law2=not bad,
            digest=True,
            splits=s,
            of=len(marks),
            unequal=bad[:40],
        )
        lines.append(f"{model} {name:8s} S={s}: {len(marks) - len(bad)}/{len(marks)} equal" + (f"; first unequal {bad[:4]}" if bad else ""))
    if w.dtype == torch.bfloat16:
        lines += compare_cublas(model, name, x, w, refs, rec)
    else:
        off = {s: [m for m in sizes if int(count_off(F.linear(x[:m], w), refs[s]))] for s in refs}
        lines.append(
            f"    cuBLAS fp32 (TF32 off) differs at M, S=1 {brief(off[1], sizes)}  S=2 {brief(off[2], sizes)}  S=4 {brief(off[4], sizes)}"
        )
    return lines


def compare_cublas(model: str, name: str, x: torch.Tensor, w: torch.Tensor, refs: dict[int, torch.Tensor], rec: Record) -> list[str]:
    """cuBLAS at (nearly) every M against ours of each split count; eager against graph; and S products over ranges of K in fp32, added."""
    n, lines = w.shape[0], []
    sizes = tuple(
        m for m in (*range(1, 513), *range(513, 1024, 37), *range(1024, 8193, 128), 1537, 3001, 5003, 8191) if m <= 1024 or n < 100_000
    )
    for reduced in (True, False):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        offs: dict[int, list[torch.Tensor]] = {s: [] for s in refs}
        for m in sizes:
            y = F.linear(x[:m], w)
            for s, ref in refs.items():
                offs[s].append(count_off(y, ref))
        unlike = {s: [m for m, c in zip(sizes, torch.stack(o).tolist(), strict=True) if c] for s, o in offs.items()}
        none = [m for m in sizes if all(m in u for u in unlike.values())]
        rec.add(
            f"probe_matmul_bits_{name}",
            "sizes_unlike_ours",
            {str(s): spans(u, sizes) for s, u in unlike.items()},
            "sizes",
            model=model,
            engine="cublas",
            law2=not unlike[1],
            digest=True,
            reduced_precision_reduction=reduced,
            sizes=len(sizes),
            unlike_s1=len(unlike[1]),
            like_none=spans(none, sizes),
        )
        lines.append(
            f"    cuBLAS (reduced {reduced}, {len(sizes)} M) differs from ours, S=1: {spans(unlike[1], sizes)};"
            f"  S=2: {spans(unlike[2], sizes)};"
            f"  S=4: {spans(unlike[4], sizes)};  all three: {spans(none, sizes)}"
        )
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    graph_off = []
    for m in (1, 16, 64, 200, 256, 1000):
        y, e = torch.empty(m, n, dtype=torch.bfloat16, device=x.device), F.linear(x[:m], w)
        graph_us([lambda m=m, y=y: torch.mm(x[:m], w.t(), out=y)], 1)
        graph_off += [m] * bool(count_off(y, e))
    lines.append(f"    cuBLAS in a graph differs from eager at M {graph_off}")
    if name in ("o", "down"):
        for s in (2, 4):
            off = []
            for m in (1, 16, 64, 256, 512, 1000, 2048, 4096, 8192):
                off += [m] * bool(count_off(in_ranges(x[:m], w, s), refs[s]))
            us = graph_us([lambda s=s: in_ranges(x, w, s)] * 2)
            rec.add(
                f"probe_matmul_{name}_m8192", "time_in_ranges", us, "us", model=model, engine="cublas", digest=True, splits=s, law2=not off
            )
            lines.append(f"    cuBLAS over {s} ranges of K, fp32 out, added: differs at M {off}; M=8192 {us:.0f} us")
    return lines


def in_ranges(x: torch.Tensor, w: torch.Tensor, s: int) -> torch.Tensor:
    step = w.shape[1] // s
    tot = None
    for i in range(0, w.shape[1], step):
        part = torch.mm(x[:, i : i + step], w[:, i : i + step].t(), out_dtype=torch.float32)
        tot = part if tot is None else tot.add_(part)
    return tot.to(torch.bfloat16)


def spans(off: list[int], sizes: tuple[int, ...]) -> str:
    """Sizes as ranges of neighbours in `sizes`."""
    if len(off) == len(sizes):
        return "all"
    at_, out = {m: i for i, m in enumerate(sorted(sizes))}, []
    for m in sorted(off):
        if out and at_[m] == at_[out[-1][1]] + 1:
            out[-1][1] = m
        else:
            out.append([m, m])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in out) or "none"


def brief(off: list[int], sizes: tuple[int, ...]) -> str:
    return "all" if len(off) == len(sizes) else str(off)


def times(model: str, name: str, x: torch.Tensor, w: torch.Tensor, rec: Record, scratch: Scratch) -> list[str]:
    n, k = w.shape
    copies = [w] + [w.clone() for _ in range(min(24, max(1, 250_000_000 // (n * k * 2))))][: 0 if n > 100_000 else 24]
    lines = []
    for m in TIMED_SIZES:
        if m > 256 and n > 100_000:
            continue
        y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        reps = copies if m <= 256 else copies[:2]
        xs = x[:m]
        base = graph_us([lambda c=c: torch.mm(xs, c.t(), out=y) for c in reps])
        rec.add(f"probe_matmul_{name}_m{m}", "time", base, "us", model=model, engine="cublas", digest=True)
        tiles = SMALL if m <= 16 else MIDDLE[:-1] if m <= 64 else LARGE + (MIDDLE[:-1] + BETWEEN if m <= 256 else [])
        best: dict[int, tuple[float, str]] = {}
        for t, s in product(tiles, (1, 2, 4)):
            if k // s % t.bk:
                continue
            for form in [CHAIN] if s == 1 else [SPREAD] if m <= 64 else [SERIAL, STASH] if m > 256 else [SPREAD, SERIAL]:
                us = attempt(lambda t=t, f=form, s=s: graph_us([lambda c=c: matmul(xs, c, t, f, s, scratch, y) for c in reps]))
                if us:
                    rec.add(f"probe_matmul_{name}_m{m}", "time", us, "us", model=model, splits=s, tile=str(t), form=FORMS[form])
                    best[s] = min(best.get(s, (1e9, "")), (us, f"{t} {FORMS[form]}"))
        for s, (us, what) in best.items():
            rec.add(
                f"probe_matmul_{name}_m{m}", "best_time", us, "us", model=model, digest=s == 1 or name in ("o", "down"), splits=s, tile=what
            )
        rate = f"{2 * m * n * k / base / 1e6:.0f} TFLOP/s" if m > 256 else f"{n * k * 2 / base / 1e6:.2f} TB/s"
        lines.append(
            f"{model} {name:8s} M={m:<5d} cuBLAS {base:8.1f} us ({rate}) | "
            + " | ".join(f"S={s} {us:8.1f} x{us / base:.2f} {what}" for s, (us, what) in best.items())
        )
    return lines
