"""The engines that `twinfer compare` knows, each as a Side: greedy tokens and teacher-forced logits. How they are compared is compare.py's.

Greedy tokens come from the engine itself, through its scheduler, pages and prefix cache. The reference's logits come from its model directly, one
forward of the whole sequence into a cache of its own: that is the simplest way to have all of them, at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from twinfer.serve.backend import Backend, Choice, fast_is_here, open_engine
from twinfer.serve.model import Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twinfer.engine.engine import Engine

PAGE = 16  # tokens a page of the cache behind the reference's logits; any size gives the same


@dataclass(frozen=True, slots=True)
class Side:
    """One engine under comparison.

    greedy   (prompt ids, number of tokens) -> so many ids, end tokens ignored
    logits   (ids [T]) -> float64 [T, vocab_size], or None where the engine has no way to give them
    """

    name: str
    where: str
    greedy: Callable[[Sequence[int], int], list[int]]
    logits: Callable[[Sequence[int]], NDArray[np.float64]] | None


def greedy_from(engine: Engine) -> Callable[[Sequence[int], int], list[int]]:
    """An engine's own greedy generation."""

    def greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
        from twinfer.sampling import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        completion = engine.generate(list(prompt), params)[0].completions[0]
        if completion.error is not None:
            from twinfer.errors import StepFailed

            raise StepFailed(completion.error)
        return list(completion.tokens)

    return greedy


def reference_side(engine: Engine, device: str) -> Side:
    """The reference engine; its logits come from the engine's own model and weights."""
    executor: Any = engine.executor
    model = executor.model

    def logits(ids: Sequence[int]) -> NDArray[np.float64]:
        import torch

        from twinfer.engine.flatten import FlatStep
        from twinfer.limits import ceil_div
        from twinfer.reference.cache import KVCache

        config, size, num_pages = model.config, len(ids), ceil_div(len(ids), PAGE)
        shape = (num_pages + 1, PAGE, config.num_kv_heads, config.head_dim)
        cache = KVCache(*([torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(config.num_layers)] for _ in range(2)))

        def i32(*values: int) -> NDArray[np.int32]:
            return np.array(values, np.int32)

        step = FlatStep(
            token_ids=i32(*ids),
            positions=np.arange(size, dtype=np.int32),
            write_slots=np.arange(size, dtype=np.int64),
            row_indptr=i32(0, size),
            page_indptr=i32(0, num_pages),
            page_indices=np.arange(num_pages, dtype=np.int32),
            context=i32(size),
            start=i32(0),
        )
        with torch.inference_mode():
            return _float64(model.logits(model.forward(step, cache)))

    return Side("reference", device, greedy_from(engine), logits)


def fast_side(engine: Engine, device: str) -> Side:
    """The fast engine: tokens only, until it can give logits."""
    return Side("fast", device, greedy_from(engine), None)


def transformers_side(model: Model, dtype: str) -> Side:
    """transformers' own Qwen3, eager attention on the CPU; fp64 is its source with the fp32 casts widened."""
    from transformers import DynamicCache
    from transformers.utils import logging

    from twinfer.golden.widened import load_stock, load_widened

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs: Any = load_widened(model.path) if dtype == "float64" else load_stock(model.path, dtype)
    # The argument's name depends on the version of transformers.
    cache_argument = "cache" if "cache" in signature(theirs.forward).parameters else "past_key_values"

    def greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
        import torch

        tokens: list[int] = []
        cache = {cache_argument: DynamicCache(config=theirs.config)}
        with torch.inference_mode():
            while len(tokens) < max_tokens:
                latest = tokens[-1:] if tokens else list(prompt)
                logits = theirs(input_ids=torch.tensor([latest]), use_cache=True, **cache).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens

    def logits(ids: Sequence[int]) -> NDArray[np.float64]:
        import torch

        with torch.inference_mode():
            return _float64(theirs(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0])

    return Side("transformers", "cpu", greedy, logits)


def _float64(logits: Any) -> NDArray[np.float64]:
    array: NDArray[np.float64] = logits.double().cpu().numpy()
    return array


def available(model: Model, engine: Engine, device: str, dtype: str, limits: dict[str, int], threads: int | None) -> list[Side]:
    """Every side that can run here: the reference first, then fast on a GPU where this build has it, then transformers where it is installed."""
    sides = [reference_side(engine, device)]
    if device.startswith("cuda") and fast_is_here():
        sides.append(fast_side(open_engine(model, Choice(Backend.FAST, device, ""), limits=limits, dtype=dtype, threads=threads), device))
    if find_spec("transformers") is not None:
        sides.append(transformers_side(model, dtype))
    return sides
