"""Engines over the ghost executor, and the solo run that is their oracle. Not a test."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from twinfer.config import ModelConfig
from twinfer.engine.engine import Engine
from twinfer.engine.ghost import GhostExecutor, mix, next_token
from twinfer.engine.scheduler import Scheduler
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits, ceil_div
from twinfer.request import Event

VOCAB = 3  # a small alphabet, so that equal pages under different prefixes are common


def ghost_config(vocab_size: int = VOCAB) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": 4,
            "intermediate_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 2,
        },
        "ghost",
    )


def limits(
    *,
    max_batch: int = 4,
    max_step_tokens: int = 32,
    max_chunk_tokens: int | None = None,
    max_context: int = 64,
    max_step_context: int | None = None,
    page_size: int = 4,
    num_pages: int | None = None,
    num_state_slots: int = 0,
    num_snapshots: int = 0,
    snapshot_interval: int = 8192,
    look_ahead: int = 0,
) -> Limits:
    return Limits(
        max_batch=max_batch,
        max_step_tokens=max_step_tokens,
        max_chunk_tokens=max_chunk_tokens or max_step_tokens,
        warmup_tokens=1,
        max_context=max_context,
        max_step_context=max_step_context or max_batch * max_context,
        max_logit_tokens=4,
        page_size=page_size,
        num_pages=num_pages or max_batch * ceil_div(max_context, page_size),
        num_state_slots=num_state_slots,
        num_snapshots=num_snapshots,
        snapshot_interval=snapshot_interval,
        look_ahead=look_ahead,
        max_logprobs=2,
    )


class GhostEngine(Engine):
    """An engine whose executor knows every sequence's true history, so that each step compares all that it reads."""

    executor: GhostExecutor

    def __init__(self, limits: Limits, *, vocab_size: int = VOCAB, prefix_cache: bool = True, audit: str = "full", seed: int = 0) -> None:
        config = ghost_config(vocab_size)
        ledger = Ledger(limits, config, "float32")
        executor = GhostExecutor(limits, vocab_size, partial(ledger.host, owner="reference"))
        super().__init__(executor, config, limits, ledger=ledger, prefix_cache=prefix_cache, audit=audit, seed=seed)
        executor.history = self._history

    def _history(self, sequence_id: int) -> list[int]:
        present = (*self.scheduler.running(), *self.scheduler.departing())
        return next(s.tokens.tolist() for s in present if s.id == sequence_id)


def solo(prompt: Sequence[int], num_tokens: int, *, end_tokens: frozenset[int] = frozenset(), vocab_size: int = VOCAB) -> list[int]:
    """What the ghost's model writes greedily after `prompt`, computed without an engine: the oracle."""
    history = 0
    for token in prompt:
        history = mix(history, token)
    out: list[int] = []
    while len(out) < num_tokens:
        token = next_token(history, 0, 0, True, vocab_size)
        out.append(token)
        if token in end_tokens:
            break
        history = mix(history, token)
    return out


def drain(engine: Engine, max_steps: int = 10_000) -> list[Event]:
    """Steps until nothing is left; fails when that takes too long (a plan must never be empty while work is pending)."""
    events: list[Event] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events.extend(engine.step())
    raise AssertionError(f"not drained after {max_steps} steps: {engine.scheduler.num_running} running, {engine.scheduler.num_waiting} waiting")


def at_baseline(scheduler: Scheduler) -> bool:
    """Every page is free or cached, every slot and state slot is free, no copy is pending, and the pool agrees with itself."""
    scheduler.check()
    held = scheduler.pool.num_held + scheduler.states.num_held + scheduler.keeping.pool.num_pinned
    return held == 0 and scheduler.num_running == 0 and scheduler.pool.num_available == scheduler.limits.num_pages


def tokens_of(events: Sequence[Event], request_id: int, sample: int = 0) -> list[int]:
    return [t for e in events if e.request_id == request_id and e.sample == sample for t in e.tokens]
