"""Which tiles a layer's experts should take: bits and times of every candidate, with the engine's own kernels, on a GPU. Not engine code.

    python -m twinfer.bench.probes.moe                            about 40 s on an H200, compilation in parallel processes included
    python -m twinfer.bench.probes.moe --compile-only             every candidate for sm_90, without a GPU
    TRITON_INTERPRET=1 python -m twinfer.bench.probes.moe --smoke the logic, in float32, on a CPU; no times, and numpy's bits depend on the tile

Each line: a model and a step of T tokens; for each product its candidates from the fastest on, their rate, the floor, and what the table has. Bits: every
candidate's result at every T against the first candidate's at the largest T, pair by pair. At the end the winners, in the form of kernels/experts/tiles.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from twinfer.bench.probes.measure import Job, attempt, graph_us, in_parallel, processes
from twinfer.kernels.experts import kernel as experts
from twinfer.kernels.experts.tiles import Tile, Tiling, tiling_for
from twinfer.kernels.router import kernel as router
from twinfer.kernels.router.operation import unlisted

COPY_TB_S, PRODUCT_TFLOP_S = 4.3, 715.0  # RESULTS.md; research of a sitting's cuBLAS
DENSE = Tile(64, 64, 4, 3)  # of a candidate that is not looked at


@dataclass(frozen=True)
class Model:
    name: str
    h: int
    m: int
    num_experts: int
    k: int


MODELS = (Model("Qwen3.6-35B-A3B", 2048, 512, 256, 8), Model("Qwen3-30B-A3B", 2048, 768, 128, 8))
TOKENS = (1, 8, 64, 256, 2048, 8192)
SMALL = Model("small", 64, 32, 8, 3)

# By rows of a tile.
GATE_UP: dict[int, tuple[Tile, ...]] = {
    16: (
        Tile(32, 128, 4, 5),
        Tile(16, 256, 4, 5),
        Tile(32, 256, 4, 4),
        Tile(64, 128, 4, 4, swap=True),
        Tile(64, 64, 4, 6, swap=True),
        Tile(64, 128, 4, 4, swap=True, tma=True),
        Tile(32, 128, 4, 5, tma=True),
    ),
    32: (Tile(64, 128, 4, 3, swap=True), Tile(64, 64, 4, 5, swap=True, tma=True), Tile(64, 128, 4, 3)),
    64: (Tile(64, 64, 4, 4), Tile(64, 64, 4, 4, tma=True), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3, tma=True)),
    128: (Tile(64, 64, 8, 4), Tile(64, 64, 8, 4, tma=True), Tile(128, 64, 8, 3), Tile(128, 64, 8, 3, tma=True), Tile(64, 64, 4, 4, tma=True)),
}
DOWN: dict[int, tuple[Tile, ...]] = {
    16: (
        Tile(32, 256, 4, 4),
        Tile(32, 128, 4, 5),
        Tile(64, 128, 4, 4, swap=True),
        Tile(64, 256, 4, 2, swap=True),
        Tile(128, 128, 4, 3, swap=True),
        Tile(64, 128, 4, 4, swap=True, tma=True),
        Tile(64, 128, 4, 4),
    ),
    32: (Tile(128, 128, 4, 3, swap=True), Tile(64, 128, 4, 4, swap=True), Tile(128, 64, 4, 4, swap=True, tma=True)),
    64: (Tile(128, 64, 4, 4), Tile(128, 64, 4, 4, tma=True), Tile(256, 64, 8, 3), Tile(256, 64, 8, 3, tma=True)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 4, tma=True), Tile(256, 64, 8, 3), Tile(256, 64, 8, 3, tma=True)),
}


def rows_for(model: Model, num_tokens: int) -> tuple[int, ...]:
    """Rows that are worth a look: those around the pairs of an expert on average."""
    average = num_tokens * model.k / model.num_experts
    return (16,) if average <= 2 else (16, 32, 64) if average <= 32 else (32, 64, 128) if average <= 96 else (64, 128)


def label(rows: int, tile: Tile) -> str:
    return f"{rows}x{tile.bn}x{tile.bk} w{tile.warps} s{tile.stages}{' swap' * tile.swap}{' tma' * tile.tma}"


# ------------------------------------------------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Draw:
    """Tokens of a step that chose their experts at random: x [T, h], experts and shares [T, k]."""

    x: torch.Tensor
    experts: torch.Tensor
    shares: torch.Tensor

    def lists(self, model: Model, rows: int) -> dict[str, torch.Tensor]:
        lists = unlisted(self.experts.numel(), model.num_experts, rows, self.experts.device)
        router.group(self.experts, **lists, rows=rows)
        del lists["offsets"]
        return lists


class Bench:
    """One model's weights, its draws, and the results that all others must have."""

    def __init__(self, model: Model, tokens: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self.gate_up = self._random(model.num_experts, 2 * model.m, model.h) * model.h**-0.5
        self.down = self._random(model.num_experts, model.h, model.m) * model.m**-0.5
        self.all = self.draw(tokens[-1])
        rows = 16
        lists = self.all.lists(model, rows)
        pairs = lists["pairs"].long()
        activated = self.activated(self.all)
        experts.grouped_gate_up(
            self.all.x, **lists, weight=self.gate_up, activated=activated, num_per_token=model.k, tiling=Tiling(rows, GATE_UP[rows][0], DENSE)
        )
        self.by_pair = torch.empty_like(activated)
        self.by_pair[pairs] = activated
        self.outputs = self.empty_outputs(self.all)
        experts.grouped_down(activated, **lists, weight=self.down, outputs=self.outputs, tiling=Tiling(rows, DENSE, DOWN[rows][0]))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)

    def draw(self, num_tokens: int) -> Draw:
        """By the router's kernel, of random logits."""
        k, options = self.model.k, {"device": self.device}
        shares = torch.empty(num_tokens, k, dtype=self.dtype, **options)
        chosen = torch.empty(num_tokens, k, dtype=torch.int32, **options)
        rows = torch.zeros(num_tokens, dtype=torch.int32, **options)
        router.route(self._random(num_tokens, self.model.num_experts), rows, shares, chosen, True)
        return Draw(self._random(num_tokens, self.model.h), chosen, shares)

    def draws(self, num_tokens: int) -> list[Draw]:
        """The first tokens of `all`, and others, so that weights are cold: together they need more than a cache holds."""
        first = Draw(*(tensor[:num_tokens].clone() for tensor in (self.all.x, self.all.experts, self.all.shares)))
        more = {1: 23, 8: 7, 64: 2, 256: 1}.get(num_tokens, 0) if self.device == "cuda" else 1
        return [first, *(self.draw(num_tokens) for _ in range(more))]

    def activated(self, draw: Draw) -> torch.Tensor:
        return torch.full((draw.experts.numel(), self.model.m), torch.nan, dtype=self.dtype, device=self.device)

    def empty_outputs(self, draw: Draw) -> torch.Tensor:
        return torch.full((*draw.experts.shape, self.model.h), torch.nan, dtype=self.dtype, device=self.device)

    def gate_up_calls(self, draws: list[Draw], rows: int, tile: Tile) -> tuple[list[Callable[[], Any]], Callable[[], bool]]:
        """A call for each draw, and whether the first one's bits are those of `by_pair`."""
        calls, tiling = [], Tiling(rows, tile, DENSE)
        lists = [draw.lists(self.model, rows) for draw in draws]
        results = [self.activated(draw) for draw in draws]
        for draw, own, activated in zip(draws, lists, results, strict=True):
            calls.append(
                lambda draw=draw, own=own, activated=activated: experts.grouped_gate_up(
                    draw.x, **own, weight=self.gate_up, activated=activated, num_per_token=self.model.k, tiling=tiling
                )
            )
        return calls, lambda: torch.equal(results[0], self.by_pair[lists[0]["pairs"].long()])

    def down_calls(self, draws: list[Draw], rows: int, tile: Tile) -> tuple[list[Callable[[], Any]], Callable[[], bool]]:
        """As `gate_up_calls`, from activations of the first draw."""
        calls, tiling = [], Tiling(rows, DENSE, tile)
        lists = [draw.lists(self.model, rows) for draw in draws]
        activated, results = self.by_pair[lists[0]["pairs"].long()], [self.empty_outputs(draw) for draw in draws]
        for own, outputs in zip(lists, results, strict=True):
            calls.append(lambda own=own, outputs=outputs: experts.grouped_down(activated, **own, weight=self.down, outputs=outputs, tiling=tiling))
        return calls, lambda: torch.equal(results[0], self.outputs[: len(draws[0].x)])

    def whole(self, draws: list[Draw], tiling: Tiling) -> dict[str, list[Callable[[], Any]]]:
        """Calls of the other kernels, and of all together by one tiling."""
        found: dict[str, list[Callable[[], Any]]] = {name: [] for name in ("route", "group", "combine", "layer")}
        for draw in draws:
            logits, rows = self._random(len(draw.x), self.model.num_experts), torch.zeros(len(draw.x), dtype=torch.int32, device=self.device)
            shares, chosen, out = torch.empty_like(draw.shares), torch.empty_like(draw.experts), torch.empty_like(draw.x)
            lists = unlisted(chosen.numel(), self.model.num_experts, tiling.rows, chosen.device)
            own = {name: lists[name] for name in ("pairs", "tiles", "num_tiles")}
            activated, outputs = self.activated(draw), self.empty_outputs(draw)
            route = lambda a=logits, b=rows, c=shares, d=chosen: router.route(a, b, c, d, True)  # noqa: E731
            group = lambda a=chosen, b=lists: router.group(a, **b, rows=tiling.rows)  # noqa: E731
            combine = lambda a=outputs, b=shares, c=chosen, d=out: experts.combine(a, b, c, d)  # noqa: E731

            def layer(route=route, group=group, combine=combine, x=draw.x, own=own, activated=activated, outputs=outputs) -> None:  # type: ignore[no-untyped-def]
                route()
                group()
                experts.grouped_gate_up(x, **own, weight=self.gate_up, activated=activated, num_per_token=self.model.k, tiling=tiling)
                experts.grouped_down(activated, **own, weight=self.down, outputs=outputs, tiling=tiling)
                combine()

            layer()
            for name, call in (("route", route), ("group", group), ("combine", combine), ("layer", layer)):
                found[name].append(call)
        return found


def rate(us: float, num_bytes: float, flops: float) -> str:
    """TB/s where reading is the floor, else TFLOP/s."""
    return f"{num_bytes / us / 1e6:.2f} TB/s" if _reading(num_bytes, flops) else f"{flops / us / 1e6:.0f} TFLOP/s"


def floor(num_bytes: float, flops: float) -> float:
    return max(num_bytes / COPY_TB_S, flops / PRODUCT_TFLOP_S) / 1e6


def _reading(num_bytes: float, flops: float) -> bool:
    return num_bytes / COPY_TB_S > flops / PRODUCT_TFLOP_S


def probe(model: Model, tokens: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    bench = Bench(model, tokens, device, dtype)
    timed = graph_us if device == "cuda" else lambda calls: sum(call() is None for call in calls) / len(calls)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    others: list[str] = []
    best: dict[str, list[str]] = {"gate_up": [], "down": []}
    num_compared = 0
    for num_tokens in tokens:
        draws = bench.draws(num_tokens)
        used = sum(len(draw.experts.unique()) for draw in draws) / len(draws)
        table = tiling_for(capability, dtype, num_tokens * model.k, model.num_experts)
        line, num_pairs = [f"T={num_tokens}: {used:.0f} experts"], num_tokens * model.k
        for part, candidates, calls_of, own in (
            ("gate_up", GATE_UP, bench.gate_up_calls, table.gate_up),
            ("down", DOWN, bench.down_calls, table.down),
        ):
            wide = 2 if part == "gate_up" else 1
            flops = 2.0 * wide * num_pairs * model.h * model.m
            num_bytes = (used * wide * model.h * model.m + num_pairs * (model.h / (model.k if wide == 2 else 1) + model.m)) * bench.down.element_size()
            times: dict[str, float] = {}
            looked_at = [(rows, tile) for rows in rows_for(model, num_tokens) for tile in candidates[rows]]
            for rows, tile in dict.fromkeys([(table.rows, own), *looked_at]):
                calls, same = calls_of(draws, rows, tile)
                us = attempt(lambda calls=calls: timed(calls))
                if us is None:
                    continue
                num_compared += 1
                times[label(rows, tile)] = us
                if not same():
                    others.append(f"{part} T={num_tokens} {label(rows, tile)}")
            ranked = sorted(times.items(), key=lambda item: item[1])
            best[part].append(f"T={num_tokens} {ranked[0][0]}")
            shown = "; ".join(f"{name} {us:.1f}" for name, us in ranked[:4])
            own_us = times.get(label(table.rows, own))
            of_table = "not timed" if own_us is None else f"{own_us:.1f}"
            line.append(f"  {part}: {shown} | {rate(ranked[0][1], num_bytes, flops)}, floor {floor(num_bytes, flops):.1f}, table {of_table}")
        rest = {name: attempt(lambda calls=calls: timed(calls)) for name, calls in bench.whole(draws, table).items()}
        line.append("  " + ", ".join(f"{name} {'not timed' if us is None else f'{us:.1f}'}" for name, us in rest.items()))
        print(f"{model.name} " + "\n".join(line), flush=True)
        del draws
    print(f"{model.name}: {num_compared} results compared, other bits: {'; '.join(others) or 'none'}")
    for part, winners in best.items():
        print(f"{model.name} fastest {part}: {'; '.join(winners)}", flush=True)


# ------------------------------------------------------------------------------------------------------- compilation


def jobs() -> list[Job]:
    """Every candidate and the table of sm_90, once: sizes of K and N are run-time arguments, which all tiles divide."""
    found: list[Job] = []
    tables = {tiling_for((9, 0), torch.bfloat16, t * model.k, model.num_experts) for model in MODELS for t in TOKENS}
    for gated, candidates in ((True, GATE_UP), (False, DOWN)):
        listed = [(rows, tile) for rows, tiles in candidates.items() for tile in tiles]
        listed += [(tiling.rows, tiling.gate_up if gated else tiling.down) for tiling in tables]
        for rows, tile in dict.fromkeys(listed):
            model = MODELS[0]
            n, k = (model.m, model.h) if gated else (model.h, model.m)

            def arguments(device: str, tile: Tile = tile, n: int = n, k: int = k, gated: bool = gated) -> list[Any]:
                x, i = (torch.zeros(64, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int32))
                weight: Any = x
                if tile.tma:
                    weight = TensorDescriptor.from_tensor(torch.zeros(512, k, dtype=torch.bfloat16, device=device), [tile.bn, tile.bk])
                return [x, i, i, i, weight, x, 8, n, k, 8 if gated else 1]

            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            name = f"{'gate_up' if gated else 'down'} {label(rows, tile)}"
            found.append(Job(name, experts.experts_kernel, arguments, experts.constants(tile, rows, k, gated), options))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    begin = time.perf_counter()
    if asked.smoke:
        probe(SMALL, (1, 8, 40), "cpu", torch.float32)
        return
    good, bad = in_parallel(jobs(), warm=not asked.compile_only, processes=processes())
    print(
        "\n".join(sorted(good) if asked.compile_only else []),
        "\n".join(sorted(bad)),
        f"{len(good)} compiled, {len(bad)} not: {time.perf_counter() - begin:.0f} s",
    )
    if asked.compile_only:
        raise SystemExit(bool(bad))
    for model in MODELS:
        probe(model, TOKENS, "cuda", torch.bfloat16)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
