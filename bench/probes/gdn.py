"""Which tiles Gated DeltaNet's kernels should take: bits, errors and times of every candidate, on a GPU, with the engine's own kernels. Not engine code.

python -m twinfer.bench.probes.gdn        under a minute on an H200, compiling included; SECONDS=n stops timing after n seconds

A tile is lawful when it gave the bits of the first long tile in every check. Outputs of the checks are fp32, so that no rounding hides a difference.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from twinfer.bench.probes.gdn_layer import Heads, Layer, Row, Tiles, expected, random_inputs
from twinfer.bench.probes.measure import graph_us, processes
from twinfer.kernels.gated_norm.kernel import gated_rms_norm
from twinfer.kernels.gdn.kernel import gdn_commits, gdn_longs, gdn_singles
from twinfer.kernels.gdn.state import GdnState, precision_of, state_shapes
from twinfer.kernels.gdn.tasks import LISTS, Lists, plan_lists
from twinfer.kernels.gdn.tiles import CommitTile, LongTile, SingleTile
from twinfer.kernels.gdn.workspace import Workspace, workspace_shapes
from twinfer.kernels.gdn_inputs.kernel import gdn_inputs, write_histories

MODEL = Heads(16, 32, 128, 128)
LONGS = [LongTile(32, 4, 4, 2), LongTile(32, 4, 4, 3), LongTile(16, 4, 4, 2), LongTile(16, 4, 4, 3), LongTile(64, 4, 4, 2), LongTile(64, 4, 8, 2),
         LongTile(32, 8, 4, 2), LongTile(32, 2, 8, 2)]  # fmt: skip
FUSED = [SingleTile(True, *a) for a in ((128, 64, 4, 2), (128, 32, 4, 3), (128, 64, 8, 2), (64, 128, 4, 2), (64, 64, 4, 2), (32, 128, 4, 2), (32, 64, 4, 2),
                                        (16, 128, 4, 2))]  # fmt: skip
TWO = [SingleTile(False, *a) for a in ((128, 64, 4, 2, 128, 4), (128, 64, 4, 2, 64, 4), (128, 32, 4, 3, 128, 4), (128, 64, 8, 2, 128, 8),
                                       (64, 64, 4, 2, 128, 4), (64, 128, 4, 2, 64, 2), (32, 128, 4, 2, 32, 2), (32, 64, 4, 2, 64, 4))]  # fmt: skip
COMMITS = [CommitTile(64, 64, 4), CommitTile(128, 64, 4), CommitTile(64, 64, 8), CommitTile(32, 128, 4)]
BEGUN = time.perf_counter()
SECONDS = float(os.environ.get("SECONDS", "55"))
BASE = Tiles(LONGS[0], FUSED[0], COMMITS[0])


def say(*words: object) -> None:
    print(f"{time.perf_counter() - BEGUN:5.1f} s ", *words, flush=True)


def left() -> float:
    return SECONDS - (time.perf_counter() - BEGUN)


def inputs(num_tokens: int, seed: int, hard: bool) -> Any:
    return random_inputs(num_tokens, MODEL, torch.bfloat16, seed, hard, "cuda")


# ------------------------------------------------------------------------------------------------------------- compiling


def compile_one(job: tuple[Any, bool, torch.dtype]) -> tuple[Any, str]:
    """In a process of its own: what a tile needs goes into Triton's cache. Returns the tile and why it does not run, if so."""
    tile, exact, out = job
    try:
        layer = Layer([random_inputs(66, MODEL, torch.bfloat16, 0, False, "cuda")], exact=exact, out_dtype=out)
        layer.step([(0, 0, 65)] if isinstance(tile, LongTile) else [(0, 0, 1)], tiles_of(tile))
        torch.cuda.synchronize()
    except Exception as error:  # out of shared memory and the like: told, not fatal
        return tile, f"{type(error).__name__}: {str(error)[:160]}"
    return tile, ""


def tiles_of(tile: Any) -> Tiles:
    """BASE with one tile changed."""
    name = {LongTile: "long", SingleTile: "single", CommitTile: "commit"}[type(tile)]
    return replace(BASE, **{name: tile})


def compile_all() -> set[Any]:
    """Tiles that do not run."""
    jobs = [(tile, False, out) for out in (torch.float32, torch.bfloat16) for tile in (*LONGS, *TWO, *FUSED)]
    jobs += [(tile, False, torch.float32) for tile in COMMITS] + [(LONGS[0], True, torch.float32), (FUSED[0], True, torch.float32)]
    with multiprocessing.get_context("fork").Pool(processes()) as pool:
        failed = {tile: why for tile, why in pool.imap_unordered(compile_one, jobs, chunksize=1) if why}
    say(f"compiled {len(jobs)}, do not run: {failed or 'none'}")
    return set(failed)


# ------------------------------------------------------------------------------------------------------------------ bits


class Checks:
    """Sequences of three lengths, each computed alone and whole by the first long tile; everything else is compared with that."""

    def __init__(self, hard: bool, lengths: Sequence[int] = (1000, 700, 331)) -> None:
        self.hard, self.lengths = hard, lengths
        self.sequences = [inputs(n, 10 + i, hard) for i, n in enumerate(lengths)]
        self.whole, self.anchors = [], []
        for x in self.sequences:
            layer = self.layer([x])
            self.whole.append(layer.step([(0, 0, len(x.q))], BASE)[0])
            self.anchors.append(layer.anchor(0))

    def layer(self, sequences: list[Any]) -> Layer:
        return Layer(sequences, out_dtype=torch.float32)

    def run(self, steps: Callable[[list[int]], list[int]], tiles: Callable[[], Tiles], begin: Sequence[int], end: Sequence[int]) -> int:
        """Elements that differ. Sequences go from begin (one long step) to end; steps(positions) says how many tokens each takes next."""
        layer, at, different = self.layer(self.sequences), [0] * len(self.lengths), 0
        outs: list[list[torch.Tensor]] = [[] for _ in self.lengths]
        takes = list(begin)
        while any(takes):
            rows: list[Row] = [(i, at[i], n) for i, n in enumerate(takes) if n]
            for (i, _, n), out in zip(rows, layer.step(rows, tiles()), strict=True):
                outs[i].append(out)
                at[i] += n
            takes = [min(n, end[i] - at[i]) for i, n in enumerate(steps(at))]
        for i, parts in enumerate(outs):
            if parts:
                out = torch.cat(parts)
                different += int((~(out == self.whole[i][: len(out)])).sum())
                if at[i] == self.lengths[i]:
                    different += sum(int((~(a == b)).sum()) for a, b in zip(layer.anchor(i), self.anchors[i], strict=True))
        return different


def bits(failed: set[Any]) -> dict[Any, int]:
    """Differing elements by tile; random mixes are under their names."""
    found: dict[Any, int] = defaultdict(int)
    for hard in (False, True):
        checks = Checks(hard)
        if not all(bool(x.isfinite().all()) for x in checks.whole):
            found["whole"] += 1
        rng = random.Random(1)
        none = [0, 0, 0]
        for tile in LONGS:
            if tile not in failed:
                found[tile] += checks.run(lambda at: none, lambda tile=tile: tiles_of(tile), checks.lengths, checks.lengths)
        singles = [tile for tile in (*FUSED, *TWO) if tile not in failed]
        for number, tile in enumerate(singles if not hard else singles[::3]):  # three sequences at different places, over both ends of a chunk
            begin = ((0, 37, 64), (100, 1, 63), (130, 14, 191))[number % 3]
            end = [min(p + 70, n) for p, n in zip(begin, checks.lengths, strict=True)]
            found[tile] += checks.run(lambda at: [1, 1, 1], lambda tile=tile: tiles_of(tile), begin, end)
        for tile in COMMITS:
            if tile not in failed:
                found[tile] += checks.run(lambda at: [1, 1, 1], lambda tile=tile: tiles_of(tile), (126, 60, 190), (131, 67, 194))

        def anything() -> Tiles:
            good = [[t for t in ts if t not in failed] for ts in (LONGS, [*FUSED, *TWO], COMMITS)]
            return Tiles(*(rng.choice(ts) for ts in good))

        mixes = {"any rows": (1, 1, 2, 3, 5, 16, 63, 64, 65, 130), "verify rows": (1, 2, 4), "pieces": (40, 200, 64)}
        for name, choices in mixes.items():
            for _ in range(1 if name == "verify rows" else 2):
                draw = lambda at, choices=choices: [rng.choice(choices) for _ in at]  # noqa: E731
                found[name + (", hard" if hard else "")] += checks.run(draw, anything, (1, 2, 3), checks.lengths)
    return found


def errors() -> None:
    """Relative Frobenius norm to the fp64 recurrence."""
    for hard in (False, True):
        x = inputs(1024, 9, hard)
        want, anchor = expected(x)
        for exact in (False, True):
            layer = Layer([x], exact=exact, out_dtype=torch.float32)
            (out,) = layer.step([(0, 0, len(x.q))], BASE)

            def error(a: torch.Tensor, b: torch.Tensor) -> str:
                return f"{float((a.double() - b).norm() / b.norm()):.1e}"

            say(f"error{' hard' if hard else ''}{' exact' if exact else ''}: out {error(out, want)}, in bf16 {error(out.bfloat16(), want)}, "
                f"anchor {error(layer.anchor(0)[0], anchor)}")  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- times


def random_tensors(shapes: Any, slots: int | None = None) -> dict[str, torch.Tensor]:
    made = {}
    for name, (dtype, shape) in shapes.items():
        size = shape if slots is None else (slots, *shape)
        made[name] = torch.empty(size, dtype=dtype, device="cuda").normal_(0, 1e-4 if name.endswith("low") else 0.1)
    return made


def token_inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    return tuple(inputs(num_tokens, 3, False))


def decode_times(state: GdnState, failed: set[Any], batch: int) -> None:
    """Cold caches: as many sets of slots in turn as there are."""
    slots = len(state.anchor)
    sets = max(1, min(64, slots // batch))
    arguments = token_inputs(batch)
    precision = precision_of(torch.bfloat16)
    workspace = Workspace(**random_tensors(workspace_shapes(1, batch, MODEL.nv, MODEL.dv, torch.bfloat16, precision)))
    out = torch.empty(batch, MODEL.nv, MODEL.dv, dtype=torch.bfloat16, device="cuda")
    rng = random.Random(2)
    entries = []
    for i in range(sets):
        positions = [64 + rng.randrange(64) for _ in range(batch)]
        lists = Lists(*(torch.zeros(batch, width, dtype=torch.int32).numpy() for width in LISTS.values()))
        counts = plan_lists(np.array(positions), np.ones(batch, np.int64), np.arange(i * batch, (i + 1) * batch) % slots, lists)
        entries.append([torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lists.singles, lists.commits, counts)])

    def timed(tile: SingleTile | CommitTile) -> float:
        if isinstance(tile, SingleTile):
            return graph_us([lambda e=e: gdn_singles(*arguments, state, workspace, e[0], e[2], out, tile) for e in entries])
        return graph_us([lambda e=e: gdn_commits(state, e[1], e[2], tile) for e in entries])

    for name, tiles in (("fused", FUSED), ("two", TWO), ("commit", COMMITS)):
        times = {tile: timed(tile) for tile in tiles if tile not in failed and left() > 1}
        best = sorted(times.items(), key=lambda item: item[1])
        say(f"decode B={batch} {name}: " + "; ".join(f"{short(tile)} {us:.1f}" for tile, us in best))


def short(tile: Any) -> str:
    return "/".join(str(int(getattr(tile, name))) for name in tile.__slots__)


def prefill_times(failed: set[Any], rows: int, length: int) -> None:
    num_tokens = rows * length
    precision = precision_of(torch.bfloat16)
    state = GdnState(**random_tensors(state_shapes(MODEL.nk, MODEL.nv, MODEL.dk, MODEL.dv, torch.bfloat16, precision), rows))
    lists = Lists(*(torch.zeros(num_tokens // 64 + rows, width, dtype=torch.int32).numpy() for width in LISTS.values()))
    counts = plan_lists(np.zeros(rows, np.int64), np.full(rows, length), np.arange(rows), lists)
    tasks, longs = (torch.tensor(lists[i][: counts[i]], device="cuda") for i in (0, 1))
    numbers = torch.tensor(counts, dtype=torch.int32, device="cuda")
    workspace = Workspace(**random_tensors(workspace_shapes(counts.tasks, 1, MODEL.nv, MODEL.dv, torch.bfloat16, precision)))
    arguments = token_inputs(num_tokens)
    out = torch.empty(num_tokens, MODEL.nv, MODEL.dv, dtype=torch.bfloat16, device="cuda")
    times = {}
    for tile in LONGS:
        if tile not in failed and left() > 1:
            times[tile] = graph_us([lambda tile=tile: gdn_longs(*arguments, state, workspace, tasks, longs, numbers, out, tile)] * 3)
    best = sorted(times.items(), key=lambda item: item[1])
    say(f"prefill {rows}x{length}: " + "; ".join(f"{short(tile)} {us:.0f}" for tile, us in best))


def other_times(num_tokens: int) -> None:
    """Inputs, histories and the gated norm: single rows below 1024 tokens, one row above."""
    channels, width = 2 * MODEL.nk * MODEL.dk + MODEL.nv * MODEL.dv, 2 * MODEL.nk * MODEL.dk + MODEL.nv * (2 * MODEL.dv + 2)
    rows = num_tokens if num_tokens < 1024 else 1

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    projected, histories = made(num_tokens, width), made(rows, 3, channels)
    heads = [(MODEL.nk, MODEL.dk), (MODEL.nk, MODEL.dk), (MODEL.nv, MODEL.dv)]
    outs = [made(num_tokens, *h) for h in heads] + [made(num_tokens, MODEL.nv, dtype=torch.float32) for _ in range(2)]
    each = num_tokens // rows
    token_row, slots = ints([t // each for t in range(num_tokens)]), ints(range(rows))
    positions, indptr, context = ints([t % each for t in range(num_tokens)]), ints(range(0, num_tokens + 1, each)), ints([each] * rows)
    weights = (made(channels, 4), made(MODEL.nv, dtype=torch.float32), made(MODEL.nv))
    out, weight, gate = made(num_tokens, MODEL.nv * MODEL.dv), made(MODEL.dv, dtype=torch.float32), projected[:, channels : channels + MODEL.nv * MODEL.dv]
    calls: dict[str, Callable[[], None]] = {
        "inputs": lambda: gdn_inputs(projected, *weights, histories, positions, token_row, slots, *outs),
        "histories": lambda: write_histories(projected, indptr, context, slots, histories),
        "gated norm": lambda: gated_rms_norm(outs[2], gate, weight, out, 1e-6),
    }
    say(f"{num_tokens} tokens in {rows} rows: " + ", ".join(f"{name} {graph_us([call] * 8):.1f}" for name, call in calls.items()))


def main() -> None:
    failed = compile_all()
    say(f"{torch.cuda.get_device_name()}; times in us a layer; long tiles are bv/key warps/value warps/stages,")
    say("single ones fused/bv/bk/warps/stages/second bv/second warps, commits bv/bk/warps")
    found = bits(failed)
    wrong = {tile if isinstance(tile, str) else short(tile): number for tile, number in found.items() if number}
    say(f"bits: {len(found)} subjects, differing elements: {wrong or 'none'}")
    errors()
    state = GdnState(**random_tensors(state_shapes(MODEL.nk, MODEL.nv, MODEL.dk, MODEL.dv, torch.bfloat16, precision_of(torch.bfloat16)), 512))
    for batch in (1, 256, 32, 8, 128):
        decode_times(state, failed, batch)
    del state
    for rows, length in ((1, 8192), (8, 1024)):
        prefill_times(failed, rows, length)
    for num_tokens in (1, 256, 8192):
        other_times(num_tokens)
    say("done")


if __name__ == "__main__":
    main()
