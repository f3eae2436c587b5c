"""What is measured: the weights of a checkpoint or of a shape with random ones, and the engines made from them. All engines get the same tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import twinfer.golden
from twinfer.bench.shapes import shape_config, shape_source
from twinfer.bench.workloads import Workload
from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import EMBEDDING, Checkpoint, random_weights
from twinfer.engine.engine import Engine
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits, ceil_div
from twinfer.reference.executor import ReferenceExecutor

BUNDLED = Path(twinfer.golden.__file__).resolve().parent / "qwen3"
SNAPSHOTS = 16  # of states, for prompts that are found again
# How engine.checkpoint.random_weights draws, for the notes of records.
DISTRIBUTION = "random weights (uniform, hashed from the seed, variance by fan-in)"


@dataclass(frozen=True, slots=True)
class Model:
    """A named shape with weights by checkpoint name; `source` is the config.json content."""

    name: str
    config: ModelConfig
    source: dict[str, Any]
    weights: dict[str, torch.Tensor]
    random_seed: int | None

    @property
    def dtype(self) -> str:
        """Name of the weights' dtype, which is the engines' too."""
        return str(self.weights[EMBEDDING].dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return self.weights[EMBEDDING].device


def load_model(model: str, dtype: str | None = None, device: str = "cpu", seed: int = 0) -> Model:
    """`model` is a checkpoint directory, or the name of a shape, which gets random weights: the same numbers for one seed on every device."""
    shape = shape_source(model)
    if shape is not None:
        config = shape_config(model)
        return Model(model, config, shape, random_weights(config, seed, getattr(torch, dtype or config.dtype), device), seed)
    checkpoint = Checkpoint.open(model)
    path = Path(model).resolve()
    name = "bundled-qwen3" if path == BUNDLED else path.name
    source = json.loads((path / "config.json").read_text(encoding="utf-8"))
    weights = checkpoint.weights(getattr(torch, dtype or checkpoint.config.dtype), device)
    return Model(name, checkpoint.config, source, weights, None)


def limits_for(loads: Workload | Sequence[Workload], max_step_tokens: int = 8192, *, fast: bool = False) -> Limits:
    """Limits under which each workload's concurrency runs at once without preemption, and not more: one engine serves all of `loads`.

    fast  the fast engine's: pages of 64, one step of look-ahead, logits of 256 tokens at once
    """
    listed = [loads] if isinstance(loads, Workload) else list(loads)
    page_size, look_ahead = (64, 1) if fast else (16, 0)
    batch, context = max(load.concurrency for load in listed), max(load.max_context for load in listed)
    step_context = max(load.concurrency * load.max_context for load in listed)
    step_tokens = max(batch, min(max_step_tokens, step_context))
    return Limits(
        max_batch=batch,
        max_step_tokens=step_tokens,
        max_chunk_tokens=step_tokens,
        warmup_tokens=min(step_tokens, 512),
        max_context=context,
        max_step_context=step_context,
        max_logit_tokens=256 if fast else max(batch, 64),
        page_size=page_size,
        num_pages=max(pages_at_once(load, page_size, look_ahead) for load in listed),
        look_ahead=look_ahead,
    )


def pages_at_once(load: Workload, page_size: int, look_ahead: int = 0) -> int:
    """Pages that the largest `concurrency` requests of the workload hold together; of a shared prompt, what a prefix hit takes counts once."""
    lengths = load.lengths()
    shared = (lengths[0][0] - 1) // page_size if load.shared_prompt else 0
    own = sorted((ceil_div(prompt + output + look_ahead, page_size) - shared for prompt, output in lengths), reverse=True)
    return shared + sum(own[: load.concurrency])


def with_state_slots(config: ModelConfig, limits: Limits) -> Limits:
    """`limits`, with a state slot for every row of a batch and of what it is padded to where the model keeps states, and some snapshots if it has none."""
    if not config.num_gdn_layers:
        return limits
    slots, snapshots = limits.num_state_slots or limits.bucket(limits.max_batch), limits.num_snapshots or SNAPSHOTS
    return replace(limits, num_state_slots=slots, num_snapshots=snapshots)


def reference_engine(model: Model, limits: Limits, *, prefix_cache: bool = True, audit: str = "step") -> Engine:
    """Our reference engine over the model's tensors, without a tokenizer."""
    limits = with_state_slots(model.config, limits)
    ledger = Ledger(limits, model.config, model.dtype)
    executor = ReferenceExecutor(model.config, limits, model.weights, ledger)
    return Engine(executor, model.config, limits, ledger=ledger, prefix_cache=prefix_cache, audit=audit)


def fast_engine(model: Model, limits: Limits, *, prefix_cache: bool = True, audit: str = "step", graphs: bool | None = None) -> Engine:
    """Our fast engine over the model's tensors, without a tokenizer.

    It joins projections into matrices of its own, so while `model` lives these exist twice (some 9 GB of an 8B model in bf16).
    """
    from twinfer.fast.executor import FastExecutor

    limits = with_state_slots(model.config, limits)
    ledger = Ledger(limits, model.config, model.dtype)
    executor = FastExecutor(model.config, limits, model.weights, ledger, graphs=graphs)
    return Engine(executor, model.config, limits, ledger=ledger, prefix_cache=prefix_cache, audit=audit)


def transformers_model(model: Model, attention: str = "sdpa") -> Any:
    """transformers' own class over the same tensors, in evaluation mode. `attention` is its attn_implementation."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    embedding = model.weights[EMBEDDING]
    source = {key: value for key, value in model.source.items() if key not in ("torch_dtype", "dtype", "architectures", "transformers_version")}
    config = Qwen3Config(**source, dtype=embedding.dtype)
    config._attn_implementation = attention
    with torch.device("meta"):
        made = Qwen3ForCausalLM(config)
    # Buffers (rotary frequencies) are not in the checkpoint: made again on the device, the parameters taken over without a copy.
    made.load_state_dict(model.weights, assign=True)
    with embedding.device:
        made.model.rotary_emb = type(made.model.rotary_emb)(config)
    return made.eval()
