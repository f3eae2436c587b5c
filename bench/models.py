"""What is measured: the weights of a checkpoint or of a shape with random ones, and the engines made from them. Both engines get the same tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import twinfer.golden
from twinfer.bench.shapes import SHAPES, shape_config
from twinfer.bench.workloads import Workload
from twinfer.config import ModelConfig
from twinfer.engine.checkpoint import EMBEDDING, HEAD, Checkpoint, expected_tensors
from twinfer.engine.engine import Engine
from twinfer.invariants.ledger import Ledger
from twinfer.limits import Limits, ceil_div
from twinfer.reference.executor import ReferenceExecutor

BUNDLED = Path(twinfer.golden.__file__).resolve().parent / "qwen3"


@dataclass(frozen=True, slots=True)
class Model:
    """A named shape with weights by checkpoint name; `source` is the config.json content."""

    name: str
    config: ModelConfig
    source: dict[str, Any]
    weights: dict[str, torch.Tensor]
    random_seed: int | None


def load_model(model: str, dtype: str | None = None, device: str = "cpu", seed: int = 0) -> Model:
    """`model` is a checkpoint directory, or the name of a shape, which gets random weights: the same ones for one seed, device kind and dtype."""
    if model in SHAPES:
        config = shape_config(model)
        return Model(model, config, SHAPES[model], random_weights(config, dtype or config.dtype, device, seed), seed)
    checkpoint = Checkpoint.open(model)
    path = Path(model).resolve()
    name = "bundled-qwen3" if path == BUNDLED else path.name
    source = json.loads((path / "config.json").read_text(encoding="utf-8"))
    weights = checkpoint.weights(getattr(torch, dtype or checkpoint.config.dtype), device)
    return Model(name, checkpoint.config, source, weights, None)


def random_weights(config: ModelConfig, dtype: str, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Normal weights of a trained model's usual spread (0.02) and norms of one: speed depends on shapes, not on what a model says."""
    generator = torch.Generator(device=device).manual_seed(seed)
    target = getattr(torch, dtype)
    weights = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=target, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=target, device=device).normal_(0.0, 0.02, generator=generator)
    weights.setdefault(HEAD, weights[EMBEDDING])
    return weights


def limits_for(workload: Workload, max_step_tokens: int = 8192, page_size: int = 16) -> Limits:
    """Limits under which the workload's concurrency runs at once without preemption, and not more."""
    batch, context = workload.concurrency, workload.max_context
    step_tokens = max(batch, min(max_step_tokens, batch * context))
    return Limits(
        max_batch=batch,
        max_step_tokens=step_tokens,
        max_chunk_tokens=step_tokens,
        warmup_tokens=min(step_tokens, 512),
        max_context=context,
        max_step_context=batch * context,
        max_logit_tokens=max(batch, 64),
        page_size=page_size,
        num_pages=batch * ceil_div(context, page_size),
    )


def reference_engine(model: Model, limits: Limits, *, prefix_cache: bool = True, audit: str = "step") -> Engine:
    """Our reference engine over the model's tensors, without a tokenizer."""
    dtype = str(model.weights[EMBEDDING].dtype).removeprefix("torch.")
    ledger = Ledger(limits, model.config, dtype)
    executor = ReferenceExecutor(model.config, limits, model.weights, ledger)
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
