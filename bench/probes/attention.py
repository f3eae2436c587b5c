"""Probe kernel of paged attention in one arithmetic for decode, chunk and prefill, and its bit and speed checks. Not engine code.

Maths, for one query row at absolute position p and keys 0..p:
    o = sum_j softmax_j(q.k_j / sqrt(D)) v_j
Reduction order, anchored at absolute position 0 and the same in every form:
    1. q.k over D: one tl.dot.
    2. Keys in tiles of BN, tiles ascending. Per tile: m' = max(m, max(s) * c), p = exp2(fma(s, c, -m')), a = exp2(m - m'),
       acc = dot(bf16(p), v, acc * a), and the row sum den by one of the forms ROWSUMS below.
    3. Tiles in splits of SPLIT keys; every split starts afresh. Splits enter the result in index order by `fold`.
A row's own splits are those that hold a key <= p. A tile or a split that is fully masked for a row changes nothing: p = 0, a = 1.
Every multiply-add is written as fma, so that contraction by the compiler cannot differ from kernel to kernel.

Forms: WHOLE one chain of tiles, no splits (candidate i). The rest are candidate ii: SERIAL splits one after another in one program, a
second accumulator (prefill, large decode batches); STASH the same, but the second accumulator waits in device memory between splits, so
that it takes no registers; SPREAD one program a split, partials in fp32, the last program to arrive folds them in index order (small
decode batches).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

WHOLE, SERIAL, SPREAD, STASH = 0, 1, 2, 3
FORMS = ("whole", "serial", "spread", "stash")
SUM, ONES, LANES, PAIRS = 0, 1, 2, 3
ROWSUMS = ("tl.sum", "ones-dot", "lanes", "pair-tree")  # see row_sum


@triton.jit
def halve(x, R: tl.constexpr, C: tl.constexpr, NEAR: tl.constexpr):
    """[R, C] -> [R, C/2]: adds neighbours (NEAR) or the left half to the right half; either way the order is in the code."""
    if NEAR:
        a, b = tl.split(tl.reshape(x, (R, C // 2, 2)))
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))
    return a + b


@triton.jit
def row_sum(den, p, al, ones, BM: tl.constexpr, BN: tl.constexpr, LOG: tl.constexpr, RS: tl.constexpr, IP: tl.constexpr):
    """den <- den * al + sum of p's row. RS 0: tl.sum (order follows the layout). 1: a dot with ones, of the rounded p that v is weighted
    with. 2: eight running sums a row, column j into lane j % 8, folded once at the end. 3: tree over adjacent pairs, every tile."""
    if RS == 0:
        den = tl.fma(den, al, tl.sum(p, 1))
    elif RS == 1:
        den = tl.dot(p.to(ones.dtype), ones, den * al[:, None], input_precision=IP)
    elif RS == 2:
        x = p
        for i in tl.static_range(LOG - 3):
            x = halve(x, BM, BN >> i, False)
        den = tl.fma(den, tl.broadcast_to(al[:, None], (BM, 8)), x)
    else:
        x = p
        for i in tl.static_range(LOG):
            x = halve(x, BM, BN >> i, True)
        den = tl.fma(den, al, tl.reshape(x, (BM,)))
    return den


@triton.jit
def row_total(den, BM: tl.constexpr, RS: tl.constexpr):
    """The [BM] sum that row_sum's running form stands for. All columns of the ones form are equal, so a max picks one exactly."""
    if RS == 1:
        den = tl.max(den, 1)
    elif RS == 2:
        den = tl.reshape(halve(halve(halve(den, BM, 8, False), BM, 4, False), BM, 2, False), (BM,))
    return den


@triton.jit
def fold(M, DEN, A, m, den, acc):
    """(M, DEN, A) <- (M, DEN, A) then the split (m, den, acc). A split without keys (m = -inf, den = 0, acc = 0) changes nothing."""
    n = tl.maximum(M, m)
    safe = tl.where(n == float("-inf"), 0.0, n)
    f0 = tl.exp2(M - safe)
    f1 = tl.exp2(m - safe)
    return n, tl.fma(den, f1, DEN * f0), tl.fma(acc, tl.broadcast_to(f1[:, None], acc.shape), A * f0[:, None])


@triton.jit
def start(BM: tl.constexpr, D: tl.constexpr, RS: tl.constexpr):
    m = tl.full((BM,), float("-inf"), tl.float32)
    if RS == 1:
        den = tl.zeros((BM, 16), tl.float32)
    elif RS == 2:
        den = tl.zeros((BM, 8), tl.float32)
    else:
        den = tl.zeros((BM,), tl.float32)
    return m, den, tl.zeros((BM, D), tl.float32)


@triton.jit
def unstash(SB, there, BM: tl.constexpr, D: tl.constexpr):
    """The second accumulator from device memory, zeros before the first split is closed."""
    rm = tl.arange(0, BM)
    return tl.load(SB + rm[:, None] * D + tl.arange(0, D)[None, :], mask=there & (rm >= 0)[:, None], other=0.0)


@triton.jit
def walk(
    q,
    pos,
    ones,
    m,
    den,
    acc,
    M,
    DEN,
    A,
    lo,
    hi,
    seen,
    KB,
    VB,
    TB,
    SB,
    HKV,
    SPLIT,
    scale,
    BM: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    LOG: tl.constexpr,
    RS: tl.constexpr,
    IP: tl.constexpr,
    MASK: tl.constexpr,
    FORM: tl.constexpr,
):
    """Tiles lo..hi of one chain. MASK: tiles that some row may not see whole. SERIAL and STASH close each split inside the loop: one flat
    loop, so that the load pipeline is not restarted at each split."""
    rd = tl.arange(0, D)
    rb = tl.arange(0, BN)
    # page ids are carried one tile ahead: a load whose address depends on a load of the same iteration costs the pipeline a stage of depth
    if PAGE >= BN:
        pg = tl.load(TB + tl.maximum(tl.minimum(lo, hi - 1), 0) // PAGE)
    else:
        pg = tl.load(TB + (lo + rb) // PAGE, mask=lo + rb < seen, other=0)
    for t in range(lo, hi, BN):
        rn = t + rb
        if PAGE >= BN:
            off = pg.to(tl.int64) * (HKV * PAGE * D) + (t % PAGE + rb) * D
            pg = tl.load(TB + tl.minimum(t + BN, hi - 1) // PAGE)
        else:
            off = pg.to(tl.int64) * (HKV * PAGE * D) + (rn % PAGE) * D
            pg = tl.load(TB + (rn + BN) // PAGE, mask=rn + BN < seen, other=0)
        k = tl.load(KB + off[:, None] + rd[None, :])
        s = tl.dot(q, tl.trans(k), input_precision=IP)
        if MASK:  # v beyond the written positions may be anything, and 0 * NaN is NaN
            s = tl.where(rn[None, :] <= pos[:, None], s, float("-inf"))
            v = tl.load(VB + off[:, None] + rd[None, :], mask=(rn < seen)[:, None], other=0.0)
        else:
            v = tl.load(VB + off[:, None] + rd[None, :])
        old = m
        if FORM == 1 or FORM == 3:  # a split begins: forget the maximum
            fresh = (t > 0) & (t % SPLIT == 0)
            old = tl.where(fresh, float("-inf"), m)
        n = tl.maximum(old, tl.max(s, 1) * scale)
        safe = n
        if MASK:
            safe = tl.where(n == float("-inf"), 0.0, n)
        p = tl.exp2(tl.fma(s, scale, -safe[:, None]))
        al = tl.exp2(old - safe)
        # the split before is closed here, where acc is needed anyway, so that its last dot still overlaps this tile's scores and softmax
        if FORM == 1:
            if fresh:
                M, DEN, A = fold(M, DEN, A, m, row_total(den, BM, RS), acc)
                _, den, acc = start(BM, D, RS)
        elif FORM == 3:
            if fresh:
                M, DEN, kept = fold(M, DEN, unstash(SB, t > SPLIT, BM, D), m, row_total(den, BM, RS), acc)
                # a barrier here would take the loop out of the load pipeline; those of the tiles before the next split order store and load
                tl.store(SB + tl.arange(0, BM)[:, None] * D + rd[None, :], kept)
                _, den, acc = start(BM, D, RS)
        den = row_sum(den, p, al, ones, BM, BN, LOG, RS, IP)
        acc = tl.dot(p.to(v.dtype), v, acc * al[:, None], input_precision=IP)
        m = n
    return m, den, acc, M, DEN, A


@triton.jit(do_not_specialize=["MAXP"])
def attention_kernel(
    Q,
    KC,
    VC,
    TABLE,
    QBEG,
    QLEN,
    POS0,
    SEQ,
    TREQ,
    TTILE,
    TSPLIT,
    OUT,
    PO,
    PML,
    CNT,
    HKV,
    MAXP,
    SPLIT,
    scale,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LOG: tl.constexpr,
    RS: tl.constexpr,
    FORM: tl.constexpr,
    IP: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """One program per (kv head, task). A task is (request, tile of BM // GP query tokens, split). Cache [page, kv head, slot, D].
    Tile table: BM 16 (decode, chunks), 64 and 128 (prefill); BN 64 or 128 is part of the arithmetic, BM, warps and stages are not."""
    h = tl.program_id(0)
    task = tl.program_id(1)
    r = tl.load(TREQ + task)
    tile = tl.load(TTILE + task)
    qlen = tl.load(QLEN + r)
    pos0 = tl.load(POS0 + r)
    qbeg = tl.load(QBEG + r).to(tl.int64)
    BT: tl.constexpr = BM // GP
    rm = tl.arange(0, BM)
    rd = tl.arange(0, D)
    tok = tile * BT + rm // GP
    live = ((tok < qlen) & (rm % GP < G))[:, None]
    pos = pos0 + tok
    seen = pos0 + qlen
    end = pos0 + tl.minimum(tile * BT + BT, qlen)
    full = (pos0 + tile * BT + 1) // BN * BN
    oq = ((qbeg + tok) * (HKV * G) + h * G + rm % GP)[:, None] * D + rd[None, :]
    q = tl.load(Q + oq, mask=live, other=0.0)
    ones = tl.full((BN, 16), 1.0, Q.dtype.element_ty)
    KB = KC + h * PAGE * D
    VB = VC + h * PAGE * D
    TB = TABLE + tl.load(SEQ + r).to(tl.int64) * MAXP
    SB = PO + (task.to(tl.int64) * HKV + h) * (BM * D)
    m, den, acc = start(BM, D, RS)
    M, DEN, A = start(BM, D, 0)
    lo = 0
    sp = 0
    if FORM == 2:
        sp = tl.load(TSPLIT + task)
        lo = sp * SPLIT
        end_all = end
        end = tl.minimum(end, lo + SPLIT)
    mid = tl.minimum(tl.maximum(full, lo), end)
    m, den, acc, M, DEN, A = walk(
        q, pos, ones, m, den, acc, M, DEN, A, lo, mid, seen, KB, VB, TB, SB, HKV, SPLIT, scale, BM, D, PAGE, BN, LOG, RS, IP, False, FORM
    )
    m, den, acc, M, DEN, A = walk(
        q, pos, ones, m, den, acc, M, DEN, A, mid, end, seen, KB, VB, TB, SB, HKV, SPLIT, scale, BM, D, PAGE, BN, LOG, RS, IP, True, FORM
    )
    den = row_total(den, BM, RS)
    if FORM == 0:
        tl.store(OUT + oq, (acc / den[:, None]).to(OUT.dtype.element_ty), mask=live)
    elif FORM == 1 or FORM == 3:
        if FORM == 3:
            tl.debug_barrier()
            A = unstash(SB, end > SPLIT, BM, D)
        M, DEN, A = fold(M, DEN, A, m, den, acc)
        tl.store(OUT + oq, (A / DEN[:, None]).to(OUT.dtype.element_ty), mask=live)
    else:
        ns = (end_all - 1) // SPLIT + 1
        if ns == 1:
            M, DEN, A = fold(M, DEN, A, m, den, acc)
            tl.store(OUT + oq, (A / DEN[:, None]).to(OUT.dtype.element_ty), mask=live)
        else:
            base = ((task - sp).to(tl.int64) * tl.num_programs(0)) + h
            step = tl.num_programs(0)
            oa = rm[:, None] * D + rd[None, :]
            mine = base + sp.to(tl.int64) * step
            tl.store(PO + mine * (BM * D) + oa, acc, mask=live)
            tl.store(PML + mine * (2 * BM) + rm, m)
            tl.store(PML + mine * (2 * BM) + BM + rm, den)
            tl.debug_barrier()
            if tl.atomic_add(CNT + base, 1, sem="acq_rel") == ns - 1:
                for s0 in range(0, ns, UNROLL):
                    for i in tl.static_range(UNROLL):  # loads of UNROLL partials in flight together; absent ones fold as nothing
                        there = s0 + i < ns
                        part = base + (s0 + i) * step
                        ms = tl.load(PML + part * (2 * BM) + rm, mask=there & (rm >= 0), other=float("-inf"), cache_modifier=".cg")
                        ls = tl.load(PML + part * (2 * BM) + BM + rm, mask=there & (rm >= 0), other=0.0, cache_modifier=".cg")
                        ac = tl.load(PO + part * (BM * D) + oa, mask=there & live, other=0.0, cache_modifier=".cg")
                        M, DEN, A = fold(M, DEN, A, ms, ls, ac)
                tl.store(OUT + oq, (A / DEN[:, None]).to(OUT.dtype.element_ty), mask=live)
                tl.store(CNT + base, 0)


@dataclass(frozen=True)
class Tile:
    """One compiled form. BN, the split size and the row sum are arithmetic; the rest must not show in the bits."""

    form: int
    bm: int
    bn: int
    warps: int
    stages: int
    rowsum: int
    unroll: int = 8  # partials that the last program of a spread form loads at a time

    def __str__(self) -> str:
        unroll = f" u{self.unroll}" if self.unroll != 8 else ""
        return f"{FORMS[self.form]} {ROWSUMS[self.rowsum]} {self.bm}x{self.bn} w{self.warps} s{self.stages}{unroll}"


@dataclass(frozen=True)
class Request:
    seq: int
    pos0: int
    qlen: int


def constants(tile: Tile, d: int, g: int, page: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        D=d,
        G=g,
        GP=triton.next_power_of_2(g),
        PAGE=page,
        BM=tile.bm,
        BN=tile.bn,
        LOG=tile.bn.bit_length() - 1,
        RS=tile.rowsum,
        FORM=tile.form,
        IP="ieee" if dtype == torch.float32 else "tf32",
        UNROLL=tile.unroll,
    )


class World:
    """Sequences with random q, k, v, their keys and values in pages in random order, and the launches over them."""

    def __init__(self, lengths: list[int], d: int, g: int, hkv: int, page: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        gen = torch.Generator(device=device).manual_seed(seed)
        self.d, self.g, self.hkv, self.page, self.dtype, self.device, self.lengths = d, g, hkv, page, dtype, device, lengths

        def rand(n: int, heads: int, gain: float) -> torch.Tensor:
            return (torch.randn(n, heads, d, generator=gen, device=device) * gain).to(dtype)

        self.q = [rand(n, g * hkv, 1.5) for n in lengths]  # gain 1.5: scores of +-5, a softmax that is neither flat nor one-hot
        self.k = [rand(n, hkv, 1.0) for n in lengths]
        self.v = [rand(n, hkv, 1.0) for n in lengths]
        self.maxp = max(-(-n // page) for n in lengths)
        pages = self.maxp * len(lengths)
        order = torch.randperm(pages, generator=gen, device=device).to(torch.int32)
        self.table = order.view(len(lengths), self.maxp).contiguous()
        self.scratch: dict[str, torch.Tensor] = {}
        self.kc, self.vc = self.cache(None)

    def cache(self, upto: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache filled with NaN and then with all sequences, sequence 0 only up to `upto`."""
        out = []
        for src in (self.k, self.v):
            c = torch.full((self.table.numel(), self.page, self.hkv, self.d), float("nan"), dtype=self.dtype, device=self.device)
            for i, x in enumerate(src):
                n = upto if i == 0 and upto is not None else x.shape[0]
                at = torch.arange(n, device=self.device)
                c[self.table[i].long()[at // self.page], at % self.page] = x[:n]
            out.append(c.transpose(1, 2).contiguous())
        return out[0], out[1]

    def need(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        if name not in self.scratch or self.scratch[name].numel() < n:
            self.scratch[name] = torch.zeros(n, dtype=dtype, device=self.device)
        return self.scratch[name]

    def plan(self, reqs: list[Request], tile: Tile, split: int) -> dict[str, torch.Tensor]:
        """Flat task list, longest tiles first (the splits of a tile stay neighbours, in order)."""
        bt = tile.bm // triton.next_power_of_2(self.g)
        tiles = [(min((j + 1) * bt, r.qlen) + r.pos0, i, j) for i, r in enumerate(reqs) for j in range(-(-r.qlen // bt))]
        tiles.sort(key=lambda t: -t[0])
        tasks = [(i, j, s) for end, i, j in tiles for s in range((end - 1) // split + 1 if tile.form == SPREAD else 1)]
        begin, rows = [], 0
        for r in reqs:
            begin.append(rows)
            rows += r.qlen
        cols = dict(
            QBEG=begin,
            QLEN=[r.qlen for r in reqs],
            POS0=[r.pos0 for r in reqs],
            SEQ=[r.seq for r in reqs],
            TREQ=[t[0] for t in tasks],
            TTILE=[t[1] for t in tasks],
            TSPLIT=[t[2] for t in tasks],
        )
        return {k: torch.tensor(v, dtype=torch.int32).to(self.device) for k, v in cols.items()}

    def queries(self, reqs: list[Request]) -> torch.Tensor:
        return torch.cat([self.q[r.seq][r.pos0 : r.pos0 + r.qlen] for r in reqs])

    def launch(
        self,
        q: torch.Tensor,
        plan: dict[str, torch.Tensor],
        tile: Tile,
        split: int,
        kc: torch.Tensor,
        vc: torch.Tensor,
        out: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        **opts: Any,
    ) -> torch.Tensor:
        n = plan["TREQ"].numel()
        parts = n * self.hkv if tile.form in (SPREAD, STASH) else 1
        o = torch.full_like(q, float("nan")) if out is None else out
        attention_kernel[(self.hkv, n)](
            q,
            kc,
            vc,
            self.table if table is None else table,
            plan["QBEG"],
            plan["QLEN"],
            plan["POS0"],
            plan["SEQ"],
            plan["TREQ"],
            plan["TTILE"],
            plan["TSPLIT"],
            o,
            self.need("po", parts * tile.bm * self.d, torch.float32),
            self.need("pml", parts * tile.bm * 2, torch.float32),
            self.need("cnt", parts, torch.int32),
            self.hkv,
            self.maxp,
            split,
            math.log2(math.e) / math.sqrt(self.d),
            **constants(tile, self.d, self.g, self.page, self.dtype),
            num_warps=tile.warps,
            num_stages=tile.stages,
            **opts,
        )
        return o

    def exact(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of sequence 0 in fp64."""
        q = self.q[0][rows].double().view(-1, self.hkv, self.g, self.d)
        s = torch.einsum("rhgd,thd->rhgt", q, self.k[0].double()) / math.sqrt(self.d)
        mask = torch.arange(self.lengths[0], device=self.device)[None, :] > rows[:, None]
        s = s.masked_fill(mask[:, None, None, :], float("-inf"))
        return torch.einsum("rhgt,thd->rhgd", s.softmax(-1), self.v[0].double()).reshape(len(rows), -1, self.d)


def difference(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """How many elements differ in their bits, and by how much at most."""
    kind = torch.int16 if a.element_size() == 2 else torch.int32
    n = int((a.view(kind) != b.view(kind)).sum())
    return n, float((a.float() - b.float()).abs().max()) if n else 0.0


class Schedules:
    """Ways to compute rows of sequence 0; each must give the rows of a whole prefill. What lies beyond a launch's last token is NaN."""

    def __init__(self, w: World, chunk: int, short: int, starts: list[int], alone: list[int]) -> None:
        n = w.lengths[0]
        self.w = w
        runs: list[tuple[str, list[Request]]] = [("prefill", [Request(0, 0, n)])]
        runs += [(f"chunk {chunk}", [Request(0, s, min(chunk, n - s))]) for s in range(0, n, chunk)]
        runs += [(f"chunk {short}", [Request(0, s, min(short, n - s))]) for s in starts if s < n]
        runs += [("alone", [Request(0, p, 1)]) for p in alone if p < n]
        mixed = [Request(0, p, 1) for p in alone if p < n]
        mixed += [Request(0, s, min(short, n - s)) for s in starts if s < n]
        mixed += [Request(1, 0, w.lengths[1]), Request(0, n // 3, min(chunk, n - n // 3)), Request(1, w.lengths[1] - 1, 1)]
        runs.append(("mixed batch", mixed))
        self.runs = []
        for name, reqs in runs:
            rows = torch.cat([torch.arange(r.pos0, r.pos0 + r.qlen) if r.seq == 0 else torch.full((r.qlen,), -1) for r in reqs])
            upto = max(r.pos0 + r.qlen for r in reqs if r.seq == 0)
            kc, vc = w.cache(upto) if len(reqs) == 1 and upto < n else (w.kc, w.vc)
            self.runs.append((name, reqs, w.queries(reqs), rows.to(w.device), kc, vc))
        self.plans: dict[tuple[int, int, bool], list[dict[str, torch.Tensor]]] = {}

    def run(self, tile: Tile, split: int, ref: torch.Tensor | None, **opts: Any) -> tuple[torch.Tensor, dict[str, tuple[int, float]]]:
        key = (tile.bm, split, tile.form == SPREAD)
        if key not in self.plans:
            self.plans[key] = [self.w.plan(reqs, tile, split) for _, reqs, *_ in self.runs]
        got: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for (name, _, q, rows, kc, vc), plan in zip(self.runs, self.plans[key], strict=True):
            got.setdefault(name, []).append((self.w.launch(q, plan, tile, split, kc, vc, **opts), rows))
        first = got["prefill"][0][0]
        base = first if ref is None else ref
        bad = {}
        for name, parts in got.items():
            o = torch.cat([p[0][p[1] >= 0] for p in parts])
            bad[name] = difference(o, base[torch.cat([p[1][p[1] >= 0] for p in parts])])
        return first, bad
