"""The engines that `twinfer compare` knows, each as a Side: greedy tokens and teacher-forced logits. How they are compared is compare.py's.

Greedy tokens come from the engine itself, through its scheduler, pages and prefix cache. The reference's logits come from its model directly, one
forward of the whole sequence into a cache of its own: that is the simplest way to have all of them, at every position. The fast engine's logits are
those of its own steps: the prompt's from prefill, the generated tokens' from decode, as long as its tokens are the reference's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from twinfer.config import ModelConfig
from twinfer.serve.backend import Backend, choose, why_not_fast
from twinfer.serve.failure import BadInput, NotAvailable
from twinfer.serve.model import CONFIG, Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from twinfer.engine.engine import Engine

OPPONENTS = ("fast", "transformers")
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
        from twinfer.reference.hybrid import Hybrid

        config, size, num_pages = model.config, len(ids), ceil_div(len(ids), PAGE)
        shape = (num_pages + 1, PAGE, config.num_kv_heads, config.head_dim)
        layers = range(config.num_attention_layers)
        cache = KVCache(*([torch.empty(shape, dtype=model.dtype, device=model.device) for _ in layers] for _ in range(2)))

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
            state_slot=i32(0),
        )
        with torch.inference_mode():
            hidden = model.forward(step, cache, _one_state(model), [0]) if isinstance(model, Hybrid) else model.forward(step, cache)
            return _float64(model.logits(hidden))

    return Side("reference", device, greedy_from(engine), logits)


def _one_state(model: Any) -> Any:
    """States with one slot for a model of the later types."""
    import torch

    from twinfer.reference.qwen3 import wide_dtype
    from twinfer.reference.state import StateCache

    gdn = model.config.gdn
    if gdn is None:
        return StateCache((), ())
    layers = range(model.config.num_gdn_layers)
    shape = (1, gdn.num_value_heads, gdn.key_head_dim, gdn.value_head_dim)
    histories = [torch.empty(1, gdn.conv_history, gdn.conv_dim, dtype=model.dtype, device=model.device) for _ in layers]
    return StateCache(histories, [torch.empty(shape, dtype=wide_dtype(model.dtype), device=model.device) for _ in layers])


def fast_side(engine: Engine, device: str) -> Side:
    """The fast engine; its logits are those of its own steps, as its executor shows them to a tap.

    Of a text that it has just generated they are those of that run: decode steps by graphs. What the run did not compute, and any other text, is computed
    as one prompt.
    """
    executor: Any = engine.executor
    plain = greedy_from(engine)
    generated: list[int] = []
    shown: dict[int, NDArray[np.float64]] = {}

    @contextmanager
    def tapped(rows: dict[int, NDArray[np.float64]]) -> Iterator[None]:
        """Puts the logits [vocab_size] of every position that is computed into `rows`. No other request may run."""

        def take(plan: Any, flat: Any, first: int, tile: Any) -> None:
            positions = flat.positions[first : min(first + len(tile), int(flat.row_indptr[-1]))].tolist()
            rows.update(zip(positions, _float64(tile), strict=False))

        executor.tap = take
        try:
            yield
        finally:
            executor.tap = None

    def greedy(prompt: Sequence[int], max_tokens: int) -> list[int]:
        shown.clear()
        with tapped(shown):
            tokens = plain(prompt, max_tokens)
        generated[:] = [*prompt, *tokens]
        return tokens

    def logits(ids: Sequence[int]) -> NDArray[np.float64]:
        from twinfer.sampling import SamplingParams

        rows: dict[int, NDArray[np.float64]] = {}
        before, engine.scheduler.prefix_cache = engine.scheduler.prefix_cache, False  # what is found there is not computed
        try:
            with tapped(rows):
                engine.generate(list(ids), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        finally:
            engine.scheduler.prefix_cache = before
        same = next((i for i, (a, b) in enumerate(zip(ids, generated, strict=False)) if a != b), min(len(ids), len(generated)))
        rows |= {position: row for position, row in shown.items() if position < same}
        missing = np.full(engine.model.vocab_size, np.nan)
        return np.array([rows.get(position, missing) for position in range(len(ids))])

    return Side("fast", device, greedy, logits)


def transformers_side(model: Model, dtype: str, random_seed: int | None = None) -> Side:
    """transformers' own model, eager attention on the CPU; fp64 is its source with the fp32 casts widened. Made-up weights go through a checkpoint."""
    from transformers import DynamicCache
    from transformers.utils import logging

    from twinfer.golden.widened import load_stock, load_widened

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() if random_seed is not None else nullcontext(str(model.path)) as directory:
        if random_seed is not None:
            _write_random(model.path, Path(directory), random_seed, dtype)
        model_type = ModelConfig.from_file(Path(directory)).model_type
        theirs: Any = load_widened(Path(directory), model_type) if dtype == "float64" else load_stock(Path(directory), dtype, model_type)
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


def _write_random(model: Path, directory: Path, seed: int, dtype: str) -> None:
    """A checkpoint of made-up weights, those that twinfer's engines get from the same seed."""
    import torch
    from safetensors.torch import save_file

    from twinfer.engine.checkpoint import HEAD, random_weights
    from twinfer.engine.layout import to_stored
    from twinfer.engine.tensors import StoredForm

    config = ModelConfig.from_file(model)
    weights = random_weights(config, seed, getattr(torch, dtype))
    if config.tie_word_embeddings:
        del weights[HEAD]
    save_file(to_stored(config, weights, StoredForm()), directory / "model.safetensors", {"format": "pt"})
    shutil.copyfile(model / CONFIG, directory / CONFIG)


def opponents(wanted: Sequence[str], config: ModelConfig, device: str, dtype: str) -> list[str]:
    """The sides to hold against the reference: those that are named, else fast on a GPU and transformers where it is installed.

    Raises BadInput, ConfigError or NotAvailable for a named one that can't run here, with the remedy.
    """
    for name in wanted:
        if name not in OPPONENTS:
            raise BadInput(f"engine = {name!r}: must be one of {', '.join(OPPONENTS)}")
    if "fast" in wanted:
        choose(Backend.FAST, device, config, dtype)
    has_transformers = find_spec("transformers") is not None
    if "transformers" in wanted and not has_transformers:
        raise NotAvailable("engine = 'transformers': not installed; pip install transformers")
    if wanted:
        return [name for name in OPPONENTS if name in wanted]
    found = [] if not device.startswith("cuda") or why_not_fast(config, device, dtype) else ["fast"]
    if has_transformers:
        found.append("transformers")
    if not found:
        raise NotAvailable("only the reference is available here, there is nothing to compare it with; install transformers")
    return found
