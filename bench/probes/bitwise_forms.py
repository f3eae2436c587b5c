"""Which kernel forms give the same bits: attention alone, in chunks, in batches, by whole prefill; matmul at any M, tile and split count.

A probe, not engine code; it decides the kernel forms (RESULTS.md). From `bench/`:
    python -m probes.bitwise_forms --device cuda --out DIR       all, a few minutes on one GPU
    TRITON_INTERPRET=1 python -m probes.bitwise_forms --smoke    the logic, in fp32, on a CPU
    python -m probes.bitwise_forms --compile-only                every kernel and tile for sm_90, without a GPU
"""

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from . import attention as at
from . import matmul as mm
from .measure import Job, Record, attempt, graph_us, in_parallel, processes

BF16, FP32 = torch.bfloat16, torch.float32
NEVER = 1 << 30  # a split size that no context reaches

# ------------------------------------------------------------------------------------------------ what is compared

PREFILL = [(16, 4, 3), (64, 4, 1), (64, 4, 2), (64, 8, 2), (128, 4, 2)]  # bm, warps, stages, beside the timed ones
DECODE = [(16, 1, 2), (16, 4, 1), (64, 4, 2), (128, 8, 2)]
SPLITS = (128, 256, 512, 1024)
# timed: bm, bn, warps, stages
TIMED_DECODE = [
    (16, 64, 4, 2),
    (16, 64, 4, 3),
    (16, 64, 4, 4),
    (16, 64, 2, 3),
    (16, 64, 8, 3),
    (64, 64, 4, 3),
    (16, 128, 4, 2),
    (16, 128, 8, 2),
]
TIMED_PREFILL = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 8, 3)]
PREFILL_SPLITS = (128, 256, 512, 1024, 2048)


def timed_decode() -> list[at.Tile]:
    out = [at.Tile(f, bm, bn, w, s, at.LANES) for f, (bm, bn, w, s) in product((at.SPREAD, at.SERIAL), TIMED_DECODE)]
    out += [at.Tile(at.SPREAD, 16, 64, w, 3, at.LANES, unroll=u) for w, u in product((4, 8), (2, 16))]
    return out + [at.Tile(at.SPREAD, bm, bn, w, s, rs) for rs, (bm, bn, w, s) in product((at.SUM, at.ONES), TIMED_DECODE[:2])]


# batch, context, group, page of further decode timings, and their tiles
DECODE_OTHERS = [(64, 2048, 2, 64), (1, 1024, 2, 64), (64, 2048, 8, 64), (64, 2048, 4, 16), (64, 2048, 4, 1)]


def few_decode() -> list[at.Tile]:
    return [at.Tile(f, 16, 64, w, s, at.LANES) for f, (w, s) in product((at.SPREAD, at.SERIAL), ((4, 2), (4, 3), (8, 3)))]


def timed_prefill() -> list[at.Tile]:
    out = [at.Tile(f, bm, bn, w, s, at.LANES) for f, (bm, bn, w, s) in product((at.WHOLE, at.SERIAL, at.STASH, at.SPREAD), TIMED_PREFILL)]
    few = TIMED_PREFILL[1:4:2]
    return out + [
        at.Tile(f, bm, bn, w, s, rs) for f, rs, (bm, bn, w, s) in product((at.WHOLE, at.SERIAL, at.STASH), (at.SUM, at.ONES, at.PAIRS), few)
    ]


def main_tiles() -> list[at.Tile]:
    """Tiles of the main attention comparison, D 128, group 4, page 64; all that are timed are among them."""
    out = timed_decode() + timed_prefill()
    for rs in (at.SUM, at.ONES, at.LANES):
        out += [at.Tile(at.SERIAL, bm, 64, w, s, rs) for bm, w, s in PREFILL]
        out += [at.Tile(at.SPREAD, bm, 64, w, s, rs) for bm, w, s in DECODE]
        out += [at.Tile(at.WHOLE, 16, 64, 4, 3, rs), at.Tile(at.STASH, 16, 64, 4, 2, rs)]
    out += [at.Tile(at.SERIAL, 64, 64, 4, 2, at.PAIRS), at.Tile(at.SPREAD, 16, 64, 4, 2, at.PAIRS)]
    return list(dict.fromkeys(out))


# head_dim, group, page, BN; each with these tiles
VARIANTS = [
    (128, 8, 64, 64),
    (128, 2, 64, 64),
    (128, 5, 64, 64),
    (128, 4, 16, 64),
    (128, 4, 1, 64),
    (64, 4, 64, 64),
    (256, 4, 64, 64),
    (256, 8, 16, 64),
]


def variant_tiles(bn: int) -> list[at.Tile]:
    pre, dec = [(64, 4, 2), (64, 8, 2), (128, 8, 2)], [(16, 4, 2), (16, 2, 2), (64, 4, 2)]
    return [at.Tile(at.SERIAL, bm, bn, w, s, rs) for rs in (at.ONES, at.LANES) for bm, w, s in pre] + [
        at.Tile(at.SPREAD, bm, bn, w, s, rs) for rs in (at.ONES, at.LANES) for bm, w, s in dec
    ]


def ieee_tiles(bn: int = 32) -> list[at.Tile]:
    return [
        at.Tile(f, bm, bn, w, 2, rs)
        for rs in (at.SUM, at.ONES, at.LANES)
        for f, bm, w in ((at.SERIAL, 16, 4), (at.SERIAL, 32, 4), (at.SERIAL, 32, 8), (at.SPREAD, 16, 4), (at.SPREAD, 32, 4))
    ]


# ------------------------------------------------------------------------------------------------ compile jobs


def attention_job(tile: at.Tile, d: int, g: int, page: int, dtype: torch.dtype, **opts: Any) -> Job:
    def args(device: str) -> list[Any]:
        x, i, f = (torch.zeros(64, dtype=t, device=device) for t in (dtype, torch.int32, FP32))
        return [x, x, x, i, i, i, i, i, i, i, i, x, f, f, i, 8, 3, 256, 0.1]

    return Job(
        f"attention {tile} d{d} g{g} page{page} {dtype}",
        at.attention_kernel,
        args,
        at.constants(tile, d, g, page, dtype),
        dict(num_warps=tile.warps, num_stages=tile.stages, **opts),
    )


def matmul_job(tile: mm.Tile, form: int, dtype: torch.dtype) -> Job:
    def args(device: str) -> list[Any]:
        x, i, f = (torch.zeros(1024, 256, dtype=t, device=device) for t in (dtype, torch.int32, FP32))
        xw: list[Any] = [x, x]
        if tile.tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            xw = [TensorDescriptor.from_tensor(x, [tile.bm, tile.bk]), TensorDescriptor.from_tensor(x, [tile.bn, tile.bk])]
        return [*xw, x, f, i, 64, 1024, 256, 128, 2]

    return Job(
        f"matmul {tile} {mm.FORMS[form]} {dtype}",
        mm.matmul_kernel,
        args,
        mm.constants(tile, form, dtype),
        dict(num_warps=tile.warps, num_stages=tile.stages),
    )


def all_jobs() -> list[Job]:
    jobs = {}
    for t in main_tiles():
        jobs[t, 128, 4, 64] = attention_job(t, 128, 4, 64, BF16)
    for d, g, page, bn in VARIANTS:
        for t in variant_tiles(bn):
            jobs[t, d, g, page] = attention_job(t, d, g, page, BF16)
    for t, (_, _, g, page) in product(few_decode(), DECODE_OTHERS):
        jobs[t, 128, g, page] = attention_job(t, 128, g, page, BF16)
    for t, d in product(ieee_tiles(), (64, 128)):
        jobs[t, d, 4, 64, "fp32"] = attention_job(t, d, 4, 64, FP32)
    for t in fusion_tiles():
        jobs[t, "unfused"] = attention_job(t, 128, 4, 64, BF16, enable_fp_fusion=False)
    for mt, f in product(mm.SMALL + mm.MIDDLE + mm.BETWEEN + mm.LARGE, range(4)):
        if f != mm.STASH or mt.bm >= 64:
            jobs[mt, f] = matmul_job(mt, f, BF16)
    for mt, f in product(mm.IEEE, range(3)):
        jobs[mt, f, "fp32"] = matmul_job(mt, f, FP32)
    return list(jobs.values())


def fusion_tiles() -> list[at.Tile]:
    return [at.Tile(at.SERIAL, 64, 64, 4, 2, at.ONES), at.Tile(at.SPREAD, 16, 64, 4, 3, at.ONES)]


# ------------------------------------------------------------------------------------------------ attention


def compare_attention(
    name: str, w: at.World, sched: at.Schedules, tiles: list[at.Tile], splits: tuple[int, ...], rec: Record, **opts: Any
) -> list[str]:
    """Every tile against the first serial tile of its arithmetic (row sum, BN, split). One line per arithmetic."""
    lines = []
    groups: dict[tuple[int, int, int, bool], list[at.Tile]] = {}
    for t in tiles:
        for split in (NEVER,) if t.form == at.WHOLE else splits:
            groups.setdefault((t.rowsum, t.bn, split, t.form == at.WHOLE), []).append(t)
    rows = torch.linspace(0, w.lengths[0] - 1, 24).long().to(w.device)
    exact = w.exact(rows)
    for (rs, bn, split, _), members in sorted(groups.items()):
        ref = None
        want = [t for t in members if t.bm == 64 and t.warps == 4 and t.stages == 2 and t.form != at.SPREAD] or members[:1]
        ref = sched.run(want[0], split, None, **opts)[0]
        assert bool(ref.isfinite().all()), want[0]
        err = float((ref[rows].double() - exact).norm() / exact.norm())
        equal, unequal = 0, []
        for t in members:
            try:
                bad = sched.run(t, split, ref, **opts)[1]
            except Exception as e:  # one form that does not run must not end the probe
                unequal.append(f"{t}: {type(e).__name__} {str(e)[:120]}")
                continue
            off = {k: v for k, v in bad.items() if v[0]}
            equal += not off
            if off:
                unequal.append(f"{t}: " + ", ".join(f"{k} {n} (max {d:.1e})" for k, (n, d) in off.items()))
        label = f"{at.ROWSUMS[rs]}, BN {bn}, split {'none' if split == NEVER else split}"
        rec.add(
            f"probe_attention_bits_{name.replace(' ', '_')}",
            "equal_forms",
            equal,
            "forms",
            law2=not unequal,
            digest=True,
            arithmetic=label,
            of=len(members),
            relative_error=err,
            unequal=unequal,
        )
        lines.append(f"{name:22s} {label:34s} {equal}/{len(members)} equal, err {err:.2e}")
        lines += [f"    {u}" for u in unequal]
    return lines


def attention_bits(rec: Record, device: str) -> list[str]:
    chosen = [0, 1, 15, 16, 63, 64, 100, 255, 256, 257, 511, 512, 1023, 1024, 1500, 2047, 2048, 3000, 4095, 4096, 4199]
    starts = [0, 5, 16, 64, 250, 256, 504, 512, 1016, 1024, 2040, 3333, 4096, 4184]
    w = at.World([4200, 1777], 128, 4, 8, 64, BF16, device)
    sched = at.Schedules(w, 1000, 16, starts, chosen)
    lines = compare_attention("d128 g4 page64 all forms", w, sched, main_tiles(), SPLITS, rec)
    lines += compare_attention("d128 g4 page64 unfused", w, sched, fusion_tiles(), (256,), rec, enable_fp_fusion=False)
    on = sched.run(fusion_tiles()[0], 256, None)[0]
    off = sched.run(fusion_tiles()[0], 256, None, enable_fp_fusion=False)[0]
    lines.append(f"fp fusion on against off: {at.difference(on, off)}")
    q, k, v = (x[0].transpose(0, 1)[None] for x in (w.q, w.k, w.v))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    rows = torch.linspace(0, 4199, 24).long().to(device)
    exact = w.exact(rows)
    lines.append(f"torch sdpa bf16: err {float((plain[rows].double() - exact).norm() / exact.norm()):.2e}")
    same_data: dict[int, torch.Tensor] = {}
    for d, g, page, bn in VARIANTS:
        w = at.World([2100, 777], d, g, 8, page, BF16, device)
        sched = at.Schedules(w, 1000, 16, [s for s in starts if s < 2084], [p for p in chosen if p < 2100])
        lines += compare_attention(f"d{d} g{g} page{page}", w, sched, variant_tiles(bn), (256,), rec)
    for page in (64, 16, 1):  # keys and values are drawn before the page order, so the worlds hold the same ones
        w = at.World([2100, 777], 128, 4, 8, page, BF16, device)
        t = at.Tile(at.SERIAL, 64, 64, 4, 2, at.ONES)
        same_data[page] = w.launch(w.q[0], w.plan([at.Request(0, 0, 2100)], t, 256), t, 256, w.kc, w.vc)
    lines.append("page 16, 1 against 64: " + ", ".join(str(at.difference(same_data[p], same_data[64])) for p in (16, 1)))
    return lines


def attention_ieee(rec: Record, device: str) -> list[str]:
    lines = []
    for d in (64, 128):
        w = at.World([600, 177], d, 4, 8, 64, FP32, device)
        sched = at.Schedules(w, 200, 16, [0, 5, 64, 250, 256, 504, 584], [0, 1, 63, 64, 255, 256, 257, 511, 512, 599])
        lines += compare_attention(f"fp32 d{d} g4 page64", w, sched, ieee_tiles(), (256,), rec)
    return lines


def bare_world(tokens: int, seqs: int, d: int, g: int, hkv: int, page: int) -> at.World:
    """Random cache without the sequences that made it: for timing."""
    w = at.World([1], d, g, hkv, page, BF16, "cuda")
    w.maxp = tokens // page
    w.table = torch.randperm(seqs * w.maxp, device="cuda").to(torch.int32).view(seqs, w.maxp).contiguous()
    w.kc, w.vc = (torch.randn(seqs * w.maxp, hkv, page, d, device="cuda", dtype=BF16) for _ in range(2))
    return w


def attention_times(rec: Record) -> list[str]:
    lines = []
    plain = [(b, c, 4, 64) for b, c in ((64, 2048), (256, 1024), (32, 1024), (16, 1024), (8, 1024), (1, 8192), (1, 1024), (1, 256))]
    for batch, ctx, g, page in (*plain, *DECODE_OTHERS):
        sets = min(
            32, max(1, 400_000_000 // (batch * ctx * 4096))
        )  # cold L2: other keys and values from call to call, while 32 sets suffice
        w = bare_world(ctx, batch * sets, 128, g, 8, page)
        q = torch.randn(batch, 8 * g, 128, device="cuda", dtype=BF16)
        out = torch.empty_like(q)
        got = []
        for t, split in product(timed_decode() if (g, page) == (4, 64) else few_decode(), SPLITS):
            plans = [w.plan([at.Request(i * batch + j, ctx - 1, 1) for j in range(batch)], t, split) for i in range(sets)]
            calls: list[Callable[[], Any]] = [lambda p=p, t=t, s=split: w.launch(q, p, t, s, w.kc, w.vc, out) for p in plans]
            us = attempt(lambda c=calls: graph_us(c * max(1, 4 // len(c))))
            if us:
                got.append((us, t, split))
        report_times(
            f"probe_attention_decode_b{batch}_ctx{ctx}" + f"_page{page}" * (page != 64),
            {2: "qwen3-0.6b", 4: "qwen3-8b", 8: "qwen3-32b"}[g],
            got,
            batch * ctx * 8 * 128 * 4 / 1e6,
            "TB/s",
            rec,
            lines,
        )
    n = 8192
    w = bare_world(n, 1, 128, 4, 8, 64)
    q = torch.randn(n, 32, 128, device="cuda", dtype=BF16)
    out = torch.empty_like(q)
    flops = 4 * 128 * 32 * n * (n + 1) / 2
    got = []
    for t, split in product(timed_prefill(), (NEVER, *PREFILL_SPLITS)):
        if (t.form == at.WHOLE) != (split == NEVER):
            continue
        p = w.plan([at.Request(0, 0, n)], t, split)
        us = attempt(lambda p=p, t=t, s=split: graph_us([lambda: w.launch(q, p, t, s, w.kc, w.vc, out)] * 2))
        if us:
            got.append((us, t, split))
    report_times("probe_attention_prefill_8192", "qwen3-8b", got, flops / 1e6, "TFLOP/s", rec, lines)
    k, v = (torch.randn(1, 8, n, 128, device="cuda", dtype=BF16) for _ in range(2))
    qt = q.transpose(0, 1)[None]
    us = graph_us([lambda: F.scaled_dot_product_attention(qt, k, v, is_causal=True, enable_gqa=True)] * 2)
    rec.add("probe_attention_prefill_8192", "time", us, "us", model="qwen3-8b", engine="torch-sdpa", digest=True, rate=flops / us / 1e6)
    lines.append(f"torch sdpa prefill 8192: {us:.0f} us {flops / us / 1e6:.0f} TFLOP/s")
    return lines


def report_times(
    workload: str, model: str, got: list[tuple[float, at.Tile, int]], work: float, unit: str, rec: Record, lines: list[str]
) -> None:
    got.sort(key=lambda x: x[0])
    best: dict[tuple[int, int, int, int], tuple[float, at.Tile, int]] = {}
    for us, t, split in got:
        rec.add(workload, "time", us, "us", model=model, tile=str(t), split=split, rate=work / us, rate_unit=unit)
        best.setdefault((t.form, t.rowsum, t.bn, split), (us, t, split))
    lines.append(workload)
    for us, t, split in sorted(best.values(), key=lambda x: x[0]):
        kept = t.rowsum == at.LANES and t.bn == 64 and split in (128, 256, 512, NEVER)
        rec.add(workload, "best_time", us, "us", model=model, digest=kept, tile=str(t), split=split, rate=work / us, rate_unit=unit)
        lines.append(f"    {us:8.1f} us {work / us:6.2f} {unit}  split {'none' if split == NEVER else split}  {t}")


# ------------------------------------------------------------------------------------------------ matmul


def matmul_all(rec: Record, scratch: mm.Scratch, models: list[str]) -> tuple[list[str], list[str]]:
    bits, times = [], []
    for model in models:
        for name, (n, k) in mm.SHAPES[model].items():
            gen = torch.Generator(device="cuda").manual_seed(n + k)
            x = torch.randn(8192, k, generator=gen, device="cuda", dtype=BF16)
            w = torch.randn(n, k, generator=gen, device="cuda", dtype=BF16) * 0.03
            bits += mm.compare(model, name, x, w, mm.SMALL + mm.MIDDLE + mm.BETWEEN + mm.LARGE, mm.SIZES, rec, scratch)
            times += mm.times(model, name, x, w, rec, scratch)
            del x, w
            torch.cuda.empty_cache()
    return bits, times


def matmul_ieee(rec: Record, scratch: mm.Scratch, device: str) -> list[str]:
    lines = []
    for n, k in ((1024, 1024), (512, 3072)):
        x, w = torch.randn(512, k, device=device), torch.randn(n, k, device=device) * 0.03
        lines += mm.compare("fp32", f"{n}x{k}", x, w, mm.IEEE, (1, 2, 5, 16, 17, 64, 100, 256, 512), rec, scratch)
    return lines


def summary(rec: Record) -> list[str]:
    """The short table: what decides the forms."""
    out = []
    for rs in at.ROWSUMS:
        got = [r for r in rec.rows if r["metric"] == "equal_forms" and r["arithmetic"].startswith(rs)]
        if got:
            out.append(f"attention bits, {rs}: {sum(r['value'] for r in got)} of {sum(r['of'] for r in got)} forms equal")
    for workload in dict.fromkeys(
        r["workload"] for r in rec.rows if r["workload"].startswith("probe_attention_") and r["metric"] == "best_time"
    ):
        got = [
            r
            for r in rec.rows
            if r["workload"] == workload and r["metric"] == "best_time" and " lanes " in r["tile"] and "x64 " in r["tile"]
        ]
        for model, split in dict.fromkeys((r["model"], r["split"]) for r in got):
            cells = [f"{r['tile']} {r['value']:.1f} us {r['rate']:.2f}" for r in got if (r["model"], r["split"]) == (model, split)]
            if split in (128, 256, 512, NEVER):
                out.append(f"{workload} {model} split {'none' if split == NEVER else split}: " + " | ".join(cells))
    for model, name in product(mm.SHAPES, mm.SHAPES["qwen3-8b"]):
        mine = [r for r in rec.rows if r["model"] == model and r["workload"].startswith(f"probe_matmul_{name}_m")]
        bits = [r for r in rec.rows if r["model"] == model and r["workload"] == f"probe_matmul_bits_{name}"]
        if not bits:
            continue
        equal = ", ".join(f"S={r['splits']} {r['value']}/{r['of']}" for r in bits if r["metric"] == "equal_products")
        unlike = [r["value"]["1"] for r in bits if r["engine"] == "cublas"]
        cells = []
        for m in mm.TIMED_SIZES:
            base = [r["value"] for r in mine if r["workload"].endswith(f"_m{m}") and r["engine"] == "cublas" and r["metric"] == "time"]
            best = {r["splits"]: r["value"] for r in mine if r["workload"].endswith(f"_m{m}") and r["metric"] == "best_time"}
            if base:
                cells.append(f"M={m} {base[0]:.1f}: " + " ".join(f"{us:.1f}" for _, us in sorted(best.items())))
        out.append(f"{model} {name}: {equal}; cuBLAS unlike S=1 at M {unlike[0][:60]}; us cuBLAS: S=1 2 4 | " + " | ".join(cells))
    return out


def ceilings(rec: Record) -> list[str]:
    a = torch.randn(1 << 30, device="cuda", dtype=BF16)
    b = torch.empty_like(a)
    copy = graph_us([lambda: torch.mul(a, 1, out=b)] * 8, 9)  # a kernel: copy_ becomes a memcpy node, at 2.7 TB/s
    x = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    y, z = torch.randn_like(x), torch.empty_like(x)
    dense = graph_us([lambda: torch.mm(x, y.t(), out=z)] * 8)
    rec.add("probe_ceiling_copy", "rate", 4 * a.numel() / copy / 1e6, "TB/s", engine="torch", digest=True)
    rec.add("probe_ceiling_matmul_8192", "rate", 2 * 8192**3 / dense / 1e6, "TFLOP/s", engine="cublas", digest=True)
    return [f"ceilings: copy {4 * a.numel() / copy / 1e6:.2f} TB/s, cuBLAS 8192^3 {2 * 8192**3 / dense / 1e6:.0f} TFLOP/s"]


# ------------------------------------------------------------------------------------------------ the runs


def smoke(rec: Record) -> list[str]:
    """The logic on a CPU through the interpreter: every form within rounding of fp64. Bits are told, not asked: BLAS bits
    follow the shape."""
    lines = []
    for page, g in ((4, 3), (32, 4)):
        w = at.World([45, 19], 16, g, 1, page, FP32, "cpu")
        sched = at.Schedules(w, 20, 5, [0, 7, 40], [0, 15, 16, 44])
        exact = w.exact(torch.arange(45))
        for form, rs in product(range(4), range(4)):
            t = at.Tile(form, 16, 16, 4, 2, rs)
            out, bad = sched.run(t, NEVER if form == at.WHOLE else 32, None)
            err = float((out.double() - exact).abs().max())
            worst = max(d for _, d in bad.values())
            assert err < 2e-6 and worst < 2e-6, (t, err, bad)
            lines.append(f"smoke attention {t} page{page} g{g}: err {err:.1e}, schedules differ by {worst:.1e}")
    scratch = mm.Scratch("cpu")
    x, w2 = torch.randn(37, 128), torch.randn(80, 128)
    exact = x.double() @ w2.double().T
    for t, s, m in product(mm.TINY, (1, 2, 4), (1, 16, 37)):
        for form in mm.forms(t, s, m, 80, 128):
            y = mm.matmul(x[:m], w2, t, form, s, scratch)
            err = float((y.double() - exact[:m]).abs().max())
            assert err < 1e-4, (t, s, m, err)
    lines.append("smoke matmul: all forms within 1e-4")
    rec.add("probe_smoke", "passed", 1, "bool")
    return lines


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    ap.add_argument("--smoke", action="store_true")
    ap.add_argument("--compile-only", action="store_true")
    ap.add_argument("--only", default="ceilings,attention,times,ieee,matmul", help="sections of the GPU run")
    ap.add_argument("--models", default="qwen3-0.6b,qwen3-8b")
    a = ap.parse_args()
    begin = time.perf_counter()
    if a.smoke:
        print("\n".join(smoke(Record(a.out, "cpu"))))
        return
    good, bad = in_parallel(all_jobs(), not a.compile_only, processes())
    print(f"{len(good)} kernels compiled, {len(bad)} not, {time.perf_counter() - begin:.0f} s", *bad, sep="\n  ", flush=True)
    if a.compile_only:
        raise SystemExit(bool(bad))
    torch.backends.cuda.matmul.allow_tf32 = False
    rec = Record(a.out, torch.cuda.get_device_name())
    scratch = mm.Scratch(a.device)
    only = a.only.split(",")
    sections: list[tuple[str, Callable[[], list[str]]]] = [
        ("ceilings", lambda: ceilings(rec)),
        ("attention", lambda: attention_bits(rec, a.device)),
        ("times", lambda: attention_times(rec)),
        ("ieee", lambda: attention_ieee(rec, a.device) + matmul_ieee(rec, scratch, a.device)),
        ("matmul", lambda: [x for part in matmul_all(rec, scratch, a.models.split(",")) for x in part]),
    ]
    for name, run in sections:
        if name not in only:
            continue
        try:
            lines = run()
        except Exception as e:  # the other sections' answers are still wanted
            lines = [f"{name} FAILED: {type(e).__name__} {str(e)[:500]}"]
        with open(a.out / "table.txt", "a") as f:
            f.write("\n".join(lines) + "\n")
        print(f"[{name}: {time.perf_counter() - begin:.0f} s since start]", flush=True)
    print("\n".join(summary(rec)))


if __name__ == "__main__":
    main()
