"""The workloads that every engine is measured with: how many requests, how many at once, how long. Not how they are driven (load.py).

Names and shapes are those of the published comparison against vLLM, nano-vllm and transformers; a name always means the same lengths and the
same prompts, so records of different days and engines can be put side by side. A smaller version has another name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

PROMPT_SEED = 7  # of token ids
LENGTH_SEED = 0  # of drawn lengths: the one that nano-vllm's own benchmark uses

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Lengths in tokens, uniform from `low` to `high` inclusive."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"span {self.low}..{self.high}: needs 1 <= low <= high")

    def draw(self, rng: random.Random) -> int:
        """One length; a span of a single length takes nothing from `rng`."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Item:
    """One request: prompt ids and how many tokens to generate, no more and no fewer."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A fixed set of requests.

    num_requests  in all
    concurrency   in flight at once in a closed loop
    prompt, output  lengths in tokens
    shared_prompt all requests have one prompt, which one short request has brought into the prefix cache before the clock starts
    metric        the one that the workload is about: what a plot shows
    """

    name: str
    num_requests: int
    concurrency: int
    prompt: Span
    output: Span
    shared_prompt: bool = False
    metric: str = "out_tok_s"

    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(prompt, output) tokens of every request. All prompts are drawn before all outputs, as the peers were driven."""
        rng = random.Random(LENGTH_SEED)
        prompts = [self.prompt.draw(rng) for _ in range(self.num_requests)]
        return tuple((length, self.output.draw(rng)) for length in prompts)

    def items(self, vocab_size: int) -> tuple[Item, ...]:
        """The requests, the same ones every time for one name and vocabulary."""
        rng = random.Random(f"{PROMPT_SEED}/{self.name}")
        lengths = self.lengths()
        shared = _prompt(rng, lengths[0][0], vocab_size) if self.shared_prompt else None
        return tuple(Item(shared or _prompt(rng, prompt, vocab_size), output) for prompt, output in lengths)

    @property
    def max_context(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths())

    def first_round(self) -> Workload:
        """As many requests as are in flight at once, under a name that says so: of a static batch, whose rounds are alike, that tells as much."""
        return replace(self, name=f"{self.name}{FIRST}", num_requests=min(self.num_requests, self.concurrency))

    def scaled(self, factor: int) -> Workload:
        """The workload with requests, concurrency and lengths divided by `factor`, rounded up, under a name that says so."""
        if factor < 1:
            raise ValueError(f"scale {factor}: must be at least 1")
        if factor == 1:
            return self
        return replace(
            self,
            name=f"{self.name}_div{factor}",
            num_requests=_shrink(self.num_requests, factor),
            concurrency=_shrink(self.concurrency, factor),
            prompt=Span(_shrink(self.prompt.low, factor), _shrink(self.prompt.high, factor)),
            output=Span(_shrink_output(self.output.low, factor), _shrink_output(self.output.high, factor)),
        )


def _shrink(value: int, factor: int) -> int:
    return -(-value // factor)


def _shrink_output(value: int, factor: int) -> int:
    """An output of one token stays one (prefill is measured); any other keeps two, since the time between tokens needs two."""
    return value if value == 1 else max(2, _shrink(value, factor))


def _prompt(rng: random.Random, length: int, vocab_size: int) -> Prompt:
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def _fixed(tokens: int) -> Span:
    return Span(tokens, tokens)


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("bs1_128_256", 2, 1, _fixed(128), _fixed(256), metric="tpot_ms"),
        Workload("conc64_128_256", 200, 64, _fixed(128), _fixed(256)),
        Workload("conc64_2048_256", 200, 64, _fixed(2048), _fixed(256)),
        Workload("conc256_1024_128", 512, 256, _fixed(1024), _fixed(128)),
        Workload("prefill_8192_1", 8, 1, _fixed(8192), _fixed(1), metric="ttft_ms"),
        # nano-vllm's own benchmark: 256 sequences, prompt and output lengths uniform in 100..1024
        Workload("nano_256", 256, 256, Span(100, 1024), Span(100, 1024)),
        Workload("prefix_burst_256x3000_64", 256, 256, _fixed(3000), _fixed(64), shared_prompt=True),
    )
}
FIRST = "_first"
WARM_TOKENS = 8  # output of the request that warms a shared prompt


def workload(name: str) -> Workload:
    """The workload `name`, `NAME_divN` for one that is N times smaller, either with `_first` for its first round. Raises ValueError that lists the names."""
    if name.endswith(FIRST):
        return workload(name.removesuffix(FIRST)).first_round()
    base, found, factor = name.rpartition("_div")
    if found and factor.isdigit() and base in WORKLOADS:
        return WORKLOADS[base].scaled(int(factor))
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is unknown; known: {', '.join(WORKLOADS)}, each also as NAME_divN (N times smaller)")
    return WORKLOADS[name]
