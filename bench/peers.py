"""Peers for the load generator: an engine of ours in this process, and transformers as one would use it for a batch. No timing here."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from twinfer.bench.load import News
from twinfer.bench.models import Model
from twinfer.bench.roofline import cache_bytes_per_token
from twinfer.bench.workloads import Workload
from twinfer.engine.checkpoint import EMBEDDING
from twinfer.engine.engine import Engine
from twinfer.errors import ExecutorLost, RequestRefused
from twinfer.request import FinishReason
from twinfer.sampling import SamplingParams


class EnginePeer:
    """Drives an Engine of ours: greedy, end tokens ignored. The engine must be used by nobody else."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._key_of: dict[int, int] = {}
        self._refused: list[News] = []

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        try:
            request = self.engine.add(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
        except (RequestRefused, ExecutorLost) as error:
            self._refused.append(News(key, 0, finished=True, error=str(error)))
            return
        self._key_of[request] = key

    def poll(self) -> Sequence[News]:
        """One step of the engine."""
        news, self._refused = self._refused, []
        for event in self.engine.step():
            error = event.error
            if event.terminal and error is None and event.finish_reason not in (FinishReason.LENGTH, FinishReason.STOP):
                error = f"ended by {event.finish_reason}"
            news.append(News(self._key_of[event.request_id], len(event.tokens), event.terminal, error))
        return news


@dataclass(slots=True)
class _Waiting:
    key: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class _Batch:
    """A padded batch under way. Rows that are done are still computed, as `generate` does: nothing leaves before the last."""

    keys: list[int]
    left: list[int]
    mask: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor
    cache: Any = None


def batch_that_fits(model: Model, load: Workload) -> int:
    """Rows of a padded batch of transformers: the workload's concurrency, or on a GPU what nine tenths of its free memory hold, at least one.

    A row holds keys and values of its context, 1.3 times since torch.cat copies a layer's, and in prefill the activations of its prompt: some ten
    vectors of hidden_size and four of intermediate_size a token.
    """
    if model.device.type != "cuda":
        return load.concurrency
    config, size = model.config, model.weights[EMBEDDING].element_size()
    context = 1.3 * load.max_context * cache_bytes_per_token(config, size)
    prefill = load.prompt.high * size * (10 * config.hidden_size + 4 * config.intermediate_size)
    free = torch.cuda.mem_get_info(model.device)[0]
    return max(1, min(load.concurrency, int(0.9 * free / (context + prefill))))


class TransformersPeer:
    """Static batching over a transformers model: what is queued when the last batch ends becomes the next one, padded on the left.

    generated  token ids so far of every request, by key, when `keep` is set
    """

    def __init__(self, model: Any, max_batch: int, keep: bool = False) -> None:
        self.model, self.max_batch, self.keep = model, max_batch, keep
        self.generated: dict[int, list[int]] = {}
        self._queue: list[_Waiting] = []
        # transformers renamed the argument and the output's field; the old name warns in the new releases
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._batch: _Batch | None = None

    def submit(self, key: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._queue.append(_Waiting(key, prompt, max_tokens))

    def poll(self) -> Sequence[News]:
        """One forward of the batch: its prompts, or one token of each row."""
        if self._batch is None:
            if not self._queue:
                return []
            self._batch = self._start()
        batch = self._batch
        with torch.inference_mode():
            output = self.model(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                position_ids=batch.positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: batch.cache},
            )
            chosen = output.logits[:, -1].argmax(-1)
        batch.cache = output[self._cache_name]
        batch.ids = chosen[:, None]
        batch.positions = batch.positions[:, -1:] + 1
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch.keys), 1)], 1)
        news = []
        for row, token in enumerate(chosen.tolist()):
            if batch.left[row]:
                batch.left[row] -= 1
                if self.keep:
                    self.generated.setdefault(batch.keys[row], []).append(token)
                news.append(News(batch.keys[row], 1, finished=batch.left[row] == 0))
        if not any(batch.left):
            self._batch = None
        return news

    def _start(self) -> _Batch:
        taken, self._queue = self._queue[: self.max_batch], self._queue[self.max_batch :]
        longest = max(len(w.prompt) for w in taken)
        device = self.model.device
        ids = torch.zeros(len(taken), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, waiting in enumerate(taken):
            ids[row, longest - len(waiting.prompt) :] = torch.tensor(waiting.prompt)
            mask[row, longest - len(waiting.prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return _Batch([w.key for w in taken], [w.max_tokens for w in taken], mask.to(device), positions.to(device), ids.to(device))
