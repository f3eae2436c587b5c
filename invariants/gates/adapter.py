"""Adapter: the little that a gate asks of an engine, and what it gets back. No engine is imported here, and no torch.

An engine's maintainer writes a factory, `make(setup: Setup) -> Adapter`. What must be there is `dtype`, `capabilities` and `generate`; the rest is
optional, and each capability that is not declared costs the gates that need it. docs/gates.md has an adapter from beginning to end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

DTYPES = ("float64", "float32", "float16", "bfloat16")

CAPABILITIES: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "answers hold the log probability of each generated token (of the raw logits, in nat)",
        "prompt_logprobs": "on request, answers hold the log probabilities of the prompt's tokens from the second on",
        "batch": "the requests of one `generate` call are computed together, not one after another",
        "same_bits": "the same call gives the same log probabilities to the bit when nothing is cached",
        "one_arithmetic": "log probabilities have the same bits in every batch, chunk and mixed step, and behind prefix hits (law 2)",
        "step": "`add` and `step`: requests come between steps, and `step` tells what each step brought",
        "abort": "`abort` takes back a request that `add` queued",
        "refusal": "a bad request is refused (`Refused`, or an answer with an error) and the engine serves on",
        "cached_tokens": "answers say how many prompt tokens came from the prefix cache, and `page_size` is the adapter's attribute "
        "(`hit_grid` too, where hits are multiples of more than a page, as for models that keep states)",
        "cache_salt": "requests with different `cache_salt` share no pages",
        "pages": "`pages` counts free, held and cached pages",
        "set_num_pages": "`Setup.num_pages` is obeyed",
        "set_chunk": "`Setup.max_chunk_tokens` and `Setup.max_step_tokens` are obeyed",
        "set_prefix_cache": "`Setup.prefix_cache = False` is obeyed",
    }
)
"""What an adapter may declare. A gate names those that it needs and is skipped, and counted, without them."""

NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"step": ("add", "step"), "abort": ("abort",), "pages": ("pages",), "cached_tokens": ("page_size",)}
)
"""Attributes that a capability brings with it."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is to be made. None leaves a value to the engine.

    model             directory of a checkpoint in Hugging Face format: Qwen3, 3 layers (or what --twinfer-model says)
    dtype             what --twinfer-dtype says; the adapter's own `dtype` says what it became
    max_context       tokens of one request, prompt and output, that must fit
    max_batch         requests that must be able to run at once
    num_pages         pages of the whole pool, where "set_num_pages" is declared
    max_chunk_tokens  prompt tokens of one request in a step, where "set_chunk" is declared
    max_step_tokens   tokens of a step over all requests, likewise
    prefix_cache      False, where "set_prefix_cache" is declared: no page is shared or kept. True is wanted of all others
    """

    model: Path
    dtype: str | None = None
    max_context: int = 2304
    max_batch: int = 16
    num_pages: int | None = None
    max_chunk_tokens: int | None = None
    max_step_tokens: int | None = None
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: exactly `max_tokens` tokens, greedily (the likeliest; temperature 0), end tokens ignored."""

    prompt: tuple[int, ...]
    max_tokens: int
    prompt_logprobs: bool = False
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an Ask.

    tokens             generated token ids
    logprobs           one a generated token ("logprobs")
    prompt_logprobs    one a prompt token but the first, if asked for ("prompt_logprobs")
    num_cached_tokens  prompt tokens from the prefix cache ("cached_tokens")
    error              why the request failed or was refused; then nothing else counts
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    prompt_logprobs: Sequence[float] | None = None
    num_cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What one step brought for one request: its new tokens, and on the last event `finished`. `request` is what `add` returned."""

    request: Hashable
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    num_cached_tokens: int | None = None
    finished: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the pool. held: by requests; cached: by none, but findable; total: all that can be given."""

    total: int
    free: int
    held: int
    cached: int


class Refused(Exception):
    """What an adapter raises for a request that its engine refuses. Any other exception means that the engine broke."""


class Adapter(Protocol):
    """An engine as the gates see it: the part that every engine has. `close()` is called if there is one, before another engine is made."""

    dtype: str
    capabilities: Collection[str]

    def generate(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        """Runs requests to their ends; answers in order."""
        ...


class SteppingAdapter(Adapter, Protocol):
    """What the capabilities "step", "abort", "pages" and "cached_tokens" add."""

    page_size: int  # and, where the length of a hit is a multiple of something larger, `hit_grid`: of how many tokens

    def add(self, ask: Ask) -> Hashable:
        """Queues a request; computes nothing."""
        ...

    def step(self) -> Sequence[Event]:
        """Runs one forward pass, and says what it brought (with look-ahead: what an earlier one did)."""
        ...

    def abort(self, request: Hashable) -> None:
        """Ends a request; no event of it follows but a last one, `finished` and without tokens, or none."""
        ...

    def pages(self) -> Pages:
        """The pool as it is between two steps."""
        ...


Factory = Callable[[Setup], Any]
"""Makes an Adapter. Raises what it likes: a gate's engine that can't be made is an error, never a skip."""


class AdapterError(Exception):
    """The adapter itself is wrong: an unknown capability, a method that is missing, a dtype that there is no tolerance for."""


def check_adapter(adapter: Any) -> None:
    """Raises AdapterError naming the attribute and what it must be."""
    name = type(adapter).__name__
    for attribute in ("dtype", "capabilities", "generate"):
        if not hasattr(adapter, attribute):
            raise AdapterError(f"{name} has no attribute {attribute!r}: every adapter needs dtype, capabilities and generate")
    if adapter.dtype not in DTYPES:
        raise AdapterError(f"{name}.dtype = {adapter.dtype!r}: must be one of {', '.join(DTYPES)}")
    if isinstance(adapter.capabilities, str):
        raise AdapterError(f"{name}.capabilities = {adapter.capabilities!r}: must be a set of names")
    for capability in sorted(adapter.capabilities):
        if capability not in CAPABILITIES:
            raise AdapterError(f"{name}.capabilities holds {capability!r}: must be of {', '.join(CAPABILITIES)}")
        for attribute in NEEDS.get(capability, ()):
            if not hasattr(adapter, attribute):
                raise AdapterError(f"{name} declares {capability!r} but has no attribute {attribute!r}")
    if "cached_tokens" in adapter.capabilities and (not isinstance(adapter.page_size, int) or adapter.page_size < 1):
        raise AdapterError(f"{name}.page_size = {adapter.page_size!r}: must be a number of tokens, at least 1")
    grid = getattr(adapter, "hit_grid", None)
    if grid is not None and (not isinstance(grid, int) or grid < 1 or ("cached_tokens" in adapter.capabilities and grid % adapter.page_size)):
        raise AdapterError(f"{name}.hit_grid = {grid!r}: must be a number of tokens that is a multiple of page_size, or not be there")
    if "abort" in adapter.capabilities and "step" not in adapter.capabilities:
        raise AdapterError(f"{name} declares 'abort' without 'step': only requests that were added can be aborted")
