"""Which tile attention should take for rows of one token: times and bits of every candidate, on a GPU, with the engine's own kernel. Not engine code.

python -m twinfer.bench.probes.decode_tiles        what "Decode tiles" in RESULTS.md was made from; about 100 s on an H200
"""

from __future__ import annotations

import statistics

import numpy as np
import torch

from twinfer.kernels.attention.kernel import attention
from twinfer.kernels.attention.tasks import count_tasks, plan_tasks
from twinfer.kernels.attention.tiles import Tile, tile_tokens

DIM, PAGE, NUM_KV_HEADS = 128, 64, 8
MOST_LAYERS, CACHE_BYTES = 24, 30e9  # cold caches that a graph walks, and what they may take together
COPY_TB_S = 4.3  # RESULTS.md
BASE = (False, Tile(64, 4, 3))  # SERIAL's tile of long rows, whose bits all others must have
CANDIDATES = [BASE, (False, Tile(32, 4, 3))]
CANDIDATES += [(False, Tile(16, warps, stages)) for warps in (1, 2, 4) for stages in (2, 3, 4)]
CANDIDATES += [(True, Tile(16, warps, stages)) for warps, stages in ((4, 3), (2, 3), (1, 3), (4, 2), (4, 4), (2, 4))]
SIZES = ((1, 200), (1, 1024), (1, 4096), (8, 200), (8, 1024), (16, 200), (16, 1024), (32, 200), (32, 1024), (64, 200), (64, 512), (64, 2200), (128, 1100),
         (256, 200), (256, 1100))  # fmt: skip


def name_of(spread: bool, tile: Tile) -> str:
    return f"{'spread' if spread else 'serial'} {tile.rows} w{tile.warps} s{tile.stages}"


def measure(num_heads: int, batch: int, context: int) -> tuple[dict[str, float], list[str]]:
    """Microseconds of a launch by candidate, and the candidates whose bits differ from BASE's. Contexts are staggered by up to 40 tokens."""
    num_pages = -(-context // PAGE)
    size = batch * num_pages + 1
    layers = max(2, min(MOST_LAYERS, int(CACHE_BYTES / (size * NUM_KV_HEADS * PAGE * DIM * 4))))
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    caches = [tuple(random(size, NUM_KV_HEADS, PAGE, DIM).transpose(1, 2) for _ in range(2)) for _ in range(layers)]
    table = (torch.randperm(size - 1, generator=generator, device="cuda").to(torch.int32) + 1).view(batch, num_pages)
    q = random(batch, num_heads, DIM) * 1.5
    contexts, lengths = context - np.arange(batch) % min(context, 40), np.ones(batch, np.int64)
    slots, indptr = (torch.arange(count, dtype=torch.int32, device="cuda") for count in (batch, batch + 1))
    seen = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    times: dict[str, float] = {}
    base, different = None, []
    for spread, tile in CANDIDATES:
        tokens = tile_tokens(tile, num_heads // NUM_KV_HEADS)
        count, places = count_tasks(lengths, contexts, tokens, spread)
        listed = np.zeros((count, 4), np.int32)
        plan_tasks(lengths, contexts, tokens, spread, listed, places)
        tasks, number = torch.tensor(listed, device="cuda"), torch.tensor([count], dtype=torch.int32, device="cuda")
        values = torch.empty(max(places, 1), num_heads, DIM, device="cuda")
        largest, total = (torch.empty(max(places, 1), num_heads, device="cuda") for _ in range(2))
        arrived = torch.zeros(max(places, 1), NUM_KV_HEADS, dtype=torch.int32, device="cuda")
        out = torch.full_like(q, torch.nan)
        kernel = dict(scale=DIM**-0.5, window=0, spread=spread, tile=tile, num_programs=count)

        def walk(which: list[tuple[torch.Tensor, ...]]) -> None:
            for keys, cached in which:
                attention(q, keys, cached, table, slots, indptr, seen, tasks, number, values, largest, total, arrived, out, **kernel)

        walk(caches[:1])
        torch.cuda.synchronize()
        base = out.clone() if base is None else base
        if not torch.equal(out, base):
            different.append(name_of(spread, tile))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            walk(caches)
        graph.replay()
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / layers * 1e3)
        times[name_of(spread, tile)] = statistics.median(found)
    return times, different


def main() -> None:
    for num_heads in (32, 16):
        for batch, context in SIZES:
            times, different = measure(num_heads, batch, context)
            best = sorted(times.items(), key=lambda item: item[1])[:6]
            floor = batch * context * NUM_KV_HEADS * DIM * 4 / COPY_TB_S / 1e6
            print(f"{num_heads} heads, {batch} x {context}: {'; '.join(f'{n} {t:.1f}' for n, t in best)}; floor {floor:.1f}; other bits: {different or 'none'}")


if __name__ == "__main__":
    main()
