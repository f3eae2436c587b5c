"""Floors: the least time that a shape needs for a step or a whole workload, from bytes that must move and products that must be made.

What is counted, once each: per step the weights (the embedding only where it is the head too), the keys and values of every row's context, one new
key and value a token, the logits of sampled positions; two FLOP a weight and token, the head only at sampled positions, and causal attention. Of
experts, those that a step's tokens go through: as many distinct ones as uniform choices give on average (`distinct_experts`). Of a state, what a row
reads of it and writes back, once each a step, and four FLOP an element and token (recall, write). A step
has two phases that can't hide each other, since kernels run one after another: the weights' products, then cache and logits; each takes the larger
of its bytes over the bandwidth and its FLOP over the matmul rate. Activations, launches, sampling and the host cost nothing here.

A workload's floor is that of the closed loop itself, step by step with its tail: the load generator drives a peer (`FloorPeer`) that moves the
clock by each step's floor. Its scheduling is the engine's: decode rows first, then prompts in order of arrival, up to `max_step_tokens`.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from twinfer.bench.load import News, closed_loop
from twinfer.bench.shapes import SHAPES, shape_config
from twinfer.bench.table import text_table
from twinfer.bench.workloads import WORKLOADS, Item, Workload, workload
from twinfer.config import ModelConfig

BF16_BYTES = 2
STATE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a device reaches: bytes a second (read and written bytes counted alike) and bf16 matmul FLOP a second."""

    bytes_per_s: float
    flop_per_s: float


# By device slug. H200: device-to-device copy 4.257 TB/s and read 4.42, taken as 4.3; 8192^3 matmul of random data 715 TFLOP/s; both measured.
CEILINGS = {"nvidia-h200": Ceiling(4.3e12, 715e12)}


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and FLOP of one step, by phase."""

    weight_bytes: float
    weight_flop: float
    cache_bytes: float
    cache_flop: float

    def seconds(self, ceiling: Ceiling) -> float:
        """The two phases one after the other, each at its ceiling."""
        weights = max(self.weight_bytes / ceiling.bytes_per_s, self.weight_flop / ceiling.flop_per_s)
        return weights + max(self.cache_bytes / ceiling.bytes_per_s, self.cache_flop / ceiling.flop_per_s)


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step: `length` tokens after `start`, whether it samples, and how many of its first tokens others share."""

    start: int
    length: int
    samples: bool = True
    shared: int = 0


def body_parameters(config: ModelConfig) -> int:
    """Weights that multiply every token: projections, dense feed forwards, routers and shared experts (vectors are a few millionths)."""
    queries = 2 if config.attention_gate else 1
    attention = config.hidden_size * config.head_dim * ((queries + 1) * config.num_heads + 2 * config.num_kv_heads)
    total = config.num_attention_layers * attention
    if config.gdn is not None:
        total += config.num_gdn_layers * config.hidden_size * (config.gdn.conv_dim + 2 * config.gdn.value_dim + 2 * config.gdn.num_value_heads)
    for layer in range(config.num_layers):
        if config.experts is not None and config.has_experts(layer):
            shared = config.experts.shared_intermediate_size
            total += config.hidden_size * (config.experts.num_experts + (0 if shared is None else 3 * shared + 1))
        else:
            total += 3 * config.hidden_size * config.intermediate_size
    return total


def expert_parameters(config: ModelConfig) -> int:
    """Weights of one expert in every layer that has any."""
    if config.experts is None:
        return 0
    return sum(config.experts.layers) * 3 * config.hidden_size * config.experts.intermediate_size


def distinct_experts(config: ModelConfig, tokens: int) -> float:
    """Experts of a layer that `tokens` tokens go through, on average where each chooses uniformly: E (1 - (1 - k / E)^tokens)."""
    if config.experts is None:
        return 0.0
    num = config.experts.num_experts
    return float(num * (1.0 - (1.0 - config.experts.num_per_token / num) ** tokens))


def state_elements(config: ModelConfig) -> int:
    """Elements of one sequence's states in all layers; they are float32."""
    gdn = config.gdn
    return 0 if gdn is None else config.num_gdn_layers * gdn.num_value_heads * gdn.key_head_dim * gdn.value_head_dim


def cache_bytes_per_token(config: ModelConfig, item_bytes: int = BF16_BYTES) -> int:
    """Keys and values of one token in all layers of attention."""
    return config.num_attention_layers * 2 * config.num_kv_heads * config.head_dim * item_bytes


def step_work(config: ModelConfig, rows: Sequence[Row], item_bytes: int = BF16_BYTES) -> Work:
    """The work of one step. Tokens that rows share are read once for all of them; their attention is computed for each."""
    body, head = body_parameters(config), config.hidden_size * config.vocab_size
    tokens = sum(row.length for row in rows)
    samples = sum(row.samples for row in rows)
    shared = max((row.shared for row in rows), default=0)
    read = shared + sum(row.start + row.length - row.shared for row in rows)
    # token i of a row sees start + i + 1 keys; four FLOP a key and element: q.k and p.v
    seen = sum(row.length * row.start + row.length * (row.length + 1) // 2 for row in rows)
    expert, states = expert_parameters(config), state_elements(config)
    chosen = 0 if config.experts is None else config.experts.num_per_token
    began = sum(row.start > 0 for row in rows)  # a state that is nothing yet is not read
    cache_bytes = (read + tokens) * cache_bytes_per_token(config, item_bytes) + samples * config.vocab_size * item_bytes
    return Work(
        weight_bytes=(body + distinct_experts(config, tokens) * expert + (head if samples else 0)) * item_bytes,
        weight_flop=2.0 * ((body + chosen * expert) * tokens + head * samples),
        cache_bytes=cache_bytes + (began + len(rows)) * states * STATE_BYTES,
        cache_flop=4.0 * seen * config.num_heads * config.head_dim * config.num_attention_layers + 4.0 * states * tokens,
    )


class FloorClock:
    """Time that moves only when the peer says how long a step takes."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


@dataclass(slots=True)
class _Running:
    key: int
    known: int  # tokens of prompt and output so far
    computed: int
    left: int
    shared: int


class FloorPeer:
    """An ideal engine: schedules like ours, and each step takes exactly its floor.

    cached  tokens of every prompt that a prefix cache holds already, read once a step by all rows together
    """

    def __init__(self, config: ModelConfig, ceiling: Ceiling, clock: FloorClock, max_step_tokens: int, max_batch: int, cached: int = 0) -> None:
        self.config, self.ceiling, self.clock = config, ceiling, clock
        self.max_step_tokens, self.max_batch, self.cached = max_step_tokens, max_batch, cached
        self.num_steps = 0
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._waiting.append(_Running(key, len(prompt), self.cached, max_tokens, self.cached))

    def poll(self) -> list[News]:
        """One step: the clock moves by its floor, rows whose known tokens are all computed sample one token."""
        while self._waiting and len(self._running) < self.max_batch:
            self._running.append(self._waiting.popleft())
        room, chosen = self.max_step_tokens, []
        for request in sorted(self._running, key=lambda r: r.known - r.computed > 1):  # stable: decode rows, then by arrival
            length = min(request.known - request.computed, room)
            if length:
                chosen.append((request, length))
                room -= length
        rows = [Row(r.computed, n, r.computed + n == r.known, r.shared) for r, n in chosen]
        self.clock.time += step_work(self.config, rows).seconds(self.ceiling)
        self.num_steps += 1
        news = []
        for request, length in chosen:
            request.computed += length
            if request.computed == request.known:
                request.known += 1
                request.left -= 1
                news.append(News(request.key, 1, finished=request.left == 0))
        self._running = [r for r in self._running if r.left]
        return news


def workload_floor(config: ModelConfig, workload: Workload, ceiling: Ceiling, max_step_tokens: int = 8192, page_size: int = 16) -> dict[str, float]:
    """The workload's metrics on an ideal engine: the names and the arithmetic of `Outcome.metrics`."""
    lengths = workload.lengths()
    # a prefix hit takes whole pages and leaves at least one token to compute
    cached = (lengths[0][0] - 1) // page_size * page_size if workload.shared_prompt else 0
    clock = FloorClock()
    peer = FloorPeer(config, ceiling, clock, max_step_tokens, workload.concurrency, cached)
    items = [Item((0,) * prompt, output) for prompt, output in lengths]
    return closed_loop(peer, items, workload.concurrency, clock).metrics()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the floors of workloads for one model."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.roofline", description="Floors of the workloads, the closed loop replayed with its tail.")
    parser.add_argument("--model", default="qwen3-8b", help=f"a shape ({', '.join(SHAPES)}) or a checkpoint directory")
    parser.add_argument("--workload", action="append", help="may be given several times (default: all)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, read and written bytes counted alike (default: H200, measured)")
    parser.add_argument("--matmul", type=float, default=715, help="bf16 TFLOP/s (default: H200, measured)")
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    try:
        config = shape_config(options.model) if options.model in SHAPES else ModelConfig.from_file(options.model)
        chosen = [workload(name) for name in options.workload or WORKLOADS]
    except ValueError as error:  # what twinfer raises for bad input is one too
        print(f"error: {error}", file=sys.stderr)
        return 2
    ceiling = Ceiling(options.bandwidth * 1e12, options.matmul * 1e12)
    names = ("out_tok_s", "tpot_ms", "ttft_ms")
    rows = []
    for load in chosen:
        floor = workload_floor(config, load, ceiling, options.max_step_tokens)
        rows.append([load.name, *(f"{floor[name]:,.3f}" if name in floor else "-" for name in names)])
    print(f"floors of {options.model} at {options.bandwidth:g} TB/s and {options.matmul:g} TFLOP/s")
    print(text_table(["workload", *names], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
